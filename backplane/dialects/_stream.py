"""Streams in the neutral form: pieces are put together to an answer, and writers get what they share.

Events of the ir go in, an `Answer` comes out. One object a stream; a vendor's chunks are read and written by its
dialect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects._parts import Kin, Ledger, json_text, parse_json, read_arguments
from backplane.ir import (
    Answer,
    Began,
    Candidate,
    Citation,
    Ended,
    Kept,
    Loss,
    Message,
    Noted,
    Part,
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
    Usage,
    UsageSeen,
)

Key = tuple[int, int]
"""Choice and index of a block."""


class _Block:
    """One block while it comes in."""

    __slots__ = ("citations", "part", "signature", "texts", "whole")

    def __init__(self, part: Part) -> None:
        self.part = part
        self.texts: list[str] = []
        self.signature = part.signature or ""
        self.citations: list[Citation] = []
        self.whole: Part | None = None

    def is_repeating(self) -> bool:
        """Whether the arguments of a call make sense only when a piece that came twice is read once."""
        head = self.part.text or "" if isinstance(self.part, ToolUse) else ""
        once = _unrepeated(self.texts)
        if len(once) == len(self.texts) or parse_json(head + "".join(self.texts)) is not None:
            return False
        return parse_json(head + "".join(once)) is not None

    def finish(self) -> Part:
        """Return the block as far as it is known."""
        if self.whole is not None:
            return self.whole
        text, part = "".join(self.texts), self.part
        changes: dict[str, Any] = {}
        if self.signature:
            changes["signature"] = self.signature
        if isinstance(part, ToolUse):
            if text or part.text is not None:
                full = (part.text or "") + text
                if part.kind != "custom" and self.is_repeating():
                    full = (part.text or "") + "".join(_unrepeated(self.texts))
                changes |= {"text": full, "input": full if part.kind == "custom" else read_arguments(full)}
        elif isinstance(part, Text):
            changes |= {"text": part.text + text, "citations": (*part.citations, *self.citations)}
        elif isinstance(part, Thinking | Refusal):
            changes["text"] = part.text + text
        return msgspec.structs.replace(part, **changes) if changes else part


def _unrepeated(texts: list[str]) -> list[str]:
    """Leave out every piece that only repeats the one before it."""
    return [text for place, text in enumerate(texts) if not place or text != texts[place - 1]]


class Accumulator:
    """Puts a stream's events together.

    Args:
        dialect: whose stream it is; names the answer and its `ext`.
    """

    def __init__(self, dialect: str) -> None:
        self.dialect = dialect
        self.began = Began()
        self.blocks: dict[Key, _Block] = {}
        self.usage: Usage | None = None
        self.stops: dict[int, Stopped] = {}
        self.notes: dict[tuple[int | None, bool], dict[str, Any]] = {}
        self.whole: Answer | None = None
        self.failure: StreamFailed | None = None
        self.has_ended = False

    def add(self, event: StreamEvent) -> None:
        """Take the next event."""
        if type(event) is PartDelta:
            self._delta(event)
        elif isinstance(event, PartStarted):
            self.blocks[event.choice, event.index] = _Block(event.part)
        elif isinstance(event, PartStopped):
            block = self.blocks.get((event.choice, event.index))
            if event.part is not None and block is not None:
                block.whole = event.part
        else:
            self._other(event)

    def _delta(self, event: PartDelta) -> None:
        block = self.blocks.get((event.choice, event.index))
        if block is None:
            return
        if event.field == "signature":
            block.signature += event.text
        elif event.field == "citation":
            block.citations.append(event.value)
        else:
            block.texts.append(event.text)

    def _other(self, event: StreamEvent) -> None:
        if isinstance(event, Began):
            self._begin(event)
        elif isinstance(event, UsageSeen):
            self.usage = event.usage
        elif isinstance(event, Stopped):
            self.stops[event.choice] = event
        elif isinstance(event, Noted):
            notes = self.notes.setdefault((event.choice, event.at_message), {})
            notes[event.key] = (
                join(notes[event.key], event.value) if event.joins and event.key in notes else event.value
            )
        elif isinstance(event, Ended):
            self.whole, self.has_ended = event.answer or self.whole, True
        elif isinstance(event, StreamFailed):
            self.failure = event

    def _begin(self, event: Began) -> None:
        changes = {name: value for name in ("id", "model", "created") if (value := getattr(event, name)) is not None}
        if event.ext:
            changes["ext"] = event.ext
        self.began = msgspec.structs.replace(self.began, **changes)

    def part(self, choice: int, index: int) -> Part | None:
        """Return a block as far as it has come, None when there is none of this index."""
        block = self.blocks.get((choice, index))
        return None if block is None else block.finish()

    def repeated_calls(self) -> list[str]:
        """Return the ids of calls whose pieces came twice and were read once."""
        return [
            block.part.id
            for block in self.blocks.values()
            if isinstance(block.part, ToolUse) and block.part.kind == "function" and block.is_repeating()
        ]

    def answer(self) -> Answer:
        """Return the answer so far; the vendor's own whole where it was sent."""
        if self.whole is not None:
            return self.whole
        choices = sorted({choice for choice, _ in self.blocks} | set(self.stops)) or [0]
        error = self.failure.message if self.failure is not None else None
        return Answer(
            dialect=self.dialect,
            id=self.began.id,
            model=self.began.model,
            created=self.began.created,
            candidates=tuple(self._candidate(choice, place) for place, choice in enumerate(choices)),
            usage=self.usage,
            error=error,
            ext=self._ext(None, False, self.began.ext),
        )

    def _candidate(self, choice: int, place: int) -> Candidate:
        keys = sorted(key for key in self.blocks if key[0] == choice)
        parts = tuple(self.blocks[key].finish() for key in keys)
        message = Message(
            role="assistant", parts=parts, native_role=None, at=f"/candidate/{place}", ext=self._ext(choice, True, {})
        )
        stopped = self.stops.get(choice)
        ext = self._ext(choice, False, stopped.ext if stopped is not None else {})
        if stopped is None:
            return Candidate(message=message, ext=ext)
        return Candidate(
            message=message, stop=stopped.stop, stop_raw=stopped.raw, stop_sequence=stopped.sequence,
            stop_at=stopped.at, ext=ext,
        )  # fmt: skip

    def _ext(
        self, choice: int | None, at_message: bool, begun: Mapping[str, dict[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        entries = {**begun.get(self.dialect, {}), **self.notes.get((choice, at_message), {})}
        return {self.dialect: entries} if entries else {}


def join(before: Json, after: Json) -> Json:
    """Continue a value: texts and lists are appended, objects member by member, anything else is replaced."""
    if isinstance(before, str) and isinstance(after, str):
        return before + after
    if isinstance(before, list) and isinstance(after, list):
        return before + after
    if isinstance(before, dict) and isinstance(after, dict):
        return {**before, **{key: join(before[key], value) if key in before else value for key, value in after.items()}}
    return before if after is None else after


Handler = Callable[[Any], list[Json]]


class BaseWriter:
    """What the writers of all dialects share: losses, the sum of what came, one method an event.

    Args:
        source: the dialect that the events were read from.
        target: the dialect that is written.
    """

    def __init__(self, source: str, target: str, kin: Kin | None = None) -> None:
        self.ledger = Ledger(source, target, kin)
        self.sum = Accumulator(source)
        self.sent: set[Key] = set()
        """Blocks of which some content was written."""
        self._noted: set[str] = set()
        self._handlers: Final[dict[type[Any], Handler]] = {
            Began: self.on_began,
            PartStarted: self.on_started,
            PartDelta: self.on_delta,
            PartStopped: self.on_stopped,
            Stopped: self.on_stop,
            UsageSeen: self.on_usage,
            Noted: self.on_noted,
            Ended: self.on_ended,
            StreamFailed: self.on_failed,
            Kept: self.on_kept,
        }

    @property
    def losses(self) -> tuple[Loss, ...]:
        return tuple(self.ledger.losses)

    def write(self, event: StreamEvent) -> list[Json]:
        """Return the chunks that say this event; often one, sometimes none."""
        self.sum.add(event)
        return self._handlers[type(event)](event)

    def once(self, key: str) -> bool:
        """Whether this is said for the first time; a stream says the same loss in every chunk."""
        if key in self._noted:
            return False
        self._noted.add(key)
        return True

    def on_began(self, event: Began) -> list[Json]:
        return []

    def on_started(self, event: PartStarted) -> list[Json]:
        return []

    def on_delta(self, event: PartDelta) -> list[Json]:
        return []

    def on_stopped(self, event: PartStopped) -> list[Json]:
        return []

    def on_stop(self, event: Stopped) -> list[Json]:
        return []

    def on_usage(self, event: UsageSeen) -> list[Json]:
        return []

    def on_ended(self, event: Ended) -> list[Json]:
        return []

    def on_failed(self, event: StreamFailed) -> list[Json]:
        return []

    def on_noted(self, event: Noted) -> list[Json]:
        if self.once(event.key) and event.value not in (None, [], {}):
            self.ledger.drop(f"/{event.key}", "extension", f"only {self.ledger.source} knows it", event.value)
        return []

    def on_kept(self, event: Kept) -> list[Json]:
        if not event.ignorable:
            self.ledger.drop("", "extension", "a chunk that only its own dialect knows", event.raw)
        return []

    def lose_choice(self, choice: int) -> bool:
        """Whether this choice cannot be said; reported once."""
        if choice == 0:
            return False
        if self.once(f"choice {choice}"):
            self.ledger.drop(f"/choices/{choice}", "candidates", "the target has one answer")
        return True

    def lose_late(self) -> bool:
        """Whether the stream has ended, so that no block can begin any more; reported once."""
        if self.sum.has_ended and self.once("late"):
            self.ledger.drop("", "order", "it came after the end of the stream")
        return self.sum.has_ended

    def head(self, event: PartStarted) -> PartDelta | None:
        """Return what a block says already when it begins, as its first piece; None when it says nothing."""
        part = event.part
        if not isinstance(part, Text | Refusal | Thinking | ToolUse) or not part.text:
            return None
        return PartDelta(event.index, part.text, "arguments" if isinstance(part, ToolUse) else "text", event.choice)

    def unsent(self, event: PartStopped) -> PartDelta | None:
        """Return what a block said only at its end, as one piece; None when it was written or says nothing."""
        part = self.sum.part(event.choice, event.index)
        if isinstance(part, ToolUse):
            text = self.missing_arguments(event)
            return PartDelta(event.index, text, "arguments", event.choice) if text else None
        if not isinstance(part, Text | Refusal | Thinking) or (event.choice, event.index) in self.sent or not part.text:
            return None
        return PartDelta(event.index, part.text, "text", event.choice)

    def stopped(self, event: Stopped) -> Candidate:
        """Return what a stop says as an answer that has its blocks, to write the reason from."""
        parts = tuple(block.part for (choice, _), block in self.sum.blocks.items() if choice == event.choice)
        return Candidate(
            message=Message(role="assistant", parts=parts), stop=event.stop, stop_raw=event.raw,
            stop_sequence=event.sequence, stop_at=event.at,
        )  # fmt: skip

    def counted(self, usage: Usage, write: Callable[[Usage, Ledger], Json]) -> Any:
        """Write counters, which a stream may say again and again; what they lose is said once."""
        scratch = Ledger(self.ledger.source, self.ledger.target, self.ledger.kin)
        written = write(usage, scratch)
        if self.once("usage"):
            self.ledger.losses += scratch.losses
        return written

    def missing_arguments(self, event: PartStopped) -> str | None:
        """Return the arguments of a call that were not written yet, None when they were."""
        part = self.sum.part(event.choice, event.index)
        if not isinstance(part, ToolUse) or (event.choice, event.index) in self.sent:
            return None
        if part.text is not None:
            return part.text
        return part.input if isinstance(part.input, str) else json_text(part.input)
