"""Reads the texts in which hosts claim changes: git's diff and status in any form, files written by a tool. Pure."""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterator, Set
from typing import Final, Literal

import msgspec

from backplane.contract.canonical import Json
from backplane.policy.paths import patch_paths, unescaped
from backplane.policy.rules import tool_names

TEXT_CHARS_MAX: Final = 4 * 1024 * 1024
"""Longest text compared by its words; a longer one that differs is only said to differ."""

# Files written by a tool ----------------------------------------------------------------------------------------------

_WRITERS: Final = frozenset({"writefile", "write", "create", "createfile", "createnewfile", "newfile", "savefile"})
"""Names of tools that write a whole file, without case and separators."""

_PATHS: Final = ("path", "file_path", "filePath", "filepath", "absolute_path", "target_file", "filename", "file")
_CONTENTS: Final = ("content", "contents", "file_text", "fileText", "text")
_WHOLE_MODES: Final = (None, "overwrite", "w", "write", "create")


class WrittenFile(msgspec.Struct, frozen=True):
    """A call that writes a file."""

    path: str
    content: str | None
    """The whole file's text; None if the call says something else about it."""


def plain_name(tool: str) -> str:
    """Write a tool's name without case and separators, and without the server's name of an MCP tool."""
    return re.sub(r"[^a-z0-9]", "", tool.rpartition("__")[2].lower())


def written(tool: str, value: Json) -> WrittenFile | None:
    """Read a tool's call as the writing of one file; None if it is another tool or names no file."""
    if tool.startswith("mcp__") or not isinstance(value, dict):
        return None
    if plain_name(tool) not in _WRITERS and "write_file" not in tool_names(tool):
        return None
    path = next((value[name] for name in _PATHS if isinstance(value.get(name), str)), None)
    content = next((value[name] for name in _CONTENTS if isinstance(value.get(name), str)), None)
    whole = value.get("mode") in _WHOLE_MODES and not value.get("append")
    return None if path is None else WrittenFile(path, content if whole else None)


Likeness = Literal["same", "alike", "other"]


def likeness(claimed: str, data: bytes) -> Likeness:
    """Compare a claimed text with a file's bytes.

    Returns:
        `same` where they have the same words in the same order: line ends, byte order marks and formatters change no
        more; `alike` where they share half of their words or more; else `other`.
    """
    if max(len(claimed), len(data)) > TEXT_CHARS_MAX:
        return "alike"
    actual = _decoded(data)
    if "".join(claimed.split()).lstrip("\ufeff") == "".join(actual.split()):
        return "same"
    mine, theirs = re.findall(r"\w+", claimed), re.findall(r"\w+", actual)
    if mine == theirs and mine:
        return "same"
    shared = (Counter(mine) & Counter(theirs)).total()
    return "alike" if shared * 2 >= max(len(mine), len(theirs), 1) else "other"


def _decoded(data: bytes) -> str:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", "replace")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


# Git's texts ----------------------------------------------------------------------------------------------------------


class Named(msgspec.Struct, frozen=True):
    """One file in a text of git's."""

    spellings: tuple[str, ...]
    """Possible readings of its path: with and without a prefix, quoted or not."""
    gone: bool = False
    """The text says that it was deleted."""


_DIFF_HEAD: Final = re.compile(r"^diff --(?:git|cc|combined) ", re.MULTILINE)
_STAT: Final = re.compile(r"^ (?P<path>\S.*?) +\| +(?:\d+ ?[+-]*|Bin .*|Unmerged)$", re.MULTILINE)
_NUMBERS: Final = re.compile(r"^(?:\d+|-)\t(?:\d+|-)\t(?P<path>.+)$", re.MULTILINE)
_LETTERS: Final = re.compile(r"^:?(?:\d{6} \d{6} \S+ \S+ )?(?P<kind>[AMDTRC])\d*\t(?P<path>.+)$", re.MULTILINE)
_GONE: Final = re.compile(r"^(?:deleted file mode|\+\+\+ /dev/null)", re.MULTILINE)


def diff_names(text: str) -> list[Named] | None:
    """Read which files a diff names, in any form that git writes; None if it cannot be read."""
    if not text.strip():
        return []
    text = _ANSI.sub("", text)
    if _DIFF_HEAD.search(text) or re.search(r"^\+\+\+ ", text, re.MULTILINE):
        return list(_patched(text))
    for form in (_STAT, _NUMBERS, _LETTERS):
        if rows := list(form.finditer(text)):
            return [_named(row["path"], gone=row.groupdict().get("kind") == "D") for row in rows]
    return None


