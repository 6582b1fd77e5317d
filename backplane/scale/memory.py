"""An engine inside one process, for tests and for trying things out; it ends with its process."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence

import anyio

from backplane.contract.approval import Decision
from backplane.errors import BackendError, ConfigError
from backplane.scale.engine import (
    DEFAULT_LABEL,
    Attempt,
    Control,
    Event,
    Job,
    OrderResult,
    RunJob,
    State,
    Status,
    decode_job,
    encode_job,
    unknown_order,
)


class _Order:
    def __init__(self, text: str, priority: int, place: int) -> None:
        self.text = text
        self.job = decode_job(text)
        self.rank = (priority, place)
        self.since = time.monotonic()
        self.events: list[Event] = []
        self.attempts: list[str] = []
        self.state: State = "waiting"
        self.cancelled: str | None = None
        self.control: Control | None = None
        self.result: OrderResult | None = None
        self.error: str | None = None

    def status(self) -> Status:
        waiting_ms = int((time.monotonic() - self.since) * 1000)
        return Status(
            self.job.order.id, self.state, self.job.label, tuple(self.attempts), None, self.cancelled, waiting_ms,
            self.error,
        )  # fmt: skip


class MemoryEngine:
    """See `Engine`."""

    def __init__(self) -> None:
        self._orders: dict[str, _Order] = {}
        self._changed = anyio.Condition()

    def close(self) -> None:
        """Nothing is open."""

    async def submit(self, job: Job, *, priority: int | None = None) -> bool:
        text = encode_job(job)
        known = self._orders.get(job.order.id)
        if known is not None:
            if known.text != text:
                raise ConfigError("config_invalid", f"another order has the id {job.order.id}", hint="take a new id")
            return False
        self._orders[job.order.id] = _Order(text, priority or 0, len(self._orders))
        await self._notify()
        return True

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _find(self, order_id: str) -> _Order:
        if order_id not in self._orders:
            raise unknown_order(order_id)
        return self._orders[order_id]

    async def events(self, order_id: str, *, after: int = 0) -> AsyncIterator[Event]:
        order = self._find(order_id)
        while True:
            for event in order.events[after:]:
                after = event.cursor
                yield event
            async with self._changed:
                if len(order.events) > after:
                    continue
                if order.state in ("done", "broken"):
                    return
                await self._changed.wait()

    async def told(self, order_id: str) -> Sequence[Event]:
        return tuple(self._find(order_id).events)

    async def result(self, order_id: str, *, timeout_s: float | None = None) -> OrderResult:
        order = self._find(order_id)
        with anyio.move_on_after(timeout_s):
            async with self._changed:
                while order.state not in ("done", "broken"):
                    await self._changed.wait()
        if order.result is not None:
            return order.result
        if order.error is not None:
            raise BackendError("internal", f"order {order_id} ended without a receipt: {order.error}")
        raise BackendError("backend_timeout", f"order {order_id} has not ended within {timeout_s:g} s")

    async def cancel(self, order_id: str, why: str = "cancelled") -> bool:
        order = self._find(order_id)
        if order.state not in ("waiting", "running"):
            return False
        order.cancelled = why
        if order.control is not None:
            order.control.why = why
        return True

    async def answer(self, order_id: str, attempt: str, ask: str, decision: Decision) -> bool:
        order = self._find(order_id)
        if order.control is None or order.attempts[-1] != attempt or ask in order.control.answers:
            return False
        order.control.answers[ask] = decision
        return True

    async def status(self, order_id: str) -> Status:
        return self._find(order_id).status()

    async def job(self, order_id: str) -> Job:
        return self._find(order_id).job

    async def list(self, *, limit: int = 50, state: State | None = None, label: str | None = None) -> Sequence[Status]:
        found = [order.status() for order in reversed(self._orders.values())]
        return [one for one in found if state in (None, one.state) and label in (None, one.label)][:limit]

    async def serve(self, run: RunJob, *, slots: int, label: str = DEFAULT_LABEL) -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(slots):
                tasks.start_soon(self._slot, run, label)

    async def _slot(self, run: RunJob, label: str) -> None:
        while True:
            async with self._changed:
                while not (waiting := self._waiting(label)):
                    await self._changed.wait()
                order = min(waiting, key=lambda one: one.rank)
                order.state = "running"
            await self._attempt(order, run)

    def _waiting(self, label: str) -> Sequence[_Order]:
        return [one for one in self._orders.values() if one.state == "waiting" and one.job.label == label]

    async def _attempt(self, order: _Order, run: RunJob) -> None:
        attempt = Attempt(str(uuid.uuid4()), order.job.order.id, tuple(order.attempts), order.cancelled)
        order.attempts.append(attempt.id)
        order.control, begun = Control(), len(order.events)

        async def emit(records: Sequence[bytes]) -> None:
            for record in records:
                seq = len(order.events) - begun + 1
                superseded = attempt.earlier[-1] if attempt.earlier and seq == 1 else None
                order.events.append(Event(attempt.id, seq, len(order.events) + 1, record, superseded))
            await self._notify()

        try:
            order.result = await run(order.job, attempt, emit, order.control)
            order.state = "done"
        except anyio.get_cancelled_exc_class():
            order.state = "waiting"  # The worker goes; the order stays for the next one.
            raise
        except Exception as error:  # One order's fault must not end the worker.
            order.state, order.error = "broken", f"{type(error).__name__}: {error}"
        finally:
            order.control = None
            with anyio.CancelScope(shield=True):
                await self._notify()
