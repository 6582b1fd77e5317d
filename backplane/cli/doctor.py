"""`doctor`: what this machine and this configuration can do, and what is missing, with the fix.

It installs and changes nothing, and starts only `git --version` and trials of the sandbox. Only `--probe` uses the
network and starts the configured MCP servers.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Final, Literal

import msgspec

from backplane import __version__, config
from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser
from backplane.errors import BackplaneError
from backplane.process.launch import GUARD_WORKS
from backplane.process.tool import run_tool, search_path
from backplane.receipts.store import Store
from backplane.runtime import backends
from backplane.runtime.faults import setting_faults
from backplane.runtime.state import left_behind
from backplane.sandbox.credentials import store_of
from backplane.sandbox.probe import Name, probe
from backplane.upstream.cost import MICROS, price_of
from backplane.upstream.endpoint import cut_urls

PYTHON_MIN: Final = (3, 11)
GIT_MIN: Final = (2, 30)
"""Oldest git that the patches are made and applied with."""
SQLITE_MIN: Final = (3, 22)
"""First with a WAL that can be read from a read-only place."""
FREE_BYTES_MIN: Final = 1 << 30
"""Less free space than this ends runs early: a staged copy of a middling repository takes it."""
PROBE_S: Final = 10.0

State = Literal["ok", "note", "missing"]


class DoctorCheck(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    name: str
    state: State
    """`missing` is needed and not there; a `note` is good to know, and all works without it."""
    fact: str
    fix: str = ""


HELP = "Check this machine and the configuration: what works, what is missing, and how to mend it."
EXAMPLE = "backplane doctor\nbackplane doctor --probe"


def options(p: Parser) -> None:
    add.flag(p, "--probe", help="also try each model service (some tokens each) and MCP server")
    add.config(p)
    add.json(p, "one JSON object per finding, one per line", "cli_doctor")


def run(args: Args) -> int:
    environ = dict(os.environ)
    file = Path(args.config) if args.config else None
    findings = examine(environ, streams.folder(), file, over_network=args.probe)
    missing = False
    marks = {"ok": "ok", "note": "note", "missing": "MISSING"}
    for finding in findings:
        missing = missing or finding.state == "missing"
        if args.json:
            streams.write_record(finding)
            continue
        streams.write(f"{marks[finding.state]:<8}{finding.name:<18}{streams.one_line(finding.fact)}\n")
        if finding.fix and finding.state != "ok":
            streams.write(f"{'':26}{streams.one_line(finding.fix)}\n")
    return 1 if missing else 0


def examine(
    environ: Mapping[str, str], cwd: Path, file: Path | None, *, over_network: bool = False
) -> Iterator[DoctorCheck]:
    """Look at everything, in the order in which it matters."""
    yield _python()
    yield _git(environ)
    yield _sqlite()
    yield from _home(environ)
    yield from _left_behind(environ)
    yield from _layers(environ)
    yield from _configured(environ, cwd, file, over_network)


def _python() -> DoctorCheck:
    fact = f"backplane {__version__} on Python {sys.version.split()[0]}, {sys.executable}"
    good = sys.version_info >= PYTHON_MIN
    return DoctorCheck("python", "ok" if good else "missing", fact, "" if good else "install Python 3.11 or newer")


def _git(environ: Mapping[str, str]) -> DoctorCheck:
    fix = f"install git {'.'.join(map(str, GIT_MIN))} or newer"
    try:
        done = run_tool(["git", "--version"], env={"PATH": search_path(environ)}, timeout_s=PROBE_S)
    except BackplaneError as error:
        return DoctorCheck("git", "missing", error.message, fix)
    text = done.stdout.decode("utf-8", "replace").strip()
    good = done.code == 0 and _version(text) >= GIT_MIN
    return DoctorCheck("git", "ok" if good else "missing", text or f"exit code {done.code}", "" if good else fix)


def _version(text: str) -> tuple[int, ...]:
    """The first dotted number in a text."""
    word = next((word for word in text.split() if word[:1].isdigit()), "")
    return tuple(int(part) for part in word.split(".")[:2] if part.isdigit())


def _sqlite() -> DoctorCheck:
    try:
        with (
            tempfile.TemporaryDirectory(prefix="backplane-doctor-") as folder,
            closing(sqlite3.connect(os.path.join(folder, "probe.sqlite"))) as connection,
        ):
            mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    except (OSError, sqlite3.Error) as error:
        fact = f"cannot be tried: {error.strerror if isinstance(error, OSError) and error.filename else error}"
        return DoctorCheck("sqlite", "missing", fact, "set TMPDIR to a folder that can be written and has some space")
    good = mode == "wal" and sqlite3.sqlite_version_info >= SQLITE_MIN
    fact = f"SQLite {sqlite3.sqlite_version}, journal mode {mode}"
    return DoctorCheck("sqlite", "ok" if good else "missing", fact, "" if good else "use a Python with a newer SQLite")


NAME_BYTES_MAX = 255
"""Longest part of a path, in bytes, on Linux file systems."""


def _home(environ: Mapping[str, str]) -> Iterator[DoctorCheck]:
    home = config.home_path(environ)
    # `Path.exists` raises where a folder above may not be entered.
    place = next(folder for folder in (home, *home.parents) if os.path.exists(folder))
    if len(home.name.encode()) > NAME_BYTES_MAX:
        fix = f"set BACKPLANE_HOME to a folder whose name has at most {NAME_BYTES_MAX} bytes"
        yield DoctorCheck("state", "missing", f"{str(home)[:200]}… is too long a name", fix)
        return
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        fix = "set BACKPLANE_HOME to a folder that this user can write"
        yield DoctorCheck("state", "missing", f"{home} cannot be written", fix)
        return
    mode = place.stat().st_mode & 0o077 if home == place else 0
    fact = str(home) if os.path.exists(home) else f"{home} (made at the first run)"
    if mode:
        yield DoctorCheck("state", "note", f"{home} is open to other users", f"chmod 700 {home}")
    else:
        yield DoctorCheck("state", "ok", fact)
    free = shutil.disk_usage(place).free
    few = free < FREE_BYTES_MIN
    yield DoctorCheck(
        "free space", "note" if few else "ok", f"{free / 2**30:.1f} GiB", "free some space" if few else ""
    )


def _left_behind(environ: Mapping[str, str]) -> Iterator[DoctorCheck]:
    home = config.home_path(environ)
    if not os.access(home, os.R_OK | os.X_OK):
        return  # Said already, or there is nothing yet.
    try:
        with Store.open(home, readonly=True) as store:
            lines = left_behind(home, store)
    except BackplaneError as error:
        yield DoctorCheck("store", "missing", error.message, error.hint or "")
        return
    for line in lines:
        fact, _, fix = line.partition("; ")
        yield DoctorCheck("cut off", "note", fact, fix)


# Containment layers: what the machine has, each tried. What a run had is in its receipt. ------------------------------


def _layers(environ: Mapping[str, str]) -> Iterator[DoctorCheck]:
    guarded = "sweeps all that a host leaves behind" if GUARD_WORKS else "only Linux has it"
    yield DoctorCheck("guard", "ok" if GUARD_WORKS else "note", guarded)
    for layer in probe(environ).layers():
        version = f", version {layer.version}" if layer.version else ""
        held = _HOLDS[layer.name]
        if layer.usable:
            yield DoctorCheck(layer.name, "ok", f"works{version}; holds: {held}")
        else:
            yield DoctorCheck(layer.name, "note", f"{layer.why}; not held without it: {held}", layer.fix)


_HOLDS: Final[Mapping[Name, str]] = {
    "bubblewrap": "processes, beyond the control plane's own end; rules on files; a private /tmp",
    "network namespace": "rules on the network",
    "landlock": "writing outside the workspace; sockets and signals of others",
    "cgroup": "processes, where bubblewrap is missing",
}
"""Layer → what it protects."""


# Configuration and backends ------------------------------------------------------------------------------------------


def _configured(environ: Mapping[str, str], cwd: Path, file: Path | None, over_network: bool) -> Iterator[DoctorCheck]:
    try:
        found = file or config.find_file(environ, cwd)
        settings = config.load(file, environ, cwd)
    except BackplaneError as error:
        yield DoctorCheck("configuration", "missing", error.message, error.hint or "correct the file, or name another")
        return
    yield DoctorCheck("configuration", "ok", str(found) if found else "none; the built-in settings are in force")
    for variable in config.unknown_variables(environ):
        yield DoctorCheck("environment", "note", f"{variable} is no setting of this version", f"unset {variable}")
    statuses = backends.known(settings, environ)
    for place, fault in setting_faults(settings, environ):
        yield DoctorCheck(place.removeprefix("/"), "missing", fault.message, fault.hint or "")
    for status in statuses:
        # A shipped backend is an offer, a configured one has to work.
        needed = status.id in settings.backends or status.id == settings.default_backend
        if status.ready:
            yield _ready(status.id, settings, environ, needed=needed)
            continue
        yield DoctorCheck(f"backend {status.id}", "missing" if needed else "note", status.why, status.fix)
    yield from _services(settings, environ, over_network)
    if settings.mcp_servers:
        from backplane.cli.servers import check_servers

        for name, check in check_servers(settings, environ, str(cwd), over_network=over_network):
            yield DoctorCheck(f"mcp {name}", check.state, check.fact, check.fix)


def _ready(name: str, settings: config.Settings, environ: Mapping[str, str], *, needed: bool) -> DoctorCheck:
    """A backend that can be started; of an agent, which login it has, and what a first try costs."""
    backend = backends.find(name, settings, environ)
    agent = backend.agent if isinstance(backend, backends.ProcessBackend) else None
    if agent is None:
        return DoctorCheck(f"backend {name}", "ok", "ready")
    key, login, cost = agent.key_env, store_of(agent.row), _cost(agent.first_tokens, agent.model)
    if old := backends.too_old(backend, environ):
        fact, _, fix = old.partition("; ")
        return DoctorCheck(f"backend {name}", "missing" if needed else "note", fact, fix)
    cost = f"; asks {cut_urls(agent.base_url)}{cost}" if agent.base_url is not None else cost
    if agent.options.own_state:
        fact = f"your own login, {login}" if login else "your own login is to be used, and none is found"
        fix = f"log in with {agent.options.program}"
        return DoctorCheck(f"backend {name}", "ok" if login else "note", f"ready; {fact}{cost}", fix)
    given = settings.backends[name].env if name in settings.backends else {}
    if key is None or environ.get(key) or key in given:
        return DoctorCheck(f"backend {name}", "ok", f"ready{f'; its key is in {key}' if key else ''}{cost}")
    fact = f"the program is there, and no key in {key}"
    if login is None:
        return DoctorCheck(f"backend {name}", "missing" if needed else "note", f"{fact}{cost}", f"export {key}=…")
    fix = f"export {key}=…, or use your login: [backends.{name}] options = {{ own_state = true }}"
    return DoctorCheck(
        f"backend {name}", "missing" if needed else "note", f"{fact}; your own login is {login}{cost}", fix
    )


def _cost(tokens: int | None, model: str | None) -> str:
    """Say in words what a first try costs."""
    if tokens is None:
        return ""
    price = price_of(model) if model is not None else None
    dollars = f", {tokens * price.input / MICROS / MICROS:.3f} USD with {model}" if price is not None else ""
    return f"; a try sends about {tokens:,} tokens{dollars}"


def _services(settings: config.Settings, environ: Mapping[str, str], over_network: bool) -> Iterator[DoctorCheck]:
    if all(backend.host is None for backend in settings.backends.values()):
        return
    from backplane.cli.services import check_backends

    for name, check in check_backends(settings, environ, over_network=over_network):
        yield DoctorCheck(f"service {name}", check.state, check.fact, check.fix)
