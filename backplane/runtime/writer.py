"""Writes lines to a child: straight into its pipe, and by a task only where the child does not read.

Lines go in whole and in order; a child that reads nothing for too long is reported, not waited for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import anyio

from backplane.process.aio import in_time
from backplane.runtime.backends import Link

BACKLOG_LINES_MAX: Final = 256
"""Answers that wait for a child to read: more than it can have asked for and care about."""

WRITE_S: Final = 30.0
"""Seconds for a child to read what we write: only one that hangs leaves a pipe full that long."""


class LineWriter:
    """The writing side of a link.

    Args:
        start_soon: starts a task, as a task group's own does.
        on_stuck: called once if the child reads nothing for `WRITE_S`, or if more than `BACKLOG_LINES_MAX` wait.
        on_closed: called if a line finds no reader any more.
    """

    def __init__(
        self,
        link: Link,
        start_soon: Callable[..., object],
        *,
        on_stuck: Callable[[], None],
        on_closed: Callable[[], None],
    ) -> None:
        self.written = 0
        """Lines that went out whole."""
        self.unwritten = 0
        """Lines that found no reader any more; the child's own output says how it ends."""
        self._link = link
        self._start_soon = start_soon
        self._on_stuck = on_stuck
        self._on_closed = on_closed
        self._backlog: list[bytes] = []
        """Lines to write; the first may be the rest of one that was begun."""
        self._writing = False

    def write(self, line: bytes) -> None:
        """Write one line, or as much as the pipe takes now; the rest follows by itself."""
        if self._link.stdin < 0:
            self._lost(1)
            return
        if not self._backlog:
            try:
                line = line[os.write(self._link.stdin, line) :]
            except BlockingIOError:
                pass
            except OSError:
                self._lost(1)
                return
        if not line:
            self.written += 1
        elif len(self._backlog) >= BACKLOG_LINES_MAX:
            self._lost(1)
            self._on_stuck()
        else:
            self._backlog.append(line)
            if not self._writing:
                self._writing = True
                self._start_soon(self._write_backlog)

    def _lost(self, lines: int) -> None:
        self.unwritten += lines
        self._on_closed()

    async def _write_backlog(self) -> None:
        stuck = False
        try:
            while self._backlog and not stuck:
                stuck = not await in_time(lambda: anyio.wait_writable(self._link.stdin), WRITE_S)
                if not stuck:
                    line = self._backlog[0]
                    self._backlog[0] = line[os.write(self._link.stdin, line) :]
                if not self._backlog[0]:
                    del self._backlog[0]
                    self.written += 1
        except (OSError, ValueError, anyio.ClosedResourceError):
            lost = len(self._backlog)
            self._backlog.clear()
            self._lost(lost)
        finally:
            self._writing = False
        if stuck:
            self._on_stuck()
