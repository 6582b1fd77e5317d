"""Google's generateContent, as its reference describes it (ai.google.dev, read November 2026).

Contents hold parts; the system text and most options stand outside. Every member has two spellings. Calls have no id
as a rule. Streams are in `gemini_stream`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane import ir
from backplane.contract.canonical import Json
from backplane.contract.capability import EMULATED, NATIVE, UNSUPPORTED, Manifest
from backplane.dialects.codec import (
    EFFORT_BUDGETS,
    FREE_TEXT,
    MADE_ID,
    NUMBER,
    Calls,
    Ledger,
    Members,
    Option,
    Writer,
    arguments_object,
    calls_of,
    is_own_raw,
    json_text,
    put_back,
    put_ext,
    read_options,
    unchanged,
    write_options,
)
from backplane.dialects.limits import Limits, Spelling
from backplane.dialects.losses import calls_in, chosen_kind, lose_part
from backplane.dialects.outcome import Endings, failed_answer, failed_body
from backplane.dialects.vendor import Dialect, no_name, write_tools
from backplane.errors import TranslationError

NAME: Final = "gemini"

TOOL_NAMES: Final[dict[str, str]] = {
    "read_file": "read_file", "read_many_files": "read_file", "write_file": "write_file", "replace": "edit_file",
    "list_directory": "list_files", "glob": "glob", "search_file_content": "grep", "grep_search": "grep",
    "run_shell_command": "bash", "google_web_search": "web_search", "web_fetch": "web_fetch",
}  # fmt: skip
"""The names that the vendor's agent gives its tools → neutral names."""

CAPABILITIES: Final = Manifest({
    "streaming": NATIVE,
    "tool_read": NATIVE, "tool_write": EMULATED, "tool_edit": EMULATED, "tool_bash": EMULATED,
    "tool_glob": UNSUPPORTED, "tool_grep": UNSUPPORTED,
    "structured_output_json_schema": NATIVE,
    "mcp_client": UNSUPPORTED, "mcp_server": UNSUPPORTED,
})  # fmt: skip

DEFAULTS: Final[dict[str, Json]] = {"model": "gemini-3.8-flash", "max_tokens": 4096}

ROLES: Final[dict[str, ir.Role]] = {"user": "user", "model": "assistant", "function": "tool", "system": "system"}

STOPS: Final[dict[str, ir.Stop]] = {
    "STOP": "end", "MAX_TOKENS": "max_tokens", "SAFETY": "content_filter", "RECITATION": "content_filter",
    "BLOCKLIST": "content_filter", "PROHIBITED_CONTENT": "content_filter", "SPII": "content_filter",
    "IMAGE_SAFETY": "content_filter", "IMAGE_PROHIBITED_CONTENT": "content_filter", "LANGUAGE": "content_filter",
    "MALFORMED_FUNCTION_CALL": "error", "UNEXPECTED_TOOL_CALL": "error", "TOO_MANY_TOOL_CALLS": "error",
    "MALFORMED_RESPONSE": "error", "MISSING_THOUGHT_SIGNATURE": "error", "FINISH_REASON_UNSPECIFIED": "other",
}  # fmt: skip

STOP_WORDS: Final[dict[ir.Stop | None, str]] = {
    "end": "STOP", "tool_use": "STOP", "stop_sequence": "STOP", "max_tokens": "MAX_TOKENS",
    "content_filter": "SAFETY", "refusal": "SAFETY",
    # Never `STOP`: the answer may not be whole.
    None: "OTHER", "error": "OTHER", "pause": "OTHER", "cancelled": "OTHER", "other": "OTHER",
}  # fmt: skip

ENDINGS: Final = Endings(STOPS, STOP_WORDS)
MODES: Final = {"AUTO": "auto", "ANY": "required", "NONE": "none"}
LEVELS: Final = {"MINIMAL": "minimal", "LOW": "low", "MEDIUM": "medium", "HIGH": "high"}
STOPS_MAX: Final = 5
"""Most stop sequences that the vendor takes."""

