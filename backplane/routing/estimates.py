"""Estimates cost and duration of a run from the receipts of earlier runs: decayed means, and their confidence."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from itertools import takewhile
from typing import Final, Literal

import msgspec

from backplane.errors import CODES

PERIOD_MS: Final = 7 * 86_400_000
"""A run counts half as much a week later: vendors change models and load within weeks."""

WEIGHT: Final = 1 << 20
"""Weight of a run that began within the last period; after 20 periods it is 0."""

TYPED_MIN: Final = 3
"""Complete runs of a task's type from which these alone count."""

SILENT: Final = frozenset({"refused", "cancelled", "interrupted", "store"})
"""Reasons of an end that are not the backend's doing."""

RATE_LIMITED_MS: Final = 30_000
"""A pause where a service names none: services count by the minute."""

CIRCUIT_FAILURES: Final = 3
"""Failures in a row that open a circuit: two may be one outage of seconds."""
CIRCUIT_MS: Final = 60_000
CIRCUIT_MS_MAX: Final = 900_000


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One ended run, as its receipt has it."""

    backend: str
    group: str
    model: str | None
    type: str | None = None
    """The task's type; None if the order named none."""
    began_ms: int
    """Milliseconds since 1970."""
    duration_ms: int | None = None
    cost_usd_micros: int | None = None
    complete: bool = True
    reason: str | None = None
    """Why the run ended, as `End.reason`."""
    code: str | None = None
    """Why it did not complete."""
    retry_after_ms: int | None = None
    """The pause that its model's service asked for."""


class Estimate(msgspec.Struct, frozen=True):
    """The expected value of one complete run: millionths of a dollar, or milliseconds."""

    value: int
    confidence: int
    """0 to 1000."""
    runs: int
    """Runs that it is from; 0 for a price."""
    basis: Literal["measured", "priced", "assumed"] = "measured"


def weight(began_ms: int, now_ms: int) -> int:
    """Return the weight of a run, up to `WEIGHT`."""
    periods = (now_ms - began_ms) // PERIOD_MS
    return WEIGHT >> periods if 0 <= periods < 20 else 0


def estimate(runs: Iterable[tuple[int, int, bool]]) -> Estimate | None:
    """Return the expected value of a complete run, failed runs included; None if no complete run counts.

    Args:
        runs: of each its weight, its value, and whether it was complete.
    """
    counted = [run for run in runs if run[0]]
    complete = sum(weight for weight, _, is_complete in counted if is_complete)
    if not complete:
        return None
    total = sum(weight * value for weight, value, _ in counted)
    return Estimate(-(-total // complete), _confidence(counted), len(counted))


def _confidence(runs: list[tuple[int, int, bool]]) -> int:
    weights = sum(run[0] for run in runs)
    mean = sum(run[0] * run[1] for run in runs) / weights
    spread = sum(run[0] * (run[1] - mean) ** 2 for run in runs) / weights
    if len(runs) < 2:
        return 0
    if not spread:
        return 1000
    effective = weights**2 / sum(run[0] ** 2 for run in runs)
    return max(0, int(1000 * (1 - math.sqrt(spread) / (mean * math.sqrt(effective)))))


class Measures:
    """Costs and latencies by group, model and type, worked out once for many decisions.

    Args:
        observations: of one state folder; their order does not matter.
    """

    def __init__(self, observations: Iterable[Observation], now_ms: int) -> None:
        self.observations = tuple(observations)
        self._now_ms = now_ms
        self._found: dict[tuple[str, str | None, str, str], Estimate | None] = {}
        self._runs = defaultdict[tuple[str, str | None], list[Observation]](list)
        for one in self.observations:
            if one.reason not in SILENT:
                self._runs[one.group, one.model].append(one)

    def cost(self, group: str, model: str | None, type_: str) -> Estimate | None:
        """Return the expected cost in millionths of a dollar; None if it is unknown."""
        return self._of(group, model, type_, "cost_usd_micros")

    def latency(self, group: str, model: str | None, type_: str) -> Estimate | None:
        """Return the expected duration in milliseconds; None if it is unknown."""
        return self._of(group, model, type_, "duration_ms")

    def _of(self, group: str, model: str | None, type_: str, member: str) -> Estimate | None:
        key = (group, model, type_, member)
        if key not in self._found:
            runs = [
                (one.type == type_, (weight(one.began_ms, self._now_ms), value, one.complete))
                for one in self._runs.get((group, model), ())
                if (value := getattr(one, member)) is not None
            ]
            typed = [run for is_typed, run in runs if is_typed]
            enough = sum(complete and weight > 0 for weight, _, complete in typed) >= TYPED_MIN
            self._found[key] = estimate(typed if enough else [run for _, run in runs])
        return self._found[key]


def circuit_until(runs: Iterable[Observation]) -> int:
    """Return when a backend may be tried again after failures in a row, in milliseconds since 1970; 0 for at any time.

    Args:
        runs: of one backend.
    """
    newest = sorted((run for run in runs if run.reason not in SILENT), key=_ended_ms, reverse=True)
    failed = list(takewhile(lambda run: not run.complete and run.code in CODES and CODES[run.code].retryable, newest))
    if len(failed) < CIRCUIT_FAILURES:
        return 0
    doubled = min(len(failed) - CIRCUIT_FAILURES, 4)  # The fifth is past the most already.
    return _ended_ms(failed[0]) + min(CIRCUIT_MS << doubled, CIRCUIT_MS_MAX)


def limited_until(runs: Iterable[Observation]) -> int:
    """Return when a service's own limit on requests ends, in milliseconds since 1970; 0 if none was met.

    Args:
        runs: of one backend.
    """
    limited = [one for one in runs if one.code == "backend_rate_limited"]
    pauses = (RATE_LIMITED_MS if one.retry_after_ms is None else one.retry_after_ms for one in limited)
    return max(map(sum, zip(map(_ended_ms, limited), pauses, strict=True)), default=0)


def _ended_ms(one: Observation) -> int:
    return one.began_ms + (one.duration_ms or 0)
