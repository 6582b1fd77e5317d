"""Checks the demands on one host's sandbox before a start, and plans its mounts once the folders are known."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import msgspec

from backplane.config import Isolation
from backplane.contract.canonical import Json
from backplane.policy.rules import Policy
from backplane.policy.urls import network_rules
from backplane.process.child import Child, Ready, open_child
from backplane.process.launch import StartCommand
from backplane.sandbox import credentials, demands, mounts, plan
from backplane.sandbox.probe import Probe

if TYPE_CHECKING:
    from backplane.sandbox.proxy import Connections


class Sandbox:
    """The sandbox of one host, from the check of its demands to the start of its command.

    Args:
        demanded: the order's `config.vendor.abp.enforcement`, unchecked; it overrides the policy's own demands.
        found: the layers of this machine; None if the host cannot or need not be contained.
        open_stores: names of credential stores that the host may read.

    Raises:
        PolicyError: `policy_invalid`, the demands cannot be read.
        CapabilityError: `capability_unsupported`, the layers cannot meet the demands.
    """

    def __init__(
        self,
        policy: Policy,
        isolation: Isolation,
        demanded: Json,
        found: Probe | None,
        *,
        open_stores: frozenset[str] = frozenset(),
    ) -> None:
        self._connections: Connections | None = None
        self._policy = policy
        self._isolation = isolation
        self._demands = demands.read_demands(demanded, policy.profile, isolation)
        self._found = found
        self._open_stores = open_stores
        demands.check_layers(isolation, self._demands, policy.profile, found)

    def needs_tree(self, original: str) -> bool:
        """Return True if the sandbox can be planned only after the copy is made. Blocking.

        Args:
            original: the folder that will be copied.
        """
        return mounts.needs_tree(self._policy.profile) or credentials.has_stores(original)

    def check_asks(self, extensions: tuple[str, ...]) -> None:
        """Refuse a host that requests no approvals, if the order demands them. Raises CapabilityError."""
        demands.check_asks(self._demands, extensions)

    def contain(
        self,
        folders: plan.RunFolders,
        command: StartCommand,
        writable: tuple[str, ...],
        endpoints: tuple[str, ...],
        servers: plan.ServerFiles,
        agent: str | None,
    ) -> plan.Contained:
        """Plan the sandbox of a command. Blocking.

        Raises:
            CapabilityError: `capability_unsupported`, the system cannot enforce a rule that the order wants enforced.
            PolicyError: `policy_invalid`, an endpoint of the backend cannot be read.
        """
        if endpoints:
            network_rules(endpoints)
        assert self._found is not None, "admitted before"
        held = plan.plan(
            folders,
            command,
            self._policy,
            self._found,
            isolation=self._isolation,
            writable=writable,
            endpoints=endpoints,
            open_stores=self._open_stores,
            servers=servers,
            agent=agent,
        )
        demands.check_plan(self._isolation, self._demands, self._policy.profile, held)
        return held

    def open(
        self,
        held: plan.Contained,
        ready: Ready | None,
        command: StartCommand,
        endpoints: tuple[str, ...],
    ) -> AbstractAsyncContextManager[Child]:
        """Start a command in the sandbox.

        Args:
            ready: awaited while the sandbox is made, before the command starts.
            endpoints: further targets to which the command may connect.
        """
        held = msgspec.structs.replace(held, endpoints=(*held.endpoints, *endpoints))
        if held.policy is None:
            caged = msgspec.structs.replace(command, env=command.env | held.env)
            return open_child(caged, cage=held.cage, ready=ready)
        # Imported only if the network has rules, because the proxy takes a third of the loading time.
        from backplane.sandbox.network import open_contained
        from backplane.sandbox.proxy import Connections

        self._connections = Connections()
        return open_contained(command, held, self._connections, ready=ready)

    def close(self, added: dict[str, Json]) -> None:
        """Add the network connections of an ended host to the receipt.

        Args:
            added: the receipt's own members, to which `network` is added.
        """
        if self._connections is not None and (self._connections.allowed or self._connections.denied):
            added["network"] = self._connections.to_wire()
