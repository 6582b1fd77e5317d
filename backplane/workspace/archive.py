"""Tar archives that carry a folder between the submitter and the worker of a queue.

The sender calls `pack`, the receiver `unpack`. The archive is untrusted: `unpack` follows no link, writes nothing
outside of the folder, and limits files and bytes.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from backplane.errors import BackplaneError, WorkspaceError
from backplane.process.locks import try_lock
from backplane.workspace import Quota, collect
from backplane.workspace.copying import write_all
from backplane.workspace.tree import (
    FILE_FLAGS,
    GIT_NAME,
    Entry,
    Scope,
    list_tree,
    opened,
    printable,
    read_file,
    scope,
)

CHUNK_BYTES: Final = 192 * 1024
"""Bytes that are read or written at a time."""

GIT_FILES: Final = (f"{GIT_NAME}/index", f"{GIT_NAME}/info/exclude")
"""The only files of a repository that are sent: its index (the tracked files) and the owner's own ignore rules."""

GIT_FILE_BYTES_MAX: Final = 256 << 20
"""Maximum size in bytes of a file in `GIT_FILES`; a larger one is not sent."""

NO_TIME_S: Final = 315_619_200
"""Modification time of entries without one, in seconds: 1980-01-02, because zip files cannot store an earlier year."""

_STAGING: Final = "workspace_staging_failed"
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


# The sender's side ----------------------------------------------------------------------------------------------------


def pack(folder: Path, quota: Quota, *, times: bool = True) -> Iterator[bytes]:
    """Yield a folder as a tar archive, in pieces; the folder must not change meanwhile. Blocking.

    Args:
        times: store the files' times; without them, equal contents always give equal archives.

    Raises:
        WorkspaceError: `workspace_staging_failed`, a file or folder cannot be read.
    """
    within = scope(_STAGING, quota)
    try:
        listing = list_tree(str(folder), within)
        for path, facts in listing.folders[1:]:
            yield _header(path, tarfile.DIRTYPE, facts)
        for entry in listing.files:
            within.go_on()
            yield from _pack_file(folder, entry, within, times)
        for path in GIT_FILES:
            # These files were made with the copy, so their times mean nothing and are not sent.
            with suppress(FileNotFoundError):
                found = read_file(folder / path, GIT_FILE_BYTES_MAX)
                if found is not None:
                    yield _header(path, tarfile.REGTYPE, found[1], len(found[0]))
                    yield found[0] + bytes(-len(found[0]) % tarfile.BLOCKSIZE)
    except OSError as error:
        raise within.cannot("pack", str(error.filename or folder), error) from error
    yield bytes(2 * tarfile.BLOCKSIZE)


def _pack_file(folder: Path, entry: Entry, within: Scope, times: bool) -> Iterator[bytes]:
    path, facts = entry
    if stat.S_ISLNK(facts.st_mode):
        yield _header(path, tarfile.SYMTYPE, facts, target=os.readlink(folder / path))
        return
    with opened(os.open(folder / path, FILE_FLAGS)) as handle:
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
    # The receiver ignores the times of folders and links.
    entry = tarfile.TarInfo(path.rstrip("/"))
    entry.type, entry.linkname, entry.size = kind, target, size
    entry.mode, entry.mtime = facts.st_mode & 0o777, time_s
    return entry.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def read_pieces(path: Path) -> Iterator[bytes]:
    """Yield the content of a file in pieces. Raises OSError."""
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            yield piece


# The receiver's side --------------------------------------------------------------------------------------------------


@contextmanager
def incoming(home: Path) -> Iterator[Path]:
    """Make a folder for one incoming archive, and remove it at the end; `sweep` removes those of killed processes."""
    folder = home / "incoming" / secrets.token_hex(16)
    folder.mkdir(mode=0o700, parents=True)
    try:
        with opened(os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        collect(folder)


def sweep(home: Path) -> None:
    """Remove the folders of incoming archives whose receiver was killed; skip those that cannot be removed."""
    for folder in (home / "incoming").glob("*"):
        with suppress(OSError, BackplaneError):
            if not _is_held(folder / "lock"):
                collect(folder)


def _is_held(lock: Path) -> bool:
    with opened(os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)) as handle:
        return not try_lock(handle)


