"""A worker of the queue: the engine's threads, the heartbeat, and the running attempts.

A worker that the others declared dead is fenced: the engine refuses its next write, and its attempts end at once.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import anyio
import anyio.to_thread
import msgspec
from dbos import DBOS, DBOSPortableJSONSerializer

from backplane.contract.approval import Decision
from backplane.contract.events import AgentEvent
from backplane.errors import BackendError
from backplane.runtime.budgets import Amount, last_usage, own_budget
from backplane.scale.durable import (
    DEFERRED,
    NAME,
    STREAM,
    WORKFLOW,
    DurableEngine,
    answers_of,
    attempt_id,
    notes_of,
    queue_name,
    words_of,
)
from backplane.scale.engine import (
    BATCH_EVENTS_MAX,
    DEFAULT_LABEL,
    Attempt,
    Batch,
    Control,
    Emit,
    Job,
    LimitPause,
    OrderResult,
    RunJob,
)
from backplane.scale.orders import events_of
from backplane.scale.watchdog import Watchdog

VERSION: Final = "1"
"""Version of the queue's rows; the engine's workers take orders of their own version only."""
LOST_S: Final = 1.0
"""Seconds between two checks whether this worker was declared dead."""
DRAIN_S_MAX: Final = 3600
"""Seconds for running orders to end after a worker's stop signal."""
HURRY_S_MAX: Final = 15
"""Seconds for running orders to end after the worker was declared dead: the hosts' grace, diff and seal."""
_WATCH_SHARE: Final = 0.75
"""Share of the lease after which the watchdog kills the worker, before others take its orders over."""


async def serve(
    engine: DurableEngine,
    run: RunJob,
    *,
    slots: int,
    label: str = DEFAULT_LABEL,
    say: Callable[[str], object] = lambda _: None,
) -> None:
    """Run orders of this label as a worker, at most `slots` at once, until cancelled.

    After a cancel it takes no more orders, and waits for running ones, `DRAIN_S_MAX` at most.

    Args:
        slots: most orders at once; the queue stores one number for all workers of the label.
        say: called from any thread when the database cannot be reached, and when it is back.

    Raises:
        BackendError: `backend_crashed`, the other workers declared this one dead; it can be started again.
    """
    worker = _Worker(engine, run, label, slots, say)
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


