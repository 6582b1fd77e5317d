"""How answers end, for all dialects: reasons to stop, bodies that only say an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from backplane.contract.canonical import Json
from backplane.dialects.codec import Ledger, Members, put_ext
from backplane.ir import Answer, Candidate, Part, Stop, ToolUse

RUNNABLE: Final = (None, "end", "tool_use", "stop_sequence")
"""Reasons after which a client runs the calls of an answer."""


def has_cut_call(parts: tuple[Part, ...]) -> bool:
    """Return whether the arguments of a call were cut, so that it must not be run."""
    return any(isinstance(part, ToolUse) and part.is_cut for part in parts)


class Endings:
    """A vendor's words for why answers end, by one table to read and one to write.

    Args:
        stops: word → what it means; an unknown one is `other`.
        words: what is said for each reason; for an unknown one a word of the cautious side.
        unended: words of an answer that goes on.
    """

    def __init__(
        self, stops: Mapping[str, Stop], words: Mapping[Stop | None, str], unended: frozenset[str] = frozenset()
    ) -> None:
        self.stops = stops
        self.words = words
        self.unended = unended

    def read(self, raw: str | None, parts: tuple[Part, ...] = (), *, calls: bool = False) -> Stop | None:
        """Return what a word means, None where it is no end; an end after a call is the call's.

        Args:
            calls: there was a call, which is not among `parts`.
        """
        if not raw or raw in self.unended:
            return None
        stop = self.stops.get(raw, "other")
        return "tool_use" if stop == "end" and (calls or any(isinstance(part, ToolUse) for part in parts)) else stop

    def write(self, candidate: Candidate, ledger: Ledger, *, takes_raw: bool = False) -> str | None:
        """Return the word for why an answer stopped: the vendor's own while it means the same.

        Args:
            takes_raw: the source's word is the target's, too.
        """
        raw, stop, parts = candidate.stop_raw, candidate.stop, candidate.message.parts
        if not ledger.is_home and stop in RUNNABLE and has_cut_call(parts):
            ledger.degrade(candidate.stop_at, "stop", "a call was cut, so that it must not be run")
            return self.words["max_tokens"]
        if (ledger.is_home or takes_raw) and raw is not None and self.read(raw, parts) == stop:
            return raw
        if ledger.is_home and stop is None:
            return None
        return self.words[stop]


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


OPENAI_ERROR: Final[dict[str, Json]] = {"type": "upstream_error", "param": None, "code": None}
"""What OpenAI's dialects say of an error beside its message."""


def failed_body(answer: Answer, ledger: Ledger, error: Json) -> dict[str, Any]:
    """Write an answer without candidates: home as it came, for another vendor with `error` in the target's words."""
    out: dict[str, Any] = {}
    put_ext(answer, out, ledger)
    if not (ledger.is_home and out):
        out.setdefault("error", error)
    return out
