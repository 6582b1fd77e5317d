"""The engine under all dialects: members taken from a vendor's objects, tables read both ways, losses noted.

A vendor's file holds tables and a few functions; everything that two vendors would write alike is here.
No vendor's words are here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects import ir
from backplane.dialects.common import (
    EFFORT_BUDGETS,
    FREE_TEXT,
    Calls,
    LossLedger,
    arguments_object,
    arguments_text,
    escape,
    kind_of,
    media_url,
    put,
    read_arguments,
    read_url,
    snake,
    take_cache,
)
from backplane.errors import TranslationError

_MISSING: Final = object()
_UPPER: Final = re.compile(r"[A-Z]")
# JSON -----------------------------------------------------------------------------------------------------------------


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

    def look(self, path: str) -> Json:
        """Return what is left of a member, without taking it."""
        head, _, tail = path.partition("/")
        if tail:
            inner = self.inner(head)
            return None if inner is None else inner.look(tail)
        return self.below[head].rest if self.below and head in self.below else self.rest.get(self.find(head))

    def forget(self, path: str) -> None:
        """Take a member, whatever it is, with what was left of it."""
        head, _, tail = path.partition("/")
        if tail and (inner := self.inner(head)) is not None:
            inner.forget(tail)
        elif self.below and head in self.below:
            self.below[head].rest.clear()
        else:
            del self.rest[self.find(head)]

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

    def content(self, name: str, read: Callable[[Json, str], ir.Part]) -> tuple[tuple[ir.Part, ...], bool | None]:
        """Take a content that is one text or a list of blocks; which of both it was is `Message.flat`."""
        at = self.place(name)
        if (text := self.take(name)) is not None:
            return (ir.Text(text=text, at=at),), True
        if (blocks := self.take(name, list)) is not None:
            return tuple(read(block, f"{at}/{place}") for place, block in enumerate(blocks)), False
        return (), None


def _kind(value: Json) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


# Blocks by table ------------------------------------------------------------------------------------------------------


class Citations(msgspec.Struct, frozen=True):
    """A vendor's table of where a text is from, read in both directions."""

    dialect: str
    member: str
    """Lists the citations of a text."""
    table: Mapping[str, str]
    """Native path → field of `ir.Citation`."""
    url: str = ""
    """The word for an address, by which other vendors' citations are said; empty where they are not."""

    def read(self, raw: dict[str, Any], at: str) -> ir.Citation:
        """Read one citation."""
        members = Members(raw, at)
        fields = {field: members.take(path, int if field in ("start", "end") else str)
                  for path, field in self.table.items()}  # fmt: skip
        kind = fields["kind"] or ""
        fields["kind"] = "url" if kind and kind == self.url else kind
        return ir.Citation(**fields, at=at, ext=members.ext(self.dialect))

    def take(self, members: Members) -> tuple[ir.Citation, ...]:
        """Take the citations of a text where all are objects; else the member stays native."""
        found = members.rest.get(self.member)
        if type(found) is not list or not all(type(one) is dict for one in found) or not found:
            return ()
        del members.rest[self.member]
        return tuple(self.read(one, f"{members.at}/{self.member}/{place}") for place, one in enumerate(found))

    def write(self, part: ir.Text, ledger: LossLedger, begin: int = 0) -> list[Json]:
        """Write the citations of a text; those that cannot be said are left out and reported.

        Args:
            begin: where this text begins in the one that is written, in characters.
        """
        out: list[Json] = []
        for citation in part.citations:
            one = citation if ledger.is_home else self._by_address(citation, part, ledger)
            if one is None:
                continue
            body: dict[str, Any] = {}
            for path, field in self.table.items():
                value = getattr(one, field)
                if field == "kind":
                    value = value if ledger.is_home and value != "url" else self.url or value
                if value is not None and (field, value) != ("kind", ""):
                    put(body, path, value + begin if field in ("start", "end") else value)
            ledger.put_ext(citation, body)
            out.append(body)
        return out

    def _by_address(self, one: ir.Citation, part: ir.Text, ledger: LossLedger) -> ir.Citation | None:
        """Return a citation of another vendor by an address and its span in the text; None where it has no address."""
        if not self.url:  # only what the vendor itself has said has its index
            return one if self.dialect in one.ext else None
        if one.url is None:
            ledger.drop(one.at, "citation", "only an address can be cited here")
            return None
        changes: dict[str, Any] = {"title": one.url if one.title is None else one.title}
        if one.start is None or one.end is None:
            changes |= {"start": 0, "end": len(part.text)}
            ledger.degrade(one.at, "citation", "its span here is the text that it stands on")
        if one.quote is not None:
            ledger.drop(one.at, "citation", "the words cited are not said here", one.quote)
        return msgspec.structs.replace(one, **changes)


