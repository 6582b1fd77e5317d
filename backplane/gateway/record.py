"""The lines of the gateway's record, and an exchange in the form that lists and pages show. Pure.

An exchange has a line for its begin, one for its first piece if it is a stream, and one for its end. No line contains a
request or an answer.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

LOSSES_MAX: Final = 20
"""Maximum losses that a line names; their number counts all of them."""

Outcome = Literal["complete", "failed", "refused", "left", "interrupted"]
"""`left`: the client closed the connection. `interrupted`: the gateway ended before the exchange did."""


class ExchangeBegin(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="begin"):
    """The first line of an exchange."""

    id: str
    at: str
    client: str
    front: str
    model: str
    """The model's name in the request."""
    stream: bool
    reserved: int = 0
    """The most that the exchange can cost, in millionths of a dollar; 0 if its client has no budget."""


class ExchangeFirst(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="first"):
    """The line of a streamed exchange, written before its first piece is sent to the client.

    If the gateway is killed, the next one reads from it which service was answering.
    """

    id: str
    at: str
    ms: int
    """Milliseconds since the begin."""
    backend: str | None = None
    """The service that answers."""
    model: str | None = None
    """The service's name of the model."""
    tried: tuple[str, ...] = ()
    """Services that failed before, with their codes."""


class ExchangeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of an exchange that its last line has, and that lists and pages show."""

    status: int | None = None
    """HTTP status that the client got; None if it got none."""
    backend: str | None = None
    """The service that was asked last."""
    model: str | None = None
    """The model that was asked there."""
    considered: tuple[str, ...] = ()
    """Services of the route in the order of the choice, each with the facts that decided, or why it rests; empty if
    the route has only one."""
    tried: tuple[str, ...] = ()
    """Services that failed before, with their codes."""
    tokens: dict[str, int] | None = None
    """Counters of the answer: input, output, cache_read and cache_write; None is unknown."""
    first_ms: int | None = None
    """Milliseconds from the begin to the first piece of a stream; None if none has come, or the answer is no stream."""
    losses: int = 0
    """Number of losses in the translation."""
    lost: tuple[str, ...] = ()
    """The first losses: JSON pointer, kind and code."""
    code: str | None = None
    """Code of the error; None if the service's answer itself reported a failure, or there was none."""
    error: str | None = None


class ExchangeEnd(ExchangeFacts, frozen=True, kw_only=True, tag_field="t", tag="end"):
    """The last line of an exchange."""

    id: str
    at: str
    client: str
    end: Outcome
    cost: int | None = None
    """Cost in millionths of a dollar; None is unknown."""
    charged: int = 0
    """Millionths of a dollar taken from the client's budget: the cost, or the whole reservation if the cost is unknown.
    0 if the client has no budget."""
    ms: int = 0
    """Milliseconds since the begin; for an exchange whose gateway was killed, up to its last line."""
    asked_ms: int = 0
    """Milliseconds from the begin of the exchange until the last service was asked."""


Line = ExchangeBegin | ExchangeFirst | ExchangeEnd
ExchangeState = Literal["live", "cut_off", "ended"]


class RecordedExchange(ExchangeFacts, frozen=True, kw_only=True):
    """One exchange, made from its lines."""

    kind: Literal["exchange"] = "exchange"
    id: str
    state: ExchangeState
    """`live`; `cut_off` if its gateway was killed and no other has started since; or `ended`."""
    client: str
    front: str
    """The interface that the client speaks: chat, responses, messages, gemini or augment."""
    asked: str
    """The model's name in the request."""
    stream: bool
    began_at: str
    ended_at: str | None = None
    ms: int | None = None
    """Milliseconds from begin to end; None while it is open."""
    end: Outcome | None = None
    """None while it is open, and until the next start if it was cut off."""
    cost_usd_micros: int | None = None
    """Cost in millionths of a dollar; None is unknown."""
    reserved_usd_micros: int = 0
    """The most that it can cost; 0 if its client has no budget."""
    charged_usd_micros: int = 0
    """Amount taken from the client's budget."""

    @property
    def has_failed(self) -> bool:
        """True if the exchange has ended and is not complete, except because its client left."""
        return self.end not in (None, "complete", "left")


def joined(
    begin: ExchangeBegin, first: ExchangeFirst | None, end: ExchangeEnd | None, *, is_live: bool
) -> RecordedExchange:
    """Return an exchange from its lines; `is_live` is True if its gateway runs."""
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
    facts = {name: getattr(end, name) for name in ExchangeFacts.__struct_fields__}
    return msgspec.structs.replace(
        found, state="ended", ended_at=end.at, ms=end.ms, end=end.end, cost_usd_micros=end.cost,
        charged_usd_micros=end.charged, **facts,
    )  # fmt: skip
