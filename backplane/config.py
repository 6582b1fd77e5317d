"""Merges a TOML file, the environment and flags into one frozen struct of settings.

Flags override variables, and variables override the file. This module also finds the state folder, and builds the
environment of child processes. Importing it reads nothing.
"""

from __future__ import annotations

import errno
import functools
import operator
import os
import pwd
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from backplane.contract.unknown import explain, explained
from backplane.contract.work import PolicyProfile
from backplane.errors import ConfigError, PolicyError, StoreError, require_type

FILE_NAME: Final = "backplane.toml"
PREFIX: Final = "BACKPLANE_"

SECONDS_MAX: Final = 31_536_000.0
"""Maximum time of a setting: a year. Much longer times, and infinity, overflow the system's clocks."""

TOML_BYTES_MAX: Final = 1024 * 1024
"""Maximum size of a configuration: a file with a hundred backends has about 20 KiB."""

COUNT_MAX: Final = 2**53
"""Maximum count or size of a setting: every JSON reader can represent it exactly."""

Environ = Mapping[str, str]
Isolation = Literal["required", "best_effort", "off"]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=SECONDS_MAX)]
Count = Annotated[int, msgspec.Meta(gt=0, le=COUNT_MAX)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on times, sizes and numbers; times are in seconds.

    Attributes:
        hello_s: Time limit from start to hello; slow vendor programs take 3 s, and 6 s from a cold disk.
        idle_s: Silence after which a run ends; a model may think for minutes, but not for five.
        tool_s: Silence after which a run ends while a tool's call is open; a quiet build takes many minutes.
        run_s: Time limit of a run; None is no limit, because only the caller knows how long the task may take.
        cancel_grace_s: Time for a cancelled child to write its files and end; a person who pressed Ctrl-C waits for it.
        ask_s: Time for a person to answer a question.
        line_bytes_max: Maximum length of a line of the protocol; images in base64 need more than 1 MiB.
        runs_max: Maximum number of runs at once; each may be an agent of 200 MB, and a laptop must have room for all.
        warm_max: Maximum number of started hosts that wait for an order; 0 starts each host when its order comes.
        workspace_bytes_max: Maximum size of a staged copy; larger than big repositories, smaller than a disk.
        workspace_files_max: Maximum number of files in a staged copy; the largest known repositories have far fewer.
    """

    hello_s: Seconds = 10.0
    idle_s: Seconds = 300.0
    tool_s: Seconds = 1800.0
    run_s: Seconds | None = None
    cancel_grace_s: Seconds = 2.0
    ask_s: Seconds = 300.0
    line_bytes_max: Count = 16 * 1024 * 1024
    runs_max: Count = 32
    warm_max: Annotated[int, msgspec.Meta(ge=0)] = 4
    workspace_bytes_max: Count = 20 * 1024**3
    workspace_files_max: Count = 1_000_000


class BackendSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One backend, `[backends.NAME]`: a command, or the name of a shipped host.

    Attributes:
        command: Program and arguments; `load` makes relative paths in it absolute.
        host: Name of a shipped host.
        env: Variables added to the child's environment; the value `$B` takes backplane's variable B.
        options: Settings of a shipped host; `contracts/options.md` lists them for each host.
        remote: True if the host works on another machine; then no files are staged on this machine.
        writable: Files and folders outside of the workspace that a contained host may change, such as its own state;
            `~` is the home folder, and relative paths count from the configuration file's folder.
        credentials: Credential stores that a contained host may read, for example `git`: `contracts/credentials.md`
            lists them.
        key_proxy: True if the host gets a placeholder for its model's key, and a proxy of backplane inserts the key;
            see `contracts/isolation.md`. None takes the top-level `key_proxy`.
        model_backend: Service that answers the agent's model requests in place of its vendor's, in any protocol:
            `BACKEND` or `BACKEND/MODEL`, where the backend has `host = "api"` or is a preset's name; see
            `docs/guide/gateway.md`. None asks the agent's own vendor.
        models: Models that the router may choose on this backend, the default first; empty means only the default.
        group: Name of a group of backends that the router treats as instances of one backend; None is a group of its
            own.
        runs_max: Maximum number of runs at once that the router starts on it; None takes `runs_max` of `[limits]`.
        runs_per_minute: Maximum number of runs that the router starts on it in a minute; None is no limit.
        endpoints: Addresses, `host` or `host:port`, that the host may connect to whatever the network rules are.
        idle_s: Silence after which a run ends; replaces `idle_s` of `[limits]`.
        tool_s: Silence after which a run ends while a tool's call is open; replaces `tool_s` of `[limits]`.
        run_s: Time limit of a run; replaces `run_s` of `[limits]`.

    Raises:
        ValueError: both or neither of `command` and `host` are given, or the command is empty.
    """

    command: tuple[str, ...] | None = None
    host: str | None = None
    env: dict[str, str] = {}
    options: dict[str, Any] = {}
    remote: bool = False
    writable: tuple[str, ...] = ()
    credentials: tuple[str, ...] = ()
    key_proxy: bool | None = None
    model_backend: str | None = None
    models: tuple[str, ...] = ()
    group: str | None = None
    runs_max: Count | None = None
    runs_per_minute: Count | None = None
    endpoints: tuple[str, ...] = ()
    idle_s: Seconds | None = None
    tool_s: Seconds | None = None
    run_s: Seconds | None = None

    def __post_init__(self) -> None:
        _check_start(self.command, "host", self.host)

    def limits_over(self, limits: Limits) -> Limits:
        """Return a copy of `limits`, overridden by this backend's own limits."""
        own = {name: getattr(self, name) for name in _OVERRIDES if getattr(self, name) is not None}
        return msgspec.structs.replace(limits, **own)


_OVERRIDES: Final = ("idle_s", "tool_s", "run_s")


def _check_start(command: tuple[str, ...] | None, other: str, value: str | None) -> None:
    """Check that exactly one of `command` and the other setting is given. Raises ValueError."""
    if (command is None) == (value is None):
        raise ValueError(f"exactly one of `command` and `{other}` must be given")
    if command is not None and (not command or not command[0]):
        raise ValueError("`command` names no program")


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts about one model, `[routing.models."NAME"]`, which replace the router's own."""

    prices: dict[str, Any] | None = None
    """Prices in US dollars per million tokens: input, output, cache_read, cache_write."""
    context_tokens: Count | None = None
    """Token limit of a request and its answer together."""
    output_tokens: Count | None = None
    """Token limit of an answer."""


class RoutingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules for choosing the backend of an order that names none, `[routing]`; see `docs/guide/routing-rule.md`.

    Attributes:
        strategy: Measure by which the router chooses among the backends that can take an order.
        quality: Backends, or `BACKEND/MODEL`, ordered by quality, the best first.
        models: Facts about models, by the models' names.
    """

    strategy: Literal["first_available", "cost", "latency", "balanced"] = "balanced"
    quality: tuple[str, ...] = ()
    models: dict[str, ModelSettings] = {}


HOOK_MS: Final = 30_000
"""Default time limit for a hook's answer: a linter or a small test takes seconds."""

HOOK_MS_MAX: Final = 240_000
"""Maximum time limit of a hook: less than the 300 s after which a host on `backplane.host` gives up its ask."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One MCP server, `[mcp_servers.NAME]`: its tools are for every agent that can be its client.

    Raises:
        ValueError: both or neither of `command` and `url` are given, or the command is empty.
    """

    command: tuple[str, ...] | None = None
    """Program and arguments; `load` makes relative paths in it absolute."""
    url: str | None = None
    """Address of a server that speaks streamable HTTP."""
    env: dict[str, str] = {}
    """Variables added to the command's environment; the value `$B` takes backplane's variable B."""
    headers: dict[str, str] = {}
    """Headers sent to the address; the value `$B` takes backplane's variable B."""
    required: bool = False
    """True refuses a run whose host cannot use the server; otherwise the run's receipt names the missing servers."""
    tool_s: Seconds | None = None
    """Time limit of a tool's call by the host `api`; None takes the smaller of `idle_s` and `tool_s` in `[limits]`."""

    def __post_init__(self) -> None:
        _check_start(self.command, "url", self.url)


HookEvent = Literal["pre_tool", "post_tool", "run_start", "run_end", "subagent_end"]
"""The first two are asked before and after a tool runs; the others only observe, and their answer changes nothing."""


class HookSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One hook, `[[hooks]]`: a command that is called before or after a tool runs, or at another moment of a run.

    Attributes:
        event: Moment of the call: before or after a tool runs, when the agent gets its order, when the run has ended,
            or when a sub-agent has ended.
        command: Program and arguments; `load` makes relative paths in it absolute.
        tools: Globs for the names of tools, both the agent's and the neutral ones; only for hooks of tools.
        name: Name in the receipt; empty takes the program's name.
        timeout_ms: Time limit for the hook's answer, in milliseconds.
        on_failure: Decision that counts if the hook fails, is late, or was not called.
    """

    event: HookEvent
    command: tuple[str, ...]
    tools: tuple[str, ...] = ("*",)
    name: str = ""
    timeout_ms: Annotated[int, msgspec.Meta(gt=0, le=HOOK_MS_MAX)] = HOOK_MS
    on_failure: Literal["deny", "allow"] = "deny"


class GatewayClientSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One client of the gateway, `[gateway.clients.NAME]`.

    Attributes:
        key_sha256: SHA-256 of the client's key, in hexadecimal; `backplane gateway --new-key NAME` makes both.
        models: Globs for the models that the client may ask.
        budget_usd: Budget of a calendar month (UTC) in dollars; None is no limit. A request is refused if the most
            that it can cost does not fit.
        requests_per_minute: Maximum number of requests in a minute; None is no limit.
        exchanges_max: Maximum number of open requests.
    """

    key_sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$")]
    models: tuple[str, ...] = ("*",)
    budget_usd: Annotated[float, msgspec.Meta(ge=0, le=1_000_000)] | None = None
    requests_per_minute: Count | None = None
    exchanges_max: Count = 32


class GatewayAgentSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole agent that the gateway offers as the model `agent/NAME`, `[gateway.agents.NAME]`.

    Attributes:
        root: Folder that its runs work on, in a copy; each result is a patch for `backplane apply` (absolute after
            `load`).
        backend: Backend of the runs; None takes the agent's name.
        model: Model that the agent uses; None is the backend's own choice.
        policy: Policy of the runs: a shipped one or a file; None takes the configured one.
    """

    root: str
    backend: str | None = None
    model: str | None = None
    policy: str | None = None


class GatewayRouteSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A route whose services are chosen by a strategy, `[gateway.models]`.

    Attributes:
        services: The services, `BACKEND` or `BACKEND/MODEL`; of equal ones, the earlier one is asked first.
        strategy: Measure by which the first service of a request is chosen, and the order of the others:
            `first_available` takes the order of `services`, `cost` the price of the request, `latency` the measured
            times, and `balanced` both. A service that rests comes last.
    """

    services: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    strategy: Literal["first_available", "cost", "latency", "balanced"] = "first_available"


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gateway for model requests, `[gateway]`; see `docs/guide/gateway.md`.

    Attributes:
        address: IP address that it listens on. One that other machines reach needs `clients`.
        port: Port that it listens on.
        hosts: Further names by which requests may address it in their header Host, each without a port: the name of a
            proxy with TLS in front, for example.
        models: Name of a model, or a glob → services that answer it, `BACKEND` or `BACKEND/MODEL`, or a table with
            `services` and `strategy`: the next one is asked if one fails before its first piece. A backend has
            `host = "api"`, or is a preset's name. Empty takes the vendors' own names for each vendor whose key variable
            is set.
        agents: Whole agents that are offered as models, by name.
        clients: Clients by name; without one, a key is made at each start.
        losses: `fail` refuses a request that another vendor's service cannot get in full; `allow` counts the losses in
            a header of the answer and names them in the record.
        bodies: True keeps requests and answers beside the record, without known secrets, and of each its first MB.
    """

    address: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 4180
    hosts: tuple[Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9._-]{1,253}$")], ...] = ()
    models: dict[str, str | Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] | GatewayRouteSettings] = {}
    agents: dict[str, GatewayAgentSettings] = {}
    clients: dict[str, GatewayClientSettings] = {}
    losses: Literal["allow", "fail"] = "allow"
    bodies: bool = False


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings that are not part of one order.

    Attributes:
        default_backend: Backend for an order that names none.
        backends: Backends by name, in addition to the shipped ones.
        limits: Limits on times, sizes and numbers.
        isolation: Isolation of a host from everything outside of its workspace; an order can only make it stricter.
        key_proxy: True if shipped hosts that call a model get a placeholder for the model's key; see `key_proxy` of
            `[backends.NAME]`.
        policy: Policy of orders without one: `default`, `strict`, `ci`, the path of a file (absolute after `load`), or
            rules in a table `[policy]`.
        signing_key: Path of the Ed25519 key that signs every receipt (absolute after `load`); a variable may contain
            the key itself, as PEM or 64 hexadecimal digits. None signs nothing.
        hooks: Hooks that are called for the tools of every run.
        mcp_servers: MCP servers by name; a backend or an order may replace a server by another of the same name.
        routing: Rules for choosing the backend of an order that names none.
        gateway: The gateway for model requests of other programs.
    """

    default_backend: str | None = None
    backends: dict[str, BackendSettings] = {}
    limits: Limits = Limits()
    isolation: Isolation = "best_effort"
    key_proxy: bool = False
    policy: str | PolicyProfile | None = None
    signing_key: str | None = None
    hooks: tuple[HookSettings, ...] = ()
    mcp_servers: dict[str, ServerSettings] = {}
    routing: RoutingSettings = RoutingSettings()
    gateway: GatewaySettings = GatewaySettings()


def tighter(configured: Isolation, asked: object) -> Isolation:
    """Return the stricter of the configuration's isolation and an order's.

    Args:
        asked: the isolation that the order asks for; None if it asks for none.

    Raises:
        PolicyError: `policy_invalid`, the order's isolation is unknown.
    """
    if asked is None:
        return configured
    try:
        return max(configured, msgspec.convert(asked, Isolation), key=("off", "best_effort", "required").index)
    except msgspec.ValidationError as error:
        raise PolicyError("policy_invalid", f"config.vendor.abp.isolation: {explain(error, Isolation)}") from error


_LIMITS: Final = {field.name: field.type for field in msgspec.structs.fields(Limits)}
_TABLES: Final = ("backends", "limits", "hooks", "mcp_servers", "routing", "gateway")
_PLAIN: Final = {field.name: field.type for field in msgspec.structs.fields(Settings) if field.name not in _TABLES}
SINGLE: Final[dict[str, Any]] = {**_PLAIN, "policy": str | None, **_LIMITS}
"""Settings that a flag or a variable can give; the variable's name is `BACKPLANE_` and the setting in capitals."""

OTHER_VARIABLES: Final = ("HOME", "CONFIG", "DEBUG")
"""Variables with our prefix that are no settings: the state folder, the configuration file, and tracebacks."""

SHIPPED_POLICIES: Final = ("default", "strict", "ci")
"""Names of policies that `policy` takes in addition to a file's path; `./strict` is a path."""


def load(
    path: Path | str | None, environ: Environ, cwd: Path, flags: Mapping[str, str | float | None] | None = None
) -> Settings:
    """Load the settings: merge the configuration file, the environment and the flags.

    Args:
        path: the file to read; None takes the file that `find_file` finds, if any.
        flags: values by names in `SINGLE`; None means not given. Relative paths count from `cwd`.

    Raises:
        ConfigError: `config_invalid`, with file and line if they are known.
    """
    found = (cwd / path) if path is not None else find_file(environ, cwd)
    settings = Settings()
    if found is not None:
        settings = parse(_read_bytes(found), source=str(found), folder=found.absolute().parent)
    variables = {name: PREFIX + name.upper() for name in SINGLE}
    given = {
        name: _single(name, environ[variable], f"the variable {variable}")
        for name, variable in variables.items()
        if environ.get(variable)
    }
    for name, value in (flags or {}).items():
        if value is not None:
            given[name] = _single(name, value, "--timeout" if name == "run_s" else name)
    return _with(settings, given, cwd)


def find_file(environ: Environ, cwd: Path) -> Path | None:
    """Return the path of the configuration file: `$BACKPLANE_CONFIG`, `./backplane.toml`, the user's, or None."""
    if environ.get(PREFIX + "CONFIG"):
        return cwd / environ[PREFIX + "CONFIG"]
    users = _xdg(environ, "XDG_CONFIG_HOME", ".config") / FILE_NAME
    return next(filter(os.path.lexists, (cwd / FILE_NAME, users)), None)


def parse(data: bytes, *, source: str, folder: Path) -> Settings:
    """Read the text of a configuration file, and make its relative paths absolute.

    Args:
        source: the file's name in errors.
        folder: the folder that relative paths count from.

    Raises:
        ConfigError: `config_invalid`; also for a duplicate key.
    """
    try:
        table = read_toml(data)
    except (ValueError, RecursionError) as error:
        raise _invalid(source, f"not readable as TOML: {error or type(error).__name__}") from error
    try:
        settings = _from_table(table)
    except _Wrong as wrong:
        line = _line_of(data.decode(), wrong.path)
        raise _invalid(f"{source}, line {line}" if line is not None else source, str(wrong)) from wrong
    return _with_absolute_paths(settings, folder)


def checked(settings: Settings) -> Settings:
    """Check settings that a program built, by the rules for a configuration file; relative paths stay unchanged.

    As in a file, a dict may replace the struct of a backend or the limits, and a list may replace a tuple.

    Raises:
        ConfigError: `config_invalid`, with the member, its value and the choices.
    """
    require_type(settings, Settings, "`settings`", "a backplane.Settings; None loads the configuration")
    try:
        return _from_table(msgspec.to_builtins(settings, enc_hook=os.fspath))
    except (_Wrong, TypeError) as wrong:
        raise _invalid("the settings", str(wrong)) from wrong


class _Wrong(Exception):
    """An error in the settings: the names from the top to the wrong member, and the reason with the member's name."""

    def __init__(self, path: tuple[str, ...], fact: str) -> None:
        super().__init__(fact)
        self.path = path


def _from_table(table: dict[str, Any]) -> Settings:
    """Convert a whole configuration to `Settings`. Raises _Wrong."""
    table = dict(table)
    backends = _named(table.pop("backends", {}), "backends", BackendSettings)
    servers = _named(table.pop("mcp_servers", {}), "mcp_servers", ServerSettings)
    rules = table.pop("policy") if isinstance(table.get("policy"), dict) else None
    settings: Settings = _typed(table, Settings, ())
    if rules is not None:
        _typed(rules, _Rules, ("policy",))
        settings = msgspec.structs.replace(settings, policy=_typed(rules, PolicyProfile, ("policy",)))
    return msgspec.structs.replace(settings, backends=backends, mcp_servers=servers)


class _Rules(PolicyProfile, frozen=True, forbid_unknown_fields=True):
    """A policy in a table, whose unknown names are errors."""


_NAMES: Final = {
    # A backend's name is written into receipts, file names and command lines; a server's name is part of a tool's name,
    # `mcp__NAME__TOOL`, which may have 64 characters.
    "backends": (r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "letters, digits, '.', '_' and '-', 64 at most"),
    "mcp_servers": (r"(?!.*__)[A-Za-z0-9][A-Za-z0-9_-]{0,31}", "letters, digits, single '_' and '-', 32 at most"),
}
"""Section of named tables → pattern of their names, and the pattern in words."""


def _named(tables: Any, section: str, shape: type[Any]) -> dict[str, Any]:
    """Convert all tables of a section, such as `[backends.NAME]`; check their names. Raises _Wrong."""
    if not isinstance(tables, dict):
        raise _Wrong((section,), f"`{section}` must be a table")
    pattern, words = _NAMES[section]
    for name in map(str, tables):
        if re.fullmatch(pattern, name) is None:
            raise _Wrong((section, name), f"`{section}` cannot have the name {name[:80]!r}: names have {words}")
    return {name: _typed(table, shape, (section, name)) for name, table in tables.items()}


def _with_absolute_paths(settings: Settings, folder: Path) -> Settings:
    """Resolve the relative paths of a configuration file against its folder."""

    def placed(row: Any) -> Any:
        return msgspec.structs.replace(row, command=absolute_command(row.command, folder)) if row.command else row

    return msgspec.structs.replace(
        settings,
        backends={name: placed(_backend_in(row, folder)) for name, row in settings.backends.items()},
        mcp_servers={name: placed(row) for name, row in settings.mcp_servers.items()},
        hooks=tuple(map(placed, settings.hooks)),
        gateway=msgspec.structs.replace(
            settings.gateway,
            agents={
                name: msgspec.structs.replace(
                    row, root=str(folder / os.path.expanduser(row.root)), policy=_policy_place(row.policy, folder)
                )
                for name, row in settings.gateway.agents.items()
            },
        ),
        policy=_policy_place(settings.policy, folder),
        signing_key=_key_place(settings.signing_key, folder),
    )


def read_toml(data: bytes) -> dict[str, Any]:
    """Decode a TOML text.

    Raises:
        ValueError: the text is no UTF-8, no TOML, or longer than `TOML_BYTES_MAX`.
        RecursionError: the text is nested too deeply.
    """
    import tomllib  # Most runs read no file.

    if len(data) > TOML_BYTES_MAX:
        raise ValueError(f"over {TOML_BYTES_MAX} bytes")
    # With a newline at the end, an error on the last line also gets a line number.
    return tomllib.loads(data.decode() + "\n")


def _key_place(key: str | None, folder: Path) -> str | None:
    """Make the path of a key file absolute; return a key itself unchanged."""
    if key is None or key.lstrip().startswith("-----BEGIN") or re.fullmatch(r"[0-9a-fA-F]{64}", key):
        return key
    return str(folder / key)


def _policy_place(policy: str | PolicyProfile | None, folder: Path) -> str | PolicyProfile | None:
    return str(folder / policy) if isinstance(policy, str) and policy not in SHIPPED_POLICIES else policy


def _backend_in(backend: BackendSettings, folder: Path) -> BackendSettings:
    writable = tuple(path if path[:1] == "~" else str(folder / path) for path in backend.writable)
    options, program = backend.options, backend.options.get("program")
    if isinstance(program, str) and "/" in program:
        options = {**options, "program": str(folder / program)}
    return msgspec.structs.replace(backend, writable=writable, options=options)


def read_command(text: str) -> tuple[str, ...]:
    """Split a command as a shell does. Raises ConfigError: `config_invalid`, it is empty or a quote is not closed."""
    import shlex  # Commands of settings are lists.

    try:
        words, why = tuple(shlex.split(text)), "it is empty"
    except ValueError as error:
        words, why = (), str(error)
    if not words:
        fact = f"{text[:80]!r} cannot be read as a command: {why}"
        raise ConfigError("config_invalid", fact, hint="name a program, and check the quotes")
    return words


def absolute_command(command: tuple[str, ...], folder: Path) -> tuple[str, ...]:
    """Make a command independent of the current folder.

    Relative paths count from `folder`: the program if it has a slash, and any other word that begins with `./` or
    `../` or is the name of a file in `folder`. A program without a slash is searched in PATH.
    """
    program, *words = command
    first = str(folder / program) if "/" in program else program
    return (first, *(_absolute_word(word, folder) for word in words))


def _absolute_word(word: str, folder: Path) -> str:
    if not word or word.startswith(("/", "-")) or "\0" in word:
        return word
    if word.startswith(("./", "../")):
        return str(folder / word)
    try:
        return str(folder / word) if (folder / word).is_file() else word
    except OSError:  # A script of thousands of letters, as one word, is no file name.
        return word


def home(environ: Environ) -> Path:
    """Return the state folder; create it with mode 0700 if it is missing.

    Raises:
        StoreError: `receipt_store_failed`, the folder cannot be created, or its name is not UTF-8.
    """
    path = home_path(environ)
    try:
        str(path).encode()  # Hosts get the path in JSON.
    except UnicodeEncodeError as error:
        fact = f"the state folder '{os.fsencode(path).decode('utf-8', 'backslashreplace')}' has a name that is no UTF-8"
        raise StoreError("receipt_store_failed", fact, hint="point BACKPLANE_HOME elsewhere") from error
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        why = f"{errno.errorcode.get(error.errno or 0, 'EIO')} ({error.strerror})"
        hint = f"set {PREFIX}HOME to a folder that this user can write"
        raise StoreError("receipt_store_failed", f"the state folder {path} cannot be made: {why}", hint=hint) from error
    return path


def home_path(environ: Environ) -> Path:
    """Return the path of the state folder, without creating it."""
    if environ.get(PREFIX + "HOME"):
        return Path(os.path.expanduser(environ[PREFIX + "HOME"])).absolute()
    return _xdg(environ, "XDG_STATE_HOME", ".local/state")


def user_folder(environ: Environ) -> Path:
    """Return the user's home folder, from HOME or the system's list of users."""
    if environ.get("HOME"):
        return Path(environ["HOME"]).absolute()
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        # A container may run as a user id that the system does not list; login gives such a user "/".
        return Path("/")


def _xdg(environ: Environ, name: str, usual: str) -> Path:
    """Return our folder in that of an XDG variable; XDG ignores a variable whose path is not absolute."""
    value = environ.get(name, "")
    return (Path(value) if value.startswith("/") else user_folder(environ) / usual) / "backplane"


_PASSED_ON: Final = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TERM", "TMPDIR", "TRACEPARENT"}
    | {"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"}
    | {"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy", "all_proxy"}
)


