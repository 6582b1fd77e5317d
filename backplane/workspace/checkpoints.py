"""States of a workspace before tools that may write, and the way back to one of them after the run's end.

What has changed since the baseline goes in; a record and the contents lie in the run's own folder, so a
checkpoint is a patch like the one at the end. Covered is what that patch would cover: changes of any program,
new files and deleted ones; not what git's rules ignore, files over 64 MiB, special files and `.git`.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from backplane.errors import WorkspaceError
from backplane.workspace import patch
from backplane.workspace.apply import APPLIED_ALREADY, Applied, blobs_of, put
from backplane.workspace.pack import Leaf, ObjectNames, write_trees
from backplane.workspace.patch import CHECKPOINTS_NAME, RECORD_BYTES_MAX, PathTarget, SavedPatch, failure
from backplane.workspace.tree import printable
from backplane.workspace.workspace import Workspace

START: Final = "start"
"""Names the state at the run's beginning; it is always there."""

CHECKPOINTS_MAX: Final = 100
"""Most checkpoints of one run; a further one takes the place of the oldest."""

BYTES_MAX: Final = 1 << 30
"""Bytes of contents kept for one run's checkpoints, each content once; the oldest checkpoints make room."""

_ID: Final = re.compile(r"c[0-9]{1,18}")


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One kept state; this is what the receipt says of it."""

    id: str
    name: str
    """The same as its id."""
    at: str
    """When it was made, in the contract's print form."""
    why: Literal["tool"]
    """Made before a tool that may write."""
    tree: str
    """Git's name of the whole tree that is covered."""
    files: int
    """That differ from the start."""
    left_out: int = 0
    """Changed files that it cannot hold."""
    record_sha256: str = ""
    """Of its record in the run's folder."""


class Checkpoints:
    """The checkpoints of an open workspace. Everything here blocks; one call at a time."""

    def __init__(self, workspace: Workspace, run_dir: Path) -> None:
        self.made: list[Checkpoint] = []
        self.dropped = 0
        """Checkpoints that made room for newer ones."""
        self._workspace = workspace
        self._run_dir = run_dir
        self._targets: dict[str, dict[str, PathTarget]] = {}
        self._sizes: dict[bytes, int] = {}
        self._bytes = 0
        self._count = 0

    @property
    def _folder(self) -> Path:
        return self._run_dir / CHECKPOINTS_NAME

    @property
    def _blobs(self) -> Path:
        return self._folder / "blobs"

    def make(self, at: str) -> Checkpoint | None:
        """Keep the present state; return None if it is the same as the last one kept.

        Args:
            at: the present time in the contract's print form.

        Raises:
            WorkspaceError: `execution_workspace_error`: there is no room, or the tree cannot be read; then nothing
                is kept.
        """
        number = self._count + 1
        fresh: set[bytes] = set()
        try:
            made = self._make(f"c{number}", at, fresh)
        except OSError as error:
            raise failure(f"the checkpoint c{number} cannot be written: {error.strerror}") from error
        finally:
            self._collect()
        if made is not None:
            self._count = number
        return made

    def _make(self, id: str, at: str, fresh: set[bytes]) -> Checkpoint | None:
        self._blobs.mkdir(mode=0o700, parents=True, exist_ok=True)

        def take(leaf: Leaf, data: bytes) -> None:
            fresh.add(leaf.oid)
            self._keep(leaf, data, fresh)

        changes = self._workspace.changes(take)
        targets = {
            path: PathTarget(path, changes.before.get(path), changes.after.get(path))
            for path in {*changes.before, *changes.after}
        }
        tree = write_trees(ObjectNames(), self._leaves(targets)).hex()
        if self.made and self.made[-1].tree == tree:
            return None
        while len(self.made) >= CHECKPOINTS_MAX:
            self._drop_oldest()
        head = {"root": str(self._workspace.original), "mode": self._workspace.mode}
        record = patch.write_record(self._folder / f"{id}.json", head, changes.before, changes.after)
        made = Checkpoint(
            id=id, name=id, at=at, why="tool", tree=tree, files=len(targets), left_out=len(changes.left_out),
            record_sha256=record,
        )  # fmt: skip
        self._targets[id] = targets
        self.made.append(made)
        return made

    def _leaves(self, targets: Mapping[str, PathTarget]) -> dict[str, Leaf]:
        """The whole covered tree with these differences from the start."""
        leaves = dict(self._workspace.start)
        for path, target in targets.items():
            leaves.pop(path, None)
            if target.after is not None:
                leaves[path] = target.after
        return leaves

    def _keep(self, leaf: Leaf, data: bytes, fresh: Collection[bytes]) -> None:
        """Write one content, once; the oldest checkpoints make room for it."""
        if leaf.oid in self._sizes:
            return
        while self._bytes + len(data) > BYTES_MAX:
            needed = len(data) + sum(self._sizes.get(oid, 0) for oid in fresh)
            if needed > BYTES_MAX or not self.made:
                raise failure(f"a run's checkpoints keep {BYTES_MAX} bytes at most", "exclude what need not be kept")
            self._drop_oldest()
            self._collect(fresh)
        (self._blobs / leaf.oid.hex()).write_bytes(data)
        self._sizes[leaf.oid] = len(data)
        self._bytes += len(data)

    def _drop_oldest(self) -> None:
        oldest = self.made.pop(0)
        del self._targets[oldest.id]
        (self._folder / f"{oldest.id}.json").unlink(missing_ok=True)
        self.dropped += 1

    def _collect(self, fresh: Collection[bytes] = ()) -> None:
        """Remove contents that no checkpoint names."""
        targets = [target for known in self._targets.values() for target in known.values()]
        used = {leaf.oid for target in targets for leaf in (target.before, target.after) if leaf is not None}
        for oid in [oid for oid in self._sizes if oid not in used and oid not in fresh]:
            with contextlib.suppress(OSError):
                (self._blobs / oid.hex()).unlink()
            self._bytes -= self._sizes.pop(oid)


