"""What a choice by price or time rests on: decayed means, pauses after failures, and the key of each strategy. Pure.

The router chooses backends of runs by it, the gateway the service of a request (`docs/guide/routing-rule.md`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final, Literal

import msgspec

StrategyName = Literal["first_available", "cost", "latency", "balanced"]

WEIGHT: Final = 1 << 20
"""Weight of a value from the last period; after `PERIODS` it is 0."""
PERIODS: Final = 20

RATE_LIMITED_MS: Final = 30_000
"""A pause where a service names none: services count by the minute."""

CIRCUIT_FAILURES: Final = 3
"""Failures in a row that open a circuit: two may be one outage of seconds."""
CIRCUIT_MS: Final = 60_000
CIRCUIT_MS_MAX: Final = 900_000


class Estimate(msgspec.Struct, frozen=True):
    """The expected value of one complete run: millionths of a dollar, or milliseconds."""

    value: int
    confidence: int
    """0 to 1000."""
    runs: int
    """Runs that it is from; 0 for a price."""
    basis: Literal["measured", "priced", "assumed"] = "measured"


def weight(began_ms: int, now_ms: int, period_ms: int) -> int:
    """Return the weight of a value, up to `WEIGHT`: a period later it counts half as much."""
    periods = (now_ms - began_ms) // period_ms
    return WEIGHT >> periods if 0 <= periods < PERIODS else 0


Weighed = tuple[int, int, bool]
"""One run: its weight, its value, and whether it was complete."""


def expected(runs: Iterable[Weighed]) -> int | None:
    """Return the expected value of a complete run, failed runs included; None if no complete run counts."""
    total = complete = 0
    for weight, value, is_complete in runs:
        total += weight * value
        complete += weight * is_complete
    return -(-total // complete) if complete else None


def estimate(runs: Iterable[Weighed]) -> Estimate | None:
    """Return the expected value of a complete run with its confidence; None if no complete run counts."""
    counted = [run for run in runs if run[0]]
    value = expected(counted)
    return None if value is None else Estimate(value, _confidence(counted), len(counted))


def _confidence(runs: list[Weighed]) -> int:
    weights = sum(run[0] for run in runs)
    mean = sum(run[0] * run[1] for run in runs) / weights
    spread = sum(run[0] * (run[1] - mean) ** 2 for run in runs) / weights
    if len(runs) < 2:
        return 0
    if not spread:
        return 1000
    effective = weights**2 / sum(run[0] ** 2 for run in runs)
    return max(0, int(1000 * (1 - math.sqrt(spread) / (mean * math.sqrt(effective)))))


def pause_ms(failures: int) -> int:
    """Return how long a circuit is open after failures in a row, from the end of the newest; 0 if it is closed."""
    if failures < CIRCUIT_FAILURES:
        return 0
    doubled = min(failures - CIRCUIT_FAILURES, 4)  # The fifth is past the most already.
    return min(CIRCUIT_MS << doubled, CIRCUIT_MS_MAX)


Key = tuple[int, ...]


def key_of(
    strategy: StrategyName, costs: Iterable[int | None], latencies: Iterable[int | None]
) -> Callable[[int | None, int | None], Key]:
    """Return the function that gives the key of a cost and a latency; the smallest key wins.

    Args:
        costs: of everything that can be chosen; None is unknown. Likewise `latencies`.
    """

    def largest(found: Iterable[int | None]) -> int:
        return max((one for one in found if one is not None), default=0)

    cost_max, latency_max = largest(costs), largest(latencies)
    keys: dict[StrategyName, Callable[[int | None, int | None], Key]] = {
        "first_available": lambda cost, latency: (),
        "cost": lambda cost, latency: _known_first(cost),
        "latency": lambda cost, latency: _known_first(latency),
        "balanced": lambda cost, latency: (_part(cost, cost_max) + _part(latency, latency_max),),
    }
    return keys[strategy]


def _known_first(value: int | None) -> Key:
    return (1, 0) if value is None else (0, value)


def _part(value: int | None, largest: int) -> int:
    if value is None:
        return 1000
    return 1000 * value // largest if largest else 0
