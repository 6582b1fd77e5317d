"""Whole lines out and bytes in, over two descriptors of another program.

What a line means, and how long one may be, is not known here.
"""

from __future__ import annotations

import os

import anyio

from backplane.process.launch import READ_BYTES_MAX


class Pair:
    """The two descriptors; they stay the caller's to close."""

    def __init__(self, write_fd: int, read_fd: int) -> None:
        self._write_fd, self._read_fd = write_fd, read_fd
        self._lock = anyio.Lock()

    async def more(self) -> bytes:
        """The next bytes; none when the other end says nothing more."""
        try:
            while True:
                try:
                    await anyio.wait_readable(self._read_fd)
                except PermissionError:  # A regular file cannot be waited for, and never keeps us waiting.
                    await anyio.lowlevel.checkpoint()
                try:
                    return os.read(self._read_fd, READ_BYTES_MAX)
                except BlockingIOError:
                    continue
        except (OSError, anyio.ClosedResourceError):
            return b""

    async def write(self, line: bytes) -> None:
        """A whole line, or none: half a line would corrupt the next one. A reader that is gone is no error."""
        try:
            async with self._lock:
                while line:
                    try:
                        line = line[os.write(self._write_fd, line) :]
                    except BlockingIOError:
                        await anyio.wait_writable(self._write_fd)
        except (OSError, anyio.ClosedResourceError):
            return
