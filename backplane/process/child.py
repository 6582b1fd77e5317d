"""A program as a child of ours: its start, its two pipes, its end, and the steps that stop it.

This file handles descriptors and signals only, and does not know what the bytes mean.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Final

import anyio
import msgspec

from backplane.process.aio import beside, in_time
from backplane.process.guard import GROUP, SESSION, START, STATE, WORD_BYTES_MAX, ZOMBIE, descendants, look, look_at
from backplane.process.launch import NO_CAGE, READ_BYTES_MAX, START_S_MAX, Cage, StartCommand, refused, spawn_failed
from backplane.process.spawn import kill_group, spawn_guard
from backplane.redact.tail import LOOK_BYTES, NO_OUTPUT, OutputTail

LADDER_STEP_S: Final = 0.5
"""Seconds of the short step of `stop`; the contract's number."""

GUARD_ANSWER_S_MAX: Final = 1.5
"""Seconds for a guard to kill everything; milliseconds are usual. After that we kill what we find."""

SWEEP_S_MAX: Final = 2.0
"""Seconds to kill what a lost guard has left, and to reap the guard."""

LOOK_S: Final = 0.005
"""Seconds between two looks for what a lost guard has left."""

LAST_WORDS_S_MAX: Final = 0.2
"""Seconds to read the rest of an ended child's stderr; a process that escaped with it may keep it open."""

_REAP_S: Final = 0.0005
"""Seconds between two tries to reap a guard that is about to end."""

STDERR_BYTES_MAX: Final = 64 * 1024
"""Bytes that are kept of the end of a child's stderr; the contract's number."""


Ready = Callable[[], Awaitable[object]]
"""Returns when everything that a program needs is there."""


class Exit(msgspec.Struct, frozen=True):
    """The exit code or the signal that ended a child; both are None if unknown."""

    code: int | None = None
    signal: int | None = None

    def describe(self) -> str:
        """Return words such as "exit code 3" or "signal 11 (SIGSEGV)"."""
        if self.code is not None:
            return f"exit code {self.code}"
        if self.signal is None:
            return "unknown exit status"
        with suppress(ValueError):
            return f"signal {self.signal} ({signal.Signals(self.signal).name})"
        return f"signal {self.signal}"


