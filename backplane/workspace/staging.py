"""Fills the staged copy of a workspace, or reads a workspace in place; both record the baseline.

Every selected file of the original is read once: it is copied, hashed, and stored if the original's index lacks it.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from backplane.errors import PolicyError
from backplane.policy.globs import Globs
from backplane.workspace.baseline import BLOB_BYTES_MAX, Baseline, git_mode, read_leaf
from backplane.workspace.copying import OVER_QUOTA, copy_file, copy_link
from backplane.workspace.history import AGENT_FOLDERS, History, write_one_commit
from backplane.workspace.objects import Leaf, index_of, object_id
from backplane.workspace.repo import Repo
from backplane.workspace.tree import GIT_NAME, Listing, Scope, names_repository, open_folder, opened, parent, read_file


class Staging:
    """Copies or reads the files of one run's workspace.

    Args:
        ignored: paths of selected files that git's rules ignore.
        unread: patterns of files that the agent's repository must not contain; None without any.
        baseline: gets an entry for each file.
    """

    def __init__(
        self,
        original: Path,
        listing: Listing,
        ignored: Collection[str],
        scope: Scope,
        unread: Globs | None,
        baseline: Baseline,
    ) -> None:
        self._original, self._listing, self._ignored = original, listing, ignored
        self._scope, self._unread, self._baseline = scope, unread, baseline
        self._left_bytes = scope.quota.bytes_max
        self._apart: list[str] = []
        """Files that the agent's repository ignores: they may not be read, are too large, or belong to a repository."""

    def copy(
        self,
        root: Path,
        repo: Repo,
        history: History | None,
        tracked: Mapping[str, Leaf | None],
        excluded: bytes,
        no_history: str,
        travels: bool,
    ) -> None:
        """Fill a copy, and make the agent's repository in it: with the original's history, or with one commit.

        Args:
            root: folder of the copy.
            repo: the run's repository, which stores the baseline.
            history: the original's history for the copy; None makes one commit.
            tracked: the entries of the original's index.
            excluded: ignore rules for the agent's repository.
            no_history: why the copy lacks the original's history; "" if it lacks none.
            travels: True if the copy is sent to another machine, where files have other inodes and times.

        Raises:
            OSError, WorkspaceError: the copy cannot be filled.
        """
        git_dir = root / GIT_NAME
        for folder in (root, *(git_dir / name for name in AGENT_FOLDERS)):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, _ in self._listing.folders[1:]:
            os.mkdir(f"{root}/{path}", 0o700)
        if history is not None:
            with repo.storing() as objects:
                for path, leaf, data, _ in self._copied(str(root), sha256=repo.sha256):
                    if tracked.get(path) != leaf:
                        objects.blob(leaf, data)
            history.write(git_dir)
        else:
            self._copy_into_commit(str(root), git_dir, repo, no_history, travels=travels)
        lines = excluded and excluded.rstrip(b"\n") + b"\n"
        (git_dir / "info/exclude").write_bytes(lines + b"".join(map(_exclude_line, self._apart)))
        for path, facts in reversed(self._listing.folders):
            place = os.path.join(root, path)
            os.utime(place, ns=(facts.st_atime_ns, facts.st_mtime_ns))
            os.chmod(place, facts.st_mode & 0o777)

    def _copy_into_commit(self, root: str, git_dir: Path, repo: Repo, no_history: str, *, travels: bool) -> None:
        why = f"\nThe history of the original is not in this copy: {no_history}.\n" if no_history else ""
        # The agent's repository gets a copy of one pack, so files that it must not contain go into another.
        with repo.storing(again=True) as private:
            with repo.storing() as objects:
                leaves: dict[str, Leaf] = {}
                for path, leaf, data, is_apart in self._copied(root, sha256=repo.sha256):
                    if is_apart:
                        private.blob(leaf, data)
                    else:
                        objects.blob(leaf, data)
                        leaves[path] = leaf
                head = objects.commit(leaves, f"baseline\n{why}")
            known = self._baseline.known
            nothing = (0, 0, 0, 0)
            index = index_of(leaves, lambda path: nothing if travels else known[path].signature[:4], sha256=repo.sha256)
            write_one_commit(git_dir, repo, head, index)

    def _copied(self, root: str, *, sha256: bool) -> Iterator[tuple[str, Leaf, bytes, bool]]:
        """Copy every file, and yield each that is to be stored: its path, leaf, content, and True if it is kept apart.

        A file that was removed since the listing is not part of the baseline.
        """
        folders = dict(self._listing.folders)
        for above, files in itertools.groupby(self._listing.files, lambda entry: parent(entry[0])):
            try:
                folder = open_folder(str(self._original), (above, folders[above]))
            except OSError as error:
                self._pass_over(above, error)
                continue
            with opened(folder):
                for path, facts in files:
                    if self._scope.stopped():
                        self._scope.go_on()
                    try:
                        found = self._copy_entry(folder, path[len(above) :], f"{root}/{path}", path, facts, sha256)
                    except OSError as error:
                        self._pass_over(path, error)
                    else:
                        if found is not None:
                            yield path, *found

    def _pass_over(self, path: str, error: OSError) -> None:
        """Return if a file or folder was removed since it was listed. Raises WorkspaceError for any other error."""
        if isinstance(error, FileNotFoundError) and not os.path.lexists(self._original / path):
            return
        if error.errno == errno.EDQUOT and error.strerror == OVER_QUOTA:
            raise self._scope.over_quota() from error
        raise self._scope.cannot("copy", path, error) from error

    def _copy_entry(
        self, folder: int, name: str, target: str, path: str, facts: os.stat_result, sha256: bool
    ) -> tuple[Leaf, bytes, bool] | None:
        """Copy a file or link.

        Args:
            folder: handle of the original's folder that contains it.

        Returns:
            Its leaf, its content, and True if it is kept apart (`_apart`). None if it is not stored.
        """
        data: bytes | None
        if stat.S_ISLNK(facts.st_mode):
            data, made = copy_link(folder, name, target, facts)
        else:
            data, made, written = copy_file(folder, name, target, self._left_bytes)
            self._left_bytes -= written
        if not self._is_stored(path, made):
            return None
        if data is None:
            found = read_file(target, BLOB_BYTES_MAX)
            assert found is not None, "we have just made it"
            data = found[0]
        leaf = Leaf(git_mode(made), object_id(data, sha256=sha256))
        self._baseline.note(path, made, leaf)
        is_apart = self._is_apart(path)
        if is_apart:
            self._apart.append(path)
        return leaf, data, is_apart

    def _is_stored(self, path: str, facts: os.stat_result) -> bool:
        """Return True if a file's content belongs to the baseline; otherwise note only its facts, and return False."""
        is_ignored = path in self._ignored
        if not is_ignored and facts.st_size <= BLOB_BYTES_MAX:
            return True
        self._baseline.note(path, facts, None, tracked=not is_ignored)
        if not is_ignored:
            self._apart.append(path)
        return False

    def _is_apart(self, path: str) -> bool:
        """Return True if git cannot store this path, or the agent may not read it, or a pattern cannot be matched."""
        if names_repository(path):
            return True
        if self._unread is None:
            return False
        ends = [place for place, letter in enumerate(path) if letter == "/"]
        try:
            return any(self._unread.matches(path[:end]) is not None for end in (*ends, len(path)))
        except PolicyError:
            return True

    def read_in_place(self, repo: Repo) -> None:
        """Store the contents of the original's files, without a copy. Raises OSError, WorkspaceError."""
        with repo.storing() as objects:
            for path, facts in self._listing.files:
                self._scope.go_on()
                if not self._is_stored(path, facts):
                    continue
                try:
                    found = read_leaf(f"{self._original}/{path}", facts, sha256=repo.sha256)
                except FileNotFoundError:
                    continue  # The file was removed since the listing, so it is not part of the baseline.
                except OSError as error:
                    raise self._scope.cannot("read", path, error) from error
                if found is not None:
                    self._baseline.note(path, facts, found[0])
                    self._left_bytes -= len(found[1])
                    if self._left_bytes < 0:
                        raise self._scope.over_quota()
                    objects.blob(*found)


def _exclude_line(path: str) -> bytes:
    """Return a line for `info/exclude` that ignores this file; empty if its name has a line break."""
    escaped = b"".join(b"\\" + bytes((byte,)) if byte in b"\\*?[ !#" else bytes((byte,)) for byte in os.fsencode(path))
    return b"" if b"\n" in escaped else b"/" + escaped + b"\n"
