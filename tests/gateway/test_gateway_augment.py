"""`/chat-stream`: the wire of Augment's editors, onto each protocol of a service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backplane.testing import PROTOCOLS, Call, Failure, Fault, ModelServer, ProtocolName, ScriptUsage, Turn
from tests.gateway.ground import KEY, all_of, gateway
from tests.gateway.test_gateway import CHAT, GEMINI, MESSAGES, RESPONSES, ask
from tests.gateway.test_gateway_agents import SCRIPT, agents, api

TOOLS = [
    {
        "name": "read",
        "description": "reads a file",
        "input_schema_json": '{"type": "object", "properties": {"path": {"type": "string"}}}',
        "mcp_server_name": "files",
        "mcp_tool_name": "read_file",
    }
]
HISTORY = [
    {
        "request_id": "r1",
        "request_message": "look at a.txt",
        "response_text": "I look.",
        "response_nodes": [
            {
                "id": 1,
                "type": 5,
                "content": "",
                "tool_use": {"tool_use_id": "c1", "tool_name": "read", "input_json": '{"path": "a.txt"}'},
            }
        ],
    }
]
RESULT = [{"id": 1, "type": 1, "tool_result_node": {"tool_use_id": "c1", "content": "apples", "is_error": False}}]


def chat(
    service: ProtocolName, turn: Turn | list[Turn], model: str | None = "m", **members: Any
) -> tuple[int, dict[str, str], list[Any], Any]:
    """Ask once; return status, headers, the lines of the answer, and what the service was asked."""
    body = {"message": "go", **({} if model is None else {"model": model}), **members}
    with ModelServer(turn) as server, gateway(all_of(server), {"m": service, "default": f"{service}/own"}) as gate:
        status, headers, data = ask(gate, "/chat-stream", body)
        asked = server.requests[0].body if server.requests else None
    return status, headers, [json.loads(line) for line in data.splitlines()], asked


def nodes(lines: list[Any], kind: int) -> list[Any]:
    return [node for line in lines for node in line.get("nodes", ()) if node["type"] == kind]


@pytest.mark.parametrize("service", PROTOCOLS)
def test_an_editor_gets_words_thinking_calls_and_counters_as_lines(service: ProtocolName) -> None:
    turn = Turn(
        reasoning="hm", text="I read it.", calls=(Call(name="read", input={"path": "a"}),), pieces=3,
        usage=ScriptUsage(input=9, output=4),
    )  # fmt: skip
    status, headers, lines, _ = chat(service, turn, tool_definitions=TOOLS)
    assert (status, headers["content-type"]) == (200, "application/x-ndjson")
    assert "".join(line["text"] for line in lines) == "I read it."
    assert all({"unknown_blob_names", "checkpoint_not_found", "workspace_file_chunks"} <= line.keys() for line in lines)
    (call,) = nodes(lines, 5)
    used = call["tool_use"]
    assert (used["tool_name"], json.loads(used["input_json"])) == ("read", {"path": "a"})
    assert (used["mcp_server_name"], used["mcp_tool_name"]) == ("files", "read_file")
    assert "".join(node["thinking"]["summary"] for node in nodes(lines, 8)) == "hm"
    (counted,) = nodes(lines, 10)
    assert (counted["token_usage"]["input_tokens"], counted["token_usage"]["output_tokens"]) == (9, 4)
    ids = [node["id"] for line in lines for node in line.get("nodes", ())]
    assert ids == list(range(1, len(ids) + 1))
    assert [line["stop_reason"] for line in lines if "stop_reason" in line] == [3]
    assert "stop_reason" in lines[-1]


@pytest.mark.parametrize("service", PROTOCOLS)
def test_history_nodes_and_tools_of_an_editor_reach_the_service(service: ProtocolName) -> None:
    members: dict[str, Any] = {
        "message": "", "chat_history": HISTORY, "nodes": RESULT, "tool_definitions": TOOLS,
        "user_guidelines": "Be short.", "workspaceGuidelines": "Use tabs.",
    }  # fmt: skip
    status, _, _, asked = chat(service, Turn(text="ok"), **members)
    text = json.dumps(asked)
    assert status == 200
    assert all(word in text for word in ("look at a.txt", "a.txt", "apples", "Be short.", "Use tabs.", "reads a file"))


@pytest.mark.parametrize("stop", [("max_tokens", 2), ("end", 1)])
@pytest.mark.parametrize("service", [CHAT, MESSAGES, GEMINI, RESPONSES])
def test_the_last_line_says_why_the_answer_ended(service: ProtocolName, stop: tuple[Any, int]) -> None:
    _, _, lines, _ = chat(service, Turn(text="so", stop=stop[0]))
    assert lines[-1]["stop_reason"] == stop[1]


def test_a_call_is_announced_where_the_editor_asks_for_it() -> None:
    turn = Turn(calls=(Call(name="read", input={"path": "a"}),))
    flags = {"support_tool_use_start": True, "support_parallel_tool_use": True}
    _, _, lines, asked = chat(CHAT, turn, tool_definitions=TOOLS, feature_detection_flags=flags)
    assert len(nodes(lines, 7)) == len(nodes(lines, 5)) == 1
    assert "parallel_tool_calls" not in asked
    assert chat(CHAT, Turn(text="ok"), tool_definitions=TOOLS)[3]["parallel_tool_calls"] is False


def test_an_editor_that_names_no_model_gets_the_default_one() -> None:
    status, _, _, asked = chat(CHAT, Turn(text="ok"), model=None)
    assert (status, asked["model"]) == (200, "own")


def test_an_error_before_the_answer_has_a_status_and_words() -> None:
    status, _, lines, _ = chat(CHAT, Turn(fault=Fault(status=429, message="slow down", headers={"retry-after": "3"})))
    assert status == 429
    assert "slow down" in lines[0]["error"]
    assert chat(CHAT, [], model="none")[0] == 404
    assert chat(CHAT, [], message="")[0] == 400


def test_a_failure_in_the_answer_is_text_without_a_stop_reason() -> None:
    turn = Turn(text="so far", fault=Fault(failure=Failure(code="server_error", message="as scripted")))
    _, _, lines, _ = chat(MESSAGES, turn)
    assert "as scripted" in "".join(line["text"] for line in lines)
    assert lines[-1]["stop_reason"] == 0


def test_a_silent_answer_is_kept_open_by_empty_lines_of_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backplane.gateway.server.PING_S", 0.05)
    status, headers, lines, _ = chat(CHAT, Turn(text="late", fault=Fault(first_byte_ms=300)))
    assert (status, headers["content-type"]) == (200, "application/x-ndjson")
    assert lines[0] == lines[1]
    assert lines[0]["text"] == ""
    assert "".join(line["text"] for line in lines) == "late"


def test_a_failure_after_a_keep_alive_ends_without_a_stop_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backplane.gateway.server.PING_S", 0.05)
    _, _, lines, _ = chat(CHAT, Turn(fault=Fault(status=500, message="broken", first_byte_ms=300)))
    assert lines[-1]["stop_reason"] == 0
    assert "broken" in "".join(line["text"] for line in lines)


def test_an_editor_needs_a_key() -> None:
    with ModelServer([]) as server, gateway(all_of(server), {"m": CHAT}) as gate:
        status, _, data = ask(gate, "/chat-stream", {"model": "m", "message": "go"}, {"authorization": "Bearer other"})
        assert (status, server.requests) == (401, ())
    assert KEY not in data.decode()
    assert json.loads(data)["error"]


def test_an_agent_answers_an_editor(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with ModelServer(SCRIPT) as server, gateway(api(server), {}, home, agents=agents(tmp_path / "work")) as gate:
        status, headers, data = ask(gate, "/chat-stream", {"model": "agent/maker", "message": "write it"})
    lines = [json.loads(line) for line in data.splitlines()]
    assert status == 200, data
    assert f"backplane apply {headers['x-backplane-run']}" in "".join(line["text"] for line in lines)
    assert lines[-1]["stop_reason"] == 1
