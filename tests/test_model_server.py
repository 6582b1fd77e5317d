"""The scripted model server as it is used: which turn answers, who is let in, what it tells, how it is started."""

from __future__ import annotations

import base64
import doctest
import gzip
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

import backplane.testing
from backplane.errors import BackplaneError
from backplane.testing import (
    PROTOCOLS,
    SIDE_TURNS,
    Call,
    Fault,
    ModelServer,
    ProtocolName,
    Script,
    ScriptUsage,
    Turn,
    When,
    read_script,
)
from tests.scripted import PATHS, WAIT_S, ask, post, question, streamed, text_of

ROOT = Path(__file__).parent.parent
each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)


# Which turn answers ---------------------------------------------------------------------------------------------------


def test_the_example_in_the_documentation_runs() -> None:
    assert doctest.testmod(backplane.testing) == doctest.TestResults(failed=0, attempted=4)


@each_protocol
def test_turns_answer_in_order_and_then_none_is_left(protocol: ProtocolName) -> None:
    with ModelServer([{"text": "first"}, {"text": "second"}]) as server:
        answers = [json.dumps(ask(server, protocol)) for _ in range(3)]
        assert ["first" in answers[0], "second" in answers[1]] == [True, True]
        assert "no turn left" in answers[2]
        assert [(one.turn, one.status) for one in server.requests] == [(0, 200), (1, 200), (None, 400)]
        assert server.unscripted == server.requests[2:]


def test_a_turn_without_end_answers_every_time() -> None:
    with ModelServer(Turn(text="again", times=None)) as server:
        assert [text_of(ask(server)) for _ in range(4)] == ["again"] * 4


WHENS: list[tuple[When, dict[str, Any], dict[str, Any]]] = [
    (When(last="two"), {"says": "one two"}, {"says": "one"}),
    (When(anywhere='"user":"x"'), {"user": "x"}, {"user": "y"}),
    (When(tools=True), {"tools": [{"type": "web_search"}]}, {"tools": []}),
    (When(has="/stream_options"), {"stream_options": None}, {}),
    (When(is_text="/system"), {"system": "s"}, {"system": [{"type": "text", "text": "s"}]}),
    (When(max_tokens=1), {"max_tokens": 1}, {"max_tokens": 2}),
]


@pytest.mark.parametrize(("when", "yes", "no"), WHENS, ids=[str(row[0])[5:30] for row in WHENS])
def test_a_condition_chooses_its_requests_and_leaves_the_queue_alone(
    when: When, yes: dict[str, Any], no: dict[str, Any]
) -> None:
    with ModelServer([Turn(text="queue", times=None), Turn(text="chosen", when=when, times=None)]) as server:
        assert "chosen" in json.dumps(ask(server, **yes))
        assert "queue" in json.dumps(ask(server, **no))
        assert "chosen" in json.dumps(ask(server, **yes))


HISTORIES: list[tuple[ProtocolName, dict[str, Any]]] = [
    (
        "openai_compatible",
        {
            "messages": [
                {"role": "user", "content": "prompt"},
                {"role": "assistant", "tool_calls": [{"id": "c"}]},
                {"role": "tool", "tool_call_id": "c", "content": "result"},
            ]
        },
    ),
    (
        "openai_responses",
        {
            "input": [
                {"type": "message", "role": "user", "content": "prompt"},
                {"type": "function_call", "call_id": "c", "name": "n", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "result"},
            ]
        },
    ),
    (
        "anthropic",
        {
            "messages": [
                {"role": "user", "content": "prompt"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "n", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "result"}]},
            ]
        },
    ),
    (
        "gemini_ai_studio",
        {
            "contents": [
                {"role": "user", "parts": [{"text": "prompt"}]},
                {"role": "model", "parts": [{"functionCall": {"name": "n", "args": {}}}]},
                {"role": "user", "parts": [{"functionResponse": {"name": "n", "response": {"output": "result"}}}]},
            ]
        },
    ),
]


