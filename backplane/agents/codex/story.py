"""What such an agent tells, as events of the contract.

An item is told when it begins and again when it is whole; its deltas between. A call is told once, and its result
once. Whatever has no word in the contract is kept as it came.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from backplane.agents.codex.hold import unheld
from backplane.agents.codex.items import Call, called, changed_files, mapping, result_of
from backplane.contract.canonical import Json
from backplane.contract.deltas import BROKEN, take_back
from backplane.contract.events import (
    AgentEvent,
    AssistantDelta,
    AssistantMessage,
    CommandExecuted,
    FileChanged,
    Reasoning,
    ToolCall,
    ToolResult,
    Warned,
    carry,
)
from backplane.contract.receipt import Usage
from backplane.ir import Usage as Counted
from backplane.upstream.cost import MICROS, Price, actual

PREVIEW_BYTES_MAX: Final = 8192
"""Longest preview of a command's output, as the contract has it."""

UNSEEN: Final = "policy_denied: those who were to see this first have not seen it"
UNSEEN_MAX: Final = 100
"""Results that wait to be seen, a megabyte each at most; what is beyond is told unseen, and found out above."""

CALLS_MAX: Final = 10_000
"""Calls that are open at once and remembered: an agent with more of them is in a loop."""

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
    "input_tokens": "inputTokens",
    "output_tokens": "outputTokens",
    "cache_read_tokens": "cachedInputTokens",
    "cache_write_tokens": "cacheWriteInputTokens",
}


class _Whole(msgspec.Struct, frozen=True):
    """A call that is over."""

    call: Call
    item: dict[str, Any]
    failed: bool

    @property
    def is_shown(self) -> bool:
        """Whether the agent asks about the result before its model has it; a patch that failed is not asked about."""
        return self.call.kind == "commandExecution" or (self.call.kind == "fileChange" and not self.failed)


class Ending(msgspec.Struct, frozen=True):
    """How a turn ended, by the agent's own account."""

    turn: str
    status: str
    """completed, interrupted, failed."""
    message: str = ""
    info: Json = None
    """What kind of failure it was: a word, or an object with one member."""


