"""Augment's requests into every dialect: each name a member may have, each node, each repair; nothing lost unnamed."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane.dialects import DIALECTS, augment
from backplane.dialects.diff import is_named
from backplane.dialects.ir import Conversation, Media, Text, ToolOutput, ToolUse
from backplane.errors import TranslationError

PNG = "iVBORw0KGgoAAAANSUhEUg=="
SCHEMA = {"type": "object", "properties": {"p": {"type": "string"}}}
TOOL = {"name": "read", "description": "Reads.", "input_schema_json": json.dumps(SCHEMA)}


def call(call_id: str, name: str = "read") -> dict[str, Any]:
    return {"id": 3, "type": 5, "tool_use": {"tool_use_id": call_id, "tool_name": name, "input_json": '{"p":"a"}'}}


def result(call_id: str, text: str = "done", **more: Any) -> dict[str, Any]:
    return {"id": 1, "type": 1, "tool_result_node": {"tool_use_id": call_id, "content": text, **more}}


def read(request: Any) -> Conversation:
    return augment.to_ir(request).value


def words(request: Any) -> list[str]:
    """Each message as its role and what it says, in a line."""
    return [
        f"{message.role}: "
        + " | ".join(
            part.text if isinstance(part, Text) else f"{type(part).__name__} {getattr(part, 'id', '')}".strip()
            for part in message.parts
        )
        for message in read(request).messages
    ]


def codes(request: Any) -> list[tuple[str, str, str]]:
    return [(loss.path, loss.kind, loss.code) for loss in augment.to_ir(request).losses]


# Names of members -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["message", "prompt", "instruction"])
def test_the_text_of_a_turn_has_three_names(name: str) -> None:
    assert words({name: "hi"}) == ["user: hi"]


def test_an_empty_message_or_a_placeholder_gives_way_to_the_prompt_and_then_to_the_instruction() -> None:
    assert words({"message": "  ", "prompt": "p", "instruction": "p"}) == ["user: p"]
    assert words({"message": "---", "prompt": "", "instruction": "i"}) == ["user: i"]
    assert words({"message": "-" * 17}) == ["user: " + "-" * 17]


def test_a_second_text_of_the_turn_is_named_as_lost() -> None:
    assert ("/instruction", "dropped", "extension") in codes({"message": "a", "instruction": "b"})


@pytest.mark.parametrize("nodes", ["nodes", "structured_request_nodes", "request_nodes", "requestNodes"])
@pytest.mark.parametrize("history", ["chat_history", "chatHistory"])
@pytest.mark.parametrize(
    ("asked", "answered", "answer_nodes"),
    [
        ("request_message", "response_text", "response_nodes"),
        ("requestMessage", "responseText", "responseNodes"),
        ("message", "response", "structured_output_nodes"),
        ("message", "text", "structuredOutputNodes"),
    ],
)
def test_history_is_the_same_under_all_its_names(
    nodes: str, history: str, asked: str, answered: str, answer_nodes: str
) -> None:
    request = {
        history: [{asked: "q", answered: "a", answer_nodes: [call("c1")]}],
        nodes: [result("c1"), {"type": 0, "textNode": {"content": "next"}}],
    }
    assert words(request) == ["user: q", "assistant: a | ToolUse c1", "tool: ToolOutput c1", "user: next"]


def test_the_same_nodes_under_two_names_are_said_once() -> None:
    node = {"type": 0, "text_node": {"content": "x"}}
    assert words({"nodes": [node], "request_nodes": [node]}) == ["user: x"]
    assert words({"message": "x", "nodes": [node]}) == ["user: x"]


def test_the_system_text_is_joined_in_its_order_with_blank_lines() -> None:
    request = {
        "message": "m", "path": "a.py", "lang": "python", "mode": "AGENT", "memories_info": "MEM",
        "rules": ["R1", {"path": "r.md", "content": "R2"}], "workspaceGuidelines": "WG", "user_guidelines": "UG",
        "persona_type": 3,
    }  # fmt: skip
    (system,) = augment.to_ir(request, "OPERATOR").value.messages[0].parts
    assert isinstance(system, Text)
    assert system.text.split("\n\n") == [
        "Persona: REVIEWER", "UG", "WG", "R1", "r.md\nR2", "MEM", "OPERATOR", augment.AGENT, "Language: python",
        "Path: a.py",
    ]  # fmt: skip


def test_rules_may_be_one_text_and_memories_have_two_names() -> None:
    assert words({"message": "m", "rules": "R", "agentMemories": "M"})[0] == "system: R\n\nM"
    assert words({"message": "m", "mode": "CHAT"}) == ["user: m"]
    assert ("/mode", "dropped", "extension") in [
        (loss.path, loss.kind, loss.code)
        for loss in augment.translate_request({"message": "m", "mode": "CHAT"}, "openai").losses
    ]


@pytest.mark.parametrize("name", ["selected_code", "selectedText", "selected_code_snippet"])
def test_code_around_the_selection_comes_with_the_message(name: str) -> None:
    (said,) = words({"message": "explain", "prefix": "PRE", name: "SEL", "suffix": "SUF", "diff": "DIF"})
    order = [said.index(word) for word in ("explain", "PRE", "SEL", "SUF", "DIF")]
    assert order == sorted(order)


# Tools ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", [TOOL, {"name": "read", "inputSchema": SCHEMA}], ids=["text", "object"])
def test_the_schema_of_a_tool_is_text_or_an_object(tool: dict[str, Any]) -> None:
    assert [tool.schema for tool in read({"message": "m", "tool_definitions": [tool]}).tools] == [SCHEMA]


def test_a_tool_whose_schema_cannot_be_read_takes_any_object_and_is_named() -> None:
    request = {"message": "m", "tool_definitions": [{"name": "t", "input_schema_json": "{"}, {"name": "u"}]}
    assert [tool.schema for tool in read(request).tools] == [{"type": "object", "properties": {}}] * 2
    assert ("/tool_definitions/0/input_schema_json", "dropped", "tool_field") in codes(request)


@pytest.mark.parametrize(
    ("flags", "tools", "expected"),
    [
        ({}, [TOOL], False),
        ({"support_parallel_tool_use": False}, [TOOL], False),
        ({"support_parallel_tool_use": True}, [TOOL], None),
        ({"supportParallelToolUse": True}, [TOOL], None),
        ({}, [], None),
    ],
)
def test_calls_come_one_at_a_time_unless_the_flag_is_true_or_there_are_no_tools(
    flags: dict[str, Any], tools: list[Any], expected: bool | None
) -> None:
    request = {"message": "m", "tool_definitions": tools, "feature_detection_flags": flags}
    for target in ("openai", "codex"):
        assert augment.translate_request(request, target).value.get("parallel_tool_calls") is expected
    claude = augment.translate_request(request, "claude").value.get("tool_choice", {})
    assert claude.get("disable_parallel_tool_use") is (None if expected is None else True)


def test_a_result_without_its_call_becomes_words_of_the_user() -> None:
    request = {"message": "m", "nodes": [result("gone", "text of it")]}
    assert words(request) == ["user: [result of the earlier tool call gone] | text of it", "user: m"]
    assert codes(request) == [("/nodes/0", "degraded", "call_missing")]


def test_a_call_without_its_result_is_answered_as_not_finished() -> None:
    request = {"message": "m", "chat_history": [{"request_message": "q", "response_nodes": [call("c1")]}]}
    conversation = read(request)
    assert words(request)[2:] == ["tool: ToolOutput c1", "user: m"]
    made = conversation.messages[2].parts[0]
    assert isinstance(made, ToolOutput)
    assert made.is_error
    assert codes(request) == [("/chat_history/0/response_nodes/0", "synthesised", "result_missing")]


def test_a_late_result_moves_behind_its_call_and_a_second_one_is_dropped() -> None:
    request = {
        "chat_history": [
            {"request_message": "q", "response_nodes": [call("c1")]},
            {"request_message": "r", "response_text": "s"},
        ],
        "nodes": [result("c1"), result("c1", "again")],
    }
    assert words(request)[:3] == ["user: q", "assistant: ToolUse c1", "tool: ToolOutput c1"]
    assert {code for _, _, code in codes(request)} == {"order", "call_missing"}


TURNS = st.lists(
    st.tuples(st.lists(st.integers(0, 4), max_size=3), st.lists(st.integers(0, 4), max_size=3)), max_size=5
)


@given(TURNS)
def test_whatever_the_history_every_call_is_followed_by_its_result(turns: list[tuple[list[int], list[int]]]) -> None:
    request = {
        "message": "m",
        "chat_history": [
            {
                "request_message": "q",
                "request_nodes": [result(f"c{number}", f"r{place}") for place, number in enumerate(results)],
                "response_nodes": [call(f"c{number}") for number in calls],
            }
            for results, calls in turns
        ],
    }
    messages = read(request).messages
    seen: set[str] = set()
    for place, message in enumerate(messages):
        calls = [part.id for part in message.parts if isinstance(part, ToolUse)]
        results = [part.id for part in message.parts if isinstance(part, ToolOutput)]
        if calls:
            assert not seen.intersection(calls)
            assert [part.id for part in messages[place + 1].parts if isinstance(part, ToolOutput)] == calls
        if results:
            assert [part.id for part in messages[place - 1].parts if isinstance(part, ToolUse)] == results
        seen.update(calls)
    for target in DIALECTS:
        augment.translate_request(request, target)


# Nodes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "data", "media_type"),
    [
        (1, "AAAA", "image/png"), (2, "AAAA", "image/jpeg"), (3, "AAAA", "image/gif"), (4, "AAAA", "image/webp"),
        (0, "/9j/4AAQ", "image/jpeg"), (None, "R0lGODlh", "image/gif"), (None, "????", "image/png"),
    ],
)  # fmt: skip
def test_images_have_the_type_of_their_format_or_of_their_first_bytes(
    form: int | None, data: str, media_type: str
) -> None:
    node = {"type": 2, "image_node": {"image_data": data, "format": form}}
    (image,) = read({"nodes": [node]}).messages[0].parts
    assert isinstance(image, Media)
    assert (image.kind, image.media_type, image.data) == ("image", media_type, data)


def test_results_may_hold_texts_and_images() -> None:
    content = [{"type": 1, "text_content": "t"}, {"type": 2, "image_content": {"image_data": PNG, "format": 1}}]
    request = {
        "chat_history": [{"request_message": "q", "response_nodes": [call("c1")]}],
        "nodes": [result("c1", "t", content_nodes=content)],
    }
    (block,) = augment.translate_request(request, "claude").value["messages"][2]["content"]
    assert [inner["type"] for inner in block["content"]] == ["text", "image"]


@pytest.mark.parametrize(
    ("kind", "name", "body"),
    [
        (3, "image_id_node", {"image_id": "img-1"}),
        (4, "ide_state_node", {"workspace_folders": [{"folder_root": "/w"}]}),
        (5, "editEventsNode", {"edit_events": [{"path": "a.py"}]}),
        (6, "checkpoint_ref_node", {"request_id": "r9"}),
        (7, "change_personality_node", {"personality_type": 2, "custom_instructions": "be brief"}),
        (9, "file_id_node", {"file_id": "f-1", "file_name": "n"}),
    ],
)
def test_nodes_that_no_upstream_has_are_carried_as_text_and_named(kind: int, name: str, body: dict[str, Any]) -> None:
    request = {"nodes": [{"id": 1, "type": kind, name: body}]}
    (part,) = read(request).messages[0].parts
    assert isinstance(part, Text)
    assert json.dumps(body, separators=(",", ":")) in part.text
    assert codes(request) == [("/nodes/0", "degraded", "part")]


def test_a_file_is_text_or_a_document() -> None:
    text = base64.b64encode(b"x = 1").decode()
    request = {
        "nodes": [
            {"type": 8, "file_node": {"file_data": text, "format": "text/x-python"}},
            {"type": 8, "file_node": {"file_data": PNG, "format": "application/pdf"}},
        ]
    }
    code, document = read(request).messages[0].parts
    assert isinstance(code, Text)
    assert code.text == "x = 1"
    assert isinstance(document, Media)
    assert (document.kind, document.media_type) == ("document", "application/pdf")


def test_an_unknown_node_is_named_as_lost() -> None:
    losses = augment.translate_request({"message": "m", "nodes": [{"type": 99, "new_node": {"a": 1}}]}, "openai").losses
    assert [(loss.path, loss.kind, loss.code) for loss in losses if loss.path.startswith("/nodes")] == [
        ("/nodes/0", "dropped", "part")
    ]


def test_a_summary_stands_for_what_was_before_it_and_its_end_stays_word_for_word() -> None:
    summary = {
        "summary_text": "SUM",
        "history_middle_abridged_text": "MID",
        "message_template": "<{summary}> {end_part_full}",
        "history_end": [{"request_message": "q2", "response_nodes": [call("c2")]}],
    }
    request = {
        "chat_history": [
            {"request_message": "old", "response_text": "older"},
            {"request_message": "q", "request_nodes": [{"type": 10, "history_summary_node": summary}, result("c2")]},
        ],
        "message": "go on",
    }
    assert words(request) == [
        "user: <SUM> (the messages that follow)\n\nMID", "user: q2", "assistant: ToolUse c2", "tool: ToolOutput c2",
        "user: q", "user: go on",
    ]  # fmt: skip
    assert ("/chat_history/0", "dropped", "part") in codes(request)


def test_an_answer_in_the_history_is_its_text_its_thinking_and_its_whole_calls() -> None:
    nodes = [
        {"type": 8, "thinking": {"summary": "hm"}},
        {"type": 0, "content": "He"},
        {"type": 0, "content": "llo"},
        {"type": 7, "tool_use": {"tool_use_id": "c1", "tool_name": "read", "input_json": ""}},
        call("c1"),
        {"type": 7, "tool_use": {"tool_use_id": "c9", "tool_name": "read"}},
        {"type": 10, "token_usage": {"input_tokens": 5}},
    ]
    request = {"chat_history": [{"request_message": "q", "response_nodes": nodes}], "nodes": [result("c1")]}
    message = read(request).messages[1]
    assert [type(part).__name__ for part in message.parts] == ["Thinking", "Text", "ToolUse"]
    assert isinstance(message.parts[1], Text)
    assert message.parts[1].text == "Hello"
    assert [path for path, _, _ in codes(request)] == [
        "/chat_history/0/response_nodes/6", "/chat_history/0/response_nodes/5",
    ]  # fmt: skip


# Nothing lost unnamed -------------------------------------------------------------------------------------------------

EVERYTHING: dict[str, Any] = {
    "model": "m1", "conversation_id": "conv-7", "message": "MSG", "prompt": "PROMPT", "silent": True, "mode": "AGENT",
    "persona_type": 1, "user_guidelines": "UG", "rules": ["RULE"], "agent_memories": "MEM", "memories_info": "MEM2",
    "path": "src/p.py", "lang": "rust", "prefix": "PRE", "selected_text": "SEL", "suffix": "SUF", "diff": "DIFF",
    "blobs": {"checkpoint_id": "ck", "added_blobs": ["blob1"]}, "unheard_of": {"x": "y"},
    "tool_definitions": [{**TOOL, "tool_safety": 1, "original_mcp_server_name": "orig"}],
    "nodes": [
        {"id": 1, "type": 4, "ide_state_node": {"cwd": "/work"}, "extra": "EX"},
        {"id": 2, "type": 0, "text_node": {"content": "NODE", "more": "MORE"}},
        {"id": 3, "type": 42, "odd_node": {"deep": "DEEP"}},
        {"id": 4, "type": 2, "image_node": {"image_data": PNG, "format": 1}},
        result("c1", "RES", request_id="rq"),
        {"id": 5, "type": 8, "file_node": {"file_data": "AAAA", "format": "zip"}},
    ],
    "chat_history": [
        {
            "request_id": "r1", "request_message": "Q", "response_text": "A", "odd": "ODD",
            "response_nodes": [call("c1"), {"id": 9, "type": 6, "content": "REMEMBER"}],
        }
    ],
}  # fmt: skip


def pointers(value: Any, at: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [found for key, inner in value.items() for found in pointers(inner, f"{at}/{key}")]
    if isinstance(value, list):
        return [found for place, inner in enumerate(value) for found in pointers(inner, f"{at}/{place}")]
    return [(at, value)]


@pytest.mark.parametrize("target", DIALECTS)
def test_every_text_of_a_request_is_in_the_output_or_named(target: str) -> None:
    done = augment.translate_request(EVERYTHING, target)
    written = json.dumps(done.value)
    named = {loss.path for loss in done.losses}
    schema = "/tool_definitions/0/input_schema_json"
    missing = [
        (at, value)
        for at, value in pointers(EVERYTHING)
        if isinstance(value, str)
        and at not in (schema, "/mode")  # said in another form: an object, and a sentence
        and not is_named(at, named)
        and json.dumps(value)[1:-1] not in written
        and value not in [leaf for _, leaf in pointers(done.value)]
    ]
    assert [found for found in missing if found[0] != "/chat_history/0/response_nodes/0/tool_use/input_json"] == []


@pytest.mark.parametrize(
    ("request_", "fact"),
    [
        ({}, "no message"),
        ([], "not an object"),
        ({"message": "---"}, "no message"),
        ({"message": "m", "chat_history": ["x"]}, "/chat_history/0"),
    ],
)
def test_what_is_no_request_says_so(request_: Any, fact: str) -> None:
    with pytest.raises(TranslationError, match=fact) as caught:
        augment.to_ir(request_)
    assert caught.value.code == "dialect_mapping_failed"


def test_the_policy_fail_names_the_first_loss() -> None:
    with pytest.raises(TranslationError, match="/blobs") as caught:
        augment.translate_request({"message": "m", "model": "m", "blobs": {"a": "b"}}, "openai", "fail")
    assert caught.value.code == "mapping_lossy_conversion"
