"""Applies a run's patch to a workspace: checks every path first, then writes file by file.

Whole files are compared: a file is as it was when the run began, or has its new content already, or has changed
meanwhile and is refused, or merged on request. No link of the workspace is followed.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import stat
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Final

import msgspec

from backplane.errors import WorkspaceError
from backplane.workspace import git, writing
from backplane.workspace.baseline import git_mode
from backplane.workspace.pack import LINK, Leaf, blob_id
from backplane.workspace.patch import (
    BLOBS_NAME,
    CHECKPOINTS_NAME,
    CODE,
    PathTarget,
    SavedPatch,
    failure,
    hashed,
    load,
    names,
)
from backplane.workspace.tree import (
    FILE_FLAGS,
    Quota,
    list_tree,
    look_at,
    open_folder,
    open_root,
    opened,
    parent,
    printable,
    scope,
)
from backplane.workspace.writing import Command, Mark, Writing, folders_above

APPLIED_ALREADY: Final = "the patch is applied already"


class Applied(msgspec.Struct, frozen=True):
    """The files that `apply_patch` has changed, or with `check` would change."""

    files: tuple[str, ...]
    merged: bool
    """True if a file that had changed meanwhile was merged."""
    root: str = ""
    """The folder; empty if there was nothing to apply."""
    went_on: bool = False
    """True if an earlier call that was cut off was continued; what was asked of that call counts."""

    def describe(self, *, is_check: bool) -> str:
        """Return a sentence that says how many files were changed, or would be, and where."""
        if not self.files:
            return "the run changed nothing"
        count = f"{len(self.files)} file{'' if len(self.files) == 1 else 's'}"
        merged, here = ", some by a merge" if self.merged else "", os.path.realpath(self.root) == os.path.realpath(".")
        before = "going on where it was cut off: " if self.went_on else ""
        return (
            f"{before}{'would change' if is_check else 'changed'} {count}{'' if here else f' in {self.root}'}{merged}"
        )


def apply_patch(
    run_dir: Path,
    *,
    record_sha256: str | None = None,
    saved: SavedPatch | None = None,
    root: Path | None = None,
    check: bool = False,
    merge: bool = False,
    done: Callable[[int], None] = lambda files: None,
) -> Applied:
    """Apply a run's patch to the original workspace, or to `root`; a call that was cut off is continued.

    Args:
        record_sha256: hash of the record, from `patch` of the receipt; None if the receipt has none.
        saved: another state of the same run, a checkpoint; None is the patch at its end.
        check: only find out whether it would work.
        merge: merge files that have changed since the run began, instead of refusing.
        done: called with the number of files once all are written.

    Raises:
        WorkspaceError: `execution_workspace_error`; there is no patch, a file has changed (named), a merge has
            conflicts (named), or a write failed; the error says whether a file was changed.
    """
    with explained(run_dir):
        saved = saved if saved is not None else load(run_dir, record_sha256)
        if root is None and saved.mode == "pass_through":
            raise failure("the run worked in place, so its changes are there already", "nothing is left to do")
        where = Path(saved.root) if root is None else root.resolve(strict=True)
        return put(run_dir, where, "apply", lambda _: saved, check=check, merge=merge, done=done)


def go_on(run_dir: Path, root: Path | None = None, *, check: bool = False, merge: bool = False) -> Applied | None:
    """Continue an application that was cut off; return None if there is none. Raises as `apply_patch`."""
    begun = writing.read_mark(run_dir)
    if begun is None or begun.command != "apply":
        return None
    none = SavedPatch(begun.root, "staged", {}, {}, blobs_of(run_dir))
    with explained(run_dir):
        where = Path(begun.root) if root is None else root.resolve(strict=True)
        return put(run_dir, where, "apply", lambda _: none, check=check, merge=merge)


@contextlib.contextmanager
def explained(run_dir: Path) -> Iterator[None]:
    """Turn an error of the system into one of ours, before a file was changed."""
    try:
        yield
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "unknown error")
        about = printable(os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(run_dir))
        raise failure(f"the patch cannot be applied: {name} at '{about}'", "nothing was changed") from error


def put(
    run_dir: Path,
    root: Path,
    command: Command,
    make: Callable[[int], SavedPatch],
    *,
    check: bool = False,
    merge: bool = False,
    done: Callable[[int], None] = lambda files: None,
) -> Applied:
    """Write the files of a patch or a checkpoint, or continue the write that was cut off.

    Args:
        command: the command that can continue this write.
        make: returns the files, for the folder's handle; not called if a write is continued.

    Raises:
        OSError: nothing was changed.
        WorkspaceError: as `apply_patch`.
    """
    with opened(open_root(root)) as handle:
        if check:
            begun = writing.read_mark(run_dir)
            saved = _continued(run_dir, root, command, begun)
            plan = _Plan(saved or make(handle), handle, writing.mark_of(run_dir) if begun is not None else None)
            plan.make(merge)
            for leaf in [target.after for target in plan.targets if target.after is not None]:
                if leaf.oid not in plan.made:
                    collections.deque(plan.saved.pieces(leaf), maxlen=0)
            return plan.applied(root)
        with writing.marked(run_dir) as mark:
            begun = mark.read()
            saved = _continued(run_dir, root, command, begun)
            if begun is not None:
                writing.remove_temporary(handle, begun)
            plan = _Plan(saved or make(handle), handle, mark.path if begun is not None else None)
            plan.make(merge)
            if plan.targets:
                _write(run_dir, mark, handle, plan, writing.plan(command, root, plan.targets), begun)
            applied = plan.applied(root)
            if applied.files:
                done(len(applied.files))
            mark.remove()
            return applied


def _continued(run_dir: Path, root: Path, command: Command, begun: Writing | None) -> SavedPatch | None:
    """Return the files of a write that was cut off. Raises WorkspaceError if another command must continue it."""
    if begun is None:
        return None
    if (begun.command, begun.root) != (command, str(root)):
        raise failure(begun.describe(run_dir.name), f"first: backplane {begun.command} {run_dir.name[:8]}")
    targets = {target.path: target for target in begun.targets}
    return SavedPatch(begun.root, "staged", targets, {}, blobs_of(run_dir))


def blobs_of(run_dir: Path) -> tuple[Path, Path]:
    """Return the folders of a run's contents: those of its patch, and those of its checkpoints."""
    return run_dir / BLOBS_NAME, run_dir / CHECKPOINTS_NAME / "blobs"


