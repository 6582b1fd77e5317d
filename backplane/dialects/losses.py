"""What a translation lost, found by comparing what was read with what is read back from what was written.

Blocks are compared by identity (text, id, name), not by their place in a list. What a writer has named already is not
named again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from backplane.contract.canonical import Json
from backplane.dialects import ir
from backplane.dialects.codec import (
    CODES,
    LossLedger,
    encode,
    escape,
    is_bare,
    json_text,
    unescape,
)

PlaceMap = Mapping[str, str]
"""Portable field → the source's member for it, below the node."""

STATE: Final = frozenset(
    {"previous_response_id", "conversation", "container", "cachedContent", "cached_content", "prompt"}
)
"""Members of requests, of any vendor, that point to what it keeps."""

FIELDS: Final[dict[str, tuple[str, str]]] = {
    "signature": ("signature", "only its own vendor can read it"),
    "cache": ("cache", "the target has no breakpoint here"),
    "detail": ("media", "no such level of detail here"),
    "media_type": ("media", "the target says no such type"),
    "name": ("media", "no names here"),
    "title": ("media", "no titles here"),
    "transcript": ("media", "no transcript here"),
    "file_id": ("media", "no id of a file here"),
    "redacted": ("thinking", "only its own vendor can read it"),
    "description": ("tool_field", "a tool has no description here"),
    "schema": ("tool_field", "a tool's schema is another one here"),
    "strict": ("tool_field", "no tool is strict here"),
    "kind": ("tool", "a tool of this kind is said as another one"),
}
"""Field of a node → code and sentence of its loss."""


# Refusals -------------------------------------------------------------------------------------------------------------


def calls_in(messages: Iterable[ir.Message]) -> list[ir.ToolUse]:
    return [part for message in messages for part in message.parts if isinstance(part, ir.ToolUse)]


def check_meaning(conversation: ir.Conversation, ledger: LossLedger) -> None:
    """Refuse what would mean something else: pointers to kept state, results without their calls."""
    entries = conversation.ext.get(ledger.source, {})
    for key in sorted(STATE & entries.keys()):
        if entries[key] is not None:
            ledger.refuse(f"/{key}", "state", f"it points to what {ledger.source} keeps")
    calls = {call.id for call in calls_in(conversation.messages)}
    for message in conversation.messages:
        for part in message.parts:
            if isinstance(part, ir.ToolOutput) and part.id not in calls:
                ledger.refuse(part.at, "call_missing", f"the call {part.id} is not in the conversation", "ir_invalid")
            elif isinstance(part, ir.Opaque) and part.bound:
                ledger.refuse(part.at, "part_bound", f"{part.label} points to state that {ledger.source} keeps")
    forced = conversation.options.get("tool_choice", {}).get("name")
    if any(tool.kind == "server" and tool.name == forced for tool in conversation.tools):
        at = conversation.options_at.get("tool_choice", "/tool_choice")
        ledger.refuse(at, "tool_choice", f"{forced} is forced, and only {ledger.source} has it")


# Round trip -----------------------------------------------------------------------------------------------------------


