"""Translate the reasons why answers end, by two tables a vendor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from backplane.dialects.common import LossLedger
from backplane.dialects.ir import Candidate, Part, Stop, ToolUse

RUNNABLE: Final = (None, "end", "tool_use", "stop_sequence")
"""Reasons after which a client runs the calls of an answer."""


def has_cut_call(parts: tuple[Part, ...]) -> bool:
    """Return whether the arguments of a call were cut, so that it must not be run."""
    return any(isinstance(part, ToolUse) and part.is_cut for part in parts)


class Endings(msgspec.Struct, frozen=True):
    """A vendor's words for why answers end, by one table to read and one to write."""

    stops: Mapping[str, Stop]
    """Word → what it means; an unknown one is `other`."""
    words: Mapping[Stop | None, str]
    """Reason → word; an unknown reason gets a word that promises no complete answer."""
    unended: frozenset[str] = frozenset()
    """Words of an answer that goes on."""

    def read(self, raw: str | None, parts: tuple[Part, ...] = (), *, calls: bool = False) -> Stop | None:
        """Return what a word means, None where it is no end; an end after a call is the call's.

        Args:
            calls: there was a call, which is not among `parts`.
        """
        if not raw or raw in self.unended:
            return None
        stop = self.stops.get(raw, "other")
        return "tool_use" if stop == "end" and (calls or any(isinstance(part, ToolUse) for part in parts)) else stop

    def write(self, candidate: Candidate, ledger: LossLedger) -> str | None:
        """Return the word for why an answer stopped: the vendor's own while it means the same.

        A word that means something else than the source's is noted, also if the way back would mend it.
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
