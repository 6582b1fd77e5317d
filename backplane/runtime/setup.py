"""Prepares the start of one host: its command, its sandbox and their folders."""

from __future__ import annotations

import copy
import functools
import os
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import msgspec

from backplane.config import Isolation, tighter
from backplane.contract.work import WorkOrder, settings_of
from backplane.errors import WorkspaceError
from backplane.policy.rules import Policy
from backplane.runtime.backends import Backend, Link, ProcessBackend
from backplane.runtime.state import StateFolder
from backplane.sandbox.credentials import read_names
from backplane.workspace import object_folders
from backplane.workspace.workspace import NAME_A_FOLDER

if TYPE_CHECKING:
    from backplane.gateway.key_proxy import KeyUse
    from backplane.process.child import Ready
    from backplane.sandbox.plan import Contained
    from backplane.sandbox.probe import Probe
    from backplane.sandbox.sandbox import Sandbox
    from backplane.workspace import Workspace


class HostStart(msgspec.Struct, frozen=True):
    """The backend whose host is started, and what the control plane gives the host."""

    state: StateFolder
    backend: Backend
    environ: Mapping[str, str]
    """Variables from which the host's environment is chosen."""
    isolation: Isolation
    """The least isolation that the configuration asks for."""
    layers: Probe | None
    """Which sandbox layers this machine has; None if they were not tried yet."""


