"""Anthropic's Messages, as its reference describes it (docs.anthropic.com, read November 2026).

Messages hold typed blocks; the system text stands outside, results stand in the user's messages.
Streams are in `claude_stream`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane import ir
from backplane.contract.canonical import Json
from backplane.contract.capability import EMULATED, NATIVE, UNSUPPORTED, Manifest
from backplane.dialects import codec
from backplane.dialects.codec import (
    FREE_TEXT,
    NUMBER,
    Block,
    Blocks,
    Calls,
    Ledger,
    Members,
    Option,
    Writer,
    arguments_object,
    is_own_raw,
    is_plain,
    kind_of,
    put_ext,
    read_content,
    read_options,
    unchanged,
    write_options,
)
from backplane.dialects.limits import Limits, Spelling
from backplane.dialects.losses import chosen_kind, lose_part, require
from backplane.dialects.outcome import Endings, failed_answer, failed_body
from backplane.dialects.vendor import Dialect, type_name, write_tools

NAME: Final = "claude"

TOOL_NAMES: Final[dict[str, str]] = {
    "Read": "read_file", "Write": "write_file", "Edit": "edit_file", "MultiEdit": "multi_edit",
    "NotebookEdit": "edit_file", "LS": "list_files", "Bash": "bash", "Glob": "glob", "Grep": "grep",
    "WebSearch": "web_search", "WebFetch": "web_fetch",
}  # fmt: skip
"""The names that the vendor's agent gives its tools → neutral names."""

CAPABILITIES: Final = Manifest({
    "streaming": NATIVE,
    "tool_read": NATIVE, "tool_write": NATIVE, "tool_edit": NATIVE, "tool_bash": NATIVE,
    "tool_glob": NATIVE, "tool_grep": NATIVE, "tool_web_search": NATIVE, "tool_web_fetch": NATIVE,
    "structured_output_json_schema": NATIVE,
    "hooks_pre_tool_use": NATIVE, "hooks_post_tool_use": NATIVE,
    "mcp_client": NATIVE, "mcp_server": UNSUPPORTED, "checkpointing": EMULATED,
})  # fmt: skip

DEFAULTS: Final[dict[str, Json]] = {"model": "claude-sonnet-5-5", "max_tokens": 4096}

ROLES: Final[dict[str, ir.Role]] = {"user": "user", "assistant": "assistant", "system": "system"}

STOPS: Final[dict[str, ir.Stop]] = {
    "end_turn": "end", "max_tokens": "max_tokens", "stop_sequence": "stop_sequence", "tool_use": "tool_use",
    "pause_turn": "pause", "refusal": "refusal", "model_context_window_exceeded": "max_tokens",
}  # fmt: skip

STOP_WORDS: Final[dict[ir.Stop | None, str]] = {
    "end": "end_turn", "max_tokens": "max_tokens", "stop_sequence": "stop_sequence", "tool_use": "tool_use",
    "pause": "pause_turn", "refusal": "refusal", "content_filter": "refusal",
    # Never `end_turn`: the answer may not be whole.
    None: "max_tokens", "error": "refusal", "cancelled": "max_tokens", "other": "max_tokens",
}  # fmt: skip

ENDINGS: Final = Endings(STOPS, STOP_WORDS)

OPTIONS: Final = (
    Option("max_tokens", "max_tokens", (int,), least=1),
    Option("temperature", "temperature", NUMBER, least=0, most=1),
    Option("top_p", "top_p", NUMBER),
    Option("top_k", "top_k", (int,), least=0),
    Option("stop_sequences", "stop", (list,)),
    Option("stream", "stream", (bool,)),
    Option("service_tier", "service_tier", known=frozenset({"auto", "standard_only"})),
    Option("metadata/user_id", "user"),
    Option("output_config/effort", "reasoning_effort"),
)

