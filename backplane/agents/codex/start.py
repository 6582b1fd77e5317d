"""Starts Codex's app-server for an order: its command, its environment, and the call that opens its thread.

The policy is also compiled into the agent's own settings. `agent` sends everything after the start.
"""

from __future__ import annotations

import os
from typing import Any, Final

from backplane.agents import hook
from backplane.agents.hooked import COMMAND
from backplane.agents.order import toml
from backplane.agents.start import AgentStart

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

SETTINGS: Final = {
    "effort": "model_reasoning_effort", "summary": "model_reasoning_summary", "verbosity": "model_verbosity",
    "system": "",
}  # fmt: skip
"""Settings of an order under `config.vendor.codex` → the agent's own; `system` is a parameter of its thread."""


def start(begun: AgentStart) -> list[str]:
    """Return the command for an order, and set its environment. Raises ConfigError, BackendError."""
    settings = [*QUIET]
    begun.prepare("sessions/*/*/*/*{}.jsonl*", {"CODEX_HOME": begun.config})
    if needs_hook(begun):
        settings.append(HOOK)
        begun.env[hook.SOCKET] = os.path.join(begun.state, "hooks")
    return [begun.find_program(), "app-server", *(word for setting in settings for word in ("-c", setting))]


def thread_of(begun: AgentStart) -> tuple[str, dict[str, Any]]:
    """Return the method and the parameters of the call that opens the thread."""
    asked, own_state = begun.conversation, begun.row.own_state
    own = begun.settings(tuple(SETTINGS))
    params: dict[str, Any] = {
        "cwd": begun.root,
        "approvalPolicy": "untrusted",
        # Codex reruns an allowed command outside of its own sandbox, without asking, if that blocked it: ours contains
        # the agent instead.
        "sandbox": "danger-full-access",
        "config": settings_of(begun, own),
        "model": begun.model,
        "modelProvider": None if own_state else "backplane",
        "developerInstructions": own.get("system"),
    }
    params = {name: value for name, value in params.items() if value is not None}
    if asked.wanted is not None:
        # Otherwise the answer has all earlier turns, in one line as long as the conversation.
        params |= {"threadId": asked.wanted, "excludeTurns": True}
        return "thread/resume" if asked.resume else "thread/fork", params
    return "thread/start", {**params, "ephemeral": not begun.is_kept}


def settings_of(begun: AgentStart, own: dict[str, Any]) -> dict[str, Any]:
    """Return the agent's own settings, from the policy, the order's settings for it, and the model's service."""
    policy, row = begun.run.policy, begun.row
    networked = bool(policy.profile.allow_network or policy.profile.deny_network)
    asked_first = policy.decide_tool_call("web_search", {}, root=begun.root).allowed != "allow"
    made: dict[str, Any] = {
        # Web search and `view_image` never ask for approval, so they are off if a policy rule would apply to them.
        "suppress_unstable_features_warning": True,
        "features": {**FEATURES, "view_image": not policy.profile.deny_read},
        # The user's shell profile is no part of the order, and may be slow.
        "allow_login_shell": False,
        # Commands do not need the key of the model's service.
        "shell_environment_policy": {"exclude": [row.key_env]} if row.key_env else None,
        "web_search": "disabled" if networked or asked_first else "live",
        "mcp_servers": begun.servers(headers="http_headers"),
        "model_providers": None if row.own_state else {"backplane": provider_of(begun)},
        **{theirs: own.get(ours) for ours, theirs in SETTINGS.items() if theirs},
    }
    return {name: value for name, value in made.items() if value is not None}


def provider_of(begun: AgentStart) -> dict[str, Any]:
    """Return the model's service as a provider in Codex's settings."""
    key = begun.row.key_env
    return {
        "name": "backplane",
        "base_url": begun.address,
        "wire_api": "responses",
        # Codex's retries of a stream repeat the request, too, so the two numbers would multiply.
        "request_max_retries": 0,
        "stream_max_retries": begun.row.retries,
        "supports_websockets": False,
        **({"env_key": key} if key in begun.env else {}),
    }


def needs_hook(begun: AgentStart) -> bool:
    """Return True if Codex must ask before every command; without our hook it runs some that it considers harmless.

    It must ask if a hook of the order or a user may deny a command, or if a limit on turns or cost may forbid one.
    """
    config = begun.run.order.config
    is_limited = config.max_turns is not None or config.max_budget_usd is not None
    is_asked = "pre_tool" in begun.hooks or bool(begun.run.policy.profile.require_approval_for)
    return (is_asked or is_limited) and not begun.row.own_state
