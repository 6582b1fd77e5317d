"""Rewritten requests: additions before the first attempt, and parts left out for a service that refuses them.

Pure functions from a request to a request and the places of the changes; a request without a change comes back as the
same object. Each function knows one vendor's JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from backplane.dialects.schemas import MAPS

Request = dict[str, Any]
Rewritten = tuple[Request, tuple[str, ...]]
"""The request, and JSON pointers to the changes; no pointers: the same request."""
Rewrite = Callable[[Request], Rewritten]
Change = Callable[[Any], Any]
"""Changes one value of a request; a value without a need comes back unchanged."""

ANSWER_TOKENS: Final = 4096
"""Default limit of an answer in tokens; the oldest models in service allow no more."""

PARALLEL_SPELLINGS: Final = ("parallel_tool_calls", "parallelToolCalls")


def without(*names: str) -> Rewrite:
    """Make a rewrite that leaves members of the request out."""

    def drop(request: Request) -> Rewritten:
        found = tuple(f"/{name}" for name in names if name in request)
        return ({key: value for key, value in request.items() if key not in names} if found else request), found

    return drop


def in_sequence(*steps: Rewrite) -> Rewrite:
    """Make one rewrite of several."""

    def all_of(request: Request) -> Rewritten:
        paths: tuple[str, ...] = ()
        for step in steps:
            request, more = step(request)
            paths += more
        return request, paths

    return all_of


def each(place: str, change: Change) -> Rewrite:
    """Make a rewrite that changes elements of a list."""

    def over(request: Request) -> Rewritten:
        before, after = request.get(place), inside(place, change)(request)
        if after is request:
            return request, ()
        paths = tuple(f"/{place}/{i}" for i, one in enumerate(after[place]) if one != before[i])  # type: ignore[index]
        return after, paths

    return over


def inside(place: str, change: Change) -> Change:
    """Make a change of an object by a change of the elements of one of its lists; of anything else it makes none."""

    def over(holder: Any) -> Any:
        before = holder.get(place) if isinstance(holder, dict) else None
        if not isinstance(before, list):
            return holder
        after = [change(one) for one in before]
        return holder if after == before else {**holder, place: after}

    return over


# Before the first attempt ---------------------------------------------------------------------------------------------


def ask_usage(request: Request) -> Rewritten:
    """Ask Chat Completions for counters in a stream."""
    found = request.get("stream_options")
    options = found if isinstance(found, dict) else {}
    if not request.get("stream") or "include_usage" in options:
        return request, ()
    return {**request, "stream_options": {**options, "include_usage": True}}, ("/stream_options",)


def set_limit(request: Request) -> Rewritten:
    """Set the limit of the answer's length where Messages demands one."""
    if "max_tokens" in request:
        return request, ()
    return {**request, "max_tokens": ANSWER_TOKENS}, ("/max_tokens",)


def set_detail(request: Request) -> Rewritten:
    """Say how closely Responses looks at an image; its types demand the member, its service does not always."""

    def part_of(part: Any) -> Any:
        is_bare = isinstance(part, dict) and part.get("type") == "input_image" and "detail" not in part
        return {**part, "detail": "auto"} if is_bare else part

    return each("input", lambda item: inside("content", part_of)(inside("output", part_of)(item)))(request)


def one_call_at_a_time(request: Request) -> Rewritten:
    """Ask for one call a turn, where there are tools and the request says nothing of it in either spelling."""
    if not request.get("tools") or any(name in request for name in PARALLEL_SPELLINGS):
        return request, ()
    return {**request, "parallel_tool_calls": False}, ("/parallel_tool_calls",)


def strict_tools(request: Request) -> Rewritten:
    """Close the objects of Responses tools; a schema whose members are then all required is also called strict."""
    return each("tools", _strict_tool)(request)


def _strict_tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("parameters"), dict):
        return tool
    closed = _closed(tool["parameters"])
    # A service refuses as strict what has members that may be left out; what is required stays as it was said.
    return {**tool, "parameters": closed, **({} if "strict" in tool else {"strict": is_strict(closed)})}


INNER: Final = ("items", "anyOf", "oneOf", "allOf", "prefixItems", "not")
"""Members that are a schema, or a list of some."""


