"""`backends`: which backends there are, what keeps one from being ready, and what each can do."""

from __future__ import annotations

import os
from typing import Any

import anyio
import msgspec

from backplane import config
from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, load_settings
from backplane.config import Settings
from backplane.errors import BackendError
from backplane.receipts.manifests import kept_manifest
from backplane.runtime import backends, readiness
from backplane.runtime.readiness import BackendStatus

HELP = "List the backends, which of them are ready, and how to fix the others. With --probe, test what an agent can do."
EXAMPLE = "backplane backends\nbackplane backends --probe mine"


def options(p: Parser) -> None:
    add.value(p, "names", metavar="BACKEND", nargs="*", help="list only these backends")
    add.flag(p, "--probe", help="run each agent against a scripted model, and report which claimed capabilities work")
    add.config(p)
    add.json(p, "one JSON object per backend, one per line", "cli_backends", "cli_backends_probe")


def run(args: Args) -> int:
    settings = load_settings(args)
    found = {status.id: status for status in readiness.known(settings, os.environ)}
    for name in args.names:
        if name not in found:
            raise BackendError("backend_not_found", f"no backend {name!r}", hint=f"choose one of: {', '.join(found)}")
    chosen = [found[name] for name in args.names or found]
    if args.probe:
        return _probe(chosen, settings, args)
    width = max(map(len, found), default=0)
    for status in chosen:
        if status.ready:
            key = backends.ProcessBackend(id=status.id, argv=status.command).key
            status = msgspec.structs.replace(status, manifest=kept_manifest(config.home_path(os.environ), key))
        if args.json:
            streams.write_record(status)
            continue
        mark = " (default)" if status.id == settings.default_backend else ""
        state = "ready" if status.ready else f"not ready: {status.why}"
        abilities = ", ".join(_ability(*row) for row in (status.manifest or {}).items())
        for label, line in ((status.id, state + mark), ("", status.fix), ("", abilities)):
            if line:
                streams.write(f"{label:<{width}}  {streams.one_line(line, 4000)}\n")
    return 0


def _ability(name: str, level: Any) -> str:
    """Return an ability of a manifest in words, with its level unless that is native."""
    if isinstance(level, dict) and isinstance(level.get("restricted"), dict):
        level = f"restricted: {level['restricted'].get('reason', '')}"
    return name if level == "native" else f"{name} ({level})"


def _probe(chosen: list[BackendStatus], settings: Settings, args: Args) -> int:
    """Try each agent; without names only those that can be tried."""
    from backplane.conform import trials

    environ, has_failed = dict(os.environ), False
    for status in chosen:
        if not args.names and not (status.ready and trials.provable(backends.find(status.id, settings, environ))):
            continue

        def progress(ability: str, name: str = status.id) -> None:
            streams.note(f"{name}: trying {ability}")

        tried = anyio.run(trials.prove, status.id, settings, environ, config.home(environ), progress)
        has_failed = has_failed or any(finding.is_false for finding in tried.findings)
        if args.json:
            streams.write_record(tried)
            continue
        streams.write(f"{tried.backend} {tried.version or ''}, {tried.on}\n")
        for one in tried.findings:
            failed = "FALSE CLAIM" if one.claim in trials.CLAIMS else "not shown"
            verdict = {"failed": failed, "untried": "not tried"}.get(one.proof, one.proof)
            words = streams.one_line(f"{verdict}: {one.why}" if one.why else verdict)
            streams.write(f"  {one.ability:<30} {one.claim:<11} {words}\n")
    return 1 if has_failed else 0
