"""Defines the ten events of the wire, and further types, which are sent as a member of `ext` in one of the ten.

A program that knows only the ten shows a further type as a readable line. Events are immutable and shared between
consumers; none contains a reference cycle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from backplane.contract.approval import Decision, Remember
from backplane.contract.canonical import Json, is_timestamp, timestamp
from backplane.errors import CODES, ConfigError

Ext = dict[str, Any] | None | UnsetType
"""Free-form members beside the event's own; unset if there are none."""

ExitCode = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
"""A signed 32-bit number: a closed peer cannot read any other."""


class _EventBase(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="type"):
    ts: str
    """Time of the event in the form of `canonical.timestamp` (RFC 3339, UTC)."""
    ext: Ext = UNSET


class RunStarted(_EventBase, frozen=True, kw_only=True, gc=False, tag="run_started"):
    """The agent began its work."""

    message: str


class RunCompleted(_EventBase, frozen=True, kw_only=True, gc=False, tag="run_completed"):
    """The agent says that it is done."""

    message: str


class Warned(_EventBase, frozen=True, kw_only=True, gc=False, tag="warning"):
    """The event `warning`; the types in `CARRIED` are sent as this event, but have classes of their own."""

    message: str


class AssistantDelta(_EventBase, frozen=True, kw_only=True, gc=False, tag="assistant_delta"):
    """A piece of the agent's message; `AssistantMessage` repeats the whole message."""

    text: str


class AssistantMessage(_EventBase, frozen=True, kw_only=True, gc=False, tag="assistant_message"):
    """A whole message of the agent."""

    text: str


class ToolCall(_EventBase, frozen=True, kw_only=True, gc=False, tag="tool_call"):
    """The agent called a tool.

    Attributes:
        tool_name: Name of the tool, as the agent calls it.
        input: Input of the tool.
        tool_use_id: Id of the call, which its result repeats; None if the agent gives calls no ids.
        parent_tool_use_id: Id of the call that started the subagent; None if the main agent made this call.
    """

    tool_name: str
    input: Json
    tool_use_id: str | None = None
    parent_tool_use_id: str | None = None


class ToolResult(_EventBase, frozen=True, kw_only=True, gc=False, tag="tool_result"):
    """A tool returned its result.

    Attributes:
        tool_name: Name of the tool, as the agent calls it.
        output: Output of the tool.
        is_error: True if the tool failed.
        tool_use_id: Id of the call.
    """

    tool_name: str
    output: Json
    is_error: bool
    tool_use_id: str | None = None


class FileChanged(_EventBase, frozen=True, kw_only=True, gc=False, tag="file_changed"):
    """The agent changed a file.

    Attributes:
        path: Relative to the workspace's root.
        summary: What was done, in a few words.
    """

    path: str
    summary: str


class CommandExecuted(_EventBase, frozen=True, kw_only=True, gc=False, tag="command_executed"):
    """A command has run.

    Attributes:
        command: Command line.
        exit_code: None when it was ended by a signal or its end is not known.
        output_preview: At most 8 KiB.
    """

    command: str
    exit_code: ExitCode | None = None
    output_preview: str | None = None

    @property
    def ending(self) -> str:
        """The exit code in words."""
        return "no exit code is known" if self.exit_code is None else f"exit code {self.exit_code}"


class Failed(_EventBase, frozen=True, kw_only=True, gc=False, tag="error"):
    """The event `error`: something failed, the run may go on.

    Attributes:
        message: What failed.
        error_code: One of `errors.CODES`; unset if unknown.
    """

    message: str
    error_code: str | UnsetType | None = UNSET


EVENT_TYPES: Final[dict[str, type[_EventBase]]] = {
    "run_started": RunStarted,
    "run_completed": RunCompleted,
    "assistant_delta": AssistantDelta,
    "assistant_message": AssistantMessage,
    "tool_call": ToolCall,
    "tool_result": ToolResult,
    "file_changed": FileChanged,
    "command_executed": CommandExecuted,
    "warning": Warned,
    "error": Failed,
}


class Reasoning(AssistantDelta, frozen=True, kw_only=True, gc=False, tag="assistant_delta"):
    """Thinking of the model; `reasoning` is its text, `signature` the vendor's proof of it."""

    @property
    def reasoning(self) -> str:
        return str(_body(self, "reasoning").get("text", ""))

    @property
    def signature(self) -> str | None:
        return _body(self, "reasoning").get("signature")

    @property
    def redacted(self) -> str | None:
        """Thinking that only its vendor can read; None if the thinking is readable."""
        return _body(self, "reasoning").get("redacted")


