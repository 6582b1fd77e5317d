"""Streams of the Chat Completions family, read.

The family says deltas of one message; blocks begin when a member first appears and end when another does.
"""

from __future__ import annotations

from typing import Any, Final

from backplane.contract.canonical import Json
from backplane.dialects._chat import Flavour
from backplane.dialects._chat_answer import read_answer, read_stop, read_usage
from backplane.dialects._parts import MADE_ID, json_text, kind_of, parse_json
from backplane.ir import (
    Answer,
    Began,
    Ended,
    Kept,
    Media,
    Noted,
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
    UsageSeen,
)

HEAD: Final = frozenset({"id", "model", "created", "object", "choices", "usage", "error"})

NOISE: Final = frozenset({"obfuscation"})
"""Padding against guessing lengths; says nothing."""


class _Choice:
    """What is open in one choice."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.next_index = 0
        self.open: tuple[str, int] | None = None
        """Member and block that text goes to."""
        self.calls: dict[int, list[Any]] = {}
        """Native place of a call → block, texts, whether it is open, id."""
        self.grown: dict[int, list[Any]] = {}
        """Block → its call, where it was not yet looked whether this is whole; to look at all would be quadratic."""
        self.last_call = 0
        self.has_calls = False
        self.has_stopped = False
        self.audio: dict[str, Any] = {}


class ChatReader:
    """Reads the chunks of one stream."""

    def __init__(self, flavour: Flavour) -> None:
        self.flavour = flavour
        self.fields = {"content", "refusal", *flavour.thinking_fields}
        self.choices: dict[int, _Choice] = {}
        self.began = False
        self.ended = False
        self.notes: dict[str, Any] = {}
        self.made = 0

    def read(self, chunk: Json) -> list[StreamEvent]:
        """Read one chunk; anything that is no chunk is kept."""
        if type(chunk) is not dict:
            return [Kept(chunk)]
        out: list[StreamEvent] = []
        if chunk.get("error") and not chunk.get("choices"):
            return [_failure(chunk["error"])]
        if chunk.get("object") == "chat.completion":
            return self._whole(chunk)
        if not self.began:
            self._begin(chunk, out)
        for key in sorted(chunk.keys() - HEAD):
            if key not in NOISE and (key not in self.notes or self.notes[key] != chunk[key]):
                self.notes[key] = chunk[key]
                out.append(Noted(key, chunk[key]))
        choices = chunk.get("choices")
        for place, choice in enumerate(choices if type(choices) is list else ()):
            if type(choice) is dict:
                self._choice(choice, place, out)
        usage = chunk.get("usage")
        if type(usage) is dict:
            out.append(UsageSeen(read_usage(usage, "/usage", self.flavour)))
        if chunk.get("error"):
            out.append(_failure(chunk["error"]))
        return out

    def finish(self) -> list[StreamEvent]:
        """Close what is open; the stream has ended, with or without saying so."""
        if self.ended:
            return []
        self.ended = True
        out: list[StreamEvent] = []
        for choice in self.choices.values():
            self._close(choice, out)
        out.append(Ended())
        return out

    def _begin(self, chunk: dict[str, Any], out: list[StreamEvent]) -> None:
        answer_id, model, created = chunk.get("id"), chunk.get("model"), chunk.get("created")
        if not (answer_id or model or chunk.get("choices")):
            return
        self.began = True
        out.append(
            Began(
                id=answer_id if type(answer_id) is str else None,
                model=model if type(model) is str else None,
                created=created if type(created) is int or type(created) is float else None,
            )
        )

    def _whole(self, chunk: dict[str, Any]) -> list[StreamEvent]:
        """A gateway that answers at once although a stream was asked for."""
        answer = read_answer(chunk, self.flavour).value
        self.ended = True
        return whole_events(answer)

    def _choice(self, choice: dict[str, Any], place: int, out: list[StreamEvent]) -> None:
        number = choice.get("index")
        number = number if type(number) is int else place
        state = self.choices.get(number)
        if state is None:
            state = self.choices[number] = _Choice(number)
        found = choice.get("delta") or choice.get("message")
        delta: dict[str, Any] = found if type(found) is dict else {}
        for key, value in delta.items():
            if key in self.fields and type(value) is str:
                if value:
                    self._text(state, key, value, out)
            elif key == "tool_calls" and type(value) is list:
                for spot, call in enumerate(value):
                    if type(call) is dict:
                        self._call(state, call, spot, out)
            elif key == "content" and type(value) is list:
                self._listed(state, value, out)
            elif key not in ("role", "content") and value is not None:
                self._member(state, key, value, out)
        if len(choice) > 2:
            self._beside(state, choice, out)

    def _text(self, state: _Choice, key: str, value: str, out: list[StreamEvent]) -> None:
        opened = state.open
        if opened is None or opened[0] != key:
            self._close(state, out)
            index = state.next_index
            state.next_index += 1
            state.open = opened = (key, index)
            at = f"/choices/{state.number}/delta/{key}"
            part: Text | Refusal | Thinking
            if key == "content":
                part = Text(text="", at=at)
            elif key == "refusal":
                part = Refusal(text="", at=at)
            else:
                part = Thinking(text="", field=key, at=at)
            out.append(PartStarted(index, part, state.number))
        out.append(PartDelta(opened[1], value, "text", state.number))

    def _listed(self, state: _Choice, parts: list[Any], out: list[StreamEvent]) -> None:
        """Content as a list of parts, which some gateways stream: texts, and thoughts as lists of texts."""
        for part in parts:
            kind = kind_of(part)
            if kind == "text" and type(part.get("text")) is str and part["text"]:
                self._text(state, "content", part["text"], out)
            elif kind == "thinking":
                found = part.get("thinking")
                texts = [found] if type(found) is str else [one.get("text") for one in found or () if type(one) is dict]
                for text in texts:
                    if type(text) is str and text:
                        self._text(state, "thinking", text, out)
            else:
                out.append(Noted("content", [part], state.number, joins=True, at_message=True))

    def _call(self, state: _Choice, call: dict[str, Any], spot: int, out: list[StreamEvent]) -> None:
        place = call.get("index")
        if type(place) is not int:
            place = state.last_call if not call.get("id") and state.calls else len(state.calls)
        kind = "custom" if type(call.get("custom")) is dict else "function"
        found = call.get(kind)
        body: dict[str, Any] = found if type(found) is dict else {}
        known = state.calls.get(place)
        if known is None or _is_other(call.get("id"), known):
            self._start_call(state, place, call, body, kind, out)
            known = state.calls[place]
        state.last_call = place
        text = body.get("arguments" if kind == "function" else "input")
        if type(text) is dict:
            text = json_text(text)
        if type(text) is str and text:
            known[1].append(text)
            state.grown[known[0]] = known
            out.append(PartDelta(known[0], text, "arguments", state.number))

    def _start_call(
        self, state: _Choice, place: int, call: dict[str, Any], body: dict[str, Any], kind: Any, out: list[StreamEvent]
    ) -> None:
        if state.open is not None:
            out.append(PartStopped(state.open[1], None, state.number))
            state.open = None
        for _, other in sorted(state.grown.items()):
            # A call whose arguments are not whole yet may go on in turns with this one.
            if other[2] and parse_json("".join(other[1])) is not None:
                other[2] = False
                out.append(PartStopped(other[0], None, state.number))
        state.grown.clear()
        index = state.next_index
        state.next_index += 1
        state.has_calls = True
        call_id = call.get("id")
        name = body.get("name")
        made = not (type(call_id) is str and call_id)
        if made:
            call_id = f"{MADE_ID}{self.made}"
            self.made += 1
        self._move(state, place)
        state.calls[place] = [index, [], True, call_id]
        part = ToolUse(
            id=str(call_id), id_made=made, name=name if type(name) is str else "", input={}, text="", kind=kind,
            at=f"/choices/{state.number}/delta/tool_calls/{place}",
        )  # fmt: skip
        out.append(PartStarted(index, part, state.number))

    def _move(self, state: _Choice, place: int) -> None:
        """Keep a call whose place another takes; it is whole, so nothing will look for it there."""
        if place in state.calls:
            state.calls[-2 - len(state.calls)] = state.calls.pop(place)

    def _member(self, state: _Choice, key: str, value: Any, out: list[StreamEvent]) -> None:
        if key == "function_call" and type(value) is dict:
            self._call(state, {"index": -1, "function": value}, 0, out)
        elif key == "audio" and type(value) is dict:
            for name, piece in value.items():
                before = state.audio.get(name)
                state.audio[name] = (
                    before + piece if type(before) is str and type(piece) is str and name != "id" else piece
                )
        elif value not in ("", [], {}):
            out.append(Noted(key, value, state.number, joins=True, at_message=True))

    def _beside(self, state: _Choice, choice: dict[str, Any], out: list[StreamEvent]) -> None:
        raw = choice.get("finish_reason")
        usage = choice.get("usage")
        if type(usage) is dict:
            out.append(UsageSeen(read_usage(usage, f"/choices/{state.number}/usage", self.flavour)))
        for key, value in choice.items():
            if key in ("index", "delta", "message", "finish_reason", "usage"):
                continue
            if value is not None:
                out.append(Noted(key, value, state.number, joins=key == "logprobs"))
        if type(raw) is str and raw and not state.has_stopped:
            self._close(state, out)
            state.has_stopped = True
            stop = read_stop(raw, ()) or "other"
            if stop == "end" and state.has_calls:
                stop = "tool_use"
            at = f"/choices/{state.number}/finish_reason"
            out.append(Stopped(stop=stop, raw=raw, choice=state.number, at=at))

    def _close(self, state: _Choice, out: list[StreamEvent]) -> None:
        if state.open is not None:
            out.append(PartStopped(state.open[1], None, state.number))
            state.open = None
        for call in state.calls.values():
            if call[2]:
                call[2] = False
                out.append(PartStopped(call[0], None, state.number))
        if state.audio:
            audio, state.audio = state.audio, {}
            index = state.next_index
            state.next_index += 1
            part = Media(
                kind="audio", file_id=audio.get("id"), data=audio.get("data"), transcript=audio.get("transcript"),
                at=f"/choices/{state.number}/delta/audio",
                ext={self.flavour.name: {"expires_at": audio["expires_at"]}} if "expires_at" in audio else {},
            )  # fmt: skip
            out += [PartStarted(index, part, state.number), PartStopped(index, None, state.number)]


def _is_other(call_id: Any, known: list[Any]) -> bool:
    """Whether an id begins another call at the place of a whole one: Gemini's own gateway counts them all as 0."""
    is_new = type(call_id) is str and call_id and call_id != known[3]
    return bool(is_new) and parse_json("".join(known[1])) is not None


def _failure(error: Json) -> StreamFailed:
    if type(error) is dict:
        code = error.get("code")
        return StreamFailed(str(error.get("message", "unknown error")), str(code) if code is not None else None, error)
    return StreamFailed(str(error), None, error)


def whole_events(answer: Answer) -> list[StreamEvent]:
    """Say a whole answer as the stream it should have been."""
    if answer.error is not None and not answer.candidates:
        return [StreamFailed(answer.error), Ended()]
    out: list[StreamEvent] = [Began(id=answer.id, model=answer.model, created=answer.created)]
    for number, candidate in enumerate(answer.candidates):
        for index, part in enumerate(candidate.message.parts):
            out += [PartStarted(index, part, number), PartStopped(index, part, number)]
    if answer.usage is not None:
        out.append(UsageSeen(answer.usage))
    for number, candidate in enumerate(answer.candidates):
        if candidate.stop is not None:
            out.append(
                Stopped(stop=candidate.stop, raw=candidate.stop_raw, sequence=candidate.stop_sequence, choice=number)
            )
    out.append(Ended(answer))
    return out
