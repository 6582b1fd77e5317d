"""What a workspace was when the run began, and what has changed since.

Contents and facts of files go in at the start; at the end a listing of the same tree comes back
as leaves before and after. The contents lie in one file of ours outside the tree, and are
checked by their hash when they are read again.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final

import msgspec

from backplane.workspace.git import RULES_BYTES_MAX, RULES_NAME, RULES_SUM_BYTES_MAX, without_holes
from backplane.workspace.pack import FILE, LINK, PROGRAM, Leaf, Pack, blob_id
from backplane.workspace.tree import (
    Folder,
    Listing,
    Scope,
    give_rights,
    names_repository,
    open_known,
    opened,
    read_file,
    read_link,
)

BLOB_BYTES_MAX: Final = 64 << 20
"""Largest file that is compared by content and can be in a patch. A binary patch costs git some
four times the file in memory; a larger file that changed is named as left out."""

UNSURE_NS: Final = 2_000_000_000
"""A file changed this shortly before the baseline was finished is read again at the end: its time
may not tell a later change apart. The coarsest clock of a common file system (FAT) is two seconds."""

_Signature = tuple[int, int, int, int, int]


class Known(msgspec.Struct, frozen=True, gc=False):
    """One file or link at the start."""

    signature: _Signature
    leaf: Leaf | None = None
    """None when its content is not kept: it is ignored, or too large."""
    tracked: bool = True
    """False when git's rules ignore it: changes are counted, not patched."""


def signature(facts: os.stat_result) -> _Signature:
    """What differs whenever a file was changed; the change time cannot be set by a program."""
    return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_mode


def git_mode(facts: os.stat_result) -> int:
    if stat.S_ISLNK(facts.st_mode):
        return LINK
    return PROGRAM if facts.st_mode & 0o100 else FILE


def read_leaf(folder: int, name: str, facts: os.stat_result) -> tuple[Leaf, bytes] | None:
    """Read a link or a file whole; None for another one, or one over `BLOB_BYTES_MAX`. Raises OSError."""
    if stat.S_ISLNK(facts.st_mode):
        data = os.fsencode(read_link(folder, name))
    elif found := read_file(folder, name, BLOB_BYTES_MAX):
        data, facts = found
    else:
        return None
    return Leaf(git_mode(facts), blob_id(data)), data


class Baseline:
    """Files as they were; `keep` and `note` until `seal`, then `content` and `find_changes`."""

    __slots__ = ("_confirmed", "_private", "_sealed_ns", "known", "pack")

    def __init__(self, store: Path) -> None:
        self.known: dict[str, Known] = {}
        self.pack = Pack(store)
        self._private: Pack | None = None
        """Contents that are known here, and that nobody is given a copy of; made for the first of them."""
        self._sealed_ns = 0
        self._confirmed: dict[str, _Signature] = {}
        """Files that were read since and found unchanged, at a time that tells later changes apart."""

    @property
    def kept_bytes(self) -> int:
        return self.pack.bytes + (self._private.bytes if self._private is not None else 0)

    def keep(self, path: str, facts: os.stat_result, data: bytes, *, private: bool = False) -> Leaf:
        """Keep a file's content."""
        if private and self._private is None:
            self._private = Pack(self.pack.path.with_suffix(".private"))
        pack = self._private if private and self._private is not None else self.pack
        leaf = Leaf(git_mode(facts), pack.add("blob", data))
        self.known[path] = Known(signature(facts), leaf)
        return leaf

    def note(self, path: str, facts: os.stat_result, *, tracked: bool) -> None:
        """Remember only that a file was there, and when it was changed."""
        self.known[path] = Known(signature(facts), tracked=tracked)

    def seal(self) -> None:
        self.close()
        self._sealed_ns = time.time_ns()

    def close(self) -> None:
        self.pack.close()
        if self._private is not None:
            self._private.close()

    def is_same(self, path: str, old: Known, facts: os.stat_result) -> bool:
        """Whether a file need not be read to know that it has not changed."""
        now = signature(facts)
        if self._confirmed.get(path) == now:
            return True
        return old.signature == now and facts.st_ctime_ns < self._sealed_ns - UNSURE_NS

    def confirm(self, path: str, facts: os.stat_result, looked_ns: int) -> None:
        """A file was read and is what it was; `facts` are from before that, and later than `looked_ns`."""
        if facts.st_ctime_ns < looked_ns - UNSURE_NS:
            self._confirmed[path] = signature(facts)

    def content(self, leaf: Leaf, scope: Scope) -> bytes:
        """Read back a file's content. Raises WorkspaceError when somebody has changed our store."""
        pack = self.pack if self._private is None or leaf.oid in self.pack else self._private
        data = pack.read(leaf.oid)
        if blob_id(data) != leaf.oid:
            raise scope.fail("what was kept of the workspace's start is not what was kept", "keep the agent out of it")
        return data


