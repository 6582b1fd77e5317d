"""Results of checks, from one check to the whole report. Only values, no work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from backplane.conform.link import HostLine

RuleLevel = Literal["speaks", "behaves", "robust", "complete"]
Verdict = Literal["pass", "fail", "skip"]
LEVELS: Final[tuple[RuleLevel, ...]] = ("speaks", "behaves", "robust", "complete")

LINES_SHOWN: Final = 5
LINE_CHARACTERS: Final = 300


class Result(msgspec.Struct, frozen=True):
    """One check and its outcome."""

    name: str
    level: RuleLevel
    rule: str
    """Number of the rule in `contracts/sidecar.md`."""
    did: str
    """The input that the host got."""
    verdict: Verdict
    seen: str
    """The observation; for a skip, the reason."""
    lines: tuple[str, ...] = ()
    """Lines of the host that show it, with control characters escaped, and the last ones of its stderr."""
    follows: str | None = None
    """Name of the failed check that this failure follows from."""


class Report(msgspec.Struct, frozen=True):
    """All checks of one program."""

    command: tuple[str, ...]
    level: Literal["none", "speaks", "behaves", "robust", "complete"]
    """The highest level of which, and below which, no check failed; `complete` also needs `NEEDED` announced."""
    backend: str | None
    extensions: tuple[str, ...]
    results: tuple[Result, ...]

    def count(self, verdict: Verdict) -> int:
        return sum(result.verdict == verdict for result in self.results)


class Unfit(Exception):
    """Raised when the host broke the rule that is being checked.

    Attributes:
        stderr: the end of the host's stderr.
    """

    def __init__(self, seen: str, lines: Sequence[HostLine] = ()) -> None:
        super().__init__(seen)
        self.seen = seen
        self.lines = tuple(lines)
        self.stderr = b""

    @property
    def is_noise(self) -> bool:
        """True if no line that shows the fault is a message: perhaps only the rule about noise is broken."""
        return bool(self.lines) and all(line.t is None for line in self.lines)


def shown(lines: Sequence[HostLine], stderr: bytes) -> tuple[str, ...]:
    """Return the last lines of both streams, cut and printable."""
    errors = [line for line in stderr.splitlines() if line.strip()]
    own = [printable(line.raw) for line in lines[-LINES_SHOWN:]]
    return (*own, *(f"stderr: {printable(line)}" for line in errors[-LINES_SHOWN:]))


def printable(raw: bytes) -> str:
    """Return a line cut to `LINE_CHARACTERS`, its control characters escaped."""
    text = raw[: 4 * LINE_CHARACTERS].decode("utf-8", "backslashreplace")
    escaped = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return escaped if len(escaped) <= LINE_CHARACTERS else escaped[: LINE_CHARACTERS - 1] + "…"
