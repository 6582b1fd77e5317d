"""The made-up vendor's one page as types, and the corpus of its dialect: what its SDK and `contracts/` would be."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

Ticket = Annotated[str, Meta(pattern="^[a-z0-9-]{1,24}$")]


class Say(Struct, tag="say", tag_field="kind", forbid_unknown_fields=True):
    words: str


class Picture(Struct, tag="picture", tag_field="kind", forbid_unknown_fields=True):
    mime: str
    base64: str


class Ponder(Struct, tag="ponder", tag_field="kind", forbid_unknown_fields=True):
    words: str
    seal: str | UnsetType = UNSET


class Invoke(Struct, tag="invoke", tag_field="kind", forbid_unknown_fields=True):
    ticket: str
    tool: str
    args: dict[str, Any]


class Outcome(Struct, tag="outcome", tag_field="kind", forbid_unknown_fields=True):
    ticket: str
    words: str
    failed: bool | UnsetType = UNSET


Block = Say | Picture | Ponder | Invoke | Outcome


class Turn(Struct, forbid_unknown_fields=True):
    who: Literal["human", "bot", "tool"]
    say: str | list[Block]


class Gadget(Struct, forbid_unknown_fields=True):
    tool: str
    args_schema: dict[str, Any]
    about: str | UnsetType = UNSET


class Bounds(Struct, forbid_unknown_fields=True):
    words_out: int | UnsetType = UNSET
    heat: Annotated[float, Meta(ge=0, le=1)] | UnsetType = UNSET
    top: float | UnsetType = UNSET
    halts: Annotated[list[str], Meta(max_length=3)] | UnsetType = UNSET


class Only(Struct, forbid_unknown_fields=True):
    tool: str


class Request(Struct, forbid_unknown_fields=True):
    engine: str
    dialogue: list[Turn]
    limits: Bounds
    use_gadget: Literal["free", "never", "must"] | Only
    instructions: str | UnsetType = UNSET
    gadgets: list[Gadget] | UnsetType = UNSET


Halted = Literal["done", "full", "invoke", "halt_word", "refused"]
Meter = msgspec.defstruct(
    "Meter",
    [("in", int), ("out", int), ("from_cache", int | UnsetType, UNSET), ("pondered", int | UnsetType, UNSET)],
    forbid_unknown_fields=True,
)


class Said(Struct, forbid_unknown_fields=True):
    who: Literal["bot"]
    say: list[Block]


class Response(Struct, forbid_unknown_fields=True):
    ticket: str
    engine: str
    turn: Said
    halted: Halted
    meter: Meter  # type: ignore[valid-type]


class Event(Struct, tag_field="e", forbid_unknown_fields=True):
    pass


class Open(Event, tag="open"):
    ticket: str
    engine: str


class Piece(Event, tag="piece"):
    n: int
    kind: Literal["say", "ponder"]
    words: str


class Called(Event, tag="invoke"):
    n: int
    ticket: str
    tool: str


class Args(Event, tag="args"):
    n: int
    text: str


class Shut(Event, tag="shut"):
    n: int


class End(Event, tag="end"):
    halted: Halted
    meter: Meter  # type: ignore[valid-type]


class Oops(Event, tag="oops"):
    message: str
    code: str | UnsetType = UNSET


TYPES: dict[str, Any] = {
    "request": Request, "response": Response, "chunk": Open | Piece | Called | Args | Shut | End | Oops,
}  # fmt: skip


def invalid(kind: str, document: Any) -> str | None:
    """Return why the page refuses a document, None when it takes it."""
    try:
        made = msgspec.json.decode(json.dumps(document), type=TYPES[kind])
    except msgspec.ValidationError as error:
        return str(error)
    if isinstance(made, Request):
        tickets = [b.ticket for t in made.dialogue if type(t.say) is list for b in t.say if hasattr(b, "ticket")]
        try:
            msgspec.convert(tickets, list[Ticket])
        except msgspec.ValidationError as error:
            return str(error)
    return None


def facts(events: list[Any]) -> dict[str, Any]:
    """Add a stream up as the page says: text, thinking, calls, counters, reason."""
    blocks: dict[int, list[Any]] = {}
    usage = stop = None
    for event in events:
        kind, n = event["e"], event.get("n")
        if kind == "piece":
            assert blocks.setdefault(n, [event["kind"], ""])[0] == event["kind"], "a block of two kinds"
            blocks[n][1] += event["words"]
        elif kind == "invoke":
            assert n not in blocks, "a number twice"
            blocks[n] = ["invoke", "", event["ticket"], event["tool"]]
        elif kind == "args":
            blocks[n][1] += event["text"]
        elif kind == "end":
            meter, stop = event["meter"], event["halted"]
            cached = meter.get("from_cache") or 0
            usage = (meter["in"] + cached, meter["out"], cached, 0)
    calls = [(block[2], block[3], _clean(block[1])) for _, block in sorted(blocks.items()) if block[0] == "invoke"]
    said = {kind: "".join(block[1] for _, block in sorted(blocks.items()) if block[0] == kind)
            for kind in ("say", "ponder")}  # fmt: skip
    return {"text": said["say"], "thinking": said["ponder"], "refusal": "", "calls": calls, "usage": usage,
            "stop": stop}  # fmt: skip


def _clean(text: str) -> Any:
    try:
        return json.loads(text) if text else {}
    except ValueError:
        return text


# The corpus -----------------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
GADGETS = [
    {"tool": "weather", "about": "tells the weather", "args_schema": SCHEMA},
    {"tool": "clock", "args_schema": {"type": "object", "properties": {}}},
]
CALL = {"kind": "invoke", "ticket": "call-1", "tool": "weather", "args": {"place": "Ulm", "days": 2.5}}
DONE = {"kind": "outcome", "ticket": "call-1", "words": "rain, 7 degrees"}


def _request(*dialogue: Any, **more: Any) -> dict[str, Any]:
    return {"engine": "lorem-1", "dialogue": list(dialogue), "limits": {}, "use_gadget": "free", **more}


def _human(say: Any) -> dict[str, Any]:
    return {"who": "human", "say": say}


def _bot(say: Any) -> dict[str, Any]:
    return {"who": "bot", "say": say}


def _tool(*say: Any) -> dict[str, Any]:
    return {"who": "tool", "say": list(say)}


REQUESTS: dict[str, Any] = {
    "one text": _request(_human("Hello.")),
    "a list of one": _request(_human([{"kind": "say", "words": "Hello there."}])),
    "two blocks": _request(_human([{"kind": "say", "words": "First."}, {"kind": "say", "words": "Second."}])),
    "instructions and limits": _request(
        _human("Count to ten."), instructions="Be brief.",
        limits={"words_out": 300, "heat": 0.25, "top": 0.9, "halts": ["five", "six", "seven"]},
    ),
    "three turns": _request(_human("My name is Ada."), _bot("Good day, Ada."), _human("What is my name?")),
    "a picture": _request(_human([
        {"kind": "say", "words": "What is this?"}, {"kind": "picture", "mime": "image/png", "base64": "iVBORw0KGgo="},
    ])),
    "a call and its outcome": _request(_human("Weather in Ulm?"), _bot([CALL]), _tool(DONE), gadgets=GADGETS),
    "a text before the call": _request(
        _human("Weather in Ulm, please?"), _bot([{"kind": "say", "words": "I look."}, CALL]), _tool(DONE),
        _bot("Rain."), _human("Thanks."), gadgets=GADGETS,
    ),
    "two calls": _request(
        _human("Ulm and the hour?"), _bot([CALL, {"kind": "invoke", "ticket": "call-2", "tool": "clock", "args": {}}]),
        _tool(DONE, {"kind": "outcome", "ticket": "call-2", "words": "noon"}), gadgets=GADGETS,
    ),
    "a failed outcome": _request(
        _human("Weather?"), _bot([CALL]), _tool({**DONE, "words": "no such place", "failed": True}), gadgets=GADGETS
    ),
    "not failed, in words": _request(_human("Weather now?"), _bot([CALL]), _tool({**DONE, "failed": False}),
                                     gadgets=GADGETS),
    "thinking with a seal": _request(
        _human("Think."), _bot([{"kind": "ponder", "words": "Hm, let me see.", "seal": "c2VhbA=="},
                                {"kind": "say", "words": "Thought."}]), _human("More.")
    ),
    "thinking without one": _request(
        _human("Think again."), _bot([{"kind": "ponder", "words": "Well."}, {"kind": "say", "words": "So."}]),
        _human("On."),
    ),
    "must call": _request(_human("Look."), gadgets=GADGETS, use_gadget="must"),
    "must not call": _request(_human("Do not look."), gadgets=GADGETS, use_gadget="never"),
    "one tool forced": _request(_human("The clock."), gadgets=GADGETS, use_gadget={"tool": "clock"}),
    "an unknown block": _request(_human([{"kind": "dance", "steps": 3}, {"kind": "say", "words": "See?"}])),
    "unknown members": _request(
        {**_human([{"kind": "say", "words": "Hello.", "mood": "glad"}]), "weight": 2}, colour="green",
        limits={"words_out": 5, "patience": 9},
    ),
    "an outcome beside words": _request(
        _human("Weather today?"), _bot([CALL]), _human([DONE, {"kind": "say", "words": "And now?"}]), gadgets=GADGETS
    ),
    "a line that is not ASCII": _request(_human("Grüße aus Ulm 🌧 — “so”.")),
}  # fmt: skip


def _answer(*say: Any, halted: str = "done", **meter: int) -> dict[str, Any]:
    return {
        "ticket": "answer-7", "engine": "lorem-1", "turn": {"who": "bot", "say": list(say)}, "halted": halted,
        "meter": {"in": 12, "out": 34, **meter},
    }  # fmt: skip


RESPONSES: dict[str, Any] = {
    "words": _answer({"kind": "say", "words": "Good day."}),
    "counted apart": _answer({"kind": "say", "words": "Cheap."}, from_cache=1000, pondered=20),
    "thinking and words": _answer({"kind": "ponder", "words": "Hm, hm.", "seal": "c2VhbA=="},
                                  {"kind": "say", "words": "Yes."}),
    "a call": _answer({"kind": "say", "words": "I look."}, CALL, halted="invoke"),
    "two calls": _answer(CALL, {**CALL, "ticket": "call-2", "args": {}}, halted="invoke"),
    "full": _answer({"kind": "say", "words": "And then"}, halted="full"),
    "a halt word": _answer({"kind": "say", "words": "One, two,"}, halted="halt_word"),
    "refused": _answer({"kind": "say", "words": "I will not."}, halted="refused"),
    "nothing": _answer(),
    "unknown members": {**_answer({"kind": "say", "words": "Hi."}), "region": "north"},
    "an unknown reason": _answer({"kind": "say", "words": "Off."}, halted="tired"),
}  # fmt: skip

OPEN = {"e": "open", "ticket": "answer-8", "engine": "lorem-1"}


def _piece(n: int, words: str, kind: str = "say") -> dict[str, Any]:
    return {"e": "piece", "n": n, "kind": kind, "words": words}


def _called(n: int, ticket: str, tool: str, *texts: str) -> list[dict[str, Any]]:
    return [{"e": "invoke", "n": n, "ticket": ticket, "tool": tool}, *({"e": "args", "n": n, "text": t} for t in texts)]


def _shut(n: int) -> dict[str, Any]:
    return {"e": "shut", "n": n}


def _end(halted: str = "done", **meter: int) -> dict[str, Any]:
    return {"e": "end", "halted": halted, "meter": {"in": 5, "out": 6, **meter}}


_STREAMS: dict[str, list[Any]] = {
    "words": [OPEN, _piece(0, "Good "), _piece(0, "day."), _shut(0), _end()],
    "counted apart": [OPEN, _piece(0, "Cheap."), _shut(0), _end(from_cache=100, pondered=2)],
    "thinking first": [OPEN, _piece(0, "Hm.", "ponder"), _shut(0), _piece(1, "Yes."), _shut(1), _end()],
    "a call": [OPEN, *_called(0, "c-1", "weather", '{"pla', 'ce": "Ulm"}'), _shut(0), _end("invoke")],
    "a call without arguments": [OPEN, *_called(0, "c-1", "clock"), _shut(0), _end("invoke")],
    "words and two calls": [
        OPEN, _piece(0, "I look."), _shut(0), *_called(1, "c-1", "weather", '{"place":"Ulm"}'), _shut(1),
        *_called(2, "c-2", "clock", "{}"), _shut(2), _end("invoke"),
    ],
    "two calls that interleave": [
        OPEN, *_called(0, "c-1", "weather", '{"place":'), *_called(1, "c-2", "weather", '{"place":"Bonn"'),
        {"e": "args", "n": 0, "text": '"Ulm"}'}, _shut(0), {"e": "args", "n": 1, "text": "}"}, _shut(1), _end("invoke"),
    ],
    "full": [OPEN, _piece(0, "And th"), _shut(0), _end("full")],
    "a halt word": [OPEN, _piece(0, "One,"), _shut(0), _end("halt_word")],
    "refused": [OPEN, _piece(0, "No."), _shut(0), _end("refused")],
    "failed half way": [OPEN, _piece(0, "Good "), {"e": "oops", "message": "a fuse", "code": "fuse"}],
    "only failed": [{"e": "oops", "message": "closed on Sundays"}],
    "a later version": [OPEN, {"e": "yawn"}, _piece(0, "Hello."), _shut(0), _end()],
    "no shut": [OPEN, _piece(0, "Hello."), _end()],
}  # fmt: skip

DOCUMENTS = {"request": list(REQUESTS.items()), "response": list(RESPONSES.items())}
STREAMS = list(_STREAMS.items())
