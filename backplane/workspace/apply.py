"""Applies a run's patch to a folder: checks every path first, then writes file by file.

Whole files are compared. A file may be as it was when the run began, or already have its new content; any other has
changed meanwhile, and is refused, or merged on request. No link in the folder is followed.
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
from backplane.workspace.baseline import git_mode
from backplane.workspace.objects import LINK, Leaf, head_of, new_hash, object_id
from backplane.workspace.patch import PathTarget, SavedPatch, failure, load, names
from backplane.workspace.repo import REPO_NAME, Repo
from backplane.workspace.tree import (
    FILE_FLAGS,
    READ_BYTES,
    folders_above,
    look_at,
    opened,
    paths_below,
    printable,
    unguessable,
)
from backplane.workspace.writing import Command, FileWriter, Mark, Writing, mark_of, marked, read_mark

APPLIED_ALREADY: Final = "the patch is applied already"

Targets = Mapping[str, PathTarget]


class Applied(msgspec.Struct, frozen=True):
    """The files that `apply_patch` has changed, or would change if `check` is True."""

    files: tuple[str, ...]
    merged: bool
    """True if a file that had changed meanwhile was merged."""
    root: str = ""
    """The folder to which the patch was applied."""
    went_on: bool = False
    """True if an earlier call that was cut off was continued, with the files of that call."""

    def describe(self, *, is_check: bool) -> str:
        """Return a sentence with the number of files that were changed, or would be if `is_check`, and their folder."""
        if not self.files:
            return "the run changed nothing"
        count = f"{len(self.files)} file{'' if len(self.files) == 1 else 's'}"
        here = os.path.realpath(self.root) == os.path.realpath(".")
        where, merged = "" if here else f" in {self.root}", ", some by a merge" if self.merged else ""
        before = "going on where it was cut off: " if self.went_on else ""
        return f"{before}{'would change' if is_check else 'changed'} {count}{where}{merged}"


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
        saved: another state of the same run, such as a checkpoint; None applies the patch at its end.
        root: the folder to change; None is the original workspace.
        check: only check whether the patch can be applied.
        merge: merge files that have changed since the run began, instead of refusing the patch.
        done: called with the number of files once all are written; not called if `check` is True.

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
    """Continue a call of `apply_patch` that was cut off; return None if there is none. Raises like `apply_patch`."""
    begun = read_mark(mark_of(run_dir))
    if begun is None or begun.command != "apply":
        return None
    with explained(run_dir):
        return put(run_dir, root or Path(begun.root), "apply", dict, check=check, merge=merge)


@contextlib.contextmanager
def explained(run_dir: Path) -> Iterator[None]:
    """Raise a WorkspaceError for an OSError in the block, which says that no file was changed."""
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
        check, merge, done: as in `apply_patch`.

    Raises:
        OSError: nothing was changed.
        WorkspaceError: as in `apply_patch`.
    """
    root = root.resolve(strict=True)
    with marked(run_dir) as mark:
        begun = read_mark(mark.path)
        if begun is not None and (begun.command, begun.root) != (command, str(root)):
            raise failure(begun.describe(run_dir.name), f"first: backplane {begun.command} {run_dir.name[:8]}")
        targets = make() if begun is None else {target.path: target for target in begun.targets}
        if not targets:
            return Applied((), merged=False, root=str(root))
        if begun is not None and not check:
            FileWriter(begun, {}).clean()
        plan = _Plan(str(root), Repo(run_dir / REPO_NAME), targets)
        moved = plan.moved()
        if moved and not merge:
            given_up = "" if begun is None else f", or give up what was cut off: remove '{mark.path}'"
            hint = f"look at them, or merge with --merge{given_up}"
            raise failure(f"changed since the run began: {names(sorted(moved))}", hint)
        changes = plan.changes(moved)
        if not (changes or begun or merge):
            raise failure(APPLIED_ALREADY, "nothing is left to do")
        if check:
            plan.read_all(changes)
        else:
            if changes:
                _write(run_dir.name, mark, plan, Writing(command, str(root), unguessable(), changes), begun)
            done(len(changes if begun is None else targets))
            mark.remove()
        paths = [target.path for target in changes] if begun is None else sorted(targets)
        return Applied(tuple(map(printable, paths)), bool(moved), str(root), begun is not None)


