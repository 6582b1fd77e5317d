"""Admits an order: makes its run, or a run that is refused before anything is started."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from backplane.config import Limits
from backplane.contract import canonical
from backplane.contract.canonical import Json
from backplane.contract.unknown import check_settings
from backplane.contract.work import WorkOrder
from backplane.errors import BackplaneError, ConfigError
from backplane.policy.rules import compile_policy
from backplane.runtime.backends import Backend
from backplane.runtime.hooks import Hooks, above, configured
from backplane.runtime.options import RunOptions
from backplane.runtime.requirements import RunRequirements, check_place
from backplane.runtime.run import Run
from backplane.runtime.state import StateFolder

if TYPE_CHECKING:
    from backplane.runtime.plane import ControlPlane


async def admit(
    plane: ControlPlane,
    order: WorkOrder,
    backend: Backend,
    limits: Limits,
    given: RunOptions,
    run_id: str | None,
    added: Mapping[str, Json],
) -> Run:
    """Make the run of an order: on a replay if the store answers the order, with its share of its parent's budget.

    All is checked that can be checked before anything is started; the end of a refused run is decided.

    Args:
        run_id: the id that the run shall have; None makes one.
        added: the caller's members for `usage_raw.backplane` in the receipt.

    Raises:
        ConfigError: `config_invalid`, the order is declared pure and works in place.
    """
    facts, refusal = dict(added), None
    if order.abp("pure") is not None:
        from backplane.runtime import cache  # Few orders are pure.

        asked = order, backend, plane.settings, limits, given.get("hooks", ())
        known = await anyio.to_thread.run_sync(cache.find_cached, plane.home, *asked)
        if known is not None:
            backend, facts["cache"] = known
    run_id = await id_of(plane.state_folder, run_id)
    # A turn of a conversation names its session in `parent`, and a replay costs nothing.
    if not isinstance(order.abp("parent"), dict | None) and backend.replays is None:
        from backplane.runtime.budgets import reserve  # Few runs are children.

        try:
            whole, store = order, plane.state_folder.store
            order, facts["budget"] = await anyio.to_thread.run_sync(lambda: reserve(store(), whole, run_id))
        except BackplaneError as error:
            refusal = error
    run = Run(plane, order, backend, given.get("on_ask"), limits, run_id, given.get("output"))
    run.facts.added.update(run.facts.clean_json(facts))
    try:
        if refusal is not None:
            raise refusal
        _check(plane, run, given)
    except BackplaneError as error:
        run.drive.ending.decide("refused", error)
    except Exception as error:
        run.fail(error)
    return run


def _check(plane: ControlPlane, run: Run, given: RunOptions) -> None:
    """Refuse a wrong order, or one with needs that the host's last hello does not meet. Raises BackplaneError."""
    facts, drive = run.facts, run.drive
    check_settings(facts.order)
    check_place(facts.settings, remote=drive.backend.remote, routed="route" in facts.added)
    facts.policy = compile_policy(facts.order.policy)
    if hooks := (*configured(plane.settings.hooks), *given.get("hooks", ()), *above(facts.settings.get("hooks"))):
        put_above = drive.approvals.put_above
        drive.approvals.hooks = Hooks(hooks, run.id, plane.environ, facts.redactor, put_above)
    drive.requirements = RunRequirements(facts, drive.backend, hooks, plane.settings.isolation)
    drive.requirements.check_kept(plane.home)


async def id_of(folder: StateFolder, wanted: str | None) -> str:
    """Return the id of a new run: the wanted one, or another if there is none or a run has it already.

    Raises:
        ConfigError: `config_invalid`, the wanted id is no UUID.
    """
    if wanted is None:
        return str(uuid.uuid4())
    try:
        wanted = canonical.uuid_text(wanted)
    except ValueError:
        fact = f"run_id is {wanted[:80]!r}, which is no UUID"
        raise ConfigError("config_invalid", fact, hint="pass `str(uuid.uuid4())`, or leave it out") from None
    return wanted if await anyio.to_thread.run_sync(folder.is_new, wanted) else str(uuid.uuid4())


async def keep_result(home: Path, run: Run) -> None:
    """Keep the complete result of a pure order: the store answers the same order the next time."""
    known = run.facts.added.get("cache")
    if isinstance(known, dict) and not known["hit"] and run.is_sealed and run.stored.outcome == "complete":
        from backplane.runtime import cache

        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(cache.keep, home, known["key"], run.id)
