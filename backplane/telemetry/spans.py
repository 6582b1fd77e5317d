"""A run as spans, by OpenTelemetry's conventions for generative AI. Pure: a receipt in, values out.

The table of names is our own, as the conventions' package calls its own names deprecated while they are in development.
They follow open-telemetry/semantic-conventions-genai as of November 2026.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec

from backplane.contract import events as kinds
from backplane.contract.events import AgentEvent, carried
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

TOKENS_METRIC: Final = "gen_ai.client.token.usage"
DURATION_METRIC: Final = "gen_ai.invoke_agent.duration"

Attributes = dict[str, Any]


class SpanNote(msgspec.Struct, frozen=True):
    """An event of a span."""

    name: str
    time_ns: int
    attributes: Attributes


class RunSpan(msgspec.Struct, kw_only=True, eq=False):
    """One span with its two ends."""

    name: str
    id: int
    parent: int | None
    """The id of the span around it; None for the run's own."""
    kind: Literal["internal", "client"] = "internal"
    start_ns: int
    end_ns: int = 0
    attributes: Attributes
    notes: list[SpanNote] = []
    error: str | None = None

    def note(self, name: str, time_ns: int, attributes: Attributes) -> None:
        """Add an event unless the span is full; empty attributes are left out."""
        if len(self.notes) < EVENTS_MAX:
            self.notes.append(SpanNote(name, time_ns, {key: value for key, value in attributes.items() if value != ""}))


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
        story.take(number, carried(event))
    return story.end()