USAGE: Final = {
    "cache_read_input_tokens": "cache_read", "cache_creation_input_tokens": "cache_write", "output_tokens": "output",
    "output_tokens_details/thinking_tokens": "reasoning",
}  # fmt: skip
PLACES: Final = {
    **{row.name: row.path.partition("/")[0] for row in OPTIONS},
    **{field: path for path, field in USAGE.items()}, "input": "input_tokens", "id": "id", "model": "model",
    "usage": "usage", "cache": "cache_control", "signature": "signature", "title": "title",
    "reasoning_budget": "thinking", "response_format": "output_config", "tool_choice": "tool_choice",
    "parallel_tool_calls": "tool_choice",
}  # fmt: skip
TOOL: Final = {"name": "name", "description": "description", "schema": "input_schema", "strict": "strict"}
"""Field of a tool → its member."""

LIMITS: Final = Limits(
    call_id=Spelling("[a-zA-Z0-9_-]"), tool_name=Spelling("[a-zA-Z0-9_-]", 128), takes_empty_text=False,
    takes_objects=True, needs_user=True,
)  # fmt: skip
"""docs.anthropic.com, messages: patterns of ids and names, texts must not be empty; read 2026-11."""

MAX_TOKENS_MADE: Final = 4096
"""The limit that a request must have and the source did not say; every model allows as much."""
THINKING_TOKENS_MIN: Final = 1024
"""Least budget for thinking, which must also be below the limit of the answer (docs.anthropic.com, 2026-11)."""
TOP_P_MIN: Final = 0.95
"""Least `top_p` beside thinking; temperature and `top_k` are refused beside it (docs.anthropic.com, 2026-11)."""

EFFORTS: Final = frozenset({"low", "medium", "high", "xhigh", "max"})
CHOICES: Final = {"auto": "auto", "any": "required", "none": "none", "tool": "tool"}
IMAGE_TYPES: Final = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})
SOURCES: Final = {"base64": ("data", "data"), "url": ("url", "url"), "file": ("file_id", "file_id"),
                  "text": ("data", "text")}  # fmt: skip
"""Kind of a source → its member and the portable field."""


# Blocks ---------------------------------------------------------------------------------------------------------------


def _read_citations(members: Members, fields: dict[str, Any]) -> bool:
    return codec.read_citations("citations", read_citation, members, fields)


def read_citation(raw: dict[str, Any], at: str) -> ir.Citation:
    """Read where a text is from; its span counts in the document cited, so it stays native."""
    members = Members(raw, at)
    return ir.Citation(
        kind=members.take("type") or "", url=members.take("url"), title=members.take("title"),
        quote=members.take("cited_text"), at=at, ext=members.ext(NAME), raw=raw,
    )  # fmt: skip


def _write_citations(part: ir.Text, out: dict[str, Any], ledger: Ledger) -> bool:
    # A citation here needs the vendor's own index.
    citations = [write_citation(one, ledger) for one in part.citations if ledger.is_home or NAME in one.ext]
    if citations:
        out["citations"] = citations
    return True


def write_citation(citation: ir.Citation, ledger: Ledger) -> Json:
    pairs = (("type", citation.kind or None), ("url", citation.url), ("title", citation.title),
             ("cited_text", citation.quote))  # fmt: skip
    out: dict[str, Any] = {key: value for key, value in pairs if value is not None}
    put_ext(citation, out, ledger)
    return out


def _write_thinking(part: ir.Thinking, out: dict[str, Any], ledger: Ledger) -> bool:
    if part.redacted is not None:
        return False
    if not ledger.is_home:
        ledger.degrade(part.at, "thinking", "thinking without this vendor's signature; it takes it back only as text")
        out["signature"] = ""
    return True


def _take_input(members: Members, fields: dict[str, Any]) -> bool:
    if "input" not in members.rest:
        return False
    fields["input"] = members.rest.pop("input")
    return True


def _write_call(part: ir.ToolUse, out: dict[str, Any], ledger: Ledger) -> bool:
    out["input"] = arguments_object(part, ledger)
    return True


def _read_result(members: Members, fields: dict[str, Any]) -> bool:
    fields["content"], fields["flat"] = read_content(members, "content", read_block)
    return True


def _write_result(part: ir.ToolResult, out: dict[str, Any], ledger: Ledger) -> bool:
    if part.flat is not False and is_plain(part.content):
        put_ext(part.content[0], {}, ledger)
        out["content"] = part.content[0].text  # type: ignore[attr-defined]
    elif part.content or part.flat is not None:
        out["content"] = write_blocks(part.content, ledger)
    return True


