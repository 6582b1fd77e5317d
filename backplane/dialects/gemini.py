"""Reads and writes Google's generateContent, as its reference describes it (ai.google.dev, read November 2026).

Contents have parts; the system text and most options are outside of them. Every member has two spellings. Calls
usually have no id. Every chunk of a stream is a small response; arguments of calls may come in pieces with their
JSON path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.capability import EMULATED, NATIVE, UNSUPPORTED, Manifest
from backplane.dialects import ir
from backplane.dialects.common import (
    EFFORT_BUDGETS,
    MADE_ID,
    NUMBER,
    Calls,
    Counters,
    LossLedger,
    OptionsRead,
    answer_of,
    conversation_of,
    ext_of,
    json_text,
    members_of,
    pop,
    pop_at,
    pop_inner,
    pop_list,
    put_at,
    put_back,
    server_tool,
    snake,
    tool_of,
    without_none,
    write_options,
    write_part,
    write_parts,
)
from backplane.dialects.limits import CUT_CALL, ServerLimits, Spelling, calls_in
from backplane.dialects.outcome import Endings
from backplane.dialects.streams import BlockReader, BlockWriter, Key, begun, failure
from backplane.dialects.vendor import Dialect, outside, read_error
from backplane.errors import TranslationError

NAME: Final = "gemini"

TOOL_NAMES: Final[dict[str, str]] = {
    "read_file": "read_file", "read_many_files": "read_file", "write_file": "write_file", "replace": "edit_file",
    "list_directory": "list_files", "glob": "glob", "search_file_content": "grep", "grep_search": "grep",
    "run_shell_command": "bash", "google_web_search": "web_search", "web_fetch": "web_fetch",
}  # fmt: skip
"""Tool names of the vendor's agent → neutral names."""

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
    # These answers may be incomplete, so they must not end with `STOP`.
    None: "OTHER", "error": "OTHER", "pause": "OTHER", "cancelled": "OTHER", "other": "OTHER",
}  # fmt: skip

ENDINGS: Final = Endings(STOPS, STOP_WORDS)
MODES: Final = {"AUTO": "auto", "ANY": "required", "NONE": "none"}
CALLED_ELSEWHERE: Final = frozenset({"executableCode", "codeExecutionResult", "toolCall"})
"""Members of parts that belong to tools run by the vendor."""
LEVELS: Final = {"MINIMAL": "minimal", "LOW": "low", "MEDIUM": "medium", "HIGH": "high"}

LIMITS: Final = ServerLimits(
    tool_name=Spelling("[a-zA-Z0-9_.:-]", 64, "[a-zA-Z_]"), takes_empty_text=False, takes_refusals=False,
    takes_objects=True, needs_user=True,
)  # fmt: skip
"""Limits of function names and of contents (ai.google.dev, function declarations and contents, read 2026-11)."""

MEDIA_TYPES: Final = {"image": "image/png", "audio": "audio/wav", "video": "video/mp4"}
"""Kind of media → media type to write if the source has none."""


SAME: Final[dict[str, tuple[type[Any], ...]]] = {
    f"generationConfig/{path}": kinds for path, kinds in {
        "maxOutputTokens": (int,), "temperature": NUMBER, "topP": NUMBER, "topK": NUMBER, "stopSequences": (list,),
        "seed": (int,), "frequencyPenalty": NUMBER, "presencePenalty": NUMBER, "candidateCount": (int,),
        "responseLogprobs": (bool,), "logprobs": (int,), "thinkingConfig/thinkingBudget": (int,),
        "thinkingConfig/includeThoughts": (bool,),
    }.items()
}  # fmt: skip
"""Path of a member whose value is the same in the neutral form → types of the value."""
OPTIONS: Final = {
    f"generationConfig/{path}": name for path, name in {
        "maxOutputTokens": "max_tokens", "temperature": "temperature", "topP": "top_p", "topK": "top_k", "seed": "seed",
        "stopSequences": "stop", "candidateCount": "n", "frequencyPenalty": "frequency_penalty",
        "presencePenalty": "presence_penalty", "responseLogprobs": "logprobs", "logprobs": "top_logprobs",
        "thinkingConfig/thinkingBudget": "reasoning_budget", "thinkingConfig/includeThoughts": "reasoning_shown",
    }.items()
}  # fmt: skip
"""Path of a member → its option in the neutral form."""
BOUNDS: Final[dict[str, tuple[Any, Any]]] = {
    f"generationConfig/{path}": bounds for path, bounds in {
        "maxOutputTokens": (1, None), "temperature": (0, 2), "topK": (1, None), "candidateCount": (1, 8),
        "logprobs": (0, 20),
    }.items()
}  # fmt: skip
"""Path of a member → least and greatest value that the server accepts; None for no limit."""
STOPS_MAX: Final = 5
ERROR: Final[dict[str, Json]] = {"code": 502, "status": "UNAVAILABLE"}


# Spelling -------------------------------------------------------------------------------------------------------------

OPAQUE: Final = frozenset({
    "args", "response", "parameters", "parametersJsonSchema", "parameters_json_schema", "responseSchema",
    "response_schema", "responseJsonSchema", "response_json_schema", "labels",
})  # fmt: skip
"""Members whose values contain names that the user chose; these names are not respelled."""
_AFTER: Final = re.compile(r"(?<=[a-z0-9])_([a-z])")


