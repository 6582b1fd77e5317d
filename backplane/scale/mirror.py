"""A queued order's events as a local run: what `watch`, `runs`, `report` and `why` read while it is at work elsewhere.

The folder is that of a copy, so one whose follower died is removed by the next start here, never sealed.
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
    """The attempt of an order that counts so far, in a run folder of its own; let go by `close`. Everything blocks.

    Args:
        backend: its name, for lists; None where a worker's router chooses it.
    """

    def __init__(self, home: Path, order: WorkOrder, backend: str | None) -> None:
        self._home, self._order, self._backend = home, order, backend
        self._journal: Journal | None = None
        self._attempt: str | None = None

    def take(self, event: Event) -> bool:
        """Add the next event; those of a lost attempt are removed with its folder.

        Returns:
            Whether it is the first one of a run that is kept here.

        Raises:
            StoreError: `receipt_store_failed`.
        """
        is_new = event.attempt != self._attempt
        if is_new:
            self.close()
            self._attempt = event.attempt
            if event.seq == 1:  # Else what came before is missing: no half of a run is shown.
                self._journal = self._opened(event.attempt)
        if self._journal is not None:
            self._journal.append(event.record.rstrip(b"\n") + b"\n", 1)
        return is_new and self._journal is not None

    def _opened(self, attempt: str) -> Journal | None:
        started = timestamp_at(time.time_ns())
        head = head_fact(self._order, run_id=attempt, started_at=started, backend=self._backend)
        with suppress(StoreError):  # Somebody else follows it, or its receipt is here already.
            journal = Journal.create(self._home, attempt, {**head, "fact": COPIED, "patch": True})
            journal.note(head)
            return journal
        return None

    def end(self, store: Store, result: OrderResult, content: Contents) -> ReceiptRow:
        """Keep the receipt in the place of what was mirrored; raises as `orders.keep`."""
        if self._journal is None or self._journal.run_id != result.attempts[-1]:
            self.close()
            if not store.has(result.attempts[-1]):  # It ended before it had an event.
                self._journal = self._opened(result.attempts[-1])
        journal, self._journal = self._journal, None
        return keep(store, self._order.id, result, content, journal)

    def close(self) -> None:
        """Remove what was mirrored of an attempt without a receipt."""
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
    """Follow an order to its end as a local run, and keep its receipt and patch here, verified.

    What the local run is told at its door goes to the queue.

    Args:
        each: is given every event, those of lost attempts too.
        root: the folder here that it is for, where that is known.

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
