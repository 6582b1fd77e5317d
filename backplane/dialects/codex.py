"""OpenAI's Responses, which its agent Codex speaks (platform.openai.com, read November 2026).

A request and an answer are lists of items: messages, calls, results, reasoning. The assistant's items in a row are one
message here; what was read belongs to the item. In streams items begin and end, and their contents in them; the last
event repeats the whole answer and is the better truth, because gateways leave out indices, starts and ends.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.capability import EMULATED, NATIVE, UNSUPPORTED, Manifest
from backplane.dialects import ir
from backplane.dialects.chat import AUDIO_FORMATS, AUDIO_TYPES, ERROR
from backplane.dialects.codec import (
    REST,
    Block,
    Blocks,
    Citations,
    Form,
    Hole,
    Members,
    OptionDraft,
    RequestOption,
    Tools,
    effort_writer,
)
from backplane.dialects.common import EFFORT_BUDGETS, NUMBER, Calls, Counters, LossLedger, item_of, kind_of
from backplane.dialects.limits import ServerLimits, Spelling
from backplane.dialects.outcome import Endings
from backplane.dialects.streams import BlockReader, BlockWriter, Key, begun, failure, text_of
from backplane.dialects.vendor import TableDialect, type_name

NAME: Final = "codex"

TOOL_NAMES: Final[dict[str, str]] = {
    "shell": "bash", "shell_command": "bash", "exec_command": "bash", "local_shell": "bash",
    "apply_patch": "apply_patch", "read_file": "read_file", "list_dir": "list_files", "grep_files": "grep",
    "web_search": "web_search",
}  # fmt: skip
"""The names that the vendor's agent gives its tools → neutral names."""

CAPABILITIES: Final = Manifest({
    "streaming": NATIVE,
    "tool_read": NATIVE, "tool_write": NATIVE, "tool_edit": NATIVE, "tool_bash": NATIVE,
    "tool_glob": EMULATED, "tool_grep": EMULATED,
    "structured_output_json_schema": NATIVE,
    "hooks_pre_tool_use": EMULATED, "hooks_post_tool_use": EMULATED,
    "mcp_client": UNSUPPORTED, "mcp_server": UNSUPPORTED,
})  # fmt: skip

DEFAULTS: Final[dict[str, Json]] = {"model": "gpt-5.5", "max_tokens": 4096}

ROLES: Final[dict[str, ir.Role]] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
BOUND: Final = frozenset({"item_reference", "compaction", "compaction_trigger"})

STOPS: Final[dict[str, ir.Stop]] = {
    "completed": "end", "incomplete": "other", "incomplete:max_output_tokens": "max_tokens",
    "incomplete:content_filter": "content_filter", "failed": "error", "cancelled": "cancelled",
}  # fmt: skip

STOP_WORDS: Final[dict[ir.Stop | None, str]] = {
    "end": "completed", "tool_use": "completed", "stop_sequence": "completed",
    "max_tokens": "incomplete:max_output_tokens", "content_filter": "incomplete:content_filter",
    "refusal": "incomplete:content_filter", "error": "failed", "cancelled": "cancelled",
    # Never `completed`: the answer may not be whole.
    None: "incomplete", "pause": "incomplete", "other": "incomplete",
}  # fmt: skip

ENDINGS: Final = Endings(STOPS, STOP_WORDS, frozenset({"in_progress", "queued"}))

LIMITS: Final = ServerLimits(call_id=Spelling(most=64), tool_name=Spelling("[a-zA-Z0-9_-]", 64))
"""platform.openai.com, responses/create: names of tools and lengths of ids, read 2026-11."""


KINDS: Final = {"function": "function", "custom": "custom"}
"""Kinds of tools, at OpenAI."""

TOOL_HOLE: Final = Hole("name")
CUSTOM: Final = {"mode": "tool", "name": TOOL_HOLE, "kind": "custom"}
FUNCTION: Final = {"mode": "tool", "name": TOOL_HOLE}
CHOICES: Final = tuple(Form(word, {"mode": word}) for word in ("auto", "none", "required"))
NESTED: Final = (Form({"type": "custom", "custom": {"name": TOOL_HOLE}}, CUSTOM),
                 Form({"type": "function", "function": {"name": TOOL_HOLE}}, FUNCTION))  # fmt: skip
FLAT: Final = (
    Form({"type": "custom", "name": TOOL_HOLE}, CUSTOM),
    Form({"type": "function", "name": TOOL_HOLE}, FUNCTION),
)
"""Which tool the model has to call: a word, or a tool's name in or beside its kind."""

FORMATS: Final = Form({"type": "text"}, {"type": "text"}), Form({"type": "json_object"}, {"type": "json"})
BODY: Final = Hole("body", (dict,), ("name", "schema", "strict", "description"))
SCHEMA: Final = {"type": "schema", REST: BODY}
NAMED: Final = {"name": "answer"}
"""The form of an answer; a schema has a name at OpenAI."""


def write_metadata(value: Any, draft: OptionDraft) -> None:
    """Write the caller's labels, which are texts at OpenAI."""
    if draft.is_home or all(type(label) is str for label in value.values()):
        draft.put("metadata", value)
    else:
        draft.drop("labels are texts here", value)


