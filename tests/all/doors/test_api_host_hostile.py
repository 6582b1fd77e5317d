"""Models that mean harm: counters that are none, names and inputs of any kind, calls without end, and policies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from backplane.config import Settings
from backplane.contract.events import CommandExecuted, ToolResult
from backplane.contract.work import PolicyProfile, RuntimeConfig
from backplane.runtime import backends
from backplane.testing import Call, Fault, Turn
from tests.api_agent import LIMITS, call, job, of, solve
from tests.runs import backplane_of, go, order, plane

# What is tested here runs in a child with a loop of its own.
pytestmark = pytest.mark.anyio
ONE_CHOICE = (
    '{"choices": [{"index": 0, "message": {"role": "assistant", "content": "done"}, "finish_reason": "stop"}], '
    '"model": "m-1", "usage": %s}'
)


# Counters -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "usage",
    ['{"prompt_tokens": -5, "completion_tokens": "7"}', '{"prompt_tokens": 1.5, "completion_tokens": true}',
     '{"prompt_tokens": 5000000000000000000000000, "completion_tokens": {}}', '"many"', "null"],
)  # fmt: skip
async def test_counters_that_are_none_are_not_known_and_nothing_is_earned_by_them(
    usage: str, tmp_path: Path, backplane_home: Path
) -> None:
    raw = Fault(raw=(ONE_CHOICE % usage).encode(), headers={"content-type": "application/json"})
    run, _, _ = await solve(backplane_home, [Turn(fault=raw)], job(tmp_path, config=RuntimeConfig(max_budget_usd=1.0)))
    assert run.receipt.outcome == "partial"
    assert run.receipt.usage.estimated_cost_usd is None
    for name in ("input_tokens", "output_tokens"):
        counted = getattr(run.receipt.usage, name)
        assert counted is None or 0 <= counted <= 7


# Calls ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["openai_compatible", "gemini_ai_studio"])
async def test_names_ids_and_inputs_of_any_kind_are_answered_and_the_run_goes_on(
    protocol: Any, tmp_path: Path, backplane_home: Path
) -> None:
    deep: Any = "x"
    for _ in range(200):
        deep = {"path": deep}
    calls: tuple[Call, ...] = (
        Call(name="no\nsuch\x00tool", input={}, id="a\nb"), Call(name="x" * 100_000, input={}),
        Call(name="bash", input={"command": "echo \x00"}), Call(name="read_file", input={"path": deep}),
        Call(name="read_file", input={"path": "a"}, id="i" * 200_000), Call(name="", input={}),
    )  # fmt: skip
    if protocol != "gemini_ai_studio":  # Arguments are text everywhere else.
        calls += (Call(name="bash", input="[" * 60_000), Call(name="bash", input='["ls"]'))
    run, events, _ = await solve(backplane_home, [Turn(calls=calls), Turn(text="done")], job(tmp_path), protocol)
    assert run.receipt.outcome == "complete", run.receipt
    results = of(ToolResult, events)
    assert len(results) == len(calls)
    assert all(result.is_error for result in results)


async def test_a_model_that_calls_for_ever_is_ended_by_a_limit_that_nobody_named(
    tmp_path: Path, backplane_home: Path
) -> None:
    turns = [Turn(calls=(call("glob", pattern="*"),)) for _ in range(260)]
    run, _, server = await solve(backplane_home, turns, job(tmp_path))
    assert run.receipt.outcome == "partial"
    # A request whose connection broke before a word of its answer came is sent again, and is no further turn.
    assert len({len(request.body["messages"]) for request in server.requests}) == 250


# Policy ---------------------------------------------------------------------------------------------------------------


async def test_a_call_that_the_policy_forbids_is_held_by_the_host_and_no_violation(
    tmp_path: Path, backplane_home: Path
) -> None:
    policy = PolicyProfile(disallowed_tools=("bash",), deny_write=("*.lock",))
    calls = (call("bash", command="touch made"), call("write_file", path="a.lock", content="x"))
    run, events, _ = await solve(backplane_home, [Turn(calls=calls), Turn(text="no")], job(tmp_path, policy=policy))
    enforcement = backplane_of(run)["enforcement"]
    assert "violations" not in enforcement
    assert {row["rule"]: row["layer"] for row in enforcement["rules"]}.items() >= {
        ("disallowed_tools", "host"), ("deny_write", "host")
    }  # fmt: skip
    assert not of(CommandExecuted, events)


@pytest.mark.parametrize("host", ["shell", "mock"])
async def test_every_host_of_the_kit_puts_what_is_forbidden_on_record(
    host: str, tmp_path: Path, backplane_home: Path
) -> None:
    steps = [{"tool": {"name": "bash", "input": {"command": "touch made"}}}] if host == "mock" else []
    work = order(tmp_path, *steps, task="touch made", policy=PolicyProfile(disallowed_tools=("bash",)))
    backend = backends.find(host, Settings(limits=LIMITS), os.environ)
    async with plane(backplane_home, LIMITS) as control:
        run, _ = await go(control, work, backend)
    enforcement = backplane_of(run)["enforcement"]
    assert "violations" not in enforcement
    assert [row["layer"] for row in enforcement["rules"] if row["rule"] == "disallowed_tools"] == ["host"]
    assert not (tmp_path / "made").exists()
