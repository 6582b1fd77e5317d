"""Defines the work order: the task of a caller, with its policy and its workspace.

Callers must give only `task`; a host always gets every member.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec

from backplane.contract.canonical import Json, print_anew, uuid_text
from backplane.contract.capability import Requirements

Lane = Literal["patch_first", "workspace_first"]
Mode = Literal["pass_through", "staged"]


class WorkspaceSpec(msgspec.Struct, frozen=True):
    """The folder that an agent works on, and which files of it.

    Attributes:
        root: Folder to work on; relative paths count from the caller's folder.
        mode: `staged` works in a copy of the folder, `pass_through` in the folder itself.
        include: Globs on paths relative to the root; empty takes everything.
        exclude: Globs on paths relative to the root that are left out; stronger than `include`.
    """

    root: str = "."
    mode: Mode = "staged"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.root, str) and "\0" in self.root:  # Other types are reported where they are checked.
            raise ValueError("`root` has a NUL character, and no path has one")


class Snippet(msgspec.Struct, frozen=True):
    name: str
    content: str


class ContextPacket(msgspec.Struct, frozen=True):
    files: tuple[str, ...] = ()
    snippets: tuple[Snippet, ...] = ()


class PolicyProfile(msgspec.Struct, frozen=True):
    """Rules on what the agent may do. Deny wins over allow; an empty allow list restricts nothing.

    Attributes:
        allowed_tools: Globs on names of tools that may run, neutral (`bash`) or the agent's own; empty lets all.
        disallowed_tools: Globs on names of tools that may not run.
        deny_read: Globs on paths, relative to the workspace or absolute, of files that may not be read.
        deny_write: Globs on paths of files that may not be made, changed or removed.
        allow_network: Hosts, `host:port` or addresses with scheme and path that may be connected to; empty lets all.
        deny_network: Hosts, `host:port` or addresses that may not be connected to; `*` is all.
        require_approval_for: Globs on names of tools that may only run after an approval.
    """

    allowed_tools: tuple[str, ...] = ()
    disallowed_tools: tuple[str, ...] = ()
    deny_read: tuple[str, ...] = ()
    deny_write: tuple[str, ...] = ()
    allow_network: tuple[str, ...] = ()
    deny_network: tuple[str, ...] = ()
    require_approval_for: tuple[str, ...] = ()


class RuntimeConfig(msgspec.Struct, frozen=True):
    """Settings of one agent: its model, its limits, and settings of its vendor and of backplane.

    Attributes:
        model: Model that the agent asks; None takes the backend's own choice.
        vendor: Free-form settings; ours live under the key `abp`.
        env: Environment of the agent. Values are secrets: they are stored as names only.
        max_budget_usd: US dollars that the agent may spend; None is no limit.
        max_turns: Answers of the model that the agent may use; None is no limit.
    """

    model: str | None = None
    vendor: dict[str, Any] = {}
    env: dict[str, str] = {}
    max_budget_usd: Annotated[float, msgspec.Meta(ge=0)] | None = None
    max_turns: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] | None = None


REPLAY: Final = "replay:"
"""Prefix of the name of a backend that replays a stored run: `replay:RUN`."""

TAGS_MAX: Final = 32
"""Maximum number of tags of one order."""
_TAG: Final = msgspec.Meta(min_length=1, max_length=200)

SETTINGS: Final[Mapping[str, Any]] = {
    "backend": str,
    "budget_tokens": Annotated[int, msgspec.Meta(ge=0, lt=2**53)],
    "checkpoints": Literal["auto"],
    "children_budget_tokens": Annotated[int, msgspec.Meta(ge=0, lt=2**53)],
    "children_budget_usd_micros": Annotated[int, msgspec.Meta(ge=0, lt=2**53)],
    "credentials": Any,
    "enforcement": Any,
    "fail_on": list[Literal["denied", "false-claims", "violations"]],
    "history": list[dict[str, Any]],
    "hooks": list[dict[str, Any]],
    "images": list[dict[str, Any]],
    "isolation": Any,
    "lenient": Any,
    "mcp_servers": list[dict[str, Any]],
    "mode": Literal["mapped", "passthrough"],
    "on_lost_worker": Literal["rerun", "fail"],
    "output_schema": dict[str, Any],
    "parent": str | dict[str, Any],
    "project_instructions": bool,
    "pure": bool,
    "remote_root": str,
    "route": dict[str, Any],
    "sampling": dict[str, Any],
    "secrets": list[str],
    "session": dict[str, Any],
    "system": str,
    "tags": Annotated[list[Annotated[str, _TAG]], msgspec.Meta(max_length=TAGS_MAX)],
    "task_text": Literal["kept", "hash"],
    "unheard": dict[str, Any],
    "wait_for_limit_s": Annotated[int, msgspec.Meta(ge=0, le=31_536_000)],
}
"""Our settings under `config.vendor.abp`, each with its type; null is the same as unset.

