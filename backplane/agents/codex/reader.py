"""Translates Codex's notifications to events of the contract.

The agent reports an item when it begins and when it is complete, with deltas between. We report a call once, and its
result once. A notification that has no event in the contract is kept unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import msgspec

from backplane.agents.calls import OpenCall
from backplane.agents.codex.items import called, changed_files, result_of
from backplane.agents.events import mapping
from backplane.agents.reader import EventReader as BaseReader
from backplane.agents.reader import counts_of
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent
from backplane.protocol.jsonrpc import Notification

USED: Final = "thread/tokenUsage/updated"
EARLY: Final = frozenset({"warning", "mcpServer/startupStatus/updated"})
"""Notifications about a thread that may come before the answer with the thread's id."""

QUIET_ITEMS: Final = frozenset({"userMessage", "hookPrompt"})

_COUNTERS: Final = {
    "input": ("inputTokens",), "output": ("outputTokens",), "cache_read": ("cachedInputTokens",),
    "cache_write": ("cacheWriteInputTokens",),
}  # fmt: skip


class TurnEnd(msgspec.Struct, frozen=True):
    """End of a turn, as reported by the agent."""

    turn: str
    status: str
    """Status of the turn: `completed`, `interrupted` or `failed`."""
    message: str = ""
    info: Json = None
    """Kind of the failure: a text, or an object with one member; None without a failure."""


