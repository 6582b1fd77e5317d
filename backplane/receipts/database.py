"""Keeps the index of the store: an SQLite file with a row for each receipt, chained to the row before.

The receipts themselves are files in the run folders. A copy of each row is beside its receipt, as `link.json`; a lost
index is rebuilt from these, and no link is ever computed again. With `synchronous=FULL`, a committed row survives a
power cut.
"""

from __future__ import annotations

import errno
import hashlib
import os
import sqlite3
import threading
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
from backplane.receipts.trace import Trace, read_plain

FILE: Final = "receipts.sqlite"
LINK: Final = "link.json"
"""File with a copy of a receipt's row, in the folder of the run; pruning keeps it."""
LINK_BYTES_MAX: Final = 1 << 20
"""Size limit of a `link.json`; a usual one has half a kilobyte."""
INTEGER_MAX: Final = (1 << 63) - 1
"""Largest integer of SQLite."""
SCHEMA_VERSION: Final = 5
"""Version of the file; one with another version is not changed. An older one can be moved away to be rebuilt."""
BUSY_TIMEOUT_S: Final = 30.0
"""Maximum seconds to wait for other writers; a commit takes milliseconds, so a longer wait means a stuck machine."""
CACHE_KIB: Final = 512
"""Memory in KiB for pages of the file; SQLite's default of 2 MiB is much for each worker of a queue."""
FIRST_LINK: Final = "0" * 64
"""Link that counts as the one before the first receipt of a store."""


class ReceiptRow(msgspec.Struct, frozen=True):
    """The row of a stored receipt, as lists show it."""

    sequence: int
    run_id: str
    work_order_id: str
    backend: str
    outcome: str
    reason: str | None
    """`usage_raw.backplane.end.reason`; None if the receipt has none."""
    started_at: str
    finished_at: str
    duration_ms: int
    sha256: str
    trace_count: int
    trace_bytes: int
    previous_link: str
    link: str


class KeptRow(ReceiptRow, frozen=True):
    """A row in the form that it has in `link.json`."""

    pruned: bool = False
    """True if the run's files were removed; not in the index, because the chain does not cover it."""


class ChainCheckpoint(msgspec.Struct, frozen=True):
    """The head of the chain at one time; kept elsewhere, it shows later whether the store was rolled back."""

    sequence: int
    link: str
    time: str


COVERED: Final = tuple(
    name for name in ReceiptRow.__struct_fields__ if name not in ("sequence", "previous_link", "link")
)
"""Columns with values of the receipt, which stay when the receipt is pruned."""

_TYPES: Final[Mapping[Any, str]] = {int: "INTEGER NOT NULL", str: "TEXT NOT NULL"}
_MORE: Final = {"sequence": "INTEGER PRIMARY KEY", "run_id": "TEXT NOT NULL UNIQUE"}
_COLUMNS: Final = {
    name: _MORE.get(name) or _TYPES.get(kind, "TEXT") for name, kind in get_type_hints(ReceiptRow).items()
}
_TABLES: Final = (
    f"CREATE TABLE receipts ({', '.join(map(' '.join, _COLUMNS.items()))})",
    "CREATE TABLE rebuilt (at TEXT NOT NULL)",
)
_INSERT: Final = f"INSERT INTO receipts VALUES ({', '.join('?' * len(_COLUMNS))})"
_READ: Final = ", ".join(
    f"CAST(IFNULL({name}, '') AS TEXT)" if kind == "TEXT NOT NULL" else f"CAST({name} AS {kind.split()[0]})"
    for name, kind in _COLUMNS.items()
)
"""Columns in SQL, cast to the types of `ReceiptRow` even if the file was altered; `verify` compares the values."""


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


def link_of(previous_link: str, sequence: int, columns: Mapping[str, Any]) -> str:
    """Return the link of a row: SHA-256 of the previous link, the sequence and a hash of the row, joined by colons.

    Args:
        columns: the columns in `COVERED`; the hash of the row is SHA-256 of their canonical bytes.
    """
    covered = canonical.sha256_hex(canonical.encode({name: columns[name] for name in COVERED}))
    return hashlib.sha256(f"columns:{previous_link}:{sequence}:{covered}".encode()).hexdigest()


# Rows beside the receipts ---------------------------------------------------------------------------------------------


