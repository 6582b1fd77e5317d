"""Which tools a request keeps after a refusal: wordings of refusals by four protocols.

A refusal that blames one tool costs this tool, one that takes no tools costs all, and any other costs none.
"""

from __future__ import annotations

from typing import Any

import pytest

from backplane.dialects.ir import Conversation, ToolSpec
from backplane.testing import PROTOCOLS, Fault, Turn, When
from backplane.upstream.failure import INVALID, UpstreamFailure
from backplane.upstream.ladder import LEFT_OUT, TOOLS_LEFT_OUT_MAX, blamed_tool, next_step
from backplane.upstream.rewrites import offered_tools
from tests.upstream.talk import conversation, talk

NAMES = ("read", "search", "write")
TOOLS = tuple(
    ToolSpec(name=name, description=f"Does {name}.", schema={"type": "object", "properties": {"a": {"type": "string"}}})
    for name in NAMES
)
PLACES = {
    "openai_compatible": "tools[1].function", "openai_responses": "tools[1]", "anthropic": "tools.1.custom",
    "gemini_ai_studio": "tools[0].function_declarations[1]",
}  # fmt: skip

ONE = (
    "{place}.input_schema: oneOf, allOf and anyOf at the top are not supported",
    "{place}.input_schema: the JSON schema is not valid for draft 2020-12",
    "{place}.input_schema.type: field required",
    "{place}.input_schema.properties: keys must match a pattern, others are not allowed",
    "{place}.parameters: unknown field \"$schema\", cannot be read",
    "{place}.parameters.properties[a].enum: only strings are supported",
    "{place}.name: letters that are not allowed",
    "* {place}.parameters.required[0]: the property is not defined",
    "Invalid schema for function 'search': the top must have type 'object' and no 'anyOf'",
    "Invalid schema for function search: an array schema has no items",
    "Invalid JSON schema in the tool \"search\": a reference is not supported",
    "the parameters of the function `search` are not a schema that this model supports",
    "function 'search': the schema has members beside $ref, which is not supported",
    "tool search: its input_schema has too many properties",
    "schema of tool 'search' does not support images",
    "Failed to parse the definition of the tool 'search'",
)  # fmt: skip
"""Refusals of the tool `search` alone."""

NONE = (
    "tools: names must be unique",
    "the number of tools is above 128, more are not supported",
    "messages.1.content.0: a tool use has no result",
    "the function call search in block 2 has no thought signature",
    "function calling with a response of the type application/json is not supported",
    "tool results with images are not supported",
    "this model does not support parallel function calling",
    "tool_use ids are not accepted twice",
    "tool names with dots are not accepted",
    "tools of the type computer are not supported by this model",
    "tools.7.custom.input_schema: anyOf at the top is not supported",
    "an input_schema of the tools is not supported",
    "tool 'other' has a schema that is not supported",
    "combining tools of several kinds is not supported",
)
"""Refusals for which no tool is left out: another thing is refused, or a tool that was not offered."""

ALL = (
    "tools are not supported",
    "tools are not supported by this model.",
    "`tools` is not supported here",
    "this model does not support tools",
    "scripted-model does not support function calling",
    "function calling is not enabled for this model",
    "tool use is currently not supported",
    "tools: extra inputs are not permitted",
    "unsupported parameter: 'tools'",
    "this model takes no tools",
)


def asked(protocol: str) -> Conversation:
    return conversation(protocol, tools=TOOLS)


def refusing(words: str, *, anywhere: str) -> Turn:
    return Turn(when=When(anywhere=anywhere), times=None, fault=Fault(status=400, message=words))


