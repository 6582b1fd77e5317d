"""What an order says of how an agent's program is started, and where the agent's state lies.

How an agent is told any of it is its own `start`'s affair.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, overload
from urllib.parse import urlsplit

import msgspec

from backplane.agents.rows import KEY_PROXY, STATE, McpServer
from backplane.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from backplane.host import Given

_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
"""Of a conversation: it becomes part of a path."""

# The conversation -----------------------------------------------------------------------------------------------------


class Continuation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an order asks of the conversation: one wish at most, and none that we do not know.

    In silence such an order would begin a conversation that nobody meant.
    """

    keep: bool = False
    resume: str | None = None
    fork: str | None = None

    @property
    def wanted(self) -> str | None:
        """The conversation that has to be there."""
        return self.resume or self.fork

    @property
    def kept(self) -> bool:
        """Whether it outlives the run."""
        return self.keep or self.wanted is not None


def read_conversation(run: Given) -> Continuation:
    """Which conversation the order wants. Raises ConfigError: `config_invalid`."""
    said = run.order.abp("session")
    try:
        asked = msgspec.convert({} if said is None else said, Continuation)
        if asked.resume is not None and asked.fork is not None:
            raise ValueError("resume and fork exclude each other")
        wrong = [id for id in (asked.resume, asked.fork) if id is not None and not _ID.fullmatch(id)]
        if wrong:
            raise ValueError(f"{wrong[0][:80]!r} is no id of a conversation")
    except ValueError as error:
        fix = 'one of {"keep": true}, {"resume": ID}, {"fork": ID}'
        raise ConfigError("config_invalid", f"config.vendor.abp.session: {error}", hint=fix) from error
    return asked


class AgentFolders(msgspec.Struct, frozen=True):
    """Where the agent's state of this run lies."""

    state: str
    """Ours alone, and removed at the end."""
    config: str | None
    """Its configuration and conversations; None is the user's own."""


def folders_of(run: Given, state: str, *, own: bool) -> AgentFolders:
    """Return where the agent's state lies.

    Args:
        state: the folder that is ours alone.
        own: take the user's own configuration.
    """
    kept = os.environ.get(STATE) if read_conversation(run).kept else None
    return AgentFolders(state, None if own else os.path.join(kept or state, "config"))


def place_of(run: Given, state: str, *, own: bool, conversations: str) -> AgentFolders:
    """Make the folders, and look whether the conversation is there.

    Args:
        state: an empty folder.
        own: as `folders_of` takes it.
        conversations: pattern of a conversation's file below the configuration, with `{}` for its id.

    Raises:
        ConfigError: `config_invalid`, there is no such conversation.
        BackendError: `capability_unsupported`, there is no folder for any.
    """
    os.mkdir(os.path.join(state, "tmp"))
    asked, place = read_conversation(run), folders_of(run, state, own=own)
    if place.config is None:
        return place
    if asked.kept and not os.environ.get(STATE):
        raise BackendError("capability_unsupported", "there is no folder that conversations could be kept in")
    os.makedirs(place.config, exist_ok=True)
    if asked.wanted is not None and not any(Path(place.config).glob(conversations.format(asked.wanted))):
        fix = 'run with config.vendor.abp.session = {"keep": true} first; its event names the id'
        raise ConfigError("config_invalid", f"no conversation {asked.wanted} is kept here", hint=fix)
    return place


def behind_key_proxy() -> bool:
    """Tell whether the control plane sees what the agent asks its model's service, and holds its budget by that."""
    return KEY_PROXY in os.environ


@overload
def asked_at(base_url: str) -> str: ...
@overload
def asked_at(base_url: str | None) -> str | None: ...
def asked_at(base_url: str | None) -> str | None:
    """Return where the agent is to ask its model's service: at the control plane's proxy where that has its key."""
    proxy = os.environ.get(KEY_PROXY)
    return base_url if proxy is None or base_url is None else proxy + urlsplit(base_url).path


_VERSION: Final = re.compile(r"/v\d\w*/?\Z")


def without_version(base_url: str | None) -> str | None:
    """Return an address without the version at its end, for a program that adds one itself."""
    return None if base_url is None else _VERSION.sub("", base_url)


