"""What the gateway's clients meet: routes, fallbacks, errors, keep-alives, budgets and the record."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from backplane.cli import main
from backplane.config import GatewayClientSettings
from backplane.gateway.clients import digest
from backplane.gateway.record import ExchangeBegin
from backplane.testing import PROTOCOLS, Call, Failure, Fault, ModelServer, ProtocolName, ScriptUsage, Turn
from tests.gateway.ground import KEY, Gate, all_of, backend, gateway
from tests.scripted import events, question

CHAT, RESPONSES, MESSAGES, GEMINI = PROTOCOLS
PRICES = {"input": 1, "output": 2}
BEARER = {"authorization": f"Bearer {KEY}"}


def ask(
    gate: Gate, path: str, body: Any, headers: dict[str, str] | None = None, method: str = "POST"
) -> tuple[int, dict[str, str], bytes]:
    """Send one request on a connection of its own; return status, headers and body."""
    client = http.client.HTTPConnection("127.0.0.1", gate.port, timeout=10)
    try:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body)
        client.request(
            method, path, data, {"content-type": "application/json", **(BEARER if headers is None else headers)}
        )
        answer = client.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        client.close()


def said(gate: Gate, protocol: ProtocolName = CHAT, stream: bool = False, **members: Any) -> tuple[int, Any]:
    """Ask by a protocol's interface; return status and JSON, of a stream its last event."""
    path, body = question(protocol, stream=stream, **members)
    status, _, data = ask(gate, path, body)
    return status, json.loads(data) if not stream or status != 200 else events(data)


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


# Routes ---------------------------------------------------------------------------------------------------------------


def test_a_models_name_is_looked_up_before_its_patterns() -> None:
    with ModelServer([Turn(text="one"), Turn(text="two")]) as server:
        rows = {"m*": f"{CHAT}/pattern", "m": f"{CHAT}/exact"}
        with gateway(all_of(server), rows) as gate:
            said(gate)
            said(gate, model="mm")
        assert [request.body["model"] for request in server.requests] == ["exact", "pattern"]


def test_a_route_without_a_model_asks_for_the_name_that_the_client_gave() -> None:
    with ModelServer(Turn(text="one")) as server, gateway(all_of(server), {"*": MESSAGES}) as gate:
        said(gate, model="some/model")
        assert server.requests[0].body["model"] == "some/model"


def test_the_next_service_answers_when_one_is_overloaded() -> None:
    with ModelServer(Turn(fault=Fault(status=529))) as down, ModelServer(Turn(text="here")) as up:
        services = {"a": backend(down, MESSAGES), "b": backend(up, GEMINI)}
        with gateway(services, {"m": ["a", "b"]}) as gate:
            assert text_of(said(gate)[1]) == "here"
            (end,) = gate.ends
    assert (end.backend, end.tried) == ("b", ("a: backend_unavailable",))


def test_the_next_service_answers_when_a_stream_fails_before_its_first_word() -> None:
    failing = Turn(fault=Fault(failure=Failure(code="overloaded_error", message="busy")))
    with ModelServer(failing) as down, ModelServer(Turn(text="here")) as up:
        services = {"a": backend(down, MESSAGES), "b": backend(up, MESSAGES)}
        with gateway(services, {"m": ["a", "b"]}) as gate:
            found = said(gate, MESSAGES, stream=True)[1]
    assert "busy" not in str(found)
    assert "message_stop" in found[-1]


def test_no_other_service_is_asked_after_the_first_word() -> None:
    failing = Turn(text="so far", fault=Fault(failure=Failure(code="overloaded_error", message="busy")))
    with ModelServer(failing) as down, ModelServer(Turn(text="here")) as up:
        services = {"a": backend(down, MESSAGES), "b": backend(up, MESSAGES)}
        with gateway(services, {"m": ["a", "b"]}) as gate:
            found = said(gate, stream=True)[1]
            (end,) = gate.ends
        assert up.requests == ()
    assert any("busy" in row for row in found)
    assert "[DONE]" not in found
    assert (end.end, end.status) == ("failed", 200)


def test_a_refused_request_is_not_repeated_at_the_next_service() -> None:
    with ModelServer(Turn(fault=Fault(status=400, message="no"))) as one, ModelServer(Turn(text="here")) as two:
        with gateway({"a": backend(one, CHAT), "b": backend(two, CHAT)}, {"m": ["a", "b"]}) as gate:
            assert said(gate)[0] == 400
        assert two.requests == ()


