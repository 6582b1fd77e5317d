"""Draws the timeline of a run as SVG; each bar has its words as a title, and the rows below say the same. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from backplane.view.figures import lasting
from backplane.view.html import Html, join, tag, text
from backplane.view.rows import StoryRow

WIDE: Final = 1000
LANE: Final = 16
LANES_MAX: Final = 8
"""Calls side by side; further ones are drawn over the last lane."""
BARS_MAX: Final = 400
"""Bars of one timeline; more are narrower than a pixel."""
LABEL_CHARS_MAX: Final = 200


def timeline(rows: Sequence[StoryRow], lasted_ms: int) -> Html:
    """Draw calls and questions by time; an open one lasts until the end."""
    timed = [(row, row.after_ms) for row in rows if row.kind in ("call", "question") and row.after_ms is not None]
    lasted_ms = max(lasted_ms, 1)
    lanes: list[int] = []
    drawn = []
    for row, after_ms in timed[:BARS_MAX]:
        end_ms = lasted_ms if row.lasted_ms is None else after_ms + row.lasted_ms
        lane = next((number for number, free_ms in enumerate(lanes) if free_ms <= after_ms), len(lanes))
        if lane == len(lanes) and lane < LANES_MAX:
            lanes.append(0)
        lane = min(lane, LANES_MAX - 1)
        lanes[lane] = max(lanes[lane], end_ms)
        x, wide = WIDE * after_ms / lasted_ms, WIDE * (end_ms - after_ms) / lasted_ms
        words = f"{row.tool} {row.head}".strip()[:LABEL_CHARS_MAX]
        kind = "warn" if row.kind == "question" else "bad" if row.tone == "bad" else "call"
        drawn.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{LANE * lane + 2}" width="{max(wide, 2):.1f}" '
            f'height="{LANE - 4}"><title>{text(words)}: {lasting(end_ms - after_ms)}</title></rect>'
        )
    if not drawn:
        return Html("")
    high, title = LANE * len(lanes), "calls and waits by time; the rows below have each of them"
    ticks = join(*(tag("span", text(lasting(lasted_ms * part // 4))) for part in range(5)))
    svg = f'<svg role="img" viewBox="0 0 {WIDE} {high}" height="{high}" preserveAspectRatio="none">'
    return Html(f"{svg}<title>{title}</title>{''.join(drawn)}</svg>{tag('div', ticks, class_='ticks dim')}")
