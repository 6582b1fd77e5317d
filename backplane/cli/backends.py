"""`backends`: which backends there are, and what keeps one from being ready."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from backplane.cli import streams
from backplane.cli.parser import Options, Parser, add_config, add_json

if TYPE_CHECKING:
    from backplane.config import Settings


def parser(name: str) -> Parser:
    """The options of `backends`."""
    made = Parser(
        f"backplane {name}", "List the backends: ready, or why not and how to mend it.", "backplane backends", _backends
    )
    add_config(made)
    add_json(made, "one JSON object a backend and line")
    return made


def _backends(options: Options) -> int:
    import os
    from pathlib import Path

    import msgspec

    from backplane import backends, config

    environ = dict(os.environ)
    settings = config.load(Path(options.config) if options.config else None, environ, streams.folder())
    found = backends.known(settings, environ)
    if options.json:
        streams.write_bytes(b"".join(msgspec.json.encode(status) + b"\n" for status in found))
        return 0
    width = max((len(status.id) for status in found), default=0)
    for status in found:
        mark = " (default)" if status.id == settings.default_backend else ""
        state = "ready" if status.ready else f"not ready: {status.why}"
        streams.write(f"{status.id:<{width}}  {streams.one_line(state)}{mark}\n")
        if not status.ready and status.fix:
            streams.write(f"{'':<{width}}  {streams.one_line(status.fix)}\n")
        if status.manifest:
            streams.write(f"{'':<{width}}  {streams.one_line(abilities(status.manifest), 4000)}\n")
    return 0


def abilities(manifest: Mapping[str, Any]) -> str:
    """A manifest as words: what is native stands alone, the rest with its level."""
    return ", ".join(name if level == "native" else f"{name} ({_level(level)})" for name, level in manifest.items())


def _level(level: Any) -> str:
    if isinstance(level, dict) and isinstance(level.get("restricted"), dict):
        return f"restricted: {level['restricted'].get('reason', '')}"
    return str(level)


def ready_names(settings: Settings, environ: Mapping[str, str]) -> list[str]:
    """Names of the backends that could be used now."""
    from backplane import backends

    return [status.id for status in backends.known(settings, environ) if status.ready]
