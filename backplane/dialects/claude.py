"""Reads and writes Anthropic's Messages, as its reference describes it (docs.anthropic.com, read November 2026).

Messages have typed blocks; the system text is outside of them, results are in the user's messages. A stream has one
block after the other, each with a start and an end.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.capability import EMULATED, NATIVE, UNSUPPORTED, Manifest
from backplane.dialects import ir
from backplane.dialects.common import (
    NUMBER,
    Counters,
    LossLedger,
    MediaTable,
    OptionsRead,
    answer_of,
    conversation_of,
    ext_of,
    head_of,
    kind_of,
    members_of,
    merged,
    parse_json,
    pop,
    pop_at,
    pop_inner,
    pop_list,
    put_at,
    put_back,
    read_content,
    read_part,
    server_tool,
    takes,
    tool_of,
    without_none,
    write_content,
    write_options,
    write_part,
    write_parts,
)
from backplane.dialects.limits import ServerLimits, Spelling
from backplane.dialects.outcome import Endings
from backplane.dialects.streams import BlockReader, BlockWriter, Key, failure, whole_events
from backplane.dialects.vendor import Dialect, outside, read_error, type_name

NAME: Final = "claude"

TOOL_NAMES: Final[dict[str, str]] = {
    "Read": "read_file", "Write": "write_file", "Edit": "edit_file", "MultiEdit": "multi_edit",
    "NotebookEdit": "edit_file", "LS": "list_files", "Bash": "bash", "Glob": "glob", "Grep": "grep",
    "WebSearch": "web_search", "WebFetch": "web_fetch",
}  # fmt: skip
"""Tool names of the vendor's agent → neutral names."""

CAPABILITIES: Final = Manifest({
    "streaming": NATIVE,
    "tool_read": NATIVE, "tool_write": NATIVE, "tool_edit": NATIVE, "tool_bash": NATIVE,
    "tool_glob": NATIVE, "tool_grep": NATIVE, "tool_web_search": NATIVE, "tool_web_fetch": NATIVE,
    "structured_output_json_schema": NATIVE,
    "hooks_pre_tool_use": NATIVE, "hooks_post_tool_use": NATIVE,
    "mcp_client": NATIVE, "mcp_server": UNSUPPORTED, "checkpointing": EMULATED,
})  # fmt: skip

DEFAULTS: Final[dict[str, Json]] = {"model": "claude-sonnet-5-5", "max_tokens": 4096}

STOPS: Final[dict[str, ir.Stop]] = {
    "end_turn": "end", "max_tokens": "max_tokens", "stop_sequence": "stop_sequence", "tool_use": "tool_use",
    "pause_turn": "pause", "refusal": "refusal", "model_context_window_exceeded": "max_tokens",
}  # fmt: skip

STOP_WORDS: Final[dict[ir.Stop | None, str]] = {
    "end": "end_turn", "max_tokens": "max_tokens", "stop_sequence": "stop_sequence", "tool_use": "tool_use",
    "pause": "pause_turn", "refusal": "refusal", "content_filter": "refusal",
    # These answers may be incomplete, so they must not end with `end_turn`.
    None: "max_tokens", "error": "refusal", "cancelled": "max_tokens", "other": "max_tokens",
}  # fmt: skip

ENDINGS: Final = Endings(STOPS, STOP_WORDS)

LIMITS: Final = ServerLimits(
    call_id=Spelling("[a-zA-Z0-9_-]"), tool_name=Spelling("[a-zA-Z0-9_-]", 128), takes_empty_text=False,
    takes_refusals=False, ends_refused=True, takes_text_documents=True, takes_objects=True, needs_user=True,
)  # fmt: skip
"""Limits of ids, names and texts, which must not be empty (docs.anthropic.com, messages, read 2026-11)."""

MAX_TOKENS_MADE: Final = 4096
"""Token limit to write if the source has none, because the server requires one; every model allows this much."""
THINKING_TOKENS_MIN: Final = 1024
"""Minimum tokens of a thinking budget, which must also be below the answer's limit (docs.anthropic.com, 2026-11)."""
TOP_P_MIN: Final = 0.95
"""Minimum `top_p` in a request with thinking (docs.anthropic.com, 2026-11)."""

