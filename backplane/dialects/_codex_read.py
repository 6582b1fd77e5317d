"""Items, counters and states of the Responses dialect, read.

Items stand in one list; those of one turn of the assistant are one message here, and every part remembers which item
it was of.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects._parts import (
    ABSENT,
    ITEM,
    escaped,
    kept,
    kind_of,
    parse_data_url,
    put_rest,
    read_arguments,
    slot,
    take,
)
from backplane.dialects._reading import stop_of, take_content, take_details
from backplane.ir import (
    Citation,
    Media,
    Message,
    Opaque,
    Part,
    Refusal,
    Role,
    ServerTool,
    Stop,
    Text,
    Thinking,
    ToolResult,
    ToolUse,
    Usage,
)

NAME: Final = "codex"

CONTINUES: Final = "##continues"
"""Memory on the parts that follow the first one of an item."""

BOUND: Final = frozenset({"item_reference", "compaction", "compaction_trigger"})
ASSISTANT_ITEMS: Final = frozenset({"reasoning", "function_call", "custom_tool_call"})
ROLES: Final[dict[str, Role]] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

STOPS: Final[dict[str, Stop]] = {
    "completed": "end",
    "incomplete": "other",
    "incomplete:max_output_tokens": "max_tokens",
    "incomplete:content_filter": "content_filter",
    "failed": "error",
    "cancelled": "cancelled",
}

STOP_WORDS: Final[dict[str, str]] = {
    "end": "completed",
    "tool_use": "completed",
    "stop_sequence": "completed",
    "max_tokens": "incomplete:max_output_tokens",
    "content_filter": "incomplete:content_filter",
    "refusal": "completed",
    "error": "failed",
    "cancelled": "cancelled",
    "pause": "incomplete",
}

EXACT: Final = frozenset({"end", "max_tokens", "content_filter", "error", "cancelled"})


def read_items(items: list[Json], base: str, *, is_answer: bool = False) -> list[Message]:
    """Read a list of items into messages; an assistant's items in a row are one message."""
    out: list[Message] = []
    turn: list[Part] = []
    for place, item in enumerate(items):
        at = f"{base}/{place}"
        found = read_item(item, at, is_answer=is_answer)
        if isinstance(found, Message):
            if turn:
                out.append(Message(role="assistant", parts=tuple(turn), at=turn[0].at))
                turn = []
            out.append(found)
        else:
            turn += found
    if turn or is_answer:
        out.append(Message(role="assistant", parts=tuple(turn), at=turn[0].at if turn else base))
    return out


def read_item(item: Json, at: str, *, is_answer: bool = False) -> Message | list[Part]:
    """Read one item: a message of its own, or parts of the assistant's turn."""
    kind = kind_of(item) if type(item) is not dict or "type" in item else "message"
    if kind == "message" and type(item.get("role")) is str:
        message = read_message(item, at)
        return list(message.parts) if message.role == "assistant" else message
    if kind in ITEM_READERS:
        rest = item.copy()
        del rest["type"]
        made: Part | None = ITEM_READERS[kind](rest, at, kind)
        if isinstance(made, ToolResult):
            return Message(role="tool", parts=(made,), at=at)
        if made is not None:
            return [made]
    if type(kind) is str and kind.endswith(("_call", "_call_output", "_output", "mcp_list_tools", "program")):
        return [ServerTool(dialect=NAME, name=str(item.get("name", kind)), payload=item, at=at)]
    return [Opaque(dialect=NAME, label=str(kind), payload=item, at=at, bound=kind in BOUND)]


def read_message(item: dict[str, Any], at: str) -> Message:
    """Read a message item; an assistant's keeps its members on its first part."""
    rest = item.copy()
    native_role = rest.pop("role")
    role = ROLES.get(native_role, "user")
    absent: list[str] = []
    if "type" not in rest:
        absent.append("type")
    elif rest["type"] == "message":
        del rest["type"]
    parts, flat = take_content(rest, "content", at, read_part)
    if role == "assistant":
        return Message(role=role, parts=_mark(parts, item, rest, absent, flat, at), at=at)
    ext: dict[str, Any] = {ABSENT: tuple(absent)} if absent else {}
    put_rest(ext, rest)
    return Message(role=role, parts=parts, native_role=native_role, flat=flat, at=at, ext=slot(NAME, ext))


