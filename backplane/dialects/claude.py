"""Anthropic's Messages, as its reference describes it (docs.anthropic.com, read November 2026).

Messages hold typed blocks; the system text stands outside, results stand in the user's messages.
Streams are in `_claude_stream`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from backplane.contract.canonical import Json
from backplane.contract.capability import EMULATED, NATIVE, UNSUPPORTED, Manifest
from backplane.contract.events import AgentEvent
from backplane.contract.work import WorkOrder
from backplane.dialects import _claude_stream, _claude_stream_write, _events
from backplane.dialects._claude_read import NAME, read_block, read_stop, read_usage
from backplane.dialects._claude_request import read_request, read_tool, write_request, write_tool
from backplane.dialects._claude_write import write_blocks, write_stop, write_usage
from backplane.dialects._losses import created_path, lose_candidates, require
from backplane.dialects._parts import (
    ABSENT,
    Ledger,
    give_back,
    need_list,
    need_object,
    put_constants,
    put_rest,
    slot,
    take,
    take_constant,
)
from backplane.dialects._reading import failed_answer
from backplane.ir import Answer, Candidate, Conversation, Message, ToolSpec, Translated

TOOL_NAMES: Final[dict[str, str]] = {
    "Read": "read_file",
    "Write": "write_file",
    "Edit": "edit_file",
    "MultiEdit": "multi_edit",
    "NotebookEdit": "edit_file",
    "LS": "list_files",
    "Bash": "bash",
    "Glob": "glob",
    "Grep": "grep",
    "WebSearch": "web_search",
    "WebFetch": "web_fetch",
}
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
FRAMING: Final = "sse"
DONE: Final = False


def tool_to_ir(tool: Json) -> Translated[ToolSpec]:
    """Read one tool definition."""
    return Translated(read_tool(tool, ""))


def tool_from_ir(tool: ToolSpec, source: str = NAME) -> Translated[Json]:
    """Write one tool definition; None with a loss where only `source` runs it."""
    ledger = Ledger(source, NAME)
    return Translated(write_tool(tool, ledger), ledger.done())


def to_ir(request: Json) -> Translated[Conversation]:
    """Read a request. Raises `TranslationError` `dialect_mapping_failed` where it is none."""
    return read_request(request)


def from_ir(conversation: Conversation) -> Translated[Json]:
    """Write a request. Raises `TranslationError` where its meaning would break."""
    return write_request(conversation)


def response_to_ir(response: Json) -> Translated[Answer]:
    """Read a response. Raises `TranslationError` `dialect_mapping_failed` where it is none."""
    rest = need_object(response, "")
    if "error" in rest and "content" not in rest:
        return Translated(failed_answer(NAME, rest))
    found = need_list(rest, "content", "")
    absent: list[str] = []
    take_constant(rest, "type", "message", absent)
    take_constant(rest, "role", "assistant", absent)
    parts = tuple(read_block(block, f"/content/{place}") for place, block in enumerate(found))
    raw = take(rest, "stop_reason", str)
    usage = read_usage(rest.pop("usage"), "/usage") if type(rest.get("usage")) is dict else None
    candidate = Candidate(
        message=Message(role="assistant", parts=parts, flat=False), stop=read_stop(raw, parts), stop_raw=raw,
        stop_sequence=take(rest, "stop_sequence", str), stop_at="/stop_reason",
    )  # fmt: skip
    answer_id, model = take(rest, "id", str), take(rest, "model", str)
    ext: dict[str, Any] = {ABSENT: tuple(absent)} if absent else {}
    put_rest(ext, rest)
    return Translated(
        Answer(dialect=NAME, id=answer_id, model=model, candidates=(candidate,), usage=usage, ext=slot(NAME, ext))
    )


def response_from_ir(answer: Answer) -> Translated[Json]:
    """Write a response."""
    ledger = Ledger(answer.dialect, NAME)
    out: dict[str, Any] = {}
    if answer.error is not None and not answer.candidates:
        give_back(answer, out, ledger)
        if "error" not in out:
            out = {"type": "error", "error": {"type": "api_error", "message": answer.error}}
        return Translated(out, ledger.done())
    lose_candidates(answer, ledger)
    for key, value in (("id", answer.id), ("model", answer.model)):
        if value is not None:
            out[key] = value
    if answer.created is not None:
        ledger.drop(created_path(ledger), "identity", "an answer has no time here", answer.created)
    _write_candidate(answer, out, ledger)
    if answer.usage is not None:
        out["usage"] = write_usage(answer.usage, ledger)
    give_back(answer, out, ledger)
    put_constants(answer, out, NAME, {"type": "message", "role": "assistant"})
    if not ledger.is_home:
        _require_answer(out, ledger)
    return Translated(out, ledger.done())


def _write_candidate(answer: Answer, out: dict[str, Any], ledger: Ledger) -> None:
    out["content"] = []
    for candidate in answer.candidates[:1]:
        out["content"] = write_blocks(candidate.message.parts, ledger, is_answer=True)
        word = write_stop(candidate, ledger)
        if word is not None:
            out["stop_reason"] = word
        if candidate.stop_sequence is not None:
            out["stop_sequence"] = candidate.stop_sequence
        give_back(candidate.message, out, ledger)
        give_back(candidate, out, ledger)


def _require_answer(out: dict[str, Any], ledger: Ledger) -> None:
    require(out, {"id": "msg_translated", "model": "unknown"}, ledger)
    out.setdefault("stop_reason", "end_turn")
    out.setdefault("stop_sequence", None)
    if "usage" not in out:
        ledger.synthesise("/usage", "required", "an answer has counters here")
        out["usage"] = {"input_tokens": 0, "output_tokens": 0}


def map_work_order(order: WorkOrder, config: Mapping[str, Json]) -> Translated[Json]:
    """Write an order as a request; `config` as for `_events.order_conversation`."""
    return from_ir(_events.order_conversation(order, config, NAME, DEFAULTS))


def map_response(response: Json, now: str = _events.EPOCH) -> list[AgentEvent]:
    """Say a response as agent events, all at the time `now`."""
    return _events.answer_events(response_to_ir(response).value, now)


class StreamReader(_claude_stream.ClaudeReader):
    """Chunks of one stream into events of the ir."""


class StreamWriter(_claude_stream_write.ClaudeWriter):
    """Events of the ir into chunks of one stream."""

    def __init__(self, source: str = NAME) -> None:
        super().__init__(source)


class StreamState(_events.State):
    """One stream on its way to agent events."""

    def __init__(self, now: str = _events.EPOCH) -> None:
        super().__init__(NAME, StreamReader(), now)


def map_stream_event(chunk: Json, state: StreamState) -> list[AgentEvent]:
    """Say one chunk as agent events; a call comes whole, when its arguments have ended."""
    return _events.chunk_events(chunk, state)


def event_name(chunk: Json) -> str | None:
    """Return the name under which a chunk is sent: its type."""
    return str(chunk.get("type", "message"))


def to_passthrough_event(raw: Json, now: str = _events.EPOCH) -> AgentEvent:
    """Carry a vendor's message through the contract unread."""
    return _events.passthrough_event(raw, now)


def from_passthrough_event(event: AgentEvent) -> Json:
    """Return the vendor's message that an event carries, None when it carries none."""
    return _events.passed_through(event)
