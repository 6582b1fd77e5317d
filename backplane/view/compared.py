"""A comparison of backends as the reports of its runs show it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from backplane.view.figures import lasting, money
from backplane.view.html import Html, join, table, tag, text

FOLDER: Final = "comparisons"
"""Of the state folder: a file for each comparison, `ID.json`."""


class Reach(msgspec.Struct, frozen=True):
    """A value and where the true one may lie."""

    value: int
    low: int | None = None
    high: int | None = None


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """What the runs of one backend say together."""

    side: str
    runs: int
    succeeded: int
    cost_usd_micros: Reach | None = None
    duration_ms: Reach | None = None
    patches: int = 0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the data says of one measure."""

    measure: str
    better: str | None = None
    why: str = ""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One of its runs."""

    side: str
    round: int
    run_id: str
    outcome: str
    checked: bool | None = None


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison as it was kept."""

    check: str | None = None
    sides: tuple[Side, ...]
    verdicts: tuple[Verdict, ...]
    trials: tuple[Trial, ...]


def drawn(found: Compared, run_id: str) -> Html:
    """A row a side, what the data says, and the other runs."""
    cells = [
        (
            one.side,
            f"{one.succeeded} of {one.runs}",
            _said(one.cost_usd_micros, money),
            _said(one.duration_ms, lasting),
            str(one.patches),
        )
        for one in found.sides
    ]
    label = "Backends side by side" + (f", checked by {found.check}" if found.check else "")
    rows = table(("backend", "success", "cost", "time", "patches"), [map(text, row) for row in cells], label)
    said = [f"{one.measure}: {f'{one.better} is' if one.better else 'nobody is'} better: {one.why}"
            for one in found.verdicts]  # fmt: skip
    others = [tag("li", text(_trial(one))) for one in found.trials if one.run_id != run_id]
    return join((rows, *(tag("p", text(words)) for words in said), tag("ul", *others)))


def _said(found: Reach | None, say: Callable[[int], str]) -> str:
    if found is None:
        return "?"
    reach = "" if found.low is None or found.high is None else f" ({say(found.low)} to {say(found.high)})"
    return f"{say(found.value)}{reach}"


def _trial(one: Trial) -> str:
    check = "" if one.checked is None else ", check passed" if one.checked else ", check failed"
    return f"round {one.round}, {one.side}: {one.outcome}{check}, run {one.run_id[:8]}"
