"""Failover under kills at any moment: no side effect is repeated, and every order ends in the declared way."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import anyio
import pytest

from backplane.api import TaskRouter
from backplane.config import RoutingSettings, Settings
from backplane.contract.work import WorkOrder, WorkspaceSpec
from backplane.runtime.plane import ControlPlane
from tests.all.doors.test_routing_kills import backends, lines_of
from tests.runs import QUICK


def orders_with_kills(folder: Path, count: int, seed: int) -> dict[str, int]:
    """Run orders whose hosts are killed at random, two at a time; how each ended, by what was seen."""
    draw = random.Random(seed)
    routing = RoutingSettings(strategy="first_available")
    settings = Settings(backends=backends(folder), routing=routing, isolation="off", limits=QUICK)
    ended: dict[str, int] = {}

    async def one(number: int, home: Path, log: Path, kills: dict[str, float]) -> None:
        task = json.dumps({"log": str(log), "kill_after_s": kills})
        root = home / "work"
        root.mkdir(parents=True)
        async with ControlPlane(settings, home / "state", os.environ) as plane:
            order = WorkOrder(task, workspace=WorkspaceSpec(str(root)))
            run = await TaskRouter(plane).run(order)
        effects = lines_of(log)
        assert len(effects) <= 1, (number, effects)
        route = run.receipt.backplane["route"]
        tried = route.get("tried", [])
        assert len(tried) <= 2
        for attempt in tried:
            assert (attempt["code"], attempt.get("effect")) == ("backend_crashed", None), number
            assert attempt["backend"] in kills
        told = [event for event in run.receipt.trace if getattr(event, "tool_name", "") == "bash"]
        if run.receipt.outcome == "complete":
            assert effects == [run.backend_id]
            way = "complete" if not tried else "complete elsewhere"
        else:
            assert run.error is not None
            assert run.error.code == "backend_crashed"
            assert told or len(tried) == 2, "it ends at its effect, or at the third attempt"
            way = "stopped after its effect" if told else "three attempts"
            assert told or not effects
        ended[way] = ended.get(way, 0) + 1

    async def all_of_them() -> None:
        room = anyio.Semaphore(2)

        async def in_room(number: int, kills: dict[str, float]) -> None:
            async with room:
                await one(number, folder / f"home{number}", folder / f"log{number}", kills)

        async with anyio.create_task_group() as tasks:
            for number in range(count):
                killed = draw.choice((("one",), ("one", "two"), ("one", "two", "three")))
                tasks.start_soon(in_room, number, {name: draw.uniform(0, 0.07) for name in killed})

    anyio.run(all_of_them)
    return ended


@pytest.mark.timeout(180)
def test_no_effect_is_repeated_whenever_a_host_is_killed(tmp_path: Path) -> None:
    ended = orders_with_kills(tmp_path, 24, seed=1)
    assert sum(ended.values()) == 24
    assert ended.get("complete elsewhere", 0) > 3
    assert ended.get("stopped after its effect", 0) > 0
