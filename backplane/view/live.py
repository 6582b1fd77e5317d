"""Draws a live run as a few lines: the foot of a terminal, and what the desk shows of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from backplane.view.columns import Line, Span, fitted_line, tail
from backplane.view.figures import count, elapsed, milliseconds, money
from backplane.view.picture import Picture, Step
from backplane.view.text import in_workspace, one_line

WRITTEN_ROWS_MAX: Final = 3
"""Most rows of the line that the agent is writing; all of it goes above the foot at its end."""

CALLS_MAX: Final = 3
STEPS_MAX: Final = 6
FILES_MAX: Final = 8

ROWS_LEFT: Final = 2
"""Rows of the terminal that stay free, so that nothing scrolls while it is drawn."""

MARKS: Final = {"done": ("✓", "green"), "doing": ("▸", "yellow"), "open": ("·", "dim")}
"""Mark and colour of a plan's step, by its state."""
_STATES: Final = {"waiting": "yellow", "working": "green"}

FIRST_MS: Final = 1000
"""A run shorter than this shows only what is being written."""


def block(picture: Picture, *, now_ms: int, written: str, columns: int, rows: int) -> list[Line]:
    """Return the foot of a live run's terminal.

    Args:
        now_ms: the time now, in milliseconds since 1970.
        written: the line that the agent has begun and not ended; printable.
        columns: width of the terminal.
        rows: height of the terminal; the block leaves `ROWS_LEFT` of them.
    """
    columns -= 1  # A line that fills its row makes some terminals begin another.
    head: list[Line] = [(Span(text),) for text in tail(written, columns, WRITTEN_ROWS_MAX)] if written.strip() else []
    began_ms = milliseconds(picture.started_at)
    lasted_ms = now_ms - began_ms if began_ms is not None else 0
    foot = [] if lasted_ms < FIRST_MS else [*at_work(picture, now_ms), _status(picture, lasted_ms)]
    room = max(rows - ROWS_LEFT, 1)
    return [fitted_line(line, columns) for line in [*head, *foot][-room:]]


def at_work(picture: Picture, now_ms: int, *, steps_max: int = STEPS_MAX) -> Iterator[Line]:
    """Yield the calls that have been open for a second, the steps of the plan, and the files that the agent names."""
    yield from _calls(picture, now_ms)
    yield from _plan(picture.plan, steps_max)
    names = [one_line(in_workspace(path), 80) for path in picture.files]  # The patch at the end shows the truth.
    if names:
        more = f" and {len(names) - FILES_MAX} more" if len(names) > FILES_MAX else ""
        yield (Span("✎ ", "yellow"), Span(", ".join(names[-FILES_MAX:]) + more))


def _calls(picture: Picture, now_ms: int) -> Iterator[Line]:
    """Yield the open calls, the newest last; their output goes above the foot."""
    calls = sorted(picture.open_calls.values(), key=lambda call: call.number)
    ages = [(call, (now_ms - (milliseconds(call.ts) or now_ms)) // 1000) for call in calls]
    slow = [(call, seconds) for call, seconds in ages if seconds >= 1]
    if len(slow) > CALLS_MAX:
        yield (Span(f"→ {len(slow) - CALLS_MAX} more open calls", "dim"),)
    for call, seconds in slow[-CALLS_MAX:]:
        about = f"{one_line(call.tool)} {one_line(in_workspace(call.about), 200)}".rstrip()
        yield (Span("→ ", "cyan"), Span(about), Span(f"  {elapsed(seconds)}", "dim"))


def _plan(plan: tuple[Step, ...], steps_max: int) -> Iterator[Line]:
    """Yield the steps around the first one that is not done."""
    at = next((number for number, step in enumerate(plan) if step.state != "done"), len(plan))
    first = max(0, min(at - 1, len(plan) - steps_max))
    for step in plan[first : first + steps_max]:
        mark, colour = MARKS[step.state]
        yield (Span(f"{mark} ", colour), Span(one_line(step.text, 200), "dim" if step.state == "done" else ""))
    if len(plan) > steps_max:
        yield (Span(f"  {len(plan) - steps_max} more steps", "dim"),)


def _status(picture: Picture, lasted_ms: int) -> Line:
    state = "repeating" if picture.retry is not None and picture.state == "working" else picture.state
    parts = [elapsed(lasted_ms // 1000), one_line(picture.backend, 40), one_line(picture.model or "", 40)]
    usage, waits = picture.usage, picture.waits
    if usage.input_tokens is not None or usage.output_tokens is not None:
        parts.append(f"{count(usage.input_tokens)} in {count(usage.output_tokens)} out")
    if picture.cost_usd_micros is not None:
        parts.append(money(picture.cost_usd_micros))
    if picture.plan:
        parts.append(f"{sum(step.state == 'done' for step in picture.plan)} of {len(picture.plan)} steps")
    if picture.retry is not None:
        parts.append(one_line(picture.retry.text, 120))
    if waits is not None:
        parts.append(f"backplane answer {picture.run_id[:8]} {one_line(waits.id, 40)} allow|deny")
    return (Span(state, _STATES.get(state, "cyan")), Span("  " + "  ".join(filter(None, parts)), "dim"))
