"""Finds backends, which are named ways to reach a host: a child process, or a function in memory.

A backend opens a link: two descriptors that carry the protocol, and one way to stop the host. The same bytes flow for
both kinds of host. Other modules of `runtime` read and write the messages.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import sys
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from backplane.agents import rows
from backplane.config import (
    BackendSettings,
    Limits,
    ServerSettings,
    Settings,
    child_environment,
    home_path,
    user_folder,
)
from backplane.contract.unheard import nearest_name
from backplane.contract.work import WorkOrder
from backplane.errors import BackendError, ConfigError, PolicyError
from backplane.process.child import Exit, open_child
from backplane.process.launch import StartCommand
from backplane.resources import find as find_shared
from backplane.runtime.held_key import HeldKey, behind_proxy, check_key, held_key_of
from backplane.sandbox.credentials import read_names
from backplane.upstream import presets

if TYPE_CHECKING:
    from backplane.sandbox.key_proxy import KeyUse

ACP: Final = "acp"
"""The shipped host whose options name its agent."""
OWN: Final = {"shell": "shell.py", "mock": "mock.py", presets.HOST: "api.py", ACP: rows.HOST}
"""Shipped hosts whose name is not an agent's: name → file under `hosts/`."""
OF_OPTIONS: Final = frozenset({ACP, presets.HOST})
"""Shipped hosts that need options to be a backend: the options name the agent or the service."""

NEVER_CHOSEN: Final = frozenset({"shell", "mock", "replay"})
"""Backends that run only when they are named, because they ask no model."""


class Link(Protocol):
    """An open connection to one host, such as `process.Child`."""

    stdin: int
    stdout: int
    pid: int
    start: int
    """Start time of the host's process, in clock ticks since the machine started."""
    exit: Exit | None
    stderr_dropped: int
    swept: int
    guard_lost: bool
    fault: Exception | None
    """An unexpected exception in the code that watches the host; the host's exit may then stay unknown."""

    @property
    def stderr_tail(self) -> bytes: ...
    def call_on_exit(self, call: Callable[[], None]) -> None: ...
    def close_stdin(self) -> None: ...
    def close_stdout(self) -> None: ...
    async def wait(self, timeout_s: float) -> Exit | None: ...
    async def stop(self, *, grace_s: float, cancel: Callable[[float], Awaitable[None]] | None = None) -> None: ...


Opener = Callable[[StartCommand, tuple[str, ...]], AbstractAsyncContextManager[Link]]
"""Starts a command that may connect to the given addresses."""


class Backend(Protocol):
    """A named way to reach a host."""

    @property
    def id(self) -> str: ...
    @property
    def key(self) -> str:
        """The key of the host's stored manifest; it changes when the host's program changes."""
        ...

    @property
    def limits(self) -> Limits | None:
        """The backend's own limits; None to use the control plane's."""
        ...

    @property
    def secrets(self) -> tuple[str, ...]:
        """Values of the host's environment that are redacted everywhere."""
        ...

    @property
    def remote(self) -> bool:
        """True if the host works on another machine, in a folder that the order names."""
        ...

    def open(self, order: WorkOrder, environ: Mapping[str, str]) -> AbstractAsyncContextManager[Link]: ...


