"""What a backend's options may say of each driven agent, and its host's table the rest.

A host reads them at its start; a control plane reads them before that, to name what is wrong.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec

from backplane.errors import CODES, ConfigError

OPTIONS: Final = "BACKPLANE_AGENT_OPTIONS"
"""Variable that takes a backend's options to such a host, as JSON: an argument could be read by every user."""

KEY_PROXY: Final = "BACKPLANE_KEY_PROXY"
"""Variable that tells such a host where its model's service is asked in place of its own address."""

BASE_URL: Final = "{base_url}"
"""Stands for that address in an agent's variables, arguments, files and configuration."""
SESSION: Final = "{session}"
"""Stands for the id of an agent's session in the name of its log."""

SILENCE_S: Final = 240
"""Without a sign from the agent while no tool runs: below the control plane's 300 s, so that the reason can be told."""
RETRIES: Final = 4
"""Requests that repeat one call of the model after the first; an order's own clock may be shorter."""
OF_TRIALS: Final = ("trials", "trial_options", "trial_env", "trial_in_place", "oldest")
"""Members of a row that are for `backends --probe` and `doctor` alone."""
OF_BACKENDS: Final = ("profile",)
"""Options that were heard before the host was started."""


class _Agent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="drive"):
    """The members of every agent's row; the tag names the folder of `agents` that drives the agent."""

    program: str
    """Name or path of the agent's program; a name is looked for on PATH."""
    install: str = ""
    """Command that installs the program, for messages."""
    key_env: str | None = None
    """Variable that holds the key of the model's service."""
    base_url: str | None = None
    """Address of the model's service; the version at its end (`/v1`) is optional where the program adds one."""
    base_url_env: str | None = None
    """Variable from which the vendor's own program reads `base_url`; used if the options name no address."""
    own_state: bool = False
    """Use the user's own folders, login and model service in place of the session's."""
    silence_s: int = SILENCE_S
    """Seconds without a sign of the agent, while no tool runs, after which its turn fails; 0 waits for ever."""
    mcp_servers: tuple[dict[str, Any], ...] = ()
    """Servers the agent starts or reaches: name with command, args, env, or with url, headers."""
    capabilities: dict[str, str] = msgspec.field(default_factory=lambda: {"streaming": "native"})
    """Capabilities in the manifest of the agent's hello: a level, or the reason why it is restricted."""
    heeds: tuple[str, ...] = ()
    """Settings of an order that the agent carries out beside those that every agent does."""
    instruction_files: tuple[str, ...] = ()
    """Names of the project's files that the agent reads itself as its instructions."""

    @property
    def drive(self) -> str:
        """Name of the folder of `agents` that drives the agent."""
        return str(self.__struct_config__.tag)


class _Vendor(_Agent, frozen=True, forbid_unknown_fields=True):
    """What the rows of agents with a host of their own have in common."""

    sessions: bool = True
    """The agent keeps its conversations, and goes on with one in another run."""


class _Priced(_Vendor, frozen=True, forbid_unknown_fields=True):
    """The same, of those whose model and budget are our affair."""

    model: str | None = None
    """Where the order names none; else the agent's own choice, which a service of the user's has not."""
    prices: dict[str, Any] | None = None
    """Dollars for a million tokens: input, output, cache_read, cache_write."""


class Claude(_Vendor, frozen=True, forbid_unknown_fields=True, tag="claude"):
    """The row of Claude Code with a backend's options over it."""

    project_settings: bool = False
    """Take the workspace's own settings for the agent, too: they can start programs that nobody is asked about."""


class Codex(_Priced, frozen=True, forbid_unknown_fields=True, tag="codex"):
    """The row of Codex with a backend's options over it."""

    retries: int = RETRIES
    """Requests that repeat one call of the model after the first: 1 is two requests at most."""


class Copilot(_Priced, frozen=True, forbid_unknown_fields=True, tag="copilot"):
    """The row of Copilot CLI with a backend's options over it."""

    provider: Literal["openai", "azure", "anthropic"] = "openai"
    """What kind of service is at `base_url`."""
    wire_api: Literal["completions", "responses"] = "completions"
    """Which of OpenAI's protocols it speaks."""
    project_settings: bool = False
    """Take the workspace's own settings for the agent, too: they can start programs that nobody is asked about."""


class Kimi(_Priced, frozen=True, forbid_unknown_fields=True, tag="kimi"):
    """The row of Kimi with a backend's options over it."""

    provider: Literal["kimi", "openai", "openai_responses", "anthropic", "google-genai"] = "kimi"
    """What kind of service is at `base_url`."""
    context_tokens: int = 262_144
    """Tokens that the model takes at most; the agent shortens a conversation before it is longer."""
    retries: int = RETRIES
    """Requests that repeat one call of the model after the first: 1 is two requests at most."""


class McpServer(msgspec.Struct, frozen=True):
    """The members of an MCP server's row that all agents have; an agent may have others."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    url: str = ""
    headers: dict[str, str] = {}
    tool_ms: Annotated[int, msgspec.Meta(gt=0)] | None = None
    """Milliseconds that a call of one of its tools may take; only the host `api` applies it."""


class ModelOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an agent is told its model."""

    variable: str | None = None
    """Variable that takes the model's name."""
    arguments: tuple[str, ...] = ()
    """Arguments before the model's name."""
    default: str | None = None
    """Named where an order names none: an agent may ask another model first which one to take."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A variable that holds the agent's configuration."""

    variable: str
    """Name of the variable."""
    content: dict[str, Any] = {}
    """Laid over the user's own configuration."""
    model: str | None = None
    """Member that takes the model's name."""
    shows_images: bool = False
    """The agent sends images only to a model whose entry in its configuration takes them."""


