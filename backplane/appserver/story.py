"""What such an agent tells, as events of the contract.

An item is told when it begins and again when it is whole; its deltas between. A call is told once, and its result
once. Whatever has no word in the contract is kept as it came.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
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
from backplane.cost import MICROS, Price, actual
from backplane.ir import Usage as Counted

PREVIEW_BYTES_MAX: Final = 8192
"""Longest preview of a command's output, as the contract has it."""

CALLS_MAX: Final = 10_000
"""Calls that are open at once and remembered: an agent with more of them is in a loop."""

SILENT: Final = frozenset(
    {"thread/started", "thread/status/changed", "thread/readState/changed", "thread/settings/updated",
     "turn/diff/updated", "account/rateLimits/updated", "account/updated", "remoteControl/status/changed",
     "serverRequest/resolved", "item/reasoning/summaryPartAdded", "item/fileChange/outputDelta",
     "item/fileChange/patchUpdated", "item/plan/delta", "item/mcpToolCall/progress", "thread/name/updated",
     "item/commandExecution/terminalInteraction", "thread/closed", "hook/started", "hook/completed", "thread/compacted",
     "thread/environment/connected", "skills/changed", "app/list/updated", "mcpServer/startupStatus/updated"}
)  # fmt: skip
"""Notifications that say nothing about the work, or nothing that an item does not say, too."""

QUIET_ITEMS: Final = frozenset({"userMessage", "hookPrompt"})

_COUNTERS: Final = {
    "input_tokens": "inputTokens",
    "output_tokens": "outputTokens",
    "cache_read_tokens": "cachedInputTokens",
    "cache_write_tokens": "cacheWriteInputTokens",
}


class Call(msgspec.Struct):
    """A tool call whose result is still to come."""

    name: str
    input: Json
    kind: str
    """Of its item."""


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
    """

    def __init__(self, now: Callable[[], str], root: str) -> None:
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
        self._usage: dict[str, dict[str, int]] = {}
        self._failure: dict[str, Any] = {}

    def take(self, method: str, params: dict[str, Any]) -> list[AgentEvent]:
        """One notification."""
        take = _TAKE.get(method)
        other = params.get("threadId") not in (None, self.thread)
        if take is not None and not other:
            return take(self, params)
        if method in SILENT:
            return []
        return [self._kept(method, params)]

    def _kept(self, method: str, body: Json) -> Warned:
        return carry("raw_message", body, ts=self._now(), message=f"a message of the kind {method[:80]}")

    def _started(self, params: dict[str, Any]) -> list[AgentEvent]:
        self.current = str(_dict(params.get("turn")).get("id"))
        self.turns.add(self.current)
        return []

    # The model --------------------------------------------------------------------------------------------------------

    def _delta(self, params: dict[str, Any]) -> list[AgentEvent]:
        text = params.get("delta")
        self._deltas.add(str(params.get("itemId")))
        self.spoke = True
        return [AssistantDelta(ts=self._now(), text=text)] if isinstance(text, str) and text else []

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
        item = _dict(params.get("item"))
        call = called(item, self._root, self.patch_name)
        if call is None:
            return []
        return self._call(str(item.get("id")), call)

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
        if not isinstance(text, str) or not text:
            return []
        last = text.rstrip("\n").rpartition("\n")[2][:200]
        return [carry("output", {"stream": "stdout", "text": text}, ts=self._now(), message=last or "output")]

    def _whole(self, params: dict[str, Any]) -> list[AgentEvent]:
        item = _dict(params.get("item"))
        kind, id = str(item.get("type")), str(item.get("id"))
        if kind in QUIET_ITEMS:
            return []
        if kind == "agentMessage":
            return self._message(str(item.get("text") or ""))
        if kind == "reasoning":
            parts = [part for name in ("summary", "content") for part in item.get(name) or () if isinstance(part, str)]
            return [self._reasoning("\n".join(parts))] if parts and id not in self._deltas else []
        if kind == "plan":
            return [carry("task", {"plan": item.get("text")}, ts=self._now(), message="the agent told its plan")]
        call = called(item, self._root, self.patch_name)
        if call is None:
            return [self._kept(f"item {kind}", item)]
        began = self._call(id, call)
        self.calls.pop(id, None)
        return [*began, *self._ended(id, call, item)]

    def _message(self, text: str) -> list[AgentEvent]:
        self.text, self.spoke = text, bool(text)
        return [AssistantMessage(ts=self._now(), text=text)] if text else []

    def _ended(self, id: str, call: Call, item: dict[str, Any]) -> list[AgentEvent]:
        status = item.get("status")
        failed = status in ("failed", "declined") or item.get("success") is False
        denied = self.hidden.pop(id, None)
        if denied is not None or status == "declined":
            return [self._result(id, call, denied or "the call was declined", failed=True)]
        events: list[AgentEvent] = []
        if call.kind == "commandExecution":
            events.append(self._ran(call, item))
        elif call.kind == "fileChange" and not failed:
            events += [FileChanged(ts=self._now(), path=path, summary=how) for path, how in _changed(item, self._root)]
        return [*events, self._result(id, call, _result_of(call, item, failed), failed=failed)]

    def _ran(self, call: Call, item: dict[str, Any]) -> CommandExecuted:
        code = item.get("exitCode")
        code = code if isinstance(code, int) and not isinstance(code, bool) and -(2**31) <= code < 2**31 else None
        preview = str(item.get("aggregatedOutput") or "").encode("utf-8", "replace")[:PREVIEW_BYTES_MAX]
        command = _dict(call.input).get("command")
        return CommandExecuted(
            ts=self._now(), command=str(command), exit_code=code, output_preview=preview.decode(errors="ignore")
        )

    def _result(self, id: str, call: Call, output: Json, *, failed: bool) -> ToolResult:
        return ToolResult(ts=self._now(), tool_name=call.name, output=output, is_error=failed, tool_use_id=id)

    # Ends -------------------------------------------------------------------------------------------------------------

    def _trouble(self, params: dict[str, Any]) -> list[AgentEvent]:
        error = _dict(params.get("error"))
        if params.get("willRetry") is not True:
            self._failure = error
            return []
        words = "; ".join(str(error[name]) for name in ("message", "additionalDetails") if error.get(name))
        body = {"reason": _info(error), "message": words[:500]}
        return [carry("retry", body, ts=self._now(), message=f"the model is asked again: {words[:200]}")]

    def _over(self, params: dict[str, Any]) -> list[AgentEvent]:
        turn = _dict(params.get("turn"))
        error = _dict(turn.get("error")) or self._failure
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
        return [self._result(id, call, self.hidden.pop(id, words), failed=True) for id, call in left.items()]

    # Words ------------------------------------------------------------------------------------------------------------

    def _warning(self, params: dict[str, Any]) -> list[AgentEvent]:
        words = params.get("message") or params.get("summary")
        return [Warned(ts=self._now(), message=f"the agent warns: {str(words)[:500]}")] if words else []

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
    "item/started": Story._begun,
    "item/completed": Story._whole,
    "thread/tokenUsage/updated": Story._used,
    "turn/plan/updated": Story._plan,
    "turn/started": Story._started,
    "turn/completed": Story._over,
    "error": Story._trouble,
    "warning": Story._warning,
    "guardianWarning": Story._warning,
    "configWarning": Story._warning,
    "model/rerouted": Story._rerouted,
}


# Items as calls of tools ----------------------------------------------------------------------------------------------


def called(item: Mapping[str, Any], root: str, patch_name: str | None = None) -> Call | None:
    """The tool call that an item is; None for an item that is none."""
    kind = str(item.get("type"))
    if kind == "commandExecution":
        input: dict[str, Json] = {"command": plain_command(str(item.get("command") or ""))}
        if item.get("cwd") not in (None, root):
            input["cwd"] = item["cwd"]
        return Call("bash", input, kind)
    if kind == "fileChange":
        changes = [_change(change, root) for change in item.get("changes") or () if isinstance(change, dict)]
        kinds = operations({"changes": changes})
        return Call(patch_name or (kinds[0] if len(kinds) == 1 else "apply_patch"), {"changes": changes}, kind)
    if kind == "mcpToolCall":
        return Call(f"mcp__{item.get('server')}__{item.get('tool')}", item.get("arguments"), kind)
    if kind == "webSearch":
        return Call("web_search", {"query": item.get("query")}, kind)
    if kind == "imageView":
        return Call("read_file", {"path": item.get("path")}, kind)
    if kind == "dynamicToolCall":
        return Call(str(item.get("tool")), item.get("arguments"), kind)
    return None


def operations(patch: Json) -> list[str]:
    """What a patch does, as the contract's tools are called."""
    changes = _dict(patch).get("changes")
    kinds = [change["kind"] for change in changes if isinstance(change, dict)] if isinstance(changes, list) else []
    return list(dict.fromkeys("write_file" if kind == "add" else "edit_file" for kind in kinds))


