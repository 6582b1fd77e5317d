"""The workspace of a run: a staged copy of a folder, or the original itself.

`open_workspace` makes it; `difference` writes what the agent changed as a git patch into the run's folder. The
original's `.git` is never written, and no program in either tree is ever run. `apply` applies a patch to the
original.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec

from backplane.contract.work import Mode
from backplane.errors import PolicyError, WorkspaceError
from backplane.policy.globs import Globs, compile_globs
from backplane.workspace import history, patch, repository
from backplane.workspace.baseline import BLOB_BYTES_MAX, Baseline, Changes, git_mode, read_leaf
from backplane.workspace.copying import OVER_QUOTA, copy_file, copy_link
from backplane.workspace.patch import Change
from backplane.workspace.repo import (
    REPO_NAME,
    Leaf,
    Repo,
    StoredState,
    blob_command,
    blob_id,
    commit_command,
    state_commands,
)
from backplane.workspace.tree import (
    GIT_NAME,
    Listing,
    Quota,
    Scope,
    list_tree,
    names_below,
    names_repository,
    open_folder,
    parent,
    printable,
    read_file,
    remove_tree,
    scope,
)

_STAGING: Final = "workspace_staging_failed"
_RESULT: Final = "execution_workspace_error"
_START: Final = "start"
"""Name of the branch in the run's repository that holds the agent's first commit until that is copied."""


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
    """SHA-256 of the record beside the patch, in which `apply_patch` reads the changed files."""

    @property
    def paths(self) -> set[str]:
        """Paths of all changed files, old and new names."""
        return {path for change in self.changes for path in (change.path, change.old_path) if path is not None}


class _Source:
    """Opens the folders of an original, one at a time, while their files are copied."""

    def __init__(self, root: str, listing: Listing) -> None:
        self._root, self._folders = root, dict(listing.folders)
        self._open: tuple[str, int] | None = None

    def folder(self, path: str) -> int:
        """Return a handle of the folder that a file is in. Raises OSError."""
        above = parent(path)
        if self._open is None or self._open[0] != above:
            self.close()
            self._open = (above, open_folder(self._root, (above, self._folders[above])))
        return self._open[1]

    def close(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None


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
        """Number of FIFOs, sockets and devices that were skipped."""
        self.no_history = ""
        """Why the copy lacks the history that the original has; "" if it lacks none."""
        self.object_folders: tuple[str, ...] = ()
        """Folders outside of the root that hold objects of its repository."""
        self._travels = travels
        self._stage_dir = stage_dir
        self._scope = scope
        self._unread = unread
        self._special: Collection[str] = ()
        self._identity = (0, 0)
        self._repository = repository.NONE
        self._baseline = Baseline()
        self._left_bytes = scope.quota.bytes_max
        self._is_slim = False
        """True once the run's repository has only the run's states."""
        self._apart: list[str] = []
        """Files that the agent's repository ignores: they may not be read, are too large, or belong to a repository."""
        self._private: list[str] = []
        """Files that may not be read."""

    @property
    def repo(self) -> Repo:
        """The repository with the run's states."""
        return Repo(self.run_dir / REPO_NAME, _RESULT, self._scope.stopped)

    # The start --------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Copy the original, or only record its baseline. Called once, by `open_workspace`."""
        original, stopped = str(self.original), self._scope.stopped
        listing = list_tree(original, self._scope)
        self._special, self.special_count = frozenset(listing.special), len(listing.special)
        sizes = [min(facts.st_size, facts.st_blocks * 512) for _, facts in listing.files]
        if sum(sizes) > self._scope.quota.bytes_max:
            raise self._over_quota()
        known = self._repository = repository.find(self.original).beside(repository.user_rules(os.environ))
        repo = Repo.create(self.run_dir / REPO_NAME, _STAGING, stopped, sha256=known.sha256)
        at = Repo.create(self._stage_dir / "read.git", _STAGING, stopped, sha256=known.sha256)
        tracked = known.tracked(at)
        found = self._find_history(at, tracked or {})
        ignored = self._find_ignored(at, listing, tracked)
        remove_tree(at.folder)
        if self.mode == "staged":
            self._stage(repo, listing, ignored, found, tracked or {})
        else:
            repo.load(self._read_in_place(listing, ignored, sha256=repo.sha256))
        facts = self.root.stat()
        self._identity = facts.st_dev, facts.st_ino
        self._baseline.seal()

    def _find_history(self, at: Repo, tracked: Collection[str]) -> history.History | None:
        """Read the history for the copy; None without one; `no_history` is the reason if the original has one."""
        known, rules = self._repository, (self._scope.exclude, self._unread)
        if known.git_dir is None or self.mode != "staged":
            return None
        try:
            if self._travels:
                raise history.Unshared("it stays on the machine that the copy is sent from")
            selection = history.Selection(tuple(globs for globs in rules if globs), self._scope.include)
            found = history.read(known, at, selection, tracked)
        except history.Unshared as error:
            self.no_history = str(error)
            return None
        self.object_folders = history.object_folders(self.original)
        return found

    def _find_ignored(self, at: Repo, listing: Listing, tracked: Collection[str] | None) -> Collection[str]:
        rules = repository.read_rules(str(self.original), listing, self._scope)
        if tracked is None or not (rules or self._repository.excluded or self._repository.above):
            return ()  # No file is left out, so none that may be tracked is lost.
        known = self._repository = self._repository.obeyed(at)
        # A tracked file belongs to the work although a rule ignores it; git need not be asked about it.
        found = known.ignored(at, [path for path, _ in listing.files if path not in tracked], rules)
        return found - repository.tracked_below(self.original, listing, found, rules, known, at)

    def _stage(
        self,
        repo: Repo,
        listing: Listing,
        ignored: Collection[str],
        found: history.History | None,
        tracked: Mapping[str, Leaf | None],
    ) -> None:
        """Fill the copy, and make the agent's repository: with the original's history, or with a single commit."""
        git_dir = self.root / GIT_NAME
        for folder in (self.root, *(git_dir / name for name in history.AGENT_FOLDERS)):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if found is not None:
            repo.borrow(found.objects)
            repo.load(self._copy_all(repo, listing, ignored, tracked))
            found.write(git_dir)
        else:
            repo.load(self._copy_all(repo, listing, ignored, None))
            history.write_one_commit(git_dir, repo, _START)
            repo.forget(_START)
            repo.load(self._read_private())
        excluded = self._repository.carried
        excluded = excluded and excluded.rstrip(b"\n") + b"\n"
        (git_dir / "info/exclude").write_bytes(excluded + b"".join(map(_exclude_line, self._apart)))
        for path, facts in reversed(listing.folders):
            place = os.path.join(self.root, path)
            os.utime(place, ns=(facts.st_atime_ns, facts.st_mtime_ns))
            os.chmod(place, facts.st_mode & 0o777)

    def _copy_all(
        self, repo: Repo, listing: Listing, ignored: Collection[str], known: Mapping[str, Leaf | None] | None
    ) -> Iterator[bytes]:
        """Copy every file, and yield the commands that store the contents that the original's index lacks.

        Args:
            known: the entries of the original's index, if its objects can be used; None to make a commit of all files.
        """
        for path, _ in listing.folders[1:]:
            os.mkdir(os.path.join(self.root, path), 0o700)
        commit: dict[str, Leaf] = {}
        for path, copied in self._copied(repo, listing, ignored):
            leaf, data = copied
            if leaf is None or (known is not None and known.get(path) == leaf):
                continue
            if known is None and self._is_private(path):
                self._private.append(path)
                continue
            if not names_repository(path):
                commit[path] = leaf
            yield blob_command(data)
        if known is None:
            why = f"\nThe history of the original is not in this copy: {self.no_history}.\n" if self.no_history else ""
            yield commit_command(_START, commit, f"baseline\n{why}")

    def _copied(
        self, repo: Repo, listing: Listing, ignored: Collection[str]
    ) -> Iterator[tuple[str, tuple[Leaf | None, bytes]]]:
        """Copy every file, and yield it with its content; a file removed meanwhile is not part of the baseline."""
        with closing(_Source(str(self.original), listing)) as source:
            for path, facts in listing.files:
                if self._scope.stopped():
                    self._scope.go_on()
                try:
                    yield path, self._copy_entry(source, path, facts, ignored, sha256=repo.sha256)
                except FileNotFoundError as error:
                    if os.path.lexists(self.original / path):
                        raise self._scope.cannot("copy", path, error) from error
                except OSError as error:
                    if error.errno == errno.EDQUOT and error.strerror == OVER_QUOTA:
                        raise self._over_quota() from error
                    raise self._scope.cannot("copy", path, error) from error

    def _copy_entry(
        self, source: _Source, path: str, facts: os.stat_result, ignored: Collection[str], *, sha256: bool
    ) -> tuple[Leaf | None, bytes]:
        """Copy a file or link; return it with its content, or None if that is not stored."""
        folder, name, target = source.folder(path), os.path.basename(path), f"{self.root}/{path}"
        data: bytes | None
        if stat.S_ISLNK(facts.st_mode):
            data, made = copy_link(folder, name, target, facts)
        else:
            data, made, written = copy_file(folder, name, target, self._left_bytes)
            self._left_bytes -= written
        is_ignored = path in ignored
        if is_ignored or made.st_size > BLOB_BYTES_MAX:
            self._baseline.note(path, made, None, tracked=not is_ignored)
            if not is_ignored:
                self._apart.append(path)
            return None, b""
        if data is None:
            found = read_file(target, BLOB_BYTES_MAX)
            assert found is not None, "we have just made it"
            data = found[0]
        leaf = Leaf(git_mode(made), blob_id(data, sha256=sha256))
        self._baseline.note(path, made, leaf)
        if self._is_private(path) or names_repository(path):
            self._apart.append(path)
        return leaf, data

    def _is_private(self, path: str) -> bool:
        """Return True if the file, or a folder above it, may not be read; also if its path cannot be matched."""
        if self._unread is None:
            return False
        ends = [place for place, letter in enumerate(path) if letter == "/"]
        try:
            return any(self._unread.matches(path[:end]) is not None for end in (*ends, len(path)))
        except PolicyError:
            return True

    def _read_private(self) -> Iterator[bytes]:
        """Yield the commands that store the private files, which the agent's repository may not have."""
        for path in self._private:
            found = read_leaf(f"{self.root}/{path}", os.lstat(f"{self.root}/{path}"), sha256=False)
            assert found is not None, "we have just made it"
            yield blob_command(found[1])

    def _read_in_place(self, listing: Listing, ignored: Collection[str], *, sha256: bool) -> Iterator[bytes]:
        for path, facts in listing.files:
            self._scope.go_on()
            is_ignored = path in ignored
            if is_ignored or facts.st_size > BLOB_BYTES_MAX:
                self._baseline.note(path, facts, None, tracked=not is_ignored)
                continue
            try:
                found = read_leaf(f"{self.original}/{path}", facts, sha256=sha256)
            except FileNotFoundError:
                continue  # The file was removed since the listing, so it is not part of the baseline.
            except OSError as error:
                raise self._scope.cannot("read", path, error) from error
            if found is not None:
                self._baseline.note(path, facts, found[0])
                self._left_bytes -= len(found[1])
                if self._left_bytes < 0:
                    raise self._over_quota()
                yield blob_command(found[1])

    def _over_quota(self) -> WorkspaceError:
        fact = f"the workspace has more than {self._scope.quota.bytes_max} bytes"
        return self._scope.fail(fact, "raise workspace_bytes_max or leave some out with --exclude")

    # What has changed -------------------------------------------------------------------------------------------------

    def difference(self) -> Patch:
        """Write the changes to `patch.diff` in the run's folder, and beside it the record that `apply_patch` needs.

        Raises:
            WorkspaceError: `execution_workspace_error`, the tree cannot be read or git fails.
        """
        with patch.whole(self.run_dir):
            state, changes = self.snapshot("end")
            rows, record_sha256 = patch.write(self.repo, self.run_dir, state, self.original, self.mode)
            slim(self.run_dir)
        self._is_slim = True
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

    def snapshot(self, branch: str) -> tuple[StoredState | None, Changes]:
        """Store how the workspace differs from its baseline; None if it does not. The agent may be at work meanwhile.

        Raises:
            WorkspaceError: as for `difference`.
        """
        staged, repo, changes = self.mode == "staged", self.repo, Changes()
        # Files outside of `include` were not copied, but the agent may have made new ones there.
        include = None if staged else self._scope.include
        scope = msgspec.structs.replace(self._scope, code=_RESULT, include=include, mend=staged)
        try:
            self._require_root()
            output = repo.load(self._find(branch, repo, scope, changes))
        except OSError as error:
            raise scope.cannot("compare", _about(error, self.root), error) from error
        return repo.state(output) if output else None, changes

    def _find(self, branch: str, repo: Repo, scope: Scope, changes: Changes) -> Iterator[bytes]:
        root, known = str(self.root), self._baseline.known
        listing = list_tree(root, scope)
        rules = repository.read_rules(root, listing, scope)
        self._leave_out(listing)
        new = [path for path, _ in listing.files if path not in known]
        ignored = self._repository.ignored(repo, new, rules) if new else ()
        yield from self._baseline.find_changes(root, listing, ignored, scope, changes, sha256=repo.sha256)
        if self.mode == "staged":
            changes.left_out += listing.unselected
        changes.left_out += [path for path in listing.special if path not in self._special]
        if changes.paths:
            yield state_commands(branch, changes.before, changes.after)

    def _leave_out(self, listing: Listing) -> None:
        """Remove new files from the listing whose path exists in the original, but was not staged."""
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
        """Refuse a root that was replaced by another folder or a link, which may point anywhere. Raises OSError."""
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
        """Remove everything temporary; the run's folder stays. Raises WorkspaceError `execution_workspace_error`."""
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
    """Make a workspace, and record its baseline. Blocking; if it fails, nothing of it is left in `stage_dir`.

    Args:
        root: the original; this function does not write to it.
        include: globs on the relative path; empty means all. Only for a copy: in `pass_through` it would hide changes.
        exclude: globs, stronger than `include`; a matching folder is left out with its content.
        run_dir: the run's own folder, for the patch.
        stage_dir: a folder only for this run, new or empty; `close` or `collect` removes it.
        tree: the folder for the copy in `stage_dir`; missing, or with at most the beginning of its `.git`.
        quota: limits; only written bytes count, so holes in files do not.
        stopped: called before each file and while git runs, also by later methods; True stops with an error.
        state: the control plane's state folder; if it is inside of the workspace, it is left out.
        unread: globs of files that the repository in the copy must not contain.
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
    """Remove a run's staging folder, also one that a killed control plane left; do nothing if it is missing.

    Raises:
        WorkspaceError: `execution_workspace_error`, a mount or another user's file in it prevents that.
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


def _exclude_line(path: str) -> bytes:
    """Return a line for `info/exclude` that ignores this file; empty if its name has a line break."""
    escaped = b"".join(b"\\" + bytes((byte,)) if byte in b"\\*?[ !#" else bytes((byte,)) for byte in os.fsencode(path))
    return b"" if b"\n" in escaped else b"/" + escaped + b"\n"
