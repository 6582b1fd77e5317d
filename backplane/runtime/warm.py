"""Warm hosts: started before the order that they will get, so that a run finds its host with its hello said.

A run whose order was sent has another host started, with the same command, environment and isolation, around the same
root. A later run takes it only where all of these are what it would start its own in; it gets one order, and ends with
that run. On asyncio alone, as such a host is entered in one task and left in another.
"""

from __future__ import annotations

import uuid
from collections.abc import Hashable
from functools import partial
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread

from backplane.process.aio import OwnTask, asyncio_loop, register
from backplane.runtime.backends import Link
from backplane.runtime.environment import RunEnvironment

if TYPE_CHECKING:
    import asyncio

KINDS_MAX: Final = 64
"""Kinds of orders that are remembered; a forgotten one's next order is its first again."""


MISFITS_MAX: Final = 2
"""Hosts that did not fit: a file was replaced once, or what such orders are started in is another each time."""


class WarmHost:
    """A host that waits for an order, and the place that it was started in."""

    def __init__(self, environment: RunEnvironment) -> None:
        self.environment = environment
        self.loop = asyncio_loop()
        self.link: Link | None = None
        self.started, self.over = anyio.Event(), anyio.Event()
        self.taken = False
        self.block: OwnTask[Link] | None = None
        """What the run that takes it enters in the place of a start."""

    async def live(self, wait_s: float) -> bool:
        """Start it, and end it unless it is taken within so many seconds; whether it could be started."""
        try:
            block = await self.environment.find_way()
            if block is not None:
                self.block = OwnTask(block)
                self.link = await self.block.__aenter__()
                self.link.call_on_exit(self.over.set)
        except Exception:  # Whatever it is, the next run that starts such a host meets it again, and tells it.
            self.block = None
        finally:
            self.started.set()
        try:
            if self.link is not None:
                with anyio.move_on_after(wait_s):
                    await self.over.wait()
        finally:
            if not self.taken:
                await self.drop()
        return self.link is not None

    async def drop(self) -> None:
        """Kill it, and remove what was made for it."""
        with anyio.CancelScope(shield=True):
            try:
                if self.block is not None:
                    await self.block.__aexit__(None, None, None)
            finally:
                self.environment.unlock()
                await anyio.to_thread.run_sync(partial(self.environment.leave, {}, used=False))


class WarmHosts:
    """The warm hosts of one control plane.

    Args:
        most: so many wait at once; then the oldest makes room.
        wait_s: so long one waits.
    """

    def __init__(self, most: int, wait_s: float) -> None:
        self._most, self._wait_s = most, wait_s
        self._waiting: dict[Hashable, WarmHost] = {}
        """By the kind of order that they wait for, the oldest first."""
        self._kinds: dict[Hashable, int] = {}
        """Kinds of orders that there were, and how many hosts did not fit one."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def take(self, kind: Hashable) -> WarmHost | None:
        """Take the host that waits for such an order, waiting for its start where that goes on."""
        host = self._waiting.pop(kind, None)
        if host is None or host.loop is not asyncio_loop():
            return None
        host.taken = True
        try:
            await host.started.wait()
        except BaseException:
            host.taken = host.started.is_set()
            host.over.set()
            if host.taken:
                await host.drop()
            raise
        usable = host.link is not None and host.link.exit is None and not host.over.is_set()
        host.over.set()
        if not usable:
            await host.drop()
        return host if usable else None

    def misfit(self, kind: Hashable) -> None:
        """Note that a host was not what such an order needs; after a few no more is kept for them."""
        self._kinds[kind] = self._kinds.get(kind, 0) + 1

    def expect(self, kind: Hashable, environment: RunEnvironment, *, more: bool) -> None:
        """Have a host wait for the next order of a kind, from its second one on.

        Args:
            environment: of the run that such an order is like.
            more: the first order has another one coming.
        """
        misfits = self._kinds.pop(kind, None)
        self._kinds[kind] = misfits or 0
        if len(self._kinds) > KINDS_MAX:
            del self._kinds[next(iter(self._kinds))]
        loop = asyncio_loop()
        wanted = more if misfits is None else misfits < MISFITS_MAX
        if not wanted or kind in self._waiting or loop is None or self._most == 0:
            return
        host = self._waiting[kind] = WarmHost(environment.for_next(str(uuid.uuid4())))
        if len(self._waiting) > self._most:
            self._waiting.pop(next(iter(self._waiting))).over.set()
        task = register(loop.create_task, self._live(kind, host))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _live(self, kind: Hashable, host: WarmHost) -> None:
        try:
            if not await host.live(self._wait_s):
                self.misfit(kind)
        finally:
            if self._waiting.get(kind) is host:
                del self._waiting[kind]

    async def close(self) -> None:
        """End those that wait."""
        for host in self._waiting.values():
            host.over.set()
        self._waiting.clear()
        mine = [task for task in self._tasks if task.get_loop() is asyncio_loop()]
        if mine:
            from asyncio import wait

            await wait(mine)