OPTIONS: Final = (
    Option("generationConfig/maxOutputTokens", "max_tokens", (int,), least=1),
    Option("generationConfig/temperature", "temperature", NUMBER, least=0, most=2),
    Option("generationConfig/topP", "top_p", NUMBER),
    Option("generationConfig/topK", "top_k", NUMBER, least=1),
    Option("generationConfig/stopSequences", "stop", (list,)),
    Option("generationConfig/seed", "seed", (int,)),
    Option("generationConfig/frequencyPenalty", "frequency_penalty", NUMBER),
    Option("generationConfig/presencePenalty", "presence_penalty", NUMBER),
    Option("generationConfig/candidateCount", "n", (int,), least=1, most=8),
    Option("generationConfig/responseLogprobs", "logprobs", (bool,)),
    Option("generationConfig/logprobs", "top_logprobs", (int,), least=0, most=20),
    Option("generationConfig/thinkingConfig/thinkingBudget", "reasoning_budget", (int,)),
    Option("generationConfig/thinkingConfig/includeThoughts", "reasoning_shown", (bool,)),
    Option("generationConfig/thinkingConfig/thinkingLevel", "reasoning_effort", words=LEVELS),
)

PLACES: Final = {
    **{row.name: row.path.partition("/")[0] for row in OPTIONS},
    "input": "promptTokenCount", "output": "candidatesTokenCount", "cache_read": "cachedContentTokenCount",
    "reasoning": "thoughtsTokenCount", "id": "responseId", "model": "modelVersion", "usage": "usageMetadata",
    "signature": "thoughtSignature", "candidates": "candidates", "response_format": "generationConfig",
    "tool_choice": "toolConfig",
}  # fmt: skip
LIMITS: Final = Limits(
    tool_name=Spelling("[a-zA-Z0-9_.:-]", 64, "[a-zA-Z_]"), takes_empty_text=False, takes_objects=True, needs_user=True
)
"""ai.google.dev, function declarations and contents, read 2026-11."""

MEDIA_TYPES: Final = {"image": "image/png", "audio": "audio/wav", "video": "video/mp4"}
"""Kind of media → the type written where the source says none."""


# Parts ----------------------------------------------------------------------------------------------------------------


def read_part(value: Json, at: str, calls: Calls) -> ir.Part:
    """Read one part of any kind."""
    if type(value) is str:
        return ir.Text(text=value, at=at, raw=value)
    if type(value) is not dict:
        return ir.Opaque(dialect=NAME, label="part", payload=value, at=at, raw=value)
    if len(value) == 1 and type(value.get("text")) is str:
        return ir.Text(text=value["text"], at=at, raw=value)
    members = Members(value, at, spell=True)
    fields = {"signature": members.take("thoughtSignature"), "at": at, "raw": value}
    for name, read in PART_READERS.items():
        if members.find(name) in members.rest and (made := read(members, fields, calls)) is not None:
            part: ir.Part = made
            return msgspec.structs.replace(part, ext=members.ext(NAME))
    label = next(iter(value), "empty part")
    if label in ("executableCode", "codeExecutionResult", "executable_code", "code_execution_result", "toolCall"):
        return ir.ServerTool(dialect=NAME, name=label, payload=value, at=at, raw=value)
    return ir.Opaque(dialect=NAME, label=label, payload=value, at=at, raw=value)


def _read_text(members: Members, fields: dict[str, Any], calls: Calls) -> ir.Part | None:
    text = members.take("text")
    if text is None:
        return None
    if members.rest.get("thought") is True:
        del members.rest["thought"]
        return ir.Thinking(text=text, **fields)
    return ir.Text(text=text, **fields)


def _read_call(members: Members, fields: dict[str, Any], calls: Calls) -> ir.Part | None:
    body = members.inner("functionCall")
    if body is None:
        return None
    name, args = body.take("name") or "", body.take("args", dict) or {}
    call_id = body.take("id") if body.rest.get("id") else None
    return ir.ToolUse(id=call_id or calls.make(name), id_made=not call_id, name=name, input=args, **fields)


