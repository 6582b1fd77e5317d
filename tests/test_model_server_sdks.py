"""The scripted model server judged by the vendors' own clients: they hear what the script says.

One reader a protocol and way of asking turns an SDK's answer into the script's own words; the cases are data.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from backplane.testing import PROTOCOLS, Failure, Fault, ModelServer, ProtocolName, Turn
from backplane.testing.frames import RenderRequest
from backplane.testing.plan import VENDORS
from tests.dialects import referees
from tests.scripted import READ, TURNS, Heard, expected, reworked, same

DIALECTS: dict[ProtocolName, str] = {
    "openai_compatible": "openai",
    "openai_responses": "codex",
    "anthropic": "claude",
    "gemini_ai_studio": "gemini",
}
KEY = "dummy"
COMMENTS = {protocol: 0 if protocol == "gemini_ai_studio" else 2 for protocol in DIALECTS}
"""Keep-alive comments before each frame; one client takes a comment for a broken answer (google-genai 3.4.0)."""


@pytest.fixture(autouse=True)
def quiet_sdks() -> Iterator[None]:
    """What the SDKs warn of among themselves is no concern of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# What the clients hear ------------------------------------------------------------------------------------------------


def openai_client(server: ModelServer, retries: int) -> Any:
    return referees.sdk("openai").OpenAI(
        base_url=server.base_url("openai_compatible"), api_key=KEY, max_retries=retries
    )


def hear_chat(server: ModelServer, stream: bool, retries: int = 0) -> Heard:
    question: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
    with closing(openai_client(server, retries)) as client:
        if stream:
            with client.chat.completions.stream(**question, stream_options={"include_usage": True}) as events:
                reasoning = "".join(
                    (event.chunk.choices[0].delta.model_extra or {}).get("reasoning_content") or ""
                    for event in events
                    if event.type == "chunk" and event.chunk.choices
                )
                answer = events.get_final_completion()
        else:
            answer = client.chat.completions.create(**question)
            reasoning = (answer.choices[0].message.model_extra or {}).get("reasoning_content") or ""
    message, usage = answer.choices[0].message, answer.usage
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    cached = getattr(usage.prompt_tokens_details, "cached_tokens", None) or 0
    return Heard(
        (message.content or "") + (message.refusal or ""), reasoning, calls, usage.prompt_tokens,
        usage.completion_tokens, cached, answer.choices[0].finish_reason,
    )  # fmt: skip


def hear_responses(server: ModelServer, stream: bool, retries: int = 0) -> Heard:
    with closing(openai_client(server, retries)) as client:
        if stream:
            with client.responses.stream(model="m", input="go") as events:
                *_, last = events
                answer = last.response
        else:
            answer = client.responses.create(model="m", input="go")
    text = reasoning = ""
    calls = []
    for item in answer.output:
        if item.type == "message":
            text += "".join(part.text if part.type == "output_text" else part.refusal for part in item.content)
        elif item.type == "reasoning":
            reasoning += "".join(part.text for part in item.summary)
        else:
            calls.append((item.name, json.loads(item.arguments)))
    stop = answer.incomplete_details.reason if answer.incomplete_details else answer.status
    usage = answer.usage
    cached = usage.input_tokens_details.cached_tokens
    return Heard(text, reasoning, calls, usage.input_tokens, usage.output_tokens, cached, stop)


def hear_messages(server: ModelServer, stream: bool, retries: int = 0) -> Heard:
    question: dict[str, Any] = {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "go"}]}
    anthropic = referees.sdk("anthropic")
    with closing(anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=retries)) as client:
        if stream:
            with client.messages.stream(**question) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(**question)
    texts = {"text": "", "thinking": ""}
    calls = []
    for block in answer.content:
        if block.type == "tool_use":
            calls.append((block.name, block.input))
        else:
            texts[block.type] += getattr(block, block.type)
    usage = answer.usage
    read, written = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
    sent = usage.input_tokens + read + written
    return Heard(
        texts["text"], texts["thinking"], calls, sent, usage.output_tokens, read,
        answer.stop_reason,
    )  # fmt: skip


