"""A program as a child of ours, from its start to the last of it: its two pipes, its end, the one ladder to that.

Descriptors and signals only; what the bytes mean is not known here.
"""

from __future__ import annotations

import errno
import functools
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
from backplane.process.guard import WORD_BYTES_MAX
from backplane.process.launch import (
    GUARD_WORKS,
    NO_CAGE,
    READ_BYTES_MAX,
    START_S_MAX,
    Cage,
    StartCommand,
    refusal,
    refused,
    spawn_failed,
)
from backplane.process.spawn import has_ended, kill_group, pidfd_of, spawn, spawn_guard, tie
from backplane.process.sweep import Traces, far_end, kill_exactly, remains, start_of
from backplane.redact.tail import LOOK_BYTES, NO_OUTPUT, OutputTail

LADDER_STEP_S: Final = 0.5
"""The ladder's short step; the contract's number."""

GUARD_ANSWER_S_MAX: Final = 1.5
"""For a guard to kill everything; milliseconds are usual. Past it we do its work ourselves."""

SWEEP_S_MAX: Final = 2.0
"""For killing by the process table, when there is no guard or it was lost."""

EMPTY_LOOKS: Final = 3
"""Looks at the process table in a row that must find nobody, after one that found somebody."""

LOOK_S: Final = 0.005
"""Between two such looks, and between two questions whether a child has ended where nothing reports it."""

LAST_WORDS_S_MAX: Final = 0.2
"""For reading what is left in the stderr of a child that is gone; longer only if somebody escaped with it."""

_REAP_S: Final = 0.0005
"""Between two tries to reap a child whose end is certain."""

STDERR_BYTES_MAX: Final = 64 * 1024
"""Kept of a child's stderr, its end; the contract's number."""


Ready = Callable[[], Awaitable[object]]
"""Comes back when what a program needs is there."""


class Exit(msgspec.Struct, frozen=True):
    """How a child ended; both None when nobody could learn it."""

    code: int | None = None
    signal: int | None = None

    def describe(self) -> str:
        """Say it in words: "exit code 3", "signal 11 (SIGSEGV)"."""
        if self.code is not None:
            return f"exit code {self.code}"
        if self.signal is None:
            return "unknown exit status"
        with suppress(ValueError):
            return f"signal {self.signal} ({signal.Signals(self.signal).name})"
        return f"signal {self.signal}"


