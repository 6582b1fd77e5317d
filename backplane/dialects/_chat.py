"""Requests and answers of the Chat Completions family; three dialects are flavours of it.

What one flavour has and another has not is in its `Flavour`; the flavours' files hold these tables.
Streams are in `_chat_stream`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects._parts import (
    ABSENT,
    EFFORT_BUDGETS,
    MADE_ID,
    NUMBER,
    Ledger,
    OptionTable,
    Writer,
    arguments_text,
    check_meaning,
    effort_of,
    escape,
    give_back,
    is_home_raw,
    is_plain,
    lose_marks,
    lose_part,
    lose_signature,
    media_url,
    need_list,
    need_object,
    option_names,
    parse_data_url,
    plain_text,
    put_constants,
    put_rest,
    read_arguments,
    read_options,
    result_text,
    shape,
    slot,
    stop_word,
    take,
    take_constant,
    take_number,
    write_options,
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
    Stop,
    Text,
    Thinking,
    ToolResult,
    ToolSpec,
    ToolUse,
    Translated,
    Usage,
)

ROLES: Final[dict[str, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}

STOPS: Final[dict[str, Stop]] = {
    "stop": "end",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "content_filter",
}

STOP_WORDS: Final[dict[str, str]] = {
    "end": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "content_filter": "content_filter",
    "refusal": "content_filter",
    "stop_sequence": "stop",
}

SIMPLE: Final[OptionTable] = {
    "temperature": ("temperature", NUMBER),
    "top_p": ("top_p", NUMBER),
    "seed": ("seed", int),
    "frequency_penalty": ("frequency_penalty", NUMBER),
    "presence_penalty": ("presence_penalty", NUMBER),
    "n": ("n", int),
    "logprobs": ("logprobs", bool),
    "top_logprobs": ("top_logprobs", int),
    "stream": ("stream", bool),
    "parallel_tool_calls": ("parallel_tool_calls", bool),
    "user": ("user", str),
    "metadata": ("metadata", dict),
    "reasoning_effort": ("reasoning_effort", str),
    "verbosity": ("verbosity", str),
    "service_tier": ("service_tier", str),
}

MEMBERS: Final = frozenset({
    "content", "refusal", "tool_calls", "annotations", "audio", "logprobs", "system_fingerprint", "function_call",
    "logit_bias", "store", "stream_options", "prediction", "modalities", "prompt_cache_key", "safety_identifier",
    "functions", "prompt_tokens_details/audio_tokens", "completion_tokens_details/audio_tokens",
    "completion_tokens_details/accepted_prediction_tokens", "completion_tokens_details/rejected_prediction_tokens",
    "expires_at", "#stop", "#absent", "#old", "#part", "#max_completion_tokens", "#max_tokens",
})  # fmt: skip
"""Members that every flavour of the family takes from its sisters."""

SERVICE_TIERS: Final = frozenset({"auto", "default", "flex", "scale", "priority"})
EFFORTS: Final = frozenset(EFFORT_BUDGETS)


class Flavour(msgspec.Struct, frozen=True):
    """What sets one dialect of the family apart."""

    name: str
    roles: frozenset[str] = frozenset(ROLES)
    max_tokens: str = "max_tokens"
    """The member that is written for a limit that came from elsewhere."""
    thinking_request: str | None = None
    """The message member that takes thinking in a request; None where there is none."""
    thinking_answer: str = "reasoning_content"
    """The same in an answer, where readers accept more than the vendor documents."""
    thinking_fields: tuple[str, ...] = ("reasoning_content", "reasoning", "reasoning_text")
    signature_field: str | None = None
    """The message member that holds the proof of the thinking."""
    cached_tokens_on_top: bool = False
    """`usage.cached_tokens` instead of a member of the details."""
    builtin_tools: bool = False
    """Tools of type `builtin_function` exist."""
    has_files: bool = True
    special: Mapping[str, Writer] = {}
    """Options that this flavour writes in its own way."""
    unknown_options: frozenset[str] = frozenset()
    """Options of the family that this flavour does not have."""
    kin: Mapping[str, frozenset[str]] = {}


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


# Reading --------------------------------------------------------------------------------------------------------------


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
    if choice in ("auto", "none", "required"):
        options["tool_choice"] = {"mode": choice}
    elif type(choice) is dict and (kind := choice.get("type")) in ("function", "custom"):
        inner = choice.get(kind)
        if len(choice) != 2 or type(inner) is not dict or list(inner) != ["name"]:
            return
        options["tool_choice"] = {"mode": "tool", "name": inner["name"], "kind": kind}
    else:
        return
    del rest["tool_choice"]
    options_at["tool_choice"] = "/tool_choice"


FORMAT_MEMBERS: Final = ("name", "schema", "strict", "description")


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
    kind = tool.get("type") if type(tool) is dict else None
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
    kind = part.get("type") if type(part) is dict else None
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
        transcript=take(rest, "transcript", str), ext=slot(dialect, _escaped(rest)),
    )  # fmt: skip


def _read_old_call(call: dict[str, Any], at: str, dialect: str, calls: _Calls) -> Part:
    rest = call.copy()
    name, text = take(rest, "name", str) or "", take(rest, "arguments", str) or ""
    return ToolUse(
        id=calls.make(name), id_made=True, name=name, text=text, input=read_arguments(text), at=at,
        ext={dialect: {"#old": True, **_escaped(rest)}},
    )  # fmt: skip


def _read_call(call: Json, at: str, dialect: str, calls: _Calls) -> Part:
    kind = call.get("type", "function") if type(call) is dict else None
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
        value = text if kind == "custom" else read_arguments(text or "")
        if text is None:
            ext[ABSENT] = (*ext.get(ABSENT, ()), f"{kind}/arguments")
    call_id = take(rest, "id", str)
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


# Writing --------------------------------------------------------------------------------------------------------------


def write_request(conversation: Conversation, flavour: Flavour) -> Translated[Json]:
    """Write a request.

    Raises:
        TranslationError: `mapping_unsupported_capability` or `ir_invalid`, its meaning would break.
    """
    ledger = Ledger(conversation.dialect, flavour.name, flavour.kin)
    check_meaning(conversation, ledger)
    out: dict[str, Any] = {}
    if conversation.model is not None:
        out["model"] = conversation.model
    out["messages"] = write_messages(conversation.messages, flavour, ledger)
    tools = [written for tool in conversation.tools if (written := write_tool(tool, flavour, ledger)) is not None]
    if tools:
        out["tools"] = tools
    known = {name: key for name, key in NAMES.items() if name not in flavour.unknown_options}
    write_options(conversation, out, ledger, known, {**_specials(conversation, flavour, tools), **flavour.special})
    give_back(conversation, out, ledger)
    if conversation.model is None and not ledger.is_home:
        ledger.synthesise("/model", "required", "a request names its model")
        out["model"] = "unknown"
    return Translated(out, ledger.done())


NAMES: Final = option_names(SIMPLE)


def _specials(conversation: Conversation, flavour: Flavour, tools: list[Json]) -> dict[str, Writer]:
    def limit(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
        key = flavour.max_tokens
        for other in ("max_completion_tokens", "max_tokens"):
            if any(entries.get(f"#{other}") for name, entries in conversation.ext.items() if name == flavour.name):
                key = other
        out[key] = value

    def stop(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
        is_text = shape(conversation, conversation.dialect, "#stop") and len(value) == 1
        out["stop"] = value[0] if is_text else value

    def choice(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
        write_tool_choice(value, out, ledger, at, conversation)

    def penalties(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
        if not ledger.is_home and value not in SERVICE_TIERS:
            ledger.drop(at, "option_value", "no such class of service here", value)
        else:
            out["service_tier"] = value

    def parallel(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
        out["parallel_tool_calls"] = value

    return {
        "max_tokens": limit, "stop": stop, "tool_choice": choice, "response_format": _write_format,
        "reasoning_budget": _write_budget, "reasoning_effort": _write_effort, "service_tier": penalties,
        "parallel_tool_calls": parallel, "metadata": _write_metadata, "verbosity": _write_verbosity,
    }  # fmt: skip


def _write_verbosity(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    if ledger.is_home or value in ("low", "medium", "high"):
        out["verbosity"] = value
    else:
        ledger.drop(at, "option_value", "no such verbosity here", value)


def _write_metadata(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    if ledger.is_home or all(type(label) is str for label in value.values()):
        out["metadata"] = value
    else:
        ledger.drop(at, "option_value", "labels are texts here", value)


def _write_budget(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    if "reasoning_effort" in out:
        ledger.drop(at, "option", "the target has the effort in words only", value)
        return
    out["reasoning_effort"] = effort_of(value)
    ledger.degrade(at, "option_value", f"tokens for thinking became the word {out['reasoning_effort']}", value)


def _write_effort(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    if ledger.is_home or value in EFFORTS:
        out["reasoning_effort"] = value
    else:
        ledger.drop(at, "option_value", "no such effort here", value)


def write_tool_choice(value: Any, out: dict[str, Any], ledger: Ledger, at: str, conversation: Conversation) -> None:
    """Write which tool the model has to call; one that the target does not have is refused."""
    if value["mode"] != "tool":
        out["tool_choice"] = value["mode"]
        return
    kinds = {tool.name: tool.kind for tool in conversation.tools}
    kind = kinds.get(value["name"], value.get("kind", "function"))
    if kind == "server" and not ledger.is_home:
        ledger.refuse(at, "tool_choice", f"{value['name']} is forced, and only {ledger.source} has it")
        return
    kind = "custom" if kind == "custom" else "function"
    out["tool_choice"] = {"type": kind, kind: {"name": value["name"]}}


def _write_format(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    if value["type"] == "schema":
        body = {key: value[key] for key in FORMAT_MEMBERS if key in value}
        if "name" not in body and not ledger.is_home:
            ledger.synthesise(at, "required", "a schema has a name here")
            body["name"] = "answer"
        out["response_format"] = {"type": "json_schema", "json_schema": body}
    else:
        out["response_format"] = {"type": "json_object" if value["type"] == "json" else "text"}


def write_tool(tool: ToolSpec, flavour: Flavour, ledger: Ledger) -> Json:
    """Write one tool definition; None where only another vendor runs it."""
    if tool.kind == "server":
        if ledger.is_home:
            return tool.payload
        ledger.drop(tool.at, "tool", f"{tool.name} is run by {ledger.source} itself", tool.payload)
        return None
    body: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        body["description"] = tool.description
    if tool.schema is not None:
        body["parameters"] = tool.schema
    if tool.strict is not None:
        body["strict"] = tool.strict
    out: dict[str, Any] = {"type": tool.kind, tool.kind: body}
    _write_cache(tool, out, ledger)
    give_back(tool, out, ledger)
    return out


def _write_cache(node: Part | ToolSpec, out: dict[str, Any], ledger: Ledger) -> None:
    if node.cache is None:
        return
    if ledger.is_home:
        out["cache_control"] = {"type": "ephemeral", **node.cache}
    else:
        ledger.drop(node.at, "cache", "the target has no breakpoint here", node.cache)


def write_messages(messages: tuple[Message, ...], flavour: Flavour, ledger: Ledger) -> list[Json]:
    """Write the messages; results leave a mixed message and come first, each as a message of its own."""
    out: list[Json] = []
    for message in messages:
        results = [part for part in message.parts if isinstance(part, ToolResult)]
        if not results:
            out.append(_write_message(message, flavour, ledger))
            continue
        others = tuple(part for part in message.parts if not isinstance(part, ToolResult))
        if others and isinstance(message.parts[0], ToolResult) is False:
            ledger.degrade(message.at, "order", "results come before the rest of their message")
        out += [_write_result(result, message, place, flavour, ledger) for place, result in enumerate(results)]
        if others:
            rest = msgspec.structs.replace(message, role="user", parts=others, native_role=None, ext={})
            if message.flat is False and is_plain(others):
                rest = msgspec.structs.replace(rest, flat=None)
            out.append(_write_message(rest, flavour, ledger))
    return out


def _write_result(result: ToolResult, message: Message, place: int, flavour: Flavour, ledger: Ledger) -> Json:
    is_old = message.native_role == "function" and message.role == "tool" and ledger.is_home
    out: dict[str, Any] = {"role": "function" if is_old else "tool"}
    if not (result.id_made and ledger.is_home):
        out["tool_call_id"] = result.id
    name = result.name if result.name is not None and (ledger.is_home or ledger.kin.get(ledger.source)) else None
    if name is not None:
        out["name"] = name
    if (result.flat is False and ledger.is_home) or (
        result.flat is False and len(result.content) > 1 and all(type(part) is Text for part in result.content)
    ):
        out["content"] = [_write_part(part, flavour, ledger) for part in result.content]
    elif result.content or not (ledger.is_home and shape(message, flavour.name, ABSENT)):
        if result.flat is False and result.content:
            ledger.degrade(result.at, "shape", "a list of one text became the text")
        out["content"] = result_text(result, ledger)
    _lose_result_fields(result, ledger)
    if place == 0:
        give_back(message, out, ledger)
    if ledger.is_home and not result.content and result.flat is None:
        out = {key: value for key, value in out.items() if key != "content" or value}
        give_back(message, out, ledger)
    return out


def _lose_result_fields(result: ToolResult, ledger: Ledger) -> None:
    if result.is_error:
        ledger.drop(result.at, "tool_field", "the target does not say that a result is an error", True)
    elif result.is_error is False:
        ledger.drop(result.at, "shape", "no error, said in words")
    lose_marks(result, ledger)
    give_back(result, {}, ledger)


def _write_message(message: Message, flavour: Flavour, ledger: Ledger) -> Json:
    out: dict[str, Any] = {}
    _write_role(message, out, flavour, ledger)
    if message.name is not None:
        out["name"] = message.name
    if message.role == "assistant":
        _write_assistant(message, out, flavour, ledger, is_answer=False)
    else:
        content = _write_content(message.parts, message.flat, flavour, ledger)
        if content is not None or not message.parts:
            out["content"] = "" if content is None else content
        if not message.parts and ledger.is_home and message.flat is None:
            del out["content"]
    give_back(message, out, ledger)
    return out


def _write_role(message: Message, out: dict[str, Any], flavour: Flavour, ledger: Ledger) -> None:
    native = message.native_role
    if ledger.is_home and native is None and "role" in (shape(message, flavour.name, ABSENT) or ()):
        return
    is_known = native in flavour.roles and ROLES.get(native or "") == message.role
    if is_known or (ledger.is_home and native is not None and ROLES.get(native, "user") == message.role):
        out["role"] = native
        return
    out["role"] = message.role
    if native is not None and native != message.role and native != "model":
        ledger.degrade(f"{message.at}/role", "role", f"the role {native} became {message.role}")


def _write_content(parts: tuple[Part, ...], flat: bool | None, flavour: Flavour, ledger: Ledger) -> Json:
    if not parts:
        return [] if flat is False else None
    if flat is not False and is_plain(parts):
        return parts[0].text  # type: ignore[attr-defined]
    written = [_write_part(part, flavour, ledger) for part in parts]
    return [part for part in written if part is not None]


def _write_part(part: Part, flavour: Flavour, ledger: Ledger) -> Json:
    """Write one member of a content list; None where the target has no word for it."""
    if type(part) is Text:
        out: dict[str, Any] = {"type": "text", "text": part.text}
        for citation in part.citations:
            ledger.drop(citation.at, "citation", "no citations in a request here")
    elif isinstance(part, Media):
        made = _write_media(part, flavour, ledger)
        if made is None:
            return None
        out = made
    elif type(part) is Refusal:
        out = {"type": "refusal", "refusal": part.text}
    elif is_home_raw(part, ledger):
        return part.payload  # type: ignore[attr-defined]
    else:
        lose_part(part, ledger)
        return None
    _write_cache(part, out, ledger)
    lose_marks(part, ledger, cache=False)
    give_back(part, out, ledger)
    return out


def _write_media(media: Media, flavour: Flavour, ledger: Ledger) -> dict[str, Any] | None:
    out: dict[str, Any] | None = None
    if media.kind in ("image", "video") and (url := media_url(media)) is not None:
        key = f"{media.kind}_url"
        body: Json = {"url": url}
        if media.detail is not None:
            body["detail"] = media.detail
        out = {"type": key, key: url if shape(media, flavour.name, "#plain_url") else body}
    elif media.kind == "audio" and media.data is not None:
        form = (media.media_type or "audio/wav").partition("/")[2]
        out = {"type": "input_audio", "input_audio": {"data": media.data, "format": form}}
        if not ledger.is_home:
            ledger.degrade(media.at, "shape", "the type of a sound is one word here")
    elif media.kind == "document" and flavour.has_files:
        out = _write_file(media, flavour, ledger)
    is_film = media.kind == "video" and not ledger.is_home
    if out is None or (is_film and (flavour.has_files or media.data is None)):
        ledger.drop(media.at, "media", f"the target takes no {media.kind} in this form", msgspec.to_builtins(media))
        return None
    is_filename = media.kind == "document" and media.name is None and media.text is None
    if media.title is not None and not ledger.is_home and not is_filename:
        ledger.drop(f"{media.at}/title", "media", "no titles here", media.title)
    return out


def _write_file(media: Media, flavour: Flavour, ledger: Ledger) -> dict[str, Any] | None:
    body: dict[str, Any] = {}
    if media.data is not None:
        body["file_data"] = media.data if shape(media, flavour.name, "#bare_data") else media_url(media)
    elif media.file_id is not None and (ledger.is_home or ledger.source in ("openai", "codex", "copilot")):
        body["file_id"] = media.file_id
    elif media.text is not None:
        ledger.degrade(media.at, "media", "a document of plain text became a text")
        return {"type": "text", "text": media.text}
    else:
        return None
    if media.name is not None:
        body["filename"] = media.name
    elif media.title is not None and not ledger.is_home:
        body["filename"] = media.title
    return {"type": "file", "file": body}


def _write_assistant(
    message: Message, out: dict[str, Any], flavour: Flavour, ledger: Ledger, *, is_answer: bool
) -> None:
    content: list[Part] = []
    calls: list[Json] = []
    rank = 0
    for part in message.parts:
        place = 3 if isinstance(part, ToolUse) else 0 if isinstance(part, Thinking) else 1
        if place < rank and not ledger.is_home:
            ledger.degrade(part.at, "order", "thinking, text and calls stand apart here")
        rank = max(rank, place)
        if isinstance(part, ToolUse):
            _write_call(part, out, calls, flavour, ledger)
        elif isinstance(part, Thinking):
            _write_thinking(part, out, flavour, ledger, is_answer=is_answer)
        elif isinstance(part, Refusal) and not shape(part, flavour.name, "#part"):
            out["refusal"] = out.get("refusal", "") + part.text
            lose_marks(part, ledger)
            give_back(part, {}, ledger)
        elif isinstance(part, Media) and part.kind == "audio" and part.file_id is not None:
            _write_spoken(part, out, ledger)
        elif isinstance(part, Opaque) and part.label.startswith("call of type") and ledger.is_home:
            calls.append(part.payload)
        else:
            content.append(part)
    _write_said(tuple(content), message, out, flavour, ledger, is_answer=is_answer)
    if calls:
        out["tool_calls"] = calls
    if "content" not in out and not ledger.is_home:
        out["content"] = None


def _write_said(
    parts: tuple[Part, ...], message: Message, out: dict[str, Any], flavour: Flavour, ledger: Ledger, *, is_answer: bool
) -> None:
    is_list = ledger.is_home and message.flat is False
    if not is_answer or is_list:
        content = _write_content(parts, message.flat, flavour, ledger)
        if content is not None and (content or message.flat is not None):
            out["content"] = content
        return
    texts = []
    for part in parts:
        if type(part) is Text:
            texts.append(part.text)
            _write_citations(part, out, ledger)
            lose_marks(part, ledger)
            give_back(part, {}, ledger)
        else:
            lose_part(part, ledger)
    if texts:
        out["content"] = "".join(texts)
    if len(texts) > 1 and not ledger.is_home:
        ledger.degrade(message.at, "order", f"{len(texts)} texts became one")


def _write_citations(part: Text, out: dict[str, Any], ledger: Ledger) -> None:
    for citation in part.citations:
        if citation.url is None or (not ledger.is_home and (citation.start is None or citation.end is None)):
            ledger.drop(citation.at, "citation", "only a URL with its span can be said here")
            continue
        pairs = (("url", citation.url), ("title", citation.title), ("start_index", citation.start),
                 ("end_index", citation.end))  # fmt: skip
        body = {key: value for key, value in pairs if value is not None}
        if not ledger.is_home:
            body.setdefault("title", citation.url)
        annotation: dict[str, Any] = {"type": "url_citation", "url_citation": body}
        if citation.quote is not None:
            ledger.drop(citation.at, "citation", "the words cited are not said here", citation.quote)
        give_back(citation, annotation, ledger)
        out.setdefault("annotations", []).append(annotation)


def _write_spoken(media: Media, out: dict[str, Any], ledger: Ledger) -> None:
    body: dict[str, Any] = {"id": media.file_id}
    if media.data is not None:
        body["data"] = media.data
    if media.transcript is not None:
        body["transcript"] = media.transcript
    give_back(media, body, ledger)
    out["audio"] = body


def _write_thinking(part: Thinking, out: dict[str, Any], flavour: Flavour, ledger: Ledger, *, is_answer: bool) -> None:
    field = flavour.thinking_answer if is_answer else flavour.thinking_request
    if ledger.is_home and part.field is not None:
        field = part.field
    if part.redacted is not None or field is None:
        ledger.drop(part.at, "thinking", "the target takes no such thinking", part.text or part.redacted)
        lose_marks(part, ledger)
        give_back(part, {}, ledger)
        return
    if not ledger.is_home:
        ledger.degrade(part.at, "thinking", f"thinking stands in {field}")
    out[field] = out.get(field, "") + part.text
    if part.signature is not None:
        if flavour.signature_field is not None and ledger.is_home:
            out[flavour.signature_field] = part.signature
        else:
            lose_signature(part, ledger)
    give_back(part, {}, ledger)


def _write_call(part: ToolUse, out: dict[str, Any], calls: list[Json], flavour: Flavour, ledger: Ledger) -> None:
    if shape(part, flavour.name, "#old") and ledger.is_home:
        old = {"name": part.name, "arguments": arguments_text(part)}
        give_back(part, old, ledger)
        out["function_call"] = old
        return
    kind = part.kind
    key = "arguments" if kind == "function" else "input"
    absent = shape(part, flavour.name, ABSENT) or ()
    call: dict[str, Any] = {} if "type" in absent and ledger.is_home else {"type": kind}
    body: dict[str, Any] = {"name": part.name}
    if part.input != {} or f"{kind}/arguments" not in absent:
        is_object = shape(part, flavour.name, "#object") and ledger.is_home
        body[key] = part.input if is_object else arguments_text(part)
    call[kind] = body
    if not (part.id_made and ledger.is_home):
        call["id"] = part.id
    lose_marks(part, ledger)
    give_back(part, call, ledger)
    calls.append(call)


# Answers --------------------------------------------------------------------------------------------------------------


def read_answer(response: Json, flavour: Flavour) -> Translated[Answer]:
    """Read a response; a body that only says an error becomes an answer without candidates.

    Raises:
        TranslationError: `dialect_mapping_failed`, it has neither choices nor an error.
    """
    rest = need_object(response, "")
    ext: dict[str, Any] = {}
    absent: list[str] = []
    if "choices" not in rest and "error" in rest:
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
    message = error.get("message") if type(error) is dict else error
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
    if raw is None:
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
    if read is None and flavour.cached_tokens_on_top:
        read = take(rest, "cached_tokens", int)
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


def write_answer(answer: Answer, flavour: Flavour) -> Translated[Json]:
    """Write a response."""
    ledger = Ledger(answer.dialect, flavour.name, flavour.kin)
    out: dict[str, Any] = {}
    if answer.error is not None and not answer.candidates:
        give_back(answer, out, ledger)
        if "error" not in out:
            out["error"] = {"message": answer.error, "type": "upstream_error", "param": None, "code": None}
        return Translated(out, ledger.done())
    for key, value in (("id", answer.id), ("created", answer.created), ("model", answer.model)):
        if value is not None:
            out[key] = int(value) if key == "created" and not ledger.is_home else value
    out["choices"] = [
        _write_choice(candidate, place, flavour, ledger) for place, candidate in enumerate(answer.candidates)
    ]
    if answer.usage is not None:
        out["usage"] = write_usage(answer.usage, flavour, ledger)
    give_back(answer, out, ledger)
    put_constants(answer, out, flavour.name, {"object": "chat.completion"})
    if not ledger.is_home:
        _require(out, ledger, {"id": "chatcmpl-translated", "created": 0, "model": "unknown"})
    return Translated(out, ledger.done())


def _require(out: dict[str, Any], ledger: Ledger, defaults: Mapping[str, Any]) -> None:
    for key, value in defaults.items():
        if out.get(key) is None:
            ledger.synthesise(f"/{key}", "required", f"an answer has {key} here")
            out[key] = value


def _write_choice(candidate: Candidate, place: int, flavour: Flavour, ledger: Ledger) -> Json:
    message: dict[str, Any] = {}
    _write_assistant(candidate.message, message, flavour, ledger, is_answer=True)
    give_back(candidate.message, message, ledger)
    absent = shape(candidate, flavour.name, ABSENT) or ()
    if "message/role" not in absent:
        message.setdefault("role", "assistant")
    choice: dict[str, Any] = {} if "message" in absent and ledger.is_home else {"message": message}
    word = write_stop(candidate, ledger)
    if word is not None:
        choice["finish_reason"] = word
    give_back(candidate, choice, ledger)
    put_constants(candidate, choice, flavour.name, {"index": place})
    return choice


def write_stop(candidate: Candidate, ledger: Ledger) -> str | None:
    """Return the word for why the answer stopped: the vendor's own while it means the same."""
    raw, stop = candidate.stop_raw, candidate.stop
    is_kin = ledger.is_home or ledger.source in ledger.kin
    if (
        is_kin
        and raw is not None
        and read_stop(raw, candidate.message.parts) == stop
        and (ledger.is_home or raw in STOPS)
    ):
        return raw
    if stop is None and ledger.is_home:
        return None
    word = STOP_WORDS.get(stop or "", "stop")
    if stop not in ("end", "max_tokens", "tool_use", "content_filter"):
        ledger.degrade(candidate.stop_at, "stop", f"{raw or stop} became {word}")
    stop_word(candidate, ledger)
    return word


def write_usage(usage: Usage, flavour: Flavour, ledger: Ledger) -> Json:
    """Write token counters."""
    out: dict[str, Any] = {}
    for key, value in (("prompt_tokens", usage.input), ("completion_tokens", usage.output)):
        if value is not None:
            out[key] = value
        elif not ledger.is_home:
            ledger.synthesise(f"{usage.at}/{key}", "required", "a counter that was not said is written as 0")
            out[key] = 0
    on_top = flavour.cached_tokens_on_top and not shape(usage, flavour.name, "#details")
    if usage.cache_read is not None and on_top:
        out["cached_tokens"] = usage.cache_read
    details = (
        ("prompt_tokens_details", "cached_tokens", None if on_top else usage.cache_read),
        ("prompt_tokens_details", "cache_write_tokens", usage.cache_write),
        ("completion_tokens_details", "reasoning_tokens", usage.reasoning),
    )
    for key, name, value in details:
        if value is not None:
            out.setdefault(key, {})[name] = value
    give_back(usage, out, ledger)
    put_constants(usage, out, flavour.name, {"total_tokens": (usage.input or 0) + (usage.output or 0)})
    return out


def system_text(text: str) -> tuple[Part, ...]:
    return plain_text(text, "")