def _closed(schema: Any) -> Any:
    """Give every object of a schema `additionalProperties: false` where it says nothing of it."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for name, value in schema.items():
        if name in MAPS and isinstance(value, dict):
            out[name] = {key: _closed(one) for key, one in value.items()}
        else:
            out[name] = _closed(value) if name in INNER else value
    return {**out, "additionalProperties": False} if _is_object(out) and "additionalProperties" not in out else out


def _is_object(schema: dict[str, Any]) -> bool:
    kind = schema.get("type")
    return kind == "object" or (isinstance(kind, list) and "object" in kind) or "properties" in schema


def is_strict(schema: Any) -> bool:
    """Return True for a strict schema: each member is required, and no others are allowed."""
    if isinstance(schema, list):
        return all(is_strict(one) for one in schema)
    if not isinstance(schema, dict):
        return True
    inner = schema.get("properties")
    members: dict[str, Any] = inner if isinstance(inner, dict) else {}
    is_open = schema.get("additionalProperties") is not False or set(members) - set(schema.get("required") or ())
    if _is_object(schema) and is_open:
        return False
    named = schema.get("$defs")
    below = [schema[name] for name in INNER[:4] if name in schema]
    below += named.values() if isinstance(named, dict) else []
    return all(is_strict(one) for one in [*members.values(), *below])


# Tools ----------------------------------------------------------------------------------------------------------------


def offered_tools(request: Request) -> list[tuple[tuple[int, ...], str]]:
    """Return the places of a request's tools in its lists, and their names; Gemini has lists inside the list."""
    found: list[tuple[tuple[int, ...], Any]] = []
    for number, tool in enumerate(request.get("tools") or ()):
        if not isinstance(tool, dict):
            continue
        inner = tool.get("functionDeclarations") or tool.get("function_declarations")
        if isinstance(inner, list):
            found += [((number, place), one.get("name")) for place, one in enumerate(inner) if isinstance(one, dict)]
        else:
            body = tool.get("function")
            found.append(((number,), (body if isinstance(body, dict) else tool).get("name")))
    return [(places, name) for places, name in found if isinstance(name, str)]


TOOL_CHOICES: Final = ("tool_choice", "toolConfig", "tool_config")
"""Members that may force one tool."""


def without_tool(name: str) -> Rewrite:
    """Make a rewrite that leaves one tool out, and a choice that forces it."""

    def drop(request: Request) -> Rewritten:
        places = [place for place, own in offered_tools(request) if own == name]
        if not places:
            return request, ()
        tools = [_without_places(tool, number, places) for number, tool in enumerate(request["tools"])]
        request = {**request, "tools": [tool for tool in tools if tool is not None]}
        choices = [one for one in TOOL_CHOICES if f'"{name}"' in _json(request.get(one))]
        paths = tuple("/tools/" + "/".join(map(str, place)) for place in places)
        return {key: value for key, value in request.items() if key not in choices}, paths

    return drop


def _without_places(tool: Any, number: int, places: list[tuple[int, ...]]) -> Any:
    """Return an entry of the list of tools without the tools at these places; None if nothing is left of it."""
    if (number,) in places:
        return None
    for member in ("functionDeclarations", "function_declarations"):
        inner = tool.get(member) if isinstance(tool, dict) else None
        if isinstance(inner, list):
            left = [one for place, one in enumerate(inner) if (number, place) not in places]
            return {**tool, member: left} if left else None
    return tool


# What is spared -------------------------------------------------------------------------------------------------------


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _left_out(what: str) -> str:
    return f"[{what} left out: the service does not take it]"


def _said_call(name: Any, arguments: Any) -> str:
    return f"[called the tool {name} with {arguments if isinstance(arguments, str) else _json(arguments)}]"


def _said_result(content: Any) -> str:
    return f"[result of the tool: {content if isinstance(content, str) else _json(content)}]"


def _chat_flat(message: Any) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(_part_text(part) for part in content)}


def _part_text(part: Any) -> str:
    if isinstance(part, dict):
        for name in ("text", "refusal"):
            if isinstance(part.get(name), str):
                return str(part[name])
        return _left_out(str(part.get("type", "part")))
    return str(part)


flat_messages: Final[Rewrite] = each("messages", _chat_flat)
"""Chat messages of several parts become plain text; a note replaces each part without text."""


def _chat_flat_texts(message: Any) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    is_text = isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") in ("text", "refusal") for part in content
    )
    return _chat_flat(message) if is_text else message


