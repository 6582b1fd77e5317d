"""Streams of Gemini's generateContent: every chunk is a small response.

Arguments of calls may come in pieces that say where in the object they belong.
"""

from __future__ import annotations

import itertools
import re
from typing import Any, Final

import msgspec

from backplane import ir
from backplane.contract.canonical import Json
from backplane.dialects import gemini
from backplane.dialects.codec import Calls, Members, json_text
from backplane.dialects.limits import CUT_CALL
from backplane.dialects.streams import BlockReader, BlockWriter, Key, begun, failure

NAME: Final = gemini.NAME

HEAD: Final = frozenset(
    {"candidates", "usageMetadata", "usage_metadata", "modelVersion", "model_version", "responseId", "response_id"}
)

BESIDE: Final = frozenset({"content", "finishReason", "finish_reason", "index"})

REPEAT_CHARS_MIN: Final = 6
"""A gateway that repeats the whole text so far is seen from a model that says a word twice by at least so much. Below
it a chunk that begins with all before it waits for the next one, which decides."""

WAITING_MAX: Final = 8
"""Most chunks that wait; a text below `REPEAT_CHARS_MIN` that grows with each chunk makes five."""

SENT_BEFORE: Final = "text that was sent before"

SAID_CHARS_MAX: Final = 256
"""Of a text so far this much is compared; no model begins one chunk with so much of the answer's own beginning."""

