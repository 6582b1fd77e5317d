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


def lines(patch: Iterable[str]) -> Iterator[Line]:
    """Yield each line of a patch with its kind; only a line inside a hunk is added or removed."""
    left_old = left_new = 0
    for text in patch:
        if left_old > 0 or left_new > 0:
            mark = text[:1]
            left_old -= mark in ("-", " ", "")
            left_new -= mark in ("+", " ", "")
            yield Line({"+": "added", "-": "removed"}.get(mark, "same"), text)  # type: ignore[arg-type]
        elif text.startswith("@@"):
            if hunk := _HUNK.match(text):
                left_old, left_new = int(hunk[1] or 1), int(hunk[2] or 1)
            yield Line("hunk", text)
        else:
            yield Line("file" if text.startswith("diff --git ") else "meta", text)


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


_NAMES: Final = ("index ", "--- ", "+++ ")
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\.)*)"')


def _path(line: str) -> str:
    """Return the file of a line `diff --git a/X b/X`, by its new name."""
    rest = line.removeprefix("diff --git ")
    if rest.endswith('"'):
        return unquoted(rest.rpartition(' "b/')[2].removesuffix('"'))
    # Both halves are the same but for a rename: then the new name is after the last mark.
    half = len(rest) // 2
    same = rest[:half].removeprefix("a/") == rest[half + 1 :].removeprefix("b/")
    return rest[half + 1 :].removeprefix("b/") if same else rest.rpartition(" b/")[2]


_ESCAPES: Final = dict(zip("abtnvfr", "\a\b\t\n\v\f\r", strict=True))
"""Letters behind a backslash in a name that git quotes; bytes beyond ASCII are three octal digits."""


def unquoted(name: str) -> str:
    """Return a name as it was before git quoted it; bytes that are not UTF-8 stay as git writes them."""
    raw = re.sub(rb"\\([0-7]{3}|.)", _byte, name.encode("utf-8", "surrogatepass"))
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return name


def _byte(found: re.Match[bytes]) -> bytes:
    word = found[1].decode("latin-1")
    return bytes((int(word, 8) & 0xFF,)) if len(word) == 3 else _ESCAPES.get(word, word).encode("latin-1")
