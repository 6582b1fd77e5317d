"""Runs a short program to its end, with input, output and limits; blocks, and so is called in a worker thread."""

from __future__ import annotations

import fcntl
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Final

import msgspec

from backplane.errors import BackendError
from backplane.process.guard import pidfd_open
from backplane.process.launch import READ_BYTES_MAX, StartCommand, spawn_failed
from backplane.process.spawn import kill_group, reap, spawn

TOOL_S_MAX: Final = 120.0
"""Default time limit of a tool in seconds; a `git diff` of a large tree takes less, a hung network mount more."""

TOOL_OUTPUT_BYTES_MAX: Final = 256 * 1024 * 1024
"""Default limit of a tool's stdout in bytes; `TOOL_STDERR_BYTES_MAX` limits its stderr."""

TOOL_STDERR_BYTES_MAX: Final = 64 * 1024
"""Number of bytes kept of a tool's stderr, which only people read; the rest is read and dropped."""

_PIPES: Final = (subprocess.PIPE,) * 3

_WANTED_LOOK_S: Final = 0.05
"""Seconds between two calls of `stopped`."""

_REST_READS_MAX: Final = 32
"""Limit of reads after the tool's end: enough for twice the 1 MiB to which a pipe can be enlarged."""

_END_S_MAX: Final = 5.0
"""Seconds for SIGKILL to take effect. Only uninterruptible sleep, which no signal ends, takes longer."""

_GROUP_WAIT_S: Final = 0.2
"""Seconds for the rest of a killed group to disappear; dead orphans stay visible if no process reaps them."""

_LOOK_S: Final = 0.001
"""Seconds between two checks whether a killed group has disappeared."""


class Finished(msgspec.Struct, frozen=True):
    """The result of a tool."""

    code: int
    """The exit code, or the negated number of the signal that ended the tool."""
    stdout: bytes
    """The output; empty if it was written to a file."""
    stderr: bytes
    """The first 64 KiB."""


def search_path(environ: Mapping[str, str]) -> str:
    """Return the folders to search for our own tools: the absolute entries of PATH, or else the system's default.

    A relative entry or an empty PATH leads to the current folder, which may contain another person's `git`.
    """
    parts = environ.get("PATH", "").split(os.pathsep)
    return os.pathsep.join(part for part in parts if os.path.isabs(part)) or os.defpath


def run_tool(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | None = None,
    stdin: bytes | Iterable[bytes] = b"",
    timeout_s: float = TOOL_S_MAX,
    output_bytes_max: int = TOOL_OUTPUT_BYTES_MAX,
    stdout_path: str | None = None,
    stopped: Callable[[], object] = lambda: False,
    tied: bool = True,
) -> Finished:
    """Run a short program to its end. Blocks, so call it in a worker thread.

    The tool runs in a session of its own, and its process group is killed at the end.

    Args:
        env: the whole environment.
        stdin: the tool's input; each piece of an iterable is taken once the tool has read the one before, and the time
            limit begins anew then.
        output_bytes_max: limit of stdout, in memory or in the file `stdout_path` (made with mode 0600).
        stopped: called repeatedly; a true result or an exception kills the tool.
        tied: the kernel kills the tool if this process is killed.

    Raises:
        BackendError: `sidecar_spawn_failed` (with the errno's name), `backend_timeout`,
            `execution_tool_failed` if the tool writes more than `output_bytes_max`, or was stopped.
        OSError: the file cannot be opened or written.
    """
    command = StartCommand(tuple(argv), dict(env), cwd)
    pieces = iter((stdin,) if isinstance(stdin, bytes) else stdin)
    with ExitStack() as opened:
        sink = opened.enter_context(open(stdout_path, "wb", opener=_private)) if stdout_path else None
        tool = _spawn_tied(command, opened) if tied else spawn(command, _PIPES)
        opened.callback(_end_tool, tool)
        try:
            end = pidfd_open(tool.pid)
        except OSError as fault:
            raise spawn_failed(command, fault) from fault
        opened.callback(os.close, end)
        talk = _Talk(tool, argv[0], end, pieces, output_bytes_max, sink.write if sink else None)
        opened.callback(talk.pipes.close)
        look_s = time.monotonic()
        while not talk.has_ended:
            now_s, deadline_s = time.monotonic(), talk.last_s + timeout_s
            if now_s >= look_s:
                look_s = now_s + _WANTED_LOOK_S
                if stopped():
                    raise BackendError("execution_tool_failed", f"'{argv[0]}' was stopped before it had ended")
            if now_s >= deadline_s:
                raise BackendError("backend_timeout", f"'{argv[0]}' did not end within {timeout_s:g} s")
            talk.step(min(deadline_s, look_s) - now_s)
        # Only processes that the tool left behind can still write; the tool's own output is already in the pipes.
        kill_group(tool)
        for _ in range(_REST_READS_MAX):  # A process that left the group may write for ever.
            if not talk.pipes.get_map() or not talk.step(0):
                break
    # Leaving the stack has reaped the tool, so its exit code is known.
    return Finished(tool.returncode, bytes(talk.stdout), bytes(talk.stderr))


