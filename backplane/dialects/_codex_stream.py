"""Streams of the Responses dialect, read.

Items begin and end, their contents begin and end in them; the last event repeats the whole answer and is the better
truth, because gateways leave out indices, starts and ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects._codex_read import STOPS, read_item, read_part, read_usage
from backplane.dialects._parts import kind_of
from backplane.ir import (
    Answer,
    Began,
    Citation,
    Ended,
    Kept,
    Message,
    PartDelta,
    PartStarted,
    PartStopped,
    Refusal,
    Stopped,
    StreamEvent,
    StreamFailed,
    Text,
    Thinking,
    ToolUse,
    Translated,
    UsageSeen,
)

TERMINAL: Final = frozenset({"response.completed", "response.incomplete", "response.failed", "response.cancelled"})

DELTAS: Final = {
    "response.output_text.delta": "text",
    "response.refusal.delta": "refusal",
    "response.reasoning_summary_text.delta": "summary",
    "response.reasoning_text.delta": "content",
    "response.function_call_arguments.delta": "call",
    "response.custom_tool_call_input.delta": "call",
}

NOISE: Final = frozenset({
    "response.output_text.done", "response.refusal.done", "response.content_part.done", "response.keepalive",
    "response.reasoning_summary_text.done", "response.reasoning_summary_part.done", "response.reasoning_text.done",
    "response.reasoning_summary_part.added", "response.function_call_arguments.done", "keepalive", "ping",
    "response.custom_tool_call_input.done",
})  # fmt: skip
"""Events that only repeat what was said, or say nothing."""


class _Item:
    """One item while it comes in."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.blocks: dict[Any, int] = {}
        """Place in the item → block."""
        self.said: dict[int, bool] = {}
        self.summary = -1
        self.pending: list[str] = []
        """Arguments of a call whose name is not known yet."""
        self.is_done = False


