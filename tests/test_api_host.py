"""The host `api` as a real agent: whole tasks through four protocols against a scripted model, and its limits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest

from backplane import Hook, backends
from backplane.asks import Decision
from backplane.backends import Backend
from backplane.config import BackendSettings, Settings, parse
from backplane.contract import canonical
from backplane.contract.events import (
    AgentEvent,
    AssistantDelta,
    CommandExecuted,
    FileChanged,
    Reasoning,
    ToolCall,
    ToolResult,
)
from backplane.contract.work import ContextPacket, PolicyProfile, RuntimeConfig, Snippet, WorkOrder
from backplane.errors import BackendError, ConfigError
from backplane.runtime import ControlPlane, Run
from backplane.testing import Call, Fault, ModelServer, Turn, Usage
from backplane.upstream.endpoint import ProtocolName
from tests.conftest import children
from tests.peers import PLAIN, PYTHON, ROOT, Child
from tests.peers import run as sent
from tests.runs import QUICK, backplane_of, ended, go, order, plane, saying

pytestmark = pytest.mark.anyio

KEY = "sk-scripted-0123456789abcdef"
PROTOCOLS: tuple[ProtocolName, ...] = ("openai_compatible", "openai_responses", "anthropic", "gemini_ai_studio")
PRICES = {"input": 1, "output": 2, "cache_read": "0.5"}
LIMITS = msgspec.structs.replace(QUICK, hello_s=30.0, idle_s=60.0, cancel_grace_s=2.0)


@pytest.fixture
def anyio_backend() -> str:
    # What is tested here runs in a child with a loop of its own.
    return "asyncio"


def api(server: ModelServer, protocol: ProtocolName = "openai_compatible", key: str = KEY, **options: Any) -> Backend:
    given = {
        "protocol": protocol, "base_url": server.base_url(protocol), "key_env": "SCRIPTED_KEY", "model": "m-1",
        "prices": PRICES, **options,
    }  # fmt: skip
    settings = Settings(backends={"agent": BackendSettings(host="api", options=given)}, limits=LIMITS)
    return backends.find("agent", settings, {**os.environ, "SCRIPTED_KEY": key})


def job(root: Path, task: str = "do it", mode: str = "staged", **members: Any) -> WorkOrder:
    return order(root, task=task, mode=mode, **members)


async def solve(
    home: Path, turns: Sequence[Any], work: WorkOrder, protocol: ProtocolName = "openai_compatible", **options: Any
) -> tuple[Run, list[AgentEvent], ModelServer]:
    with ModelServer(turns) as server:
        async with plane(home, LIMITS) as control:
            run, events = await go(control, work, api(server, protocol, **options))
    return run, events, server


def of(kind: type[Any], events: Sequence[AgentEvent]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def everything(run: Run, events: Sequence[AgentEvent]) -> str:
    return b"".join(run.receipt_chunks()).decode() + b"".join(map(canonical.encode, events)).decode()


def raw(run: Run) -> Any:
    assert run.receipt is not None
    return run.receipt.usage_raw


def call(tool: str, **input: Any) -> Call:
    return Call(name=tool, input=input)


# A whole task ---------------------------------------------------------------------------------------------------------


TASK = (
    Turn(
        text="I look around.",
        calls=(
            call("read_file", path="add.py"),
            call("bash", command="python3 check.py; echo checked; exit 3"),
            call("write_file", path="../outside.py", content="x"),
        ),
        usage=Usage(input=100, output=20, cache_read=40),
    ),
    Turn(
        calls=(
            call("edit_file", path="add.py", old="a - b", new="a + b"),
            call("write_file", path="docs/notes.md", content="fixed\n"),
            call("read_file", path=".env"),
        ),
        usage=Usage(input=200, output=30, cache_read=100),
    ),
    Turn(text="It adds now.", usage=Usage(input=300, output=10, cache_read=200)),
)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_whole_task_is_solved_through_each_protocol(
    protocol: ProtocolName, tmp_path: Path, backplane_home: Path
) -> None:
    (tmp_path / "add.py").write_text("def add(a, b):\n    return a - b\n")
    (tmp_path / "check.py").write_text("import add\nprint(add.add(2, 2))\n")
    (tmp_path / ".env").write_text("SECRET=1\n")
    work = job(tmp_path, policy=PolicyProfile(deny_read=("**/.env*",)))
    run, events, server = await solve(backplane_home, TASK, work, protocol)
    assert ended(run) == ("complete", None, "complete")
    assert server.unscripted == ()
    assert [request.protocol for request in server.requests] == [protocol] * 3

    calls, results = of(ToolCall, events), of(ToolResult, events)
    assert [call.tool_name for call in calls] == [call.name for turn in TASK for call in turn.calls]
    # Parallel calls: each has its answer, in the order of the calls, before the model is asked again.
    assert [call.tool_use_id for call in calls] == [result.tool_use_id for result in results]
    assert len({call.tool_use_id for call in calls}) == len(calls)
    read, failed, outside, edited, written, hidden = results
    assert "a - b" in read.output
    assert (failed.is_error, failed.output) == (True, "0\nchecked\n[exit code 3]")
    assert outside.output.startswith("policy_denied")
    assert not edited.is_error
    assert not written.is_error
    assert (hidden.is_error, hidden.output[:13]) == (True, "policy_denied")
    assert "SECRET" not in json.dumps([request.body for request in server.requests])
    assert [(event.command, event.exit_code) for event in of(CommandExecuted, events)] == [
        ("python3 check.py; echo checked; exit 3", 3)
    ]
    assert [event.path for event in of(FileChanged, events)] == ["add.py", "docs/notes.md"]

    assert run.receipt is not None
    diff = str(run.receipt.verification.git_diff)
    assert "-    return a - b\n+    return a + b\n" in diff
    assert "+fixed\n" in diff
    assert "outside" not in diff
    assert (tmp_path / "add.py").read_text().endswith("a - b\n")
    usage = run.receipt.usage
    assert (usage.input_tokens, usage.output_tokens, usage.cache_read_tokens) == (600, 60, 340)
    assert usage.request_units == 3
    # In dollars for a million: 260 plain at 1, 340 cached at 0.5, 60 made at 2.
    assert usage.estimated_cost_usd == (260 + 170 + 120) / 1e6
    assert raw(run)["protocol"] == protocol
    assert run.receipt.capabilities["tool_bash"] == "emulated"
    assert run.receipt.capabilities["streaming"] == "native"
    assert KEY not in everything(run, events)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_what_is_sent_back_has_every_call_with_its_answer(
    protocol: ProtocolName, tmp_path: Path, backplane_home: Path
) -> None:
    (tmp_path / "add.py").write_text("a - b\n")
    _, _, server = await solve(backplane_home, TASK, job(tmp_path), protocol)
    last = json.dumps(server.requests[-1].body)
    for words in ("[exit code 3]", "policy_denied", "changed 1 place", "made docs/notes.md"):
        assert words in last


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_service_without_streams_is_an_agent_too(
    protocol: ProtocolName, tmp_path: Path, backplane_home: Path
) -> None:
    turns = [Turn(calls=(call("write_file", path="a", content="x"),), usage=Usage(input=3, output=2)), Turn(text="ok")]
    run, events, server = await solve(backplane_home, turns, job(tmp_path), protocol, stream=False)
    assert ended(run) == ("complete", None, "complete")
    assert not any(request.stream for request in server.requests)
    assert [event.path for event in of(FileChanged, events)] == ["a"]


async def test_what_was_said_is_marked_to_be_kept_where_a_service_wants_a_mark(
    tmp_path: Path, backplane_home: Path
) -> None:
    turns = [msgspec.structs.replace(LOOP, times=1), Turn(text="ok")]
    _, _, server = await solve(backplane_home, turns, job(tmp_path), "anthropic")
    for request in server.requests:
        body: Any = request.body
        assert json.dumps(body).count("cache_control") == 2
        assert "cache_control" in json.dumps(body["system"])
        assert "cache_control" in body["messages"][-1]["content"][-1]
    _, _, server = await solve(backplane_home, turns, job(tmp_path), "openai_responses")
    assert "cache_control" not in json.dumps([request.body for request in server.requests])


async def test_a_hook_after_a_tool_changes_what_the_model_sees(tmp_path: Path, backplane_home: Path) -> None:
    def sieve(asked: Any) -> Decision:
        return Decision(decision="modify", text=str(asked.output).replace("4711", "…"))

    turns = [Turn(calls=(call("bash", command="echo code 4711"),)), Turn(text="ok")]
    with ModelServer(turns) as server:
        async with plane(backplane_home, LIMITS) as control:
            hooks = [Hook("post_tool", sieve)]
            async with control.start(job(tmp_path), api(server), hooks=hooks) as run:
                events = [event async for event in run]
    assert of(ToolResult, events)[0].output == "code …\n[exit code 0]"
    body: Any = server.requests[1].body
    assert body["messages"][-1]["content"] == "code …\n[exit code 0]"


async def test_text_of_the_task_and_its_context_reach_the_model(tmp_path: Path, backplane_home: Path) -> None:
    (tmp_path / "a.md").write_text("the context")
    work = job(
        tmp_path,
        "the task",
        context=ContextPacket(files=("a.md", "../no"), snippets=(Snippet("note", "the snippet"),)),
        config=RuntimeConfig(vendor={"api": {"system": "the rules", "temperature": 0.5}}),
    )
    _, _, server = await solve(backplane_home, [Turn(text="ok")], work, max_output_tokens=77)
    body: Any = server.requests[0].body
    system, user = (str(message["content"]) for message in body["messages"])
    assert "the rules" in system
    for words in ("the task", "the context", "the snippet", "../no: not shown"):
        assert words in user
    assert body["temperature"] == 0.5
    assert 77 in (body.get("max_tokens"), body.get("max_completion_tokens"))


async def test_the_model_of_the_order_goes_over_that_of_the_backend(tmp_path: Path, backplane_home: Path) -> None:
    work = job(tmp_path, config=RuntimeConfig(model="m-2"))
    run, _, server = await solve(backplane_home, [Turn(text="ok")], work)
    body: Any = server.requests[0].body
    assert (body["model"], raw(run)["turns"]) == ("m-2", 1)


async def test_thoughts_are_told_as_reasoning_and_not_as_words(tmp_path: Path, backplane_home: Path) -> None:
    turns = [Turn(reasoning="hmm", text="ok")]
    _, events, _ = await solve(backplane_home, turns, job(tmp_path), "anthropic")
    thoughts = "".join(event.reasoning for event in of(Reasoning, events))
    words = "".join(event.text for event in of(AssistantDelta, events))
    assert (thoughts, words) == ("hmm", "ok")


async def test_a_call_that_cannot_be_read_is_answered_and_the_run_goes_on(tmp_path: Path, backplane_home: Path) -> None:
    turns = [
        Turn(calls=(Call(name="read_file", input='{"path": '), call("no_such_tool"), call("read_file", file="a"))),
        Turn(text="ok"),
    ]
    run, events, _ = await solve(backplane_home, turns, job(tmp_path))
    assert ended(run)[0] == "complete"
    results = of(ToolResult, events)
    assert all(result.is_error for result in results)
    assert "there is no tool" in results[1].output
    assert "'path' is a required property" in results[2].output


# Asks -----------------------------------------------------------------------------------------------------------------


async def asked(
    home: Path, root: Path, decision: Decision, turns: Sequence[Turn], approve: str
) -> tuple[Run, list[AgentEvent]]:
    work = job(root, policy=PolicyProfile(require_approval_for=(approve,)))
    with ModelServer(turns) as server:
        async with plane(home, LIMITS) as control:
            return await go(control, work, api(server), on_ask=saying(decision))


BASH = (Turn(calls=(call("bash", command="echo original"),)), Turn(text="ok"))


async def test_a_person_who_says_no_is_an_answer_and_the_command_does_not_run(
    tmp_path: Path, backplane_home: Path
) -> None:
    denied = Decision(decision="deny", reason="not today")
    run, events = await asked(backplane_home, tmp_path, denied, BASH, "bash")
    assert ended(run)[0] == "complete"
    assert of(CommandExecuted, events) == []
    assert of(ToolResult, events)[0].output == "policy_denied: not today"
    assert "violations" not in backplane_of(run)["enforcement"]


async def test_a_person_may_put_another_command_in_its_place(tmp_path: Path, backplane_home: Path) -> None:
    changed = Decision(decision="modify", input={"command": "echo changed"})
    _, events = await asked(backplane_home, tmp_path, changed, BASH, "bash")
    assert [event.command for event in of(CommandExecuted, events)] == ["echo changed"]


async def test_what_a_person_puts_in_its_place_is_under_the_policy_too(tmp_path: Path, backplane_home: Path) -> None:
    changed = Decision(decision="modify", input={"path": "../x", "content": "x"})
    turns = (Turn(calls=(call("write_file", path="a", content="x"),)), Turn(text="ok"))
    _, events = await asked(backplane_home, tmp_path, changed, turns, "write_file")
    assert of(ToolResult, events)[0].output.startswith("policy_denied")
    assert not (tmp_path.parent / "x").exists()


async def test_a_question_of_the_model_is_answered_by_a_person_or_by_nobody(
    tmp_path: Path, backplane_home: Path
) -> None:
    turns = (Turn(calls=(call("ask_user", question="which?", options=["a", "b"]),)), Turn(text="ok"))
    said = Decision(decision="allow", text="the second")
    _, events = await asked(backplane_home, tmp_path, said, turns, "none")
    assert of(ToolResult, events)[0].output == "the second"
    _, events, _ = await solve(backplane_home, turns, job(tmp_path))
    assert "decide by yourself" in of(ToolResult, events)[0].output


# Keys -----------------------------------------------------------------------------------------------------------------


async def test_the_key_is_nowhere_but_in_its_header(tmp_path: Path, backplane_home: Path) -> None:
    # A key of this test's own, as all processes of the user are looked through; and the search does not find itself.
    key = f"sk-{uuid.uuid4().hex}"
    look = f"env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline | grep -ac 's[k]-{key[3:]}' | sed s/^/found=/"
    turns = [Turn(calls=(call("bash", command=look),)), Turn(text="ok")]
    work = job(tmp_path, config=RuntimeConfig(env={"PART": "plain", "COPY": key}))
    run, events, server = await solve(backplane_home, turns, work, key=key)
    output = str(of(ToolResult, events)[0].output)
    assert "PART=" in output
    assert "COPY" not in output
    assert "SCRIPTED_KEY" not in output
    assert "found=0" in output
    assert key not in everything(run, events)
    assert all(request.headers["authorization"] == f"Bearer {key}" for request in server.requests)
    assert all(key not in request.path + str(request.query) for request in server.requests)
    assert key not in json.dumps([request.body for request in server.requests])


async def test_a_header_of_ones_own_is_filled_from_the_environment(tmp_path: Path, backplane_home: Path) -> None:
    own = {"x-team": "blue", "authorization": "Token $SCRIPTED_KEY"}
    _, _, server = await solve(backplane_home, [Turn(text="ok")], job(tmp_path), headers=own)
    assert server.requests[0].headers["x-team"] == "blue"
    assert server.requests[0].headers["authorization"] == f"Token {KEY}"


# Limits ---------------------------------------------------------------------------------------------------------------


LOOP = Turn(calls=(call("bash", command="echo x >> count"),), usage=Usage(input=100, output=10), times=None)


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
    assert run.receipt is not None
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
    assert run.receipt is not None
    assert run.receipt.usage.input_tokens is None
    assert run.receipt.usage.estimated_cost_usd is None
    assert backplane_of(run)["usage"]["input_tokens"] == "unknown"
    work = job(tmp_path, config=RuntimeConfig(max_budget_usd=1.0))
    run, _, _ = await solve(backplane_home, [Turn(calls=LOOP.calls, usage=None, times=None)], work)
    assert ended(run)[2] == "partial"


async def test_an_answer_cut_at_its_length_is_a_part(tmp_path: Path, backplane_home: Path) -> None:
    run, _, _ = await solve(backplane_home, [Turn(text="half of", stop="max_tokens")], job(tmp_path))
    assert ended(run)[2] == "partial"


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
    turns = [msgspec.structs.replace(LOOP, times=1), Turn(fault=Fault(status=400, body=OVERFLOW[protocol]), times=None)]
    run, _, _ = await solve(backplane_home, turns, job(tmp_path), protocol)
    assert ended(run) == ("failed", "backend_context_length", "failed")
    assert run.receipt is not None
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
    assert run.receipt is not None
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


# Containment ----------------------------------------------------------------------------------------------------------


@pytest.mark.needs("bwrap")
async def test_without_a_network_the_model_is_still_reached_and_nothing_else(
    tmp_path: Path, backplane_home: Path
) -> None:
    connect = "import socket; socket.create_connection(('127.0.0.1', {port}), 5)"
    with ModelServer([]) as other, ModelServer([]) as server:
        tries = "; ".join(
            f'{sys.executable} -c "{connect.format(port=port)}" 2>/dev/null || echo no'
            for port in (other.port, server.port)
        )
        server.play([Turn(calls=(call("bash", command=tries), call("web_fetch", url=other.url))), Turn(text="ok")])
        async with plane(backplane_home, LIMITS, isolation="best_effort") as control:
            work = job(tmp_path, policy=PolicyProfile(deny_network=("*",)))
            run, events = await go(control, work, api(server))
        assert other.requests == ()
    assert ended(run) == ("complete", None, "complete")
    assert backplane_of(run)["endpoints"] == [f"127.0.0.1:{server.port}"]
    command, page = of(ToolResult, events)
    assert command.output == "no\nno\n[exit code 0]"
    assert page.output.startswith("policy_denied")
    rule = next(row for row in backplane_of(run)["enforcement"]["rules"] if row["rule"] == "deny_network")
    assert rule["layer"] == "os"


# The command line -----------------------------------------------------------------------------------------------------


def backplane(*words: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PYTHON, "-m", "backplane", *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        env={**os.environ, **env},
        check=False,
    )


def test_a_configured_service_is_listed_and_run_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    turns = [Turn(calls=(call("write_file", path="made", content="yes\n"),)), Turn(text="It is made.")]
    with ModelServer(turns) as server:
        (tmp_path / "backplane.toml").write_text(
            'isolation = "off"\n[backends.local]\nhost = "api"\n[backends.local.options]\npreset = "ollama"\n'
            f'model = "m-1"\nbase_url = "{server.base_url("openai_compatible")}"\nkey_env = "SCRIPTED_KEY"\n'
        )
        listed = backplane("backends", folder=tmp_path)
        assert "export SCRIPTED_KEY=" in listed.stdout
        ready = backplane("backends", "--json", folder=tmp_path, SCRIPTED_KEY=KEY)
        rows = {row["id"]: row for row in map(json.loads, ready.stdout.splitlines())}
        assert rows["local"]["ready"]
        run = ("run", "make it", "--backend", "local", "--root", "work", "--lane", "workspace_first")
        refused = backplane(*run, folder=tmp_path)
        assert refused.returncode == 1
        assert "SCRIPTED_KEY" in refused.stderr
        done = backplane(*run, folder=tmp_path, SCRIPTED_KEY=KEY)
    assert (done.returncode, (tmp_path / "work/made").read_text()) == (0, "yes\n")
    assert "It is made." in done.stdout
    assert KEY not in done.stdout + done.stderr + listed.stdout + ready.stdout


def test_a_host_that_was_told_of_no_service_says_hello_and_refuses_its_runs(tmp_path: Path) -> None:
    with Child((*PYTHON, str(ROOT / "hosts" / "api.py"))) as child:
        child.send(sent("r1", "do it", PLAIN, workspace={"root": str(tmp_path)}))
        child.close_stdin()
        told = child.until("final", "fatal", wait_s=15.0)
        assert child.wait() == 0
    assert told[0]["capabilities"]["tool_edit"] == "emulated"
    assert told[-1]["error_code"] == "config_invalid"
    assert "names no model service" in told[-1]["error"]


# Configuration --------------------------------------------------------------------------------------------------------


def configured(**options: Any) -> Settings:
    return Settings(backends={"agent": BackendSettings(host="api", options=options)})


async def test_a_backend_without_its_key_is_not_ready_and_says_how_it_would_be() -> None:
    settings = configured(preset="anthropic")
    status = next(status for status in backends.known(settings, {}) if status.id == "agent")
    assert not status.ready
    assert "ANTHROPIC_API_KEY" in status.why
    assert "export ANTHROPIC_API_KEY" in status.fix
    status = next(
        status
        for status in backends.known(settings, {"ANTHROPIC_API_KEY": "k", "PATH": os.environ["PATH"]})
        if status.id == "agent"
    )
    assert status.ready


def test_the_services_of_the_readme_are_ready_once_their_keys_are_set(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```toml\n(.*?host = \"api\".*?)^```$", (ROOT / "README.md").read_text(), re.S | re.M)
    settings = parse(block.encode(), source="README.md", folder=tmp_path)
    environ = {"PATH": os.environ["PATH"], "ANTHROPIC_API_KEY": KEY}
    ready = {status.id for status in backends.known(settings, environ) if status.ready}
    assert {"claude", "mine"} <= ready


@pytest.mark.parametrize("preset", ["ollama", "llama_cpp", "vllm"])
async def test_a_local_server_needs_no_key_and_may_always_be_reached(preset: str) -> None:
    found = backends.find("agent", configured(preset=preset), {})
    assert isinstance(found, backends.ProcessBackend)
    assert found.endpoints[0].startswith("127.0.0.1:")
    assert found.secrets == ()


async def test_keys_travel_in_the_environment_and_count_as_secrets() -> None:
    found = backends.find("agent", configured(preset="openai"), {"OPENAI_API_KEY": KEY})
    assert isinstance(found, backends.ProcessBackend)
    assert found.endpoints == ("api.openai.com:443",)
    assert found.secrets == (KEY,)
    assert found.env["OPENAI_API_KEY"] == KEY
    assert KEY not in " ".join(found.argv)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "names no model service"),
        ({"preset": "nobody"}, "one of: openai"),
        ({"preset": "openai", "modle": "x"}, "modle"),
        ({"protocol": "smtp", "base_url": "https://x/v1"}, "protocol"),
        ({"protocol": "anthropic", "base_url": "ftp://x"}, "base_url"),
        ({"protocol": "anthropic", "base_url": "https://u:secret@x/v1"}, "base_url"),
        ({"protocol": "anthropic", "base_url": "https://x/v1?key=secret"}, "base_url"),
        ({"protocol": "anthropic", "base_url": "http://example.com/v1", "key_env": "K"}, "plain http"),
        ({"preset": "ollama", "idle_s": 0}, "a time"),
        ({"preset": "ollama", "max_output_tokens": 0}, "max_output_tokens"),
    ],
)
async def test_options_that_are_wrong_are_named_without_their_secrets(options: Any, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        backends.find("agent", configured(**options), {})
    assert error.value.code == "config_invalid"
    assert words in f"{error.value.message} {error.value.hint}"
    assert "secret" not in f"{error.value.message} {error.value.hint}"


async def test_a_variable_of_a_header_that_is_not_set_is_named() -> None:
    with pytest.raises(BackendError, match="TEAM_TOKEN"):
        backends.find("agent", configured(preset="ollama", headers={"x-team": "Bearer $TEAM_TOKEN"}), {})
