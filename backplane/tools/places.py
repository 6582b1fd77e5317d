"""Finds, reads and writes files of the workspace, as far as the policy allows.

Links are followed first, so a path that leads out of the workspace is refused. A rule applies to the path as it is
written and to the place that it leads to. Not prevented: a command that swaps a folder for a link at the same moment;
it could open the same file itself.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from typing import Final

from backplane.policy.rules import Policy

FILE_BYTES_MAX: Final = 8 * 1024 * 1024
"""Bytes of the largest file that is read or written: more than any source file, and little memory for the host."""

_NAME_CHARS_MAX: Final = 40
"""Most characters of a file's name in the name of its temporary file, which may have 255 bytes."""


class ToolRefused(Exception):
    """A tool cannot do what was asked; the text is for the model."""


class Tree:
    """The folder that tools work in."""

    def __init__(self, root: str, policy: Policy) -> None:
        self.root = os.path.realpath(root)
        self.policy = policy

    def find(self, path: str) -> str:
        """Return the place that a path leads to, relative to the root, links followed; `.` is the root.

        Raises:
            ToolRefused: the place is outside the workspace, or the path cannot be read.
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

    def _names(self, path: str, place: str) -> tuple[str, str]:
        """Return the two names that rules apply to: the path relative to the root with its links, and its place."""
        written = os.path.relpath(os.path.join(self.root, path), self.root)
        return (place if written.split("/", 1)[0] == ".." else written), place

    def may_read(self, place: str) -> str | None:
        """Return why a place may not be read, or None if it may."""
        decision = self.policy.decide_read(place, self.root)
        return decision.reason if decision.allowed == "deny" else None

    def read(self, path: str) -> bytes:
        """Read a whole regular file.

        Raises:
            ToolRefused: the file is absent, denied, not regular, or over `FILE_BYTES_MAX`.
        """
        place = self.find(path)
        for name in self._names(path, place):
            if (denied := self.may_read(name)) is not None:
                raise ToolRefused(f"policy_denied: {denied}")
        try:
            # Non-blocking, because opening a pipe waits for a writer.
            with open(os.open(os.path.join(self.root, place), os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                _require_file(path, os.fstat(file.fileno()).st_mode)
                data = file.read(FILE_BYTES_MAX + 1)
        except IsADirectoryError as error:
            raise ToolRefused(f"{path}: it is a folder; list it with glob") from error
        except OSError as error:
            raise ToolRefused(f"{path}: {error.strerror}") from error
        if len(data) > FILE_BYTES_MAX:
            raise ToolRefused(f"{path}: it is over {FILE_BYTES_MAX} bytes; use bash to look at a part")
        return data

    def write(self, path: str, data: bytes) -> tuple[str, bool]:
        """Replace a file in one step, or make it with its folders.

        Returns:
            The file's place relative to the root, and True if the file is new.

        Raises:
            ToolRefused: the policy denies it, or the system refuses it.
        """
        place = self.find(path)
        for name in self._names(path, place):
            decision = self.policy.decide_write(name, self.root)
            if decision.allowed == "deny":
                raise ToolRefused(f"policy_denied: {decision.reason}")
        target = os.path.join(self.root, place)
        folder, name = os.path.split(target)
        temporary = os.path.join(folder, f".{name[:_NAME_CHARS_MAX]}.{secrets.token_hex(6)}")
        try:
            os.makedirs(folder, exist_ok=True)
            mode = os.stat(target).st_mode if os.path.lexists(target) else None
            if mode is not None:
                _require_file(path, mode)
            try:
                with open(temporary, "xb") as file:
                    file.write(data)
                    if mode is not None:
                        os.fchmod(file.fileno(), stat.S_IMODE(mode))
                os.replace(temporary, target)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary)
        except OSError as error:
            raise ToolRefused(f"{path}: {error.strerror}") from error
        return place, mode is None


def _require_file(path: str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise ToolRefused(f"{path}: it is no regular file")