def test_lists_name_the_models_and_not_the_patterns() -> None:
    with ModelServer([]) as server, gateway(all_of(server), {"gpt-5": f"{CHAT}/gpt-5", "x*": CHAT}) as gate:
        chat = json.loads(ask(gate, "/v1/models", None, method="GET")[2])
        messages = json.loads(
            ask(gate, "/v1/models?limit=1000", None, {"x-api-key": KEY, "anthropic-version": "x"}, "GET")[2]
        )
        gemini = json.loads(ask(gate, "/v1beta/models", None, {"x-goog-api-key": KEY}, "GET")[2])
        one = json.loads(ask(gate, "/v1/models/gpt-5", None, method="GET")[2])
    assert [row["id"] for row in chat["data"]] == [row["id"] for row in messages["data"]] == ["gpt-5"]
    assert [row["name"] for row in gemini["models"]] == ["models/gpt-5"]
    assert one["id"] == "gpt-5"
    assert one["context_window"] > 100_000


# Bytes and headers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_same_dialect_passes_untouched(protocol: ProtocolName, stream: bool) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if protocol == CHAT and stream else {}
    path, body = question(protocol, stream=stream, **options)
    headers = {**BEARER, "anthropic-version": "2026-10-21", "anthropic-beta": "one,two"}
    turn = Turn(reasoning="hm", text="Hello", calls=(Call(name="f", input={"a": 1}),))
    with ModelServer([turn, turn]) as server, gateway(all_of(server), {"m": protocol}) as gate:
        _, _, through = ask(gate, path, body, headers)
        first = server.requests[0]
    with ModelServer([turn]) as server:
        direct = Gate(server.port, Path())
        _, _, bare = ask(direct, path, body, headers)
    assert through == bare
    assert first.body == body
    if protocol == MESSAGES:
        assert (first.headers["anthropic-version"], first.headers["anthropic-beta"]) == ("2026-10-21", "one,two")
    assert KEY not in str(first.headers)


def test_the_counters_of_a_stream_are_asked_for_and_hidden_from_a_client_that_did_not_ask() -> None:
    with ModelServer(Turn(text="hi", usage=ScriptUsage(input=7, output=3))) as server:
        with gateway(all_of(server), {"m": CHAT}) as gate:
            found = said(gate, stream=True)[1]
            (end,) = gate.ends
        assert server.requests[0].body["stream_options"] == {"include_usage": True}
    assert found[-1].startswith("[DONE]")
    assert not [row for row in found[:-1] if "usage" in json.loads(row) or json.loads(row)["choices"] == []]
    assert end.tokens == {"input": 7, "output": 3, "cache_read": 0}


def test_gemini_streams_as_one_array_without_alt_sse() -> None:
    with ModelServer(Turn(text="hello")) as server, gateway(all_of(server), {"m": CHAT}) as gate:
        body = question(GEMINI)[1]
        _, headers, data = ask(gate, "/v1beta/models/m:streamGenerateContent", body, {"x-goog-api-key": KEY})
    found = json.loads(data)
    assert headers["content-type"] == "application/json"
    assert "".join(part["text"] for row in found for part in row["candidates"][0]["content"]["parts"]) == "hello"


