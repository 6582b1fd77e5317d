"""A run as spans, by OpenTelemetry's conventions for generative AI. Pure: a receipt in, values out.

The table of names is our own, as the conventions' package calls its own names deprecated while they are in development.
They follow open-telemetry/semantic-conventions-genai as of November 2026.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec

from backplane.contract import events as kinds
from backplane.contract.events import AgentEvent
from backplane.contract.receipt import Receipt, Usage
from backplane.receipts.folded import Folded, fold
from backplane.telemetry.context import span_id

SPANS_MAX: Final = 10_000
"""Spans of one run; further ones are counted and dropped. Collectors draw two thousand."""

EVENTS_MAX: Final = 128
"""Events of one span, the SDK's own limit."""

TEXT_CHARS_MAX: Final = 16 * 1024
"""Characters of a text, if texts are wanted; the rest is cut."""

OPERATION: Final = "gen_ai.operation.name"
AGENT_NAME: Final = "gen_ai.agent.name"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
RESPONSE_MODEL: Final = "gen_ai.response.model"
TOOL_NAME: Final = "gen_ai.tool.name"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
TOKEN_TYPE: Final = "gen_ai.token.type"
ERROR: Final = "error.type"
USAGE: Final = {
    "input_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cache_read_tokens": "gen_ai.usage.cache_read.input_tokens",
    "cache_write_tokens": "gen_ai.usage.cache_creation.input_tokens",
}
"""The contract's counter → theirs. Both count everything that was sent as input, cached or not."""

COST: Final = "backplane.cost.usd"
EXCEPTION: Final = "gen_ai.client.operation.exception"

TOKENS_METRIC: Final = "gen_ai.client.token.usage"
DURATION_METRIC: Final = "gen_ai.invoke_agent.duration"

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

Attributes = dict[str, Any]


class RunSpan(msgspec.Struct, kw_only=True, eq=False):
    """A span with its two ends. An attribute of None is left out."""

    name: str
    id: int
    parent: int | None
    """The id of the span around it; None for the run's own."""
    kind: Literal["internal", "client"] = "internal"
    start_ns: int
    end_ns: int = 0
    attributes: Attributes
    notes: list[tuple[str, int, Attributes]] = []
    """Events of the span: name, time, attributes."""


