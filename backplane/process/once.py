"""Something that happens once and can be waited for; it weighs nothing until somebody waits.

An event of the loop's is a kilobyte, and an idle run has many that nobody ever waits for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import anyio
import anyio.lowlevel

SECOND_LOOK_S: Final = 0.05
"""After a deadline, for what came in time to be read: a process that was stopped finds its timers run out first."""


async def in_time(wait: Callable[[], Awaitable[object]], timeout_s: float) -> bool:
    """Wait at most this long, and look once more then; whether it came."""
    for seconds in (timeout_s, SECOND_LOOK_S):
        with anyio.move_on_after(seconds):
            await wait()
            return True
    return False


class Once:
    """Not yet, then for good."""

    __slots__ = ("_waited", "happened")

    def __init__(self) -> None:
        self.happened = False
        self._waited: anyio.Event | None = None

    def set(self) -> None:
        """It has happened: who waits goes on."""
        self.happened = True
        if self._waited is not None:
            self._waited.set()
            self._waited = None

    async def wait(self) -> None:
        """Come back once it has happened."""
        if self.happened:
            await anyio.lowlevel.checkpoint()
            return
        if self._waited is None:
            self._waited = anyio.Event()
        await self._waited.wait()
