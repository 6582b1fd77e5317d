"""Chooses the turn of a script that answers a request: conditions first, then the queue.

Counts what was played; not safe for several threads at once, the server takes a lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from backplane.contract.canonical import Json
from backplane.testing.frames import json_text
from backplane.testing.script import Script, When
from backplane.upstream.endpoint import ProtocolName

MISSING: Final = object()
HISTORY: Final = {"openai_responses": "input", "gemini_ai_studio": "contents"}
"""Member of a request that has the conversation; `messages` in the other protocols."""
OF_THE_MODEL: Final = ("assistant", "model", "function_call", "custom_tool_call", "reasoning")
"""Roles and types of the model's own messages."""
LABELS: Final = ("type", "role", "id", "call_id", "tool_call_id", "tool_use_id")
"""Members that are no text of a message."""
LIMITS: Final = (
    "/max_tokens",
    "/max_completion_tokens",
    "/max_output_tokens",
    "/generationConfig/maxOutputTokens",
    "/generation_config/max_output_tokens",
)


class RequestTarget(NamedTuple):
    """The facts of a request that a condition may look at."""

    protocol: ProtocolName | None
    asks: str
    model: str
    stream: bool
    body: Json
    key: str | None


class Plot:
    """A script while it is played."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._played = [0] * len(script.turns)

    def choose(self, question: RequestTarget) -> int | None:
        """Return the place of the turn that answers, counted as played, or None if no turn is left."""
        turns = self.script.turns
        rows = [(i, turn) for i, turn in enumerate(turns) if turn.times is None or self._played[i] < turn.times]
        fits = (place for place, turn in rows if turn.when is not None and holds(turn.when, question))
        queue = (place for place, turn in rows if turn.when is None)
        place = next(fits, next(queue, None))
        if place is not None:
            self._played[place] += 1
        return place


def holds(when: When, question: RequestTarget) -> bool:
    """Return True if every condition that is set holds."""
    body = question.body
    limits = [value for value in (at(body, pointer) for pointer in LIMITS) if isinstance(value, int)]
    checks = (
        when.last is None or when.last in last_words(question),
        when.anywhere is None or when.anywhere in json_text(body),
        when.tools is None or when.tools == (at(body, "/tools") not in (MISSING, None, [])),
        when.has is None or at(body, when.has) is not MISSING,
        when.is_text is None or isinstance(at(body, when.is_text), str),
        when.max_tokens is None or any(limit <= when.max_tokens for limit in limits),
        when.stream is None or when.stream == question.stream,
    )
    return all(checks)


def at(body: Json, pointer: str) -> Any:
    """Return the value at a JSON pointer, or `MISSING`."""
    here: Any = body
    for step in pointer.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(here, list) and key.isdigit() and int(key) < len(here):
            here = here[int(key)]
        elif isinstance(here, Mapping) and key in here:
            here = here[key]
        else:
            return MISSING
    return here


def last_words(question: RequestTarget) -> str:
    """Return the texts after the model's last message, one per line."""
    history = at(question.body, f"/{HISTORY.get(question.protocol or '', 'messages')}")
    if isinstance(history, str):
        return history
    tail: list[Any] = []
    for message in reversed(history if isinstance(history, list) else []):
        if isinstance(message, Mapping) and {message.get("role"), message.get("type")} & set(OF_THE_MODEL):
            break
        tail.append(message)
    return "\n".join(strings(tail[::-1]))


def strings(value: Any) -> Iterator[str]:
    """Yield the texts inside a JSON value, without labels and ids."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in LABELS:
                yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)
