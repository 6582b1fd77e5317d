"""Providers: the known backends, each with an interface for conversations. A registry is a value, never a global."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final, ParamSpec

import anyio
import anyio.to_thread
import msgspec
from msgspec.structs import replace

from backplane.config import Settings
from backplane.contract.capability import Requirements, read_manifest
from backplane.contract.conversation import Message, SessionFile, SessionTurn
from backplane.errors import BackendError, BackplaneError, ConfigError
from backplane.policy.capabilities import negotiate
from backplane.policy.rules import tightened
from backplane.providers import store, stores
from backplane.providers.session import Session
from backplane.providers.turns import INTERRUPT, KEPT, Abilities, SessionConfig, abilities
from backplane.routing.task import TaskDescriptor
from backplane.runtime import readiness
from backplane.runtime.backends import Backend, ProcessBackend
from backplane.runtime.hello import ask_hello
from backplane.runtime.orders import read_policy
from backplane.runtime.plane import ControlPlane

LEVELS: Final = {
    "supports_mcp": "mcp_client",
    "supports_hooks": "hooks_pre_tool_use",
    "supports_streaming": "streaming",
    "supports_file_editing": "tool_edit",
    "supports_shell_exec": "tool_bash",
    "supports_web_search": "tool_web_search",
    "supports_reasoning": "extended_thinking",
}
"""Member of `ProviderCapabilities` → ability in the manifest; an ability that a manifest lacks is unknown."""


P = ParamSpec("P")


class SessionStart(AbstractAsyncContextManager[Session]):
    """Begins a session when awaited, or when entered by `async with`, which also closes the session."""

    def __init__(self, begin: Coroutine[Any, Any, Session]) -> None:
        self._begin = begin

    def __await__(self) -> Generator[Any, Any, Session]:
        return self._begin.__await__()

    async def __aenter__(self) -> Session:
        self._session = await self
        return self._session

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()


def _starts(method: Callable[P, Coroutine[Any, Any, Session]]) -> Callable[P, SessionStart]:
    @functools.wraps(method)
    def start(*args: P.args, **kwargs: P.kwargs) -> SessionStart:
        return SessionStart(method(*args, **kwargs))

    return start


class ProviderCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The abilities in a provider's manifest; None is unknown."""

    supports_tools: bool | None = None
    supports_mcp: bool | None = None
    supports_hooks: bool | None = None
    supports_interrupts: bool | None = None
    supports_streaming: bool | None = None
    supports_file_editing: bool | None = None
    supports_shell_exec: bool | None = None
    supports_web_search: bool | None = None
    supports_code_review: bool | None = None
    supports_reasoning: bool | None = None
    available_models: tuple[str, ...] | None = None
    max_context_tokens: int | None = None
    max_output_tokens: int | None = None
    rate_limit: int | None = None


