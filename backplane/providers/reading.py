"""Makes the messages of a turn from its events, and its counters and stop reason from its receipt. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec.structs import replace

from backplane.contract import events as wire
from backplane.contract.canonical import Json
from backplane.contract.conversation import (
    AgentMessage,
    Message,
    SessionFile,
    StopReason,
    TokenUsage,
)
from backplane.contract.receipt import Receipt
from backplane.dialects.history import Talk
from backplane.runtime.functions import SERVER

PREFIX: Final = f"mcp__{SERVER}__"
"""Prefix of the program's own functions in the names that agents call."""

CUT_OFF: Final = ("error", "user_interrupt")
"""Stop reasons of a turn that was cut off: its changes go into the folder, and the model is asked about open calls."""

STOPS: Final[dict[str, StopReason]] = {
    "max_tokens": "max_tokens",
    "stop_sequence": "stop_sequence",
    "cancelled": "user_interrupt",
}
"""Why the model stopped → stop reason of the turn, unless the receipt has another reason."""


def own_name(name: str) -> str:
    """Return a tool's name without the prefix of the program's functions; other names unchanged."""
    return name.removeprefix(PREFIX)


def function_of(name: str) -> str | None:
    """Return the name of a function of the program by its tool's name; None for any other tool."""
    return own_name(name) if name.startswith(PREFIX) else None


def text_of(output: Json) -> str:
    """Return a tool's output as text; JSON if it is no text."""
    return output if isinstance(output, str) else msgspec.json.encode(output).decode()


class Transcript:
    """The messages of one turn, made from its events.

    Attributes:
        pieces: text of a message that is not complete yet; `end` makes a message of it.
        stop: why the model stopped last; None if that is unknown.
        conversation: id of the provider's own conversation; None if it has reported none.
    """

    def __init__(self) -> None:
        self._talk = Talk()
        self.pieces: list[str] = []
        self._asked: dict[str, wire.Approval] = {}
        self._allowed: dict[str, wire.Approval] = {}
        """Tool requests that were allowed and whose call has not been reported, by the approval's id."""
        self._thought: list[str] = []
        self._open: dict[str, str] = {}
        """Calls without a result: id → name."""
        self._below: set[str] = set()
        """Ids of sub-agents' calls; they are not in the history, because the result of the calling tool covers them."""
        self._numbers = 0
        self.stop: str | None = None
        self.conversation: str | None = None

    def take(self, event: wire.AgentEvent) -> wire.AgentEvent:
        """Add the next event and return it; a call or result without an id gets the one that it has in the messages."""
        if isinstance(event, wire.Reasoning):
            self._thought.append(event.reasoning)
            if event.signature is not None or event.redacted is not None:
                self._end_thought(event.signature, event.redacted)
        elif isinstance(event, wire.AssistantDelta):
            self.pieces.append(event.text)
        elif isinstance(event, wire.RetryReported):
            self.pieces = [] if event.body.get("taken_back") else self.pieces
        elif isinstance(event, wire.AssistantMessage):
            self.pieces = []
            self._talk.say(event.text, _proof_of(event))
        elif isinstance(event, wire.ToolCall):
            event = self._call(event)
        elif isinstance(event, wire.ToolResult):
            event = self._result(event)
        elif isinstance(event, wire.Approval) and event.kind == "tool":
            self._asked[str(event.body.get("id"))] = event
        elif isinstance(event, wire.ApprovalAnswered):
            asked = self._asked.pop(id := str(event.body.get("id")), None)
            if asked is not None and event.body.get("decision") != "deny":
                self._allowed[id] = asked
        elif isinstance(event, wire.TurnEnded):
            self.stop = str(event.body.get("stop_reason"))
        elif isinstance(event, wire.SessionNamed) and isinstance(event.body.get("id"), str):
            self.conversation = event.body["id"]
        return event

    def _end_thought(self, signature: str | None = None, redacted: str | None = None) -> None:
        self._talk.think("".join(self._thought), signature, redacted)
        self._thought = []

    def _call(self, event: wire.ToolCall) -> wire.ToolCall:
        name = own_name(event.tool_name)
        for ask, asked in list(self._allowed.items()):
            if asked.body.get("tool_use_id", event.tool_use_id) == event.tool_use_id and asked.tool == event.tool_name:
                del self._allowed[ask]
                break
        if event.tool_use_id is None:
            self._numbers += 1
            event = replace(event, tool_use_id=f"{name}-{self._numbers}")
        id = str(event.tool_use_id)
        if event.parent_tool_use_id is not None:
            self._below.add(id)
            return event
        self._open[id] = name
        self._talk.call(id, name, event.input, _proof_of(event))
        return event

    def _result(self, event: wire.ToolResult) -> wire.ToolResult:
        name = own_name(event.tool_name)
        # A result without an id belongs to the oldest open call of its tool.
        id = event.tool_use_id or next((id for id, one in self._open.items() if one == name), None)
        if id is not None and id not in self._below:
            self._open.pop(id, None)
            self._end_thought()
            self._talk.result(id, text_of(event.output), is_error=event.is_error)
        return event if id is None else replace(event, tool_use_id=id)

    def end(self, *, is_cut_off: bool) -> None:
        """Add the text of an incomplete message and, after a cut, allowed calls that may have run unreported."""
        self._talk.say("".join(self.pieces))
        self.pieces = []
        for ask, asked in self._allowed.items() if is_cut_off else ():
            name = own_name(str(asked.tool))
            self._talk.call(str(asked.body.get("tool_use_id", f"{name}-{ask}")), name, asked.input)

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
    """Return a turn's tokens and cost by its receipt."""
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
        stop: why the model stopped last; None if that is unknown.
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


def noted(receipt: Receipt, stop: StopReason, file: SessionFile) -> dict[str, Any]:
    """Return the members of a `SessionTurn` that follow from its receipt.

    `carried` is False if the session writes each turn's changes into its folder, and this turn was cut off or its
    patch was not applied.
    """
    is_missing = stop in CUT_OFF or bool(stays_in_patch(receipt))
    is_carried = (file.mode, file.lane) != ("staged", "workspace_first") or not is_missing
    return {"receipt_sha256": receipt.receipt_sha256, "usage": usage_of(receipt), "carried": is_carried}


def stays_in_patch(receipt: Receipt) -> str:
    """Return why a turn's changes were not written into its folder; empty if they were, or if there are none."""
    patch = receipt.backplane.get("patch")
    if "lane" in receipt.backplane or not isinstance(patch, dict) or not patch.get("bytes"):
        return ""
    found = ", ".join(receipt.failed_on)
    return f"by its fail_on ({found})" if found else f"as its outcome is {receipt.outcome}"
