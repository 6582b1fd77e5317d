"""The values of a queue: orders, attempts, events, results, limits. No I/O.

An order has at least one attempt and exactly one receipt. An attempt's id is the id of its run; every event has it, so
a reader can separate the events of a lost attempt from those of the valid one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal

import msgspec

from backplane.contract.approval import Decision
from backplane.contract.receipt import Usage
from backplane.contract.work import WorkOrder
from backplane.errors import ConfigError

OnLostWorker = Literal["rerun", "fail"]
State = Literal["waiting", "running", "done", "broken"]

LISTED_MAX: Final = 10_000
"""Most orders that are counted, listed or searched for an id, the newest first."""
BATCH_EVENTS_MAX: Final = 1000
"""Most events in one row of an order's stream."""
DEFAULT_LABEL: Final = "default"
LABEL_CHARS_MAX: Final = 64
LOST_MAX: Final = 5
"""Lost attempts after which an order fails, as an order that loses five workers is most likely the cause."""
JOB_BYTES_MAX: Final = 8 * 1024 * 1024
"""Most bytes of one order as JSON, a row of the database; half the longest line of the protocol."""
PRIORITY_MAX: Final = 2**31 - 1
"""Lowest priority, the limit of the engine's column; 1 is the highest, but orders without a priority go first."""


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One order in the queue: JSON, without values of secrets, and without paths of one machine."""

    order: WorkOrder
    on_lost_worker: OnLostWorker
    """The reaction to a worker lost during the run: another attempt, or a failed receipt "lost worker"."""
    label: str = DEFAULT_LABEL
    backend: str | None = None
    tree: str | None = None
    """SHA-256 of the workspace's archive in the content store; None for an empty workspace."""
    asks: bool = False
    """True if the submitter answers asks (`DurableEngine.answer`); else the ask's default decides."""


class VoidAttempt(msgspec.Struct, frozen=True):
    """An attempt that ended without the order's result; its events do not count."""

    id: str
    why: Literal["lost", "limit"]
    """`lost`: the attempt's worker was lost; `limit`: the attempt waited for a limit of the model's service, and gave
    its slot to another order."""
    at_ms: int
    """Time of the attempt's end by the database's clock, in milliseconds since 1970."""


class Notes(msgspec.Struct, frozen=True):
    """The attributes that we store with an order in the engine's table."""

    void: tuple[VoidAttempt, ...] = ()
    """The order's void attempts, oldest first."""
    cancelled: str | None = None
    """Why the order was cancelled; None if it was not."""
    not_before_ms: int = 0
    """Earliest time of the next attempt by the database's clock, in milliseconds since 1970; 0 if at any time."""
    waited_ms: int = 0
    """Milliseconds between attempts that count against the order's `wait_for_limit_s`."""


class Share(msgspec.Struct, frozen=True):
    """An attempt's share of the queue's budget, reserved until it is settled."""

    usd_micros: int = 0
    denied: str | None = None
    """Why there is no share; None if the attempt may begin."""


class Attempt(msgspec.Struct, frozen=True):
    """One try at an order."""

    id: str
    """Id of the attempt and of its run, a UUID."""
    order_id: str
    notes: Notes = Notes()
    share: Share = Share()
    reported: tuple[Usage, ...] = ()
    """The usage that each void attempt reported last, for an order with a budget; oldest first."""

    @property
    def lost(self) -> tuple[str, ...]:
        """Ids of the attempts that ended with their workers, oldest first."""
        return tuple(one.id for one in self.notes.void if one.why == "lost")

    @property
    def all(self) -> tuple[str, ...]:
        """Ids of all attempts of the order, this one last."""
        return (*(one.id for one in self.notes.void), self.id)


class Batch(msgspec.Struct, frozen=True, omit_defaults=True):
    """Events of an attempt that were stored together: a row of the order's stream."""

    attempt: str
    seq: int
    """Number of the first event, counted from 1 within the attempt, without gaps."""
    records: tuple[str, ...]
    """Each event's canonical JSON."""
    superseded: str | None = None
    """Id of the previous attempt, whose events are void, on the first batch of an attempt; else None."""


class OrderResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of an order."""

    attempts: tuple[str, ...]
    """Ids of all attempts; the last one is valid."""
    receipt: str | None = None
    """The sealed receipt of the valid attempt, canonical JSON; None if it is in the content store."""
    receipt_content: str | None = None
    """SHA-256 of the receipt in the content store; None if `receipt` has the receipt itself."""
    patch: str | None = None
    """SHA-256 of the patch in the content store; None if the receipt has it, or there is none."""
    cost_usd_micros: int | None = None
    """Cost of the valid attempt, in millionths of a dollar; None if it is not known exactly."""
    outcome: str | None = None
    """The receipt's outcome, for lists that read no receipts; None if unknown."""


