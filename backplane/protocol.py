"""Lines to messages and back, for both ends, without any I/O.

Bytes go in, checked messages come out; the tables say who may say what and when. Every
door uses the same strict reader: split at LF only, bounded, UTF-8, bounded depth, strict
JSON. Nothing here waits, reads a clock or knows a process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import islice
from operator import attrgetter
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET

from backplane.contract import canonical
from backplane.contract import envelope as wire
from backplane.contract.canonical import Json
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
from backplane.contract.receipt import CONTRACT_VERSION
from backplane.errors import ProtocolError
from backplane.redact import Redactor

LINE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Longest line: images in base64 need more than 1 MiB, and a peer without a limit is a way to use up memory."""

DEPTH_MAX: Final = 128
"""Deepest nesting of a line: far above real messages, far below where a recursive reader fails."""

VALUES_MAX: Final = 81_920
"""Values in a line: in Python the smallest object takes some 200 bytes and is there three times while it is read, so
a line of 16 MiB could need gigabytes; so many need 50 MiB. A tool's output of a mebibyte has a fifth of that."""

FINAL_VALUES_MAX: Final = 1_048_576
"""The same for a `final`: it may bring the whole trace, and 16 MiB of the shortest events are 800,000."""

EVIDENCE_BYTES: Final = 200
"""How much of a bad line an error shows."""

_EVIDENCE_LOOK_BYTES: Final = 16 * 1024
"""How much of a bad line is searched for secrets before it is cut to what is shown: longer than a private key."""

_MARK: Final = b"\xef\xbb\xbf"

_DEPTH_BYTES: Final = 2 * DEPTH_MAX
"""A shorter line cannot be nested too deep."""

Sender = Literal["control", "host"]

MESSAGES: Final[dict[str, tuple[type[Any], Sender]]] = {
    "hello": (wire.Hello, "host"),
    "run": (wire.Run, "control"),
    "event": (wire.Event, "host"),
    "final": (wire.Final, "host"),
    "fatal": (wire.Fatal, "host"),
    "cancel": (wire.Cancel, "control"),
    "input": (wire.Input, "control"),
    "interrupt": (wire.Interrupt, "control"),
    "ping": (wire.Ping, "control"),
    "pong": (wire.Pong, "host"),
    "ask": (wire.Ask, "host"),
    "answer": (wire.Answer, "control"),
    "tree": (wire.Tree, "control"),
    "patch": (wire.Patch, "host"),
}
"""Every message: its shape and who may send it."""

NEEDS_EXTENSION: Final[dict[str, str]] = {
    "cancel": "cancel/1",
    "input": "input/1",
    "interrupt": "interrupt/1",
    "ping": "ping/1",
    "pong": "ping/1",
    "ask": "ask/1",
    "answer": "ask/1",
    "tree": "tree/1",
    "patch": "tree/1",
}
"""Messages that are only sent to a peer that announced the extension."""

WRONG_SHAPE: Final[dict[str, str]] = {
    "hello": "protocol_handshake_failed",
    "final": "contract_invalid_receipt",
}
"""Code for a known message of the wrong shape; the rest are `contract_schema_violation`."""


class Events(msgspec.Struct, frozen=True, gc=False):
    """Events of one run that arrived together."""

    ref_id: str
    events: list[AgentEvent]
    lines: bytes
    """The canonical bytes of each event, in the same order, each ended by a newline."""
    ours: bool = False
    """Added by the control plane: not part of what the host said."""

    @classmethod
    def of(cls, ref_id: str, events: list[AgentEvent], *, ours: bool = False) -> Events:
        """Events that did not come over a line of their own."""
        return cls(ref_id, events, b"".join([canonical.encode(event) + b"\n" for event in events]), ours)

    @property
    def records(self) -> list[bytes]:
        """The canonical bytes of each event."""
        return self.lines.split(b"\n")[:-1]


class Noise(msgspec.Struct, frozen=True):
    """A line that is no message: a banner, a prompt, a stray print."""

    line: bytes


class Dropped(msgspec.Struct, frozen=True):
    """A message that has no effect; counted under `why`."""

    why: Literal["foreign_ref_id", "second_hello", "after_end", "unasked_answer"]
    message: str


class Unknown(msgspec.Struct, frozen=True):
    """A message with a `t` this version does not know, kept as it came."""

    t: str
    ref_id: str | None
    value: dict[str, Any]