def camel_name(name: str) -> str:
    """Return a name in camelCase; return it unchanged if the way back to snake_case would give another name."""
    spelled = _AFTER.sub(lambda match: match[1].upper(), name) if "_" in name else name
    return spelled if snake(spelled) == name else name


def camel(value: Json) -> Json:
    """Return a document with its members' names in camelCase, except inside of the members in `OPAQUE`."""
    if type(value) is list:
        return [camel(inner) for inner in value]
    if type(value) is not dict:
        return value
    out = {}
    for name, inner in value.items():
        spelled = camel_name(name)
        out[name if spelled in value else spelled] = inner if name in OPAQUE else camel(inner)
    return out


SCHEMAS: Final = {"parameters": "parametersJsonSchema", "responseSchema": "responseJsonSchema"}
"""Member with a schema in the vendor's form → the member for JSON Schema, which has the same meaning."""


def normal(value: Json) -> Json:
    """Return a document in camelCase, with its schemas as JSON Schema."""
    if type(value) is list:
        return [normal(inner) for inner in value]
    if type(value) is not dict:
        return value
    out: dict[str, Json] = {}
    for name, inner in camel(value).items():
        if name in SCHEMAS and SCHEMAS[name] not in value:
            out[SCHEMAS[name]] = json_schema(inner, lost=())
        else:
            out[name] = inner if name in OPAQUE else normal(inner)
    return out


# Parts ----------------------------------------------------------------------------------------------------------------


def read_block(value: Json, at: str, calls: Calls) -> ir.Part:
    """Read one part; a text without an object around it is a text part."""
    if type(value) is str:
        return ir.Text(text=value, at=at)
    rest = value.copy() if type(value) is dict else {}
    proof = pop(rest, "thoughtSignature")
    part = _read_block(rest, at, calls)
    if part is not None:
        return msgspec.structs.replace(part, signature=proof, at=at, ext=ext_of(NAME, rest))
    kind = next(iter(value), "empty part") if type(value) is dict else "part"
    return ir.NativePart(dialect=NAME, label=kind, payload=value, at=at, is_tool=kind in CALLED_ELSEWHERE)


def _read_block(rest: dict[str, Any], at: str, calls: Calls) -> ir.Part | None:
    """Read a part by the member that only its kind has; the members that are read are removed from `rest`."""
    if type(rest.get("functionCall")) is dict:
        body = rest.pop("functionCall").copy()
        name, given, call_id = pop(body, "name") or "", pop(body, "args", dict), pop(body, "id") or None
        if body:
            rest["functionCall"] = body
        return ir.ToolUse(
            id=calls.make(name) if call_id is None else call_id, id_made=call_id is None, name=name, input=given or {}
        )
    if type(rest.get("functionResponse")) is dict:
        return _read_result(rest, f"{at}/functionResponse", calls)
    for member, path, field in (("inlineData", "data", "data"), ("fileData", "fileUri", "url")):
        body = pop_inner(rest, member)
        if (found := pop(body, path)) is not None:
            media_type, name = pop(body, "mimeType"), pop(body, "displayName")
            head = (media_type or "").partition("/")[0]
            kind: Any = head if head in ("image", "audio", "video") else "document"
            put_back(rest, member, body)
            return ir.Media(kind=kind, media_type=media_type, name=name, **{field: found})
    if (text := pop(rest, "text")) is not None:
        return ir.Thinking(text=text) if pop(rest, "thought", bool) is True else ir.Text(text=text)
    return None


def _read_result(rest: dict[str, Any], at: str, calls: Calls) -> ir.ToolOutput:
    body = rest.pop("functionResponse").copy()
    name, value, call_id = pop(body, "name"), pop(body, "response", dict), pop(body, "id") or None
    content: tuple[ir.Part, ...] = ()
    fields: dict[str, Any] = {}
    if value is not None:
        if len(value) == 1 and type(text := value.get("output", value.get("error"))) is str:
            fields["is_error"] = True if "error" in value else None
        else:
            text, fields["value"] = json_text(value), value
        content = (ir.Text(text=text, at=f"{at}/response"),)
    found = body.get("parts")
    pictures = [read_block(one, f"{at}/parts/{place}", calls) for place, one in enumerate(found or ())]
    if pictures and type(found) is list and all(isinstance(part, ir.Media) for part in pictures):
        del body["parts"]
        content += tuple(pictures)
    if body:
        rest["functionResponse"] = body
    return ir.ToolOutput(
        id=calls.answer(name or "") if call_id is None else call_id, id_made=call_id is None, name=name,
        content=content, **fields,
    )  # fmt: skip


def write_block(part: ir.Part, notes: LossLedger) -> Json:
    """Write one part; if the vendor has no such part, note a loss and return None."""
    return write_part(part, notes, _write_block)