EFFORTS: Final = frozenset({"low", "medium", "high", "xhigh", "max"})
CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
MEDIA: Final[MediaTable] = {
    "image/data": frozenset({"image/jpeg", "image/png", "image/gif", "image/webp", None}), "image/url": None,
    "document/data": frozenset({"application/pdf", None}), "document/url": None, "document/text": None,
}  # fmt: skip
SOURCES: Final[dict[str, tuple[str, str]]] = {
    "base64": ("data", "data"), "url": ("url", "url"), "file": ("file_id", "file_id"), "text": ("data", "text"),
}  # fmt: skip
"""Kind of a source → its member with the content, and the field of `ir.Media` for it."""


SAME: Final[dict[str, tuple[type[Any], ...]]] = {
    "max_tokens": (int,), "temperature": NUMBER, "top_p": NUMBER, "top_k": (int,), "stop_sequences": (list,),
    "stream": (bool,), "service_tier": (str,), "metadata/user_id": (str,), "output_config/effort": (str,),
}  # fmt: skip
"""Path of a member whose value is the same in the neutral form → types of the value."""
NAMES: Final = {
    "stop_sequences": "stop", "metadata/user_id": "user", "output_config/effort": "reasoning_effort",
}  # fmt: skip
"""Path of a member → its option, where their names differ."""
BOUNDS: Final[dict[str, tuple[Any, Any]]] = {"max_tokens": (1, None), "temperature": (0, 1), "top_k": (0, None)}
"""Member → least and greatest value that the server accepts; None for no limit."""
KNOWN: Final = {"service_tier": frozenset({"auto", "standard_only"})}
ROLES: Final[dict[str, ir.Role]] = {"user": "user", "assistant": "assistant", "system": "system"}
BUDGETS: Final = {"disabled": 0, "adaptive": -1}
ERROR: Final[dict[str, Json]] = {"type": "api_error"}
ERROR_HEAD: Final[dict[str, Json]] = {"type": "error"}


# Blocks ---------------------------------------------------------------------------------------------------------------


def read_block(value: Json, at: str) -> ir.Part:
    """Read a block; calls of tools that the vendor runs, and their results, stay native."""
    part = read_part(NAME, value, at, _read_block)
    if not isinstance(part, ir.NativePart):
        return part
    is_tool = part.label.endswith(("tool_use", "tool_result"))
    label = str(value.get("name") or part.label) if is_tool else part.label
    return msgspec.structs.replace(part, label=label, is_tool=is_tool, is_bound=part.label == "container_upload")


def _read_block(kind: str, rest: dict[str, Any], at: str) -> ir.Part | None:
    match kind:
        case "text" if (text := pop(rest, "text")) is not None:
            return ir.Text(text=text, citations=_read_citations(rest, at))
        case "thinking" if (text := pop(rest, "thinking")) is not None:
            return ir.Thinking(text=text, signature=pop(rest, "signature"))
        case "redacted_thinking" if (data := pop(rest, "data")) is not None:
            return ir.Thinking(text="", redacted=data)
        case "tool_use" if type(rest.get("id")) is str and type(rest.get("name")) is str and "input" in rest:
            return ir.ToolUse(id=rest.pop("id"), name=rest.pop("name"), input=rest.pop("input"))
        case "tool_result" if (call_id := pop(rest, "tool_use_id")) is not None:
            content = read_content(rest, "content", at, read_block)
            return ir.ToolOutput(id=call_id, content=content, is_error=pop(rest, "is_error", bool))
        case "image" | "document" if (found := _read_source(rest)) is not None:
            title = pop(rest, "title") if kind == "document" else None
            return ir.Media(kind="image" if kind == "image" else "document", title=title, **found)
        case "search_result" if (text := _joined_texts(rest.get("content"))) is not None:
            rest["type"] = kind  # All members stay native, so that the block can be written again.
            return ir.Media(kind="document", title=pop(rest, "title"), text=text, media_type="text/plain")
    return None