class Carried(_EventBase, frozen=True, kw_only=True, gc=False, tag="warning"):
    """A `warning` whose member in `ext` has a meaning of its own; `body` is that member."""

    message: str

    @property
    def body(self) -> dict[str, Any]:
        return _body(self, _NAMES[type(self)])


_OfTheWire = (
    AssistantDelta | AssistantMessage | ToolCall | ToolResult | FileChanged | CommandExecuted
    | Warned | Failed | RunStarted | RunCompleted
)  # fmt: skip

if TYPE_CHECKING:
    AgentEvent = _OfTheWire | Carried
else:
    AgentEvent = _OfTheWire  # The types that a decoder can tell apart; `carried` finds the others.


class Approval(Carried, frozen=True, kw_only=True, gc=False, tag="warning"):
    """A question that a host asks before it acts; `body` has every member of the message `ask`."""

    @property
    def kind(self) -> str:
        """`tool`, `patch`, `input` (a question in words) or `result` (what a tool gave)."""
        return str(self.body.get("kind", ""))

    @property
    def tool(self) -> str | None:
        """Name of the tool, as the agent calls it; None for other kinds."""
        return self.body.get("name")

    @property
    def input(self) -> Json:
        """Input of the tool."""
        return self.body.get("input")

    @property
    def files(self) -> tuple[str, ...]:
        """Paths that a patch touches."""
        return tuple(self.body.get("files") or ())

    @property
    def question(self) -> str | None:
        """The agent's question in words."""
        return self.body.get("question")

    def allow(self, *, remember: Remember = "once") -> Decision:
        """Return the answer yes."""
        return Decision("allow", remember=remember)

    def deny(self, reason: str = "", *, remember: Remember = "once") -> Decision:
        """Return the answer no; the agent reads the reason."""
        return Decision("deny", reason, remember=remember)

    def modify(self, input: Json, reason: str = "") -> Decision:
        """Return the answer yes, with another input for the tool."""
        return Decision("modify", reason, input)

    def answer(self, text: str) -> Decision:
        """Return this text as the answer to a question.

        Raises:
            ConfigError: `config_invalid`, the approval is not of the kind `input`.
        """
        if self.kind != "input":
            fact = f"an ask of the kind {self.kind!r} is not answered in words"
            raise ConfigError("config_invalid", fact, hint="allow(), deny(reason) or modify(input)")
        return Decision("allow", text=text)


class ApprovalAnswered(Carried, frozen=True, kw_only=True, gc=False, tag="warning"):
    """The decision about an ask, with its source."""


class UsageReported(Carried, frozen=True, kw_only=True, gc=False, tag="warning"):
    """Tokens used so far."""


class SessionNamed(Carried, frozen=True, kw_only=True, gc=False, tag="warning"):
    """The conversation's id, for resuming."""


class TurnEnded(Carried, frozen=True, kw_only=True, gc=False, tag="warning"):
    """One turn of the model has ended; `body["stop_reason"]` says why."""


class TaskReported(Carried, frozen=True, kw_only=True, gc=False, tag="warning"):
    """A background task began, made progress or ended."""


class RetryReported(Carried, frozen=True, kw_only=True, gc=False, tag="warning"):
    """A request is tried again."""


class LossReported(Carried, frozen=True, kw_only=True, gc=False, tag="warning"):
    """Something that a translation lost or changed."""


class OutputReported(Carried, frozen=True, kw_only=True, gc=False, tag="warning"):
    """Live output of a command: `stream` and `text`."""


class CheckpointReported(Carried, frozen=True, kw_only=True, gc=False, tag="warning"):
    """The control plane made a checkpoint of the workspace, restored one, or failed to; `body["what"]` says which."""


class Unread(Carried, frozen=True, kw_only=True, gc=False, tag="warning"):
    """An event that this version cannot read, unchanged."""


CARRIED: Final[dict[str, type[Any]]] = {
    "reasoning": Reasoning,
    "ask": Approval,
    "answer": ApprovalAnswered,
    "usage": UsageReported,
    "session": SessionNamed,
    "turn": TurnEnded,
    "task": TaskReported,
    "retry": RetryReported,
    "loss": LossReported,
    "output": OutputReported,
    "checkpoint": CheckpointReported,
    "raw_event": Unread,
    "raw_envelope": Unread,
}
"""Member of `ext` → type of the event in the Python API."""