def unpack(archive: Path, folder: Path, quota: Quota) -> None:
    """Unpack an untrusted archive into a new folder. Blocking.

    It may have only regular files, folders and symbolic links, and no path through a link.

    Raises:
        WorkspaceError: `workspace_staging_failed`: the archive is damaged, has a path that leaves the folder or names a
            repository, has a hard link or device, or is over the quota; or the disk is full.
    """
    within = scope(_STAGING, quota)
    folder.mkdir(mode=0o700)
    try:
        # No extraction filter: `data` refuses links that lead out of the tree; here they are copied as links.
        with tarfile.open(archive, mode="r:", encoding="utf-8") as tar:
            unpacker = _Unpacker(tar, folder, within)
            while (entry := tar.next()) is not None:
                within.go_on()
                unpacker.make(entry)
                tar.members.clear()  # type: ignore[attr-defined]  # A million of them are a gigabyte.
            if archive.stat().st_size < tar.offset + tarfile.BLOCKSIZE:
                raise within.fail("the archive ends in the middle")
    except OSError as error:
        raise within.cannot("unpack", str(error.filename or ""), error) from error
    except (tarfile.TarError, ArithmeticError, RecursionError, ValueError) as error:
        raise within.fail(f"the archive is damaged: {error}") from error


class _Unpacker:
    def __init__(self, tar: tarfile.TarFile, folder: Path, within: Scope) -> None:
        self._tar, self._folder, self._within = tar, folder, within
        self._left_bytes, self._left_files = within.quota.bytes_max, within.quota.files_max
        self._folders = {""}
        """Folders made so far; a path through a file or link is refused."""

    def make(self, entry: tarfile.TarInfo) -> None:
        path = _checked(entry)
        if not path:
            return
        above = path.rpartition("/")[0]
        self._make_folder(above)
        place = self._folder / path
        try:
            if entry.isdir():
                self._make_folder(path)
                place.chmod(entry.mode & 0o777 | 0o700)
                return
            self._count()
            if entry.issym():
                os.symlink(entry.linkname, place)
            else:
                self._write(place, entry)
        except FileExistsError as error:
            raise _refused(f"'{printable(path)[:200]}' comes twice in the archive", "pack each path once") from error

    def _count(self) -> None:
        self._left_files -= 1
        if self._left_files < 0:
            raise self._within.fail(f"over {self._within.quota.files_max} files (workspace_files_max)")

    def _make_folder(self, path: str) -> None:
        """Make a folder and its parents. Raises WorkspaceError: the archive has a file or link at one of them."""
        if path in self._folders:
            return
        self._make_folder(path.rpartition("/")[0])
        self._count()
        try:
            os.mkdir(self._folder / path, 0o700)
        except FileExistsError as error:
            fact = f"'{printable(path)[:200]}' of the archive is a folder and something else"
            raise _refused(fact, "pack each path once, and no path through a link") from error
        self._folders.add(path)

    def _write(self, place: Path, entry: tarfile.TarInfo) -> None:
        self._left_bytes -= entry.size
        if self._left_bytes < 0:
            raise self._within.fail(f"over {self._within.quota.bytes_max} bytes (workspace_bytes_max)")
        source = self._tar.extractfile(entry)
        assert source is not None, "a regular file"
        with opened(os.open(place, _NEW_FILE, entry.mode & 0o777 | 0o600)) as handle:
            while data := source.read(CHUNK_BYTES):
                write_all(handle, data)
            time_s = min(int(entry.mtime), 2**33)
            os.utime(handle, (time_s, time_s))


def _checked(entry: tarfile.TarInfo) -> str:
    """Return an entry's path below the folder, empty for the folder itself. Raises WorkspaceError."""
    path = entry.name.removeprefix("./").rstrip("/")
    if path in ("", ".") and entry.isdir():
        return ""
    if not (entry.isdir() or entry.issym() or (entry.isreg() and not entry.issparse())):
        fact = f"'{printable(path)[:200]}' is no file, folder or symbolic link, and nothing else travels"
        raise _refused(fact, "pack it anew in the format gnu, hard links as files, devices left out")
    parts = path.split("/")
    repository = any(part.lower() == GIT_NAME for part in parts) and not (entry.isreg() and path in GIT_FILES)
    if entry.size < 0:
        raise _refused("the archive is damaged: a size below nothing")
    if repository or any(part in ("", ".", "..") for part in parts):
        raise _refused(f"'{printable(path)[:200]}' is no path of a workspace", "do not trust whoever sent it")
    return path


def _refused(fact: str, hint: str | None = None) -> WorkspaceError:
    return WorkspaceError(_STAGING, fact, hint=hint)