class RoundTrip:
    """What was read against what is read back.

    Args:
        ledger: has what the writer named, and gets the rest.
        places: members of the source for the fields of a node.
        listed: pointer of the source's list of messages.
        answered: pointer of an answer's list of blocks.
    """

    def __init__(self, ledger: LossLedger, places: PlaceMap, listed: str, answered: str = "") -> None:
        self.ledger = ledger
        self.places = places
        self.listed = listed
        self.answered = answered

    def _note(self, kind: Any, at: str, code: str, reason: str) -> None:
        if at and at not in self.ledger.named:
            self.ledger.note(kind, at, code, reason)

    def _at(self, at: str, field: str) -> str:
        member = self.places.get(field)
        return at if member is None else f"{at}/{member}"

    def requests(self, source: ir.Conversation, back: ir.Conversation) -> None:
        """Compare two requests."""
        self._messages(source.messages, back.messages)
        for message in source.messages:
            if message.role == "system" and message.at.startswith(self.listed) and "system" in self.places:
                self._note("degraded", self._at("", "system"), "shape", "system text of the list is part of the head")
        self._options(source, back)
        self._tools(source.tools, back.tools)
        if source.model is not None and back.model != source.model:
            self._note("dropped", "/model", "identity", "the model is said elsewhere")
        elif source.model is None and back.model is not None:
            self._note("synthesised", "/model", "required", "a request names its model here")

    def answers(self, source: ir.Answer, back: ir.Answer) -> None:
        """Compare two answers."""
        for candidate in source.candidates[len(back.candidates) :]:
            self._note("dropped", candidate.at, "candidates", "the target gives one answer")
        for one, other in zip(source.candidates, back.candidates, strict=False):
            first = one.message.parts[0].at if one.message.parts else ""
            self.listed = self.answered or first.rpartition("/")[0]
            self._messages((one.message,), (other.message,))
            self._candidate(one, other)
        for name in ("id", "model", "created"):
            value, found = getattr(source, name), getattr(back, name)
            at = self._at("", name)
            if value is not None and found != value:
                self._note("dropped", at, "identity", f"an answer has no such {name} here")
            elif type(value) is not type(found) and value is not None:
                self._note("degraded", at, "shape", "the same number in another form")
            elif value is None and found is not None:
                self._note("synthesised", at, "required", f"an answer has {name} here")
        if len(back.candidates) > len(source.candidates):
            self._note("synthesised", self._at("", "candidates"), "required", "an answer has a candidate here")
        if source.usage is None and back.usage is not None:
            self._note("synthesised", self._at("", "usage"), "required", "an answer has counters here")
        if source.usage is not None or back.usage is not None:
            self._usage(source.usage or ir.TokenCounts(at=self._at("", "usage")), back.usage or ir.TokenCounts())

    def _candidate(self, one: ir.Candidate, other: ir.Candidate) -> None:
        if one.stop is None and other.stop is not None:
            for at in (one.stop_at, self._at("", "stop_detail")):
                self._note("synthesised", at, "stop", f"the source did not say why it ended: {other.stop_raw}")
        if one.stop is not None and other.stop != one.stop:
            self._note("degraded", one.stop_at, "stop", f"{one.stop_raw or one.stop} became {other.stop}")
        elif one.stop_raw is not None and other.stop_raw != one.stop_raw:
            self._note("degraded", one.stop_at, "shape", f"{one.stop_raw} is said as {other.stop_raw} here")
        if one.stop_sequence is not None and other.stop_sequence != one.stop_sequence:
            at = f"{one.stop_at.rpartition('/')[0]}/stop_sequence"
            self._note("dropped", at, "stop", "the matched text is not said here")

    def _usage(self, one: ir.TokenCounts, other: ir.TokenCounts) -> None:
        for name in ("input", "output", "cache_read", "cache_write", "reasoning"):
            value, found = getattr(one, name), getattr(other, name)
            at = self._at(one.at, name)
            if value is None and found is not None:
                at = at.rpartition("/")[0] if at.count("/") > one.at.count("/") + 1 else at
                self._note("synthesised", at, "shape", "a counter that was not said is written as 0")
            elif value and found != value:
                self._note("dropped", at, "usage", "no such counter here")
            elif value is not None and found is None:
                self._note("dropped", at, "shape", "a counter of 0 is not said here")

    # Options and tools

    def _options(self, source: ir.Conversation, back: ir.Conversation) -> None:
        for name, value in source.options.items():
            at = source.options_at.get(name, f"/{name}")
            found = back.options.get(name)
            if found is None:
                self._note("dropped", at, "option", f"the target has no {name}")
            elif name == "response_format":
                self._format(value, found, at)
            elif not _same_option(name, value, found):
                self._note("degraded", at, "option_value", f"{name} has another value here")
        for name in back.options.keys() - source.options.keys():
            self._note("synthesised", self._at("", name), "required", f"the target says {name}")

    def _format(self, value: dict[str, Any], found: dict[str, Any], at: str) -> None:
        if value["type"] != found["type"]:
            self._note("degraded", at, "option_value", "another form of the answer")
        for key in sorted(value.keys() - {"type"}):
            if found.get(key) != value[key]:
                self._note("dropped", f"{at}/{key}", "option_value", f"a schema has no {key} here")
        if "name" in found and "name" not in value:
            self._note("synthesised", at, "required", "a schema has a name here")

    def _tools(self, source: tuple[ir.ToolSpec, ...], back: tuple[ir.ToolSpec, ...]) -> None:
        others = {tool.name: tool for tool in back if tool.kind != "server"}
        for tool in source:
            other = others.get(tool.name)
            if tool.kind == "server" or other is None:
                self._note("dropped", tool.at, "tool", f"{tool.name} is run by {self.ledger.source} itself")
                continue
            for name in ("description", "schema", "strict", "cache", "kind"):
                value, found = getattr(tool, name), getattr(other, name)
                if value != found and (value is not None or name == "strict"):
                    code, words = FIELDS[name]
                    if not value:
                        code, words = "shape", "no, said in words"
                    kind = "dropped" if value and not found else "degraded"
                    self._note(kind, tool.at, code, words)
        if any(tool.kind == "server" for tool in source[:-1]) and source[0].at:
            self._note("degraded", source[0].at.partition("/tools")[0] + "/tools", "shape", "later tools moved up")

    # Messages

    def _messages(self, source: tuple[ir.Message, ...], back: tuple[ir.Message, ...]) -> None:
        before, after = list(_units(source)), list(_units(back))
        found = _Pool(after)
        kept: list[tuple[str, list[Any]]] = []
        gone: list[ir.Part] = []
        for message, keys in before:
            stays: list[Any] = []
            for part, key in zip(message.parts, keys, strict=True):
                other = found.take(key)
                if other is None:
                    self._missing(part, found)
                    gone.append(part)
                else:
                    stays.append(key)
                    if not (is_bare(part) and type(other) is ir.Text):
                        self._part(part, other)
            kept.append((message.role, stays))
        if gone:
            self._shifted(source, gone)
        self._heads(source, back)
        self._order(kept, [(message.role, keys) for message, keys in after], source)

    def _missing(self, part: ir.Part, found: _Pool) -> None:
        text: str = getattr(part, "text", None) or ""
        if isinstance(part, ir.Text | ir.Refusal) and not part.text:
            self._note("dropped", part.at, "shape", "an empty text is no block here")
        elif isinstance(part, ir.Text | ir.Refusal) and text in found.text():
            self._note("degraded", part.at, "order", "it is part of another text here")
            for name in ("signature", "cache", "citations"):
                if getattr(part, name, None):
                    self._field(part, name, getattr(part, name), None)
        else:
            code, words = CODES.get(type(part), ("part", f"{type(part).__name__} has no counterpart here"))
            self._note("dropped", part.at, code, words)

    def _shifted(self, source: tuple[ir.Message, ...], gone: list[ir.Part]) -> None:
        """Report once for each list that blocks moved up in it, because others are missing."""
        held: dict[str, int] = {}
        for message in source:
            for part in message.parts:
                at = part.at
                while at:
                    at = at.rpartition("/")[0]
                    held[at] = held.get(at, 0) + 1
        for part in gone:
            listed, _, step = part.at.rpartition("/")
            if step.isdecimal() and held.get(listed, 0) > 1:
                self._note("degraded", listed, "shape", "blocks moved up in their list")

    def _part(self, part: ir.Part, other: ir.Part) -> None:
        if part is other:
            return
        if type(part) is not type(other):
            code = "media" if isinstance(part, ir.Media) else "part"
            self._note("degraded", part.at, code, f"a {type(part).__name__.lower()} is said as text here")
        for name in ("signature", "cache"):
            self._field(part, name, getattr(part, name), getattr(other, name))
        if isinstance(part, ir.Text):
            self._citations(part, other)
        elif isinstance(part, ir.ToolUse) and isinstance(other, ir.ToolUse):
            self._call(part, other)
        elif isinstance(part, ir.ToolOutput) and isinstance(other, ir.ToolOutput):
            self._result(part, other)
        elif isinstance(part, ir.Media) and isinstance(other, ir.Media):
            if part.kind == "audio":
                self._note("degraded", part.at, "shape", "the type of a sound is said in another word")
            self._media(part, other)

    def _media(self, part: ir.Media, other: ir.Media) -> None:
        labels = (other.name, other.title)
        for name in ("media_type", "detail", "name", "title", "transcript", "file_id"):
            value, found = getattr(part, name), getattr(other, name)
            if name == "media_type" and part.data is None and found is None and value is not None:
                self._note("dropped", part.at, "shape", "the type of an address is not said here")
            elif name in ("name", "title") and value in labels:
                self._field(part, name, value, value)
            else:
                self._field(part, name, value, found)

    def _field(self, part: ir.Part, name: str, value: Any, found: Any) -> None:
        if value is None and found is not None and name in ("detail", "media_type", "name", "title"):
            self._note("synthesised", part.at, "shape", f"the target says the {name}")
        if value is None or value == found:
            return
        code, words = FIELDS.get(name, ("citation", "not said here"))
        if name == "detail" and value == "auto":
            code = "shape"
        at = part.signature_at if name == "signature" and part.signature_at else self._at(part.at, name)
        self._note("dropped" if found is None else "degraded", at, code, words)

    def _citations(self, part: ir.Text, other: ir.Part) -> None:
        there = {(one.url, one.quote) for one in getattr(other, "citations", ())}
        urls = {url for url, _ in there}
        for citation in part.citations:
            if (citation.url, citation.quote) not in there:
                kind = "degraded" if citation.url in urls and citation.url is not None else "dropped"
                self._note(kind, citation.at, "citation", "not said here")

    def _call(self, part: ir.ToolUse, other: ir.ToolUse) -> None:
        if part.input != other.input:
            self._note("degraded", part.at, "arguments", "arguments that the target says in another form")
        elif part.text is not None and (other.text or json_text(other.input)) != part.text:
            self._note("degraded", part.at, "shape", "blanks or number forms in the text of the arguments")
        if part.name != other.name:
            self._note("degraded", part.at, "tool_field", "letters or length of the tool's name")
        if part.kind != other.kind:
            self._note("degraded", part.at, "tool", FIELDS["kind"][1])
        if part.id != other.id and not part.id_made:
            self._note("degraded", part.at, "identity", "letters or length of the call's id")

    def _result(self, part: ir.ToolOutput, other: ir.ToolOutput) -> None:
        if part.is_error and not other.is_error:
            self._note("dropped", part.at, "tool_field", "the target does not say that a result is an error")
        elif part.is_error != other.is_error:
            self._note("degraded", part.at, "shape", "no error, said in words")
        if part.name is not None and other.name != part.name:
            self._note("dropped", part.at, "shape", "the tool's name is known by the id of the call")
        if part.kind != other.kind:
            self._note("degraded", part.at, "shape", "the result of a tool of another kind")
        if (part.value is not None and part.value != other.value) or (part.flat is False and other.flat is not False):
            self._note("degraded", part.at, "shape", "the result is written in another form")
        if part.id != other.id and not part.id_made:
            self._note("degraded", part.at, "identity", "letters or length of the call's id")
        mine, theirs = ir.Message(role="tool", parts=part.content), ir.Message(role="tool", parts=other.content)
        if not _is_one_text(part.content, other.content):
            listed, self.listed = self.listed, mine.parts[0].at.rpartition("/")[0] if mine.parts else part.at
            self._messages((mine,), (theirs,))
            self.listed = listed

    def _heads(self, source: tuple[ir.Message, ...], back: tuple[ir.Message, ...]) -> None:
        """Compare what messages say beside their blocks."""
        same = len(source) == len(back)
        for place, message in enumerate(source):
            other = back[place] if same else None
            if message.name is not None and (other is None or other.name != message.name):
                self._note("dropped", f"{message.at}/name", "role", "a message has no name here")
            native = message.native_role
            if native is not None and (other is None or native != other.native_role) and native == "developer":
                self._note("degraded", f"{message.at}/role", "role", f"the role {native} became {message.role}")
                self._note("degraded", self.listed, "shape", "it is a system text now, which may be part of the head")
            if message.flat and other is not None and len(other.parts) > 1:
                at = next((part.at for part in message.parts if isinstance(part, ir.Text)), message.at)
                self._note("degraded", at, "shape", "a text is one block of a list here")
            if message.flat is False and other is not None and other.flat is not False:
                lists = Counter(part.at.rpartition("/")[0] for part in message.parts) or Counter((message.at,))
                for at in (at for at, count in lists.items() if count == 1 and at != self.listed):
                    self._note("degraded", at, "shape", "a list of one block is not told from a text here")

    def _order(
        self, before: list[tuple[str, list[Any]]], after: list[tuple[str, list[Any]]], source: tuple[ir.Message, ...]
    ) -> None:
        if not self.listed or before == after:
            return
        flat = [key for _, keys in before for key in keys]
        if flat == [key for _, keys in after for key in keys]:
            self._note("degraded", self.listed, "shape", "messages are parted in another way here")
            for message in source:
                if message.at and not message.at.startswith(self.listed):
                    self._note("degraded", message.at, "shape", "it is part of another message here")
        else:
            self._note("degraded", self.listed, "order", "blocks or messages stand in another order here")