class ProcessBackend(msgspec.Struct, frozen=True, kw_only=True):
    """A backend whose host is a child process."""

    id: str
    argv: tuple[str, ...]
    env: dict[str, str] = {}
    """Variables to add to the child's environment, with resolved values."""
    secrets: tuple[str, ...] = ()
    limits: Limits | None = None
    remote: bool = False
    is_ours: bool = False
    """True if the program comes with the package, and thus does nothing before it gets its order."""
    writable: tuple[str, ...] = ()
    """Absolute paths outside the workspace that a contained host may change; `make_writable` creates folders."""
    endpoints: tuple[str, ...] = ()
    """Addresses that the host may always connect to."""
    open_stores: frozenset[str] = frozenset()
    """Credential stores that a contained host may read: names of `credentials.STORES`."""
    agent: rows.AgentRow | None = None
    """The agent that a shipped host drives; None if there is none, or if the host is not a shipped one."""
    held_key: HeldKey | None = None
    """The key that a proxy adds to the host's requests; None if the host is given its keys."""
    plugin: dict[str, str] | None = None
    """The wheel that provides the backend, with the receipt's members `wheel` and `version`; None for all others."""
    servers_given: tuple[dict[str, Any], ...] = ()
    """Configured MCP servers as rows with resolved values, for a host that can be their client."""
    servers_required: tuple[str, ...] = ()
    """Names of the configured MCP servers without which a run is refused."""

    @property
    def key(self) -> str:
        """A hash of all that may change the hello: command, size and time of its files, agent, variables."""
        words = [*self.argv, *((self.agent.program,) if self.agent is not None else ())]
        return hashlib.sha256(
            repr(([(word, *_stamp(word)) for word in words], sorted(self.env.items()))).encode()
        ).hexdigest()

    def command(self, order: WorkOrder, environ: Mapping[str, str]) -> StartCommand:
        """Return the host's command before a key proxy changes it. Raises ConfigError if the order sets the key."""
        if self.held_key is not None and self.held_key.variable in order.config.env:
            fact = f"config.env names {self.held_key.variable}, which the agent of {self.id!r} is not to have"
            raise ConfigError("config_invalid", fact, hint="leave it out, or set key_proxy = false for this backend")
        return StartCommand(argv=self.argv, env=child_environment(self.env, order.config.env, environ))

    def servers(self, order: WorkOrder, command: StartCommand) -> dict[str, tuple[str, ...]]:
        """Return the MCP servers that the agent is to start: name → the words of its row that may name files."""
        return servers_of(command.env, with_servers(order, self.servers_given).abp("mcp_servers"))

    def agent_path(self, env: Mapping[str, str]) -> str | None:
        """Return the path at which the host finds the agent's program; None if there is no agent or no such program."""
        if self.agent is None:
            return None
        # Relative folders of PATH would be below the workspace, where no program is looked for.
        search = (
            None if env.get("PATH") is None else os.pathsep.join(filter(os.path.isabs, env["PATH"].split(os.pathsep)))
        )
        return _found(self.agent.program, search)

    def open(
        self, order: WorkOrder, environ: Mapping[str, str], opener: Opener | None = None, use: KeyUse | None = None
    ) -> AbstractAsyncContextManager[Link]:
        """Start the host.

        Args:
            opener: starts the command in a sandbox; None starts it without one.
            use: counts the requests that pass the key proxy; None if the counts are not needed.
        """
        command = self.command(order, environ)
        if opener is None:
            self.make_writable(order)

        def start(command: StartCommand, endpoints: tuple[str, ...]) -> AbstractAsyncContextManager[Link]:
            if opener is not None:
                return opener(command, endpoints)
            return open_child(command)

        if self.held_key is not None:
            return behind_proxy(self.held_key, command, start, use)
        return start(command, ())

    def make_writable(self, order: WorkOrder) -> tuple[str, ...]:
        """Create the missing folders that the host may change; return all paths that it may change. Blocks.

        A sandbox is planned from existing paths, so call this before the plan. A missing path with an extension
        is taken for a file and not created, unless it ends in a slash.

        Raises:
            BackendError: `backend_unavailable`, a folder cannot be created.
        """
        state = self.env.get(rows.STATE)
        kept = (state,) if state is not None and order.abp("session") is not None else ()
        for path in (*self.writable, *kept):
            try:
                if not os.path.exists(path) and (path.endswith(os.sep) or not os.path.splitext(path)[1]):
                    os.makedirs(path, 0o700)
            except OSError as error:
                fact = f"the folder {path} that backend {self.id!r} writes to cannot be made: {error.strerror}"
                fix = f"make it, or correct `writable` of [backends.{self.id}]; state lies in BACKPLANE_HOME"
                raise BackendError("backend_unavailable", fact, hint=fix) from error
        return tuple(path.rstrip(os.sep) or os.sep for path in (*self.writable, *kept))


