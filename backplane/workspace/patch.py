"""A run's patch as it lies beside the receipt.

`patch.diff` is for people and `git apply`. `patch.json` names the folder, and the state in the run's repository from
which `apply_patch` knows each file before and after.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from backplane.errors import WorkspaceError
from backplane.workspace.objects import EMPTY_TREES, Leaf
from backplane.workspace.repo import CODE, REPO_NAME, DiffRow, Repo
from backplane.workspace.tree import FILE_FLAGS, GIT_NAME, printable, read_file

PATCH_NAME: Final = "patch.diff"
RECORD_NAME: Final = "patch.json"

RECORD_BYTES_MAX: Final = 64 << 10
"""Longest `patch.json` that is read back: one path and some short values."""

NAMES_MAX: Final = 10
"""Files that an error names; the rest is a number."""

Kind = Literal["added", "deleted", "modified", "renamed", "mode"]


class Change(msgspec.Struct, frozen=True):
    """What happened to one file. Bytes of a path that are not UTF-8 are written `\\xNN`."""

    path: str
    kind: Kind
    old_path: str | None = None
    binary: bool = False


def change(row: DiffRow) -> Change:
    kinds: dict[str, Kind] = {"A": "added", "D": "deleted", "R": "renamed"}
    kind = kinds.get(row.letter, "mode" if row.same_content and row.letter == "M" else "modified")
    old_path = None if row.old_path is None else _shown(row.old_path)
    return Change(_shown(row.path), kind, old_path, row.binary)


def status_line(row: DiffRow) -> str:
    """One line as `git status --porcelain` has it for a change that was added."""
    old = f"{_quoted(row.old_path)} -> " if row.old_path is not None else ""
    return f"{row.letter}  {old}{_quoted(row.path)}\n"


def _shown(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


_ESCAPES: Final = {ord(letter): f"\\{name}" for letter, name in zip('\a\b\t\n\v\f\r"\\', 'abtnvfr"\\', strict=True)}
"""How git writes these bytes in a quoted name; other odd ones are octal."""


def _quoted(raw: bytes) -> str:
    """Quote a name that has more than plain characters in it, as git does."""
    text = "".join(_ESCAPES.get(b) or (chr(b) if 0x20 <= b < 0x7F else f"\\{b:03o}") for b in raw)
    return f'"{text}"' if b" " in raw or len(text) != len(raw) else text


# Writing --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def whole(run_dir: Path) -> Iterator[None]:
    """Remove a former patch, and what the block has written if it fails."""
    remove(run_dir)
    try:
        yield
    except BaseException:
        remove(run_dir)
        raise


def remove(run_dir: Path) -> None:
    """Remove the patch and its record. Raises OSError."""
    for name in (PATCH_NAME, RECORD_NAME):
        # A link that somebody left here would be written through.
        (run_dir / name).unlink(missing_ok=True)


def write(repo: Repo, run_dir: Path, state: str, root: Path, mode: str) -> tuple[list[DiffRow], str]:
    """Write the patch of a state, and its record; return the changed files, and the record's SHA-256."""
    path, rows = run_dir / PATCH_NAME, []
    if state == repo.empty_tree:
        path.touch(mode=0o600)
    else:
        rows = repo.write_patch(state, path)
    facts = {"tree": state, "bytes": path.stat().st_size, "sha256": hash_of(path)}
    return rows, write_record(run_dir, root, mode, facts)


