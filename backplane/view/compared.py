"""Draws a comparison of backends for the pages of its runs. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from backplane.routing.intervals import Comparison, Interval, Trial
from backplane.view.figures import lasting, money
from backplane.view.html import Html, join, table, tag, text

FOLDER: Final = "comparisons"
"""Folder in the state folder with one file for each comparison, `ID.json`."""


def drawn(found: Comparison | None, run_id: str) -> Html:
    """Draw a row for each side, what the data says, and the other runs; nothing without a comparison."""
    if found is None:
        return Html("")
    cells = [
        (
            one.side,
            f"{one.succeeded} of {one.runs}",
            _words(one.cost_usd_micros, money),
            _words(one.duration_ms, lasting),
            str(one.patches),
        )
        for one in found.sides
    ]
    label = "Backends side by side" + (f", checked by {found.check}" if found.check else "")
    rows = table(("backend", "success", "cost", "time", "patches"), [map(text, row) for row in cells], label)
    verdicts = [f"{one.measure}: {one.better or 'neither'} is better: {one.why}" for one in found.verdicts]
    others = [tag("li", text(_trial(one))) for one in found.trials if one.run_id != run_id]
    return join((rows, *(tag("p", text(words)) for words in verdicts), tag("ul", *others)))


def _words(found: Interval | None, say: Callable[[int], str]) -> str:
    if found is None:
        return "?"
    reach = "" if found.low is None or found.high is None else f" ({say(found.low)} to {say(found.high)})"
    return f"{say(found.value)}{reach}"


def _trial(one: Trial) -> str:
    check = "" if one.checked is None else ", check passed" if one.checked else ", check failed"
    return f"round {one.round}, {one.side}: {one.outcome}{check}, run {one.run_id[:8]}"
