"""Items, counters and states of the Responses dialect, read and written.

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
    Ledger,
    arguments_text,
    escape,
    give_back,
    is_home_raw,
    is_plain,
    kind_of,
    lose_marks,
    lose_part,
    lose_signature,
    lose_silence,
    media_url,
    parse_data_url,
    put_rest,
    read_arguments,
    result_text,
    shape,
    slot,
    take,
)
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


# Reading --------------------------------------------------------------------------------------------------------------


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


def _kept(rest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {NAME: {escape(key): value for key, value in rest.items()}} if rest else {}


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
    flat: bool | None = None
    parts: list[Part] = []
    text = take(rest, "content", str)
    if text is not None:
        parts, flat = [Text(text=text, at=f"{at}/content")], True
    elif (content := take(rest, "content", list)) is not None:
        flat = False
        parts = [read_part(part, f"{at}/content/{place}") for place, part in enumerate(content)]
    if role == "assistant":
        return Message(role=role, parts=_mark(parts, item, rest, absent, flat, at), at=at)
    ext: dict[str, Any] = {ABSENT: tuple(absent)} if absent else {}
    put_rest(ext, rest)
    return Message(role=role, parts=tuple(parts), native_role=native_role, flat=flat, at=at, ext=slot(NAME, ext))


def _mark(
    parts: list[Part], item: Json, rest: dict[str, Any], absent: list[str], flat: bool | None, at: str
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
    ext = {escape(key): value for key, value in rest.items()}
    ext["##type"] = kind
    return Text(text=text, citations=citations, at=at, ext=slot(NAME, ext))


def _read_citation(raw: dict[str, Any], at: str) -> Citation:
    rest = raw.copy()
    kind = take(rest, "type", str) or ""
    return Citation(
        kind="url" if kind == "url_citation" else kind, url=take(rest, "url", str), title=take(rest, "title", str),
        start=take(rest, "start_index", int), end=take(rest, "end_index", int), at=at, ext=_kept(rest),
    )  # fmt: skip


def _read_refusal(rest: dict[str, Any], at: str, kind: str) -> Part | None:
    text = take(rest, "refusal", str)
    return None if text is None else Refusal(text=text, at=at, ext=_kept(rest))


def _read_image(rest: dict[str, Any], at: str, kind: str) -> Part | None:
    url, file_id = take(rest, "image_url", str), take(rest, "file_id", str)
    if (url is None) == (file_id is None):
        return None
    data = parse_data_url(url) if url is not None else None
    return Media(
        kind="image", media_type=data[0] if data else None, data=data[1] if data else None,
        url=None if data else url, file_id=file_id, detail=take(rest, "detail", str), at=at, ext=_kept(rest),
    )  # fmt: skip


def _read_file(rest: dict[str, Any], at: str, kind: str) -> Part | None:
    data, url, file_id = take(rest, "file_data", str), take(rest, "file_url", str), take(rest, "file_id", str)
    if [data, url, file_id].count(None) != 2:
        return None
    parsed = parse_data_url(data) if data is not None else None
    name = take(rest, "filename", str)
    ext = {escape(key): value for key, value in rest.items()}
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
    return Media(kind="audio", media_type=media_type, data=inner["data"], at=at, ext=_kept(rest))


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
    content: tuple[Part, ...] = ()
    flat: bool | None = None
    text = take(rest, "output", str)
    if text is not None:
        content, flat = (Text(text=text, at=f"{at}/output"),), True
    elif (found := take(rest, "output", list)) is not None:
        flat = False
        content = tuple(read_part(part, f"{at}/output/{place}") for place, part in enumerate(found))
    return ToolResult(
        id=call_id, content=content, flat=flat, at=at, ext=_kept(rest),
        kind="function" if kind == "function_call_output" else "custom",
    )  # fmt: skip


def _read_reasoning(rest: dict[str, Any], at: str, kind: str) -> Part | None:
    """Read thinking: its summary where there is one, else its text; proof is what is encrypted."""
    ext: dict[str, Any] = {}
    text, field = "", None
    for key, name in (("summary", "summary_text"), ("content", "reasoning_text")):
        texts = _texts(rest.get(key), name)
        if texts and not text:
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
    stop = STOPS.get(raw, "other")
    return "tool_use" if stop == "end" and any(isinstance(part, ToolUse) for part in parts) else stop


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
    inputs = _take_details(rest, "input_tokens_details")
    outputs = _take_details(rest, "output_tokens_details")
    read, write = take(inputs, "cached_tokens", int), take(inputs, "cache_write_tokens", int)
    thought = take(outputs, "reasoning_tokens", int)
    put_rest(ext, inputs, "input_tokens_details/")
    put_rest(ext, outputs, "output_tokens_details/")
    put_rest(ext, rest)
    return Usage(
        input=sent, output=made, cache_read=read, cache_write=write, reasoning=thought, at=at, ext=slot(NAME, ext)
    )


def _take_details(rest: dict[str, Any], key: str) -> dict[str, Any]:
    value = rest.get(key)
    if type(value) is dict and value:
        del rest[key]
        return value.copy()
    return {}


# Writing --------------------------------------------------------------------------------------------------------------


def write_items(messages: tuple[Message, ...], ledger: Ledger, *, is_answer: bool = False) -> list[Json]:
    """Write messages as items."""
    out: list[Json] = []
    last: Message | None = None
    for message in messages:
        if message.role == "assistant":
            if last is not None and last.role == "assistant" and not ledger.is_home:
                ledger.degrade(message.at, "order", "two turns of the assistant in a row are one here")
            out += write_turn(message, ledger, is_answer=is_answer)
        else:
            out += _write_message(message, ledger)
        last = message
    return out


def _write_message(message: Message, ledger: Ledger) -> list[Json]:
    results = [part for part in message.parts if isinstance(part, ToolResult)]
    others = tuple(part for part in message.parts if not isinstance(part, ToolResult))
    if results and others and not isinstance(message.parts[0], ToolResult):
        ledger.degrade(message.at, "order", "results come before the rest of their message")
    out: list[Json] = [_write_result(result, ledger) for result in results]
    if results:
        if out:
            give_back(message, out[0], ledger)
        if message.name is not None:
            ledger.drop(f"{message.at}/name", "role", "a message has no name here", message.name)
        if not others:
            return out
        message = msgspec.structs.replace(
            message, role="user", parts=others, native_role=None, ext={}, name=None,
            flat=None if is_plain(others) else message.flat,
        )  # fmt: skip
    made: dict[str, Any] = {"role": _role(message, ledger)}
    if message.name is not None:
        ledger.drop(f"{message.at}/name", "role", "a message has no name here", message.name)
    is_text = message.flat is not False and _is_plain(message.parts)
    if is_text and message.parts:
        give_back(message.parts[0], {}, ledger)
    if message.parts or message.flat is not None or not ledger.is_home:
        made["content"] = _plain(message.parts) if is_text else write_content(message.parts, ledger)
    give_back(message, made, ledger)
    if "type" not in (shape(message, NAME, ABSENT) or ()) and (ledger.is_home or not is_text):
        made.setdefault("type", "message")
    return [*out, made]


def _is_plain(parts: tuple[Part, ...]) -> bool:
    return not parts or is_plain(parts)


def _plain(parts: tuple[Part, ...]) -> str:
    return parts[0].text if parts and isinstance(parts[0], Text) else ""


def _role(message: Message, ledger: Ledger) -> str:
    native = message.native_role
    if native is not None and (ROLES.get(native) == message.role or (ledger.is_home and native not in ROLES)):
        return native
    if native not in (None, message.role, "tool", "function"):
        ledger.degrade(f"{message.at}/role", "role", f"the role {native} became {message.role}")
    return "user" if message.role == "tool" else message.role


def write_content(parts: tuple[Part, ...], ledger: Ledger, *, is_said: bool = False) -> list[Json]:
    """Write a content list.

    Args:
        is_said: of the assistant, whose texts are `output_text`.
    """
    out: list[Json] = []
    for part in parts:
        if is_home_raw(part, ledger):
            out.append(part.payload)  # type: ignore[attr-defined]
        elif (made := write_part(part, ledger, is_said=is_said)) is not None:
            out.append(made)
    return out


def write_part(part: Part, ledger: Ledger, *, is_said: bool = False) -> Json:
    """Write one member of a content list, None where the target has no word for it."""
    if is_home_raw(part, ledger):
        return part.payload  # type: ignore[attr-defined]
    out: dict[str, Any] | None
    if isinstance(part, Text):
        kind = shape(part, NAME, "##type") if ledger.is_home else None
        kind = kind or ("output_text" if is_said else "input_text")
        out = {"type": kind, "text": part.text}
        annotations = _write_citations(part, ledger)
        if annotations or (is_said and not ledger.is_home):
            out["annotations"] = annotations
    elif isinstance(part, Refusal):
        out = {"type": "refusal", "refusal": part.text}
    elif isinstance(part, Media) and (ledger.is_home or not is_said):
        out = _write_media(part, ledger)
    elif isinstance(part, Media):
        out = None
    else:
        lose_part(part, ledger)
        return None
    if out is None:
        ledger.drop(part.at, "media", "the target takes no media in this form", msgspec.to_builtins(part))
        return None
    lose_marks(part, ledger)
    give_back(part, out, ledger)
    return out


def _write_citations(part: Text, ledger: Ledger) -> list[Json]:
    out = []
    for citation in part.citations:
        if not ledger.is_home and (citation.url is None or citation.start is None or citation.end is None):
            ledger.drop(citation.at, "citation", "only a URL with its span can be said here")
            continue
        pairs = (("type", "url_citation" if citation.kind == "url" else citation.kind), ("url", citation.url),
                 ("title", citation.title), ("start_index", citation.start), ("end_index", citation.end))  # fmt: skip
        body: dict[str, Any] = {key: value for key, value in pairs if value is not None and value != ""}
        if not ledger.is_home:
            body.setdefault("title", citation.url)
        if citation.quote is not None:
            ledger.drop(citation.at, "citation", "the words cited are not said here", citation.quote)
        give_back(citation, body, ledger)
        out.append(body)
    return out


def _write_media(part: Media, ledger: Ledger) -> dict[str, Any] | None:
    if part.text is not None:
        ledger.degrade(part.at, "media", "a document of plain text became a text")
        return {"type": "input_text", "text": part.text}
    is_kin = ledger.is_home or ledger.source in ("openai", "copilot")
    out: dict[str, Any]
    if part.kind == "image":
        out = {"type": "input_image"}
        if part.file_id is not None and is_kin:
            out["file_id"] = part.file_id
        elif (url := media_url(part)) is not None:
            out["image_url"] = url
        else:
            return None
        if part.detail is not None:
            out["detail"] = part.detail
        elif not ledger.is_home:
            out["detail"] = "auto"
    elif part.kind == "document":
        out = {"type": "input_file"}
        if part.data is not None:
            out["file_data"] = part.data if shape(part, NAME, "#bare_data") else media_url(part)
        elif part.url is not None:
            out["file_url"] = part.url
        elif part.file_id is not None and is_kin:
            out["file_id"] = part.file_id
        else:
            return None
        if (name := part.name or part.title) is not None:
            out["filename"] = name
    elif part.kind == "audio" and part.data is not None and ledger.is_home:
        form = (part.media_type or "audio/wav").partition("/")[2]
        return {"type": "input_audio", "input_audio": {"data": part.data, "format": form}}
    else:
        return None
    if part.title is not None and part.name is not None:
        ledger.drop(f"{part.at}/title", "media", "no titles here", part.title)
    return out


def write_turn(message: Message, ledger: Ledger, *, is_answer: bool = False) -> list[Json]:
    """Write the items of an assistant's turn."""
    out: list[Json] = []
    said: list[Part] = []

    def flush() -> None:
        if said:
            out.append(_write_said(tuple(said), message, ledger, len(out), is_answer=is_answer))
            said.clear()

    for part in message.parts:
        if isinstance(part, Text | Refusal | Media) or (isinstance(part, Opaque) and _is_inner(part)):
            if shape(part, NAME, ITEM) is not None:
                flush()
            said.append(part)
            continue
        flush()
        made = _write_own(part, ledger, len(out), is_answer=is_answer)
        if made is not None or is_home_raw(part, ledger):
            out.append(made)
    flush()
    if message.name is not None:
        ledger.drop(f"{message.at}/name", "role", "a message has no name here", message.name)
    if message.native_role not in (None, "assistant", "model"):
        ledger.degrade(f"{message.at}/role", "role", f"the role {message.native_role} became assistant")
    give_back(message, {}, ledger)
    return out


