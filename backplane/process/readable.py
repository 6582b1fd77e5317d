"""Waiting for bytes again and again on one descriptor, without registering it anew for each wait.

On asyncio the descriptor stays with the loop, and what is there is taken in the loop's own call:
the waiting task is woken once it has something to do. On trio each wait is trio's own. What is
read, and what it means, is the owner's affair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio

from backplane.process.aio import asyncio_loop, register

if TYPE_CHECKING:
    import asyncio


class Readable:
    """One descriptor that is waited for by one task at a time; `close` it before the descriptor is closed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio_loop()
        self._registered = False
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[], bool] = bool

    async def until(self, take: Callable[[], bool]) -> None:
        """Wait until `take`, called each time there is something to read, says that this was enough; or for `wake`.

        What `take` raises is raised here. It must not block, and it may be called outside of any task.
        """
        if self._loop is None:
            await self._in_turns(take)
            return
        waiter = self._waiter = self._loop.create_future()
        self._take = take
        if not self._registered:
            register(self._loop.add_reader, self._fd, self._on_readable)
            self._registered = True
        try:
            await waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """End the wait, if there is one."""
        if self._loop is None:
            if self._fd >= 0:
                anyio.notify_closing(self._fd)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Let go of the descriptor; nobody waits for it any more."""
        self.wake()
        self._unregister()
        self._fd = -1

    async def _in_turns(self, take: Callable[[], bool]) -> None:
        try:
            await anyio.wait_readable(self._fd)
            while not take():
                await anyio.wait_readable(self._fd)
        except anyio.ClosedResourceError:
            return

    def _on_readable(self) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done():
            # Nobody wants more now: the loop shall not look at it again and again.
            self._unregister()
            return
        try:
            enough = self._take()
        except Exception as error:  # Raised where it is waited for.
            waiter.set_exception(error)
            return
        if enough and not waiter.done():
            waiter.set_result(None)

    def _unregister(self) -> None:
        if self._registered and self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._registered = False
