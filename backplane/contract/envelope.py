"""Defines the messages of the protocol, one struct for each value of `t`.

Members that other code checks stay plain JSON. `protocol` decides which side may send a message, and when.
"""

from __future__ import annotations

import typing
from typing import Annotated, Any, Literal

import msgspec

from backplane.contract.approval import DecisionKind, Remember
from backplane.contract.canonical import INT_MAX, Json
from backplane.contract.events import AgentEvent
from backplane.contract.receipt import BackendIdentity
from backplane.contract.work import WorkOrder


class _Envelope(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="t"):
    pass


class Hello(_Envelope, frozen=True, kw_only=True, gc=False, tag="hello"):
    contract_version: str
    backend: BackendIdentity
    capabilities: dict[str, Any]
    mode: Literal["passthrough", "mapped"] = "mapped"
    extensions: tuple[str, ...] = ()
    backends: tuple[dict[str, Any], ...] | msgspec.UnsetType = msgspec.UNSET
    """Backends of a host that is itself a control plane, each `{id, ready, capabilities}`; unset for any other host."""
    heeds: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """Names in `work.OF_HOST` of the settings that the host heeds; unset if it does not report them."""
    instruction_files: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """Names of the project's files that the agent itself reads as instructions, such as `AGENTS.md`."""


class RunMessage(_Envelope, frozen=True, kw_only=True, gc=False, tag="run"):
    id: str
    """Id of the run on this connection; every answer repeats it as `ref_id`."""
    work_order: WorkOrder
    extensions: tuple[str, ...] = ()


class EventMessage(_Envelope, frozen=True, kw_only=True, gc=False, tag="event"):
    ref_id: str
    event: AgentEvent


class Final(_Envelope, frozen=True, kw_only=True, gc=False, tag="final"):
    ref_id: str
    trace: Literal["as_streamed"] | msgspec.UnsetType = msgspec.UNSET
    """Set if the receipt's trace is empty because the message would not fit into one line."""
    receipt: Json


class Fatal(_Envelope, frozen=True, kw_only=True, gc=False, tag="fatal"):
    ref_id: str | None = None
    error: str
    error_code: str | msgspec.UnsetType | None = msgspec.UNSET
    trace: Literal["as_streamed"] | msgspec.UnsetType = msgspec.UNSET
    receipt: Json | msgspec.UnsetType = msgspec.UNSET


class Cancel(_Envelope, frozen=True, kw_only=True, gc=False, tag="cancel"):
    ref_id: str
    reason: str | None = None
    grace_ms: int | msgspec.UnsetType = msgspec.UNSET


class Input(_Envelope, frozen=True, kw_only=True, gc=False, tag="input"):
    """A further message of the user to a working agent."""

    ref_id: str
    text: str


class Interrupt(_Envelope, frozen=True, kw_only=True, gc=False, tag="interrupt"):
    """A request to stop the agent's turn; its work and its conversation are kept."""

    ref_id: str


class Ping(_Envelope, frozen=True, kw_only=True, gc=False, tag="ping"):
    seq: Annotated[int, msgspec.Meta(ge=0)]

    def __post_init__(self) -> None:
        if self.seq > INT_MAX:  # A larger number would be a float in the pong.
            raise ValueError("`seq` does not fit 64 bits")


class Pong(_Envelope, frozen=True, kw_only=True, gc=False, tag="pong"):
    seq: int


ASK_ID_CHARS_MAX: typing.Final = 8192
"""Maximum length of an ask's id, because the answer repeats it in one line; ids of agents have some 40 characters."""

AskKind = Literal["tool", "patch", "input", "result"]
ASK_MEMBERS: typing.Final[dict[str, tuple[str, ...]]] = {
    "tool": ("name",),
    "patch": ("files",),
    "input": ("question",),
    "result": ("name",),
}
"""Kind of an ask → members that it must have, because rules need them."""


class Ask(_Envelope, frozen=True, kw_only=True, gc=False, tag="ask"):
    """A question that a host asks before it acts; `kind` decides which of the optional members it has."""

    ref_id: str
    id: Annotated[str, msgspec.Meta(max_length=ASK_ID_CHARS_MAX)]
    """Different for each ask of a run."""
    kind: AskKind
    deadline_ms: int | msgspec.UnsetType = msgspec.UNSET
    default: Literal["allow", "deny"] = "deny"
    suggestions: tuple[Any, ...] = ()
    name: str | msgspec.UnsetType = msgspec.UNSET
    input: Json | msgspec.UnsetType = msgspec.UNSET
    command: str | msgspec.UnsetType = msgspec.UNSET
    cwd: str | msgspec.UnsetType = msgspec.UNSET
    diff: str | msgspec.UnsetType = msgspec.UNSET
    files: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    question: str | msgspec.UnsetType = msgspec.UNSET
    options: tuple[Any, ...] | msgspec.UnsetType = msgspec.UNSET
    schema: Json | msgspec.UnsetType = msgspec.UNSET
    output: Json | msgspec.UnsetType = msgspec.UNSET
    is_error: bool | msgspec.UnsetType = msgspec.UNSET
    tool_use_id: str | msgspec.UnsetType = msgspec.UNSET
    """The call's id, as in its `tool_call` and `tool_result`."""

    def __post_init__(self) -> None:
        missing = [name for name in ASK_MEMBERS[self.kind] if getattr(self, name) is msgspec.UNSET]
        if missing:
            raise ValueError(f"an ask of kind `{self.kind}` without `{'`, `'.join(missing)}`")


class AnswerMessage(_Envelope, frozen=True, kw_only=True, gc=False, tag="answer"):
    ref_id: str
    id: str
    decision: DecisionKind
    input: Json | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET
    reason: str | msgspec.UnsetType = msgspec.UNSET
    remember: Remember = "once"
