"""Receipts: the journal while a run lives, the sealed record after it, and the store of all of them.

Events come in as canonical bytes and are never held in memory as a whole.
"""

from backplane.receipts.audit import Audit, Finding
from backplane.receipts.bundle import export, import_bundle, parse_receipt, write_receipt
from backplane.receipts.compare import ABSENT, Difference, compare
from backplane.receipts.journal import Facts, Journal, head_fact
from backplane.receipts.manifests import keep_manifest, kept_manifest
from backplane.receipts.recovery import Orphan, Recovery
from backplane.receipts.rows import Checkpoint, Row
from backplane.receipts.seal import Folded, canonical_chunks, canonical_parts, digest, fold, is_intact, seal
from backplane.receipts.store import Store
from backplane.receipts.trace import Trace

__all__ = [
    "ABSENT",
    "Audit",
    "Checkpoint",
    "Difference",
    "Facts",
    "Finding",
    "Folded",
    "Journal",
    "Orphan",
    "Recovery",
    "Row",
    "Store",
    "Trace",
    "canonical_chunks",
    "canonical_parts",
    "compare",
    "digest",
    "export",
    "fold",
    "head_fact",
    "import_bundle",
    "is_intact",
    "keep_manifest",
    "kept_manifest",
    "parse_receipt",
    "seal",
    "write_receipt",
]
