"""What a service says of its failure, read into one code: bodies as many services write them."""

from __future__ import annotations

import json
import pickle
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane.contract.canonical import Json
from backplane.errors import CODES, DENIAL, provider_code
from backplane.upstream.endpoint import cut_urls
from backplane.upstream.failure import (
    LABELS,
    STATUSES,
    UpstreamError,
    UpstreamFailure,
    code_of,
    failure_of,
    retry_after_s,
)

NOW = datetime(2026, 11, 22, 12, 0, 0, tzinfo=UTC)
SEVEN = {"authentication_failed", "rate_limited", "context_length_exceeded", "invalid_request", "model_unavailable",
         "network_error", "unknown"}  # fmt: skip


def read(status: int, body: Any, headers: dict[str, str] | None = None, secret: str | None = None) -> UpstreamFailure:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return failure_of(status, headers or {}, data, NOW, secret)


def openai(message: str, kind: str | None = None, code: str | None = None) -> Json:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def anthropic(kind: str, message: str) -> Json:
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}


def google(code: int, status: str, message: str, *details: Json) -> Json:
    return {"error": {"code": code, "status": status, "message": message, "details": list(details)}}


BODIES: list[tuple[int, Any, str]] = [
    (401, openai("Incorrect API key provided", "invalid_request_error", "invalid_api_key"), "backend_auth_failed"),
    (400, openai("This model's maximum context length is 8192 tokens", "invalid_request_error",
                 "context_length_exceeded"), "backend_context_length"),
    (404, openai("The model `gpt-9` does not exist", "invalid_request_error", "model_not_found"),
     "backend_model_not_found"),
    (429, openai("You exceeded your current quota", "insufficient_quota", "insufficient_quota"),
     "backend_rate_limited"),
    (400, openai("Unsupported parameter: 'top_k'", "invalid_request_error", "unsupported_parameter"),
     "mapping_unsupported_capability"),
    (400, {"error": {"code": "content_filter", "message": "The response was filtered"}}, "backend_content_filtered"),
    (400, anthropic("invalid_request_error", "prompt is too long: 210000 tokens > 200000 maximum"),
     "backend_context_length"),
    (400, anthropic("invalid_request_error", "max_tokens: must be positive"), "mapping_unsupported_capability"),
    (401, anthropic("authentication_error", "invalid x-api-key"), "backend_auth_failed"),
    (403, anthropic("permission_error", "Your key may not use this"), "backend_auth_failed"),
    (404, anthropic("not_found_error", "model: claude-9"), "backend_model_not_found"),
    (404, anthropic("not_found_error", "Not Found"), "backend_model_not_found"),
    (413, anthropic("request_too_large", "Request exceeds the maximum size"), "backend_context_length"),
    (529, anthropic("overloaded_error", "Overloaded"), "backend_unavailable"),
    (400, google(400, "INVALID_ARGUMENT", "API key not valid. Please pass a valid API key.",
                 {"@type": "x", "reason": "API_KEY_INVALID"}), "backend_auth_failed"),
    (400, google(400, "INVALID_ARGUMENT", "The input token count (1200000) exceeds the maximum number of tokens "
                 "allowed (1048576)."), "backend_context_length"),
    (404, google(404, "NOT_FOUND", "models/gemini-9 is not found for API version v1beta"), "backend_model_not_found"),
    (429, google(429, "RESOURCE_EXHAUSTED", "Quota exceeded"), "backend_rate_limited"),
    (503, google(503, "UNAVAILABLE", "The model is overloaded."), "backend_unavailable"),
    (504, google(504, "DEADLINE_EXCEEDED", "took too long"), "backend_timeout"),
    (400, [google(400, "INVALID_ARGUMENT", "Unknown name \"foo\"")], "mapping_unsupported_capability"),
    (400, {"object": "error", "message": "This model's maximum context length is 4096 tokens.", "code": 400},
     "backend_context_length"),
    (500, {"error": {"message": "the request exceeds the available context size, try increasing it",
                     "type": "exceed_context_size_error", "code": 500}}, "backend_context_length"),
    (404, {"error": "model 'llama9' not found"}, "backend_model_not_found"),
    (404, {"error": {"message": "model \"x\" not found, try pulling it first", "type": "api_error"}},
     "backend_model_not_found"),
    (422, {"detail": [{"loc": ["body", "messages"], "msg": "field required", "type": "missing"}]},
     "mapping_unsupported_capability"),
    (404, {"detail": "Not Found"}, "backend_model_not_found"),
    (405, b"", "backend_model_not_found"),
    (301, b"<html>Moved</html>", "backend_model_not_found"),
    (502, b"<html><h1>502 Bad Gateway</h1></html>", "backend_unavailable"),
    (308, b"", "backend_model_not_found"),
    (402, {"error": {"message": "Insufficient Balance"}}, "backend_auth_failed"),
    # Money, quota and safety, said as a bad request.
    (400, anthropic("invalid_request_error", "The credit balance of this account is too low for the API"),
     "backend_auth_failed"),
    (400, openai("A billing problem keeps this account from being used", "invalid_request_error"),
     "backend_auth_failed"),
    (403, {"error": "this organization is suspended"}, "backend_auth_failed"),
    (400, anthropic("invalid_request_error", "The API usage limits that you set are reached"), "backend_rate_limited"),
    (403, {"error": {"message": "the monthly quota is exhausted"}}, "backend_rate_limited"),
    (400, openai("the prompt was flagged as going against our usage policy", "invalid_request_error"),
     "backend_content_filtered"),
    (400, {"error": {"message": "stopped by the content management policy", "type": None}},
     "backend_content_filtered"),
    (400, {"error": {"message": "The request was rejected as high risk", "type": "x"}}, "backend_content_filtered"),
    # What is only mentioned is no such fault.
    (400, google(400, "INVALID_ARGUMENT", "Unknown name safetySettings"), "mapping_unsupported_capability"),
    (400, openai("Unsupported parameter: 'safety_identifier'"), "mapping_unsupported_capability"),
    # A 404 that names a model, in whatever member.
    (404, openai("not here", "invalid_request_error", "no_such_model"), "backend_model_not_found"),
    (404, {"error": {"message": "no model_id fits"}}, "backend_model_not_found"),
    (404, {"error": {"message": "no deployment of gpt-99 here"}}, "backend_model_not_found"),
]  # fmt: skip


