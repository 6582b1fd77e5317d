"""Runs one order on several backends from the same tree, and compares the results."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import msgspec
from msgspec.structs import replace

from backplane.contract.events import CommandExecuted
from backplane.contract.work import WorkOrder, WorkspaceSpec
from backplane.errors import ConfigError, WorkspaceError, require_type
from backplane.policy.rules import PROFILES
from backplane.receipts.audit import patch_claim, record_hash
from backplane.routing.intervals import Comparison, Trial, summed_up, verdicts_on
from backplane.runtime.cache import tree_sha256
from backplane.runtime.orders import make_order
from backplane.runtime.place import quota_of
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run
from backplane.view.diff import changes
from backplane.workspace import apply_patch, open_workspace

CHECKER: Final = "shell"
"""The backend that runs the check, in a sandbox and with a receipt like every run."""

NO_COMMAND: Final = 127
"""The exit code with which a shell says that there is no such command."""

RUNS_MAX: Final = 1000
"""Most runs of one comparison; more would take days."""


class Side(msgspec.Struct, frozen=True):
    """A backend to compare, with the model to use; without a model, the backend's default."""

    backend: str
    model: str | None = None

    @property
    def name(self) -> str:
        return self.backend if self.model is None else f"{self.backend}/{self.model}"


Progress = Callable[[Trial], None]


def read_side(text: str) -> Side:
    """Read `BACKEND` or `BACKEND/MODEL`. Raises ConfigError: `config_invalid`, one of the two is empty."""
    backend, slash, model = text.partition("/")
    if not backend or (slash and not model):
        fact = f"{text!r} names no {'model' if backend else 'backend'}"
        raise ConfigError("config_invalid", fact, hint="BACKEND, or BACKEND/MODEL for a model of one")
    return Side(backend, model if slash else None)


async def compare(
    plane: ControlPlane,
    order: WorkOrder | str,
    sides: Sequence[Side | str],
    *,
    check: str | None = None,
    repeat: int = 1,
    heard: Progress = lambda trial: None,
) -> Comparison:
    """Run an order on each side, `repeat` times, one after the other; the original is left as it is.

    The sides take turns, each round beginning with another one, so that what changes with time changes for all.

    Args:
        order: a work order, or just the task; is staged, whatever it says, and nothing of it is applied.
        sides: each as a value, or as `read_side` takes it.
        check: a command that is run in a copy with the patch; exit code 0 passes. None checks nothing.
        heard: called after each run.

    Raises:
        ConfigError: `config_invalid`, fewer than two sides, one side twice, too many runs, or the order's root is no
            folder.
        BackendError: `backend_not_found`, `backend_unavailable`.
        WorkspaceError: `workspace_staging_failed`, the original changed meanwhile.
        StoreError: `receipt_store_failed`.
    """
    order, chosen = make_order(order), [read_side(side) if isinstance(side, str) else side for side in sides]
    _require_sides(plane, chosen, repeat)
    order = replace(order, lane="patch_first", workspace=replace(order.workspace, mode="staged"))
    root = Path(order.workspace.root)
    if not await anyio.to_thread.run_sync(os.path.isdir, root):
        raise ConfigError("config_invalid", f"{root} is no folder", hint="name one (`root`, --root), or leave it out")
    before = await anyio.to_thread.run_sync(_tree, plane, root)
    trials: list[Trial] = []
    id = str(uuid.uuid4())
    for number in range(repeat):
        turn = number % len(chosen)
        for side in (*chosen[turn:], *chosen[:turn]):
            trial = await _trial(plane, order, side, check, number + 1, id)
            if await anyio.to_thread.run_sync(_tree, plane, root) != before:
                fact = f"{root} changed during the comparison: its runs did not start from the same tree"
                hint = "compare again, and change nothing in it meanwhile"
                raise WorkspaceError("workspace_staging_failed", fact, hint=hint)
            trials.append(trial)
            heard(trial)
    found = so_far(order, check, chosen, trials)
    assert found is not None, "each side has run"
    return found


def so_far(order: WorkOrder, check: str | None, sides: Sequence[Side], trials: Sequence[Trial]) -> Comparison | None:
    """Sum up the runs so far; None until each side has one."""
    of_side = {side.name: [trial for trial in trials if trial.side == side.name] for side in sides}
    if not all(of_side.values()):
        return None
    found = tuple(summed_up(name, runs) for name, runs in of_side.items())
    root = str(order.workspace.root)
    return Comparison(
        task=order.task, root=root, check=check, sides=found, verdicts=verdicts_on(found), trials=tuple(trials)
    )