class Child:
    """A running child: two pipes for its owner; the rest is handled here.

    `stdin` and `stdout` are descriptors of ours, close-on-exec and non-blocking; wait with `anyio.wait_writable`
    and `anyio.wait_readable`, then use `os.write` and `os.read`. They are -1 once closed. After `stop`, the output of
    the child can still be read until the block ends.

    Args:
        guard: the guard, or the wrapper around it.
        pipes: our ends of stdin, stdout and stderr.
        line: our end of the guard's socket.
        wrapped: the guard is in a namespace, so the numbers it reports are not ours.
    """

    def __init__(
        self,
        guard: subprocess.Popen[bytes],
        pipes: tuple[int, int, int],
        line: int,
        tail_bytes_max: int,
        *,
        wrapped: bool,
    ) -> None:
        self.stdin, self.stdout, self._stderr = pipes
        self.pid = guard.pid
        """The program's pid, the guard's until it reports the program's; in a namespace that of the wrapper."""
        self.exit: Exit | None = None
        """Exit of the program itself; its descendants may still be there."""
        self.stderr_dropped = 0
        self.swept = 0
        """Descendants that were killed at the end, without the program itself."""
        self.guard_lost = False
        """The guard did not end in order: processes that left session and parents may live."""
        self.fault: Exception | None = None
        """An unforeseen exception while the child was watched; then its exit may never be known."""
        self._on_exit: Callable[[], None] | None = None
        self._guard = guard
        self._wrapped = wrapped
        self._line = line
        self.start = 0
        """When process `pid` began, in clock ticks since the machine did; 0 until the guard reports the program."""
        self._tail_bytes_max = tail_bytes_max
        self._tail = bytearray()
        self._first_word = b""
        self._heard = anyio.Event()
        """The guard's first word, its end, or a fault."""
        self._exited, self._line_ended, self._stderr_ended, self._gone = (anyio.Event() for _ in range(4))
        self._sweep_reported = self._stopping = False
        self._step: anyio.CancelScope | None = None
        # Shielded, because the owner still needs them for `stop` after it was cancelled.
        self._noticing, self._draining = anyio.CancelScope(shield=True), anyio.CancelScope(shield=True)

    @property
    def stderr_tail(self) -> OutputTail:
        """The last bytes of its stderr; complete after `stop`."""
        if not self._tail:
            return NO_OUTPUT
        cut = max(0, len(self._tail) - self._tail_bytes_max)
        return OutputTail(bytes(self._tail[cut:]), bytes(self._tail[:cut]))

    async def arrived(self, timeout_s: float) -> bytes:
        """Wait for the guard's first word about the program; empty if none came in time, or the guard ended."""
        await in_time(self._heard.wait, timeout_s)
        return self._first_word

    async def release_when(self, ready: Callable[[], Awaitable[object]]) -> None:
        """Have the guard start a held child once `ready` returns; the end of the guard cancels `ready`."""
        with anyio.CancelScope() as self._step:
            if self.exit is None:
                await ready()
                self._command(b"go")
        self._step = None

    def close_stdin(self) -> None:
        """Close the child's stdin: it reads the end of its input."""
        fd, self.stdin = self.stdin, -1
        _close(fd)

    def close_stdout(self) -> None:
        """Close the child's stdout: its next write fails."""
        fd, self.stdout = self.stdout, -1
        _close(fd)

    def terminate(self) -> None:
        """Send SIGTERM to the child's process group, and SIGCONT in case it was stopped."""
        if self.exit is None:
            self._command(b"term")

    async def wait(self, timeout_s: float) -> Exit | None:
        """Wait until the program has ended, at most this long; None if it has not."""
        with anyio.move_on_after(timeout_s):
            await self._exited.wait()
        return self.exit

    async def stop(self, *, grace_s: float, cancel: Callable[[float], Awaitable[None]] | None = None) -> None:
        """End the child step by step; at the end nothing of it is alive.

        SIGKILL comes after grace + 0.5 s at most, and no step waits once the program has ended. Cancellation does not
        interrupt it; a second caller waits for the first one's steps.

        Args:
            cancel: sends the `cancel` message and returns when it was answered or its argument, the grace in
                seconds, has passed; None if the host does not know that message.
        """
        if self._stopping:
            if not self._gone.is_set():  # A caller that is cancelled gets no exception for a child that is gone.
                await self._gone.wait()
            return
        self._stopping = True
        with anyio.CancelScope(shield=True):
            try:
                if cancel is not None:
                    if self.exit is None:
                        with anyio.move_on_after(grace_s) as self._step:
                            await cancel(grace_s)
                    self.close_stdin()
                    self.terminate()
                    await self.wait(LADDER_STEP_S)
                else:
                    self.close_stdin()
                    await self.wait(LADDER_STEP_S)
                    self.terminate()
                    await self.wait(grace_s)
            finally:
                try:
                    await self._kill()
                finally:
                    # If the loop itself broke it off, the next caller begins again.
                    self._stopping = self._gone.is_set()

    async def leave(self) -> None:
        """Kill the rest of it and stop watching, also if the caller is cancelled."""
        with anyio.CancelScope(shield=True):
            if self._stopping:
                await self._gone.wait()
            else:
                self._stopping = True
                await self._kill()
        self._noticing.cancel()
        self._draining.cancel()

    def close(self) -> None:
        """Close all descriptors."""
        self.close_stdin()
        self.close_stdout()
        for fd in (self._stderr, self._line):
            _close(fd)

    async def _kill(self) -> None:
        """Kill everything, reap the guard, and read the rest of stderr."""
        self._command(b"kill")
        with anyio.move_on_after(GUARD_ANSWER_S_MAX):
            await self._line_ended.wait()
        if not self._sweep_reported:
            await self._kill_left()
        await self._reap()
        self.guard_lost = self._guard.returncode != 0
        with anyio.move_on_after(LAST_WORDS_S_MAX):
            await self._stderr_ended.wait()
        self._gone.set()

    async def _kill_left(self) -> None:
        """Kill what a lost guard has left; a process that left session and parents is not found."""
        killed: set[int] = set()
        end_s = time.monotonic() + SWEEP_S_MAX
        while (left := self._left()) and time.monotonic() < end_s:
            for pid, start in left.items():
                kill_exactly(pid, start)
            killed |= left.keys()
            await anyio.sleep(LOOK_S)
        self.swept += len(killed - {self.pid})

    def _left(self) -> dict[int, int]:
        """Return the processes below the guard and in the program's group or session: pid → start."""
        table = look()
        host, guard = table.get(self.pid), self._guard.pid
        roots = {guard} if self._guard.returncode is None else set()
        if host is None or host[START] == self.start:  # Otherwise another process has its number.
            roots |= {pid for pid, row in table.items() if self.pid in (pid, row[GROUP], row[SESSION])}
        found = (descendants(table, roots) & table.keys()) - {os.getpid(), guard}
        return {pid: table[pid][START] for pid in found if table[pid][STATE] != ZOMBIE}

    async def _reap(self) -> None:
        end_s = time.monotonic() + SWEEP_S_MAX
        while self._guard.poll() is None and time.monotonic() < end_s:
            if not self._sweep_reported:
                kill_group(self._guard)
            await anyio.sleep(_REAP_S)
        self._note_exit(Exit())

    def _command(self, word: bytes) -> None:
        """Send a word to the guard."""
        # SIGCONT, because the host may have stopped it; until it is reaped, its number is its own.
        if self._guard.returncode is None and not self._line_ended.is_set():
            with suppress(OSError):
                os.write(self._line, word)
                os.kill(self._guard.pid, signal.SIGCONT)

    async def notice_end(self) -> None:
        """Read the guard's words until `leave`."""
        await self._watch(self._line, self._take_word, self._noticing)

    async def drain_stderr(self) -> None:
        """Read the child's stderr until `leave`: a child whose stderr is full stands still."""
        await self._watch(self._stderr, self._take_stderr, self._draining)

    async def _watch(self, fd: int, take: Callable[[], bool], scope: anyio.CancelScope) -> None:
        """Call `take` when there is something to read, until it returns False; an exception is the child's `fault`."""
        with scope:
            try:
                await anyio.wait_readable(fd)
                while take():
                    await anyio.wait_readable(fd)
            except Exception as error:
                self.fault = self.fault or error
                self._heard.set()
                if self._on_exit is not None:
                    self._on_exit()

    def _take_word(self) -> bool:
        """Read a word of the guard; False at its end."""
        word = _chunk(self._line, WORD_BYTES_MAX)
        if word:
            with suppress(ValueError):  # A guard of ours writes no such word.
                self._hear(word)
        elif word is not None:
            self._line_ended.set()
            self._heard.set()
            self._note_exit(Exit())
        return word != b""

    def _take_stderr(self) -> bool:
        """Read a piece of stderr and keep the tail; False at its end."""
        chunk = _chunk(self._stderr, READ_BYTES_MAX)
        if chunk:
            self._tail += chunk
            excess = len(self._tail) - self._tail_bytes_max
            self.stderr_dropped += max(0, min(len(chunk), excess))
            if excess > LOOK_BYTES:
                del self._tail[: excess - LOOK_BYTES]
        elif chunk is not None:
            self._stderr_ended.set()
        return chunk != b""

    def _hear(self, word: bytes) -> None:
        what, *numbers = word.split()
        if what == b"pid":
            if not self._wrapped:
                self.pid, self.start = map(int, numbers)
            else:  # Not before: while a process loads its program, a read of its row blocks for some ms.
                self.start = start_of(self.pid)
        elif what == b"swept":
            self.swept, self._sweep_reported = int(numbers[0]), True
        elif what == b"spawn_error":
            self._sweep_reported = True
        else:
            self._note_exit(Exit(code=int(numbers[0])) if what == b"exit" else Exit(signal=int(numbers[0])))
        self._first_word = self._first_word or word
        self._heard.set()

    def _note_exit(self, how: Exit) -> None:
        if self.exit is None:
            self.exit = how
            if self._step is not None:
                self._step.cancel()
            self._exited.set()
            if self._on_exit is not None:
                self._on_exit()

    def call_on_exit(self, call: Callable[[], None]) -> None:
        """Set the function that is called once the exit is known or `fault` is set; call it now if that is so."""
        self._on_exit = call
        if self.exit is not None or self.fault is not None:
            call()


