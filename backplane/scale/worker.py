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
from dbos import DBOS

from backplane.errors import BackendError
from backplane.runtime.budgets import Amount, own_budget
from backplane.scale.durable import (
    BATCH_EVENTS_MAX,
    NAME,
    STREAM,
    WORKFLOW,
    Batch,
    DurableEngine,
    JsonText,
    queue_name,
    words_of,
)
from backplane.scale.engine import DEFAULT_LABEL, Control, Job, RunJob, read_row
from backplane.scale.watchdog import Watchdog

VERSION: Final = "1"
"""Version of the queue's rows; the engine's workers take orders of their own version only."""
LOST_S: Final = 1.0
"""Seconds between two checks of a worker whether it was declared dead."""
POOL: Final = 4
"""Database connections of a worker, plus one for every two slots; statements take milliseconds."""
POOL_MAX: Final = 20
"""Database connections at most, the engine's own default."""
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
        slots: valid for all workers of the label, as the queue has this number.
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
        self._queue, self._ledger = queue_name(label), engine.ledger
        self._away_since: float | None = None
        """Monotonic time of the first failure to reach the database; None while it is reachable."""
        self._live: dict[str, tuple[str, Control]] = {}
        """Attempt → its order, and its control."""
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
                "serializer": JsonText(),
                "enable_otlp": False,
                "log_level": "CRITICAL",
                "sys_db_pool_size": min(POOL + self._slots // 2, POOL_MAX),
                "run_migrations": False,
            }
        )

        async def order(text: str) -> str:
            return await DBOS.run_step_async({"name": "attempt"}, self._attempt, text)

        DBOS.workflow(name=WORKFLOW, max_recovery_attempts=None)(order)
        DBOS.listen_queues([self._queue])
        # Before the launch, or its threads find the queue a second later.
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
        control, count = Control(), 0

        async def emit(records: Sequence[bytes]) -> None:
            nonlocal count
            for start in range(0, len(records), BATCH_EVENTS_MAX):
                part = tuple(record.decode() for record in records[start : start + BATCH_EVENTS_MAX])
                superseded = attempt.earlier[-1] if attempt.earlier and not count else None
                batch = Batch(attempt.id, count + 1, part, superseded)
                await DBOS.write_stream_async(STREAM, msgspec.json.encode(batch).decode())
                count += len(part)

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
        lease_s = self._engine.lease_s
        reap_at = time.monotonic() + lease_s / 4
        while not self._over.wait(self._engine.beat_s):
            began = time.monotonic()
            try:
                self._hear()
                if time.monotonic() >= reap_at:
                    self._take_over()
                    reap_at = time.monotonic() + lease_s / 4
            except Exception as error:  # If the database is away, no heartbeat is sent, and the watchdog counts.
                if self._away_since is None:
                    self._away_since = began
                    ends = f"this worker ends if that lasts {lease_s * _WATCH_SHARE:g} s"
                    self._say(f"the database cannot be reached: {words_of(error)}; {ends}")
                continue
            if self._away_since is not None:
                self._say(f"the database is back after {time.monotonic() - self._away_since:.0f} s")
                self._away_since = None
            if time.monotonic() - began < lease_s * (1 - _WATCH_SHARE) and not self.lost:
                self._watchdog.feed()

    def _hear(self) -> None:
        live = dict(self._live)
        news = self._ledger.beat(self.id, {order for order, _ in live.values()})
        if not news.is_alive:
            silent = f"sent no heartbeat for {self._engine.lease_s:g} s"
            self.lost = f"worker {self.id} {silent}; others took its orders over"
        for attempt, (order, control) in live.items():
            if self.lost:
                control.fenced = self.lost
            control.why = control.why or news.cancelled.get(order)
            control.answers.update(news.answers.get(attempt, {}))

    def _take_over(self) -> None:
        owners = {row.executor_id for row in self._engine.rows(("running",)) if row.executor_id}
        for dead in self._ledger.claim_dead(owners):
            for row in self._engine.rows(("running",), executor_id=dead):
                self._ledger.lose(row.workflow_id, dead)
                self._engine.client.resume_workflow(row.workflow_id, queue_name=row.queue_name)
            self._ledger.forget(dead)
