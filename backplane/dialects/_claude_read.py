"""Blocks, messages, counters and stop reasons of the Messages dialect, read."""

from __future__ import annotations

from typing import Any, Final

from backplane.contract.canonical import Json
from backplane.dialects._parts import ABSENT, kept, kind_of, need_object, put_rest, slot, take
from backplane.dialects._reading import stop_of, take_cache, take_content
from backplane.ir import (
    Citation,
    Media,
    Message,
    Opaque,
    Part,
    Role,
    ServerTool,
    Stop,
    Text,
    Thinking,
    ToolResult,
    ToolUse,
    Usage,
)

NAME: Final = "claude"

STOPS: Final[dict[str, Stop]] = {
    "end_turn": "end",
    "max_tokens": "max_tokens",
    "stop_sequence": "stop_sequence",
    "tool_use": "tool_use",
    "pause_turn": "pause",
    "refusal": "refusal",
    "model_context_window_exceeded": "max_tokens",
}

STOP_WORDS: Final[dict[str, str]] = {
    "end": "end_turn",
    "max_tokens": "max_tokens",
    "stop_sequence": "stop_sequence",
    "tool_use": "tool_use",
    "pause": "pause_turn",
    "refusal": "refusal",
    "content_filter": "refusal",
}

EXACT: Final = frozenset({"end", "max_tokens", "stop_sequence", "tool_use", "pause", "refusal"})
IMAGE_TYPES: Final = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})
ROLES: Final[dict[str, Role]] = {"user": "user", "assistant": "assistant", "system": "system"}


def read_message(message: Json, at: str) -> Message:
    """Read one message; results stay in it among the other blocks."""
    rest = need_object(message, at)
    native_role = take(rest, "role", str)
    ext: dict[str, Any] = {}
    parts, flat = take_content(rest, "content", at, read_block)
    if native_role is None:
        ext[ABSENT] = ("role",)
    if rest:
        put_rest(ext, rest)
    return Message(
        role=ROLES.get(native_role or "", "user"), parts=parts, native_role=native_role, flat=flat, at=at,
        ext=slot(NAME, ext),
    )  # fmt: skip


def read_block(block: Json, at: str) -> Part:
    """Read one block of any kind."""
    kind = kind_of(block)
    if kind == "text" and type(block.get("text")) is str:
        return _read_text(block, at)
    if kind in BLOCK_READERS:
        rest = block.copy()
        del rest["type"]
        made: Part | None = BLOCK_READERS[kind](rest, at, take_cache(rest))
        if made is not None:
            return made
    if type(kind) is str and kind.endswith(("tool_use", "tool_result")):
        name = str(block.get("name") or kind)
        return ServerTool(dialect=NAME, name=name, payload=block, at=at)
    return Opaque(dialect=NAME, label=str(kind), payload=block, at=at, bound=kind in ("container_upload",))


def _read_text(block: dict[str, Any], at: str) -> Part:
    if len(block) == 2:
        return Text(text=block["text"], at=at)
    rest = block.copy()
    del rest["type"]
    text, cache = rest.pop("text"), take_cache(rest)
    citations: tuple[Citation, ...] = ()
    found = rest.get("citations")
    if type(found) is list and found and all(type(citation) is dict for citation in found):
        del rest["citations"]
        citations = tuple(read_citation(raw, f"{at}/citations/{place}") for place, raw in enumerate(found))
    return Text(text=text, citations=citations, cache=cache, at=at, ext=kept(NAME, rest))


def read_citation(raw: dict[str, Any], at: str) -> Citation:
    """Read where a text is from; its span counts in the document cited, so it stays native."""
    rest = raw.copy()
    kind = take(rest, "type", str) or ""
    return Citation(
        kind=kind, url=take(rest, "url", str), title=take(rest, "title", str), quote=take(rest, "cited_text", str),
        at=at, ext=kept(NAME, rest),
    )  # fmt: skip


def _read_thinking(rest: dict[str, Any], at: str, cache: Any) -> Part | None:
    text = take(rest, "thinking", str)
    if text is None:
        return None
    return Thinking(text=text, signature=take(rest, "signature", str), cache=cache, at=at, ext=kept(NAME, rest))


def _read_redacted(rest: dict[str, Any], at: str, cache: Any) -> Part | None:
    data = take(rest, "data", str)
    return None if data is None else Thinking(text="", redacted=data, cache=cache, at=at, ext=kept(NAME, rest))


