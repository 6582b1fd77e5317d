"""A folder of recordings is read whatever they look like, and what real traffic taught stays so."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from backplane.dialects import StreamTranslation, framing, ir, sum_stream
from tests.dialects import measures, recorded
from tests.dialects.dialect_corpus import documents, streams


def write(folder: Path, name: str, *lines: Any) -> None:
    (folder / name).write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")


def test_exchanges_bare_documents_and_streams_are_told_apart(tmp_path: Path) -> None:
    request, answer = documents("claude", "request")[0][1], documents("claude", "response")[0][1]
    _, chunks = streams("openai")[0]
    wire = b"".join(framing.sse_bytes(chunk, None) for chunk in chunks).decode()
    write(
        tmp_path,
        "exchanges.jsonl",
        {"t": "request", "path": "/v1/messages", "body": request},
        {"url": "https://api.moonshot.ai/v1/chat/completions", "request": {"messages": []}, "response": wire},
        {"path": "/v1/messages", "body": json.dumps(request), "response": {"body": json.dumps(answer)}},
        {"path": "/v1/models", "body": None},
        {"t": "end", "status": 200},
    )
    write(tmp_path, "bare.json", documents("gemini", "request")[0][1])
    (tmp_path / "stream.sse").write_text(wire, encoding="utf-8")
    corpus, left, unread = recorded.corpus_of(tmp_path)
    assert (left, unread) == (2, [])
    assert [len(corpus.documents("claude", kind)) for kind in ("request", "response")] == [1, 1]  # one request twice
    assert [len(corpus.documents(name, "request")) for name in ("gemini", "kimi")] == [1, 1]
    assert [len(corpus.streams(name)) for name in ("kimi", "openai")] == [1, 1]


def test_cassettes_of_test_suites_are_read_packed_and_blacked_out(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    request, answer = documents("claude", "request")[0][1], documents("claude", "response")[0][1]
    body = gzip.compress(json.dumps(answer).encode())
    asked = {"method": "POST", "uri": "https://api.anthropic.com/v1/messages", "body": json.dumps(request)}
    tape: dict[str, Any] = {"interactions": [{"request": asked, "response": {"body": {"string": body}}}]}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(tape), encoding="utf-8")
    wire = b"".join(framing.sse_bytes(chunk, None) for chunk in streams("gemini")[0][1]).decode()
    hidden: dict[str, Any] = {"uri": "**REDACTED**", "body": json.dumps(documents("gemini", "request")[0][1])}
    tape = {"requests": [hidden], "responses": [{"body": {"string": wire}}]}
    (tmp_path / "two.yaml.gz").write_bytes(gzip.compress(yaml.safe_dump(tape).encode()))
    corpus, left, unread = recorded.corpus_of(tmp_path)
    assert (left, unread) == (0, [])
    assert [document for _, document in corpus.documents("claude", "response")] == [answer]
    found = [corpus.documents(*one) for one in (("claude", "request"), ("gemini", "request"))]
    assert [len(one) for one in (*found, corpus.streams("gemini"))] == [1, 1, 1]


def test_of_one_shape_only_as_many_are_judged_as_asked(tmp_path: Path) -> None:
    asked = [{"model": "m", "messages": [{"role": "user", "content": text}]} for text in "abc"]
    write(tmp_path, "one.jsonl", *({"path": "/v1/chat/completions", "body": one} for one in asked))
    assert [len(recorded.corpus_of(tmp_path, n)[0].documents("openai", "request")) for n in (0, 1, 2)] == [3, 1, 2]


def test_a_recording_that_no_dialect_reads_is_named(tmp_path: Path) -> None:
    write(tmp_path, "one.jsonl", {"path": "/v1/responses", "body": {"input": 5}})
    _, _, unread = recorded.corpus_of(tmp_path)
    assert [line.partition(":")[0] for line in unread] == ["one.jsonl"]


def test_the_measures_judge_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "one.jsonl", {"path": "/v1/messages", "body": documents("claude", "request")[0][1]})
    assert recorded.main([str(tmp_path), "M1", "M5", "M6"]) == 0
    assert "M1 1 of 1, 100.00 %" in capsys.readouterr().out


def delta(choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "c", "model": "m", "choices": [{"index": 0, "finish_reason": None, **choices}], **more}


def call(place: int, call_id: str, name: str, text: str) -> dict[str, Any]:
    return {"index": place, "id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


PIECES = 20_000


@pytest.mark.parametrize("target", ["claude", "codex", "gemini"])
def test_a_call_in_very_many_pieces_comes_whole(target: str) -> None:
    texts = ['{"x":"', *["y"] * PIECES, '"}']
    said = [delta({"delta": {"tool_calls": [call(0, "a", "f", text)]}}) for text in texts]
    stream = StreamTranslation("openai", target)
    made = [out for chunk in said for out in stream.feed(chunk)]
    made += [out for chunk in [delta({"delta": {}, "finish_reason": "tool_calls"})] for out in stream.feed(chunk)]
    (part,) = sum_stream([*made, *stream.finish()], target).value.candidates[0].message.parts
    assert isinstance(part, ir.ToolUse)
    assert (part.name, part.input) == ("f", {"x": "y" * PIECES})


def test_a_gateway_that_counts_every_call_as_the_first_says_two_calls() -> None:
    said = [delta({"delta": {"tool_calls": [call(0, one, one, "{}")]}}) for one in ("a", "b")]
    parts = sum_stream(said, "openai").value.candidates[0].message.parts
    assert [(part.id, part.name) for part in parts if isinstance(part, ir.ToolUse)] == [("a", "a"), ("b", "b")]


def test_an_id_that_is_said_in_every_piece_begins_no_other_call() -> None:
    said = [delta({"delta": {"tool_calls": [call(0, "a", "f", text)]}}) for text in ('{"x"', ":1}")]
    parts = sum_stream(said, "openai").value.candidates[0].message.parts
    assert [part.input for part in parts if isinstance(part, ir.ToolUse)] == [{"x": 1}]


def test_what_stands_beside_an_error_is_read() -> None:
    chunk = delta({"delta": {"content": "so far"}, "finish_reason": "error"}, error={"message": "overloaded"})
    answer = sum_stream([chunk], "openai").value
    assert measures.our_facts(answer)["text"] == "so far"
    assert (answer.error, answer.candidates[0].stop) == ("overloaded", "other")
