"""A program to start, its sandbox, and the errors of a failed start."""

from __future__ import annotations

import errno
import os
import sys
from typing import Final

import msgspec

from backplane.errors import BackendError

READ_BYTES_MAX: Final = 64 * 1024
"""Bytes of one read: the size of a pipe's buffer."""

START_S_MAX: Final = 10.0
"""Seconds until a guard must report that its host was started. 12 ms are usual; a loaded machine has needed 1 s."""

GUARD_WORKS: Final = sys.platform == "linux"
"""True on systems with subreapers, pidfds and /proc, which a guard needs."""


class StartCommand(msgspec.Struct, frozen=True):
    """A program to start."""

    argv: tuple[str, ...]
    env: dict[str, str]
    """The whole environment; nothing of ours is inherited."""
    cwd: str | None = None


class Cage(msgspec.Struct, frozen=True):
    """The sandbox of a child, as its guard makes it; `sandbox.plan` plans it."""

    wrapper: tuple[str, ...] = ()
    """A program and its arguments that start the guard as the first process of a namespace; empty for none."""
    landlock: tuple[bytes, int, int, list[bytes], list[bytes]] | None = None
    """Arguments of `guard.confine`; None for no Landlock rules."""
    door: tuple[int, int] | None = None
    """A socket over which the guard sends another one, which listens on this port of the namespace's loopback."""
    limits: tuple[tuple[int, int], ...] = ()
    """Limits of each process: numbers of `resource`, and values for soft and hard."""
    held: bool = False
    """The guard waits for a word before it starts the program; its own start overlaps with the caller's work."""


NO_CAGE: Final = Cage()


def spawn_failed(command: StartCommand, fault: Exception) -> BackendError:
    """Return the error for an exception of `Popen`."""
    in_cwd = command.cwd is not None and getattr(fault, "filename", None) == command.cwd
    return refused(command, b"cwd" if in_cwd else b"exec", getattr(fault, "errno", None) or errno.EINVAL)


def refused(command: StartCommand, where: bytes, number: int) -> BackendError:
    """Return the error for a start that failed at this place with this errno."""
    name = command.argv[0][:_NAME_CHARS_MAX] if command.argv else ""
    code = errno.errorcode.get(number, str(number))
    if where == b"cwd":
        name, hint = f"'{name}' in '{command.cwd}'", "make the folder or name another"
    else:
        name, hint = f"'{name}'", _HINTS.get(number, "")
    if number == errno.EINVAL and any("\0" in word for word in command.argv):
        fact = f"{name} could not be started: {code} (a word of its command has a NUL character)"
        return BackendError("sidecar_spawn_failed", fact, hint="remove it from the task: no program can receive it")
    fact = f"{name} {_PLACES.get(where, 'could not be started')}: {code} ({os.strerror(number)})"
    return BackendError("sidecar_spawn_failed", fact, hint=hint or None)


_NAME_CHARS_MAX: Final = 200
"""Characters of a program's name in an error."""

_PLACES: Final = {
    b"landlock": "could not be confined (landlock)",
    b"limits": "could not be confined (limits)",
    b"subreaper": "could not be guarded",
}
"""Places other than program and folder where a start can fail → words of the error."""

_HINTS: Final = {
    errno.ENOENT: "check the name and PATH; if the file is there, the program named in its first line is not",
    errno.EACCES: "make the file executable",
    errno.ENOEXEC: "the file is no program and has no first line that names one",
    errno.E2BIG: "arguments and environment are too long for this system; pass a file",
    errno.EMFILE: "too many files are open; raise the limit (ulimit -n) or run fewer at once",
    errno.EAGAIN: "too many processes; raise the limit (ulimit -u) or run fewer at once",
}