def _read_source(members: Members, fields: dict[str, Any]) -> bool:
    form = members.take("source/type")
    if form == "content" and fields["kind"] == "document":
        return _read_texts(members, fields, members.take("source/content", list))
    member, field = SOURCES.get(str(form), ("", ""))
    fields[field] = members.take(f"source/{member}") if member else None
    fields["media_type"] = members.take("source/media_type")
    return bool(member) and fields[field] is not None


def _read_search(members: Members, fields: dict[str, Any]) -> bool:
    return _read_texts(members, fields, members.take("content", list))


def _read_texts(members: Members, fields: dict[str, Any], blocks: list[Json] | None) -> bool:
    """Read a document that stands in blocks of text as one text."""
    found = blocks or [None]
    if not all(kind_of(block) == "text" and set(block) == {"type", "text"} and type(block["text"]) is str
               for block in found):  # fmt: skip
        return False
    fields |= {"text": "\n\n".join(block["text"] for block in found), "media_type": "text/plain"}
    return True


def _write_media(part: ir.Media, out: dict[str, Any], ledger: Ledger) -> bool:
    """Write where a picture or document comes from; False where this vendor takes nothing of the kind."""
    form = next((form for form, (_, field) in SOURCES.items() if getattr(part, field) is not None), "")
    media_type = part.media_type
    if not form or part.kind not in ("image", "document") or (form == "text" and part.kind == "image"):
        return False
    if not ledger.is_home:
        media_type = media_type or ("image/png" if part.kind == "image" else "application/pdf")
        is_known = media_type in IMAGE_TYPES if part.kind == "image" else media_type == "application/pdf"
        is_address = part.url is not None and part.url.startswith(("http:", "https:"))
        if (form == "base64" and not is_known) or (form == "url" and not is_address) or form == "file":
            return False
        media_type = {"base64": media_type, "text": "text/plain"}.get(form)
    member, field = SOURCES[form]
    out["source"] = {"type": form, member: getattr(part, field)}
    if media_type is not None:
        out["source"]["media_type"] = media_type
    title = part.title if part.title is not None or ledger.is_home else part.name
    if title is not None and part.kind == "document":
        out["title"] = title
    return True


BLOCKS: Final = Blocks(NAME, (
    Block("text", ir.Text, {"text!": "text"}, read=_read_citations, write=_write_citations),
    Block("thinking", ir.Thinking, {"thinking!": "text", "signature": "signature"}, write=_write_thinking),
    Block("redacted_thinking", ir.Thinking, {"data!": "redacted"}, {"text": ""},
          write=lambda part, out, ledger: bool(ledger.is_home)),
    Block("tool_use", ir.ToolUse, {"id!": "id", "name!": "name"}, read=_take_input, write=_write_call),
    Block("tool_result", ir.ToolResult, {"tool_use_id!": "id", "is_error": "is_error"}, types={"is_error": (bool,)},
          read=_read_result, write=_write_result),
    Block("image", ir.Media, {}, {"kind": "image"}, read=_read_source, write=_write_media),
    Block("document", ir.Media, {"title": "title"}, {"kind": "document"}, read=_read_source, write=_write_media),
    Block("search_result", ir.Media, {"title": "title"}, {"kind": "document"}, read=_read_search, is_written=False),
), cache="cache_control", ttls=(None, "5m", "1h"))  # fmt: skip


def read_block(value: Json, at: str) -> ir.Part:
    """Read one block of any kind."""
    found = BLOCKS.read(value, at)
    if found is not None:
        return found
    kind = str(kind_of(value))
    if kind.endswith(("tool_use", "tool_result")):
        return ir.ServerTool(dialect=NAME, name=str(value.get("name") or kind), payload=value, at=at, raw=value)
    return ir.Opaque(dialect=NAME, label=kind, payload=value, at=at, bound=kind == "container_upload", raw=value)