METADATA: Final = RequestOption("metadata", "metadata", (dict,), write=write_metadata)


def read_audio(members: Members, fields: dict[str, Any]) -> bool:
    """Read the format of a sound, which is said by name."""
    form = fields.pop("media_type")
    fields["media_type"] = AUDIO_TYPES.get(form, f"audio/{form}")
    return True


def write_audio(part: ir.Media, out: dict[str, Any], ledger: LossLedger) -> bool:
    """Write the format of a sound by name; False where it has none here."""
    form = AUDIO_FORMATS.get(part.media_type or "audio/wav")
    if form is None and ledger.is_home:
        form = (part.media_type or "").partition("/")[2]
    out["input_audio"]["format"] = form
    return form is not None


# Blocks of a content list ---------------------------------------------------------------------------------------------


CITATIONS: Final = Citations(
    NAME, "annotations", {"type": "kind", "url": "url", "title": "title", "start_index": "start", "end_index": "end"},
    "url_citation",
)  # fmt: skip


def _is_one(members: Members, fields: dict[str, Any]) -> bool:
    return sum(fields.get(name) is not None for name in ("url", "data", "file_id")) == 1


def _write_image(part: ir.Media, out: dict[str, Any], ledger: LossLedger) -> bool:
    if not ledger.is_home:
        if ledger.source not in ("openai", "copilot"):
            out.pop("file_id", None)
        out.setdefault("detail", "auto")
    return "image_url" in out or "file_id" in out


def _write_file(part: ir.Media, out: dict[str, Any], ledger: LossLedger) -> bool:
    if part.data is None and not ledger.is_home and ledger.source not in ("openai", "copilot"):
        out.pop("file_id", None)
    if "filename" not in out and part.title is not None:
        out["filename"] = part.title
    return not {"file_data", "file_url", "file_id"}.isdisjoint(out)


def _blocks_of(text: str) -> Blocks:
    """Return the table of what is said to the model or by it, which have a word each for a text."""
    return Blocks(NAME, (
        *(Block(kind, ir.Text, {"text!": "text"}, is_written=kind == text)
          for kind in sorted(("input_text", "output_text", "text"), key=lambda kind: kind != text)),
        Block("refusal", ir.Refusal, {"refusal!": "text"}),
        Block("input_image", ir.Media, {"image_url": "address", "file_id": "file_id", "detail": "detail"},
              {"kind": "image"}, read=_is_one, write=_write_image, is_written=text == "input_text"),
        Block("input_file", ir.Media, {
            "file_data": "file", "file_url": "url", "file_id": "file_id", "filename": "name",
        }, {"kind": "document"}, read=_is_one, write=_write_file, is_written=text == "input_text"),
        Block("input_audio", ir.Media, {"input_audio/data!": "data", "input_audio/format!": "media_type"},
              {"kind": "audio"}, read=read_audio, write=write_audio, is_written=False),  # the types have no word for it
    ), text=text, citations=CITATIONS)  # fmt: skip


BLOCKS: Final = _blocks_of("input_text")
SAID_BLOCKS: Final = _blocks_of("output_text")


# Items ----------------------------------------------------------------------------------------------------------------


def _write_call(part: ir.ToolUse, out: dict[str, Any], ledger: LossLedger) -> bool:
    if ledger.is_answer and not ledger.is_home:
        out |= {"id": f"fc_{_word(part)}", "status": "incomplete" if part.is_cut else "completed"}
    return True


def _read_result(members: Members, fields: dict[str, Any]) -> bool:
    fields["content"], fields["flat"] = members.content("output", BLOCKS.read)
    return True


def _write_result(part: ir.ToolOutput, out: dict[str, Any], ledger: LossLedger) -> bool:
    is_text = len(part.content) <= 1 and all(isinstance(inner, ir.Text) for inner in part.content)
    is_list = part.flat is False and (ledger.is_home or not is_text)
    if is_list or any(isinstance(inner, ir.Media) and inner.text is None for inner in part.content):
        out["output"] = BLOCKS.write_all(part.content, ledger)
    else:
        out["output"] = ledger.plain_text(part.content)
    return True


def _read_reasoning(members: Members, fields: dict[str, Any]) -> bool:
    """Read thinking: its summary where there is one, else its text; the proof is what is encrypted."""
    fields["text"] = ""
    for key, name in (("summary", "summary_text"), ("content", "reasoning_text")):
        texts = _texts(members.rest.get(key), name)
        if any(texts) and "field" not in fields:
            fields |= {"text": "\n\n".join(texts), "field": key}
            del members.rest[key]
    return True


def _texts(value: Json, kind: str) -> list[str]:
    """Return the texts of a list that holds nothing else."""
    if type(value) is not list or not all(
        kind_of(part) == kind and set(part) == {"type", "text"} and type(part["text"]) is str for part in value
    ):
        return []
    return [part["text"] for part in value]


def _write_reasoning(part: ir.Thinking, out: dict[str, Any], ledger: LossLedger) -> bool:
    if not (ledger.is_answer or ledger.is_home):
        return False  # without the vendor's own proof it would be looked for among what it keeps
    key = part.field if ledger.is_home and part.field == "content" else "summary"
    kind = "summary_text" if key == "summary" else "reasoning_text"
    out[key] = [{"type": kind, "text": part.text}] if part.text else []
    if not ledger.is_home:
        ledger.degrade(part.at, "thinking", "thinking stands in a summary, without this vendor's proof")
        out.pop("encrypted_content", None)
        out["id"] = f"rs_{_word(part)}"
    return True


