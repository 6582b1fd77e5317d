"""Starts Claude Code for an order: its command, its environment, and its settings, which repeat the policy.

`agent` sends everything after the start.
"""

from __future__ import annotations

import os
from typing import Any, Final

import msgspec

from backplane.agents.order import without_version
from backplane.agents.start import AgentStart
from backplane.errors import ConfigError

TOOLS: Final = {
    "Read": "read_file", "Write": "write_file", "Edit": "edit_file", "Bash": "bash", "Glob": "glob", "Grep": "grep",
    "WebFetch": "web_fetch", "WebSearch": "web_search",
}  # fmt: skip
OFFERED: Final = (*TOOLS, "AskUserQuestion", "NotebookEdit", "Skill", "Task", "TaskStop")
"""The agent's tools for work within one run; tools for schedules or other windows are left out."""
ALIASES: Final = {**TOOLS, "NotebookEdit": "edit_file", "MultiEdit": "edit_file"}

QUIET: Final = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1", "CLAUDE_CODE_EMIT_SESSION_STATE_EVENTS": "1",
    "CLAUDE_CODE_ADDITIONAL_DIRECTORIES_CLAUDE_MD": "1",
}  # fmt: skip
"""Variables that turn off telemetry and updates, turn on reports of the agent's state, and let it read the workspace's
CLAUDE.md without the workspace's settings."""

ARGUMENTS: Final = (
    "-p", "--output-format", "stream-json", "--verbose", "--include-partial-messages", "--input-format", "stream-json",
    "--permission-prompt-tool", "stdio", "--strict-mcp-config",
)  # fmt: skip
MIGRATED: Final = {
    "migrationVersion": 15, "opusProMigrationComplete": True, "hasResetAutoModeOptInForDefaultOffer": True,
}  # fmt: skip
"""Settings that the program writes into a new folder at its first start; with them it starts some 60 ms faster."""
SETTINGS: Final = {"effort": "--effort", "system": "--append-system-prompt", "fallback_model": "--fallback-model"}
"""Settings of an order under `config.vendor.claude` → the program's argument."""
EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
"""Efforts that the program knows; it ignores any other value and only logs it."""


def start(begun: AgentStart) -> list[str]:
    """Return the command for an order, and set its environment. Raises ConfigError, BackendError."""
    own = {
        **QUIET,
        "CLAUDE_CODE_TMPDIR": os.path.join(begun.state, "tmp"),
        "CLAUDE_CONFIG_DIR": begun.config,
        "ANTHROPIC_BASE_URL": without_version(begun.address),
        "ANTHROPIC_API_KEY": begun.key,
    }
    begun.prepare("projects/*/{}.jsonl", own)
    begun.env.pop("CLAUDECODE", None)
    if begun.config is not None and not os.path.exists(os.path.join(begun.config, ".claude.json")):
        write(begun.config, ".claude.json", MIGRATED)
    return [begun.find_program(), *arguments(begun)]


def arguments(begun: AgentStart) -> list[str]:
    """Return the program's arguments for the order."""
    order, asked, own = begun.run.order, begun.conversation, begun.settings(tuple(SETTINGS))
    if own.get("effort") not in (None, *EFFORTS):
        fact = f"config.vendor.claude.effort is {own['effort'][:80]!r}"
        raise ConfigError("config_invalid", fact, hint=f"known are {', '.join(EFFORTS)}")
    servers = begun.servers(local={"type": "stdio"}, remote={"type": "http"})
    schema = order.abp("output_schema")
    given = {
        "--tools": ",".join(offered(begun)),
        "--settings": write(begun.state, "settings.json", settings_of(begun)),
        # The workspace's own settings could start programs without approval.
        "--setting-sources": "user",
        "--add-dir": begun.root,
        "--mcp-config": write(begun.state, "servers.json", {"mcpServers": servers}) if servers else None,
        "--model": begun.model,
        "--max-turns": order.config.max_turns,
        "--max-budget-usd": order.config.max_budget_usd,
        "--json-schema": None if schema is None else msgspec.json.encode(schema).decode(),
        "--resume": asked.wanted,
        **{SETTINGS[name]: value for name, value in own.items()},
    }
    made = [*ARGUMENTS, *(word for name, value in given.items() if value is not None for word in (name, str(value)))]
    made += ["--fork-session"] if asked.fork else []
    return made if begun.is_kept else [*made, "--no-session-persistence"]


def offered(begun: AgentStart) -> list[str]:
    """Return the tools to offer to the model: all except those that the policy forbids by name."""
    policy, by_name = begun.run.policy, ("allowed_tools", "disallowed_tools")
    rulings = [(tool, policy.decide_tool_call(tool, {}, root=begun.root, aliases=ALIASES)) for tool in OFFERED]
    return [tool for tool, one in rulings if one.allowed != "deny" or one.rule is None or one.rule.name not in by_name]


def settings_of(begun: AgentStart) -> dict[str, Any]:
    """Return the policy as the agent's own settings: a second check only, as its patterns differ from ours."""
    profile = begun.run.policy.profile
    deny = [f"Read({pattern})" for pattern in profile.deny_read]
    deny += [f"Edit({pattern})" for pattern in profile.deny_write]
    deny += [f"WebFetch(domain:{host})" for host in profile.deny_network if host.replace(".", "").isalnum()]
    # Hook commands in settings would run without approval; the hooks of `initialize` are not disabled by this.
    # Its own sandbox stays off: if it is not available, the agent silently omits it, so we could not rely on it.
    return {"disableAllHooks": True, "permissions": {"deny": deny}, "sandbox": {"enabled": False}}


def write(folder: str, name: str, value: dict[str, Any]) -> str:
    """Write JSON into a file of the agent's state, and return its path."""
    path = os.path.join(folder, name)
    with open(path, "wb") as file:
        file.write(msgspec.json.encode(value))
    return path
