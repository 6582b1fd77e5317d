"""The only room that starts a process.

A command goes in; bytes, an exit and a promise come out: when the block is left, or the call
returns, nothing that was started is alive any more. What the bytes mean is not known here.
"""

from __future__ import annotations

import errno
import marshal
import os
import select
import selectors
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import IO, Final

import anyio
import msgspec

from backplane import _guard
from backplane.errors import BackendError

STDERR_BYTES_MAX: Final = 64 * 1024
"""Kept of a child's stderr, its end; the contract's number."""

LADDER_STEP_S: Final = 0.5
"""The ladder's short step; the contract's number."""

START_S_MAX: Final = 10.0
"""For a guard to report that its host was started; 12 ms are usual, a loaded machine has needed a second."""

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

TOOL_S_MAX: Final = 120.0
"""Default bound of one tool call; a `git diff` of a large tree stays under it, a hung network mount does not."""

TOOL_OUTPUT_BYTES_MAX: Final = 256 * 1024 * 1024
"""Default bound of a tool's stdout; stderr has `TOOL_STDERR_BYTES_MAX`."""

TOOL_STDERR_BYTES_MAX: Final = 64 * 1024
"""Kept of a tool's stderr; the rest is read and forgotten, it is only for people."""

READ_BYTES_MAX: Final = 64 * 1024
"""One read: the size of a pipe's buffer."""

UMASK: Final = 0o077
"""What a child makes is for its user alone."""

_REAP_S: Final = 0.0005
"""Between two tries to reap a child whose end is certain."""

_TERMINAL_WAIT_S: Final = 5.0
"""For SIGKILL to take effect. Longer only in uninterruptible sleep, which no signal ends."""


class Command(msgspec.Struct, frozen=True):
    """A program to start."""

    argv: tuple[str, ...]
    env: dict[str, str]
    """The whole environment; nothing of ours is inherited."""
    cwd: str | None = None


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


class Finished(msgspec.Struct, frozen=True):
    """What a tool left behind."""

    code: int
    """Exit code, or minus the signal that ended it."""
    stdout: bytes
    """Empty when it went to a file."""
    stderr: bytes
    """The first 64 KiB."""


def run_tool(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | None = None,
    stdin: bytes = b"",
    timeout_s: float = TOOL_S_MAX,
    output_bytes_max: int = TOOL_OUTPUT_BYTES_MAX,
    stdout_path: str | None = None,
    stdin_path: str | None = None,
) -> Finished:
    """Run a short program to its end; blocking, so call it in a worker thread.

    It has a session of its own, which is killed at the end, whatever that end was.

    Args:
        env: the whole environment.
        stdin: given to it; `stdin_path` instead names a file.
        output_bytes_max: bound of stdout, in memory or in the file `stdout_path` (made with mode 0600).

    Raises:
        BackendError: `sidecar_spawn_failed` (with the errno's name), `backend_timeout`,
            `execution_tool_failed` when it writes more than `output_bytes_max`.
    """
    deadline_s = time.monotonic() + timeout_s
    name = argv[0]
    with ExitStack() as opened:
        source = opened.enter_context(open(stdin_path, "rb")) if stdin_path else subprocess.PIPE
        sink = opened.enter_context(open(stdout_path, "wb", opener=_private)) if stdout_path else None
        tool = _popen(argv, env=env, cwd=cwd, stdin=source)
        opened.callback(_end_tool, tool)
        talk = _Talk(tool, stdin, output_bytes_max, sink.write if sink else None)
        opened.callback(talk.close)
        while talk.open:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise BackendError("backend_timeout", f"'{name}' did not end within {timeout_s:g} s",
                                   evidence=talk.stderr.decode("utf-8", "replace"))
            talk.step(min(left_s, _LEADER_LOOK_S))
            if talk.over:
                raise BackendError("execution_tool_failed", f"'{name}' wrote more than {output_bytes_max} bytes",
                                   hint="raise the limit or narrow what is asked")
            if _has_ended(tool):
                # Whoever still holds the pipes is a leftover of the tool; what it wrote itself is in them already.
                _kill_group(tool)
                talk.rest()
                break
        code = _wait_tool(tool, name, timeout_s, deadline_s)
    return Finished(code, bytes(talk.stdout), bytes(talk.stderr))


_LEADER_LOOK_S: Final = 0.05
"""How often a silent tool is asked whether it has ended while a leftover holds its pipes."""


_REST_READS_MAX: Final = 32
"""Reads after the end: the 1 MiB that a pipe may hold where somebody made it larger, twice over."""