class CodexReader:
    """Reads the events of one stream.

    Args:
        read_answer: reads the whole answer that the last event repeats.
    """

    def __init__(self, read_answer: Callable[[Json], Translated[Answer]]) -> None:
        self.read_answer = read_answer
        self.items: dict[Any, _Item] = {}
        self.current: Any = None
        self.next_index = 0
        self.began = False
        self.ended = False
        self.call_ids: set[str] = set()
        self.has_text = False
        self._handlers: Final[dict[Any, Any]] = {
            "response.created": self._begin,
            "response.in_progress": self._begin,
            "response.queued": self._begin,
            "response.output_item.added": self._added,
            "response.output_item.done": self._done,
            "response.content_part.added": self._part_added,
            "response.output_text.annotation.added": self._annotation,
            "error": self._error,
        }

    def read(self, chunk: Json) -> list[StreamEvent]:
        """Read one event; those of a later version are kept."""
        if type(chunk) is not dict:
            return [Kept(chunk)]
        kind = kind_of(chunk)
        if kind in DELTAS:
            return self._delta(chunk, DELTAS[kind])
        if kind in NOISE:
            return []
        handler = self._handlers.get(kind)
        if handler is not None:
            found: list[StreamEvent] = handler(chunk)
            return found
        if kind in TERMINAL:
            return self._end(chunk)
        if chunk.get("object") == "response" and "output" in chunk:
            return self._end({"type": "response.completed", "response": chunk})
        if kind is None and chunk.get("error"):
            return self._error(chunk["error"] if type(chunk["error"]) is dict else {"message": chunk["error"]})
        # Events of tools that the vendor runs say nothing that the end of their item does not say.
        return [Kept(chunk, type(kind) is str and "_call." in kind)]

    def finish(self) -> list[StreamEvent]:
        """Close what is open; the stream has ended without its last event."""
        if self.ended:
            return []
        self.ended = True
        out: list[StreamEvent] = []
        for item in self.items.values():
            if not item.is_done:
                out += [PartStopped(index) for index in item.blocks.values()]
        return [*out, Ended()]

    def _begin(self, chunk: dict[str, Any]) -> list[StreamEvent]:
        response = chunk.get("response")
        if self.began or type(response) is not dict:
            return []
        self.began = True
        answer_id, model, created = response.get("id"), response.get("model"), response.get("created_at")
        return [
            Began(
                id=answer_id if type(answer_id) is str else None,
                model=model if type(model) is str else None,
                created=created if type(created) is int or type(created) is float else None,
                at="/response",
            )
        ]

    def _key(self, chunk: dict[str, Any]) -> Any:
        """Return what an event's item is known by: its index, else its id, else the one that is open."""
        index = chunk.get("output_index")
        if type(index) is int:
            return index
        item = chunk.get("item")
        item_id = chunk.get("item_id") or (item.get("id") if type(item) is dict else None)
        item_id = item_id if type(item_id) is str else None
        if item_id is not None and item_id in self.items:
            return item_id
        if chunk.get("type") == "response.output_item.added" or self.current is None:
            return item_id if item_id is not None else ("item", len(self.items))
        return self.current

    def _item(self, chunk: dict[str, Any], kind: str) -> _Item:
        key = self._key(chunk)
        item = self.items.get(key)
        if item is None:
            item = self.items[key] = _Item(kind)
        self.current = key
        return item

    def _open(self, item: _Item, place: Any, part: Any) -> list[StreamEvent]:
        index = self.next_index
        self.next_index += 1
        item.blocks[place] = index
        if isinstance(part, ToolUse):
            self.call_ids.add(part.id)
        return [PartStarted(index, part)]

    def _added(self, chunk: dict[str, Any]) -> list[StreamEvent]:
        raw = chunk.get("item")
        if type(raw) is not dict:
            return [Kept(chunk, False)]
        key = self._key(chunk)
        if key in self.items and self.items[key].is_done:
            del self.items[key]  # a gateway that counts every item as the first
        item = self._item(chunk, str(raw.get("type")))
        found = read_item(raw, f"/output/{self.current}")
        if item.blocks or not isinstance(found, list) or len(found) != 1:
            return []
        part = found[0]
        if isinstance(part, ToolUse):
            return self._open(item, 0, msgspec.structs.replace(part, text=part.text or "", input={}))
        if isinstance(part, Thinking):
            return self._open(item, 0, msgspec.structs.replace(part, text="", signature=None))
        return []

    def _part_added(self, chunk: dict[str, Any]) -> list[StreamEvent]:
        item = self._item(chunk, "message")
        place = _place(chunk)
        if place in item.blocks or item.kind == "reasoning":
            return []
        part = read_part(chunk.get("part"), f"/output/{self.current}/content/{place}")
        return self._open(item, place, part) if isinstance(part, Text | Refusal) else []

    def _delta(self, chunk: dict[str, Any], what: str) -> list[StreamEvent]:
        text = chunk.get("delta")
        if type(text) is not str or not text:
            return []
        out: list[StreamEvent] = []
        if what == "call":
            item = self._item(chunk, "function_call")
            if 0 not in item.blocks:
                item.pending.append(text)
                return []
            item.said[item.blocks[0]] = True
            return [PartDelta(item.blocks[0], text, "arguments")]
        if what in ("summary", "content"):
            item = self._item(chunk, "reasoning")
            if 0 not in item.blocks:
                out += self._open(item, 0, Thinking(text="", field=what, at=f"/output/{self.current}"))
            place = chunk.get("summary_index", 0)
            if what == "summary" and type(place) is int and place > item.summary:
                if item.summary >= 0:
                    text = "\n\n" + text
                item.summary = place
            index = item.blocks[0]
        else:
            item = self._item(chunk, "message")
            place = _place(chunk)
            if place not in item.blocks:
                at = f"/output/{self.current}/content/{place}"
                out += self._open(item, place, Text(text="", at=at) if what == "text" else Refusal(text="", at=at))
            index = item.blocks[place]
            self.has_text = True
        item.said[index] = True
        out.append(PartDelta(index, text))
        return out

    def _annotation(self, chunk: dict[str, Any]) -> list[StreamEvent]:
        item = self._item(chunk, "message")
        index = item.blocks.get(_place(chunk))
        found = chunk.get("annotation")
        if index is None or type(found) is not dict:
            return []
        part = read_part({"type": "output_text", "text": "", "annotations": [found]}, "")
        citations: tuple[Citation, ...] = part.citations if isinstance(part, Text) else ()
        return [PartDelta(index, "", "citation", 0, citation) for citation in citations]

    def _done(self, chunk: dict[str, Any]) -> list[StreamEvent]:
        raw = chunk.get("item")
        if type(raw) is not dict:
            return [Kept(chunk, False)]
        item = self._item(chunk, str(raw.get("type")))
        if item.is_done:
            return []
        item.is_done = True
        found = read_item(raw, f"/output/{self.current}", is_answer=True)
        parts = list(found.parts) if isinstance(found, Message) else found
        out: list[StreamEvent] = []
        for place, part in enumerate(parts):
            if place not in item.blocks:
                out += self._whole(item, place, part)
                continue
            index = item.blocks[place]
            if not item.said.get(index):
                out += _said(index, part)
            out.append(PartStopped(index, part))
        return out

    def _whole(self, item: _Item, place: Any, part: Any) -> list[StreamEvent]:
        """Say a block that was never begun."""
        if isinstance(part, Text | Refusal):
            self.has_text = True
        start = part
        if isinstance(part, ToolUse):
            start = msgspec.structs.replace(part, text="", input={})
        elif isinstance(part, Text | Refusal | Thinking):
            start = msgspec.structs.replace(part, text="")
        out = self._open(item, place, start)
        index = item.blocks[place]
        return [*out, *_said(index, part), PartStopped(index, part)]

    def _error(self, chunk: dict[str, Any]) -> list[StreamEvent]:
        error = chunk.get("error") if type(chunk.get("error")) is dict else chunk
        assert type(error) is dict
        code = error.get("code")
        return [StreamFailed(str(error.get("message", "unknown error")), str(code) if code else None, chunk)]

    def _end(self, chunk: dict[str, Any]) -> list[StreamEvent]:
        response = chunk.get("response")
        if self.ended or type(response) is not dict:
            return []
        self.ended = True
        out = self._begin(chunk)
        answer = None
        if type(response.get("output")) is list:
            answer = self.read_answer(response).value
            out += self._missing(answer)
        for item in self.items.values():
            if not item.is_done:
                out += [PartStopped(index) for index in item.blocks.values()]
        if type(response.get("usage")) is dict:
            out.append(UsageSeen(read_usage(response["usage"], "/usage")))
        error = response.get("error")
        if type(error) is dict:
            out += self._error({**error, "type": "error"})
        out.append(self._stop(response, answer, str(chunk.get("type")).partition(".")[2]))
        # Some servers, and every failure half way, end with an empty list although something was said.
        has_all = answer is not None and (answer.candidates[0].message.parts or not self.next_index)
        return [*out, Ended(answer if has_all else None)]

    def _stop(self, response: dict[str, Any], answer: Answer | None, word: str) -> Stopped:
        if answer is not None and answer.candidates[0].stop is not None:
            candidate = answer.candidates[0]
            stop, raw = candidate.stop, candidate.stop_raw
            assert stop is not None
        else:
            status = response.get("status")
            raw = status if type(status) is str and status else word
            stop = STOPS.get(raw, "other")
        if stop == "end" and self.call_ids:
            stop = "tool_use"
        return Stopped(stop=stop, raw=raw, at="/status")

    def _missing(self, answer: Answer) -> list[StreamEvent]:
        """Say what the whole has and no event said."""
        out: list[StreamEvent] = []
        nothing = not self.next_index
        had_text = self.has_text
        for place, part in enumerate(answer.candidates[0].message.parts):
            is_new_call = isinstance(part, ToolUse) and part.id not in self.call_ids
            is_new_text = isinstance(part, Text | Refusal) and not had_text
            if nothing or is_new_call or is_new_text:
                item = self.items.setdefault(("whole", place), _Item("whole"))
                item.is_done = True
                out += self._whole(item, 0, part)
        return out


def _place(chunk: dict[str, Any]) -> int:
    place = chunk.get("content_index")
    return place if type(place) is int else 0


def _said(index: int, part: Any) -> list[StreamEvent]:
    if isinstance(part, ToolUse):
        text = part.text if part.text is not None else ""
        return [PartDelta(index, text, "arguments")] if text else []
    text = getattr(part, "text", "")
    return [PartDelta(index, text)] if text and isinstance(part, Text | Refusal | Thinking) else []
