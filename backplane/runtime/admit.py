"""Decides about an order before its run is made: whether the store answers it, and what of a budget it may use."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import anyio
import anyio.to_thread

from backplane.config import Limits
from backplane.contract.canonical import Json
from backplane.contract.work import WorkOrder
from backplane.errors import BackplaneError
from backplane.runtime.backends import Backend
from backplane.runtime.hooks import Hook
from backplane.runtime.state import StateFolder

if TYPE_CHECKING:
    from backplane.runtime.plane import ControlPlane
    from backplane.runtime.run import Run


class Admitted(NamedTuple):
    """An order as its run gets it.

    Attributes:
        order: has its share of the parent's budget as its limits.
        backend: a replay of the stored run if the store answers the order.
        facts: members for the receipt's own part: `cache` and `budget`.
        refusal: why the parent's budget does not allow the run; None if it does, or if there is no parent.
    """

    order: WorkOrder
    backend: Backend
    run_id: str
    facts: dict[str, Json]
    refusal: BackplaneError | None = None


async def admit(
    plane: ControlPlane, order: WorkOrder, backend: Backend, limits: Limits, hooks: Sequence[Hook], run_id: str | None
) -> Admitted:
    """Look for a pure order's answer in the store, and take a child's share of its parent's budget.

    Args:
        hooks: those of the caller; an order that has some is never answered from the store.
        run_id: the id that the run shall have; None makes one.

    Raises:
        ConfigError: `config_invalid`, the order is declared pure and works in place.
    """
    facts: dict[str, Json] = {}
    if order.abp("pure") is not None:
        from backplane.runtime import cache  # Few orders are pure.

        key = None
        if cache.is_pure(order) and not hooks:
            key = await anyio.to_thread.run_sync(cache.key_of, order, backend, plane.settings, limits)
        if key is not None:
            found = await anyio.to_thread.run_sync(cache.find_cached, plane.home, key)
            backend, facts["cache"] = found or backend, {"key": key, "hit": found is not None}
    run_id = await id_of(plane.state_folder, run_id)
    # A turn of a conversation names its session in `parent`, and a replay costs nothing.
    if isinstance(order.abp("parent"), dict | None) or backend.replays is not None:
        return Admitted(order, backend, run_id, facts)
    from backplane.runtime.budgets import reserve  # Few runs are children.

    try:
        order, share = await anyio.to_thread.run_sync(lambda: reserve(plane.state_folder.store(), order, run_id))
    except BackplaneError as error:
        return Admitted(order, backend, run_id, facts, error)
    return Admitted(order, backend, run_id, {**facts, "budget": share})


async def id_of(folder: StateFolder, wanted: str | None) -> str:
    """Return the id of a new run: the wanted one, or another if there is none or a run has it already."""
    is_new = wanted is not None and await anyio.to_thread.run_sync(folder.is_new, wanted)
    return wanted if wanted is not None and is_new else str(uuid.uuid4())


async def keep_result(home: Path, run: Run) -> None:
    """Keep the complete result of a pure order: the store answers the same order the next time."""
    known = run.facts.added.get("cache")
    if isinstance(known, dict) and not known["hit"] and run.is_sealed and run.stored.outcome == "complete":
        from backplane.runtime import cache

        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(cache.keep, home, known["key"], run.id)
