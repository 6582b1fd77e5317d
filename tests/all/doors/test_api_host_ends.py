"""How a run of the host `api` ends: limits, failures of the service, answers of a given shape, cancelling."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest

from backplane.contract.events import (
    AgentEvent,
    AssistantDelta,
    ToolResult,
)
from backplane.contract.work import RuntimeConfig, WorkOrder
from backplane.runtime.backends import Backend
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run
from backplane.testing import PROTOCOLS, Fault, ModelServer, ProtocolName, Turn, When
from tests.api_agent import KEY, LIMITS, LOOP, api, call, everything, job, of, raw, solve
from tests.conftest import children
from tests.runs import backplane_of, ended, plane

# What is tested here runs in a child with a loop of its own.
pytestmark = pytest.mark.anyio


# Limits ---------------------------------------------------------------------------------------------------------------


async def test_the_turns_of_an_order_are_not_exceeded(tmp_path: Path, backplane_home: Path) -> None:
    work = job(tmp_path, mode="pass_through", config=RuntimeConfig(max_turns=3))
    run, events, server = await solve(backplane_home, [LOOP], work)
    assert ended(run) == ("max_turns", "policy_denied", "partial")
    assert len(server.requests) == 3
    assert (tmp_path / "count").read_text() == "x\nx\n"
    assert of(ToolResult, events)[-1].output.startswith("not run: ")


async def test_an_answer_in_the_last_turn_is_a_whole_one(tmp_path: Path, backplane_home: Path) -> None:
    work = job(tmp_path, config=RuntimeConfig(max_turns=2))
    run, _, _ = await solve(backplane_home, [msgspec.structs.replace(LOOP, times=1), Turn(text="ok")], work)
    assert ended(run) == ("complete", None, "complete")


async def test_the_budget_of_an_order_ends_the_run(tmp_path: Path, backplane_home: Path) -> None:
    # A turn costs 120 millionths.
    work = job(tmp_path, mode="pass_through", config=RuntimeConfig(max_budget_usd=0.0003))
    run, _, server = await solve(backplane_home, [LOOP], work)
    assert ended(run) == ("budget", "policy_denied", "partial")
    assert len(server.requests) == 3
    assert (run.receipt.usage.input_tokens, run.receipt.usage.estimated_cost_usd) == (300, 0.00036)
    assert (tmp_path / "count").read_text() == "x\nx\n"


async def test_a_budget_that_cannot_be_held_is_refused_before_anything_is_asked(
    tmp_path: Path, backplane_home: Path
) -> None:
    work = job(tmp_path, config=RuntimeConfig(max_budget_usd=1.0))
    run, _, server = await solve(backplane_home, [LOOP], work, prices=None)
    assert ended(run) == ("failed", "config_invalid", "failed")
    assert server.requests == ()


async def test_a_service_that_counts_nothing_leaves_usage_and_cost_unknown(
    tmp_path: Path, backplane_home: Path
) -> None:
    run, _, _ = await solve(backplane_home, [Turn(text="ok", usage=None)], job(tmp_path))
    assert run.receipt.usage.input_tokens is None
    assert run.receipt.usage.estimated_cost_usd is None
    assert backplane_of(run)["usage"]["input_tokens"] == "unknown"
    work = job(tmp_path, config=RuntimeConfig(max_budget_usd=1.0))
    run, _, _ = await solve(backplane_home, [Turn(calls=LOOP.calls, usage=None, times=None)], work)
    assert ended(run)[2] == "partial"


async def test_an_answer_cut_at_its_length_is_a_part(tmp_path: Path, backplane_home: Path) -> None:
    run, _, _ = await solve(backplane_home, [Turn(text="half of", stop="max_tokens")], job(tmp_path))
    assert ended(run)[2] == "partial"


def refusing(words: str) -> Turn:
    return Turn(when=When(has="/tools"), times=None, fault=Fault(status=400, message=words))


@pytest.mark.parametrize("protocol", ["anthropic", "gemini_ai_studio"])
async def test_a_run_whose_service_took_no_tools_is_partial_unless_the_order_allows_it(
    protocol: ProtocolName, tmp_path: Path, backplane_home: Path
) -> None:
    turns = [refusing("tools are not supported by this model"), Turn(text="I cannot write files.", times=None)]
    run, events, _ = await solve(backplane_home, turns, job(tmp_path), protocol)
    assert ended(run)[2] == "partial"
    assert "took no tools" in everything(run, events)
    assert "config.vendor.api.without_tools" in everything(run, events)
    allowed = job(tmp_path, config=RuntimeConfig(vendor={"api": {"without_tools": True}}))
    run, events, _ = await solve(backplane_home, turns, allowed, protocol)
    assert ended(run)[2] == "complete"
    assert "the service takes no tools" in everything(run, events)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_service_that_refuses_one_tool_is_offered_the_others_and_the_receipt_names_it(
    protocol: ProtocolName, tmp_path: Path, backplane_home: Path
) -> None:
    words = "Invalid schema for function 'web_fetch': a format is not supported"
    refusal = Turn(when=When(anywhere='"web_fetch"'), times=None, fault=Fault(status=400, message=words))
    turns = [refusal, Turn(calls=(call("write_file", path="a.txt", content="x"),)), Turn(text="written")]
    run, events, _ = await solve(backplane_home, turns, job(tmp_path, mode="pass_through"), protocol)
    assert ended(run)[2] == "complete"
    assert (tmp_path / "a.txt").read_text() == "x"
    assert "refuses the tool 'web_fetch'" in everything(run, events)


# Failures -------------------------------------------------------------------------------------------------------------


OPENAI = {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}
CLAUDE = {"message": "prompt is too long: 250000 tokens > 200000 maximum", "type": "invalid_request_error"}
GEMINI = "The input token count (2000000) exceeds the maximum number of tokens allowed (1048576)."
OVERFLOW = {
    "openai_compatible": {"error": OPENAI},
    "openai_responses": {"error": OPENAI},
    "anthropic": {"type": "error", "error": CLAUDE},
    "gemini_ai_studio": {"error": {"code": 400, "status": "INVALID_ARGUMENT", "message": GEMINI}},
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_conversation_that_is_too_long_has_its_own_code(
    protocol: ProtocolName, tmp_path: Path, backplane_home: Path
) -> None:
    turns = [
        msgspec.structs.replace(LOOP, times=1),
        Turn(fault=Fault(status=400, raw=json.dumps(OVERFLOW[protocol]).encode()), times=None),
    ]
    run, _, _ = await solve(backplane_home, turns, job(tmp_path), protocol)
    assert ended(run) == ("failed", "backend_context_length", "failed")
    assert run.receipt.usage.input_tokens == 100


@pytest.mark.parametrize(
    ("status", "code"), [(401, "backend_auth_failed"), (404, "backend_model_not_found"), (429, "backend_rate_limited")]
)
async def test_a_failure_of_the_service_ends_the_run_with_its_code(
    status: int, code: str, tmp_path: Path, backplane_home: Path
) -> None:
    message = "the model does not exist" if status == 404 else "no"
    turns = [Turn(fault=Fault(status=status, message=message, headers={"retry-after": "0"}), times=None)]
    run, events, _ = await solve(backplane_home, turns, job(tmp_path))
    assert ended(run) == ("failed", code, "failed")
    assert KEY not in everything(run, events)


async def test_an_answer_that_is_withheld_has_its_own_code(tmp_path: Path, backplane_home: Path) -> None:
    run, _, _ = await solve(backplane_home, [Turn(text="I", stop="content_filter")], job(tmp_path))
    assert ended(run) == ("failed", "backend_content_filtered", "failed")


async def test_an_order_without_a_model_or_with_a_strange_parameter_is_refused(
    tmp_path: Path, backplane_home: Path
) -> None:
    run, _, server = await solve(backplane_home, [], job(tmp_path), model=None)
    assert ended(run)[1] == "config_invalid"
    work = job(tmp_path, config=RuntimeConfig(vendor={"api": {"tempature": 1}}))
    run, _, server = await solve(backplane_home, [], work)
    assert ended(run)[1] == "config_invalid"
    assert "tempature" in str(run.error)
    assert server.requests == ()


# Answers of a given shape ---------------------------------------------------------------------------------------------


SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}


def shaped(root: Path, schema: Any = SCHEMA) -> WorkOrder:
    return job(root, config=RuntimeConfig(vendor={"abp": {"output_schema": schema}}))


async def test_an_answer_of_the_right_shape_is_in_the_receipt(tmp_path: Path, backplane_home: Path) -> None:
    turns = [msgspec.structs.replace(LOOP, times=1), Turn(text='{"sum": 4}')]
    run, _, server = await solve(backplane_home, turns, shaped(tmp_path))
    assert ended(run)[0] == "complete"
    assert raw(run)["structured_output"] == {"sum": 4}
    assert run.receipt.capabilities["structured_output_json_schema"] == "emulated"
    assert '\\"sum\\"' in json.dumps(server.requests[0].body)


async def test_an_answer_of_the_wrong_shape_is_repaired_twice_at_most(tmp_path: Path, backplane_home: Path) -> None:
    wrong = [Turn(text="four"), Turn(text='{"sum": "4"}')]
    run, events, server = await solve(backplane_home, [*wrong, Turn(text='{"sum": 4}')], shaped(tmp_path))
    assert ended(run)[0] == "complete"
    assert sum("repair" in getattr(event, "message", "") for event in events) == 2
    assert "/sum" in json.dumps(server.requests[2].body)
    run, _, server = await solve(backplane_home, [*wrong, Turn(text="{}"), Turn(text="no")], shaped(tmp_path))
    assert ended(run) == ("failed", "validation_failed", "failed")
    assert len(server.requests) == 3


async def test_a_schema_that_is_none_is_refused_before_anything_is_asked(tmp_path: Path, backplane_home: Path) -> None:
    run, _, server = await solve(backplane_home, [], shaped(tmp_path, {"type": 3}))
    assert ended(run)[1] == "config_invalid"
    assert server.requests == ()


# Cancelling -----------------------------------------------------------------------------------------------------------


async def cancelled_at(
    control: ControlPlane, work: WorkOrder, backend: Backend, is_time: Any, server: ModelServer
) -> tuple[Run, list[AgentEvent]]:
    events: list[AgentEvent] = []
    async with control.start(work, backend) as run:
        with anyio.fail_after(60):
            async for event in run:
                events.append(event)
                if is_time(event):
                    await run.cancel()
    return run, events


async def test_a_run_cancelled_in_the_middle_of_a_stream_closes_it(tmp_path: Path, backplane_home: Path) -> None:
    turns = [Turn(text="many words", pieces=5, fault=Fault(stall_after_frames=3, stall_comment_ms=50))]
    with ModelServer(turns) as server:
        async with plane(backplane_home, LIMITS) as control:
            run, _ = await cancelled_at(
                control, job(tmp_path), api(server), lambda event: type(event) is AssistantDelta, server
            )
        assert await anyio.to_thread.run_sync(server.wait_end, 1) == "left"
    assert ended(run) == ("cancelled", None, "partial")


async def test_a_run_cancelled_in_the_middle_of_a_command_leaves_nothing(tmp_path: Path, backplane_home: Path) -> None:
    turns = [Turn(calls=(call("bash", command="setsid sleep 300 & echo up; sleep 300"),))]
    with ModelServer(turns) as server:
        async with plane(backplane_home, LIMITS) as control:
            run, _ = await cancelled_at(
                control, job(tmp_path), api(server), lambda event: "output" in (event.ext or {}), server
            )
    assert ended(run) == ("cancelled", None, "partial")
    assert "swept" not in backplane_of(run)
    assert not children(os.getpid())
