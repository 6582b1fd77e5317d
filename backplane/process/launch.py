"""Describes a program to start and its sandbox, and makes the errors of a failed start."""

from __future__ import annotations

import errno
import os
import sys
from typing import Final

import msgspec

from backplane.errors import BackendError

READ_BYTES_MAX: Final = 64 * 1024
"""Maximum bytes of one read: the size of a pipe's buffer."""

START_S_MAX: Final = 10.0
"""Time limit in seconds for a guard to report its host's start: usually 12 ms, once 1 s on a loaded machine."""

GUARD_WORKS: Final = sys.platform == "linux"
"""True on Linux, which has the subreapers, pidfds and /proc that a guard needs."""


class StartCommand(msgspec.Struct, frozen=True):
    """The command line, environment and folder of a program to start."""

    argv: tuple[str, ...]
    env: dict[str, str]
    """The whole environment; nothing of ours is inherited."""
    cwd: str | None = None


class Cage(msgspec.Struct, frozen=True):
    """The sandbox that a guard makes for its child; `sandbox.plan` plans it."""

    wrapper: tuple[str, ...] = ()
    """The command that starts the guard as the first process of a namespace; empty for none."""
    landlock: tuple[bytes, int, int, list[bytes], list[bytes]] | None = None
    """Arguments of `guard.confine`; None for no Landlock rules."""
    door: tuple[int, int] | None = None
    """The socket over which the guard sends a listening socket, and the loopback port on which that one listens."""
    limits: tuple[tuple[int, int], ...] = ()
    """Limits of each process: pairs of a `resource` number and a value, which is both the soft and the hard limit."""
    held: bool = False
    """True to start the program only on command, so that the guard's own start overlaps with the caller's work."""


NO_CAGE: Final = Cage()


def spawn_failed(command: StartCommand, fault: Exception) -> BackendError:
    """Return the error for an exception of `Popen`."""
    in_cwd = command.cwd is not None and getattr(fault, "filename", None) == command.cwd
    return refused(command, b"cwd" if in_cwd else b"exec", getattr(fault, "errno", None) or errno.EINVAL)


def refused(command: StartCommand, where: bytes, number: int) -> BackendError:
    """Return the error for a start that failed at the step `where` with the errno `number`."""
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
"""Maximum length of a program's name in an error."""

_PLACES: Final = {
    b"landlock": "could not be confined (landlock)",
    b"limits": "could not be confined (limits)",
    b"subreaper": "could not be guarded",
}
"""Steps of a start that can fail, other than `exec` and `cwd` → words of the error."""

_HINTS: Final = {
    errno.ENOENT: "check the name and PATH; if the file is there, the program named in its first line is not",
    errno.EACCES: "make the file executable",
    errno.ENOEXEC: "the file is no program and has no first line that names one",
    errno.E2BIG: "arguments and environment are too long for this system; pass a file",
    errno.EMFILE: "too many files are open; raise the limit (ulimit -n) or run fewer at once",
    errno.EAGAIN: "too many processes; raise the limit (ulimit -u) or run fewer at once",
}
