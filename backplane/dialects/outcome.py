"""How answers end, for all dialects: reasons to stop, bodies that only say an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from backplane.contract.canonical import Json
from backplane.dialects.codec import Ledger, Members
from backplane.ir import Answer, Candidate, Part, Stop, ToolUse

RUNNABLE: Final = (None, "end", "tool_use", "stop_sequence")
"""Reasons after which a client runs the calls of an answer."""


def stop_of(raw: str, words: Mapping[str, Stop], parts: tuple[Part, ...]) -> Stop:
    """Return what a vendor's reason to stop means; an end after a call is the call's, an unknown word is `other`."""
    stop = words.get(raw, "other")
    return "tool_use" if stop == "end" and any(isinstance(part, ToolUse) for part in parts) else stop


def has_cut_call(parts: tuple[Part, ...]) -> bool:
    """Return whether the arguments of a call were cut, so that it must not be run."""
    return any(isinstance(part, ToolUse) and part.is_cut for part in parts)


def stop_word(
    candidate: Candidate, ledger: Ledger, words: Mapping[Stop | None, str],
    read: Callable[[str | None, tuple[Part, ...]], Stop | None], *, takes_raw: bool = False,
) -> str | None:  # fmt: skip
    """Return the word for why an answer stopped: the vendor's own while it means the same.

    Args:
        words: what the target says for each reason; for an unknown one a word of the cautious side.
        read: reads the target's word.
        takes_raw: the source's word is the target's, too.
    """
    raw, stop, parts = candidate.stop_raw, candidate.stop, candidate.message.parts
    if not ledger.is_home and stop in RUNNABLE and has_cut_call(parts):
        ledger.degrade(candidate.stop_at, "stop", "a call was cut, so that it must not be run")
        return words["max_tokens"]
    if (ledger.is_home or takes_raw) and raw is not None and read(raw, parts) == stop:
        return raw
    if ledger.is_home and stop is None:
        return None
    return words[stop]


def failed_answer(dialect: str, members: Members, beside: Json = None) -> Answer:
    """Read a body that only says an error: an answer without candidates.

    Args:
        beside: what is said beside the error, for a body whose error is empty.
    """
    error: Any = members.rest.get("error")
    words = error.get("message") if type(error) is dict else error or beside
    return Answer(
        dialect=dialect, candidates=(), error=words if type(words) is str else "unknown error",
        ext=members.ext(dialect),
    )  # fmt: skip
