"""What the record says, and what budgets lose, when an exchange ends badly: never less, and nothing that was not."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from anyio.from_thread import start_blocking_portal

from backplane.config import BackendSettings, GatewayAgentSettings, GatewayClientSettings, GatewaySettings, Settings
from backplane.gateway.clients import digest
from backplane.gateway.in_run import RunGateway, open_run_gateway
from backplane.gateway.journal import recorded
from backplane.gateway.key_proxy import KeyUse
from backplane.gateway.routes import ModelRoutes
from backplane.testing import Fault, ModelServer, ProtocolName, ScriptUsage, Turn
from backplane.view.exchanges import diagnose_exchange
from tests.gateway.ground import backend, gateway
from tests.gateway.test_gateway import BEARER, CHAT, GEMINI, MESSAGES, PRICES, RESPONSES, client, said
from tests.gateway.test_gateway_cases import posted
from tests.gateway.test_gateway_kept import plain_service, row
from tests.scripted import question

DOWN = Turn(fault=Fault(status=503, message="out to lunch"))
EMPTY = Turn(fault=Fault(raw=b""))
"""A service that bills and says nothing."""


# The gateway's own clients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [CHAT, MESSAGES])
def test_a_failure_has_the_status_and_the_answer_that_the_client_got(protocol: Any, tmp_path: Path) -> None:
    with (
        ModelServer(DOWN) as server,
        gateway({"a": backend(server, protocol)}, {"m": "a"}, tmp_path, bodies=True) as gate,
    ):
        status, _ = said(gate)
        (end,) = gate.ends
    (kept,) = [json.loads(path.read_text()) for path in (tmp_path / "gateway").glob("*.bodies")]
    assert (status, end.status, end.end, end.first_ms) == (503, 503, "failed", None)
    assert "out to lunch" in kept["answer"]


@pytest.mark.parametrize(("last", "status"), [(Turn(text="hi"), 200), (Turn(fault=Fault(status=422)), 422)])
def test_the_cost_is_unknown_if_a_service_that_failed_may_bill(last: Turn, status: int) -> None:
    with ModelServer(EMPTY) as one, ModelServer(last) as two:
        services = {"a": backend(one, CHAT, prices=PRICES), "b": backend(two, CHAT, prices=PRICES)}
        given: dict[str, Any] = {"key": None, "clients": client(budget_usd=1)}
        with gateway(services, {"m": ["a", "b"]}, **given) as gate:
            assert said(gate, max_tokens=10)[0] == status
            (end,) = gate.ends
    assert (end.tried, end.cost) == (("a: stream_closed",), None)
    assert end.charged > 2000


@pytest.mark.parametrize("usage", [ScriptUsage(input=10, output=-(10**9)), ScriptUsage(input=10**15, output=1)])
def test_a_counter_that_cannot_be_true_is_unknown(usage: ScriptUsage) -> None:
    with ModelServer(Turn(text="hi", usage=usage)) as server:
        given: dict[str, Any] = {"key": None, "clients": client(budget_usd=1)}
        with gateway({"a": backend(server, CHAT, prices=PRICES)}, {"m": "a"}, **given) as gate:
            assert said(gate, max_tokens=10)[0] == 200
            (end,) = gate.ends
    assert end.cost is None
    assert not {-(10**9), 10**15} & set((end.tokens or {}).values())
    assert 0 < end.charged < 10_000


@pytest.mark.parametrize(
    ("members", "code"),
    [({"model": "nobodys"}, "backend_model_not_found"), ({"api_base": "http://x"}, "dialect_mapping_failed"),
     ({"max_tokens": 10**9}, "policy_denied")],
)  # fmt: skip
def test_a_request_that_no_service_is_asked_for_is_recorded(members: dict[str, Any], code: str) -> None:
    with ModelServer(DOWN) as server:
        given: dict[str, Any] = {"key": None, "clients": client(budget_usd=1)}
        with gateway({"a": backend(server, CHAT, prices=PRICES)}, {"m": "a"}, **given) as gate:
            path, body = question(CHAT, **members)
            answer = httpx.post(gate.url + path, json=body, headers=BEARER)
            (end,) = gate.ends
            (one,) = recorded(gate.home)
        assert not server.requests
    assert one.asked == body["model"]
    assert diagnose_exchange(one, 0).next == ("change what the error names",)
    assert (end.id, end.end, end.code) == (answer.headers["x-backplane-exchange"], "refused", code)
    assert (end.status, end.cost, end.charged) == (answer.status_code, 0, 0)
    assert end.error
    assert end.error in answer.json()["error"]["message"]


def test_only_what_is_recorded_has_an_id_to_look_up() -> None:
    with ModelServer(Turn(text="hi")) as server:
        given: dict[str, Any] = {"key": None, "clients": client(requests_per_minute=1)}
        with gateway({"a": backend(server, CHAT)}, {"m": "a"}, **given) as gate:
            path, body = question(CHAT)
            answers = [httpx.post(gate.url + path, json=body, headers=BEARER) for _ in range(2)]
            answers.append(httpx.get(f"{gate.url}/v1/models", headers=BEARER))
            answers.append(httpx.post(gate.url + path, json=body, headers={"authorization": "Bearer wrong"}))
            (end,) = gate.ends
    assert [answer.status_code for answer in answers] == [200, 429, 200, 401]
    assert [answer.headers.get("x-backplane-exchange") for answer in answers] == [end.id, None, None, None]
    assert all("x-request-id" in answer.headers for answer in answers)


def test_a_client_that_does_not_read_its_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backplane.sandbox.http.IDLE_S_MAX", 0.3)
    with ModelServer(Turn(text="x" * 20_000_000)) as server, gateway({"a": backend(server, CHAT)}, {"m": "a"}) as gate:
        path, body = question(CHAT)
        with posted(gate, path, body) as end:
            server.wait_requests(1)
            (found,) = gate.ends
            assert end.fileno() > 0
    assert (found.end, found.cost) == ("left", None)


# What only the configuration decides ----------------------------------------------------------------------------------


def test_a_client_names_no_other_model_beside_the_one_that_it_may_ask() -> None:
    given: dict[str, Any] = {"key": None, "clients": client(models=("cheap",))}
    with ModelServer(Turn(text="hi")) as server, gateway({"a": backend(server, CHAT)}, {"*": "a"}, **given) as gate:
        path, body = question(CHAT)
        answer = httpx.post(gate.url + path, json={**body, "model": "cheap", "MODEL": "dear"}, headers=BEARER)
        assert not server.requests
    assert (answer.status_code, "'MODEL'" in answer.text) == (400, True)


def test_the_parts_of_a_batch_have_the_model_of_its_path() -> None:
    with (
        plain_service({":batchEmbedContents": {"embeddings": []}}) as asked,
        gateway({"s": row(asked, GEMINI)}, {"*": "s"}) as gate,
    ):
        body = {"requests": [{"model": "models/dear", "content": {"parts": [{"text": "x"}]}}]}
        httpx.post(f"{gate.url}/v1beta/models/cheap:batchEmbedContents", json=body, headers=BEARER)
    assert [one["model"] for _, _, sent in asked for one in sent["requests"]] == ["models/cheap"]


def test_a_client_does_not_choose_who_pays() -> None:
    options = {"headers": {"openai-project": "ours"}}
    with ModelServer(Turn(text="hi")) as server, gateway({"a": backend(server, CHAT, **options)}, {"m": "a"}) as gate:
        path, body = question(CHAT)
        own = {"openai-project": "theirs", "openai-organization": "theirs", "openai-beta": "x"}
        assert httpx.post(gate.url + path, json=body, headers={**BEARER, **own}).status_code == 200
        (request,) = server.requests
    found = {name: value for name, value in request.headers.items() if name.startswith("openai-")}
    assert found == {"openai-project": "ours", "openai-beta": "x"}


# What nobody knows is not shown as 0 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("front", [CHAT, RESPONSES])
def test_a_translated_answer_has_the_time_at_which_it_was_made(front: ProtocolName, stream: bool) -> None:
    with ModelServer(Turn(text="hi")) as server, gateway({"a": backend(server, MESSAGES)}, {"m": "a"}) as gate:
        path, body = question(front, stream=stream)
        text = httpx.post(gate.url + path, json=body, headers=BEARER).text
    times = [int(found) for found in re.findall(r'"created(?:_at)?": ?(\d+)', text)]
    assert times, text
    assert all(abs(found - time.time()) < 60 for found in times), text


def test_an_agent_without_counters_shows_none_and_needs_a_key_without_a_budget(tmp_path: Path) -> None:
    clients = {**client(budget_usd=1), "free": GatewayClientSettings(key_sha256=digest("free"))}
    given: dict[str, Any] = {"agents": {"mock": GatewayAgentSettings(root=str(tmp_path))}, "clients": clients}
    with gateway({"mock": BackendSettings(host="mock")}, {}, key=None, **given) as gate:
        path, body = question(CHAT)
        body = {**body, "model": "agent/mock"}
        denied = httpx.post(gate.url + path, json=body, headers=BEARER)
        answer = httpx.post(gate.url + path, json=body, headers={"authorization": "Bearer free"}, timeout=30)
        refused, complete = gate.ends
    assert (denied.status_code, refused.end) == (403, "refused")
    assert "budget_usd" in denied.text
    assert "prices" not in denied.text
    assert (answer.status_code, complete.tokens, "usage" in answer.json()) == (200, None, False)
    assert answer.json()["created"] > 0


@pytest.mark.parametrize(("host", "status"), [("10.0.0.5", 200), ("10.0.0.5:80", 200), ("10.0.0.6", 403)])
def test_a_client_may_leave_out_the_usual_port(monkeypatch: pytest.MonkeyPatch, host: str, status: int) -> None:
    monkeypatch.setattr("backplane.gateway.server.own_address", lambda _: "10.0.0.5:80")
    with ModelServer(Turn(text="hi")) as server, gateway({"a": backend(server, CHAT)}, {"m": "a"}) as gate:
        answer = httpx.get(f"{gate.url}/v1/models", headers={**BEARER, "host": host})
    assert answer.status_code == status


# The gateway of a run -------------------------------------------------------------------------------------------------


@contextmanager
def run_gateway(server: ModelServer, use: KeyUse, **options: Any) -> Iterator[RunGateway]:
    routes = GatewaySettings(models={"*": "a/m"})
    settings = Settings(backends={"a": backend(server, CHAT, prices=PRICES, **options)}, gateway=routes)
    with start_blocking_portal() as portal:
        opened = open_run_gateway(ModelRoutes(settings, {}), "http://127.0.0.1:1/v1", use)
        with portal.wrap_async_context_manager(opened) as found:
            yield found


def ask_in_run(gate: RunGateway, **members: Any) -> int:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 100, **members}
    headers = {"authorization": f"Bearer {gate.placeholder}"}
    return httpx.post(f"{gate.address}/v1/chat/completions", json=body, headers=headers, timeout=20).status_code


def test_a_run_is_charged_for_an_answer_that_did_not_come_in_time() -> None:
    use = KeyUse()
    late = Turn(text="late", fault=Fault(first_byte_ms=30_000))
    with ModelServer(late) as server, run_gateway(server, use, timeout_s=0.3) as gate:
        assert ask_in_run(gate) == 504
    assert (use.unanswered, use.meter.uncounted) == (1, 1)
    assert (use.meter.tokens_most or 0) > 1000
    assert not use.meter.unknown


def test_a_run_is_not_charged_for_a_refusal() -> None:
    use = KeyUse()
    with ModelServer(DOWN) as server, run_gateway(server, use) as gate:
        assert ask_in_run(gate) == 503
    assert (use.unanswered, use.meter.uncounted, use.meter.tokens_most) == (1, 0, 0)


def test_a_runs_budget_gains_nothing_by_a_negative_counter() -> None:
    use = KeyUse()
    with (
        ModelServer(Turn(text="hi", usage=ScriptUsage(input=10, output=-(10**9)))) as server,
        run_gateway(server, use) as gate,
    ):
        assert ask_in_run(gate) == 200
    assert (use.meter.tokens_most or 0) > 1000
    assert (use.meter.spent.micros or 0) > 0


@pytest.mark.parametrize("member", ["conversation", "cachedContent"])
def test_what_a_service_keeps_for_its_key_is_refused_among_several_clients(member: str) -> None:
    front = RESPONSES if member == "conversation" else GEMINI
    with ModelServer(Turn(text="hi")) as server:
        rows = {"a": backend(server, front)}
        with gateway(rows, {"m": "a"}, key=None, clients={**client(), "other": client("another")["ci"]}) as gate:
            path, body = question(front)
            body[member] = "conv_1"
            answer = httpx.post(gate.url + path, json=body, headers=BEARER)
            assert answer.status_code == 400
            assert member in answer.text
        assert not server.requests


@pytest.mark.parametrize("hidden", ['"model": "dear", ', '"\\u006dodel": "dear", '])
def test_a_service_reads_no_other_model_than_the_one_that_was_checked(hidden: str) -> None:
    with (
        ModelServer(Turn(text="hi")) as server,
        gateway({"a": backend(server, MESSAGES)}, {"*": "a"}) as gate,
    ):
        path, body = question(MESSAGES)
        sent = "{" + hidden + httpx.Request("POST", gate.url, json=body).content.decode()[1:]
        answer = httpx.post(gate.url + path, content=sent, headers={**BEARER, "content-type": "application/json"})
        assert answer.status_code == 200, answer.text
        (one,) = server.requests
    assert int(one.headers["content-length"]) <= len(sent) - len('"model":"dear",')
