"""Deltas add up to the message that follows, or an event takes them back: wherever an agent's stream breaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane.appserver.story import Story as AppServerStory
from backplane.contract.events import AgentEvent, Answer, RetryReported, carried
from backplane.streamjson.story import Story as StreamJsonStory
from tests.folded import fold

TS = "2026-01-15T12:00:00.000Z"
PIECES = st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=6)
BREAKS = st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["silent", "told", "whole", "same id"])), max_size=3)


def claude_answer(id: str, pieces: list[str], *, ends: bool = True) -> Iterator[dict[str, Any]]:
    """One answer as the agent streams it: its last three messages are the whole block, the reason, the end."""

    def stream(**event: Any) -> dict[str, Any]:
        return {"type": "stream_event", "event": event, "parent_tool_use_id": None}

    yield stream(type="message_start", message={"id": id, "usage": {"input_tokens": 1}})
    yield stream(type="content_block_start", index=0, content_block={"type": "text", "text": ""})
    for piece in pieces:
        yield stream(type="content_block_delta", index=0, delta={"type": "text_delta", "text": piece})
    whole = {"id": id, "content": [{"type": "text", "text": "".join(pieces)}]}
    yield {"type": "assistant", "message": whole, "parent_tool_use_id": None}
    if ends:
        yield stream(type="message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 1})
        yield stream(type="message_stop")


def claude_messages(pieces: list[str], breaks: list[tuple[int, str]]) -> Iterator[dict[str, Any]]:
    for number, (size, how) in enumerate(breaks):
        id = "m" if how == "same id" else f"m-{number}"
        yield from list(claude_answer(id, pieces, ends=False))[: size + 1]
        if how == "told":
            yield {"type": "system", "subtype": "api_retry", "attempt": 1, "error_status": 529}
    if breaks and breaks[-1][1] == "whole":  # Asked again without a stream.
        whole = {"id": "m-last", "content": [{"type": "text", "text": "".join(pieces)}]}
        yield {"type": "assistant", "message": whole, "parent_tool_use_id": None}
    else:
        yield from claude_answer("m" if breaks and breaks[-1][1] == "same id" else "m-last", pieces)


@given(PIECES, BREAKS)
def test_what_a_broken_answer_of_claude_said_is_taken_back(pieces: list[str], breaks: list[tuple[int, str]]) -> None:
    story = StreamJsonStory(lambda: TS, "/w", {})
    events = [event for message in claude_messages(pieces, breaks) for event in story.take(message)]
    assert fold(events) == ["".join(pieces)]


def codex_answer(item: str, pieces: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for piece in pieces:
        yield "item/agentMessage/delta", {"itemId": item, "delta": piece}
    yield "item/completed", {"item": {"type": "agentMessage", "id": item, "text": "".join(pieces)}}


def codex_messages(pieces: list[str], breaks: list[tuple[int, str]]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "turn/started", {"turn": {"id": "t"}}
    for number, (size, _) in enumerate(breaks):
        yield from list(codex_answer(f"i-{number}", pieces))[:size]
        yield "error", {"willRetry": True, "error": {"message": "stream disconnected"}}
    yield from codex_answer("i-last", pieces)
    used = {"inputTokens": 1, "outputTokens": 1, "cachedInputTokens": 0}
    yield "thread/tokenUsage/updated", {"turnId": "t", "tokenUsage": {"last": used}}


@given(PIECES, BREAKS)
def test_what_a_broken_answer_of_codex_said_is_taken_back(pieces: list[str], breaks: list[tuple[int, str]]) -> None:
    story = AppServerStory(lambda: TS, "/w")
    events = [event for message in codex_messages(pieces, breaks) for event in story.take(*message)]
    assert fold(events) == ["".join(pieces)]


@pytest.mark.parametrize("agent", ["claude", "codex"])
def test_an_answer_that_is_whole_is_never_taken_back(agent: str) -> None:
    events: list[AgentEvent] = []
    if agent == "claude":
        story = StreamJsonStory(lambda: TS, "/w", {})
        for answer in (claude_answer("m-1", ["a"]), claude_answer("m-2", ["b"])):
            events += [event for message in answer for event in story.take(message)]
    else:
        app = AppServerStory(lambda: TS, "/w")
        messages = [*codex_messages(["a"], []), ("error", {"willRetry": True, "error": {"message": "429"}})]
        messages += [*codex_messages(["b"], [])]
        events = [event for message in messages for event in app.take(*message)]
    assert fold(events) == ["a", "b"]
    assert not any(event.body.get("takes_back") for event in map(carried, events) if isinstance(event, RetryReported))


def test_a_retry_says_what_it_takes_back_and_only_then() -> None:
    answer = Answer()
    assert answer.retry({"reason": "x"}, ts=TS, message="asked again").ext == {"retry": {"reason": "x"}}
    answer.said = 2
    told = answer.retry({"reason": "x"}, ts=TS, message="asked again")
    assert told.ext == {"retry": {"reason": "x", "takes_back": 2}}
    assert told.message == "asked again; what it said of this answer does not count"
    assert answer.said == 0