def _is_one_text(mine: tuple[ir.Part, ...], theirs: tuple[ir.Part, ...]) -> bool:
    """Return whether both are the same bare text, or nothing at all."""
    if len(mine) != 1 or len(theirs) != 1:
        return not mine and not theirs
    return is_bare(mine[0]) and type(theirs[0]) is ir.Text and mine[0].text == theirs[0].text  # type: ignore[attr-defined]


def _same_option(name: str, value: Any, found: Any) -> bool:
    if name == "tool_choice":
        return bool(value["mode"] == found["mode"] and value.get("name") == found.get("name"))
    return bool(value == found)


class _Pool:
    """The blocks that were read back, to be found by their keys."""

    def __init__(self, units: list[tuple[ir.Message, list[Any]]]) -> None:
        self.parts: dict[Any, list[ir.Part]] = {}
        for message, keys in units:
            for part, key in zip(message.parts, keys, strict=True):
                self.parts.setdefault(key, []).append(part)
        for waiting in self.parts.values():
            waiting.reverse()
        self._said = [
            part.text for message, _ in units for part in message.parts if isinstance(part, ir.Text | ir.Refusal)
        ]
        self._text: str | None = None

    def take(self, key: Any) -> ir.Part | None:
        waiting = self.parts.get(key)
        return waiting.pop() if waiting else None

    def text(self) -> str:
        if self._text is None:
            self._text = "\n".join(self._said)
        return self._text


