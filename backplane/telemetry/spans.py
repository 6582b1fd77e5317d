"""A run as spans and measurements, by OpenTelemetry's conventions for generative AI. Pure: a receipt in, values out.

The names are a table of our own, as the conventions are in development and their package calls its own deprecated.
They follow open-telemetry/semantic-conventions-genai as of November 2026.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec

from backplane.contract import events as kinds
from backplane.contract.events import AgentEvent, carried
from backplane.contract.receipt import Receipt, Usage
from backplane.receipts.folded import Folded, fold
from backplane.telemetry.context import span_id

SPANS_MAX: Final = 10_000
"""Of one run; what is beyond is counted. Collectors draw two thousand."""

EVENTS_MAX: Final = 128
"""Of one span, as the SDK's own limit is."""

TEXT_CHARS_MAX: Final = 16 * 1024
"""Of a text, where texts are wanted."""

OPERATION: Final = "gen_ai.operation.name"
AGENT_NAME: Final = "gen_ai.agent.name"
AGENT_ID: Final = "gen_ai.agent.id"
AGENT_VERSION: Final = "gen_ai.agent.version"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_ID: Final = "gen_ai.response.id"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
CONVERSATION: Final = "gen_ai.conversation.id"
TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
TOOL_TYPE: Final = "gen_ai.tool.type"
TOOL_ARGUMENTS: Final = "gen_ai.tool.call.arguments"
TOOL_RESULT: Final = "gen_ai.tool.call.result"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
TOKEN_TYPE: Final = "gen_ai.token.type"
ERROR: Final = "error.type"
EXIT_CODE: Final = "process.exit.code"
EXCEPTION: Final = "gen_ai.client.operation.exception"
USAGE: Final = {
    "input_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cache_read_tokens": "gen_ai.usage.cache_read.input_tokens",
    "cache_write_tokens": "gen_ai.usage.cache_creation.input_tokens",
}
"""The contract's counter → theirs. Both count as input all that was sent, cached or not."""

RUN_ID: Final = "backplane.run.id"
OUTCOME: Final = "backplane.outcome"
SHA256: Final = "backplane.receipt.sha256"
COST: Final = "backplane.cost.usd"
COST_SOURCE: Final = "backplane.cost.source"
DROPPED: Final = "backplane.spans.dropped"
APPROVAL: Final = "backplane.approval"

TOKENS_METRIC: Final = "gen_ai.client.token.usage"
AGENT_METRIC: Final = "gen_ai.invoke_agent.duration"

Attributes = dict[str, Any]


class SpanNote(msgspec.Struct, frozen=True):
    """An event of a span."""

    name: str
    time_ns: int
    attributes: Attributes


class RunSpan(msgspec.Struct, kw_only=True, eq=False):
    """One span, whole."""

    name: str
    id: int
    parent: int | None
    """Id of the span it belongs to; None for the run's own."""
    kind: Literal["internal", "client"] = "internal"
    start_ns: int
    end_ns: int = 0
    attributes: Attributes
    notes: list[SpanNote] = []
    error: str | None = None

    def note(self, name: str, time_ns: int, attributes: Attributes) -> None:
        """Add an event, where there is room for it."""
        if len(self.notes) < EVENTS_MAX:
            self.notes.append(SpanNote(name, time_ns, {key: value for key, value in attributes.items() if value != ""}))


class Measurement(msgspec.Struct, frozen=True):
    """One measurement of a run: its duration, tokens or cost."""

    metric: str
    unit: str
    value: int
    """Number of parts of the unit."""
    parts: int
    """Parts that make one unit."""
    attributes: Attributes


class RunTelemetry(msgspec.Struct, frozen=True):
    """A run as telemetry."""

    spans: tuple[RunSpan, ...]
    """The run's own first, parents before their children."""
    measures: tuple[Measurement, ...]


class RunAbout(msgspec.Struct, frozen=True, kw_only=True):
    """What of a run does not stand in its receipt."""

    backend: str
    """The name that it has here."""
    model: str | None = None
    task: str = ""
    is_remote: bool = False
    content: bool = False
    """Whether texts may go along: messages, inputs, results."""