def offered(body: dict[str, Any]) -> list[str]:
    return [name for _, name in offered_tools(body)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("words", ONE)
def test_a_refusal_of_one_tool_leaves_this_tool_out_and_names_it(protocol: str, words: str) -> None:
    said = words.format(place=PLACES[protocol])
    done = talk(protocol, [refusing(said, anywhere="Does search."), Turn(text="done")], asked(protocol))
    assert done.turn.text == "done"
    assert offered(done.bodies[-1]) == ["read", "write"]
    assert done.carried("retry")[-1]["step"] == f"{LEFT_OUT}search"
    losses = [loss for loss in done.turn.losses if "'search'" in loss.reason]
    assert [(loss.kind, loss.code) for loss in losses] == [("dropped", "fallback")]
    assert {"read", "write"} <= {name for body in done.bodies for name in offered(body)}
    assert all({"read", "write"} <= set(offered(body)) for body in done.bodies)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("words", NONE)
def test_a_refusal_of_something_else_leaves_every_tool_in_and_fails(protocol: str, words: str) -> None:
    done = talk(protocol, [refusing(words, anywhere="Does search."), Turn(text="done")], asked(protocol))
    assert done.failed.code == INVALID
    assert all(offered(body) == list(NAMES) for body in done.bodies)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("words", ALL)
def test_a_service_that_takes_no_tools_is_asked_without_them_or_the_turn_fails(protocol: str, words: str) -> None:
    done = talk(protocol, [refusing(words, anywhere="Does search."), Turn(text="done")], asked(protocol))
    if protocol in ("anthropic", "gemini_ai_studio"):
        assert (done.turn.text, offered(done.bodies[-1])) == ("done", [])
        assert any("takes no tools" in loss.reason for loss in done.turn.losses)
    else:
        assert done.failed.code == INVALID
        assert all(offered(body) == list(NAMES) for body in done.bodies)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_several_tools_are_left_out_one_after_the_other_but_never_the_last(protocol: str) -> None:
    script = [
        refusing(f"Invalid schema for function '{name}': not an object", anywhere=f"Does {name}.") for name in NAMES
    ]
    done = talk(protocol, [*script, Turn(text="done")], asked(protocol))
    assert done.failed.code == INVALID
    assert offered(done.bodies[-1]) == ["write"]
    assert "'read'" in done.failed.message


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_tool_that_was_left_out_is_not_offered_in_later_turns(protocol: str) -> None:
    words = "Invalid schema for function 'search': not an object"
    script = [refusing(words, anywhere="Does search."), Turn(text="one"), Turn(text="two")]
    done = talk(protocol, script, asked(protocol), asked(protocol))
    assert [turn.text for turn in done.turns] == ["one", "two"]
    assert offered(done.bodies[-1]) == ["read", "write"]
    assert [turn.tries for turn in done.turns][1] == 1


def test_a_choice_of_the_tool_that_was_left_out_goes_with_it() -> None:
    choice: dict[str, Any] = {"tool_choice": {"mode": "tool", "name": "search"}}
    words = "Invalid schema for function 'search': not an object"
    for protocol in PROTOCOLS:
        one = conversation(protocol, tools=TOOLS, options=choice)
        done = talk(protocol, [refusing(words, anywhere="Does search."), Turn(text="done")], one)
        assert "search" not in str(done.bodies[-1])


def test_the_member_that_a_service_names_beside_its_words_counts() -> None:
    request = {"tools": [{"type": "function", "name": name} for name in NAMES]}
    failure = UpstreamFailure(code=INVALID, message="invalid", status=400, place="tools[2].parameters")
    assert blamed_tool(request, failure) == "write"


def test_no_more_than_a_few_tools_are_left_out_of_one_run() -> None:
    names = [f"t{number}" for number in range(TOOLS_LEFT_OUT_MAX + 5)]
    request: dict[str, Any] = {"stream": True, "tools": [{"name": name} for name in names]}
    taken: tuple[str, ...] = ()
    for name in names[:TOOLS_LEFT_OUT_MAX]:
        failure = UpstreamFailure(code=INVALID, message=f"invalid schema of tool '{name}'", status=400)
        step = next_step("anthropic", request, failure, taken)
        assert step is not None
        request, taken = step.request, (*taken, step.rung or "")
    failure = UpstreamFailure(code=INVALID, message=f"invalid schema of tool '{names[-1]}'", status=400)
    assert next_step("anthropic", request, failure, taken) is None
