"""A tree of files by handle: list it, read from it, copy it, remove it.

Nothing here follows a link or opens anything but folders and regular files, whatever the tree
holds and whoever changes it meanwhile. Paths are relative, with `/`; what they mean for git is
not known here.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from backplane.errors import PolicyError, WorkspaceError
from backplane.globs import Globs, compile_globs

try:
    import fcntl
except ImportError:  # pragma: no cover - a system without it has no reflinks either
    fcntl = None  # type: ignore[assignment]

DEPTH_MAX: Final = 4096
"""Deepest folder. A shell loop makes 1,200 levels easily; beyond this somebody wants to exhaust us."""

READ_BYTES: Final = 1 << 20
"""Files up to this size are copied through memory, one read and one write; larger ones by the kernel."""

PATH_PIECE_BYTES: Final = 2048
"""Longest path given to the system at once; longer ones are walked in pieces (Linux refuses 4,096 bytes)."""

GIT_NAME: Final = ".git"
"""Left out at every depth: it is the owner's repository, a submodule's, or a file that points to one."""

OVER_QUOTA: Final = "over the quota"
"""Text of the OSError (EDQUOT) that `copy_file` raises, to tell it from the file system's own."""

_FICLONE: Final = 0x40049409
"""Linux's ioctl for a copy that shares its blocks (btrfs, xfs)."""

_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_FILE_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

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

    def __iter__(self) -> Iterator[Entry]:
        """Every file and link with its whole relative path."""
        return ((folder.path + name, facts) for folder in self.folders for name, facts in folder.entries)


class Scope(msgspec.Struct, frozen=True):
    """How a tree is read: what is selected, what bounds it, which code its failures have."""

    code: str
    quota: Quota
    include: Globs
    exclude: Globs
    stopped: Callable[[], bool]
    ours: frozenset[tuple[int, int]] = frozenset()
    """Device and inode of our own folders; a workspace may well contain them."""
    mend: bool = False
    """Whether rights may be given to folders and files without them: only in a copy of ours."""

    def fail(self, fact: str, hint: str | None = None) -> WorkspaceError:
        return WorkspaceError(self.code, fact, hint=hint)

    def cannot(self, verb: str, path: str, error: OSError) -> WorkspaceError:
        name = errno.errorcode.get(error.errno or 0, "unknown error")
        hint = "give us the right to it, or leave it out with --exclude" if error.errno == errno.EACCES else None
        return self.fail(f"cannot {verb} '{printable(path) or '.'}': {name}", hint)

    def go_on(self) -> None:
        if self.stopped():
            raise self.fail("stopped before the workspace was ready")


def scope(
    code: str,
    quota: Quota,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    stopped: Callable[[], bool] = lambda: False,
) -> Scope:
    """Compile the selection. Raises PolicyError `policy_invalid` for a bad glob."""
    return Scope(code, quota, compile_globs(include), compile_globs(exclude), stopped)


