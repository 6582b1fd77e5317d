"""Named ways to reach a host: a child process, or a function in memory.

A backend opens a link: two descriptors with the protocol on them and one way to stop what is
behind. The same bytes flow in both cases. What is said on the link is `runtime`'s affair.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import sys
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from backplane.agents import shipped
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
"""Shipped host whose options name the agent."""
OWN: Final = {"shell": "shell.py", "mock": "mock.py", presets.HOST: "api.py", ACP: shipped.HOST}
"""Shipped hosts that drive no agent by their name: name → file under `hosts/`."""
OF_OPTIONS: Final = frozenset({ACP, presets.HOST})
"""Shipped hosts that are no backend by their name alone: their options name the agent or the service."""

NEVER_CHOSEN: Final = frozenset({"shell", "mock", "replay"})
"""Backends that run only when they are named: they do not think."""


class Link(Protocol):
    """An open way to one host; `process.Child` is one."""

    stdin: int
    stdout: int
    pid: int
    start: int
    """When its process began, in clock ticks since the machine did."""
    exit: Exit | None
    stderr_dropped: int
    swept: int
    guard_lost: bool
    fault: Exception | None
    """Raised while it was watched, and foreseen by nobody; its exit may never be known then."""

    @property
    def stderr_tail(self) -> bytes: ...
    def call_on_exit(self, call: Callable[[], None]) -> None: ...
    def close_stdin(self) -> None: ...
    def close_stdout(self) -> None: ...
    async def wait(self, timeout_s: float) -> Exit | None: ...
    async def stop(self, *, grace_s: float, cancel: Callable[[float], Awaitable[None]] | None = None) -> None: ...


Opener = Callable[[StartCommand, tuple[str, ...]], AbstractAsyncContextManager[Link]]
"""Starts a command, and lets it connect to these addresses."""


class Backend(Protocol):
    """A named way to reach a host."""

    @property
    def id(self) -> str: ...
    @property
    def key(self) -> str:
        """Names the host's program for its kept manifest; changes when the program does."""
        ...

    @property
    def limits(self) -> Limits | None:
        """Limits of its own; None for the control plane's."""
        ...

    @property
    def secrets(self) -> tuple[str, ...]:
        """Values of its environment that must not be seen anywhere."""
        ...

    @property
    def remote(self) -> bool:
        """True if it works on another machine, in a folder that the order names."""
        ...

    def open(self, order: WorkOrder, environ: Mapping[str, str]) -> AbstractAsyncContextManager[Link]: ...


class ProcessBackend(msgspec.Struct, frozen=True, kw_only=True):
    """A host that is a program of its own."""

    id: str
    argv: tuple[str, ...]
    env: dict[str, str] = {}
    """Added to the child's environment, values already resolved."""
    secrets: tuple[str, ...] = ()
    limits: Limits | None = None
    remote: bool = False
    is_ours: bool = False
    """Its program comes with the package: it does nothing before its order."""
    writable: tuple[str, ...] = ()
    """Paths beside the workspace that it may change when it is contained; absolute, `make_writable` makes them."""
    endpoints: tuple[str, ...] = ()
    """Where it may always connect to."""
    open_stores: frozenset[str] = frozenset()
    """Stores of credentials that it may read when it is contained: names of `credentials.STORES`."""
    agent: shipped.ShippedAgent | None = None
    """The program that a shipped host drives; None where it drives none, or is not known."""
    held_key: HeldKey | None = None
    """None where the host is given its keys as they are."""
    plugin: dict[str, str] | None = None
    """The wheel that brings it, as the receipt says it: `wheel`, `version`; None where it is configured or ours."""
    servers_given: tuple[dict[str, Any], ...] = ()
    """Rows of the configuration's MCP servers, values resolved: for a host that can be their client."""
    servers_required: tuple[str, ...] = ()
    """Names of those without which a run is refused."""

    @property
    def key(self) -> str:
        """A name for everything that may change its hello: programs as they are now, words, variables with options."""
        words = [*self.argv, *((self.agent.options.program,) if self.agent is not None else ())]
        return hashlib.sha256(
            repr(([(word, *_stamp(word)) for word in words], sorted(self.env.items()))).encode()
        ).hexdigest()

    def command(self, order: WorkOrder, environ: Mapping[str, str]) -> StartCommand:
        """What `open` starts, but for what a key proxy changes. Raises ConfigError: the order names the proxy's key."""
        if self.held_key is not None and self.held_key.variable in order.config.env:
            fact = f"config.env names {self.held_key.variable}, which the agent of {self.id!r} is not to have"
            raise ConfigError("config_invalid", fact, hint="leave it out, or set key_proxy = false for this backend")
        return StartCommand(argv=self.argv, env=child_environment(self.env, order.config.env, environ))

    def servers(self, order: WorkOrder, command: StartCommand) -> dict[str, tuple[str, ...]]:
        """The MCP servers that its agent is to start: name → the words of its row that may name files."""
        return shipped.servers_of(command.env, with_servers(order, self.servers_given).abp("mcp_servers"))

    def agent_path(self, env: Mapping[str, str]) -> str | None:
        """Return the path of the agent's program, as the host finds it; None without an agent or a program."""
        if self.agent is None:
            return None
        # A relative folder of PATH counts from the workspace, where programs are not looked for.
        search = (
            None if env.get("PATH") is None else os.pathsep.join(filter(os.path.isabs, env["PATH"].split(os.pathsep)))
        )
        return _found(self.agent.options.program, search)

    def open(
        self, order: WorkOrder, environ: Mapping[str, str], opener: Opener | None = None, use: KeyUse | None = None
    ) -> AbstractAsyncContextManager[Link]:
        """Start the host.

        Args:
            opener: starts it in a cage; None starts it plainly.
            use: filled with what is asked for with a key that it has not; None counts it for nobody.
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
        """Make the missing folders that the host may change, and return all paths that it may; blocking.

        A sandbox is planned from what exists, so this comes before the plan. A missing name with an extension
        is a file's, and is not made; one that ends in a slash is always a folder's.

        Raises:
            BackendError: `backend_unavailable`, a folder cannot be made.
        """
        state = self.env.get(shipped.STATE)
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
    """Size and time of a file named on a command line, so that a changed program is another host."""
    path = word if os.sep in word else _found(word)
    try:
        seen = os.stat(path) if path else None
    except (OSError, ValueError):
        return ()
    return (seen.st_size, seen.st_mtime_ns) if seen is not None else ()


def _found(program: str, search: str | None = None) -> str | None:
    if program.startswith("-"):
        return None  # An option of the command before it.

    return shutil.which(program, path=search)


class BackendStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What `backends` says of one backend."""

    id: str
    ready: bool
    why: str = ""
    """Why it is not ready; empty when it is."""
    fix: str = ""
    """What to do about it, or about what else is missing: a key that the agent may do without."""
    command: tuple[str, ...] = ()
    manifest: dict[str, Any] | None = None
    """Of its last hello; None when it never said one here."""


