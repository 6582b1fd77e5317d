"""What all dialects share: taking known members out of a vendor's object, keeping the rest, counting losses.

A reader takes what it knows; whatever remains, for its name or its type, goes to `ext` and comes back on the way out.
So nothing is lost by being unknown. No vendor's words are here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects.framing import UNREADABLE
from backplane.errors import TranslationError
from backplane.ir import Ext, Loss, LossKind, Media, Node, Opaque, Part, ServerTool, Text, ToolUse


def escaped(rest: dict[str, Any]) -> dict[str, Any]:
    """Return what remains as entries of `ext`."""
    return {escape(key): value for key, value in rest.items()} if rest else rest


def kept(dialect: str, rest: dict[str, Any]) -> Ext:
    """Return what remains as the `ext` of a node."""
    return {dialect: {escape(key): value for key, value in rest.items()}} if rest else {}


class Calls:
    """Ids for calls without one: made in order, found again by name."""

    def __init__(self) -> None:
        self.made = 0
        self.open: list[tuple[str, str]] = []

    def make(self, name: str) -> str:
        made = f"{MADE_ID}{self.made}"
        self.made += 1
        self.open.append((name, made))
        return made

    def answer(self, name: str) -> str:
        for place, (open_name, made) in enumerate(self.open):
            if open_name == name:
                del self.open[place]
                return made
        return f"{MADE_ID}unknown_{name}"


K = TypeVar("K")

ABSENT: Final = "#absent"
"""Shape memory: members that the vendor leaves out although they are always written."""

SPELLED: Final = "#snake"
"""Shape memory: members that came in snake_case, by their camelCase names, and where."""

ITEM: Final = "#item"
"""Memory on the first part of an item that groups parts: the item's own members, how it was written, where it was."""

MADE_ID: Final = "call_made_"
"""Beginning of an id that was made here; its own dialect never gets it to see."""

_NOTHING: Final = object()
_encode_plain: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder().decode
_DATA_URL: Final = re.compile(r"data:([^;,]+);base64,")


def _encode(value: Json) -> bytes:
    try:
        return _encode_plain(value)
    except (UnicodeEncodeError, OverflowError):
        # Half of a surrogate pair, where a gateway cut a text; Python's own writer has an escape for it.
        return json.dumps(value, separators=(",", ":")).encode()


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
        self.losses: list[Loss] = []
        self.refusals: list[tuple[str, Loss]] = []

    @property
    def is_home(self) -> bool:
        """Whether the document goes back to the dialect it came from."""
        return self.source == self.target

    def note(self, kind: LossKind, path: str, code: str, reason: str, value: Any = _NOTHING) -> Loss:
        size = None if value is _NOTHING else len(_encode(value))
        loss = Loss(
            path=path, dialect=self.source, target=self.target, kind=kind, code=code, reason=reason, size_chars=size
        )
        self.losses.append(loss)
        return loss

    def drop(self, path: str, code: str, reason: str, value: Any = _NOTHING) -> None:
        self.note("dropped", path, code, reason, value)

    def degrade(self, path: str, code: str, reason: str, value: Any = _NOTHING) -> None:
        self.note("degraded", path, code, reason, value)

    def synthesise(self, path: str, code: str, reason: str) -> None:
        self.note("synthesised", path, code, reason)

    def refuse(self, path: str, code: str, reason: str, error: str = "mapping_unsupported_capability") -> None:
        """Note what the target cannot say without changing its meaning; `done` raises it."""
        self.refusals.append((error, self.note("refused", path, code, reason)))

    def done(self) -> tuple[Loss, ...]:
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


def take(rest: dict[str, Any], key: str, kind: type[K]) -> K | None:
    """Take a member out if it is exactly of this type; else it stays and None comes back."""
    value = rest.get(key)
    if type(value) is kind:
        del rest[key]
        return value
    return None


def take_number(rest: dict[str, Any], key: str) -> Any:
    value = rest.get(key)
    if type(value) is int or type(value) is float:
        del rest[key]
        return value
    return None


