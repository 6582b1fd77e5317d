"""Everything that is written for another vendor keeps the rules that its server documents, beside its types."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backplane.dialects import dialect, translate
from backplane.dialects.limits import Spelling
from tests.dialects import measures, rules
from tests.dialects.dialect_corpus import NAMES, PAIRS, documents

OTHERS = [(source, target) for source, target in PAIRS if source != target]


@pytest.mark.parametrize(("source", "target"), OTHERS)
def test_every_translated_request_keeps_the_targets_documented_rules(source: str, target: str) -> None:
    for title, document in documents(source, "request"):
        done = measures.across(document, source, target, "request")
        if done is not None:
            assert rules.broken(target, done.value) == [], title


LONG = "get.weather/for:a-city " * 6
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": LONG, "parameters": {"type": "object", "properties": {}}}}


def called(name: str, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [USER, *messages], **more}


def answered(call_id: str, *, name: str = "f") -> list[dict[str, Any]]:
    return [
        {"role": "assistant", "content": None, "tool_calls": [called(name, call_id)]},
        {"role": "tool", "tool_call_id": call_id, "content": "done"},
    ]


REFUSED: dict[str, dict[str, Any]] = {
    "a choice without tools": chat(tool_choice="required", parallel_tool_calls=False),
    "an empty text": chat({"role": "assistant", "content": ""}, {"role": "user", "content": "  "}),
    "an empty part beside another": chat(
        {"role": "user", "content": [{"type": "text", "text": ""}, {"type": "text", "text": "x"}]}
    ),
    "a small limit": chat(max_completion_tokens=3),
    "a high temperature": chat(temperature=1.9),
    "long ids with other letters": chat(*answered("call:" + "x|y" * 30), tools=[TOOL]),
    "a long name with other letters": chat(*answered("c1", name=LONG), tools=[TOOL]),
    "one id twice": chat(*answered("c1"), *answered("c1")),
    "a call without its result": chat({"role": "assistant", "content": None, "tool_calls": [called("f", "c9")]}, USER),
    "a sound of another format": chat(
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "QUJD", "format": "flac"}}]}
    ),
    "an image by its address": chat(
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://e.org/a.png"}}]}
    ),
    "many stop texts": chat(stop=list("abcdefg")),
}


@pytest.mark.parametrize("title", REFUSED)
@pytest.mark.parametrize("target", [name for name in NAMES if name != "openai"])
def test_a_request_that_the_targets_server_would_refuse_is_fitted_and_named(title: str, target: str) -> None:
    document = REFUSED[title]
    done = translate(document, "openai", target)
    assert rules.broken(target, done.value) == []
    back = translate(done.value, target, "openai").value
    if json.dumps(back, sort_keys=True) != json.dumps(document, sort_keys=True):
        assert done.losses


def test_more_stop_texts_than_the_server_takes_are_cut_and_named() -> None:
    document = {"model": "m", "max_tokens": 9, "messages": [USER], "stop_sequences": list("abcdef")}
    done = translate(document, "claude", "openai")
    assert rules.broken("openai", done.value) == []
    assert [loss.path for loss in done.losses if loss.code == "option_value"] == ["/stop_sequences"]


def thinking(**more: Any) -> dict[str, Any]:
    return {"contents": [{"role": "user", "parts": [{"text": "x"}]}], **more}


@pytest.mark.parametrize("config", [
    {"maxOutputTokens": 4000, "thinkingConfig": {"thinkingBudget": 8000}, "temperature": 0.5, "topK": 3, "topP": 0.5},
    {"maxOutputTokens": 500, "thinkingConfig": {"thinkingBudget": 8000}},
    {"maxOutputTokens": 5000, "thinkingConfig": {"thinkingBudget": 10}},
    {"thinkingConfig": {"thinkingBudget": -1}, "temperature": 0.2},
])  # fmt: skip
def test_what_is_refused_beside_thinking_is_left_out_and_named(config: dict[str, Any]) -> None:
    done = translate(thinking(generationConfig=config), "gemini", "claude")
    assert rules.broken("claude", done.value) == []
    named = " ".join(loss.path for loss in done.losses if loss.is_material)
    assert "thinkingConfig" in named or "temperature" in named


def test_a_forced_tool_wins_over_thinking() -> None:
    tools = [{"functionDeclarations": [{"name": "f"}]}]
    choice = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}}
    config = {"thinkingConfig": {"thinkingBudget": 2000}}
    done = translate(thinking(tools=tools, toolConfig=choice, generationConfig=config), "gemini", "claude")
    assert rules.broken("claude", done.value) == []
    assert done.value["tool_choice"] == {"type": "tool", "name": "f"}


@pytest.mark.parametrize("letters", ["[a-zA-Z0-9_-]", "[a-z0-9-]", "[a-z_]", "[a-z]"])
def test_names_are_spelled_injectively_and_the_same_each_turn(letters: str) -> None:
    spelling = Spelling(letters, 64)
    words = ["a.b", "a/b", "a_b", "a b", "x" * 65, "x" * 66, "", "ä", "\n", "\ud800"]
    made = [spelling.fit(word) for word in words]
    assert len(set(made)) == len(words)
    assert all(spelling.is_fit(word) for word in made)
    assert [spelling.fit(word) for word in words] == made
    assert spelling.fit("weather") == "weather"


def test_a_call_and_its_result_and_its_tool_keep_one_name() -> None:
    done = translate(REFUSED["a long name with other letters"], "openai", "claude").value
    names = set(rules.names_of(done))
    assert len(names) == 1
    calls, results = rules.ids_of(done)
    assert calls == results


def test_a_name_that_the_server_takes_is_not_touched() -> None:
    for name in NAMES:
        limits = dialect(name).limits
        assert limits.tool_name.fit("get_weather") == "get_weather"
        assert limits.call_id.fit("toolu_01AbC-9") == "toolu_01AbC-9"


# Two spellings of one thing -------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize("schema", [
    {"responseJsonSchema": SCHEMA}, {"response_json_schema": SCHEMA},
    {"responseSchema": {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}},
    {"response_schema": {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}},
])  # fmt: skip
@pytest.mark.parametrize("head", ["generationConfig", "generation_config"])
def test_a_schema_is_read_under_all_its_names(schema: dict[str, Any], head: str) -> None:
    document = thinking(**{head: {"responseMimeType": "application/json", **schema}})
    written = translate(document, "gemini", "openai").value["response_format"]
    assert written["json_schema"]["schema"] == SCHEMA
    assert dialect("gemini").from_ir(dialect("gemini").to_ir(document).value).value == document


def test_a_list_of_thoughts_is_read_in_an_answer_as_in_a_stream() -> None:
    content = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "x"}]
    answer = {"id": "1", "model": "m", "created": 1, "choices": [
        {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    ]}  # fmt: skip
    written = translate(answer, "openai", "claude", "response").value["content"]
    assert [(block["type"], block.get("thinking") or block.get("text")) for block in written] == [
        ("thinking", "hm"), ("text", "x"),
    ]  # fmt: skip


@pytest.mark.parametrize("target", ["claude", "gemini"])
def test_a_request_without_any_words_says_so_where_the_server_refuses_it(target: str) -> None:
    empty = {"role": "user", "content": ""}
    done = translate({"model": "m", "messages": [empty, empty]}, "openai", target)
    assert rules.broken(target, done.value) == []
    assert ("/messages/1", "synthesised") in {(loss.path, loss.kind) for loss in done.losses}
