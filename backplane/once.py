"""Something that happens once and can be waited for; it weighs nothing until somebody waits.

An event of the loop's is a kilobyte, and an idle run has many that nobody ever waits for.
"""

from __future__ import annotations

import anyio
import anyio.lowlevel


class Once:
    """Not yet, then for good."""

    __slots__ = ("_happened", "_waited")

    def __init__(self) -> None:
        self._happened = False
        self._waited: anyio.Event | None = None

    def set(self) -> None:
        """It has happened: who waits goes on."""
        self._happened = True
        if self._waited is not None:
            self._waited.set()
            self._waited = None

    def is_set(self) -> bool:
        return self._happened

    async def wait(self) -> None:
        """Come back once it has happened."""
        if self._happened:
            await anyio.lowlevel.checkpoint()
            return
        if self._waited is None:
            self._waited = anyio.Event()
        await self._waited.wait()
