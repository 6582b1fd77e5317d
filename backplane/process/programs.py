"""Programs that tools and hosts run: bounded in time and output, in a given environment, and gone at the end.

A command line comes in, its output goes out while it runs. What may be run is decided before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final

import anyio
import msgspec

from backplane.process.child import Child, Exit, open_child
from backplane.process.launch import READ_BYTES_MAX, StartCommand

KEPT_BYTES_MAX: Final = 64 * 1024
"""Kept of an output's beginning, and as much of its end."""

_LADDER_S: Final = 0.5
"""What stopping a program takes beside its grace."""

GRACE_S: Final = 2.0
"""For a program that is stopped to end by itself, the ladder included; who is cancelled may have less."""

_GRACE_S_LEAST: Final = 0.1

SIGN_OF_LIFE_S: Final = 30.0
"""A program that is silent that long is said to run still: a control plane gives up who says nothing."""

_LOOK_S: Final = 0.25
"""How often a silent program is looked at for its end, should somebody it started hold its output."""

Hear = Callable[[str], Awaitable[None]]


class Outcome(msgspec.Struct, frozen=True):
    """How a program ended and what it printed, both streams as they came."""

    exit: Exit
    output: str
    """Its beginning and its end, `KEPT_BYTES_MAX` of each."""
    timed_out: bool


class _Output:
    """The beginning and the end of what is printed."""

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


async def run_program(
    argv: tuple[str, ...],
    *,
    env: Mapping[str, str],
    cwd: str,
    timeout_s: float,
    stdin: bytes = b"",
    hear: Hear | None = None,
    grace_s: Callable[[], float] = lambda: GRACE_S,
) -> Outcome:
    """Run a program to its end, at most so long; when this returns or is cancelled, nothing of it is left.

    Args:
        hear: told what is printed while it runs, and now and then that it still does.
        grace_s: asked how long stopping it may take, when it has to be stopped.

    Raises:
        BackendError: `sidecar_spawn_failed`.
    """
    output, exit_ = _Output(), Exit()
    # Both streams come in the order they are written, and what reads its input finds the end of it.
    words = ("/bin/sh", "-c", 'exec "$@" 2>&1', "sh", *argv)
    async with open_child(StartCommand(argv=words, env=dict(env), cwd=cwd)) as child:
        try:
            with anyio.move_on_after(timeout_s) as limit:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(feed, child, stdin)
                    await _follow(child, output, hear)
                    # What it left running may hold its input as well.
                    tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await child.stop(grace_s=max(grace_s() - _LADDER_S, _GRACE_S_LEAST))
        exit_ = child.exit or exit_
    return Outcome(exit_, output.text(), limit.cancelled_caught)


async def feed(child: Child, data: bytes) -> None:
    """Give a program its whole input, and the end of it; one that ends before, or reads none, is no error."""
    left = memoryview(data)
    with suppress(OSError, anyio.ClosedResourceError):
        while left:
            await anyio.wait_writable(child.stdin)
            with suppress(BlockingIOError):
                left = left[os.write(child.stdin, left) :]
    child.close_stdin()


async def piece(child: Child) -> bytes | None:
    """The next of a program's output: none of it at the end, None when it was silent for a moment.

    The end is the program's own; what it left running may hold the output open for ever.
    """
    ended = child.exit is not None
    with anyio.move_on_after(_LOOK_S):
        await anyio.wait_readable(child.stdout)
    try:
        return os.read(child.stdout, READ_BYTES_MAX)
    except BlockingIOError:
        return b"" if ended else None


async def _follow(child: Child, output: _Output, hear: Hear | None) -> None:
    rest, spoke_s = b"", time.monotonic()
    while (data := await piece(child)) != b"":
        if data is None:
            spoke_s = await _sign_of_life(spoke_s, hear)
            continue
        output.take(data)
        rest = await _tell(rest + data, hear)
        spoke_s = time.monotonic()
    await _tell_rest(rest, hear)
    while await child.wait(SIGN_OF_LIFE_S) is None:  # It closed its output and goes on.
        await _sign_of_life(0.0, hear)


async def _sign_of_life(spoke_s: float, hear: Hear | None) -> float:
    now_s = time.monotonic()
    if hear is None or now_s - spoke_s < SIGN_OF_LIFE_S:
        return spoke_s
    await hear("")
    return now_s


async def _tell_rest(rest: bytes, hear: Hear | None) -> None:
    if rest and hear is not None:
        await hear(rest.decode("utf-8", "replace"))


async def _tell(data: bytes, hear: Hear | None) -> bytes:
    """Pass whole characters on; give back the beginning of one that is not whole."""
    if hear is None:
        return b""
    cut = whole_characters(data)
    if cut:
        await hear(data[:cut].decode("utf-8", "replace"))
    return data[cut:]


def whole_characters(data: bytes) -> int:
    """How many bytes end in a whole UTF-8 character."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            width = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) if back >= width else len(data) - back
    return len(data)
