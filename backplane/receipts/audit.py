"""Checks that a stored receipt is as it was sealed: body, trace, patch, columns and chain.

Every check returns its findings; none repairs anything. If the whole store was replaced by an older copy, only a
checkpoint kept elsewhere shows it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from backplane.contract import canonical
from backplane.contract.canonical import Json
from backplane.contract.receipt import Receipt
from backplane.errors import StoreError
from backplane.receipts.database import FIRST_LINK, LINK, ChainCheckpoint, ReceiptRow, columns_of, kept_row, link_of
from backplane.receipts.journal import COPIED, PATCH, opening_of
from backplane.receipts.pieces import digest, with_trace, without_trace
from backplane.receipts.trace import CHUNK_BYTES, Trace, open_plain

_EMPTY_SHA256: Final = canonical.sha256_hex(b"")

_RECORD, _CONTENTS = "patch.json", "repo.git"
"""Files from which a patch is applied; imported receipts come without them."""


class AuditFinding(msgspec.Struct, frozen=True, rename={"run_id": "name"}):
    """A fault of one receipt or of the store."""

    code: str | None
    """`receipt_hash_mismatch`, `receipt_chain_broken`, or `receipt_store_failed` for an unreadable receipt; None for a
    signature."""
    run_id: str
    """Id of the run, or the file or folder that was checked; empty for the store itself."""
    fact: str


class Audit(msgspec.Struct, frozen=True, rename={"findings": "faults"}):
    """The result of checking receipts: the whole store, or some."""

    findings: tuple[AuditFinding, ...]
    checked: int
    """Number of receipts whose content was hashed."""
    pruned: int = 0
    """Number of pruned receipts, of which only the row and its place in the chain were checked."""
    rollback_checked: bool = False
    """True if a checkpoint was given; without one, missing last rows or an older copy of the store go unnoticed."""
    rebuilt: str | None = None
    """When the index was last rebuilt from the run folders; None if it never was."""


def check_row(row: ReceiptRow, body: bytes, trace: Trace, folder: Path) -> list[AuditFinding]:
    """Compare one row with its receipt's body, its trace and its patch in the run's folder."""
    try:
        receipt = with_trace(body, trace)
    except (msgspec.MsgspecError, ValueError) as error:
        return [_mismatch(row, f"the stored body is no receipt: {error}")]
    faults = [] if without_trace(receipt) == body else ["the stored body is not in canonical form"]
    faults += _trace_faults(row, trace)
    try:
        computed, columns = digest(receipt), columns_of(receipt, trace)
    except StoreError as error:
        return [*(_mismatch(row, fault) for fault in faults), AuditFinding(error.code, row.run_id, error.message)]
    if receipt.receipt_sha256 != computed:
        faults.append(f"the receipt says {receipt.receipt_sha256}, its content gives {computed}")
    faults += [
        f"the row says {name} = {getattr(row, name)!r}, the receipt {value!r}"
        for name, value in columns.items()
        if getattr(row, name) != value
    ]
    opening, patch = opening_of(folder), folder / PATCH
    # A copied run may have been copied without its patch.
    if opening.patch or opening.fact != COPIED or os.path.lexists(patch):
        faults += [*patch_faults(receipt, patch), *_record_faults(receipt, folder)]
    return [_mismatch(row, fault) for fault in faults]


def _mismatch(row: ReceiptRow, fact: str) -> AuditFinding:
    return AuditFinding("receipt_hash_mismatch", row.run_id, fact)


def check_link(row: ReceiptRow, previous: ReceiptRow | None) -> list[AuditFinding]:
    """Compare one row's place in the chain with the row before it; `previous` is None for the first row."""
    faults = []
    expected = previous.sequence + 1 if previous else 1
    if row.sequence != expected:
        faults.append(f"receipt {row.sequence} follows {expected - 1}: something between them is missing")
    if row.previous_link != (previous.link if previous else FIRST_LINK):
        faults.append(f"receipt {row.sequence} does not link to the one before it")
    if row.link != link_of(row.previous_link, row.sequence, msgspec.structs.asdict(row)):
        faults.append(f"the link of receipt {row.sequence} does not fit its hash and the other columns of its row")
    return [AuditFinding("receipt_chain_broken", row.run_id, fact) for fact in faults]


