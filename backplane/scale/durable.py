"""The engine on a database: DBOS on a SQLite file, or on Postgres with many machines; the same code.

One order is one workflow with one step, the attempt. Not used of DBOS: its recovery of dead workers (`ledger` does it,
by public calls alone), its telemetry, its conductor, and pickle, which is never read.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import sqlite3
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn, TypeVar

import anyio
import anyio.to_thread
import msgspec
from dbos import DBOS, DBOSClient
from dbos._error import DBOSStreamTimeoutError, DBOSWorkflowIDInUseError
from dbos._serialization import DefaultSerializer, Serializer

from backplane.contract.approval import Decision
from backplane.contract.events import AgentEvent
from backplane.contract.receipt import Usage
from backplane.errors import BackendError, BackplaneError, ConfigError, StoreError
from backplane.runtime.budgets import Amount, last_usage, own_budget
from backplane.scale.engine import (
    DEFAULT_LABEL,
    Budget,
    Control,
    Event,
    Job,
    LabelLimits,
    OrderResult,
    RunJob,
    State,
    Status,
    Worker,
    check_label,
    check_priority,
    encode_job,
    read_row,
    unknown_order,
)
from backplane.scale.ledger import BEAT_S, LEASE_S, Ledger, attempt_id
from backplane.scale.watchdog import Watchdog

SQLITE_MIN: Final = (3, 42) if sys.version_info >= (3, 12) else (0,)
"""Oldest SQLite: from this Python on, DBOS needs `subsec`, for which an older one returns NULL."""
NAME: Final = "backplane"
"""Name of the application, and prefix of its queues in the engine's tables."""
VERSION: Final = "1"
"""Version of the queue's rows; the engine's workers take orders of their own version only."""
WORKFLOW: Final = "backplane.order"
STREAM: Final = "events"
POLL_S: Final = 1.0
"""Seconds between two polls of a worker; from some 20 workers on, they are the database's main load."""
FOLLOW_S: Final = 0.1
"""Seconds between two polls of a follower for events, and of a submitter for the result."""
RESULT_S: Final = 0.5
"""Longest pause in seconds between two polls for a result."""
LOST_S: Final = 1.0
"""Seconds between two checks of a worker whether it was declared dead."""
BATCH_EVENTS_MAX: Final = 1000
"""Events in one row of the stream."""
POOL: Final = 4
"""Database connections of a worker, plus one for every two slots; statements take milliseconds."""
POOL_MAX: Final = 20
"""Database connections at most, the engine's own default."""
DRAIN_S_MAX: Final = 3600
"""Seconds for running orders to end after a worker's stop signal."""
HURRY_S_MAX: Final = 15
"""Seconds for running orders to end after the worker was declared dead: the hosts' grace, diff and seal."""

PRUNED_MAX: Final = 500
"""Orders removed in one transaction."""
DEPTH_MAX: Final = 10_000
"""Waiting orders that are counted for a collector; each is a row to read."""

_WATCH_SHARE: Final = 0.75
"""Share of the lease after which the watchdog kills the worker, before others take its orders over."""
_STATES: Final[dict[str, State]] = {
    "ENQUEUED": "waiting", "DELAYED": "waiting", "PENDING": "running", "SUCCESS": "done",
}  # fmt: skip
_OF_STATE: Final[dict[State, list[str]]] = {
    "waiting": ["ENQUEUED", "DELAYED"],
    "running": ["PENDING"],
    "done": ["SUCCESS"],
    "broken": ["ERROR", "CANCELLED", "MAX_RECOVERY_ATTEMPTS_EXCEEDED"],
}

T = TypeVar("T")


_read_event: Final = msgspec.json.Decoder(AgentEvent).decode


