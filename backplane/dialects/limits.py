"""Changes conversations to fit the limits of servers, as far as the neutral types do not express them.

Names and ids are mapped injectively and without stored state: a name has the same spelling in every turn.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any, Final, TypeVar

import msgspec

from backplane.dialects.common import LossLedger
from backplane.dialects.ir import (
    Answer,
    Candidate,
    Conversation,
    Media,
    Message,
    NativePart,
    Node,
    Part,
    Refusal,
    Text,
    ToolOutput,
    ToolSpec,
    ToolUse,
)
from backplane.dialects.outcome import RUNNABLE, has_cut_call
from backplane.dialects.pairing import paired

NodeT = TypeVar("NodeT", bound=Node)

STATE: Final = frozenset(
    {"previous_response_id", "conversation", "container", "thread", "cachedContent", "cached_content", "prompt"}
)
"""Members of any vendor's requests that refer to state stored at the vendor."""

DIGEST_CHARS: Final = 8
"""Letters of the digest in a changed name (32 bits), so that two names of one request do not become equal."""


_LETTERS: Final = str.maketrans("0123456789", "ghijklmnop")


class Spelling(msgspec.Struct, frozen=True):
    """The letters and the length that a server accepts in an id or a name."""

    letters: str = r"[^\n]"
    """Regular expression for one letter; it must accept a to p, of which digests are made, and x, a substitute."""
    most: int = 0
    """Maximum number of letters; 0 for any number."""
    first: str = ""
    """Regular expression for the first letter, if it must be one of fewer; empty for no such rule."""

    def fit(self, word: str) -> str:
        """Return a name that the server accepts; a changed one gets a digest, so that no two become equal."""
        if self.is_fit(word):
            return word
        fill = next(letter for letter in "_-x" if re.match(self.letters, letter))
        bare = re.sub(f"(?!{self.letters}).", fill, word, flags=re.DOTALL)
        if self.first and not re.match(self.first, bare):
            bare = f"x{bare}"
        digest = hashlib.sha256(word.encode(errors="surrogatepass")).hexdigest()[:DIGEST_CHARS].translate(_LETTERS)
        return f"{bare[: (self.most or len(bare) + 9) - DIGEST_CHARS - 1]}{fill}{digest}"

    def is_fit(self, word: str) -> bool:
        if not word or (self.most and len(word) > self.most) or (self.first and not re.match(self.first, word)):
            return False
        return re.fullmatch(f"{self.letters}+", word) is not None


ANY_WORD: Final = Spelling()


class ServerLimits(msgspec.Struct, frozen=True):
    """The limits of one server."""

    call_id: Spelling = ANY_WORD
    tool_name: Spelling = ANY_WORD
    takes_empty_text: bool = True
    takes_refusals: bool = True
    """True if a refusal is a block of its own."""
    ends_refused: bool = False
    """True if an answer with a refusal has a stop reason of its own."""
    takes_text_documents: bool = False
    takes_objects: bool = False
    """True if arguments of a call are an object, so that a client cannot recognise cut arguments."""
    needs_user: bool = False
    """True if the server has system text apart from the messages, and requires at least one message of another role."""


# Refusals -------------------------------------------------------------------------------------------------------------


def calls_in(messages: Iterable[Message]) -> list[ToolUse]:
    return [part for message in messages for part in message.parts if isinstance(part, ToolUse)]


def check_meaning(conversation: Conversation, ledger: LossLedger) -> None:
    """Refuse a conversation whose meaning would change: references to stored state, results without calls."""
    entries = conversation.ext.get(ledger.source, {})
    for key in sorted(STATE & entries.keys()):
        if entries[key] is not None:
            ledger.refuse(f"/{key}", "state", f"it points to what {ledger.source} keeps")
    calls = {call.id for call in calls_in(conversation.messages)}
    for message in conversation.messages:
        for part in message.parts:
            if isinstance(part, ToolOutput) and part.id not in calls:
                ledger.refuse(part.at, "call_missing", f"the call {part.id} is not in the conversation", "ir_invalid")
            elif isinstance(part, NativePart) and part.is_bound:
                ledger.refuse(part.at, "part_bound", f"{part.label} points to state that {ledger.source} keeps")
    own = entries.get("tool_choice")  # A choice without a neutral form is still in `ext`.
    names = {conversation.options.get("tool_choice", {}).get("name")}
    names |= {own.get("name"), own.get("type")} if isinstance(own, dict) else set()
    for tool in conversation.tools:
        if tool.kind == "server" and tool.name in names:
            at = ledger.option_at("tool_choice") or "/tool_choice"
            ledger.refuse(at, "tool_choice", f"{tool.name} is forced, and only {ledger.source} has it")


