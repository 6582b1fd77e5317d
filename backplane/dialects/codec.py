"""The engine under all dialects: members taken from a vendor's objects, tables read both ways, losses noted.

A vendor's file holds tables and a few functions; everything that two vendors would write alike is here.
No vendor's words are here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from backplane import ir
from backplane.contract.canonical import Json
from backplane.dialects.framing import UNREADABLE
from backplane.errors import TranslationError

NUMBER: Final = (int, float)
ANY: Final = (dict, list, str, int, float, bool)
MADE_ID: Final = "call_made_"
"""Beginning of an id that was made here; its own dialect never gets it."""

_MISSING: Final = object()
_DATA_URL: Final = re.compile(r"data:([^;,]+);base64,")
_UPPER: Final = re.compile(r"[A-Z]")
_encode_plain: Final = msgspec.json.Encoder().encode
_encode_sorted: Final = msgspec.json.Encoder(order="deterministic").encode
_decode: Final = msgspec.json.Decoder().decode


# JSON -----------------------------------------------------------------------------------------------------------------


def encode(value: Json) -> bytes:
    """Encode a value; half a surrogate pair, where a gateway cut a text, gets Python's own escape."""
    try:
        return _encode_plain(value)
    except (UnicodeEncodeError, OverflowError):
        return json.dumps(value, separators=(",", ":")).encode()


def encode_sorted(value: Json) -> bytes:
    """Encode a value with its members in order, so that the same bytes are the same JSON, forms of numbers included."""
    try:
        return _encode_sorted(value)
    except (UnicodeEncodeError, OverflowError):
        return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def json_text(value: Json) -> str:
    return encode(value).decode()


def parse_json(text: str) -> Json:
    """Parse JSON text; return None when it is none. Arguments of a call are never the JSON null."""
    try:
        return _decode(text)
    except UNREADABLE:
        return None


def read_arguments(text: str) -> Json:
    """Return what the text says; the text itself where it is no JSON, an empty object where it is empty."""
    if not text:
        return {}
    value = parse_json(text)
    return text if value is None else value


def arguments_text(call: ir.ToolUse) -> str:
    """Return the arguments as text: the vendor's own where they still say the same."""
    if call.text is not None and read_arguments(call.text) == call.input:
        return call.text
    return call.input if isinstance(call.input, str) else json_text(call.input)


def arguments_object(call: ir.ToolUse, ledger: Ledger) -> Json:
    """Return the arguments for a dialect that takes only objects."""
    if type(call.input) is dict or ledger.is_home:
        return call.input
    name = "input" if call.kind == "custom" else "arguments"
    ledger.degrade(call.at, "arguments", f"no JSON object; it stands in the member {name}", call.input)
    return {name: call.input}


def snake(name: str) -> str:
    """Spell a member's name in snake_case."""
    return _UPPER.sub(lambda match: "_" + match[0].lower(), name)