def _write_block(part: ir.Part, notes: LossLedger) -> dict[str, Any] | None:
    out: dict[str, Any]
    match part:
        case ir.Text():
            out = {"text": part.text}
        case ir.Thinking() if part.redacted is None and (part.text or notes.is_home):
            out = {"text": part.text, "thought": True}
        case ir.ToolUse():
            out = {"functionCall": {"name": part.name, "args": part.input, **_own_id(part)}}
        case ir.ToolOutput():
            out = {"functionResponse": _write_result(part, notes)}
        case ir.Media() if part.data is not None or part.url is not None:
            out = _write_media(part, notes)
        case _:
            return None
    return {**out, "thoughtSignature": part.signature} if part.signature is not None and notes.is_home else out


def _own_id(part: ir.ToolUse | ir.ToolOutput) -> dict[str, str]:
    return {} if part.id_made or part.id.startswith(MADE_ID) else {"id": part.id}


def _write_result(part: ir.ToolOutput, notes: LossLedger) -> dict[str, Any]:
    texts = [inner.text for inner in part.content if isinstance(inner, ir.Text)]
    is_value = type(part.value) is dict and texts == [json_text(part.value)]
    text = notes.plain_text(inner for inner in part.content if not isinstance(inner, ir.Media))
    body: dict[str, Any] = {**_own_id(part), "name": "unknown" if part.name is None else part.name}
    body["response"] = part.value if is_value else {"error" if part.is_error else "output": text}
    if media := write_blocks([inner for inner in part.content if isinstance(inner, ir.Media)], notes):
        body["parts"] = media
    return body


def _write_media(part: ir.Media, notes: LossLedger) -> dict[str, Any]:
    member, path = ("inlineData", "data") if part.data is not None else ("fileData", "fileUri")
    media_type = part.media_type
    if media_type is None and not notes.is_home:
        media_type = MEDIA_TYPES.get(part.kind, "application/pdf")
        notes.synthesise(part.at, "media", f"media have a type here: {media_type}")
    name = part.name if notes.is_home else None
    body = {path: part.url if part.data is None else part.data, "mimeType": media_type, "displayName": name}
    return {member: without_none(body)}


def write_blocks(parts: Iterable[ir.Part], notes: LossLedger) -> list[Json]:
    """Write parts; those that the vendor does not have are omitted."""
    return write_parts(parts, partial(write_block, notes=notes))


# Contents -------------------------------------------------------------------------------------------------------------


def read_message(value: Json, at: str, calls: Calls, role: ir.Role | None = None) -> ir.Message:
    """Read one content as a message.

    Args:
        role: role of the message; None for the content's own role, or `tool` if a user's content has only results.
    """
    if type(value) is str:
        return ir.Message(role=role or "user", parts=(ir.Text(text=value, at=at),), at=at)
    rest = members_of(value, at)
    native, found = pop(rest, "role"), pop(rest, "parts", list)
    parts = tuple(read_block(part, f"{at}/parts/{place}", calls) for place, part in enumerate(found or ()))
    if role is None:
        role = ROLES.get(native or "", "user")
        if role == "user" and parts and all(isinstance(part, ir.ToolOutput) for part in parts):
            role = "tool"
    return ir.Message(role=role, parts=parts, at=at, ext=ext_of(NAME, rest))


def write_message(message: ir.Message, notes: LossLedger) -> dict[str, Any]:
    """Write a message as a content with role `user` or `model`; `system` stays if the message came from Gemini."""
    stays = message.role == "system" and notes.is_home
    role = "model" if message.role == "assistant" else "system" if stays else "user"
    return notes.own({"role": role, "parts": write_blocks(message.parts, notes)}, message)


def _with_names(messages: tuple[ir.Message, ...]) -> tuple[ir.Message, ...]:
    """Add the tool's name to each result; other vendors have only the id of its call there."""
    names = {call.id: call.name for call in calls_in(messages)}

    def named(part: ir.Part) -> ir.Part:
        if not isinstance(part, ir.ToolOutput) or part.name is not None:
            return part
        return msgspec.structs.replace(part, name=names.get(part.id))

    return tuple(
        msgspec.structs.replace(message, parts=tuple(map(named, message.parts)))
        if any(isinstance(part, ir.ToolOutput) for part in message.parts) else message for message in messages
    )  # fmt: skip


# Requests -------------------------------------------------------------------------------------------------------------


def read_request(document: Json) -> ir.Conversation:
    """Read a `generateContent` request as a conversation."""
    rest, calls = members_of(camel(document)), Calls()
    messages: list[ir.Message] = []
    if (system := pop(rest, "systemInstruction", dict, str)) is not None:
        messages.append(read_message(system, "/systemInstruction", calls, "system"))
    if (text := pop(rest, "contents")) is not None:
        messages.append(read_message(text, "/contents", calls))
    else:
        found = pop_list(rest, "contents")
        messages += [read_message(one, f"/contents/{place}", calls) for place, one in enumerate(found)]
    options = OptionsRead(rest, SAME, OPTIONS)
    config = pop_inner(rest, "generationConfig")
    _read_options(config, options)
    put_back(rest, "generationConfig", config)
    _read_choice(rest, options)
    return conversation_of(NAME, rest, messages, options, read_tools)


def read_tools(value: Json, at: str) -> list[ir.ToolSpec]:
    """Read an entry of the list of tools; an entry that is no list of functions is a tool run by the vendor."""
    found = value.get("functionDeclarations") if type(value) is dict and len(value) == 1 else None
    tools = [_read_tool(one, f"{at}/functionDeclarations/{place}") for place, one in enumerate(found or ())]
    if type(found) is list and found and all(tool is not None for tool in tools):
        return [tool for tool in tools if tool is not None]
    return [server_tool(value, at)]