def _units(messages: tuple[ir.Message, ...]) -> Iterator[tuple[ir.Message, list[Any]]]:
    """Yield each message with the keys by which its blocks are found again."""
    calls: dict[str, int] = {}
    count = 0
    for message in messages:
        keys: list[Any] = []
        for part in message.parts:
            if isinstance(part, ir.ToolUse):
                calls[part.id] = count
                keys.append(("call", count))
                count += 1
            elif isinstance(part, ir.ToolOutput):
                keys.append(("result", calls.get(part.id, part.id)))
            else:
                keys.append(_key(part))
        yield message, keys


def _key(part: ir.Part) -> Any:
    if isinstance(part, ir.Text | ir.Refusal):
        return ("said", part.text)
    if isinstance(part, ir.Thinking):
        return ("thinking", part.text, part.redacted)
    if isinstance(part, ir.Media):
        words = part.data or part.url or part.file_id or part.transcript
        return ("said", part.text) if part.text is not None else ("media", part.kind, words)
    return ("native", id(part))


# Form -----------------------------------------------------------------------------------------------------------------

_ABSENT: Final = object()


def lose_forms(document: Json, canonical: Json, ledger: LossLedger) -> None:
    """Report where a document is written otherwise than its own dialect writes what it says."""
    for at in changed(document, canonical, ""):
        if not is_named(at, ledger.named):
            ledger.degrade(at, "shape", "how it was written is not known to the target")


