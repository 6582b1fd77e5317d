"""Tries this machine's layers once per process, and keeps the results."""

from __future__ import annotations

import functools
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from typing import Final, Literal

import anyio.from_thread
import anyio.to_thread
import msgspec

from backplane.errors import BackendError
from backplane.process.launch import GUARD_WORKS
from backplane.process.tool import run_tool, search_path
from backplane.sandbox import landlock

TRIAL_S_MAX: Final = 5.0
"""Seconds for one trial, which usually takes some ms, or 1 s on a loaded machine; no trial follows a longer one."""

_SAID: Final = re.compile(rb"([0-9]{1,10})\nbubblewrap ([0-9A-Za-z.+~-]{1,40})\s*")
"""Output of a trial: its pid in the namespace, and bubblewrap's version."""

BASE: Final = ("--unshare-pid", "--unshare-ipc", "--as-pid-1")
"""Options of every use: a pid namespace whose first process is ours; when that ends, all others end, too."""

_KEPT: Final = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
"""Capabilities that root needs to use files of other users; they do not suffice to undo a mount."""

_AS_ROOT: Final = ("--cap-drop", "ALL", *(word for name in _KEPT for word in ("--cap-add", f"CAP_{name}")))

Name = Literal["bubblewrap", "network namespace", "landlock"]


class Probed(msgspec.Struct, frozen=True):
    """One layer and the result of its trial."""

    name: Name
    usable: bool
    version: str = ""
    why: str = ""
    """Why the layer is unusable, or ''."""
    fix: str = ""

    @property
    def fault(self) -> str:
        """The layer's name and why it is unusable; empty if it is usable."""
        return "" if self.usable else f"{self.name} is unusable: {self.why}"


class Probe(msgspec.Struct, frozen=True):
    """The layers of isolation on this machine, and whether each is usable."""

    bubblewrap: Probed
    network: Probed
    landlock: Probed
    command: tuple[str, ...] = ()
    """The command of bubblewrap with the options that worked; empty if no options did."""

    @property
    def landlock_version(self) -> int:
        return int(self.landlock.version or 0) if self.landlock.usable else 0

    def layers(self) -> tuple[Probed, ...]:
        return self.bubblewrap, self.network, self.landlock


def probe(environ: Mapping[str, str], stopped: Callable[[], object] = lambda: None) -> Probe:
    """Try the layers. Blocks for some ms the first time, so call it in a worker thread.

    Args:
        stopped: called during a trial; its exception ends the trial, and no result is kept.
    """
    return _bubblewrap(shutil.which("bwrap", path=search_path(environ)) if GUARD_WORKS else None).find(stopped)


async def try_layers(environ: Mapping[str, str]) -> Probe:
    """Try the layers in a worker thread; if cancelled, end the trial first."""
    return await anyio.to_thread.run_sync(probe, environ, anyio.from_thread.check_cancelled)


@functools.cache
def _bubblewrap(path: str | None) -> _Bubblewrap:
    return _Bubblewrap(path)


class _Bubblewrap:
    """Tries the bubblewrap at one path once per process; concurrent callers wait for the same trial."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._found: Probe | None = None
        self._finding = threading.Lock()

    def find(self, stopped: Callable[[], object]) -> Probe:
        """Return the result of the trial. Raises what `stopped` raises."""
        with self._finding:
            self._found = self._found or self._try(stopped)
            return self._found

    def _try(self, stopped: Callable[[], object]) -> Probe:
        path, why = self._path, ""
        if path is None:
            return _without("bwrap is not found" if GUARD_WORKS else "only Linux has it", "install bubblewrap")
        for rights in _rights():
            command = (path, *BASE, *rights)
            # Try bubblewrap and a network namespace at once, because most machines have both.
            try:
                no_network, version = _trial((*command, "--unshare-net"), path, stopped)
                if no_network:
                    why, version = _trial(command, path, stopped)
            except BackendError as error:
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


def _trial(command: tuple[str, ...], path: str, stopped: Callable[[], object]) -> tuple[str, str]:
    """Run a shell in bubblewrap; return why that fails, or "", and bubblewrap's version.

    The shell prints its pid, which is 1 in a new namespace, and then starts `bwrap --version`.

    Raises:
        BackendError: the program does not start, takes too long or is no bubblewrap; a second trial would fail, too.
    """
    trial = ("/bin/sh", "-c", 'echo $$; exec "$0" --version', path)
    # Not tied to us, as we would kill it then: if bubblewrap is killed right after its fork, its child waits for ever.
    done = run_tool((*command, *MOUNTS, *trial), env={}, timeout_s=TRIAL_S_MAX, stopped=stopped, tied=False)
    if done.code != 0:
        words = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.code}"]
        return words[-1][:200], ""
    said = _SAID.fullmatch(done.stdout)
    if said is None:
        return "it does not say its version", ""
    if said[1] != b"1":
        # The program only started its command.
        raise BackendError("execution_tool_failed", f"{path} makes no pid namespace")
    return "", said[2].decode()


def _rights() -> tuple[tuple[str, ...], ...]:
    """Return the sets of options to try in turn.

    Root first tries to keep its rights over files: in a user namespace, it has no rights over other users' files.
    """
    return (_AS_ROOT, ("--unshare-user",)) if os.geteuid() == 0 else ((),)


MOUNTS: Final = (
    *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"),
    # The kernel's settings belong to no namespace, and root can write them even without capabilities.
    *("--ro-bind-try", "/proc/sys", "/proc/sys", "--ro-bind-try", "/proc/sysrq-trigger", "/proc/sysrq-trigger"),
)
"""Mounts of every use: a read-only system, a minimal /dev, and a /proc of the namespace's own processes."""


@functools.cache
def _landlock() -> Probed:
    found = landlock.version() if GUARD_WORKS else 0
    if found >= landlock.VERSION_MIN:
        return Probed("landlock", True, str(found))
    why = f"version {found} is too old" if found else "not in this kernel, or not allowed here"
    return Probed("landlock", False, str(found or ""), why, "a kernel from 5.19 on with landlock in its list of lsm=")
