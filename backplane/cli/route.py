"""`route` and `cost`: which backend an order would get and why, and what runs have cost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from backplane import config
from backplane.cli import streams
from backplane.cli.order import requirement, wishes
from backplane.cli.parser import Options
from backplane.cli.start import load_settings
from backplane.contract.capability import Requirements
from backplane.contract.work import RuntimeConfig, WorkOrder
from backplane.view import figures

if TYPE_CHECKING:
    from backplane.config import Settings
    from backplane.routing.estimates import Estimate
    from backplane.routing.router import Option, RoutingDecision


def route(options: Options) -> int:
    from backplane.routing.driver import look_around, task_of

    environ = dict(os.environ)
    settings = load_settings(options)
    asked = wishes(options)
    order = WorkOrder(
        options.task,
        requirements=Requirements(tuple(map(requirement, options.require))),
        config=RuntimeConfig(model=options.model, vendor={"abp": {"route": asked}}),
    )
    task, strategy, seed = task_of(order)
    world = look_around(settings, environ, config.home_path(environ))
    decision = world.choose(task, strategy=strategy, seed=seed)
    if options.json:
        streams.write_record(decision.told())
    else:
        if settings.default_backend is not None and not asked:
            streams.write(_default_words(settings))
        for line in told(decision, explain=options.explain or decision.option is None):
            streams.write(line + "\n")
    decision.chosen()
    return 0


def _default_words(settings: Settings) -> str:
    """What `run` does without a word to the router, where the configuration names a backend."""
    name = streams.one_line(str(settings.default_backend))
    return f"`backplane run` takes {name}, the default_backend; with --prefer, --type or another wish, or without it:\n"


def told(decision: RoutingDecision, *, explain: bool) -> Iterator[str]:
    """The decision in words; with `explain` every other option too, each with what is in its way."""
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
    """Why this one, in a few words."""
    eligible = sum(not option.obstacles for option in decision.options)
    by = "takes the first" if decision.strategy == "first_available" else f"by {decision.strategy}"
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
