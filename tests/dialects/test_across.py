"""What finds another place in another vendor's document: pictures of results, citations, calls that were cut."""

from __future__ import annotations

from typing import Any

import pytest

from backplane.dialects import translate
from tests.dialects.dialect_corpus import NAMES

CHATS = ("openai", "kimi", "copilot")
SHOT = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
CALLS = [{"type": "tool_use", "id": name, "name": "shot", "input": {}} for name in ("t1", "t2")]


def results(*content: list[Any], more: tuple[Any, ...] = ()) -> dict[str, Any]:
    blocks = [
        {"type": "tool_result", "tool_use_id": call["id"], "content": inner}
        for call, inner in zip(CALLS, content, strict=True)
    ]
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": CALLS},
        {"role": "user", "content": [*blocks, *more]},
    ]
    return {"model": "m", "max_tokens": 9, "messages": messages}


@pytest.mark.parametrize("target", CHATS)
def test_a_picture_of_a_result_moves_to_a_message_after_the_last_result(target: str) -> None:
    document = results([SHOT], [{"type": "text", "text": "seen"}, SHOT], more=({"type": "text", "text": "go on"},))
    done = translate(document, "claude", target)
    messages = done.value["messages"][2:]
    assert [message["role"] for message in messages] == ["tool", "tool", "user", "user"]
    assert [message["content"] for message in messages[:2]] == ["", "seen"]
    texts = [part.get("text") for part in messages[2]["content"]]
    assert texts == ["From the result of t1:", None, "From the result of t2:", None]
    assert {part["image_url"]["url"] for part in messages[2]["content"][1::2]} == {"data:image/png;base64,QUJD"}
    assert messages[3]["content"] == "go on"
    moved = {loss.path for loss in done.losses if loss.code == "media" and loss.kind == "degraded"}
    assert moved == {"/messages/2/content/0/content/0", "/messages/2/content/1/content/1"}


def test_results_that_are_messages_of_their_own_are_not_parted_by_a_picture() -> None:
    picture = {"type": "input_image", "image_url": "https://example.org/a.png"}
    items = [
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [picture]},
        {"type": "function_call_output", "call_id": "b", "output": "seen"},
    ]
    done = translate({"model": "m", "input": items}, "codex", "openai")
    assert [message["role"] for message in done.value["messages"]] == ["assistant", "tool", "tool", "user"]


def test_what_a_user_cannot_show_either_is_dropped_from_a_result_and_named() -> None:
    paper = {"type": "document", "source": {"type": "file", "file_id": "file_1"}}
    done = translate(results([paper], [{"type": "text", "text": "b"}]), "claude", "openai")
    assert [message["role"] for message in done.value["messages"]] == ["user", "assistant", "tool", "tool"]
    found = [(loss.kind, loss.code) for loss in done.losses if loss.path == "/messages/2/content/0/content/0"]
    assert found == [("dropped", "media")]


@pytest.mark.parametrize("target", [name for name in NAMES if name not in CHATS])
def test_a_picture_stays_in_its_result_where_the_target_takes_it(target: str) -> None:
    done = translate(results([SHOT], [SHOT]), "claude", target)
    assert not [loss for loss in done.losses if loss.code == "media"]
