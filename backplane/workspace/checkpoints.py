"""Keeps states of a workspace before tools that may write, and restores one of them after the run's end.

A checkpoint is a state in the run's repository, like the one of the patch at the end. It has the same files: changed,
new and deleted ones, but no ignored files, files over 64 MiB, special files or `.git`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from backplane.errors import WorkspaceError
from backplane.workspace import patch
from backplane.workspace.apply import APPLIED_ALREADY, Applied, explained, put
from backplane.workspace.patch import PathTarget, SavedPatch, failure
from backplane.workspace.tree import printable
from backplane.workspace.workspace import Workspace

START: Final = "start"
"""Name of the state at the run's beginning, which is always there."""

CHECKPOINTS_MAX: Final = 100
"""Number of checkpoints of one run; a further one replaces the oldest."""

_ID: Final = re.compile(r"c[0-9]{1,18}")
_TREE: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint, as the receipt lists it."""

    id: str
    name: str
    """The same as its id."""
    at: str
    """Time when it was made, in the contract's print form."""
    why: Literal["tool"]
    """It was made before a tool that may write."""
    tree: str
    """Git's name of the state: a tree with the changed files as they were at the start in `a`, as they are in `b`."""
    files: int
    """Number of files that differ from the start."""
    left_out: int = 0
    """Number of changed files that the state does not have."""


class Checkpoints:
    """The checkpoints of an open workspace. All methods block; make one call at a time."""

    def __init__(self, workspace: Workspace) -> None:
        self.made: list[Checkpoint] = []
        self.dropped = 0
        """Number of checkpoints that newer ones have replaced."""
        self._workspace = workspace
        self._count = 0

    def make(self, at: str) -> Checkpoint | None:
        """Store the present state; return None if it is the same as the last stored one.

        Args:
            at: the present time in the contract's print form.

        Raises:
            WorkspaceError: `execution_workspace_error`: there is no room, or the tree cannot be read; then nothing
                is kept.
        """
        workspace, id = self._workspace, f"c{self._count + 1}"
        tree, changes = workspace.snapshot(id)
        if tree == (self.made[-1].tree if self.made else None):
            workspace.repo.forget(id)
            return None
        if not self.made:
            try:
                patch.write_record(workspace.run_dir, patch.PatchRecord(str(workspace.original), workspace.mode))
            except OSError as error:
                raise failure(f"the checkpoint {id} cannot be written: {error.strerror}") from error
        if len(self.made) >= CHECKPOINTS_MAX:
            workspace.repo.forget(self.made.pop(0).id)
            self.dropped += 1
        made = Checkpoint(
            id=id, name=id, at=at, why="tool", tree=tree, files=len(changes.paths), left_out=len(changes.left_out)
        )
        self._count += 1
        self.made.append(made)
        return made


def find(made: Collection[Checkpoint], name: str) -> Checkpoint | None:
    """Find a checkpoint by its name or id; return None for the start.

    Raises:
        WorkspaceError: `execution_workspace_error`, there is none.
    """
    if name == START:
        return None
    for one in made:
        if name in (one.name, one.id):
            return one
    there = ", ".join([START, *(one.name for one in made)][-patch.NAMES_MAX :])
    raise failure(f"there is no checkpoint {printable(name)[:80]!r}", f"there are: {there}")


# After the run's end --------------------------------------------------------------------------------------------------


def parse_checkpoints(rows: Any) -> tuple[Checkpoint, ...]:
    """Read the checkpoints in a receipt or event, which are untrusted input.

    Raises:
        ValueError: they have another shape, or one has an id or tree that is not of our form.
    """
    made = msgspec.convert(rows, tuple[Checkpoint, ...])
    for one in made:
        if _ID.fullmatch(one.id) is None or _TREE.fullmatch(one.tree) is None:
            raise ValueError(f"{printable(one.id)[:80]!r} is no checkpoint")
    return made


def load(run_dir: Path, checkpoint: Checkpoint) -> SavedPatch:
    """Read a checkpoint back as a patch from the start.

    Raises:
        WorkspaceError: `execution_workspace_error`.
    """
    try:
        return patch.load_state(run_dir, checkpoint.tree)
    except OSError as error:
        raise failure(f"checkpoint {checkpoint.name!r} cannot be read: {error.strerror}") from error
    except WorkspaceError as error:
        raise failure(f"checkpoint {checkpoint.name!r} is not kept any more: {error.message}", error.hint) from error


def rewind_original(
    run_dir: Path, to: Checkpoint | None, *, record_sha256: str | None = None, check: bool = False
) -> Applied:
    """Restore a folder, to which a run's result was applied, to the state of a checkpoint. Blocking.

    Args:
        to: the checkpoint; None for the start.
        record_sha256: hash of the record, from the receipt; None if the receipt has none.
        check: only find out whether it would work.

    Raises:
        WorkspaceError: `execution_workspace_error`; files there are not as the run left them (named).
    """
    with explained(run_dir):
        final = patch.load(run_dir, record_sha256)
        targets = load(run_dir, to).targets if to is not None else {}
        steps: dict[str, PathTarget] = {}
        for path in {*final.targets, *targets}:
            ended, then = final.targets.get(path), targets.get(path)
            now = ended.after if ended is not None else then.before if then is not None else None
            was = then.after if then is not None else ended.before if ended is not None else None
            if now != was:
                steps[path] = PathTarget(path, now, was)
        try:
            return put(run_dir, Path(final.root), "rewind", lambda: steps, check=check)
        except WorkspaceError as error:
            if error.message == APPLIED_ALREADY:
                raise failure("the workspace is in this state already", "nothing is left to do") from error
            if not error.message.startswith("changed since"):
                raise
            undo = f"or take out the run's whole patch: git apply -R {run_dir / patch.PATCH_NAME}"
            hint = f"undo these changes first, {undo}"
            raise failure(f"not as the run left it: {error.message}", hint) from error
