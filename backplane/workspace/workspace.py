"""The workspace of a run: a staged copy of a folder, or the original itself.

`open_workspace` makes it; `Workspace.difference` writes the agent's changes, as a git patch, into the run's folder, and
`apply` applies the patch to the original. The original's `.git` is never written, and no program in the workspace is
run.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

import msgspec

from backplane.contract.work import Mode
from backplane.errors import WorkspaceError
from backplane.policy.globs import Globs, compile_globs
from backplane.workspace import history, patch, repository
from backplane.workspace.baseline import Baseline, Changes
from backplane.workspace.objects import PackWriter
from backplane.workspace.patch import Change
from backplane.workspace.repo import REPO_NAME, Repo
from backplane.workspace.staging import Staging
from backplane.workspace.tree import Listing, Quota, Scope, list_tree, names_below, printable, remove_tree, scope

_STAGING: Final = "workspace_staging_failed"
_RESULT: Final = "execution_workspace_error"


class Patch(msgspec.Struct, frozen=True):
    """The changes that a run made."""

    path: Path
    """The file with the whole patch; the file is empty if nothing changed."""
    bytes: int
    sha256: str
    changes: tuple[Change, ...]
    status: str
    """One line for each change, as `git status --porcelain` prints them after `git add --all`."""
    ignored_count: int
    """Number of changed files that git's ignore rules leave out."""
    left_out: tuple[str, ...] = ()
    """Changed paths that are not in the patch: over 64 MiB, not selected by the order, or no regular file."""
    record_sha256: str = ""
    """SHA-256 of the record beside the patch, from which `apply_patch` reads the changed files."""

    @property
    def paths(self) -> set[str]:
        """Paths of all changed files, old and new names."""
        return {path for change in self.changes for path in (change.path, change.old_path) if path is not None}


