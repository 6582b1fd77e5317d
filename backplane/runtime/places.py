"""A bounded number of runs at once; whoever waits goes by rank, and within a rank by who came first."""

from __future__ import annotations

import heapq
import itertools
from typing import Final

import anyio
import anyio.lowlevel

from backplane.contract.work import WorkOrder

NORMAL: Final = 1
"""Rank of the priority `normal`, as `RANKS` has it."""


def rank_of(order: WorkOrder) -> int:
    """The rank of an order's priority, `config.vendor.abp.route.priority`; that of `normal` where it names none."""
    route = order.abp("route")
    if not isinstance(route, dict):
        return NORMAL
    from backplane.routing.task import RANKS  # Most orders name none, and the way to a first run is short.

    return next((rank for name, rank in RANKS.items() if name == route.get("priority")), NORMAL)


class Places:
    """So many places; a place is taken by `acquire` and given back by `release`.

    Args:
        count: places there are.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: list[tuple[int, int, anyio.Event]] = []
        self._numbers = itertools.count()

    @property
    def waiting(self) -> int:
        """How many wait for a place."""
        return len(self._waiting)

    async def acquire(self, rank: int) -> None:
        """Wait for a place.

        Args:
            rank: the higher goes first.
        """
        # Whoever has to wait is counted at once: orders that come together are refused together.
        if self._free:
            self._free -= 1
            try:
                await anyio.lowlevel.checkpoint()
            except BaseException:
                self.release()
                raise
            return
        turn = (-rank, next(self._numbers), anyio.Event())
        heapq.heappush(self._waiting, turn)
        try:
            await turn[2].wait()
        except BaseException:
            if turn[2].is_set():  # It was given a place at the moment at which it was given up.
                self.release()
            else:
                self._waiting.remove(turn)
                heapq.heapify(self._waiting)
            raise

    def release(self) -> None:
        """Give a place to whoever is next."""
        if self._waiting:
            heapq.heappop(self._waiting)[2].set()
        else:
            self._free += 1