def child_environment(
    settings_env: Mapping[str, str], order_env: Mapping[str, str], environ: Environ
) -> dict[str, str]:
    """Return the complete environment of a child process; the child inherits no other variables.

    Args:
        settings_env: a backend's `env`, with its `$B` already replaced.
        order_env: an order's `config.env`, which overrides the other variables.

    Raises:
        ConfigError: `config_invalid`, a given name or value cannot be that of a variable.
    """
    child = {name: value for name, value in environ.items() if name in _PASSED_ON or name.startswith("LC_")}
    given = {**settings_env, **order_env}
    for name, value in given.items():
        if not name or "=" in name or "\0" in name + value:
            raise ConfigError("config_invalid", f"`env` has {name[:80]!r}, which cannot be set as a variable")
    return child | given


def unknown_variables(environ: Environ) -> list[str]:
    """Return the names of unknown variables with our prefix: misspelt ones, or those of a host or a newer version."""
    known = {PREFIX + name.upper() for name in (*SINGLE, *OTHER_VARIABLES)}
    return sorted(name for name in environ if name.startswith(PREFIX) and name not in known)


def _single(name: str, value: str | float, called: str) -> Any:
    try:
        return msgspec.convert(value, SINGLE[name], strict=False)
    except msgspec.ValidationError as error:
        why = explain(error, SINGLE[name]).removesuffix(", got `string`")
        given = "" if " is none of " in why else f" is {str(value)[:80]!r}"
        raise _invalid(f"{called}{given}", why) from error


