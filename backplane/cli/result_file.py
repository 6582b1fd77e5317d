"""Files that a command writes its results to: checked before the work, and written whole or not at all."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from backplane.cli.command import wrong, wrong_words
from backplane.cli.streams import STDERR, STDOUT, write_to
from backplane.errors import StoreError

_NAMED: Final = {"-": STDOUT, "/dev/stdout": STDOUT, "/dev/stderr": STDERR}


class ResultFile:
    """A file that is replaced at the end, or something that is written from where it stands.

    Args:
        name: a file; a pipe, a device or an open descriptor (`/dev/stdout`); `-` is stdout.
        stdout_taken: stdout has a stream of messages, which nothing may come between.

    Raises:
        ConfigError: `config_invalid`, it cannot be written; `usage_invalid`, stdout is taken.
    """

    path: Path | None = None
    """The file, with links followed; None for what is no file."""

    def __init__(self, name: str, *, stdout_taken: bool = False) -> None:
        self._name = "stdout" if name == "-" else name
        own = re.fullmatch(r"(?:/dev|/proc/self)/fd/(\d+)", name)
        number = int(own[1]) if own is not None else _NAMED.get(name)
        if stdout_taken and number == STDOUT:
            raise wrong_words(f"{name!r}: stdout is used by --json", "name a file")
        self._fd: int | None = None
        try:
            if number is not None:
                self._fd = os.dup(number)
            elif os.path.exists(name) and not os.path.isfile(name):
                # A pipe that nobody reads would block for ever.
                self._fd = os.open(name, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            else:
                self.path = Path(os.path.realpath(name))
                _check(self.path)
        except (OSError, ValueError) as error:
            number = getattr(error, "errno", None)
            why = "no process reads the pipe" if number == errno.ENXIO else getattr(error, "strerror", None) or error
            place = (
                "in an existing folder" if number in (errno.ENOENT, errno.ENOTDIR) else "that this user can write to"
            )
            raise wrong(f"{name!r} cannot be written: {why}", f"name a file {place}") from error

    def write(self, chunks: Iterator[bytes]) -> None:
        """Write the result. Raises StoreError `receipt_store_failed`: the disk is full, the folder is gone."""
        try:
            if self._fd is not None:
                for chunk in chunks:
                    write_to(self._fd, chunk)
            elif self.path is not None:
                _replace(self.path, chunks)
        except OSError as error:
            # The same disk or limit may keep the store from it, too; then it has been printed.
            hint = "`backplane receipts show` prints the receipt; if it was not stored either, it is on stdout"
            fact = f"{self._name} cannot be written: {error.strerror}"
            raise StoreError("receipt_store_failed", fact, hint=hint) from error

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _check(path: Path) -> None:
    """Raise OSError where the file could not be made or replaced."""
    os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY))
    with suppress(FileNotFoundError):
        path.lstat()
    for place in (path.parent, path):
        if place.exists() and not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _replace(path: Path, chunks: Iterator[bytes]) -> None:
    made = path.with_name(f".backplane-{os.urandom(8).hex()}")
    fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with suppress(FileNotFoundError):
            os.fchmod(fd, path.stat().st_mode & 0o777)
        for chunk in chunks:
            write_to(fd, chunk)
        made.replace(path)
    except BaseException:
        with suppress(OSError):
            made.unlink()
        raise
    finally:
        os.close(fd)
