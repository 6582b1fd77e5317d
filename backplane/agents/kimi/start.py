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
from backplane.agents.order import require_price, toml, without_version
from backplane.agents.start import KEPT, AgentStart
from backplane.errors import BackendError, install_hint

ARGUMENTS: Final = ("web", "--no-open", "--port", "0")
QUIET: Final = {"KIMI_CODE_NO_AUTO_UPDATE": "1", "KIMI_DISABLE_TELEMETRY": "1", "NO_COLOR": "1"}
"""Variables that turn off updates, telemetry and colours."""
HOOK_S: Final = 360
"""Seconds after which the agent ends a hook: more than a host waits for an answer."""
MODEL: Final = "ours"
"""The model's name in the agent's settings."""


def start(begun: AgentStart) -> list[str]:
    """Return the command for an order, set its environment, and write the agent's settings.

    Raises:
        BackendError, ConfigError.
    """
    row = begun.row
    if importlib.util.find_spec("websockets") is None:
        fact = "the host kimi needs the package websockets"
        raise BackendError("backend_unavailable", fact, hint=install_hint("kimi"))
    if begun.config is None:
        fact = "own_state: this host asks by hooks in the agent's settings, and puts none into a user's own"
        raise BackendError("capability_unsupported", fact, hint="give the key and address of a service")
    require_price(begun.run, row.prices)
    begun.prepare(KEPT, quiet=QUIET)
    begun.require_same_folder()
    begun.env |= {hook.SOCKET: os.path.join(begun.state, "hooks"), hook.EXIT: "2", "KIMI_CODE_HOME": begun.config}
    write(secrets_of(begun), settings_of(begun))
    if row.key_env is not None and row.key_env not in begun.run.order.config.env:
        begun.env.pop(row.key_env, None)  # The agent reads the key from its settings, which are then removed.
    servers = msgspec.json.encode({"mcpServers": begun.servers()}).decode()
    write(Path(begun.config, "mcp.json"), servers)
    return [begun.find_program(), *ARGUMENTS]


def secrets_of(begun: AgentStart) -> Path:
    """Return the file of the agent's settings, which has the key of the model's service."""
    return Path(str(begun.config), "config.toml")


def write(path: Path, text: str) -> None:
    """Write a file that only its owner may read."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def settings_of(begun: AgentStart) -> str:
    """Return the agent's settings: the model's service, and our hook."""
    row, address = begun.row, begun.address
    if row.service in ("anthropic", "google-genai"):
        address = without_version(address)
    return f"""default_model = {toml(MODEL)}
telemetry = false
[providers.ours]
type = {toml(row.service)}
base_url = {toml(address or "")}
api_key = {toml(begun.env.get(row.key_env or "", ""))}
[models.{MODEL}]
provider = "ours"
model = {toml(begun.model or "")}
max_context_size = {row.context_tokens}
[loop_control]
max_attempts_per_step = {row.retries + 1}
[[hooks]]
event = "PreToolUse"
command = {toml(COMMAND)}
timeout = {HOOK_S}
"""
