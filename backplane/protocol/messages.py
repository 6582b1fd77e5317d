"""The table of messages with their senders and extensions, and the types of the results of reading a line."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from backplane.contract import canonical
from backplane.contract import envelope as wire
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent
from backplane.contract.receipt import CONTRACT_VERSION
from backplane.contract.unknown import explain, keep_unknown
from backplane.errors import PolicyError, ProtocolError
from backplane.protocol.lines import EVIDENCE_BYTES

Sender = Literal["control", "host"]

MESSAGES: Final[dict[str, tuple[type[Any], Sender, str | None]]] = {
    "hello": (wire.Hello, "host", None),
    "run": (wire.RunMessage, "control", None),
    "event": (wire.EventMessage, "host", None),
    "final": (wire.Final, "host", None),
    "fatal": (wire.Fatal, "host", None),
    "cancel": (wire.Cancel, "control", "cancel/1"),
    "input": (wire.Input, "control", "input/1"),
    "interrupt": (wire.Interrupt, "control", "interrupt/1"),
    "ping": (wire.Ping, "control", "ping/1"),
    "pong": (wire.Pong, "host", "ping/1"),
    "ask": (wire.Ask, "host", "ask/1"),
    "answer": (wire.AnswerMessage, "control", "ask/1"),
}
"""Name of a message → its type, its sender, and the extension that its receiver must have announced."""

WRONG_SHAPE: Final[dict[str, str]] = {"hello": "protocol_handshake_failed", "final": "contract_invalid_receipt"}
"""Message name → error code for its wrong shape; all other messages use `contract_schema_violation`."""


class Events(msgspec.Struct, frozen=True, gc=False):
    """Events of one run that arrived together."""

    ref_id: str
    events: list[AgentEvent]
    lines: bytes
    """The canonical bytes of each event, in the same order, each ended by a newline."""
    ours: bool = False
    """True if the control plane added the events, not the host."""

    @classmethod
    def of(cls, ref_id: str, events: list[AgentEvent], *, ours: bool = False) -> Events:
        """Make a batch from events that were not read from lines."""
        return cls(ref_id, events, canonical.encode_lines(events), ours)

    @property
    def records(self) -> list[bytes]:
        """The canonical bytes of each event."""
        return self.lines.split(b"\n")[:-1]


class Noise(msgspec.Struct, frozen=True):
    """A line that is no message: a banner, a prompt, a stray print."""

    line: bytes


NOISE_SHOWN: Final = 120
"""Bytes of a noise line that an error shows: about one line on a terminal."""


def describe_noise(count: int, first: bytes) -> str:
    """Describe a host's lines that are no messages, as the end of an error's text; empty if `count` is 0."""
    if not count:
        return ""
    many = f"{count} lines that are no messages, the first" if count > 1 else "a line that is no message"
    return f"; it wrote {many}: {first[:NOISE_SHOWN].decode('utf-8', 'replace')!r}"


class Dropped(msgspec.Struct, frozen=True):
    """A message that has no effect; it is counted under `why`."""

    why: Literal["foreign_ref_id", "second_hello", "after_end", "unasked_answer"]
    message: str


class Unknown(msgspec.Struct, frozen=True):
    """A message whose type this version does not know, with all its members."""

    t: str
    ref_id: str | None
    value: dict[str, Any]


class Broken(msgspec.Struct, frozen=True):
    """A violation of the protocol: at the control plane's end it ends the run; a host answers it with one error."""

    code: str
    message: str
    evidence: bytes
    ref_id: str | None = None


UNHEARD_CHARS_MAX: Final = 100
"""Maximum length of an ignored hello member's text in the warning about the member."""


def lenient_hello(value: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Remove wrong members of a hello that should not fail a start; return the rest, and the removed ones as JSON.

    These are an unknown mode, and extensions, heeds or instruction files that are not all strings.
    """
    known, unheard = {**value}, dict[str, Json]()
    if value.get("mode", "mapped") not in ("passthrough", "mapped"):
        unheard["mode"] = known.pop("mode")
    for name in ("extensions", "heeds", "instruction_files"):
        entries = value.get(name, [])
        texts = [entry for entry in entries if isinstance(entry, str)] if isinstance(entries, list) else None
        if texts is None or texts != entries:
            unheard[name] = known.pop(name)
            if name == "extensions":
                known[name] = texts or []
    return known, {name: canonical.encode(one).decode()[:UNHEARD_CHARS_MAX] for name, one in unheard.items()}


Received = (
    Events | wire.Hello | wire.RunMessage | wire.Final | wire.Fatal | wire.Cancel | wire.Input | wire.Interrupt
    | wire.Ping | wire.Pong | wire.Ask | wire.AnswerMessage | Noise | Dropped
    | Unknown | Broken | Exception
)  # fmt: skip


def version_compatible(theirs: str) -> bool:
    """Return True if both ends can communicate: their `abp/vMAJOR.MINOR` have the same major number."""
    return _major(theirs) is not None and _major(theirs) == _major(CONTRACT_VERSION)


def _major(version: str) -> int | None:
    prefix, _, number = version.partition("/v")
    major, dot, minor = number.partition(".")
    whole = prefix == "abp" and dot and major.isascii() and major.isdigit() and minor.isascii() and minor.isdigit()
    return int(major) if whole and len(major) <= 9 else None


encode_line: Final = msgspec.json.Encoder().encode


def convert(t: str, value: dict[str, Any], line: bytes) -> Received:
    """Convert an object with a known `t` to its message; an object of the wrong shape becomes `Broken`."""
    shape = MESSAGES[t][0]
    ref_id = text_or_none(value.get("id" if t == "run" else "ref_id"))
    try:
        if t == "run" and "work_order" in value:
            value = {**value, "work_order": _root_named(keep_unknown(value["work_order"]))}
        message: Received = msgspec.convert(value, shape)
        return message
    except PolicyError as error:
        return Broken(error.code, f"{error.message} ({error.hint})", line[:EVIDENCE_BYTES], ref_id)
    except ValueError as error:
        code = WRONG_SHAPE.get(t, "contract_schema_violation")
        why = explain(error, shape) if isinstance(error, msgspec.ValidationError) else str(error)
        return Broken(code, f"{t} has the wrong shape: {why}", line[:EVIDENCE_BYTES], ref_id)


def _root_named(order: Json) -> Json:
    """Give an order without a root an empty root: the default `.` would mean the reader's current folder."""
    workspace = order.get("workspace", {}) if isinstance(order, dict) else None
    if not isinstance(workspace, dict) or "root" in workspace:
        return order
    return {**order, "workspace": {**workspace, "root": ""}}


def line_of(envelope: msgspec.Struct, line_bytes_max: int) -> bytes:
    """Encode a message as a line. Raises ProtocolError: the line would be over the limit."""
    line = encode_line(envelope)
    if len(line) > line_bytes_max:
        raise ProtocolError(
            "protocol_invalid_envelope",
            f"a message of {len(line)} bytes is over line_bytes_max ({line_bytes_max} bytes)",
            hint="raise line_bytes_max at both ends, or send less",
        )
    return line + b"\n"


def text_or_none(value: Json) -> str | None:
    return value if isinstance(value, str) else None
