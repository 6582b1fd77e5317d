"""Puts a run's patch into a workspace, all of it or nothing.

Whole files are compared, so what would be overwritten is known before anything is touched; a
file that has changed meanwhile is refused, or merged when asked. Nothing here is told by the
patch text, and no link of the workspace is followed.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import os
import stat
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Final

import msgspec

from backplane.errors import WorkspaceError
from backplane.workspace import git
from backplane.workspace.baseline import git_mode
from backplane.workspace.moves import PathState, folders_above
from backplane.workspace.pack import LINK, Leaf, blob_id
from backplane.workspace.patch import CODE, PATCH_NAME, PathTarget, SavedPatch, failure, hashed, load, names
from backplane.workspace.transaction import exchange, marks_of, settle
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

APPLIED_ALREADY: Final = "the patch is applied already"


class Applied(msgspec.Struct, frozen=True):
    """What `apply_patch` has changed, or with `check` would change."""

    files: tuple[str, ...]
    merged: bool
    """A file that had changed meanwhile was merged."""
    root: str = ""
    """The folder; empty if there was nothing to apply."""

    def describe(self, *, is_check: bool) -> str:
        """Return a sentence that says how many files were changed, or would be, and where."""
        if not self.files:
            return "the run changed nothing"
        count = f"{len(self.files)} file{'' if len(self.files) == 1 else 's'}"
        merged, here = ", some by a merge" if self.merged else "", os.path.realpath(self.root) == os.path.realpath(".")
        return f"{'would change' if is_check else 'changed'} {count}{'' if here else f' in {self.root}'}{merged}"


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
    """Put a run's patch into the original workspace, or into `root`; all of it or nothing.

    Nothing of it stays either where this process is killed: see `settle`.

    Args:
        record_sha256: as the receipt has it under `patch`; None where it does not say.
        saved: another state of the same run, a checkpoint; None is the patch at its end.
        check: only find out whether it would work.
        merge: merge files that have changed since the run began, instead of refusing.
        done: called with the number of files once all are in place, before the old ones are thrown away.

    Raises:
        WorkspaceError: `execution_workspace_error`; there is no patch, a file has changed (named),
            a merge has conflicts (named), or a write failed: then everything is as before.
    """
    with applying(run_dir, is_end=saved is None):
        saved = saved if saved is not None else load(run_dir, record_sha256)
        if root is None and saved.mode == "pass_through":
            raise failure("the run worked in place, so its changes are there already", "nothing is left to do")
        where = Path(saved.root) if root is None else root.resolve(strict=True)
        return put(saved, run_dir, where, check=check, merge=merge, done=done)


@contextlib.contextmanager
def applying(run_dir: Path, *, is_end: bool = True) -> Iterator[None]:
    """Settle what was cut off of a run's patch before the block; say what the system refuses in it.

    Args:
        is_end: it is the patch at the run's end, which lies there as a file.
    """
    try:
        settle(marks_of(run_dir))
        yield
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "unknown error")
        about = printable(os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(run_dir))
        hint = "nothing was changed"
        if error.errno == errno.EXDEV:
            hint += "; another file system is mounted there, where files cannot be exchanged"
            hint += f": use 'git apply' with '{printable(str(run_dir / PATCH_NAME))}'" if is_end else ""
        raise failure(f"the patch cannot be applied: {name} at '{about}'", hint) from error


def put(
    saved: SavedPatch,
    run_dir: Path,
    root: Path,
    *,
    check: bool = False,
    merge: bool = False,
    done: Callable[[int], None] = lambda files: None,
) -> Applied:
    """Bring the files of a patch, or of a checkpoint, from what they were to what they shall be.

    Args:
        run_dir: the run's folder; what is under way is noted beside it.

    Raises:
        OSError, WorkspaceError: as `apply_patch`.
    """
    with opened(open_root(root)) as handle:
        plan = _Plan(saved, handle)
        steps, merged = plan.make(merge)
        if check:
            for result in steps.values():
                collections.deque(result.pieces(), maxlen=0)
        elif steps:
            with exchange(run_dir, root, handle, plan.found, steps):
                done(len(steps))
    return Applied(tuple(printable(path) for path in sorted(steps)), merged, str(root))


class _Plan:
    """Finds out what must be written where, and writes nothing."""

    def __init__(self, saved: SavedPatch, root: int) -> None:
        self.saved = saved
        self.root = root
        self.found: dict[str, os.stat_result | None] = {}
        """What was seen of each touched path; it must still be so when it is replaced."""
        self._now: dict[str, Leaf | None] = {}

    def make(self, merge: bool) -> tuple[dict[str, PathState], bool]:
        moved = [path for path, target in self.saved.targets.items() if self._leaf_now(path) != target.before]
        moved += self._blocked()
        if moved and not merge:
            if all(self._leaf_now(path) == target.after for path, target in self.saved.targets.items()):
                raise failure(APPLIED_ALREADY, "nothing is left to do")
            fact = f"changed since the run began: {names(sorted(moved))}"
            raise failure(fact, "look at them, or merge with --merge")
        steps: dict[str, PathState] = {}
        conflicts: list[str] = []
        for path, target in self.saved.targets.items():
            if path not in moved:
                steps.setdefault(path, self._as_saved(target))
        for path in moved:
            try:
                steps |= self._merge(self.saved.targets[path])
            except _ConflictError:
                conflicts.append(path)
        if conflicts:
            hint = "merge by hand: git apply --reject PATCH; `backplane receipts show RUN` names the patch"
            raise failure(f"conflicts in {names(sorted(conflicts))}; nothing was changed", hint)
        return steps, bool(moved)

    def _as_saved(self, target: PathTarget) -> PathState:
        return PathState(None) if target.after is None else self._saved(target.after.mode, target.after)

    def _saved(self, mode: int, leaf: Leaf) -> PathState:
        return PathState(mode, functools.partial(self.saved.pieces, leaf))

    def _leaf_now(self, path: str) -> Leaf | None:
        if path not in self._now:
            self._now[path] = self._look(path)
        return self._now[path]

    def _look(self, path: str) -> Leaf | None:
        """A path's present leaf, links not followed; None where there is no file or link."""
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

    def _present(self, path: str, leaf: Leaf) -> Iterator[bytes]:
        """The content of what was seen at a path; raises WorkspaceError when it has changed meanwhile."""
        with opened(open_folder(self.root, parent(path))) as handle:
            name = path[len(parent(path)) :]
            if leaf.mode == LINK:
                data = os.fsencode(os.readlink(name, dir_fd=handle))
                oid = blob_id(data)
                yield data
            else:
                oid = yield from _content(handle, name)
        if oid != leaf.oid:
            raise failure(f"'{printable(path)}' was changed just now; nothing was applied", "try again")

    def _blocked(self) -> list[str]:
        """New paths whose place is taken: by a folder, a device, or a file or link above them."""
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
        return not self._holds_only(path, gone)

    def _holds_only(self, path: str, gone: set[str]) -> bool:
        """Whether a folder will be empty once these files are gone."""
        everything = scope(CODE, Quota(bytes_max=0, files_max=len(gone) * 2 + 1_000))
        try:
            with opened(open_folder(self.root, path)) as handle:
                listing = list_tree(handle, everything)
        except WorkspaceError:
            return False
        return not listing.special and all(f"{path}/{name}" in gone for name in listing.paths())

    def _merge(self, target: PathTarget) -> dict[str, PathState]:
        """Merge one path that has changed here since; raises `_ConflictError`."""
        self._leaf_now(target.path)
        now = self._now[target.path]
        moved_to = next((new for new, old in self.saved.renames.items() if old == target.path), None)
        if now == target.after:
            return {}
        if moved_to is not None and target.after is None and now and target.before:
            # Renamed there, edited here: the edit goes along to the new name.
            following = self.saved.targets[moved_to]
            if self._leaf_now(moved_to) is not None or following.after is None:
                raise _ConflictError
            both = self._merge_files(target.path, target.before, now, following.after)
            return {target.path: PathState(None), moved_to: both}
        if now is None or target.before is None or target.after is None:
            raise _ConflictError
        return {target.path: self._merge_files(target.path, target.before, now, target.after)}

    def _merge_files(self, path: str, base: Leaf, ours: Leaf, theirs: Leaf) -> PathState:
        mode = theirs.mode if ours.mode == base.mode else ours.mode
        if theirs.mode not in (mode, base.mode):
            raise _ConflictError
        if ours.oid in (base.oid, theirs.oid):
            return self._saved(mode, theirs)
        if theirs.oid == base.oid:
            return PathState(mode, functools.partial(self._present, path, ours))
        if LINK in (base.mode, ours.mode, theirs.mode):
            raise _ConflictError
        with git.scratch(self.saved.blobs[0].parent, CODE) as scratch:
            data = b"".join(self._present(path, ours))
            both = git.merge(scratch, data, self.saved.content(base), self.saved.content(theirs))
        if both is None:
            raise _ConflictError
        return PathState(mode, lambda: (both,))


def _content(folder: int, name: str) -> Generator[bytes, None, bytes]:
    """A regular file's content, a piece at a time; returns git's name of it. Raises OSError."""
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
