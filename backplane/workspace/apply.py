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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from backplane.errors import WorkspaceError
from backplane.workspace import writing
from backplane.workspace.baseline import git_mode
from backplane.workspace.objects import LINK, Leaf, head_of, new_hash, object_id
from backplane.workspace.patch import PathTarget, SavedPatch, failure, load, names
from backplane.workspace.repo import CODE, REPO_NAME, Repo
from backplane.workspace.tree import (
    FILE_FLAGS,
    READ_BYTES,
    Quota,
    list_tree,
    look_at,
    opened,
    printable,
    scope,
)
from backplane.workspace.writing import Command, Mark, Writing, folders_above

APPLIED_ALREADY: Final = "the patch is applied already"

Targets = Mapping[str, PathTarget]


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
        targets = saved.targets
        return put(run_dir, root or Path(saved.root), "apply", lambda: targets, check=check, merge=merge, done=done)


def go_on(run_dir: Path, root: Path | None = None, *, check: bool = False, merge: bool = False) -> Applied | None:
    """Continue an application that was cut off; return None if there is none. Raises as `apply_patch`."""
    begun = writing.read_mark(run_dir)
    if begun is None or begun.command != "apply":
        return None
    with explained(run_dir):
        return put(run_dir, root or Path(begun.root), "apply", dict, check=check, merge=merge)


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
    make: Callable[[], Targets],
    *,
    check: bool = False,
    merge: bool = False,
    done: Callable[[int], None] = lambda files: None,
) -> Applied:
    """Write the files of a patch or a checkpoint, or continue the write that was cut off.

    Args:
        command: the command that can continue this write.
        make: returns the files; not called if a write is continued.

    Raises:
        OSError: nothing was changed.
        WorkspaceError: as `apply_patch`.
    """
    root = root.resolve(strict=True)
    with writing.marked(run_dir) as mark:
        begun = mark.read()
        if begun is not None and (begun.command, begun.root) != (command, str(root)):
            raise failure(begun.describe(run_dir.name), f"first: backplane {begun.command} {run_dir.name[:8]}")
        targets = make() if begun is None else {target.path: target for target in begun.targets}
        if not targets:
            return Applied((), merged=False, root=str(root))
        repo = Repo(run_dir / REPO_NAME)
        if begun is not None and not check:
            writing.remove_temporary(str(root), begun)
        plan = _Plan(targets, str(root), repo, mark.path if begun is not None else None)
        plan.make(merge)
        if check:
            plan.read_all()
            return plan.applied()
        if plan.targets:
            _write(run_dir.name, mark, plan, writing.plan(command, root, plan.targets), begun)
        done(len(plan.applied().files))
        mark.remove()
        return plan.applied()


def _write(run: str, mark: Mark, plan: _Plan, planned: Writing, begun: Writing | None) -> None:
    """Write the files of a plan.

    Raises:
        OSError: nothing was changed.
        WorkspaceError: a file has changed meanwhile, or could not be written after others were.
    """
    try:
        with plan.repo.storing() as objects:
            for leaf, data in plan.made.items():
                objects.blob(leaf, data)
        mark.write(planned)
        places = writing.write_temporary(plan.root, planned, plan.repo, plan.found)
    except BaseException:
        writing.remove_temporary(plan.root, planned)
        mark.write(begun) if begun is not None else mark.remove()
        raise
    try:
        writing.put_in_place(plan.root, planned, plan.found, places)
    except (OSError, WorkspaceError) as error:
        fact = f"{planned.describe(run)}; it failed at "
        about = f"'{printable(str(error.filename))}': {error.strerror}" if isinstance(error, OSError) else error.message
        raise failure(fact + about, "mend that, then go on") from error


class _Plan:
    """Finds out which files must be written; writes nothing.

    Args:
        mark: the mark of the write that is continued; None for a new one.
    """

    def __init__(self, all_targets: Targets, root: str, repo: Repo, mark: Path | None) -> None:
        self.root, self.repo = root, repo
        self.found: dict[str, os.stat_result | None] = {}
        """The facts of each path; a file that has others when it is replaced is refused."""
        self.targets: list[PathTarget] = []
        """Paths that do not have their new content, with their present one as `before`."""
        self.made: dict[Leaf, bytes] = {}
        """Merged contents, which are not stored yet."""
        self._all, self._mark, self._merged = all_targets, mark, False
        self._now: dict[str, Leaf | None] = {}

    def applied(self) -> Applied:
        paths = self._all if self._mark is not None else [target.path for target in self.targets]
        return Applied(tuple(map(printable, sorted(paths))), self._merged, self.root, self._mark is not None)

    def read_all(self) -> None:
        """Read every new content. Raises WorkspaceError if one is not as it was kept."""
        for leaf in {target.after for target in self.targets if target.after is not None} - self.made.keys():
            collections.deque(self.repo.pieces(leaf.oid), maxlen=0)

    def make(self, merge: bool) -> None:
        """Compare every path. Raises WorkspaceError: files have changed, or conflict."""
        targets = self._all
        moved = [path for path, target in targets.items() if self._leaf_now(path) not in (target.before, target.after)]
        moved += self._blocked()
        if moved and not merge:
            given_up = "" if self._mark is None else f", or give up what was cut off: remove '{self._mark}'"
            hint = f"look at them, or merge with --merge{given_up}"
            raise failure(f"changed since the run began: {names(sorted(moved))}", hint)
        results: dict[str, Leaf | None] = {path: target.after for path, target in targets.items() if path not in moved}
        if moved:
            results |= _Merge(self, targets, self._now).results(moved)
            self._merged = True
        changed = sorted(path for path, leaf in results.items() if leaf != self._leaf_now(path))
        self.targets = [PathTarget(path, self._now[path], results[path]) for path in changed]
        if targets and not (self.targets or self._mark or merge):
            raise failure(APPLIED_ALREADY, "nothing is left to do")

    def _leaf_now(self, path: str) -> Leaf | None:
        """Return a path's present leaf without following links; None if there is no file or link."""
        if path not in self._now:
            facts = look_at(self.root, path)
            is_file = facts is not None and stat.S_ISREG(facts.st_mode)
            is_known = facts is not None and (is_file or stat.S_ISLNK(facts.st_mode))
            self.found[path] = facts if is_known else None
            place = f"{self.root}/{path}"
            if facts is None or not is_known:
                self._now[path] = None
            elif is_file:
                self._now[path] = Leaf(git_mode(facts), _hash_file(place, sha256=self.repo.sha256))
            else:
                self._now[path] = Leaf(LINK, object_id(os.fsencode(os.readlink(place)), sha256=self.repo.sha256))
        return self._now[path]

    def _blocked(self) -> list[str]:
        """Return new paths whose place is taken: by a folder, a device, or a file or link above them."""
        gone = {path for path, target in self._all.items() if target.after is None}
        return [
            path
            for path, target in self._all.items()
            if target.after and not target.before and self.found[path] is None and self._in_the_way(path, gone)
        ]

    def _in_the_way(self, path: str, gone: set[str]) -> bool:
        for place in (*folders_above([path]), path):
            facts = look_at(self.root, place)
            if facts is None or (not stat.S_ISDIR(facts.st_mode) and place in gone):
                return False
            if not stat.S_ISDIR(facts.st_mode):
                return True
        return not self._has_only(path, gone)

    def _has_only(self, path: str, gone: set[str]) -> bool:
        """Return True if a folder will be empty once these files are removed."""
        everything = scope(CODE, Quota(bytes_max=0, files_max=len(gone) * 2 + 1_000))
        try:
            listing = list_tree(f"{self.root}/{path}", everything)
        except WorkspaceError:
            return False
        return not listing.special and all(f"{path}/{name}" in gone for name, _ in listing.files)


