"""Draws a comparison of backends for the terminal. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from backplane.routing.intervals import Comparison, Interval, Trial
from backplane.view.figures import lasting, money

HEAD: Final = ("backend", "success", "cost", "time", "patches")
"""Headings of `cells`."""


def cells(found: Comparison) -> Iterator[tuple[str, ...]]:
    """Yield a row for each side, under `HEAD`."""
    for one in found.sides:
        share = _words(one.success, lambda thousandths: f"{thousandths / 10:.0f} %")
        success = f"{one.succeeded} of {one.runs}, {share}"
        figures = _words(one.cost_usd_micros, money), _words(one.duration_ms, lasting), str(one.patches)
        yield (one.side, success, *figures)


def verdicts(found: Comparison) -> Iterator[str]:
    """Yield what the data says of each measure."""
    return (f"{one.measure}: {one.better or 'no backend'} is better: {one.why}" for one in found.verdicts)


def trial(one: Trial) -> str:
    """Return one run of a comparison as a line."""
    words = [one.outcome, *([one.code] if one.code else [])]
    if one.checked is not None:
        words.append("check passed" if one.checked else f"check failed: {one.check_says or '?'}")
    words += [lasting(one.duration_ms), money(one.cost_usd_micros), f"+{one.added} −{one.removed}"]
    return f"round {one.round}, {one.side}: {', '.join(words)}, run {one.run_id[:8]}"


def _words(found: Interval | None, say: Callable[[int], str]) -> str:
    if found is None:
        return "?"
    reach = "" if found.low is None or found.high is None else f" ({say(found.low)} to {say(found.high)})"
    return f"{say(found.value)}{reach}"
