"""More of what users of other gateways reported: streams, proofs, caches, tools that a vendor runs, many clients."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backplane.gateway.journal import ExchangeJournal
from backplane.testing import Fault, ModelServer, ProtocolName, ScriptUsage, Turn
from tests.gateway.ground import Gate, all_of, backend, gateway
from tests.gateway.test_gateway import BEARER, CHAT, GEMINI, MESSAGES, PRICES, RESPONSES, ask, client, said
from tests.gateway.test_gateway_agents import SCRIPT, agents, api
from tests.gateway.test_gateway_budgets import begin
from tests.gateway.test_gateway_cases import CLAUDE_ANSWER, posted, through, two_turns
from tests.gateway.test_gateway_security import AUTH, DATA, LENGTH, head, send
from tests.scripted import question


def raw(body: Any) -> Turn:
    """A turn whose body is this: JSON, or bytes of a stream."""
    is_stream = isinstance(body, bytes)
    data = body if is_stream else json.dumps(body).encode()
    kind = "text/event-stream" if is_stream else "application/json"
    return Turn(fault=Fault(raw=data, headers={"content-type": kind}))


# Streams --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("service", [CHAT, MESSAGES, GEMINI, RESPONSES])
@pytest.mark.parametrize("front", [CHAT, MESSAGES])
def test_an_empty_answer_of_a_service_is_an_error(front: ProtocolName, service: ProtocolName, stream: bool) -> None:
    empty = msgspec.structs.replace(raw(b""), times=None)
    found = through(front, service, turn=empty, stream=stream)
    assert found.status == 502
    assert found.answer["error"]["message"]


BLOCKS = [
    {"type": "compaction", "content": "what came before"},
    {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
    {"type": "text", "text": "the answer"},
]


def test_compaction_and_fallback_blocks_pass_and_are_named_where_they_cannot() -> None:
    answer = {**CLAUDE_ANSWER, "content": BLOCKS, "stop_reason": "end_turn"}
    same = through(MESSAGES, MESSAGES, turn=raw(answer))
    assert same.answer["content"] == BLOCKS
    history = [{"role": "user", "content": "go"}, {"role": "assistant", "content": BLOCKS}]
    again = {"messages": [*history, {"role": "user", "content": "on"}]}
    assert through(MESSAGES, MESSAGES, again).asked["messages"][1]["content"] == BLOCKS
    other = through(CHAT, MESSAGES, turn=raw(answer))
    assert other.answer["choices"][0]["message"]["content"] == "the answer"
    assert other.lost


def test_input_tokens_are_in_the_first_event_where_they_are_known() -> None:
    usage = ScriptUsage(input=11, output=3)
    for service in (GEMINI, MESSAGES):
        found = through(MESSAGES, service, turn=Turn(text="ok", usage=usage), stream=True).answer
        assert found[0]["message"]["usage"]["input_tokens"] == 11


def test_a_signature_of_a_stream_goes_back_with_its_call() -> None:
    call = {"functionCall": {"id": "g1", "name": "read", "args": {}}, "thoughtSignature": "c2lnbmVk"}
    chunk = {"candidates": [{"content": {"role": "model", "parts": [call]}, "finishReason": "STOP", "index": 0}]}
    first = raw(b"data: " + json.dumps(chunk).encode() + b"\r\n\r\n")
    with ModelServer([first, Turn(text="done")]) as server, gateway(all_of(server), {"m": GEMINI}) as gate:
        found = [json.loads(row) for row in said(gate, CHAT, stream=True)[1] if row.startswith("{")]
        pieces = [one for row in found for choice in row["choices"] for one in choice["delta"].get("tool_calls", ())]
        (id,) = {piece["id"] for piece in pieces if piece.get("id")}
        calls = [{"id": id, "type": "function", "function": {"name": "read", "arguments": "{}"}}]
        result = {"role": "tool", "tool_call_id": id, "content": "r"}
        messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": None, "tool_calls": calls}]
        said(gate, CHAT, messages=[*messages, result])
        parts = [part for content in server.requests[1].body["contents"] for part in content["parts"]]
    assert [part["thoughtSignature"] for part in parts if "functionCall" in part] == ["c2lnbmVk"]


def test_a_long_proof_leaves_the_id_of_its_call_short() -> None:
    signature = "c2ln" * 2_000
    thinking = {"type": "thinking", "thinking": "hm", "signature": signature}
    answer = {**CLAUDE_ANSWER, "content": [thinking, CLAUDE_ANSWER["content"][2]]}
    given = through(CHAT, MESSAGES, turn=raw(answer)).answer
    assert len(given["choices"][0]["message"]["tool_calls"][0]["id"]) <= 64
    _, second = two_turns(CHAT, MESSAGES, answer)
    assert second["messages"][1]["content"][0] == thinking


# Caches ---------------------------------------------------------------------------------------------------------------


def test_marks_of_a_cache_and_betas_reach_their_vendor_unchanged() -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    body: dict[str, Any] = {
        "system": [{"type": "text", "text": "You help.", "cache_control": mark}],
        "tools": [{"name": "read", "input_schema": {"type": "object"}, "cache_control": mark}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "go", "cache_control": mark}]}],
    }
    path, whole = question(MESSAGES, **body)
    with ModelServer(Turn(text="ok")) as server, gateway(all_of(server), {"m": MESSAGES}) as gate:
        headers = {**BEARER, "anthropic-version": "2026-10-21", "anthropic-beta": "extended-cache-ttl-2025-04-11"}
        ask(gate, f"{path}?beta=true", whole, headers)
        request = server.requests[0]
    assert request.body == whole
    assert request.headers["anthropic-beta"] == "extended-cache-ttl-2025-04-11"
    assert request.query == {"beta": "true"}


@pytest.mark.parametrize("front", [CHAT, RESPONSES])
def test_how_long_a_prompt_is_cached_passes(front: ProtocolName) -> None:
    body = {"prompt_cache_retention": "24h", "prompt_cache_key": "k"}
    asked = through(front, front, body).asked
    assert {name: asked[name] for name in body} == body
    assert any("prompt_cache_retention" in row for row in through(front, MESSAGES, body).lost)


# Tools that a vendor runs ---------------------------------------------------------------------------------------------

SERVER_TOOLS: list[tuple[ProtocolName, dict[str, Any]]] = [
    (RESPONSES, {"type": "web_search"}),
    (RESPONSES, {"type": "mcp", "server_label": "s", "server_url": "http://127.0.0.1:{port}/mcp"}),
    (MESSAGES, {"type": "web_search_20250305", "name": "web_search"}),
    (GEMINI, {"googleSearch": {}}),
]


@pytest.mark.parametrize(("front", "tool"), SERVER_TOOLS)
def test_a_tool_that_a_vendor_runs_is_run_by_nobody_else_and_named(front: ProtocolName, tool: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bait:
        bait.settimeout(0.2)
        text = json.dumps(tool).replace("{port}", str(bait.getsockname()[1]))
        found = through(front, CHAT, {"tools": [json.loads(text)]})
        with pytest.raises(TimeoutError):
            bait.accept()
    assert found.status == 200
    assert not found.asked.get("tools")
    assert any("/tools" in row for row in found.lost)


# Many at once ---------------------------------------------------------------------------------------------------------


def in_threads(*work: Callable[[], Any]) -> None:
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)


def test_a_title_is_an_exchange_of_its_own_in_the_record() -> None:
    turns = [Turn(text="a title"), Turn(text="the answer")]
    with ModelServer(turns) as server, gateway(all_of(server), {"small": CHAT, "big": MESSAGES}) as gate:
        for model in ("small", "big"):
            said(gate, model=model)
        rows = [(end.backend, end.model) for end in gate.ends]
        ids = {line.id for line in gate.lines}
    assert rows == [(CHAT, "small"), (MESSAGES, "big")]
    assert len(ids) == 2


def test_two_requests_of_one_session_at_once_keep_both_proofs() -> None:
    def answer(number: int) -> Turn:
        thinking = {"type": "thinking", "thinking": f"t{number}", "signature": f"sig{number}"}
        call = {"type": "tool_use", "id": f"toolu_{number}", "name": "read", "input": {}}
        return raw({**CLAUDE_ANSWER, "content": [thinking, call]})

    numbers = range(12)
    turns = [*map(answer, numbers), Turn(text="done")]
    with ModelServer(turns) as server, gateway(all_of(server), {"m": MESSAGES}) as gate:
        in_threads(*[lambda: said(gate)] * len(numbers))
        messages: list[Any] = [{"role": "user", "content": "go"}]
        for number in numbers:
            call = {"id": f"toolu_{number}", "type": "function", "function": {"name": "read", "arguments": "{}"}}
            result = {"role": "tool", "tool_call_id": f"toolu_{number}", "content": "r"}
            messages += [{"role": "assistant", "content": None, "tool_calls": [call]}, result]
        said(gate, messages=messages)
        asked = server.requests[-1].body["messages"]
    kept = [message["content"][0]["signature"] for message in asked if message["role"] == "assistant"]
    assert kept == [f"sig{number}" for number in numbers]


def leave_at_once(gate: Gate, count: int, path: str, body: Any) -> None:
    clients = [http.client.HTTPConnection("127.0.0.1", gate.port, timeout=10) for _ in range(count)]
    for one in clients:
        one.request("POST", path, json.dumps(body), BEARER)
    for one in clients:
        one.getresponse().read(10)
    for one in clients:
        one.close()


def test_streams_whose_clients_have_gone_leave_nothing_behind() -> None:
    endless = Turn(text="word " * 2_000, pieces=2_000, fault=Fault(pause_ms=5), times=None)
    with ModelServer(endless) as server, gateway(all_of(server), {"m": CHAT}) as gate:
        path, body = question(CHAT, stream=True)
        leave_at_once(gate, 30, path, body)
        ends = [end.end for end in gate.ends]
        assert ends == ["left"] * 30
        assert {server.wait_end(number) for number in range(1, 31)} == {"left"}


# Limits and the door --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        head(Gate(1, Path()), AUTH, LENGTH).replace(b"\r\n", b"\n"),
        head(Gate(1, Path()), AUTH, LENGTH).replace(b"\r\nauth", b"\nauth"),
        head(Gate(1, Path()), AUTH, "x-a: b\r\n c", LENGTH),
        head(Gate(1, Path()), AUTH, "x-a: b\rc", LENGTH),
    ],
    ids=["bare LF", "one bare LF", "obs-fold", "bare CR"],
)
def test_lines_that_servers_end_in_two_ways_are_refused(text: bytes) -> None:
    with ModelServer([]) as server, gateway(all_of(server), {"m": CHAT}) as gate:
        got = send(gate, text.replace(b"127.0.0.1:1", f"127.0.0.1:{gate.port}".encode()) + DATA)
        assert got.startswith(b"HTTP/1.1 400"), got[:200]
        assert b"connection: close" in got.lower()
        assert (server.requests, gate.lines) == ((), [])


def test_a_head_in_small_pieces_is_read() -> None:
    with ModelServer(Turn(text="ok")) as server, gateway(all_of(server), {"m": CHAT}) as gate:
        with socket.create_connection(("127.0.0.1", gate.port), timeout=5) as end:
            for byte in head(gate, AUTH, LENGTH):
                end.send(bytes((byte,)))
            end.sendall(DATA)
            assert end.recv(100).startswith(b"HTTP/1.1 200")
        assert len(server.requests) == 1


def test_only_this_machines_own_address_is_served() -> None:
    with (
        ModelServer([]) as server,
        gateway(all_of(server), {"m": CHAT}) as gate,
        pytest.raises(ConnectionRefusedError),
    ):
        socket.create_connection(("127.0.0.2", gate.port), timeout=5)


def test_a_reservation_is_charged_when_the_client_leaves_and_when_the_gateway_is_killed(tmp_path: Path) -> None:
    slow = Turn(text="slow", fault=Fault(first_byte_ms=60_000))
    with ModelServer(slow) as server:
        services = {"a": backend(server, CHAT, prices=PRICES)}
        with gateway(services, {"m": "a"}, tmp_path, key=None, clients=client(budget_usd=1)) as gate:
            path, body = question(CHAT, max_tokens=500)
            with posted(gate, path, body):
                server.wait_requests(1)
            (end,) = gate.ends
            reserved = sum(getattr(line, "reserved", 0) for line in gate.lines)
    assert (end.end, end.charged) == ("left", reserved)
    assert reserved > 1_000
    killed = ExchangeJournal(tmp_path)
    killed.write(begin("ci", 70))
    killed.close()  # As a kill does, without the end's line.
    after = ExchangeJournal(tmp_path)
    assert after.used("ci") == reserved + 70
    after.close()


def test_raw_answers_of_the_vendors_clients_parse() -> None:
    """`with_raw_response` reads headers and parses the body later."""
    from tests.dialects import referees

    referees.need("openai", "claude")
    with ModelServer([Turn(text="ok")] * 2) as server, gateway(all_of(server), {"m": GEMINI}) as gate:
        chat = referees.sdk("openai").OpenAI(base_url=f"{gate.url}/v1", api_key="dummy", max_retries=0)
        made = chat.chat.completions.with_raw_response.create(**question(CHAT)[1])
        assert made.headers["x-request-id"]
        assert made.parse().choices[0].message.content == "ok"
        messages = referees.sdk("anthropic").Anthropic(base_url=gate.url, api_key="dummy", max_retries=0)
        other = messages.messages.with_raw_response.create(**question(MESSAGES)[1])
        assert other.headers["request-id"]
        assert other.parse().content[0].text == "ok"


def test_the_policy_of_an_agent_holds_and_a_denied_call_is_told_to_the_model(tmp_path: Path) -> None:
    rules = tmp_path / "rules.json"
    rules.write_text('{"disallowed_tools": ["write_file"]}')
    home, root = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    row = msgspec.structs.replace(agents(root)["maker"], policy=str(rules))
    with ModelServer(SCRIPT) as server, gateway(api(server), {}, home, agents={"maker": row}) as gate:
        status, _, data = ask(gate, "/v1/chat/completions", {**question(CHAT)[1], "model": "agent/maker"})
        told = json.dumps(server.requests[1].body["messages"])
    assert status == 200
    assert "policy_denied" in told
    assert "backplane apply" not in data.decode()