def _read_result(members: Members, fields: dict[str, Any], calls: Calls) -> ir.Part | None:
    body = members.inner("functionResponse")
    if body is None:
        return None
    name, value = body.take("name"), body.take("response", dict)
    call_id = body.take("id") if body.rest.get("id") else None
    content: tuple[ir.Part, ...] = ()
    is_error = None
    if value is not None:
        at = f"{body.at}/response"
        if len(value) == 1 and type(text := value.get("output", value.get("error"))) is str:
            is_error = True if "error" in value else None
            content, value = (ir.Text(text=text, at=at),), None
        else:
            content = (ir.Text(text=json_text(value), at=at),)
    more = body.take("parts", list)  # pictures of a result
    found = tuple(read_part(one, f"{body.at}/parts/{place}", calls) for place, one in enumerate(more or ()))
    if all(isinstance(part, ir.Media) for part in found):
        content += found
    elif more is not None:
        put_back(body, "parts", more)
    return ir.ToolResult(
        id=call_id or calls.answer(name or ""), id_made=not call_id, name=name, content=content, is_error=is_error,
        value=value, **fields,
    )  # fmt: skip


def _read_media(member: str, path: str, field: str) -> Any:
    def read(members: Members, fields: dict[str, Any], calls: Calls) -> ir.Part | None:
        body = members.inner(member)
        value = None if body is None else body.take(path)
        if body is None or value is None:
            return None
        media_type = body.take("mimeType")
        return ir.Media(
            kind=media_kind(media_type), media_type=media_type, name=body.take("displayName"), **{field: value},
            **fields,
        )  # fmt: skip

    return read


def media_kind(media_type: str | None) -> Any:
    """Return what kind of media a type is."""
    head = (media_type or "").partition("/")[0]
    return head if head in ("image", "audio", "video") else "document"


PART_READERS: Final[dict[str, Any]] = {
    "functionCall": _read_call,
    "functionResponse": _read_result,
    "inlineData": _read_media("inlineData", "data", "data"),
    "fileData": _read_media("fileData", "fileUri", "url"),
    "text": _read_text,
}


def write_part(part: ir.Part, names: dict[str, str], ledger: Ledger) -> Json:
    """Write one part, None where the target has no word for it."""
    if is_own_raw(part, ledger):
        return part.payload  # type: ignore[attr-defined]
    given = Calls([part.id] if getattr(part, "id_made", False) else ())  # type: ignore[attr-defined]
    if unchanged(part, ledger, lambda: read_part(part.raw, part.at, given)):
        return part.raw
    out = _write_kind(part, names, ledger)
    if out is None:
        lose_part(part, ledger)
        return None
    if part.signature is not None and ledger.is_home:
        out["thoughtSignature"] = part.signature
    put_ext(part, out, ledger)
    return out


def _write_kind(part: ir.Part, names: dict[str, str], ledger: Ledger) -> dict[str, Any] | None:
    if isinstance(part, ir.Text | ir.Refusal):
        if isinstance(part, ir.Refusal):
            ledger.degrade(part.at, "part", "a refusal is said as text here")
        return {"text": part.text}
    if isinstance(part, ir.Thinking) and part.redacted is None and (part.text or ledger.is_home):
        return {"text": part.text, "thought": True}
    if isinstance(part, ir.ToolUse):
        args = arguments_object(part, ledger)
        return {"functionCall": {**_own_id(part), "name": part.name, "args": args}}
    if isinstance(part, ir.ToolResult):
        return _write_result(part, names, ledger)
    return _write_media(part, ledger) if isinstance(part, ir.Media) else None


def _own_id(part: ir.ToolUse | ir.ToolResult) -> dict[str, str]:
    return {} if part.id_made or part.id.startswith(MADE_ID) else {"id": part.id}


