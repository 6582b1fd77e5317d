"""Our own client at the same scripted model: it hears what the vendors' clients hear, and asks as they ask.

What we send is judged by the vendors' own types and set beside what their clients send.
"""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from backplane.dialects.ir import Conversation, Message, Text, ToolOutput, ToolSpec
from backplane.testing import PROTOCOLS, Call, Fault, ModelServer, ProtocolName, RecordedRequest, Turn
from tests.dialects import referees
from tests.scripted import TURNS, Heard, expected
from tests.sdks import DIALECTS, KEY, hear
from tests.upstream.talk import READ, conversation, picture, talk, worked

each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)
each_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])

STOPS = {
    "stop": "end", "completed": "end", "end_turn": "end", "STOP": "end", "length": "max_tokens",
    "max_output_tokens": "max_tokens", "MAX_TOKENS": "max_tokens", "SAFETY": "content_filter",
}  # fmt: skip
"""The vendors' words for an end, in ours."""
OPTIONS: dict[str, Any] = {
    "max_tokens": 500, "temperature": 0.5, "top_p": 0.9, "parallel_tool_calls": False,
    "tool_choice": {"mode": "tool", "name": "read"},
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
FORMED: dict[str, Any] = {
    "max_tokens": 5000, "reasoning_effort": "low",
    "response_format": {"type": "schema", "schema": SCHEMA, "name": "answer", "strict": True},
}  # fmt: skip
STRICT = ToolSpec(name="read", description="Reads.", schema=SCHEMA, strict=True)


def system(text: str) -> Message:
    return Message(role="system", parts=(Text(text=text),))


SAID = Message(role="assistant", parts=(Text(text="I read"), Text(text=" it.")))
ASKED: dict[str, tuple[tuple[Message, ...], dict[str, Any]]] = {
    "a few words": ((), {}),
    "instructions and options": ((system("be brief"), *worked()[:1]), {"tools": (READ,), "options": OPTIONS}),
    "a picture": ((picture(),), {}),
    "a call and its result": (worked(), {"tools": (READ,)}),
    "an answer of two pieces": ((*worked()[:1], SAID, *worked()[:1]), {}),
    "a form for the answer": (worked()[:1], {"options": FORMED, "tools": (STRICT,)}),
}


def stop_of(turn: Turn, protocol: ProtocolName) -> str:
    """Why the answer ended, in our words; a call is a call, whatever the vendor calls it."""
    word = expected(turn, protocol).stop
    return "tool_use" if turn.calls else STOPS.get(word, word)


@each_protocol
@each_way
@pytest.mark.parametrize("case", TURNS)
def test_we_hear_what_the_vendors_clients_hear(protocol: ProtocolName, stream: bool, case: str) -> None:
    turn = TURNS[case]
    done = talk(protocol, [turn], stream=stream).turn
    parts = done.message.parts
    assert done.usage is not None
    heard = Heard(
        text="".join(getattr(part, "text", "") for part in parts if type(part).__name__ in ("Text", "Refusal")),
        reasoning="".join(getattr(part, "text", "") for part in parts if type(part).__name__ == "Thinking"),
        calls=[(call.name, call.input) for call in done.calls], input=done.usage.input or 0,
        output=done.usage.output or 0, cache_read=done.usage.cache_read or 0, stop=done.stop,
    )  # fmt: skip
    assert heard == expected(turn, protocol)._replace(stop=stop_of(turn, protocol))


@each_protocol
@each_way
@pytest.mark.parametrize("case", ASKED)
def test_what_we_send_is_valid_by_the_vendors_types(protocol: ProtocolName, stream: bool, case: str) -> None:
    referees.need(DIALECTS[protocol])
    messages, members = ASKED[case]
    done = talk(protocol, [Turn(text="ok")], conversation(protocol, *messages, **members), stream=stream)
    assert done.error is None
    assert [referees.invalid(DIALECTS[protocol], "request", body) for body in done.bodies] == [None]


@each_protocol
def test_a_conversation_that_went_on_is_valid_by_the_vendors_types(protocol: ProtocolName) -> None:
    referees.need(DIALECTS[protocol])
    script = [TURNS["reasoning, text and two calls"], Turn(text="done")]
    first = conversation(protocol, tools=(READ,))
    answer = talk(protocol, script[:1], first).turn
    results = tuple(ToolOutput(id=call.id, content=(Text(text="found"),)) for call in answer.calls)
    messages = (*first.messages, answer.message, Message(role="tool", parts=results))
    (body,) = talk(protocol, script[1:], Conversation(dialect=first.dialect, model="m", messages=messages)).bodies
    assert referees.invalid(DIALECTS[protocol], "request", body) is None
    assert json.dumps(body).count('"found"') == 2


def address(request: RecordedRequest) -> tuple[str, str, dict[str, str]]:
    return request.method, request.path, request.query


@each_protocol
@each_way
def test_we_ask_at_the_address_of_the_vendors_client(protocol: ProtocolName, stream: bool) -> None:
    referees.need(DIALECTS[protocol])
    with ModelServer(Turn(text="hi")) as server:
        hear(protocol, server, stream)
        (theirs,) = server.requests
    asked = Conversation(dialect=DIALECTS[protocol], model="m", messages=conversation(protocol).messages)
    (ours,) = talk(protocol, [Turn(text="hi")], asked, stream=stream).requests
    assert address(ours) == address(theirs)
    named = [name for name in ("anthropic-version", "content-type") if name in theirs.headers]
    assert all(name in ours.headers for name in named)
    assert KEY in json.dumps(theirs.headers)


@each_protocol
def test_we_and_the_vendors_client_refuse_the_same_broken_answer(protocol: ProtocolName) -> None:
    referees.need(DIALECTS[protocol])
    fault = Fault(status=401, message="as scripted")
    assert "as scripted" in str(talk(protocol, [Turn(fault=fault)]).failed)
    with ModelServer(Turn(calls=(Call(name="f"),), fault=fault)) as server, pytest.raises(Exception) as caught:  # noqa: PT011
        hear(protocol, server, True)
    assert cast("Any", caught.value).__class__.__module__.split(".")[0] in ("openai", "anthropic", "google")
