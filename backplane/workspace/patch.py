"""Writes and reads a run's patch in the run's folder.

`patch.diff` is for people and `git apply`. `patch.json`, the record, names the workspace, and the state in the run's
repository from which `apply_patch` knows each file before and after.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec

from backplane.errors import WorkspaceError
from backplane.workspace.objects import EMPTY_TREES, Leaf
from backplane.workspace.repo import CODE, REPO_NAME, DiffRow, Repo
from backplane.workspace.tree import FILE_FLAGS, GIT_NAME, printable, read_file

PATCH_NAME: Final = "patch.diff"
RECORD_NAME: Final = "patch.json"

RECORD_BYTES_MAX: Final = 64 << 10
"""Size in bytes of the longest record that is read; it has one path and some short values."""

NAMES_MAX: Final = 10
"""Maximum number of files that an error names; the others are counted."""

Kind = Literal["added", "deleted", "modified", "renamed", "mode"]


class Change(msgspec.Struct, frozen=True):
    """A changed file. Bytes of a path that are not UTF-8 are written `\\xNN`."""

    path: str
    kind: Kind
    old_path: str | None = None
    binary: bool = False


def change(row: DiffRow) -> Change:
    """Describe a changed file."""
    kinds: dict[str, Kind] = {"A": "added", "D": "deleted", "R": "renamed"}
    kind = kinds.get(row.letter, "mode" if row.same_content and row.letter == "M" else "modified")
    old_path = None if row.old_path is None else _shown(row.old_path)
    return Change(_shown(row.path), kind, old_path, row.binary)


def status_line(row: DiffRow) -> str:
    """Return the line of `git status --porcelain` for a changed file after `git add`."""
    old = f"{_quoted(row.old_path)} -> " if row.old_path is not None else ""
    return f"{row.letter}  {old}{_quoted(row.path)}\n"


def _shown(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


_ESCAPES: Final = {ord(letter): f"\\{name}" for letter, name in zip('\a\b\t\n\v\f\r"\\', 'abtnvfr"\\', strict=True)}
"""Git's escapes in a quoted name; other bytes that are not printable ASCII are octal."""


def _quoted(raw: bytes) -> str:
    """Quote a name as git does, if it has a blank or an escape."""
    text = "".join(_ESCAPES.get(b) or (chr(b) if 0x20 <= b < 0x7F else f"\\{b:03o}") for b in raw)
    return f'"{text}"' if b" " in raw or len(text) != len(raw) else text


def failure(fact: str, hint: str | None = None) -> WorkspaceError:
    """Return a `WorkspaceError` with the code of this package."""
    return WorkspaceError(CODE, fact, hint=hint)


def names(paths: list[str]) -> str:
    """List paths for an error."""
    shown = ", ".join(f"'{printable(path)}'" for path in paths[:NAMES_MAX])
    return shown + (f" and {len(paths) - NAMES_MAX} more" if len(paths) > NAMES_MAX else "")


class PatchRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record beside a patch; at the first checkpoint of a live run, a record without a patch is written."""

    root: str
    """Path of the workspace."""
    mode: str
    tree: str = ""
    """Git's name of the state at the end."""
    bytes: int = 0
    """Size of the patch."""
    sha256: str = ""
    """Hash of the patch."""


# Writing --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def whole(run_dir: Path) -> Iterator[None]:
    """Remove an earlier patch, and if the block fails, also what it has written.

    Raises:
        WorkspaceError: `execution_workspace_error`, a file of the patch cannot be written.
    """
    try:
        _remove(run_dir)
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):
            _remove(run_dir)
        if isinstance(error, OSError):
            fact = f"the patch cannot be written: {error.strerror}"
            raise WorkspaceError(CODE, fact, hint="free some space") from error
        raise


def _remove(run_dir: Path) -> None:
    for name in (PATCH_NAME, RECORD_NAME):
        # Writing would follow a link of this name.
        (run_dir / name).unlink(missing_ok=True)


def write(repo: Repo, run_dir: Path, state: str, root: Path, mode: str) -> tuple[list[DiffRow], str]:
    """Write the patch of a state, and its record; return the changed files, and the record's SHA-256."""
    path, rows = run_dir / PATCH_NAME, []
    if state == repo.empty_tree:
        path.touch(mode=0o600)
    else:
        rows = repo.write_patch(state, path)
    return rows, write_record(run_dir, PatchRecord(str(root), mode, state, path.stat().st_size, hash_of(path)))


