"""The store of receipts: a file per receipt in the run folders, and one SQLite index with a chain over all of them.

A receipt goes in once and is acknowledged when it is safe; it comes back with its trace read on
demand. Everything here blocks and may be called from any thread.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from backplane.contract import canonical
from backplane.contract.receipt import Receipt
from backplane.errors import ConfigError, StoreError
from backplane.receipts import audit, database, recovery
from backplane.receipts.audit import AuditFinding
from backplane.receipts.database import ChainCheckpoint, ReceiptRow, columns_of
from backplane.receipts.journal import (
    COPIED,
    PATCH,
    RECEIPT,
    TRACE,
    Facts,
    Journal,
    disk_error,
    opening_of,
)
from backplane.receipts.pieces import with_trace, without_trace
from backplane.receipts.recovery import Orphan, Recovery
from backplane.receipts.trace import Trace, as_trace

PREFIX_CHARS_MIN: Final = 4
"""Shortest beginning of a run id that is looked up; shorter ones are typing mistakes."""
STEPS_CHARS_MAX: Final = 10
"""Digits of the number in `last~2`; no store has so many runs."""
AMBIGUOUS_SHOWN: Final = 5
FAULTS_SHOWN: Final = 3
"""Files that could not be removed, in an error's line: one is mostly like the other."""
_PAGE_ROWS: Final = 64
"""Rows read at once, in some 0.1 ms."""
UNLINKED_MAX: Final = 16
"""Newest rows that may lack their `link.json`, as their writers were killed after the commit."""