class Child:
    """A running child: two pipes for its owner, everything else looked after here.

    `stdin` and `stdout` are descriptors of ours, close-on-exec and non-blocking; wait with `anyio.wait_writable`
    and `anyio.wait_readable`, then use `os.write` and `os.read`. They are -1 once closed. After `stop` what the
    child wrote can still be read, until the block is left.
    """

    def __init__(
        self,
        leader: subprocess.Popen[bytes],
        guarded: bool,
        pipes: tuple[int, int, int],
        line: int,
        tail_bytes_max: int,
        *,
        life: int = -1,
    ) -> None:
        self.stdin, self.stdout, self._stderr = pipes
        self.pid = leader.pid
        self.exit: Exit | None = None
        """How the program itself ended; those it started may still be there."""
        self.stderr_dropped = 0
        self.swept = 0
        """Descendants that had to be killed at the end, the program itself not counted."""
        self.guard_lost = False
        """The guard did not see it through, whatever was said in its name: who left session and parents may live."""
        self.fault: Exception | None = None
        """Raised while the child was watched, and foreseen by nobody: its exit may never be known then."""
        self._on_exit: Callable[[], None] | None = None
        self._leader = leader  # The guard, or the program where there is none.
        self._guarded = guarded
        self._life = life  # To the wrapper of a namespace, where what the guard calls by number has another one here.
        self._line = line  # The guard's socket, or the program's pidfd; -1 for neither.
        self.start = 0 if guarded and life < 0 else start_of(leader.pid)
        """When process `pid` began, in clock ticks since the machine did; 0 until the guard has said it."""
        self._tail_bytes_max = tail_bytes_max
        self._tail = bytearray()
        self._first_word = b""
        self._line_ended = self._stderr_ended = self._sweep_reported = self._stopping = self._gone = False
        self._waiting: list[tuple[Callable[[], bool], anyio.Event]] = []
        """What is waited for, and the event that says that it has come."""
        self._step: anyio.CancelScope | None = None
        # Shielded, as a cancelled owner still needs what is heard in them to walk down the ladder.
        self._noticing, self._draining = anyio.CancelScope(shield=True), anyio.CancelScope(shield=True)

    @property
    def stderr_tail(self) -> OutputTail:
        """The last bytes of its stderr; whole after `stop`."""
        if not self._tail:
            return NO_OUTPUT
        cut = max(0, len(self._tail) - self._tail_bytes_max)
        return OutputTail(bytes(self._tail[cut:]), bytes(self._tail[:cut]))

    async def arrived(self, timeout_s: float) -> bytes:
        """Wait for the guard's first word about the program; none in time, or from a guard that ended, is empty."""
        if not self._guarded:
            return b"pid"
        heard = functools.partial(
            self._until, lambda: bool(self._first_word) or self._line_ended or self.fault is not None
        )
        await in_time(heard, timeout_s)
        return self._first_word

    async def release_when(self, ready: Callable[[], Awaitable[object]]) -> None:
        """Have the guard of a child that is held start it, once this is ready; not waited for when the guard ends."""
        with anyio.CancelScope() as self._step:
            if self.exit is None:
                await ready()
                self._tell(b"go")
        self._step = None

    def close_stdin(self) -> None:
        """Tell the child that nothing more will come."""
        fd, self.stdin = self.stdin, -1
        _close(fd)

    def close_stdout(self) -> None:
        """Stop listening; the child's next write fails."""
        fd, self.stdout = self.stdout, -1
        _close(fd)

    def terminate(self) -> None:
        """Ask the child's process group to end, and wake it if it was stopped."""
        if self.exit is None and self._guarded:
            self._tell(b"term")
        elif self.exit is None:
            for number in (signal.SIGTERM, signal.SIGCONT):
                kill_group(self._leader, number)

    async def wait(self, timeout_s: float) -> Exit | None:
        """Wait until the program has ended, at most this long; None when it has not."""
        with anyio.move_on_after(timeout_s):
            await self._until(lambda: self.exit is not None)
        return self.exit

    async def stop(self, *, grace_s: float, cancel: Callable[[float], Awaitable[None]] | None = None) -> None:
        """Walk down the ladder; at its end nothing of the child is alive.

        Grace + 0.5 s to SIGKILL at most, and no step waits once the program has ended. Cancellation does not
        interrupt it; a second caller waits for the first one's ladder.

        Args:
            cancel: sends the `cancel` message and returns when it was answered or its argument, the grace in
                seconds, has passed; None where the host knows no such message.
        """
        if self._stopping:
            await self._until(lambda: self._gone)
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
                    # Broken off, as the loop itself is being ended: the next one begins anew.
                    self._stopping = self._gone

    async def leave(self) -> None:
        """Kill what is left of it and stop listening, whoever is cancelled."""
        with anyio.CancelScope(shield=True):
            if self._stopping:
                await self._until(lambda: self._gone)
            else:
                self._stopping = True
                await self._kill()
        self._noticing.cancel()
        self._draining.cancel()

    def close(self) -> None:
        """Close everything; nobody listens any more."""
        self.close_stdin()
        self.close_stdout()
        for fd in (self._stderr, self._line, self._life):
            _close(fd)

    async def _kill(self) -> None:
        """Kill all there is, reap our own child, and take the last words."""
        if self._guarded:
            self._tell(b"kill")
            with anyio.move_on_after(GUARD_ANSWER_S_MAX):
                await self._until(lambda: self._line_ended)
        if not self._sweep_reported:
            await self._sweep()
        await self._reap()
        self.guard_lost = self._guarded and self._leader.returncode != 0
        with anyio.move_on_after(LAST_WORDS_S_MAX):
            await self._until(lambda: self._stderr_ended)
        self._gone = True
        self._announce()

    async def _sweep(self) -> None:
        """Kill by the process table what a guard did not; less sure, as who left session and parents is not seen."""
        killed: set[int] = set()
        empty, end_s = 0, time.monotonic() + SWEEP_S_MAX
        while empty < EMPTY_LOOKS and time.monotonic() < end_s:
            found = remains(self._traces())
            if not self._guarded:
                kill_group(self._leader)
            for pid, start in found.items():
                kill_exactly(pid, start)
            killed |= found.keys()
            empty = 0 if found else empty + 1
            if not killed and not found:
                break
            await anyio.sleep(LOOK_S)
        self.swept += len(killed - {self.pid})

    def _traces(self) -> Traces:
        guard = self._leader.pid if self._guarded and self._leader.returncode is None else None
        ends = (far_end(fd) for fd in (self.stdin, self.stdout, self._stderr) if fd >= 0)
        start = self.start or start_of(self.pid)  # Not reaped yet, so its number is its own.
        return Traces(guard, self.pid, start, frozenset(end for end in ends if end))

    async def _reap(self) -> None:
        end_s = time.monotonic() + SWEEP_S_MAX
        while self._leader.poll() is None and time.monotonic() < end_s:
            if self._guarded and self._sweep_reported is False:
                kill_group(self._leader)
            await anyio.sleep(_REAP_S)
        if self.exit is None:
            self._note_exit(Exit() if self._guarded else _exit_of(self._leader.returncode))

    def _tell(self, word: bytes) -> None:
        # A guard that its host has stopped would not hear; until it is reaped its number is its own.
        if self._leader.returncode is None and not self._line_ended:
            with suppress(OSError):
                os.write(self._line, word)
                os.kill(self._leader.pid, signal.SIGCONT)

    async def notice_end(self) -> None:
        """Hear the guard, or wait for the program's end, until `leave`."""
        await self._listen(self._watch, self._noticing)

    async def keep_words(self) -> None:
        """Drain its stderr until `leave`: a child whose stderr nobody reads stands still."""
        await self._listen(self._drain, self._draining)

    async def _listen(self, work: Callable[[], Awaitable[None]], scope: anyio.CancelScope) -> None:
        """Do this; an exception that nobody foresaw is the child's `fault`."""
        with scope:
            try:
                await work()
            except Exception as error:
                self.fault = self.fault or error
                self._announce_exit()

    async def _watch(self) -> None:
        """Notice the end by waiting, or by asking again and again."""
        while self._line >= 0:
            await anyio.wait_readable(self._line)
            if not self._take_end():
                return
        while not has_ended(self._leader):
            await anyio.sleep(LOOK_S)
        self._note_exit(_peek(self._leader))

    async def _drain(self) -> None:
        await anyio.wait_readable(self._stderr)
        while self._take_stderr():
            await anyio.wait_readable(self._stderr)

    def _take_end(self) -> bool:
        """A word of the guard, or what a pidfd tells; False when nothing more will come."""
        if not self._guarded:
            self._note_exit(_peek(self._leader))
            return False
        word = _chunk(self._line, WORD_BYTES_MAX)
        if word:
            with suppress(ValueError):  # No guard of ours speaks so.
                self._hear(word)
        elif word is not None:
            self._line_ended = True
            self._announce()
            self._note_exit(Exit())
        return word != b""

    def _take_stderr(self) -> bool:
        """Keep the tail; a child whose stderr nobody reads stands still. False at its end."""
        chunk = _chunk(self._stderr, READ_BYTES_MAX)
        if chunk:
            self._tail += chunk
            excess = len(self._tail) - self._tail_bytes_max
            self.stderr_dropped += max(0, min(len(chunk), excess))
            if excess > LOOK_BYTES:
                del self._tail[: excess - LOOK_BYTES]
        elif chunk is not None:
            self._stderr_ended = True
            self._announce()
        return chunk != b""

    def _hear(self, word: bytes) -> None:
        what, *_, number = word.split()
        if what == b"pid":
            if self._life < 0:
                self.pid, self.start = (int(field) for field in word.split()[1:])
        elif what == b"swept":
            self.swept, self._sweep_reported = int(number), True
        elif what == b"spawn_error":
            self._sweep_reported = True
        else:
            self._note_exit(Exit(code=int(number)) if what == b"exit" else Exit(signal=int(number)))
        self._first_word = self._first_word or word
        self._announce()

    def _note_exit(self, how: Exit) -> None:
        if self.exit is None:
            self.exit = how
            if self._step is not None:
                self._step.cancel()
            self._announce_exit()

    def call_on_exit(self, call: Callable[[], None]) -> None:
        """Have this called, in place of the function before, once the exit is known or `fault` raised: now if it is."""
        self._on_exit = call
        if self.exit is not None or self.fault is not None:
            call()

    def _announce_exit(self) -> None:
        self._announce()
        if self._on_exit is not None:
            self._on_exit()

    def _announce(self) -> None:
        for true, come in self._waiting:
            if true():
                come.set()

    async def _until(self, true: Callable[[], bool]) -> None:
        """Wait for something that is announced; the caller sets the bound."""
        if not true():
            waiting = (true, anyio.Event())
            self._waiting.append(waiting)
            try:
                await waiting[1].wait()
            finally:
                self._waiting.remove(waiting)