class Block(msgspec.Struct, frozen=True):
    """One kind of block: a row of a vendor's table, read in both directions."""

    kind: str
    """The vendor's word for it, in the table's `tag`; where there is none, the member that only this kind has."""
    node: type[Any]
    members: Mapping[str, str]
    """Native path → portable field; one that ends with `!` must be there, in both directions.

    Some are more than a value: `address` is a URL or data in one, `file` is data with or without the head of a URL,
    `input` is written as an object, `arguments` is that object as text, `content` is a text or a list of blocks
    (`types` may allow one of both alone). Where an `id` need not be there, one is made, and never given back.
    """
    fixed: Mapping[str, Any] = {}
    """Portable fields that this kind always has."""
    types: Mapping[str, tuple[type[Any], ...]] = {}
    """Portable field → types of its native value, where it is no text."""
    read: Callable[[Members, dict[str, Any]], bool] | None = None
    """Reads more members into the fields; False when the block is unreadable."""
    write: Callable[[Any, dict[str, Any], LossLedger], bool] | None = None
    """Writes more members; False when the target cannot take this part."""
    is_written: bool = True
    """Whether parts of other vendors are written as this kind."""


class Blocks:
    """A vendor's table of blocks.

    Args:
        dialect: names the `ext` of the nodes.
        text: the kind of block that says plain words; the first member of its row holds them.
        cache: member that holds a breakpoint of the prompt cache.
        ttls: times to live that the server takes of other vendors' breakpoints; empty where it takes none.
        signature: member that any kind of block may have, with the vendor's proof that it made it.
        tag: member in which blocks say their kind; empty where a member tells, in either of two spellings.
        untyped: the kind of a block that says none.
        noun: what stands before the kind of an unknown block.
        is_server_tool: tells by its kind whether an unknown block is of a tool that the vendor runs itself.
        citations: how texts say where they are from.
        bound: kinds of unknown blocks that point to what the vendor keeps.
    """

    def __init__(
        self, dialect: str, rows: tuple[Block, ...], *, text: str = "text", cache: str = "",
        ttls: tuple[Any, ...] = (), signature: str = "", tag: str = "type",
        untyped: str | None = None, noun: str = "",
        is_server_tool: Callable[[str], bool] = lambda kind: False, bound: frozenset[str] = frozenset(),
        citations: Citations | None = None,
    ) -> None:  # fmt: skip
        self.dialect, self.text, self.cache, self.ttls = dialect, text, cache, ttls
        self.signature, self.tag, self.is_server_tool, self.bound = signature, tag, is_server_tool, bound
        self.untyped, self.noun, self.rows, self.citations = untyped, noun, rows, citations
        self.by_kind: dict[Any, Block] = {row.kind: row for row in rows}
        self.words = next(iter(self.by_kind[text].members)).rstrip("!") if text in self.by_kind else "text"
        """The member that holds plain words."""
        self._plain_keys = {tag, self.words} - {""} if text in self.by_kind else None
        self.by_node: dict[type[Any], list[Block]] = {}
        for row in rows:
            self.by_node.setdefault(row.node, []).append(row)

    def read(self, value: Json, at: str, calls: Calls | None = None) -> ir.Part:
        """Read a block; one of an unknown kind, or without what it must have, stays native."""
        if type(value) is dict:
            is_plain = value.keys() == self._plain_keys and (not self.tag or value[self.tag] == self.text)
            if is_plain and type(value[self.words]) is str:
                return ir.Text(text=value[self.words], at=at)
            row = self.by_kind.get(self.kind_of(value)) if self.tag else None
            rows = (row,) if row is not None else () if self.tag else self.rows
            for row in rows:
                if self.tag or row.kind in value or snake(row.kind) in value:
                    members = Members(value, at, spell=not self.tag)
                    if (made := self._made(row, members, at, value, calls or Calls())) is not None:
                        return made
        kind = next(iter(value), "empty part") if type(value) is dict else "part"
        kind = str(self.kind_of(value)) if self.tag else kind
        if self.is_server_tool(kind):
            name = str(value.get("name") or kind)
            return ir.ServerTool(dialect=self.dialect, name=name, payload=value, at=at)
        label = f"{self.noun}{kind}"
        return ir.Opaque(dialect=self.dialect, label=label, payload=value, at=at, bound=kind in self.bound)

    def kind_of(self, value: Json) -> str | None:
        """Return what kind a block says that it is."""
        return self.untyped if type(value) is dict and value.get(self.tag) is None else kind_of(value, self.tag)

    def _made(self, row: Block, members: Members, at: str, value: Json, calls: Calls) -> ir.Part | None:
        if self.tag:
            members.rest.pop(self.tag, None)
        fields: dict[str, Any] = dict(row.fixed)
        for path, field in row.members.items():
            found: Any
            if field == "content":
                fields["content"], found = members.content(path.rstrip("!"), self.read)
                fields["flat"] = found
            elif field == "id" and members.look(path) == "":
                continue
            elif field == "arguments":
                is_text = fields.get("kind") == "custom"
                found = members.take(path, str, *(() if is_text else (dict,)))  # some gateways send the object itself
                said = found if type(found) is str else ""
                fields["text"] = found if type(found) is str else None
                fields["input"] = said if is_text else found if type(found) is dict else read_arguments(said)
                continue
            else:
                found = members.take(path.rstrip("!"), *row.types.get(field, ()))
            if found is None:
                if path[-1:] == "!":
                    return None
            elif field == "address" or field == "file":
                fields |= read_url(found, "url" if field == "address" else "data")
            elif field != "content":
                fields[field] = found
        if self.citations is not None and row.node is ir.Text:
            fields["citations"] = self.citations.take(members)
        if row.read is not None and not row.read(members, fields):
            return None
        if row.node in (ir.ToolUse, ir.ToolOutput) and fields.get("id") is None:
            name = fields.get("name") or ""
            fields |= {"id": calls.make(name) if row.node is ir.ToolUse else calls.answer(name), "id_made": True}
        if self.cache and (cache := take_cache(members.rest, self.cache)) is not None:
            fields["cache"] = cache
        if self.signature and (proof := members.take(self.signature)) is not None:
            fields["signature"] = proof
        made: ir.Part = row.node(**fields, at=at, ext=members.ext(self.dialect))
        return made

    def write(self, part: Any, ledger: LossLedger) -> Json:
        """Write a block: as it came where nobody changed it, else by its row; None where it has none, which is lost."""
        if is_own_raw(part, ledger):
            return part.payload
        if type(part) is ir.Text and self._plain_keys and is_bare(part) and not part.ext:
            return self.plain(part.text)
        for row in self.by_node.get(type(part), ()):
            if all(getattr(part, name) == value for name, value in row.fixed.items()) and (
                row.is_written or ledger.is_home
            ):
                out = self._written(row, part, ledger)
                if out is not None:
                    return out
        return self.said_as_text(part, ledger)

    def plain(self, text: str) -> dict[str, Any]:
        """Write a block that says words and nothing else."""
        return {self.tag: self.text, self.words: text} if self.tag else {self.words: text}

    def said_as_text(self, part: ir.Part, ledger: LossLedger) -> Json:
        """Write the words of a block that has no row; what has no words is lost."""
        is_document = isinstance(part, ir.Media) and part.text is not None and not ledger.is_home
        if is_document or isinstance(part, ir.Refusal):
            ledger.degrade(part.at, "media" if is_document else "part", "its words are said as a text here")
            ledger.put_ext(part, {})
            return self.plain(part.text)  # type: ignore[attr-defined]
        ledger.lose_part(part)
        return None

    def write_all(self, parts: Iterable[ir.Part], ledger: LossLedger) -> list[Json]:
        """Write blocks; those that the target has no word for are left out."""
        made = ((part, self.write(part, ledger)) for part in parts)
        return [written for part, written in made if written is not None or is_own_raw(part, ledger)]

    def write_content(self, parts: Iterable[ir.Part], flat: bool | None, ledger: LossLedger) -> Json:
        """Write a content that may be one text or a list of blocks: the text where it says the same."""
        made = self.write_all(parts, ledger)
        if flat is not False and len(made) == 1 and type(made[0]) is dict and made[0].keys() == self._plain_keys:
            return made[0][self.words]
        return made

    def _content(self, kinds: tuple[type[Any], ...], part: ir.ToolOutput, ledger: LossLedger) -> Json:
        if list not in kinds:
            return ledger.plain_text(part.content)
        flat = part.flat if str in kinds else False
        return self.write_content(part.content, flat, ledger) if part.content or flat is not None else None

    def _written(self, row: Block, part: ir.Part, ledger: LossLedger) -> dict[str, Any] | None:
        if getattr(part, "redacted", None) is not None and "redacted" not in row.members.values():
            return None
        out: dict[str, Any] = {self.tag: row.kind} if self.tag and row.kind else {}
        for path, field in row.members.items():
            if field == "address" or field == "file":
                value = media_url(part) if field == "address" or part.data is not None else None  # type: ignore
            elif field == "id" and part.id_made and ledger.is_home:  # type: ignore[attr-defined]
                continue
            elif field == "arguments":
                value = arguments_text(part)  # type: ignore[arg-type]
            elif field == "input":
                value = arguments_object(part, ledger)  # type: ignore[arg-type]
            elif field == "content":
                value = self._content(row.types.get(field, (str, list)), part, ledger)  # type: ignore[arg-type]
            else:
                value = getattr(part, field)
            if value is not None:
                put(out, path.rstrip("!"), value)
            elif path[-1:] == "!":
                return None
        if row.write is not None and not row.write(part, out, ledger):
            return None
        if self.citations is not None and type(part) is ir.Text and (cited := self.citations.write(part, ledger)):
            out[self.citations.member] = cited
        self.put_cache(part, out, ledger)
        if self.signature and part.signature is not None and ledger.is_home:
            out[self.signature] = part.signature
        ledger.put_ext(part, out)
        return out

    def put_cache(self, node: ir.Part | ir.ToolSpec, out: dict[str, Any], ledger: LossLedger) -> None:
        """Write a breakpoint of the prompt cache, where the server takes one."""
        if self.cache and node.cache is not None and (ledger.is_home or self.ttls):
            fits = ledger.is_home or node.cache.get("ttl") in self.ttls
            out[self.cache] = {"type": "ephemeral", **(node.cache if fits else {})}