_STEP: Final = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|\[['\"](.*?)['\"]\]")


class _Seen:
    """The text of one kind so far, and whether its chunks are pieces or the whole text so far."""

    def __init__(self) -> None:
        self.begin = ""
        self.length = 0
        self.is_pieces = False
        self.waiting: list[str] = []
        """Chunks that each begin with all before them, not yet passed on."""

    def add(self, text: str) -> str:
        # Long answers come in thousands of pieces: only their beginning is kept, which tells as much.
        self.begin = self.begin + text if self.length < SAID_CHARS_MAX else self.begin
        self.is_pieces = self.is_pieces or self.length > 0
        self.length += len(text)
        return text

    def replace(self, text: str) -> str:
        added, self.begin, self.length, self.waiting = text[self.length :], text, len(text), []
        return added

    def repeats(self, text: str) -> bool:
        """Whether a chunk surely repeats what was said, a waiting one included."""
        said, length = (self.waiting[-1], len(self.waiting[-1])) if self.waiting else (self.begin, self.length)
        return length >= REPEAT_CHARS_MIN and len(text) >= length and text.startswith(said) and not said.isspace()

    def may_repeat(self, text: str) -> bool:
        said = self.waiting[-1] if self.waiting else self.begin
        return (0 < len(said) < REPEAT_CHARS_MIN and not self.is_pieces and len(self.waiting) < WAITING_MAX
                and text.startswith(said))  # fmt: skip

    def pass_on(self) -> str:
        """Return the waiting chunks as the pieces that they then were."""
        text, self.waiting = "".join(self.waiting), []
        return self.add(text) if text else ""


class _Open:
    """One candidate while it comes in."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.next_index = 0
        self.block: tuple[int, type[ir.Part]] | None = None
        self.seen: dict[type[ir.Part], _Seen] = {}
        self.call: Members | None = None
        """A call whose arguments come in pieces."""
        self.call_part: ir.ToolUse | None = None
        self.args: dict[str, Any] = {}
        self.ids: set[str] = set()
        self.said_calls: set[tuple[str, str, int]] = set()
        """Calls without an id: name, arguments and chunk."""
        self.has_calls = False
        self.has_stopped = False


class GeminiReader(BlockReader):
    """Reads the chunks of one stream."""

    def __init__(self) -> None:
        super().__init__()
        self.candidates: dict[int, _Open] = {}
        self.calls = Calls()
        self.began = False
        self.notes: dict[tuple[int | None, str], Any] = {}
        self.usage: Json = None
        self.chunk = 0

    def read(self, chunk: Json) -> list[ir.StreamEvent]:
        """Read one chunk; anything that is no chunk is kept."""
        if type(chunk) is not dict:
            return [ir.Kept(chunk)]
        self.chunk += 1
        out: list[ir.StreamEvent] = []
        if "error" in chunk and "candidates" not in chunk:
            return [failure(chunk["error"], chunk, "status")]
        if not self.began:
            self._begin(chunk, out)
        found = chunk.get("candidates")
        for place, candidate in enumerate(found if type(found) is list else ()):
            if type(candidate) is dict:
                self._candidate(candidate, place, out)
        usage = chunk.get("usageMetadata", chunk.get("usage_metadata"))
        if type(usage) is dict and usage != self.usage:
            self.usage = usage
            out.append(ir.UsageSeen(gemini.read_usage(usage, "/usageMetadata")))
        for key in sorted(chunk.keys() - HEAD):
            self._note(key, chunk[key], None, out)
        if not found and ("promptFeedback" in chunk or "prompt_feedback" in chunk):
            out.append(ir.Stopped(stop="content_filter", at="/promptFeedback"))
        return out

    def _close_all(self) -> list[ir.StreamEvent]:
        """Close what is open; a call whose closing piece is missing ends here."""
        out: list[ir.StreamEvent] = []
        for state in self.candidates.values():
            self._close(state, out)
        return out

    def go_on(self, text: str) -> str | None:
        """Take more of the open text of a stream with one candidate; None where no text is open."""
        state = next(iter(self.candidates.values()))
        if state.block is None or state.block[1] is not ir.Text or state.call is not None:
            return None
        return self._new_text(state, ir.Text, text, f"/candidates/{state.number}/content/parts/0")

    def _begin(self, chunk: dict[str, Any], out: list[ir.StreamEvent]) -> None:
        self.began = True
        answer_id = chunk.get("responseId", chunk.get("response_id"))
        out.append(begun(answer_id, chunk.get("modelVersion", chunk.get("model_version"))))

    def _note(self, key: str, value: Json, choice: int | None, out: list[ir.StreamEvent]) -> None:
        if self.notes.get((choice, key)) != value:
            self.notes[choice, key] = value
            out.append(ir.Noted(key, value, choice))

    def _candidate(self, candidate: dict[str, Any], place: int, out: list[ir.StreamEvent]) -> None:
        number = candidate.get("index")
        number = number if type(number) is int else place
        state = self.candidates.get(number)
        if state is None:
            state = self.candidates[number] = _Open(number)
        content = candidate.get("content")
        parts = content.get("parts") if type(content) is dict else None
        for spot, part in enumerate(parts if type(parts) is list else ()):
            self._part(state, part, f"/candidates/{number}/content/parts/{spot}", out)
        for key in sorted(candidate.keys() - BESIDE):
            self._note(key, candidate[key], number, out)
        raw = candidate.get("finishReason", candidate.get("finish_reason"))
        if type(raw) is str and not state.has_stopped:
            self._close(state, out)
            state.has_stopped = True
            stop = gemini.ENDINGS.read(raw, calls=state.has_calls) or "other"
            out.append(ir.Stopped(stop=stop, raw=raw, choice=number, at=f"/candidates/{number}/finishReason"))

    def _part(self, state: _Open, part: Json, at: str, out: list[ir.StreamEvent]) -> None:
        if type(part) is dict and self._is_piece(state, part):
            self._piece(state, part, at, out)
            return
        if state.block is not None and state.block[1] is ir.Text and state.call is None and _is_only_text(part):
            text = self._new_text(state, ir.Text, part["text"], at)
            if text:
                out.append(ir.PartDelta(state.block[0], text, "text", state.number))
            return
        read = gemini.read_part(part, at, self.calls)
        if isinstance(read, ir.Text | ir.Thinking):
            self._text(state, read, out)
            return
        self._close(state, out)
        if isinstance(read, ir.ToolUse):
            if self.mends and self._was_said(state, read):
                self._worked_around(at, "a call that was sent before")
                return
            state.ids.add(read.id)
            state.has_calls = True
        index = state.next_index
        state.next_index += 1
        out.append(ir.PartStarted(index, read, state.number))
        if isinstance(read, ir.ToolUse):
            out.append(ir.PartDelta(index, json_text(read.input), "arguments", state.number))
        out.append(ir.PartStopped(index, read, state.number))

    def _was_said(self, state: _Open, call: ir.ToolUse) -> bool:
        """Whether an earlier chunk had the same call; one chunk may hold the same call twice and mean it."""
        if not call.id_made and call.id in state.ids:
            return True
        arguments = json_text(call.input)
        said = any(name == call.name and text == arguments and chunk != self.chunk
                   for name, text, chunk in state.said_calls)  # fmt: skip
        if call.id_made and not said:
            state.said_calls.add((call.name, arguments, self.chunk))
        return call.id_made and said

    def _text(self, state: _Open, read: ir.Text | ir.Thinking, out: list[ir.StreamEvent]) -> None:
        if state.call is not None:
            self._close(state, out)
        kind = type(read)
        text = self._new_text(state, kind, read.text, read.at)
        if not text and read.signature is None and (state.block is not None or not read.ext):
            return
        if state.block is None or state.block[1] is not kind:
            self._close(state, out)
            index = state.next_index
            state.next_index += 1
            state.block = (index, kind)
            out.append(ir.PartStarted(index, msgspec.structs.replace(read, text="", signature=None), state.number))
        index = state.block[0]
        if text:
            out.append(ir.PartDelta(index, text, "text", state.number))
        if read.signature is not None:
            # The signature proves the block up to here; what follows is another one.
            self._end_text(state, out)
            out.append(ir.PartDelta(index, read.signature, "signature", state.number))
            self._close(state, out)

    def _new_text(self, state: _Open, kind: type[ir.Part], text: str, at: str) -> str:
        """Return what a text adds: some gateways send the whole text so far in every chunk."""
        if not self.mends:
            return text
        seen = state.seen.setdefault(kind, _Seen())
        if not text:
            return text
        if seen.repeats(text):
            self._worked_around(at, SENT_BEFORE)
            return seen.replace(text)
        if state.block is not None and state.block[1] is kind and seen.may_repeat(text):
            seen.waiting.append(text)
            return ""
        return seen.pass_on() + seen.add(text)

    def _end_text(self, state: _Open, out: list[ir.StreamEvent]) -> None:
        """Pass on what waited until its block ended: a word that begins anew is rarer than a text so far."""
        if state.block is None or (seen := state.seen.get(state.block[1])) is None or not seen.waiting:
            return
        if any(map(str.isalpha, seen.begin)):
            self._worked_around(f"/candidates/{state.number}/content", SENT_BEFORE)
            text = seen.replace(seen.waiting[-1])
        else:
            text = seen.pass_on()
        if text:
            out.append(ir.PartDelta(state.block[0], text, "text", state.number))

    def _worked_around(self, at: str, what: str) -> None:
        loss = ir.Loss(path=at, dialect=NAME, target="", kind="degraded", code="fallback", reason=what)
        if len(self.losses) < LOSSES_MAX:
            self.losses.append(loss)

    def _is_piece(self, state: _Open, part: dict[str, Any]) -> bool:
        call = part.get("functionCall", part.get("function_call"))
        if type(call) is not dict:
            return False
        if state.call is not None and "name" not in call:
            return True
        return bool(call.keys() & {"partialArgs", "partial_args", "willContinue", "will_continue"})

    def _piece(self, state: _Open, part: dict[str, Any], at: str, out: list[ir.StreamEvent]) -> None:
        call = Members(part.get("functionCall") or part.get("function_call") or {}, f"{at}/functionCall", spell=True)
        if "name" in call.rest and (state.call is not None or state.block is not None):
            self._close(state, out)
        if state.call is None:
            index = state.next_index
            state.next_index += 1
            name = call.take("name", str) or ""
            call_id = call.take("id", str)
            made = not call_id
            signature = part.get("thoughtSignature", part.get("thought_signature"))
            state.call_part = ir.ToolUse(
                id=call_id or self.calls.make(name), id_made=made, name=name, input={}, at=at,
                signature=signature if type(signature) is str else None,
            )  # fmt: skip
            state.call, state.args = call, dict(call.take("args", dict) or {})
            state.has_calls = True
            state.block = (index, ir.ToolUse)
            out.append(ir.PartStarted(index, state.call_part, state.number))
        for piece in call.take("partialArgs", list) or ():
            if type(piece) is dict:
                put_piece(state.args, Members(piece, at, spell=True))
        if not call.take("willContinue", bool):
            self._close(state, out)

    def _close(self, state: _Open, out: list[ir.StreamEvent]) -> None:
        if state.block is None:
            return
        self._end_text(state, out)
        index, _ = state.block
        state.block = None
        if state.call is None or state.call_part is None:
            out.append(ir.PartStopped(index, None, state.number))
            return
        whole = msgspec.structs.replace(state.call_part, input=state.args)
        state.call = state.call_part = None
        out.append(ir.PartDelta(index, json_text(whole.input), "arguments", state.number))
        out.append(ir.PartStopped(index, whole, state.number))


def _is_only_text(part: Json) -> bool:
    return type(part) is dict and len(part) == 1 and type(part.get("text")) is str


LOSSES_MAX: Final = 100
"""Most faults of one stream that are named one by one."""


def put_piece(args: dict[str, Any], piece: Members) -> None:
    """Put one piece of arguments where its path says; texts go on where they ended."""
    path = piece.take("jsonPath", str) or ""
    steps: list[str | int] = [
        int(match[2]) if match[2] is not None else (match[1] if match[1] is not None else match[3])
        for match in _STEP.finditer(path)
    ]
    if not steps:
        return
    value: Json = None
    for name in ("stringValue", "numberValue", "boolValue"):
        found = piece.take(name, str, int, float, bool)
        value = found if found is not None else value
    inner: Any = args
    for step, following in itertools.pairwise(steps):
        inner = _enter(inner, step, [] if isinstance(following, int) else {})
    last = steps[-1]
    before = _get(inner, last)
    _set(inner, last, before + value if isinstance(before, str) and isinstance(value, str) else value)


ITEMS_MAX: Final = 10_000
"""Longest list that a piece may reach into; a wild index would fill the memory."""


def _get(inner: Any, step: str | int) -> Any:
    if isinstance(inner, list) and isinstance(step, int):
        return inner[step] if step < len(inner) else None
    return inner.get(step) if isinstance(inner, dict) else None


def _set(inner: Any, step: str | int, value: Any) -> None:
    if isinstance(inner, list) and isinstance(step, int) and step < ITEMS_MAX:
        inner.extend([None] * (step + 1 - len(inner)))
        inner[step] = value
    elif isinstance(inner, dict):
        inner[str(step)] = value


def _enter(inner: Any, step: str | int, empty: Any) -> Any:
    found = _get(inner, step)
    if not isinstance(found, list | dict):
        _set(inner, step, empty)
        return empty
    return found


class GeminiWriter(BlockWriter):
    """Templates of the chunks; a call is written when it is whole."""

    has_choices = True

    def __init__(self, source: str) -> None:
        super().__init__(source, NAME)
        self.stops: dict[int, str | None] = {}
        self.calls: dict[int, dict[int, list[Json] | None]] = {}
        """Choice → the calls that wait for one that began earlier, and None for those that go on."""

    def _chunk(self, candidates: list[Json]) -> dict[str, Any]:
        began = self.sum.began
        pairs = (("candidates", candidates or None), ("modelVersion", began.model), ("responseId", began.id))
        return {key: value for key, value in pairs if value is not None}

    def _parts(self, choice: int, parts: list[Json]) -> list[Json]:
        return [self._chunk([{"content": {"role": "model", "parts": parts}, "index": choice}])]

    def begin(self, key: Key, part: ir.Part) -> list[Json] | None:
        if isinstance(part, ir.ToolUse):
            self.calls.setdefault(key[0], {})[key[1]] = None
            return None
        if not isinstance(part, ir.Text | ir.Refusal | ir.Thinking) or getattr(part, "redacted", None) is not None:
            return None
        if isinstance(part, ir.Refusal):
            self.ledger.degrade(part.at, "part", "a refusal is said as text here")
        self.opened[key] = {"thought": True} if isinstance(part, ir.Thinking) else {}
        return []

    def piece(self, event: ir.PartDelta, part: ir.Part) -> list[Json]:
        return self._parts(event.choice, [{"text": event.text, **self.opened[event.choice, event.index]}])

    def proof(self, event: ir.PartDelta, part: ir.Part) -> list[Json] | None:
        if event.field == "citation" or not self.ledger.is_home:
            return None
        body = {"text": "", "thoughtSignature": event.text, **self.opened[event.choice, event.index]}
        return self._parts(event.choice, [body])

    def whole(self, key: Key, part: ir.Part) -> list[Json] | None:
        if isinstance(part, ir.Text | ir.Refusal) and not part.text:
            return []
        if isinstance(part, ir.ToolUse) and part.is_cut and not self.ledger.is_home:
            self.ledger.drop(part.at, "arguments", CUT_CALL)
            return self._in_turn(key, [])
        count = len(self.ledger.losses)
        written = gemini.write_part(part, {}, self.ledger)
        made = [] if written is None else self._parts(key[0], [written])
        if written is None and len(self.ledger.losses) == count:
            return None
        return self._in_turn(key, made) if key[1] in self.calls.get(key[0], {}) else made

    def _in_turn(self, key: Key, made: list[Json]) -> list[Json]:
        """Give out calls in the order in which they began: without ids it is all that tells one from another."""
        waiting = self.calls[key[0]]
        waiting[key[1]] = made
        out: list[Json] = []
        for index in sorted(waiting):
            ready = waiting[index]
            if ready is None:
                break
            out += ready
            del waiting[index]
        return out

    def stop(self, event: ir.Stopped) -> list[Json]:
        self.stops[event.choice] = self.stop_word(event, gemini.ENDINGS)
        return []

    def end(self) -> list[Json]:
        rest = [ready for waiting in self.calls.values() for _, ready in sorted(waiting.items()) if ready]
        candidates: list[Json] = []
        for choice, word in self.stops.items():
            candidate: dict[str, Any] = {"content": {"role": "model", "parts": [{"text": ""}]}, "index": choice}
            if word is not None:
                candidate["finishReason"] = word
            if self.ledger.is_home:
                candidate.update(self.sum.notes.get((choice, False), {}))
            candidates.append(candidate)
        chunk = self._chunk(candidates)
        if (usage := self.counted(gemini.write_usage)) is not None:
            chunk["usageMetadata"] = usage
        if self.ledger.is_home:
            chunk.update(self.sum.notes.get((None, False), {}))
        out = [*itertools.chain(*rest), *([chunk] if chunk.keys() & {"candidates", "usageMetadata"} else [])]
        return [*out, *self.fail(ir.StreamFailed("the stream was cut"))] if self.is_cut else out

    def fail(self, event: ir.StreamFailed) -> list[Json]:
        if self.ledger.is_home and event.raw is not None:
            return [event.raw]
        return [{"error": {"code": 502, "message": event.message, "status": "UNAVAILABLE"}}]
