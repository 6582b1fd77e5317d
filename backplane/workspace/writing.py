"""Writes planned contents into a folder, file by file; a write that was cut off can be continued.

Before the first file changes, a mark lists every path with its old and new content. The mark is a file beside the run's
folder; it is removed once all files are in place. New contents are first written under temporary names, so that a full
disk or a missing right changes no file.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from backplane.errors import BackplaneError, StoreError
from backplane.process.locks import try_lock
from backplane.workspace.copying import write_all
from backplane.workspace.objects import LINK, PROGRAM, Leaf
from backplane.workspace.patch import PathTarget, checked, failure
from backplane.workspace.repo import Repo
from backplane.workspace.tree import folders_above, look_at, opened, parent, printable

SYNC_EACH_MAX: Final = 200
"""Maximum files or folders that are synced one by one, each in some ms; for more, one sync of all disks is faster."""

_END: Final = ".applying"
_MARK_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW

Command = Literal["apply", "rewind"]
"""The command that writes; the same command continues a write that was cut off."""

Seen = Mapping[str, os.stat_result | None]
"""Path → facts of its file when the write was planned, None without one; a file that has changed is not replaced."""


class Writing(msgspec.Struct, frozen=True):
    """A planned write."""

    command: Command
    root: str
    token: str
    """Part of the names of the temporary files."""
    targets: tuple[PathTarget, ...]

    @property
    def fresh(self) -> Iterator[tuple[str, Leaf, str]]:
        """Each path that gets new content, with its leaf and the name of its temporary file."""
        for number, target in enumerate(self.targets):
            if target.after is not None:
                yield target.path, target.after, f".backplane-{self.token}-{number}"

    def describe(self, run: str) -> str:
        """Return one line that names the write that was cut off, and the command that continues it."""
        into = "putting its patch into" if self.command == "apply" else "rewinding"
        fact = f"run {run}: {into} '{printable(self.root)}' was cut off, and some files may be written"
        return f"{fact}: `git status` there shows them, `backplane {self.command} {run[:8]}` goes on"


# The mark -------------------------------------------------------------------------------------------------------------


class Mark:
    """The locked mark of one run's write; if it has no whole line, no file was written yet."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    def write(self, writing: Writing) -> None:
        """Store a planned write. Raises OSError."""
        # The standard library's writer, because names that are not UTF-8 contain lone surrogates.
        data = json.dumps(msgspec.to_builtins(writing)).encode() + b"\n"
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        write_all(self._fd, data)
        os.fsync(self._fd)
        _sync_folder(self.path.parent)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


@contextlib.contextmanager
def marked(run_dir: Path) -> Iterator[Mark]:
    """Lock the mark of a run's write until the block ends, and then remove it if it is empty.

    Raises:
        WorkspaceError: `execution_workspace_error`, another command writes this run's result.
    """
    path = mark_of(run_dir)
    with opened(os.open(path, _MARK_FLAGS, 0o600)) as fd:
        if not try_lock(fd) or not os.fstat(fd).st_nlink:
            raise failure("another command is putting this patch into its place", "try again when it has ended")
        try:
            yield Mark(path, fd)
        finally:
            if not os.fstat(fd).st_size:
                path.unlink(missing_ok=True)


def mark_of(run_dir: Path) -> Path:
    """Return the path of the file that shows an unfinished write of a run's result."""
    return run_dir.with_name(f".{run_dir.name}{_END}")


def read_mark(path: Path) -> Writing | None:
    """Return the write in a mark, which was cut off; None if there is no mark, or no file was written yet.

    Raises:
        WorkspaceError: `execution_workspace_error`, the mark is damaged.
    """
    try:
        line, whole, _ = path.read_bytes().partition(b"\n")
        writing = msgspec.convert(json.loads(line), Writing) if whole else None
        for target in writing.targets if writing is not None else ():
            checked(target.path)
        return writing
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        hint = "look at the workspace with `git status`, and then remove this file"
        raise failure(f"'{printable(str(path))}' cannot be read: {type(error).__name__}", hint) from error


def cut_off(runs: Path) -> list[str]:
    """Return a line for each write that was cut off and not continued yet.

    Raises:
        StoreError: `receipt_store_failed`, the folder cannot be read.
    """
    found = []
    try:
        marks = sorted(name for name in os.listdir(runs) if name.endswith(_END))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        fact = f"{runs} cannot be read: {error.strerror}"
        raise StoreError("receipt_store_failed", fact, hint="give this user the state directory") from error
    for name in marks:
        run = name.removeprefix(".").removesuffix(_END)
        with contextlib.suppress(OSError), opened(os.open(runs / name, os.O_RDONLY | os.O_CLOEXEC)) as fd:
            if not try_lock(fd) or not os.fstat(fd).st_nlink:
                continue
            try:
                writing = read_mark(runs / name)
            except BackplaneError as error:
                found.append(f"run {run}: {error}")
            else:
                found += [writing.describe(run)] if writing is not None else []
    return found


