"""Google's generateContent, as its reference describes it (ai.google.dev, read November 2026).

Contents hold parts; the system text and most options stand outside. Calls have no id as a rule.
Streams are in `_gemini_stream`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.capability import EMULATED, NATIVE, UNSUPPORTED, Manifest
from backplane.contract.events import AgentEvent
from backplane.contract.work import WorkOrder
from backplane.dialects import _events, _gemini_stream, _gemini_stream_write
from backplane.dialects._gemini_read import NAME, Members, read_content, read_stop, read_usage, respell
from backplane.dialects._gemini_request import read_request, read_tool, write_request, write_tool
from backplane.dialects._gemini_write import write_content, write_stop, write_usage
from backplane.dialects._losses import created_path
from backplane.dialects._parts import ABSENT, Calls, Ledger, give_back, need_object, shape, slot, take
from backplane.dialects._reading import failed_answer
from backplane.errors import TranslationError
from backplane.ir import Answer, Candidate, Conversation, Message, ToolSpec, Translated

TOOL_NAMES: Final[dict[str, str]] = {
    "read_file": "read_file",
    "read_many_files": "read_file",
    "write_file": "write_file",
    "replace": "edit_file",
    "list_directory": "list_files",
    "glob": "glob",
    "search_file_content": "grep",
    "grep_search": "grep",
    "run_shell_command": "bash",
    "google_web_search": "web_search",
    "web_fetch": "web_fetch",
}
"""The names that the vendor's agent gives its tools → neutral names."""

CAPABILITIES: Final = Manifest({
    "streaming": NATIVE,
    "tool_read": NATIVE, "tool_write": EMULATED, "tool_edit": EMULATED, "tool_bash": EMULATED,
    "tool_glob": UNSUPPORTED, "tool_grep": UNSUPPORTED,
    "structured_output_json_schema": NATIVE,
    "mcp_client": UNSUPPORTED, "mcp_server": UNSUPPORTED,
})  # fmt: skip

DEFAULTS: Final[dict[str, Json]] = {"model": "gemini-3.8-flash", "max_tokens": 4096}

FRAMING: Final = "sse"
"""What `alt=sse` gives; without it the vendor sends one JSON array, which `framing` knows, too."""

DONE: Final = False


def tool_to_ir(tool: Json) -> Translated[ToolSpec]:
    """Read one function declaration."""
    return Translated(read_tool(tool, ""))


def tool_from_ir(tool: ToolSpec, source: str = NAME) -> Translated[Json]:
    """Write one function declaration; None with a loss where only `source` runs it."""
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
    members = Members(need_object(response, ""), "")
    if "error" in members.rest and "candidates" not in members.rest:
        return Translated(failed_answer(NAME, members.rest))
    ext: dict[str, Any] = {}
    found = take(members.rest, "candidates", list)
    if found is None:
        if not {"promptFeedback", "prompt_feedback", "usageMetadata", "usage_metadata"} & members.rest.keys():
            raise TranslationError("dialect_mapping_failed", "no candidates", hint="check --from and --kind")
        ext[ABSENT] = ("candidates",)
    calls = Calls()
    candidates = tuple(_read_candidate(one, place, calls) for place, one in enumerate(found or ()))
    if not candidates and members.find("promptFeedback") is not None:
        candidates = (_blocked(members),)
        ext["##blocked"] = True
    at = members.pointer("usageMetadata")
    usage = members.take("usageMetadata", dict)
    answer_id, model = members.take("responseId", str), members.take("modelVersion", str)
    members.keep(ext)
    ledger = Ledger(NAME, NAME)
    if calls.made:
        ledger.synthesise("/candidates", "identity", f"ids for {calls.made} calls that had none")
    answer = Answer(
        dialect=NAME, id=answer_id, model=model, candidates=candidates,
        usage=read_usage(usage, at) if usage is not None else None, ext=slot(NAME, ext),
    )  # fmt: skip
    return Translated(answer, ledger.done())


