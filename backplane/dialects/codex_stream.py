"""Streams of the Responses dialect: items begin and end, their contents begin and end in them.

The last event repeats the whole answer and is the better truth, because gateways leave out indices, starts and ends.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane import ir
from backplane.contract.canonical import Json
from backplane.dialects import codex
from backplane.dialects.codec import Calls, Ledger, kind_of
from backplane.dialects.streams import BlockReader, BlockWriter, Key, begun, failure, text_of

NAME: Final = codex.NAME
TERMINAL: Final = frozenset({"response.completed", "response.incomplete", "response.failed", "response.cancelled"})

DELTAS: Final = {
    "response.output_text.delta": "text",
    "response.refusal.delta": "refusal",
    "response.reasoning_summary_text.delta": "summary",
    "response.reasoning_text.delta": "content",
    "response.function_call_arguments.delta": "call",
    "response.custom_tool_call_input.delta": "call",
}

DONES: Final = {
    "response.output_text.done": ("text", "text"),
    "response.refusal.done": ("refusal", "refusal"),
    "response.reasoning_text.done": ("content", "text"),
    "response.function_call_arguments.done": ("call", "arguments"),
    "response.custom_tool_call_input.done": ("call", "input"),
}
"""Event that repeats a whole text → what it is of, and its member."""

NOISE: Final = frozenset({
    "response.content_part.done", "response.keepalive", "response.reasoning_summary_text.done",
    "response.reasoning_summary_part.done", "response.reasoning_summary_part.added", "keepalive", "ping",
})  # fmt: skip
"""Events that only repeat what was said, or say nothing."""


class _Item:
    """One item while it comes in."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.blocks: dict[Any, int] = {}
        """Place in the item → block."""
        self.said: dict[int, list[str]] = {}
        """Block → its pieces."""
        self.summary = -1
        self.pending: list[str] = []
        """Arguments of a call whose name is not known yet."""
        self.is_done = False