def _word(part: ir.Part) -> str:
    """Make an id of a block's place and text: one of its own for every item of a document."""
    text = f"{part.at} {getattr(part, 'text', '')}"
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=12).hexdigest()


ITEMS: Final = Blocks(NAME, (
    *(Block(f"{head}_call", ir.ToolUse, {"call_id!": "id", "name!": "name", member: "arguments"}, {"kind": kind},
            write=_write_call)
      for head, member, kind in (("function", "arguments", "function"), ("custom_tool", "input", "custom"))),
    Block("function_call_output", ir.ToolOutput, {"call_id!": "id"}, {"kind": "function"}, read=_read_result,
          write=_write_result),
    Block("custom_tool_call_output", ir.ToolOutput, {"call_id!": "id"}, {"kind": "custom"}, read=_read_result,
          write=_write_result),
    Block("reasoning", ir.Thinking, {"encrypted_content": "signature"}, read=_read_reasoning, write=_write_reasoning),
), bound=BOUND, is_server_tool=lambda kind: kind.endswith(
    ("_call", "_call_output", "_output", "mcp_list_tools", "program")))  # fmt: skip


def read_items(items: list[Json], base: str, start: int = 0, *, is_answer: bool = False) -> list[ir.Message]:
    """Read a list of items into messages; an assistant's items in a row are one message.

    Args:
        start: place of the first item in its list.
    """
    turns: list[ir.Message | tuple[str, list[ir.Part], list[Json]]] = []
    for place, item in enumerate(items, start):
        found = read_item(item, f"{base}/{place}", is_answer=is_answer)
        if isinstance(found, ir.Message):
            turns.append(found)
            continue
        if not turns or isinstance(turns[-1], ir.Message):
            turns.append((f"{base}/{place}", [], []))
        _, parts, raw = turns[-1]  # type: ignore[misc]
        parts += found
        raw.append(item)
    if is_answer and not turns:
        turns.append((base, [], []))
    return [
        turn if isinstance(turn, ir.Message) else ir.Message(
            role="assistant", parts=tuple(turn[1]), flat=_flat_of(turn[2]), at=turn[0])
        for turn in turns
    ]  # fmt: skip


def _flat_of(items: list[Json]) -> bool | None:
    """Return whether the messages among items are one text each; None where there is no message."""
    found = [type(item.get("content")) is str for item in items if type(item) is dict and "role" in item]
    return all(found) if found else None


def read_item(item: Json, at: str, *, is_answer: bool = False) -> ir.Message | list[ir.Part]:
    """Read one item: a message of its own, or parts of the assistant's turn."""
    kind = kind_of(item) if type(item) is not dict or "type" in item else "message"
    if kind == "message" and type(item.get("role")) is str:
        message = _read_message(item, at)
        if message.role != "assistant" and is_answer:
            return [ir.Opaque(dialect=NAME, label=f"item of {message.role}", payload=item, at=at)]
        return list(message.parts) if message.role == "assistant" else message
    part = ITEMS.read(item, at)
    return ir.Message(role="tool", parts=(part,), at=at) if isinstance(part, ir.ToolOutput) else [part]


def _read_message(item: dict[str, Any], at: str) -> ir.Message:
    """Read a message item; an assistant's keeps the item's own members on its first part."""
    members = Members(item, at)
    native_role = members.take("role") or ""
    members.skip("type", "message")
    role = ROLES.get(native_role, "user")
    parts, flat = members.content("content", BLOCKS.read)
    if role != "assistant":
        ext = members.ext(NAME)
        return ir.Message(role=role, parts=parts, native_role=native_role, flat=flat, at=at, ext=ext)
    if not parts:
        parts = (ir.Opaque(dialect=NAME, label="empty message", payload=item, at=at),)
    elif members.rest:
        mine = {f"../{key}": value for key, value in members.left().items()}
        parts = (msgspec.structs.replace(parts[0], ext={NAME: {**parts[0].ext.get(NAME, {}), **mine}}), *parts[1:])
    return ir.Message(role=role, parts=parts, at=at)


def write_items(messages: tuple[ir.Message, ...], ledger: LossLedger) -> list[Json]:
    """Write messages as items."""
    out: list[Json] = []
    for message in messages:
        out += write_turn(message, ledger) if message.role == "assistant" else _write_message(message, ledger)
    return out


def _write_message(message: ir.Message, ledger: LossLedger) -> list[Json]:
    results = [part for part in message.parts if isinstance(part, ir.ToolOutput)]
    others = [part for part in message.parts if not isinstance(part, ir.ToolOutput)]
    out = ITEMS.write_all(results, ledger)
    if results and not others:
        ledger.put_ext(message, out[0])
        return out
    native, role = message.native_role, "user" if message.role == "tool" else message.role
    is_own = native is not None and (ROLES.get(native) == message.role or (ledger.is_home and native not in ROLES))
    content = BLOCKS.write_content(others, message.flat, ledger)
    if content == [] and (message.flat is not False or not ledger.is_home):
        content = ""
    made: dict[str, Any] = {"type": "message", "role": native if is_own and not results else role, "content": content}
    ledger.put_ext(message, made)
    return [*out, made]