class Turns(msgspec.Struct, frozen=True):
    """Messages that are one object: who speaks, and what in a text or a list of blocks."""

    blocks: Blocks
    roles: Mapping[str, ir.Role]
    """Native → ours; an unknown one is the user's, and so is a role that is not here."""
    role: str = "role"
    content: str = "content"
    takes_text: bool = True
    """Whether a text may stand in the place of a list of one."""

    def read(self, value: Json, at: str) -> ir.Message:
        """Read one message."""
        members = Members(value, at)
        native_role = members.take(self.role)
        parts, flat = members.content(self.content, self.blocks.read)
        return ir.Message(
            role=self.roles.get(native_role or "", "user"), parts=parts, native_role=native_role, flat=flat, at=at,
            ext=members.ext(self.blocks.dialect),
        )  # fmt: skip

    def write(self, message: ir.Message, ledger: LossLedger) -> Json:
        """Write one message."""
        native, words = message.native_role, {role: word for word, role in self.roles.items()}
        is_own = ledger.is_home and native is not None and self.roles.get(native, "user") == message.role
        flat = message.flat if self.takes_text else False
        out = {
            self.role: native if is_own else words.get(message.role, words["user"]),
            self.content: self.blocks.write_content(message.parts, flat, ledger),
        }
        ledger.put_ext(message, out)
        return out


