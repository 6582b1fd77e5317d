"""How a run ends: the first reason counts, and an exception that nobody foresaw outranks it."""

from __future__ import annotations

import time
from typing import Final

import anyio

from backplane.errors import BackplaneError, unforeseen
from backplane.protocol.control import ControlEnd
from backplane.receipts.build import End, RunState

RESULT_S_MAX: Final = 20.0
"""Seconds for the final diff after the run's deadline; a change by hand or by a model needs far less."""

HURRIED_S_MAX: Final = 1.0
"""Seconds for the final diff of a run that was asked to end now; without it the run is partial."""

_NEVER: Final = float("inf")


class RunEnding:
    """The end of one run, as it is decided.

    Attributes:
        start: a scope in which the host is started; a decision cancels it.
        talk: a scope in which the host is heard; a decision cancels it.
        ends: when the run's time is up, by a monotonic clock; infinite without a limit.
        error: the error of the control plane that ended the run; None if its host or its caller ended it.
        fault: an exception that nobody foresaw; None if there was none.
        was_sent: True once the order was sent to the host.
        is_sealing: True once the host is gone and its result is read.
    """

    def __init__(self, facts: RunState, run_s: float | None) -> None:
        self._facts = facts
        self._began = time.monotonic()
        self.ends = _NEVER if run_s is None else self._began + run_s
        self.start, self.talk = anyio.CancelScope(), anyio.CancelScope()
        self.end: End | None = None
        self.error: BackplaneError | None = None
        self.fault: BackplaneError | None = None
        self.over = anyio.Event()
        """Set once the host's last word is in, or none will come; messages after it have no effect."""
        self.line: ControlEnd | None = None
        """The line of the host; None until it is started."""
        self.was_sent = False
        self.is_sealing = self._is_stopped = False
        self._sealing_since = self._hurried_at = _NEVER

    @property
    def run_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._began

    @property
    def is_late(self) -> bool:
        """True once the run's time is up."""
        return time.monotonic() >= self.ends

    @property
    def is_decided(self) -> bool:
        """True if the run ends, or has its host's last word."""
        return self.end is not None or self.over.is_set()

    def decide(self, reason: str, error: BackplaneError | None = None, *, note: str | None = None) -> None:
        """End the run for a reason, unless its end is decided, and stop its host.

        Args:
            note: the caller's reason to cancel it.
        """
        if not self.is_decided:
            self.end = End(reason=reason, code=error.code if error is not None else None)
            self.error = error
            if note is not None:
                self._facts.added["cancel_reason"] = note
        self._stop()

    def fail(self, error: Exception) -> None:
        """End the run as failed for an exception that nobody foresaw."""
        if self.fault is None:
            self.fault = self.error = unforeseen(error)
            self.end = End(reason="failed", code=self.fault.code)
        self.close()
        self._stop()

    def lose_journal(self, error: BackplaneError) -> None:
        """End the run as one whose events cannot be kept, even after a good final."""
        self.end, self.error = self.end or End(reason="store", code=error.code), self.error or error
        self.close()
        self._stop()

    def _stop(self) -> None:
        self._is_stopped = True
        self.start.cancel()
        self.talk.cancel()

    def close(self) -> None:
        """Accept nothing more of the host."""
        if self.line is not None:
            self.line.close_run(self._facts.run_id)
        self.over.set()

    def begin_sealing(self) -> None:
        """Begin to count the time in which the run's result is read."""
        self.is_sealing, self._sealing_since = True, time.monotonic()

    def hurry(self) -> None:
        """Wait no longer than `HURRIED_S_MAX` for the final diff."""
        self._hurried_at = min(self._hurried_at, time.monotonic())

    def is_given_up(self) -> bool:
        """Return True if the copy that is being made, or the final diff, is to be abandoned. Callable in any thread."""
        if not self.was_sent:
            return self._is_stopped or self.is_late
        since = self._sealing_since
        return time.monotonic() > min(
            max(since, self._hurried_at) + HURRIED_S_MAX, max(since, self.ends) + RESULT_S_MAX
        )
