"""What a reader of a run has in hand: deltas put together, messages in place, what was taken back left out."""

from __future__ import annotations

from collections.abc import Iterable

from backplane.contract.events import AgentEvent, AssistantDelta, AssistantMessage, Reasoning, RetryReported, carried


def fold(events: Iterable[AgentEvent]) -> list[str]:
    """Return the messages of a run.

    Raises:
        AssertionError: deltas do not add up to the message that follows, or words of an answer are left over.
    """
    said: list[AgentEvent] = []
    for event in map(carried, events):
        if isinstance(event, RetryReported):
            back = event.body.get("takes_back", 0)
            assert 0 <= back <= len(said)
            del said[len(said) - back :]
        elif isinstance(event, AssistantDelta | AssistantMessage | Reasoning):
            said.append(event)
    messages, deltas = [], ""
    for event in said:
        if isinstance(event, AssistantMessage):
            assert deltas in ("", event.text), (deltas, event.text)
            messages.append(event.text)
            deltas = ""
        elif isinstance(event, AssistantDelta):
            deltas += event.text
    assert deltas == "", f"nobody says whether this counts: {deltas!r}"
    return messages
