"""Blocks, messages, counters and stop reasons of the Messages dialect, read and written."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects._parts import (
    ABSENT,
    Ledger,
    arguments_object,
    escape,
    give_back,
    is_home_raw,
    is_plain,
    kind_of,
    lose_detail,
    lose_marks,
    lose_part,
    lose_signature,
    need_object,
    put_rest,
    shape,
    slot,
    take,
)
from backplane.ir import (
    Answer,
    Candidate,
    Citation,
    Conversation,
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


# Reading --------------------------------------------------------------------------------------------------------------


def read_message(message: Json, at: str) -> Message:
    """Read one message; results stay in it among the other blocks."""
    rest = need_object(message, at)
    native_role = take(rest, "role", str)
    ext: dict[str, Any] = {}
    flat: bool | None = None
    parts: tuple[Part, ...] = ()
    text = take(rest, "content", str)
    if text is not None:
        parts, flat = (Text(text=text, at=f"{at}/content"),), True
    elif (blocks := take(rest, "content", list)) is not None:
        found = enumerate(blocks)
        parts, flat = tuple(read_block(block, f"{at}/content/{place}") for place, block in found), False
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


def take_cache(rest: dict[str, Any]) -> dict[str, Any] | None:
    """Take a breakpoint of the only kind there is."""
    found = rest.get("cache_control")
    if type(found) is not dict or found.get("type") != "ephemeral":
        return None
    del rest["cache_control"]
    return {key: value for key, value in found.items() if key != "type"}


def _kept(rest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {NAME: {escape(key): value for key, value in rest.items()}} if rest else {}


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
    return Text(text=text, citations=citations, cache=cache, at=at, ext=_kept(rest))


def read_citation(raw: dict[str, Any], at: str) -> Citation:
    """Read where a text is from; its span counts in the document cited, so it stays native."""
    rest = raw.copy()
    kind = take(rest, "type", str) or ""
    return Citation(
        kind=kind, url=take(rest, "url", str), title=take(rest, "title", str), quote=take(rest, "cited_text", str),
        at=at, ext=_kept(rest),
    )  # fmt: skip


def _read_thinking(rest: dict[str, Any], at: str, cache: Any) -> Part | None:
    text = take(rest, "thinking", str)
    if text is None:
        return None
    return Thinking(text=text, signature=take(rest, "signature", str), cache=cache, at=at, ext=_kept(rest))


def _read_redacted(rest: dict[str, Any], at: str, cache: Any) -> Part | None:
    data = take(rest, "data", str)
    return None if data is None else Thinking(text="", redacted=data, cache=cache, at=at, ext=_kept(rest))


def _read_call(rest: dict[str, Any], at: str, cache: Any) -> Part | None:
    call_id, name = take(rest, "id", str), take(rest, "name", str)
    if call_id is None or name is None or "input" not in rest:
        return None
    value = rest.pop("input")
    return ToolUse(id=call_id, name=name, input=value, cache=cache, at=at, ext=_kept(rest))


def _read_result(rest: dict[str, Any], at: str, cache: Any) -> Part | None:
    call_id = take(rest, "tool_use_id", str)
    if call_id is None:
        return None
    flat: bool | None = None
    content: tuple[Part, ...] = ()
    text = take(rest, "content", str)
    if text is not None:
        content, flat = (Text(text=text, at=f"{at}/content"),), True
    elif (blocks := take(rest, "content", list)) is not None:
        found = enumerate(blocks)
        content, flat = tuple(read_block(block, f"{at}/content/{place}") for place, block in found), False
    return ToolResult(
        id=call_id, content=content, is_error=take(rest, "is_error", bool), flat=flat, cache=cache, at=at,
        ext=_kept(rest),
    )  # fmt: skip


def _read_media(kind: Any) -> Any:
    def read(rest: dict[str, Any], at: str, cache: Any) -> Part | None:
        source = rest.get("source")
        if type(source) is not dict:
            return None
        del rest["source"]
        body = source.copy()
        form = body.pop("type", None)
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


BLOCK_READERS: Final[dict[Any, Any]] = {
    "thinking": _read_thinking,
    "redacted_thinking": _read_redacted,
    "tool_use": _read_call,
    "tool_result": _read_result,
    "image": _read_media("image"),
    "document": _read_media("document"),
}


def read_stop(raw: str | None, parts: tuple[Part, ...]) -> Stop | None:
    """Translate a reason to stop; a gateway that says `end_turn` after a call means the call."""
    if raw is None:
        return None
    stop = STOPS.get(raw, "other")
    return "tool_use" if stop == "end" and any(isinstance(part, ToolUse) for part in parts) else stop


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


# Writing --------------------------------------------------------------------------------------------------------------


def write_messages(conversation: Conversation, out: dict[str, Any], ledger: Ledger) -> None:
    """Write the messages and, outside of them, the system text."""
    system: list[Message] = []
    messages: list[Json] = []
    last: Message | None = None
    has_begun = False
    for message in conversation.messages:
        is_inline = ledger.is_home and message.native_role == "system"
        if message.role == "system" and not has_begun and not is_inline:
            system.append(message)
            continue
        has_begun = True
        if message.role == "system" and not ledger.is_home:
            ledger.degrade(message.at, "order", "system text in the middle became part of the head")
            system.append(message)
            continue
        if _joins(last, message) and not ledger.is_home:
            more = _write_content(message, ledger)
            messages[-1]["content"] = _as_list(messages[-1]["content"]) + _as_list(more)
            give_back(message, {}, ledger)
        else:
            messages.append(_write_message(message, ledger))
        last = message
    if system:
        out["system"] = _write_system(system, ledger)
    out["messages"] = messages


def _joins(last: Message | None, message: Message) -> bool:
    """Whether results and what follows them are one message here."""
    if last is None or last.role == "assistant" or message.role == "assistant":
        return False
    return last.role == "tool" and message.role in ("tool", "user")


def _as_list(content: Json) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _write_system(messages: list[Message], ledger: Ledger) -> Json:
    for message in messages:
        native = message.native_role
        if native not in (None, "system"):
            ledger.degrade(f"{message.at}/role", "role", f"the role {native} became system")
        if message.name is not None:
            ledger.drop(f"{message.at}/name", "role", "a message has no name here", message.name)
        give_back(message, {}, ledger)
    first = messages[0]
    if len(messages) == 1 and first.flat is not False and is_plain(first.parts):
        give_back(first.parts[0], {}, ledger)
        return first.parts[0].text  # type: ignore[attr-defined]
    blocks = [block for message in messages for block in write_blocks(message.parts, ledger)]
    if len(messages) > 1:
        for message in messages[1:]:
            ledger.degrade(message.at, "shape", "several system messages became blocks of one")
    return blocks


def _write_message(message: Message, ledger: Ledger) -> Json:
    out: dict[str, Any] = {}
    is_absent = "role" in (shape(message, NAME, ABSENT) or ())
    role = "user" if message.role == "tool" else message.role
    native = message.native_role
    if ledger.is_home and native is not None and ROLES.get(native, "user") == message.role:
        out["role"] = native
    elif not (ledger.is_home and is_absent):
        out["role"] = role
        known = ("user", "assistant", "tool", "model", "function")
        if native is not None and native not in known:
            ledger.degrade(f"{message.at}/role", "role", f"the role {native} became {role}")
    if message.name is not None:
        ledger.drop(f"{message.at}/name", "role", "a message has no name here", message.name)
    content = _write_content(message, ledger)
    if message.parts or message.flat is not None or not ledger.is_home:
        out["content"] = content
    give_back(message, out, ledger)
    return out


def _write_content(message: Message, ledger: Ledger) -> Json:
    if message.flat is not False and is_plain(message.parts):
        give_back(message.parts[0], {}, ledger)
        return message.parts[0].text  # type: ignore[attr-defined]
    return write_blocks(message.parts, ledger)


def write_blocks(parts: tuple[Part, ...], ledger: Ledger, *, is_answer: bool = False) -> list[Json]:
    """Write blocks; those that the target has no word for are left out and reported."""
    out: list[Json] = []
    for part in parts:
        if type(part) is Text and not part.text and len(parts) > 1 and not ledger.is_home:
            ledger.degrade(part.at, "shape", "an empty text is no block here")
            continue
        if is_home_raw(part, ledger):
            out.append(part.payload)  # type: ignore[attr-defined]
            continue
        block = write_block(part, ledger, is_answer=is_answer)
        if block is not None:
            out.append(block)
    return out


def write_block(part: Part, ledger: Ledger, *, is_answer: bool = False) -> Json:
    """Write one block, None where the target has no word for it."""
    if is_home_raw(part, ledger):
        return part.payload  # type: ignore[attr-defined]
    if isinstance(part, Thinking) and not is_answer and not ledger.is_home:
        # The vendor refuses thinking without its own proof in a request.
        ledger.drop(part.at, "thinking", f"only {ledger.source} takes its thinking back", part.text or part.redacted)
        lose_marks(part, ledger)
        give_back(part, {}, ledger)
        return None
    writer = BLOCK_WRITERS.get(type(part))
    if is_answer and isinstance(part, Media) and not ledger.is_home:
        writer = None  # an answer of this vendor holds no pictures
    out = None if writer is None else writer(part, ledger)
    if out is None:
        if writer is None:
            lose_part(part, ledger)
        return None
    if part.cache is not None:
        if is_answer and not ledger.is_home:
            ledger.drop(part.at, "cache", "an answer has no breakpoint", part.cache)
        else:
            out["cache_control"] = {"type": "ephemeral", **_ttl(part, ledger)}
    give_back(part, out, ledger)
    return out


def _ttl(part: Part, ledger: Ledger) -> dict[str, Any]:
    cache = part.cache or {}
    if ledger.is_home or cache.get("ttl") in (None, "5m", "1h"):
        return cache
    ledger.drop(part.at, "cache", "no such time to live here", cache)
    return {}


def _write_text(part: Text, ledger: Ledger) -> dict[str, Any]:
    out: dict[str, Any] = {"type": "text", "text": part.text}
    citations = []
    for citation in part.citations:
        if NAME not in citation.ext and not ledger.is_home:
            ledger.drop(citation.at, "citation", "a citation here needs the vendor's own index")
            continue
        pairs = (("type", citation.kind), ("url", citation.url), ("title", citation.title),
                 ("cited_text", citation.quote))  # fmt: skip
        body = {key: value for key, value in pairs if value is not None and (key != "type" or value)}
        give_back(citation, body, ledger)
        citations.append(body)
    if citations:
        out["citations"] = citations
    lose_foreign_signature(part, ledger)
    return out


def lose_foreign_signature(part: Part, ledger: Ledger) -> None:
    """Report a proof that stands on a block which has none here."""
    lose_marks(part, ledger, cache=False)


def _write_thinking(part: Thinking, ledger: Ledger) -> dict[str, Any] | None:
    if part.redacted is not None:
        if ledger.is_home:
            return {"type": "redacted_thinking", "data": part.redacted}
        ledger.drop(part.at, "thinking", f"only {ledger.source} can read it", part.redacted)
        return None
    out: dict[str, Any] = {"type": "thinking", "thinking": part.text}
    if ledger.is_home:
        if part.signature is not None:
            out["signature"] = part.signature
        return out
    if part.signature is not None:
        lose_signature(part, ledger)
    ledger.degrade(part.at, "thinking", "thinking without this vendor's signature; it takes it back only as text")
    out["signature"] = ""
    return out


def _write_refusal(part: Refusal, ledger: Ledger) -> dict[str, Any]:
    ledger.degrade(part.at, "part", "a refusal is said as text here")
    return {"type": "text", "text": part.text}


def _write_call(part: ToolUse, ledger: Ledger) -> dict[str, Any]:
    value = part.input if ledger.is_home else arguments_object(part, ledger)
    lose_foreign_signature(part, ledger)
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": value}


def _write_result(part: ToolResult, ledger: Ledger) -> dict[str, Any]:
    out: dict[str, Any] = {"type": "tool_result", "tool_use_id": part.id}
    if part.flat is not False and is_plain(part.content):
        give_back(part.content[0], {}, ledger)
        out["content"] = part.content[0].text  # type: ignore[attr-defined]
    elif part.content or part.flat is not None:
        out["content"] = write_blocks(part.content, ledger)
    if part.is_error is not None:
        out["is_error"] = part.is_error
    if part.value is not None:
        ledger.degrade(part.at, "shape", "a structured result became text")
    if part.name is not None and not part.id_made:
        ledger.drop(part.at, "shape", "the tool's name is known by the id of the call")
    lose_foreign_signature(part, ledger)
    return out


def _write_source(part: Media, ledger: Ledger) -> dict[str, Any] | None:
    """Write where a picture or document comes from; None where this vendor takes nothing of the kind."""
    if part.kind not in ("image", "document"):
        return None
    media_type = part.media_type
    if part.data is not None:
        if not ledger.is_home:
            media_type = media_type or ("image/png" if part.kind == "image" else "application/pdf")
            if part.kind == "document" and media_type != "application/pdf":
                return None
            if part.kind == "image" and media_type not in IMAGE_TYPES:
                return None
        source = {"type": "base64", "data": part.data}
    elif part.url is not None and (ledger.is_home or part.url.startswith(("http:", "https:"))):
        source = {"type": "url", "url": part.url}
    elif part.text is not None and part.kind == "document":
        media_type = media_type if ledger.is_home else "text/plain"
        source = {"type": "text", "data": part.text}
    elif part.file_id is not None and ledger.is_home:
        source = {"type": "file", "file_id": part.file_id}
    else:
        return None
    if media_type is not None and (ledger.is_home or "url" not in source):
        source["media_type"] = media_type
    return source


def _write_media(part: Media, ledger: Ledger) -> dict[str, Any] | None:
    source = _write_source(part, ledger)
    if source is None:
        ledger.drop(part.at, "media", f"the target takes no {part.kind} in this form", msgspec.to_builtins(part))
        return None
    kind = part.kind
    out: dict[str, Any] = {"type": kind, "source": source}
    title = part.title if part.title is not None or ledger.is_home else part.name
    if title is not None and kind == "document":
        out["title"] = title
    elif title is not None:
        ledger.drop(part.at, "media", "an image has no name here", title)
    lose_detail(part, ledger)
    lose_foreign_signature(part, ledger)
    return out


BLOCK_WRITERS: Final[dict[Any, Any]] = {
    Text: _write_text,
    Thinking: _write_thinking,
    Refusal: _write_refusal,
    ToolUse: _write_call,
    ToolResult: _write_result,
    Media: _write_media,
}


def write_stop(candidate: Candidate, ledger: Ledger) -> str | None:
    """Return the word for why the answer stopped: the vendor's own while it means the same."""
    raw, stop = candidate.stop_raw, candidate.stop
    if ledger.is_home:
        if raw is not None and read_stop(raw, candidate.message.parts) == stop:
            return raw
        if stop is None:
            return None
    word = STOP_WORDS.get(stop or "", "end_turn")
    if stop not in EXACT:
        ledger.degrade(candidate.stop_at, "stop", f"{raw or stop} became {word}")
    elif raw is not None and ":" in raw:
        ledger.degrade(candidate.stop_at, "shape", "the reason is said in one word here")
    return word


