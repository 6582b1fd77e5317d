"""`route` and `cost`: which backend an order would get and why, and what runs have cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from backplane.cli import streams
from backplane.cli.parser import Options, Parser, add_config, add_json, add_requirements, add_task, scaled, seconds

if TYPE_CHECKING:
    import argparse

    from backplane.config import Settings
    from backplane.contract.canonical import Json
    from backplane.receipts.memory import Remembered
    from backplane.routing.estimates import Estimate
    from backplane.routing.router import Option, RoutingDecision
    from backplane.routing.spend import Spend

ROUTE_EXAMPLE: Final = """
backplane route "review the last commit" --type code_review
backplane route "fix the parser" --type file_editing --prefer cost --explain
"""

COST_EXAMPLE: Final = """
backplane cost --by provider
backplane cost --by day --since 7d
"""

BY: Final = ("provider", "model", "day", "session", "folder")


def parser(name: str) -> Parser:
    """The options of `route` or `cost`."""
    if name == "cost":
        made = Parser(f"backplane {name}", "Say what runs have cost, as far as that is known.", COST_EXAMPLE, _cost)
        made.add_argument("--by", choices=BY, default="provider", help="what is summed up (provider)")
        made.add_argument("--since", metavar="SPAN", help="only runs begun since then, as 90s, 5m, 2h, 3d, 1w")
        add_json(made, "one JSON object a sum and line, the last of all runs", "cli_cost")
        return made
    about = "Say which backend an order would get, and why; nothing is started."
    made = Parser(f"backplane {name}", about, ROUTE_EXAMPLE, _route)
    add_task(made)
    made.add_argument("--explain", action="store_true", help="say of every other backend why not, and what would help")
    add_requirements(made, "the one model that will do")
    add_wishes(made)
    add_config(made)
    add_json(made, "the decision as one JSON object", "cli_route")
    return made


def add_wishes(made: argparse._ActionsContainer) -> None:
    """The options of what an order asks of the router; `wishes` reads them."""
    add = made.add_argument
    add("--type", metavar="T", help="simple_query, code_generation, file_editing, shell_execution, code_review, "
        "complex_workflow or custom (custom)")  # fmt: skip
    add("--prefer", metavar="P", help="speed, quality, cost or balanced (balanced)")
    add("--priority", metavar="P", help="low, normal, high or critical (normal)")
    add("--strategy", metavar="S", help="first_available, cost, latency or balanced (as configured)")
    add("--max-cost-usd", metavar="X", type=float, help="most that the run is to cost, by earlier runs or prices")
    add("--max-latency", metavar="S", type=seconds, help="longest that it is to last, by earlier runs, as 90s or 5m")
    add("--allow-unknown", action="store_true", help="a cost or latency that nobody knows satisfies these two")
    add("--after-effect", choices=("stop", "hand_over"), help="where it fails after it changed something (stop)")
    add("--seed", metavar="N", type=int, help="spreads orders over equal instances (0)")


def wishes(options: Options) -> dict[str, Json]:
    """What these options say, as members of `config.vendor.abp.route`.

    Raises:
        ConfigError: `config_invalid`, an amount is none.
    """
    said: dict[str, Any] = {
        "type": options.type,
        "preference": options.prefer,
        "priority": options.priority,
        "strategy": options.strategy,
        "max_cost_usd_micros": _scaled(options.max_cost_usd, 1_000_000, "--max-cost-usd"),
        "max_latency_ms": _scaled(options.max_latency, 1000, "--max-latency"),
        "allow_unknown": options.allow_unknown or None,
        "after_effect": options.after_effect,
        "seed": options.seed,
    }
    return {name: value for name, value in said.items() if value is not None}


def _scaled(value: float | None, scale: int, option: str) -> int | None:
    from backplane.errors import ConfigError

    if value is None:
        return None
    if not 0 <= value < 1e9:
        raise ConfigError("config_invalid", f"{option} {value} is no amount", hint="give a number from 0 on")
    return scaled(value, scale, option)


# route ----------------------------------------------------------------------------------------------------------------


def _route(options: Options) -> int:
    import os
    from pathlib import Path

    import msgspec

    from backplane import config
    from backplane.cli.order import requirement
    from backplane.contract.capability import Requirements
    from backplane.contract.work import RuntimeConfig, WorkOrder
    from backplane.routing.driver import look_around, task_of

    environ = dict(os.environ)
    settings = config.load(Path(options.config) if options.config else None, environ, streams.folder())
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
        streams.write_json(msgspec.json.encode(decision.told()) + b"\n")
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
    from backplane.view import figures

    if found is None:
        return "?"
    value = figures.money(found.value) if money else figures.lasting(found.value)
    if found.basis != "measured":
        return f"{value} ({found.basis})"
    return f"{value} ({streams.count(found.runs, 'run')}, confidence {found.confidence / 10:.0f} %)"


# cost -----------------------------------------------------------------------------------------------------------------


def _cost(options: Options) -> int:
    import msgspec

    from backplane.cli.runs import open_store, since_ms
    from backplane.receipts.memory import remembered
    from backplane.routing.spend import sums
    from backplane.view.figures import milliseconds

    since = since_ms(options.since)
    with open_store() as store:
        runs = [run for run in remembered(store) if since is None or (milliseconds(run.started_at) or 0) >= since]
    # The check of a comparison is the caller's own command, and none of its runs.
    runs = [run for run in runs if run.check_of is None]
    # A refused run started nothing and one told again did nothing: both cost nothing, and everybody knows that.
    paid = [run for run in runs if not run.is_retold and (run.state != "ended" or run.reason != "refused")]
    retold = sum(run.is_retold for run in runs)
    found, total = sums(
        (_key(run, options.by), run.cost_usd_micros, run.input_tokens, run.output_tokens) for run in paid
    )
    for one in [*found, total]:
        if options.json:
            streams.write_json(msgspec.json.encode(one) + b"\n")
        else:
            streams.write(_row(one, "all" if one is total else None) + "\n")
    if retold and not options.json:
        streams.complain(f"{streams.count(retold, 'run')} told again from the store cost nothing\n")
    return 0


def _key(run: Remembered, by: str) -> str | None:
    keys = {
        "provider": run.backend,
        "model": run.model or run.model_told,
        "day": run.started_at[:10],
        "session": run.session,
        "folder": run.root,
    }
    return keys[by] or None


def _row(one: Spend, label: str | None) -> str:
    from backplane.view.figures import count, money

    cost = money(one.known_usd_micros if one.runs else 0)
    if one.unknown and one.known_usd_micros is not None:
        cost = f"≥ {cost}"
    unknown = f", of {streams.count(one.unknown, 'run')} unknown" if one.unknown else ""
    tokens = f"{count(one.input_tokens)} in, {count(one.output_tokens)} out"
    key = label or (streams.one_line(one.key) if one.key is not None else "(not known)")
    return f"{key:<24}  {cost:>10}  {streams.count(one.runs, 'run')}{unknown}  {tokens}"
