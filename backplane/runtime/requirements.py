"""Compares what an order requires with what a host says it has, and makes the order that the host gets.

Manifests and a hello come in; a refusal, the negotiation for the receipt and the order for the host come out.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio.to_thread
import msgspec

from backplane.config import Isolation, Limits, tighter
from backplane.contract import envelope as wire
from backplane.contract.canonical import Json
from backplane.contract.capability import Manifest, read_manifest
from backplane.contract.unknown import check_supported
from backplane.contract.work import OF_QUEUE, WITHOUT_ROUTER, WorkOrder
from backplane.errors import BackendError, CapabilityError, ConfigError, StoreError
from backplane.policy.capabilities import negotiate, refusal, supplied
from backplane.receipts.manifests import keep_manifest, kept_manifest, kept_since
from backplane.receipts.state import RunState
from backplane.runtime.backends import Backend
from backplane.runtime.hooks import CAPABILITY, SUBAGENT, Hook, below
from backplane.runtime.servers import with_call_limit, with_servers

if TYPE_CHECKING:
    from backplane.workspace import Workspace

EXTENSIONS: Final = ("cancel/1", "ping/1", "ask/1", "input/1", "interrupt/1", "session/1", "subagent/1")
"""Extensions that this control plane announces with every run."""

STAGE: Final = "stage/1"
"""Extension of a host that itself stages the workspace and applies the lane, as on another machine."""


class RunRequirements:
    """Compares what a run needs with what its host has, and makes the order that the host gets.

    Attributes:
        checkpoints: True if this control plane makes a checkpoint before every tool that may write.
        extensions: extensions that are announced with this run.

    Args:
        hooks: the hooks of the run.
        isolation: the least isolation that the configuration asks for; sent to another machine.

    Raises:
        PolicyError: `policy_invalid`, the order's isolation is unknown.
    """

    def __init__(self, facts: RunState, backend: Backend, hooks: tuple[Hook, ...], isolation: Isolation) -> None:
        self._facts, self._backend, self._hooks, self._given = facts, backend, hooks, facts.order
        self._key = backend.key
        self._kept: dict[str, Any] | None = None
        """The host's last stored hello; None if there is none."""
        self.extensions = (*EXTENSIONS, STAGE) if backend.remote else EXTENSIONS
        # Another machine makes its own checkpoints, as the order that it gets asks for them too.
        self.checkpoints = facts.settings.get("checkpoints") == "auto" and not backend.remote
        order = self._given
        if isinstance(route := facts.settings.get("route"), dict):  # A control plane as the host must not route again.
            order = order.with_abp("route", {name: route[name] for name in route if name in WITHOUT_ROUTER})
        if hooks:  # The host gets the tools to ask about, but not the hooks' commands.
            order = below(order, hooks)
        self._order = self._for_far(order, isolation) if backend.remote else order

    def _for_far(self, order: WorkOrder, isolation: Isolation) -> WorkOrder:
        """Return the order for another machine, without settings that only this machine knows."""
        asked = self._facts.settings
        if asked.get("backend") == self._backend.id:
            order = order.without_abp("backend")
        order = order.without_abp("remote_root").with_abp("isolation", tighter(isolation, asked.get("isolation")))
        return _at(order, str(asked["remote_root"]))

    def order_at(self, root: str) -> WorkOrder:
        """Return the order for the host; on this machine, with `root` as the root of its workspace."""
        if self._backend.remote:
            return self._order
        # A host that is a control plane must not make checkpoints too.
        kept = self._order.without_abp("checkpoints") if "checkpoints" in self._facts.settings else self._order
        return _at(kept, root)

    def check_kept(self, home: Path) -> None:
        """Refuse an order that the host's last stored hello does not satisfy. Raises CapabilityError, as `_check`."""
        self._kept = kept_manifest(home, self._key)
        if self._kept is not None:
            self._check(self.supply(read_manifest(self._kept), EXTENSIONS), home=home)

    def keep(self, home: Path, hello: wire.Hello) -> None:
        """Store a hello for the next order; a failed write is ignored."""
        with suppress(StoreError):  # Only a cache, which the run does not need.
            keep_manifest(home, self._key, hello.capabilities, self._kept)

    def supply(self, manifest: Manifest, extensions: tuple[str, ...]) -> Manifest:
        """Return a backend's capabilities, plus those that the order wants and this control plane supplies.

        Args:
            extensions: extensions that both sides have.
        """
        wanted = {requirement.capability for requirement in self._given.requirements.required}
        wanted |= {CAPABILITY[hook.event] for hook in self._hooks if hook.event in CAPABILITY}
        wanted |= {"checkpointing"} if self.checkpoints else set()
        if "ask/1" not in extensions:  # Hooks and checkpoints need asks.
            return manifest
        here = {*CAPABILITY.values(), *(() if self._backend.remote else ("checkpointing",))}
        return supplied(manifest, wanted & here)

    def _check(self, *offers: Manifest, home: Path | None = None) -> None:
        """Refuse the order unless one of the offers satisfies all of it.

        Args:
            home: the state folder with the hello that the offers are from; None for a hello of this run.

        Raises:
            CapabilityError: `capability_unsupported`.
        """
        found = negotiate(self._given.requirements, *offers)
        self._facts.added["negotiation"] = found.to_wire()
        if not found.satisfied:
            raise refusal(found, self._backend.id, kept_since(home, self._key) if home is not None else None)

    def check_hello(self, hello: wire.Hello, whole: Manifest) -> None:
        """Refuse the order unless the agent behind a host can satisfy all of it.

        Args:
            whole: the host's capabilities, plus those that this control plane supplies.

        Raises:
            BackendError: `backend_unavailable`, a host on another machine cannot stage the workspace.
            CapabilityError: `capability_unsupported`.
        """
        name = self._backend.id
        if self._backend.remote and STAGE not in hello.extensions:
            fact = f"{name!r} is marked remote, and its host does not speak {STAGE}"
            fix = "its command must end in `backplane serve`; else take `remote` off"
            raise BackendError("backend_unavailable", fact, hint=fix)
        if hello.heeds is not msgspec.UNSET:
            check_supported(self._given, hello.heeds, hello.backend.id)
        if SUBAGENT not in hello.extensions and any(hook.event == "subagent_end" for hook in self._hooks):
            fact = f"{name!r} does not report the end of sub-agents ({SUBAGENT}), as a hook for it would need"
            raise CapabilityError("capability_unsupported", fact, hint="leave it out, or choose another backend")
        asking = [f"the hook {hook.name!r}" for hook in self._hooks if hook.event in CAPABILITY]
        asking += ["checkpoints"] * self.checkpoints
        if asking and "ask/1" not in hello.extensions:
            fact = f"{name!r} does not ask before a tool runs (ask/1), as {', '.join(asking)} would need"
            raise CapabilityError("capability_unsupported", fact, hint="leave them out, or choose another backend")
        if hello.backends is msgspec.UNSET:
            self._check(whole)
            return
        named = self._facts.settings.get("backend")
        offers = [  # The host is a control plane: each of its backends that may get the order.
            read_manifest(entry["capabilities"])
            for entry in hello.backends
            if isinstance(entry.get("capabilities"), dict)
            and (entry.get("id") == named if named not in (None, name) else entry.get("ready") is True)
        ]
        self._check(*[self.supply(offer, hello.extensions) for offer in offers or [Manifest()]])

    def add_servers(self, hello: wire.Hello, limits: Limits) -> None:
        """Add the configuration's MCP servers to the order if its host can be their client, and limits to all rows.

        Raises:
            CapabilityError: `capability_unsupported`, the host cannot be their client, and one of them is required.
        """
        backend = self._backend
        if rows := backend.servers_given:
            names = [row["name"] for row in rows]
            # A control plane's `heeds` do not count, as they do not say which of its hosts can be the client.
            heeds = _heeds(hello, "mcp_servers")
            self._facts.added["mcp_servers"] = {"given": names if heeds else [], "not_given": [] if heeds else names}
            if heeds:
                self._order = with_servers(self._order, rows)
            elif required := backend.servers_required:
                fact = f"the host {hello.backend.id!r} can be no client of the MCP server {required[0]!r}"
                fix = f"choose another backend, or required = false in [mcp_servers.{required[0]}]"
                raise CapabilityError("capability_unsupported", f"{fact}, which is required", hint=fix)
        self._order = with_call_limit(self._order, min(limits.idle_s, limits.tool_s))

    async def add_instructions(self, hello: wire.Hello, workspace: Workspace) -> None:
        """Add the project's own instructions to the order, if the model behind the host does not read them itself."""
        facts = self._facts
        # The model of a replayed run is not asked again.
        if facts.replayed or facts.settings.get("project_instructions") is False:
            return
        if not _heeds(hello, "project_instructions"):
            return
        from backplane.runtime.instructions import read_instructions  # Most agents read these files themselves.

        assert facts.policy is not None
        found = await anyio.to_thread.run_sync(read_instructions, workspace.root, workspace.original, facts.policy)
        if found.files:
            facts.added["project_instructions"] = facts.clean_json(list(found.files))
            self._order = found.added_to(self._order)


def _at(order: WorkOrder, root: str) -> WorkOrder:
    return msgspec.structs.replace(order, workspace=msgspec.structs.replace(order.workspace, root=root))


def _heeds(hello: wire.Hello, setting: str) -> bool:
    """Return True if a host heeds a setting; False for a control plane, whose own hosts may differ."""
    return hello.heeds is not msgspec.UNSET and hello.backends is msgspec.UNSET and setting in hello.heeds


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
