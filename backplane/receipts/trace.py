"""Reads the events of a run, which stay on disk: canonical bytes, one event a line, decoded when read."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import msgspec

from backplane.contract import canonical
from backplane.contract.events import AgentEvent, carried
from backplane.errors import StoreError

CHUNK_BYTES: Final = 1 << 17
"""Bytes read and hashed at once: SHA-256 runs at full speed, and the allocator reuses the block. From 256 KiB on, it
maps new pages each time, which takes twice the time."""
LINE_BYTES_MAX: Final = 64 << 20
"""Maximum length of a line that is read: four times that of the protocol."""
LISTED_BYTES_MAX: Final = 4 * 1024 * 1024
"""Size limit of a trace that a program gets as a list, some 20,000 events and 0.1 s; a longer one stays on disk."""

_decode_event: Final = cast("Callable[[bytes], AgentEvent]", msgspec.json.Decoder(AgentEvent).decode)


class Trace(Sequence[AgentEvent]):
    """Events of a run, in order, read on demand.

    Args:
        source: the file with one event in each line, or its bytes.
        count: number of events; lines that are added to the file later are ignored.
        size_bytes: length of these lines, newlines included.

    Raises:
        StoreError: from any read, `receipt_store_failed`, the file is missing, too short or no trace.
    """

    def __init__(self, source: Path | bytes, count: int, size_bytes: int) -> None:
        self.source = source
        self.size_bytes = size_bytes
        self._count = count

    @classmethod
    def of(cls, events: Iterable[AgentEvent]) -> Trace:
        """Return events as a trace in memory."""
        kept = list(events)
        data = canonical.encode_lines(kept)
        return cls(data, len(kept), len(data))

    def blocks(self) -> Iterator[bytes]:
        """Yield the lines in pieces of at most 128 KiB, which may begin and end within a line."""
        left = self.size_bytes
        with self._open() as file:
            while left > 0:
                block = file.read(min(left, CHUNK_BYTES))
                if not block:
                    raise self._short()
                left -= len(block)
                yield block

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes between the brackets of `"trace":[…]`, in pieces of at most 128 KiB."""
        left = self.size_bytes
        for block in self.blocks():
            left -= len(block)
            # A canonical event contains no newline, so each newline ends an event.
            yield (block if left else block[:-1]).replace(b"\n", b",")

    def lines(self) -> Iterator[bytes]:
        """Yield the canonical bytes of each event."""
        with self._open() as file:
            left_bytes = self.size_bytes
            for _ in range(self._count):
                line = file.readline(left_bytes)
                if not line:
                    raise self._short()
                left_bytes -= len(line)
                if line.endswith(b"\n"):
                    line = line[:-1]
                yield line
                line = b""  # Free a long line before the next one is read.

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[AgentEvent]:
        return map(self._event, self.lines())

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __reversed__(self) -> Iterator[AgentEvent]:
        return reversed(list(self))  # `Sequence` would read the file once for each event.

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace | list) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have no hash either

    def __repr__(self) -> str:
        return f"<Trace of {self._count} events, {self.size_bytes} bytes>"

    def _event(self, line: bytes) -> AgentEvent:
        try:
            return carried(_decode_event(line))
        except msgspec.MsgspecError as error:
            raise StoreError("receipt_store_failed", f"{self._name()} holds a line that is no event: {error}") from None

    def _open(self) -> BinaryIO:
        if isinstance(self.source, bytes):
            return BytesIO(self.source)
        try:
            return open_plain(self.source)
        except OSError as error:
            raise StoreError("receipt_store_failed", f"cannot read {self.source}: {error.strerror}") from error

    def _short(self) -> StoreError:
        return StoreError(
            "receipt_store_failed", f"{self._name()} ends before {self._count} events of {self.size_bytes} bytes"
        )

    def _name(self) -> str:
        return str(self.source) if isinstance(self.source, Path) else "a trace in memory"


def listed(trace: Sequence[AgentEvent]) -> Sequence[AgentEvent]:
    """Return a trace as a list, which any JSON encoder accepts; return one over `LISTED_BYTES_MAX` unchanged."""
    if not isinstance(trace, Trace) or trace.size_bytes > LISTED_BYTES_MAX:
        return trace
    try:
        return list(trace)
    except StoreError:
        return trace


def open_plain(path: Path) -> BufferedReader:
    """Open a regular file for reading, but no link, which may lead out of the folder, and no pipe, which may block.

    Raises:
        OSError: also for a link or pipe.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return open(fd, "rb")


def read_plain(path: Path, bytes_max: int) -> bytes:
    """Read a whole regular file. Raises OSError, also if it is longer than `bytes_max`."""
    with open_plain(path) as file:
        if os.fstat(file.fileno()).st_size > bytes_max:
            raise OSError(errno.EFBIG, f"it is over {bytes_max} bytes", str(path))
        return file.read()


def as_trace(events: Sequence[AgentEvent]) -> Trace:
    """Return a trace as it is, and any other sequence of events as a trace in memory."""
    return events if isinstance(events, Trace) else Trace.of(events)