@pytest.mark.parametrize(("protocol", "history"), HISTORIES)
def test_the_last_words_are_what_came_after_the_models_own(protocol: ProtocolName, history: dict[str, Any]) -> None:
    turns = [Turn(text="to the prompt", when=When(last="prompt")), Turn(text="to the result", when=When(last="result"))]
    with ModelServer(turns) as server:
        assert "to the result" in json.dumps(ask(server, protocol, **history))


def test_what_agents_ask_beside_their_work_does_not_eat_the_script() -> None:
    tools = [{"type": "function", "function": {"name": "read"}}]
    with ModelServer([*SIDE_TURNS, Turn(text="the work")]) as server:
        assert text_of(ask(server, says="a title, please")) == "A title"
        assert text_of(ask(server, tools=tools, max_tokens=1)) == "ok"
        assert text_of(ask(server, tools=tools)) == "the work"
        assert not server.unscripted


def test_another_script_can_be_played_on_the_same_port() -> None:
    with ModelServer(Turn(text="old")) as server:
        assert text_of(ask(server)) == "old"
        server.play([{"text": "new"}])
        assert text_of(ask(server)) == "new"


@pytest.mark.parametrize(
    "wrong",
    [[{"txt": "hi"}], {"turns": [{"pieces": "many"}]}, [{"fault": {"status": "cake"}}], {"protocols": ["soap"]}],
)
def test_a_script_with_a_slip_of_the_pen_is_refused(wrong: Any) -> None:
    with pytest.raises(BackplaneError, match="the script of a model server") as caught:
        read_script(wrong)
    assert caught.value.code == "contract_schema_violation"


def test_a_script_may_be_json() -> None:
    turn = Turn(text="x", calls=(Call(name="c", input="free", kind="custom"),), usage=None, fault=Fault(raw=b"\xff\0"))
    plain = {
        "text": "x", "usage": None, "calls": [{"name": "c", "input": "free", "kind": "custom"}],
        "fault": {"raw": base64.b64encode(b"\xff\0").decode()},
    }  # fmt: skip
    assert read_script(json.loads(json.dumps([plain]))) == Script(turns=(turn,)) == read_script([turn])


# Who is let in, and where ---------------------------------------------------------------------------------------------


@each_protocol
def test_only_the_scripts_keys_are_let_in(protocol: ProtocolName) -> None:
    names = {"anthropic": "x-api-key", "gemini_ai_studio": "x-goog-api-key"}
    name, form = names.get(protocol, "authorization"), "{}" if protocol in names else "Bearer {}"
    with ModelServer(Script(turns=(Turn(text="in"),), keys=("right",))) as server:
        path, body = question(protocol)
        wrong = post(server, path, body, {name: form.format("wrong")})
        assert wrong[0] == (400 if protocol == "gemini_ai_studio" else 401)
        assert json.loads(wrong[2])["error"]["message"] == "the API key is not valid"
        assert post(server, path, body)[0] == 401
        assert post(server, path, body, {name: form.format("right")})[0] == 200


def test_a_path_that_the_script_does_not_serve_is_not_found() -> None:
    script = Script(turns=(Turn(text="in", times=None),), prefix="/api/v1", protocols=("anthropic",))
    with ModelServer(script) as server:
        body = question("anthropic")[1]
        assert [post(server, path, body)[0] for path in ("/v1/messages", "/api/v1/responses", "/nothing")] == [404] * 3
        assert post(server, "/api/v1/messages", body)[0] == 200


def test_models_counts_and_probes_are_answered_without_a_turn() -> None:
    with ModelServer(Script(models=("one", "two"))) as server:
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)

        def get(path: str, method: str = "GET", **headers: str) -> tuple[int, Any]:
            client.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            answer = client.getresponse()
            return answer.status, json.loads(answer.read() or "null")

        assert [row["id"] for row in get("/v1/models")[1]["data"]] == ["one", "two"]
        assert get("/v1/models", anthropic_version="2023-06-01")[1]["first_id"] == "one"
        assert [row["name"] for row in get("/v1beta/models")[1]["models"]] == ["models/one", "models/two"]
        assert get("/v1/models/two")[1]["id"] == "two"
        assert get("/", "HEAD") == (200, None)
        assert get("/v1/models", "HEAD") == (200, None)
        assert get("/v1/responses", upgrade="websocket", connection="Upgrade")[0] == 426
        assert {one.connection for one in server.requests} == {1}
        client.close()
        counted = post(server, "/v1/messages/count_tokens", {"x": "y" * 400})
        assert json.loads(counted[2]) == {"input_tokens": 102}
        assert not server.unscripted


