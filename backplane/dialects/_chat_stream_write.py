"""Streams of the Chat Completions family, written."""

from __future__ import annotations

from typing import Any

from backplane.contract.canonical import Json
from backplane.dialects._chat import Flavour
from backplane.dialects._chat_answer import write_stop, write_usage
from backplane.dialects._losses import lose_part
from backplane.dialects._stream import BaseWriter
from backplane.ir import (
    Ended,
    Media,
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
    UsageSeen,
)


class ChatWriter(BaseWriter):
    """Writes the chunks of one stream."""

    def __init__(self, flavour: Flavour, source: str) -> None:
        super().__init__(source, flavour.name, flavour.kin)
        self.flavour = flavour
        self.calls: dict[tuple[int, int], int] = {}
        self.counts: dict[int, int] = {}
        self.roles: set[int] = set()
        self.usage: Json = None
        self.is_complete = False

    def _chunk(self, choices: list[Json], **more: Any) -> Json:
        began = self.sum.began
        return {
            "id": began.id or "chatcmpl-translated",
            "object": "chat.completion.chunk",
            "created": int(began.created or 0),
            "model": began.model or "unknown",
            "choices": choices,
            **more,
        }

    def _delta(self, choice: int, delta: dict[str, Any]) -> list[Json]:
        if choice not in self.roles:
            self.roles.add(choice)
            delta = {"role": "assistant", **delta}
        return [self._chunk([{"index": choice, "delta": delta, "finish_reason": None}])]

    def on_started(self, event: PartStarted) -> list[Json]:
        part, choice = event.part, event.choice
        out: list[Json] = []
        if isinstance(part, ToolUse):
            place = self.counts.get(choice, 0)
            self.counts[choice] = place + 1
            self.calls[choice, event.index] = place
            if part.kind == "custom":
                self.ledger.degrade(part.at, "tool", "free text is streamed as arguments")
            call = {"index": place, "type": "function", "function": {"name": part.name, "arguments": ""}}
            if not (part.id_made and self.ledger.is_home):
                call["id"] = part.id
            out += self._delta(choice, {"tool_calls": [call]})
        head = self.head(event)
        return out if head is None else out + self.on_delta(head)

    def _arguments(self, choice: int, index: int, text: str) -> list[Json]:
        self.sent.add((choice, index))
        call = {"index": self.calls[choice, index], "function": {"arguments": text}}
        return self._delta(choice, {"tool_calls": [call]})

    def on_delta(self, event: PartDelta) -> list[Json]:
        key = (event.choice, event.index)
        block = self.sum.blocks.get(key)
        if block is None:
            return []
        if event.field == "arguments":
            return self._arguments(event.choice, event.index, event.text) if key in self.calls else []
        if event.field != "text":
            self._lose_mark(event)
            return []
        self.sent.add(key)
        part = block.part
        if isinstance(part, Text):
            return self._delta(event.choice, {"content": event.text})
        if isinstance(part, Refusal):
            return self._delta(event.choice, {"refusal": event.text})
        if isinstance(part, Thinking):
            field = part.field if self.ledger.is_home and part.field else self.flavour.thinking_answer
            if not self.ledger.is_home and self.once("thinking"):
                self.ledger.degrade(part.at, "thinking", f"thinking stands in {field}")
            return self._delta(event.choice, {field: event.text})
        return []

    def _lose_mark(self, event: PartDelta) -> None:
        if event.field == "citation":
            self.ledger.drop(event.value.at, "citation", "no citations in this stream")
        elif self.once(f"signature {event.index}"):
            self.ledger.drop("", "signature", f"only {self.ledger.source} can read it")

    def on_stopped(self, event: PartStopped) -> list[Json]:
        if (unsent := self.unsent(event)) is not None:
            return self.on_delta(unsent)
        key = (event.choice, event.index)
        part = None if key in self.calls else self.sum.part(*key)
        if isinstance(part, Media):
            return self._media(part, event.choice)
        if isinstance(part, Thinking) and part.redacted is not None:
            self.ledger.drop(part.at, "thinking", "the target takes no such thinking", part.redacted)
        elif part is not None and not isinstance(part, Text | Refusal | Thinking):
            lose_part(part, self.ledger)
        return []

    def _media(self, part: Media, choice: int) -> list[Json]:
        if part.kind != "audio" or part.file_id is None:
            self.ledger.drop(part.at, "media", f"no {part.kind} in an answer here")
            return []
        body = {"id": part.file_id, "data": part.data, "transcript": part.transcript}
        return self._delta(choice, {"audio": {key: value for key, value in body.items() if value is not None}})

    def on_stop(self, event: Stopped) -> list[Json]:
        word = write_stop(self.stopped(event), self.ledger)
        head = [] if event.choice in self.roles else self._delta(event.choice, {})
        return [*head, self._chunk([{"index": event.choice, "delta": {}, "finish_reason": word}])]

    def on_usage(self, event: UsageSeen) -> list[Json]:
        self.usage = self.counted(event.usage, lambda usage, ledger: write_usage(usage, self.flavour, ledger))
        return []

    def on_ended(self, event: Ended) -> list[Json]:
        if self.is_complete:
            return []
        self.is_complete = True
        return [] if self.usage is None else [self._chunk([], usage=self.usage)]

    def on_noted(self, event: Noted) -> list[Json]:
        if not self.ledger.is_home:
            return super().on_noted(event)
        if event.choice is None:
            return [self._chunk([], **{event.key: event.value})]
        if event.at_message:
            return self._delta(event.choice, {event.key: event.value})
        head = [] if event.choice in self.roles else self._delta(event.choice, {})
        return [
            *head,
            self._chunk([{"index": event.choice, "delta": {}, event.key: event.value, "finish_reason": None}]),
        ]

    def on_failed(self, event: StreamFailed) -> list[Json]:
        if self.ledger.is_home and event.raw is not None:
            return [{"error": event.raw}]
        return [{"error": {"message": event.message, "type": "upstream_error", "param": None, "code": event.code}}]
