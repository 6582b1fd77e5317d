"""The agents that backplane drives: a row of `hosts/agents.toml` each, with a backend's options over it.

A row has the agent's `program` and `install`; most name also its key's variable, its model's address, and whether it
keeps conversations.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from backplane.agents.options import BASE_URL, McpServer, Options, Profile, read
from backplane.agents.options import KEY_PROXY as KEY_PROXY
from backplane.agents.options import OPTIONS as OPTIONS
from backplane.agents.options import rows_of as rows_of
from backplane.errors import ConfigError

HOST: Final = "agent.py"
"""File under `hosts/` that drives every agent; its argument names the row."""

INSTRUCTION_FILES: Final = ("AGENTS.md", "CLAUDE.md")
"""Names of files with a project's instructions that a model behind `api` gets: of each folder the first that exists."""

STATE: Final = "BACKPLANE_AGENT_STATE"
"""Variable that tells such a host the folder for what outlives a run: conversations that are kept."""


class ShippedAgent(msgspec.Struct, frozen=True):
    """The options that an agent's host reads: a row of `agents.toml`, with a backend's options over it."""

    row: str
    options: Options
    is_tried: bool = False
    """Whether the table says how it reaches a scripted model, for `backends --probe`."""
    oldest: str | None = None
    """Oldest version of its program that works; None if no older one was tried."""

    @property
    def key_env(self) -> str | None:
        """Variable with the key of its model's service, given to the host where it is set."""
        return self.options.key_env

    @property
    def model(self) -> str | None:
        """The model that it asks where an order names none; None where that is its own choice."""
        model = getattr(self.options, "model", None)
        return model if isinstance(model, str) else getattr(model, "default", None)

    @property
    def base_url(self) -> str | None:
        """Where its model is: always open to it, whatever an order's rules on the network."""
        return self.options.base_url

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The address as `host:port`; nothing where it is not known or cannot be read."""
        try:
            parts = urlsplit(self.base_url or "")
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            return ()
        return (f"{parts.hostname}:{port}",) if parts.hostname else ()


def past_proxies(env: Mapping[str, str], host: str) -> dict[str, str]:
    """Return the variables that let programs ask a host without a proxy, beside those that they ask so already.

    Many programs look at one spelling alone, so one that is not set lists what the other does.
    """
    listed = {name: env.get(name, env.get(name.swapcase())) for name in ("NO_PROXY", "no_proxy")}
    return {name: f"{others},{host}" if others else host for name, others in listed.items()}


SERVERS_MAX: Final = 256
"""MCP servers of a run whose files are looked for, as each is a look at the disk; the next ones' may be hidden."""
WORDS_MAX: Final = 64
"""Words of one server that are looked at: a command, its arguments and a PATH or two have half of it."""


def servers_of(env: Mapping[str, str], ordered: object) -> dict[str, tuple[str, ...]]:
    """Collect the MCP servers that a host's agent is to start: name → the words of its row that may name files.

    A row that cannot be read is left to the host to name.

    Args:
        env: the host's; its options have the configured servers.
        ordered: the order's `config.vendor.abp.mcp_servers`, unread.
    """
    rows: list[object] = []
    with suppress(msgspec.DecodeError, RecursionError):
        rows += msgspec.json.decode(env.get(OPTIONS, "{}"), type=_Configured).mcp_servers
    rows += ordered if isinstance(ordered, list | tuple) else ()
    found: dict[str, tuple[str, ...]] = {}
    for row in rows[:SERVERS_MAX]:
        with suppress(msgspec.ValidationError):
            server = msgspec.convert(row, McpServer)
            lists = (part for value in server.env.values() for part in value.split(os.pathsep))
            words = (server.command, *server.args, *lists)
            found[server.name] = tuple(word for word in words[:WORDS_MAX] if word and "\0" not in word)
    return found


class _Configured(msgspec.Struct):
    mcp_servers: list[object] = []


PARENTS_MAX: Final = 4
"""Most folders between a program and the file that names its package's version."""


def version_at(program: str) -> str | None:
    """Return the version of the npm package that holds a program; None if none does."""
    for folder in Path(os.path.realpath(program)).parents[:PARENTS_MAX]:
        with suppress(OSError, msgspec.MsgspecError):
            version = msgspec.json.decode((folder / "package.json").read_bytes(), type=_Package).version
            return version or None
    return None


class _Package(msgspec.Struct):
    version: str = ""


def is_older(version: str, oldest: str) -> bool:
    """Return True if a version's numbers come before another's."""

    def numbers(text: str) -> list[int]:
        return [int(part) if part.isdigit() else 0 for part in text.partition("-")[0].split(".")]

    return numbers(version) < numbers(oldest)


def is_told(agent: ShippedAgent, env: Mapping[str, str]) -> bool:
    """Whether the agent learns where to ask: of its host, or where `{base_url}` stands in its options or variables."""
    return not isinstance(agent.options, Profile) or _says_base_url(agent, env)


def _says_base_url(agent: ShippedAgent, env: Mapping[str, str]) -> bool:
    return BASE_URL in msgspec.json.encode([agent.options, env]).decode()


def agent_of(
    hosts: Path,
    name: str,
    options: Mapping[str, Any],
    env: Mapping[str, str],
    where: str,
    environ: Mapping[str, str] | None = None,
) -> ShippedAgent:
    """Return the agent that a shipped host is to drive.

    Args:
        hosts: the folder of the hosts.
        name: of the row; empty for an agent that the options name.
        options: of the backend: `profile` names a row of an agent behind ACP, `program` another program.
        env: of the backend.
        environ: our own environment; it may name the address of the model's service.
        where: what an error calls the options.

    Raises:
        ConfigError: `config_invalid`: neither a row nor a program is named, the host would not take an option, or the
            address of the model's service is invalid.
    """
    rows: Mapping[str, Mapping[str, Any]] = rows_of(str(hosts))
    if not name:
        rows = {row: known for row, known in rows.items() if "drive" not in known}
    row = options.get("profile", name)
    program = options.get("program", rows.get(row, {}).get("program") if isinstance(row, str) else None)
    if not isinstance(program, str) or not isinstance(row, str):
        fix = f'give profile = one of {", ".join(rows)}; or program = "…" with its arguments'
        raise ConfigError("config_invalid", f"{where} name no agent", hint=fix)
    known = rows.get(row, {})
    variable = str(options.get("base_url_env", known.get("base_url_env")))
    address = env.get(variable) or (environ or {}).get(variable)
    if address and "base_url" not in options:
        options = {**options, "base_url": address}
        where = f"the variable {variable}, or {where}"
    agent = ShippedAgent(row, read(rows, row, options), "trials" in known, known.get("oldest"))
    if agent.base_url is None and _says_base_url(agent, env):
        fact = f"{where} or its env say {BASE_URL}, and there is no base_url"
        raise ConfigError("config_invalid", fact, hint='give base_url = "https://…"')
    if agent.base_url is not None and not (agent.base_url.startswith(("http://", "https://")) and agent.endpoints):
        fact = f"{where}: base_url {agent.base_url[:80]!r} is no address of a service"
        raise ConfigError(
            "config_invalid", fact, hint="it is http:// or https:// with a host, and perhaps a port and path"
        )
    return agent
