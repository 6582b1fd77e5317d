"""Codex's app-server for an order: its command and environment, and what opens its thread.

The policy is compiled into its own settings as well. What is said to it while it runs is `agent`'s affair.
"""

from __future__ import annotations

import os
from typing import Any, Final

from backplane.agents import hook
from backplane.agents.hooked import COMMAND
from backplane.agents.order import (
    asked_at,
    environment_of,
    found,
    hook_events,
    own_settings,
    place_of,
    read_conversation,
    require_able,
    server_rows,
    toml,
)
from backplane.agents.program import Started
from backplane.agents.rows import AgentRow
from backplane.host import Given

QUIET: Final = (
    "check_for_update_on_startup=false", "analytics.enabled=false", "features.apps=false", "features.plugins=false",
    "features.daemon_auto_start=false",
)  # fmt: skip
"""No telemetry, no update, nothing of other programs of the vendor."""

FEATURES: Final = {
    # Tried again for ever otherwise.
    "unbounded_connection_retries": False,
    # A shell that reads its commands from us would run them unasked.
    "unified_exec_tty": False,
    # Work that goes on after the turn, or in threads of its own.
    "goals": False, "multi_agent": False,
    # It runs the user's profile beside the work, unasked.
    "shell_snapshot": False,
    "default_mode_request_user_input": True,
}  # fmt: skip

HOOK: Final = (
    f"hooks.PreToolUse=[{{matcher='Bash|mcp__.*',hooks=[{{type='command',command={toml(COMMAND)},"
    f"timeout={hook.ANSWER_S_MAX + 40}}}]}}]"
)
"""The setting that makes it ask us before a command or a server's tool; a patch it asks about by itself."""

SETTINGS: Final = ("effort", "summary", "system", "verbosity")
"""Settings of an order under `config.vendor.codex`."""


def start(options: AgentRow, run: Given, state: str) -> Started:
    """Return the command and environment for an order. Raises ConfigError, BackendError."""
    require_able(run, options)
    place = place_of(run, state, own=options.own_state, conversations="sessions/*/*/*/*{}.jsonl*")
    env = environment_of(run, place, {"CODEX_HOME": place.config})
    program, settings = found(options.program, options.install, env), [*QUIET]
    if needs_hook(run, options):
        settings.append(HOOK)
        env[hook.SOCKET] = os.path.join(state, "hooks")
    return (program, "app-server", *(word for setting in settings for word in ("-c", setting))), env


def thread_of(run: Given, options: AgentRow, env: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """The call that opens the thread, and the order in it."""
    asked, own = read_conversation(run), own_settings(run, "codex", SETTINGS)
    params: dict[str, Any] = {
        "cwd": run.order.workspace.root,
        "approvalPolicy": "untrusted",
        # What its own stops is run again outside of it, unasked, once it was allowed: the isolation around us holds.
        "sandbox": "danger-full-access",
        "config": settings_of(run, options, env),
        "model": run.order.config.model or options.model,
        "developerInstructions": own.get("system"),
    }
    if not options.own_state:
        params["modelProvider"] = "backplane"
    params = {name: value for name, value in params.items() if value is not None}
    if asked.wanted is not None:
        # The earlier turns would come in one line as long as the whole conversation.
        params |= {"threadId": asked.wanted, "excludeTurns": True}
        return "thread/resume" if asked.resume else "thread/fork", params
    return "thread/start", {**params, "ephemeral": not (asked.keep or options.own_state)}


def settings_of(run: Given, options: AgentRow, env: dict[str, str]) -> dict[str, Any]:
    """The policy and the model's service in the agent's own settings."""
    own, profile = own_settings(run, "codex", SETTINGS), run.policy.profile
    networked = bool(profile.allow_network or profile.deny_network)
    asked_first = run.policy.decide_tool_call("web_search", {}, root=run.order.workspace.root).allowed != "allow"
    made: dict[str, Any] = {
        # Asked of nobody: the search runs at the model's service, and pictures are read by the agent itself.
        "suppress_unstable_features_warning": True,
        "features": {**FEATURES, "view_image": not profile.deny_read},
        # A user's profile is no part of the order, and may take its time.
        "allow_login_shell": False,
        # Its commands need no key of its model's service.
        "shell_environment_policy": {"exclude": [options.key_env]} if options.key_env else None,
        "web_search": "disabled" if networked or asked_first else "live",
        "mcp_servers": server_rows(run, options.mcp_servers, headers="http_headers"),
        "model_reasoning_effort": own.get("effort"),
        "model_reasoning_summary": own.get("summary"),
        "model_verbosity": own.get("verbosity"),
    }
    if not options.own_state:
        made["model_providers"] = {"backplane": provider_of(options, env)}
    return {name: value for name, value in made.items() if value is not None}


def provider_of(options: AgentRow, env: dict[str, str]) -> dict[str, Any]:
    """The model's service, as the program reads it."""
    key = options.key_env if options.key_env in env else None
    return {
        "name": "backplane",
        "base_url": asked_at(options.base_url),
        "wire_api": "responses",
        # A request that failed is asked again by the loop around the stream: together they would multiply.
        "request_max_retries": 0,
        "stream_max_retries": options.retries,
        "supports_websockets": False,
        **({"env_key": key} if key is not None else {}),
    }


def needs_hook(run: Given, options: AgentRow) -> bool:
    """Return True if each command has to be asked about: Codex runs those that it holds for harmless unasked.

    A hook of the order may refuse one, a person may, and after the last turn or dollar no further one may run.
    """
    config = run.order.config
    is_limited = config.max_turns is not None or config.max_budget_usd is not None
    is_asked = "pre_tool" in hook_events(run) or bool(run.policy.profile.require_approval_for)
    return (is_asked or is_limited) and not options.own_state
