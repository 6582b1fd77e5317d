"""The values of a queue: orders, attempts, events, results, limits. No I/O.

An order is run by at least one attempt and has exactly one receipt. An attempt's id is the id of its run, and it
stands on every event, so that a reader can tell the events of a lost attempt from those of the one that counts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec

from backplane.contract.approval import Decision
from backplane.contract.receipt import Usage
from backplane.contract.work import WorkOrder
from backplane.errors import ConfigError

OnLostWorker = Literal["rerun", "fail"]
State = Literal["waiting", "running", "done", "broken"]
T = TypeVar("T")

DEFAULT_LABEL: Final = "default"
LABEL_CHARS_MAX: Final = 64
ATTEMPTS_MAX: Final = 5
"""Attempts of one order: whatever loses five workers in turn is the order's own doing, and takes every worker along."""
JOB_BYTES_MAX: Final = 8 * 1024 * 1024
"""One order as JSON: it lies in a row of the database. Half the longest line of the protocol."""
PRIORITY_MAX: Final = 2**31 - 1
"""What the engine's column holds; 1 goes first, an order without a priority before all of them."""


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One order as it lies in the queue: JSON, no secret values, nothing that means something on one machine only."""

    order: WorkOrder
    on_lost_worker: OnLostWorker
    """What follows when a worker is lost in the middle: another attempt, or a failed receipt "lost worker"."""
    label: str = DEFAULT_LABEL
    backend: str | None = None
    tree: str | None = None
    """SHA-256 of the workspace's archive in the content store; None is an empty workspace."""
    asks: bool = False
    """Whether somebody answers what the policy leaves open (`DurableEngine.answer`); else the ask's default decides."""


class Attempt(msgspec.Struct, frozen=True):
    """One try at an order."""

    id: str
    """A UUID, the id of its run."""
    order_id: str
    earlier: tuple[str, ...] = ()
    """Attempts of the order that were lost, oldest first."""
    cancelled: str | None = None
    """Why the order was cancelled before this attempt began."""
    over_budget: str | None = None
    """Why the queue's budget has no room for it."""
    reserved_usd_micros: int = 0
    """Its share of the queue's budget until it is settled."""
    reported: tuple[Usage, ...] = ()
    """The usage that the lost attempts reported last, for an order with a budget; oldest first."""

    @property
    def number(self) -> int:
        """1 for the first."""
        return len(self.earlier) + 1


class Event(msgspec.Struct, frozen=True):
    """One event of an order as a follower sees it."""

    attempt: str
    seq: int
    """Counts from 1 within the attempt, without gaps."""
    cursor: int
    """To go on after this event: `events(order_id, after=cursor)`."""
    record: bytes
    """The event's canonical JSON."""
    superseded: str | None = None
    """On the first event of an attempt: the attempt before it, whose events do not count any more."""


class OrderResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an order ended with."""

    attempts: tuple[str, ...]
    """All attempts, the one that counts last."""
    receipt: str | None = None
    """The sealed receipt of the attempt that counts, canonical JSON; None when it lies in the content store."""
    receipt_content: str | None = None
    """Its SHA-256 there."""
    patch: str | None = None
    """SHA-256 of the patch in the content store; None when it stands in the receipt, or there is none."""
    cost_usd_micros: int | None = None
    """Of the attempt that counts; None where it is not known for sure."""
    outcome: str | None = None
    """Of the receipt, for who lists orders and reads none."""


class Status(msgspec.Struct, frozen=True):
    """Where an order is."""

    order_id: str
    state: State
    """`broken`: the engine ended it without a receipt, which is a fault; `error` says which."""
    label: str
    attempts: tuple[str, ...] = ()
    worker: str | None = None
    cancelled: str | None = None
    waiting_ms: int = 0
    """Since it was submitted."""
    error: str | None = None
    ended_ms_ago: int | None = None
    """None until it has ended."""
    outcome: str | None = None
    """What the receipt of a done one says: `done` alone is also how a failed run ends."""


class Worker(msgspec.Struct, frozen=True):
    """One worker that beats."""

    id: str
    label: str
    slots: int
    age_ms: int
    """Since its last beat, by the database's clock."""
    orders: tuple[str, ...] = ()
    """Ids of the orders that it runs."""


