"""The SQLite file under the store: where it may lie, its rows, its errors.

WAL with synchronous FULL: what is committed survives a power cut, and readers never wait for
a writer. When a row is written, and found, is `store`'s affair.
"""

from __future__ import annotations

import errno
import hashlib
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, get_type_hints
from urllib.parse import quote

import msgspec

from backplane.contract import canonical
from backplane.contract.receipt import Receipt
from backplane.errors import StoreError
from backplane.receipts.journal import FILE_MODE, FOLDER_MODE, disk_error, flush_path
from backplane.receipts.trace import Trace

FILE: Final = "receipts.sqlite"
INTEGER_MAX: Final = (1 << 63) - 1
"""SQLite counts no further, and no store of ours comes near it."""
SCHEMA_VERSION: Final = 3
"""A file of another version is left alone: nothing is migrated, as no other version was ever released."""
BUSY_TIMEOUT_S: Final = 30.0
"""Longest wait for other writers; a commit takes milliseconds, so this is a stuck machine."""
_WAL_RETRY_S: Final = 0.02
CACHE_KIB: Final = 512
"""Pages that a connection keeps: by default 2 MiB, by which each worker of a queue grew with its first 300 orders."""
_CUT_OFF: Final = (sqlite3.SQLITE_READONLY_ROLLBACK, sqlite3.SQLITE_READONLY_RECOVERY)
"""A writer died, and who only reads cannot undo what it began."""
_READ_TRIES: Final = 3
"""As it is, without its shared memory on a read-only disk, and once more after its first writer has made the table."""
FIRST_LINK: Final = "0" * 64
"""What the first receipt of a store follows."""


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


_TYPES: Final[Mapping[Any, str]] = {int: "INTEGER NOT NULL", str: "TEXT NOT NULL"}
_MORE: Final = {"sequence": "INTEGER PRIMARY KEY", "run_id": "TEXT NOT NULL UNIQUE"}
_COLUMNS: Final = {
    name: _MORE.get(name) or _TYPES.get(kind, "TEXT") for name, kind in get_type_hints(ReceiptRow).items()
}
_TABLE: Final = f"CREATE TABLE receipts ({', '.join(map(' '.join, _COLUMNS.items()))}, body BLOB NOT NULL)"
INSERT: Final = f"INSERT INTO receipts ({', '.join(_COLUMNS)}, body) VALUES ({', '.join('?' * (len(_COLUMNS) + 1))})"

READ: Final = ", ".join(
    f"CAST(IFNULL({name}, '') AS TEXT)" if kind == "TEXT NOT NULL" else f"CAST({name} AS {kind.split()[0]})"
    for name, kind in _COLUMNS.items()
)
"""Columns as `ReceiptRow` has them, whatever types a tampered file gives: comparing them is `verify`'s affair."""

_NETWORK_KINDS: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "ceph", "lustre", "gfs2", "ocfs2", "beegfs"}
    | {"fuse.sshfs", "fuse.glusterfs", "fuse.ceph-fuse", "fuse.s3fs", "fuse.rclone"}
)
"""WAL shares memory between processes through the file, which several machines cannot. 9p is not
here: some containers' local root is 9p, and where it cannot share memory SQLite itself refuses."""
_MOUNTS: Final = Path("/proc/self/mountinfo")


def link_of(previous_link: str, sequence: int, columns: Mapping[str, Any]) -> str:
    """The chain's rule: SHA-256 over `columns`, the link before, the sequence and a hash of the row, colons between.

    Args:
        columns: those of `COVERED`; their hash is SHA-256 over the canonical bytes of this object.
    """
    covered = canonical.sha256_hex(canonical.encode({name: columns[name] for name in COVERED}))
    return hashlib.sha256(f"columns:{previous_link}:{sequence}:{covered}".encode()).hexdigest()


def network_kind(path: Path, mountinfo: str) -> str | None:
    """The kind of the network file system that holds `path`, or None when it is local.

    Args:
        path: absolute, links followed.
        mountinfo: text of Linux' `/proc/self/mountinfo`; empty says nothing and gives None.
    """
    best, found = -1, ""
    for line in mountinfo.splitlines():
        mount, _, source = line.partition(" - ")
        fields = mount.split(" ")
        if len(fields) < 5 or not source:
            continue
        point = Path(fields[4].encode().decode("unicode_escape").encode("latin-1").decode("utf-8", "replace"))
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), source.split(" ", 1)[0]
    return found if found in _NETWORK_KINDS else None


def connect(home: Path, *, readonly: bool) -> sqlite3.Connection:
    """Open the store's file in `home`, making it as needed.

    Raises:
        StoreError: `receipt_store_failed`: a network file system, another schema, a disk that fails.
    """
    path = home / FILE
    try:
        if home.exists() and not home.is_dir():
            hint = "set BACKPLANE_HOME to a folder that this user can write"
            raise StoreError("receipt_store_failed", f"the state directory {home} is no folder", hint=hint)
        there = _is_there(path)
        if readonly and not there:
            connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            _make_table(connection)
            return connection
        if there and not path.is_file():  # Opening a FIFO would wait for somebody at its other end.
            raise OSError(errno.ENOTSUP, "no regular file", str(path))
        if not readonly:
            home.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            _refuse_network(home)
            _make_writable(path)
            flush_path(home)
    except OSError as error:
        raise disk_error(str(path), error) from error
    with translated(path):
        if readonly:
            return _open_readable(home, path)
        connection = _open(path, "mode=rw")
        try:
            _prepare(connection, path)
        except BaseException:
            connection.close()
            raise
        return connection


