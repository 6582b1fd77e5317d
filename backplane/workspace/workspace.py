"""The place an agent works in: staged as a copy, or the original itself, and what it changed there.

A folder goes in, a workspace comes out, and at the end the difference as a git patch in the run's
own folder. The original's `.git` is never written, and nothing in either tree is ever run. Putting
a patch into the original is in `patch`.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from backplane.contract.work import Mode
from backplane.errors import WorkspaceError
from backplane.policy.globs import Globs, compile_globs
from backplane.workspace import git, history, patch, repository
from backplane.workspace.baseline import BLOB_BYTES_MAX, Baseline, Changes, Take, find_changes, read_rules
from backplane.workspace.pack import Leaf
from backplane.workspace.patch import Change
from backplane.workspace.stage import Stage, over_quota
from backplane.workspace.tree import (
    Listing,
    Quota,
    Scope,
    identity,
    list_tree,
    names_below,
    open_known,
    open_root,
    opened,
    printable,
    read_file,
    read_link,
    remove_tree,
    scope,
)

_STAGING: Final = "workspace_staging_failed"
_RESULT: Final = "execution_workspace_error"


class Patch(msgspec.Struct, frozen=True):
    """The difference that a run made."""

    path: Path
    """The file with the whole patch; empty when nothing changed."""
    bytes: int
    sha256: str
    changes: tuple[Change, ...]
    status: str
    """One line a change, as `git status --porcelain` writes them when everything is added."""
    ignored_count: int
    """Changed files that `.gitignore` leaves out."""
    left_out: tuple[str, ...] = ()
    """Changed, but not in the patch: over 64 MiB, outside of the order's selection, or no regular file."""
    record_sha256: str = ""
    """Of what lies beside it for `apply_patch`."""

    @property
    def paths(self) -> set[str]:
        """Every file that it changes, by its old and its new name."""
        return {path for change in self.changes for path in (change.path, change.old_path) if path is not None}


NO_NAMES: Final[frozenset[str]] = frozenset()
"""One for all: an empty one of each run's own is a fifth of a kilobyte."""