def _read_citations(rest: dict[str, Any], at: str) -> tuple[ir.Citation, ...]:
    found = rest.get("citations")
    if type(found) is not list or not found or not all(type(one) is dict for one in found):
        return ()
    del rest["citations"]
    return tuple(read_citation(one, f"{at}/citations/{place}") for place, one in enumerate(found))


def read_citation(value: dict[str, Any], at: str) -> ir.Citation:
    """Read a citation; its positions stay native, because they are in the cited document, not in the text."""
    rest = value.copy()
    kind, url, title, quote = (pop(rest, name) for name in ("type", "url", "title", "cited_text"))
    return ir.Citation(kind=kind or "", url=url, title=title, quote=quote, at=at, ext=ext_of(NAME, rest))


def _read_source(rest: dict[str, Any]) -> dict[str, Any] | None:
    """Remove the source of an image or document; return it as fields of `ir.Media`, or None if its kind is unknown."""
    source = pop_inner(rest, "source")
    form = str(source.get("type"))
    if form == "content" and (text := _joined_texts(source.get("content"))) is not None:
        return {"text": text, "media_type": "text/plain"}  # The blocks stay native, so that they can be written again.
    member, field = SOURCES.get(form, ("", ""))
    if type(source.get(member)) is not str:
        return None
    del source["type"]
    found = {field: source.pop(member), "media_type": pop(source, "media_type")}
    put_back(rest, "source", source)
    return found


def _joined_texts(blocks: Json) -> str | None:
    """Return the joined text of a list of text blocks; None if the list is empty or has any other block or member."""
    if type(blocks) is not list or not blocks or not all(
        kind_of(one) == "text" and one.keys() == {"type", "text"} and type(one["text"]) is str for one in blocks
    ):  # fmt: skip
        return None
    return "\n\n".join(one["text"] for one in blocks)


def write_block(part: ir.Part, notes: LossLedger) -> Json:
    """Write a block; if the vendor has no such block, note a loss and return None."""
    return write_part(part, notes, _write_block)


def _write_block(part: ir.Part, notes: LossLedger) -> dict[str, Any] | None:
    home = notes.is_home
    out: dict[str, Any]
    match part:
        case ir.Text():
            cited = [_write_citation(one) for one in part.citations if home or NAME in one.ext]
            out = {"type": "text", "text": part.text, "citations": cited or None}
        case ir.Thinking() if home and part.redacted is not None:
            out = {"type": "redacted_thinking", "data": part.redacted}
        case ir.Thinking() if home:
            out = {"type": "thinking", "thinking": part.text, "signature": part.signature}
        case ir.Thinking() if notes.is_answer and part.redacted is None:
            notes.degrade(
                part.at, "thinking", "thinking without this vendor's signature; it takes it back only as text"
            )
            out = {"type": "thinking", "thinking": part.text, "signature": ""}
        case ir.ToolUse():
            out = {"type": "tool_use", "id": part.id, "name": part.name, "input": part.input}
        case ir.ToolOutput():
            content = write_said(part.content, notes) if part.content else None
            out = {"type": "tool_result", "tool_use_id": part.id, "is_error": part.is_error, "content": content}
        case ir.Media() if home and _is_in_blocks(part):
            out = {"type": part.ext[NAME].get("type", "document"), "title": part.title}
        case ir.Media() if takes(part, {} if notes.is_answer else MEDIA, notes) and (source := _write_source(part)):
            title = part.title if part.title is not None or home else part.name
            out = {"type": part.kind, "source": source, "title": title if part.kind == "document" else None}
        case _:
            return None
    out = {name: value for name, value in out.items() if value is not None or name == "input"}
    if part.cache is not None:
        out["cache_control"] = _write_cache(part.cache, home)
    return out


def _is_in_blocks(part: ir.Media) -> bool:
    """Return whether a document's text is still the text of the native blocks from which it was read."""
    own = part.ext.get(NAME, {})
    source = own.get("source")
    blocks = own.get("content", source.get("content") if type(source) is dict else None)
    return part.text is not None and part.text == _joined_texts(blocks)


