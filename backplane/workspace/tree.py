"""A tree of files by handle: open its folders, list it, read from it, remove it.

Nothing here follows a link or opens anything but folders and regular files, whatever the tree
holds and whoever changes it meanwhile. Paths are relative, with `/`; what they mean for git is
not known here.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from backplane.errors import PolicyError, WorkspaceError
from backplane.policy.globs import Globs, compile_globs

T = TypeVar("T")

PATHS_CHARS_MAX: Final = 64 << 20
"""All paths of a tree together: a million files have as much with paths of 64 characters. Two thousand nested folders
of long names would need gigabytes."""

READ_BYTES: Final = 1 << 20
"""Files up to this size are copied through memory, one read and one write; larger ones by the kernel."""

PATH_PIECE_BYTES: Final = 2048
"""Longest path given to the system at once; longer ones are walked in pieces (Linux refuses 4,096 bytes)."""

GIT_NAME: Final = ".git"
"""Left out at every depth: it is the owner's repository, a submodule's, or a file that points to one."""

_GIT_SHORT: Final = "git~1"
"""What a file system of eight letters calls it; git takes it for its own everywhere."""

FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_MEANWHILE: Final = "nobody else may move or replace anything there meanwhile; try again"

_HINTS: Final = {
    errno.EACCES: "give us the right to it, or leave it out with --exclude",
    errno.EPERM: "give us the right to it, or leave it out with --exclude",
    errno.ENOSPC: "free some space, point BACKPLANE_HOME to a larger disk, or leave large files out with --exclude",
    errno.EDQUOT: "free some space, or leave large files out with --exclude",
    errno.EROFS: "point BACKPLANE_HOME to a disk that can be written",
    errno.ENOENT: "nobody else may remove files there meanwhile; try again",
    errno.EIO: "check the disk, or leave it out with --exclude",
    errno.ESTALE: _MEANWHILE,
    errno.ENOTDIR: _MEANWHILE,
    errno.ELOOP: _MEANWHILE,
    errno.ENOTSUP: _MEANWHILE,
    errno.ENXIO: _MEANWHILE,
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}
"""What helps against a failure of the system."""

Entry = tuple[str, os.stat_result]
"""A name within its folder and what `lstat` says of it."""


class Quota(msgspec.Struct, frozen=True):
    """The most that a workspace may hold."""

    bytes_max: int
    files_max: int


class Folder(msgspec.Struct):
    """One folder of a listing."""

    path: str
    """Relative, with a slash at the end; empty for the root."""
    stat: os.stat_result
    entries: list[Entry]
    """Regular files and symbolic links."""
    wanted: bool = True
    """False when `include` names neither it nor anything in it."""


class Listing(msgspec.Struct):
    """What a tree holds, as far as it is selected; parents come before their children."""

    folders: list[Folder]
    special: list[str]
    """FIFOs, sockets and devices: never opened, never copied."""
    unselected: list[str]
    """Left out by `include` or `exclude`; a folder stands for everything in it."""
    repositories: list[str] = []
    """Folders with a `.git` of their own, with a slash at the end."""

    def paths(self, but: Collection[str] = ()) -> list[str]:
        """Every file and link but these."""
        folders = self.folders
        return [path for folder in folders for name, _ in folder.entries if (path := folder.path + name) not in but]


class Scope(msgspec.Struct, frozen=True):
    """How a tree is read: what is selected, what bounds it, which code its failures have."""

    code: str
    quota: Quota
    include: Globs | None
    """None for everything."""
    exclude: Globs | None
    """None for nothing."""
    stopped: Callable[[], bool]
    ours: tuple[str, ...] = ()
    """Names of our own folders in it (`names_below`), which are left out with all in them."""
    mend: bool = False
    """Whether rights may be given to folders and files without them: only in a copy of ours."""

    def fail(self, fact: str, hint: str | None = None) -> WorkspaceError:
        return WorkspaceError(self.code, fact, hint=hint)

    def cannot(self, verb: str, path: str, error: OSError) -> WorkspaceError:
        name = errno.errorcode.get(error.errno or 0, "unknown error")
        return self.fail(f"cannot {verb} '{printable(path) or '.'}': {name}", _HINTS.get(error.errno or 0))

    def go_on(self) -> None:
        if self.stopped():
            raise self.fail("stopped before all of the workspace was read")


def scope(
    code: str,
    quota: Quota,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    stopped: Callable[[], bool] = lambda: False,
) -> Scope:
    """Compile the selection. Raises PolicyError `policy_invalid` for a bad glob."""
    include_globs, exclude_globs = (compile_globs(globs) if globs else None for globs in (include, exclude))
    return Scope(code, quota, include_globs, exclude_globs, stopped)


def printable(path: str) -> str:
    """Write a path as valid text: bytes that are not UTF-8 become `\\xNN`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def unguessable() -> str:
    """Part of a name that nobody can have put in the way."""
    # `secrets` and `tempfile` say the same, and load generators of numbers on the way to a contained host's start.
    return os.urandom(8).hex()


