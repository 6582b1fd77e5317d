"""What such an agent tells, as events of the contract.

An item is told when it begins and again when it is whole; its deltas between. A call is told once, and its result
once. Whatever has no word in the contract is kept as it came.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import msgspec

from backplane.agents.codex.hold import unheld
from backplane.agents.codex.items import OpenCall, called, changed_files, result_of
from backplane.agents.events import CUT_SHORT, mapping
from backplane.agents.reader import EventReader as BaseReader
from backplane.agents.reader import counts_of
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent
from backplane.protocol.jsonrpc import Notification

UNSEEN: Final = "policy_denied: those who were to see this first have not seen it"
UNSEEN_MAX: Final = 100
"""Results that wait to be seen, a megabyte each at most; what is beyond is told unseen, and found out above."""

USED: Final = "thread/tokenUsage/updated"
SILENT: Final = frozenset(
    {"thread/started", "thread/status/changed", "thread/readState/changed", "thread/settings/updated",
     "turn/diff/updated", "account/rateLimits/updated", "account/updated", "remoteControl/status/changed",
     "serverRequest/resolved", "item/reasoning/summaryPartAdded", "item/fileChange/outputDelta",
     "item/fileChange/patchUpdated", "item/plan/delta", "item/mcpToolCall/progress", "thread/name/updated",
     "item/commandExecution/terminalInteraction", "thread/closed", "hook/started", "hook/completed", "thread/compacted",
     "thread/environment/connected", "thread/goal/cleared", "skills/changed", "app/list/updated"}
)  # fmt: skip
"""Notifications that say nothing about the work, or nothing that an item does not say, too."""

EARLY: Final = frozenset({"warning", "mcpServer/startupStatus/updated"})
"""Notifications that may come of a thread before the answer that names it."""

QUIET_ITEMS: Final = frozenset({"userMessage", "hookPrompt"})

_COUNTERS: Final = {
    "input": ("inputTokens",), "output": ("outputTokens",), "cache_read": ("cachedInputTokens",),
    "cache_write": ("cacheWriteInputTokens",),
}  # fmt: skip


class _Whole(msgspec.Struct, frozen=True):
    """A call that is over."""

    call: OpenCall
    item: dict[str, Any]
    failed: bool

    @property
    def is_shown(self) -> bool:
        """Whether the agent asks about the result before its model has it; a patch that failed is not asked about."""
        return self.call.kind == "commandExecution" or (self.call.kind == "fileChange" and not self.failed)


class TurnEnd(msgspec.Struct, frozen=True):
    """How a turn ended, by the agent's own account."""

    turn: str
    status: str
    """completed, interrupted, failed."""
    message: str = ""
    info: Json = None
    """What kind of failure it was: a word, or an object with one member."""