def _write_cache(cache: dict[str, Any], home: bool) -> dict[str, Any]:
    return {"type": "ephemeral", **(cache if home or cache.get("ttl") in (None, "5m", "1h") else {})}


def _write_citation(one: ir.Citation) -> Json:
    out = without_none({"type": one.kind or None, "url": one.url, "title": one.title, "cited_text": one.quote})
    return merged(out, one.ext.get(NAME, {}))


def _write_source(part: ir.Media) -> Json:
    """Write the source of an image or document; None if the vendor has no such block."""
    form = next((form for form, (_, field) in SOURCES.items() if getattr(part, field) is not None), "")
    if not form or part.kind not in ("image", "document"):
        return None
    types = {"base64": "image/png" if part.kind == "image" else "application/pdf", "text": "text/plain"}
    member, field = SOURCES[form]
    return without_none({"type": form, member: getattr(part, field), "media_type": part.media_type or types.get(form)})


def write_said(parts: Iterable[ir.Part], notes: LossLedger) -> Json:
    """Write blocks as a `content`: a text if there is a single text block, else a list."""
    return write_content(parts, partial(write_block, notes=notes))


# Requests -------------------------------------------------------------------------------------------------------------


def read_request(document: Json) -> ir.Conversation:
    """Read a Messages request as a conversation."""
    rest = members_of(document)
    messages = [_read_message(one, f"/messages/{place}") for place, one in enumerate(pop_list(rest, "messages"))]
    if parts := read_content(rest, "system", "", read_block):
        messages.insert(0, ir.Message(role="system", parts=parts, at="/system"))
    options = OptionsRead(rest, SAME, NAMES)
    _read_options(rest, options)
    return conversation_of(NAME, rest, messages, options, lambda tool, at: [read_tool(tool, at)])


def _read_message(value: Json, at: str) -> ir.Message:
    rest = members_of(value, at)
    role = ROLES.get(pop(rest, "role") or "", "user")
    return ir.Message(role=role, parts=read_content(rest, "content", at, read_block), at=at, ext=ext_of(NAME, rest))


def read_tool(value: Json, at: str) -> ir.ToolSpec:
    """Read a tool definition; a tool that is no function is run by the vendor."""
    rest = value.copy() if type(value) is dict else {}
    is_function = rest.get("type") in (None, "custom")
    return (tool_of(NAME, rest, at, schema="input_schema") if is_function else None) or server_tool(value, at)


def _read_options(rest: dict[str, Any], options: OptionsRead) -> None:
    choice, thinking = pop_inner(rest, "tool_choice"), pop_inner(rest, "thinking")
    match pop_inner(rest, "output_config").get("format"):
        case {"type": "json_schema", "schema": dict(schema), **other} if not other:
            options.add("response_format", {"type": "schema", "schema": schema}, "/output_config/format")
            pop_at(rest, "output_config/format", dict)
    if choice.get("type") in (*CHOICES, "tool"):
        apart = pop(choice, "disable_parallel_tool_use", bool)
        options.add(
            "parallel_tool_calls", None if apart is None else not apart, "/tool_choice/disable_parallel_tool_use"
        )
    match choice:
        case {"type": "tool", "name": str(name)} if len(choice) == 2:
            options.add("tool_choice", {"mode": "tool", "name": name}, "/tool_choice")
            choice.clear()
        case {"type": "auto" | "any" | "none" as word} if len(choice) == 1:
            options.add("tool_choice", {"mode": CHOICES[word]}, "/tool_choice")
            choice.clear()
    kind = thinking.get("type")
    budget = pop(thinking, "budget_tokens", int) if kind == "enabled" else BUDGETS.get(str(kind))
    if budget is not None:
        del thinking["type"]
        options.add("reasoning_budget", budget, "/thinking")
    put_back(rest, "tool_choice", choice)
    put_back(rest, "thinking", thinking)


