"""Requests of Gemini's generateContent: options and tools, read and written."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects._gemini_read import NAME, Members, read_content, respell
from backplane.dialects._gemini_write import write_content, write_parts
from backplane.dialects._losses import check_meaning, lose_name
from backplane.dialects._options import EFFORT_BUDGETS, Writer, lose_schema_words, write_options
from backplane.dialects._parts import Calls, Ledger, give_back, need_list, need_object, shape, slot, take
from backplane.dialects._tools import FREE_TEXT, chosen_kind, lose_cache, lose_strict, write_server_tool
from backplane.ir import Conversation, Message, Text, ToolSpec, ToolUse, Translated

SETTINGS: Final[dict[str, tuple[str, tuple[type[Any], ...]]]] = {
    "maxOutputTokens": ("max_tokens", (int,)),
    "temperature": ("temperature", (int, float)),
    "topP": ("top_p", (int, float)),
    "topK": ("top_k", (int, float)),
    "stopSequences": ("stop", (list,)),
    "seed": ("seed", (int,)),
    "frequencyPenalty": ("frequency_penalty", (int, float)),
    "presencePenalty": ("presence_penalty", (int, float)),
    "candidateCount": ("n", (int,)),
    "responseLogprobs": ("logprobs", (bool,)),
    "logprobs": ("top_logprobs", (int,)),
}
"""Members of `generationConfig` that mean the same everywhere."""

SETTING_NAMES: Final = {name: key for key, (name, _) in SETTINGS.items()}
MODES: Final = {"AUTO": "auto", "ANY": "required", "NONE": "none"}
MODE_WORDS: Final = {"auto": "AUTO", "required": "ANY", "none": "NONE", "tool": "ANY"}
LEVELS: Final = {"MINIMAL": "minimal", "LOW": "low", "MEDIUM": "medium", "HIGH": "high"}

STOPS_MAX: Final = 5
"""Most stop sequences that the vendor takes."""


def _read_tools(found: list[Json], at: str) -> list[ToolSpec]:
    """Unfold lists of declarations; each remembers which list it stood in."""
    out: list[ToolSpec] = []
    for place, tool in enumerate(found):
        here = f"{at}/{place}"
        members = Members(tool, here) if type(tool) is dict else None
        pointer = members.pointer("functionDeclarations") if members is not None else ""
        declarations = members.take("functionDeclarations", list) if members is not None else None
        if members is None or members.rest or not declarations or not all(_is_declaration(one) for one in declarations):
            name = next(iter(tool), "empty") if type(tool) is dict else "unreadable"
            out.append(ToolSpec(name=name, kind="server", payload=tool, at=here))
            continue
        for spot, declaration in enumerate(declarations):
            spec = read_tool(declaration, f"{pointer}/{spot}")
            marks = {"##list": place, **({"##spelled": True} if members.spelled else {})}
            out.append(msgspec.structs.replace(spec, ext={NAME: {**spec.ext.get(NAME, {}), **marks}}))
    return out


def _is_declaration(value: Json) -> bool:
    return type(value) is dict and type(value.get("name")) is str


def read_tool(tool: Json, at: str) -> ToolSpec:
    """Read one tool definition."""
    if not _is_declaration(tool):
        return ToolSpec(name="unreadable", kind="server", payload=tool, at=at)
    members = Members(tool, at)
    ext: dict[str, Any] = {}
    schema = members.take("parametersJsonSchema", dict)
    if schema is None and (own := members.take("parameters", dict)) is not None:
        schema = lower_types(own)
        ext["#parameters"] = own
    spec = ToolSpec(name=members.take("name", str), description=members.take("description", str), schema=schema, at=at)
    members.keep(ext)
    return msgspec.structs.replace(spec, ext={NAME: ext}) if ext else spec


def lower_types(schema: Json) -> Json:
    """Write the vendor's own schema dialect as JSON Schema: types in lower case, `nullable` as a type."""
    if isinstance(schema, list):
        return [lower_types(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {}
    for key, value in schema.items():
        if key == "type" and isinstance(value, str):
            out[key] = value.lower()
        elif key in ("enum", "required", "example", "default"):
            out[key] = value
        else:
            out[key] = lower_types(value)
    return out


def _write_tools(conversation: Conversation, ledger: Ledger) -> list[Json]:
    out: list[Json] = []
    lists: dict[Any, list[Json]] = {}
    for tool in conversation.tools:
        written = write_tool(tool, ledger)
        if tool.kind == "server" and (written is not None or ledger.is_home):
            out.append(written)
        if written is None or tool.kind == "server":
            continue
        mark = shape(tool, NAME, "##list") if ledger.is_home else None
        if mark not in lists:
            lists[mark] = []
            key = "function_declarations" if shape(tool, NAME, "##spelled") and ledger.is_home else None
            out.append({key or "functionDeclarations": lists[mark]})
        lists[mark].append(written)
    return out


def write_tool(tool: ToolSpec, ledger: Ledger) -> Json:
    """Write one tool definition; None where only another vendor runs it."""
    if tool.kind == "server":
        return write_server_tool(tool, ledger)
    out: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        out["description"] = tool.description
    if tool.kind == "custom":
        ledger.degrade(tool.at, "tool", "free text became an object with the member input")
        out["parametersJsonSchema"] = FREE_TEXT
    own = shape(tool, NAME, "#parameters")
    if tool.schema is not None:
        if ledger.is_home and own is not None and lower_types(own) == tool.schema:
            out["parameters"] = own
        else:
            out["parametersJsonSchema"] = tool.schema
    lose_strict(tool, ledger)
    lose_cache(tool, ledger)
    respell(tool, out, ledger)
    give_back(tool, out, ledger)
    return out


def read_request(request: Json) -> Translated[Conversation]:
    """Read a request. Raises `TranslationError` `dialect_mapping_failed` where it is none."""
    members = Members(need_object(request, ""), "")
    calls = Calls()
    ext: dict[str, Any] = {}
    messages: list[Message] = []
    _read_system(members, messages, calls, ext)
    contents = take(members.rest, "contents", str)
    if contents is not None:
        ext["##contents"] = True
        messages.append(Message(role="user", parts=(Text(text=contents, at="/contents"),), flat=True, at="/contents"))
    else:
        found = need_list(members.rest, "contents", "")
        messages += [read_content(content, f"/contents/{place}", calls) for place, content in enumerate(found)]
    options: dict[str, Any] = {}
    options_at: dict[str, str] = {}
    _read_settings(members, options, options_at, ext)
    _read_choice(members, options, options_at, ext)
    tools: list[ToolSpec] = []
    if members.rest.get("tools"):
        tools = _read_tools(take(members.rest, "tools", list) or [], "/tools")
    model = take(members.rest, "model", str)
    members.keep(ext)
    ledger = Ledger(NAME, NAME)
    if "response_format" in options:
        ledger.degrade(options_at["response_format"], "shape", "the form of the answer is a media type here")
    if calls.made:
        ledger.synthesise("/contents", "identity", f"ids for {calls.made} calls that had none")
    conversation = Conversation(
        dialect=NAME, messages=tuple(messages), model=model, tools=tuple(tools), options=options,
        options_at=options_at, ext=slot(NAME, ext),
    )  # fmt: skip
    return Translated(conversation, ledger.done())


def _read_system(members: Members, messages: list[Message], calls: Calls, ext: dict[str, Any]) -> None:
    at = members.pointer("systemInstruction")
    system = members.take("systemInstruction", dict, str)
    if system is None:
        return
    read = read_content(system, at, calls)
    messages.append(msgspec.structs.replace(read, role="system"))


def _read_settings(members: Members, options: dict[str, Any], options_at: dict[str, str], ext: dict[str, Any]) -> None:
    at = members.pointer("generationConfig")
    found = members.take("generationConfig", dict)
    if found is None:
        return
    body = Members(found, at)
    for key, (name, kinds) in SETTINGS.items():
        pointer = body.pointer(key)
        if (value := body.take(key, *kinds)) is not None:
            options[name] = value
            options_at[name] = pointer
    _read_thinking(body, options, options_at, ext)
    _read_format(body, options, options_at)
    ext["##generationConfig"] = True
    body.keep(ext, at[1:] + "/", "generationConfig")


def _read_thinking(body: Members, options: dict[str, Any], options_at: dict[str, str], ext: dict[str, Any]) -> None:
    at = body.pointer("thinkingConfig")
    found = body.take("thinkingConfig", dict)
    if found is None:
        return
    inner = Members(found, at)
    for key, name, kind in (
        ("thinkingBudget", "reasoning_budget", int), ("includeThoughts", "reasoning_shown", bool),
    ):  # fmt: skip
        pointer = inner.pointer(key)
        if (value := inner.take(key, kind)) is not None:
            options[name] = value
            options_at[name] = pointer
    level_key = inner.find("thinkingLevel")
    level = inner.rest.get(level_key) if level_key is not None else None
    if type(level) is str and level in LEVELS:
        options_at["reasoning_effort"] = inner.pointer("thinkingLevel")
        options["reasoning_effort"] = LEVELS[inner.take("thinkingLevel", str)]
    ext["##thinkingConfig"] = True
    steps = at.split("/")[1:]
    inner.keep(ext, "/".join(steps) + "/", "thinkingConfig")


def _read_format(body: Members, options: dict[str, Any], options_at: dict[str, str]) -> None:
    mime_key = body.find("responseMimeType")
    mime = body.rest.get(mime_key) if mime_key is not None else None
    schema_key = body.find("responseJsonSchema")
    if mime == "application/json" and body.find("responseSchema") is None:
        options_at["response_format"] = body.pointer("responseMimeType")
        if schema_key is None:
            options["response_format"] = {"type": "json"}
        elif type(body.rest[schema_key]) is dict:
            options["response_format"] = {"type": "schema", "schema": body.take("responseJsonSchema", dict)}
        else:
            del options_at["response_format"]
            return
        body.take("responseMimeType", str)
    elif mime == "text/plain":
        options_at["response_format"] = body.pointer("responseMimeType")
        options["response_format"] = {"type": "text"}
        body.take("responseMimeType", str)


def _read_choice(members: Members, options: dict[str, Any], options_at: dict[str, str], ext: dict[str, Any]) -> None:
    at = members.pointer("toolConfig")
    found = members.rest.get(members.find("toolConfig") or "")
    if type(found) is not dict:
        return
    outer = Members(found, at)
    inner_at = outer.pointer("functionCallingConfig")
    config = outer.take("functionCallingConfig", dict)
    if config is None or outer.rest:
        return
    inner = Members(config, inner_at)
    mode, names = inner.take("mode", str), inner.take("allowedFunctionNames", list)
    is_forced = names is not None and mode == "ANY" and len(names) == 1 and type(names[0]) is str
    if mode not in MODES or inner.rest or (names is not None and not is_forced):
        return
    members.take("toolConfig", dict)
    outer.keep(ext, memory="toolConfig")
    inner.keep(ext, memory="functionCallingConfig")
    options["tool_choice"] = {"mode": "tool", "name": names[0]} if names else {"mode": MODES[mode]}
    options_at["tool_choice"] = inner_at


def write_request(conversation: Conversation) -> Translated[Json]:
    """Write a request. Raises `TranslationError` where its meaning would break."""
    ledger = Ledger(conversation.dialect, NAME)
    check_meaning(conversation, ledger)
    out: dict[str, Any] = {}
    if conversation.model is not None:
        out["model"] = conversation.model
    _write_contents(conversation, out, ledger)
    tools = _write_tools(conversation, ledger)
    if tools:
        out["tools"] = tools
    settings: dict[str, Any] = {}
    write_options(conversation, settings, ledger, SETTING_NAMES, _specials(conversation, out))
    _respell_settings(conversation, settings, ledger)
    if settings or (ledger.is_home and shape(conversation, NAME, "##generationConfig")):
        out["generationConfig"] = settings
    respell(conversation, out, ledger)
    give_back(conversation, out, ledger)
    return Translated(out, ledger.done())


def _respell_settings(conversation: Conversation, settings: dict[str, Any], ledger: Ledger) -> None:
    if not ledger.is_home:
        return
    thinking = settings.get("thinkingConfig")
    if thinking is None and shape(conversation, NAME, "##thinkingConfig"):
        thinking = settings["thinkingConfig"] = {}
    if thinking is not None:
        respell(conversation, thinking, ledger, "thinkingConfig")
    respell(conversation, settings, ledger, "generationConfig")


def _write_contents(conversation: Conversation, out: dict[str, Any], ledger: Ledger) -> None:
    names = {
        part.id: part.name for message in conversation.messages for part in message.parts if isinstance(part, ToolUse)
    }
    system: list[Message] = []
    contents: list[Json] = []
    last: Message | None = None
    for message in conversation.messages:
        if message.role == "system" and not (ledger.is_home and message.at.startswith("/contents/")):
            if contents and not ledger.is_home:
                ledger.degrade(message.at, "order", "system text in the middle became part of the head")
            system.append(message)
            continue
        written = write_content(message, names, ledger)
        if last is not None and not ledger.is_home and last.role == "tool" and message.role in ("tool", "user"):
            contents[-1]["parts"] += written["parts"]
        else:
            contents.append(written)
        last = message
    if system:
        out["systemInstruction"] = _write_system(system, names, ledger)
    is_text = ledger.is_home and shape(conversation, NAME, "##contents") and len(contents) == 1
    out["contents"] = contents[0]["parts"][0]["text"] if is_text else contents


def _write_system(messages: list[Message], names: dict[str, str], ledger: Ledger) -> Json:
    if ledger.is_home and len(messages) == 1:
        return write_content(messages[0], names, ledger)
    parts: list[Json] = []
    for place, message in enumerate(messages):
        native = message.native_role
        if native not in (None, "system"):
            ledger.degrade(f"{message.at}/role", "role", f"the role {native} became the head")
        lose_name(message, ledger)
        if place or (message.flat is False and len(message.parts) < 2):
            ledger.degrade(message.at, "shape", "system messages are parts of one head")
        give_back(message, {}, ledger)
        parts += write_parts(message.parts, names, ledger)
    return {"parts": parts}


def _specials(conversation: Conversation, request: dict[str, Any]) -> dict[str, Writer]:
    def choice(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
        if value["mode"] == "tool" and chosen_kind(value, conversation, ledger, at) is None:
            return
        config: dict[str, Any] = {"mode": MODE_WORDS[value["mode"]]}
        if not ledger.is_home:
            ledger.degrade(at, "shape", "the same choice in another word")
        if value["mode"] == "tool":
            config["allowedFunctionNames"] = [value["name"]]
        respell(conversation, config, ledger, "functionCallingConfig")
        outer = {"functionCallingConfig": config}
        request["toolConfig"] = respell(conversation, outer, ledger, "toolConfig")

    def effort(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
        words = {word: level for level, word in LEVELS.items()}
        if ledger.is_home and value in words:
            out.setdefault("thinkingConfig", {})["thinkingLevel"] = words[value]
        elif "reasoning_budget" in conversation.options:
            ledger.drop(at, "option", "the budget says how long to think", value)
        elif value in EFFORT_BUDGETS:
            ledger.degrade(at, "option_value", f"the word became {EFFORT_BUDGETS[value]} tokens for thinking", value)
            out.setdefault("thinkingConfig", {})["thinkingBudget"] = EFFORT_BUDGETS[value]
        else:
            ledger.drop(at, "option_value", "no such effort here", value)

    return {
        "tool_choice": choice, "reasoning_effort": effort, "reasoning_budget": _write_budget,
        "reasoning_shown": _write_shown, "response_format": _write_format, "stream": _write_stream,
        "stop": _write_stop_texts, "parallel_tool_calls": _write_parallel,
    }  # fmt: skip


def _write_budget(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    out.setdefault("thinkingConfig", {})["thinkingBudget"] = value


def _write_shown(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    out.setdefault("thinkingConfig", {})["includeThoughts"] = value


def _write_stream(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    ledger.degrade(at, "transport", "whether to stream is said by the URL here", value)


def _write_parallel(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    if value:
        ledger.degrade(at, "shape", "several calls in one turn are the rule here")
    else:
        ledger.drop(at, "option", "several calls in one turn cannot be forbidden here", value)


def _write_stop_texts(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    if not ledger.is_home and len(value) > STOPS_MAX:
        ledger.drop(at, "option_value", f"more than {STOPS_MAX} stop sequences", value[STOPS_MAX:])
        value = value[:STOPS_MAX]
    out["stopSequences"] = value


def _write_format(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    out["responseMimeType"] = "text/plain" if value["type"] == "text" else "application/json"
    if value["type"] == "schema":
        if "schema" in value:
            out["responseJsonSchema"] = value["schema"]
        lose_schema_words(value, ledger, at)
