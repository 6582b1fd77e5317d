"""Turns free-form values of events into words: the subject of a call, the output of a tool. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json

TEXT_CHARS_MAX: Final = 16 * 1024
"""Characters kept of one text: a message, an output, the subject of a call; most views show fewer."""

TELLING: Final = (
    *("command", "cmd", "file_path", "filePath", "absolute_path", "path"),
    *("pattern", "query", "url", "prompt", "description"),
)
"""Members of a tool's input that name its subject, the most telling first."""


def about(value: Json) -> str:
    """Return the subject of a tool's input: its most telling member, else all of it as JSON; empty if it has none."""
    if isinstance(value, dict):
        for name in TELLING:
            if isinstance(value.get(name), str):
                return str(value[name])[:TEXT_CHARS_MAX]
        if paths := _changed(value.get("changes")):
            return ", ".join(paths)[:TEXT_CHARS_MAX]
    return msgspec.json.encode(value).decode()[:TEXT_CHARS_MAX] if value not in ({}, None) else ""


def _changed(changes: Json) -> list[str]:
    """Return the files in a list of changes, the input of an agent that writes patches."""
    rows = changes if isinstance(changes, list) else []
    return [str(row["path"]) for row in rows if isinstance(row, dict) and isinstance(row.get("path"), str)]


def words_of(value: Json) -> str:
    """Return a tool's output as text: the first text of a list of blocks, any other JSON on one line."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and isinstance(value[0].get("text"), str):
        value = value[0]["text"]
    return value if isinstance(value, str) else "" if value is None else msgspec.json.encode(value).decode()


def as_object(value: object) -> dict[str, Any]:
    """Return a free-form value if it is an object, else an empty object."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """Return a free-form value if it is a list, else an empty list."""
    return value if isinstance(value, list) else []
