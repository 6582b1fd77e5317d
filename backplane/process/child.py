"""Starts a program as a child process, watches it, and stops it step by step.

This module handles descriptors and signals only; its callers interpret the bytes.
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

from backplane.process.aio import Flag, beside, in_time
from backplane.process.guard import GROUP, SESSION, START, STATE, WORD_BYTES_MAX, ZOMBIE, descendants, look, look_at
from backplane.process.launch import NO_CAGE, READ_BYTES_MAX, START_S_MAX, Cage, StartCommand, refused, spawn_failed
from backplane.process.spawn import kill_group, spawn_guard
from backplane.redact.tail import LOOK_BYTES, NO_OUTPUT, OutputTail

LADDER_STEP_S: Final = 0.5
"""Seconds of the short step of `stop`; fixed by the contract."""

GUARD_ANSWER_S_MAX: Final = 1.5
"""Seconds for a guard to kill everything, usually within milliseconds; then we kill the processes that we find."""

SWEEP_S_MAX: Final = 2.0
"""Seconds to kill the processes that a lost guard left behind, and as many to reap the guard."""

LOOK_S: Final = 0.005
"""Seconds between two searches for processes that a lost guard left behind."""

LAST_WORDS_S_MAX: Final = 0.2
"""Seconds to read the rest of an ended child's stderr, which an escaped process may keep open."""

_REAP_S: Final = 0.0005
"""Seconds between two tries to reap a guard that is about to end."""

STDERR_BYTES_MAX: Final = 64 * 1024
"""Number of bytes kept from the end of a child's stderr; fixed by the contract."""


Ready = Callable[[], Awaitable[object]]
"""Returns once everything that a program needs is ready."""