def start_of(pid: int) -> int:
    """Return when a process began, in clock ticks since the machine did; 0 if it is gone."""
    row = look_at(pid)
    return row[START] if row else 0


def kill_exactly(pid: int, start: int) -> None:
    """Kill a process, unless another one has its number by now."""
    if start_of(pid) == start:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _chunk(fd: int, bytes_max: int) -> bytes | None:
    """Return the available bytes: none at the end, None if there are none yet."""
    try:
        return os.read(fd, bytes_max)
    except BlockingIOError:
        return None
    except OSError:  # The guard was killed before it read a word of ours.
        return b""


def _close(fd: int) -> None:
    if fd >= 0:
        anyio.notify_closing(fd)
        os.close(fd)


@asynccontextmanager
async def open_child(
    command: StartCommand,
    *,
    stderr_bytes_max: int = STDERR_BYTES_MAX,
    pass_fds: tuple[int, ...] = (),
    cage: Cage = NO_CAGE,
    ready: Ready | None = None,
) -> AsyncIterator[Child]:
    """Start a child behind a guard; when the block ends, for whatever reason, nothing of it is alive.

    Enter it in the main thread. To leave the block without `stop` kills at once.

    Args:
        stderr_bytes_max: bytes that are kept of the end of its stderr.
        pass_fds: inherited by the child under the same numbers.
        cage: the sandbox around the child, made by the guard.
        ready: awaited while the guard starts, before the program itself does; its exception comes out here.

    Raises:
        BackendError: `sidecar_spawn_failed`, with the errno's name.
    """
    child = _launch(command, msgspec.structs.replace(cage, held=ready is not None), pass_fds, stderr_bytes_max)
    try:
        async with beside(child.notice_end, child.drain_stderr):
            try:
                if ready is not None:
                    await child.release_when(ready)
                await _arrive(child, command)
                yield child
            finally:
                await child.leave()
    finally:
        child.close()


