"""Decides whether an order that failed on one backend goes on to another. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from backplane.contract.events import AgentEvent, CommandExecuted, FileChanged, ToolCall
from backplane.errors import CODES
from backplane.policy.paths import SPELLINGS, TOOLS

ATTEMPTS_MAX: Final = 3
"""Most backends that one order is tried on; if three fail, the order is most often the cause."""

LIMITS: Final = frozenset({"budget", "max_turns"})
"""Reasons of an end by a limit of the order; the limit would end the order on every backend."""

READING: Final = frozenset(
    name for name, shape in TOOLS.items() if shape.reads and not shape.writes and not shape.connects
)
"""Neutral names of the tools that change nothing."""


class FailoverAttempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One failed attempt at an order, in the form of the next attempt's receipt."""

    backend: str
    model: str | None = None
    run_id: str
    code: str | None = None
    """Error code of the attempt; None if it has none."""
    limit: str | None = None
    """The order's limit that ended the attempt, and so the order: `budget` or `max_turns`; None if neither did."""
    used_usd_micros: int | None = None
    """Cost of the attempt, which the next attempt's budget lacks; None is unknown. `used_tokens` likewise."""
    used_tokens: int | None = None
    effect: str | None = None
    """The first side effect that was seen, which ends the order; None if none was seen."""


def effect_of(event: AgentEvent) -> str | None:
    """Return the side effect that an event reports, in words; None if it reports none."""
    if isinstance(event, FileChanged):
        return f"file_changed {event.path}"
    if isinstance(event, CommandExecuted):
        return f"command_executed {event.command}"
    if isinstance(event, ToolCall) and SPELLINGS.get(event.tool_name, event.tool_name) not in READING:
        return f"tool_call {event.tool_name}"
    return None


def first_effect(events: Iterable[AgentEvent], *, patch_bytes: int, applied: bool) -> str | None:
    """Return the first side effect of a run, in words; None if none was seen.

    Args:
        patch_bytes: size of the run's patch.
        applied: True if the patch was applied to the original.
    """
    found = next(filter(None, map(effect_of, events)), None)
    if found is None and (patch_bytes or applied):
        return f"files differ ({patch_bytes} bytes of patch)"
    return found[:EFFECT_CHARS_MAX] if found is not None else None


EFFECT_CHARS_MAX: Final = 200
"""Most characters of a side effect in a receipt, enough to recognise it."""


def moves_on(attempts: int, failed: FailoverAttempt) -> bool:
    """Return True if the order goes on to another backend.

    Args:
        attempts: number of attempts so far, with the failed one.
    """
    retryable = failed.code in CODES and CODES[failed.code].retryable and failed.limit is None
    return retryable and failed.effect is None and attempts < ATTEMPTS_MAX
