"""Starts a program in a session of its own, or behind a guard, and kills its process group."""

from __future__ import annotations

import marshal
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from typing import IO, Any, Final

from backplane.errors import BackendError
from backplane.process import guard
from backplane.process.launch import GUARD_WORKS, Cage, StartCommand, spawn_failed

Stdio = tuple[object, object, object]
"""stdin, stdout, stderr, as `subprocess.Popen` takes them."""

NO_STDIO: Final[Stdio] = (subprocess.DEVNULL,) * 3


def spawn(
    command: StartCommand, stdio: Stdio, pass_fds: tuple[int, ...] = (), *, named: StartCommand | None = None
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own.

    Args:
        pass_fds: descriptors that the program inherits under the same numbers.
        named: the command that an error names (default: `command`).

    Raises:
        BackendError: `sidecar_spawn_failed`, with the errno's name.
    """
    named = named or command
    if not GUARD_WORKS:
        fact = f"'{named.argv[0][:200]}' is not started: on {sys.platform} no guard can end what it leaves running"
        raise BackendError("sidecar_spawn_failed", fact, hint="use Linux, or a container of it")
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
            umask=guard.UMASK,
        )
    except (OSError, ValueError) as fault:
        raise spawn_failed(named, fault) from fault


def spawn_foreground(command: StartCommand) -> subprocess.Popen[bytes]:
    """Start a program on this terminal, in our process group, so that Ctrl-C reaches it.

    Raises:
        BackendError: `sidecar_spawn_failed`, with the errno's name.
    """
    try:
        return subprocess.Popen(command.argv, env=command.env, cwd=command.cwd)
    except (OSError, ValueError) as fault:
        raise spawn_failed(command, fault) from fault


def spawn_guard(line: int, command: StartCommand, stdio: Stdio, cage: Cage) -> subprocess.Popen[bytes]:
    """Start a guard, which starts the command.

    The guard reads the command from a file, so that the command's environment does not become the guard's own.

    Args:
        line: the guard's end of the socket.

    Raises:
        BackendError: `sidecar_spawn_failed`.
        OSError: the file cannot be made.
    """
    inside: dict[str, object] = {"held": cage.held, "limits": cage.limits, "landlock": cage.landlock, "door": cage.door}
    extra: tuple[Any, ...] = () if cage.door is None else (cage.door[0],)
    if cage.wrapper:
        # The wrapper lives as long as the guard, so it must not keep the host's stdin and stdout open.
        inside["stdio"] = stdio
        extra, stdio = (*extra, *stdio), (subprocess.DEVNULL, subprocess.DEVNULL, stdio[2])
    with _order_file() as order, ExitStack() as opened:
        if cage.wrapper:
            plane = inside["plane"] = guard.pidfd_open(os.getpid())
            opened.callback(os.close, plane)
            extra += (plane,)
        argv = [os.fsencode(word) for word in command.argv]
        env = {os.fsencode(name): os.fsencode(value) for name, value in command.env.items()}
        cwd = None if command.cwd is None else os.fsencode(command.cwd)
        order.write(marshal.dumps((argv, env, cwd, inside)))
        order.flush()
        words = (*cage.wrapper, sys.executable, "-I", "-S", _guard_file(), str(line), str(order.fileno()))
        start = StartCommand(words, loader_env(), "/")
        return spawn(start, stdio, (line, order.fileno(), *extra), named=command)


def _guard_file() -> str:
    """Return the guard's compiled file, unless its source is newer: compiling makes a start a third longer."""
    source, compiled = guard.__file__, str(getattr(guard, "__cached__", None))
    with suppress(OSError):
        # We may not be allowed to read a file that another user compiled.
        if os.stat(compiled).st_mtime_ns >= os.stat(source).st_mtime_ns and os.access(compiled, os.R_OK):
            return compiled
    return source


def _order_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("order"), "wb")
    import tempfile  # Only a Python compiled on an old system needs it.

    return tempfile.TemporaryFile()


def loader_env() -> dict[str, str]:
    """Return the variables that our own interpreter may need to find its shared library, and no others."""
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH") if name in os.environ}


def reap(program: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait up to `timeout_s` for a program to end; return True if it has ended."""
    with suppress(subprocess.TimeoutExpired):
        program.wait(timeout_s)
    return program.returncode is not None


def kill_group(leader: subprocess.Popen[bytes]) -> None:
    """Kill a child's process group, unless the child was reaped already."""
    # Until the leader is reaped, no other group can have its number.
    if leader.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader.pid, signal.SIGKILL)