class EventReader(BaseReader):
    """Reads the notifications of one thread; where results are seen by others first, commands are held, see `hold`."""

    QUIET = (("bubblewrap", "PATH"), ("bubblewrap", "namespaces"))  # Its own sandbox is off, whatever it lacks here.

    def __init__(self, now: Callable[[], str], root: str, *, shows: bool = False) -> None:
        super().__init__(now, root, shows=shows)
        self.thread = ""
        self.turns: set[str] = set()
        """Turns of this run: after a resume the agent tells counters of older ones again."""
        self.current = ""
        """The turn that goes on, or went last."""
        self.ends: list[TurnEnd] = []
        self.settled: set[str] = set()
        """MCP servers that are ready, or will never be."""
        self._acted_since = False
        """Whether there was a call since the last answer of the model."""
        self.hidden: dict[str, str] = {}
        """Calls that were not allowed, by the item's id, and what is told of them."""
        self._deltas: set[str] = set()
        self._unseen: dict[str, _Whole] = {}
        """Calls that are over and whose result is still to be seen by others, by the item's id."""
        self._trouble: dict[str, Any] = {}

    def read(self, message: Notification) -> list[AgentEvent]:
        """Read one notification."""
        method, params = message.method, message.params
        other = params.get("threadId") not in (None, self.thread) and (self.thread or method not in EARLY)
        if method in self.READS and not other:
            return self._read(method, params)
        if method in SILENT or (method == USED and not self.thread):
            # What a conversation has used so far is told before it is open again, and is not of this run.
            return []
        return [self._make.kept(method, params)]

    def _started(self, params: dict[str, Any]) -> list[AgentEvent]:
        self.current = str(mapping(params.get("turn")).get("id"))
        self.turns.add(self.current)
        return []

    # The model --------------------------------------------------------------------------------------------------------

    def _delta(self, params: dict[str, Any]) -> list[AgentEvent]:
        self._deltas.add(str(params.get("itemId")))
        self.spoke = True
        return self._piece(params.get("delta"), str(params.get("itemId")))

    def _thought(self, params: dict[str, Any]) -> list[AgentEvent]:
        self._deltas.add(str(params.get("itemId")))
        return self._thoughts(params.get("delta"))

    def _used(self, params: dict[str, Any]) -> list[AgentEvent]:
        last = mapping(params.get("tokenUsage")).get("last")
        if str(params.get("turnId")) not in self.turns or not isinstance(last, dict):
            return []
        self.goes_on, self._acted_since = self._acted_since, False
        return [*self.count(counts_of(last, _COUNTERS)), self._make.turn("tool_use" if self.goes_on else "end_turn")]

    # Items ------------------------------------------------------------------------------------------------------------

    def _begun(self, params: dict[str, Any]) -> list[AgentEvent]:
        item = mapping(params.get("item"))
        call = self._called(item)
        return [] if call is None else self._begin(str(item.get("id")), call)

    def _called(self, item: Mapping[str, Any]) -> OpenCall | None:
        call = called(item, self._root)
        if self._shows and call is not None and call.kind == "commandExecution":
            input = mapping(call.input)
            call.input = {**input, "command": unheld(str(input["command"]))}
        return call

    def _begin(self, id: str, call: OpenCall) -> list[AgentEvent]:
        if id in self.calls:
            return []
        self._acted_since = True
        return self._call(id, call.name, call)

    def _written(self, params: dict[str, Any]) -> list[AgentEvent]:
        return self._output(params.get("delta"))

    def _whole(self, params: dict[str, Any]) -> list[AgentEvent]:
        item = mapping(params.get("item"))
        kind, id = str(item.get("type")), str(item.get("id"))
        if kind in QUIET_ITEMS:
            return []
        if kind == "agentMessage":
            return self._message(id, str(item.get("text") or ""))
        if kind == "reasoning":
            parts = [part for name in ("summary", "content") for part in item.get(name) or () if isinstance(part, str)]
            return [self._make.thought("\n".join(parts))] if parts and id not in self._deltas else []
        if kind == "plan":
            return self._plan({"plan": item.get("text")})
        call = self._called(item)
        if call is None:
            return [self._make.kept(f"item {kind}", item)]
        began = self._begin(id, call)
        self.calls.pop(id, None)
        return [*began, *self._ended(id, call, item)]

    def _message(self, id: str, text: str) -> list[AgentEvent]:
        self.text, self.spoke = text, bool(text)
        if not text:
            return []
        broken = self._take_back(id)
        self._pieces.clear()
        return [*broken, self._make.message(text)]

    def _ended(self, id: str, call: OpenCall, item: dict[str, Any]) -> list[AgentEvent]:
        denied = self.hidden.pop(id, None)
        if denied is not None or item.get("status") == "declined":
            return [self._make.result(id, call.name, denied or "the call was declined", failed=True)]
        failed = item.get("status") == "failed" or item.get("success") is False
        whole = _Whole(call, dict(item), failed)
        if self._shows and whole.is_shown and len(self._unseen) < UNSEEN_MAX:
            self._unseen[id] = whole
            return []
        return self._told(id, whole, None, failed)

    def _told(self, id: str, whole: _Whole, shown: str | None, is_error: bool) -> list[AgentEvent]:
        """What came of a call; `shown` in place of what its tool said."""
        call, item = whole.call, whole.item
        events: list[AgentEvent] = []
        if call.kind == "commandExecution":
            said = item.get("aggregatedOutput") if shown is None else shown
            command = str(mapping(call.input).get("command"))
            events.append(self._make.ran(command, item.get("exitCode"), str(said or "")))
        elif call.kind == "fileChange" and not whole.failed:
            events += [self._make.changed(path, how) for path, how in changed_files(item, self._root)]
        output = result_of(call, item, whole.failed) if shown is None else shown
        return [*events, self._make.result(id, call.name, output, failed=is_error)]

    def unseen(self, id: str) -> tuple[OpenCall, bool] | None:
        """A call whose result others are still to see, and whether it failed; None where there is none."""
        whole = self._unseen.get(id)
        return (whole.call, whole.failed) if whole is not None else None

    def seen(self, id: str, shown: str | None, is_error: bool) -> list[AgentEvent]:
        """Others have seen a result: what the model is shown in its place, None for the result as it is."""
        whole = self._unseen.pop(id, None)
        return self._told(id, whole, shown, is_error) if whole is not None else []

    def _hooked(self, params: dict[str, Any]) -> list[AgentEvent]:
        """A hook that failed: the model was shown the result as it is, so nothing else is told."""
        run = mapping(params.get("run"))
        id = str(run.get("id")).rpartition(":")[2]
        is_failed = run.get("eventName") == "postToolUse" and run.get("status") == "failed"
        whole = self._unseen.pop(id, None) if is_failed else None
        return self._told(id, whole, None, whole.failed) if whole is not None else []

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

    def close(self) -> list[AgentEvent]:
        """Return what is still to be told: results that nobody saw, and of open calls."""
        left, self.calls = self.calls, {}
        unseen, self._unseen = self._unseen, {}
        held = [event for id, whole in unseen.items() for event in self._told(id, whole, UNSEEN, True)]
        words = {id: self.hidden.pop(id, CUT_SHORT) for id in left}
        return held + [self._make.result(id, call.name, words[id], failed=True) for id, call in left.items()]

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
        "item/agentMessage/delta": _delta,
        "item/reasoning/summaryTextDelta": _thought,
        "item/reasoning/textDelta": _thought,
        "item/commandExecution/outputDelta": _written,
        "hook/completed": _hooked,
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
    """What kind of failure it is; the member is named after the agent."""
    return next((value for name, value in error.items() if name.endswith("ErrorInfo")), None)


def _words(error: Mapping[str, Any]) -> str:
    return "; ".join(str(error[name]) for name in ("message", "additionalDetails") if error.get(name))