def check_kept(row: ReceiptRow, folder: Path) -> list[AuditFinding]:
    """Compare a row with its copy beside the receipt."""
    kept = kept_row(folder)
    if kept is not None and all(getattr(kept, name) == getattr(row, name) for name in row.__struct_fields__):
        return []
    fact = f"'{LINK}' of receipt {row.sequence} " + ("is missing" if kept is None else "is not its row")
    return [AuditFinding("receipt_chain_broken", row.run_id, fact)]


def check_checkpoint(checkpoint: ChainCheckpoint, row: ReceiptRow | None) -> list[AuditFinding]:
    """Compare a checkpoint kept elsewhere with the present row of its sequence; `row` is None if there is none."""
    if row is not None and row.link == checkpoint.link:
        return []
    now = "is not there" if row is None else "is another one"
    fact = f"the checkpoint of {checkpoint.time} names receipt {checkpoint.sequence}, which {now}"
    return [AuditFinding("receipt_chain_broken", row.run_id if row else "", fact)]


def _trace_faults(row: ReceiptRow, trace: Trace) -> Iterator[str]:
    if not isinstance(trace.source, Path):
        return
    try:
        with open_plain(trace.source) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes != row.trace_bytes:
                yield f"the trace has {size_bytes} bytes, stored were {row.trace_bytes}"
                return
            lines = sum(block.count(b"\n") for block in iter(lambda: file.read(CHUNK_BYTES), b""))
    except OSError as error:
        yield f"the trace cannot be read: {error.strerror}"
        return
    if lines != row.trace_count:
        yield f"the trace has {lines} events, stored were {row.trace_count}"


# Patches --------------------------------------------------------------------------------------------------------------


def patch_claim(receipt: Receipt) -> dict[str, Json]:
    """Return the receipt's member `patch`, unchecked; empty if there is none."""
    claim = receipt.backplane.get("patch")
    return claim if isinstance(claim, dict) else {}


def patch_hash(receipt: Receipt) -> str | None:
    """Return the patch's hash by a receipt: the hash that it names, else that of the patch in it; None without both."""
    claimed, diff = patch_claim(receipt).get("sha256"), receipt.verification.git_diff
    if isinstance(claimed, str):
        return claimed
    return canonical.sha256_hex(diff.encode()) if diff else None


def record_hash(receipt: Receipt) -> str | None:
    """Return the hash of the record from which the patch is applied; None if the receipt does not name it."""
    found = patch_claim(receipt).get("record_sha256")
    return found if isinstance(found, str) else None


def _record_faults(receipt: Receipt, folder: Path) -> Iterator[str]:
    path, expected = folder / _RECORD, record_hash(receipt)
    if expected is not None and (os.path.lexists(path) or os.path.lexists(folder / _CONTENTS)):
        yield from _file_faults(path, f"'{_RECORD}', which the patch is applied from,", expected)


def patch_faults(receipt: Receipt, path: Path) -> Iterator[str]:
    """Yield each fault of the patch beside a receipt: it is missing, unreadable, or has another hash."""
    expected = patch_hash(receipt)
    # A receipt made by another program contains its patch, so there need not be a file.
    is_promised = "patch" in receipt.backplane and expected != _EMPTY_SHA256
    if expected is not None and (is_promised or os.path.lexists(path)):
        yield from _file_faults(path, "the patch", expected)


def _file_faults(path: Path, name: str, expected: str) -> Iterator[str]:
    """Compare a regular file with its hash."""
    try:
        with open_plain(path) as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        yield f"{name} cannot be read: {error.strerror}"
        return
    if actual != expected:
        yield f"{name} hashes to {actual}, the receipt says {expected}"
