"""Which layers this machine really has: each is tried, once a process, and the answer kept."""

from __future__ import annotations

import functools
import importlib
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final, Literal

import anyio.to_thread
import msgspec

from backplane.errors import BackendError, BackplaneError
from backplane.process import GUARD_WORKS, Tool, begin_tool, search_path
from backplane.sandbox import cgroup, landlock

TRIAL_S_MAX: Final = 5.0
"""For one trial; it takes some ms, a second on a loaded machine. After one that takes longer there is no other."""

_SAID: Final = re.compile(rb"([0-9]{1,10})\nbubblewrap ([0-9A-Za-z.+~-]{1,40})\s*")
"""Of a trial: its number as a process, and the version."""

BASE: Final = ("--unshare-pid", "--unshare-ipc", "--as-pid-1")
"""Options of every use: a pid namespace whose first process is ours, and whose end is the end of all in it."""

_KEPT: Final = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
"""What root needs to use files of other users; nothing with which a mount could be undone."""

_AS_ROOT: Final = ("--cap-drop", "ALL", *(word for name in _KEPT for word in ("--cap-add", f"CAP_{name}")))

Name = Literal["bubblewrap", "network namespace", "landlock", "cgroup"]


class Probed(msgspec.Struct, frozen=True):
    """One layer and the result of its trial."""

    name: Name
    usable: bool
    version: str = ""
    why: str = ""
    """Why it cannot be used; empty when it can."""
    fix: str = ""


class Probe(msgspec.Struct, frozen=True):
    """The layers of this machine."""

    bubblewrap: Probed
    network: Probed
    landlock: Probed
    cgroup: Probed
    command: tuple[str, ...] = ()
    """Bubblewrap with the options that worked; empty where none did."""

    @property
    def landlock_version(self) -> int:
        return int(self.landlock.version or 0) if self.landlock.usable else 0

    def layers(self) -> tuple[Probed, ...]:
        return self.bubblewrap, self.network, self.landlock, self.cgroup


def probe(environ: Mapping[str, str]) -> Probe:
    """Try the layers; blocking for some ms the first time, so call it in a worker thread."""
    return _probe(_bubblewrap(_path(environ)))


@contextmanager
def trial_begun(environ: Mapping[str, str]) -> Iterator[None]:
    """Begin the first trial, so that it is done when `try_layers` asks for it; the block's end is the trial's."""
    bubblewrap = _bubblewrap(_path(environ))
    bubblewrap.begin()
    try:
        yield
    finally:
        bubblewrap.drop()


async def try_layers(environ: Mapping[str, str]) -> Probe:
    """Try the layers; while the first trial's program works, the rest of this room is loaded."""
    bubblewrap, left = _bubblewrap(_path(environ)), threading.Event()
    await anyio.to_thread.run_sync(bubblewrap.begin)
    try:
        importlib.import_module("backplane.sandbox.run")
        return await anyio.to_thread.run_sync(_probe, bubblewrap, left, abandon_on_cancel=True)
    finally:
        bubblewrap.leave(left)
        bubblewrap.drop()


def _probe(bubblewrap: Bubblewrap, left: threading.Event | None = None) -> Probe:
    found, network, command = bubblewrap.find(left)
    return Probe(found, network, _landlock(), _cgroup(), command)


def without(found: Probe, *names: Name, why: str = "hidden", fix: str = "") -> Probe:
    """The same machine, were these layers not there."""
    hidden = {layer.name: Probed(layer.name, False, "", why, fix) for layer in found.layers() if layer.name in names}
    if "bubblewrap" in hidden:
        hidden["network namespace"] = _NO_NETWORK
    return Probe(
        hidden.get("bubblewrap", found.bubblewrap),
        hidden.get("network namespace", found.network),
        hidden.get("landlock", found.landlock),
        hidden.get("cgroup", found.cgroup),
        () if "bubblewrap" in hidden else found.command,
    )


_NO_NETWORK: Final = Probed("network namespace", False, "", "bubblewrap is missing")


def _path(environ: Mapping[str, str]) -> str | None:
    return shutil.which("bwrap", path=search_path(environ)) if GUARD_WORKS else None


@functools.cache
def _bubblewrap(path: str | None) -> Bubblewrap:
    return Bubblewrap(path)


_Found = tuple[Probed, Probed, tuple[str, ...]]
"""Bubblewrap, its network namespace, and the options that worked."""


