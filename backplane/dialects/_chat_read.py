"""Messages of the Chat Completions family, read."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects._chat import ROLES, Flavour
from backplane.dialects._parts import (
    ABSENT,
    Calls,
    escaped,
    kept,
    kind_of,
    need_object,
    parse_data_url,
    put_rest,
    read_arguments,
    slot,
    take,
)
from backplane.dialects._reading import take_cache, take_content
from backplane.ir import Citation, Media, Message, Opaque, Part, Refusal, Text, Thinking, ToolResult, ToolUse


def read_message(message: Json, at: str, flavour: Flavour, calls: Calls) -> Message:
    """Read one message; its role may be old, or missing."""
    rest = need_object(message, at)
    native_role = take(rest, "role", str)
    role = ROLES.get(native_role or "", "user")
    if role == "tool":
        return _read_result(rest, at, flavour, native_role, calls)
    name = take(rest, "name", str)
    ext: dict[str, Any] = {}
    absent: list[str] = []
    parts, flat = _read_content(rest, at, flavour, absent)
    if role == "assistant":
        parts = _read_assistant(rest, parts, at, flavour, calls)
    if native_role is None:
        absent.append("role")
    if absent:
        ext[ABSENT] = tuple(absent)
    put_rest(ext, rest)
    return Message(
        role=role, parts=parts, native_role=native_role, name=name, flat=flat, at=at, ext=slot(flavour.name, ext)
    )


def _read_content(
    rest: dict[str, Any], at: str, flavour: Flavour, absent: list[str]
) -> tuple[tuple[Part, ...], bool | None]:
    if "content" not in rest:
        absent.append("content")
    return take_content(rest, "content", at, lambda part, where: _read_part(part, where, flavour))


def _read_part(part: Json, at: str, flavour: Flavour) -> Part:
    kind = kind_of(part)
    if kind in PART_READERS:
        rest = part.copy()
        del rest["type"]
        made = PART_READERS[kind](rest, at, take_cache(rest), flavour.name)
        if made is not None:
            return made
    return Opaque(dialect=flavour.name, label=str(kind), payload=part, at=at)


def _read_text(rest: dict[str, Any], at: str, cache: Any, dialect: str) -> Part | None:
    text = take(rest, "text", str)
    return None if text is None else Text(text=text, cache=cache, at=at, ext=kept(dialect, rest))


def _read_refusal(rest: dict[str, Any], at: str, cache: Any, dialect: str) -> Part | None:
    text = take(rest, "refusal", str)
    if text is None:
        return None
    return Refusal(text=text, cache=cache, at=at, ext={dialect: {"#part": True, **escaped(rest)}})


def _read_url(rest: dict[str, Any], at: str, cache: Any, dialect: str) -> Part | None:
    """An image or film: {"image_url": {"url", "detail"}}; some gateways give the URL alone."""
    key = "image_url" if "image_url" in rest else "video_url"
    inner = rest.pop(key, None)
    ext: dict[str, Any] = {}
    if type(inner) is str:
        ext["#plain_url"] = True
        inner = {"url": inner}
    if type(inner) is not dict or type(inner.get("url")) is not str:
        return None
    body = inner.copy()
    url = body.pop("url")
    detail = take(body, "detail", str)
    put_rest(ext, rest)
    put_rest(ext, body, f"{key}/")
    data = parse_data_url(url)
    return Media(
        kind="image" if key == "image_url" else "video",
        media_type=data[0] if data else None,
        data=data[1] if data else None,
        url=None if data else url,
        detail=detail,
        cache=cache,
        at=at,
        ext=slot(dialect, ext),
    )


def _read_audio(rest: dict[str, Any], at: str, cache: Any, dialect: str) -> Part | None:
    inner = rest.pop("input_audio", None)
    if type(inner) is not dict or type(inner.get("data")) is not str or type(inner.get("format")) is not str:
        return None
    body = inner.copy()
    data, form = body.pop("data"), body.pop("format")
    ext = escaped(rest)
    put_rest(ext, body, "input_audio/")
    return Media(kind="audio", media_type=f"audio/{form}", data=data, cache=cache, at=at, ext=slot(dialect, ext))


def _read_file(rest: dict[str, Any], at: str, cache: Any, dialect: str) -> Part | None:
    inner = rest.pop("file", None)
    if type(inner) is not dict:
        return None
    body = inner.copy()
    name, file_id, data = take(body, "filename", str), take(body, "file_id", str), take(body, "file_data", str)
    if (data is None) == (file_id is None):
        return None
    parsed = parse_data_url(data) if data is not None else None
    ext = escaped(rest)
    put_rest(ext, body, "file/")
    if data is not None and parsed is None:
        ext["#bare_data"] = True
    return Media(
        kind="document",
        media_type=parsed[0] if parsed else None,
        data=parsed[1] if parsed else data,
        file_id=file_id,
        name=name,
        cache=cache,
        at=at,
        ext=slot(dialect, ext),
    )


PART_READERS: Final = {
    "text": _read_text,
    "refusal": _read_refusal,
    "image_url": _read_url,
    "video_url": _read_url,
    "input_audio": _read_audio,
    "file": _read_file,
}


def _read_assistant(
    rest: dict[str, Any], content: tuple[Part, ...], at: str, flavour: Flavour, calls: Calls
) -> tuple[Part, ...]:
    """Put an assistant's members in the order in which they were said: thinking, text, refusal, sound, calls."""
    parts: list[Part] = []
    for field in flavour.thinking_fields:
        if not parts and (text := take(rest, field, str)) is not None:
            signature = take(rest, flavour.signature_field, str) if flavour.signature_field else None
            signature_at = f"{at}/{flavour.signature_field}" if signature is not None else ""
            parts.append(
                Thinking(text=text, field=field, signature=signature, signature_at=signature_at, at=f"{at}/{field}")
            )
    parts += content
    if (refusal := take(rest, "refusal", str)) is not None:
        parts.append(Refusal(text=refusal, at=f"{at}/refusal"))
    if (audio := take(rest, "audio", dict)) is not None:
        parts.append(_read_spoken(audio, f"{at}/audio", flavour.name))
    if (old := take(rest, "function_call", dict)) is not None:
        parts.append(_read_old_call(old, f"{at}/function_call", flavour.name, calls))
    tool_calls = take(rest, "tool_calls", list)
    if tool_calls:
        parts += [
            _read_call(call, f"{at}/tool_calls/{place}", flavour.name, calls) for place, call in enumerate(tool_calls)
        ]
    elif tool_calls is not None:
        rest["tool_calls"] = tool_calls
    if annotations := take(rest, "annotations", list):
        _cite(parts, annotations, at, flavour.name, rest)
    elif annotations is not None:
        rest["annotations"] = annotations
    return tuple(parts)