def write_turn(message: ir.Message, ledger: LossLedger) -> list[Json]:
    """Write the items of an assistant's turn; blocks that were said in a row are one message."""
    out: list[Json] = []
    said: list[ir.Part] = []
    for part in (*message.parts, None):
        is_said = isinstance(part, ir.Text | ir.Refusal | ir.Media) or (
            isinstance(part, ir.Opaque) and "/content/" in part.at
        )
        if said and not (is_said and (not ledger.is_home or item_of(said[0].at) == item_of(part.at))):  # type: ignore[union-attr]
            out += _write_said(said, message, ledger)
            said = []
        if is_said:
            said.append(part)  # type: ignore[arg-type]
        elif part is not None:
            out += ITEMS.write_all((part,), ledger)
    ledger.put_ext(message, {})
    return out


def _write_said(parts: list[ir.Part], message: ir.Message, ledger: LossLedger) -> list[Json]:
    content = SAID_BLOCKS.write_content(parts, False if ledger.is_answer else message.flat, ledger)
    out: dict[str, Any] = {"type": "message", "role": "assistant", "content": content}
    # A message that was read says how it was written; any other has every member that the vendor's type requires.
    if type(content) is list and (not ledger.is_home or message.flat is None):
        out["content"] = [
            {**block, "annotations": block.get("annotations", [])} if kind_of(block) == "output_text" else block
            for block in content
        ]
        out |= {"id": f"msg_{_word(parts[0])}", "status": "completed"}
    if ledger.is_home:
        mine = parts[0].ext.get(NAME, {})
        out |= {path[3:]: value for path, value in mine.items() if path[:3] == "../" and path[3:] not in out}
    return [out] if out["content"] or out["content"] == "" or ledger.is_home else []


# Requests -------------------------------------------------------------------------------------------------------------


def read_messages(members: Members, calls: Calls) -> list[ir.Message]:
    """Take the instructions and the items of a request."""
    messages: list[ir.Message] = []
    roles: tuple[tuple[str, ir.Role], ...] = (("instructions", "system"), ("input", "user"))
    for name, role in roles:
        if (text := members.take(name)) is not None:
            part = ir.Text(text=text, at=f"/{name}")
            messages.append(ir.Message(role=role, parts=(part,), flat=True, at=f"/{name}"))
    is_read = "/input" in (message.at for message in messages)
    is_elsewhere = not {"prompt", "conversation", "previous_response_id"}.isdisjoint(members.rest)
    if "input" in members.rest or not (is_read or is_elsewhere):
        messages += read_items(members.need("input"), "/input")
    return messages


def write_messages(conversation: ir.Conversation, out: dict[str, Any], ledger: LossLedger) -> None:
    """Write the instructions and the items."""
    messages = conversation.messages
    native = (None,) if ledger.is_home else (None, "system")
    first = messages[0] if messages else None
    if first is not None and first.role == "system" and first.name is None and first.native_role in native:
        content = BLOCKS.write_content(first.parts, first.flat, ledger)
        if type(content) is str:
            out["instructions"] = content
            ledger.put_ext(first, {})
            messages = messages[1:]
    if messages or not ledger.is_home or "input" in (conversation.raw or {"input": ()}):  # else it is a stored prompt's
        out["input"] = write_items(messages, ledger)


OPTIONS: Final = (
    RequestOption("max_output_tokens", "max_tokens", (int,), least=16),
    RequestOption("temperature", "temperature", NUMBER, least=0, most=2),
    RequestOption("top_p", "top_p", NUMBER),
    RequestOption("top_logprobs", "top_logprobs", (int,), least=0, most=20),
    RequestOption("stream", "stream", (bool,)),
    RequestOption("parallel_tool_calls", "parallel_tool_calls", (bool,)),
    RequestOption("user", "user"),
    METADATA,
    RequestOption("service_tier", "service_tier", known=frozenset({"auto", "default", "flex", "scale", "priority"})),
    RequestOption("reasoning/effort", "reasoning_effort", known=frozenset(EFFORT_BUDGETS)),
    RequestOption("", "reasoning_budget", write=effort_writer("reasoning/effort")),
    RequestOption("text/verbosity", "verbosity", known=frozenset({"low", "medium", "high"})),
    RequestOption("text/format", "response_format", made=NAMED,
                  forms=(*FORMATS, Form({"type": "json_schema", REST: BODY}, SCHEMA))),
    RequestOption("tool_choice", "tool_choice", forms=(*CHOICES, *FLAT, *NESTED)),
)  # fmt: skip


def _with_strict(tool: ir.ToolSpec, out: dict[str, Any], ledger: LossLedger) -> ir.ToolSpec:
    if tool.kind == "custom":
        return tool
    out["parameters"] = None
    if tool.strict is not None:
        return tool
    # Without the word this vendor would take every schema for a strict one.
    ledger.synthesise(tool.at, "required", "a tool says here that its schema is not strict")
    return msgspec.structs.replace(tool, strict=False)


