"""Puts a run's patch into a workspace, all of it or nothing.

Whole files are compared, so what would be overwritten is known before anything is touched; a
file that has changed meanwhile is refused, or merged when asked. Nothing here is told by the
patch text, and no link of the workspace is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from backplane.errors import WorkspaceError
from backplane.workspace import git
from backplane.workspace.baseline import git_mode
from backplane.workspace.copying import remove_tree, write_all
from backplane.workspace.pack import LINK, PROGRAM, Leaf, blob_id
from backplane.workspace.patch import CODE, Saved, Target, failure, load, names
from backplane.workspace.tree import (
    Quota,
    list_tree,
    open_folder,
    open_root,
    opened,
    parent,
    printable,
    read_all,
    scope,
)


class Applied(msgspec.Struct, frozen=True):
    """What `apply_patch` has changed, or with `check` would change."""

    files: tuple[str, ...]
    merged: bool
    """Whether a file that had changed meanwhile was merged."""


def apply_patch(run_dir: Path, *, root: Path | None = None, check: bool = False, merge: bool = False) -> Applied:
    """Put a run's patch into the original workspace, or into `root`; all of it or nothing.

    Args:
        check: only find out whether it would work.
        merge: merge files that have changed since the run began, instead of refusing.

    Raises:
        WorkspaceError: `execution_workspace_error`; there is no patch, a file has changed (named),
            a merge has conflicts (named), or a write failed: then everything is as before.
    """
    try:
        saved = load(run_dir)
        if root is None and saved.mode == "pass_through":
            raise failure("the run worked in place, so its changes are there already", "nothing is left to do")
        where = Path(saved.root) if root is None else root.resolve(strict=True)
        with opened(open_root(where)) as handle:
            plan = _Plan(saved, handle)
            steps, merged = plan.make(merge)
            if not check:
                _carry_out(where, handle, plan, steps)
        return Applied(tuple(printable(path) for path in sorted(steps)), merged)
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "unknown error")
        about = printable(str(error.filename or run_dir))
        raise failure(f"the patch cannot be applied: {name} at '{about}'", "nothing was changed") from error


class _Result(msgspec.Struct, frozen=True):
    """What a path shall be: nothing, or a mode with content."""

    mode: int | None
    data: bytes = b""


class _Plan:
    """Finds out what must be written where, and writes nothing."""

    def __init__(self, saved: Saved, root: int) -> None:
        self.saved = saved
        self.root = root
        self.found: dict[str, os.stat_result | None] = {}
        """What was seen of each touched path; it must still be so when it is replaced."""
        self._now: dict[str, tuple[Leaf, bytes] | None] = {}

    def make(self, merge: bool) -> tuple[dict[str, _Result], bool]:
        moved = [path for path, target in self.saved.targets.items() if self._leaf_now(path) != target.before]
        moved += self._blocked()
        if moved and not merge:
            if all(self._leaf_now(path) == target.after for path, target in self.saved.targets.items()):
                raise failure("the patch is applied already", "nothing is left to do")
            fact = f"changed since the run began: {names(sorted(moved))}"
            raise failure(fact, "look at them, or merge with --merge")
        steps: dict[str, _Result] = {}
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
            raise failure(f"conflicts in {names(sorted(conflicts))}; nothing was changed", "merge these by hand")
        return steps, bool(moved)

    def _as_saved(self, target: Target) -> _Result:
        return _Result(None) if target.after is None else _Result(target.after.mode, self.saved.content(target.after))

    def _leaf_now(self, path: str) -> Leaf | None:
        if path not in self._now:
            self._now[path] = self._look(path)
        now = self._now[path]
        return now[0] if now else None

    def _look(self, path: str) -> tuple[Leaf, bytes] | None:
        """A path's present leaf and content, links not followed; None where there is no file or link."""
        self.found[path] = None
        folder, name = parent(path), path[len(parent(path)) :]
        try:
            with opened(open_folder(self.root, folder)) as handle:
                facts = os.stat(name, dir_fd=handle, follow_symlinks=False)
                if stat.S_ISLNK(facts.st_mode):
                    data = os.fsencode(os.readlink(name, dir_fd=handle))
                elif stat.S_ISREG(facts.st_mode):
                    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                    with opened(os.open(name, flags, dir_fd=handle)) as file:
                        data = read_all(file, os.fstat(file).st_size)
                else:
                    return None
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return None
            raise
        self.found[path] = facts
        mode = git_mode(facts)
        return Leaf(mode, blob_id(data)), data

    def _blocked(self) -> list[str]:
        """New paths whose place is taken: by a folder, a device, or a file or link above them."""
        gone = {path for path, target in self.saved.targets.items() if target.after is None}
        return [
            path
            for path, target in self.saved.targets.items()
            if target.after and not target.before and self.found[path] is None and self._in_the_way(path, gone)
        ]

    def _in_the_way(self, path: str, gone: set[str]) -> bool:
        parts = path.split("/")
        for end in range(1, len(parts)):
            above = "/".join(parts[:end])
            kind = self._kind(above)
            if kind is None or (kind != stat.S_IFDIR and above in gone):
                return False
            if kind != stat.S_IFDIR:
                return True
        kind = self._kind(path)
        return kind is not None and not (kind == stat.S_IFDIR and self._holds_only(path, gone))

    def _kind(self, path: str) -> int | None:
        try:
            with opened(open_folder(self.root, parent(path))) as handle:
                return stat.S_IFMT(os.stat(path[len(parent(path)) :], dir_fd=handle, follow_symlinks=False).st_mode)
        except OSError:
            return None

    def _holds_only(self, path: str, gone: set[str]) -> bool:
        """Whether a folder will be empty once these files are gone."""
        everything = scope(CODE, Quota(bytes_max=0, files_max=len(gone) * 2 + 1_000))
        try:
            with opened(open_folder(self.root, path)) as handle:
                listing = list_tree(handle, everything)
        except WorkspaceError:
            return False
        return not listing.special and all(f"{path}/{name}" in gone for name, _ in listing)

    def _merge(self, target: Target) -> dict[str, _Result]:
        """Merge one path that has changed here since; raises `_ConflictError`."""
        self._leaf_now(target.path)
        now = self._now[target.path]
        moved_to = next((new for new, old in self.saved.renames.items() if old == target.path), None)
        if (now[0] if now else None) == target.after:
            return {}
        if moved_to is not None and target.after is None and now and target.before:
            # Renamed there, edited here: the edit goes along to the new name.
            following = self.saved.targets[moved_to]
            if self._leaf_now(moved_to) is not None or following.after is None:
                raise _ConflictError
            both = self._merge_files(target.before, now, following.after)
            return {target.path: _Result(None), moved_to: both}
        if now is None or target.before is None or target.after is None:
            raise _ConflictError
        return {target.path: self._merge_files(target.before, now, target.after)}

    def _merge_files(self, base: Leaf, now: tuple[Leaf, bytes], theirs: Leaf) -> _Result:
        ours, data = now
        mode = theirs.mode if ours.mode == base.mode else ours.mode
        if theirs.mode not in (mode, base.mode):
            raise _ConflictError
        if ours.oid in (base.oid, theirs.oid):
            return _Result(mode, self.saved.content(theirs))
        if theirs.oid == base.oid:
            return _Result(mode, data)
        if LINK in (base.mode, ours.mode, theirs.mode):
            raise _ConflictError
        with git.scratch(self.saved.blobs.parent, CODE) as scratch:
            both = git.merge(scratch, data, self.saved.content(base), self.saved.content(theirs))
        if both is None:
            raise _ConflictError
        return _Result(mode, both)