def take_constant(rest: dict[str, Any], key: str, value: Json, absent: list[str]) -> None:
    """Take a member that always says the same; note where the vendor left it out."""
    if key not in rest:
        absent.append(key)
    elif type(rest[key]) is type(value) and rest[key] == value:
        del rest[key]


def kind_of(value: Json) -> str | None:
    """Return what an object says that it is; None when it says nothing readable."""
    kind = value.get("type") if type(value) is dict else None
    return kind if type(kind) is str else None


def need_object(value: Json, at: str) -> dict[str, Any]:
    """Return a copy of an object to take from.

    Raises:
        TranslationError: `dialect_mapping_failed`, it is something else.
    """
    if type(value) is dict:
        return value.copy()
    raise TranslationError(
        "dialect_mapping_failed",
        f"{at or 'the document'} is {_kind(value)}, not an object",
        hint="check --from and --kind",
    )


def need_list(rest: dict[str, Any], key: str, at: str) -> list[Any]:
    """Take a list that the document cannot be read without.

    Raises:
        TranslationError: `dialect_mapping_failed`, it is missing or something else.
    """
    value = take(rest, key, list)
    if value is None:
        raise TranslationError(
            "dialect_mapping_failed",
            f"{at}/{key} is {_kind(rest.get(key))}, not a list",
            hint="check --from and --kind",
        )
    return value


def _kind(value: Json) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


def put_rest(ext: dict[str, Any], rest: dict[str, Any], prefix: str = "") -> None:
    """Keep what was not taken; keys become paths below the node."""
    for key, value in rest.items():
        ext[prefix + escape(key)] = value


def escape(key: str) -> str:
    """Write a member's name as a step of a JSON pointer."""
    if "~" in key or "/" in key:
        key = key.replace("~", "~0").replace("/", "~1")
    return "~2" + key[1:] if key[:1] == "#" else key


def unescape(step: str) -> str:
    if "~" not in step:
        return step
    return step.replace("~1", "/").replace("~2", "#").replace("~0", "~")


_UPPER: Final = re.compile(r"[A-Z]")


def snake(name: str) -> str:
    """Spell a member's name in snake_case."""
    return _UPPER.sub(lambda match: "_" + match[0].lower(), name)


def slot(dialect: str, entries: dict[str, Any]) -> Ext:
    return {dialect: entries} if entries else {}


def shape(node: Node, dialect: str, key: str) -> Any:
    """Return shape memory of this dialect, None when there is none."""
    entries = node.ext.get(dialect)
    return None if entries is None else entries.get(key)


def give_back(node: Node, out: dict[str, Any], ledger: Ledger) -> None:
    """Write a node's own members back into `out`; those of another dialect become losses."""
    for dialect, entries in node.ext.items():
        if dialect == ledger.target:
            for key, value in entries.items():
                if key[:1] != "#":
                    _put(out, key, value)
            continue
        kin = ledger.kin.get(dialect)
        for key, value in entries.items():
            if kin is not None and key in kin and type(value) is kin[key]:
                if key[:1] != "#":
                    _put(out, key, value)
            else:
                _lose(node, key, value, ledger)


def _put(out: dict[str, Any], key: str, value: Any) -> None:
    if "/" not in key:
        out.setdefault(unescape(key) if "~" in key else key, value)
        return
    *steps, last = key.split("/")
    inner: Any = out
    for step in steps:
        inner = inner.setdefault(unescape(step), {})
        if type(inner) is not dict:
            return
    inner.setdefault(unescape(last), value)


