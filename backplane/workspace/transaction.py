"""Files of a workspace exchanged for others, all of them or none, whoever is killed meanwhile.

What shall be done is written down beside the run's folder before the first file moves. Whoever comes
after a maker that died puts everything back, or, when all was in place, only tidies up: `settle`.
What is exchanged for what is worked out in `apply`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from backplane.errors import StoreError, WorkspaceError
from backplane.process.locks import try_lock
from backplane.workspace.copying import remove_tree, write_all
from backplane.workspace.moves import Move, PathState, Seen, Undone, prepare, read_intent, sync, undo
from backplane.workspace.patch import failure, names
from backplane.workspace.tree import FILE_FLAGS, open_folder, open_root, opened, printable, read_all, unguessable

INTENT_BYTES_MAX: Final = 256 << 20
"""Read back of an intent at most; a million files of long names are less."""

WHERE_BYTES_MAX: Final = 64 << 10
"""Longest first line of a mark: a path of the longest, each byte escaped, is under 25 KiB."""

_BEGUN, _DONE = ".begun", ".done"
_MARK_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DEPOT: Final = re.compile(r"\.backplane-[0-9a-f]{16}")


class _Where(msgspec.Struct):
    """The first line of a mark."""

    root: str
    depot: str


class Settled(msgspec.Struct, frozen=True):
    """What became of an exchange whose maker died."""

    run: str
    root: str
    applied: bool
    """All of it was in place; otherwise all of it was put back."""
    kept: tuple[str, ...] = ()
    """Paths that somebody has changed since: left as they are."""
    problem: str = ""
    """Why nothing could be done about it yet."""

    def describe(self) -> str:
        """Say it on one line, with the next step."""
        root, fact = printable(self.root), f"run {self.run}: putting its patch into"
        if self.problem:
            return f"{fact} '{root}' was cut off and cannot be undone yet: {self.problem}; the next start tries again"
        if self.applied:
            return f"{fact} '{root}' was cut off at its very end; the patch is applied"
        if self.kept:
            left = "what was there before lies in its folder .backplane-*"
            return f"{fact} '{root}' was cut off; undone but for {names(list(self.kept))}, changed since; {left}"
        return f"{fact} '{root}' was cut off; all is as before: apply it again"


@contextlib.contextmanager
def exchange(run_dir: Path, where: Path, root: int, seen: Seen, results: Mapping[str, PathState]) -> Iterator[None]:
    """Put every new file into its place, each old one out of it; a failure moves all back.

    In the block all is in place, and only a later start says so where we die; after it the old files go.

    Raises:
        OSError, WorkspaceError: after everything was put back, or with what could not be: then the mark stays
            for `settle`, and the old files where they are.
    """
    with _begin(run_dir) as (mark, fd):
        name = f".backplane-{unguessable()}"
        done = mark.with_suffix(_DONE)
        stuck: tuple[str, ...] = ()
        try:
            _note(fd, {"root": str(where), "depot": name})
            os.mkdir(name, 0o700, dir_fd=root)
            with opened(open_folder(root, name)) as depot:
                intent = prepare(root, depot, seen, results)
                _note(fd, msgspec.to_builtins(intent))
                _sync_folder(mark.parent)
                try:
                    Move(root, depot, seen).all(intent.steps)
                    sync(root, intent)
                    os.rename(mark, done)
                    _sync_folder(mark.parent)
                except BaseException:
                    # An interrupt must not leave half of a patch either.
                    stuck = tuple(step.path for step in intent.steps)
                    with contextlib.suppress(FileNotFoundError):
                        os.rename(done, mark)
                    undone = undo(root, depot, intent)
                    stuck = tuple(sorted({*undone.kept, *undone.failed}))
                    raise
        except BaseException as error:
            if stuck:
                fact = f"the patch cannot be applied, and not all of it was put back: {names(list(stuck))}"
                left = f"what was there before lies in '{printable(str(where / name))}'; the next start tries again"
                raise failure(f"{fact}; {left}", "let nobody else change this folder meanwhile") from error
            with contextlib.suppress(WorkspaceError):
                remove_tree(where / name)
                mark.unlink(missing_ok=True)
            raise
        # Still under the lock: who looks meanwhile shall not take it for one that was cut off.
        try:
            yield
        finally:
            _tidy(done)


def _tidy(done: Path) -> None:
    """Remove the old files, which nobody needs any more, and the mark."""
    with contextlib.suppress(WorkspaceError, FileNotFoundError):
        head = _read(done)[0]
        remove_tree(Path(head["root"]) / head["depot"])
        done.unlink()


def pending(runs: Path) -> list[Path]:
    """Marks of exchanges that are under way or were cut off; what is no file is none.

    Raises:
        StoreError: `receipt_store_failed` when their folder is closed to us.
    """
    try:
        with os.scandir(runs) as entries:
            marks = [entry for entry in entries if entry.name.endswith((_BEGUN, _DONE))]
            return sorted(Path(entry.path) for entry in marks if entry.is_file(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        fact = f"{runs} cannot be looked at: {error.strerror}"
        raise StoreError("receipt_store_failed", fact, hint="give this user the state directory") from error


def unsettled(runs: Path) -> list[str]:
    """Exchanges that were cut off and wait to be settled, a line each. Changes nothing."""
    found = []
    for mark in pending(runs):
        with contextlib.suppress(FileNotFoundError), opened(os.open(mark, os.O_RDONLY | _MARK_FLAGS)) as fd:
            if try_lock(fd) and _is_at(mark, fd):
                found.append(f"run {_run_of(mark)}: putting its patch{_into(mark)} was cut off")
    return found


def _is_at(mark: Path, fd: int) -> bool:
    """Whether a mark is still where it was opened: its maker may have ended meanwhile. Raises FileNotFoundError."""
    return os.path.samestat(os.fstat(fd), os.stat(mark, follow_symlinks=False))


def _into(mark: Path) -> str:
    root = _root_of(mark)
    return f" into '{printable(root)}'" if root else ""


def _root_of(mark: Path) -> str:
    """The workspace that a mark names; empty where it cannot be read, or names none yet."""
    try:
        lines = _read(mark, where_alone=True)
    except (OSError, WorkspaceError):
        return ""
    return str(lines[0]["root"]) if lines else ""


def _run_of(mark: Path) -> str:
    return mark.name.removeprefix(".").removesuffix(mark.suffix)


def marks_of(run_dir: Path) -> list[Path]:
    """Those of one run."""
    marks = (run_dir.with_name(f".{run_dir.name}{end}") for end in (_BEGUN, _DONE))
    return [mark for mark in marks if os.path.isfile(mark) and not os.path.islink(mark)]


def settle(marks: Iterable[Path], applied: Callable[[str, int], None] = lambda run, files: None) -> list[Settled]:
    """Undo or finish every exchange whose maker is dead.

    Args:
        applied: called with run and number of files for one that was complete, before its traces go.

    Returns:
        What was done, or could not be.
    """
    found = []
    for mark in marks:
        with contextlib.suppress(FileNotFoundError), opened(os.open(mark, os.O_RDWR | _MARK_FLAGS)) as fd:
            if not (try_lock(fd) and _is_at(mark, fd)):
                continue
            try:
                found += _settle(mark, _run_of(mark), applied)
            except (OSError, ValueError, LookupError, WorkspaceError) as error:
                root = _root_of(mark) or str(mark)
                found.append(Settled(_run_of(mark), root, applied=False, problem=str(error)))
    return found


def _settle(mark: Path, run: str, applied: Callable[[str, int], None]) -> list[Settled]:
    lines = _read(mark)
    if not lines:
        # Nothing was touched before the first line was whole.
        mark.unlink()
        return []
    where, name = Path(lines[0]["root"]), lines[0]["depot"]
    if not (_DEPOT.fullmatch(name) and where.is_absolute() and ".." not in where.parts):
        raise failure(f"{mark} is none of ours", "remove it")
    if len(lines) == 1:
        remove_tree(where / name)
        mark.unlink()
        return []
    try:
        intent = read_intent(lines[1])
    except (ValueError, WorkspaceError) as error:
        raise failure(f"{mark} is none of ours: {getattr(error, 'message', error)}", "remove it") from error
    if mark.suffix == _DONE:
        applied(run, len(intent.steps))
        remove_tree(where / name)
        mark.unlink()
        return [Settled(run, str(where), applied=True)]
    with opened(open_root(where)) as root:
        try:
            with opened(open_folder(root, name)) as depot:
                undone = undo(root, depot, intent)
        except FileNotFoundError:
            undone = Undone()  # It was all done already.
        for path, refused in undone.failed.items():
            raise failure(f"'{printable(path)}': {refused.strerror}") from refused
        if not undone.kept:
            remove_tree(where / name)
    mark.unlink()
    return [Settled(run, str(where), applied=False, kept=undone.kept)]


# The mark ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _begin(run_dir: Path) -> Iterator[tuple[Path, int]]:
    mark = run_dir.with_name(f".{run_dir.name}{_BEGUN}")
    try:
        fd = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise failure("another command is putting this patch into its place", "try again when it has ended") from None
    with opened(fd):
        if not try_lock(fd) or not os.fstat(fd).st_nlink:
            raise failure("another command is looking after this patch", "try again")
        yield mark, fd


def _note(fd: int, fact: dict[str, Any]) -> None:
    # The standard library's writer, because names that are not UTF-8 are lone surrogates here.
    write_all(fd, json.dumps(fact).encode() + b"\n")
    os.fsync(fd)


def _read(mark: Path, *, where_alone: bool = False) -> list[dict[str, Any]]:
    """The whole lines of a mark; the first names a root and a depot. Raises OSError, WorkspaceError.

    Args:
        where_alone: look at no other line.
    """
    with opened(open_root(mark.parent)) as folder, opened(os.open(mark.name, FILE_FLAGS, dir_fd=folder)) as handle:
        data = _lines_of(handle, where_alone=where_alone)
    try:
        lines = [json.loads(line) for line in data.split(b"\n")[:-1]]
        if lines:
            msgspec.convert(lines[0], _Where)
    except (ValueError, RecursionError) as error:
        raise failure(f"{mark} is none of ours: {type(error).__name__}", "remove it") from error
    return lines


def _lines_of(handle: int, *, where_alone: bool) -> bytes:
    """The bytes of a mark as far as they are lines; a host may have made it of holes, so the rest is not read."""
    facts = os.fstat(handle)
    if not stat.S_ISREG(facts.st_mode) or facts.st_size > INTENT_BYTES_MAX:
        return b"?\n"
    head = os.pread(handle, WHERE_BYTES_MAX, 0)
    if b"\n" not in head and len(head) == WHERE_BYTES_MAX:
        return b"?\n"
    # An intent is written with the newline at its end, or its writing was cut off and nothing was touched.
    if where_alone or os.pread(handle, 1, max(facts.st_size - 1, 0)) != b"\n":
        return head[: head.find(b"\n") + 1]
    return read_all(handle, facts.st_size)


def _sync_folder(path: Path) -> None:
    with opened(open_root(path)) as handle:
        os.fsync(handle)
