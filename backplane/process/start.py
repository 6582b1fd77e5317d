"""A program as a child of ours, from its start to the last of it."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import msgspec

from backplane.process.child import Child, look_after
from backplane.process.launch import (
    GUARD_WORKS,
    NO_CAGE,
    START_S_MAX,
    Cage,
    Command,
    Launched,
    launch,
    refusal,
    refused,
)

STDERR_BYTES_MAX: Final = 64 * 1024
"""Kept of a child's stderr, its end; the contract's number."""


Ready = Callable[[], Awaitable[object]]
"""Comes back when what a program needs is there."""


@asynccontextmanager
async def open_child(
    command: Command,
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
    guard = guard and GUARD_WORKS
    if ready is not None and not guard:
        await ready()
    cage = msgspec.structs.replace(cage, held=ready is not None)
    launched = launch(command, guard=guard, pass_fds=pass_fds, cage=cage)
    async with look_after(_child(launched, stderr_bytes_max)) as child:
        if ready is not None and guard:
            await child.release_when(ready)
        await _arrive(child, command)
        yield child


@asynccontextmanager
async def take_over(launched: Launched) -> AsyncIterator[Child]:
    """The same for what was started before, without an event loop; raises as `open_child` does."""
    async with look_after(_child(launched, STDERR_BYTES_MAX)) as child:
        await _arrive(child, launched.command)
        yield child


def _child(launched: Launched, stderr_bytes_max: int) -> Child:
    return Child(
        launched.leader,
        launched.guard,
        launched.pipes,
        launched.line,
        stderr_bytes_max,
        namespaced=launched.namespaced,
    )


async def _arrive(child: Child, command: Command) -> None:
    """Wait until the program itself was started. Raises BackendError: `sidecar_spawn_failed`."""
    word = await child.arrived(START_S_MAX)
    if word.startswith(b"spawn_error "):
        raise refusal(command, word)
    if not word:
        await child.stop(grace_s=0)
        fault = refused(command, b"exec", errno.ECHILD)
        fault.hint = "its guard did not start; see the evidence, or run it without a guard"
        fault.evidence = child.stderr_tail.decode("utf-8", "replace")
        raise fault
