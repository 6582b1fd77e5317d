"""`run --dry-run`: the order as it would be sent, and the backend that would get it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from backplane.cli import choice, order, streams
from backplane.config import Settings
from backplane.contract.work import WorkOrder
from backplane.routing.driver import look_around, task_of
from backplane.routing.router import Route, RoutingDecision
from backplane.runtime.faults import check_whole
from backplane.runtime.plane import signer_of


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """The object that `run --dry-run --json` prints."""

    backend: str | None
    """None if no backend is eligible."""
    order: Any
    """The work order, without the values of its variables."""
    route: Route | None
    """The router's decision; None for an order that names its backend."""


def decide(work: WorkOrder, settings: Settings, environ: Mapping[str, str], home: Path) -> RoutingDecision:
    """Choose a backend by what is known, starting none."""
    task, strategy, seed = task_of(work)
    return look_around(settings, environ, home).choose(task, strategy=strategy, seed=seed)


def show(
    work: WorkOrder, backend: str | None, decision: RoutingDecision | None, settings: Settings, *,
    as_json: bool, explain: bool,
) -> int:  # fmt: skip
    """Print the order and the decision.

    Args:
        backend: None is the router's choice.
        explain: print every other backend, too, each with what is in its way.

    Raises:
        PolicyError: `policy_invalid`.
        ConfigError: `config_invalid`, the order is none that a host would take.
        WorkspaceError: `workspace_init_failed`, its folder is missing.
        CapabilityError: `capability_unsupported`, no backend is eligible.
    """
    check_whole(work)
    signer_of(settings.signing_key)
    order.say_without_effect(work)
    if work.abp("remote_root") is None:
        from backplane.workspace.workspace import find_original

        find_original(Path(work.workspace.root))
    if decision is not None:
        backend = decision.option.name if decision.option is not None else None
    shown = msgspec.structs.replace(work, config=msgspec.structs.replace(work.config, env={}))
    if as_json:
        route = decision.told() if decision is not None else None
        streams.write_record(DryRun(backend=backend, order=shown, route=route))
    elif decision is not None:
        for line in choice.decision_lines(decision, explain=explain or backend is None):
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
