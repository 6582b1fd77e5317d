"""Reads the texts in which hosts claim changes: files that a tool wrote, git's diff and status. Pure."""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Set
from typing import Final, Literal

import msgspec

from backplane.contract.canonical import Json
from backplane.policy.paths import unescaped
from backplane.policy.rules import tool_names

TEXT_CHARS_MAX: Final = 4 * 1024 * 1024
"""Maximum length of a text that is compared word by word; a longer one counts as `alike`."""

# Files written by a tool ----------------------------------------------------------------------------------------------

_WRITERS: Final = frozenset({"writefile", "write", "create", "createfile", "createnewfile", "newfile", "savefile"})
"""Names of tools that write a whole file, in lower case and without separators."""

_PATHS: Final = ("path", "file_path", "filePath", "filepath", "absolute_path", "target_file", "filename", "file")
_CONTENTS: Final = ("content", "contents", "file_text", "fileText", "text")
_WHOLE_MODES: Final = (None, "overwrite", "w", "write", "create")


class WrittenFile(msgspec.Struct, frozen=True):
    """A call that writes a file."""

    path: str
    content: str | None
    """The whole file's text; None if the call has only a part of it."""


def plain_name(tool: str) -> str:
    """Return a tool's name in lower case, without separators and without the name of an MCP server."""
    return re.sub(r"[^a-z0-9]", "", tool.rpartition("__")[2].lower())


def written(tool: str, value: Json) -> WrittenFile | None:
    """Return the file that a tool's call writes; None if the tool writes no file or the call names none."""
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
        `same` if they have the same words in the same order, as line ends, byte order marks and formatters change no
        words; `alike` if they share at least half of their words; else `other`.
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

_ANSI: Final = re.compile(r"\x1b\[[0-9;]*[mK]")
_NAMES_A_FILE: Final = re.compile(r"diff --\w+ | \S.* \| |[ MADRCUT?!]{1,2} +[^\s(]|[12u] \S\S |\t\s*\S")
"""Beginning of a line in which git names a file: a diff's header, a line of `--stat`, or one of any status format."""
_BETWEEN_WORDS: Final = re.compile(r"[\s/\"]+")


def changed_lines(text: str) -> Counter[str]:
    """Count the lines that a patch adds or removes; git's options for blanks, names and context make no difference."""
    lines = (line.rstrip() for line in _ANSI.sub("", text).splitlines())
    return Counter(line for line in lines if line[:1] in ("+", "-") and line[:3] not in ("+++", "---") and line[1:])


def unchanged_file(text: str, changed: Set[str]) -> str | None:
    """Return the first line of a git status or a diff's summary that names an unchanged file; None if there is none.

    A line is about a changed file if one of its words is a part of a changed path: git shortens and joins names.
    """
    known = {word for path in changed for word in _BETWEEN_WORDS.split(path)}
    for line in re.split(r"[\0\n]", _ANSI.sub("", text)):
        words = _BETWEEN_WORDS.split(unescaped(line) if "\\" in line else line)
        if _NAMES_A_FILE.match(line) and known.isdisjoint(words):
            return line
    return None
