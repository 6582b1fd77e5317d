"""Files moved between a workspace and a depot in it, and back again.

Every new file is written into the depot first; then old ones move out and new ones in. `Intent` says how,
and is enough to undo it, however far it came. Who writes that down, and when, is in `exchange`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from backplane.workspace.copying import write_all
from backplane.workspace.pack import LINK, PROGRAM
from backplane.workspace.patch import check_path, failure
from backplane.workspace.permissions import hand_over, plain_mode
from backplane.workspace.tree import names_repository, open_folder, opened, parent, printable, unguessable

SYNC_EACH_MAX: Final = 200
"""Files and folders forced to the disk one by one, some ms each; past it one call for all disks is quicker."""

Seen = Mapping[str, os.stat_result | None]
"""What was seen of each path when the exchange was planned; it must still be so when it is replaced."""


class PathState(msgspec.Struct, frozen=True):
    """What a path shall be: nothing, or a mode with content."""

    mode: int | None
    pieces: Callable[[], Iterable[bytes]] = tuple
    """Reads the content piece by piece, and raises where it is not what it was: all together may be large."""


class PathMove(msgspec.Struct, frozen=True):
    """One path, and the names of its old and its new file in the depot."""

    path: str
    old: str
    new: str | None
    made: tuple[int, ...] = ()
    """Inode, size and time of the new file; whoever changes it later makes it his own."""


class Intent(msgspec.Struct, frozen=True):
    """Everything that is needed to undo an exchange."""

    steps: tuple[PathMove, ...]
    made: tuple[str, ...]
    """Folders that the exchange makes, parents first."""
    dropped: dict[str, tuple[int, int, int]]
    """Folders that it may leave empty and remove: mode and owner, parents first."""


# Before anything moves -----------------------------------------------------------------------------------------------


def prepare(root: int, depot: int, seen: Seen, results: Mapping[str, PathState]) -> Intent:
    """Write every new file into the depot; the steps come in the order in which they are taken."""
    gone = sorted((path for path, result in results.items() if result.mode is None), reverse=True)
    fresh = sorted(path for path, result in results.items() if result.mode is not None)
    each = len(fresh) <= SYNC_EACH_MAX
    steps = [PathMove(path, f"old{number}", None) for number, path in enumerate(gone)]
    for number, path in enumerate(fresh, len(gone)):
        name = f"new{number}"
        with _written(depot, name, results[path]) as file:
            old = seen.get(path)
            if file is not None and old is not None and stat.S_ISREG(old.st_mode):
                hand_over(file, root, path, old, program=results[path].mode == PROGRAM)
            if file is not None and each:
                os.fsync(file)
        made = os.stat(name, dir_fd=depot, follow_symlinks=False)
        steps.append(PathMove(path, f"old{number}", name, _identity(made)))
    if each:
        os.fsync(depot)
    else:
        os.sync()
    return Intent(tuple(steps), _missing(root, fresh), _above(root, [path for path in gone if seen.get(path)]))


@contextlib.contextmanager
def _written(depot: int, name: str, result: PathState) -> Iterator[int | None]:
    """Write a new file, which is open in the block; None where it is a link."""
    if result.mode == LINK:
        os.symlink(os.fsdecode(b"".join(result.pieces())), name, dir_fd=depot)
        yield None
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    rights = 0o777 if result.mode == PROGRAM else 0o666
    with opened(os.open(name, flags, rights, dir_fd=depot)) as file:
        for piece in result.pieces():
            write_all(file, piece)
        yield file


def _folders(paths: Iterable[str]) -> list[str]:
    """All folders above these paths, parents first, with a slash at the end."""
    found = {path[: place + 1] for path in paths for place, letter in enumerate(path) if letter == "/"}
    return sorted(found)


def _missing(root: int, fresh: Sequence[str]) -> tuple[str, ...]:
    return tuple(folder for folder in _folders(fresh) if not _is_there(root, folder))


def _is_there(root: int, folder: str) -> bool:
    try:
        os.close(open_folder(root, folder))
    except OSError:
        return False
    return True


def _above(root: int, gone: Sequence[str]) -> dict[str, tuple[int, int, int]]:
    found: dict[str, tuple[int, int, int]] = {}
    for folder in _folders(gone):
        with contextlib.suppress(OSError), opened(open_folder(root, folder)) as handle:
            facts = os.fstat(handle)
            found[folder] = (plain_mode(handle), facts.st_uid, facts.st_gid)
    return found


# There and back ------------------------------------------------------------------------------------------------------


class Move:
    """Moves files between the workspace and the depot in it."""

    def __init__(self, root: int, depot: int, seen: Seen) -> None:
        self._root, self._depot, self._seen = root, depot, seen

    def all(self, steps: Sequence[PathMove]) -> None:
        """Take every step. Raises OSError, with the path that it is about."""
        for step in steps:
            try:
                self._take(step)
            except OSError as error:
                # A name in the depot, or in one folder, says nothing to anybody.
                raise OSError(error.errno, error.strerror, step.path) from error

    def _take(self, step: PathMove) -> None:
        if step.new is not None:
            self._put_in(step, step.new)
        elif self._seen.get(step.path) is not None:
            self._take_out(step)
            self._drop_empty(parent(step.path))

    def _take_out(self, step: PathMove) -> None:
        """Move what is at a path into the depot, if it is still what the plan saw."""
        folder, name = _split(step.path)
        with opened(open_folder(self._root, folder)) as handle:
            seen, facts = self._seen.get(step.path), os.stat(name, dir_fd=handle, follow_symlinks=False)
            if seen is not None and (_identity(seen), seen.st_mode) != (_identity(facts), facts.st_mode):
                raise failure(f"'{printable(step.path)}' was changed just now; nothing was applied", "try again")
            os.rename(name, step.old, src_dir_fd=handle, dst_dir_fd=self._depot)

    def _drop_empty(self, path: str) -> None:
        """Remove folders that the last deletion has left empty, as git does."""
        while path:
            folder, name = _split(path[:-1])
            with opened(open_folder(self._root, folder)) as handle:
                if not _remove_folder(handle, name):
                    return
            path = folder

    def _put_in(self, step: PathMove, new: str) -> None:
        """Move a new file from the depot to its place, whose old file goes to the depot first."""
        folder, name = _split(step.path)
        for path in _folders([step.path]):
            _make_folder(self._root, path)
        with opened(open_folder(self._root, folder)) as handle:
            if _exists(handle, name):
                self._take_out(step)
            try:
                # A link, because a rename would overwrite what somebody has put there this instant.
                os.link(new, name, src_dir_fd=self._depot, dst_dir_fd=handle, follow_symlinks=False)
            except FileExistsError:
                raise
            except OSError:
                os.rename(new, name, src_dir_fd=self._depot, dst_dir_fd=handle)


_IN_DEPOT: Final = re.compile(r"(?:old|new)[0-9]{1,9}")
_OWNER_MAX: Final = (1 << 32) - 1


def read_intent(fact: Any) -> Intent:
    """An intent as it was noted, which anybody may have written: it names nothing but what lies below its root.

    Raises:
        ValueError, WorkspaceError: it is none, or not one that `prepare` makes.
    """
    intent = msgspec.convert(fact, Intent)
    for step in intent.steps:
        check_path(step.path)
        # Printing refuses half a letter, which no path has, before anything is touched.
        if names_repository(printable(step.path)):
            raise failure(f"'{printable(step.path)}' belongs to a repository")
    names = [name for step in intent.steps for name in (step.old, step.new) if name is not None]
    folders = {*intent.made, *intent.dropped}
    fits = (
        all(map(_IN_DEPOT.fullmatch, names))
        and len(set(names)) == len(names)
        and folders <= set(_folders(step.path for step in intent.steps))
        and all(0 <= mode <= 0o7777 for mode, _, _ in intent.dropped.values())
        and all(0 <= id <= _OWNER_MAX for _, *ids in intent.dropped.values() for id in ids)
    )
    if not fits:
        raise failure("it is not one that we write")
    return intent


class Undone(msgspec.Struct, frozen=True):
    """What became of an exchange that was undone."""

    kept: tuple[str, ...] = ()
    """Paths that somebody keeps from it: changed since, or taken by another file."""
    failed: Mapping[str, OSError] = {}
    """Paths that the system kept from it, which may be tried again; everything else was put back."""


def undo(root: int, depot: int, intent: Intent) -> Undone:
    """Put everything back, however far it came; a step that fails keeps no other one from being done."""
    failed: dict[str, OSError] = {}

    def each(path: str, act: Callable[..., object], *arguments: object) -> None:
        try:
            _at(root, path, act, *arguments)
        except OSError as error:
            failed.setdefault(path, error)

    for step in reversed(intent.steps):
        if step.new is not None and not _waits(depot, step.new):
            each(step.path, _unlink, step.made)
    for path in reversed(intent.made):
        each(path[:-1], _remove_folder)
    for path, (mode, owner, group) in intent.dropped.items():
        each(path[:-1], _restore_folder, depot, mode, owner, group)
    for step in intent.steps:
        if _exists(depot, step.old):
            each(step.path, _bring_back, depot, step.old)
    kept = (step.path for step in intent.steps if _exists(depot, step.old) or _lingers(depot, step))
    return Undone(tuple(sorted(path for path in kept if path not in failed)), failed)


def _at(root: int, path: str, act: Callable[..., object], *arguments: object) -> None:
    """Act on a name in its folder, unless there is no such folder any more. Raises OSError."""
    folder, name = _split(path)
    try:
        handle = open_folder(root, folder)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return
        raise
    with opened(handle):
        act(handle, name, *arguments)


def _bring_back(folder: int, name: str, depot: int, old: str) -> None:
    if not _exists(folder, name):
        os.rename(old, name, src_dir_fd=depot, dst_dir_fd=folder)


def _unlink(folder: int, name: str, made: tuple[int, ...]) -> None:
    """Remove a new file that is still what was made."""
    with contextlib.suppress(FileNotFoundError):
        if _is(os.stat(name, dir_fd=folder, follow_symlinks=False), made):
            os.unlink(name, dir_fd=folder)


def _waits(depot: int, new: str) -> bool:
    """Whether a new file has never left the depot: then its place need not even be looked at."""
    return _exists(depot, new) and os.stat(new, dir_fd=depot, follow_symlinks=False).st_nlink == 1


def _lingers(depot: int, step: PathMove) -> bool:
    """Whether the new file is still as it was made in a place that cannot be reached just now."""
    if step.new is None or not _exists(depot, step.new):
        return False
    facts = os.stat(step.new, dir_fd=depot, follow_symlinks=False)
    return facts.st_nlink > 1 and _is(facts, step.made)


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _make_folder(root: int, path: str) -> None:
    folder, name = _split(path[:-1])
    with opened(open_folder(root, folder)) as handle, contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=handle)


def _remove_folder(folder: int, name: str) -> bool:
    """Remove a folder that is empty; whether it was. Raises OSError for anything else."""
    if not _exists(folder, name):  # A disk that cannot be written refuses to remove what is not there, too.
        return False
    try:
        os.rmdir(name, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
            return False
        raise
    return True


def _restore_folder(folder: int, name: str, depot: int, mode: int, owner: int, group: int) -> None:
    if _exists(folder, name):
        return
    # Made ready elsewhere: who is killed between two calls shall not leave one with other rights.
    ready = f"folder-{unguessable()}"
    os.mkdir(ready, 0o700, dir_fd=depot)
    with contextlib.suppress(PermissionError):
        os.chown(ready, owner, group, dir_fd=depot, follow_symlinks=False)
    os.chmod(ready, mode, dir_fd=depot)
    os.rename(ready, name, src_dir_fd=depot, dst_dir_fd=folder)


def sync(root: int, intent: Intent) -> None:
    """Force the moves themselves to the disk."""
    changed = [*(step.path for step in intent.steps), *(path[:-1] for path in (*intent.made, *intent.dropped))]
    folders = {parent(path) for path in changed}
    if len(folders) > SYNC_EACH_MAX:
        os.sync()
        return
    for path in folders:
        _at(root, path + ".", lambda handle, _: os.fsync(handle))


def _split(path: str) -> tuple[str, str]:
    folder = parent(path)
    return folder, path[len(folder) :]


def _identity(facts: os.stat_result) -> tuple[int, ...]:
    # Without the device: its number is another one when the disk is mounted again.
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def _is(facts: os.stat_result, made: tuple[int, ...]) -> bool:
    """Whether it is still what was made; older records have the device in front."""
    return _identity(facts) == made[-3:]
