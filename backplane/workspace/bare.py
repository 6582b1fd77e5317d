"""Applies a patch without the run's repository, as it comes with a receipt from another machine.

Git applies it to an index with the present files that it names; the results are written as those of a run's own patch.
The receipt's hash proves that it is the run's patch.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Final

import msgspec

from backplane.errors import WorkspaceError
from backplane.policy.paths import unescaped
from backplane.workspace.apply import APPLIED_ALREADY, Applied, explained, put
from backplane.workspace.baseline import read_leaf
from backplane.workspace.objects import Leaf
from backplane.workspace.patch import PATCH_NAME, PathTarget, checked, failure, names
from backplane.workspace.repo import REPO_NAME, Repo
from backplane.workspace.tree import FILE_FLAGS, READ_BYTES, look_at, printable, remove_tree
from backplane.workspace.writing import mark_of

_BECOMES: Final = re.compile(rb"index [0-9a-f]+\.\.([0-9a-f]{40,64})")
"""Line with the object id of a file's new content; lines of content begin with a space, `+` or `-`."""
_SOURCE: Final = re.compile(rb"(?:rename|copy) from (.+)\n")


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

    def make() -> dict[str, PathTarget]:
        targets, found = _read(run_dir, sha256, str(root.resolve()))
        merged.extend(found)
        if merged and not merge:
            raise failure(f"changed since the run began: {names(merged)}", "look at them, or merge with --merge")
        return targets

    with explained(run_dir):
        try:
            applied = put(run_dir, root, "apply", make, check=check, merge=merge)
        finally:
            if not mark_of(run_dir).exists():
                remove_tree(run_dir / REPO_NAME)
    return msgspec.structs.replace(applied, merged=applied.merged or bool(merged))


def _read(run_dir: Path, sha256: str, root: str) -> tuple[dict[str, PathTarget], list[str]]:
    """Return the patch as one of a run of this folder, and the files that differ from those of the run."""
    repo = Repo.create(run_dir / REPO_NAME)
    patch = repo.folder / PATCH_NAME
    paths, becomes = _copy(run_dir / PATCH_NAME, patch, sha256)
    for row in repo.git("apply", "--numstat", "-z", str(patch)).stdout.split(b"\0")[:-1]:
        paths.add(os.fsdecode(row.split(b"\t", 2)[2]))
    before: dict[str, Leaf] = {}
    with repo.storing() as objects:
        for path in map(checked, sorted(paths)):
            facts = look_at(root, path)
            found = read_leaf(f"{root}/{path}", facts, sha256=repo.sha256) if facts else None
            if found is not None:
                before[path] = found[0]
                objects.blob(*found)
        now = objects.tree(before)
    repo.git("read-tree", now)
    _apply(repo, patch)
    after = repo.leaves(repo.git("write-tree").stdout.decode().strip())
    known = becomes | {leaf.oid for leaf in before.values()}
    targets = {path: PathTarget(path, before.get(path), after.get(path)) for path in sorted(paths)}
    return targets, [path for path, leaf in after.items() if leaf.oid not in known]


def _copy(patch: Path, target: Path, sha256: str) -> tuple[set[str], set[str]]:
    """Copy a patch to a place that nobody else changes.

    Returns:
        The paths from which it renames or copies, and git's names of the new contents.

    Raises:
        WorkspaceError: it is another patch.
    """
    digest, sources, becomes = hashlib.sha256(), set[str](), set[str]()
    with open(os.open(patch, FILE_FLAGS), "rb") as file, target.open("xb") as copy:
        while line := file.readline(READ_BYTES):
            digest.update(line)
            copy.write(line)
            if found := _BECOMES.match(line):
                becomes.add(found[1].decode())
            elif found := _SOURCE.fullmatch(line):
                name = os.fsdecode(found[1])
                sources.add(unescaped(name[1:-1]) if name.startswith('"') else name)
    if digest.hexdigest() != sha256:
        hint = "to use an edited patch, give it to 'git apply'"
        raise failure(f"'{PATCH_NAME}' is not the one that the receipt names; nothing was changed", hint)
    return sources, becomes


def _apply(repo: Repo, patch: Path) -> None:
    words = ("apply", "--cached", "--binary", "--whitespace=nowarn")
    try:
        repo.git(*words, str(patch))
    except WorkspaceError as error:
        if repo.git(*words, "--check", "--reverse", str(patch), codes=(0, 1)).code == 0:
            raise failure(APPLIED_ALREADY, "nothing is left to do") from error
        said = printable(" ".join(str(error.evidence or error.message).split())[:300])
        raise failure(f"the patch does not fit this folder: {said}", "nothing was changed") from error
