"""Changes a request in a vendor's JSON: adds members before the first attempt, leaves out parts after a refusal.

Pure functions that accept a value of any type, and return a value that they do not know unchanged. `ladder` decides
when each is used, and finds the changed members by comparing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from backplane.dialects.schemas import every_schema

Request = dict[str, Any]
Change = Callable[[Any], Any]
"""Function that returns a JSON value (a request, or a part of one) with a change."""

ANSWER_TOKENS: Final = 4096
"""Default limit of an answer in tokens; the oldest models in service allow no more."""

PARALLEL_SPELLINGS: Final = ("parallel_tool_calls", "parallelToolCalls")


def without(*names: str) -> Change:
    """Make a change that leaves members of an object out."""
    return lambda found: (
        {name: value for name, value in found.items() if name not in names} if isinstance(found, dict) else found
    )


def at(name: str, change: Change) -> Change:
    """Make a change of an object by a change of one member that it has."""
    return lambda found: {**found, name: change(found[name])} if isinstance(found, dict) and name in found else found


def each(name: str, change: Change) -> Change:
    """Make a change that applies `change` to each element of an object's list `name`."""
    return at(name, lambda found: [change(one) for one in found] if isinstance(found, list) else found)


def in_sequence(*changes: Change) -> Change:
    """Make one change of several."""

    def all_of(value: Any) -> Any:
        for change in changes:
            value = change(value)
        return value

    return all_of


# Before the first attempt ---------------------------------------------------------------------------------------------


def ask_usage(request: Request) -> Request:
    """Ask Chat Completions for counters in a stream."""
    found = request.get("stream_options")
    options = found if isinstance(found, dict) else {}
    return {**request, "stream_options": {"include_usage": True, **options}} if request.get("stream") else request


def set_limit(request: Request) -> Request:
    """Set the limit of the answer's length where Messages demands one."""
    return {"max_tokens": ANSWER_TOKENS, **request}


def one_call_at_a_time(request: Request) -> Request:
    """Ask for one call a turn if the request has tools and does not mention parallel calls in either spelling."""
    if not request.get("tools") or any(name in request for name in PARALLEL_SPELLINGS):
        return request
    return {**request, "parallel_tool_calls": False}


def _set_detail(part: Any) -> Any:
    return {"detail": "auto", **part} if isinstance(part, dict) and part.get("type") == "input_image" else part


set_detail: Final = each("input", in_sequence(each("content", _set_detail), each("output", _set_detail)))
"""Set the missing `detail` of images to `auto`: the types of Responses require it, though a service may not."""


def _strict_tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("parameters"), dict):
        return tool
    closed, _ = every_schema(tool["parameters"], _closed)
    # A service refuses a strict schema with an optional member, so `strict` is true only if there is none.
    return {"strict": is_strict(closed), **tool, "parameters": closed}


strict_tools: Final = each("tools", _strict_tool)
"""Forbid further members in the objects of Responses tools; set a missing `strict`, true if all are required."""


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    is_open = _is_object(schema) and "additionalProperties" not in schema
    return {**schema, "additionalProperties": False} if is_open else schema


def _is_object(schema: dict[str, Any]) -> bool:
    kind = schema.get("type")
    return kind == "object" or (isinstance(kind, list) and "object" in kind) or "properties" in schema


def is_strict(schema: Any) -> bool:
    """Return True for a strict schema: each member is required, and no others are allowed."""
    is_open = []

    def look(node: dict[str, Any]) -> dict[str, Any]:
        inner = node.get("properties")
        optional = set(inner if isinstance(inner, dict) else ()) - set(node.get("required") or ())
        is_open.append(_is_object(node) and (node.get("additionalProperties") is not False or bool(optional)))
        return node

    every_schema(schema, look)
    return not any(is_open)


# Tools ----------------------------------------------------------------------------------------------------------------


def _declared(tool: Any) -> str | None:
    """Return the member that holds a list of tools in an entry of Gemini's list; None in other vendors' entries."""
    names = ("functionDeclarations", "function_declarations")
    return next((name for name in names if isinstance(tool, dict) and isinstance(tool.get(name), list)), None)


def _tool_name(tool: Any) -> str | None:
    inner = tool.get("function") if isinstance(tool, dict) else None
    found = inner if isinstance(inner, dict) else tool
    name = found.get("name") if isinstance(found, dict) else None
    return name if isinstance(name, str) else None


def offered_tools(request: Request) -> list[tuple[tuple[int, ...], str]]:
    """Return the places of a request's tools in its lists, and their names; Gemini has lists inside the list."""
    found: list[tuple[tuple[int, ...], str | None]] = []
    for number, tool in enumerate(request.get("tools") or ()):
        member = _declared(tool)
        if member is None:
            found.append(((number,), _tool_name(tool)))
        else:
            found += [((number, place), _tool_name(one)) for place, one in enumerate(tool[member])]
    return [(places, name) for places, name in found if name is not None]


