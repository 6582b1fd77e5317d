"""Requests of Messages: options and tools, read and written."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects._claude_read import NAME, read_block, read_message
from backplane.dialects._claude_write import write_messages
from backplane.dialects._losses import check_meaning, limit_path
from backplane.dialects._options import (
    NUMBER,
    OptionTable,
    Writer,
    lose_schema_words,
    option_names,
    read_options,
    require_model,
    word_writer,
    write_n,
    write_options,
)
from backplane.dialects._parts import (
    Ledger,
    escaped,
    give_back,
    kind_of,
    need_list,
    need_object,
    put_rest,
    shape,
    slot,
    take,
)
from backplane.dialects._reading import take_cache
from backplane.dialects._tools import FREE_TEXT, chosen_kind, read_tools, write_server_tool, write_tools
from backplane.ir import Conversation, Message, Text, ToolSpec, Translated

MAX_TOKENS_MADE: Final = 4096
"""The limit that a request must have and the source did not say; every model allows as much."""

SIMPLE: Final[OptionTable] = {
    "max_tokens": ("max_tokens", int),
    "temperature": ("temperature", NUMBER),
    "top_p": ("top_p", NUMBER),
    "top_k": ("top_k", int),
    "stop_sequences": ("stop", list),
    "stream": ("stream", bool),
    "service_tier": ("service_tier", str),
}

NAMES: Final = option_names(SIMPLE)
SERVICE_TIERS: Final = frozenset({"auto", "standard_only"})
EFFORTS: Final = frozenset({"low", "medium", "high", "xhigh", "max"})
CHOICES: Final = {"auto": "auto", "any": "required", "none": "none", "tool": "tool"}
CHOICE_WORDS: Final = {mode: word for word, mode in CHOICES.items()}


def read_tool(tool: Json, at: str) -> ToolSpec:
    """Read one tool definition."""
    if (
        type(tool) is not dict
        or ("type" in tool and tool["type"] != "custom" and tool["type"] is not None)
        or type(tool.get("name")) is not str
    ):
        name = tool.get("name") or tool.get("type") if type(tool) is dict else "unreadable"
        return ToolSpec(name=str(name), kind="server", payload=tool, at=at)
    rest = tool.copy()
    name = rest.pop("name")
    memory = {"#type": rest.pop("type")} if rest.get("type") == "custom" else {}
    spec = ToolSpec(
        name=name, description=take(rest, "description", str), schema=take(rest, "input_schema", dict),
        strict=take(rest, "strict", bool), cache=take_cache(rest), at=at,
    )  # fmt: skip
    ext = {**memory, **escaped(rest)}
    return msgspec.structs.replace(spec, ext={NAME: ext}) if ext else spec


def write_tool(tool: ToolSpec, ledger: Ledger) -> Json:
    """Write one tool definition; None where only another vendor runs it."""
    if tool.kind == "server":
        return write_server_tool(tool, ledger)
    out: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        out["description"] = tool.description
    schema = tool.schema
    if tool.kind == "custom":
        ledger.degrade(tool.at, "tool", "free text became an object with the member input")
        schema = FREE_TEXT
    if schema is not None:
        out["input_schema"] = schema
    elif not ledger.is_home:
        ledger.synthesise(tool.at, "required", "a tool has a schema here")
        out["input_schema"] = {"type": "object", "properties": {}}
    if not ledger.is_home and "type" not in out["input_schema"]:
        ledger.degrade(tool.at, "required", "a schema says that it is of an object here")
        out["input_schema"] = {"type": "object", **out["input_schema"]}
    if tool.strict is not None:
        out["strict"] = tool.strict
    if tool.cache is not None:
        out["cache_control"] = {"type": "ephemeral", **tool.cache}
    if (word := shape(tool, NAME, "#type")) is not None:
        out["type"] = word
    give_back(tool, out, ledger)
    return out


def read_request(request: Json) -> Translated[Conversation]:
    """Read a request. Raises `TranslationError` `dialect_mapping_failed` where it is none."""
    rest = need_object(request, "")
    found = need_list(rest, "messages", "")
    messages = [read_message(message, f"/messages/{place}") for place, message in enumerate(found)]
    system = _read_system(rest)
    options: dict[str, Any] = {}
    options_at: dict[str, str] = {}
    read_options(rest, SIMPLE, options, options_at)
    _read_special(rest, options, options_at)
    specs = read_tools(rest, read_tool)
    model = take(rest, "model", str)
    ext: dict[str, Any] = {}
    put_rest(ext, rest)
    conversation = Conversation(
        dialect=NAME, messages=(*system, *messages), model=model, tools=specs, options=options, options_at=options_at,
        ext=slot(NAME, ext),
    )  # fmt: skip
    return Translated(conversation)


def _read_system(rest: dict[str, Any]) -> tuple[Message, ...]:
    text = take(rest, "system", str)
    if text is not None:
        return (Message(role="system", parts=(Text(text=text, at="/system"),), flat=True, at="/system"),)
    blocks = take(rest, "system", list)
    if blocks is None:
        return ()
    parts = tuple(read_block(block, f"/system/{place}") for place, block in enumerate(blocks))
    return (Message(role="system", parts=parts, flat=False, at="/system"),)


def _read_special(rest: dict[str, Any], options: dict[str, Any], options_at: dict[str, str]) -> None:
    """Take the options that are objects here, as far as they say nothing more than the portable ones."""
    choice = rest.get("tool_choice")
    if type(choice) is dict and _is_plain_choice(choice):
        _read_choice(rest.pop("tool_choice"), options, options_at)
    thinking = rest.get("thinking")
    if type(thinking) is dict:
        _read_thinking(thinking.copy(), rest, options, options_at)
    output = rest.get("output_config")
    if type(output) is dict:
        _read_output(output.copy(), rest, options, options_at)
    metadata = rest.get("metadata")
    if type(metadata) is dict and list(metadata) == ["user_id"] and type(metadata["user_id"]) is str:
        options["user"] = rest.pop("metadata")["user_id"]
        options_at["user"] = "/metadata/user_id"


def _is_plain_choice(choice: dict[str, Any]) -> bool:
    """Whether a tool choice says nothing that the portable one cannot say."""
    return (
        kind_of(choice) in CHOICES
        and not choice.keys() - {"type", "name", "disable_parallel_tool_use"}
        and (choice["type"] == "tool") == (type(choice.get("name")) is str)
        and type(choice.get("disable_parallel_tool_use", False)) is bool
    )


def _read_choice(choice: dict[str, Any], options: dict[str, Any], options_at: dict[str, str]) -> None:
    options["tool_choice"] = {"mode": CHOICES[choice["type"]]}
    if "name" in choice:
        options["tool_choice"]["name"] = choice["name"]
    options_at["tool_choice"] = "/tool_choice"
    if type(choice.get("disable_parallel_tool_use")) is bool:
        options["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]
        options_at["parallel_tool_calls"] = "/tool_choice/disable_parallel_tool_use"


def _read_thinking(
    thinking: dict[str, Any], rest: dict[str, Any], options: dict[str, Any], options_at: dict[str, str]
) -> None:
    kind = kind_of(thinking)
    thinking.pop("type", None)
    if kind == "enabled" and type(thinking.get("budget_tokens")) is int:
        options["reasoning_budget"] = thinking.pop("budget_tokens")
    elif kind in ("disabled", "adaptive"):
        options["reasoning_budget"] = 0 if kind == "disabled" else -1
    else:
        return
    options_at["reasoning_budget"] = "/thinking"
    del rest["thinking"]
    if thinking:
        # The members that remain go on under their own path, to be merged again when written.
        rest["thinking"] = thinking


def _is_plain_format(form: dict[str, Any]) -> bool:
    return kind_of(form) == "json_schema" and set(form) == {"type", "schema"} and type(form["schema"]) is dict


def _read_output(
    output: dict[str, Any], rest: dict[str, Any], options: dict[str, Any], options_at: dict[str, str]
) -> None:
    effort = take(output, "effort", str)
    if effort is not None:
        options["reasoning_effort"] = effort
        options_at["reasoning_effort"] = "/output_config/effort"
    form = output.get("format")
    if type(form) is dict and _is_plain_format(form):
        options["response_format"] = {"type": "schema", "schema": output.pop("format")["schema"]}
        options_at["response_format"] = "/output_config/format"
    if len(output) < len(rest["output_config"]):
        del rest["output_config"]
        if output:
            rest["output_config"] = output


def write_request(conversation: Conversation) -> Translated[Json]:
    """Write a request. Raises `TranslationError` where its meaning would break."""
    ledger = Ledger(conversation.dialect, NAME)
    check_meaning(conversation, ledger)
    out: dict[str, Any] = {}
    if conversation.model is not None:
        out["model"] = conversation.model
    write_messages(conversation, out, ledger)
    tools = write_tools(conversation.tools, ledger, write_tool)
    if tools:
        out["tools"] = tools
    write_options(conversation, out, ledger, NAMES, _specials(conversation))
    _merge_rest(conversation, out, ledger)
    if not ledger.is_home:
        _require(out, ledger)
    return Translated(out, ledger.done())


def _merge_rest(conversation: Conversation, out: dict[str, Any], ledger: Ledger) -> None:
    mine = conversation.ext.get(NAME, {})
    if ledger.is_home:
        for key in ("thinking", "output_config"):
            if type(mine.get(key)) is dict and type(out.get(key)) is dict:
                out[key] = {**mine[key], **out[key]}
    give_back(conversation, out, ledger)


def _require(out: dict[str, Any], ledger: Ledger) -> None:
    require_model(out, ledger)
    if "max_tokens" not in out:
        ledger.synthesise(limit_path(ledger), "required", f"a request has a limit here: {MAX_TOKENS_MADE}")
        out["max_tokens"] = MAX_TOKENS_MADE


def _specials(conversation: Conversation) -> dict[str, Writer]:
    def choice(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
        if value["mode"] == "tool" and chosen_kind(value, conversation, ledger, at) is None:
            return
        made = {"type": CHOICE_WORDS[value["mode"]]}
        if not ledger.is_home:
            ledger.degrade(at, "shape", "the same choice in another word")
        if value["mode"] == "tool":
            made["name"] = value["name"]
        out["tool_choice"] = {**made, **out.get("tool_choice", {}), **made}

    return {
        "tool_choice": choice, "parallel_tool_calls": _write_parallel, "reasoning_budget": _write_budget,
        "reasoning_effort": _write_effort, "response_format": _write_format, "user": _write_user,
        "service_tier": word_writer(SERVICE_TIERS, "class of service", "service_tier"),
        "temperature": _write_temperature, "metadata": _write_metadata, "n": write_n,
    }  # fmt: skip


def _write_parallel(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    if value and not ledger.is_home and "tool_choice" not in out:
        ledger.degrade(at, "shape", "several calls in one turn are the rule here")
        return
    out.setdefault("tool_choice", {"type": "auto"})["disable_parallel_tool_use"] = not value


def _write_budget(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    if value > 0:
        out["thinking"] = {"type": "enabled", "budget_tokens": value}
        if not ledger.is_home and value < 1024:
            ledger.degrade(at, "option_value", "thinking begins with 1024 tokens here", value)
            out["thinking"]["budget_tokens"] = 1024
    else:
        out["thinking"] = {"type": "adaptive" if value else "disabled"}
        if not ledger.is_home:
            ledger.degrade(at, "shape", "the same in a word", value)


def _write_effort(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    if ledger.is_home or value in EFFORTS:
        out.setdefault("output_config", {})["effort"] = value
    elif value == "none":
        ledger.degrade(at, "option_value", "no effort became no thinking", value)
        out["thinking"] = {"type": "disabled"}
    else:
        ledger.degrade(at, "option_value", "the nearest effort here is low", value)
        out.setdefault("output_config", {})["effort"] = "low"


def _write_format(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    if value["type"] == "schema" and type(value.get("schema")) is dict:
        out.setdefault("output_config", {})["format"] = {"type": "json_schema", "schema": value["schema"]}
        lose_schema_words(value, ledger, at)
    elif value["type"] == "text":
        ledger.degrade(at, "shape", "text is what the target gives anyway")
    else:
        ledger.drop(at, "option", "JSON without a schema cannot be asked for here", value)


def _write_user(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    out.setdefault("metadata", {})["user_id"] = value


def _write_metadata(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    ledger.drop(at, "option", "labels cannot be said here", value)


def _write_temperature(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    if not ledger.is_home and value > 1:
        ledger.degrade(at, "option_value", "the highest temperature here is 1", value)
        value = 1
    out["temperature"] = value