class HostSetup:
    """Plans, makes and removes the sandbox and the folders of one host.

    Attributes:
        key: the `warm.fingerprint` of this setup; None if it has none or it was not computed.
        tree: the folder for the copy, if the sandbox is made around it before it is filled; otherwise None.
        contained: the planned sandbox; None if the host gets none.

    Args:
        name: name of the folders: the run's id, or another UUID for a host that waits for its order.
    """

    def __init__(self, start: HostStart, order: WorkOrder, policy: Policy, name: str) -> None:
        self.start, self.order, self.policy, self.name = start, order, policy, name
        self.settings = settings_of(order.config.vendor)
        self.isolation = tighter(start.isolation, self.settings.get("isolation"))
        self.key: str | None = None
        self.tree: Path | None = None
        self.sandbox: Sandbox | None = None
        self.contained: Contained | None = None
        self.key_use: KeyUse | None = None
        self._lock = -1
        if start.backend.held_key is not None:
            from backplane.gateway.key_proxy import KeyUse

            self.key_use = KeyUse(start.backend.held_key.prices)

    async def plan(self, stage: Callable[[], Awaitable[Workspace]]) -> None:
        """Plan the sandbox, if one is asked for and this machine can make it.

        Args:
            stage: makes the copy, if the sandbox depends on its files.

        Raises:
            CapabilityError: `capability_unsupported`, a demand of the order cannot be met.
            PolicyError: `policy_invalid`, the demands or the endpoints cannot be read.
            BackplaneError: the workspace is not a folder, or cannot be made.
        """
        start, backend = self.start, self.start.backend
        demanded, asked = self.settings.get("enforcement"), self.settings.get("credentials")
        nothing_asked = self.isolation == "off" and demanded is None and asked is None
        if nothing_asked or backend.replays is not None:  # A replay needs no sandbox.
            return
        # Imported here, because orders without a sandbox need not wait for it.
        from backplane.sandbox.probe import try_layers
        from backplane.sandbox.sandbox import Sandbox

        program = backend if isinstance(backend, ProcessBackend) else None
        contained = program is not None and self.isolation != "off"
        found = (start.layers or await try_layers(start.environ)) if contained else None
        open_stores = read_names(asked, "config.vendor.abp.credentials")
        open_stores |= program.open_stores if program is not None else frozenset()
        self.sandbox = Sandbox(self.policy, self.isolation, demanded, found, open_stores=open_stores)
        if program is not None and contained:
            needs_copy = await anyio.to_thread.run_sync(self._make_folders, self.sandbox)
            staged = await stage() if needs_copy else None
            self.contained = await anyio.to_thread.run_sync(self._contain, program, self.sandbox, staged)

    def following(self) -> HostSetup:
        """Return a setup with the same plan in other folders, for a host that waits for the next order of this kind."""
        made = HostSetup(self.start, self.order, self.policy, str(uuid.uuid4()))
        made.key, made.sandbox = self.key, copy.copy(self.sandbox)
        made.contained = _renamed(self.contained, self.name, made.name)
        return made

    def make_ahead(self) -> None:
        """Make the folders of a host that waits for its order, which no other control plane may sweep. Blocking.

        Raises:
            WorkspaceError: `workspace_staging_failed`.
        """
        if self.contained is not None:
            self._lock = self.start.state.make_scratch(self.name, lock=True)
            if self.order.workspace.mode == "staged":
                self.tree = self.start.state.make_tree(self.name)

    def _make_folders(self, sandbox: Sandbox) -> bool:
        """Make the folders of the sandbox; return True if the sandbox can only be planned after the copy is made."""
        state, spec = self.start.state, self.order.workspace
        state.make_scratch(self.name, lock=False)
        if spec.mode == "staged":
            # Whether a copy of some of the files may have git's history is known once the copy is made, so not here.
            if not (spec.include or spec.exclude or sandbox.needs_tree(spec.root)):
                self.tree = state.make_tree(self.name)
            return self.tree is None
        if not os.path.isdir(spec.root):  # Otherwise the sandbox would fail to start, without this reason.
            fact = f"the workspace {spec.root!r} is not a folder"
            raise WorkspaceError("workspace_init_failed", fact, hint=NAME_A_FOLDER)
        return False

    def _contain(self, backend: ProcessBackend, sandbox: Sandbox, staged: Workspace | None) -> Contained:
        from backplane.sandbox.plan import RunFolders

        state, order = self.start.state, self.order
        root = os.path.realpath(self.tree or (staged.root if staged is not None else order.workspace.root))
        objects = staged.object_folders if staged is not None else object_folders(order.workspace.root)
        folders = RunFolders(
            root=root,
            original=os.path.realpath(order.workspace.root) if order.workspace.mode == "staged" else None,
            state=os.path.realpath(state.home),
            scratch=os.path.realpath(state.scratch_of(self.name)),
            objects=tuple(path for path in objects if not path.startswith(f"{root}/")),
        )
        command = backend.command(order, self.start.environ)
        writable, servers = backend.make_writable(order), backend.servers(order)
        return sandbox.contain(folders, command, writable, backend.endpoints, servers, backend.agent_path(command.env))

    def open(self, ready: Ready | None) -> AbstractAsyncContextManager[Link]:
        """Return a context manager that starts the host, and ends it after the block.

        Args:
            ready: awaited while the sandbox is made, before the host starts; None waits for nothing else.
        """
        backend, environ = self.start.backend, self.start.environ
        if not isinstance(backend, ProcessBackend):
            return backend.open(self.order, environ)
        opener = None
        if self.sandbox is not None and self.contained is not None:
            opener = functools.partial(self.sandbox.open, self.contained, ready)
        return backend.open(self.order, environ, opener, self.key_use)

    def remove(self, *, with_tree: bool) -> None:
        """Remove the folders of a host that has ended; blocking.

        Args:
            with_tree: True removes `tree` too, in which no workspace was made.
        """
        state = self.start.state
        if self.sandbox is not None:
            state.drop_scratch(self.name)
        if self.tree is not None and with_tree:
            state.drop_stage(self.name)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _renamed(value: Any, old: str, new: str) -> Any:
    """Return a plan with another name in all of its paths."""
    match value:
        case str():
            return value.replace(old, new)
        case bytes():
            return value.replace(old.encode(), new.encode())
        case tuple() | list():
            return type(value)(_renamed(one, old, new) for one in value)
        case Mapping():
            return {name: _renamed(one, old, new) for name, one in value.items()}
        case msgspec.Struct():
            return type(value)(**{name: _renamed(getattr(value, name), old, new) for name in value.__struct_fields__})
    return value
