"""Times, money and counts in words. Pure."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final

from backplane.view.text import counted as counted
from backplane.view.text import one_line

_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"))
_UNIT_S: Final = {"s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400, "w": 7 * 86_400}

ID_CHARS: Final = 8
"""Characters of an id in a list; any beginning that only one run, session or order has names it."""


def standing(state: str, outcome: str | None, reason: str | None, *, waits: bool = False) -> tuple[str, str]:
    """Return a word for how a run stands, and its tone: good, warn, bad or live.

    Args:
        state: live, cut_off or ended; an ended run also has an outcome and a reason, one that was cut off a reason.
        waits: True if a live run waits for a person.
    """
    if state == "live" and waits:
        return "waiting", "warn"
    if state != "ended":
        return ("running", "live") if state == "live" else (one_line(reason or "cut off"), "warn" if reason else "bad")
    word = reason if reason not in (None, "", outcome) else outcome
    return one_line(word), {"complete": "good", "partial": "warn"}.get(outcome or "", "bad")


def milliseconds(timestamp: str) -> int | None:
    """Parse a time of the contract as milliseconds since 1970; return None if it is no time."""
    try:
        return round(datetime.fromisoformat(timestamp).timestamp() * 1000)
    except (ValueError, OverflowError):
        return None


def lasting(ms: int) -> str:
    """Return a span of time in its two largest units, as `4.2 s`, `3 min 5 s`, `2 h 10 min`."""
    if ms < 59_950:  # From there on one digit would print as `60.0 s`.
        return f"{max(ms, 0) / 1000:.1f} s"
    seconds = max(ms // 1000, 60)
    for size, unit in _UNITS:
        if seconds >= size:
            rest, below = seconds % size, next((one for one in _UNITS if one[0] < size), (1, "s"))
            more = rest // below[0]
            return f"{seconds // size} {unit}" + (f" {more} {below[1]}" if more else "")
    return f"{seconds} s"


def elapsed(seconds: int) -> str:
    """Return a span of time that goes on, in whole seconds: `4 s`, `3 min 5 s`."""
    return f"{max(seconds, 0)} s" if seconds < 60 else lasting(seconds * 1000)


def ago(ms: int) -> str:
    """Return an age in one unit, as `5 min ago`; a time to come is `now`."""
    return f"{' '.join(elapsed(ms // 1000).split()[:2])} ago" if ms >= 1000 else "now"


def span_s(text: str) -> int | None:
    """Parse a span as `90`, `90s`, `5m`, `2h`, `3d` or `1w` as seconds; return None if it is no span."""
    found = re.fullmatch(r"([0-9]{1,9})(s|m|min|h|d|w)?", text.strip())
    return int(found[1]) * _UNIT_S[found[2] or "s"] if found else None


def money(micros: int | None) -> str:
    """Return US dollars from millionths of a dollar; `?` if unknown, and a known cost is never printed as zero."""
    if micros is None:
        return "?"
    if 0 < micros < 50:
        return "<$0.0001"
    return f"${micros / 1e6:.2f}" if micros >= 999_950 else f"${micros / 1e6:.4f}"


def count(number: int | None) -> str:
    """Return a number in few characters, as `950`, `12.3k`, `4.5M`; `?` if it is unknown."""
    if number is None:
        return "?"
    if number < 10_000:
        return f"{number}"
    return f"{number / 1000:.1f}k" if number < 999_950 else f"{number / 1e6:.1f}M"
