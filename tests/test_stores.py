"""What vendors' programs keep, read as data: bounds, versions, what was taken back, and what is listed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane.agents import STORES
from backplane.cli import main
from backplane.contract.conversation import AgentMessage, ToolResultMessage, UserMessage
from backplane.errors import ConfigError
from backplane.providers import store as sessions
from backplane.providers.stores import FILE_BYTES_MAX, Stored, read_stored

SECRET = "walrus-walrus-walrus-9"
VARIABLES = {
    "claude": "CLAUDE_CONFIG_DIR",
    "codex": "CODEX_HOME",
}
ID = "0f3c2f4e-6d1b-4c8e-9a57-0d9a3a1f7b11"
PLACES = {
    "claude": f"projects/-w/{ID}.jsonl",
    "codex": f"sessions/2026/11/24/rollout-2026-11-24T10-00-00-{ID}.jsonl",
}
Rows = Sequence[dict[str, Any]]


# Rows as each program writes them, as few members as its reader looks at ----------------------------------------------


def claude(*said: tuple[str, str, Any], version: str = "2.1.330", **more: Any) -> Rows:
    """Rows of a chain: kind, id of the row before, content; the id is the place."""
    return [
        {
            "type": kind, "uuid": str(place), "parentUuid": parent or None, "sessionId": ID, "version": version,
            "cwd": "/w", "timestamp": f"2026-11-24T10:00:0{place}", "message": {"role": kind, "content": content},
            **more,
        }
        for place, (kind, parent, content) in enumerate(said)
    ]  # fmt: skip


def codex(*items: Any, version: str = "0.169.0") -> Rows:
    head = {"type": "session_meta", "payload": {"id": ID, "cwd": "/w", "cli_version": version}}
    return [head, *(item if "payload" in item else {"type": "response_item", "payload": item} for item in items)]


def user(text: str, **more: Any) -> dict[str, Any]:
    """A message of the user's, as Codex and Kimi have it."""
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}], **more}


PLAIN: dict[str, Callable[[Path], object]] = {
    "claude": lambda path: write(
        path, claude(("user", "", "hi"), ("assistant", "0", [{"type": "text", "text": "yo"}]))
    ),
    "codex": lambda path: write(path, codex(user("hi"), {**user("yo"), "role": "assistant"})),
}


