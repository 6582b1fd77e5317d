"""Kimi as a host: its local server on loopback, one process and one session a run, by REST and a WebSocket.

Every tool call is put to the control plane before it runs, by a hook of ours in the agent's settings. What the agent
says of its own success is not believed: a turn has failed where it told an error, or its model's stream just ended.
"""

from __future__ import annotations

import backplane.contract.light  # noqa: F401  # isort: skip
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from backplane.agents import hook
from backplane.agents.begin import BegunProgram, Started, serve
from backplane.agents.options import Kimi as Options
from backplane.agents.order import (
    KEPT,
    AgentFolders,
    RunSpec,
    environment_of,
    folders_of,
    found,
    own_settings,
    place_of,
    read_options,
    require_price,
    require_same_folder,
    server_rows,
    shows_results,
    spec_in_words,
    toml,
)
from backplane.agents.shipped import OPTIONS
from backplane.contract.capability import EMULATED, NATIVE, restricted
from backplane.contract.work import OF_AGENT
from backplane.errors import BackendError
from backplane.host import EXTENSIONS, Given, Host, HostRun

if TYPE_CHECKING:
    from backplane.agents.session import AgentRun
    from backplane.process.child import Child

TOOLS: Final = {
    "Read": "read_file", "Write": "write_file", "Edit": "edit_file", "Bash": "bash", "Glob": "glob", "Grep": "grep",
    "FetchURL": "web_fetch", "WebSearch": "web_search", "AskUserQuestion": "ask_user",
}  # fmt: skip
NATIVELY: Final = (
    "streaming", "extended_thinking", "tool_use", "tool_read", "tool_write", "tool_edit", "tool_bash", "tool_ask_user",
    "mcp_client",
)  # fmt: skip
IN_PLACE: Final = restricted("in the folder where the conversation began")
HOST: Final = Host(
    id="kimi",
    capabilities={
        **dict.fromkeys(NATIVELY, NATIVE),
        **dict.fromkeys(("tool_glob", "tool_grep"), restricted("needs ripgrep on PATH")),
        **dict.fromkeys(("session_resume", "session_fork"), IN_PLACE),
        **dict.fromkeys(("checkpointing", "structured_output_json_schema", "hooks_pre_tool_use"), EMULATED),
    },
    extensions=(*EXTENSIONS, "session/1", "input/1", "interrupt/1"),
    heeds=OF_AGENT,
)

ARGUMENTS: Final = ("web", "--no-open", "--port", "0")
QUIET: Final = {"KIMI_CODE_NO_AUTO_UPDATE": "1", "KIMI_DISABLE_TELEMETRY": "1", "NO_COLOR": "1"}
"""No update, no telemetry, no colours."""
SETTINGS: Final = ("system", "thinking")
"""What an order may set under `config.vendor.kimi`."""
HOOK_S: Final = 360
"""The agent's own bound of a hook: above what a host waits for an answer."""
MODEL: Final = "ours"
"""The model's name in the agent's settings."""


# What the order says, as the program takes it -------------------------------------------------------------------------


def require_effect(run: Given, options: Options) -> None:
    """Refuse what an order says and this agent cannot be told. Raises BackendError, ConfigError."""
    if shows_results(run):
        fact = "a hook after tools would have no effect: this agent takes no other result than its own"
        raise BackendError("capability_unsupported", fact, hint="leave it out")
    if importlib.util.find_spec("websockets") is None:
        fact = "the host kimi needs the package websockets"
        raise BackendError("backend_unavailable", fact, hint="pip install 'backplane[kimi]'")
    if options.own_state:
        fact = "own_state: this host asks by hooks in the agent's settings, and puts none into a user's own"
        raise BackendError("capability_unsupported", fact, hint="give the key and address of a service")
    require_price(run, options.prices)


def prepare(run: Given, options: Options, place: AgentFolders) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command and its environment; the agent's settings are written.

    Raises:
        BackendError: `backend_unavailable`, the program is not there.
    """
    env = environment_of(run, place, {}, QUIET)
    env |= {hook.SOCKET: os.path.join(place.state, "hooks"), hook.EXIT: "2", "KIMI_CODE_HOME": str(place.config)}
    program = found(options.program, options.install, env)
    write(secrets_of(place), settings_of(run, options, env))
    rows = server_rows(run, options.mcp_servers)
    write(Path(str(place.config), "mcp.json"), msgspec.json.encode({"mcpServers": rows}).decode())
    return (program, *ARGUMENTS), env


def write(path: Path, text: str) -> None:
    """Write a file that nobody else may read."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def secrets_of(place: AgentFolders) -> Path:
    return Path(str(place.config), "config.toml")


def settings_of(run: Given, options: Options, env: dict[str, str]) -> str:
    """The agent's settings: the model's service, and our hook."""
    from backplane.agents.hooked import COMMAND

    key = env.get(options.key_env or "", "")
    model = run.order.config.model or options.model
    return f"""default_model = {toml(MODEL)}
telemetry = false
[providers.ours]
type = {toml(options.provider)}
base_url = {toml(options.base_url or "")}
api_key = {toml(key)}
[models.{MODEL}]
provider = "ours"
model = {toml(model or "")}
max_context_size = {options.context_tokens}
[loop_control]
max_attempts_per_step = {max(1, options.retries)}
[[hooks]]
event = "PreToolUse"
command = {toml(COMMAND)}
timeout = {HOOK_S}
"""


def spec_of(run: Given, options: Options) -> RunSpec:
    """The order, as any agent's run takes it. Raises ConfigError, BackendError."""
    from backplane.agents.kimi.agent import image_block

    return spec_in_words(run, image_block, silence_s=options.silence_s, prices=options.prices)


# The run --------------------------------------------------------------------------------------------------------------


def start(options: Options, run: Given, state: str) -> Started:
    """What is started for an order. Raises ConfigError, BackendError."""
    require_effect(run, options)
    place = place_of(run, state, own=False, conversations=KEPT)
    require_same_folder(run, place)
    return prepare(run, options, place)


def speak(options: Options, run: HostRun, child: Child, begun: BegunProgram) -> AgentRun:
    """Make the run with the agent's program. Raises ConfigError, BackendError."""
    from backplane.agents.kimi import agent
    from backplane.agents.session import AgentRun

    own = own_settings(run, "kimi", SETTINGS)
    names = {"system": "system_prompt", "thinking": "thinking"}
    place = folders_of(run, begun.state, own=False)
    made = agent.Options(
        model=MODEL,
        agent={names[name]: value for name, value in own.items() if value is not None},
        tools=TOOLS,
        hooks=begun.env[hook.SOCKET],
        secrets=secrets_of(place),
    )
    return AgentRun(run, spec_of(run, options), lambda session: agent.Agent(session, made, place, child))


if __name__ == "__main__":
    serve(HOST, read_options(__file__, "kimi", os.environ.pop(OPTIONS, "{}"), Options), start, speak)