The type is `Any` if the code that reads the setting gives a better error.
"""


def settings_of(vendor: Mapping[str, Json]) -> dict[str, Json]:
    """Return our settings of an order, by name; a setting below `abp` overrides the flat key `abp.NAME`."""
    nested = vendor.get("abp")
    flat = {name[4:]: value for name, value in vendor.items() if name.startswith("abp.")}
    return {**flat, **nested} if isinstance(nested, dict) else flat


def tags_of(vendor: Mapping[str, Json]) -> tuple[str, ...]:
    """Return the tags of an accepted order; empty if it has none."""
    rows = settings_of(vendor).get("tags")
    return tuple(row for row in rows if isinstance(row, str)) if isinstance(rows, list | tuple) else ()


OTHERS_SETTINGS: Final = frozenset(
    {"client_mode", "client_persist", "client_session_key", "client_timeout_ms"}
    | {"dialect", "request", "source_dialect"}
)
"""Settings that the public implementation also puts below `abp`; hosts made for it may heed them."""


OF_HOST: Final = {
    "model": "config.model",
    "max_turns": "config.max_turns",
    "max_budget_usd": "config.max_budget_usd",
    "context": "context",
    "history": "config.vendor.abp.history",
    "system": "config.vendor.abp.system",
    "sampling": "config.vendor.abp.sampling",
    "images": "config.vendor.abp.images",
    "session": "config.vendor.abp.session",
    "mcp_servers": "config.vendor.abp.mcp_servers",
    "output_schema": "config.vendor.abp.output_schema",
    "mode": "config.vendor.abp.mode",
    "project_instructions": "config.vendor.abp.project_instructions",
    "wait_for_limit_s": "config.vendor.abp.wait_for_limit_s",
}
"""Name of a setting that has an effect only if the host lists it in `heeds` of its hello → its place in the order."""

OF_QUEUE: Final = ("on_lost_worker", "secrets")
"""Settings that only a queue heeds; it removes them before the run."""

WITHOUT_ROUTER: Final = ("type", "priority")
"""Members of `route` that have an effect although a backend is named: for estimates, and in a queue."""

_OF_MODEL: Final = ("history", "system", "sampling", "project_instructions")
OF_AGENT: Final = tuple(name for name in OF_HOST if name not in _OF_MODEL)
"""Settings that the host of an agent with its own conversations heeds: those of `OF_HOST` except `_OF_MODEL`."""


class WorkOrder(msgspec.Struct, frozen=True):
    """One piece of work for one agent.

    Attributes:
        task: What to do, in words; for `shell` a command.
        id: UUID of the order; a new one by default.
        lane: `patch_first` leaves the folder as it is until `apply`; `workspace_first` puts the patch in at the end.
        workspace: Folder to work on.
        context: Files and snippets that the agent reads with the task.
        policy: What the agent may do.
        requirements: What the backend must be able to do.
        config: How the agent works.

    Raises:
        ValueError: when built or decoded with an id that is not a UUID.
    """

    task: str
    id: str = msgspec.field(default_factory=lambda: str(uuid.uuid4()))
    lane: Lane = "patch_first"
    workspace: WorkspaceSpec = WorkspaceSpec()
    context: ContextPacket = ContextPacket()
    policy: PolicyProfile = PolicyProfile()
    requirements: Requirements = Requirements()
    config: RuntimeConfig = RuntimeConfig()

    def __post_init__(self) -> None:
        print_anew(self, "id", uuid_text)

    def of_host(self) -> tuple[str, ...]:
        """Return the names in `OF_HOST` of the settings that this order has; an empty value counts as unset."""
        config, context = self.config, self.context
        asked = {
            "model": config.model is not None,
            "max_turns": config.max_turns is not None,
            "max_budget_usd": config.max_budget_usd is not None,
            "context": bool(context.files or context.snippets),
            **{name: bool(self.abp(name)) for name in ("history", "system", "sampling", "images", "session")},
            "mcp_servers": bool(self.abp("mcp_servers")),
            "output_schema": self.abp("output_schema") is not None,
            "mode": self.abp("mode") == "passthrough",
            "project_instructions": self.abp("project_instructions") is False,
            "wait_for_limit_s": bool(self.abp("wait_for_limit_s")),
        }
        return tuple(name for name, is_asked in asked.items() if is_asked)

    def abp(self, name: str, default: Json = None) -> Json:
        """Return one of our settings under `config.vendor.abp`, nested or as the flat key `abp.NAME`."""
        return settings_of(self.config.vendor).get(name, default)

    def without_abp(self, name: str) -> WorkOrder:
        """Return this order without one of our settings; the same order if it does not have the setting."""
        vendor = {key: kept for key, kept in self.config.vendor.items() if key != f"abp.{name}"}
        if isinstance(nested := vendor.get("abp"), dict):
            vendor["abp"] = {key: kept for key, kept in nested.items() if key != name}
        if vendor == self.config.vendor:
            return self
        replace = msgspec.structs.replace
        return replace(self, config=replace(self.config, vendor=vendor))

    @property
    def tags(self) -> tuple[str, ...]:
        """Words by which the run can be found, as `KEY=VALUE` or alone."""
        return tags_of(self.config.vendor)

    def with_abp(self, name: str, value: Json) -> WorkOrder:
        """Return this order with one of our settings, which replaces an earlier value, nested or flat."""
        vendor = self.without_abp(name).config.vendor
        nested = vendor.get("abp")
        own = {**(nested if isinstance(nested, dict) else {}), name: value}
        replace = msgspec.structs.replace
        return replace(self, config=replace(self.config, vendor={**vendor, "abp": own}))
