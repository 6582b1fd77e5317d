"""Lists, reads and removes trees of files.

No link is followed, and only folders and regular files are opened. Paths are relative, with `/`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from backplane.errors import PolicyError, WorkspaceError
from backplane.policy.globs import Globs, compile_globs

PATHS_CHARS_MAX: Final = 64 << 20
"""Maximum characters of all paths of a tree, enough for a million paths of 64; a larger tree is refused."""

READ_BYTES: Final = 1 << 20
"""Size in bytes up to which a file is copied through memory, with one read and one write; the kernel copies others."""

GIT_NAME: Final = ".git"
"""Name that is left out at every depth: a repository, or a file that points to one."""

_GIT_SHORT: Final = "git~1"
"""Short name of `.git` on Windows; git refuses it everywhere."""

FILE_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_MEANWHILE: Final = "files there were moved or replaced meanwhile; try again"

HINTS: Final = {
    errno.EACCES: "give this user the right to read it, or leave it out with --exclude",
    errno.EPERM: "give this user the right to read it, or leave it out with --exclude",
    errno.ENOSPC: "free some space, point BACKPLANE_HOME to a larger disk, or leave large files out with --exclude",
    errno.EDQUOT: "free some space, or leave large files out with --exclude",
    errno.EROFS: "point BACKPLANE_HOME to a disk that can be written",
    errno.ENOENT: "files there were removed meanwhile; try again",
    errno.EIO: "check the disk, or leave it out with --exclude",
    errno.ENAMETOOLONG: "leave the deepest folders out with --exclude",
    errno.ESTALE: _MEANWHILE,
    errno.ENOTDIR: _MEANWHILE,
    errno.ELOOP: _MEANWHILE,
    errno.ENOTSUP: _MEANWHILE,
    errno.ENXIO: _MEANWHILE,
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}
"""Next step after an error of the system, by its number."""

Entry = tuple[str, os.stat_result]
"""A path, and its `lstat`."""


class Quota(msgspec.Struct, frozen=True):
    """Limits of a workspace."""

    bytes_max: int
    files_max: int


class Listing(msgspec.Struct):
    """The selected files of a tree; parents come before their children."""

    folders: list[Entry]
    """Paths have a slash at the end; the root's is empty."""
    files: list[Entry]
    """Regular files and symbolic links."""
    special: list[str]
    """FIFOs, sockets and devices, which are neither opened nor copied."""
    unselected: list[str]
    """Paths that `include` or `exclude` leave out; a folder stands for everything in it."""
    repositories: list[str]
    """Folders with a `.git` of their own, with a slash at the end."""


class Scope(msgspec.Struct, frozen=True):
    """Settings to read a tree: its selection, its limits, and the code of its errors."""

    code: str
    quota: Quota
    include: Globs | None
    """None selects everything."""
    exclude: Globs | None
    """None excludes nothing."""
    stopped: Callable[[], bool]
    ours: tuple[str, ...] = ()
    """Names of our own folders in the tree (`names_below`), which are left out with their content."""
    mend: bool = False
    """True to add missing rights to files and folders; only for a copy of ours."""

    def fail(self, fact: str, hint: str | None = None) -> WorkspaceError:
        return WorkspaceError(self.code, fact, hint=hint)

    def cannot(self, verb: str, path: str, error: OSError) -> WorkspaceError:
        name = errno.errorcode.get(error.errno or 0, "unknown error")
        return self.fail(f"cannot {verb} '{printable(path) or '.'}': {name}", HINTS.get(error.errno or 0))

    def over_quota(self) -> WorkspaceError:
        fact = f"the workspace has more than {self.quota.bytes_max} bytes"
        return self.fail(fact, "raise workspace_bytes_max or leave some out with --exclude")

    def go_on(self) -> None:
        """Raise WorkspaceError if the work was stopped."""
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
    """Return a random part for a file's name, which no other program can guess and use before."""
    # `secrets` and `tempfile` would do the same, but take longer to import.
    return os.urandom(8).hex()


def names_repository(path: str) -> bool:
    """Return True if a part of a path means `.git` on some system, so that git refuses a patch with it."""
    lowered = path.lower()
    if GIT_NAME not in lowered and _GIT_SHORT not in lowered:
        return False
    return any(part.rstrip(". ") == GIT_NAME or part == _GIT_SHORT for part in lowered.split("/"))