def is_own_raw(part: ir.Part, ledger: LossLedger) -> bool:
    """Return whether a native block may be written as it came."""
    return isinstance(part, ir.Opaque | ir.ServerTool) and part.dialect == ledger.target


def is_bare(part: ir.Part) -> bool:
    """Return whether a block is a text and nothing beside it, so that its words are all that it says."""
    return type(part) is ir.Text and part.signature is None and part.cache is None and not part.citations


# Options by table -----------------------------------------------------------------------------------------------------


class OptionDraft(msgspec.Struct, frozen=True):
    """A request while one of its options is written; what cannot be said as it was is noted here."""

    out: dict[str, Any]
    conversation: ir.Conversation
    ledger: LossLedger
    at: str
    """Where the option was read."""

    @property
    def is_home(self) -> bool:
        return self.ledger.is_home

    def put(self, path: str, value: Any) -> None:
        """Write a value at a path; an object joins the members of one that stands at the head of the request."""
        before = self.out.get(path)
        put(self.out, path, {**before, **value} if type(before) is dict and type(value) is dict else value)

    def drop(self, reason: str, value: Any = _MISSING, code: str = "option_value") -> None:
        self.ledger.drop(self.at, code, reason, value)

    def degrade(self, reason: str, value: Any = _MISSING, code: str = "option_value") -> None:
        self.ledger.degrade(self.at, code, reason, value)


