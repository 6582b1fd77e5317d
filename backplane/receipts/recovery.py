"""Finds the journals of runs whose control plane died, and makes their receipts.

A folder is an orphan if no process holds its lock and the store has no row for it. The journalled events are kept; the
receipt names the values that are unknown.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from backplane.contract import canonical
from backplane.contract.capability import read_manifest
from backplane.contract.events import AgentEvent, is_passed_through
from backplane.contract.receipt import CONTRACT_VERSION, BackendIdentity, Receipt, RunMetadata, Verification
from backplane.errors import StoreError
from backplane.process.locks import try_lock
from backplane.receipts.database import ReceiptRow
from backplane.receipts.folded import Folded, fold
from backplane.receipts.journal import (
    COPIED,
    FILE_MODE,
    HEAD,
    PATCH,
    RECEIPT,
    TRACE,
    Facts,
    Journal,
    JournalHead,
    boot_id,
    disk_error,
    read_facts,
)
from backplane.receipts.pieces import is_intact, seal, unheard_facts, with_trace
from backplane.receipts.trace import LINE_BYTES_MAX, Trace, read_plain

UNFINISHED_PATCH: Final = "patch.unfinished"
"""New name of a patch without a receipt; it may be incomplete and must not be applied."""
ABANDONED_S: Final = 3_600
"""Age in seconds at which an unfinished folder is removed; making one takes milliseconds, so its maker is dead."""
BODY_BYTES_MAX: Final = 256 << 20
"""Size limit of a receipt without its trace; a patch in it has at most 8 MiB."""
_NIL_UUID: Final = "00000000-0000-0000-0000-000000000000"
_RUN_FOLDER: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_decode_event: Final = msgspec.json.Decoder(AgentEvent).decode


class Orphan(msgspec.Struct, frozen=True):
    """A run without a receipt on which no process works any more."""

    folder: Path
    facts: tuple[Facts, ...] = ()
    """The facts of the head, oldest first; empty until `read_orphan` has read them."""

    @property
    def run_id(self) -> str:
        return self.folder.name

    @property
    def is_copy(self) -> bool:
        """Return whether it is the unfinished copy of a run on another machine or in a queue."""
        return bool(self.facts) and self.facts[0].get("fact") == COPIED

    def fact(self, name: str) -> Facts:
        """Return the last fact of this name, because some are written several times; empty if there is none."""
        return next((fact for fact in reversed(self.facts) if fact.get("fact") == name), {})


class Recovery(msgspec.Struct, frozen=True):
    """Result of a recovery pass."""

    rows: tuple[ReceiptRow, ...]
    """Rows of the receipts that this pass stored."""
    problems: tuple[str, ...] = ()
    """A line for each orphan that could not be sealed; the next pass tries again."""


class Cut(NamedTuple):
    """The end of a dead run's trace."""

    bytes: int
    """Number of removed bytes of an incomplete event."""
    written_ns: int
    """Time of the last write, in nanoseconds since 1970; 0 if the journal has no file."""


class _Hello(msgspec.Struct, frozen=True):
    """The members of a host's hello that a receipt needs."""

    backend: BackendIdentity | None = None
    capabilities: dict[str, Any] = {}
    mode: str | None = None


# Folders of runs ------------------------------------------------------------------------------------------------------


def is_run_id(text: str) -> bool:
    """Return whether this is a run id in its print form, which is a safe file name."""
    return _RUN_FOLDER.fullmatch(text) is not None


def run_folders(home: Path) -> list[str]:
    """Return the names of the folders of runs, whatever their state.

    Raises:
        StoreError: `receipt_store_failed`, the folder above cannot be read.
    """
    try:
        return sorted(filter(is_run_id, os.listdir(home / "runs")))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise disk_error(str(home / "runs"), error) from error


@contextmanager
def claimed(folder: Path) -> Iterator[int | None]:
    """Lock a run's folder during the block; yield None if a live writer has the lock or the folder is gone.

    Raises:
        StoreError: `receipt_store_failed`, the head cannot be opened for locking, or the folder is a link, which may
            lead anywhere.
    """
    if folder.is_symlink():
        hint = "put the folder itself there, or remove the link"
        raise StoreError("receipt_store_failed", f"{folder} is a link, which is not followed", hint=hint)
    try:
        fd = _open_plain(folder / HEAD)
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    except OSError as error:
        raise disk_error(str(folder), error) from error
    try:
        yield fd if try_lock(fd) and folder.is_dir() else None
    finally:
        os.close(fd)