def _read_tool(value: Json, at: str) -> ir.ToolSpec | None:
    rest = value.copy() if type(value) is dict else {}
    if type(rest.get("parameters")) is dict and "parametersJsonSchema" not in rest:
        rest["parametersJsonSchema"] = json_schema(rest.pop("parameters"))
    return tool_of(NAME, rest, at, schema="parametersJsonSchema")


def json_schema(schema: Json, lost: tuple[str, ...] = ("propertyOrdering",)) -> Json:
    """Convert a schema from the vendor's form to JSON Schema: types in lower case, null as a type.

    Args:
        lost: members to omit, which JSON Schema does not have.
    """
    if type(schema) is list:
        return [json_schema(inner, lost) for inner in schema]
    if type(schema) is not dict:
        return schema
    out: dict[str, Json] = {}
    for key, value in schema.items():
        name = _AFTER.sub(lambda match: match[1].upper(), key)
        if name == "properties" and type(value) is dict:
            out[name] = {member: json_schema(inner, lost) for member, inner in value.items()}
        elif name == "type" and type(value) is str:
            out[name] = value.lower()
        elif name != "nullable" and name not in lost:
            out[name] = value if name in ("enum", "required", "example", "default") else json_schema(value, lost)
    if schema.get("nullable") is True and type(out.get("type")) is str:
        out["type"] = [out["type"], "null"]
    return out


def _read_options(config: dict[str, Any], options: OptionsRead) -> None:
    """Read the options of `generationConfig` that have another form in other dialects."""
    head = "/generationConfig"
    if (level := pop_inner(config, "thinkingConfig").get("thinkingLevel")) in LEVELS:
        options.add("reasoning_effort", LEVELS[level], f"{head}/thinkingConfig/thinkingLevel")
        pop_at(config, "thinkingConfig/thinkingLevel")
    if (mime := config.get("responseMimeType")) not in ("application/json", "text/plain"):
        return
    del config["responseMimeType"]
    form: dict[str, Any] = {"type": "text" if mime == "text/plain" else "json"}
    at = f"{head}/responseMimeType"
    if form["type"] == "json" and (schema := pop(config, "responseJsonSchema", dict)) is not None:
        form, at = {"type": "schema", "schema": schema}, f"{head}/responseJsonSchema"
    elif form["type"] == "json" and (own := pop(config, "responseSchema", dict)) is not None:
        form, at = {"type": "schema", "schema": json_schema(own)}, f"{head}/responseSchema"
    options.add("response_format", form, at)


def _read_choice(rest: dict[str, Any], options: OptionsRead) -> None:
    """Move the rule about which tool the model must call from `rest` to the options; an unknown rule stays native."""
    config = pop_inner(rest, "toolConfig")
    choice: dict[str, Any] | None = None
    match config.get("functionCallingConfig"):
        case {"mode": "ANY", "allowedFunctionNames": [str(name)], **more} if not more:
            choice = {"mode": "tool", "name": name}
        case {"mode": "AUTO" | "ANY" | "NONE" as mode, **other} if not other:
            choice = {"mode": MODES[mode]}
    if choice is not None:
        del config["functionCallingConfig"]
        options.add("tool_choice", choice, "/toolConfig/functionCallingConfig")
    put_back(rest, "toolConfig", config)


def write_request(conversation: ir.Conversation, notes: LossLedger) -> dict[str, Any]:
    """Write a conversation as a `generateContent` request, and note the losses."""
    home = notes.is_home
    out: dict[str, Any] = {} if conversation.model is None else {"model": conversation.model}
    messages = _with_names(conversation.messages)
    system, others = outside(messages, notes, lambda message: message.at.startswith("/contents/"))
    if system is not None:
        out["systemInstruction"] = notes.own({"parts": write_blocks(system.parts, notes)}, system)
    out["contents"] = []
    for message in others:
        written = write_message(message, notes)
        if written["parts"] or home:
            out["contents"].append(written)
        else:
            notes.drop(message.at, "part", "a content without parts is refused here")
    if tools := write_tools(conversation.tools, notes):
        out["tools"] = tools
    _write_options(conversation, out, notes)
    if home:
        return notes.own(out, conversation)
    proved, places = prove_calls(out)
    for place in places:
        notes.synthesise(place, "signature", NO_PROOF)
    return proved


def write_tools(tools: tuple[ir.ToolSpec, ...], notes: LossLedger) -> list[Json]:
    """Write the list of tools; functions that were read from one list are written into one list."""
    out: list[Any] = []
    listed: dict[str, list[Json]] = {}
    for tool in tools:
        if tool.kind == "server":
            out.append(tool.payload)
            continue
        group = tool.at.rpartition("/")[0] if notes.is_home else ""
        if group not in listed:
            listed[group] = []
            out.append({"functionDeclarations": listed[group]})
        one = {"name": tool.name, "description": tool.description, "parametersJsonSchema": tool.schema}
        listed[group].append(notes.own(without_none(one), tool))
    return out


