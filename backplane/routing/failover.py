"""When an order that failed on one backend goes on to another. Pure: what was seen comes in, yes or no comes out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from backplane.contract.events import AgentEvent, CommandExecuted, FileChanged, ToolCall
from backplane.errors import CODES
from backplane.policy.paths import SPELLINGS, TOOLS

ATTEMPTS_MAX: Final = 3
"""Backends that one order is tried on: what fails on three is most often the order."""

LIMITS: Final = frozenset({"budget", "max_turns"})
"""Reasons of an end by a limit of the order, which applies on every backend."""

READING: Final = frozenset(
    name for name, shape in TOOLS.items() if shape.reads and not shape.writes and not shape.connects
)
"""Neutral names of the tools that change nothing."""


class FailoverAttempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One backend that an order was tried on, as the next one's receipt tells it."""

    backend: str
    model: str | None = None
    run_id: str
    code: str | None = None
    """Why it did not complete."""
    limit: str | None = None
    """The limit of the order that ended it: `budget` or `max_turns`; then the order is not tried elsewhere."""
    used_usd_micros: int | None = None
    """Its cost, which is subtracted from the next attempt's budget; None is unknown. `used_tokens` likewise."""
    used_tokens: int | None = None
    effect: str | None = None
    """The first side effect that was seen; with one, the order ends."""


def effect_of(event: AgentEvent) -> str | None:
    """The side effect that an event tells of, in words; None where it tells of none."""
    if isinstance(event, FileChanged):
        return f"file_changed {event.path}"
    if isinstance(event, CommandExecuted):
        return f"command_executed {event.command}"
    if isinstance(event, ToolCall) and SPELLINGS.get(event.tool_name, event.tool_name) not in READING:
        return f"tool_call {event.tool_name}"
    return None


def first_effect(events: Iterable[AgentEvent], *, patch_bytes: int, applied: bool) -> str | None:
    """The first side effect of a run; None where none was seen.

    Args:
        patch_bytes: of the difference that the run left in its workspace.
        applied: whether that was put into the original.
    """
    found = next(filter(None, map(effect_of, events)), None)
    if found is None and (patch_bytes or applied):
        return f"files differ ({patch_bytes} bytes of patch)"
    return found[:EFFECT_CHARS_MAX] if found is not None else None


EFFECT_CHARS_MAX: Final = 200
"""Characters of a side effect in a receipt: enough to recognise it."""


def moves_on(attempts: int, failed: FailoverAttempt) -> bool:
    """Return True if the order goes on to another backend.

    Args:
        attempts: number of attempts so far, with the failed one.
    """
    retryable = failed.code in CODES and CODES[failed.code].retryable and failed.limit is None
    return retryable and failed.effect is None and attempts < ATTEMPTS_MAX
