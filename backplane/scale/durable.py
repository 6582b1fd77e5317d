"""The engine on a database: DBOS on a SQLite file, or on Postgres with many machines; the same code.

One order is one workflow with one step, the attempt; everything else that we store about an order is in the workflow's
attributes. A worker moves an order that waits for a limit of a model's service to a queue that no worker listens to,
and back. We do not use four parts of DBOS: its recovery of dead workers (`ledger` does it, by public calls alone), its
telemetry, its conductor, and pickle, which is never read.
"""

from __future__ import annotations

import logging
import sqlite3
import sys
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, NoReturn

import msgspec
from dbos import DBOS, DBOSClient, DBOSPortableJSONSerializer
from dbos import error as dbos_error
from dbos._serialization import DefaultSerializer

from backplane.contract.approval import Decision
from backplane.errors import BackendError, ConfigError, StoreError
from backplane.scale.engine import (
    Batch,
    Job,
    Notes,
    OrderResult,
    QueueLimits,
    State,
    Status,
    VoidAttempt,
    check_label,
    check_priority,
    encode_job,
    unknown_order,
)
from backplane.scale.ledger import BEAT_S, LEASE_S, Ledger

SQLITE_MIN: Final = (3, 42) if sys.version_info >= (3, 12) else (0,)
"""Oldest SQLite: from this Python on, DBOS needs `subsec`, for which an older one returns NULL."""
NAME: Final = "backplane"
"""Name of the application, and prefix of its queues in the engine's tables."""
DEFERRED: Final = "backplane-deferred"
"""Prefix of the queues that no worker listens to, for orders that wait for a limit of a model's service."""
_ANSWER: Final = "answer/"
"""Beginning of an attribute with an answer; the ids of the attempt and of the question follow."""
WORKFLOW: Final = "backplane.order"
STREAM: Final = "events"
POLL_S: Final = 1.0
"""Seconds between two polls of a worker; from some 20 workers on, they are the database's main load."""
FOLLOW_S: Final = 0.1
"""Seconds between two polls of a follower."""
PAST_S: Final = 0.005
"""Seconds to wait for another event where only past ones are wanted."""
ID_CHARS_MIN: Final = 4
"""Least number of an id's characters to find an order by; fewer find nothing."""
PRUNED_MAX: Final = 500
"""Most orders removed in one transaction."""
DEPTH_MAX: Final = 10_000
"""Most waiting orders that are counted for a collector, as each is a row to read."""

_ATTEMPTS: Final = uuid.UUID("7d5f7a52-6c0c-4c11-9c1e-3a0f2f4b8f2d")
"""Namespace of the attempts' ids: a random UUID that must never change."""

_STATES: Final[dict[str, State]] = {
    "ENQUEUED": "waiting", "DELAYED": "waiting", "PENDING": "running", "SUCCESS": "done",
    "ERROR": "broken", "CANCELLED": "broken", "MAX_RECOVERY_ATTEMPTS_EXCEEDED": "broken",
}  # fmt: skip
_ENDED: Final = ("done", "broken")


def forbid_pickle() -> None:
    """Make the engine refuse pickled rows, which it reads whatever serializer it has.

    There is no public way (DBOS 3.4, `_serialization`): a column of the row selects pickle before the serializer is
    consulted. Remove this once the engine reads by our serializer alone; a test plants such rows.
    """

    def refuse(*_: object) -> NoReturn:
        hint = "another client of the database wrote it: check the database's write permissions"
        raise ConfigError("config_invalid", "a row of the queue is pickled, which is never read", hint=hint)

    DefaultSerializer.deserialize = refuse  # type: ignore[method-assign,assignment]
    DefaultSerializer.serialize = refuse  # type: ignore[method-assign,assignment]


