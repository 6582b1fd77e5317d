"""Files that a run's receipt and patch are copied to, opened before the work.

What is opened then is what is written at the end: a link that the agent puts in the file's place leads nowhere, and
a place that cannot be written is told before anything is started.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress

from backplane.errors import ConfigError, StoreError


class Copy:
    """One file, open and as yet unchanged.

    Raises:
        ConfigError: `config_invalid`, it cannot be written.
    """

    def __init__(self, name: str) -> None:
        self._path = os.path.abspath(name)
        try:
            self._is_new = not os.path.lexists(self._path)
            # A pipe that nobody reads would keep us for ever.
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
        except (OSError, ValueError) as error:
            number = getattr(error, "errno", None)
            why = "nobody reads it" if number == errno.ENXIO else getattr(error, "strerror", None) or error
            hint = "name a file in a folder that is there"
            raise ConfigError("config_invalid", f"{name!r} cannot be written: {why}", hint=hint) from error
        os.set_blocking(self._fd, True)

    def write(self, chunks: Iterator[bytes]) -> None:
        """Put this in place of what is in the file.

        Raises:
            StoreError: `receipt_store_failed`, the disk is full or the like, or the file was removed or replaced.
        """
        try:
            if stat.S_ISREG(os.fstat(self._fd).st_mode):
                os.ftruncate(self._fd, 0)
            for chunk in chunks:
                left = memoryview(chunk)
                while left:
                    left = left[os.write(self._fd, left) :]
            self._is_new = False
            is_there = self._is_there()
        except OSError as error:
            raise self._failed(f"cannot be written: {error.strerror}") from error
        if not is_there:
            raise self._failed("was removed or replaced during the run, and nothing was written in its place")

    def _is_there(self) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._fd), os.stat(self._path))
        return False

    def _failed(self, fact: str) -> StoreError:
        return StoreError("receipt_store_failed", f"{self._path} {fact}", hint="backplane receipts show has it")

    def close(self) -> None:
        """Let go of the file; one that we made and never wrote to is removed."""
        with suppress(OSError):
            if self._is_new and self._is_there():
                os.unlink(self._path)
        os.close(self._fd)
