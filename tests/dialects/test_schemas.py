"""Schemas of tools that services refuse: what is sent in their place, and that each change has a name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backplane.dialects import translate
from backplane.dialects.ir import ToolSpec
from backplane.dialects.schemas import NODES_MAX, RULES, accepted
from backplane.testing import Turn
from backplane.upstream.endpoint import PROTOCOLS
from tests.dialects import rules
from tests.upstream.talk import conversation, talk

TEXT = {"type": "string"}
A, B = ({"type": "object", "properties": {name: TEXT}, "required": [name]} for name in "ab")
NAMED = {"Q": {"type": "array", "items": TEXT}}
TREE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Tree", "title": "the next"}}}


def holding(member: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"q": member}, **more}


REFUSED: dict[str, dict[str, Any]] = {
    "anyOf at the top": {"anyOf": [A, B]},
    "oneOf at the top": {"oneOf": [A, B]},
    "allOf at the top": {"allOf": [A, B]},
    "alternatives of what is required": {**holding(TEXT), "anyOf": [{"required": ["q"]}, {"required": ["r"]}]},
    "alternatives in alternatives": {"anyOf": [{"oneOf": [A, B]}, {"allOf": [A, {"required": ["c"]}]}]},
    "alternatives by reference": {"oneOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}},
    "alternatives of other types": {"anyOf": [A, {"type": "null"}, {"type": "string"}]},
    "several kinds of alternatives": {"anyOf": [A, B], "allOf": [holding(TEXT)], "oneOf": [A, True]},
    "enum at the top": {**A, "enum": [{"a": "x"}]},
    "not at the top": {**A, "not": {"required": ["b"]}},
    "nothing": {},
    "no type": {"properties": {"a": TEXT}},
    "types at the top": {"type": ["object", "null"], "properties": {"a": TEXT}},
    "no members": {"type": "object"},
    "a reference at the top": {"$ref": "#/$defs/A", "$defs": {"A": A}},
    "a reference to itself at the top": {"$ref": "#"},
    "a list without items": holding({"type": "array"}),
    "members beside a reference": holding({"$ref": "#/$defs/Q", "minItems": 1}, **{"$defs": NAMED}),
    "a title beside a reference": holding({"$ref": "#/$defs/Q", "title": "words"}, **{"$defs": NAMED}),
    "a description beside a reference": holding({"$ref": "#/$defs/Q", "description": "words"}, **{"$defs": NAMED}),
    "members beside a lost reference": holding({"$ref": "#/$defs/None", "minItems": 1}),
    "members beside a foreign reference": holding({"$ref": "https://example.com/s.json", "minItems": 1}),
    "a tree with members beside its reference": {**TREE, "$defs": {"Tree": TREE}},
    "old definitions": holding({"$ref": "#/definitions/Q"}, definitions=NAMED),
    "several types": holding({"type": ["string", "null"], "minLength": 1}),
    "a type beside alternatives": holding({"type": "string", "anyOf": [{"pattern": "a"}, {"pattern": "b"}]}),
    "a member without a type": holding({"description": "anything"}),
    "an enum of several types": holding({"enum": ["a", 1, None, True]}),
    "an enum without a type": holding({"enum": ["a", "b"]}),
    "a constant": holding({"const": "a"}),
}  # fmt: skip
DIALECTS = ("claude", "openai", "codex", "copilot", "kimi", "gemini")


def chat(schema: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [tool]}


def claude(schema: Any) -> dict[str, Any]:
    tool = {"name": "f", "input_schema": schema}
    return {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "tools": [tool]}


@pytest.mark.parametrize("target", DIALECTS)
@pytest.mark.parametrize("name", REFUSED)
def test_a_translated_schema_is_one_that_the_target_takes_and_its_change_is_named(name: str, target: str) -> None:
    source, document = ("claude", claude(REFUSED[name])) if target == "openai" else ("openai", chat(REFUSED[name]))
    done = translate(document, source, target)
    assert rules.broken(target, done.value) == []
    (sent,) = rules.schemas(done.value)
    losses = [loss for loss in done.losses if loss.path == "/tools/0" and "schema of f" in loss.reason]
    assert bool(losses) == (sent != REFUSED[name])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_host_sends_what_the_service_takes_and_names_the_tool_in_the_receipt(protocol: str) -> None:
    tools = tuple(ToolSpec(name=f"t{place}", schema=schema) for place, schema in enumerate(REFUSED.values()))
    done = talk(protocol, [Turn(text="done")], conversation(protocol, tools=tools))
    assert rules.broken(PROTOCOLS[protocol].dialect, {**done.bodies[-1]}) == []
    named = {loss["reason"].split(":")[0] for loss in done.carried("loss")}
    assert {"schema of t0", "schema of t1", "schema of t2"} <= named or protocol == "gemini_ai_studio"


def test_alternatives_become_one_object_with_the_members_of_each() -> None:
    for name, required in (("anyOf", None), ("oneOf", None), ("allOf", ["a", "b"])):
        sent, changes = accepted({name: [A, B]}, "claude")
        assert sent["properties"] == {"a": TEXT, "b": TEXT}
        assert sent.get("required") == required
        assert [change.places for change in changes] == [(f"/{name}",), ("",)]


def test_a_member_that_alternatives_describe_in_several_ways_may_be_each() -> None:
    number = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}
    sent, _ = accepted({"anyOf": [A, number]}, "openai")
    assert sent["properties"] == {"a": {"anyOf": [TEXT, {"type": "number"}]}}
    assert sent["required"] == ["a"]


def test_the_schema_stands_in_the_place_of_a_reference_with_members_beside_it() -> None:
    sent, _ = accepted(REFUSED["members beside a reference"], "gemini")
    assert sent["properties"]["q"] == {"type": "array", "items": TEXT, "minItems": 1}
    kept, changes = accepted(REFUSED["a description beside a reference"], "gemini")
    assert (kept, changes) == (REFUSED["a description beside a reference"], ())


def test_references_to_references_end() -> None:
    names = [f"d{number}" for number in range(30)]
    named: dict[str, Any] = {"d30": TEXT}
    for one, other in zip(names, [*names[1:], "d30"], strict=True):
        pair = [{"$ref": f"#/$defs/{other}", "title": side} for side in "lr"]
        named[one] = {"type": "object", "properties": {"l": pair[0], "r": pair[1]}}
    sent, _ = accepted({**holding({"$ref": "#/$defs/d0", "title": "x"}), "$defs": named}, "gemini")
    assert sum(1 for _ in rules.nodes(sent)) < 20 * NODES_MAX


@pytest.mark.parametrize("dialect", DIALECTS)
def test_alternatives_that_lead_back_to_themselves_end(dialect: str) -> None:
    back = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#"}, {"$ref": "#/$defs/b"}]}
    sent, _ = accepted({**back, "$defs": {"a": {"oneOf": [back, back]}, "b": {"allOf": [back, back]}}}, dialect)
    assert sent["type"] == "object"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_usual_schema_stays_as_it_is(dialect: str) -> None:
    schema = holding({"type": "array", "items": {"$ref": "#/$defs/A"}}, required=["q"], **{"$defs": {"A": A}})
    sent, changes = accepted(schema, dialect)
    assert sent is schema
    assert changes == ()


words = st.sampled_from(["a", "b", "q"])
schemas = st.recursive(
    st.sampled_from([{}, TEXT, {"type": "object"}, {"type": ["string", "null"]}, {"enum": ["a", 1]}, {"const": None},
                     {"$ref": "#"}, {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a", "title": "t"}, {"type": "array"}]),
    lambda inner: st.fixed_dictionaries({}, optional={
        "type": st.sampled_from(["object", "array", "string", ["object", "null"]]),
        "properties": st.dictionaries(words, inner, max_size=3), "required": st.lists(words, max_size=2, unique=True),
        "items": inner, "anyOf": st.lists(inner, max_size=3), "oneOf": st.lists(inner, max_size=3),
        "allOf": st.lists(inner, max_size=3), "not": inner, "$defs": st.dictionaries(words, inner, max_size=2),
        "definitions": st.dictionaries(words, inner, max_size=2), "additionalProperties": st.booleans() | inner,
        "$ref": st.sampled_from(["#", "#/$defs/a", "#/definitions/b", "#/properties/q", "x"]),
    }), max_leaves=12,
)  # fmt: skip


@given(st.sampled_from(DIALECTS), schemas)
@example("kimi", {"definitions": {"b": {"definitions": {}}}, "$ref": "#/definitions/b"})
def test_any_schema_is_written_once_and_for_all_and_the_callers_own_stays(dialect: str, schema: dict[str, Any]) -> None:
    before = copy.deepcopy(schema)
    sent, changes = accepted(schema, dialect)
    assert schema == before
    assert bool(changes) == (sent != schema)
    again, more = accepted(sent, dialect)
    assert (again, more) == (sent, ())


def test_each_rule_says_where_it_is_documented_and_when_it_was_read() -> None:
    for dialect_rules in RULES.values():
        for rule in dialect_rules:
            assert rule.source
            assert rule.read_on >= "2026-11"
