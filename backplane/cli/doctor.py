"""`doctor`: check this machine and the configuration.

It installs and changes nothing, and starts only `git --version` and trials of the sandbox. Only `--probe` uses the
network.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

import anyio
import msgspec

from backplane import __version__, config
from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser
from backplane.config import BackendSettings
from backplane.errors import BackplaneError
from backplane.process.tool import run_tool, search_path
from backplane.runtime import backends, readiness
from backplane.runtime.faults import setting_faults
from backplane.sandbox.credentials import store_of
from backplane.sandbox.probe import Name, probe
from backplane.upstream import baseurl, presets
from backplane.upstream.endpoint import cut_urls, with_keys

GIT_MIN: Final = (2, 30)
"""Oldest git that the patches are made and applied with."""
PROBE_S: Final = 10.0
"""Seconds for `git --version`, which takes milliseconds."""

HELP = "Check this machine and the configuration: what works, what is missing, and how to fix it."
EXAMPLE = "backplane doctor\nbackplane doctor --probe"


class DoctorCheck(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    name: str
    state: Literal["ok", "note", "missing"]
    """`missing` is needed and not there; a `note` is good to know, and all works without it."""
    fact: str
    fix: str = ""


Checks = Iterator[DoctorCheck]


def options(p: Parser) -> None:
    add.flag(p, "--probe", help="also send a short request to each model service (costs a few tokens)")
    add.config(p)
    add.json(p, "one JSON object per finding, one per line", "cli_doctor")


def run(args: Args) -> int:
    file = Path(args.config) if args.config else None
    is_missing = False
    for found in examine(dict(os.environ), streams.folder(), file, over_network=args.probe):
        is_missing = is_missing or found.state == "missing"
        if args.json:
            streams.write_record(found)
            continue
        mark = "MISSING" if found.state == "missing" else found.state
        streams.write(f"{mark:<8}{found.name:<18}{streams.one_line(found.fact)}\n")
        if found.fix:
            streams.write(f"{'':26}{streams.one_line(found.fix)}\n")
    return 1 if is_missing else 0


def examine(environ: Mapping[str, str], cwd: Path, file: Path | None, *, over_network: bool = False) -> Checks:
    """Look at everything, in the order in which it matters."""
    yield _check("python", True, f"backplane {__version__} on Python {sys.version.split()[0]}, {sys.executable}")
    yield _git(environ)
    yield _state(config.home_path(environ))
    for layer in probe(environ).layers():
        purpose = _PURPOSES[layer.name]
        fact = f"{'works' if layer.usable else layer.why}; its purpose: {purpose}"
        yield _check(layer.name, layer.usable, fact, layer.fix, needed=False)
    yield from _configured(environ, cwd, file, over_network)


def _check(name: str, good: bool, fact: str, fix: str = "", *, needed: bool = True) -> DoctorCheck:
    """Return a check whose fix counts only if it failed; a failed one that is not needed is a note."""
    return DoctorCheck(name, "ok" if good else "missing" if needed else "note", fact, "" if good else fix)


def _failed(name: str, error: BackplaneError, fix: str = "") -> DoctorCheck:
    return _check(name, False, error.message, error.hint or fix)


def _git(environ: Mapping[str, str]) -> DoctorCheck:
    fix = f"install git {'.'.join(map(str, GIT_MIN))} or newer"
    try:
        done = run_tool(["git", "--version"], env={"PATH": search_path(environ)}, timeout_s=PROBE_S)
    except BackplaneError as error:
        return _check("git", False, error.message, fix)
    text = done.stdout.decode("utf-8", "replace").strip()
    return _check("git", tuple(map(int, re.findall(r"\d+", text)[:2])) >= GIT_MIN, text, fix)


def _state(home: Path) -> DoctorCheck:
    """Check the state folder, or the folder that it will be made in; `receipts verify` checks what is stored there."""
    place = next(folder for folder in (home, *home.parents) if os.path.exists(folder))
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        fix = "set BACKPLANE_HOME to a folder that this user can write"
        return _check("state", False, f"{str(home)[:200]} cannot be written", fix)
    if home == place and place.stat().st_mode & 0o077:
        return _check("state", False, f"other users can open {home}", f"run: chmod 700 {home}", needed=False)
    return _check("state", True, str(home))


_PURPOSES: Final[Mapping[Name, str]] = {
    "bubblewrap": "ending all processes of a run, even if backplane is killed; rules on files; a private /tmp",
    "network namespace": "rules on the network",
    "landlock": "no writing outside the workspace, no sockets or signals of other processes",
}
"""Layer of the sandbox → what it protects."""


def _configured(environ: Mapping[str, str], cwd: Path, file: Path | None, over_network: bool) -> Checks:
    try:
        found = file or config.find_file(environ, cwd)
        settings = config.load(file, environ, cwd)
    except BackplaneError as error:
        yield _failed("configuration", error, "correct the file, or name another one with --config")
        return
    yield _check("configuration", True, str(found) if found else "no file is there; the built-in settings apply")
    for variable in config.unknown_variables(environ):
        fact = f"{variable} is not a setting of this version"
        yield _check("environment", False, fact, f"correct the name, or run: unset {variable}", needed=False)
    for place, fault in setting_faults(settings, environ):
        yield _failed(place.removeprefix("/"), fault)
    for status in readiness.known(settings, environ):
        # A shipped backend is an offer, a configured one has to work.
        needed = status.id in settings.backends or status.id == settings.default_backend
        place = f"backend {status.id}"
        if not status.ready:
            yield _check(place, False, status.why, status.fix, needed=needed)
            continue
        yield _ready(place, status, backends.find(status.id, settings, environ), needed=needed)
        declared = settings.backends.get(status.id)
        if declared is not None and declared.host == presets.HOST:
            yield from _service(status.id, declared, environ, over_network and not status.fix)


def _ready(
    place: str, status: readiness.BackendStatus, backend: backends.ProcessBackend, *, needed: bool
) -> DoctorCheck:
    """Check the login of an agent that can be started."""
    agent = backend.agent
    if agent is None:
        return _check(place, not status.fix, "ready", status.fix, needed=needed)
    login = store_of(agent.name)
    parts = ["not ready" if status.fix else "ready"]
    if agent.own_state or login:
        parts.append(f"your own login is {login}" if login else "own_state needs your own login, which was not found")
    if agent.key_env and not (status.fix or agent.own_state):
        parts.append(f"its key is in {agent.key_env}")
    if agent.base_url is not None:
        parts.append(f"asks {cut_urls(agent.base_url)}")
    return _check(place, not status.fix, "; ".join(parts), status.fix, needed=needed)


def _service(name: str, declared: BackendSettings, environ: Mapping[str, str], over_network: bool) -> Checks:
    """Check the address and the key of a model service. The key goes into a request's header, and is never printed."""
    options = presets.with_address(declared.options, {**environ, **declared.env})
    service = presets.read_options(options, f"backends.{name}.options")
    place = f"service {name}"
    if not over_network:
        yield _check(place, True, f"address {cut_urls(service.base_url)}")
        found = baseurl.path_doubts(service.protocol, service.base_url)
    else:
        from backplane.upstream import probe

        endpoint = msgspec.structs.replace(with_keys(service, environ), timeout_s=probe.FIRST_BYTE_S)
        found = anyio.run(probe.probe, endpoint, service.model, service.key_env or "")
    for one in found:
        yield DoctorCheck(place, one.state, one.fact, one.fix)
