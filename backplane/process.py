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
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import IO, Final

import msgspec

from backplane import _guard
from backplane._child import READ_BYTES_MAX, has_ended, kill_group, look_after
from backplane._child import Child as Child  # Both belong to this room's face.
from backplane._child import Exit as Exit
from backplane._remains import pidfd_of
from backplane.errors import BackendError

STDERR_BYTES_MAX: Final = 64 * 1024
"""Kept of a child's stderr, its end; the contract's number."""

START_S_MAX: Final = 10.0
"""For a guard to report that its host was started; 12 ms are usual, a loaded machine has needed a second."""

TOOL_S_MAX: Final = 120.0
"""Default bound of one tool call; a `git diff` of a large tree stays under it, a hung network mount does not."""

TOOL_OUTPUT_BYTES_MAX: Final = 256 * 1024 * 1024
"""Default bound of a tool's stdout; stderr has `TOOL_STDERR_BYTES_MAX`."""

TOOL_STDERR_BYTES_MAX: Final = 64 * 1024
"""Kept of a tool's stderr; the rest is read and forgotten, it is only for people."""

UMASK: Final = 0o077
"""What a child makes is for its user alone."""

_LEADER_LOOK_S: Final = 0.05
"""How often a silent tool is asked whether it has ended while a leftover holds its pipes."""

_REST_READS_MAX: Final = 32
"""Reads after the end: the 1 MiB that a pipe may hold where somebody made it larger, twice over."""

_TERMINAL_WAIT_S: Final = 5.0
"""For SIGKILL to take effect. Longer only in uninterruptible sleep, which no signal ends."""


_Stdio = tuple[object, object, object]
"""stdin, stdout, stderr, as `subprocess.Popen` takes them."""


class Command(msgspec.Struct, frozen=True):
    """A program to start."""

    argv: tuple[str, ...]
    env: dict[str, str]
    """The whole environment; nothing of ours is inherited."""
    cwd: str | None = None


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
                raise BackendError(
                    "backend_timeout",
                    f"'{name}' did not end within {timeout_s:g} s",
                    evidence=talk.stderr.decode("utf-8", "replace"),
                )
            talk.step(min(left_s, _LEADER_LOOK_S))
            if talk.over:
                raise BackendError(
                    "execution_tool_failed",
                    f"'{name}' wrote more than {output_bytes_max} bytes",
                    hint="raise the limit or narrow what is asked",
                )
            if has_ended(tool):
                # Whoever still holds the pipes is a leftover of the tool; what it wrote itself is in them already.
                kill_group(tool)
                talk.rest()
                break
        code = _wait_tool(tool, name, timeout_s, deadline_s)
    return Finished(code, bytes(talk.stdout), bytes(talk.stderr))


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
            command.argv,
            env=command.env,
            cwd=command.cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            bufsize=0,
            pass_fds=pass_fds,
            start_new_session=True,
            umask=UMASK,
        )
    except (OSError, ValueError) as fault:
        raise _spawn_failed(command, fault) from fault


def _signals_ignored() -> bool:
    # `nohup` and a shell's `&` start us so; exec would hand it on, and Popen resets only Python's own three.
    return any(signal.getsignal(number) is signal.SIG_IGN for number in _HANDED_ON)


_HANDED_ON: Final = frozenset(signal.valid_signals()) - {
    signal.SIGKILL,
    signal.SIGSTOP,
    signal.SIGPIPE,
    getattr(signal, "SIGXFSZ", signal.SIGPIPE),
}


def _spawn_launcher(command: Command, stdio: _Stdio, pass_fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
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
                argv,
                env=_loader_env(),
                cwd="/",
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                bufsize=0,
                pass_fds=(line, order.fileno(), *pass_fds),
                start_new_session=role == "guard",
                umask=UMASK,
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


def _wait_tool(tool: subprocess.Popen[bytes], name: str, timeout_s: float, deadline_s: float) -> int:
    while not has_ended(tool):
        if time.monotonic() > deadline_s:
            raise BackendError("backend_timeout", f"'{name}' did not end within {timeout_s:g} s")
        time.sleep(0.001)
    kill_group(tool)
    return tool.wait(_TERMINAL_WAIT_S)


def _end_tool(tool: subprocess.Popen[bytes]) -> None:
    kill_group(tool)
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
    async with look_after(_start_child(command, guard and _GUARD_WORKS, stderr_bytes_max, pass_fds)) as child:
        word = await child.arrived(START_S_MAX)
        if word.startswith(b"spawn_error "):
            raise _refusal(command, word)
        if not word:
            await child.stop(grace_s=0)
            fault = _refused(command, b"exec", errno.ECHILD)
            fault.hint = "its guard did not start; see the evidence, or run it without a guard"
            fault.evidence = child.stderr_tail.decode("utf-8", "replace")
            raise fault
        yield child


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
                line = pidfd_of(leader.pid)
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
