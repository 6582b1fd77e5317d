"""Decides how long a run waits for a limit of its model's service, as far as the order allows."""

from __future__ import annotations

import time
from typing import Final

from backplane.contract.canonical import timestamp_at

LIMITED: Final = "backend_rate_limited"
"""Code of a failure that a run may wait out."""

BACKOFF_S: Final = (15.0, 30.0, 60.0, 120.0, 300.0)
"""Seconds before each repeat if the service names no time; the last number counts for all further ones."""

MARGIN_S: Final = 1.0
"""Seconds added to a time that the service names, as its clock and ours differ."""

GO_ON: Final = "The limit of the model's service is over. Go on with the task where you were stopped."
"""Message to the agent after a limit that stopped a turn in which it had called a tool."""


class LimitWait:
    """Counts the waits of one run for limits of its model's service.

    Args:
        allowed_s: seconds that the order allows for all waits together; 0 allows none.
    """

    def __init__(self, allowed_s: float) -> None:
        self.allowed_s = self._left_s = allowed_s
        self._repeats = 0

    def next_s(self, reset_s: float | None) -> float | None:
        """Return the seconds to wait now, and count them; None if the order does not allow so many.

        Args:
            reset_s: seconds until the service takes requests again; None if it does not say.
        """
        backoff_s = BACKOFF_S[min(self._repeats, len(BACKOFF_S) - 1)]
        wait_s = max(reset_s, 0.0) + MARGIN_S if reset_s is not None else min(backoff_s, self._left_s)
        if not 0 < wait_s <= self._left_s:
            return None
        self._left_s -= wait_s
        self._repeats += 1
        return wait_s

    def refusal(self, reset_s: float | None, *, is_gone: bool) -> str:
        """Return a part of an error's text: when the limit ends, and why the run does not wait until then.

        Args:
            is_gone: True if the agent's program has ended, so that there is no conversation to go on with.
        """
        when = f"the limit ends at {time_in(reset_s)}" if reset_s is not None else "the service names no time"
        if is_gone:
            return f"{when}, and the agent's program has ended"
        return f"{when}, and the order waits {self.allowed_s:g} s in all (wait_for_limit_s)"


def time_in(seconds: float) -> str:
    """Return the time that is so many seconds from now, in the contract's form."""
    return timestamp_at(time.time_ns() + int(seconds * 1_000_000_000))
