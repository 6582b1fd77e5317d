"""A seventh dialect is one file and one entry point; it meets the same measures as the six."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from backplane import dialects
from backplane.dialects import StreamTranslation, dialect, sum_stream, translate
from tests.dialects import differ, measures
from tests.dialects.dialect_corpus import NAMES, canonical, documents, streams


@pytest.fixture(autouse=True)
def acme(monkeypatch: pytest.MonkeyPatch) -> None:
    brought = EntryPoint("acme", "tests.dialects.acme:DIALECT", dialects.GROUP)
    monkeypatch.setattr(dialects, "entries", lambda: (brought,))


REQUEST: dict[str, Any] = {
    "robot": "acme-1", "mood": 0.5, "limits": {"tokens": 50, "patience": 3}, "effort": "busy", "colour": "red",
    "gadgets": [{"tool": "look", "about": "Looks.", "takes": {"type": "object", "properties": {}}}],
    "turns": [
        {"who": "boss", "say": [{"type": "text", "text": "Be good."}]},
        {"who": "human", "say": [{"type": "text", "text": "Hi", "loud": True}]},
        {"who": "robot", "say": [{"type": "call", "id": "c1", "tool": "look", "with": {"at": "sky"}}]},
        {"who": "machine", "say": [{"type": "result", "id": "c1", "says": [{"type": "text", "text": "blue"}]}]},
    ],
}  # fmt: skip
ANSWER = {"number": "7", "robot": "acme-1", "say": [{"type": "text", "text": "Blue."}], "outcome": "happy",
          "bill": {"heard": 5, "spoken": 2}}  # fmt: skip


def test_its_documents_come_back_as_they_were_and_edits_show() -> None:
    for kind, document in (("request", REQUEST), ("response", ANSWER)):
        read = measures.reader("acme", kind)(document).value
        assert canonical(measures.writer("acme", kind)(read).value) == canonical(document)
        count = [0]
        text = canonical(measures.writer("acme", kind)(measures.edit(read, count)).value)
        assert all(f"{measures.MARK} {place}" in text for place in range(1, count[0] + 1))


@pytest.mark.parametrize("target", NAMES)
def test_nothing_of_it_is_lost_without_a_word(target: str) -> None:
    for kind, document in (("request", REQUEST), ("response", ANSWER)):
        done = translate(document, "acme", target, kind)  # type: ignore[arg-type]
        named = {loss.path for loss in done.losses}
        assert measures.silent(document, done, "acme", target, kind) == []
        back = translate(done.value, target, "acme", kind)  # type: ignore[arg-type]
        synthesised = {loss.path for loss in back.losses if loss.kind == "synthesised"}
        assert [at for at in differ.unequal(document, back.value) if not differ.is_named(at, named | synthesised)] == []


@pytest.mark.parametrize("source", NAMES)
def test_nothing_of_the_others_is_lost_in_it_without_a_word(source: str) -> None:
    for title, document in documents(source, "request"):
        if (done := measures.across(document, source, "acme", "request")) is not None:
            assert measures.silent(document, done, source, "acme", "request") == [], title


@pytest.mark.parametrize("name", NAMES)
def test_streams_go_into_it_and_out_of_it(name: str) -> None:
    title = {"claude": "text, then a call"}.get(name, "text, then two calls")
    chunks = dict(streams(name))[title]
    done = StreamTranslation(name, "acme")
    made = [out for chunk in chunks for out in done.feed(chunk)] + done.finish()
    mine, theirs = (sum_stream(*pair).value.candidates[0] for pair in ((chunks, name), (made, "acme")))
    assert measures.essence(mine.message.parts) == measures.essence(theirs.message.parts)
    assert mine.stop == theirs.stop
    back = StreamTranslation("acme", name)
    again = [out for chunk in made for out in back.feed(chunk)] + back.finish()
    assert measures.essence(sum_stream(again, name).value.candidates[0].message.parts) == measures.essence(
        mine.message.parts
    )


def test_it_has_what_every_dialect_has() -> None:
    assert dialect("acme").map_response(ANSWER)[0].text == "Blue."


def test_a_loss_of_it_names_its_own_members() -> None:
    done = translate({**ANSWER, "bill": {"spoken": 2}}, "acme", "claude", "response")
    assert [loss.path for loss in done.losses if loss.path.startswith("/bill")] == ["/bill/heard"]


def test_a_schema_that_it_does_not_have_is_named() -> None:
    done = translate(dict(documents("gemini", "request"))["an answer by a schema"], "gemini", "acme")
    assert {loss.path for loss in done.losses} >= {"/generationConfig/responseJsonSchema", "/generationConfig"}


def test_what_a_translation_adds_is_the_callers_own() -> None:
    for _ in range(2):
        done = translate({**ANSWER, "bill": None}, "acme", "claude", "response")
        assert done.value["usage"] == {"input_tokens": 0, "output_tokens": 0}
        done.value["usage"]["input_tokens"] = 7
