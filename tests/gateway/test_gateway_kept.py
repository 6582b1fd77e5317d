"""Kept answers of Responses, counts of tokens, and requests that only a service of the same dialect answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from backplane.config import BackendSettings, GatewayClientSettings
from backplane.gateway.clients import digest
from backplane.testing import PROTOCOLS, Call, Fault, ModelServer, ProtocolName, Turn
from tests.dialects import referees
from tests.gateway.ground import KEY, all_of, gateway
from tests.gateway.test_gateway import BEARER, CHAT, GEMINI, MESSAGES, RESPONSES, ask, client
from tests.scripted import events, question

OTHER = "another-key"


class Asked(list[tuple[str, str, Any]]):
    """Method, path and JSON of each request to a `plain_service`."""

    base_url = ""


@contextmanager
def plain_service(answers: dict[str, Any]) -> Iterator[Asked]:
    """Serve JSON by the ends of paths, and 404 for others."""
    asked = Asked()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            data = self.rfile.read(int(self.headers.get("content-length") or 0))
            asked.append((self.command, self.path, json.loads(data) if data else None))
            found = next((one for end, one in answers.items() if self.path.endswith(end)), None)
            body = json.dumps({"error": {"message": "not here"}} if found is None else found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_DELETE = answer

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        asked.base_url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield asked
        finally:
            server.shutdown()


def row(asked: Asked, protocol: ProtocolName, **options: Any) -> BackendSettings:
    version = "/v1beta" if protocol == GEMINI else "/v1"
    return BackendSettings(
        host="api", options={"protocol": protocol, "base_url": asked.base_url + version, "timeout_s": 10, **options}
    )


# Kept answers ---------------------------------------------------------------------------------------------------------


def two_clients() -> dict[str, GatewayClientSettings]:
    return {**client(), "other": GatewayClientSettings(key_sha256=digest(OTHER))}


def response_of(data: bytes, *, stream: bool) -> Any:
    return json.loads(events(data)[-1])["response"] if stream else json.loads(data)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("service", PROTOCOLS)
def test_an_answer_is_kept_for_its_client_alone(service: ProtocolName, stream: bool) -> None:
    with (
        ModelServer([Turn(text="the answer")] * 2) as server,
        gateway(all_of(server), {"m": service}, key=None, clients=two_clients()) as gate,
    ):
        path, body = question(RESPONSES, stream=stream)
        made = response_of(ask(gate, path, body)[2], stream=stream)
        at = f"/v1/responses/{made['id']}"
        status, _, data = ask(gate, at, None, method="GET")
        assert (status, json.loads(data)) == (200, made)
        for method in ("GET", "DELETE"):
            status, _, data = ask(gate, at, None, {"authorization": f"Bearer {OTHER}"}, method)
            assert status == 404
            assert "not found" in json.loads(data)["error"]["message"]
        continued = {**body, "previous_response_id": made["id"]}
        assert ask(gate, path, continued, {"authorization": f"Bearer {OTHER}"})[0] == 404
        deleted = json.loads(ask(gate, at, None, method="DELETE")[2])
        assert deleted == {"id": made["id"], "object": "response", "deleted": True}
        assert ask(gate, at, None, method="GET")[0] == 404
        assert ask(gate, path, continued)[0] == 404


def test_an_answer_that_is_not_to_be_stored_is_not_kept() -> None:
    with ModelServer([Turn(text="ok")] * 2) as server, gateway(all_of(server), {"m": MESSAGES}) as gate:
        path, body = question(RESPONSES, store=False)
        made = json.loads(ask(gate, path, body)[2])
        assert ask(gate, f"/v1/responses/{made['id']}", None, method="GET")[0] == 404


def test_an_unknown_answer_is_the_dialects_404() -> None:
    with ModelServer([]) as server, gateway(all_of(server), {"m": MESSAGES}) as gate:
        path, body = question(RESPONSES, previous_response_id="resp_none")
        for found in (ask(gate, "/v1/responses/resp_none", None, method="GET"), ask(gate, path, body)):
            error = json.loads(found[2])["error"]
            assert (found[0], error["type"]) == (404, "invalid_request_error")
            assert "resp_none" in error["message"]
            assert "send the whole conversation" in error["message"]
        assert server.requests == ()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("service", [CHAT, MESSAGES, GEMINI])
def test_a_request_continues_a_kept_answer_at_any_service(service: ProtocolName, stream: bool) -> None:
    turns = [
        Turn(text="I read", calls=(Call(name="read", input={"path": "a"}),)),
        Turn(text="second"),
        Turn(text="3rd"),
    ]
    with ModelServer(turns) as server, gateway(all_of(server), {"m": service}) as gate:
        tools = [{"type": "function", "name": "read", "parameters": {"type": "object"}}]
        path, body = question(RESPONSES, "first words", stream=stream, tools=tools)
        made = response_of(ask(gate, path, body)[2], stream=stream)
        call = next(item for item in made["output"] if item["type"] == "function_call")
        result = [{"type": "function_call_output", "call_id": call["call_id"], "output": "the apples"}]
        status, headers, data = ask(gate, path, {**body, "input": result, "previous_response_id": made["id"]})
        second = response_of(data, stream=stream)
        assert (status, headers["x-backplane-losses"]) == (200, "0"), gate.ends[1].lost
        assert second["id"] != made["id"]
        ask(gate, path, {**body, "input": "third words", "previous_response_id": second["id"]})
        asked = json.dumps(server.requests[2].body)
    words = ("first words", "I read", "read", "the apples", "second", "third words")
    places = [asked.index(word) for word in words]
    assert places == sorted(places)


def test_the_service_that_has_the_answer_continues_it_itself() -> None:
    with ModelServer([Turn(text="one")] * 2) as server, gateway(all_of(server), {"m": RESPONSES}) as gate:
        path, body = question(RESPONSES)
        made = json.loads(ask(gate, path, body)[2])
        continued = {**body, "input": "on", "previous_response_id": made["id"]}
        assert ask(gate, path, continued)[0] == 200
        assert server.requests[1].body == continued
        ask(gate, f"/v1/responses/{made['id']}", None, method="DELETE")
        deleted = server.requests[2]
    assert (deleted.method, deleted.path) == ("DELETE", f"/v1/responses/{made['id']}")


def test_an_answer_of_one_service_is_continued_at_another_without_its_ids_and_proofs() -> None:
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "ZW5j"}
    said = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "the answer", "annotations": []}]}  # fmt: skip
    whole = {"id": "resp_1", "object": "response", "status": "completed", "model": "m", "output": [reasoning, said]}
    first = Turn(fault=Fault(raw=json.dumps(whole).encode(), headers={"content-type": "application/json"}))
    with ModelServer(first) as one, ModelServer(Turn(text="two")) as two:
        services = {"a": all_of(one)[RESPONSES], "b": all_of(two)[RESPONSES]}
        with gateway(services, {"m": "a", "n": "b"}) as gate:
            path, body = question(RESPONSES)
            ask(gate, path, body)
            status = ask(gate, path, {**body, "model": "n", "input": "on", "previous_response_id": "resp_1"})[0]
        asked = two.requests[0].body
    assert status == 200
    assert "previous_response_id" not in asked
    assert "the answer" in json.dumps(asked)
    assert not [word for word in ("rs_1", "msg_1", "ZW5j") if word in json.dumps(asked)]


def test_kept_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backplane.gateway.kept.BYTES_MAX", 3_000)
    with ModelServer([Turn(text="x" * 200)] * 8) as server, gateway(all_of(server), {"m": MESSAGES}) as gate:
        path, body = question(RESPONSES)
        ids = [json.loads(ask(gate, path, body)[2])["id"] for _ in range(8)]
        found = [ask(gate, f"/v1/responses/{id}", None, method="GET")[0] for id in ids]
    assert (found[0], found[-1]) == (404, 200)
    assert len(set(ids)) == 8


def test_the_budget_reserves_for_the_conversation_that_is_continued() -> None:
    prices = {"input": 1_000, "output": 0}
    with ModelServer([Turn(text="x" * 40_000), Turn(text="two")]) as server:
        services = {"a": all_of(server)[MESSAGES]}
        services["a"].options["prices"] = prices
        # One short request is 1,020 tokens at most; with an answer of 40 KB before it, more than 20,000.
        with gateway(services, {"m": "a"}, key=None, clients=client(budget_usd=5.0)) as gate:
            path, body = question(RESPONSES, max_output_tokens=10)
            made = json.loads(ask(gate, path, body)[2])
            assert ask(gate, path, {**body, "previous_response_id": made["id"]})[0] == 403


# Counts ---------------------------------------------------------------------------------------------------------------

COUNTS: dict[ProtocolName, str] = {
    MESSAGES: "/v1/messages/count_tokens", GEMINI: "/v1beta/models/m:countTokens",
    RESPONSES: "/v1/responses/input_tokens",
}  # fmt: skip
NUMBERS = {"count_tokens": {"input_tokens": 77}, "countTokens": {"totalTokens": 77}, "input_tokens": {
    "object": "response.input_tokens", "input_tokens": 77,
}}  # fmt: skip


def count(front: ProtocolName, service: ProtocolName, answers: dict[str, Any]) -> tuple[int, bool, Asked]:
    """Count by an interface; return the number, whether it is an estimate, and what the service was asked."""
    with plain_service(answers) as asked, gateway({"s": row(asked, service)}, {"m": "s/own"}) as gate:
        status, headers, data = ask(gate, COUNTS[front], question(front)[1])
        assert (status, gate.lines) == (200, [])
        found = json.loads(data)
    return found["totalTokens" if front == GEMINI else "input_tokens"], "x-backplane-estimate" in headers, asked


@pytest.mark.parametrize("service", list(COUNTS))
@pytest.mark.parametrize("front", list(COUNTS))
def test_tokens_are_counted_by_the_service(front: ProtocolName, service: ProtocolName) -> None:
    number, is_estimate, asked = count(front, service, NUMBERS)
    assert (number, is_estimate) == (77, False)
    ((_, path, body),) = asked
    assert path == COUNTS[service].replace("/m:", "/own:")
    assert "go" in json.dumps(body)
    assert "max_tokens" not in body or front == service


@pytest.mark.parametrize("front", list(COUNTS))
def test_tokens_are_estimated_where_the_service_has_no_counter(front: ProtocolName) -> None:
    for service, answers in ((CHAT, NUMBERS), (MESSAGES, {})):
        number, is_estimate, _ = count(front, service, answers)
        assert (is_estimate, number) == (True, -(-len(json.dumps(question(front)[1])) // 4))


def test_the_bytes_of_a_count_pass_untouched() -> None:
    with plain_service(NUMBERS) as asked, gateway({"s": row(asked, MESSAGES)}, {"m": "s"}) as gate:
        body = {**question(MESSAGES)[1], "context_management": {"edits": []}}
        data = ask(gate, COUNTS[MESSAGES], body, {**BEARER, "anthropic-version": "2026-10-21"})[2]
    assert asked[0][2] == body
    assert json.loads(data) == {"input_tokens": 77}


def test_counting_leaves_the_rate_to_the_requests_that_cost() -> None:
    clients = client(requests_per_minute=1)
    with (
        plain_service({**NUMBERS, "/messages": {}}) as asked,
        gateway({"s": row(asked, MESSAGES)}, {"m": "s"}, key=None, clients=clients) as gate,
    ):
        body = question(MESSAGES)[1]
        assert [ask(gate, COUNTS[MESSAGES], body)[0] for _ in range(5)] == [200] * 5


# Requests that are passed ---------------------------------------------------------------------------------------------

VECTOR = {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": "AACAPw=="}], "model": "e",
          "usage": {"prompt_tokens": 5_000, "total_tokens": 5_000}}  # fmt: skip
COMPACTED = {"id": "resp_c", "object": "response.compaction", "output": [],
             "usage": {"input_tokens": 90, "output_tokens": 7}}  # fmt: skip
PASSES: list[tuple[str, ProtocolName, Any, str, Any]] = [
    ("/v1/embeddings", CHAT, {"model": "m", "input": "a", "encoding_format": "base64"}, "/v1/embeddings", VECTOR),
    ("/v1/embeddings", RESPONSES, {"model": "m", "input": "a"}, "/v1/embeddings", VECTOR),
    ("/v1/responses/compact", RESPONSES, {"model": "m", "input": "a"}, "/v1/responses/compact", COMPACTED),
    ("/v1beta/models/m:embedContent", GEMINI, {"model": "models/m", "content": {"parts": [{"text": "a"}]}},
     "/v1beta/models/own:embedContent", {"embedding": {"values": [1.0]}}),
    ("/v1beta/models/m:batchEmbedContents", GEMINI, {"requests": [{"model": "models/m", "content": {}}]},
     "/v1beta/models/own:batchEmbedContents", {"embeddings": []}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "service", "body", "there", "answer"), PASSES)
def test_what_cannot_be_translated_passes_to_a_service_of_the_dialect(
    path: str, service: ProtocolName, body: Any, there: str, answer: Any
) -> None:
    prices = {"input": 1, "output": 2}
    end = there.rpartition("/")[2]
    with plain_service({end: answer}) as asked, gateway({"s": row(asked, service, prices=prices)}, {"m": "s/own"}) as g:
        status, headers, data = ask(g, path, body)
        (line,) = g.ends
    assert (status, json.loads(data), headers["x-backplane-losses"]) == (200, answer, "0")
    assert asked[0][1] == there
    assert asked[0][2] == json.loads(json.dumps(body).replace('models/m"', 'models/own"').replace('"m"', '"own"'))
    usage = answer.get("usage")
    cost = None if usage is None else usage.get("prompt_tokens") or 90 + 2 * 7
    assert (line.end, line.cost) == ("complete", cost)


@pytest.mark.parametrize(("path", "_service", "body", "_there", "_answer"), PASSES)
def test_what_no_service_can_answer_is_refused_with_the_next_step(
    path: str, _service: ProtocolName, body: Any, _there: str, _answer: Any
) -> None:
    with ModelServer([]) as server, gateway(all_of(server), {"m": MESSAGES}) as gate:
        status, _, data = ask(gate, path, body)
        assert server.requests == ()
    message = json.loads(data)["error"]["message"]
    assert status == 400
    assert "cannot be translated" in message
    assert "route the model to a backend with protocol" in message


def test_the_next_service_embeds_where_the_first_cannot() -> None:
    with plain_service({"/embeddings": VECTOR}) as asked, ModelServer([]) as server:
        services = {"a": all_of(server)[MESSAGES], "b": row(asked, CHAT)}
        with gateway(services, {"m": ["a", "b"]}) as gate:
            assert ask(gate, "/v1/embeddings", {"model": "m", "input": "a"})[0] == 200
            (end,) = gate.ends
    assert end.tried == ("a: not translated",)


def test_embeddings_are_charged_for_their_input_alone() -> None:
    prices = {"input": 1_000, "output": 1_000}
    clients = client(budget_usd=7)  # 5,000 tokens cost 5 dollars; an answer of text would be reserved at 131.
    with (
        plain_service({"/embeddings": VECTOR}) as asked,
        gateway({"s": row(asked, CHAT, prices=prices)}, {"m": "s"}, key=None, clients=clients) as gate,
    ):
        body = {"model": "m", "input": "a"}
        assert [ask(gate, "/v1/embeddings", body)[0] for _ in range(3)] == [200, 200, 403]
        assert [end.charged for end in gate.ends] == [5_000_000, 5_000_000, 0]
    assert KEY not in str(asked)


# Judged by the vendors' clients ---------------------------------------------------------------------------------------


def test_openais_client_reads_continues_and_deletes_an_answer() -> None:
    referees.need("openai")
    openai = referees.sdk("openai")
    with ModelServer([Turn(text="one"), Turn(text="two")]) as server, gateway(all_of(server), {"m": GEMINI}) as gate:
        client = openai.OpenAI(base_url=f"{gate.url}/v1", api_key=KEY, max_retries=0)
        first = client.responses.create(model="m", input="go")
        assert client.responses.retrieve(first.id).output_text == "one"
        second = client.responses.create(model="m", input="on", previous_response_id=first.id)
        assert second.output_text == "two"
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        assert client.responses.input_tokens.count(model="m", input="go").input_tokens > 0
        client.close()


def test_the_vendors_clients_embed_and_count() -> None:
    referees.need("openai", "claude", "gemini")
    answers = {**NUMBERS, "/embeddings": VECTOR, "batchEmbedContents": {"embeddings": [{"values": [0.5, 1.0]}]}}
    with plain_service(answers) as asked:
        services = {"a": row(asked, CHAT), "b": row(asked, GEMINI), "c": row(asked, MESSAGES)}
        with gateway(services, {"m": "a", "g": "b", "c": "c"}) as gate:
            client = referees.sdk("openai").OpenAI(base_url=f"{gate.url}/v1", api_key=KEY, max_retries=0)
            assert client.embeddings.create(model="m", input="a").data[0].embedding == [1.0]
            client.close()
            genai = referees.sdk("google.genai").Client(api_key=KEY, http_options={"base_url": gate.url})
            assert genai.models.embed_content(model="g", contents="a").embeddings[0].values == [0.5, 1.0]
            assert genai.models.count_tokens(model="c", contents="a").total_tokens == 77
            genai.close()
            messages = referees.sdk("anthropic").Anthropic(base_url=gate.url, api_key=KEY, max_retries=0)
            history = [{"role": "user", "content": "go"}]
            assert messages.messages.count_tokens(model="g", messages=history).input_tokens == 77
            messages.close()


def test_an_answer_in_the_background_is_asked_for_until_it_is_complete() -> None:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]}
    queued = {"id": "resp_1", "object": "response", "status": "queued", "output": []}
    answers: dict[str, Any] = {"/responses": queued, "/responses/resp_1": {**queued, "status": "in_progress"}}
    clients = {**client(), "other": GatewayClientSettings(key_sha256=digest(OTHER))}
    with (
        plain_service(answers) as asked,
        gateway({"s": row(asked, RESPONSES)}, {"m": "s"}, key=None, clients=clients) as gate,
    ):
        body = {"model": "m", "input": "hi", "background": True}
        assert json.loads(ask(gate, "/v1/responses", body)[2])["status"] == "queued"
        assert json.loads(ask(gate, "/v1/responses/resp_1", None, method="GET")[2])["status"] == "in_progress"
        answers["/responses/resp_1"] = {**queued, "status": "completed", "output": [said]}
        found = [json.loads(ask(gate, "/v1/responses/resp_1", None, method="GET")[2]) for _ in range(2)]
        other = {"authorization": f"Bearer {OTHER}"}
        assert ask(gate, "/v1/responses/resp_1", None, other, method="GET")[0] == 404
    assert [one["output"] for one in found] == [[said], [said]]
    assert [method for method, _, _ in asked] == ["POST", "GET", "GET"]
