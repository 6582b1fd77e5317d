"""Shows a session's stream under the names of two other interfaces, with seven and with fourteen kinds of events.

A view only renames; `contracts/sessions.md` has the table. `prompt` makes one message of a text and context items.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Final, Literal, Unpack

import msgspec

from backplane.contract import events as wire
from backplane.contract.canonical import Json
from backplane.contract.conversation import AgentMessage, StopReason, TokenUsage
from backplane.errors import from_code
from backplane.providers.failures import ProviderError
from backplane.providers.reading import own_name, text_of
from backplane.providers.session import Said, Session, TurnOptions, TurnOutcome


class TextDeltaEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the answer."""

    delta: str
    type: Literal["text_delta"] = "text_delta"


class ToolUseStartEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of a call."""

    id: str
    name: str
    type: Literal["tool_use_start"] = "tool_use_start"


class ToolUseInputEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The call's input as JSON, in one piece."""

    id: str
    delta: str
    type: Literal["tool_use_input"] = "tool_use_input"


class ToolUseEndEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The whole call; the caller runs a tool without a handler."""

    id: str
    name: str
    input: Json
    type: Literal["tool_use_end"] = "tool_use_end"


class ToolResultEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a call."""

    id: str
    output: str
    is_error: bool
    type: Literal["tool_result"] = "tool_result"


class MessageDoneEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The last event of a stream; its members are as in `TurnOutcome`."""

    message: AgentMessage
    usage: TokenUsage
    stop_reason: StopReason
    type: Literal["message_done"] = "message_done"


class ErrorEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A failure; `message_done` says whether the turn ended with it."""

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
"""An event of a message's stream, which `as_messages` yields."""

UnifiedName = Literal[
    "TextDelta", "TextComplete", "ThinkingDelta", "ThinkingComplete", "ToolUseStarted", "ToolUseComplete",
    "PermissionRequest", "ExecApprovalRequest", "PatchApprovalRequest", "UsageUpdate", "SessionStarted",
    "TurnComplete", "BackgroundTask", "Error",
]  # fmt: skip


class UnifiedEvent(msgspec.Struct, frozen=True):
    """An event of the unified agent interface."""

    name: UnifiedName
    data: dict[str, Any]
    """The event's members under the names of the interface."""


_SUGGESTIONS: Final = ("allow", "allow_run", "modify", "deny")
"""Answers that are suggested for an approval of a tool."""


async def as_messages(session: Session, message: Said, **given: Unpack[TurnOptions]) -> AsyncIterator[StreamEvent]:
    """Send a message and yield the seven events of a message's stream; arguments and errors as `send_message`.

    Thinking, usage, approvals and notices are not part of it.
    """
    has_pieces = False
    async for event in session.send_message(message, **given):
        match event:
            case wire.AssistantDelta():
                has_pieces = True
                yield TextDeltaEvent(delta=event.text)
            case wire.AssistantMessage():
                if not has_pieces:
                    yield TextDeltaEvent(delta=event.text)
                has_pieces = False
            case wire.RetryReported():
                has_pieces = has_pieces and not event.body.get("taken_back")  # The next message is yielded whole.
            case wire.ToolCall():
                id, name = str(event.tool_use_id), own_name(event.tool_name)
                yield ToolUseStartEvent(id=id, name=name)
                yield ToolUseInputEvent(id=id, delta=msgspec.json.encode(event.input).decode())
                yield ToolUseEndEvent(id=id, name=name, input=event.input)
            case wire.ToolResult():
                output = text_of(event.output)
                yield ToolResultEvent(id=str(event.tool_use_id), output=output, is_error=event.is_error)
            case wire.Failed():
                yield ErrorEvent(error=_reported(session, event))
            case TurnOutcome():
                if event.error is not None:
                    yield ErrorEvent(error=event.error)
                yield MessageDoneEvent(message=event.message, usage=event.usage, stop_reason=event.stop_reason)


def _reported(session: Session, event: wire.Failed) -> ProviderError:
    """Return an error that the agent reported while it went on."""
    code = event.error_code if isinstance(event.error_code, str) else "internal"
    return ProviderError(session.provider, from_code(code, event.message))