@pytest.mark.parametrize(("protocol", "ping"), [(CHAT, b": ping\n\n"), (MESSAGES, b"event: ping"), (GEMINI, b"\r\n")])
def test_a_silent_stream_gets_keep_alives_that_its_clients_skip(
    protocol: ProtocolName, ping: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backplane.gateway.server.PING_S", 0.05)
    turn = Turn(text="late", fault=Fault(first_byte_ms=400))
    with ModelServer(turn) as server, gateway(all_of(server), {"m": CHAT}) as gate:
        path, body = question(protocol, stream=True)
        status, _, data = ask(gate, path, body)
    assert status == 200
    assert data.startswith(ping)
    assert data.count(ping) >= 3
    assert b"te" in data


# Errors ---------------------------------------------------------------------------------------------------------------


WORDS = {
    CHAT: lambda body: (body["error"]["type"], body["error"]["message"]),
    RESPONSES: lambda body: (body["error"]["type"], body["error"]["message"]),
    MESSAGES: lambda body: (body["error"]["type"], body["error"]["message"]),
    GEMINI: lambda body: (body["error"]["status"], body["error"]["message"]),
}
KINDS = {
    (401, CHAT): "authentication_error", (401, MESSAGES): "authentication_error", (401, GEMINI): "UNAUTHENTICATED",
    (404, CHAT): "invalid_request_error", (404, MESSAGES): "not_found_error", (404, GEMINI): "NOT_FOUND",
    (400, CHAT): "invalid_request_error", (400, MESSAGES): "invalid_request_error", (400, GEMINI): "INVALID_ARGUMENT",
}  # fmt: skip


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_errors_of_the_gateway_have_the_form_of_the_interface(protocol: ProtocolName) -> None:
    path, body = question(protocol)
    wrong = path.replace("/m:", "/none:")
    with ModelServer([]) as server, gateway(all_of(server), {"m": CHAT}) as gate:
        asked = {
            401: ask(gate, path, body, {}),
            404: ask(gate, wrong, {**body, "model": "none"} if "model" in body else body),
            400: ask(gate, path, b"{oops"),
        }
        assert server.requests == ()
    for status, (given, headers, data) in asked.items():
        kind, message = WORDS[protocol](json.loads(data))
        assert given == status
        assert kind == KINDS[status, CHAT if protocol == RESPONSES else protocol]
        assert message
        assert headers["request-id" if protocol == MESSAGES else "x-request-id"]


@pytest.mark.parametrize("body", [[], "text", 7, {"messages": []}, {"model": ""}, {"model": 7}, {"model": "m"}])
def test_a_body_that_asks_nothing_is_a_wrong_request(body: Any) -> None:
    with ModelServer([]) as server, gateway(all_of(server), {"m": MESSAGES}) as gate:
        status, _, data = ask(gate, "/v1/chat/completions", body)
    assert status == 400
    assert json.loads(data)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422, 429, 500, 503, 529])
@pytest.mark.parametrize("protocol", [CHAT, MESSAGES, GEMINI])
def test_a_services_status_survives_the_translation(protocol: ProtocolName, status: int) -> None:
    fault = Fault(status=status, message="as scripted", headers={"retry-after": "7"})
    with ModelServer(Turn(fault=fault)) as server, gateway(all_of(server), {"m": RESPONSES}) as gate:
        path, body = question(protocol)
        given, headers, data = ask(gate, path, body)
    assert given == (503 if status == 529 and protocol != MESSAGES else status)
    assert "as scripted" in WORDS[protocol](json.loads(data))[1]
    assert headers.get("retry-after") == "7"


def test_an_answer_without_a_word_is_an_error() -> None:
    empty = Turn(fault=Fault(raw=b"", headers={"content-type": "text/event-stream"}))
    with ModelServer([empty, empty]) as server, gateway(all_of(server), {"m": MESSAGES}) as gate:
        assert said(gate, stream=True)[0] == 502
        assert said(gate, MESSAGES, stream=True)[0] == 502


@pytest.mark.parametrize("size", [600, 1500, 2500])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_call_that_was_cut_never_ends_well(protocol: ProtocolName, size: int) -> None:
    call = Call(name="write", input={"text": "x" * 4000})
    turn = Turn(text="I write", calls=(call,), pieces=20, fault=Fault(cut_after_bytes=size))
    for service in PROTOCOLS:
        with ModelServer(turn) as server, gateway(all_of(server), {"m": service}) as gate:
            try:
                status, found = said(gate, protocol, stream=True)
            except http.client.IncompleteRead:  # In the same dialect the connection breaks, as at the service itself.
                assert (service, gate.ends[0].end) == (protocol, "failed")
                continue
            (end,) = gate.ends
        assert end.end == "failed", (service, found)
        assert status != 200 or any("error" in row for row in found), (service, found)
        assert not any("[DONE]" in row or "message_stop" in row for row in found)


# Limits and budgets ---------------------------------------------------------------------------------------------------


def client(key: str = KEY, **members: Any) -> dict[str, GatewayClientSettings]:
    return {"ci": GatewayClientSettings(key_sha256=digest(key), **members)}


def test_a_client_asks_only_its_models() -> None:
    clients = client(models=("gpt-*",))
    with ModelServer(Turn(text="hi")) as server:
        with gateway(all_of(server), {"*": CHAT, "gpt-5": CHAT}, key=None, clients=clients) as gate:
            assert said(gate, model="gpt-5")[0] == 200
            assert said(gate, model="other")[0] == 404
        assert len(server.requests) == 1


