"""Applies a patch without a record of its files, as it comes with a receipt from another machine.

Git applies it to copies of the files that it names; the results are written as those of a run's own patch. The
receipt's hash proves that it is the run's patch.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path
from typing import Final

import msgspec

from backplane.errors import WorkspaceError
from backplane.policy.paths import unescaped
from backplane.workspace import git
from backplane.workspace.apply import APPLIED_ALREADY, Applied, blobs_of, explained, put
from backplane.workspace.baseline import read_leaf
from backplane.workspace.git import Scratch
from backplane.workspace.pack import LINK, Leaf
from backplane.workspace.patch import CODE, PATCH_NAME, PathTarget, SavedPatch, check_path, failure, names
from backplane.workspace.tree import (
    FILE_FLAGS,
    READ_BYTES,
    look_at,
    open_root,
    opened,
    printable,
    remove_tree,
)

_BECOMES: Final = re.compile(rb"index [0-9a-f]{40}\.\.([0-9a-f]{40})")
"""What a file of the patch shall be; lines of its content begin with another character."""
_SOURCES: Final = (b"rename from ", b"copy from ")


def apply_bare(run_dir: Path, sha256: str, root: Path, *, check: bool = False, merge: bool = False) -> Applied:
    """Apply the patch beside a receipt to a folder; a call that was cut off is continued.

    Args:
        sha256: hash of the patch, from the receipt.
        check: only find out whether it would work.
        merge: also apply it to files that differ from those of the run, if its lines still fit.

    Raises:
        WorkspaceError: `execution_workspace_error`; it is another patch, a file has changed (named), it does not fit,
            or a write failed; the error says whether a file was changed.
    """
    merged: list[str] = []
    with explained(run_dir), git.scratch(run_dir, CODE) as scratch:
        blobs = scratch.folder / "blobs" if check else blobs_of(run_dir)[0]

        def make(root: int) -> SavedPatch:
            made = _Made(scratch, root, blobs)
            saved, found = made.saved(run_dir / PATCH_NAME, sha256)
            merged.extend(found)
            if merged and not merge:
                fact = f"changed since the run began: {names(merged)}"
                raise failure(fact, "look at them, or merge with --merge")
            return saved

        applied = put(run_dir, root.resolve(strict=True), "apply", make, check=check, merge=merge)
        remove_tree(blobs)
    return msgspec.structs.replace(applied, merged=applied.merged or bool(merged))


class _Made:
    """Computes with git what a patch makes of the files in a folder.

    Args:
        root: handle of the folder.
        blobs: folder for the contents before and after.
    """

    def __init__(self, scratch: Scratch, root: int, blobs: Path) -> None:
        self._scratch, self._root, self._blobs = scratch, root, blobs
        self._patch, self._tree = scratch.folder / PATCH_NAME, scratch.folder / "tree"
        self._tree.mkdir()
        self._blobs.mkdir(mode=0o700, exist_ok=True)

    def saved(self, patch: Path, sha256: str) -> tuple[SavedPatch, list[str]]:
        """Return the patch as one of a run of this folder, and the files that differ from those of the run."""
        self._take(patch, sha256)
        paths, becomes = self._read()
        with opened(open_root(self._tree)) as tree:
            before = {path: self._leaf(self._root, path, is_copied=True) for path in paths}
            self._apply()
            after = {path: self._leaf(tree, path) for path in paths}
        targets = {path: PathTarget(path, before[path], after[path]) for path in paths}
        known = becomes | {leaf.oid for leaf in before.values() if leaf is not None}
        merged = [path for path, leaf in after.items() if leaf is not None and leaf.oid not in known]
        return SavedPatch("", "staged", targets, {}, (self._blobs,)), merged

    def _take(self, patch: Path, sha256: str) -> None:
        """Copy the patch to where nobody changes it, and see whose it is."""
        digest = hashlib.sha256()
        with open(os.open(patch, FILE_FLAGS), "rb") as file, self._patch.open("xb") as copy:
            while piece := file.read(READ_BYTES):
                digest.update(piece)
                copy.write(piece)
        if digest.hexdigest() != sha256:
            hint = "to use an edited patch, give it to 'git apply'"
            raise failure(f"'{PATCH_NAME}' is not the one that the receipt names; nothing was changed", hint)

    def _read(self) -> tuple[list[str], set[bytes]]:
        """The paths that the patch touches, and what files become by it, by git's names of the contents."""
        done = self._scratch.git("apply", "--numstat", "-z", str(self._patch), cwd=self._tree)
        paths = {os.fsdecode(row.split(b"\t", 2)[2]) for row in done.stdout.split(b"\0") if row}
        becomes: set[bytes] = set()
        with self._patch.open("rb") as file:
            for line in file:
                if line.startswith(_SOURCES):
                    name = os.fsdecode(line.split(b" from ", 1)[1].rstrip(b"\n"))
                    paths.add(unescaped(name[1:-1]) if name.startswith('"') else name)
                elif (found := _BECOMES.match(line)) is not None:
                    becomes.add(bytes.fromhex(found[1].decode()))
        for path in paths:
            check_path(path)
        return sorted(paths), becomes

    def _leaf(self, root: int, path: str, is_copied: bool = False) -> Leaf | None:
        """A file or link, its content kept; None where there is neither."""

        def look(folder: int, name: str, facts: os.stat_result) -> tuple[Leaf, bytes] | None:
            found = read_leaf(folder, name, facts)
            if found is None and stat.S_ISREG(facts.st_mode):
                raise failure(f"'{printable(path)}' is too large", "give the patch to 'git apply'")
            return found

        seen = look_at(root, path, look)
        if seen is None:
            return None
        leaf, data = seen
        (self._blobs / leaf.oid.hex()).write_bytes(data)
        if is_copied:
            self._copy(self._tree / path, leaf, data)
        return leaf

    def _copy(self, place: Path, leaf: Leaf, data: bytes) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        if leaf.mode == LINK:
            place.symlink_to(os.fsdecode(data))
        else:
            place.write_bytes(data)
            place.chmod(leaf.mode & 0o777)

    def _apply(self) -> None:
        try:
            git.put(self._scratch, self._patch, self._tree)
        except WorkspaceError as error:
            words = ("apply", "--binary", "--check", "--reverse", str(self._patch))
            if self._scratch.git(*words, codes=(0, 1), cwd=self._tree).code == 0:
                raise failure(APPLIED_ALREADY, "nothing is left to do") from error
            said = " ".join(str(error.evidence or error.message).split())[:300]
            raise failure(f"the patch does not fit this folder: {said}", "nothing was changed") from error
