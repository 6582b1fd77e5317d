"""One host while a run talks with it: messages in and out, how long it has been silent, and how it is stopped."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Final

import anyio
import anyio.lowlevel

from backplane.contract import envelope as wire
from backplane.errors import BackendError
from backplane.process.aio import SECOND_LOOK_S, Readable, in_time
from backplane.process.launch import READ_BYTES_MAX
from backplane.protocol.control import ControlEnd, Sent
from backplane.runtime.backends import Link
from backplane.runtime.ending import RunEnding

EXIT_WAIT_S: Final = 1.0
"""Seconds that a host may take to exit after its output has ended, or its output to end after its exit."""

WRITE_S: Final = 30.0
"""Seconds for a host to read what we write: only one that hangs leaves a pipe full that long."""

BACKLOG_LINES_MAX: Final = 256
"""Lines that wait for a host to read; more than it can have asked for."""


class HostChannel:
    """An open link to the host of one run.

    Attributes:
        gone: set once the stop ladder has ended and nothing of the host is alive.

    Args:
        line: reads and writes the messages.
        start_soon: starts a task of the run.
    """

    def __init__(
        self,
        link: Link,
        line: ControlEnd,
        backend_id: str,
        ending: RunEnding,
        start_soon: Callable[..., object],
    ) -> None:
        self.link = link
        self.line = line
        self.start_soon = start_soon
        self.gone = anyio.Event()
        self._backend_id = backend_id
        self._ending = ending
        self._exited: float | None = None
        """When the end of its process was seen, by a monotonic clock."""
        self._readable = Readable(link.stdout)
        self._since = time.monotonic()
        """When its silence began, by a monotonic clock."""
        self._second_look = math.inf
        """When a silence over the limit ends the run, by a monotonic clock; infinite while there is none."""
        self._has_more = False
        """True if the last read did not have to wait."""
        self.backlog: list[bytes] = []
        """Lines that wait for the host to read; the first may be the rest of one that was begun."""
        self.unwritten = 0
        """Lines that found no reader any more; the host's output says how it ends."""
        self._has_read = self._writing = False
        link.call_on_exit(self._note_exit)

    # What it says.

    def progressed(self) -> None:
        """Begin to count its silence anew."""
        self._since, self._second_look = time.monotonic(), math.inf
        self.wake()

    def excuse(self, seconds: float) -> None:
        """Do not count this time, in which it was not read, as its silence."""
        self._since = min(self._since + seconds, time.monotonic())

    def wake(self) -> None:
        """End the wait of `receive`, which then looks again."""
        self._readable.wake()

    def close(self) -> None:
        """Wait for nothing more; the link can be closed after it."""
        self._readable.close()

    def read(self) -> bytes | None:
        """Return what its output has now, nothing at its end; None if it has nothing yet."""
        try:
            return os.read(self.link.stdout, READ_BYTES_MAX)
        except BlockingIOError:
            return b"" if self.gone.is_set() else None

    async def receive(self, limit_s: Callable[[], float], pause_s: float = math.inf) -> bytes | None:
        """Wait for its output; nothing at the end of that, or `EXIT_WAIT_S` after its exit.

        After a deadline it looks once more: if this process was stopped, or waited for its disk, its timers run out
        before it has read. If it was late for the first look, the host has as long again, as it may have been stopped,
        too.

        Args:
            limit_s: most seconds of silence now; infinite while it is not the host's turn.
            pause_s: most seconds to wait for output.

        Returns:
            None if there was none within `pause_s`.

        Raises:
            TimeoutError: the silence is longer than `limit_s`.
        """
        if self._has_more:
            await anyio.lowlevel.checkpoint()  # A host that never stops writing must not stop the loop.
        began = due = time.monotonic()
        self._has_more = True
        while True:
            now = time.monotonic()
            left_s = limit_s() - (now - self._since)
            if left_s <= 0 and now >= self._second_look:
                raise TimeoutError
            if (data := self.read()) is not None:
                if left_s <= 0:
                    self._second_look = min(self._second_look, now + SECOND_LOOK_S)
                return data
            self._has_more = False
            if self.link.fault is not None:
                raise self.link.fault
            if self._exited is not None and now - max(self._exited, began) > EXIT_WAIT_S:
                return b""
            if left_s <= 0:
                left_s = max(SECOND_LOOK_S, now - due)
                self._second_look = min(self._second_look, now + left_s)
            if self._exited is not None:
                left_s = min(left_s, EXIT_WAIT_S)
            if now - began >= pause_s:
                return None
            left_s = min(left_s, began + pause_s - now)
            due = now + left_s
            await self._readable.wait(left_s)

    def _note_exit(self) -> None:
        self._exited = self._exited or time.monotonic()
        self.wake()

    # What it is sent.

    def send(self, message: Sent) -> None:
        """Send a message, by a task if the host does not read. Raises ProtocolError, CapabilityError, as the line."""
        self.write(self.line.send(message))

    def write(self, line: bytes) -> None:
        """Write one line, or as much as the pipe takes now; a task writes the rest."""
        if self.link.stdin < 0:
            self._lose(1)
            return
        if not self.backlog:
            try:
                line = line[os.write(self.link.stdin, line) :]
            except BlockingIOError:
                pass
            except OSError:
                self._lose(1)
                return
        if not line:
            self._has_read = True
        elif len(self.backlog) >= BACKLOG_LINES_MAX:
            self._lose(1)
            self._give_up()
        else:
            self.backlog.append(line)
            if not self._writing:
                self._writing = True
                self.start_soon(self._write_backlog)

    async def _write_backlog(self) -> None:
        try:
            while self.backlog:
                if not await in_time(lambda: anyio.wait_writable(self.link.stdin), WRITE_S):
                    self._give_up()
                    return
                line = self.backlog[0]
                self.backlog[0] = line[os.write(self.link.stdin, line) :]
                if not self.backlog[0]:
                    del self.backlog[0]
                    self._has_read = True
        except (OSError, ValueError, anyio.ClosedResourceError):
            lost = len(self.backlog)
            self.backlog.clear()
            self._lose(lost)
        finally:
            self._writing = False

    def _give_up(self) -> None:
        text = f"{self._backend_id!r} did not read its input for {WRITE_S:g} s"
        self._ending.decide("idle", BackendError("backend_timeout", text))

    def _lose(self, lines: int) -> None:
        """Count lines that found no reader; if the order is one of them, there will be no result."""
        self.unwritten += lines
        if not self._has_read and not self._ending.is_decided:
            self.start_soon(self._order_not_taken)

    async def _order_not_taken(self) -> None:
        # A host that has ended, or says why it ends, ends the run by that and not by the broken pipe.
        with anyio.move_on_after(EXIT_WAIT_S):
            await self._ending.over.wait()
        text = f"{self._backend_id!r} closed its input before it had taken the order"
        hint = "a host reads its standard input to the end"
        self._ending.decide("protocol", BackendError("stream_closed", text, hint=hint))

    # How it is stopped.

    async def stop(self, run_id: str, grace_s: float, reason: str) -> None:
        """Walk down the stop ladder, which begins with a `cancel` message for a host that knows it."""
        ending = self._ending

        async def cancel(grace_s: float) -> None:
            self.send(wire.Cancel(ref_id=run_id, reason=reason, grace_ms=int(grace_s * 1000)))
            await ending.over.wait()

        try:
            if ending.end is not None and ending.end.reason == "host_exit":
                await self.link.wait(EXIT_WAIT_S)
            asks_first = "cancel/1" in self.line.extensions and ending.was_sent and not ending.over.is_set()
            await self.link.stop(grace_s=grace_s, cancel=cancel if asks_first else None)
        finally:
            self.gone.set()
            self.wake()