def _mark(
    parts: tuple[Part, ...], item: Json, rest: dict[str, Any], absent: list[str], flat: bool | None, at: str
) -> tuple[Part, ...]:
    """Note on the parts of an assistant's message which item they are of."""
    if not parts:
        return (Opaque(dialect=NAME, label="empty message", payload=item, at=at),)
    out: list[Part] = []
    for place, part in enumerate(parts):
        entries = dict(part.ext.get(NAME, {}))
        if place:
            entries[CONTINUES] = True
        else:
            entries[ITEM] = {"rest": rest, "absent": tuple(absent), "flat": flat, "at": at}
        out.append(msgspec.structs.replace(part, ext={NAME: entries}))
    return tuple(out)


def read_part(part: Json, at: str) -> Part:
    """Read one member of a content list."""
    kind = kind_of(part)
    if kind in PART_READERS:
        rest = part.copy()
        del rest["type"]
        made: Part | None = PART_READERS[kind](rest, at, kind)
        if made is not None:
            return made
    return Opaque(dialect=NAME, label=str(kind), payload=part, at=at)


def _read_text(rest: dict[str, Any], at: str, kind: str) -> Part | None:
    text = take(rest, "text", str)
    if text is None:
        return None
    citations: tuple[Citation, ...] = ()
    found = rest.get("annotations")
    if type(found) is list and found and all(type(one) is dict for one in found):
        del rest["annotations"]
        citations = tuple(_read_citation(one, f"{at}/annotations/{place}") for place, one in enumerate(found))
    ext = escaped(rest)
    ext["##type"] = kind
    return Text(text=text, citations=citations, at=at, ext=slot(NAME, ext))


def _read_citation(raw: dict[str, Any], at: str) -> Citation:
    rest = raw.copy()
    kind = take(rest, "type", str) or ""
    return Citation(
        kind="url" if kind == "url_citation" else kind, url=take(rest, "url", str), title=take(rest, "title", str),
        start=take(rest, "start_index", int), end=take(rest, "end_index", int), at=at, ext=kept(NAME, rest),
    )  # fmt: skip


def _read_refusal(rest: dict[str, Any], at: str, kind: str) -> Part | None:
    text = take(rest, "refusal", str)
    return None if text is None else Refusal(text=text, at=at, ext=kept(NAME, rest))


def _read_image(rest: dict[str, Any], at: str, kind: str) -> Part | None:
    url, file_id = take(rest, "image_url", str), take(rest, "file_id", str)
    if (url is None) == (file_id is None):
        return None
    data = parse_data_url(url) if url is not None else None
    return Media(
        kind="image", media_type=data[0] if data else None, data=data[1] if data else None,
        url=None if data else url, file_id=file_id, detail=take(rest, "detail", str), at=at, ext=kept(NAME, rest),
    )  # fmt: skip


def _read_file(rest: dict[str, Any], at: str, kind: str) -> Part | None:
    data, url, file_id = take(rest, "file_data", str), take(rest, "file_url", str), take(rest, "file_id", str)
    if [data, url, file_id].count(None) != 2:
        return None
    parsed = parse_data_url(data) if data is not None else None
    name = take(rest, "filename", str)
    ext = escaped(rest)
    if data is not None and parsed is None:
        ext["#bare_data"] = True
    return Media(
        kind="document", media_type=parsed[0] if parsed else None, data=parsed[1] if parsed else data, url=url,
        file_id=file_id, name=name, at=at, ext=slot(NAME, ext),
    )  # fmt: skip


def _read_audio(rest: dict[str, Any], at: str, kind: str) -> Part | None:
    inner = rest.get("input_audio")
    if type(inner) is not dict or set(inner) != {"data", "format"} or type(inner["format"]) is not str:
        return None
    del rest["input_audio"]
    media_type = f"audio/{inner['format']}"
    return Media(kind="audio", media_type=media_type, data=inner["data"], at=at, ext=kept(NAME, rest))