def write_block(part: ir.Part, ledger: Ledger, *, is_answer: bool = False) -> Json:
    """Write one block, None where the target has no word for it."""
    if is_own_raw(part, ledger):
        return part.payload  # type: ignore[attr-defined]
    if unchanged(part, ledger, lambda: read_block(part.raw, part.at)):
        return part.raw
    if not ledger.is_home:
        if isinstance(part, ir.Thinking) and not is_answer:
            lose_part(part, ledger, f"only {ledger.source} takes its thinking back")
            return None
        if isinstance(part, ir.Media) and is_answer:
            lose_part(part, ledger, "an answer of this vendor holds no media")
            return None
    if isinstance(part, ir.Refusal):
        ledger.degrade(part.at, "part", "a refusal is said as text here")
        return {"type": "text", "text": part.text}
    found = BLOCKS.write(part, ledger)
    if found is None:
        lose_part(part, ledger)
    return found


def write_blocks(parts: tuple[ir.Part, ...], ledger: Ledger, *, is_answer: bool = False) -> list[Json]:
    """Write blocks; those that the target has no word for are left out and reported."""
    made = ((part, write_block(part, ledger, is_answer=is_answer)) for part in parts)
    return [block for part, block in made if block is not None or is_own_raw(part, ledger)]


# Messages -------------------------------------------------------------------------------------------------------------


def read_message(value: Json, at: str) -> ir.Message:
    """Read one message; results stay in it among the other blocks."""
    members = Members(value, at)
    native_role = members.take("role")
    parts, flat = read_content(members, "content", read_block)
    return ir.Message(
        role=ROLES.get(native_role or "", "user"), parts=parts, native_role=native_role, flat=flat, at=at,
        ext=members.ext(NAME), raw=value,
    )  # fmt: skip


def _write_messages(conversation: ir.Conversation, out: dict[str, Any], ledger: Ledger) -> None:
    """Write the messages and, outside of them, the system text."""
    system: list[ir.Message] = []
    messages: list[Json] = []
    last: ir.Role | None = None
    for message in conversation.messages:
        if message.role == "system" and not (ledger.is_home and message.native_role == "system"):
            if messages:
                ledger.degrade(message.at, "order", "system text in the middle became part of the head")
            system.append(message)
            continue
        if unchanged(message, ledger, lambda: read_message(message.raw, message.at)):  # noqa: B023
            messages.append(message.raw)
        elif last == "tool" and message.role in ("tool", "user") and not ledger.is_home:
            more = _write_content(message, ledger)
            messages[-1]["content"] = _as_list(messages[-1]["content"]) + _as_list(more)
            put_ext(message, {}, ledger)
        else:
            written = _write_message(message, ledger)
            if written["content"] == [] and not ledger.is_home:
                ledger.drop(message.at, "shape", "a message without content is refused here")
                continue
            messages.append(written)
        last = message.role
    if system:
        out["system"] = _write_system(system, ledger)
    out["messages"] = messages


def _as_list(content: Json) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _write_system(messages: list[ir.Message], ledger: Ledger) -> Json:
    for message in messages:
        put_ext(message, {}, ledger)
    if len(messages) == 1 and messages[0].flat is not False and is_plain(messages[0].parts):
        put_ext(messages[0].parts[0], {}, ledger)
        return messages[0].parts[0].text  # type: ignore[attr-defined]
    return [block for message in messages for block in write_blocks(message.parts, ledger)]


def _write_message(message: ir.Message, ledger: Ledger) -> dict[str, Any]:
    native = message.native_role
    is_own = ledger.is_home and native is not None and ROLES.get(native, "user") == message.role
    out = {
        "role": native if is_own else "user" if message.role == "tool" else message.role,
        "content": _write_content(message, ledger),
    }  # fmt: skip
    put_ext(message, out, ledger)
    return out


def _write_content(message: ir.Message, ledger: Ledger) -> Json:
    said = message.parts
    if not ledger.is_home:
        said = tuple(part for part in message.parts if not isinstance(part, ir.Thinking))
    if message.flat is not False and is_plain(said):
        put_ext(said[0], {}, ledger)
        if len(said) < len(message.parts):
            write_blocks(message.parts, ledger)  # names the thinking that is left out
        return said[0].text  # type: ignore[attr-defined]
    return write_blocks(message.parts, ledger)


