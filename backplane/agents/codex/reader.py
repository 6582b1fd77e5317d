"""What such an agent tells, as events of the contract.

An item is told when it begins and again when it is whole; its deltas between. A call is told once, and its result
once. Whatever has no word in the contract is kept as it came.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from backplane.agents.codex.hold import unheld
from backplane.agents.codex.items import OpenCall, called, changed_files, result_of
from backplane.agents.events import CALLS_MAX, CUT_SHORT, SERVERS_GONE, EventFactory, Pieces, is_count, mapping
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent
from backplane.contract.receipt import Usage
from backplane.ir import TokenCounts
from backplane.protocol.jsonrpc import Notification
from backplane.upstream.cost import Price, Spent

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

QUIET_WARNINGS: Final = (("bubblewrap", "PATH"), ("bubblewrap", "namespaces"))
"""Words that stand together in warnings that its own sandbox lacks something here: it is off, whatever is there."""

EARLY: Final = frozenset({"warning", "mcpServer/startupStatus/updated"})
"""Notifications that may come of a thread before the answer that names it."""

QUIET_ITEMS: Final = frozenset({"userMessage", "hookPrompt"})

_COUNTERS: Final = {
    "input": "inputTokens",
    "output": "outputTokens",
    "cache_read": "cachedInputTokens",
    "cache_write": "cacheWriteInputTokens",
}


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


class EventReader:
    """Reads the notifications of one thread.

    Args:
        now: gives the time of an event.
        root: of the workspace; paths below it are told relative to it.
        shows: results are seen by others before they are told, see `seen`; commands are held, see `hold`.
    """

    def __init__(self, now: Callable[[], str], root: str, *, shows: bool = False) -> None:
        self._make, self._root, self._shows = EventFactory(now, root), root, shows
        self.price: Price | None = None
        self.spent = Spent()
        self.thread = ""
        self.calls: dict[str, OpenCall] = {}
        """Open calls, by the item's id."""
        self.turns: set[str] = set()
        """Turns of this run: after a resume the agent tells counters of older ones again."""
        self.current = ""
        """The turn that goes on, or went last."""
        self.ends: list[TurnEnd] = []
        self.acted = False
        """Whether there was a call."""
        self._acted_since = False
        """Whether there was one since the last answer of the model."""
        self.goes_on = False
        """Whether the last answer of the model had calls: then another request follows."""
        self.text = ""
        """The last message of the agent."""
        self.spoke = False
        """Whether the last thing that happened was a message."""
        self.hidden: dict[str, str] = {}
        """Calls that were not allowed, by the item's id, and what is told of them."""
        self._deltas: set[str] = set()
        self._pieces = Pieces()
        self._unseen: dict[str, _Whole] = {}
        """Calls that are over and whose result is still to be seen by others, by the item's id."""
        self._failure: dict[str, Any] = {}

    @property
    def at_work(self) -> bool:
        return bool(self.calls)

    def read(self, message: Notification) -> list[AgentEvent]:
        """Read one notification."""
        method, params = message.method, message.params
        read = _READ.get(method)
        other = params.get("threadId") not in (None, self.thread) and (self.thread or method not in EARLY)
        if read is not None and not other:
            return read(self, params)
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
        text, id = params.get("delta"), str(params.get("itemId"))
        self._deltas.add(id)
        self.spoke = True
        if not isinstance(text, str) or not text:
            return []
        broken = self._take_back(id)
        self._pieces.add(text, id)
        return [*broken, self._make.delta(text)]

    def _take_back(self, id: str) -> list[AgentEvent]:
        """Take back the words of an item that never became whole, when another takes its place."""
        is_left = self._pieces.chars and self._pieces.of != id
        return [self._make.taken_back(self._pieces.clear())] if is_left else []

    def _thought(self, params: dict[str, Any]) -> list[AgentEvent]:
        text = params.get("delta")
        self._deltas.add(str(params.get("itemId")))
        return [self._make.thought(text)] if isinstance(text, str) and text else []

    def _used(self, params: dict[str, Any]) -> list[AgentEvent]:
        last = mapping(params.get("tokenUsage")).get("last")
        if str(params.get("turnId")) not in self.turns or not isinstance(last, dict):
            return []
        counted = {ours: last[theirs] for ours, theirs in _COUNTERS.items() if is_count(last.get(theirs))}
        self.spent = self.spent.plus(TokenCounts(**counted), self.price)
        self.goes_on, self._acted_since = self._acted_since, False
        return [self._make.used(self.used()), self._make.turn("tool_use" if self.goes_on else "end_turn")]

    def used(self) -> Usage:
        return self.spent.usage()

    # Items ------------------------------------------------------------------------------------------------------------

    def _begun(self, params: dict[str, Any]) -> list[AgentEvent]:
        item = mapping(params.get("item"))
        call = self._called(item)
        return [] if call is None else self._call(str(item.get("id")), call)

    def _called(self, item: Mapping[str, Any]) -> OpenCall | None:
        call = called(item, self._root)
        if self._shows and call is not None and call.kind == "commandExecution":
            input = mapping(call.input)
            call.input = {**input, "command": unheld(str(input["command"]))}
        return call

    def _call(self, id: str, call: OpenCall) -> list[AgentEvent]:
        if id in self.calls:
            return []
        self.acted = self._acted_since = True
        self.spoke = False
        if len(self.calls) < CALLS_MAX:
            self.calls[id] = call
        return [self._make.called(id, call.name, call.input)]

    def _output(self, params: dict[str, Any]) -> list[AgentEvent]:
        text = params.get("delta")
        return [self._make.output(text)] if isinstance(text, str) and text and not self._shows else []

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
        began = self._call(id, call)
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

    def _trouble(self, params: dict[str, Any]) -> list[AgentEvent]:
        error = mapping(params.get("error"))
        if params.get("willRetry") is not True:
            self._failure = error
            return []
        words = _words(error)
        body = {"reason": _info(error), "message": words[:500]}
        if self._pieces.chars:
            body["taken_back"] = self._pieces.clear()
        return [self._make.carried("retry", body, f"the model is asked again: {words[:200]}")]

    def _over(self, params: dict[str, Any]) -> list[AgentEvent]:
        turn = mapping(params.get("turn"))
        error = mapping(turn.get("error")) or self._failure
        end = TurnEnd(str(turn.get("id")), str(turn.get("status")), _words(error), _info(error))
        if end.turn in self.turns:
            self.ends.append(end)
        self._failure = {}
        return []

    def close(self) -> list[AgentEvent]:
        """Return what is still to be told: results that nobody saw, and of open calls."""
        left, self.calls = self.calls, {}
        unseen, self._unseen = self._unseen, {}
        held = [event for id, whole in unseen.items() for event in self._told(id, whole, UNSEEN, True)]
        words = {id: self.hidden.pop(id, CUT_SHORT) for id in left}
        return held + [self._make.result(id, call.name, words[id], failed=True) for id, call in left.items()]

    # Words ------------------------------------------------------------------------------------------------------------

    def _warning(self, params: dict[str, Any]) -> list[AgentEvent]:
        words = str(params.get("message") or params.get("summary") or "")
        told = words and not any(all(word in words for word in known) for known in QUIET_WARNINGS)
        return [self._make.warning(f"the agent warns: {words[:500]}")] if told else []

    def _server(self, params: dict[str, Any]) -> list[AgentEvent]:
        status = params.get("status")
        if status not in ("failed", "cancelled"):
            return []
        words = SERVERS_GONE.format(name=params.get("name"), why=params.get("error") or status)
        return [self._make.warning(words[:500])]

    def _plan(self, params: dict[str, Any]) -> list[AgentEvent]:
        return [self._make.carried("task", {"plan": params.get("plan")}, "the agent told its plan")]

    def _rerouted(self, params: dict[str, Any]) -> list[AgentEvent]:
        body = {name: params.get(name) for name in ("fromModel", "toModel", "reason")}
        return [self._make.carried("loss", body, f"another model answers: {body['toModel']}")]