class RunAbout(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a run that its receipt does not have."""

    backend: str
    """Its name in the configuration."""
    model: str | None = None
    task: str = ""
    is_remote: bool = False
    content: bool = False
    """True if the spans may have texts: messages, inputs, results."""


def spans_of(receipt: Receipt, about: RunAbout) -> list[RunSpan]:
    """Return the spans of a sealed run: its own first, parents before their children."""
    story = _Story(receipt, about)
    for number, event in enumerate(receipt.trace, 1):
        story.take(number, event)
    return story.end()


class _Story:
    def __init__(self, receipt: Receipt, about: RunAbout) -> None:
        self._receipt, self._about = receipt, about
        self._now_ns = self._turn_since_ns = _ns(receipt.meta.started_at) or 0
        self._spans: list[RunSpan] = []
        self._dropped = 0
        self._common: Attributes = {PROVIDER: receipt.backend.id, REQUEST_MODEL: about.model}
        self._root = self._begin(f"invoke_agent {about.backend}", 0, {OPERATION: "invoke_agent", **self._common})
        self._root.kind = "client" if about.is_remote else "internal"
        self._tools: dict[str, RunSpan] = {}
        self._first_chunk_ns: int | None = None
        self._folded, self._counted = Folded(), Usage()
        self._messages: list[str] = []

    def _begin(self, name: str, number: int, attributes: Attributes, parent: RunSpan | None = None) -> RunSpan:
        """Return a span that begins with this event; beyond `SPANS_MAX` it is counted and not sent."""
        id = span_id(self._receipt.meta.run_id, number)
        around = parent.id if parent is not None else None
        span = RunSpan(name=name, id=id, parent=around, start_ns=self._now_ns, attributes=attributes)
        if len(self._spans) < SPANS_MAX:
            self._spans.append(span)
        else:
            self._dropped += 1
        return span

    def take(self, number: int, event: AgentEvent) -> None:
        """Add the next event."""
        # Hosts date events; one that goes back in time would make a span of a negative length.
        self._now_ns = max(self._now_ns, _ns(event.ts) or self._now_ns)
        match event:
            case kinds.AssistantDelta():
                self._first_chunk_ns = self._first_chunk_ns or self._now_ns
            case kinds.AssistantMessage():
                self._first_chunk_ns = self._first_chunk_ns or self._now_ns
                self._messages.append(event.text[:TEXT_CHARS_MAX])
            case kinds.ToolCall():
                self._called(number, event)
            case kinds.ToolResult():
                self._resulted(event)
            case kinds.TurnEnded():
                self._turned(number, event)
            case kinds.UsageReported():
                self._folded = fold(self._folded, event)
            case kinds.Approval() | kinds.ApprovalAnswered():
                names = ("id", "kind", "name", "decision", "by")
                self._note("backplane.approval", {f"backplane.approval.{name}": event.body.get(name) for name in names})
            case kinds.RetryReported():
                code = event.body.get("error_status", event.body.get("status", event.body.get("code")))
                self._note(EXCEPTION, {ERROR: code, "exception.message": event.message})
            case kinds.Failed():
                self._note(EXCEPTION, {ERROR: event.error_code, "exception.message": event.message})
            case kinds.FileChanged():
                self._note("backplane.file_changed", {"file.path": event.path})

    def _note(self, name: str, attributes: Attributes) -> None:
        """Add an event to the run's span unless that is full."""
        if len(self._root.notes) < EVENTS_MAX:
            some = {key: str(value) for key, value in attributes.items() if value not in (None, "")}
            self._root.notes.append((name, self._now_ns, some))

    def _text(self, value: Any) -> str | None:
        """Return a value as JSON, cut, if texts are wanted."""
        return msgspec.json.encode(value).decode()[:TEXT_CHARS_MAX] if self._about.content else None

    def _called(self, number: int, event: kinds.ToolCall) -> None:
        attributes: Attributes = {
            OPERATION: "execute_tool",
            TOOL_NAME: event.tool_name,
            "gen_ai.tool.type": "function",
            "gen_ai.tool.call.id": event.tool_use_id,
            "gen_ai.tool.call.arguments": self._text(event.input),
        }
        # A sub-agent's calls belong to the call that the agent names as theirs.
        parent = self._tools.get(event.parent_tool_use_id or "", self._root)
        span = self._begin(f"execute_tool {event.tool_name}", number, attributes, parent)
        if span is self._spans[-1]:
            self._tools[event.tool_use_id or f"#{number}"] = span

    def _resulted(self, event: kinds.ToolResult) -> None:
        key = event.tool_use_id
        if key is None:
            named = [one for one, span in self._tools.items() if span.attributes[TOOL_NAME] == event.tool_name]
            key = named[-1] if named else ""
        span = self._tools.pop(key, None)
        if span is not None:
            span.end_ns = self._now_ns
            error = "tool_error" if event.is_error else None
            span.attributes |= {ERROR: error, "gen_ai.tool.call.result": self._text(event.output)}

    def _turned(self, number: int, event: kinds.TurnEnded) -> None:
        self._folded = fold(self._folded, event)
        reason, model, id = (event.body.get(name) for name in ("stop_reason", "model", "id"))
        attributes: Attributes = {
            OPERATION: "chat",
            **self._common,
            **_usage(self._folded.usage, self._counted),
            RESPONSE_MODEL: model if isinstance(model, str) else None,
            "gen_ai.response.id": id if isinstance(id, str) else None,
            "gen_ai.response.finish_reasons": [reason] if isinstance(reason, str) else None,
            OUTPUT_MESSAGES: self._said("assistant", self._messages),
        }
        if self._first_chunk_ns is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = (self._first_chunk_ns - self._turn_since_ns) / 1e9
        name = f"chat {attributes[RESPONSE_MODEL] or self._about.model or ''}".rstrip()
        span = self._begin(name, number, attributes, self._root)
        span.kind, span.start_ns, span.end_ns = "client", self._turn_since_ns, self._now_ns
        self._counted = self._folded.usage
        self._turn_since_ns, self._first_chunk_ns, self._messages = self._now_ns, None, []

    def _said(self, role: str, texts: list[str]) -> str | None:
        """Return messages in the conventions' form, as JSON, if texts are wanted."""
        parts = [{"role": role, "parts": [{"type": "text", "content": text[:TEXT_CHARS_MAX]}]} for text in texts]
        return self._text(parts) if parts else None

    def end(self) -> list[RunSpan]:
        """Close the open spans, add how the run ended, and return all."""
        receipt, root = self._receipt, self._root
        session, end, cause = (_object(receipt.backplane.get(name)) for name in ("session", "end", "error"))
        root.end_ns = max(self._now_ns, _ns(receipt.meta.finished_at) or 0)
        for span in self._tools.values():
            span.end_ns, span.attributes[ERROR] = root.end_ns, "unfinished"
        cost_usd = receipt.usage.estimated_cost_usd
        code = cause.get("code") or end.get("code") or end.get("reason") or "_OTHER"
        root.attributes |= {
            AGENT_NAME: self._about.backend,
            "gen_ai.agent.id": receipt.backend.id,
            "gen_ai.agent.version": receipt.backend.backend_version,
            "gen_ai.conversation.id": session.get("id"),
            "backplane.run.id": receipt.meta.run_id,
            "backplane.outcome": receipt.outcome,
            "backplane.receipt.sha256": receipt.receipt_sha256,
            "backplane.spans.dropped": self._dropped or None,
            COST: cost_usd,
            "backplane.cost.source": "backend" if cost_usd is not None else None,
            ERROR: str(code) if receipt.outcome != "complete" else None,
            "gen_ai.input.messages": self._said("user", [self._about.task]),
            OUTPUT_MESSAGES: self._said("assistant", self._messages[-1:]),
            **_usage(receipt.usage),
        }
        return self._spans


def _usage(usage: Usage, before: Usage | None = None) -> Attributes:
    """Return the counts of a run, or of one turn, as events count the whole run."""
    counts = {theirs: (getattr(usage, ours), getattr(before, ours, None) or 0) for ours, theirs in USAGE.items()}
    return {name: max(now - was, 0) if now is not None else None for name, (now, was) in counts.items()}


def _ns(timestamp: str) -> int | None:
    try:
        since = datetime.fromisoformat(timestamp) - _EPOCH
    except (ValueError, TypeError):
        return None
    return ((since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds) * 1000


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
