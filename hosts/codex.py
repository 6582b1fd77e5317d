"""Codex as a host: its app-server, one process and one thread a run, over JSON-RPC lines.

Every command and every patch is put to the control plane before it runs, whatever the agent's own settings say; the
order's policy is compiled into those settings as well. What the agent says of its own success is not believed.
"""

from __future__ import annotations

import backplane.contract.light  # noqa: F401  # isort: skip
import os
from typing import TYPE_CHECKING, Any, Final

import msgspec

from backplane.agents.begin import BegunProgram, Started, serve
from backplane.agents.options import Codex as Options
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
    server_rows,
    spec_in_words,
)
from backplane.agents.shipped import OPTIONS
from backplane.contract.capability import EMULATED, NATIVE, restricted
from backplane.contract.work import OF_AGENT
from backplane.errors import BackendError
from backplane.host import EXTENSIONS, Given, Host, HostRun

if TYPE_CHECKING:
    from backplane.agents.codex.agent import Options as OwnOptions
    from backplane.agents.session import AgentRun
    from backplane.process.child import Child

NATIVELY: Final = (
    "streaming", "extended_thinking", "tool_use", "tool_write", "tool_edit", "tool_bash", "tool_web_search",
    "tool_ask_user", "session_resume", "session_fork", "mcp_client",
)  # fmt: skip
BY_SHELL: Final = restricted("by commands of its shell; it has no tool of its own for it")
BY_US: Final = ("hooks_pre_tool_use", "hooks_post_tool_use", "checkpointing", "structured_output_json_schema")
HOST: Final = Host(
    id="codex",
    capabilities={
        **dict.fromkeys(NATIVELY, NATIVE),
        **dict.fromkeys(("tool_read", "tool_glob", "tool_grep"), BY_SHELL),
        **dict.fromkeys(BY_US, EMULATED),
    },
    extensions=(*EXTENSIONS, "session/1", "input/1", "interrupt/1"),
    heeds=OF_AGENT,
)

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

SETTINGS: Final = ("effort", "summary", "system", "verbosity")
"""What an order may set under `config.vendor.codex`."""


# What the order says, as the program takes it -------------------------------------------------------------------------


def prepare(run: Given, options: Options, place: AgentFolders) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command and its environment. Raises BackendError: `backend_unavailable`, the program is not there."""
    env = environment_of(run, place, {"CODEX_HOME": place.config})
    program = found(options.program, options.install, env)
    return (program, "app-server", *(word for setting in QUIET for word in ("-c", setting))), env


def thread_of(run: Given, options: Options, env: dict[str, str]) -> tuple[str, dict[str, Any]]:
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
        # What was said before is the agent's affair; told to us whole it is a line as long as the conversation.
        params |= {"threadId": asked.wanted, "excludeTurns": True}
        return "thread/resume" if asked.resume else "thread/fork", params
    return "thread/start", {**params, "ephemeral": not (asked.keep or options.own_state)}


def settings_of(run: Given, options: Options, env: dict[str, str]) -> dict[str, Any]:
    """The policy and the model's service in the agent's own settings."""
    own, profile = own_settings(run, "codex", SETTINGS), run.policy.profile
    networked = bool(profile.allow_network or profile.deny_network)
    asked_first = run.policy.decide_tool_call("web_search", {}, root=run.order.workspace.root).allowed != "allow"
    after = hooks_of(run, options).after
    made: dict[str, Any] = {
        # Asked of nobody: the search runs at the model's service, and pictures are read by the agent itself.
        "suppress_unstable_features_warning": True,
        "features": {**FEATURES, "view_image": not (profile.deny_read or after)},
        # A user's profile is no part of the order, and may take its time.
        "allow_login_shell": False,
        "web_search": "disabled" if networked or asked_first or after else "live",
        "mcp_servers": mcp_servers(run, options),
        "model_reasoning_effort": own.get("effort"),
        "model_reasoning_summary": own.get("summary"),
        "model_verbosity": own.get("verbosity"),
    }
    if not options.own_state:
        made["model_providers"] = {"backplane": provider_of(options, env)}
    return {name: value for name, value in made.items() if value is not None}


def provider_of(options: Options, env: dict[str, str]) -> dict[str, Any]:
    """The model's service, as the program reads it."""
    key = options.key_env if options.key_env in env else None
    return {
        "name": "backplane",
        "base_url": options.base_url,
        "wire_api": "responses",
        "request_max_retries": options.retries,
        "stream_max_retries": options.retries,
        "supports_websockets": False,
        **({"env_key": key} if key is not None else {}),
    }