class _Story:
    def __init__(self, receipt: Receipt, about: RunAbout) -> None:
        self._receipt, self._about = receipt, about
        self._run_id = receipt.meta.run_id
        self._common: Attributes = {PROVIDER: receipt.backend.id}
        if about.model is not None:
            self._common[REQUEST_MODEL] = about.model
        started_ns = _ns(receipt.meta.started_at) or 0
        self._root = RunSpan(
            name=f"invoke_agent {about.backend}",
            id=span_id(self._run_id, 0),
            parent=None,
            kind="client" if about.is_remote else "internal",
            start_ns=started_ns,
            attributes={
                OPERATION: "invoke_agent",
                AGENT_NAME: about.backend,
                "gen_ai.agent.id": receipt.backend.id,
                **self._common,
            },
        )
        if receipt.backend.backend_version is not None:
            self._root.attributes["gen_ai.agent.version"] = receipt.backend.backend_version
        self._spans = [self._root]
        self._dropped = 0
        self._tools: dict[str, RunSpan] = {}
        self._turn_since_ns = started_ns
        self._first_chunk_ns: int | None = None
        self._folded, self._counted = Folded(), Usage()
        self._messages: list[str] = []
        self._now_ns = started_ns

    def _begun(self, name: str, number: int, attributes: Attributes) -> RunSpan:
        """Return a span that begins with this event."""
        id = span_id(self._run_id, number)
        return RunSpan(name=name, id=id, parent=self._root.id, start_ns=self._now_ns, attributes=attributes)

    def _add(self, span: RunSpan) -> bool:
        if len(self._spans) >= SPANS_MAX:
            self._dropped += 1
            return False
        self._spans.append(span)
        return True

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
                members = {name: event.body.get(name) for name in ("id", "kind", "name", "decision", "by")}
                about = {
                    f"backplane.approval.{name}": str(value) for name, value in members.items() if value is not None
                }
                self._root.note("backplane.approval", self._now_ns, about)
            case kinds.RetryReported():
                code = event.body.get("error_status", event.body.get("status", event.body.get("code", "")))
                self._exception(str(code), event.message)
            case kinds.Failed():
                self._exception(event.error_code if isinstance(event.error_code, str) else "", event.message)
            case kinds.FileChanged():
                self._root.note("backplane.file_changed", self._now_ns, {"file.path": event.path})

    def _exception(self, code: str, message: str) -> None:
        self._root.note("gen_ai.client.operation.exception", self._now_ns, {ERROR: code, "exception.message": message})

    def _called(self, number: int, event: kinds.ToolCall) -> None:
        attributes: Attributes = {OPERATION: "execute_tool", TOOL_NAME: event.tool_name, "gen_ai.tool.type": "function"}
        if event.tool_use_id is not None:
            attributes["gen_ai.tool.call.id"] = event.tool_use_id
        if self._about.content:
            attributes["gen_ai.tool.call.arguments"] = _json(event.input)
        span = self._begun(f"execute_tool {event.tool_name}", number, attributes)
        # A sub-agent's calls belong to the call that the agent names as theirs.
        span.parent = self._tools.get(event.parent_tool_use_id or "", self._root).id
        if self._add(span):
            self._tools[event.tool_use_id or f"#{number}"] = span

    def _resulted(self, event: kinds.ToolResult) -> None:
        key = event.tool_use_id
        if key is None:
            named = [one for one, span in self._tools.items() if span.attributes[TOOL_NAME] == event.tool_name]
            key = named[-1] if named else ""
        span = self._tools.pop(key, None)
        if span is None:
            return
        self._close(span, error="tool_error" if event.is_error else None)
        if self._about.content:
            span.attributes["gen_ai.tool.call.result"] = _json(event.output)

    def _close(self, span: RunSpan, *, error: str | None = None) -> None:
        span.end_ns = self._now_ns
        if error is not None:
            span.error = span.attributes[ERROR] = error

    def _turned(self, number: int, event: kinds.TurnEnded) -> None:
        self._folded = fold(self._folded, event)
        attributes: Attributes = {OPERATION: "chat", **self._common}
        body, reason = event.body, event.body.get("stop_reason")
        if isinstance(reason, str):
            attributes["gen_ai.response.finish_reasons"] = [reason]
        for name, member in ((RESPONSE_MODEL, "model"), ("gen_ai.response.id", "id")):
            if isinstance(body.get(member), str):
                attributes[name] = body[member]
        attributes |= _usage(_added(self._counted, self._folded.usage))
        self._counted = self._folded.usage
        model = attributes.get(RESPONSE_MODEL, self._about.model)
        span = self._begun(f"chat {model}" if model else "chat", number, attributes)
        span.kind, span.start_ns, span.end_ns = "client", self._turn_since_ns, self._now_ns
        if self._first_chunk_ns is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = (self._first_chunk_ns - span.start_ns) / 1e9
        if self._about.content and self._messages:
            attributes[OUTPUT_MESSAGES] = _as_messages("assistant", self._messages)
        self._turn_since_ns, self._first_chunk_ns, self._messages = self._now_ns, None, []
        self._add(span)

    def end(self) -> list[RunSpan]:
        """Close the open spans, add how the run ended, and return all."""
        receipt, root = self._receipt, self._root
        added = receipt.backplane
        self._now_ns = max(self._now_ns, _ns(receipt.meta.finished_at) or 0)
        for span in self._tools.values():
            self._close(span, error="unfinished")
        root.end_ns = self._now_ns
        root.attributes |= {
            "backplane.run.id": self._run_id,
            "backplane.outcome": receipt.outcome,
            "backplane.receipt.sha256": receipt.receipt_sha256 or "",
        }
        root.attributes |= _usage(receipt.usage)
        session = added.get("session")
        if isinstance(session, dict) and isinstance(session.get("id"), str):
            root.attributes["gen_ai.conversation.id"] = session["id"]
        if receipt.usage.estimated_cost_usd is not None:
            root.attributes |= {COST: receipt.usage.estimated_cost_usd, "backplane.cost.source": "backend"}
        if receipt.outcome != "complete":
            end, cause = _object(added.get("end")), _object(added.get("error"))
            code = cause.get("code") or end.get("code") or end.get("reason") or "_OTHER"
            root.error = root.attributes[ERROR] = str(code)
        if self._dropped:
            root.attributes["backplane.spans.dropped"] = self._dropped
        if self._about.content:
            root.attributes["gen_ai.input.messages"] = _as_messages("user", [self._about.task])
            if self._messages:
                root.attributes[OUTPUT_MESSAGES] = _as_messages("assistant", self._messages[-1:])
        return self._spans


def _usage(usage: Usage) -> Attributes:
    return {theirs: count for ours, theirs in USAGE.items() if (count := getattr(usage, ours)) is not None}


def _added(before: Usage, after: Usage) -> Usage:
    """Return the counts of one turn; events count the whole run."""
    counts = {
        name: max(now - (getattr(before, name) or 0), 0) for name in USAGE if (now := getattr(after, name)) is not None
    }
    return Usage(**counts)


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def _ns(timestamp: str) -> int | None:
    try:
        since = datetime.fromisoformat(timestamp) - _EPOCH
    except (ValueError, TypeError):
        return None
    return ((since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds) * 1000


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()[:TEXT_CHARS_MAX]


def _as_messages(role: str, texts: list[str]) -> str:
    """Return messages in the conventions' form, as JSON."""
    return _json([{"role": role, "parts": [{"type": "text", "content": text[:TEXT_CHARS_MAX]}]} for text in texts])


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
