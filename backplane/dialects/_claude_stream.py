"""Streams of the Messages dialect, read.

Blocks come one after the other, each with its start and its end; counters in `message_delta` replace earlier ones.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects._claude_read import NAME, STOPS, read_block, read_citation, read_usage
from backplane.dialects._parts import kind_of, put_rest, slot
from backplane.dialects.framing import UNREADABLE
from backplane.ir import (
    Began,
    Ended,
    Kept,
    Noted,
    PartDelta,
    PartStarted,
    PartStopped,
    ServerTool,
    Stopped,
    StreamEvent,
    StreamFailed,
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
            except UNREADABLE:
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
