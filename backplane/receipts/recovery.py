"""Finds the journals of runs whose control plane died, and makes their receipts.

A folder is an orphan when nobody holds its lock and the store has no row of it. What was
journalled is kept; what was never known is said to be unknown.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Final

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
    boot_id,
    disk_error,
    read_facts,
)
from backplane.receipts.pieces import is_intact, seal, unheard_facts, with_trace
from backplane.receipts.trace import Trace, open_plain

UNFINISHED_PATCH: Final = "patch.unfinished"
"""A patch that no receipt vouches for is put aside under this name, so that nobody applies half of one."""
ABANDONED_S: Final = 3_600
"""A folder under construction lives for milliseconds; after an hour its maker is surely gone."""
BODY_BYTES_MAX: Final = 256 << 20
"""Size limit of a receipt without its trace; a patch in it has at most 8 MiB."""
PIECE_BYTES: Final = 1 << 20
"""Read of a line at once: its end is looked for in so much."""
_NIL_UUID: Final = "00000000-0000-0000-0000-000000000000"
_RUN_FOLDER: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_decode_event: Final = msgspec.json.Decoder(AgentEvent).decode


class Orphan(msgspec.Struct, frozen=True):
    """A run that no process works on any more and that has no receipt."""

    folder: Path
    facts: tuple[Facts, ...] = ()
    """The head's facts, oldest first; read once we hold the lock."""

    @property
    def run_id(self) -> str:
        return self.folder.name

    @property
    def is_copy(self) -> bool:
        """Return whether it is the unfinished copy of a run of elsewhere."""
        return bool(self.facts) and self.facts[0].get("fact") == COPIED

    def fact(self, name: str) -> Facts:
        """Return the last fact of this name: what held a host may be noted again. Empty if there is none."""
        return next((fact for fact in reversed(self.facts) if fact.get("fact") == name), {})


class Recovery(msgspec.Struct, frozen=True):
    """Result of a recovery pass."""

    rows: tuple[ReceiptRow, ...]
    """Receipts stored now."""
    problems: tuple[str, ...] = ()
    """One line for each orphan that could not be sealed; it stays for the next time."""


def is_run_id(text: str) -> bool:
    """Return whether this is a run id in its print form, which is a safe file name."""
    return _RUN_FOLDER.fullmatch(text) is not None


