"""Streams of Responses, written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects._codex_read import NAME
from backplane.dialects._codex_write import write_citations
from backplane.dialects._losses import lose_part
from backplane.dialects._stream import BaseWriter
from backplane.ir import (
    Answer,
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
    Translated,
)


class CodexWriter(BaseWriter):
    """Writes the events of one stream; every block is an item of its own.

    Args:
        write_answer: writes the whole answer that the last event repeats.
    """

    def __init__(self, source: str, write_answer: Callable[[Answer], Translated[Json]]) -> None:
        super().__init__(source, NAME)
        self.write_answer = write_answer
        self.sequence = 0
        self.has_begun = False
        self.answer_id: str | None = None
        """Said in the first event and held to, although the source may say another one later."""
        self.is_complete = False
        self.items: list[Json] = []
        self.places: dict[int, int] = {}
        """Block → item."""
        self.texts: dict[int, list[str]] = {}

    def _event(self, kind: str, **members: Any) -> Json:
        event = {"type": f"response.{kind}", "sequence_number": self.sequence, **members}
        self.sequence += 1
        return event

    def _begin(self) -> list[Json]:
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

    def on_started(self, event: PartStarted) -> list[Json]:
        if self.lose_choice(event.choice) or self.lose_late():
            return []
        out = self._begin()
        if event.index in self.places:
            out += self._finish_item(event.index)  # begun anew before its end
        part, place = event.part, len(self.items)
        item: dict[str, Any]
        more: list[Json] = []
        number = self.sequence
        self.sequence += 1
        if isinstance(part, Text | Refusal):
            item = {
                "id": f"msg_{place}",
                "type": "message",
                "role": "assistant",
                "status": "in_progress",
                "content": [],
            }
            inner = _content(part, "")
            more = [
                self._event("content_part.added", item_id=item["id"], output_index=place, content_index=0, part=inner)
            ]
        elif isinstance(part, Thinking) and part.redacted is None:
            item = {"id": f"rs_{place}", "type": "reasoning", "summary": []}
            if not self.ledger.is_home:
                self.ledger.degrade(part.at, "thinking", "thinking stands in a summary, without this vendor's proof")
            inner = {"type": "summary_text", "text": ""}
            more = [
                self._event(
                    "reasoning_summary_part.added", item_id=item["id"], output_index=place, summary_index=0, part=inner
                )
            ]
        elif isinstance(part, ToolUse):
            item = {"id": f"fc_{place}", "call_id": part.id, "name": part.name}
            if part.kind == "custom":
                item |= {"type": "custom_tool_call", "input": ""}
            else:
                item |= {"type": "function_call", "arguments": "", "status": "in_progress"}
        else:
            self.sequence = number
            return out
        self.items.append(item)
        self.places[event.index] = place
        self.texts[event.index] = []
        added = {"type": "response.output_item.added", "sequence_number": number, "output_index": place}
        out += [{**added, "item": dict(item)}, *more]
        head = self.head(event)
        return out if head is None else out + self.on_delta(head)

    def on_delta(self, event: PartDelta) -> list[Json]:
        if event.choice or event.index not in self.places:
            return []
        place = self.places[event.index]
        item = self.items[place]
        block = self.sum.blocks[0, event.index]
        if event.field == "citation":
            return []  # said at the end, when the text that it stands on is known
        if event.field == "signature":
            if self.once(f"signature {event.index}"):
                self.ledger.drop(block.part.at, "signature", "not said in this stream")
            return []
        self.sent.add((0, event.index))
        self.texts[event.index].append(event.text)
        where: dict[str, Any] = {"item_id": item["id"], "output_index": place, "delta": event.text}
        if item["type"] == "function_call":
            return [self._event("function_call_arguments.delta", **where)]
        if item["type"] == "custom_tool_call":
            return [self._event("custom_tool_call_input.delta", **where)]
        if item["type"] == "reasoning":
            return [self._event("reasoning_summary_text.delta", summary_index=0, **where)]
        if isinstance(block.part, Refusal):
            return [self._event("refusal.delta", content_index=0, **where)]
        return [self._event("output_text.delta", content_index=0, logprobs=[], **where)]

    def on_stopped(self, event: PartStopped) -> list[Json]:
        if event.choice:
            return []
        if event.index not in self.places:
            if (part := self.sum.part(0, event.index)) is not None:
                self._lose(part)
            return []
        unsent = self.unsent(event)
        return ([] if unsent is None else self.on_delta(unsent)) + self._finish_item(event.index)

    def _lose(self, part: Any) -> None:
        if isinstance(part, Thinking):
            self.ledger.drop(part.at, "thinking", f"only {self.ledger.source} can read it", part.redacted)
        else:
            lose_part(part, self.ledger)

    def _finish_item(self, index: int) -> list[Json]:
        place = self.places[index]
        item = self.items[place]
        part = self.sum.part(0, index)
        text = "".join(self.texts[index])
        where: dict[str, Any] = {"item_id": item["id"], "output_index": place}
        out: list[Json] = []
        if item["type"] == "function_call":
            is_cut = isinstance(part, ToolUse) and part.is_cut
            item |= {"arguments": text, "status": "incomplete" if is_cut else "completed"}
            out.append(self._event("function_call_arguments.done", arguments=text, name=item["name"], **where))
        elif item["type"] == "custom_tool_call":
            item["input"] = text
            out.append(self._event("custom_tool_call_input.done", input=text, **where))
        elif item["type"] == "reasoning":
            inner: dict[str, Any] = {"type": "summary_text", "text": text}
            item["summary"] = [inner] if text else []
            out.append(self._event("reasoning_summary_text.done", summary_index=0, text=text, **where))
            out.append(self._event("reasoning_summary_part.done", summary_index=0, part=inner, **where))
        else:
            inner = _content(self.sum.blocks[0, index].part, text)
            if isinstance(part, Text) and part.citations:
                inner["annotations"] = write_citations(part, self.ledger)
            for spot, one in enumerate(inner.get("annotations", ())):
                more = {"content_index": 0, "annotation_index": spot, "annotation": one}
                out.append(self._event("output_text.annotation.added", **more, **where))
            item |= {"content": [inner], "status": "completed"}
            if inner["type"] == "refusal":
                out.append(self._event("refusal.done", content_index=0, refusal=text, **where))
            else:
                out.append(self._event("output_text.done", content_index=0, text=text, logprobs=[], **where))
            out.append(self._event("content_part.done", content_index=0, part=inner, **where))
        out.append(self._event("output_item.done", output_index=place, item=dict(item)))
        self.places.pop(index)
        return out

    def on_stop(self, event: Stopped) -> list[Json]:
        self.lose_choice(event.choice)
        return []

    def on_ended(self, event: Ended) -> list[Json]:
        if self.is_complete:
            return []
        self.is_complete = True
        out = self._begin()
        for index in sorted(self.places):
            out += self._finish_item(index)
        answer = self.sum.answer()
        scratch = msgspec.structs.replace(answer, candidates=answer.candidates[:1])
        if not scratch.candidates or (self.sum.failure is not None and scratch.candidates[0].stop is None):
            response = {
                **self._head("failed"),
                "error": {"code": "server_error", "message": answer.error or "no answer"},
            }
        else:
            response = {**self._head("completed"), **self.write_answer(scratch).value}
        response |= {"output": self.items, "id": self.answer_id}
        self._count(response)
        status = response.get("status", "completed")
        kind = status if status in ("completed", "incomplete", "failed") else "completed"
        return [*out, self._event(kind, response=response)]

    def _count(self, response: dict[str, Any]) -> None:
        stopped = self.sum.stops.get(0)
        if stopped is not None and stopped.stop in ("refusal", "pause", "stop_sequence", "error", "other"):
            self.ledger.degrade(stopped.at, "stop", f"{stopped.raw or stopped.stop} became {response.get('status')}")
        if self.sum.usage is None and not self.ledger.is_home:
            response["usage"] = None

    def on_failed(self, event: StreamFailed) -> list[Json]:
        if self.ledger.is_home and type(event.raw) is dict and event.raw.get("type") == "error":
            return [event.raw]
        out = self._begin()
        error = {"type": "error", "sequence_number": self._next(), "code": event.code, "message": event.message}
        return [*out, {**error, "param": None}]

    def _next(self) -> int:
        self.sequence += 1
        return self.sequence - 1


def _content(part: Any, text: str) -> dict[str, Any]:
    if isinstance(part, Refusal):
        return {"type": "refusal", "refusal": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