def environment_of(
    run: Given, place: AgentFolders, own: Mapping[str, str | None], quiet: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment of the agent's program: the user's, ours over it, and the order's own variables last.

    Args:
        own: set whatever the user has; one that is None is not.
        quiet: set where the user has them not.
    """
    env = {**(quiet or {}), **os.environ, "TMPDIR": os.path.join(place.state, "tmp")}
    env |= {name: value for name, value in own.items() if value is not None}
    for name in (STATE, KEY_PROXY):
        env.pop(name, None)
    return env | run.order.config.env


def keep_name(place: AgentFolders, id: str, root: str) -> None:
    """Remember a kept conversation and where it works, where the agent's own files do not tell.

    `KEPT` is the pattern of conversations then.

    Raises:
        BackendError: `capability_unsupported`, an id that cannot be asked for again.
    """
    if not _ID.fullmatch(id):
        raise BackendError("capability_unsupported", f"the agent's conversation has an odd id: {id[:80]!r}")
    if place.config is not None:
        path = os.path.join(place.config, KEPT.format(id))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(root)


KEPT: Final = "conversations/{}"


def require_same_folder(run: Given, place: AgentFolders) -> None:
    """Refuse a conversation that stays with its folder, where the run is elsewhere; `keep_name` said where it began.

    Raises:
        BackendError: `capability_unsupported`, the run is in a copy, which is gone after it.
        ConfigError: `config_invalid`, the run is in another folder.
    """
    asked, spec = read_conversation(run), run.order.workspace
    if asked.kept and spec.mode != "pass_through":
        fact = "this agent's conversations stay with the folder they began in, and a copy of it is gone after the run"
        raise BackendError("capability_unsupported", fact, hint="work in place (mode pass_through)")
    if asked.wanted is not None and place.config is not None:
        with open(os.path.join(place.config, KEPT.format(asked.wanted)), encoding="utf-8") as file:
            began = file.read()
        if began != spec.root:
            raise ConfigError("config_invalid", f"the conversation {asked.wanted} began in {began}, and stays there")


def require_price(run: Given, prices: object, model: str = "the model") -> None:
    """Refuse a budget that cannot be held. Raises ConfigError: `config_invalid`, nobody said what the model costs."""
    if run.order.config.max_budget_usd is not None and prices is None:
        fact = f"max_budget_usd cannot be held: what {model} costs is not known"
        raise ConfigError("config_invalid", fact, hint=PRICED)


PRICED: Final = "options = {prices = {input = …, output = …}}, in dollars"


# The rest of the order ------------------------------------------------------------------------------------------------


def shows_results(run: Given) -> bool:
    """Whether hooks of the order look at what tools gave before the agent does."""
    rows = run.order.abp("hooks") or ()
    return any(isinstance(row, dict) and row.get("event") == "post_tool" for row in rows)


def tells_subagents(run: Given) -> bool:
    """Return whether a hook of the order observes the end of sub-agents."""
    return any(isinstance(row, dict) and row.get("event") == "subagent_end" for row in run.order.abp("hooks") or ())


def own_settings(run: Given, agent: str, known: Collection[str]) -> dict[str, Any]:
    """What the order says to this agent alone, under `config.vendor`, all of it text; and a system prompt for any.

    Raises:
        ConfigError: `config_invalid`.
    """
    own, place = run.order.config.vendor.get(agent, {}), f"config.vendor.{agent}"
    fix = f"known are {', '.join(known)}" if known else "leave it out"
    if not isinstance(own, dict):
        raise ConfigError("config_invalid", f"{place} is no object", hint=fix)
    for name, value in own.items():
        if name not in known:
            raise ConfigError("config_invalid", f"{place} has no setting {name[:80]!r}", hint=fix)
        if value is not None and not isinstance(value, str):
            raise ConfigError("config_invalid", f"{place}.{name} is no text")
    system = [words for words in (own.get("system"), run.order.abp("system")) if words]
    return {**own, "system": "\n\n".join(system)} if system else dict(own)


def server_rows(run: Given, configured: Collection[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the MCP servers of configuration and order, as an agent's own client takes them: name → members.

    Raises ConfigError.
    """
    rows = timed_rows(run, configured)
    return {name: {key: value for key, value in row.items() if key != "tool_ms"} for name, row in rows.items()}


def timed_rows(run: Given, configured: Collection[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the rows of `server_rows` with the member `tool_ms`. Raises ConfigError."""
    ordered = run.order.abp("mcp_servers") or ()
    if not isinstance(ordered, list | tuple):
        raise ConfigError("config_invalid", "config.vendor.abp.mcp_servers is no list")
    made: dict[str, dict[str, Any]] = {}
    for row in (*configured, *ordered):
        try:
            named = msgspec.convert(row, McpServer)
        except msgspec.ValidationError as error:
            fix = "it has name; command, args and env, or url and headers"
            raise ConfigError("config_invalid", f"an MCP server cannot be read: {error}", hint=fix) from error
        if not named.name or not {"command", "url"} & set(row):
            raise ConfigError("config_invalid", "an MCP server has no name, or neither command nor url")
        made[named.name] = {name: value for name, value in row.items() if name != "name"}
    return made


def toml(text: str) -> str:
    """Return a text as TOML writes it: a string of JSON is one of TOML."""
    return msgspec.json.encode(text).decode()


def found(program: str, install: str, env: Mapping[str, str]) -> str:
    """The program's path. Raises BackendError: `backend_unavailable`, it is not there."""
    # As `shutil.which` does, without loading three compressors.
    folders = [""] if os.sep in program else filter(os.path.isabs, env.get("PATH", os.defpath).split(os.pathsep))
    paths = (os.path.join(folder, program) for folder in folders)
    path = next((path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)), None)
    if path is None:
        fix = f"install it: {install}" if install else 'name its path: options = { program = "PATH" }'
        raise BackendError("backend_unavailable", f"{program} is not found or not executable", hint=fix)
    return path
