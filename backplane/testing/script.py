"""Turns of a scripted model as plain data, faults included; the same for all four wire formats.

A script can be written as JSON and read back; nothing here is sent or received.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from backplane.contract.canonical import Json
from backplane.errors import ContractError
from backplane.upstream.presets import PROTOCOLS, ProtocolName

Stop = Literal["end", "tool_use", "max_tokens", "stop_sequence", "refusal", "content_filter", "pause"]

MODEL: Final = "scripted-model"
"""The model that is listed where a script names none."""


class _Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value of a script, which people type: an unknown member is an error."""


class Call(_Data, frozen=True):
    """A tool call that the model makes."""

    name: str
    input: Json = {}
    """The arguments; a string is sent unchanged, so broken JSON can be scripted, too.

    Where a format has the arguments as a value (Gemini, Messages without a stream), a string that is JSON becomes its
    value, and broken JSON stays a string.
    """
    id: str | None = None
    """None: made from the request's number, and left out where the vendor leaves it out."""
    kind: Literal["function", "custom"] = "function"
    """A custom tool takes free text: `input` is then a string."""
    signature: str | None = None
    """The vendor's proof on the call, where the format has one."""
    namespace: str | None = None
    """Namespace of the tool; only the protocol Responses has namespaces."""


class ScriptUsage(_Data, frozen=True):
    """Tokens of an answer: `input` is everything sent, cache reads and writes included; `output` has the reasoning."""

    input: int = 20
    output: int = 10
    cache_read: int = 0
    cache_write: int = 0
    reasoning: int = 0


class Failure(_Data, frozen=True):
    """An error that comes inside a stream, after the content, instead of its end."""

    code: str = "server_error"
    """The vendor's own word: `overloaded_error`, `context_length_exceeded`, `UNAVAILABLE`, …"""
    message: str = "scripted failure"
    status: int = 500
    """Status of the answer to a request that does not stream."""


class Fault(_Data, frozen=True):
    """Faults of an answer; the default has none."""

    status: int = 200
    headers: dict[str, str] = {}
    """Sent beside the usual ones, or in their place."""
    body: Json = None
    """Sent as JSON, a string as it is; None: the vendor's own form of an error of this status."""
    message: str | None = None
    """The words in the vendor's own form of an error."""
    raw: bytes | None = None
    """The body of an answer of status 200, whatever was asked; base64 in JSON."""
    answer_as: Literal["asked", "stream", "whole"] = "asked"
    """A stream to who asked for none, or the other way round."""
    failure: Failure | None = None

    drop: tuple[str, ...] = ()
    """Frames that are left out, by label with `*`: the event's name, or for formats without one
    `role`, `reasoning`, `text`, `refusal`, `call`, `finish`, `usage`, `done`. `END` names those that say how the answer
    ended, `CLOSING` those after them that say nothing new: `[DONE]`, `message_stop`, `*.done`."""
    repeat: tuple[str, ...] = ()
    """Frames that come twice, by label."""
    garbage: str | None = None
    """One frame of this data before the terminal ones."""

    crlf: bool = False
    keep_alives: int = 0
    """Comments before each frame; blank lines where the format has no comments."""
    split_bytes: int = 0
    """Write in pieces of so many bytes; 0: a frame at a time."""
    first_byte_ms: int = 0
    pause_ms: int = 0
    """Wait before each piece but the first."""
    close_delimited: bool = False
    """No length and no chunks: the end of the connection is the end of the body."""

    cut_after_bytes: int | None = None
    """Close the connection when so much of the body was sent, without an end."""
    stall_after_frames: int | None = None
    """Send no more frames, and keep the connection open until the client leaves."""
    stall_comment_ms: int | None = None
    """While stalled, a keep-alive comment this often, for ever; None is silence."""
    hang: bool = False
    """Never a byte of an answer."""
    reset: bool = False
    """Reset the connection, where it is cut or before any answer."""


class When(_Data, frozen=True):
    """Which requests a turn answers: those for which all that is set holds."""

    last: str | None = None
    """Part of what was said after the model's last answer: prompt or tool results."""
    anywhere: str | None = None
    """Part of the body, written as compact JSON."""
    tools: bool | None = None
    """True if the request offers tools."""
    tool: str | None = None
    """A tool of this name is offered."""
    model: str | None = None
    """The model's name, with `*`."""
    has: str | None = None
    """JSON pointer to a member that must be there."""
    lacks: str | None = None
    """JSON pointer to a member that must not be there."""
    is_text: str | None = None
    """JSON pointer to a member that must be a string."""
    max_tokens: int | None = None
    """The request asks for at most so many."""
    stream: bool | None = None
    protocol: ProtocolName | None = None


class Turn(_Data, frozen=True):
    """One answer of the model: reasoning, then text, then calls."""

    text: str | None = None
    reasoning: str | None = None
    signature: str = "c2NyaXB0ZWQ="
    """The vendor's proof on reasoning, where the format has one."""
    refusal: str | None = None
    calls: tuple[Call, ...] = ()
    usage: ScriptUsage | None = ScriptUsage()
    """None: the answer says nothing of tokens."""
    stop: Stop | None = None
    """None: `tool_use` with calls, else `end`."""
    stop_raw: str | None = None
    """A word for the wire that no vendor knows, or another vendor's."""
    pieces: int = 4
    """Into how many deltas each text is cut."""
    fault: Fault = Fault()
    when: When | None = None
    """None: the turn is one of the queue. Turns with a condition are looked at first, in order."""
    times: int | None = 1
    """Number of requests that the turn answers; None is without end."""

    @property
    def stopped(self) -> Stop:
        """Why the answer ends."""
        return self.stop or ("tool_use" if self.calls else "end")


class Script(_Data, frozen=True):
    """The turns of a server, and the requests that it accepts."""

    turns: tuple[Turn, ...] = ()
    conversations: dict[str, tuple[Turn, ...]] = {}
    """Scripts of their own for the requests whose body has this marker, or whose key is it."""
    models: tuple[str, ...] = (MODEL,)
    """Names in the list of models; requests may name any model."""
    keys: tuple[str, ...] = ()
    """The keys that are let in; empty: any, and none at all."""
    protocols: tuple[ProtocolName, ...] = PROTOCOLS
    """The others' paths do not exist."""
    prefix: str | None = None
    """Paths that begin otherwise do not exist; None: any prefix will do."""


SIDE_TURNS: Final[tuple[Turn, ...]] = (
    Turn(text="A title", times=None, when=When(tools=False)),
    Turn(text="ok", times=None, when=When(max_tokens=1)),
)
"""Turns for real agents, which ask for titles, probes and guesses beside their work."""

Scripted = Script | Turn | Sequence[Turn | Mapping[str, Any]] | Mapping[str, Any]
"""Everything a script may be given as; a list is its turns."""


def read_script(value: Scripted) -> Script:
    """Return a script from its plain data.

    Raises:
        ContractError: `contract_schema_violation` when a member is unknown or has the wrong type.
    """
    if isinstance(value, Script):
        return value
    if isinstance(value, Turn):
        return Script(turns=(value,))
    plain = value if isinstance(value, Mapping) else {"turns": list(value)}
    try:
        return msgspec.convert(msgspec.to_builtins(plain), Script)
    except msgspec.ValidationError as error:
        raise ContractError(
            "contract_schema_violation", f"the script of a model server: {error}", hint="see backplane.testing.Turn"
        ) from error
