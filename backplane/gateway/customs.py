"""Sends custom tools, which take a text, as functions, which take an object, to services that know only functions.

Codex declares custom tools for its newest models in groups, inside an item of the input. They become functions with one
member, `input`, and the model's calls of them become custom calls again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects.common import kind_of, read_arguments
from backplane.dialects.ir import (
    Conversation,
    Message,
    Part,
    PartDelta,
    PartStarted,
    PartStopped,
    StreamEnded,
    StreamEvent,
    ToolOutput,
    ToolUse,
)
from backplane.dialects.limits import FREE_TEXT, as_function

(MEMBER,) = FREE_TEXT["required"]


def lifted(document: dict[str, Any]) -> dict[str, Any]:
    """Return a Responses request with all its tools in `tools`, also those in groups and those inside the input.

    If several tools have the same name, the first is kept and the others are not offered.
    """
    given = document.get("input")
    items = given if isinstance(given, list) else []
    more = [tool for item in items if kind_of(item) == "additional_tools" for tool in _tools(item)]
    tools = _tools(document)
    if not more and not any(kind_of(tool) == "namespace" for tool in tools):
        return document
    once: dict[Any, Any] = {}
    for tool in _flat([*tools, *more]):
        once.setdefault(str(tool.get("name", len(once))), tool)
    rest = [item for item in items if kind_of(item) != "additional_tools"]
    return {**document, "tools": list(once.values()), **({"input": rest} if items else {})}


def _flat(tools: Sequence[Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for tool in tools:
        found += _flat(_tools(tool)) if kind_of(tool) == "namespace" else [tool] if isinstance(tool, dict) else []
    return found


def _tools(value: dict[str, Any]) -> list[Any]:
    found = value.get("tools")
    return found if isinstance(found, list) else []


def functions_only(conversation: Conversation) -> tuple[Conversation, frozenset[str]]:
    """Return a conversation with its custom tools, calls and results as functions, and the names of these tools."""
    names = frozenset(tool.name for tool in conversation.tools if tool.kind == "custom")
    if not names and not any(_is_custom(part) for message in conversation.messages for part in message.parts):
        return conversation, names
    tools = tuple(
        msgspec.structs.replace(as_function(tool), ext={}, payload=None) if tool.kind == "custom" else tool
        for tool in conversation.tools
    )
    messages = tuple(map(_message, conversation.messages))
    return msgspec.structs.replace(conversation, tools=tools, messages=messages, raw=None), names


def _is_custom(part: Part) -> bool:
    return isinstance(part, ToolUse | ToolOutput) and part.kind == "custom"


def _message(message: Message) -> Message:
    if not any(map(_is_custom, message.parts)):
        return message
    return msgspec.structs.replace(message, parts=tuple(map(_part, message.parts)))


def _part(part: Part) -> Part:
    if isinstance(part, ToolUse) and part.kind == "custom":
        return msgspec.structs.replace(part, kind="function", input={MEMBER: part.input}, text=None, ext={})
    if isinstance(part, ToolOutput) and part.kind == "custom":
        return msgspec.structs.replace(part, kind="function")
    return part


class CustomCalls:
    """Wraps a stream reader, and returns calls of custom tools as custom calls; each comes whole, at its end.

    Args:
        reader: the stream reader of the service's dialect.
        names: names of the request's custom tools.
    """

    def __init__(self, reader: Any, names: frozenset[str]) -> None:
        self._reader, self._names = reader, names
        self._open: dict[tuple[int, int], tuple[ToolUse, list[str]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def read(self, chunk: Json) -> list[StreamEvent]:
        """Return the events of a chunk."""
        return self._changed(self._reader.read(chunk))

    def finish(self, *, done: bool = False) -> list[StreamEvent]:
        """Return the events at the stream's end."""
        return self._changed(self._reader.finish(done=done))

    def _changed(self, events: list[StreamEvent]) -> list[StreamEvent]:
        return [made for event in events for made in self._event(event)]

    def _event(self, event: StreamEvent) -> list[StreamEvent]:
        if isinstance(event, PartStarted) and isinstance(event.part, ToolUse) and event.part.name in self._names:
            self._open[event.choice, event.index] = (event.part, [])
            return []
        if isinstance(event, PartDelta | PartStopped) and (event.choice, event.index) in self._open:
            return self._piece(event)
        if isinstance(event, StreamEnded) and event.answer is not None:
            return [StreamEnded(msgspec.structs.replace(event.answer, candidates=tuple(
                msgspec.structs.replace(one, message=msgspec.structs.replace(
                    one.message, parts=tuple(self._part(part) for part in one.message.parts)))
                for one in event.answer.candidates), raw=None))]  # fmt: skip
        return [event]

    def _piece(self, event: PartDelta | PartStopped) -> list[StreamEvent]:
        key = (event.choice, event.index)
        part, texts = self._open[key]
        if isinstance(event, PartDelta):
            if event.field == "arguments":
                texts.append(event.text)
            return []
        del self._open[key]
        whole = event.part if isinstance(event.part, ToolUse) else None
        if whole is None:
            text = "".join(texts)
            whole = part if not text else msgspec.structs.replace(part, text=text, input=read_arguments(text))
        made = self._part(whole)
        return [PartStarted(event.index, made, event.choice), PartStopped(event.index, made, event.choice)]

    def _part(self, part: Part) -> Part:
        """Return a call of a custom tool as a custom call; if its arguments are no object, it stays unchanged."""
        if not isinstance(part, ToolUse) or part.name not in self._names or not isinstance(part.input, dict):
            return part
        text = part.input.get(MEMBER)
        if not isinstance(text, str):
            text = msgspec.json.encode(part.input).decode()
        return msgspec.structs.replace(part, kind="custom", input=text, text=text)
