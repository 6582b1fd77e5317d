"""`doctor`: check this machine and the configuration.

It installs and changes nothing, and starts only `git --version` and trials of the sandbox. Only `--probe` uses the
network and starts the configured MCP servers.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

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
from backplane.upstream import presets
from backplane.upstream.baseurl import Check as Finding
from backplane.upstream.baseurl import key_doubts, path_doubts
from backplane.upstream.cost import MICROS, price_of
from backplane.upstream.endpoint import Endpoint, cut_urls
from backplane.view.figures import counted

PYTHON_MIN: Final = (3, 11)
GIT_MIN: Final = (2, 30)
"""Oldest git that the patches are made and applied with."""
SQLITE_MIN: Final = (3, 22)
"""First with a WAL that can be read from a read-only place."""
FREE_BYTES_MIN: Final = 1 << 30
"""Less free space than this ends runs early: a staged copy of a middling repository takes it."""
PROBE_S: Final = 10.0
TOOLS_MAX: Final = 8
"""Most names of tools on a line; more are counted."""

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


def _check(name: str, good: bool, fact: str, fix: str = "", *, needed: bool = True) -> DoctorCheck:
    """Return a check whose fix counts only if it failed; one that is not needed is a note then."""
    return DoctorCheck(name, "ok" if good else "missing" if needed else "note", fact, "" if good else fix)


def _python() -> DoctorCheck:
    fact = f"backplane {__version__} on Python {sys.version.split()[0]}, {sys.executable}"
    return _check("python", sys.version_info >= PYTHON_MIN, fact, "install Python 3.11 or newer")


def _git(environ: Mapping[str, str]) -> DoctorCheck:
    fix = f"install git {'.'.join(map(str, GIT_MIN))} or newer"
    try:
        done = run_tool(["git", "--version"], env={"PATH": search_path(environ)}, timeout_s=PROBE_S)
    except BackplaneError as error:
        return _check("git", False, error.message, fix)
    text = done.stdout.decode("utf-8", "replace").strip()
    found = re.search(r"(\d+)\.(\d+)", text)
    new = found is not None and (int(found[1]), int(found[2])) >= GIT_MIN
    return _check("git", done.code == 0 and new, text or f"exit code {done.code}", fix)


def _sqlite() -> DoctorCheck:
    try:
        with (
            tempfile.TemporaryDirectory(prefix="backplane-doctor-") as folder,
            closing(sqlite3.connect(os.path.join(folder, "probe.sqlite"))) as connection,
        ):
            mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    except (OSError, sqlite3.Error) as error:
        fact = f"cannot be tried: {error.strerror if isinstance(error, OSError) and error.filename else error}"
        return _check("sqlite", False, fact, "set TMPDIR to a writable folder with some free space")
    good = mode == "wal" and sqlite3.sqlite_version_info >= SQLITE_MIN
    fact = f"SQLite {sqlite3.sqlite_version}, journal mode {mode}"
    return _check("sqlite", good, fact, "use a Python with a newer SQLite")


def _home(environ: Mapping[str, str]) -> Iterator[DoctorCheck]:
    home = config.home_path(environ)
    try:
        # `Path.exists` raises if a folder above may not be entered.
        place = next(folder for folder in (home, *home.parents) if os.path.exists(folder))
        writable = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
        os.stat(home)
        fact = str(home)
    except OSError as error:
        writable = writable and error.errno != errno.ENAMETOOLONG
        fact = f"{home} (made at the first run)"
    if not writable:
        fix = "set BACKPLANE_HOME to a folder that this user can write"
        yield _check("state", False, f"{str(home)[:200]} cannot be written", fix)
        return
    is_open = home == place and place.stat().st_mode & 0o077 != 0
    fact = f"{home} is open to other users" if is_open else fact
    yield _check("state", not is_open, fact, f"chmod 700 {home}", needed=False)
    free = shutil.disk_usage(place).free
    yield _check("free space", free >= FREE_BYTES_MIN, f"{free / 2**30:.1f} GiB", "free some space", needed=False)


def _left_behind(environ: Mapping[str, str]) -> Iterator[DoctorCheck]:
    home = config.home_path(environ)
    if not os.access(home, os.R_OK | os.X_OK):
        return  # Said already, or there is nothing yet.
    try:
        with Store.open(home, readonly=True) as store:
            lines = left_behind(home, store)
    except BackplaneError as error:
        yield _failed("store", error)
        return
    for line in lines:
        fact, _, fix = line.partition("; ")
        yield _check("cut off", False, fact, fix, needed=False)


def _failed(name: str, error: BackplaneError, fix: str = "", *, needed: bool = True) -> DoctorCheck:
    return _check(name, False, error.message, error.hint or fix, needed=needed)


# Layers of the sandbox: each is tried. What a run had is in its receipt. ----------------------------------------------


def _layers(environ: Mapping[str, str]) -> Iterator[DoctorCheck]:
    fact = "ends every process that a host leaves behind" if GUARD_WORKS else "only Linux has it"
    yield _check("guard", GUARD_WORKS, fact, needed=False)
    for layer in probe(environ).layers():
        purpose = _PURPOSES[layer.name]
        version = f", version {layer.version}" if layer.version else ""
        fact = f"works{version}; for: {purpose}" if layer.usable else f"{layer.why}; missing without it: {purpose}"
        yield _check(layer.name, layer.usable, fact, layer.fix, needed=False)


_PURPOSES: Final[Mapping[Name, str]] = {
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
        yield _failed("configuration", error, "correct the file, or name another one with --config")
        return
    yield _check("configuration", True, str(found) if found else "none; the built-in settings are in force")
    for variable in config.unknown_variables(environ):
        fact = f"{variable} is not a setting of this version"
        yield _check("environment", False, fact, f"unset {variable}", needed=False)
    for place, fault in setting_faults(settings, environ):
        yield _failed(place.removeprefix("/"), fault)
    for status in backends.known(settings, environ):
        # A shipped backend is an offer, a configured one has to work.
        needed = status.id in settings.backends or status.id == settings.default_backend
        if status.ready:
            yield _ready(status.id, settings, environ, needed=needed)
        else:
            yield _check(f"backend {status.id}", False, status.why, status.fix, needed=needed)
    yield from _services(settings, environ, over_network)
    yield from _servers(settings, environ, str(cwd), over_network)


def _ready(name: str, settings: config.Settings, environ: Mapping[str, str], *, needed: bool) -> DoctorCheck:
    """Check the login of a backend that can be started, and say what a first try costs."""
    backend, place = backends.find(name, settings, environ), f"backend {name}"
    agent = backend.agent if isinstance(backend, backends.ProcessBackend) else None
    if agent is None:
        return _check(place, True, "ready")
    if old := backends.too_old(backend, environ):
        fact, _, fix = old.partition("; ")
        return _check(place, False, fact, fix, needed=needed)
    key, login, cost = agent.key_env, store_of(agent.row), _cost(agent.first_tokens, agent.model)
    cost = f"; asks {cut_urls(agent.base_url)}{cost}" if agent.base_url is not None else cost
    if agent.options.own_state:
        fact = f"your own login, {login}" if login else "own_state needs your own login, which was not found"
        return _check(place, bool(login), f"ready; {fact}{cost}", f"log in with {agent.options.program}", needed=False)
    given = settings.backends[name].env if name in settings.backends else {}
    if key is None or environ.get(key) or key in given:
        return _check(place, True, f"ready{f'; its key is in {key}' if key else ''}{cost}")
    fact, fix = f"the program is found, but {key} has no key", f"export {key}=…"
    if login is not None:
        fact += f"; your own login is {login}"
        fix += f", or use your login: [backends.{name}] options = {{ own_state = true }}"
    return _check(place, False, f"{fact}{cost}", fix, needed=needed)


def _cost(tokens: int | None, model: str | None) -> str:
    """Say in words what a first try costs."""
    if tokens is None:
        return ""
    price = price_of(model) if model is not None else None
    dollars = f", {tokens * price.input / MICROS / MICROS:.3f} USD with {model}" if price is not None else ""
    return f"; a try sends about {tokens:,} tokens{dollars}"


# Model services and MCP servers: looked at always, asked with `--probe`. ----------------------------------------------


def _services(settings: config.Settings, environ: Mapping[str, str], over_network: bool) -> Iterator[DoctorCheck]:
    """Check addresses and keys. A key goes into a request's header, and is never printed."""
    for name, backend in settings.backends.items():
        if backend.host != presets.HOST:
            continue
        try:
            options = presets.with_address(backend.options, {**environ, **backend.env})
            service = presets.read_options(options, f"backends.{name}.options")
        except BackplaneError as error:
            yield _failed(f"service {name}", error)
            continue
        key = environ.get(service.key_env, "").strip() if service.key_env else ""
        if not over_network:
            found = [*key_doubts(service.base_url, has_key=bool(key)), *path_doubts(service.protocol, service.base_url)]
            found.append(Finding("ok", f"address {cut_urls(service.base_url)}"))
        elif service.key_env and not key:
            found = [Finding("missing", f"{service.key_env} is not set", f"export {service.key_env}=…")]
        else:
            found = _probe(service, key or None, environ)
        for one in found:
            yield DoctorCheck(f"service {name}", one.state, one.fact, one.fix)