class JsonText(Serializer):
    """Writes values into the engine's tables as JSON, errors by their message."""

    def serialize(self, data: Any) -> str:
        if isinstance(data, BaseException):
            return json.dumps({"error": f"{type(data).__name__}: {data}"})
        return json.dumps({"value": data})

    def deserialize(self, serialized_data: str) -> Any:
        read = json.loads(serialized_data)
        return BackendError("internal", str(read["error"])) if "error" in read else read["value"]

    def name(self) -> str:
        return "backplane_json"


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
    """A queue of orders with their events and results.

    Many processes may open one database; in each process one engine may `serve`.

    Args:
        url: `sqlite:///PATH` or `postgresql://…`, in SQLAlchemy's form.
        lease_s, beat_s: see `ledger`; all workers of a queue need the same lease.
        poll_s: see `POLL_S`.

    Raises:
        ConfigError: `config_invalid`, this Python's SQLite is too old.
        StoreError: `receipt_store_failed`, the database cannot be reached or prepared.
    """

    def __init__(self, url: str, *, lease_s: float = LEASE_S, beat_s: float = BEAT_S, poll_s: float = POLL_S) -> None:
        if url.startswith("sqlite:") and sqlite3.sqlite_version_info < SQLITE_MIN:
            fact = f"a queue in a file needs SQLite 3.42 or newer with this Python, which has {sqlite3.sqlite_version}"
            raise ConfigError("config_invalid", fact, hint="use a Python with a newer SQLite, or postgresql://…")
        forbid_pickle()
        logging.getLogger("dbos").setLevel(logging.CRITICAL)
        self.url = url
        self.lease_s, self.beat_s, self.poll_s = lease_s, beat_s, poll_s
        self._ledger = Ledger(url, lease_s=lease_s)
        self._client_made: DBOSClient | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connections."""
        self._ledger.close()
        if self._client_made is not None:
            self._client_made.destroy()

    def prepare(self) -> None:
        """Create missing tables. Blocks; raises StoreError `receipt_store_failed`."""
        with self._lock:
            if self._client_made is not None:
                return
            try:
                DBOS.migrate(self.url)
                self._ledger.prepare()
                self._client_made = DBOSClient(
                    system_database_url=self.url, serializer=JsonText(), application_name=NAME
                )
            except BackplaneError:
                raise
            except Exception as error:  # From the engine, its database library or its driver.
                fact = f"the queue's database cannot be used: {_words(error)}"
                hint = "give sqlite:///FILE on a local disk, or postgresql://USER@HOST/DATABASE"
                raise StoreError("receipt_store_failed", fact, hint=hint) from error

    @property
    def _client(self) -> DBOSClient:
        self.prepare()
        assert self._client_made is not None
        return self._client_made

    async def submit(self, job: Job, *, priority: int | None = None) -> bool:
        """Put an order into the queue, once per id.

        Returns:
            False if the queue has the order already, which is unchanged then.

        Raises:
            ConfigError: `config_invalid`: it is too large, the priority is out of range, or another order has this id.
        """
        check_priority(priority)
        return await anyio.to_thread.run_sync(self._submit, job, priority)

    def _submit(self, job: Job, priority: int | None) -> bool:
        text = encode_job(job)
        options: Any = {
            "workflow_name": WORKFLOW,
            "queue_name": _queue(job.label),
            "workflow_id": job.order.id,
            "workflow_id_reuse_policy": "reject",
        }
        if priority is not None:
            options["priority"] = priority
        try:
            self._client.enqueue(options, text)
            return True
        except DBOSWorkflowIDInUseError:
            found = self._client.list_workflows(workflow_ids=[job.order.id], load_output=False)
            if not found or _argument(found[0].input) != [text]:
                fact = f"another order has the id {job.order.id}"
                raise ConfigError("config_invalid", fact, hint="give the order a new id") from None
            return False

    async def events(self, order_id: str, *, after: int = 0) -> AsyncIterator[Event]:
        """Yield all events of an order after this cursor, past ones first, until its end."""
        await self.status(order_id)
        offset, skip = divmod(after, BATCH_EVENTS_MAX)
        rows = self._client.read_stream_async(order_id, STREAM, offset=offset, polling_interval_sec=FOLLOW_S)
        try:
            async for row in rows:
                for event in _events(row, offset)[skip:]:
                    yield event
                offset, skip = offset + 1, 0
        finally:
            await rows.aclose()

    async def result(self, order_id: str, *, timeout_s: float | None = None) -> OrderResult:
        """Wait for an order's end.

        Raises:
            BackendError: `backend_timeout`; `internal` if the engine ended it without a receipt.
            ConfigError: `config_invalid`, no such order.
        """
        until = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        pause_s = FOLLOW_S
        while True:
            row = await anyio.to_thread.run_sync(functools.partial(self._row, order_id, load_output=True))
            state = _STATES.get(row.status, "broken")
            if state == "done":
                return read_row(row.output, OrderResult, "result")
            if state == "broken":
                why = f"{row.status} {row.error or ''}".rstrip()
                raise BackendError("internal", f"order {order_id} ended without a receipt: {why}")
            if time.monotonic() >= until:
                raise BackendError("backend_timeout", f"order {order_id} has not ended within {timeout_s:g} s")
            await anyio.sleep(pause_s)
            pause_s = min(pause_s * 1.2, RESULT_S)  # After a long wait half a second does not matter.

    async def cancel(self, order_id: str, why: str = "cancelled") -> bool:
        """Cancel an order; it still gets a receipt.

        Returns:
            False if it had ended, which changes nothing.

        Raises:
            ConfigError: `config_invalid`, no such order.
        """
        if (await self.status(order_id)).state not in ("waiting", "running"):
            return False
        await anyio.to_thread.run_sync(self._ledger.cancel, order_id, why)
        return True

    async def status(self, order_id: str) -> Status:
        """Return the state of an order. Raises ConfigError `config_invalid` if there is no such order."""
        row = await anyio.to_thread.run_sync(self._row, order_id, True)
        return (await anyio.to_thread.run_sync(self._statuses, [row]))[0]

    async def job(self, order_id: str) -> Job:
        """Return the submitted job. Raises ConfigError `config_invalid` if there is no such order."""
        row = await anyio.to_thread.run_sync(functools.partial(self._row, order_id, load_input=True))
        return read_row(next(iter(_argument(row.input)), None), Job, "order")

    async def list(
        self, *, limit: int = 50, state: State | None = None, label: str | None = None, outcomes: bool = False
    ) -> Sequence[Status]:
        """Return orders, the newest first, of all states and labels or of one.

        Args:
            outcomes: also read the outcomes of ended orders, a result of up to 1 MiB each.
        """

        def found() -> Sequence[Status]:
            wanted: Any = _OF_STATE[state] if state is not None else None
            rows = self._client.list_workflows(
                name=WORKFLOW, status=wanted, queue_name=_queue(label) if label is not None else None, limit=limit,
                sort_desc=True, load_input=False, load_output=outcomes,
            )  # fmt: skip
            return self._statuses(rows)

        return await anyio.to_thread.run_sync(found)

    async def answer(self, order_id: str, attempt: str, ask: str, decision: Decision) -> bool:
        """Answer a question of an attempt; return False if it was answered before, as the first answer is valid."""
        return await anyio.to_thread.run_sync(self._ledger.answer, order_id, attempt, ask, decision)

    async def told(self, order_id: str) -> Sequence[Event]:
        """Return an order's events up to now."""

        def read() -> Sequence[Event]:
            found: list[Event] = []
            rows = self._client.read_stream(order_id, STREAM, polling_interval_sec=0.005, timeout_seconds=0.005)
            with suppress(DBOSStreamTimeoutError):
                for offset, row in enumerate(rows):
                    found += _events(row, offset)
            return found

        return await anyio.to_thread.run_sync(read)

    async def reported(self, order_id: str, attempts: Sequence[str]) -> tuple[Usage, ...]:
        """Return the last reported usage of each of these attempts."""
        events = await self.told(order_id)
        return tuple(
            last_usage(_read_event(one.record) for one in events if one.attempt == attempt) for attempt in attempts
        )

    async def limits(self, label: str) -> LabelLimits:
        """Return the present limits of a label."""
        queue = await anyio.to_thread.run_sync(self._client.retrieve_queue, _queue(label))
        if queue is None:
            return LabelLimits()
        rate = await queue.get_limiter_async()
        concurrency = await queue.get_global_concurrency_async()
        return LabelLimits(concurrency, None if rate is None else (rate["limit"], round(rate["period"] * 1000)))

    async def set_limits(self, label: str, limits: LabelLimits) -> None:
        """Set the limits of a label, valid from the workers' next poll on."""
        rate: Any = None if limits.rate is None else {"limit": limits.rate[0], "period": limits.rate[1] / 1000}

        def register() -> None:
            self._client.register_queue(
                _queue(label), worker_concurrency=1, global_concurrency=limits.concurrency, limiter=rate
            )

        await anyio.to_thread.run_sync(register)

    async def budget(self) -> Budget:
        """Return the budget of the whole queue and its cost so far."""
        await anyio.to_thread.run_sync(self.prepare)
        return await anyio.to_thread.run_sync(self._ledger.budget)

    async def set_budget(self, limit_usd_micros: int | None) -> None:
        """Set the budget of the whole queue, past cost included; None removes the limit."""
        await anyio.to_thread.run_sync(self.prepare)
        await anyio.to_thread.run_sync(self._ledger.set_budget, limit_usd_micros)

    async def prune(self, keep: int) -> int:
        """Remove all but the newest ended orders, with their events; return the number of removed ones."""

        def pruned() -> int:
            rows = self._client.list_workflows(
                name=WORKFLOW, status=_OF_STATE["done"] + _OF_STATE["broken"], sort_desc=True, offset=max(keep, 0),
                limit=PRUNED_MAX, load_input=False, load_output=False,
            )  # fmt: skip
            ids = [row.workflow_id for row in rows]
            if ids:
                self._client.delete_workflows(ids)
                self._ledger.remove(ids)
            return len(ids)

        count = 0
        while removed := await anyio.to_thread.run_sync(pruned):
            count += removed
        return count

    async def clock_ahead_ms(self) -> int:
        """Return how far the database's clock is ahead of this machine's."""
        await anyio.to_thread.run_sync(self.prepare)
        return await anyio.to_thread.run_sync(self._ledger.now_ms) - time.time_ns() // 1_000_000

    async def workers(self) -> Sequence[Worker]:
        """Return all registered workers, dead ones included."""
        await anyio.to_thread.run_sync(self.prepare)
        return await anyio.to_thread.run_sync(self._ledger.workers)

    def depths(self) -> dict[str, tuple[int, int]]:
        """Return the number of waiting orders, and the age of the oldest in milliseconds, by label. Blocks.

        Counts up to `DEPTH_MAX` orders, the oldest first.
        """
        rows = self._client.list_workflows(
            name=WORKFLOW, status=_OF_STATE["waiting"], limit=DEPTH_MAX, load_input=False, load_output=False
        )
        now_ms, since_ms = self._ledger.now_ms(), defaultdict[str, list[int]](list)
        for row in rows:
            since_ms[_label(row)].append(row.created_at or now_ms)
        return {label: (len(each), max(now_ms - min(each), 0)) for label, each in since_ms.items()}

    def _row(self, order_id: str, load_output: bool = False, load_input: bool = False) -> Any:
        rows = self._client.list_workflows(workflow_ids=[order_id], load_input=load_input, load_output=load_output)
        if not rows:
            raise unknown_order(order_id)
        return rows[0]

    def _statuses(self, rows: Sequence[Any]) -> Sequence[Status]:
        ids = [row.workflow_id for row in rows]
        # The engine dates its rows by the database's clock, so ages need the same clock.
        lost, cancels, now_ms = self._ledger.lost(ids), self._ledger.cancels(ids), self._ledger.now_ms()
        return [
            Status(
                row.workflow_id,
                _STATES.get(row.status, "broken"),
                _label(row),
                _attempts(row, lost.get(row.workflow_id, ())),
                row.executor_id if row.status == "PENDING" else None,
                cancels.get(row.workflow_id),
                max(now_ms - (row.created_at or now_ms), 0),
                None if row.status in _STATES else f"{row.status} {row.error or ''}".strip(),
                max(now_ms - row.completed_at, 0) if row.completed_at else None,
                _outcome(row),
            )
            for row in rows
        ]

    async def serve(
        self, run: RunJob, *, slots: int, label: str = DEFAULT_LABEL, say: Callable[[str], object] = lambda _: None
    ) -> None:
        """Run orders of this label as a worker, at most `slots` at once, until cancelled.

        After a cancel it takes no more orders, and waits for running ones, `DRAIN_S_MAX` at most.

        Args:
            say: called from any thread when the database cannot be reached, and when it is back.

        Raises:
            BackendError: `backend_crashed`, the other workers declared this one dead; it can be started again.
        """
        check_label(label)
        await anyio.to_thread.run_sync(self.prepare)
        worker = _Worker(self, run, label, slots, say)
        drain_s = 0
        try:
            await anyio.to_thread.run_sync(worker.start)
            drain_s = DRAIN_S_MAX
            while not worker.lost:
                await anyio.sleep(LOST_S)
            drain_s = HURRY_S_MAX
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(worker.stop, drain_s)
        raise BackendError("backend_crashed", worker.lost, hint="start the worker again; it gets a new id")