class LimitPause(msgspec.Struct, frozen=True):
    """An attempt that ended because a limit of the model's service must pass first; nothing was billed."""

    wait_ms: int


class Status(msgspec.Struct, frozen=True):
    """The state of an order."""

    order_id: str
    state: State
    """State of the order; `broken`: the engine ended it without a receipt, which is a fault, and `error` has it."""
    label: str
    attempts: tuple[str, ...] = ()
    worker: str | None = None
    cancelled: str | None = None
    waiting_ms: int = 0
    """Milliseconds since the order was submitted."""
    error: str | None = None
    ended_ms_ago: int | None = None
    """Milliseconds since the order ended; None before its end."""
    outcome: str | None = None
    """The receipt's outcome of a `done` order, such as `failed`; None in other states, or if it was not read."""
    limited_ms: int | None = None
    """Milliseconds until an order that waits for a limit of the model's service may begin; None for other orders."""


class Worker(msgspec.Struct, frozen=True):
    """One registered worker."""

    id: str
    label: str
    slots: int
    age_ms: int
    """Milliseconds since the worker's last heartbeat, by the database's clock."""
    orders: tuple[str, ...] = ()
    """Ids of the orders that the worker runs."""


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a label, for all its workers together, and the budget of the whole queue; None means no limit."""

    label: str
    concurrency: int | None = None
    """Most orders that run at the same time."""
    rate_orders: int | None = None
    """Most orders that may begin in each `rate_ms` milliseconds."""
    rate_ms: int | None = None
    budget_usd_micros: int | None = None
    spent_usd_micros: int = 0
    """Cost of all orders of the queue and the reserved `max_budget_usd` of running ones, in millionths of a dollar."""


class Control:
    """Messages to a running attempt, set from any thread."""

    __slots__ = ("answers", "fenced", "why")

    def __init__(self) -> None:
        self.answers: dict[str, Decision] = {}
        """Answers to the attempt's asks, by the ids of the asks."""
        self.why: str | None = None
        """Why the order is cancelled; None if it is not."""
        self.fenced: str | None = None
        """Why the attempt is void; it then ends at once, without a receipt. None while it is valid."""


Emit = Callable[[Sequence[bytes]], Awaitable[None]]
"""Stores events of an attempt, as canonical bytes, and returns once they are committed."""
RunJob = Callable[[Job, Attempt, Emit, Control], Awaitable[OrderResult | LimitPause]]
"""Runs one attempt; raises only for a fault that no receipt can record."""


def default_on_lost(order: WorkOrder) -> OnLostWorker:
    """Return the default of an order: `rerun` only if a second attempt can do nothing twice.

    Such an order is staged, its policy closes the whole network, and it has no MCP server.
    """
    closed = bool({"*", "**"} & set(order.policy.deny_network)) and not order.abp("mcp_servers")
    return "rerun" if closed and order.workspace.mode == "staged" else "fail"


def check_label(label: str) -> str:
    """Check the name of a label and return it.

    Raises:
        ConfigError: `config_invalid`, not letters, digits, `-`, `_` or `.`, or too long.
    """
    plain = label.replace("-", "").replace("_", "").replace(".", "")
    if not plain.isascii() or not plain.isalnum() or len(label) > LABEL_CHARS_MAX:
        hint = f"use letters, digits, -, _ and ., at most {LABEL_CHARS_MAX} characters"
        raise ConfigError("config_invalid", f"{label[:80]!r} is not a label", hint=hint)
    return label


def check_priority(priority: int | None) -> None:
    """Raise ConfigError `config_invalid` if the priority is out of range."""
    if priority is not None and not 1 <= priority <= PRIORITY_MAX:
        hint = f"give a number from 1 (first) to {PRIORITY_MAX} (last)"
        raise ConfigError("config_invalid", f"the priority {priority} is out of range", hint=hint)


def encode_job(job: Job) -> str:
    """Return the JSON text of a job. Raises ConfigError `config_invalid` over `JOB_BYTES_MAX`."""
    data = msgspec.json.encode(job, order="deterministic")
    if len(data) > JOB_BYTES_MAX:
        fact = f"the order has {len(data)} bytes as JSON; the limit is {JOB_BYTES_MAX}"
        raise ConfigError("config_invalid", fact, hint="put long texts into files of the workspace")
    return data.decode()


def unknown_order(order_id: str) -> ConfigError:
    """Return the error for an unknown id."""
    fact = f"the queue has no order {order_id[:80]!r}"
    return ConfigError("config_invalid", fact, hint="list the orders: backplane queue list")
