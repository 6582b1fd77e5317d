"""A made-up vendor's dialect, written from the docs alone: what a newcomer adds for a seventh.

Acme says `turns` of `who` and `say`; an answer is one turn with an `outcome`; a stream is pieces of it.
"""

from __future__ import annotations

from typing import Any, Final

from backplane.contract.canonical import Json
from backplane.contract.capability import NATIVE, Manifest
from backplane.dialects.codec import Block, Blocks, Members, RequestOption, Tools
from backplane.dialects.common import NUMBER, Calls, Counters, LossLedger
from backplane.dialects.ir import (
    Answer,
    Candidate,
    Conversation,
    Message,
    Part,
    Role,
    Stop,
    Stopped,
    StreamEvent,
    Text,
    Thinking,
    ToolOutput,
    ToolUse,
)
from backplane.dialects.limits import ServerLimits, Spelling
from backplane.dialects.outcome import Endings
from backplane.dialects.streams import BlockReader, BlockWriter, Key
from backplane.dialects.vendor import TableDialect

NAME: Final = "acme"
ROLES: Final[dict[str, Role]] = {"boss": "system", "human": "user", "robot": "assistant", "machine": "tool"}
WHO: Final = {role: who for who, role in ROLES.items()}
STOPS: Final[dict[str, Stop]] = {
    "happy": "end",
    "full": "max_tokens",
    "calling": "tool_use",
    "blocked": "content_filter",
}
STOP_WORDS: Final[dict[Stop | None, str]] = {
    "end": "happy", "stop_sequence": "happy", "max_tokens": "full", "tool_use": "calling", "content_filter": "blocked",
    "refusal": "blocked", "error": "blocked", "pause": "full", "cancelled": "full", "other": "full", None: "full",
}  # fmt: skip
ENDINGS: Final = Endings(STOPS, STOP_WORDS)
OPTIONS: Final = (
    RequestOption("limits/tokens", "max_tokens", (int,), least=1, most=9999),
    RequestOption("mood", "temperature", NUMBER, least=0, most=1),
    RequestOption("effort", "reasoning_effort", words={"lazy": "low", "busy": "medium", "mad": "high"}),
)
USAGE: Final = Counters({"heard": "input", "spoken": "output"}, total="")


BLOCKS: Final = Blocks(NAME, (
    Block("text", Text, {"text!": "text"}),
    Block("thought", Thinking, {"words!": "text"}),
    Block("call", ToolUse, {"id!": "id", "tool!": "name", "with!": "input"}, types={"input": (dict,)}),
    Block("result", ToolOutput, {"id!": "id", "says": "content", "failed": "is_error"},
          types={"content": (list,), "is_error": (bool,)}),
))  # fmt: skip


def read_turn(value: Json, at: str) -> Message:
    members = Members(value, at)
    who, say = members.take("who"), members.take("say", list) or ()
    parts = tuple(BLOCKS.read(block, f"{at}/say/{place}") for place, block in enumerate(say))
    return Message(role=ROLES.get(who or "", "user"), parts=parts, native_role=who, at=at, ext=members.ext(NAME))


def read_messages(members: Members, calls: Calls) -> list[Message]:
    return [read_turn(turn, f"/turns/{place}") for place, turn in enumerate(members.need("turns"))]


def write_messages(conversation: Conversation, out: dict[str, Any], ledger: LossLedger) -> None:
    out["turns"] = []
    for message in conversation.messages:
        turn = {"who": WHO[message.role], "say": BLOCKS.write_all(message.parts, ledger)}
        ledger.put_ext(message, turn)
        out["turns"].append(turn)


TOOLS: Final = Tools(BLOCKS, {"name": "tool", "description": "about", "schema": "takes"})


def read_candidates(members: Members, calls: Calls) -> tuple[Candidate, ...]:
    say = tuple(BLOCKS.read(block, f"/say/{place}") for place, block in enumerate(members.need("say")))
    raw = members.take("outcome")
    message = Message(role="assistant", parts=say)
    return (Candidate(message=message, stop=ENDINGS.read(raw, say), stop_raw=raw, stop_at="/outcome"),)


def write_candidates(answer: Answer, out: dict[str, Any], ledger: LossLedger) -> None:
    for candidate in answer.candidates[:1]:
        out["say"] = BLOCKS.write_all(candidate.message.parts, ledger)
        out["outcome"] = ENDINGS.write(candidate, ledger)


class Reader(BlockReader):
    """Reads pieces: `begin` a block, `more` of it, `bill`, `outcome`."""

    def read(self, chunk: Json) -> list[StreamEvent]:
        if "begin" in chunk:
            return [*self.end_all(), *self.begin("block", BLOCKS.read(chunk["begin"], "/say"))]
        if "more" in chunk:
            return [self.more("block", chunk["more"])]
        if "bill" in chunk:
            return self.count(chunk["bill"], "/bill")
        return self.stop(chunk.get("outcome"), "/outcome")


class Writer(BlockWriter):
    """Templates of the pieces; calls come whole."""

    is_serial = True

    def begin(self, key: Key, part: Part) -> list[Json] | None:
        if not isinstance(part, Text | Thinking):
            return None
        self.opened[key] = True
        member = ("text", "text") if isinstance(part, Text) else ("thought", "words")
        return [{"begin": {"type": member[0], member[1]: ""}}]

    def piece(self, key: Key, text: str, part: Part) -> list[Json]:
        return [{"more": text}]

    def whole(self, key: Key, part: Part) -> list[Json] | None:
        return [{"begin": block} for block in BLOCKS.write_all((part,), self.ledger)] or None

    def stop(self, event: Stopped) -> list[Json]:
        return [{"outcome": self.words[event.choice]}]


DIALECT: Final = TableDialect(
    NAME=NAME, TOOL_NAMES={}, CAPABILITIES=Manifest({"streaming": NATIVE}), DEFAULTS={"model": "acme-1"},
    options=OPTIONS, read_messages=read_messages, write_messages=write_messages, tools=TOOLS,
    listed="/turns", model_member="robot", tools_member="gadgets", reply="say",
    read_candidates=read_candidates, write_candidates=write_candidates, usage=USAGE, endings=ENDINGS,
    read_stream=Reader, write_stream=Writer, limits=ServerLimits(tool_name=Spelling("[a-z_]", 16)),
    places={"id": "number", "model": "robot", "usage": "bill"},
).dialect()  # fmt: skip