def _write(run: str, mark: Mark, plan: _Plan, planned: Writing, begun: Writing | None) -> None:
    """Write the files of a plan.

    Raises:
        OSError: nothing was changed.
        WorkspaceError: a file has changed meanwhile, or could not be written after others were.
    """
    files = FileWriter(planned, plan.facts)
    try:
        with plan.repo.storing() as objects:
            for leaf, data in plan.made.items():
                objects.blob(leaf, data)
        mark.write(planned)
        files.prepare(plan.repo)
    except BaseException:
        files.clean()
        mark.write(begun) if begun is not None else mark.remove()
        raise
    try:
        files.put()
    except (OSError, WorkspaceError) as error:
        fact = f"{planned.describe(run)}; it failed at "
        about = f"'{printable(str(error.filename))}': {error.strerror}" if isinstance(error, OSError) else error.message
        raise failure(fact + about, "mend that, then go on") from error


class _Plan:
    """Compares the files of a folder with a patch; writes nothing there."""

    def __init__(self, root: str, repo: Repo, targets: Targets) -> None:
        self.repo = repo
        self.facts: dict[str, os.stat_result | None] = {}
        """Path → facts of its file, None without one; the write is refused if they have changed."""
        self.made: dict[Leaf, bytes] = {}
        """Merged contents, which `_write` stores."""
        self._root, self._targets = root, targets
        self._now = {path: self._look(path) for path in targets}
        self._renames: dict[str, str] | None = None

    def _look(self, path: str) -> Leaf | None:
        """Return a path's present leaf without following links; None if there is no file or link."""
        facts, place = look_at(self._root, path), f"{self._root}/{path}"
        is_link = facts is not None and stat.S_ISLNK(facts.st_mode)
        if facts is None or not (is_link or stat.S_ISREG(facts.st_mode)):
            self.facts[path] = None
            return None
        self.facts[path] = facts
        if is_link:
            return Leaf(LINK, object_id(os.fsencode(os.readlink(place)), sha256=self.repo.sha256))
        return Leaf(git_mode(facts), _hash_file(place, sha256=self.repo.sha256))

    def moved(self) -> list[str]:
        """Return the paths whose file has neither its old nor its new content, or whose place is taken."""
        gone = {path for path, target in self._targets.items() if target.after is None}
        return [
            path
            for path, target in self._targets.items()
            if self._now[path] not in (target.before, target.after)
            or (target.after and not target.before and self._now[path] is None and self._is_taken(path, gone))
        ]

    def _is_taken(self, path: str, gone: set[str]) -> bool:
        """Return True if a new file cannot be made at a path: a folder with other files or a device is there, or a file
        that stays is above it."""
        for place in (*folders_above(path), path):
            facts = look_at(self._root, place)
            if facts is None or (not stat.S_ISDIR(facts.st_mode) and place in gone):
                return False
            if not stat.S_ISDIR(facts.st_mode):
                return True
        return any(
            place[len(self._root) + 1 :] not in gone
            for place in paths_below(f"{self._root}/{path}")
            if os.path.islink(place) or not os.path.isdir(place)
        )

    def changes(self, moved: list[str]) -> tuple[PathTarget, ...]:
        """Return the paths to write, with their present content as `before`.

        Args:
            moved: paths to merge, as returned by `moved()`.

        Raises:
            WorkspaceError: some paths cannot be merged.
        """
        results = {path: target.after for path, target in self._targets.items() if path not in moved}
        conflicts: list[str] = []
        for path in moved:
            try:
                results |= self._merge(self._targets[path])
            except _ConflictError:
                conflicts.append(path)
        if conflicts:
            hint = "merge by hand: git apply --reject PATCH; `backplane receipts show RUN` names the patch"
            raise failure(f"conflicts in {names(sorted(conflicts))}; nothing was changed", hint)
        rows = (PathTarget(path, self._now[path], results[path]) for path in sorted(results))
        return tuple(row for row in rows if row.before != row.after)

    def read_all(self, changes: tuple[PathTarget, ...]) -> None:
        """Read every new content, to check that it can be. Raises WorkspaceError if one is damaged."""
        for leaf in {target.after for target in changes if target.after is not None} - self.made.keys():
            collections.deque(self.repo.pieces(leaf.oid), maxlen=0)

    # Merging ----------------------------------------------------------------------------------------------------------

    def _merge(self, target: PathTarget) -> dict[str, Leaf | None]:
        """Return the merged leaf of a path, or two: none for the path, and one for its new name, if it was renamed.

        Raises:
            _ConflictError: the changes exclude each other.
        """
        now, base = self._now[target.path], target.before
        if now is None or base is None:
            raise _ConflictError
        if target.after is not None:
            return {target.path: self._merge_files(target.path, base, now, target.after)}
        moved_to = self._new_name(target.path)
        theirs = self._targets[moved_to].after if moved_to is not None else None
        if moved_to is None or theirs is None or self._now[moved_to] is not None:
            raise _ConflictError
        # The run renamed a file that was edited meanwhile: the edit moves to the new name.
        return {target.path: None, moved_to: self._merge_files(target.path, base, now, theirs)}

    def _new_name(self, path: str) -> str | None:
        """Return the path that a file was renamed to; None if it was removed."""
        if self._renames is None:
            before = {each.path: each.before for each in self._targets.values() if each.before is not None}
            after = {each.path: each.after for each in self._targets.values() if each.after is not None}
            with self.repo.storing() as objects:
                state = objects.state(before, after)
            rows = self.repo.rows(state)
            self._renames = {os.fsdecode(row.old_path): os.fsdecode(row.path) for row in rows if row.old_path}
        return self._renames.get(path)

    def _merge_files(self, path: str, base: Leaf, ours: Leaf, theirs: Leaf) -> Leaf:
        mode = theirs.mode if ours.mode == base.mode else ours.mode
        if theirs.mode not in (mode, base.mode):
            raise _ConflictError
        if ours.oid in (base.oid, theirs.oid):
            return Leaf(mode, theirs.oid)
        both: bytes | None
        if theirs.oid == base.oid:
            both = self._present(path, ours)
        elif LINK in (base.mode, ours.mode, theirs.mode):
            raise _ConflictError
        else:
            both = self.repo.merge(self._present(path, ours), self.repo.read(base.oid), self.repo.read(theirs.oid))
        if both is None:
            raise _ConflictError
        leaf = Leaf(mode, object_id(both, sha256=self.repo.sha256))
        self.made[leaf] = both
        return leaf

    def _present(self, path: str, leaf: Leaf) -> bytes:
        """Return the present content of a path. Raises WorkspaceError if it has changed since it was compared."""
        place = f"{self._root}/{path}"
        if leaf.mode == LINK:
            data = os.fsencode(os.readlink(place))
        else:
            with open(os.open(place, FILE_FLAGS), "rb") as file:
                data = file.read()
        if object_id(data, sha256=self.repo.sha256) != leaf.oid:
            raise failure(f"'{printable(path)}' was changed just now; nothing was applied", "try again")
        return data


def _hash_file(path: str, *, sha256: bool) -> str:
    """Return git's name of a file's content; the file is read in pieces. Raises OSError."""
    with opened(os.open(path, FILE_FLAGS)) as file:
        left = os.fstat(file).st_size
        digest = new_hash(head_of(left), sha256=sha256)
        while left > 0 and (piece := os.read(file, min(left, READ_BYTES))):
            left -= len(piece)
            digest.update(piece)
    return str(digest.hexdigest())


class _ConflictError(Exception):
    """Error for two changes of a file that cannot both be kept."""