def write_request(conversation: ir.Conversation, notes: LossLedger) -> dict[str, Any]:
    """Write a conversation as a Messages request, and note the losses."""
    out = head_of(conversation, notes)
    system, others = outside(conversation.messages, notes, lambda message: message.at.startswith("/messages/"))
    if system is not None:
        out["system"] = write_said(system.parts, notes)
    written = [_write_message(message, notes) for message in others]
    out["messages"] = [message for message in written if message is not None]
    if conversation.tools:
        out["tools"] = [write_tool(tool, notes) for tool in conversation.tools]
    _write_options(conversation, out, notes)
    if notes.is_home:
        return notes.own(out, conversation)
    out.setdefault("max_tokens", MAX_TOKENS_MADE)
    _fit_thinking(out, conversation, notes)
    return out


def _write_message(message: ir.Message, notes: LossLedger) -> Json:
    role = "user" if message.role == "tool" else message.role
    out: dict[str, Any] = {"role": role, "content": write_said(message.parts, notes)}
    if out["content"] == [] and not notes.is_home:
        notes.drop(message.at, "part", "a message without content is refused here")
        return None
    return notes.own(out, message)


def write_tool(tool: ir.ToolSpec, notes: LossLedger) -> Json:
    """Write a tool definition; a tool that the vendor runs is written as it was read."""
    if tool.kind == "server":
        return tool.payload
    schema = tool.schema
    if schema is None and not notes.is_home:
        notes.synthesise(tool.at, "required", "a tool has a schema here")
        schema = {"type": "object", "properties": {}}
    cache = None if tool.cache is None else _write_cache(tool.cache, notes.is_home)
    body = {"name": tool.name, "description": tool.description, "input_schema": schema, "strict": tool.strict}
    return notes.own(without_none({**body, "cache_control": cache}), tool)


def _write_options(conversation: ir.Conversation, out: dict[str, Any], notes: LossLedger) -> None:
    home, left = notes.is_home, dict(conversation.options)
    _write_thinking(left, out, notes)
    out |= write_options(left, SAME, notes, NAMES, BOUNDS, KNOWN)
    _write_format(left.pop("response_format", None), out, notes)
    choice, parallel = left.pop("tool_choice", None), left.pop("parallel_tool_calls", None)
    if choice is not None:
        words = {mode: word for word, mode in CHOICES.items()}
        by_name = {"type": "tool", "name": choice.get("name")}
        out["tool_choice"] = by_name if choice["mode"] == "tool" else {"type": words[choice["mode"]]}
    is_said = (choice is not None and choice["mode"] != "none") or (choice is None and not parallel)
    if parallel is not None and (home or is_said):
        head = out.get("tool_choice", {} if home else {"type": "auto"})
        out["tool_choice"] = {**head, "disable_parallel_tool_use": not parallel}
    notes.lose_options(left)


def _write_thinking(left: dict[str, Any], out: dict[str, Any], notes: LossLedger) -> None:
    """Write the thinking budget into `out`; change an effort in `left` that the server does not accept."""
    effort, budget = left.get("reasoning_effort"), left.pop("reasoning_budget", None)
    if effort == "none" and not notes.is_home:
        notes.change_option("reasoning_effort", effort, "no effort became no thinking")
        del left["reasoning_effort"]
        budget = 0 if budget is None else budget
    elif effort is not None and effort not in EFFORTS and not notes.is_home:
        notes.change_option("reasoning_effort", effort, "the least effort here is low")
        left["reasoning_effort"] = "low"
    if budget is None:
        return
    if budget <= 0:
        out["thinking"] = {"type": "adaptive" if budget else "disabled"}
        return
    budget = notes.bounded("reasoning_budget", budget, THINKING_TOKENS_MIN)
    out["thinking"] = {"type": "enabled", "budget_tokens": budget}


def _write_format(form: Any, out: dict[str, Any], notes: LossLedger) -> None:
    if form is None or form["type"] == "text":
        return  # text is the default
    if form["type"] == "schema" and type(form.get("schema")) is dict:
        put_at(out, "output_config/format", {"type": "json_schema", "schema": form["schema"]})
    else:
        notes.lose_option("response_format", form, "JSON without a schema cannot be asked for here")