_READ: Final[dict[str, Callable[[EventReader, dict[str, Any]], list[AgentEvent]]]] = {
    "item/agentMessage/delta": EventReader._delta,
    "item/reasoning/summaryTextDelta": EventReader._thought,
    "item/reasoning/textDelta": EventReader._thought,
    "item/commandExecution/outputDelta": EventReader._output,
    "hook/completed": EventReader._hooked,
    "item/started": EventReader._begun,
    "item/completed": EventReader._whole,
    USED: EventReader._used,
    "turn/plan/updated": EventReader._plan,
    "turn/started": EventReader._started,
    "turn/completed": EventReader._over,
    "error": EventReader._trouble,
    "warning": EventReader._warning,
    "mcpServer/startupStatus/updated": EventReader._server,
    "guardianWarning": EventReader._warning,
    "configWarning": EventReader._warning,
    "deprecationNotice": EventReader._warning,
    "model/rerouted": EventReader._rerouted,
}


# Parts ----------------------------------------------------------------------------------------------------------------


def _info(error: Mapping[str, Any]) -> Json:
    """What kind of failure it is; the member is named after the agent."""
    return next((value for name, value in error.items() if name.endswith("ErrorInfo")), None)


def _words(error: Mapping[str, Any]) -> str:
    return "; ".join(str(error[name]) for name in ("message", "additionalDetails") if error.get(name))
