"""A short program, run to its end in a worker thread: its input, its output, its limits."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import IO, Final

import msgspec

from backplane.errors import BackendError
from backplane.process import parent_death
from backplane.process.child import READ_BYTES_MAX, has_ended, kill_group
from backplane.process.launch import StartCommand, Stdio
from backplane.process.spawn import TERMINAL_WAIT_S, spawn

TOOL_S_MAX: Final = 120.0
"""Default bound of one tool call; a `git diff` of a large tree stays under it, a hung network mount does not."""

TOOL_OUTPUT_BYTES_MAX: Final = 256 * 1024 * 1024
"""Default bound of a tool's stdout; stderr has `TOOL_STDERR_BYTES_MAX`."""

TOOL_STDERR_BYTES_MAX: Final = 64 * 1024
"""Kept of a tool's stderr; the rest is read and forgotten, it is only for people."""

_LEADER_LOOK_S: Final = 0.05
"""How often it is asked whether a silent tool is still wanted, and whether it has ended while a leftover holds its
pipes."""

_REST_READS_MAX: Final = 32
"""Reads after the end: the 1 MiB that a pipe may hold where somebody made it larger, twice over."""

_GROUP_WAIT_S: Final = 0.2
"""For the rest of a killed group to be gone; longer only where nobody reaps orphans, who are then dead all the same."""

_LOOK_S: Final = 0.001
"""Between two questions whether somebody is gone."""


class Finished(msgspec.Struct, frozen=True):
    """What a tool left behind."""

    code: int
    """Exit code, or minus the signal that ended it."""
    stdout: bytes
    """Empty when it went to a file."""
    stderr: bytes
    """The first 64 KiB."""


def search_path(environ: Mapping[str, str]) -> str:
    """PATH without its relative entries, never empty: where a tool of our own is looked for.

    The folder we stand in may be somebody else's, with a `git` of theirs; and exec reads an empty PATH as that folder.
    """
    parts = environ.get("PATH", "").split(os.pathsep)
    return os.pathsep.join(part for part in parts if os.path.isabs(part)) or os.defpath


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
    stopped: Callable[[], bool] = lambda: False,
) -> Finished:
    """Run a short program to its end; blocking, so call it in a worker thread.

    It has a session of its own, which is killed at the end, whatever that end was; and with us, where we are killed.

    Args:
        env: the whole environment.
        stdin: given to it; `stdin_path` instead names a file.
        output_bytes_max: bound of stdout, in memory or in the file `stdout_path` (made with mode 0600).
        stopped: asked again and again; true kills it.

    Raises:
        BackendError: `sidecar_spawn_failed` (with the errno's name), `backend_timeout`,
            `execution_tool_failed` when it writes more than `output_bytes_max`, or was stopped.
        OSError: one of the two files cannot be opened or written.
    """
    limits = _Limits(argv[0], timeout_s, time.monotonic() + timeout_s, output_bytes_max, stopped)
    with ExitStack() as opened:
        source = opened.enter_context(open(stdin_path, "rb")) if stdin_path else subprocess.PIPE
        sink = opened.enter_context(open(stdout_path, "wb", opener=_private)) if stdout_path else None
        tool = opened.enter_context(Tool(StartCommand(tuple(argv), dict(env), cwd), stdin, limits, source, sink))
        return tool.finish()


def begin_tool(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float, tied: bool = True) -> Tool:
    """Start what `run_tool` runs, so that something else can be done meanwhile. Raises BackendError as it does.

    Args:
        tied: it is killed with us, where we are killed; else it goes on to its own end.
    """
    limits = _Limits(argv[0], timeout_s, time.monotonic() + timeout_s, TOOL_OUTPUT_BYTES_MAX)
    return Tool(StartCommand(tuple(argv), dict(env)), b"", limits, subprocess.PIPE, None, tied=tied)


