"""Kimi's local server, without the program: its session's events as the contract's, and a small one by hand.

What only the real program can show is in `tests/all/vendors/`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backplane.agents.kimi.reader import EventReader
from backplane.contract.events import AgentEvent, AssistantMessage, CommandExecuted, FileChanged, ToolResult
from backplane.contract.work import PolicyProfile, WorkOrder
from backplane.protocol.jsonrpc import Notification
from backplane.runtime.run import Run
from tests import by_hand
from tests.test_deltas import fold

pytestmark = pytest.mark.anyio
STEP = {"finishReason": "end_turn", "rawFinishReason": "stop"}


@pytest.fixture
def reader() -> EventReader:
    return EventReader(lambda: "2026-11-24T00:00:00.000Z", "/work")


def take(reader: EventReader, kind: str, **data: Any) -> list[AgentEvent]:
    return reader.read(Notification(kind, {"agentId": "main", **data}))


def test_words_of_a_request_that_broke_are_taken_back(reader: EventReader) -> None:
    events = take(reader, "assistant.delta", delta="half an ans")
    events += take(reader, "turn.step.retrying", errorName="Broken", errorMessage="it broke")
    events += take(reader, "assistant.delta", delta="whole")
    events += take(reader, "turn.step.completed", **STEP)
    assert fold(events) == ["whole"]


def test_input_is_all_that_was_sent_and_a_counter_that_is_missing_is_unknown(reader: EventReader) -> None:
    take(reader, "turn.step.completed", usage={"inputOther": 80, "inputCacheRead": 50, "output": 7}, **STEP)
    used = reader.used()
    assert (used.input_tokens, used.cache_read_tokens, used.output_tokens) == (130, 50, 7)
    assert used.cache_write_tokens is None


def test_a_request_is_counted_once_and_before_its_calls(reader: EventReader) -> None:
    counters = {"inputOther": 80, "inputCacheRead": 50, "output": 7}
    reader.begin()
    for count in (1, 2):
        turn = {name: value * count for name, value in counters.items()}
        early = take(reader, "agent.status.updated", usage={"currentTurn": turn})
        assert len(early) == 1
        assert reader.used().input_tokens == 130 * count
        assert take(reader, "agent.status.updated", usage={"currentTurn": turn}) == []
        take(reader, "turn.step.completed", usage=counters, **STEP)
        assert take(reader, "agent.status.updated", usage={"currentTurn": turn}) == []
    take(reader, "turn.step.completed", usage=counters, **STEP)
    assert (reader.used().input_tokens, reader.used().output_tokens) == (390, 21)
    reader.begin()
    take(reader, "agent.status.updated", usage={"currentTurn": counters})
    assert reader.used().input_tokens == 520


def test_a_stream_that_just_ends_is_a_failure(reader: EventReader) -> None:
    take(reader, "turn.step.completed", finishReason="end_turn")
    take(reader, "turn.ended", reason="completed")
    assert reader.failure is not None


@pytest.mark.parametrize(
    ("output", "failed", "code", "preview"),
    [
        ("a\n", False, 0, "a\n"),
        ("a\nCommand failed with exit code: 3.", True, 3, "a"),
        ("it took too long", True, None, "it took too long"),
    ],
)
def test_a_command_has_its_exit_code(
    reader: EventReader, output: str, failed: bool, code: int | None, preview: str
) -> None:
    take(reader, "tool.call.started", toolCallId="1", name="Bash", args={"command": "ls"})
    ran, result = take(reader, "tool.result", toolCallId="1", output=output, isError=failed)
    assert isinstance(ran, CommandExecuted)
    assert (ran.exit_code, ran.output_preview) == (code, preview)
    assert isinstance(result, ToolResult)
    assert result.is_error is failed


def test_a_call_is_told_once_whether_it_is_asked_about_or_starts_first(reader: EventReader) -> None:
    assert len(reader.call("1", "Write", {"path": "/work/b"})) == 1
    assert take(reader, "tool.call.started", toolCallId="1", name="Write", args={"path": "/work/b"}) == []
    changed, _ = take(reader, "tool.result", toolCallId="1", output="written")
    assert isinstance(changed, FileChanged)
    assert changed.path == "b"


def test_a_sub_agents_words_are_no_answer(reader: EventReader) -> None:
    assert reader.read(Notification("assistant.delta", {"agentId": "other", "delta": "aside"})) == []
    reader.read(Notification("turn.ended", {"agentId": "other", "reason": "completed"}))
    assert (reader.reason, reader.text) == (None, "")


def test_what_has_no_word_here_is_kept(reader: EventReader) -> None:
    (event,) = take(reader, "session_dreamt", of="sheep")
    assert event.ext["raw_message"]["of"] == "sheep"  # type: ignore[index]
    assert take(reader, "context.spliced", messages=["a long prompt"]) == []


# A small one by hand --------------------------------------------------------------------------------------------------

AGENT = """#!{python}
import asyncio, json, os, subprocess, sys
from websockets.server import ServerProtocol

TOLD = asyncio.Queue()


def hook(tool, input):
    ask = {{"hook_event_name": "PreToolUse", "tool_call_id": "c1", "tool_name": tool, "tool_input": input}}
    words = open(os.environ["KIMI_CODE_HOME"] + "/hook").read()
    done = subprocess.run(words, shell=True, input=json.dumps(ask), capture_output=True, text=True)
    return json.loads(done.stdout)["hookSpecificOutput"]["permissionDecision"]


def tell(kind, **payload):
    TOLD.put_nowait({{"type": kind, "payload": {{"agentId": "main", **payload}}}})