def _stamp(word: str) -> tuple[int, ...]:
    """Return size and time of a file in a command, so that a changed program changes the backend's key."""
    path = word if os.sep in word else _found(word)
    try:
        seen = os.stat(path) if path else None
    except (OSError, ValueError):
        return ()
    return (seen.st_size, seen.st_mtime_ns) if seen is not None else ()


def _found(program: str, search: str | None = None) -> str | None:
    if program.startswith("-"):
        return None  # An option, not a program.

    return shutil.which(program, path=search)


class BackendStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a backend, as `backplane backends` shows it."""

    id: str
    ready: bool
    why: str = ""
    """Why the backend is not ready; empty if it is."""
    fix: str = ""
    """The next step if the backend is not ready, or if its agent is too old or has no key."""
    command: tuple[str, ...] = ()
    manifest: dict[str, Any] | None = None
    """Capabilities of the host's last stored hello; None if none is stored."""


def find(name: str, settings: Settings, environ: Mapping[str, str]) -> ProcessBackend:
    """Return the backend of this name: a configured one, else a shipped one, else a plug-in's.

    Raises:
        BackendError: `backend_not_found`, with the known names; `backend_unavailable`, it is not ready.
    """
    declared = settings.backends.get(name)
    if declared is None and name not in OWN and name not in agents():
        from backplane.runtime import plugins  # Imported here, as it loads `email`, which no other backend needs.

        if (plugin := plugins.find(name)) is not None:
            made = _from_settings(name, BackendSettings(command=plugin[0]), settings, environ)
            return msgspec.structs.replace(made, plugin=plugin[1])
        known = {*settings.backends, *by_name()}
        there = {*known, *plugins.names(known)}
        names, near = ", ".join(sorted(there)), nearest_name(name, there)
        meant = f"did you mean {near}? " if near else ""
        raise BackendError(
            "backend_not_found",
            f"no backend {name!r}",
            hint=f"{meant}choose one of: {names}; or declare [backends.NAME] in the configuration",
        )
    return _from_settings(name, declared or BackendSettings(host=name), settings, environ)


def _from_settings(
    name: str, declared: BackendSettings, settings: Settings, environ: Mapping[str, str]
) -> ProcessBackend:
    secrets: list[str] = []
    env = _own_variables(name, declared, environ, secrets)
    argv = tuple(declared.command or ()) or shipped_command(declared.host or name)
    agent, service = _asks(name, declared, {**environ, **env})
    if service is not None:
        env |= _of_service(name, service, env, environ)
        options = presets.with_address(declared.options, {**environ, **env})
        env[presets.OPTIONS] = msgspec.json.encode(options).decode()
        secrets += [env[variable] for variable in service.variables]
    if agent is not None:
        argv = (*(argv[:-1] if (declared.host or name) != ACP else argv), agent.name)
        env[rows.OPTIONS] = msgspec.json.encode(agent).decode()
        env.pop(agent.base_url_env or "", None)  # The host sets this variable, from its options.
        key = env.get(agent.key_env or "", environ.get(agent.key_env or ""))
        if agent.key_env is not None and key:
            env[agent.key_env] = key
            secrets.append(key)
        if agent.sessions:
            env[rows.STATE] = str(home_path(environ) / "agents" / name)
    held_key, endpoints = held_key_of(name, declared, settings, agent, service), declared.endpoints
    if held_key is None:  # A host behind a proxy reaches the service through it.
        endpoints += agent.endpoints if agent is not None else (service.endpoint,) if service is not None else ()
    servers = [] if declared.remote else _servers(name, declared, settings, environ, secrets)
    if held_key is not None:
        check_key(name, held_key.variable, env.get(held_key.variable, "").strip(), servers)
    return ProcessBackend(
        id=name,
        argv=argv,
        env=env,
        secrets=tuple(secrets),
        limits=declared.limits_over(settings.limits),
        remote=declared.remote,
        is_ours=declared.command is None,
        writable=tuple(f"{user_folder(environ)}{path[1:]}" if path[:1] == "~" else path for path in declared.writable),
        endpoints=endpoints,
        open_stores=_open_stores(name, declared, agent),
        agent=agent,
        held_key=held_key,
        servers_given=tuple(servers),
        servers_required=tuple(row["name"] for row in servers if settings.mcp_servers[row["name"]].required),
    )