def told(receipt: Receipt, about: RunAbout, trace: Iterable[AgentEvent] | None = None) -> RunTelemetry:
    """Make spans and measurements of a sealed run.

    Args:
        trace: its events, where they are at hand in another form than the receipt's.
    """
    story = _Story(receipt, about)
    for number, event in enumerate(receipt.trace if trace is None else trace, 1):
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
            attributes=self._of_agent(about.backend),
        )
        self._spans = [self._root]
        self._dropped = 0
        self._tools: dict[str, RunSpan] = {}
        self._asked: dict[str, RunSpan] = {}
        self._last_tool: RunSpan | None = None
        self._turn_since_ns = started_ns
        self._first_chunk_ns: int | None = None
        self._folded, self._counted = Folded(), Usage()
        self._messages: list[str] = []
        self._now_ns = started_ns

    def _of_agent(self, name: str) -> Attributes:
        backend = self._receipt.backend
        attributes = {OPERATION: "invoke_agent", AGENT_NAME: name, AGENT_ID: backend.id, **self._common}
        return attributes if backend.backend_version is None else {**attributes, AGENT_VERSION: backend.backend_version}

    def _begun(self, name: str, number: int, above: RunSpan, attributes: Attributes) -> RunSpan:
        """A span that begins with this event."""
        id = span_id(self._run_id, number)
        return RunSpan(name=name, id=id, parent=above.id, start_ns=self._now_ns, attributes=attributes)

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
            case kinds.CommandExecuted():
                if self._last_tool is not None and event.exit_code is not None:
                    self._last_tool.attributes[EXIT_CODE] = event.exit_code
            case kinds.TurnEnded():
                self._turned(number, event)
            case kinds.UsageReported():
                self._folded = fold(self._folded, event)
            case kinds.TaskReported():
                self._told(number, event)
            case kinds.Approval() | kinds.ApprovalAnswered():
                self._decided(event)
            case kinds.RetryReported():
                body = event.body
                code = body.get("error_status", body.get("status", body.get("code", "")))
                self._root.note(EXCEPTION, self._now_ns, {ERROR: str(code), "exception.message": event.message})
            case kinds.Failed():
                code = event.error_code if isinstance(event.error_code, str) else ""
                self._root.note(EXCEPTION, self._now_ns, {ERROR: code, "exception.message": event.message})
            case kinds.FileChanged():
                about = {"file.path": event.path, "backplane.summary": event.summary}
                self._root.note("backplane.file_changed", self._now_ns, about)
            case kinds.CheckpointReported():
                what = str(event.body.get("what", ""))
                self._root.note("backplane.checkpoint", self._now_ns, {"backplane.checkpoint.what": what})
            case _ if type(event) is kinds.Warned:
                self._root.note("backplane.warning", self._now_ns, {"message": event.message[:TEXT_CHARS_MAX]})

    def _called(self, number: int, event: kinds.ToolCall) -> None:
        attributes: Attributes = {OPERATION: "execute_tool", TOOL_NAME: event.tool_name, TOOL_TYPE: "function"}
        if event.tool_use_id is not None:
            attributes[TOOL_CALL_ID] = event.tool_use_id
        if self._about.content:
            attributes[TOOL_ARGUMENTS] = _json(event.input)
        # A sub-agent's calls belong to the call that began it.
        above = self._tools.get(event.parent_tool_use_id or "", self._root)
        span = self._begun(f"execute_tool {event.tool_name}", number, above, attributes)
        if self._add(span):
            self._tools[event.tool_use_id or f"#{number}"] = self._last_tool = span

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
            span.attributes[TOOL_RESULT] = _json(event.output)

    def _close(self, span: RunSpan, *, error: str | None = None) -> None:
        span.end_ns = self._now_ns
        if error is not None:
            span.error = span.attributes[ERROR] = error

    def _turned(self, number: int, event: kinds.TurnEnded) -> None:
        self._folded = fold(self._folded, event)
        attributes: Attributes = {OPERATION: "chat", **self._common}
        body, reason = event.body, event.body.get("stop_reason")
        if isinstance(reason, str):
            attributes[FINISH_REASONS] = [reason]
        for name, member in ((RESPONSE_MODEL, "model"), (RESPONSE_ID, "id")):
            if isinstance(body.get(member), str):
                attributes[name] = body[member]
        attributes |= _usage(_added(self._counted, self._folded.usage))
        self._counted = self._folded.usage
        model = attributes.get(RESPONSE_MODEL, self._about.model)
        span = self._begun(f"chat {model}" if model else "chat", number, self._root, attributes)
        span.kind, span.start_ns, span.end_ns = "client", self._turn_since_ns, self._now_ns
        if self._first_chunk_ns is not None:
            attributes[FIRST_CHUNK] = (self._first_chunk_ns - span.start_ns) / 1e9
        if self._about.content and self._messages:
            attributes[OUTPUT_MESSAGES] = _as_messages("assistant", self._messages)
        self._turn_since_ns, self._first_chunk_ns, self._messages = self._now_ns, None, []
        self._add(span)

    def _told(self, number: int, event: kinds.TaskReported) -> None:
        plan = event.body.get("plan")
        if isinstance(plan, list):
            attributes = {OPERATION: "plan", "backplane.plan.steps": len(plan), **self._common}
            span = self._begun("plan", number, self._root, attributes)
            span.end_ns = self._now_ns
            self._add(span)

    def _decided(self, event: kinds.Approval | kinds.ApprovalAnswered) -> None:
        body, id = event.body, str(event.body.get("id", ""))
        if isinstance(event, kinds.Approval):
            name = body.get("name")
            at = [span for span in self._tools.values() if span.attributes[TOOL_NAME] == name]
            span = self._asked[id] = at[-1] if at else self._root
        else:
            span = self._asked.pop(id, self._root)
        members = {"id": id, **{name: body.get(name) for name in ("kind", "name", "decision", "by")}}
        about = {f"{APPROVAL}.{name}": str(value) for name, value in members.items() if value is not None}
        span.note(APPROVAL, self._now_ns, about)

    def end(self) -> RunTelemetry:
        """Close what is open, and say how the run ended."""
        receipt, root = self._receipt, self._root
        added = receipt.backplane
        self._now_ns = max(self._now_ns, _ns(receipt.meta.finished_at) or 0)
        for span in self._tools.values():
            self._close(span, error="unfinished")
        root.end_ns = self._now_ns
        root.attributes |= {RUN_ID: self._run_id, OUTCOME: receipt.outcome, SHA256: receipt.receipt_sha256 or ""}
        root.attributes |= _usage(receipt.usage)
        session = added.get("session")
        if isinstance(session, dict) and isinstance(session.get("id"), str):
            root.attributes[CONVERSATION] = session["id"]
        if receipt.usage.estimated_cost_usd is not None:
            root.attributes |= {COST: receipt.usage.estimated_cost_usd, COST_SOURCE: "backend"}
        if receipt.outcome != "complete":
            end, cause = _object(added.get("end")), _object(added.get("error"))
            code = cause.get("code") or end.get("code") or end.get("reason") or "_OTHER"
            root.error = root.attributes[ERROR] = str(code)
        if self._dropped:
            root.attributes[DROPPED] = self._dropped
        if self._about.content:
            root.attributes[INPUT_MESSAGES] = _as_messages("user", [self._about.task])
            if self._messages:
                root.attributes[OUTPUT_MESSAGES] = _as_messages("assistant", self._messages[-1:])
        return RunTelemetry(tuple(self._spans), self._measures())

    def _measures(self) -> tuple[Measurement, ...]:
        root, usage, common = self._root, self._receipt.usage, {OPERATION: "invoke_agent", **self._common}
        failed = {} if root.error is None else {ERROR: root.error}
        agent = {AGENT_NAME: self._about.backend, **self._common, **failed}
        found = [Measurement(AGENT_METRIC, "s", root.end_ns - root.start_ns, 10**9, agent)]
        for count, kind in ((usage.input_tokens, "input"), (usage.output_tokens, "output")):
            if count is not None:
                found.append(Measurement(TOKENS_METRIC, "{token}", count, 1, {**common, TOKEN_TYPE: kind}))
        if usage.estimated_cost_usd is not None:
            found.append(Measurement(COST, "USD", round(usage.estimated_cost_usd * 1e6), 10**6, agent))
        return tuple(found)


def _usage(usage: Usage) -> Attributes:
    return {theirs: count for ours, theirs in USAGE.items() if (count := getattr(usage, ours)) is not None}


def _added(before: Usage, after: Usage) -> Usage:
    """What came to a count since; the vendor's turn, as the events count the whole run."""
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
    """Messages in the conventions' form, as JSON."""
    return _json([{"role": role, "parts": [{"type": "text", "content": text[:TEXT_CHARS_MAX]}]} for text in texts])


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
