"""Streams of the Messages dialect: blocks one after the other, each with its start and its end."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane import ir
from backplane.contract.canonical import Json
from backplane.dialects import claude
from backplane.dialects.codec import Calls, Ledger, Members, json_text, kind_of, parse_json
from backplane.dialects.streams import BlockReader, BlockWriter, Key, failure, whole_events

NAME: Final = claude.NAME
DELTAS: Final = {"text_delta": "text", "thinking_delta": "thinking"}
"""Kind of a delta → its member, and the kind of its block."""


class ClaudeReader(BlockReader):
    """Reads the chunks of one stream; counters in `message_delta` replace earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.usage: dict[str, Any] = {}
        self.open: dict[int, Json] = {}
        self.places: dict[int, int] = {}
        """The vendor's index → the block; a gateway may count every block as the first."""
        self.inputs: dict[int, list[str]] = {}
        self.has_calls = False
        self.has_stopped = False
        self._handlers: Final[dict[Any, Any]] = {
            "message_start": self._start, "content_block_start": self._block_start,
            "content_block_stop": self._block_stop, "message_delta": self._message_delta,
            "message_stop": lambda chunk: self.finish(), "message": self._whole,
            "error": lambda chunk: [failure(chunk.get("error"), chunk, "type")],
        }  # fmt: skip

    def read(self, chunk: Json) -> list[ir.StreamEvent]:
        """Read one chunk; pings and events of a later version are kept."""
        if type(chunk) is not dict:
            return [ir.Kept(chunk)]
        kind = kind_of(chunk)
        if kind == "content_block_delta":
            return self._delta(chunk)
        handler = self._handlers.get(kind)
        if handler is None:
            return (
                [failure(chunk.get("error"), chunk, "type")] if "error" in chunk else [ir.Kept(chunk, kind == "ping")]
            )
        found: list[ir.StreamEvent] = handler(chunk)
        return found

    def _close_all(self) -> list[ir.StreamEvent]:
        return [event for index in sorted(self.open) for event in self._block_stop({"index": index})]

    def _whole(self, chunk: dict[str, Any]) -> list[ir.StreamEvent]:
        self.ended = True
        return whole_events(claude.read_answer(chunk, Ledger("", ""), Calls()))

    def _start(self, chunk: dict[str, Any]) -> list[ir.StreamEvent]:
        message = chunk.get("message")
        if type(message) is not dict:
            return [ir.Kept(chunk, False)]
        members = Members(message, "/message")
        answer_id, model = members.take("id"), members.take("model")
        for key in ("type", "role", "usage", "content", "stop_reason", "stop_sequence"):
            members.rest.pop(key, None)
        out: list[ir.StreamEvent] = [ir.Began(id=answer_id, model=model, at="/message", ext=members.ext(NAME))]
        out += self._usage(message.get("usage"))
        # The continuation of a program's tool calls begins with the blocks that were made before.
        content = message.get("content")
        for index, block in enumerate(content if type(content) is list else ()):
            out += self._block_start({"index": index, "content_block": block})
            out += self._block_stop({"index": index})
        return out + self._stop(message)

    def _usage(self, usage: Json) -> list[ir.StreamEvent]:
        if type(usage) is not dict:
            return []
        # What a later event leaves out or gives as null was said before.
        self.usage.update({key: value for key, value in usage.items() if value is not None or key not in self.usage})
        return [ir.UsageSeen(claude.read_usage(self.usage, "/usage"))]

    def _block_start(self, chunk: dict[str, Any]) -> list[ir.StreamEvent]:
        index, block = chunk.get("index"), chunk.get("content_block")
        if type(index) is not int or type(block) is not dict:
            return [ir.Kept(chunk, False)]
        out = self._block_stop({"index": index})
        used = self.places.values()
        place = self.places[index] = index if index not in used else max(used) + 1
        self.open[index] = block
        part = claude.read_block(block, f"/content/{index}")
        if isinstance(part, ir.ToolUse):
            self.has_calls = True
            self.inputs[index] = []
            if part.input == {}:
                part = msgspec.structs.replace(part, text="")
        elif isinstance(part, ir.ServerTool):
            self.inputs[index] = []
        elif isinstance(part, ir.Thinking) and part.signature == "":
            part = msgspec.structs.replace(part, signature=None)
        return [*out, ir.PartStarted(place, part)]

    def _delta(self, chunk: dict[str, Any]) -> list[ir.StreamEvent]:
        index, delta = chunk.get("index"), chunk.get("delta")
        if type(index) is not int or type(delta) is not dict:
            return [ir.Kept(chunk, False)]
        kind = delta.get("type")
        out: list[ir.StreamEvent] = []
        if index not in self.open and kind in DELTAS:  # a gateway that leaves out starts
            member = DELTAS[kind]
            out += self._block_start({"index": index, "content_block": {"type": member, member: ""}})
        place = self.places.get(index, index)
        if kind == "text_delta" or kind == "thinking_delta":
            out.append(ir.PartDelta(place, _text(delta, DELTAS[kind])))
        elif kind == "input_json_delta":
            text = _text(delta, "partial_json")
            self.inputs.setdefault(index, []).append(text)
            if text:
                out.append(ir.PartDelta(place, text, "arguments"))
        elif kind == "signature_delta":
            out.append(ir.PartDelta(place, _text(delta, "signature"), "signature"))
        elif kind == "citations_delta" and type(delta.get("citation")) is dict:
            found = claude.read_citation(delta["citation"], f"/content/{index}/citations")
            out.append(ir.PartDelta(place, "", "citation", 0, found))
        else:
            out.append(ir.Kept(chunk, False))
        return out

    def _block_stop(self, chunk: dict[str, Any]) -> list[ir.StreamEvent]:
        index = chunk.get("index")
        if type(index) is not int or index not in self.open:
            return []
        block = self.open.pop(index)
        text = "".join(self.inputs.pop(index, ()))
        part = None
        if text and block.get("type") != "tool_use":
            # The input of the vendor's own tools is part of their native block.
            value = parse_json(text)
            part = claude.read_block({**block, "input": text if value is None else value}, f"/content/{index}")
        return [ir.PartStopped(self.places[index], part)]

    def _message_delta(self, chunk: dict[str, Any]) -> list[ir.StreamEvent]:
        found = chunk.get("delta")
        delta: dict[str, Any] = found if type(found) is dict else {}
        out: list[ir.StreamEvent] = [
            ir.Noted(key, value) for key, value in delta.items() if key not in ("stop_reason", "stop_sequence")
        ]
        out += [ir.Noted(key, value) for key, value in chunk.items() if key not in ("type", "delta", "usage")]
        return out + self._usage(chunk.get("usage")) + self._stop(delta)

    def _stop(self, holder: dict[str, Any]) -> list[ir.StreamEvent]:
        raw, sequence = holder.get("stop_reason"), holder.get("stop_sequence")
        if type(raw) is not str or self.has_stopped:
            return []
        self.has_stopped = True
        stop = claude.ENDINGS.read(raw, calls=self.has_calls) or "other"
        sequence = sequence if type(sequence) is str else None
        return [*self._close_all(), ir.Stopped(stop=stop, raw=raw, sequence=sequence, at="/stop_reason")]