def test_requests_over_the_rate_are_told_when_to_come_again() -> None:
    with (
        ModelServer([Turn(text="hi")] * 3) as server,
        gateway(all_of(server), {"m": CHAT}, key=None, clients=client(requests_per_minute=2)) as gate,
    ):
        path, body = question(CHAT)
        answers = [ask(gate, path, body) for _ in range(3)]
    assert [status for status, _, _ in answers] == [200, 200, 429]
    assert 1 <= int(answers[-1][1]["retry-after"]) <= 60


def test_a_budget_holds_to_the_cent_and_over_a_restart(tmp_path: Path) -> None:
    usage = ScriptUsage(input=1000, output=500)  # 2,000 millionths by the prices.
    home = tmp_path / "home"
    home.mkdir()
    with ModelServer([Turn(text="hi", usage=usage)] * 9) as server:
        services = {"a": backend(server, CHAT, prices=PRICES)}
        given: dict[str, Any] = {"key": None, "clients": client(budget_usd=0.005)}
        statuses = []
        for _ in range(2):
            with gateway(services, {"m": "a"}, home, **given) as gate:
                statuses += [said(gate, max_tokens=500)[0] for _ in range(2)]
        assert statuses == [200, 200, 403, 403]
        assert len(server.requests) == 2
        assert sum(end.charged for end in gate.ends) == 4000


def test_an_answer_that_failed_before_another_service_answered_is_charged_too() -> None:
    failing = Turn(fault=Fault(failure=Failure(code="overloaded_error", message="busy")))
    usage = ScriptUsage(input=1000, output=500)
    with ModelServer(failing) as down, ModelServer(Turn(text="here", usage=usage)) as up:
        services = {name: backend(server, MESSAGES, prices=PRICES) for name, server in (("a", down), ("b", up))}
        with gateway(services, {"m": ["a", "b"]}, key=None, clients=client(budget_usd=1)) as gate:
            assert said(gate, MESSAGES, stream=True, max_tokens=100)[0] == 200
            (end,) = gate.ends
            (begin,) = [line for line in gate.lines if isinstance(line, ExchangeBegin)]
    assert (end.end, end.cost, end.charged) == ("complete", None, begin.reserved)


def test_a_free_model_still_answers_when_the_budget_is_spent() -> None:
    free = {"input": 0, "output": 0}
    with ModelServer([Turn(text="hi")] * 2) as server:
        services = {"dear": backend(server, CHAT, prices=PRICES), "free": backend(server, CHAT, prices=free)}
        with gateway(services, {"m": "dear", "f": "free"}, key=None, clients=client(budget_usd=0)) as gate:
            assert said(gate)[0] == 403
            assert said(gate, model="f")[0] == 200


def test_a_budget_refuses_a_model_whose_price_is_unknown() -> None:
    with (
        ModelServer([]) as server,
        gateway(all_of(server), {"m": CHAT}, key=None, clients=client(budget_usd=9)) as gate,
    ):
        status, answer = said(gate)
    assert status == 403
    assert "price of m is unknown" in answer["error"]["message"]


# The record -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", [MESSAGES, CHAT])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_stops_the_service(stream: bool, service: ProtocolName) -> None:
    fault = Fault(pause_ms=20) if stream else Fault(first_byte_ms=5000)
    with (
        ModelServer(Turn(text="word " * 500, pieces=500, fault=fault)) as server,
        gateway(all_of(server), {"m": service}) as gate,
    ):
        client = http.client.HTTPConnection("127.0.0.1", gate.port, timeout=10)
        path, body = question(CHAT, stream=stream)
        client.request("POST", path, json.dumps(body), BEARER)
        server.wait_requests(1)
        if stream:
            client.getresponse().read(10)
        began = time.monotonic()
        client.close()
        (end,) = gate.ends
        assert time.monotonic() - began < 2
        assert end.end == "left"
        assert server.wait_end(1) == "left"


