"""Draws a run as HTML: the page of `report`, and the same parts one by one for the desk of `web`.

The page needs no other file. It is readable without its script and on paper. Foreign texts are escaped by `html.text`;
the page's policy allows only the script and the style that stand in it, and fetches nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from typing import Any, Final

import msgspec

from backplane.contract.receipt import findings_of
from backplane.view import live
from backplane.view.diff import changes
from backplane.view.figures import count, elapsed, lasting, milliseconds, money, standing
from backplane.view.findings import outcome_words, remarks
from backplane.view.html import Html, join, line, said, table, tag, text
from backplane.view.picture import Picture
from backplane.view.rows import Story, StoryRow, cut
from backplane.view.text import in_workspace
from backplane.view.values import as_list, as_object
from backplane.view.why import Diagnosis
from backplane.view.why_kinds import HEALTHY

DIFF_LINES_MAX: Final = 5_000
"""Lines of a patch on one page; of further files the page has the name and the numbers."""
OPEN_LINES_MAX: Final = 300
"""Lines of a patch that are unfolded at first."""
ROWS_MAX: Final = 500
"""Rows of one table."""

NOTHING: Final = Html("")


def asset(name: str, package: str = "backplane.view") -> str:
    """Return a style or a script that is shipped beside the code."""
    return files(package).joinpath(name).read_text("utf-8")


CSS: Final = asset("page.css")
JS: Final = asset("search.js")


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """One run to draw."""

    picture: Picture
    state: str
    """live, cut_off or ended, as the list of runs has it."""
    diagnosis: Diagnosis | None
    """None for a run whose state explains itself."""
    rows: Story
    patch: str | None = None
    """None if it was pruned, or nothing was changed."""
    now_ms: int = 0
    """The time now, for the age of a live run."""

    @property
    def added(self) -> dict[str, Any]:
        """All that the control plane added to the receipt (`usage_raw.backplane`)."""
        return self.picture.ended.added if self.picture.ended is not None else {}


def page(runs: Sequence[Shown]) -> Iterator[str]:
    """Yield the whole page of one run, or of two side by side, in pieces."""
    title = " and ".join(f"{run.picture.task[:80]} — {verdict(run)[0]}" for run in runs)
    find = "Search the events for all these words ( / )"
    yield head_of(title, CSS, policy_of(JS, CSS))
    yield (
        f'<div class="report screen" role="search"><input type="search" id="search" aria-label="{find}" '
        f'placeholder="{find}"> <span id="count" class="dim" role="status"></span></div>'
        f'<main class="report{" two" if len(runs) > 1 else ""}">'
    )
    for run in runs:
        yield '<article class="run">'
        yield from (tag("section", part(name, run), data_part=name) for name in PARTS)
        yield "</article>"
    yield f"</main><script>{JS}</script></body></html>\n"


def head_of(title: str, style: str, policy: str) -> str:
    """Return a document up to the beginning of its body."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{text(policy)}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"{tag('title', text(title))}<style>{style}</style></head><body>"
    )


def policy_of(script: str, style: str, more: str = "") -> str:
    """Return the policy that runs this script only, and fetches nothing but what `more` allows."""
    scripts, styles = (base64.b64encode(hashlib.sha256(whole.encode()).digest()).decode() for whole in (script, style))
    own = f"script-src 'sha256-{scripts}'; style-src 'sha256-{styles}'"
    return f"default-src 'none'; {own}; img-src data:; base-uri 'none'; form-action 'none'{more}"


def verdict(run: Shown) -> tuple[str, str]:
    """Return how a run stands or ended in a word, and its tone: good, warn, bad, or dim while it runs."""
    ended = run.picture.ended
    waits = run.picture.waits is not None
    word, tone = standing(run.state, ended.outcome if ended is not None else None, None, waits=waits)
    if ended is not None and run.state == "ended":
        words = outcome_words(word, findings_of(ended.added))
        word, tone = words, "warn" if tone == "good" and words != word else tone
    return word, "dim" if tone == "live" else tone


def remarks_of(run: Shown) -> list[str]:
    """Return the remarks on an ended run that stand beside its outcome."""
    ended = run.picture.ended
    return remarks(run.picture.run_id, ended.outcome, ended.added) if ended is not None else []


