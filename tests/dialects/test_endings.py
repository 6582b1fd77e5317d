"""Streams and answers that end otherwise than well: nothing is lost on the way, and nothing reads as a normal end."""

from __future__ import annotations

from typing import Any

import pytest

from backplane.dialects import StreamTranslation, dialect, ir, sum_stream, translate
from backplane.dialects.augment import ChunkStream
from tests.dialects.dialect_corpus import NAMES, streams

NORMAL = ("end", "tool_use", "stop_sequence")


def through(source: str, target: str, chunks: list[Any]) -> tuple[list[Any], StreamTranslation]:
    done = StreamTranslation(source, target)
    return [made for chunk in chunks for made in done.feed(chunk)] + done.finish(), done


def parts_of(chunks: list[Any], name: str) -> tuple[ir.Part, ...]:
    return sum_stream(chunks, name).value.candidates[0].message.parts


def calls(chunks: list[Any], name: str) -> list[Any]:
    return [(part.name, part.input) for part in parts_of(chunks, name) if isinstance(part, ir.ToolUse)]


def text(chunks: list[Any], name: str) -> str:
    return "".join(part.text for part in parts_of(chunks, name) if isinstance(part, ir.Text))


def chat(delta: Any, finish: Any = None) -> Any:
    return {"id": "c", "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def piece(arguments: str, **members: Any) -> Any:
    function = {"arguments": arguments, **{key: members.pop(key) for key in ("name",) if key in members}}
    return chat({"tool_calls": [{"index": 0, "function": function, **members}]})


HEAD = {"id": "m1", "type": "message", "role": "assistant", "model": "m", "usage": {"input_tokens": 1}}


# Content in unusual places --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", NAMES)
def test_a_call_in_the_first_event_of_a_stream_is_kept_with_its_reason(target: str) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
    start = {"type": "message_start", "message": {**HEAD, "content": [call], "stop_reason": "tool_use"}}
    made, _ = through("claude", target, [start, {"type": "message_stop"}])
    assert calls(made, target) == [("f", {"a": 1})]
    assert sum_stream(made, target).value.candidates[0].stop == "tool_use"


def test_errors_of_a_copilot_extension_are_notes_and_no_end() -> None:
    note = {"sse_event": "copilot_errors", "data": [{"type": "agent", "code": "x", "message": "one source is slow"}]}
    chunks = [chat({"content": "He"}), note, chat({"content": "llo"}), chat({}, "stop")]
    answer = sum_stream(chunks, "copilot").value
    assert (text(chunks, "copilot"), answer.error, answer.candidates[0].stop) == ("Hello", None, "end")
    made, done = through("copilot", "claude", chunks)
    assert text(made, "claude") == "Hello"
    assert not [chunk for chunk in made if chunk["type"] == "error"]
    assert "/copilot_errors" in {loss.path for loss in done.losses}


WHOLE: dict[str, list[Any]] = {
    "no reason at all": [chat({"content": "He"}), chat({"content": "llo"})],
    "no place": [{"id": "c", "choices": [{"delta": {"content": text}}]} for text in ("He", "llo")],
    "a reason and no place": [
        {"id": "c", "choices": [{"delta": {"content": "Hello"}}]}, {"choices": [{"delta": {}, "finish_reason": "stop"}]}
    ],
    "a reason beside a piece": [{"choices": [{"delta": {"content": "Hello"}, "finish_reason": "stop"}]}],
    "two choices": [{"id": "c", "choices": [{"index": place, "delta": {"content": "Hello"}} for place in (0, 1)]}],
}  # fmt: skip


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("source", ["openai", "kimi", "copilot"])
@pytest.mark.parametrize("name", WHOLE)
def test_a_stream_that_says_it_is_done_is_whole(name: str, source: str, target: str) -> None:
    done = StreamTranslation(source, target)
    made = [new for chunk in WHOLE[name] for new in done.feed(chunk)] + done.finish(done=True)
    assert "stream_cut" not in str(made)
    assert "cut" not in {loss.code for loss in done.losses}
    if source == target:
        assert made == WHOLE[name]
        assert done.losses == ()
        return
    answer = sum_stream(made, target).value
    assert (text(made, target), answer.candidates[0].stop) == ("Hello", "end")
    assert ("stop" in {loss.code for loss in done.losses}) == ("a reason" not in name)


@pytest.mark.parametrize("target", NAMES)
def test_a_whole_call_without_a_reason_is_run_and_a_cut_one_is_not(target: str) -> None:
    for arguments, stop in (('{"a": 1}', "tool_use"), ('{"a": ', None)):
        done = StreamTranslation("openai", target)
        chunks = [piece(arguments, name="f", id="c1")]
        made = [new for chunk in chunks for new in done.feed(chunk)] + done.finish(done=True)
        assert (sum_stream(chunks, "openai", done=True).value.candidates[0].stop == stop) or stop is None
        assert (stop is None) == ("cut" in {loss.code for loss in done.losses})
        if stop is not None and target != "openai":
            assert sum_stream(made, target).value.candidates[0].stop == stop


@pytest.mark.parametrize("target", NAMES)
def test_a_stream_that_does_not_say_it_is_done_is_cut(target: str) -> None:
    done = through("openai", target, WHOLE["no reason at all"])[1]
    assert "cut" in {loss.code for loss in done.losses}


def test_members_of_a_choice_without_a_place_are_kept() -> None:
    chunks = [{"choices": [{"delta": {"content": "Hello"}, "logprobs": {"content": []}}]},
              {"choices": [{"delta": {}, "finish_reason": "length"}]}]  # fmt: skip
    candidate = sum_stream(chunks, "openai").value.candidates[0]
    assert candidate.stop == "max_tokens"
    assert "logprobs" in candidate.ext["openai"]


def response(kind: str, **members: Any) -> Any:
    return {"type": f"response.{kind}", "output_index": 0, "content_index": 0, "item_id": "i", **members}


ITEM = {"type": "message", "id": "i", "role": "assistant", "content": []}


@pytest.mark.parametrize("end", [
    response("output_text.done", text="Hello!"),
    response("output_item.done", item={**ITEM, "content": [{"type": "output_text", "text": "Hello!"}]}),
    {"type": "response.completed", "response": {"id": "r", "status": "completed", "output": [
        {**ITEM, "content": [{"type": "output_text", "text": "Hello!"}]}]}},
])  # fmt: skip
@pytest.mark.parametrize("target", ["openai", "claude", "gemini"])
def test_text_that_only_the_end_of_a_block_says_is_kept(end: Any, target: str) -> None:
    chunks = [response("output_item.added", item=ITEM), response("output_text.delta", delta="Hel"), end]
    made, _ = through("codex", target, chunks)
    assert text(made, target) == "Hello!"


def test_an_end_that_contradicts_its_pieces_is_named() -> None:
    chunks = [response("output_text.delta", delta="Hel"), response("output_text.done", text="Bye")]
    made, done = through("codex", "openai", chunks)
    assert text(made, "openai") == "Hel"
    assert "fallback" in {loss.code for loss in done.losses}


@pytest.mark.parametrize("target", NAMES)
def test_a_calls_name_may_come_in_two_pieces(target: str) -> None:
    chunks = [
        piece("", name="get_", id="c1", type="function"), piece("", name="weather"), piece('{"a":'), piece("1}"),
        chat({}, "tool_calls"),
    ]  # fmt: skip
    made, _ = through("openai", target, chunks)
    assert calls(made, target) == [("get_weather", {"a": 1})]


def test_a_name_that_is_said_in_every_piece_is_one_name() -> None:
    chunks = [piece("{}" if place else "", name="f", id="c1") for place in range(3)]
    assert [name for name, _ in calls(chunks, "openai")] == ["f"]


# Endings --------------------------------------------------------------------------------------------------------------


def ended(name: str, word: str) -> Any:
    """Return an answer of a dialect that ends with this word."""
    if name == "claude":
        return {**HEAD, "content": [{"type": "text", "text": "x"}], "stop_reason": word, "stop_sequence": None}
    if name == "gemini":
        content = {"role": "model", "parts": [{"text": "x"}]}
        return {"candidates": [{"content": content, "finishReason": word, "index": 0}]}
    if name == "codex":
        said = {**ITEM, "content": [{"type": "output_text", "text": "x", "annotations": []}]}
        status, _, reason = word.partition(":")
        details = {"incomplete_details": {"reason": reason}} if reason else {}
        return {"id": "r", "object": "response", "created_at": 1, "model": "m", "status": status, "output": [said],
                **details}  # fmt: skip
    message = {"role": "assistant", "content": "x"}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m",
            "choices": [{"index": 0, "message": message, "finish_reason": word}]}  # fmt: skip