def _write_result(part: ir.ToolResult, names: dict[str, str], ledger: Ledger) -> dict[str, Any]:
    name = part.name if part.name is not None else names.get(part.id)
    body: dict[str, Any] = {**_own_id(part), "name": "unknown" if name is None else name}
    texts = [inner.text for inner in part.content if isinstance(inner, ir.Text)]
    is_value = type(part.value) is dict and texts == [json_text(part.value)]
    media = []
    for inner in part.content:
        made = _write_media(inner, ledger) if isinstance(inner, ir.Media) else None
        if made is None and not isinstance(inner, ir.Text):
            lose_part(inner, ledger)
        elif made is not None and "text" in made:
            texts.append(made["text"])
        elif made is not None:
            media.append(made)
        put_ext(inner, {}, ledger)
    if media:
        body["parts"] = media
    if is_value:
        body["response"] = part.value
    elif part.content or not ledger.is_home:
        body["response"] = {"error" if part.is_error else "output": "\n".join(texts)}
    return {"functionResponse": body}


def _write_media(part: ir.Media, ledger: Ledger) -> dict[str, Any] | None:
    if part.text is not None:
        ledger.degrade(part.at, "media", "a document of plain text became a text")
        return {"text": part.text}
    body: dict[str, Any]
    if part.data is not None:
        name, body = "inlineData", {"data": part.data}
    elif part.url is not None:
        name, body = "fileData", {"fileUri": part.url}
    else:
        return None
    media_type = part.media_type
    if media_type is None and not ledger.is_home:
        media_type = MEDIA_TYPES.get(part.kind, "application/pdf")
        ledger.synthesise(part.at, "media", f"media have a type here: {media_type}")
    if media_type is not None:
        body["mimeType"] = media_type
    if part.name is not None and ledger.is_home:
        body["displayName"] = part.name
    return {name: body}


# Contents -------------------------------------------------------------------------------------------------------------


def read_message(value: Json, at: str, calls: Calls) -> ir.Message:
    """Read one content; a user's content that holds only results is of the role `tool`."""
    if type(value) is str:
        return ir.Message(role="user", parts=(ir.Text(text=value, at=at),), flat=True, at=at, raw=value)
    members = Members(value, at)
    native_role = members.take("role")
    found = members.take("parts", list) or ()
    parts = tuple(read_part(part, f"{at}/parts/{place}", calls) for place, part in enumerate(found))
    role = ROLES.get(native_role or "", "user")
    if role == "user" and parts and all(isinstance(part, ir.ToolResult) for part in parts):
        role = "tool"
    return ir.Message(role=role, parts=parts, native_role=native_role, at=at, ext=members.ext(NAME), raw=value)


def write_message(message: ir.Message, names: dict[str, str], ledger: Ledger, role: ir.Role | None = None) -> Json:
    """Write one content.

    Args:
        names: id of a call → the tool's name, which a result has to say here.
        role: the role that the content was given when it was read.
    """

    def again() -> ir.Message:
        read = read_message(message.raw, message.at, calls_of(message))
        return read if role is None else msgspec.structs.replace(read, role=role)

    if unchanged(message, ledger, again):
        return message.raw
    native = message.native_role
    out: dict[str, Any] = {"role": "model" if message.role == "assistant" else "user"}
    if ledger.is_home and native is not None and (native not in ROLES or _fits(ROLES[native], message.role)):
        out["role"] = native
    out["parts"] = write_parts(message.parts, names, ledger)
    put_ext(message, out, ledger)
    return out


def _fits(native: ir.Role, role: ir.Role) -> bool:
    return role in (native, "system") or (role == "tool" and native == "user")


def write_parts(parts: tuple[ir.Part, ...], names: dict[str, str], ledger: Ledger) -> list[Json]:
    """Write parts; those that the target has no word for are left out and reported."""
    made = ((part, write_part(part, names, ledger)) for part in parts)
    return [written for part, written in made if written is not None or is_own_raw(part, ledger)]


