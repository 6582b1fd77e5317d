"""A made-up vendor's dialect, written from the docs alone: what a newcomer adds for a seventh.

Acme says `turns` of `who` and `say`; an answer is one turn with an `outcome`; a stream is pieces of it.
"""

from __future__ import annotations

from typing import Any, Final

from backplane.contract.canonical import Json
from backplane.contract.capability import NATIVE, Manifest
from backplane.dialects.codec import (
    NUMBER,
    Block,
    Blocks,
    Calls,
    Ledger,
    Members,
    Option,
    is_own_raw,
    kind_of,
    put_ext,
    read_options,
    unchanged,
    write_options,
)
from backplane.dialects.limits import Limits, Spelling
from backplane.dialects.losses import lose_part
from backplane.dialects.outcome import Endings
from backplane.dialects.streams import BlockReader, BlockWriter, Key
from backplane.dialects.vendor import Dialect, no_name, write_tools
from backplane.ir import (
    Answer,
    Candidate,
    Conversation,
    Message,
    Opaque,
    Part,
    PartDelta,
    PartStarted,
    PartStopped,
    Role,
    Stop,
    Stopped,
    StreamEvent,
    StreamFailed,
    Text,
    Thinking,
    ToolResult,
    ToolSpec,
    ToolUse,
    Usage,
    UsageSeen,
)

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
    Option("limits/tokens", "max_tokens", (int,), least=1, most=9999),
    Option("mood", "temperature", NUMBER, least=0, most=1),
    Option("effort", "reasoning_effort", words={"lazy": "low", "busy": "medium", "mad": "high"}),
)
USAGE: Final = {"heard": "input", "spoken": "output"}
PLACES: Final = {"max_tokens": "limits", "id": "number", "model": "robot", "usage": "bill", **{
    field: path for path, field in USAGE.items()}}  # fmt: skip
BLOCKS: Final = Blocks(NAME, (
    Block("text", Text, {"text!": "text"}),
    Block("thought", Thinking, {"words!": "text"}, write=lambda part, out, ledger: part.redacted is None),
    Block("call", ToolUse, {"id!": "id", "tool!": "name", "with!": "input"}, types={"input": (dict,)}),
    Block("result", ToolResult, {"id!": "id", "failed": "is_error"}, types={"is_error": (bool,)},
          read=lambda members, fields: read_says(members, fields), write=lambda part, out, ledger: write_says(
              part, out, ledger)),
))  # fmt: skip


def read_says(members: Members, fields: dict[str, Any]) -> bool:
    says = members.take("says", list) or ()
    fields["content"] = tuple(read_block(one, f"{members.at}/says/{place}") for place, one in enumerate(says))
    return True


def write_says(part: ToolResult, out: dict[str, Any], ledger: Ledger) -> bool:
    out["says"] = write_blocks(part.content, ledger)
    return True


def read_block(value: Json, at: str) -> Part:
    return BLOCKS.read(value, at) or Opaque(dialect=NAME, label=str(kind_of(value)), payload=value, at=at, raw=value)


def write_blocks(parts: tuple[Part, ...], ledger: Ledger) -> list[Json]:
    out: list[Json] = []
    for part in parts:
        if is_own_raw(part, ledger) or unchanged(part, ledger, lambda: read_block(part.raw, part.at)):  # noqa: B023
            out.append(part.raw)
        elif (made := BLOCKS.write(part, ledger)) is not None:
            out.append(made)
        else:
            lose_part(part, ledger)
    return out


def read_turn(value: Json, at: str) -> Message:
    members = Members(value, at)
    who, say = members.take("who"), members.take("say", list) or ()
    parts = tuple(read_block(block, f"{at}/say/{place}") for place, block in enumerate(say))
    return Message(role=ROLES.get(who or "", "user"), parts=parts, native_role=who, at=at, ext=members.ext(NAME),
                   raw=value)  # fmt: skip


def write_turn(message: Message, ledger: Ledger) -> Json:
    if unchanged(message, ledger, lambda: read_turn(message.raw, message.at)):
        return message.raw
    out = {"who": WHO[message.role], "say": write_blocks(message.parts, ledger)}
    put_ext(message, out, ledger)
    return out


def read_request(request: Json, ledger: Ledger, calls: Calls) -> Conversation:
    members = Members(request, "")
    turns = tuple(read_turn(turn, f"/turns/{place}") for place, turn in enumerate(members.need("turns")))
    options: dict[str, Any] = {}
    places: dict[str, str] = {}
    read_options(members, OPTIONS, options, places)
    tools = tuple(
        read_tool(tool, f"/gadgets/{place}") for place, tool in enumerate(members.take("gadgets", list) or ())
    )
    return Conversation(dialect=NAME, messages=turns, model=members.take("robot"), tools=tools, options=options,
                        options_at=places, ext=members.ext(NAME))  # fmt: skip


