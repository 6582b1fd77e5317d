"""Runs as one page that needs nothing beside it: what happened, what was allowed by whom, what it changed, its receipt.

Readable without its script and on paper. Foreign texts are escaped by `html.text`; the page's policy lets nothing run
but the script that stands here, and nothing be fetched.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from backplane.contract import events as kinds
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent, carried
from backplane.view.diff import changes, lines
from backplane.view.figures import count, lasting, money
from backplane.view.html import Html, join, table, tag, text
from backplane.view.picture import Picture
from backplane.view.report_files import CSS, JS
from backplane.view.text import in_workspace, printable
from backplane.view.values import about, words_of
from backplane.view.why import Diagnosis

ROWS_MAX: Final = 2_000
"""Rows of a run's story; what is left out is said."""

OUTPUT_CHARS_MAX: Final = 16 * 1024
"""Of a text: half from its beginning, half from its end."""

DIFF_LINES_MAX: Final = 5_000
DECISIONS_MAX: Final = 500

RECEIPT_BYTES_MAX: Final = 16 * 1024 * 1024
"""Longest receipt that is in the page, to be hashed there."""

CHART_COLUMNS: Final = 320


NOTHING: Final = Html("")


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a report."""

    picture: Picture
    diagnosis: Diagnosis
    story: Story
    patch: str | None
    """None where it was pruned, or nothing was changed."""
    sealed: bytes | None
    """The canonical bytes that were hashed; None where they are longer than `RECEIPT_BYTES_MAX`."""


class Row(msgspec.Struct):
    """One row of a story."""

    kind: str
    """bad, warn or nothing."""
    head: Html
    body: Html = NOTHING
    is_open: bool = False

    def drawn(self) -> Html:
        """What stands in the row."""
        if not self.body:
            return self.head
        return tag("details", tag("summary", self.head), self.body, open="" if self.is_open else None)


class Story(msgspec.Struct):
    """A run's events as rows: what was streamed is merged, a result stands with its call."""

    rows: list[Row] = []
    decisions: list[tuple[str, str, str, str, str]] = []
    """Tool, about, decision, by, reason."""
    left_out: int = 0
    _said: str = ""
    _calls: dict[str, Row] = {}
    _asked: dict[str, tuple[str, str]] = {}
    _number: int = 0

    def take(self, event: AgentEvent) -> None:
        """Add the next event."""
        event = carried(event)
        self._number += 1
        if isinstance(event, kinds.AssistantDelta):
            self._said = (self._said + event.text)[-OUTPUT_CHARS_MAX:]
            return
        add = _TOLD.get(type(event))
        if add is not None:
            add(self, event)

    def _put(self, head: Html, body: Html = NOTHING, kind: str = "", *, is_open: bool = False) -> Row:
        row = Row(kind, join((tag("span", text(self._number), class_="no mono"), head)), body, is_open)
        if len(self.rows) < ROWS_MAX:
            self.rows.append(row)
        else:
            self.left_out += 1
        return row

    def _message(self, event: kinds.AssistantMessage) -> None:
        self._said = ""
        self._put(tag("span", text(cut(event.text)), class_="message"))

    def _called(self, event: kinds.ToolCall) -> None:
        what = in_workspace(about(event.input))
        head = join((tag("b", text(event.tool_name)), tag("code", text(what[:200]))), " ")
        row = self._put(head, _pre(_json(event.input)) if event.input not in ({}, None) else NOTHING)
        self._calls[event.tool_use_id or event.tool_name] = row

    def _resulted(self, event: kinds.ToolResult) -> None:
        row = self._calls.pop(event.tool_use_id or event.tool_name, None)
        words = _pre(cut(words_of(event.output)))
        mark = tag("span", text("failed" if event.is_error else "done"), class_="bad" if event.is_error else "good")
        if row is None:
            row = self._put(join((tag("b", text(event.tool_name)), mark), " "))
        else:
            row.head = join((row.head, mark), " ")
        row.body = join((row.body, words))
        if event.is_error:
            row.kind, row.is_open = "bad", True

    def _ran(self, event: kinds.CommandExecuted) -> None:
        good = event.exit_code == 0
        code = "ended by a signal" if event.exit_code is None else f"exit {event.exit_code}"
        head = join(
            (tag("code", text(in_workspace(event.command)[:400])), tag("span", text(code), class_=_tone(good))), " "
        )
        shown = _pre(cut(event.output_preview)) if event.output_preview else NOTHING
        self._put(head, shown, "" if good else "bad", is_open=not good)

    def _changed(self, event: kinds.FileChanged) -> None:
        self._put(join((text("file"), tag("code", text(in_workspace(event.path))), text(event.summary)), " "))

    def _asks(self, event: kinds.Approval) -> None:
        what = in_workspace(about(event.body.get("input")) or str(event.body.get("question") or event.message))
        self._asked[str(event.body.get("id"))] = str(event.body.get("name") or event.body.get("kind") or ""), what
        self._put(text(f"{event.message}: {what}"[:400]), kind="warn")

    def _answered(self, event: kinds.ApprovalAnswered) -> None:
        tool, what = self._asked.pop(str(event.body.get("id")), ("", ""))
        decision, by = str(event.body.get("decision")), str(event.body.get("by"))
        if len(self.decisions) < DECISIONS_MAX:
            self.decisions.append((tool, what[:400], decision, by, str(event.body.get("reason") or "")))
        self._put(text(event.message), kind="warn" if decision == "deny" else "")

    def _failed(self, event: kinds.Failed) -> None:
        self._put(tag("span", text(event.message), class_="bad"), kind="bad")

    def _noted(self, event: Any) -> None:
        self._put(tag("span", text(event.message), class_="dim"))