def _words(error: Exception) -> str:
    """Return a driver's own message, without its library's advice."""
    said = str(getattr(error, "orig", None) or error).strip() or type(error).__name__
    return " ".join(said.split())[:300]


def _argument(given: Any) -> list[Any]:
    return list(given["args"]) if isinstance(given, dict) and "args" in given else []


def _queue(label: str) -> str:
    return f"{NAME}.{check_label(label)}"


def _label(row: Any) -> str:
    return str(row.queue_name).removeprefix(f"{NAME}.")


def _own_slots(database: Any, name: str, slots: int, poll_s: float) -> None:
    """Use this worker's own slots and poll instead of those in the queue's row, which all workers share.

    There is no public way (DBOS 3.4, `queue_worker_thread` reads the row at each poll). The row has one order per
    worker: if this call ever has no effect, workers only take fewer orders than they could, and a test fails.
    """
    look = database.get_queue

    def own(wanted: str, **options: Any) -> Any:
        queue = look(wanted, **options)
        if queue is not None and wanted == name:
            queue._worker_concurrency, queue._polling_interval_sec = slots, poll_s
        return queue

    database.get_queue = own


def _attempts(row: Any, lost: tuple[str, ...]) -> tuple[str, ...]:
    """Return all attempts of an order: lost ones, and that of its present or last worker."""
    if row.executor_id is None or row.status == "ENQUEUED":
        return lost
    return tuple(dict.fromkeys((*lost, attempt_id(row.workflow_id, row.executor_id))))


