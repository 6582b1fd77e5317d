"""Runs as one page that needs nothing beside it: what happened, what was allowed by whom, what it changed, its receipt.

Readable without its script and on paper. Foreign texts are escaped by `html.text`; the page's policy lets nothing run
but the script that stands here, and nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from backplane.contract.receipt import RunFindings, failed_on, findings_of
from backplane.routing.intervals import Comparison
from backplane.view import compared
from backplane.view.charts import spending, timeline, tokens
from backplane.view.diff import changes, lines
from backplane.view.figures import count, lasting, money, standing
from backplane.view.findings import outcome_words, remarks
from backplane.view.html import Html, join, said, table, tag, text
from backplane.view.picture import Picture
from backplane.view.report_files import CSS, JS
from backplane.view.story import DECISIONS_MAX, NOTHING, Story, cut, tone
from backplane.view.text import in_workspace, printable
from backplane.view.values import as_list, as_object
from backplane.view.why import Diagnosis

DIFF_LINES_MAX: Final = 5_000

FALSE_MAX: Final = 20
"""False claims that are shown; `receipts audit` has more."""

OMISSIBLE: Final = ("outputs", "prompts", "paths")
"""Kinds of content that `report --omit` takes out of a page."""


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a report."""

    picture: Picture
    state: str
    """live, cut_off or ended, as the list of runs has it."""
    diagnosis: Diagnosis
    story: Story
    patch: str | None
    """None where it was pruned, or nothing was changed."""
    compared: Comparison | None = None
    """The comparison that the run was part of."""


# The page -------------------------------------------------------------------------------------------------------------


def page(runs: Sequence[Shown]) -> Iterator[str]:
    """The whole page of one run, or of two side by side, in pieces."""
    policy = policy_of(JS, CSS)
    title = join((run.story.hidden(text(_title(run))) for run in runs), " and ")
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{text(policy)}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"{tag('title', title)}<style>{CSS}</style></head><body>"
    find = "Search the story: words, all of them ( / )"
    yield (
        '<div class="screen" role="search"><input type="search" id="search" '
        f'aria-label="{text(find)}" placeholder="{text(find)}"> '
        '<span id="count" class="dim" role="status"></span></div>'
    )
    yield f'<main class="{"two" if len(runs) > 1 else "one"}">'
    for run in runs:
        yield '<article class="run">'
        yield from map(run.story.hidden, _parts(run))
        yield "</article>"
    yield f"</main><script>{JS}</script></body></html>\n"


def policy_of(script: str, style: str, more: str = "") -> str:
    """The policy of a page in which nothing runs but this script, and nothing is fetched beyond `more`."""
    own = f"script-src '{_hash(script)}'; style-src '{_hash(style)}'"
    return f"default-src 'none'; {own}; img-src data:; base-uri 'none'; form-action 'none'{more}"


def _hash(whole: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(whole.encode()).digest()).decode()}"


def _title(run: Shown) -> str:
    return f"{_task(run)[:80]} — {_verdict(run)[0]}"


def _verdict(run: Shown) -> tuple[str, str]:
    """How a run stands or ended in a word, and its tone: good, warn, bad, or dim for a live one."""
    ended = run.picture.ended
    word, tone = standing(
        run.state, ended.outcome if ended is not None else None, None, waits=run.picture.waits is not None
    )
    if ended is not None and run.state == "ended":
        words = outcome_words(word, findings_of(ended.added))
        word, tone = words, "warn" if tone == "good" and words != word else tone
    return word, _TONES.get(tone, tone)


def _remarks(run: Shown) -> list[str]:
    ended = run.picture.ended
    return remarks(run.picture.run_id, ended.outcome, ended.added) if ended is not None else []


def _failure(run: Shown) -> str:
    """Say why a run counts as failed in a test report; empty if it does not."""
    ended = run.picture.ended
    if ended is None or ended.outcome != "complete":
        return run.diagnosis.verdict
    found = failed_on(ended.added)
    return f"complete, but --fail-on {','.join(found)}" if found else ""


_TONES: Final = {"live": "dim"}
"""The page's words for tones, where they are others."""


def _parts(run: Shown) -> Iterator[Html]:
    end = run.picture.ended
    yield _head(run)
    yield _why(run)
    message = "" if "prompts" in run.story.omit else cut(in_workspace(run.picture.message))
    yield _section("What it said", tag("div", said(message), class_="message"), message)
    if run.compared is not None:
        yield _section("Compared", compared.drawn(run.compared, run.picture.run_id), "always")
    yield _section("What it changed", _diff(run.patch), run.patch or "")
    yield _section("When", _when(run), run.story.bars)
    yield from _story(run)
    yield _section("Decisions", _decisions(run), run.story.decisions)
    yield _section("Claimed and seen", _claims(run), end)
    yield _section("Usage", _usage(run), "always")
    yield _section("What held it", _enforcement(run), end)
    yield _receipt(run)


