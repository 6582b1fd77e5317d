"""Translates the events of Copilot's session to events of the contract.

An answer comes in deltas and then complete, a call when it starts and when it ends. A sub-agent's text is no answer of
the run and is kept unchanged; its calls are reported like any other, with the call that began it as their parent.
"""

from __future__ import annotations

from collections.abc import Callable
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
IGNORED: Final = frozenset({"session.lifecycle", "host.event"})
"""Notifications that are ignored, because they do not concern the work."""

_COUNTERS: Final = {
    "input": ("inputTokens",), "output": ("outputTokens",), "cache_read": ("cacheReadTokens",),
    "cache_write": ("cacheWriteTokens",),
}  # fmt: skip


class EventReader(BaseReader):
    """Reads the events of one session."""

    TOOLS: ClassVar = {
        "view": "read_file", "create": "write_file", "edit": "edit_file", "apply_patch": "edit_file", "rg": "grep",
    }  # fmt: skip
    OF_MODEL = ("assistant.message", "assistant.message_delta", "assistant.reasoning", "assistant.reasoning_delta")
    SILENT = (  # Some contain the prompt.
        "model.", "hook.", "permission.", "user_input.", "external_tool.", "pending_messages.", "session.", "user.",
        "system.", "sandbox.", "skill.", "assistant.turn_", "assistant.streaming_delta", "assistant.tool_call_delta",
        "assistant.message_start", "tool.execution_partial_result", "assistant.idle", "agent.interrupted", "abort",
    )  # fmt: skip

    def __init__(self, now: Callable[[], str], root: str, *, shows: bool = False) -> None:
        super().__init__(now, root, shows=shows)
        self.idle = False
        """True if the session waits for a prompt."""
        self.aborted = False
        """True if the turn was stopped."""
        self._counted: TokenCounts | None = None
        """Tokens of the last request, until its answer shows whether another one follows."""

    def begin(self) -> None:
        """Begin another turn."""
        super().begin()
        self.idle = self.aborted = False

    def read(self, message: Notification) -> list[AgentEvent]:
        """Read one notification."""
        if message.method in IGNORED:
            return []
        if message.method != EVENT:
            return [self._make.kept(message.method, message.params)]
        event = mapping(message.params.get("event"))
        return self._read(str(event.get("type")), mapping(event.get("data")), event.get("agentId"))

    # The model --------------------------------------------------------------------------------------------------------

    def _thinks(self, data: dict[str, Any]) -> list[AgentEvent]:
        return self._thoughts(data.get("deltaContent"), data.get("reasoningId"))

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

    def _started(self, data: dict[str, Any]) -> list[AgentEvent]:
        tool, parent, server = str(data.get("toolName")), data.get("parentToolCallId"), data.get("mcpServerName")
        name = f"mcp__{server}__{data.get('mcpToolName')}" if server else self.name(tool)
        call = OpenCall(str(data.get("toolCallId")), tool, name, data.get("arguments"))
        return self._call(call, parent if isinstance(parent, str) else None)

    def find(self, tool: str, input: Json, *, decided: bool) -> OpenCall | None:
        """Return the open call that a request is about; the request has only the tool's name and its input."""
        for id, call in self.calls.open.items():
            is_decided, is_same = id in self.calls.verdicts, (call.tool, self.calls.input_of(call)) == (tool, input)
            if is_same and is_decided == decided and call.shown is None:
                return call
        return None

    def _ended(self, data: dict[str, Any]) -> list[AgentEvent]:
        id, error, result = str(data.get("toolCallId")), mapping(data.get("error")), mapping(data.get("result"))
        output = error.get("message") if error else result.get("content")
        if error.get("code") == "denied":
            return self.calls.end(id, f"policy_denied: {output}", failed=True)
        edits = [edit for edit in mappings(data.get("fileEdits")) if isinstance(edit.get("path"), str)]
        changes = [(str(edit["path"]), str(edit.get("kind"))) for edit in edits]
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
        return [*self.take_back(), *self._counted_now()]

    READS: ClassVar = {
        "assistant.message_delta": lambda self, data: self._piece(data.get("deltaContent"), str(data.get("messageId"))),
        "assistant.message": _answer,
        "assistant.reasoning_delta": _thinks,
        "assistant.reasoning": lambda self, data: self._whole_thought(data.get("content"), data.get("reasoningId")),
        "assistant.usage": _used,
        "assistant.turn_retry": _retry,
        "tool.execution_start": _started,
        "tool.shell_output": lambda self, data: self.calls.output(data.get("text")),
        "tool.execution_complete": _ended,
        "session.error": _error,
        "session.idle": _idle,
        "session.warning": BaseReader._warned,
        "session.compaction_complete": lambda self, data: [self._make.kept("session.compaction_complete", data)],
        "session.mcp_server_status_changed": BaseReader._server,
        "abort": _aborted,
    }