def test_the_record_names_tokens_cost_losses_and_no_contents() -> None:
    usage = ScriptUsage(input=1000, output=500)
    with (
        ModelServer(Turn(text="the answer", usage=usage)) as server,
        gateway({"a": backend(server, MESSAGES, prices=PRICES)}, {"m": "a/other"}) as gate,
    ):
        said(gate, logit_bias={"5": 1})
        (end,) = gate.ends
        (path,) = (gate.home / "gateway").glob("*.jsonl")
        text = path.read_text()
    assert (end.end, end.status, end.backend, end.model, end.cost) == ("complete", 200, "a", "other", 2000)
    assert end.tokens == {"input": 1000, "output": 500, "cache_read": 0, "cache_write": 0}
    assert any("logit_bias" in row for row in end.lost)
    assert not [word for word in ("the answer", '"go"', KEY) if word in text]


def test_cost_sums_up_the_exchanges(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = ScriptUsage(input=1000, output=500)
    with ModelServer([Turn(text="hi", usage=usage)] * 3) as server:
        services = {"a": backend(server, CHAT, prices=PRICES), "b": backend(server, MESSAGES)}
        with gateway(services, {"m": "a", "n": "b"}) as gate:
            statuses = [said(gate, model=model)[0] for model in ("m", "m", "n")]
            assert (statuses, len(gate.ends)) == ([200] * 3, 3)
            monkeypatch.setenv("BACKPLANE_HOME", str(gate.home))
            assert main(["cost", "--gateway", "--json"]) == 0
            rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    found = [(row["key"], row["runs"], row["cost_usd_micros"]) for row in rows]
    assert found == [
        ("a", 2, 4000),
        ("b", 1, None),
        (None, 3, None),
    ]
    assert main(["cost", "--by", "client"]) == 2


def test_a_strict_gateway_refuses_what_a_service_cannot_get() -> None:
    with ModelServer([]) as server, gateway(all_of(server), {"m": MESSAGES}, losses="fail") as gate:
        status, answer = said(gate, logit_bias={"5": 1})
        assert server.requests == ()
    assert status == 400
    assert "logit_bias" in answer["error"]["message"]


def test_a_member_that_names_another_service_is_refused() -> None:
    with ModelServer([]) as server, gateway(all_of(server), {"m": CHAT}) as gate:
        assert said(gate, api_base="http://127.0.0.1:9")[0] == 400
        assert server.requests == ()


# A program started behind it ------------------------------------------------------------------------------------------

ASK = """
import os, urllib.error, urllib.request
headers = {"authorization": "Bearer " + os.environ["ANTHROPIC_AUTH_TOKEN"]}
body = b'{"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "go"}]}'
try:
    urllib.request.urlopen(urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", body, headers))
except urllib.error.HTTPError:
    pass
raise SystemExit(3)
"""


@pytest.mark.parametrize("turn", [Turn(text="ok"), Turn(fault=Fault(status=401, message="as scripted"))])
def test_a_program_that_hides_its_failed_requests_ends_with_their_reason(turn: Turn, tmp_path: Path) -> None:
    with ModelServer(turn) as server:
        options = f'{{ protocol = "anthropic", base_url = "{server.base_url("anthropic")}" }}'
        rows = f'[backends.mine]\nhost = "api"\noptions = {options}\n[gateway.models]\n"*" = "mine"\n'
        (tmp_path / "backplane.toml").write_text(rows)
        command = [sys.executable, "-m", "backplane", "gateway", "--config", str(tmp_path / "backplane.toml")]
        done = subprocess.run(
            [*command, "--for", "claude", "--", sys.executable, "-c", ASK], capture_output=True, text=True, check=False,
            env={**os.environ, "BACKPLANE_HOME": str(tmp_path / "home")}, timeout=30,
        )  # fmt: skip
    assert done.returncode == 3
    said = "1 of 1 request failed; the last: backend_auth_failed" in done.stderr and "as scripted" in done.stderr
    assert said == (turn.text is None), done.stderr


WAIT = """
import signal, sys
def end(number, _):
    print("ended in order", number, flush=True)
    sys.exit(7)
signal.signal(signal.SIGINT, end)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_gateway_ends_its_program_in_order(number: signal.Signals, tmp_path: Path) -> None:
    env = {**os.environ, "BACKPLANE_HOME": str(tmp_path / "home"), "ANTHROPIC_API_KEY": "dummy"}
    command = [sys.executable, "-m", "backplane", "gateway", "--for", "claude", "--", sys.executable, "-c", WAIT]
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        program.send_signal(number)
        assert program.stdout.readline() == f"ended in order {number}\n"
        assert program.wait(10) == 7
