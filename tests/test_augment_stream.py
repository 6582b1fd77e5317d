"""Any dialect's stream as Augment's chunks, from Python and from the command line."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from typing import Any

import pytest

from backplane.dialects import DIALECTS, augment, framing, sum_stream
from backplane.dialects.ir import Text, ToolUse
from tests.dialects import dialect_corpus

S_MAX = 30
START = {"feature_detection_flags": {"support_tool_use_start": True}}
NDJSON_MEMBERS = {"text", "unknown_blob_names", "checkpoint_not_found", "workspace_file_chunks", "nodes", "stop_reason"}
STREAMS = [(name, title, chunks) for name in DIALECTS for title, chunks in dialect_corpus.streams(name)]
IDS = [f"{name}-{title}" for name, title, _ in STREAMS]


def render(source: str, chunks: list[Any], request: Any = None) -> list[dict[str, Any]]:
    stream = augment.ChunkStream(source, augment.reply_of(request or {}))
    out: list[Any] = [line for chunk in chunks for line in stream.feed(chunk)]
    return [*out, *stream.finish()]


def nodes(lines: list[dict[str, Any]], kind: int) -> list[dict[str, Any]]:
    return [node for line in lines for node in line.get("nodes", ()) if node["type"] == kind]


def chat(*deltas: dict[str, Any], stop: str | None = "stop", usage: Any = None) -> list[Any]:
    chunks: list[Any] = [{"id": "x", "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    if stop is not None:
        chunks.append({"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": stop}]})
    return [*chunks, {"id": "x", "choices": [], "usage": usage}] if usage is not None else chunks


def called(name: str = "f", text: str = "{}", call_id: str = "c1") -> dict[str, Any]:
    return {"tool_calls": [{"index": 0, "id": call_id, "function": {"name": name, "arguments": text}}]}


def claude(stop: str, *blocks: dict[str, Any]) -> list[Any]:
    message = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [], "usage": {}}
    out: list[Any] = [{"type": "message_start", "message": message}]
    for index, block in enumerate(blocks):
        out.append({"type": "content_block_start", "index": index, "content_block": block})
        out.append({"type": "content_block_stop", "index": index})
    delta = {"stop_reason": stop, "stop_sequence": None}
    return [*out, {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 2}}, {"type": "message_stop"}]


# The document's words on output ---------------------------------------------------------------------------------------


SAID_TWICE = ("a text that repeats its own beginning", "the same call in two chunks")
"""Gemini's streams that a gateway could have made of one text, one call: they are shown once."""


@pytest.mark.parametrize(("source", "title", "chunks"), STREAMS, ids=IDS)
def test_every_known_stream_becomes_lines_that_say_the_same(source: str, title: str, chunks: list[Any]) -> None:
    lines = render(source, chunks)
    assert all(set(line) <= NDJSON_MEMBERS for line in lines)
    ids = [node["id"] for line in lines for node in line.get("nodes", ())]
    assert ids == list(range(1, len(ids) + 1))
    assert [line for line in lines if "stop_reason" in line] == lines[-1:]
    if title in SAID_TWICE:
        assert max(len(nodes(lines, 5)), sum("!" in line["text"] for line in lines)) == 1
        return
    answer = sum_stream(chunks, source).value
    parts = answer.candidates[0].message.parts
    text = "".join(part.text for part in parts if isinstance(part, Text))
    if answer.error is None:
        assert text in "".join(line["text"] for line in lines)
    known = {(part.id, part.name) for part in parts if isinstance(part, ToolUse)}
    found = {(node["tool_use"]["tool_use_id"], node["tool_use"]["tool_name"]) for node in nodes(lines, 5)}
    assert found == known


def test_a_piece_of_text_is_text_and_a_raw_response_node() -> None:
    lines = render("openai", chat({"content": "He"}, {"content": "llo"}))
    assert [(line["text"], [(node["type"], node["content"]) for node in line["nodes"]]) for line in lines[:2]] == [
        ("He", [(0, "He")]), ("llo", [(0, "llo")]),
    ]  # fmt: skip


def test_a_call_always_comes_as_a_tool_use_node() -> None:
    lines = render(
        "openai", chat(called("f", '{"a"'), {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]})
    )
    (node,) = nodes(lines, 5)
    assert node["tool_use"] == {"tool_use_id": "c1", "tool_name": "f", "input_json": '{"a":1}'}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"support_tool_use_start": True}, 1), ({"supportToolUseStart": True}, 1),
        ({"support_tool_use_start": False}, 0), ({"support_tool_use_start": "true"}, 0), ({}, 0),
    ],
)  # fmt: skip
def test_only_the_feature_flag_has_a_call_announced(flags: dict[str, Any], expected: int) -> None:
    lines = render("openai", chat(called()), {"feature_detection_flags": flags})
    kinds = [node["type"] for line in lines for node in line.get("nodes", ()) if node["type"] in (5, 7)]
    assert kinds == [7] * expected + [5]
    assert all(node["tool_use"]["tool_use_id"] == "c1" for node in nodes(lines, 7))


