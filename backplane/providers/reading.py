"""One turn's events in the words of both interfaces, and the messages that they amount to. Nothing here waits."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

import msgspec

from backplane.agents.store import Talk
from backplane.contract import events as wire
from backplane.contract.canonical import Json
from backplane.contract.conversation import (
    AgentMessage,
    Message,
    StopReason,
    TokenUsage,
)
from backplane.contract.receipt import Receipt
from backplane.errors import BackplaneError, from_code
from backplane.providers import events, unified
from backplane.providers.failures import ProviderError
from backplane.runtime.functions import SERVER

PREFIX: Final = f"mcp__{SERVER}__"
"""Of the program's own functions, as agents call them."""

STOPS: Final[dict[str, StopReason]] = {
    "max_tokens": "max_tokens",
    "stop_sequence": "stop_sequence",
    "cancelled": "user_interrupt",
}
"""Why a model stopped, where that is why a turn ended."""


def own_name(name: str) -> str:
    """Return a function's name as the program knows it; any other tool's as it is."""
    return name.removeprefix(PREFIX)


def text_of(output: Json) -> str:
    """Return a tool's output as text."""
    return output if isinstance(output, str) else msgspec.json.encode(output).decode()


class Transcript:
    """The messages of one turn, made from its events."""

    def __init__(self) -> None:
        self._talk = Talk()
        self._thought: list[str] = []
        self._open: dict[str, str] = {}
        """Calls without a result: id → name."""
        self._below: set[str] = set()
        """Calls of agents below this one: part of what their caller's result says."""
        self._numbers = 0
        self.stop: str | None = None
        """Why the model stopped last."""
        self.conversation: str | None = None

    def take(self, event: wire.AgentEvent) -> None:
        """Take the next event."""
        if isinstance(event, wire.Reasoning):
            self._thought.append(event.reasoning)
            if event.signature is not None or event.redacted is not None:
                self._end_thought(event.signature, event.redacted)
        elif isinstance(event, wire.AssistantMessage):
            self._talk.say(event.text, _proof_of(event))
        elif isinstance(event, wire.ToolCall):
            self._call(event)
        elif isinstance(event, wire.ToolResult):
            self._result(event)
        elif isinstance(event, wire.TurnEnded):
            self.stop = str(event.body.get("stop_reason"))
        elif isinstance(event, wire.SessionNamed) and isinstance(event.body.get("id"), str):
            self.conversation = event.body["id"]

    def _end_thought(self, signature: str | None = None, redacted: str | None = None) -> None:
        self._talk.think("".join(self._thought), signature, redacted)
        self._thought = []

    def _call(self, event: wire.ToolCall) -> None:
        name = own_name(event.tool_name)
        self._numbers += event.tool_use_id is None
        id = event.tool_use_id or f"{name}-{self._numbers}"
        if event.parent_tool_use_id is not None:
            self._below.add(id)
            return
        self._open[id] = name
        self._talk.call(id, name, event.input, _proof_of(event))

    def _result(self, event: wire.ToolResult) -> None:
        name = own_name(event.tool_name)
        # For hosts that number no calls, the oldest one of this tool without a result.
        id = event.tool_use_id or next((id for id, one in self._open.items() if one == name), None)
        if id is not None and id not in self._below:
            self._open.pop(id, None)
            self._end_thought()
            self._talk.result(id, text_of(event.output), is_error=event.is_error)

    def last(self) -> AgentMessage:
        """Return the newest message of the agent."""
        self._end_thought()
        return self._talk.last()

    def messages(self) -> tuple[Message, ...]:
        """Return all messages so far."""
        self._end_thought()
        return self._talk.messages


def _proof_of(event: wire.AgentEvent) -> str | None:
    proof = event.ext.get("signature") if isinstance(event.ext, dict) else None
    return proof if isinstance(proof, str) else None


def usage_of(receipt: Receipt) -> TokenUsage:
    """Return a turn's counters."""
    used, usd = receipt.usage, receipt.usage.estimated_cost_usd
    return TokenUsage(
        input_tokens=used.input_tokens,
        output_tokens=used.output_tokens,
        cache_read_tokens=used.cache_read_tokens,
        cache_write_tokens=used.cache_write_tokens,
        cost_usd_micros=None if usd is None else round(usd * 1_000_000),
    )