BAD_ENDINGS = [
    ("openai", "unheard_of"), ("openai", "content_filter"), ("kimi", "error"), ("copilot", "insufficient_resource"),
    ("claude", "unheard_of"), ("claude", "refusal"), ("claude", "pause_turn"),
    ("claude", "model_context_window_exceeded"),
    ("gemini", "MALFORMED_FUNCTION_CALL"), ("gemini", "SAFETY"), ("gemini", "OTHER"), ("gemini", "UNHEARD_OF"),
    ("gemini", "LANGUAGE"), ("gemini", "TOO_MANY_TOOL_CALLS"),
    ("codex", "queued"), ("codex", "in_progress"), ("codex", "failed"), ("codex", "cancelled"), ("codex", "incomplete"),
    ("codex", "incomplete:content_filter"), ("codex", "unheard_of"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "word"), BAD_ENDINGS)
@pytest.mark.parametrize("target", NAMES)
def test_an_ending_that_is_not_good_is_good_for_no_vendor(source: str, word: str, target: str) -> None:
    if source == target:
        return
    done = translate(ended(source, word), source, target, "response")
    assert dialect(target).response_to_ir(done.value).value.candidates[0].stop not in NORMAL
    assert done.value.get("status") != "completed"


@pytest.mark.parametrize("target", [name for name in NAMES if name != "gemini"])
def test_a_blocked_prompt_is_no_normal_end(target: str) -> None:
    answer = {"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": {"promptTokenCount": 1}}
    done = translate(answer, "gemini", target, "response").value
    assert dialect(target).response_to_ir(done).value.candidates[0].stop in ("content_filter", "refusal")
    made, _ = through("gemini", target, [answer])
    assert sum_stream(made, target).value.candidates[0].stop in ("content_filter", "refusal")


