"""Bytes become the same documents wherever they are cut, with every oddity that the standards allow."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane.dialects import StreamTranslation, dialect, framing
from backplane.errors import TranslationError
from tests.dialects import dialect_corpus

IN_TIME_S = 20.0
"""Linear work takes a tenth of this, quadratic work a multiple; a loaded machine does neither."""

CHUNKS = [{"a": 1}, {"text": "zwei\n\nund é漢🦀"}, {"b": [1, {"c": '}]"\\'}]}, {"d": "data: x"}]


def cut(reader: Any, data: bytes, places: list[int]) -> list[Any]:
    out: list[Any] = []
    edges = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    for start, end in itertools.pairwise(edges):
        out += reader.feed(data[start:end])
    return [*out, *reader.finish()]


def as_sse(chunks: list[Any], end: bytes = b"\n") -> bytes:
    rows = [b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + end + end for chunk in chunks]
    return b"".join(rows) + b"data: [DONE]" + end + end


FORMS = {
    "sse with LF": (framing.Sse, as_sse(CHUNKS)),
    "sse with CRLF": (framing.Sse, as_sse(CHUNKS, b"\r\n")),
    "sse with CR": (framing.Sse, as_sse(CHUNKS, b"\r")),
    "sse with a mark at its start": (framing.Sse, b"\xef\xbb\xbf" + as_sse(CHUNKS)),
    "sse with comments and ids": (framing.Sse, b": hi\n\nid: 7\nretry: 9\nevent: x\n" + as_sse(CHUNKS) + b": bye\n\n"),
    "sse without a last blank line": (framing.Sse, as_sse(CHUNKS).removesuffix(b"data: [DONE]\n\n").rstrip(b"\n")),
    "sse without blanks": (framing.Sse, as_sse(CHUNKS).replace(b"data: {", b"data:{")),
    "lines": (framing.Detecting, b"\n".join(json.dumps(chunk).encode() for chunk in CHUNKS)),
    "an array": (framing.JsonArray, json.dumps(CHUNKS, indent=1).encode()),
    "an array that is cut": (framing.JsonArray, json.dumps(CHUNKS).encode()[:-1]),
    "an array to be found out": (framing.Detecting, b"\n " + json.dumps(CHUNKS).encode()),
    "sse to be found out": (framing.Detecting, as_sse(CHUNKS)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_stream_cut_at_any_byte_gives_the_same_documents(form: str) -> None:
    kind, data = FORMS[form]
    for place in range(len(data) + 1):
        assert cut(kind(), data, [place]) == CHUNKS, place
    assert cut(kind(), data, list(range(len(data)))) == CHUNKS


@given(st.lists(st.integers(min_value=0, max_value=10_000), max_size=12), st.sampled_from(sorted(FORMS)))
def test_a_stream_cut_at_many_bytes_gives_the_same_documents(places: list[int], form: str) -> None:
    kind, data = FORMS[form]
    assert cut(kind(), data, places) == CHUNKS


def test_data_of_several_lines_is_one_document() -> None:
    assert framing.Sse().feed(b'data: {"a":\ndata: 1}\n\n') == [{"a": 1}]


def test_data_that_is_no_json_is_skipped_and_counted() -> None:
    reader = framing.Sse()
    assert reader.feed(b'data: oops\n\ndata: {"a":1}\n\n') == [{"a": 1}]
    assert reader.skipped == 1
    lines = framing.JsonArray()
    assert lines.feed(b'{oops}\n{"a":1}\n\n') == [{"a": 1}]
    assert lines.skipped == 1


def test_the_end_is_noticed_by_its_word() -> None:
    reader = framing.Sse()
    reader.feed(b"data: [DONE]\n\n")
    assert reader.done


def test_a_document_instead_of_a_stream_is_one_event() -> None:
    for kind in (framing.Sse, framing.Detecting):
        reader = kind()
        assert reader.feed(b'{"a":') + reader.feed(b"1}") + reader.finish() == [{"a": 1}]


def test_named_events_keep_their_names_where_asked() -> None:
    data = b'event: copilot_references\ndata: [{"id":"x"}]\n\nevent: copilot_confirmation\ndata: {"title":"t"}\n\n'
    assert framing.Sse(is_named=True).feed(data) == [
        {"sse_event": "copilot_references", "data": [{"id": "x"}]},
        {"sse_event": "copilot_confirmation", "title": "t"},
    ]
    assert framing.Sse().feed(b'event: error\ndata: {"message":"m"}\n\n') == [{"error": {"message": "m"}}]


@pytest.mark.parametrize("kind", [framing.Sse, framing.JsonArray])
def test_an_event_without_end_is_refused_at_its_limit(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "EVENT_BYTES_MAX", 100)
    reader = kind()
    reader.feed(b'{"a":"' + b"x" * 80)
    with pytest.raises(TranslationError, match="100 bytes"):
        reader.feed(b"x" * 80)


@pytest.mark.parametrize("line", [b"data\n", b' "a": 1,\n', b"data: 1\n"], ids=["empty data", "a document", "data"])
def test_an_event_of_lines_without_end_is_refused_at_its_limit(line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "EVENT_BYTES_MAX", 100)
    reader = framing.Sse()
    reader.feed(b"{\n")
    with pytest.raises(TranslationError, match="100 bytes"):
        [reader.feed(line) for _ in range(100)]


@pytest.mark.parametrize("form", ["sse", "lines", "array"])
def test_a_long_event_in_small_pieces_is_read_in_time(form: str) -> None:
    frames = {"sse": b'data: {"a":"%s"}\n\n', "lines": b'{"a":"%s"}\n', "array": b'[{"a":"%s"}]'}
    whole = frames[form] % (b"x" * (8 << 20))
    reader, began_s = (framing.Sse if form == "sse" else framing.JsonArray)(), time.monotonic()
    found = [doc for start in range(0, len(whole), 256) for doc in reader.feed(whole[start : start + 256])]
    assert [len(doc["a"]) for doc in found] == [8 << 20]
    assert time.monotonic() - began_s < IN_TIME_S


@pytest.mark.parametrize("name", dialect_corpus.NAMES)
def test_real_streams_cut_at_every_byte_give_the_same_events(name: str) -> None:
    """Every stream of the corpus, as its vendor would send it, one byte at a time and whole."""
    module = dialect(name)
    for title, chunks in dialect_corpus.streams(name):
        data = b"".join(framing.sse_bytes(chunk, module.event_name(chunk)) for chunk in _unnamed(chunks))
        whole = _events(name, framing.Sse(is_named=name == "copilot"), [data])
        single = _events(name, framing.Sse(is_named=name == "copilot"), [data[i : i + 1] for i in range(len(data))])
        assert whole == single, title
        assert whole


def _unnamed(chunks: list[Any]) -> list[Any]:
    return [chunk for chunk in chunks if "sse_event" not in chunk]


def _events(name: str, reader: Any, pieces: list[bytes]) -> list[Any]:
    stream = dialect(name).StreamReader()
    chunks = [chunk for piece in pieces for chunk in reader.feed(piece)] + reader.finish()
    return [*(event for chunk in chunks for event in stream.read(chunk)), *stream.finish()]


@pytest.mark.parametrize("name", dialect_corpus.NAMES)
def test_a_translated_stream_comes_piece_by_piece(name: str) -> None:
    chunks = dialect_corpus.streams("openai")[0][1]
    done = StreamTranslation("openai", name)
    counts = [len(done.feed(chunk)) for chunk in chunks]
    assert sum(count > 0 for count in counts) >= 3, "text must not wait for the end"
