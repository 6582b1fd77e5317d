"""`backends`: which backends there are, what keeps one from being ready, and what one can do: said, and shown."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from backplane import config
from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, load_settings
from backplane.errors import BackendError
from backplane.receipts.manifests import kept_manifest
from backplane.runtime import backends

if TYPE_CHECKING:
    from backplane.config import Settings
    from backplane.conform.trials import Finding
    from backplane.runtime.backends import BackendStatus


HELP = "List the backends: ready, or why not and how to mend it; or try what an agent can do."
EXAMPLE = "backplane backends\nbackplane backends --probe mine"


def options(p: Parser) -> None:
    add.value(p, "names", metavar="BACKEND", nargs="*", help="list only these backends")
    add.flag(p, "--probe", help="run each agent against a scripted model, and report which capabilities it shows")
    add.config(p)
    add.json(p, "one JSON object per backend, one per line", "cli_backends", "cli_backends_probe")


def run(args: Args) -> int:
    environ = dict(os.environ)
    settings = load_settings(args)
    found = backends.known(settings, environ)
    unknown = sorted(set(args.names) - {status.id for status in found})
    if unknown:
        known = ", ".join(status.id for status in found)
        raise BackendError("backend_not_found", f"no backend {unknown[0]!r}", hint=f"choose one of: {known}")
    found = [status for status in found if status.id in args.names or not args.names]
    if args.probe:
        return _probe(found, settings, environ, args)
    return _list(found, settings, environ, args)


def _list(found: list[BackendStatus], settings: Settings, environ: dict[str, str], args: Args) -> int:
    found = [_with_manifest(status, environ) if status.ready else status for status in found]
    if args.json:
        for status in found:
            streams.write_record(status)
        return 0
    width = max((len(status.id) for status in found), default=0)
    for status in found:
        mark = " (default)" if status.id == settings.default_backend else ""
        state = "ready" if status.ready else f"not ready: {status.why}"
        streams.write(f"{status.id:<{width}}  {streams.one_line(state)}{mark}\n")
        if status.fix:
            streams.write(f"{'':<{width}}  {streams.one_line(status.fix)}\n")
        if status.manifest:
            streams.write(f"{'':<{width}}  {streams.one_line(abilities(status.manifest), 4000)}\n")
    return 0


def _with_manifest(status: BackendStatus, environ: dict[str, str]) -> BackendStatus:
    """The same with what the backend said of itself in its last hello here, if it ever said one."""
    key = backends.ProcessBackend(id=status.id, argv=status.command).key
    return msgspec.structs.replace(status, manifest=kept_manifest(config.home_path(environ), key))


def _probe(found: list[BackendStatus], settings: Settings, environ: dict[str, str], args: Args) -> int:
    """Try each agent; one that is named and cannot be tried is an error, the others are passed over."""
    import anyio

    from backplane.conform import trials

    home, failed = config.home(environ), False
    for status in found:
        if not args.names and not (status.ready and trials.provable(backends.find(status.id, settings, environ))):
            continue
        with _live_line(status.id, streams.is_painted(streams.STDOUT) and not args.json) as progress:
            told = anyio.run(trials.prove, status.id, settings, environ, home, progress)
        failed = failed or any(finding.is_false for finding in told.findings)
        if args.json:
            streams.write_record(told)
            continue
        streams.write(f"{told.backend} {told.version or ''}, {told.on}\n")
        for finding in told.findings:
            streams.write(f"  {finding.ability:<30} {finding.claim:<11} {streams.one_line(_verdict(finding))}\n")
    return 1 if failed else 0


def _verdict(finding: Finding) -> str:
    """Say in words what a trial found about a capability."""
    from backplane.conform.trials import CLAIMS, UNHEARD

    if finding.proof == "proved":
        return "proved" if finding.claim in CLAIMS else "proved, and not claimed"
    if finding.proof == "failed" and not finding.is_false:
        return f"not available, and not claimed: {finding.why}"
    if finding.claim == UNHEARD:
        return f"not proved: {finding.why}"
    word = "FALSE CLAIM" if finding.is_false else "not tried"
    return f"{word}: {finding.why}"


@contextmanager
def _live_line(name: str, shown: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the trial under way on a terminal: the trials of an agent take a minute."""
    try:
        yield lambda ability: streams.write(f"\r\x1b[K… {name}: {ability}") if shown else None
    finally:
        streams.write("\r\x1b[K" if shown else "")


def abilities(manifest: Mapping[str, Any]) -> str:
    """A manifest as words: what is native stands alone, the rest with its level."""
    return ", ".join(name if level == "native" else f"{name} ({_level(level)})" for name, level in manifest.items())


def _level(level: Any) -> str:
    if isinstance(level, dict) and isinstance(level.get("restricted"), dict):
        return f"restricted: {level['restricted'].get('reason', '')}"
    return str(level)