class _Talk:
    """The three pipes of a tool, read and written until they close."""

    def __init__(self, tool: subprocess.Popen[bytes], stdin: bytes, bytes_max: int, sink: object) -> None:
        self.stdout = bytearray()
        self.stderr = bytearray()
        self.over = False
        self._sink = sink
        self._taken = 0
        self._bytes_max = bytes_max
        self._unsent = memoryview(stdin)
        self._pipes = selectors.DefaultSelector()
        for pipe, events in ((tool.stdin, selectors.EVENT_WRITE), (tool.stdout, 1), (tool.stderr, 1)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._pipes.register(pipe, events, pipe is tool.stderr)
        self._stdin = tool.stdin

    @property
    def open(self) -> bool:
        return bool(self._pipes.get_map())

    def step(self, wait_s: float) -> bool:
        """Move what can be moved; False when nothing could."""
        ready = self._pipes.select(wait_s)
        for key, _ in ready:
            if key.fileobj is self._stdin:
                self._write(key)
            else:
                self._read(key)
        return bool(ready)

    def rest(self) -> None:
        """Take what is already in the pipes; not more, as one who left the group may write for ever."""
        for _ in range(_REST_READS_MAX):
            if self.over or not self.open or not self.step(0):
                return

    def close(self) -> None:
        self._pipes.close()

    def _write(self, key: selectors.SelectorKey) -> None:
        try:
            sent = os.write(key.fd, self._unsent[:READ_BYTES_MAX]) if self._unsent else 0
        except BlockingIOError:
            return
        except BrokenPipeError:
            sent = len(self._unsent)
        self._unsent = self._unsent[sent:]
        if not self._unsent:
            self._drop(key)

    def _read(self, key: selectors.SelectorKey) -> None:
        chunk = os.read(key.fd, READ_BYTES_MAX)
        if not chunk:
            self._drop(key)
        elif key.data:
            self.stderr += chunk[: TOOL_STDERR_BYTES_MAX - len(self.stderr)]
        else:
            self._taken += len(chunk)
            self.over = self._taken > self._bytes_max
            if not self.over:
                self._sink(chunk) if callable(self._sink) else self.stdout.extend(chunk)

    def _drop(self, key: selectors.SelectorKey) -> None:
        self._pipes.unregister(key.fileobj)
        key.fileobj.close()  # type: ignore[union-attr]  # registered as a file object above


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _popen(argv: Sequence[str], *, env: Mapping[str, str], cwd: str | None, stdin: object) -> subprocess.Popen[bytes]:
    return _spawn(Command(tuple(argv), dict(env), cwd), (stdin, subprocess.PIPE, subprocess.PIPE), ())


def _spawn(command: Command, stdio: _Stdio, pass_fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Start the program as our own child, in a session of its own."""
    if _signals_ignored():
        return _spawn_launcher(command, stdio, pass_fds)
    stdin, stdout, stderr = stdio
    try:
        return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
            command.argv, env=command.env, cwd=command.cwd, stdin=stdin, stdout=stdout, stderr=stderr, bufsize=0,
            pass_fds=pass_fds, start_new_session=True, umask=UMASK,
        )
    except (OSError, ValueError) as fault:
        raise _spawn_failed(command, fault) from fault


def _signals_ignored() -> bool:
    # `nohup` and a shell's `&` start us so; exec would hand it on, and Popen resets only Python's own three.
    return any(signal.getsignal(number) is signal.SIG_IGN for number in _HANDED_ON)


_HANDED_ON: Final = frozenset(signal.valid_signals()) - {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, getattr(signal, "SIGXFSZ", signal.SIGPIPE)
}


def _spawn_launcher(
    command: Command, stdio: _Stdio, pass_fds: tuple[int, ...]
) -> subprocess.Popen[bytes]:
    """Start the program by way of a small one that puts the signals right, as a thread of ours cannot."""
    told, tell = os.pipe()
    try:
        launcher = _spawn_guard("launch", tell, command, stdio, pass_fds)
    except BaseException:
        os.close(told)
        raise
    finally:
        os.close(tell)
    try:
        in_time = select.select([told], [], [], START_S_MAX)[0]
        word = os.read(told, _guard.WORD_BYTES_MAX) if in_time else b"exec %d" % errno.ETIMEDOUT
    finally:
        os.close(told)
    if word:
        launcher.kill()
        launcher.wait(_TERMINAL_WAIT_S)
        raise _refusal(command, word)
    return launcher


def _spawn_guard(
    role: str, line: int, command: Command, stdio: _Stdio, pass_fds: tuple[int, ...]
) -> subprocess.Popen[bytes]:
    """Start `_guard.py`; the command travels in a file, so that its environment is not the guard's own."""
    stdin, stdout, stderr = stdio
    try:
        with _order_file() as order:
            order.write(_order_bytes(command, pass_fds))
            order.flush()
            argv = [sys.executable, "-I", "-S", _guard.__file__, role, str(line), str(order.fileno())]
            return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
                argv, env=_loader_env(), cwd="/", stdin=stdin, stdout=stdout, stderr=stderr, bufsize=0,
                pass_fds=(line, order.fileno(), *pass_fds), start_new_session=role == "guard", umask=UMASK,
            )
    except (OSError, ValueError) as fault:
        raise _spawn_failed(command, fault) from fault


def _order_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("order"), "wb")
    return tempfile.TemporaryFile()


