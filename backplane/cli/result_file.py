"""Files that a command writes its results to: checked before the work, and written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from backplane.cli.command import wrong, wrong_words
from backplane.cli.streams import write_bytes, write_to
from backplane.errors import StoreError


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
        is_file = name != "-" and not name.startswith("/dev/") and (os.path.isfile(name) or not os.path.exists(name))
        self._name, self.path = name, Path(os.path.realpath(name)) if is_file else None
        if stdout_taken and name in ("-", "/dev/stdout"):
            raise wrong_words(f"{name!r} means stdout, which --json uses", "give the name of a file instead")
        if os.path.isdir(name or ".") or (self.path is not None and not os.access(self.path.parent, os.W_OK)):
            fact = f"{name!r} cannot be written: it is a folder, or its folder is missing or not writable"
            raise wrong(fact, "name a file in a folder that this user can write to")

    def write(self, chunks: Iterable[bytes]) -> None:
        """Write the result. Raises StoreError `receipt_store_failed`: the disk is full, the folder is gone."""
        try:
            if self.path is not None:
                _replace(self.path, chunks)
                return
            # A pipe that no process reads would block for ever; /dev/stdout may be a file that has text already.
            is_stdout, mode = self._name == "-", os.O_WRONLY | os.O_NONBLOCK | os.O_APPEND
            write = write_bytes if is_stdout else partial(write_to, os.open(self._name, mode))
            for chunk in chunks:
                write(chunk)
        except OSError as error:
            # The same disk or limit may keep the store from it, too; then it has been printed.
            hint = "`backplane receipts show` prints the receipt; if it was not stored either, it is on stdout"
            fact = f"{self._name} cannot be written: {error.strerror}"
            raise StoreError("receipt_store_failed", fact, hint=hint) from error


def _replace(path: Path, chunks: Iterable[bytes]) -> None:
    made = path.with_name(f".backplane-{os.urandom(8).hex()}")
    try:
        with made.open("wb") as file:
            if path.exists():
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
            file.writelines(chunks)
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)
