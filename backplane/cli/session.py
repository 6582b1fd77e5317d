"""Which conversation a `run` is part of, and the settings of agents that have an option of their own."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, Final

from backplane.cli import streams
from backplane.cli.parser import Options
from backplane.cli.start import wrong
from backplane.contract.canonical import Json
from backplane.errors import BackplaneError
from backplane.protocol import strict
from backplane.receipts.store import Store

LAST: Final = "last"

RUNS_MAX: Final = 1000
"""Runs that are looked through for the last conversation, newest first: a row takes some 20 µs."""


def settings(options: Options, home: Path, backend: str | None) -> dict[str, Json]:
    """Return the members of `config.vendor.abp` that these options stand for.

    Args:
        home: the state folder, in which `last` is looked up.
        backend: the name of the backend that the run is on; `last` is its last conversation.

    Raises:
        ConfigError: `config_invalid`, two options exclude each other, or a file or conversation is not there.
    """
    found: dict[str, Json] = {}
    session = _session(options, home, backend)
    if session:
        found["session"] = session
    if options.schema is not None:
        found["output_schema"] = _schema(options.schema)
    if options.mcp:
        found["mcp_servers"] = [_server(text) for text in options.mcp]
    if options.tag:
        found["tags"] = list(dict.fromkeys(options.tag))
    if options.hash_task:
        found["task_text"] = "hash"
    return found


def _session(options: Options, home: Path, backend: str | None) -> dict[str, Json]:
    given = [(name, value) for name, value in (("resume", options.resume), ("fork", options.fork)) if value is not None]
    if len(given) > 1:
        raise wrong("--resume and --fork exclude each other", "--fork ID leaves it as it is")
    if not given:
        return {"keep": True} if options.keep else {}
    ((name, wanted),) = given
    return {name: _last(home, backend) if wanted == LAST else wanted}


def _last(home: Path, backend: str | None) -> str:
    """Return the id of the conversation that a run on this backend has kept last."""
    if backend is not None and home.is_dir():
        with Store.open(home) as store:
            for row in store.listed(RUNS_MAX):
                if row.backend_name != backend:
                    continue
                try:
                    kept = store.load(row.run_id).backplane.get("session")
                except BackplaneError:  # It was pruned.
                    continue
                if isinstance(kept, dict):
                    return str(kept["id"])
    fact = f"no conversation with {backend or 'a command'} is kept here"
    raise wrong(fact, "run with --keep first; its output names the conversation")


def _schema(path: str) -> Json:
    try:
        schema = strict(streams.read_input(path))
    except (ValueError, RecursionError) as error:
        raise wrong(f"--schema {path}: not strict JSON ({error})") from error
    if not isinstance(schema, dict):
        raise wrong(f"--schema {path}: not a JSON object", "give a JSON Schema")
    return schema


def _server(text: str) -> Json:
    """Read `NAME=COMMAND` or `NAME=URL`."""
    name, equals, value = text.partition("=")
    form = wrong(f"--mcp {text!r} is not of the form NAME=COMMAND or NAME=URL")
    if not (name.strip() and equals and value.strip()):
        raise form
    if value.startswith(("http://", "https://")):
        return {"name": name, "url": value}
    try:
        command, *arguments = shlex.split(value)
    except ValueError as error:
        raise wrong(f"--mcp {name}: the command cannot be read: {error}") from error
    made: dict[str, Any] = {"name": name, "command": command}
    return {**made, "args": arguments} if arguments else made