def keep_row(folder: Path, row: ReceiptRow, *, pruned: bool = False) -> None:
    """Write a copy of a row beside its receipt. Raises StoreError."""
    replace_file(folder / LINK, msgspec.json.encode(KeptRow(**msgspec.structs.asdict(row), pruned=pruned)) + b"\n")


def kept_row(folder: Path) -> KeptRow | None:
    """Return the copy of a row beside its receipt; None if it is missing or cannot be read."""
    try:
        return _decode_row(read_plain(folder / LINK, LINK_BYTES_MAX))
    except (OSError, msgspec.MsgspecError):
        return None


_decode_row: Final = msgspec.json.Decoder(KeptRow).decode


# The file -------------------------------------------------------------------------------------------------------------


class Index:
    """The open index of a store; any thread may use it.

    Args:
        home: the state directory.
        folders: returns the run folders, from which a new index is filled.
        readonly: write nothing; if there is no file, the rows beside the receipts are read into memory.

    Raises:
        StoreError: on any use, `receipt_store_failed`: another schema, or a disk that fails.
    """

    def __init__(self, home: Path, folders: Callable[[], Iterable[Path]], *, readonly: bool) -> None:
        self.path = home / FILE
        self._folders, self._readonly = folders, readonly
        self._lock = threading.Lock()
        self._in_memory = False
        """True while the index is read-only and has no file."""
        with translated(self.path):
            self._connection = self._connect()

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def _connect(self) -> sqlite3.Connection:
        _make_home(self.path.parent, readonly=self._readonly)
        self._in_memory = self._readonly and not _has_content(self.path)
        connection = _open(":memory:" if self._in_memory else f"file:{quote(os.fsencode(self.path))}?mode=rw")
        try:
            if self._in_memory:
                self._make(connection)
                return connection
            for pragma in ("synchronous=FULL", f"cache_size=-{CACHE_KIB}"):
                connection.execute(f"PRAGMA {pragma}")
            if not self._is_made(connection):
                with transaction(connection):
                    # Check again, because another process may have made it while we waited for the lock.
                    if not self._is_made(connection):
                        self._make(connection)
            # Only now, because the first read may have to roll back what a killed writer began.
            connection.execute(f"PRAGMA query_only={int(self._readonly)}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _is_made(self, connection: sqlite3.Connection) -> bool:
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        if version not in (0, SCHEMA_VERSION):
            fact = f"{self.path} has schema version {version}, this program knows version {SCHEMA_VERSION}"
            hint = REBUILD_HINT if 0 < version < SCHEMA_VERSION else FOREIGN_HINT
            raise StoreError("receipt_store_failed", fact, hint=hint)
        return version == SCHEMA_VERSION

    def _make(self, connection: sqlite3.Connection) -> None:
        """Make the tables, and fill them from the copies beside the receipts; `verify` finds contradictions in them."""
        for table in _TABLES:
            connection.execute(table)
        kept = sorted((row for row in map(kept_row, self._folders()) if row is not None), key=lambda row: row.sequence)
        for row in kept:
            with suppress(sqlite3.IntegrityError, OverflowError):
                connection.execute(_INSERT, msgspec.structs.astuple(row)[: len(_COLUMNS)])
        if kept:
            connection.execute("INSERT INTO rebuilt VALUES (?)", (canonical.timestamp_at(time.time_ns()),))
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    @contextmanager
    def _used(self) -> Iterator[sqlite3.Connection]:
        with self._lock, translated(self.path):
            if self._in_memory and _has_content(self.path):  # The first run has ended meanwhile and made the file.
                self._connection.close()
                self._connection = self._connect()
            yield self._connection

    def rows(self, where: str, *values: object) -> list[ReceiptRow]:
        """Return the rows that an SQL condition selects."""
        with self._used() as connection:
            found = connection.execute(f"SELECT {_READ} FROM receipts {where}", values).fetchall()
        return [ReceiptRow(*values) for values in found]

    def add(self, columns: Mapping[str, Any]) -> ReceiptRow:
        """Add a row at the end of the chain; when this returns it survives a power cut.

        Raises:
            StoreError: also if the run has a row already.
        """
        with self._used() as connection, transaction(connection):
            newest = "SELECT sequence, link FROM receipts ORDER BY sequence DESC LIMIT 1"
            last, previous = connection.execute(newest).fetchone() or (0, FIRST_LINK)
            link = link_of(previous, last + 1, columns)
            row = ReceiptRow(sequence=last + 1, previous_link=previous, link=link, **columns)
            try:
                connection.execute(_INSERT, msgspec.structs.astuple(row))
            except sqlite3.IntegrityError as error:
                raise known(row.run_id) from error
        return row

    def run_ids(self) -> set[str]:
        """Return the ids of all runs."""
        with self._used() as connection:
            return {str(run_id) for (run_id,) in connection.execute("SELECT run_id FROM receipts")}

    def faults(self) -> list[str]:
        """Return the faults that SQLite's own check finds in the file."""
        with self._used() as connection:
            return [fact for (fact,) in connection.execute("PRAGMA integrity_check(1)") if fact != "ok"]

    def rebuilt_at(self) -> str | None:
        """Return when the index was last rebuilt from the run folders; None if it never was."""
        with self._used() as connection:
            found: str | None = connection.execute("SELECT MAX(at) FROM rebuilt").fetchone()[0]
        return found


def _make_home(home: Path, *, readonly: bool) -> None:
    """Make the state directory and an empty index if they are missing; do nothing if read-only.

    An existing index is opened only by SQLite, because closing it would release the locks of all connections of this
    process.
    """
    path = home / FILE
    try:
        if home.exists() and not home.is_dir():
            hint = "set BACKPLANE_HOME to a folder that this user can write"
            raise StoreError("receipt_store_failed", f"the state directory {home} is no folder", hint=hint)
        if readonly:
            return
        home.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, FILE_MODE))
        except FileExistsError:
            if not os.access(path, os.W_OK):
                code = errno.EROFS if os.statvfs(path).f_flag & os.ST_RDONLY else errno.EACCES
                raise OSError(code, os.strerror(code), str(path)) from None
        flush_path(home)
    except OSError as error:
        raise disk_error(str(path), error) from error


