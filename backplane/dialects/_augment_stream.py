"""Events of the ir into Augment's chunks: one JSON object a line, counted nodes, one last line with the reason to stop.

Texts go out as they come, a call when it is whole, counters once at the end. What kind of bytes lines are is not
decided here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects._augment_nodes import NAME, RAW_RESPONSE, THINKING, TOKEN_USAGE, TOOL_USE, TOOL_USE_START
from backplane.dialects._losses import lose_part, lose_signature
from backplane.dialects._parts import json_text, parse_json
from backplane.dialects._stream import BaseWriter
from backplane.ir import (
    Ended,
    PartDelta,
    PartStarted,
    PartStopped,
    Refusal,
    Stopped,
    StreamFailed,
    Text,
    Thinking,
    ToolUse,
    UsageSeen,
)

UNSPECIFIED, END_TURN, MAX_TOKENS, TOOL_USE_REQUESTED, SAFETY, RECITATION, MALFORMED_FUNCTION_CALL = range(7)
"""Reasons to stop."""

STOPS: Final[dict[str, int]] = {
    "end": END_TURN,
    "stop_sequence": END_TURN,
    "max_tokens": MAX_TOKENS,
    "tool_use": TOOL_USE_REQUESTED,
    "content_filter": SAFETY,
    "refusal": SAFETY,
}
"""Of the ir; any other is the end of the turn."""

RAW_STOPS: Final[dict[str, int]] = {
    "safety": SAFETY,
    "recitation": RECITATION,
    "malformed_function_call": MALFORMED_FUNCTION_CALL,
}
"""Vendors' words that this wire knows and the ir does not tell apart."""


class Reply(msgspec.Struct, frozen=True):
    """What a request says about the answer that it wants."""

    tool_use_start: bool = False
    """Whether a call is announced before it is whole."""
    mcp_names: Mapping[str, tuple[str, str]] = {}
    """Tool → its server's name and its name there, for tools that come from such a server."""