def stop_of(receipt: Receipt, stop: str | None) -> StopReason:
    """Return why a turn ended.

    Args:
        stop: why the model stopped last, None where nobody said.
    """
    end = receipt.backplane.get("end")
    reason = end.get("reason") if isinstance(end, dict) else None
    if reason in ("cancelled", "interrupted"):
        return "user_interrupt"
    if receipt.outcome == "failed":
        return "error"
    if stop in STOPS:
        return STOPS[stop]
    return "end_turn" if receipt.outcome == "complete" else "error"


def failure_of(receipt: Receipt, error: BackplaneError | None) -> BackplaneError | None:
    """Return why a turn failed; None where it did not."""
    if error is not None:
        return error
    if receipt.outcome != "failed":
        return None
    said = [event for event in receipt.trace if isinstance(event, wire.Failed)]
    if not said:
        return from_code("internal", "the turn failed and its host did not say why")
    code = said[-1].error_code
    return from_code(code if isinstance(code, str) else "execution_tool_failed", said[-1].message)


def stays_in_patch(receipt: Receipt) -> str:
    """Return why a turn's changes were not written into its folder; empty if they were, or if there are none."""
    patch = receipt.backplane.get("patch")
    if "lane" in receipt.backplane or not isinstance(patch, dict) or not patch.get("bytes"):
        return ""
    found = ", ".join(receipt.failed_on)
    return f"by its fail_on ({found})" if found else f"as its outcome is {receipt.outcome}"


def reported(provider: str, event: wire.Failed) -> ProviderError:
    """Return an error that the agent told while it went on."""
    ext = event.ext if isinstance(event.ext, dict) else {}
    code = event.error_code if isinstance(event.error_code, str) else str(ext.get("error_code", "internal"))
    return ProviderError(provider, from_code(code, event.message), ext.get("kind"))


class StreamEventReader:
    """Events of a run as the seven of a message's stream."""

    def __init__(self, provider: str) -> None:
        self._provider = provider
        self._told = False
        """Pieces of the message that comes next were told."""

    def read(self, taken: Iterable[wire.AgentEvent]) -> list[events.StreamEvent]:
        """Return what some events say; thinking, usage and notices are no part of this stream."""
        out: list[events.StreamEvent] = []
        for event in taken:
            if type(event) is wire.AssistantDelta:  # Nearly all of them are; they pay for no call.
                self._told = True
                out.append(events.TextDeltaEvent(delta=event.text))
            else:
                out += self._read(event)
        return out

    def _read(self, event: wire.AgentEvent) -> list[events.StreamEvent]:
        if isinstance(event, wire.AssistantMessage):
            told, self._told = self._told, False
            return [] if told else [events.TextDeltaEvent(delta=event.text)]
        if isinstance(event, wire.ToolCall):
            id, name = event.tool_use_id or event.tool_name, own_name(event.tool_name)
            return [
                events.ToolUseStartEvent(id=id, name=name),
                events.ToolUseInputEvent(id=id, delta=msgspec.json.encode(event.input).decode()),
                events.ToolUseEndEvent(id=id, name=name, input=event.input),
            ]
        if isinstance(event, wire.ToolResult):
            id = event.tool_use_id or event.tool_name
            return [events.ToolResultEvent(id=id, output=text_of(event.output), is_error=event.is_error)]
        if isinstance(event, wire.Failed):
            return [events.ErrorEvent(error=reported(self._provider, event))]
        if isinstance(event, wire.RetryReported) and event.body.get("taken_back"):
            self._told = False  # The message that comes is told whole; `message_done` has it without these pieces.
        return []