class DurableEngine:
    """A queue of orders with their events and results; all methods block.

    Many processes may open one database; in each process one `worker.serve` may run.

    Args:
        url: `sqlite:///PATH` or `postgresql://…`, in SQLAlchemy's form.
        lease_s, beat_s: see `ledger`; all workers of a queue need the same lease.
        poll_s: see `POLL_S`.
        is_patient: retry while the database is away.

    Raises:
        ConfigError: `config_invalid`, this Python's SQLite is too old.
        StoreError: `receipt_store_failed`, the database cannot be reached or prepared.
    """

    def __init__(
        self, url: str, *, lease_s: float = LEASE_S, beat_s: float = BEAT_S, poll_s: float = POLL_S,
        is_patient: bool = True,
    ) -> None:  # fmt: skip
        if url.startswith("sqlite:") and sqlite3.sqlite_version_info < SQLITE_MIN:
            fact = f"a queue in a file needs SQLite 3.42 or newer with this Python, which has {sqlite3.sqlite_version}"
            raise ConfigError("config_invalid", fact, hint="use a Python with a newer SQLite, or postgresql://…")
        forbid_pickle()
        logging.getLogger("dbos").setLevel(logging.CRITICAL)
        self.url, self.lease_s, self.beat_s, self.poll_s = url, lease_s, beat_s, poll_s
        self.ledger = Ledger(url, lease_s=lease_s)
        try:
            DBOS.migrate(url)
            self.ledger.prepare()
            self.client = DBOSClient(
                system_database_url=url, serializer=DBOSPortableJSONSerializer(), application_name=NAME,
                retry_connection_errors=is_patient,
            )  # fmt: skip
        except Exception as error:  # From the engine, its database library or its driver.
            fact = f"the queue's database cannot be used: {words_of(error)}"
            hint = "give sqlite:///FILE on a local disk, or postgresql://USER@HOST/DATABASE"
            raise StoreError("receipt_store_failed", fact, hint=hint) from error

    def close(self) -> None:
        """Close the connections."""
        self.ledger.close()
        self.client.destroy()

    def find(self, name: str) -> str:
        """Return the id of the order whose id begins with a name. Raises ConfigError `config_invalid`."""
        found = self.rows(workflow_id_prefix=name, limit=2) if len(name) >= ID_CHARS_MIN else ()
        if len(found) > 1:
            fact = f"the ids of several orders begin with {name!r}"
            raise ConfigError("config_invalid", fact, hint="give more characters of the id")
        if not found:
            raise unknown_order(name)
        return str(found[0].workflow_id)

    def submit(self, job: Job, *, priority: int | None = None) -> bool:
        """Put an order into the queue, once per id.

        Returns:
            False if the queue has the order already, which is unchanged then.

        Raises:
            ConfigError: `config_invalid`: it is too large, the priority is out of range, or another order has this id.
        """
        check_priority(priority)
        text = encode_job(job)
        options: Any = {
            "workflow_name": WORKFLOW,
            "queue_name": queue_name(job.label),
            "workflow_id": job.order.id,
            "workflow_id_reuse_policy": "reject",
            "priority": priority,
        }
        try:
            self.client.enqueue(options, text)
            return True
        except dbos_error.DBOSWorkflowIDInUseError:
            if self.row(job.order.id, load_input=True).input["args"] != (text,):
                fact = f"another order has the id {job.order.id}"
                raise ConfigError("config_invalid", fact, hint="give the order a new id") from None
            return False

    def batches(self, order_id: str, *, offset: int = 0, wait_s: float = PAST_S) -> Iterator[Batch | None]:
        """Yield the events of an order until its end; yield None after `wait_s` seconds without events.

        Args:
            offset: batches to leave out.
        """
        while True:
            rows = self.client.read_stream(
                order_id, STREAM, offset=offset, timeout_seconds=wait_s, polling_interval_sec=min(FOLLOW_S, wait_s)
            )
            try:
                for row in rows:
                    yield msgspec.json.decode(row, type=Batch)
                    offset += 1
                return
            except dbos_error.DBOSStreamTimeoutError:
                yield None

    def past(self, order_id: str) -> Iterator[Batch]:
        """Yield the events of an order up to now."""
        for batch in self.batches(order_id):
            if batch is None:
                return
            yield batch

    def result(self, order_id: str) -> OrderResult | None:
        """Return an order's result; None while it has not ended.

        Raises:
            BackendError: `internal`, the engine ended it without a receipt.
            ConfigError: `config_invalid`, no such order.
        """
        row = self.row(order_id, load_output=True)
        state = _state(row)
        if state == "broken":
            raise BackendError("internal", f"order {order_id} ended without a receipt: {_error(row)}")
        return msgspec.json.decode(row.output, type=OrderResult) if state == "done" else None

    def cancel(self, order_id: str, why: str = "cancelled") -> bool:
        """Cancel an order; it still gets a receipt.

        Returns:
            False if the order had ended already; then nothing changes.

        Raises:
            ConfigError: `config_invalid`, no such order.
        """
        row = self.row(order_id)
        if _state(row) in _ENDED:
            return False
        if notes_of(row).cancelled is None:
            self.note(order_id, cancelled=why)
        return True

    def status(self, order_id: str) -> Status:
        """Return the state of an order. Raises ConfigError `config_invalid` if there is no such order."""
        return self._statuses([self.row(order_id, load_output=True)])[0]

    def job(self, order_id: str) -> Job:
        """Return the submitted job. Raises ConfigError `config_invalid` if there is no such order."""
        return msgspec.json.decode(self.row(order_id, load_input=True).input["args"][0], type=Job)

    def list(
        self, *, limit: int = 50, state: State | None = None, label: str | None = None, outcomes: bool = False
    ) -> Sequence[Status]:
        """Return orders, the newest first; None for a state or a label means all.

        Args:
            outcomes: also read the outcomes of ended orders, a result of up to 1 MiB each.
        """
        names = None if label is None else [queue_name(label), queue_name(label, DEFERRED)]
        states = None if state is None else (state,)
        return self._statuses(self.rows(states, queue_name=names, limit=limit, sort_desc=True, load_output=outcomes))

    def answer(self, order_id: str, attempt: str, ask: str, decision: Decision) -> bool:
        """Answer a question of an attempt; return False if it was answered before, as the first answer is valid."""
        if ask in answers_of(self.row(order_id), attempt):
            return False
        self.note(order_id, **{f"{_ANSWER}{attempt}/{ask}": decision})
        return True

    def limits(self, label: str) -> QueueLimits:
        """Return the present limits of a label and of the queue."""
        queue, (budget, spent) = self.client.retrieve_queue(queue_name(label)), self.ledger.budget()
        rate = queue.limiter if queue is not None else None
        return QueueLimits(
            label=label,
            concurrency=queue.global_concurrency if queue is not None else None,
            rate_orders=rate["limit"] if rate is not None else None,
            rate_ms=round(rate["period"] * 1000) if rate is not None else None,
            budget_usd_micros=budget,
            spent_usd_micros=spent,
        )

    def set_limits(self, limits: QueueLimits) -> None:
        """Set the limits of a label, valid from the workers' next poll on, and the budget of the queue."""
        rate: Any = None
        if limits.rate_orders is not None and limits.rate_ms is not None:
            rate = {"limit": limits.rate_orders, "period": limits.rate_ms / 1000}
        slots = [worker.slots for worker in self.ledger.workers() if worker.label == limits.label]
        self.client.register_queue(
            queue_name(limits.label), worker_concurrency=min(max(slots, default=1), limits.concurrency or 1 << 31),
            global_concurrency=limits.concurrency, limiter=rate, polling_interval_sec=self.poll_s,
        )  # fmt: skip
        self.ledger.set_budget(limits.budget_usd_micros)

    def prune(self, keep: int) -> int:
        """Remove all but the newest ended orders, with their events; return the number of removed ones."""
        count = 0
        while rows := self.rows(_ENDED, sort_desc=True, offset=max(keep, 0), limit=PRUNED_MAX):
            ids = [row.workflow_id for row in rows]
            self.client.delete_workflows(ids)
            count += len(ids)
        return count

    def depths(self) -> dict[str, tuple[int, int]]:
        """Return the number of waiting orders, and the age of the oldest in milliseconds, by label.

        Counts up to `DEPTH_MAX` orders, the oldest first.
        """
        now_ms, since_ms = self.ledger.now_ms(), defaultdict[str, list[int]](list)
        for row in self.rows(("waiting",), limit=DEPTH_MAX):
            since_ms[label_of(row)].append(row.created_at or now_ms)
        return {label: (len(each), max(now_ms - min(each), 0)) for label, each in since_ms.items()}

    def rows(self, states: Sequence[State] | None = None, **which: Any) -> Sequence[Any]:
        """Return the engine's rows of orders in these states (None: in all), without their texts unless asked for."""
        wanted = None if states is None else [name for name, state in _STATES.items() if state in states]
        which = {"load_input": False, "load_output": False, **which}
        return self.client.list_workflows(name=WORKFLOW, status=wanted, **which)

    def row(self, order_id: str, **which: Any) -> Any:
        """Return the engine's row of an order. Raises ConfigError `config_invalid` if there is none."""
        rows = self.rows(workflow_ids=[order_id], **which)
        if not rows:
            raise unknown_order(order_id)
        return rows[0]

    def _statuses(self, rows: Sequence[Any]) -> Sequence[Status]:
        now_ms = self.ledger.now_ms()  # The engine dates its rows by the database's clock, so ages need the same clock.
        return [_status(row, notes_of(row), now_ms) for row in rows]

    # For workers.

    def note(self, order_id: str, **attributes: Any) -> None:
        """Set attributes of an order, as in `Notes`."""
        self.client.update_workflow_attributes(order_id, msgspec.to_builtins(attributes), merge=True)

    def move(self, order_id: str, label: str, kind: str = NAME) -> None:
        """Move an order to a queue; its running attempt, if any, is void. `DEFERRED` is out of the workers' sight."""
        self.client.resume_workflow(order_id, queue_name=queue_name(label, kind))

    def take_over(self) -> None:
        """Let workers take the orders of dead workers."""
        owners = {row.executor_id for row in self.rows(("running",)) if row.executor_id}
        for dead in self.ledger.claim_dead(owners):
            for row in self.rows(("waiting", "running"), executor_id=dead):
                if _state(row) == "running":
                    self.void(row, "lost")
                elif not row.queue_name.startswith(DEFERRED):
                    continue
                self.move(row.workflow_id, label_of(row))
            self.ledger.forget(dead)

    def void(self, row: Any, why: Literal["lost", "limit"], **attributes: Any) -> None:
        """Note that the attempt of an order is void, unless a worker did that and died before its next step."""
        id, void = attempt_id(row), notes_of(row).void
        if all(one.id != id for one in void):
            attempt = VoidAttempt(id, why, self.ledger.now_ms())
            self.note(row.workflow_id, void=(*void, attempt), **attributes)