def write(path: Path, rows: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(vendor: str, tmp_path: Path, rows: Rows) -> Stored:
    return read_stored(vendor, str(write(tmp_path / "one.jsonl", rows)), {})


def texts(stored: Stored) -> list[str]:
    return [message.content for message in stored.messages]


# Finding --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vendor", STORES)
@pytest.mark.parametrize("how", ["last", "id", "file"])
def test_a_conversation_is_found_by_each_of_its_names(vendor: str, how: str, tmp_path: Path) -> None:
    path = tmp_path / PLACES[vendor]
    PLAIN[vendor](path)
    environ = {VARIABLES[vendor]: str(tmp_path)} if how in ("last", "id") else {"HOME": "/nonexistent"}
    stored = read_stored(vendor, {"last": "last", "id": ID[:10], "file": str(path)}[how], environ)
    assert stored.messages == (UserMessage(content="hi"), AgentMessage(content="yo"))


@pytest.mark.parametrize("vendor", STORES)
def test_the_last_written_is_the_last(vendor: str, tmp_path: Path) -> None:
    old, new = tmp_path / PLACES[vendor], tmp_path / PLACES[vendor].replace("0f3c2f4e", "9f3c2f4e")
    for path, then in ((new, 2), (old, 1)):
        PLAIN[vendor](path)
        os.utime(path, (then, then))
    new.write_text(new.read_text().replace("yo", "new"))
    os.utime(new, (2, 2))
    stored = read_stored(vendor, "last", {VARIABLES[vendor]: str(tmp_path)})
    assert texts(stored) == ["hi", "new"]


@pytest.mark.parametrize("vendor", STORES)
def test_a_store_that_is_not_there_is_refused_with_where_it_would_be(vendor: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no conversation") as refused:
        read_stored(vendor, "last", {VARIABLES[vendor]: str(tmp_path / "no")})
    assert str(tmp_path / "no") in refused.value.message


def test_a_vendor_without_a_reader_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no store of 'clod'") as refused:
        read_stored("clod", "last", {})
    assert "codex" in (refused.value.hint or "")


# Versions and bounds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vendor", "rows", "said"),
    [
        ("claude", claude(("user", "", "hi"), version="3.0.1"), "Claude Code 3.0.1; only versions 2.x"),
        ("codex", codex(user("hi"), version="1.0.0"), "Codex 1.0.0; only versions 0.x"),
        ("codex", [{"type": "response_item", "payload": user("hi")}], "without a version"),
    ],
)
def test_an_unknown_version_is_refused_by_name(vendor: str, rows: Rows, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        read(vendor, tmp_path, rows)


@pytest.mark.parametrize("vendor", STORES)
@pytest.mark.parametrize("data", [b"", b"\0" * 1000, b"[" * 100_000 + b"\n", b'{"type": 1}\n{"id": {}}\n'])
def test_what_is_no_conversation_is_refused(vendor: str, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_bytes(data)
    with pytest.raises(ConfigError):
        read_stored(vendor, str(path), {})


def test_a_file_over_the_bound_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    with path.open("wb") as file:
        file.truncate(FILE_BYTES_MAX + 1)
    with pytest.raises(ConfigError, match="is over"):
        read_stored("claude", str(path), {})


def test_a_line_that_is_still_written_is_listed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", claude(("user", "", "hi")))
    path.write_text(path.read_text() + '{"type":"assist')
    assert read_stored("claude", str(path), {}).losses == ("dropped: 1 lines that are no JSON object",)


# What was taken back, summed up, or said below ------------------------------------------------------------------------


def test_claude_goes_on_from_the_branch_that_was_left_last(tmp_path: Path) -> None:
    told = [("user", "", "one"), ("user", "0", "taken back"), ("user", "0", "two")]
    stored = read("claude", tmp_path, claude(*told))
    assert texts(stored) == ["one", "two"]
    assert stored.losses == ("dropped: 1 messages that were taken back in the program itself",)


@pytest.mark.parametrize("source", [True, False])
@given(ends=st.permutations("abcd"), early=st.integers(0, 3), undone=st.booleans())
def test_claude_calls_that_end_in_any_order_come_along(
    tmp_path_factory: pytest.TempPathFactory, source: bool, ends: list[str], early: int, undone: bool
) -> None:
    """Each result lies below its own call, the next answer below the result that was written last.

    Args:
        early: calls whose results are written before the last block of the answer.
        undone: whether another prompt and answer were taken back before.
    """
    rows = [*claude(("user", "", "go"))]

    def add(kind: str, parent: str, content: Any, answer: str | None = None) -> str:
        (row,) = claude((kind, parent, content))
        row["uuid"] = f"{kind}-{len(rows)}"
        if answer is not None:
            row["message"]["id"] = answer
        rows.append(row)
        return str(row["uuid"])

    above = "0"
    if undone:
        add("assistant", add("user", above, "taken back"), [{"type": "text", "text": "taken back"}], "m0")
    lines: dict[str, str] = {}
    for id in "abcd":
        above = lines[id] = add("assistant", above, [{"type": "tool_use", "id": id, "name": "Read", "input": {}}], "m1")
    blocks, results = rows[-4:], []
    del rows[-4:]
    for id in ends:
        result = [{"type": "tool_result", "tool_use_id": id, "content": id}]
        above = add("user", lines[id], result)
        if source:
            rows[-1]["sourceToolAssistantUUID"] = lines[id]
        results.append(rows.pop())
        results[-1]["uuid"] = above = f"result-{id}"
    rows += [*blocks[:3], *results[:early], blocks[3], *results[early:]]
    add("user", add("assistant", above, [{"type": "text", "text": "all read"}], "m2"), "and now?")
    stored = read("claude", tmp_path_factory.mktemp("store"), rows)
    (called, *_) = [one for one in stored.messages if isinstance(one, AgentMessage)]
    assert [one.id for one in called.tool_calls] == list("abcd")
    assert sorted(one.tool_call_id for one in stored.messages if isinstance(one, ToolResultMessage)) == list("abcd")
    assert [one.content for one in stored.messages if isinstance(one, UserMessage)] == ["go", "and now?"]
    assert all("taken back" in loss for loss in stored.losses)
    assert bool(stored.losses) is undone


def test_claude_blocks_come_along_or_are_listed(tmp_path: Path) -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    thought = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "r"}]
    call, result = {"type": "tool_use", "id": "a", "name": "Read", "input": {}}, {"type": "text", "text": "it"}
    rows = claude(
        ("user", "", "go"), ("assistant", "0", [*thought, {"type": "dreamt"}, call]),
        ("user", "1", [{"type": "tool_result", "tool_use_id": "a", "content": [result, picture]}]),
    )  # fmt: skip
    stored = read("claude", tmp_path, rows)
    (answer,) = [one for one in stored.messages if isinstance(one, AgentMessage)]
    assert [(one.text, one.signature, one.redacted) for one in answer.thinking] == [("hm", "s", None), ("", None, "r")]
    assert [one.content for one in stored.messages if isinstance(one, ToolResultMessage)] == ["it"]
    assert stored.losses == ("dropped: 1 pictures in what tools gave", "dropped: 1 records of the kind 'dreamt'")


def test_claude_agents_below_and_notes_are_listed(tmp_path: Path) -> None:
    rows = [*claude(("user", "", "one")), *claude(("user", "", "below"), isSidechain=True), {"type": "new-thing"}]
    stored = read("claude", tmp_path, rows)
    assert texts(stored) == ["one"]
    assert stored.losses == (
        "dropped: 1 messages of agents below this one",
        "dropped: 1 records of the kind 'new-thing'",
    )


def test_codex_compaction_and_rollback_are_followed(tmp_path: Path) -> None:
    compacted = {"type": "compacted", "payload": {"message": "", "replacement_history": [user("the sum")]}}
    back = {"type": "event_msg", "payload": {"type": "thread_rolled_back", "num_turns": 1}}
    stored = read("codex", tmp_path, codex(user("one"), user("two"), compacted, user("three"), back, user("four")))
    assert texts(stored) == ["the sum", "four"]
    assert set(stored.losses) == {
        "dropped: 2 messages before the program's own summary of them",
        "dropped: 1 messages that were taken back in the program itself",
    }


def test_codex_keeps_what_the_user_said_and_lists_what_it_puts_in(tmp_path: Path) -> None:
    told = {"internal_chat_message_metadata_passthrough": {"content_item_kinds": ["environments.environment_context"]}}
    stored = read("codex", tmp_path, codex(user("in front", **told), user("<environment_context>\n</x>"), user("one")))
    assert texts(stored) == ["one"]
    assert stored.losses == ("dropped: 2 notes of the program to its model",)


# As sessions ----------------------------------------------------------------------------------------------------------


def home_with(path: Path) -> dict[str, str]:
    call = [{"type": "tool_use", "id": "c", "name": "Bash", "input": {"command": "touch ran"}}]
    write(path / PLACES["claude"], claude(("user", "", f"my key is {SECRET}"), ("assistant", "0", call)))
    return {"CLAUDE_CONFIG_DIR": str(path), "MY_API_KEY": SECRET}


def test_what_is_imported_is_redacted_and_nothing_of_it_is_run(
    backplane_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in home_with(tmp_path / "store").items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert main(["sessions", "import", "--from", "claude", "last", "--backend", "shell"]) == 0
    id = capfd.readouterr().out.strip()
    path = backplane_home / "sessions" / f"{id}.json"
    file = sessions.read(path)
    assert SECRET not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert [(turn.run_id, turn.provider, turn.stop_reason) for turn in file.turns] == [(None, "import:claude", "error")]
    assert not list(tmp_path.rglob("ran"))
    assert main(["sessions", "show", id]) == 0
    shown = capfd.readouterr().out
    assert "without a run" in shown