def lose_empty(document: Json, ledger: LossLedger) -> None:
    """Report objects and lists of which nothing is left, because everything in them is named."""
    named = ledger.named
    waiting = list(named)
    gone: set[str] = set()
    """Members of lists that vanish, so that later ones move up."""
    while waiting:
        at, _, step = waiting.pop().rpartition("/")
        if not at or at in named:
            continue
        holder = resolved(document, at)
        if type(holder) not in (dict, list):
            continue
        keys = [str(key) for key in range(len(holder))] if type(holder) is list else list(map(escape, holder))
        left = [key for key in keys if f"{at}/{key}" not in named and key not in ("type", "role")]
        if not left or f"{at}/{step}" in gone:
            ledger.degrade(at, "shape", "nothing of it is left" if not left else "later members moved up")
            if not left:
                gone.add(at)
                waiting.append(at)


def resolved(document: Json, at: str) -> Json:
    """Return the value at a pointer, None when there is none."""
    for step in at.split("/")[1:]:
        if type(document) is dict:
            document = document.get(unescape(step))
        elif type(document) is list and step.isdecimal() and int(step) < len(document):
            document = document[int(step)]
        else:
            return None
    return document


def lose_words(document: dict[str, Json], written: Json, ledger: LossLedger, beside: frozenset[str]) -> None:
    """Report the values of a document's head that the target says in other words.

    Args:
        beside: members that blocks are compared in.
    """
    head = [
        (at, _hashable(leaf)) for key, value in document.items() if key not in beside
        for at, leaf in placed_leaves(value, f"/{escape(key)}")
        if at.rpartition("/")[2] not in ("type", "role", "object") and leaf not in (None, "")
        and not is_named(at, ledger.named)
    ]  # fmt: skip
    there = set(map(_hashable, _leaves(written))) if head else set()
    for at, leaf in head:
        if leaf not in there:
            ledger.degrade(at, "shape", "the target says it in other words")


