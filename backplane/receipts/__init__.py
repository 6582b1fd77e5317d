"""Receipts: the journal while a run lives, the sealed record after it, and the store of all of them.

Events come in as canonical bytes and are never held in memory as a whole.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from backplane.receipts.audit import Audit, AuditFinding
    from backplane.receipts.bundle import export, import_bundle, parse_receipt, write_receipt
    from backplane.receipts.comparison import ABSENT, Difference, compare
    from backplane.receipts.journal import Facts, Journal, head_fact, held_fact
    from backplane.receipts.manifests import keep_manifest, kept_manifest
    from backplane.receipts.pieces import canonical_chunks, canonical_parts, digest, is_intact, seal
    from backplane.receipts.recovery import Orphan, Recovery, is_live
    from backplane.receipts.rows import ChainCheckpoint, ReceiptRow
    from backplane.receipts.store import Store
    from backplane.receipts.trace import Trace

__all__ = [
    "ABSENT",
    "Audit",
    "AuditFinding",
    "ChainCheckpoint",
    "Difference",
    "Facts",
    "Journal",
    "Orphan",
    "ReceiptRow",
    "Recovery",
    "Store",
    "Trace",
    "canonical_chunks",
    "canonical_parts",
    "compare",
    "digest",
    "export",
    "head_fact",
    "held_fact",
    "import_bundle",
    "is_intact",
    "is_live",
    "keep_manifest",
    "kept_manifest",
    "parse_receipt",
    "seal",
    "write_receipt",
]

_ON_DEMAND: Final[dict[str, str]] = {
    **dict.fromkeys(("Audit", "AuditFinding"), "audit"),
    **dict.fromkeys(("ABSENT", "Difference", "compare"), "comparison"),
    **dict.fromkeys(("export", "import_bundle", "parse_receipt", "write_receipt"), "bundle"),
    **dict.fromkeys(("Facts", "Journal", "head_fact", "held_fact"), "journal"),
    **dict.fromkeys(("keep_manifest", "kept_manifest"), "manifests"),
    **dict.fromkeys(("Orphan", "Recovery", "is_live"), "recovery"),
    **dict.fromkeys(("ChainCheckpoint", "ReceiptRow"), "rows"),
    **dict.fromkeys(("canonical_chunks", "canonical_parts", "digest", "is_intact", "seal"), "pieces"),
    "Store": "store",
    "Trace": "trace",
}
"""Everything is loaded when it is asked for: the way to the first spawn is short of milliseconds."""


def __getattr__(name: str) -> Any:
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ON_DEMAND[name]}"), name)