TOOL: Final = {"name": "name", "description": "description", "schema": "parameters", "strict": "strict"}
TOOLS: Final = Tools(BLOCKS, TOOL, KINDS, write_more=_with_strict)


# Answers --------------------------------------------------------------------------------------------------------------


def read_candidates(members: Members, calls: Calls) -> tuple[ir.Candidate, ...]:
    """Take what an answer says and why it ended."""
    (message,) = read_items(members.need("output"), "/output", is_answer=True)
    raw, stop_at = members.take("status"), "/status"
    details = members.rest.get("incomplete_details")
    reason = details.get("reason") if type(details) is dict and len(details) == 1 else None
    if raw == "incomplete" and type(reason) is str and reason:
        del members.rest["incomplete_details"]
        raw, stop_at = f"incomplete:{reason}", "/incomplete_details/reason"
    return (ir.Candidate(message=message, stop=ENDINGS.read(raw, message.parts), stop_raw=raw, stop_at=stop_at),)


def write_candidates(answer: ir.Answer, out: dict[str, Any], ledger: LossLedger) -> None:
    """Write what an answer says and why it ended."""
    out["output"] = []
    for candidate in answer.candidates[:1]:
        out["output"] = write_turn(candidate.message, ledger)
        out |= status_of(ENDINGS.write(candidate, ledger) or "")
        ledger.put_ext(candidate, out)


def status_of(word: str) -> dict[str, Any]:
    """Return the members that say why an answer ended."""
    status, _, reason = word.partition(":")
    return {**({"status": status} if status else {}), **({"incomplete_details": {"reason": reason}} if reason else {})}


USAGE: Final = Counters({
    "input_tokens": "input", "output_tokens": "output", "input_tokens_details/cached_tokens": "cache_read",
    "input_tokens_details/cache_write_tokens": "cache_write", "output_tokens_details/reasoning_tokens": "reasoning",
}, needed=("input", "output", "cache_read", "cache_write", "reasoning"))  # fmt: skip
PLACES: Final = {
    "id": "id", "model": "model", "created": "created_at", "usage": "usage", "stop_detail": "incomplete_details",
    "system": "instructions", "reasoning_budget": "reasoning", "signature": "encrypted_content", "detail": "detail",
}  # fmt: skip


# Streams, read --------------------------------------------------------------------------------------------------------

TERMINAL: Final = frozenset({"response.completed", "response.incomplete", "response.failed", "response.cancelled"})

DELTAS: Final = {
    "response.output_text.delta": "text",
    "response.refusal.delta": "refusal",
    "response.reasoning_summary_text.delta": "summary",
    "response.reasoning_text.delta": "content",
    "response.function_call_arguments.delta": "call",
    "response.custom_tool_call_input.delta": "call",
}

DONES: Final = {
    "response.output_text.done": ("text", "text"),
    "response.refusal.done": ("refusal", "refusal"),
    "response.reasoning_text.done": ("content", "text"),
    "response.function_call_arguments.done": ("call", "arguments"),
    "response.custom_tool_call_input.done": ("call", "input"),
}
"""Event that repeats a whole text → what it is of, and its member."""

NOISE: Final = frozenset({
    "response.content_part.done", "response.keepalive", "response.reasoning_summary_text.done",
    "response.reasoning_summary_part.done", "response.reasoning_summary_part.added", "keepalive", "ping",
})  # fmt: skip
"""Events that only repeat what was said, or say nothing."""


class _Item:
    """One item while it comes in."""

    def __init__(self, key: Any, kind: str) -> None:
        self.key = key
        self.kind = kind
        self.summary = -1
        self.is_done = False

    @property
    def at(self) -> str:
        return f"/output/{self.key}"


