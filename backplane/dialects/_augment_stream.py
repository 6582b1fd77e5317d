"""Events of the ir into Augment's chunks: one JSON object a line, counted nodes, one last line with the reason to stop.

Texts go out as they come, a call when it is whole, counters once at the end. What kind of bytes lines are is not
decided here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from backplane import ir
from backplane.contract.canonical import Json
from backplane.dialects._augment_nodes import NAME, RAW_RESPONSE, THINKING, TOKEN_USAGE, TOOL_USE, TOOL_USE_START
from backplane.dialects.codec import json_text, parse_json
from backplane.dialects.limits import CUT_CALL
from backplane.dialects.outcome import has_cut_call
from backplane.dialects.streams import BlockWriter, Key

UNSPECIFIED, END_TURN, MAX_TOKENS, TOOL_USE_REQUESTED, SAFETY, RECITATION, MALFORMED_FUNCTION_CALL = range(7)
"""Reasons to stop."""

STOPS: Final[dict[str, int]] = {
    "end": END_TURN,
    "stop_sequence": END_TURN,
    "max_tokens": MAX_TOKENS,
    "tool_use": TOOL_USE_REQUESTED,
    "content_filter": SAFETY,
    "refusal": SAFETY,
    "other": END_TURN,
}
"""Of the ir. A word that nobody knows is the end of the turn, as the public extension has it; a failure, a cancelled or
paused answer and a stream without its last event are none, so that the editor does not take them for whole."""

RAW_STOPS: Final[dict[str, int]] = {
    "safety": SAFETY,
    "recitation": RECITATION,
    "malformed_function_call": MALFORMED_FUNCTION_CALL,
    "incomplete": UNSPECIFIED,
    "queued": UNSPECIFIED,
    "in_progress": UNSPECIFIED,
}
"""Vendors' words that this wire knows and the ir does not tell apart."""


class Reply(msgspec.Struct, frozen=True):
    """What a request says about the answer that it wants."""

    tool_use_start: bool = False
    """Whether a call is announced before it is whole."""
    mcp_names: Mapping[str, tuple[str, str]] = {}
    """Tool → its server's name and its name there, for tools that come from such a server."""


class ChunkWriter(BlockWriter):
    """Templates of the chunks.

    Args:
        source: dialect that the events were read from.
        reply: what the request said about its answer.
    """

    def __init__(self, source: str, reply: Reply) -> None:
        super().__init__(source, NAME)
        self.reply = reply
        self.node_id = 0
        self.announced: set[Key] = set()
        self.calls: set[tuple[str, str, str]] = set()
        self.reason: ir.Stopped | None = None

    def _chunk(self, text: str = "", *nodes: dict[str, Any], **more: Any) -> Json:
        out: dict[str, Any] = {
            "text": text, "unknown_blob_names": [], "checkpoint_not_found": False, "workspace_file_chunks": [],
        }  # fmt: skip
        if nodes:
            out["nodes"] = list(nodes)
        return {**out, **more}

    def _node(self, kind: int, content: str = "", **body: Any) -> dict[str, Any]:
        self.node_id += 1
        return {"id": self.node_id, "type": kind, "content": content, **body}

    def _text(self, text: str) -> list[Json]:
        return [self._chunk(text, self._node(RAW_RESPONSE, text))] if text else []

    def begin(self, key: Key, part: ir.Part) -> list[Json] | None:
        if isinstance(part, ir.Text | ir.Refusal):
            if isinstance(part, ir.Refusal) and self.once("refusal"):
                self.ledger.degrade(part.at, "part", "a refusal is said as text")
            self.opened[key] = True
            return []
        if not (isinstance(part, ir.ToolUse) and self.reply.tool_use_start and part.name):
            return None
        self.announced.add(key)
        known = json_text(part.input if isinstance(part.input, dict) else {})
        return [self._chunk("", self._node(TOOL_USE_START, tool_use=self._call(part, known)))]

    def piece(self, event: ir.PartDelta, part: ir.Part) -> list[Json]:
        return self._text(event.text)

    def whole(self, key: Key, part: ir.Part) -> list[Json] | None:
        if isinstance(part, ir.ToolUse):
            return self._whole_call(part, key)
        if not isinstance(part, ir.Thinking) or part.redacted is not None:
            return None
        if part.signature is not None:
            self.ledger.drop(part.at, "signature", "a chunk has no member for it")
        return [self._chunk("", self._node(THINKING, thinking={"summary": part.text}))] if part.text else []

    def _whole_call(self, part: ir.ToolUse, key: Key) -> list[Json]:
        if part.is_cut:
            self.ledger.drop(part.at, "arguments", CUT_CALL)
            return []
        text = self._arguments(part)
        if (part.id, part.name, text) in self.calls:
            return []
        self.calls.add((part.id, part.name, text))
        head: list[Json] = []
        if self.reply.tool_use_start and key not in self.announced:
            head = [self._chunk("", self._node(TOOL_USE_START, tool_use=self._call(part, text)))]
        return [*head, self._chunk("", self._node(TOOL_USE, tool_use=self._call(part, text)))]

    def _arguments(self, part: ir.ToolUse) -> str:
        if part.kind == "custom" or not isinstance(part.input, dict):
            self.ledger.degrade(part.at, "arguments", "no JSON object; it stands in the member input")
            return json_text({"input": part.input})
        if part.text and parse_json(part.text) == part.input:
            return part.text
        return json_text(part.input)

    def _call(self, part: ir.ToolUse, text: str) -> dict[str, Any]:
        out = {"tool_use_id": part.id, "tool_name": part.name, "input_json": text}
        if part.name in self.reply.mcp_names:
            out["mcp_server_name"], out["mcp_tool_name"] = self.reply.mcp_names[part.name]
        return out

    def stop(self, event: ir.Stopped) -> list[Json]:
        self.reason = event
        return []

    def fail(self, event: ir.StreamFailed) -> list[Json]:
        """This wire has no member for an error: the words are shown, and the answer has no reason to stop."""
        self.ledger.degrade("", "stop", "an error is said as text")
        return self._text(f"The model's service failed: {event.message}")

    def end(self) -> list[Json]:
        usage = self._usage()
        head = [self._chunk("", self._node(TOKEN_USAGE, token_usage=usage))] if usage else []
        return [*head, self._chunk(stop_reason=self._stop_reason())]

    def _stop_reason(self) -> int:
        """Return the number of the reason; a failure and a cut stream have none, whatever was said before."""
        if self.sum.failure is not None or self.reason is None:
            return UNSPECIFIED
        word = self.reason.raw or ""
        found = RAW_STOPS.get(word.lower(), STOPS.get(self.reason.stop, UNSPECIFIED))
        if self.reason.stop not in STOPS:
            self.ledger.degrade(self.reason.at, "stop", f"{word or self.reason.stop} became {found}")
        is_cut = has_cut_call(self.stopped(self.reason).message.parts)
        return TOOL_USE_REQUESTED if self.calls and found == END_TURN and not is_cut else found

    def _usage(self) -> dict[str, int]:
        """Return the counters that are known; `input_tokens` are all that was sent, cached ones included."""
        usage = self.sum.usage
        if usage is None:
            return {}
        if usage.reasoning:
            self.ledger.drop(usage.at, "usage", "tokens of thinking are not counted apart", usage.reasoning)
        found = {
            "input_tokens": usage.input, "output_tokens": usage.output,
            "cache_read_input_tokens": usage.cache_read, "cache_creation_input_tokens": usage.cache_write,
        }  # fmt: skip
        return {name: count for name, count in found.items() if count is not None}
