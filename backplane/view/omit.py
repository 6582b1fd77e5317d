"""Leaves kinds of content out of facts, events and receipts before anything else reads them. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from typing import Any, Final, TypeVar

import msgspec

from backplane.contract.events import AssistantDelta, AssistantMessage
from backplane.view.text import in_workspace
from backplane.view.values import as_object

OMISSIBLE: Final = ("outputs", "prompts", "paths")
"""Kinds of content that `report --omit` leaves out."""

LEFT_OUT: Final = "(left out)"

_MEMBERS: Final = {"outputs": ("output", "output_preview"), "prompts": ("task", "prompt")}
"""Members whose texts are of that kind, wherever they stand."""

_PATH: Final = re.compile(
    r"(?<=['\"`])~?/[^'\"`\n]*/"
    r"|(?:(?<![\w.…~:/-])|(?<=:)(?!//)|(?<=//)(?=/)|(?<=-[IL])|(?<=\\[nrt]))~?/(?:[^\s/'\"`:;<>|]+/)+"
)
"""The folders of an absolute path, in quotes with spaces, and behind `=`, `file://`, `-I` or an escaped newline; an
address keeps its own."""

_PIECE_CHARS: Final = 40
"""Characters by which a line of a prompt is known again where it was cut; the rest of the line goes with them."""
_LINE_CHARS_MIN: Final = 8
"""Shorter lines of a prompt say nothing by themselves; a prompt of one line is found at any length."""

T = TypeVar("T")


class Omission:
    """Removes kinds of content from one run.

    Args:
        kinds: some of `OMISSIBLE`.
    """

    def __init__(self, kinds: Collection[str] = ()) -> None:
        self._kinds = frozenset(kinds)
        self._members = {name for kind in self._kinds for name in _MEMBERS.get(kind, ())}
        self._prompt: re.Pattern[str] | None = None
        self._root = ""

    def fact(self, fact: dict[str, Any]) -> dict[str, Any]:
        """Return a fact of a journal's head without what is left out; that of the order names prompt and folder."""
        order = as_object(fact.get("order"))
        if order and "prompts" in self._kinds:
            self._prompt = _pattern(str(order.get("task") or ""))
        if order and "paths" in self._kinds:
            self._root = str(as_object(order.get("workspace")).get("root") or "").rstrip("/")
        return self.of(fact)

    def of(self, value: T, name: str = "") -> T:
        """Return an event, a struct or any plain value without what is left out."""
        made: Any = value
        if not self._kinds:
            return value
        if name in self._members and not isinstance(value, bool | int | float | None):
            made = _left_out(value)
        elif isinstance(value, str):
            made = self._words(value)
        elif isinstance(value, list | tuple):
            made = type(value)(self.of(one) for one in value)
        elif isinstance(value, dict):
            made = {self._words(key) if "/" in str(key) else key: self.of(one, key) for key, one in value.items()}
        elif isinstance(value, msgspec.Struct):
            changes = {field: self.of(getattr(value, field), field) for field in value.__struct_fields__}
            if "prompts" in self._kinds and isinstance(value, AssistantMessage | AssistantDelta):
                changes["text"] = LEFT_OUT
            made = msgspec.structs.replace(value, **changes)
        return made  # type: ignore[no-any-return]

    def _words(self, words: str) -> str:
        if self._prompt is not None:
            words = self._prompt.sub(LEFT_OUT, words)
        if "paths" not in self._kinds:
            return words
        words = in_workspace(words)
        if self._root:
            words = words.replace(self._root, f"…/{self._root.rpartition('/')[2]}")
        return _PATH.sub("…/", words)


def _left_out(value: object) -> object:
    if isinstance(value, dict) and not isinstance(value.get("text"), str):
        return value  # A member of the same name that holds no text, as the router's `task`.
    return f"{len(str(value))} characters are left out" if value else value


def _pattern(prompt: str) -> re.Pattern[str] | None:
    """Return what finds each line of a prompt: plain, quoted for JSON or a shell, and cut."""
    lines = [line.strip() for line in prompt.splitlines() if line.strip()]
    found = [line for line in lines if len(line) >= _LINE_CHARS_MIN or len(lines) == 1]
    pieces = dict.fromkeys(
        (form, len(line) > _PIECE_CHARS)
        for line in sorted(found, key=len, reverse=True)
        for piece in (line[:_PIECE_CHARS],)
        for form in (piece, msgspec.json.encode(piece).decode()[1:-1], shlex.quote(piece).strip("'"))
    )
    parts = [re.escape(prompt.strip())] if lines else []
    parts += [re.escape(form) + ("[^\n]*" if is_cut else "") for form, is_cut in pieces]
    return re.compile(rf"(?<!\w)(?:{'|'.join(parts)})(?!\w)") if parts else None
