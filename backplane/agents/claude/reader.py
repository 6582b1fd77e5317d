"""Translates Claude Code's messages to events of the contract.

Deltas come as the model's own stream, then each block of a message again, complete; results of tools come as messages
of the user. A sub-agent's text is reported as a task's; a message that has no event in the contract is kept unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Final

import msgspec

from backplane.agents.calls import OpenCall, read_exit
from backplane.agents.events import is_count, mapping, mappings
from backplane.agents.reader import EventReader as BaseReader
from backplane.agents.reader import counts_of
from backplane.contract.canonical import Json
from backplane.contract.deltas import BROKEN
from backplane.contract.events import AgentEvent
from backplane.contract.receipt import Usage
from backplane.protocol.jsonrpc import Notification
from backplane.upstream.prices import price_of

REFUSALS: Final = (401, 403)
"""HTTP statuses of the model's service that a retry does not change, unless a login is renewed for it."""
RETRIES_REFUSED_MAX: Final = 1

THERE: Final = ("connected", "pending")
"""States of an MCP server whose tools the agent has or will have."""

WRITING: Final = {"Write": "file_path", "Edit": "file_path", "MultiEdit": "file_path", "NotebookEdit": "notebook_path"}
"""Tool that changes one file → member of its input that names the file."""

COMMAND: Final = "Bash"
STRUCTURED: Final = "StructuredOutput"
"""Tool by which a model gives an answer that matches a schema; not reported as a tool call."""

_EXIT: Final = re.compile(r"\A(?:Error: )?Exit code (-?\d{1,10})\n?")

_COUNTERS: Final = {
    "input": ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"), "output": ("output_tokens",),
    "cache_read": ("cache_read_input_tokens",), "cache_write": ("cache_creation_input_tokens",),
}  # fmt: skip
_TOTALS: Final = {
    "input": ("inputTokens", "cacheReadInputTokens", "cacheCreationInputTokens"), "output": ("outputTokens",),
    "cache_read": ("cacheReadInputTokens",), "cache_write": ("cacheCreationInputTokens",),
}  # fmt: skip


class TurnResult(msgspec.Struct, frozen=True):
    """End of the agent's work, as reported by the agent."""

    subtype: str
    is_error: bool
    reason: str
    status: int | None
    text: str
    structured: Json
    queued: bool
    """True if input of the user waits, so that another result follows."""
    raw: dict[str, Any]


