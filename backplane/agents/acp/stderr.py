"""Failed requests that an agent writes to its stderr and repeats by itself; the protocol has no word for them. Pure."""

from __future__ import annotations

import re
from typing import Final

import msgspec

FAILURES_MAX: Final = 4
"""Failed requests in a row after which the run ends; an agent of its own repeats them for ever."""

LOOK_S: Final = 0.5
"""Seconds between two looks at the agent's stderr."""

WORDS_CHARS_MAX: Final = 300


class FailedRequest(msgspec.Struct, frozen=True):
    """A request that the model's service did not answer, in the agent's words."""

    words: str
    label: str | None = None
    """The service's own name for the failure."""


class StderrReader:
    """Finds failed requests in what an agent wrote to its stderr.

    Args:
        pattern: a regular expression for one line, with the groups `words` and perhaps `code`.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern)
        self._seen: set[str] = set()

    def read(self, tail: bytes) -> list[FailedRequest]:
        """Return the failures that the last bytes of stderr have and had not at the last call."""
        *lines, _ = tail.decode("utf-8", "replace").split("\n")
        fresh = [line for line in lines if line not in self._seen]
        self._seen = set(lines)
        found = filter(None, map(self._pattern.search, fresh))
        return [FailedRequest(one["words"][:WORDS_CHARS_MAX], one.groupdict().get("code")) for one in found]