class Exit(msgspec.Struct, frozen=True):
    """The exit code or the signal that ended a child; an unknown exit has neither."""

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
    """A running child process, with pipes to its stdin and stdout.

    `stdin` and `stdout` are our ends of the pipes, close-on-exec and non-blocking: wait with `anyio.wait_writable`
    and `anyio.wait_readable`, then use `os.write` and `os.read`. They are -1 once closed. After `stop`, the child's
    output can still be read until the block ends.

    Args:
        guard: the process of the guard, or of the wrapper around it.
        pipes: our ends of stdin, stdout and stderr.
        line: our end of the guard's socket.
        wrapped: True if the guard runs in a pid namespace and so reports pids other than ours.
    """

    def __init__(
        self,
        guard: subprocess.Popen[bytes],
        pipes: tuple[int, int, int],
        line: int,
        *,
        wrapped: bool,
    ) -> None:
        self.stdin, self.stdout, self._stderr = pipes
        self.pid = guard.pid
        """The wrapper's pid if there is one; otherwise the program's, or the guard's until it reports the program."""
        self.exit: Exit | None = None
        """The program's own exit, None until known; descendants may still run."""
        self.stderr_dropped = 0
        self.swept = 0
        """Number of descendants killed at the end, the program itself excluded."""
        self.guard_lost = False
        """True if the guard failed: processes that left their session and parents may still run."""
        self.fault: Exception | None = None
        """An unexpected exception while we watched the child, whose exit may then stay unknown."""
        self._on_exit: Callable[[], None] | None = None
        self._guard = guard
        self._wrapped = wrapped
        self._line = line
        self.start = 0
        """Start time of process `pid` in clock ticks since boot; 0 until the guard reports the program."""
        self._tail = bytearray()
        self._first_word = b""
        self._heard = Flag()
        """Set at the guard's first message, at its end, or on a fault."""
        self._exited, self._line_ended, self._stderr_ended, self._gone = (Flag() for _ in range(4))
        self._sweep_reported = self._stopping = False
        self._step: anyio.CancelScope | None = None
        # Shielded, because a cancelled owner still needs both tasks for `stop`.
        self._noticing, self._draining = anyio.CancelScope(shield=True), anyio.CancelScope(shield=True)

    @property
    def stderr_tail(self) -> OutputTail:
        """The last bytes of the child's stderr; complete after `stop`."""
        if not self._tail:
            return NO_OUTPUT
        cut = max(0, len(self._tail) - STDERR_BYTES_MAX)
        return OutputTail(bytes(self._tail[cut:]), bytes(self._tail[:cut]))

    async def arrive(self, command: StartCommand) -> None:
        """Wait until the program itself has started. Raises as `open_child`."""
        await in_time(self._heard.wait, START_S_MAX)
        word = self._first_word
        if self.fault is not None:
            raise self.fault
        if word.startswith(b"spawn_error "):
            where, number = word.split()[1:]
            raise refused(command, where, int(number))
        if not word:
            await self.stop(grace_s=0)
            fault = refused(command, b"exec", errno.ECHILD)
            fault.hint = "its guard did not start, which needs Linux 5.3 or newer; see the evidence"
            fault.evidence = self.stderr_tail.decode("utf-8", "replace")
            raise fault

    async def release_when(self, ready: Callable[[], Awaitable[object]]) -> None:
        """Have the guard start the program once `ready` returns; if the guard ends first, cancel `ready`."""
        with anyio.CancelScope() as self._step:
            if self.exit is None:
                await ready()
                self._command(b"go")
        self._step = None

    def close_stdin(self) -> None:
        """Close our end of the child's stdin, so that it reads the end of its input."""
        fd, self.stdin = self.stdin, -1
        _close(fd)

    def close_stdout(self) -> None:
        """Close our end of the child's stdout, so that its next write fails."""
        fd, self.stdout = self.stdout, -1
        _close(fd)

    def terminate(self) -> None:
        """Send SIGTERM to the child's process group, and SIGCONT in case it was stopped."""
        if self.exit is None:
            self._command(b"term")

    async def wait(self, timeout_s: float) -> Exit | None:
        """Wait up to `timeout_s` for the program's exit and return it; None if the program still runs."""
        with anyio.move_on_after(timeout_s):
            await self._exited.wait()
        return self.exit

    async def stop(
        self, *, grace_s: float, cancel: Callable[[float], Awaitable[None]] | None = None, is_done: bool = False
    ) -> None:
        """Stop the child step by step, and finally kill all its processes.

        SIGKILL follows after at most `grace_s` + 0.5 s; once the program has ended, no step waits. Cancellation does
        not interrupt the steps; a second caller waits for those of the first.

        Args:
            cancel: sends the `cancel` message, and returns on its answer or after its argument, the grace in
                seconds; None if the host does not support that message.
            is_done: True if the program has nothing left to do, and so is killed at once.
        """
        if self._stopping:
            if not self._gone.is_set():  # If the child is gone, a cancelled caller gets no exception.
                await self._gone.wait()
            return
        self._stopping = True
        with anyio.CancelScope(shield=True):
            try:
                if is_done:
                    self.close_stdin()
                elif cancel is not None:
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
                    # If the loop interrupted these steps, the next caller starts them over.
                    self._stopping = self._gone.is_set()

    async def leave(self) -> None:
        """Kill the child's remaining processes and stop watching it, even if the caller is cancelled."""
        with anyio.CancelScope(shield=True):
            if self._stopping:
                await self._gone.wait()
            else:
                self._stopping = True
                await self._kill()
        self._noticing.cancel()
        self._draining.cancel()

    def close(self) -> None:
        """Close all our descriptors."""
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
        """Kill the processes that a lost guard left behind, except any that left their session and parents."""
        killed: set[int] = set()
        end_s = time.monotonic() + SWEEP_S_MAX
        while (left := self._left()) and time.monotonic() < end_s:
            for pid, start in left.items():
                kill_exactly(pid, start)
            killed |= left.keys()
            await anyio.sleep(LOOK_S)
        self.swept += len(killed - {self.pid})

    def _left(self) -> dict[int, int]:
        """Return the live descendants of the guard and of the program's group and session: pid → start time."""
        table = look()
        host, guard = table.get(self.pid), self._guard.pid
        roots = {guard} if self._guard.returncode is None else set()
        if host is None or host[START] == self.start:  # Otherwise another process now has that pid.
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
        """Send a command to the guard."""
        # The host may have stopped the guard, so send SIGCONT; an unreaped guard keeps its pid.
        if self._guard.returncode is None and not self._line_ended.is_set():
            with suppress(OSError):
                os.write(self._line, word)
                os.kill(self._guard.pid, signal.SIGCONT)

    async def notice_end(self) -> None:
        """Read the guard's messages until `leave` is called."""
        await self._watch(self._line, self._take_word, self._noticing)

    async def drain_stderr(self) -> None:
        """Read the child's stderr until `leave` is called, because a full pipe would block the child."""
        await self._watch(self._stderr, self._take_stderr, self._draining)

    async def _watch(self, fd: int, take: Callable[[], bool], scope: anyio.CancelScope) -> None:
        """Call `take` whenever `fd` is readable, until it returns False; an exception becomes the child's `fault`."""
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
        """Read a message of the guard; return False at the end of its socket."""
        word = _chunk(self._line, WORD_BYTES_MAX)
        if word:
            with suppress(ValueError):  # Not from our guard, so it is ignored.
                self._hear(word)
        elif word is not None:
            self._line_ended.set()
            self._heard.set()
            self._note_exit(Exit())
        return word != b""

    def _take_stderr(self) -> bool:
        """Read a piece of stderr and keep its tail; return False at its end."""
        chunk = _chunk(self._stderr, READ_BYTES_MAX)
        if chunk:
            self._tail += chunk
            excess = len(self._tail) - STDERR_BYTES_MAX
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
            else:  # Only now: reading the row of a process that loads its program blocks for some ms.
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
        """Set the function to call once the exit is known or `fault` is set; call it now if either is."""
        self._on_exit = call
        if self.exit is not None or self.fault is not None:
            call()


