"""The host's end of a connection: reads and checks a control plane's messages; each bad message is one error."""

from __future__ import annotations

from typing import Final

import msgspec

from backplane.contract import canonical
from backplane.contract import envelope as wire
from backplane.errors import ProtocolError
from backplane.protocol.lines import EVIDENCE_BYTES, LINE_BYTES_MAX, Lines, Overlong, bare, strict
from backplane.protocol.messages import (
    MESSAGES,
    Broken,
    Dropped,
    Received,
    Unknown,
    convert,
    line_of,
    text_or_none,
)

_OF_A_RUN: Final = wire.Cancel | wire.Input | wire.Interrupt | wire.AnswerMessage
"""The messages that a control plane sends to an open run."""


class HostEnd:
    """The host's end of one connection: reads a control plane's messages and writes the host's messages."""

    def __init__(self, *, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._lines = Lines(line_bytes_max)
        self._said_hello = False
        self._open: dict[str, tuple[str, ...]] = {}

    def send(
        self,
        envelope: wire.Hello | wire.EventMessage | wire.Final | wire.Fatal | wire.Ask | wire.Pong,
    ) -> bytes:
        """Write one message as a line.

        Raises:
            ProtocolError: the message is out of order, not announced or too long.
        """
        name = str(envelope.__struct_config__.tag)
        ref_id = getattr(envelope, "ref_id", None)
        if self._said_hello == isinstance(envelope, wire.Hello) or (ref_id is not None and ref_id not in self._open):
            raise ProtocolError("protocol_unexpected_message", f"{name} is not in order here")
        if isinstance(envelope, wire.Ask) and "ask/1" not in self._open[envelope.ref_id]:
            raise ProtocolError("protocol_unexpected_message", "the control plane did not announce ask/1")
        self._said_hello = True
        line = line_of(envelope, self._lines.line_bytes_max)
        if isinstance(envelope, wire.Final | wire.Fatal) and ref_id is not None:
            del self._open[ref_id]
        return line

    def receive(self, data: bytes) -> list[Received]:
        """Read bytes from the control plane; return the messages that they complete, in order."""
        return [one for line in self._lines.feed(data) if (one := self._message(line)) is not None]

    def end(self) -> list[Received]:
        """Return the message of an unfinished last line, if any: shells may omit the newline."""
        received = self._message(self._lines.end())
        return [received] if received is not None else []

    def refuse(self, broken: Broken) -> bytes:
        """Return a `fatal` as a line, for an unreadable message or a run that cannot start."""
        fatal = wire.Fatal(ref_id=broken.ref_id, error=broken.message, error_code=broken.code)
        return line_of(fatal, self._lines.line_bytes_max)

    def close_run(self, ref_id: str) -> None:
        """Close a run whose last message was not written by `send`."""
        self._open.pop(ref_id, None)

    def _message(self, line: bytes) -> Received | None:
        read = self._read(line)
        return msgspec.structs.replace(read, evidence=line[:EVIDENCE_BYTES]) if isinstance(read, Broken) else read

    def _read(self, line: bytes) -> Received | None:
        if isinstance(line, Overlong):
            fact = f"a line is over line_bytes_max ({self._lines.line_bytes_max} bytes)"
            return Broken("protocol_invalid_envelope", fact, line)
        if not line.strip():
            return None
        line = bare(line)
        try:
            value = strict(line)
            doubled = canonical.duplicate_key(line, value)
        except ValueError as error:
            fact = f"a line is not strict JSON: {error}; one message is one line"
            return Broken("protocol_invalid_envelope", fact, line)
        t = value.get("t") if isinstance(value, dict) else None
        if not isinstance(t, str):
            return Broken("protocol_invalid_envelope", "a line is not an object with a string `t`", line)
        ref_id = text_or_none(value.get("id" if t == "run" else "ref_id"))
        if t not in MESSAGES:
            return Unknown(t, ref_id, value)
        if doubled is not None:
            broken = Broken(
                "contract_schema_violation", f"the key {doubled[:60]!r} stands twice in a {t}", line, ref_id
            )
            return self._attributed(broken, t if doubled not in ("id", "ref_id") else "")
        if MESSAGES[t][1] == "host":
            return Broken("protocol_unexpected_message", f"{t} is sent by hosts only", line)
        message = self._attributed(convert(t, value, line), t)
        if isinstance(message, wire.RunMessage):
            if message.id in self._open:
                return Broken("protocol_unexpected_message", f"run {message.id[:60]!r} is open already", line)
            self._open[message.id] = message.extensions
        elif isinstance(message, _OF_A_RUN) and message.ref_id not in self._open:
            return Dropped("after_end", f"{t} for run {message.ref_id[:60]!r}, which is not open")
        return message

    def _attributed(self, received: Received, t: str) -> Received:
        """Remove the run's id from an error, except one of the `run` message: an error with an id ends the run."""
        if not isinstance(received, Broken) or (t == "run" and received.ref_id not in self._open):
            return received
        return msgspec.structs.replace(received, ref_id=None)
