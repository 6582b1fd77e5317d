"""An edited document is the read one with the edit: what the edit does not change keeps its spelling."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest

from backplane.dialects import dialect, ir
from backplane.dialects.diff import patched
from tests.dialects.dialect_corpus import NAMES, documents
from tests.dialects.measures import essence

GEMINI: dict[str, Any] = {
    "system_instruction": {"parts": [{"text": "Be brief."}]},
    "contents": [{"parts": [{"text": "Hi"}]}, {"role": "model", "parts": [{"text": "Hello"}]}],
    "tools": [{"function_declarations": [{"name": "look", "parameters": {
        "type": "OBJECT", "property_ordering": ["a_b"], "properties": {"a_b": {"type": "STRING", "nullable": True}},
    }}]}],
    "generation_config": {"max_output_tokens": 9, "response_mime_type": "application/json",
                          "response_schema": {"type": "ARRAY", "items": {"type": "STRING"}}},
}  # fmt: skip
CHAT: dict[str, Any] = {
    "model": "m", "max_tokens": 9, "stop": "END",
    "messages": [
        {"role": "function", "name": "old", "content": "1"},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, {"role": "user", "content": "Why?"},
    ],
}  # fmt: skip


def said(text: str) -> ir.Message:
    return ir.Message(role="user", parts=(ir.Text(text=text),))


def written(name: str, document: Any, **changes: Any) -> Any:
    """Read a document, change the conversation, and write it to its own dialect."""
    before = copy.deepcopy(document)
    read = dialect(name).to_ir(document).value
    done = dialect(name).from_ir(msgspec.structs.replace(read, **changes))
    assert document == before
    return done


def test_a_request_of_gemini_keeps_its_own_schemas_and_names() -> None:
    read = dialect("gemini").to_ir(GEMINI).value
    done = written("gemini", GEMINI, messages=(*read.messages, said("Go on")))
    assert done.losses == ()
    assert done.value == {
        **GEMINI, "contents": [*GEMINI["contents"], {"role": "user", "parts": [{"text": "Go on"}]}],
    }  # fmt: skip


@pytest.mark.parametrize("place", range(1, len(CHAT["messages"])))
def test_a_message_that_is_left_out_moves_no_other_one(place: int) -> None:
    messages = dialect("openai").to_ir(CHAT).value.messages
    done = written("openai", CHAT, messages=(*messages[:place], *messages[place + 1 :]))
    rest = [*CHAT["messages"][:place], *CHAT["messages"][place + 1 :]]
    assert (done.value, done.losses) == ({**CHAT, "messages": rest}, ())


def test_an_option_is_changed_in_the_member_that_had_it() -> None:
    options = dialect("openai").to_ir(CHAT).value.options
    assert written("openai", CHAT, options={**options, "max_tokens": 5}).value == {**CHAT, "max_tokens": 5}
    assert written("openai", CHAT, options={}).value == {"model": "m", "messages": CHAT["messages"]}


@pytest.mark.parametrize("name", ["openai", "codex", "gemini"])
def test_what_an_edit_brings_and_the_vendor_has_not_is_named(name: str) -> None:
    document = dict(documents(name, "request"))["a call and its result"]
    read = dialect(name).to_ir(document).value
    words = ir.Message(role="user", parts=(ir.Media(kind="document", text="plain words"), ir.Text(text="Read it")))
    done = written(name, document, messages=(*read.messages, words))
    assert [(loss.kind, loss.code) for loss in done.losses] == [("dropped", "media")]


def test_a_document_that_would_say_both_is_written_in_our_form_and_the_change_is_named() -> None:
    messages = list(dialect("openai").to_ir(CHAT).value.messages)
    messages[2] = msgspec.structs.replace(messages[2], parts=(ir.Refusal(text="Never."),))
    done = written("openai", CHAT, messages=tuple(messages))
    assert done.value["messages"][2] == {"role": "assistant", "refusal": "Never.", "content": None}
    assert "/messages/2/refusal" in {loss.path for loss in done.losses}


@pytest.mark.parametrize("name", NAMES)
def test_a_message_more_changes_nothing_before_it(name: str) -> None:
    for title, document in documents(name, "request"):
        read = dialect(name).to_ir(document).value
        done = written(name, document, messages=(*read.messages, said("one more")))
        again = dialect(name).to_ir(done.value).value
        assert essence(msgspec.structs.replace(again, messages=again.messages[: len(read.messages)])) == essence(read)
        assert again.messages[-1].parts[-1].text == "one more", title


def test_a_value_in_another_form_is_a_doubt_only_where_it_is_edited() -> None:
    doubts: list[Any] = []
    raw, before = {"a": "1", "b": ["x", "y"]}, {"a": 1, "b": ["x", "y"]}
    assert patched(raw, before, {"a": 1, "b": ["y"], "c": 2}, doubts) == {"a": "1", "b": ["y"], "c": 2}
    assert doubts == []
    assert patched(raw, before, {"a": 2, "b": ["x", "y"]}, doubts)["a"] == 2
    assert doubts == ["1"]
