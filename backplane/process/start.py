"""A program as a child of ours, from its start to the last of it."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from backplane.process.child import Child, look_after
from backplane.process.launch import NO_CAGE, START_S_MAX, Cage, Command, Launched, launch, refusal, refused

STDERR_BYTES_MAX: Final = 64 * 1024
"""Kept of a child's stderr, its end; the contract's number."""


@asynccontextmanager
async def open_child(
    command: Command,
    *,
    guard: bool = True,
    stderr_bytes_max: int = STDERR_BYTES_MAX,
    pass_fds: tuple[int, ...] = (),
    cage: Cage = NO_CAGE,
    launched: Launched | None = None,
) -> AsyncIterator[Child]:
    """Start a child; when the block is left, nothing of it is alive any more, whatever happened in between.

    Must be entered in the main thread. Leaving without `stop` kills at once.

    Args:
        guard: put a guard between us and the child (Linux; elsewhere ignored): then also who left its
            session is found, and nothing outlives our own `kill -9`.
        stderr_bytes_max: how much of the end of its stderr is kept.
        pass_fds: inherited by the child under the same numbers.
        cage: what holds the child, put on by the guard; nothing without one.
        launched: take over what was started before; the other arguments are not looked at then, but for stderr's.

    Raises:
        BackendError: `sidecar_spawn_failed`, with the errno's name.
    """
    begun = launched or launch(command, guard=guard, pass_fds=pass_fds, cage=cage)
    child = Child(begun.leader, begun.guard, begun.pipes, begun.line, stderr_bytes_max, namespaced=begun.namespaced)
    async with look_after(child):
        word = await child.arrived(START_S_MAX)
        if word.startswith(b"spawn_error "):
            raise refusal(command, word)
        if not word:
            await child.stop(grace_s=0)
            fault = refused(command, b"exec", errno.ECHILD)
            fault.hint = "its guard did not start; see the evidence, or run it without a guard"
            fault.evidence = child.stderr_tail.decode("utf-8", "replace")
            raise fault
        yield child