class UnifiedReader:
    """Events of a run as the fourteen of the unified agent."""

    def __init__(self, provider: str, is_asked: Callable[[str], bool]) -> None:
        self._provider = provider
        self._is_asked = is_asked
        """Whether this approval waits for the caller."""
        self._thinks = False

    def read(self, taken: Iterable[wire.AgentEvent]) -> list[unified.UnifiedEvent]:
        """Return what some events say; an event that none of the fourteen fits is told as a `BackgroundTask`."""
        return [said for event in taken for said in self._read(event)]

    def _read(self, event: wire.AgentEvent) -> list[unified.UnifiedEvent]:
        out: list[unified.UnifiedEvent] = []
        if self._thinks and not isinstance(event, wire.Reasoning):
            self._thinks = False
            out.append(unified.ThinkingComplete())
        if isinstance(event, wire.Reasoning):
            self._thinks = True
            return [unified.ThinkingDelta(content=event.reasoning)]
        row = _ROWS.get(type(event))
        if isinstance(event, wire.Approval | wire.ApprovalAnswered):
            if isinstance(event, wire.Approval) and self._is_asked(str(event.body.get("id"))):
                out.append(_asked(event))
        elif row is not None:
            out.append(row(event))
        elif isinstance(event, wire.Failed):
            error = reported(self._provider, event)
            out.append(unified.Error(message=error.message, error_type=error.error_type, recoverable=error.recoverable))
        elif not isinstance(event, wire.TurnEnded):
            out.append(unified.BackgroundTask(task_type=_kind_of(event), message=_words_of(event)))
        return out


def _kind_of(event: wire.AgentEvent) -> str:
    ext = event.ext if isinstance(event.ext, dict) else {}
    return next((name for name in ext if name in wire.CARRIED), str(event.__struct_config__.tag))


def _words_of(event: wire.AgentEvent) -> str:
    if isinstance(event, wire.FileChanged):
        return f"{event.path}: {event.summary}"
    if isinstance(event, wire.CommandExecuted):
        return f"{event.command}: {event.ending}"
    return str(getattr(event, "message", ""))


def _asked(event: Any) -> unified.UnifiedEvent:
    body, id = event.body, str(event.body.get("id"))
    command, cwd = body.get("command"), body.get("cwd")
    if event.kind == "patch":
        return unified.PatchApprovalRequest(
            request_id=id, patch_content=str(body.get("diff", "")), files_affected=event.files
        )
    if isinstance(command, str):
        cwd = cwd if isinstance(cwd, str) else None
        return unified.ExecApprovalRequest(request_id=id, command=command, cwd=cwd, parsed_command=_parsed(command))
    if event.kind == "input":
        asked = {"question": event.question, "options": body.get("options")}
        options = tuple(str(option) for option in body.get("options") or ())
        return unified.PermissionRequest(request_id=id, tool_name="ask_user", input=asked, suggestions=options)
    suggestions = ("allow", "allow_run", "modify", "deny")
    name = own_name(event.tool or event.kind)
    return unified.PermissionRequest(request_id=id, tool_name=name, input=event.input, suggestions=suggestions)


def _parsed(command: str) -> tuple[str, ...] | None:
    try:
        return tuple(shlex.split(command))
    except ValueError:
        return None


def _used(event: Any) -> unified.UnifiedEvent:
    usd = event.body.get("estimated_cost_usd")
    return unified.UsageUpdate(
        input_tokens=event.body.get("input_tokens"),
        output_tokens=event.body.get("output_tokens"),
        cost_usd_micros=round(usd * 1_000_000) if isinstance(usd, int | float) else None,
    )


_ROWS: Final[dict[type[Any], Callable[[Any], unified.UnifiedEvent]]] = {
    wire.AssistantDelta: lambda event: unified.TextDelta(text=event.text),
    wire.AssistantMessage: lambda event: unified.TextComplete(text=event.text),
    wire.ToolCall: lambda event: unified.ToolUseStarted(
        tool_name=own_name(event.tool_name), tool_id=event.tool_use_id or event.tool_name, input=event.input
    ),
    wire.ToolResult: lambda event: unified.ToolUseComplete(
        tool_id=event.tool_use_id or event.tool_name, output=text_of(event.output), is_error=event.is_error
    ),
    wire.UsageReported: _used,
}


def handed(event: wire.AgentEvent, names: Collection[str]) -> bool:
    """Tell whether an event is a call of a tool that the caller runs himself."""
    return (
        isinstance(event, wire.ToolCall) and event.tool_name.startswith(PREFIX) and own_name(event.tool_name) in names
    )
