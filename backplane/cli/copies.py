"""Files that a run's id, receipt and patch are copied to: tried before the work, written at its beginning or end.

The folder is held open from before the run, and a file that is not there yet is made at the end: the agent neither
sees it nor can turn it elsewhere by a link in its place.
"""

from __future__ import annotations

import errno
import os
import re
import select
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from backplane.cli.start import wrong, wrong_words
from backplane.cli.streams import STDERR, STDOUT
from backplane.errors import StoreError

_NAMED: Final = {"-": STDOUT, "/dev/stdout": STDOUT, "/dev/stderr": STDERR}
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
        own = re.fullmatch(r"(?:/dev|/proc/self)/fd/(\d+)", name)
        number = int(own[1]) if own is not None else _NAMED.get(name)
        if stdout_taken and number == STDOUT:
            raise wrong_words(f"{name!r}: stdout has the messages of --json", "name a file")
        self._fd: int | None = None
        """What was there; None where the file is to be made."""
        self._folder: int | None = None
        """Where the file is or will be; None for what is no file."""
        try:
            if number is not None:
                self._fd = os.dup(number)
            else:
                self._path = os.path.realpath(name)
                self._open()
        except (OSError, ValueError) as error:
            self.close()
            is_idle = getattr(error, "errno", None) == errno.ENXIO
            why = "nobody reads it" if is_idle else getattr(error, "strerror", None) or error
            is_missing = getattr(error, "errno", None) in (errno.ENOENT, errno.ENOTDIR)
            place = "in a folder that is there" if is_missing else "that this user can write"
            raise wrong(f"{name!r} cannot be written: {why}", f"name a file {place}") from error

    @property
    def path(self) -> Path | None:
        """The file, with links followed; None for what is no file."""
        return Path(self._path) if self._folder is not None else None

    def _open(self) -> None:
        place, self._base = os.path.split(self._path)
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
            if self._fd is not None and (self._folder is None or self._is_there(self._fd)):
                if self._folder is not None:
                    os.ftruncate(self._fd, 0)
                    os.lseek(self._fd, 0, os.SEEK_SET)
                _write(self._fd, chunks)
            elif self._folder is not None and not self._make(self._folder, chunks):
                raise self._failed("is not there: its folder was moved or replaced during the run")
        except OSError as error:
            raise self._failed(f"cannot be written: {error.strerror}") from error

    def _make(self, folder: int, chunks: Iterator[bytes]) -> bool:
        """The file anew, whole or not at all, in place of whatever has its name now; whether it can be found by it."""
        made = f".backplane-{os.urandom(8).hex()}"
        fd = os.open(made, _NEW, 0o666, dir_fd=folder)
        try:
            _write(fd, chunks)
            os.rename(made, self._base, src_dir_fd=folder, dst_dir_fd=folder)
            return self._is_there(fd)
        except BaseException:
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


def _write(fd: int, chunks: Iterator[bytes]) -> None:
    for chunk in chunks:
        left = memoryview(chunk)
        while left:
            try:
                left = left[os.write(fd, left) :]
            except BlockingIOError:
                select.select([], [fd], [])