class CodexReader(BlockReader):
    """Reads the events of one stream."""

    def __init__(self) -> None:
        super().__init__()
        self.items: dict[Any, _Item] = {}
        self.current: Any = None
        self.next_index = 0
        self.began = False
        self.call_ids: set[str] = set()
        self.texts: list[str] = []
        """Texts and refusals that were said, each whole, to find in the last event what nobody said."""
        self._handlers: Final[dict[Any, Any]] = {
            "response.created": self._begin, "response.in_progress": self._begin, "response.queued": self._begin,
            "response.output_item.added": self._added, "response.output_item.done": self._done,
            "response.content_part.added": self._part_added,
            "response.output_text.annotation.added": self._annotation, "error": self._error,
        }  # fmt: skip

    def read(self, chunk: Json) -> list[ir.StreamEvent]:
        """Read one event; those of a later version are kept."""
        if type(chunk) is not dict:
            return [ir.Kept(chunk)]
        kind = kind_of(chunk)
        if kind in DELTAS:
            return self._delta(chunk, DELTAS[kind], chunk.get("delta"))
        if kind in DONES:
            return self._text_done(chunk, *DONES[kind])
        if kind in NOISE:
            return []
        handler = self._handlers.get(kind)
        if handler is not None:
            found: list[ir.StreamEvent] = handler(chunk)
            return found
        if kind in TERMINAL:
            return self._end(chunk)
        if chunk.get("object") == "response" and "output" in chunk:
            return self._end({"type": "response.completed", "response": chunk})
        if kind is None and chunk.get("error"):
            return self._error(chunk["error"] if type(chunk["error"]) is dict else {"message": chunk["error"]})
        # Events of tools that the vendor runs say nothing that the end of their item does not say.
        return [ir.Kept(chunk, type(kind) is str and "_call." in kind)]

    def _close_all(self) -> list[ir.StreamEvent]:
        open_items = [item for item in self.items.values() if not item.is_done]
        return [ir.PartStopped(index) for item in open_items for index in item.blocks.values()]

    def _begin(self, chunk: dict[str, Any]) -> list[ir.StreamEvent]:
        response = chunk.get("response")
        if self.began or type(response) is not dict:
            return []
        self.began = True
        return [begun(response.get("id"), response.get("model"), response.get("created_at"), "/response")]

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

    def _open(self, item: _Item, place: Any, part: Any) -> list[ir.StreamEvent]:
        index = item.blocks[place] = self.next_index
        self.next_index += 1
        item.said[index] = []
        if isinstance(part, ir.ToolUse):
            self.call_ids.add(part.id)
        text = getattr(part, "text", None)
        if text:
            item.said[index].append(text)
        return [ir.PartStarted(index, part)]

    def _added(self, chunk: dict[str, Any]) -> list[ir.StreamEvent]:
        raw = chunk.get("item")
        if type(raw) is not dict:
            return [ir.Kept(chunk, False)]
        key = self._key(chunk)
        if key in self.items and self.items[key].is_done:
            del self.items[key]  # a gateway that counts every item as the first
        item = self._item(chunk, str(raw.get("type")))
        found = codex.read_item(raw, f"/output/{self.current}")
        if item.blocks or not isinstance(found, list) or len(found) != 1:
            return []
        part = found[0]
        if isinstance(part, ir.ToolUse):
            return self._open(item, 0, msgspec.structs.replace(part, text=part.text or "", input={}))
        if isinstance(part, ir.Thinking):
            return self._open(item, 0, msgspec.structs.replace(part, text="", signature=None))
        return []

    def _part_added(self, chunk: dict[str, Any]) -> list[ir.StreamEvent]:
        item = self._item(chunk, "message")
        place = _place(chunk)
        if place in item.blocks or item.kind == "reasoning":
            return []
        part = codex.read_part(chunk.get("part"), f"/output/{self.current}/content/{place}")
        return self._open(item, place, part) if isinstance(part, ir.Text | ir.Refusal) else []

    def _delta(self, chunk: dict[str, Any], what: str, text: Json) -> list[ir.StreamEvent]:
        if type(text) is not str or not text:
            return []
        if what == "call":
            item = self._item(chunk, "function_call")
            if 0 not in item.blocks:
                item.pending.append(text)
                return []
            item.said[item.blocks[0]].append(text)
            return [ir.PartDelta(item.blocks[0], text, "arguments")]
        out: list[ir.StreamEvent] = []
        if what in ("summary", "content"):
            item, place = self._item(chunk, "reasoning"), 0
            if 0 not in item.blocks:
                out += self._open(item, 0, ir.Thinking(text="", field=what, at=f"/output/{self.current}"))
            number = chunk.get("summary_index", 0)
            if what == "summary" and type(number) is int and number > item.summary:
                text = "\n\n" + text if item.summary >= 0 else text
                item.summary = number
        else:
            item, place = self._item(chunk, "message"), _place(chunk)
            if place not in item.blocks:
                at = f"/output/{self.current}/content/{place}"
                out += self._open(
                    item, place, ir.Text(text="", at=at) if what == "text" else ir.Refusal(text="", at=at)
                )
        index = item.blocks[place]
        item.said[index].append(text)
        out.append(ir.PartDelta(index, text))
        return out

    def go_on(self, text: str) -> str | None:
        """Take more of the open text; None where no single text is open."""
        item = self.items.get(self.current)
        if item is None or len(item.said) != 1:
            return None
        next(iter(item.said.values())).append(text)
        return text

    def _text_done(self, chunk: dict[str, Any], what: str, member: str) -> list[ir.StreamEvent]:
        """Read an event that repeats a text: what nobody said of it is said now."""
        text = chunk.get(member)
        if type(text) is not str or not text:
            return []
        item = self._item(chunk, {"call": "function_call", "content": "reasoning"}.get(what, "message"))
        index = item.blocks.get(_place(chunk) if what in ("text", "refusal") else 0)
        if item.is_done or (what == "content" and item.summary >= 0):
            return []
        if index is None:
            return self._delta(chunk, what, text) if what != "call" or not item.pending else []
        rest = self._rest(item, index, text, f"/output/{self.current}")
        field: Any = "arguments" if what == "call" else "text"
        return [ir.PartDelta(index, rest, field)] if rest else []

    def _rest(self, item: _Item, index: int, whole: str, at: str) -> str:
        """Return what a whole text has beyond its pieces; one that says something else is named."""
        pieces = item.said[index]
        said = "".join(pieces)
        if whole == said:
            return ""
        if whole.startswith(said):
            pieces[:] = [whole]
            return whole[len(said) :]
        reason = "the end of a block says another text than its pieces"
        if all(loss.path != at for loss in self.losses):
            self.losses.append(
                ir.Loss(path=at, dialect=NAME, target="", kind="degraded", code="fallback", reason=reason)
            )
        return ""

    def _annotation(self, chunk: dict[str, Any]) -> list[ir.StreamEvent]:
        index = self._item(chunk, "message").blocks.get(_place(chunk))
        found = chunk.get("annotation")
        if index is None or type(found) is not dict:
            return []
        return [ir.PartDelta(index, "", "citation", 0, codex.read_citation(found, "/annotations/0"))]

    def _done(self, chunk: dict[str, Any]) -> list[ir.StreamEvent]:
        raw = chunk.get("item")
        if type(raw) is not dict:
            return [ir.Kept(chunk, False)]
        item = self._item(chunk, str(raw.get("type")))
        if item.is_done:
            return []
        item.is_done = True
        found = codex.read_item(raw, f"/output/{self.current}", is_answer=True)
        parts = list(found.parts) if isinstance(found, ir.Message) else found
        out: list[ir.StreamEvent] = []
        for place, part in enumerate(parts):
            if place not in item.blocks:
                out += self._whole(item, place, part)
                continue
            index = item.blocks[place]
            if (text := _text_of(part)) and (rest := self._rest(item, index, text, f"/output/{self.current}")):
                out.append(ir.PartDelta(index, rest, _field(part)))
            if isinstance(part, ir.Text | ir.Refusal):
                self.texts.append(part.text)
            out.append(ir.PartStopped(index, part))
        return out

    def _whole(self, item: _Item, place: Any, part: Any) -> list[ir.StreamEvent]:
        """Say a block that was never begun."""
        start, text = part, _text_of(part)
        if isinstance(part, ir.ToolUse):
            start = msgspec.structs.replace(part, text="", input={})
        elif isinstance(part, ir.Text | ir.Refusal | ir.Thinking):
            start = msgspec.structs.replace(part, text="")
        if isinstance(part, ir.Text | ir.Refusal):
            self.texts.append(part.text)
        out = self._open(item, place, start)
        index = item.blocks[place]
        return [*out, *([ir.PartDelta(index, text, _field(part))] if text else []), ir.PartStopped(index, part)]

    def _error(self, chunk: dict[str, Any]) -> list[ir.StreamEvent]:
        inner = chunk.get("error")
        return [failure(inner if type(inner) is dict else chunk, chunk, "code")]

    def _end(self, chunk: dict[str, Any]) -> list[ir.StreamEvent]:
        response = chunk.get("response")
        if self.ended or type(response) is not dict:
            return []
        self.ended = True
        out = self._begin(chunk)
        answer = None
        if type(response.get("output")) is list:
            answer = codex.read_answer(response, Ledger("", ""), Calls())
            out += self._missing(answer)
        out += self._close_all()
        if type(response.get("usage")) is dict:
            out.append(ir.UsageSeen(codex.read_usage(response["usage"], "/usage")))
        error = response.get("error")
        if type(error) is dict:
            out += self._error({**error, "type": "error"})
        out += self._stop(response, answer, str(chunk.get("type")).partition(".")[2])
        # Some servers, and every failure half way, end with an empty list although something was said.
        has_all = answer is not None and (answer.candidates[0].message.parts or not self.next_index)
        return [*out, ir.Ended(answer if has_all else None)]

    def _stop(self, response: dict[str, Any], answer: ir.Answer | None, word: str) -> list[ir.StreamEvent]:
        candidate = None if answer is None else answer.candidates[0]
        if candidate is not None and candidate.stop is not None:
            stop, raw = candidate.stop, candidate.stop_raw
        else:
            status = response.get("status")
            raw = status if type(status) is str and status else word
            stop = codex.ENDINGS.read(raw, calls=bool(self.call_ids)) or "other"
        return [ir.Stopped(stop=stop, raw=raw, at="/status")]

    def _missing(self, answer: ir.Answer) -> list[ir.StreamEvent]:
        """Say what the whole has and no event said, and the rest of a text that was begun."""
        out: list[ir.StreamEvent] = []
        nothing = not self.next_index
        parts = answer.candidates[0].message.parts
        told = list(self.texts)
        waiting = [
            (item, index) for item in self.items.values() if not item.is_done and item.kind not in ("reasoning",)
            for index in item.blocks.values()
        ]  # fmt: skip
        for place, part in enumerate(parts):
            if isinstance(part, ir.Text | ir.Refusal) and not nothing:
                if part.text in told:
                    told.remove(part.text)
                    continue
                begun = next((one for one in waiting if part.text.startswith("".join(one[0].said[one[1]]))), None)
                if begun is not None:
                    waiting.remove(begun)
                    rest = self._rest(*begun, part.text, part.at)
                    out += [ir.PartDelta(begun[1], rest)] if rest else []
                    continue
                if told or waiting:
                    continue
            elif isinstance(part, ir.ToolUse):
                if part.id in self.call_ids:
                    continue
            elif not nothing:
                continue
            item = self.items.setdefault(("whole", place), _Item("whole"))
            item.is_done = True
            out += self._whole(item, 0, part)
        return out


