"""Finds backends, which are named ways to reach a host: a child process, or a function in memory.

A backend opens a link: two descriptors that carry the protocol, and one way to stop the host. The same bytes flow for
both kinds of host. Other modules of `runtime` read and write the messages.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from backplane.agents import rows
from backplane.config import BackendSettings, Limits, Settings, child_environment, home_path, read_command, user_folder
from backplane.contract.unknown import nearest_name
from backplane.contract.work import WorkOrder
from backplane.errors import BackendError, ConfigError, PolicyError
from backplane.process.child import Exit, open_child
from backplane.process.launch import StartCommand
from backplane.resources import find as find_shared
from backplane.runtime.held_key import HeldKey, behind_proxy, check_key, held_key_of
from backplane.runtime.servers import resolved, server_rows, servers_of, variable, with_servers
from backplane.sandbox.credentials import read_names
from backplane.upstream import presets
from backplane.upstream.endpoint import Endpoint

if TYPE_CHECKING:
    from backplane.gateway.key_proxy import KeyUse

ACP: Final = "acp"
"""The shipped host whose options name its agent."""
OWN: Final = {"shell": "shell.py", "mock": "mock.py", presets.HOST: "api.py", ACP: rows.HOST}
"""Shipped hosts whose name is not an agent's: name → file under `hosts/`."""
OF_OPTIONS: Final = frozenset({ACP, presets.HOST})
"""Shipped hosts that need options to be a backend: the options name the agent or the service."""

NEVER_CHOSEN: Final = frozenset({"shell", "mock", "replay"})
"""Backends that run only when they are named, because they ask no model."""


Cancel = Callable[[float], Awaitable[None]]
"""Sends the `cancel` message, and returns on its answer or after its argument, the grace in seconds."""


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
    async def stop(self, *, grace_s: float, cancel: Cancel | None = None, is_done: bool = False) -> None: ...


Opener = Callable[[StartCommand, tuple[str, ...]], AbstractAsyncContextManager[Link]]
"""Starts a command that may connect to the given addresses."""


class Backend(msgspec.Struct, frozen=True, kw_only=True):
    """A named way to reach a host: a `ProcessBackend`, or a `MemoryBackend`."""

    id: str
    limits: Limits | None = None
    """The backend's own limits; None to use the control plane's."""
    secrets: tuple[str, ...] = ()
    """Values of the host's environment that are redacted everywhere."""
    remote: bool = False
    """True if the host works on another machine, in a folder that the order names."""
    held_key: HeldKey | None = None
    """The key that a proxy adds to the host's requests; None if the host is given its keys."""
    plugin: dict[str, str] | None = None
    """The wheel that provides the backend, with the receipt's members `wheel` and `version`; None for all others."""
    replays: dict[str, Any] | None = None
    """The run that is replayed, as in the receipt: `run`, `receipt_sha256`, `with_patch`; None for all others."""
    servers_given: tuple[dict[str, Any], ...] = ()
    """Configured MCP servers as rows with resolved values, for a host that can be their client."""
    servers_required: tuple[str, ...] = ()
    """Names of the configured MCP servers without which a run is refused."""

    @property
    def key(self) -> str:
        """The key of the host's stored manifest; it changes when the host's program changes."""
        raise NotImplementedError

    def open(self, order: WorkOrder, environ: Mapping[str, str]) -> AbstractAsyncContextManager[Link]:
        """Start the host for the block."""
        raise NotImplementedError


class ProcessBackend(Backend, frozen=True, kw_only=True):
    """A backend whose host is a child process."""

    argv: tuple[str, ...]
    env: dict[str, str] = {}
    """Variables to add to the child's environment, with resolved values."""
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

    @property
    def key(self) -> str:
        """A hash of all that may change the hello: command, size and time of its files, agent, variables."""
        words = self.argv if self.agent is None else (*self.argv, self.agent.program)
        seen = [(word, *_stamp(word)) for word in words], sorted(self.env.items())
        return hashlib.sha256(repr(seen).encode()).hexdigest()

    def command(self, order: WorkOrder, environ: Mapping[str, str]) -> StartCommand:
        """Return the host's command before a key proxy changes it. Raises ConfigError if the order sets the key."""
        if self.held_key is not None and self.held_key.variable in order.config.env:
            fact = f"config.env names {self.held_key.variable}, which the agent of {self.id!r} is not to have"
            raise ConfigError("config_invalid", fact, hint="leave it out, or set key_proxy = false for this backend")
        return StartCommand(argv=self.argv, env=child_environment(self.env, order.config.env, environ))

    def servers(self, order: WorkOrder) -> dict[str, tuple[str, ...]]:
        """Return the MCP servers that the agent is to start: name → the words of its row that may name files."""
        own = self.agent.mcp_servers if self.agent is not None else ()
        ordered = with_servers(order, self.servers_given).abp("mcp_servers")
        return servers_of([*own, *(ordered if isinstance(ordered, list | tuple) else ())])

    def agent_path(self, env: Mapping[str, str]) -> str | None:
        """Return the path at which the host finds the agent's program; None if there is no agent or no such program."""
        if self.agent is None:
            return None
        # Relative folders of PATH would be below the workspace, where no program is looked for.
        path = env.get("PATH")
        search = path if path is None else os.pathsep.join(filter(os.path.isabs, path.split(os.pathsep)))
        return shutil.which(self.agent.program, path=search)

    def open(
        self, order: WorkOrder, environ: Mapping[str, str], opener: Opener | None = None, use: KeyUse | None = None
    ) -> AbstractAsyncContextManager[Link]:
        """Start the host.

        Args:
            opener: starts the command in a sandbox; None starts it without one.
            use: counts the requests that pass the key proxy; None if the counts are not needed.
        """
        command = self.command(order, environ)
        start = opener or (lambda command, _: open_child(command))
        if opener is None:
            self.make_writable(order)
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
    path = word if os.sep in word else shutil.which(word)
    try:
        seen = os.stat(path) if path else None
    except (OSError, ValueError):
        return ()
    return (seen.st_size, seen.st_mtime_ns) if seen is not None else ()


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


