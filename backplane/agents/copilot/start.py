"""Starts Copilot's headless server for an order: its command and environment.

`agent` sends everything after the start.
"""

from __future__ import annotations

import os
from typing import Final

from backplane.agents.order import asked_at, environment_of, found, place_of, without_version
from backplane.agents.program import Started
from backplane.agents.rows import AgentRow
from backplane.errors import ConfigError
from backplane.host import Given

ARGUMENTS: Final = ("--headless", "--stdio", "--no-auto-update", "--log-level", "error")
QUIET: Final = {"COPILOT_AUTO_UPDATE": "false", "NO_COLOR": "1"}
"""Variables that turn off updates and colours."""


def start(options: AgentRow, run: Given, state: str) -> Started:
    """Return the command and environment for an order. Raises ConfigError, BackendError."""
    place, quiet = place_of(run, state, own=options.own_state, conversations="session-state/{}"), dict(QUIET)
    if place.config is not None:
        # It unpacks 235 MB at its start. A shared folder would let one run change the program of the next.
        quiet["COPILOT_CACHE_HOME"] = os.path.join(place.state, "cache")
    own = {"COPILOT_HOME": place.config}
    if options.base_url is not None:
        # Set in addition to the session's members: without these variables it looks for its own service first.
        quiet["COPILOT_OFFLINE"] = "true"
        own |= {"COPILOT_PROVIDER_BASE_URL": address_of(options), "COPILOT_PROVIDER_TYPE": options.service}
        own |= {"COPILOT_MODEL": model_of(run, options)}
        own |= {"COPILOT_PROVIDER_API_KEY": os.environ.get(options.key_env or "")}
    env = environment_of(run, place, own, quiet)
    login = () if options.own_state or options.base_url is None else ("--no-auto-login",)
    return (found(options.program, options.install, env), *ARGUMENTS, *login), env


def model_of(run: Given, options: AgentRow) -> str | None:
    """Return the model's name. Raises ConfigError: `config_invalid`, the user's own service has no default."""
    model = run.order.config.model or options.model
    if model is None and options.base_url is not None:
        fix = "name it in the order (config.model, --model), or with options = {model = …}"
        raise ConfigError("config_invalid", f"no model is named, and {options.base_url} has no default", hint=fix)
    return model


def address_of(options: AgentRow) -> str | None:
    """Return the address of the model's service; for Anthropic's protocol without the version, which the agent adds."""
    address = asked_at(options.base_url)
    return without_version(address) if options.service == "anthropic" else address