def _place(chunk: dict[str, Any]) -> int:
    place = chunk.get("content_index")
    return place if type(place) is int else 0


def _text_of(part: ir.Part) -> str:
    return part.text or "" if isinstance(part, ir.ToolUse | ir.Text | ir.Refusal | ir.Thinking) else ""


def _field(part: ir.Part) -> Any:
    return "arguments" if isinstance(part, ir.ToolUse) else "text"


class CodexWriter(BlockWriter):
    """Templates of the events; every block is an item of its own."""

    def __init__(self, source: str) -> None:
        super().__init__(source, NAME)
        self.sequence = 0
        self.has_begun = False
        self.answer_id: str | None = None
        """Said in the first event and kept, although the source may say another one later."""
        self.items: list[Json] = []
        self.texts: dict[Key, list[str]] = {}
        self.reason: dict[str, Any] = {}

    def _event(self, kind: str, **members: Any) -> Json:
        event = {"type": f"response.{kind}", "sequence_number": self.sequence, **members}
        self.sequence += 1
        return event

    def prefix(self) -> list[Json]:
        if self.has_begun:
            return []
        self.has_begun = True
        head = self._head("in_progress")
        return [self._event("created", response=head), self._event("in_progress", response=dict(head))]

    def _head(self, status: str) -> dict[str, Any]:
        began = self.sum.began
        if self.answer_id is None:
            self.answer_id = began.id or "resp_translated"
        return {
            "id": self.answer_id, "object": "response", "created_at": began.created or 0,
            "status": status, "error": None, "incomplete_details": None, "instructions": None, "metadata": {},
            "model": began.model or "unknown", "output": [], "parallel_tool_calls": True, "temperature": None,
            "tool_choice": "auto", "tools": [], "top_p": None,
        }  # fmt: skip

    def begin(self, key: Key, part: ir.Part) -> list[Json] | None:
        place = len(self.items)
        item: dict[str, Any]
        more: dict[str, Any] = {}
        if isinstance(part, ir.Text | ir.Refusal):
            item = {
                "id": f"msg_{place}",
                "type": "message",
                "role": "assistant",
                "status": "in_progress",
                "content": [],
            }
            more = {"kind": "content_part.added", "content_index": 0, "part": _content(part, "")}
        elif isinstance(part, ir.Thinking) and part.redacted is None:
            item = {"id": f"rs_{place}", "type": "reasoning", "summary": []}
            more = {"kind": "reasoning_summary_part.added", "summary_index": 0,
                    "part": {"type": "summary_text", "text": ""}}  # fmt: skip
            if not self.ledger.is_home:
                self.ledger.degrade(part.at, "thinking", "thinking stands in a summary, without this vendor's proof")
        elif isinstance(part, ir.ToolUse):
            item = {"id": f"fc_{place}", "call_id": part.id, "name": part.name}
            if part.kind == "custom":
                item |= {"type": "custom_tool_call", "input": ""}
            else:
                item |= {"type": "function_call", "arguments": "", "status": "in_progress"}
        else:
            return None
        self.items.append(item)
        self.opened[key] = place
        self.texts[key] = []
        out = [self._event("output_item.added", output_index=place, item=dict(item))]
        if more:
            out.append(self._event(more.pop("kind"), item_id=item["id"], output_index=place, **more))
        return out

    def piece(self, event: ir.PartDelta, part: ir.Part) -> list[Json]:
        key = (event.choice, event.index)
        place = self.opened[key]
        item = self.items[place]
        self.texts[key].append(event.text)
        where: dict[str, Any] = {"item_id": item["id"], "output_index": place, "delta": event.text}
        if item["type"] == "message":
            if isinstance(part, ir.Refusal):
                return [self._event("refusal.delta", content_index=0, **where)]
            return [self._event("output_text.delta", content_index=0, logprobs=[], **where)]
        if item["type"] == "function_call":
            return [self._event("function_call_arguments.delta", **where)]
        if item["type"] == "custom_tool_call":
            return [self._event("custom_tool_call_input.delta", **where)]
        return [self._event("reasoning_summary_text.delta", summary_index=0, **where)]

    def proof(self, event: ir.PartDelta, part: ir.Part) -> list[Json] | None:
        # A citation is said at the end, when the text that it stands on is known.
        return [] if event.field == "citation" else None

    def close(self, key: Key, part: ir.Part) -> list[Json]:
        place = self.opened[key]
        item, text = self.items[place], "".join(self.texts[key])
        if isinstance(part, ir.ToolUse):
            text = text_of(part)
        where: dict[str, Any] = {"item_id": item["id"], "output_index": place}
        if item["type"] == "function_call":
            is_cut = isinstance(part, ir.ToolUse) and part.is_cut
            item |= {"arguments": text, "status": "incomplete" if is_cut else "completed"}
            out = [self._event("function_call_arguments.done", arguments=text, name=item["name"], **where)]
        elif item["type"] == "custom_tool_call":
            item["input"] = text
            out = [self._event("custom_tool_call_input.done", input=text, **where)]
        elif item["type"] == "reasoning":
            inner: dict[str, Any] = {"type": "summary_text", "text": text}
            item["summary"] = [inner] if text else []
            out = [self._event("reasoning_summary_text.done", summary_index=0, text=text, **where),
                   self._event("reasoning_summary_part.done", summary_index=0, part=inner, **where)]  # fmt: skip
        else:
            out = self._close_text(item, part, text, where)
        return [*out, self._event("output_item.done", output_index=place, item=dict(item))]

    def _close_text(self, item: Json, part: ir.Part, text: str, where: dict[str, Any]) -> list[Json]:
        inner = _content(part, text)
        if isinstance(part, ir.Text) and part.citations:
            inner["annotations"] = codex.write_citations(part, self.ledger)
        out = [
            self._event("output_text.annotation.added", content_index=0, annotation_index=spot, annotation=one, **where)
            for spot, one in enumerate(inner.get("annotations", ()))
        ]
        item |= {"content": [inner], "status": "completed"}
        if inner["type"] == "refusal":
            out.append(self._event("refusal.done", content_index=0, refusal=text, **where))
        else:
            out.append(self._event("output_text.done", content_index=0, text=text, logprobs=[], **where))
        return [*out, self._event("content_part.done", content_index=0, part=inner, **where)]

    def stop(self, event: ir.Stopped) -> list[Json]:
        candidate = self.stopped(event)
        codex.write_status(candidate, self.reason, self.ledger)
        reason = self.reason.get("incomplete_details", {}).get("reason")
        word = self.reason.get("status", "") + (f":{reason}" if reason else "")
        self.lose_stop(event, codex.ENDINGS.read(word, candidate.message.parts))
        return []

    def end(self) -> list[Json]:
        failure = self.sum.failure
        if failure is not None or self.is_cut:
            words = failure.message if failure is not None else "the stream was cut"
            end = {"status": "failed", "error": {"code": "server_error", "message": words}}
        else:
            end = {"status": "incomplete", **self.reason}
        usage = self.counted(codex.write_usage)
        response = {**self._head("completed"), **end, "output": self.items, "usage": usage}
        status = response["status"]
        kind = status if status in ("completed", "incomplete", "failed") else "incomplete"
        return [self._event(kind, response=response)]

    def fail(self, event: ir.StreamFailed) -> list[Json]:
        if self.ledger.is_home and type(event.raw) is dict and event.raw.get("type") == "error":
            return [event.raw]
        return [{"type": "error", "sequence_number": self._next(), "code": event.code, "message": event.message,
                 "param": None}]  # fmt: skip

    def _next(self) -> int:
        self.sequence += 1
        return self.sequence - 1


def _content(part: ir.Part, text: str) -> dict[str, Any]:
    if isinstance(part, ir.Refusal):
        return {"type": "refusal", "refusal": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
