"""Requests of one conversation, translated again and again: a turn that was translated before costs one look-up.

An agent sends its whole history each time. A history is cut before each turn of the assistant; the parts are translated
apart and kept, the least recently used are forgotten first.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects import dialect, ordered, translate
from backplane.dialects.codec import encode
from backplane.dialects.ir import Conversation, Loss, Message, Text, Translated
from backplane.dialects.losses import calls_in
from backplane.errors import TranslationError

PARTS_MAX: Final = 4096
"""Parts of histories that are kept: some hundred conversations of an agent; the least recently used goes first."""


class _Part(msgspec.Struct, frozen=True):
    """One part of a history, translated."""

    written: list[Json]
    losses: tuple[Loss, ...]
    calls: frozenset[str]


class Translator:
    """Translates requests from one dialect into another and keeps what it has written.

    Args:
        source: dialect of the requests that come.
        target: dialect of the requests that are wanted.

    Raises:
        TranslationError: `dialect_unknown`.
    """

    def __init__(self, source: str, target: str) -> None:
        self.source, self.target = source, target
        self._reader = dialect(source)
        self._list = self._reader.listed[1:]
        self._written = dialect(target).listed[1:]
        self._parts: OrderedDict[bytes, Any] = OrderedDict()
        said = Message(role="user", parts=(Text(text="-"),), flat=True)
        lead = Conversation(dialect=source, messages=(said,))
        self._lead: Json = self._reader.from_ir(lead).value[self._list]
        """What stands before a part while it is translated, so that it is no conversation of its own."""

    def request(self, document: Json) -> Translated[Json]:
        """Translate a request; as `translate`, with the same errors."""
        items = document.get(self._list) if type(document) is dict else None
        if type(items) is not list or self.source == self.target:
            return translate(document, self.source, self.target)
        found = self._assembled(document, items)
        return translate(document, self.source, self.target) if found is None else found

    def _assembled(self, document: dict[str, Any], items: list[Json]) -> Translated[Json] | None:
        """Return the request from its parts; None where one part says something about another."""
        cuts = [*_cuts(items), len(items)]
        first = {**document, self._list: items[: cuts[0]]}
        head = self._kept(b"head", first, lambda: translate(first, self.source, self.target))
        out, losses = [*head.value[self._written]], [*head.losses]
        calls: set[str] = set()
        for start, end in itertools.pairwise(cuts):
            part = self._kept(b"%d" % start, items[start:end], lambda: self._part(items[start:end], start))  # noqa: B023
            if part is None or part.calls & calls:
                return None
            calls |= part.calls
            out += part.written
            losses += part.losses
        ids = [item["id"] for item in out if type(item) is dict and "id" in item]
        if len(set(ids)) < len(ids):
            return None
        return Translated({**head.value, self._written: out}, ordered(losses))

    def _kept(self, name: bytes, value: Json, make: Any) -> Any:
        key = hashlib.blake2b(name + b" " + encode(value), digest_size=16).digest()
        if key in self._parts:
            self._parts.move_to_end(key)
            return self._parts[key]
        made = self._parts[key] = make()
        if len(self._parts) > PARTS_MAX:
            self._parts.popitem(last=False)
        return made

    def _part(self, items: list[Json], start: int) -> _Part | None:
        document = {"model": "m", self._list: [*self._lead, *items]}
        try:
            done = translate(document, self.source, self.target)
        except TranslationError:
            return None  # a result whose call is in another part
        if done.value.keys() - {"model", "max_tokens", self._written}:
            return None  # system text in the middle, which moves to the head
        at = f"/{self._list}/"
        losses = tuple(
            msgspec.structs.replace(loss, path=_moved(loss.path, at, start - 1))
            for loss in done.losses if loss.path.startswith(at) or loss.path == at[:-1]
        )  # fmt: skip
        read = self._reader.to_ir(document).value
        return _Part(done.value[self._written][1:], losses, frozenset(call.id for call in calls_in(read.messages)))


def _moved(path: str, at: str, start: int) -> str:
    """Return a pointer into a part as one into the whole history."""
    step, slash, rest = path.removeprefix(at).partition("/")
    return f"{at}{int(step) + start}{slash}{rest}" if path.startswith(at) else path


def _cuts(items: list[Json]) -> Iterator[int]:
    """Yield where a history may be cut: before each item of the assistant that follows one of somebody else."""
    before = True
    for place, item in enumerate(items):
        is_own = type(item) is dict and not _is_answer(item)
        if is_own and not before and place:
            yield place
        before = is_own


def _is_answer(item: dict[str, Any]) -> bool:
    """Return whether an item is said to the assistant: by anybody else, or a tool's result."""
    role = item.get("role")
    if role is None:
        return str(item.get("type", "message")).endswith(("_output", "message"))
    return role not in ("assistant", "model")
