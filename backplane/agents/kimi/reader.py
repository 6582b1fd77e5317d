"""Translates the events of Kimi's session to events of the contract.

An answer comes in deltas, and is complete when its step ends; a call is reported when it starts or the agent asks about
it, whichever comes first. A sub-agent's text is kept unchanged, and is no answer of the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar, Final

from backplane.agents.calls import OpenCall, read_exit
from backplane.agents.events import is_count, mapping
from backplane.agents.reader import EventReader as BaseReader
from backplane.agents.reader import TurnFailure, counts_of
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent
from backplane.protocol.jsonrpc import Notification

MAIN: Final = "main"
"""Id of the agent whose text is the answer; others are sub-agents."""
_WRITING: Final = frozenset({"write_file", "edit_file"})
_CODE: Final = re.compile(r"\n?Command failed with exit code: (-?\d+)\.\s*\Z")


_COUNTERS: Final = {
    "input": ("inputOther", "inputCacheRead", "inputCacheCreation"), "output": ("output",),
    "cache_read": ("inputCacheRead",), "cache_write": ("inputCacheCreation",),
}  # fmt: skip
_COUNTED: Final = ("inputOther", "output", "inputCacheRead", "inputCacheCreation")


class EventReader(BaseReader):
    """Reads the events of one session."""

    TOOLS: ClassVar = {
        "Read": "read_file", "Write": "write_file", "Edit": "edit_file", "Bash": "bash", "Glob": "glob", "Grep": "grep",
        "FetchURL": "web_fetch", "WebSearch": "web_search", "AskUserQuestion": "ask_user",
    }  # fmt: skip
    OF_MODEL = ("agent.status.updated", "assistant.delta", "thinking.delta", "turn.step.completed", "turn.ended")
    SILENT = (
        "agent.", "context.", "event.", "session.", "prompt.", "permission.", "turn.started", "turn.step.started",
        "turn.step.interrupted", "tool.call.delta", "tool.list.updated", "server_hello", "ack", "hook.", "shell.",
        "subagent.", "mcp.", "error",
    )  # fmt: skip

    def __init__(self, now: Callable[[], str], root: str) -> None:
        super().__init__(now, root)
        self._told: set[str] = set()
        self.reason: str | None = None
        """Why the turn ended: completed, failed, cancelled; None until it ends."""
        self._counted: dict[str, int] = {}
        """Name of the agent's counter → tokens counted in this turn."""
        self._is_counted = False
        """True if the tokens of the current request are counted: the agent reports them before its calls run, and again
        at its end."""

    def begin(self) -> None:
        """Begin another turn."""
        super().begin()
        self.reason, self._is_counted, self._counted = None, False, {}

    def read(self, message: Notification) -> list[AgentEvent]:
        """Read one event."""
        agent = message.params.get("agentId")
        return self._read(message.method, message.params, None if agent == MAIN else agent)

    # The model --------------------------------------------------------------------------------------------------------

    def _step(self, data: dict[str, Any]) -> list[AgentEvent]:
        """Return the events of a complete answer of the model; a stream that breaks has no such event."""
        self.goes_on = data.get("finishReason") == "tool_use"
        is_whole = data.get("rawFinishReason") or data.get("providerFinishReason")
        self.failure = None if is_whole else TurnFailure("the model's answer ended without its last word")
        if not self._is_counted:
            self._count_also(_counters(mapping(data.get("usage"))))
        self._is_counted = False
        # The calls have run by now, so the text before them is reported already.
        return [*self._message(), self._make.used(self.used()), self._make.turn(data.get("finishReason"))]

    def _status(self, data: dict[str, Any]) -> list[AgentEvent]:
        """Count the tokens of the turn so far; they come before an answer's calls run, so that the budget applies."""
        turn = _counters(mapping(mapping(data.get("usage")).get("currentTurn")))
        new = {name: count - self._counted.get(name, 0) for name, count in turn.items()}
        if min(new.values(), default=0) < 0 or not any(new.values()):
            return []
        self._is_counted, self.goes_on = True, False  # The end of the step shows if another request follows.
        return self._count_also(new)

    def _count_also(self, told: dict[str, int]) -> list[AgentEvent]:
        self._counted = {name: self._counted.get(name, 0) + told.get(name, 0) for name in _COUNTED}
        return self.count(counts_of([told], _COUNTERS))

    # Tools ------------------------------------------------------------------------------------------------------------

    def _started(self, data: dict[str, Any]) -> list[AgentEvent]:
        return self.call(str(data.get("toolCallId")), str(data.get("name")), data.get("args"))

    def call(self, id: str, tool: str, input: Json) -> list[AgentEvent]:
        """Report a call, once."""
        if id in self._told:
            return []
        self._told.add(id)
        self.goes_on = True  # Set before the call runs; the end of the step sets it again after the calls.
        return [*self._message(), *self._call(OpenCall(id, tool, self.name(tool), input))]

    def _written(self, data: dict[str, Any]) -> list[AgentEvent]:
        return self.calls.output(mapping(data.get("update")).get("text"))

    def _ended(self, data: dict[str, Any]) -> list[AgentEvent]:
        id = str(data.get("toolCallId"))
        call, failed, output = self.calls.open.get(id), data.get("isError") is True, data.get("output")
        if call is None:
            return []
        path = mapping(call.input).get("path")
        ran = read_exit(_CODE, str(output or ""), failed=failed) if call.tool == "Bash" else None
        is_change = call.name in _WRITING and not failed and isinstance(path, str)
        changes = [(str(path), f"{call.name} by the agent")] if is_change else []
        return self.calls.end(id, output, failed=failed, ran=ran, changes=changes)

    # Ends -------------------------------------------------------------------------------------------------------------

    def _retry(self, data: dict[str, Any]) -> list[AgentEvent]:
        words = str(data.get("errorMessage") or data.get("errorName"))[:500]
        return self._retried(words, reason=data.get("errorName"), message=words)

    def _over(self, data: dict[str, Any]) -> list[AgentEvent]:
        error = mapping(data.get("error"))
        self.reason = str(data.get("reason"))
        if self.reason == "failed":
            self._failed(error.get("message"), error.get("code"), mapping(error.get("details")).get("statusCode"))
        return self.take_back()

    READS: ClassVar = {
        "assistant.delta": lambda self, data: self._piece(data.get("delta")),
        "thinking.delta": lambda self, data: self._thoughts(data.get("delta")),
        "agent.status.updated": _status,
        "turn.step.completed": _step,
        "turn.step.retrying": _retry,
        "tool.call.started": _started,
        "tool.progress": _written,
        "tool.result": _ended,
        "turn.ended": _over,
        "warning": BaseReader._warned,
        "mcp.server.status": BaseReader._server,
    }


def _counters(told: dict[str, Any]) -> dict[str, int]:
    return {name: told[name] for name in _COUNTED if is_count(told.get(name))}
