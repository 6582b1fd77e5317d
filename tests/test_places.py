"""Places for runs: never more than there are, by rank, and none is lost by whoever gives up."""

from __future__ import annotations

import random
from pathlib import Path

import anyio
import pytest

from backplane.routing.task import RANKS
from backplane.runtime.places import Places, rank_of
from tests.runs import mock_backend, order, plane

pytestmark = pytest.mark.anyio


async def test_whoever_waits_goes_by_rank_and_then_by_who_came_first() -> None:
    places, went = Places(1), []
    await places.acquire(1)

    async def wait(rank: int, name: str) -> None:
        await places.acquire(rank)
        went.append(name)
        places.release()

    async with anyio.create_task_group() as tasks:
        for rank, name in ((0, "low"), (1, "a"), (3, "critical"), (1, "b"), (2, "high")):
            tasks.start_soon(wait, rank, name)
            await anyio.wait_all_tasks_blocked()
        assert places.waiting == 5
        places.release()
    assert went == ["critical", "high", "a", "b", "low"]


async def test_no_place_is_lost_or_given_twice_however_many_give_up() -> None:
    draw = random.Random(1)
    places, inside, most = Places(3), 0, 0

    async def one(patience_s: float, rank: int) -> None:
        nonlocal inside, most
        with anyio.move_on_after(patience_s):
            await places.acquire(rank)
            inside += 1
            most = max(most, inside)
            try:
                await anyio.sleep(0.002)
            finally:
                inside -= 1
                places.release()

    async with anyio.create_task_group() as tasks:
        for _ in range(200):
            tasks.start_soon(one, draw.uniform(0, 0.05), draw.randrange(4))
    assert (inside, most, places.waiting) == (0, 3, 0)
    for _ in range(3):
        with anyio.fail_after(1):
            await places.acquire(0)


def test_an_order_that_names_no_priority_is_a_normal_one() -> None:
    assert rank_of(None) == RANKS["normal"]
    assert rank_of({"priority": "high"}) == RANKS["high"]
    assert rank_of({"priority": 7}) == RANKS["normal"]
    assert rank_of("high") == RANKS["normal"]


async def test_an_order_of_high_priority_runs_before_those_that_came_first(
    backplane_home: Path, tmp_path: Path
) -> None:
    ended: list[str] = []
    async with plane(backplane_home, runs_max=1) as own, anyio.create_task_group() as tasks:

        async def one(priority: str, *steps: dict[str, float]) -> None:
            wanted = order(tmp_path, *steps).with_abp("route", {"priority": priority})
            async with own.start(wanted, mock_backend("memory")) as run:
                await run.wait()
            ended.append(priority)

        tasks.start_soon(one, "normal", {"sleep_s": 0.3})
        await anyio.sleep(0.1)
        for priority in ("low", "normal", "critical"):
            tasks.start_soon(one, priority)
            await anyio.sleep(0.02)
    assert ended == ["normal", "critical", "normal", "low"]