def _write_options(conversation: ir.Conversation, out: dict[str, Any], notes: LossLedger) -> None:
    left = dict(conversation.options)
    level = _effort(left, notes)
    out |= write_options(left, SAME, notes, OPTIONS, BOUNDS, stops_max=STOPS_MAX)
    if level is not None:
        put_at(out, "generationConfig/thinkingConfig/thinkingLevel", level)
    if (form := left.pop("response_format", None)) is not None:
        mime = "text/plain" if form["type"] == "text" else "application/json"
        put_at(out, "generationConfig/responseMimeType", mime)
        if "schema" in form:
            put_at(out, "generationConfig/responseJsonSchema", form["schema"])
    if (choice := left.pop("tool_choice", None)) is not None:
        modes = {word: mode for mode, word in MODES.items()}
        one = {"mode": "ANY", "allowedFunctionNames": [choice.get("name")]}
        calling = one if choice["mode"] == "tool" else {"mode": modes[choice["mode"]]}
        out["toolConfig"] = {"functionCallingConfig": calling}
    if left.pop("parallel_tool_calls", None) is False:
        notes.lose_option("parallel_tool_calls", False, "several calls in one turn cannot be forbidden here")
    if "stream" in left:
        notes.change_option("stream", left.pop("stream"), "whether to stream is said by the URL here")
    notes.lose_options(left)


def _effort(left: dict[str, Any], notes: LossLedger) -> str | None:
    """Remove the effort from `left`; return its level if it is the vendor's own, else None, with a budget in `left`."""
    effort = left.pop("reasoning_effort", None)
    words = {word: level for level, word in LEVELS.items()}
    if effort is None or (notes.is_home and effort in words):
        return words.get(effort)
    if "reasoning_budget" in left:
        notes.lose_option("reasoning_effort", effort, "the budget says how long to think")
    elif effort in EFFORT_BUDGETS:
        notes.change_option("reasoning_effort", effort, f"the word became {EFFORT_BUDGETS[effort]} tokens for thinking")
        left["reasoning_budget"] = EFFORT_BUDGETS[effort]
    else:
        notes.lose_option("reasoning_effort", effort, "no such effort here")
    return None


# Proofs ---------------------------------------------------------------------------------------------------------------

PROOF: Final = "skip_thought_signature_validator"
"""The vendor's substitute for the signature of a call that another model made (ai.google.dev/gemini-api/docs/
thought-signatures, read 2026-11). Gemini 3 answers 400 if a call has neither."""

WANTS_PROOF: Final = re.compile(r"gemini-([3-9]|\d\d|(pro|flash|flash-lite)-latest)")
"""Names of models that refuse a call without its signature; `latest` names are of generation 3 or later."""


