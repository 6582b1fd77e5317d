"""The index of the store: one SQLite file with a row for each receipt, chained to the row before.

The receipts themselves are files in the run folders. Each row also stands beside its receipt as `link.json`, from which
a lost index is rebuilt; no link is ever computed again. With `synchronous=FULL`, a committed row survives a power cut.
"""

from __future__ import annotations

import errno
import hashlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, get_type_hints
from urllib.parse import quote

import msgspec

from backplane.contract import canonical
from backplane.contract.receipt import Receipt
from backplane.errors import StoreError
from backplane.receipts.journal import FILE_MODE, FOLDER_MODE, disk_error, flush_path, replace_file
from backplane.receipts.trace import Trace

FILE: Final = "receipts.sqlite"
LINK: Final = "link.json"
"""A receipt's row, in the folder of its run; it stays when the run is pruned."""
INTEGER_MAX: Final = (1 << 63) - 1
"""SQLite counts no further, and no store of ours comes near it."""
SCHEMA_VERSION: Final = 4
"""A file of another version is left alone: nothing is migrated, as no other version was ever released."""
BUSY_TIMEOUT_S: Final = 30.0
"""Longest wait for other writers; a commit takes milliseconds, so this is a stuck machine."""
CACHE_KIB: Final = 512
"""Pages that a connection keeps: by default 2 MiB, by which each worker of a queue grew with its first 300 orders."""
_CUT_OFF: Final = (sqlite3.SQLITE_READONLY_ROLLBACK, sqlite3.SQLITE_READONLY_CANTLOCK)
"""A writer died, and who only reads cannot undo what it began."""
FIRST_LINK: Final = "0" * 64
"""Previous link of the first receipt of a store."""


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


class ChainCheckpoint(msgspec.Struct, frozen=True):
    """The head of the chain at one moment, to be kept elsewhere: only with one can a rollback be seen."""

    sequence: int
    link: str
    time: str


def columns_of(receipt: Receipt, trace: Trace) -> dict[str, Any]:
    """Return the columns of a receipt's row, without those of the chain."""
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
_TABLE: Final = f"CREATE TABLE receipts ({', '.join(map(' '.join, _COLUMNS.items()))}, pruned INTEGER NOT NULL)"
_REBUILT: Final = "CREATE TABLE rebuilt (at TEXT NOT NULL)"
INSERT: Final = f"INSERT INTO receipts ({', '.join(_COLUMNS)}, pruned) VALUES ({', '.join('?' * (len(_COLUMNS) + 1))})"

READ: Final = ", ".join(
    f"CAST(IFNULL({name}, '') AS TEXT)" if kind == "TEXT NOT NULL" else f"CAST({name} AS {kind.split()[0]})"
    for name, kind in _COLUMNS.items()
)
"""Columns as `ReceiptRow` has them, whatever types a tampered file gives: comparing them is `verify`'s affair."""


def link_of(previous_link: str, sequence: int, columns: Mapping[str, Any]) -> str:
    """The chain's rule: SHA-256 over `columns`, the link before, the sequence and a hash of the row, colons between.

    Args:
        columns: those of `COVERED`; their hash is SHA-256 over the canonical bytes of this object.
    """
    covered = canonical.sha256_hex(canonical.encode({name: columns[name] for name in COVERED}))
    return hashlib.sha256(f"columns:{previous_link}:{sequence}:{covered}".encode()).hexdigest()


class KeptRow(ReceiptRow, frozen=True):
    """A row as `link.json` has it."""

    pruned: bool = False
    """True if the run's files were removed."""


def keep_row(folder: Path, row: ReceiptRow, *, pruned: bool = False) -> None:
    """Write a row beside its receipt. Raises StoreError."""
    replace_file(folder / LINK, msgspec.json.encode(KeptRow(**msgspec.structs.asdict(row), pruned=pruned)) + b"\n")


