"""Files of the workspace, opened so that no link leads out of it.

A path from a model comes in and is followed to its end; it is then opened folder by folder without
following anything more, so that nobody can put a link in between. What may be read and written is
the policy's word, asked about the place that was found.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import Final

from backplane.policy.rules import Policy

FILE_BYTES_MAX: Final = 8 * 1024 * 1024
"""Largest file read or written whole: more than any source file, far below what would trouble the host."""

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WHOLE: Final = 64
"""Names tried for a temporary file."""


class ToolRefused(Exception):
    """A tool cannot do what was asked; the text is for the model."""


class Tree:
    """The folder that tools work in."""

    def __init__(self, root: str, policy: Policy) -> None:
        self.root = os.path.realpath(root)
        self.policy = policy

    def find(self, path: str) -> str:
        """Where a path leads, relative to the root, links followed; `.` is the root.

        Raises:
            Refused: outside of the workspace, or no path at all.
        """
        if not path or "\0" in path:
            raise ToolRefused("the path is empty or has a NUL")
        try:
            found = os.path.realpath(os.path.join(self.root, path))
        except OSError as error:
            raise ToolRefused(f"{path}: {error.strerror}") from error
        except ValueError as error:
            raise ToolRefused("the path holds half a character (a lone surrogate)") from error
        if found != self.root and not found.startswith(self.root.rstrip("/") + "/"):
            raise ToolRefused(f"{path} is outside the workspace")
        return os.path.relpath(found, self.root)

    def _as_written(self, path: str) -> str | None:
        """Return a path relative to the root, links not followed, as rules apply to it, too; None if it is outside."""
        found = os.path.relpath(os.path.join(self.root, path), self.root)
        return None if found.split("/", 1)[0] == ".." else found

    def may_read(self, place: str) -> str | None:
        """Why a place may not be read; None when it may."""
        decision = self.policy.decide_read(place, self.root)
        return decision.reason if decision.allowed == "deny" else None

    def read(self, path: str) -> bytes:
        """A whole regular file.

        Raises:
            Refused: not there, not allowed, no regular file, or over `FILE_BYTES_MAX`.
        """
        place = self.find(path)
        denied = self.may_read(self._as_written(path) or place) or self.may_read(place)
        if denied is not None:
            raise ToolRefused(f"policy_denied: {denied}")
        try:
            return self._read(place)
        except OSError as error:
            raise _refused(path, error) from error

    def _read(self, place: str) -> bytes:
        folder, name = self._open_folder(place)
        try:
            # Non-blocking, as opening a pipe would wait for somebody to write.
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        finally:
            os.close(folder)
        try:
            kind = stat.S_IFMT(os.fstat(fd).st_mode)
            if kind == stat.S_IFDIR:
                raise OSError(errno.EISDIR, "it is a folder; list it with glob")
            if kind != stat.S_IFREG:
                raise OSError(errno.EINVAL, "it is no regular file")
            with open(fd, "rb", closefd=False) as file:
                data = file.read(FILE_BYTES_MAX + 1)
        finally:
            os.close(fd)
        if len(data) > FILE_BYTES_MAX:
            raise OSError(errno.EFBIG, f"it is over {FILE_BYTES_MAX} bytes; use bash to look at a part")
        return data

    def write(self, path: str, data: bytes) -> tuple[str, bool]:
        """Replace a file at once, or make it with its folders.

        Returns:
            Its place, relative to the root, and whether it is new.

        Raises:
            Refused: not allowed, or the system says no.
        """
        place = self.find(path)
        for named in (self._as_written(path) or place, place):
            decision = self.policy.decide_write(named, self.root)
            if decision.allowed == "deny":
                raise ToolRefused(f"policy_denied: {decision.reason}")
        try:
            return place, self._write(place, data)
        except OSError as error:
            raise _refused(path, error) from error

    def _write(self, place: str, data: bytes) -> bool:
        folder, name = self._open_folder(place, make=True)
        try:
            mode = _mode(name, folder)
            temporary, fd = _temporary(name, folder)
            try:
                with open(fd, "wb") as file:
                    file.write(data)
                    if mode is not None:
                        os.fchmod(fd, mode)
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise
        finally:
            os.close(folder)
        return mode is None

    def _open_folder(self, place: str, *, make: bool = False) -> tuple[int, str]:
        """The folder of a place, open, and the name in it. Raises OSError."""
        *parents, name = place.split("/")
        fd = os.open(self.root, _FOLDER)
        for parent in parents:
            outer = fd
            try:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(parent, dir_fd=outer)
                fd = os.open(parent, _FOLDER, dir_fd=outer)
            finally:
                os.close(outer)
        return fd, name


def _mode(name: str, folder: int) -> int | None:
    """Permissions of a file that is there; None when there is none. Raises OSError for what cannot be replaced."""
    try:
        seen = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(seen.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    return stat.S_IMODE(seen.st_mode)


def _temporary(name: str, folder: int) -> tuple[str, int]:
    for number in range(_WHOLE):
        # Cut, as a name may have 255 bytes and these are added to it.
        temporary = f".{name[:40]}.{os.getpid()}.{number}"
        with suppress(FileExistsError):
            return temporary, os.open(
                temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder
            )
    raise OSError(errno.EEXIST, "no name for a temporary file is free")


def _refused(path: str, error: OSError) -> ToolRefused:
    why = "the way there changed meanwhile" if error.errno == errno.ELOOP else error.strerror
    return ToolRefused(f"{path}: {why}")
