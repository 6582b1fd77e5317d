"""Limits how many runs a control plane executes at once; the others wait by priority."""

from __future__ import annotations

import heapq
import itertools
from typing import Final

import anyio
import anyio.lowlevel

from backplane.contract.canonical import Json
from backplane.errors import BackendError

WAITING_MAX: Final = 1024
"""Maximum number of runs that wait for a place; a caller with more should use a queue."""

NORMAL: Final = 1
"""Rank of the priority `normal`, the same as in `routing.task.RANKS`."""


def rank_of(route: Json) -> int:
    """Return the rank of an order's priority, by its `config.vendor.abp.route`; `normal` if it names none."""
    if not isinstance(route, dict):
        return NORMAL
    from backplane.routing.task import RANKS  # Most orders name no route.

    return next((rank for name, rank in RANKS.items() if name == route.get("priority")), NORMAL)


class Places:
    """A semaphore that serves the highest rank first, and within a rank the task that has waited longest.

    Args:
        count: number of places.
    """

    def __init__(self, count: int) -> None:
        self._count = self._free = count
        self._turns: list[tuple[int, int, anyio.Event]] = []
        self._numbers = itertools.count()

    @property
    def waiting(self) -> int:
        """The number of tasks that wait for a place."""
        return len(self._turns)

    async def acquire(self, rank: int) -> None:
        """Wait until a run may start.

        Args:
            rank: rank of the run; a higher one is served first.

        Raises:
            BackendError: `rate_limit_exceeded`, too many wait already.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        # A waiter is counted before any other task runs: orders that come together are refused together.
        if self._free:
            self._free -= 1
            return
        if self.waiting >= WAITING_MAX:
            fact = f"{WAITING_MAX} runs wait for one of {self._count} places"
            raise BackendError("rate_limit_exceeded", fact, hint="try again later, or raise runs_max")
        turn = (-rank, next(self._numbers), anyio.Event())
        heapq.heappush(self._turns, turn)
        try:
            await turn[2].wait()
        except BaseException:
            if turn[2].is_set():  # Cancelled just after it had got its place.
                self.release()
            else:
                self._turns.remove(turn)
                heapq.heapify(self._turns)
            raise

    def release(self) -> None:
        """Give a place back; the next waiter takes it."""
        if self._turns:
            heapq.heappop(self._turns)[2].set()
        else:
            self._free += 1