def kept_row(folder: Path) -> KeptRow | None:
    """Return the row beside a receipt; None if there is none that can be read."""
    try:
        with open(os.open(folder / LINK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return _decode_row(file.read(LINK_BYTES_MAX))
    except (OSError, msgspec.MsgspecError):
        return None


LINK_BYTES_MAX: Final = 1 << 20
"""Size limit of a `link.json`; a usual one has half a kilobyte."""
_decode_row: Final = msgspec.json.Decoder(KeptRow).decode


def rebuild(connection: sqlite3.Connection, folders: Iterable[Path]) -> None:
    """Fill an empty index from the rows beside the receipts; rows that contradict one another are left to `verify`."""
    kept = sorted((row for row in map(kept_row, folders) if row is not None), key=lambda row: row.sequence)
    for row in kept:
        with suppress(sqlite3.IntegrityError, OverflowError):
            connection.execute(INSERT, msgspec.structs.astuple(row))
    if kept:
        connection.execute("INSERT INTO rebuilt VALUES (?)", (canonical.timestamp_at(time.time_ns()),))


def connect(home: Path, folders: Callable[[], Iterable[Path]], *, readonly: bool) -> sqlite3.Connection:
    """Open the index in `home`; make it, or rebuild it, if it is not there.

    Args:
        folders: returns the run folders, for a new index.

    Raises:
        StoreError: `receipt_store_failed`: another schema, or a disk that fails.
    """
    path = home / FILE
    try:
        if home.exists() and not home.is_dir():
            hint = "set BACKPLANE_HOME to a folder that this user can write"
            raise StoreError("receipt_store_failed", f"the state directory {home} is no folder", hint=hint)
        if readonly and not path.exists():
            connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            _make_tables(connection, folders)
            return connection
        if not readonly:
            home.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            _make_writable(path)
            flush_path(home)
    except OSError as error:
        raise disk_error(str(path), error) from error
    with translated(path):
        connection = _open(path, f"mode={'ro' if readonly else 'rw'}")
        try:
            if not readonly:
                connection.execute("PRAGMA synchronous=FULL")
                connection.execute("PRAGMA fullfsync=ON")
                connection.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
            if _has_table(connection, path):
                return connection
            if not readonly:
                with transaction(connection):
                    # Read again: another process may have made it while we waited for the lock.
                    if not _has_table(connection, path):
                        _make_tables(connection, folders)
                return connection
        except sqlite3.OperationalError as error:
            connection.close()
            if not readonly or error.sqlite_errorcode not in _CUT_OFF:
                raise
        except BaseException:
            connection.close()
            raise
    # A writer died in a commit, or before it made the table: only a writer can mend that.
    connection.close()
    connect(home, folders, readonly=False).close()
    return connect(home, folders, readonly=True)


def _make_writable(path: Path) -> None:
    """Make the file if there is none. Raises OSError, also for one that cannot be written.

    Only SQLite opens a file that is there: closing it would end the locks of every connection of this process.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, FILE_MODE))
    except FileExistsError:
        if not os.access(path, os.W_OK):
            code = errno.EROFS if os.statvfs(path).f_flag & os.ST_RDONLY else errno.EACCES
            raise OSError(code, os.strerror(code), str(path)) from None


def _open(path: Path, options: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{quote(os.fsencode(path))}?{options}",
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,  # transactions are begun and ended by us alone
        check_same_thread=False,  # the store has its own lock
    )
    # A flipped bit in a text must not keep `verify` from reading on.
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    return connection


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


def _make_tables(connection: sqlite3.Connection, folders: Callable[[], Iterable[Path]]) -> None:
    connection.execute(_TABLE)
    connection.execute(_REBUILT)
    rebuild(connection, folders())
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
"""Next step for a file with the tables of another program."""
_ERRNO_OF: Final = {
    "SQLITE_FULL": ("ENOSPC", "free some space and run again"),
    "SQLITE_READONLY": ("EROFS", "point the state directory to a writable disk"),
    "SQLITE_CANTOPEN": ("EACCES", "give this user the state directory"),
    "SQLITE_BUSY": ("EBUSY", "another process holds the store; end it and run again"),
    "SQLITE_NOTADB": ("EINVAL", "move the file away; it is no store"),
    "SQLITE_ERROR": ("EINVAL", FOREIGN_HINT),
    "SQLITE_CORRUPT": ("EIO", "move the file away: the next start rebuilds it from runs/"),
}


def is_full(error: StoreError) -> bool:
    """Return whether the disk or the user's quota is full."""
    cause = error.__cause__
    if isinstance(cause, OSError):
        return cause.errno in (errno.ENOSPC, errno.EDQUOT)
    return getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL


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
