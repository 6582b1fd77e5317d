"""The four protocols as their document says them, one test a sentence: addresses, keys, tools, usage, ends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backplane.dialects.ir import Message, Text, ToolOutput, ToolUse
from backplane.testing import PROTOCOLS, Call, Fault, ScriptUsage, Turn, When
from backplane.testing.frames import Frame, as_events
from tests.scripted import reworked, same, twice
from tests.upstream.talk import KEY, READ, Talk, conversation, picture, talk, worked

READS = Call(name="read", input={"path": "a"})
PATHS = {
    "openai_compatible": ("/v1/chat/completions", "/v1/chat/completions"),
    "openai_responses": ("/v1/responses", "/v1/responses"),
    "anthropic": ("/v1/messages", "/v1/messages"),
    "gemini_ai_studio": ("/v1beta/models/scripted-model:streamGenerateContent",
                         "/v1beta/models/scripted-model:generateContent"),
}  # fmt: skip
KEYS = {
    "openai_compatible": ("authorization", f"Bearer {KEY}"),
    "openai_responses": ("authorization", f"Bearer {KEY}"),
    "anthropic": ("x-api-key", KEY),
    "gemini_ai_studio": ("x-goog-api-key", KEY),
}


def one(protocol: str, turn: Turn | None = None, *messages: Message, **members: Any) -> Talk:
    settings = {name: members.pop(name) for name in ("parallel", "stream", "headers", "key_in_query", "defaults")
                if name in members}  # fmt: skip
    return talk(protocol, [turn or Turn(text="ok")], conversation(protocol, *messages, **members), **settings)


# All four -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_request_goes_to_its_protocols_path(protocol: str, stream: bool) -> None:
    request = one(protocol, stream=stream).requests[0]
    assert (request.method, request.path) == ("POST", PATHS[protocol][0 if stream else 1])
    assert request.stream is stream


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_key_goes_into_its_protocols_header_and_nowhere_else(protocol: str) -> None:
    request = one(protocol).requests[0]
    name, value = KEYS[protocol]
    assert request.headers[name] == value
    others = {key: said for key, said in request.headers.items() if key != name}
    assert KEY not in f"{others} {request.path} {request.query} {request.body}"


@pytest.mark.parametrize("name", ["authorization", "Authorization"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_authorization_among_the_headers_stands_in_place_of_the_key(protocol: str, name: str) -> None:
    request = one(protocol, headers={name: "Bearer other"}).requests[0]
    assert request.headers["authorization"] == "Bearer other"
    assert KEY not in str(request)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_headers_of_the_settings_win_over_ours(protocol: str) -> None:
    headers = {"User-Agent": "mine", "anthropic-version": "2099-01-01", "x-more": "1"}
    request = one(protocol, headers=headers).requests[0]
    assert request.headers["user-agent"] == "mine"
    assert request.headers["anthropic-version"] == "2099-01-01"
    assert request.headers["x-more"] == "1"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_text_is_handed_on_in_pieces_as_it_comes(protocol: str) -> None:
    done = one(protocol, Turn(text="one two three four", pieces=4))
    assert done.said == "one two three four"
    assert sum(type(event).__name__ == "AssistantDelta" for event in done.heard) > 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_usage_is_said_and_counts_the_same_everywhere(protocol: str) -> None:
    done = one(protocol, Turn(text="ok", usage=ScriptUsage(input=100, output=20, cache_read=40, reasoning=0)))
    usage = done.turn.usage
    assert usage is not None
    assert (usage.input, usage.output, usage.cache_read) == (100, 20, 40)
    last = done.carried("usage")[-1]
    assert (last["input_tokens"], last["output_tokens"], last["cache_read_tokens"]) == (100, 20, 40)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_usage_is_made_up_where_the_service_says_none(protocol: str, stream: bool) -> None:
    done = one(protocol, Turn(text="ok", usage=None), stream=stream)
    assert done.turn.usage is None or done.turn.usage.output is None


STOPS: dict[str, dict[Any, str]] = {
    "end": dict.fromkeys(PROTOCOLS, "end"),
    "max_tokens": dict.fromkeys(PROTOCOLS, "max_tokens"),
    "content_filter": {**dict.fromkeys(PROTOCOLS, "content_filter"), "anthropic": "refusal"},
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_why_an_answer_ended_is_told(protocol: str, stop: Any, stream: bool) -> None:
    done = one(protocol, Turn(text="ok", stop=stop), stream=stream)
    assert done.turn.stop == STOPS[stop][protocol]
    assert done.carried("turn") == [{"stop_reason": done.turn.stop}]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tools_are_offered_in_the_protocols_own_shape(protocol: str) -> None:
    tool = one(protocol, tools=(READ,)).bodies[0]["tools"][0]
    shapes: dict[str, Any] = {
        "openai_compatible": lambda: (tool["type"], tool["function"]["name"], tool["function"]["parameters"]["type"]),
        "openai_responses": lambda: (tool["type"], tool["name"], tool["parameters"]["type"]),
        "anthropic": lambda: ("function", tool["name"], tool["input_schema"]["type"]),
        "gemini_ai_studio": lambda: ("function", tool["functionDeclarations"][0]["name"],
                                     tool["functionDeclarations"][0]["parametersJsonSchema"]["type"]),
    }  # fmt: skip
    assert shapes[protocol]() == ("function", "read", "object")


# 1. openai_compatible -------------------------------------------------------------------------------------------------


def test_chat_calls_in_pieces_are_put_together() -> None:
    done = one("openai_compatible", Turn(calls=(Call(name="read", input={"path": "x" * 100}),), pieces=10))
    assert [call.input for call in done.calls] == [{"path": "x" * 100}]


def old_form(member: str, *parts: dict[str, Any], end: str = "function_call") -> list[Any]:
    """Choices of a service that calls functions in the old form."""
    rows = [{"index": 0, member: part, "finish_reason": None} for part in parts]
    return [{"choices": [row]} for row in [*rows[:-1], {**rows[-1], "finish_reason": end}]]


@pytest.mark.parametrize("stream", [True, False])
def test_chat_calls_in_the_old_form_are_read(stream: bool) -> None:
    if stream:
        parts = [{"name": "read", "arguments": ""}, {"arguments": '{"path": "a"}'}]
        chunks = old_form("delta", *({"function_call": part} for part in parts), {})
        body = b"".join(as_events([*(Frame("", chunk) for chunk in chunks), Frame("", "[DONE]")]))
    else:
        call = {"name": "read", "arguments": '{"path": "a"}'}
        body = json.dumps(*old_form("message", {"role": "assistant", "content": None, "function_call": call})).encode()
    done = one("openai_compatible", Turn(fault=Fault(raw=body)), stream=stream)
    assert [(call.name, call.input) for call in done.turn.calls] == [("read", {"path": "a"})]
    assert done.turn.stop == "tool_use"


@pytest.mark.parametrize("protocol", ["openai_compatible", "openai_responses"])
def test_one_call_at_a_time_is_asked_for_unless_parallel_calls_are_wanted(protocol: str) -> None:
    alone = one(protocol, tools=(READ,), parallel=False)
    assert alone.bodies[0]["parallel_tool_calls"] is False
    assert "/parallel_tool_calls" in [loss["path"] for loss in alone.carried("loss")]
    assert "parallel_tool_calls" not in one(protocol, tools=(READ,), parallel=True).bodies[0]
    assert "parallel_tool_calls" not in one(protocol, parallel=False).bodies[0]


@pytest.mark.parametrize("protocol", ["openai_compatible", "openai_responses"])
def test_what_a_request_says_itself_of_parallel_calls_stands(protocol: str) -> None:
    options = {"parallel_tool_calls": True}
    assert one(protocol, tools=(READ,), options=options, parallel=False).bodies[0]["parallel_tool_calls"] is True


@pytest.mark.parametrize("protocol", ["openai_compatible", "openai_responses"])
def test_the_other_spelling_of_parallel_calls_counts_as_said(protocol: str) -> None:
    from backplane.upstream.ladder import prepare

    request = {"tools": [{"type": "function"}], "parallelToolCalls": True}
    assert "parallel_tool_calls" not in prepare(protocol, request, parallel=False)[0]


def test_chat_asks_for_usage_in_streams_alone() -> None:
    assert one("openai_compatible").bodies[0]["stream_options"] == {"include_usage": True}
    assert "stream_options" not in one("openai_compatible", stream=False).bodies[0]


def test_chat_without_stream_options_works_and_does_not_know_its_usage() -> None:
    refuses = Turn(when=When(has="/stream_options"), times=None, fault=Fault(status=400, message="unknown field"))
    done = talk("openai_compatible", [refuses, Turn(text="ok")])
    assert (done.turn.text, done.turn.usage) == ("ok", None)
    assert "may not say its usage" in done.carried("loss")[0]["reason"]


def test_chat_of_many_parts_becomes_plain_text_where_the_gateway_takes_no_other() -> None:
    refuses = Turn(
        when=When(has="/messages/0/content/0"), times=None, fault=Fault(status=400, message="content: no string")
    )
    done = talk("openai_compatible", [refuses, Turn(text="ok")], conversation("openai_compatible", picture()))
    content = done.bodies[-1]["messages"][0]["content"]
    assert content.startswith("look\n[image_url left out")
    assert "left out" in done.carried("loss")[-1]["reason"]


# 2. openai_responses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropped", [
    ("response.output_item.added",), ("response.output_item.done",),
    ("response.function_call_arguments.done",), ("response.function_call_arguments.delta",),
    ("response.output_item.added", "response.function_call_arguments.*"), ("*.done",), ("*.added",),
])  # fmt: skip
def test_responses_calls_are_put_together_whatever_events_are_missing(dropped: tuple[str, ...]) -> None:
    done = one("openai_responses", Turn(text="I read.", calls=(READS, READS), fault=Fault(drop=dropped)))
    assert [call.input for call in done.calls] == [{"path": "a"}, {"path": "a"}]
    assert done.turn.text == "I read."


def test_responses_calls_are_read_from_a_whole_answer() -> None:
    done = one("openai_responses", Turn(calls=(READS,)), stream=False)
    assert [(call.tool_name, call.input) for call in done.calls] == [("read", {"path": "a"})]


def test_responses_tools_are_closed_as_strict_schemas_are_and_keep_what_is_required() -> None:
    done = one("openai_responses", tools=(READ,))
    tool = done.bodies[0]["tools"][0]
    assert tool["parameters"]["additionalProperties"] is False
    assert "required" not in tool["parameters"]
    assert "/tools" in [loss["path"] for loss in done.carried("loss")]


@pytest.mark.parametrize("stop", ["max_tokens", "content_filter"])
def test_responses_that_are_incomplete_say_why(stop: Any) -> None:
    assert one("openai_responses", Turn(text="half", stop=stop)).turn.stop == stop


def test_responses_that_only_come_as_streams_are_asked_for_once_more_as_a_stream() -> None:
    refuses = Turn(when=When(stream=False), times=None, fault=Fault(status=400, message="stream must be true"))
    done = talk("openai_responses", [refuses, Turn(text="ok")], stream=False)
    assert (done.turn.text, [request.stream for request in done.requests]) == ("ok", [False, True])


def test_responses_that_come_as_a_stream_unasked_are_read_without_another_request() -> None:
    done = one("openai_responses", reworked("openai_responses", Turn(text="ok"), same), stream=False)
    assert (done.turn.text, len(done.requests)) == ("ok", 1)


# 3. anthropic ---------------------------------------------------------------------------------------------------------


def test_messages_calls_are_told_once_when_their_block_ends() -> None:
    done = one("anthropic", Turn(calls=(Call(name="read", input={"path": "x" * 100}),), pieces=10))
    assert [call.input for call in done.calls] == [{"path": "x" * 100}]


def test_messages_say_their_version() -> None:
    assert one("anthropic").requests[0].headers["anthropic-version"] == "2023-06-01"


def test_messages_without_tool_choice_then_without_tools() -> None:
    refuses = Turn(
        when=When(has="/tools"), times=None, fault=Fault(status=400, message="tool_choice and tools are not supported")
    )
    asked = conversation("anthropic", *worked(), tools=(READ,), options={"tool_choice": {"mode": "required"}})
    done = talk("anthropic", [refuses, Turn(text="ok")], asked)
    assert [retry["step"] for retry in done.carried("retry")] == ["no-tool-choice", "no-tools"]
    assert [("tool_choice" in body, "tools" in body) for body in done.bodies] == [
        (True, True), (False, True), (False, False)
    ]  # fmt: skip
    assert "tool_use" not in str(done.bodies[-1]["messages"])


def test_messages_as_blocks_where_strings_are_refused() -> None:
    words = 'system: invalid type: string "Be brief.", expected a sequence'
    refuses = Turn(when=When(is_text="/system"), times=None, fault=Fault(status=422, message=words))
    system = Message(role="system", parts=(Text(text="Be brief."),))
    user = Message(role="user", parts=(Text(text="hello"),))
    done = talk("anthropic", [refuses, Turn(text="ok")], conversation("anthropic", system, user))
    body = done.bodies[-1]
    assert body["system"] == [{"type": "text", "text": "Be brief."}]
    assert body["messages"][0]["content"] == [{"type": "text", "text": "hello"}]


def test_messages_without_pictures_inside_results_too() -> None:
    refuses = Turn(when=When(anywhere='"type":"image"'), times=None, fault=Fault(status=400, message="no images"))
    call = ToolUse(id="a", name="read", input={})
    result = ToolOutput(id="a", content=(Text(text="see"), *picture().parts[1:]))
    history = (Message(role="user", parts=(Text(text="go"),)), Message(role="assistant", parts=(call,)),
               Message(role="tool", parts=(result,)))  # fmt: skip
    done = talk("anthropic", [refuses, Turn(text="ok")], conversation("anthropic", *history))
    blocks = done.bodies[-1]["messages"][2]["content"][0]["content"]
    assert [block["type"] for block in blocks] == ["text", "text"]
    assert "image left out" in blocks[1]["text"]


# 4. gemini_ai_studio --------------------------------------------------------------------------------------------------


def test_gemini_streams_say_so_in_the_address() -> None:
    assert one("gemini_ai_studio").requests[0].query == {"alt": "sse"}
    assert one("gemini_ai_studio", stream=False).requests[0].query == {}
    assert not {"model", "stream"} & one("gemini_ai_studio").bodies[0].keys()


def test_the_gemini_key_goes_into_the_address_only_where_a_setting_says_so() -> None:
    assert KEY not in str(one("gemini_ai_studio").requests[0].query)
    request = one("gemini_ai_studio", key_in_query=True).requests[0]
    assert KEY in str(request.query)
    assert "x-goog-api-key" not in request.headers


def test_gemini_text_that_repeats_the_whole_so_far_is_told_once_and_named() -> None:
    text = "The answer is forty-two, which everybody knows."
    turns = [(0, 10), (0, 20), (0, len(text))]
    so_far = [{"candidates": [{"content": {"parts": [{"text": text[a:b]}]}, "index": 0}]} for a, b in turns]
    so_far[-1]["candidates"][0]["finishReason"] = "STOP"
    raw = b"".join(as_events([Frame("text", chunk) for chunk in so_far]))
    done = one("gemini_ai_studio", Turn(fault=Fault(raw=raw)))
    assert (done.said, done.turn.text) == (text, text)
    assert "sent before" in done.carried("loss")[0]["reason"]


def test_gemini_calls_keep_the_ids_that_the_service_gave() -> None:
    done = one("gemini_ai_studio", Turn(calls=(Call(name="read", input={"path": "a"}, id="g-1"),)))
    assert [call.tool_use_id for call in done.calls] == ["g-1"]
    assert done.turn.calls[0].id == "g-1"


def test_gemini_is_sent_the_ids_of_calls_and_results() -> None:
    parts = [part for content in one("gemini_ai_studio", None, *worked()).bodies[0]["contents"]
             for part in content["parts"]]  # fmt: skip
    assert [part["functionCall"]["id"] for part in parts if "functionCall" in part] == ["call_a"]
    assert [part["functionResponse"]["id"] for part in parts if "functionResponse" in part] == ["call_a"]


@pytest.mark.parametrize("call_id", ["g-1", None])
def test_gemini_calls_that_come_twice_are_told_once(call_id: str | None) -> None:
    turn = Turn(calls=(Call(name="read", input={"path": "a"}, id=call_id),))
    done = one("gemini_ai_studio", reworked("gemini_ai_studio", turn, twice("call")))
    assert len(done.calls) == len(done.turn.calls) == 1


@pytest.mark.parametrize("raw", ["MALFORMED_FUNCTION_CALL", "SAFETY", "RECITATION", "MAX_TOKENS"])
def test_gemini_reasons_for_an_end_are_kept_beside_what_they_mean(raw: str) -> None:
    done = one("gemini_ai_studio", Turn(text="half", stop_raw=raw))
    assert done.turn.stop_raw == raw
    assert done.turn.stop != "end"


def test_gemini_goes_down_its_ladder_one_rung_after_the_other() -> None:
    refuses = [
        Turn(when=When(has=pointer), times=None, fault=Fault(status=400, message=words))
        for pointer, words in (
            ("/generationConfig", "Bad Request"), ("/contents/0/parts/1/inlineData", "inlineData is not supported"),
            ("/tools", "function calling is not enabled"),
        )
    ]  # fmt: skip
    asked = conversation("gemini_ai_studio", picture(), tools=(READ,), options={"temperature": 0.5})
    done = talk("gemini_ai_studio", [*refuses, Turn(text="ok")], asked)
    assert done.turn.text == "ok"
    assert [retry["step"] for retry in done.carried("retry")] == ["no-defaults", "no-images", "no-tools"]