def start_of(pid: int) -> int:
    """Return a process's start time in clock ticks since boot; 0 if it is gone."""
    row = look_at(pid)
    return row[START] if row else 0


def kill_exactly(pid: int, start: int) -> None:
    """Kill the process with this pid and start time, if it still exists."""
    if start_of(pid) == start:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _chunk(fd: int, bytes_max: int) -> bytes | None:
    """Return the available bytes; empty at the end, None if nothing has arrived."""
    try:
        return os.read(fd, bytes_max)
    except BlockingIOError:
        return None
    except OSError:  # The guard was killed before it read our command.
        return b""


def _close(fd: int) -> None:
    if fd >= 0:
        anyio.notify_closing(fd)
        os.close(fd)


@asynccontextmanager
async def open_child(
    command: StartCommand,
    *,
    cage: Cage = NO_CAGE,
    ready: Ready | None = None,
) -> AsyncIterator[Child]:
    """Start a child under a guard; when the block ends, for any reason, all its processes are killed.

    Enter the block in the main thread. Leaving it without `stop` kills the child at once.

    Args:
        cage: the sandbox that the guard makes around the child.
        ready: awaited while the guard starts; the program starts after this. Its exception is raised here.

    Raises:
        BackendError: `sidecar_spawn_failed`, with the errno's name.
    """
    child = _launch(command, msgspec.structs.replace(cage, held=ready is not None))
    try:
        async with beside(child.notice_end, child.drain_stderr):
            try:
                if ready is not None:
                    await child.release_when(ready)
                await child.arrive(command)
                yield child
            finally:
                await child.leave()
    finally:
        child.close()


def _launch(command: StartCommand, cage: Cage) -> Child:
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
            guard = spawn_guard(line_theirs, command, (stdin, stdout, stderr), cage)
            ours.pop_all()
    except OSError as fault:
        raise spawn_failed(command, fault) from fault
    for fd in (stdin_ours, stdout_ours, stderr_ours, line):
        os.set_blocking(fd, False)
    return Child(guard, (stdin_ours, stdout_ours, stderr_ours), line, wrapped=bool(cage.wrapper))


def _pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    read_end, write_end = os.pipe()
    reader.callback(os.close, read_end)
    writer.callback(os.close, write_end)
    return read_end, write_end
