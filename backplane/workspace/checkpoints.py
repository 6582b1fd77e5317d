"""Named states of a workspace between its start and its end, and the way back to one of them.

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
from backplane.workspace import git, patch
from backplane.workspace.apply import APPLIED_ALREADY, Applied, put
from backplane.workspace.baseline import BLOB_BYTES_MAX
from backplane.workspace.pack import FILE, PROGRAM, Leaf, ObjectNames, write_trees
from backplane.workspace.patch import (
    BLOBS_NAME,
    RECORD_BYTES_MAX,
    PathTarget,
    SavedPatch,
    failure,
)
from backplane.workspace.tree import parent, printable
from backplane.workspace.workspace import Workspace

FOLDER_NAME: Final = "checkpoints"

START: Final = "start"
"""Names the state at the run's beginning; it is always there."""

CHECKPOINTS_MAX: Final = 100
"""Of one run. An automatic one beyond it takes the place of the oldest automatic one."""

BYTES_MAX: Final = 1 << 30
"""Contents kept for one run's checkpoints, each once; as with the number, the oldest automatic ones make room."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ID: Final = re.compile(r"c[0-9]{1,18}")

Why = Literal["asked", "tool"]


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One kept state; this is what the receipt says of it."""

    id: str
    name: str
    at: str
    """When it was made, in the contract's print form."""
    why: Why
    """Asked for by name, or made before a tool."""
    tree: str
    """Git's name of the whole tree that is covered."""
    files: int
    """That differ from the start."""
    left_out: int = 0
    """Changed files that it cannot hold."""
    record_sha256: str = ""
    """Of its record in the run's folder."""


class Rewound(msgspec.Struct, frozen=True):
    """A way back that was taken."""

    to: Checkpoint | None
    """None for the start."""
    files: int


