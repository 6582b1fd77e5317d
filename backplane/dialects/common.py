"""Provides functions for all dialects: JSON, members of an object, ids, options, counters, and notes of losses.

Nothing here belongs to one vendor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects import ir
from backplane.dialects.framing import UNREADABLE
from backplane.errors import TranslationError

NUMBER: Final = (int, float)
_UPPER: Final = re.compile(r"[A-Z]")
_MISSING: Final = object()
MADE_ID: Final = "call_made_"
"""Prefix of the ids that we make for calls without one; they are not written to the dialect that sent none."""

_encode_plain: Final = msgspec.json.Encoder().encode
_encode_sorted: Final = msgspec.json.Encoder(order="deterministic").encode
_decode: Final = msgspec.json.Decoder().decode


# JSON -----------------------------------------------------------------------------------------------------------------


def encode(value: Json, *, in_order: bool = False) -> bytes:
    """Encode a value; half a surrogate pair (a gateway cut a text there) becomes a `\\u` escape.

    Args:
        in_order: sort the members, so that equal bytes mean equal values; `1` and `1.0` stay different.
    """
    try:
        return (_encode_sorted if in_order else _encode_plain)(value)
    except (UnicodeEncodeError, OverflowError):
        return json.dumps(value, separators=(",", ":"), sort_keys=in_order).encode()


def json_text(value: Json) -> str:
    return encode(value).decode()


def parse_json(text: str) -> Json:
    """Parse JSON text; return None if it is invalid. (`null` gives None, too; it is never the arguments of a call.)"""
    try:
        return _decode(text)
    except UNREADABLE:
        return None


def read_arguments(text: str) -> Json:
    """Parse the arguments of a call; return an empty object if they are empty, the text itself if it is no JSON."""
    if not text:
        return {}
    value = parse_json(text)
    return text if value is None else value


def arguments_text(call: ir.ToolUse) -> str:
    """Return a call's arguments as text: the vendor's own text if it still decodes to `input`."""
    if call.text is not None and read_arguments(call.text) == call.input:
        return call.text
    return call.input if isinstance(call.input, str) else json_text(call.input)


@cache
def snake(name: str) -> str:
    """Return a member's name in snake_case."""
    return _UPPER.sub(lambda match: "_" + match[0].lower(), name)


def spelled_at(at: str, document: Json, aliases: Mapping[str, str] = {}) -> str:
    """Return a pointer with its names spelled as in the document: in snake_case, camelCase, or by another name.

    Args:
        aliases: name → its other name.
    """
    out = ""
    for step in at.split("/")[1:]:
        if type(document) is dict:
            if step not in document:
                words = {snake(step), snake(aliases.get(step, step))}
                step = next((name for name in document if snake(name) in words), step)
            document = document.get(step)
        elif type(document) is list and step.isdecimal() and int(step) < len(document):
            document = document[int(step)]
        else:
            document = None
        out += f"/{step}"
    return out


def escape(key: str) -> str:
    """Write a member's name as a step of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1") if "~" in key or "/" in key else key


def kind_of(value: Json, tag: str = "type") -> str | None:
    """Return an object's kind, the text in its member `tag`; None if that is missing or no text."""
    kind = value.get(tag) if type(value) is dict else None
    return kind if type(kind) is str else None


# Members --------------------------------------------------------------------------------------------------------------


def members_of(value: Json, at: str = "") -> dict[str, Any]:
    """Return a copy of an object, so that its members can be removed as they are read.

    Raises:
        TranslationError: `dialect_mapping_failed`, the value is no object.
    """
    if type(value) is not dict:
        fact = f"{at or 'the document'} is {_kind(value)}, not an object"
        raise TranslationError("dialect_mapping_failed", fact, hint="check --from and --kind")
    return value.copy()


def pop(rest: dict[str, Any], name: str, *kinds: type[Any]) -> Any:
    """Remove and return a member of exactly one of these types (default: text); else keep it and return None."""
    return rest.pop(name) if type(rest.get(name)) in (kinds or (str,)) else None


