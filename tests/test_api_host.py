"""The host `api` as a real agent: whole tasks through four protocols against a scripted model, and asks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backplane import Hook
from backplane.contract.approval import Decision
from backplane.contract.events import (
    AgentEvent,
    AssistantDelta,
    CommandExecuted,
    FileChanged,
    Reasoning,
    ToolCall,
    ToolResult,
)
from backplane.contract.work import ContextPacket, PolicyProfile, RuntimeConfig, Snippet
from backplane.runtime.run import Run
from backplane.testing import PROTOCOLS, Call, ModelServer, ProtocolName, ScriptUsage, Turn
from tests.api_agent import KEY, LIMITS, LOOP, api, call, everything, job, of, raw, solve
from tests.runs import backplane_of, ended, go, plane, saying

# What is tested here runs in a child with a loop of its own.
pytestmark = pytest.mark.anyio


# A whole task ---------------------------------------------------------------------------------------------------------


TASK = (
    Turn(
        text="I look around.",
        calls=(
            call("read_file", path="add.py"),
            call("bash", command="python3 check.py; echo checked; exit 3"),
            call("write_file", path="../outside.py", content="x"),
        ),
        usage=ScriptUsage(input=100, output=20, cache_read=40),
    ),
    Turn(
        calls=(
            call("edit_file", path="add.py", old="a - b", new="a + b"),
            call("write_file", path="docs/notes.md", content="fixed\n"),
            call("read_file", path=".env"),
        ),
        usage=ScriptUsage(input=200, output=30, cache_read=100),
    ),
    Turn(text="It adds now.", usage=ScriptUsage(input=300, output=10, cache_read=200)),
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
    turns = [
        Turn(calls=(call("write_file", path="a", content="x"),), usage=ScriptUsage(input=3, output=2)),
        Turn(text="ok"),
    ]
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
