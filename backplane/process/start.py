"""A program as a child of ours, from its start to the last of it."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Final

import msgspec

from backplane.process import spawn
from backplane.process.aio import beside
from backplane.process.child import Child
from backplane.process.launch import (
    GUARD_WORKS,
    NO_CAGE,
    START_S_MAX,
    Cage,
    StartCommand,
    not_held,
    refusal,
    refused,
    spawn_failed,
)
from backplane.process.sweep import pidfd_of

STDERR_BYTES_MAX: Final = 64 * 1024
"""Kept of a child's stderr, its end; the contract's number."""


Ready = Callable[[], Awaitable[object]]
"""Comes back when what a program needs is there."""


@asynccontextmanager
async def open_child(
    command: StartCommand,
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
        CageError: `sidecar_spawn_failed`, the cage is not there as its guard sees it; nothing was started in it.
        BackendError: `sidecar_spawn_failed`, with the errno's name.
    """

    guarded = guard and GUARD_WORKS
    if ready is not None and not guarded:
        await ready()
    held = msgspec.structs.replace(cage, held=ready is not None)
    child = _launch(command, held, pass_fds, guarded, stderr_bytes_max)
    try:
        async with beside(child.notice_end, child.keep_words):
            try:
                if ready is not None and guarded:
                    await child.release_when(ready)
                await _arrive(child, command, cage)
                del command, cage, held, ready  # Kilobytes that a run would keep as long as its host lives.
                yield child
            finally:
                await child.leave()
    finally:
        child.close()


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


def _launch(command: StartCommand, cage: Cage, pass_fds: tuple[int, ...], guard: bool, stderr_bytes_max: int) -> Child:
    """Start a program, by way of a guard or directly. Blocks for some ms; raises as `open_child`."""
    if not command.argv:
        raise refused(command, b"exec", errno.EINVAL)
    try:
        with ExitStack() as theirs, ExitStack() as ours:
            stdin, stdin_ours = _pipe(theirs, ours)
            stdout_ours, stdout = _pipe(ours, theirs)
            stderr_ours, stderr = _pipe(ours, theirs)
            stdio, life = (stdin, stdout, stderr), -1
            if guard:
                line, line_theirs = (end.detach() for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                ours.callback(os.close, line)
                theirs.callback(os.close, line_theirs)
                reader, life = _pipe(theirs, ours) if cage.wrapper else (-1, -1)
                leader = spawn.spawn_guard("guard", line_theirs, command, stdio, pass_fds, cage, reader)
                if cage.wrapper:
                    # Armed by the guard: a wrapper that is killed before its child has started leaves it waiting.
                    spawn.tie(reader, leader.pid, armed=False)
                os.set_blocking(line, False)
            else:
                leader = spawn.spawn(command, stdio, pass_fds)
                line = pidfd_of(leader.pid)
            ours.pop_all()
    except OSError as fault:
        raise spawn_failed(command, fault) from fault
    for fd in (stdin_ours, stdout_ours, stderr_ours):
        os.set_blocking(fd, False)
    return Child(leader, guard, (stdin_ours, stdout_ours, stderr_ours), line, stderr_bytes_max, life=life)


def _pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    read_end, write_end = os.pipe()
    reader.callback(os.close, read_end)
    writer.callback(os.close, write_end)
    return read_end, write_end