@pytest.mark.parametrize(("status", "body", "code"), BODIES, ids=[f"{row[0]}-{i}" for i, row in enumerate(BODIES)])
def test_a_body_says_more_than_its_status(status: int, body: Any, code: str) -> None:
    assert read(status, body).code == code


def test_every_code_is_one_of_the_contracts_and_of_the_seven() -> None:
    for code in {*LABELS.values(), *STATUSES.values()}:
        assert provider_code(code) in SEVEN


def test_an_account_without_quota_is_not_asked_again() -> None:
    assert not read(429, openai("no quota", "insufficient_quota")).may_pass
    assert read(429, openai("slow down", "rate_limit_exceeded")).may_pass


@pytest.mark.parametrize(("headers", "body", "seconds"), [
    ({"retry-after": "7"}, {}, 7.0),
    ({"retry-after": "0.5"}, {}, 0.5),
    ({"retry-after": "Sun, 22 Nov 2026 12:00:20 GMT"}, {}, 20.0),
    ({"retry-after": "Sun, 22 Nov 2026 11:00:00 GMT"}, {}, 0.0),
    ({"retry-after-ms": "250", "retry-after": "7"}, {}, 0.25),
    ({"retry-after": "soon"}, {}, None),
    ({"retry-after": "nan"}, {}, None),
    ({"retry-after": "-3"}, {}, 0.0),
    ({"retry-after": "1e99"}, {}, 86_400.0),
    ({}, google(429, "RESOURCE_EXHAUSTED", "x", {"@type": "RetryInfo", "retryDelay": "17s"}), 17.0),
    ({}, google(429, "RESOURCE_EXHAUSTED", "x", {"@type": "RetryInfo", "retryDelay": 5}), None),
    ({}, {}, None),
])  # fmt: skip
def test_how_long_to_wait_is_read_in_every_form(headers: dict[str, str], body: Any, seconds: float | None) -> None:
    assert retry_after_s(headers, body, NOW) == seconds


def test_a_message_never_has_the_key_or_what_stands_behind_a_question_mark() -> None:
    body = openai("key sk-secret at https://user:pw@x.example/v1?key=sk-secret&alt=sse is wrong")
    message = read(401, body, secret="sk-secret").message
    assert "sk-secret" not in message
    assert "alt=sse" not in message
    assert "pw" not in message
    assert "https://x.example/v1 is wrong" in message


@given(st.text(alphabet="abc?&=/:@ \n\"'<>", max_size=40))
def test_an_address_in_any_text_ends_at_its_question_mark(tail: str) -> None:
    cut = cut_urls(f"see https://x.example/p?key=SECRET {tail}")
    assert "SECRET" not in cut


def test_a_long_page_is_cut() -> None:
    assert len(read(500, b"x" * 100_000).message) <= 2_000


@given(st.integers(300, 599), st.one_of(st.binary(max_size=60), st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["error", "message", "code", "type", "detail", "details", "errors", "response", "reason"]),
        inner, max_size=4), max_leaves=8)))  # fmt: skip
def test_any_body_is_read_into_some_code(status: int, body: Any) -> None:
    failure = read(status, body)
    assert failure.code in CODES
    assert provider_code(failure.code) in SEVEN
    assert failure.message


def test_an_error_survives_a_pickle() -> None:
    failure = UpstreamFailure(code="backend_rate_limited", message="slow", status=429, retry_after_s=3.0)
    again = pickle.loads(pickle.dumps(UpstreamError(failure)))
    assert (again.failure, again.code, again.retryable) == (failure, "backend_rate_limited", True)


@pytest.mark.parametrize(
    ("words", "labels", "status", "code"),
    [
        (f"403 {DENIAL}: it is forbidden", ("quota",), 429, "policy_denied"),
        ("it failed after 413 lines", ("quota",), None, "backend_rate_limited"),
        ("it failed", ({"x": 1}, "other"), 404, "backend_model_not_found"),
        ('API Error: {"error": {"code": 429}}', (), None, "backend_rate_limited"),
        ('{"lines": 429}', (), None, "backend_unavailable"),
        ("401 Unauthorized", (), None, "backend_auth_failed"),
        ("error 429", (), None, "backend_unavailable"),
    ],
)
def test_an_agents_failure_has_the_code_of_its_label_its_status_or_its_words(
    words: str, labels: tuple[Any, ...], status: int | None, code: str
) -> None:
    assert code_of(words, *labels, status=status, own={"quota": "backend_rate_limited"}) == code