def escape(key: str) -> str:
    """Write a member's name as a step of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1") if "~" in key or "/" in key else key


def unescape(step: str) -> str:
    return step.replace("~1", "/").replace("~0", "~") if "~" in step else step


def kind_of(value: Json) -> str | None:
    """Return what an object says that it is; None when it says nothing readable."""
    kind = value.get("type") if type(value) is dict else None
    return kind if type(kind) is str else None


def put(out: dict[str, Any], path: str, value: Any, *, anew: bool = True) -> None:
    """Write a value at a path of members.

    Args:
        anew: replace what stands there already.
    """
    *steps, last = path.split("/")
    for step in steps:
        inner = out.setdefault(unescape(step), {})
        if type(inner) is not dict:
            return
        out = inner
    if anew:
        out[unescape(last)] = value
    else:
        out.setdefault(unescape(last), value)


# Reading --------------------------------------------------------------------------------------------------------------


class Members:
    """A vendor's object while its members are taken; what remains goes to the node's `ext`.

    Args:
        value: the object.
        at: JSON pointer to it.
        spell: members are found in snake_case, too.

    Raises:
        TranslationError: `dialect_mapping_failed`, it is no object.
    """

    __slots__ = ("at", "below", "rest", "spell")

    def __init__(self, value: Json, at: str, *, spell: bool = False) -> None:
        if type(value) is not dict:
            fact = f"{at or 'the document'} is {_kind(value)}, not an object"
            raise TranslationError("dialect_mapping_failed", fact, hint="check --from and --kind")
        self.rest = value.copy()
        self.at = at
        self.spell = spell
        self.below: dict[str, Members] | None = None

    def find(self, name: str) -> str:
        """Return the spelling of a member that is there."""
        if self.spell and name not in self.rest and (other := snake(name)) in self.rest:
            return other
        return name

    def inner(self, name: str) -> Members | None:
        """Return a member that is an object, to take its members; None when it is none."""
        if self.below is not None and name in self.below:
            return self.below[name]
        key = self.find(name)
        if type(self.rest.get(key)) is not dict:
            return None
        made = Members(self.rest.pop(key), f"{self.at}/{key}", spell=self.spell)
        self.below = {**(self.below or {}), name: made}
        return made

    def take(self, path: str, *kinds: type[Any]) -> Any:
        """Take a member that is exactly of one of these types (text if none is given); else it stays."""
        if "/" in path:
            head, _, tail = path.partition("/")
            inner = self.inner(head)
            return None if inner is None else inner.take(tail, *kinds)
        value = self.rest.get(path)
        if value is None and self.spell:
            path = self.find(path)
            value = self.rest.get(path)
        if type(value) in (kinds or (str,)):
            del self.rest[path]
            return value
        return None

    def need(self, name: str) -> list[Any]:
        """Take a list that the document cannot be read without."""
        value: list[Any] | None = self.take(name, list)
        if value is None:
            fact = f"{self.at}/{name} is {_kind(self.rest.get(name))}, not a list"
            raise TranslationError("dialect_mapping_failed", fact, hint="check --from and --kind")
        return value

    def skip(self, name: str, value: Json) -> None:
        """Take a member that always says this."""
        key = self.find(name)
        found = self.rest.get(key, _MISSING)
        if type(found) is type(value) and found == value:
            del self.rest[key]

    def place(self, path: str) -> str:
        """Return the pointer of a member; asked before it is taken."""
        head, _, tail = path.partition("/")
        if tail and (inner := self.inner(head)) is not None:
            return inner.place(tail)
        return f"{self.at}/{self.find(head)}" + (f"/{tail}" if tail else "")

    def left(self) -> dict[str, Any]:
        """Return what was not taken, by paths."""
        out = {escape(key): value for key, value in self.rest.items()}
        for inner in (self.below or {}).values():
            head = inner.at.rpartition("/")[2]
            out |= {f"{head}/{key}": value for key, value in inner.left().items()}
        return out

    def ext(self, dialect: str) -> ir.Ext:
        """Return what was not taken as the extension slot of a node."""
        if not self.rest and self.below is None:
            return {}
        left = self.left()
        return {dialect: left} if left else {}


def _kind(value: Json) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


class Calls:
    """Ids for calls without one: made in order, found again by name.

    Args:
        given: the ids to give, for reading an object again.
    """

    def __init__(self, given: Iterable[str] = ()) -> None:
        self.made = 0
        self._open: dict[str, list[str]] = {}
        self._given = iter(given)

    def make(self, name: str) -> str:
        made = next(self._given, f"{MADE_ID}{self.made}")
        self.made += 1
        self._open.setdefault(name, []).append(made)
        return made

    def answer(self, name: str) -> str:
        if (given := next(self._given, None)) is not None:
            return given
        waiting = self._open.get(name)
        return waiting.pop(0) if waiting else f"{MADE_ID}unknown_{name}"


def calls_of(message: ir.Message) -> Calls:
    """Return the made ids of a message, to read it again."""
    return Calls(getattr(part, "id", "") for part in message.parts if getattr(part, "id_made", False))


def parse_data_url(url: str) -> tuple[str, str] | None:
    """Return media type and base64 of a data URL, None for any other."""
    match = _DATA_URL.match(url)
    return None if match is None else (match[1], url[match.end() :])


def media_url(media: ir.Media) -> str | None:
    """Return a URL for data or the URL itself, None when there is neither."""
    if media.data is not None:
        return f"data:{media.media_type or 'application/octet-stream'};base64,{media.data}"
    return media.url


def read_url(url: str) -> dict[str, Any]:
    """Return the fields of media that a URL says."""
    data = parse_data_url(url)
    return {"url": url} if data is None else {"media_type": data[0], "data": data[1]}


def read_content(
    members: Members, name: str, read: Callable[[Json, str], ir.Part]
) -> tuple[tuple[ir.Part, ...], bool | None]:
    """Take a content that is one text or a list of blocks; which of both it was is `Message.flat`."""
    at = members.place(name)
    if (text := members.take(name)) is not None:
        return (ir.Text(text=text, at=at),), True
    if (blocks := members.take(name, list)) is not None:
        return tuple(read(block, f"{at}/{place}") for place, block in enumerate(blocks)), False
    return (), None


def is_plain(parts: tuple[ir.Part, ...]) -> bool:
    """Return whether these parts are one text and nothing beside it, so that a plain string says the same."""
    if len(parts) != 1 or type(part := parts[0]) is not ir.Text:
        return False
    if part.citations or part.cache is not None or part.signature is not None:
        return False
    return not any(
        value not in (None, []) and path[:3] != "../"
        for entries in part.ext.values() for path, value in entries.items()
    )  # fmt: skip


# Losses of one direction ----------------------------------------------------------------------------------------------

Kin = Mapping[str, Mapping[str, type[Any]]]
"""Dialect of the same family → the members that the target takes from it, and of which type."""


class Ledger:
    """The losses of one direction; made by whoever reads or writes a document.

    Args:
        source: the dialect that the pointers are of.
        target: the dialect that is written; the same as `source` while reading.
    """

    def __init__(self, source: str, target: str, kin: Kin | None = None) -> None:
        self.source = source
        self.target = target
        self.kin = kin or {}
        self.is_home: bool = source == target
        self.keeps_raw = True
        """Whether a node that nobody changed is written as it was read, by its own dialect."""
        self.losses: list[ir.Loss] = []
        self.refusals: list[tuple[str, ir.Loss]] = []

    def note(self, kind: ir.LossKind, path: str, code: str, reason: str, value: Any = _MISSING) -> ir.Loss:
        size = None if value is _MISSING else len(encode(value))
        loss = ir.Loss(
            path=path, dialect=self.source, target=self.target, kind=kind, code=code, reason=reason, size_chars=size
        )
        self.losses.append(loss)
        return loss

    def drop(self, path: str, code: str, reason: str, value: Any = _MISSING) -> None:
        self.note("dropped", path, code, reason, value)

    def degrade(self, path: str, code: str, reason: str, value: Any = _MISSING) -> None:
        self.note("degraded", path, code, reason, value)

    def synthesise(self, path: str, code: str, reason: str) -> None:
        self.note("synthesised", path, code, reason)

    def refuse(self, path: str, code: str, reason: str, error: str = "mapping_unsupported_capability") -> None:
        """Note what the target cannot say without changing its meaning; `done` raises it."""
        self.refusals.append((error, self.note("refused", path, code, reason)))

    def done(self) -> tuple[ir.Loss, ...]:
        """Return the losses.

        Raises:
            TranslationError: something was refused; `evidence` names each pointer and code.
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