def _chunk(fd: int, bytes_max: int) -> bytes | None:
    """What there is to be read; nothing when the other end is gone, None when there is nothing yet."""
    try:
        return os.read(fd, bytes_max)
    except BlockingIOError:
        return None
    except OSError:  # The guard was killed with a word of ours unread.
        return b""


def _close(fd: int) -> None:
    if fd >= 0:
        anyio.notify_closing(fd)
        os.close(fd)


def _peek(leader: subprocess.Popen[bytes]) -> Exit:
    """How a child ended that has ended, without reaping it where that can be had."""
    if leader.returncode is not None or not hasattr(os, "waitid"):
        return _exit_of(leader.poll())
    try:
        seen = os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # Somebody else in this program reaped it.
        return Exit()
    if seen is None:
        return Exit()
    return Exit(code=seen.si_status) if seen.si_code == os.CLD_EXITED else Exit(signal=seen.si_status)


def _exit_of(returncode: int | None) -> Exit:
    if returncode is None:
        return Exit()
    return Exit(code=returncode) if returncode >= 0 else Exit(signal=-returncode)


@asynccontextmanager
async def open_child(
    command: StartCommand,
    *,
    guard: bool = True,
    stderr_bytes_max: int = STDERR_BYTES_MAX,
    pass_fds: tuple[int, ...] = (),
    cage: Cage = NO_CAGE,
    ready: Ready | None = None,
) -> AsyncIterator[Child]:
    """Start a child; when the block is left, nothing of it is alive any more, whatever happened in between.

    Must be entered in the main thread. Leaving without `stop` kills at once.

    Args:
        guard: put a guard between us and the child (Linux; elsewhere ignored): then also who left its
            session is found, and nothing outlives our own `kill -9`.
        stderr_bytes_max: how much of the end of its stderr is kept.
        pass_fds: inherited by the child under the same numbers.
        cage: what holds the child, put on by the guard; nothing without one.
        ready: awaited before the program itself is started, while its guard is; what it raises comes out here.

    Raises:
        BackendError: `sidecar_spawn_failed`, with the errno's name.
    """

    guarded = guard and GUARD_WORKS
    if ready is not None and not guarded:
        await ready()
    held = msgspec.structs.replace(cage, held=ready is not None)
    child = _launch(command, held, pass_fds, guarded, stderr_bytes_max)
    try:
        async with beside(child.notice_end, child.keep_words):
            try:
                if ready is not None and guarded:
                    await child.release_when(ready)
                await _arrive(child, command)
                del command, cage, held, ready  # Kilobytes that a run would keep as long as its host lives.
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
        raise refusal(command, word)
    if not word:
        await child.stop(grace_s=0)
        fault = refused(command, b"exec", errno.ECHILD)
        fault.hint = "its guard did not start; see the evidence, or run it without a guard"
        fault.evidence = child.stderr_tail.decode("utf-8", "replace")
        raise fault