class EventReader(BaseReader):
    """Reads the notifications of one thread."""

    SILENT = (
        "thread/started", "thread/status/changed", "thread/readState/changed", "thread/settings/updated",
        "turn/diff/updated", "account/updated", "remoteControl/status/changed", "serverRequest/resolved",
        "item/reasoning/summaryPartAdded", "item/fileChange/", "item/plan/delta", "item/mcpToolCall/progress",
        "thread/name/updated", "item/commandExecution/terminalInteraction", "thread/closed", "hook/",
        "thread/compacted", "thread/environment/connected", "thread/goal/cleared", "skills/changed",
        "app/list/updated",
    )  # fmt: skip
    QUIET = (("bubblewrap", "PATH"), ("bubblewrap", "namespaces"))  # Codex's own sandbox is off.

    def __init__(self, now: Callable[[], str], root: str) -> None:
        super().__init__(now, root)
        self.thread = ""
        self.turns: set[str] = set()
        """Ids of this run's turns: after a resume the agent reports counters of older turns again."""
        self.current = ""
        """Id of the current or last turn."""
        self.ends: list[TurnEnd] = []
        self.settled: set[str] = set()
        """Names of MCP servers that are ready or have failed."""
        self._acted_since = False
        """True if there was a call since the last answer of the model."""
        self._trouble: dict[str, Any] = {}

    def read(self, message: Notification) -> list[AgentEvent]:
        """Read one notification."""
        method, params = message.method, message.params
        is_other = params.get("threadId") not in (None, self.thread) and (self.thread or method not in EARLY)
        if is_other and method in self.READS:
            # Before a resumed thread is open, the agent reports the tokens of its earlier runs.
            return [] if method == USED and not self.thread else [self._make.kept(method, params)]
        return self._read(method, params)

    def _started(self, params: dict[str, Any]) -> list[AgentEvent]:
        self.current = str(mapping(params.get("turn")).get("id"))
        self.turns.add(self.current)
        return []

    # The model --------------------------------------------------------------------------------------------------------

    def _thought(self, params: dict[str, Any]) -> list[AgentEvent]:
        return self._thoughts(params.get("delta"), str(params.get("itemId")))

    def _used(self, params: dict[str, Any]) -> list[AgentEvent]:
        last = mapping(params.get("tokenUsage")).get("last")
        if str(params.get("turnId")) not in self.turns or not isinstance(last, dict):
            return []
        self.goes_on, self._acted_since = self._acted_since, False
        return [*self.count(counts_of([last], _COUNTERS)), self._make.turn("tool_use" if self.goes_on else "end_turn")]

    def _limits(self, params: dict[str, Any]) -> list[AgentEvent]:
        """Store the reset time of the used-up limit of the user's plan that ends last."""
        limits = mapping(params.get("rateLimits"))
        windows = [mapping(limits.get(name)) for name in ("primary", "secondary")]
        times = [one.get("resetsAt") for one in windows if one.get("usedPercent", 0) >= 100]
        self.resets_at = max((float(at) for at in times if isinstance(at, int)), default=None)
        return []

    # Items ------------------------------------------------------------------------------------------------------------

    def _begun(self, params: dict[str, Any]) -> list[AgentEvent]:
        call = called(mapping(params.get("item")), self._root)
        return [] if call is None else self.begin_call(call)

    def begin_call(self, call: OpenCall) -> list[AgentEvent]:
        """Report a call, once."""
        told = self._call(call)
        self._acted_since = self._acted_since or bool(told)
        return told

    def _whole(self, params: dict[str, Any]) -> list[AgentEvent]:
        item = mapping(params.get("item"))
        kind, id = str(item.get("type")), str(item.get("id"))
        if kind in QUIET_ITEMS:
            return []
        if kind == "agentMessage":
            return self._answer(id, str(item.get("text") or ""))
        if kind == "reasoning":
            parts = [part for name in ("summary", "content") for part in item.get(name) or () if isinstance(part, str)]
            return self._whole_thought("\n".join(parts), id)
        if kind == "plan":
            return self._plan({"plan": item.get("text")})
        call = called(item, self._root)
        if call is None:
            return [self._make.kept(f"item {kind}", item)]
        return [*self.begin_call(call), *self._ended(call, item)]

    def _answer(self, id: str, text: str) -> list[AgentEvent]:
        self.spoke = False  # An empty message does not count.
        return [*self.take_back(id), *self._message(text)] if text else []

    def _ended(self, call: OpenCall, item: dict[str, Any]) -> list[AgentEvent]:
        failed = item.get("status") in ("failed", "declined") or item.get("success") is False
        is_command = call.kind == "commandExecution" and item.get("status") != "declined"
        ran = (item.get("exitCode"), item.get("aggregatedOutput")) if is_command else None
        changes = changed_files(item, self._root) if call.kind == "fileChange" and not failed else ()
        return self.calls.end(call.id, result_of(call, item, failed), failed=failed, ran=ran, changes=changes)

    # Ends -------------------------------------------------------------------------------------------------------------

    def _refused(self, params: dict[str, Any]) -> list[AgentEvent]:
        error = mapping(params.get("error"))
        if params.get("willRetry") is not True:
            self._trouble = error
            return []
        words = _words(error)
        return self._retried(words, reason=_info(error), message=words[:500])

    def _over(self, params: dict[str, Any]) -> list[AgentEvent]:
        turn = mapping(params.get("turn"))
        error = mapping(turn.get("error")) or self._trouble
        end = TurnEnd(str(turn.get("id")), str(turn.get("status")), _words(error), _info(error))
        if end.turn in self.turns:
            self.ends.append(end)
        self._trouble = {}
        return []

    def _plan(self, params: dict[str, Any]) -> list[AgentEvent]:
        return [self._make.carried("task", {"plan": params.get("plan")}, "the agent told its plan")]

    def _rerouted(self, params: dict[str, Any]) -> list[AgentEvent]:
        body = {name: params.get(name) for name in ("fromModel", "toModel", "reason")}
        return [self._make.carried("loss", body, f"another model answers: {body['toModel']}")]

    def _server(self, data: dict[str, Any]) -> list[AgentEvent]:
        if data.get("status") != "starting":
            self.settled.add(str(data.get("name")))
        return super()._server(data)

    READS: ClassVar = {
        "item/agentMessage/delta": lambda self, params: self._piece(params.get("delta"), str(params.get("itemId"))),
        "item/reasoning/summaryTextDelta": _thought,
        "item/reasoning/textDelta": _thought,
        "item/commandExecution/outputDelta": lambda self, params: self.calls.output(params.get("delta")),
        "account/rateLimits/updated": _limits,
        "item/started": _begun,
        "item/completed": _whole,
        USED: _used,
        "turn/plan/updated": _plan,
        "turn/started": _started,
        "turn/completed": _over,
        "error": _refused,
        "warning": BaseReader._warned,
        "mcpServer/startupStatus/updated": _server,
        "guardianWarning": BaseReader._warned,
        "configWarning": BaseReader._warned,
        "deprecationNotice": BaseReader._warned,
        "model/rerouted": _rerouted,
    }


# Parts ----------------------------------------------------------------------------------------------------------------


def _info(error: Mapping[str, Any]) -> Json:
    """Return the kind of a failure; the member is named after the agent."""
    return next((value for name, value in error.items() if name.endswith("ErrorInfo")), None)


def _words(error: Mapping[str, Any]) -> str:
    return "; ".join(str(error[name]) for name in ("message", "additionalDetails") if error.get(name))