def test_packed_and_chunked_requests_are_read_and_other_codings_refused() -> None:
    packed = gzip.compress(json.dumps(question("openai_compatible")[1]).encode())
    with ModelServer(Turn(text="in", times=None)) as server:
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
        for coding, status in (("gzip", 200), ("zstd", 415)):
            client.request("POST", PATHS["openai_compatible"], iter([packed]), {"content-encoding": coding})
            answer = client.getresponse()
            assert (answer.status, bool(answer.read())) == (status, True)
        client.close()
        assert [one.body is None for one in server.requests] == [False, True]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", b" 400 "),
        (b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", b" 400 "),
        (b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999999\r\n\r\n", b" 413 "),
        (b"GET / HTTP/1.1\r\n" + b"a" * 70_000, b" 431 "),
    ],
)
def test_what_is_no_request_is_refused_and_the_next_client_served(sent: bytes, status: bytes) -> None:
    with ModelServer(Turn(text="in")) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as sock:
            sock.sendall(sent)
            assert status in sock.recv(65536)
        assert text_of(ask(server)) == "in"


# Usage, size, loops, processes ----------------------------------------------------------------------------------------


def test_usage_is_exactly_what_the_script_says_or_absent() -> None:
    counted = Turn(text="x", usage=ScriptUsage(input=100, output=30, cache_read=40, cache_write=10, reasoning=7))
    with ModelServer([counted, counted, counted, counted, counted, Turn(text="x", usage=None)]) as server:
        assert ask(server)["usage"]["prompt_tokens_details"] == {"cached_tokens": 40, "cache_write_tokens": 10}
        assert ask(server, "openai_responses")["usage"]["output_tokens_details"] == {"reasoning_tokens": 7}
        assert ask(server, "anthropic")["usage"]["input_tokens"] == 50
        assert ask(server, "gemini_ai_studio")["usageMetadata"]["candidatesTokenCount"] == 23
        # A stream of Chat Completions counts only for who asked.
        assert b"prompt_tokens" not in streamed(server)[1]
        assert "usage" not in ask(server)


def test_it_serves_the_loop_of_its_caller() -> None:
    async def talk() -> bytes:
        with ModelServer(Turn(text="for any loop")) as server:
            path, body = question("anthropic")
            data = json.dumps(body).encode()
            async with await anyio.connect_tcp("127.0.0.1", server.port) as stream:
                head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
                await stream.send(head.encode() + data)
                return b"".join([piece async for piece in stream])

    assert b"for any loop" in anyio.run(talk)


def test_as_a_process_it_tells_its_port_and_keeps_a_record(tmp_path: Path) -> None:
    script, record = tmp_path / "script.json", tmp_path / "record.jsonl"
    script.write_text(json.dumps([{"text": "from a process"}]))
    command = [sys.executable, "-P", "-m", "backplane.testing", str(script), "--record", str(record)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ}) as child:
        try:
            assert child.stdout is not None
            port = int(child.stdout.readline())
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
            client.request("POST", PATHS["openai_compatible"], json.dumps(question("openai_compatible")[1]))
            assert text_of(json.loads(client.getresponse().read())) == "from a process"
            client.close()
        finally:
            child.send_signal(signal.SIGTERM)
    assert child.returncode == 0
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(line["t"], line["number"]) for line in lines] == [("request", 1), ("end", 1)]
    assert lines[0]["body"]["messages"][0]["content"] == "go"
    assert lines[1] == {"t": "end", "number": 1, "status": 200, "ended": "whole"}


def test_as_a_process_it_says_what_is_wrong_with_its_script(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text('[{"txt": "hi"}]')
    command = [sys.executable, "-P", "-m", "backplane.testing", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown field `txt`" in done.stderr