def _with(settings: Settings, given: Mapping[str, Any], cwd: Path) -> Settings:
    """Override a file's settings by given ones; a given time limit also overrides those of all backends."""
    plain = {name: given[name] for name in _PLAIN if name in given}
    if "policy" in plain:
        plain["policy"] = _policy_place(plain["policy"], cwd)
    if "signing_key" in plain:
        plain["signing_key"] = _key_place(plain["signing_key"], cwd)
    times = {name: given[name] for name in _OVERRIDES if name in given}
    replace = msgspec.structs.replace
    return replace(
        settings,
        **plain,
        limits=replace(settings.limits, **{name: given[name] for name in _LIMITS if name in given}),
        backends={name: replace(backend, **times) for name, backend in settings.backends.items()},
    )


def _read_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(TOML_BYTES_MAX + 1)  # A device may be endless; `read_toml` refuses a longer text.
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        hint = f"name a file that this user can read (--config, {PREFIX}CONFIG), or none"
        raise ConfigError("config_invalid", f"the configuration {path} cannot be read: {why}", hint=hint) from error


def _typed(value: Any, shape: type[Any], place: tuple[str, ...]) -> Any:
    """Convert a table to a type. Raises _Wrong, with the member's name and the allowed values."""
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        fact, at = explained(error, shape)
        before, any_row, after = at.partition("[...]")
        path = (*place, *_names_in(before))
        if any_row and "[" not in before:
            path = (*path, _wrong_row(value, shape, _names_in(before), str(error)), *_names_in(after))
        raise _Wrong(path, f"`{'.'.join(path)}`: {fact}" if path else fact) from error