class ChunkWriter(BaseWriter):
    """Writes the chunks of one stream.

    Args:
        source: dialect that the events were read from.
        reply: what the request said about its answer.
    """

    def __init__(self, source: str, reply: Reply) -> None:
        super().__init__(source, NAME)
        self.reply = reply
        self.node_id = 0
        self.announced: set[tuple[int, int]] = set()
        self.calls: set[tuple[str, str, str]] = set()
        self.stop: Stopped | None = None
        self.has_failed = False
        self.is_complete = False

    def _chunk(self, text: str = "", *nodes: dict[str, Any], **more: Any) -> Json:
        out: dict[str, Any] = {
            "text": text,
            "unknown_blob_names": [],
            "checkpoint_not_found": False,
            "workspace_file_chunks": [],
        }
        if nodes:
            out["nodes"] = list(nodes)
        return {**out, **more}

    def _node(self, kind: int, content: str = "", **body: Any) -> dict[str, Any]:
        self.node_id += 1
        return {"id": self.node_id, "type": kind, "content": content, **body}

    def _text(self, text: str) -> list[Json]:
        return [self._chunk(text, self._node(RAW_RESPONSE, text))] if text else []

    def on_started(self, event: PartStarted) -> list[Json]:
        part, key = event.part, (event.choice, event.index)
        if self.lose_choice(event.choice):
            return []
        if isinstance(part, ToolUse):
            if not (self.reply.tool_use_start and part.name):
                return []
            self.announced.add(key)
            known = json_text(part.input if isinstance(part.input, dict) else {})
            return [self._chunk("", self._node(TOOL_USE_START, tool_use=self._call(part, known)))]
        if isinstance(part, Text | Refusal) and part.text:
            return self.on_delta(PartDelta(event.index, part.text, "text", event.choice))
        return []

    def on_delta(self, event: PartDelta) -> list[Json]:
        block = self.sum.blocks.get((event.choice, event.index))
        if block is None or event.choice:
            return []
        if event.field in ("signature", "citation"):
            if self.once(f"{event.field} {event.index}"):
                self.ledger.drop(block.part.at, event.field, "a chunk has no member for it")
            return []
        if event.field != "text" or not isinstance(block.part, Text | Refusal):
            return []
        if isinstance(block.part, Refusal) and self.once("refusal"):
            self.ledger.degrade(block.part.at, "part", "a refusal is said as text")
        self.sent.add((event.choice, event.index))
        return self._text(event.text)

    def on_stopped(self, event: PartStopped) -> list[Json]:
        key = (event.choice, event.index)
        part = self.sum.part(*key)
        if part is None or event.choice:
            return []
        if isinstance(part, ToolUse):
            return self._whole_call(part, key)
        if isinstance(part, Thinking):
            return self._thinking(part)
        if isinstance(part, Text | Refusal):
            return [] if key in self.sent else self._text(part.text)
        lose_part(part, self.ledger)
        return []

    def _thinking(self, part: Thinking) -> list[Json]:
        if part.redacted is not None:
            self.ledger.drop(part.at, "thinking", "only its vendor can read it", part.redacted)
        if part.signature is not None and self.once(f"signature {part.at}"):
            lose_signature(part, self.ledger)
        return [self._chunk("", self._node(THINKING, thinking={"summary": part.text}))] if part.text else []

    def _whole_call(self, part: ToolUse, key: tuple[int, int]) -> list[Json]:
        text = self._arguments(part)
        if (part.id, part.name, text) in self.calls:
            return []
        self.calls.add((part.id, part.name, text))
        head: list[Json] = []
        if self.reply.tool_use_start and key not in self.announced:
            head = [self._chunk("", self._node(TOOL_USE_START, tool_use=self._call(part, text)))]
        return [*head, self._chunk("", self._node(TOOL_USE, tool_use=self._call(part, text)))]

    def _arguments(self, part: ToolUse) -> str:
        if part.kind == "custom" or not isinstance(part.input, dict):
            self.ledger.degrade(part.at, "arguments", "no JSON object; it stands in the member input")
            return json_text({"input": part.input})
        if part.text and parse_json(part.text) == part.input:
            return part.text
        return json_text(part.input)

    def _call(self, part: ToolUse, text: str) -> dict[str, Any]:
        out = {"tool_use_id": part.id, "tool_name": part.name, "input_json": text}
        if part.name in self.reply.mcp_names:
            out["mcp_server_name"], out["mcp_tool_name"] = self.reply.mcp_names[part.name]
        return out

    def on_stop(self, event: Stopped) -> list[Json]:
        if event.choice == 0:
            self.stop = event
        return []

    def on_failed(self, event: StreamFailed) -> list[Json]:
        """This wire has no member for an error: the words are shown, and the answer has no reason to stop."""
        self.has_failed = True
        self.ledger.degrade("", "stop", "an error is said as text")
        return self._text(f"The model's service failed: {event.message}")

    def on_usage(self, event: UsageSeen) -> list[Json]:
        return []

    def on_ended(self, event: Ended) -> list[Json]:
        if self.is_complete:
            return []
        self.is_complete = True
        usage = self._usage()
        head = [self._chunk("", self._node(TOKEN_USAGE, token_usage=usage))] if usage else []
        return [*head, self._chunk(stop_reason=self._stop_reason())]

    def _stop_reason(self) -> int:
        if self.has_failed:
            return UNSPECIFIED
        if self.stop is None:
            # A gateway that forgets its last event; a call that came whole can still be run.
            return TOOL_USE_REQUESTED if self.calls else UNSPECIFIED
        found = RAW_STOPS.get((self.stop.raw or "").lower()) or STOPS.get(self.stop.stop, END_TURN)
        if self.stop.stop not in STOPS and found == END_TURN:
            self.ledger.degrade(self.stop.at, "stop", f"{self.stop.raw or self.stop.stop} became the end of the turn")
        return TOOL_USE_REQUESTED if self.calls and found == END_TURN else found

    def _usage(self) -> dict[str, int]:
        """Return the counters that are known; `input_tokens` are all that was sent, cached ones included."""
        usage = self.sum.usage
        if usage is None:
            return {}
        if usage.reasoning:
            self.ledger.drop(usage.at, "usage", "tokens of thinking are not counted apart", usage.reasoning)
        found = {
            "input_tokens": usage.input,
            "output_tokens": usage.output,
            "cache_read_input_tokens": usage.cache_read,
            "cache_creation_input_tokens": usage.cache_write,
        }
        return {name: count for name, count in found.items() if count is not None}