def plain_command(command: str) -> str:
    """A command without the shell that the agent puts around it."""
    try:
        words = shlex.split(command)
    except ValueError:
        return command
    around = len(words) == 3 and os.path.basename(words[0]) in _SHELLS and words[1] in ("-lc", "-c")
    return words[2] if around else command


_SHELLS: Final = ("bash", "sh", "zsh", "dash", "ash")


def _change(change: Mapping[str, Any], root: str) -> dict[str, Json]:
    kind, diff = _dict(change.get("kind")), str(change.get("diff") or "")
    sign = {"add": "+", "delete": "-"}.get(str(kind.get("type")))
    # A whole file is no patch: without a sign its lines could read like one.
    text = "".join(f"{sign}{line}" for line in diff.splitlines(keepends=True)) if sign else diff
    made: dict[str, Json] = {"path": relative(str(change.get("path")), root), "kind": kind.get("type"), "diff": text}
    if kind.get("move_path"):
        made["move_path"] = relative(str(kind["move_path"]), root)
    return made


def _changed(item: Mapping[str, Any], root: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for change in item.get("changes") or ():
        made = _change(_dict(change), root)
        pairs.append((str(made["path"]), str(made["kind"])))
        if "move_path" in made:
            pairs.append((str(made["move_path"]), "moved here"))
    return pairs


def relative(path: str, root: str) -> str:
    """A path below the root relative to it; any other as it is."""
    if not path.startswith("/"):
        return path
    short = os.path.relpath(path, root)
    return path if short == ".." or short.startswith("../") else short


def _result_of(call: Call, item: Mapping[str, Any], failed: bool) -> Json:
    if call.kind == "commandExecution":
        return str(item.get("aggregatedOutput") or "")
    if call.kind == "mcpToolCall":
        return item.get("error") if failed and item.get("error") else item.get("result")
    if call.kind == "dynamicToolCall":
        return item.get("contentItems")
    if call.kind == "webSearch":
        return {"action": item.get("action"), "results": item.get("results")}
    return str(item.get("status") or "done")


def _info(error: Mapping[str, Any]) -> Json:
    """What kind of failure it is; the member is named after the agent."""
    return next((value for name, value in error.items() if name.endswith("ErrorInfo")), None)


def _dict(value: Json) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_count(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
