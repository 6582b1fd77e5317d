"""A process of our own: a program, or the guard with a program's words, started by `subprocess`.

What a cage is, and who looks after what was started, is not known here.
"""

from __future__ import annotations

import errno
import marshal
import os
import select
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from typing import IO, Any, Final

from backplane.process import guard
from backplane.process.launch import (
    NO_CAGE,
    START_S_MAX,
    UMASK,
    Cage,
    StartCommand,
    refusal,
    spawn_failed,
)

try:
    import fcntl
except ImportError:  # pragma: no cover - a system without it has no such signal either
    fcntl = None  # type: ignore[assignment]

_CAN_TIE: Final = hasattr(fcntl, "F_SETSIG") and hasattr(os, "O_ASYNC")

Stdio = tuple[object, object, object]
"""stdin, stdout, stderr, as `subprocess.Popen` takes them."""

TERMINAL_WAIT_S: Final = 5.0
"""For SIGKILL to take effect. Longer only in uninterruptible sleep, which no signal ends."""


def spawn(command: StartCommand, stdio: Stdio, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
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
        raise spawn_failed(command, fault) from fault


def _signals_ignored() -> bool:
    # `nohup` and a shell's `&` start us so; exec would hand it on, and Popen resets only Python's own three.
    return any(signal.getsignal(number) is signal.SIG_IGN for number in _HANDED_ON)


_HANDED_ON: Final = frozenset(signal.valid_signals()) - {
    signal.SIGKILL,
    signal.SIGSTOP,
    signal.SIGPIPE,
    getattr(signal, "SIGXFSZ", signal.SIGPIPE),
}


def _spawn_launcher(command: StartCommand, stdio: Stdio, pass_fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Start the program by way of a small one that puts the signals right, as a thread of ours cannot."""
    told, tell = os.pipe()
    try:
        launcher = spawn_guard("launch", tell, command, stdio, pass_fds)
    except BaseException:
        os.close(told)
        raise
    finally:
        os.close(tell)
    try:
        in_time = select.select([told], [], [], START_S_MAX)[0]
        word = os.read(told, guard.WORD_BYTES_MAX) if in_time else b"exec %d" % errno.ETIMEDOUT
    finally:
        os.close(told)
    if word:
        launcher.kill()
        launcher.wait(TERMINAL_WAIT_S)
        with launcher:  # Closes its pipes, which live as long as the error that is raised here.
            raise refusal(command, word)
    return launcher


def spawn_guard(
    role: str,
    line: int,
    command: StartCommand,
    stdio: Stdio,
    pass_fds: tuple[int, ...],
    cage: Cage = NO_CAGE,
    life: int = -1,
) -> subprocess.Popen[bytes]:
    """Start `_guard.py`; the command travels in a file, so that its environment is not the guard's own.

    Args:
        life: where the cage has a wrapper: the reading end of a pipe that is tied to it, armed by the guard.
    """
    inside: dict[str, object] = {"landlock": cage.landlock} if cage.landlock else {}
    if cage.held:
        inside["held"] = True
    if cage.limits:
        inside["limits"] = cage.limits
    extra: tuple[Any, ...] = ()
    if cage.wrapper:
        # The wrapper stays until the end and must hold none of the pipes, or their ends would not be seen.
        inside["stdio"] = stdio
        extra, stdio = stdio, (subprocess.DEVNULL, subprocess.DEVNULL, stdio[2])
    if cage.door is not None:
        inside["door"] = cage.door
        extra += (cage.door[0],)
    stdin, stdout, stderr = stdio
    try:
        with _order_file() as order, ExitStack() as opened:
            if cage.wrapper:
                plane = os.pidfd_open(os.getpid())
                opened.callback(os.close, plane)
                inside["first"] = (plane, life)
                extra += (plane, life)
            order.write(_order_bytes(command, pass_fds, inside))
            order.flush()
            argv = [*cage.wrapper, *guard_command(), role, str(line), str(order.fileno())]
            started: subprocess.Popen[bytes] = subprocess.Popen(  # type: ignore[call-overload]
                argv,
                env=loader_env(),
                cwd="/",
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                bufsize=0,
                pass_fds=(line, order.fileno(), *extra, *pass_fds),
                start_new_session=role == "guard",
                umask=UMASK,
            )
            started.args = ()  # Nobody's any more, and long.
            return started
    except (OSError, ValueError) as fault:
        raise spawn_failed(command, fault) from fault


def guard_command() -> tuple[str, ...]:
    """The guard's program without its arguments."""
    return (sys.executable, "-I", "-S", _guard_file())


def _guard_file() -> str:
    # The compiled file, unless it is older than its source: compiling anew would add a third to each start.
    source, compiled = guard.__file__, str(getattr(guard, "__cached__", None))
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


def _order_bytes(command: StartCommand, pass_fds: tuple[int, ...], inside: dict[str, object]) -> bytes:
    argv = [os.fsencode(word) for word in command.argv]
    env = {os.fsencode(name): os.fsencode(value) for name, value in command.env.items()}
    cwd = None if command.cwd is None else os.fsencode(command.cwd)
    return marshal.dumps((argv, env, cwd, list(pass_fds), inside))


def loader_env() -> dict[str, str]:
    """Return what our own interpreter may need to find its library, and nothing of the command's."""
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH") if name in os.environ}


def has_ended(child: subprocess.Popen[bytes]) -> bool:
    """Whether the child has ended; where the system can, without reaping it, so that its group stays its own."""
    if not hasattr(os, "waitid"):
        return child.poll() is not None
    if child.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def pidfd_of(pid: int) -> int:
    """A descriptor that becomes readable at the end of this process; -1 where the system has none to give."""
    with suppress(AttributeError, OSError):
        return os.pidfd_open(pid)
    return -1


def kill_group(leader: subprocess.Popen[bytes], number: int = signal.SIGKILL) -> None:
    """Signal a child's process group, unless the child was reaped already."""
    # Only before the leader is reaped: until then nobody else can have this group's number.
    if leader.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader.pid, number)


def tie(reader: int, leader: int, *, armed: bool = True) -> None:
    """Have this leader's group killed once no writing end of the pipe is open, while a reading end is; on Linux alone.

    `PR_SET_PDEATHSIG` would have to be asked for between fork and exec, where Python cannot run safely beside other
    threads, and follows the thread that forked.

    Args:
        armed: it holds from now on; else from when somebody sets `O_ASYNC` on the reading end.
    """
    if not _CAN_TIE:
        return
    with suppress(OSError):  # It may have ended already; and no program is worse for having none.
        fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(reader, fcntl.F_SETOWN, -leader)
        if armed:
            fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)
