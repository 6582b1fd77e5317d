"""The seven events of a message's stream, which `as_messages` yields."""

from __future__ import annotations

from typing import Literal

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.conversation import AgentMessage, StopReason, TokenUsage
from backplane.providers.failures import ProviderError


class _Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Its `type` is the word of the provider interface."""


class TextDeltaEvent(_Event, frozen=True, kw_only=True, gc=False):
    """A piece of the answer."""

    delta: str
    type: Literal["text_delta"] = "text_delta"


class ToolUseStartEvent(_Event, frozen=True, kw_only=True, gc=False):
    """A call begins."""

    id: str
    name: str
    type: Literal["tool_use_start"] = "tool_use_start"


class ToolUseInputEvent(_Event, frozen=True, kw_only=True, gc=False):
    """The call's input as JSON, in one piece."""

    id: str
    delta: str
    type: Literal["tool_use_input"] = "tool_use_input"


class ToolUseEndEvent(_Event, frozen=True, kw_only=True, gc=False):
    """The call is complete; the caller runs a tool without a handler."""

    id: str
    name: str
    input: Json
    type: Literal["tool_use_end"] = "tool_use_end"


class ToolResultEvent(_Event, frozen=True, kw_only=True, gc=False):
    """The result of a call."""

    id: str
    output: str
    is_error: bool
    type: Literal["tool_result"] = "tool_result"


class MessageDoneEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The last event of a stream."""

    message: AgentMessage
    """The last one of the turn; the history has them all."""
    usage: TokenUsage
    """Usage of this turn; unknown while calls are handed to the caller, as the turn goes on then."""
    stop_reason: StopReason
    type: Literal["message_done"] = "message_done"


class ErrorEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something failed; `message_done` says whether the turn ended with it."""

    error: ProviderError
    type: Literal["error"] = "error"


StreamEvent = (
    TextDeltaEvent
    | ToolUseStartEvent
    | ToolUseInputEvent
    | ToolUseEndEvent
    | ToolResultEvent
    | MessageDoneEvent
    | ErrorEvent
)