def _is_inner(part: Opaque) -> bool:
    """Whether an unknown block stood inside a message item, not beside it."""
    entries = part.ext.get(NAME, {})
    return ITEM in entries or CONTINUES in entries


def _write_said(
    parts: tuple[Part, ...], message: Message, ledger: Ledger, place: int, *, is_answer: bool
) -> dict[str, Any]:
    memory = shape(parts[0], NAME, ITEM) if ledger.is_home else None
    out: dict[str, Any] = {"role": "assistant"}
    if memory is not None:
        is_text = memory["flat"] and is_plain_here(parts)
        out["content"] = _plain(parts) if is_text else write_content(parts, ledger, is_said=True)
        out.update({key: value for key, value in memory["rest"].items() if key not in out})
        if "type" not in memory["absent"]:
            out.setdefault("type", "message")
        return out
    if not is_answer and message.flat is not False and is_plain_here(parts):
        out["content"] = _plain(parts)
        if not isinstance(parts[0], Text):
            return out
        lose_marks(parts[0], ledger)
        give_back(parts[0], {}, ledger)
        return out
    out["content"] = write_content(parts, ledger, is_said=True)
    out |= {"type": "message", "id": f"msg_{place if is_answer else _word(parts[0].at)}", "status": "completed"}
    return out