class StreamReader(BlockReader):
    """Reads the events of one stream."""

    def __init__(self, dialect: Any) -> None:
        super().__init__(dialect)
        self.items: dict[Any, _Item] = {}
        self.current: Any = None
        self.call_ids: set[str] = set()
        self.texts: list[str] = []
        """Texts and refusals that were said, each whole, to find in the last event what nobody said."""
        self.handlers = {
            "response.created": self._begin, "response.in_progress": self._begin, "response.queued": self._begin,
            "response.output_item.added": self._added, "response.output_item.done": self._done,
            "response.content_part.added": self._part_added,
            "response.output_text.annotation.added": self._annotation, "error": self._error,
            **dict.fromkeys(DELTAS, self._delta), **dict.fromkeys(DONES, self._text_done),
            **dict.fromkeys(TERMINAL, self._end), **dict.fromkeys(NOISE, lambda chunk: []),
        }  # fmt: skip

    def other(self, chunk: Json) -> list[ir.StreamEvent]:
        """Read a whole answer or a failure; events of a later version are kept."""
        kind = kind_of(chunk)
        if type(chunk) is not dict:
            return [ir.Kept(chunk)]
        if chunk.get("object") == "response" and "output" in chunk:
            return self._end({"type": "response.completed", "response": chunk})
        if kind is None and chunk.get("error"):
            return self._error(chunk["error"] if type(chunk["error"]) is dict else {"message": chunk["error"]})
        # Events of tools that the vendor runs say nothing that the end of their item does not say.
        return [ir.Kept(chunk, type(kind) is str and "_call." in kind)]

    def _begin(self, chunk: Json) -> list[ir.StreamEvent]:
        response = chunk.get("response")
        if self.began or type(response) is not dict:
            return []
        self.began = True
        return [begun(response.get("id"), response.get("model"), response.get("created_at"), "/response")]

    def _item(self, chunk: Json, kind: str) -> _Item:
        """Return an event's item: known by its index, else its id, else the one that is open."""
        index, raw = chunk.get("output_index"), chunk.get("item")
        key: Any = chunk.get("item_id") or (raw.get("id") if type(raw) is dict else None)
        key = key if type(key) is str else None
        if type(index) is int:
            key = index
        elif key is None or key not in self.items:
            if chunk.get("type") == "response.output_item.added" or self.current is None:
                key = key if key is not None else ("item", len(self.items))
            else:
                key = self.current
        if chunk.get("type") == "response.output_item.added" and key in self.items and self.items[key].is_done:
            del self.items[key]  # a gateway that counts every item as the first
        self.current = key
        return self.items.setdefault(key, _Item(key, kind))

    def _open(self, item: _Item, place: int, part: ir.Part) -> list[ir.StreamEvent]:
        if isinstance(part, ir.ToolUse):
            self.call_ids.add(part.id)
        return self.begin((item.key, place), part)

    def _added(self, chunk: Json) -> list[ir.StreamEvent]:
        raw = chunk.get("item")
        if type(raw) is not dict:
            return [ir.Kept(chunk, False)]
        item = self._item(chunk, str(raw.get("type")))
        found = read_item(raw, item.at)
        part = found[0] if isinstance(found, list) and len(found) == 1 else None
        if (item.key, 0) in self.open:
            return []
        if isinstance(part, ir.ToolUse):
            return self._open(item, 0, msgspec.structs.replace(part, text=part.text or "", input={}))
        if isinstance(part, ir.Thinking):
            return self._open(item, 0, msgspec.structs.replace(part, text="", signature=None))
        return []

    def _part_added(self, chunk: Json) -> list[ir.StreamEvent]:
        item, place = self._item(chunk, "message"), _place(chunk)
        part = BLOCKS.read(chunk.get("part"), f"{item.at}/content/{place}")
        if (item.key, place) in self.open or item.kind == "reasoning" or not isinstance(part, ir.Text | ir.Refusal):
            return []
        return self._open(item, place, part)

    def _delta(self, chunk: Json) -> list[ir.StreamEvent]:
        return self._say(chunk, DELTAS[chunk["type"]], chunk.get("delta"))

    def _say(self, chunk: Json, what: str, text: Json) -> list[ir.StreamEvent]:
        if type(text) is not str or not text:
            return []
        item = self._item(chunk, {"call": "function_call", "summary": "reasoning", "content": "reasoning"}.get(
            what, "message"))  # fmt: skip
        place = _place(chunk) if what in ("text", "refusal") else 0
        key, out = (item.key, place), []
        if key not in self.open:
            if what == "call":
                return []  # of a call whose name is not known yet: the end of its item says all of it
            at = f"{item.at}/content/{place}"
            part: ir.Part = ir.Thinking(text="", field=what, at=item.at)
            if item.kind != "reasoning":
                part = ir.Text(text="", at=at) if what == "text" else ir.Refusal(text="", at=at)
            out = self._open(item, place, part)
        number = chunk.get("summary_index", 0)
        if what == "summary" and type(number) is int and number > item.summary:
            text = "\n\n" + text if item.summary >= 0 else text
            item.summary = number
        return [*out, self.more(key, text, "arguments" if what == "call" else "text")]

    def _text_done(self, chunk: Json) -> list[ir.StreamEvent]:
        """Read an event that repeats a text: what nobody said of it is said now."""
        what, member = DONES[chunk["type"]]
        text = chunk.get(member)
        item = self._item(chunk, {"call": "function_call", "content": "reasoning"}.get(what, "message"))
        if type(text) is not str or not text or item.is_done or (what == "content" and item.summary >= 0):
            return []
        key = (item.key, _place(chunk) if what in ("text", "refusal") else 0)
        return self._rest(key, text, item.at) if key in self.open else self._say(chunk, what, text)

    def _rest(self, key: Any, whole: str, at: str) -> list[ir.StreamEvent]:
        """Say what a whole text has beyond its pieces; one that says something else is named."""
        block = self.open[key]
        said = _said(block)
        field = "arguments" if isinstance(block.part, ir.ToolUse) else "text"
        if whole != said and whole.startswith(said):
            return [self.more(key, whole[len(said) :], field)]
        reason = "the end of a block says another text than its pieces"
        if whole and whole != said and at not in self.ledger.named:
            self.worked_around(at, reason)
        return []

    def _annotation(self, chunk: Json) -> list[ir.StreamEvent]:
        key = (self._item(chunk, "message").key, _place(chunk))
        found = chunk.get("annotation")
        if key not in self.open or type(found) is not dict:
            return []
        return [self.more(key, "", "citation", CITATIONS.read(found, "/annotations/0"))]

    def _done(self, chunk: Json) -> list[ir.StreamEvent]:
        raw = chunk.get("item")
        if type(raw) is not dict:
            return [ir.Kept(chunk, False)]
        item = self._item(chunk, str(raw.get("type")))
        if item.is_done:
            return []
        item.is_done = True
        found = read_item(raw, item.at, is_answer=True)
        parts = found.parts if isinstance(found, ir.Message) else found
        return [event for place, part in enumerate(parts) for event in self._settle(item, place, part)]

    def _settle(self, item: _Item, place: int, part: ir.Part) -> list[ir.StreamEvent]:
        """Say what nobody said of a whole block, and end it."""
        key = (item.key, place)
        if key in self.open:
            out = self._rest(key, getattr(part, "text", None) or "", item.at)
        else:
            out = self._open(item, place, part)
        if isinstance(part, ir.Text | ir.Refusal):
            self.texts.append(part.text)
        return [*out, *self.end(key, part)]

    def _error(self, chunk: Json) -> list[ir.StreamEvent]:
        inner = chunk.get("error")
        return [failure(inner if type(inner) is dict else chunk, chunk, "code")]

    def _end(self, chunk: Json) -> list[ir.StreamEvent]:
        response = chunk.get("response")
        if self.ended or type(response) is not dict:
            return []
        self.ended = True
        out = self._begin(chunk)
        answer = None
        if type(response.get("output")) is list:
            answer = self.dialect.read_answer(response)
            out += self._missing(answer.candidates[0].message.parts)
        out += [*self.end_all(), *self.count(response.get("usage"), "/usage")]
        error = response.get("error")
        if type(error) is dict:
            out += self._error({**error, "type": "error"})
        raw = response.get("status") or str(chunk.get("type")).partition(".")[2]
        if answer is not None and answer.candidates[0].stop is not None:
            raw = answer.candidates[0].stop_raw
        out += self.stop(raw, "/status")
        # Some servers, and every failure half way, end with an empty list although something was said.
        has_all = answer is not None and (answer.candidates[0].message.parts or not self.counts)
        return [*out, ir.StreamEnded(answer if has_all else None)]

    def _missing(self, parts: tuple[ir.Part, ...]) -> list[ir.StreamEvent]:
        """Say what the whole has and no event said, and the rest of a text that was begun."""
        out: list[ir.StreamEvent] = []
        nothing, told = not self.counts, list(self.texts)
        waiting = [key for key, block in self.open.items() if not isinstance(block.part, ir.Thinking)]
        for place, part in enumerate(parts):
            if isinstance(part, ir.Text | ir.Refusal) and not nothing:
                if part.text in told:
                    told.remove(part.text)
                    continue
                key = next((key for key in waiting if part.text.startswith(_said(self.open[key]))), None)
                if key is not None:
                    waiting.remove(key)
                    out += self._rest(key, part.text, part.at)
                if key is not None or told or waiting:
                    continue
            elif part.id in self.call_ids if isinstance(part, ir.ToolUse) else not nothing:
                continue
            out += self._settle(_Item(("whole", place), "whole"), 0, part)
        return out


