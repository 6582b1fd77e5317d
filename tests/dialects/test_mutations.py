"""Documents and streams that are broken at random places: still given back as they were, never a crash, never silent.

The places are random but the same in every run.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from backplane.contract.events import RunCompleted
from backplane.dialects import StreamTranslation, agent_events, dialect, sum_stream, translate
from backplane.dialects.common import snake
from backplane.errors import TranslationError
from tests.dialects import measures
from tests.dialects.dialect_corpus import KINDS, NAMES, canonical, documents, streams

JUNK: list[Any] = [
    None, "", 0, 1, 1.5, True, False, [], {}, "text", ["a"], [{}], {"a": 1}, [None], -1, {"type": "x"}, "12", "null",
    10**20, -0.0, "half a letter: \ud83d", [[]], {"": ""}, {"/": 1}, {"#x": 1}, {"##y": "z"},
]  # fmt: skip
MEMBERS = ["x_new", "a/b", "~", "#x", "id", "type", "name", "index", "content", "text", "signature", "status", "role"]
ROUNDS = 3


def spots(value: Any) -> list[tuple[Any, Any]]:
    """Return every place where something stands: its holder and its key."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [spot for key, inner in pairs for spot in ((value, key), *spots(inner))]


def broken(document: Any, chance: random.Random) -> Any:
    """Return a copy with one to three faults."""
    document = copy.deepcopy(document)
    for _ in range(chance.randint(1, 3)):
        places = spots(document)
        if not places:
            break
        holder, key = chance.choice(places)
        what = chance.random()
        if what < 0.4:
            holder[key] = copy.deepcopy(chance.choice(JUNK))
        elif what < 0.6:
            del holder[key]
        elif what < 0.7 and isinstance(key, str):
            holder[snake(key)] = holder.pop(key)
        elif what < 0.8 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(chance.choice(holder)))
        elif isinstance(holder, dict):
            holder[chance.choice(MEMBERS)] = copy.deepcopy(chance.choice(JUNK))
        else:
            holder.insert(key, copy.deepcopy(chance.choice(JUNK)))
    return document


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_broken_document_comes_back_as_it_was_or_is_refused(name: str, kind: str) -> None:
    chance = random.Random(f"{name} {kind}")
    for _ in range(ROUNDS):
        for title, document in documents(name, kind):
            bad = broken(document, chance)
            try:
                read = measures.reader(name, kind)(bad)
            except TranslationError:
                continue
            assert canonical(measures.writer(name, kind)(read.value).value) == canonical(bad), title


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_broken_document_loses_nothing_without_a_word(name: str, kind: Any) -> None:
    chance = random.Random(f"{name} {kind} across")
    for _ in range(ROUNDS):
        for title, document in documents(name, kind):
            bad = broken(document, chance)
            target = chance.choice([other for other in NAMES if other != name])
            try:
                done = translate(bad, name, target, kind)
            except TranslationError:
                continue
            assert measures.silent(bad, done, name, target, kind) == [], f"{title} → {target}"


def out_of_order(target: str, chunks: list[Any]) -> list[str]:
    """Return what is wrong with the order of a written stream: what was begun ends once, nothing follows its end."""
    kinds = [chunk.get("type") for chunk in chunks]
    wrong: list[str] = []
    if target == "claude":
        open_block: Any = None
        for chunk in chunks:
            kind, index = chunk.get("type"), chunk.get("index")
            expected = None if kind == "content_block_start" else index
            if str(kind).startswith("content_block") and open_block != expected:
                wrong.append(f"{kind} of {index} while {open_block} is open")
            if kind in ("content_block_start", "content_block_stop"):
                open_block = index if kind == "content_block_start" else None
        ends = {"message_start": 1, "message_stop": 1}
    elif target == "codex":
        numbers = [chunk["sequence_number"] for chunk in chunks]
        wrong += [] if numbers == list(range(len(chunks))) else [f"numbers {numbers}"]
        added = [chunk["output_index"] for chunk in chunks if chunk["type"] == "response.output_item.added"]
        done = [chunk["output_index"] for chunk in chunks if chunk["type"] == "response.output_item.done"]
        wrong += [] if sorted(added) == sorted(done) else [f"items {added} begun, {done} done"]
        ends = {"response.created": 1}
        wrong += (
            []
            if kinds[-1] in ("response.completed", "response.incomplete", "response.failed")
            else [f"no end: {kinds[-3:]}"]
        )
    else:
        choices = [choice for chunk in chunks for choice in chunk.get("choices", chunk.get("candidates", ()))]
        ended = [choice.get("index") for choice in choices if choice.get("finish_reason") or choice.get("finishReason")]
        wrong += [f"choice {index} ends twice" for index in set(ended) if ended.count(index) > 1]
        ends = {}
    wrong += [f"{kinds.count(kind)} × {kind}" for kind, count in ends.items() if kinds.count(kind) != count]
    return wrong


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_stream_ends_in_order(name: str) -> None:
    chance = random.Random(name)
    for _ in range(ROUNDS * 3):
        for title, chunks in streams(name):
            bad = broken(chunks, chance)
            for target in NAMES:
                done = StreamTranslation(name, target)
                made = [out for chunk in bad for out in done.feed(chunk)] + done.finish()
                if target != name and made:
                    assert out_of_order(target, made) == [], f"{title} → {target}"
                assert sum_stream(made, target).value.dialect == target
            state = dialect(name).StreamState()
            found = [event for chunk in bad for event in dialect(name).map_stream_event(chunk, state)]
            found += agent_events.end_events(state)
            assert [type(event) for event in found].count(RunCompleted) <= 1, title


HEAD: dict[str, Any] = {
    "id": "m", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None,
    "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1},
}  # fmt: skip
BEGIN = {"type": "message_start", "message": HEAD}
END = {"type": "message_stop"}


def block(index: int, text: str) -> list[Any]:
    delta = {"type": "text_delta", "text": text}
    return [
        {"type": "content_block_start", "index": index, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": index, "delta": delta},
    ]


def test_a_block_that_begins_anew_before_its_end_is_ended_first() -> None:
    stream = StreamTranslation("claude", "codex")
    made = [out for chunk in [BEGIN, *block(0, "a"), *block(0, "b"), END] for out in stream.feed(chunk)]
    assert out_of_order("codex", made) == []
    assert [item["content"][0]["text"] for item in made[-1]["response"]["output"]] == ["a", "b"]


@pytest.mark.parametrize("target", ["codex", "claude"])
def test_what_comes_after_the_end_of_a_stream_is_named_not_written(target: str) -> None:
    stream = StreamTranslation("claude", target)
    made = [out for chunk in [BEGIN, *block(0, "a"), END, *block(1, "b"), *block(2, "c")] for out in stream.feed(chunk)]
    assert out_of_order(target, made) == []
    assert [loss.reason for loss in stream.losses if loss.code == "order"] == ["it came after the end of the stream"]
