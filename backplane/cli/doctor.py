"""`doctor`: what this machine and this configuration can do, and what is missing, with the fix.

Only looks: nothing is installed, changed or started but `git --version` and a probe of namespaces.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Final, Literal

import msgspec

from backplane import __version__, backends, config
from backplane.cli import streams
from backplane.cli.parser import Options, Parser, add_config, add_json
from backplane.errors import BackplaneError
from backplane.process import run_tool

PYTHON_MIN: Final = (3, 11)
GIT_MIN: Final = (2, 30)
"""Oldest git that the patches are made and applied with."""
SQLITE_MIN: Final = (3, 22)
"""First with a WAL that can be read from a read-only place."""
FREE_BYTES_MIN: Final = 1 << 30
"""Less free space than this ends runs early: a staged copy of a middling repository takes it."""
PROBE_S: Final = 10.0

NOT_USED: Final = "present, not used yet"
"""Of a containment layer that this version does not put around a host."""

State = Literal["ok", "note", "missing"]


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    name: str
    state: State
    """`missing` is needed and not there; a `note` is good to know, and all works without it."""
    fact: str
    fix: str = ""


def parser(name: str) -> Parser:
    """The options of `doctor`."""
    made = Parser(
        f"backplane {name}",
        "Say what this machine and configuration can do and what is missing.",
        "backplane doctor",
        _doctor,
    )
    add_config(made)
    add_json(made, "one JSON object a finding and line")
    return made


def _doctor(options: Options) -> int:
    environ = dict(os.environ)
    findings = list(examine(environ, Path.cwd(), Path(options.config) if options.config else None))
    marks = {"ok": "ok", "note": "note", "missing": "MISSING"}
    for finding in findings:
        if options.json:
            streams.write_bytes(msgspec.json.encode(finding) + b"\n")
            continue
        streams.write(f"{marks[finding.state]:<8}{finding.name:<16}{streams.one_line(finding.fact)}\n")
        if finding.fix and finding.state != "ok":
            streams.write(f"{'':24}{streams.one_line(finding.fix)}\n")
    return 1 if any(finding.state == "missing" for finding in findings) else 0


def examine(environ: Mapping[str, str], cwd: Path, file: Path | None) -> Iterator[Finding]:
    """Look at everything, in the order in which it matters."""
    yield _python()
    yield _git(environ)
    yield _sqlite()
    yield from _home(environ)
    for layer in _LAYERS:
        yield layer(environ)
    yield from _configured(environ, cwd, file)


def _python() -> Finding:
    fact = f"backplane {__version__} on Python {sys.version.split()[0]}, {sys.executable}"
    good = sys.version_info >= PYTHON_MIN
    return Finding("python", "ok" if good else "missing", fact, "" if good else "install Python 3.11 or newer")


def _git(environ: Mapping[str, str]) -> Finding:
    fix = f"install git {'.'.join(map(str, GIT_MIN))} or newer"
    try:
        done = run_tool(["git", "--version"], env={"PATH": environ.get("PATH", os.defpath)}, timeout_s=PROBE_S)
    except BackplaneError as error:
        return Finding("git", "missing", error.message, fix)
    text = done.stdout.decode("utf-8", "replace").strip()
    good = done.code == 0 and _version(text) >= GIT_MIN
    return Finding("git", "ok" if good else "missing", text or f"exit code {done.code}", "" if good else fix)


def _version(text: str) -> tuple[int, ...]:
    """The first dotted number in a text."""
    word = next((word for word in text.split() if word[:1].isdigit()), "")
    return tuple(int(part) for part in word.split(".")[:2] if part.isdigit())


def _sqlite() -> Finding:
    with (
        tempfile.TemporaryDirectory(prefix="backplane-doctor-") as folder,
        closing(sqlite3.connect(os.path.join(folder, "probe.sqlite"))) as connection,
    ):
        mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    good = mode == "wal" and sqlite3.sqlite_version_info >= SQLITE_MIN
    fact = f"SQLite {sqlite3.sqlite_version}, journal mode {mode}"
    return Finding("sqlite", "ok" if good else "missing", fact, "" if good else "use a Python with a newer SQLite")


def _home(environ: Mapping[str, str]) -> Iterator[Finding]:
    home = config.home_path(environ)
    place = next(folder for folder in (home, *home.parents) if folder.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        fix = "set BACKPLANE_HOME to a folder that this user can write"
        yield Finding("state", "missing", f"{home} cannot be written", fix)
        return
    mode = place.stat().st_mode & 0o077 if home == place else 0
    fact = str(home) if home.exists() else f"{home} (made at the first run)"
    if mode:
        yield Finding("state", "note", f"{home} is open to other users", f"chmod 700 {home}")
    else:
        yield Finding("state", "ok", fact)
    free = shutil.disk_usage(place).free
    few = free < FREE_BYTES_MIN
    yield Finding("free space", "note" if few else "ok", f"{free / 2**30:.1f} GiB", "free some space" if few else "")


# Containment layers: what the machine has. What a run had is in its receipt. -----------------------------------------


def _bubblewrap(environ: Mapping[str, str]) -> Finding:
    path = shutil.which("bwrap", path=environ.get("PATH"))
    if path is None:
        return Finding("bubblewrap", "note", "not there", "install bubblewrap")
    return _probe("bubblewrap", [path, "--ro-bind", "/", "/", "--unshare-user", "true"], environ)


def _namespaces(environ: Mapping[str, str]) -> Finding:
    path = shutil.which("unshare", path=environ.get("PATH"))
    if path is None:
        there = os.path.exists("/proc/self/ns/user")
        return Finding(
            "user namespaces", "note", "in the kernel; not tried, `unshare` is missing" if there else "not there"
        )
    return _probe("user namespaces", [path, "--user", "--map-root-user", "true"], environ)


def _probe(name: str, command: list[str], environ: Mapping[str, str]) -> Finding:
    try:
        done = run_tool(command, env={"PATH": environ.get("PATH", os.defpath)}, timeout_s=PROBE_S)
    except BackplaneError as error:
        return Finding(name, "note", error.message)
    if done.code == 0:
        return Finding(name, "ok", NOT_USED)
    words = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.code}"]
    return Finding(
        name, "note", f"there, but refused: {words[-1]}", "the system's administrator can allow user namespaces"
    )


LANDLOCK_CREATE_RULESET: Final = 444
"""Number of the system call on every machine that numbers them alike (all but alpha)."""
LANDLOCK_VERSION: Final = 1
"""Flag that asks for the interface's version and makes nothing."""


