"""Writes and reads the gateway's record: JSON lines about each exchange; each start of a gateway has its own file.

Nothing is synced to disk, so a power cut may lose the newest lines.
"""

from __future__ import annotations

import os
import secrets
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from backplane.contract.canonical import timestamp_at
from backplane.errors import StoreError
from backplane.gateway.record import ExchangeBegin, ExchangeEnd, ExchangeFirst, Line, RecordedExchange, joined
from backplane.process.locks import try_lock

FOLDER: Final = "gateway"
SUFFIX: Final = ".jsonl"
TICK_NS: Final = 1_000_000_000
"""Nanoseconds within which two changes of a folder may get the same time; on most file systems it is 4 ms."""
RECENT_BYTES: Final = 512 * 1024
"""Bytes of older records that are read at a start for the times of services; they have about 800 exchanges."""
LOCK_TRIES: Final = 5
"""Attempts to lock a file, a millisecond apart: a reader that tests the lock takes it for a moment."""
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(Line).decode


def now() -> str:
    """Return the present time in the contract's form."""
    return timestamp_at(time.time_ns())


def new_id() -> str:
    """Return the id of a new exchange."""
    return str(uuid.uuid4())


class Spending:
    """Adds up the cost of exchanges from their lines; an open one counts as the most that it can cost."""

    def __init__(self) -> None:
        self._charged: dict[tuple[str, str], int] = {}
        self.open: dict[str, ExchangeBegin] = {}

    def take(self, line: Line) -> None:
        """Add a line."""
        if isinstance(line, ExchangeBegin):
            self.open[line.id] = line
        elif isinstance(line, ExchangeEnd):
            self.open.pop(line.id, None)
            key = (line.client, line.at[:7])
            self._charged[key] = self._charged.get(key, 0) + line.charged

    def of(self, client: str, month: str) -> int:
        """Return what was charged to a client in a month and what is reserved now, in millionths of a dollar.

        Args:
            month: as `2026-11`.
        """
        reserved = sum(line.reserved for line in self.open.values() if line.client == client)
        return self._charged.get((client, month), 0) + reserved


