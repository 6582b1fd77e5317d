"""Provides classes for all dialects that read chunks into events, collect events into an answer, and write chunks.

Each stream has its own object; a vendor's file reads its chunks and gives the templates of the chunks to write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects import ir
from backplane.dialects.common import NUMBER, LossLedger, arguments_text, json_text, kind_of, parse_json, read_arguments
from backplane.dialects.limits import refused, sayable

Key = tuple[int, int]
"""Choice and index of a block."""


class Incoming:
    """A block of a stream, until its last piece."""

    __slots__ = ("choice", "citations", "index", "part", "signature", "texts", "whole")

    def __init__(self, part: ir.Part, index: int, choice: int) -> None:
        self.part, self.index, self.choice = part, index, choice
        self.texts: list[str] = []
        self.signature = part.signature or ""
        self.citations: list[ir.Citation] = []
        self.whole: ir.Part | None = None

    def is_repeating(self) -> bool:
        """Return True if the arguments of a call become valid JSON only when repeated pieces are removed."""
        head = self.part.text or "" if isinstance(self.part, ir.ToolUse) else ""
        once = _unrepeated(self.texts)
        if len(once) == len(self.texts) or parse_json(head + "".join(self.texts)) is not None:
            return False
        return parse_json(head + "".join(once)) is not None

    def finish(self) -> ir.Part:
        """Return the block made of the pieces so far."""
        if self.whole is not None:
            return self.whole
        text, part = "".join(self.texts), self.part
        changes: dict[str, Any] = {}
        if self.signature:
            changes["signature"] = self.signature
        if isinstance(part, ir.ToolUse):
            if text or part.text is not None:
                full = (part.text or "") + text
                if part.kind != "custom" and self.is_repeating():
                    full = (part.text or "") + "".join(_unrepeated(self.texts))
                changes |= {"text": full, "input": full if part.kind == "custom" else read_arguments(full)}
        elif isinstance(part, ir.Text):
            changes |= {"text": part.text + text, "citations": (*part.citations, *self.citations)}
        elif isinstance(part, ir.Thinking | ir.Refusal):
            changes["text"] = part.text + text
        return msgspec.structs.replace(part, **changes) if changes else part


def _unrepeated(texts: list[str]) -> list[str]:
    """Return the pieces without those that are equal to the piece before them."""
    return [text for place, text in enumerate(texts) if not place or text != texts[place - 1]]


class Accumulator:
    """Collects a stream's events into an answer.

    Args:
        dialect: name of the stream's dialect, for the answer and its `ext`.
    """

    def __init__(self, dialect: str) -> None:
        self.dialect = dialect
        self.began = ir.Began()
        self.blocks: dict[Key, Incoming] = {}
        self.usage: ir.TokenCounts | None = None
        self.stops: dict[int, ir.Stopped] = {}
        self.notes: dict[tuple[int | None, bool], dict[str, Any]] = {}
        self.whole: ir.Answer | None = None
        self.failure: ir.StreamFailed | None = None
        self.has_ended = False

    def add(self, event: ir.StreamEvent) -> None:
        """Add the next event."""
        if type(event) is ir.PartDelta:
            self._delta(event)
        elif isinstance(event, ir.PartStarted):
            self.blocks[event.choice, event.index] = Incoming(event.part, event.index, event.choice)
        elif isinstance(event, ir.PartStopped):
            block = self.blocks.get((event.choice, event.index))
            if event.part is not None and block is not None:
                block.whole = event.part
        else:
            self._other(event)

    def add_all(self, events: Iterable[ir.StreamEvent]) -> None:
        """Add the next events."""
        for event in events:
            self.add(event)

    def _delta(self, event: ir.PartDelta) -> None:
        block = self.blocks.get((event.choice, event.index))
        if block is None:
            return
        if event.field == "signature":
            block.signature += event.text
        elif event.field == "citation":
            block.citations.append(event.value)
        else:
            block.texts.append(event.text)

    def _other(self, event: ir.StreamEvent) -> None:
        if isinstance(event, ir.Began):
            self._begin(event)
        elif isinstance(event, ir.UsageSeen):
            self.usage = event.usage
        elif isinstance(event, ir.Stopped):
            self.stops[event.choice] = event
        elif isinstance(event, ir.Noted):
            notes = self.notes.setdefault((event.choice, event.at_message), {})
            notes[event.key] = (
                join(notes[event.key], event.value) if event.joins and event.key in notes else event.value
            )
        elif isinstance(event, ir.StreamEnded):
            self.whole, self.has_ended = event.answer or self.whole, True
        elif isinstance(event, ir.StreamFailed):
            self.failure = event

    def _begin(self, event: ir.Began) -> None:
        found = ((name, getattr(event, name)) for name in ("id", "model", "created"))
        changes = {name: value for name, value in found if value not in (None, "")}
        if event.ext:
            changes["ext"] = event.ext
        self.began = msgspec.structs.replace(self.began, **changes)

    def part(self, choice: int, index: int) -> ir.Part | None:
        """Return a block made of its pieces so far; None if no block has this index."""
        block = self.blocks.get((choice, index))
        return None if block is None else block.finish()

    def repeated_calls(self) -> list[str]:
        """Return the ids of calls whose pieces were sent twice; the answer has them once."""
        return [
            block.part.id
            for block in self.blocks.values()
            if isinstance(block.part, ir.ToolUse) and block.part.kind == "function" and block.is_repeating()
        ]

    def answer(self) -> ir.Answer:
        """Return the answer so far; if the vendor sent the whole answer at the end, return that."""
        if self.whole is not None:
            return self.whole
        choices = sorted({choice for choice, _ in self.blocks} | set(self.stops)) or [0]
        error = self.failure.message if self.failure is not None else None
        return ir.Answer(
            dialect=self.dialect,
            id=self.began.id,
            model=self.began.model,
            created=self.began.created,
            candidates=tuple(self.candidate(choice, place) for place, choice in enumerate(choices)),
            usage=self.usage,
            error=error,
            ext=self._ext(None, False, self.began.ext),
        )

    def candidate(self, choice: int, place: int = 0) -> ir.Candidate:
        """Return the answer of one choice so far; `place` is its index among the candidates."""
        keys = sorted(key for key in self.blocks if key[0] == choice)
        parts = tuple(self.blocks[key].finish() for key in keys)
        message = ir.Message(
            role="assistant", parts=parts, native_role=None, at=f"/candidate/{place}", ext=self._ext(choice, True, {})
        )
        stopped = self.stops.get(choice)
        ext = self._ext(choice, False, stopped.ext if stopped is not None else {})
        if stopped is None:
            return ir.Candidate(message=message, ext=ext)
        return ir.Candidate(
            message=message, stop=stopped.stop, stop_raw=stopped.raw, stop_sequence=stopped.sequence,
            stop_at=stopped.at, ext=ext,
        )  # fmt: skip

    def _ext(
        self, choice: int | None, at_message: bool, begun: Mapping[str, dict[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        entries = {**begun.get(self.dialect, {}), **self.notes.get((choice, at_message), {})}
        return {self.dialect: entries} if entries else {}


def join(before: Json, after: Json) -> Json:
    """Continue a value: append texts and lists, join objects by member, replace the rest unless `after` is None."""
    if isinstance(before, str) and isinstance(after, str):
        return before + after
    if isinstance(before, list) and isinstance(after, list):
        return before + after
    if isinstance(before, dict) and isinstance(after, dict):
        return {**before, **{key: join(before[key], value) if key in before else value for key, value in after.items()}}
    return before if after is None else after


def begun(answer_id: Json, model: Json, created: Json = None, at: str = "", ext: ir.Ext | None = None) -> ir.Began:
    """Return the head of a stream; a member of a wrong type counts as missing."""
    return ir.Began(
        id=answer_id if type(answer_id) is str else None, model=model if type(model) is str else None,
        created=created if type(created) in NUMBER else None, at=at, ext=ext or {},
    )  # fmt: skip


def failure(error: Json, raw: Json, code: str) -> ir.StreamFailed:
    """Return the failure that a chunk reports.

    Args:
        raw: the chunk.
        code: name of the error's member with the vendor's code of the failure.
    """
    if type(error) is not dict:
        return ir.StreamFailed(str(error), None, raw)
    word = error.get(code)
    return ir.StreamFailed(str(error.get("message", "unknown error")), str(word) if word else None, raw)


NO_REASON: Final = "the stream says [DONE] and no reason for its end"

FAULTS_MAX: Final = 100
"""Maximum faults of one stream that are reported; further ones are not."""


class BlockReader:
    """Reads the chunks of one stream; a dialect gives `handlers` or `read`, which begin, continue and end blocks.

    Args:
        dialect: the `Dialect` of the chunks.
    """

    handlers: dict[Any, Callable[[Json], list[ir.StreamEvent]]]
    """Kind of a chunk → method that reads it."""
    tag = "type"
    """Member of a chunk that has its kind."""
    mends = False
    """True to remove text that a gateway sent twice; the vendor itself never repeats by mistake."""

    def __init__(self, dialect: Any) -> None:
        self.dialect = dialect
        self.began = False
        self.ended = False
        self.ledger = LossLedger(dialect.NAME, "")
        self.losses = self.ledger.losses
        self.open: dict[Any, Incoming] = {}
        """The vendor's key → open block, in the order in which the blocks began."""
        self.counts: dict[int, int] = {}
        """Choice → number of blocks that have begun."""
        self.calls: set[int] = set()
        """Choices that contain a call."""
        self.stopped: set[int] = set()

    def read(self, chunk: Json) -> list[ir.StreamEvent]:
        """Return the events of one chunk, from the handler of its kind."""
        handler = self.handlers.get(kind_of(chunk, self.tag))
        return self.other(chunk) if handler is None else handler(chunk)

    def other(self, chunk: Json) -> list[ir.StreamEvent]:
        """Keep a chunk without a handler, perhaps of a later version, unchanged."""
        return [ir.Kept(chunk, type(chunk) is not dict)]

    def worked_around(self, at: str, reason: str) -> None:
        """Note a gateway's fault that the reader corrected, at most `FAULTS_MAX` times; the caller adds the target."""
        if len(self.losses) < FAULTS_MAX:
            self.ledger.degrade(at, "fallback", reason)

    def finish(self, *, done: bool = False) -> list[ir.StreamEvent]:
        """End all open blocks and the stream, also if its last event is missing.

        Args:
            done: True if the stream ended with `[DONE]`, so that a choice without a stop reason is complete.
        """
        if self.ended:
            return []
        self.ended = True
        stops = [stop for choice in sorted(self.counts) for stop in self._whole(choice)] if done else []
        return [*self.end_all(), *stops, ir.StreamEnded()]

    def _whole(self, choice: int) -> list[ir.StreamEvent]:
        """Return the event that ends a choice without a stop reason; nothing if it has one, or a call that is cut."""
        parts = [block.finish() for block in self.open.values() if block.choice == choice]
        if choice in self.stopped or any(isinstance(part, ir.ToolUse) and part.is_cut for part in parts):
            return []
        self.ledger.synthesise("/stop", "stop", NO_REASON)
        return [ir.Stopped(stop="tool_use" if choice in self.calls else "end", choice=choice)]

    def begin(self, key: Any, part: ir.Part, choice: int = 0) -> list[ir.StreamEvent]:
        """Begin a block; `key` is the vendor's key, by which `more` and `end` find it."""
        index = self.counts.get(choice, 0)
        self.counts[choice] = index + 1
        self.open[key] = Incoming(part, index, choice)
        if isinstance(part, ir.ToolUse):
            self.calls.add(choice)
        return [ir.PartStarted(index, part, choice)]

    def more(self, key: Any, text: str, field: Any = "text", value: Any = None) -> ir.StreamEvent:
        """Continue an open block.

        Args:
            key: the vendor's key of the block.
            text: the next piece, added to the field.
            field: field of the block that grows, see `ir.PartDelta`.
            value: the citation, if `field` is `citation`.
        """
        block = self.open[key]
        block.texts.append(text)
        return ir.PartDelta(block.index, text, field, block.choice, value)

    def count(self, usage: Json, at: str) -> list[ir.StreamEvent]:
        """Return the event for the vendor's token counters; nothing if `usage` is no object."""
        if type(usage) is not dict:
            return []
        return [ir.UsageSeen(self.dialect.usage.read(usage, at, self.dialect.NAME))]

    def end(self, key: Any, part: ir.Part | None = None) -> list[ir.StreamEvent]:
        """End a block if it is open; `part` is the whole block if the vendor sends it again at the end."""
        block = self.open.pop(key, None)
        return [] if block is None else [ir.PartStopped(block.index, part, block.choice)]

    def end_all(self, choice: int | None = None) -> list[ir.StreamEvent]:
        """End the open blocks of a choice; if `choice` is None, of all choices."""
        keys = [key for key, block in self.open.items() if choice in (None, block.choice)]
        return [event for key in keys for event in self.end(key)]

    def stop(self, raw: Json, at: str, sequence: str | None = None, choice: int = 0) -> list[ir.StreamEvent]:
        """End a choice with the vendor's stop reason `raw`; a second reason is ignored."""
        if type(raw) is not str or not raw or choice in self.stopped:
            return []
        self.stopped.add(choice)
        stop: ir.Stop = self.dialect.endings.read(raw, calls=choice in self.calls) or "other"
        return [*self.end_all(choice), ir.Stopped(stop=stop, raw=raw, sequence=sequence, choice=choice, at=at)]


