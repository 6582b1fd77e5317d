"""The lines of the gateway's record, and one exchange as lists and pages show it. Pure.

Each exchange has one line at its begin, a stream one more at its first piece, and one at its end. Contents of requests
and answers are in none of them.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

LOSSES_MAX: Final = 20
"""Losses that a line names; it counts all of them."""

Outcome = Literal["complete", "failed", "refused", "left", "interrupted"]
"""`left`: the client went away. `interrupted`: the gateway ended before the exchange did."""


class ExchangeBegin(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="begin"):
    """The line of an exchange that has begun."""

    id: str
    at: str
    client: str
    front: str
    model: str
    """The model that the client asked."""
    stream: bool
    reserved: int = 0
    """The most that it can cost, in millionths of a dollar; 0 without a budget."""


class ExchangeFirst(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="first"):
    """The line of a streamed exchange whose first piece goes to the client.

    It stays the last one if the gateway is killed, so the record says how far the exchange came.
    """

    id: str
    at: str
    ms: int
    """Milliseconds since the begin."""
    backend: str | None = None
    """The service that answers."""
    model: str | None = None
    """The model that was asked there."""
    tried: tuple[str, ...] = ()
    """Services that failed before, with their codes."""


class ExchangeEnd(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="end"):
    """The line of an exchange that has ended."""

    id: str
    at: str
    client: str
    end: Outcome
    status: int | None = None
    """HTTP status of the answer; None if none was begun."""
    backend: str | None = None
    """The service that was asked last."""
    model: str | None = None
    """The model that was asked there."""
    tried: tuple[str, ...] = ()
    """Services that failed before, with their codes."""
    tokens: dict[str, int] | None = None
    """Counters of the answer; None is unknown."""
    cost: int | None = None
    """Cost in millionths of a dollar; None is unknown."""
    charged: int = 0
    """Amount that the client's budget was charged: the cost, or the reservation if the cost is unknown."""
    ms: int = 0
    """Milliseconds since the begin; of an interrupted exchange, how long it is known to have lasted."""
    first_ms: int | None = None
    """Milliseconds from the begin to the first piece of a stream; None if there was none."""
    losses: int = 0
    lost: tuple[str, ...] = ()
    code: str | None = None
    """Code of the error; None if the service's answer itself reported a failure, or there was none."""
    error: str | None = None


Line = ExchangeBegin | ExchangeFirst | ExchangeEnd
ExchangeState = Literal["live", "cut_off", "ended"]


class RecordedExchange(msgspec.Struct, frozen=True, kw_only=True):
    """One exchange, from all of its lines."""

    kind: Literal["exchange"] = "exchange"
    id: str
    state: ExchangeState
    """live; cut_off, if its gateway was killed and none has started since; or ended."""
    client: str
    front: str
    """The interface that the client speaks: chat, responses, messages or gemini."""
    asked: str
    """The model that the client asked."""
    stream: bool
    began_at: str
    ended_at: str | None = None
    ms: int | None = None
    """Milliseconds from begin to end; None while it is open."""
    first_ms: int | None = None
    """Milliseconds to the first piece of a stream; None if none has come, or the answer is no stream."""
    end: Outcome | None = None
    """None while it is open, and until the next start if it was cut off."""
    status: int | None = None
    """HTTP status that the client got."""
    backend: str | None = None
    """The service that was asked last."""
    model: str | None = None
    """The model that was asked there."""
    tried: tuple[str, ...] = ()
    """Services that failed before, with their codes."""
    tokens: dict[str, int] | None = None
    """Counters of the answer: input, output, cache_read and cache_write; None is unknown."""
    cost_usd_micros: int | None = None
    """None is unknown."""
    reserved_usd_micros: int = 0
    """The most that it can cost; 0 if its client has no budget."""
    charged_usd_micros: int = 0
    """Amount that the client's budget was charged."""
    losses: int = 0
    lost: tuple[str, ...] = ()
    """The first losses: JSON pointer, kind and code."""
    code: str | None = None
    """Code of the error; `error` has its words."""
    error: str | None = None

    @property
    def has_failed(self) -> bool:
        """Return True if it has ended and is not complete; a client that left is no failure."""
        return self.end not in (None, "complete", "left")


def joined(
    begin: ExchangeBegin, first: ExchangeFirst | None, end: ExchangeEnd | None, *, is_live: bool
) -> RecordedExchange:
    """Return an exchange from its lines."""
    found = RecordedExchange(
        id=begin.id, state="live" if is_live else "cut_off", client=begin.client, front=begin.front, asked=begin.model,
        stream=begin.stream, began_at=begin.at, reserved_usd_micros=begin.reserved,
    )  # fmt: skip
    if first is not None:
        found = msgspec.structs.replace(
            found, first_ms=first.ms, backend=first.backend, model=first.model, tried=first.tried
        )
    if end is None:
        return found
    return msgspec.structs.replace(
        found, state="ended", ended_at=end.at, ms=end.ms, first_ms=end.first_ms, end=end.end, status=end.status,
        backend=end.backend, model=end.model, tried=end.tried, tokens=end.tokens, cost_usd_micros=end.cost,
        charged_usd_micros=end.charged, losses=end.losses, lost=end.lost, code=end.code, error=end.error,
    )  # fmt: skip