class EventReader(BaseReader):
    """Reads one conversation's messages; the program itself enforces budget and turns, so they are not counted here."""

    def __init__(self, now: Callable[[], str], root: str, tools: Mapping[str, str]) -> None:
        super().__init__(now, root, tools)
        self._is_named = False
        """True if the conversation's id was reported; the agent repeats it at the beginning of each turn."""
        self.tasks = 0
        """Number of sub-agents that are still at work."""
        self.idle = False
        self.error: str | None = None
        """The agent's own name for a failure of its model; None without one."""
        self.results: list[TurnResult] = []
        self.refused = False
        """True if we made the last result, because the agent repeats a request that its service refuses."""
        self._open: str | None = None
        """Id of the message that the model streams; None without one."""
        self._begun = -1
        """Index of that message's latest block."""
        self._live: dict[str, dict[str, int]] = {}

    def read(self, message: Notification) -> list[AgentEvent]:
        """Read one message; for messages of the system and of the model's stream, the kind includes their subtype."""
        kind, data = message.method, message.params
        if kind == "system":
            kind = f"system/{data.get('subtype')}"
        elif kind == "stream_event" and isinstance(data.get("event"), dict):
            kind = f"stream/{data['event'].get('type')}" if data.get("parent_tool_use_id") is None else "stream/"
        return self._read(kind, data)

    def _result_of_turn(self, message: dict[str, Any]) -> list[AgentEvent]:
        self.results.append(read_result(message))
        self._open = None  # A message that a stopped turn left open is not requested again.
        return []

    # The system ------------------------------------------------------------------------------------------------------

    def _state(self, message: dict[str, Any]) -> list[AgentEvent]:
        self.idle = message.get("state") == "idle"
        return []

    def _background(self, message: dict[str, Any]) -> list[AgentEvent]:
        self.tasks = sum(one.get("task_type") == "local_agent" for one in mappings(message.get("tasks")))
        return []

    def _task(self, message: dict[str, Any]) -> list[AgentEvent]:
        body = {name: value for name, value in message.items() if name not in ("type", "uuid", "session_id")}
        return [self._make.carried("task", body, f"a task of its own: {str(message['subtype'])[5:]}")]

    def _not_allowed(self, message: dict[str, Any]) -> list[AgentEvent]:
        return [self._make.warning(f"{message.get('tool_name')} was not allowed by the agent itself")]

    def _limit(self, message: dict[str, Any]) -> list[AgentEvent]:
        """Store the reset time of a limit of the user's plan (`rate_limit_event`)."""
        info = mapping(message.get("rate_limit_info"))
        at = info.get("resetsAt")
        is_reached = info.get("status") == "rejected" and isinstance(at, int)
        self.resets_at = float(at) if is_reached else None  # type: ignore[arg-type]
        return [self._make.kept("rate_limit_event", message)]

    def _retry(self, message: dict[str, Any]) -> list[AgentEvent]:
        status, attempt = message.get("error_status"), message.get("attempt")
        if status in REFUSALS and isinstance(attempt, int) and attempt > RETRIES_REFUSED_MAX:
            words = f"the model's service refuses the key or login ({status}, {message.get('error')})"
            self.results.append(TurnResult("refused", True, "api_error", status, words, None, False, message))
            self.refused = True
        names = ("attempt", "max_retries", "retry_delay_ms", "error_status", "error")
        body = {name: message[name] for name in names if name in message}
        words = f"the model is asked again ({body.get('error_status') or body.get('error')})"
        return [self._make.carried("retry", body, words)]

    def _session(self, message: dict[str, Any]) -> list[AgentEvent]:
        if self._is_named:
            return []
        self._is_named = True
        names = {"id": "session_id", "model": "model", "mcp_servers": "mcp_servers"}
        body = {ours: message.get(theirs) for ours, theirs in names.items()}
        body["version"] = next((value for name, value in message.items() if name.endswith("_code_version")), None)
        # The agent silently works without a server that it could not reach.
        gone = [row for row in mappings(body["mcp_servers"]) if row.get("status") not in THERE]
        return [
            self._make.carried("session", body, f"session {body['id']}"),
            *(self._make.gone(row.get("name"), row.get("status")) for row in gone),
        ]

    # The model --------------------------------------------------------------------------------------------------------

    def _begin(self, message: dict[str, Any]) -> list[AgentEvent]:
        start = mapping(message["event"].get("message"))
        id = str(start.get("id"))
        broken = self._broken(id)
        self._open, self._begun = id, -1
        self._count_message(id, start.get("usage"))
        return broken

    def _block_begun(self, message: dict[str, Any]) -> list[AgentEvent]:
        index = message["event"].get("index")
        self._begun = index if is_count(index) else self._begun
        return []

    def _delta(self, message: dict[str, Any]) -> list[AgentEvent]:
        delta = mapping(message["event"].get("delta"))
        kind = delta.get("type")
        if kind == "signature_delta" and delta.get("signature"):
            return [self._make.thought("", signature=str(delta["signature"]))]
        if kind == "thinking_delta":
            return self._thoughts(delta.get("thinking"), self._open)
        return self._piece(delta.get("text"), self._open or self._of or "") if kind == "text_delta" else []

    def _broken(self, id: str) -> list[AgentEvent]:
        """Report that an unfinished message does not count, if a message with another id replaces it."""
        is_left = self._open not in (None, id)
        if not is_left and (not self._chars or self._of in (None, id)):
            return []
        self._open = None
        if self._chars:
            return self.take_back()
        return [self._make.carried("retry", {"reason": BROKEN}, "the stream broke, and is asked anew")]

    def _stopped(self, message: dict[str, Any]) -> list[AgentEvent]:
        """Read the end of the model's stream; if the stream broke, it names the first block that is not complete."""
        first = mapping(message.get("abandoned_blocks")).get("from_block_index")
        is_broken = isinstance(first, int) and self._begun >= first
        # Without text to take back, the message stays open: the next one shows that it was requested again.
        if self._chars or not is_broken:
            self._open = None
        return self.take_back() if is_broken else []

    def _end_of_turn(self, message: dict[str, Any]) -> list[AgentEvent]:
        event = message["event"]
        if self._open is not None:
            self._count_message(self._open, event.get("usage"))
        reason, used = mapping(event.get("delta")).get("stop_reason"), self._used_so_far()
        events = [self._make.used(used)] if used is not None else []
        return [*events, self._make.turn(reason)] if reason is not None else events

    def _assistant(self, message: dict[str, Any]) -> list[AgentEvent]:
        whole, parent = message.get("message"), message.get("parent_tool_use_id")
        parent = parent if isinstance(parent, str) else None
        if not isinstance(whole, dict) or not isinstance(whole.get("content"), list):
            return [self._make.kept("assistant", message)]
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
            return [self._make.kept(f"block {kind}", block)]
        if kind == "tool_use":
            tool = str(block.get("name"))
            call = OpenCall(str(block.get("id")), tool, self.name(tool), block.get("input"))
            return [] if tool == STRUCTURED else self._call(call, parent)
        text = str(block.get(kind) or "")
        if parent is not None:
            body = {"parent_tool_use_id": parent, kind: text}
            return [self._make.carried("task", body, "words of a sub-agent")] if text else []
        if kind == "thinking":
            return self._whole_thought(text, id, signature=str(block.get("signature") or ""))
        return self._message(text) if text else []

    # Tools ------------------------------------------------------------------------------------------------------------

    def _results(self, message: dict[str, Any]) -> list[AgentEvent]:
        rows, events = mappings(message.get("tool_result_meta")), list[AgentEvent]()
        unrun = {row.get("id") for row in rows if row.get("non_execution_kind") is not None}
        for block in mappings(mapping(message.get("message")).get("content")):
            if block.get("type") == "tool_result":
                has_run = block.get("tool_use_id") not in unrun
                events += self._ended(block, mapping(message.get("tool_use_result")), has_run=has_run)
        return events

    def _ended(self, block: dict[str, Any], details: dict[str, Any], *, has_run: bool) -> list[AgentEvent]:
        id = str(block.get("tool_use_id"))
        call = self.calls.open.get(id)
        if call is None:
            return []
        failed, output, input = block.get("is_error") is True, said(block.get("content")), self.calls.input_of(call)
        if not has_run:
            return self.calls.end(id, f"policy_denied: a check of the agent's own: {output}", failed=True)
        code, text = read_exit(_EXIT, output, failed=failed)
        # A command that still runs, or was cut off, has no exit code.
        if not failed and (details.get("interrupted") is True or "backgroundTaskId" in details):
            code = None
        is_command = call.tool == COMMAND and (code is not None or bool(details))
        path = mapping(input).get(WRITING.get(call.tool, ""))
        how = str(details.get("type") or call.tool.lower())
        changes = [(path, how)] if isinstance(path, str) and not failed else []
        return self.calls.end(id, output, failed=failed, ran=(code, text) if is_command else None, changes=changes)

    # Tokens -----------------------------------------------------------------------------------------------------------

    def _count_message(self, id: str, usage: Json) -> None:
        """Store the latest counters of one of the model's messages, which only grow."""
        known = self._live.setdefault(id, {})
        known |= {name: value for name, value in mapping(usage).items() if is_count(value)}

    def _used_so_far(self) -> Usage | None:
        """Return the tokens of the main conversation, from the model's own stream."""
        return _usage(self._live.values(), _COUNTERS)

    def used(self) -> Usage:
        """Return the tokens of the whole run, with those of sub-agents, and their cost by the agent's prices."""
        rows = [result.raw.get("model_usage_since_last_result") for result in self.results]
        models = [(name, mapping(one)) for row in rows for name, one in mapping(row).items()]
        counted = _usage([one for _, one in models], _TOTALS) if all(isinstance(row, dict) for row in rows) else None
        used = counted or self._used_so_far() or Usage()
        costs = [one.get("costUSD") for _, one in models]
        known = [cost for cost in costs if isinstance(cost, int | float) and not isinstance(cost, bool)]
        # For a model without a list price the agent uses another model's price.
        is_priced = counted is not None and all(price_of(name) is not None for name, _ in models)
        if not is_priced or len(known) != len(costs):
            return used
        return msgspec.structs.replace(used, estimated_cost_usd=round(sum(known), 9))

    SILENT = (
        "keep_alive", "tool_progress", "stream/", "system/status", "system/hook_started", "system/hook_progress",
        "system/ui_invalidate", "system/thinking_tokens",
    )  # fmt: skip
    READS: ClassVar = {
        "stream/message_start": _begin,
        "stream/content_block_start": _block_begun,
        "stream/content_block_delta": _delta,
        "stream/message_delta": _end_of_turn,
        "stream/message_stop": _stopped,
        "assistant": _assistant,
        "user": _results,
        "system/init": _session,
        "system/session_state_changed": _state,
        "system/background_tasks_changed": _background,
        "system/api_retry": _retry,
        "system/permission_denied": _not_allowed,
        **dict.fromkeys((f"system/task_{word}" for word in ("started", "updated", "progress", "notification")), _task),
        "rate_limit_event": _limit,
        "result": _result_of_turn,
    }


def read_result(message: dict[str, Any]) -> TurnResult:
    """Read the message that ends the work."""
    status, errors = message.get("api_error_status"), message.get("errors")
    words = "; ".join(str(one) for one in errors if one) if isinstance(errors, list) else ""
    return TurnResult(
        subtype=str(message.get("subtype")),
        is_error=message.get("is_error") is True,
        reason=str(message.get("terminal_reason") or ""),
        status=status if is_count(status) else None,
        text=str(message.get("result") or words),
        structured=message.get("structured_output"),
        queued=bool(message.get("queued_turn_count")),
        raw=message,
    )


def said(content: Json) -> str:
    """Return the text of a tool's result."""
    if isinstance(content, str):
        return content
    return "\n".join(one["text"] for one in mappings(content) if isinstance(one.get("text"), str))


def _usage(rows: Iterable[Mapping[str, Any]], names: Mapping[str, tuple[str, ...]]) -> Usage | None:
    """Return the counters of several rows added up; None if they have none."""
    counts = counts_of(rows, names)
    counters = {f"{name}_tokens": getattr(counts, name) for name in names}
    return Usage(**counters) if any(count is not None for count in counters.values()) else None