def _word(pointer: str) -> str:
    """Make an id of a pointer: one of its own for every message of a request."""
    return "".join(letter if letter.isalnum() else "_" for letter in pointer).strip("_") or "0"


def is_plain_here(parts: tuple[Part, ...]) -> bool:
    """Whether these parts are one text, the memory of its item left aside."""
    if len(parts) != 1 or not isinstance(parts[0], Text) or parts[0].citations:
        return False
    return is_plain(parts)


def _write_own(part: Part, ledger: Ledger, place: int, *, is_answer: bool) -> Json:
    """Write a part that is an item of its own."""
    if is_home_raw(part, ledger):
        return part.payload  # type: ignore[attr-defined]
    out: dict[str, Any] | None = None
    if isinstance(part, ToolUse):
        absent = shape(part, NAME, ABSENT) or ()
        kind, key = ("function_call", "arguments") if part.kind == "function" else ("custom_tool_call", "input")
        out = {"type": kind, "call_id": part.id, "name": part.name}
        if part.input not in ({}, "") or key not in absent:
            out[key] = arguments_text(part)
        if is_answer and not ledger.is_home:
            out |= {"id": f"fc_{place}", "status": "completed"}
    elif isinstance(part, Thinking):
        if not is_answer and not ledger.is_home:
            # Without the vendor's own proof it would look for the thinking among what it keeps.
            ledger.drop(
                part.at, "thinking", f"only {ledger.source} takes its thinking back", part.text or part.redacted
            )
            lose_marks(part, ledger)
            give_back(part, {}, ledger)
            return None
        out = _write_reasoning(part, ledger, place)
    else:
        lose_part(part, ledger)
    if out is None:
        return None
    lose_marks(part, ledger, signature=not isinstance(part, Thinking))
    give_back(part, out, ledger)
    return out


