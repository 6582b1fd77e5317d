"""What Kimi's session tells, as events of the contract.

An answer comes in deltas, and its step says when it is whole; a call is told when it starts or is asked about, which
ever comes first. A sub-agent's words are kept as they came, and are no answer of the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from backplane.agents.events import CALLS_MAX, CUT_SHORT, SERVERS_GONE, EventFactory, TurnFailure, is_count, mapping
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent
from backplane.contract.receipt import Usage
from backplane.ir import TokenCounts
from backplane.protocol.jsonrpc import Notification
from backplane.upstream.cost import Price, Spent

SILENT: Final = (
    "agent.", "context.", "event.", "session.", "prompt.", "permission.", "turn.started", "turn.step.started",
    "tool.call.delta", "tool.list.updated", "server_hello", "ack", "hook.", "shell.", "subagent.", "mcp.", "error",
)  # fmt: skip
"""Beginnings of kinds of events that say nothing about the work, or repeat what another says."""
MAIN: Final = "main"
"""The agent whose words are the answer."""
_WRITING: Final = frozenset({"write_file", "edit_file"})
_CODE: Final = re.compile(r"\n?Command failed with exit code: (-?\d+)\.\s*\Z")


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


class EventReader:
    """Reads the events of one session.

    Args:
        now: gives the time of an event.
        root: of the workspace; paths below it are told relative to it.
        tools: the agent's names of tools → the contract's.
    """

    def __init__(self, now: Callable[[], str], root: str, tools: Mapping[str, str]) -> None:
        self._make, self._tools = EventFactory(now, root), tools
        self.price: Price | None = None
        self.spent = Spent()
        self.calls: dict[str, OpenCall] = {}
        """Open calls, by id."""
        self._told: set[str] = set()
        self.goes_on = self.acted = self.spoke = False
        """Whether another request follows, there was a call, and the last thing that happened was a message."""
        self.text = ""
        """The last message."""
        self.reason: str | None = None
        """Why the turn ended: completed, failed, cancelled; None while it goes on."""
        self.failure: TurnFailure | None = None
        self._pieces: list[str] = []
        self._counted: dict[str, int] = {}
        """What is counted of this turn, by the agent's counters."""
        self._is_counted = False
        """Whether the request that is open is: its tokens are told before its calls run, and again at its end."""

    @property
    def at_work(self) -> bool:
        return bool(self.calls)

    def begin(self) -> None:
        """Begin another turn."""
        self.reason, self.failure, self.text = None, None, ""
        self.acted = self.spoke = self._is_counted = False
        self._counted = {}

    def read(self, message: Notification) -> list[AgentEvent]:
        """Read one event."""
        kind, data = message.method, message.params
        read = _READ.get(kind)
        if data.get("agentId") not in (None, MAIN) and kind in _OF_MODEL:
            return [] if kind.endswith((".delta", ".updated")) else [self._make.kept(f"{kind} of a sub-agent", data)]
        if read is not None:
            return read(self, data)
        return [] if kind.startswith(SILENT) else [self._make.kept(kind, data)]

    # The model --------------------------------------------------------------------------------------------------------

    def _delta(self, data: dict[str, Any]) -> list[AgentEvent]:
        text = data.get("delta")
        if not isinstance(text, str) or not text:
            return []
        self._pieces.append(text)
        return [self._make.delta(text)]

    def _thought(self, data: dict[str, Any]) -> list[AgentEvent]:
        text = data.get("delta")
        return [self._make.thought(text)] if isinstance(text, str) and text else []

    def _message(self) -> list[AgentEvent]:
        """The words that came, as one message."""
        if not self._pieces:
            return []
        self.text, self.spoke, self._pieces = "".join(self._pieces), True, []
        return [self._make.message(self.text)]

    def _step(self, data: dict[str, Any]) -> list[AgentEvent]:
        """A request of the model that was answered whole; one whose stream just ended was not."""
        self.goes_on = data.get("finishReason") == "tool_use"
        is_whole = data.get("rawFinishReason") or data.get("providerFinishReason")
        self.failure = None if is_whole else TurnFailure("the model's answer ended without its last word")
        if not self._is_counted:
            self._count(_counters(mapping(data.get("usage"))))
        self._is_counted = False
        # Its calls have run by now, so the words before them are told already.
        return [*self._message(), self._make.used(self.used()), self._make.turn(data.get("finishReason"))]

    def _status(self, data: dict[str, Any]) -> list[AgentEvent]:
        """What the turn has used so far: told when the model has answered, so a budget holds before its calls run."""
        turn = _counters(mapping(mapping(data.get("usage")).get("currentTurn")))
        new = {name: count - self._counted.get(name, 0) for name, count in turn.items()}
        if min(new.values(), default=0) < 0 or not any(new.values()):
            return []
        self._count(new)
        self._is_counted, self.goes_on = True, False  # Its end says whether another one follows.
        return [self._make.used(self.used())]

    def _count(self, told: dict[str, int]) -> None:
        self._counted = {name: self._counted.get(name, 0) + told.get(name, 0) for name in _COUNTERS}
        self.spent = self.spent.plus(_usage(told), self.price)

    def used(self) -> Usage:
        return self.spent.usage()

    # Tools ------------------------------------------------------------------------------------------------------------

    def name(self, tool: str) -> str:
        """A tool as the contract calls it."""
        return self._tools.get(tool, tool)

    def _started(self, data: dict[str, Any]) -> list[AgentEvent]:
        return self.call(str(data.get("toolCallId")), str(data.get("name")), data.get("args"))

    def call(self, id: str, tool: str, input: Json) -> list[AgentEvent]:
        """Tell a call, once."""
        if id in self._told:
            return []
        self.acted, self.spoke = True, False
        if len(self._told) < CALLS_MAX:
            self._told.add(id)
            self.calls[id] = OpenCall(tool, self.name(tool), input)
        return [*self._message(), self._make.called(id, self.name(tool), input)]

    def _output(self, data: dict[str, Any]) -> list[AgentEvent]:
        text = mapping(data.get("update")).get("text")
        return [self._make.output(text)] if isinstance(text, str) and text else []

    def _ended(self, data: dict[str, Any]) -> list[AgentEvent]:
        id = str(data.get("toolCallId"))
        call = self.calls.pop(id, None)
        if call is None:
            return []
        failed, output = data.get("isError") is True, data.get("output")
        if call.denied is not None:
            return [self._make.result(id, call.name, call.denied, failed=True)]
        events: list[AgentEvent] = []
        input = mapping(call.input)
        if call.tool == "Bash" and isinstance(input.get("command"), str):
            text = output if isinstance(output, str) else ""
            code = _CODE.search(text) if failed else None
            text = text[: code.start()] if code is not None else text
            events.append(self._make.ran(input["command"], int(code[1]) if code else None if failed else 0, text))
        elif call.name in _WRITING and not failed and isinstance(input.get("path"), str):
            events.append(self._make.changed(input["path"], f"{call.name} by the agent"))
        return [*events, self._make.result(id, call.name, output, failed=failed)]

    def close(self) -> list[AgentEvent]:
        """Return what is still to be told: results of open calls."""
        left, self.calls = self.calls, {}
        return [self._make.result(id, call.name, call.denied or CUT_SHORT, failed=True) for id, call in left.items()]

    # Ends -------------------------------------------------------------------------------------------------------------

    def _retry(self, data: dict[str, Any]) -> list[AgentEvent]:
        words = str(data.get("errorMessage") or data.get("errorName"))[:500]
        body: dict[str, Json] = {"reason": data.get("errorName"), "message": words}
        if self._pieces:
            body["taken_back"] = len("".join(self._pieces))
            self._pieces = []
        return [self._make.carried("retry", body, f"the model is asked again: {words[:200]}")]

    def _over(self, data: dict[str, Any]) -> list[AgentEvent]:
        error = mapping(data.get("error"))
        self.reason = str(data.get("reason"))
        if self.reason == "failed":
            status = mapping(error.get("details")).get("statusCode")
            words = str(error.get("message") or "the turn failed")
            self.failure = TurnFailure(words, str(error.get("code")), status if is_count(status) else None)
        if self._pieces:
            taken, self._pieces = len("".join(self._pieces)), []
            return [self._make.taken_back(taken)]
        return []

    def _warning(self, data: dict[str, Any]) -> list[AgentEvent]:
        words = str(data.get("message") or "")
        return [self._make.warning(f"the agent warns: {words[:500]}")] if words else []

    def _server(self, data: dict[str, Any]) -> list[AgentEvent]:
        status = data.get("status")
        if status not in ("failed", "error", "disconnected"):
            return []
        words = SERVERS_GONE.format(name=data.get("name") or data.get("server"), why=data.get("error") or status)
        return [self._make.warning(words[:500])]