TOOL_CHOICES: Final = ("tool_choice", "toolConfig", "tool_config")
"""Members of a request that may force one tool."""


def without_tool(name: str) -> Change:
    """Make a change of a request that leaves one tool out, and a choice that forces it."""

    def left(tools: list[Any]) -> list[Any]:
        found = []
        for tool in tools:
            member = _declared(tool)
            kept = tool if member is None else {**tool, member: left(tool[member])}
            if _tool_name(kept) != name and (member is None or kept[member]):
                found.append(kept)
        return found

    def drop(request: Request) -> Request:
        choices = [one for one in TOOL_CHOICES if f'"{name}"' in _json(request.get(one))]
        return {**without(*choices)(request), "tools": left(request["tools"])} if request.get("tools") else request

    return drop


# Words in place of parts that a service does not take -----------------------------------------------------------------


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _left_out(what: str) -> str:
    return f"[{what} left out: the service does not take it]"


def _said_call(name: Any, arguments: Any) -> str:
    return f"[called the tool {name} with {arguments if isinstance(arguments, str) else _json(arguments)}]"


def _said_result(content: Any) -> str:
    return f"[result of the tool: {content if isinstance(content, str) else _json(content)}]"


def _flat(content: Any) -> Any:
    return "\n".join(map(_part_text, content)) if isinstance(content, list) else content


def _part_text(part: Any) -> str:
    if not isinstance(part, dict):
        return str(part)
    texts = [part[name] for name in ("text", "refusal") if isinstance(part.get(name), str)]
    return texts[0] if texts else _left_out(str(part.get("type", "part")))


def _flat_texts(content: Any) -> Any:
    parts = content if isinstance(content, list) else ()
    has_more = any(not isinstance(part, dict) or part.get("type") not in ("text", "refusal") for part in parts)
    return content if has_more else _flat(content)


flat_messages: Final = each("messages", at("content", _flat))
"""Chat messages of several parts become plain text; a note replaces each part without text."""
flat_texts: Final = each("messages", at("content", _flat_texts))
"""Chat messages of texts alone become plain text; nothing of them is lost."""

_not_strict: Final = in_sequence(
    without("strict"), *(at(name, without("strict")) for name in ("function", "json_schema", "format"))
)
not_strict: Final = in_sequence(
    each("tools", _not_strict), *(at(name, _not_strict) for name in ("response_format", "text"))
)
"""Ask for no strict schemas: of tools, and of the answer."""


def _blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


as_blocks: Final = in_sequence(at("system", _blocks), each("messages", at("content", _blocks)))
"""Write the texts of a Messages request, system and contents, as lists of blocks."""


def _claude_no_media(block: Any) -> Any:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind in ("image", "document"):
        return {"type": "text", "text": _left_out(kind)}
    return each("content", _claude_no_media)(block) if kind == "tool_result" else block


def _claude_no_tools(block: Any) -> Any:
    kind = str(block.get("type")) if isinstance(block, dict) else ""
    if kind == "tool_use":
        return {"type": "text", "text": _said_call(block.get("name"), block.get("input"))}
    if kind == "tool_result":
        return {"type": "text", "text": _said_result(_flat(block.get("content")) or "")}
    is_server = kind == "server_tool_use" or kind.endswith("_tool_result")
    return {"type": "text", "text": _left_out(kind)} if is_server else block


claude_no_media: Final = each("messages", each("content", _claude_no_media))
claude_no_tools: Final = in_sequence(
    without("tools", "tool_choice"), each("messages", each("content", _claude_no_tools))
)
"""Leave out the tools of a Messages request; calls and results stay in the history as words."""


def _member(part: Any, *names: str) -> Any:
    """Return the first of these members, in either spelling of Gemini; None if the part has none."""
    return next((part[name] for name in names if name in part), None) if isinstance(part, dict) else None


def _gemini_no_media(part: Any) -> Any:
    if _member(part, "inlineData", "inline_data", "fileData", "file_data") is not None:
        return {"text": _left_out("media")}
    return in_sequence(*(at(name, without("parts")) for name in ("functionResponse", "function_response")))(part)


def _gemini_no_tools(part: Any) -> Any:
    if isinstance(call := _member(part, "functionCall", "function_call"), dict):
        return {"text": _said_call(call.get("name"), call.get("args") or {})}
    if isinstance(result := _member(part, "functionResponse", "function_response"), dict):
        return {"text": _said_result(result.get("response"))}
    return part


gemini_no_media: Final = each("contents", each("parts", _gemini_no_media))
gemini_no_tools: Final = in_sequence(
    without("tools", "toolConfig", "tool_config"), each("contents", each("parts", _gemini_no_tools))
)
gemini_no_defaults: Final = without(
    "generationConfig", "generation_config", "safetySettings", "safety_settings", "labels", "serviceTier"
)
"""Leave out the members of a Gemini request for which the service has defaults."""


def stream_instead(request: Request) -> Request:
    """Ask for a stream where one document was asked for."""
    return {**request, "stream": True}