def _has_content(path: Path) -> bool:
    """Return True if the file exists and is not empty, as it is if its maker died early."""
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False
    except OSError as error:
        raise disk_error(str(path), error) from error


def _open(name: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        name,
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,  # only our own code begins and ends transactions
        check_same_thread=False,  # the index has its own lock
    )
    # `verify` must continue after a text with invalid UTF-8.
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Run the block in a write transaction; roll back after any failure, also of the commit."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def known(run_id: str) -> StoreError:
    """Make the error for a run that has a receipt already."""
    return StoreError("receipt_store_failed", f"a receipt of run {run_id} is stored already")


FOREIGN_HINT: Final = "use the backplane that made it, or set BACKPLANE_HOME to another folder"
"""Next step for a file with the tables of another program."""
REBUILD_HINT: Final = "move the file away: the next start rebuilds it from runs/"
"""Next step for a damaged or older index, whose rows have copies beside the receipts."""
_ERRNO_OF: Final = {
    "SQLITE_FULL": ("ENOSPC", "free some space and run again"),
    "SQLITE_READONLY": ("EROFS", "point the state directory to a writable disk"),
    "SQLITE_CANTOPEN": ("EACCES", "give this user the state directory"),
    "SQLITE_BUSY": ("EBUSY", "another process holds the store; end it and run again"),
    "SQLITE_NOTADB": ("EINVAL", "move the file away; it is no store"),
    "SQLITE_ERROR": ("EINVAL", FOREIGN_HINT),
    "SQLITE_CORRUPT": ("EIO", REBUILD_HINT),
    "OverflowError": ("EOVERFLOW", f"a number of the receipt is over {INTEGER_MAX}"),
}


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn every SQLite failure into `receipt_store_failed`, with the most similar errno's name."""
    try:
        yield
    except (sqlite3.Error, OverflowError) as error:
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        family = next((known for known in _ERRNO_OF if name.startswith(known)), "")
        errno_name, hint = _ERRNO_OF.get(family, ("EIO", "look at the disk"))
        raise StoreError("receipt_store_failed", f"{path}: {errno_name} ({name}: {error})", hint=hint) from error


def is_full(error: StoreError) -> bool:
    """Return whether the disk or the user's quota is full."""
    cause = error.__cause__
    if isinstance(cause, OSError):
        return cause.errno in (errno.ENOSPC, errno.EDQUOT)
    return getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
