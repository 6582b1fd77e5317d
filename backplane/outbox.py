"""What is said to a child: straight into its pipe, a task only where it does not read.

Lines go in, in order; a child that reads nothing for too long is reported, not waited for.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

import anyio
import anyio.abc

from backplane.backends import Link


class Outbox:
    """The writing side of a link.

    Args:
        write_s: how long a child may leave its input unread.
        on_stuck: told once when it did.
    """

    def __init__(self, link: Link, tasks: anyio.abc.TaskGroup, *, write_s: float, on_stuck: Callable[[], None]) -> None:
        self.unwritten = 0
        """Lines that found no reader any more; the child's own output says how it ends."""
        self._link = link
        self._tasks = tasks
        self._write_s = write_s
        self._on_stuck = on_stuck
        self._backlog: deque[bytes] = deque()
        self._writing = False

    def write(self, line: bytes) -> None:
        """Write one line, or as much as the pipe takes now; the rest follows by itself."""
        if self._link.stdin < 0:
            self.unwritten += 1
            return
        if not self._writing:
            try:
                line = line[os.write(self._link.stdin, line) :]
            except BlockingIOError:
                pass
            except OSError:
                self.unwritten += 1
                return
        if line:
            self._backlog.append(line)
            if not self._writing:
                self._writing = True
                self._tasks.start_soon(self._write_backlog)

    async def _write_backlog(self) -> None:
        with anyio.move_on_after(self._write_s) as waiting:
            try:
                while self._backlog:
                    line = self._backlog.popleft()
                    while line:
                        await anyio.wait_writable(self._link.stdin)
                        line = line[os.write(self._link.stdin, line) :]
                        waiting.deadline = anyio.current_time() + self._write_s
            except (OSError, ValueError, anyio.ClosedResourceError):
                self.unwritten += 1 + len(self._backlog)
                self._backlog.clear()
            finally:
                self._writing = False
        if waiting.cancelled_caught:
            self._on_stuck()
