"""`run --dry-run`: the order as it would be sent, and the backend that would get it, with the router's reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from backplane.cli import order, streams
from backplane.config import Settings
from backplane.contract.work import WorkOrder
from backplane.routing.driver import look_around, task_of
from backplane.routing.estimates import Estimate
from backplane.routing.router import Option, Route, RoutingDecision
from backplane.runtime.backends import Backend
from backplane.runtime.faults import check_whole
from backplane.runtime.plane import signer_of
from backplane.view import figures


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """The object that `run --dry-run --json` prints."""

    backend: str | None
    """None if no backend is eligible."""
    order: Any
    """The work order, without the values of its variables."""
    route: Route | None
    """The router's decision; None for an order that names its backend."""


def show(
    work: WorkOrder, named: Backend | None, settings: Settings, environ: Mapping[str, str], home: Path, *,
    as_json: bool, explain: bool,
) -> int:  # fmt: skip
    """Print the order and the decision; nothing is started. Raises BackplaneError, as the run would.

    Args:
        named: None is the router's choice.
        explain: print every other backend, too, each with what is in its way.
    """
    check_whole(work)
    signer_of(settings.signing_key)
    order.say_without_effect(work)
    if work.abp("remote_root") is None:
        from backplane.workspace.workspace import find_original

        find_original(Path(work.workspace.root))
    backend, decision = named.id if named is not None else None, None
    if named is None:
        task, strategy, seed = task_of(work)
        decision = look_around(settings, environ, home).choose(task, strategy=strategy, seed=seed)
        backend = decision.option.name if decision.option is not None else None
    if as_json:
        shown = msgspec.structs.replace(work, config=msgspec.structs.replace(work.config, env={}))
        route = decision.told() if decision is not None else None
        streams.write_record(DryRun(backend=backend, order=shown, route=route))
    elif decision is not None:
        for line in _decision_lines(decision, explain=explain or backend is None):
            streams.write(line + "\n")
    if decision is not None:
        decision.chosen()
    if as_json or backend is None:
        return 0
    rules = {name: value for name, value in msgspec.to_builtins(work.policy).items() if value}
    limits = settings.limits_of(backend)
    rows = {
        "backend": backend,
        "task": work.task,
        "root": f"{work.workspace.root} ({work.workspace.mode}, {work.lane})",
        "model": work.config.model or "its own",
        "policy": ", ".join(f"{name}: {' '.join(value)}" for name, value in rules.items()) or "the default profile",
        "isolation": work.abp("isolation") or settings.isolation,
        "requires": ", ".join(f"{one.capability}={one.min_support}" for one in work.requirements.required) or "nothing",
        "variables": ", ".join(sorted(work.config.env)) or "none beside the usual ones",
        "ends": f"after {limits.idle_s:g} s of silence" + (f", {limits.run_s:g} s in all" if limits.run_s else ""),
    }
    streams.write("".join(f"{name:<10}{streams.one_line(value)}\n" for name, value in rows.items()))
    streams.write("nothing was started\n")
    return 0


# The router's choice --------------------------------------------------------------------------------------------------


def summary(decision: RoutingDecision) -> str:
    """Return a few words that say why the option was chosen."""
    eligible = sum(not option.obstacles for option in decision.options)
    by = "the first in order" if decision.strategy == "first_available" else f"by {decision.strategy}"
    return f"{by}, of {eligible} eligible among {streams.count(len(decision.options), 'option')}"


def _decision_lines(decision: RoutingDecision, *, explain: bool) -> Iterator[str]:
    """Yield the decision in words; with `explain` every other option too, each with its obstacles."""
    chosen = decision.option
    if chosen is not None:
        yield f"{streams.one_line(chosen.name)}  {_figures(chosen)}"
        yield f"  {summary(decision)}"
    others = [option for option in decision.options if option is not chosen] if explain else []
    for option in sorted(others, key=lambda option: bool(option.obstacles)):
        name = streams.one_line(option.name)
        yield f"not       {name}" if option.obstacles else f"could be  {name}  {_figures(option)}"
        for one in option.obstacles:
            yield f"            {one.kind}: {streams.one_line(one.fact)}"
            yield f"              → {streams.one_line(one.change)}"


def _figures(option: Option) -> str:
    return f"cost {_estimate(option.cost, money=True)}, takes {_estimate(option.latency, money=False)}"


def _estimate(found: Estimate | None, *, money: bool) -> str:
    if found is None:
        return "?"
    value = figures.money(found.value) if money else figures.lasting(found.value)
    if found.basis != "measured":
        return f"{value} ({found.basis})"
    return f"{value} ({streams.count(found.runs, 'run')}, confidence {found.confidence / 10:.0f} %)"