def parent(path: str) -> str:
    """Return the folder of a path, with a slash at the end; empty at the top."""
    return path[: path.rfind("/") + 1]


def folders_above(path: str) -> list[str]:
    """Return the folders above a path, without the top, parents first."""
    return [path[:place] for place, letter in enumerate(path) if letter == "/"]


@contextlib.contextmanager
def opened(handle: int) -> Iterator[int]:
    """Close a handle at the end of the block."""
    try:
        yield handle
    finally:
        os.close(handle)


# Listing --------------------------------------------------------------------------------------------------------------


def list_tree(root: str, scope: Scope) -> Listing:
    """List everything selected below a folder, within the quota's count of files.

    Raises:
        WorkspaceError: the scope's code; a folder cannot be read, or a limit is passed.
    """
    listing = Listing([], [], [], [], [])
    waiting: list[Entry] = [("", os.lstat(root))]
    count = chars = 0
    while waiting:
        scope.go_on()
        folder = waiting.pop()
        listing.folders.append(folder)
        known = len(listing.files)
        below = _read_folder(root, folder, listing, scope)
        added = len(listing.files) - known + len(below)
        count, chars = count + added, chars + len(folder[0]) * added + sum(len(path) for path, _ in below)
        if count > scope.quota.files_max:
            fact = f"the workspace has more than {scope.quota.files_max} files"
            raise scope.fail(fact, "raise workspace_files_max or leave some out with --exclude")
        if chars > PATHS_CHARS_MAX:
            fact = f"the paths of the workspace are over {PATHS_CHARS_MAX >> 20} MiB together"
            raise scope.fail(fact, "leave the deepest folders out with --exclude")
        waiting += reversed(below)
    if scope.include is not None:
        _keep_parents(listing, scope.include)
    return listing


def _read_folder(root: str, folder: Entry, listing: Listing, scope: Scope) -> list[Entry]:
    """Add one folder's files to a listing; return its selected sub-folders."""
    path, below = folder[0], list[Entry]()
    try:
        with opened(open_folder(root, folder, mend=scope.mend)) as handle, os.scandir(handle) as found:
            for entry in sorted(found, key=lambda entry: entry.name):
                if entry.name == GIT_NAME:
                    listing.repositories.append(path)
                    continue
                with contextlib.suppress(FileNotFoundError):
                    _sort_in(path + entry.name, entry.stat(follow_symlinks=False), listing, scope, below)
    except OSError as error:
        raise scope.cannot("read the folder", path, error) from error
    return below


def open_folder(root: str, folder: Entry, *, mend: bool = False) -> int:
    """Open a folder of a listing; fail if another folder or a link has replaced it.

    Args:
        mend: True to add this user's missing rights to the folder.

    Raises:
        OSError: ESTALE if it is another folder.
    """
    path, facts = folder
    place = os.path.join(root, path).rstrip("/") or "/"
    try:
        handle = os.open(place, _FOLDER_FLAGS)
    except PermissionError:
        if not mend:
            raise
        give_rights(place, 0o700)
        handle = os.open(place, _FOLDER_FLAGS)
    found = os.fstat(handle)
    if (found.st_dev, found.st_ino) != (facts.st_dev, facts.st_ino):
        os.close(handle)
        raise OSError(errno.ESTALE, "another folder is in its place", place)
    return handle


def give_rights(path: str, mode: int) -> None:
    """Change the mode of a file or folder, without following a link. Raises OSError."""
    if not hasattr(os, "O_PATH"):  # pragma: no cover - not Linux, where a link is not followed when asked not to be
        os.chmod(path, mode, follow_symlinks=False)
        return
    # `O_PATH` pins the file, and needs no right to read it.
    with opened(os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)) as handle:
        os.chmod(f"/proc/self/fd/{handle}", mode)


def _sort_in(path: str, facts: os.stat_result, listing: Listing, scope: Scope, below: list[Entry]) -> None:
    is_folder = stat.S_ISDIR(facts.st_mode)
    if scope.ours and _is_ours(path.lower(), is_folder, scope.ours):
        listing.unselected.append(path)
        return
    if scope.exclude is not None or scope.include is not None:
        try:
            # Folders that `include` does not match are searched, too: `**/x.py` may match files in them.
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
        listing.files.append((path, facts))
    else:
        listing.special.append(path)


