"""A look at something, again and again, each time when the last one said.

On asyncio the loop itself calls: a task that only waits for its next look is five kilobytes of an idle run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio

from backplane.process.loop import asyncio_loop, register

if TYPE_CHECKING:
    import asyncio


class Alarm:
    """Calls `look` at once, and then after as many seconds as it gave, until that is None.

    It must not block or raise, and it may be called outside of any task.

    Args:
        start_soon: starts a task where the loop does not call.
    """

    def __init__(self, start_soon: Callable[..., object], look: Callable[[], float | None]) -> None:
        self._look = look
        self._loop = asyncio_loop()
        self._due: asyncio.Handle | None = None
        self._rung = anyio.Event() if self._loop is None else None
        if self._loop is None:
            start_soon(self._in_turns)
        else:
            self._call()

    def ring(self) -> None:
        """Something has happened: the next look is due now."""
        if self._rung is not None:
            self._rung.set()
        elif self._due is not None and self._loop is not None:
            self._due.cancel()
            self._due = register(self._loop.call_soon, self._call)

    def _call(self) -> None:
        assert self._loop is not None
        due_s = self._look()
        self._due = None if due_s is None else register(self._loop.call_later, due_s, self._call)

    async def _in_turns(self) -> None:
        assert self._rung is not None
        while (due_s := self._look()) is not None:
            with anyio.move_on_after(due_s):
                await self._rung.wait()
            self._rung = anyio.Event()
