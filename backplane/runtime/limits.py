"""Limits on a run's workspace, and on its time: the run, its host's start, and the host's silence, longer in a call.

The beginning and end of each read come in, and what counts as progress; `decide` is called when a limit has passed.
Nothing here waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import itemgetter
from typing import Final

from backplane.config import Limits
from backplane.errors import BackendError, BackplaneError
from backplane.process.aio import SECOND_LOOK_S
from backplane.workspace import Quota

LOOK_S: Final = 0.25
"""How often the deadlines are looked at while the consumer, not the child, keeps us waiting."""


def quota_of(limits: Limits) -> Quota:
    """Return how large a workspace may be."""
    return Quota(bytes_max=limits.workspace_bytes_max, files_max=limits.workspace_files_max)


class Deadlines:
    """Counts from when it is made.

    Args:
        decide: told how the run ends, `(reason, error)`, when a limit has passed.
        passed_over: says what the host wrote in vain, as a clause for an error.
        open_call: the name of a tool whose call has no result yet; empty for none.
    """

    def __init__(
        self,
        limits: Limits,
        backend_id: str,
        decide: Callable[[str, BackplaneError], None],
        passed_over: Callable[[], str],
        open_call: Callable[[], str],
    ) -> None:
        self.reading_since: float | None = None
        """When the read began that waits now, by a monotonic clock; None while nobody pulls."""
        self._limits = limits
        self._backend_id = backend_id
        self._decide = decide
        self._passed_over = passed_over
        self._open_call = open_call
        self._started = time.monotonic()
        self.ends = float("inf") if limits.run_s is None else self._started + limits.run_s
        """When the run's time is up, by a monotonic clock; infinite for one without a limit."""
        self._silent_s = 0.0
        """Spent in reads that ended since the last progress."""
        self.hello_since: float | None = None
        """Since when the hello is waited for, by a monotonic clock; None while it is not."""
        self._passed = False
        """A limit had passed at the last look."""
        self._due = self._started
        """When the next look is to be, by a monotonic clock."""

    @property
    def run_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._started

    def end_read(self) -> None:
        """Count the read that ends as the child's silence, until something carries progress."""
        assert self.reading_since is not None
        self._silent_s += time.monotonic() - self.reading_since
        self.reading_since = None

    def restart(self) -> None:
        """Begin to count the child's silence anew."""
        self._silent_s = 0.0
        if self.reading_since is not None:
            self.reading_since = time.monotonic()

    def left_s(self, *, expected: bool) -> float:
        """Return the seconds to the next look at the limits; a limit that has passed at two looks ends the run.

        Between the two the loop reads what lies in the pipe: where this process was stopped, or waited for its disk,
        its timers run out before it has read. Where the first look came late, the host has as long again, as it may
        have been stopped with us.

        Args:
            expected: it is the host's turn to say something. Else its silence does not count, nor while nobody reads.
        """
        now = time.monotonic()
        left_s, judge = self._nearest(now, expected=expected)
        if left_s > 0:
            self._passed = False
        elif self._passed:
            judge()
        else:
            self._passed = True
            left_s = max(SECOND_LOOK_S, now - self._due)
        self._due = now + max(left_s, 0.0)
        return left_s

    def judge_run(self) -> None:
        """End a run whose time is up."""
        if time.monotonic() >= self.ends:
            text = f"the run took longer than {self._limits.run_s:g} s (run_s)"
            self._decide("deadline", BackendError("backend_timeout", text, hint="raise --timeout (limits.run_s)"))

    def _nearest(self, now: float, *, expected: bool) -> tuple[float, Callable[[], None]]:
        """Seconds to the next limit, and what ends the run for it."""
        limits = [(self.ends - now, self.judge_run)]
        if self.hello_since is not None:
            limits.append((self._limits.hello_s - (now - self.hello_since), self._judge_hello))
        if expected and self.reading_since is not None:
            silent_s = self._silent_s + now - self.reading_since
            limit_s = self._limits.tool_s if self._open_call() else self._limits.idle_s
            limits.append((limit_s - silent_s, self._judge_silence))
        else:
            limits.append((LOOK_S, self.judge_run))
        return min(limits, key=itemgetter(0))

    def _judge_hello(self) -> None:
        text = f"no hello from {self._backend_id!r} within {self._limits.hello_s:g} s (hello_s){self._passed_over()}"
        hint = "is this a program that speaks abp/v0.1? raise hello_s for a slow one"
        self._decide("failed", BackendError("protocol_handshake_failed", text, hint=hint))

    def _judge_silence(self) -> None:
        limits, call = self._limits, self._open_call()
        if call:
            silence = f"for {limits.tool_s:g} s while its call of {call!r} was open (tool_s)"
            hint = "end the command earlier, or raise tool_s of [limits] (BACKPLANE_TOOL_S)"
        else:
            silence, hint = f"for {limits.idle_s:g} s (idle_s)", "raise limits.idle_s (BACKPLANE_IDLE_S)"
        text = f"{self._backend_id!r} sent nothing {silence}{self._passed_over()}"
        self._decide("idle", BackendError("backend_timeout", text, hint=hint))
