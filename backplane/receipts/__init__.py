"""Receipts: the journal while a run lives, the sealed record after it, and the store of all of them.

Events come in as canonical bytes and are never held in memory as a whole.
"""

from backplane.receipts.journal import Journal, head_fact
from backplane.receipts.seal import Folded, canonical_chunks, canonical_parts, digest, fold, is_intact, seal
from backplane.receipts.store import Checkpoint, Row, Store
from backplane.receipts.trace import Trace

__all__ = [
    "Checkpoint",
    "Folded",
    "Journal",
    "Row",
    "Store",
    "Trace",
    "canonical_chunks",
    "canonical_parts",
    "digest",
    "fold",
    "head_fact",
    "is_intact",
    "seal",
]