class Hole(msgspec.Struct, frozen=True):
    """A place of a form where any value of these types may stand."""

    name: str
    kinds: tuple[type[Any], ...] = (str,)
    members: tuple[str, ...] = ()
    """The members that an object may have, none of them null; empty where it may have any."""


REST: Final = "**"
"""Member of a form that stands for all other members of its object."""


class Form(msgspec.Struct, frozen=True):
    """What the vendor says and what we say for it, with the same holes in both."""

    native: Any
    portable: dict[str, Any]
    at: str = ""
    """Where in the native form the losses of its members are."""


def matched(form: Any, value: Any, found: dict[str, Any], *, whole: bool = True) -> bool:
    """Return whether a value is of a form, and put what stands in the form's holes into `found`.

    Args:
        whole: it has no other members than the form, of which each may have its second spelling.
    """
    if type(form) is Hole:
        if form.members and type(value) is dict and not whole:
            value = {key: value[key] for key in form.members if key in value}
        if type(value) not in form.kinds or (
            form.members and any(key not in form.members or inner is None for key, inner in value.items())
        ):
            return False
        found[form.name] = value
        return True
    if type(form) is list:
        return type(value) is list and len(form) == len(value) and all(
            matched(one, inner, found) for one, inner in zip(form, value, strict=True)
        )  # fmt: skip
    if type(form) is not dict or type(value) is not dict:
        return type(form) is type(value) and bool(form == value)
    left = value.copy()
    for key, inner in form.items():
        name = key if key in left else snake(key)
        if key != REST and (name not in left or not matched(inner, left.pop(name), found, whole=whole)):
            return False
    return matched(form[REST], left, found, whole=whole) if REST in form else not (whole and left)


def filled(form: Any, found: Mapping[str, Any]) -> Any:
    """Return a form with its holes filled."""
    if type(form) is Hole:
        return found[form.name]
    if type(form) is list:
        return [filled(one, found) for one in form]
    if type(form) is not dict:
        return form
    made = {key: filled(inner, found) for key, inner in form.items() if key != REST}
    return {**made, **found[form[REST].name]} if REST in form else made


