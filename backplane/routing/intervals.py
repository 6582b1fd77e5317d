"""Computes shares and means of a few runs with their confidence intervals, and verdicts from them. Pure.

Shares are in thousandths. An interval holds the true value in 95 of 100 comparisons; one backend is better only
if its interval lies wholly on the better side of every other's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

RUNS_MIN: Final = 3
"""Least number of runs for a verdict; two runs that are equal by chance would have no spread at all."""

Z: Final = 1.96
"""Quantile of the normal distribution for 95 %."""

T: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t for 95 %, by degrees of freedom from 1 to 30; beyond that, `Z` is used."""

Measure = Literal["success", "cost", "duration"]


class Interval(msgspec.Struct, frozen=True):
    """A measured value and the bounds of the true one, in the measure's unit."""

    value: int
    low: int | None
    """Lower bound; None if there are too few runs for an interval. `high` likewise."""
    high: int | None
    runs: int


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of comparing the backends by one measure: which one is better, and why."""

    measure: Measure
    better: str | None
    """The backend that is better than every other; None if the data does not show one."""
    why: str


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a comparison."""

    side: str
    round: int
    """Number of the round, from 1."""
    run_id: str
    outcome: str
    code: str | None
    """Error code of the run; None if it has none."""
    duration_ms: int
    cost_usd_micros: int | None
    input_tokens: int | None
    output_tokens: int | None
    files: int
    added: int
    """Lines that the run's patch adds; `removed` likewise."""
    removed: int
    patch_sha256: str | None
    """Hash of the run's patch, to count different ones; None if the run changed nothing."""
    checked: bool | None = None
    """True if the check passed, False if it failed; None if there is no check, or nothing to check."""
    check_run_id: str | None = None
    check_says: str | None = None
    """Why the check failed; None if it did not."""

    @property
    def succeeded(self) -> bool:
        return self.outcome == "complete" and self.checked is not False


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of one side, summed up."""

    side: str
    runs: int
    succeeded: int
    """Number of runs that are complete and passed the check, if the comparison has a check."""
    success: Interval
    """Share of successful runs, in thousandths."""
    cost_usd_micros: Interval | None
    """Mean cost of the successful runs; failed ones are left out, as they may cost nothing.

    None if there are none, or if the cost of one is unknown.
    """
    duration_ms: Interval | None
    """Mean duration of the successful runs, in milliseconds; None if there are none."""
    patches: int
    """Number of different patches that the runs made."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a whole comparison: runs, summaries and verdicts."""

    task: str
    root: str
    check: str | None
    sides: tuple[Summary, ...]
    verdicts: tuple[Verdict, ...]
    trials: tuple[Trial, ...]


def summed_up(side: str, trials: Sequence[Trial]) -> Summary:
    """Sum up the runs of one side, one or more."""
    good = [trial for trial in trials if trial.succeeded]
    return Summary(
        side=side,
        runs=len(trials),
        succeeded=len(good),
        success=share(len(good), len(trials)),
        cost_usd_micros=mean([trial.cost_usd_micros for trial in good]),
        duration_ms=mean([trial.duration_ms for trial in good]),
        patches=len({trial.patch_sha256 for trial in trials} - {None}),
    )


def verdicts_on(sides: Sequence[Summary]) -> tuple[Verdict, ...]:
    """Judge the sides by each measure."""
    members: dict[Measure, str] = {"success": "success", "cost": "cost_usd_micros", "duration": "duration_ms"}
    return tuple(judge(name, {one.side: getattr(one, members[name]) for one in sides}) for name in members)


def share(passed: int, runs: int) -> Interval:
    """Return a share in thousandths, with Wilson's interval, which also holds for few runs, and for all or none."""
    part, square = passed / runs, Z * Z / runs
    middle = (part + square / 2) / (1 + square)
    reach = Z * math.sqrt(part * (1 - part) / runs + square / (4 * runs)) / (1 + square)
    low, high = math.floor(1000 * max(middle - reach, 0.0)), math.ceil(1000 * min(middle + reach, 1.0))
    return Interval(1000 * passed // runs, low, high, runs)


def mean(values: Sequence[int | None]) -> Interval | None:
    """Return a mean with Student's interval; None if there are no values, or if any of them is unknown."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    count, middle = len(known), statistics.fmean(known)
    if count < 2:
        return Interval(round(middle), None, None, count)
    reach = (T[count - 2] if count - 2 < len(T) else Z) * statistics.stdev(known) / math.sqrt(count)
    return Interval(round(middle), max(math.floor(middle - reach), 0), math.ceil(middle + reach), count)


def judge(measure: Measure, found: Mapping[str, Interval | None]) -> Verdict:
    """Return which backend is better by one measure, if the data shows one.

    Args:
        found: backend → interval, None is unknown; two or more. More is better for `success`, less for the others.
    """
    known = {name: one for name, one in found.items() if one is not None}
    few = [name for name, one in known.items() if one.runs < RUNS_MIN]
    better, why = None, "the intervals overlap"
    if len(known) < len(found):
        why = f"not known of {', '.join(name for name in found if name not in known)}"
    elif few:
        why = f"fewer than {RUNS_MIN} {'runs' if measure == 'success' else 'successful runs'} of {', '.join(few)}"
    else:
        better = next((name for name in known if _is_apart(name, known, more=measure == "success")), None)
    if better is not None:
        why = "its interval lies apart from every other"
    return Verdict(measure=measure, better=better, why=why)


def _is_apart(name: str, known: Mapping[str, Interval], *, more: bool) -> bool:
    """Return True if the interval lies wholly on the better side of every other; none of them has an unknown end."""
    pairs = ((known[name], other) for each, other in known.items() if each != name)
    return all(
        (one.low or 0) > (other.high or 0) if more else (one.high or 0) < (other.low or 0) for one, other in pairs
    )