def mcp_servers(run: Given, options: Options) -> dict[str, Any]:
    """The servers of the configuration and of the order, as the program reads them. Raises ConfigError."""
    names = {"headers": "http_headers"}
    return {
        server: {names.get(name, name): value for name, value in row.items()}
        for server, row in server_rows(run, options.mcp_servers).items()
    }


class HookNeeds(msgspec.Struct, frozen=True):
    """Which hooks the agent needs, so that ours have their effect."""

    before: bool
    """Somebody may change what a tool gets."""
    after: bool
    """Somebody is to see results before the model does."""


def hooks_of(run: Given, options: Options) -> HookNeeds:
    """What the order's hooks ask for. Raises BackendError: `capability_unsupported`, they could not be kept."""
    events = {row.get("event") for row in run.order.abp("hooks") or () if isinstance(row, dict)}
    after = "post_tool" in events
    before = "pre_tool" in events or bool(run.policy.profile.require_approval_for)
    lost = (
        (options.own_state, "nothing is put into a user's own settings"),
        (bool(server_rows(run, options.mcp_servers)), "this agent asks nobody about a server's tool that failed"),
        (run.order.abp("mode") == "passthrough", "its messages are passed through before anybody has seen them"),
        (bool(run.policy.profile.deny_read), "a command that says nothing before its end does not show what it reads"),
    )
    facts = [fact for is_so, fact in lost if is_so] if after else []
    if facts:
        fix = "take either out, or another backend"
        raise BackendError("capability_unsupported", f"hooks after tools: {facts[0]}; {fix}")
    return HookNeeds(after or (before and not options.own_state), after)


def spec_of(run: Given, options: Options) -> RunSpec:
    """The order, as any agent's run takes it. Raises ConfigError, BackendError."""
    from backplane.agents.codex.agent import image_block

    return spec_in_words(run, image_block, silence_s=options.silence_s, prices=options.prices)


def own_options(run: Given, options: Options, env: dict[str, str]) -> OwnOptions:
    """What the order asks of this agent alone. Raises ConfigError, BackendError."""
    from backplane.agents.codex import agent, hooked

    hooks, schema = hooks_of(run, options), run.order.abp("output_schema")
    return agent.Options(
        open=thread_of(run, options, env),
        turn={"outputSchema": schema} if is_strict(schema) else {},
        is_kept=read_conversation(run).kept or options.own_state,
        is_listed=options.own_state or options.base_url == "https://api.openai.com/v1",
        hooks=env[hooked.SOCKET] if hooks.before else None,
        shows=hooks.after,
    )


# The run --------------------------------------------------------------------------------------------------------------


def start(options: Options, run: Given, state: str) -> Started:
    """What is started for an order. Raises ConfigError, BackendError."""
    place = place_of(run, state, own=options.own_state, conversations="sessions/*/*/*/*{}.jsonl*")
    argv, env = prepare(run, options, place)
    hooks = hooks_of(run, options)
    if not hooks.before:
        return argv, env
    from backplane.agents.codex import hooked

    asks = [word for setting in hooked.settings(after=hooks.after) for word in ("-c", setting)]
    return (*argv, *asks), {**env, hooked.SOCKET: os.path.join(state, "hooks")}


def speak(options: Options, run: HostRun, child: Child, begun: BegunProgram) -> AgentRun:
    """Make the run with the agent's program. Raises ConfigError, BackendError."""
    from backplane.agents.codex.agent import Agent
    from backplane.agents.session import AgentRun

    own = own_options(run, options, begun.env)
    return AgentRun(run, spec_of(run, options), lambda session: Agent(session, own, child))


if __name__ == "__main__":
    serve(HOST, read_options(__file__, "codex", os.environ.pop(OPTIONS, "{}"), Options), start, speak)