class Store:
    """An open store; `open` opens it, `close` or the end of a `with` closes it."""

    def __init__(self, home: Path, connection: sqlite3.Connection, *, is_absent: bool = False) -> None:
        self.home, self._runs = home, home / "runs"
        self._connection = connection
        self._is_absent = is_absent
        """True while it is read-only and its file did not exist when it was opened."""
        self._lock = threading.Lock()

    @classmethod
    def open(cls, home: Path, *, readonly: bool = False) -> Store:
        """Open the store in `home`, making it when it is not there.

        Args:
            home: the state directory.
            readonly: writes nothing; a store that is not there is an empty one.

        Raises:
            StoreError: `receipt_store_failed`: newer schema, failing disk.
        """
        try:
            is_absent = readonly and not (home / database.FILE).exists()
        except OSError as error:
            raise disk_error(str(home), error) from error
        connection = database.connect(home, lambda: _folders(home), readonly=readonly)
        store = cls(home, connection, is_absent=is_absent)
        if not readonly:
            store._complete_links()
        return store

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def append(self, receipt: Receipt, journal: Journal | None = None) -> ReceiptRow:
        """Keep a sealed receipt; when this returns it survives a power cut.

        Args:
            receipt: sealed; its trace is the journal's, or any sequence when there is no journal.
            journal: the run's, still open; it stays the caller's to close. Without one: `adopt`.

        Raises:
            StoreError: `receipt_store_failed`: the run is stored already, or the disk fails; nothing was kept.
        """
        if receipt.receipt_sha256 is None:
            raise StoreError("receipt_store_failed", f"the receipt of run {receipt.meta.run_id} is not sealed")
        if journal is None:
            return self.adopt(receipt)
        trace = receipt.trace
        if not isinstance(trace, Trace) or trace.source != journal.trace.source or len(trace) != journal.count:
            raise StoreError("receipt_store_failed", f"the receipt's trace is not the journal's in {journal.folder}")
        # If the commit fails, the next start finds the receipt and stores it as it was sealed.
        journal.seal(without_trace(receipt))
        return self._insert(receipt, trace)

    def adopt(self, receipt: Receipt, patch: bytes = b"", head: Facts | None = None) -> ReceiptRow:
        """Keep a sealed receipt that was made elsewhere, with the patch that belongs to it.

        Args:
            head: the first fact of the run if its order is known here, see `journal.head_fact`.

        Raises:
            StoreError: as `append`, also for a duration that no row can hold; nothing is left behind.
        """
        journal = self._copied(receipt, head or {}, has_patch=bool(patch))
        try:
            if patch:
                journal.keep_patch(patch)
            return self.append(msgspec.structs.replace(receipt, trace=journal.trace), journal)
        except BaseException:
            journal.discard()
            raise
        finally:
            journal.close()

    def _copied(self, receipt: Receipt, head: Facts, *, has_patch: bool) -> Journal:
        """Copy the events of a receipt into a journal."""
        run_id = receipt.meta.run_id
        if receipt.meta.duration_ms > database.INTEGER_MAX:
            fact = f"run {run_id} took {receipt.meta.duration_ms} ms by its receipt"
            hint = f"the store counts up to {database.INTEGER_MAX}"
            raise StoreError("receipt_store_failed", fact, hint=hint)
        # A copy of this receipt whose maker died is kept or removed: its place is wanted now.
        self._settle(run_id, only_copies=True)
        if self.has(run_id):
            raise _known(run_id)
        if os.path.lexists(self.folder(run_id)):
            fact = f"run {run_id} has a journal here, and its receipt is still to come"
            raise StoreError("receipt_store_failed", fact, hint="this run id was used before; take a new one")
        journal = Journal.create(self.home, run_id, {**head, "fact": COPIED, "patch": has_patch})
        try:
            if receipt.trace:
                journal.append(b"".join(as_trace(receipt.trace).blocks()), len(receipt.trace))
        except BaseException:
            journal.discard()
            raise
        return journal

    def rows(self, limit: int = 50) -> list[ReceiptRow]:
        """Return the newest rows, the newest first."""
        return [*islice(self.newest(), limit)]

    def newest(self) -> Iterator[ReceiptRow]:
        """Yield all rows, the newest first."""
        return self._paged("sequence < ? ORDER BY sequence DESC", database.INTEGER_MAX)

    def scan(self) -> Iterator[ReceiptRow]:
        """Yield all rows in the order of the chain."""
        return self._paged("sequence > ? ORDER BY sequence", -database.INTEGER_MAX)

    def _paged(self, which: str, last: int) -> Iterator[ReceiptRow]:
        while page := self._rows(f"WHERE {which} LIMIT {_PAGE_ROWS}", (last,)):
            yield from page
            last = page[-1].sequence

    def find(self, run: str) -> ReceiptRow:
        """Return the row of a run.

        Args:
            run: id, or its beginning if only one run begins so; `last`, or `last~2` for the second before it. Runs
                that check another run's result are not counted.

        Raises:
            ConfigError: `config_invalid`: too short, not there, or several.
        """
        back = steps_back(run)
        if back is not None:
            own = (row for row in self.newest() if not self._is_check(row.run_id))
            newest = next(islice(own, back, None), None)
            if newest is None:
                fact = f"{run!r}: not so many receipts are stored"
                raise ConfigError("config_invalid", fact, hint="backplane runs")
            return newest
        found = {row.run_id: row for row in self.beginning(run)}
        if not found:
            # An order of a queue has no run here until it is followed, and its id looks the same.
            hint = "backplane runs; an order that waits in a queue: backplane queue list"
            raise ConfigError("config_invalid", f"no receipt of a run {run!r} is stored", hint=hint)
        return found[only(run, [*found])]

    def _is_check(self, run_id: str) -> bool:
        return recovery.is_run_id(run_id) and opening_of(self.folder(run_id)).check is not None

    def beginning(self, prefix: str) -> list[ReceiptRow]:
        """Return the first rows whose run id begins so, one more than an error names.

        Raises:
            ConfigError: `config_invalid`, it is too short.
        """
        # Ids are ASCII. What a terminal gave may not even be text, and is the beginning of none.
        wanted = prefix.strip().lower().encode("ascii", "replace").decode()
        if len(wanted) < PREFIX_CHARS_MIN:
            fact = f"{prefix!r} is too short for a run id: {PREFIX_CHARS_MIN} characters are the least"
            raise ConfigError("config_invalid", fact, hint="backplane runs")
        return self._rows(
            "WHERE run_id >= ? AND run_id < ? ORDER BY run_id LIMIT ?", (wanted, wanted + "~", AMBIGUOUS_SHOWN + 1)
        )

    def of_orders(self, prefix: str) -> list[ReceiptRow]:
        """The newest row of each order whose id begins so, one more than an error names."""
        wanted = prefix.encode("ascii", "replace").decode()
        newest = "SELECT MAX(sequence) FROM receipts WHERE work_order_id >= ? AND work_order_id < ?"
        where = f"WHERE sequence IN ({newest} GROUP BY work_order_id) ORDER BY work_order_id LIMIT ?"
        return self._rows(where, (wanted, wanted + "~", AMBIGUOUS_SHOWN + 1))

    def load(self, run: str) -> Receipt:
        """The receipt of a run, its trace read from disk on demand.

        Raises:
            ConfigError: as `find`.
            StoreError: `receipt_store_failed` when the row cannot be read or was pruned.
        """
        row = self.find(run)
        try:
            return with_trace(self._unpruned(row), self.trace(row))
        except msgspec.MsgspecError as error:
            raise StoreError("receipt_store_failed", f"row {row.sequence} holds no receipt: {error}") from error

    def body(self, row: ReceiptRow) -> bytes:
        """Return the canonical bytes of a receipt with an empty trace; no bytes if it was pruned.

        Raises:
            StoreError: `receipt_store_failed`, the file is not there or cannot be read.
        """
        try:
            return recovery.sealed_body(self.folder(row.run_id))
        except OSError as error:
            with self._locked() as connection:
                asked = "SELECT pruned FROM receipts WHERE sequence = ?"
                found = connection.execute(asked, (row.sequence,)).fetchone()
            if found is not None and found[0]:
                return b""
            fact = f"the receipt of run {row.run_id} cannot be read: {error.strerror}"
            raise StoreError("receipt_store_failed", fact, hint="see `backplane receipts verify`") from error

    def trace(self, row: ReceiptRow) -> Trace:
        if not row.trace_count:
            return Trace(b"", 0, 0)
        return Trace(self.folder(row.run_id) / TRACE, row.trace_count, row.trace_bytes)

    def folder(self, run_id: str) -> Path:
        """Return the folder of a run's journal and patch; it need not exist.

        Raises:
            StoreError: `receipt_store_failed` for what is no run id: a changed row must not lead elsewhere.
        """
        if not recovery.is_run_id(run_id):
            raise StoreError("receipt_store_failed", f"a row names the run {run_id!r}, which is no run id")
        return self._runs / run_id

    def patch(self, row: ReceiptRow) -> Path | None:
        """Return the file with the run's patch; None if there is none.

        Raises:
            StoreError: `receipt_store_failed` when the run's content was pruned: nobody knows what it changed.
        """
        self._unpruned(row)
        path = self.folder(row.run_id) / PATCH
        return path if os.path.isfile(path) else None

    def has(self, run_id: str) -> bool:
        return bool(self._rows("WHERE run_id = ?", (run_id,)))

    def checkpoint(self) -> ChainCheckpoint | None:
        """The chain's head now; None while the store is empty."""
        head = next(self.newest(), None)
        return ChainCheckpoint(head.sequence, head.link, canonical.timestamp_at(time.time_ns())) if head else None

    def verify(self, run: str) -> list[AuditFinding]:
        """Check one receipt: body, trace, patch, columns, and its links to the one before.

        Returns:
            What does not hold; empty when everything does.

        Raises:
            ConfigError: as `find`.
            StoreError: `receipt_store_failed` when its content was pruned.
        """
        row = self.find(run)
        self._unpruned(row)
        return self._check(row) + audit.check_link(row, self._at(row.sequence - 1))

    def verify_all(self, checkpoint: ChainCheckpoint | None = None) -> audit.Audit:
        """Check every receipt and the whole chain.

        Args:
            checkpoint: one kept from earlier; without it a cut tail or an older copy cannot be seen.
        """
        with self._locked() as connection:
            faults = connection.execute("PRAGMA integrity_check(1)").fetchall()
            rebuilt = connection.execute("SELECT MAX(at) FROM rebuilt").fetchone()[0]
        findings = [AuditFinding("receipt_store_failed", "", fact) for (fact,) in faults if fact != "ok"]
        checked = pruned = 0
        previous: ReceiptRow | None = None
        for row in self.scan():
            findings += audit.check_link(row, previous)
            try:
                body = self.body(row)
            except StoreError as error:
                findings.append(AuditFinding("receipt_hash_mismatch", row.run_id, error.message))
            else:
                checked, pruned = checked + bool(body), pruned + (not body)
                findings += self._check(row) if body else self._check_kept(row)
            previous = row
        for folder in self._unindexed():
            if (kept := database.kept_row(folder)) is not None:
                fact = f"receipt {kept.sequence} stands in its folder and not in the index"
                findings.append(AuditFinding("receipt_chain_broken", folder.name, fact))
        if checkpoint is not None:
            findings += audit.check_checkpoint(checkpoint, self._at(checkpoint.sequence))
        return audit.Audit(tuple(findings), checked, pruned, checkpoint is not None, rebuilt)

    def prune(
        self,
        keep: int | None = None,
        *,
        ended_before_ms: int | None = None,
        bytes_max: int | None = None,
        dry_run: bool = False,
    ) -> int:
        """Remove the content of older receipts; their places in the chain stay. What any of the three names goes.

        Args:
            keep: receipts to leave whole, the newest; None leaves all.
            ended_before_ms: since 1970: what ended before goes; None for no age.
            bytes_max: of all their files together: what is beyond, the newest counted first, goes; None for no bound.
            dry_run: only count them; the store may be open for reading only.

        Returns:
            How many receipts were removed now.

        Raises:
            StoreError: `receipt_store_failed`, also where files stay; calling this again removes them.
        """
        rows = self._prunable(keep, ended_before_ms, bytes_max)
        gone = [row.run_id for row in rows]
        with self._locked() as connection:
            whole = {run_id for (run_id,) in connection.execute("SELECT run_id FROM receipts WHERE NOT pruned")}
        if not dry_run:
            try:
                self._mark_pruned(gone)
            except StoreError as error:
                if not database.is_full(error):
                    raise
                # The files go first; until the rows are marked, these receipts do not verify.
                self._remove_files(gone)
                self._mark_pruned(gone)
            self._remove_files(gone)
            for row in rows:
                if recovery.is_run_id(row.run_id):
                    database.keep_row(self.folder(row.run_id), row, pruned=True)
        return len(whole.intersection(gone))

    def _mark_pruned(self, run_ids: Iterable[str]) -> None:
        with self._locked() as connection, database.transaction(connection):
            marks = ((run_id,) for run_id in run_ids)
            connection.executemany("UPDATE receipts SET pruned = 1 WHERE run_id = ? AND NOT pruned", marks)

    def _prunable(self, keep: int | None, ended_before_ms: int | None, bytes_max: int | None) -> list[ReceiptRow]:
        rows = [*self.newest()]
        gone = {row.run_id for row in rows[max(0, keep) :]} if keep is not None else set()
        if ended_before_ms is not None:
            gone |= {row.run_id for row in rows if _ms(row.finished_at) < ended_before_ms}
        left = bytes_max
        for row in rows if left is not None else ():
            if row.run_id not in gone and recovery.is_run_id(row.run_id):
                left = (left or 0) - _size_of(self.folder(row.run_id))
                if left < 0:
                    gone.add(row.run_id)
        return [row for row in rows if row.run_id in gone]

    def _remove_files(self, run_ids: Iterable[str]) -> None:
        own = [run_id for run_id in run_ids if recovery.is_run_id(run_id)]
        # The copy that a killed run worked in goes with its record.
        places = (folder for run_id in own for folder in (self.folder(run_id), self.home / "stage" / run_id))
        tried = [recovery.remove(folder, but=database.LINK) for folder in places]
        faults = [fault for fault in tried if fault is not None]
        if faults:
            fact = f"files of pruned receipts cannot be removed: {'; '.join(faults[:FAULTS_SHOWN])}"
            raise StoreError("receipt_store_failed", fact, hint="put that right and prune again: it removes the rest")

    def orphans(self) -> list[Orphan]:
        """Runs that were cut off: a journal, no receipt, nobody at work."""
        abandoned = (folder for folder in self.unknown_folders() if recovery.is_abandoned(folder))
        return [Orphan(folder) for folder in abandoned if not self.has(folder.name)]

    def recover(self, clean: Callable[[Orphan], None] | None = None) -> Recovery:
        """Seal every orphan as interrupted and store it; safe when several processes do so at once.

        Args:
            clean: called for each orphan before it is sealed, under its lock: the place to remove
                what the run left elsewhere. Must not fail for something already gone.

        Raises:
            StoreError: `receipt_store_failed` when the store itself cannot be read.
        """
        rows, problems = [], []
        recovery.sweep_abandoned(self.home)
        for folder in self.unknown_folders():
            try:
                rows += self._settle(folder.name, clean)
            except (StoreError, OSError) as error:
                problems.append(f"{folder.name}: {error}")
        return Recovery(tuple(rows), tuple(problems))

    def settle(self, run_id: str, clean: Callable[[Orphan], None]) -> Receipt:
        """Seal and store a dead run, unless it is stored already; return its receipt.

        Args:
            clean: as for `recover`.

        Raises:
            StoreError: `receipt_store_failed`.
        """
        self._settle(run_id, clean)
        return self.load(run_id)

    def _settle(
        self, run_id: str, clean: Callable[[Orphan], None] | None = None, *, only_copies: bool = False
    ) -> list[ReceiptRow]:
        folder = self.folder(run_id)
        with recovery.claimed(folder) as lock:
            if lock is None or self.has(run_id) or os.path.lexists(folder / database.LINK):
                return []
            orphan = recovery.read_orphan(folder)
            if only_copies and not orphan.is_copy:
                return []
            if clean is not None:
                clean(orphan)
            finished_ns = recovery.last_written_ns(folder)
            with recovery.reopened(orphan, lock) as (journal, cut_bytes):
                receipt = recovery.sealed_before(orphan, journal.trace)
                if receipt is None and orphan.is_copy:
                    journal.discard()
                    return []
                if receipt is None:
                    recovery.put_patch_aside(folder)
                    receipt = recovery.interrupted(orphan, journal, finished_ns=finished_ns, cut_bytes=cut_bytes)
                return [self.append(receipt, journal)]

    def unknown_folders(self) -> Iterator[Path]:
        """Yield the folders of runs that have no receipt here: live ones, and those that were cut off."""
        return (folder for folder in self._unindexed() if not os.path.lexists(folder / database.LINK))

    def _unindexed(self) -> Iterator[Path]:
        """Yield the run folders that have no row."""
        names = recovery.run_folders(self.home)
        for start in range(0, len(names), _PAGE_ROWS):
            page = names[start : start + _PAGE_ROWS]
            marks = ", ".join("?" * len(page))
            with self._locked() as connection:
                found = connection.execute(f"SELECT run_id FROM receipts WHERE run_id IN ({marks})", page).fetchall()
            known = {run_id for (run_id,) in found}
            yield from (self.home / "runs" / name for name in page if name not in known)

    def _unpruned(self, row: ReceiptRow) -> bytes:
        body = self.body(row)
        if not body:
            raise StoreError("receipt_store_failed", f"the content of run {row.run_id} was pruned")
        return body

    def _check(self, row: ReceiptRow) -> list[AuditFinding]:
        folder = self.folder(row.run_id)
        opening = opening_of(folder)
        has_patch = opening.patch or opening.fact != COPIED or os.path.lexists(folder / PATCH)
        patch = folder / PATCH if has_patch else None  # The patch of a copy may have stayed where it was.
        return audit.check_row(row, self.body(row), self.trace(row), patch) + self._check_kept(row)

    def _check_kept(self, row: ReceiptRow) -> list[AuditFinding]:
        """Compare a row with the one that stands beside its receipt."""
        kept = database.kept_row(self.folder(row.run_id))
        is_new = kept is None and row.sequence > self._newest_sequence() - UNLINKED_MAX
        if is_new and not os.path.lexists(self.folder(row.run_id) / database.LINK):
            return []  # The next writer, or opening for writing, adds it.
        if kept is not None and all(getattr(kept, name) == getattr(row, name) for name in row.__struct_fields__):
            return []
        fact = f"'{database.LINK}' of receipt {row.sequence} " + ("is missing" if kept is None else "is not its row")
        return [AuditFinding("receipt_chain_broken", row.run_id, fact)]

    def _newest_sequence(self) -> int:
        with self._locked() as connection:
            return int(connection.execute("SELECT IFNULL(MAX(sequence), 0) FROM receipts").fetchone()[0])

    def _complete_links(self) -> None:
        """Write each `link.json` that a killed writer has not written after its commit."""
        for row in self.rows(UNLINKED_MAX):
            folder = self._runs / row.run_id
            is_due = recovery.is_run_id(row.run_id) and not (folder / database.LINK).exists()
            if is_due and (folder / RECEIPT).exists():
                database.keep_row(folder, row)

    def _at(self, sequence: int) -> ReceiptRow | None:
        if abs(sequence) > database.INTEGER_MAX:
            return None
        rows = self._rows("WHERE sequence = ?", (sequence,))
        return rows[0] if rows else None

    def _insert(self, receipt: Receipt, trace: Trace) -> ReceiptRow:
        columns = columns_of(receipt, trace)
        with self._locked() as connection, database.transaction(connection):
            newest = "SELECT sequence, link, run_id FROM receipts ORDER BY sequence DESC LIMIT 1"
            head = connection.execute(newest).fetchone()
            sequence, previous = (head[0] + 1, head[1]) if head else (1, database.FIRST_LINK)
            link = database.link_of(previous, sequence, columns)
            row = ReceiptRow(sequence=sequence, previous_link=previous, link=link, **columns)
            try:
                connection.execute(database.INSERT, (*msgspec.structs.astuple(row), 0))
            except sqlite3.IntegrityError as error:
                raise _known(row.run_id) from error
        with suppress(StoreError):  # The next writer or opening of the store writes it.
            database.keep_row(self.folder(row.run_id), row)
            # The writer before may have been killed between its commit and its link.
            if head and not os.path.lexists(self.folder(head[2]) / database.LINK):
                self._complete_links()
        return row

    def _rows(self, where: str, values: Iterable[object]) -> list[ReceiptRow]:
        with self._locked() as connection:
            found = connection.execute(f"SELECT {database.READ} FROM receipts {where}", tuple(values)).fetchall()
        return [ReceiptRow(*values) for values in found]

    @contextmanager
    def _locked(self) -> Iterator[sqlite3.Connection]:
        with self._lock, database.translated(self.home / database.FILE):
            if self._is_absent and (self.home / database.FILE).exists():  # The first run has ended meanwhile.
                self._connection.close()
                self._connection = database.connect(self.home, lambda: _folders(self.home), readonly=True)
                self._is_absent = False
            yield self._connection