class BlockWriter:
    """Writes one stream: begins, continues and ends blocks, and handles late blocks, cut streams and counters.

    A dialect gives the templates of its chunks: `head`, `begin`, `piece`, `close`, `whole`, `noted` and `end`.

    Args:
        dialect: the `Dialect` to write.
        source: name of the dialect from which the events were read.
    """

    has_choices = False
    """True if one stream of the target can contain several answers."""
    is_serial = False
    """True if only one block may be open; the next one waits until it has ended."""
    has_refusals = True
    """True if the target has blocks for refusals."""
    cites_at_end = False
    """True if the target sends the citations of a block at its end."""
    takes_objects = False
    """True if arguments must be an object; the free text of a call then becomes its member `input`."""

    def __init__(self, dialect: Any, source: str) -> None:
        self.dialect = dialect
        self.ledger = LossLedger(source, dialect.NAME, is_answer=True)
        self.sum = Accumulator(source)
        self.opened: dict[Key, Any] = {}
        """Open blocks → the value by which the dialect names them in its chunks."""
        self.sent: set[Key] = set()
        """Blocks with at least one written piece."""
        self.words: dict[int, str | None] = {}
        """Choice → its stop reason in the target's spelling; None if it has none to write."""
        self.is_complete = False
        self._noted: set[str] = set()
        self._waiting: dict[Key, bool] = {}
        """Blocks that began while another one was open, and wait for its end → whether they have ended, too."""
        self._current: Key | None = None
        self._handlers: Final[dict[type[Any], Callable[[Any], list[Json]]]] = {
            ir.Began: lambda event: [], ir.PartStarted: self.on_started, ir.PartDelta: self._piece,
            ir.PartStopped: self.on_stopped, ir.Stopped: self.on_stop, ir.UsageSeen: lambda event: [],
            ir.Noted: self.on_noted,
            ir.StreamEnded: self.on_ended, ir.StreamFailed: self.on_failed, ir.Kept: self.on_kept,
        }  # fmt: skip

    # Templates of a dialect

    def head(self) -> list[Json]:
        """Return the chunks before the first block."""
        return []

    def begin(self, key: Key, part: ir.Part) -> list[Json] | None:
        """Return the chunks that begin a block; None if the target has it only as a whole, without pieces."""
        return None

    def piece(self, key: Key, text: str, part: ir.Part) -> list[Json]:
        """Write a piece of an open block's text, thinking, refusal or arguments."""
        return []

    def close(self, key: Key, part: ir.Part) -> list[Json]:
        """Return the chunks that end an open block."""
        return []

    def whole(self, key: Key, part: ir.Part) -> list[Json] | None:
        """Write a whole block that was never begun; None if the target has no such block."""
        return None

    def noted(self, event: ir.Noted) -> list[Json] | None:
        """Write a member beside the content; None if the target has no such member."""
        return None

    def stop(self, event: ir.Stopped) -> list[Json]:
        """Write the stop reason of a choice (from `words`) if the vendor sends it before the stream's end."""
        return []

    def end(self) -> list[Json]:
        """Write the chunks after the last block; a cut stream has no stop reason."""
        return []

    def fail(self, event: ir.StreamFailed) -> list[Json]:
        """Write a failure as the vendor's error chunk."""
        error = {**self.dialect.error, "message": event.message}
        if "code" in error and error["code"] is None:
            error["code"] = event.code
        return [{**self.dialect.error_head, "error": error}]

    # The machine

    def write(self, event: ir.StreamEvent) -> list[Json]:
        """Write an event; return its chunks, often one, sometimes none."""
        self.sum.add(event)
        return self._handlers[type(event)](event)

    def prefix(self) -> list[Json]:
        return self.head() if self.once("head") else []

    def fail_cut(self) -> list[Json]:
        """Return the chunks of a failure if the stream was cut, else none."""
        return self.fail(ir.StreamFailed("the stream was cut", "stream_cut")) if self.is_cut else []

    def lose_cut(self) -> None:
        """Report a loss if the stream was cut."""
        if self.is_cut:
            self.ledger.synthesise("", "cut", "the stream was over before it said how; the target's end is a failure")

    def once(self, key: str) -> bool:
        """Return True for the first call with this key, so that a loss is not reported again for every chunk."""
        if key in self._noted:
            return False
        self._noted.add(key)
        return True

    def on_started(self, event: ir.PartStarted) -> list[Json]:
        if self._lose_choice(event.choice) or self._lose_late():
            return []
        key = (event.choice, event.index)
        if self.is_serial and self._current is not None:
            self._waiting[key] = False
            return []
        return [*self.prefix(), *self._open(key, event.part)]

    def _open(self, key: Key, part: ir.Part) -> list[Json]:
        out = self._close(key) if key in self.opened else []  # the block began again before it ended
        made = None if _redacted(part) else self.begin(key, part)
        if made is None:
            return out
        self._current = key
        out += made
        if isinstance(part, ir.Refusal) and not self.has_refusals:
            self.ledger.degrade(part.at, "part", "a refusal is said as text here")
        if self._wraps(part):
            self.ledger.degrade(part.at, "tool", "free text is streamed as arguments")
            out += self.piece(key, '{"input":"', part)
        if isinstance(part, ir.Text | ir.Refusal | ir.Thinking | ir.ToolUse) and part.text:
            out += self._piece(ir.PartDelta(key[1], part.text, _field(part), key[0]))
        return out

    def _wraps(self, part: ir.Part) -> bool:
        return self.takes_objects and isinstance(part, ir.ToolUse) and part.kind == "custom"

    def _piece(self, event: ir.PartDelta) -> list[Json]:
        key = (event.choice, event.index)
        block = self.sum.blocks.get(key)
        if block is None or key not in self.opened:
            return []
        if event.field == "text" or event.field == "arguments":
            self.sent.add(key)
            is_wrapped = event.field == "arguments" and self._wraps(block.part)
            text = json_text(event.text)[1:-1] if is_wrapped else event.text
            return self.piece(key, text, block.part)
        if not (self.cites_at_end and event.field == "citation") and self.once(f"{event.field} {key}"):
            at = event.value.at if event.field == "citation" else block.part.at
            self.ledger.drop(at, event.field, f"the target's stream has no {event.field} of {self.ledger.source}")
        return []

    def on_stopped(self, event: ir.PartStopped) -> list[Json]:
        key = (event.choice, event.index)
        if event.choice and not self.has_choices:
            return []
        if self.is_serial and self._current not in (None, key):
            self._waiting[key] = True
            return []
        if key not in self.opened:
            return self._whole(key)
        return [*self._close(key), *self._drain()]

    def _whole(self, key: Key) -> list[Json]:
        part = self.sum.part(*key)
        if part is None or (self.is_complete and self._lose_late()):
            return []
        is_cut = isinstance(part, ir.ToolUse) and part.is_cut
        made = self.whole(key, part if is_cut else sayable(part, self.dialect.limits, self.ledger))
        if made is None and not (
            isinstance(part, ir.Text | ir.Refusal | ir.Thinking) and not part.text and not _redacted(part)
        ):
            self.ledger.lose_part(part)
        return [*self.prefix(), *made] if made else []

    def _close(self, key: Key) -> list[Json]:
        block = self.sum.blocks[key]
        part = block.finish()
        if type(part) is not type(block.part):  # a faulty stream: the block ends as another kind than it began
            part = block.part
        out: list[Json] = []
        if key not in self.sent and (text := text_of(part)):
            out += self._piece(ir.PartDelta(key[1], text, _field(part), key[0]))
        out += [*(self.piece(key, '"}', part) if self._wraps(part) else []), *self.close(key, part)]
        self.opened.pop(key, None)
        self._current = None
        return out

    def _drain(self) -> list[Json]:
        """Write the blocks that waited for the open block, one after the other; the last one may still be open."""
        out: list[Json] = []
        while self._waiting and self._current is None:
            key = next(iter(self._waiting))
            is_ended, block = self._waiting.pop(key), self.sum.blocks[key]
            out += self._open(key, block.finish())
            for citation in block.citations:
                out += self._piece(ir.PartDelta(key[1], "", "citation", key[0], citation))
            if block.signature:
                out += self._piece(ir.PartDelta(key[1], block.signature, "signature", key[0]))
            if is_ended:
                out += self._close(key) if key in self.opened else self._whole(key)
        return out

    def on_stop(self, event: ir.Stopped) -> list[Json]:
        if self._lose_choice(event.choice):
            return []
        self.words[event.choice] = self.stop_word(self.sum.candidate(event.choice))
        return self.stop(event)

    def stop_word(self, candidate: ir.Candidate) -> str | None:
        """Return the stop reason of a choice in the target's spelling; None if it has none to write."""
        candidate = refused(candidate, candidate.message.parts, self.dialect.limits, self.ledger)
        word: str | None = self.dialect.endings.write(candidate, self.ledger)
        return word

    def on_ended(self, event: ir.StreamEnded) -> list[Json]:
        if self.is_complete:
            return []
        out = self.prefix()
        for key in sorted(self.opened):
            if key in self.opened:
                out += self._close(key)
        out += self._drain()
        self.is_complete = True
        self.lose_cut()
        return [*out, *self.end()]

    @property
    def is_cut(self) -> bool:
        """True if no choice has a stop reason and the stream reported no failure."""
        return (
            not self.sum.stops
            and self.sum.failure is None
            and (self.sum.whole is None or all(one.stop is None for one in self.sum.whole.candidates))
        )

    def on_failed(self, event: ir.StreamFailed) -> list[Json]:
        return [*self.prefix(), *self.fail(event)]

    def on_noted(self, event: ir.Noted) -> list[Json]:
        if (made := self.noted(event)) is not None:
            return made
        if self.once(event.key) and event.value not in (None, [], {}):
            self.ledger.drop(f"/{event.key}", "extension", f"only {self.ledger.source} knows it", event.value)
        return []

    def on_kept(self, event: ir.Kept) -> list[Json]:
        kind = kind_of(event.raw) or "without a type"
        if not event.ignorable and self.once(f"kept {kind}"):
            self.ledger.drop("", "extension", f"chunks that only {self.ledger.source} knows: {kind}", event.raw)
        return []

    def _lose_choice(self, choice: int) -> bool:
        """Return True if the target cannot have this choice; report the loss once."""
        if choice == 0 or self.has_choices:
            return False
        if self.once(f"choice {choice}"):
            self.ledger.drop(f"/choices/{choice}", "candidates", "the target has one answer")
        return True

    def _lose_late(self) -> bool:
        """Return whether the stream has ended, so that no block can begin any more; report the loss once."""
        if self.sum.has_ended and self.once("late"):
            self.ledger.drop("", "order", "it came after the end of the stream")
        return self.sum.has_ended

    def counted(self) -> dict[str, Any] | None:
        """Return the stream's token counters as the vendor writes them; None if there were none."""
        usage = self.sum.usage
        written: dict[str, Any] | None = None if usage is None else self.dialect.usage.write(usage, self.ledger)
        return written


