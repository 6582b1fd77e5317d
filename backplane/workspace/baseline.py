"""Records the files of a workspace when the run begins, and finds those that have changed since."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection
from typing import Final

import msgspec

from backplane.workspace.objects import FILE, LINK, PROGRAM, Leaf, PackWriter, object_id
from backplane.workspace.tree import Listing, Scope, give_rights, names_repository, read_file

BLOB_BYTES_MAX: Final = 64 << 20
"""Size in bytes of the largest file that can be in a patch; git's diff of a binary file takes some four times as much
memory. A larger file that has changed is named as left out."""

UNSURE_NS: Final = 2_000_000_000
"""A file that changed less than this before the baseline was complete is read again at the end, because a later change
may have the same time. The coarsest clock of a common file system (FAT) has steps of two seconds."""

_Signature = tuple[int, int, int, int, int]


class Known(msgspec.Struct, frozen=True, gc=False):
    """One file or link as it was at the start."""

    signature: _Signature
    leaf: Leaf | None = None
    """None if its content is not kept, because it is ignored or too large."""
    tracked: bool = True
    """False if git's rules ignore it: changes are counted, but not in the patch."""


class Changes(msgspec.Struct):
    """The differences from the baseline."""

    before: dict[str, Leaf] = {}
    after: dict[str, Leaf] = {}
    ignored_count: int = 0
    left_out: list[str] = []
    """Changed files that are not in the patch: they are too large, not selected by the order, not regular, or have a
    name that git keeps for its own folder."""

    @property
    def paths(self) -> set[str]:
        return {*self.before, *self.after}


def signature(facts: os.stat_result) -> _Signature:
    """Return facts of which at least one differs once the file has changed; no program can set the change time."""
    return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_mode


def git_mode(facts: os.stat_result) -> int:
    """Return the mode that git has for a file or link."""
    if stat.S_ISLNK(facts.st_mode):
        return LINK
    return PROGRAM if facts.st_mode & 0o100 else FILE


def read_leaf(path: str, facts: os.stat_result, *, sha256: bool) -> tuple[Leaf, bytes] | None:
    """Read a link or a regular file of at most `BLOB_BYTES_MAX`; return None for any other. Raises OSError."""
    if stat.S_ISLNK(facts.st_mode):
        data = os.fsencode(os.readlink(path))
    elif found := read_file(path, BLOB_BYTES_MAX):
        data, facts = found
    else:
        return None
    return Leaf(git_mode(facts), object_id(data, sha256=sha256)), data


class Baseline:
    """Records the files of a workspace at the start: `note` adds a file, `seal` ends this, `find_changes` compares."""

    def __init__(self) -> None:
        self.known: dict[str, Known] = {}
        self._sealed_ns = 0
        self._confirmed: dict[str, _Signature] = {}
        """Files that were read later and had not changed; their times are old enough to reveal a further change."""

    def note(self, path: str, facts: os.stat_result, leaf: Leaf | None, *, tracked: bool = True) -> None:
        """Remember a file."""
        self.known[path] = Known(signature(facts), leaf, tracked)

    def seal(self) -> None:
        self._sealed_ns = time.time_ns()

    def _is_same(self, path: str, old: Known, facts: os.stat_result) -> bool:
        """Return True if a file's facts prove that it has not changed."""
        now = signature(facts)
        if self._confirmed.get(path) == now or (old.leaf is None and old.signature == now):
            return True
        return old.signature == now and facts.st_ctime_ns < self._sealed_ns - UNSURE_NS

    def find_changes(
        self, root: str, listing: Listing, ignored: Collection[str], scope: Scope, objects: PackWriter
    ) -> Changes:
        """Compare a listing of the tree with the baseline; files whose facts are the same are not read.

        Args:
            ignored: new files that are only counted.
            objects: stores the new contents.

        Raises:
            WorkspaceError: the scope's code; a file cannot be read, or the changes pass the quota.
        """
        changes = Changes()
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
                    give_rights(f"{root}/{path}", facts.st_mode | 0o400)
                leaf, data = read_leaf(f"{root}/{path}", facts, sha256=objects.sha256) or (None, b"")
            except FileNotFoundError:
                if old is not None:
                    gone[path] = old
                continue
            except OSError as error:
                raise scope.cannot("read", path, error) from error
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
                objects.blob(leaf, data)
        for path, old in gone.items():
            if not old.tracked:
                changes.ignored_count += 1
            elif old.leaf is None or names_repository(path):
                changes.left_out.append(path)
            else:
                changes.before[path] = old.leaf
        return changes
