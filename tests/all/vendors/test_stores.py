"""A store of each vendor, written by its own program here, becomes a session: what that program itself shows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backplane.contract.conversation import AgentMessage, Message, UserMessage
from backplane.dialects import dialect, ir
from backplane.providers.stores import import_stored, read_stored
from backplane.testing import ModelServer, Turn
from tests.all.vendors.stores import Store, environ_of, script

pytestmark = [pytest.mark.timeout(600)]

FIRST, SECOND = "the word is zebra; write new.txt", "which word?"
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
    """The same of what the program shows its model: its own notes and the words around are left out."""
    for message in dialect(vendor).to_ir(request).value.messages:
        for part in message.parts:
            if isinstance(part, ir.ToolUse):
                yield "call", (part.name, part.input)
            elif isinstance(part, ir.ToolOutput):
                value = part.value
                texts = "".join(str(getattr(one, "text", "")) for one in part.content)
                yield "result", str(value.get("output", value)) if isinstance(value, dict) else texts
            elif isinstance(part, ir.Text) and message.role == "assistant" and part.text:
                yield "say", part.text
            elif isinstance(part, ir.Text) and message.role == "user":
                yield from (("user", words) for words in (FIRST, SECOND) if words in part.text)


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
        taken_in(store, id, last_asked(server))


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
    assert ["".join(part.text.split()) for message in said for part in message.thinking] == ["thinkfirst"]
    file = import_stored(name, id, "any", environ)
    assert [len(turn.messages) for turn in file.turns] == [len(stored.messages) - 2, 2]
    return file
