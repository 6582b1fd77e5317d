"""Free-form values of events as words: what a call is about, what a tool gave. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json

CHARS_MAX: Final = 16 * 1024
"""Of what a call is about; what is shown at once is shorter."""

TELLING: Final = (
    *("command", "cmd", "file_path", "filePath", "absolute_path", "path"),
    *("pattern", "query", "url", "prompt", "description"),
)
"""Members of a tool's input that say what it is about, the most telling first."""


def about(value: Json) -> str:
    """What a tool's input is about: its most telling member, else all of it as JSON; empty where it says nothing."""
    if isinstance(value, dict):
        for name in TELLING:
            if isinstance(value.get(name), str):
                return str(value[name])[:CHARS_MAX]
        if paths := _changed(value.get("changes")):
            return ", ".join(paths)[:CHARS_MAX]
    return msgspec.json.encode(value).decode()[:CHARS_MAX] if value not in ({}, None) else ""


def _changed(changes: Json) -> list[str]:
    """The files of a list of changes, as an agent that writes by patches has it."""
    rows = changes if isinstance(changes, list) else []
    return [str(row["path"]) for row in rows if isinstance(row, dict) and isinstance(row.get("path"), str)]


def words_of(value: Json) -> str:
    """A tool's output as text: of a list of blocks the first one's, of other JSON its line."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and isinstance(value[0].get("text"), str):
        value = value[0]["text"]
    return value if isinstance(value, str) else "" if value is None else msgspec.json.encode(value).decode()


def as_object(value: object) -> dict[str, Any]:
    """A free-form value that should be an object; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """A free-form value that should be a list; an empty one for anything else."""
    return value if isinstance(value, list) else []