class _ConflictError(Exception):
    """Two changes that cannot both be kept."""


def _carry_out(where: Path, root: int, plan: _Plan, steps: Mapping[str, _Result]) -> None:
    """Write every new file into a folder of ours, then move old ones out and new ones in; a failure moves all back.

    Raises:
        OSError, WorkspaceError: after everything was put back.
    """
    if not steps:
        return
    name = f".backplane-{secrets.token_hex(8)}"
    os.mkdir(name, 0o700, dir_fd=root)
    try:
        with opened(open_folder(root, name)) as depot:
            _Exchange(root, depot, plan.found).carry_out(steps)
    finally:
        # What is in it is needed by nobody: either the replaced files, or the new ones that were not used.
        with contextlib.suppress(WorkspaceError):
            remove_tree(where / name)


class _Exchange:
    """Moves files between the workspace and a depot beside it, and knows the way back."""

    def __init__(self, root: int, depot: int, seen: Mapping[str, os.stat_result | None]) -> None:
        self._root = root
        self._depot = depot
        self._seen = seen
        self._undo: list[Callable[[], None]] = []
        self._count = 0

    def carry_out(self, steps: Mapping[str, _Result]) -> None:
        fresh = {path: self._write(path, result) for path, result in steps.items() if result.mode is not None}
        try:
            for path in sorted(steps.keys() - fresh.keys(), reverse=True):
                if self._seen.get(path) is not None:
                    self._take_out(path)
                    self._drop_empty(parent(path))
            for path, made in sorted(fresh.items()):
                self._put_in(path, made)
        except BaseException:
            # An interrupt must not leave half of a patch either.
            for back in reversed(self._undo):
                with contextlib.suppress(OSError):
                    back()
            raise

    def _next_name(self) -> str:
        self._count += 1
        return str(self._count)

    def _write(self, path: str, result: _Result) -> str:
        """Write a new file into the depot, with the rights and the owner of the one it replaces."""
        name = self._next_name()
        old = self._seen.get(path)
        if result.mode == LINK:
            os.symlink(os.fsdecode(result.data), name, dir_fd=self._depot)
            return name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        rights = 0o777 if result.mode == PROGRAM else 0o666
        with opened(os.open(name, flags, rights, dir_fd=self._depot)) as file:
            write_all(file, result.data)
            if old is not None and stat.S_ISREG(old.st_mode):
                with contextlib.suppress(PermissionError):
                    os.fchown(file, old.st_uid, old.st_gid)
                os.fchmod(file, _rights(old.st_mode & 0o777, result.mode == PROGRAM))
        return name

    def _take_out(self, path: str) -> None:
        """Move what is at a path into the depot, if it is still what the plan saw."""
        folder, name = _split(path)
        aside = self._next_name()
        with opened(open_folder(self._root, folder)) as handle:
            seen, facts = self._seen.get(path), os.stat(name, dir_fd=handle, follow_symlinks=False)
            if seen is not None and _facts(seen) != _facts(facts):
                raise failure(f"'{printable(path)}' was changed just now; nothing was applied", "try again")
            os.rename(name, aside, src_dir_fd=handle, dst_dir_fd=self._depot)
        self._undo.append(lambda: self._bring_back(path, aside))

    def _bring_back(self, path: str, aside: str) -> None:
        folder, name = _split(path)
        with opened(open_folder(self._root, folder)) as handle:
            os.rename(aside, name, src_dir_fd=self._depot, dst_dir_fd=handle)

    def _drop_empty(self, path: str) -> None:
        """Remove folders that the last deletion has left empty, as git does."""
        while path:
            folder, name = _split(path[:-1])
            with opened(open_folder(self._root, folder)) as handle:
                mode = os.stat(name, dir_fd=handle, follow_symlinks=False).st_mode & 0o777
                try:
                    os.rmdir(name, dir_fd=handle)
                except OSError as error:
                    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                        return
                    raise
            self._undo.append(_later(self._make_folder, path, mode))
            path = folder

    def _make_folder(self, path: str, mode: int) -> None:
        folder, name = _split(path[:-1])
        with opened(open_folder(self._root, folder)) as handle:
            os.mkdir(name, 0o700, dir_fd=handle)
            os.chmod(name, mode, dir_fd=handle)

    def _remove_folder(self, path: str) -> None:
        folder, name = _split(path[:-1])
        with opened(open_folder(self._root, folder)) as handle:
            os.rmdir(name, dir_fd=handle)

    def _put_in(self, path: str, made: str) -> None:
        """Move a new file from the depot to its place, whose old file goes to the depot first."""
        folder, name = _split(path)
        self._make_parents(folder)
        with opened(open_folder(self._root, folder)) as handle:
            try:
                os.stat(name, dir_fd=handle, follow_symlinks=False)
            except FileNotFoundError:
                pass
            else:
                self._take_out(path)
            self._undo.append(_later(self._unlink, path))
            try:
                # A link, because a rename would overwrite what somebody has put there this instant.
                os.link(made, name, src_dir_fd=self._depot, dst_dir_fd=handle, follow_symlinks=False)
            except FileExistsError:
                self._undo.pop()
                raise
            except OSError:
                os.rename(made, name, src_dir_fd=self._depot, dst_dir_fd=handle)

    def _unlink(self, path: str) -> None:
        folder, name = _split(path)
        with opened(open_folder(self._root, folder)) as handle:
            os.unlink(name, dir_fd=handle)

    def _make_parents(self, folder: str) -> None:
        for end in [place + 1 for place, letter in enumerate(folder) if letter == "/"]:
            above, name = _split(folder[: end - 1])
            with opened(open_folder(self._root, above)) as handle:
                try:
                    os.mkdir(name, dir_fd=handle)
                except FileExistsError:
                    continue
            self._undo.append(_later(self._remove_folder, folder[:end]))


def _later(action: Callable[..., None], *arguments: object) -> Callable[[], None]:
    return lambda: action(*arguments)


def _split(path: str) -> tuple[str, str]:
    folder = parent(path)
    return folder, path[len(folder) :]


def _rights(old: int, program: bool) -> int:
    """Keep a file's rights but for the right to run it, which follows the patch."""
    if bool(old & 0o100) == program:
        return old
    return old | (old & 0o444) >> 2 if program else old & ~0o111


def _facts(facts: os.stat_result) -> tuple[int, int, int, int, int]:
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_mode
