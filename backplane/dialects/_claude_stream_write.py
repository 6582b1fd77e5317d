"""Streams of Messages, written."""

from __future__ import annotations

from typing import Any

from backplane.contract.canonical import Json
from backplane.dialects._claude_read import NAME
from backplane.dialects._claude_write import write_block, write_stop, write_usage
from backplane.dialects._parts import json_text
from backplane.dialects._stream import BaseWriter
from backplane.ir import (
    Ended,
    Noted,
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


class ClaudeWriter(BaseWriter):
    """Writes the chunks of one stream; a block that begins while another is open waits for its end."""

    def __init__(self, source: str) -> None:
        super().__init__(source, NAME)
        self.has_begun = False
        self.next_index = 0
        self.current: int | None = None
        """Index, in the source, of the block that is open."""
        self.places: dict[int, int] = {}
        self.waiting: list[PartStarted | PartDelta | PartStopped] = []
        self.stop: Json = None
        self.is_complete = False

    def _begin(self) -> list[Json]:
        if self.has_begun:
            return []
        self.has_begun = True
        began = self.sum.began
        message: dict[str, Any] = {
            "id": began.id or "msg_translated", "type": "message", "role": "assistant",
            "model": began.model or "unknown", "content": [],
            "stop_reason": None, "stop_sequence": None, "usage": self._usage(),
        }  # fmt: skip
        if self.ledger.is_home:
            message.update(began.ext.get(NAME, {}))
        return [{"type": "message_start", "message": message}]

    def _usage(self) -> dict[str, Any]:
        if self.sum.usage is None:
            return {"input_tokens": 0, "output_tokens": 0}
        written: dict[str, Any] = self.counted(self.sum.usage, write_usage)
        return written

    def on_started(self, event: PartStarted) -> list[Json]:
        if self.lose_choice(event.choice) or self.lose_late():
            return []
        if self.current is not None:
            self.waiting.append(event)
            return []
        return self._begin() + self._start(event)

    def _start(self, event: PartStarted) -> list[Json]:
        part, block = event.part, None
        if isinstance(part, ToolUse):
            block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
            if part.kind == "custom":
                self.ledger.degrade(part.at, "tool", "free text is streamed as arguments")
        elif isinstance(part, Text | Refusal):
            if isinstance(part, Refusal):
                self.ledger.degrade(part.at, "part", "a refusal is said as text here")
            block = {"type": "text", "text": ""}
        elif isinstance(part, Thinking) and part.redacted is None:
            if not self.ledger.is_home:
                self.ledger.degrade(part.at, "thinking", "thinking without this vendor's signature")
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            written = write_block(part, self.ledger, is_answer=True)
            if written is None:
                return []
            block = written
        place = self.next_index
        self.next_index += 1
        self.places[event.index] = place
        self.current = event.index
        out: list[Json] = [{"type": "content_block_start", "index": place, "content_block": block}]
        if isinstance(part, ToolUse) and part.kind == "custom":
            out.append(self._raw(place, '{"input":"'))
        head = self.head(event)
        return out if head is None else out + self._content(head)

    def _raw(self, place: int, text: str) -> Json:
        """Write a piece of the object around free text."""
        delta = {"type": "input_json_delta", "partial_json": text}
        return {"type": "content_block_delta", "index": place, "delta": delta}

    def on_delta(self, event: PartDelta) -> list[Json]:
        if event.choice:
            return []
        if event.index != self.current:
            self.waiting.append(event)
            return []
        return self._content(event)

    def _content(self, event: PartDelta) -> list[Json]:
        block = self.sum.blocks.get((0, event.index))
        if block is None or event.index not in self.places:
            return []
        self.sent.add((0, event.index))
        delta: Json
        if event.field == "arguments":
            text = event.text
            if isinstance(block.part, ToolUse) and block.part.kind == "custom":
                text = json_text(text)[1:-1]
            delta = {"type": "input_json_delta", "partial_json": text}
        elif event.field == "signature":
            if not self.ledger.is_home or not isinstance(block.part, Thinking):
                if self.once(f"signature {event.index}"):
                    self.ledger.drop(block.part.at, "signature", f"only {self.ledger.source} can read it")
                return []
            delta = {"type": "signature_delta", "signature": event.text}
        elif event.field == "citation":
            written = write_block(Text(text="", citations=(event.value,)), self.ledger)
            if not written.get("citations"):
                return []
            delta = {"type": "citations_delta", "citation": written["citations"][0]}
        elif isinstance(block.part, Thinking):
            delta = {"type": "thinking_delta", "thinking": event.text}
        else:
            delta = {"type": "text_delta", "text": event.text}
        return [{"type": "content_block_delta", "index": self.places[event.index], "delta": delta}]

    def on_stopped(self, event: PartStopped) -> list[Json]:
        if event.choice:
            return []
        if event.index != self.current:
            if self.current is not None:
                self.waiting.append(event)
            return []
        return self._stop(event) + self._drain()

    def _stop(self, event: PartStopped) -> list[Json]:
        out: list[Json] = []
        part = self.sum.part(0, event.index)
        if (unsent := self.unsent(event)) is not None:
            out += self._content(unsent)
        self.current = None
        if isinstance(part, ToolUse) and part.kind == "custom":
            out.append(self._raw(self.places[event.index], '"}'))
        return [*out, {"type": "content_block_stop", "index": self.places[event.index]}]

    def _drain(self) -> list[Json]:
        """Write what waited for the open block, one block after the other."""
        out: list[Json] = []
        while self.current is None:
            start = next((event for event in self.waiting if isinstance(event, PartStarted)), None)
            if start is None:
                break
            mine = [event for event in self.waiting if event.index == start.index]
            self.waiting = [event for event in self.waiting if event.index != start.index]
            out += self._start(start)
            for event in mine[1:]:
                if isinstance(event, PartDelta) and event.index == self.current:
                    out += self._content(event)
                elif isinstance(event, PartStopped) and event.index == self.current:
                    out += self._stop(event)
        return out

    def on_stop(self, event: Stopped) -> list[Json]:
        if self.lose_choice(event.choice):
            return []
        self.stop = {"stop_reason": write_stop(self.stopped(event), self.ledger), "stop_sequence": event.sequence}
        return []

    def on_ended(self, event: Ended) -> list[Json]:
        if self.is_complete:
            return []
        self.is_complete = True
        out = self._begin()
        if self.current is not None:
            out += self._stop(PartStopped(self.current))
            out += self._drain()
        delta = self.stop or {"stop_reason": None, "stop_sequence": None}
        if self.ledger.is_home:
            delta = {**delta, **self.sum.notes.get((None, False), {})}
        return [*out, {"type": "message_delta", "delta": delta, "usage": self._usage()}, {"type": "message_stop"}]

    def on_noted(self, event: Noted) -> list[Json]:
        return [] if self.ledger.is_home else super().on_noted(event)

    def on_failed(self, event: StreamFailed) -> list[Json]:
        if self.ledger.is_home and event.raw is not None:
            return [event.raw]
        return [{"type": "error", "error": {"type": "api_error", "message": event.message}}]
