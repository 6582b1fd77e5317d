"""OpenAI's Responses, which its agent Codex speaks (platform.openai.com, read November 2026).

A request and an answer are lists of items: messages, calls, results, reasoning. Streams are in `_codex_stream`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.capability import EMULATED, NATIVE, UNSUPPORTED, Manifest
from backplane.contract.events import AgentEvent
from backplane.contract.work import WorkOrder
from backplane.dialects import _codex_stream, _events
from backplane.dialects._codex_items import (
    EXACT,
    NAME,
    STOP_WORDS,
    read_items,
    read_stop,
    read_usage,
    write_items,
    write_turn,
    write_usage,
)
from backplane.dialects._parts import (
    ABSENT,
    EFFORT_BUDGETS,
    NUMBER,
    Ledger,
    OptionTable,
    Writer,
    check_meaning,
    effort_of,
    escape,
    give_back,
    is_plain,
    kind_of,
    need_list,
    need_object,
    option_names,
    put_constants,
    put_rest,
    read_options,
    shape,
    slot,
    stop_word,
    take,
    take_constant,
    take_number,
    write_options,
)
from backplane.ir import Answer, Candidate, Conversation, Message, Opaque, Part, Text, ToolSpec, Translated

__all__ = ["NAME"]

TOOL_NAMES: Final[dict[str, str]] = {
    "shell": "bash",
    "shell_command": "bash",
    "exec_command": "bash",
    "local_shell": "bash",
    "apply_patch": "apply_patch",
    "read_file": "read_file",
    "list_dir": "list_files",
    "grep_files": "grep",
    "web_search": "web_search",
}
"""The names that the vendor's agent gives its tools → neutral names."""

CAPABILITIES: Final = Manifest({
    "streaming": NATIVE,
    "tool_read": NATIVE, "tool_write": NATIVE, "tool_edit": NATIVE, "tool_bash": NATIVE,
    "tool_glob": EMULATED, "tool_grep": EMULATED,
    "structured_output_json_schema": NATIVE,
    "hooks_pre_tool_use": EMULATED, "hooks_post_tool_use": EMULATED,
    "mcp_client": UNSUPPORTED, "mcp_server": UNSUPPORTED,
})  # fmt: skip

DEFAULTS: Final[dict[str, Json]] = {"model": "codex-mini-latest", "max_tokens": 4096}

FRAMING: Final = "sse"
DONE: Final = False

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
FORMAT_MEMBERS: Final = ("name", "schema", "strict", "description")


# Tools ----------------------------------------------------------------------------------------------------------------


def tool_to_ir(tool: Json) -> Translated[ToolSpec]:
    """Read one tool definition."""
    return Translated(_read_tool(tool, ""))


def tool_from_ir(tool: ToolSpec, source: str = NAME) -> Translated[Json]:
    """Write one tool definition; None with a loss where only `source` runs it."""
    ledger = Ledger(source, NAME)
    return Translated(_write_tool(tool, ledger), ledger.done())


def _read_tool(tool: Json, at: str) -> ToolSpec:
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
    if rest:
        spec = msgspec.structs.replace(spec, ext={NAME: {escape(key): value for key, value in rest.items()}})
    return spec


def _write_tools(specs: tuple[ToolSpec, ...], ledger: Ledger) -> list[Json]:
    out: list[Json] = []
    for tool in specs:
        written = _write_tool(tool, ledger)
        if written is not None or (tool.kind == "server" and ledger.is_home):
            out.append(written)
    return out


def _write_tool(tool: ToolSpec, ledger: Ledger) -> Json:
    if tool.kind == "server":
        if ledger.is_home:
            return tool.payload
        ledger.drop(tool.at, "tool", f"{tool.name} is run by {ledger.source} itself", tool.payload)
        return None
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
    if tool.cache is not None:
        ledger.drop(tool.at, "cache", "the target has no breakpoint here", tool.cache)
    give_back(tool, out, ledger)
    return out


# Requests -------------------------------------------------------------------------------------------------------------


def to_ir(request: Json) -> Translated[Conversation]:
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
    tools = take(rest, "tools", list)
    if tools is not None and not tools:
        rest["tools"] = tools
    specs = tuple(_read_tool(tool, f"/tools/{place}") for place, tool in enumerate(tools or ()))
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


