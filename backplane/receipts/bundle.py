"""Exports and imports receipts: one folder with receipt, patch, journal and signature, or a receipt's file.

An import is verified first, and stored unchanged, so that its hash stays valid. Only receipts and patches are imported;
the journal is not needed, because the receipt contains the trace.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from backplane.contract import canonical
from backplane.contract.receipt import Receipt, read_receipt
from backplane.errors import ConfigError, ContractError, StoreError
from backplane.receipts import signatures
from backplane.receipts.audit import AuditFinding, patch_claim, patch_faults, patch_hash
from backplane.receipts.database import ReceiptRow
from backplane.receipts.journal import FILE_MODE, HEAD, PATCH, RECEIPT, TRACE, disk_error
from backplane.receipts.pieces import canonical_chunks, is_intact
from backplane.receipts.store import Store
from backplane.receipts.trace import Trace, as_trace, open_plain, read_plain

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

JOURNAL: Final = "journal"
SIGNATURE: Final = f"receipt{signatures.SUFFIX}"
RECEIPT_BYTES_MAX: Final = 256 << 20
"""Maximum size of an imported receipt; parsing JSON needs several times its size in memory."""


# Out ------------------------------------------------------------------------------------------------------------------


def export(store: Store, run: str, folder: Path) -> Path:
    """Write a stored receipt, its patch and its journal as one folder.

    Args:
        run: id of the run, or its beginning.
        folder: folder to make; it must not exist yet, or be empty.

    Raises:
        ConfigError: `config_invalid`: no such run, or the folder is in use.
        StoreError: `receipt_store_failed`, a file cannot be read or written; no folder is left.
    """
    receipt = store.load(run)
    source = store.folder(receipt.meta.run_id)
    building: Path | None = None
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError("config_invalid", f"{folder} is there already and not empty", hint="name a new folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=".backplane-export.", dir=folder.parent))
        write_receipt(receipt, building / RECEIPT)
        signature = signatures.read(signatures.path_of(store.home, receipt.meta.run_id))
        if signature is not None:
            (building / SIGNATURE).write_bytes(signature)
        (building / JOURNAL).mkdir()
        _copy(source / PATCH, building / PATCH)
        _copy(source / HEAD, building / JOURNAL / HEAD)
        _copy(source / TRACE, building / JOURNAL / TRACE)
        os.replace(building, folder)
    except OSError as error:
        raise disk_error(str(folder), error, chosen=True) from error
    finally:
        if building is not None:
            shutil.rmtree(building, ignore_errors=True)
    return folder


def _copy(source: Path, target: Path) -> None:
    """Copy a regular file of a run's folder, if it exists. Raises OSError."""
    if os.path.lexists(source):
        with open_plain(source) as file, target.open("xb") as copy:
            shutil.copyfileobj(file, copy)


def write_receipt(receipt: Receipt, path: Path) -> None:
    """Write the whole receipt in canonical bytes, a piece at a time. Raises OSError."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
    with open(fd, "wb") as file:
        file.writelines(canonical_chunks(receipt))


# In -------------------------------------------------------------------------------------------------------------------


def import_bundle(store: Store, path: Path) -> ReceiptRow:
    """Store a receipt from elsewhere: from a folder that `export` made, or from a single file.

    Raises:
        ConfigError: `config_invalid`: not readable, or too large.
        ContractError: `contract_invalid_receipt`: not a receipt, or an object has a key twice.
        StoreError: `receipt_hash_mismatch`: the receipt's hash is missing or wrong, or the patch has another hash;
            `receipt_store_failed`: stored already, or the disk fails. Nothing was imported.
    """
    receipt, patch, signature = read_bundle(path)
    row = store.adopt(receipt, patch)
    if path.is_dir() and (envelope := signatures.read(signature)) is not None:
        signatures.keep(store.home, row.run_id, envelope)
    return row


def read_bundle(path: Path) -> tuple[Receipt, bytes, Path]:
    """Read and verify an exported folder, or a receipt's file; return receipt, patch and the signature's path.

    Raises:
        ConfigError, ContractError, StoreError: as `import_bundle`.
    """
    if os.path.isdir(path):
        receipt = parse_receipt(_read_inside(path / RECEIPT), str(path / RECEIPT))
        patch = _read_inside(path / PATCH) if os.path.lexists(path / PATCH) else b""
        check_patch(receipt, path / PATCH, patch)
        return receipt, patch, path / SIGNATURE
    receipt = parse_receipt(read_bounded(path), str(path))
    patch = (receipt.verification.git_diff or "").encode()
    if patch_hash(receipt) != canonical.sha256_hex(patch):
        patch = b""  # The receipt names another patch, which is not in the folder.
    if patch:
        check_patch(receipt, path, patch)
    return receipt, patch, path.with_suffix(signatures.SUFFIX)


def bundle_faults(path: Path, key: Ed25519PublicKey | None) -> Iterator[AuditFinding]:
    """Yield the faults of a receipt's file or an exported folder, including the signature's if there is a key.

    Raises:
        ConfigError: `config_invalid`, it cannot be read.
    """
    try:
        receipt, _, signature = read_bundle(path)
        trace = path / JOURNAL / TRACE
        if os.path.lexists(trace) and _read_inside(trace) != b"".join(as_trace(receipt.trace).blocks()):
            raise StoreError("receipt_hash_mismatch", f"{trace} has other events than the receipt")
    except (ContractError, StoreError) as error:
        yield AuditFinding(error.code, str(path), error.message)
        return
    yield from _unsigned(str(path), signature, key, receipt.receipt_sha256)


def unsigned_row(store: Store, row: ReceiptRow, key: Ed25519PublicKey | None) -> Iterator[AuditFinding]:
    """Yield the fault of a stored receipt's signature; nothing if `key` is None."""
    yield from _unsigned(row.run_id, signatures.path_of(store.home, row.run_id), key, row.sha256)