class Workspace:
    """A workspace that is open. `difference` once, when nothing writes in it any more; then `close`."""

    def __init__(
        self,
        original: Path,
        mode: Mode,
        run_dir: Path,
        stage_dir: Path,
        tree: Path,
        scope: Scope,
        unread: Globs | None,
        *,
        travels: bool,
    ) -> None:
        self.original = original
        self.mode = mode
        self.root = tree if mode == "staged" else original
        self.special_count = 0
        """FIFOs, sockets and devices that were skipped."""
        self.no_history = ""
        """Why the copy lacks the history that the original has; "" if it lacks none."""
        self.object_folders: tuple[str, ...] = ()
        """Folders outside of the root in which its repository finds objects."""
        self._travels = travels
        self._run_dir = run_dir
        self._stage_dir = stage_dir
        self._scope = scope
        self._unread = unread
        self._special = NO_NAMES
        self._identity = (0, 0)
        self._repository = repository.NONE
        self._baseline = Baseline(stage_dir / "base.pack")

    def difference(self) -> Patch:
        """Write what has changed to `patch.diff` in the run's folder, with what `apply_patch` needs beside it.

        Raises:
            WorkspaceError: `execution_workspace_error`, the tree cannot be read or git fails.
        """
        with self._compared() as (scope, scratch, root), patch.Draft(self._run_dir, scratch) as draft:
            return self._write(draft, self._find(scope, scratch, root, draft.take))

    @contextmanager
    def _compared(self) -> Iterator[tuple[Scope, git.Scratch, int]]:
        """How, with what and where the tree is looked at once more."""
        staged = self.mode == "staged"
        # What `include` did not name was not copied, but the agent may have made it anew.
        include = None if staged else self._scope.include
        scope = msgspec.structs.replace(self._scope, code=_RESULT, include=include, mend=staged)
        try:
            with git.scratch(self._stage_dir, _RESULT, scope.stopped) as scratch, opened(self._open_again()) as root:
                yield scope, scratch, root
        except OSError as error:
            raise scope.cannot("compare", _about(error, self.root), error) from error

    @property
    def start(self) -> dict[str, Leaf]:
        """Every file and link at the start that the patch would cover."""
        return {path: known.leaf for path, known in self._baseline.known.items() if known.leaf is not None}

    def changes(self, take: Take) -> Changes:
        """What differs from the start now, while the agent may be at work.

        Args:
            take: told of every content, before and after.

        Raises:
            WorkspaceError: as `difference`.
        """
        with self._compared() as (scope, scratch, root):
            return self._find(scope, scratch, root, take)

    def _find(self, scope: Scope, scratch: git.Scratch, root: int, take: Take) -> Changes:
        looked_ns = time.time_ns()
        listing = list_tree(root, scope)
        obeyed = read_rules(root, listing, scope)

        def ask_ignored(paths: list[str]) -> Collection[str]:
            return self._repository.ignored(scratch, paths, obeyed)

        self._leave_out(listing)
        changes = find_changes(self._baseline, root, listing, scope, ask_ignored, take, looked_ns)
        if self.mode == "staged":
            changes.left_out += listing.unselected
        changes.left_out += [path for path in listing.special if path not in self._special]
        return changes

    def _leave_out(self, listing: Listing) -> None:
        """Take new files out of the listing that would meet something of the original that was not staged."""
        if self.mode != "staged" or (self._scope.include is None and not self._special):
            return
        for folder in listing.folders:
            hidden = [entry for entry in folder.entries if self._is_hidden(folder.path + entry[0])]
            listing.unselected += [folder.path + name for name, _ in hidden]
            folder.entries = [entry for entry in folder.entries if entry not in hidden]

    def _is_hidden(self, path: str) -> bool:
        if path in self._baseline.known:
            return False
        missed = self._scope.include is not None and self._scope.include.matches(path) is None
        return (missed or path in self._special) and os.path.lexists(self.original / path)

    def _write(self, draft: patch.Draft, changes: Changes) -> Patch:
        rows = draft.finish(self.original, self.mode, changes.before, changes.after)
        return Patch(
            path=draft.path,
            bytes=draft.bytes,
            sha256=draft.sha256,
            changes=tuple(map(patch.change, rows)),
            status="".join(map(patch.status_line, rows)),
            ignored_count=changes.ignored_count,
            left_out=tuple(sorted(map(printable, changes.left_out))),
            record_sha256=draft.record_sha256,
        )

    def drop_ignored(self) -> int:
        """Remove what git's rules ignore from the copy, as it is not to travel; how many files that were. Blocking.

        Raises:
            WorkspaceError: `workspace_staging_failed`, one cannot be removed.
        """
        assert self.mode == "staged", "an original is not written to"
        dropped = [path for path, known in self._baseline.known.items() if not known.tracked]
        for path in dropped:
            try:
                (self.root / path).unlink()
            except OSError as error:
                raise self._scope.cannot("leave out", path, error) from error
        return len(dropped)

    def close(self) -> None:
        """Remove everything temporary; the run's folder stays. Raises WorkspaceError `execution_workspace_error`."""
        self._baseline.close()
        collect(self._stage_dir)

    def prepare(self) -> None:
        """Copy the original, or only take its baseline. Called once, by `open_workspace`."""
        with opened(open_root(self.original)) as source:
            listing = list_tree(source, self._scope)
            self._special = frozenset(listing.special) or NO_NAMES
            self.special_count = len(listing.special)
            _check_bytes(listing, self._scope)
            self._repository = repository.find(self.original).beside(git.user_rules(os.environ))
            with git.scratch(self._stage_dir, _STAGING, self._scope.stopped) as scratch:
                ignored = self._find_ignored(scratch, source, listing)
                found = self._find_history(scratch) if self.mode == "staged" else ""
            if self.mode == "staged":
                Stage(self.root, self._scope, self._baseline, ignored, self._unread, found).fill(
                    source, listing, self._repository.carried
                )
            else:
                self._read_in_place(source, listing, ignored)
        self._identity = identity(self.root)
        self._baseline.seal()

    def _find_history(self, scratch: git.Scratch) -> history.History | str:
        """Read the history for the copy; or return why it gets none, "" if the original has none."""
        known, rules = self._repository, (self._scope.exclude, self._unread)
        if known.git_dir is None:
            return ""
        try:
            if self._travels:
                raise history.Unshared("it stays on the machine that the copy is sent from")
            selection = history.Selection(tuple(globs for globs in rules if globs), self._scope.include)
            found = history.read(known, scratch, selection)
        except history.Unshared as error:
            self.no_history = str(error)
            return self.no_history
        self.object_folders = history.object_folders(self.original)
        return found

    def _open_again(self) -> int:
        """Open the root, which must be the folder that it was: a link in its place may point anywhere."""
        handle = open_root(self.root)
        facts = os.fstat(handle)
        if (facts.st_dev, facts.st_ino) != self._identity:
            os.close(handle)
            raise OSError(errno.ESTALE, "replaced by another folder", str(self.root))
        return handle

    def _find_ignored(self, scratch: git.Scratch, source: int, listing: Listing) -> Collection[str]:
        rules, known = read_rules(source, listing, self._scope), self._repository
        if not (rules or known.excluded or known.above):
            return ()
        # What was added in spite of the rules belongs to the work; it also spares most questions.
        tracked = known.tracked(scratch)
        if tracked is None:
            return ()  # Nothing that may be tracked is lost.
        self._repository = known = known.obeyed(scratch)
        found = known.ignored(scratch, listing.paths(but=tracked), rules)
        return found - self._tracked_below(scratch, listing, rules, found)

    def _tracked_below(
        self, scratch: git.Scratch, listing: Listing, rules: Mapping[str, bytes], ignored: set[str]
    ) -> set[str]:
        """Those of the ignored files that a repository in the workspace tracks; one that is ignored itself does not."""
        folders = tuple(folder for folder in listing.repositories if folder)
        outer = {place: text for place, text in rules.items() if not place.startswith(folders)}
        asked = [folder + repository.ANY_NAME for folder in folders]
        hidden = self._repository.ignored(scratch, asked, outer)
        found: set[str] = set()
        for folder in folders:
            held = {path for path in ignored if path.startswith(folder)}
            if held and folder + repository.ANY_NAME not in hidden:
                tracked = repository.find(self.original / folder).tracked(scratch)
                found |= held if tracked is None else held & {folder + path for path in tracked}
        return found

    def _read_in_place(self, source: int, listing: Listing, ignored: Collection[str]) -> None:
        for folder in listing.folders:
            with opened(open_known(source, folder)) as handle:
                for name, facts in folder.entries:
                    self._scope.go_on()
                    self._keep_in_place(handle, folder.path + name, name, facts, ignored)

    def _keep_in_place(
        self, handle: int, path: str, name: str, facts: os.stat_result, ignored: Collection[str]
    ) -> None:
        try:
            if path in ignored or facts.st_size > BLOB_BYTES_MAX:
                self._baseline.note(path, facts, tracked=path not in ignored)
            elif stat.S_ISLNK(facts.st_mode):
                self._baseline.keep(path, facts, os.fsencode(read_link(handle, name)))
            elif found := read_file(handle, name, BLOB_BYTES_MAX):
                self._baseline.keep(path, found[1], found[0])
        except FileNotFoundError:
            pass  # Somebody works here; what is gone before we looked is not part of the start.
        except OSError as error:
            raise self._scope.cannot("read", path, error) from error
        if self._baseline.kept_bytes > self._scope.quota.bytes_max:
            raise over_quota(self._scope)


