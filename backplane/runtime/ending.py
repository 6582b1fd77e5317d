"""Decides how a run ends: the first reason counts, but an unexpected exception outranks it."""

from __future__ import annotations

import time
from typing import Final

import anyio

from backplane.errors import BackplaneError, unforeseen
from backplane.process.aio import Flag
from backplane.protocol.control import ControlEnd
from backplane.receipts.outcomes import End
from backplane.receipts.state import RunState

RESULT_S_MAX: Final = 20.0
"""Seconds for the final diff after the run's deadline; usual changes need far less."""

HURRIED_S_MAX: Final = 1.0
"""Seconds for the final diff, and for hooks, of a run that has to end at once; without a diff the run is partial."""

_NEVER: Final = float("inf")


class RunEnding:
    """Decides the end of one run.

    Attributes:
        start: the scope in which the host is started; a decided end cancels it.
        talk: the scope in which the host's messages are read; a decided end cancels it.
        hooks: the scope in which hooks observe the end.
        ends: monotonic time at which the run's time is up; infinite without a limit.
        error: the error of the control plane that ended the run; None if its host or its caller ended it.
        fault: the first unexpected exception; None if there was none.
        was_sent: True once the order was sent to the host.
        is_sealing: True once the host is gone and the run's result is being read.
    """

    def __init__(self, facts: RunState, run_s: float | None) -> None:
        self._facts = facts
        self._began = time.monotonic()
        self.ends = _NEVER if run_s is None else self._began + run_s
        self.start, self.talk, self.hooks = anyio.CancelScope(), anyio.CancelScope(), anyio.CancelScope()
        self.end: End | None = None
        self.error: BackplaneError | None = None
        self.fault: BackplaneError | None = None
        self.over = Flag()
        """Set once the host's last message has come, or can no longer come; later messages have no effect."""
        self.line: ControlEnd | None = None
        """Our end of the connection to the host; None until the host has started."""
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
        """True if the run's end has a reason, or the host's last message has come."""
        return self.end is not None or self.over.is_set()

    def decide(self, reason: str, error: BackplaneError | None = None, *, note: str | None = None) -> None:
        """End the run for a reason, unless its end is decided, and stop its host.

        Args:
            note: the caller's reason for a cancellation.
        """
        if not self.is_decided:
            self.end = End(reason=reason, code=error.code if error is not None else None)
            self.error = error
            if note is not None:
                self._facts.added["cancel_reason"] = note
        self._stop()

    def fail(self, error: Exception) -> None:
        """End the run as failed because of an unexpected exception."""
        if self.fault is None:
            self.fault = self.error = unforeseen(error)
            self.end = End(reason="failed", code=self.fault.code)
        self.close()
        self._stop()

    def lose_journal(self, error: BackplaneError) -> None:
        """End the run because its journal cannot be written, even after a good final."""
        self.end, self.error = self.end or End(reason="store", code=error.code), self.error or error
        self.close()
        self._stop()

    def _stop(self) -> None:
        self._is_stopped = True
        self.start.cancel()
        self.talk.cancel()

    def close(self) -> None:
        """Ignore all further messages of the host."""
        if self.line is not None:
            self.line.close_run(self._facts.run_id)
        self.over.set()

    def begin_sealing(self) -> None:
        """Start the clock for reading the run's result."""
        self.is_sealing, self._sealing_since = True, time.monotonic()

    def hurry(self) -> None:
        """Limit the waits for the final diff and for hooks to `HURRIED_S_MAX`."""
        self._hurried_at = min(self._hurried_at, time.monotonic())
        self.hooks.deadline = min(self.hooks.deadline, anyio.current_time() + HURRIED_S_MAX)

    def is_given_up(self) -> bool:
        """Return True if the copy for the workspace, or the final diff, is to be abandoned. Callable in any thread."""
        if not self.was_sent:
            return self._is_stopped or self.is_late
        since = self._sealing_since
        return time.monotonic() > min(
            max(since, self._hurried_at) + HURRIED_S_MAX, max(since, self.ends) + RESULT_S_MAX
        )
