"""Runs `serve --engine`: the protocol on stdin and stdout, with each incoming `run` put into a queue as an order.

The order's events and questions come back as they happen on the worker's machine. Its receipt is stored here and is
sent like any other. An order that cannot be queued has a receipt of this control plane with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
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
from backplane.scale.orders import Packer, asks_of, ended, followed, keep, make_job
from backplane.serve import messages, stdio

if TYPE_CHECKING:
    from backplane.scale.durable import DurableEngine

BY_RULE_S: Final = 0.5
"""Seconds to wait for the answer of a policy or a hook to a question, before the client is asked."""


class KeptRun:
    """An ended run of another machine, as a `messages.EndedRun`; its receipt is read from this machine's open store."""

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
    """Sends the orders of one client to a queue.

    Args:
        label, priority: label and priority of all orders; None is no priority.
    """

    def __init__(
        self, plane: ControlPlane, line_bytes_max: int, *, engine: DurableEngine, content: Contents, label: str,
        priority: int | None,
    ) -> None:  # fmt: skip
        super().__init__(plane, line_bytes_max)
        self._engine, self._label, self._priority = engine, label, priority
        self._packer = Packer(content, plane.home, quota_of(plane.settings.limits))

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
        async def cancel() -> None:
            with suppress(ConfigError):  # It is not submitted yet.
                await anyio.to_thread.run_sync(self._engine.cancel, order.id, above.cancelled_because or "cancelled")

        above.on_cancel = cancel
        with anyio.CancelScope(shield=True):
            try:
                job = await anyio.to_thread.run_sync(self._submit, above, order)
            except BackplaneError as error:
                return await self.plane.end_unstarted(order, backend, error, run_id=stdio.as_uuid(above.id))
            if above.cancelled_because is not None:
                await cancel()
            return await self._followed(above, job, order.workspace.root if above.names_root else "")
        raise AssertionError("a shielded scope is not cancelled")

    def _submit(self, above: sidecar.HostRun, order: WorkOrder) -> Job:
        if order.workspace.mode != "staged" and not above.names_root:
            order = msgspec.structs.replace(order, workspace=msgspec.structs.replace(order.workspace, mode="staged"))
        if order.workspace.mode != "staged":
            fact = "whoever sent this order keeps no copy (stage/1), and a queue's workers cannot work in its folder"
            raise ConfigError("config_invalid", fact, hint='send "stage/1" in the run\'s extensions, as our clients do')
        job = make_job(order, self._packer, label=self._label, asks="ask/1" in above.extensions)
        self._engine.submit(job, priority=self._priority)
        return job

    async def _followed(self, above: sidecar.HostRun, job: Job, root: str) -> messages.EndedRun:
        engine, id = self._engine, job.order.id
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
            row = keep(self.plane.home, job, result, self._packer.content, root)
            return KeptRun(self.plane.state_folder.store(), row, len(result.attempts))

        return await anyio.to_thread.run_sync(kept)


def _superseded(batch: Batch) -> bytes:
    """Return an event which reports that all earlier events belong to a lost attempt."""
    told = Warned(
        ts=canonical.timestamp_at(time.time_ns()),
        message=f"attempt {batch.superseded} is void: its worker was lost, or a limit had to pass; another one begins",
        ext={"queue": {"attempt": batch.attempt, "superseded": batch.superseded}},
    )
    return canonical.encode(msgspec.to_builtins(told))
