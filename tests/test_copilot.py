"""Copilot's headless server, without it: its session's events as the contract's, and a small one by hand.

What only the real program can show is in `tests/all/vendors/`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from backplane.agents.copilot.reader import EventReader
from backplane.contract.events import AgentEvent, AssistantMessage, CommandExecuted, FileChanged, ToolResult
from backplane.contract.work import PolicyProfile
from backplane.protocol.jsonrpc import Notification
from backplane.runtime.run import Run
from tests import by_hand
from tests.test_deltas import fold

pytestmark = pytest.mark.anyio


def take(reader: EventReader, kind: str, agent: str | None = None, **data: Any) -> list[AgentEvent]:
    event = {"type": kind, "data": data, **({"agentId": agent} if agent else {})}
    return reader.read(Notification("session.event", {"sessionId": "s", "event": event}))


@pytest.fixture
def reader() -> EventReader:
    return EventReader(lambda: "2026-11-23T00:00:00.000Z", "/work")


def test_words_of_a_request_that_broke_are_taken_back(reader: EventReader) -> None:
    events = take(reader, "assistant.message_delta", messageId="a", deltaContent="half an ans")
    events += take(reader, "assistant.turn_retry", reason="it broke")
    events += take(reader, "assistant.message_delta", messageId="b", deltaContent="who")
    events += take(reader, "assistant.message_delta", messageId="c", deltaContent="whole")
    events += take(reader, "assistant.message", messageId="c", content="whole", toolRequests=[])
    assert fold(events) == ["whole"]


def test_a_limit_of_turns_looks_at_the_answer_and_not_at_the_one_before(reader: EventReader) -> None:
    for number, requests in enumerate(([{"name": "bash"}], [])):
        take(reader, "assistant.usage", inputTokens=10, outputTokens=1)
        assert reader.spent.requests == number
        take(reader, "assistant.message", content="", toolRequests=requests)
        assert (reader.spent.requests, reader.goes_on) == (number + 1, bool(requests))


def test_usage_of_an_answer_that_never_came_is_counted(reader: EventReader) -> None:
    take(reader, "assistant.usage", inputTokens=10, outputTokens=True)
    take(reader, "session.error", errorType="query", message="no")
    assert (reader.used().input_tokens, reader.used().output_tokens) == (10, None)


def test_a_command_and_a_file_are_told_beside_their_results(reader: EventReader) -> None:
    take(reader, "tool.execution_start", toolCallId="1", toolName="bash", arguments={"command": "ls"})
    ends = {"contents": [{"type": "shell_exit", "outputPreview": "a\n"}], "content": "a\n<more words>"}
    ran, result = take(
        reader, "tool.execution_complete", toolCallId="1", success=True, result=ends, shellExecution={"exitCode": 3}
    )
    assert isinstance(ran, CommandExecuted)
    assert (ran.command, ran.exit_code, ran.output_preview) == ("ls", 3, "a\n")
    assert isinstance(result, ToolResult)
    take(reader, "tool.execution_start", toolCallId="2", toolName="create", arguments={"path": "/work/b"})
    edits = [{"path": "/work/b", "kind": "create"}, {"kind": "lost"}]
    changed, _ = take(reader, "tool.execution_complete", toolCallId="2", success=True, fileEdits=edits, result={})
    assert isinstance(changed, FileChanged)
    assert changed.path == "b"


def test_a_sub_agents_words_are_kept_and_are_no_answer(reader: EventReader) -> None:
    assert take(reader, "assistant.message_delta", "sub", messageId="a", deltaContent="aside") == []
    (kept,) = take(reader, "assistant.message", "sub", messageId="a", content="aside", toolRequests=[])
    assert not isinstance(kept, AssistantMessage)
    assert reader.text == ""


def test_what_has_no_word_here_is_kept_and_the_prompt_is_not(reader: EventReader) -> None:
    (event,) = take(reader, "assistant.dreamt", of="sheep")
    assert event.ext["raw_message"] == {"of": "sheep"}  # type: ignore[index]
    assert take(reader, "system.message", content="a long prompt") == []


# A small one by hand --------------------------------------------------------------------------------------------------

AGENT = """#!{python}
import json, sys
out = sys.stdout.buffer


