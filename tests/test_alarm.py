"""Looks: each comes when the last one said, or when it is rung for, and none after the last."""

from __future__ import annotations

import anyio
import pytest

from backplane.process.alarm import Alarm

pytestmark = pytest.mark.anyio

NEVER_S = 3600.0
WAIT_S = 5.0


class Looks:
    """Gives these seconds, one after another, then None."""

    def __init__(self, *due_s: float) -> None:
        self.left = list(due_s)
        self.seen = 0
        self.last = anyio.Event()

    def __call__(self) -> float | None:
        self.seen += 1
        if self.left:
            return self.left.pop(0)
        self.last.set()
        return None


async def test_each_look_says_when_the_next_is_due() -> None:
    looks = Looks(0.001, 0.001)
    async with anyio.create_task_group() as tasks:
        Alarm(tasks.start_soon, looks)
        with anyio.fail_after(WAIT_S):
            await looks.last.wait()
    assert looks.seen == 3


async def test_one_that_is_rung_for_does_not_wait_until_it_is_due() -> None:
    looks = Looks(NEVER_S, NEVER_S)
    async with anyio.create_task_group() as tasks:
        alarm = Alarm(tasks.start_soon, looks)
        with anyio.fail_after(WAIT_S):
            while not looks.last.is_set():
                alarm.ring()
                await anyio.sleep(0.001)
    assert looks.seen == 3


async def test_nobody_looks_after_the_last() -> None:
    looks = Looks()
    async with anyio.create_task_group() as tasks:
        alarm = Alarm(tasks.start_soon, looks)
        with anyio.fail_after(WAIT_S):
            await looks.last.wait()
        alarm.ring()
        await anyio.sleep(0.01)
    assert looks.seen == 1
