"""How a program is started: directly, or by way of the guard; and what is said when it cannot be.

Blocking, and without an event loop, so that a program can load its own while another one starts.
"""

from __future__ import annotations

import errno
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from typing import IO, Any, Final

import msgspec

from backplane import _guard
from backplane.errors import BackendError
from backplane.process.remains import pidfd_of

START_S_MAX: Final = 10.0
"""For a guard to report that its host was started; 12 ms are usual, a loaded machine has needed a second."""

UMASK: Final = 0o077
"""What a child makes is for its user alone."""

_TERMINAL_WAIT_S: Final = 5.0
"""For SIGKILL to take effect. Longer only in uninterruptible sleep, which no signal ends."""


Stdio = tuple[object, object, object]
"""stdin, stdout, stderr, as `subprocess.Popen` takes them."""


class Command(msgspec.Struct, frozen=True):
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
    seccomp: bytes | None = None
    """A filter's program for system calls; None for no filter."""
    limits: tuple[tuple[int, int], ...] = ()
    """Of the system on each process: numbers of `resource` and values, soft and hard."""
    cgroup: int | None = None
    """Open `cgroup.procs` of a group that the guard joins; ours to close once the child is there."""
    held: bool = False
    """The guard starts the program when it is told to: its own start takes as long as much that has to come first."""


NO_CAGE: Final = Cage()


def spawn(command: Command, stdio: Stdio, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    """Start the program as our own child, in a session of its own."""
    if _signals_ignored():
        return _spawn_launcher(command, stdio, pass_fds)
    stdin, stdout, stderr = stdio
    try:
        return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
            command.argv,
            env=command.env,
            cwd=command.cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            bufsize=0,
            pass_fds=pass_fds,
            start_new_session=True,
            umask=UMASK,
        )
    except (OSError, ValueError) as fault:
        raise _spawn_failed(command, fault) from fault


def _signals_ignored() -> bool:
    # `nohup` and a shell's `&` start us so; exec would hand it on, and Popen resets only Python's own three.
    return any(signal.getsignal(number) is signal.SIG_IGN for number in _HANDED_ON)


_HANDED_ON: Final = frozenset(signal.valid_signals()) - {
    signal.SIGKILL,
    signal.SIGSTOP,
    signal.SIGPIPE,
    getattr(signal, "SIGXFSZ", signal.SIGPIPE),
}


def _spawn_launcher(command: Command, stdio: Stdio, pass_fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Start the program by way of a small one that puts the signals right, as a thread of ours cannot."""
    told, tell = os.pipe()
    try:
        launcher = _spawn_guard("launch", tell, command, stdio, pass_fds)
    except BaseException:
        os.close(told)
        raise
    finally:
        os.close(tell)
    try:
        in_time = select.select([told], [], [], START_S_MAX)[0]
        word = os.read(told, _guard.WORD_BYTES_MAX) if in_time else b"exec %d" % errno.ETIMEDOUT
    finally:
        os.close(told)
    if word:
        launcher.kill()
        launcher.wait(_TERMINAL_WAIT_S)
        raise refusal(command, word)
    return launcher


def _spawn_guard(
    role: str, line: int, command: Command, stdio: Stdio, pass_fds: tuple[int, ...], cage: Cage = NO_CAGE
) -> subprocess.Popen[bytes]:
    """Start `_guard.py`; the command travels in a file, so that its environment is not the guard's own."""
    inside: dict[str, object] = {"landlock": cage.landlock} if cage.landlock else {}
    if cage.held:
        inside["held"] = True
    if cage.limits:
        inside["limits"] = cage.limits
    if cage.seccomp is not None:
        inside["seccomp"] = cage.seccomp
    extra: tuple[Any, ...] = ()
    if cage.wrapper:
        # The wrapper stays until the end and must hold none of the pipes, or their ends would not be seen.
        inside |= {"first": True, "stdio": stdio}
        extra, stdio = stdio, (subprocess.DEVNULL, subprocess.DEVNULL, stdio[2])
    if cage.door is not None:
        inside["door"] = cage.door
        extra += (cage.door[0],)
    if cage.cgroup is not None:
        inside["cgroup"] = cage.cgroup
        extra += (cage.cgroup,)
    stdin, stdout, stderr = stdio
    try:
        with _order_file() as order:
            order.write(_order_bytes(command, pass_fds, inside))
            order.flush()
            argv = [*cage.wrapper, *guard_command(), role, str(line), str(order.fileno())]
            return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
                argv,
                env=_loader_env(),
                cwd="/",
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                bufsize=0,
                pass_fds=(line, order.fileno(), *extra, *pass_fds),
                start_new_session=role == "guard",
                umask=UMASK,
            )
    except (OSError, ValueError) as fault:
        raise _spawn_failed(command, fault) from fault