class Changes(msgspec.Struct):
    """Everything that differs from the baseline."""

    before: dict[str, Leaf]
    after: dict[str, Leaf]
    ignored_count: int = 0
    left_out: list[str] = []
    """Changed, but not in the patch: too large, outside of the order's selection, no regular file, or a name that git
    takes for its own folder's."""


Take = Callable[[Leaf, bytes], None]
"""Told of every content that the patch will need."""


def find_changes(
    baseline: Baseline,
    root: int,
    listing: Listing,
    scope: Scope,
    ask_ignored: Callable[[list[str]], Collection[str]],
    take: Take,
    looked_ns: int,
) -> Changes:
    """Compare a listing of the tree with the baseline; files whose facts are the same are not read.

    Args:
        looked_ns: a time before the listing was begun, since 1970.

    Raises:
        WorkspaceError: the scope's code; a file cannot be read, or the changes pass the quota.
    """
    changes = Changes({}, {})
    seen: set[str] = set()
    ignored = ask_ignored(listing.paths(but=baseline.known))
    left_bytes = scope.quota.bytes_max
    for folder in listing.folders:
        for path, name, facts in _suspects(baseline, folder, seen):
            scope.go_on()
            old = baseline.known.get(path)
            if path in ignored or (old and not old.tracked):
                changes.ignored_count += 1
                continue
            found = _read(root, folder, name, facts, scope)
            if found is None:
                seen.discard(path)
                continue
            leaf, data = found
            if leaf is None or (old and not old.leaf) or (names_repository(path) and not (old and old.leaf == leaf)):
                changes.left_out.append(path)
                continue
            if old and old.leaf == leaf:
                baseline.confirm(path, facts, looked_ns)
                continue
            left_bytes -= len(data)
            if left_bytes < 0:
                raise scope.fail(f"more than {scope.quota.bytes_max} bytes were changed", "raise workspace_bytes_max")
            take(leaf, data)
            changes.after[path] = leaf
            if old and old.leaf:
                _take_old(baseline, path, scope, changes, take)
    for path in [path for path in baseline.known if path not in seen]:
        _gone(baseline, path, scope, changes, take)
    return changes


def _suspects(baseline: Baseline, folder: Folder, seen: set[str]) -> Iterator[tuple[str, str, os.stat_result]]:
    """The files of a folder that are new or may have changed; all that are there are added to `seen`."""
    for name, facts in folder.entries:
        path = folder.path + name
        seen.add(path)
        old = baseline.known.get(path)
        if old is None or not baseline.is_same(path, old, facts):
            # A file that is not kept is compared by its facts alone.
            if old and not old.leaf and old.signature == signature(facts):
                continue
            yield path, name, facts


def _read(
    root: int, folder: Folder, name: str, facts: os.stat_result, scope: Scope
) -> tuple[Leaf | None, bytes] | None:
    """A file's leaf and content; no leaf when it is too large, None when it is not there any more."""
    try:
        with opened(open_known(root, folder)) as handle:
            if scope.mend and not facts.st_mode & 0o400:
                give_rights(name, facts.st_mode | 0o400, handle)
            return read_leaf(handle, name, facts) or (None, b"")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise scope.cannot("read", folder.path + name, error) from error


def _take_old(baseline: Baseline, path: str, scope: Scope, changes: Changes, take: Take) -> None:
    leaf = baseline.known[path].leaf
    assert leaf is not None
    take(leaf, baseline.content(leaf, scope))
    changes.before[path] = leaf


def _gone(baseline: Baseline, path: str, scope: Scope, changes: Changes, take: Take) -> None:
    old = baseline.known[path]
    if not old.tracked:
        changes.ignored_count += 1
    elif old.leaf is None or names_repository(path):
        changes.left_out.append(path)
    else:
        _take_old(baseline, path, scope, changes, take)


def read_rules(root: int, listing: Listing, scope: Scope) -> dict[str, bytes]:
    """Read every `.gitignore` of a tree, by its folder; one that is no plain, short file is passed over.

    Raises:
        WorkspaceError: the scope's code; they are too much together. To pass some over would fill the patch with what
            they leave out.
    """
    rules: dict[str, bytes] = {}
    left_bytes = RULES_SUM_BYTES_MAX
    for folder in listing.folders:
        for name, facts in folder.entries:
            if name != RULES_NAME or not stat.S_ISREG(facts.st_mode):
                continue
            scope.go_on()
            try:
                with opened(open_known(root, folder)) as handle:
                    found = read_file(handle, name, RULES_BYTES_MAX)
            except OSError:
                continue
            if found:
                rules[folder.path] = without_holes(found[0])
                left_bytes -= len(rules[folder.path])
            if left_bytes < 0:
                fact = f"the {RULES_NAME} files of the workspace are over {RULES_SUM_BYTES_MAX >> 20} MiB together"
                raise scope.fail(fact, f"remove some, or leave them out with --exclude '**/{RULES_NAME}'")
    return rules