# Requests -------------------------------------------------------------------------------------------------------------


def read_request(request: Json, ledger: Ledger, calls: Calls) -> ir.Conversation:
    """Read a request. Raises `TranslationError` `dialect_mapping_failed` where it is none."""
    members = Members(request, "")
    found = members.need("messages")
    messages = [read_message(message, f"/messages/{place}") for place, message in enumerate(found)]
    parts, flat = read_content(members, "system", read_block)
    system = [ir.Message(role="system", parts=parts, flat=flat, at="/system")] if flat is not None else []
    options: dict[str, Any] = {}
    places: dict[str, str] = {}
    read_options(members, OPTIONS, options, places)
    _read_choice(members, options, places)
    _read_thinking(members, options, places)
    form: Any = members.rest.get("output_config") or (members.below or {}).get("output_config")
    form = form.rest.get("format") if isinstance(form, Members) else form.get("format") if type(form) is dict else None
    if kind_of(form) == "json_schema" and set(form) == {"type", "schema"} and type(form["schema"]) is dict:
        options["response_format"] = {"type": "schema", "schema": members.take("output_config/format", dict)["schema"]}
        places["response_format"] = "/output_config/format"
    tools = codec.take_tools(members, read_tool)
    return ir.Conversation(
        dialect=NAME, messages=(*system, *messages), model=members.take("model"), tools=tools, options=options,
        options_at=places, ext=members.ext(NAME),
    )  # fmt: skip


def _read_choice(members: Members, options: dict[str, Any], places: dict[str, str]) -> None:
    """Take which tool must be called, where it says nothing that the portable choice cannot say."""
    choice = members.rest.get("tool_choice")
    if type(choice) is not dict or kind_of(choice) not in CHOICES:
        return
    apart = choice.get("disable_parallel_tool_use")
    if choice.keys() - {"type", "name", "disable_parallel_tool_use"} or type(apart) not in (bool, type(None)):
        return
    if (choice["type"] == "tool") != ("name" in choice) or type(choice.get("name", "")) is not str:
        return
    del members.rest["tool_choice"]
    options["tool_choice"] = {"mode": CHOICES[choice["type"]]}
    if "name" in choice:
        options["tool_choice"]["name"] = choice["name"]
    places["tool_choice"] = "/tool_choice"
    if apart is not None:
        options["parallel_tool_calls"] = not apart
        places["parallel_tool_calls"] = "/tool_choice/disable_parallel_tool_use"


def _read_thinking(members: Members, options: dict[str, Any], places: dict[str, str]) -> None:
    thinking: Any = members.rest.get("thinking")
    kind = kind_of(thinking)
    if kind == "enabled" and type(thinking.get("budget_tokens")) is int:
        options["reasoning_budget"] = members.take("thinking/budget_tokens", int)
    elif kind in ("disabled", "adaptive"):
        options["reasoning_budget"] = 0 if kind == "disabled" else -1
    else:
        return
    members.take("thinking/type")
    places["reasoning_budget"] = "/thinking"


def write_request(conversation: ir.Conversation, ledger: Ledger) -> dict[str, Any]:
    """Write a request."""
    out: dict[str, Any] = {}
    if conversation.model is not None:
        out["model"] = conversation.model
    _write_messages(conversation, out, ledger)
    if tools := write_tools(conversation.tools, ledger, write_tool):
        out["tools"] = tools
    write_options(conversation, out, ledger, OPTIONS, _special(conversation))
    put_ext(conversation, out, ledger)
    if not ledger.is_home:
        require(out, {"model": "unknown", "max_tokens": MAX_TOKENS_MADE})
        _fit_thinking(out, conversation, ledger)
    return out


