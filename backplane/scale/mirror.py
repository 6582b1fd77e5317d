"""A queued order's events as a local run: what `watch`, `runs`, `report` and `why` read while it is at work elsewhere.

The folder is that of a copy, so one whose follower died is removed by the next start here, never sealed.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import anyio.to_thread

from backplane.contract.canonical import timestamp_at
from backplane.contract.work import WorkOrder
from backplane.errors import StoreError
from backplane.receipts import ReceiptRow, Store
from backplane.receipts.journal import Journal, head_fact
from backplane.scale.content import Contents
from backplane.scale.engine import Engine, Event, Job, OrderResult
from backplane.scale.orders import keep


class Mirror:
    """The attempt of an order that counts so far, in a run folder of its own; let go by `close`. Everything blocks.

    Args:
        backend: its name, for lists.
    """

    def __init__(self, home: Path, order: WorkOrder, backend: str | None) -> None:
        self._home, self._order, self._backend = home, order, backend or "queue"
        self._journal: Journal | None = None
        self._attempt: str | None = None

    def take(self, event: Event) -> None:
        """Add the next event; those of a lost attempt are removed with its folder.

        Raises:
            StoreError: `receipt_store_failed`.
        """
        if event.attempt != self._attempt:
            self.close()
            self._attempt = event.attempt
            if event.seq == 1:  # Else what came before is missing: no half of a run is shown.
                self._journal = self._opened(event.attempt)
        if self._journal is not None:
            self._journal.append(event.record.rstrip(b"\n") + b"\n", 1)

    def _opened(self, attempt: str) -> Journal | None:
        started = timestamp_at(time.time_ns())
        head = head_fact(self._order, run_id=attempt, started_at=started, backend=self._backend)
        with suppress(StoreError):  # Somebody else follows it, or its receipt is here already.
            journal = Journal.create(self._home, attempt, {**head, "fact": "copied", "patch": True})
            journal.note(head)
            return journal
        return None

    def end(self, store: Store, result: OrderResult, content: Contents) -> ReceiptRow:
        """Keep the receipt in the place of what was mirrored; raises as `orders.keep`."""
        journal, self._journal = self._journal, None
        if journal is not None and journal.run_id != result.attempts[-1]:
            journal.discard()
            journal = None
        return keep(store, self._order.id, result, content, journal)

    def close(self) -> None:
        """Remove what was mirrored of an attempt without a receipt."""
        if self._journal is not None:
            self._journal.discard()
            self._journal = None


async def bring(
    engine: Engine, job: Job, content: Contents, home: Path, each: Callable[[Event], Awaitable[None]] | None = None
) -> tuple[ReceiptRow, OrderResult]:
    """Follow an order to its end as a local run, and keep its receipt and patch here, verified.

    Args:
        each: is given every event, those of lost attempts too.

    Raises:
        BackendError: `internal`, the engine ended it without a receipt.
        BackplaneError: as `orders.keep`, and of the engine.
    """
    mirror = Mirror(home, job.order, job.backend)
    try:
        async for event in engine.events(job.order.id):
            await anyio.to_thread.run_sync(mirror.take, event)
            if each is not None:
                await each(event)
        result = await engine.result(job.order.id)

        def kept() -> ReceiptRow:
            with Store.open(home) as store:
                return mirror.end(store, result, content)

        return await anyio.to_thread.run_sync(kept), result
    finally:
        mirror.close()