class Bubblewrap:
    """Bubblewrap where it is found, tried once."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._found: _Found | None = None
        self._begun: Tool | None = None
        self._at_work: tuple[Tool, threading.Event | None] | None = None
        self._starting = threading.Lock()
        self._finding = threading.Lock()

    def begin(self) -> None:
        """Start the first trial, unless that was done; `drop` has to follow."""
        if self._path is None or not self._finding.acquire(blocking=False):
            return
        try:
            if self._found is None and self._begun is None:
                with suppress(BackplaneError):  # The trial itself says why.
                    self._begun = _start((self._path, *BASE, *_rights()[0], "--unshare-net"), self._path)
        finally:
            self._finding.release()

    def drop(self) -> None:
        """End the first trial, if nobody asked for its result."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.close()

    def find(self, left: threading.Event | None = None) -> _Found:
        """The result, of the trial at work or of one that is begun and ended here.

        Args:
            left: set by `leave`, when nobody waits for this call any more: what it found then is not kept.
        """
        with self._finding:
            if self._found is not None:
                return self._found
            begun, self._begun = self._begun, None
            found = self._try(begun, left)
            if left is None or not left.is_set():
                self._found = found
            return found

    def leave(self, left: threading.Event) -> None:
        """End the trial of a call of `find` that nobody waits for, which starts no other one then."""
        with self._starting:
            left.set()
            if self._at_work is not None and self._at_work[1] is left:
                self._at_work[0].kill()

    def _try(self, begun: Tool | None, left: threading.Event | None) -> _Found:
        path = self._path
        if path is None:
            why = "bwrap is not found" if sys.platform.startswith("linux") else "only Linux has it"
            return Probed("bubblewrap", False, "", why, "install bubblewrap"), _NO_NETWORK, ()
        why = ""
        for rights in _rights():
            command = (path, *BASE, *rights)
            # One trial of both, as most machines have both.
            try:
                no_network, version = self._trial((*command, "--unshare-net"), path, begun, left)
                begun = None
                if no_network:
                    why, version = self._trial(command, path, None, left)
            except BackplaneError as error:
                return Probed("bubblewrap", False, "", error.message, f"see what {path} does"), _NO_NETWORK, ()
            if not no_network or not why:
                network = Probed("network namespace", not no_network, version, no_network)
                return Probed("bubblewrap", True, version), network, command
        fix = "allow unprivileged user namespaces (kernel.unprivileged_userns_clone, AppArmor), or run as root"
        return Probed("bubblewrap", False, "", why, fix), _NO_NETWORK, ()

    def _trial(
        self, command: tuple[str, ...], path: str, begun: Tool | None, left: threading.Event | None
    ) -> tuple[str, str]:
        """Run a trial to its end, one that was begun or a new one: why it fails or "", and the version it says.

        Raises:
            BackendError: it cannot be started, takes too long or is no bubblewrap; so will the next one.
        """
        with self._starting:
            if left is not None and left.is_set():
                if begun is not None:
                    begun.close()
                raise BackendError("execution_tool_failed", f"{path} was not waited for")
            tool = begun or _start(command, path)
            self._at_work = tool, left
        try:
            with tool:
                done = tool.finish()
        finally:
            self._at_work = None
        if done.code != 0:
            words = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.code}"]
            return words[-1][:200], ""
        said = _SAID.fullmatch(done.stdout)
        if said is None:
            return "it does not say its version", ""
        if said[1] != b"1":
            # It only started its command. What a cleverer one leaves out is seen by the guard.
            raise BackendError("execution_tool_failed", f"{path} makes no pid namespace")
        return "", said[2].decode()


def _rights() -> tuple[tuple[str, ...], ...]:
    """Options to be tried one after the other.

    Root keeps its rights over files where it may; in a namespace of users it has none over those of others.
    """
    return (_AS_ROOT, ("--unshare-user",)) if os.geteuid() == 0 else ((),)


def _start(command: tuple[str, ...], path: str) -> Tool:
    """Bubblewrap inside itself, behind a shell that says its own number; not tied to us.

    Killed in the moment after its fork it leaves its child waiting for it for ever; left alone it is over in some ms.
    """
    trial = ("/bin/sh", "-c", 'echo $$; exec "$0" --version', path)
    return begin_tool([*command, *MOUNTS, *trial], env={}, timeout_s=TRIAL_S_MAX, tied=False)


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


@functools.cache
def _cgroup() -> Probed:
    folder = cgroup.own()
    if folder is None:
        return Probed("cgroup", False, "", "version 2 is not mounted")
    trial = folder / f"backplane-trial-{os.getpid()}"
    try:
        trial.mkdir()
        controllers = (trial / "cgroup.controllers").read_text().split()
    except OSError as error:
        return Probed("cgroup", False, "2", f"not writable: {error.strerror}", "delegate a cgroup to this user")
    finally:
        with suppress(OSError):
            trial.rmdir()
    return Probed("cgroup", True, "2" + (f" ({' '.join(controllers)})" if controllers else " (no controllers)"))