def words_of(error: Exception) -> str:
    """Return a driver's own message, without its library's advice."""
    said = str(getattr(error, "orig", None) or error).strip() or type(error).__name__
    return " ".join(said.split())[:300]


def queue_name(label: str, kind: str = NAME) -> str:
    """Return the engine's name for the queue of a label. Raises ConfigError `config_invalid`."""
    return f"{kind}.{check_label(label)}"


def attempt_id(row: Any) -> str:
    """Return the id of the attempt that began when a worker took the order."""
    return str(uuid.uuid5(_ATTEMPTS, f"{row.workflow_id}/{row.executor_id}/{row.dequeued_at}"))


def notes_of(row: Any) -> Notes:
    """Return the attributes that we store with an order."""
    return msgspec.convert(row.attributes or {}, Notes)


def answers_of(row: Any, attempt: str) -> Mapping[str, Any]:
    """Return the answers to an attempt's questions, by their ids, as JSON."""
    start = f"{_ANSWER}{attempt}/"
    return {name.removeprefix(start): one for name, one in (row.attributes or {}).items() if name.startswith(start)}


def label_of(row: Any) -> str:
    """Return the label of an order."""
    return str(row.queue_name).partition(".")[2]


def _state(row: Any) -> State:
    return _STATES.get(row.status, "broken")


def _status(row: Any, notes: Notes, now_ms: int) -> Status:
    state, attempts = _state(row), [one.id for one in notes.void]
    if state != "waiting" and row.executor_id is not None:
        attempts.append(attempt_id(row))
    return Status(
        row.workflow_id,
        state,
        label_of(row),
        tuple(attempts),
        worker=row.executor_id if state == "running" else None,
        cancelled=notes.cancelled,
        waiting_ms=max(now_ms - (row.created_at or now_ms), 0),
        error=_error(row) if state == "broken" else None,
        ended_ms_ago=max(now_ms - row.completed_at, 0) if row.completed_at else None,
        outcome=_outcome(row),
        limited_ms=notes.not_before_ms - now_ms if state == "waiting" and notes.not_before_ms > now_ms else None,
    )


def _error(row: Any) -> str:
    return f"{row.status} {row.error or ''}".strip()


def _outcome(row: Any) -> str | None:
    if _state(row) != "done" or row.output is None:
        return None
    with suppress(msgspec.MsgspecError, TypeError):  # A row that cannot be read must not hide the others of a list.
        return msgspec.json.decode(row.output, type=OrderResult).outcome
    return None