class RequestOption(msgspec.Struct, frozen=True):
    """One option of a request: a row of a vendor's table, read in both directions."""

    path: str
    name: str
    """One of `ir.OPTIONS`."""
    kinds: tuple[type[Any], ...] = (str,)
    words: Mapping[Any, Any] = {}
    """Native word → portable word; a word that is not here stays native."""
    forms: tuple[Form, ...] = ()
    """What it may look like; the first that fits is read, or written."""
    made: Mapping[str, Json] = {}
    """Members that another vendor's value has here, where it does not say them."""
    known: frozenset[Any] | None = None
    """What the server takes; another vendor's value that is not here is dropped."""
    least: int | None = None
    most: int | None = None
    """Bounds of another vendor's number; `most` also of the length of a list."""
    is_written: bool = True
    read: Callable[[Members], tuple[Any, str] | None] | None = None
    """Takes the option in place of the path, and returns it with where it was read."""
    write: Callable[[Any, OptionDraft], None] | None = None
    """Writes the option in place of the path."""

    def take(self, members: Members) -> tuple[Any, str] | None:
        """Take the option and where it was read; None where it is not said, or says what is not ours."""
        if self.read is not None or not self.path:
            return None if self.read is None else self.read(members)
        place = members.place(self.path)
        if self.forms:
            value = members.look(self.path)
            for form in self.forms:
                found: dict[str, Any] = {}
                if matched(form.native, value, found):
                    members.forget(self.path)
                    return filled(form.portable, found), place + form.at
            return None
        said = members.look(self.path) if self.words else None
        if self.words and (type(said) not in self.kinds or said not in self.words):
            return None
        value = members.take(self.path, *self.kinds)
        return None if value is None else (self.words[value] if self.words else value, place)

    def put(self, value: Any, draft: OptionDraft) -> None:
        """Write the option."""
        words = {portable: native for native, portable in self.words.items()}
        if self.write is not None:
            self.write(value, draft)
        elif self.forms:
            value = value if draft.is_home else {**self.made, **value}
            for form in self.forms:
                found: dict[str, Any] = {}
                if matched(form.portable, value, found, whole=False):
                    draft.put(self.path, filled(form.native, found))
                    return
            draft.drop(f"no such {self.name} here", value)
        elif value in words if words else draft.is_home or self.known is None or value in self.known:
            draft.put(self.path, words[value] if words else value if draft.is_home else self.bounded(value, draft))
        else:
            draft.drop(f"no such {self.name} here", value)

    def bounded(self, value: Any, draft: OptionDraft) -> Any:
        """Return a number or a list within the server's limits; one that had to be moved or cut is a loss."""
        if type(value) is list:
            if value[self.most :] and self.most is not None:
                draft.drop(f"more than {self.most} are refused here", value[self.most :])
            return value[: self.most]
        for limit, is_out, word in (
            (self.least, self.least is not None and value < self.least, "least"),
            (self.most, self.most is not None and value > self.most, "most"),
        ):
            if is_out:
                draft.degrade(f"the {word} here is {limit}", value)
                return limit
        return value


def read_options(members: Members, table: Iterable[RequestOption]) -> tuple[dict[str, Any], dict[str, str]]:
    """Take the options of a table; return them and where each was read."""
    found = {}
    for row in table:
        if row.name not in found and (taken := row.take(members)) is not None:
            found[row.name] = taken
    return {name: value for name, (value, _) in found.items()}, {name: place for name, (_, place) in found.items()}


def write_options(
    conversation: ir.Conversation, out: dict[str, Any], ledger: LossLedger, table: tuple[RequestOption, ...]
) -> None:
    """Write each option by the first row of its name, at home by that which read it; what has none is a loss."""
    rows = {row.name: row for row in reversed(table) if row.is_written}
    for name, value in conversation.options.items():
        value = list(value) if type(value) is tuple else value
        draft = OptionDraft(out, conversation, ledger, conversation.options_at.get(name, f"/{name}"))
        at = conversation.options_at.get(name) if ledger.is_home else None
        own = (row for row in table if row.name == name and f"/{row.path}" == at)
        row = next(own, rows.get(name))
        if row is not None:
            row.put(value, draft)
        elif name == "n":
            draft.drop("the target gives one answer", value, "candidates")
        else:
            draft.drop(f"the target has no {name}", value, "option")


def effort_writer(path: str) -> Callable[[Any, OptionDraft], None]:
    """Return what writes a budget for thinking as a word at a path, for vendors who know only words."""

    def write(value: Any, draft: OptionDraft) -> None:
        if "reasoning_effort" in draft.conversation.options:
            draft.drop("the target has the effort in words only", value, "option")
            return
        fit = (word for word, tokens in EFFORT_BUDGETS.items() if tokens >= value)
        word = next(fit, "max") if value >= 0 else "medium"
        draft.put(path, word)
        draft.degrade(f"tokens for thinking became the word {word}", value)

    return write


