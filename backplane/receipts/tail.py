"""Follows the journal of a live run: returns its new facts and events. Nothing here writes or waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import msgspec

from backplane.contract.events import AgentEvent
from backplane.receipts.journal import HEAD, TRACE, disk_error
from backplane.receipts.trace import LINE_BYTES_MAX, open_plain

T = TypeVar("T")

LOOK_S: Final = 0.1
"""Seconds between two checks for new lines; a check without new lines takes some microseconds."""

READ_BYTES_MAX: Final = 4 << 20
"""Maximum bytes of a file that are read in one check; the rest is read in the next."""

_decode_event: Final = msgspec.json.Decoder(AgentEvent).decode


class Tail:
    """Follows one run's journal from its beginning; `close` closes it.

    Args:
        folder: the run's folder, with a head.

    Raises:
        StoreError: from any method, `receipt_store_failed`, the disk fails.
    """

    def __init__(self, folder: Path) -> None:
        self._head = _Lines(folder / HEAD)
        self._trace = _Lines(folder / TRACE)

    def close(self) -> None:
        self._head.close()
        self._trace.close()

    def facts(self) -> list[dict[str, Any]]:
        """Return the facts of the head that are new since the last call."""
        return [fact for fact in _decoded(self._head, msgspec.json.decode) if isinstance(fact, dict)]

    def events(self) -> list[AgentEvent]:
        """Return the events that are new since the last call, from at most `READ_BYTES_MAX`."""
        return list(_decoded(self._trace, _decode_event))


def _decoded(lines: _Lines, decode: Callable[[bytes], T]) -> Iterator[T]:
    for line in lines.take():
        with suppress(msgspec.MsgspecError):  # It was changed from outside; `verify` finds that.
            yield decode(line)


class _Lines:
    """Reads the whole lines that were added to a file since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._torn = b""

    def take(self) -> list[bytes]:
        try:
            if self._file is None:
                self._file = open_plain(self._path)
            data = self._file.read(READ_BYTES_MAX)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise disk_error(str(self._path), error) from error
        if not data:
            return []
        *lines, torn = (self._torn + data).split(b"\n")
        self._torn = torn if len(torn) <= LINE_BYTES_MAX else b""
        return [line for line in lines if line]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
