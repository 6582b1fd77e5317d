"""Computes decayed means, pauses after failures and sort keys, for choices by price or time. Pure.

The router uses it to choose the backend of a run, and the gateway to choose the service of a request; the rules are in
`docs/guide/routing-rule.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final, Literal

import msgspec

StrategyName = Literal["first_available", "cost", "latency", "balanced"]

WEIGHT: Final = 1 << 20
"""Weight of a value from the last period; it is halved with each older period, and 0 after `PERIODS`."""
PERIODS: Final = 20
"""Number of periods after which a value no longer counts."""

RATE_LIMITED_MS: Final = 30_000
"""Milliseconds to pause after a rate limit if the service names no time; most services count requests by the minute."""

CIRCUIT_FAILURES: Final = 3
"""Failures in a row that open a circuit; two may belong to one outage of seconds."""
CIRCUIT_MS: Final = 60_000
"""Milliseconds that a circuit is open at first; doubled with each further failure."""
CIRCUIT_MS_MAX: Final = 900_000
"""Maximum milliseconds that a circuit is open."""


class Estimate(msgspec.Struct, frozen=True):
    """The expected cost or time of one complete run, in millionths of a dollar or in milliseconds."""

    value: int
    confidence: int
    """Confidence in the value in thousandths, up to 1000; 0 means that it is a guess."""
    runs: int
    """Number of runs that the value was computed from; 0 if it comes from a price."""
    basis: Literal["measured", "priced", "assumed"] = "measured"


def weight(began_ms: int, now_ms: int, period_ms: int) -> int:
    """Return the weight of a value, at most `WEIGHT`; it is halved after each period."""
    periods = (now_ms - began_ms) // period_ms
    return WEIGHT >> periods if 0 <= periods < PERIODS else 0


Weighed = tuple[int, int, bool]
"""One run: its weight, its value, and whether it was complete."""


def expected(runs: Iterable[Weighed]) -> int | None:
    """Divide the values of all runs by the number of complete ones, both weighted; None if no complete run counts."""
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
    """Return the milliseconds that a circuit is open after the last of some failures in a row; 0 if it is closed."""
    if failures < CIRCUIT_FAILURES:
        return 0
    doubled = min(failures - CIRCUIT_FAILURES, 4)  # Four times doubled, it is over the maximum.
    return min(CIRCUIT_MS << doubled, CIRCUIT_MS_MAX)


Key = tuple[int, ...]


def key_of(
    strategy: StrategyName, costs: Iterable[int | None], latencies: Iterable[int | None]
) -> Callable[[int | None, int | None], Key]:
    """Return a function from a cost and a latency to a sort key; the smallest key is chosen.

    Args:
        costs, latencies: the values of all candidates; None is unknown.
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