def from_ir(conversation: Conversation) -> Translated[Json]:
    """Write a request. Raises `TranslationError` where its meaning would break."""
    ledger = Ledger(conversation.dialect, NAME)
    check_meaning(conversation, ledger)
    out: dict[str, Any] = {}
    if conversation.model is not None:
        out["model"] = conversation.model
    _write_input(conversation, out, ledger)
    tools = _write_tools(conversation.tools, ledger)
    if tools:
        out["tools"] = tools
    write_options(conversation, out, ledger, NAMES, _specials(conversation))
    give_back(conversation, out, ledger)
    if conversation.model is None and not ledger.is_home:
        ledger.synthesise("/model", "required", "a request names its model")
        out["model"] = "unknown"
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
        kinds = {tool.name: tool.kind for tool in conversation.tools}
        kind = kinds.get(value["name"], value.get("kind", "function"))
        if kind == "server" and not ledger.is_home:
            ledger.refuse(at, "tool_choice", f"{value['name']} is forced, and only {ledger.source} has it")
            return
        out["tool_choice"] = {"type": "custom" if kind == "custom" else "function", "name": value["name"]}

    return {
        "tool_choice": choice, "reasoning_effort": _write_effort, "reasoning_budget": _write_budget,
        "response_format": _write_format, "verbosity": _write_verbosity, "service_tier": _write_tier,
        "metadata": _write_metadata, "n": _write_n,
    }  # fmt: skip


