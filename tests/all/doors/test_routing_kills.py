"""Failover after a kill: no side effect is repeated, and every order ends in the declared way."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import anyio
import pytest

import backplane
from backplane.api import TaskRouter
from backplane.config import BackendSettings, RoutingSettings, Settings
from backplane.contract.capability import Requirement, Requirements
from backplane.contract.work import WorkOrder, WorkspaceSpec
from backplane.errors import CapabilityError, ConfigError
from backplane.routing import TaskDescriptor
from backplane.runtime.plane import ControlPlane
from backplane.testing import ModelServer
from tests.peers import PYTHON, ROOT
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


WORKER = """
import json, os, sys
from backplane.contract.capability import NATIVE
from backplane.host import Done, Host, main

async def work(run):
    die = json.loads(os.environ["DIES"]).get(sys.argv[1], 0)
    root, history = run.order.workspace.root, run.order.abp("history") or []
    seen = {m["tool_call_id"] for m in history if m["role"] == "tool"}
    asked = {c["id"] for m in history for c in m.get("tool_calls", ())}
    told = 0
    async def may_die():
        nonlocal told
        told += 1
        if told == die:
            os._exit(9)
    await run.message("I begin")
    await may_die()
    for step in range(4):
        id = f"step-{step}"
        if id in seen or id in asked:  # Done, or unknown: never repeated by itself.
            continue
        await run.tool_call("work", {"step": step}, id)
        await may_die()
        with open(os.path.join(root, "effects"), "a") as file:
            file.write(f"{step}\\n")
        await may_die()
        await run.tool_result("work", "done", id=id)
        await may_die()
    await run.message("finished")
    return Done()

main(Host(id="worker", capabilities={"streaming": NATIVE}, heeds=("context", "history")), work)
"""
"""Does four things, each once; ends at the `die`th moment: before its first effect, at a call, an effect, a result."""


@pytest.mark.anyio
async def test_the_python_door_asks_the_router_and_goes_on(backplane_home: Path, tmp_path: Path) -> None:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    dies = {"DIES": json.dumps({"one": 1}), "PYTHONPATH": str(ROOT)}
    rows = {name: BackendSettings(command=(*PYTHON, str(path), name), env=dies) for name in ("one", "two")}
    settings = Settings(backends=rows, routing=RoutingSettings(strategy="first_available"), isolation="off")
    wanted = Requirements((Requirement("streaming", "native"),))  # Nobody was ever heard: both are asked for a hello.
    order = WorkOrder("work", workspace=WorkspaceSpec(str(tmp_path)), requirements=wanted)
    run = backplane.run(order, settings=settings, home=backplane_home)
    assert (run.backend_id, run.receipt.outcome) == ("two", "complete")
    assert [one["backend"] for one in run.receipt.backplane["route"]["tried"]] == ["one"]


@pytest.mark.anyio
async def test_a_session_begins_with_the_backend_of_its_task(backplane_home: Path, tmp_path: Path) -> None:
    settings = Settings(backends=backends(tmp_path), isolation="off", limits=QUICK)
    async with ControlPlane(settings, backplane_home, os.environ) as plane:
        router = TaskRouter(plane, lambda _, options: len(options) - 1)
        session, provider = await router.create_session_for_task(TaskDescriptor(type="simple_query"))
        async with session:
            assert (session.provider, provider.name) == ("four", "four")


def test_a_router_in_python_runs_by_type_and_by_a_function(
    backplane_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routing = RoutingSettings(strategy="first_available")
    settings = Settings(backends=backends(tmp_path), routing=routing, isolation="off", limits=QUICK)
    task = json.dumps({"log": str(tmp_path / "log"), "kill_after_s": {}})
    (tmp_path / "work").mkdir()

    async def whole() -> None:
        async with ControlPlane(settings, backplane_home, os.environ) as plane:
            router = TaskRouter(plane)
            assert router.select_provider(TaskDescriptor()).chosen().name == "one"
            asked = await router.run(task, type="simple_query", root=tmp_path / "work", policy="strict")
            assert asked.order.workspace.root == str(tmp_path / "work")
            assert "**/.env*" in asked.order.policy.deny_read
            assert asked.receipt.backplane["route"]["task"]["type"] == "simple_query"
            with pytest.raises(CapabilityError, match="no backend can take this order"):
                await router.run(task, type="code_review", preference="quality")  # Nobody said which is the best.
            with pytest.raises(CapabilityError) as refused:
                await router.run(task, type="code_generation")
            assert "one: capability tool_read, capability tool_write" in (refused.value.evidence or "")
            last = await TaskRouter(plane, lambda _, options: len(options) - 1).run(task)
            assert (last.backend_id, last.receipt.backplane["route"]["strategy"]) == ("four", "custom")
            with pytest.raises(ConfigError, match="custom strategy returned"):
                await TaskRouter(plane, lambda _, options: 99).run(task)

    monkeypatch.chdir(tmp_path)
    anyio.run(whole)


def test_a_pool_of_keys_is_a_group_and_one_that_is_limited_rests(backplane_home: Path, tmp_path: Path) -> None:
    limited = {"fault": {"status": 429, "headers": {"retry-after": "600"}}}
    with ModelServer([limited, {"text": "one", "times": None}]) as server:
        options = {
            "protocol": "openai_compatible", "base_url": server.base_url("openai_compatible"), "model": "m",
            "key_env": "POOL_KEY",
        }  # fmt: skip
        rows = {
            name: BackendSettings(host="api", group="pool", env={"POOL_KEY": f"key-of-{name}"}, options=options)
            for name in ("a", "b")
        }
        settings = Settings(backends=rows, isolation="off")
        runs = [backplane.run("x", root=tmp_path, settings=settings, home=backplane_home) for _ in range(2)]
        keys = [request.headers["authorization"].removeprefix("Bearer key-of-") for request in server.requests]
    assert [run.receipt.outcome for run in runs] == ["complete", "complete"]
    assert keys[1] == keys[2] != keys[0]
    assert [(one["backend"], one["code"]) for one in runs[0].receipt.backplane["route"]["tried"]] == [
        (keys[0], "backend_rate_limited")
    ]
    other = next(one for one in runs[1].receipt.backplane["route"]["considered"] if one["backend"] == keys[0])
    assert [obstacle["kind"] for obstacle in other["why_not"]] == ["rate_limited"]
