"""Compares what an order requires with what a host says it has.

Manifests and a hello come in; a refusal, the negotiation for the receipt and the order as the host gets it come out.
This module uses no connections, files or clocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from backplane.config import Limits
from backplane.contract import envelope as wire
from backplane.contract.canonical import Json
from backplane.contract.capability import Manifest, read_manifest
from backplane.contract.unheard import check_heeded
from backplane.contract.work import OF_QUEUE, WITHOUT_ROUTER, WorkOrder
from backplane.errors import CapabilityError, ConfigError
from backplane.policy.capabilities import negotiate, refusal, supplied
from backplane.receipts.build import RunState
from backplane.runtime.backends import Backend, ProcessBackend
from backplane.runtime.hooks import CAPABILITY, SUBAGENT, Hook, below
from backplane.runtime.servers import with_call_limit, with_servers

if TYPE_CHECKING:
    from backplane.runtime.instructions import ProjectInstructions

EXTENSIONS: Final = ("cancel/1", "ping/1", "ask/1", "input/1", "interrupt/1", "session/1", "subagent/1")
"""Extensions that this control plane announces with every run."""


class RunRequirements:
    """Compares what a run needs with what its host and backend have.

    Args:
        backend_id: the backend's name on this machine.
        hooks: the hooks of the run.
        remote: True if the agent works on another machine.
    """

    def __init__(self, facts: RunState, backend_id: str, hooks: tuple[Hook, ...], *, remote: bool) -> None:
        self._facts = facts
        self._order = facts.order
        self._backend_id = backend_id
        self._hooks = hooks
        self._remote = remote
        # Another machine makes its own checkpoints, as the order that it gets asks for them too.
        self.checkpoints = facts.settings.get("checkpoints") == "auto" and not remote
        """True if this control plane makes a checkpoint before every tool that may write."""
        self.order = facts.order
        """The order to send; `at` and `Remote` set its root."""
        if isinstance(route := facts.settings.get("route"), dict):  # A control plane as the host must not route again.
            kept = {name: value for name, value in route.items() if name in WITHOUT_ROUTER}
            self.order = self.order.with_abp("route", kept)
        if hooks:  # The host gets the tools to ask about, but not the hooks' commands.
            self.order = below(self.order, hooks)

    def give_servers(self, hello: wire.Hello, backend: Backend, limits: Limits) -> None:
        """Add the configuration's MCP servers to the order if its host can be their client, and limits to all rows.

        Raises:
            CapabilityError: `capability_unsupported`, the host cannot be their client, and one of them is required.
        """
        rows = backend.servers_given if isinstance(backend, ProcessBackend) and not self._remote else ()
        if isinstance(backend, ProcessBackend) and rows:
            # A control plane's `heeds` do not count, as they do not say which of its hosts can be the client.
            heeded = hello.heeds if hello.heeds is not msgspec.UNSET and hello.backends is msgspec.UNSET else ()
            heeds, names = "mcp_servers" in heeded, [row["name"] for row in rows]
            self._facts.added["mcp_servers"] = {"given": names if heeds else [], "not_given": [] if heeds else names}
            if required := () if heeds else backend.servers_required:
                server = f"the MCP server {required[0]!r}, which is required"
                fact = f"the host {hello.backend.id!r} can be no client of {server}"
                fix = f"choose another backend, or required = false in [mcp_servers.{required[0]}]"
                raise CapabilityError("capability_unsupported", fact, hint=fix)
            self.order = with_servers(self.order, rows if heeds else ())
        self.order = with_call_limit(self.order, min(limits.idle_s, limits.tool_s))

    def needs_instructions(self, hello: wire.Hello) -> bool:
        """Return True if the host's model gets the project's own instructions from this control plane."""
        # A control plane as the host adds them itself, and the model of a replayed run is not asked again.
        if hello.heeds is msgspec.UNSET or hello.backends is not msgspec.UNSET or self._facts.replayed:
            return False
        return "project_instructions" in hello.heeds and self._facts.settings.get("project_instructions") is not False

    def give_instructions(self, found: ProjectInstructions) -> None:
        """Add the project's own instructions to the order, and name their files in the receipt."""
        if found.files:
            self._facts.added["project_instructions"] = self._facts.clean_json(list(found.files))
            self.order = found.added_to(self.order)

    def at(self, root: str) -> WorkOrder:
        """Return the order for a host on this machine, with `root` as the root of its workspace."""
        sent = self.order
        if "checkpoints" in self._facts.settings:  # A host that is a control plane must not make checkpoints too.
            sent = sent.without_abp("checkpoints")
        return msgspec.structs.replace(sent, workspace=msgspec.structs.replace(sent.workspace, root=root))

    def supply(self, manifest: Manifest, extensions: tuple[str, ...]) -> Manifest:
        """Return a backend's capabilities, plus those that the order wants and this control plane supplies.

        Args:
            extensions: extensions that both sides have.
        """
        wanted = {requirement.capability for requirement in self._order.requirements.required}
        wanted |= {CAPABILITY[hook.event] for hook in self._hooks if hook.event in CAPABILITY}
        wanted |= {"checkpointing"} if self.checkpoints else set()
        if "ask/1" not in extensions:  # Hooks and checkpoints need asks.
            return manifest
        here = {*CAPABILITY.values(), *(() if self._remote else ("checkpointing",))}
        return supplied(manifest, wanted & here)

    def check(self, *offers: Manifest, kept_since: str | None = None) -> None:
        """Refuse the order unless one of the offers satisfies all of it.

        Args:
            kept_since: the time of the stored hello that the offers are from; None for a hello of this run.

        Raises:
            CapabilityError: `capability_unsupported`.
        """
        found = negotiate(self._order.requirements, *offers)
        self._facts.added["negotiation"] = found.to_wire()
        if not found.satisfied:
            raise refusal(found, self._backend_id, kept_since)

    def check_hello(self, hello: wire.Hello, whole: Manifest) -> None:
        """Refuse the order unless the agent behind a host can satisfy all of it.

        Args:
            whole: the host's capabilities, plus those that this control plane supplies.

        Raises:
            CapabilityError: `capability_unsupported`.
        """
        if hello.heeds is not msgspec.UNSET:
            check_heeded(self._order, hello.heeds, hello.backend.id)
        if SUBAGENT not in hello.extensions and any(hook.event == "subagent_end" for hook in self._hooks):
            fact = (
                f"{self._backend_id!r} does not report the end of sub-agents ({SUBAGENT}), as a hook for it would need"
            )
            raise CapabilityError("capability_unsupported", fact, hint="leave it out, or choose another backend")
        asking = [f"the hook {hook.name!r}" for hook in self._hooks if hook.event in CAPABILITY]
        asking += ["checkpoints"] * self.checkpoints
        if asking and "ask/1" not in hello.extensions:
            fact = f"{self._backend_id!r} does not ask before a tool runs (ask/1), as {', '.join(asking)} would need"
            raise CapabilityError("capability_unsupported", fact, hint="leave them out, or choose another backend")
        if hello.backends is msgspec.UNSET:
            self.check(whole)
            return
        named = self._facts.settings.get("backend")
        offers = [  # The host is a control plane: each of its backends that may get the order.
            read_manifest(entry["capabilities"])
            for entry in hello.backends
            if isinstance(entry.get("capabilities"), dict)
            and (entry.get("id") == named if named not in (None, self._backend_id) else entry.get("ready") is True)
        ]
        self.check(*[self.supply(offer, hello.extensions) for offer in offers or [Manifest()]])