class _Worker:
    """The worker of one process."""

    def __init__(
        self, engine: DurableEngine, run: RunJob, label: str, slots: int, say: Callable[[str], object]
    ) -> None:
        self.id = f"{os.uname().nodename[:24]}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self.lost = ""
        """Why this worker was declared dead; empty while it is alive."""
        self._engine, self._run, self._label, self._slots, self._say = engine, run, label, slots, say
        # A retry would pause the heartbeat for longer than the lease.
        self._impatient = DurableEngine(engine.url, lease_s=engine.lease_s, is_patient=False)
        self._queue, self._ledger = queue_name(label), engine.ledger
        self._is_away = False
        """True while the database cannot be reached."""
        self._live: dict[str, tuple[str, Control]] = {}
        """Id of a running order → its attempt's id and its control."""
        self._deferred: dict[str, float] = {}
        """Id of an order that waits for a limit of a model's service → monotonic time when workers may take it."""
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="beat", daemon=True)
        self._watchdog = Watchdog(engine.lease_s * _WATCH_SHARE)

    def start(self) -> None:
        """Register, then take orders. Blocks."""
        self._ledger.enter(self.id, self._label, self._slots)
        self._beating.start()
        DBOS(
            config={
                "name": NAME,
                "system_database_url": self._engine.url,
                "executor_id": self.id,
                "application_version": VERSION,
                "serializer": DBOSPortableJSONSerializer(),
                "enable_otlp": False,
                "log_level": "CRITICAL",
                "run_migrations": False,
            }
        )

        async def order(text: str) -> str:
            return await DBOS.run_step_async({"name": "attempt"}, self._attempt, text)

        DBOS.workflow(name=WORKFLOW, max_recovery_attempts=None)(order)
        DBOS.listen_queues([self._queue])
        # This must precede the launch; otherwise the engine's threads find the queue a second later.
        queue = self._engine.client.register_queue(
            self._queue, polling_interval_sec=self._engine.poll_s, on_conflict="never_update"
        )
        queue.set_worker_concurrency(min(self._slots, queue.global_concurrency or self._slots))
        queue.set_polling_interval_sec(self._engine.poll_s)
        DBOS.launch()

    def stop(self, drain_s: int) -> None:
        """Take no more orders, wait for running ones, leave the rest to other workers. Blocks."""
        try:
            DBOS.destroy(destroy_registry=True, workflow_completion_timeout_sec=drain_s)
        finally:
            self._over.set()
            if self._beating.ident is not None:
                self._beating.join(self._engine.lease_s)
            with suppress(Exception):  # If the database is away, the lease runs out.
                if self._live or self._deferred or self.lost:
                    self._ledger.leave(self.id)
                else:
                    self._ledger.forget(self.id)
            self._impatient.close()
            self._watchdog.close()

    async def _attempt(self, text: str) -> str:
        """Run an attempt; a cancel leaves the order to its next attempt."""
        job = msgspec.json.decode(text, type=Job)
        attempt = await anyio.to_thread.run_sync(self._begin, job, str(DBOS.workflow_id))
        if attempt is None:
            raise asyncio.CancelledError
        control = Control()
        self._live[attempt.order_id] = (attempt.id, control)
        try:
            result = await self._run(job, attempt, self._emitter(attempt), control)
            if self.lost:
                raise BackendError("stream_closed", self.lost)
            return await anyio.to_thread.run_sync(self._end, job, attempt, result)
        except Exception:
            if control.fenced is None and not self.lost:
                raise
            # An error would become the order's end, but the next worker must write that; a cancel leaves it open.
            raise asyncio.CancelledError from None
        finally:
            del self._live[attempt.order_id]

    def _begin(self, job: Job, order_id: str) -> Attempt | None:
        """Return a new attempt; None if the order must wait, or this worker was declared dead. Blocks."""
        row = self._engine.row(order_id)
        notes = notes_of(row)
        wait_ms = notes.not_before_ms - self._ledger.now_ms()
        if wait_ms > 0 and notes.cancelled is None:
            self._defer(job, order_id, wait_ms)
            return None
        wanted = round((job.order.config.max_budget_usd or 0) * 1_000_000)
        share = self._ledger.begin(self.id, wanted if notes.cancelled is None else 0)
        if share is None:
            return None
        reported: dict[str, list[AgentEvent]] = {}
        if notes.void and own_budget(job.order) != Amount():
            for batch in self._engine.past(order_id):
                reported.setdefault(batch.attempt, []).extend(events_of(batch))
        usages = tuple(last_usage(reported.get(one.id, ())) for one in notes.void)
        return Attempt(attempt_id(row), order_id, notes, share, usages)

    def _end(self, job: Job, attempt: Attempt, result: OrderResult | LimitPause) -> str:
        """Return the text of an order's result, or defer the order. Blocks."""
        cost = 0 if isinstance(result, LimitPause) else result.cost_usd_micros
        if cost is not None:
            self._ledger.settle(attempt.share.usd_micros, cost)
        if isinstance(result, OrderResult):
            return msgspec.json.encode(result).decode()
        waits = {
            "not_before_ms": self._ledger.now_ms() + result.wait_ms,
            "waited_ms": attempt.notes.waited_ms + result.wait_ms,
        }
        self._engine.void(self._engine.row(attempt.order_id), "limit", **waits)
        self._defer(job, attempt.order_id, result.wait_ms)
        raise asyncio.CancelledError

    def _defer(self, job: Job, order_id: str, wait_ms: int) -> None:
        self._deferred[order_id] = time.monotonic() + wait_ms / 1000
        self._engine.move(order_id, job.label, DEFERRED)

    def _emitter(self, attempt: Attempt) -> Emit:
        count = 0

        async def emit(records: Sequence[bytes]) -> None:
            nonlocal count
            for start in range(0, len(records), BATCH_EVENTS_MAX):
                part = tuple(record.decode() for record in records[start : start + BATCH_EVENTS_MAX])
                superseded = attempt.notes.void[-1].id if attempt.notes.void and not count else None
                batch = Batch(attempt.id, count + 1, part, superseded)
                await DBOS.write_stream_async(STREAM, msgspec.json.encode(batch).decode())
                count += len(part)

        return emit

    # The thread of the heartbeat.

    def _beat(self) -> None:
        lease_s = self._engine.lease_s
        reap_at = time.monotonic() + lease_s / 4
        while not self._over.wait(self._engine.beat_s):
            began = time.monotonic()
            try:
                self._hear()
                if time.monotonic() >= reap_at:
                    self._impatient.take_over()
                    reap_at = time.monotonic() + lease_s / 4
            except Exception as error:  # If the database is away, no heartbeat is sent, and the watchdog counts.
                if not self._is_away:
                    ends = f"this worker ends if that lasts {lease_s * _WATCH_SHARE:g} s"
                    self._say(f"the database cannot be reached: {words_of(error)}; {ends}")
                self._is_away = True
                continue
            if self._is_away:
                self._say("the database is back")
                self._is_away = False
            if time.monotonic() - began < lease_s * (1 - _WATCH_SHARE) and not self.lost:
                self._watchdog.feed()

    def _hear(self) -> None:
        """Send a heartbeat, and read the notes of this worker's orders."""
        live = dict(self._live)
        if not self._impatient.ledger.beat(self.id):
            silent = f"sent no heartbeat for {self._engine.lease_s:g} s"
            self.lost = f"worker {self.id} {silent}; others took its orders over"
            for _, control in live.values():
                control.fenced = self.lost
            self._deferred.clear()
        ids = [*live, *list(self._deferred)]
        for row in self._impatient.rows(workflow_ids=ids) if ids else ():
            id, why = row.workflow_id, notes_of(row).cancelled
            if id in live:
                attempt, control = live[id]
                control.why = control.why or why
                given = answers_of(row, attempt)
                control.answers.update({ask: msgspec.convert(one, Decision) for ask, one in given.items()})
            if id in self._deferred and (why is not None or self._deferred[id] <= time.monotonic()):
                self._impatient.move(id, self._label)
                del self._deferred[id]