def identity(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_dev, facts.st_ino


def names_repository(path: str) -> bool:
    """Whether a part of a path is git's own folder on some system: then git refuses a patch that has it."""
    parts = (part.lower() for part in path.split("/"))
    return any(part.rstrip(". ") == GIT_NAME or part == _GIT_SHORT for part in parts)


@contextlib.contextmanager
def opened(handle: int) -> Iterator[int]:
    """Close a handle at the end of the block."""
    try:
        yield handle
    finally:
        os.close(handle)


def open_root(path: Path) -> int:
    """Open a folder that is no link itself. Raises OSError."""
    return os.open(path, FOLDER_FLAGS)


def open_folder(root: int, path: str) -> int:
    """Open a folder below `root`, refusing a link in any of its components. Raises OSError."""
    return _open_along(root, os.fsencode(path.rstrip("/")).split(b"/") if path else [b"."])


def open_quick(root: int, path: str) -> int:
    """Open a folder of a tree that nobody else changes, however long its path is. Raises OSError."""
    return _open_along(root, _pieces(os.fsencode(path.rstrip("/")) or b"."))


def open_known(root: int, folder: Folder) -> int:
    """Open a folder of a listing; ESTALE when another one, or a link, has taken its place. Raises OSError."""
    handle = open_quick(root, folder.path)
    facts = os.fstat(handle)
    if (facts.st_dev, facts.st_ino) != (folder.stat.st_dev, folder.stat.st_ino):
        os.close(handle)
        raise OSError(errno.ESTALE, "replaced by another folder", folder.path)
    return handle


def _open_along(root: int, pieces: Iterable[bytes]) -> int:
    handle = -1
    for piece in pieces:
        try:
            following = os.open(piece, FOLDER_FLAGS, dir_fd=root if handle < 0 else handle)
        finally:
            if handle >= 0:
                os.close(handle)
        handle = following
    return handle


def _pieces(raw: bytes) -> Iterator[bytes]:
    while len(raw) > PATH_PIECE_BYTES:
        end = raw.rindex(b"/", 0, PATH_PIECE_BYTES)
        yield raw[:end]
        raw = raw[end + 1 :]
    yield raw


def list_tree(root: int, scope: Scope) -> Listing:
    """List everything selected below `root`, within the quota's count of files.

    Raises:
        WorkspaceError: the scope's code; a folder cannot be read, or a limit is passed.
    """
    listing = Listing([], [], [])
    waiting = [("", os.fstat(root))]
    count = chars = 0
    while waiting:
        scope.go_on()
        path, facts = waiting.pop()
        folder = Folder(path, facts, [])
        listing.folders.append(folder)
        below = _read_folder(root, folder, listing, scope)
        count += len(folder.entries) + len(below)
        if count > scope.quota.files_max:
            fact = f"the workspace has more than {scope.quota.files_max} files"
            raise scope.fail(fact, "raise workspace_files_max or leave some out with --exclude")
        chars += len(path) * (1 + len(folder.entries)) + sum([len(name) for name, _ in folder.entries])
        if chars > PATHS_CHARS_MAX:
            fact = f"the paths of the workspace are over {PATHS_CHARS_MAX >> 20} MiB together"
            raise scope.fail(fact, "leave the deepest folders out with --exclude")
        waiting += reversed(below)
    _keep_parents(listing)
    return listing


def _read_folder(root: int, folder: Folder, listing: Listing, scope: Scope) -> list[tuple[str, os.stat_result]]:
    """Fill in one folder's entries; return its selected sub-folders."""
    below: list[tuple[str, os.stat_result]] = []
    try:
        with opened(_enter(root, folder, scope)) as handle, os.scandir(handle) as found:
            for entry in sorted(found, key=_name):
                if entry.name == GIT_NAME:
                    listing.repositories.append(folder.path)
                    continue
                with contextlib.suppress(FileNotFoundError):
                    _sort_in(entry.name, entry.stat(follow_symlinks=False), folder, listing, scope, below)
    except OSError as error:
        raise scope.cannot("read the folder", folder.path, error) from error
    if scope.include is not None and folder.path:
        folder.wanted = scope.include.matches(folder.path.rstrip("/")) is not None
    return below


def _enter(root: int, folder: Folder, scope: Scope) -> int:
    try:
        return open_known(root, folder)
    except PermissionError:
        if not scope.mend or not folder.path:
            raise
    above = parent(folder.path[:-1])
    with opened(open_quick(root, above)) as handle:
        give_rights(folder.path[len(above) : -1], 0o700, handle)
    return open_known(root, folder)


def give_rights(name: str, mode: int, folder: int | None = None) -> None:
    """Change the mode of a file or folder, and of nothing that a link in its place points to. Raises OSError."""
    if not hasattr(os, "O_PATH"):  # pragma: no cover - not Linux, where a link is not followed when asked not to be
        os.chmod(name, mode, dir_fd=folder, follow_symlinks=False)
        return
    # Nobody can put another one in the place of what is open; to open it so needs no rights to it.
    with opened(os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)) as handle:
        os.chmod(f"/proc/self/fd/{handle}", mode)


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name


