"""Requests of the Chat Completions family, their options and tools, read and written.

Messages are in `_chat_read` and `_chat_write`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects._chat import EFFORTS, SERVICE_TIERS, SIMPLE, Flavour
from backplane.dialects._chat_read import read_message
from backplane.dialects._chat_write import write_cache, write_messages
from backplane.dialects._losses import check_meaning
from backplane.dialects._options import (
    FORMAT_MEMBERS,
    VERBOSITIES,
    Writer,
    budget_writer,
    option_names,
    read_options,
    require_model,
    word_writer,
    write_form,
    write_metadata,
    write_options,
)
from backplane.dialects._parts import (
    Calls,
    Ledger,
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
from backplane.dialects._tools import chosen_kind, read_tools, write_server_tool, write_tools
from backplane.ir import Conversation, ToolSpec, Translated


def read_request(request: Json, flavour: Flavour) -> Translated[Conversation]:
    """Read a request.

    Raises:
        TranslationError: `dialect_mapping_failed`, it has no list of messages.
    """
    rest = need_object(request, "")
    ledger = Ledger(flavour.name, flavour.name)
    calls = Calls()
    found = need_list(rest, "messages", "")
    messages = tuple(read_message(message, f"/messages/{place}", flavour, calls) for place, message in enumerate(found))
    options: dict[str, Any] = {}
    options_at: dict[str, str] = {}
    ext: dict[str, Any] = {}
    read_options(rest, SIMPLE, options, options_at)
    _read_limits(rest, options, options_at, ext, flavour)
    _read_stop(rest, options, options_at, ext)
    _read_tool_choice(rest, options, options_at)
    _read_format(rest, options, options_at)
    tools = read_tools(rest, lambda tool, at: read_tool(tool, at, flavour))
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
        cache=take_cache(rest),
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
    tools = write_tools(conversation.tools, ledger, write_tool)
    if tools:
        out["tools"] = tools
    known = {name: key for name, key in NAMES.items() if name not in flavour.unknown_options}
    write_options(conversation, out, ledger, known, {**_specials(conversation, flavour), **flavour.special})
    give_back(conversation, out, ledger)
    require_model(out, ledger)
    return Translated(out, ledger.done())


NAMES: Final = option_names(SIMPLE)


def _specials(conversation: Conversation, flavour: Flavour) -> dict[str, Writer]:
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

    return {
        "max_tokens": limit,
        "stop": stop,
        "tool_choice": choice,
        "response_format": _write_format,
        "reasoning_budget": budget_writer("reasoning_effort"),
        "reasoning_effort": word_writer(EFFORTS, "effort", "reasoning_effort"),
        "service_tier": word_writer(SERVICE_TIERS, "class of service", "service_tier"),
        "metadata": write_metadata,
        "verbosity": word_writer(VERBOSITIES, "verbosity", "verbosity"),
    }


def write_tool_choice(value: Any, out: dict[str, Any], ledger: Ledger, at: str, conversation: Conversation) -> None:
    """Write which tool the model has to call; one that the target does not have is refused."""
    if value["mode"] != "tool":
        out["tool_choice"] = value["mode"]
        return
    kind = chosen_kind(value, conversation, ledger, at)
    if kind is None:
        return
    kind = "custom" if kind == "custom" else "function"
    out["tool_choice"] = {"type": kind, kind: {"name": value["name"]}}


def _write_format(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    word, body = write_form(value, ledger, at)
    out["response_format"] = {"type": word, word: body} if word == "json_schema" else {"type": word}


def write_tool(tool: ToolSpec, ledger: Ledger) -> Json:
    """Write one tool definition; None where only another vendor runs it."""
    if tool.kind == "server":
        return write_server_tool(tool, ledger)
    body: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        body["description"] = tool.description
    if tool.schema is not None:
        body["parameters"] = tool.schema
    if tool.strict is not None:
        body["strict"] = tool.strict
    out: dict[str, Any] = {"type": tool.kind, tool.kind: body}
    write_cache(tool, out, ledger)
    give_back(tool, out, ledger)
    return out