def _write_reasoning(part: Thinking, ledger: Ledger, place: int) -> dict[str, Any] | None:
    if part.redacted is not None:
        ledger.drop(part.at, "thinking", f"only {ledger.source} can read it", part.redacted)
        return None
    out: dict[str, Any] = {"type": "reasoning"}
    if ledger.is_home:
        if part.signature is not None:
            out["encrypted_content"] = part.signature
    else:
        if part.signature is not None:
            lose_signature(part, ledger)
        ledger.degrade(part.at, "thinking", "thinking stands in a summary, without this vendor's proof")
        out["id"] = f"rs_{place}"
    texts = shape(part, NAME, "##texts") if ledger.is_home else None
    if texts is None or "\n\n".join(texts) != part.text:
        texts = (part.text,) if part.text else ()
    key = part.field if ledger.is_home and part.field == "content" else "summary"
    kind = "summary_text" if key == "summary" else "reasoning_text"
    if texts:
        out[key] = [{"type": kind, "text": text} for text in texts]
    elif not ledger.is_home:
        out[key] = []
    return out


def _write_result(part: ToolResult, ledger: Ledger) -> dict[str, Any]:
    kind = "function_call_output" if part.kind == "function" else "custom_tool_call_output"
    out: dict[str, Any] = {"type": kind, "call_id": part.id}
    if part.flat is False and (ledger.is_home or not _is_text_list(part)):
        out["output"] = write_content(part.content, ledger)
    elif part.content or not ledger.is_home:
        if part.flat is False and part.content:
            ledger.degrade(part.at, "shape", "a list of one text became the text")
        out["output"] = result_text(part, ledger)
    if part.is_error:
        ledger.drop(part.at, "tool_field", "the target does not say that a result is an error", True)
    elif part.is_error is False:
        ledger.drop(part.at, "shape", "no error, said in words")
    if part.name is not None and not ledger.is_home:
        ledger.drop(part.at, "shape", "the tool's name is known by the id of the call")
    lose_marks(part, ledger)
    give_back(part, out, ledger)
    return out


