"""Copilot CLI as a host: its headless server, one process and one session a run, over framed JSON-RPC.

Every tool call is put to the control plane before it runs, whatever the agent's own settings say. What the agent says
of its own success is not believed: a turn has failed where the session told an error.
"""

from __future__ import annotations

import backplane.contract.light  # noqa: F401  # isort: skip
import os
from typing import TYPE_CHECKING, Any, Final

from backplane.agents.begin import BegunProgram, Started, serve
from backplane.agents.options import Copilot as Options
from backplane.agents.order import (
    AgentFolders,
    RunSpec,
    environment_of,
    found,
    is_strict,
    own_settings,
    place_of,
    read_conversation,
    read_options,
    require_price,
    server_rows,
    shows_results,
    spec_in_words,
)
from backplane.agents.shipped import OPTIONS
from backplane.contract.capability import EMULATED, NATIVE, restricted
from backplane.contract.work import OF_AGENT
from backplane.errors import ConfigError
from backplane.host import EXTENSIONS, Given, Host, HostRun

if TYPE_CHECKING:
    from backplane.agents.session import AgentRun
    from backplane.process.child import Child

TOOLS: Final = {
    "view": "read_file", "create": "write_file", "edit": "edit_file", "apply_patch": "edit_file", "rg": "grep",
}  # fmt: skip
NATIVELY: Final = (
    "streaming", "extended_thinking", "tool_use", "tool_read", "tool_write", "tool_edit", "tool_bash", "tool_glob",
    "tool_grep", "tool_ask_user", "hooks_pre_tool_use", "hooks_post_tool_use", "session_resume", "session_fork",
    "mcp_client",
)  # fmt: skip
HOST: Final = Host(
    id="copilot",
    capabilities={
        **dict.fromkeys(NATIVELY, NATIVE),
        "tool_web_fetch": restricted("at the agent's own service alone; COPILOT_OFFLINE=false has it elsewhere, too"),
        **dict.fromkeys(("checkpointing", "structured_output_json_schema"), EMULATED),
    },
    extensions=(*EXTENSIONS, "session/1", "input/1", "interrupt/1"),
    heeds=OF_AGENT,
)

ARGUMENTS: Final = ("--headless", "--stdio", "--no-auto-update", "--log-level", "error")
QUIET: Final = {"COPILOT_AUTO_UPDATE": "false", "NO_COLOR": "1"}
"""No update, no colours."""
SETTINGS: Final = ("effort", "system")
"""What an order may set under `config.vendor.copilot`."""


# What the order says, as the program takes it -------------------------------------------------------------------------


