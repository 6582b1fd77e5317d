"""Blocks, messages, counters and stop reasons of the Messages dialect, written."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects._claude_read import EXACT, IMAGE_TYPES, NAME, ROLES, STOP_WORDS, read_stop
from backplane.dialects._losses import (
    lose_detail,
    lose_marks,
    lose_name,
    lose_part,
    lose_signature,
    lose_thinking,
    put_counters,
)
from backplane.dialects._parts import ABSENT, Ledger, arguments_object, give_back, is_home_raw, is_plain, shape
from backplane.ir import (
    Candidate,
    Conversation,
    Media,
    Message,
    Part,
    Refusal,
    Text,
    Thinking,
    ToolResult,
    ToolUse,
    Usage,
)


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
        lose_name(message, ledger)
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
    lose_name(message, ledger)
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
        lose_thinking(part, ledger)
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


def _write_texts(part: Media) -> dict[str, Any] | None:
    """Write a document in the blocks that it came in; None when it came in none, or is another text now."""
    form, texts = shape(part, NAME, "##texts") or ("", ())
    if not texts or "\n\n".join(texts) != part.text:
        return None
    blocks = [{"type": "text", "text": text} for text in texts]
    titled = {} if part.title is None else {"title": part.title}
    if form == "content":
        return {"type": "document", "source": {"type": form, "content": blocks}, **titled}
    return {"type": form, "content": blocks, **titled}


def _write_media(part: Media, ledger: Ledger) -> dict[str, Any] | None:
    if ledger.is_home and (blocks := _write_texts(part)) is not None:
        return blocks
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
    fresh = usage.input
    if fresh is not None:
        fresh -= (usage.cache_read or 0) + (usage.cache_write or 0)
        fresh = fresh if ledger.is_home else max(0, fresh)
    put_counters(out, (("input_tokens", fresh), ("output_tokens", usage.output)), usage, ledger)
    for key, value in (
        ("cache_read_input_tokens", usage.cache_read), ("cache_creation_input_tokens", usage.cache_write),
    ):  # fmt: skip
        if value is not None:
            out[key] = value
    if usage.reasoning is not None:
        out["output_tokens_details"] = {"thinking_tokens": usage.reasoning}
    give_back(usage, out, ledger)
    return out
