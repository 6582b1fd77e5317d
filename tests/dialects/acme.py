"""A made-up vendor's dialect, written from the docs alone: what a newcomer adds for a seventh.

Acme says `turns` of `who` and `say`; an answer is one turn with an `outcome`; a stream is pieces of it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from backplane.contract.canonical import Json
from backplane.contract.capability import NATIVE, Manifest
from backplane.dialects import ir
from backplane.dialects.common import (
    NUMBER,
    Counters,
    LossLedger,
    ext_of,
    members_of,
    pop,
    pop_inner,
    pop_list,
    put_back,
    read_content,
    without_none,
    write_parts,
)
from backplane.dialects.limits import ServerLimits, Spelling
from backplane.dialects.outcome import Endings
from backplane.dialects.streams import BlockReader, BlockWriter, Key
from backplane.dialects.vendor import Dialect, read_error

NAME: Final = "acme"
ROLES: Final[dict[str, ir.Role]] = {"boss": "system", "human": "user", "robot": "assistant", "machine": "tool"}
WHO: Final = {role: who for who, role in ROLES.items()}
EFFORTS: Final = {"lazy": "low", "busy": "medium", "mad": "high"}
STOPS: Final[dict[str, ir.Stop]] = {
    "happy": "end", "full": "max_tokens", "calling": "tool_use", "blocked": "content_filter",
}  # fmt: skip
STOP_WORDS: Final[dict[ir.Stop | None, str]] = {
    "end": "happy", "stop_sequence": "happy", "max_tokens": "full", "tool_use": "calling", "content_filter": "blocked",
    "refusal": "blocked", "error": "blocked", "pause": "full", "cancelled": "full", "other": "full", None: "full",
}  # fmt: skip
ENDINGS: Final = Endings(STOPS, STOP_WORDS)
USAGE: Final = Counters({"heard": "input", "spoken": "output"}, total="")


# Blocks ---------------------------------------------------------------------------------------------------------------


def read_block(value: Json, at: str) -> ir.Part:
    rest = value.copy() if type(value) is dict else {}
    kind = pop(rest, "type")
    if kind == "text" and (text := pop(rest, "text")) is not None:
        return ir.Text(text=text, at=at, ext=ext_of(NAME, rest))
    if kind == "thought" and (text := pop(rest, "words")) is not None:
        return ir.Thinking(text=text, at=at, ext=ext_of(NAME, rest))
    if kind == "call" and [type(rest.get(name)) for name in ("id", "tool", "with")] == [str, str, dict]:
        call_id, name, given = rest.pop("id"), rest.pop("tool"), rest.pop("with")
        return ir.ToolUse(id=call_id, name=name, input=given, at=at, ext=ext_of(NAME, rest))
    if kind == "result" and (call_id := pop(rest, "id")) is not None:
        content = read_content(rest, "says", at, read_block)
        failed = pop(rest, "failed", bool)
        return ir.ToolOutput(id=call_id, content=content, is_error=failed, at=at, ext=ext_of(NAME, rest))
    return ir.NativePart(dialect=NAME, label=str(kind), payload=value, at=at)


def write_block(part: ir.Part, notes: LossLedger) -> Json:
    out: dict[str, Any]
    match part:
        case ir.NativePart() if part.dialect == NAME:
            return part.payload
        case ir.Text():
            out = {"type": "text", "text": part.text}
        case ir.Thinking() if part.redacted is None:
            out = {"type": "thought", "words": part.text}
        case ir.ToolUse():
            out = {"type": "call", "id": part.id, "tool": part.name, "with": part.input}
        case ir.ToolOutput():
            says = write_say(part.content, notes)
            out = without_none({"type": "result", "id": part.id, "says": says, "failed": part.is_error})
        case _:
            notes.lose_part(part)
            return None
    return notes.own(out, part)


def write_say(parts: tuple[ir.Part, ...], notes: LossLedger) -> list[Json]:
    return write_parts(parts, partial(write_block, notes=notes))


# Requests -------------------------------------------------------------------------------------------------------------


def read_request(document: Json) -> ir.Conversation:
    rest = members_of(document)
    messages = tuple(read_turn(turn, f"/turns/{place}") for place, turn in enumerate(pop_list(rest, "turns")))
    tools = tuple(read_tool(tool, f"/gadgets/{place}") for place, tool in enumerate(pop(rest, "gadgets", list) or ()))
    limits = pop_inner(rest, "limits")
    found = {
        "max_tokens": ("/limits/tokens", pop(limits, "tokens", int)),
        "temperature": ("/mood", pop(rest, "mood", *NUMBER)),
        "reasoning_effort": ("/effort", EFFORTS.get(pop(rest, "effort") or "")),
    }
    put_back(rest, "limits", limits)
    return ir.Conversation(
        dialect=NAME, messages=messages, tools=tools, model=pop(rest, "robot"), ext=ext_of(NAME, rest),
        options={name: value for name, (_, value) in found.items() if value is not None},
        options_at={name: at for name, (at, value) in found.items() if value is not None},
    )  # fmt: skip


def read_turn(value: Json, at: str) -> ir.Message:
    rest = members_of(value, at)
    who, parts = pop(rest, "who"), read_content(rest, "say", at, read_block)
    return ir.Message(role=ROLES.get(who or "", "user"), parts=parts, native_role=who, at=at, ext=ext_of(NAME, rest))


def read_tool(value: Json, at: str) -> ir.ToolSpec:
    rest = members_of(value, at)
    name, about, takes = pop(rest, "tool"), pop(rest, "about"), pop(rest, "takes", dict)
    return ir.ToolSpec(name=name or "unnamed", description=about, schema=takes, at=at, ext=ext_of(NAME, rest))


def write_request(conversation: ir.Conversation, notes: LossLedger) -> dict[str, Any]:
    out: dict[str, Any] = {} if conversation.model is None else {"robot": conversation.model}
    out["turns"] = []
    for message in conversation.messages:
        turn = {"who": WHO[message.role], "say": write_say(message.parts, notes)}
        out["turns"].append(notes.own(turn, message))
    if conversation.tools:
        out["gadgets"] = [write_tool(tool, notes) for tool in conversation.tools]
    left = dict(conversation.options)
    if (limit := left.pop("max_tokens", None)) is not None:
        out["limits"] = {"tokens": notes.bounded("max_tokens", limit, 1, 9999)}
    if (mood := left.pop("temperature", None)) is not None:
        out["mood"] = notes.bounded("temperature", mood, 0, 1)
    word = next((word for word, effort in EFFORTS.items() if effort == left.get("reasoning_effort")), None)
    if word is not None:
        out["effort"] = word
        del left["reasoning_effort"]
    notes.lose_options(left)
    return notes.own(out, conversation)


def write_tool(tool: ir.ToolSpec, notes: LossLedger) -> Json:
    out = without_none({"tool": tool.name, "about": tool.description, "takes": tool.schema})
    return notes.own(out, tool)


# Answers --------------------------------------------------------------------------------------------------------------


def read_answer(document: Json) -> ir.Answer:
    rest = members_of(document)
    if (failed := read_error(document, rest, "say", NAME)) is not None:
        return failed
    say = tuple(read_block(block, f"/say/{place}") for place, block in enumerate(pop_list(rest, "say")))
    raw, bill = pop(rest, "outcome"), pop(rest, "bill", dict)
    message = ir.Message(role="assistant", parts=say)
    candidate = ir.Candidate(message=message, stop=ENDINGS.read(raw, say), stop_raw=raw, stop_at="/outcome")
    return ir.Answer(
        dialect=NAME, candidates=(candidate,), id=pop(rest, "number"), model=pop(rest, "robot"),
        usage=None if bill is None else USAGE.read(bill, "/bill", NAME), ext=ext_of(NAME, rest),
    )  # fmt: skip


def write_answer(answer: ir.Answer, notes: LossLedger) -> dict[str, Any]:
    out = without_none({"number": answer.id, "robot": answer.model})
    for candidate in answer.candidates[:1]:
        out |= {"say": write_say(candidate.message.parts, notes), "outcome": ENDINGS.write(candidate, notes)}
    if answer.usage is not None:
        out["bill"] = USAGE.write(answer.usage, notes)
    return notes.own(out, answer)


# Streams --------------------------------------------------------------------------------------------------------------


class Reader(BlockReader):
    """Reads pieces: `begin` a block, `more` of it, `bill`, `outcome`."""

    def read(self, chunk: Json) -> list[ir.StreamEvent]:
        if "begin" in chunk:
            return [*self.end_all(), *self.begin("block", read_block(chunk["begin"], "/say"))]
        if "more" in chunk:
            return [self.more("block", chunk["more"])]
        if "bill" in chunk:
            return self.count(chunk["bill"], "/bill")
        return self.stop(chunk.get("outcome"), "/outcome")


class Writer(BlockWriter):
    """Templates of the pieces; calls come whole."""

    is_serial = True

    def begin(self, key: Key, part: ir.Part) -> list[Json] | None:
        if not isinstance(part, ir.Text | ir.Thinking):
            return None
        self.opened[key] = True
        member = ("text", "text") if isinstance(part, ir.Text) else ("thought", "words")
        return [{"begin": {"type": member[0], member[1]: ""}}]

    def piece(self, key: Key, text: str, part: ir.Part) -> list[Json]:
        return [{"more": text}]

    def whole(self, key: Key, part: ir.Part) -> list[Json] | None:
        return [{"begin": block} for block in write_say((part,), self.ledger)] or None

    def stop(self, event: ir.Stopped) -> list[Json]:
        return [{"outcome": self.words[event.choice]}]


DIALECT: Final = Dialect(
    NAME=NAME, TOOL_NAMES={}, CAPABILITIES=Manifest({"streaming": NATIVE}), DEFAULTS={"model": "acme-1"},
    read_request=read_request, write_request=write_request, read_answer=read_answer, write_answer=write_answer,
    read_stream=Reader, write_stream=Writer, usage=USAGE, endings=ENDINGS,
    limits=ServerLimits(tool_name=Spelling("[a-z_]", 16), takes_refusals=False, takes_objects=True),
)  # fmt: skip
