"""Tries the layers that this machine has, once a process, and keeps the results."""

from __future__ import annotations

import functools
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from typing import Final, Literal

import anyio.to_thread
import msgspec

from backplane.errors import BackendError, BackplaneError
from backplane.process.launch import GUARD_WORKS
from backplane.process.tool import run_tool, search_path
from backplane.sandbox import landlock

TRIAL_S_MAX: Final = 5.0
"""Seconds for one trial; some ms are usual, 1 s on a loaded machine. After a longer one there is no other."""

LEFT_S_MAX: Final = 0.5
"""Seconds for an abandoned trial to end; it checks every 50 ms. After that another run waits for the same trial."""

_SAID: Final = re.compile(rb"([0-9]{1,10})\nbubblewrap ([0-9A-Za-z.+~-]{1,40})\s*")
"""Output of a trial: its process number in the namespace, and the version."""

BASE: Final = ("--unshare-pid", "--unshare-ipc", "--as-pid-1")
"""Options of every use: a pid namespace whose first process is ours, and whose end is the end of all in it."""

_KEPT: Final = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
"""What root needs to use files of other users; nothing with which a mount could be undone."""

_AS_ROOT: Final = ("--cap-drop", "ALL", *(word for name in _KEPT for word in ("--cap-add", f"CAP_{name}")))

Name = Literal["bubblewrap", "network namespace", "landlock"]


class Probed(msgspec.Struct, frozen=True):
    """One layer and the result of its trial."""

    name: Name
    usable: bool
    version: str = ""
    why: str = ""
    """Why it cannot be used; empty if it can."""
    fix: str = ""

    @property
    def fault(self) -> str:
        """Which layer is missing and why; empty if it is usable."""
        return "" if self.usable else f"{self.name} is unusable: {self.why}"


class Probe(msgspec.Struct, frozen=True):
    """The layers of this machine."""

    bubblewrap: Probed
    network: Probed
    landlock: Probed
    command: tuple[str, ...] = ()
    """Bubblewrap with the options that worked; empty if none did."""

    @property
    def landlock_version(self) -> int:
        return int(self.landlock.version or 0) if self.landlock.usable else 0

    def layers(self) -> tuple[Probed, ...]:
        return self.bubblewrap, self.network, self.landlock


def probe(environ: Mapping[str, str], stopped: Callable[[], bool] = lambda: False) -> Probe:
    """Try the layers. Blocks for some ms the first time, so call it in a worker thread.

    Args:
        stopped: called during a trial; True ends it, and its result is not kept.

    Raises:
        BackendError: `execution_tool_failed`, it was stopped.
    """
    path = shutil.which("bwrap", path=search_path(environ)) if GUARD_WORKS else None
    return _bubblewrap(path).find(stopped)


async def try_layers(environ: Mapping[str, str]) -> Probe:
    """Try the layers; if this is cancelled, the trial is ended first."""
    left, over = threading.Event(), threading.Event()
    over.set()

    def work() -> Probe:
        over.clear()
        try:
            return probe(environ, left.is_set)
        finally:
            over.set()

    try:
        return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)
    finally:
        left.set()
        if not over.is_set():  # Otherwise the end of this process could leave the trial's program behind.
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(over.wait, LEFT_S_MAX)


@functools.cache
def _bubblewrap(path: str | None) -> _Bubblewrap:
    return _Bubblewrap(path)


class _Bubblewrap:
    """Tries bubblewrap at a path, once for this process; who asks meanwhile waits for the same trial."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._found: Probe | None = None
        self._finding = threading.Lock()

    def find(self, stopped: Callable[[], bool]) -> Probe:
        """Return the result of the trial. Raises BackendError if it was stopped."""
        with self._finding:
            if self._found is None:
                self._found = self._try(stopped)
            return self._found

    def _try(self, stopped: Callable[[], bool]) -> Probe:
        path = self._path
        if path is None:
            return _without("bwrap is not found" if GUARD_WORKS else "only Linux has it", "install bubblewrap")
        why = ""
        for rights in _rights():
            command = (path, *BASE, *rights)
            # One trial of both, as most machines have both.
            try:
                no_network, version = _trial((*command, "--unshare-net"), path, stopped)
                if no_network:
                    why, version = _trial(command, path, stopped)
            except BackplaneError as error:
                if stopped():
                    raise
                return _without(error.message, f"see what {path} does")
            if not no_network or not why:
                network = Probed("network namespace", not no_network, version, no_network)
                return Probe(Probed("bubblewrap", True, version), network, _landlock(), command)
        fix = "allow unprivileged user namespaces (kernel.unprivileged_userns_clone, AppArmor), or run as root"
        return _without(why, fix)


def _without(why: str, fix: str) -> Probe:
    """Return the layers of a machine on which bubblewrap cannot be used."""
    network = Probed("network namespace", False, "", "bubblewrap is missing")
    return Probe(Probed("bubblewrap", False, "", why, fix), network, _landlock())


def _trial(command: tuple[str, ...], path: str, stopped: Callable[[], bool]) -> tuple[str, str]:
    """Run bubblewrap in itself, by a shell that prints its process number; return why it fails or "", and its version.

    Raises:
        BackendError: it cannot be started, takes too long or is no bubblewrap; so will the next one.
    """
    trial = ("/bin/sh", "-c", 'echo $$; exec "$0" --version', path)
    # Not tied to us: killed in the moment after its fork it leaves its child waiting for it for ever.
    done = run_tool((*command, *MOUNTS, *trial), env={}, timeout_s=TRIAL_S_MAX, stopped=stopped, tied=False)
    if done.code != 0:
        words = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.code}"]
        return words[-1][:200], ""
    said = _SAID.fullmatch(done.stdout)
    if said is None:
        return "it does not say its version", ""
    if said[1] != b"1":
        # It only started its command.
        raise BackendError("execution_tool_failed", f"{path} makes no pid namespace")
    return "", said[2].decode()


def _rights() -> tuple[tuple[str, ...], ...]:
    """Return the options to try, one after the other.

    Root keeps its rights over files where it may; in a namespace of users it has none over those of others.
    """
    return (_AS_ROOT, ("--unshare-user",)) if os.geteuid() == 0 else ((),)


MOUNTS: Final = (
    *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"),
    # Settings of the kernel belong to no namespace, and root may write them whatever else it has given up.
    *("--ro-bind-try", "/proc/sys", "/proc/sys", "--ro-bind-try", "/proc/sysrq-trigger", "/proc/sysrq-trigger"),
)
"""Everything to be read, nothing to be written, devices without owners, processes of the namespace alone."""


@functools.cache
def _landlock() -> Probed:
    found = landlock.version() if GUARD_WORKS else 0
    if found >= landlock.VERSION_MIN:
        return Probed("landlock", True, str(found))
    why = f"version {found} is too old" if found else "not in this kernel, or not allowed here"
    return Probed("landlock", False, str(found or ""), why, "a kernel from 5.19 on with landlock in its list of lsm=")
