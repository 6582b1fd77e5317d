"""Claude Code as a host: one process and one conversation a run, over its JSON lines and control requests.

Every tool call is put to the control plane before it runs, whatever the agent's own settings say; the order's policy
is compiled into those settings as well. What the agent says of its own success is not believed: see `judged`.
"""

from __future__ import annotations

import backplane.contract.light  # noqa: F401  # isort: skip
import os
from typing import TYPE_CHECKING, Any, Final

import msgspec

from backplane.agents.begin import BegunProgram, Started, serve
from backplane.agents.options import Claude as Options
from backplane.agents.order import (
    AgentFolders,
    RunSpec,
    environment_of,
    found,
    image_blocks,
    own_settings,
    place_of,
    prompt_of,
    read_conversation,
    read_options,
    server_rows,
    shape_of,
    shown,
)
from backplane.agents.shipped import OPTIONS
from backplane.contract.capability import EMULATED, NATIVE
from backplane.contract.work import OF_AGENT
from backplane.errors import ConfigError
from backplane.host import EXTENSIONS, Given, Host, HostRun

if TYPE_CHECKING:
    from backplane.agents.session import AgentRun
    from backplane.process.child import Child

TOOLS: Final = {
    "Read": "read_file", "Write": "write_file", "Edit": "edit_file", "Bash": "bash", "Glob": "glob", "Grep": "grep",
    "WebFetch": "web_fetch", "WebSearch": "web_search",
}  # fmt: skip
OFFERED: Final = (*TOOLS, "AskUserQuestion", "NotebookEdit", "Skill", "Task", "TaskStop")
"""The agent's tools for work of one run; those that wait for another day or another window are left out."""
ALIASES: Final = {**TOOLS, "NotebookEdit": "edit_file", "MultiEdit": "edit_file"}

NATIVELY: Final = (
    "streaming", "extended_thinking", "tool_use", "tool_read", "tool_write", "tool_edit", "tool_bash", "tool_glob",
    "tool_grep", "tool_web_search", "tool_web_fetch", "tool_ask_user", "hooks_pre_tool_use", "hooks_post_tool_use",
    "session_resume", "session_fork", "structured_output_json_schema", "mcp_client",
)  # fmt: skip
HOST: Final = Host(
    id="claude",
    capabilities={**dict.fromkeys(NATIVELY, NATIVE), "checkpointing": EMULATED},
    extensions=(*EXTENSIONS, "session/1", "input/1", "interrupt/1"),
    heeds=OF_AGENT,
)

QUIET: Final = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1", "CLAUDE_CODE_EMIT_SESSION_STATE_EVENTS": "1",
    "CLAUDE_CODE_ADDITIONAL_DIRECTORIES_CLAUDE_MD": "1",
}  # fmt: skip
"""No telemetry, no update, words about its state, and the workspace's CLAUDE.md without the workspace's settings."""

SETTINGS: Final = {"effort": "--effort", "system": "--append-system-prompt", "fallback_model": "--fallback-model"}
"""What an order may set under `config.vendor.claude`, and the program's argument for it."""
EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
"""With any other the program goes on as if nothing had been said, and tells nobody but its stderr."""


# What the order says, as the program takes it -------------------------------------------------------------------------