def printable(path: str) -> str:
    """Write a path as valid text: bytes that are not UTF-8 become `\\xNN`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def identity(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_dev, facts.st_ino


@contextlib.contextmanager
def opened(handle: int) -> Iterator[int]:
    """Close a handle at the end of the block."""
    try:
        yield handle
    finally:
        os.close(handle)


def open_root(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


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
            following = os.open(piece, _FOLDER_FLAGS, dir_fd=root if handle < 0 else handle)
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
    count = 0
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
        if below and path.count("/") >= DEPTH_MAX:
            raise scope.fail(f"the workspace is deeper than {DEPTH_MAX} folders", "leave it out with --exclude")
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
                    continue
                with contextlib.suppress(FileNotFoundError):
                    _sort_in(entry.name, entry.stat(follow_symlinks=False), folder, listing, scope, below)
    except OSError as error:
        raise scope.cannot("read the folder", folder.path, error) from error
    if scope.include and folder.path:
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
        os.chmod(folder.path[len(above) : -1], 0o700, dir_fd=handle)
    return open_known(root, folder)


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
    if is_folder and (facts.st_dev, facts.st_ino) in scope.ours:
        return
    path = folder.path + name
    if scope.exclude or scope.include:
        try:
            # A folder that `include` does not name is still looked through: `**/x.py` names what is in it.
            excluded = scope.exclude.matches(path) is not None
            missed = not is_folder and bool(scope.include) and scope.include.matches(path) is None
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


def read_file(folder: int, name: str, bytes_max: int) -> tuple[bytes, os.stat_result] | None:
    """Read a regular file whole; None when it is not one, or longer than `bytes_max`. Raises OSError."""
    with opened(os.open(name, _FILE_FLAGS, dir_fd=folder)) as handle:
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


def make_folder(root: int, path: str) -> None:
    """Make one folder in a tree that nobody else changes, for us alone at first. Raises OSError."""
    above = parent(path.rstrip("/"))
    with opened(open_quick(root, above)) as folder:
        os.mkdir(path[len(above) :].rstrip("/"), 0o700, dir_fd=folder)


def write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def copy_file(source: int, target: int, name: str, bytes_left: int) -> tuple[bytes | None, os.stat_result, int]:
    """Copy one regular file between two folders, with its mode and times.

    Returns:
        Its content where it went through memory, what the copy is now, and the bytes written
        (holes are not).

    Raises:
        OSError: EDQUOT when it would write more than `bytes_left`; ENOTSUP when it is no regular file any more.
    """
    # This runs once a file: plain `try` instead of `with` is a tenth of the time of staging.
    reader = os.open(name, _FILE_FLAGS, dir_fd=source)
    try:
        facts = os.fstat(reader)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.ENOTSUP, "not a regular file")
        size = facts.st_size
        # The set-id bits would make a program of somebody else's run as us: the copy is ours.
        mode = facts.st_mode & 0o777
        writer = os.open(name, _NEW_FILE_FLAGS, mode, dir_fd=target)
        try:
            data: bytes | None = None
            if size <= READ_BYTES and facts.st_blocks * 512 >= min(size, 4096):
                data = read_all(reader, size)
                written = len(data)
                if written > bytes_left:
                    raise OSError(errno.EDQUOT, OVER_QUOTA)
                if os.write(writer, data) != written:
                    raise OSError(errno.ENOSPC, "short write")
            else:
                written = _copy_ranges(reader, writer, size, bytes_left)
            os.utime(writer, ns=(facts.st_atime_ns, facts.st_mtime_ns))
            made = os.fstat(writer)
            if made.st_mode & 0o777 != mode:
                os.fchmod(writer, mode)
                made = os.fstat(writer)
            return data, made, written
        finally:
            os.close(writer)
    finally:
        os.close(reader)


def _copy_ranges(reader: int, writer: int, size: int, bytes_left: int) -> int:
    """Copy what is data and keep the holes; share blocks where the file system can."""
    if _share_blocks(reader, writer):
        return 0
    os.ftruncate(writer, size)
    place = written = 0
    while place < size:
        start, end = _data_range(reader, place, size)
        written += end - start
        if written > bytes_left:
            raise OSError(errno.EDQUOT, OVER_QUOTA)
        while start < end:
            step = _copy_some(reader, writer, start, min(end - start, 64 * READ_BYTES))
            if not step:
                return written
            start += step
        place = end
    return written


def _share_blocks(reader: int, writer: int) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.ioctl(writer, _FICLONE, reader)
    except OSError:
        return False
    return True


def _data_range(reader: int, place: int, size: int) -> tuple[int, int]:
    """The next stretch of data from `place` on; `(size, size)` when only a hole is left."""
    try:
        start = os.lseek(reader, place, os.SEEK_DATA)
        return start, min(os.lseek(reader, start, os.SEEK_HOLE), size)
    except OSError as error:
        # ENXIO: nothing but a hole. Anything else: a file system that does not know holes.
        return (size, size) if error.errno == errno.ENXIO else (place, size)


def _copy_some(reader: int, writer: int, place: int, count: int) -> int:
    if hasattr(os, "copy_file_range"):
        with contextlib.suppress(OSError):
            return os.copy_file_range(reader, writer, count, place, place)
    return os.pwrite(writer, os.pread(reader, min(count, READ_BYTES), place), place)


def copy_whole(source: Path, target: Path) -> None:
    """Copy a file of ours, sharing its blocks where the file system can. Raises OSError."""
    flags = _NEW_FILE_FLAGS
    with source.open("rb") as reader, opened(os.open(target, flags, 0o444)) as writer:
        size = os.fstat(reader.fileno()).st_size
        _copy_ranges(reader.fileno(), writer, size, size)


def copy_link(source: int, target: int, name: str, facts: os.stat_result) -> tuple[bytes, os.stat_result]:
    """Copy a symbolic link as a link; where it points is never looked at. Raises OSError."""
    points_to = os.readlink(name, dir_fd=source)
    os.symlink(points_to, name, dir_fd=target)
    os.utime(name, ns=(facts.st_atime_ns, facts.st_mtime_ns), dir_fd=target, follow_symlinks=False)
    return os.fsencode(points_to), os.stat(name, dir_fd=target, follow_symlinks=False)


def remove_tree(path: Path) -> None:
    """Remove a folder and all in it: any depth, folders without rights, odd names. Missing is fine.

    A link in place of the folder is removed itself. Sub-folders are first moved up beside one
    another, so no path grows long.

    Raises:
        WorkspaceError: `execution_workspace_error`, something is held by a mount or another user.
    """
    try:
        if not path.is_dir() or path.is_symlink():
            path.unlink(missing_ok=True)
            return
        path.chmod(0o700)
        with opened(open_root(path)) as root:
            # Unguessable, so that nobody can have put something in the way.
            names = (f".{secrets.token_hex(8)}" for _ in itertools.count())
            waiting = _empty_folder(root, root, names)
            while waiting:
                name = waiting.pop()
                with opened(os.open(name, _FOLDER_FLAGS, dir_fd=root)) as folder:
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
            os.chmod(name, 0o700, dir_fd=folder)
        found.append(name if folder == root else next(names))
        if folder != root:
            os.rename(name, found[-1], src_dir_fd=folder, dst_dir_fd=root)
    return found