def write_record(run_dir: Path, root: Path, mode: str, facts: dict[str, Any]) -> str:
    """Write the record; return its SHA-256."""
    # The standard library's writer, because a name that is not UTF-8 contains lone surrogates.
    data = json.dumps({"root": str(root), "mode": mode, **facts}, indent=1).encode() + b"\n"
    (run_dir / RECORD_NAME).write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def hash_of(path: Path) -> str:
    """Return the SHA-256 of a file. Raises OSError."""
    with open(os.open(path, FILE_FLAGS), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Reading --------------------------------------------------------------------------------------------------------------


class PathTarget(msgspec.Struct, frozen=True):
    """What one path was, and shall be."""

    path: str
    before: Leaf | None
    after: Leaf | None


class SavedPatch(msgspec.Struct, frozen=True):
    """A state of a run, as changes of files."""

    root: str
    mode: str
    targets: dict[str, PathTarget]


def failure(fact: str, hint: str | None = None) -> WorkspaceError:
    return WorkspaceError(CODE, fact, hint=hint)


def names(paths: list[str]) -> str:
    shown = ", ".join(f"'{printable(path)}'" for path in paths[:NAMES_MAX])
    return shown + (f" and {len(paths) - NAMES_MAX} more" if len(paths) > NAMES_MAX else "")


def mode_of(run_dir: Path) -> str | None:
    """Return the workspace mode that the record names; None where there is no such record."""
    try:
        return str(_read_record(run_dir)["mode"])
    except (WorkspaceError, OSError):
        return None


def load(run_dir: Path, record_sha256: str | None = None) -> SavedPatch:
    """Read the record and check it against the patch.

    Args:
        record_sha256: of the record as the receipt has it; None for a receipt that does not say.

    Raises:
        WorkspaceError: `execution_workspace_error`; record or patch are not what the run left.
        OSError: one of them cannot be read.
    """
    try:
        record = _read_record(run_dir, record_sha256)
    except FileNotFoundError:
        record = {}
    if "tree" not in record:
        raise failure(f"there is no patch in '{printable(str(run_dir))}'", "name a run that has finished")
    path = run_dir / PATCH_NAME
    # Its size first: a pipe has none, and a hole is not worth reading.
    if os.lstat(path).st_size != record["bytes"] or hash_of(path) != record["sha256"]:
        raise failure(f"'{PATCH_NAME}' is not what the run left", "to use an edited patch, give it to 'git apply'")
    return _saved(run_dir, record, record["tree"])


def load_state(run_dir: Path, tree: str) -> SavedPatch:
    """Read another state of the run. Raises as `load`."""
    return _saved(run_dir, _read_record(run_dir), tree)


def _saved(run_dir: Path, record: dict[str, Any], tree: str) -> SavedPatch:
    if tree in EMPTY_TREES:
        return SavedPatch(record["root"], record["mode"], {})
    return SavedPatch(record["root"], record["mode"], read_state(Repo(run_dir / REPO_NAME), tree))


def _read_record(run_dir: Path, sha256: str | None = None) -> dict[str, Any]:
    found = read_file(run_dir / RECORD_NAME, RECORD_BYTES_MAX)
    if found is None:
        fact = f"'{RECORD_NAME}' of the run is no file of at most {RECORD_BYTES_MAX} bytes"
        raise failure(fact, "the run's folder was changed by somebody")
    if sha256 is not None and hashlib.sha256(found[0]).hexdigest() != sha256:
        hint = "look what else was changed: backplane receipts verify"
        raise failure(f"'{RECORD_NAME}' is not the one that the receipt names; nothing was changed", hint)
    try:
        record: dict[str, Any] = json.loads(found[0])
        return {"root": record["root"], "mode": record["mode"], **record}
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise failure(f"'{RECORD_NAME}' of the run cannot be read: {type(error).__name__}") from error


def read_state(repo: Repo, tree: str) -> dict[str, PathTarget]:
    """Return what each path was at the run's start, and is in a state. Raises WorkspaceError."""
    leaves = repo.leaves(tree)
    paths = sorted({path[2:] for path in leaves})
    return {path: PathTarget(path, leaves.get(f"a/{path}"), leaves.get(f"b/{path}")) for path in map(checked, paths)}


def checked(path: str) -> str:
    """Return a path, or refuse one that would leave the root, or write into a repository. Raises WorkspaceError."""
    parts = path.split("/")
    if "\0" in path or any(part in ("", ".", "..") or part.lower() == GIT_NAME for part in parts):
        raise failure(f"the patch names '{printable(path)}', which is not a file of the workspace", "do not trust it")
    return path
