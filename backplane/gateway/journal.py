"""The gateway's record: one JSON line at the begin of each exchange and one at its end, in a file for each start.

Nothing is synced: a power cut may lose the newest lines. Contents of requests and answers are never written.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec

from backplane.contract.canonical import timestamp_at
from backplane.errors import StoreError
from backplane.process.locks import try_lock

FOLDER: Final = "gateway"
LOSSES_MAX: Final = 20
"""Losses that a line names; it counts all of them."""

Outcome = Literal["complete", "failed", "refused", "left", "interrupted"]
"""`left`: the client went away. `interrupted`: the gateway ended before the exchange did."""


class ExchangeBegin(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="begin"):
    """The line of an exchange that has begun."""

    id: str
    at: str
    client: str
    front: str
    model: str
    """The model that the client asked."""
    stream: bool
    reserved: int = 0
    """The most that it can cost, in millionths of a dollar; 0 without a budget."""


class ExchangeEnd(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="end"):
    """The line of an exchange that has ended."""

    id: str
    at: str
    client: str
    end: Outcome
    status: int | None = None
    """HTTP status of the answer; None if none was begun."""
    backend: str | None = None
    """The service that was asked last."""
    model: str | None = None
    """The model that was asked there."""
    tried: tuple[str, ...] = ()
    """Services that failed before, with their codes."""
    tokens: dict[str, int] | None = None
    """Counters of the answer; None is unknown."""
    cost: int | None = None
    """Cost in millionths of a dollar; None is unknown."""
    charged: int = 0
    """Amount that the client's budget was charged: the cost, or the reservation if the cost is unknown."""
    ms: int = 0
    losses: int = 0
    lost: tuple[str, ...] = ()
    error: str | None = None


Line = ExchangeBegin | ExchangeEnd
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(Line).decode


def now() -> str:
    """Return the time as the contract writes it."""
    return timestamp_at(time.time_ns())


def new_id() -> str:
    """Return the id of a new exchange."""
    return str(uuid.uuid4())


class ExchangeJournal:
    """The file of one start, locked while the gateway runs.

    Attributes:
        spent: client → what its budget was charged this month, by all starts.

    Raises:
        StoreError: `receipt_store_failed`, the file cannot be made.
    """

    def __init__(self, home: Path) -> None:
        folder = home / FOLDER
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            self.spent = _take_over(folder)
            stamp = time.strftime("%Y-%m-%dT%H%M%S", time.gmtime())
            self.path = folder / f"{stamp}-{os.getpid()}.jsonl"
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try_lock(self._fd)
        except OSError as error:
            fact = f"the gateway's record in {folder} cannot be written: {error.strerror or error}"
            raise StoreError("receipt_store_failed", fact, hint="free some space, or set BACKPLANE_HOME") from error

    def write(self, line: Line) -> None:
        """Append a line.

        Raises:
            StoreError: `receipt_store_failed`, for example on a full disk: then nothing may be sent.
        """
        _append(self._fd, line)

    def close(self) -> None:
        os.close(self._fd)


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
    """Yield the lines of a file; one that was torn by a crash is passed over."""
    with path.open("rb") as file:
        for text in file:
            try:
                yield _decode(text)
            except msgspec.MsgspecError:
                continue


def _take_over(folder: Path) -> dict[str, int]:
    """End the open exchanges of starts that are over; return what each client was charged this month."""
    spent: dict[str, int] = {}
    month = now()[:7]
    for path in sorted(folder.glob("*.jsonl")):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            is_over = try_lock(fd)  # Before reading: otherwise two starts would both end what is open.
            open_now, charged = _read(path, month)
            for client, amount in charged.items():
                spent[client] = spent.get(client, 0) + amount
            for line in open_now.values():
                # Whether of a dead start or of one that runs beside this one: it may cost all of it.
                spent[line.client] = spent.get(line.client, 0) + line.reserved
                if is_over:
                    end = ExchangeEnd(
                        id=line.id, at=now(), client=line.client, end="interrupted", charged=line.reserved
                    )
                    _append(fd, end)
        finally:
            os.close(fd)
    return spent


def _read(path: Path, month: str) -> tuple[dict[str, ExchangeBegin], dict[str, int]]:
    """Return the open exchanges of a file, and what each client was charged in a month."""
    open_now: dict[str, ExchangeBegin] = {}
    charged: dict[str, int] = {}
    for line in lines_of(path):
        if isinstance(line, ExchangeBegin):
            open_now[line.id] = line
            continue
        open_now.pop(line.id, None)
        if line.at.startswith(month):
            charged[line.client] = charged.get(line.client, 0) + line.charged
    return open_now, charged
