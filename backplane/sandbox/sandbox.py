"""Checks the demands on one host's sandbox before a start, and plans the sandbox once the folders are known."""

from __future__ import annotations

import os
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import msgspec

from backplane.config import Isolation
from backplane.contract.canonical import Json
from backplane.policy.rules import Policy
from backplane.policy.urls import network_rules
from backplane.process.child import Child, Ready, open_child
from backplane.process.launch import Cage, StartCommand
from backplane.sandbox import credentials, demands, landlock, mounts, plan
from backplane.sandbox.credentials import within
from backplane.sandbox.labels import Held, label
from backplane.sandbox.probe import MOUNTS, Probe

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
        """Plan the sandbox of a command. Blocking; searches the workspace if the policy has rules on files.

        Args:
            writable: absolute paths besides the workspace that the host may change, such as its own state.
            endpoints: targets to which the host may always connect, whatever the rules on the network.
            servers: MCP servers that the host's agent is to start.
            agent: path of the program that the host is to start.

        Raises:
            CapabilityError: `capability_unsupported`, the system cannot enforce a rule that the order wants enforced.
            PolicyError: `policy_invalid`, an endpoint of the backend cannot be read.
        """
        if endpoints:
            network_rules(endpoints)
        found, profile, root = self._found, self._policy.profile, folders.root
        assert found is not None, "admitted before"
        own = tuple(path for path in writable if os.path.exists(path))
        networked = bool(profile.allow_network or profile.deny_network)
        covered, stores = mounts.Masks(), credentials.Covered()
        wrapper: tuple[str, ...] = ()
        private: tuple[str, ...] = ()
        if found.bubblewrap.usable:
            private = plan.private_folders({root, *own})
            originals = (folders.original,) if folders.original else ()
            homes = credentials.homes_of(command.env.get("HOME"))
            given = set(command.env.values())
            stores = credentials.cover(root, originals, own, homes, self._open_stores, given)
            covered = mounts.work_out(profile, root, originals, homes, stores)
            network = ("--unshare-net",) if networked and found.network.usable else ()
            system = MOUNTS if "/" not in (root, *own) else ("--bind", *MOUNTS[1:])
            options = plan.mount_options(folders, command, servers, own, private, agent)
            wrapper = (*found.command, *network, *system, *options, *covered.options, "--")
        kept = (*plan.DEVICES, root, *own, *(private or (folders.scratch,)), folders.scratch)
        interface = found.landlock_version
        # The system counts processes for an ordinary user's namespace, but not for root.
        is_counted = bool(wrapper) and os.geteuid() != 0
        held = Held(
            isolation=self._isolation,
            found=found,
            profile=profile,
            writable=(root, *own),
            missing=tuple(path for path in writable if path not in own),
            masks=covered,
            stores=stores,
            private=bool(private),
            state_open=any(within(folders.state, path) for path in (root, *own)),
            processes_max=plan.PROCESSES_MAX if is_counted else None,
        )
        confined = landlock.rules(interface, list(kept)) if interface else None
        limits = plan.limits(counted=is_counted) if self._isolation != "off" else ()
        controls_network = networked and (found.network.usable or interface >= landlock.NETWORK_SINCE)
        planned = plan.Contained(
            cage=Cage(wrapper=wrapper, landlock=confined, limits=limits),
            env={"TMPDIR": plan.PRIVATE[0] if plan.PRIVATE[0] in private else folders.scratch},
            policy=self._policy if controls_network else None,
            endpoints=endpoints,
            interface=interface,
            writable=kept,
            label=label(held),
            hidden_servers=dict(plan.hidden_servers(folders, servers, own, covered)) if wrapper else {},
            gaps=held.gaps(),
            uncovered=covered.uncovered,
            shortfall=held.shortfall(),
        )
        demands.check_plan(self._isolation, self._demands, profile, planned)
        return planned

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