@pytest.mark.parametrize("source", ["openai", "claude", "gemini", "codex"])
def test_the_announcement_of_a_call_says_its_arguments(source: str) -> None:
    streams = [chunks for name, _, chunks in STREAMS if name == source]
    announced = [node for chunks in streams for node in nodes(render(source, chunks, START), 7)]
    called = [node for chunks in streams for node in nodes(render(source, chunks, START), 5)]
    assert announced
    assert [node["tool_use"] for node in announced] == [node["tool_use"] for node in called]
    assert any(json.loads(node["tool_use"]["input_json"]) for node in announced)


def test_a_call_that_is_cut_is_not_announced() -> None:
    assert nodes(render("openai", chat(called("f", '{"a":')), START), 7) == []


def test_a_tool_of_an_mcp_server_comes_back_with_its_servers_name() -> None:
    tools = [{"name": "f", "mcp_server_name": "S", "mcp_tool_name": "inner"}]
    (node,) = nodes(render("openai", chat(called()), {"tool_definitions": tools}), 5)
    assert (node["tool_use"]["mcp_server_name"], node["tool_use"]["mcp_tool_name"]) == ("S", "inner")


def test_counters_come_as_a_token_usage_node_when_the_upstream_has_them_and_not_else() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    lines = render("openai", chat({"content": "x"}, usage=usage))
    (node,) = nodes(lines, 10)
    assert node["token_usage"] == {"input_tokens": 9, "output_tokens": 2, "cache_read_input_tokens": 4}
    assert nodes(render("openai", chat({"content": "x"})), 10) == []


def counted(source: str, usage: dict[str, Any]) -> Any:
    """The counters that come of these ones of a service."""
    if source == "claude":
        chunks = claude("end_turn", {"type": "text", "text": "x"})
        chunks[0]["message"]["usage"] = usage
        chunks[-2]["usage"] = {}
    elif source == "gemini":
        part = {"content": {"role": "model", "parts": [{"text": "x"}]}, "finishReason": "STOP"}
        chunks = [{"candidates": [part], "usageMetadata": usage}]
    else:
        chunks = [{"type": "response.completed", "response": {"id": "r", "status": "completed", "output": [],
                                                              "usage": usage}}]  # fmt: skip
    (node,) = nodes(render(source, chunks), 10)
    return node["token_usage"]


@pytest.mark.parametrize(
    ("source", "usage", "expected"),
    [
        ("claude", {"input_tokens": 5, "cache_read_input_tokens": 90, "cache_creation_input_tokens": 7,
                    "output_tokens": 2}, (5, 2, 90, 7)),
        ("claude", {"input_tokens": 5, "output_tokens": 2}, (5, 2, None, None)),
        ("gemini", {"promptTokenCount": 9, "candidatesTokenCount": 4, "cachedContentTokenCount": 6,
                    "toolUsePromptTokenCount": 3}, (9, 4, 6, None)),
        ("gemini", {"promptTokenCount": 9, "thoughtsTokenCount": 30}, (9, 0, None, None)),
        ("codex", {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 6}, "output_tokens": 4,
                   "output_tokens_details": {"reasoning_tokens": 3}}, (9, 4, 6, None)),
    ],
)  # fmt: skip
def test_counters_are_those_of_the_service(source: str, usage: dict[str, Any], expected: tuple[Any, ...]) -> None:
    found = counted(source, usage)
    names = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert tuple(found.get(name) for name in names) == expected


def test_the_last_line_only_says_why_it_stopped() -> None:
    *_, last = render("openai", chat({"content": "x"}, usage={"prompt_tokens": 1, "completion_tokens": 1}))
    assert last == {
        "text": "", "unknown_blob_names": [], "checkpoint_not_found": False, "workspace_file_chunks": [],
        "stop_reason": 1,
    }  # fmt: skip


@pytest.mark.parametrize("said", ["stop", "tool_calls", "function_call", "unheard_of"])
def test_stop_though_a_tool_use_was_seen_is_tool_use_requested(said: str) -> None:
    assert render("openai", chat(called(), stop=said))[-1]["stop_reason"] == 3
    block = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    assert render("claude", claude("end_turn", block))[-1]["stop_reason"] == 3


@pytest.mark.parametrize(
    ("said", "number"),
    [("stop", 1), ("length", 2), ("tool_calls", 3), ("function_call", 3), ("content_filter", 4), ("unheard_of", 1)],
)
def test_reasons_of_chat_completions_have_their_numbers(said: str, number: int) -> None:
    deltas = [called()] if number == 3 else [{"content": "x"}]
    assert render("openai", chat(*deltas, stop=said))[-1]["stop_reason"] == number


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("end_turn", 1), ("stop_sequence", 1), ("max_tokens", 2), ("tool_use", 3), ("safety", 4), ("recitation", 5),
        ("refusal", 1), ("pause_turn", 0), ("unheard_of", 1),
    ],
)  # fmt: skip
def test_reasons_of_messages_have_their_numbers(said: str, number: int) -> None:
    assert render("claude", claude(said, {"type": "text", "text": "x"}))[-1]["stop_reason"] == number


