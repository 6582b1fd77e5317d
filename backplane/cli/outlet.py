"""Stdout of a live run: waits for a slow reader without stopping the loop, and notices one who left."""

from __future__ import annotations

import os
import select
import stat
from typing import Final

import anyio

from backplane.cli import streams

LOOK_S: Final = 0.5
"""How often a pipe nobody writes to is asked whether its reader is still there."""

PATIENCE_S: Final = 1.0
"""For a reader who does not read to take the last words, once the run was interrupted."""

_JOIN_BYTES: Final = 64 * 1024
"""Written at once to a file, which never makes us wait for a reader."""


class Outlet:
    """Stdout, written from the event loop.

    Attributes:
        gone: nobody reads it any more; what is written then goes nowhere.
    """

    def __init__(self) -> None:
        mode = os.fstat(streams.STDOUT).st_mode
        self.gone = False
        self._waits = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(streams.STDOUT)
        self._hurry = False
        self._waiting: anyio.CancelScope | None = None

    async def write(self, data: bytes) -> None:
        """Write all of it, as fast as the reader takes it.

        Raises:
            BackendError: `stream_closed`, the disk behind it is full or the like.
        """
        view = memoryview(data)
        with anyio.CancelScope() as self._waiting:
            if self._hurry:
                self._waiting.deadline = anyio.current_time() + PATIENCE_S
            while view and not self.gone:
                view = view[await self._some(view) :]
        if self._waiting.cancelled_caught:
            self.gone = True

    def hurry(self) -> None:
        """From now on a reader who does not read has `PATIENCE_S` left."""
        self._hurry = True
        if self._waiting is not None:
            self._waiting.deadline = anyio.current_time() + PATIENCE_S

    async def reader_left(self) -> None:
        """Return when the reader of a pipe has gone; for anything else never."""
        if not self._waits:
            await anyio.sleep_forever()
        watch = select.poll()
        watch.register(streams.STDOUT, 0)
        while not self.gone:
            self.gone = any(events & (select.POLLERR | select.POLLHUP) for _, events in watch.poll(0))
            if not self.gone:
                await anyio.sleep(LOOK_S)

    async def _some(self, view: memoryview) -> int:
        if self._waits and not select.select([], [streams.STDOUT], [], 0)[1]:
            await anyio.wait_writable(streams.STDOUT)
        try:
            return os.write(streams.STDOUT, view[: streams.WRITE_BYTES if self._waits else _JOIN_BYTES])
        except BlockingIOError:
            await anyio.wait_writable(streams.STDOUT)
            return 0
        except OSError as error:
            failure = streams.gone(error)
            if not isinstance(failure, streams.ReaderGone):
                raise failure from error
            self.gone = True
            return 0