flat_texts: Final[Rewrite] = each("messages", _chat_flat_texts)
"""Chat messages of texts alone become plain text; nothing of them is lost."""


def _not_strict(holder: Any) -> Any:
    """Leave `strict` out of a tool or a format, also of the function or schema in it."""
    if not isinstance(holder, dict):
        return holder
    out = {name: value for name, value in holder.items() if name != "strict"}
    for name in ("function", "json_schema", "format"):
        if isinstance(out.get(name), dict):
            out[name] = _not_strict(out[name])
    return out if out != holder else holder


def not_strict(request: Request) -> Rewritten:
    """Ask for no strict schemas: of tools, and of the answer."""
    request, paths = each("tools", _not_strict)(request)
    for name in ("response_format", "text"):
        before = request.get(name)
        after = _not_strict(before)
        if after is not before:
            request, paths = {**request, name: after}, (*paths, f"/{name}")
    return request, paths


def as_blocks(request: Request) -> Rewritten:
    """Write the texts of a Messages request, system and contents, as lists of blocks."""
    paths: tuple[str, ...] = ()
    if isinstance(request.get("system"), str):
        request = {**request, "system": [{"type": "text", "text": request["system"]}]}
        paths = ("/system",)
    request, more = each("messages", _claude_blocks)(request)
    return request, paths + more


def _claude_blocks(message: Any) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


CLAUDE_TOOL_BLOCKS: Final = frozenset({"tool_use", "tool_result", "server_tool_use"})
CLAUDE_MEDIA_BLOCKS: Final = frozenset({"image", "document"})


def _claude_without(names: frozenset[str]) -> Rewrite:
    return each("messages", inside("content", lambda block: _claude_block(names, block)))


def _claude_block(names: frozenset[str], block: Any) -> Any:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "tool_result" and "tool_result" not in names and isinstance(block.get("content"), list):
        return inside("content", lambda one: _claude_block(names, one))(block)
    if kind not in names and not (names is CLAUDE_TOOL_BLOCKS and str(kind).endswith("_tool_result")):
        return block
    if kind == "tool_use":
        return {"type": "text", "text": _said_call(block.get("name"), block.get("input"))}
    if kind == "tool_result":
        content = block.get("content")
        text = "\n".join(map(_part_text, content)) if isinstance(content, list) else content
        return {"type": "text", "text": _said_result(text or "")}
    return {"type": "text", "text": _left_out(str(kind))}


claude_no_media: Final[Rewrite] = _claude_without(CLAUDE_MEDIA_BLOCKS)
claude_no_tools: Final[Rewrite] = in_sequence(without("tools", "tool_choice"), _claude_without(CLAUDE_TOOL_BLOCKS))
"""Calls and results stay in the history as words."""


GEMINI_MEDIA: Final = ("inlineData", "inline_data", "fileData", "file_data")
GEMINI_CALLS: Final = ("functionCall", "function_call")
GEMINI_RESULTS: Final = ("functionResponse", "function_response")


def _gemini_no_media_part(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    if any(name in part for name in GEMINI_MEDIA):
        return {"text": _left_out("media")}
    for name in GEMINI_RESULTS:
        inner = part.get(name)
        if isinstance(inner, dict) and inner.get("parts"):
            return {**part, name: {key: value for key, value in inner.items() if key != "parts"}}
    return part


def _gemini_no_tool_part(part: Any) -> Any:
    for name in GEMINI_CALLS:
        if isinstance(part, dict) and isinstance(call := part.get(name), dict):
            return {"text": _said_call(call.get("name"), call.get("args") or {})}
    for name in GEMINI_RESULTS:
        if isinstance(part, dict) and isinstance(result := part.get(name), dict):
            return {"text": _said_result(result.get("response"))}
    return part


gemini_no_media: Final[Rewrite] = each("contents", inside("parts", _gemini_no_media_part))
gemini_no_tools: Final[Rewrite] = in_sequence(
    without("tools", "toolConfig", "tool_config"), each("contents", inside("parts", _gemini_no_tool_part))
)
gemini_no_defaults: Final[Rewrite] = without(
    "generationConfig", "generation_config", "safetySettings", "safety_settings", "labels", "serviceTier"
)
"""Everything that has a default at the service."""


def stream_instead(request: Request) -> Rewritten:
    """Ask for a stream where one document was asked for."""
    return (request, ()) if request.get("stream") else ({**request, "stream": True}, ("/stream",))