def _text(delta: dict[str, Any], key: str) -> str:
    value = delta.get(key)
    return value if type(value) is str else ""


class ClaudeWriter(BlockWriter):
    """Templates of the chunks."""

    is_serial = True

    def __init__(self, source: str) -> None:
        super().__init__(source, NAME)
        self.has_begun = False
        self.next_index = 0
        self.reason: Json = {"stop_reason": None, "stop_sequence": None}

    def prefix(self) -> list[Json]:
        if self.has_begun:
            return []
        self.has_begun = True
        began = self.sum.began
        message: dict[str, Any] = {
            "id": began.id or "msg_translated", "type": "message", "role": "assistant",
            "model": began.model or "unknown", "content": [], "stop_reason": None, "stop_sequence": None,
            "usage": self._usage(),
        }  # fmt: skip
        if self.ledger.is_home:
            message.update(began.ext.get(NAME, {}))
        return [{"type": "message_start", "message": message}]

    def _usage(self) -> dict[str, Any]:
        return self.counted(claude.write_usage) or {"input_tokens": 0, "output_tokens": 0}

    def begin(self, key: Key, part: ir.Part) -> list[Json] | None:
        block: Json
        if isinstance(part, ir.ToolUse):
            block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
        elif isinstance(part, ir.Text | ir.Refusal):
            block = {"type": "text", "text": ""}
            if isinstance(part, ir.Refusal):
                self.ledger.degrade(part.at, "part", "a refusal is said as text here")
        elif isinstance(part, ir.Thinking) and part.redacted is None:
            block = {"type": "thinking", "thinking": "", "signature": ""}
            if not self.ledger.is_home:
                self.ledger.degrade(part.at, "thinking", "thinking without this vendor's signature")
        else:
            block = claude.write_block(part, self.ledger, is_answer=True) if self.ledger.is_home else None
            if block is None:
                return None
        place = self.opened[key] = self.next_index
        self.next_index += 1
        out: list[Json] = [{"type": "content_block_start", "index": place, "content_block": block}]
        if isinstance(part, ir.ToolUse) and part.kind == "custom":
            self.ledger.degrade(part.at, "tool", "free text is streamed as arguments")
            out.append(self._delta(place, "input_json_delta", "partial_json", '{"input":"'))
        return out

    def _delta(self, place: int, kind: str, member: str, value: Json) -> Json:
        return {"type": "content_block_delta", "index": place, "delta": {"type": kind, member: value}}

    def piece(self, event: ir.PartDelta, part: ir.Part) -> list[Json]:
        place, text = self.opened[event.choice, event.index], event.text
        if event.field == "arguments":
            if isinstance(part, ir.ToolUse) and part.kind == "custom":
                text = json_text(text)[1:-1]
            return [self._delta(place, "input_json_delta", "partial_json", text)]
        if isinstance(part, ir.Thinking):
            return [self._delta(place, "thinking_delta", "thinking", text)]
        return [self._delta(place, "text_delta", "text", text)]

    def proof(self, event: ir.PartDelta, part: ir.Part) -> list[Json] | None:
        place = self.opened[event.choice, event.index]
        if not self.ledger.is_home:
            return None
        if event.field == "citation":
            citation: ir.Citation = event.value
            return [self._delta(place, "citations_delta", "citation", claude.write_citation(citation, self.ledger))]
        return [self._delta(place, "signature_delta", "signature", event.text)]

    def close(self, key: Key, part: ir.Part) -> list[Json]:
        out: list[Json] = []
        if isinstance(part, ir.ToolUse) and part.kind == "custom":
            out.append(self._delta(self.opened[key], "input_json_delta", "partial_json", '"}'))
        return [*out, {"type": "content_block_stop", "index": self.opened[key]}]

    def stop(self, event: ir.Stopped) -> list[Json]:
        self.reason = {"stop_reason": self.stop_word(event, claude.ENDINGS), "stop_sequence": event.sequence}
        return []

    def end(self) -> list[Json]:
        delta = self.reason
        if self.ledger.is_home:
            delta = {**delta, **self.sum.notes.get((None, False), {})}
        out = self.fail(ir.StreamFailed("the stream was cut")) if self.is_cut else []
        return [*out, {"type": "message_delta", "delta": delta, "usage": self._usage()}, {"type": "message_stop"}]

    def fail(self, event: ir.StreamFailed) -> list[Json]:
        if self.ledger.is_home and event.raw is not None:
            return [event.raw]
        return [{"type": "error", "error": {"type": "api_error", "message": event.message}}]