def _tree(plane: ControlPlane, root: Path) -> str:
    """Return a hash of the original. Raises WorkspaceError: `workspace_staging_failed`, it cannot be read."""
    try:
        return tree_sha256(root, plane.settings.limits)
    except (OSError, ValueError) as error:
        hint = "compare in a smaller folder that can be read"
        raise WorkspaceError("workspace_staging_failed", f"{root}: {error}", hint=hint) from error


def _require_sides(plane: ControlPlane, sides: Sequence[Side], repeat: int) -> None:
    require_type(repeat, int, "`repeat`", "a number of rounds")
    for side in sides:
        require_type(side, Side, "a side", "BACKEND, BACKEND/MODEL, or a Side")
    if len(sides) < 2 or len(set(sides)) < len(sides):
        fact = "a comparison needs two backends or more, each once"
        raise ConfigError("config_invalid", fact, hint="-b A -b B; BACKEND/MODEL for a model of one")
    if not 1 <= repeat <= RUNS_MAX // len(sides):
        fact = f"{repeat} rounds of {len(sides)} runs are not between 1 and {RUNS_MAX} runs"
        raise ConfigError("config_invalid", fact, hint="lower `repeat` (--repeat)")
    for side in sides:
        plane.find_backend(side.backend)


async def _trial(plane: ControlPlane, order: WorkOrder, side: Side, check: str | None, number: int, id: str) -> Trial:
    # Each order needs its own id, which tells the receipts of one comparison apart.
    one = replace(order, id=WorkOrder(order.task).id)
    if side.model is not None:
        one = replace(one, config=replace(order.config, model=side.model))
    async with plane.start(one, side.backend, added={"compare": {"id": id, "side": side.name, "round": number}}) as run:
        await run.wait()
    receipt, cost = run.stored, run.stored.usage.estimated_cost_usd
    files = changes(_patch_lines(run))
    checked = await _check(plane, run, check) if check is not None and receipt.outcome == "complete" else None
    return Trial(
        side=side.name,
        round=number,
        run_id=run.id,
        outcome=receipt.outcome,
        code=run.error.code if run.error is not None else None,
        duration_ms=receipt.meta.duration_ms,
        cost_usd_micros=round(cost * 1_000_000) if cost is not None and cost < 1e9 else None,
        input_tokens=receipt.usage.input_tokens,
        output_tokens=receipt.usage.output_tokens,
        files=len(files),
        added=sum(file.added for file in files),
        removed=sum(file.removed for file in files),
        patch_sha256=patch_claim(receipt).get("sha256") if files else None,
        checked=None if checked is None else checked.error is None,
        check_run_id=None if checked is None else checked.id,
        check_says=None if checked is None else _check_says(checked),
    )


def _check_says(checked: Run) -> str | None:
    if checked.error is None:
        return None
    said = checked.error.message.removeprefix(f"the run ended as {checked.stored.outcome}: ")
    codes = [event.exit_code for event in checked.stored.trace if isinstance(event, CommandExecuted)]
    return f"{said} (no such command)" if codes[-1:] == [NO_COMMAND] else said


def _patch_lines(run: Run) -> list[str]:
    if run.patch is None or not run.patch.is_file():
        return []
    return run.patch.read_text(encoding="utf-8", errors="replace").splitlines()


# The check ------------------------------------------------------------------------------------------------------------


async def _check(plane: ControlPlane, run: Run, command: str) -> Run:
    """Run the check in a copy of the original with the run's patch applied, then remove the copy."""
    with tempfile.TemporaryDirectory(prefix="backplane-compare-") as scratch:
        place = await anyio.to_thread.run_sync(_copy_with_patch, plane, run, Path(scratch))
        # The configured policy is about agents, and this is the caller's own command.
        where = WorkspaceSpec(str(place), mode="pass_through")
        order = WorkOrder(command, workspace=where, policy=PROFILES["default"])
        async with plane.start(order, CHECKER, added={"check": {"of": run.id}}) as checked:
            await checked.wait()
    return checked


def _copy_with_patch(plane: ControlPlane, run: Run, scratch: Path) -> Path:
    spec, limits = run.order.workspace, plane.settings.limits
    own = scratch / "own"
    own.mkdir()
    workspace = open_workspace(
        spec.root,
        mode="staged",
        include=spec.include,
        exclude=spec.exclude,
        run_dir=own,
        stage_dir=scratch / "stage",
        tree=scratch / "stage" / "tree",
        quota=quota_of(limits),
        state=plane.home,
    )
    if run.patch is not None and run.patch.is_file() and run.patch.stat().st_size and run.folder is not None:
        apply_patch(run.folder, record_sha256=record_hash(run.stored), root=workspace.root)
    return workspace.root
