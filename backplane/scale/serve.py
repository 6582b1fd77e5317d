"""`serve --engine`: the same protocol on stdin and stdout, and each `run` that comes in is an order of a queue.

The order's events and questions come back as they happen on the worker's machine. Its receipt is stored here and is
sent like any other. An order that cannot be queued has a receipt of this control plane with the reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread
import msgspec

from backplane import host as sidecar
from backplane.contract import canonical
from backplane.contract.canonical import Json
from backplane.contract.events import Approval, Warned
from backplane.contract.receipt import Receipt
from backplane.contract.work import OF_HOST, WorkOrder
from backplane.errors import BackplaneError, ConfigError, from_code, leaves, unforeseen
from backplane.receipts.database import ReceiptRow
from backplane.receipts.outcomes import End
from backplane.receipts.store import Store
from backplane.runtime.backends import Backend, from_command
from backplane.runtime.place import quota_of
from backplane.runtime.plane import ControlPlane
from backplane.scale.content import Contents
from backplane.scale.engine import Batch, Job
from backplane.scale.orders import asks_of, ended, followed, keep, make_job
from backplane.serve import messages, stdio

if TYPE_CHECKING:
    from backplane.scale.durable import DurableEngine

BY_RULE_S: Final = 0.5
"""Seconds in which the answer of a policy or a hook follows its question; then the question is asked here."""


class QueueTarget(msgspec.Struct, frozen=True):
    """The queue that orders are sent to."""

    open: Callable[[], tuple[DurableEngine, Contents]]
    """Opens the engine; blocks for about a second, so it is called with the first order, after the hello."""
    label: str
    priority: int | None


class KeptRun:
    """A run of another machine whose receipt is stored here, a `messages.EndedRun`; the store must be open."""

    def __init__(self, store: Store, row: ReceiptRow, attempts: int) -> None:
        self.id = row.run_id
        self.is_sealed = True
        self.stored: Receipt = store.load(row.run_id)
        self.patch: Path | None = store.patch(row)
        self.attempts = attempts
        said: Any = self.stored.backplane
        self.end = msgspec.convert(said.get("end", {"reason": "failed"}), End)
        error = said.get("error")
        self.end_error = None if error is None else from_code(error["code"], error["message"], hint=error.get("hint"))


class QueueServer(stdio.Server):
    """Sends the orders of one client to a queue."""

    def __init__(self, plane: ControlPlane, line_bytes_max: int, queue: QueueTarget) -> None:
        super().__init__(plane, line_bytes_max)
        self._queue = queue
        self._opened: tuple[DurableEngine, Contents] | None = None
        self._opening = threading.Lock()

    def _open(self) -> tuple[DurableEngine, Contents]:
        with self._opening:
            if self._opened is None:
                self._opened = self._queue.open()
            return self._opened

    def close(self) -> None:
        super().close()
        if self._opened is not None:
            self._opened[0].close()

    def host(self) -> sidecar.Host:
        # The workers announce their capabilities order by order.
        return sidecar.Host(
            id="backplane", capabilities={}, extensions=stdio.EXTENSIONS, backends=(), heeds=tuple(OF_HOST)
        )

    async def _choose(self, order: WorkOrder) -> tuple[WorkOrder, Backend, Json]:
        # Nothing is started on it: its name is for the receipt of an order that cannot be queued.
        return order, from_command(("queue",), cwd=self.plane.home, limits=self.plane.settings.limits), None

    def _ending(self, above: sidecar.HostRun, ended: messages.EndedRun) -> Iterator[bytes]:
        streamed = not isinstance(ended, KeptRun) or ended.attempts == 1
        return messages.ending(ended, ref_id=above.id, line_bytes_max=self._line_bytes_max, as_streamed=streamed)

    async def _run_here(
        self, above: sidecar.HostRun, order: WorkOrder, backend: Backend, route: Json
    ) -> messages.EndedRun:
        run_id = stdio.as_uuid(above.id)
        try:
            engine, content = await anyio.to_thread.run_sync(self._open)
            job = await anyio.to_thread.run_sync(self._job, above, order, content)
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(partial(engine.submit, job, priority=self._queue.priority))
        except BackplaneError as error:
            return await self.plane.end_unstarted(order, backend, error, run_id=run_id)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                why = above.cancelled_because or "cancelled"
                unstarted = await self.plane.end_unstarted(order, backend, why, run_id=run_id)
            return unstarted  # noqa: RET504  # A scope may swallow what is raised in it, by its type.
        # From here on a cancel goes to the queue, and the order has its receipt in any case.
        with anyio.CancelScope(shield=True):
            root = order.workspace.root if above.names_root else ""
            ended = await self._followed(above, job, engine, content, root)
        return ended  # noqa: RET504

    def _job(self, above: sidecar.HostRun, order: WorkOrder, content: Contents) -> Job:
        if order.workspace.mode != "staged" and not above.names_root:
            order = msgspec.structs.replace(order, workspace=msgspec.structs.replace(order.workspace, mode="staged"))
        if order.workspace.mode != "staged":
            fact = "whoever sent this order keeps no copy (stage/1), and a queue's workers cannot work in its folder"
            raise ConfigError("config_invalid", fact, hint='send "stage/1" in the run\'s extensions, as our clients do')
        quota, asks = quota_of(self.plane.settings.limits), "ask/1" in above.extensions
        return make_job(order, content, self.plane.home, quota, label=self._queue.label, asks=asks)

    async def _followed(
        self, above: sidecar.HostRun, job: Job, engine: DurableEngine, content: Contents, root: str
    ) -> messages.EndedRun:
        id = job.order.id

        async def cancel() -> None:
            await anyio.to_thread.run_sync(engine.cancel, id, above.cancelled_because or "cancelled")

        above.on_cancel = cancel
        if above.cancelled_because is not None:
            await cancel()
        answered: set[tuple[str, str]] = set()

        async def ask(attempt: str, asked: Approval, ask_id: str) -> None:
            await anyio.sleep(BY_RULE_S)
            if (attempt, ask_id) in answered:
                return
            with suppress(BackplaneError):  # Nobody answers here, so the attempt's own deadline decides.
                decision = await above.pass_on(asked.body)
                if decision is not None:
                    await anyio.to_thread.run_sync(engine.answer, id, attempt, ask_id, decision)

        try:
            async with anyio.create_task_group() as tasks:
                async for batch in followed(engine, id):
                    records = [record.encode() for record in batch.records]
                    if batch.superseded is not None:
                        records.insert(0, _superseded(batch))
                    await above.write_raw(messages.events(above.id, records, line_bytes_max=self._line_bytes_max))
                    for event in asks_of(batch) if job.asks else ():
                        ask_id = str(event.body.get("id"))
                        if isinstance(event, Approval):
                            tasks.start_soon(ask, batch.attempt, event, ask_id)
                        else:
                            answered.add((batch.attempt, ask_id))
                tasks.cancel_scope.cancel()
        except ExceptionGroup as errors:
            fault = leaves(errors)[0]
            raise fault if isinstance(fault, BackplaneError) else unforeseen(fault) from None
        result = await ended(engine, id)

        def kept() -> KeptRun:
            row = keep(self.plane.home, job, result, content, root)
            return KeptRun(self.plane.state_folder.store(), row, len(result.attempts))

        return await anyio.to_thread.run_sync(kept)


def _superseded(batch: Batch) -> bytes:
    """Return an event that says that all events before are those of a lost attempt."""
    told = Warned(
        ts=canonical.timestamp_at(time.time_ns()),
        message=f"attempt {batch.superseded} is void: its worker was lost, or a limit had to pass; another one begins",
        ext={"queue": {"attempt": batch.attempt, "superseded": batch.superseded}},
    )
    return canonical.encode(msgspec.to_builtins(told))