def put_ext(node: ir.Node, out: dict[str, Any], ledger: Ledger) -> None:
    """Write a node's own members back; those of another dialect become losses."""
    for dialect, entries in node.ext.items():
        kin = entries if dialect == ledger.target else ledger.kin.get(dialect, {})
        for path, value in entries.items():
            if path in kin and (kin is entries or type(value) is kin[path]):
                if not path.startswith("../"):
                    put(out, path, value, anew=False)
            else:
                lose_ext(node, path, value, ledger)


def lose_ext(node: ir.Node, path: str, value: Json, ledger: Ledger) -> None:
    """Report a member that only the source knows; a path with `..` is of the item that holds the block."""
    at = f"{node.at}/{path}" if path[:3] != "../" else f"{item_of(node.at)}/{path[3:]}"
    if value is None or value == [] or value == {}:
        ledger.drop(at, "shape", "nothing, said in words", value)
    else:
        ledger.drop(at, "extension", f"only {ledger.source} knows it", value)


def item_of(at: str) -> str:
    """Return the pointer of the item that holds a block."""
    return at.rpartition("/content")[0] or at


def unchanged(node: ir.Node, ledger: Ledger, read: Callable[[], ir.Node | None]) -> bool:
    """Return whether a node may be written as it was read: home, and reading it again yields this very node."""
    return ledger.is_home and ledger.keeps_raw and node.raw is not None and read() == node