def _lose(node: Node, key: str, value: Any, ledger: Ledger) -> None:
    if key[:2] == "##":
        return
    if key == ITEM:
        _lose_item(value, ledger)
    elif key.startswith(SPELLED):
        for name in value["names"]:
            for spelling in (snake(name), name):
                ledger.degrade(f"{value['at']}/{spelling}", "shape", "the spelling of a member")
    elif key == ABSENT:
        for name in value:
            ledger.degrade(f"{node.at}/{name}", "shape", "left out in the source, always written by others")
    elif key[:1] == "#":
        ledger.degrade(f"{node.at}/{key[1:]}", "shape", "how it was written is not known to the target")
    elif value is None or value == [] or value == {}:
        ledger.drop(f"{node.at}/{key.replace('~2', '#')}", "shape", "nothing, said in words", value)
    else:
        ledger.drop(f"{node.at}/{key.replace('~2', '#')}", "extension", f"only {ledger.source} knows it", value)


def _lose_item(memory: dict[str, Any], ledger: Ledger) -> None:
    for name, value in memory["rest"].items():
        ledger.drop(f"{memory['at']}/{escape(name)}", "extension", f"only {ledger.source} knows it", value)
    if memory["absent"] or not memory["flat"]:
        ledger.degrade(f"{memory['at']}/content", "shape", "how the item was written is not known to the target")
        ledger.degrade(f"{memory['at']}/type", "shape", "how the item was written is not known to the target")


def put_constants(node: Node, out: dict[str, Any], dialect: str, constants: Mapping[str, Any]) -> None:
    """Write what always stands there, unless this very vendor left it out."""
    absent = shape(node, dialect, ABSENT) or ()
    for key, value in constants.items():
        if key not in absent:
            out.setdefault(key, value)


def is_home_raw(part: Part, ledger: Ledger) -> bool:
    """Whether a native block may be written as it came."""
    return isinstance(part, Opaque | ServerTool) and part.dialect == ledger.target


def parse_json(text: str) -> Json:
    """Read JSON text; None when it is none. Arguments of a call are never the JSON null."""
    try:
        return _decode(text)
    except UNREADABLE:
        return None


def json_text(value: Json) -> str:
    return _encode(value).decode()


def read_arguments(text: str) -> Json:
    """Return what the text says; the text itself where it is no JSON, an empty object where it is empty."""
    if not text:
        return {}
    value = parse_json(text)
    return text if value is None else value


def arguments_text(tool: ToolUse) -> str:
    """Return the arguments as text: the vendor's own where they still say the same."""
    if tool.text is not None and read_arguments(tool.text) == tool.input:
        return tool.text
    return tool.input if isinstance(tool.input, str) else json_text(tool.input)


def arguments_object(tool: ToolUse, ledger: Ledger) -> dict[str, Any]:
    """Return the arguments for a dialect that takes only objects."""
    if type(tool.input) is dict:
        if tool.text is not None and tool.text != json_text(tool.input) and not ledger.is_home:
            ledger.degrade(tool.at, "shape", "blanks or number forms in the text of the arguments")
        return tool.input
    name = "input" if tool.kind == "custom" else "arguments"
    ledger.degrade(tool.at, "arguments", f"no JSON object; it stands in the member {name}", tool.input)
    return {name: tool.input}


def parse_data_url(url: str) -> tuple[str, str] | None:
    """Return media type and base64 of a data URL, None for any other."""
    match = _DATA_URL.match(url)
    return None if match is None else (match[1], url[match.end() :])


def media_url(media: Media) -> str | None:
    """Return a URL for data or the URL itself, None when there is neither."""
    if media.data is not None:
        return f"data:{media.media_type or 'application/octet-stream'};base64,{media.data}"
    return media.url


def is_plain(parts: tuple[Part, ...]) -> bool:
    """Whether these parts are one text and nothing beside it, so that a plain string says the same."""
    if len(parts) != 1:
        return False
    part = parts[0]
    if type(part) is not Text or part.citations or part.cache is not None or part.signature is not None:
        return False
    # Shape memory and members that say nothing are no reason for a list; `give_back` reports them.
    return not part.ext or all(
        key[:1] == "#" or value is None or value == []
        for entries in part.ext.values()
        for key, value in entries.items()
    )
