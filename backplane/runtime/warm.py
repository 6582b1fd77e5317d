"""Starts hosts before their orders, so that a run finds a host that has already sent its hello.

Once a run's agent is done, another host is started with the same setup. A later run takes this host if its own setup
has the same fingerprint. A host gets one order and ends with that run.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import anyio
import anyio.to_thread
import msgspec

from backplane.process.aio import LoopTask
from backplane.runtime.backends import Link, ProcessBackend
from backplane.runtime.setup import HostSetup

WAIT_S: Final = 300.0
"""Seconds that a started host waits for an order: enough for a pause between two turns."""

KINDS_MAX: Final = 64
"""Number of fingerprints remembered; an order whose fingerprint was forgotten counts as the first again."""


def fingerprint(setup: HostSetup) -> str | None:
    """Return a hash of a host's setup, except the name of its folders. Blocking.

    Returns:
        None if no host can wait for such an order: the backend is no program, its sandbox depends on the copy, or its
        program is not shipped with backplane and might use the copy's folder before its order.
    """
    start, order, held, backend = setup.start, setup.order, setup.contained, setup.start.backend
    if not isinstance(backend, ProcessBackend):
        return None
    mounted = tuple[str, ...]()
    if held is not None:
        if order.workspace.mode == "staged" and (setup.tree is None or not backend.is_ours):
            return None
        mounted = (*held.writable, *(word for word in held.cage.wrapper if word.startswith("/")))
        held = msgspec.structs.replace(held, policy=None)
    same = (
        (backend.key, backend.command(order, start.environ), setup.isolation, held),
        (order.policy, setup.settings.get("enforcement"), order.workspace.mode, os.path.abspath(order.workspace.root)),
        # A mount keeps the file that it was made with, even if another file takes its path.
        [_identity(path) for path in mounted if setup.name not in path],
    )
    return hashlib.sha256(repr(same).replace(setup.name, "").encode("utf-8", "surrogateescape")).hexdigest()


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class WarmHost:
    """A host that waits for an order in its own task; cancelling the task ends the host.

    Args:
        setup: the host's setup; its `key` is the fingerprint of the order that the host waits for.
        ended: called with this host once it has ended.
    """

    def __init__(self, setup: HostSetup, ended: Callable[[WarmHost], object]) -> None:
        self.setup, self._ended = setup, ended
        self.is_free, self.is_taken = True, False
        self._link: Link | None = None
        self._started = anyio.Event()
        self.task = LoopTask(self._live)

    def end(self) -> None:
        """Begin to end the host."""
        self.is_free = False
        self.task.scope.cancel()

    async def _live(self) -> None:
        scope = self.task.scope
        try:
            await anyio.to_thread.run_sync(self.setup.make_ahead)
            async with self.setup.open(None) as self._link:
                self._link.call_on_exit(self.end)
                scope.deadline = anyio.current_time() + WAIT_S
                self._started.set()
                await anyio.sleep_forever()
        except Exception:  # The next run that starts such a host gets the error again and reports it.
            if self.is_taken:
                raise
        finally:
            self.end()
            self._started.set()
            if not self.is_taken:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(functools.partial(self.setup.remove, with_tree=True))
            self._ended(self)

    async def claim(self) -> bool:
        """Take the host for a run once it has started; return False if it has ended or could not be started."""
        self.is_free, scope = False, self.task.scope
        try:
            await self._started.wait()
        except BaseException:
            self.end()
            raise
        if self._link is None or scope.cancel_called:
            return False
        self._link.call_on_exit(lambda: None)  # From now on, the run watches for its exit.
        self.is_taken, scope.deadline = True, math.inf
        return True

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Link]:
        """Yield the connection to a host that was taken, and end the host after the block."""
        assert self._link is not None
        try:
            yield self._link
        finally:
            self.end()
            await self.task.wait()


class WarmHosts:
    """The warm hosts of one control plane.

    Args:
        most: maximum number of waiting hosts; one more ends the oldest.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._hosts: list[WarmHost] = []
        """Hosts that have not ended, the oldest first."""
        self._seen = deque[str](maxlen=KINDS_MAX)
        """Fingerprints of earlier orders."""

    async def take(self, setup: HostSetup) -> WarmHost | None:
        """Take a host with the same setup once it has started; return None if there is none."""
        setup.key = await anyio.to_thread.run_sync(fingerprint, setup)
        host = next((host for host in self._hosts if host.is_free and host.setup.key == setup.key), None)
        return host if host is not None and await host.claim() else None

    def expect(self, setup: HostSetup) -> None:
        """Start a host for the next order like this one, if an earlier order had the same fingerprint."""
        key, waiting = setup.key, [host for host in self._hosts if host.is_free]
        if key is None or any(host.setup.key == key for host in waiting):
            return
        if key not in self._seen:
            self._seen.append(key)
            return
        if len(waiting) >= self._most:
            waiting[0].end()
        self._hosts.append(WarmHost(setup.following(), self._hosts.remove))

    async def close(self) -> None:
        """End the hosts that no run has taken."""
        hosts = [host for host in self._hosts if not host.is_taken]
        for host in hosts:
            host.end()
        for host in hosts:
            await host.task.wait()
