"""Draws what an approval decides: a command and its folder, the change of a file, or an input. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from backplane.contract.approval import choices
from backplane.contract.canonical import Json
from backplane.view.text import in_workspace, printable
from backplane.view.values import as_list, as_object

LINES_MAX: Final = 400
"""Lines of one question; a page shows all of them, a terminal fewer."""

LINE_CHARS_MAX: Final = 2000
"""Longest line; the rest of it is counted."""

_PATHS: Final = ("file_path", "filePath", "absolute_path", "path")
_OLD: Final = ("old_string", "oldString", "old_str", "old_text", "oldText")
_NEW: Final = ("new_string", "newString", "new_str", "new_text", "newText", "content", "contents", "file_text")
_PATCH: Final = ("diff", "unified_diff", "patch")
"""Names that agents give the members of a change: its file, what goes, what comes, or both as a patch."""


def decided(body: Mapping[str, Any]) -> list[str]:
    """Return the lines that show what an answer to an `ask` decides, escaped for a terminal."""
    found = [printable(in_workspace(_cut(line))) for line in _lines(body)]
    more = [f"… {len(found) - LINES_MAX} more lines"] if len(found) > LINES_MAX else []
    options = [printable(f"{number}. {label}") for number, label in enumerate(choices(body.get("options")), 1)]
    return found[:LINES_MAX] + more + options


def _cut(line: str) -> str:
    more = len(line) - LINE_CHARS_MAX
    return f"{line[:LINE_CHARS_MAX]}… {more} more characters" if more > 0 else line


def _lines(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the command and its folder, then the diff, or the input: its plain members, and its changes of files."""
    given = as_object(body.get("input"))
    if isinstance(command := body.get("command") or given.get("command"), str):
        yield from _member("command", command)
    if isinstance(place := body.get("cwd"), str) and in_workspace(place) not in (".", ""):
        yield f"cwd: {place}"
    if isinstance(diff := body.get("diff"), str):
        yield from diff.splitlines()
        return
    shown = {"command"}
    changes = list(_changes(given, "", shown))
    for name, value in given.items():
        if name not in shown:
            yield from _member(name, value)
    yield from changes


def _changes(given: Mapping[str, Any], path: str, shown: set[str]) -> Iterator[str]:
    """Yield each change in an input as the lines that go and come; their members are added to `shown`."""
    path = _text(given, _PATHS, shown) or path
    patch, old, new = (_text(given, names, shown) for names in (_PATCH, _OLD, _NEW))
    if patch is not None:
        yield from ([f"--- {path}"] if path and not patch.startswith("---") else [])
        yield from patch.splitlines()
    elif old is not None or new is not None:
        yield f"--- {path}"
        yield from (f"-{line}" for line in (old or "").splitlines())
        yield from (f"+{line}" for line in (new or "").splitlines())
    else:
        shown -= set(_PATHS)
    for name in ("edits", "changes", "content"):
        rows = [row for row in as_list(given.get(name)) if isinstance(row, dict)]
        parts = [line for row in rows for line in _changes(row, path, set())]
        if parts:
            shown |= {name, *_PATHS}
            yield from parts


def _text(given: Mapping[str, Any], names: tuple[str, ...], shown: set[str]) -> str | None:
    for name in names:
        if isinstance(value := given.get(name), str):
            shown.add(name)
            return value
    return None


def _member(name: str, value: Json) -> Iterator[str]:
    first, *rest = (value if isinstance(value, str) else str(value)).split("\n")
    yield f"{name}: {first}"
    yield from (f"  {line}" for line in rest)
