"""Stores receipts: one file for each in the run folders, and an index with a chain over all of them.

A receipt is stored once; a loaded one reads its trace on demand. All functions block, and any thread may call them.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import chain, islice
from pathlib import Path
from typing import Final

import msgspec

from backplane.contract import canonical
from backplane.contract.receipt import Receipt
from backplane.errors import ConfigError, StoreError
from backplane.receipts import audit, database, recovery
from backplane.receipts.audit import AuditFinding
from backplane.receipts.database import ChainCheckpoint, Index, ReceiptRow
from backplane.receipts.journal import COPIED, PATCH, RECEIPT, TRACE, Facts, Journal, opening_of, replace_file
from backplane.receipts.pieces import with_trace, without_trace
from backplane.receipts.recovery import Orphan, Recovery
from backplane.receipts.trace import Trace, as_trace

PREFIX_CHARS_MIN: Final = 4
"""Minimum length of a beginning of a run id; a shorter one is taken for a typing mistake."""
_LAST: Final = re.compile(r"last(?:~([0-9]{1,9}))?")
"""Names that count back from the newest run: `last`, `last~2`."""
AMBIGUOUS_SHOWN: Final = 5
FAULTS_SHOWN: Final = 3
"""Maximum number of files named in an error about files that could not be removed."""
_PAGE_ROWS: Final = 64
"""Number of rows read at once, which takes some 0.1 ms."""
UNLINKED_MAX: Final = 16
"""Number of newest rows that may lack their `link.json`, because their writers were killed after the commit."""


class Store:
    """An open store; `open` opens it, `close` or the end of a `with` closes it."""

    def __init__(self, home: Path, index: Index) -> None:
        self.home, self._runs, self._index = home, home / "runs", index

    @classmethod
    def open(cls, home: Path, *, readonly: bool = False) -> Store:
        """Open the store in `home`; make it if it is missing.

        Args:
            home: the state directory.
            readonly: True to write nothing; a missing store is then an empty one.

        Raises:
            StoreError: `receipt_store_failed`: newer schema, failing disk.
        """
        folders = (home / "runs" / name for name in recovery.run_folders(home))
        store = cls(home, Index(home, lambda: folders, readonly=readonly))
        if not readonly:
            store._complete_links()
        return store

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._index.close()

    # In ---------------------------------------------------------------------------------------------------------------

    def append(self, receipt: Receipt, journal: Journal | None = None) -> ReceiptRow:
        """Store a sealed receipt; once this returns, it survives a power cut.

        Args:
            receipt: sealed receipt, with the journal's trace, or any sequence of events if there is no journal.
            journal: the run's open journal, which the caller closes; None does the same as `adopt`.

        Raises:
            StoreError: `receipt_store_failed`: the run is stored already, or the disk fails; nothing was stored.
        """
        if receipt.receipt_sha256 is None:
            raise StoreError("receipt_store_failed", f"the receipt of run {receipt.meta.run_id} is not sealed")
        if journal is None:
            return self.adopt(receipt)
        trace = receipt.trace
        if not isinstance(trace, Trace) or trace.source != journal.trace.source or len(trace) != journal.count:
            raise StoreError("receipt_store_failed", f"the receipt's trace is not the journal's in {journal.folder}")
        # If the commit fails, the next start finds the sealed receipt and stores it.
        journal.seal(without_trace(receipt))
        row = self._index.add(database.columns_of(receipt, trace))
        with suppress(StoreError):  # The next writer, or the next opening of the store, writes it.
            self._complete_links()
        return row

    def _complete_links(self) -> None:
        """Write each missing `link.json`: of the last row, and of those whose writers were killed."""
        for row in self.rows(UNLINKED_MAX):
            folder = self._runs / row.run_id
            is_due = recovery.is_run_id(row.run_id) and not (folder / database.LINK).exists()
            if is_due and (folder / RECEIPT).exists():
                database.keep_row(folder, row)

    def adopt(self, receipt: Receipt, patch: bytes = b"", head: Facts | None = None) -> ReceiptRow:
        """Store a sealed receipt that was made elsewhere, with its patch.

        Args:
            head: the first fact of the run if its order is known here, see `journal.head_fact`.

        Raises:
            StoreError: as `append`, also if the duration is too large for a row; nothing was stored.
        """
        run_id = receipt.meta.run_id
        if self.has(run_id):
            raise database.known(run_id)
        if os.path.lexists(self.folder(run_id)):
            fact = f"run {run_id} has a journal here, and its receipt is still to come"
            raise StoreError("receipt_store_failed", fact, hint="this run id was used before; take a new one")
        journal = Journal.create(self.home, run_id, {**(head or {}), "fact": COPIED, "patch": bool(patch)})
        try:
            if receipt.trace:
                journal.append(b"".join(as_trace(receipt.trace).blocks()), len(receipt.trace))
            if patch:
                replace_file(journal.folder / PATCH, patch)
            return self.append(msgspec.structs.replace(receipt, trace=journal.trace), journal)
        except BaseException:
            journal.discard()
            raise
        finally:
            journal.close()

    # Out --------------------------------------------------------------------------------------------------------------

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
        while page := self._index.rows(f"WHERE {which} LIMIT {_PAGE_ROWS}", last):
            yield from page
            last = page[-1].sequence

    def find(self, run: str) -> ReceiptRow:
        """Return the row of a run.

        Args:
            run: id, or a beginning that no other id has; or `last`, or `last~2` for the second run before it, without
                counting runs that check another run's result.

        Raises:
            ConfigError: `config_invalid`: the beginning is too short, or fits no run or several.
        """
        back = steps_back(run)
        if back is None:
            found = self.beginning(run)
            # The id may be that of an order in a queue, which has no run here until somebody follows it.
            fact, hint = (
                f"no receipt of a run {run!r} is stored",
                "backplane runs, or runs --gateway; a queue's order: backplane queue list",
            )
        else:
            own = (row for row in self.newest() if not self._is_check(row.run_id))
            found = [*islice(own, back, back + 1)]
            fact, hint = f"{run!r}: not so many receipts are stored", "backplane runs"
        if not found:
            raise ConfigError("config_invalid", fact, hint=hint)
        only(run, [row.run_id for row in found])
        return found[0]

    def _is_check(self, run_id: str) -> bool:
        return recovery.is_run_id(run_id) and opening_of(self.folder(run_id)).check is not None

    def beginning(self, prefix: str) -> list[ReceiptRow]:
        """Return the first rows whose run id has this beginning, one more than an error names.

        Raises:
            ConfigError: `config_invalid`, it is too short.
        """
        wanted = prefix.strip().lower()
        if len(wanted) < PREFIX_CHARS_MIN:
            fact = f"{prefix!r} is too short for a run id: {PREFIX_CHARS_MIN} characters are the least"
            raise ConfigError("config_invalid", fact, hint="backplane runs")
        return self._index.rows("WHERE run_id >= ? AND run_id < ? ORDER BY run_id LIMIT ?", *_between(wanted))

    def of_orders(self, prefix: str) -> list[ReceiptRow]:
        """Return the newest row of each order whose id has this beginning; at most `AMBIGUOUS_SHOWN + 1` rows."""
        newest = "SELECT MAX(sequence) FROM receipts WHERE work_order_id >= ? AND work_order_id < ?"
        where = f"WHERE sequence IN ({newest} GROUP BY work_order_id) ORDER BY work_order_id LIMIT ?"
        return self._index.rows(where, *_between(prefix))

    def load(self, run: str) -> Receipt:
        """Return the receipt of a run; its trace is read from disk on demand.

        Raises:
            ConfigError: as `find`.
            StoreError: `receipt_store_failed`, the receipt cannot be read or was pruned.
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
            if self._is_pruned(row):
                return b""
            fact = f"the receipt of run {row.run_id} cannot be read: {error.strerror}"
            raise StoreError("receipt_store_failed", fact, hint="see `backplane receipts verify`") from error

    def _is_pruned(self, row: ReceiptRow) -> bool:
        kept = database.kept_row(self.folder(row.run_id)) if recovery.is_run_id(row.run_id) else None
        return kept is not None and kept.pruned

    def _unpruned(self, row: ReceiptRow) -> bytes:
        body = self.body(row)
        if not body:
            raise StoreError("receipt_store_failed", f"the content of run {row.run_id} was pruned")
        return body

    def trace(self, row: ReceiptRow) -> Trace:
        if not row.trace_count:
            return Trace(b"", 0, 0)
        return Trace(self.folder(row.run_id) / TRACE, row.trace_count, row.trace_bytes)

    def folder(self, run_id: str) -> Path:
        """Return the folder of a run's journal and patch, which may be missing.

        Raises:
            StoreError: `receipt_store_failed`, this is no run id, as an altered row must not lead to other folders.
        """
        if not recovery.is_run_id(run_id):
            raise StoreError("receipt_store_failed", f"a row names the run {run_id!r}, which is no run id")
        return self._runs / run_id

    def patch(self, row: ReceiptRow) -> Path | None:
        """Return the file with the run's patch; None if there is none.

        Raises:
            StoreError: `receipt_store_failed`, the run was pruned, so its changes are unknown.
        """
        self._unpruned(row)
        path = self.folder(row.run_id) / PATCH
        return path if path.is_file() else None

    def has(self, run_id: str) -> bool:
        return bool(self._index.rows("WHERE run_id = ?", run_id))

    # Checks -----------------------------------------------------------------------------------------------------------

    def checkpoint(self) -> ChainCheckpoint | None:
        """Return the head of the chain; None while the store is empty."""
        head = next(self.newest(), None)
        return ChainCheckpoint(head.sequence, head.link, canonical.timestamp_at(time.time_ns())) if head else None

    def verify(self, run: str) -> list[AuditFinding]:
        """Check one receipt: body, trace, patch, columns, and its link to the previous one.

        Returns:
            The faults; empty if there are none.

        Raises:
            ConfigError: as `find`.
            StoreError: `receipt_store_failed`, its content was pruned.
        """
        row = self.find(run)
        return self._check(row, self._unpruned(row)) + audit.check_link(row, self._at(row.sequence - 1))

    def verify_all(self, checkpoint: ChainCheckpoint | None = None) -> audit.Audit:
        """Check every receipt and the whole chain.

        Args:
            checkpoint: an earlier checkpoint; without it, missing last rows or an older copy of the store go unnoticed.
        """
        findings = [AuditFinding("receipt_store_failed", "", fact) for fact in self._index.faults()]
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
                findings += self._check(row, body)
            previous = row
        for folder in self._unindexed():
            if (kept := database.kept_row(folder)) is not None:
                fact = f"receipt {kept.sequence} stands in its folder and not in the index"
                findings.append(AuditFinding("receipt_chain_broken", folder.name, fact))
        if checkpoint is not None:
            findings += audit.check_checkpoint(checkpoint, self._at(checkpoint.sequence))
        return audit.Audit(tuple(findings), checked, pruned, checkpoint is not None, self._index.rebuilt_at())

    def _check(self, row: ReceiptRow, body: bytes) -> list[AuditFinding]:
        """Check one receipt; of a pruned one, whose body is empty, check the row."""
        folder = self.folder(row.run_id)
        found = audit.check_row(row, body, self.trace(row), folder) if body else []
        kept = audit.check_kept(row, folder)
        is_unlinked = bool(kept) and not os.path.lexists(folder / database.LINK)
        if is_unlinked and row.sequence > self.rows(1)[0].sequence - UNLINKED_MAX:
            return found  # The next writer, or opening for writing, adds it.
        return found + kept

    def _at(self, sequence: int) -> ReceiptRow | None:
        found = self._index.rows("WHERE sequence = ?", sequence)
        return found[0] if found else None

    # Removal ----------------------------------------------------------------------------------------------------------

    def prune(
        self,
        keep: int | None = None,
        *,
        ended_before_ms: int | None = None,
        bytes_max: int | None = None,
        dry_run: bool = False,
    ) -> int:
        """Remove the content of each receipt that is beyond one of the bounds; its place in the chain stays.

        Args:
            keep: number of newest receipts that stay whole; None for no bound.
            ended_before_ms: remove runs that ended before this time, in milliseconds since 1970; None for no bound.
            bytes_max: maximum size of all files, counted from the newest run on; None for no bound.
            dry_run: True to only count them; the store may be read-only then.

        Returns:
            Number of receipts that were removed by this call.

        Raises:
            StoreError: `receipt_store_failed`, also if a file cannot be removed; another call tries again.
        """
        rows = self._prunable(keep, ended_before_ms, bytes_max)
        count = sum(not self._is_pruned(row) for row in rows)
        if not dry_run:
            own = [row for row in rows if recovery.is_run_id(row.run_id)]
            try:
                self._mark_pruned(own)
            except StoreError as error:
                if not database.is_full(error):
                    raise
                # Remove the files first; until the rows are marked, `verify` reports these receipts.
                self._remove_files(own)
                self._mark_pruned(own)
            self._remove_files(own)
        return count

    def _mark_pruned(self, rows: Iterable[ReceiptRow]) -> None:
        for row in rows:
            database.keep_row(self._runs / row.run_id, row, pruned=True)

    def _prunable(self, keep: int | None, ended_before_ms: int | None, bytes_max: int | None) -> list[ReceiptRow]:
        gone, size_bytes = [], 0
        for place, row in enumerate(self.newest()):
            is_beyond = keep is not None and place >= keep
            is_old = ended_before_ms is not None and _ms(row.finished_at) < ended_before_ms
            if bytes_max is not None and not is_beyond and not is_old:
                size_bytes += _size_of(self._runs / row.run_id) if recovery.is_run_id(row.run_id) else 0
                is_beyond = size_bytes > bytes_max
            if is_beyond or is_old:
                gone.append(row)
        return gone

    def _remove_files(self, rows: Sequence[ReceiptRow]) -> None:
        # Also remove the copies in which killed runs worked.
        places = (self._runs / row.run_id for row in rows), (self.home / "stage" / row.run_id for row in rows)
        tried = [recovery.remove(folder, but=database.LINK) for folder in chain(*places)]
        if faults := [fault for fault in tried if fault is not None]:
            fact = f"files of pruned receipts cannot be removed: {'; '.join(faults[:FAULTS_SHOWN])}"
            raise StoreError("receipt_store_failed", fact, hint="put that right and prune again: it removes the rest")

    # Runs that were cut off -------------------------------------------------------------------------------------------

    def orphans(self) -> list[Orphan]:
        """Return the runs that were cut off: they have a journal, but no stored receipt and no process."""
        abandoned = (folder for folder in self.unknown_folders() if recovery.is_abandoned(folder))
        return [Orphan(folder) for folder in abandoned if not self.has(folder.name)]

    def recover(self, clean: Callable[[Orphan], None] | None = None) -> Recovery:
        """Seal every orphan as interrupted and store it; several processes may do so at once.

        Args:
            clean: removes the run's files outside of its folder; called for each orphan before it is sealed, under its
                lock. It must not fail if they are already gone.

        Raises:
            StoreError: `receipt_store_failed`, the store itself cannot be read.
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

    def _settle(self, run_id: str, clean: Callable[[Orphan], None] | None = None) -> list[ReceiptRow]:
        folder = self.folder(run_id)
        with recovery.claimed(folder) as lock:
            if lock is None or self.has(run_id) or os.path.lexists(folder / database.LINK):
                return []
            orphan = recovery.read_orphan(folder)
            if clean is not None:
                clean(orphan)
            with recovery.reopened(orphan, lock) as (journal, cut):
                receipt = recovery.receipt_of(orphan, journal, cut)
                if receipt is None:
                    journal.discard()
                    return []
                return [self.append(receipt, journal)]

    def unknown_folders(self) -> Iterator[Path]:
        """Yield the folders of runs that have no receipt here: live ones, and those that were cut off."""
        return (folder for folder in self._unindexed() if not os.path.lexists(folder / database.LINK))

    def _unindexed(self) -> Iterator[Path]:
        """Yield the run folders that have no row."""
        # Read folders before rows: a run that ends meanwhile then has its row.
        names = recovery.run_folders(self.home)
        known = self._index.run_ids()
        return (self._runs / name for name in names if name not in known)


def steps_back(name: str) -> int | None:
    """Return the number of runs to count back from the newest, as 2 for `last~2`; None if the name is an id."""
    found = _LAST.fullmatch(name.strip())
    return None if found is None else int(found[1] or 0)


def only(name: str, ids: Sequence[str], kind: str = "runs") -> str:
    """Return the only id that begins with a name. Raises ConfigError, `config_invalid`, if there are several."""
    if len(ids) > 1:
        shown = ", ".join(ids[:AMBIGUOUS_SHOWN]) + (" and more" if len(ids) > AMBIGUOUS_SHOWN else "")
        raise ConfigError("config_invalid", f"{name!r} begins several {kind}: {shown}", hint="give more of the id")
    return ids[0]


def _between(prefix: str) -> tuple[str, str, int]:
    """Return the bounds of the ids with this beginning, and the number of rows to read."""
    # Ids are ASCII; input from a terminal may be no valid text, and then matches none.
    wanted = prefix.encode("ascii", "replace").decode()
    return wanted, wanted + "~", AMBIGUOUS_SHOWN + 1


def _ms(timestamp: str) -> int:
    """Return a row's time in milliseconds since 1970; 0 if it cannot be read."""
    try:
        return int(datetime.fromisoformat(timestamp).timestamp() * 1000)
    except (ValueError, OverflowError):
        return 0


def _size_of(folder: Path) -> int:
    """Return the size of a run's files on the disk; 0 if it has none."""
    total = 0
    for above, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(above, name)).st_size
    return total
