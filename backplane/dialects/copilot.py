"""GitHub Copilot: Chat Completions, and what its extensions' protocol adds (docs.github.com, read November 2026).

The family's shapes are read and written in `_chat`; here is what this vendor has and its sisters have not: references
and confirmations on messages, and named events in streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from backplane.contract.canonical import Json
from backplane.contract.capability import EMULATED, NATIVE, UNSUPPORTED, Manifest
from backplane.contract.events import AgentEvent
from backplane.contract.work import WorkOrder
from backplane.dialects import _chat, _chat_answer, _chat_request, _chat_stream, _chat_stream_write, _events, framing
from backplane.dialects._parts import Ledger
from backplane.ir import Answer, Conversation, Noted, StreamEvent, StreamFailed, ToolSpec, Translated

NAME: Final = "copilot"

TOOL_NAMES: Final[dict[str, str]] = {
    "view": "read_file",
    "create": "write_file",
    "edit": "edit_file",
    "str_replace_editor": "edit_file",
    "bash": "bash",
    "powershell": "bash",
    "glob": "glob",
    "grep": "grep",
    "rg": "grep",
    "web_fetch": "web_fetch",
    "web_search": "web_search",
    "apply_patch": "apply_patch",
}
"""The names that the vendor's agent gives its tools → neutral names."""

CAPABILITIES: Final = Manifest({
    "streaming": NATIVE,
    "tool_read": EMULATED, "tool_write": EMULATED, "tool_edit": EMULATED, "tool_bash": EMULATED,
    "tool_glob": UNSUPPORTED, "tool_grep": UNSUPPORTED, "tool_web_search": NATIVE,
    "structured_output_json_schema": EMULATED,
    "hooks_pre_tool_use": EMULATED, "hooks_post_tool_use": EMULATED,
    "mcp_client": UNSUPPORTED, "mcp_server": UNSUPPORTED,
})  # fmt: skip

DEFAULTS: Final[dict[str, Json]] = {"model": "gpt-5.5", "max_tokens": 4096}
"""The model is one of those at docs.github.com/en/copilot/reference/ai-models/supported-models, 2026-11."""

FRAMING: Final = "sse"
DONE: Final = True
"""Whether a stream ends with the word `[DONE]`."""

FLAVOUR: Final = _chat.Flavour(
    name=NAME,
    thinking_fields=("reasoning_text", "reasoning_content", "reasoning"),
    thinking_request="reasoning_text",
    thinking_answer="reasoning_text",
    signature_field="reasoning_opaque",
    kin={"openai": _chat.MEMBERS, "kimi": _chat.MEMBERS},
)


def tool_to_ir(tool: Json) -> Translated[ToolSpec]:
    """Read one tool definition."""
    return Translated(_chat_request.read_tool(tool, "", FLAVOUR))


def tool_from_ir(tool: ToolSpec, source: str = NAME) -> Translated[Json]:
    """Write one tool definition; None with a loss where only `source` runs it."""
    ledger = Ledger(source, NAME, FLAVOUR.kin)
    return Translated(_chat_request.write_tool(tool, ledger), ledger.done())


def to_ir(request: Json) -> Translated[Conversation]:
    """Read a request. Raises `TranslationError` `dialect_mapping_failed` where it is none."""
    return _chat_request.read_request(request, FLAVOUR)


def from_ir(conversation: Conversation) -> Translated[Json]:
    """Write a request. Raises `TranslationError` where its meaning would break."""
    return _chat_request.write_request(conversation, FLAVOUR)


def response_to_ir(response: Json) -> Translated[Answer]:
    """Read a response. Raises `TranslationError` `dialect_mapping_failed` where it is none."""
    return _chat_answer.read_answer(response, FLAVOUR)


def response_from_ir(answer: Answer) -> Translated[Json]:
    """Write a response."""
    return _chat_answer.write_answer(answer, FLAVOUR)


def map_work_order(order: WorkOrder, config: Mapping[str, Json]) -> Translated[Json]:
    """Write an order as a request; `config` as for `_events.order_conversation`."""
    return from_ir(_events.order_conversation(order, config, NAME, DEFAULTS))


def map_response(response: Json, now: str = _events.EPOCH) -> list[AgentEvent]:
    """Say a response as agent events, all at the time `now`."""
    return _events.answer_events(response_to_ir(response).value, now)


class StreamReader(_chat_stream.ChatReader):
    """Chunks of one stream into events of the ir."""

    def __init__(self) -> None:
        super().__init__(FLAVOUR)

    def read(self, chunk: Json) -> list[StreamEvent]:
        """Read one chunk or one named event."""
        name = chunk.get(framing.NAME_KEY) if type(chunk) is dict else None
        if name is None:
            return super().read(chunk)
        value = {key: inner for key, inner in chunk.items() if key != framing.NAME_KEY}
        if name == "copilot_errors":
            errors = value.get("data")
            first = errors[0] if type(errors) is list and errors and type(errors[0]) is dict else value
            return [StreamFailed(str(first.get("message", "unknown error")), str(first.get("code", "")) or None, chunk)]
        # References come as a list, a confirmation as an object; several of one name are joined.
        body = value["data"] if set(value) == {"data"} else value
        return [Noted(str(name), body if type(body) is list else [body], 0, joins=True, at_message=True)]


class StreamWriter(_chat_stream_write.ChatWriter):
    """Events of the ir into chunks of one stream."""

    def __init__(self, source: str = NAME) -> None:
        super().__init__(FLAVOUR, source)

    def on_noted(self, event: Noted) -> list[Json]:
        """Say references and confirmations as the named events they came as."""
        if not self.ledger.is_home or not event.key.startswith("copilot_"):
            return super().on_noted(event)
        if event.key == "copilot_confirmation":
            return [{framing.NAME_KEY: event.key, **body} for body in event.value]
        return [{framing.NAME_KEY: event.key, "data": event.value}]


class StreamState(_events.State):
    """One stream on its way to agent events."""

    def __init__(self, now: str = _events.EPOCH) -> None:
        super().__init__(NAME, StreamReader(), now)


def map_stream_event(chunk: Json, state: StreamState) -> list[AgentEvent]:
    """Say one chunk as agent events; a call comes whole, when its arguments have ended."""
    return _events.chunk_events(chunk, state)


def event_name(chunk: Json) -> str | None:
    """Return the name under which a chunk is sent: only what the extensions' protocol adds has one."""
    name = chunk.get(framing.NAME_KEY) if type(chunk) is dict else None
    return name if type(name) is str else None


def to_passthrough_event(raw: Json, now: str = _events.EPOCH) -> AgentEvent:
    """Carry a vendor's message through the contract unread."""
    return _events.passthrough_event(raw, now)


def from_passthrough_event(event: AgentEvent) -> Json:
    """Return the vendor's message that an event carries, None when it carries none."""
    return _events.passed_through(event)