class ExchangeJournal:
    """Writes this gateway's file, which is locked while the gateway runs.

    The files of other gateways in the same state folder are read, because they share the budgets.

    Attributes:
        path: this gateway's file.

    Raises:
        StoreError: `receipt_store_failed`, the file cannot be made, or another one cannot be read.
    """

    def __init__(self, home: Path) -> None:
        self._folder = home / FOLDER
        self._spending = Spending()
        self._read: dict[str, int] = {}
        """Name of another gateway's file → bytes of it that were read."""
        self._written: set[str] = set()
        """Names of files to which another gateway may write."""
        self._listed_ns: int | None = None
        """Modification time of the folder when its files were listed; None lists them again."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            stamp = time.strftime("%Y-%m-%dT%H%M%S", time.gmtime())
            self.path = self._folder / f"{stamp}-{os.getpid()}-{secrets.token_hex(2)}{SUFFIX}"
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            _lock(self._fd)
            self._take_over()
        except OSError as error:
            fact = f"the gateway's record in {self._folder} cannot be written: {error.strerror or error}"
            raise StoreError("receipt_store_failed", fact, hint="free some space, or set BACKPLANE_HOME") from error

    def write(self, line: Line) -> None:
        """Append a line.

        Raises:
            StoreError: `receipt_store_failed`, for example on a full disk; then no request may be sent to a service.
        """
        _append(self._fd, line)
        self._spending.take(line)

    def used(self, client: str) -> int:
        """Return what a client has used of this month's budget at all gateways, in millionths of a dollar.

        Raises:
            StoreError: `receipt_store_failed`, the file of another gateway cannot be read.
        """
        try:
            self._read_on()
        except OSError as error:
            fact = f"the budgets in {self._folder} cannot be read: {error.strerror or error}"
            raise StoreError("receipt_store_failed", fact) from error
        return self._spending.of(client, now()[:7])

    def _read_on(self) -> None:
        """Read the new lines of other gateways' files."""
        changed_ns = self._folder.stat().st_mtime_ns
        if changed_ns != self._listed_ns:
            for name in os.listdir(self._folder):
                if name.endswith(SUFFIX) and name != self.path.name and name not in self._read:
                    self._read[name] = 0
                    self._written.add(name)
            # Another file may be made so soon that the folder's time stays the same.
            self._listed_ns = changed_ns if time.time_ns() - changed_ns > TICK_NS else None
        for name in self._written:
            with suppress(FileNotFoundError):  # It was pruned.
                if (self._folder / name).stat().st_size > self._read[name]:
                    self._read_file(self._folder / name)

    def _read_file(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._read.get(path.name, 0))
            data = file.read()
        whole, _, _ = data.rpartition(b"\n")  # The rest is a line that is being written.
        if whole:
            self._read[path.name] = self._read.get(path.name, 0) + len(whole) + 1
        for text in whole.splitlines():
            with suppress(msgspec.MsgspecError):
                self._spending.take(_decode(text))

    def _take_over(self) -> None:
        """Read all other files; if a file's gateway has ended, end the exchanges that it left open."""
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            if path == self.path:
                continue
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                is_over = _lock(fd)  # Before reading: otherwise two new gateways would both end what is open.
                before = len(self._spending.open)
                self._read_file(path)
                if is_over and len(self._spending.open) > before:
                    if path.stat().st_size > self._read[path.name]:
                        os.write(fd, b"\n")  # Ends a torn line.
                    for begin, first, end in _exchanges(path):
                        if end is None:
                            _append(fd, _interrupted(begin, first))
                    self._read_file(path)
                self._read.setdefault(path.name, 0)
                if not is_over:
                    self._written.add(path.name)
            finally:
                os.close(fd)

    def close(self) -> None:
        os.close(self._fd)


def _lock(fd: int) -> bool:
    """Lock a file; return False if a running gateway has locked it. A reader's test of the lock takes microseconds."""
    for _ in range(LOCK_TRIES):
        if try_lock(fd):
            return True
        time.sleep(0.001)
    return False


def _append(fd: int, line: Line) -> None:
    data = _encode(line) + b"\n"
    try:
        written = os.write(fd, data)
        if written < len(data):
            os.write(fd, b"\n")  # Ends the torn line, so that the next one can be read.
            raise OSError(28, "the disk is full")
    except OSError as error:
        raise StoreError("receipt_store_failed", f"the record cannot be written: {error.strerror}") from error