def write_request(conversation: Conversation, ledger: Ledger) -> dict[str, Any]:
    out: dict[str, Any] = {"turns": [write_turn(message, ledger) for message in conversation.messages]}
    if conversation.model is not None:
        out["robot"] = conversation.model
    if tools := write_tools(conversation.tools, ledger, write_tool):
        out["gadgets"] = tools
    write_options(conversation, out, ledger, OPTIONS, {})
    put_ext(conversation, out, ledger)
    return out


def read_tool(tool: Json, at: str) -> ToolSpec:
    members = Members(tool, at)
    return ToolSpec(name=members.take("tool") or "", description=members.take("about"),
                    schema=members.take("takes", dict), at=at, ext=members.ext(NAME), raw=tool)  # fmt: skip


def write_tool(tool: ToolSpec, ledger: Ledger) -> Json:
    pairs = (("tool", tool.name), ("about", tool.description), ("takes", tool.schema))
    out = {key: value for key, value in pairs if value is not None}
    put_ext(tool, out, ledger)
    return out


def read_answer(response: Json, ledger: Ledger, calls: Calls) -> Answer:
    members = Members(response, "")
    say = tuple(read_block(block, f"/say/{place}") for place, block in enumerate(members.need("say")))
    raw = members.take("outcome")
    stop = Candidate(message=Message(role="assistant", parts=say), stop=ENDINGS.read(raw, say), stop_raw=raw,
                     stop_at="/outcome")  # fmt: skip
    bill = members.take("bill", dict)
    usage = None if bill is None else Usage(**{field: bill.get(path) for path, field in USAGE.items()}, at="/bill")
    return Answer(dialect=NAME, candidates=(stop,), id=members.take("number"), model=members.take("robot"),
                  usage=usage, ext=members.ext(NAME))  # fmt: skip


def write_answer(answer: Answer, ledger: Ledger) -> dict[str, Any]:
    candidate = answer.candidates[0]
    out: dict[str, Any] = {"say": write_blocks(candidate.message.parts, ledger), "number": answer.id}
    out |= {"robot": answer.model, "outcome": ENDINGS.write(candidate, ledger)}
    if answer.usage is not None:
        out["bill"] = {path: getattr(answer.usage, field) for path, field in USAGE.items()}
    put_ext(answer, out, ledger)
    return {key: value for key, value in out.items() if value is not None}


class Reader(BlockReader):
    """Reads pieces: `begin` a block, `more` of it, `bill`, `outcome`."""

    def __init__(self) -> None:
        super().__init__()
        self.index = -1

    def read(self, chunk: Json) -> list[StreamEvent]:
        if "begin" in chunk:
            self.index += 1
            closed: list[StreamEvent] = [PartStopped(self.index - 1)] if self.index else []
            return [*closed, PartStarted(self.index, read_block(chunk["begin"], f"/say/{self.index}"))]
        if "more" in chunk:
            return [PartDelta(self.index, chunk["more"])]
        if "bill" in chunk:
            return [UsageSeen(Usage(input=chunk["bill"].get("heard"), output=chunk["bill"].get("spoken")))]
        return [PartStopped(self.index), Stopped(stop=ENDINGS.read(chunk["outcome"]) or "other", raw=chunk["outcome"])]

    def _close_all(self) -> list[StreamEvent]:
        return []


class Writer(BlockWriter):
    """Templates of the pieces; calls come whole."""

    is_serial = True

    def __init__(self, source: str) -> None:
        super().__init__(source, NAME)

    def begin(self, key: Key, part: Part) -> list[Json] | None:
        if not isinstance(part, Text | Thinking):
            return None
        self.opened[key] = True
        member = ("text", "text") if isinstance(part, Text) else ("thought", "words")
        return [{"begin": {"type": member[0], member[1]: ""}}]

    def piece(self, event: PartDelta, part: Part) -> list[Json]:
        return [{"more": event.text}]

    def whole(self, key: Key, part: Part) -> list[Json] | None:
        return [{"begin": block} for block in write_blocks((part,), self.ledger)] or None

    def stop(self, event: Stopped) -> list[Json]:
        return [{"outcome": ENDINGS.write(self.stopped(event), self.ledger)}]

    def fail(self, event: StreamFailed) -> list[Json]:
        return [{"outcome": "blocked"}]


DIALECT: Final = Dialect(
    NAME=NAME, TOOL_NAMES={}, CAPABILITIES=Manifest({"streaming": NATIVE}), DEFAULTS={"model": "acme-1"},
    read_request=read_request, write_request=write_request, read_answer=read_answer, write_answer=write_answer,
    read_tool=read_tool, write_tool=write_tool, read_stream=Reader, write_stream=Writer, event_name=no_name,
    limits=Limits(tool_name=Spelling("[a-z_]", 16)), places=PLACES, listed="/turns",
    content=frozenset({"turns", "say"}),
)  # fmt: skip