class Broken(msgspec.Struct, frozen=True):
    """The peer broke a rule. At the control end it ends the run; at the host end it is one error."""

    code: str
    message: str
    evidence: bytes
    ref_id: str | None = None


Received = (
    Events | wire.Hello | wire.Run | wire.Final | wire.Fatal | wire.Cancel | wire.Input | wire.Interrupt | wire.Ping
    | wire.Pong | wire.Ask | wire.Answer | wire.Tree | wire.Patch | Noise | Dropped | Unknown | Broken
)  # fmt: skip


class Overlong(bytes):
    """The beginning of a line that was over the limit and was skipped to its newline."""


class Lines:
    """Bytes in any pieces to whole lines, bounded; a line over the limit comes out `Overlong`."""

    def __init__(self, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self.line_bytes_max = line_bytes_max
        self._pieces: list[bytes] = []
        self._held = 0
        self._start: bytes | None = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes, give the lines they complete."""
        if self._start is not None:
            data = self._past_mark(data)
        lines = data.split(b"\n")
        rest = lines.pop()
        if lines and self._held:
            self._hold(lines[0])
            whole = b"".join(self._pieces)
            lines[0] = Overlong(whole[:EVIDENCE_BYTES]) if self._held > self.line_bytes_max else whole
        if len(data) > self.line_bytes_max:
            lines = [Overlong(line[:EVIDENCE_BYTES]) if len(line) > self.line_bytes_max else line for line in lines]
        if lines:
            self._pieces, self._held = [], 0
        self._hold(rest)
        return lines

    def block(self, data: bytes) -> bytes | None:
        """Take bytes, give the lines they complete in one piece; None, and nothing taken, where `feed` must look."""
        cut = data.rfind(b"\n") + 1
        if not cut or self._start is not None or self._held + len(data) > min(self.line_bytes_max, VALUES_MAX):
            return None
        whole = b"".join([*self._pieces, data[:cut]])
        self._pieces, self._held = [], 0
        self._hold(data[cut:])
        return whole

    def end(self) -> bytes:
        """The unfinished last line, at the end of the stream."""
        held = (self._start or b"") + b"".join(self._pieces)
        over = self._held > self.line_bytes_max
        self._pieces, self._held, self._start = [], 0, None
        return Overlong(held[:EVIDENCE_BYTES]) if over else held

    def _past_mark(self, data: bytes) -> bytes:
        """Take a byte order mark off the very start, where it may come in pieces."""
        data = (self._start or b"") + data
        if len(data) < len(_MARK) and _MARK.startswith(data):
            self._start = data
            return b""
        self._start = None
        return data.removeprefix(_MARK)

    def _hold(self, piece: bytes) -> None:
        if not piece:
            return
        self._held += len(piece)
        if self._held <= self.line_bytes_max:
            self._pieces.append(piece)
        elif len(self._pieces) != 1 or len(self._pieces[0]) != EVIDENCE_BYTES:
            # Only the beginning is kept, for the error: memory stays at what the limit allows.
            self._pieces = [b"".join([*self._pieces, piece[:EVIDENCE_BYTES]])[:EVIDENCE_BYTES]]


def _ends_otherwise(block: bytes, cut: int) -> bool:
    """Whether the last line, which starts at `cut`, begins differently from a first line that says something."""
    return cut > 0 and _SPOKEN_MARK in block[:_LOOK_BYTES] and not block.startswith(block[cut : cut + _KIND_BYTES])


def strict(line: bytes) -> Json:
    """Read one line as strict JSON: UTF-8, no lone surrogate, no NaN, bounded depth and numbers.

    Raises:
        ValueError: with the reason in words.
    """
    if not line.isascii():
        line.decode()
    if len(line) > _DEPTH_BYTES and _too_deep(line):
        raise ValueError(f"nested deeper than {DEPTH_MAX} levels")
    value = canonical.decode(line)
    if len(line) > 308:
        canonical.encode(value)  # An integer of over 308 digits has no value that a peer could read.
    return value


class _Tag(msgspec.Struct):
    t: str = ""


_decode_tag: Final = msgspec.json.Decoder(_Tag).decode
# Possessive, and with escapes outside of strings, too: linear in whatever is sent.
_MARKS: Final = re.compile(rb'(?s)"(?:[^"\\]++|\\.)*+"|\\.|[,\[{]')


def bounded(line: bytes) -> None:
    """Refuse a line of too many values, before anything of it becomes an object.

    Raises:
        ValueError: with the limit, or since it is no JSON.
    """
    if len(line) <= VALUES_MAX:
        return
    limit = FINAL_VALUES_MAX if _decode_tag(line).t == "final" else VALUES_MAX
    if len(line) > limit and next(islice(_MARKS.finditer(line), 2 * limit, None), None) is not None:
        raise ValueError(f"more than {limit} values in a line")


def _too_deep(line: bytes) -> bool:
    if line.count(b"{") + line.count(b"[") <= DEPTH_MAX:
        return False
    depth, inside, escaped = 0, False, False
    for byte in line:
        if inside:
            if escaped:
                escaped = False
            elif byte == 0x5C:
                escaped = True
            elif byte == 0x22:
                inside = False
        elif byte == 0x22:
            inside = True
        elif byte in b"{[":
            depth += 1
            if depth > DEPTH_MAX:
                return True
        elif byte in b"}]":
            depth -= 1
    return False


def version_compatible(theirs: str) -> bool:
    """Whether two ends can speak: the same major number of `abp/vMAJOR.MINOR`."""
    return _major(theirs) is not None and _major(theirs) == _major(CONTRACT_VERSION)


def _major(version: str) -> int | None:
    prefix, _, number = version.partition("/v")
    major, dot, minor = number.partition(".")
    whole = prefix == "abp" and dot and major.isascii() and major.isdigit() and minor.isascii() and minor.isdigit()
    return int(major) if whole and len(major) <= 9 else None


_PLAIN: Final = frozenset({AssistantDelta, AssistantMessage, Warned, RunStarted, RunCompleted, FileChanged})
"""Event types whose members are all required strings: the canonical bytes account for every byte of a compact line."""

_TIMES_MAX: Final = 4096
"""Known good times kept, about one a millisecond of a busy stream; then the table starts anew."""


class _NoMessage(msgspec.Struct, frozen=True, tag_field="t", tag="\0"):
    """Beside another struct it makes the decoder insist on `t`: alone, a struct may come without its tag."""

    ref_id: str
    event: AgentEvent


_SPOKEN: Final = frozenset({AssistantDelta, AssistantMessage})
"""Of these the most, and what they say is in one member: a whole read of them is looked at in one go."""

_SPOKEN_MARK: Final = b'"assistant_'
_LOOK_BYTES: Final = 256
"""Of a read, looked at for the mark: a line's members before its text are shorter in any order."""

_KIND_BYTES: Final = 10
"""Of a line's beginning; in the usual order of members they tell an event from another message."""

_REF_ID, _EVENT, _TS = attrgetter("ref_id"), attrgetter("event"), attrgetter("ts")
_decode_lines: Final = msgspec.json.Decoder(wire.Event | _NoMessage).decode_lines
_encode_lines: Final = msgspec.json.Encoder(order="sorted").encode_lines
_decode_event: Final = msgspec.json.Decoder(wire.Event | _NoMessage).decode
_encode: Final = msgspec.json.Encoder(order="sorted").encode
_encode_line: Final = msgspec.json.Encoder().encode


_PONG: Final = re.compile(rb'\{"t":"pong","seq":(0|[1-9][0-9]{0,14})\}')
"""A compact pong, whole: nothing in it is left to be checked, and whoever waits for it measures us."""
_PONG_BYTES_MAX: Final = len('{"t":"pong","seq":}') + 15


class ControlEnd:
    """The control plane's end of one line: reads what a host says, writes what a control plane may say.

    Args:
        now: gives the contract's print form of the present time, for warnings we put in place of
            what cannot be read.
        redactor: keeps secrets out of everything that comes out of here; None looks for none.
    """

    def __init__(
        self,
        *,
        now: Callable[[], str],
        line_bytes_max: int = LINE_BYTES_MAX,
        redactor: Redactor | None = None,
    ) -> None:
        self.hello: wire.Hello | None = None
        self.lines_read = 0
        self._lines = Lines(line_bytes_max)
        self._now = now
        self.redacted = 0
        """Places where a secret was replaced."""
        self._redactor = redactor
        self._open: dict[str, int] = {}
        self._ended: set[str] = set()
        self._was_asked = False
        self._times: set[str] = set()

    @property
    def extensions(self) -> tuple[str, ...]:
        """What the host announced; empty before its hello."""
        return self.hello.extensions if self.hello is not None else ()

    def send(
        self,
        envelope: wire.Run | wire.Cancel | wire.Input | wire.Interrupt | wire.Ping | wire.Answer | wire.Tree,
    ) -> bytes:
        """Write one message as a line.

        Raises:
            ProtocolError: before the hello, or the peer did not announce the extension.
        """
        name = envelope.__struct_config__.tag
        needed = NEEDS_EXTENSION.get(str(name))
        spoken = needed in self.extensions or (needed == "ask/1" and self._was_asked)
        if self.hello is None or (needed is not None and not spoken):
            raise ProtocolError("protocol_unexpected_message", f"{name} was not announced by the host")
        if isinstance(envelope, wire.Run):
            # What surrounds an event's own bytes in a compact line of this run.
            frame = _encode_line({"t": "event", "ref_id": envelope.id, "event": 0})
            self._open[envelope.id] = len(frame) - 1
        return _line(envelope, self._lines.line_bytes_max)

    def close_run(self, ref_id: str) -> None:
        """The run is over for us: whatever still comes for it is dropped and counted."""
        self._open.pop(ref_id, None)
        self._ended.add(ref_id)

    def receive(self, data: bytes) -> list[Received]:
        """Take bytes from the host, give what they complete, in order."""
        block = self._lines.block(data)
        if block is None:
            return self._receive_each(data, self._lines.feed(data))
        pong = _PONG.fullmatch(block, 0, len(block) - 1) if len(block) <= _PONG_BYTES_MAX + 1 else None
        if pong is not None and self.hello is not None:
            self.lines_read += 1
            return [wire.Pong(seq=int(pong[1]))]
        spoken = self._all_spoken(block) if _SPOKEN_MARK in block[:_LOOK_BYTES] else None
        if spoken is not None:
            return [spoken]
        # The end of a stream is such a read with one other message behind it.
        cut = block.rfind(b"\n", 0, -1) + 1
        spoken = self._all_spoken(block[:cut]) if _ends_otherwise(block, cut) else None
        rest = block[cut:] if spoken is not None else block
        return [*([spoken] if spoken is not None else []), *self._receive_each(rest, rest.split(b"\n")[:-1])]

    def _receive_each(self, data: bytes, lines: list[bytes]) -> list[Received]:
        if not lines:  # A line that is not over yet is looked at when it is.
            return []
        out: list[Received] = []
        events: list[AgentEvent] = []
        records: list[bytes] = []
        batches: list[tuple[int, str, list[AgentEvent], list[bytes]]] = []
        of: str | None = None
        opened, times = self._open, self._times
        watchful = self._redactor is not None and self._may_hold_secrets(data, lines)
        for line in lines:
            self.lines_read += 1
            if type(line) is Overlong:
                out.append(self._overlong(line))
                of = None
                continue
            try:
                if len(line) > VALUES_MAX:
                    bounded(line)
                envelope = _decode_event(line)
                event = envelope.event
                record = _encode(event)
                if (
                    opened[envelope.ref_id] + len(record) != len(line)
                    or type(event) not in _PLAIN
                    or event.ext is not UNSET
                    or (event.ts not in times and not self._time_is_canonical(event.ts))
                    or watchful
                ):
                    event, record = self._look_closer(line, envelope)
                ref_id = envelope.ref_id
            except (ValueError, KeyError, RecursionError):
                received = self._other(line)
                if received is None:
                    continue
                if type(received) is not Events:
                    out.append(received)
                    of = None
                    continue
                ref_id, event, record = received.ref_id, received.events[0], received.records[0]
            if ref_id != of:
                events, records, of = [], [], ref_id
                batches.append((len(out), ref_id, events, records))
                out.append(Events(ref_id, events, b""))
            events.append(event)
            records.append(record)
        for place, ref_id, events, records in batches:
            out[place] = Events(ref_id, events, b"\n".join(records) + b"\n")
        return out

    def _all_spoken(self, block: bytes) -> Events | None:
        """The usual read: nothing but compact text events of one run, without a secret; None for any other."""
        if len(block) > VALUES_MAX:  # One of them may be full of small values.
            return None
        try:
            envelopes = _decode_lines(block)
            (ref_id,) = set(map(_REF_ID, envelopes))
            frame = self._open[ref_id]
        except (ValueError, KeyError, RecursionError):
            return None
        events = list(map(_EVENT, envelopes))
        if not _SPOKEN.issuperset(map(type, events)):
            return None
        lines = _encode_lines(events)
        texts = [event.text for event in events if event.ext is UNSET]
        # No line can be shorter than its canonical form, so the sum tells of each.
        compact = len(block) == len(lines) + len(events) * frame and len(texts) == len(events)
        if not compact or not all(map(self._time_is_canonical, set(map(_TS, events)) - self._times)):
            return None
        if self._redactor is not None and self._redactor.found_in(texts):
            return None
        self.lines_read += len(events)
        return Events(ref_id, events, lines)

    def end(self) -> Noise | None:
        """The stream is over: what was not finished with a newline is noise, however it looks."""
        rest = self._lines.end()
        return Noise(self._clean_line(rest)) if rest.strip() else None

    def _look_closer(self, line: bytes, envelope: wire.Event) -> tuple[AgentEvent, bytes]:
        """An event that is more than required strings in a compact line: read it again with nothing skipped."""
        value = strict(line)
        if value["t"] != "event":
            raise ValueError("`t` stands twice, and the last one counts")
        return self._read_event(value)

    def _read_event(self, value: dict[str, Any]) -> tuple[AgentEvent, bytes]:
        """The event in a message, with whatever stands beside it in the message."""
        event = read_event(value.get("event"), now=self._now())
        stray = {name: member for name, member in value.items() if name not in ("t", "ref_id", "event")}
        if not isinstance(value.get("ref_id", ""), str):
            stray["ref_id"] = value["ref_id"]
        if stray:
            event = msgspec.structs.replace(event, ext=moved(event.ext, "unknown_envelope", stray, beside="event"))
        event = self._clean(carried(event))
        return event, canonical.encode(event)

    def _may_hold_secrets(self, data: bytes, lines: list[bytes]) -> bool:
        """One look at a whole read, and one at the line that began in an earlier one."""
        assert self._redactor is not None
        if lines and len(lines[0]) > VALUES_MAX:
            return True  # Read in full anyway; a look at it first would need four times its memory.
        return self._redactor.found(data) or (bool(lines) and len(lines[0]) > 0 and self._redactor.found(lines[0]))

    def _clean(self, event: AgentEvent) -> AgentEvent:
        if self._redactor is None:
            return event
        clean, count = self._redactor.event(event)
        self.redacted += count
        return clean

    def _clean_line(self, line: bytes) -> bytes:
        if self._redactor is None:
            return line
        clean, count = self._redactor.data(line)
        self.redacted += count
        return clean

    def _clean_value(self, value: dict[str, Any]) -> dict[str, Any]:
        """Everything in a message but the names that the protocol itself goes by."""
        if self._redactor is None:
            return value
        own = {name: value[name] for name in ("t", "ref_id", "id", "type", "contract_version") if name in value}
        clean, count = self._redactor.json(value)
        self.redacted += count
        return {**clean, **own}

    def _time_is_canonical(self, ts: str) -> bool:
        if not canonical.is_timestamp(ts):
            return False
        if len(self._times) >= _TIMES_MAX:
            self._times.clear()
        self._times.add(ts)
        return True

    def _overlong(self, head: bytes) -> Noise | Broken:
        limit = self._lines.line_bytes_max
        if not head.lstrip().startswith(b"{"):
            return Noise(self._clean_line(head))
        return Broken(
            "protocol_invalid_envelope", f"line {self.lines_read} is over line_bytes_max ({limit} bytes)", head
        )

    def _other(self, line: bytes) -> Received | None:
        """Everything that is not a well-formed event of an open run; None for a blank line."""
        pong = _PONG.fullmatch(line)
        if pong is not None and self.hello is not None:
            return wire.Pong(seq=int(pong[1]))
        if not line.lstrip().startswith(b"{"):
            return Noise(self._clean_line(line)) if line.strip() else None
        try:
            bounded(line)
            value = strict(line)
        except (ValueError, RecursionError) as error:
            return Broken(
                "protocol_invalid_envelope",
                f"line {self.lines_read} is not strict JSON: {error}",
                self._clean_line(line[:_EVIDENCE_LOOK_BYTES])[:EVIDENCE_BYTES],
            )
        t = value.get("t")
        if not isinstance(t, str):
            return Noise(self._clean_line(line))
        if t != "event":
            value, line = self._clean_value(value), self._clean_line(line)
        if t not in MESSAGES:
            return self._before_hello(t, line) or Unknown(t, _text(value.get("ref_id")), value)
        if t == "hello":
            return self._hello(value, line)
        return self._before_hello(t, line) or self._known(t, value, line)

    def _before_hello(self, t: str, line: bytes) -> Broken | Noise | None:
        if self.hello is not None:
            return None
        if t not in MESSAGES:
            return Noise(line)
        return Broken("protocol_handshake_failed", f"{t} came before the hello", line[:EVIDENCE_BYTES])

    def _hello(self, value: dict[str, Any], line: bytes) -> Received:
        if self.hello is not None:
            return Dropped("second_hello", "a second hello; the first one stands")
        message = _convert("hello", _lenient_hello(value), line)
        if isinstance(message, wire.Hello):
            self.hello = message
        return message

    def _known(self, t: str, value: dict[str, Any], line: bytes) -> Received:
        if MESSAGES[t][1] == "control":
            return Broken(
                "protocol_unexpected_message",
                f"the host sent {t}, which only a control plane may",
                line[:EVIDENCE_BYTES],
            )
        ref_id = value.get("ref_id")
        if t == "pong" or (t == "fatal" and ref_id is None):
            return _convert(t, value, line)
        if isinstance(ref_id, str) and ref_id not in self._open:
            why: Literal["after_end", "foreign_ref_id"] = "after_end" if ref_id in self._ended else "foreign_ref_id"
            return Dropped(why, f"{t} for run {ref_id[:60]!r}")
        if t != "event":
            # Whoever asks reads answers, announced or not; left without one it would wait for ever.
            self._was_asked = self._was_asked or t == "ask"
            return _convert(t, value, line)
        # A lost ref_id can only mean the one run that is open; with several it means none of them.
        owner = ref_id if isinstance(ref_id, str) else next(iter(self._open), "")
        if len(self._open) != 1 and not isinstance(ref_id, str):
            return Dropped("foreign_ref_id", "an event without ref_id")
        event, record = self._read_event(value)
        return Events(owner, [event], record + b"\n")


def _lenient_hello(value: dict[str, Any]) -> dict[str, Any]:
    """A mode or an extension entry this version does not know is not worth a failed start."""
    known = {**value}
    if value.get("mode") not in ("passthrough", "mapped"):
        known.pop("mode", None)
    extensions = value.get("extensions")
    known["extensions"] = [name for name in extensions if isinstance(name, str)] if isinstance(extensions, list) else []
    return known


_OF_A_RUN: Final = wire.Cancel | wire.Input | wire.Interrupt | wire.Answer | wire.Tree
"""What a control plane says to a run that is open."""


class HostEnd:
    """A host's end of one line: reads what a control plane says, writes what a host may say."""

    def __init__(self, *, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._lines = Lines(line_bytes_max)
        self._said_hello = False
        self._open: dict[str, tuple[str, ...]] = {}

    def send(
        self, envelope: wire.Hello | wire.Event | wire.Final | wire.Fatal | wire.Ask | wire.Pong | wire.Patch
    ) -> bytes:
        """Write one message as a line.

        Raises:
            ProtocolError: a message out of order: no hello yet, or of a run that is not open.
        """
        name = str(envelope.__struct_config__.tag)
        ref_id = getattr(envelope, "ref_id", None)
        if self._said_hello == isinstance(envelope, wire.Hello) or (ref_id is not None and ref_id not in self._open):
            raise ProtocolError("protocol_unexpected_message", f"{name} is not in order here")
        if isinstance(envelope, wire.Ask) and "ask/1" not in self._open[envelope.ref_id]:
            raise ProtocolError("protocol_unexpected_message", "the control plane did not announce ask/1")
        self._said_hello = True
        line = _line(envelope, self._lines.line_bytes_max)
        if isinstance(envelope, wire.Final | wire.Fatal) and ref_id is not None:
            del self._open[ref_id]
        return line

    def receive(self, data: bytes) -> list[Received]:
        """Take bytes from the control plane, give what they complete, in order."""
        out: list[Received] = []
        for line in self._lines.feed(data):
            received = self._line(line)
            if received is not None:
                out.append(received)
        return out

    def end(self) -> list[Received]:
        """The stream is over; a last line without its newline still counts, as shells write them."""
        received = self._line(self._lines.end())
        return [received] if received is not None else []

    def refuse(self, broken: Broken) -> bytes:
        """The line that answers a message that could not be read, or a run that could not be taken up."""
        fatal = wire.Fatal(ref_id=broken.ref_id, error=broken.message, error_code=broken.code)
        return _line(fatal, self._lines.line_bytes_max)

    def close_run(self, ref_id: str) -> None:
        """The run's last message went out by another way than `send`."""
        self._open.pop(ref_id, None)

    def extensions(self, ref_id: str) -> tuple[str, ...]:
        """What the control plane announced with this run."""
        return self._open.get(ref_id, ())

    def _line(self, line: bytes) -> Received | None:
        return self._overlong(line) if isinstance(line, Overlong) else self._message(line)

    def _overlong(self, head: bytes) -> Broken:
        return Broken(
            "protocol_invalid_envelope", f"a line is over line_bytes_max ({self._lines.line_bytes_max} bytes)", head
        )

    def _message(self, line: bytes) -> Received | None:
        if not line.strip():
            return None
        try:
            bounded(line)
            value = strict(line)
            doubled = canonical.duplicate_key(line)
        except (ValueError, RecursionError) as error:
            return Broken("protocol_invalid_envelope", f"a line is not strict JSON: {error}", line[:EVIDENCE_BYTES])
        t = value.get("t") if isinstance(value, dict) else None
        ref_id = _text(value.get("id" if t == "run" else "ref_id")) if isinstance(value, dict) else None
        if not isinstance(t, str):
            return Broken(
                "protocol_invalid_envelope", "a line is not an object with a string `t`", line[:EVIDENCE_BYTES]
            )
        if t not in MESSAGES:
            return Unknown(t, ref_id, value)
        if doubled is not None:
            fact = f"the key {doubled[:60]!r} stands twice in a {t}"
            broken = Broken("contract_schema_violation", fact, line[:EVIDENCE_BYTES], ref_id)
            return self._attributed(broken, t if doubled != "id" else "")
        if MESSAGES[t][1] == "host":
            return Broken("protocol_unexpected_message", f"{t} is a host's to say", line[:EVIDENCE_BYTES])
        message = self._attributed(_convert(t, value, line), t)
        if isinstance(message, wire.Run):
            if message.id in self._open:
                return Broken(
                    "protocol_unexpected_message", f"run {message.id[:60]!r} is open already", line[:EVIDENCE_BYTES]
                )
            self._open[message.id] = message.extensions
        elif isinstance(message, _OF_A_RUN) and message.ref_id not in self._open:
            return Dropped("after_end", f"{t} for run {message.ref_id[:60]!r}, which is not open")
        return message

    def _attributed(self, received: Received, t: str) -> Received:
        """A run that cannot be taken up is answered in its own name; no other message may end a run."""
        if not isinstance(received, Broken):
            return received
        own = t == "run" and received.ref_id not in self._open
        return received if own else msgspec.structs.replace(received, ref_id=None)


def _convert(t: str, value: dict[str, Any], line: bytes) -> Received:
    shape = MESSAGES[t][0]
    try:
        message: Received = msgspec.convert(value, shape)
        return message
    except ValueError as error:
        code = WRONG_SHAPE.get(t, "contract_schema_violation")
        ref_id = _text(value.get("id" if t == "run" else "ref_id"))
        return Broken(code, f"{t} has the wrong shape: {error}", line[:EVIDENCE_BYTES], ref_id)


def _line(envelope: msgspec.Struct, line_bytes_max: int) -> bytes:
    line = _encode_line(envelope)
    if len(line) > line_bytes_max:
        raise ProtocolError(
            "protocol_invalid_envelope",
            f"a message of {len(line)} bytes is over line_bytes_max ({line_bytes_max} bytes)",
            hint="raise line_bytes_max at both ends, or send less",
        )
    return line + b"\n"


def _text(value: Json) -> str | None:
    return value if isinstance(value, str) else None


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    """Cut bytes into pieces of at most `size`, for a writer that must not wait for ever on one write."""
    return (data[start : start + size] for start in range(0, len(data), size))