def _write_contents(conversation: ir.Conversation, out: dict[str, Any], ledger: Ledger) -> None:
    names = {call.id: call.name for call in calls_in(conversation.messages)}
    system: list[ir.Message] = []
    contents: list[Json] = []
    last: ir.Role | None = None
    for message in conversation.messages:
        if message.role == "system" and not (ledger.is_home and message.at.startswith("/contents/")):
            if contents:
                ledger.degrade(message.at, "order", "system text in the middle became part of the head")
            system.append(message)
            continue
        written = write_message(message, names, ledger)
        if last == "tool" and message.role in ("tool", "user") and not ledger.is_home:
            contents[-1]["parts"] += written["parts"]
        elif type(written) is dict and not written.get("parts") and not ledger.is_home:
            ledger.drop(message.at, "shape", "a content without parts is refused here")
            continue
        else:
            contents.append(written)
        last = message.role
    if len(system) == 1 and ledger.is_home:
        out["systemInstruction"] = write_message(system[0], names, ledger, "system")
    elif system:
        for message in system:
            put_ext(message, {}, ledger)
        out["systemInstruction"] = {
            "parts": [part for message in system for part in write_parts(message.parts, names, ledger)]
        }
    out["contents"] = contents


# Requests -------------------------------------------------------------------------------------------------------------


def read_request(request: Json, ledger: Ledger, calls: Calls) -> ir.Conversation:
    """Read a request. Raises `TranslationError` `dialect_mapping_failed` where it is none."""
    members = Members(request, "", spell=True)
    messages: list[ir.Message] = []
    at = members.place("systemInstruction")
    if (system := members.take("systemInstruction", dict, str)) is not None:
        messages.append(msgspec.structs.replace(read_message(system, at, calls), role="system"))
    if (text := members.take("contents")) is not None:
        messages.append(ir.Message(role="user", parts=(ir.Text(text=text, at="/contents"),), flat=True, at="/contents"))
    else:
        found = members.need("contents")
        messages += [read_message(content, f"/contents/{place}", calls) for place, content in enumerate(found)]
    options: dict[str, Any] = {}
    places: dict[str, str] = {}
    read_options(members, OPTIONS, options, places)
    _read_format(members, options, places)
    _read_choice(members, options, places)
    tools: list[ir.ToolSpec] = []
    if members.rest.get("tools"):
        for place, tool in enumerate(members.take("tools", list) or ()):
            tools += _read_list(tool, f"/tools/{place}")
    return ir.Conversation(
        dialect=NAME, messages=tuple(messages), model=members.take("model"), tools=tuple(tools), options=options,
        options_at=places, ext=members.ext(NAME),
    )  # fmt: skip


def _read_format(members: Members, options: dict[str, Any], places: dict[str, str]) -> None:
    """Take the form of the answer: a media type, and a schema under either of its two names."""
    body = members.inner("generationConfig")
    if body is None:
        return
    mime = body.rest.get(body.find("responseMimeType"))
    if mime not in ("application/json", "text/plain"):
        return
    places["response_format"] = body.place("responseMimeType")
    if mime == "text/plain":
        options["response_format"] = {"type": "text"}
    else:
        schema, own = body.take("responseJsonSchema", dict), None
        if schema is None and (own := body.take("responseSchema", dict)) is not None:
            schema = lower_types(own)
        options["response_format"] = {"type": "json"} if schema is None else {"type": "schema", "schema": schema}
    body.take("responseMimeType")


def _read_choice(members: Members, options: dict[str, Any], places: dict[str, str]) -> None:
    found = members.rest.get(members.find("toolConfig"))
    at = members.place("toolConfig")
    outer = Members(found, at, spell=True) if type(found) is dict else None
    inner = None if outer is None else outer.inner("functionCallingConfig")
    if outer is None or inner is None or outer.rest:
        return
    mode, names = inner.take("mode"), inner.take("allowedFunctionNames", list)
    is_forced = names is not None and mode == "ANY" and len(names) == 1 and type(names[0]) is str
    if mode not in MODES or inner.rest or (names is not None and not is_forced):
        return
    members.take("toolConfig", dict)
    options["tool_choice"] = {"mode": "tool", "name": names[0]} if names else {"mode": MODES[mode]}
    places["tool_choice"] = inner.at


