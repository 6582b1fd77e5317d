"""What readers of all dialects do alike: contents, breakpoints, reasons to stop, bodies that only say an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from backplane.contract.canonical import Json
from backplane.dialects._parts import kept, take
from backplane.ir import Answer, Part, Stop, Text, ToolUse


def take_cache(rest: dict[str, Any]) -> dict[str, Any] | None:
    """Take a breakpoint of the prompt cache in the form that Anthropic gave it."""
    found = rest.get("cache_control")
    if type(found) is not dict or found.get("type") != "ephemeral":
        return None
    del rest["cache_control"]
    return {key: value for key, value in found.items() if key != "type"}


def take_details(rest: dict[str, Any], key: str) -> dict[str, Any]:
    """Take an object of details; an empty one stays, so that it is written again."""
    value = rest.get(key)
    if type(value) is dict and value:
        del rest[key]
        return value.copy()
    return {}


def take_content(
    rest: dict[str, Any], key: str, at: str, read: Callable[[Json, str], Part]
) -> tuple[tuple[Part, ...], bool | None]:
    """Take a content that is one text or a list of blocks; which of both it was is `Message.flat`."""
    if (text := take(rest, key, str)) is not None:
        return (Text(text=text, at=f"{at}/{key}"),), True
    if (blocks := take(rest, key, list)) is not None:
        return tuple(read(block, f"{at}/{key}/{place}") for place, block in enumerate(blocks)), False
    return (), None


def stop_of(raw: str, words: Mapping[str, Stop], parts: tuple[Part, ...]) -> Stop:
    """Translate a vendor's reason to stop; an end after a call is the call's."""
    stop = words.get(raw, "other")
    return "tool_use" if stop == "end" and any(isinstance(part, ToolUse) for part in parts) else stop


def failed_answer(dialect: str, rest: dict[str, Any], beside: Json = None) -> Answer:
    """Read a body that only says an error: an answer without candidates.

    Args:
        beside: what is said beside the error, for a body whose error is empty.
    """
    error = rest.get("error")
    words = error.get("message") if type(error) is dict else error or beside
    return Answer(
        dialect=dialect, candidates=(), error=words if type(words) is str else "unknown error", ext=kept(dialect, rest)
    )