def find(name: str, settings: Settings, environ: Mapping[str, str]) -> ProcessBackend:
    """The backend of this name: configured, else shipped.

    Raises:
        BackendError: `backend_not_found`, with the names there are; `backend_unavailable` when it is not ready.
    """
    declared = settings.backends.get(name)
    if declared is None and name not in OWN and name not in agents():
        from backplane.runtime import plugins  # With it comes the reader of mail; no other backend needs it.

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
        told = presets.with_address(declared.options, {**environ, **env})
        env[presets.OPTIONS] = msgspec.json.encode(told).decode()
        secrets += [env[variable] for variable in service.variables]
    if agent is not None:
        argv = (*(argv[:-1] if (declared.host or name) != ACP else argv), agent.row)
        env[shipped.OPTIONS] = msgspec.json.encode(agent.options).decode()
        env.pop(agent.options.base_url_env or "", None)  # Its host sets it, by its options.
        key = env.get(agent.key_env or "", environ.get(agent.key_env or ""))
        if agent.key_env is not None and key:
            env[agent.key_env] = key
            secrets.append(key)
        if agent.options.sessions:
            env[shipped.STATE] = str(home_path(environ) / "agents" / name)
    held_key, endpoints = held_key_of(name, declared, settings, agent, service), declared.endpoints
    if held_key is None:  # Behind a proxy it asks nobody else.
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
    """The variables that the configuration names, values of ours resolved, which are added to `secrets`.

    Raises:
        BackendError: `backend_unavailable`, one of ours is not set.
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
    """Rows of the configuration's MCP servers, but for those that the backend has one of its own for.

    Raises:
        BackendError: `backend_unavailable`, a variable that one needs is not set.
    """
    rows = declared.options.get("mcp_servers")
    own = {row.get("name") for row in rows if isinstance(row, dict)} if isinstance(rows, list) else set()
    wanted = {server: asked for server, asked in settings.mcp_servers.items() if server not in own}
    return [server_row(server, asked, environ, secrets) for server, asked in wanted.items()]


def server_row(server: str, asked: ServerSettings, environ: Mapping[str, str], secrets: list[str]) -> dict[str, Any]:
    """Return a configured MCP server as an order names one; its resolved values are added to `secrets`.

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
    """Return an order with further MCP servers before its own, which go over those of the same name."""
    ordered = order.abp("mcp_servers")
    own = ordered if isinstance(ordered, list | tuple) else ()
    return order.with_abp("mcp_servers", [*rows, *own]) if rows else order


def with_call_limit(order: WorkOrder, limit_s: float) -> WorkOrder:
    """Return an order whose rows of MCP servers all have `tool_ms`: their own, else this limit."""
    rows = order.abp("mcp_servers")
    if not rows or not isinstance(rows, list | tuple):
        return order
    return order.with_abp(
        "mcp_servers", [{"tool_ms": round(limit_s * 1000), **row} for row in rows if isinstance(row, dict)]
    )