# Limits ---------------------------------------------------------------------------------------------------------------


def fitted(conversation: Conversation, limits: ServerLimits, ledger: LossLedger) -> Conversation:
    """Return a conversation that the server accepts; note the changes."""
    changes: dict[str, Any] = {}
    options = _with_tools(conversation, ledger)
    if options is not conversation.options:
        changes["options"] = options
    done = paired(conversation, ids_optional=True)
    messages = done.value.messages
    ledger.add(msgspec.structs.replace(loss, target=ledger.target) for loss in done.losses)
    if not limits.takes_empty_text:
        messages = _without_empty(messages, ledger)
    if limits.needs_user and messages and all(message.role == "system" for message in messages):
        last = messages[-1]
        ledger.degrade(last.at, "role", "a request has a message of the user here")
        messages = (*messages[:-1], msgspec.structs.replace(last, role="user", native_role=None))
    names = _Names(limits, ledger)
    messages = tuple(names.message(_sayable_in(message, limits, ledger)) for message in messages)
    tools = tuple(names.fit(tool, "name") for tool in _callable(conversation.tools, limits, ledger))
    choice = options.get("tool_choice")
    if choice is not None and "name" in choice and (name := limits.tool_name.fit(choice["name"])) != choice["name"]:
        changes["options"] = {**options, "tool_choice": {**choice, "name": name}}
    return msgspec.structs.replace(conversation, messages=messages, tools=tools, **changes)


def sayable(part: Part, limits: ServerLimits, ledger: LossLedger) -> Part:
    """Return a block in a form that the target has: some refusals, documents and arguments need another one."""
    if isinstance(part, ToolOutput):
        content = tuple(sayable(inner, limits, ledger) for inner in part.content)
        return part if content == part.content else msgspec.structs.replace(part, content=content)
    if isinstance(part, ToolUse) and limits.takes_objects and type(part.input) is not dict:
        name = "input" if part.kind == "custom" else "arguments"
        ledger.degrade(part.at, "arguments", f"no JSON object; it stands in the member {name}", part.input)
        return msgspec.structs.replace(part, input={name: part.input}, text=None, kind="function")
    code = ""
    if isinstance(part, Refusal) and not limits.takes_refusals:
        code = "part"
    elif isinstance(part, Media) and part.text is not None and not limits.takes_text_documents:
        code = "media"
    if not code:
        return part
    ledger.degrade(part.at, code, "its words are said as a text here")
    return Text(text=part.text, at=part.at, cache=part.cache)  # type: ignore[attr-defined]


def _sayable_in(message: Message, limits: ServerLimits, ledger: LossLedger) -> Message:
    parts = tuple(sayable(part, limits, ledger) for part in message.parts)
    return message if parts == message.parts else msgspec.structs.replace(message, parts=parts)


FREE_TEXT: Final[dict[str, Any]] = {
    "type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],
}  # fmt: skip
"""Schema of a free-text tool for a server whose tools accept only objects."""


def as_function(tool: ToolSpec) -> ToolSpec:
    """Convert a free-text tool to a function with one member `input`; its grammar moves into the description."""
    words = [tool.description or ""]
    for members in tool.ext.values():
        grammar = members.get("format")
        if isinstance(grammar, dict) and isinstance(grammar.get("definition"), str):
            words.append(f"`input` follows this {grammar.get('syntax') or ''} grammar:\n{grammar['definition']}")
    return msgspec.structs.replace(
        tool, kind="function", schema=FREE_TEXT, description="\n\n".join(filter(None, words)) or None
    )


def _callable(tools: tuple[ToolSpec, ...], limits: ServerLimits, ledger: LossLedger) -> list[ToolSpec]:
    """Return the tools without those that the source's vendor runs, as the target cannot have them."""
    out = []
    for tool in tools:
        if tool.kind == "server":
            ledger.drop(tool.at, "tool", f"{tool.name} is run by {ledger.source} itself", tool.payload)
        elif tool.kind == "custom" and limits.takes_objects:
            ledger.degrade(tool.at, "tool", "a tool for free text takes an object with the member input here")
            out.append(as_function(tool))
        else:
            out.append(tool)
    return out


WORDLESS: Final = "(nothing)"
"""Text that is written into a request without any text, because the server would refuse it."""
CUT_CALL: Final = "a call whose arguments were cut would be run as a whole one here"