_TOLD: Final[dict[type[Any], Any]] = {
    kinds.AssistantMessage: Story._message,
    kinds.ToolCall: Story._called,
    kinds.ToolResult: Story._resulted,
    kinds.CommandExecuted: Story._ran,
    kinds.FileChanged: Story._changed,
    kinds.Approval: Story._asks,
    kinds.ApprovalAnswered: Story._answered,
    kinds.Failed: Story._failed,
    kinds.RunStarted: Story._noted,
    kinds.RunCompleted: Story._noted,
    kinds.RetryReported: Story._noted,
    kinds.CheckpointReported: Story._noted,
    kinds.LossReported: Story._noted,
    kinds.Warned: Story._noted,
}


def cut(whole: str) -> str:
    """A long text's beginning and end, with what is left out between them counted."""
    half = OUTPUT_CHARS_MAX // 2
    if len(whole) <= OUTPUT_CHARS_MAX:
        return whole
    return f"{whole[:half]}\n… {len(whole) - 2 * half} characters are left out …\n{whole[-half:]}"


def _tone(good: bool) -> str:
    return "good" if good else "bad"


def _pre(words: str) -> Html:
    return tag("pre", text(words)) if words.strip() else NOTHING


def _json(value: Json) -> str:
    return cut(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


# The page -------------------------------------------------------------------------------------------------------------


def page(runs: Sequence[Shown]) -> Iterator[str]:
    """The whole page of one run, or of two side by side, in pieces."""
    policy = policy_of(JS, CSS)
    title = " and ".join(_title(run) for run in runs)
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{text(policy)}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"{tag('title', text(title))}<style>{CSS}</style></head><body>"
    find = "Search the story: words, all of them ( / )"
    yield (
        '<div class="screen" role="search"><input type="search" id="search" '
        f'aria-label="{text(find)}" placeholder="{text(find)}"> '
        '<span id="count" class="dim" role="status"></span></div>'
    )
    yield f'<main class="{"two" if len(runs) > 1 else "one"}">'
    for number, run in enumerate(runs):
        yield '<article class="run">'
        yield from _parts(run, f"r{number}")
        yield "</article>"
    yield f"</main><script>{JS}</script></body></html>\n"


def policy_of(script: str, style: str, more: str = "") -> str:
    """The policy of a page in which nothing runs but this script, and nothing is fetched beyond `more`."""
    own = f"script-src '{_hash(script)}'; style-src '{_hash(style)}'"
    return f"default-src 'none'; {own}; img-src data:; base-uri 'none'; form-action 'none'{more}"


def _hash(whole: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(whole.encode()).digest()).decode()}"


