"""What is tried when a service refuses a request: every rung against a service that needs it, and the pure rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane.dialects.ir import Conversation, Message, Text
from backplane.errors import CODES
from backplane.testing import PROTOCOLS, Call, Fault, Turn, When
from backplane.upstream.failure import INVALID, UpstreamFailure
from backplane.upstream.ladder import LADDERS, WAIT_S_MAX, climb, next_step, prepare
from backplane.upstream.rewrites import strict_tools
from tests.upstream.talk import READ, conversation, picture, talk, worked

SYSTEM = Message(role="system", parts=(Text(text="Be brief."),))
HELLO = Message(role="user", parts=(Text(text="hello"),))
FORCED: dict[str, Any] = {"tool_choice": {"mode": "required"}}


@dataclass(frozen=True)
class Gate:
    """A service that refuses a request while it has something."""

    protocol: str
    rung: str
    refuses: When
    words: str
    messages: tuple[Message, ...] = (HELLO,)
    members: tuple[tuple[str, Any], ...] = ()
    parallel: bool = True
    stream: bool = True
    status: int = 400

    def conversation(self) -> Conversation:
        return conversation(self.protocol, *self.messages, **dict(self.members))


TOOLS = (("tools", (READ,)),)
STRICT = (("tools", (msgspec.structs.replace(READ, strict=True),)),)
TWO_TEXTS = Message(role="user", parts=(Text(text="one"), Text(text="two")))
GATES = (
    Gate("openai_compatible", "no-stream-options", When(has="/stream_options"), "unknown field stream_options"),
    Gate("openai_compatible", "no-parallel-tool-calls", When(has="/parallel_tool_calls"),
         "parallel_tool_calls: extra inputs are not permitted", members=TOOLS, parallel=False),
    Gate("openai_compatible", "no-strict", When(anywhere='"strict"'), "strict is not supported", members=STRICT),
    Gate("openai_compatible", "flat-text", When(anywhere='"type":"text"'), "content must be a string",
         messages=(TWO_TEXTS,)),
    Gate("openai_compatible", "no-images", When(anywhere='"type":"image_url"'), "no endpoints support image input",
         messages=(picture(),)),
    Gate("openai_responses", "stream-instead", When(stream=False), "only stream=true is supported", stream=False),
    Gate("openai_responses", "no-parallel-tool-calls", When(has="/parallel_tool_calls"),
         "Unknown parameter: parallel_tool_calls", members=TOOLS, parallel=False),
    Gate("openai_responses", "no-strict", When(anywhere='"strict"'), "strict is not supported", members=TOOLS),
    Gate("anthropic", "no-strict", When(anywhere='"strict"'), "tools.0.strict: extra inputs are not permitted",
         members=STRICT),
    Gate("anthropic", "as-blocks", When(is_text="/system"),
         "system: invalid type: string, expected a sequence", messages=(SYSTEM, HELLO), status=422),
    Gate("anthropic", "no-tool-choice", When(has="/tool_choice"), "tool_choice is not supported",
         members=(*TOOLS, ("options", FORCED))),
    Gate("anthropic", "no-images", When(anywhere='"type":"image"'), "this model takes no image input",
         messages=(picture(),)),
    Gate("anthropic", "no-tools", When(has="/tools"), "tools are not supported", messages=worked(), members=TOOLS),
    Gate("gemini_ai_studio", "no-defaults", When(has="/generationConfig"), "Unknown name generationConfig",
         members=(("options", {"temperature": 0.5}),)),
    Gate("gemini_ai_studio", "no-images", When(anywhere="inlineData"), "inlineData is not supported",
         messages=(picture(),)),
    Gate("gemini_ai_studio", "no-tools", When(has="/tools"), "function calling is not enabled", messages=worked(),
         members=TOOLS),
)  # fmt: skip


def test_every_rung_of_the_ladders_has_its_gate() -> None:
    assert {(gate.protocol, gate.rung) for gate in GATES} == {
        (protocol, rung.name) for protocol, ladder in LADDERS.items() for rung in ladder
    }


def refusal(gate: Gate, words: str) -> Turn:
    return Turn(when=gate.refuses, times=None, fault=Fault(status=gate.status, message=words))


def gate_id(gate: Gate) -> str:
    return f"{gate.protocol}-{gate.rung}"


CUTS = {"no-tools", "no-images"}
SPARED = [
    (gate, words) for gate in GATES for words in ("named", "unnamed") if words == "named" or gate.rung not in CUTS
]


@pytest.mark.parametrize(("gate", "words"), SPARED, ids=lambda one: one if isinstance(one, str) else gate_id(one))
def test_a_service_that_refuses_something_is_spared_it_and_the_receipt_can_say_so(gate: Gate, words: str) -> None:
    said = gate.words if words == "named" else "Bad Request"
    done = talk(gate.protocol, [refusal(gate, said), Turn(text="done")], gate.conversation(),
                parallel=gate.parallel, stream=gate.stream)  # fmt: skip
    assert done.turn.text == "done"
    steps = [retry["step"] for retry in done.carried("retry")]
    assert gate.rung in steps
    if words == "named":
        assert steps == [gate.rung]
    reasons = [rung.reason for rung in LADDERS[gate.protocol] if rung.name in steps]
    assert {loss["reason"] for loss in done.carried("loss") if loss["code"] == "fallback"} == set(reasons)
    assert {loss.reason for loss in done.turn.losses if loss.code == "fallback"} == set(reasons)


@pytest.mark.parametrize("gate", GATES, ids=gate_id)
def test_what_was_refused_once_is_not_sent_again_in_later_turns(gate: Gate) -> None:
    asked = gate.conversation()
    done = talk(gate.protocol, [refusal(gate, gate.words), Turn(text="one"), Turn(text="two")], asked, asked,
                parallel=gate.parallel, stream=gate.stream)  # fmt: skip
    assert [turn.text for turn in done.turns] == ["one", "two"]
    assert len(done.requests) == 3
    assert [turn.tries for turn in done.turns] == [2, 1]


def test_what_the_service_does_not_take_is_said_in_words_instead() -> None:
    gate = next(gate for gate in GATES if gate_id(gate) == "anthropic-no-tools")
    done = talk("anthropic", [refusal(gate, gate.words), Turn(text="done")], gate.conversation())
    last = done.bodies[-1]
    assert "tools" not in last
    text = str(last["messages"])
    assert "tool_use" not in text
    assert "tool_result" not in text
    assert "content of a" in text
    assert "called the tool read" in text


def test_a_picture_that_is_not_taken_leaves_a_word_in_its_place() -> None:
    for gate in (gate for gate in GATES if gate.rung == "no-images" or "inlineData" in str(gate.refuses)):
        done = talk(gate.protocol, [refusal(gate, gate.words), Turn(text="done")], gate.conversation())
        text = str(done.bodies[-1])
        assert "left out: the service does not take it" in text
        assert "look" in text
        assert "iVBOR" not in text


def test_when_every_rung_is_refused_the_first_refusal_is_told() -> None:
    script = [Turn(fault=Fault(status=400, message="the first words")),
              Turn(fault=Fault(status=400, message="later words"), times=None)]  # fmt: skip
    asked = conversation("anthropic", SYSTEM, picture(), tools=(READ,), options=FORCED)
    done = talk("anthropic", script, asked)
    assert (done.failed.code, len(done.requests)) == (INVALID, 3)  # as they are, as-blocks, no-tool-choice
    assert "the first words" in done.failed.message


MENTIONS = (
    "Bad Request", "", "tools.0.name: must match the pattern", "messages.1: a tool result has no tool call before it",
    "image exceeds 5 MB maximum", "images.0: could not be decoded", "function name is too long",
    "the number of tools is above 128", "content.0.text: text content blocks must be non-empty",
    "mime type of the picture differs from its data",
)  # fmt: skip
"""Refusals that do not say that tools or images are not taken."""


@pytest.mark.parametrize("words", MENTIONS)
@pytest.mark.parametrize("gate", [gate for gate in GATES if gate.rung in CUTS], ids=gate_id)
def test_tools_and_images_are_left_out_only_where_the_words_say_so(gate: Gate, words: str) -> None:
    done = talk(gate.protocol, [refusal(gate, words), Turn(text="done")], gate.conversation())
    assert (done.failed.code, CUTS & {step["step"] for step in done.carried("retry")}) == (
        INVALID, set()
    )  # fmt: skip


@pytest.mark.parametrize("gate", [gate for gate in GATES if gate.rung in CUTS], ids=gate_id)
@pytest.mark.parametrize("words", ["The credit balance of this account is too low", "the monthly quota is exhausted",
                                   "blocked by the safety system"])  # fmt: skip
def test_no_rung_answers_a_lack_of_money_or_a_rule(gate: Gate, words: str) -> None:
    done = talk(gate.protocol, [refusal(gate, words), Turn(text="done")], gate.conversation())
    assert done.failed.code != INVALID
    assert len(done.requests) == 1


def test_a_refusal_after_output_is_not_answered_by_another_request() -> None:
    from backplane.testing import Failure as Broken

    fault = Fault(failure=Broken(code="invalid_request_error", message="stream_options"))
    done = talk("openai_compatible", [Turn(text="half", fault=fault), Turn(text="again")])
    assert (len(done.requests), done.said) == (1, "half")


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("status", [401, 413, 429])
def test_no_rung_is_taken_for_what_no_rung_mends(protocol: str, status: int) -> None:
    failure = UpstreamFailure(code={401: "backend_auth_failed", 413: "backend_context_length"}.get(status, "x"),
                      message="tool_choice stream_options generationConfig", status=status)  # fmt: skip
    assert next_step(protocol, {"stream_options": {}, "tools": [], "generationConfig": {}}, failure) is None


# The pure rule --------------------------------------------------------------------------------------------------------

requests = st.fixed_dictionaries(
    {},
    optional={
        "stream": st.booleans(),
        "stream_options": st.just({"include_usage": True}),
        "parallel_tool_calls": st.booleans(),
        "system": st.text(max_size=5),
        "tool_choice": st.just({"type": "auto"}),
        "tools": st.just([{"name": "read"}]),
        "generationConfig": st.just({"temperature": 1}),
        "messages": st.lists(
            st.fixed_dictionaries({
                "role": st.just("user"),
                "content": st.one_of(
                    st.text(max_size=5),
                    st.lists(st.sampled_from([
                        {"type": "text", "text": "a"}, {"type": "image", "source": {}},
                        {"type": "tool_use", "id": "a", "name": "b", "input": {}},
                        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]},
                        {"type": "tool_result", "tool_use_id": "a"},
                    ])),
                ),
            }), max_size=3,
        ),
        "contents": st.lists(
            st.fixed_dictionaries({"parts": st.lists(st.sampled_from([
                {"text": "a"}, {"inlineData": {}}, {"functionCall": {"name": "a"}},
                {"functionResponse": {"name": "a", "response": {}, "parts": [{"inlineData": {}}]}},
            ]))}), max_size=3,
        ),
    },
)  # fmt: skip
failures = st.builds(
    UpstreamFailure,
    code=st.sampled_from(sorted(CODES)),
    message=st.sampled_from(["", "tool_choice", "image", "tools", "stream_options", "stream"]),
    status=st.sampled_from([None, 200, 400, 422, 429, 500]),
    retry_after_s=st.sampled_from([None, 0.0, 5.0, 1e6]),
    may_pass=st.booleans(),
)


@given(st.sampled_from(PROTOCOLS), requests, st.lists(failures, min_size=40, max_size=40))
def test_every_ladder_ends_whatever_fails(protocol: str, request: dict[str, Any], kinds: list[UpstreamFailure]) -> None:
    taken: tuple[str, ...] = ()
    tries, total = 1, 1
    for failure in kinds:
        step = next_step(protocol, request, failure, taken, tries=tries, tries_max=3)
        if step is None:
            break
        assert 0 <= step.wait_s <= WAIT_S_MAX
        assert step.rung not in taken
        if step.rung is None:
            assert step.request is request
            tries += 1
        else:
            assert step.losses
            taken, tries = (*taken, step.rung), 1
        request, total = step.request, total + 1
    assert total <= 3 * (1 + len(LADDERS[protocol]))


@given(st.sampled_from(PROTOCOLS), requests)
def test_a_rung_changes_a_request_once(protocol: str, request: dict[str, Any]) -> None:
    for rung in LADDERS[protocol]:
        once = rung.change(request)
        assert rung.change(once) == once
        assert climb(protocol, request, (rung.name,)) == once


@given(st.sampled_from(PROTOCOLS), requests, st.booleans())
def test_what_is_prepared_needs_no_further_preparation(protocol: str, request: dict[str, Any], parallel: bool) -> None:
    once, _ = prepare(protocol, request, parallel=parallel)
    assert prepare(protocol, once, parallel=parallel) == (once, ())


def test_strict_schemas_are_closed_at_every_depth_and_keep_what_is_required() -> None:
    inner = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    schema = {
        "type": "object",
        "properties": {"a": inner, "b": {"type": "array", "items": inner}, "c": {"anyOf": [inner, {"type": "null"}]}},
        "required": ["a"],
        "$defs": {"d": inner},
    }
    request = strict_tools({"tools": [{"type": "function", "name": "t", "parameters": schema}]})
    tool = request["tools"][0]
    closed = {**inner, "additionalProperties": False}
    assert tool["parameters"]["properties"] == {
        "a": closed, "b": {"type": "array", "items": closed}, "c": {"anyOf": [closed, {"type": "null"}]}
    }  # fmt: skip
    assert (tool["parameters"]["additionalProperties"], tool["parameters"]["required"]) == (False, ["a"])
    assert tool["parameters"]["$defs"] == {"d": closed}
    assert tool["strict"] is False


def test_a_schema_whose_members_are_all_required_is_called_strict() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    request = strict_tools({"tools": [{"type": "function", "name": "t", "parameters": schema}]})
    assert request["tools"][0]["strict"] is True


def test_a_map_keeps_its_open_members_and_is_not_called_strict() -> None:
    schema = {"type": "object", "additionalProperties": {"type": "string"}}
    request = strict_tools({"tools": [{"type": "function", "name": "t", "parameters": schema}]})
    assert request["tools"][0]["parameters"] == schema
    assert request["tools"][0]["strict"] is False


def test_a_server_that_says_500_for_what_it_does_not_take_is_understood_by_its_words() -> None:
    gate = Gate("openai_compatible", "no-stream-options", When(has="/stream_options"), "", status=500)
    done = talk("openai_compatible", [refusal(gate, "panic: stream_options"), Turn(text="done")])
    assert [retry["step"] for retry in done.carried("retry")] == ["no-stream-options"]


def test_repeats_and_rungs_go_together() -> None:
    gate = GATES[0]
    script = [refusal(gate, gate.words), Turn(fault=Fault(status=503)), Turn(text="done", calls=(Call(name="a"),))]
    done = talk("openai_compatible", script)
    assert [retry["step"] for retry in done.carried("retry")] == ["no-stream-options", None]
    assert done.turn.tries == 3
