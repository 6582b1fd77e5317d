"""What a workspace was when the run began, and what has changed since.

Facts of files go in at the start; at the end a listing of the same tree becomes leaves before and after, and the
commands that store the new contents.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection, Iterator
from typing import Final

import msgspec

from backplane.workspace.repo import FILE, LINK, PROGRAM, Leaf, blob_command, blob_id
from backplane.workspace.tree import Listing, Scope, give_rights, names_repository, read_file

BLOB_BYTES_MAX: Final = 64 << 20
"""Largest file that is compared by content and can be in a patch. A binary patch costs git some four times the file in
memory; a larger file that changed is named as left out."""

UNSURE_NS: Final = 2_000_000_000
"""A file changed this shortly before the baseline was finished is read again at the end: its time may not tell a later
change apart. The coarsest clock of a common file system (FAT) is two seconds."""

_Signature = tuple[int, int, int, int, int]


class Known(msgspec.Struct, frozen=True, gc=False):
    """One file or link at the start."""

    signature: _Signature
    leaf: Leaf | None = None
    """None when its content is not kept: it is ignored, or too large."""
    tracked: bool = True
    """False when git's rules ignore it: changes are counted, not patched."""


class Changes(msgspec.Struct):
    """Everything that differs from the baseline."""

    before: dict[str, Leaf] = {}
    after: dict[str, Leaf] = {}
    ignored_count: int = 0
    left_out: list[str] = []
    """Changed, but not in the patch: too large, outside of the order's selection, no regular file, or a name that git
    takes for its own folder's."""

    @property
    def paths(self) -> set[str]:
        return {*self.before, *self.after}


def signature(facts: os.stat_result) -> _Signature:
    """What differs whenever a file was changed; the change time cannot be set by a program."""
    return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_mode


def git_mode(facts: os.stat_result) -> int:
    """Return the mode that git has for a file or link."""
    if stat.S_ISLNK(facts.st_mode):
        return LINK
    return PROGRAM if facts.st_mode & 0o100 else FILE


def read_leaf(path: str, facts: os.stat_result, *, sha256: bool) -> tuple[Leaf, bytes] | None:
    """Read a link or a file whole; None for another one, or one over `BLOB_BYTES_MAX`. Raises OSError."""
    if stat.S_ISLNK(facts.st_mode):
        data = os.fsencode(os.readlink(path))
    elif found := read_file(path, BLOB_BYTES_MAX):
        data, facts = found
    else:
        return None
    return Leaf(git_mode(facts), blob_id(data, sha256=sha256)), data


class Baseline:
    """Files as they were: `known` is filled until `seal`, then `find_changes` compares."""

    def __init__(self) -> None:
        self.known: dict[str, Known] = {}
        self._sealed_ns = 0
        self._confirmed: dict[str, _Signature] = {}
        """Files that were read since and found unchanged, at a time that tells later changes apart."""

    def note(self, path: str, facts: os.stat_result, leaf: Leaf | None, *, tracked: bool = True) -> None:
        """Remember a file."""
        self.known[path] = Known(signature(facts), leaf, tracked)

    def seal(self) -> None:
        self._sealed_ns = time.time_ns()

    def _is_same(self, path: str, old: Known, facts: os.stat_result) -> bool:
        """Whether a file need not be read to know that it has not changed."""
        now = signature(facts)
        if self._confirmed.get(path) == now or (old.leaf is None and old.signature == now):
            return True
        return old.signature == now and facts.st_ctime_ns < self._sealed_ns - UNSURE_NS

    def find_changes(
        self, root: str, listing: Listing, ignored: Collection[str], scope: Scope, changes: Changes, *, sha256: bool
    ) -> Iterator[bytes]:
        """Compare a listing of the tree with the baseline; files whose facts are the same are not read.

        Args:
            ignored: new files that are only counted.
            changes: is filled.

        Yields:
            The commands of `git fast-import` that store the new contents.

        Raises:
            WorkspaceError: the scope's code; a file cannot be read, or the changes pass the quota.
        """
        looked_ns, left_bytes, gone = time.time_ns(), scope.quota.bytes_max, dict(self.known)
        for path, facts in listing.files:
            old = gone.pop(path, None)
            if old is not None and self._is_same(path, old, facts):
                continue
            scope.go_on()
            if path in ignored or (old is not None and not old.tracked):
                changes.ignored_count += 1
                continue
            try:
                if scope.mend and not facts.st_mode & 0o400:
                    give_rights(os.path.join(root, path), facts.st_mode | 0o400)
                found = read_leaf(os.path.join(root, path), facts, sha256=sha256)
            except FileNotFoundError:
                if old is not None:
                    gone[path] = old
                continue
            except OSError as error:
                raise scope.cannot("read", path, error) from error
            leaf, data = found or (None, b"")
            if leaf is not None and old is not None and old.leaf == leaf:
                if facts.st_ctime_ns < looked_ns - UNSURE_NS:
                    self._confirmed[path] = signature(facts)
            elif leaf is None or (old is not None and old.leaf is None) or names_repository(path):
                changes.left_out.append(path)
            else:
                left_bytes -= len(data)
                if left_bytes < 0:
                    fact = f"more than {scope.quota.bytes_max} bytes were changed"
                    raise scope.fail(fact, "raise workspace_bytes_max")
                changes.after[path] = leaf
                if old is not None and old.leaf is not None:
                    changes.before[path] = old.leaf
                yield blob_command(data)
        self._note_gone(gone, changes)

    def _note_gone(self, gone: dict[str, Known], changes: Changes) -> None:
        for path, old in gone.items():
            if not old.tracked:
                changes.ignored_count += 1
            elif old.leaf is None or names_repository(path):
                changes.left_out.append(path)
            else:
                changes.before[path] = old.leaf
