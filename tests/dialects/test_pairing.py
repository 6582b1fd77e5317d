"""Calls and results: whatever the history, what goes upstream is well-formed, and each repair has a name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backplane.dialects import dialect
from backplane.dialects.ir import Conversation, Message, Part, Text, ToolOutput, ToolUse
from backplane.dialects.pairing import MISSING, is_paired, paired
from backplane.testing import PROTOCOLS, Call, Turn
from backplane.upstream.endpoint import PROTOCOLS as TABLE
from tests.upstream.talk import conversation, talk, worked


def call(call_id: str, **members: Any) -> ToolUse:
    return ToolUse(id=call_id, name="read", input={"path": call_id}, **members)


def result(call_id: str, text: str = "found") -> ToolOutput:
    return ToolOutput(id=call_id, content=(Text(text=text),))


def says(role: Any, *parts: Part) -> Message:
    return Message(role=role, parts=parts)


def repaired(*messages: Message) -> tuple[tuple[Message, ...], list[str]]:
    done = paired(conversation("anthropic", *messages))
    assert is_paired(done.value.messages)
    return done.value.messages, [loss.code for loss in done.losses]


HI = Text(text="hi")


def test_a_well_formed_history_comes_back_as_it_is() -> None:
    asked = conversation("anthropic", *worked())
    done = paired(asked, ids_optional=True)
    assert done.value is asked
    assert done.losses == ()


def test_a_missing_result_is_filled_in_and_named() -> None:
    messages, codes = repaired(says("assistant", call("a")), says("user", HI))
    assert messages[1].role == "tool"
    answer = messages[1].parts[0]
    assert isinstance(answer, ToolOutput)
    assert (answer.id, answer.is_error, answer.content) == ("a", True, (Text(text=MISSING),))
    assert codes == ["result_missing"]


def test_a_missing_result_at_the_end_is_filled_in() -> None:
    messages, codes = repaired(says("user", HI), says("assistant", HI, call("a")))
    assert [message.role for message in messages] == ["user", "assistant", "tool"]
    assert codes == ["result_missing"]


def test_an_orphan_result_becomes_words_of_the_user_and_is_named() -> None:
    messages, codes = repaired(says("user", HI), says("tool", result("z", "the finding")))
    assert [message.role for message in messages] == ["user", "user"]
    assert "the finding" in str(messages[1].parts)
    assert not any(isinstance(part, ToolOutput) for part in messages[1].parts)
    assert codes == ["call_missing"]


def test_a_second_result_of_the_same_call_is_an_orphan() -> None:
    messages, codes = repaired(says("assistant", call("a")), says("tool", result("a", "1"), result("a", "2")))
    assert messages[1].parts == (result("a", "1"),)
    assert "2" in str(messages[2].parts)
    assert codes == ["call_missing"]


def test_a_result_before_its_call_does_not_count_as_its_result() -> None:
    _, codes = repaired(says("tool", result("a")), says("assistant", call("a")))
    assert sorted(codes) == ["call_missing", "result_missing"]


def test_results_stand_in_one_message_in_the_order_of_their_calls() -> None:
    messages, codes = repaired(
        says("assistant", call("a"), call("b")), says("tool", result("b")), says("tool", result("a"))
    )
    assert [message.parts for message in messages[1:]] == [(result("a"), result("b"))]
    assert codes == []


def test_a_result_behind_other_words_is_moved_to_its_call_and_named() -> None:
    messages, codes = repaired(says("assistant", call("a")), says("user", HI), says("tool", result("a")))
    assert [message.role for message in messages] == ["assistant", "tool", "user"]
    assert codes == ["order"]


def test_words_beside_results_follow_them() -> None:
    messages, _ = repaired(says("assistant", call("a"), call("b")), says("user", HI, result("b"), result("a")))
    assert messages[1].parts == (result("a"), result("b"))
    assert messages[2].parts == (HI,)


def test_calls_with_the_same_id_get_ids_of_their_own() -> None:
    messages, codes = repaired(
        says("assistant", call("a")), says("tool", result("a", "1")),
        says("assistant", call("a")), says("tool", result("a", "2")),
    )  # fmt: skip
    ids = [part.id for message in messages for part in message.parts if isinstance(part, ToolUse | ToolOutput)]
    assert ids == ["a", "a", "a-2", "a-2"]
    assert codes == []


parts = st.one_of(
    st.just(HI),
    st.builds(call, st.sampled_from("abc"), id_made=st.booleans()),
    st.builds(result, st.sampled_from("abcd"), st.sampled_from(["1", "2"])),
)
histories = st.lists(
    st.builds(
        lambda role, found: Message(role=role, parts=tuple(found)),
        st.sampled_from(["user", "assistant", "tool", "system"]),
        st.lists(parts, min_size=1, max_size=4),
    ),
    max_size=8,
)


def texts(messages: tuple[Message, ...]) -> set[str]:
    """All words of results, wherever they stand."""
    found = set()
    for message in messages:
        for part in message.parts:
            found |= {inner.text for inner in getattr(part, "content", ()) if isinstance(inner, Text)}
            found |= {part.text} if isinstance(part, Text) else set()
    return found


@given(histories, st.booleans())
def test_any_history_is_well_formed_after_one_repair_and_loses_no_words(
    history: list[Message], ids_optional: bool
) -> None:
    asked = Conversation(dialect="claude", messages=tuple(history))
    done = paired(asked, ids_optional=ids_optional)
    assert is_paired(done.value.messages)
    again = paired(done.value, ids_optional=ids_optional)
    assert again.value is done.value
    assert texts(asked.messages) <= texts(done.value.messages)


def pairs_of(protocol: str, body: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Ids (names where Gemini has none) of the calls and of the results, in the order in which they are sent."""
    calls: list[Any] = []
    results: list[Any] = []
    if protocol == "openai_compatible":
        for message in body["messages"]:
            calls += [one.get("id") for one in message.get("tool_calls") or ()]
            results += [message["tool_call_id"]] if message["role"] == "tool" else []
    elif protocol == "openai_responses":
        for item in body["input"]:
            calls += [item["call_id"]] if item.get("type") == "function_call" else []
            results += [item["call_id"]] if item.get("type") == "function_call_output" else []
    elif protocol == "anthropic":
        for message in body["messages"]:
            blocks = message["content"] if isinstance(message["content"], list) else []
            calls += [block["id"] for block in blocks if block["type"] == "tool_use"]
            results += [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
    else:
        for part in (part for content in body["contents"] for part in content["parts"]):
            if "functionCall" in part:
                calls.append((part["functionCall"]["name"], part["functionCall"].get("id")))
            if "functionResponse" in part:
                results.append((part["functionResponse"]["name"], part["functionResponse"].get("id")))
    return calls, results


@settings(max_examples=50)
@given(st.sampled_from(PROTOCOLS), histories)
def test_what_is_written_pairs_every_call_in_every_protocol(protocol: str, history: list[Message]) -> None:
    name = TABLE[protocol].dialect
    history = [*history, Message(role="user", parts=(HI,))]
    asked = Conversation(dialect=name, messages=tuple(history), model="m")
    done = paired(asked, ids_optional=TABLE[protocol].ids_optional)
    calls, results = pairs_of(protocol, dialect(name).from_ir(done.value).value)
    assert calls == results
    if not TABLE[protocol].ids_optional:
        assert all(calls)
        assert len(set(calls)) == len(calls)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_conversation_of_several_turns_goes_back_and_forth_with_its_ids(protocol: str) -> None:
    """The vendor's ids come back to it; where it gave none, none are sent; ids used twice are told apart."""
    same = Call(name="read", input={"path": "a"}, id=None if protocol == "gemini_ai_studio" else "call_0")
    first = talk(protocol, [Turn(calls=(same,))], conversation(protocol, says("user", HI)))
    one = first.turn.calls[0]
    history = [says("user", HI), first.turn.message, says("tool", result(one.id))]
    second = talk(protocol, [Turn(calls=(same,))], conversation(protocol, *history))
    two = second.turn.calls[0]
    assert two.id != one.id
    assert second.calls[0].tool_use_id == two.id
    history += [second.turn.message, says("tool", result(two.id))]
    third = talk(protocol, [Turn(text="done")], conversation(protocol, *history))
    calls, results = pairs_of(protocol, third.bodies[0])
    assert len(calls) == 2
    assert calls == results
    if protocol == "gemini_ai_studio":
        assert calls == [("read", None)] * 2
    else:
        assert len(set(calls)) == 2
    assert third.turn.losses == ()


def test_a_repair_is_heard_as_a_loss() -> None:
    asked = conversation("anthropic", says("user", HI), says("assistant", call("a")), says("user", HI))
    done = talk("anthropic", [Turn(text="ok")], asked)
    assert [loss["code"] for loss in done.carried("loss")] == ["result_missing"]
    assert [block["type"] for block in done.bodies[0]["messages"][2]["content"]] == ["tool_result"]
    assert msgspec.json.encode(done.bodies[0])
