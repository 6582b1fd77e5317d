"""Arguments that are no JSON object: which are read as one, and what goes back to the service in the next turn."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane.dialects.ir import Conversation, Message, ToolOutput, ToolUse
from backplane.dialects.limits import Spelling
from backplane.testing import Call, Turn
from backplane.upstream.arguments import mended, sendable
from tests.upstream.talk import READ, conversation, talk

OBJECT = {"path": "a\nb"}
TEXT = json.dumps(OBJECT)
READABLE: dict[str, tuple[str, Any]] = {
    "a raw line end": ('{"path": "a\nb"}', OBJECT),
    "a raw tab": ('{"path": "a\tb"}', {"path": "a\tb"}),
    "encoded twice": (json.dumps(TEXT), OBJECT),
    "encoded three times": (json.dumps(json.dumps(TEXT)), OBJECT),
    "twice the same": (TEXT + TEXT, OBJECT),
    "twice the same, on two lines": (f"{TEXT}\n{TEXT}", OBJECT),
    "blanks around it": (f" \n{TEXT}\n", OBJECT),
    "null": ("null", {}),
    "nothing": ("", {}),
    "blanks": ("  \n", {}),
}
UNREADABLE: dict[str, str] = {
    "cut": '{"path": "a',
    "two objects": '{"path": "a"}{"path": "b"}',
    "a list": '["a"]',
    "a list of an object": '[{"path": "a"}]',
    "a text": '"a"',
    "a number": "7",
    "true": "true",
    "words before it": f"Here it is: {TEXT}",
    "words after it": f"{TEXT} is it",
    "a fence": f"```json\n{TEXT}\n```",
    "no number": '{"path": NaN}',
    "deep": "[" * 5_000,
    "single quotes": "{'path': 'a'}",
}


@pytest.mark.parametrize("name", READABLE)
def test_one_object_in_a_wrong_spelling_is_read(name: str) -> None:
    text, value = READABLE[name]
    assert mended(text) == value


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_not_one_object_stays_as_it_is(name: str) -> None:
    assert mended(UNREADABLE[name]) == UNREADABLE[name]


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5) | st.integers() | st.none(), max_size=4))
def test_an_object_is_read_from_each_of_its_spellings(value: dict[str, Any]) -> None:
    text = json.dumps(value)
    for said in (value, text, json.dumps(text), text + text, json.dumps(value, ensure_ascii=False)):
        assert mended(said) == value


@pytest.mark.parametrize("name", [*READABLE, *UNREADABLE])
@pytest.mark.parametrize("protocol", ["anthropic", "openai_compatible", "openai_responses"])
@pytest.mark.parametrize("stream", [True, False])
def test_what_a_model_wrote_as_arguments_goes_back_as_an_object(protocol: str, name: str, stream: bool) -> None:
    text = READABLE[name][0] if name in READABLE else UNREADABLE[name]
    asked = conversation(protocol, tools=(READ,))
    done = talk(protocol, [Turn(calls=(Call(name="read", input=text),))], asked, stream=stream)
    (call,) = done.turn.calls
    assert isinstance(call.input, dict) == (name in READABLE)
    assert [event.input for event in done.calls] == [call.input]
    result = Message(role="tool", parts=(ToolOutput(id=call.id, content=()),))
    again = conversation(protocol, *asked.messages, done.turn.message, result, tools=(READ,))
    back = talk(protocol, [Turn(text="done")], again, stream=stream)
    sent = arguments_in(back.bodies[-1])
    assert sent == (READABLE[name][1] if name in READABLE else {"arguments": call.input})


def arguments_in(body: dict[str, Any]) -> Any:
    """Return the arguments of a request's only call, whatever the protocol."""
    if "input" in body:
        item = next(item for item in body["input"] if item.get("type") == "function_call")
        return json.loads(item["arguments"])
    message = next(message for message in body["messages"] if message["role"] == "assistant")
    if "tool_calls" in message:
        return json.loads(message["tool_calls"][0]["function"]["arguments"])
    return next(block["input"] for block in message["content"] if block["type"] == "tool_use")


def test_arguments_that_were_mended_are_named_in_the_turn() -> None:
    for name, count in (("a raw line end", 1), ("encoded twice", 1), ("cut", 0)):
        text = READABLE[name][0] if name in READABLE else UNREADABLE[name]
        done = talk("anthropic", [Turn(calls=(Call(name="read", input=text),))], conversation("anthropic"))
        assert [loss.code for loss in done.turn.losses].count("arguments") == count


def test_a_history_without_wrong_calls_is_the_same_object() -> None:
    asked = conversation("anthropic", Message(role="assistant", parts=(ToolUse(id="a", name="b", input={}),)))
    assert sendable(asked) == (asked, ())
    assert sendable(asked)[0] is asked


def test_free_text_of_a_custom_tool_is_left_alone() -> None:
    call = ToolUse(id="a", name="b", input="{}", kind="custom")
    asked = Conversation(dialect="codex", messages=(Message(role="assistant", parts=(call,)),))
    assert sendable(asked)[0] is asked


@pytest.mark.parametrize("name", ["no\nsuch tool", "x" * 200, "a.b", ""])
def test_a_name_that_the_service_refuses_goes_back_in_one_that_it_takes(name: str) -> None:
    parts = (ToolUse(id="a", name=name, input={}), ToolOutput(id="a", name=name))
    asked = Conversation(dialect="claude", messages=(Message(role="assistant", parts=parts),))
    spelling = Spelling("[a-zA-Z0-9_-]", 64)
    sent, losses = sendable(asked, spelling)
    names = [part.name for message in sent.messages for part in message.parts if isinstance(part, ToolUse | ToolOutput)]
    assert names[0] == names[1]
    assert spelling.is_fit(names[0] or "")
    assert [loss.code for loss in losses] == ["tool_field"]
