"""Streams of the Chat Completions family: deltas of one message; a block ends when another member appears."""

from __future__ import annotations

from typing import Any, Final

from backplane import ir
from backplane.contract.canonical import Json
from backplane.dialects.chat import ENDINGS, LIMITS, OWN_STOPS, PLACES, Chat
from backplane.dialects.codec import MADE_ID, Calls, Ledger, json_text, parse_json
from backplane.dialects.streams import BlockReader, BlockWriter, Key, begun, failure, whole_events
from backplane.dialects.vendor import Dialect, no_name

HEAD: Final = frozenset({"id", "model", "created", "object", "choices", "usage", "error", "obfuscation"})
"""Members of a chunk that are read, and padding against guessing lengths."""


class _Call:
    """One call while it comes in; it is not begun before its name is whole."""

    __slots__ = ("at", "id", "index", "is_begun", "is_open", "kind", "made", "name", "texts")

    def __init__(self, index: int, call_id: str, made: bool, kind: Any, at: str) -> None:
        self.index, self.id, self.made, self.kind, self.at = index, call_id, made, kind, at
        self.name = ""
        self.texts: list[str] = []
        self.is_begun = False
        self.is_open = True

    def begin(self, choice: int) -> list[ir.StreamEvent]:
        """Begin the block, once."""
        if self.is_begun:
            return []
        self.is_begun = True
        part = ir.ToolUse(
            id=self.id, id_made=self.made, name=self.name, input={}, text="", kind=self.kind, at=self.at
        )  # fmt: skip
        return [ir.PartStarted(self.index, part, choice)]

    def is_whole(self) -> bool:
        return parse_json("".join(self.texts)) is not None