def _names_in(at: str) -> tuple[str, ...]:
    """Return the names of a path such as `.hooks[0].command`; places in lists are left out."""
    return tuple(key for key in re.split(r"[.\[]", at) if key and not key.endswith("]"))


def _wrong_row(value: Any, shape: type[Any], path: tuple[str, ...], message: str) -> str:
    """Return the name of the row that has an error, which msgspec does not name.

    Args:
        value: the table in which the rows are.
        path: the names from it to the table of the rows.
        message: the error's.
    """
    rows = functools.reduce(operator.getitem, path, value)
    for name, row in rows.items():
        alone: Any = {name: row}
        for depth in reversed(range(len(path))):
            alone = {**functools.reduce(operator.getitem, path[:depth], value), path[depth]: alone}
        try:
            msgspec.convert(alone, shape)
        except msgspec.ValidationError as error:
            if str(error) == message:
                return str(name)
    raise AssertionError("a row is wrong")


def _invalid(source: str, fact: str) -> ConfigError:
    return ConfigError("config_invalid", f"{source}: {fact}", hint="see `backplane schema configuration`")


def _line_of(text: str, path: tuple[str, ...]) -> int | None:
    """Return the number of a member's line: for each name of its path, the next line that begins with the name."""
    lines, at = text.splitlines(), -1
    for name in path:
        key = re.compile(rf"[^#=]*(?<![\w-]){re.escape(name)}(?![\w-])")
        at = next((number for number in range(max(at, 0), len(lines)) if key.match(lines[number])), at)
        if at >= 0 and lines[at].startswith("[["):
            return None  # The path does not say which of several tables has the fault.
    return at + 1 if at >= 0 else None
