"""Reads a git patch line by line: what each line is, and how much each file changes. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final, Literal

import msgspec

Kind = Literal["file", "meta", "hunk", "added", "removed", "same"]

FILES_MAX: Final = 10_000
"""Files counted one by one; the receipt has the numbers of a larger patch."""

_HUNK: Final = re.compile(r"@@ -[0-9]+(?:,([0-9]{1,9}))? \+[0-9]+(?:,([0-9]{1,9}))? @@")
_NAMES: Final = ("index ", "--- ", "+++ ")
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\.)*)"')
_STARTS: Final[tuple[tuple[str, Kind], ...]] = (
    *(("diff --git ", "file"), ("--- ", "meta"), ("+++ ", "meta")),
    *(("@@", "hunk"), ("+", "added"), ("-", "removed")),
)


class Line(msgspec.Struct, frozen=True):
    """One line of a patch."""

    kind: Kind
    text: str


class FileChange(msgspec.Struct):
    """The change of one file."""

    path: str
    added: int = 0
    removed: int = 0
    lines: list[Line] = []
    """Its lines but for those that only repeat its name, as far as they were asked for."""
    count: int = 0
    """Number of these lines, also of those that were not asked for."""


def kind_of(line: str) -> Kind:
    """Return what a single line of a change is, by its beginning."""
    return next((kind for start, kind in _STARTS if line.startswith(start)), "same")


def lines(patch: Iterable[str]) -> Iterator[Line]:
    """Yield each line of a patch with its kind: only a line inside a hunk is added or removed, binary data has none."""
    left_old = left_new = 0
    binary = False
    for text in patch:
        if left_old > 0 or left_new > 0:
            mark = text[:1]
            left_old -= mark in ("-", " ", "")
            left_new -= mark in ("+", " ", "")
            yield Line({"+": "added", "-": "removed"}.get(mark, "same"), text)  # type: ignore[arg-type]
        elif text.startswith("diff --git "):
            binary = False
            yield Line("file", text)
        elif hunk := _HUNK.match(text):
            left_old, left_new = int(hunk[1] or 1), int(hunk[2] or 1)
            yield Line("hunk", text)
        elif not binary:
            binary = text == "GIT binary patch"
            yield Line("meta", "binary file" if binary else text)


def changes(patch: Iterable[str], *, lines_max: int = 0) -> list[FileChange]:
    """Return how much each file of a patch changes, at most `FILES_MAX`, with the first lines of the patch."""
    found: list[FileChange] = []
    for line in lines(patch):
        if line.kind == "file":
            if len(found) == FILES_MAX:
                break
            found.append(FileChange(_path(line.text)))
        elif found and not (line.kind == "meta" and line.text.startswith(_NAMES)):
            file = found[-1]
            file.added += line.kind == "added"
            file.removed += line.kind == "removed"
            file.count += 1
            if lines_max > 0:
                lines_max -= 1
                shown = _QUOTED.sub(lambda name: unquoted(name[1]), line.text) if line.kind == "meta" else line.text
                file.lines.append(Line(line.kind, shown))
    return found


def _path(line: str) -> str:
    """Return the file of a line `diff --git a/X b/X`, by its new name."""
    rest = line.removeprefix("diff --git ")
    if rest.endswith('"'):
        return unquoted(rest.rpartition(' "b/')[2].removesuffix('"'))
    # Both halves are the same but for a rename: then the new name is after the last mark.
    half = len(rest) // 2
    same = rest[:half].removeprefix("a/") == rest[half + 1 :].removeprefix("b/")
    return rest[half + 1 :].removeprefix("b/") if same else rest.rpartition(" b/")[2]


def unquoted(name: str) -> str:
    """Return a name as it was before git quoted it; a name that is not UTF-8 stays as git writes it."""
    try:
        return name.encode().decode("unicode_escape").encode("latin-1").decode()
    except (UnicodeError, DeprecationWarning):
        return name
