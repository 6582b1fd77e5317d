"""The store of receipts: one SQLite file with a chain over all rows, traces in the run folders.

A receipt goes in once and is acknowledged when it is safe; it comes back with its trace read on
demand. Everything here blocks and may be called from any thread.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec

from backplane.contract import canonical
from backplane.contract.receipt import Receipt
from backplane.errors import ConfigError, StoreError
from backplane.receipts import database
from backplane.receipts.journal import PATCH, TRACE, Journal
from backplane.receipts.seal import with_trace, without_trace
from backplane.receipts.trace import Trace, line_batches

PREFIX_CHARS_MIN: Final = 4
"""Shortest beginning of a run id that is looked up; shorter ones are typing mistakes."""
AMBIGUOUS_SHOWN: Final = 5
_PAGE_ROWS: Final = 256


class Row(msgspec.Struct, frozen=True):
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
    trace_sha256: str
    """Of the events joined by commas."""
    previous_link: str
    link: str


class Checkpoint(msgspec.Struct, frozen=True):
    """The head of the chain at one moment, to be kept elsewhere: only with one can a rollback be seen."""

    sequence: int
    link: str
    time: str


Rows = list[Row]
"""Under a name of its own, because `Store.list` hides the builtin inside the class."""

_COLUMNS: Final = ", ".join(Row.__struct_fields__)
_INSERT: Final = f"INSERT INTO receipts ({_COLUMNS}, body) VALUES ({', '.join('?' * (len(Row.__struct_fields__) + 1))})"


class Store:
    """An open store; made by `open`, let go by `close` or the end of a `with`."""

    def __init__(self, home: Path, connection: sqlite3.Connection) -> None:
        self.home = home
        self._connection = connection
        self._lock = threading.Lock()

    @classmethod
    def open(cls, home: Path, *, readonly: bool = False) -> Store:
        """Open the store in `home`, making it when it is not there.

        Args:
            home: the state directory.
            readonly: writes nothing; a store that is not there is an empty one.

        Raises:
            StoreError: `receipt_store_failed`: network file system, newer schema, failing disk.
        """
        return cls(home, database.connect(home, readonly=readonly))

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def append(self, receipt: Receipt, journal: Journal | None = None) -> Row:
        """Keep a sealed receipt; when this returns it survives a power cut.

        Args:
            receipt: sealed; its trace is the journal's, or any sequence when there is no journal.
            journal: the run's, still open; it stays the caller's to close. Without one: `adopt`.

        Raises:
            StoreError: `receipt_store_failed`: the run is stored already, or the disk fails; nothing was kept.
        """
        if receipt.receipt_sha256 is None:
            raise StoreError("receipt_store_failed", f"the receipt of run {receipt.meta.run_id} is not sealed")
        if journal is not None:
            return self._append(receipt, journal)
        return self.adopt(receipt)

    def adopt(self, receipt: Receipt, patch: bytes = b"") -> Row:
        """Keep a sealed receipt that has no journal here, with the patch that belongs to it.

        Raises:
            StoreError: as `append`; nothing is left behind.
        """
        if self.has(receipt.meta.run_id):
            raise _known(receipt.meta.run_id)
        if not len(receipt.trace) and not patch:
            return self._insert(receipt, Trace(b"", 0, 0))
        journal = Journal.create(self.home, receipt.meta.run_id, {"fact": "copied"})
        try:
            for batch in line_batches(receipt.trace):
                journal.append(batch)
            if patch:
                journal.keep_patch(patch)
            return self._append(msgspec.structs.replace(receipt, trace=journal.trace), journal)
        except BaseException:
            journal.discard()
            raise
        finally:
            journal.close()

    def list(self, limit: int = 50, *, before: int | None = None) -> Rows:
        """Rows, newest first.

        Args:
            limit: rows at most.
            before: only rows of a lower sequence, for paging on.
        """
        return self._rows(
            "WHERE sequence < ? ORDER BY sequence DESC LIMIT ?", (before if before is not None else 2**62, limit)
        )

    def find(self, run: str) -> Row:
        """The row of a run id, or of its beginning when only one run begins so.

        Raises:
            ConfigError: `config_invalid`: too short, not there, or several.
        """
        wanted = run.strip().lower()
        if len(wanted) < PREFIX_CHARS_MIN:
            raise ConfigError("config_invalid", f"{run!r} is too short; give {PREFIX_CHARS_MIN} characters of a run id")
        rows = self._rows(
            "WHERE run_id >= ? AND run_id < ? ORDER BY run_id LIMIT ?", (wanted, wanted + "~", AMBIGUOUS_SHOWN + 1)
        )
        if len(rows) == 1:
            return rows[0]
        if not rows:
            raise ConfigError(
                "config_invalid", f"no receipt of a run {run!r} is stored", hint="backplane receipts list shows them"
            )
        names = ", ".join(row.run_id for row in rows[:AMBIGUOUS_SHOWN])
        more = " and more" if len(rows) > AMBIGUOUS_SHOWN else ""
        raise ConfigError("config_invalid", f"{run!r} begins several runs: {names}{more}", hint="give more of the id")

    def load(self, run: str) -> Receipt:
        """The receipt of a run, its trace read from disk on demand.

        Raises:
            ConfigError: as `find`.
            StoreError: `receipt_store_failed` when the row cannot be read.
        """
        row = self.find(run)
        try:
            return with_trace(self.body(row), self.trace(row))
        except msgspec.MsgspecError as error:
            raise StoreError("receipt_store_failed", f"row {row.sequence} holds no receipt: {error}") from error

    def body(self, row: Row) -> bytes:
        """The stored canonical bytes of a receipt, with an empty trace."""
        with self._locked() as connection:
            found = connection.execute("SELECT body FROM receipts WHERE sequence = ?", (row.sequence,)).fetchone()
        if found is None:
            raise StoreError("receipt_store_failed", f"the receipt of run {row.run_id} is gone")
        return bytes(found[0])

    def trace(self, row: Row) -> Trace:
        if not row.trace_count:
            return Trace(b"", 0, 0)
        return Trace(self.folder(row.run_id) / TRACE, row.trace_count, row.trace_bytes)

    def folder(self, run_id: str) -> Path:
        """Where a run's journal and patch lie; need not be there."""
        return self.home / "runs" / run_id

    def patch(self, row: Row) -> Path | None:
        """The file with the run's patch, when there is one."""
        path = self.folder(row.run_id) / PATCH
        return path if path.is_file() else None

    def has(self, run_id: str) -> bool:
        return bool(self._rows("WHERE run_id = ?", (run_id,)))

    def scan(self) -> Iterator[Row]:
        """All rows in the order of the chain, a page at a time."""
        last = -(2**62)
        while page := self._rows("WHERE sequence > ? ORDER BY sequence LIMIT ?", (last, _PAGE_ROWS)):
            yield from page
            last = page[-1].sequence

    def checkpoint(self) -> Checkpoint | None:
        """The chain's head now; None while the store is empty."""
        head = self.list(1)
        return Checkpoint(head[0].sequence, head[0].link, canonical.timestamp_at(time.time_ns())) if head else None

    def _append(self, receipt: Receipt, journal: Journal) -> Row:
        trace = receipt.trace
        if not isinstance(trace, Trace) or trace.source != journal.trace.source or len(trace) != journal.count:
            raise StoreError("receipt_store_failed", f"the receipt's trace is not the journal's in {journal.folder}")
        # Should the commit fail, the next start finds the receipt itself and keeps it as it was sealed.
        journal.note_sealed(without_trace(receipt))
        journal.sync()
        return self._insert(receipt, trace)

    def _insert(self, receipt: Receipt, trace: Trace) -> Row:
        body, columns = without_trace(receipt), columns_of(receipt, trace)
        with self._locked() as connection, database.transaction(connection):
            head = connection.execute("SELECT sequence, link FROM receipts ORDER BY sequence DESC LIMIT 1").fetchone()
            sequence, previous = (head[0] + 1, head[1]) if head else (1, database.FIRST_LINK)
            link = database.link_of(previous, sequence, columns["sha256"])
            row = Row(sequence=sequence, previous_link=previous, link=link, **columns)
            try:
                connection.execute(_INSERT, (*msgspec.structs.astuple(row), body))
            except sqlite3.IntegrityError:
                raise _known(row.run_id) from None
        return row

    def _rows(self, where: str, values: Iterable[object]) -> Rows:
        with self._locked() as connection:
            found = connection.execute(f"SELECT {_COLUMNS} FROM receipts {where}", tuple(values)).fetchall()
        return [Row(*values) for values in found]

    @contextmanager
    def _locked(self) -> Iterator[sqlite3.Connection]:
        with self._lock, database.translated(self.home / database.FILE):
            yield self._connection


def columns_of(receipt: Receipt, trace: Trace) -> dict[str, Any]:
    """What a row says about its receipt, the chain aside; reads the trace once."""
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
        "trace_sha256": trace.sha256,
    }


def _known(run_id: str) -> StoreError:
    return StoreError("receipt_store_failed", f"a receipt of run {run_id} is stored already")