def _fit_thinking(out: dict[str, Any], conversation: ir.Conversation, notes: LossLedger) -> None:
    """Remove thinking if the server would refuse it, else change or remove options that are refused with it."""
    thinking: Any = out.get("thinking")
    if kind_of(thinking) not in ("enabled", "adaptive") or "reasoning_budget" not in conversation.options:
        return
    budget = thinking.get("budget_tokens")
    is_forced = kind_of(out.get("tool_choice")) in ("any", "tool")
    if is_forced or (budget is not None and out["max_tokens"] <= THINKING_TOKENS_MIN):
        del out["thinking"]
        why = "a tool is forced" if is_forced else f"the limit is {out['max_tokens']} tokens"
        notes.lose_option("reasoning_budget", budget, f"no thinking here where {why}")
        return
    if budget is not None and budget >= out["max_tokens"]:
        thinking["budget_tokens"] = out["max_tokens"] - 1
        notes.change_option("reasoning_budget", budget, "thinking must take less than the limit of the answer here")
    for name in ("temperature", "top_k"):
        if name in out and out[name] != 1:
            notes.lose_option(name, out[name], f"{name} is refused beside thinking")
        out.pop(name, None)
    if "top_p" in out:
        out["top_p"] = notes.bounded("top_p", out["top_p"], TOP_P_MIN)


# Answers --------------------------------------------------------------------------------------------------------------


USAGE: Final = Counters({
    "input_tokens": "input", "cache_read_input_tokens": "cache_read", "cache_creation_input_tokens": "cache_write",
    "output_tokens": "output", "output_tokens_details/thinking_tokens": "reasoning",
}, total="", needed=("input", "output"), apart={"input": ("cache_read", "cache_write")})  # fmt: skip


def read_answer(document: Json) -> ir.Answer:
    """Read a Messages response as an answer."""
    rest = members_of(document)
    if (failed := read_error(document, rest, "content", NAME)) is not None:
        return failed
    parts = tuple(read_block(block, f"/content/{place}") for place, block in enumerate(pop_list(rest, "content")))
    raw, sequence = pop(rest, "stop_reason"), pop(rest, "stop_sequence")
    candidate = ir.Candidate(
        message=ir.Message(role="assistant", parts=parts), stop=ENDINGS.read(raw, parts), stop_raw=raw,
        stop_sequence=sequence, stop_at="/stop_reason",
    )  # fmt: skip
    return answer_of(NAME, rest, (candidate,), USAGE)


def write_answer(answer: ir.Answer, notes: LossLedger) -> dict[str, Any]:
    """Write an answer as a Messages response, and note the losses."""
    out = without_none({"id": answer.id, "model": answer.model})
    out |= {"type": "message", "role": "assistant", "content": [], "stop_sequence": None}
    for candidate in answer.candidates[:1]:
        parts = candidate.message.parts
        if not notes.is_home:  # Clients send the answer back, and the server refuses empty texts.
            parts = tuple(part for part in parts if not (isinstance(part, ir.Text) and not part.text))
        out["content"] = write_parts(parts, partial(write_block, notes=notes))
        out["stop_reason"] = ENDINGS.write(candidate, notes)
        out["stop_sequence"] = candidate.stop_sequence
        notes.own(notes.own(out, candidate.message), candidate)
    notes.lose_candidates(answer)
    if answer.usage is not None:
        out["usage"] = USAGE.write(answer.usage, notes)
    if notes.is_home:
        return notes.own(out, answer)
    made = {"id": "msg_translated", "model": "unknown", "stop_reason": STOP_WORDS[None],
            "usage": {"input_tokens": 0, "output_tokens": 0}}  # fmt: skip
    return {**made, **without_none(out), "stop_sequence": out["stop_sequence"]}


# Streams --------------------------------------------------------------------------------------------------------------

DELTAS: Final = {"text_delta": "text", "thinking_delta": "thinking"}
"""Kind of a delta → the name of the member with its text, which is also the kind of its block."""


