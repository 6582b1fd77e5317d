"""How a program is started: directly, or by way of the guard; and what is said when it cannot be.

Blocking, and without an event loop, so that a program can load its own while another one starts.
"""

from __future__ import annotations

import _socket  # `socket` costs 5 ms, for its enums; `signal` 3
import errno
import os
import sys
from contextlib import ExitStack, suppress
from typing import Final, Protocol

import msgspec

from backplane.errors import BackendError, CageError
from backplane.process import guard as _guard

START_S_MAX: Final = 10.0
"""For a guard to report that its host was started; 12 ms are usual, a loaded machine has needed a second."""

UMASK: Final = 0o077
"""What a child makes is for its user alone."""

Stdio = tuple[object, object, object]
"""stdin, stdout, stderr, as `subprocess.Popen` takes them."""


class StartCommand(msgspec.Struct, frozen=True):
    """A program to start."""

    argv: tuple[str, ...]
    env: dict[str, str]
    """The whole environment; nothing of ours is inherited."""
    cwd: str | None = None


Evidence = tuple[str, str, str]
"""A row of `_guard.unseen`: kind, name, and how that is outside."""


class Cage(msgspec.Struct, frozen=True):
    """What is put around a child; `contain` works it out."""

    wrapper: tuple[str, ...] = ()
    """A program and its arguments that starts the guard as the first process of a namespace; empty for none."""
    evidence: tuple[Evidence, ...] = ()
    """What the guard must find inside of the wrapper, before it starts anything."""
    landlock: tuple[bytes, int, int, list[bytes], list[bytes]] | None = None
    """Arguments of `_guard.confine`; None for no such rules."""
    door: tuple[int, int] | None = None
    """A socket on which the guard sends another one, listening on this port of the namespace's loopback."""
    seccomp: bytes | None = None
    """A filter's program for system calls; None for no filter."""
    limits: tuple[tuple[int, int], ...] = ()
    """Of the system on each process: numbers of `resource` and values, soft and hard."""
    cgroup: str | None = None
    """`cgroup.procs` of a group that the guard joins."""
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


def not_held(cage: Cage, word: bytes) -> CageError:
    """What a guard's word says of a wrapper that did not do what it was asked for."""
    kind, name, _ = cage.evidence[int(word.split()[-1])]
    fact = f"{cage.wrapper[0]} does not hold what it starts: {_UNSEEN[kind].format(name)}"
    return CageError("sidecar_spawn_failed", fact, hint="have PATH lead to the system's own bubblewrap")


_UNSEEN: Final = {
    "namespace": "inside is still our own {} namespace",
    "closed": "{} can be written inside",
    "other": "{} is inside what it is outside",
}


def refused(command: StartCommand, where: bytes, number: int) -> BackendError:
    """What is said of a start that failed there with this errno."""
    name = command.argv[0][:_NAME_CHARS_MAX] if command.argv else ""
    code = errno.errorcode.get(number, str(number))
    if where == b"cwd":
        name, hint = f"'{name}' in '{command.cwd}'", "make the folder or name another"
    else:
        name, hint = f"'{name}'", _HINTS.get(number, "")
    fact = f"{name} {_PLACES.get(where, 'could not be started')}: {code} ({os.strerror(number)})"
    return BackendError("sidecar_spawn_failed", fact, hint=hint or None)


_NAME_CHARS_MAX: Final = 200
"""Of a program's name in a message."""

