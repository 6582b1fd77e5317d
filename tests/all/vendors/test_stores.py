"""A store of each vendor, written by its own program here, becomes a session: what that program itself shows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backplane import ir
from backplane.agents.store import read_stored
from backplane.contract.conversation import AgentMessage, Message, UserMessage
from backplane.dialects import dialect
from backplane.errors import BackendError, ConfigError
from backplane.providers import exchange
from backplane.testing import ModelServer, Turn
from tests.all.vendors.stores import Store, environ_of, script

pytestmark = [pytest.mark.timeout(600)]

FIRST, SECOND, THIRD = "the word is zebra; write new.txt", "which word?", "and once more?"
DIALECTS = {"claude": "claude", "codex": "codex", "gemini": "gemini"}
MODELS = {"kimi": ("-m", "__kimi_env_model__"), "opencode": ("--model", "scripted/scripted-model")}
"""What is said to those that would go on with the model of the conversation, which was another program's."""
Row = tuple[str, Any]


def ours(messages: tuple[Message, ...]) -> Iterator[Row]:
    """What was said, block by block."""
    for message in messages:
        if isinstance(message, UserMessage):
            yield "user", message.content.strip('"')
        elif isinstance(message, AgentMessage):
            yield from [("say", message.content)] if message.content else []
            yield from (("call", (call.name, call.arguments)) for call in message.tool_calls)
        else:
            yield "result", message.content


def shown(vendor: str, request: Any) -> Iterator[Row]:
    """The same of what the program shows its model: its own notes and the words around are left out.

    Gemini CLI, going on with a conversation, sends each result twice.
    """
    answered = set[str]()
    for message in dialect(DIALECTS.get(vendor, "openai")).to_ir(request).value.messages:
        for part in message.parts:
            if isinstance(part, ir.ToolUse):
                yield "call", (part.name, part.input)
            elif isinstance(part, ir.ToolOutput) and part.id not in answered:
                value = part.value
                answered.add(part.id)
                texts = "".join(str(getattr(one, "text", "")) for one in part.content)
                yield "result", str(value.get("output", value)) if isinstance(value, dict) else texts
            elif isinstance(part, ir.Text) and message.role == "assistant" and part.text:
                yield "say", part.text
            elif isinstance(part, ir.Text) and message.role == "user":
                yield from (("user", words) for words in (FIRST, SECOND, THIRD) if words in part.text)


def same(one: Row, two: Row) -> bool:
    """Whether both say the same; what a tool gave may stand in words of the program's."""
    return one[0] == two[0] and (one[1] in two[1] if one[0] == "result" else one[1] == two[1])


def digests(home: Path) -> dict[str, str]:
    """Every file of a store but the shared memory that SQLite's readers mark themselves in."""
    paths = (path for path in home.rglob("*") if path.is_file() and not path.name.endswith("-shm"))
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.fixture(params=["claude", "codex"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("HOME", str(tmp_path))
    return Store(request.param, tmp_path)


def last_asked(server: ModelServer) -> Any:
    return [one.body for one in server.requests if isinstance(one.body, dict) and "tools" in one.body][-1]


def test_a_store_becomes_a_session_as_the_program_shows_it_and_goes_on_there(store: Store) -> None:
    name, vendor = store.vendor.name, store.vendor
    environ = environ_of(vendor, store.home)
    with ModelServer(script([*store.conversation(), Turn(text="zebra", times=None)])) as server:
        store.turn(server, vendor.first(FIRST))
        id = read_stored(name, "last", environ).id
        store.turn(server, vendor.more(SECOND, id))
        file = taken_in(store, id, last_asked(server))
        written = given_out(store, server, file)
        again = read_stored(name, written.id, environ)
        assert [row for turn in file.turns for row in ours(turn.messages)] == list(ours(again.messages))
        store.turn(server, [*vendor.more(THIRD, written.id), *MODELS.get(name, ())])
        asked = last_asked(server)
    rows = [row for turn in file.turns for row in ours(turn.messages)]
    assert [pair for pair in zip(rows, shown(name, asked), strict=False) if not same(*pair)] == []
    assert json.dumps(asked).count(THIRD) == 1
    assert "dropped: thinking and proofs, which only go back to who made them" in written.losses


def taken_in(store: Store, id: str, asked: Any) -> Any:
    """The session of a conversation of two turns; held to what the program showed its model in the second."""
    name, environ = store.vendor.name, environ_of(store.vendor, store.home)
    before = digests(store.home)
    stored = read_stored(name, "last", environ)
    assert digests(store.home) == before
    assert (stored.id, stored.root) == (id, str(store.root))
    rows, theirs = list(ours(stored.messages)), list(shown(name, asked))
    assert [row[0] for row in rows] == [
        *("user", "say", "call", "result", "call", "call", "result", "result", "say", "user", "say"),
    ]
    assert rows[-1] == ("say", "zebra")
    assert len(theirs) == len(rows) - 1
    assert [pair for pair in zip(rows, theirs, strict=False) if not same(*pair)] == []
    said = [message for message in stored.messages if isinstance(message, AgentMessage)]
    # Gemini CLI keeps each piece of a thought without the blanks at its ends.
    assert ["".join(part.text.split()) for message in said for part in message.thinking] == ["thinkfirst"]
    file = exchange.take_in(name, id, "any", environ)
    assert [len(turn.messages) for turn in file.turns] == [len(stored.messages) - 2, 2]
    return file


def given_out(store: Store, server: ModelServer, file: Any) -> Any:
    """The session as a new conversation of the program's, in its store."""
    environ = environ_of(store.vendor, store.home)
    before = digests(store.home)
    written = exchange.give_out(file, store.vendor.name, environ, root=str(store.root))
    if written.takes_in is None:
        exchange.into_store(written)
        assert before.items() <= digests(store.home).items()
        with pytest.raises(ConfigError, match="File exists"):
            exchange.into_store(written)
    else:
        with pytest.raises(BackendError, match="its own program alone writes"):
            exchange.into_store(written)
        exchange.put(written.data, store.root / "written.json")
        store.turn(server, [*written.takes_in.split()[1:-1], str(store.root / "written.json")])
    return written