def _folders(home: Path) -> list[Path]:
    return [home / "runs" / name for name in recovery.run_folders(home)]


def steps_back(name: str) -> int | None:
    """Return how many runs before the newest a name means, as 2 for `last~2`; None for a name that is an id."""
    word, tilde, number = name.strip().partition("~")
    if word != "last" or (tilde and not (number.isascii() and number.isdigit() and len(number) < STEPS_CHARS_MAX)):
        return None
    return int(number) if tilde else 0


def only(name: str, ids: Sequence[str], kind: str = "runs") -> str:
    """Return the only id that begins with a name. Raises ConfigError, `config_invalid`, if there are several."""
    if len(ids) > 1:
        shown = ", ".join(ids[:AMBIGUOUS_SHOWN]) + (" and more" if len(ids) > AMBIGUOUS_SHOWN else "")
        raise ConfigError("config_invalid", f"{name!r} begins several {kind}: {shown}", hint="give more of the id")
    return ids[0]


def _known(run_id: str) -> StoreError:
    return StoreError("receipt_store_failed", f"a receipt of run {run_id} is stored already")


def _ms(timestamp: str) -> int:
    """A time of a row since 1970; one that cannot be read is as old as can be."""
    try:
        return int(datetime.fromisoformat(timestamp).timestamp() * 1000)
    except (ValueError, OverflowError):
        return 0


def _size_of(folder: Path) -> int:
    """Bytes of a run's files on the disk; nothing where it has none."""
    total = 0
    for above, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(above, name)).st_size
    return total