@pytest.mark.parametrize(
    ("said", "number"),
    [("STOP", 1), ("MAX_TOKENS", 2), ("SAFETY", 4), ("RECITATION", 5), ("MALFORMED_FUNCTION_CALL", 6)],
)
def test_reasons_of_gemini_have_their_numbers(said: str, number: int) -> None:
    chunk = {"candidates": [{"content": {"role": "model", "parts": [{"text": "x"}]}, "finishReason": said}]}
    assert render("gemini", [chunk])[-1]["stop_reason"] == number


@pytest.mark.parametrize(("reason", "number"), [("max_output_tokens", 2), ("content_filter", 4)])
def test_an_incomplete_response_says_its_reason(reason: str, number: int) -> None:
    response = {"id": "r", "status": "incomplete", "incomplete_details": {"reason": reason}, "output": []}
    chunks = [
        {"type": "response.created", "response": {"id": "r", "status": "in_progress", "output": []}},
        {"type": "response.incomplete", "response": response},
    ]
    assert render("codex", chunks)[-1]["stop_reason"] == number


def test_a_call_beside_a_spent_limit_still_says_the_limit() -> None:
    assert render("openai", chat(called(), stop="length"))[-1]["stop_reason"] == 2


# What goes wrong ------------------------------------------------------------------------------------------------------


def test_a_stream_that_is_cut_ends_with_a_line_of_its_own_and_a_loss() -> None:
    stream = augment.ChunkStream("openai")
    for chunk in chat({"content": "x"}, stop=None):
        stream.feed(chunk)
    assert stream.finish()[-1]["stop_reason"] == 0
    assert [(loss.kind, loss.code) for loss in stream.losses] == [("synthesised", "cut")]
    assert stream.finish() == []


def test_an_error_in_the_stream_is_shown_and_gives_no_reason_to_stop() -> None:
    lines = render("openai", [*chat({"content": "x"}, stop=None), {"error": {"message": "overloaded"}}])
    assert "overloaded" in "".join(line["text"] for line in lines)
    assert lines[-1]["stop_reason"] == 0


def test_thinking_is_a_node_and_no_text() -> None:
    lines = render("claude", claude("end_turn", {"type": "thinking", "thinking": "hm", "signature": ""}))
    assert [node["thinking"] for node in nodes(lines, 8)] == [{"summary": "hm"}]
    assert "".join(line["text"] for line in lines) == ""


@pytest.mark.parametrize(("sent", "shown"), [("[1]", [{"arguments": [1]}]), ("[1", [])])
def test_arguments_that_are_no_object_are_put_into_one_and_cut_ones_are_no_call(sent: str, shown: list[Any]) -> None:
    stream = augment.ChunkStream("openai")
    lines: list[Any] = [line for chunk in chat(called("f", sent)) for line in stream.feed(chunk)]
    assert [json.loads(node["tool_use"]["input_json"]) for node in nodes(lines, 5)] == shown
    assert "arguments" in {loss.code for loss in stream.losses}


def test_a_second_answer_is_named_as_lost() -> None:
    stream = augment.ChunkStream("openai")
    stream.feed({"choices": [{"index": 1, "delta": {"content": "x"}}]})
    assert [(loss.path, loss.code) for loss in stream.losses] == [("/choices/1", "candidates")]


# The command line -----------------------------------------------------------------------------------------------------


def translate(*words: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "backplane", "translate", *words]
    return subprocess.run(command, input=data, capture_output=True, timeout=S_MAX, check=False)


def test_the_command_writes_a_request_and_its_losses() -> None:
    data = json.dumps({"prompt": "hi", "model": "m", "blobs": {"a": "b"}}).encode()
    done = translate("--from", "augment", "--to", "openai", "--kind", "request", data=data)
    assert json.loads(done.stdout) == {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    assert [json.loads(line)["path"] for line in done.stderr.splitlines()] == ["/blobs"]
    assert translate("--from", "augment", "--to", "openai", "--strict", data=data).returncode == 1


def test_the_command_writes_each_line_when_its_chunk_came() -> None:
    command = [sys.executable, "-m", "backplane", "translate", "--from", "openai", "--to", "augment"]
    command += ["--kind", "stream"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(framing.sse_bytes(chat({"content": "one"}, stop=None)[0]))
        child.stdin.flush()
        assert select.select([child.stdout], [], [], S_MAX)[0]
        first = os.read(child.stdout.fileno(), 65536)
        assert json.loads(first)["text"] == "one"
        rest = b"".join(framing.sse_bytes(chunk) for chunk in chat(called())) + framing.done_bytes()
        out, _ = child.communicate(rest, timeout=S_MAX)
    lines = [json.loads(line) for line in out.splitlines()]
    assert [node["type"] for line in lines for node in line.get("nodes", ())] == [5]
    assert lines[-1]["stop_reason"] == 3


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (["--from", "augment", "--to", "claude", "--kind", "stream"], "from augment to claude"),
        (["--from", "claude", "--to", "augment", "--kind", "request"], "from claude to augment"),
    ],
)
def test_a_direction_that_does_not_exist_says_which_do(words: list[str], fact: str) -> None:
    done = translate(*words, data=b"{}")
    assert done.returncode == 2
    assert fact in done.stderr.decode()
