"""Reads failed model requests from an agent's log, as the protocol has no message for them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

FAILURES_MAX: Final = 4
"""Failed requests in a row after which the run ends; the agent itself would retry for ever."""

LOOK_S: Final = 0.5
"""Seconds between two looks at the agent's log."""

WORDS_CHARS_MAX: Final = 300
READ_BYTES_MAX: Final = 8 * 1024 * 1024
"""Most bytes read in one look at a log file; if more came since the last look, their beginning is left out."""


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
        """Return the failures in the last bytes of stderr that the previous call did not return."""
        *lines, _ = tail.decode("utf-8", "replace").split("\n")
        fresh = [line for line in lines if line not in self._seen]
        self._seen = set(lines)
        return _found(self._pattern, fresh)


class FileReader:
    """Finds failed requests in the lines added to an agent's log file; lines from before the first look do not count.

    Args:
        pattern: as of `StderrReader`.
        folder: the agent's state.
        name: of the file in it, with wildcards.
    """

    def __init__(self, pattern: str, folder: Path, name: str) -> None:
        self._pattern = re.compile(pattern)
        self._folder, self._name = folder, name
        self._places = {path: path.stat().st_size for path in folder.glob(name)}

    def read(self) -> list[FailedRequest]:
        """Return the failures that were written since the last call."""
        lines: list[str] = []
        for path in self._folder.glob(self._name):
            with contextlib.suppress(OSError):
                lines += self._lines(path)
        return _found(self._pattern, lines)

    def _lines(self, path: Path) -> list[str]:
        begin = max(self._places.get(path, 0), path.stat().st_size - READ_BYTES_MAX)
        with path.open("rb") as file:
            file.seek(begin)
            data = file.read(READ_BYTES_MAX)
        whole = data[: data.rfind(b"\n") + 1]
        self._places[path] = begin + len(whole)
        return whole.decode("utf-8", "replace").split("\n")


def _found(pattern: re.Pattern[str], lines: Iterable[str]) -> list[FailedRequest]:
    found = filter(None, map(pattern.search, lines))
    return [FailedRequest(_unescaped(one["words"])[:WORDS_CHARS_MAX], one.groupdict().get("code")) for one in found]


def _unescaped(words: str) -> str:
    """Return words of a quoted string without its escapes; a new line becomes a space."""
    return re.sub(r"\\(.)", lambda escaped: " " if escaped[1] in "nrt" else escaped[1], words)
