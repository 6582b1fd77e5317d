"""Estimates cost and duration of a run from the receipts of earlier runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import takewhile
from typing import Final

import msgspec

from backplane.errors import CODES
from backplane.upstream.measures import RATE_LIMITED_MS, Estimate, estimate, pause_ms, weight

PERIOD_MS: Final = 7 * 86_400_000
"""Milliseconds after which a run counts half as much: a week, as vendors change models and load within weeks."""

TYPED_MIN: Final = 3
"""Complete runs of a task's type that suffice for an estimate; with fewer, runs of all types count."""

SILENT: Final = frozenset({"refused", "cancelled", "interrupted", "store"})
"""Reasons of an end (`End.reason`) that the backend did not cause; such runs are not measured."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One ended run, read from its receipt."""

    backend: str
    group: str
    model: str | None
    type: str | None = None
    """The task's type; None if the order named none."""
    began_ms: int
    """Time of the run's start, in milliseconds since 1970."""
    duration_ms: int | None = None
    cost_usd_micros: int | None = None
    complete: bool = True
    reason: str | None = None
    """Why the run ended (`End.reason`); None if the receipt has no reason."""
    code: str | None = None
    """Error code of the run; None if it has none."""
    retry_after_ms: int | None = None
    """The pause in milliseconds that the model's service asked for; None if it asked for none."""


class Measures:
    """Estimates costs and latencies by group, model and task type; each estimate is computed once.

    Args:
        observations: the runs of one state folder, in any order.
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
                (one.type == type_, (weight(one.began_ms, self._now_ms, PERIOD_MS), value, one.complete))
                for one in self._runs.get((group, model), ())
                if (value := getattr(one, member)) is not None
            ]
            typed = [run for is_typed, run in runs if is_typed]
            enough = sum(complete and counted > 0 for counted, _, complete in typed) >= TYPED_MIN
            self._found[key] = estimate(typed if enough else [run for _, run in runs])
        return self._found[key]


def circuit_until(runs: Iterable[Observation]) -> int:
    """Return when a backend may be tried again after failures in a row, in milliseconds since 1970; 0 if at any time.

    Args:
        runs: of one backend.
    """
    newest = sorted((run for run in runs if run.reason not in SILENT), key=_ended_ms, reverse=True)
    failed = list(takewhile(lambda run: not run.complete and run.code in CODES and CODES[run.code].retryable, newest))
    pause = pause_ms(len(failed))
    return _ended_ms(failed[0]) + pause if pause else 0


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
