"""Sums of what runs cost, in which an unknown cost never counts as nothing. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Spend(msgspec.Struct, frozen=True, kw_only=True):
    """The sum of some runs' costs and tokens."""

    key: str | None
    """The value that the runs share; None if it is unknown, and for the sum of all runs."""
    runs: int = 0
    unknown: int = 0
    """Number of runs whose cost is unknown."""
    cost_usd_micros: int | None = 0
    """None if the cost of any run is unknown."""
    known_usd_micros: int | None = None
    """Sum of the known costs, so all runs cost at least this much; None if no cost is known."""
    input_tokens: int | None = 0
    """None if they are unknown for any run; `output_tokens` likewise."""
    output_tokens: int | None = 0
    known_input_tokens: int | None = None
    """Sum over the runs that reported them, so all used at least this many; None if no run did.

    `known_output_tokens` likewise.
    """
    known_output_tokens: int | None = None

    def plus(self, cost: int | None, input_tokens: int | None, output_tokens: int | None) -> Spend:
        """Add one run."""
        return Spend(
            key=self.key,
            runs=self.runs + 1,
            unknown=self.unknown + (cost is None),
            cost_usd_micros=_sum(self.cost_usd_micros, cost),
            known_usd_micros=_at_least(self.known_usd_micros, cost),
            input_tokens=_sum(self.input_tokens, input_tokens),
            output_tokens=_sum(self.output_tokens, output_tokens),
            known_input_tokens=_at_least(self.known_input_tokens, input_tokens),
            known_output_tokens=_at_least(self.known_output_tokens, output_tokens),
        )


CostRow = tuple[str | None, int | None, int | None, int | None]
"""Key, cost in millionths of a dollar, tokens sent, tokens got."""


def sums(runs: Iterable[CostRow]) -> tuple[list[Spend], Spend]:
    """Sum up by key, the dearest by what is known first; and all together."""
    found: dict[str | None, Spend] = {}
    total = Spend(key=None)
    for key, *figures in runs:
        found[key] = found.get(key, Spend(key=key)).plus(*figures)
        total = total.plus(*figures)
    return sorted(found.values(), key=lambda one: (-(one.known_usd_micros or 0), one.key or "")), total


def _sum(so_far: int | None, more: int | None) -> int | None:
    return None if so_far is None or more is None else so_far + more


def _at_least(so_far: int | None, more: int | None) -> int | None:
    return so_far if more is None else (so_far or 0) + more