class Checkpoints:
    """The checkpoints of an open workspace. Everything here blocks; one call at a time."""

    def __init__(self, workspace: Workspace, run_dir: Path) -> None:
        self.made: list[Checkpoint] = []
        self.dropped = 0
        """Automatic ones that made room for newer ones."""
        self._workspace = workspace
        self._run_dir = run_dir
        self._targets: dict[str, dict[str, PathTarget]] = {}
        self._sizes: dict[bytes, int] = {}
        self._bytes = 0
        self._count = 0

    @property
    def _folder(self) -> Path:
        return self._run_dir / FOLDER_NAME

    @property
    def _blobs(self) -> Path:
        return self._folder / "blobs"

    def make(self, name: str | None, why: Why, at: str) -> Checkpoint | None:
        """Keep the present state; None when an automatic one would be the same as the last.

        Raises:
            WorkspaceError: `execution_workspace_error`: the name is taken or is none, there is no room, or the
                tree cannot be read; then nothing is kept.
        """
        number = self._count + 1
        name = self._free_name(name if name is not None else f"c{number}")
        if why == "asked" and len(self.made) - sum(one.why == "tool" for one in self.made) >= CHECKPOINTS_MAX:
            raise failure(f"a run keeps {CHECKPOINTS_MAX} checkpoints", "go on without another one")
        fresh: set[bytes] = set()
        try:
            made = self._make(f"c{number}", name, why, at, fresh)
        except OSError as error:
            raise failure(f"the checkpoint {name!r} cannot be written: {error.strerror}") from error
        finally:
            self._collect()
        if made is not None:
            self._count = number
        return made

    def _make(self, id: str, name: str, why: Why, at: str, fresh: set[bytes]) -> Checkpoint | None:
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
        if why == "tool" and self.made and self.made[-1].tree == tree:
            return None
        while len(self.made) >= CHECKPOINTS_MAX and self._drop_oldest():
            pass
        head = {"root": str(self._workspace.original), "mode": self._workspace.mode}
        record = patch.write_record(self._folder / f"{id}.json", head, changes.before, changes.after)
        made = Checkpoint(
            id=id, name=name, at=at, why=why, tree=tree, files=len(targets), left_out=len(changes.left_out),
            record_sha256=record,
        )  # fmt: skip
        self._targets[id] = targets
        self.made.append(made)
        return made

    def rewind(self, name: str) -> Rewound:
        """Put every covered file back to what it was at a checkpoint; all of them or none.

        Raises:
            WorkspaceError: `execution_workspace_error`: there is no such checkpoint, or somebody writes meanwhile.
        """
        to = found(self.made, name)
        targets = self._targets[to.id] if to is not None else {}
        start, leaves = self._workspace.start, self._leaves(targets)
        self._blobs.mkdir(mode=0o700, parents=True, exist_ok=True)
        wanted = {leaf.oid for leaf in leaves.values()}
        fresh: set[bytes] = set()

        def take(leaf: Leaf, data: bytes) -> None:
            if leaf.oid in wanted:
                fresh.add(leaf.oid)
                self._keep(leaf, data, fresh)

        try:
            # By the rules that held there: what a later `.gitignore` names is removed all the same.
            changes = self._workspace.changes(take, self._rules(leaves))
            steps: dict[str, PathTarget] = {}
            for path in {*changes.before, *changes.after, *targets}:
                changed = path in changes.before or path in changes.after
                now, then = (changes.after if changed else start).get(path), leaves.get(path)
                if now != then:
                    steps[path] = PathTarget(path, now, then)
            done = self._put(steps)
        finally:
            self._collect()
        return Rewound(to, len(done.files))

    def _put(self, steps: dict[str, PathTarget]) -> Applied:
        root = self._workspace.root
        saved = SavedPatch(str(root), self._workspace.mode, steps, {}, (self._blobs,))
        try:
            # What is cut off in a copy of ours goes with the copy.
            staged = self._workspace.mode == "staged"
            return put(saved, root.parent / "rewind" if staged else _marked(self._run_dir), root)
        except WorkspaceError as error:
            raise failure(
                f"the workspace was not rewound: {error.message}", "let the agent come to rest first"
            ) from error
        except OSError as error:
            raise failure(f"the workspace was not rewound: {error.strerror}") from error

    def _rules(self, leaves: Mapping[str, Leaf]) -> dict[str, bytes]:
        rules: dict[str, bytes] = {}
        for path, leaf in leaves.items():
            if path == git.RULES_NAME or path.endswith("/" + git.RULES_NAME):
                data = self._content(leaf)
                if leaf.mode in (FILE, PROGRAM) and len(data) <= git.RULES_BYTES_MAX:
                    rules[parent(path)] = git.without_holes(data)
        return rules

    def _content(self, leaf: Leaf) -> bytes:
        if leaf.oid in self._sizes:
            return patch.read_kept(self._blobs / leaf.oid.hex(), BLOB_BYTES_MAX)
        return self._workspace.content(leaf)

    def _leaves(self, targets: Mapping[str, PathTarget]) -> dict[str, Leaf]:
        """The whole covered tree with these differences from the start."""
        leaves = dict(self._workspace.start)
        for path, target in targets.items():
            leaves.pop(path, None)
            if target.after is not None:
                leaves[path] = target.after
        return leaves

    def _free_name(self, name: str) -> str:
        if _NAME.fullmatch(name) is None or name == START:
            hint = "letters, digits, '.', '_' and '-', 64 at most"
            raise failure(f"a checkpoint cannot be named {printable(name)[:80]!r}", hint)
        if any(name in (one.name, one.id) for one in self.made):
            raise failure(f"there is a checkpoint {name!r} already", "take another name")
        return name

    def _keep(self, leaf: Leaf, data: bytes, fresh: Collection[bytes]) -> None:
        """Write one content, once; the oldest automatic checkpoints make room for it."""
        if leaf.oid in self._sizes:
            return
        while self._bytes + len(data) > BYTES_MAX:
            needed = len(data) + sum(self._sizes.get(oid, 0) for oid in fresh)
            if needed > BYTES_MAX or not self._drop_oldest():
                raise failure(f"a run's checkpoints keep {BYTES_MAX} bytes at most", "exclude what need not be kept")
            self._collect(fresh)
        (self._blobs / leaf.oid.hex()).write_bytes(data)
        self._sizes[leaf.oid] = len(data)
        self._bytes += len(data)

    def _drop_oldest(self) -> bool:
        oldest = next((one for one in self.made if one.why == "tool"), None)
        if oldest is None:
            return False
        self.made.remove(oldest)
        del self._targets[oldest.id]
        (self._folder / f"{oldest.id}.json").unlink(missing_ok=True)
        self.dropped += 1
        return True

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
    folder = run_dir / FOLDER_NAME
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
    try:
        blobs = (run_dir / BLOBS_NAME, run_dir / FOLDER_NAME / "blobs")
        saved = SavedPatch(final.root, "staged", steps, {}, blobs)
        return put(saved, _marked(run_dir), Path(final.root), check=check)
    except WorkspaceError as error:
        if error.message == APPLIED_ALREADY:
            raise failure("the workspace is in this state already", "nothing is left to do") from error
        hint = f"undo these changes first, or take out the run's whole patch: git apply -R {run_dir / patch.PATCH_NAME}"
        raise failure(f"not as the run left it: {error.message}", hint) from error
    except OSError as error:
        hint = "nothing was changed; look at the disks of the workspace and of the state folder"
        raise failure(f"'{printable(final.root)}' cannot be rewound: {error.strerror}", hint) from error


def _marked(run_dir: Path) -> Path:
    """Beside what the exchange is noted: not the run's own name, as that would say its patch was applied."""
    return run_dir.with_name(f"{run_dir.name}-rewind")
