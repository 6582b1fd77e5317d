"""Files that a command writes its results to: checked before the work, and written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from backplane.cli.command import wrong, wrong_words
from backplane.cli.streams import STDERR, STDOUT, write_to
from backplane.errors import StoreError

_NAMED: Final = {"-": STDOUT, "/dev/stdout": STDOUT, "/dev/stderr": STDERR}


class ResultFile:
    """A file that is replaced when the result is there, or a pipe or device that the result is written to.

    Args:
        name: `-` is stdout.
        stdout_taken: stdout has a stream of messages, which nothing may come between.

    Attributes:
        path: the file, with links followed; None for a pipe or device.

    Raises:
        ConfigError: `config_invalid`, it cannot be written; `usage_invalid`, stdout is taken.
    """

    def __init__(self, name: str, *, stdout_taken: bool = False) -> None:
        self._name, self._fd = name, _NAMED.get(name)
        self.path: Path | None = None
        if stdout_taken and self._fd == STDOUT:
            raise wrong_words(f"{name!r}: stdout is used by --json", "name a file")
        try:
            if self._fd is None and os.path.exists(name) and not os.path.isfile(name):
                self._fd = os.open(name, os.O_WRONLY | os.O_NONBLOCK)  # A pipe without a reader would block for ever.
            elif self._fd is None:
                self.path = Path(os.path.realpath(name))
                with _beside(self.path) as made:
                    made.touch()
        except OSError as error:
            fact = f"{name!r} cannot be written: {error.strerror}"
            raise wrong(fact, "name a file in a folder that this user can write to") from error

    def write(self, chunks: Iterable[bytes]) -> None:
        """Write the result. Raises StoreError `receipt_store_failed`: the disk is full, the folder is gone."""
        try:
            if self.path is not None:
                _replace(self.path, chunks)
            elif self._fd is not None:
                for chunk in chunks:
                    write_to(self._fd, chunk)
        except OSError as error:
            # The same disk or limit may keep the store from it, too; then it has been printed.
            hint = "`backplane receipts show` prints the receipt; if it was not stored either, it is on stdout"
            fact = f"{self._name} cannot be written: {error.strerror}"
            raise StoreError("receipt_store_failed", fact, hint=hint) from error


def _replace(path: Path, chunks: Iterable[bytes]) -> None:
    with _beside(path) as made:
        with made.open("wb") as file:
            if path.exists():
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
            file.writelines(chunks)
        made.replace(path)


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Yield the path of a new file in the same folder, which is removed if it is there at the end."""
    made = path.with_name(f".backplane-{os.urandom(8).hex()}")
    try:
        yield made
    finally:
        made.unlink(missing_ok=True)
