"""Whatever an answer goes through on its way, the pieces that stand are the message that follows.

Every reader of a vendor's stream is given answers that break off anywhere, and what it tells is folded: pieces are
joined, and dropped where an event takes them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane.agents.acp.reader import EventReader as AcpReader
from backplane.agents.claude.reader import EventReader as ClaudeReader
from backplane.agents.codex.reader import EventReader as CodexReader
from backplane.contract.deltas import Deltas, take_back, taken_back
from backplane.contract.events import AgentEvent, AssistantDelta, AssistantMessage, RetryReported, carried
from backplane.protocol.jsonrpc import Notification
from backplane.view.console import Look

NOW = "2026-01-15T12:00:00Z"


def fold(events: Iterable[AgentEvent]) -> list[str]:
    """The messages of a run, each held against its pieces; what is left at the end belongs to no message."""
    standing, messages = "", []
    for event in events:
        if isinstance(event, AssistantDelta):
            standing += event.text
        elif isinstance(event, AssistantMessage):
            assert standing in ("", event.text)
            standing = ""
            messages.append(event.text)
        elif taken_back(event):
            assert taken_back(event) == len(standing)
            standing = ""
    return messages


def sent(events: Iterable[AgentEvent]) -> list[AgentEvent]:
    """What a host sends when its work tells these."""
    deltas = Deltas()
    out: list[AgentEvent] = []
    for event in events:
        chars = deltas.take(event)
        out += [take_back("other_words", chars, ts=NOW)] if chars else []
        out.append(event)
    return out


# Streams that break ---------------------------------------------------------------------------------------------------

Broken = tuple[str, str]
"""What had come of an answer, and how it broke off."""


def claude(broken: list[Broken], whole: str, streamed: bool) -> list[AgentEvent]:
    reader = ClaudeReader(lambda: NOW, "/w", {})
    events: list[AgentEvent] = []

    def say(**event: Any) -> None:
        events.extend(reader.read(Notification("stream_event", {"event": event})))

    def begin(id: str, text: str) -> None:
        say(type="message_start", message={"id": id})
        say(type="content_block_start", index=0, content_block={"type": "text", "text": ""})
        for piece in text:
            say(type="content_block_delta", index=0, delta={"type": "text_delta", "text": piece})

    def end(**more: Any) -> None:
        say(type="content_block_stop", index=0)
        events.extend(reader.read(Notification("stream_event", {"event": {"type": "message_stop"}, **more})))

    for number, (text, how) in enumerate(broken):
        begin(f"m{number}", text)
        if how == "said":
            end(abandoned_blocks={"from_block_index": 0})
        elif how == "ended":
            end()
        elif how == "retried":
            end(abandoned_blocks={"from_block_index": 0})
            retry = {"subtype": "api_retry", "attempt": 1, "error_status": None}
            events += reader.read(Notification("system", retry))
    if streamed:
        begin("last", whole)
    body = {"id": "last", "content": [{"type": "text", "text": whole}]}
    events += reader.read(Notification("assistant", {"message": body, "parent_tool_use_id": None}))
    if streamed:
        end()
    return events


def codex(broken: list[Broken], whole: str, streamed: bool) -> list[AgentEvent]:
    reader = CodexReader(lambda: NOW, "/w")
    reader.thread = "t"
    events: list[AgentEvent] = []

    def say(method: str, **params: Any) -> None:
        events.extend(reader.read(Notification(method, {"threadId": "t", "turnId": "u", **params})))

    def begin(id: str, text: str) -> None:
        say("item/started", item={"type": "agentMessage", "id": id, "text": ""})
        for piece in text:
            say("item/agentMessage/delta", itemId=id, delta=piece)

    say("turn/started", turn={"id": "u"})
    for number, (text, how) in enumerate(broken):
        begin(f"i{number}", text)
        if how in ("said", "retried"):
            say("error", willRetry=True, error={"message": "again"})
        elif how == "ended":
            say("item/completed", item={"type": "agentMessage", "id": f"i{number}", "text": ""})
    if streamed:
        begin("last", whole)
    say("item/completed", item={"type": "agentMessage", "id": "last", "text": whole})
    return events


def update(body: Any) -> Notification:
    return Notification("session/update", {"update": body})


def acp(broken: list[Broken], whole: str, streamed: bool) -> list[AgentEvent]:
    """Few agents say by this protocol that a stream broke; else what had come stands, and the message has it."""
    reader = AcpReader(lambda: NOW, "/w", {})
    events: list[AgentEvent] = []
    for piece in [*(text for text, _ in broken), *(whole if streamed else [whole])]:
        content = {"type": "text", "text": piece}
        events += reader.read(update({"sessionUpdate": "agent_message_chunk", "content": content}))
    return [*events, *reader.end("end_turn")]


READERS = {"claude": claude, "codex": codex, "acp": acp}

breaks = st.lists(
    st.tuples(st.text(max_size=6), st.sampled_from(["said", "ended", "silent", "retried"])), min_size=1, max_size=3
)


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@given(broken=breaks, whole=st.text(min_size=1, max_size=8), streamed=st.booleans())
def test_the_pieces_that_stand_are_the_message_that_follows(
    reader: Callable[[list[Broken], str, bool], list[AgentEvent]], broken: list[Broken], whole: str, streamed: bool
) -> None:
    messages = fold(reader(broken, whole, streamed))
    if reader is not acp:
        assert messages == [whole]


@pytest.mark.parametrize("reader", [claude, codex])
@pytest.mark.parametrize("how", ["said", "ended", "silent", "retried"])
@pytest.mark.parametrize("streamed", [True, False])
def test_an_answer_that_breaks_anywhere_is_taken_back_once(
    reader: Callable[[list[Broken], str, bool], list[AgentEvent]], how: str, streamed: bool
) -> None:
    for cut in range(1, 6):
        events = reader([("never mind this"[:cut], how)], "the answer", streamed)
        assert fold(events) == ["the answer"]
        assert [taken_back(event) for event in events if taken_back(event)] == [cut]


def test_a_message_with_other_words_takes_its_pieces_back() -> None:
    told = [AssistantDelta(ts=NOW, text="half a "), AssistantDelta(ts=NOW, text="word")]
    events = sent([*told, AssistantMessage(ts=NOW, text="a word"), AssistantMessage(ts=NOW, text="and more")])
    assert fold(events) == ["a word", "and more"]
    (retry,) = [event for event in map(carried, events) if isinstance(event, RetryReported)]
    assert retry.body == {"reason": "other_words", "taken_back": 11}


def test_words_that_were_taken_back_are_followed_by_a_note_and_a_new_line() -> None:
    look = Look(False)
    told: list[AgentEvent] = [AssistantDelta(ts=NOW, text="never mind"), take_back("broken_stream", 10, ts=NOW)]
    told += [AssistantDelta(ts=NOW, text="never"), AssistantDelta(ts=NOW, text=" fear")]
    told.append(AssistantMessage(ts=NOW, text="never fear"))
    shown = "".join(look.event(carried(event)) for event in told)
    assert shown == "never mind\nnote: the stream broke: 10 characters of the answer are taken back\nnever fear\n"