def _sort_in(
    name: str,
    facts: os.stat_result,
    folder: Folder,
    listing: Listing,
    scope: Scope,
    below: list[tuple[str, os.stat_result]],
) -> None:
    is_folder = stat.S_ISDIR(facts.st_mode)
    path = folder.path + name
    if scope.ours and _is_ours(path.lower(), is_folder, scope.ours):
        listing.unselected.append(path)
        return
    if scope.exclude is not None or scope.include is not None:
        try:
            # A folder that `include` does not name is still looked through: `**/x.py` names what is in it.
            excluded = scope.exclude is not None and scope.exclude.matches(path) is not None
            missed = not is_folder and scope.include is not None and scope.include.matches(path) is None
        except PolicyError as error:
            raise scope.fail(error.message, error.hint) from error
        if excluded or missed:
            listing.unselected.append(path)
            return
    if is_folder:
        below.append((path + "/", facts))
    elif stat.S_ISREG(facts.st_mode) or stat.S_ISLNK(facts.st_mode):
        folder.entries.append((name, facts))
    else:
        listing.special.append(path)


def names_below(root: Path, folders: Iterable[Path]) -> tuple[str, ...]:
    """Return the names that lead to these folders below a root: as they were given, and with links followed.

    In lower case, as not every disk tells letters apart.
    """
    places = [place for folder in folders for place in (folder.absolute(), folder.resolve())]
    return tuple({str(place.relative_to(root)).lower() for place in places if place.is_relative_to(root)})


def _is_ours(path: str, is_folder: bool, ours: tuple[str, ...]) -> bool:
    """Whether this is one of our folders, or a file in the place of what leads to one."""
    return any(path == name or (not is_folder and name.startswith(f"{path}/")) for name in ours)


def _keep_parents(listing: Listing) -> None:
    needed: set[str] = set()
    for folder in reversed(listing.folders):
        folder.wanted = folder.wanted or bool(folder.entries) or folder.path in needed
        if folder.wanted:
            needed.add(parent(folder.path.rstrip("/")))
    listing.folders = [folder for folder in listing.folders if folder.wanted]


