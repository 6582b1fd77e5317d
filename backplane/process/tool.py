"""A short program, run to its end in a worker thread: its input, its output, its limits."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Final

import msgspec

from backplane.errors import BackendError
from backplane.process.launch import READ_BYTES_MAX, StartCommand
from backplane.process.spawn import TERMINAL_WAIT_S, Stdio, has_ended, kill_group, pidfd_of, spawn, tie

TOOL_S_MAX: Final = 120.0
"""Default bound of one tool call; a `git diff` of a large tree stays under it, a hung network mount does not."""

TOOL_OUTPUT_BYTES_MAX: Final = 256 * 1024 * 1024
"""Default bound of a tool's stdout; stderr has `TOOL_STDERR_BYTES_MAX`."""

TOOL_STDERR_BYTES_MAX: Final = 64 * 1024
"""Kept of a tool's stderr; the rest is read and forgotten, it is only for people."""

_WANTED_LOOK_S: Final = 0.05
"""How often it is asked whether a silent tool is still wanted."""

_REST_READS_MAX: Final = 32
"""Reads after the end: the 1 MiB that a pipe may hold where somebody made it larger, twice over."""

_GROUP_WAIT_S: Final = 0.2
"""For the rest of a killed group to be gone; longer only where nobody reaps orphans, who are then dead all the same."""

_LOOK_S: Final = 0.001
"""Between two questions whether somebody is gone, where the system does not tell it."""


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
    tied: bool = True,
) -> Finished:
    """Run a short program to its end; blocking, so call it in a worker thread.

    It has a session of its own, which is killed at the end, whatever that end was; and with us, where we are killed.

    Args:
        env: the whole environment.
        stdin: given to it; `stdin_path` instead names a file.
        output_bytes_max: bound of stdout, in memory or in the file `stdout_path` (made with mode 0600).
        stopped: asked again and again; true kills it.
        tied: it is killed with us, where we are killed; else it goes on to its own end.

    Raises:
        BackendError: `sidecar_spawn_failed` (with the errno's name), `backend_timeout`,
            `execution_tool_failed` when it writes more than `output_bytes_max`, or was stopped.
        OSError: one of the two files cannot be opened or written.
    """
    command = StartCommand(tuple(argv), dict(env), cwd)
    with ExitStack() as opened:
        source = opened.enter_context(open(stdin_path, "rb")) if stdin_path else subprocess.PIPE
        sink = opened.enter_context(open(stdout_path, "wb", opener=_private)) if stdout_path else None
        pipes = (source, subprocess.PIPE, subprocess.PIPE)
        tool = _spawn_tied(command, pipes, opened) if tied else spawn(command, pipes)
        opened.callback(_end_tool, tool)
        talk = _Talk(tool, argv[0], stdin, output_bytes_max, sink.write if sink else None)
        opened.callback(talk.close)
        now_s = look_s = time.monotonic()
        deadline_s = now_s + timeout_s
        while not talk.ended():
            now_s = time.monotonic()
            if now_s >= look_s:
                look_s = now_s + _WANTED_LOOK_S
                if stopped():
                    raise BackendError("execution_tool_failed", f"'{argv[0]}' was stopped before it had ended")
            if now_s >= deadline_s:
                raise BackendError("backend_timeout", f"'{argv[0]}' did not end within {timeout_s:g} s")
            talk.step(min(deadline_s, look_s) - now_s)
        # Whoever still holds the pipes is a leftover of the tool; what it wrote itself is in them already.
        kill_group(tool)
        talk.rest()
    # Reaped by that, so its code is known.
    return Finished(tool.returncode, bytes(talk.stdout), bytes(talk.stderr))


def _spawn_tied(command: StartCommand, pipes: Stdio, opened: ExitStack) -> subprocess.Popen[bytes]:
    """Start it so that it is killed with us; a kill in the moment before it is tied leaves it to its own end."""
    reader, writer = os.pipe()
    opened.callback(os.close, writer)
    try:
        tool = spawn(command, pipes, (reader,))
        tie(reader, tool.pid)
        return tool
    finally:
        os.close(reader)


class _Talk:
    """The three pipes of a tool, read and written until they close, and its end."""

    def __init__(
        self,
        tool: subprocess.Popen[bytes],
        name: str,
        stdin: bytes,
        output_bytes_max: int,
        sink: Callable[[bytes], int] | None,
    ) -> None:
        self.stdout = bytearray()
        self.stderr = bytearray()
        self._tool = tool
        self._name = name
        self._take = sink or self.stdout.extend
        self._taken_bytes = 0
        self._output_bytes_max = output_bytes_max
        self._unsent = memoryview(stdin)
        self._pipes = selectors.DefaultSelector()
        for pipe, events in ((tool.stdin, selectors.EVENT_WRITE), (tool.stdout, 1), (tool.stderr, 1)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._pipes.register(pipe, events, pipe)
        self._end = pidfd_of(tool.pid)
        """Readable once it has ended; -1 where the system has no such thing, or once that was seen."""
        self._polls = self._end < 0
        if not self._polls:
            self._pipes.register(self._end, selectors.EVENT_READ)

    def ended(self) -> bool:
        """Whether the tool has ended; its group is still its own."""
        return has_ended(self._tool) if self._polls else self._end < 0

    def step(self, wait_s: float) -> bool:
        """Move what can be moved; False when nothing could."""
        ready = self._pipes.select(min(wait_s, _LOOK_S) if self._polls else wait_s)
        for key, _ in ready:
            if key.fd == self._end:
                self._forget_end()
            elif key.data is self._tool.stdin:
                self._write(key)
            else:
                self._read(key)
        return bool(ready)

    def rest(self) -> None:
        """Take what is already in the pipes; not more, as one who left the group may write for ever."""
        for _ in range(_REST_READS_MAX):
            if not self._pipes.get_map() or not self.step(0):
                return

    def close(self) -> None:
        self._forget_end()
        self._pipes.close()

    def _forget_end(self) -> None:
        if self._end >= 0:
            self._pipes.unregister(self._end)
            os.close(self._end)
            self._end = -1

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
        elif key.data is self._tool.stderr:
            self.stderr += chunk[: TOOL_STDERR_BYTES_MAX - len(self.stderr)]
        else:
            self._taken_bytes += len(chunk)
            if self._taken_bytes > self._output_bytes_max:
                fact = f"'{self._name}' wrote more than {self._output_bytes_max} bytes"
                raise BackendError("execution_tool_failed", fact, hint="raise the limit or narrow what is asked")
            self._take(chunk)

    def _drop(self, key: selectors.SelectorKey) -> None:
        self._pipes.unregister(key.fileobj)
        key.data.close()


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
