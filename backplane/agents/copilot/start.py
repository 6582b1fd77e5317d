"""Starts Copilot's headless server for an order: its command and environment.

`agent` sends everything after the start.
"""

from __future__ import annotations

import os
from typing import Final

from backplane.agents.order import without_version
from backplane.agents.start import AgentStart
from backplane.errors import ConfigError

ARGUMENTS: Final = ("--headless", "--stdio", "--no-auto-update", "--log-level", "error")
QUIET: Final = {"COPILOT_AUTO_UPDATE": "false", "NO_COLOR": "1"}
"""Variables that turn off updates and colours."""


def start(begun: AgentStart) -> list[str]:
    """Return the command for an order, and set its environment. Raises ConfigError, BackendError."""
    row, quiet, own = begun.row, dict(QUIET), {"COPILOT_HOME": begun.config}
    if begun.config is not None:
        # It unpacks 235 MB at its start. A shared folder would let one run change the program of the next.
        quiet["COPILOT_CACHE_HOME"] = os.path.join(begun.state, "cache")
    if row.base_url is not None:
        if begun.model is None:
            fix = "name it in the order (config.model, --model), or with options = {model = …}"
            raise ConfigError("config_invalid", f"no model is named, and {row.base_url} has no default", hint=fix)
        # Set in addition to the session's members: without these variables it looks for its own service first.
        quiet["COPILOT_OFFLINE"] = "true"
        own |= {"COPILOT_PROVIDER_BASE_URL": address_of(begun), "COPILOT_PROVIDER_TYPE": row.service}
        own |= {"COPILOT_PROVIDER_API_KEY": begun.key, "COPILOT_MODEL": begun.model}
    begun.prepare("session-state/{}", own, quiet)
    login = () if row.own_state or row.base_url is None else ("--no-auto-login",)
    return [begun.find_program(), *ARGUMENTS, *login]


def address_of(begun: AgentStart) -> str | None:
    """Return the address of the model's service; None for the agent's own service.

    For Anthropic's protocol, the address has no version, because the agent adds it.
    """
    return without_version(begun.address) if begun.row.service == "anthropic" else begun.address