class BackendRow(msgspec.Struct, frozen=True):
    """A backend's settings about its host, read without a look at this machine.

    Attributes:
        argv: the host's command.
        agent: the agent that a shipped host drives; None if there is none.
        service: the service that a shipped host asks; None if there is none.
        held_key: the key that a proxy adds; None if the host is given its keys.
        open_stores: credential stores that a contained host may read.
    """

    argv: tuple[str, ...]
    agent: rows.AgentRow | None
    service: Endpoint | None
    held_key: HeldKey | None
    open_stores: frozenset[str]

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Addresses that the host needs besides those of its settings; behind a proxy it needs none."""
        if self.held_key is not None:
            return ()
        if self.service is not None:
            return (self.service.host_and_port,)
        return self.agent.endpoints if self.agent is not None else ()


def read_row(name: str, declared: BackendSettings, settings: Settings, environ: Mapping[str, str]) -> BackendRow:
    """Read the settings of a backend.

    Args:
        environ: variables that may have the address of the model's service.

    Raises:
        ConfigError: `config_invalid`, the shipped host is unknown, or a setting is wrong.
        PolicyError: `policy_invalid`, a credential store is unknown.
    """
    host, where = declared.host or name, f"the options of [backends.{name}]"
    argv = tuple(declared.command or ()) or shipped_command(host)
    agent = service = None
    if declared.command is not None:
        pass
    elif host == presets.HOST:
        options = presets.with_address(declared.options, environ)
        service = presets.read_options(options, f"backends.{name}.options")
    elif host == ACP or host not in OWN:
        row = "" if host == ACP else host
        agent = rows.agent_of(find_shared("hosts"), row, declared.options, declared.env, where, environ)
        argv = (*(argv if host == ACP else argv[:-1]), agent.name)
    elif declared.options:
        raise ConfigError("config_invalid", f"{where}: {host!r} takes none", hint="remove them")
    stores = frozenset[str]()
    if declared.credentials:
        stores = read_names(declared.credentials, f"[backends.{name}] credentials")
    if agent is not None and agent.own_state:
        stores |= {agent.name}
    return BackendRow(argv, agent, service, held_key_of(name, declared, settings, agent, service, environ), stores)


def _from_settings(
    name: str, declared: BackendSettings, settings: Settings, environ: Mapping[str, str]
) -> ProcessBackend:
    whose, secrets = f"backend {name!r}", list[str]()
    env = resolved(whose, declared.env, environ, secrets)
    seen = {**environ, **env}
    row = read_row(name, declared, settings, seen)
    if row.service is not None:
        env[presets.OPTIONS] = msgspec.json.encode(presets.with_address(declared.options, seen)).decode()
        known = {one: value for one, value in seen.items() if value}
        fix = ", or name another with key_env"
        env |= {key: variable(whose, key, known, secrets, hint=fix) for key in row.service.variables}
    if row.agent is not None:
        env[rows.OPTIONS] = msgspec.json.encode(row.agent).decode()
        env.pop(row.agent.base_url_env or "", None)  # The host sets this variable, from its options.
        if row.agent.key_env is not None and (key := seen.get(row.agent.key_env)):
            env[row.agent.key_env] = key
            secrets.append(key)
        if row.agent.sessions:
            env[rows.STATE] = str(home_path(environ) / "agents" / name)
    servers = () if declared.remote else server_rows(settings.mcp_servers, declared.options, environ, secrets)
    if row.held_key is not None and row.held_key.routes is not None:
        secrets += row.held_key.secrets
        env.pop(row.held_key.variable, None)  # The agent asks another service, so it needs no key of its own.
    elif row.held_key is not None:
        check_key(name, row.held_key.variable, env.get(row.held_key.variable, "").strip(), servers)
    return ProcessBackend(
        id=name,
        argv=row.argv,
        env=env,
        secrets=tuple(secrets),
        limits=declared.limits_over(settings.limits),
        remote=declared.remote,
        is_ours=declared.command is None,
        writable=tuple(f"{user_folder(environ)}{path[1:]}" if path[:1] == "~" else path for path in declared.writable),
        endpoints=declared.endpoints + row.endpoints,
        open_stores=row.open_stores,
        agent=row.agent,
        held_key=row.held_key,
        servers_given=servers,
        servers_required=tuple(one["name"] for one in servers if settings.mcp_servers[one["name"]].required),
    )


def option_faults(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the name and the fault of each configured backend with wrong settings, such as an unknown shipped host.

    Programs and keys on this machine are not checked.
    """
    for name, declared in settings.backends.items():
        try:
            read_row(name, declared, settings, declared.env)
        except (ConfigError, PolicyError) as error:
            yield name, f"{error.message}; {error.hint}" if error.hint else error.message


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
    words = read_command(command) if isinstance(command, str) else command
    if not words:
        raise ConfigError("config_invalid", "the command is empty", hint="name a program that speaks the protocol")
    program = words[0] if os.sep not in words[0] else str(cwd / words[0])
    # The name of a program need not be valid UTF-8, but the receipt with it must be.
    name = os.fsencode(Path(words[0]).name).decode("utf-8", "backslashreplace")
    return ProcessBackend(id=f"sidecar:{name}", argv=(program, *words[1:]), limits=limits)