def _place(chunk: dict[str, Any]) -> int:
    place = chunk.get("content_index")
    return place if type(place) is int else 0


def _said(block: Any) -> str:
    return (getattr(block.part, "text", None) or "") + "".join(block.texts)


# Streams, written -----------------------------------------------------------------------------------------------------

SAID: Final[dict[Any, tuple[str, str, dict[str, Any]]]] = {
    ir.Text: ("output_text", "text", {"content_index": 0}),
    ir.Refusal: ("refusal", "refusal", {"content_index": 0}),
    ir.Thinking: ("reasoning_summary_text", "text", {"summary_index": 0}),
    "function": ("function_call_arguments", "arguments", {}),
    "custom": ("custom_tool_call_input", "input", {}),
}
"""Kind of block → the name of its events, the member that says it whole, and where it stands in its item."""


class StreamWriter(BlockWriter):
    """Templates of the events; every block is an item of its own."""

    cites_at_end = True

    def __init__(self, dialect: Any, source: str) -> None:
        super().__init__(dialect, source)
        self.sequence = 0
        self.answer_id: str | None = None
        """Said in the first event and kept, although the source may say another one later."""
        self.items: list[Json] = []
        self.texts: dict[Key, list[str]] = {}

    def _event(self, kind: str, **members: Any) -> Json:
        event = {"type": f"response.{kind}", "sequence_number": self.sequence, **members}
        self.sequence += 1
        return event

    def head(self) -> list[Json]:
        head = self._head("in_progress")
        return [self._event("created", response=head), self._event("in_progress", response=dict(head))]

    def _head(self, status: str) -> dict[str, Any]:
        began = self.sum.began
        if self.answer_id is None:
            self.answer_id = began.id or "resp_translated"
        return {
            "id": self.answer_id, "object": "response", "created_at": began.created or 0,
            "status": status, "error": None, "incomplete_details": None, "instructions": None, "metadata": {},
            "model": began.model or "unknown", "output": [], "parallel_tool_calls": True, "temperature": None,
            "tool_choice": "auto", "tools": [], "top_p": None,
        }  # fmt: skip

    def begin(self, key: Key, part: ir.Part) -> list[Json] | None:
        place = len(self.items)
        item: dict[str, Any]
        if isinstance(part, ir.Text | ir.Refusal):
            item = {"id": f"msg_{place}", "type": "message", "role": "assistant", "status": "in_progress",
                    "content": []}  # fmt: skip
        elif isinstance(part, ir.Thinking):
            item = {"id": f"rs_{place}", "type": "reasoning", "summary": []}
            self.ledger.degrade(part.at, "thinking", "thinking stands in a summary, without this vendor's proof")
        elif isinstance(part, ir.ToolUse):
            item = {"id": f"fc_{place}", "call_id": part.id, "name": part.name, "type": "custom_tool_call", "input": ""}
            if part.kind == "function":
                del item["input"]
                item |= {"type": "function_call", "arguments": "", "status": "in_progress"}
        else:
            return None
        self.items.append(item)
        self.opened[key], self.texts[key] = place, []
        return [self._event("output_item.added", output_index=place, item=dict(item)),
                *self._inner(key, "added", part, "")]  # fmt: skip

    def _where(self, key: Key) -> dict[str, Any]:
        return {"item_id": self.items[self.opened[key]]["id"], "output_index": self.opened[key]}

    def _inner(self, key: Key, word: str, part: ir.Part, text: str) -> list[Json]:
        """Begin or end the content in an item; calls have none."""
        if isinstance(part, ir.ToolUse):
            return []
        name = "reasoning_summary_part" if isinstance(part, ir.Thinking) else "content_part"
        where = SAID[type(part)][2]
        return [self._event(f"{name}.{word}", part=_content(part, text, self.ledger), **self._where(key), **where)]

    def piece(self, key: Key, text: str, part: ir.Part) -> list[Json]:
        self.texts[key].append(text)
        name, _, where = SAID[part.kind if isinstance(part, ir.ToolUse) else type(part)]
        more: dict[str, Any] = {"logprobs": []} if type(part) is ir.Text else {}
        return [self._event(f"{name}.delta", delta=text, **self._where(key), **where, **more)]

    def close(self, key: Key, part: ir.Part) -> list[Json]:
        item = self.items[self.opened[key]]
        text = text_of(part) if isinstance(part, ir.ToolUse) else "".join(self.texts[key])
        name, member, where = SAID[part.kind if isinstance(part, ir.ToolUse) else type(part)]
        inner = None if isinstance(part, ir.ToolUse) else _content(part, text, self.ledger)
        more: dict[str, Any] = {"logprobs": []} if type(part) is ir.Text else {}
        out: list[Json] = []
        if inner is None:
            item[member] = text
            if item["type"] == "function_call":
                item["status"] = "incomplete" if part.is_cut else "completed"  # type: ignore[attr-defined]
                more = {"name": item["name"]}
        elif isinstance(part, ir.Thinking):
            item["summary"] = [inner] if text else []
        else:
            item |= {"content": [inner], "status": "completed"}
            out = [self._event("output_text.annotation.added", annotation_index=spot, annotation=one,
                               **self._where(key), **where)
                   for spot, one in enumerate(inner.get("annotations", ()))]  # fmt: skip
        out += [self._event(f"{name}.done", **{member: text}, **self._where(key), **where, **more),
                *self._inner(key, "done", part, text)]  # fmt: skip
        return [*out, self._event("output_item.done", output_index=self.opened[key], item=dict(item))]

    def end(self) -> list[Json]:
        failure = self.sum.failure
        end: dict[str, Any] = status_of(self.words.get(0) or "incomplete")
        if failure is not None or self.is_cut:
            words = failure.message if failure is not None else "the stream was cut"
            end = {"status": "failed", "error": {"code": "server_error", "message": words}}
        response = {**self._head("completed"), **end, "output": self.items, "usage": self.counted()}
        status = response["status"]
        kind = status if status in ("completed", "incomplete", "failed") else "incomplete"
        return [self._event(kind, response=response)]

    def fail(self, event: ir.StreamFailed) -> list[Json]:
        return [{**self._event(""), "type": "error", "code": event.code, "message": event.message, "param": None}]


