"""Runs the programs of tools and hosts, with limits of time and output, in a given environment.

A command line comes in, and its output goes out while it runs. The caller has checked that it may run.
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
"""Bytes that are kept of an output's beginning, and as many of its end."""

GRACE_S: Final = 2.0
"""Seconds for a stopped program to end by itself, the short step included; a cancelled caller may have fewer."""

_GRACE_S_LEAST: Final = 0.1

SIGN_OF_LIFE_S: Final = 30.0
"""Seconds of silence after which `hear` gets an empty text: a control plane ends a run without any events."""

_LOOK_S: Final = 0.25
"""Seconds between two looks for the end of a silent program; its descendants may keep its output open."""

Hear = Callable[[str], Awaitable[None]]


class Outcome(msgspec.Struct, frozen=True):
    """The end of a program and its output, both streams in the order of writing."""

    exit: Exit
    output: str
    """The beginning and the end, `KEPT_BYTES_MAX` of each."""
    timed_out: bool


class _Output:
    """The beginning and the end of an output."""

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
    """Run a program to its end; when this returns or is cancelled, nothing of it is left.

    Args:
        timeout_s: seconds after which it is stopped.
        hear: called with the output while it runs, and with an empty text after each `SIGN_OF_LIFE_S` of silence.
        grace_s: returns the seconds that stopping it may take.

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
                    # A process that it left running may keep its input open.
                    tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await child.stop(grace_s=max(grace_s() - LADDER_STEP_S, _GRACE_S_LEAST))
    return Outcome(child.exit or Exit(), output.text(), limit.cancelled_caught)


async def feed(child: Child, data: bytes) -> None:
    """Write a program's whole input and close it; a program that ends before, or reads nothing, is no error."""
    left = memoryview(data)
    with suppress(OSError, anyio.ClosedResourceError):
        while left:
            await anyio.wait_writable(child.stdin)
            with suppress(BlockingIOError):
                left = left[os.write(child.stdin, left) :]
    child.close_stdin()


async def piece(child: Child) -> bytes | None:
    """Return the next bytes of a program's output: none at the end, None if it was silent for a moment.

    The end is that of the program itself; a process that it left running may keep the output open for ever.
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
    while await child.wait(SIGN_OF_LIFE_S) is None:  # It closed its output and still runs.
        await hear("")