# The files -----------------------------------------------------------------------------------------------------------


class FileWriter:
    """Writes the files of a planned write: first `prepare`, then `put`; `clean` after a failure."""

    def __init__(self, writing: Writing, seen: Seen) -> None:
        self._root, self._writing, self._seen = writing.root, writing, seen
        self._temporary: dict[str, str] = {}
        """Path that gets new content → path of its temporary file."""

    def prepare(self, repo: Repo) -> None:
        """Write all new contents under temporary names.

        Raises:
            OSError, WorkspaceError: a content cannot be written, or a file has changed since the write was planned.
        """
        fresh = list(self._writing.fresh)
        each = len(fresh) <= SYNC_EACH_MAX
        for path, leaf, name in fresh:
            with _about(path):
                self._temporary[path] = f"{self._root}/{self._deepest(path)}{name}"
                _write(self._temporary[path], leaf, repo, self._seen.get(path), sync=each)
        if not each:
            os.sync()
        for target in self._writing.targets:
            self._require_same(target.path)

    def put(self) -> None:
        """Remove the files without new content, and move the others from their temporary names to their own.

        Raises:
            OSError, WorkspaceError: a file cannot be removed or moved; some files may have been changed.
        """
        targets = self._writing.targets
        for target in sorted(targets, key=lambda target: target.path, reverse=True):
            if target.after is None and self._seen.get(target.path) is not None:
                with _about(target.path):
                    self._remove(target.path)
        for path, temporary in self._temporary.items():
            with _about(path):
                self._move(temporary, path)
        folders = {parent(target.path) for target in targets}
        if len(folders) > SYNC_EACH_MAX:
            os.sync()
            return
        for folder in folders:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                _sync_folder(f"{self._root}/{folder}")

    def clean(self) -> None:
        """Remove the temporary files, also those of a write that was cut off."""
        for path, _, name in self._writing.fresh:
            for folder in ("", *(f"{above}/" for above in folders_above(path))):
                if look_at(self._root, f"{folder}{name}") is not None:
                    with contextlib.suppress(OSError):
                        os.unlink(f"{self._root}/{folder}{name}")

    def _deepest(self, path: str) -> str:
        """Return the deepest existing folder above a path, with a slash; a file there is on the path's disk."""
        there = ""
        for folder in folders_above(path):
            facts = look_at(self._root, folder)
            if facts is None or not stat.S_ISDIR(facts.st_mode):
                break
            there = f"{folder}/"
        return there

    def _remove(self, path: str) -> None:
        """Remove a file, and the folders that this leaves empty, as git does."""
        self._require_same(path)
        os.unlink(f"{self._root}/{path}")
        with contextlib.suppress(OSError):
            while path := parent(path)[:-1]:
                os.rmdir(f"{self._root}/{path}")

    def _move(self, temporary: str, path: str) -> None:
        """Move a temporary file to its own name; missing folders are made."""
        for above in folders_above(path):
            if look_at(self._root, above) is None:
                os.mkdir(f"{self._root}/{above}")
        self._require_same(path)
        with contextlib.suppress(OSError):
            os.rmdir(f"{self._root}/{path}")  # An empty folder may be left there by a write that was cut off.
        os.rename(temporary, f"{self._root}/{path}")

    def _require_same(self, path: str) -> None:
        """Raise WorkspaceError if the file at a path is not the same as when the write was planned."""
        now = look_at(self._root, path)
        now = None if now is not None and stat.S_ISDIR(now.st_mode) else now
        if _identity(now) != _identity(self._seen.get(path)):
            raise failure(f"'{printable(path)}' was changed just now", "look at it, and try again")


def _write(path: str, leaf: Leaf, repo: Repo, old: os.stat_result | None, *, sync: bool) -> None:
    if leaf.mode == LINK:
        os.symlink(os.fsdecode(repo.read(leaf.oid)), path)
        return
    rights = 0o777 if leaf.mode == PROGRAM else 0o666
    with opened(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, rights)) as file:
        for piece in repo.pieces(leaf.oid):
            write_all(file, piece)
        if old is not None and stat.S_ISREG(old.st_mode):
            with contextlib.suppress(PermissionError):
                os.fchown(file, old.st_uid, old.st_gid)
            os.fchmod(file, _runnable(old.st_mode & 0o777, leaf.mode == PROGRAM))
        if sync:
            os.fsync(file)


def _runnable(old: int, program: bool) -> int:
    """Return a file's rights, with the rights to execute it added or removed."""
    if bool(old & 0o100) == program:
        return old
    return old | (old & 0o444) >> 2 if program else old & ~0o111


@contextlib.contextmanager
def _about(path: str) -> Iterator[None]:
    """Replace the file name in an OSError, so that it names the file and not its temporary one."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def _identity(facts: os.stat_result | None) -> Sequence[int] | None:
    return None if facts is None else (facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_mode)


def _sync_folder(path: str | Path) -> None:
    with opened(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as handle:
        os.fsync(handle)
