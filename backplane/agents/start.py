"""Prepares the start of an agent's program for one order: folders for its state, its environment, its path.

A vendor's `start` completes an `AgentStart` and returns the command; the vendor's `agent` uses it during the run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from backplane.agents.order import (
    ID,
    RunSpec,
    asked_at,
    budget_of,
    hook_events,
    own_settings,
    prompt_of,
    read_conversation,
    server_rows,
    shape_of,
    with_images,
)
from backplane.agents.rows import KEY_PROXY, STATE, AgentRow
from backplane.contract.canonical import Json
from backplane.errors import BackendError, ConfigError
from backplane.upstream.cost import read_price

if TYPE_CHECKING:
    from backplane.host import HostRun
    from backplane.process.child import Child

KEPT: Final = "conversations/{}"
"""Pattern of conversations for an agent whose own files do not name them, see `AgentStart.keep_name`."""


class AgentStart:
    """The start of one program.

    Args:
        row: the agent's row, overridden by a backend's options.
        state: an empty folder for this run alone, which is removed at its end.

    Raises:
        BackendError: `capability_unsupported`, the order needs more than this agent can do.
        ConfigError: `config_invalid`.
    """

    child: Child
    """The program; set once it runs."""

    def __init__(self, run: HostRun, row: AgentRow, state: str) -> None:
        self.run, self.row, self.state = run, row, state
        self.root, self.model = run.order.workspace.root, run.order.config.model or row.model
        self.conversation, self.hooks = read_conversation(run), hook_events(run)
        self.env: dict[str, str] = {}
        kept = os.environ.get(STATE) if self.conversation.kept else None
        self.config = None if row.own_state else os.path.join(kept or state, "config")
        """Folder of the agent's configuration and conversations; None for the user's own."""
        needs = {
            "config.vendor.abp.session": self.conversation.kept and not row.sessions,
            "a hook after tools": "post_tool" in self.hooks and "hooks_post_tool_use" not in row.capabilities,
        }
        for name, has_none in needs.items():
            if has_none:
                fact = f"{name} would have no effect: this agent has nothing for it"
                raise BackendError("capability_unsupported", fact, hint="leave it out, or take another backend")

    @property
    def is_kept(self) -> bool:
        """True if the agent keeps the conversation after the run."""
        return self.conversation.kept or self.row.own_state

    @property
    def address(self) -> str | None:
        """Address for model requests: the key proxy's if there is one, else the row's."""
        return asked_at(self.row.base_url)

    @property
    def key(self) -> str | None:
        """Key of the model's service, from the environment; None if it is not set."""
        return os.environ.get(self.row.key_env or "")

    def settings(self, known: tuple[str, ...]) -> dict[str, Any]:
        """Return the order's settings for this agent, see `order.own_settings`. Raises ConfigError."""
        return own_settings(self.run, self.row.drive, known)

    def servers(self, **form: Any) -> dict[str, dict[str, Any]]:
        """Return the MCP servers in the form of the agent's client, see `order.server_rows`. Raises ConfigError."""
        return server_rows(self.run, self.row.mcp_servers, **form)

    def spec(self, block: Callable[[str, str], Json]) -> RunSpec:
        """Return the order for an agent that gets a schema as text in the prompt; the host enforces the limits.

        Args:
            block: see `order.with_images`.

        Raises:
            BackendError: `backend_context_length`, or see `order.with_images`.
            ConfigError: `config_invalid`.
        """
        shape, row = shape_of(self.run), self.row
        words = "\n\n".join([prompt_of(self.run), *([shape.request()] if shape is not None else [])])
        return RunSpec(
            prompt=with_images(self.run, words, block),
            silence_s=row.silence_s,
            conversation=self.conversation,
            shape=shape,
            price=None if row.prices is None else read_price(row.prices, "options.prices"),
            labels=row.labels,
            budget_micros=budget_of(self.run),
            turns_max=self.run.order.config.max_turns,
        )

    # Steps of the start -----------------------------------------------------------------------------------------------

    def prepare(
        self, conversations: str, own: Mapping[str, str | None] | None = None, quiet: Mapping[str, str] | None = None
    ) -> None:
        """Make the folders, check that the requested conversation exists, and set the environment.

        The environment has the user's variables, overridden by ours, then by the order's.

        Args:
            conversations: pattern of a conversation's file below the configuration, with `{}` for its id.
            own: variables that override the user's; None leaves one unchanged.
            quiet: variables that are set only if the user has not set them.

        Raises:
            ConfigError: `config_invalid`, there is no such conversation.
            BackendError: `capability_unsupported`, there is no folder for conversations.
        """
        temporary, asked = os.path.join(self.state, "tmp"), self.conversation
        os.mkdir(temporary)
        if self.config is not None:
            if asked.kept and STATE not in os.environ:
                raise BackendError("capability_unsupported", "there is no folder that conversations could be kept in")
            os.makedirs(self.config, exist_ok=True)
            if asked.wanted is not None and not any(Path(self.config).glob(conversations.format(asked.wanted))):
                fix = 'run with config.vendor.abp.session = {"keep": true} first; its event names the id'
                raise ConfigError("config_invalid", f"no conversation {asked.wanted} is kept here", hint=fix)
        ours = {name: value for name, value in (own or {}).items() if value is not None}
        users = {name: value for name, value in os.environ.items() if name not in (STATE, KEY_PROXY)}
        self.env = {**(quiet or {}), **users, "TMPDIR": temporary, **ours, **self.run.order.config.env}

    def find_program(self) -> str:
        """Return the program's path. Raises BackendError: `backend_unavailable`, it is not found."""
        row = self.row
        # A relative folder of PATH could hold a program of the workspace.
        folders = filter(os.path.isabs, self.env.get("PATH", os.defpath).split(os.pathsep))
        path = shutil.which(row.program, path=os.pathsep.join(folders))
        if path is None:
            fix = f"install it: {row.install}" if row.install else 'name its path: options = { program = "PATH" }'
            raise BackendError("backend_unavailable", f"{row.program} is not found or not executable", hint=fix)
        return path

    def require_same_folder(self) -> None:
        """Refuse to continue a conversation in another folder than the one that `keep_name` stored.

        Raises:
            BackendError: `capability_unsupported`, the run is in a copy, which is removed after it.
            ConfigError: `config_invalid`, the run is in another folder.
        """
        asked = self.conversation
        if asked.kept and self.run.order.workspace.mode != "pass_through":
            fact = (
                "this agent's conversations stay with the folder they began in, and a copy of it is gone after the run"
            )
            raise BackendError("capability_unsupported", fact, hint="work in place (mode pass_through)")
        if asked.wanted is not None and self.config is not None:
            began = Path(self.config, KEPT.format(asked.wanted)).read_text(encoding="utf-8")
            if began != self.root:
                fact = f"the conversation {asked.wanted} began in {began}, and stays there"
                raise ConfigError("config_invalid", fact)

    def keep_name(self, id: str) -> None:
        """Store a kept conversation's id and folder, for an agent whose own files do not have them.

        Raises:
            BackendError: `capability_unsupported`, an order could not name this id.
        """
        if not self.conversation.kept or self.config is None:
            return
        if not ID.fullmatch(id):
            raise BackendError("capability_unsupported", f"the agent's conversation has an odd id: {id[:80]!r}")
        path = Path(self.config, KEPT.format(id))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.root, encoding="utf-8")
