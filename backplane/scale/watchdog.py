"""Runs a process beside a worker that kills the worker after a lease without a sign of life.

A worker that was stopped, or hangs, cannot end what it has started. Once it is killed, the guards of its hosts see
that and kill them. The program below runs without our packages and loads built-in modules only.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Final

from backplane.errors import BackendError
from backplane.process.launch import StartCommand
from backplane.process.spawn import NO_STDIO, loader_env, reap, spawn

END_S_MAX: Final = 5.0
"""Seconds for the watchdog to end by itself before it is killed."""

PROGRAM: Final = """
import _signal, posix, select, sys
worker, pipe, lease_ms = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for number in (_signal.SIGINT, _signal.SIGHUP, _signal.SIGTERM, _signal.SIGQUIT):
    _signal.signal(number, _signal.SIG_IGN)
look = select.poll()
look.register(pipe, select.POLLIN)
while posix.getppid() == worker:
    if not look.poll(lease_ms):
        if posix.getppid() == worker:
            posix.kill(worker, _signal.SIGKILL)
        break
    if not posix.read(pipe, 4096):
        break
"""
"""Arguments: the worker's pid, the reading end of a pipe, and milliseconds. The pipe's end means an orderly end."""


class Watchdog:
    """Kills this process, even a stopped one, if `feed` is not called for `lease_s`. `close` ends the watchdog.

    Raises:
        BackendError: `sidecar_spawn_failed`.
    """

    def __init__(self, lease_s: float) -> None:
        reader, self._writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._writer, False)
        words = ("-I", "-S", "-c", PROGRAM, str(os.getpid()), str(reader), str(int(lease_s * 1000)))
        command = StartCommand((sys.executable, *words), loader_env(), "/")
        try:
            self._process = spawn(command, NO_STDIO, (reader,))
        except BackendError:
            os.close(self._writer)
            raise
        finally:
            os.close(reader)

    def feed(self) -> None:
        """Give a sign of life, which starts a new lease."""
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._writer, b".")

    def close(self) -> None:
        """End the watchdog without killing this process."""
        os.close(self._writer)
        if not reap(self._process, END_S_MAX):
            self._process.kill()
            self._process.wait()