HALF = '{"path": "a.txt", "te'


@pytest.mark.parametrize("finish", ["stop", "tool_calls", None])
@pytest.mark.parametrize("target", NAMES)
def test_a_call_cut_in_its_arguments_never_becomes_one_that_can_be_run(target: str, finish: str | None) -> None:
    chunks = [piece(HALF, name="write", id="c1"), *([chat({}, finish)] if finish else [])]
    made, _ = through("openai", target, chunks)
    if target != "openai":
        answer = sum_stream(made, target).value
        assert answer.candidates[0].stop not in NORMAL or answer.error is not None
    message = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "write", "arguments": HALF}}
    ]}  # fmt: skip
    document = {"id": "c", "created": 1, "model": "m", "choices": [{"message": message, "finish_reason": finish}]}
    if target != "openai":
        done = translate(document, "openai", target, "response").value
        assert dialect(target).response_to_ir(done).value.candidates[0].stop not in NORMAL


def is_failure(target: str, chunk: Any) -> bool:
    return chunk.get("type") in ("error", "response.failed", "response.incomplete") or "error" in chunk


@pytest.mark.parametrize("source", NAMES)
@pytest.mark.parametrize("target", NAMES)
def test_a_stream_cut_before_its_end_ends_as_the_targets_failure(source: str, target: str) -> None:
    title = {"codex": "a text in three pieces"}.get(source, streams(source)[0][0])
    chunks = dict(streams(source))[title]
    cut = chunks[: max(1, len(chunks) // 2)]
    if sum_stream(cut, source).value.candidates[0].stop is not None:
        return
    made, done = through(source, target, cut)
    assert any(is_failure(target, chunk) for chunk in made)
    assert "cut" in {loss.code for loss in done.losses}
    assert sum_stream(made, target).value.candidates[0].stop not in NORMAL


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_for_its_own_vendor_comes_back_as_it_was(name: str) -> None:
    for title, chunks in streams(name):
        made, done = through(name, name, chunks)
        cut = "cut" in {loss.code for loss in done.losses}
        assert made[: len(chunks)] == chunks, title
        assert len(made) == len(chunks) + cut, title


@pytest.mark.parametrize("noise", [[], [{"type": "ping"}], [None, "x", 7]])
@pytest.mark.parametrize("target", NAMES)
def test_a_stream_that_says_nothing_is_an_error(target: str, noise: list[Any]) -> None:
    made, _ = through("claude", target, noise)
    assert any(is_failure(target, chunk) for chunk in made)


@pytest.mark.parametrize("target", NAMES)
def test_what_a_stream_loses_is_named_once_with_its_chunk(target: str) -> None:
    unknown = {"type": "from_the_future", "x": 1}
    start = {"type": "message_start", "message": {**HEAD, "content": []}}
    _, done = through("claude", target, [start, *[unknown] * 50, {"type": "message_stop"}])
    if target != "claude":
        found = [loss for loss in done.losses if "from_the_future" in loss.reason]
        assert [(loss.path, loss.chunk, loss.chunk_type) for loss in found] == [("/1", 1, "from_the_future")]


# The editor's wire ----------------------------------------------------------------------------------------------------


def lines(source: str, chunks: list[Any]) -> list[Any]:
    stream = ChunkStream(source)
    return [line for chunk in chunks for line in stream.feed(chunk)] + stream.finish()


UNSPECIFIED, END_TURN, TOOL_USE_REQUESTED = 0, 1, 3


@pytest.mark.parametrize("chunks", [
    [], [chat({"content": "half"})], [piece("{}", name="f", id="c1")],
    [piece(HALF, name="f", id="c1"), chat({}, "tool_calls")],
])  # fmt: skip
def test_an_editor_never_takes_a_cut_stream_for_a_whole_one(chunks: list[Any]) -> None:
    found = lines("openai", chunks)[-1]["stop_reason"]
    assert found != END_TURN
    if len(chunks) < 2:
        assert found == UNSPECIFIED


@pytest.mark.parametrize(("source", "word", "number"), [
    ("claude", "refusal", 1), ("claude", "pause_turn", 0), ("claude", "unheard_of", 1),
    ("codex", "failed", 0), ("codex", "cancelled", 0), ("codex", "incomplete", 0), ("codex", "queued", 0),
])  # fmt: skip
def test_an_editor_reads_each_ending_as_the_table_says(source: str, word: str, number: int) -> None:
    answer = ended(source, word)
    assert lines(source, [answer])[-1]["stop_reason"] == number


@pytest.mark.parametrize("target", NAMES)
def test_a_gateway_that_counts_every_block_as_the_first_loses_none(target: str) -> None:
    chunks: list[Any] = [{"type": "message_start", "message": {**HEAD, "content": []}}]
    for word in ("one ", "two"):
        head = {"type": "text", "text": ""}
        chunks.append({"type": "content_block_start", "index": 0, "content_block": head})
        chunks.append({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}})
        chunks.append({"type": "content_block_stop", "index": 0})
    chunks += [{"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, {"type": "message_stop"}]
    made, _ = through("claude", target, chunks)
    assert text(made, target) == "one two"


@pytest.mark.parametrize("target", NAMES)
def test_pieces_of_a_call_that_came_twice_are_read_once_by_every_vendor(target: str) -> None:
    chunks = [piece('{"a":', name="f", id="c1"), piece('{"a":'), piece("1}"), chat({}, "tool_calls")]
    made, _ = through("openai", target, chunks)
    assert calls(made, target) == [("f", {"a": 1})]