def _spawn_tied(command: StartCommand, opened: ExitStack) -> subprocess.Popen[bytes]:
    """Start a tool that the kernel kills with us, unless we are killed before the `fcntl` calls below.

    `PR_SET_PDEATHSIG` does not fit: it has to be set between fork and exec, where Python cannot run safely beside
    other threads, and it acts at the end of the forking thread. So the tool inherits the reading end of a pipe, and
    the kernel signals the tool's group when the last writing end, ours, is closed.
    """
    reader, writer = os.pipe()
    opened.callback(os.close, writer)
    try:
        tool = spawn(command, _PIPES, (reader,))
        with suppress(OSError):  # The tool may have ended already.
            fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(reader, fcntl.F_SETOWN, -tool.pid)
            fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)
        return tool
    finally:
        os.close(reader)


class _Talk:
    """Reads and writes the three pipes of a tool, and notices its end.

    Args:
        end: the tool's pidfd.
        sink: receives the tool's stdout; None to keep it in memory.
    """

    def __init__(
        self,
        tool: subprocess.Popen[bytes],
        name: str,
        end: int,
        stdin: Iterator[bytes],
        output_bytes_max: int,
        sink: Callable[[bytes], int] | None,
    ) -> None:
        self.stdout, self.stderr = bytearray(), bytearray()
        self.has_ended = False
        """True once the tool has ended; it is not reaped yet, so no other group can have its number."""
        self.last_s = time.monotonic()
        """When the tool was started, or the latest piece of its input was taken."""
        self._name, self._stdin, self._unsent, self._take = name, stdin, memoryview(b""), sink or self.stdout.extend
        self._left_bytes = self._output_bytes_max = output_bytes_max
        self.pipes = selectors.DefaultSelector()
        """The open pipes and the pidfd, each with the method that handles it and returns False at its end."""
        for pipe, event, handle in (
            (tool.stdin, selectors.EVENT_WRITE, self._write),
            (tool.stdout, selectors.EVENT_READ, self._read),
            (tool.stderr, selectors.EVENT_READ, self._read_stderr),
        ):
            assert pipe is not None, "spawned with pipes"
            os.set_blocking(pipe.fileno(), False)
            self.pipes.register(pipe, event, handle)
        self.pipes.register(end, selectors.EVENT_READ, self._note_end)

    def step(self, wait_s: float) -> bool:
        """Read and write the pipes that are ready; return False if none was."""
        ready = self.pipes.select(wait_s)
        for key, _ in ready:
            if not key.data(key.fd):
                self.pipes.unregister(key.fileobj)
                if not isinstance(key.fileobj, int):
                    key.fileobj.close()  # type: ignore[attr-defined]  # a pipe
        return bool(ready)

    def _note_end(self, _: int) -> bool:
        self.has_ended = True
        return False

    def _write(self, fd: int) -> bool:
        if not self._unsent:
            piece = next(self._stdin, None)
            if piece is None:
                return False
            self._unsent, self.last_s = memoryview(piece), time.monotonic()
        try:
            self._unsent = self._unsent[os.write(fd, self._unsent[:READ_BYTES_MAX]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        return True

    def _read(self, fd: int) -> bool:
        chunk = os.read(fd, READ_BYTES_MAX)
        self._left_bytes -= len(chunk)
        if self._left_bytes < 0:
            fact = f"'{self._name}' wrote more than {self._output_bytes_max} bytes"
            raise BackendError("execution_tool_failed", fact, hint="raise the limit or ask for less")
        self._take(chunk)
        return bool(chunk)

    def _read_stderr(self, fd: int) -> bool:
        chunk = os.read(fd, READ_BYTES_MAX)
        self.stderr += chunk[: TOOL_STDERR_BYTES_MAX - len(self.stderr)]
        return bool(chunk)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _end_tool(tool: subprocess.Popen[bytes]) -> None:
    kill_group(tool)
    for pipe in (tool.stdin, tool.stdout, tool.stderr):
        if pipe is not None:
            pipe.close()
    reap(tool, _END_S_MAX)
    end_s = time.monotonic() + _GROUP_WAIT_S
    with suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < end_s:
            os.killpg(tool.pid, 0)
            time.sleep(_LOOK_S)