def prepare(run: Given, options: Options, place: AgentFolders) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command and its environment.

    Raises:
        BackendError: `backend_unavailable`, the program is not there.
        ConfigError: `config_invalid`, see `model_of`.
    """
    quiet = dict(QUIET)
    if place.config is not None:
        # It unpacks 235 MB at its start, which no run may leave to another: the next one would run what lies there.
        quiet["COPILOT_CACHE_HOME"] = os.path.join(place.state, "cache")
    own = {"COPILOT_HOME": place.config}
    if options.base_url is not None:
        # Its variables beside the session's own members: without them it looks for its own service first.
        quiet["COPILOT_OFFLINE"] = "true"
        own |= {"COPILOT_PROVIDER_BASE_URL": options.base_url, "COPILOT_PROVIDER_TYPE": options.provider}
        own |= {"COPILOT_MODEL": model_of(run, options)}
        own |= {"COPILOT_PROVIDER_API_KEY": os.environ.get(options.key_env or "")}
    env = environment_of(run, place, own, quiet)
    login = () if options.own_state or options.base_url is None else ("--no-auto-login",)
    return (found(options.program, options.install, env), *ARGUMENTS, *login), env


def model_of(run: Given, options: Options) -> str | None:
    """The model's name. Raises ConfigError: `config_invalid`, the user's own service has no default."""
    model = run.order.config.model or options.model
    if model is None and options.base_url is not None:
        fix = "name it in the order (config.model, --model), or with options = {model = …}"
        raise ConfigError("config_invalid", f"no model is named, and {options.base_url} has no default", hint=fix)
    return model


def session_of(run: Given, options: Options, env: dict[str, str]) -> dict[str, Any]:
    """The order in the members of the call that opens the session. Raises ConfigError."""
    own = own_settings(run, "copilot", SETTINGS)
    params: dict[str, Any] = {
        "model": model_of(run, options),
        "workingDirectory": run.order.workspace.root,
        "provider": provider_of(options, env),
        "mcpServers": mcp_servers(run, options) or None,
        "reasoningEffort": own.get("effort"),
        "systemMessage": {"mode": "append", "content": own["system"]} if own.get("system") else None,
        "hooks": True,
        "requestPermission": True,
        "requestUserInput": True,
        "streaming": True,
        "includeSubAgentStreamingEvents": False,
        "enableSessionTelemetry": False,
        # Commands of the workspace's own settings would run unasked.
        "enableFileHooks": options.project_settings,
        "enableConfigDiscovery": options.project_settings,
        "envValueMode": "direct",
    }
    return {name: value for name, value in params.items() if value is not None}


def provider_of(options: Options, env: dict[str, str]) -> dict[str, Any] | None:
    """The user's own service, as the session takes it; None for the agent's."""
    if options.base_url is None:
        return None
    made = {"type": options.provider, "baseUrl": options.base_url, "apiKey": env.get("COPILOT_PROVIDER_API_KEY")}
    if options.provider != "anthropic":
        made["wireApi"] = options.wire_api
    return {name: value for name, value in made.items() if value is not None}


def mcp_servers(run: Given, options: Options) -> dict[str, Any]:
    """The servers of the configuration and of the order, as the session takes them. Raises ConfigError."""
    return {
        name: {"type": "http" if "url" in row else "local", "tools": ["*"], **row}
        for name, row in server_rows(run, options.mcp_servers).items()
    }


def turn_of(run: Given, options: Options) -> dict[str, Any]:
    """Members of every message: the answer's shape, where the model's service takes it."""
    schema = run.order.abp("output_schema")
    if not is_strict(schema) or options.provider == "anthropic":
        return {}
    shape = {"name": "response", "strict": True, "schema": schema}
    return {"responseFormat": {"type": "json_schema", "jsonSchema": shape}}


def spec_of(run: Given, options: Options) -> RunSpec:
    """The order, as any agent's run takes it. Raises ConfigError, BackendError."""
    require_price(run, options.prices, repr(model_of(run, options)))
    from backplane.agents.copilot.agent import image_block

    return spec_in_words(run, image_block, silence_s=options.silence_s, prices=options.prices)


# The run --------------------------------------------------------------------------------------------------------------


def start(options: Options, run: Given, state: str) -> Started:
    """What is started for an order. Raises ConfigError, BackendError."""
    place = place_of(run, state, own=options.own_state, conversations="session-state/{}")
    return prepare(run, options, place)


def speak(options: Options, run: HostRun, child: Child, begun: BegunProgram) -> AgentRun:
    """Make the run with the agent's program. Raises ConfigError, BackendError."""
    from backplane.agents.copilot import agent
    from backplane.agents.session import AgentRun

    own = agent.Options(
        session=session_of(run, options, begun.env),
        turn=turn_of(run, options),
        tools=TOOLS,
        is_kept=read_conversation(run).kept or options.own_state,
        shows=shows_results(run),
    )
    return AgentRun(run, spec_of(run, options), lambda session: agent.Agent(session, own, child))


if __name__ == "__main__":
    serve(HOST, read_options(__file__, "copilot", os.environ.pop(OPTIONS, "{}"), Options), start, speak)
