"""What such an agent tells of one run, as events of the contract.

Deltas come as the model's own stream, then each block of a message once more whole; results of tools come as messages
of the user. Words of a sub-agent are told as those of a task; what the contract has no word for is kept as it came.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

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

PREVIEW_BYTES_MAX: Final = 8192
"""Longest preview of a command's output, as the contract has it."""

CALLS_MAX: Final = 10_000
"""Calls that are remembered: an agent that makes more is in a loop, and its calls are still told."""

SILENT: Final = frozenset(
    {"status", "session_state_changed", "hook_started", "hook_progress", "ui_invalidate", "thinking_tokens"}
)
"""Messages of the system that say nothing about the work."""

REFUSALS: Final = (401, 403)
"""Answers of the model's service that another try does not change, except where a login is renewed for it."""
RETRIES_REFUSED_MAX: Final = 1

THERE: Final = ("connected", "pending")
"""What the agent says of an MCP server whose tools it has, or is still to have."""

TASKS: Final = frozenset({"task_started", "task_updated", "task_progress", "task_notification"})

WRITING: Final = {"Write": "file_path", "Edit": "file_path", "MultiEdit": "file_path", "NotebookEdit": "notebook_path"}
"""Tools that change one file → where their input names it."""

COMMAND: Final = "Bash"
STRUCTURED: Final = "StructuredOutput"
"""The tool that a model gives an answer of a wanted shape with: no tool of the work."""

_EXIT: Final = re.compile(r"(?:Error: )?Exit code (-?\d{1,10})\n?")

_COUNTERS: Final = {
    "input_tokens": ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"),
    "output_tokens": ("output_tokens",),
    "cache_read_tokens": ("cache_read_input_tokens",),
    "cache_write_tokens": ("cache_creation_input_tokens",),
}
_TOTALS: Final = {
    "input_tokens": ("inputTokens", "cacheReadInputTokens", "cacheCreationInputTokens"),
    "output_tokens": ("outputTokens",),
    "cache_read_tokens": ("cacheReadInputTokens",),
    "cache_write_tokens": ("cacheCreationInputTokens",),
}
"""The contract's counters → the agent's whose sum they are: here all that was sent counts as input."""


class Call(msgspec.Struct):
    """A tool call that has no result yet."""

    name: str
    input: Json
    parent: str | None


class Result(msgspec.Struct, frozen=True):
    """How the agent says that its work ended."""

    subtype: str
    is_error: bool
    reason: str
    status: int | None
    text: str
    structured: Json
    queued: bool
    """Words of the user wait, and another result follows."""
    raw: dict[str, Any]