def pop_at(rest: dict[str, Any], path: str, *kinds: type[Any]) -> Any:
    """Remove and return a member like `pop`, by a path of names; an inner object that becomes empty is removed."""
    head, _, tail = path.partition("/")
    if not tail:
        return pop(rest, head, *kinds)
    inner = pop_inner(rest, head)
    found = pop_at(inner, tail, *kinds)
    put_back(rest, head, inner)
    return found


def put_at(out: dict[str, Any], path: str, value: Any) -> None:
    """Set a member by a path of names; missing objects on the path are made."""
    head, _, tail = path.partition("/")
    if tail:
        put_at(out.setdefault(head, {}), tail, value)
    else:
        out[head] = value


def pop_list(rest: dict[str, Any], name: str, at: str = "") -> list[Any]:
    """Remove and return a required list.

    Raises:
        TranslationError: `dialect_mapping_failed`, the member is no list.
    """
    if type(rest.get(name)) is not list:
        fact = f"{at}/{name} is {_kind(rest.get(name))}, not a list"
        raise TranslationError("dialect_mapping_failed", fact, hint="check --from and --kind")
    found: list[Any] = rest.pop(name)
    return found


def _kind(value: Json) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


def pop_inner(rest: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a copy of an inner object, empty if there is none; `put_back` stores what is left of it."""
    return dict(rest[name]) if type(rest.get(name)) is dict else {}


def put_back(rest: dict[str, Any], name: str, inner: dict[str, Any]) -> None:
    """Replace an inner object by its unread members; remove it if none is left."""
    if type(rest.get(name)) is dict and rest[name]:
        rest[name] = inner
        if not inner:
            del rest[name]


def ext_of(dialect: str, rest: dict[str, Any]) -> ir.Ext:
    """Return the unread members of an object as the `ext` of its node."""
    return {dialect: rest} if rest else {}


def merged(out: dict[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
    """Add members to `out` and to the objects in it, except those that it already has; return `out`."""
    for name, value in rest.items():
        if type(value) is dict and type(out.get(name)) is dict:
            merged(out[name], value)
        else:
            out.setdefault(name, value)
    return out


def without_none(members: dict[str, Any]) -> dict[str, Any]:
    """Return the members that are not None."""
    return {name: value for name, value in members.items() if value is not None}


def read_content(rest: dict[str, Any], name: str, at: str, read: Callable[[Json, str], ir.Part]) -> tuple[ir.Part, ...]:
    """Remove a member that is a text or a list of blocks; return it as blocks, each read by `read`."""
    if (text := pop(rest, name)) is not None:
        return (ir.Text(text=text, at=f"{at}/{name}"),)
    return tuple(read(block, f"{at}/{name}/{place}") for place, block in enumerate(pop(rest, name, list) or ()))


def read_part(
    dialect: str, value: Json, at: str, read: Callable[[str, dict[str, Any], str], ir.Part | None]
) -> ir.Part:
    """Read a block; a block of an unknown kind or without a required member stays native.

    Args:
        read: reads a block by its kind, and removes the members that it reads.
    """
    rest = value.copy() if type(value) is dict else {}
    kind = pop(rest, "type")
    cache = take_cache(rest)
    part = None if kind is None else read(kind, rest, at)
    if part is None:
        return ir.NativePart(dialect=dialect, label=str(kind), payload=value, at=at)
    return msgspec.structs.replace(part, cache=cache, at=at, ext=ext_of(dialect, rest))


class OptionsRead:
    """Collects the options of a request, and the JSON pointer to each.

    Args:
        rest: object from which the options with the same value in the neutral form are removed.
        table: path of a member → types of its value.
        names: path of a member → its option, where their names differ.
    """

    def __init__(
        self, rest: dict[str, Any], table: Mapping[str, tuple[type[Any], ...]], names: Mapping[str, str] = {}
    ) -> None:
        self.values: dict[str, Any] = {}
        self.places: dict[str, str] = {}
        for path, kinds in table.items():
            self.add(names.get(path, path), pop_at(rest, path, *kinds), f"/{path}")

    def add(self, name: str, value: Any, at: str) -> None:
        """Add an option; ignore None, and every value after the first."""
        if value is not None and name not in self.values:
            self.values[name], self.places[name] = value, at


def conversation_of(
    dialect: str, rest: dict[str, Any], messages: Iterable[ir.Message], options: OptionsRead,
    read_tools: Callable[[Json, str], Iterable[ir.ToolSpec]],
) -> ir.Conversation:  # fmt: skip
    """Return the conversation of a request; `rest` without its model and tools becomes its `ext`.

    Args:
        read_tools: reads one element of the list of tools.
    """
    found = pop(rest, "tools", list) if rest.get("tools") else ()  # an empty list stays, so that it is written again
    tools = tuple(tool for place, one in enumerate(found or ()) for tool in read_tools(one, f"/tools/{place}"))
    return ir.Conversation(
        dialect=dialect, messages=tuple(messages), model=pop(rest, "model"), tools=tools, options=options.values,
        options_at=options.places, ext=ext_of(dialect, rest),
    )  # fmt: skip


def tool_of(
    dialect: str, rest: dict[str, Any], at: str, kind: Any = "function", inner: str = "", schema: str = "parameters"
) -> ir.ToolSpec | None:
    """Read a tool that the caller runs; None if it has no name.

    Args:
        inner: member that contains the others; empty if they are in `rest` itself.
        schema: member with the schema of its arguments.
    """
    body = pop_inner(rest, inner) if inner else rest
    if (name := pop(body, "name")) is None:
        return None
    text, strict = pop(body, "description"), pop(body, "strict", bool)
    found = pop(body, schema, dict) if kind == "function" else None
    if inner:
        put_back(rest, inner, body)
    return ir.ToolSpec(
        name=name, description=text, schema=found, strict=strict, kind=kind, cache=take_cache(rest), at=at,
        ext=ext_of(dialect, rest),
    )  # fmt: skip


def server_tool(value: Json, at: str) -> ir.ToolSpec:
    """Return a tool that the vendor runs, with its native definition; if it has no name, its kind becomes its name."""
    words = (value.get("name"), value.get("type"), *value) if type(value) is dict else ("unreadable",)
    return ir.ToolSpec(name=str(next(filter(None, words), "empty")), kind="server", payload=value, at=at)


def head_of(conversation: ir.Conversation, notes: LossLedger) -> dict[str, Any]:
    """Return a request with only its model; if another dialect's request names no model, this is `unknown`."""
    model = conversation.model if notes.is_home else conversation.model or "unknown"
    return {} if model is None else {"model": model}


def write_part(part: ir.Part, notes: LossLedger, write: Callable[[ir.Part, LossLedger], dict[str, Any] | None]) -> Json:
    """Write a block with its native members; if `write` returns None, note that the target has no such block."""
    if isinstance(part, ir.NativePart) and part.dialect == notes.target:
        return part.payload
    out = write(part, notes)
    if out is None:
        notes.lose_part(part)
        return None
    return notes.own(out, part)


def write_parts(parts: Iterable[ir.Part], write: Callable[[ir.Part], Json]) -> list[Json]:
    """Write blocks; those that the target does not have are omitted."""
    return [block for part in parts if (block := write(part)) is not None]


def write_content(parts: Iterable[ir.Part], write: Callable[[ir.Part], Json]) -> Json:
    """Write blocks as a `content`: a text if there is a single text block without other members, else a list."""
    made = write_parts(parts, write)
    is_bare = len(made) == 1 and type(made[0]) is dict and made[0].keys() == {"type", "text"}
    return made[0]["text"] if is_bare else made


class Calls:
    """Makes ids for calls without one, and finds the id for a result by the tool's name."""

    def __init__(self) -> None:
        self.made = 0
        self._open: dict[str, list[str]] = {}

    def make(self, name: str) -> str:
        made = f"{MADE_ID}{self.made}"
        self.made += 1
        self._open.setdefault(name, []).append(made)
        return made

    def answer(self, name: str) -> str:
        waiting = self._open.get(name)
        return waiting.pop(0) if waiting else f"{MADE_ID}unknown_{name}"


def media_url(media: ir.Media) -> str | None:
    """Return the data of media as a data URL, or else their URL; None if they have neither."""
    if media.data is not None:
        return f"data:{media.media_type or 'application/octet-stream'};base64,{media.data}"
    return media.url


def read_url(url: str, field: str = "url") -> dict[str, Any]:
    """Return the media type and data of a data URL as fields; any other text becomes the field `field`."""
    head, found, body = url.partition(";base64,")
    return {"media_type": head[5:], "data": body} if found and head[:5] == "data:" else {field: url}


MediaTable = Mapping[str, frozenset[str | None] | None]
"""The media that a vendor accepts from others: kind and source (`image/url`) → media types, or None for any type.

For `…/file_id`, the value is not media types but the dialects whose files the vendor can open.
"""


def takes(part: ir.Media, table: MediaTable, notes: LossLedger) -> bool:
    """Return True if the target accepts a block of media; always True if source and target are equal."""
    source = next((name for name in ("data", "url", "file_id", "text") if getattr(part, name) is not None), "")
    types = table.get(f"{part.kind}/{source}", frozenset())
    if notes.is_home or not source:
        return notes.is_home
    if source == "url" and not (part.url or "").startswith(("http:", "https:")):
        return False
    return types is None or (notes.source if source == "file_id" else part.media_type) in types


def read_file(data: str) -> dict[str, Any]:
    """Return fields of `ir.Media` for a file's data: a data URL, base64, or a URL that a gateway sent as data."""
    return read_url(data, "url" if data.startswith(("http://", "https://")) else "data")


def take_cache(rest: dict[str, Any], name: str = "cache_control") -> dict[str, Any] | None:
    """Remove and return a breakpoint of the prompt cache, without its type; None if there is none."""
    found = rest.get(name)
    if type(found) is not dict or found.get("type") != "ephemeral":
        return None
    del rest[name]
    return {key: value for key, value in found.items() if key != "type"}


# Notes ----------------------------------------------------------------------------------------------------------------


class LossLedger:
    """Collects the losses while one document is read or written.

    Args:
        source: dialect of the document that the pointers point into.
        target: dialect of the document to write; the same as `source` while reading.
        is_answer: True if the document is an answer, False if it is a request.
        places: option → JSON pointer to it.
    """

    def __init__(
        self, source: str, target: str, *, is_answer: bool = False, places: Mapping[str, str] = {}
    ) -> None:  # fmt: skip
        self.source = source
        self.places = places
        self.target = target
        self.is_answer = is_answer
        self.is_home: bool = source == target
        self.losses: list[ir.Loss] = []
        self.named: set[str] = set()
        """JSON pointers of the losses so far."""
        self.refusals: list[tuple[str, ir.Loss]] = []

    def own(self, out: dict[str, Any], node: ir.Node) -> dict[str, Any]:
        """Add a node's native members to `out` if the node was read from the target; members that `out` has stay."""
        return merged(out, node.ext[self.target]) if self.is_home and self.target in node.ext else out

    def note(self, kind: ir.LossKind, path: str, code: str, reason: str, value: Any = _MISSING) -> ir.Loss:
        size = None if value is _MISSING else len(encode(value))
        loss = ir.Loss(
            path=path, dialect=self.source, target=self.target, kind=kind, code=code, reason=reason, size_chars=size
        )
        self.add((loss,))
        return loss

    def add(self, losses: Iterable[ir.Loss]) -> None:
        """Add losses to the ledger."""
        for loss in losses:
            self.losses.append(loss)
            self.named.add(loss.path)

    def drop(self, path: str, code: str, reason: str, value: Any = _MISSING) -> None:
        self.note("dropped", path, code, reason, value)

    def degrade(self, path: str, code: str, reason: str, value: Any = _MISSING) -> None:
        self.note("degraded", path, code, reason, value)

    def synthesise(self, path: str, code: str, reason: str) -> None:
        self.note("synthesised", path, code, reason)

    def refuse(self, path: str, code: str, reason: str, error: str = "mapping_unsupported_capability") -> None:
        """Note what the target cannot express without a change of meaning; `done` then raises the code `error`."""
        self.refusals.append((error, self.note("refused", path, code, reason)))

    def option_at(self, name: str) -> str:
        """Return the JSON pointer to an option in the source."""
        return self.places.get(name, f"/{name}")

    def lose_option(self, name: str, value: Any, reason: str | None = None) -> None:
        """Note an option that the target does not have, or whose value it does not accept."""
        code = "candidates" if name == "n" else "option" if reason is None else "option_value"
        words = "the target gives one answer" if name == "n" else reason or f"the target has no {name}"
        self.drop(self.option_at(name), code, words, value)

    def lose_options(self, left: Mapping[str, Any]) -> None:
        """Note the options that the target does not have."""
        for name, value in left.items():
            self.lose_option(name, value)

    def change_option(self, name: str, value: Any, reason: str) -> None:
        """Note an option whose value is changed for the target."""
        self.degrade(self.option_at(name), "option_value", reason, value)

    def bounded(self, name: str, value: Any, least: Any = None, most: Any = None) -> Any:
        """Return a number within the server's limits, and note a change; keep it if source and target are equal.

        Args:
            least: smallest number that the server accepts; None for no limit.
            most: greatest number that the server accepts; None for no limit.
        """
        found = value
        if not self.is_home and least is not None and value < least:
            found = least
            self.change_option(name, value, f"the least here is {least}")
        elif not self.is_home and most is not None and value > most:
            found = most
            self.change_option(name, value, f"the most here is {most}")
        return found

    def done(self) -> tuple[ir.Loss, ...]:
        """Return the losses.

        Raises:
            TranslationError: `refuse` was called; `evidence` has each pointer and code.
        """
        if self.refusals:
            error, first = self.refusals[0]
            raise TranslationError(
                error,
                f"{self.target} cannot take {first.path or '/'}: {first.reason}",
                hint="send it to the dialect it was written for, or take this out of it",
                evidence="; ".join(f"{loss.path} {loss.code}" for _, loss in self.refusals),
            )
        return tuple(self.losses)

    def lose_part(self, part: ir.Part, reason: str | None = None) -> None:
        """Report a block that the target does not have."""
        code, words = CODES.get(type(part), ("part", f"{type(part).__name__} has no counterpart here"))
        if isinstance(part, ir.NativePart) and part.is_tool:
            code, words = "tool", f"{part.label} was run by {self.source} itself"
        elif isinstance(part, ir.NativePart):
            words = f"{part.label} has no counterpart"
        found = getattr(part, "payload", None) or getattr(part, "text", None) or getattr(part, "data", None)
        self.drop(part.at, code, reason or words, found)

    def lose_candidates(self, answer: ir.Answer) -> None:
        """Note the loss of all answers after the first, for a dialect whose responses have one answer."""
        for lost in answer.candidates[1:]:
            self.drop(lost.at, "candidates", "the target gives one answer")

    def plain_text(self, parts: Iterable[ir.Part]) -> str:
        """Return the blocks of a result or system message as one text, for a dialect that accepts only text."""
        parts = tuple(parts)
        for part in parts:
            if not isinstance(part, ir.Text):
                self.lose_part(part)
        return "\n".join(part.text for part in parts if isinstance(part, ir.Text))


CODES: Final[dict[type[Any], tuple[str, str]]] = {
    ir.Thinking: ("thinking", "the target takes no such thinking"),
    ir.Media: ("media", "the target takes no media in this form"),
}
"""Kind of block → code and reason of the loss if the target lacks it; other kinds get "no counterpart"."""


def item_of(at: str) -> str:
    """Return the JSON pointer to the item that contains the block at this pointer."""
    return at.rpartition("/content")[0] or at


def write_options(
    left: dict[str, Any], members: Iterable[str], notes: LossLedger,
    names: Mapping[str, str] = {}, bounds: Mapping[str, tuple[Any, Any]] = {},
    known: Mapping[str, frozenset[Any]] = {}, stops_max: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Remove options whose value is the same in the target from `left`, and return them as members.

    Args:
        members: paths of the vendor's members.
        names: path of a member → its option, where their names differ.
        bounds: path → least and greatest value that the server accepts.
        known: option → values that the server accepts.
        stops_max: maximum number of stop sequences; None for any number.
    """
    out: dict[str, Any] = {}
    for member in members:
        name = names.get(member, member)
        if (value := left.pop(name, None)) is None:
            continue
        if notes.is_home:
            pass
        elif name in known and value not in known[name]:
            notes.lose_option(name, value, f"no such {name} here")
            continue
        elif name == "metadata" and not all(type(label) is str for label in value.values()):
            notes.lose_option(name, value, "labels are texts here")
            continue
        elif name == "stop" and stops_max is not None and len(value) > stops_max:
            notes.lose_option(name, list(value[stops_max:]), f"more than {stops_max} are refused here")
            value = value[:stops_max]
        else:
            value = notes.bounded(name, value, *bounds.get(member, ()))
        # A tuple marks a stop sequence that the source wrote as a text, without a list.
        is_bare = type(value) is tuple and notes.is_home
        put_at(out, member, (value[0] if is_bare else list(value)) if name == "stop" else value)
    return out


EFFORT_BUDGETS: Final[dict[str, int]] = {
    "none": 0, "minimal": 1024, "low": 2048, "medium": 8192, "high": 24_576, "xhigh": 32_768, "max": 65_536,
}  # fmt: skip
"""Effort level → tokens for thinking, for vendors that have only levels or only budgets. The vendors publish no such
table; these are the budgets that their own agents set for such levels."""


def effort_word(budget: int, conversation: ir.Conversation, notes: LossLedger) -> str | None:
    """Return the effort level for a thinking budget (the target has no budgets); None if the request has a level."""
    if "reasoning_effort" in conversation.options:
        notes.lose_option("reasoning_budget", budget, "the target has the effort in words only")
        return None
    fit = (word for word, tokens in EFFORT_BUDGETS.items() if tokens >= budget)
    word = next(fit, "max") if budget >= 0 else "medium"
    notes.change_option("reasoning_budget", budget, f"tokens for thinking became the word {word}")
    return word


def by_address(one: ir.Citation, part: ir.Text, notes: LossLedger) -> ir.Citation | None:
    """Return another vendor's citation as a URL with a span in the text; if it has no URL, note a loss, return None."""
    if one.url is None:
        notes.drop(one.at, "citation", "only an address can be cited here")
        return None
    changes: dict[str, Any] = {"title": one.url if one.title is None else one.title}
    if one.start is None or one.end is None:
        changes |= {"start": 0, "end": len(part.text)}
        notes.degrade(one.at, "citation", "its span here is the text that it stands on")
    if one.quote is not None:
        notes.drop(one.at, "citation", "the words cited are not said here", one.quote)
    return msgspec.structs.replace(one, **changes)


# Counters -------------------------------------------------------------------------------------------------------------


class Counters(msgspec.Struct, frozen=True):
    """Reads and writes a vendor's token counters; the neutral counters follow the rule of `ir.TokenCounts`."""

    table: Mapping[str, str]
    """Path of a native member → field of `ir.TokenCounts`."""
    total: str = "total_tokens"
    """Member with the sum of input and output, which is computed again; empty if the vendor has none."""
    needed: tuple[str, ...] = ()
    """Fields that the vendor requires; a count that another vendor's answer does not have is written as 0."""
    apart: Mapping[str, tuple[str, ...]] = {}
    """Field → fields whose tokens this vendor does not include in it."""
    also: Mapping[str, str] = {}
    """Field → path of another member, in which some servers send it."""
    beside_input: str = ""
    """Member, kept native, with input tokens that the vendor does not include in its input counter."""

    def read(self, value: dict[str, Any], at: str, dialect: str) -> ir.TokenCounts:
        """Read a vendor's token counters; counters that are not in `table` stay native."""
        rest = value.copy()
        fields: dict[str, Any] = {field: pop_at(rest, path, int) for path, field in self.table.items()}
        for field, path in self.also.items():
            if fields[field] is None:
                fields[field] = pop_at(rest, path, int)
        beside = self._beside(rest)
        for field, parts in self.apart.items():
            more = [fields[part] for part in parts if fields[part] is not None]
            if fields[field] is not None or (field == "output" and more):
                fields[field] = (fields[field] or 0) + sum(more)
        if beside:
            fields["input"] = (fields["input"] or 0) + beside
        total = (fields.get("input") or 0) + (fields["output"] or 0)
        thought = fields.get("reasoning") or 0
        if thought and "output" not in self.apart and rest.get(self.total) == total + thought:
            # Some gateways do not include thinking in the output.
            fields["output"], total = (fields["output"] or 0) + thought, total + thought
        if self.total and type(rest.get(self.total)) is int and rest[self.total] == total:
            del rest[self.total]
        return ir.TokenCounts(**fields, at=at, ext=ext_of(dialect, rest))

    def _beside(self, rest: Mapping[str, Any]) -> int:
        found = rest.get(self.beside_input)
        return found if type(found) is int else 0

    def native(self, usage: ir.TokenCounts, field: str, home: str) -> int | None:
        """Return a token count as this vendor counts it; None if unknown.

        Args:
            home: name of the vendor's dialect if `usage` was read from it, else empty.
        """
        value: int | None = getattr(usage, field)
        apart = sum(getattr(usage, part) or 0 for part in self.apart.get(field, ()))
        apart += self._beside(usage.ext.get(home, {})) if field == "input" else 0
        if value is None or not apart:
            return value
        return value - apart if home else max(0, value - apart)

    def write(self, usage: ir.TokenCounts, notes: LossLedger) -> dict[str, Any]:
        """Return the vendor's token counters; unknown counts are omitted, except those in `needed`."""
        out: dict[str, Any] = {}
        for path, field in self.table.items():
            value = self.native(usage, field, notes.target if notes.is_home else "")
            value = 0 if value is None and field in self.needed and not notes.is_home else value
            if value is not None:
                put_at(out, path, value)
        notes.own(out, usage)
        if self.total:
            out.setdefault(self.total, (usage.input or 0) + (usage.output or 0))  # `output` includes thinking
        return out


def answer_of(
    dialect: str, rest: dict[str, Any], candidates: tuple[ir.Candidate, ...], counters: Counters,
    usage: str = "usage", id: str = "id", model: str = "model", created: str = "",
) -> ir.Answer:  # fmt: skip
    """Return the answer of a response; members that are not read become its `ext`.

    Args:
        created: member with the seconds since 1970; empty if the vendor has none.
    """
    error, found = rest.get("error"), pop(rest, usage, dict)
    words = error.get("message") if type(error) is dict else error
    return ir.Answer(
        dialect=dialect, candidates=candidates, error=words if type(words) is str else None, id=pop(rest, id),
        model=pop(rest, model), created=pop(rest, created, int, float),
        usage=None if found is None else counters.read(found, f"/{usage}", dialect), ext=ext_of(dialect, rest),
    )  # fmt: skip