class Notice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Words that an agent puts among its model's: a whole chunk of a message, known by how it begins."""

    says: str
    """A regular expression that the chunk begins with; empty for a turn that ends after a tool and without a word."""
    code: str | None = None
    """The failure of a turn that ends with it; without one it is a note."""
    retry: bool = False
    """The model is asked anew, and its words since the last message do not count."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.says)
        except re.error as error:
            raise ValueError(f"`says` of a notice is no regular expression: {error}") from error
        if self.code is not None and self.code not in CODES:
            raise ValueError(f"{self.code!r:.80} of a notice is no code of the contract")
        if self.code is not None and self.retry:
            raise ValueError("a notice is a failure or a retry, not both")
        if not self.says and self.code is None:
            raise ValueError("a notice that says nothing has a code")


class Profile(_Agent, frozen=True, forbid_unknown_fields=True, tag="acp"):
    """The row of an agent that speaks the Agent Client Protocol, with a backend's options over it."""

    adds_version: bool = False
    """The program adds the version (`/v1`) to the address of the model's service."""
    arguments: tuple[str, ...] = ()
    """Arguments of the program."""
    home: dict[str, str] = {}
    """Variables that get a folder below the session's state folder, each with the folder's name."""
    env: dict[str, str] = {}
    """Variables of the agent."""
    files: dict[str, str] = {}
    """Files, path → content, that are written below the state folder before the start."""
    config: Config | None = None
    """A variable that holds the agent's configuration as JSON, and what is laid over the user's."""
    own_server: str | None = None
    """Address (`host:port`) where the agent's parts talk to each other, which no proxy is asked for."""
    mode: str | None = None
    """Mode that is set after the session is open, so that the agent asks before it acts."""
    model: ModelOption = ModelOption()
    """Way to set the agent's model: a variable or arguments; by the protocol if there are neither."""
    usage: Literal["chunks", "record", "turn", "last_call", "none"] = "none"
    """Message in which the agent reports tokens."""
    tools: dict[str, str] = {}
    """The agent's names of tools → the neutral names."""
    notices: tuple[Notice, ...] = ()
    """What the agent says itself among the words of its model; the first that fits counts."""
    failed_request: str = ""
    """A regular expression for the line of the log that reports a failed request; empty if the agent writes none."""
    log: str = ""
    """The log's file below the state folder, with wildcards and `{session}`; empty for stderr."""
    asks_anew: bool = False
    """After a failed request it asks for the whole answer again: words since the last message do not count."""
    sessions: bool = False
    """It keeps conversations in its own folders, and goes on with one in another run."""
    in_place: bool = False
    """Its conversations stay with the folder they began in."""
    prices: dict[str, Any] | None = None
    """Dollars for a million tokens: input, output, cache_read, cache_write."""

    def __post_init__(self) -> None:
        try:
            groups = re.compile(self.failed_request).groupindex
        except re.error as error:
            raise ValueError(f"`failed_request` is not a regular expression: {error}") from error
        if self.failed_request and "words" not in groups:
            raise ValueError("`failed_request` has no group (?P<words>…)")


Options = Claude | Codex | Copilot | Kimi | Profile

KINDS: Final[dict[str, type[Options]]] = {
    "claude": Claude,
    "codex": Codex,
    "copilot": Copilot,
    "kimi": Kimi,
    "acp": Profile,
}
"""Struct of a row, by its `drive`."""


@functools.cache
def rows_of(folder: str) -> dict[str, dict[str, Any]]:
    """Return the rows of `agents.toml` in the folder of the hosts."""
    import tomllib

    with open(os.path.join(folder, "agents.toml"), "rb") as file:
        return tomllib.load(file)


def read(rows: Mapping[str, Mapping[str, Any]], name: str, given: Mapping[str, Any]) -> Options:
    """Return a row with a backend's options over it.

    Args:
        rows: the rows of all agents; empty if the options are a whole row.
        name: of the row; a row that is not there is empty.
        given: the options.

    Raises:
        ConfigError: `config_invalid`, an option that is not known or has the wrong type.
    """
    kept = {key: value for key, value in rows.get(name, {}).items() if key not in OF_TRIALS}
    said = {key: value for key, value in given.items() if key not in OF_BACKENDS}
    kind = KINDS.get(str((kept or said).get("drive")), Profile)
    try:
        return msgspec.convert({**kept, **said}, kind)
    except msgspec.ValidationError as error:
        fact, known = f"options of the agent {name or 'without a row'}: {error}", ", ".join(kind.__struct_fields__)
        raise ConfigError("config_invalid", fact, hint=f"choose from: {known}") from error


def read_options(folder: str, name: str, options: str) -> Options:
    """Return the row that a host was given by its control plane, or a row of the table with options over it.

    Args:
        folder: the folder of the hosts.
        name: of the row.
        options: JSON. A control plane sends a whole row, so that a host need not read the table.

    Raises:
        ConfigError: `config_invalid`.
    """
    try:
        given = msgspec.json.decode(options, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError("config_invalid", f"the options are no JSON object: {error}") from error
    return read({} if "drive" in given else rows_of(folder), name, given)