async def _arrive(child: Child, command: StartCommand) -> None:
    """Wait until the program itself was started. Raises as `open_child`."""
    word = await child.arrived(START_S_MAX)
    if child.fault is not None:
        raise child.fault
    if word.startswith(b"spawn_error "):
        where, number = word.split()[1:]
        raise refused(command, where, int(number))
    if not word:
        await child.stop(grace_s=0)
        fault = refused(command, b"exec", errno.ECHILD)
        fault.hint = "its guard did not start, which needs Linux 5.3 or newer; see the evidence"
        fault.evidence = child.stderr_tail.decode("utf-8", "replace")
        raise fault


def _launch(command: StartCommand, cage: Cage, pass_fds: tuple[int, ...], stderr_bytes_max: int) -> Child:
    """Start a guard that starts the program. Blocks for some ms; raises as `open_child`."""
    if not command.argv:
        raise refused(command, b"exec", errno.EINVAL)
    try:
        with ExitStack() as theirs, ExitStack() as ours:
            stdin, stdin_ours = _pipe(theirs, ours)
            stdout_ours, stdout = _pipe(ours, theirs)
            stderr_ours, stderr = _pipe(ours, theirs)
            line, line_theirs = (end.detach() for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            ours.callback(os.close, line)
            theirs.callback(os.close, line_theirs)
            guard = spawn_guard(line_theirs, command, (stdin, stdout, stderr), pass_fds, cage)
            ours.pop_all()
    except OSError as fault:
        raise spawn_failed(command, fault) from fault
    for fd in (stdin_ours, stdout_ours, stderr_ours, line):
        os.set_blocking(fd, False)
    pipes = (stdin_ours, stdout_ours, stderr_ours)
    return Child(guard, pipes, line, stderr_bytes_max, wrapped=bool(cage.wrapper))


def _pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    read_end, write_end = os.pipe()
    reader.callback(os.close, read_end)
    writer.callback(os.close, write_end)
    return read_end, write_end