class _Choice:
    """What is open in one choice."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.next_index = 0
        self.open: tuple[str, int] | None = None
        """Member and block that text goes to."""
        self.calls: dict[int, _Call] = {}
        """Native place of a call → the call."""
        self.grown: dict[int, _Call] = {}
        """Calls of which it was not yet looked whether they are whole; to look at all would be quadratic."""
        self.last_call = 0
        self.newest: _Call | None = None
        """The call that may not have begun yet."""
        self.has_calls = False
        self.has_stopped = False
        self.audio: dict[str, Any] = {}


class ChatReader(BlockReader):
    """Reads the chunks of one stream."""

    def __init__(self, chat: Chat) -> None:
        super().__init__()
        self.chat = chat
        self.fields = {"content", "refusal", *chat.flavour.thinking_fields}
        self.choices: dict[int, _Choice] = {}
        self.began = False
        self.notes: dict[str, Any] = {}
        self.made = 0

    def read(self, chunk: Json) -> list[ir.StreamEvent]:
        """Read one chunk; anything that is no chunk is kept."""
        if type(chunk) is not dict:
            return [ir.Kept(chunk)]
        out: list[ir.StreamEvent] = []
        if chunk.get("error") and not chunk.get("choices"):
            return [failure(chunk["error"], chunk["error"], "code")]
        if chunk.get("object") == "chat.completion":
            self.ended = True  # a gateway that answers at once although a stream was asked for
            return whole_events(self.chat.read_answer(chunk, Ledger("", ""), Calls()))
        if not self.began:
            self._begin(chunk, out)
        for key in sorted(chunk.keys() - HEAD):
            if key not in self.notes or self.notes[key] != chunk[key]:
                self.notes[key] = chunk[key]
                out.append(ir.Noted(key, chunk[key]))
        choices = chunk.get("choices")
        for place, choice in enumerate(choices if type(choices) is list else ()):
            if type(choice) is dict:
                self._choice(choice, place, out)
        usage = chunk.get("usage")
        if type(usage) is dict:
            out.append(ir.UsageSeen(self.chat.read_usage(usage, "/usage")))
        if chunk.get("error"):
            out.append(failure(chunk["error"], chunk["error"], "code"))
        return out

    def _close_all(self) -> list[ir.StreamEvent]:
        out: list[ir.StreamEvent] = []
        for choice in self.choices.values():
            self._close(choice, out)
        return out

    def _begin(self, chunk: dict[str, Any], out: list[ir.StreamEvent]) -> None:
        answer_id, model, created = chunk.get("id"), chunk.get("model"), chunk.get("created")
        if not (answer_id or model or chunk.get("choices")):
            return
        self.began = True
        out.append(begun(answer_id, model, created))

    def _choice(self, choice: dict[str, Any], place: int, out: list[ir.StreamEvent]) -> None:
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

    def _text(self, state: _Choice, key: str, value: str, out: list[ir.StreamEvent]) -> None:
        opened = state.open
        if opened is None or opened[0] != key:
            self._close(state, out)
            state.open = opened = (key, state.next_index)
            state.next_index += 1
            at = f"/choices/{state.number}/delta/{key}"
            part: ir.Part = ir.Thinking(text="", field=key, at=at)
            if key == "content":
                part = ir.Text(text="", at=at)
            elif key == "refusal":
                part = ir.Refusal(text="", at=at)
            out.append(ir.PartStarted(opened[1], part, state.number))
        out.append(ir.PartDelta(opened[1], value, "text", state.number))

    def _listed(self, state: _Choice, parts: list[Any], out: list[ir.StreamEvent]) -> None:
        """Read a content that is a list of blocks, which some gateways stream."""
        for value in parts:
            part = self.chat.read_part(value, f"/choices/{state.number}/delta/content")
            if isinstance(part, ir.Text | ir.Thinking):
                if part.text:
                    self._text(state, "content" if isinstance(part, ir.Text) else "thinking", part.text, out)
            else:
                out.append(ir.Noted("content", [value], state.number, joins=True, at_message=True))

    def _call(self, state: _Choice, value: dict[str, Any], spot: int, out: list[ir.StreamEvent]) -> None:
        place = value.get("index")
        if type(place) is not int:
            place = state.last_call if not value.get("id") and state.calls else len(state.calls)
        kind = "custom" if type(value.get("custom")) is dict else "function"
        found = value.get(kind)
        body: dict[str, Any] = found if type(found) is dict else {}
        call = state.calls.get(place)
        if call is None or _is_other(value.get("id"), call):
            call = self._start_call(state, place, value.get("id"), kind, out)
        state.last_call = place
        name = body.get("name")
        if type(name) is str and name != call.name and not call.is_begun:
            call.name += name
        text = body.get("arguments" if kind == "function" else "input")
        text = json_text(text) if type(text) is dict else text
        if type(text) is str and text:
            out += call.begin(state.number)
            call.texts.append(text)
            state.grown[call.index] = call
            out.append(ir.PartDelta(call.index, text, "arguments", state.number))

    def _start_call(self, state: _Choice, place: int, call_id: Any, kind: Any, out: list[ir.StreamEvent]) -> _Call:
        if state.open is not None:
            out.append(ir.PartStopped(state.open[1], None, state.number))
            state.open = None
        for _, other in sorted(state.grown.items()):
            # A call whose arguments are not whole yet may go on in turns with this one.
            if other.is_open and other.is_whole():
                other.is_open = False
                out.append(ir.PartStopped(other.index, None, state.number))
        state.grown.clear()
        if state.newest is not None:
            out += state.newest.begin(state.number)
        if place in state.calls:  # whole, so nothing will look for it there
            state.calls[-2 - len(state.calls)] = state.calls.pop(place)
        made = not (type(call_id) is str and call_id)
        if made:
            call_id = f"{MADE_ID}{self.made}"
            self.made += 1
        at = f"/choices/{state.number}/delta/tool_calls/{place}"
        call = state.newest = state.calls[place] = _Call(state.next_index, str(call_id), made, kind, at)
        state.next_index += 1
        state.has_calls = True
        return call

    def _member(self, state: _Choice, key: str, value: Any, out: list[ir.StreamEvent]) -> None:
        if key == "function_call" and type(value) is dict:
            self._call(state, {"index": -1, "function": value}, 0, out)
        elif key == "audio" and type(value) is dict:
            for name, piece in value.items():
                before = state.audio.get(name)
                joins = type(before) is str and type(piece) is str and name != "id"
                state.audio[name] = before + piece if joins else piece
        elif value not in ("", [], {}):
            out.append(ir.Noted(key, value, state.number, joins=True, at_message=True))

    def _beside(self, state: _Choice, choice: dict[str, Any], out: list[ir.StreamEvent]) -> None:
        raw, usage = choice.get("finish_reason"), choice.get("usage")
        if type(usage) is dict:
            out.append(ir.UsageSeen(self.chat.read_usage(usage, f"/choices/{state.number}/usage")))
        for key, value in choice.items():
            if key not in ("index", "delta", "message", "finish_reason", "usage") and value is not None:
                out.append(ir.Noted(key, value, state.number, joins=key == "logprobs"))
        if type(raw) is str and raw and not state.has_stopped:
            self._close(state, out)
            state.has_stopped = True
            stop = ENDINGS.read(raw, calls=state.has_calls) or "other"
            at = f"/choices/{state.number}/finish_reason"
            out.append(ir.Stopped(stop=stop, raw=raw, choice=state.number, at=at))

    def _close(self, state: _Choice, out: list[ir.StreamEvent]) -> None:
        if state.open is not None:
            out.append(ir.PartStopped(state.open[1], None, state.number))
            state.open = None
        for call in state.calls.values():
            if call.is_open:
                out += call.begin(state.number)
                call.is_open = False
                out.append(ir.PartStopped(call.index, None, state.number))
        if state.audio:
            audio, state.audio = state.audio, {}
            index, state.next_index = state.next_index, state.next_index + 1
            part = ir.Media(
                kind="audio", file_id=audio.get("id"), data=audio.get("data"), transcript=audio.get("transcript"),
                at=f"/choices/{state.number}/delta/audio",
                ext={self.chat.name: {"expires_at": audio["expires_at"]}} if "expires_at" in audio else {},
            )  # fmt: skip
            out += [ir.PartStarted(index, part, state.number), ir.PartStopped(index, None, state.number)]


def _is_other(call_id: Any, known: _Call) -> bool:
    """Return whether an id begins another call at the place of a whole one: a gateway counts them all as 0."""
    return type(call_id) is str and call_id != "" and call_id != known.id and known.is_whole()


class ChatWriter(BlockWriter):
    """Templates of the family's chunks."""

    has_choices = True

    def __init__(self, chat: Chat, source: str) -> None:
        super().__init__(source, chat.name, chat.flavour.kin)
        self.chat = chat
        self.counts: dict[int, int] = {}
        self.roles: set[int] = set()

    def _chunk(self, choices: list[Json], **more: Any) -> Json:
        began = self.sum.began
        return {
            "id": began.id or "chatcmpl-translated", "object": "chat.completion.chunk",
            "created": int(began.created or 0), "model": began.model or "unknown", "choices": choices, **more,
        }  # fmt: skip

    def _delta(self, choice: int, delta: dict[str, Any]) -> list[Json]:
        if choice not in self.roles:
            self.roles.add(choice)
            delta = {"role": "assistant", **delta}
        return [self._chunk([{"index": choice, "delta": delta, "finish_reason": None}])]

    def begin(self, key: Key, part: ir.Part) -> list[Json] | None:
        if isinstance(part, ir.Thinking):
            field = part.field if self.ledger.is_home and part.field else self.chat.flavour.thinking_answer
            if part.redacted is not None:
                return None
            if not self.ledger.is_home and self.once("thinking"):
                self.ledger.degrade(part.at, "thinking", f"thinking stands in {field}")
            self.opened[key] = field
        elif isinstance(part, ir.Text | ir.Refusal):
            self.opened[key] = "content" if isinstance(part, ir.Text) else "refusal"
        elif isinstance(part, ir.ToolUse):
            return self._open_call(key, part)
        else:
            return None
        return []

    def _open_call(self, key: Key, part: ir.ToolUse) -> list[Json]:
        place = self.opened[key] = self.counts.get(key[0], 0)
        self.counts[key[0]] = place + 1
        if part.kind == "custom":
            self.ledger.degrade(part.at, "tool", "free text is streamed as arguments")
        call = {"index": place, "type": "function", "function": {"name": part.name, "arguments": ""}}
        if not (part.id_made and self.ledger.is_home):
            call["id"] = part.id
        return self._delta(key[0], {"tool_calls": [call]})

    def piece(self, event: ir.PartDelta, part: ir.Part) -> list[Json]:
        choice, name = event.choice, self.opened[event.choice, event.index]
        if type(name) is str:
            return self._delta(choice, {name: event.text})
        return self._delta(choice, {"tool_calls": [{"index": name, "function": {"arguments": event.text}}]})

    def whole(self, key: Key, part: ir.Part) -> list[Json] | None:
        if not isinstance(part, ir.Media) or part.kind != "audio" or part.file_id is None:
            return None
        body = {"id": part.file_id, "data": part.data, "transcript": part.transcript}
        return self._delta(key[0], {"audio": {name: value for name, value in body.items() if value is not None}})

    def stop(self, event: ir.Stopped) -> list[Json]:
        takes_raw = self.ledger.source in self.ledger.kin and event.raw in OWN_STOPS
        word = self.stop_word(event, ENDINGS, takes_raw=takes_raw)
        head = [] if event.choice in self.roles else self._delta(event.choice, {})
        return [*head, self._chunk([{"index": event.choice, "delta": {}, "finish_reason": word}])]

    def end(self) -> list[Json]:
        usage = self.counted(self.chat.write_usage)
        out = [] if usage is None else [self._chunk([], usage=usage)]
        if self.is_cut:
            out += self.fail(ir.StreamFailed("the stream was cut", "stream_cut"))
        return out

    def noted(self, event: ir.Noted) -> list[Json]:
        if event.choice is None:
            return [self._chunk([], **{event.key: event.value})]
        if event.at_message:
            return self._delta(event.choice, {event.key: event.value})
        head = [] if event.choice in self.roles else self._delta(event.choice, {})
        choice = {"index": event.choice, "delta": {}, event.key: event.value, "finish_reason": None}
        return [*head, self._chunk([choice])]

    def fail(self, event: ir.StreamFailed) -> list[Json]:
        if self.ledger.is_home and event.raw is not None:
            return [{"error": event.raw}]
        return [{"error": {"message": event.message, "type": "upstream_error", "param": None, "code": event.code}}]


def chat_dialect(
    chat: Chat, *, reader: type[ChatReader] = ChatReader, writer: type[ChatWriter] = ChatWriter, **own: Any
) -> Dialect:
    """Make a dialect of the family.

    Args:
        own: members of `Dialect` that this vendor has of its own.
    """
    members = {"event_name": no_name, "limits": LIMITS, "places": PLACES, **own}
    return Dialect(
        NAME=chat.flavour.name, DONE=True, read_request=chat.read_request, write_request=chat.write_request,
        read_answer=chat.read_answer, write_answer=chat.write_answer, read_tool=chat.read_tool,
        write_tool=chat.write_tool, read_stream=lambda: reader(chat), write_stream=lambda source: writer(chat, source),
        kin=chat.flavour.kin, **members,
    )  # fmt: skip
