"""A run's patch as it lies beside the receipt.

`Draft` writes `patch.diff` (for people and `git apply`), `patch.json` and the contents before and
after; `load` reads the latter two again. Finding the difference is in `workspace`.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Generator, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from backplane.errors import WorkspaceError
from backplane.workspace.baseline import BLOB_BYTES_MAX
from backplane.workspace.git import DiffRow, Scratch, write_patch
from backplane.workspace.pack import Leaf, Pack, write_trees
from backplane.workspace.tree import (
    FILE_FLAGS,
    GIT_NAME,
    READ_BYTES,
    open_root,
    opened,
    printable,
    read_file,
    remove_tree,
)

PATCH_NAME: Final = "patch.diff"
RECORD_NAME: Final = "patch.json"
BLOBS_NAME: Final = "patch.blobs"
CHECKPOINTS_NAME: Final = "checkpoints"

_HEAD_LINES: Final = 3
"""Lines of the record with its brace, root and mode."""

RECORD_BYTES_MAX: Final = 256 << 20
"""Longest record that is read back; a million changed files are less."""

NAMES_MAX: Final = 10
"""Files that an error names; the rest is a number."""

CODE: Final = "execution_workspace_error"

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


class Draft:
    """The patch in the making, in the run's folder; where it fails nothing half-made stays."""

    def __init__(self, run_dir: Path, scratch: Scratch) -> None:
        self.path = run_dir / PATCH_NAME
        self.bytes = 0
        self.sha256 = hashlib.sha256().hexdigest()
        self.record_sha256 = ""
        self._run_dir = run_dir
        self._blobs = run_dir / BLOBS_NAME
        self._scratch = scratch
        self._pack: Pack | None = None
        """The contents for git; None until the first."""
        self._done = False

    def __enter__(self) -> Draft:
        remove_tree(self._blobs)
        for name in (PATCH_NAME, RECORD_NAME):
            # A link that somebody left here would be written through.
            (self._run_dir / name).unlink(missing_ok=True)
        self._blobs.mkdir(mode=0o700)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pack is not None:
            self._pack.close()
        if not self._done:
            remove_tree(self._blobs)
            self.path.unlink(missing_ok=True)

    def take(self, leaf: Leaf, data: bytes) -> None:
        """Keep one content, before or after."""
        self._pack = self._pack or self._scratch.pack()
        self._pack.add("blob", data, leaf.oid)
        blob = self._blobs / leaf.oid.hex()
        if not blob.exists():
            blob.write_bytes(data)

    def finish(self, root: Path, mode: str, before: Mapping[str, Leaf], after: Mapping[str, Leaf]) -> list[DiffRow]:
        """Write the patch and its record; return what git made of the difference."""
        rows: list[DiffRow] = []
        if before or after:
            self._pack = self._pack or self._scratch.pack()
            # Trees of the changed files alone make the same patch as the whole ones would.
            trees = write_trees(self._pack, before), write_trees(self._pack, after)
            self._scratch.finish(self._pack)
            rows = write_patch(self._scratch, *trees, self.path)
            with self.path.open("rb") as file:
                self.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            self.bytes = self.path.stat().st_size
        else:
            self.path.write_bytes(b"")
        renames = {os.fsdecode(row.path): os.fsdecode(row.old_path) for row in rows if row.old_path is not None}
        head: dict[str, str | int] = {"root": str(root), "mode": mode, "bytes": self.bytes, "sha256": self.sha256}
        self.record_sha256 = write_record(self._run_dir / RECORD_NAME, head, before, after, renames)
        self._done = True
        return rows


def write_record(
    path: Path,
    head: Mapping[str, str | int],
    before: Mapping[str, Leaf],
    after: Mapping[str, Leaf],
    renames: Mapping[str, str] | None = None,
) -> str:
    """Write what each path was and is; return the SHA-256 of the record."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in _record(head, before, after, renames or {}):
            data = piece.encode("ascii")
            digest.update(data)
            file.write(data)
    return digest.hexdigest()


def _record(
    head: Mapping[str, str | int], before: Mapping[str, Leaf], after: Mapping[str, Leaf], renames: Mapping[str, str]
) -> Iterator[str]:
    """The record a piece at a time, as the whole takes a few times the space of its paths."""
    # The standard library's writer, because names that are not UTF-8 are lone surrogates here.
    yield json.dumps(head, indent=1).removesuffix("\n}") + ',\n "files": ['
    comma = ""
    for path in sorted({*before, *after}):
        fact = target_json(PathTarget(path, before.get(path), after.get(path)))
        yield f"{comma}\n  {json.dumps(fact)}"
        comma = ","
    yield f'\n ],\n "renames": {json.dumps(renames)}\n}}\n'


def target_json(target: PathTarget) -> dict[str, Any]:
    """Return a path with its contents as it is written to a record."""
    return {"path": target.path, "before": _leaf_json(target.before), "after": _leaf_json(target.after)}


def _leaf_json(leaf: Leaf | None) -> dict[str, str] | None:
    return None if leaf is None else {"mode": f"{leaf.mode:06o}", "blob": leaf.oid.hex()}


class PathTarget(msgspec.Struct, frozen=True):
    """What one path was at the start of the run and shall be."""

    path: str
    before: Leaf | None
    after: Leaf | None


class SavedPatch(msgspec.Struct, frozen=True):
    """A run's patch as it was kept."""

    root: str
    mode: str
    targets: dict[str, PathTarget]
    renames: dict[str, str]
    """New path → old path."""
    blobs: tuple[Path, ...]
    """Folders of the kept contents, by their names."""

    def content(self, leaf: Leaf) -> bytes:
        """A kept content whole. Raises as `pieces`."""
        return b"".join(self.pieces(leaf))

    def pieces(self, leaf: Leaf) -> Iterator[bytes]:
        """A kept content, a piece at a time; whether it is the right one shows after the last.

        Raises:
            OSError, WorkspaceError: `execution_workspace_error`, it is not what was kept.
        """
        places = [folder / leaf.oid.hex() for folder in self.blobs]
        path = next(filter(os.path.lexists, places), places[0])
        with opened(open_root(path.parent)) as folder, opened(os.open(path.name, FILE_FLAGS, dir_fd=folder)) as file:
            facts = os.fstat(file)
            if not stat.S_ISREG(facts.st_mode) or facts.st_size > BLOB_BYTES_MAX:
                raise _not_kept(path, BLOB_BYTES_MAX)
            digest = yield from hashed(file, facts.st_size)
        if digest != leaf.oid:
            raise failure("a kept file of the run is not what was kept", "the run's folder was changed by somebody")