# Counters and tools by table ------------------------------------------------------------------------------------------


class Tools:
    """A vendor's table of what tools have, read in both directions; what is no such tool is run by the vendor.

    Args:
        blocks: say the dialect, and what is taken of breakpoints of the prompt cache.
        members: field of `ir.ToolSpec` → native path; `{}` in it stands for the kind.
        kinds: what a tool says in `type` → its kind; the first of a kind is written, the empty one is not.
        listed: member that holds several tools, of which all that are functions are written as one.
        read_more: as `Block.read`.
        write_more: returns what is written of another vendor's tool, where it must say more here.
    """

    def __init__(
        self, blocks: Blocks, members: Mapping[str, str], kinds: Mapping[str, str] = MappingProxyType({"": "function"}),
        *, listed: str = "", read_more: Callable[[Members, dict[str, Any]], bool] | None = None,
        write_more: Callable[[ir.ToolSpec, dict[str, Any], LossLedger], ir.ToolSpec] | None = None,
    ) -> None:  # fmt: skip
        self.kinds, self.listed, self.write_more = frozenset(kinds.values()), listed, write_more
        rows = tuple(
            Block(word if any(kinds) else members["name"], ir.ToolSpec, {
                path.format(kind) + ("!" if field == "name" else ""): field for field, path in members.items()
                if kind == "function" or field != "schema"
            }, {"kind": kind}, types={"schema": (dict,), "strict": (bool,)}, read=read_more)
            for word, kind in kinds.items()
        )  # fmt: skip
        self.rows = Blocks(
            blocks.dialect, rows, tag="type" if any(kinds) else "", untyped="", cache=blocks.cache, ttls=blocks.ttls
        )

    def read_all(self, tool: Json, at: str) -> list[ir.ToolSpec]:
        """Read an entry of the list of tools."""
        if not self.listed:
            return [self.read(tool, at)]
        members = Members(tool, at, spell=not self.rows.tag) if type(tool) is dict else None
        place = "" if members is None else members.place(self.listed)
        found = None if members is None else members.take(self.listed, list)
        tools = [self.read(one, f"{place}/{spot}") for spot, one in enumerate(found or ())]
        if members is None or members.rest or not tools or any(one.kind == "server" for one in tools):
            return [self._server(tool, at)]
        return tools

    def _server(self, tool: Json, at: str) -> ir.ToolSpec:
        said = next(iter(tool), "empty") if type(tool) is dict else "unreadable"
        if type(tool) is dict and not self.listed:
            said = tool.get("name") or tool.get("type") or said
        return ir.ToolSpec(name=str(said), kind="server", payload=tool, at=at)

    def read(self, tool: Json, at: str) -> ir.ToolSpec:
        """Read one tool definition."""
        found: Any = self.rows.read(tool, at)
        return found if isinstance(found, ir.ToolSpec) else self._server(tool, at)

    def write_all(self, tools: tuple[ir.ToolSpec, ...], ledger: LossLedger) -> list[Json]:
        """Write a list of tools; what another vendor runs itself is a loss."""
        out = [self.write(tool, ledger) for tool in tools if tool.kind != "server"]
        if self.listed and out:
            out = [{self.listed: out}]
        for place, tool in enumerate(tools):
            if tool.kind == "server" and ledger.is_home:
                out.insert(len(out) if self.listed else place, tool.payload)
            elif tool.kind == "server":
                ledger.drop(tool.at, "tool", f"{tool.name} is run by {ledger.source} itself", tool.payload)
        return out

    def write(self, tool: ir.ToolSpec, ledger: LossLedger) -> Json:
        """Write one tool definition; one for free text is a function of one text where there is no such kind."""
        if tool.kind not in self.kinds:
            tool = msgspec.structs.replace(tool, kind="function", schema=FREE_TEXT)
        more: dict[str, Any] = {}
        if self.write_more is not None and not ledger.is_home:
            tool = self.write_more(tool, more, ledger)
        written: Any = self.rows.write(tool, ledger)
        return {**more, **written}