def _read_list(tool: Json, at: str) -> list[ir.ToolSpec]:
    """Unfold a list of declarations; anything else is a tool that the vendor runs."""
    members = Members(tool, at, spell=True) if type(tool) is dict else None
    place = "" if members is None else members.place("functionDeclarations")
    found = None if members is None else members.take("functionDeclarations", list)
    if members is None or members.rest or not found or not all(map(_is_declaration, found)):
        name = next(iter(tool), "empty") if type(tool) is dict else "unreadable"
        return [ir.ToolSpec(name=name, kind="server", payload=tool, at=at)]
    return [read_tool(declaration, f"{place}/{spot}") for spot, declaration in enumerate(found)]


def _is_declaration(value: Json) -> bool:
    return type(value) is dict and type(value.get("name")) is str


def read_tool(tool: Json, at: str) -> ir.ToolSpec:
    """Read one tool definition; its schema stands under one of two names, in one of two dialects."""
    if not _is_declaration(tool):
        return ir.ToolSpec(name="unreadable", kind="server", payload=tool, at=at)
    members = Members(tool, at, spell=True)
    schema = members.take("parametersJsonSchema", dict)
    if schema is None and (own := members.take("parameters", dict)) is not None:
        schema = lower_types(own)
    return ir.ToolSpec(
        name=members.take("name"), description=members.take("description"), schema=schema, at=at,
        ext=members.ext(NAME), raw=tool,
    )  # fmt: skip


