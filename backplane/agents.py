"""Which program of somebody else a shipped host drives, and what a person is told when it is not there.

A host that drives one has a table beside its file, `NAME.toml`: a row an agent, with `program` and `install`; where it
says so also its key's variable, its model's address, and whether it keeps conversations. How the program is spoken
with is the host's own affair.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from backplane.errors import ConfigError

OPTIONS: Final = "BACKPLANE_AGENT_OPTIONS"
"""Variable that takes a backend's options to such a host, as JSON: an argument could be read by every user."""

HOSTS: Final[dict[str, tuple[str, ...]]] = {
    "acp": ("acp.py",),
    "opencode": ("acp.py", "opencode"),
    "qwen": ("acp.py", "qwen"),
    "claude": ("claude.py", "claude"),
    "codex": ("codex.py", "codex"),
}
"""Shipped hosts of this kind: name → file under `hosts/` and the row of its table."""

STATE: Final = "BACKPLANE_AGENT_STATE"
"""Variable that tells such a host the folder for what outlives a run: conversations that are kept."""


class Agent(msgspec.Struct, frozen=True):
    """A row of the table, as far as it is of interest here."""

    row: str
    program: str
    """A name to be looked for on PATH, or a path."""
    install: str = ""
    """The command that installs it."""
    key_env: str | None = None
    """Variable with the key of its model's service, given to the host where it is set."""
    base_url: str | None = None
    """Where its model is: always open to it, whatever an order's rules on the network."""
    own_state: bool = False
    """It uses the login and settings that the user has for it."""
    sessions: bool = False
    """It keeps conversations beyond a run, where an order wants that."""

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The address as `host:port`; nothing where it is not known or cannot be read."""
        try:
            parts = urlsplit(self.base_url or "")
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            return ()
        return (f"{parts.hostname}:{port}",) if parts.hostname else ()


def agent_of(host: Path, arguments: tuple[str, ...], options: Mapping[str, Any], where: str) -> Agent | None:
    """The agent that a shipped host is to drive; None for a host that drives none.

    Args:
        host: the host's file.
        arguments: of the host; the first names a row.
        options: of the backend: `profile` names another row, `program` another program.
        where: what an error calls the options.

    Raises:
        ConfigError: `config_invalid`, neither a row nor a program is named.
    """
    table = host.with_suffix(".toml")
    if not table.is_file():
        return None
    import tomllib

    rows = tomllib.loads(table.read_text(encoding="utf-8"))
    row = options.get("profile", arguments[0] if arguments else "")
    program = options.get("program", rows.get(row, {}).get("program") if isinstance(row, str) else None)
    if not isinstance(program, str) or not isinstance(row, str):
        fix = f'give profile = one of {", ".join(rows)}; or program = "…" with its arguments'
        raise ConfigError("config_invalid", f"{where} name no agent", hint=fix)
    told = {**rows.get(row, {}), **options, "program": program}
    try:
        return msgspec.convert({"row": row, **told}, Agent)
    except msgspec.ValidationError as error:
        raise ConfigError("config_invalid", f"{where}: {error}") from error
