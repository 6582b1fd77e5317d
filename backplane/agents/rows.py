"""Reads the agents that backplane drives: each is a row of `hosts/agents.toml`, overridden by a backend's options.

A control plane reads a row to report its errors, and sends it to the agent's host, which need not read the table.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec

from backplane.errors import CODES, ConfigError

if TYPE_CHECKING:
    from pathlib import Path

HOST: Final = "agent.py"
"""File under `hosts/` that drives every agent; its argument names the row."""

OPTIONS: Final = "BACKPLANE_AGENT_OPTIONS"
"""Variable with a backend's options for the host of an agent, as JSON; every user could read an argument."""

INSTRUCTION_FILES: Final = ("AGENTS.md", "CLAUDE.md")
"""Names of project instruction files that a model behind `api` gets: in each folder the first that exists."""

STATE: Final = "BACKPLANE_AGENT_STATE"
"""Variable with the folder in which an agent's host keeps conversations, which outlive the run."""

KEY_PROXY: Final = "BACKPLANE_KEY_PROXY"
"""Variable with the key proxy's address, to which an agent's host sends model requests in place of the service's."""

BASE_URL: Final = "{base_url}"
"""Placeholder for the address of the model's service in an agent's variables, arguments, files and configuration."""
SESSION: Final = "{session}"
"""Placeholder for the id of an agent's session in the name of its log."""

SILENCE_S: Final = 240
"""Seconds without a message of the agent while no tool runs; then its turn fails. Below the control plane's 300 s, so
that the host can report the reason."""
RETRIES: Final = 4
"""Maximum repeats of one model request; the order's own timeout may end it earlier."""

PROVIDERS: Final[Mapping[str, tuple[str, ...]]] = {
    "copilot": ("openai", "azure", "anthropic"),
    "kimi": ("kimi", "openai", "openai_responses", "anthropic", "google-genai"),
}
"""Driver → kinds of service that its agent can ask; the first is the default."""

OF_ALL: Final = (
    "program", "install", "key_env", "base_url", "base_url_env", "own_state", "silence_s", "mcp_servers",
    "capabilities", "heeds", "instruction_files", "subagent_ends", "labels",
)  # fmt: skip
"""Options that every driver takes."""
OF_DRIVER: Final[Mapping[str, tuple[str, ...]]] = {
    "claude": (),
    "codex": ("model", "prices", "retries"),
    "copilot": ("model", "prices", "provider", "wire_api"),
    "kimi": ("model", "prices", "provider", "context_tokens", "retries"),
    "acp": (
        "sessions", "model", "prices", "adds_version", "arguments", "home", "env", "files", "config", "own_server",
        "mode", "model_by", "usage", "tools", "failed_request", "log", "asks_anew", "in_place",
    ),
}  # fmt: skip
"""Driver → its other options; a driver without an entry takes those of Codex."""
_OF_TRIALS: Final = frozenset(("trial_options", "trial_env", "trial_in_place"))
"""Members of the table that `backends --probe` alone reads."""


_PORTS: Final = {"http": 80, "https": 443}


def taken(drive: str) -> tuple[str, ...]:
    """Return the options that a driver takes."""
    return (*OF_ALL, *OF_DRIVER.get(drive, OF_DRIVER["codex"]))


class McpServer(msgspec.Struct, frozen=True):
    """The members of an MCP server's row that all agents have; an agent may have others."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    url: str = ""
    headers: dict[str, str] = {}
    tool_ms: Annotated[int, msgspec.Meta(gt=0)] | None = None
    """Most milliseconds of a call of the server's tools; only the host `api` applies it. None is the host's default."""


class ModelOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The way in which an agent gets the name of its model."""

    variable: str | None = None
    """Environment variable for the model's name; None if no variable sets it."""
    arguments: tuple[str, ...] = ()
    """Arguments before the model's name."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A variable that holds the agent's configuration."""

    variable: str
    """Name of the variable."""
    content: dict[str, Any] = {}
    """Members that override the user's own configuration."""
    model: str | None = None
    """Member of the configuration for the model's name; None if it has none."""
    shows_images: bool = False
    """True if the agent sends images only to a model whose entry in its configuration allows them."""


class AgentRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An agent: how its program is started and driven, and what its manifest has."""

    program: str
    """Name or path of the agent's program; a name is looked for on PATH."""
    name: str = ""
    """Name of the row; empty if options alone describe the agent."""
    drive: str = "acp"
    """Name of the folder of `agents` that drives the agent."""
    install: str = ""
    """Command that installs the program, for messages."""
    oldest: str | None = None
    """Oldest version of the program that works; None if no older one was tried."""
    trials: dict[str, Any] = {}
    """Trial calls that test the abilities of the agent's model, for `backends --probe`."""
    key_env: str | None = None
    """Variable that holds the key of the model's service; None if there is none."""
    base_url: str | None = None
    """Address of the model's service; its version (`/v1`) is optional if the program adds it. None: the agent's own."""
    base_url_env: str | None = None
    """Variable from which the vendor's own program reads `base_url`; used if the options name no address."""
    own_state: bool = False
    """True to use the user's own folders, login and model service in place of the session's."""
    silence_s: int = SILENCE_S
    """Seconds without a message of the agent, while no tool runs, after which its turn fails; 0 for no limit."""
    mcp_servers: tuple[dict[str, Any], ...] = ()
    """MCP servers that the agent starts or reaches: each a name with command, args, env, or with url, headers."""
    capabilities: dict[str, str] = msgspec.field(default_factory=lambda: {"streaming": "native"})
    """Capabilities in the manifest of the agent's hello: a level, or the reason why it is restricted."""
    heeds: tuple[str, ...] = ()
    """Settings of an order that the agent supports in addition to those that every agent supports."""
    instruction_files: tuple[str, ...] = ()
    """Names of the project's files that the agent reads itself as its instructions."""
    subagent_ends: bool = False
    """True if the agent reports the end of each of its sub-agents, for hooks that observe it."""
    labels: dict[str, str] = {}
    """Agent's name for a failure → the contract's code; without an entry its text and status decide."""
    sessions: bool = False
    """True if the agent keeps its conversations, and can resume one in another run."""
    model: str | None = None
    """Model if the order names none; without it the agent chooses, unless its service is the user's own."""
    prices: dict[str, Any] | None = None
    """Dollars for a million tokens: input, output, cache_read, cache_write; None if not configured."""
    retries: int = RETRIES
    """Maximum repeats of one model request: 1 is two requests at most."""
    provider: str = ""
    """Kind of the service at `base_url`; the default is the first kind that the agent supports."""
    wire_api: Literal["completions", "responses"] = "completions"
    """Which of OpenAI's protocols the service speaks."""
    context_tokens: int = 262_144
    """Maximum tokens of the model's context; the agent shortens a conversation before it exceeds them."""
    adds_version: bool = False
    """True if the program adds the version (`/v1`) to the address of the model's service."""
    arguments: tuple[str, ...] = ()
    """Arguments of the program."""
    home: dict[str, str] = {}
    """Variables that get a folder below the session's state folder, each with the folder's name."""
    env: dict[str, str] = {}
    """Environment variables of the agent: name → value."""
    files: dict[str, str] = {}
    """Files, path → content, that are written below the state folder before the start."""
    config: Config | None = None
    """Variable with the agent's configuration as JSON, and the members that override the user's; None without one."""
    own_server: str | None = None
    """Address (`host:port`) of the agent's own local server, reached without a proxy; None without a server."""
    mode: str | None = None
    """Mode that is set after the session is open, so that the agent asks before it acts; None sets no mode."""
    model_by: ModelOption = ModelOption()
    """Variable or arguments that set the agent's model; if there are neither, the protocol sets it."""
    usage: Literal["chunks", "record", "turn", "last_call", "none"] = "none"
    """Message in which the agent reports tokens."""
    tools: dict[str, str] = {}
    """The agent's names of tools → the neutral names."""
    failed_request: str = ""
    """A regular expression for the line of the log that reports a failed request; empty if the agent writes none."""
    log: str = ""
    """The log's file below the state folder, with wildcards and `{session}`; empty for stderr."""
    asks_anew: bool = False
    """True if the agent requests the whole answer again after a failed request: earlier text does not count."""
    in_place: bool = False
    """True if the agent's conversations can only be resumed in the folder where they began."""

    def __post_init__(self) -> None:
        try:
            groups = re.compile(self.failed_request).groupindex
        except re.error as error:
            raise ValueError(f"`failed_request` is not a regular expression: {error}") from error
        if self.failed_request and "words" not in groups:
            raise ValueError("`failed_request` has no group (?P<words>…)")
        choices = PROVIDERS.get(self.drive, ())
        if self.provider not in ("", *choices):
            raise ValueError(f"provider is {self.provider!r:.80}, and it is one of {', '.join(choices)}")
        if unknown := [code for code in self.labels.values() if code not in CODES]:
            raise ValueError(f"{unknown[0]!r:.80} of `labels` is no code of the contract")

    @property
    def service(self) -> str:
        """Kind of service at `base_url`."""
        return self.provider or PROVIDERS[self.drive][0]

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The address of the model's service as `host:port`; empty if it is unknown or cannot be read."""
        from urllib.parse import urlsplit  # A host does not need it for its hello.

        try:
            parts = urlsplit(self.base_url or "")
            port = parts.port or _PORTS[parts.scheme]
        except (ValueError, KeyError):
            return ()
        is_host = parts.hostname and not re.search(r"\s", parts.hostname)
        return (f"{parts.hostname}:{port}",) if is_host else ()

    def is_told(self, env: Mapping[str, str]) -> bool:
        """Return True if the agent gets the address: from its driver, or by `{base_url}` in its row or variables."""
        return self.drive != "acp" or self.says_base_url(env)

    def says_base_url(self, env: Mapping[str, str]) -> bool:
        """Return True if `{base_url}` is in the row or in the backend's variables."""
        return BASE_URL in msgspec.json.encode([self, env]).decode()


