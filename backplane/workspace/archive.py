"""A folder on its way between submitter and worker of a queue: a tar archive.

`pack` is the sender's side, `unpack` the receiver's, which trusts nothing: no link is followed, nothing leaves the
folder, everything is counted.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from backplane.errors import BackplaneError, WorkspaceError
from backplane.process.locks import try_lock
from backplane.workspace import Quota, collect
from backplane.workspace.copying import write_all
from backplane.workspace.pack import without_facts
from backplane.workspace.tree import (
    FILE_FLAGS,
    FOLDER_FLAGS,
    GIT_NAME,
    Listing,
    Scope,
    list_tree,
    open_folder,
    open_root,
    opened,
    parent,
    printable,
    read_file,
    scope,
)

CHUNK_BYTES: Final = 192 * 1024
"""Bytes that are read or written at once."""

NAME_BYTES_MAX: Final = 4096
"""Longest path in an archive: Linux takes no longer one."""

GIT_FILES: Final = (f"{GIT_NAME}/index", f"{GIT_NAME}/info/exclude")
"""All that travels of a repository: which files are tracked, and the owner's own ignore rules."""

GIT_FILE_BYTES_MAX: Final = 256 << 20
"""As much of an index as a workspace looks at."""

NO_TIME_S: Final = 315_619_200
"""The time of what has none: 1980-01-02, as zip files, which agents may make of it, know no earlier year."""

_STAGING: Final = "workspace_staging_failed"
_LONG: Final = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_KINDS: Final = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, *_LONG)
_OTHER_KINDS: Final = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a named pipe",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
    tarfile.XHDTYPE: "a header of the pax form",
    tarfile.XGLTYPE: "a header of the pax form",
}
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


# The sender's side ----------------------------------------------------------------------------------------------------


def pack(folder: Path, quota: Quota, *, times: bool = True) -> Iterator[bytes]:
    """A folder as a tar archive, in pieces; nobody else may change it meanwhile. Blocks.

    Args:
        times: files keep their times; else the same contents always make the same archive.

    Raises:
        WorkspaceError: `workspace_staging_failed`, something cannot be read.
    """
    within = scope(_STAGING, quota)
    try:
        with opened(open_root(folder)) as root:
            yield from _pack_files(root, list_tree(root, within), within, times)
            for path in GIT_FILES:
                with suppress(FileNotFoundError):
                    yield from _pack_git_file(root, path)
    except OSError as error:
        raise within.cannot("pack", str(error.filename or folder), error) from error
    yield bytes(2 * tarfile.BLOCKSIZE)


def _pack_files(root: int, listing: Listing, within: Scope, times: bool) -> Iterator[bytes]:
    for folder in listing.folders:
        if folder.path:
            yield _header(folder.path, tarfile.DIRTYPE, folder.stat)
        with opened(open_folder(root, folder.path)) as here:
            for name, facts in folder.entries:
                within.go_on()
                if stat.S_ISLNK(facts.st_mode):
                    yield _header(folder.path + name, tarfile.SYMTYPE, facts, target=os.readlink(name, dir_fd=here))
                else:
                    yield from _content(os.open(name, FILE_FLAGS, dir_fd=here), folder.path + name, within, times)


def _pack_git_file(root: int, path: str) -> Iterator[bytes]:
    """A file of the copy's own repository, which was made a moment ago: its times are nobody's."""
    with opened(open_folder(root, parent(path))) as here:
        found = read_file(here, path[len(parent(path)) :], GIT_FILE_BYTES_MAX)
    if found is not None:
        data, facts = found
        data = without_facts(data) if path == GIT_FILES[0] else data
        yield _header(path, tarfile.REGTYPE, facts, len(data))
        yield data
        yield bytes(-len(data) % tarfile.BLOCKSIZE)