class Story:
    """One run.

    Args:
        now: gives the time of an event.
        root: of the workspace; paths below it are told relative to it.
        tools: the agent's names of tools → the contract's.
    """

    def __init__(self, now: Callable[[], str], root: str, tools: Mapping[str, str]) -> None:
        self._now, self._root, self._tools = now, root, tools
        self.calls: dict[str, Call] = {}
        """Calls without a result, by id."""
        self.offered: frozenset[str] | None = None
        """The tools that the agent has; None before it said so."""
        self.tasks = 0
        """Sub-agents that are still at work."""
        self.acted = False
        self.idle = False
        self.error: str | None = None
        """The agent's own word for a failure of its model."""
        self.results: list[Result] = []
        self.refused = False
        """Whether its last result is ours: the agent goes on to ask a service that refuses it."""
        self.hidden: dict[str, str] = {}
        """By a call's id: what is told, as an error, in place of a result that nobody may see."""
        self.given: dict[str, Json] = {}
        """By a call's id: the input that its tool got in place of its model's."""
        self._streamed: set[str] = set()
        self._open: str | None = None
        """The message that the model streams."""
        self._begun = -1
        """The latest block of it."""
        self._unsaid = 0
        """Characters that came as deltas and stand in no message yet."""
        self._unsaid_of: str | None = None
        """The message that they are of."""
        self._live: dict[str, dict[str, int]] = {}

    def take(self, message: dict[str, Any]) -> list[AgentEvent]:
        """One message of the agent."""
        kind = message["type"]
        if kind == "stream_event":
            return self._delta(message) if message.get("parent_tool_use_id") is None else []
        if kind == "assistant":
            return self._assistant(message)
        if kind == "user":
            return self._results(message)
        if kind == "system":
            return self._system(message)
        if kind == "result":
            self.results.append(read_result(message))
            self._open = None  # What a stopped turn left open is not asked anew.
            return []
        return [] if kind in ("keep_alive", "tool_progress") else [self._kept(message)]

    def _kept(self, message: Json, what: str = "message") -> Warned:
        kind = message.get("type") if isinstance(message, dict) else None
        words = f"a {what} of the kind {str(kind)[:80]}"
        return carry("raw_message", message, ts=self._now(), message=words)

    # The system ------------------------------------------------------------------------------------------------------

    def _system(self, message: dict[str, Any]) -> list[AgentEvent]:
        kind = message.get("subtype")
        if kind == "session_state_changed":
            self.idle = message.get("state") == "idle"
        if kind == "background_tasks_changed":
            listed = message.get("tasks")
            agents = listed if isinstance(listed, list) else []
            self.tasks = sum(isinstance(one, dict) and one.get("task_type") == "local_agent" for one in agents)
            return []
        if kind in SILENT:
            return []
        if kind == "init":
            return self._session(message)
        if kind == "api_retry":
            self._look_at_refusal(message)
            body: dict[str, Json] = {
                name: message[name]
                for name in ("attempt", "max_retries", "retry_delay_ms", "error_status", "error")
                if name in message
            }
            words = f"the model is asked again ({body.get('error_status') or body.get('error')})"
            return [carry("retry", body, ts=self._now(), message=words)]
        body = {name: value for name, value in message.items() if name not in ("type", "uuid", "session_id")}
        if kind in TASKS:
            return [carry("task", body, ts=self._now(), message=f"a task of its own: {str(kind)[5:]}")]
        if kind == "permission_denied":
            return [Warned(ts=self._now(), message=f"{message.get('tool_name')} was not allowed by the agent itself")]
        return [self._kept(message)]

    def _look_at_refusal(self, message: dict[str, Any]) -> None:
        status, attempt = message.get("error_status"), message.get("attempt")
        if status in REFUSALS and isinstance(attempt, int) and attempt > RETRIES_REFUSED_MAX:
            words = f"the model's service refuses the key or login ({status}, {message.get('error')})"
            self.results.append(Result("refused", True, "api_error", status, words, None, False, message))
            self.refused = True

    def _session(self, message: dict[str, Any]) -> list[AgentEvent]:
        first = self.offered is None
        tools = message.get("tools")
        self.offered = frozenset(one for one in tools if isinstance(one, str)) if isinstance(tools, list) else None
        if not first:
            return []
        names = {"id": "session_id", "model": "model", "mcp_servers": "mcp_servers"}
        body = {ours: message.get(theirs) for ours, theirs in names.items()}
        body["version"] = next((value for name, value in message.items() if name.endswith("_code_version")), None)
        named = carry("session", body, ts=self._now(), message=f"session {body['id']}")
        return [named, *self._absent(body["mcp_servers"])]

    def _absent(self, servers: Json) -> list[AgentEvent]:
        """The MCP servers that the agent could not reach: it goes to work without them, and says no word of it."""
        rows = [row for row in servers if isinstance(row, dict)] if isinstance(servers, list) else []
        return [
            Warned(ts=self._now(), message=f"the MCP server {row.get('name')!r} is not there: {row.get('status')}")
            for row in rows
            if row.get("status") not in THERE
        ]

    # The model --------------------------------------------------------------------------------------------------------

    def _delta(self, message: dict[str, Any]) -> list[AgentEvent]:
        event = message.get("event")
        if not isinstance(event, dict):
            return [self._kept(message)]
        kind = event.get("type")
        if kind == "message_start":
            return self._begin(event)
        if kind == "message_delta":
            return self._end_of_turn(event)
        if kind == "message_stop":
            return self._stopped(message.get("abandoned_blocks"))
        if kind == "content_block_start" and _is_count(event.get("index")):
            self._begun = event["index"]
        if kind != "content_block_delta" or not isinstance(event.get("delta"), dict):
            return []
        delta = event["delta"]
        if self._open is not None:
            self._streamed.add(f"{self._open} {delta.get('type')}")
        if delta.get("type") == "text_delta" and delta.get("text"):
            text = str(delta["text"])
            self._unsaid, self._unsaid_of = self._unsaid + len(text), self._open or self._unsaid_of
            return [AssistantDelta(ts=self._now(), text=text)]
        if delta.get("type") == "thinking_delta" and delta.get("thinking"):
            return [self._thought(text=str(delta["thinking"]))]
        if delta.get("type") == "signature_delta" and delta.get("signature"):
            return [self._thought(text="", signature=str(delta["signature"]))]
        return []

    def _thought(self, **body: str) -> Reasoning:
        return Reasoning(ts=self._now(), text="", ext={"reasoning": body})

    def _begin(self, event: dict[str, Any]) -> list[AgentEvent]:
        start = event.get("message")
        id = str(start.get("id")) if isinstance(start, dict) else "?"
        broken = self._broken(id)
        self._open, self._begun = id, -1
        if isinstance(start, dict):
            self._count(id, start.get("usage"))
        return broken

    def _broken(self, id: str) -> list[AgentEvent]:
        """What a message left that was begun and never ended, when another takes its place: the agent tells nothing."""
        is_left = self._open not in (None, id)
        if not is_left and (not self._unsaid or self._unsaid_of in (None, id)):
            return []
        self._open = None
        if self._unsaid:
            return [self._take_back()]
        return [carry("retry", {"reason": BROKEN}, ts=self._now(), message="the stream broke, and is asked anew")]

    def _stopped(self, abandoned: Json) -> list[AgentEvent]:
        """The end of the model's stream, also of one that broke: then it names the first block that is not whole."""
        first = abandoned.get("from_block_index") if isinstance(abandoned, dict) else None
        if not isinstance(first, int) or self._begun < first:
            self._open = None
            return []
        # Without words to take back it stays open: only another message shows that it was asked anew.
        if not self._unsaid:
            return []
        self._open = None
        return [self._take_back()]

    def _take_back(self) -> AgentEvent:
        chars, self._unsaid = self._unsaid, 0
        return take_back(BROKEN, chars, ts=self._now())

    def _end_of_turn(self, event: dict[str, Any]) -> list[AgentEvent]:
        if self._open is not None:
            self._count(self._open, event.get("usage"))
        delta = event.get("delta")
        reason = delta.get("stop_reason") if isinstance(delta, dict) else None
        events: list[AgentEvent] = []
        used = self.used()
        if used is not None:
            body = {name: value for name, value in msgspec.to_builtins(used).items() if value is not None}
            events.append(carry("usage", body, ts=self._now(), message="tokens so far"))
        if reason is not None:
            events.append(carry("turn", {"stop_reason": reason}, ts=self._now(), message="a turn of the model ended"))
        return events

    def _assistant(self, message: dict[str, Any]) -> list[AgentEvent]:
        whole, parent = message.get("message"), _text(message.get("parent_tool_use_id"))
        if not isinstance(whole, dict) or not isinstance(whole.get("content"), list):
            return [self._kept(message)]
        if isinstance(message.get("error"), str):
            self.error = message["error"]
            return []
        id = str(whole.get("id"))
        events = self._broken(id) if parent is None else []
        for block in whole["content"]:
            events += self._block(block, id, parent)
        return events

    def _block(self, block: Json, id: str, parent: str | None) -> list[AgentEvent]:
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(block, dict) or kind not in ("text", "thinking", "tool_use"):
            return [self._kept(block, "block of a message")]
        if kind == "tool_use":
            return self._called(block, parent)
        text = str(block.get(kind) or "")
        if parent is not None:
            body = {"parent_tool_use_id": parent, kind: text}
            return [carry("task", body, ts=self._now(), message="words of a sub-agent")] if text else []
        if kind == "text":
            self._unsaid = 0 if text else self._unsaid
            return [AssistantMessage(ts=self._now(), text=text)] if text else []
        if f"{id} thinking_delta" in self._streamed or not text:
            return []
        return [self._thought(text=text, signature=str(block.get("signature") or ""))]

    # Tools ------------------------------------------------------------------------------------------------------------

    def name(self, tool: str) -> str:
        """A tool as the contract calls it."""
        return self._tools.get(tool, tool)

    def _called(self, block: dict[str, Any], parent: str | None) -> list[AgentEvent]:
        id, tool, input = str(block.get("id")), str(block.get("name")), block.get("input")
        if tool == STRUCTURED:
            return []
        self.acted = True
        if len(self.calls) < CALLS_MAX:
            self.calls[id] = Call(tool, input, parent)
        return [
            ToolCall(ts=self._now(), tool_name=self.name(tool), input=input, tool_use_id=id, parent_tool_use_id=parent)
        ]

    def _results(self, message: dict[str, Any]) -> list[AgentEvent]:
        whole = message.get("message")
        content = whole.get("content") if isinstance(whole, dict) else None
        if not isinstance(content, list):
            return []
        events: list[AgentEvent] = []
        for block in content:
            if isinstance(block, dict) and block.get("type") == "tool_result":
                events += self._ended(block, message.get("tool_use_result"))
        return events

    def _ended(self, block: dict[str, Any], details: Json) -> list[AgentEvent]:
        id = str(block.get("tool_use_id"))
        call, given = self.calls.pop(id, None), self.given.pop(id, None)
        if call is None:
            return []
        if given is not None:
            call.input = given
        failed = block.get("is_error") is True
        output = said(block.get("content"))
        code = exit_code(output, details, failed)
        hidden = self.hidden.pop(id, None)
        output = output if hidden is None else hidden
        events: list[AgentEvent] = []
        if call.name == COMMAND and isinstance(call.input, dict) and (code is not None or isinstance(details, dict)):
            preview = (
                _EXIT.sub("", output, count=1).encode("utf-8", "replace")[:PREVIEW_BYTES_MAX].decode(errors="ignore")
            )
            events.append(
                CommandExecuted(
                    ts=self._now(), command=str(call.input.get("command")), exit_code=code, output_preview=preview
                )
            )
        path = call.input.get(WRITING[call.name]) if call.name in WRITING and isinstance(call.input, dict) else None
        if isinstance(path, str) and not failed:
            how = details.get("type") if isinstance(details, dict) else None
            events.append(FileChanged(ts=self._now(), path=self._relative(path), summary=str(how or call.name.lower())))
        return [*events, self._result(id, call, output, failed=failed or hidden is not None)]

    def _result(self, id: str, call: Call, output: Json, *, failed: bool) -> ToolResult:
        return ToolResult(
            ts=self._now(), tool_name=self.name(call.name), output=output, is_error=failed, tool_use_id=id
        )

    def _relative(self, path: str) -> str:
        if not path.startswith("/"):
            return path
        relative = os.path.relpath(path, self._root)
        return path if relative.startswith("..") else relative

    def close(self) -> list[AgentEvent]:
        """The end of the run: a call that is still open gets its result."""
        open_calls, self.calls = self.calls, {}
        words = "the run ended before the tool did"
        return [self._result(id, call, words, failed=True) for id, call in open_calls.items()]

    # Tokens -----------------------------------------------------------------------------------------------------------

    def _count(self, id: str, usage: Json) -> None:
        """Counters of one message of the model: the latest word counts, and they only grow."""
        if isinstance(usage, dict):
            known = self._live.setdefault(id, {})
            known |= {name: value for name, value in usage.items() if _is_count(value)}

    def used(self) -> Usage | None:
        """Tokens of the main conversation so far, from the model's own stream."""
        return _sum(self._live.values(), _COUNTERS)

    def total(self) -> tuple[Usage, list[str]]:
        """Tokens of the whole run, other conversations included, and the models that were asked."""
        rows: list[dict[str, Any]] = []
        models: dict[str, None] = {}
        for result in self.results:
            by_model = result.raw.get("model_usage_since_last_result")
            if not isinstance(by_model, dict):
                return self.used() or Usage(), list(models)
            models |= dict.fromkeys(by_model)
            rows += [row for row in by_model.values() if isinstance(row, dict)]
        counted = _sum(rows, _TOTALS)
        return counted or self.used() or Usage(), list(models)

    def cost_usd(self) -> float | None:
        """What the agent says that this run cost by its own list; None where it says nothing."""
        if not self.results:
            return None
        rows = [result.raw.get("model_usage_since_last_result") for result in self.results]
        costs = [
            one.get("costUSD") if isinstance(one, dict) else None
            for row in rows
            for one in (row.values() if isinstance(row, dict) else (None,))
        ]
        known = [cost for cost in costs if isinstance(cost, int | float) and not isinstance(cost, bool)]
        return round(sum(known), 9) if len(known) == len(costs) else None