PART_READERS: Final[dict[Any, Any]] = {
    "input_text": _read_text,
    "output_text": _read_text,
    "text": _read_text,
    "refusal": _read_refusal,
    "input_image": _read_image,
    "input_file": _read_file,
    "input_audio": _read_audio,
}


def _read_call(rest: dict[str, Any], at: str, kind: str) -> Part | None:
    key = "arguments" if kind == "function_call" else "input"
    name, call_id = take(rest, "name", str), take(rest, "call_id", str)
    if name is None or call_id is None:
        return None
    text = take(rest, key, str)
    ext: dict[str, Any] = {} if text is not None else {ABSENT: (key,)}
    put_rest(ext, rest)
    value: Json = read_arguments(text or "") if key == "arguments" else text or ""
    return ToolUse(
        id=call_id, name=name, input=value, text=text, at=at, ext=slot(NAME, ext),
        kind="function" if kind == "function_call" else "custom",
    )  # fmt: skip


def _read_result(rest: dict[str, Any], at: str, kind: str) -> Part | None:
    call_id = take(rest, "call_id", str)
    if call_id is None:
        return None
    content, flat = take_content(rest, "output", at, read_part)
    return ToolResult(
        id=call_id, content=content, flat=flat, at=at, ext=kept(NAME, rest),
        kind="function" if kind == "function_call_output" else "custom",
    )  # fmt: skip


def _read_reasoning(rest: dict[str, Any], at: str, kind: str) -> Part | None:
    """Read thinking: its summary where there is one, else its text; proof is what is encrypted."""
    ext: dict[str, Any] = {}
    text, field = "", None
    for key, name in (("summary", "summary_text"), ("content", "reasoning_text")):
        texts = _texts(rest.get(key), name)
        if texts and any(texts) and field is None:
            text, field = "\n\n".join(texts), key
            del rest[key]
            if len(texts) > 1:
                ext["##texts"] = tuple(texts)
    signature = take(rest, "encrypted_content", str)
    put_rest(ext, rest)
    return Thinking(text=text, field=field, signature=signature, at=at, ext=slot(NAME, ext))


def _texts(value: Json, kind: str) -> list[str] | None:
    """Return the texts of a list that holds nothing else."""
    if type(value) is not list:
        return None
    texts = []
    for part in value:
        if kind_of(part) != kind or set(part) != {"type", "text"} or type(part["text"]) is not str:
            return None
        texts.append(part["text"])
    return texts


ITEM_READERS: Final[dict[Any, Any]] = {
    "function_call": _read_call,
    "custom_tool_call": _read_call,
    "function_call_output": _read_result,
    "custom_tool_call_output": _read_result,
    "reasoning": _read_reasoning,
}


def read_stop(raw: str | None, parts: tuple[Part, ...]) -> Stop | None:
    """Translate a response's status; a call or a refusal in it is the reason why it was completed."""
    if raw is None or raw in ("in_progress", "queued"):
        return None
    return stop_of(raw, STOPS, parts)


def read_usage(usage: dict[str, Any], at: str) -> Usage:
    """Read token counters; input includes what the cache gave."""
    rest = usage.copy()
    ext: dict[str, Any] = {}
    sent, made = take(rest, "input_tokens", int), take(rest, "output_tokens", int)
    total = (sent or 0) + (made or 0)
    if "total_tokens" not in rest:
        ext[ABSENT] = ("total_tokens",)
    elif rest["total_tokens"] == total:
        del rest["total_tokens"]
    inputs = take_details(rest, "input_tokens_details")
    outputs = take_details(rest, "output_tokens_details")
    read, write = take(inputs, "cached_tokens", int), take(inputs, "cache_write_tokens", int)
    thought = take(outputs, "reasoning_tokens", int)
    put_rest(ext, inputs, "input_tokens_details/")
    put_rest(ext, outputs, "output_tokens_details/")
    put_rest(ext, rest)
    return Usage(
        input=sent, output=made, cache_read=read, cache_write=write, reasoning=thought, at=at, ext=slot(NAME, ext)
    )