async def as_unified(session: Session, message: Said, **given: Unpack[TurnOptions]) -> AsyncIterator[UnifiedEvent]:
    """Send a message and yield the events of the unified agent interface; arguments and errors as `send_message`.

    A request for approval is answered by `Session.answer`, if the session's `on_ask` is `stream`.
    """
    if not session.file.turns:
        yield UnifiedEvent("SessionStarted", {"session_id": session.id, "provider": session.provider})
    thinks = False
    async for event in session.send_message(message, **given):
        if thinks and not isinstance(event, wire.Reasoning):
            yield UnifiedEvent("ThinkingComplete", {})
        thinks = isinstance(event, wire.Reasoning)
        if isinstance(event, TurnOutcome):
            if event.error is not None:
                yield UnifiedEvent("Error", _error(event.error))
            yield UnifiedEvent("TurnComplete", {"stop_reason": event.stop_reason})
        elif not isinstance(event, wire.ApprovalAnswered | wire.TurnEnded) and (found := _unified(session, event)):
            yield UnifiedEvent(*found)


def _unified(session: Session, event: wire.AgentEvent) -> tuple[UnifiedName, dict[str, Any]] | None:
    match event:
        case wire.Reasoning():
            return "ThinkingDelta", {"content": event.reasoning}
        case wire.AssistantDelta():
            return "TextDelta", {"text": event.text}
        case wire.AssistantMessage():
            return "TextComplete", {"text": event.text}
        case wire.ToolCall():
            call = {"tool_name": own_name(event.tool_name), "tool_id": event.tool_use_id, "input": event.input}
            return "ToolUseStarted", call
        case wire.ToolResult():
            output = {"output": text_of(event.output), "is_error": event.is_error}
            return "ToolUseComplete", {"tool_id": event.tool_use_id, **output}
        case wire.Approval():
            return _asked(event) if session.awaits_answer(str(event.body.get("id"))) else None
        case wire.UsageReported():
            usd = event.body.get("estimated_cost_usd")
            micros = round(usd * 1_000_000) if isinstance(usd, int | float) else None
            tokens = {name: event.body.get(name) for name in ("input_tokens", "output_tokens")}
            return "UsageUpdate", {**tokens, "cost_usd_micros": micros}
        case wire.Failed():
            return "Error", _error(_reported(session, event))
        case wire.FileChanged():
            words = f"{event.path}: {event.summary}"
        case wire.CommandExecuted():
            words = f"{event.command}: {event.ending}"
        case _:
            words = str(getattr(event, "message", ""))
    ext = event.ext if isinstance(event.ext, dict) else {}
    kind = next((name for name in ext if name in wire.CARRIED), str(event.__struct_config__.tag))
    return "BackgroundTask", {"task_type": kind, "message": words}


def _error(error: ProviderError) -> dict[str, Any]:
    return {"message": error.message, "error_type": error.error_type, "recoverable": error.recoverable}


def _asked(event: wire.Approval) -> tuple[UnifiedName, dict[str, Any]]:
    body, id = event.body, {"request_id": str(event.body.get("id"))}
    command, options = body.get("command"), body.get("options") or ()
    if event.kind == "patch":
        return "PatchApprovalRequest", {**id, "patch_content": str(body.get("diff", "")), "files_affected": event.files}
    if isinstance(command, str):
        parsed = None
        with suppress(ValueError):  # A quote is not closed.
            parsed = tuple(shlex.split(command))
        shown = {"command": command, "cwd": body.get("cwd"), "parsed_command": parsed}
        return "ExecApprovalRequest", {**id, **shown}
    if event.kind == "input":
        asked: dict[str, Json] = {"question": event.question, "options": body.get("options")}
        return "PermissionRequest", {**id, "tool_name": "ask_user", "input": asked, "suggestions": tuple(options)}
    name = own_name(event.tool or event.kind)
    return "PermissionRequest", {**id, "tool_name": name, "input": event.input, "suggestions": _SUGGESTIONS}


def prompt(
    text: str,
    *,
    files: Mapping[str, str] | None = None,
    diff: str = "",
    environment: Mapping[str, str] | None = None,
    instructions: str = "",
) -> str:
    """Return one message with context items before its text.

    Args:
        files: path → content.
        diff: a diff in git's form.
        environment: facts about the environment; the agent's variables stay as they are.
        instructions: what to observe in this message.
    """
    shown = [f"File {path}:\n```\n{content}\n```" for path, content in (files or {}).items()]
    shown += [f"Diff:\n```diff\n{diff}\n```"] if diff else []
    shown += [f"Environment: {name}={value}" for name, value in (environment or {}).items()]
    shown += [f"Instructions: {instructions}"] if instructions else []
    return "\n\n".join([*shown, text])