_PLACES: Final = {
    b"landlock": "could not be confined (landlock)",
    b"limits": "could not be confined (limits)",
    b"seccomp": "could not be confined (seccomp)",
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


class Leader(Protocol):
    """Our own child, the guard or the program itself: as much of `subprocess.Popen` as is asked of it."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...


GUARD_WORKS: Final = sys.platform == "linux" and hasattr(os, "pidfd_open") and bool(sys.executable)


class Launched(msgspec.Struct, frozen=True):
    """A program that was started, and that nobody looks after yet: `take_over` does."""

    command: StartCommand
    leader: Leader
    guard: bool
    pipes: tuple[int, int, int]
    """Our ends of its stdin, stdout, stderr; they do not block."""
    line: int
    """To the guard, which ends everything once it is closed; without one a pidfd, or -1."""
    life: int = -1
    """To the wrapper of a namespace, which the kernel kills once it is closed; -1 where there is none."""


def launch(
    command: StartCommand,
    *,
    guard: bool = True,
    pass_fds: tuple[int, ...] = (),
    cage: Cage = NO_CAGE,
    alone: bool = False,
) -> Launched:
    """Start a program; the arguments are those of `open_child`; `take_over` has to follow.

    Args:
        alone: we have one thread and no event loop. Then the guard is a fork of ours, a hundredth of the time that a
            Python of its own takes.

    Raises:
        BackendError: `sidecar_spawn_failed`, with the errno's name.
    """
    if not command.argv:
        raise refused(command, b"exec", errno.EINVAL)
    guard = guard and GUARD_WORKS
    try:
        with ExitStack() as theirs, ExitStack() as ours:
            stdin, stdin_ours = _pipe(theirs, ours)
            stdout_ours, stdout = _pipe(ours, theirs)
            stderr_ours, stderr = _pipe(ours, theirs)
            stdio = (stdin, stdout, stderr)
            line = -1
            if guard:
                ends = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
                line, line_theirs = (end.detach() for end in ends)
                ours.callback(os.close, line)
                theirs.callback(os.close, line_theirs)
            reader = life = -1
            if guard and cage.wrapper:
                reader, life = _pipe(theirs, ours)
            leader = _start(command, stdio, line_theirs if guard else -1, pass_fds, cage, reader, alone=alone)
            if reader >= 0:
                _tie(reader, leader.pid)
            if not guard:
                line = pidfd_of(leader.pid)
            ours.pop_all()
    except OSError as fault:
        raise spawn_failed(command, fault) from fault
    for fd in (stdin_ours, stdout_ours, stderr_ours, *((line,) if guard else ())):
        os.set_blocking(fd, False)
    pipes = (stdin_ours, stdout_ours, stderr_ours)
    return Launched(command, leader, guard, pipes, line, life)


def _pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    read_end, write_end = os.pipe()
    reader.callback(os.close, read_end)
    writer.callback(os.close, write_end)
    return read_end, write_end


def _start(
    command: StartCommand,
    stdio: tuple[int, int, int],
    line: int,
    pass_fds: tuple[int, ...],
    cage: Cage,
    life: int,
    *,
    alone: bool,
) -> Leader:
    if alone and min(line, *stdio) > _STDERR and not pass_fds and cage is NO_CAGE and _one_thread():
        return _fork_guard(command, stdio, line)
    # Loaded now, as it brings half of the event loop's modules.
    from backplane.process import spawn

    if line < 0:
        return spawn.spawn(command, stdio, pass_fds)
    return spawn.spawn_guard("guard", line, command, stdio, pass_fds, cage, life)


def _tie(life: int, wrapper: int) -> None:
    # Loaded now, as only a namespace needs it.
    from backplane.process import parent_death

    # Armed by the guard: a wrapper that is killed before its child has started leaves it waiting for ever.
    parent_death.tie(life, wrapper, armed=False)


_STDERR: Final = 2


def _one_thread() -> bool:
    # A debugger or a tracer may have started others: in a fork their locks are never let go.
    return len(os.listdir("/proc/self/task")) == 1


def _fork_guard(command: StartCommand, stdio: tuple[int, int, int], line: int) -> Leader:
    words = raw(command)
    pid = os.fork()
    if pid:
        return _Forked(pid)
    code = 0
    try:
        os.setsid()
        os.umask(UMASK)
        os.chdir("/")
        for place, fd in enumerate(stdio):
            os.dup2(fd, place)
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in (0, 1, 2, line):
                with suppress(OSError):  # The one that the list was read from.
                    os.close(int(name))
        _guard.guard(line, *words, [], {})
    except BaseException as fault:
        code = 1
        os.write(_STDERR, f"the guard failed: {fault!r}\n".encode())
    finally:
        os._exit(code)


def raw(command: StartCommand) -> tuple[list[bytes], dict[bytes, bytes], bytes | None]:
    """A command's words, environment and folder in bytes, as the guard takes them."""
    argv = [os.fsencode(word) for word in command.argv]
    env = {os.fsencode(name): os.fsencode(value) for name, value in command.env.items()}
    return argv, env, None if command.cwd is None else os.fsencode(command.cwd)


class _Forked:
    """A guard that is a fork of ours."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # Somebody else in this program reaped it.
                self.returncode = 0
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode


def pidfd_of(pid: int) -> int:
    """A descriptor that becomes readable at the end of this process; -1 where the system has none to give."""
    with suppress(AttributeError, OSError):
        return os.pidfd_open(pid)
    return -1
