"""Charts of a page as SVG: each part has its words as a title; a table or rows beside it show the same. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from backplane.contract.receipt import Usage
from backplane.view.figures import count, lasting, milliseconds, money
from backplane.view.html import Html, tag, text
from backplane.view.picture import Spending
from backplane.view.story import Bar

WIDE: Final = 1000
LANES_MAX: Final = 8
"""Calls side by side; those beyond are drawn over the last lane."""
LANE: Final = 16
_HIGH: Final = 90
_COLUMNS: Final = 320
LABEL_CHARS_MAX: Final = 200


def timeline(bars: Sequence[Bar], began_ms: int, ended_ms: int) -> Html:
    """What took how long, and what ran beside what; a bar without an end goes to the end of the run."""
    lasted_ms = max(ended_ms - began_ms, 1)
    lanes: list[int] = []
    drawn = []
    for bar in bars:
        end_ms = ended_ms if bar.end_ms is None else bar.end_ms
        lane = next((number for number, free_ms in enumerate(lanes) if free_ms <= bar.start_ms), len(lanes))
        if lane == len(lanes) and lane < LANES_MAX:
            lanes.append(0)
        lane = min(lane, LANES_MAX - 1)
        lanes[lane] = max(lanes[lane], end_ms)
        x, wide = WIDE * (bar.start_ms - began_ms) / lasted_ms, WIDE * (end_ms - bar.start_ms) / lasted_ms
        words = f"{bar.label[:LABEL_CHARS_MAX]}: {lasting(end_ms - bar.start_ms)}"
        kind = {"bad": "bad", "warn": "warn"}.get(bar.kind, "call")
        drawn.append(
            f'<rect class="{kind}" x="{max(x, 0):.1f}" y="{LANE * lane + 2}" width="{max(wide, 2):.1f}" '
            f'height="{LANE - 4}"><title>{text(words)}</title></rect>'
        )
    high = LANE * max(len(lanes), 1)
    ticks = "".join(
        f'<text x="{WIDE * part / 4:.0f}" y="{high + 14}" text-anchor="{anchor}">'
        f"{lasting(lasted_ms * part // 4)}</text>"
        for part, anchor in zip(range(5), ("start", "middle", "middle", "middle", "end"), strict=True)
    )
    title = "calls and waits by time; the rows below have each of them"
    return Html(
        f'<svg role="img" class="time" viewBox="0 0 {WIDE} {high + 18}"><title>{title}</title>'
        f"{''.join(drawn)}{ticks}</svg>"
    )


def spending(curve: Sequence[Spending], began_ms: int, ended_ms: int) -> Html:
    """What the run had used by when: money, or tokens where nobody says what they cost; nothing for less than two
    reports."""
    in_money = all(point.usd_micros is not None for point in curve)
    values = [(point.usd_micros or 0) if in_money else point.tokens for point in curve]
    if len(values) < 2 or not max(values):
        return Html("")
    lasted_ms, most = max(ended_ms - began_ms, 1), max(values)
    at = [min(max(((milliseconds(point.ts) or began_ms) - began_ms) / lasted_ms, 0), 1) for point in curve]
    places = [f"{WIDE * x:.1f},{_HIGH - (_HIGH - 20) * value / most:.1f}" for x, value in zip(at, values, strict=True)]
    whole = money(most) if in_money else f"{count(most)} tokens"
    title = f"{'cost' if in_money else 'tokens'} by time, up to {whole}; the table below has the sum"
    return Html(
        f'<svg role="img" class="time" viewBox="0 0 {WIDE} {_HIGH}"><title>{text(title)}</title>'
        f'<polyline class="curve" points="0,{_HIGH} {" ".join(places)} {WIDE},{places[-1].partition(",")[2]}">'
        f'</polyline><text x="{WIDE}" y="12" text-anchor="end">{text(whole)}</text></svg>'
    )


def tokens(usage: Usage) -> tuple[Html, list[tuple[str, int | None]]]:
    """Tokens by kind as bars, and the same as rows; unknown is None there."""
    bars = [
        ("input", usage.input_tokens),
        ("output", usage.output_tokens),
        ("read from cache", usage.cache_read_tokens),
        ("written to cache", usage.cache_write_tokens),
    ]
    most = max((value or 0 for _, value in bars), default=0)
    drawn = []
    for number, (name, value) in enumerate(bars):
        wide = round(_COLUMNS * (value or 0) / most) if most else 0
        drawn.append(
            f'<text x="0" y="{14 + 20 * number}">{text(name)}</text>'
            f'<rect class="call" x="110" y="{4 + 20 * number}" width="{wide}" height="12"></rect>'
            f'<text x="{116 + wide}" y="{14 + 20 * number}">{text(count(value))}</text>'
        )
    wide = _COLUMNS + 180
    head = f'<svg role="img" viewBox="0 0 {wide} 84" width="{wide}" height="84">'
    return Html(f"{head}{tag('title', text('tokens by kind; the table has the same'))}{''.join(drawn)}</svg>"), bars