def _unsigned(name: str, path: Path, key: Ed25519PublicKey | None, sha256: str | None) -> Iterator[AuditFinding]:
    fault = signatures.receipt_fault(signatures.read(path), key, sha256) if key is not None else None
    if fault is not None:
        yield AuditFinding(None, name, fault)


def parse_receipt(data: bytes, name: str) -> Receipt:
    """Read a receipt from elsewhere, and verify its hash.

    Args:
        name: name of the file, for errors.

    Raises:
        ContractError, StoreError: as `import_bundle`.
    """
    try:
        value = canonical.decode(data)
        twice = canonical.duplicate_key(data, value)
        receipt = _in_memory(read_receipt(value))
    except (ValueError, RecursionError) as error:
        fact, hint = f"{name} is no receipt: {error}", "give a file that `receipts show --json` or `export` wrote"
        raise ContractError("contract_invalid_receipt", fact, hint=hint) from None
    if twice is not None:
        raise ContractError("contract_invalid_receipt", f"{name}: the key {twice!r} stands twice in one object")
    if receipt.receipt_sha256 is None:
        raise StoreError("receipt_hash_mismatch", f"{name} has no hash", hint="only sealed receipts can be imported")
    if is_intact(receipt):
        return receipt
    # The public implementation's parser reads long fractions inexactly, so its hash may be of those numbers.
    inexact = _in_memory(read_receipt(canonical.decode_inexact(data)))
    if is_intact(inexact):
        return inexact
    raise StoreError("receipt_hash_mismatch", f"{name} is not what was sealed as {receipt.receipt_sha256}")


def _in_memory(receipt: Receipt) -> Receipt:
    return msgspec.structs.replace(receipt, trace=Trace.of(receipt.trace))


def check_patch(receipt: Receipt, path: Path, patch: bytes) -> None:
    """Compare the patch that came with a receipt with the hash in the receipt.

    Args:
        path: file from which the patch was read; it may be missing if the patch is empty.

    Raises:
        StoreError: `receipt_hash_mismatch`.
    """
    fault: str | None = None
    if not patch:
        fault = next(patch_faults(receipt, path), None)
    elif canonical.sha256_hex(patch) != patch_hash(receipt) or _size_of_patch(receipt) not in (None, len(patch)):
        fault = "the patch is not the one that the receipt names"
    if fault is not None:
        raise StoreError("receipt_hash_mismatch", f"{path}: {fault}")


def _size_of_patch(receipt: Receipt) -> int | None:
    size = patch_claim(receipt).get("bytes")
    return size if isinstance(size, int) else None


def _read_inside(path: Path) -> bytes:
    """Read a file in an untrusted folder, which may contain pipes, and links out of it. Raises as `read_bounded`."""
    try:
        return read_plain(path, RECEIPT_BYTES_MAX)
    except OSError as error:
        raise _unreadable(path, error) from error


def read_bounded(path: Path) -> bytes:
    """Read at most `RECEIPT_BYTES_MAX` from a file or pipe. Raises ConfigError, `config_invalid`."""
    try:
        with path.open("rb") as file:
            is_too_long = os.fstat(file.fileno()).st_size > RECEIPT_BYTES_MAX
            data = b"" if is_too_long else file.read(RECEIPT_BYTES_MAX + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if is_too_long or len(data) > RECEIPT_BYTES_MAX:
        raise ConfigError("config_invalid", f"{path} is over {RECEIPT_BYTES_MAX >> 20} MiB")
    return data


def _unreadable(path: Path, error: OSError) -> ConfigError:
    fact = f"{path} cannot be read: {error.strerror}"
    return ConfigError("config_invalid", fact, hint="name a receipt's file or an exported folder")
