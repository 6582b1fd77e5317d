"""Repairs calls whose arguments or name a service would refuse in the history of its next request.

Pure. Arguments that are one JSON object in a wrong spelling become that object. All others stay a text: the host
answers them with an error, and they go back wrapped in an object, as `dialects.translate` wraps them.
"""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects.ir import Conversation, Loss, Part, ToolOutput, ToolUse
from backplane.dialects.limits import ANY_WORD, Spelling

WRAPPED: Final = "arguments that are no JSON object stand in the member arguments"
RENAMED: Final = "the name of a call has letters or a length that are refused here; it is spelled in another way"
READ_DEEP_MAX: Final = 3
"""Most further times that a text is decoded if it contains JSON again; models encode arguments twice at most."""


def mended(input: Json, depth: int = 0) -> Json:
    """Return the object that wrongly spelt arguments stand for; arguments without one come back unchanged.

    These spellings are read: an empty text and null, for no arguments; raw line ends in strings; JSON inside a text;
    one object several times over.
    """
    if input is None:
        return {}
    if not isinstance(input, str) or depth > READ_DEEP_MAX:
        return input
    values = _values(input)
    if not values and not input.strip():
        return {}
    if not values or any(value != values[0] for value in values[1:]):
        return input
    found = mended(values[0], depth + 1)
    return found if isinstance(found, dict) else input


def _values(text: str) -> list[Any]:
    """Read several JSON values in a row; return an empty list if the text has anything else."""
    found, rest = [], text.strip()
    while rest:
        try:
            value, end = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            return []
        found.append(value)
        rest = rest[end:].lstrip()
    return found


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


_DECODER: Final = json.JSONDecoder(strict=False, parse_constant=_no_number)


def sendable(conversation: Conversation, tool_name: Spelling = ANY_WORD) -> tuple[Conversation, tuple[Loss, ...]]:
    """Return a conversation whose calls the service accepts, and a loss for each kind of change.

    Args:
        tool_name: spelling of tool names that the service accepts.
    """
    losses: dict[str, Loss] = {}

    def note(at: str, code: str, reason: str) -> None:
        name = conversation.dialect
        losses.setdefault(code, Loss(path=at, dialect=name, target=name, kind="degraded", code=code, reason=reason))

    def part_of(part: Part, at: str) -> Part:
        if not isinstance(part, ToolUse | ToolOutput) or part.kind != "function":
            return part
        if part.name is not None and tool_name is not ANY_WORD and (name := tool_name.fit(part.name)) != part.name:
            note(at, "tool_field", RENAMED)
            part = msgspec.structs.replace(part, name=name)
        if isinstance(part, ToolOutput):
            return part
        if isinstance(part.input, dict):
            # An empty text means an empty object in a model's call, and is refused in the history.
            is_empty = part.text is not None and not part.text.strip()
            return msgspec.structs.replace(part, text=None) if is_empty else part
        found = mended(part.input)
        note(at, "arguments", WRAPPED)
        return msgspec.structs.replace(
            part, input=found if isinstance(found, dict) else {"arguments": found}, text=None
        )

    messages = tuple(
        msgspec.structs.replace(message, parts=tuple(part_of(part, f"/messages/{place}") for part in message.parts))
        for place, message in enumerate(conversation.messages)
    )
    if messages == conversation.messages:
        return conversation, ()
    return msgspec.structs.replace(conversation, messages=messages), tuple(losses.values())