def _title(run: Shown) -> str:
    return f"{run.picture.task[:80] or 'a run'} — {_verdict(run.picture)[0]}"


def _verdict(picture: Picture) -> tuple[str, str]:
    """How it ended in a word, and its tone."""
    if picture.ended is None:
        return "cut off", "bad"
    tone = {"complete": "good", "partial": "warn"}.get(picture.ended.outcome, "bad")
    return picture.ended.outcome, tone


def _parts(run: Shown, place: str) -> Iterator[Html]:
    yield _head(run)
    yield _why(run)
    yield _section("What it said", tag("div", text(cut(run.picture.message)), class_="message"), run.picture.message)
    yield _section("What it changed", _diff(run.patch), run.patch or "")
    yield _story(run.story)
    yield _section("Decisions", _decisions(run.story), run.story.decisions)
    yield _section("Claimed and seen", _claims(run), run.picture.ended)
    yield _section("Usage", _usage(run), "always")
    yield _section("What held it", _enforcement(run), run.picture.ended)
    yield _receipt(run, place)


def _section(title: str, inner: Html, there: object) -> Html:
    return tag("section", tag("h2", text(title)), inner) if there and inner else NOTHING


def _head(run: Shown) -> Html:
    picture = run.picture
    word, tone = _verdict(picture)
    end = picture.ended
    facts = {
        "run": picture.run_id,
        "backend": picture.backend + (f", model {picture.model}" if picture.model else ""),
        "folder": f"{picture.root} ({picture.mode})" if picture.root else "",
        "began": picture.started_at,
        "took": lasting(end.duration_ms) if end is not None and end.duration_ms is not None else "?",
        "cost": money(picture.cost_usd_micros),
        "did": f"calls of tools: {picture.calls}, failed: {picture.calls_failed}, denied: {picture.denials}",
    }
    rows = [part for name, value in facts.items() if value for part in (tag("dt", text(name)), tag("dd", text(value)))]
    return join(
        (
            tag("p", tag("span", text(word), class_=f"chip {tone}")),
            tag("h1", text(cut(picture.task) or "(its task is not known here)")),
            tag("dl", *rows, class_="facts"),
        )
    )


def _why(run: Shown) -> Html:
    found = run.diagnosis
    if found.kind in ("nothing", "tool_works"):
        return NOTHING
    evidence = [
        tag("li", text(f"event {row.event}: " if row.event is not None else ""), text(row.text))
        for row in found.evidence
    ]
    steps = [tag("li", tag("b", text("next: ")), text(step)) for step in found.next]
    likely = "" if found.sure else "probably: "
    return tag(
        "section",
        tag("h2", text("Why")),
        tag("p", tag("b", text(likely + found.verdict))),
        tag("ul", *evidence, *steps),
    )


def _diff(patch: str | None) -> Html:
    if not patch:
        return NOTHING
    whole = patch.splitlines()
    shown = [tag("span", text(line.text) or Html("&nbsp;"), class_=line.kind) for line in lines(whole[:DIFF_LINES_MAX])]
    more = len(whole) - DIFF_LINES_MAX
    rest = tag("p", text(f"{more} more lines are in the patch file"), class_="dim") if more > 0 else NOTHING
    files = [
        (
            tag("code", text(file.path)),
            tag("span", text(f"+{file.added}"), class_="good"),
            tag("span", text(f"−{file.removed}"), class_="bad"),
        )
        for file in changes(whole)[:DECISIONS_MAX]
    ]
    return join((table(("file", "added", "removed"), files, "Changed files"), tag("pre", *shown, class_="diff"), rest))