def open_workspace(
    root: str | Path,
    *,
    mode: Mode,
    include: Sequence[str],
    exclude: Sequence[str],
    run_dir: Path,
    stage_dir: Path,
    tree: Path,
    quota: Quota,
    stopped: Callable[[], bool] = lambda: False,
    state: Path | None = None,
    unread: Sequence[str] = (),
    travels: bool = False,
) -> Workspace:
    """Make a place to work in, and remember how it was. Blocking; where it fails nothing is left in `stage_dir`.

    Args:
        root: the original; never written here.
        include: globs on the relative path; empty means all. For a copy alone: in `pass_through` it would hide changes.
        exclude: globs, stronger than `include`; a folder is left out with all in it.
        run_dir: the run's own folder, for the patch.
        stage_dir: a folder for this run alone, new or empty, which `close` (or `collect`) removes.
        tree: the folder in it for the copy; there already, with at most the beginning of its `.git`, or not.
        quota: bytes are those written, so a hole costs nothing.
        stopped: asked before each file and while git is at work, also later on; true ends the work with an error.
        state: the folder that holds all of ours; where it lies in the workspace it is no part of it.
        unread: globs of files that the repository in the copy is not to hold.
        travels: the copy is sent to another machine, so its repository must not need the original's.

    Raises:
        WorkspaceError: `workspace_init_failed`, there is no such folder; `workspace_staging_failed`,
            a file cannot be read, a limit is passed, the disk is full, or it was stopped.
        PolicyError: `policy_invalid`, a glob is malformed.
    """
    selection = scope(_STAGING, quota, include, exclude, stopped)
    original = find_original(Path(root))
    try:
        _make_folders(run_dir, stage_dir, tree)
        ours = names_below(original, [run_dir, stage_dir, *([state] if state is not None else [])])
        selection = msgspec.structs.replace(selection, ours=ours)
        unread_globs = compile_globs(unread) if unread else None
        workspace = Workspace(original, mode, run_dir, stage_dir, tree, selection, unread_globs, travels=travels)
    except OSError as error:
        raise selection.cannot("make", str(stage_dir), error) from error
    try:
        workspace.prepare()
    except OSError as error:
        workspace.close()
        raise selection.cannot("stage", _about(error, original), error) from error
    except BaseException:
        workspace.close()
        raise
    return workspace


