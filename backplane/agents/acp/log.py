"""Reads failed model requests from an agent's log, as the protocol has no message for them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from backplane.agents.rows import SESSION, AgentRow

FAILURES_MAX: Final = 4
"""Failed requests in a row after which the run ends; the agent itself would retry for ever."""

LOOK_S: Final = 0.5
"""Seconds between two reads of the agent's log."""

WORDS_CHARS_MAX: Final = 300
READ_BYTES_MAX: Final = 8 * 1024 * 1024
"""Maximum bytes per read of a log file; if more were added since the last read, the first of them are skipped."""


class FailedRequest(msgspec.Struct, frozen=True):
    """A request that the model's service did not answer, with the agent's text for it."""

    words: str
    label: str | None = None
    """The service's own name for the failure; None if the log has none."""


def log_reader(
    row: AgentRow, config: str | None, session: str, stderr: Callable[[], bytes]
) -> Callable[[], list[FailedRequest]]:
    """Return a function that returns the failed requests that are new in the log.

    Args:
        row: has the log's file name, and the pattern of a line with the groups `words` and optionally `code`.
        config: folder of the log; if it is None, or the row names no file, the log is stderr.
        session: id of the session, which may be in the file's name.
        stderr: returns the last bytes of stderr.
    """
    name, pattern = row.log.replace(SESSION, session), re.compile(row.failed_request)
    new_lines = FileLines(Path(config), name).read if name and config is not None else StderrLines(stderr).read
    return lambda: failed_requests(pattern, new_lines())


class StderrLines:
    """The lines that a program writes to its stderr."""

    def __init__(self, tail: Callable[[], bytes]) -> None:
        self._tail = tail
        self._seen: set[str] = set()

    def read(self) -> list[str]:
        """Return the whole lines that the previous call did not return."""
        *lines, _ = self._tail().decode("utf-8", "replace").split("\n")
        fresh = [line for line in lines if line not in self._seen]
        self._seen = set(lines)
        return fresh


class FileLines:
    """The lines that are added to files after this object was made.

    Args:
        name: the files' name in the folder; it may have wildcards.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._places = {path: path.stat().st_size for path in folder.glob(name)}

    def read(self) -> list[str]:
        """Return the whole lines that were added since the last call."""
        lines: list[str] = []
        for path in self._folder.glob(self._name):
            with contextlib.suppress(OSError), path.open("rb") as file:
                begin = max(self._places.get(path, 0), path.stat().st_size - READ_BYTES_MAX)
                file.seek(begin)
                data = file.read(READ_BYTES_MAX)
                whole = data[: data.rfind(b"\n") + 1]
                self._places[path] = begin + len(whole)
                lines += whole.decode("utf-8", "replace").split("\n")
        return lines


def failed_requests(pattern: re.Pattern[str], lines: list[str]) -> list[FailedRequest]:
    """Read the failed requests in lines of a log."""
    found = filter(None, map(pattern.search, lines))
    return [FailedRequest(_unescaped(one["words"])[:WORDS_CHARS_MAX], one.groupdict().get("code")) for one in found]


def _unescaped(words: str) -> str:
    """Return the text of a quoted string without its escapes; a new line becomes a space."""
    return re.sub(r"\\(.)", lambda escaped: " " if escaped[1] in "nrt" else escaped[1], words)
