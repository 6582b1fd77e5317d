"""Waiting for bytes: what was read is never lost, and nobody is called who does not wait."""

from __future__ import annotations

import os
from collections.abc import Iterator

import anyio
import anyio.abc
import pytest

from backplane.process.aio import Readable

pytestmark = pytest.mark.anyio

WAIT_S = 5.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


class Taker:
    """Reads what there is; satisfied after so many bytes."""

    def __init__(self, fd: int, enough: int) -> None:
        self.fd = fd
        self.enough = enough
        self.calls = 0
        self.data = b""

    def __call__(self) -> bool:
        self.calls += 1
        self.data += os.read(self.fd, 64)
        return len(self.data) >= self.enough


async def test_the_wait_lasts_until_the_taker_has_enough(pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    readable, take = Readable(ours), Taker(ours, 4)
    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(readable.until, take)
            while len(take.data) < 4:
                os.write(theirs, b"a")
                before = take.calls
                while take.calls == before:
                    await anyio.sleep(0.001)
        # And again, over the same registration.
        os.write(theirs, b"b")
        take.enough = 5
        await readable.until(take)
    readable.close()
    assert take.data == b"aaaab"


async def test_nothing_is_taken_while_nobody_waits_and_nothing_is_lost(pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    readable, take = Readable(ours), Taker(ours, 1)
    with anyio.fail_after(WAIT_S):
        os.write(theirs, b"a")
        await readable.until(take)
        os.write(theirs, b"b")
        for _ in range(20):
            await anyio.sleep(0.001)
        assert take.calls == 1
        take.enough = 2
        await readable.until(take)
    readable.close()
    assert take.data == b"ab"


async def test_a_wait_that_was_cancelled_can_be_taken_up_again(pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    readable, take = Readable(ours), Taker(ours, 2)
    with anyio.fail_after(WAIT_S):
        with anyio.move_on_after(0.02) as given_up:
            await readable.until(take)
        assert given_up.cancelled_caught
        os.write(theirs, b"ab")
        await readable.until(take)
    readable.close()
    assert take.data == b"ab"


async def test_waking_ends_the_wait(pipe: tuple[int, int]) -> None:
    ours, _ = pipe
    readable, take = Readable(ours), Taker(ours, 1)
    ended = anyio.Event()

    async def wait() -> None:
        await readable.until(take)
        ended.set()

    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            while not ended.is_set():
                await anyio.sleep(0.001)
                readable.wake()
    readable.close()
    assert take.calls == 0


async def test_what_the_taker_raises_is_raised_where_it_is_waited_for(pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    readable = Readable(ours)

    def take() -> bool:
        raise KeyError(os.read(ours, 64))

    os.write(theirs, b"a")
    with anyio.fail_after(WAIT_S), pytest.raises(KeyError, match="a"):
        await readable.until(take)
    readable.close()
