"""Files of a workspace exchanged for others, all of them or none, whoever is killed meanwhile.

What shall be done is written down beside the run's folder before the first file moves. Whoever comes
after a maker that died puts everything back, or, when all was in place, only tidies up: `settle`.
What is exchanged for what is worked out in `apply`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from backplane.errors import StoreError, WorkspaceError
from backplane.process.locks import try_lock
from backplane.workspace.copying import write_all
from backplane.workspace.moves import Intent, Move, PathState, Seen, Undone, prepare, sync, undo
from backplane.workspace.patch import failure, names
from backplane.workspace.tree import open_folder, open_root, opened, printable, remove_tree, unguessable

_BEGUN, _DONE = ".begun", ".done"
_MARK_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC


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
        intent = Intent(str(where), f".backplane-{unguessable()}")
        done = mark.with_suffix(_DONE)
        stuck: tuple[str, ...] = ()
        try:
            _note(fd, intent)
            os.mkdir(intent.depot, 0o700, dir_fd=root)
            with opened(open_folder(root, intent.depot)) as depot:
                intent = prepare(intent, root, depot, seen, results)
                _note(fd, intent)
                _sync_folder(mark.parent)
                try:
                    Move(root, depot, seen, intent).all()
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
                lies = printable(str(where / intent.depot))
                left = f"what was there before lies in '{lies}'; the next start tries again"
                raise failure(f"{fact}; {left}", "let nobody else change this folder meanwhile") from error
            with contextlib.suppress(WorkspaceError):
                _tidy(mark, intent)
            raise
        # Still under the lock: who looks meanwhile shall not take it for one that was cut off.
        try:
            yield
        finally:
            with contextlib.suppress(WorkspaceError):
                _tidy(done, intent)


def _tidy(mark: Path, intent: Intent) -> None:
    """Remove the old files, which nobody needs any more, and the mark. Raises WorkspaceError."""
    remove_tree(Path(intent.root) / intent.depot)
    mark.unlink(missing_ok=True)


def pending(runs: Path) -> list[Path]:
    """Marks of exchanges that are under way or were cut off.

    Raises:
        StoreError: `receipt_store_failed` when their folder is closed to us.
    """
    try:
        return sorted(runs / name for name in os.listdir(runs) if name.endswith((_BEGUN, _DONE)))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        fact = f"{runs} cannot be looked at: {error.strerror}"
        raise StoreError("receipt_store_failed", fact, hint="give this user the state directory") from error


def marks_of(run_dir: Path) -> list[Path]:
    """Those of one run."""
    return list(filter(Path.exists, (run_dir.with_name(f".{run_dir.name}{end}") for end in (_BEGUN, _DONE))))


def _cut_off(marks: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """Those whose maker is dead, and their runs, each under its lock while it is looked at."""
    for mark in marks:
        with contextlib.suppress(FileNotFoundError), opened(os.open(mark, _MARK_FLAGS)) as fd:
            # Its maker may have ended since it was opened.
            if try_lock(fd) and os.path.samestat(os.fstat(fd), os.stat(mark)):
                yield mark, mark.name.removeprefix(".").removesuffix(mark.suffix)


def unsettled(runs: Path) -> list[str]:
    """Exchanges that were cut off and wait to be settled, a line each. Changes nothing."""
    found = []
    for mark, run in _cut_off(pending(runs)):
        intent = None
        with contextlib.suppress(ValueError):
            intent = _read(mark)
        where = f" into '{printable(intent.root)}'" if intent else ""
        found.append(f"run {run}: putting its patch{where} was cut off")
    return found


def settle(marks: Iterable[Path], applied: Callable[[str, int], None] = lambda run, files: None) -> list[Settled]:
    """Undo or finish every exchange whose maker is dead.

    Args:
        applied: called with run and number of files for one that was complete, before its traces go.

    Returns:
        What was done, or could not be.
    """
    found = []
    for mark, run in _cut_off(marks):
        root = str(mark)
        try:
            intent = _read(mark)
            if intent is None:
                mark.unlink()  # Nothing was touched before its first line was whole.
                continue
            root = intent.root
            if mark.suffix == _DONE:
                applied(run, len(intent.steps))
                _tidy(mark, intent)
                found.append(Settled(run, root, applied=True))
            elif intent.steps:
                found.append(Settled(run, root, applied=False, kept=_undo(mark, intent)))
            else:
                _tidy(mark, intent)
        except (OSError, ValueError, WorkspaceError) as error:
            found.append(Settled(run, root, applied=False, problem=str(error)))
    return found


def _undo(mark: Path, intent: Intent) -> tuple[str, ...]:
    """Put everything back; returns what somebody has changed since, whose old files stay where they are."""
    undone = Undone()
    # Where there is no depot any more it was all done already.
    gone = contextlib.suppress(FileNotFoundError)
    with opened(open_root(Path(intent.root))) as root, gone, opened(open_folder(root, intent.depot)) as depot:
        undone = undo(root, depot, intent)
    for path, refused in undone.failed.items():
        raise failure(f"'{printable(path)}': {refused.strerror}") from refused
    mark.unlink() if undone.kept else _tidy(mark, intent)
    return undone.kept


# The mark ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _begin(run_dir: Path) -> Iterator[tuple[Path, int]]:
    mark = run_dir.with_name(f".{run_dir.name}{_BEGUN}")
    try:
        fd = os.open(mark, _MARK_FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise failure("another command is putting this patch into its place", "try again when it has ended") from None
    with opened(fd):
        if not try_lock(fd) or not os.fstat(fd).st_nlink:
            raise failure("another command is looking after this patch", "try again")
        yield mark, fd


def _note(fd: int, intent: Intent) -> None:
    # The standard library's writer, because names that are not UTF-8 are lone surrogates here.
    write_all(fd, json.dumps(msgspec.to_builtins(intent)).encode() + b"\n")
    os.fsync(fd)


def _read(mark: Path) -> Intent | None:
    """The last intent that was noted whole; None before the first one was."""
    whole = mark.read_bytes().split(b"\n")[:-1]
    return msgspec.convert(json.loads(whole[-1]), Intent) if whole else None


def _sync_folder(path: Path) -> None:
    with opened(open_root(path)) as handle:
        os.fsync(handle)