class LabelLimits(msgspec.Struct, frozen=True):
    """What holds for all workers of a label together; None is no limit."""

    concurrency: int | None = None
    """Orders that run at once."""
    rate: tuple[int, int] | None = None
    """Orders begun at most, in so many milliseconds of any time."""


class Budget(msgspec.Struct, frozen=True):
    """Of the whole queue, in millionths of a dollar."""

    limit_usd_micros: int | None
    """None is no limit."""
    spent_usd_micros: int
    """What orders have cost, and what those that run have reserved: their `max_budget_usd`."""


class Control:
    """What a running attempt learns from outside. Set from any thread."""

    __slots__ = ("answers", "fenced", "why")

    def __init__(self) -> None:
        self.answers: dict[str, Decision] = {}
        """To its asks, by their ids."""
        self.why: str | None = None
        """Cancelled, and why."""
        self.fenced: str | None = None
        """The attempt does not count any more: it ends at once, and nobody waits for its receipt."""


Emit = Callable[[Sequence[bytes]], Awaitable[None]]
"""Passes on events of an attempt, in canonical bytes, and returns once they are safe."""
RunJob = Callable[[Job, Attempt, Emit, Control], Awaitable[OrderResult]]
"""Runs one attempt. It raises only for what no receipt can tell."""


def default_on_lost(order: WorkOrder) -> OnLostWorker:
    """What an order that does not say so wants: `rerun` only where a second attempt cannot do anything twice.

    That is a staged order whose policy closes the whole network, and that brings no MCP server.
    """
    closed = bool({"*", "**"} & set(order.policy.deny_network)) and not order.abp("mcp_servers")
    return "rerun" if closed and order.workspace.mode == "staged" else "fail"


def check_label(label: str) -> str:
    """Return the label.

    Raises:
        ConfigError: `config_invalid`, not letters, digits, `-`, `_` or `.`, or too long.
    """
    plain = label.replace("-", "").replace("_", "").replace(".", "")
    if not plain.isascii() or not plain.isalnum() or len(label) > LABEL_CHARS_MAX:
        hint = f"use letters, digits, -, _ and ., at most {LABEL_CHARS_MAX} characters"
        raise ConfigError("config_invalid", f"{label[:80]!r} is not a label", hint=hint)
    return label


def check_priority(priority: int | None) -> None:
    """Raise ConfigError `config_invalid` for a priority that no queue has."""
    if priority is not None and not 1 <= priority <= PRIORITY_MAX:
        hint = f"give a number from 1 (first) to {PRIORITY_MAX} (last)"
        raise ConfigError("config_invalid", f"the priority {priority} is out of range", hint=hint)


def encode_job(job: Job) -> str:
    """The JSON text of a job. Raises ConfigError `config_invalid` over `JOB_BYTES_MAX`."""
    data = msgspec.json.encode(job, order="deterministic")
    if len(data) > JOB_BYTES_MAX:
        fact = f"the order has {len(data)} bytes as JSON; the limit is {JOB_BYTES_MAX}"
        raise ConfigError("config_invalid", fact, hint="put long texts into files of the workspace")
    return data.decode()


def read_row(text: Any, kind: type[T], what: str) -> T:
    """Read a row of the queue, which anybody may have written. Raises ConfigError `config_invalid`."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (TypeError, ValueError) as error:
        raise ConfigError("config_invalid", f"a row of the queue cannot be read as {what}: {error}") from error


def unknown_order(order_id: str) -> ConfigError:
    """The error for an id that the queue does not know."""
    return ConfigError(
        "config_invalid", f"the queue has no order {order_id[:80]!r}", hint="list the orders: backplane queue list"
    )