def runnable(answer: Answer, limits: ServerLimits, ledger: LossLedger) -> Answer:
    """Return an answer in forms that the target has; without cut calls if the target's clients would run them."""
    limits = msgspec.structs.replace(limits, takes_text_documents=False)  # No vendor's answer contains a document.
    candidates = []
    for one in answer.candidates:
        changes: dict[str, Any] = {}
        message = one.message
        if limits.takes_objects and has_cut_call(message.parts):
            for part in message.parts:
                if isinstance(part, ToolUse) and part.is_cut:
                    ledger.drop(part.at, "arguments", CUT_CALL, part.input)
            kept = tuple(part for part in message.parts if not (isinstance(part, ToolUse) and part.is_cut))
            message = msgspec.structs.replace(message, parts=kept)
            changes = {"stop": "max_tokens", "stop_raw": None} if one.stop in RUNNABLE else {}
        changes["message"] = _sayable_in(message, limits, ledger)
        candidates.append(refused(msgspec.structs.replace(one, **changes), message.parts, limits, ledger))
    return msgspec.structs.replace(answer, candidates=tuple(candidates))


def refused(one: Candidate, parts: tuple[Part, ...], limits: ServerLimits, ledger: LossLedger) -> Candidate:
    """Return a candidate that ends as refused if `parts` have a refusal and the target has such a stop reason."""
    if one.stop != "end" or not limits.ends_refused or not any(isinstance(part, Refusal) for part in parts):
        return one
    ledger.degrade(one.stop_at, "stop", "an answer with a refusal ends as refused here")
    return msgspec.structs.replace(one, stop="refusal", stop_raw=None)


def _with_tools(conversation: Conversation, ledger: LossLedger) -> dict[str, Any]:
    """Return the request's options; without those in `NEED_TOOLS` if the target accepts none of the tools."""
    kinds = {tool.name: tool.kind for tool in conversation.tools}
    options = conversation.options
    if any(kind != "server" for kind in kinds.values()) or not options.keys() & NEED_TOOLS:
        return options
    for name in NEED_TOOLS & options.keys():
        ledger.lose_option(name, options[name], "the target refuses it without tools")
    return {name: value for name, value in options.items() if name not in NEED_TOOLS}


NEED_TOOLS: Final = frozenset({"tool_choice", "parallel_tool_calls"})
"""Options that a server refuses in a request without tools."""


def _without_empty(messages: tuple[Message, ...], ledger: LossLedger) -> tuple[Message, ...]:
    out: list[Message] = []
    for message in messages:
        parts = tuple(part for part in message.parts if not (type(part) is Text and not part.text.strip()))
        if parts and len(parts) == len(message.parts):
            out.append(message)
            continue
        for part in message.parts:
            if type(part) is Text and not part.text.strip():
                ledger.drop(part.at, "part", "a text of blanks is refused here")
        if parts:
            out.append(msgspec.structs.replace(message, parts=parts))
            continue
        ledger.drop(message.at, "part", "a message without content is refused here")
        if message.name is not None:
            ledger.drop(f"{message.at}/name", "role", "a message has no name here", message.name)
    if not out and messages:
        last = messages[-1]
        ledger.synthesise(last.at, "required", f"a request has words here; it says {WORDLESS}")
        out.append(msgspec.structs.replace(last, parts=(Text(text=WORDLESS),)))
    return tuple(out)


class _Names:
    """Changes ids and names to spellings that the server accepts."""

    def __init__(self, limits: ServerLimits, ledger: LossLedger) -> None:
        self.spellings = {"id": limits.call_id, "name": limits.tool_name}
        self.ledger = ledger
        self.known: dict[tuple[str, str], str] = {}

    def fit(self, node: NodeT, *fields: str) -> NodeT:
        """Return a call, a result or a tool with an id and name that the server accepts."""
        changes = {}
        for field in fields:
            word = getattr(node, field)
            if word and (found := self._known(field, word, node.at)) != word:
                changes[field] = found
        return msgspec.structs.replace(node, **changes) if changes else node

    def _known(self, field: str, word: str, at: str) -> str:
        found = self.known.get((field, word))
        if found is None:
            found = self.known[field, word] = self.spellings[field].fit(word)
            if found != word:
                reason = f"letters or length of the {field} are refused here; it became {found}"
                self.ledger.degrade(at, "identity" if field == "id" else "tool_field", reason)
        return found

    def message(self, message: Message) -> Message:
        if not any(isinstance(part, ToolUse | ToolOutput) for part in message.parts):
            return message
        parts = tuple(
            self.fit(part, "id", "name") if isinstance(part, ToolUse | ToolOutput) else part for part in message.parts
        )
        return message if parts == message.parts else msgspec.structs.replace(message, parts=parts)