# Blocks by table ------------------------------------------------------------------------------------------------------


class Block(msgspec.Struct, frozen=True):
    """One kind of block: a row of a vendor's table, read in both directions."""

    kind: str
    """The vendor's word for it, in `type`."""
    node: type[ir.Part]
    members: Mapping[str, str]
    """Native path → portable field; one that ends with `!` must be there, in both directions."""
    fixed: Mapping[str, Any] = {}
    """Portable fields that this kind always has."""
    types: Mapping[str, tuple[type[Any], ...]] = {}
    """Portable field → types of its native value, where it is no text."""
    read: Callable[[Members, dict[str, Any]], bool] | None = None
    """Reads more members into the fields; False when the block is unreadable."""
    write: Callable[[Any, dict[str, Any], Ledger], bool] | None = None
    """Writes more members; False when the target cannot take this part."""
    is_written: bool = True
    """Whether parts of other vendors are written as this kind."""


class Blocks:
    """A vendor's table of blocks.

    Args:
        dialect: names the `ext` of the nodes.
        cache: member that holds a breakpoint of the prompt cache.
        ttls: times to live that the server takes of other vendors' breakpoints; empty where it takes none.
    """

    def __init__(self, dialect: str, rows: tuple[Block, ...], *, cache: str = "", ttls: tuple[Any, ...] = ()) -> None:
        self.dialect = dialect
        self.cache = cache
        self.ttls = ttls
        self.by_kind: dict[Any, Block] = {row.kind: row for row in rows}
        self.by_node: dict[type[ir.Part], list[Block]] = {}
        for row in rows:
            self.by_node.setdefault(row.node, []).append(row)

    def read(self, value: Json, at: str) -> ir.Part | None:
        """Read a block; None when its kind is unknown or a member is missing."""
        kind = kind_of(value)
        row = self.by_kind.get(kind)
        if row is None:
            return None
        if kind == "text" and len(value) == 2 and type(value.get("text")) is str:
            return ir.Text(text=value["text"], at=at, raw=value)
        members = Members(value, at)
        del members.rest["type"]
        fields: dict[str, Any] = dict(row.fixed)
        for path, field in row.members.items():
            found = members.take(path.rstrip("!"), *row.types.get(field, ()))
            if found is None:
                if path[-1:] == "!":
                    return None
            elif field == "address":
                fields |= read_url(found)
            else:
                fields[field] = found
        if row.read is not None and not row.read(members, fields):
            return None
        if self.cache and (cache := take_cache(members, self.cache)) is not None:
            fields["cache"] = cache
        made: ir.Part = row.node(**fields, at=at, raw=value, ext=members.ext(self.dialect))
        return made

    def write(self, part: ir.Part, ledger: Ledger) -> dict[str, Any] | None:
        """Write a block; None when the table has no row for it."""
        for row in self.by_node.get(type(part), ()):
            if all(getattr(part, name) == value for name, value in row.fixed.items()) and (
                row.is_written or ledger.is_home
            ):
                out = self._row(row, part, ledger)
                if out is not None:
                    return out
        return None

    def _row(self, row: Block, part: ir.Part, ledger: Ledger) -> dict[str, Any] | None:
        out: dict[str, Any] = {"type": row.kind}
        for path, field in row.members.items():
            value = media_url(part) if field == "address" else getattr(part, field)  # type: ignore[arg-type]
            if value is not None:
                put(out, path.rstrip("!"), value)
            elif path[-1:] == "!":
                return None
        if row.write is not None and not row.write(part, out, ledger):
            return None
        if self.cache and part.cache is not None and (ledger.is_home or self.ttls):
            fits = ledger.is_home or part.cache.get("ttl") in self.ttls
            out[self.cache] = {"type": "ephemeral", **(part.cache if fits else {})}
        put_ext(part, out, ledger)
        return out