class Story:
    """One run: the turns of one thread.

    Args:
        now: gives the time of an event.
        root: of the workspace; paths below it are told relative to it.
        shows: results are seen by others before they are told, see `seen`; commands are held, see `hold`.
    """

    def __init__(self, now: Callable[[], str], root: str, *, shows: bool = False) -> None:
        self._now, self._root = now, root
        self.patch_name: str | None = None
        """What a patch is called; None calls it by what it does."""
        self.price: Price | None = None
        self.micros: int | None = 0
        """What the run cost so far, in millionths of a dollar; None is unknown."""
        self.thread = ""
        self.calls: dict[str, Call] = {}
        """Open calls, by the item's id."""
        self.turns: set[str] = set()
        """Turns of this run: after a resume the agent tells counters of older ones again."""
        self.current = ""
        """The turn that goes on, or went last."""
        self.endings: list[Ending] = []
        self.answers: int = 0
        """Answers of the model so far, one a request."""
        self.acted = False
        """Whether there was a call."""
        self.acted_since = False
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
        self._unsaid = 0
        """Characters that came as deltas and stand in no message yet."""
        self._unsaid_of = ""
        """The item that they are of."""
        self._shows = shows
        self._unseen: dict[str, _Whole] = {}
        """Calls that are over and whose result is still to be seen by others, by the item's id."""
        self._usage: dict[str, dict[str, int]] = {}
        self._failure: dict[str, Any] = {}

    def take(self, method: str, params: dict[str, Any]) -> list[AgentEvent]:
        """One notification."""
        take = _TAKE.get(method)
        other = params.get("threadId") not in (None, self.thread) and (self.thread or method not in EARLY)
        if take is not None and not other:
            return take(self, params)
        if method in SILENT or (method == USED and not self.thread):
            # What a conversation has used so far is told before it is open again, and is not of this run.
            return []
        return [self._kept(method, params)]

    def _kept(self, method: str, body: Json) -> Warned:
        return carry("raw_message", body, ts=self._now(), message=f"a message of the kind {method[:80]}")

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
        self._unsaid, self._unsaid_of = self._unsaid + len(text), id
        return [*broken, AssistantDelta(ts=self._now(), text=text)]

    def _take_back(self, id: str) -> list[AgentEvent]:
        """Take back the words of an item that never became whole, when another takes its place."""
        if not self._unsaid or self._unsaid_of == id:
            return []
        chars, self._unsaid = self._unsaid, 0
        return [take_back(BROKEN, chars, ts=self._now())]

    def _thought(self, params: dict[str, Any]) -> list[AgentEvent]:
        text = params.get("delta")
        self._deltas.add(str(params.get("itemId")))
        return [self._reasoning(text)] if isinstance(text, str) and text else []

    def _reasoning(self, text: str) -> Reasoning:
        return Reasoning(ts=self._now(), text="", ext={"reasoning": {"text": text}})

    def _used(self, params: dict[str, Any]) -> list[AgentEvent]:
        turn, usage = str(params.get("turnId")), params.get("tokenUsage")
        last = usage.get("last") if isinstance(usage, dict) else None
        if turn not in self.turns or not isinstance(last, dict):
            return []
        known = self._usage.setdefault(turn, {})
        for ours, theirs in _COUNTERS.items():
            if _is_count(last.get(theirs)):
                known[ours] = known.get(ours, 0) + last[theirs]
        self._pay(last)
        self.answers += 1
        self.goes_on, self.acted_since = self.acted_since, False
        body = {name: value for name, value in msgspec.to_builtins(self.used()).items() if value is not None}
        reason = "tool_use" if self.goes_on else "end_turn"
        return [
            carry("usage", body, ts=self._now(), message="tokens so far"),
            carry("turn", {"stop_reason": reason}, ts=self._now(), message="a turn of the model ended"),
        ]

    def _pay(self, last: Mapping[str, Any]) -> None:
        names = {"input": "inputTokens", "output": "outputTokens", "cache_read": "cachedInputTokens"}
        counted = {ours: last[theirs] for ours, theirs in names.items() if _is_count(last.get(theirs))}
        cost = actual(self.price, Counted(**counted))
        self.micros = None if self.micros is None or cost is None else self.micros + cost

    def used(self) -> Usage:
        """Tokens of this run so far; a counter that was never told stays unknown."""
        sums: dict[str, int] = {}
        for row in self._usage.values():
            for name, value in row.items():
                sums[name] = sums.get(name, 0) + value
        cost = None if self.micros is None or not self.answers else self.micros / MICROS
        return Usage(**sums, request_units=self.answers or None, estimated_cost_usd=cost)

    # Items ------------------------------------------------------------------------------------------------------------

    def _begun(self, params: dict[str, Any]) -> list[AgentEvent]:
        item = mapping(params.get("item"))
        call = self._called(item)
        if call is None:
            return []
        return self._call(str(item.get("id")), call)

    def _called(self, item: Mapping[str, Any]) -> Call | None:
        call = called(item, self._root, self.patch_name)
        if self._shows and call is not None and call.kind == "commandExecution":
            input = mapping(call.input)
            call.input = {**input, "command": unheld(str(input["command"]))}
        return call

    def _call(self, id: str, call: Call) -> list[AgentEvent]:
        if id in self.calls:
            return []
        self.acted = self.acted_since = True
        self.spoke = False
        if len(self.calls) < CALLS_MAX:
            self.calls[id] = call
        return [ToolCall(ts=self._now(), tool_name=call.name, input=call.input, tool_use_id=id)]

    def _output(self, params: dict[str, Any]) -> list[AgentEvent]:
        text = params.get("delta")
        if not isinstance(text, str) or not text or self._shows:
            return []
        last = text.rstrip("\n").rpartition("\n")[2][:200]
        return [carry("output", {"stream": "stdout", "text": text}, ts=self._now(), message=last or "output")]

    def _whole(self, params: dict[str, Any]) -> list[AgentEvent]:
        item = mapping(params.get("item"))
        kind, id = str(item.get("type")), str(item.get("id"))
        if kind in QUIET_ITEMS:
            return []
        if kind == "agentMessage":
            return self._message(id, str(item.get("text") or ""))
        if kind == "reasoning":
            parts = [part for name in ("summary", "content") for part in item.get(name) or () if isinstance(part, str)]
            return [self._reasoning("\n".join(parts))] if parts and id not in self._deltas else []
        if kind == "plan":
            return [carry("task", {"plan": item.get("text")}, ts=self._now(), message="the agent told its plan")]
        call = self._called(item)
        if call is None:
            return [self._kept(f"item {kind}", item)]
        began = self._call(id, call)
        self.calls.pop(id, None)
        return [*began, *self._ended(id, call, item)]

    def _message(self, id: str, text: str) -> list[AgentEvent]:
        self.text, self.spoke = text, bool(text)
        if not text:
            return []
        broken, self._unsaid = self._take_back(id), 0
        return [*broken, AssistantMessage(ts=self._now(), text=text)]

    def _ended(self, id: str, call: Call, item: dict[str, Any]) -> list[AgentEvent]:
        denied = self.hidden.pop(id, None)
        if denied is not None or item.get("status") == "declined":
            return [self._result(id, call, denied or "the call was declined", failed=True)]
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
            events.append(self._ran(call, item, str(said or "")))
        elif call.kind == "fileChange" and not whole.failed:
            events += [
                FileChanged(ts=self._now(), path=path, summary=how) for path, how in changed_files(item, self._root)
            ]
        output = result_of(call, item, whole.failed) if shown is None else shown
        return [*events, self._result(id, call, output, failed=is_error)]

    def unseen(self, id: str) -> tuple[Call, bool] | None:
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
        whole = self._unseen.pop(id, None) if _passed_over(run) else None
        return self._told(id, whole, None, whole.failed) if whole is not None else []

    def _ran(self, call: Call, item: dict[str, Any], said: str) -> CommandExecuted:
        code = item.get("exitCode")
        code = code if isinstance(code, int) and not isinstance(code, bool) and -(2**31) <= code < 2**31 else None
        preview = said.encode("utf-8", "replace")[:PREVIEW_BYTES_MAX]
        command = mapping(call.input).get("command")
        return CommandExecuted(
            ts=self._now(), command=str(command), exit_code=code, output_preview=preview.decode(errors="ignore")
        )

    def _result(self, id: str, call: Call, output: Json, *, failed: bool) -> ToolResult:
        return ToolResult(ts=self._now(), tool_name=call.name, output=output, is_error=failed, tool_use_id=id)

    # Ends -------------------------------------------------------------------------------------------------------------

    def _trouble(self, params: dict[str, Any]) -> list[AgentEvent]:
        error = mapping(params.get("error"))
        if params.get("willRetry") is not True:
            self._failure = error
            return []
        words = "; ".join(str(error[name]) for name in ("message", "additionalDetails") if error.get(name))
        body = {"reason": _info(error), "message": words[:500]}
        if self._unsaid:
            body["taken_back"], self._unsaid = self._unsaid, 0
        return [carry("retry", body, ts=self._now(), message=f"the model is asked again: {words[:200]}")]

    def _over(self, params: dict[str, Any]) -> list[AgentEvent]:
        turn = mapping(params.get("turn"))
        error = mapping(turn.get("error")) or self._failure
        words = "; ".join(str(error[name]) for name in ("message", "additionalDetails") if error.get(name))
        ending = Ending(str(turn.get("id")), str(turn.get("status")), words, _info(error))
        if ending.turn in self.turns:
            self.endings.append(ending)
        self._failure = {}
        return []

    def close(self) -> list[AgentEvent]:
        """The end of the run: a call that is still open gets its result."""
        left, self.calls = self.calls, {}
        words = "the run ended before the tool did"
        unseen, self._unseen = self._unseen, {}
        held = [event for id, whole in unseen.items() for event in self._told(id, whole, UNSEEN, True)]
        return held + [self._result(id, call, self.hidden.pop(id, words), failed=True) for id, call in left.items()]

    # Words ------------------------------------------------------------------------------------------------------------

    def _warning(self, params: dict[str, Any]) -> list[AgentEvent]:
        words = str(params.get("message") or params.get("summary") or "")
        told = words and not any(all(word in words for word in known) for known in QUIET_WARNINGS)
        return [Warned(ts=self._now(), message=f"the agent warns: {words[:500]}")] if told else []

    def _server(self, params: dict[str, Any]) -> list[AgentEvent]:
        if params.get("status") not in ("failed", "cancelled"):
            return []
        words = f"the MCP server {params.get('name')!r} is not there: {params.get('error') or params['status']}"
        return [Warned(ts=self._now(), message=words[:500])]

    def _plan(self, params: dict[str, Any]) -> list[AgentEvent]:
        return [carry("task", {"plan": params.get("plan")}, ts=self._now(), message="the agent told its plan")]

    def _rerouted(self, params: dict[str, Any]) -> list[AgentEvent]:
        body = {name: params.get(name) for name in ("fromModel", "toModel", "reason")}
        return [carry("loss", body, ts=self._now(), message=f"another model answers: {body['toModel']}")]


