"""Runs hosts that are functions of this process, such as replays; they use the same protocol as a child."""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

import anyio

from backplane.contract.work import WorkOrder
from backplane.errors import leaves
from backplane.process.aio import LoopTask
from backplane.process.child import Exit
from backplane.runtime.backends import Backend, Cancel, Link

LADDER_STEP_S: Final = 0.5
"""Seconds that a function has to end once its stdin is closed, and again once it is cancelled; as for a child."""

Serve = Callable[[int, int], Awaitable[None]]
"""Runs a host on two descriptors until it ends, for example `functools.partial(host.link.serve, host, work)`."""


class MemoryBackend(Backend, frozen=True, kw_only=True):
    """A backend whose host is a function of this process, with the same bytes as for a child."""

    serve: Serve
    cached: bool = False
    """True for a replay of a run that had the same order, all of which it heeded."""

    @property
    def key(self) -> str:
        if self.replays is None:
            return f"memory:{self.id}"
        return f"cached:{self.id}" if self.cached else "replay"

    def open(self, order: WorkOrder, environ: Mapping[str, str]) -> AbstractAsyncContextManager[Link]:
        return _open_memory(self.serve)


@asynccontextmanager
async def _open_memory(serve: Serve) -> AsyncIterator[Link]:
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    for fd in (theirs_in, ours_out, ours_in, theirs_out):
        os.set_blocking(fd, False)
    link = _MemoryLink(ours_out, ours_in, theirs_out)
    task = LoopTask(functools.partial(link.run, serve, theirs_in, theirs_out))
    try:
        yield link
    finally:
        task.scope.cancel()
        with anyio.CancelScope(shield=True):
            await link.wait(LADDER_STEP_S)
        link.close_stdin()
        link.close_stdout()


class _MemoryLink:
    """The connection to a function of this process.

    Args:
        out: the function's own end of `stdout`.
    """

    start = stderr_dropped = swept = 0  # A function has no process of its own.
    fault: Exception | None = None

    def __init__(self, stdin: int, stdout: int, out: int) -> None:
        self.stdin, self.stdout, self._out = stdin, stdout, out
        self.pid = os.getpid()
        self.exit: Exit | None = None
        self.guard_lost = False
        self.stderr_tail = b""
        self._scope, self._step = anyio.CancelScope(), anyio.CancelScope()
        self._ended = anyio.Event()
        self._on_exit: Callable[[], object] = bool

    async def run(self, serve: Serve, stdin: int, stdout: int) -> None:
        code = 1
        try:
            with self._scope:
                await serve(stdin, stdout)
                code = 0
        except Exception as error:  # As for a child, a bug gives an exit code and a text on stderr.
            words = "\n".join(f"{type(leaf).__name__}: {leaf}" for leaf in leaves(error))
            self.stderr_tail = words.encode("utf-8", "backslashreplace")
        finally:
            self.exit = Exit(code=code)
            self._ended.set()
            self._step.cancel()
            self._on_exit()
            os.close(stdin)
            os.close(stdout)

    def call_on_exit(self, call: Callable[[], None]) -> None:
        self._on_exit = call
        if self.exit is not None:
            call()

    def close_stdin(self) -> None:
        self.stdin = _close(self.stdin)

    def close_stdout(self) -> None:
        self.stdout = _close(self.stdout)

    async def wait(self, timeout_s: float) -> Exit | None:
        with anyio.move_on_after(timeout_s):
            await self._ended.wait()
        return self.exit

    async def stop(self, *, grace_s: float, cancel: Cancel | None = None, is_done: bool = False) -> None:
        """Stop the function in the steps for a child, except the kill: one that ignores its cancellation runs on.

        Its further output is discarded.
        """
        with anyio.CancelScope(shield=True):
            if cancel is not None:
                with self._step, anyio.move_on_after(grace_s):
                    await cancel(grace_s)
            self.close_stdin()
            await self.wait(LADDER_STEP_S)
            self._scope.cancel()
            if await self.wait(LADDER_STEP_S) is None:
                self.guard_lost = True
                self.stderr_tail = b"the host's function ignored its cancellation and was left behind in this process"
                with open(os.devnull, "wb") as nowhere:  # noqa: ASYNC230
                    os.dup2(nowhere.fileno(), self._out, inheritable=False)


def _close(fd: int) -> int:
    if fd >= 0:
        anyio.notify_closing(fd)
        os.close(fd)
    return -1