class Workspace:
    """An open workspace. Call `difference` once, after the last write to it; then `close`."""

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
        self.run_dir = run_dir
        self.special_count = 0
        """Number of FIFOs, sockets and devices in the original, which are skipped."""
        self.no_history = ""
        """Why the copy lacks the original's history; "" if it lacks none."""
        self.object_folders: tuple[str, ...] = ()
        """Folders outside of the root that contain objects of its repository."""
        self._travels = travels
        self._stage_dir = stage_dir
        self._scope = scope
        self._unread = unread
        self._special: Collection[str] = ()
        self._identity = (0, 0)
        self._repository = repository.Repository()
        self._baseline = Baseline()
        self._repo: Repo | None = None
        self._is_slim = False
        """True once the run's repository was reduced to the run's states, or removed."""

    @property
    def repo(self) -> Repo:
        """The repository with the run's states."""
        if self._repo is None:
            self._repo = Repo(self.run_dir / REPO_NAME, _RESULT, self._scope.stopped)
        return self._repo

    # Staging ----------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Copy the original, or only record its baseline. Called once, by `open_workspace`."""
        original, stopped = str(self.original), self._scope.stopped
        listing = list_tree(original, self._scope)
        self._special, self.special_count = frozenset(listing.special), len(listing.special)
        sizes = [min(facts.st_size, facts.st_blocks * 512) for _, facts in listing.files]
        if sum(sizes) > self._scope.quota.bytes_max:
            raise self._scope.over_quota()
        known = self._repository = repository.find(self.original, repository.user_rules(os.environ))
        repo = Repo.create(self.run_dir / REPO_NAME, _STAGING, stopped, sha256=known.sha256)
        tracked = known.tracked(repo)
        ignored: Collection[str] = ()
        if tracked is not None:
            known = self._repository = known.obeyed(repo)
            ignored = repository.find_ignored(self.original, listing, tracked, self._scope, known, repo)
        found = self._find_history(repo, tracked or {})
        staging = Staging(self.original, listing, ignored, self._scope, self._unread, self._baseline)
        if self.mode == "staged":
            excluded = self._repository.carried
            staging.copy(self.root, repo, found, tracked or {}, excluded, self.no_history, self._travels)
        else:
            staging.read_in_place(repo)
        facts = self.root.stat()
        self._identity = facts.st_dev, facts.st_ino
        self._baseline.seal()

    def _find_history(self, repo: Repo, tracked: Collection[str]) -> history.History | None:
        """Return the history for the copy, or None; if the original has one, `no_history` gets the reason."""
        known, rules = self._repository, (self._scope.exclude, self._unread)
        if known.git_dir is None or self.mode != "staged":
            return None
        try:
            if self._travels:
                raise history.Unshared("it stays on the machine that the copy is sent from")
            selection = history.Selection(tuple(globs for globs in rules if globs), self._scope.include)
            found = history.read(known, repo, selection, tracked)
        except history.Unshared as error:
            repo.borrow(None)
            self.no_history = str(error)
            return None
        self.object_folders = history.object_folders(self.original)
        return found

    # Changes ----------------------------------------------------------------------------------------------------------

    def difference(self) -> Patch:
        """Write the changes to `patch.diff` in the run's folder, and the record for `apply_patch` beside it.

        Raises:
            WorkspaceError: `execution_workspace_error`, the tree cannot be read or git fails.
        """
        with patch.whole(self.run_dir):
            state, changes = self.snapshot("end")
            rows, record_sha256 = patch.write(self.repo, self.run_dir, state, self.original, self.mode)
            self._slim()
        path = self.run_dir / patch.PATCH_NAME
        return Patch(
            path=path,
            bytes=path.stat().st_size,
            sha256=patch.hash_of(path),
            changes=tuple(map(patch.change, rows)),
            status="".join(map(patch.status_line, rows)),
            ignored_count=changes.ignored_count,
            left_out=tuple(sorted(map(printable, changes.left_out))),
            record_sha256=record_sha256,
        )

    def _slim(self) -> None:
        """Reduce the run's repository to the run's states; if it has none, move it into the staging folder."""
        repo = self.repo
        if repo.has_states:
            repo.slim()
        else:
            try:  # It has many folders, and the caller of the run would wait until they are removed.
                repo.folder.rename(self._stage_dir / REPO_NAME)
            except OSError:  # The copies are on another disk.
                remove_tree(repo.folder)
        self._is_slim = True

    def snapshot(self, name: str) -> tuple[str, Changes]:
        """Store the differences of the workspace from its baseline; the agent may be at work meanwhile.

        Args:
            name: name of the state in the run's repository.

        Returns:
            Git's name of the state (of the empty tree if nothing differs), and the differences.

        Raises:
            WorkspaceError: as in `difference`.
        """
        staged, repo = self.mode == "staged", self.repo
        # Files outside of `include` were not copied, but the agent may have made new ones there.
        include = None if staged else self._scope.include
        scope = msgspec.structs.replace(self._scope, code=_RESULT, include=include, mend=staged)
        try:
            self._require_root()
            with repo.storing() as objects:
                changes = self._find(repo, scope, objects)
                state = objects.state(changes.before, changes.after) if changes.paths else repo.empty_tree
            if changes.paths:
                repo.keep(name, state)
        except OSError as error:
            raise scope.cannot("compare", _about(error, self.root), error) from error
        return state, changes

    def _find(self, repo: Repo, scope: Scope, objects: PackWriter) -> Changes:
        root, known = str(self.root), self._baseline.known
        listing = list_tree(root, scope)
        rules = repository.read_rules(root, listing, scope)
        self._leave_out(listing)
        new = [path for path, _ in listing.files if path not in known]
        changes = self._baseline.find_changes(root, listing, self._repository.ignored(repo, new, rules), scope, objects)
        if self.mode == "staged":
            changes.left_out += listing.unselected
        changes.left_out += [path for path in listing.special if path not in self._special]
        return changes

    def _leave_out(self, listing: Listing) -> None:
        """Remove from the listing new files whose path exists in the original, but was not staged."""
        if self.mode == "staged" and (self._scope.include is not None or self._special):
            hidden = {path for path, _ in listing.files if self._is_hidden(path)}
            listing.unselected += sorted(hidden)
            listing.files = [entry for entry in listing.files if entry[0] not in hidden]

    def _is_hidden(self, path: str) -> bool:
        if path in self._baseline.known:
            return False
        missed = self._scope.include is not None and self._scope.include.matches(path) is None
        return (missed or path in self._special) and os.path.lexists(self.original / path)

    def _require_root(self) -> None:
        """Raise OSError if the root was replaced by another folder, or by a link, which may point anywhere."""
        facts = os.lstat(self.root)
        if (facts.st_dev, facts.st_ino) != self._identity:
            raise OSError(errno.ESTALE, "replaced by another folder", str(self.root))

    def drop_ignored(self) -> int:
        """Remove git-ignored files from the copy before it is archived; return their number. Blocking.

        Raises:
            WorkspaceError: `workspace_staging_failed`, a file cannot be removed.
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
        """Remove all temporary files; the run's folder stays. Raises WorkspaceError `execution_workspace_error`."""
        try:
            if not self._is_slim:
                slim(self.run_dir)
        finally:
            collect(self._stage_dir)


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
    """Make a workspace, and record its baseline. Blocking; if it fails, its files in `stage_dir` are removed.

    Args:
        root: the original; this function does not write to it.
        include: globs of relative paths; empty means all. Only for a copy: in `pass_through` it would hide changes.
        exclude: globs that override `include`; a matching folder is left out with its content.
        run_dir: the run's own folder, for the patch.
        stage_dir: a folder for this run alone, new or empty; `close` or `collect` removes it.
        tree: the folder for the copy, in `stage_dir`; missing, or with at most the beginning of its `.git`.
        quota: limits; only written bytes count, not holes in files.
        stopped: called before each file and while git runs, also by later methods; if it returns True, they fail.
        state: the control plane's state folder, which is left out if it is inside the workspace.
        unread: globs of files that the repository in the copy must not contain.
        travels: True if the copy is sent to another machine, so that its repository must not need the original's.

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
    """Remove a run's staging folder, also one that a killed control plane left; do nothing if it is missing.

    Raises:
        WorkspaceError: `execution_workspace_error`, it cannot be removed: a mount or another user's file is in it.
    """
    remove_tree(stage_dir)


def slim(run_dir: Path) -> None:
    """Reduce the run's repository to the run's states, or remove it if it is incomplete. Raises WorkspaceError."""
    place = run_dir / REPO_NAME
    if (place / "config").exists():
        Repo(place).slim()
    else:
        remove_tree(place)  # Its creation was interrupted.


NAME_A_FOLDER: Final = "name an existing folder (--root, or workspace.root of the order)"
"""Hint of the error for a workspace that does not exist."""


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
    # Depending on the call that failed, `filename` may also be a handle's number or bytes.
    return error.filename if isinstance(error.filename, str) else str(otherwise)


def _make_folders(run_dir: Path, stage_dir: Path, tree: Path) -> None:
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    stage_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(name != tree.name for name in os.listdir(stage_dir)):
        raise FileExistsError(errno.EEXIST, "not empty", str(stage_dir))
