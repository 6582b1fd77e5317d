"""Streams of the Messages dialect, read and written.

Blocks come one after the other, each with its start and its end; counters in `message_delta` replace earlier ones.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects._claude_blocks import (
    NAME,
    STOPS,
    read_block,
    read_citation,
    read_usage,
    write_block,
    write_stop,
    write_usage,
)
from backplane.dialects._parts import Ledger, json_text, kind_of, put_rest, slot
from backplane.dialects._stream import BaseWriter
from backplane.ir import (
    Began,
    Candidate,
    Ended,
    Kept,
    Message,
    Noted,
    PartDelta,
    PartStarted,
    PartStopped,
    Refusal,
    ServerTool,
    Stopped,
    StreamEvent,
    StreamFailed,
    Text,
    Thinking,
    ToolUse,
    UsageSeen,
)

HEAD: Final = frozenset({"id", "model", "usage", "content", "type", "role", "stop_reason", "stop_sequence"})
TEXT_DELTAS: Final = {"text_delta": "text", "thinking_delta": "thinking"}


class ClaudeReader:
    """Reads the chunks of one stream."""

    def __init__(self) -> None:
        self.usage: dict[str, Any] = {}
        self.open: dict[int, Json] = {}
        self.inputs: dict[int, list[str]] = {}
        self.has_calls = False
        self.has_stopped = False
        self.ended = False
        self._handlers: Final[dict[Any, Any]] = {
            "message_start": self._start,
            "content_block_start": self._block_start,
            "content_block_stop": self._block_stop,
            "message_delta": self._message_delta,
            "message_stop": lambda chunk: self.finish(),
            "error": self._error,
            "message": self._whole,
        }

    def read(self, chunk: Json) -> list[StreamEvent]:
        """Read one chunk; pings and events of a later version are kept."""
        if type(chunk) is not dict:
            return [Kept(chunk)]
        kind = kind_of(chunk)
        if kind == "content_block_delta":
            return self._delta(chunk)
        handler = self._handlers.get(kind)
        if handler is None:
            return [_failure(chunk)] if "error" in chunk else [Kept(chunk, kind == "ping")]
        found: list[StreamEvent] = handler(chunk)
        return found

    def finish(self) -> list[StreamEvent]:
        """Close what is open; the stream has ended, with or without saying so."""
        if self.ended:
            return []
        self.ended = True
        out: list[StreamEvent] = []
        for index in sorted(self.open):
            out += self._block_stop({"index": index})
        return [*out, Ended()]

    def _whole(self, chunk: dict[str, Any]) -> list[StreamEvent]:
        from backplane.dialects import claude
        from backplane.dialects._chat_stream import whole_events

        self.ended = True
        return whole_events(claude.response_to_ir(chunk).value)

    def _start(self, chunk: dict[str, Any]) -> list[StreamEvent]:
        message = chunk.get("message")
        if type(message) is not dict:
            return [Kept(chunk, False)]
        ext: dict[str, Any] = {}
        put_rest(ext, {key: value for key, value in message.items() if key not in HEAD})
        answer_id, model = message.get("id"), message.get("model")
        out: list[StreamEvent] = [
            Began(
                id=answer_id if type(answer_id) is str else None, model=model if type(model) is str else None,
                at="/message", ext=slot(NAME, ext),
            )
        ]  # fmt: skip
        return out + self._usage(message.get("usage"))

    def _usage(self, usage: Json) -> list[StreamEvent]:
        if type(usage) is not dict:
            return []
        # What a later event leaves out or gives as null was said before.
        self.usage.update({key: value for key, value in usage.items() if value is not None or key not in self.usage})
        return [UsageSeen(read_usage(self.usage, "/usage"))]

    def _block_start(self, chunk: dict[str, Any]) -> list[StreamEvent]:
        index, block = chunk.get("index"), chunk.get("content_block")
        if type(index) is not int or type(block) is not dict:
            return [Kept(chunk, False)]
        self.open[index] = block
        part = read_block(block, f"/content/{index}")
        if isinstance(part, ToolUse):
            self.has_calls = True
            self.inputs[index] = []
            if part.input == {}:
                part = msgspec.structs.replace(part, text="")
        elif isinstance(part, ServerTool):
            self.inputs[index] = []
        elif isinstance(part, Thinking) and part.signature == "":
            part = msgspec.structs.replace(part, signature=None)
        return [PartStarted(index, part)]

    def _delta(self, chunk: dict[str, Any]) -> list[StreamEvent]:
        index, delta = chunk.get("index"), chunk.get("delta")
        if type(index) is not int or type(delta) is not dict:
            return [Kept(chunk, False)]
        out: list[StreamEvent] = []
        if index not in self.open:
            out += self._missing_start(index, delta)
        kind = kind_of(delta)
        if kind == "text_delta" or kind == "thinking_delta":
            out.append(PartDelta(index, _text(delta, TEXT_DELTAS[kind])))
        elif kind == "input_json_delta":
            text = _text(delta, "partial_json")
            self.inputs.setdefault(index, []).append(text)
            if text:
                out.append(PartDelta(index, text, "arguments"))
        elif kind == "signature_delta":
            out.append(PartDelta(index, _text(delta, "signature"), "signature"))
        elif kind == "citations_delta" and type(delta.get("citation")) is dict:
            found = read_citation(delta["citation"], f"/content/{index}/citations")
            out.append(PartDelta(index, "", "citation", 0, found))
        else:
            out.append(Kept(chunk, False))
        return out

    def _missing_start(self, index: int, delta: dict[str, Any]) -> list[StreamEvent]:
        """A gateway that leaves out starts: what the delta is of says what block it is."""
        blocks = {"text_delta": {"type": "text", "text": ""}, "thinking_delta": {"type": "thinking", "thinking": ""}}
        block = blocks.get(str(delta.get("type")))
        return [] if block is None else self._block_start({"index": index, "content_block": block})

    def _block_stop(self, chunk: dict[str, Any]) -> list[StreamEvent]:
        index = chunk.get("index")
        if type(index) is not int or index not in self.open:
            return []
        block = self.open.pop(index)
        text = "".join(self.inputs.pop(index, ()))
        part = None
        if text and block.get("type") != "tool_use":
            # The input of the vendor's own tools is part of their native block.
            try:
                block = {**block, "input": msgspec.json.decode(text)}
            except msgspec.DecodeError:
                block = {**block, "input": text}
            part = read_block(block, f"/content/{index}")
        return [PartStopped(index, part)]

    def _message_delta(self, chunk: dict[str, Any]) -> list[StreamEvent]:
        found = chunk.get("delta")
        delta: dict[str, Any] = found if type(found) is dict else {}
        out: list[StreamEvent] = []
        for key, value in delta.items():
            if key not in ("stop_reason", "stop_sequence"):
                out.append(Noted(key, value))
        out += [Noted(key, value) for key, value in chunk.items() if key not in ("type", "delta", "usage")]
        out += self._usage(chunk.get("usage"))
        raw = delta.get("stop_reason")
        if type(raw) is str and not self.has_stopped:
            self.has_stopped = True
            stop = STOPS.get(raw, "other")
            stop = "tool_use" if stop == "end" and self.has_calls else stop
            for index in sorted(self.open):
                out += self._block_stop({"index": index})
            sequence = delta.get("stop_sequence")
            out.append(
                Stopped(stop=stop, raw=raw, sequence=sequence if type(sequence) is str else None, at="/stop_reason")
            )
        return out

    def _error(self, chunk: dict[str, Any]) -> list[StreamEvent]:
        return [_failure(chunk)]


def _text(delta: dict[str, Any], key: str) -> str:
    value = delta.get(key)
    return value if type(value) is str else ""


def _failure(chunk: dict[str, Any]) -> StreamFailed:
    error = chunk.get("error")
    if type(error) is not dict:
        return StreamFailed(str(error), None, chunk)
    return StreamFailed(str(error.get("message", "unknown error")), str(error.get("type", "")) or None, chunk)


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
        scratch = Ledger(self.ledger.source, NAME)
        written = write_usage(self.sum.usage, scratch)
        if self.once("usage"):
            self.ledger.losses += scratch.losses
        return written

    def on_started(self, event: PartStarted) -> list[Json]:
        if self.lose_choice(event.choice):
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
        text = getattr(part, "text", None)
        if text and isinstance(part, Text | Refusal | Thinking | ToolUse):
            field: Any = "arguments" if isinstance(part, ToolUse) else "text"
            out += self._content(PartDelta(event.index, text, field))
        return out

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
        key = (0, event.index)
        part = self.sum.part(*key)
        if key not in self.sent and part is not None:
            text = self.missing_arguments(event) if isinstance(part, ToolUse) else getattr(part, "text", "")
            if text and isinstance(part, ToolUse | Text | Thinking | Refusal):
                out += self._content(PartDelta(event.index, text, "arguments" if isinstance(part, ToolUse) else "text"))
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
        parts = tuple(block.part for block in self.sum.blocks.values())
        candidate = Candidate(
            message=Message(role="assistant", parts=parts), stop=event.stop, stop_raw=event.raw, stop_at=event.at
        )
        self.stop = {"stop_reason": write_stop(candidate, self.ledger), "stop_sequence": event.sequence}
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