def _is_text_list(part: ToolResult) -> bool:
    return len(part.content) <= 1 and all(isinstance(inner, Text) for inner in part.content)


def write_usage(usage: Usage, ledger: Ledger) -> dict[str, Any]:
    """Write token counters."""
    out: dict[str, Any] = {}
    details = (
        ("input_tokens_details", "cached_tokens", usage.cache_read),
        ("input_tokens_details", "cache_write_tokens", usage.cache_write),
        ("output_tokens_details", "reasoning_tokens", usage.reasoning),
    )
    for key, value in (("input_tokens", usage.input), ("output_tokens", usage.output)):
        if value is not None:
            out[key] = value
        elif not ledger.is_home:
            ledger.synthesise(f"{usage.at}/{key}", "required", "a counter that was not said is written as 0")
            out[key] = 0
    for key, name, value in details:
        if value is not None:
            out.setdefault(key, {})[name] = value
        elif not ledger.is_home:
            out.setdefault(key, {})[name] = 0
    if not ledger.is_home and None in (usage.cache_read, usage.cache_write, usage.reasoning):
        lose_silence(usage.at, ledger)
    give_back(usage, out, ledger)
    if "total_tokens" not in (shape(usage, NAME, ABSENT) or ()):
        out.setdefault("total_tokens", (usage.input or 0) + (usage.output or 0))
    return out
