"""Starts Codex's app-server for an order: its command, its environment, and the call that opens its thread.

The policy is also compiled into the agent's own settings. `agent` sends everything after the start.
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
"""Settings that turn off telemetry, updates, and the vendor's other programs."""

FEATURES: Final = {
    # Otherwise a failed connection is retried without end.
    "unbounded_connection_retries": False,
    # Input to an open shell would run commands without approval.
    "unified_exec_tty": False,
    # These work after the turn, or in threads of their own.
    "goals": False, "multi_agent": False,
    # It runs the user's shell profile without approval.
    "shell_snapshot": False,
    "default_mode_request_user_input": True,
}  # fmt: skip

HOOK: Final = (
    f"hooks.PreToolUse=[{{matcher='Bash|mcp__.*',hooks=[{{type='command',command={toml(COMMAND)},"
    f"timeout={hook.ANSWER_S_MAX + 40}}}]}}]"
)
"""Setting that makes Codex ask us before each command or MCP tool; before a patch it always asks."""

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
    """Return the method and the parameters of the call that opens the thread."""
    asked, own = read_conversation(run), own_settings(run, "codex", SETTINGS)
    params: dict[str, Any] = {
        "cwd": run.order.workspace.root,
        "approvalPolicy": "untrusted",
        # Codex reruns an allowed command outside of its own sandbox, without asking, if that blocked it: ours contains
        # the agent instead.
        "sandbox": "danger-full-access",
        "config": settings_of(run, options, env),
        "model": run.order.config.model or options.model,
        "developerInstructions": own.get("system"),
    }
    if not options.own_state:
        params["modelProvider"] = "backplane"
    params = {name: value for name, value in params.items() if value is not None}
    if asked.wanted is not None:
        # Otherwise the answer has all earlier turns, in one line as long as the conversation.
        params |= {"threadId": asked.wanted, "excludeTurns": True}
        return "thread/resume" if asked.resume else "thread/fork", params
    return "thread/start", {**params, "ephemeral": not (asked.keep or options.own_state)}


def settings_of(run: Given, options: AgentRow, env: dict[str, str]) -> dict[str, Any]:
    """Return the agent's own settings, from the policy, the order and the model's service."""
    own, profile = own_settings(run, "codex", SETTINGS), run.policy.profile
    networked = bool(profile.allow_network or profile.deny_network)
    asked_first = run.policy.decide_tool_call("web_search", {}, root=run.order.workspace.root).allowed != "allow"
    made: dict[str, Any] = {
        # Web search and `view_image` never ask for approval, so they are off if a policy rule would apply to them.
        "suppress_unstable_features_warning": True,
        "features": {**FEATURES, "view_image": not profile.deny_read},
        # The user's shell profile is no part of the order, and may be slow.
        "allow_login_shell": False,
        # Commands do not need the key of the model's service.
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
    """Return the model's service as a provider in Codex's settings."""
    key = options.key_env if options.key_env in env else None
    return {
        "name": "backplane",
        "base_url": asked_at(options.base_url),
        "wire_api": "responses",
        # The loop around the stream retries a failed request, too: both numbers together would multiply.
        "request_max_retries": 0,
        "stream_max_retries": options.retries,
        "supports_websockets": False,
        **({"env_key": key} if key is not None else {}),
    }


def needs_hook(run: Given, options: AgentRow) -> bool:
    """Return True if Codex must ask before every command; without the hook it runs those it takes for harmless.

    That is so if a hook of the order or a user may deny a command, or a limit on turns or cost may forbid it.
    """
    config = run.order.config
    is_limited = config.max_turns is not None or config.max_budget_usd is not None
    is_asked = "pre_tool" in hook_events(run) or bool(run.policy.profile.require_approval_for)
    return (is_asked or is_limited) and not options.own_state