def _open_stores(name: str, declared: BackendSettings, agent: shipped.ShippedAgent | None) -> frozenset[str]:
    """What the configuration opens, and an agent's own login where it works with the user's own folder."""
    opened = frozenset[str]()
    if declared.credentials:
        opened = read_names(declared.credentials, f"[backends.{name}] credentials")
    return opened | {agent.row} if agent is not None and agent.options.own_state else opened


def option_faults(settings: Settings) -> Iterator[tuple[str, str]]:
    """Each configured backend whose shipped host is unknown or would not take its options, and why.

    Nothing of this machine is looked at: neither programs nor keys.
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
) -> tuple[shipped.ShippedAgent | None, presets.Service | None]:
    """The program that its shipped host drives, or the service that this asks; or neither. Raises ConfigError."""
    host, where = declared.host or name, f"the options of [backends.{name}]"
    if declared.command is not None:
        return None, None
    if host == presets.HOST:
        told = presets.with_address(declared.options, environ or declared.env)
        return None, presets.read_options(told, f"backends.{name}.options")
    if host == ACP or host in agents():
        row, env = "" if host == ACP else host, environ or declared.env
        return shipped.agent_of(find_shared("hosts"), row, declared.options, declared.env, where, env), None
    if declared.options:
        raise ConfigError("config_invalid", f"{where}: {host!r} takes none", hint="remove them")
    return None, None


def _of_service(
    name: str, service: presets.Service, env: Mapping[str, str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Variables with secrets of a model's service: the backend's own, else ours. Raises BackendError."""
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
    """Return the names of the agents that backplane drives: each is a host, and a backend."""
    return shipped.rows_of(str(find_shared("hosts"))).keys()


def by_name() -> set[str]:
    """Return the backends that need no configuration."""
    return {*OWN, *agents()} - OF_OPTIONS


def shipped_command(host: str) -> tuple[str, ...]:
    """The command that starts a shipped host.

    Raises:
        ConfigError: `config_invalid` when no host of that name comes with the package.
    """
    if host not in OWN and host not in agents():
        there = ", ".join(sorted({*OWN, *agents()}))
        raise ConfigError("config_invalid", f"no shipped host {host!r}", hint=f"choose one of: {there}")
    file, *arguments = (OWN[host],) if host in OWN else (shipped.HOST, host)
    # -E and -s: what the user's own shell sets for Python is not this program's affair.
    return (sys.executable, "-E", "-s", str(find_shared("hosts") / file), *arguments)


def from_command(command: str | tuple[str, ...], *, cwd: Path, limits: Limits | None = None) -> ProcessBackend:
    """Any program that speaks the protocol; relative paths in it count from `cwd`.

    Raises:
        ConfigError: `config_invalid` when the command is empty or its quotes do not close.
    """
    try:
        words = tuple(shlex.split(command)) if isinstance(command, str) else command
    except ValueError as error:
        raise ConfigError("config_invalid", f"the command cannot be read: {error}", hint="check its quotes") from error
    if not words:
        raise ConfigError("config_invalid", "the command is empty", hint="name a program that speaks the protocol")
    program = words[0] if os.sep not in words[0] else str(cwd / words[0])
    # A program's name need not be text; the receipt, which says it, is.
    name = os.fsencode(Path(words[0]).name).decode("utf-8", "backslashreplace")
    return ProcessBackend(id=f"sidecar:{name}", argv=(program, *words[1:]), limits=limits)


def known(settings: Settings, environ: Mapping[str, str]) -> list[BackendStatus]:
    """Return every backend, ready or not, by name; hosts that need options are backends once they are configured."""
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
    version = shipped.version_at(path)
    if version is None or not shipped.is_older(version, agent.oldest):
        return ""
    return f"{path} is {version}, older than {agent.oldest}; install it: {agent.options.install}"


def _without_key(backend: ProcessBackend) -> str:
    """What an agent without its key needs; it may still have another, so that this keeps nothing from a try."""
    agent = backend.agent
    if agent is None or agent.key_env is None or agent.options.own_state or agent.key_env in backend.env:
        return ""
    own = f"use your own login with options = {{ own_state = true }} in [backends.{backend.id}]"
    return f"no key: {agent.key_env} is not set; export it, or {own}"


def missing_program(backend: ProcessBackend, environ: Mapping[str, str]) -> BackendError | None:
    """What to raise because a program that the backend needs is not on this machine; None when all are."""
    search = backend.env.get("PATH", environ.get("PATH"))
    if _found(backend.argv[0], search) is None:
        fix = f"install it, or correct the command of [backends.{backend.id}]"
        return BackendError("backend_unavailable", f"{backend.argv[0]} is not found or not executable", hint=fix)
    agent = backend.agent.options if backend.agent is not None else None
    if agent is None or backend.agent_path({} if search is None else {"PATH": search}) is not None:
        return None
    fix = f'name its path: options = {{ program = "PATH" }} in [backends.{backend.id}]'
    if agent.install:
        fix = f"install it: {agent.install}; or {fix}"
    return BackendError("backend_unavailable", f"{agent.program} is not found or not executable", hint=fix)