def _fit_thinking(out: dict[str, Any], conversation: ir.Conversation, ledger: Ledger) -> None:
    """Leave out what the server refuses beside thinking."""
    thinking: Any = out.get("thinking")
    if kind_of(thinking) not in ("enabled", "adaptive") or "reasoning_budget" not in conversation.options:
        return
    places = conversation.options_at
    budget = thinking.get("budget_tokens")
    is_forced = kind_of(out.get("tool_choice")) in ("any", "tool")
    if is_forced or (budget is not None and out["max_tokens"] <= THINKING_TOKENS_MIN):
        del out["thinking"]
        why = "a tool is forced" if is_forced else f"the limit is {out['max_tokens']} tokens"
        ledger.drop(places.get("reasoning_budget", "/thinking"), "option_value", f"no thinking here where {why}")
        return
    if budget is not None and budget >= out["max_tokens"]:
        thinking["budget_tokens"] = out["max_tokens"] - 1
        at = places.get("reasoning_budget", "/thinking")
        ledger.degrade(at, "option_value", "thinking must take less than the limit of the answer here", budget)
    for name in ("temperature", "top_k"):
        if name in out and out[name] != 1:
            ledger.drop(places.get(name, f"/{name}"), "option_value", f"{name} is refused beside thinking", out[name])
        out.pop(name, None)
    if out.get("top_p", 1) < TOP_P_MIN:
        at = places.get("top_p", "/top_p")
        ledger.degrade(at, "option_value", f"the least beside thinking is {TOP_P_MIN}", out["top_p"])
        out["top_p"] = TOP_P_MIN


