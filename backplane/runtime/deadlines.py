"""The limits of a run's time: of all of it, and of its host's silence.

Reads that begin and end come in, and what counts as progress; when a limit has passed, whoever
decides how the run ends is told. Nothing here waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from backplane.config import Limits
from backplane.errors import BackendError, BackplaneError

LOOK_S: Final = 0.25
"""How often the deadlines are looked at while the consumer, not the child, keeps us waiting."""


class Deadlines:
    """Counts from when it is made.

    Args:
        decide: told how the run ends, `(reason, error)`, when a limit has passed.
    """

    def __init__(self, limits: Limits, backend_id: str, decide: Callable[[str, BackplaneError], None]) -> None:
        self.reading_since: float | None = None
        """When the read began that waits now, by a monotonic clock; None while nobody pulls."""
        self._limits = limits
        self._backend_id = backend_id
        self._decide = decide
        self._started = time.monotonic()
        self._silent_s = 0.0
        """Spent in reads that ended since the last progress."""

    @property
    def run_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._started

    @property
    def ends(self) -> float:
        """When the run's time is up, by a monotonic clock; infinite for one without a limit."""
        return float("inf") if self._limits.run_s is None else self._started + self._limits.run_s

    def begin_read(self) -> None:
        """Somebody waits for the child: until something carries progress, that is its silence."""
        self.reading_since = time.monotonic()

    def end_read(self) -> None:
        assert self.reading_since is not None
        self._silent_s += time.monotonic() - self.reading_since
        self.reading_since = None

    def restart(self) -> None:
        """Begin to count the child's silence anew."""
        self._silent_s = 0.0
        if self.reading_since is not None:
            self.reading_since = time.monotonic()

    def left_s(self, *, expected: bool) -> float:
        """Seconds to the next look at the deadlines; one that has passed ends the run.

        Args:
            expected: it is the host's turn to say something. Else its silence does not count, nor while nobody reads.
        """
        limits = self._limits
        left_s = limits.run_s - self.run_s if limits.run_s is not None else float("inf")
        if left_s <= 0:
            text = f"the run took longer than {limits.run_s:g} s (run_s)"
            self._decide("deadline", BackendError("backend_timeout", text, hint="raise --timeout"))
        if not expected or self.reading_since is None:
            return min(left_s, LOOK_S)
        idle_left_s = limits.idle_s - self._silent_s - (time.monotonic() - self.reading_since)
        if idle_left_s <= 0:
            text = f"{self._backend_id!r} sent nothing for {limits.idle_s:g} s (idle_s)"
            self._decide("idle", BackendError("backend_timeout", text, hint="raise --idle-timeout"))
        return min(left_s, idle_left_s)