def _content(handle: int, path: str, within: Scope, times: bool) -> Iterator[bytes]:
    with opened(handle):
        facts = os.fstat(handle)
        yield _header(path, tarfile.REGTYPE, facts, facts.st_size, int(facts.st_mtime) if times else NO_TIME_S)
        left = facts.st_size
        while left:
            data = os.read(handle, min(left, CHUNK_BYTES))
            if not data:
                raise within.fail(f"'{printable(path)}' became shorter while it was sent")
            left -= len(data)
            yield data
        yield bytes(-facts.st_size % tarfile.BLOCKSIZE)


def _header(
    path: str, kind: bytes, facts: os.stat_result, size: int = 0, time_s: int = NO_TIME_S, target: str = ""
) -> bytes:
    # Whoever unpacks it gives neither folders nor links a time.
    entry = tarfile.TarInfo(path.rstrip("/"))
    entry.type, entry.linkname, entry.size = kind, target, size
    entry.mode, entry.mtime = facts.st_mode & 0o777, time_s
    return entry.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def read_pieces(path: Path) -> Iterator[bytes]:
    """A file in pieces. Raises OSError."""
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            yield piece


# The receiver's side --------------------------------------------------------------------------------------------------


@contextmanager
def incoming(home: Path) -> Iterator[Path]:
    """A folder for one parcel, removed at the end of the block; a killed process's is removed by `sweep`."""
    folder = home / "incoming" / secrets.token_hex(16)
    folder.mkdir(mode=0o700, parents=True)
    try:
        with opened(os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        collect(folder)


def sweep(home: Path) -> None:
    """Remove parcels whose receiver was killed; what cannot be removed stays for the next time."""
    for folder in (home / "incoming").glob("*"):
        with suppress(OSError, BackplaneError):
            if not _is_held(folder / "lock"):
                collect(folder)


def _is_held(lock: Path) -> bool:
    with opened(os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)) as handle:
        return not try_lock(handle)


def unpack(archive: Path, folder: Path, quota: Quota) -> None:
    """Make a new folder of an archive from a stranger. Blocks.

    Regular files, folders and symbolic links only; every path is opened below the folder without following a link.

    Raises:
        WorkspaceError: `workspace_staging_failed`: not such an archive, a path that leaves the folder or names a
            repository, a hard link or device, over the quota, or the disk is full.
    """
    within = scope(_STAGING, quota)
    folder.mkdir(mode=0o700)
    try:
        # Without extraction filters: `data` refuses links that lead out of the tree, which are copied as links here.
        with (
            archive.open("rb") as file,
            tarfile.open(fileobj=file, mode="r:", tarinfo=_Header, encoding="utf-8") as tar,
            opened(open_root(folder)) as root,
        ):
            unpacker = _Unpacker(file, root, within)
            while (entry := tar.next()) is not None:
                within.go_on()
                unpacker.make(entry)
                tar.members.clear()  # type: ignore[attr-defined]  # A million of them are a gigabyte.
    except OSError as error:
        raise within.cannot("unpack", str(error.filename or ""), error) from error
    except (tarfile.TarError, ArithmeticError, RecursionError, ValueError) as error:
        raise within.fail(f"the archive is damaged: {error}") from error


