"""Secrets that are cut in two by the events they come in. Pure.

Events of a run go in, the same come out, with the tail of a text held back while it may be
the beginning of a secret. For how long it is held is the caller's to say.
"""

from __future__ import annotations

from typing import Final

import msgspec

from backplane.contract import canonical
from backplane.contract.events import AgentEvent, AssistantDelta, OutputReported, Reasoning
from backplane.redact.secrets import DeltaRedactor, Redactor

HOLD_S_MAX: Final = 0.2
"""Longest delay of a text's end: below what a reader of a stream notices as a pause."""

STREAMS_MAX: Final = 32
"""Texts of a run that are redacted apart; agents have three. All beyond are one text, which bounds the memory."""

STREAM_CHARS_MAX: Final = 100
"""Characters of a stream's name that count."""

SHAPE_BYTES_MAX: Final = 16 * 1024
"""Longest event kept as the form of a delayed text; the text of a longer one is handed on at once."""

MESSAGE_CHARS_MAX: Final = 200
"""Characters of a piece of output in its event's one readable line."""


class Splits:
    """Watches the texts of a run that come in pieces: deltas, reasoning, output of commands."""

    def __init__(self, redactor: Redactor) -> None:
        self.redacted = 0
        self._redactor = redactor
        self._streams: dict[str, DeltaRedactor] = {}
        self._last: dict[str, AgentEvent] = {}
        """The latest event of each text, as the form of a delayed text."""

    @property
    def holding(self) -> bool:
        return any(stream.holding for stream in self._streams.values())

    def take(self, events: list[AgentEvent], records: list[bytes]) -> tuple[list[AgentEvent], list[bytes]]:
        """Pass events through; those whose text changes are encoded anew."""
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
        """Return the delayed text: its time has passed, or another event came."""
        held = [(name, stream.flush()) for name, stream in self._streams.items() if stream.holding]
        return [_with_text(self._last[name], text) for name, text in held if text]


def _piece(event: AgentEvent) -> tuple[str, str] | None:
    """Which running text an event belongs to, and its piece of it; None for an event that stands alone."""
    if isinstance(event, Reasoning):
        return "reasoning", event.reasoning
    if isinstance(event, AssistantDelta):
        return "delta", event.text
    if isinstance(event, OutputReported):
        return f"output {event.body.get('stream')}"[:STREAM_CHARS_MAX], str(event.body.get("text", ""))
    return None


def _bare(event: AgentEvent, name: str) -> AgentEvent:
    """An event of the same text, without anything that stands beside it."""
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
