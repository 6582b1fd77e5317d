"""Files moved between a workspace and a depot in it, and back again.

Every new file is written into the depot first; then old ones move out and new ones in. `Intent` says how,
and is enough to undo it, however far it came. Who writes that down, and when, is in `transaction`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import msgspec

from backplane.workspace.copying import write_all
from backplane.workspace.pack import LINK, PROGRAM
from backplane.workspace.patch import failure
from backplane.workspace.tree import FILE_FLAGS, open_folder, opened, parent, printable

SYNC_EACH_MAX: Final = 200
"""Files and folders forced to the disk one by one, some ms each; past it one call for all disks is quicker."""

_ACCESS: Final = "system.posix_acl_access"
_KEPT: Final = ("user.", "security.selinux", _ACCESS)
"""What people have noted at a file; it goes over to the one that takes its place."""

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
    new: str | None = None
    made: tuple[int, ...] = ()
    """Inode, size and time of the new file; whoever changes it later makes it his own."""


class Intent(msgspec.Struct, frozen=True):
    """Everything that is needed to undo an exchange."""

    root: str
    """The workspace."""
    depot: str
    """Name of the folder in it."""
    steps: tuple[PathMove, ...] = ()
    made: tuple[str, ...] = ()
    """Folders that the exchange makes, parents first."""
    dropped: tuple[PathMove, ...] = ()
    """Folders that it takes out when they are empty, parents first."""


# Before anything moves -----------------------------------------------------------------------------------------------


def prepare(begun: Intent, root: int, depot: int, seen: Seen, results: Mapping[str, PathState]) -> Intent:
    """Write every new file into the depot; the steps come in the order in which they are taken."""
    gone = sorted((path for path, result in results.items() if result.mode is None), reverse=True)
    fresh = sorted(path for path, result in results.items() if result.mode is not None)
    each = len(fresh) <= SYNC_EACH_MAX
    steps = [PathMove(path, f"old{number}") for number, path in enumerate(gone)]
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
    above = folders_above(path for path in gone if seen.get(path))
    return msgspec.structs.replace(
        begun,
        steps=tuple(steps),
        made=tuple(folder for folder in folders_above(fresh) if not _is_there(root, folder)),
        dropped=tuple(PathMove(folder, f"folder{number}") for number, folder in enumerate(above)),
    )


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


def folders_above(paths: Iterable[str]) -> list[str]:
    """All folders above these paths, parents first."""
    return sorted({path[:place] for path in paths for place, letter in enumerate(path) if letter == "/"})


def _is_there(root: int, folder: str) -> bool:
    with contextlib.suppress(OSError), opened(open_folder(root, folder)):
        return True
    return False


# There and back ------------------------------------------------------------------------------------------------------


class Move:
    """Moves files between the workspace and the depot in it."""

    def __init__(self, root: int, depot: int, seen: Seen, intent: Intent) -> None:
        self._root, self._depot, self._seen, self._intent = root, depot, seen, intent
        self._dropped = {folder.path: folder.old for folder in intent.dropped}

    def all(self) -> None:
        """Take every step. Raises OSError, with the path that it is about."""
        for step in self._intent.steps:
            try:
                if step.new is not None:
                    self._put_in(step, step.new)
                elif self._seen.get(step.path) is not None:
                    self._take_out(step)
                    self._drop_empty(parent(step.path)[:-1])
            except OSError as error:
                # A name in the depot, or in one folder, says nothing to anybody.
                raise OSError(error.errno, error.strerror, step.path) from error

    def _take_out(self, step: PathMove) -> None:
        """Move what is at a path into the depot, if it is still what the plan saw."""
        folder, name = _split(step.path)
        with opened(open_folder(self._root, folder)) as handle:
            seen, facts = self._seen.get(step.path), os.stat(name, dir_fd=handle, follow_symlinks=False)
            if seen is not None and (_identity(seen), seen.st_mode) != (_identity(facts), facts.st_mode):
                raise failure(f"'{printable(step.path)}' was changed just now; nothing was applied", "try again")
            os.rename(name, step.old, src_dir_fd=handle, dst_dir_fd=self._depot)

    def _drop_empty(self, path: str) -> None:
        """Take out folders that the last deletion has left empty, which git removes."""
        while path:
            folder, name = _split(path)
            with opened(open_folder(self._root, folder)) as above, opened(open_folder(above, name)) as here:
                if os.listdir(here):
                    return
                os.rename(name, self._dropped[path], src_dir_fd=above, dst_dir_fd=self._depot)
                if os.listdir(here):  # Somebody has put a file there this instant.
                    os.rename(self._dropped[path], name, src_dir_fd=self._depot, dst_dir_fd=above)
                    return
            path = folder[:-1]

    def _put_in(self, step: PathMove, new: str) -> None:
        """Move a new file from the depot to its place, whose old file goes to the depot first."""
        for path in folders_above([step.path]):
            folder, name = _split(path)
            with opened(open_folder(self._root, folder)) as handle, contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=handle)
        folder, name = _split(step.path)
        with opened(open_folder(self._root, folder)) as handle:
            if _facts(handle, name) is not None:
                self._take_out(step)
            try:
                # A link, because a rename would overwrite what somebody has put there this instant.
                os.link(new, name, src_dir_fd=self._depot, dst_dir_fd=handle, follow_symlinks=False)
            except FileExistsError:
                raise
            except OSError:
                os.rename(new, name, src_dir_fd=self._depot, dst_dir_fd=handle)


class Undone(msgspec.Struct, frozen=True):
    """What became of an exchange that was undone."""

    kept: tuple[str, ...] = ()
    """Paths that somebody keeps from it: changed since, or taken by another file."""
    failed: Mapping[str, OSError] = {}
    """Paths that the system kept from it, which may be tried again; everything else was put back."""


def undo(root: int, depot: int, intent: Intent) -> Undone:
    """Put everything back, however far it came; a step that fails keeps no other one from being done."""
    failed: dict[str, OSError] = {}

    def each(path: str, act: Callable[..., None], *arguments: object) -> None:
        try:
            _at(root, path, act, *arguments)
        except OSError as error:
            failed.setdefault(path, error)

    for step in reversed(intent.steps):
        new = _facts(depot, step.new)
        # One that has never left the depot: then its place need not even be looked at.
        if step.new is not None and not (new and new.st_nlink == 1):
            each(step.path, _unlink, step.made)
    anew = (move.path for move in intent.dropped if _facts(depot, move.old))
    for path in sorted({*intent.made, *anew}, reverse=True):
        each(path, _remove_folder)
    for move in (*intent.dropped, *intent.steps):
        if _facts(depot, move.old):
            each(move.path, _bring_back, depot, move.old)
    kept = {step.path for step in intent.steps if _facts(depot, step.old) or _lingers(depot, step)}
    return Undone(tuple(sorted(kept - failed.keys())), failed)


def _at(root: int, path: str, act: Callable[..., None], *arguments: object) -> None:
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
    if not _facts(folder, name):
        os.rename(old, name, src_dir_fd=depot, dst_dir_fd=folder)


def _unlink(folder: int, name: str, made: tuple[int, ...]) -> None:
    """Remove a new file that is still what was made."""
    facts = _facts(folder, name)
    if facts and _identity(facts) == made:
        os.unlink(name, dir_fd=folder)


def _remove_folder(folder: int, name: str) -> None:
    """Remove a folder that is empty. Raises OSError for anything but that it is none, or not empty."""
    if not _facts(folder, name):  # A disk that cannot be written refuses to remove what is not there, too.
        return
    try:
        os.rmdir(name, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
            raise


def _lingers(depot: int, step: PathMove) -> bool:
    """Whether the new file is still as it was made in a place that cannot be reached just now."""
    facts = _facts(depot, step.new)
    return facts is not None and facts.st_nlink > 1 and _identity(facts) == step.made


def _facts(folder: int, name: str | None) -> os.stat_result | None:
    """What a name stands for, a link not followed; None where there is nothing."""
    with contextlib.suppress(FileNotFoundError):
        return os.stat(name, dir_fd=folder, follow_symlinks=False) if name is not None else None
    return None


def sync(root: int, intent: Intent) -> None:
    """Force the moves themselves to the disk."""
    changed = [*(move.path for move in (*intent.steps, *intent.dropped)), *intent.made]
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


# Rights: nobody gets more than he had. What makes a program mightier than whoever starts it (set-id bits, capabilities)
# is not given to another content.


def hand_over(file: int, root: int, path: str, old: os.stat_result, *, program: bool) -> None:
    """Give a new file owner, mode and access list of the one at a path, but for the right to run it. Raises OSError."""
    name = path[len(parent(path)) :]
    with opened(open_folder(root, parent(path))) as folder, opened(os.open(name, FILE_FLAGS, dir_fd=folder)) as there:
        found = _attributes(there)
    rights = _runnable(old.st_mode & 0o777, program)
    for owner in (old.st_uid, -1):
        with contextlib.suppress(PermissionError):
            os.fchown(file, owner, old.st_gid)
            break
    if os.fstat(file).st_gid != old.st_gid:
        # Another group's members may do what anybody may.
        rights &= ~0o070 | (rights & 0o007) << 3
    if _ACCESS in _attributes(file).keys() - found.keys():
        os.removexattr(file, _ACCESS)  # A new file has one from its folder.
    for name, value in found.items():
        with contextlib.suppress(PermissionError):
            os.setxattr(file, name, value)
    # Last, as it says again what the list's mask is.
    os.fchmod(file, rights)


def _attributes(handle: int) -> dict[str, bytes]:
    if not hasattr(os, "listxattr"):  # pragma: no cover - not Linux
        return {}
    found: dict[str, bytes] = {}
    with contextlib.suppress(OSError):
        for name in os.listxattr(handle):
            if name.startswith(_KEPT):
                found[name] = os.getxattr(handle, name)
    return found


def _runnable(old: int, program: bool) -> int:
    """Keep a file's rights but for the right to run it."""
    if bool(old & 0o100) == program:
        return old
    return old | (old & 0o444) >> 2 if program else old & ~0o111
