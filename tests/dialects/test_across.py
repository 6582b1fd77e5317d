"""What finds another place in another vendor's document: pictures of results, citations, calls that were cut."""

from __future__ import annotations

from typing import Any

import pytest

from backplane.dialects import StreamTranslation, dialect, ir, sum_stream, translate
from tests.dialects.dialect_corpus import NAMES

CHATS = ("openai", "kimi", "copilot")
SHOT = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
CALLS: list[dict[str, Any]] = [{"type": "tool_use", "id": name, "name": "shot", "input": {}} for name in ("t1", "t2")]


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


FOUND = {
    "type": "web_search_result_location", "url": "https://example.org/w", "title": "Water", "cited_text": "it is wet",
    "encrypted_index": "abc",
}  # fmt: skip
PAPER = {
    "type": "char_location", "document_index": 0, "document_title": "D", "cited_text": "x", "start_char_index": 0,
    "end_char_index": 4,
}  # fmt: skip
CITED = [
    {"type": "text", "text": "As said: "},
    {"type": "text", "text": "water is wet", "citations": [FOUND, PAPER]},
]


def message(content: list[Any], stop: str = "end_turn") -> dict[str, Any]:
    return {
        "id": "m1", "type": "message", "role": "assistant", "model": "m", "stop_reason": stop, "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 2}, "content": content,
    }  # fmt: skip


def chunks(content: list[Any], stop: str = "end_turn") -> list[Any]:
    """The same answer as a stream: citations before and after the words, as the service may send them."""
    out: list[Any] = [{"type": "message_start", "message": {**message([]), "stop_reason": None}}]
    for index, block in enumerate(content):
        head = {"type": "text", "text": ""}
        out.append({"type": "content_block_start", "index": index, "content_block": head})
        deltas = [{"type": "citations_delta", "citation": citation} for citation in block.get("citations", ())]
        deltas.insert(1, {"type": "text_delta", "text": block["text"]})
        out += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        out.append({"type": "content_block_stop", "index": index})
    delta = {"stop_reason": stop, "stop_sequence": None}
    out.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": 2}})
    return [*out, {"type": "message_stop"}]


@pytest.mark.parametrize("target", CHATS)
def test_a_citation_of_an_address_spans_its_block_in_the_joined_text(target: str) -> None:
    done = translate(message(CITED), "claude", target, "response")
    said = done.value["choices"][0]["message"]
    (annotation,) = said["annotations"]
    assert annotation["type"] == "url_citation"
    cited = annotation["url_citation"]
    assert (cited["url"], cited["title"]) == ("https://example.org/w", "Water")
    assert said["content"][cited["start_index"] : cited["end_index"]] == "water is wet"
    kinds = [(loss.path, loss.kind) for loss in done.losses if loss.code == "citation"]
    assert kinds == [
        ("/content/1/citations/0", "degraded"),
        ("/content/1/citations/0", "dropped"),  # the words cited
        ("/content/1/citations/1", "dropped"),
    ]


def test_a_citation_of_an_address_spans_its_own_text_among_items() -> None:
    (item,) = translate(message(CITED), "claude", "codex", "response").value["output"]
    (cited,) = item["content"][1]["annotations"]
    address = {"type": "url_citation", "url": "https://example.org/w", "title": "Water"}
    assert cited == {**address, "start_index": 0, "end_index": len("water is wet")}


def test_spans_of_two_items_hold_in_the_text_that_they_become() -> None:
    spans = [{"type": "url_citation", "url": "https://example.org/1", "title": "1", "start_index": 1, "end_index": 3}]
    texts = [{"type": "output_text", "text": text, "annotations": spans} for text in ("abcd", "efgh")]
    item = {"type": "message", "id": "i", "role": "assistant", "status": "completed", "content": texts}
    answer = {"id": "r", "object": "response", "created_at": 1, "model": "m", "status": "completed", "output": [item]}
    said = translate(answer, "codex", "openai", "response").value["choices"][0]["message"]
    places = [(one["url_citation"]["start_index"], one["url_citation"]["end_index"]) for one in said["annotations"]]
    assert [said["content"][start:end] for start, end in places] == ["bc", "fg"]


@pytest.mark.parametrize("target", ["codex", "claude"])
def test_citations_of_a_stream_stand_on_their_text(target: str) -> None:
    stream = StreamTranslation("claude", target)
    made = [out for chunk in chunks(CITED) for out in stream.feed(chunk)] + stream.finish()
    (candidate,) = sum_stream(made, target).value.candidates
    cited = [[one.url for one in part.citations] for part in candidate.message.parts if isinstance(part, ir.Text)]
    assert cited == ([[], ["https://example.org/w"]] if target == "codex" else [[], ["https://example.org/w", None]])