def hashed(file: int, size: int) -> Generator[bytes, None, bytes]:
    """An open file's content up to this size, a piece at a time; returns git's name of it. Raises OSError."""
    digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    while size > 0 and (piece := os.read(file, min(size, READ_BYTES))):
        size -= len(piece)
        digest.update(piece)
        yield piece
    return digest.digest()


def failure(fact: str, hint: str | None = None) -> WorkspaceError:
    return WorkspaceError(CODE, fact, hint=hint)


def names(paths: list[str]) -> str:
    shown = ", ".join(f"'{printable(path)}'" for path in paths[:NAMES_MAX])
    return shown + (f" and {len(paths) - NAMES_MAX} more" if len(paths) > NAMES_MAX else "")


def mode_of(run_dir: Path) -> str | None:
    """Return the workspace mode that the record's head names; None where there is no such record."""
    try:
        with (run_dir / RECORD_NAME).open(encoding="utf-8", errors="replace") as file:
            head = list(islice(file, _HEAD_LINES))
    except OSError:
        return None
    found = (line.strip().removeprefix('"mode": "').split('"')[0] for line in head if line.startswith(' "mode": "'))
    return next(found, None)


def load(run_dir: Path, record_sha256: str | None = None) -> SavedPatch:
    """Read the record and check it against the patch.

    Args:
        record_sha256: of the record as the receipt has it; None for a receipt that does not say.

    Raises:
        WorkspaceError: `execution_workspace_error`; record or patch are not what the run left.
        OSError: one of them cannot be read.
    """
    try:
        data = read_kept(run_dir / RECORD_NAME, RECORD_BYTES_MAX)
        if record_sha256 is not None and hashlib.sha256(data).hexdigest() != record_sha256:
            hint = "look what else was changed: backplane receipts verify"
            raise failure(f"'{RECORD_NAME}' is not the one that the receipt names; nothing was changed", hint)
        record, saved = read_record(data, run_dir / BLOBS_NAME)
        expected, expected_bytes = record["sha256"], record["bytes"]
    except FileNotFoundError:
        raise failure(f"there is no patch in '{printable(str(run_dir))}'", "name a run that has finished") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise failure(f"'{RECORD_NAME}' of the run cannot be read: {type(error).__name__}") from error
    with open(os.open(run_dir / PATCH_NAME, FILE_FLAGS), "rb") as file:
        # Its size first: a pipe has none, and a hole is not worth reading.
        same = os.fstat(file.fileno()).st_size == expected_bytes
        if not same or hashlib.file_digest(file, "sha256").hexdigest() != expected:
            raise failure(f"'{PATCH_NAME}' is not what the run left", "to use an edited patch, give it to 'git apply'")
    return saved


def read_record(data: bytes, blobs: Path) -> tuple[dict[str, Any], SavedPatch]:
    """Read what `write_record` wrote; return it as it is, too.

    Raises:
        WorkspaceError: `execution_workspace_error`, it names what is no file of a workspace.
        ValueError, LookupError, TypeError, RecursionError: it is no record.
    """
    record: dict[str, Any] = json.loads(data)
    targets = {row.path: row for row in map(read_target, record["files"])}
    return record, SavedPatch(record["root"], record["mode"], targets, dict(record["renames"]), (blobs,))


def read_kept(path: Path, bytes_max: int) -> bytes:
    """A file of a run's folder, as far as it is one. Raises OSError, WorkspaceError."""
    with opened(open_root(path.parent)) as folder:
        found = read_file(folder, path.name, bytes_max)
    if found is None:
        raise _not_kept(path, bytes_max)
    return found[0]


def _not_kept(path: Path, bytes_max: int) -> WorkspaceError:
    fact = f"'{path.name}' of the run is no file of at most {bytes_max} bytes"
    return failure(fact, "the run's folder was changed by somebody")


def read_target(row: Any) -> PathTarget:
    """Read what `target_json` returned. Raises as `read_record`."""
    check_path(row["path"])
    return PathTarget(row["path"], _read_leaf(row["before"]), _read_leaf(row["after"]))


def _read_leaf(value: Any) -> Leaf | None:
    return None if value is None else Leaf(int(value["mode"], 8), bytes.fromhex(value["blob"]))


def check_path(path: str) -> None:
    """Refuse what would leave the root, or write into a repository."""
    parts = path.split("/")
    if "\0" in path or any(part in ("", ".", "..") or part.lower() == GIT_NAME for part in parts):
        raise failure(f"the patch names '{printable(path)}', which is not a file of the workspace", "do not trust it")
