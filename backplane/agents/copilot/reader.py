"""Translates the events of Copilot's session to events of the contract.

An answer comes in deltas and then complete, a call when it starts and when it ends. A sub-agent's text is no answer of
the run and is kept unchanged; its calls are reported like any other, with the call that began it as their parent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

from backplane.agents.calls import OpenCall
from backplane.agents.events import mapping, mappings
from backplane.agents.reader import EventReader as BaseReader
from backplane.agents.reader import counts_of
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent
from backplane.dialects.ir import TokenCounts
from backplane.protocol.jsonrpc import Notification

EVENT: Final = "session.event"
SILENT: Final = frozenset({"session.lifecycle", "host.event"})
"""Notifications that are ignored, because they do not concern the work."""
SILENT_KINDS: Final = (
    "model.", "hook.", "permission.", "user_input.", "external_tool.", "pending_messages.", "session.", "user.",
    "system.", "sandbox.", "skill.", "assistant.turn_", "assistant.streaming_delta", "assistant.tool_call_delta",
    "assistant.message_start", "tool.execution_partial_result", "assistant.idle", "agent.interrupted", "abort",
)  # fmt: skip
"""Prefixes of ignored kinds of events: they do not concern the work, or repeat another one; some have the prompt."""

_COUNTERS: Final = {
    "input": ("inputTokens",), "output": ("outputTokens",), "cache_read": ("cacheReadTokens",),
    "cache_write": ("cacheWriteTokens",),
}  # fmt: skip
_OF_MODEL: Final = frozenset(
    {"assistant.message", "assistant.message_delta", "assistant.reasoning", "assistant.reasoning_delta"}
)


class EventReader(BaseReader):
    """Reads the events of one session."""

    SILENT = SILENT_KINDS

    def __init__(self, now: Callable[[], str], root: str, tools: Mapping[str, str], *, shows: bool = False) -> None:
        super().__init__(now, root, tools, shows=shows)
        self.idle = False
        """True if the session waits for a prompt."""
        self.aborted = False
        """True if the turn was stopped."""
        self._counted: TokenCounts | None = None
        """Tokens of the last request, until its answer shows whether another one follows."""
        self._seen: set[str] = set()
        """Ids of thoughts that came in deltas."""

    def begin(self) -> None:
        """Begin another turn."""
        super().begin()
        self.idle = self.aborted = False

    def read(self, message: Notification) -> list[AgentEvent]:
        """Read one notification."""
        if message.method in SILENT:
            return []
        event = mapping(message.params.get("event"))
        kind, data = str(event.get("type")), mapping(event.get("data"))
        if message.method != EVENT:
            return [self._make.kept(message.method, message.params)]
        if event.get("agentId") is not None and kind in _OF_MODEL:
            return [] if kind.endswith("_delta") else [self._make.kept(f"{kind} of a sub-agent", data)]
        return self._read(kind, data)

    # The model --------------------------------------------------------------------------------------------------------

    def _delta(self, data: dict[str, Any]) -> list[AgentEvent]:
        return self._piece(data.get("deltaContent"), str(data.get("messageId")))

    def _thought(self, data: dict[str, Any]) -> list[AgentEvent]:
        self._seen.add(str(data.get("reasoningId")))
        return self._thoughts(data.get("deltaContent"))

    def _whole_thought(self, data: dict[str, Any]) -> list[AgentEvent]:
        return [] if str(data.get("reasoningId")) in self._seen else self._thoughts(data.get("content"))

    def _answer(self, data: dict[str, Any]) -> list[AgentEvent]:
        """Return the events of a complete answer: its text, then its tokens, then the end of the model's turn."""
        self.goes_on = bool(data.get("toolRequests"))
        reason = "tool_use" if self.goes_on else "end_turn"
        return [*self._message(data.get("content") or ""), *self._counted_now(), self._make.turn(reason)]

    def _used(self, data: dict[str, Any]) -> list[AgentEvent]:
        # The counters come before their answer, which shows whether another request follows.
        events, self._counted = self._counted_now(), counts_of([data], _COUNTERS)
        return events if data.get("initiator") != "sub-agent" else [*events, *self._counted_now()]

    def _counted_now(self) -> list[AgentEvent]:
        counted, self._counted = self._counted, None
        return [] if counted is None else self.count(counted)

    # Tools ------------------------------------------------------------------------------------------------------------

    def _name(self, tool: str, data: Mapping[str, Any]) -> str:
        if data.get("mcpServerName"):
            return f"mcp__{data['mcpServerName']}__{data.get('mcpToolName')}"
        return self.name(tool)

    def _started(self, data: dict[str, Any]) -> list[AgentEvent]:
        id, tool = str(data.get("toolCallId")), str(data.get("toolName"))
        parent = data.get("parentToolCallId")
        call = OpenCall(id, tool, self._name(tool, data), data.get("arguments"))
        return self._call(call, parent if isinstance(parent, str) else None)

    def find(self, tool: str, input: Json, *, decided: bool) -> OpenCall | None:
        """Return the open call that a request is about; the request has only the tool's name and its input."""
        for id, call in self.calls.open.items():
            is_decided, is_same = id in self.calls.verdicts, (call.tool, self.calls.input_of(call)) == (tool, input)
            if is_same and is_decided == decided and call.shown is None:
                return call
        return None

    def _written(self, data: dict[str, Any]) -> list[AgentEvent]:
        return self.calls.output(data.get("text"))

    def _ended(self, data: dict[str, Any]) -> list[AgentEvent]:
        id, error, result = str(data.get("toolCallId")), mapping(data.get("error")), mapping(data.get("result"))
        output = error.get("message") if error else result.get("content")
        if error.get("code") == "denied":
            return self.calls.end(id, f"policy_denied: {output}", failed=True)
        changes = [
            (str(edit["path"]), str(edit.get("kind")))
            for edit in mappings(data.get("fileEdits"))
            if isinstance(edit.get("path"), str)
        ]
        ran = None
        if "shellExecution" in data:
            ends = [one for one in mappings(result.get("contents")) if one.get("type") == "shell_exit"]
            text = ends[0].get("outputPreview") if ends else output
            ran = (mapping(data["shellExecution"]).get("exitCode"), text)
        return self.calls.end(id, output, failed=data.get("success") is not True, ran=ran, changes=changes)

    def close(self) -> list[AgentEvent]:
        """Report what remains at the end: tokens of the last request, and results of open calls."""
        return [*self._counted_now(), *super().close()]

    # Ends -------------------------------------------------------------------------------------------------------------

    def _retry(self, data: dict[str, Any]) -> list[AgentEvent]:
        reason = str(data.get("reason"))
        return [*self._counted_now(), *self._retried(reason, reason=reason)]

    def _error(self, data: dict[str, Any]) -> list[AgentEvent]:
        self._failed(data.get("message"), data.get("errorType"), data.get("statusCode"))
        return self._counted_now()

    def _aborted(self, data: dict[str, Any]) -> list[AgentEvent]:
        self.aborted = True
        return []

    def _idle(self, data: dict[str, Any]) -> list[AgentEvent]:
        self.idle = True
        self.aborted = self.aborted or data.get("aborted") is True
        return [*self._take_back(), *self._counted_now()]

    def _compacted(self, data: dict[str, Any]) -> list[AgentEvent]:
        return [self._make.kept("session.compaction_complete", data)]

    READS: ClassVar = {
        "assistant.message_delta": _delta,
        "assistant.message": _answer,
        "assistant.reasoning_delta": _thought,
        "assistant.reasoning": _whole_thought,
        "assistant.usage": _used,
        "assistant.turn_retry": _retry,
        "tool.execution_start": _started,
        "tool.shell_output": _written,
        "tool.execution_complete": _ended,
        "session.error": _error,
        "session.idle": _idle,
        "session.warning": BaseReader._warned,
        "session.compaction_complete": _compacted,
        "session.mcp_server_status_changed": BaseReader._server,
        "abort": _aborted,
    }