def test_citations_of_items_are_said_before_their_text_is_done() -> None:
    stream = StreamTranslation("claude", "codex")
    made = [out for chunk in chunks(CITED) for out in stream.feed(chunk)] + stream.finish()
    kinds = [chunk["type"] for chunk in made]
    (place,) = [place for place, kind in enumerate(kinds) if kind == "response.output_text.annotation.added"]
    assert kinds[place + 1] == "response.output_text.done"
    assert made[place]["annotation"] == made[-1]["response"]["output"][1]["content"][0]["annotations"][0]
    assert [chunk["sequence_number"] for chunk in made] == list(range(len(made)))
    assert [loss.path for loss in stream.losses if loss.code == "citation" and loss.kind == "dropped"]


HALF = '{"path": "a.txt", "text": "half of i'


def cut_call() -> list[Any]:
    """A stream that a limit cut in the arguments of a call."""
    call = {"type": "tool_use", "id": "t1", "name": "write", "input": {}}
    first, *_, last = chunks([], "max_tokens")
    piece = {"type": "input_json_delta", "partial_json": HALF}
    return [
        first,
        {"type": "content_block_start", "index": 0, "content_block": call},
        {"type": "content_block_delta", "index": 0, "delta": piece},
        {"type": "content_block_stop", "index": 0},
        chunks([], "max_tokens")[-2],
        last,
    ]


@pytest.mark.parametrize("target", NAMES)
def test_a_call_that_a_limit_cut_keeps_its_half_and_the_reason(target: str) -> None:
    stream = StreamTranslation("claude", target)
    made = [out for chunk in cut_call() for out in stream.feed(chunk)] + stream.finish()
    (candidate,) = sum_stream(made, target).value.candidates
    calls = [part for part in candidate.message.parts if isinstance(part, ir.ToolUse)]
    assert candidate.stop == "max_tokens"
    if target == "gemini":  # takes only objects: as one the half would be a call that can be run
        assert calls == []
        assert [loss.path for loss in stream.losses if loss.code == "arguments"] == ["/content/0"]
    else:
        assert [(call.is_cut, call.input) for call in calls] == [(True, HALF)]


@pytest.mark.parametrize("finish", ["length", "tool_calls", None])
@pytest.mark.parametrize("target", ["claude", "gemini"])
def test_no_answer_makes_a_whole_call_of_a_cut_one(target: str, finish: str | None) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "rm", "arguments": HALF}}
    message = {"role": "assistant", "content": "I delete.", "tool_calls": [call]}
    answer = {"id": "a", "model": "m", "choices": [{"index": 0, "message": message, "finish_reason": finish}]}
    done = translate(answer, "openai", target, "response")
    (candidate,) = dialect(target).response_to_ir(done.value).value.candidates
    assert [type(part) for part in candidate.message.parts] == [ir.Text]
    assert candidate.stop == "max_tokens"
    assert "/choices/0/message/tool_calls/0" in {loss.path for loss in done.losses if loss.is_material}


def test_a_picture_of_the_models_is_no_content_of_a_chat_assistant() -> None:
    shown = {"inlineData": {"mimeType": "image/png", "data": "QUJD"}}
    contents = [{"role": "user", "parts": [{"text": "draw"}]}, {"role": "model", "parts": [{"text": "so"}, shown]},
                {"role": "user", "parts": [{"text": "bluer"}]}]  # fmt: skip
    done = translate({"contents": contents}, "gemini", "openai")
    assert done.value["messages"][1] == {"role": "assistant", "content": "so"}
    assert ("/contents/1/parts/1", "media") in {(loss.path, loss.code) for loss in done.losses}


def test_a_call_that_a_limit_cut_is_no_complete_item() -> None:
    stream = StreamTranslation("claude", "codex")
    made = [out for chunk in cut_call() for out in stream.feed(chunk)] + stream.finish()
    done = [chunk["item"]["status"] for chunk in made if chunk["type"] == "response.output_item.done"]
    assert done == ["incomplete"]
    assert made[-1]["response"]["output"][0]["status"] == "incomplete"
    answer = translate(made[-1]["response"], "codex", "openai", "response").value
    back = translate(answer, "openai", "codex", "response").value
    assert back["output"][0]["status"] == "incomplete"
    assert back["output"][0]["arguments"] == HALF


def test_what_is_named_piece_by_piece_is_not_called_unaccounted() -> None:
    done = translate(message(CITED), "claude", "codex", "response")
    assert [loss.path for loss in done.losses if loss.code == "unaccounted"] == []