def part(name: str, run: Shown) -> Html:
    """Draw one of `PARTS`, with its title; nothing if the run has nothing to say there."""
    title, draw = PARTS[name]
    inner, head = draw(run), tag("h2", text(title))
    if not inner or not title:
        return inner
    return tag("details", tag("summary", head), inner) if name in FOLDED else join(head, inner)


def facts_of(picture: Picture, took: str) -> dict[str, str]:
    """Return what a page and `show` say of a run beside its task: label → text, which is foreign and may be empty."""
    usage = picture.usage
    cached = f" ({count(usage.cache_read_tokens)} cached)" if usage.cache_read_tokens is not None else ""
    return {
        "backend": picture.backend + (f", {picture.model}" if picture.model else ""),
        "took": took,
        "tokens": f"{count(usage.input_tokens)} in{cached}, {count(usage.output_tokens)} out",
        "cost": money(picture.cost_usd_micros),
        "calls": f"{picture.calls}, failed {picture.calls_failed}, denied {picture.denials}",
        "began": f"{picture.started_at[:19].replace('T', ' ')} UTC" if picture.started_at else "",
        "folder": f"{picture.root} ({picture.mode})" if picture.root else "",
        "run": picture.run_id,
    }


def _head(run: Shown) -> Html:
    picture = run.picture
    word, tone = verdict(run)
    facts = facts_of(picture, took_of(run))
    rows = [tag("div", tag("dt", text(name)), tag("dd", text(value))) for name, value in facts.items() if value]
    return join(
        tag("span", text(word), class_=f"chip {tone}"),
        tag("h1", text(cut(picture.task) or "(task unknown)")),
        *(tag("p", text(remark), class_="warn") for remark in remarks_of(run)),
        tag("dl", *rows, class_="facts"),
    )