def _redacted(part: ir.Part) -> bool:
    return isinstance(part, ir.Thinking) and part.redacted is not None


def _field(part: ir.Part) -> Any:
    return "arguments" if isinstance(part, ir.ToolUse) else "text"


def text_of(part: ir.Part) -> str:
    """Return the text of a block as it is streamed; the arguments of a call as JSON."""
    if isinstance(part, ir.ToolUse):
        return arguments_text(part)
    return part.text if isinstance(part, ir.Text | ir.Refusal | ir.Thinking) else ""


def whole_events(answer: ir.Answer) -> list[ir.StreamEvent]:
    """Return the events of a stream with this answer."""
    if answer.error is not None and not answer.candidates:
        return [ir.StreamFailed(answer.error), ir.StreamEnded()]
    out: list[ir.StreamEvent] = [ir.Began(id=answer.id, model=answer.model, created=answer.created)]
    for number, candidate in enumerate(answer.candidates):
        for index, part in enumerate(candidate.message.parts):
            out += [ir.PartStarted(index, part, number), ir.PartStopped(index, part, number)]
    if answer.usage is not None:
        out.append(ir.UsageSeen(answer.usage))
    for number, candidate in enumerate(answer.candidates):
        if candidate.stop is not None:
            out.append(ir.Stopped(
                stop=candidate.stop, raw=candidate.stop_raw, sequence=candidate.stop_sequence, choice=number,
                at=candidate.stop_at,
            ))  # fmt: skip
    return [*out, ir.StreamEnded(answer)]