def guard_command() -> tuple[str, ...]:
    """The guard's program without its arguments."""
    return (sys.executable, "-I", "-S", _guard_file())


def _guard_file() -> str:
    # The compiled file, unless it is older than its source: compiling anew would add a third to each start.
    source, compiled = _guard.__file__, str(getattr(_guard, "__cached__", None))
    with suppress(OSError):
        # One that another user compiled may be closed to us.
        if os.stat(compiled).st_mtime_ns >= os.stat(source).st_mtime_ns and os.access(compiled, os.R_OK):
            return compiled
    return source


def _order_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("order"), "wb")
    import tempfile

    return tempfile.TemporaryFile()


def _order_bytes(command: Command, pass_fds: tuple[int, ...], inside: dict[str, object]) -> bytes:
    argv = [os.fsencode(word) for word in command.argv]
    env = {os.fsencode(name): os.fsencode(value) for name, value in command.env.items()}
    cwd = None if command.cwd is None else os.fsencode(command.cwd)
    return marshal.dumps((argv, env, cwd, list(pass_fds), inside))


def _loader_env() -> dict[str, str]:
    # What our own interpreter may need to find its library, and nothing of the command's.
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH") if name in os.environ}


def _spawn_failed(command: Command, fault: Exception) -> BackendError:
    in_cwd = command.cwd is not None and getattr(fault, "filename", None) == command.cwd
    return refused(command, b"cwd" if in_cwd else b"exec", getattr(fault, "errno", None) or errno.EINVAL)


def refusal(command: Command, word: bytes) -> BackendError:
    """What a guard's word says of a start that failed."""
    where, number = word.split()[-2:]
    return refused(command, where, int(number))


def refused(command: Command, where: bytes, number: int) -> BackendError:
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


GUARD_WORKS: Final = sys.platform == "linux" and hasattr(os, "pidfd_open") and bool(sys.executable)


class Launched(msgspec.Struct, frozen=True):
    """A program that was started, and that nobody looks after yet: `take_over` does."""

    command: Command
    leader: subprocess.Popen[bytes]
    """The guard, or the program itself."""
    guard: bool
    pipes: tuple[int, int, int]
    """Our ends of its stdin, stdout, stderr; they do not block."""
    line: int
    """To the guard, which ends everything once it is closed; without one a pidfd, or -1."""
    namespaced: bool


def launch(command: Command, *, guard: bool = True, pass_fds: tuple[int, ...] = (), cage: Cage = NO_CAGE) -> Launched:
    """Start a program; the arguments are those of `open_child`; `take_over` has to follow.

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
                line, line_theirs = (end.detach() for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                ours.callback(os.close, line)
                theirs.callback(os.close, line_theirs)
                leader = _spawn_guard("guard", line_theirs, command, stdio, pass_fds, cage)
            else:
                leader = spawn(command, stdio, pass_fds)
                line = pidfd_of(leader.pid)
            ours.pop_all()
    except OSError as fault:
        raise _spawn_failed(command, fault) from fault
    for fd in (stdin_ours, stdout_ours, stderr_ours, *((line,) if guard else ())):
        os.set_blocking(fd, False)
    pipes = (stdin_ours, stdout_ours, stderr_ours)
    return Launched(command, leader, guard, pipes, line, namespaced=guard and bool(cage.wrapper))


def _pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    read_end, write_end = os.pipe()
    reader.callback(os.close, read_end)
    writer.callback(os.close, write_end)
    return read_end, write_end
