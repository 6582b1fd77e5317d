"""Sums up the events of a run: usage, conversation, the pause that the model's service asked for. Pure.

It imports little, as lists and views use it without the rest of the room.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane.contract import canonical
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent, Carried, Warned
from backplane.contract.receipt import Usage

_COUNTERS: Final = ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens", "request_units")


class Folded(msgspec.Struct, frozen=True):
    """Sums of the events so far."""

    usage: Usage = Usage()
    """The last counts that the host reported, member by member."""
    session: Json = None
    """The last `ext.session`, for resuming."""
    retry_after_ms: int | None = None
    """The last pause that the model's service asked for before another request."""


def fold(folded: Folded, event: AgentEvent) -> Folded:
    """Add one event; return the same value if the event changes no sum."""
    if not isinstance(event, Warned | Carried) or not isinstance(event.ext, dict):
        return folded
    body = event.ext.get("usage")
    if isinstance(body, dict):
        counted: dict[str, Any] = {name: body[name] for name in _COUNTERS if _is_counter(body.get(name))}
        cost = body.get("estimated_cost_usd")
        if isinstance(cost, int | float) and not isinstance(cost, bool) and 0 <= cost < float("inf"):
            counted["estimated_cost_usd"] = float(cost)
        folded = msgspec.structs.replace(folded, usage=msgspec.structs.replace(folded.usage, **counted))
    if event.ext.get("session") is not None:
        folded = msgspec.structs.replace(folded, session=event.ext["session"])
    retry = event.ext.get("retry")
    if isinstance(retry, dict) and _is_counter(retry.get("retry_after_ms")):
        folded = msgspec.structs.replace(folded, retry_after_ms=retry["retry_after_ms"])
    return folded


def _is_counter(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= canonical.INT_MAX