class _Merge:
    """Merges files that have changed since the run began with what the run made of them."""

    def __init__(self, plan: _Plan, targets: Targets, now: Mapping[str, Leaf | None]) -> None:
        self._plan, self._targets, self._now = plan, targets, now
        self._renames: dict[str, str] | None = None

    def results(self, moved: list[str]) -> dict[str, Leaf | None]:
        """Return the new leaf of each path. Raises WorkspaceError: there are conflicts."""
        results: dict[str, Leaf | None] = {}
        conflicts: list[str] = []
        for path in moved:
            try:
                results |= self._merge(self._targets[path])
            except _ConflictError:
                conflicts.append(path)
        if conflicts:
            hint = "merge by hand: git apply --reject PATCH; `backplane receipts show RUN` names the patch"
            raise failure(f"conflicts in {names(sorted(conflicts))}; nothing was changed", hint)
        return results

    def _merge(self, target: PathTarget) -> dict[str, Leaf | None]:
        """Merge one path that has changed since; raises `_ConflictError`."""
        now, moved_to = self._now[target.path], None
        if target.after is None and target.before is not None and now is not None:
            moved_to = self._new_name(target.path)
        if moved_to is not None and now and target.before:
            # It was renamed there and edited here: the edit moves to the new name.
            following = self._targets[moved_to]
            if self._now[moved_to] is not None or following.after is None:
                raise _ConflictError
            both = self._merge_files(target.path, target.before, now, following.after)
            return {target.path: None, moved_to: both}
        if now is None or target.before is None or target.after is None:
            raise _ConflictError
        return {target.path: self._merge_files(target.path, target.before, now, target.after)}

    def _new_name(self, path: str) -> str | None:
        """Return the path that a file was renamed to; None if it was removed."""
        if self._renames is None:
            before = {each.path: each.before for each in self._targets.values() if each.before is not None}
            after = {each.path: each.after for each in self._targets.values() if each.after is not None}
            with self._plan.repo.storing() as objects:
                state = objects.state(before, after)
            rows = self._plan.repo.rows(state)
            self._renames = {os.fsdecode(row.old_path): os.fsdecode(row.path) for row in rows if row.old_path}
        return self._renames.get(path)

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
        repo = self._plan.repo
        both = repo.merge(self._present(path, ours), repo.read(base.oid), repo.read(theirs.oid))
        if both is None:
            raise _ConflictError
        return self._keep(mode, both)

    def _present(self, path: str, leaf: Leaf) -> bytes:
        """Return the content that was seen at a path. Raises WorkspaceError if it has changed meanwhile."""
        place = f"{self._plan.root}/{path}"
        if leaf.mode == LINK:
            data = os.fsencode(os.readlink(place))
        else:
            with open(os.open(place, FILE_FLAGS), "rb") as file:
                data = file.read()
        if object_id(data, sha256=self._plan.repo.sha256) != leaf.oid:
            raise failure(f"'{printable(path)}' was changed just now; nothing was applied", "try again")
        return data

    def _keep(self, mode: int, data: bytes) -> Leaf:
        leaf = Leaf(mode, object_id(data, sha256=self._plan.repo.sha256))
        self._plan.made[leaf] = data
        return leaf


def _hash_file(path: str, *, sha256: bool) -> str:
    """Return the git object id of a file's content; the file is read in pieces. Raises OSError."""
    with opened(os.open(path, FILE_FLAGS)) as file:
        left = os.fstat(file).st_size
        digest = new_hash(head_of(left), sha256=sha256)
        while left > 0 and (piece := os.read(file, min(left, READ_BYTES))):
            left -= len(piece)
            digest.update(piece)
    return str(digest.hexdigest())


class _ConflictError(Exception):
    """Two changes that cannot both be kept."""
