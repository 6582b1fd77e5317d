"""`run --dry-run`: the order as it would be sent, and the backend that would get it, with the router's reasons."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from backplane.cli import order, streams
from backplane.config import Settings
from backplane.contract.work import WorkOrder, settings_of
from backplane.routing.driver import look_around, task_of
from backplane.routing.router import RoutingDecision
from backplane.runtime.backends import Backend
from backplane.runtime.faults import check_whole
from backplane.runtime.requirements import check_place
from backplane.runtime.state import signer_of


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """The object that `run --dry-run --json` prints."""

    backend: str | None
    """None if no backend is eligible."""
    order: Any
    """The work order, without the values of its variables."""
    route: RoutingDecision | None
    """The router's decision; None for an order that names its backend."""


def show(
    work: WorkOrder, named: Backend | None, settings: Settings, environ: Mapping[str, str], home: Path, *,
    as_json: bool, explain: bool,
) -> int:  # fmt: skip
    """Print the order and the decision; nothing is started. Raises BackplaneError, as the run would.

    Args:
        named: None is the router's choice.
        explain: print why other backends were not chosen, too.
    """
    check_whole(work)
    check_place(settings_of(work.config.vendor), remote=named is not None and named.remote, routed=named is None)
    signer_of(settings.signing_key)
    order.say_without_effect(work)
    if work.abp("remote_root") is None:
        from backplane.workspace.workspace import find_original

        find_original(Path(work.workspace.root))
    backend, decision = named.id if named is not None else None, None
    if named is None:
        decision = look_around(settings, environ, home).choose(task_of(work))
        backend = decision.option.name if decision.option is not None else None
    if as_json:
        shown = msgspec.structs.replace(work, config=msgspec.structs.replace(work.config, env={}))
        route = decision
        streams.write_record(DryRun(backend=backend, order=shown, route=route))
    elif explain or backend is None:
        for option in decision.options if decision is not None else ():
            for one in option.obstacles:
                fact = f"not {option.name}: {one.kind}: {one.fact}; {one.change}"
                streams.write(f"{streams.one_line(fact)}\n")
    if decision is not None:
        decision.chosen()
    if not as_json:
        rows = {
            "backend": f"{backend}, {summary(decision)}" if decision is not None else backend,
            "root": f"{work.workspace.root} ({work.workspace.mode}, {work.lane})",
            "model": work.config.model or "its own",
            "isolation": work.abp("isolation") or settings.isolation,
        }
        streams.write("".join(f"{name:<10}{streams.one_line(value)}\n" for name, value in rows.items()))
        streams.write("nothing was started\n")
    return 0


def summary(decision: RoutingDecision) -> str:
    """Return a few words that say why the option was chosen."""
    eligible = sum(not option.obstacles for option in decision.options)
    by = "the first eligible option" if decision.strategy == "first_available" else f"by {decision.strategy}"
    return f"{by}, of {eligible} eligible among {streams.count(len(decision.options), 'option')}"