def write_usage(usage: Usage, ledger: Ledger) -> dict[str, Any]:
    """Write token counters; input leaves out what the cache gave and took."""
    out: dict[str, Any] = {}
    if usage.input is not None:
        fresh = usage.input - (usage.cache_read or 0) - (usage.cache_write or 0)
        out["input_tokens"] = fresh if ledger.is_home else max(0, fresh)
    if usage.output is not None:
        out["output_tokens"] = usage.output
    for key, value in (
        ("cache_read_input_tokens", usage.cache_read), ("cache_creation_input_tokens", usage.cache_write),
    ):  # fmt: skip
        if value is not None:
            out[key] = value
    if usage.reasoning is not None:
        out["output_tokens_details"] = {"thinking_tokens": usage.reasoning}
    if not ledger.is_home:
        for key in ("input_tokens", "output_tokens"):
            if key not in out:
                ledger.synthesise(f"{usage.at}/{key}", "required", "a counter that was not said is written as 0")
                out[key] = 0
    give_back(usage, out, ledger)
    return out


def lose_candidates(answer: Answer, ledger: Ledger) -> None:
    """Report the answers beyond the first."""
    for candidate in answer.candidates[1:]:
        ledger.drop(candidate.at, "candidates", "the target gives one answer", msgspec.to_builtins(candidate))
