"""Exchanges messages with the host of a run, measures the host's silence, and stops the host."""

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
from backplane.process.aio import SECOND_LOOK_S, Flag, PipeReader, in_time
from backplane.process.launch import READ_BYTES_MAX
from backplane.protocol.control import ControlEnd, Sent
from backplane.runtime.backends import Backend, Link, ProcessBackend
from backplane.runtime.ending import RunEnding

EXIT_WAIT_S: Final = 1.0
"""Time limit between the end of a host's output and the host's exit, in either order."""

WRITE_S: Final = 30.0
"""Time limit for a host to read from a full pipe; only a host that hangs takes that long."""

BACKLOG_LINES_MAX: Final = 256
"""Limit of lines that wait until the host reads; a further line ends the run."""


class HostChannel:
    """The open connection of one run to its host.

    Attributes:
        gone: set once the host has been stopped.

    Args:
        line: decodes and encodes the messages.
        start_soon: starts a task that belongs to the run.
    """

    def __init__(
        self,
        link: Link,
        line: ControlEnd,
        backend: Backend,
        ending: RunEnding,
        start_soon: Callable[..., object],
    ) -> None:
        self.link = link
        self.line = line
        self.start_soon = start_soon
        self.gone = Flag()
        self._backend_id = backend.id
        self._is_ours = isinstance(backend, ProcessBackend) and backend.is_ours
        self._ending = ending
        self._exited: float | None = None
        """Monotonic time at which the exit of the host was seen; None before."""
        self._reader = PipeReader(link.stdout, READ_BYTES_MAX)
        self._since = time.monotonic()
        """Monotonic time at which the host's silence began."""
        self._second_look = math.inf
        """Monotonic time at which a silence over the limit ends the run; infinite while there is none."""
        self.backlog: list[bytes] = []
        """Lines that wait until the host reads; the first may be the rest of a line that is partly written."""
        self.unwritten = 0
        """Number of lines that could not be written because the host does not read them."""
        self._has_read = self._writing = False
        link.call_on_exit(self._note_exit)

    # Output of the host.

    def progressed(self) -> None:
        """Restart the clock of the host's silence."""
        self._since, self._second_look = time.monotonic(), math.inf
        self.wake()

    def excuse(self, seconds: float) -> None:
        """Do not count time in which this process did not read as silence of the host."""
        self._since = min(self._since + seconds, time.monotonic())

    def wake(self) -> None:
        """Make a waiting `receive` check for output, exit and limits again."""
        self._reader.wake()

    def close(self) -> None:
        """Stop waiting for output, so that the link can be closed."""
        self._reader.close()

    def read(self) -> bytes | None:
        """Read the host's output without a wait; return no bytes at its end, and None if there is none yet."""
        data = self._reader.read()
        return b"" if data is None and self.gone.is_set() else data

    async def receive(self, limit_s: Callable[[], float], pause_s: float = math.inf) -> bytes | None:
        """Wait for output of the host; return no bytes at its end, or `EXIT_WAIT_S` after the host's exit.

        A silence counts as too long only after a second read: if this process was suspended, or waited for its disk,
        its timers expire before it has read. If the first read was late, the second one comes as much later, because
        the host may have been suspended, too.

        Args:
            limit_s: returns the present limit of the host's silence; infinite for none.
            pause_s: time limit of the wait for output.

        Returns:
            The output; None if there was none within `pause_s`.

        Raises:
            TimeoutError: the host's silence is longer than `limit_s`.
        """
        # The run's reader goes first, and a host that never stops writing must not block the event loop.
        await anyio.lowlevel.checkpoint()
        began = due = time.monotonic()
        while True:
            now = time.monotonic()
            left_s = limit_s() - (now - self._since)
            if left_s <= 0 and now >= self._second_look:
                raise TimeoutError
            if (data := self.read()) is not None:
                if left_s <= 0:
                    self._second_look = min(self._second_look, now + SECOND_LOOK_S)
                return data
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
            await self._reader.wait(left_s)

    def _note_exit(self) -> None:
        self._exited = self._exited or time.monotonic()
        self.wake()

    # Input of the host.

    def send(self, message: Sent) -> None:
        """Send a message, in a task if the pipe is full. Raises as `ControlEnd.send`."""
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
        """Count lines that could not be written; end the run if the order is one of them."""
        self.unwritten += lines
        if not self._has_read and not self._ending.is_decided:
            self.start_soon(self._order_not_taken)

    async def _order_not_taken(self) -> None:
        # If the host exits or says why it fails, the run ends for that reason and not for the broken pipe.
        with anyio.move_on_after(EXIT_WAIT_S):
            await self._ending.over.wait()
        text = f"{self._backend_id!r} closed its input before it had taken the order"
        hint = "a host reads its standard input to the end"
        self._ending.decide("protocol", BackendError("stream_closed", text, hint=hint))

    # Stop of the host.

    async def stop(self, run_id: str, grace_s: float, reason: str, gone: Callable[[], None]) -> None:
        """Stop the host in steps; the first is a `cancel` message if the host announced `cancel/1`.

        Args:
            gone: called once the host is stopped.
        """
        ending = self._ending

        async def cancel(grace_s: float) -> None:
            self.send(wire.Cancel(ref_id=run_id, reason=reason, grace_ms=int(grace_s * 1000)))
            await ending.over.wait()

        try:
            if ending.end is not None and ending.end.reason == "host_exit":
                await self.link.wait(EXIT_WAIT_S)
            can_cancel = "cancel/1" in self.line.extensions and ending.was_sent and not ending.over.is_set()
            # A shipped host does nothing after its `final`; the end of its Python would take some 8 ms.
            is_done = self._is_ours and ending.over.is_set() and ending.end is None
            await self.link.stop(grace_s=grace_s, cancel=cancel if can_cancel else None, is_done=is_done)
        finally:
            self.gone.set()
            self.wake()
            gone()
