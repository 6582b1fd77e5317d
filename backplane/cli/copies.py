"""Files that a run's receipt and patch are copied to: tried before the work, written after it.

The folder is held open from before the run, and a file that is not there yet is made at the end: the agent neither
sees it nor can turn it elsewhere by a link in its place.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from backplane.cli.streams import STDOUT
from backplane.errors import ConfigError, StoreError

LINKS_MAX: Final = 40
"""Links followed of one name: as many as Linux follows."""

_OWN: Final = ("/dev/fd", "/proc/{}/fd")
"""Folders with the descriptors of this process, of which Linux has the second."""

_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


class Copy:
    """One place that can be written, as yet unchanged.

    Args:
        name: a file; a pipe, a device or an open descriptor (`/dev/stdout`), written from where they stand; `-` is
            stdout.
        stdout_taken: stdout has a stream of messages, which nothing may come between.

    Raises:
        ConfigError: `config_invalid`, it cannot be written.
    """

    def __init__(self, name: str, *, stdout_taken: bool = False) -> None:
        self._name = "stdout" if name == "-" else os.path.abspath(name)
        self._fd: int | None = None
        """What was there; None where the file is to be made."""
        self._folder: int | None = None
        """Where the file is or will be; None for what is no file."""
        try:
            place, self._base = _place("/dev/fd/1" if name == "-" else name)
            self._path = os.path.join(place, self._base)
            if place not in _own():
                self._open(place)
                return
            self._fd = os.dup(int(self._base))
        except (OSError, ValueError) as error:
            self.close()
            number = getattr(error, "errno", None)
            why = "nobody reads it" if number == errno.ENXIO else getattr(error, "strerror", None) or error
            hint = "name a file in a folder that is there"
            raise ConfigError("config_invalid", f"{name!r} cannot be written: {why}", hint=hint) from error
        if stdout_taken and int(self._base) == STDOUT:
            self.close()
            raise ConfigError("config_invalid", f"{name!r}: stdout has the messages of --json", hint="name a file")

    def _open(self, place: str) -> None:
        self._folder = os.open(place, getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY)
        try:
            # A pipe that nobody reads would keep us for ever.
            flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
            self._fd = os.open(self._base, flags, dir_fd=self._folder)
        except FileNotFoundError:
            os.close(os.open(self._base, _NEW, 0o666, dir_fd=self._folder))
            os.unlink(self._base, dir_fd=self._folder)
            return
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            os.close(self._folder)
            self._folder = None

    def write(self, chunks: Iterator[bytes]) -> None:
        """Put this in place of what is in the file.

        Raises:
            StoreError: `receipt_store_failed`, the disk is full or the like, or the file's folder was moved.
        """
        try:
            if self._folder is None:
                assert self._fd is not None
                _write(self._fd, chunks)
            elif self._fd is not None and self._is_there(self._fd):
                os.ftruncate(self._fd, 0)
                _write(self._fd, chunks)
            elif not self._make(self._folder, chunks):
                raise self._failed("is not there: its folder was moved or replaced during the run")
        except OSError as error:
            raise self._failed(f"cannot be written: {error.strerror}") from error

    def _make(self, folder: int, chunks: Iterator[bytes]) -> bool:
        """The file anew, whole or not at all, in place of whatever has its name now; whether it can be found by it."""
        made = f".backplane-{os.urandom(8).hex()}"
        fd = _nameless(folder)
        named = fd is None
        if fd is None:
            fd = os.open(made, _NEW, 0o666, dir_fd=folder)
        try:
            _write(fd, chunks)
            if not named and _name(fd, folder, self._base):
                return self._is_there(fd)
            named = named or _name(fd, folder, made)
            os.rename(made, self._base, src_dir_fd=folder, dst_dir_fd=folder)
            return self._is_there(fd)
        except BaseException:
            if named:
                with suppress(OSError):
                    os.unlink(made, dir_fd=folder)
            raise
        finally:
            os.close(fd)

    def _is_there(self, fd: int) -> bool:
        with suppress(OSError):
            return os.path.samestat(os.fstat(fd), os.lstat(self._path))
        return False

    def _failed(self, fact: str) -> StoreError:
        # The same disk or limit may keep the store from it, too; then it has been printed.
        hint = "backplane receipts show has it, or stdout where the store could not take it either"
        return StoreError("receipt_store_failed", f"{self._name} {fact}", hint=hint)

    def close(self) -> None:
        """Let go of what is open."""
        for fd in (self._fd, self._folder):
            if fd is not None:
                os.close(fd)
        self._fd = self._folder = None


def _place(name: str) -> tuple[str, str]:
    """The folder and the name in it to which a name leads; the links of our own descriptors are not followed."""
    path = os.path.abspath(name)
    for _ in range(LINKS_MAX):
        folder, base = os.path.split(path)
        folder = os.path.realpath(folder)
        path = os.path.join(folder, base)
        if folder in _own() or not os.path.islink(path):
            return folder, base
        path = os.path.join(folder, os.readlink(path))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _nameless(folder: int) -> int | None:
    """A new file that goes with its maker until it gets a name; None where the system cannot make or name one."""
    if not hasattr(os, "O_TMPFILE") or not os.path.isdir(_OWN[1].format("self")):
        return None
    try:
        return os.open(".", os.O_TMPFILE | os.O_WRONLY, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            return None
        raise


def _name(fd: int, folder: int, name: str) -> bool:
    """Give a nameless file its name; False where something has it already."""
    try:
        os.link(f"{_OWN[1].format('self')}/{fd}", name, dst_dir_fd=folder, follow_symlinks=True)
    except FileExistsError:
        return False
    return True


def _own() -> tuple[str, ...]:
    return tuple(folder.format(os.getpid()) for folder in _OWN)


def _write(fd: int, chunks: Iterator[bytes]) -> None:
    for chunk in chunks:
        left = memoryview(chunk)
        while left:
            try:
                left = left[os.write(fd, left) :]
            except BlockingIOError:
                select.select([], [fd], [])