def _read_spoken(audio: dict[str, Any], at: str, dialect: str) -> Part:
    rest = audio.copy()
    return Media(
        kind="audio", file_id=take(rest, "id", str), data=take(rest, "data", str), at=at,
        transcript=take(rest, "transcript", str), ext={dialect: {"##spoken": True, **escaped(rest)}},
    )  # fmt: skip


def _read_old_call(call: dict[str, Any], at: str, dialect: str, calls: Calls) -> Part:
    rest = call.copy()
    name, text = take(rest, "name", str), take(rest, "arguments", str)
    absent = tuple(key for key, value in (("name", name), ("arguments", text)) if value is None)
    return ToolUse(
        id=calls.make(name or ""), id_made=True, name=name or "", text=text, input=read_arguments(text or ""), at=at,
        ext={dialect: {"#old": absent, **escaped(rest)}},
    )  # fmt: skip


def _read_call(call: Json, at: str, dialect: str, calls: Calls) -> Part:
    kind = kind_of(call) if type(call) is not dict or "type" in call else "function"
    inner = call.get(kind) if kind in ("function", "custom") else None
    if type(inner) is not dict or type(inner.get("name")) is not str:
        return Opaque(dialect=dialect, label=f"call of type {kind}", payload=call, at=at)
    rest = call.copy()
    del rest[kind]
    ext: dict[str, Any] = {}
    if rest.pop("type", None) is None:
        ext[ABSENT] = ("type",)
    body = inner.copy()
    name = body.pop("name")
    text = take(body, "arguments" if kind == "function" else "input", str)
    if text is None and kind == "function" and type(body.get("arguments")) is dict:
        ext["#object"] = True  # some gateways send the object itself
        value: Json = body.pop("arguments")
    else:
        value = (text or "") if kind == "custom" else read_arguments(text or "")
        if text is None:
            ext[ABSENT] = (*ext.get(ABSENT, ()), f"{kind}/{'arguments' if kind == 'function' else 'input'}")
    call_id = take(rest, "id", str)
    if call_id == "":
        rest["id"] = call_id
    if rest:
        put_rest(ext, rest)
    if body:
        put_rest(ext, body, f"{kind}/")
    return ToolUse(
        id=call_id or calls.make(name),
        id_made=not call_id,
        name=name,
        input=value,
        text=text,
        kind="custom" if kind == "custom" else "function",
        at=at,
        ext={dialect: ext} if ext else {},
    )


def _cite(parts: list[Part], annotations: list[Any], at: str, dialect: str, rest: dict[str, Any]) -> None:
    """Hang annotations on the message's text; they stay members where there is no single text."""
    places = [place for place, part in enumerate(parts) if type(part) is Text]
    if len(places) != 1 or not all(
        type(found) is dict and found.get("type") == "url_citation" and type(found.get("url_citation")) is dict
        for found in annotations
    ):
        rest["annotations"] = annotations
        return
    citations = []
    for place, found in enumerate(annotations):
        outer, body = found.copy(), found["url_citation"].copy()
        del outer["type"], outer["url_citation"]
        ext = escaped(outer)
        citation = Citation(
            kind="url", url=take(body, "url", str), title=take(body, "title", str),
            start=take(body, "start_index", int), end=take(body, "end_index", int),
            at=f"{at}/annotations/{place}", ext={dialect: ext},
        )  # fmt: skip
        put_rest(ext, body, "url_citation/")
        citations.append(citation if ext else msgspec.structs.replace(citation, ext={}))
    parts[places[0]] = msgspec.structs.replace(parts[places[0]], citations=tuple(citations))


def _read_result(rest: dict[str, Any], at: str, flavour: Flavour, native_role: str | None, calls: Calls) -> Message:
    name = take(rest, "name", str)
    call_id = take(rest, "tool_call_id", str)
    absent: list[str] = []
    content, flat = _read_content(rest, at, flavour, absent)
    made = call_id is None
    result = ToolResult(
        id=calls.answer(name or "") if call_id is None else call_id,
        id_made=made,
        name=name,
        content=content,
        flat=flat,
        at=at,
    )
    ext: dict[str, Any] = {ABSENT: tuple(absent)} if absent else {}
    put_rest(ext, rest)
    return Message(role="tool", parts=(result,), native_role=native_role, at=at, ext=slot(flavour.name, ext))
