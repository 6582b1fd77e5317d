"""OpenAI's Responses, which its agent Codex speaks (platform.openai.com, read November 2026).

A request and an answer are lists of items: messages, calls, results, reasoning. Streams are in `_codex_stream`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from backplane.contract.canonical import Json
from backplane.contract.capability import EMULATED, NATIVE, UNSUPPORTED, Manifest
from backplane.contract.events import AgentEvent
from backplane.contract.work import WorkOrder
from backplane.dialects import _codex_stream, _codex_stream_write, _events
from backplane.dialects._codex_read import EXACT, NAME, STOP_WORDS, read_items, read_stop, read_usage
from backplane.dialects._codex_request import read_request, read_tool, write_request, write_tool
from backplane.dialects._codex_write import write_items, write_turn, write_usage
from backplane.dialects._losses import lose_candidates, require, stop_word
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
    take_number,
)
from backplane.dialects._reading import failed_answer
from backplane.ir import Answer, Candidate, Conversation, Message, Opaque, Part, ToolSpec, Translated

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

DEFAULTS: Final[dict[str, Json]] = {"model": "gpt-5.5", "max_tokens": 4096}
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
    if "output" not in rest and type(rest.get("error")) in (dict, str):
        return Translated(failed_answer(NAME, rest))
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


def response_from_ir(answer: Answer) -> Translated[Json]:
    """Write a response."""
    ledger = Ledger(answer.dialect, NAME)
    out: dict[str, Any] = {}
    if answer.error is not None and not answer.candidates:
        give_back(answer, out, ledger)
        if "error" not in out:
            out["error"] = {"message": answer.error, "type": "upstream_error", "param": None, "code": None}
        return Translated(out, ledger.done())
    lose_candidates(answer, ledger)
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
        _require_answer(out, ledger)
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


def _require_answer(out: dict[str, Any], ledger: Ledger) -> None:
    require(out, {"id": "resp_translated", "created_at": 0, "model": "unknown"}, ledger)
    # These repeat the request, which an answer alone does not know.
    for key, value in (("parallel_tool_calls", True), ("tool_choice", "auto"), ("tools", [])):
        out.setdefault(key, value)


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


class StreamWriter(_codex_stream_write.CodexWriter):
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