def parent(path: str) -> str:
    """The folder of a path, with a slash at the end; empty at the top."""
    return path[: path.rfind("/") + 1]


def paths_below(
    root: Path | str, *, without: Collection[str] = (), onerror: Callable[[OSError], object] | None = None
) -> Iterator[str]:
    """Yield the path of every file, link and folder below a folder, in the same order each time.

    Args:
        without: names of folders that are left out, with all that is in them.
        onerror: called for a folder that cannot be read; None passes such a folder over.
    """
    for folder, folders, files in os.walk(root, onerror=onerror):
        folders[:] = sorted(name for name in folders if name not in without)
        for name in sorted((*files, *folders)):
            yield os.path.join(folder, name)


def read_link(folder: int, name: str) -> str:
    """Where a symbolic link points. Raises OSError, ENOTSUP when it is none any more."""
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise OSError(errno.ENOTSUP, "not a link", name) from error
        raise


def look_at(root: int, path: str, look: Callable[[int, str, os.stat_result], T | None]) -> T | None:
    """What is found at a path, links not followed; None where nothing is, or no folder leads there. Raises OSError.

    Args:
        look: gets the folder's handle, the name in it and what the name stands for.
    """
    above = parent(path)
    try:
        with opened(open_folder(root, above)) as folder:
            name = path[len(above) :]
            return look(folder, name, os.stat(name, dir_fd=folder, follow_symlinks=False))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise


def read_file(folder: int, name: str, bytes_max: int) -> tuple[bytes, os.stat_result] | None:
    """Read a regular file whole; None when it is not one, or longer than `bytes_max`. Raises OSError."""
    with opened(os.open(name, FILE_FLAGS, dir_fd=folder)) as handle:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > bytes_max:
            return None
        data = read_all(handle, facts.st_size)
        return (data, facts) if len(data) <= bytes_max else None


def read_all(handle: int, bytes_expected: int) -> bytes:
    """Read up to one byte more than expected, so that a growing file has an end."""
    data = os.read(handle, bytes_expected + 1)
    if len(data) >= bytes_expected or not data:
        return data[: bytes_expected + 1]
    pieces = [data]
    left = bytes_expected + 1 - len(data)
    while left > 0 and (piece := os.read(handle, min(left, READ_BYTES))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def remove_tree(path: Path) -> None:
    """Remove a folder and all in it: any depth, folders without rights, odd names. Missing is fine.

    A link in place of the folder is removed itself. Sub-folders are first moved up beside one
    another, so no path grows long.

    Raises:
        WorkspaceError: `execution_workspace_error`, something is held by a mount or another user.
    """
    try:
        if not path.is_dir() or path.is_symlink():
            if os.path.lexists(path):  # A disk that cannot be written refuses to remove what is not there, too.
                path.unlink(missing_ok=True)
            return
        give_rights(str(path), 0o700)
        with opened(open_root(path)) as root:
            stem = unguessable()
            names = (f".{stem}-{number}" for number in itertools.count())
            waiting = _empty_folder(root, root, names)
            while waiting:
                name = waiting.pop()
                with opened(os.open(name, FOLDER_FLAGS, dir_fd=root)) as folder:
                    waiting += _empty_folder(folder, root, names)
                os.rmdir(name, dir_fd=root)
        path.rmdir()
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "unknown error")
        raise WorkspaceError(
            "execution_workspace_error", f"cannot remove '{printable(str(path))}': {name}", hint="remove it by hand"
        ) from error


def _empty_folder(folder: int, root: int, names: Iterator[str]) -> list[str]:
    """Delete a folder's files and move its sub-folders up to `root`; return their names there."""
    found: list[str] = []
    with os.scandir(folder) as entries:
        listed = [(entry.name, entry.stat(follow_symlinks=False).st_mode) for entry in entries]
    for name, mode in listed:
        if not stat.S_ISDIR(mode):
            os.unlink(name, dir_fd=folder)
            continue
        if mode & 0o700 != 0o700:
            give_rights(name, 0o700, folder)
        found.append(name if folder == root else next(names))
        if folder != root:
            os.rename(name, found[-1], src_dir_fd=folder, dst_dir_fd=root)
    return found