def _section(title: str, inner: Html, there: object) -> Html:
    return tag("section", tag("h2", text(title)), inner) if there and inner else NOTHING


def _head(run: Shown) -> Html:
    picture = run.picture
    word, tone = _verdict(run)
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
            tag("h1", text(_task(run))),
            *(tag("p", text(line), class_="warn") for line in _remarks(run)),
            tag("dl", *rows, class_="facts"),
        )
    )


def _task(run: Shown) -> str:
    if "prompts" in run.story.omit:
        return "(its task is left out)"
    return cut(run.picture.task) or "(its task is not known here)"


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


def _when(run: Shown) -> Html:
    span = _span(run)
    return timeline(run.story.bars, *span) if span is not None else NOTHING


def _span(run: Shown) -> tuple[int, int] | None:
    """When the run began and ended, as its charts have it."""
    story, end = run.story, run.picture.ended
    if story.began_ms is None or story.last_ms is None:
        return None
    lasted_ms = end.duration_ms if end is not None and end.duration_ms is not None else 0
    # Events whose times are made up must not squeeze the rest: the chart ends with the last of them.
    last_ms = max(story.last_ms, story.began_ms)
    if 0 < last_ms - story.began_ms < lasted_ms:
        last_ms = story.began_ms + lasted_ms
    return story.began_ms, last_ms


def _story(run: Shown) -> Iterator[Html]:
    yield Html('<section class="story"><h2>What happened</h2>')
    for row in run.story.rows:
        yield tag("div", row.drawn(), class_=f"row {row.kind}".strip(), tabindex="-1")
    if run.story.beyond:
        told = f"{run.story.beyond} more rows are in the receipt; backplane report --full draws them"
        yield tag("p", text(told), class_="dim")
    yield Html("</section>")


def _decisions(run: Shown) -> Html:
    end = run.picture.ended
    rules = as_list(as_object(end.added.get("enforcement") if end is not None else None).get("rules"))
    # A policy's reason quotes the pattern of its rule.
    layers = {f"'{_member(rule, 'pattern')}'": _member(rule, "layer") for rule in rules}
    rows = [
        (
            text(tool),
            tag("code", text(what)),
            tag("b", text(decision), class_=tone(decision != "deny")),
            text(by),
            text(next((layer for quoted, layer in layers.items() if by == "policy" and quoted in reason), "")),
            text(reason),
        )
        for tool, what, decision, by, reason in run.story.decisions
    ]
    return table(
        ("tool", "about", "decision", "by", "layer", "reason"), rows, "Each question, who answered it, and how"
    )


def _claims(run: Shown) -> Html:
    """What the agent says and what was seen, each in a column of its own."""
    added = run.picture.ended.added if run.picture.ended is not None else {}
    claimed, found = as_object(added.get("claimed")), as_object(added.get("reconciliation"))
    verdicts = ("true", "false", "not_seen", "unwitnessed")
    counts = [
        (text(kind), *(text(_member(by, verdict) or "0") for verdict in verdicts))
        for kind, by in as_object(claimed.get("counts")).items()
    ]
    false, not_seen = (
        [
            tuple(text(_member(row, name)) for name in ("kind", "event", "claimed", "seen"))
            for row in as_list(claimed.get(verdict))[:FALSE_MAX]
        ]
        for verdict in ("false", "not_seen")
    )
    if unnamed := as_list(claimed.get("unexplained")):
        found = {**found, "changed_and_named_by_no_event": unnamed}
    differ = [
        (text(name.replace("_", " ")), text(", ".join(map(str, value[:50])) if isinstance(value, list) else value))
        for name, value in found.items()
    ]
    tables = (
        (
            ("kind of claim", "seen to be true", "seen to be false", "not seen", "no witness"),
            counts,
            "Claims of the agent, counted",
        ),
        (("kind", "event", "claimed", "seen"), false, "Claims that are false"),
        (("kind", "event", "claimed", "seen"), not_seen, "Claims that were not seen"),
        (("what", "which"), differ, "Where the agent's word and the files differ"),
    )
    return join(table(head, rows, label) for head, rows, label in tables if rows)


def _usage(run: Shown) -> Html:
    chart, bars = tokens(run.picture.usage)
    rows = [(text(name), text("?" if value is None else value)) for name, value in bars]
    rows.append((text("cost"), text(money(run.picture.cost_usd_micros))))
    span = _span(run)
    curve = spending(run.picture.curve, *span) if span is not None else NOTHING
    return join((curve, chart, table(("tokens", "count"), rows, "Unknown is ?, and not nothing")))