def found(made: Collection[Checkpoint], name: str) -> Checkpoint | None:
    """The checkpoint of this name or id among these; None for the start.

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


# Of a run that has ended ----------------------------------------------------------------------------------------------


def told(rows: Any) -> tuple[Checkpoint, ...]:
    """Checkpoints as a receipt or an event names them, which anybody may have written.

    Raises:
        ValueError: they are none, or one has an id that names more than a file of its folder.
    """
    made = msgspec.convert(rows, tuple[Checkpoint, ...])
    for one in made:
        if _ID.fullmatch(one.id) is None:
            raise ValueError(f"{printable(one.id)[:80]!r} is no checkpoint's id")
    return made


def load(run_dir: Path, checkpoint: Checkpoint) -> SavedPatch:
    """Read a checkpoint back as a patch from the start.

    Args:
        checkpoint: as the receipt names it; its record must be the one that was kept.

    Raises:
        WorkspaceError: `execution_workspace_error`.
    """
    folder = run_dir / CHECKPOINTS_NAME
    if _ID.fullmatch(checkpoint.id) is None:
        raise failure(f"{printable(checkpoint.id)[:80]!r} is no checkpoint's id", "do not trust it")
    try:
        data = patch.read_kept(folder / f"{checkpoint.id}.json", RECORD_BYTES_MAX)
        if hashlib.sha256(data).hexdigest() != checkpoint.record_sha256:
            raise failure(f"the record of checkpoint {checkpoint.name!r} is not what was kept", "do not trust it")
        return patch.read_record(data, folder / "blobs")[1]
    except FileNotFoundError:
        raise failure(f"checkpoint {checkpoint.name!r} is not kept any more") from None
    except OSError as error:
        raise failure(f"checkpoint {checkpoint.name!r} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise failure(f"checkpoint {checkpoint.name!r} is no record of ours", "do not trust it") from error


def rewind_original(
    run_dir: Path, to: Checkpoint | None, *, record_sha256: str | None = None, check: bool = False
) -> Applied:
    """Take the workspace that has a run's result back to one of its checkpoints; all of it or nothing. Blocking.

    Args:
        to: None for the start.
        record_sha256: of the record of the run's patch, as the receipt has it; None where it does not say.
        check: only find out whether it would work.

    Raises:
        WorkspaceError: `execution_workspace_error`; files there are not as the run left them (named).
    """
    final = patch.load(run_dir, record_sha256)
    targets = load(run_dir, to).targets if to is not None else {}
    steps: dict[str, PathTarget] = {}
    for path in {*final.targets, *targets}:
        ended, then = final.targets.get(path), targets.get(path)
        now = ended.after if ended is not None else then.before if then is not None else None
        was = then.after if then is not None else ended.before if ended is not None else None
        if now != was:
            steps[path] = PathTarget(path, now, was)
    saved = SavedPatch(final.root, "staged", steps, {}, blobs_of(run_dir))
    try:
        return put(run_dir, Path(final.root), "rewind", lambda _: saved, check=check)
    except WorkspaceError as error:
        if error.message == APPLIED_ALREADY:
            raise failure("the workspace is in this state already", "nothing is left to do") from error
        if not error.message.startswith("changed since"):
            raise
        hint = f"undo these changes first, or take out the run's whole patch: git apply -R {run_dir / patch.PATCH_NAME}"
        raise failure(f"not as the run left it: {error.message}", hint) from error
    except OSError as error:
        hint = "nothing was changed; look at the disks of the workspace and of the state folder"
        raise failure(f"'{printable(final.root)}' cannot be rewound: {error.strerror}", hint) from error