def names_below(root: Path, folders: Iterable[Path]) -> tuple[str, ...]:
    """Return the paths of these folders below a root: as given, and with links followed.

    They are in lower case, because some disks ignore case.
    """
    places = [place for folder in folders for place in (folder.absolute(), folder.resolve())]
    return tuple({str(place.relative_to(root)).lower() for place in places if place.is_relative_to(root)})


def _is_ours(path: str, is_folder: bool, ours: tuple[str, ...]) -> bool:
    """Return True for one of our folders, and for a file in place of a folder that leads to one."""
    return any(path == name or (not is_folder and name.startswith(f"{path}/")) for name in ours)


def _keep_parents(listing: Listing, include: Globs) -> None:
    """Remove folders from a listing if `include` names neither the folder nor a file in it."""
    wanted = {"", *(parent(path) for path, _ in listing.files)}
    for path, _ in reversed(listing.folders):
        if path in wanted or include.matches(path.rstrip("/")) is not None:
            wanted |= {path, parent(path.rstrip("/"))}
    listing.folders = [folder for folder in listing.folders if folder[0] in wanted]


def paths_below(
    root: Path | str, *, without: Collection[str] = (), onerror: Callable[[OSError], object] | None = None
) -> Iterator[str]:
    """Yield the path of every file, link and folder below a folder, in the same order each time.

    Args:
        without: names of folders that are left out with their content.
        onerror: called for a folder that cannot be read; None skips such a folder.
    """
    for folder, folders, files in os.walk(root, onerror=onerror):
        folders[:] = sorted(name for name in folders if name not in without)
        for name in sorted((*files, *folders)):
            yield os.path.join(folder, name)


# Reading and removing -------------------------------------------------------------------------------------------------


def look_at(root: str, path: str) -> os.stat_result | None:
    """Return the `lstat` of a path below a root; None if there is nothing, or if a link leads there. Raises OSError."""
    try:
        for place, letter in enumerate(path):
            if letter == "/" and not stat.S_ISDIR(os.lstat(f"{root}/{path[:place]}").st_mode):
                return None
        return os.lstat(f"{root}/{path}")
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_file(path: str | Path, bytes_max: int) -> tuple[bytes, os.stat_result] | None:
    """Read a regular file of at most `bytes_max`; return None for any other. Raises OSError."""
    with opened(os.open(path, FILE_FLAGS)) as handle:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > bytes_max:
            return None
        data = read_all(handle, facts.st_size)
        return (data, facts) if len(data) <= bytes_max else None


def read_short(path: Path, bytes_max: int) -> bytes:
    """Read a regular file of at most `bytes_max`; return nothing if there is none or it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        found = read_file(path, bytes_max)
        return found[0] if found else b""
    return b""


def read_all(handle: int, bytes_expected: int) -> bytes:
    """Read a file up to one byte more than expected, so that reading a growing file ends."""
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
    """Remove a folder with its content, also without rights to its folders; do nothing if it is missing.

    A link in place of the folder is removed, and not what it points to.

    Raises:
        WorkspaceError: `execution_workspace_error`, a mount or another user's file prevents that.
    """
    try:
        if not path.is_dir() or path.is_symlink():
            if os.path.lexists(path):  # A read-only disk also refuses to remove a missing file.
                path.unlink(missing_ok=True)
            return
        try:
            shutil.rmtree(path)
        except (PermissionError, RecursionError):
            _remove_by_level(path)
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "unknown error")
        raise WorkspaceError(
            "execution_workspace_error", f"cannot remove '{printable(str(path))}': {name}", hint="remove it by hand"
        ) from error


def _remove_by_level(path: Path) -> None:
    """Remove a folder of any depth, and folders without rights, by moving each inner folder to the top first."""
    give_rights(str(path), 0o700)
    while entries := list(os.scandir(path)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            give_rights(entry.path, 0o700)
            for inner in list(os.scandir(entry.path)):
                if inner.is_dir(follow_symlinks=False):
                    give_rights(inner.path, 0o700)  # Moving a folder changes its `..`.
                    os.rename(inner.path, path / unguessable())
                else:
                    os.unlink(inner.path)
            os.rmdir(entry.path)
    os.rmdir(path)
