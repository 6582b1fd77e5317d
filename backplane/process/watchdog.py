"""A process beside a worker that kills it when it has not said for a while that it is alive.

A worker that was stopped, or hangs, cannot end what it has started; once it is killed the guards of its hosts notice
by their pidfd and kill those. The program below is run without our packages, and only built-in modules are loaded.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Final

from backplane.process.launch import StartCommand, spawn_failed
from backplane.process.spawn import loader_env

PROGRAM: Final = """
import _signal, posix, select, sys
worker, pipe, lease_ms = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for number in (_signal.SIGINT, _signal.SIGHUP, _signal.SIGTERM, _signal.SIGQUIT):
    _signal.signal(number, _signal.SIG_IGN)
life = posix.pidfd_open(worker)
if posix.getppid() != worker:
    posix._exit(0)
look = select.poll()
look.register(pipe, select.POLLIN)
look.register(life, select.POLLIN)
while True:
    ready = dict(look.poll(lease_ms))
    if life in ready:
        break
    if not ready:
        _signal.pidfd_send_signal(life, _signal.SIGKILL)
        break
    if not posix.read(pipe, 4096):
        break
"""
"""Argv: the worker's pid, the reading end of a pipe, milliseconds. Its end closed means an orderly end."""


class Watchdog:
    """Kills this process when `feed` was not called for `lease_s`, also while it is stopped. `close` ends it.

    Raises:
        BackendError: `sidecar_spawn_failed`.
    """

    def __init__(self, lease_s: float) -> None:
        reader, self._writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._writer, False)
        words = ("-I", "-S", "-c", PROGRAM, str(os.getpid()), str(reader), str(int(lease_s * 1000)))
        command = StartCommand((sys.executable, *words), env=loader_env())
        try:
            self._process = subprocess.Popen(
                command.argv,
                env=command.env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(reader,),
                start_new_session=True,
            )
        except OSError as fault:
            os.close(self._writer)
            raise spawn_failed(command, fault) from fault
        finally:
            os.close(reader)

    @property
    def is_alive(self) -> bool:
        """Whether it still watches; without it nobody would end our hosts when we are stopped."""
        return self._process.poll() is None

    def feed(self) -> None:
        """Say that this process is alive: another lease from now."""
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._writer, b".")

    def close(self) -> None:
        """End it in order: nobody watches any more."""
        os.close(self._writer)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
