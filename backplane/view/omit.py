"""Leaves kinds of content out of facts, events and receipts before anything else reads them. Pure.

What is left out is never put back in part: of an absolute path nothing stays, of a prompt's line nothing after its
first words, so a text loses too much rather than too little.
"""

from __future__ import annotations

import re
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
    r"(?<=['\"`])~?/[^'\"`\n]*"
    r"|(?:(?<![\w.…~:/-])|(?<=:)(?!//)|(?<=//)(?=/)|(?<=-[IL])|(?<=\\[nrt]))"
    r"~?/(?:[^'\"`:;|&<>\n]*/[^\s'\"`:;|&<>]*|[^\s'\"`:;|&<>]+)"
)
"""An absolute path: in quotes to their end, else to the last word with a slash, as folders may have spaces; also behind
`=`, `file://`, `-I` or an escaped newline. An address keeps its own."""

_WORDS_MAX: Final = 8
"""Words by which a line of a prompt is known again; the rest of the line goes with them."""
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
        self._root: re.Pattern[str] | None = None

    def fact(self, fact: dict[str, Any]) -> dict[str, Any]:
        """Return a fact of a journal's head without what is left out; that of the order names prompt and folder."""
        if order := as_object(fact.get("order")):
            self._prompt = _pattern(str(order.get("task") or "")) if "prompts" in self._kinds else None
            root = str(as_object(order.get("workspace")).get("root") or "").rstrip("/")
            self._root = re.compile(re.escape(root) + r"(/(?=\w)|(?![\w-]))") if root else None
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
        if self._root is not None:  # A path in the workspace becomes relative to it.
            words = self._root.sub(lambda found: "" if found[1] else "…", words)
        return _PATH.sub("…", words)


def _left_out(value: object) -> object:
    if isinstance(value, dict) and not isinstance(value.get("text"), str):
        return value  # A member of the same name that holds no text, as the router's `task`.
    return f"{len(str(value))} characters are left out" if value else value


def _pattern(prompt: str) -> re.Pattern[str] | None:
    """Return what finds a prompt and each of its lines by their words, however these are quoted or escaped."""
    lines = [re.findall(r"\w+", line) for line in prompt.splitlines()]
    parts = {
        r"\W+".join(words[:_WORDS_MAX]) + ("[^\n]*" if len(words) > _WORDS_MAX else "")
        for words in lines
        if words and (sum(map(len, words)) >= _LINE_CHARS_MIN or len(lines) == 1)
    }
    return re.compile(rf"(?<!\w)(?:{'|'.join(sorted(parts, key=len, reverse=True))})(?!\w)") if parts else None
