"""Anthropic's Messages, as its reference describes it (docs.anthropic.com, read November 2026).

Messages hold typed blocks; the system text stands outside, results stand in the user's messages. Streams are blocks one
after the other, each with its start and its end.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.capability import EMULATED, NATIVE, UNSUPPORTED, Manifest
from backplane.dialects import ir
from backplane.dialects.codec import (
    ANY,
    NUMBER,
    Block,
    Blocks,
    Calls,
    Citations,
    Counters,
    Form,
    Hole,
    LossLedger,
    Members,
    OptionDraft,
    RequestOption,
    Tools,
    Turns,
    kind_of,
    parse_json,
)
from backplane.dialects.limits import ServerLimits, Spelling
from backplane.dialects.outcome import Endings
from backplane.dialects.streams import BlockReader, BlockWriter, Key, failure, whole_events
from backplane.dialects.vendor import Dialect, outside, type_name

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

TOOL: Final = {"name": "name", "description": "description", "schema": "input_schema", "strict": "strict"}
"""Field of a tool → its member."""

LIMITS: Final = ServerLimits(
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


CITATIONS: Final = Citations(NAME, "citations", {"type": "kind", "url": "url", "title": "title", "cited_text": "quote"})
"""The span counts in the document cited, so it stays native; another vendor's citation has not this one's index."""


def _write_thinking(part: ir.Thinking, out: dict[str, Any], ledger: LossLedger) -> bool:
    if not (ledger.is_home or ledger.is_answer):
        return False  # only its own vendor takes its thinking back
    if not ledger.is_home:
        ledger.degrade(part.at, "thinking", "thinking without this vendor's signature; it takes it back only as text")
        out["signature"] = ""
    return True


def _take_input(members: Members, fields: dict[str, Any]) -> bool:
    if "input" in members.rest:  # null, of a gateway
        fields["input"] = members.rest.pop("input")
    return "input" in fields


def _read_source(members: Members, fields: dict[str, Any]) -> bool:
    form = members.take("source/type")
    if form == "content" and fields["kind"] == "document":
        return _read_texts(fields, members.take("source/content", list))
    member, field = SOURCES.get(str(form), ("", ""))
    fields[field] = members.take(f"source/{member}") if member else None
    fields["media_type"] = members.take("source/media_type")
    return bool(member) and fields[field] is not None


def _read_texts(fields: dict[str, Any], blocks: list[Json] | None) -> bool:
    """Read a document that stands in blocks of text as one text."""
    found = blocks or [None]
    if not all(kind_of(block) == "text" and set(block) == {"type", "text"} and type(block["text"]) is str
               for block in found):  # fmt: skip
        return False
    fields |= {"text": "\n\n".join(block["text"] for block in found), "media_type": "text/plain"}
    return True


def _write_media(part: ir.Media, out: dict[str, Any], ledger: LossLedger) -> bool:
    """Write where a picture or document comes from; False where this vendor takes nothing of the kind."""
    form = next((form for form, (_, field) in SOURCES.items() if getattr(part, field) is not None), "")
    media_type = part.media_type
    if not form or (form == "text" and part.kind == "image"):
        return False
    if not ledger.is_home:
        media_type = media_type or ("image/png" if part.kind == "image" else "application/pdf")
        is_known = media_type in IMAGE_TYPES if part.kind == "image" else media_type == "application/pdf"
        is_address = part.url is not None and part.url.startswith(("http:", "https:"))
        fits = {"base64": is_known, "url": is_address, "text": True, "file": False}[form]
        if not fits or ledger.is_answer:
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
    Block("text", ir.Text, {"text!": "text"}),
    Block("thinking", ir.Thinking, {"thinking!": "text", "signature": "signature"}, write=_write_thinking),
    Block("redacted_thinking", ir.Thinking, {"data!": "redacted"}, {"text": ""}, is_written=False),
    Block("tool_use", ir.ToolUse, {"id!": "id", "name!": "name", "input": "input"}, types={"input": ANY},
          read=_take_input),
    Block("tool_result", ir.ToolOutput, {"tool_use_id!": "id", "is_error": "is_error", "content": "content"},
          types={"is_error": (bool,)}),
    Block("image", ir.Media, {}, {"kind": "image"}, read=_read_source, write=_write_media),
    Block("document", ir.Media, {"title": "title"}, {"kind": "document"}, read=_read_source, write=_write_media),
    Block("search_result", ir.Media, {"title": "title"}, {"kind": "document"}, is_written=False,
          read=lambda members, fields: _read_texts(fields, members.take("content", list))),
), cache="cache_control", ttls=(None, "5m", "1h"), bound=frozenset({"container_upload"}), citations=CITATIONS,
    is_server_tool=lambda kind: kind.endswith(("tool_use", "tool_result")))  # fmt: skip


# Messages -------------------------------------------------------------------------------------------------------------


TURNS: Final = Turns(BLOCKS, {"user": "user", "assistant": "assistant", "system": "system"})


def read_messages(members: Members, calls: Calls) -> list[ir.Message]:
    """Take the system text and the messages of a request."""
    messages = [TURNS.read(message, f"/messages/{place}") for place, message in enumerate(members.need("messages"))]
    parts, flat = members.content("system", BLOCKS.read)
    return [*([ir.Message(role="system", parts=parts, flat=flat, at="/system")] if flat is not None else []), *messages]


def write_messages(conversation: ir.Conversation, out: dict[str, Any], ledger: LossLedger) -> None:
    """Write the messages and, outside of them, the system text."""
    system, others = outside(conversation.messages, ledger, lambda message: message.native_role == "system")
    if system is not None:
        out["system"] = BLOCKS.write_content(system.parts, system.flat, ledger)
    written = [_write_message(message, ledger) for message in others]
    out["messages"] = [message for message in written if message is not None]


def _write_message(message: ir.Message, ledger: LossLedger) -> Json:
    out: Any = TURNS.write(message, ledger)
    if not ledger.is_home and out["content"] == []:
        ledger.drop(message.at, "part", "a message without content is refused here")
        return None
    return out


# Requests -------------------------------------------------------------------------------------------------------------


def _read_parallel(members: Members) -> tuple[Any, str] | None:
    at = "tool_choice/disable_parallel_tool_use"
    if kind_of(members.rest.get("tool_choice")) not in CHOICES or (apart := members.take(at, bool)) is None:
        return None
    return not apart, f"/{at}"


def _write_parallel(value: Any, draft: OptionDraft) -> None:
    chosen = draft.conversation.options.get("tool_choice", {}).get("mode")
    if value and not draft.is_home and chosen is None:
        pass  # the rule here
    elif chosen == "none" and not draft.is_home:
        pass  # no calls are wanted at all
    else:
        head = {} if draft.is_home or "tool_choice" in draft.out else {"type": "auto"}
        draft.put("tool_choice", {**head, "disable_parallel_tool_use": not value})


def _read_thinking(members: Members) -> tuple[Any, str] | None:
    budgets = {"disabled": 0, "adaptive": -1}
    kind = members.look("thinking/type")
    budget = members.take("thinking/budget_tokens", int) if kind == "enabled" else budgets.get(str(kind))
    if budget is None:
        return None
    members.forget("thinking/type")
    return budget, "/thinking"


def _write_budget(value: Any, draft: OptionDraft) -> None:
    if value <= 0:
        draft.put("thinking", {"type": "adaptive" if value else "disabled"})
        return
    if not draft.is_home and value < THINKING_TOKENS_MIN:
        draft.degrade(f"thinking begins with {THINKING_TOKENS_MIN} tokens here", value)
        value = THINKING_TOKENS_MIN
    draft.put("thinking", {"type": "enabled", "budget_tokens": value})


def _write_effort(value: Any, draft: OptionDraft) -> None:
    if value == "none" and not draft.is_home:
        draft.degrade("no effort became no thinking", value)
        draft.put("thinking", {"type": "disabled"})
        return
    if not draft.is_home and value not in EFFORTS:
        draft.degrade("the nearest effort here is low", value)
        value = "low"
    draft.put("output_config/effort", value)


def _write_format(value: Any, draft: OptionDraft) -> None:
    if value["type"] == "schema" and type(value.get("schema")) is dict:
        draft.put("output_config/format", {"type": "json_schema", "schema": value["schema"]})
    elif value["type"] == "text":
        pass  # what the target gives anyway
    else:
        draft.drop("JSON without a schema cannot be asked for here", value, "option")


NAME_HOLE: Final = Hole("name")
SCHEMA: Final = Hole("schema", (dict,))
OPTIONS: Final = (
    RequestOption("max_tokens", "max_tokens", (int,), least=1),
    RequestOption("temperature", "temperature", NUMBER, least=0, most=1),
    RequestOption("top_p", "top_p", NUMBER),
    RequestOption("top_k", "top_k", (int,), least=0),
    RequestOption("stop_sequences", "stop", (list,)),
    RequestOption("stream", "stream", (bool,)),
    RequestOption("service_tier", "service_tier", known=frozenset({"auto", "standard_only"})),
    RequestOption("metadata/user_id", "user"),
    RequestOption("output_config/effort", "reasoning_effort", write=_write_effort),
    RequestOption("output_config/format", "response_format", write=_write_format, forms=(
        Form({"type": "json_schema", "schema": SCHEMA}, {"type": "schema", "schema": SCHEMA}),)),
    RequestOption("", "parallel_tool_calls", read=_read_parallel, write=_write_parallel),
    RequestOption("tool_choice", "tool_choice", forms=(
        *(Form({"type": word}, {"mode": mode}) for word, mode in CHOICES.items() if mode != "tool"),
        Form({"type": "tool", "name": NAME_HOLE}, {"mode": "tool", "name": NAME_HOLE}))),
    RequestOption("thinking", "reasoning_budget", read=_read_thinking, write=_write_budget),
)  # fmt: skip


def _fit_thinking(out: dict[str, Any], conversation: ir.Conversation, ledger: LossLedger) -> None:
    """Leave out what the server refuses beside thinking."""
    thinking: Any = out.get("thinking")
    if kind_of(thinking) not in ("enabled", "adaptive") or "reasoning_budget" not in conversation.options:
        return
    places = conversation.options_at
    budget, at = thinking.get("budget_tokens"), places.get("reasoning_budget", "/thinking")
    is_forced = kind_of(out.get("tool_choice")) in ("any", "tool")
    if is_forced or (budget is not None and out["max_tokens"] <= THINKING_TOKENS_MIN):
        del out["thinking"]
        why = "a tool is forced" if is_forced else f"the limit is {out['max_tokens']} tokens"
        ledger.drop(at, "option_value", f"no thinking here where {why}")
        return
    if budget is not None and budget >= out["max_tokens"]:
        thinking["budget_tokens"] = out["max_tokens"] - 1
        ledger.degrade(at, "option_value", "thinking must take less than the limit of the answer here", budget)
    for name in ("temperature", "top_k"):
        if name in out and out[name] != 1:
            ledger.drop(places.get(name, f"/{name}"), "option_value", f"{name} is refused beside thinking", out[name])
        out.pop(name, None)
    if out.get("top_p", 1) < TOP_P_MIN:
        at = places.get("top_p", "/top_p")
        ledger.degrade(at, "option_value", f"the least beside thinking is {TOP_P_MIN}", out["top_p"])
        out["top_p"] = TOP_P_MIN


def _with_schema(tool: ir.ToolSpec, out: dict[str, Any], ledger: LossLedger) -> ir.ToolSpec:
    if tool.schema is not None:
        return tool
    ledger.synthesise(tool.at, "required", "a tool has a schema here")
    return msgspec.structs.replace(tool, schema={"type": "object", "properties": {}})


TOOLS: Final = Tools(BLOCKS, TOOL, {"": "function", "custom": "function"}, write_more=_with_schema)


# Answers --------------------------------------------------------------------------------------------------------------


def read_candidates(members: Members, calls: Calls) -> tuple[ir.Candidate, ...]:
    """Take what an answer says and why it ended."""
    parts = tuple(BLOCKS.read(block, f"/content/{place}") for place, block in enumerate(members.need("content")))
    raw = members.take("stop_reason")
    return (ir.Candidate(
        message=ir.Message(role="assistant", parts=parts, flat=False), stop=ENDINGS.read(raw, parts), stop_raw=raw,
        stop_sequence=members.take("stop_sequence"), stop_at="/stop_reason",
    ),)  # fmt: skip


def write_candidates(answer: ir.Answer, out: dict[str, Any], ledger: LossLedger) -> None:
    """Write what an answer says and why it ended."""
    out["content"] = []
    for candidate in answer.candidates[:1]:
        out["content"] = BLOCKS.write_all(candidate.message.parts, ledger)
        if (word := ENDINGS.write(candidate, ledger)) is not None:
            out["stop_reason"] = word
        if candidate.stop_sequence is not None or not ledger.is_home:
            out["stop_sequence"] = candidate.stop_sequence
        ledger.put_ext(candidate.message, out)
        ledger.put_ext(candidate, out)


USAGE: Final = Counters({
    "input_tokens": "input", "cache_read_input_tokens": "cache_read", "cache_creation_input_tokens": "cache_write",
    "output_tokens": "output", "output_tokens_details/thinking_tokens": "reasoning",
}, total="", needed=("input", "output"), apart={"input": ("cache_read", "cache_write")})  # fmt: skip
PLACES: Final = {
    "id": "id", "model": "model", "usage": "usage", "cache": "cache_control", "signature": "signature",
    "title": "title", "parallel_tool_calls": "tool_choice",
}  # fmt: skip


# Streams --------------------------------------------------------------------------------------------------------------

DELTAS: Final = {"text_delta": "text", "thinking_delta": "thinking"}
"""Kind of a delta → its member, and the kind of its block."""


class StreamReader(BlockReader):
    """Reads the chunks of one stream; counters in `message_delta` replace earlier ones."""

    def __init__(self, dialect: Any) -> None:
        super().__init__(dialect)
        self.usage: dict[str, Any] = {}
        self.handlers = {
            "content_block_delta": self._delta, "content_block_start": self._start,
            "content_block_stop": lambda chunk: self._stop(chunk.get("index")), "message_start": self._begin,
            "message_delta": self._beside, "message_stop": lambda chunk: self.finish(), "message": self._whole,
        }  # fmt: skip

    def other(self, chunk: Json) -> list[ir.StreamEvent]:
        """Read a failure; pings and events of a later version are kept."""
        kind = kind_of(chunk)
        if kind == "error" or (type(chunk) is dict and "error" in chunk):
            return [failure(chunk.get("error"), chunk, "type")]
        return [ir.Kept(chunk, kind == "ping" or type(chunk) is not dict)]

    def _whole(self, chunk: Json) -> list[ir.StreamEvent]:
        self.ended = True
        return whole_events(self.dialect.read_answer(chunk, Calls()))

    def _begin(self, chunk: Json) -> list[ir.StreamEvent]:
        message = chunk.get("message")
        if type(message) is not dict:
            return [ir.Kept(chunk, False)]
        members = Members(message, "/message")
        answer_id, model = members.take("id"), members.take("model")
        for key in ("type", "role", "usage", "content", "stop_reason", "stop_sequence"):
            members.rest.pop(key, None)
        out: list[ir.StreamEvent] = [ir.Began(id=answer_id, model=model, at="/message", ext=members.ext(NAME))]
        out += self._count(message.get("usage"))
        # The continuation of a program's tool calls begins with the blocks that were made before.
        content = message.get("content")
        for index, block in enumerate(content if type(content) is list else ()):
            out += [*self._start({"index": index, "content_block": block}), *self._stop(index)]
        return out + self._end(message)

    def _count(self, usage: Json) -> list[ir.StreamEvent]:
        if type(usage) is not dict:
            return []
        # What a later event leaves out or gives as null was said before.
        self.usage.update({key: value for key, value in usage.items() if value is not None or key not in self.usage})
        return self.count(self.usage, "/usage")

    def _start(self, chunk: Json) -> list[ir.StreamEvent]:
        index, block = chunk.get("index"), chunk.get("content_block")
        if type(index) is not int or type(block) is not dict:
            return [ir.Kept(chunk, False)]
        part = BLOCKS.read(block, f"/content/{index}")
        if isinstance(part, ir.ToolUse) and part.input == {}:
            part = msgspec.structs.replace(part, text="")
        elif isinstance(part, ir.Thinking) and part.signature == "":
            part = msgspec.structs.replace(part, signature=None)
        # A gateway may count every block as the first.
        return [*self._stop(index), *self.begin(index, part)]

    def _delta(self, chunk: Json) -> list[ir.StreamEvent]:
        index, delta = chunk.get("index"), chunk.get("delta")
        if type(index) is not int or type(delta) is not dict:
            return [ir.Kept(chunk, False)]
        kind = kind_of(delta) or ""
        out: list[ir.StreamEvent] = []
        if kind in DELTAS:
            member = DELTAS[kind]
            if index not in self.open:  # a gateway that leaves out starts
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
            found = CITATIONS.read(delta["citation"], f"/content/{index}/citations")
            out.append(self.more(index, "", "citation", found))
        else:
            out.append(ir.Kept(chunk, False))
        return out

    def _stop(self, index: Any) -> list[ir.StreamEvent]:
        if type(index) is not int:
            return []
        block, part = self.open.get(index), None
        if block is not None and block.texts and isinstance(block.part, ir.ServerTool):
            # The input of the vendor's own tools is part of their native block.
            text = "".join(block.texts)
            value = parse_json(text)
            native = {**block.part.payload, "input": text if value is None else value}
            part = BLOCKS.read(native, f"/content/{index}")
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
    """Templates of the chunks."""

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
    NAME=NAME, TOOL_NAMES=TOOL_NAMES, CAPABILITIES=CAPABILITIES, DEFAULTS=DEFAULTS, options=OPTIONS,
    read_messages=read_messages, write_messages=write_messages, tools=TOOLS,
    required={"model": "unknown", "max_tokens": MAX_TOKENS_MADE}, finish=_fit_thinking,
    read_candidates=read_candidates, write_candidates=write_candidates, usage=USAGE, endings=ENDINGS, reply="content",
    answer_head={"type": "message", "role": "assistant"}, error={"type": "api_error"}, error_head={"type": "error"},
    answer_required={"id": "msg_translated", "model": "unknown", "stop_reason": STOP_WORDS[None],
                     "usage": {"input_tokens": 0, "output_tokens": 0}},
    read_stream=StreamReader, write_stream=StreamWriter, event_name=type_name, limits=LIMITS, places=PLACES,
)  # fmt: skip