def _story(story: Story) -> Html:
    rows = []
    for row in story.rows:
        rows.append(tag("div", row.drawn(), class_=f"row {row.kind}".strip(), tabindex="-1"))
    more = tag("p", text(f"{story.left_out} more rows: backplane receipts show RUN"), class_="dim")
    return tag("section", tag("h2", text("What happened")), *rows, more if story.left_out else NOTHING)


def _decisions(story: Story) -> Html:
    rows = [
        (
            text(tool),
            tag("code", text(what)),
            tag("b", text(decision), class_=_tone(decision != "deny")),
            text(by),
            text(reason),
        )
        for tool, what, decision, by, reason in story.decisions
    ]
    return table(("tool", "about", "decision", "by", "reason"), rows, "Each question, who answered it, and how")


def _claims(run: Shown) -> Html:
    end = run.picture.ended
    found = end.added.get("reconciliation") if end is not None else None
    if not isinstance(found, dict) or not found:
        return NOTHING
    rows = [
        (text(name.replace("_", " ")), text(", ".join(map(str, value[:50])) if isinstance(value, list) else value))
        for name, value in found.items()
    ]
    return table(("what", "which"), rows, "What the agent says it changed, beside what was seen")


def _usage(run: Shown) -> Html:
    usage = run.picture.usage
    bars = [
        ("input", usage.input_tokens),
        ("output", usage.output_tokens),
        ("read from cache", usage.cache_read_tokens),
        ("written to cache", usage.cache_write_tokens),
    ]
    most = max((value or 0 for _, value in bars), default=0)
    drawn = []
    for number, (name, value) in enumerate(bars):
        wide = round(CHART_COLUMNS * (value or 0) / most) if most else 0
        drawn.append(
            f'<text x="0" y="{14 + 20 * number}">{text(name)}</text>'
            f'<rect x="110" y="{4 + 20 * number}" width="{wide}" height="12"></rect>'
            f'<text x="{116 + wide}" y="{14 + 20 * number}">{text(count(value))}</text>'
        )
    chart = Html(
        f'<svg role="img" viewBox="0 0 {CHART_COLUMNS + 180} 84" width="{CHART_COLUMNS + 180}" height="84">'
        f"<title>tokens by kind; the table has the same</title>{''.join(drawn)}</svg>"
    )
    rows = [(text(name), text("?" if value is None else value)) for name, value in bars]
    rows.append((text("cost"), text(money(run.picture.cost_usd_micros))))
    return join((chart, table(("tokens", "count"), rows, "Unknown is ?, and not nothing")))


def _enforcement(run: Shown) -> Html:
    end = run.picture.ended
    held = end.added.get("enforcement") if end is not None else None
    if not isinstance(held, dict):
        return NOTHING
    kinds_of = held.get("kinds")
    rows = [
        (text(name), tag("b", text(_member(kind, "state"))), text(_member(kind, "gap") or _member(kind, "why")))
        for name, kind in (kinds_of.items() if isinstance(kinds_of, dict) else ())
    ]
    rows.append((text("approvals"), tag("b", text(held.get("approvals", "?"))), NOTHING))
    found = held.get("rules")
    rules = [
        (
            text(_member(rule, "rule")),
            tag("code", text(_member(rule, "pattern"))),
            tag("b", text(_member(rule, "layer"))),
            text(_member(rule, "gap")),
        )
        for rule in (found if isinstance(found, list) else ())[:DECISIONS_MAX]
    ]
    broken = held.get("violations")
    violations = [
        tag("li", text(f"{_member(row, 'rule')}: {_member(row, 'reason')}"), class_="bad")
        for row in (broken if isinstance(broken, list) else ())[:DECISIONS_MAX]
    ]
    return join(
        (
            tag("ul", *violations) if violations else NOTHING,
            table(("what", "state", "what it leaves open"), rows, f"Isolation: {held.get('isolation', '?')}"),
            table(("rule", "pattern", "held by", "what it leaves open"), rules, "Rules of the policy")
            if rules
            else NOTHING,
        )
    )