def _special(conversation: ir.Conversation) -> dict[str, Writer]:
    def choice(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
        if value["mode"] == "tool" and chosen_kind(value, conversation, ledger, at) is None:
            return
        made = {"type": next(word for word, mode in CHOICES.items() if mode == value["mode"])}
        if value["mode"] == "tool":
            made["name"] = value["name"]
        out["tool_choice"] = {**out.get("tool_choice", {}), **made}

    def parallel(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
        chosen = conversation.options.get("tool_choice", {}).get("mode")
        if value and not ledger.is_home and chosen is None:
            ledger.degrade(at, "shape", "several calls in one turn are the rule here")
        elif chosen == "none" and not ledger.is_home:
            ledger.degrade(at, "shape", "no calls are wanted at all")
        else:
            out.setdefault("tool_choice", {"type": "auto"})["disable_parallel_tool_use"] = not value

    return {
        "tool_choice": choice, "parallel_tool_calls": parallel, "reasoning_budget": _write_budget,
        "reasoning_effort": _write_effort, "response_format": _write_format,
    }  # fmt: skip


def _write_budget(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    if value <= 0:
        out["thinking"] = {"type": "adaptive" if value else "disabled"}
        return
    out["thinking"] = {"type": "enabled", "budget_tokens": value}
    if not ledger.is_home and value < THINKING_TOKENS_MIN:
        ledger.degrade(at, "option_value", f"thinking begins with {THINKING_TOKENS_MIN} tokens here", value)
        out["thinking"]["budget_tokens"] = THINKING_TOKENS_MIN


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
    elif value["type"] == "text":
        ledger.degrade(at, "shape", "text is what the target gives anyway")
    else:
        ledger.drop(at, "option", "JSON without a schema cannot be asked for here", value)


def read_tool(tool: Json, at: str) -> ir.ToolSpec:
    """Read one tool definition."""
    is_own = type(tool) is dict and tool.get("type") in (None, "custom") and type(tool.get("name")) is str
    if not is_own:
        name = tool.get("name") or tool.get("type") if type(tool) is dict else "unreadable"
        return ir.ToolSpec(name=str(name), kind="server", payload=tool, at=at)
    return codec.read_tool(tool, at, NAME, TOOL, cache=True)


def write_tool(tool: ir.ToolSpec, ledger: Ledger) -> Json:
    """Write one tool definition."""
    if unchanged(tool, ledger, lambda: read_tool(tool.raw, tool.at)):
        return tool.raw
    schema = FREE_TEXT if tool.kind == "custom" else tool.schema
    if not ledger.is_home:
        if schema is None:
            ledger.synthesise(tool.at, "required", "a tool has a schema here")
        elif "type" not in schema:
            ledger.degrade(tool.at, "required", "a schema says that it is of an object here")
        schema = {"type": "object", **(schema or {"properties": {}})}
    cache = {} if tool.cache is None else {"cache_control": {"type": "ephemeral", **tool.cache}}
    return codec.write_tool(msgspec.structs.replace(tool, schema=schema), cache, ledger, TOOL)


# Answers --------------------------------------------------------------------------------------------------------------


def read_answer(response: Json, ledger: Ledger, calls: Calls) -> ir.Answer:
    """Read a response. Raises `TranslationError` `dialect_mapping_failed` where it is none."""
    members = Members(response, "")
    if "error" in members.rest and "content" not in members.rest:
        return failed_answer(NAME, members)
    found = members.need("content")
    members.skip("type", "message")
    members.skip("role", "assistant")
    parts = tuple(read_block(block, f"/content/{place}") for place, block in enumerate(found))
    raw = members.take("stop_reason")
    usage = codec.take_usage(members, read_usage)
    candidate = ir.Candidate(
        message=ir.Message(role="assistant", parts=parts, flat=False), stop=ENDINGS.read(raw, parts), stop_raw=raw,
        stop_sequence=members.take("stop_sequence"), stop_at="/stop_reason",
    )  # fmt: skip
    return ir.Answer(
        dialect=NAME, id=members.take("id"), model=members.take("model"), candidates=(candidate,), usage=usage,
        ext=members.ext(NAME),
    )  # fmt: skip


def read_usage(usage: dict[str, Any], at: str) -> ir.Usage:
    """Read token counters; this vendor's input leaves out what the cache gave and took."""
    read = codec.read_counters(usage, at, NAME, {"input_tokens": "input", **USAGE})
    if read.input is None:
        return read
    return msgspec.structs.replace(read, input=read.input + (read.cache_read or 0) + (read.cache_write or 0))


def write_answer(answer: ir.Answer, ledger: Ledger) -> dict[str, Any]:
    """Write a response."""
    out: dict[str, Any] = {}
    if answer.error is not None and not answer.candidates:
        out = failed_body(answer, ledger, {"type": "api_error", "message": answer.error})
        return out if ledger.is_home else {"type": "error", **out}
    out = {"type": "message", "role": "assistant", "content": []}
    for key, value in (("id", answer.id), ("model", answer.model)):
        if value is not None:
            out[key] = value
    for candidate in answer.candidates[:1]:
        out["content"] = write_blocks(candidate.message.parts, ledger, is_answer=True)
        if (word := ENDINGS.write(candidate, ledger)) is not None:
            out["stop_reason"] = word
        if candidate.stop_sequence is not None:
            out["stop_sequence"] = candidate.stop_sequence
        put_ext(candidate.message, out, ledger)
        put_ext(candidate, out, ledger)
    if answer.usage is not None:
        out["usage"] = write_usage(answer.usage, ledger)
    put_ext(answer, out, ledger)
    if not ledger.is_home:
        require(out, {"id": "msg_translated", "model": "unknown", "stop_reason": STOP_WORDS[None],
                      "usage": {"input_tokens": 0, "output_tokens": 0}})  # fmt: skip
        out.setdefault("stop_sequence", None)
    return out


def write_usage(usage: ir.Usage, ledger: Ledger) -> dict[str, Any]:
    """Write token counters; input leaves out what the cache gave and took."""
    fresh = usage.input
    if fresh is not None:
        fresh -= (usage.cache_read or 0) + (usage.cache_write or 0)
        fresh = fresh if ledger.is_home else max(0, fresh)
    apart = msgspec.structs.replace(usage, input=fresh)
    return codec.write_counters(apart, ledger, {"input_tokens": "input", **USAGE}, ("input", "output"))


def _dialect() -> Dialect:
    from backplane.dialects.claude_stream import ClaudeReader, ClaudeWriter

    return Dialect(
        NAME=NAME, TOOL_NAMES=TOOL_NAMES, CAPABILITIES=CAPABILITIES, DEFAULTS=DEFAULTS, read_request=read_request,
        write_request=write_request, read_answer=read_answer, write_answer=write_answer, read_tool=read_tool,
        write_tool=write_tool, read_stream=ClaudeReader, write_stream=ClaudeWriter,
        event_name=type_name, limits=LIMITS, places=PLACES,
        content=frozenset({"messages", "system", "content"}),
    )  # fmt: skip


DIALECT: Final = _dialect()
