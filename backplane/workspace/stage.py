"""Makes the copy: its files, their baseline, and a repository for the agent.

A listing of the original goes in. What is to be staged was decided before; how a single file is
copied is in `copying`.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from backplane.errors import PolicyError, WorkspaceError
from backplane.policy.globs import Globs
from backplane.workspace import history
from backplane.workspace.baseline import BLOB_BYTES_MAX, Baseline
from backplane.workspace.copying import OVER_QUOTA, copy_file, copy_link, make_folder
from backplane.workspace.history import History
from backplane.workspace.pack import Leaf, write_repository
from backplane.workspace.tree import (
    GIT_NAME,
    Folder,
    Listing,
    Scope,
    open_known,
    open_quick,
    open_root,
    opened,
    read_file,
)


class Stage:
    """Fills one new folder from a listing of the original."""

    def __init__(
        self,
        root: Path,
        scope: Scope,
        baseline: Baseline,
        ignored: Collection[str],
        unread: Globs | None,
        history: History | str,
    ) -> None:
        self._root = root
        self._scope = scope
        self._baseline = baseline
        self._ignored = ignored
        self._unread = unread
        self._history = history
        """The original's history, or why there is none."""
        self._left_bytes = scope.quota.bytes_max
        self._leaves: dict[str, Leaf] = {}
        self._facts: dict[str, tuple[os.stat_result, os.stat_result]] = {}
        """`lstat` of each file in the original and in the copy."""
        self._apart: list[str] = []

    def fill(self, source: int, listing: Listing, excluded: bytes) -> None:
        self._root.mkdir(mode=0o700, exist_ok=True)
        git_dir = self._root / GIT_NAME
        with opened(open_root(self._root)) as target:
            for folder in listing.folders:
                self._copy_folder(source, target, folder)
            self._write_repository(git_dir, excluded and excluded.rstrip(b"\n") + b"\n")
            for folder in reversed(listing.folders):
                _dress_folder(target, folder)

    def _write_repository(self, git_dir: Path, above: bytes) -> None:
        """Write the agent's repository: from the original's history, or of one commit."""
        excluded = above + b"".join(map(_exclude_line, self._apart))
        if isinstance(self._history, str):
            made = {path: self._facts[path][1] for path in self._leaves}
            now_s = int(time.time())
            write_repository(git_dir, self._baseline.pack, self._leaves, made, excluded, now_s, self._history)
        else:
            index = self._history.fresh_index(self._leaves, self._facts)
            history.write_repository(git_dir, self._history, index, excluded)

    def _copy_folder(self, source: int, target: int, folder: Folder) -> None:
        path = folder.path
        try:
            if path:
                make_folder(target, path)
            with opened(open_known(source, folder)) as here, opened(open_quick(target, path)) as there:
                for name, facts in folder.entries:
                    path = folder.path + name
                    if self._scope.stopped():
                        self._scope.go_on()
                    try:
                        self._copy_entry(here, there, path, name, facts)
                    except FileNotFoundError:
                        if _is_there(here, name):
                            raise
        except OSError as error:
            if error.errno == errno.EDQUOT and error.strerror == OVER_QUOTA:
                raise over_quota(self._scope) from error
            raise self._scope.cannot("copy", path, error) from error

    def _copy_entry(self, here: int, there: int, path: str, name: str, facts: os.stat_result) -> None:
        data: bytes | None
        if stat.S_ISLNK(facts.st_mode):
            data, made = copy_link(here, there, name, facts)
        else:
            data, made, written = copy_file(here, there, name, self._left_bytes)
            self._left_bytes -= written
        self._facts[path] = facts, made
        ignored = path in self._ignored
        if ignored or made.st_size > BLOB_BYTES_MAX:
            self._baseline.note(path, made, tracked=not ignored)
            if not ignored:
                self._apart.append(path)
            return
        if data is None:
            found = read_file(there, name, BLOB_BYTES_MAX)
            assert found is not None, "we have just made it"
            data = found[0]
        private = self._unread is not None and self._is_private(path, self._unread)
        leaf = self._baseline.keep(path, made, data, private=private)
        if private:
            self._apart.append(path)
            return
        self._leaves[path] = leaf

    def _is_private(self, path: str, unread: Globs) -> bool:
        """Whether the file, or a folder that it is in, may not be read; what cannot be judged may not."""
        ends = [place for place, letter in enumerate(path) if letter == "/"]
        try:
            return any(unread.matches(path[:end]) is not None for end in (*ends, len(path)))
        except PolicyError:
            return True


def _is_there(folder: int, name: str) -> bool:
    """Whether a file is there; one that was removed before we came to it is not part of the start."""
    with suppress(FileNotFoundError):
        os.stat(name, dir_fd=folder, follow_symlinks=False)
        return True
    return False


def over_quota(scope: Scope) -> WorkspaceError:
    fact = f"the workspace has more than {scope.quota.bytes_max} bytes"
    return scope.fail(fact, "raise workspace_bytes_max or leave some out with --exclude")


def _exclude_line(path: str) -> bytes:
    """Name one file in git's ignore language."""
    escaped = b"".join(b"\\" + bytes((byte,)) if byte in b"\\*?[ !#" else bytes((byte,)) for byte in os.fsencode(path))
    return b"" if b"\n" in escaped else b"/" + escaped + b"\n"


def _dress_folder(target: int, folder: Folder) -> None:
    """Give a folder its mode and times, once nothing is added to it any more."""
    with opened(open_quick(target, folder.path)) as handle:
        os.utime(handle, ns=(folder.stat.st_atime_ns, folder.stat.st_mtime_ns))
        os.fchmod(handle, folder.stat.st_mode & 0o777)