def _member(value: object, name: str) -> str:
    found = value.get(name) if isinstance(value, dict) else None
    return "" if found is None else str(found)


def _receipt(run: Shown, place: str) -> Html:
    end = run.picture.ended
    if end is None:
        return NOTHING
    short = run.picture.run_id[:8]
    said = tag("p", text("sealed: "), tag("code", text(end.sha256)))
    if run.sealed is None:
        note = f"the receipt is too long for this page; backplane receipts verify {short}"
        return tag("section", tag("h2", text("Receipt")), said, tag("p", text(note), class_="dim"))
    packed = base64.b64encode(gzip.compress(run.sealed, mtime=0)).decode()
    check = tag("button", text("hash it here"), type="button", data_check=place, data_sealed=end.sha256)
    told = tag("span", id=f"{place}-told", role="status")
    copy = Html(f'<script type="application/gzip" id="{place}">{packed}</script>')
    note = tag("p", text(f"or with the store: backplane receipts verify {short}"), class_="dim")
    return tag(
        "section", tag("h2", text("Receipt")), said, tag("p", check, Html(" "), told, class_="screen"), note, copy
    )


# Other forms ----------------------------------------------------------------------------------------------------------


def markdown(runs: Iterable[Shown]) -> Iterator[str]:
    """The runs as Markdown, for the summary of a CI step."""
    for run in runs:
        picture, end = run.picture, run.picture.ended
        mark = {"good": "✅", "warn": "⚠️"}.get(_verdict(picture)[1], "❌")
        yield f"### {mark} {_plain(picture.task[:120] or picture.run_id)}\n\n"
        took = lasting(end.duration_ms) if end is not None and end.duration_ms is not None else "?"
        yield "| outcome | backend | took | tokens in / out | cost |\n|---|---|---|---|---|\n"
        tokens = f"{count(picture.usage.input_tokens)} / {count(picture.usage.output_tokens)}"
        cells = (_verdict(picture)[0], picture.backend, took, tokens, money(picture.cost_usd_micros))
        yield f"| {' | '.join(map(_plain, cells))} |\n\n"
        if run.diagnosis.kind not in ("nothing", "tool_works"):
            yield f"**{_plain(run.diagnosis.verdict)}**\n\n"
            yield from (f"- {_plain(row.text)}\n" for row in run.diagnosis.evidence)
            yield "\n"
        for file in changes(run.patch.splitlines())[:50] if run.patch else ():
            yield f"- {_plain(file.path)} +{file.added} −{file.removed}\n"
        yield f"\nrun {_plain(picture.run_id)}, receipt {_plain(end.sha256 if end is not None else 'none')}\n\n"


def _plain(foreign: str) -> str:
    """A foreign text on one line of Markdown, with nothing that Markdown or HTML acts on."""
    shown = html.escape(printable(" ".join(foreign.split())), quote=False)
    return "".join(f"\\{character}" if character in "\\`*_[]|~#" else character for character in shown)


def junit(runs: Sequence[Shown]) -> Iterator[str]:
    """The runs as a test report that CI systems read: a run that is not complete is a failure."""
    bad = sum(_verdict(run.picture)[1] != "good" for run in runs)
    yield '<?xml version="1.0" encoding="UTF-8"?>\n'
    yield f'<testsuite name="backplane" tests="{len(runs)}" failures="{bad}">\n'
    for run in runs:
        picture, end = run.picture, run.picture.ended
        seconds = (end.duration_ms or 0) / 1000 if end is not None else 0
        name, backend = text(picture.task[:200] or picture.run_id), text(picture.backend)
        yield f'  <testcase classname="{backend}" name="{name}" time="{seconds:.3f}">'
        if _verdict(picture)[1] != "good":
            told = text("\n".join(row.text for row in run.diagnosis.evidence))
            yield f'<failure message="{text(run.diagnosis.verdict)}">{told}</failure>'
        yield f"<system-out>run {text(picture.run_id)}</system-out></testcase>\n"
    yield "</testsuite>\n"