def _blocked(members: Members) -> Candidate:
    """A prompt that was refused has no candidate, only a reason."""
    return Candidate(
        message=Message(role="assistant", parts=()), stop="content_filter", stop_at=members.pointer("promptFeedback")
    )


def _read_candidate(candidate: Json, place: int, calls: Calls) -> Candidate:
    at = f"/candidates/{place}"
    members = Members(need_object(candidate, at), at)
    ext: dict[str, Any] = {}
    absent: list[str] = []
    if members.rest.get("index") == place and type(members.rest.get("index")) is int:
        del members.rest["index"]
    elif "index" not in members.rest:
        absent.append("index")
    content = members.take("content", dict)
    if content is None:
        absent.append("content")
        message = Message(role="assistant", parts=())
    else:
        read = read_content(content, f"{at}/content", calls)
        message = msgspec.structs.replace(read, role="assistant")
    stop_at = members.pointer("finishReason")
    raw = members.take("finishReason", str)
    if absent:
        ext[ABSENT] = tuple(absent)
    members.keep(ext)
    return Candidate(
        message=message, stop=read_stop(raw, message.parts), stop_raw=raw, stop_at=stop_at, at=at, ext=slot(NAME, ext)
    )


def response_from_ir(answer: Answer) -> Translated[Json]:
    """Write a response."""
    ledger = Ledger(answer.dialect, NAME)
    out: dict[str, Any] = {}
    if answer.error is not None and not answer.candidates:
        give_back(answer, out, ledger)
        if "error" not in out:
            out["error"] = {"code": 502, "message": answer.error, "status": "UNAVAILABLE"}
        return Translated(out, ledger.done())
    candidates = answer.candidates
    if ledger.is_home and shape(answer, NAME, "##blocked") and candidates and not candidates[0].message.parts:
        candidates = candidates[1:]
    written = [_write_candidate(candidate, place, ledger) for place, candidate in enumerate(candidates)]
    if written or "candidates" not in (shape(answer, NAME, ABSENT) or ()):
        out["candidates"] = written
    for key, value in (("responseId", answer.id), ("modelVersion", answer.model)):
        if value is not None:
            out[key] = value
    if answer.created is not None:
        ledger.drop(created_path(ledger), "identity", "an answer has no such time here", answer.created)
    if answer.usage is not None:
        out["usageMetadata"] = write_usage(answer.usage, ledger)
    respell(answer, out, ledger)
    give_back(answer, out, ledger)
    return Translated(out, ledger.done())


def _write_candidate(candidate: Candidate, place: int, ledger: Ledger) -> Json:
    out: dict[str, Any] = {}
    absent = shape(candidate, NAME, ABSENT) or () if ledger.is_home else ()
    if candidate.message.parts or "content" not in absent:
        out["content"] = write_content(candidate.message, {}, ledger)
    word = write_stop(candidate, ledger)
    if word is not None:
        out["finishReason"] = word
    respell(candidate, out, ledger)
    give_back(candidate, out, ledger)
    if "index" not in absent:
        out.setdefault("index", place)
    return out


def map_work_order(order: WorkOrder, config: Mapping[str, Json]) -> Translated[Json]:
    """Write an order as a request; `config` as for `_events.order_conversation`."""
    return from_ir(_events.order_conversation(order, config, NAME, DEFAULTS))


def map_response(response: Json, now: str = _events.EPOCH) -> list[AgentEvent]:
    """Say a response as agent events, all at the time `now`."""
    return _events.answer_events(response_to_ir(response).value, now)


class StreamReader(_gemini_stream.GeminiReader):
    """Chunks of one stream into events of the ir."""


class StreamWriter(_gemini_stream_write.GeminiWriter):
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
    """Return the name under which a chunk is sent; this vendor sends none."""
    return None


def to_passthrough_event(raw: Json, now: str = _events.EPOCH) -> AgentEvent:
    """Carry a vendor's message through the contract unread."""
    return _events.passthrough_event(raw, now)


def from_passthrough_event(event: AgentEvent) -> Json:
    """Return the vendor's message that an event carries, None when it carries none."""
    return _events.passed_through(event)
