"""The containment of one run: admitted before anything starts, put on when the place to work in is known."""

from __future__ import annotations

import os
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from backplane.config import Isolation
from backplane.contract.canonical import Json
from backplane.policy.rules import Policy
from backplane.policy.urls import network_rules
from backplane.process.child import Child, Ready, open_child
from backplane.process.launch import StartCommand
from backplane.sandbox import credentials, mounts, plan, requirements
from backplane.sandbox.probe import Probe

if TYPE_CHECKING:
    from backplane.sandbox.proxy import Connections


class Sandbox:
    """What holds one host.

    Args:
        demanded: the order's `config.vendor.abp.enforcement`, not checked yet; it replaces the policy's own demands.
        found: the layers of this machine; None where nothing can be put around the host, or nothing shall.
        open_stores: names of stores of credentials that the host may read.

    Raises:
        PolicyError: `policy_invalid`, the demands cannot be read.
        CapabilityError: `capability_unsupported`, what is asked for cannot be had.
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
        own = requirements.demands_of(policy.profile, isolation)
        self._demands = {**own, **requirements.demands(demanded)}
        self._found = found
        self._open_stores = open_stores
        requirements.refuse(isolation, self._demands, policy.profile, found)

    def needs_tree(self, original: str) -> bool:
        """Whether the files have to be there before the cage can be worked out. Blocking.

        Args:
            original: the folder that will be copied.
        """
        return mounts.needs_tree(self._policy.profile) or credentials.has_stores(original)

    def check_asks(self, extensions: tuple[str, ...]) -> None:
        """Refuse a host that does not ask first where the order demands it. Raises CapabilityError."""
        requirements.check_asks(self._demands, extensions)

    def put_on(
        self,
        place: plan.RunFolders,
        command: StartCommand,
        writable: tuple[str, ...],
        endpoints: tuple[str, ...],
        servers: plan.ServerFiles,
        agent: str | None,
    ) -> plan.Contained:
        """Work out the cage. Blocking.

        Raises:
            CapabilityError: `capability_unsupported`, a rule that the order wants held by the system cannot be.
            PolicyError: `policy_invalid`, an endpoint of the backend cannot be read.
        """
        if endpoints:
            network_rules(endpoints)
        assert self._found is not None, "admitted before"
        held = plan.plan(
            place,
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
        requirements.check_held(self._demands, held.gaps, self._policy.profile)
        if self._isolation == "required" or self._demands.get("deny_read") == "os":
            requirements.check_links(held.uncovered)
        return held

    def open(
        self,
        held: plan.Contained,
        ready: Ready | None,
        command: StartCommand,
        endpoints: tuple[str, ...],
    ) -> AbstractAsyncContextManager[Child]:
        """Start the command in its cage; `ready` is awaited while that is put up.

        Args:
            endpoints: where it may connect to beside those of the cage.
        """
        held = msgspec.structs.replace(held, endpoints=(*held.endpoints, *endpoints))
        if held.policy is None:
            caged = msgspec.structs.replace(command, env=command.env | held.env)
            return open_child(caged, cage=held.cage, ready=ready)
        # Only where the network is ruled, as a third of the loading is the proxy's.
        from backplane.sandbox.network import open_contained
        from backplane.sandbox.proxy import Connections

        self._connections = Connections()
        return open_contained(command, held, self._connections, ready=ready)

    def close(self, added: dict[str, Json]) -> None:
        """Add what went through the network of a host that has ended.

        Args:
            added: members of the receipt's own part.
        """
        if self._connections is not None and (self._connections.allowed or self._connections.denied):
            added["network"] = self._connections.to_wire()


def place_of(
    root: str, *, original: str | None, home: Path, scratch: Path, objects: tuple[str, ...] = ()
) -> plan.RunFolders:
    """Where a run works, links followed.

    Args:
        original: what a staged root is a copy of.
        home: the state folder.
        scratch: the run's folder for temporary files.
        objects: folders from which the repository in it takes objects.
    """
    within = f"{os.path.realpath(root)}/"
    return plan.RunFolders(
        root=os.path.realpath(root),
        original=os.path.realpath(original) if original is not None else None,
        state=os.path.realpath(home),
        scratch=os.path.realpath(scratch),
        objects=tuple(path for path in objects if not path.startswith(within)),
    )