def _outcome(row: Any) -> str | None:
    if _STATES.get(row.status) != "done" or row.output is None:
        return None
    with suppress(BackplaneError):  # A row that cannot be read must not hide the others of a list.
        return read_row(row.output, OrderResult, "result").outcome
    return None


class _Batch(msgspec.Struct, frozen=True, omit_defaults=True):
    """One row of a stream: events of an attempt."""

    attempt: str
    seq: int
    """`seq` of the first event."""
    records: tuple[str, ...]
    superseded: str | None = None


def _events(row: Any, offset: int) -> Sequence[Event]:
    batch = read_row(row, _Batch, "batch of events")
    # The last event has the cursor of the whole row: the next row follows it.
    cursors = [*range(offset * BATCH_EVENTS_MAX + 1, offset * BATCH_EVENTS_MAX + len(batch.records))]
    cursors.append((offset + 1) * BATCH_EVENTS_MAX)
    rows = enumerate(zip(batch.records, cursors, strict=False))
    return [
        Event(batch.attempt, batch.seq + place, cursor, record.encode(), batch.superseded if place == 0 else None)
        for place, (record, cursor) in rows
    ]


class _Worker:
    """The worker of one process: the engine's threads, the heartbeat, and the running attempts."""

    def __init__(
        self, engine: DurableEngine, run: RunJob, label: str, slots: int, say: Callable[[str], object]
    ) -> None:
        self._say = say
        self._away_since: float | None = None
        """Monotonic time of the first failure to reach the database; None while it is reachable."""
        self.id = f"{os.uname().nodename[:24]}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self.lost = ""
        """Why this worker was declared dead; empty while it is alive."""
        self._engine, self._run, self._label, self._slots = engine, run, label, slots
        self._ledger = engine._ledger
        self._live: dict[str, tuple[str, Control]] = {}
        """Attempt → its order, and its control."""
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="beat", daemon=True)
        self._watchdog = Watchdog(engine.lease_s * _WATCH_SHARE)

    def start(self) -> None:
        """Register, then take orders. Blocks."""
        self._ledger.enter(self.id, self._label, self._slots)
        self._beating.start()
        config: Any = {
            "name": NAME,
            "system_database_url": self._engine.url,
            "executor_id": self.id,
            "application_version": VERSION,
            "serializer": JsonText(),
            "enable_otlp": False,
            "log_level": "CRITICAL",
            "sys_db_pool_size": min(POOL + self._slots // 2, POOL_MAX),
            "run_migrations": False,
        }
        engine = DBOS(config=config)

        async def order(text: str) -> str:
            return await DBOS.run_step_async({"name": "attempt"}, self._attempt, text)

        DBOS.workflow(name=WORKFLOW, max_recovery_attempts=None)(order)
        DBOS.listen_queues([_queue(self._label)])
        # Before the launch, or its threads find the queue a second later. They begin with the row's poll.
        self._engine._client.register_queue(
            _queue(self._label), worker_concurrency=1, polling_interval_sec=self._engine.poll_s,
            on_conflict="never_update",
        )  # fmt: skip
        DBOS.launch()
        _own_slots(engine._sys_db, _queue(self._label), self._slots, self._engine.poll_s)

    def stop(self, drain_s: int) -> None:
        """Take no more orders, wait for running ones, leave the rest to other workers. Blocks."""
        try:
            DBOS.destroy(destroy_registry=True, workflow_completion_timeout_sec=drain_s)
        finally:
            self._over.set()
            self._beating.join(self._engine.lease_s)
            with suppress(Exception):  # If the database is away, the lease runs out.
                if self._live or self.lost:
                    self._ledger.leave(self.id)
                else:
                    self._ledger.forget(self.id)
            self._watchdog.close()

    async def _attempt(self, text: str) -> str:
        order_id = str(DBOS.workflow_id)
        job = read_row(text, Job, "order")
        wanted = round((job.order.config.max_budget_usd or 0) * 1_000_000)
        attempt = await anyio.to_thread.run_sync(self._ledger.begin, order_id, self.id, wanted)
        if attempt is None:
            raise asyncio.CancelledError
        if attempt.earlier and own_budget(job.order) != Amount():
            reported = await self._engine.reported(order_id, attempt.earlier)
            attempt = msgspec.structs.replace(attempt, reported=reported)
        control, told = Control(), 0

        async def emit(records: Sequence[bytes]) -> None:
            nonlocal told
            for start in range(0, len(records), BATCH_EVENTS_MAX):
                part = tuple(record.decode() for record in records[start : start + BATCH_EVENTS_MAX])
                superseded = attempt.earlier[-1] if attempt.earlier and not told else None
                batch = _Batch(attempt.id, told + 1, part, superseded)
                await DBOS.write_stream_async(STREAM, msgspec.json.encode(batch).decode())
                told += len(part)

        self._live[attempt.id] = (order_id, control)
        try:
            result = await self._run(job, attempt, emit, control)
            if result.cost_usd_micros is not None:
                await anyio.to_thread.run_sync(self._ledger.settle, attempt.reserved_usd_micros, result.cost_usd_micros)
            return msgspec.json.encode(result).decode()
        except Exception:
            if control.fenced is None:
                raise
            # An error would become the order's end, but the next worker must write that; a cancel leaves it open.
            raise asyncio.CancelledError from None
        finally:
            del self._live[attempt.id]

    # The thread of the heartbeat.

    def _beat(self) -> None:
        reap_at = time.monotonic() + self._engine.lease_s / 4
        while not self._over.wait(self._engine.beat_s):
            began = time.monotonic()
            try:
                self._hear()
                if time.monotonic() >= reap_at:
                    self._take_over()
                    reap_at = time.monotonic() + self._engine.lease_s / 4
            except Exception as error:  # If the database is away, no heartbeat is sent, and the watchdog counts.
                if self._away_since is None:
                    self._away_since = began
                    ends = f"this worker ends if that lasts {self._engine.lease_s * _WATCH_SHARE:g} s"
                    self._say(f"the database cannot be reached: {_words(error)}; {ends}")
                continue
            if self._away_since is not None:
                self._say(f"the database is back after {time.monotonic() - self._away_since:.0f} s")
                self._away_since = None
            if time.monotonic() - began < self._engine.lease_s * (1 - _WATCH_SHARE) and not self.lost:
                self._feed()

    def _feed(self) -> None:
        if not self._watchdog.is_alive:
            self._watchdog.close()
            self._watchdog = Watchdog(self._engine.lease_s * _WATCH_SHARE)
        self._watchdog.feed()

    def _hear(self) -> None:
        live = dict(self._live)
        news = self._ledger.beat(self.id, {order for order, _ in live.values()})
        if not news.is_alive:
            self.lost = (
                f"worker {self.id} sent no heartbeat for {self._engine.lease_s:g} s; others took its orders over"
            )
        for attempt, (order, control) in live.items():
            if self.lost:
                control.fenced = self.lost
            elif order in news.cancelled:
                control.why = news.cancelled[order]
            control.answers.update(news.answers.get(attempt, {}))

    def _take_over(self) -> None:
        pending = self._pending()
        dead = self._ledger.claim_dead({row.executor_id for row in pending if row.executor_id})
        for one in dead:
            for row in self._pending(executor_id=one):
                self._ledger.lose(row.workflow_id, one)
                self._engine._client.resume_workflow(row.workflow_id, queue_name=row.queue_name)
            self._ledger.forget(one)

    def _pending(self, **which: Any) -> Sequence[Any]:
        return self._engine._client.list_workflows(
            name=WORKFLOW, status="PENDING", load_input=False, load_output=False, **which
        )
