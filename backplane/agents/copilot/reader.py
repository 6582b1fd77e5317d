"""What Copilot's session tells, as events of the contract.

An answer comes in deltas and then whole, a call when it starts and when it is over. A sub-agent's words are no answer
of the run and are kept as they came; its calls are told like any other, below the call that began it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from backplane.agents.events import (
    CALLS_MAX,
    CUT_SHORT,
    SERVERS_GONE,
    EventFactory,
    Pieces,
    TurnFailure,
    is_count,
    mapping,
    mappings,
)
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent
from backplane.contract.receipt import Usage
from backplane.ir import TokenCounts
from backplane.protocol.jsonrpc import Notification
from backplane.upstream.cost import Price, Spent

EVENT: Final = "session.event"
SILENT: Final = frozenset({"session.lifecycle", "host.event"})
"""Notifications that say nothing about the work."""
SILENT_KINDS: Final = (
    "model.", "hook.", "permission.", "user_input.", "external_tool.", "pending_messages.", "session.", "user.",
    "system.", "sandbox.", "skill.", "assistant.turn_", "assistant.streaming_delta", "assistant.tool_call_delta",
    "assistant.message_start", "assistant.idle", "agent.interrupted", "abort",
)  # fmt: skip
"""Beginnings of kinds of events that say nothing about the work, or repeat what another says; some hold the prompt."""

_COUNTERS: Final = {
    "input": "inputTokens",
    "output": "outputTokens",
    "cache_read": "cacheReadTokens",
    "cache_write": "cacheWriteTokens",
}


class OpenCall(msgspec.Struct):
    """A call that is open."""

    tool: str
    """As the agent calls it."""
    name: str
    """As the contract calls it."""
    input: Json
    is_decided: bool = False
    denied: str | None = None
    """What is told in place of its result."""
    shown: tuple[str, bool] | None = None
    """The result as others wanted it shown, and whether it is an error."""


class EventReader:
    """Reads the events of one session.

    Args:
        now: gives the time of an event.
        root: of the workspace; paths below it are told relative to it.
        tools: the agent's names of tools → the contract's.
        shows: results are seen by others before they are told.
    """

    def __init__(self, now: Callable[[], str], root: str, tools: Mapping[str, str], *, shows: bool = False) -> None:
        self._make, self._tools, self._shows = EventFactory(now, root), tools, shows
        self.price: Price | None = None
        self.spent = Spent()
        self.calls: dict[str, OpenCall] = {}
        """Open calls, by id."""
        self.goes_on = self.acted = self.spoke = False
        """Whether another request follows, there was a call, and the last thing that happened was a message."""
        self.text = ""
        """The last message."""
        self.idle = False
        """Whether the session waits for words."""
        self.aborted = False
        """Whether the turn was stopped."""
        self.failure: TurnFailure | None = None
        self._counted: TokenCounts | None = None
        self._pieces = Pieces()
        self._thoughts: set[str] = set()
        """Thoughts that came in deltas, by id."""

    @property
    def at_work(self) -> bool:
        return bool(self.calls)

    def begin(self) -> None:
        """Begin another turn."""
        self.idle = self.aborted = self.acted = self.spoke = False
        self.failure, self.text = None, ""

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
        read = _READ.get(kind)
        if read is not None:
            return read(self, data)
        return [] if kind.startswith(SILENT_KINDS) else [self._make.kept(kind, data)]

    # The model --------------------------------------------------------------------------------------------------------

    def _delta(self, data: dict[str, Any]) -> list[AgentEvent]:
        text, id = data.get("deltaContent"), str(data.get("messageId"))
        if not isinstance(text, str) or not text:
            return []
        broken = self._take_back() if self._pieces.of != id else []
        self._pieces.add(text, id)
        return [*broken, self._make.delta(text)]

    def _take_back(self) -> list[AgentEvent]:
        """Take back the words of an answer that never became whole."""
        return [self._make.taken_back(self._pieces.clear())] if self._pieces.chars else []

    def _thought(self, data: dict[str, Any]) -> list[AgentEvent]:
        self._thoughts.add(str(data.get("reasoningId")))
        text = data.get("deltaContent")
        return [self._make.thought(text)] if isinstance(text, str) and text else []

    def _whole_thought(self, data: dict[str, Any]) -> list[AgentEvent]:
        text = data.get("content")
        is_new = str(data.get("reasoningId")) not in self._thoughts
        return [self._make.thought(text)] if is_new and isinstance(text, str) and text else []

    def _message(self, data: dict[str, Any]) -> list[AgentEvent]:
        """An answer that is whole: its words, then what it took, then the end of the model's turn."""
        text = data.get("content")
        self.goes_on = bool(data.get("toolRequests"))
        events: list[AgentEvent] = []
        if isinstance(text, str) and text:
            self._pieces.clear()
            self.text, self.spoke = text, True
            events.append(self._make.message(text))
        reason = "tool_use" if self.goes_on else "end_turn"
        return [*events, *self._count(), self._make.turn(reason)]

    def _used(self, data: dict[str, Any]) -> list[AgentEvent]:
        # It comes before the answer that it is about: whether another request follows is known only then.
        events = self._count()
        self._counted = TokenCounts(**{
            ours: data[theirs] for ours, theirs in _COUNTERS.items() if is_count(data.get(theirs))
        })  # fmt: skip
        return events if data.get("initiator") != "sub-agent" else [*events, *self._count()]

    def _count(self) -> list[AgentEvent]:
        counted, self._counted = self._counted, None
        if counted is None:
            return []
        self.spent = self.spent.plus(counted, self.price)
        return [self._make.used(self.used())]

    def used(self) -> Usage:
        return self.spent.usage()

    # Tools ------------------------------------------------------------------------------------------------------------

    def name(self, tool: str, data: Mapping[str, Any]) -> str:
        """A tool as the contract calls it."""
        if data.get("mcpServerName"):
            return f"mcp__{data['mcpServerName']}__{data.get('mcpToolName')}"
        return self._tools.get(tool, tool)

    def _started(self, data: dict[str, Any]) -> list[AgentEvent]:
        id, tool = str(data.get("toolCallId")), str(data.get("toolName"))
        self.acted, self.spoke = True, False
        call = OpenCall(tool, self.name(tool, data), data.get("arguments"))
        if len(self.calls) < CALLS_MAX:
            self.calls[id] = call
        parent = data.get("parentToolCallId")
        return [self._make.called(id, call.name, call.input, parent if isinstance(parent, str) else None)]

    def find(self, tool: str, input: Json, *, decided: bool) -> str | None:
        """The id of the open call that a question is about, which names the tool and its input alone."""
        return next(
            (id for id, call in self.calls.items()
             if (call.tool, call.input, call.is_decided) == (tool, input, decided) and call.shown is None),
            None,
        )  # fmt: skip

    def _output(self, data: dict[str, Any]) -> list[AgentEvent]:
        text = data.get("text")
        return [self._make.output(text)] if isinstance(text, str) and text and not self._shows else []

    def _ended(self, data: dict[str, Any]) -> list[AgentEvent]:
        id = str(data.get("toolCallId"))
        call = self.calls.pop(id, None)
        if call is None:
            return []
        failed, error = data.get("success") is not True, mapping(data.get("error"))
        if call.denied is not None or error.get("code") == "denied":
            said = call.denied or f"policy_denied: {error.get('message')}"
            return [self._make.result(id, call.name, said, failed=True)]
        shown, failed = call.shown or (None, failed)
        result = mapping(data.get("result"))
        output = error.get("message") if error else result.get("content")
        events = [
            self._make.changed(str(edit["path"]), str(edit.get("kind")))
            for edit in mappings(data.get("fileEdits"))
            if isinstance(edit.get("path"), str)
        ]
        command = mapping(call.input).get("command")
        if "shellExecution" in data and isinstance(command, str):
            ends = [one for one in mappings(result.get("contents")) if one.get("type") == "shell_exit"]
            text = ends[0].get("outputPreview") if ends else output
            code = mapping(data["shellExecution"]).get("exitCode")
            events.append(self._make.ran(command, code, str(text or "") if shown is None else shown))
        return [*events, self._make.result(id, call.name, output if shown is None else shown, failed=failed)]

    def close(self) -> list[AgentEvent]:
        """Return what is still to be told: what the last request took, and results of open calls."""
        left, self.calls = self.calls, {}
        ends = [self._make.result(id, call.name, call.denied or CUT_SHORT, failed=True) for id, call in left.items()]
        return [*self._count(), *ends]

    # Ends -------------------------------------------------------------------------------------------------------------

    def _retry(self, data: dict[str, Any]) -> list[AgentEvent]:
        reason = str(data.get("reason"))
        body: dict[str, Json] = {"reason": reason}
        if self._pieces.chars:
            body["taken_back"] = self._pieces.clear()
        return [*self._count(), self._make.carried("retry", body, f"the model is asked again: {reason[:200]}")]

    def _failed(self, data: dict[str, Any]) -> list[AgentEvent]:
        status = data.get("statusCode")
        self.failure = TurnFailure(
            str(data.get("message") or "the turn failed"),
            str(data.get("errorType")),
            status if is_count(status) else None,
        )
        return self._count()

    def _aborted(self, data: dict[str, Any]) -> list[AgentEvent]:
        self.aborted = True
        return []

    def _idle(self, data: dict[str, Any]) -> list[AgentEvent]:
        self.idle = True
        self.aborted = self.aborted or data.get("aborted") is True
        return [*self._take_back(), *self._count()]

    # Words ------------------------------------------------------------------------------------------------------------

    def _warning(self, data: dict[str, Any]) -> list[AgentEvent]:
        words = str(data.get("message") or "")
        return [self._make.warning(f"the agent warns: {words[:500]}")] if words else []

    def _server(self, data: dict[str, Any]) -> list[AgentEvent]:
        status = data.get("status")
        if status not in ("failed", "disabled", "needs-auth"):
            return []
        words = SERVERS_GONE.format(name=data.get("serverName"), why=data.get("error") or status)
        return [self._make.warning(words[:500])]

    def _compacted(self, data: dict[str, Any]) -> list[AgentEvent]:
        return [self._make.kept("session.compaction_complete", data)]


_OF_MODEL: Final = frozenset(
    {"assistant.message", "assistant.message_delta", "assistant.reasoning", "assistant.reasoning_delta"}
)
_READ: Final[dict[str, Callable[[EventReader, dict[str, Any]], list[AgentEvent]]]] = {
    "assistant.message_delta": EventReader._delta,
    "assistant.message": EventReader._message,
    "assistant.reasoning_delta": EventReader._thought,
    "assistant.reasoning": EventReader._whole_thought,
    "assistant.usage": EventReader._used,
    "assistant.turn_retry": EventReader._retry,
    "tool.execution_start": EventReader._started,
    "tool.execution_partial_result": lambda reader, data: [],
    "tool.shell_output": EventReader._output,
    "tool.execution_complete": EventReader._ended,
    "session.error": EventReader._failed,
    "session.idle": EventReader._idle,
    "session.warning": EventReader._warning,
    "session.compaction_complete": EventReader._compacted,
    "session.mcp_server_status_changed": EventReader._server,
    "abort": EventReader._aborted,
}