def _patched(text: str) -> Iterator[Named]:
    starts = [found.start() for found in _DIFF_HEAD.finditer(text)] or [0]
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        # Only the head: lines of a hunk may look like names.
        head = re.split(r"^@@", text[start:end], maxsplit=1, flags=re.MULTILINE)[0]
        paths = patch_paths(head)
        for line in head.splitlines()[:1]:
            paths += [line.partition(" ")[2].partition(" ")[2]] if line.startswith(("diff --cc", "diff --comb")) else []
        both = [part for path in paths for part in _spelled(path)]
        yield Named(tuple(dict.fromkeys(both)), gone=bool(_GONE.search(head)))


_ANSI: Final = re.compile(r"\x1b\[[0-9;]*[mK]")
_V2: Final = re.compile(r"^(?:1 (?P<one>\S{2}) (?:\S+ ){6}|2 \S{2} (?:\S+ ){7}|u \S{2} (?:\S+ ){8}|[?!] )(?P<path>.+)$")
_LONG: Final = re.compile(
    r"^\s+(?P<kind>new file|modified|deleted|renamed|copied|typechange|(?:both|added by|deleted by) \w+):\s+"
    r"(?P<path>.+)$"
)
_SHORT: Final = re.compile(r"^(?P<kind>[ MADRCUT?!]{1,2}) +(?P<path>\S.*)$")
_BARE: Final = re.compile(r"^\t(?P<path>\S.*)$")
_SUBMODULE: Final = re.compile(r" \((?:new commits|modified content|untracked content)[^)]*\)$")


def status_names(text: str) -> list[Named] | None:
    """Read which files a status names: short, long, porcelain 1 and 2, with NULs; None where it cannot be read."""
    text = _ANSI.sub("", text)
    lines = [line for line in re.split(r"[\0\n]", text) if line.strip() and not line.startswith(("#", "##"))]
    long = any(line.startswith(("On branch", "HEAD detached", "Changes ", "Untracked files")) for line in lines)
    if long:
        return [named for line in lines if (named := _long_line(line)) is not None]
    found = [_short_line(line) for line in lines]
    return None if None in found else [one for one in found if one is not None]


def _long_line(line: str) -> Named | None:
    row = _LONG.match(line) or _BARE.match(line)
    if row is None or row["path"].startswith("("):
        return None
    return _named(_SUBMODULE.sub("", row["path"]), gone=row.groupdict().get("kind") == "deleted")


def _short_line(line: str) -> Named | None:
    line = line.rstrip("\r")
    if row := _V2.match(line):
        return _named(row["path"].split("\t")[0], gone="D" in (row["one"] or ""))
    row = _SHORT.match(line)
    return None if row is None else _named(row["path"], gone="D" in row["kind"])


def _named(path: str, *, gone: bool) -> Named:
    parts = [path, *path.split(" -> "), *path.split(" => "), *_braced(path)]
    return Named(tuple(dict.fromkeys(one for part in parts for one in _spelled(part))), gone)


def _braced(path: str) -> list[str]:
    """Both names of a rename that git shortens to `src/{old => new}/file`."""
    found = re.fullmatch(r"(.*)\{(.*) => (.*)\}(.*)", path)
    return [] if found is None else [(found[1] + name + found[4]).replace("//", "/") for name in (found[2], found[3])]


def _spelled(path: str) -> list[str]:
    plain = path.strip().rstrip("/")
    if plain.startswith("..."):
        plain = plain[3:].lstrip("/")
    quoted = plain.strip('"')
    return [one for one in (plain, quoted, unescaped(quoted)) if one]


def is_changed(named: Named, changed: Set[str]) -> bool:
    """Return True if a file or folder that git named is among the changed files."""
    return any(name in changed or any(path.startswith(f"{name}/") for path in changed) for name in named.spellings)


def may_be_changed(named: Named, changed: Set[str]) -> bool:
    """Return True if a path relative to another folder, or with an unknown prefix, may be one of the changed files."""
    ends = [f"/{name}" for name in named.spellings]
    beginnings = [name.partition("/")[2] for name in named.spellings]
    return any(path.endswith(end) for path in changed for end in ends) or any(path in changed for path in beginnings)


def changed_lines(text: str) -> Counter[str]:
    """Count the lines that a patch adds or removes, without what options of git change: blanks, names, context."""
    lines = (line.rstrip() for line in _ANSI.sub("", text).splitlines())
    return Counter(line for line in lines if line[:1] in ("+", "-") and line[:3] not in ("+++", "---") and line[1:])