_NAMES: Final[dict[type[Any], str]] = {kind: name for name, kind in reversed(CARRIED.items())}


def _body(event: _EventBase, name: str) -> dict[str, Any]:
    body = event.ext.get(name) if isinstance(event.ext, dict) else None
    return body if isinstance(body, dict) else {}


def carried(event: AgentEvent) -> AgentEvent:
    """Return an event as the type that its member in `ext` means; return any other event unchanged."""
    ext = event.ext
    if not isinstance(ext, dict):
        return event
    for name in ext:
        kind: type[AgentEvent] | None = CARRIED.get(name)
        if kind is not None and kind.__struct_config__.tag == event.__struct_config__.tag:
            fields = {field: getattr(event, field) for field in event.__struct_fields__}
            return kind(**fields)
    return event


def is_passed_through(event: AgentEvent) -> bool:
    """Return True if an event contains the vendor's own message."""
    return isinstance(event.ext, dict) and "raw_message" in event.ext


def carry(name: str, body: Json, *, ts: str, message: str) -> Warned:
    """Return the warning with `body` in `ext[name]`; `message` is one readable line."""
    return Warned(ts=ts, message=message, ext={name: body})


_MEMBERS: Final = {kind: {"type", *kind.__struct_fields__} for kind in EVENT_TYPES.values()}


def read_event(value: Json, *, now: Callable[[], str]) -> AgentEvent:
    """Read one event from plain JSON; whatever the contract does not know is kept in `ext`.

    An event of an unknown type or with a wrong shape becomes a warning with `ext.raw_event`. An unknown member moves to
    `ext.unknown`, an unknown error code to `ext.error_code`.

    Args:
        now: returns the time of a warning that replaces an unreadable event.
    """
    name = value.get("type") if isinstance(value, dict) else None
    if not isinstance(name, str):
        return _unread(value, "an event of the wrong shape: it has no `type` that is a string", now())
    kind = EVENT_TYPES.get(name)
    if kind is None:
        return _unread(value, "an event of a type this version does not know", now())
    try:
        event = msgspec.convert(value, kind)
        known = _MEMBERS[kind]
        # A faster way for the usual event, which is already normal; it takes a fifth of the time.
        if (
            kind is not Failed
            and (event.ext is UNSET or event.ext)
            and is_timestamp(event.ts)
            and value.keys() <= known
        ):
            return event  # type: ignore[return-value]
        ts = timestamp(event.ts)
    except ValueError as error:
        return _unread(value, f"an event of the wrong shape: {error}", now())
    ext = event.ext if isinstance(event.ext, dict) else {}
    unknown = {name: member for name, member in value.items() if name not in known}
    fields = {name: getattr(event, name) for name in kind.__struct_fields__}
    if kind is Failed and event.error_code not in CODES:  # type: ignore[attr-defined]
        if isinstance(fields["error_code"], str):
            if "error_code" in ext:
                unknown["ext"] = {"error_code": ext["error_code"]}
            ext = {**ext, "error_code": fields["error_code"]}
        fields["error_code"] = UNSET
    if unknown:
        ext = moved(ext, "unknown", unknown, beside="ext")
    return kind(**{**fields, "ts": ts, "ext": ext if ext or event.ext == {} else UNSET})  # type: ignore[return-value]


def moved(ext: Ext, name: str, members: dict[str, Json], *, beside: str) -> dict[str, Json]:
    """Return `ext` with unknown members under `ext[name]`; an earlier value of `ext[name]` is kept below it.

    Args:
        beside: key for the earlier value, which becomes `ext[name][beside][name]`; no member may have this name.
    """
    kept = ext if isinstance(ext, dict) else {}
    if name in kept:
        members = {**members, beside: {**members.get(beside, {}), name: kept[name]}}
    return {**kept, name: members}


def normal(event: AgentEvent) -> AgentEvent:
    """Return an event as typed peers write it: its time in the contract's form, no `ext` or error code that is null.

    Raises:
        ValueError: its time is invalid.
    """
    changes: dict[str, Any] = {}
    if event.ext is None:
        changes["ext"] = UNSET
    if isinstance(event, Failed) and event.error_code is None:
        changes["error_code"] = UNSET
    ts = timestamp(event.ts)
    if ts != event.ts:
        changes["ts"] = ts
    return msgspec.structs.replace(event, **changes) if changes else event


def _unread(value: Json, why: str, now: str) -> Warned:
    return carry("raw_event", value, ts=now, message=why)
