"""The router's choice in words, as `run --dry-run` and `run -v` print it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from backplane.cli import streams
from backplane.view import figures

if TYPE_CHECKING:
    from backplane.routing.estimates import Estimate
    from backplane.routing.router import Option, RoutingDecision


def decision_lines(decision: RoutingDecision, *, explain: bool) -> Iterator[str]:
    """Yield the decision in words; with `explain` every other option too, each with its obstacles."""
    chosen = decision.option
    if chosen is not None:
        yield f"{streams.one_line(chosen.name)}  {_figures(chosen)}"
        yield f"  {summary(decision)}"
    if not explain:
        return
    eligible = [option for option in decision.options if not option.obstacles]
    for option in eligible:
        if option is not chosen:
            yield f"could be  {streams.one_line(option.name)}  {_figures(option)}"
    for option in decision.options:
        if option.obstacles:
            yield f"not       {streams.one_line(option.name)}"
        for one in option.obstacles:
            yield f"            {one.kind}: {streams.one_line(one.fact)}"
            yield f"              → {streams.one_line(one.change)}"


def summary(decision: RoutingDecision) -> str:
    """Return a few words that say why the option was chosen."""
    eligible = sum(not option.obstacles for option in decision.options)
    by = "the first in order" if decision.strategy == "first_available" else f"by {decision.strategy}"
    return f"{by}, of {eligible} eligible among {streams.count(len(decision.options), 'option')}"


def _figures(option: Option) -> str:
    return f"cost {_estimate(option.cost, money=True)}, takes {_estimate(option.latency, money=False)}"


def _estimate(found: Estimate | None, *, money: bool) -> str:
    if found is None:
        return "?"
    value = figures.money(found.value) if money else figures.lasting(found.value)
    if found.basis != "measured":
        return f"{value} ({found.basis})"
    return f"{value} ({streams.count(found.runs, 'run')}, confidence {found.confidence / 10:.0f} %)"
