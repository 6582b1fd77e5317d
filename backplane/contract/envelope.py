"""The messages of the line, one struct for each `t`.

What is free-form or somebody else's to check stays plain JSON here; who may say what and
when is `protocol`'s affair.
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
    """Only from a host that is itself a control plane: `{id, ready, capabilities}` each."""
    heeds: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """Settings of an order that the host heeds, of `work.OF_HOST`; absent where it does not say."""
    instruction_files: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """Names of the project's files whose text the agent reads itself as its instructions, such as `AGENTS.md`."""


class RunMessage(_Envelope, frozen=True, kw_only=True, gc=False, tag="run"):
    id: str
    """The run's id on this line; every answer repeats it as `ref_id`."""
    work_order: WorkOrder
    extensions: tuple[str, ...] = ()


class EventMessage(_Envelope, frozen=True, kw_only=True, gc=False, tag="event"):
    ref_id: str
    event: AgentEvent


class Final(_Envelope, frozen=True, kw_only=True, gc=False, tag="final"):
    ref_id: str
    trace: Literal["as_streamed"] | msgspec.UnsetType = msgspec.UNSET
    """Present when the receipt's trace was left empty because it would not fit the line."""
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
    """More words of the user, for an agent at work."""

    ref_id: str
    text: str


class Interrupt(_Envelope, frozen=True, kw_only=True, gc=False, tag="interrupt"):
    """Stop the agent's turn; what it did and its conversation stay."""

    ref_id: str


class Ping(_Envelope, frozen=True, kw_only=True, gc=False, tag="ping"):
    seq: Annotated[int, msgspec.Meta(ge=0)]

    def __post_init__(self) -> None:
        if self.seq > INT_MAX:  # In a pong it would be a float.
            raise ValueError("`seq` does not fit 64 bits")


class Pong(_Envelope, frozen=True, kw_only=True, gc=False, tag="pong"):
    seq: int


ASK_ID_CHARS_MAX: typing.Final = 8192
"""Longest id of an ask: it comes back in the answer, which must fit a line; ids of agents have some 40."""

AskKind = Literal["tool", "patch", "input", "result"]
ASK_MEMBERS: typing.Final[dict[str, tuple[str, ...]]] = {
    "tool": ("name",),
    "patch": ("files",),
    "input": ("question",),
    "result": ("name",),
}
"""Members without which no rule can decide an ask."""


class Ask(_Envelope, frozen=True, kw_only=True, gc=False, tag="ask"):
    """A host asks before it acts. Which of the optional members are there depends on `kind`."""

    ref_id: str
    id: Annotated[str, msgspec.Meta(max_length=ASK_ID_CHARS_MAX)]
    """New for each ask of a run."""
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