def _write(run_dir: Path, mark: Mark, root: int, plan: _Plan, planned: Writing, begun: Writing | None) -> None:
    """Write the files of a plan.

    Raises:
        OSError: nothing was changed.
        WorkspaceError: a file has changed meanwhile, or could not be written after others were.
    """
    try:
        for oid, data in plan.made.items():
            blobs_of(run_dir)[0].mkdir(mode=0o700, exist_ok=True)
            (blobs_of(run_dir)[0] / oid.hex()).write_bytes(data)
        mark.write(planned)
        places = writing.write_temporary(root, planned, plan.saved, plan.found)
    except BaseException:
        writing.remove_temporary(root, planned)
        mark.write(begun) if begun is not None else mark.remove()
        raise
    try:
        writing.put_in_place(root, planned, plan.found, places)
    except (OSError, WorkspaceError) as error:
        fact = f"{planned.describe(run_dir.name)}; it failed at "
        about = f"'{printable(str(error.filename))}': {error.strerror}" if isinstance(error, OSError) else error.message
        raise failure(fact + about, "mend that, then go on") from error


class _Plan:
    """Finds out which files must be written; writes nothing.

    Args:
        mark: the mark of the write that is continued; None for a new one.
    """

    def __init__(self, saved: SavedPatch, root: int, mark: Path | None) -> None:
        self.saved = saved
        self.root = root
        self.found: dict[str, os.stat_result | None] = {}
        """The facts of each path; a file that has others when it is replaced is refused."""
        self.targets: list[PathTarget] = []
        """Paths that do not have their new content, with their present one as `before`."""
        self.made: dict[bytes, bytes] = {}
        """Contents that are kept nowhere yet, by git's name."""
        self.merged = False
        self._mark = mark
        self._now: dict[str, Leaf | None] = {}

    def applied(self, root: Path) -> Applied:
        paths = self.saved.targets if self._mark is not None else [target.path for target in self.targets]
        return Applied(tuple(map(printable, sorted(paths))), self.merged, str(root), self._mark is not None)

    def make(self, merge: bool) -> None:
        """Compare every path. Raises WorkspaceError: files have changed, or conflict."""
        targets = self.saved.targets
        moved = [path for path, target in targets.items() if self._leaf_now(path) not in (target.before, target.after)]
        moved += self._blocked()
        if moved and not merge:
            given_up = "" if self._mark is None else f", or give up what was cut off: remove '{self._mark}'"
            hint = f"look at them, or merge with --merge{given_up}"
            raise failure(f"changed since the run began: {names(sorted(moved))}", hint)
        results: dict[str, Leaf | None] = {path: target.after for path, target in targets.items() if path not in moved}
        conflicts: list[str] = []
        for path in moved:
            try:
                results |= self._merge(targets[path])
            except _ConflictError:
                conflicts.append(path)
        if conflicts:
            hint = "merge by hand: git apply --reject PATCH; `backplane receipts show RUN` names the patch"
            raise failure(f"conflicts in {names(sorted(conflicts))}; nothing was changed", hint)
        self.merged = bool(moved)
        changed = sorted(path for path, leaf in results.items() if leaf != self._leaf_now(path))
        self.targets = [PathTarget(path, self._now[path], results[path]) for path in changed]
        if targets and not (self.targets or self._mark or merge):
            raise failure(APPLIED_ALREADY, "nothing is left to do")

    def _leaf_now(self, path: str) -> Leaf | None:
        if path not in self._now:
            self._now[path] = self._look(path)
        return self._now[path]

    def _look(self, path: str) -> Leaf | None:
        """Return a path's present leaf without following links; None if there is no file or link."""
        self.found[path] = None

        def look(folder: int, name: str, facts: os.stat_result) -> Leaf | None:
            if stat.S_ISLNK(facts.st_mode):
                oid = blob_id(os.fsencode(os.readlink(name, dir_fd=folder)))
            elif stat.S_ISREG(facts.st_mode):
                oid = _read_through(_content(folder, name))
            else:
                return None
            self.found[path] = facts
            return Leaf(git_mode(facts), oid)

        return look_at(self.root, path, look)

    def _present(self, path: str, leaf: Leaf) -> bytes:
        """Return the content that was seen at a path. Raises WorkspaceError if it has changed meanwhile."""
        with opened(open_folder(self.root, parent(path))) as handle:
            name = path[len(parent(path)) :]
            is_link = leaf.mode == LINK
            data = os.fsencode(os.readlink(name, dir_fd=handle)) if is_link else b"".join(_content(handle, name))
        if blob_id(data) != leaf.oid:
            raise failure(f"'{printable(path)}' was changed just now; nothing was applied", "try again")
        return data

    def _blocked(self) -> list[str]:
        """Return new paths whose place is taken: by a folder, a device, or a file or link above them."""
        gone = {path for path, target in self.saved.targets.items() if target.after is None}
        return [
            path
            for path, target in self.saved.targets.items()
            if target.after and not target.before and self.found[path] is None and self._in_the_way(path, gone)
        ]

    def _in_the_way(self, path: str, gone: set[str]) -> bool:
        for place in (*folders_above([path]), path):
            kind = look_at(self.root, place, lambda folder, name, facts: stat.S_IFMT(facts.st_mode))
            if kind is None or (kind != stat.S_IFDIR and place in gone):
                return False
            if kind != stat.S_IFDIR:
                return True
        return not self._has_only(path, gone)

    def _has_only(self, path: str, gone: set[str]) -> bool:
        """Return True if a folder will be empty once these files are removed."""
        everything = scope(CODE, Quota(bytes_max=0, files_max=len(gone) * 2 + 1_000))
        try:
            with opened(open_folder(self.root, path)) as handle:
                listing = list_tree(handle, everything)
        except WorkspaceError:
            return False
        return not listing.special and all(f"{path}/{name}" in gone for name in listing.paths())

    def _merge(self, target: PathTarget) -> dict[str, Leaf | None]:
        """Merge one path that has changed since; raises `_ConflictError`."""
        now = self._leaf_now(target.path)
        moved_to = next((new for new, old in self.saved.renames.items() if old == target.path), None)
        if moved_to is not None and target.after is None and now and target.before:
            # It was renamed there and edited here: the edit moves to the new name.
            following = self.saved.targets[moved_to]
            if self._leaf_now(moved_to) is not None or following.after is None:
                raise _ConflictError
            both = self._merge_files(target.path, target.before, now, following.after)
            return {target.path: None, moved_to: both}
        if now is None or target.before is None or target.after is None:
            raise _ConflictError
        return {target.path: self._merge_files(target.path, target.before, now, target.after)}

    def _merge_files(self, path: str, base: Leaf, ours: Leaf, theirs: Leaf) -> Leaf:
        mode = theirs.mode if ours.mode == base.mode else ours.mode
        if theirs.mode not in (mode, base.mode):
            raise _ConflictError
        if ours.oid in (base.oid, theirs.oid):
            return Leaf(mode, theirs.oid)
        if theirs.oid == base.oid:
            return self._keep(mode, self._present(path, ours))
        if LINK in (base.mode, ours.mode, theirs.mode):
            raise _ConflictError
        with git.scratch(self.saved.blobs[0].parent, CODE) as scratch:
            data = self._present(path, ours)
            both = git.merge(scratch, data, self.saved.content(base), self.saved.content(theirs))
        if both is None:
            raise _ConflictError
        return self._keep(mode, both)

    def _keep(self, mode: int, data: bytes) -> Leaf:
        leaf = Leaf(mode, blob_id(data))
        self.made[leaf.oid] = data
        return leaf


def _content(folder: int, name: str) -> Generator[bytes, None, bytes]:
    """Yield a regular file's content in pieces; return git's name of it. Raises OSError."""
    with opened(os.open(name, FILE_FLAGS, dir_fd=folder)) as file:
        return (yield from hashed(file, os.fstat(file).st_size))


def _read_through(pieces: Generator[bytes, None, bytes]) -> bytes:
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return bytes(end.value)


class _ConflictError(Exception):
    """Two changes that cannot both be kept."""