def take_cache(members: Members, name: str = "cache_control") -> dict[str, Any] | None:
    """Take a breakpoint of the prompt cache."""
    found = members.rest.get(name)
    if type(found) is not dict or found.get("type") != "ephemeral":
        return None
    del members.rest[name]
    return {key: value for key, value in found.items() if key != "type"}


def is_own_raw(part: ir.Part, ledger: Ledger) -> bool:
    """Return whether a native block may be written as it came."""
    return isinstance(part, ir.Opaque | ir.ServerTool) and part.dialect == ledger.target


# Options by table -----------------------------------------------------------------------------------------------------


class Option(msgspec.Struct, frozen=True):
    """One option of a request: a row of a vendor's table, read in both directions."""

    path: str
    name: str
    """One of `ir.OPTIONS`."""
    kinds: tuple[type[Any], ...] = (str,)
    words: Mapping[str, str] = {}
    """Native word → portable word; a word that is not here stays native."""
    known: frozenset[Any] | None = None
    """What the server takes; another vendor's value that is not here is dropped."""
    least: int | None = None
    most: int | None = None
    is_written: bool = True


def read_options(members: Members, table: Iterable[Option], options: dict[str, Any], places: dict[str, str]) -> None:
    """Take the options of a table, with where each was read."""
    for row in table:
        if row.name in options:
            continue
        place = members.place(row.path)
        value = members.take(row.path, *row.kinds)
        if value is None:
            continue
        if row.words and value not in row.words:
            put_back(members, row.path, value)
            continue
        options[row.name] = row.words[value] if row.words else value
        places[row.name] = place


def put_back(members: Members, path: str, value: Json) -> None:
    """Return a member that was taken in error."""
    head, _, tail = path.partition("/")
    if tail and (inner := members.inner(head)) is not None:
        put_back(inner, tail, value)
    else:
        members.rest[members.find(head)] = value


Writer = Callable[[Any, dict[str, Any], Ledger, str], None]
"""Writes one option: its value, the request, the losses, where it was read."""


def write_options(
    conversation: ir.Conversation, out: dict[str, Any], ledger: Ledger, table: Iterable[Option],
    special: Mapping[str, Writer],
) -> None:  # fmt: skip
    """Write each option by its row or its own function; what has neither is a loss."""
    rows = {row.name: row for row in reversed(tuple(table)) if row.is_written}
    for name, value in conversation.options.items():
        at = conversation.options_at.get(name, f"/{name}")
        if name in special:
            special[name](value, out, ledger, at)
        elif name in rows:
            _write_option(rows[name], value, out, ledger, at)
        elif name == "n":
            ledger.drop(at, "shape" if value == 1 else "candidates", "the target gives one answer", value)
        else:
            ledger.drop(at, "option", f"the target has no {name}", value)


