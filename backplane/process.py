"""The only room that starts a process.

A command goes in; bytes, an exit and a promise come out: when the block is left, or the call
returns, nothing that was started is alive any more. What the bytes mean is not known here.
"""

from __future__ import annotations

import errno
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Final

import msgspec

from backplane.errors import BackendError

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
    try:
        return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
            list(argv), env=dict(env), cwd=cwd, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            close_fds=True, start_new_session=True, umask=UMASK,
        )
    except (OSError, ValueError) as fault:
        raise _spawn_failed(argv[0], fault) from fault


def _spawn_failed(name: str, fault: Exception) -> BackendError:
    number = getattr(fault, "errno", None) or errno.EINVAL
    code = errno.errorcode.get(number, str(number))
    return BackendError("sidecar_spawn_failed", f"'{name}' could not be started: {code} ({os.strerror(number)})")


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


def _kill_group(tool: subprocess.Popen[bytes]) -> None:
    # Only before the leader is reaped: until then nobody else can have this group's number.
    if tool.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(tool.pid, signal.SIGKILL)


def _end_tool(tool: subprocess.Popen[bytes]) -> None:
    _kill_group(tool)
    for pipe in (tool.stdin, tool.stdout, tool.stderr):
        if pipe is not None:
            pipe.close()
    with suppress(subprocess.TimeoutExpired):
        tool.wait(_TERMINAL_WAIT_S)