async def main():
    server = await asyncio.start_server(rest, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    home = os.environ["KIMI_CODE_HOME"]
    lines = open(home + "/config.toml").read().splitlines()
    command = next(line for line in lines if line.startswith("command"))
    open(home + "/hook", "w").write(json.loads(command.partition("=")[2]))
    print(f"  Local: http://127.0.0.1:{{port}}/#token=secret-token", flush=True)
    await asyncio.Event().wait()


async def rest(reader, writer):
    while True:
        head = await reader.readuntil(b"\\r\\n\\r\\n")
        first, *rows = head.decode().split("\\r\\n")
        method, path, _ = first.split(" ")
        headers = {{row.partition(": ")[0].lower(): row.partition(": ")[2] for row in rows}}
        assert headers["authorization"] == "Bearer secret-token"
        if path.endswith("/ws"):
            return await events(reader, writer, head)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        data = {{"id": "s1", "as_of_seq": 1, "epoch": "e", "prompt_id": "p"}}
        out = json.dumps({{"code": 0, "msg": "success", "data": data}}).encode()
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(out) + out)
        await writer.drain()
        if path.endswith("/prompts"):
            await asyncio.to_thread(work)
        if path.endswith(":abort"):
            tell("turn.ended", reason="cancelled")


async def events(reader, writer, head):
    protocol = ServerProtocol()
    protocol.receive_data(head)
    protocol.send_response(protocol.accept(protocol.events_received()[0]))
    ack = {{"type": "ack", "payload": {{"accepted_subscriptions": ["s1"]}}}}
    protocol.send_text(json.dumps(ack).encode())
    protocol.send_text(b\'{{"type": "ping", "payload": {{}}}}\')
    while True:
        for data in protocol.data_to_send():
            writer.write(data)
        message = await TOLD.get()
        text = json.dumps(message).encode()
        # In two frames, as a server may cut it.
        protocol.send_text(text[:5], fin=False)
        protocol.send_continuation(text[5:], fin=True)


def work():
{script}


asyncio.run(main())
"""
ANSWER = """
tell("assistant.delta", delta="here I am")
tell("turn.step.completed", finishReason="end_turn", rawFinishReason="stop", usage={"inputOther": 3, "output": 2})
tell("turn.ended", reason="completed")"""


async def play(folder: Path, script: str, **order: Any) -> tuple[Run, list[AgentEvent]]:
    """Run an order on an agent that does this once it is told the task."""
    agent = AGENT.format(python=sys.executable, script=by_hand.steps(script, 4))
    return await by_hand.play(folder, "kimi", agent, **order)


async def test_an_answer_is_told_with_its_tokens(tmp_path: Path) -> None:
    run, events = await play(tmp_path, ANSWER)
    receipt = run.receipt
    assert (receipt.outcome, run.error) == ("complete", None)
    assert [event.text for event in events if isinstance(event, AssistantMessage)] == ["here I am"]
    assert (receipt.usage.input_tokens, receipt.usage.output_tokens) == (3, 2)
    assert "secret-token" not in json.dumps(receipt.usage_raw)


@pytest.mark.parametrize("forbidden", [False, True])
async def test_the_hook_asks_before_a_tool(tmp_path: Path, forbidden: bool) -> None:
    script = f"""
decision = hook("Bash", {{"command": "ls"}})
assert decision == ("deny" if {forbidden} else "allow")
tell("tool.call.started", toolCallId="c1", name="Bash", args={{"command": "ls"}})
tell("tool.result", toolCallId="c1", output="a", isError=decision == "deny")
{ANSWER}"""
    policy = PolicyProfile(disallowed_tools=("bash",) if forbidden else ())
    run, events = await play(tmp_path, script, policy=policy)
    assert run.receipt.outcome == "complete"
    (result,) = [event for event in events if isinstance(event, ToolResult)]
    assert ("policy_denied" in str(result.output)) is forbidden
    assert any(isinstance(event, CommandExecuted) for event in events) is not forbidden


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ({"code": "provider.auth_error", "message": "no"}, "backend_auth_failed"),
        ({"code": "provider.rate_limit", "message": "no"}, "backend_rate_limited"),
        ({"code": "provider.api_error", "message": "no", "details": {"statusCode": 413}}, "backend_context_length"),
        ({"code": "provider.api_error", "message": "no", "details": {"statusCode": 500}}, "backend_unavailable"),
    ],
)
async def test_a_failure_has_its_code(tmp_path: Path, error: dict[str, Any], code: str) -> None:
    run, events = await play(tmp_path, f'tell("turn.ended", reason="failed", error={error!r})')
    assert run.receipt.outcome == "failed"
    assert [getattr(event, "error_code", None) for event in events].count(code) == 1


def test_a_step_that_follows_a_broken_one_makes_it_good(reader: EventReader) -> None:
    take(reader, "turn.step.completed", finishReason="tool_use")
    take(reader, "turn.step.completed", **STEP)
    assert reader.failure is None


async def test_without_its_library_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from backplane.agents.kimi.start import start
    from backplane.agents.rows import AgentRow
    from backplane.agents.start import AgentStart
    from backplane.errors import BackendError

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run: Any = SimpleNamespace(order=WorkOrder("work"))
    with pytest.raises(BackendError) as error:
        start(AgentStart(run, AgentRow(program="kimi", drive="kimi"), str(tmp_path)))
    assert ".[kimi]" in (error.value.hint or "")


async def test_a_program_that_says_no_address_is_a_crash(tmp_path: Path) -> None:
    run, _ = await by_hand.play(tmp_path, "kimi", "#!/bin/sh\necho hello\n")
    assert run.receipt.usage_raw["backplane"]["end"]["code"] == "backend_crashed"