def say(**message):
    body = json.dumps({{"jsonrpc": "2.0", **message}}).encode()
    out.write(b"Content-Length: %d\\r\\n\\r\\n" % len(body) + body)
    out.flush()


def tell(kind, **data):
    say(method="session.event", params={{"sessionId": "s", "event": {{"type": kind, "data": data}}}})


def hear():
    length = 0
    while (line := sys.stdin.buffer.readline()) not in (b"\\r\\n", b""):
        length = int(line.partition(b":")[2])
    if not length:
        sys.exit(0)
    return json.loads(sys.stdin.buffer.read(length))


while True:
    message = hear()
    method = message.get("method")
    if method == "connect":
        say(id=message["id"], result={{"protocolVersion": {version}, "version": "by hand"}})
    elif method == "session.create":
        say(id=message["id"], result={{"sessionId": "s", "modelState": {{"modelId": "m"}}}})
    elif method == "session.send":
        say(id=message["id"], result={{"messageId": "1"}})
{script}
    elif method == "session.abort":
        say(id=message["id"], result={{"success": True}})
        tell("session.idle", aborted=True)
"""
ANSWER = """
tell("assistant.message", messageId="m", content="here I am", toolRequests=[])
tell("session.idle")"""


async def play(folder: Path, script: str, version: int = 3, **order: Any) -> tuple[Run, list[AgentEvent]]:
    """Run an order on an agent that does this once it is told the task."""
    agent = AGENT.format(python=sys.executable, script=by_hand.steps(script, 8), version=version)
    return await by_hand.play(folder, "copilot", agent, **order)


async def test_a_permission_beside_a_call_is_refused_and_that_of_an_allowed_call_given(tmp_path: Path) -> None:
    script = f"""
def may(call):
    tell("permission.requested", requestId=call, permissionRequest={{"kind": "url", "toolCallId": call}})
    while (asked := hear()).get("method") != "session.permissions.handlePendingPermissionRequest":
        pass
    say(id=asked["id"], result={{"success": True}})
    return asked["params"]["result"]["kind"]

tell("tool.execution_start", toolCallId="1", toolName="bash", arguments={{"command": "ls"}})
tell("tool.execution_start", toolCallId="2", toolName="create", arguments={{"path": "a"}})
assert [may("0"), may("1"), may("2")] == ["reject", "approve-once", "reject"]
{ANSWER}"""
    run, events = await play(tmp_path, script, policy=PolicyProfile(disallowed_tools=("write_file",)))
    assert (run.receipt.outcome, run.error) == ("complete", None)
    results = {event.tool_use_id: str(event.output) for event in events if isinstance(event, ToolResult)}
    assert "policy_denied" in results["2"]


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ('errorType="authentication", message="no", statusCode=401', "backend_auth_failed"),
        ('errorType="rate_limit", message="no"', "backend_rate_limited"),
        ('errorType="quota", message="no"', "backend_rate_limited"),
        ('errorType="context_limit", message="no"', "backend_context_length"),
        ('errorType="query", message="400 the context window is full"', "backend_context_length"),
        ('errorType="query", message="no", statusCode=500', "backend_unavailable"),
    ],
)
async def test_a_failure_has_its_code_whatever_was_said_before(tmp_path: Path, said: str, code: str) -> None:
    script = f'tell("assistant.message", content="so far", toolRequests=[])\ntell("session.error", {said})'
    run, events = await play(tmp_path, f'{script}\ntell("session.idle")')
    assert run.receipt.outcome == "failed"
    assert [getattr(event, "error_code", None) for event in events].count(code) == 1


async def test_done_without_a_word_is_not_done(tmp_path: Path) -> None:
    run, _ = await play(tmp_path, 'tell("session.idle")')
    assert run.receipt.outcome == "failed"


async def test_another_version_of_the_protocol_is_refused(tmp_path: Path) -> None:
    run, _ = await play(tmp_path, ANSWER, version=4)
    assert run.receipt.usage_raw["backplane"]["end"]["code"] == "protocol_version_mismatch"