class StreamReader(BlockReader):
    """Reads the chunks of one Messages stream; counters in `message_delta` replace earlier ones."""

    def __init__(self, dialect: Any) -> None:
        super().__init__(dialect)
        self.usage: dict[str, Any] = {}
        self.handlers = {
            "content_block_delta": self._delta, "content_block_start": self._start,
            "content_block_stop": lambda chunk: self._stop(chunk.get("index")), "message_start": self._begin,
            "message_delta": self._beside, "message_stop": lambda chunk: self.finish(), "message": self._whole,
        }  # fmt: skip

    def other(self, chunk: Json) -> list[ir.StreamEvent]:
        """Read a failure; keep pings and events of a later version unchanged."""
        kind = kind_of(chunk)
        if kind == "error" or (type(chunk) is dict and "error" in chunk):
            return [failure(chunk.get("error"), chunk, "type")]
        return [ir.Kept(chunk, kind == "ping" or type(chunk) is not dict)]

    def _whole(self, chunk: Json) -> list[ir.StreamEvent]:
        self.ended = True
        return whole_events(self.dialect.read_answer(chunk))

    def _begin(self, chunk: Json) -> list[ir.StreamEvent]:
        message = chunk.get("message")
        if type(message) is not dict:
            return [ir.Kept(chunk, False)]
        rest = message.copy()
        answer_id, model = pop(rest, "id"), pop(rest, "model")
        for key in ("type", "role", "usage", "content", "stop_reason", "stop_sequence"):
            rest.pop(key, None)
        out: list[ir.StreamEvent] = [ir.Began(id=answer_id, model=model, at="/message", ext=ext_of(NAME, rest))]
        out += self._count(message.get("usage"))
        # If a program called tools, the first event of the continued answer has the earlier blocks.
        content = message.get("content")
        for index, block in enumerate(content if type(content) is list else ()):
            out += [*self._start({"index": index, "content_block": block}), *self._stop(index)]
        return out + self._end(message)

    def _count(self, usage: Json) -> list[ir.StreamEvent]:
        if type(usage) is not dict:
            return []
        # A counter that is missing or null in a later event keeps its value.
        self.usage.update({key: value for key, value in usage.items() if value is not None or key not in self.usage})
        return self.count(self.usage, "/usage")

    def _start(self, chunk: Json) -> list[ir.StreamEvent]:
        index, block = chunk.get("index"), chunk.get("content_block")
        if type(index) is not int or type(block) is not dict:
            return [ir.Kept(chunk, False)]
        part = read_block(block, f"/content/{index}")
        if isinstance(part, ir.ToolUse) and part.input == {}:
            part = msgspec.structs.replace(part, text="")
        elif isinstance(part, ir.Thinking) and part.signature == "":
            part = msgspec.structs.replace(part, signature=None)
        # Some gateways send index 0 for every block, so an open block with this index ends.
        return [*self._stop(index), *self.begin(index, part)]

    def _delta(self, chunk: Json) -> list[ir.StreamEvent]:
        index, delta = chunk.get("index"), chunk.get("delta")
        if type(index) is not int or type(delta) is not dict:
            return [ir.Kept(chunk, False)]
        kind = kind_of(delta) or ""
        out: list[ir.StreamEvent] = []
        if kind in DELTAS:
            member = DELTAS[kind]
            if index not in self.open:  # some gateways omit the start of a block
                out = self._start({"index": index, "content_block": {"type": member, member: ""}})
            out.append(self.more(index, _text(delta, member)))
        elif index not in self.open:
            out = [ir.Kept(chunk, False)]
        elif kind == "input_json_delta":
            if text := _text(delta, "partial_json"):
                out.append(self.more(index, text, "arguments"))
        elif kind == "signature_delta":
            out.append(self.more(index, _text(delta, "signature"), "signature"))
        elif kind == "citations_delta" and type(delta.get("citation")) is dict:
            found = read_citation(delta["citation"], f"/content/{index}/citations")
            out.append(self.more(index, "", "citation", found))
        else:
            out.append(ir.Kept(chunk, False))
        return out

    def _stop(self, index: Any) -> list[ir.StreamEvent]:
        if type(index) is not int:
            return []
        block, part = self.open.get(index), None
        if block is not None and block.texts and isinstance(block.part, ir.NativePart):
            # For tools that the vendor runs, the input is part of the native block.
            text = "".join(block.texts)
            value = parse_json(text)
            native = {**block.part.payload, "input": text if value is None else value}
            part = read_block(native, f"/content/{index}")
        return self.end(index, part)

    def _beside(self, chunk: Json) -> list[ir.StreamEvent]:
        found = chunk.get("delta")
        delta: dict[str, Any] = found if type(found) is dict else {}
        out: list[ir.StreamEvent] = [
            ir.Noted(key, value) for key, value in delta.items() if key not in ("stop_reason", "stop_sequence")
        ]
        out += [ir.Noted(key, value) for key, value in chunk.items() if key not in ("type", "delta", "usage")]
        return out + self._count(chunk.get("usage")) + self._end(delta)

    def _end(self, holder: dict[str, Any]) -> list[ir.StreamEvent]:
        sequence = holder.get("stop_sequence")
        return self.stop(holder.get("stop_reason"), "/stop_reason", sequence if type(sequence) is str else None)