def took_of(run: Shown) -> str:
    """Return how long a run took, or has lasted so far; `?` if that is unknown."""
    ended, began_ms = run.picture.ended, milliseconds(run.picture.started_at)
    if ended is not None:
        return lasting(ended.duration_ms) if ended.duration_ms is not None else "?"
    return elapsed((run.now_ms - began_ms) // 1000) if run.state == "live" and began_ms is not None else "?"


def _why(run: Shown) -> Html:
    found = run.diagnosis
    if found is None or found.kind in HEALTHY:
        return NOTHING
    evidence = [
        tag("li", text(f"event {row.event}: " if row.event is not None else ""), text(row.text))
        for row in found.evidence
    ]
    steps = [tag("li", tag("b", text("next: ")), text(step)) for step in found.next]
    words = found.verdict if found.sure else f"probably: {found.verdict}"
    return join(tag("p", tag("b", text(words))), tag("ul", *evidence, *steps))


def _now(run: Shown) -> Html:
    """Draw what a live run does, as the foot of a terminal has it."""
    if run.state != "live" or run.picture.ended is not None:
        return NOTHING
    lines = [tag("li", line(one)) for one in live.at_work(run.picture, run.now_ms, steps_max=ROWS_MAX)]
    return tag("ul", *lines, class_="plain") if lines else NOTHING


def _said(run: Shown) -> Html:
    message = cut(in_workspace(run.picture.message))
    return tag("div", said(message), class_="message") if message else NOTHING


def _changed(run: Shown) -> Html:
    """Draw the patch, each file folded or not."""
    drawn, shown = [], 0
    for file in changes((run.patch or "").splitlines(), lines_max=DIFF_LINES_MAX):
        shown += len(file.lines)
        numbers = (
            tag("span", text(f"+{file.added}"), class_="good"),
            tag("span", text(f"−{file.removed}"), class_="bad"),
        )
        inner = [tag("summary", join(tag("code", text(file.path)), *numbers, between=" "))]
        if file.lines:
            lines = [tag("span", text(one.text), class_=one.kind) for one in file.lines]
            inner.append(tag("pre", *lines, class_="diff", tabindex="0"))
        if (more := file.count - len(file.lines)) > 0:
            inner.append(tag("p", text(f"{more} more lines are in the patch file"), class_="dim"))
        drawn.append(tag("details", *inner, class_="file", open="" if shown <= OPEN_LINES_MAX else None))
    return join(*drawn)


def _story(run: Shown) -> Html:
    return tag("div", *map(draw_row, run.rows.rows), class_="rows") if run.rows.rows else NOTHING


def _beyond(run: Shown) -> Html:
    more = f"{run.rows.beyond} more rows are in the receipt: backplane receipts show {run.picture.run_id[:8]}"
    return tag("p", text(more), class_="dim") if run.rows.beyond else NOTHING


def draw_row(row: StoryRow) -> Html:
    """Draw one row of the story."""
    after = f" +{lasting(row.after_ms)}" if row.after_ms is not None else ""
    head = [tag("span", text(f"{row.number}{after}"), class_="no mono")]
    match row.kind:
        case "said":
            head.append(tag("div", said(row.head), class_="message"))
        case "call" | "command" | "file":
            head += [tag("b", text(row.tool))] if row.tool else []
            head += [tag("code", text(row.head))] if row.head else []
        case _:
            head.append(tag("span", text(row.head), class_={"note": "dim"}.get(row.kind, row.tone) or None))
    head += [tag("span", text(row.mark), class_=row.tone or "dim")] if row.mark else []
    inner = join(*head, between=" ")
    if row.body:
        bodies = [tag("pre", text(body), tabindex="0") for body in row.body]
        inner = tag("details", tag("summary", inner), *bodies, open="" if row.tone == "bad" else None)
    return tag("div", inner, class_=f"row {row.tone}".strip())


def _claims(run: Shown) -> Html:
    """Draw the agent's claims and the observations, each in a column of its own."""
    claimed = as_object(run.added.get("claimed"))
    counts = [{"kind_of_claim": kind, **as_object(by)} for kind, by in as_object(claimed.get("counts")).items()]
    claims = [
        {"verdict": name.replace("_", " "), **as_object(row)}
        for name in ("false", "not_seen")
        for row in as_list(claimed.get(name))
    ]
    unnamed = [{"file": path} for path in as_list(claimed.get("unexplained"))]
    return join(
        _members(counts, "kind_of_claim true false not_seen unwitnessed", "Number of claims of the agent"),
        _members(claims, "verdict kind event claimed seen", "Claims that are false or were not seen"),
        _members(unnamed, "file", "Changed files that no event names"),
    )


def _enforcement(run: Shown) -> Html:
    found = as_object(run.added.get("enforcement"))
    kinds = {**as_object(found.get("kinds")), "model's key": run.added.get("key_proxy")}
    layers = [
        {"what": name, **kind, "what_it_leaves_open": kind.get("gap") or kind.get("why")}
        for name, kind in kinds.items()
        if isinstance(kind, dict)
    ]
    layers += [{"what": "approvals", "state": found["approvals"]}] if "approvals" in found else []
    return join(
        _members(as_list(found.get("violations")), "rule reason", "Violations of the policy"),
        _members(layers, "what state what_it_leaves_open", f"Isolation: {found.get('isolation', '?')}"),
        _members(as_list(found.get("rules")), "rule pattern layer gap", "Rules of the policy"),
    )


def _members(rows: Sequence[object], names: str, label: str) -> Html:
    """Draw a table of objects with a column for each of these members; nothing without an object."""
    columns, objects = names.split(), [as_object(row) for row in rows[:ROWS_MAX]]
    cells = [[NOTHING if row.get(name) is None else text(row[name]) for name in columns] for row in objects]
    return table((name.replace("_", " ") for name in columns), cells, label) if cells else NOTHING


def _receipt(run: Shown) -> Html:
    ended = run.picture.ended
    if ended is None:
        return NOTHING
    command = tag("code", text(f"backplane receipts verify {run.picture.run_id[:8]}"))
    return join(tag("p", text("SHA-256 "), tag("code", text(ended.sha256))), tag("p", text("check it: "), command))


PARTS: Final[dict[str, tuple[str, Callable[[Shown], Html]]]] = {
    "head": ("", _head),
    "why": ("Why", _why),
    "now": ("Now", _now),
    "said": ("What the agent said", _said),
    "changed": ("What the agent changed", _changed),
    "story": ("What happened", _story),
    "beyond": ("", _beyond),
    "claims": ("Claims of the agent", _claims),
    "enforced": ("What enforced the policy", _enforcement),
    "receipt": ("Receipt", _receipt),
}
"""The parts of a run's page in their order: the title, and what draws it."""
FOLDED: Final = ("claims", "enforced")
"""Parts that are folded at first; the head names what went wrong there."""