def _order_bytes(command: Command, pass_fds: tuple[int, ...]) -> bytes:
    argv = [os.fsencode(word) for word in command.argv]
    env = {os.fsencode(name): os.fsencode(value) for name, value in command.env.items()}
    return marshal.dumps((argv, env, None if command.cwd is None else os.fsencode(command.cwd), list(pass_fds)))


def _loader_env() -> dict[str, str]:
    # What our own interpreter may need to find its library, and nothing of the command's.
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH") if name in os.environ}


def _spawn_failed(command: Command, fault: Exception) -> BackendError:
    in_cwd = command.cwd is not None and getattr(fault, "filename", None) == command.cwd
    return _refused(command, b"cwd" if in_cwd else b"exec", getattr(fault, "errno", None) or errno.EINVAL)


def _refusal(command: Command, word: bytes) -> BackendError:
    where, number = word.split()[-2:]
    return _refused(command, where, int(number))


def _refused(command: Command, where: bytes, number: int) -> BackendError:
    name = command.argv[0][:_NAME_CHARS_MAX] if command.argv else ""
    code = errno.errorcode.get(number, str(number))
    if where == b"cwd":
        name, hint = f"'{name}' in '{command.cwd}'", "make the folder or name another"
    else:
        name, hint = f"'{name}'", _HINTS.get(number, "")
    fact = f"{name} could not be started: {code} ({os.strerror(number)})"
    return BackendError("sidecar_spawn_failed", fact, hint=hint or None)


_NAME_CHARS_MAX: Final = 200
"""Of a program's name in a message."""

_HINTS: Final = {
    errno.ENOENT: "check the name and PATH; if the file is there, the program named in its first line is not",
    errno.EACCES: "make the file executable",
    errno.ENOEXEC: "the file is no program and has no first line that names one",
    errno.E2BIG: "arguments and environment are too long for this system; pass a file",
    errno.EMFILE: "too many files are open; raise the limit (ulimit -n) or run fewer at once",
    errno.EAGAIN: "too many processes; raise the limit (ulimit -u) or run fewer at once",
}


def _has_ended(tool: subprocess.Popen[bytes]) -> bool:
    """Whether the child has ended; where the system can, without reaping it, so that its group stays its own."""
    if not hasattr(os, "waitid"):
        return tool.poll() is not None
    if tool.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, tool.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _wait_tool(tool: subprocess.Popen[bytes], name: str, timeout_s: float, deadline_s: float) -> int:
    while not _has_ended(tool):
        if time.monotonic() > deadline_s:
            raise BackendError("backend_timeout", f"'{name}' did not end within {timeout_s:g} s")
        time.sleep(0.001)
    _kill_group(tool)
    return tool.wait(_TERMINAL_WAIT_S)


def _kill_group(leader: subprocess.Popen[bytes], number: int = signal.SIGKILL) -> None:
    # Only before the leader is reaped: until then nobody else can have this group's number.
    if leader.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader.pid, number)


def _end_tool(tool: subprocess.Popen[bytes]) -> None:
    _kill_group(tool)
    for pipe in (tool.stdin, tool.stdout, tool.stderr):
        if pipe is not None:
            pipe.close()
    with suppress(subprocess.TimeoutExpired):
        tool.wait(_TERMINAL_WAIT_S)