def _read_call(rest: dict[str, Any], at: str, cache: Any) -> Part | None:
    call_id, name = take(rest, "id", str), take(rest, "name", str)
    if call_id is None or name is None or "input" not in rest:
        return None
    value = rest.pop("input")
    return ToolUse(id=call_id, name=name, input=value, cache=cache, at=at, ext=kept(NAME, rest))


def _read_result(rest: dict[str, Any], at: str, cache: Any) -> Part | None:
    call_id = take(rest, "tool_use_id", str)
    if call_id is None:
        return None
    content, flat = take_content(rest, "content", at, read_block)
    return ToolResult(
        id=call_id, content=content, is_error=take(rest, "is_error", bool), flat=flat, cache=cache, at=at,
        ext=kept(NAME, rest),
    )  # fmt: skip


def _read_media(kind: Any) -> Any:
    def read(rest: dict[str, Any], at: str, cache: Any) -> Part | None:
        source = rest.get("source")
        if type(source) is not dict:
            return None
        del rest["source"]
        body = source.copy()
        form = body.pop("type", None)
        if form == "content" and kind == "document" and body.keys() == {"content"}:
            return _read_texts(rest, body["content"], "content", at, cache)
        key = {"base64": "data", "url": "url", "file": "file_id", "text": "data"}.get(str(form))
        value = take(body, key, str) if key is not None else None
        if value is None:
            return None
        ext: dict[str, Any] = {}
        media_type = take(body, "media_type", str)
        title = take(rest, "title", str)
        put_rest(ext, rest)
        put_rest(ext, body, "source/")
        return Media(
            kind=kind,
            media_type=media_type,
            data=value if form == "base64" else None,
            url=value if form == "url" else None,
            file_id=value if form == "file" else None,
            text=value if form == "text" else None,
            title=title,
            cache=cache,
            at=at,
            ext=slot(NAME, ext),
        )

    return read


def _read_search(rest: dict[str, Any], at: str, cache: Any) -> Part | None:
    return _read_texts(rest, rest.pop("content", None), "search_result", at, cache)


def _read_texts(rest: dict[str, Any], content: Json, form: str, at: str, cache: Any) -> Part | None:
    """Read a document that stands in blocks of text as one text; which blocks it was is memory of its form."""
    blocks = content if type(content) is list else None
    if not blocks or not all(kind_of(block) == "text" and set(block) == {"type", "text"} for block in blocks):
        return None
    texts = [block["text"] for block in blocks]
    if not all(type(text) is str for text in texts):
        return None
    title = take(rest, "title", str)
    ext: dict[str, Any] = {"##texts": (form, tuple(texts))}
    put_rest(ext, rest)
    return Media(
        kind="document", text="\n\n".join(texts), media_type="text/plain", title=title, cache=cache, at=at,
        ext=slot(NAME, ext),
    )  # fmt: skip


BLOCK_READERS: Final[dict[Any, Any]] = {
    "thinking": _read_thinking,
    "redacted_thinking": _read_redacted,
    "tool_use": _read_call,
    "tool_result": _read_result,
    "image": _read_media("image"),
    "document": _read_media("document"),
    "search_result": _read_search,
}


def read_stop(raw: str | None, parts: tuple[Part, ...]) -> Stop | None:
    """Translate a reason to stop; a gateway that says `end_turn` after a call means the call."""
    return None if raw is None else stop_of(raw, STOPS, parts)


def read_usage(usage: dict[str, Any], at: str) -> Usage:
    """Read token counters; this vendor's input leaves out what the cache gave and took."""
    rest = usage.copy()
    fresh, made = take(rest, "input_tokens", int), take(rest, "output_tokens", int)
    read, write = take(rest, "cache_read_input_tokens", int), take(rest, "cache_creation_input_tokens", int)
    details = rest.get("output_tokens_details")
    reasoning = None
    ext: dict[str, Any] = {}
    if type(details) is dict and type(details.get("thinking_tokens")) is int:
        body = rest.pop("output_tokens_details").copy()
        reasoning = body.pop("thinking_tokens")
        put_rest(ext, body, "output_tokens_details/")
    put_rest(ext, rest)
    return Usage(
        input=None if fresh is None else fresh + (read or 0) + (write or 0), output=made, cache_read=read,
        cache_write=write, reasoning=reasoning, at=at, ext=slot(NAME, ext),
    )  # fmt: skip
