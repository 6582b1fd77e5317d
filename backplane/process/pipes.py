"""Writes whole lines to a program and reads its bytes, over two descriptors."""

from __future__ import annotations

import os
from contextlib import suppress

import anyio

from backplane.process.launch import READ_BYTES_MAX


class Pair:
    """A pair of descriptors, one to write and one to read; the caller closes both."""

    def __init__(self, write_fd: int, read_fd: int) -> None:
        self._write_fd, self._read_fd = write_fd, read_fd
        self._lock = anyio.Lock()
        self._rest = b""
        """The unwritten rest of a line whose writer was cancelled."""

    async def more(self) -> bytes:
        """Return the next bytes; empty once the other end has closed."""
        with suppress(OSError, anyio.ClosedResourceError):
            while True:
                try:
                    await anyio.wait_readable(self._read_fd)
                except PermissionError:  # A regular file is always readable.
                    await anyio.lowlevel.checkpoint()
                with suppress(BlockingIOError):
                    return os.read(self._read_fd, READ_BYTES_MAX)
        return b""

    async def write(self, line: bytes) -> None:
        """Write a whole line, or nothing of it; ignore a reader that is gone.

        If the caller is cancelled in the middle of a line, the next call writes the rest first.
        """
        with suppress(OSError, anyio.ClosedResourceError):
            async with self._lock:
                await self._write_rest()
                self._rest = line
                try:
                    await self._write_rest()
                finally:
                    if len(self._rest) == len(line):
                        self._rest = b""

    async def _write_rest(self) -> None:
        while self._rest:
            try:
                self._rest = self._rest[os.write(self._write_fd, self._rest) :]
            except BlockingIOError:
                await anyio.wait_writable(self._write_fd)
