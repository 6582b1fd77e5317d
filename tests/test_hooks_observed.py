"""Hooks that observe a run: when they are called, what they get, and that nothing of it changes the run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from backplane import Hook, HookCall
from backplane.config import HookSettings, Settings
from backplane.contract.capability import NATIVE
from backplane.contract.events import TaskReported, Warned
from backplane.errors import ConfigError
from backplane.host import EXTENSIONS, Done, Host, HostRun
from backplane.runtime import hooks
from backplane.runtime.backends import Backend, from_command
from tests.runs import QUICK, ended, memory, order, plane
from tests.test_hooks import go, program, told

pytestmark = pytest.mark.anyio

WRITE: dict[str, Any] = {"write": {"path": "b.txt", "content": "beta"}}


def failures(events: list[Any]) -> list[dict[str, Any]]:
    warned = [event.ext for event in events if isinstance(event, Warned) and isinstance(event.ext, dict)]
    return [ext["hook_failed"] for ext in warned if "hook_failed" in ext]


async def test_functions_observe_the_start_and_the_end_of_a_run(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    seen: list[HookCall] = []

    async def start(call: HookCall) -> None:
        assert not (root / "b.txt").exists()
        seen.append(call)

    def end(call: HookCall) -> None:
        assert (root / "b.txt").exists()
        seen.append(call)

    run, events = await go(backplane_home, order(root, WRITE), mock, Hook("run_start", start), Hook("run_end", end))
    assert ended(run) == ("complete", None, "complete")
    assert [(call.event, call.tool, call.root, call.run) for call in seen] == [
        ("run_start", "", str(root), run.id),
        ("run_end", "", str(root), run.id),
    ]
    assert [call.input for call in seen] == [
        {"task": "do it", "backend": "mock"},
        {"reason": "complete", "code": None},
    ]
    assert told(run)["counts"] == {"end": {"observed": 1}, "start": {"observed": 1}}
    assert failures(events) == []
    # An order whose hooks only observe needs no host that asks, and no hook of tools.
    assert "hooks_pre_tool_use" not in run.receipt.capabilities


async def test_commands_of_the_configuration_observe_a_run_of_any_host(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    command = program(tmp_path, f"open({str(tmp_path / 'seen')!r}, 'a').write(json.dumps(call) + '\\n')")
    rows = tuple(HookSettings(event=event, command=command) for event in ("run_start", "run_end"))
    backend = from_command(("sh", "-c", "exit 0"), cwd=tmp_path, limits=QUICK)
    run, _ = await go(backplane_home, order(root), backend, settings=Settings(hooks=rows))
    assert run.receipt.outcome == "failed"
    # The host said no hello, so the order was never sent.
    calls = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert [(call["event"], call["input"]) for call in calls] == [
        ("run_end", {"reason": "host_exit", "code": "protocol_handshake_failed"})
    ]


@pytest.mark.parametrize(
    "body", ["sys.exit(3)", "sys.exit(2)", "print('no json')", 'print(\'{"decision": "deny"}\')', "time.sleep(60)"]
)
@pytest.mark.parametrize("event", ["run_start", "run_end"])
async def test_a_hook_that_fails_or_denies_is_a_warning_and_changes_nothing(
    event: Any, body: str, mock: Backend, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    hook = Hook(event, program(tmp_path, body), name="eye", timeout_ms=700)
    run, events = await go(backplane_home, order(root, WRITE), mock, hook)
    assert ended(run) == ("complete", None, "complete")
    assert (root / "b.txt").exists()
    assert failures(events) == [{"hook": "eye", "event": event}]


@pytest.mark.parametrize("steps", [({"say": "on"},), ({"say": "on"}, {"sleep_s": 60})])
async def test_a_cancelled_run_does_not_wait_long_for_a_hook_that_hangs(
    steps: tuple[dict[str, Any], ...], mock: Backend, backplane_home: Path, root: Path
) -> None:
    async def hang(call: HookCall) -> None:
        await anyio.sleep(60)

    began_s = time.monotonic()
    async with (
        plane(backplane_home) as control,
        control.start(order(root, *steps), mock, hooks=[Hook("run_end", hang)]) as run,
    ):
        async for _ in run:
            await run.cancel()
    assert run.receipt.outcome
    assert time.monotonic() - began_s < 10
    assert told(run)["attached"][0]["event"] == "run_end"


async def test_the_end_of_each_sub_agent_is_observed_and_the_run_waits_for_it(
    anyio_backend: str, backplane_home: Path, root: Path
) -> None:
    seen: list[Any] = []

    async def slow(call: HookCall) -> None:
        await anyio.sleep(0.3)
        seen.append(call.input)

    def bad(call: HookCall) -> None:
        raise ValueError("no eye")

    async def work(run: HostRun) -> Done:
        assert run.order.abp("hooks") == [{"event": "subagent_end", "above": True}]
        for number in range(3):
            await run.carry("task", {"subagent_end": {"agent_id": str(number)}}, "a sub-agent has ended")
        return Done()

    backend = memory(work, Host(id="two", capabilities={"streaming": NATIVE}, extensions=(*EXTENSIONS, "subagent/1")))
    run, events = await go(
        backplane_home, order(root), backend, Hook("subagent_end", slow), Hook("subagent_end", bad, name="bad")
    )
    assert ended(run) == ("complete", None, "complete")
    assert seen == [{"agent_id": "0"}, {"agent_id": "1"}, {"agent_id": "2"}]
    assert told(run)["counts"] == {"bad": {"failed": 3}, "slow": {"observed": 3}}
    assert failures(events) == [{"hook": "bad", "event": "subagent_end"}] * 3
    assert sum(isinstance(event, TaskReported) for event in events) == 3


async def test_a_host_that_reports_no_sub_agents_is_refused_for_a_hook_about_them(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    def look(call: HookCall) -> None: ...

    run, _ = await go(backplane_home, order(root, WRITE), mock, Hook("subagent_end", look))
    assert ended(run) == ("refused", "capability_unsupported", "failed")
    assert not (root / "b.txt").exists()


def test_an_order_over_the_line_observes_sub_agents_and_no_moment_of_its_sender(root: Path) -> None:
    (hook,) = hooks.above([{"event": "subagent_end", "above": True}])
    assert hook.run is None
    with pytest.raises(ConfigError):
        hooks.above([{"event": "run_start", "above": True}])