def _text(delta: dict[str, Any], key: str) -> str:
    value = delta.get(key)
    return value if type(value) is str else ""


class StreamWriter(BlockWriter):
    """Writes one stream as the vendor's chunks."""

    is_serial = True
    has_refusals = False
    takes_objects = True

    def __init__(self, dialect: Any, source: str) -> None:
        super().__init__(dialect, source)
        self.next_index = 0

    def head(self) -> list[Json]:
        began = self.sum.began
        return [{"type": "message_start", "message": {
            "id": began.id or "msg_translated", "type": "message", "role": "assistant",
            "model": began.model or "unknown", "content": [], "stop_reason": None, "stop_sequence": None,
            "usage": self._usage(),
        }}]  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        return self.counted() or {"input_tokens": 0, "output_tokens": 0}

    def begin(self, key: Key, part: ir.Part) -> list[Json] | None:
        block: Json
        if isinstance(part, ir.ToolUse):
            block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
        elif isinstance(part, ir.Text | ir.Refusal):
            block = {"type": "text", "text": ""}
        elif isinstance(part, ir.Thinking):
            block = {"type": "thinking", "thinking": "", "signature": ""}
            self.ledger.degrade(part.at, "thinking", "thinking without this vendor's signature")
        else:
            return None
        place = self.opened[key] = self.next_index
        self.next_index += 1
        return [{"type": "content_block_start", "index": place, "content_block": block}]

    def _delta(self, key: Key, kind: str, member: str, value: Json) -> list[Json]:
        delta = {"type": kind, member: value}
        return [{"type": "content_block_delta", "index": self.opened[key], "delta": delta}]

    def piece(self, key: Key, text: str, part: ir.Part) -> list[Json]:
        if isinstance(part, ir.ToolUse):
            return self._delta(key, "input_json_delta", "partial_json", text)
        if isinstance(part, ir.Thinking):
            return self._delta(key, "thinking_delta", "thinking", text)
        return self._delta(key, "text_delta", "text", text)

    def close(self, key: Key, part: ir.Part) -> list[Json]:
        return [{"type": "content_block_stop", "index": self.opened[key]}]

    def end(self) -> list[Json]:
        stopped = self.sum.stops.get(0)
        delta = {"stop_reason": self.words.get(0), "stop_sequence": None if stopped is None else stopped.sequence}
        return [*self.fail_cut(), {"type": "message_delta", "delta": delta, "usage": self._usage()},
                {"type": "message_stop"}]  # fmt: skip


DIALECT: Final = Dialect(
    NAME=NAME, TOOL_NAMES=TOOL_NAMES, CAPABILITIES=CAPABILITIES, DEFAULTS=DEFAULTS, read_request=read_request,
    write_request=write_request, read_answer=read_answer, write_answer=write_answer, read_stream=StreamReader,
    write_stream=StreamWriter, event_name=type_name, usage=USAGE, endings=ENDINGS, error=ERROR, error_head=ERROR_HEAD,
    limits=LIMITS,
)  # fmt: skip