def _is_there(path: Path) -> bool:
    """As `Path.exists`, but a loop of links is an error: nobody knows what is behind it. Raises OSError."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _make_writable(path: Path) -> None:
    """Make the file where there is none. Raises OSError, also for one that cannot be written.

    One that is there is never opened but by SQLite: closing it would let go of the locks of every connection of
    this process, and another process that ends would then take our log for its own, and remove it.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, FILE_MODE))
    except FileExistsError:
        if not os.access(path, os.W_OK):
            code = errno.EROFS if os.statvfs(path).f_flag & os.ST_RDONLY else errno.EACCES
            raise OSError(code, os.strerror(code), str(path)) from None


def _open_readable(home: Path, path: Path) -> sqlite3.Connection:
    options = "mode=ro"
    for _ in range(_READ_TRIES):
        connection = _open(path, options)
        try:
            if _has_table(connection, path):
                return connection
        except sqlite3.OperationalError as error:
            connection.close()
            if error.sqlite_errorcode in _CUT_OFF:
                connect(home, readonly=False).close()
                continue
            closed = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_CANTOPEN
            full = error.sqlite_errorcode == sqlite3.SQLITE_IOERR_SHMSIZE
            wal = path.with_name(f"{FILE}-wal")
            if not (closed or full) or (wal.exists() and wal.stat().st_size):
                raise
            # A folder where nothing can be made cannot have a writer either: the file is all there is.
            options = "mode=ro&immutable=1"
            continue
        except BaseException:
            connection.close()
            raise
        connection.close()
        connect(home, readonly=False).close()
    raise StoreError("receipt_store_failed", f"{path} cannot be given its table")


def _open(path: Path, options: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?{options}",
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,  # transactions are begun and ended by us alone
        check_same_thread=False,  # the store has its own lock
    )
    # A flipped bit in a text must not keep `verify` from reading on.
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    return connection


def _refuse_network(home: Path) -> None:
    mounts = ""
    with suppress(OSError):
        mounts = _MOUNTS.read_text(errors="replace")
    kind = network_kind(Path(os.path.realpath(home)), mounts)
    if kind is not None:
        raise StoreError(
            "receipt_store_failed",
            f"{home} lies on a network file system ({kind}), where the store cannot be kept safe",
            hint="set BACKPLANE_HOME to a folder on a local disk",
        )


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    _use_wal(connection)
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA fullfsync=ON")
    connection.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
    if not _has_table(connection, path):
        with transaction(connection):
            # Read again: another process may have made it while we waited for the lock.
            if not _has_table(connection, path):
                _make_table(connection)


def _use_wal(connection: sqlite3.Connection) -> None:
    # Changing the mode does not wait for others by the busy timeout, so the waiting is done here.
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(_WAL_RETRY_S)


def _has_table(connection: sqlite3.Connection, path: Path) -> bool:
    """Return whether the file has its table; a new file does not. Raises StoreError for another version's."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version not in (0, SCHEMA_VERSION):
        raise StoreError(
            "receipt_store_failed",
            f"{path} has schema version {version}, this program knows version {SCHEMA_VERSION}",
            hint=FOREIGN_HINT,
        )
    return version == SCHEMA_VERSION


def _make_table(connection: sqlite3.Connection) -> None:
    connection.execute(_TABLE)
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """BEGIN IMMEDIATE to COMMIT; any failure, of the commit too, rolls back."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


FOREIGN_HINT: Final = "use the backplane that made it, or set BACKPLANE_HOME to another folder"
"""For a file whose tables are not ours."""
_ERRNO_OF: Final = {
    "SQLITE_FULL": ("ENOSPC", "free some space and run again"),
    "SQLITE_IOERR_SHMSIZE": ("ENOSPC", "free some space and run again"),
    "SQLITE_READONLY": ("EROFS", "point the state directory to a writable disk"),
    "SQLITE_CANTOPEN": ("EACCES", "give this user the state directory"),
    "SQLITE_BUSY": ("EBUSY", "another process holds the store; end it and run again"),
    "SQLITE_NOTADB": ("EINVAL", "move the file away; it is no store"),
    "SQLITE_ERROR": ("EINVAL", FOREIGN_HINT),
    "SQLITE_CORRUPT": ("EIO", "restore the file from a backup; runs/ still has the journals"),
}


def is_full(error: StoreError) -> bool:
    """Whether it was the disk, or the user's part of it, that had no room left."""
    cause = error.__cause__
    if isinstance(cause, OSError):
        return cause.errno in (errno.ENOSPC, errno.EDQUOT)
    return getattr(cause, "sqlite_errorcode", None) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn every SQLite failure into `receipt_store_failed`, named by the nearest errno."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        family = next((known for known in _ERRNO_OF if name.startswith(known)), "")
        errno_name, hint = _ERRNO_OF.get(family, ("EIO", "look at the disk"))
        raise StoreError("receipt_store_failed", f"{path}: {errno_name} ({name}: {error})", hint=hint) from error