@functools.cache
def rows_of(folder: str) -> dict[str, dict[str, Any]]:
    """Return the rows of `agents.toml` in the folder of the hosts."""
    import tomllib

    with open(os.path.join(folder, "agents.toml"), "rb") as file:
        return tomllib.load(file)


def read(rows: Mapping[str, Mapping[str, Any]], name: str, given: Mapping[str, Any]) -> AgentRow:
    """Return a row, overridden by a backend's options.

    Args:
        name: name of the row; empty for an agent that is described by its options alone.
        given: the options.

    Raises:
        ConfigError: `config_invalid`, an option is unknown or has the wrong type.
    """
    kept = {key: value for key, value in rows.get(name, {}).items() if key not in _OF_TRIALS}
    said = {key: value for key, value in given.items() if key != "profile"}
    known = taken(kept.get("drive", "acp"))
    try:
        if unknown := [key for key in said if key not in known]:
            raise msgspec.ValidationError(f"Object contains unknown field `{unknown[0]}`")
        return msgspec.convert({**kept, **said, "name": name}, AgentRow)
    except msgspec.ValidationError as error:
        fact = f"options of the agent {name or 'without a row'}: {error}"
        raise ConfigError("config_invalid", fact, hint=f"choose from: {', '.join(known)}") from error


def read_options(folder: str, name: str, options: str) -> AgentRow:
    """Return the row that a host was given by its control plane, or a row of the table with options over it.

    Args:
        folder: the folder of the hosts.
        name: name of the row.
        options: the options as JSON; if they have `drive`, they are a whole row.

    Raises:
        ConfigError: `config_invalid`.
    """
    try:
        given = msgspec.json.decode(options, type=dict[str, Any])
        return msgspec.convert(given, AgentRow) if "drive" in given else read(rows_of(folder), name, given)
    except msgspec.MsgspecError as error:
        raise ConfigError("config_invalid", f"the options are no JSON object: {error}") from error


def agent_of(
    hosts: Path,
    name: str,
    options: Mapping[str, Any],
    env: Mapping[str, str],
    where: str,
    environ: Mapping[str, str] | None = None,
) -> AgentRow:
    """Return the row of the agent that a shipped host drives.

    Args:
        hosts: the folder of the hosts.
        name: name of the row; empty for an agent that the options name.
        options: the backend's options: `profile` names a row of an agent behind ACP, `program` another program.
        env: the backend's environment variables.
        environ: our own environment; it may name the address of the model's service.
        where: name of the options in an error's text.

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
    agent = read(rows, row, options)
    if agent.base_url is None and agent.says_base_url(env):
        fact = f"{where} or its env say {BASE_URL}, and there is no base_url"
        raise ConfigError("config_invalid", fact, hint='give base_url = "https://…"')
    if agent.base_url is not None and not (agent.base_url.startswith(("http://", "https://")) and agent.endpoints):
        fact = f"{where}: base_url {agent.base_url[:80]!r} is no address of a service"
        raise ConfigError(
            "config_invalid", fact, hint="it is http:// or https:// with a host, and perhaps a port and path"
        )
    return agent


def past_proxies(env: Mapping[str, str], host: str) -> dict[str, str]:
    """Return the `no_proxy` variables with this host added, so that programs reach it without a proxy.

    Many programs read only one spelling, so a spelling that is not set gets the other one's list.
    """
    listed = {name: env.get(name, env.get(name.swapcase())) for name in ("NO_PROXY", "no_proxy")}
    return {name: f"{others},{host}" if others else host for name, others in listed.items()}
