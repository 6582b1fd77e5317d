"""Times, money and counts in words. Pure."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final

from backplane.view.text import one_line

_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"))
_UNIT_S: Final = {"s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400, "w": 7 * 86_400}


def standing(state: str, outcome: str | None, reason: str | None, *, waits: bool = False) -> tuple[str, str]:
    """How a run stands in a word, and its tone: good, warn, bad, or live.

    Args:
        state: live, cut_off or ended; the outcome and the reason of its end count in the last, a reason in the second.
        waits: a live run waits for a person.
    """
    if state == "live" and waits:
        return "waiting", "warn"
    if state != "ended":
        return ("running", "live") if state == "live" else (one_line(reason or "cut off"), "warn" if reason else "bad")
    word = reason if reason not in (None, "", outcome) else outcome
    return one_line(word), {"complete": "good", "partial": "warn"}.get(outcome or "", "bad")


def milliseconds(timestamp: str) -> int | None:
    """A time in the contract's print form as milliseconds since 1970; None where it is none."""
    try:
        return round(datetime.fromisoformat(timestamp).timestamp() * 1000)
    except (ValueError, OverflowError):
        return None


def lasting(ms: int) -> str:
    """A span of time in its two largest units, as `4.2 s`, `3 min 5 s`, `2 h 10 min`."""
    if ms < 60_000:
        return f"{max(ms, 0) / 1000:.1f} s"
    seconds = ms // 1000
    for size, unit in _UNITS:
        if seconds >= size:
            rest, below = seconds % size, next((one for one in _UNITS if one[0] < size), (1, "s"))
            more = rest // below[0]
            return f"{seconds // size} {unit}" + (f" {more} {below[1]}" if more else "")
    return f"{seconds} s"


def elapsed(seconds: int) -> str:
    """A span of time that goes on, in whole seconds: `4 s`, `3 min 5 s`."""
    return f"{max(seconds, 0)} s" if seconds < 60 else lasting(seconds * 1000)


def ago(ms: int) -> str:
    """How long ago something was, in one unit, as `5 min ago`; a time to come is `now`."""
    seconds = ms // 1000
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago" if seconds > 0 else "now"


def span_s(text: str) -> int | None:
    """Seconds of a span as `90`, `90s`, `5m`, `2h`, `3d` or `1w`; None where it is none."""
    found = re.fullmatch(r"([0-9]{1,9})(s|m|min|h|d|w)?", text.strip())
    return int(found[1]) * _UNIT_S[found[2] or "s"] if found else None


def money(micros: int | None) -> str:
    """US dollars from millionths of one; `?` where the amount is unknown, as that is not nothing."""
    if micros is None:
        return "?"
    return f"${micros / 1e6:.2f}" if micros >= 1_000_000 else f"${micros / 1e6:.4f}"


def counted(number: int, noun: str) -> str:
    """A number with its noun, as `1 call` and `2 calls`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def count(number: int | None) -> str:
    """A number in few characters, as `950`, `12.3k`, `4.5M`; `?` where it is unknown."""
    if number is None:
        return "?"
    if number < 10_000:
        return f"{number}"
    return f"{number / 1000:.1f}k" if number < 1_000_000 else f"{number / 1e6:.1f}M"