def check_place(settings: Mapping[str, Json], *, remote: bool, routed: bool) -> None:
    """Refuse settings of an order that have no effect in its run.

    Args:
        settings: members of `config.vendor.abp` in the order.
        remote: True if the agent works on another machine.
        routed: True if the router chose the backend.

    Raises:
        ConfigError: `config_invalid`.
    """
    root, route = settings.get("remote_root"), settings.get("route")
    if remote and root is None:
        fact = "the backend works on another machine, and the order names no folder there"
        raise ConfigError("config_invalid", fact, hint="set config.vendor.abp.remote_root to a folder of that machine")
    of_queue = [name for name in OF_QUEUE if settings.get(name) is not None]
    idle = dict.fromkeys(of_queue, "only a queue does that: backplane queue submit")
    if root is not None and not remote:
        idle["remote_root"] = "it is for a backend that is marked remote"
    if route is not None and not routed:
        from backplane.routing.task import read_route  # Most orders have no `route`.

        said = route if isinstance(route, dict) else {}
        read_route({**said, "preference": None} if said else route)
        if asked := [name for name, value in said.items() if value is not None and name not in WITHOUT_ROUTER]:
            idle[f"route ({', '.join(asked)})"] = "the router is not asked where a backend is named"
    if idle:
        fact = "; ".join(f"config.vendor.abp.{name} has no effect here: {why}" for name, why in idle.items())
        raise ConfigError("config_invalid", fact, hint="leave it out")
