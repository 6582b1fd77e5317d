"""A block made of its beginning and its end: what only the beginning needs is let go of once it is over.

A generator keeps all of it for as long as the block lasts, and is itself the larger part of a kilobyte.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SpannedBlock(Generic[T]):
    """`async with` calls `begin`, gives what that gave, and calls `end` with it, however the block is left.

    Args:
        begin: what it raises comes out, and then there is nothing to end.
    """

    __slots__ = ("_begin", "_end", "_value")

    def __init__(self, begin: Callable[[], Awaitable[T]], end: Callable[[T], Awaitable[None]]) -> None:
        self._begin: Callable[[], Awaitable[T]] | None = begin
        self._end = end
        self._value: T

    async def __aenter__(self) -> T:
        begin, self._begin = self._begin, None
        assert begin is not None, "entered once"
        self._value = await begin()
        return self._value

    async def __aexit__(self, *how: object) -> None:
        await self._end(self._value)