def _own_variables(
    name: str, declared: BackendSettings, environ: Mapping[str, str], secrets: list[str]
) -> dict[str, str]:
    """Return the backend's `env`; a value `$NAME` is replaced by our variable of that name, and added to `secrets`.

    Raises:
        BackendError: `backend_unavailable`, a variable that a value names is not set.
    """
    env: dict[str, str] = {}
    for variable, value in declared.env.items():
        if value.startswith("$"):
            if value[1:] not in environ:
                fact = f"backend {name!r} needs the environment variable {value[1:]}, which is not set"
                raise BackendError("backend_unavailable", fact, hint=f"export {value[1:]}=…")
            value = environ[value[1:]]
            secrets.append(value)
        env[variable] = value
    return env


def _servers(
    name: str, declared: BackendSettings, settings: Settings, environ: Mapping[str, str], secrets: list[str]
) -> list[dict[str, Any]]:
    """Return a row for each configured MCP server, unless the backend's options define one of that name.

    Raises:
        BackendError: `backend_unavailable`, a variable that a server needs is not set.
    """
    rows = declared.options.get("mcp_servers")
    own = {row.get("name") for row in rows if isinstance(row, dict)} if isinstance(rows, list) else set()
    wanted = {server: asked for server, asked in settings.mcp_servers.items() if server not in own}
    return [server_row(server, asked, environ, secrets) for server, asked in wanted.items()]


def server_row(server: str, asked: ServerSettings, environ: Mapping[str, str], secrets: list[str]) -> dict[str, Any]:
    """Return a configured MCP server as a row of an order; add its resolved values to `secrets`.

    Raises:
        BackendError: `backend_unavailable`, a variable that it needs is not set.
    """
    row: dict[str, Any] = {"name": server}
    if asked.command is not None:
        row |= {"command": asked.command[0], "args": list(asked.command[1:])}
    else:
        row["url"] = asked.url
    if asked.tool_s is not None:
        row["tool_ms"] = round(asked.tool_s * 1000)
    for member, values in (("env", asked.env), ("headers", asked.headers)):
        if values:
            row[member] = {key: _resolved(server, value, environ, secrets) for key, value in values.items()}
    return row


def _resolved(server: str, value: str, environ: Mapping[str, str], secrets: list[str]) -> str:
    if not value.startswith("$"):
        return value
    if value[1:] not in environ:
        fact = f"the MCP server {server!r} needs the environment variable {value[1:]}, which is not set"
        raise BackendError("backend_unavailable", fact, hint=f"export {value[1:]}=…")
    secrets.append(environ[value[1:]])
    return environ[value[1:]]


def with_servers(order: WorkOrder, rows: Sequence[dict[str, Any]]) -> WorkOrder:
    """Return an order with further MCP servers before its own; the order's own win over others of the same name."""
    ordered = order.abp("mcp_servers")
    own = ordered if isinstance(ordered, list | tuple) else ()
    return order.with_abp("mcp_servers", [*rows, *own]) if rows else order


def with_call_limit(order: WorkOrder, limit_s: float) -> WorkOrder:
    """Return an order that gives every MCP server without a `tool_ms` this limit."""
    rows = order.abp("mcp_servers")
    if not rows or not isinstance(rows, list | tuple):
        return order
    return order.with_abp(
        "mcp_servers", [{"tool_ms": round(limit_s * 1000), **row} for row in rows if isinstance(row, dict)]
    )