def _write_effort(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    if ledger.is_home or value in EFFORT_BUDGETS:
        out.setdefault("reasoning", {})["effort"] = value
    else:
        ledger.drop(at, "option_value", "no such effort here", value)


def _write_budget(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    if "reasoning" in out:
        ledger.drop(at, "option", "the target has the effort in words only", value)
        return
    out["reasoning"] = {"effort": effort_of(value)}
    ledger.degrade(at, "option_value", f"tokens for thinking became the word {effort_of(value)}", value)


def _write_format(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    if value["type"] == "schema":
        form = {"type": "json_schema", **{key: value[key] for key in FORMAT_MEMBERS if key in value}}
        if "name" not in form and not ledger.is_home:
            ledger.synthesise(at, "required", "a schema has a name here")
            form["name"] = "answer"
    else:
        form = {"type": "json_object" if value["type"] == "json" else "text"}
    out.setdefault("text", {})["format"] = form


def _write_verbosity(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    if ledger.is_home or value in ("low", "medium", "high"):
        out.setdefault("text", {})["verbosity"] = value
    else:
        ledger.drop(at, "option_value", "no such verbosity here", value)


def _write_tier(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    if ledger.is_home or value in SERVICE_TIERS:
        out["service_tier"] = value
    else:
        ledger.drop(at, "option_value", "no such class of service here", value)


def _write_metadata(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    if ledger.is_home or all(type(label) is str for label in value.values()):
        out["metadata"] = value
    else:
        ledger.drop(at, "option_value", "labels are texts here", value)


def _write_n(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    if value == 1:
        ledger.degrade(at, "shape", "one answer is what the target gives anyway")
    else:
        ledger.drop(at, "candidates", "the target gives one answer", value)


# Answers --------------------------------------------------------------------------------------------------------------


def response_to_ir(response: Json) -> Translated[Answer]:
    """Read a response. Raises `TranslationError` `dialect_mapping_failed` where it is none."""
    rest = need_object(response, "")
    if "output" not in rest and type(rest.get("error")) in (dict, str):
        return Translated(_failure(rest))
    found = need_list(rest, "output", "")
    ext: dict[str, Any] = {}
    absent: list[str] = []
    messages = read_items(found, "/output", is_answer=True)
    parts: tuple[Part, ...] = tuple(part for message in messages for part in _parts(message))
    message = Message(role="assistant", parts=parts)
    take_constant(rest, "object", "response", absent)
    raw, stop_at = take(rest, "status", str), "/status"
    details = rest.get("incomplete_details")
    reason = details.get("reason") if type(details) is dict and len(details) == 1 else None
    if raw == "incomplete" and type(reason) is str and reason:
        del rest["incomplete_details"]
        raw = f"incomplete:{reason}"
        stop_at = "/incomplete_details/reason"
    error = rest.get("error")
    words = error.get("message") if type(error) is dict else None
    usage = read_usage(rest.pop("usage"), "/usage") if type(rest.get("usage")) is dict else None
    candidate = Candidate(message=message, stop=read_stop(raw, parts), stop_raw=raw, stop_at=stop_at)
    if absent:
        ext[ABSENT] = tuple(absent)
    answer_id, model, created = take(rest, "id", str), take(rest, "model", str), take_number(rest, "created_at")
    put_rest(ext, rest)
    return Translated(
        Answer(
            dialect=NAME, id=answer_id, model=model, created=created, candidates=(candidate,), usage=usage,
            error=words if type(words) is str else None, ext=slot(NAME, ext),
        )
    )  # fmt: skip


def _parts(message: Message) -> tuple[Part, ...]:
    """Return what an item says in an answer; one that is none of the assistant's is kept as it came."""
    if message.role == "assistant":
        return message.parts
    written = write_items((message,), Ledger(NAME, NAME))[0]
    return (Opaque(dialect=NAME, label=f"item of {message.role}", payload=written, at=message.at),)


def _failure(rest: dict[str, Any]) -> Answer:
    error = rest["error"]
    message = error.get("message") if type(error) is dict else error
    return Answer(
        dialect=NAME, candidates=(), error=message if type(message) is str else "unknown error",
        ext={NAME: {escape(key): value for key, value in rest.items()}},
    )  # fmt: skip


def response_from_ir(answer: Answer) -> Translated[Json]:
    """Write a response."""
    ledger = Ledger(answer.dialect, NAME)
    out: dict[str, Any] = {}
    if answer.error is not None and not answer.candidates:
        give_back(answer, out, ledger)
        if "error" not in out:
            out["error"] = {"message": answer.error, "type": "upstream_error", "param": None, "code": None}
        return Translated(out, ledger.done())
    for candidate in answer.candidates[1:]:
        ledger.drop(candidate.at, "candidates", "the target gives one answer", msgspec.to_builtins(candidate))
    for key, value in (("id", answer.id), ("model", answer.model), ("created_at", answer.created)):
        if value is not None:
            out[key] = value
    out["output"] = []
    for candidate in answer.candidates[:1]:
        out["output"] = write_turn(candidate.message, ledger, is_answer=True)
        write_status(candidate, out, ledger)
        give_back(candidate, out, ledger)
    if answer.usage is not None:
        out["usage"] = write_usage(answer.usage, ledger)
    give_back(answer, out, ledger)
    put_constants(answer, out, NAME, {"object": "response"})
    if not ledger.is_home:
        require(out, ledger)
    return Translated(out, ledger.done())


def write_status(candidate: Candidate, out: dict[str, Any], ledger: Ledger) -> None:
    """Write why the answer ended: the vendor's own words while they mean the same."""
    raw, stop = candidate.stop_raw, candidate.stop
    if not (ledger.is_home and read_stop(raw, candidate.message.parts) == stop):
        raw = STOP_WORDS.get(stop or "", "completed")
        if stop not in EXACT:
            code = "shape" if stop == "tool_use" else "stop"
            ledger.degrade(candidate.stop_at, code, f"{candidate.stop_raw or stop} became {raw}")
        stop_word(candidate, ledger)
    if raw is None:
        return
    status, _, reason = raw.partition(":")
    out["status"] = status
    if reason:
        out["incomplete_details"] = {"reason": reason}


REQUIRED: Final[tuple[tuple[str, Json], ...]] = (
    ("id", "resp_translated"),
    ("created_at", 0),
    ("model", "unknown"),
)


def require(out: dict[str, Any], ledger: Ledger) -> None:
    """Write what an answer must have here and the source did not say."""
    for key, value in REQUIRED:
        if out.get(key) is None:
            ledger.synthesise(f"/{key}", "required", f"an answer has {key} here")
            out[key] = value
    # These repeat the request, which an answer alone does not know.
    for key, value in (("parallel_tool_calls", True), ("tool_choice", "auto"), ("tools", [])):
        out.setdefault(key, value)


# Orders, events, streams ----------------------------------------------------------------------------------------------


def map_work_order(order: WorkOrder, config: Mapping[str, Json]) -> Translated[Json]:
    """Write an order as a request; `config` as for `_events.order_conversation`."""
    return from_ir(_events.order_conversation(order, config, NAME, DEFAULTS))


def map_response(response: Json, now: str = _events.EPOCH) -> list[AgentEvent]:
    """Say a response as agent events, all at the time `now`."""
    return _events.answer_events(response_to_ir(response).value, now)


class StreamReader(_codex_stream.CodexReader):
    """Chunks of one stream into events of the ir."""

    def __init__(self) -> None:
        super().__init__(response_to_ir)


class StreamWriter(_codex_stream.CodexWriter):
    """Events of the ir into chunks of one stream."""

    def __init__(self, source: str = NAME) -> None:
        super().__init__(source, response_from_ir)


class StreamState(_events.State):
    """One stream on its way to agent events."""

    def __init__(self, now: str = _events.EPOCH) -> None:
        super().__init__(NAME, StreamReader(), now)


def map_stream_event(chunk: Json, state: StreamState) -> list[AgentEvent]:
    """Say one chunk as agent events; a call comes whole, when its arguments have ended."""
    return _events.chunk_events(chunk, state)


def event_name(chunk: Json) -> str | None:
    """Return the name under which a chunk is sent: its type."""
    return str(chunk.get("type", "error"))


def to_passthrough_event(raw: Json, now: str = _events.EPOCH) -> AgentEvent:
    """Carry a vendor's message through the contract unread."""
    return _events.passthrough_event(raw, now)


def from_passthrough_event(event: AgentEvent) -> Json:
    """Return the vendor's message that an event carries, None when it carries none."""
    return _events.passed_through(event)