def _write_option(row: Option, value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    if row.words:
        words = {portable: native for native, portable in row.words.items()}
        if value not in words:
            ledger.drop(at, "option_value", f"no such {row.name} here", value)
            return
        value = words[value]
    elif not ledger.is_home:
        if row.known is not None and value not in row.known:
            ledger.drop(at, "option_value", f"no such {row.name} here", value)
            return
        value = bounded(row, value, ledger, at)
    put(out, row.path, value)


def bounded(row: Option, value: Any, ledger: Ledger, at: str) -> Any:
    """Return a number within the server's limits; one that had to be moved is a loss."""
    for limit, is_out, word in (
        (row.least, row.least is not None and value < row.least, "least"),
        (row.most, row.most is not None and value > row.most, "most"),
    ):
        if is_out:
            ledger.degrade(at, "option_value", f"the {word} here is {limit}", value)
            return limit
    return value


EFFORT_BUDGETS: Final[dict[str, int]] = {
    "none": 0, "minimal": 1024, "low": 2048, "medium": 8192, "high": 24_576, "xhigh": 32_768, "max": 65_536,
}  # fmt: skip
"""Words for thinking and tokens for it, for vendors who know only one of both. The vendors publish no such table;
these are the budgets that their own agents set for words of this kind."""

FORMAT_MEMBERS: Final = ("name", "schema", "strict", "description")
"""What OpenAI's dialects say of a schema that an answer has to fit."""

FREE_TEXT: Final[dict[str, Json]] = {
    "type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],
}  # fmt: skip
"""The schema of a tool that takes free text, where tools take only objects."""


def effort_of(budget: int) -> str:
    """Return the least effort whose budget is enough."""
    if budget < 0:
        return "medium"
    return next((word for word, tokens in EFFORT_BUDGETS.items() if tokens >= budget), "max")


# Counters and tools by table ------------------------------------------------------------------------------------------


def read_counters(value: dict[str, Any], at: str, dialect: str, table: Mapping[str, str]) -> ir.Usage:
    """Read token counters by a table of native path → field; a total that adds up says nothing of its own."""
    members = Members(value, at)
    fields = {field: members.take(path, int) for path, field in table.items()}
    members.skip("total_tokens", (fields.get("input") or 0) + (fields["output"] or 0))
    return ir.Usage(**fields, at=at, ext=members.ext(dialect), raw=value)


def write_counters(
    usage: ir.Usage, ledger: Ledger, table: Mapping[str, str], needed: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Write token counters by the same table.

    Args:
        needed: fields that another vendor's answer must say; one that nobody said is 0.
    """
    out: dict[str, Any] = {}
    for path, field in table.items():
        value = getattr(usage, field)
        value = 0 if value is None and field in needed and not ledger.is_home else value
        if value is not None:
            put(out, path, value)
    put_ext(usage, out, ledger)
    return out


def read_tool(
    value: Json, at: str, dialect: str, paths: Mapping[str, str], kind: Any = "function", cache: bool = False
) -> ir.ToolSpec:
    """Read the definition of a function by a table of field → native path."""
    members = Members(value, at)
    members.rest.pop("type", None)
    types = {"schema": dict, "strict": bool}
    fields = {field: members.take(path, types.get(field, str)) for field, path in paths.items()}
    if kind == "custom" and fields.get("schema") is not None:
        put_back(members, paths["schema"], fields.pop("schema"))
    found = take_cache(members) if cache else None
    return ir.ToolSpec(**fields, kind=kind, cache=found, at=at, ext=members.ext(dialect), raw=value)


def write_tool(tool: ir.ToolSpec, out: dict[str, Any], ledger: Ledger, paths: Mapping[str, str]) -> dict[str, Any]:
    """Write the definition of a function by the same table."""
    for field, path in paths.items():
        if (value := getattr(tool, field)) is not None:
            put(out, path, value)
    put_ext(tool, out, ledger)
    return out


def take_tools(members: Members, read: Callable[[Json, str], ir.ToolSpec]) -> tuple[ir.ToolSpec, ...]:
    """Take the tool definitions of a request; an empty list stays, so that it is written again."""
    found = members.take("tools", list) or () if members.rest.get("tools") else ()
    return tuple(read(tool, f"/tools/{place}") for place, tool in enumerate(found))


def take_usage(members: Members, read: Callable[[dict[str, Any], str], ir.Usage]) -> ir.Usage | None:
    """Take the counters of an answer."""
    found = members.take("usage", dict)
    return None if found is None else read(found, f"{members.at}/usage")


def read_citations(
    key: str, read: Callable[[dict[str, Any], str], ir.Citation], members: Members, fields: dict[str, Any]
) -> bool:
    """Read the citations of a text where all are objects; else the member stays native."""
    found = members.rest.get(key)
    if type(found) is list and found and all(type(one) is dict for one in found):
        del members.rest[key]
        at = f"{members.at}/{key}"
        fields["citations"] = tuple(read(one, f"{at}/{place}") for place, one in enumerate(found))
    return True