def _open_stores(name: str, declared: BackendSettings, agent: rows.AgentRow | None) -> frozenset[str]:
    """Return the configured credential stores, and the agent's own store if its option `own_state` is set."""
    opened = frozenset[str]()
    if declared.credentials:
        opened = read_names(declared.credentials, f"[backends.{name}] credentials")
    return opened | {agent.name} if agent is not None and agent.own_state else opened


def option_faults(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the name and the fault of each configured backend with wrong settings, such as an unknown shipped host.

    Programs and keys on this machine are not checked.
    """
    for name, declared in settings.backends.items():
        try:
            _open_stores(name, declared, None)
            if declared.command is None:
                shipped_command(declared.host or name)
            held_key_of(name, declared, settings, *_asks(name, declared))
        except (ConfigError, PolicyError) as error:
            yield name, f"{error.message}; {error.hint}" if error.hint else error.message


def _asks(
    name: str, declared: BackendSettings, environ: Mapping[str, str] | None = None
) -> tuple[rows.AgentRow | None, presets.Service | None]:
    """Return the agent that a shipped host drives, or the service that it asks, or neither. Raises ConfigError."""
    host, where = declared.host or name, f"the options of [backends.{name}]"
    if declared.command is not None:
        return None, None
    if host == presets.HOST:
        options = presets.with_address(declared.options, environ or declared.env)
        return None, presets.read_options(options, f"backends.{name}.options")
    if host == ACP or (host not in OWN and host in agents()):  # To read the table takes some 10 ms.
        row, env = "" if host == ACP else host, environ or declared.env
        return rows.agent_of(find_shared("hosts"), row, declared.options, declared.env, where, env), None
    if declared.options:
        raise ConfigError("config_invalid", f"{where}: {host!r} takes none", hint="remove them")
    return None, None


def _of_service(
    name: str, service: presets.Service, env: Mapping[str, str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables with a service's keys, from the backend's `env` or else ours. Raises BackendError."""
    found = {variable: env.get(variable, environ.get(variable, "")) for variable in service.variables}
    missing = next((variable for variable, value in found.items() if not value), None)
    if missing is not None:
        raise BackendError(
            "backend_unavailable",
            f"backend {name!r} needs a key in the environment variable {missing}, which is not set",
            hint=f"export {missing}=…, or name another with key_env",
        )
    return found


def agents() -> Collection[str]:
    """Return the names of the agents that backplane drives; each of them is a shipped host and a backend."""
    return rows.rows_of(str(find_shared("hosts"))).keys()


def by_name() -> set[str]:
    """Return the names of the backends that need no configuration."""
    return {*OWN, *agents()} - OF_OPTIONS


def shipped_command(host: str) -> tuple[str, ...]:
    """Return the command that starts a shipped host.

    Raises:
        ConfigError: `config_invalid`, no host of that name comes with the package.
    """
    if host not in OWN and host not in agents():
        there = ", ".join(sorted({*OWN, *agents()}))
        raise ConfigError("config_invalid", f"no shipped host {host!r}", hint=f"choose one of: {there}")
    file, *arguments = (OWN[host],) if host in OWN else (rows.HOST, host)
    # -E and -s: the host ignores PYTHON* variables and the user's own site-packages.
    return (sys.executable, "-E", "-s", str(find_shared("hosts") / file), *arguments)


def from_command(command: str | tuple[str, ...], *, cwd: Path, limits: Limits | None = None) -> ProcessBackend:
    """Return a backend for a program that speaks the protocol; a relative path of the program counts from `cwd`.

    Raises:
        ConfigError: `config_invalid`, the command is empty or a quote is not closed.
    """
    try:
        words = tuple(shlex.split(command)) if isinstance(command, str) else command
    except ValueError as error:
        raise ConfigError("config_invalid", f"the command cannot be read: {error}", hint="check its quotes") from error
    if not words:
        raise ConfigError("config_invalid", "the command is empty", hint="name a program that speaks the protocol")
    program = words[0] if os.sep not in words[0] else str(cwd / words[0])
    # The name of a program need not be valid UTF-8, but the receipt with it must be.
    name = os.fsencode(Path(words[0]).name).decode("utf-8", "backslashreplace")
    return ProcessBackend(id=f"sidecar:{name}", argv=(program, *words[1:]), limits=limits)


def known(settings: Settings, environ: Mapping[str, str]) -> list[BackendStatus]:
    """Return the status of every backend, sorted by name; hosts that need options are listed once configured."""
    from backplane.runtime import plugins

    own = {*settings.backends, *by_name()}
    return [_status(name, settings, environ) for name in sorted({*own, *plugins.names(own)})]


def _status(name: str, settings: Settings, environ: Mapping[str, str]) -> BackendStatus:
    try:
        backend = find(name, settings, environ)
    except (BackendError, ConfigError) as error:
        return BackendStatus(id=name, ready=False, why=error.message, fix=error.hint or "")
    fault = missing_program(backend, environ)
    if fault is not None:
        return BackendStatus(id=name, ready=False, why=fault.message, fix=fault.hint or "", command=backend.argv)
    fix = too_old(backend, environ) or _without_key(backend)
    return BackendStatus(id=name, ready=True, fix=fix, command=backend.argv)


def too_old(backend: ProcessBackend, environ: Mapping[str, str]) -> str:
    """Return why an agent's program is too old, and the fix; empty if its version is new enough or unknown."""
    agent, search = backend.agent, backend.env.get("PATH", environ.get("PATH"))
    path = backend.agent_path({} if search is None else {"PATH": search})
    if agent is None or agent.oldest is None or path is None:
        return ""
    version = version_at(path)
    if version is None or not is_older(version, agent.oldest):
        return ""
    return f"{path} is {version}, older than {agent.oldest}; install it: {agent.install}"


def _without_key(backend: ProcessBackend) -> str:
    """Return the next step for an agent without its key; the backend is ready, as the agent may have another key."""
    agent = backend.agent
    if agent is None or agent.key_env is None or agent.own_state or agent.key_env in backend.env:
        return ""
    own = f"use your own login with options = {{ own_state = true }} in [backends.{backend.id}]"
    return f"no key: {agent.key_env} is not set; export it, or {own}"


def missing_program(backend: ProcessBackend, environ: Mapping[str, str]) -> BackendError | None:
    """Return the error for a program of the backend that is not on this machine; None if all are there."""
    search = backend.env.get("PATH", environ.get("PATH"))
    if _found(backend.argv[0], search) is None:
        fix = f"install it, or correct the command of [backends.{backend.id}]"
        return BackendError("backend_unavailable", f"{backend.argv[0]} is not found or not executable", hint=fix)
    agent = backend.agent
    if agent is None or backend.agent_path({} if search is None else {"PATH": search}) is not None:
        return None
    fix = f'name its path: options = {{ program = "PATH" }} in [backends.{backend.id}]'
    if agent.install:
        fix = f"install it: {agent.install}; or {fix}"
    return BackendError("backend_unavailable", f"{agent.program} is not found or not executable", hint=fix)


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


def servers_of(env: Mapping[str, str], ordered: object) -> dict[str, tuple[str, ...]]:
    """Collect the MCP servers that a host's agent is to start: name → the words of its row that may name files.

    A row that cannot be read is left to the host to name.

    Args:
        env: the host's; its options have the configured servers.
        ordered: the order's `config.vendor.abp.mcp_servers`, unread.
    """
    listed: list[object] = []
    with suppress(msgspec.DecodeError, RecursionError):
        listed += msgspec.json.decode(env.get(rows.OPTIONS, "{}"), type=_Configured).mcp_servers
    listed += ordered if isinstance(ordered, list | tuple) else ()
    found: dict[str, tuple[str, ...]] = {}
    for row in listed:
        with suppress(msgspec.ValidationError):
            server = msgspec.convert(row, rows.McpServer)
            lists = (part for value in server.env.values() for part in value.split(os.pathsep))
            words = (server.command, *server.args, *lists)
            found[server.name] = tuple(word for word in words if word and "\0" not in word)
    return found


class _Configured(msgspec.Struct):
    mcp_servers: list[object] = []