def lower_types(schema: Json) -> Json:
    """Write the vendor's own schema dialect as JSON Schema: types in lower case."""
    if isinstance(schema, list):
        return [lower_types(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {}
    for key, value in schema.items():
        if key == "type" and isinstance(value, str):
            out[key] = value.lower()
        else:
            out[key] = value if key in ("enum", "required", "example", "default") else lower_types(value)
    return out


def write_tool(tool: ir.ToolSpec, ledger: Ledger) -> Json:
    """Write one tool definition."""
    if unchanged(tool, ledger, lambda: read_tool(tool.raw, tool.at)):
        return tool.raw
    schema = FREE_TEXT if tool.kind == "custom" else tool.schema
    pairs = (("name", tool.name), ("description", tool.description), ("parametersJsonSchema", schema))
    out: dict[str, Any] = {key: value for key, value in pairs if value is not None}
    put_ext(tool, out, ledger)
    return out


def write_request(conversation: ir.Conversation, ledger: Ledger) -> dict[str, Any]:
    """Write a request."""
    out: dict[str, Any] = {}
    if conversation.model is not None:
        out["model"] = conversation.model
    _write_contents(conversation, out, ledger)
    functions = [write_tool(tool, ledger) for tool in conversation.tools if tool.kind != "server"]
    tools: list[Json] = [{"functionDeclarations": functions}] if functions else []
    tools += write_tools(tuple(tool for tool in conversation.tools if tool.kind == "server"), ledger, write_tool)
    if tools:
        out["tools"] = tools
    write_options(conversation, out, ledger, OPTIONS, _special(conversation))
    put_ext(conversation, out, ledger)
    return out


def _special(conversation: ir.Conversation) -> dict[str, Writer]:
    def choice(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
        if value["mode"] == "tool" and chosen_kind(value, conversation, ledger, at) is None:
            return
        mode = next((word for word, mode in MODES.items() if mode == value["mode"]), "ANY")
        config: dict[str, Any] = {"mode": mode}
        if value["mode"] == "tool":
            config["allowedFunctionNames"] = [value["name"]]
        out["toolConfig"] = {"functionCallingConfig": config}

    def effort(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
        words = {word: level for level, word in LEVELS.items()}
        thinking = out.setdefault("generationConfig", {}).setdefault("thinkingConfig", {})
        if ledger.is_home and value in words:
            thinking["thinkingLevel"] = words[value]
        elif "reasoning_budget" in conversation.options:
            ledger.drop(at, "option", "the budget says how long to think", value)
        elif value in EFFORT_BUDGETS:
            ledger.degrade(at, "option_value", f"the word became {EFFORT_BUDGETS[value]} tokens for thinking", value)
            thinking["thinkingBudget"] = EFFORT_BUDGETS[value]
        else:
            ledger.drop(at, "option_value", "no such effort here", value)
        if not thinking:
            del out["generationConfig"]["thinkingConfig"]

    return {
        "tool_choice": choice, "reasoning_effort": effort, "response_format": _write_format, "stream": _write_stream,
        "stop": _write_stops, "parallel_tool_calls": _write_parallel,
    }  # fmt: skip


def _write_stream(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    ledger.degrade(at, "transport", "whether to stream is said by the URL here", value)


def _write_parallel(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    if value:
        ledger.degrade(at, "shape", "several calls in one turn are the rule here")
    else:
        ledger.drop(at, "option", "several calls in one turn cannot be forbidden here", value)


def _write_stops(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    if not ledger.is_home and len(value) > STOPS_MAX:
        ledger.drop(at, "option_value", f"more than {STOPS_MAX} stop sequences", value[STOPS_MAX:])
        value = value[:STOPS_MAX]
    out.setdefault("generationConfig", {})["stopSequences"] = value


def _write_format(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    config = out.setdefault("generationConfig", {})
    config["responseMimeType"] = "text/plain" if value["type"] == "text" else "application/json"
    if value["type"] == "schema" and "schema" in value:
        config["responseJsonSchema"] = value["schema"]


# Answers --------------------------------------------------------------------------------------------------------------


def read_answer(response: Json, ledger: Ledger, calls: Calls) -> ir.Answer:
    """Read a response. Raises `TranslationError` `dialect_mapping_failed` where it is none."""
    members = Members(response, "", spell=True)
    if "error" in members.rest and "candidates" not in members.rest:
        return failed_answer(NAME, members)
    found = members.take("candidates", list)
    feedback = members.find("promptFeedback")
    if found is None and feedback not in members.rest and members.find("usageMetadata") not in members.rest:
        raise TranslationError("dialect_mapping_failed", "no candidates", hint="check --from and --kind")
    candidates = tuple(_read_candidate(one, place, calls) for place, one in enumerate(found or ()))
    if not candidates and feedback in members.rest:  # a prompt that was refused has no candidate, only a reason
        blocked = ir.Message(role="assistant", parts=())
        candidates = (ir.Candidate(message=blocked, stop="content_filter", stop_at=f"/{feedback}"),)
    at = members.place("usageMetadata")
    usage = members.take("usageMetadata", dict)
    return ir.Answer(
        dialect=NAME, id=members.take("responseId"), model=members.take("modelVersion"), candidates=candidates,
        usage=read_usage(usage, at) if usage is not None else None, ext=members.ext(NAME),
    )  # fmt: skip


def _read_candidate(candidate: Json, place: int, calls: Calls) -> ir.Candidate:
    at = f"/candidates/{place}"
    members = Members(candidate, at, spell=True)
    members.skip("index", place)
    content = members.take("content", dict)
    message = ir.Message(role="assistant", parts=())
    if content is not None:
        message = msgspec.structs.replace(read_message(content, f"{at}/content", calls), role="assistant")
    stop_at = members.place("finishReason")
    raw = members.take("finishReason")
    return ir.Candidate(
        message=message, stop=ENDINGS.read(raw, message.parts), stop_raw=raw, stop_at=stop_at, at=at,
        ext=members.ext(NAME), raw=candidate,
    )  # fmt: skip


def read_usage(usage: dict[str, Any], at: str) -> ir.Usage:
    """Read token counters; thoughts and what tools put into the prompt are counted apart here."""
    members = Members(usage, at, spell=True)
    sent, made = members.take("promptTokenCount", int), members.take("candidatesTokenCount", int)
    thought, cached = members.take("thoughtsTokenCount", int), members.take("cachedContentTokenCount", int)
    tools = members.rest.get(members.find("toolUsePromptTokenCount"))
    tools = tools if type(tools) is int else 0
    members.skip("totalTokenCount", (sent or 0) + (made or 0) + (thought or 0) + tools)
    return ir.Usage(
        input=None if sent is None and not tools else (sent or 0) + tools,
        output=None if made is None and thought is None else (made or 0) + (thought or 0),
        cache_read=cached, reasoning=thought, at=at, ext=members.ext(NAME), raw=usage,
    )  # fmt: skip


def write_answer(answer: ir.Answer, ledger: Ledger) -> dict[str, Any]:
    """Write a response."""
    out: dict[str, Any] = {}
    if answer.error is not None and not answer.candidates:
        return failed_body(answer, ledger, {"code": 502, "message": answer.error, "status": "UNAVAILABLE"})
    feedback = {"promptFeedback", "prompt_feedback"} & answer.ext.get(NAME, {}).keys()
    is_blocked = ledger.is_home and feedback and not answer.candidates[0].message.parts
    candidates = answer.candidates[1:] if is_blocked else answer.candidates
    out["candidates"] = [_write_candidate(candidate, place, ledger) for place, candidate in enumerate(candidates)]
    for key, value in (("responseId", answer.id), ("modelVersion", answer.model)):
        if value is not None:
            out[key] = value
    if answer.usage is not None:
        out["usageMetadata"] = write_usage(answer.usage, ledger)
    put_ext(answer, out, ledger)
    return out


def _write_candidate(candidate: ir.Candidate, place: int, ledger: Ledger) -> Json:
    out: dict[str, Any] = {"content": write_message(candidate.message, {}, ledger, "assistant"), "index": place}
    if (word := ENDINGS.write(candidate, ledger)) is not None:
        out["finishReason"] = word
    put_ext(candidate, out, ledger)
    return out


def write_usage(usage: ir.Usage, ledger: Ledger) -> dict[str, Any]:
    """Write token counters: thoughts apart from what was said."""
    mine = usage.ext.get(NAME, {}) if ledger.is_home else {}
    tools = mine.get("toolUsePromptTokenCount", mine.get("tool_use_prompt_token_count", 0))
    tools = tools if type(tools) is int else 0
    pairs = (
        ("promptTokenCount", None if usage.input is None else usage.input - tools),
        ("candidatesTokenCount", None if usage.output is None else usage.output - (usage.reasoning or 0)),
        ("thoughtsTokenCount", usage.reasoning), ("cachedContentTokenCount", usage.cache_read),
    )  # fmt: skip
    out: dict[str, Any] = {key: value for key, value in pairs if value is not None}
    put_ext(usage, out, ledger)
    out.setdefault("totalTokenCount", (usage.input or 0) + (usage.output or 0))
    return out


def _dialect() -> Dialect:
    from backplane.dialects.gemini_stream import GeminiReader, GeminiWriter

    return Dialect(
        NAME=NAME, TOOL_NAMES=TOOL_NAMES, CAPABILITIES=CAPABILITIES, DEFAULTS=DEFAULTS, read_request=read_request,
        write_request=write_request, read_answer=read_answer, write_answer=write_answer, read_tool=read_tool,
        write_tool=write_tool, read_stream=GeminiReader, write_stream=GeminiWriter, event_name=no_name,
        limits=LIMITS, places=PLACES, listed="/contents",
        content=frozenset({"contents", "systemInstruction", "system_instruction", "candidates"}),
    )  # fmt: skip


DIALECT: Final = _dialect()