def run_folders(home: Path) -> list[str]:
    """Names of folders of runs, whatever their state; what is no run's folder is passed over.

    Raises:
        StoreError: `receipt_store_failed` when it is closed to us.
    """
    try:
        with os.scandir(home / "runs") as entries:
            return sorted(entry.name for entry in entries if is_run_id(entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise disk_error(str(home / "runs"), error) from error


@contextmanager
def claimed(folder: Path) -> Iterator[int | None]:
    """Hold the lock of a run's folder; None when a live writer has it or the folder is gone.

    Raises:
        StoreError: `receipt_store_failed` when the head cannot be opened for locking, or a link stands in the
            folder's place: nothing is written to where it leads.
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


def is_abandoned(folder: Path) -> bool:
    """Return whether no process holds the lock of a run's folder; False if we may not look. Changes nothing."""
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


def _open_plain(path: Path) -> int:
    """Open a file of a journal for writing; a link or pipe in its place makes way. Raises OSError."""
    with suppress(FileNotFoundError):
        if stat.S_IFMT(path.lstat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            path.unlink()
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)


def is_live(home: Path, run_id: str) -> bool:
    """Return whether a process is at work on this run now; temporary files of any other run can be removed.

    What has no run's name, a link in a run's place, and a lock that we may not look at count as live.
    """
    folder = home / "runs" / run_id
    if not is_run_id(run_id) or folder.is_symlink():
        return True
    return (folder / HEAD).exists() and not is_abandoned(folder)


def remove(folder: Path, but: str) -> str | None:
    """Remove all of a run's folder except one file; return what prevents it, or None."""
    try:
        names = [name for name in os.listdir(folder) if name != but]
        for path in (folder / name for name in names):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
                if path.exists():
                    shutil.rmtree(path)  # It raises what prevents it.
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
    with suppress(FileNotFoundError):
        for path in (home / "runs").glob(".*.new"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > ABANDONED_S:
                    shutil.rmtree(path)


def interrupted(orphan: Orphan, journal: Journal, *, finished_ns: int, cut_bytes: int) -> Receipt:
    """Seal what is known of a run that was cut off, or failed by an exception that nobody foresaw.

    Args:
        journal: reopened, its trace cut to whole events.
        finished_ns: when the journal was written last, nanoseconds since 1970.
        cut_bytes: bytes of a torn event that were removed.
    """
    order, hello = orphan.fact("order"), _object(orphan.fact("hello").get("hello"))
    # As it was journalled: without the run's secrets already.
    vendor = _object(_object(_object(order.get("order")).get("config")).get("vendor"))
    raw = _object(vendor.get("abp")).get("mode") == "passthrough"
    trace, folded, mode = journal.trace, Folded(), hello.get("mode")
    for event in trace:
        folded = fold(folded, event)
        if raw and is_passed_through(event):
            raw, mode = False, "passthrough"
    manifest = read_manifest(_object(hello.get("capabilities")))
    failed = orphan.fact("failed")
    end: dict[str, Any] = {"reason": "failed", "code": failed.get("code")} if failed else {"reason": "interrupted"}
    restarted = order.get("boot_id") not in (None, boot_id())
    added: dict[str, Any] = {
        "end": end,
        "durability": {"journal": "not_synced", "cut_bytes": cut_bytes, "machine_restarted": restarted},
        "duration": "wall_clock",
        "usage": {name: "claimed" for name, value in msgspec.to_builtins(folded.usage).items() if value is not None},
    }
    if manifest.unknown:
        added["capabilities"] = manifest.unknown
    added |= unheard_facts(vendor)
    if route := _object(order.get("route")):
        added["route"] = route
    if held := _object(orphan.fact("held").get("enforcement")):
        added["enforcement"] = held
    if applied := orphan.fact("applied"):
        added["lane"] = {"applied": applied.get("files")}
    return seal(
        Receipt(
            meta=_meta(orphan.run_id, order, finished_ns),
            backend=_backend(hello) or _backend(order) or BackendIdentity("unknown"),
            capabilities=manifest.to_wire(),
            mode="passthrough" if mode == "passthrough" else "mapped",
            usage_raw={"backplane": added},
            usage=folded.usage,
            trace=trace,
            artifacts=(),
            verification=Verification(harness_ok=False),
            outcome="partial" if len(trace) and not failed else "failed",
        )
    )


def sealed_before(orphan: Orphan, trace: Trace) -> Receipt | None:
    """Return the receipt that was sealed and not acknowledged, if it still holds and the run did not fail since."""
    if orphan.fact("failed"):
        return None
    try:
        receipt = with_trace(sealed_body(orphan.folder), trace)
    except (OSError, ValueError, RecursionError):
        return None
    return receipt if receipt.meta.run_id == orphan.run_id and is_intact(receipt) else None


def sealed_body(folder: Path) -> bytes:
    """Return the canonical bytes of a run's receipt with an empty trace. Raises OSError, also for no plain file."""
    with open_plain(folder / RECEIPT) as file:
        if os.fstat(file.fileno()).st_size > BODY_BYTES_MAX:
            raise OSError(errno.EFBIG, "too large for a receipt", str(folder / RECEIPT))
        return file.read()


def describe(orphan: Orphan) -> str:
    """Say in one line what became of a run that has no row in the store, and what the next start does with it."""
    name = f"run {orphan.run_id}"
    with suppress(StoreError):  # Without a head nothing is known of it.
        orphan = read_orphan(orphan.folder)
    if orphan.is_copy:
        return f"{name} was being copied here, and who did so has ended; the next run here removes the copy"
    if orphan.fact("failed"):
        return f"{name} failed by a fault of this program and has no receipt yet; the next run here seals it as failed"
    if os.path.lexists(orphan.folder / RECEIPT):
        return f"{name} has ended and its receipt is sealed, but not in the store yet; the next run here stores it"
    return f"{name} was cut off and has no receipt yet; the next run here seals it as interrupted"


def note_late(home: Path, run_id: str, fact: Facts) -> None:
    """Add a fact to a dead run's head, once; its receipt is still to be made.

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


def read_orphan(folder: Path) -> Orphan:
    """Read the facts of a run that was cut off; none if the head has anything that we never write."""
    with suppress(ValueError, RecursionError):
        facts = tuple(read_facts(folder))
        canonical.encode(facts)
        return Orphan(folder, facts)
    return Orphan(folder)


@contextmanager
def reopened(orphan: Orphan, head_fd: int) -> Iterator[tuple[Journal, int]]:
    """Open an orphan's journal for its sealing, cut after its last whole event; also the bytes cut."""
    trace_fd = _open_plain(orphan.folder / TRACE)
    with closing(Journal(orphan.folder, orphan.run_id, os.dup(head_fd), trace_fd)) as journal:
        journal.count, journal.size_bytes = _whole_events(trace_fd)
        cut_bytes = os.fstat(trace_fd).st_size - journal.size_bytes
        if cut_bytes:
            os.ftruncate(trace_fd, journal.size_bytes)
        yield journal, cut_bytes


def last_written_ns(folder: Path) -> int:
    """Return when the last event of a dead run was written, in nanoseconds since 1970; 0 without any file."""
    for name in (TRACE, HEAD):
        with suppress(OSError):
            return (folder / name).stat().st_mtime_ns
    return 0


def put_patch_aside(folder: Path) -> None:
    with suppress(FileNotFoundError):
        os.replace(folder / PATCH, folder / UNFINISHED_PATCH)


def _whole_events(fd: int) -> tuple[int, int]:
    count = size_bytes = 0
    with open(os.dup(fd), "rb") as file:
        for line in _lines(file):
            if not _is_event(line):
                break
            count += 1
            size_bytes += len(line)
    return count, size_bytes


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Whole lines, up to the first zero byte: a hole of any size is not read."""
    pieces = []
    while (piece := file.readline(PIECE_BYTES)) and b"\0" not in piece:
        pieces.append(piece)
        if piece.endswith(b"\n"):
            yield b"".join(pieces)
            pieces = []


def _is_event(line: bytes) -> bool:
    try:
        return canonical.encode(_decode_event(line)) + b"\n" == line
    except (ValueError, RecursionError):
        return False


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _backend(fact: Facts) -> BackendIdentity | None:
    try:
        return msgspec.convert(fact.get("backend"), BackendIdentity)
    except msgspec.ValidationError:
        return None


def _meta(run_id: str, order: Facts, finished_ns: int) -> RunMetadata:
    """Return the ids and times of a run that was cut off; a start that cannot be read is its end."""
    finished_at = _print_form(finished_ns)
    try:
        work_order_id = canonical.uuid_text(str(_object(order.get("order")).get("id")))
    except ValueError:
        work_order_id = _NIL_UUID
    try:
        started_at = canonical.timestamp(str(order.get("started_at")))
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


def _print_form(time_ns: int) -> str:
    try:
        return canonical.timestamp_at(time_ns)
    except (ValueError, OverflowError, OSError):
        return canonical.timestamp_at(0)