class _Header(tarfile.TarInfo):
    """A header from a stranger, looked at before `tarfile` goes by it."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        if len(buf) != tarfile.BLOCKSIZE:
            raise _refused("the archive ends in the middle")
        try:
            found = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if buf.strip(b"\0"):  # `tarfile` takes any of them for the end, as these zeros are.
                raise _refused(f"the archive is damaged: {error}") from error
            raise
        if found.type not in _KINDS:
            kind = _OTHER_KINDS.get(found.type, "of an unknown kind")
            fact = f"'{printable(found.name)}' is {kind}: only files, folders and symbolic links travel"
            raise _refused(fact, "pack it anew in the format gnu, hard links as files, devices left out")
        size = buf[124:136]
        if size[:1] != b"\x80" and size.strip(b"\0 01234567"):  # `int` takes signs and underscores, too.
            raise _refused("the archive is damaged: a number in a header is none")
        if found.type in _LONG and found.size > NAME_BYTES_MAX + 1:
            raise _refused(f"a name over {NAME_BYTES_MAX} bytes")
        return found


_IN_THE_WAY: Final = {
    errno.EEXIST: "comes twice",
    errno.ENOTDIR: "has a file or a link of the archive in its way",
    errno.ELOOP: "has a link of the archive in its way",
}
"""What an archive did where its path cannot be made: the folder is new, and nobody else writes there."""


class _Unpacker:
    def __init__(self, file: BinaryIO, root: int, within: Scope) -> None:
        self._file = file
        self._root = root
        self._within = within
        self._left_bytes = within.quota.bytes_max
        self._left_files = within.quota.files_max

    def make(self, entry: tarfile.TarInfo) -> None:
        self._count()
        path = _checked(entry)
        above = parent(path)
        try:
            with opened(self._folder(above)) as handle:
                name = path[len(above) :]
                if entry.isdir():
                    _make_folder(handle, name, entry.mode)
                elif entry.issym():
                    os.symlink(entry.linkname, name, dir_fd=handle)
                else:
                    self._write(handle, name, entry)
        except OSError as error:
            if error.errno not in _IN_THE_WAY:
                raise
            fact = f"'{printable(path)[:200]}' of the archive {_IN_THE_WAY[error.errno]}"
            raise _refused(fact, "pack each path once, and no path through a link") from error

    def _count(self) -> None:
        self._left_files -= 1
        if self._left_files < 0:
            raise self._within.fail(f"over {self._within.quota.files_max} files (workspace_files_max)")

    def _folder(self, path: str) -> int:
        """Open a folder, made with those above it where they are missing; a link in its way is refused."""
        with suppress(FileNotFoundError):
            return open_folder(self._root, path)
        handle = os.dup(self._root)
        for name in path.rstrip("/").split("/"):
            with opened(handle):
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=handle)
                    self._count()
                handle = os.open(name, FOLDER_FLAGS, dir_fd=handle)
        return handle

    def _write(self, folder: int, name: str, entry: tarfile.TarInfo) -> None:
        self._left_bytes -= entry.size
        if self._left_bytes < 0:
            raise self._within.fail(f"over {self._within.quota.bytes_max} bytes (workspace_bytes_max)")
        with opened(os.open(name, _NEW_FILE, entry.mode & 0o777 | 0o600, dir_fd=folder)) as handle:
            # Its own reader of one file costs as much as the file.
            self._file.seek(entry.offset_data)
            left = entry.size
            while left:
                data = self._file.read(min(left, CHUNK_BYTES))
                if not data:
                    raise _refused("the archive ends in the middle")
                left -= len(data)
                write_all(handle, data)
            time_s = min(int(entry.mtime), 2**33)
            os.utime(handle, (time_s, time_s))


def _make_folder(above: int, name: str, mode: int) -> None:
    """A folder that an archive names itself; empty for the one above."""
    with suppress(FileExistsError):
        os.mkdir(name or ".", 0o700, dir_fd=above)
    with opened(os.open(name or ".", FOLDER_FLAGS, dir_fd=above)) as handle:
        os.fchmod(handle, mode & 0o777 | 0o700)


def _checked(entry: tarfile.TarInfo) -> str:
    """A path of an archive as one below the folder; empty for the folder itself."""
    path = entry.name.removeprefix("./").rstrip("/")
    parts = path.split("/")
    if path in ("", ".") and entry.isdir():
        return ""
    repository = any(part.lower() == GIT_NAME for part in parts) and not (entry.isreg() and path in GIT_FILES)
    if len(os.fsencode(path)) > NAME_BYTES_MAX or repository or any(part in ("", ".", "..") for part in parts):
        raise _refused(f"'{printable(path)[:200]}' is no path of a workspace", "do not trust whoever sent it")
    return path


def _refused(fact: str, hint: str | None = None) -> WorkspaceError:
    return WorkspaceError(_STAGING, fact, hint=hint)
