"""Gemini CLI's own record, without the program: what it says of tokens, outputs and words, and how it is moved.

What only the real program can show is in `tests/all/vendors/`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backplane.agents.acp.reader import EventReader
from backplane.agents.gemini.record import Output, Record, read_output
from backplane.contract.events import AgentEvent, AssistantMessage, CommandExecuted, ToolCall, ToolResult
from backplane.protocol.jsonrpc import Notification
from tests.test_deltas import fold

ID = "0a1b2c3d-0000-4000-8000-000000000000"


@pytest.fixture
def record(tmp_path: Path) -> Record:
    made = Record(tmp_path)
    made.id = ID
    write(made, {"sessionId": ID})
    return made


def write(record: Record, *lines: Any, end: str = "\n") -> None:
    path = record.home / "tmp" / "work" / "chats" / f"session-2026-11-23T10-00-{ID[:8]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("\n".join(json.dumps(line) for line in lines) + end)


def answer(id: str, content: str = "", **tokens: int) -> dict[str, Any]:
    return {"id": id, "type": "gemini", "content": content, "tokens": tokens}


def said(id: str, **response: str) -> dict[str, Any]:
    part = {"functionResponse": {"id": id, "name": "run_shell_command", "response": response}}
    return {"id": f"u{id}", "type": "user", "content": [part]}


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("Output: hello", Output("hello", 0)),
        ("Output: (empty)\nProcess Group PGID: 12", Output("", 0)),
        (
            "<untrusted_context>\nOutput: a\nb\nExit Code: 3\nProcess Group PGID: 12\n</untrusted_context>",
            Output("a\nb", 3),
        ),
        ("Output: Exit Code: 9\nExit Code: -1", Output("Exit Code: 9", -1)),
        ("Output: x\nSignal: 9", Output("x", None)),
        ("something else", Output("something else", 0)),
    ],
)
def test_a_commands_answer_has_its_output_and_its_code(text: str, output: Output) -> None:
    assert read_output("run_shell_command", {"output": text}) == output
    assert read_output("read_file", {"output": text}) == Output(text)


def test_each_request_is_counted_once_whatever_is_written_again(record: Record) -> None:
    write(record, answer("a", input=100, output=5, cached=20, thoughts=3), {"type": "gemini", "toolCalls": [1]})
    write(record, answer("a", input=100, output=5), answer("b", input=True), {"$set": {}}, "no object")
    record.read()
    usage, unknown = record.requests
    assert (usage.input, usage.output, usage.cache_read, usage.reasoning) == (100, 8, 20, 3)
    assert unknown.input is None


def test_half_a_line_waits_and_what_was_there_before_is_left_out(record: Record) -> None:
    write(record, answer("old", "before", input=1))
    record.skip()
    write(record, answer("a", "now", input=2), end="")
    record.read()
    assert record.requests == []
    write(record, end="\n")
    record.read()
    assert ([usage.input for usage in record.requests], record.words()) == ([2], "now")


def test_a_conversation_is_moved_and_copied_whole(record: Record, tmp_path: Path) -> None:
    write(record, answer("a", "so far", input=1))
    (tmp_path / "tmp" / "other" / "chats").mkdir(parents=True)
    empty = tmp_path / "tmp" / "other" / "chats" / f"session-2026-11-23T10-01-{ID[:8]}.jsonl"
    empty.write_text("{}\n")
    (tmp_path / "projects.json").write_text('{"projects": {"/old": "work"}, "more": 1}')
    copy = record.copy(ID)
    record.claim(ID, "/new/place")
    assert not empty.exists()
    (file,) = tmp_path.glob(f"tmp/c-{ID[:8]}/chats/*")
    assert "so far" in file.read_text()
    assert (tmp_path / "tmp" / f"c-{ID[:8]}" / ".project_root").read_text() == "/new/place"
    known = json.loads((tmp_path / "projects.json").read_text())
    assert known == {"projects": {"/old": "work", "/new/place": f"c-{ID[:8]}"}, "more": 1}
    (other,) = tmp_path.glob(f"tmp/*/chats/*-{copy[:8]}.jsonl")
    assert (copy in other.read_text(), ID in other.read_text()) == (True, False)


# With the protocol beside it ------------------------------------------------------------------------------------------


def update(**body: Any) -> Notification:
    return Notification("session/update", {"update": body})


@pytest.fixture
def reader(record: Record) -> EventReader:
    return EventReader(lambda: "2026-11-23T00:00:00.000Z", "/w", {"run_shell_command": "bash"}, record=record)


def call(id: str, status: str) -> Notification:
    return update(sessionUpdate="tool_call", toolCallId=id, kind="execute", title="ls", status=status)


def of(kind: type, events: list[AgentEvent]) -> list[Any]:
    return [event for event in events if type(event) is kind]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_command_is_told_with_the_output_of_the_record(reader: EventReader, record: Record, is_late: bool) -> None:
    id = "run_shell_command__call_1"
    write(record, answer("a", input=7))
    call_of, events = reader.asked({"toolCallId": id, "kind": "execute", "title": "ls"})
    assert (reader.spent.requests, reader.goes_on, call_of.input["command"]) == (1, True, "ls")
    if not is_late:
        write(record, said(id, output="Output: walrus\nExit Code: 3"))
    events += reader.read(call(id, "completed"))
    assert len(of(ToolResult, events)) == (not is_late)
    if is_late:
        write(record, said(id, output="Output: walrus\nExit Code: 3"))
    events += reader.end("end_turn")
    assert len(of(ToolCall, events)) == 1
    (ran,) = of(CommandExecuted, events)
    assert (ran.command, ran.exit_code, ran.output_preview) == ("ls", 3, "walrus")
    assert [event.output for event in of(ToolResult, events)] == ["walrus"]


def test_an_output_that_is_in_no_record_ends_nothing_for_ever(reader: EventReader) -> None:
    events = reader.read(call("run_shell_command__call_1", "failed"))
    events += reader.end("end_turn")
    assert len(of(ToolResult, events)) == 1
    assert not reader.at_work


def says(reader: EventReader, *pieces: str) -> list[AgentEvent]:
    events: list[AgentEvent] = []
    for piece in pieces:
        content = {"type": "text", "text": piece}
        events += reader.read(update(sessionUpdate="agent_message_chunk", content=content))
    return events


@pytest.mark.parametrize("end", ["", "\n", " \n\n"])
def test_words_that_the_agent_asked_for_again_are_taken_back(reader: EventReader, record: Record, end: str) -> None:
    events = says(reader, "half an ans", "who", f"le{end}")
    write(record, answer("a", "whole", input=7))
    events += reader.end("end_turn")
    assert [event.text for event in of(AssistantMessage, events)] == [f"whole{end}"]
    assert fold(events) == [f"whole{end}"]


def test_words_that_the_record_has_not_are_of_a_broken_stream(reader: EventReader, record: Record) -> None:
    write(record, answer("a", input=7))
    events = [*says(reader, "half an ans", "half an answ"), *reader.recorded()]
    assert reader.is_broken
    events += [*reader.take_back(), *reader.end("end_turn")]
    assert fold(events) == []
    assert not reader.spoke


@pytest.mark.parametrize("tokens", [None, {}, {"input": 7, "output": 0}])
def test_words_without_tokens_after_an_answer_with_them_are_of_a_broken_stream(
    reader: EventReader, record: Record, tokens: dict[str, int] | None
) -> None:
    write(record, answer("a", input=7, output=1))
    says(reader, "half an ans")
    write(record, {**answer("b", "half an ans"), "tokens": tokens})
    reader.recorded()
    assert reader.is_broken


def test_an_answer_of_a_service_that_tells_no_tokens_is_whole(reader: EventReader, record: Record) -> None:
    says(reader, "whole")
    write(record, {**answer("a", "whole"), "tokens": None})
    reader.recorded()
    assert not reader.is_broken


def test_words_that_are_recorded_before_they_come_are_no_broken_stream(reader: EventReader, record: Record) -> None:
    write(record, answer("a", "whole", input=7))
    reader.asked({"toolCallId": "run_shell_command__call_1", "kind": "execute", "title": "ls"})
    says(reader, "whole")
    reader.recorded()
    assert not reader.is_broken
