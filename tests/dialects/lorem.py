"""A seventh dialect of a made-up vendor whose words are its own throughout: no `type`, no `text`, no `id`.

Turns are a text or a list of blocks of a `kind`; the instructions stand outside, as a text; what came from the cache is
counted beside what was sent. Streams are events of a kind `e` for blocks of a number `n`, which may interleave.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane import ir
from backplane.contract.canonical import Json
from backplane.contract.capability import NATIVE, Manifest
from backplane.dialects.codec import (
    NUMBER,
    Block,
    Blocks,
    Calls,
    Counters,
    Form,
    Hole,
    LossLedger,
    Members,
    RequestOption,
    Tools,
    Turns,
)
from backplane.dialects.limits import ServerLimits, Spelling
from backplane.dialects.outcome import Endings
from backplane.dialects.streams import BlockReader, BlockWriter, Key, begun, failure
from backplane.dialects.vendor import Dialect, outside

NAME: Final = "lorem"
ROLES: Final[dict[str, ir.Role]] = {"human": "user", "bot": "assistant", "tool": "tool"}
WHO: Final = {role: who for who, role in ROLES.items()}
ENDINGS: Final = Endings(
    {"done": "end", "full": "max_tokens", "invoke": "tool_use", "halt_word": "stop_sequence", "refused": "refusal"},
    {"end": "done", "max_tokens": "full", "tool_use": "invoke", "stop_sequence": "halt_word", "refusal": "refused",
     "content_filter": "refused", "error": "refused", None: "full", "pause": "full", "cancelled": "full",
     "other": "full"},
)  # fmt: skip
TOOL: Final = {"name": "tool", "description": "about", "schema": "args_schema"}
CHOICES: Final = {"free": "auto", "never": "none", "must": "required"}
USAGE: Final = Counters({"in": "input", "out": "output", "from_cache": "cache_read", "pondered": "reasoning"},
                        total="", needed=("input", "output"), apart={"input": ("cache_read",)})  # fmt: skip


# Blocks ---------------------------------------------------------------------------------------------------------------


BLOCKS: Final = Blocks(NAME, (
    Block("say", ir.Text, {"words!": "text"}),
    Block("picture", ir.Media, {"mime!": "media_type", "base64!": "data"}, {"kind": "image"}),
    Block("ponder", ir.Thinking, {"words!": "text"}),
    Block("invoke", ir.ToolUse, {"ticket!": "id", "tool!": "name", "args!": "input"}, types={"input": (dict,)}),
    Block("outcome", ir.ToolOutput, {"ticket!": "id", "words!": "content", "failed": "is_error"},
          types={"content": (str,), "is_error": (bool,)}),
), tag="kind", text="say", signature="seal")  # fmt: skip
TURNS: Final = Turns(BLOCKS, ROLES, "who", "say")
SAID: Final = Turns(BLOCKS, ROLES, "who", "say", takes_text=False)


# Requests -------------------------------------------------------------------------------------------------------------


def read_messages(members: Members, calls: Calls) -> list[ir.Message]:
    """Take the instructions and the turns of a request."""
    turns = [TURNS.read(turn, f"/dialogue/{place}") for place, turn in enumerate(members.need("dialogue"))]
    if (text := members.take("instructions")) is None:
        return turns
    part = ir.Text(text=text, at="/instructions")
    return [ir.Message(role="system", parts=(part,), flat=True, at="/instructions"), *turns]


def write_messages(conversation: ir.Conversation, out: dict[str, Any], ledger: LossLedger) -> None:
    """Write the turns and, outside of them, the instructions."""
    system, others = outside(conversation.messages, ledger, lambda message: False)
    if system is not None:
        out["instructions"] = ledger.plain_text(system.parts)
    out["dialogue"] = [TURNS.write(message, ledger) for message in others]


GADGET: Final = Hole("name")
OPTIONS: Final = (
    RequestOption("limits/words_out", "max_tokens", (int,), least=1),
    RequestOption("limits/heat", "temperature", NUMBER, least=0, most=1),
    RequestOption("limits/top", "top_p", NUMBER),
    RequestOption("limits/halts", "stop", (list,), most=3),
    RequestOption("use_gadget", "tool_choice", forms=(
        Form({"tool": GADGET}, {"mode": "tool", "name": GADGET}),
        *(Form(word, {"mode": mode}) for word, mode in CHOICES.items()))),
)  # fmt: skip


def _with_schema(tool: ir.ToolSpec, out: dict[str, Any], ledger: LossLedger) -> ir.ToolSpec:
    if tool.schema is not None:
        return tool
    ledger.synthesise(tool.at, "required", "a tool has a schema here")
    return msgspec.structs.replace(tool, schema={"type": "object", "properties": {}})


TOOLS: Final = Tools(BLOCKS, TOOL, write_more=_with_schema)


# Answers --------------------------------------------------------------------------------------------------------------


def read_candidates(members: Members, calls: Calls) -> tuple[ir.Candidate, ...]:
    """Take what an answer says and why it ended."""
    message = SAID.read(members.take("turn", dict), "/turn")
    raw = members.take("halted")
    return (ir.Candidate(message=message, stop=ENDINGS.read(raw, message.parts), stop_raw=raw, stop_at="/halted"),)


def write_candidates(answer: ir.Answer, out: dict[str, Any], ledger: LossLedger) -> None:
    """Write what an answer says and why it ended."""
    out["turn"] = {"who": "bot", "say": []}
    for candidate in answer.candidates[:1]:
        out["turn"] = SAID.write(candidate.message, ledger)
        if (word := ENDINGS.write(candidate, ledger)) is not None:
            out["halted"] = word
        ledger.put_ext(candidate, out)


# Streams --------------------------------------------------------------------------------------------------------------


class StreamReader(BlockReader):
    """Reads the events of one stream."""

    tag = "e"

    def __init__(self, dialect: Any) -> None:
        super().__init__(dialect)
        self.handlers = {
            "open": lambda chunk: [begun(chunk.get("ticket"), chunk.get("engine"))], "piece": self._piece,
            "invoke": self._invoke, "args": self._args, "shut": lambda chunk: self.end(chunk.get("n")),
            "end": self._end, "oops": lambda chunk: [failure(chunk, chunk, "code")],
        }  # fmt: skip

    def _piece(self, chunk: Json) -> list[ir.StreamEvent]:
        n, kind, words = chunk.get("n"), chunk.get("kind"), chunk.get("words")
        if type(n) is not int or kind not in ("say", "ponder") or type(words) is not str:
            return [ir.Kept(chunk, False)]
        at = f"/turn/say/{n}"
        part: ir.Part = ir.Text(text="", at=at) if kind == "say" else ir.Thinking(text="", at=at)
        return [*(self.begin(n, part) if n not in self.open else []), self.more(n, words)]

    def _invoke(self, chunk: Json) -> list[ir.StreamEvent]:
        n, ticket, tool = chunk.get("n"), chunk.get("ticket"), chunk.get("tool")
        if type(n) is not int or type(ticket) is not str or type(tool) is not str:
            return [ir.Kept(chunk, False)]
        return self.begin(n, ir.ToolUse(id=ticket, name=tool, input={}, text="", at=f"/turn/say/{n}"))

    def _args(self, chunk: Json) -> list[ir.StreamEvent]:
        n, text = chunk.get("n"), chunk.get("text")
        if n not in self.open or type(text) is not str:
            return [ir.Kept(chunk, False)]
        return [self.more(n, text, "arguments")]

    def _end(self, chunk: Json) -> list[ir.StreamEvent]:
        counted = self.count(chunk.get("meter"), "/meter")
        return [*counted, *self.stop(chunk.get("halted"), "/halted"), *self.finish()]


class StreamWriter(BlockWriter):
    """Templates of the events."""

    has_refusals = False
    takes_objects = True

    def __init__(self, dialect: Any, source: str) -> None:
        super().__init__(dialect, source)
        self.count = 0

    def head(self) -> list[Json]:
        began = self.sum.began
        return [{"e": "open", "ticket": began.id or "translated", "engine": began.model or "unknown"}]

    def begin(self, key: Key, part: ir.Part) -> list[Json] | None:
        if not isinstance(part, ir.Text | ir.Refusal | ir.Thinking | ir.ToolUse):
            return None
        n = self.opened[key] = self.count
        self.count += 1
        if not isinstance(part, ir.ToolUse):
            return []
        return [{"e": "invoke", "n": n, "ticket": part.id, "tool": part.name}]

    def piece(self, key: Key, text: str, part: ir.Part) -> list[Json]:
        if isinstance(part, ir.ToolUse):
            return [{"e": "args", "n": self.opened[key], "text": text}]
        kind = "ponder" if isinstance(part, ir.Thinking) else "say"
        return [{"e": "piece", "n": self.opened[key], "kind": kind, "words": text}]

    def close(self, key: Key, part: ir.Part) -> list[Json]:
        return [{"e": "shut", "n": self.opened[key]}]

    def end(self) -> list[Json]:
        if not self.words:
            return self.fail_cut()
        return [{"e": "end", "halted": self.words[0], "meter": self.counted() or {"in": 0, "out": 0}}]

    def fail(self, event: ir.StreamFailed) -> list[Json]:
        return [{"e": "oops", "message": event.message, **({} if event.code is None else {"code": event.code})}]


DIALECT: Final = Dialect(
    NAME=NAME, TOOL_NAMES={}, CAPABILITIES=Manifest({"streaming": NATIVE, "tool_use": NATIVE}),
    DEFAULTS={"model": "lorem-1", "max_tokens": 4096}, options=OPTIONS, read_messages=read_messages,
    write_messages=write_messages, tools=TOOLS, model_member="engine",
    tools_member="gadgets", required={"engine": "unknown", "limits": {}, "use_gadget": "free"}, listed="/dialogue",
    reply="turn", answered="/turn/say", read_candidates=read_candidates, write_candidates=write_candidates,
    usage=USAGE, endings=ENDINGS, content=frozenset({"dialogue", "instructions", "turn"}), read_stream=StreamReader,
    answer_required={"ticket": "translated", "engine": "unknown", "halted": "full", "meter": {"in": 0, "out": 0}},
    write_stream=StreamWriter, limits=ServerLimits(call_id=Spelling("[a-z0-9-]", 24), takes_objects=True),
    places={"id": "ticket", "model": "engine", "usage": "meter", "signature": "seal", "system": "instructions"},
)  # fmt: skip
