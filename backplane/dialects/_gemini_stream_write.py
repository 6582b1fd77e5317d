"""Streams of Gemini's generateContent, written."""

from __future__ import annotations

import itertools
from typing import Any

from backplane.contract.canonical import Json
from backplane.dialects._gemini_read import NAME
from backplane.dialects._gemini_write import write_part, write_stop, write_usage
from backplane.dialects._stream import BaseWriter
from backplane.ir import (
    Ended,
    Noted,
    Part,
    PartDelta,
    PartStarted,
    PartStopped,
    Refusal,
    Stopped,
    StreamFailed,
    Text,
    Thinking,
    ToolUse,
)


class GeminiWriter(BaseWriter):
    """Writes the chunks of one stream; a call is written when it is whole."""

    def __init__(self, source: str) -> None:
        super().__init__(source, NAME)
        self.stops: dict[int, str | None] = {}
        self.calls: dict[int, dict[int, list[Json] | None]] = {}
        """Choice → the calls that wait for one that began earlier, and None for those that go on."""
        self.is_complete = False

    def _chunk(self, candidates: list[Json]) -> Json:
        began = self.sum.began
        out: dict[str, Any] = {"candidates": candidates} if candidates else {}
        if began.model is not None:
            out["modelVersion"] = began.model
        if began.id is not None:
            out["responseId"] = began.id
        return out

    def _parts(self, choice: int, parts: list[Json]) -> list[Json]:
        return [self._chunk([{"content": {"role": "model", "parts": parts}, "index": choice}])]

    def on_started(self, event: PartStarted) -> list[Json]:
        if isinstance(event.part, ToolUse):
            self.calls.setdefault(event.choice, {})[event.index] = None
            return []
        head = self.head(event)
        return [] if head is None else self.on_delta(head)

    def on_delta(self, event: PartDelta) -> list[Json]:
        key = (event.choice, event.index)
        block = self.sum.blocks.get(key)
        if block is None or event.field == "arguments":
            return []
        part = block.part
        if event.field == "citation":
            if self.once("citation"):
                self.ledger.drop(part.at, "citation", "citations stand on the whole answer here")
            return []
        if event.field == "signature":
            return self._signature(event, part)
        self.sent.add(key)
        if isinstance(part, Thinking):
            return self._parts(event.choice, [{"text": event.text, "thought": True}])
        if isinstance(part, Refusal) and self.once("refusal"):
            self.ledger.degrade(part.at, "part", "a refusal is said as text here")
        return self._parts(event.choice, [{"text": event.text}]) if isinstance(part, Text | Refusal) else []

    def _signature(self, event: PartDelta, part: Part) -> list[Json]:
        if not self.ledger.is_home:
            if self.once(f"signature {event.index}"):
                self.ledger.drop(part.at, "signature", f"only {self.ledger.source} can read it")
            return []
        body: dict[str, Any] = {"text": "", "thoughtSignature": event.text}
        if isinstance(part, Thinking):
            body["thought"] = True
        return self._parts(event.choice, [body])

    def on_stopped(self, event: PartStopped) -> list[Json]:
        key = (event.choice, event.index)
        part = self.sum.part(*key)
        if part is None or key in self.sent:
            return []
        if isinstance(part, Text | Thinking | Refusal) and not part.text and not getattr(part, "redacted", None):
            return []
        written = write_part(part, {}, self.ledger)
        made = [] if written is None else self._parts(event.choice, [written])
        return self._in_turn(event, made) if event.index in self.calls.get(event.choice, {}) else made

    def _in_turn(self, event: PartStopped, made: list[Json]) -> list[Json]:
        """Give out calls in the order in which they began: without ids it is all that tells one from another."""
        waiting = self.calls[event.choice]
        waiting[event.index] = made
        out: list[Json] = []
        for index in sorted(waiting):
            ready = waiting[index]
            if ready is None:
                break
            out += ready
            del waiting[index]
        return out

    def on_stop(self, event: Stopped) -> list[Json]:
        self.stops[event.choice] = write_stop(self.stopped(event), self.ledger)
        return []

    def on_ended(self, event: Ended) -> list[Json]:
        if self.is_complete:
            return []
        self.is_complete = True
        rest = [ready for waiting in self.calls.values() for _, ready in sorted(waiting.items()) if ready]
        candidates: list[Json] = []
        for choice, word in self.stops.items():
            candidate: dict[str, Any] = {"content": {"role": "model", "parts": [{"text": ""}]}, "index": choice}
            if word is not None:
                candidate["finishReason"] = word
            if self.ledger.is_home:
                candidate.update(self.sum.notes.get((choice, False), {}))
            candidates.append(candidate)
        chunk = self._chunk(candidates)
        if self.sum.usage is not None:
            chunk["usageMetadata"] = self.counted(self.sum.usage, write_usage)
        if self.ledger.is_home:
            chunk.update(self.sum.notes.get((None, False), {}))
        return [*itertools.chain(*rest), *([chunk] if chunk.keys() & {"candidates", "usageMetadata"} else [])]

    def on_noted(self, event: Noted) -> list[Json]:
        return [] if self.ledger.is_home else super().on_noted(event)

    def on_failed(self, event: StreamFailed) -> list[Json]:
        if self.ledger.is_home and event.raw is not None:
            return [event.raw]
        return [{"error": {"code": 502, "message": event.message, "status": "UNAVAILABLE"}}]