def _landlock(_environ: Mapping[str, str]) -> Finding:
    if not sys.platform.startswith("linux"):
        return Finding("landlock", "note", "only Linux has it")
    version = ctypes.CDLL(None, use_errno=True).syscall(LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_VERSION)
    if version > 0:
        return Finding("landlock", "ok", f"version {version}, {NOT_USED}")
    why = errno.errorcode.get(ctypes.get_errno(), "")
    return Finding("landlock", "note", f"not switched on in this kernel ({why})", "boot with lsm=landlock,…")


def _cgroup(_environ: Mapping[str, str]) -> Finding:
    for place in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
        if (place / "cgroup.controllers").exists():
            fact = NOT_USED if os.access(place, os.W_OK) else "there, but not writable for this user; not used yet"
            return Finding("cgroup v2", "ok" if os.access(place, os.W_OK) else "note", fact)
    return Finding("cgroup v2", "note", "not mounted")


_LAYERS: Final[tuple[Callable[[Mapping[str, str]], Finding], ...]] = (_bubblewrap, _namespaces, _landlock, _cgroup)


# Configuration and backends ------------------------------------------------------------------------------------------


def _configured(environ: Mapping[str, str], cwd: Path, file: Path | None) -> Iterator[Finding]:
    try:
        found = file or config.find_file(environ, cwd)
        settings = config.load(file, environ, cwd)
    except BackplaneError as error:
        yield Finding("configuration", "missing", error.message, error.hint or "")
        return
    yield Finding("configuration", "ok", str(found) if found else "none; the built-in settings are in force")
    for variable in config.unknown_variables(environ):
        yield Finding("environment", "note", f"{variable} is no setting of this version", f"unset {variable}")
    statuses = backends.known(settings, environ)
    if settings.default_backend is not None and settings.default_backend not in {status.id for status in statuses}:
        fix = f"declare [backends.{settings.default_backend}] or choose another default_backend"
        yield Finding("default_backend", "missing", f"no backend {settings.default_backend!r}", fix)
    for status in statuses:
        if status.ready:
            yield Finding(f"backend {status.id}", "ok", "ready")
            continue
        # One that nobody configured is an offer; one that somebody did is a promise.
        needed = status.id in settings.backends or status.id == settings.default_backend
        yield Finding(f"backend {status.id}", "missing" if needed else "note", status.why, status.fix)