def _open_plain(path: Path) -> int:
    """Open a file of a journal for writing. Raises OSError, also if it is a link."""
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, FILE_MODE)


def is_abandoned(folder: Path) -> bool:
    """Return True if no process has the lock of a run's folder; False if this user may not open it. Only reads."""
    if folder.is_symlink():
        return False
    try:
        fd = os.open(folder / HEAD, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EPERM) and folder.is_dir()
    try:
        return try_lock(fd)
    finally:
        os.close(fd)


def is_live(home: Path, run_id: str) -> bool:
    """Return True if a process works on this run; if not, its temporary files can be removed.

    A name that is no run id, a link in place of the folder, and a lock that this user may not open count as live.
    """
    folder = home / "runs" / run_id
    if not is_run_id(run_id) or folder.is_symlink():
        return True
    return (folder / HEAD).exists() and not is_abandoned(folder)


def remove(folder: Path, but: str) -> str | None:
    """Remove the content of a run's folder except one file, the receipt first; return what prevents that, or None."""
    try:
        for name in sorted(os.listdir(folder), key=lambda name: name != RECEIPT):
            path = folder / name
            if name == but:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        if not (folder / but).exists():
            folder.rmdir()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
    return None


def sweep_abandoned(home: Path) -> None:
    """Remove folders whose maker died while making them."""
    for path in (home / "runs").glob(".*.new"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(path)


# Dead runs ------------------------------------------------------------------------------------------------------------


def read_orphan(folder: Path) -> Orphan:
    """Read the facts of a run that was cut off; return no facts if the head has anything that we never write."""
    with suppress(ValueError, RecursionError):
        facts = tuple(read_facts(folder))
        canonical.encode(facts)
        return Orphan(folder, facts)
    return Orphan(folder)


def describe(orphan: Orphan) -> str:
    """Return a line that says what happened to a run without a row in the store, and what the next run does with it."""
    with suppress(StoreError):  # Without a head, nothing is known about the run.
        orphan = read_orphan(orphan.folder)
    if orphan.is_copy:
        state = "was being copied here when its program ended; the next run here removes the copy"
    elif orphan.fact("failed"):
        state = "failed by a fault of this program and has no receipt yet; the next run here seals it as failed"
    elif os.path.lexists(orphan.folder / RECEIPT):
        state = "has ended and its receipt is sealed, but not in the store yet; the next run here stores it"
    else:
        state = "was cut off and has no receipt yet; the next run here seals it as interrupted"
    return f"run {orphan.run_id} {state}"


def note_late(home: Path, run_id: str, fact: Facts) -> None:
    """Add a fact to the head of a dead run without a receipt, unless it has a fact of this name.

    Raises:
        StoreError: `receipt_store_failed`.
    """
    folder = home / "runs" / run_id
    if not is_run_id(run_id) or folder.is_symlink() or not (folder / HEAD).exists():
        return
    with claimed(folder) as lock:
        if lock is not None and not any(noted.get("fact") == fact["fact"] for noted in read_facts(folder)):
            with closing(Journal(folder, run_id, os.dup(lock), -1)) as journal:
                journal.note(fact)


@contextmanager
def reopened(orphan: Orphan, head_fd: int) -> Iterator[tuple[Journal, Cut]]:
    """Open an orphan's journal to seal it, and remove an incomplete event at its end."""
    written_ns = next(
        ((orphan.folder / name).stat().st_mtime_ns for name in (TRACE, HEAD) if (orphan.folder / name).exists()), 0
    )
    trace_fd = _open_plain(orphan.folder / TRACE)
    with closing(Journal(orphan.folder, orphan.run_id, os.dup(head_fd), trace_fd)) as journal:
        with open(os.dup(trace_fd), "rb") as file:
            # The trace ends before a line that is incomplete or too long.
            while _is_event(line := file.readline(LINE_BYTES_MAX)):
                journal.count += 1
                journal.size_bytes += len(line)
        cut_bytes = os.fstat(trace_fd).st_size - journal.size_bytes
        if cut_bytes:
            os.ftruncate(trace_fd, journal.size_bytes)
        yield journal, Cut(cut_bytes, written_ns)


def _is_event(line: bytes) -> bool:
    try:
        return canonical.encode(_decode_event(line)) + b"\n" == line
    except (ValueError, RecursionError):
        return False


def receipt_of(orphan: Orphan, journal: Journal, cut: Cut) -> Receipt | None:
    """Return the receipt of a dead run: the sealed one if it was not stored yet, else a new one.

    Returns:
        None for a copied run without a receipt, which the caller removes.
    """
    receipt = _sealed_before(orphan, journal.trace)
    if receipt is None and not orphan.is_copy:
        with suppress(FileNotFoundError):
            os.replace(orphan.folder / PATCH, orphan.folder / UNFINISHED_PATCH)
        receipt = seal(_interrupted(orphan, journal.trace, cut))
    return receipt


def _sealed_before(orphan: Orphan, trace: Trace) -> Receipt | None:
    """Return the receipt that was sealed but not stored; None if it is not intact or the run failed later."""
    if orphan.fact("failed"):
        return None
    try:
        receipt = with_trace(sealed_body(orphan.folder), trace)
    except (OSError, ValueError, RecursionError):
        return None
    return receipt if receipt.meta.run_id == orphan.run_id and is_intact(receipt) else None


def sealed_body(folder: Path) -> bytes:
    """Return the canonical bytes of a run's receipt with an empty trace. Raises OSError, also if it is not a file."""
    return read_plain(folder / RECEIPT, BODY_BYTES_MAX)


def _interrupted(orphan: Orphan, trace: Trace, cut: Cut) -> Receipt:
    """Make the receipt of a run that was cut off, or failed by an unforeseen exception."""
    opening, hello = JournalHead(), _Hello()
    with suppress(msgspec.ValidationError):
        opening = msgspec.convert(orphan.fact("order"), JournalHead)
    with suppress(msgspec.ValidationError):
        hello = msgspec.convert(orphan.fact("hello").get("hello"), _Hello)
    vendor = opening.order.config.vendor
    own = vendor.get("abp")
    raw = isinstance(own, dict) and own.get("mode") == "passthrough"
    folded, mode = Folded(), hello.mode
    for event in trace:
        folded = fold(folded, event)
        if raw and is_passed_through(event):
            raw, mode = False, "passthrough"
    manifest, failed = read_manifest(hello.capabilities), orphan.fact("failed")
    end: dict[str, Any] = {"reason": "failed", "code": failed.get("code")} if failed else {"reason": "interrupted"}
    restarted = opening.boot_id not in (None, boot_id())
    applied = orphan.fact("applied")
    members: dict[str, Any] = {
        "capabilities": manifest.unknown,
        "route": opening.route,
        "enforcement": orphan.fact("held").get("enforcement"),
        "lane": {"applied": applied.get("files")} if applied else None,
    }
    added = {
        "end": end,
        "durability": {"journal": "not_synced", "cut_bytes": cut.bytes, "machine_restarted": restarted},
        "duration": "wall_clock",
        "usage": {name: "claimed" for name, value in msgspec.to_builtins(folded.usage).items() if value is not None},
        **{name: value for name, value in members.items() if value},
        **unheard_facts(vendor),
    }
    return Receipt(
        meta=_meta(orphan.run_id, opening, cut.written_ns),
        backend=hello.backend or BackendIdentity(opening.backend.id if opening.backend is not None else "unknown"),
        capabilities=manifest.to_wire(),
        mode="passthrough" if mode == "passthrough" else "mapped",
        usage_raw={"backplane": added},
        usage=folded.usage,
        trace=trace,
        artifacts=(),
        verification=Verification(harness_ok=False),
        outcome="partial" if len(trace) and not failed else "failed",
    )


def _meta(run_id: str, opening: JournalHead, finished_ns: int) -> RunMetadata:
    """Return the ids and times of a run that was cut off; if its start cannot be read, the end counts as the start."""
    finished_at = canonical.timestamp_at(min(max(0, finished_ns), time.time_ns()))
    try:
        work_order_id = canonical.uuid_text(opening.order.id)
    except ValueError:
        work_order_id = _NIL_UUID
    try:
        started_at = canonical.timestamp(opening.started_at)
        lasted_s = finished_ns / 1e9 - datetime.fromisoformat(started_at).timestamp()
    except ValueError:
        started_at, lasted_s = finished_at, 0.0
    return RunMetadata(
        run_id=run_id,
        work_order_id=work_order_id,
        contract_version=CONTRACT_VERSION,
        started_at=started_at,
        finished_at=finished_at if lasted_s > 0 else started_at,
        duration_ms=max(0, round(lasted_s * 1_000)),
    )