def hear_gemini(server: ModelServer, stream: bool, retries: int = 0) -> Heard:
    genai = referees.sdk("google.genai")
    options: dict[str, Any] = {"base_url": server.url, "api_version": "v1beta"}
    if retries:
        options["retry_options"] = {"attempts": retries + 1, "initial_delay": 0.01, "max_delay": 0.01}
    client = genai.Client(api_key=KEY, http_options=options)
    try:
        if stream:
            answers = list(client.models.generate_content_stream(model="m", contents="go"))
        else:
            answers = [client.models.generate_content(model="m", contents="go")]
    finally:
        client.close()
    text = reasoning = ""
    calls = []
    for part in (part for answer in answers for part in answer.candidates[0].content.parts):
        if part.function_call:
            calls.append((part.function_call.name, part.function_call.args))
        elif part.thought:
            reasoning += part.text
        else:
            text += part.text or ""
    usage = answers[-1].usage_metadata
    return Heard(
        text, reasoning, calls, usage.prompt_token_count,
        usage.candidates_token_count + (usage.thoughts_token_count or 0), usage.cached_content_token_count or 0,
        answers[-1].candidates[0].finish_reason.name,
    )  # fmt: skip


HEAR: dict[ProtocolName, Callable[..., Heard]] = {
    "openai_compatible": hear_chat,
    "openai_responses": hear_responses,
    "anthropic": hear_messages,
    "gemini_ai_studio": hear_gemini,
}
each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)
each_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


# The cases ------------------------------------------------------------------------------------------------------------


ALL = [(protocol, stream, case) for protocol in PROTOCOLS for stream in (False, True) for case in TURNS]
CUT_CHAT = ("openai_compatible", True, "an answer cut short")
"""The vendor's stream reader makes an exception of this stop, which is a case of its own."""


@pytest.mark.parametrize(("protocol", "stream", "case"), [case for case in ALL if case != CUT_CHAT])
def test_a_vendors_client_hears_what_the_script_says(protocol: ProtocolName, stream: bool, case: str) -> None:
    referees.need(DIALECTS[protocol])
    turn = TURNS[case]
    with ModelServer(turn) as server:
        assert HEAR[protocol](server, stream) == expected(turn, protocol)
        (request,) = server.requests
    assert (request.protocol, request.stream, request.turn, request.status) == (protocol, stream, 0, 200)


def test_a_vendors_client_says_that_a_streamed_answer_was_cut_short() -> None:
    referees.need("openai")
    turn = TURNS["an answer cut short"]
    with ModelServer(turn) as server, pytest.raises(referees.sdk("openai").LengthFinishReasonError) as caught:
        hear_chat(server, True)
    assert caught.value.completion.choices[0].message.content == turn.text
    assert caught.value.completion.choices[0].finish_reason == "length"


@each_protocol
def test_a_vendors_client_hears_the_same_through_a_rough_line(protocol: ProtocolName) -> None:
    referees.need(DIALECTS[protocol])
    turn = Turn(reasoning="hm", text="Hello, wörld.", calls=(READ,))
    rough = reworked(protocol, turn, same, crlf=True, comments=COMMENTS[protocol], split=1)
    with ModelServer(rough) as server:
        assert HEAR[protocol](server, True) == expected(turn, protocol)


@each_protocol
@each_way
def test_a_vendors_client_tries_again_after_a_scripted_429(protocol: ProtocolName, stream: bool) -> None:
    referees.need(DIALECTS[protocol])
    answer = Turn(text="now")
    limited = Turn(fault=Fault(status=429, headers={"retry-after-ms": "1", "retry-after": "0"}))
    with ModelServer([limited, answer]) as server:
        assert HEAR[protocol](server, stream, retries=1) == expected(answer, protocol)
        assert [request.status for request in server.requests] == [429, 200]


