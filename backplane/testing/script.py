"""Turns of a scripted model as plain data, the same for all four wire formats, faults included.

A script can be written as JSON and read back; nothing here sends or receives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from backplane.contract.canonical import Json
from backplane.errors import ContractError
from backplane.upstream.endpoint import PROTOCOL_NAMES, ProtocolName

Stop = Literal["end", "tool_use", "max_tokens", "stop_sequence", "refusal", "content_filter", "pause"]

MODEL: Final = "scripted-model"
"""The model that a script without models lists."""


class _Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Refuses unknown members: people type scripts by hand."""


class Call(_Data, frozen=True):
    """A tool call that the model makes."""

    name: str
    input: Json = {}
    """The arguments; a string is sent unchanged, so a script may have broken JSON.

    In formats that have the arguments as a value (Gemini, Messages without a stream), a string that is JSON becomes
    its value, and broken JSON stays a string.
    """
    id: str | None = None
    """None: made from the request's number, or left out if the vendor leaves it out."""
    kind: Literal["function", "custom"] = "function"
    """A custom tool takes free text: `input` is then a string."""
    signature: str | None = None
    """The vendor's proof on the call, if the format has one."""
    namespace: str | None = None
    """The namespace in which the client offered the tool; only the protocol Responses has them."""


class ScriptUsage(_Data, frozen=True):
    """Tokens of an answer: `input` is everything sent, cache reads and writes included; `output` has the reasoning."""

    input: int = 20
    output: int = 10
    cache_read: int = 0
    cache_write: int = 0
    reasoning: int = 0


class Failure(_Data, frozen=True):
    """An error inside a stream, after the content and in place of its end."""

    code: str = "server_error"
    """The vendor's own word: `overloaded_error`, `context_length_exceeded`, `UNAVAILABLE`, …"""
    message: str = "scripted failure"
    status: int = 500
    """The status for a request that does not stream."""


class Fault(_Data, frozen=True):
    """The fault of an answer; the default is none."""

    status: int = 200
    headers: dict[str, str] = {}
    """Headers beside the usual ones, or in their place."""
    message: str | None = None
    """The words in the vendor's own form of an error."""
    raw: bytes | None = None
    """The whole body, also for a status other than 200; base64 in JSON."""
    failure: Failure | None = None
    drop: tuple[str, ...] = ()
    """Frames of a stream that are left out, by label with `*`: the event's name, or for formats without names
    `role`, `reasoning`, `text`, `refusal`, `call`, `finish`, `usage`, `done`. `END` names the frames that say how
    the answer ended, `CLOSING` the closing frames that add nothing: `[DONE]`, `message_stop`, `*.done`."""

    split_bytes: int = 0
    """Bytes per write; 0 writes a frame at a time."""
    first_byte_ms: int = 0
    """Wait before the answer begins."""
    pause_ms: int = 0
    """Wait before each piece but the first."""
    close_delimited: bool = False
    """No length and no chunks: the end of the connection is the end of the body."""

    cut_after_bytes: int | None = None
    """Close the connection after this much of the body, without an end."""
    stall_after_frames: int | None = None
    """Send no more frames, and keep the connection open until the client leaves."""
    stall_comment_ms: int | None = None
    """While stalled, send a keep-alive comment this often; None is silence."""
    reset: bool = False
    """Reset the connection where it is cut, or before any answer."""

    @property
    def is_endless(self) -> bool:
        """True if the answer begins and has no end."""
        return self.cut_after_bytes is not None or self.stall_after_frames is not None


class When(_Data, frozen=True):
    """Which requests a turn answers: those for which every condition that is set holds."""

    last: str | None = None
    """Part of the prompt or the tool results after the model's last answer."""
    anywhere: str | None = None
    """Part of the body, written as compact JSON."""
    tools: bool | None = None
    """True if the request must offer tools, False if it must not."""
    has: str | None = None
    """JSON pointer to a member that must be there."""
    is_text: str | None = None
    """JSON pointer to a member that must be a string."""
    max_tokens: int | None = None
    """The request asks for at most so many."""
    stream: bool | None = None


class Turn(_Data, frozen=True):
    """One answer of the model: reasoning, then text, then calls."""

    text: str | None = None
    reasoning: str | None = None
    signature: str = "c2NyaXB0ZWQ="
    """The vendor's proof on reasoning, if the format has one."""
    refusal: str | None = None
    calls: tuple[Call, ...] = ()
    usage: ScriptUsage | None = ScriptUsage()
    """None: the answer has no counts of tokens."""
    stop: Stop | None = None
    """None: `tool_use` with calls, else `end`."""
    stop_raw: str | None = None
    """The word on the wire, also one that the vendor does not know."""
    pieces: int = 4
    """Number of deltas for each text."""
    fault: Fault = Fault()
    when: When | None = None
    """None: the turn is one of the queue. Turns with a condition are looked at first, in order."""
    times: int | None = 1
    """Number of requests that it answers; None is any number."""

    @property
    def stopped(self) -> Stop:
        """Why the answer ends."""
        return self.stop or ("tool_use" if self.calls else "end")


class Script(_Data, frozen=True):
    """Everything that a server answers."""

    turns: tuple[Turn, ...] = ()
    models: tuple[str, ...] = (MODEL,)
    """The models that are listed; requests may name any model."""
    keys: tuple[str, ...] = ()
    """Keys that are accepted; empty accepts any key, and none."""
    protocols: tuple[ProtocolName, ...] = PROTOCOL_NAMES
    """Protocols whose paths exist."""
    prefix: str | None = None
    """The beginning of every path that exists; None: any."""


SIDE_TURNS: Final[tuple[Turn, ...]] = (
    Turn(text="A title", times=None, when=When(tools=False)),
    Turn(text="ok", times=None, when=When(max_tokens=1)),
)
"""Turns for a script that a real agent plays: they answer titles, probes and guesses beside the work."""

Scripted = Script | Turn | Sequence[Turn | Mapping[str, Any]] | Mapping[str, Any]
"""Forms in which a script may be given; a list is its turns."""


def read_script(value: Scripted) -> Script:
    """Return a script from its plain data.

    Raises:
        ContractError: `contract_schema_violation` when a member is unknown or has the wrong type.
    """
    turns = [value] if isinstance(value, Turn) else value
    plain = turns if isinstance(turns, Mapping | Script) else {"turns": list(turns)}
    try:
        return msgspec.convert(msgspec.to_builtins(plain), Script)
    except msgspec.ValidationError as error:
        raise ContractError(
            "contract_schema_violation", f"the script of a model server: {error}", hint="see backplane.testing.Turn"
        ) from error