_TAKE: Final[dict[str, Callable[[Story, dict[str, Any]], list[AgentEvent]]]] = {
    "item/agentMessage/delta": Story._delta,
    "item/reasoning/summaryTextDelta": Story._thought,
    "item/reasoning/textDelta": Story._thought,
    "item/commandExecution/outputDelta": Story._output,
    "hook/completed": Story._hooked,
    "item/started": Story._begun,
    "item/completed": Story._whole,
    USED: Story._used,
    "turn/plan/updated": Story._plan,
    "turn/started": Story._started,
    "turn/completed": Story._over,
    "error": Story._trouble,
    "warning": Story._warning,
    "mcpServer/startupStatus/updated": Story._server,
    "guardianWarning": Story._warning,
    "configWarning": Story._warning,
    "deprecationNotice": Story._warning,
    "model/rerouted": Story._rerouted,
}


# Parts ----------------------------------------------------------------------------------------------------------------


def _info(error: Mapping[str, Any]) -> Json:
    """What kind of failure it is; the member is named after the agent."""
    return next((value for name, value in error.items() if name.endswith("ErrorInfo")), None)


def _passed_over(run: Mapping[str, Any]) -> bool:
    return run.get("eventName") == "postToolUse" and run.get("status") == "failed"


def _is_count(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