@asynccontextmanager
async def open_child(
    command: Command, *, guard: bool = True, stderr_bytes_max: int = STDERR_BYTES_MAX, pass_fds: tuple[int, ...] = ()
) -> AsyncIterator[Child]:
    """Start a child; when the block is left, nothing of it is alive any more, whatever happened in between.

    Must be entered in the main thread. Leaving without `stop` kills at once.

    Args:
        guard: put a guard between us and the child (Linux; elsewhere ignored): then also who left its
            session is found, and nothing outlives our own `kill -9`.
        stderr_bytes_max: how much of the end of its stderr is kept.
        pass_fds: inherited by the child under the same numbers.

    Raises:
        BackendError: `sidecar_spawn_failed`, with the errno's name.
    """
    child = _start_child(command, guard and _GUARD_WORKS, stderr_bytes_max, pass_fds)
    failure: BaseException | None = None
    async with anyio.create_task_group() as tasks:
        try:
            tasks.start_soon(child._watch)
            tasks.start_soon(child._drain)
            await child._arrive(command)
            yield child
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as caught:
            # Raised again below: the group would wrap it, and our caller's `except` would not know it.
            failure = caught
        finally:
            with anyio.CancelScope(shield=True):
                await child._leave()
    if failure is not None:
        raise failure


_GUARD_WORKS: Final = sys.platform == "linux" and hasattr(os, "pidfd_open") and bool(sys.executable)