def collect(stage_dir: Path) -> None:
    """Remove what a control plane that was killed has left of a run's staging; missing is fine.

    Raises:
        WorkspaceError: `execution_workspace_error`, something in it is held by a mount or another user.
    """
    remove_tree(stage_dir)


NAME_A_FOLDER: Final = "name an existing folder (--root, or workspace.root of the order)"
"""What to do about a workspace that is not there."""


def find_original(root: Path) -> Path:
    """Find the folder that an order works on.

    Raises:
        WorkspaceError: `workspace_init_failed`, there is no such folder.
    """
    try:
        original = root.resolve(strict=True)
        if original.is_dir():
            return original
        fact = f"the workspace '{printable(str(root))}' is not a folder"
    except (OSError, RuntimeError) as error:
        fact = f"the workspace '{printable(str(root))}' cannot be opened: {getattr(error, 'strerror', None) or error}"
    raise WorkspaceError("workspace_init_failed", fact, hint=NAME_A_FOLDER)


def _about(error: OSError, otherwise: Path) -> str:
    # The name may also be a handle's number or bytes, by the call that failed.
    return error.filename if isinstance(error.filename, str) else str(otherwise)


def _make_folders(run_dir: Path, stage_dir: Path, tree: Path) -> None:
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    stage_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(name != tree.name for name in os.listdir(stage_dir)):
        raise FileExistsError(errno.EEXIST, "not empty", str(stage_dir))


def _check_bytes(listing: Listing, scope: Scope) -> None:
    """Refuse before the first byte is copied what is over the quota already."""
    sizes = [min(facts.st_size, facts.st_blocks * 512) for folder in listing.folders for _, facts in folder.entries]
    if sum(sizes) > scope.quota.bytes_max:
        raise over_quota(scope)
