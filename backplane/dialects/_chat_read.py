"""Requests and answers of the Chat Completions family, read."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects._chat import (
    FORMAT_MEMBERS,
    ROLES,
    SIMPLE,
    STOPS,
    Flavour,
)
from backplane.dialects._parts import (
    ABSENT,
    MADE_ID,
    Ledger,
    escape,
    kind_of,
    need_list,
    need_object,
    parse_data_url,
    put_rest,
    read_arguments,
    read_options,
    slot,
    take,
    take_constant,
    take_number,
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
    Stop,
    Text,
    Thinking,
    ToolResult,
    ToolSpec,
    ToolUse,
    Translated,
    Usage,
)


class _Calls:
    """Ids for calls without one: made in order, found again by name."""

    def __init__(self) -> None:
        self.made = 0
        self.open: list[tuple[str, str]] = []

    def make(self, name: str) -> str:
        made = f"{MADE_ID}{self.made}"
        self.made += 1
        self.open.append((name, made))
        return made

    def answer(self, name: str) -> str:
        for place, (open_name, made) in enumerate(self.open):
            if open_name == name:
                del self.open[place]
                return made
        return f"{MADE_ID}unknown_{name}"


def read_request(request: Json, flavour: Flavour) -> Translated[Conversation]:
    """Read a request.

    Raises:
        TranslationError: `dialect_mapping_failed`, it has no list of messages.
    """
    rest = need_object(request, "")
    ledger = Ledger(flavour.name, flavour.name)
    calls = _Calls()
    found = need_list(rest, "messages", "")
    messages = tuple(
        _read_message(message, f"/messages/{place}", flavour, calls) for place, message in enumerate(found)
    )
    options: dict[str, Any] = {}
    options_at: dict[str, str] = {}
    ext: dict[str, Any] = {}
    read_options(rest, SIMPLE, options, options_at)
    _read_limits(rest, options, options_at, ext, flavour)
    _read_stop(rest, options, options_at, ext)
    _read_tool_choice(rest, options, options_at)
    _read_format(rest, options, options_at)
    tools = _read_tools(rest, flavour)
    model = take(rest, "model", str)
    if calls.made:
        ledger.synthesise("/messages", "identity", f"ids for {calls.made} calls that had none")
    put_rest(ext, rest)
    conversation = Conversation(
        dialect=flavour.name, messages=messages, model=model, tools=tools, options=options, options_at=options_at,
        ext=slot(flavour.name, ext),
    )  # fmt: skip
    return Translated(conversation, ledger.done())


def _read_limits(
    rest: dict[str, Any], options: dict[str, Any], options_at: dict[str, str], ext: dict[str, Any], flavour: Flavour
) -> None:
    for key in ("max_completion_tokens", "max_tokens"):
        if "max_tokens" not in options and (value := take(rest, key, int)) is not None:
            options["max_tokens"] = value
            options_at["max_tokens"] = f"/{key}"
            if key != flavour.max_tokens:
                ext[f"#{key}"] = True
                ext[f"#{flavour.max_tokens}"] = False


def _read_stop(rest: dict[str, Any], options: dict[str, Any], options_at: dict[str, str], ext: dict[str, Any]) -> None:
    if (text := take(rest, "stop", str)) is not None:
        options["stop"] = [text]
        ext["#stop"] = "text"
    elif (texts := take(rest, "stop", list)) is not None:
        options["stop"] = texts
    else:
        return
    options_at["stop"] = "/stop"


def _read_tool_choice(rest: dict[str, Any], options: dict[str, Any], options_at: dict[str, str]) -> None:
    choice = rest.get("tool_choice")
    if type(choice) is str and choice in ("auto", "none", "required"):
        options["tool_choice"] = {"mode": choice}
    elif type(choice) is dict and (kind := kind_of(choice)) in ("function", "custom"):
        inner = choice.get(kind)
        if len(choice) != 2 or type(inner) is not dict or list(inner) != ["name"] or type(inner["name"]) is not str:
            return
        options["tool_choice"] = {"mode": "tool", "name": inner["name"], "kind": kind}
    else:
        return
    del rest["tool_choice"]
    options_at["tool_choice"] = "/tool_choice"


def _read_format(rest: dict[str, Any], options: dict[str, Any], options_at: dict[str, str]) -> None:
    found = rest.get("response_format")
    if type(found) is not dict:
        return
    if found == {"type": "text"}:
        options["response_format"] = {"type": "text"}
    elif found == {"type": "json_object"}:
        options["response_format"] = {"type": "json"}
    elif found.get("type") == "json_schema" and len(found) == 2 and type(found.get("json_schema")) is dict:
        inner = found["json_schema"]
        if any(key not in FORMAT_MEMBERS or value is None for key, value in inner.items()):
            return
        options["response_format"] = {"type": "schema", **inner}
        options_at["response_format"] = "/response_format/json_schema"
    else:
        return
    del rest["response_format"]
    options_at.setdefault("response_format", "/response_format")


def _read_tools(rest: dict[str, Any], flavour: Flavour) -> tuple[ToolSpec, ...]:
    found = take(rest, "tools", list)
    if found is None:
        return ()
    if not found:
        rest["tools"] = found
        return ()
    return tuple(read_tool(tool, f"/tools/{place}", flavour) for place, tool in enumerate(found))


def read_tool(tool: Json, at: str, flavour: Flavour) -> ToolSpec:
    """Read one tool definition; a type that only the vendor runs becomes kind `server`."""
    kind = kind_of(tool)
    inner = tool.get(kind) if kind in ("function", "custom") else None
    if type(inner) is not dict or type(inner.get("name")) is not str:
        return ToolSpec(name=_server_name(tool), kind="server", payload=tool, at=at)
    rest = tool.copy()
    del rest["type"], rest[kind]
    body = inner.copy()
    ext: dict[str, Any] = {}
    spec = ToolSpec(
        name=body.pop("name"),
        description=take(body, "description", str),
        schema=take(body, "parameters", dict) if kind == "function" else None,
        strict=take(body, "strict", bool),
        kind="custom" if kind == "custom" else "function",
        cache=_take_cache(rest),
        at=at,
        ext={flavour.name: ext},
    )
    put_rest(ext, rest)
    put_rest(ext, body, f"{kind}/")
    return spec if ext else msgspec.structs.replace(spec, ext={})


def _server_name(tool: Json) -> str:
    if type(tool) is not dict:
        return "unreadable"
    inner = tool.get("function")
    return str(inner.get("name") if type(inner) is dict else tool.get("type", "unnamed"))


def _take_cache(rest: dict[str, Any]) -> dict[str, Any] | None:
    found = rest.get("cache_control")
    if type(found) is not dict or found.get("type") != "ephemeral":
        return None
    del rest["cache_control"]
    return {key: value for key, value in found.items() if key != "type"}


def _read_message(message: Json, at: str, flavour: Flavour, calls: _Calls) -> Message:
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
    content = rest.get("content")
    if type(content) is str:
        del rest["content"]
        return (Text(text=content, at=f"{at}/content"),), True
    if type(content) is list:
        del rest["content"]
        found = enumerate(content)
        return tuple(_read_part(part, f"{at}/content/{place}", flavour) for place, part in found), False
    if "content" not in rest:
        absent.append("content")
    return (), None


def _read_part(part: Json, at: str, flavour: Flavour) -> Part:
    kind = kind_of(part)
    if kind in PART_READERS:
        rest = part.copy()
        del rest["type"]
        made = PART_READERS[kind](rest, at, _take_cache(rest), flavour.name)
        if made is not None:
            return made
    return Opaque(dialect=flavour.name, label=str(kind), payload=part, at=at)


def _read_text(rest: dict[str, Any], at: str, cache: Any, dialect: str) -> Part | None:
    text = take(rest, "text", str)
    return None if text is None else Text(text=text, cache=cache, at=at, ext=slot(dialect, _escaped(rest)))


def _read_refusal(rest: dict[str, Any], at: str, cache: Any, dialect: str) -> Part | None:
    text = take(rest, "refusal", str)
    if text is None:
        return None
    return Refusal(text=text, cache=cache, at=at, ext={dialect: {"#part": True, **_escaped(rest)}})


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
    ext = _escaped(rest)
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
    ext = _escaped(rest)
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


def _escaped(rest: dict[str, Any]) -> dict[str, Any]:
    return {escape(key): value for key, value in rest.items()} if rest else rest


PART_READERS: Final = {
    "text": _read_text,
    "refusal": _read_refusal,
    "image_url": _read_url,
    "video_url": _read_url,
    "input_audio": _read_audio,
    "file": _read_file,
}


def _read_assistant(
    rest: dict[str, Any], content: tuple[Part, ...], at: str, flavour: Flavour, calls: _Calls
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
        transcript=take(rest, "transcript", str), ext={dialect: {"##spoken": True, **_escaped(rest)}},
    )  # fmt: skip


def _read_old_call(call: dict[str, Any], at: str, dialect: str, calls: _Calls) -> Part:
    rest = call.copy()
    name, text = take(rest, "name", str), take(rest, "arguments", str)
    absent = tuple(key for key, value in (("name", name), ("arguments", text)) if value is None)
    return ToolUse(
        id=calls.make(name or ""), id_made=True, name=name or "", text=text, input=read_arguments(text or ""), at=at,
        ext={dialect: {"#old": absent, **_escaped(rest)}},
    )  # fmt: skip


def _read_call(call: Json, at: str, dialect: str, calls: _Calls) -> Part:
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
        ext = _escaped(outer)
        citation = Citation(
            kind="url", url=take(body, "url", str), title=take(body, "title", str),
            start=take(body, "start_index", int), end=take(body, "end_index", int),
            at=f"{at}/annotations/{place}", ext={dialect: ext},
        )  # fmt: skip
        put_rest(ext, body, "url_citation/")
        citations.append(citation if ext else msgspec.structs.replace(citation, ext={}))
    parts[places[0]] = msgspec.structs.replace(parts[places[0]], citations=tuple(citations))


def _read_result(rest: dict[str, Any], at: str, flavour: Flavour, native_role: str | None, calls: _Calls) -> Message:
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


def read_answer(response: Json, flavour: Flavour) -> Translated[Answer]:
    """Read a response; a body that only says an error becomes an answer without candidates.

    Raises:
        TranslationError: `dialect_mapping_failed`, it has neither choices nor an error.
    """
    rest = need_object(response, "")
    ext: dict[str, Any] = {}
    absent: list[str] = []
    if rest.get("choices") is None and ("error" in rest or rest.get("object") == "error"):
        return Translated(_read_failure(rest, flavour))
    calls = _Calls()
    found = need_list(rest, "choices", "")
    candidates = tuple(
        _read_choice(choice, place, f"/choices/{place}", flavour, calls) for place, choice in enumerate(found)
    )
    take_constant(rest, "object", "chat.completion", absent)
    usage = read_usage(rest.pop("usage"), "/usage", flavour) if type(rest.get("usage")) is dict else None
    answer_id, model, created = take(rest, "id", str), take(rest, "model", str), take_number(rest, "created")
    if absent:
        ext[ABSENT] = tuple(absent)
    put_rest(ext, rest)
    ledger = Ledger(flavour.name, flavour.name)
    if calls.made:
        ledger.synthesise("/choices", "identity", f"ids for {calls.made} calls that had none")
    answer = Answer(
        dialect=flavour.name, id=answer_id, model=model, created=created, candidates=candidates, usage=usage,
        ext=slot(flavour.name, ext),
    )  # fmt: skip
    return Translated(answer, ledger.done())


def _read_failure(rest: dict[str, Any], flavour: Flavour) -> Answer:
    error = rest.get("error")
    message = error.get("message") if type(error) is dict else error or rest.get("message")
    return Answer(
        dialect=flavour.name, candidates=(), error=message if type(message) is str else "unknown error",
        ext={flavour.name: _escaped(rest)},
    )  # fmt: skip


def _read_choice(choice: Json, place: int, at: str, flavour: Flavour, calls: _Calls) -> Candidate:
    rest = need_object(choice, at)
    absent: list[str] = []
    take_constant(rest, "index", place, absent)
    body = take(rest, "message", dict)
    if body is None:
        absent.append("message")
    message = _read_message({"role": "assistant", **(body or {})}, f"{at}/message", flavour, calls)
    if body is not None and "role" not in body:
        absent.append("message/role")
    raw = take(rest, "finish_reason", str)
    ext: dict[str, Any] = {ABSENT: tuple(absent)} if absent else {}
    put_rest(ext, rest)
    return Candidate(
        message=message, stop=read_stop(raw, message.parts), stop_raw=raw, stop_at=f"{at}/finish_reason", at=at,
        ext=slot(flavour.name, ext),
    )  # fmt: skip


def read_stop(raw: str | None, parts: tuple[Part, ...]) -> Stop | None:
    """Translate a reason to stop; vendors that say `stop` after a call mean the call."""
    if not raw:
        return None
    stop = STOPS.get(raw, "other")
    return "tool_use" if stop == "end" and any(isinstance(part, ToolUse) for part in parts) else stop


def read_usage(usage: dict[str, Any], at: str, flavour: Flavour) -> Usage:
    """Read token counters; the family's input includes what the cache gave."""
    rest = usage.copy()
    ext: dict[str, Any] = {}
    absent: list[str] = []
    sent, made = take(rest, "prompt_tokens", int), take(rest, "completion_tokens", int)
    take_constant(rest, "total_tokens", (sent or 0) + (made or 0), absent)
    inputs = _take_details(rest, "prompt_tokens_details")
    outputs = _take_details(rest, "completion_tokens_details")
    read = take(inputs, "cached_tokens", int)
    if read is None and (read := take(rest, "cached_tokens", int)) is not None:
        if not flavour.cached_tokens_on_top:
            ext["#on_top"] = True
    elif read is not None and flavour.cached_tokens_on_top:
        ext["#details"] = True
    write, thought = take(inputs, "cache_write_tokens", int), take(outputs, "reasoning_tokens", int)
    put_rest(ext, inputs, "prompt_tokens_details/")
    put_rest(ext, outputs, "completion_tokens_details/")
    put_rest(ext, rest)
    if absent:
        ext[ABSENT] = tuple(absent)
    return Usage(
        input=sent, output=made, cache_read=read, cache_write=write, reasoning=thought, at=at,
        ext=slot(flavour.name, ext),
    )  # fmt: skip


def _take_details(rest: dict[str, Any], key: str) -> dict[str, Any]:
    """Take an object of details; an empty one stays, so that it is written again."""
    value = rest.get(key)
    if type(value) is dict and value:
        del rest[key]
        return value.copy()
    return {}
