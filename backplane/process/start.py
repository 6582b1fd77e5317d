"""A program as a child of ours, from its start to the last of it."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final

import msgspec

from backplane.process.block import SpannedBlock
from backplane.process.child import Child
from backplane.process.launch import (
    GUARD_WORKS,
    NO_CAGE,
    START_S_MAX,
    Cage,
    Launched,
    StartCommand,
    launch,
    not_held,
    refusal,
    refused,
)

STDERR_BYTES_MAX: Final = 64 * 1024
"""Kept of a child's stderr, its end; the contract's number."""


Ready = Callable[[], Awaitable[object]]
"""Comes back when what a program needs is there."""


def open_child(
    command: StartCommand,
    *,
    guard: bool = True,
    stderr_bytes_max: int = STDERR_BYTES_MAX,
    pass_fds: tuple[int, ...] = (),
    cage: Cage = NO_CAGE,
    ready: Ready | None = None,
) -> AbstractAsyncContextManager[Child]:
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
        CageError: `sidecar_spawn_failed`, the cage is not there as its guard sees it; nothing was started in it.
        BackendError: `sidecar_spawn_failed`, with the errno's name.
    """

    async def start() -> Child:
        guarded = guard and GUARD_WORKS
        if ready is not None and not guarded:
            await ready()
        held = msgspec.structs.replace(cage, held=ready is not None)
        launched = launch(command, guard=guarded, pass_fds=pass_fds, cage=held)
        return await _arrived(_child(launched, stderr_bytes_max), command, cage, ready if guarded else None)

    return SpannedBlock(start, Child.leave)


def take_over(launched: Launched) -> AbstractAsyncContextManager[Child]:
    """The same for what was started before, without an event loop; raises as `open_child` does."""
    return SpannedBlock(lambda: _arrived(_child(launched, STDERR_BYTES_MAX), launched.command, NO_CAGE), Child.leave)


async def _arrived(child: Child, command: StartCommand, cage: Cage, ready: Ready | None = None) -> Child:
    """Look after a child until its program was started. Raises as `open_child`."""
    await child.enter()
    try:
        if ready is not None:
            await child.release_when(ready)
        await _arrive(child, command, cage)
    except BaseException:
        await child.leave()
        raise
    return child


def _child(launched: Launched, stderr_bytes_max: int) -> Child:
    return Child(
        launched.leader,
        launched.guard,
        launched.pipes,
        launched.line,
        stderr_bytes_max,
        life=launched.life,
    )


async def _arrive(child: Child, command: StartCommand, cage: Cage) -> None:
    """Wait until the program itself was started. Raises as `open_child`."""
    word = await child.arrived(START_S_MAX)
    if child.fault is not None:
        raise child.fault
    if word.startswith(b"spawn_error "):
        raise refusal(command, word)
    if word.startswith(b"unseen "):
        raise not_held(cage, word)
    if not word:
        await child.stop(grace_s=0)
        fault = refused(command, b"exec", errno.ECHILD)
        fault.hint = "its guard did not start; see the evidence, or run it without a guard"
        fault.evidence = child.stderr_tail.decode("utf-8", "replace")
        raise fault