def _launch(command: StartCommand, cage: Cage, pass_fds: tuple[int, ...], guard: bool, stderr_bytes_max: int) -> Child:
    """Start a program, by way of a guard or directly. Blocks for some ms; raises as `open_child`."""
    if not command.argv:
        raise refused(command, b"exec", errno.EINVAL)
    try:
        with ExitStack() as theirs, ExitStack() as ours:
            stdin, stdin_ours = _pipe(theirs, ours)
            stdout_ours, stdout = _pipe(ours, theirs)
            stderr_ours, stderr = _pipe(ours, theirs)
            stdio, life = (stdin, stdout, stderr), -1
            if guard:
                line, line_theirs = (end.detach() for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                ours.callback(os.close, line)
                theirs.callback(os.close, line_theirs)
                reader, life = _pipe(theirs, ours) if cage.wrapper else (-1, -1)
                leader = spawn_guard("guard", line_theirs, command, stdio, pass_fds, cage, reader)
                if cage.wrapper:
                    # Armed by the guard: a wrapper that is killed before its child has started leaves it waiting.
                    tie(reader, leader.pid, armed=False)
                os.set_blocking(line, False)
            else:
                leader = spawn(command, stdio, pass_fds)
                line = pidfd_of(leader.pid)
            ours.pop_all()
    except OSError as fault:
        raise spawn_failed(command, fault) from fault
    for fd in (stdin_ours, stdout_ours, stderr_ours):
        os.set_blocking(fd, False)
    return Child(leader, guard, (stdin_ours, stdout_ours, stderr_ours), line, stderr_bytes_max, life=life)


def _pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    read_end, write_end = os.pipe()
    reader.callback(os.close, read_end)
    writer.callback(os.close, write_end)
    return read_end, write_end
