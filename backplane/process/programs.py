"""Runs programs for tools and hosts, with limits on time and output, in a given environment.

The output is passed on while the program runs. The caller has checked that the command is allowed.
"""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final

import anyio
import msgspec

from backplane.process.child import LADDER_STEP_S, Child, Exit, open_child
from backplane.process.launch import READ_BYTES_MAX, StartCommand

KEPT_BYTES_MAX: Final = 64 * 1024
"""Number of bytes kept from an output's beginning, and as many from its end."""

GRACE_S: Final = 2.0
"""Seconds for a stopped program to end by itself, `LADDER_STEP_S` included; a cancelled caller may allow fewer."""

_GRACE_S_LEAST: Final = 0.1

SIGN_OF_LIFE_S: Final = 30.0
"""Seconds of silence after which `hear` gets an empty text, because a control plane ends a run without events."""

_LOOK_S: Final = 0.25
"""Seconds between two checks for the end of a silent program, whose descendants may keep its output open."""

Hear = Callable[[str], Awaitable[None]]


class Outcome(msgspec.Struct, frozen=True):
    """A program's exit and output; stdout and stderr are joined in the order of writing."""

    exit: Exit
    output: str
    """The output's beginning and end, up to `KEPT_BYTES_MAX` bytes of each."""
    timed_out: bool


class _Output:
    """Collects the beginning and the end of an output."""

    def __init__(self) -> None:
        self.bytes = 0
        self._head = bytearray()
        self._tail = bytearray()

    def take(self, data: bytes) -> None:
        self.bytes += len(data)
        room = KEPT_BYTES_MAX - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        if len(self._tail) > 2 * KEPT_BYTES_MAX:
            del self._tail[:-KEPT_BYTES_MAX]

    def text(self) -> str:
        tail = self._tail[-KEPT_BYTES_MAX:]
        left_out = self.bytes - len(self._head) - len(tail)
        note = f"\n[… {left_out} bytes left out …]\n".encode() if left_out else b""
        return (bytes(self._head) + note + bytes(tail)).decode("utf-8", "replace")


async def _ignore(_: str) -> None:
    pass


async def run_program(
    argv: tuple[str, ...],
    *,
    env: Mapping[str, str],
    cwd: str,
    timeout_s: float,
    stdin: bytes = b"",
    hear: Hear = _ignore,
    grace_s: Callable[[], float] = lambda: GRACE_S,
) -> Outcome:
    """Run a program to its end; even if cancelled, leave none of its processes running.

    Args:
        timeout_s: seconds after which the program is stopped.
        hear: called with each piece of output, and with an empty text after each `SIGN_OF_LIFE_S` of silence.
        grace_s: returns the seconds that stopping the program may take.

    Raises:
        BackendError: `sidecar_spawn_failed`.
    """
    output = _Output()
    # One pipe keeps both streams in the order of writing.
    words = ("/bin/sh", "-c", 'exec "$@" 2>&1', "sh", *argv)
    async with open_child(StartCommand(argv=words, env=dict(env), cwd=cwd)) as child:
        try:
            with anyio.move_on_after(timeout_s) as limit:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(feed, child, stdin)
                    await _follow(child, output, hear)
                    # A process that the program left running may keep the input open.
                    tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await child.stop(grace_s=max(grace_s() - LADDER_STEP_S, _GRACE_S_LEAST))
    return Outcome(child.exit or Exit(), output.text(), limit.cancelled_caught)


async def feed(child: Child, data: bytes) -> None:
    """Write a program's whole input and close it; ignore a program that ends early or reads nothing."""
    left = memoryview(data)
    with suppress(OSError, anyio.ClosedResourceError):
        while left:
            await anyio.wait_writable(child.stdin)
            with suppress(BlockingIOError):
                left = left[os.write(child.stdin, left) :]
    child.close_stdin()


async def piece(child: Child) -> bytes | None:
    """Return the next bytes of a program's output; empty at the end, None after a moment of silence.

    The output ends with the program itself, because a process that it left running may keep the pipe open for ever.
    """
    ended = child.exit is not None
    with anyio.move_on_after(_LOOK_S):
        await anyio.wait_readable(child.stdout)
    try:
        return os.read(child.stdout, READ_BYTES_MAX)
    except BlockingIOError:
        return b"" if ended else None


async def _follow(child: Child, output: _Output, hear: Hear) -> None:
    decoder, heard_s = codecs.getincrementaldecoder("utf-8")("replace"), time.monotonic()
    while (data := await piece(child)) != b"":
        output.take(data or b"")
        text = decoder.decode(data or b"")
        if text or time.monotonic() - heard_s >= SIGN_OF_LIFE_S:
            await hear(text)
            heard_s = time.monotonic()
    if rest := decoder.decode(b"", final=True):
        await hear(rest)
    while await child.wait(SIGN_OF_LIFE_S) is None:  # The program closed its output and still runs.
        await hear("")
