"""Translates stop reasons with two tables for each vendor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from backplane.dialects.common import LossLedger
from backplane.dialects.ir import Candidate, Part, Stop, ToolUse

RUNNABLE: Final = (None, "end", "tool_use", "stop_sequence")
"""Stop reasons after which a client runs the calls of an answer."""


def has_cut_call(parts: tuple[Part, ...]) -> bool:
    """Return whether the arguments of a call were cut, so that it must not be run."""
    return any(isinstance(part, ToolUse) and part.is_cut for part in parts)


class Endings(msgspec.Struct, frozen=True):
    """A vendor's stop reasons, with one table to read and one to write them."""

    stops: Mapping[str, Stop]
    """The vendor's reason → ours; an unknown one is `other`."""
    words: Mapping[Stop | None, str]
    """Our reason → the vendor's; None and `other` must not become the reason of a complete answer."""
    unended: frozenset[str] = frozenset()
    """Words that the vendor sends as the reason while an answer has not ended."""

    def read(self, raw: str | None, parts: tuple[Part, ...] = (), *, calls: bool = False) -> Stop | None:
        """Return our reason for a vendor's; None if the answer has not ended. With a call, `end` becomes `tool_use`.

        Args:
            calls: True if the answer has a call that is not among `parts`.
        """
        if not raw or raw in self.unended:
            return None
        stop = self.stops.get(raw, "other")
        return "tool_use" if stop == "end" and (calls or any(isinstance(part, ToolUse) for part in parts)) else stop

    def write(self, candidate: Candidate, ledger: LossLedger) -> str | None:
        """Return the vendor's reason for an answer's end: the one that was read, if it still means the same.

        A reason with another meaning than the source's is noted, even if translating it back would restore it.
        """
        raw, stop, parts = candidate.stop_raw, candidate.stop, candidate.message.parts
        if not ledger.is_home and stop in RUNNABLE and has_cut_call(parts):
            ledger.degrade(candidate.stop_at, "stop", "a call was cut, so that it must not be run")
            return self.words["max_tokens"]
        if ledger.is_home and raw is not None and self.read(raw, parts) == stop:
            return raw
        if ledger.is_home and stop is None:
            return None
        word = self.words[stop]
        found = self.read(word, parts)
        if not ledger.is_home and stop is not None and (found != stop or stop in ("other", "error")):
            ledger.degrade(candidate.stop_at, "stop", f"{raw or stop} became {found}")
        return word