def _hashable(leaf: Any) -> Any:
    return ("bool", leaf) if type(leaf) is bool else leaf


def placed_leaves(value: Json, at: str) -> Iterator[tuple[str, Any]]:
    """Yield pointer and value of everything that holds no other value."""
    if type(value) is dict:
        for key, inner in value.items():
            yield from placed_leaves(inner, f"{at}/{escape(key)}")
    elif type(value) is list:
        for place, inner in enumerate(value):
            yield from placed_leaves(inner, f"{at}/{place}")
    else:
        yield at, value


def _leaves(value: Json) -> list[Any]:
    """Return everything that holds no other value."""
    out: list[Any] = []
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if type(value) is dict:
            waiting += value.values()
        elif type(value) is list:
            waiting += value
        else:
            out.append(value)
    return out


def changed(before: Json, after: Json, at: str) -> Iterator[str]:
    """Yield the pointers at which two documents differ."""
    if before is after:
        return
    if type(before) is dict and type(after) is dict:
        if at.count("/") == 2 and before == after and encode(before, in_order=True) == encode(after, in_order=True):
            return  # a message that is written as it was read, which most are
        for key in (*before, *(key for key in after if key not in before)):
            yield from changed(before.get(key, _ABSENT), after.get(key, _ABSENT), f"{at}/{escape(key)}")
    elif type(before) is list and type(after) is list:
        for place in range(max(len(before), len(after))):
            old = before[place] if place < len(before) else _ABSENT
            new = after[place] if place < len(after) else _ABSENT
            yield from changed(old, new, f"{at}/{place}")
    elif type(before) is not type(after) or before != after:
        yield at


def is_named(at: str, named: set[str]) -> bool:
    """Return whether a pointer or one that holds it is named; the whole document's is not enough."""
    while at:
        if at in named:
            return True
        at = at.rpartition("/")[0]
    return False
