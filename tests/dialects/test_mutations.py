"""Documents and streams that are broken at random places: still given back as they were, never a crash, never silent.

The places are random but the same in every run.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from backplane.dialects import StreamTranslation, dialect, translate
from backplane.dialects._parts import snake
from backplane.errors import TranslationError
from tests.dialects import differ, measures
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
            assert differ.missing(bad, done.value, {loss.path for loss in done.losses}) == [], f"{title} → {target}"


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_stream_ends_in_order(name: str) -> None:
    chance = random.Random(name)
    for _ in range(ROUNDS * 3):
        for _title, chunks in streams(name):
            bad = broken(chunks, chance)
            for target in NAMES:
                done = StreamTranslation(name, target)
                for chunk in bad:
                    done.feed(chunk)
                done.finish()
            state = dialect(name).StreamState()
            for chunk in bad:
                dialect(name).map_stream_event(chunk, state)
