"""Starts Kimi's local server for an order: its command, its environment, and its settings, which include our hook.

`agent` sends everything after the start.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Final

import msgspec

from backplane.agents import hook
from backplane.agents.hooked import COMMAND
from backplane.agents.order import (
    KEPT,
    AgentFolders,
    asked_at,
    environment_of,
    found,
    place_of,
    require_able,
    require_price,
    require_same_folder,
    server_rows,
    toml,
    without_version,
)
from backplane.agents.program import Started
from backplane.agents.rows import AgentRow
from backplane.errors import BackendError, install_hint
from backplane.host import Given

ARGUMENTS: Final = ("web", "--no-open", "--port", "0")
QUIET: Final = {"KIMI_CODE_NO_AUTO_UPDATE": "1", "KIMI_DISABLE_TELEMETRY": "1", "NO_COLOR": "1"}
"""Variables that turn off updates, telemetry and colours."""
HOOK_S: Final = 360
"""Seconds after which the agent ends a hook: more than a host waits for an answer."""
MODEL: Final = "ours"
"""The model's name in the agent's settings."""


def require_effect(run: Given, options: AgentRow) -> None:
    """Refuse an order that this agent cannot carry out. Raises BackendError, ConfigError."""
    if importlib.util.find_spec("websockets") is None:
        fact = "the host kimi needs the package websockets"
        raise BackendError("backend_unavailable", fact, hint=install_hint("kimi"))
    if options.own_state:
        fact = "own_state: this host asks by hooks in the agent's settings, and puts none into a user's own"
        raise BackendError("capability_unsupported", fact, hint="give the key and address of a service")
    require_able(run, options)
    require_price(run, options.prices)


def start(options: AgentRow, run: Given, state: str) -> Started:
    """Return the command and environment for an order; the agent's settings are written."""
    require_effect(run, options)
    place = place_of(run, state, own=False, conversations=KEPT)
    require_same_folder(run, place)
    env = environment_of(run, place, {}, QUIET)
    env |= {hook.SOCKET: os.path.join(place.state, "hooks"), hook.EXIT: "2", "KIMI_CODE_HOME": str(place.config)}
    program = found(options.program, options.install, env)
    write(secrets_of(place), settings_of(run, options, env))
    if options.key_env is not None and options.key_env not in run.order.config.env:
        env.pop(options.key_env, None)  # The agent reads the key from its settings, which are then removed.
    rows = server_rows(run, options.mcp_servers)
    write(Path(str(place.config), "mcp.json"), msgspec.json.encode({"mcpServers": rows}).decode())
    return (program, *ARGUMENTS), env


def write(path: Path, text: str) -> None:
    """Write a file that only its owner may read."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def secrets_of(place: AgentFolders) -> Path:
    return Path(str(place.config), "config.toml")


def settings_of(run: Given, options: AgentRow, env: dict[str, str]) -> str:
    """Return the agent's settings: the model's service, and our hook."""
    key = env.get(options.key_env or "", "")
    model = run.order.config.model or options.model
    address = asked_at(options.base_url)
    if options.service in ("anthropic", "google-genai"):
        address = without_version(address)
    return f"""default_model = {toml(MODEL)}
telemetry = false
[providers.ours]
type = {toml(options.service)}
base_url = {toml(address or "")}
api_key = {toml(key)}
[models.{MODEL}]
provider = "ours"
model = {toml(model or "")}
max_context_size = {options.context_tokens}
[loop_control]
max_attempts_per_step = {options.retries + 1}
[[hooks]]
event = "PreToolUse"
command = {toml(COMMAND)}
timeout = {HOOK_S}
"""