def prepare(run: Given, options: Options, place: AgentFolders) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command and its environment. Raises BackendError: `backend_unavailable`, the program is not there."""
    own = {
        **QUIET,
        "CLAUDE_CODE_TMPDIR": os.path.join(place.state, "tmp"),
        "CLAUDE_CONFIG_DIR": place.config,
        "ANTHROPIC_BASE_URL": options.base_url,
        "ANTHROPIC_API_KEY": os.environ.get(options.key_env or ""),
    }
    env = environment_of(run, place, own)
    env.pop("CLAUDECODE", None)
    return (found(options.program, options.install, env), *arguments(run, options, place)), env


def arguments(run: Given, options: Options, place: AgentFolders) -> list[str]:
    """The order in the program's own words."""
    order, asked, own = run.order, read_conversation(run), own_settings(run, "claude", SETTINGS)
    if own.get("effort") not in (None, *EFFORTS):
        fact = f"config.vendor.claude.effort is {own['effort'][:80]!r}"
        raise ConfigError("config_invalid", fact, hint=f"known are {', '.join(EFFORTS)}")
    words = "-p --output-format stream-json --verbose --include-partial-messages --input-format stream-json "
    words += "--permission-prompt-tool stdio --strict-mcp-config"
    made = [
        *words.split(),
        "--tools",
        ",".join(tool for tool in OFFERED if tool not in withheld(run)),
        "--settings",
        written(place, "settings.json", settings_of(run)),
    ]
    sources = ["user,project,local"] if options.project_settings else ["user", "--add-dir", order.workspace.root]
    made += ["--setting-sources", *sources]
    servers = mcp_servers(run, options)
    if servers:
        made += ["--mcp-config", written(place, "servers.json", {"mcpServers": servers})]
    schema = order.abp("output_schema")
    told = {
        "--model": order.config.model,
        "--max-turns": order.config.max_turns,
        "--max-budget-usd": order.config.max_budget_usd,
        "--json-schema": None if schema is None else msgspec.json.encode(schema).decode(),
        "--resume": asked.wanted,
        **{SETTINGS[name]: value for name, value in own.items()},
    }
    made += [word for name, value in told.items() if value is not None for word in (name, str(value))]
    if asked.fork:
        made.append("--fork-session")
    if not (asked.kept or options.own_state):
        made.append("--no-session-persistence")
    return made


def withheld(run: Given) -> frozenset[str]:
    """The tools that the policy forbids by name, whatever their input is: the model is not told of them."""
    names: set[str] = set()
    for tool in OFFERED:
        decision = run.policy.decide_tool_call(tool, {}, root=run.order.workspace.root, aliases=ALIASES)
        if decision.rule is not None and decision.rule.name in ("allowed_tools", "disallowed_tools"):
            names |= {tool} if decision.allowed == "deny" else set()
    return frozenset(names)


def settings_of(run: Given) -> dict[str, Any]:
    """The policy in the agent's own settings: the second lock, as its patterns are not quite ours."""
    profile = run.policy.profile
    deny = [f"Read({pattern})" for pattern in profile.deny_read]
    deny += [f"Edit({pattern})" for pattern in profile.deny_write]
    deny += [f"WebFetch(domain:{host})" for host in profile.deny_network if host.replace(".", "").isalnum()]
    # Commands of settings would run unasked; questions to us are no hooks in this sense and stay.
    # Its own sandbox stays off: where it cannot be had it is left out without a word, and nobody could say which held.
    return {"disableAllHooks": True, "permissions": {"deny": deny}, "sandbox": {"enabled": False}}


def written(place: AgentFolders, name: str, value: dict[str, Any]) -> str:
    """Write JSON into a file of the agent's state; its path."""
    path = os.path.join(place.state, name)
    with open(path, "wb") as file:
        file.write(msgspec.json.encode(value))
    return path


def mcp_servers(run: Given, options: Options) -> dict[str, Any]:
    """The servers of the configuration and of the order, as the program reads them. Raises ConfigError."""
    return {
        name: {"type": "http" if "url" in row else "stdio", **row}
        for name, row in server_rows(run, options.mcp_servers).items()
    }


def start(options: Options, run: Given, state: str) -> Started:
    """What is started for an order. Raises ConfigError, BackendError."""
    place = place_of(run, state, own=options.own_state, conversations="projects/*/{}.jsonl")
    return prepare(run, options, place)


def speak(options: Options, run: HostRun, child: Child, begun: BegunProgram) -> AgentRun:
    """Make the run with the agent's program. Raises ConfigError."""
    from backplane.agents.claude import agent
    from backplane.agents.session import AgentRun

    spec = RunSpec(
        prompt=shown(prompt_of(run), image_blocks(run, agent.image_block)),
        silence_s=options.silence_s,
        conversation=read_conversation(run),
        shape=shape_of(run),
        again="Your answer does not satisfy the JSON Schema you were given:\n{fault}\nCorrect it.",
    )

    own = agent.Options(tools=TOOLS, aliases=ALIASES, withheld=withheld(run))
    return AgentRun(run, spec, lambda session: agent.Agent(session, own, child))


if __name__ == "__main__":
    serve(HOST, read_options(__file__, "claude", os.environ.pop(OPTIONS, "{}"), Options), start, speak)