def _counters(told: dict[str, Any]) -> dict[str, int]:
    return {name: told[name] for name in _COUNTERS if is_count(told.get(name))}


def _usage(counted: dict[str, int]) -> TokenCounts:
    sent = [counted[name] for name in ("inputOther", "inputCacheRead", "inputCacheCreation") if name in counted]
    return TokenCounts(
        input=sum(sent) if sent else None, output=counted.get("output"), cache_read=counted.get("inputCacheRead"),
        cache_write=counted.get("inputCacheCreation"),
    )  # fmt: skip


_COUNTERS: Final = ("inputOther", "output", "inputCacheRead", "inputCacheCreation")
_OF_MODEL: Final = frozenset(
    {"agent.status.updated", "assistant.delta", "thinking.delta", "turn.step.completed", "turn.ended"}
)
_READ: Final[dict[str, Callable[[EventReader, dict[str, Any]], list[AgentEvent]]]] = {
    "assistant.delta": EventReader._delta,
    "thinking.delta": EventReader._thought,
    "agent.status.updated": EventReader._status,
    "turn.step.completed": EventReader._step,
    "turn.step.retrying": EventReader._retry,
    "turn.step.interrupted": lambda reader, data: [],
    "tool.call.started": EventReader._started,
    "tool.progress": EventReader._output,
    "tool.result": EventReader._ended,
    "turn.ended": EventReader._over,
    "warning": EventReader._warning,
    "mcp.server.status": EventReader._server,
}