class Tool:
    """A short program at work: a block that ends it, whatever happens."""

    def __init__(
        self,
        command: StartCommand,
        stdin: bytes,
        limits: _Limits,
        source: IO[bytes] | int,
        sink: IO[bytes] | None,
        *,
        tied: bool = True,
    ) -> None:
        self._limits = limits
        self._opened = ExitStack()
        pipes = (source, subprocess.PIPE, subprocess.PIPE)
        if tied:
            self._tool = self._spawn_tied(command, pipes)
        else:
            self._tool = spawn(command, pipes)
        self._talk = _Talk(self._tool, stdin, limits, sink.write if sink else None)
        self._opened.callback(_end_tool, self._tool)
        self._opened.callback(self._talk.close)

    def _spawn_tied(self, command: StartCommand, pipes: Stdio) -> subprocess.Popen[bytes]:
        """Start it so that it is killed with us; a kill in the moment before it is tied leaves it to its own end."""
        reader, writer = os.pipe()
        try:
            tool = spawn(command, pipes, (reader,))
            parent_death.tie(reader, tool.pid)
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        self._opened.callback(os.close, writer)
        return tool

    def __enter__(self) -> Tool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, unless it has ended."""
        self._opened.close()

    def kill(self) -> None:
        """Have it end at once; from any thread, as `finish` finds it ended."""
        kill_group(self._tool)

    def finish(self) -> Finished:
        """Wait for its end; blocking, raises as `run_tool`."""
        tool, talk = self._tool, self._talk
        while not has_ended(tool):
            talk.step(self._limits.left_s(_LOOK_S if talk.silent else _LEADER_LOOK_S))
        # Whoever still holds the pipes is a leftover of the tool; what it wrote itself is in them already.
        kill_group(tool)
        talk.rest()
        # Reaped by that, so its code is known.
        self.close()
        return Finished(tool.returncode, bytes(talk.stdout), bytes(talk.stderr))


class _Limits(msgspec.Struct, frozen=True):
    """What a tool may take, and the errors of one that takes more."""

    name: str
    timeout_s: float
    deadline_s: float
    output_bytes_max: int
    stopped: Callable[[], bool] = lambda: False

    def left_s(self, most_s: float) -> float:
        if self.stopped():
            raise BackendError("execution_tool_failed", f"'{self.name}' was stopped before it had ended")
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise BackendError("backend_timeout", f"'{self.name}' did not end within {self.timeout_s:g} s")
        return min(left_s, most_s)

    def check_output(self, taken_bytes: int) -> None:
        if taken_bytes > self.output_bytes_max:
            fact = f"'{self.name}' wrote more than {self.output_bytes_max} bytes"
            raise BackendError("execution_tool_failed", fact, hint="raise the limit or narrow what is asked")


class _Talk:
    """The three pipes of a tool, read and written until they close."""

    def __init__(
        self, tool: subprocess.Popen[bytes], stdin: bytes, limits: _Limits, sink: Callable[[bytes], int] | None
    ) -> None:
        self.stdout = bytearray()
        self.stderr = bytearray()
        self._take = sink or self.stdout.extend
        self._taken_bytes = 0
        self._limits = limits
        self._unsent = memoryview(stdin)
        self._pipes = selectors.DefaultSelector()
        for pipe, events in ((tool.stdin, selectors.EVENT_WRITE), (tool.stdout, 1), (tool.stderr, 1)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._pipes.register(pipe, events, pipe is tool.stderr)
        self._stdin = tool.stdin

    @property
    def silent(self) -> bool:
        """Whether all pipes are closed, so that only its end can be waited for."""
        return not self._pipes.get_map()

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
            if self.silent or not self.step(0):
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
            self._taken_bytes += len(chunk)
            self._limits.check_output(self._taken_bytes)
            self._take(chunk)

    def _drop(self, key: selectors.SelectorKey) -> None:
        self._pipes.unregister(key.fileobj)
        key.fileobj.close()  # type: ignore[union-attr]  # registered as a file object above


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _end_tool(tool: subprocess.Popen[bytes]) -> None:
    kill_group(tool)
    for pipe in (tool.stdin, tool.stdout, tool.stderr):
        if pipe is not None:
            pipe.close()
    with suppress(subprocess.TimeoutExpired):
        tool.wait(TERMINAL_WAIT_S)
    end_s = time.monotonic() + _GROUP_WAIT_S
    with suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < end_s:
            os.killpg(tool.pid, 0)
            time.sleep(_LOOK_S)
