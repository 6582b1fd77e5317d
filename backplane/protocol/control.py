"""The control plane's end of a connection: reads and checks a host's messages, and writes its own messages.

An event is first decoded by its type. If its line has more than the type's members, it is decoded again as plain JSON,
so that no member is lost. `runtime.inbound` decides what a message means for a run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET

from backplane.contract import canonical
from backplane.contract import envelope as wire
from backplane.contract.events import (
    AgentEvent,
    AssistantDelta,
    AssistantMessage,
    FileChanged,
    RunCompleted,
    RunStarted,
    Warned,
    carried,
    moved,
    read_event,
)
from backplane.errors import CapabilityError, ProtocolError
from backplane.protocol.lines import EVIDENCE_BYTES, LINE_BYTES_MAX, Lines, Overlong, bare, strict
from backplane.protocol.messages import (
    MESSAGES,
    Broken,
    Dropped,
    Events,
    Noise,
    Received,
    Unknown,
    convert,
    encode_line,
    lenient_hello,
    line_of,
    text_or_none,
    version_compatible,
)
from backplane.redact.secrets import NO_SECRETS, Redactor
from backplane.redact.tail import LOOK_BYTES

_PLAIN: Final = frozenset({AssistantDelta, AssistantMessage, Warned, RunStarted, RunCompleted, FileChanged})
"""Event types whose members are all required strings, so that a compact line has exactly their canonical bytes."""

_is_time: Final = functools.lru_cache(maxsize=4096)(canonical.is_timestamp)
"""Checks the form of a timestamp; the cache helps because consecutive events often have the same one."""


class _NoMessage(msgspec.Struct, frozen=True, tag_field="t", tag="\0"):
    """Makes the decoder require `t`: if a union has only one struct, msgspec accepts it without its tag."""

    ref_id: str
    event: AgentEvent


_MESSAGE: Final = {"t", "ref_id", "event"}
"""Member names of an `event` message."""

# Events with floats are read again, exactly; `float` is only the fastest hook.
_decode_event: Final = msgspec.json.Decoder(wire.EventMessage | _NoMessage, float_hook=float).decode
_encode: Final = msgspec.json.Encoder(order="sorted").encode


ReadEvent = tuple[str, AgentEvent, bytes]
"""The run's id, one event, and the event's canonical bytes."""

_Group = tuple[str, list[AgentEvent], list[bytes]]
"""A run's id, some of its events, and the canonical bytes of each."""


Sent = wire.RunMessage | wire.Cancel | wire.Input | wire.Interrupt | wire.Ping | wire.AnswerMessage
"""The messages that a control plane may send."""