def _start_child(command: Command, guard: bool, stderr_bytes_max: int, pass_fds: tuple[int, ...]) -> Child:
    try:
        with ExitStack() as theirs, ExitStack() as ours:
            stdin, stdin_ours = _pipe(theirs, ours)
            stdout_ours, stdout = _pipe(ours, theirs)
            stderr_ours, stderr = _pipe(ours, theirs)
            stdio = (stdin, stdout, stderr)
            line = -1
            if guard:
                line, line_theirs = (end.detach() for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                ours.callback(os.close, line)
                theirs.callback(os.close, line_theirs)
                leader = _spawn_guard("guard", line_theirs, command, stdio, pass_fds)
            else:
                leader = _spawn(command, stdio, pass_fds)
                line = _pidfd(leader.pid)
            ours.pop_all()
    except OSError as fault:
        raise _spawn_failed(command, fault) from fault
    for fd in (stdin_ours, stdout_ours, stderr_ours, *((line,) if guard else ())):
        os.set_blocking(fd, False)
    return Child(leader, guard, (stdin_ours, stdout_ours, stderr_ours), line, stderr_bytes_max)


def _pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    read_end, write_end = os.pipe()
    reader.callback(os.close, read_end)
    writer.callback(os.close, write_end)
    return read_end, write_end


class Child:
    """A running child: two pipes for its owner, everything else looked after here.

    `stdin` and `stdout` are descriptors of ours, close-on-exec and non-blocking; wait with `anyio.wait_writable`
    and `anyio.wait_readable`, then use `os.write` and `os.read`. They are -1 once closed. After `stop` what the
    child wrote can still be read, until the block is left.
    """

    def __init__(
        self, leader: subprocess.Popen[bytes], guarded: bool, pipes: tuple[int, int, int], line: int, tail_bytes_max: int
    ) -> None:
        self.stdin, self.stdout, self._stderr = pipes
        self.pid = leader.pid
        self.exit: Exit | None = None
        """How the program itself ended; those it started may still be there."""
        self.stderr_dropped = 0
        self.swept = 0
        """Descendants that had to be killed at the end, the program itself not counted."""
        self._leader = leader  # The guard, or the program where there is none.
        self._guarded = guarded
        self._line = line  # The guard's socket, or the program's pidfd; -1 for neither.
        self._start = _start_of(leader.pid)
        self._pipe_ids = tuple(_file_id(os.fstat(fd)) for fd in pipes)
        self._tail_bytes_max = tail_bytes_max
        self._tail = bytearray()
        self._first_word = b""
        self._arrived, self._ended, self._line_ended, self._stderr_ended, self._gone = (anyio.Event() for _ in range(5))
        self._sweep_reported = False
        self._stopping = False
        self._step: anyio.CancelScope | None = None
        # Shielded, as a cancelled owner still needs them to walk down the ladder.
        self._watching, self._draining = anyio.CancelScope(shield=True), anyio.CancelScope(shield=True)

    @property
    def stderr_tail(self) -> bytes:
        """The last bytes of its stderr; whole after `stop`."""
        return bytes(self._tail)

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
                _kill_group(self._leader, number)

    async def wait(self, timeout_s: float) -> Exit | None:
        """Wait until the program has ended, at most this long; None when it has not."""
        with anyio.move_on_after(timeout_s):
            await self._ended.wait()
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
            await self._gone.wait()
            return
        self._stopping = True
        with anyio.CancelScope(shield=True):
            try:
                if cancel is not None:
                    await self._unless_ended(cancel, grace_s)
                    self.close_stdin()
                    self.terminate()
                    await self.wait(LADDER_STEP_S)
                else:
                    self.close_stdin()
                    await self.wait(LADDER_STEP_S)
                    self.terminate()
                    await self.wait(grace_s)
            finally:
                await self._kill()

    async def _unless_ended(self, cancel: Callable[[float], Awaitable[None]], grace_s: float) -> None:
        with anyio.move_on_after(grace_s) as self._step:
            if self.exit is None:
                await cancel(grace_s)
        self._step = None

    async def _leave(self) -> None:
        if self._stopping:
            await self._gone.wait()
        else:
            self._stopping = True
            await self._kill()
        self._watching.cancel()
        self._draining.cancel()
        self.close_stdin()
        self.close_stdout()
        _close(self._stderr)
        _close(self._line)

    async def _kill(self) -> None:
        """Kill all there is, reap our own child, and take the last words."""
        if self._guarded:
            self._tell(b"kill")
            with anyio.move_on_after(GUARD_ANSWER_S_MAX):
                await self._line_ended.wait()
        else:
            _kill_group(self._leader)
        if not self._sweep_reported:
            await self._sweep()
        await self._reap()
        with anyio.move_on_after(LAST_WORDS_S_MAX):
            await self._stderr_ended.wait()
        self._gone.set()

    async def _sweep(self) -> None:
        """Kill by the process table what a guard did not; less sure, as who left session and parents is not seen."""
        killed: set[int] = set()
        empty, end_s = 0, time.monotonic() + SWEEP_S_MAX
        while empty < EMPTY_LOOKS and time.monotonic() < end_s:
            found = self._remains()
            killed.update(pid for pid, start in found.items() if _kill_exactly(pid, start))
            empty = 0 if found else empty + 1
            if not killed and not found:
                break
            await anyio.sleep(LOOK_S)
        self.swept += len(killed - {self.pid})

    def _remains(self) -> dict[int, int]:
        """Who in the process table is the child's: pid → start, zombies, guard and ourselves left out."""
        if sys.platform != "linux":
            return {}
        table = _guard.look()
        roots = {self._leader.pid} if self._guarded and self._leader.returncode is None else set()
        host = table.get(self.pid)
        if host is None or host[_guard.START] == self._start:
            # Unless our number is a stranger's by now: who has it as group or session is of our making.
            ours = (pid for pid, row in table.items() if self.pid in (row[_guard.GROUP], row[_guard.SESSION]))
            roots |= {self.pid, *ours}
        found = _descendants(table, roots) | self._holders(table)
        found -= {os.getpid(), self._leader.pid} if self._guarded else {os.getpid()}
        return {pid: row[_guard.START] for pid, row in table.items() if pid in found and row[_guard.STATE] != _guard.ZOMBIE}

    def _holders(self, table: _Table) -> set[int]:
        """Who came after the child and has its ends of our pipes; asked only while somebody has."""
        ends = {(self._pipe_ids[index], mode) for index, mode, held in (
            (0, stat.S_IRUSR, self.stdin >= 0 and not _hung_up(self.stdin)),
            (1, stat.S_IWUSR, self.stdout >= 0 and not _hung_up(self.stdout)),
            (2, stat.S_IWUSR, not _hung_up(self._stderr)),
        ) if held}
        if not ends:
            return set()
        return {pid for pid, row in table.items() if row[_guard.START] >= self._start and _holds(pid, ends)}

    async def _reap(self) -> None:
        end_s = time.monotonic() + SWEEP_S_MAX
        while self._leader.poll() is None and time.monotonic() < end_s:
            if self._guarded and self._sweep_reported is False:
                self._leader.kill()
            await anyio.sleep(_REAP_S)
        if self.exit is None:
            self._note_exit(Exit() if self._guarded else _exit_of(self._leader.returncode))

    def _tell(self, word: bytes) -> None:
        # A guard that its host has stopped would not hear; until it is reaped its number is its own.
        if self._leader.returncode is None and not self._line_ended.is_set():
            with suppress(OSError):
                os.write(self._line, word)
                os.kill(self._leader.pid, signal.SIGCONT)

    async def _arrive(self, command: Command) -> None:
        """Wait until the guard has started the program."""
        if not self._guarded:
            return
        with anyio.move_on_after(START_S_MAX) as waiting:
            await self._arrived.wait()
        if self._first_word.startswith(b"spawn_error "):
            raise _refusal(command, self._first_word)
        if not self._first_word:
            await self._kill()
            fault = _refused(command, b"exec", errno.ETIMEDOUT if waiting.cancelled_caught else errno.ECHILD)
            fault.hint = "its guard did not start; see the evidence, or run it without a guard"
            fault.evidence = self.stderr_tail.decode("utf-8", "replace")
            raise fault

    async def _watch(self) -> None:
        """Notice the end: by the guard's words, by pidfd, or by asking again and again."""
        with self._watching:
            if self._guarded:
                while word := await _next_chunk(self._line, _guard.WORD_BYTES_MAX):
                    self._hear(word)
                self._line_ended.set()
                self._arrived.set()
                self._note_exit(Exit())
                return
            if self._line >= 0:
                await anyio.wait_readable(self._line)
            while not _has_ended(self._leader):
                await anyio.sleep(LOOK_S)
            self._note_exit(_peek(self._leader))

    def _hear(self, word: bytes) -> None:
        what, *_, number = word.split()
        if what == b"pid":
            self.pid, self._start = (int(field) for field in word.split()[1:])
        elif what == b"swept":
            self.swept, self._sweep_reported = int(number), True
        elif what == b"spawn_error":
            self._sweep_reported = True
        else:
            self._note_exit(Exit(code=int(number)) if what == b"exit" else Exit(signal=int(number)))
        if not self._arrived.is_set():
            self._first_word = word
            self._arrived.set()

    def _note_exit(self, how: Exit) -> None:
        if self.exit is None:
            self.exit = how
            self._ended.set()
            if self._step is not None:
                self._step.cancel()

    async def _drain(self) -> None:
        """Read stderr to its end and keep the tail; a child whose stderr nobody reads stands still."""
        with self._draining:
            while chunk := await _next_chunk(self._stderr, READ_BYTES_MAX):
                self._tail += chunk
                excess = len(self._tail) - self._tail_bytes_max
                if excess > 0:
                    del self._tail[:excess]
                    self.stderr_dropped += excess
        self._stderr_ended.set()


async def _next_chunk(fd: int, bytes_max: int) -> bytes:
    """Wait for bytes; none when the other end is gone."""
    await anyio.wait_readable(fd)
    try:
        return os.read(fd, bytes_max)
    except ConnectionResetError:  # The guard was killed with a word of ours unread.
        return b""


def _close(fd: int) -> None:
    if fd >= 0:
        anyio.notify_closing(fd)
        os.close(fd)


def _pidfd(pid: int) -> int:
    # Without one, for want of descriptors too, the end is noticed by asking.
    with suppress(AttributeError, OSError):
        return os.pidfd_open(pid)
    return -1


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


def _start_of(pid: int) -> int:
    row = _guard.look_at(pid) if sys.platform == "linux" else None
    return row[_guard.START] if row else 0


def _descendants(table: _Table, roots: set[int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, row in table.items():
        children.setdefault(row[_guard.PARENT], []).append(pid)
    found, unseen = set(roots), list(roots)
    while unseen:
        fresh = [pid for pid in children.get(unseen.pop(), ()) if pid not in found]
        found.update(fresh)
        unseen += fresh
    return found


def _kill_exactly(pid: int, start: int) -> bool:
    """Kill this process, not one that has its number by now."""
    fd = _pidfd(pid)
    try:
        if _start_of(pid) != start:
            return False
        if fd >= 0:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        if fd >= 0:
            os.close(fd)
    return True


def _hung_up(fd: int) -> bool:
    """Whether nobody has the other end of this pipe."""
    poll = select.poll()
    poll.register(fd, 0)
    return bool(poll.poll(0))


def _holds(pid: int, ends: set[tuple[tuple[int, int], int]]) -> bool:
    """Whether this process has one of these files open in this way."""
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        return any(_is_one_of(f"{folder}/{name}", ends) for name in os.listdir(folder))
    return False


def _is_one_of(path: str, ends: set[tuple[tuple[int, int], int]]) -> bool:
    with suppress(OSError):
        file, how = _file_id(os.stat(path)), os.lstat(path).st_mode
        return any(file == wanted and how & mode for wanted, mode in ends)
    return False


def _file_id(seen: os.stat_result) -> tuple[int, int]:
    return seen.st_dev, seen.st_ino


_Table = dict[int, tuple[int, int, int, int, int]]

_Stdio = tuple[object, object, object]