def _content(part: ir.Part, text: str, ledger: LossLedger) -> dict[str, Any]:
    if isinstance(part, ir.Refusal):
        return {"type": "refusal", "refusal": text}
    if isinstance(part, ir.Thinking):
        return {"type": "summary_text", "text": text}
    citations = CITATIONS.write(part, ledger) if text else []  # type: ignore[arg-type]
    return {"type": "output_text", "text": text, "annotations": citations, "logprobs": []}


DIALECT: Final = TableDialect(
    NAME=NAME, TOOL_NAMES=TOOL_NAMES, CAPABILITIES=CAPABILITIES, DEFAULTS=DEFAULTS, options=OPTIONS,
    read_messages=read_messages, write_messages=write_messages, tools=TOOLS,
    required={"model": "unknown"}, read_candidates=read_candidates, write_candidates=write_candidates, usage=USAGE,
    endings=ENDINGS, reply="output", answer_head={"object": "response"}, error=ERROR,
    # The last three repeat the request, which an answer alone does not know.
    answer_required={"id": "resp_translated", "created_at": 0, "model": "unknown", "parallel_tool_calls": True,
                     "tool_choice": "auto", "tools": []},
    read_stream=StreamReader, write_stream=StreamWriter, event_name=type_name, limits=LIMITS, places=PLACES,
    listed="/input",
).dialect()  # fmt: skip