class ControlEnd:
    """The control plane's end of one connection: reads a host's messages and writes the control plane's messages.

    Args:
        now: returns the current time as a timestamp of the contract, for warnings that replace unreadable events.
        redactor: removes secrets from everything that is returned.
    """

    def __init__(
        self,
        *,
        now: Callable[[], str],
        line_bytes_max: int = LINE_BYTES_MAX,
        redactor: Redactor = NO_SECRETS,
    ) -> None:
        self.hello: wire.Hello | None = None
        self.hello_unheard: dict[str, str] = {}
        """Ignored members of the hello, as the host wrote them."""
        self.lines_read = 0
        self._lines = Lines(line_bytes_max)
        self._now = now
        self.redacted = 0
        """Number of places where a secret was replaced."""
        self.unended = 0
        """1 if the last line is a whole message without a newline."""
        self.unnamed = 0
        """Number of events without `ref_id`, which were assigned to the only open run."""
        self.prefixed = 0
        """Number of messages after control characters or terminal sequences, which were skipped."""
        self._redactor = redactor
        self._open: dict[str, int] = {}
        self._ended: tuple[str, ...] = ()
        self._was_asked = False

    @property
    def extensions(self) -> tuple[str, ...]:
        """The extensions that the host announced; empty before its hello."""
        return self.hello.extensions if self.hello is not None else ()

    def send(self, envelope: Sent) -> bytes:
        """Write one message as a line.

        Raises:
            ProtocolError: the host has not sent its hello or not announced the extension, or the message is too long.
            CapabilityError: `capability_unsupported`, the message is an interrupt, and the host takes none.
        """
        name = str(envelope.__struct_config__.tag)
        needed = MESSAGES[name][2] if name in MESSAGES else None
        spoken = needed in self.extensions or (needed == "ask/1" and self._was_asked)
        if self.hello is None:
            fact = f"{name} cannot be sent before the host's hello"
            raise ProtocolError("protocol_unexpected_message", fact, hint="wait for it, or cancel the run")
        if isinstance(envelope, wire.Interrupt) and not spoken:
            fact = f"the host of {self.hello.backend.id} takes no interrupt (it does not announce interrupt/1)"
            fix = f"to end the run: backplane cancel {envelope.ref_id[:8]}"
            raise CapabilityError("capability_unsupported", fact, hint=fix)
        if needed is not None and not spoken:
            raise ProtocolError("protocol_unexpected_message", f"{name} was not announced by the host")
        if isinstance(envelope, wire.RunMessage):
            # The bytes that a compact line of this run has around its event.
            frame = encode_line({"t": "event", "ref_id": envelope.id, "event": 0})
            self._open[envelope.id] = len(frame) - 1
        return line_of(envelope, self._lines.line_bytes_max)

    def close_run(self, ref_id: str) -> None:
        """Mark a run as ended, so that its later messages are dropped and counted."""
        self._open.pop(ref_id, None)
        self._ended += (ref_id,)

    def receive(self, data: bytes) -> list[Received]:
        """Read bytes from the host; return the completed messages in order, consecutive events of a run as one item.

        An exception in our own code becomes the last item, so that the messages before it still count.
        """
        return self._read(self._lines.feed(data))

    def _read(self, lines: list[bytes]) -> list[Received]:
        found: list[Received | _Group] = []
        try:
            for line in lines:
                self.lines_read += 1
                read = self._plain(line) or self._other(line)
                if not isinstance(read, tuple):
                    found += [read] if read is not None else []
                elif found and isinstance(last := found[-1], tuple) and last[0] == read[0]:
                    last[1].append(read[1])
                    last[2].append(read[2])
                else:
                    found.append((read[0], [read[1]], [read[2]]))
        except Exception as error:  # It ends the run, after the messages before it.
            found.append(error)
        # One search for secrets usually covers all events that came together.
        return [
            Events(one[0], *self.clean(one[1], b"\n".join([*one[2], b""]))) if isinstance(one, tuple) else one
            for one in found
        ]

    def _plain(self, line: bytes) -> ReadEvent | None:
        """Read a compact line with nothing but an event's required members; return None for any other line.

        No line is shorter than its compact form, so an equal length proves that the line is compact.
        """
        try:
            message = _decode_event(line)
        except Exception:  # `_other` reads the line again, and reports its fault.
            return None
        ref_id, event = message.ref_id, message.event
        if type(event) not in _PLAIN or event.ext is not UNSET or not _is_time(event.ts):
            return None
        record = _encode(event)
        return (ref_id, event, record) if self._open.get(ref_id, -1) + len(record) == len(line) else None

    def end(self) -> list[Received]:
        """Return the messages of an unfinished last line; a whole message without a newline counts, see `unended`."""
        rest = self._lines.end()
        if not rest.strip():
            return []
        try:
            strict(bare(rest))
        except ValueError:
            return [Noise(self._evidence(rest) if type(rest) is Overlong else self._clean_line(rest))]
        self.unended += 1
        return self._read([rest])

    def _read_event(self, value: dict[str, Any]) -> tuple[AgentEvent, bytes]:
        """Read a message's event; the message's other members move into the event's `ext`, so that none is lost."""
        if value["t"] != "event":
            raise ValueError("`t` stands twice, and the last one counts")
        event = read_event(value.get("event"), now=self._now)
        if not (value.keys() <= _MESSAGE and isinstance(value.get("ref_id", ""), str)):
            stray = {name: member for name, member in value.items() if name not in _MESSAGE}
            if not isinstance(value.get("ref_id", ""), str):
                stray["ref_id"] = value["ref_id"]
            event = msgspec.structs.replace(event, ext=moved(event.ext, "unknown_envelope", stray, beside="event"))
        event = carried(event)
        return event, canonical.encode(event)

    def clean(self, events: list[AgentEvent], lines: bytes) -> tuple[list[AgentEvent], bytes]:
        """Remove secrets from events and from their canonical bytes, one line per event."""
        if not self._redactor.found(lines):
            return events, lines
        clean = [self._redactor.event(event) for event in events]
        self.redacted += sum(count for _, count in clean)
        pairs = zip(clean, lines.split(b"\n")[:-1], strict=True)
        lines = b"\n".join([*(canonical.encode(event) if count else record for (event, count), record in pairs), b""])
        return [event for event, _ in clean], lines

    def _clean_line(self, line: bytes) -> bytes:
        clean, count = self._redactor.data(line)
        self.redacted += count
        return clean

    def _clean_text(self, text: str) -> str:
        return self._redactor.text(text)[0]

    def _evidence(self, line: bytes) -> bytes:
        """Return the beginning of a line, with secrets removed, for an error."""
        clean, count = self._redactor.part(line[:LOOK_BYTES], 0, EVIDENCE_BYTES)
        self.redacted += count
        return clean[:EVIDENCE_BYTES]

    def _clean_value(self, value: dict[str, Any]) -> dict[str, Any]:
        """Remove secrets from a message, except from the members that the protocol itself needs."""
        clean, count = self._redactor.json(value)
        self.redacted += count
        return {**clean, **{name: value[name] for name in _own_names(value) if name in value}} if count else value

    def _overlong(self, head: bytes) -> Noise | Broken:
        limit = self._lines.line_bytes_max
        if not head.lstrip().startswith(b"{"):
            return Noise(self._evidence(head))
        fact = f"line {self.lines_read} is over line_bytes_max ({limit} bytes)"
        return Broken("protocol_invalid_envelope", fact, self._evidence(head))

    def _other(self, line: bytes) -> ReadEvent | Received | None:
        """Read a line in full; return None for a blank line."""
        if isinstance(line, Overlong):
            return self._overlong(line)
        if not line.lstrip().startswith(b"{"):
            return self._prefixed(line) if line.strip() else None
        try:
            value = strict(line)
        except ValueError as error:
            fact = f"line {self.lines_read} is not strict JSON: {error}; one message is one line"
            return Broken("protocol_invalid_envelope", fact, self._evidence(line))
        t = value.get("t")
        if not isinstance(t, str) or (self.hello is None and t not in MESSAGES):
            return Noise(self._clean_line(line))
        if t != "event":
            value = self._clean_value(value)
        if t not in MESSAGES:
            return Unknown(self._clean_text(t), text_or_none(value.get("ref_id")), value)
        if t != "hello" and self.hello is None:
            read: ReadEvent | Received = Broken("protocol_handshake_failed", f"{t} came before the hello", line)
        else:
            read = self._hello(value, line) if t == "hello" else self._known(t, value, line)
        if isinstance(read, Broken):
            read = msgspec.structs.replace(read, evidence=self._evidence(line))
        return read

    def _prefixed(self, line: bytes) -> ReadEvent | Received | None:
        """Read a message after control characters; a line without a readable message is noise."""
        message = bare(line)
        try:
            value = strict(message) if message is not line else None
        except ValueError:
            value = None
        if value is None:
            return Noise(self._clean_line(line))
        self.prefixed += 1
        return self._other(message)

    def _hello(self, value: dict[str, Any], line: bytes) -> Received:
        if self.hello is not None:
            return Dropped("second_hello", "a second hello; the first one stands")
        known, unheard = lenient_hello(value)
        message = convert("hello", known, line)
        if isinstance(message, wire.Hello):
            self.hello, self.hello_unheard = message, unheard
        return message

    def _known(self, t: str, value: dict[str, Any], line: bytes) -> ReadEvent | Received:
        if MESSAGES[t][1] == "control":
            return Broken("protocol_unexpected_message", f"the host sent {t}, which only a control plane may", line)
        ref_id = value.get("ref_id")
        if t == "pong" or (t == "fatal" and ref_id is None):
            return convert(t, value, line)
        if isinstance(ref_id, str) and ref_id not in self._open:
            why: Literal["after_end", "foreign_ref_id"] = "after_end" if ref_id in self._ended else "foreign_ref_id"
            return Dropped(why, f"{t} for run {self._clean_text(ref_id)[:60]!r}")
        if t != "event" and not isinstance(ref_id, str):
            return Broken("protocol_missing_ref_id", f"{t} does not name its run: it has no text `ref_id`", line)
        if t != "event":
            # A host that asks must get an answer even if it did not announce `ask/1`, or it would wait for ever.
            self._was_asked = self._was_asked or t == "ask"
            if t == "final" and (twice := canonical.duplicate_key(line, value)) is not None:
                fact = f"the key {self._clean_text(twice)[:60]!r} stands twice in a final"
                return Broken("contract_invalid_receipt", fact, line)
            return convert(t, value, line)
        # An event without `ref_id` belongs to the only open run; without exactly one, it is dropped.
        if isinstance(ref_id, str):
            return ref_id, *self._read_event(value)
        if len(self._open) != 1:
            return Dropped("foreign_ref_id", "event without ref_id")
        self.unnamed += 1
        return next(iter(self._open)), *self._read_event(value)


def _own_names(value: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of members that the protocol needs unredacted; their values are stored nowhere."""
    t = value["t"]
    if t == "hello":
        version = value.get("contract_version")
        return ("t", "contract_version") if isinstance(version, str) and version_compatible(version) else ("t",)
    if t == "ask":
        return ("t", "ref_id", "id")
    return ("t", "ref_id") if t in MESSAGES else ()