def read_result(message: dict[str, Any]) -> Result:
    """The message that ends the work."""
    status, errors = message.get("api_error_status"), message.get("errors")
    words = message.get("result") or "; ".join(str(one) for one in errors if one) if isinstance(errors, list) else None
    return Result(
        subtype=str(message.get("subtype")),
        is_error=message.get("is_error") is True,
        reason=str(message.get("terminal_reason") or ""),
        status=status if _is_count(status) else None,
        text=str(words or message.get("result") or ""),
        structured=message.get("structured_output"),
        queued=bool(message.get("queued_turn_count")),
        raw=message,
    )


def said(content: Json) -> str:
    """The text of a tool's result."""
    if isinstance(content, str):
        return content
    parts = [one for one in content if isinstance(one, dict)] if isinstance(content, list) else []
    return "\n".join(str(one["text"]) for one in parts if isinstance(one.get("text"), str))


def exit_code(output: str, details: Json, failed: bool) -> int | None:
    """A command's exit code: none is said of one that went well, words say that of another; None where it goes on."""
    if not failed:
        left = isinstance(details, dict) and (details.get("interrupted") is True or "backgroundTaskId" in details)
        return None if left else 0
    match = _EXIT.match(output)
    value = int(match[1]) if match else None
    return value if value is not None and -(2**31) <= value < 2**31 else None


def _text(value: Json) -> str | None:
    return value if isinstance(value, str) else None


def _is_count(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _sum(rows: Iterable[Mapping[str, Any]], names: Mapping[str, tuple[str, ...]]) -> Usage | None:
    """Counters over several rows; one that no row has stays unknown."""
    found = list(rows)
    counters: dict[str, int] = {}
    for ours, theirs in names.items():
        values = [row[name] for row in found for name in theirs if _is_count(row.get(name))]
        if values:
            counters[ours] = sum(values)
    return Usage(**counters) if counters else None