def _enforcement(run: Shown) -> Html:
    end = run.picture.ended
    held = as_object(end.added.get("enforcement") if end is not None else None)
    if not held:
        return NOTHING
    rows = [
        (text(name), tag("b", text(_member(kind, "state"))), text(_member(kind, "gap") or _member(kind, "why")))
        for name, kind in as_object(held.get("kinds")).items()
    ]
    if proxy := as_object(end.added.get("key_proxy") if end is not None else None):
        rows.append((text("model's key"), tag("b", text(_member(proxy, "state"))), text(_member(proxy, "gap"))))
    rows.append((text("approvals"), tag("b", text(held.get("approvals", "?"))), NOTHING))
    rules = [
        (
            text(_member(rule, "rule")),
            tag("code", text(_member(rule, "pattern"))),
            tag("b", text(_member(rule, "layer"))),
            text(_member(rule, "gap")),
        )
        for rule in as_list(held.get("rules"))[:DECISIONS_MAX]
    ]
    violations = [
        tag("li", text(f"{_member(row, 'rule')}: {_member(row, 'reason')}"), class_="bad")
        for row in as_list(held.get("violations"))[:DECISIONS_MAX]
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


def _receipt(run: Shown) -> Html:
    end = run.picture.ended
    if end is None:
        return NOTHING
    sealed = tag("p", text("sealed: "), tag("code", text(end.sha256)))
    check = tag("p", text(f"check it: backplane receipts verify {run.picture.run_id[:8]}"), class_="dim")
    return tag("section", tag("h2", text("Receipt")), sealed, check)


# Other forms ----------------------------------------------------------------------------------------------------------


def markdown(runs: Iterable[Shown]) -> Iterator[str]:
    """The runs as Markdown, for the summary of a CI step."""
    for run in runs:
        picture, end = run.picture, run.picture.ended
        word, tone = _verdict(run)
        mark = {"good": "✅", "warn": "⚠️", "dim": "⏳"}.get(tone, "❌")
        yield f"### {mark} {_plain(picture.task[:120] or picture.run_id)}\n\n"
        took = lasting(end.duration_ms) if end is not None and end.duration_ms is not None else "?"
        yield "| outcome | backend | took | tokens in / out | cost |\n|---|---|---|---|---|\n"
        tokens = f"{count(picture.usage.input_tokens)} / {count(picture.usage.output_tokens)}"
        cells = (word, picture.backend, took, tokens, money(picture.cost_usd_micros))
        yield f"| {' | '.join(map(_plain, cells))} |\n\n"
        yield from (f"⚠️ {_plain(line)}\n\n" for line in _remarks(run))
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
    """The runs as a test report that CI systems read.

    A run that ended incomplete is a failure, so is a complete one with a finding of its `fail_on`; a live one is
    skipped. Other findings are properties.
    """
    skipped = sum(run.state == "live" for run in runs)
    bad = sum(run.state != "live" and bool(_failure(run)) for run in runs)
    yield '<?xml version="1.0" encoding="UTF-8"?>\n'
    yield f'<testsuite name="backplane" tests="{len(runs)}" failures="{bad}" skipped="{skipped}">\n'
    for run in runs:
        picture, end = run.picture, run.picture.ended
        seconds = (end.duration_ms or 0) / 1000 if end is not None else 0
        name, backend = text(picture.task[:200] or picture.run_id), text(picture.backend)
        yield f'  <testcase classname="{backend}" name="{name}" time="{seconds:.3f}">'
        properties = [*_properties(run)]
        yield f"<properties>{''.join(properties)}</properties>" if properties else ""
        if run.state == "live":
            yield '<skipped message="running: it has not ended yet"/>'
        elif failure := _failure(run):
            told = text("\n".join([*(row.text for row in run.diagnosis.evidence), *_remarks(run)]))
            yield f'<failure message="{text(failure)}">{told}</failure>'
        lines = [f"run {picture.run_id}", *([_verdict(run)[0]] if end is not None else []), *_remarks(run)]
        yield f"<system-out>{text(chr(10).join(lines))}</system-out></testcase>\n"
    yield "</testsuite>\n"


def _properties(run: Shown) -> Iterator[str]:
    """Yield a run's findings as properties of its test case."""
    found = findings_of(run.picture.ended.added) if run.picture.ended is not None else RunFindings()
    for name, value in msgspec.structs.asdict(found).items():
        if value:
            yield f'<property name="{name.replace("_", "-")}" value="{value}"/>'
    for line in _remarks(run):
        yield f'<property name="remark" value="{text(line)}"/>'