ERRORS: dict[tuple[ProtocolName, int], str] = {
    ("openai_compatible", 401): "AuthenticationError",
    ("openai_compatible", 404): "NotFoundError",
    ("openai_compatible", 429): "RateLimitError",
    ("openai_compatible", 500): "InternalServerError",
    ("openai_responses", 422): "UnprocessableEntityError",
    ("openai_responses", 403): "PermissionDeniedError",
    ("anthropic", 401): "AuthenticationError",
    ("anthropic", 413): "ContentTooLargeError",
    ("anthropic", 529): "OverloadedError",
    ("gemini_ai_studio", 400): "ClientError",
    ("gemini_ai_studio", 503): "ServerError",
}


@pytest.mark.parametrize(("protocol", "status"), ERRORS)
@each_way
def test_a_vendors_client_raises_its_own_error_with_the_scripts_words(
    protocol: ProtocolName, status: int, stream: bool
) -> None:
    referees.need(DIALECTS[protocol])
    with (
        ModelServer(Turn(fault=Fault(status=status, message="as scripted"))) as server,
        pytest.raises(Exception, match="as scripted") as caught,
    ):
        HEAR[protocol](server, stream)
    assert caught.type.__name__ == ERRORS[protocol, status]


@pytest.mark.parametrize("protocol", ["openai_compatible", "anthropic", "gemini_ai_studio"])
def test_a_vendors_client_notices_an_error_half_way(protocol: ProtocolName) -> None:
    referees.need(DIALECTS[protocol])
    turn = Turn(text="so far", fault=Fault(failure=Failure(code="overloaded_error", message="as scripted")))
    with ModelServer(turn) as server, pytest.raises(Exception, match="as scripted"):
        HEAR[protocol](server, True)


def test_a_failed_response_ends_with_the_scripts_code() -> None:
    referees.need("codex")
    failure = Failure(code="server_is_overloaded", message="as scripted")
    turn = Turn(text="so far", fault=Fault(failure=failure))
    with ModelServer(turn) as server, closing(openai_client(server, 0)) as client:
        *_, last = client.responses.create(model="m", input="go", stream=True)
    assert (last.type, last.response.error.code) == ("response.failed", "server_is_overloaded")


@each_protocol
@pytest.mark.parametrize("case", TURNS)
def test_every_answer_and_chunk_is_valid_by_the_vendors_types(protocol: ProtocolName, case: str) -> None:
    dialect = DIALECTS[protocol]
    referees.need(dialect)
    ask, vendor = RenderRequest("m", 1), VENDORS[protocol]
    assert referees.invalid(dialect, "response", vendor.whole(TURNS[case], ask)) is None
    frames = vendor.stream(TURNS[case], ask)
    chunks = [frame.data for frame in frames if isinstance(frame.data, dict) and frame.label != "ping"]
    assert [why for chunk in chunks[:20] + chunks[-20:] if (why := referees.invalid_chunk(dialect, chunk))] == []


def test_lists_of_models_and_counts_are_read_by_the_vendors_clients() -> None:
    referees.need("openai", "claude", "gemini")
    anthropic, genai = referees.sdk("anthropic"), referees.sdk("google.genai")
    with ModelServer({"models": ["one", "two"]}) as server:
        with closing(openai_client(server, 0)) as client:
            assert [model.id for model in client.models.list()] == ["one", "two"]
            assert client.models.retrieve("two").id == "two"
        with closing(anthropic.Anthropic(base_url=server.url, api_key=KEY)) as client:
            assert [model.id for model in client.models.list()] == ["one", "two"]
            question = [{"role": "user", "content": "how many?"}]
            assert client.messages.count_tokens(model="one", messages=question).input_tokens > 0
        with closing(genai.Client(api_key=KEY, http_options={"base_url": server.url})) as client:
            assert [model.name for model in client.models.list()] == ["models/one", "models/two"]
            assert client.models.count_tokens(model="one", contents="how many?").total_tokens > 0