class Provider:
    """A backend with an interface for conversations.

    Attributes:
        name: The backend's name.
        display_name: The name to show to people.
    """

    def __init__(self, plane: ControlPlane, backend: Backend | str, display_name: str | None = None) -> None:
        self.plane = plane
        self._backend = backend
        self.name = backend if isinstance(backend, str) else backend.id
        self.display_name = display_name or self.name
        self._can: Abilities | None = None

    @property
    def backend(self) -> Backend:
        """The provider's backend. Raises BackendError: `backend_not_found`, `backend_unavailable`."""
        return self.plane.find_backend(self._backend)

    @property
    def can(self) -> Abilities:
        """The abilities in the hello of the provider's host; empty before `prepare`."""
        return self._can or Abilities()

    async def prepare(self) -> Abilities:
        """Find the backend's programs and ask its host once for its abilities; no order is sent, no model is asked.

        Raises:
            ConfigError: `config_invalid`, the registry is closed.
            BackendError: `backend_not_found`, `backend_unavailable`, `backend_crashed`.
            ProtocolError: `protocol_handshake_failed`.
        """
        self.plane.require_open()
        if self._can is None:
            backend, environ = self.backend, self.plane.environ
            missing = readiness.missing_program(backend, environ) if isinstance(backend, ProcessBackend) else None
            if missing is not None:
                raise missing
            hello = await ask_hello(backend, environ, backend.limits or self.plane.settings.limits)
            self._can = abilities(hello)
        return self._can

    @property
    def provider_type(self) -> str | None:
        """The host's own name (`claude`, `api`, …); None before `prepare`."""
        return self._can.host if self._can is not None else None

    def can_handle_task(self, task: TaskDescriptor) -> bool | None:
        """Return True if the manifest satisfies all that a task requires; None before `prepare`."""
        if self._can is None:
            return None
        return negotiate(Requirements(task.requirements), read_manifest(self._can.levels)).satisfied

    async def validate(self) -> bool:
        """Return True if the host's program is installed and sends a valid hello. Only a turn can test the keys."""
        try:
            await self.prepare()
        except BackplaneError:
            return False
        return True

    def capabilities(self) -> ProviderCapabilities:
        """Return the abilities in the manifest; None is unknown, as all are before `prepare`."""
        can = self._can
        if can is None:
            return ProviderCapabilities()
        found: dict[str, Any] = {name: _level(can.levels.get(ability)) for name, ability in LEVELS.items()}
        tools = "mcp_servers" in can.heeds
        return ProviderCapabilities(supports_tools=tools, supports_interrupts=INTERRUPT in can.extensions, **found)

    @_starts
    async def create_session(self, config: SessionConfig | None = None) -> Session:
        """Begin a session, or resume the one that `config.session_id` names.

        Raises:
            ConfigError: `config_invalid`, a tool cannot be one, there is no such folder or session, or it is open
                elsewhere.
            BackendError, ProtocolError: as `prepare`; `capability_unsupported`, the provider cannot offer the session's
                tools.
            StoreError: `receipt_store_failed`.
        """
        config = config or SessionConfig()
        if config.root is not None and not (
            self.backend.remote or await anyio.to_thread.run_sync(os.path.isdir, config.root)
        ):
            fact = f"SessionConfig.root: no folder {config.root!r}"
            raise ConfigError("config_invalid", fact, hint="give an existing folder, or None for the current one")
        await self.prepare()
        if config.tools and "mcp_servers" not in self.can.heeds:
            fact = f"{self.name!r} takes no tools of the program"
            raise BackendError("capability_unsupported", fact, hint="leave `tools` empty, or choose another provider")
        if config.session_id is not None:
            return await self.resume(config.session_id, config)
        return await self._started(store.new_file(self.name), config)

    @_starts
    async def resume(self, session_id: str, config: SessionConfig | None = None) -> Session:
        """Continue a saved session, also one of another provider: that is a handover.

        Args:
            session_id: the session's id, the beginning of the id, or `last` for the newest session.
            config: its tools, callbacks and hooks replace the session's, and so does each other member that is not
                None. Its policy, or else the configured one, only tightens the session's.

        Raises:
            BackplaneError: as `create_session`.
        """
        id = await anyio.to_thread.run_sync(store.find, self.plane.home, session_id)
        return await self._started(id, config)

    @_starts
    async def load(self, path: str | os.PathLike[str], config: SessionConfig | None = None) -> Session:
        """Continue a copy of a session's file, wherever the file was written; a policy in it is ignored.

        Raises:
            BackplaneError: as `create_session`.
        """
        file = await anyio.to_thread.run_sync(self._read, Path(path))
        return await self._copied(replace(file, policy=None), config)

    @_starts
    async def fork_session(
        self, session_id: str, *, at: int | None = None, config: SessionConfig | None = None
    ) -> Session:
        """Continue a copy of a saved session, which stays as it is.

        Args:
            session_id: as `resume`.
            at: number of messages that the copy has; None takes all.

        Raises:
            BackplaneError: as `create_session`.
        """
        home = self.plane.home
        file = await anyio.to_thread.run_sync(lambda: self._read(store.path_of(home, store.find(home, session_id))))
        return await self._copied(file if at is None else cut(file, at), config)

    @_starts
    async def import_session(self, vendor: str, name: str, config: SessionConfig | None = None) -> Session:
        """Continue a conversation that a vendor's own program has kept; the store stays as it is.

        Args:
            vendor: a vendor's name in `stores.STORES`.
            name: `last`, the beginning of the conversation's id, or the path of its file.

        Raises:
            BackplaneError: as `create_session`.
        """
        file = await anyio.to_thread.run_sync(stores.import_stored, vendor, name, self.name, self.plane.environ)
        return await self._started(file, config)

    def _read(self, path: Path) -> SessionFile:
        return store.settled(store.read(path), self.plane.state_folder.store())

    async def _copied(self, file: SessionFile, config: SessionConfig | None) -> Session:
        fresh = store.new_file(self.name)
        copy = replace(file, id=fresh.id, created_at=fresh.created_at, parent=file.id)
        return await self._started(copy, config, copied=True)

    async def _started(self, file: SessionFile | str, config: SessionConfig | None, *, copied: bool = False) -> Session:
        """Return an open session with this provider; on failure, other processes may write the session's file again.

        Args:
            file: a new file, or the id of a saved one.
            copied: True if the file is a copy of another session's.
        """
        config = config or SessionConfig()
        await self.prepare()
        home, saved = self.plane.home, None
        if isinstance(file, str) or config.save:
            id = file if isinstance(file, str) else file.id
            saved = await anyio.to_thread.run_sync(store.create, home, id)
        try:
            if isinstance(file, str):
                file = await anyio.to_thread.run_sync(self._read, store.path_of(home, file))
            given = {name: value for name in KEPT if (value := getattr(config, name)) is not None}
            later = self.plane.settings.policy if config.policy is None else config.policy
            if file.policy is not None and later is not None:
                # A configured rule that allows more than the session's policy was left out when the session began, too.
                leave_out = config.policy is None
                given["policy"] = tightened(file.policy, read_policy(later), leave_out=leave_out)
            own = self if file.provider == self.name else Provider(self.plane, file.provider)
            session = Session(own, config, saved, replace(file, **given))
            session.take_up(file, copied=copied)
            if own is not self:
                await session.handover(self, model=config.model)
        except BaseException:
            if saved is not None:
                saved.close()
            raise
        return session