def lines_of(path: Path) -> Iterator[Line]:
    """Yield the lines of a file; a line that a crash left incomplete is skipped, and a pruned file has no lines."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        for text in file:
            try:
                yield _decode(text)
            except msgspec.MsgspecError:
                continue


def recent_ends(home: Path) -> list[ExchangeEnd]:
    """Return the last lines of the newest exchanges, the oldest first; at most `RECENT_BYTES` are read."""
    parts: list[bytes] = []
    left = RECENT_BYTES
    for _, path in _newest(home):
        with suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(max(path.stat().st_size - left, 0))
            parts.append(file.read(left))
            left -= len(parts[-1])
        if left <= 0:
            break
    ends: list[ExchangeEnd] = []
    for text in b"\n".join(reversed(parts)).splitlines():
        with suppress(msgspec.MsgspecError):  # The first line may be cut.
            line = _decode(text)
            ends += [line] if isinstance(line, ExchangeEnd) else []
    return ends


def _newest(home: Path) -> list[tuple[int, Path]]:
    """Return the record files with their modification times (in ns), the newest first."""
    files: list[tuple[int, Path]] = []
    for path in (home / FOLDER).glob(f"*{SUFFIX}"):
        with suppress(FileNotFoundError):
            files.append((path.stat().st_mtime_ns, path))
    return sorted(files, reverse=True)


def _interrupted(begin: ExchangeBegin, first: ExchangeFirst | None) -> ExchangeEnd:
    """Return the last line for an exchange whose gateway was killed; it is charged what was reserved."""
    end = ExchangeEnd(id=begin.id, at=now(), client=begin.client, end="interrupted", charged=begin.reserved)
    if first is None:
        return end
    return msgspec.structs.replace(
        end, status=200, backend=first.backend, model=first.model, tried=first.tried, ms=first.ms, first_ms=first.ms
    )


def _exchanges(path: Path) -> list[tuple[ExchangeBegin, ExchangeFirst | None, ExchangeEnd | None]]:
    """Return the lines of each exchange in a file; None for lines that were not written."""
    begins: dict[str, ExchangeBegin] = {}
    firsts: dict[str, ExchangeFirst] = {}
    ends: dict[str, ExchangeEnd] = {}
    for line in lines_of(path):
        if isinstance(line, ExchangeBegin):
            begins[line.id] = line
        elif isinstance(line, ExchangeFirst):
            firsts[line.id] = line
        else:
            ends[line.id] = line
    return [(begin, firsts.get(id), ends.get(id)) for id, begin in begins.items()]


def prune(home: Path, before_ms: int, *, dry_run: bool = False) -> int:
    """Remove old record files and the bodies that belong to them; return the number of record files.

    A file that was written in this month stays, because budgets are read from it; so does a running gateway's file.

    Args:
        before_ms: remove files that were last written before this time, in milliseconds since 1970.
        dry_run: only count the files.
    """
    found = 0
    for path in sorted((home / FOLDER).glob(f"*{SUFFIX}")):
        written_ns = path.stat().st_mtime_ns
        is_this_month = timestamp_at(written_ns)[:7] == now()[:7]
        if written_ns >= before_ms * 1_000_000 or is_this_month or _is_written(path):
            continue
        found += 1
        for one in () if dry_run else path.parent.glob(f"{path.stem}.*"):
            one.unlink(missing_ok=True)
    return found


# Readers --------------------------------------------------------------------------------------------------------------


def recorded(home: Path) -> Iterator[RecordedExchange]:
    """Yield all exchanges: first the open ones of running gateways, then the others; in both groups the newest first.

    A file is read only when the next exchange may be in it, so a caller that stops early reads few files.
    """
    files = _newest(home)
    read = {path: _of_file(path, is_live=True) for _, path in files if _is_written(path)}
    opened = [one for exchanges in read.values() for one in exchanges if one.state == "live"]
    yield from sorted(opened, key=_begin, reverse=True)
    waiting: list[RecordedExchange] = []
    for place, (_, path) in enumerate(files):
        found = read.pop(path) if path in read else _of_file(path, is_live=False)
        waiting = sorted([*waiting, *(one for one in found if one.state != "live")], key=_begin)
        # No exchange of the next file began after that file was written last.
        older = timestamp_at(files[place + 1][0]) if place + 1 < len(files) else ""
        while waiting and waiting[-1].began_at >= older:
            yield waiting.pop()


def beginning(home: Path, prefix: str) -> list[RecordedExchange]:
    """Return the exchanges whose id begins with a prefix, in upper or lower case."""
    wanted = prefix.strip().lower()
    return [one for one in recorded(home) if one.id.startswith(wanted)]


def _begin(one: RecordedExchange) -> str:
    return one.began_at


def _of_file(path: Path, *, is_live: bool) -> list[RecordedExchange]:
    return [joined(*lines, is_live=is_live) for lines in _exchanges(path)]


def _is_written(path: Path) -> bool:
    """Return True if a running gateway has locked a file."""
    with suppress(OSError), path.open("rb") as file:
        return not try_lock(file.fileno())
    return False
