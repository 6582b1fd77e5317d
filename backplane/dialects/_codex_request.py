"""Requests of Responses: options and tools, read and written."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects._codex_read import NAME, read_items
from backplane.dialects._codex_write import write_items
from backplane.dialects._losses import check_meaning
from backplane.dialects._options import (
    EFFORT_BUDGETS,
    FORMAT_MEMBERS,
    NUMBER,
    VERBOSITIES,
    OptionTable,
    Writer,
    budget_writer,
    option_names,
    read_options,
    require_model,
    word_writer,
    write_form,
    write_metadata,
    write_n,
    write_options,
)
from backplane.dialects._parts import (
    ABSENT,
    Ledger,
    give_back,
    is_plain,
    kept,
    kind_of,
    need_list,
    need_object,
    put_rest,
    shape,
    slot,
    take,
)
from backplane.dialects._tools import chosen_kind, lose_cache, read_tools, write_server_tool, write_tools
from backplane.ir import Conversation, Message, Text, ToolSpec, Translated

SIMPLE: Final[OptionTable] = {
    "max_output_tokens": ("max_tokens", int),
    "temperature": ("temperature", NUMBER),
    "top_p": ("top_p", NUMBER),
    "top_logprobs": ("top_logprobs", int),
    "stream": ("stream", bool),
    "parallel_tool_calls": ("parallel_tool_calls", bool),
    "user": ("user", str),
    "metadata": ("metadata", dict),
    "service_tier": ("service_tier", str),
}

NAMES: Final = option_names(SIMPLE)
SERVICE_TIERS: Final = frozenset({"auto", "default", "flex", "scale", "priority"})


def read_tool(tool: Json, at: str) -> ToolSpec:
    """Read one tool definition."""
    kind = kind_of(tool)
    if kind not in ("function", "custom") or type(tool.get("name")) is not str:
        name = str(tool.get("name", kind)) if type(tool) is dict else "unreadable"
        return ToolSpec(name=name, kind="server", payload=tool, at=at)
    rest = tool.copy()
    del rest["type"]
    spec = ToolSpec(
        name=rest.pop("name"), description=take(rest, "description", str),
        schema=take(rest, "parameters", dict) if kind == "function" else None, strict=take(rest, "strict", bool),
        kind="custom" if kind == "custom" else "function", at=at,
    )  # fmt: skip
    return msgspec.structs.replace(spec, ext=kept(NAME, rest)) if rest else spec


def write_tool(tool: ToolSpec, ledger: Ledger) -> Json:
    """Write one tool definition; None where only another vendor runs it."""
    if tool.kind == "server":
        return write_server_tool(tool, ledger)
    out: dict[str, Any] = {"type": tool.kind, "name": tool.name}
    if tool.description is not None:
        out["description"] = tool.description
    if tool.schema is not None:
        out["parameters"] = tool.schema
    if tool.strict is not None:
        out["strict"] = tool.strict
    if not ledger.is_home and tool.kind == "function":
        # Without the word this vendor would take every schema for a strict one.
        if tool.strict is None:
            ledger.synthesise(tool.at, "required", "a tool says here that its schema is not strict")
            out["strict"] = False
        if tool.schema is None:
            out["parameters"] = None
    lose_cache(tool, ledger)
    give_back(tool, out, ledger)
    return out


def read_request(request: Json) -> Translated[Conversation]:
    """Read a request. Raises `TranslationError` `dialect_mapping_failed` where it is none."""
    rest = need_object(request, "")
    ext: dict[str, Any] = {}
    messages: list[Message] = []
    instructions = take(rest, "instructions", str)
    if instructions is not None:
        text = Text(text=instructions, at="/instructions")
        messages.append(Message(role="system", parts=(text,), flat=True, at="/instructions"))
    found = take(rest, "input", str)
    if found is not None:
        ext["#input"] = True
        messages.append(Message(role="user", parts=(Text(text=found, at="/input"),), flat=True, at="/input"))
    elif "input" not in rest and {"prompt", "conversation", "previous_response_id"} & rest.keys():
        ext[ABSENT] = ("input",)
    else:
        messages += read_items(need_list(rest, "input", ""), "/input")
    options: dict[str, Any] = {}
    options_at: dict[str, str] = {}
    read_options(rest, SIMPLE, options, options_at)
    _read_choice(rest, options, options_at)
    _read_reasoning(rest, options, options_at, ext)
    _read_text(rest, options, options_at, ext)
    specs = read_tools(rest, read_tool)
    model = take(rest, "model", str)
    put_rest(ext, rest)
    return Translated(
        Conversation(
            dialect=NAME, messages=tuple(messages), model=model, tools=specs, options=options, options_at=options_at,
            ext=slot(NAME, ext),
        )
    )  # fmt: skip


def _read_choice(rest: dict[str, Any], options: dict[str, Any], options_at: dict[str, str]) -> None:
    choice = rest.get("tool_choice")
    if type(choice) is str and choice in ("auto", "none", "required"):
        options["tool_choice"] = {"mode": choice}
    elif type(choice) is dict and set(choice) == {"type", "name"} and kind_of(choice) in ("function", "custom"):
        if type(choice["name"]) is not str:
            return
        options["tool_choice"] = {"mode": "tool", "name": choice["name"], "kind": choice["type"]}
    else:
        return
    del rest["tool_choice"]
    options_at["tool_choice"] = "/tool_choice"


def _read_reasoning(
    rest: dict[str, Any], options: dict[str, Any], options_at: dict[str, str], ext: dict[str, Any]
) -> None:
    reasoning = rest.get("reasoning")
    if type(reasoning) is dict and type(reasoning.get("effort")) is str:
        body = reasoning.copy()
        options["reasoning_effort"] = body.pop("effort")
        options_at["reasoning_effort"] = "/reasoning/effort"
        _keep_under(rest, ext, "reasoning", body)


def _read_text(rest: dict[str, Any], options: dict[str, Any], options_at: dict[str, str], ext: dict[str, Any]) -> None:
    text = rest.get("text")
    if type(text) is not dict:
        return
    body = text.copy()
    verbosity = take(body, "verbosity", str)
    if verbosity is not None:
        options["verbosity"] = verbosity
        options_at["verbosity"] = "/text/verbosity"
    form = body.get("format")
    if type(form) is dict and (read := _read_format(form)) is not None:
        del body["format"]
        options["response_format"] = read
        options_at["response_format"] = "/text/format"
    if len(body) < len(text):
        _keep_under(rest, ext, "text", body)


def _read_format(form: dict[str, Any]) -> dict[str, Any] | None:
    if form == {"type": "text"}:
        return {"type": "text"}
    if form == {"type": "json_object"}:
        return {"type": "json"}
    if form.get("type") != "json_schema" or any(
        (key not in FORMAT_MEMBERS and key != "type") or value is None for key, value in form.items()
    ):
        return None
    return {**form, "type": "schema"}


def _keep_under(rest: dict[str, Any], ext: dict[str, Any], key: str, body: dict[str, Any]) -> None:
    """Keep what was not taken of an object, under its own path."""
    del rest[key]
    put_rest(ext, body, f"{key}/")


def write_request(conversation: Conversation) -> Translated[Json]:
    """Write a request. Raises `TranslationError` where its meaning would break."""
    ledger = Ledger(conversation.dialect, NAME)
    check_meaning(conversation, ledger)
    out: dict[str, Any] = {}
    if conversation.model is not None:
        out["model"] = conversation.model
    _write_input(conversation, out, ledger)
    tools = write_tools(conversation.tools, ledger, write_tool)
    if tools:
        out["tools"] = tools
    write_options(conversation, out, ledger, NAMES, _specials(conversation))
    give_back(conversation, out, ledger)
    require_model(out, ledger)
    return Translated(out, ledger.done())


def _write_input(conversation: Conversation, out: dict[str, Any], ledger: Ledger) -> None:
    messages = conversation.messages
    if messages and _is_instructions(messages[0], ledger):
        out["instructions"] = messages[0].parts[0].text  # type: ignore[attr-defined]
        give_back(messages[0].parts[0], {}, ledger)
        give_back(messages[0], {}, ledger)
        messages = messages[1:]
    if shape(conversation, NAME, "#input") and len(messages) == 1 and is_plain(messages[0].parts) and ledger.is_home:
        out["input"] = messages[0].parts[0].text  # type: ignore[attr-defined]
    elif messages or "input" not in (shape(conversation, NAME, ABSENT) or ()):
        out["input"] = write_items(messages, ledger)


def _is_instructions(message: Message, ledger: Ledger) -> bool:
    """Whether a message is the text that stands outside of the items."""
    if message.role != "system" or message.flat is False or not is_plain(message.parts) or message.name is not None:
        return False
    return message.native_role is None if ledger.is_home else message.native_role in (None, "system")


def _specials(conversation: Conversation) -> dict[str, Writer]:
    def choice(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
        if value["mode"] != "tool":
            out["tool_choice"] = value["mode"]
            return
        kind = chosen_kind(value, conversation, ledger, at)
        if kind is None:
            return
        out["tool_choice"] = {"type": "custom" if kind == "custom" else "function", "name": value["name"]}

    return {
        "tool_choice": choice,
        "reasoning_effort": word_writer(EFFORT_BUDGETS, "effort", "reasoning", "effort"),
        "reasoning_budget": budget_writer("reasoning", "effort"),
        "response_format": _write_format,
        "verbosity": word_writer(VERBOSITIES, "verbosity", "text", "verbosity"),
        "service_tier": word_writer(SERVICE_TIERS, "class of service", "service_tier"),
        "metadata": write_metadata,
        "n": write_n,
    }


def _write_format(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    word, body = write_form(value, ledger, at)
    out.setdefault("text", {})["format"] = {"type": word, **body}
