"""Collects usage, conversation and the requested pause from the events of a run. Pure.

It imports little, because lists and views use it without the rest of the package.
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
    """Values collected from the events so far."""

    usage: Usage = Usage()
    """The last value that the host reported for each counter."""
    session: Json = None
    """The last `ext.session`, from which a later run can resume; None if there was none."""
    retry_after_ms: int | None = None
    """The pause that the model's service last asked for before another request; None if it asked for none."""


def fold(folded: Folded, event: AgentEvent) -> Folded:
    """Return the values after one more event; the same object if nothing changes."""
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
