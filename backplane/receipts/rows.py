"""What the store says about one receipt besides the receipt itself: a row, and the chain's head.

Values only; `store` writes them and `audit` compares them with what they were made from.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane.contract.receipt import Receipt
from backplane.receipts.trace import Trace


class ReceiptRow(msgspec.Struct, frozen=True):
    """One stored receipt as the list shows it."""

    sequence: int
    run_id: str
    work_order_id: str
    backend: str
    outcome: str
    reason: str | None
    """`usage_raw.backplane.end.reason`; None in a receipt that does not say."""
    started_at: str
    finished_at: str
    duration_ms: int
    sha256: str
    trace_count: int
    trace_bytes: int
    previous_link: str
    link: str


COVERED: Final = tuple(
    name for name in ReceiptRow.__struct_fields__ if name not in ("sequence", "previous_link", "link")
)
"""Columns with what a receipt says of itself: all that is left of one that was pruned."""


class Listed(ReceiptRow, frozen=True):
    """A row, with what the receipt does not say."""

    backend_name: str | None = None
    """What the backend was called here; `backend` is what it calls itself. None for a copy and after `prune`."""


Rows = list[ReceiptRow]
"""Under a name of its own, because `Store.list` hides the builtin inside its class."""


class ChainCheckpoint(msgspec.Struct, frozen=True):
    """The head of the chain at one moment, to be kept elsewhere: only with one can a rollback be seen."""

    sequence: int
    link: str
    time: str


def columns_of(receipt: Receipt, trace: Trace) -> dict[str, Any]:
    """What a row says about its receipt, the chain aside."""
    end = receipt.backplane.get("end")
    reason = end.get("reason") if isinstance(end, dict) else None
    return {
        "run_id": receipt.meta.run_id,
        "work_order_id": receipt.meta.work_order_id,
        "backend": receipt.backend.id,
        "outcome": receipt.outcome,
        "reason": reason if isinstance(reason, str) else None,
        "started_at": receipt.meta.started_at,
        "finished_at": receipt.meta.finished_at,
        "duration_ms": receipt.meta.duration_ms,
        "sha256": receipt.receipt_sha256,
        "trace_count": len(trace),
        "trace_bytes": trace.size_bytes,
    }