def _probe(service: presets.Service, key: str | None, environ: Mapping[str, str]) -> list[Finding]:
    import anyio

    from backplane.upstream import probe

    headers = {
        label: environ.get(value[1:], "") if value.startswith("$") else value
        for label, value in service.headers.items()
    }
    endpoint = Endpoint(
        protocol=service.protocol, base_url=service.base_url.strip(), api_key=key, headers=headers,
        query=dict(service.query or {}), key_in_query=service.key_in_query, connect_s=probe.CONNECT_S,
        first_byte_s=probe.FIRST_BYTE_S,
    )  # fmt: skip
    return anyio.run(probe.probe, endpoint, service.model, service.key_env or "")


def _servers(
    settings: config.Settings, environ: Mapping[str, str], cwd: str, over_network: bool
) -> Iterator[DoctorCheck]:
    for name, asked in settings.mcp_servers.items():
        place = f"mcp {name}"
        try:
            row = backends.server_row(name, asked, environ, [])
        except BackplaneError as error:
            yield _failed(place, error)
            continue
        program = asked.command[0] if asked.command is not None else None
        if program is None:
            parts = urlsplit(asked.url or "")
            good, fact = parts.scheme in ("http", "https") and bool(parts.hostname), f"{asked.url}; --probe asks it"
            fact = fact if good else f"{asked.url} is not the address of a server"
            fix = 'url = "https://HOST/PATH"'
        else:
            found = shutil.which(program, path={**environ, **row.get("env", {})}.get("PATH"))
            good, fix = found is not None, "install it, or name its path"
            fact = f"{found}; --probe starts it" if good else f"its program {program} is not found or not executable"
        yield _asked(place, name, row, environ, cwd) if good and over_network else _check(place, good, fact, fix)


def _asked(place: str, name: str, row: Mapping[str, Any], environ: Mapping[str, str], cwd: str) -> DoctorCheck:
    """Start or reach an MCP server, and list its tools."""
    import anyio

    from backplane.tools.mcp import open_servers

    faults: list[str] = []

    async def warn(_: str, words: str) -> None:
        faults.append(words)

    async def ask() -> list[str]:
        async with open_servers({name: row}, env=dict(environ), cwd=cwd, warn=warn) as servers:
            return [spec.name for spec in servers.specs]

    tools = anyio.run(ask)
    if faults:
        return _check(place, False, faults[0], "run its command by hand, or remove the server from the configuration")
    more = f" and {len(tools) - TOOLS_MAX} more" if len(tools) > TOOLS_MAX else ""
    return _check(place, True, f"{counted(len(tools), 'tool')}: {', '.join(tools[:TOOLS_MAX])}{more}")
