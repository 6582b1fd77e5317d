"""What is started, and in which cage; and what is said when it cannot be."""

from __future__ import annotations

import errno
import os
import sys
from typing import Final

import msgspec

from backplane.errors import BackendError

READ_BYTES_MAX: Final = 64 * 1024
"""One read: the size of a pipe's buffer."""

START_S_MAX: Final = 10.0
"""For a guard to report that its host was started; 12 ms are usual, a loaded machine has needed a second."""

UMASK: Final = 0o077
"""What a child makes is for its user alone."""


class StartCommand(msgspec.Struct, frozen=True):
    """A program to start."""

    argv: tuple[str, ...]
    env: dict[str, str]
    """The whole environment; nothing of ours is inherited."""
    cwd: str | None = None


class Cage(msgspec.Struct, frozen=True):
    """What is put around a child; `contain` works it out."""

    wrapper: tuple[str, ...] = ()
    """A program and its arguments that starts the guard as the first process of a namespace; empty for none."""
    landlock: tuple[bytes, int, int, list[bytes], list[bytes]] | None = None
    """Arguments of `_guard.confine`; None for no such rules."""
    door: tuple[int, int] | None = None
    """A socket on which the guard sends another one, listening on this port of the namespace's loopback."""
    limits: tuple[tuple[int, int], ...] = ()
    """Of the system on each process: numbers of `resource` and values, soft and hard."""
    held: bool = False
    """The guard starts the program when it is told to: its own start takes as long as much that has to come first."""


NO_CAGE: Final = Cage()


def spawn_failed(command: StartCommand, fault: Exception) -> BackendError:
    in_cwd = command.cwd is not None and getattr(fault, "filename", None) == command.cwd
    return refused(command, b"cwd" if in_cwd else b"exec", getattr(fault, "errno", None) or errno.EINVAL)


def refusal(command: StartCommand, word: bytes) -> BackendError:
    """What a guard's word says of a start that failed."""
    where, number = word.split()[-2:]
    return refused(command, where, int(number))


def refused(command: StartCommand, where: bytes, number: int) -> BackendError:
    """What is said of a start that failed there with this errno."""
    name = command.argv[0][:_NAME_CHARS_MAX] if command.argv else ""
    code = errno.errorcode.get(number, str(number))
    if where == b"cwd":
        name, hint = f"'{name}' in '{command.cwd}'", "make the folder or name another"
    else:
        name, hint = f"'{name}'", _HINTS.get(number, "")
    if number == errno.EINVAL and any("\0" in word for word in command.argv):
        fact = f"{name} could not be started: {code} (a word of its command has a NUL character)"
        return BackendError("sidecar_spawn_failed", fact, hint="take it out of the task: no program can be given one")
    fact = f"{name} {_PLACES.get(where, 'could not be started')}: {code} ({os.strerror(number)})"
    return BackendError("sidecar_spawn_failed", fact, hint=hint or None)


_NAME_CHARS_MAX: Final = 200
"""Of a program's name in a message."""

_PLACES: Final = {
    b"landlock": "could not be confined (landlock)",
    b"limits": "could not be confined (limits)",
    b"subreaper": "could not be guarded",
}
"""Where a start can fail that is neither the program nor its folder."""

_HINTS: Final = {
    errno.ENOENT: "check the name and PATH; if the file is there, the program named in its first line is not",
    errno.EACCES: "make the file executable",
    errno.ENOEXEC: "the file is no program and has no first line that names one",
    errno.E2BIG: "arguments and environment are too long for this system; pass a file",
    errno.EMFILE: "too many files are open; raise the limit (ulimit -n) or run fewer at once",
    errno.EAGAIN: "too many processes; raise the limit (ulimit -u) or run fewer at once",
}


GUARD_WORKS: Final = sys.platform == "linux" and hasattr(os, "pidfd_open") and bool(sys.executable)
