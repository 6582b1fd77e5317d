"""A queued order as a local run, which `watch`, `runs`, `report` and `why` read while a worker is at it.

Its folder is marked as a copy: if the follower dies, the next start removes the folder and never seals it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import msgspec

from backplane.contract.canonical import timestamp_at
from backplane.contract.work import WorkOrder
from backplane.errors import StoreError, leaves
from backplane.receipts.database import ReceiptRow
from backplane.receipts.journal import COPIED, Journal, head_fact
from backplane.receipts.store import Store
from backplane.runtime.door import open_door
from backplane.scale.content import Contents
from backplane.scale.engine import Event, Job, OrderResult
from backplane.scale.orders import keep, tell

if TYPE_CHECKING:
    from backplane.scale.durable import DurableEngine


class Mirror:
    """The newest attempt of an order in a run folder of its own; `close` removes an unfinished one. All calls block.

    Args:
        backend: its name, for lists; None if a worker's router chooses it.
    """

    def __init__(self, home: Path, order: WorkOrder, backend: str | None) -> None:
        self._home, self._order, self._backend = home, order, backend
        self._journal: Journal | None = None
        self._attempt: str | None = None

    def take(self, event: Event) -> bool:
        """Add the next event; a new attempt replaces the folder of the lost one.

        Returns:
            True if it is the first event of a run that is stored here.

        Raises:
            StoreError: `receipt_store_failed`.
        """
        is_new = event.attempt != self._attempt
        if is_new:
            self.close()
            self._attempt = event.attempt
            if event.seq == 1:  # Else the events before are missing, and half a run is not shown.
                self._journal = self._opened(event.attempt)
        if self._journal is not None:
            self._journal.append(event.record.rstrip(b"\n") + b"\n", 1)
        return is_new and self._journal is not None

    def _opened(self, attempt: str) -> Journal | None:
        started = timestamp_at(time.time_ns())
        head = head_fact(self._order, run_id=attempt, started_at=started, backend=self._backend)
        with suppress(StoreError):  # Another process follows it, or its receipt is stored already.
            journal = Journal.create(self._home, attempt, {**head, "fact": COPIED, "patch": True})
            journal.note(head)
            return journal
        return None

    def end(self, store: Store, result: OrderResult, content: Contents) -> ReceiptRow:
        """Replace the copy by the receipt; raises as `orders.keep`."""
        if self._journal is None or self._journal.run_id != result.attempts[-1]:
            self.close()
            if not store.has(result.attempts[-1]):  # It ended without an event.
                self._journal = self._opened(result.attempts[-1])
        journal, self._journal = self._journal, None
        return keep(store, self._order.id, result, content, journal)

    def close(self) -> None:
        """Remove the copy of an attempt without a receipt."""
        if self._journal is not None:
            self._journal.discard()
            self._journal = None


async def bring(
    engine: DurableEngine,
    job: Job,
    content: Contents,
    home: Path,
    each: Callable[[Event], Awaitable[None]] | None = None,
    *,
    root: str = "",
) -> tuple[ReceiptRow, OrderResult]:
    """Follow an order to its end as a local run, and store its verified receipt and patch.

    Answers and cancels sent to the local run go to the queue.

    Args:
        each: called with every event, also those of lost attempts.
        root: the local folder of the order, if known.

    Raises:
        BackendError: `internal`, the engine ended it without a receipt.
        BackplaneError: as `orders.keep`, and of the engine.
    """
    order = msgspec.structs.replace(job.order, workspace=msgspec.structs.replace(job.order.workspace, root=root))
    mirror = Mirror(home, order, job.backend)

    try:
        async with anyio.create_task_group() as doors:
            async for event in engine.events(order.id):
                if await anyio.to_thread.run_sync(mirror.take, event):
                    doors.start_soon(open_door, home, event.attempt, partial(tell, engine, order.id))
                if each is not None:
                    await each(event)
            doors.cancel_scope.cancel()
        result = await engine.result(order.id)

        def kept() -> ReceiptRow:
            with Store.open(home) as store:
                return mirror.end(store, result, content)

        return await anyio.to_thread.run_sync(kept), result
    except ExceptionGroup as errors:
        raise leaves(errors)[0] from None
    finally:
        mirror.close()
