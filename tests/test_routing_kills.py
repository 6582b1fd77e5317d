"""Failover under kills at any moment: no side effect is repeated, and every order ends in the declared way."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import anyio
import pytest

from backplane.config import BackendSettings, RoutingSettings, Settings
from backplane.contract.work import WorkOrder, WorkspaceSpec
from backplane.errors import CapabilityError, ConfigError
from backplane.routing import TaskDescriptor
from backplane.routing.driver import TaskRouter
from backplane.runtime.plane import ControlPlane
from tests.runs import HELLO, PRELUDE, QUICK

KILLED = """
import random, threading
hello()
run = take()
words = json.loads(run["work_order"]["task"])
after_s = words["kill_after_s"].get(NAME)
if after_s is not None:
    threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
def tool(name, number):
    body = {"ts": "2026-01-15T12:00:00Z", "type": "tool_call", "tool_name": name, "tool_use_id": str(number),
            "parent_tool_use_id": None, "input": {"path": "a", "command": "x"}}
    put({"t": "event", "ref_id": run["id"], "event": body})
for number in range(10):
    tool("read_file", number)
    time.sleep(0.003)
tool("bash", 10)
time.sleep(0.003)
with open(words["log"], "a") as log:
    log.write(NAME + "\\n")
for number in range(11, 15):
    tool("grep", number)
    time.sleep(0.003)
put(final(run))
end()
"""
"""Reads for a while, tells that it does something and does it, reads again; a timer kills it at any moment of that."""


def backends(folder: Path) -> dict[str, BackendSettings]:
    made = {}
    for name in ("one", "two", "three", "four"):
        path = folder / f"{name}.py"
        path.write_text(PRELUDE.format(hello=json.dumps(HELLO)) + f"NAME = {name!r}\n" + KILLED)
        made[name] = BackendSettings(command=(sys.executable, "-I", "-S", str(path)))
    return made


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


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


def test_a_router_in_python_runs_by_type_and_by_a_function(
    backplane_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routing = RoutingSettings(strategy="first_available")
    settings = Settings(backends=backends(tmp_path), routing=routing, isolation="off", limits=QUICK)
    task = json.dumps({"log": str(tmp_path / "log"), "kill_after_s": {}})

    async def whole() -> None:
        async with ControlPlane(settings, backplane_home, os.environ) as plane:
            router = TaskRouter(plane)
            assert router.select_provider(TaskDescriptor()).chosen().name == "one"
            asked = await router.simple_query(task)
            assert asked.receipt.backplane["route"]["task"]["type"] == "simple_query"
            with pytest.raises(CapabilityError, match="no backend can take this order"):
                await router.review_code(task)  # Nobody said which is the best.
            with pytest.raises(CapabilityError) as refused:
                await router.generate_code(task)
            assert "one: capability tool_read, capability tool_write" in (refused.value.evidence or "")
            last = await TaskRouter(plane, lambda _, options: len(options) - 1).run(task)
            assert (last.backend_id, last.receipt.backplane["route"]["strategy"]) == ("four", "custom")
            with pytest.raises(ConfigError, match="custom strategy returned"):
                await TaskRouter(plane, lambda _, options: 99).run(task)

    monkeypatch.chdir(tmp_path)
    anyio.run(whole)