def _level(level: object) -> bool | None:
    return None if level is None else level != "unsupported"


def cut(file: SessionFile, at: int) -> SessionFile:
    """Return a copy of a session cut after its first `at` messages; cleared turns do not count.

    Raises:
        ConfigError: `config_invalid`, the session has fewer messages.
    """
    there = sum(len(turn.messages) for turn in file.turns[file.cleared :])
    if type(at) is not int or not 0 <= at <= there:
        raise ConfigError("config_invalid", f"no message {at!r:.40} to fork at", hint=f"a number from 0 to {there}")
    turns: list[SessionTurn] = []
    left = at
    for turn in file.turns[file.cleared :]:
        messages: tuple[Message, ...] = turn.messages[:left]
        left -= len(messages)
        if messages:
            whole = len(messages) == len(turn.messages)
            # The vendor's own conversation goes on beyond this message, so it is not part of the copy.
            turns.append(turn if whole else replace(turn, messages=messages, conversation=None))
    return replace(file, turns=tuple(turns), cleared=0)


class ProviderRegistry:
    """The providers of one control plane: every backend that is configured or shipped, and those registered here.

    Use it as an async context manager; sessions that are open at its end are closed before it.

    Args:
        settings: as of `ControlPlane`.
        home: as of `ControlPlane`.
        environ: as of `ControlPlane`.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        home: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.plane = ControlPlane(settings, home, environ)
        self._providers: dict[str, Provider] = {}

    async def __aenter__(self) -> ProviderRegistry:
        await self.plane.__aenter__()
        return self

    async def __aexit__(self, *how: object) -> None:
        await self.plane.__aexit__(*how)

    def register(self, backend: Backend, display_name: str | None = None) -> Provider:
        """Add a backend of the program's own, in place of one with the same name."""
        provider = self._providers[backend.id] = Provider(self.plane, backend, display_name)
        return provider

    def get(self, name: str | None = None) -> Provider:
        """Return a provider; None is the configured default.

        Raises:
            BackendError: `backend_not_found`, with the known names; `backend_unavailable`, a key is missing.
            ConfigError: `config_invalid`, there is no default.
        """
        wanted = name or self.plane.settings.default_backend
        if wanted is None or wanted not in self._providers:
            wanted = self.plane.find_backend(wanted).id
            self._providers[wanted] = Provider(self.plane, wanted)
        return self._providers[wanted]

    def list(self) -> tuple[str, ...]:
        """Return the providers' names, sorted; `Provider.validate` tests whether one is ready."""
        known = (status.id for status in readiness.known(self.plane.settings, self.plane.environ))
        return tuple(sorted({*known, *self._providers}))