def prove_calls(request: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Add the substitute signature to the first call of each content in which no call has a signature.

    Returns:
        The request, and JSON pointers to the added members; the same object if its model needs no signatures.
    """
    contents = request.get("contents")
    if not WANTS_PROOF.search(str(request.get("model"))) or not isinstance(contents, list):
        return request, ()
    places = [(number, place) for number, content in enumerate(contents) if (place := _unproved(content)) is not None]
    out = list(contents)
    for number, place in places:
        parts = list(out[number]["parts"])
        parts[place] = {**parts[place], "thoughtSignature": PROOF}
        out[number] = {**out[number], "parts": parts}
    paths = tuple(f"/contents/{number}/parts/{place}/thoughtSignature" for number, place in places)
    return ({**request, "contents": out} if places else request), paths


def _unproved(content: Json) -> int | None:
    """Return the index of a content's first call; None if it has no call, or one with a signature."""
    parts = content.get("parts") if isinstance(content, dict) else None
    found = [
        (place, part) for place, part in enumerate(parts if isinstance(parts, list) else ())
        if isinstance(part, dict) and {"functionCall", "function_call"} & part.keys()
    ]  # fmt: skip
    proved = any({"thoughtSignature", "thought_signature"} & part.keys() for _, part in found)
    return None if proved or not found else found[0][0]


NO_PROOF: Final = "a call of another model has no signature; the vendor's stand-in for one is sent"


# Answers --------------------------------------------------------------------------------------------------------------

USAGE: Final = Counters({
    "promptTokenCount": "input", "candidatesTokenCount": "output", "thoughtsTokenCount": "reasoning",
    "cachedContentTokenCount": "cache_read",
}, total="totalTokenCount", apart={"output": ("reasoning",)}, beside_input="toolUsePromptTokenCount")  # fmt: skip


def read_answer(document: Json) -> ir.Answer:
    """Read a response as an answer; the response to a refused prompt has a reason instead of candidates."""
    whole = members_of(camel(document))
    rest, calls = whole.copy(), Calls()
    if (failed := read_error(whole, rest, "candidates", NAME)) is not None:
        return failed
    found = pop(rest, "candidates", list)
    if found is None and not rest.keys() & {"promptFeedback", "usageMetadata"}:
        raise TranslationError("dialect_mapping_failed", "no candidates", hint="check --from and --kind")
    candidates = tuple(_read_candidate(one, place, calls) for place, one in enumerate(found or ()))
    if not found and "promptFeedback" in rest:
        blocked = ir.Message(role="assistant", parts=())
        candidates = (ir.Candidate(message=blocked, stop="content_filter", stop_at="/promptFeedback"),)
    return answer_of(NAME, rest, candidates, USAGE, "usageMetadata", "responseId", "modelVersion")


def _read_candidate(candidate: Json, place: int, calls: Calls) -> ir.Candidate:
    at = f"/candidates/{place}"
    rest = members_of(candidate, at)
    content, raw = pop(rest, "content", dict), pop(rest, "finishReason")
    message = read_message(content or {}, f"{at}/content", calls, "assistant")
    return ir.Candidate(
        message=message, stop=ENDINGS.read(raw, message.parts), stop_raw=raw, stop_at=f"{at}/finishReason", at=at,
        ext=ext_of(NAME, rest),
    )  # fmt: skip


def write_answer(answer: ir.Answer, notes: LossLedger) -> dict[str, Any]:
    """Write an answer as a `generateContent` response, and note the losses."""
    out = without_none({"responseId": answer.id, "modelVersion": answer.model})
    out["candidates"] = []
    for place, candidate in enumerate(answer.candidates):
        one: dict[str, Any] = {"index": place, "content": write_message(candidate.message, notes)}
        if (word := ENDINGS.write(candidate, notes)) is not None:
            one["finishReason"] = word
        out["candidates"].append(notes.own(one, candidate))
    if answer.usage is not None:
        out["usageMetadata"] = USAGE.write(answer.usage, notes)
    return notes.own(out, answer)


# Streams, read --------------------------------------------------------------------------------------------------------

# Every chunk is a small answer, but reading it as a whole answer would double the time for a chunk.
HEAD: Final = frozenset(
    {"candidates", "usageMetadata", "usage_metadata", "modelVersion", "model_version", "responseId", "response_id"}
)
BESIDE: Final = frozenset({"content", "finishReason", "finish_reason", "index"})
PIECES: Final = frozenset({"partialArgs", "partial_args", "willContinue", "will_continue"})
"""Members of a call that show that its arguments come in pieces."""

REPEAT_CHARS_MIN: Final = 6
"""Minimum characters of a text for which a chunk that begins with the whole text is a gateway's repetition of it.

A shorter text may be a word that the model itself repeats, so only a block's second chunk counts as a repetition then,
and only if the first chunk has a letter.
"""

SAID_CHARS_MAX: Final = 256
"""Characters of a text's beginning that are compared; no model itself repeats so many of them in one chunk."""

_STEP: Final = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|\[['\"](.*?)['\"]\]")


def _said(holder: dict[str, Any], name: str) -> Json:
    """Return a member by its name in camelCase or snake_case; None if there is neither."""
    return holder.get(name, holder.get(snake(name)))


class _Seen:
    """Keeps the text so far of one kind of block, to find chunks that repeat it."""

    def __init__(self) -> None:
        self.begin = ""
        self.length = 0
        self.is_pieces = False

    def repeats(self, text: str, *, is_open: bool) -> bool:
        """Return whether a chunk repeats the text so far; `is_open` is True if it continues an open block."""
        is_long = self.length >= REPEAT_CHARS_MIN and not self.begin.isspace()
        is_second = is_open and not self.is_pieces and any(map(str.isalpha, self.begin))
        return (is_long or is_second) and len(text) >= self.length and text.startswith(self.begin)

    def add(self, text: str, *, is_repeated: bool) -> str:
        """Add a chunk; return the part of it that is not a repetition."""
        if is_repeated:
            added, self.begin, self.length = text[self.length :], text, len(text)
            return added
        # Long answers come in thousands of pieces; their beginning is enough to recognise a repetition.
        self.begin = self.begin + text if self.length < SAID_CHARS_MAX else self.begin
        self.is_pieces = self.is_pieces or self.length > 0
        self.length += len(text)
        return text


class _Candidate:
    """One candidate of a stream; at most one of its blocks is open, with the candidate's number as its key."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.seen: dict[type[ir.Part], _Seen] = {}
        self.call: ir.ToolUse | None = None
        """The open call, whose arguments come in pieces; None if no call is open."""
        self.args: dict[str, Any] = {}
        self.ids: set[str] = set()
        self.said_calls: set[tuple[str, str, int]] = set()
        """Name, arguments and index of the chunk, for each call without an id."""


class StreamReader(BlockReader):
    """Reads the chunks of one `generateContent` stream."""

    def __init__(self, dialect: Any) -> None:
        super().__init__(dialect)
        self.candidates: dict[int, _Candidate] = {}
        self.ids = Calls()
        self.notes: dict[tuple[int | None, str], Any] = {}
        self.usage: Json = None
        self.chunk = 0

    def read(self, chunk: Json) -> list[ir.StreamEvent]:
        """Read one chunk; a value that is no object is kept as it is."""
        if type(chunk) is not dict:
            return [ir.Kept(chunk)]
        self.chunk += 1
        if "error" in chunk and "candidates" not in chunk:
            return [failure(chunk["error"], chunk, "status")]
        out: list[ir.StreamEvent] = []
        if not self.began:
            self.began = True
            out.append(begun(_said(chunk, "responseId"), _said(chunk, "modelVersion")))
        # Usage is read before the parts, because in other dialects the first event has the tokens of the request.
        usage = _said(chunk, "usageMetadata")
        if usage is not None and usage != self.usage:
            self.usage = usage
            out += self.count(camel(usage), "/usageMetadata")
        found = chunk.get("candidates")
        for place, candidate in enumerate(found if type(found) is list else ()):
            if type(candidate) is dict:
                self._candidate(candidate, place, out)
        self._note(chunk, HEAD, None, out)
        if not found and _said(chunk, "promptFeedback") is not None:
            out.append(ir.Stopped(stop="content_filter", at="/promptFeedback"))
        return out

    def end_all(self, choice: int | None = None) -> list[ir.StreamEvent]:
        """End the open blocks, also a call whose last piece is missing."""
        states = [state for number, state in self.candidates.items() if choice in (None, number)]
        return [event for state in states for event in self._close(state)]

    def _kind(self, state: _Candidate) -> type[ir.Part] | None:
        """Return the type of the open block; None if no block is open."""
        block = self.open.get(state.number)
        return None if block is None else type(block.part)

    def _note(
        self, holder: dict[str, Any], known: frozenset[str], choice: int | None, out: list[ir.StreamEvent]
    ) -> None:
        for key in sorted(holder.keys() - known):
            if self.notes.get((choice, key)) != holder[key]:
                self.notes[choice, key] = holder[key]
                out.append(ir.Noted(key, holder[key], choice))

    def _candidate(self, candidate: dict[str, Any], place: int, out: list[ir.StreamEvent]) -> None:
        number = candidate.get("index")
        number = number if type(number) is int else place
        state = self.candidates.get(number)
        if state is None:
            state = self.candidates[number] = _Candidate(number)
        content = candidate.get("content")
        parts = content.get("parts") if type(content) is dict else None
        for spot, part in enumerate(parts if type(parts) is list else ()):
            out += self._part(state, part, f"/candidates/{number}/content/parts/{spot}")
        self._note(candidate, BESIDE, number, out)
        out += self.stop(_said(candidate, "finishReason"), f"/candidates/{number}/finishReason", choice=number)

    def _part(self, state: _Candidate, part: Json, at: str) -> list[ir.StreamEvent]:
        call = _said(part, "functionCall") if type(part) is dict else None
        if type(call) is dict and (not PIECES.isdisjoint(call) or (state.call is not None and "name" not in call)):
            return self._piece(state, part, camel(call), at)
        read = read_block(camel(part), at, self.ids)
        if isinstance(read, ir.Text | ir.Thinking):
            return self._text(state, read)
        out = self._close(state)
        if isinstance(read, ir.ToolUse):
            if self.mends and self._was_said(state, read):
                self.worked_around(read.at, "a call that was sent before")
                return out
            state.ids.add(read.id)
        return [*out, *self.begin(state.number, read, state.number), *self.end(state.number, read)]

    def _was_said(self, state: _Candidate, call: ir.ToolUse) -> bool:
        """Return whether an earlier chunk had the same call; equal calls without ids in one chunk are two calls."""
        if not call.id_made and call.id in state.ids:
            return True
        arguments = json_text(call.input)
        said = any(name == call.name and text == arguments and chunk != self.chunk
                   for name, text, chunk in state.said_calls)  # fmt: skip
        if call.id_made and not said:
            state.said_calls.add((call.name, arguments, self.chunk))
        return call.id_made and said

    def _text(self, state: _Candidate, read: ir.Text | ir.Thinking) -> list[ir.StreamEvent]:
        out = self._close(state) if state.call is not None else []
        key, kind = state.number, type(read)
        text = self._new_text(state, kind, read.text, read.at)
        if not text and read.signature is None and (key in self.open or not read.ext):
            return out
        if self._kind(state) is not kind:
            out += self._close(state)
            out += self.begin(key, msgspec.structs.replace(read, text="", signature=None), state.number)
        if text:
            out.append(self.more(key, text))
        if read.signature is not None:
            # The signature is for the block up to here; later text is another block.
            out += [self.more(key, read.signature, "signature"), *self._close(state)]
        return out

    def _new_text(self, state: _Candidate, kind: type[ir.Part], text: str, at: str) -> str:
        """Return the new part of a text: some gateways send the whole text so far in every chunk."""
        if not self.mends or not text:
            return text
        seen = state.seen.setdefault(kind, _Seen())
        is_repeated = seen.repeats(text, is_open=self._kind(state) is kind)
        if is_repeated:
            self.worked_around(at, "text that was sent before")
        return seen.add(text, is_repeated=is_repeated)

    def _piece(self, state: _Candidate, part: Json, call: Any, at: str) -> list[ir.StreamEvent]:
        out = self._close(state) if "name" in call else []
        if state.call is None:
            out += self._close(state)
            read: Any = read_block(camel(part), at, self.ids)
            state.args = dict(read.input)
            state.call = msgspec.structs.replace(read, input={}, ext={})
            out += self.begin(state.number, state.call, state.number)
        for piece in pop(call, "partialArgs", list) or ():
            if type(piece) is dict:
                put_piece(state.args, camel(piece))
        return out if pop(call, "willContinue", bool) else [*out, *self._close(state)]

    def _close(self, state: _Candidate) -> list[ir.StreamEvent]:
        if state.call is None:
            return self.end(state.number)
        whole, state.call = msgspec.structs.replace(state.call, input=_settled(state.args)), None
        return [self.more(state.number, json_text(whole.input), "arguments"), *self.end(state.number, whole)]


def put_piece(args: dict[Any, Any], piece: Any) -> None:
    """Set a piece at its JSON path in the arguments, where lists are dicts by index; a text is appended to a text."""
    steps = [int(index) if index else name or quoted for name, index, quoted in
             _STEP.findall(pop(piece, "jsonPath") or "")]  # fmt: skip
    values = [pop(piece, name, str, int, float, bool) for name in ("stringValue", "numberValue", "boolValue")]
    value = next((value for value in reversed(values) if value is not None), None)
    for step in steps[:-1]:
        if type(args.get(step)) is not dict:
            args[step] = {}
        args = args[step]
    for step in steps[-1:]:
        before = args.get(step)
        args[step] = before + value if type(before) is str and type(value) is str else value


ITEMS_MAX: Final = 10_000
"""Maximum length of a list in arguments; longer ones are cut, because a wrong index could fill the memory."""


def _settled(value: Any) -> Json:
    """Return a value in which dicts by index are lists again, at every depth."""
    if type(value) is not dict:
        return value
    indices = [key for key in value if type(key) is int]
    if indices and len(indices) == len(value):
        return [_settled(value.get(place)) for place in range(min(max(indices) + 1, ITEMS_MAX))]
    return {str(key): _settled(inner) for key, inner in value.items()}


# Streams, written -----------------------------------------------------------------------------------------------------


class StreamWriter(BlockWriter):
    """Writes one stream as the vendor's chunks; a call is written when it is complete."""

    has_choices = True
    has_refusals = False

    def __init__(self, dialect: Any, source: str) -> None:
        super().__init__(dialect, source)
        self.calls: dict[int, dict[int, list[Json] | None]] = {}
        """Choice → index of a call → its chunks, which wait for calls that began earlier; None if it has not ended."""

    def _chunk(self, candidates: list[Json]) -> dict[str, Any]:
        began = self.sum.began
        pairs = (("candidates", candidates or None), ("modelVersion", began.model), ("responseId", began.id))
        return {key: value for key, value in pairs if value is not None}

    def _parts(self, choice: int, parts: list[Json]) -> list[Json]:
        return [self._chunk([{"content": {"role": "model", "parts": parts}, "index": choice}])]

    def begin(self, key: Key, part: ir.Part) -> list[Json] | None:
        if isinstance(part, ir.ToolUse):
            self.calls.setdefault(key[0], {})[key[1]] = None
            return None
        if not isinstance(part, ir.Text | ir.Refusal | ir.Thinking):
            return None
        self.opened[key] = {"thought": True} if isinstance(part, ir.Thinking) else {}
        return []

    def piece(self, key: Key, text: str, part: ir.Part) -> list[Json]:
        return self._parts(key[0], [{"text": text, **self.opened[key]}])

    def whole(self, key: Key, part: ir.Part) -> list[Json] | None:
        if isinstance(part, ir.Text | ir.Refusal) and not part.text:
            return []
        if isinstance(part, ir.ToolUse) and part.is_cut:
            self.ledger.drop(part.at, "arguments", CUT_CALL)
            return self._in_turn(key, [])
        count = len(self.ledger.losses)
        written = write_block(part, self.ledger)
        made = [] if written is None else self._parts(key[0], [written])
        if written is None and len(self.ledger.losses) == count:
            return None
        return self._in_turn(key, made) if key[1] in self.calls.get(key[0], {}) else made

    def _in_turn(self, key: Key, made: list[Json]) -> list[Json]:
        """Return the chunks whose turn has come: calls are written in the order in which they began.

        Only this order distinguishes calls without ids.
        """
        waiting = self.calls[key[0]]
        waiting[key[1]] = made
        out: list[Json] = []
        for index in sorted(waiting):
            ready = waiting[index]
            if ready is None:
                break
            out += ready
            del waiting[index]
        return out

    def end(self) -> list[Json]:
        rest = [ready for waiting in self.calls.values() for _, ready in sorted(waiting.items()) if ready]
        candidates: list[Json] = []
        for choice, word in self.words.items():
            said = {} if word is None else {"finishReason": word}
            candidates.append({"content": {"role": "model", "parts": [{"text": ""}]}, "index": choice, **said})
        chunk = self._chunk(candidates)
        if (usage := self.counted()) is not None:
            chunk["usageMetadata"] = usage
        last = [chunk] if chunk.keys() & {"candidates", "usageMetadata"} else []
        return [*(made for ready in rest for made in ready), *last, *self.fail_cut()]


DIALECT: Final = Dialect(
    NAME=NAME, TOOL_NAMES=TOOL_NAMES, CAPABILITIES=CAPABILITIES, DEFAULTS=DEFAULTS, read_request=read_request,
    write_request=write_request, read_answer=read_answer, write_answer=write_answer, read_stream=StreamReader,
    write_stream=StreamWriter, usage=USAGE, endings=ENDINGS, error=ERROR, limits=LIMITS, normal=normal,
    spell=camel_name, aliases={main: own for own, main in SCHEMAS.items()},
)  # fmt: skip
