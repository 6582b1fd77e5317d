"""Redacts secrets that are split over several events of a run. Pure.

Events go in and come out again; the end of a text is delayed while it may be the beginning of a secret. The caller
decides how long, and then calls `flush`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from backplane.contract import canonical
from backplane.contract.events import AgentEvent, AssistantDelta, OutputReported, Reasoning
from backplane.redact.secrets import DeltaRedactor, Redactor

HOLD_S_MAX: Final = 0.2
"""Maximum seconds for which the end of a text is delayed; a reader of a stream notices no such short pause."""

STREAMS_MAX: Final = 32
"""Maximum number of texts of a run that are redacted separately; agents have three. All others count as one text, so
that memory is bounded."""

STREAM_CHARS_MAX: Final = 100
"""Characters of a stream's name that are compared; longer names are cut."""

SHAPE_BYTES_MAX: Final = 16 * 1024
"""Maximum size in bytes of an event that is stored whole until its delayed text is sent. Of a larger event, only the
members that name the text are stored."""

MESSAGE_CHARS_MAX: Final = 200
"""Maximum length of the message of an output event: the last line of its text."""


class Splits:
    """Redacts the texts of a run that come in pieces: deltas, reasoning, output of commands."""

    def __init__(self, redactor: Redactor) -> None:
        self.redacted = 0
        self._redactor = redactor
        self._streams: dict[str, DeltaRedactor] = {}
        self._last: dict[str, AgentEvent] = {}
        """Name of a text → its latest event, of which `flush` makes the event with the delayed text."""

    @property
    def holding(self) -> bool:
        return any(stream.holding for stream in self._streams.values())

    def take(self, events: list[AgentEvent], records: list[bytes]) -> tuple[list[AgentEvent], list[bytes]]:
        """Return the events and their lines, redacted; an event whose text changes is encoded again.

        Args:
            records: the canonical line of each event.
        """
        out: list[AgentEvent] = []
        lines: list[bytes] = []
        for event, record in zip(events, records, strict=True):
            piece = _piece(event)
            if piece is None:
                for late in self.flush():
                    out.append(late)
                    lines.append(canonical.encode(late))
                out.append(event)
                lines.append(record)
                continue
            name, text = piece
            if name not in self._streams:
                name = name if len(self._streams) < STREAMS_MAX else ""
                self._streams.setdefault(name, DeltaRedactor(self._redactor))
            stream, is_long = self._streams[name], len(record) > SHAPE_BYTES_MAX
            self._last[name] = _bare(event, name) if is_long else event
            shown, count = stream.feed(text)
            self.redacted += count
            if shown == text:
                out.append(event)
                lines.append(record)
            elif shown or is_long:
                out.append(_with_text(event, shown))
                lines.append(canonical.encode(out[-1]))
        return out, lines

    def flush(self) -> list[AgentEvent]:
        """Return the delayed texts as events; called when the delay has passed or an event of another kind comes."""
        held = [(name, stream.flush()) for name, stream in self._streams.items() if stream.holding]
        return [_with_text(self._last[name], text) for name, text in held if text]


def _piece(event: AgentEvent) -> tuple[str, str] | None:
    """Return the name of the text that an event continues, and the new piece; None if it has no such text."""
    if isinstance(event, Reasoning):
        return "reasoning", event.reasoning
    if isinstance(event, AssistantDelta):
        return "delta", event.text
    if isinstance(event, OutputReported):
        return f"output {event.body.get('stream')}"[:STREAM_CHARS_MAX], str(event.body.get("text", ""))
    return None


def _bare(event: AgentEvent, name: str) -> AgentEvent:
    """Return an event for the same text, with only the members that name the text."""
    if isinstance(event, OutputReported):
        stream = name.removeprefix("output ")
        return msgspec.structs.replace(event, message="", ext={"output": {"stream": stream, "text": ""}})
    if isinstance(event, Reasoning):
        return msgspec.structs.replace(event, text="", ext={"reasoning": {"text": ""}})
    return AssistantDelta(ts=event.ts, text="")


def _with_text(event: AgentEvent, text: str) -> AgentEvent:
    if isinstance(event, Reasoning | OutputReported):
        name = "reasoning" if isinstance(event, Reasoning) else "output"
        ext = event.ext if isinstance(event.ext, dict) else {}
        changed = msgspec.structs.replace(event, ext={**ext, name: {**ext[name], "text": text}})
        if isinstance(changed, OutputReported):
            return msgspec.structs.replace(changed, message=text.rstrip("\n").rpartition("\n")[2][:MESSAGE_CHARS_MAX])
        return changed
    return msgspec.structs.replace(event, text=text)