def write_record(run_dir: Path, record: PatchRecord) -> str:
    """Write the record; return its SHA-256. Raises OSError."""
    # The standard library's writer, because a name that is not UTF-8 contains lone surrogates.
    data = json.dumps(msgspec.to_builtins(record), indent=1).encode() + b"\n"
    (run_dir / RECORD_NAME).write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def hash_of(path: Path) -> str:
    """Return the SHA-256 of a file. Raises OSError."""
    with open(os.open(path, FILE_FLAGS), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Reading --------------------------------------------------------------------------------------------------------------


class PathTarget(msgspec.Struct, frozen=True, array_like=True):
    """The leaf of a path before and after a change; None if there is no file."""

    path: str
    before: Leaf | None
    after: Leaf | None


class SavedPatch(msgspec.Struct, frozen=True):
    """A state of a run, as changes of files."""

    root: str
    mode: str
    targets: dict[str, PathTarget]


def mode_of(run_dir: Path) -> str | None:
    """Return the workspace mode that the record names; None if there is no record."""
    try:
        return _read_record(run_dir).mode
    except (WorkspaceError, OSError):
        return None


def load(run_dir: Path, record_sha256: str | None = None) -> SavedPatch:
    """Read the state at a run's end, and check the patch against the record.

    Args:
        record_sha256: hash of the record, from the receipt; None if the receipt has none.

    Raises:
        WorkspaceError: `execution_workspace_error`; record or patch are not what the run left.
        OSError: one of them cannot be read.
    """
    try:
        record = _read_record(run_dir, record_sha256)
    except FileNotFoundError:
        record = PatchRecord("", "")
    if not record.tree:
        raise failure(f"there is no patch in '{printable(str(run_dir))}'", "name a run that has finished")
    path = run_dir / PATCH_NAME
    # The size first, so that no pipe and no huge sparse file is read.
    if os.lstat(path).st_size != record.bytes or hash_of(path) != record.sha256:
        raise failure(f"'{PATCH_NAME}' is not what the run left", "to use an edited patch, give it to 'git apply'")
    return _saved(run_dir, record, record.tree)


def load_state(run_dir: Path, tree: str) -> SavedPatch:
    """Read another state of the run. Raises as `load`."""
    return _saved(run_dir, _read_record(run_dir), tree)


def _saved(run_dir: Path, record: PatchRecord, tree: str) -> SavedPatch:
    leaves = {} if tree in EMPTY_TREES else Repo(run_dir / REPO_NAME).leaves(tree)
    paths = map(checked, sorted({path[2:] for path in leaves}))
    targets = {path: PathTarget(path, leaves.get(f"a/{path}"), leaves.get(f"b/{path}")) for path in paths}
    return SavedPatch(record.root, record.mode, targets)


def _read_record(run_dir: Path, sha256: str | None = None) -> PatchRecord:
    found = read_file(run_dir / RECORD_NAME, RECORD_BYTES_MAX)
    if found is None:
        fact = f"'{RECORD_NAME}' of the run is no file of at most {RECORD_BYTES_MAX} bytes"
        raise failure(fact, "the run's folder was changed by somebody")
    if sha256 is not None and hashlib.sha256(found[0]).hexdigest() != sha256:
        hint = "look what else was changed: backplane receipts verify"
        raise failure(f"'{RECORD_NAME}' is not the one that the receipt names; nothing was changed", hint)
    try:
        return msgspec.convert(json.loads(found[0]), PatchRecord)
    except (ValueError, RecursionError) as error:
        raise failure(f"'{RECORD_NAME}' of the run cannot be read: {type(error).__name__}") from error


def checked(path: str) -> str:
    """Return a path, or refuse one that would leave the root, or write into a repository. Raises WorkspaceError."""
    parts = path.split("/")
    if "\0" in path or any(part in ("", ".", "..") or part.lower() == GIT_NAME for part in parts):
        raise failure(f"the patch names '{printable(path)}', which is not a file of the workspace", "do not trust it")
    return path
