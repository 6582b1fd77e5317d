"""Claude Code as a host: one process and one conversation a run, over its JSON lines and control requests.

Every tool call is put to the control plane before it runs, whatever the agent's own settings say; the order's policy
is compiled into those settings as well. What the agent says of its own success is not believed: see `judged`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import tomllib
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from backplane.agents import OPTIONS, STATE
from backplane.contract.capability import EMULATED, NATIVE
from backplane.errors import BackendError, BackplaneError, ConfigError
from backplane.sidecar import EXTENSIONS, Done, Host, HostRun, main

if TYPE_CHECKING:
    from backplane.process import Child

SILENCE_S: Final = 240
"""Without a sign from the agent while no tool runs: below the control plane's 300 s, so that the reason can be told."""
CANCEL_SHARE: Final = 0.5
"""Of the grace: for the agent to end its turn by itself; the rest is for the program."""
STOP_GRACE_S: Final = 1.0
"""For the program, whose stdin is closed by then: a tenth of that is usual."""
LADDER_S: Final = 0.5
CONTEXT_BYTES_MAX: Final = 1024 * 1024
"""Snippets of an order that travel in the prompt."""
STDERR_CHARS: Final = 2000

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
)

QUIET: Final = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1", "CLAUDE_CODE_EMIT_SESSION_STATE_EVENTS": "1",
    "CLAUDE_CODE_ADDITIONAL_DIRECTORIES_CLAUDE_MD": "1",
}  # fmt: skip
"""No telemetry, no update, words about its state, and the workspace's CLAUDE.md without the workspace's settings."""

SETTINGS: Final = {"effort": "--effort", "system": "--append-system-prompt", "fallback_model": "--fallback-model"}
"""What an order may set under `config.vendor.claude`, and the program's argument for it."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The row of `claude.toml` with a backend's options over it."""

    program: str
    install: str = ""
    key_env: str | None = None
    base_url: str | None = None
    sessions: bool = True
    own_state: bool = False
    """Use the user's own folder and login in place of the session's."""
    project_settings: bool = False
    """Take the workspace's own settings for the agent, too: they can start programs that nobody is asked about."""
    silence_s: int = SILENCE_S
    mcp_servers: tuple[dict[str, Any], ...] = ()
    """Servers the agent starts or reaches: name with command, args, env, or with url, headers."""


def read_options(options: str) -> Options:
    """The row with the options, JSON, over it. Raises ConfigError: `config_invalid`."""
    row = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["claude"]
    row.pop("trials")
    try:
        given = msgspec.json.decode(options, type=dict[str, Any])
        given.pop("profile", None)
        return msgspec.convert({**row, **given}, Options)
    except msgspec.MsgspecError as error:
        known = ", ".join(Options.__struct_fields__)
        raise ConfigError(
            "config_invalid", f"options of the host claude: {error}", hint=f"known are {known}"
        ) from error


# What the order says, as the program takes it -------------------------------------------------------------------------


class Asked(msgspec.Struct, frozen=True):
    """What an order asks of the conversation."""

    keep: bool = False
    resume: str | None = None
    fork: str | None = None


def read_session(run: HostRun) -> Asked:
    """Which conversation the order wants. Raises ConfigError: `config_invalid`."""
    said = run.order.abp("session")
    try:
        asked = msgspec.convert({} if said is None else said, Asked)
        for id in (asked.resume, asked.fork):
            uuid.UUID(id) if id is not None else None
    except ValueError as error:
        fix = 'one of {"keep": true}, {"resume": ID}, {"fork": ID}'
        raise ConfigError("config_invalid", f"config.vendor.abp.session: {error}", hint=fix) from error
    return asked


class Place(msgspec.Struct, frozen=True):
    """Where the agent's state of this run lies."""

    state: Path
    """Ours alone, and removed at the end."""
    config: Path | None
    """Its configuration and conversations; None is the user's own."""


def place_of(run: HostRun, options: Options, state: Path) -> Place:
    """Make the folders, and look whether the conversation is there. Raises ConfigError, BackendError."""
    (state / "tmp").mkdir()
    asked, kept = read_session(run), os.environ.get(STATE)
    wanted = asked.resume or asked.fork
    if options.own_state:
        return Place(state, None)
    if (asked.keep or wanted) and not kept:
        raise BackendError("capability_unsupported", "there is no folder that conversations could be kept in")
    config = Path(kept) / "config" if kept and (asked.keep or wanted) else state / "config"
    config.mkdir(parents=True, exist_ok=True)
    if wanted is not None and not any(config.glob(f"projects/*/{wanted}.jsonl")):
        fix = 'run with config.vendor.abp.session = {"keep": true} first; its event names the id'
        raise ConfigError("config_invalid", f"no conversation {wanted} is kept here", hint=fix)
    return Place(state, config)


def prepare(run: HostRun, options: Options, place: Place) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command and its environment. Raises BackendError: `backend_unavailable`, the program is not there."""
    env = {**os.environ, **QUIET, "TMPDIR": str(place.state / "tmp"), "CLAUDE_CODE_TMPDIR": str(place.state / "tmp")}
    env.pop("CLAUDECODE", None)
    env.pop(STATE, None)
    if place.config is not None:
        env["CLAUDE_CONFIG_DIR"] = str(place.config)
    if options.base_url is not None:
        env["ANTHROPIC_BASE_URL"] = options.base_url
    if options.key_env is not None and options.key_env in env:
        env["ANTHROPIC_API_KEY"] = env[options.key_env]
    env |= run.order.config.env
    program = shutil.which(options.program, path=env.get("PATH"))
    if program is None:
        fix = f"install it: {options.install}" if options.install else "name it with the option `program`"
        raise BackendError("backend_unavailable", f"{options.program} is not found or not executable; {fix}")
    return (program, *arguments(run, options, place)), env


def arguments(run: HostRun, options: Options, place: Place) -> list[str]:
    """The order in the program's own words."""
    order, asked = run.order, read_session(run)
    words = "-p --output-format stream-json --verbose --include-partial-messages --input-format stream-json "
    words += "--permission-prompt-tool stdio --strict-mcp-config"
    made = [
        *words.split(),
        "--tools",
        ",".join(tool for tool in OFFERED if tool not in withheld(run)),
        "--settings",
        str(place.state / "settings.json"),
    ]
    (place.state / "settings.json").write_bytes(msgspec.json.encode(settings_of(run)))
    sources = ["user,project,local"] if options.project_settings else ["user", "--add-dir", order.workspace.root]
    made += ["--setting-sources", *sources]
    servers = mcp_servers(run, options)
    if servers:
        (place.state / "servers.json").write_bytes(msgspec.json.encode({"mcpServers": servers}))
        made += ["--mcp-config", str(place.state / "servers.json")]
    schema = order.abp("output_schema")
    told = {
        "--model": order.config.model,
        "--max-turns": order.config.max_turns,
        "--max-budget-usd": order.config.max_budget_usd,
        "--json-schema": None if schema is None else msgspec.json.encode(schema).decode(),
        "--resume": asked.resume or asked.fork,
        **{SETTINGS[name]: value for name, value in own_settings(run).items()},
    }
    made += [word for name, value in told.items() if value is not None for word in (name, str(value))]
    if asked.fork:
        made.append("--fork-session")
    if not (asked.keep or asked.resume or asked.fork or options.own_state):
        made.append("--no-session-persistence")
    return made


def own_settings(run: HostRun) -> dict[str, Any]:
    """What the order says to this agent alone. Raises ConfigError: `config_invalid`."""
    own = run.order.config.vendor.get("claude", {})
    unknown = sorted(set(own) - set(SETTINGS)) if isinstance(own, dict) else ["claude"]
    if unknown:
        raise ConfigError("config_invalid", f"config.vendor.claude: {unknown[0]!r}", hint=", ".join(SETTINGS))
    return dict(own)


def withheld(run: HostRun) -> frozenset[str]:
    """The tools that the policy forbids by name, whatever their input is: the model is not told of them."""
    names: set[str] = set()
    for tool in OFFERED:
        decision = run.policy.decide_tool_call(tool, {}, root=run.order.workspace.root, aliases=ALIASES)
        if decision.rule is not None and decision.rule.name in ("allowed_tools", "disallowed_tools"):
            names |= {tool} if decision.allowed == "deny" else set()
    return frozenset(names)


def settings_of(run: HostRun) -> dict[str, Any]:
    """The policy in the agent's own settings: the second lock, as its patterns are not quite ours."""
    profile = run.policy.profile
    deny = [f"Read({pattern})" for pattern in profile.deny_read]
    deny += [f"Edit({pattern})" for pattern in profile.deny_write]
    deny += [f"WebFetch(domain:{host})" for host in profile.deny_network if host.replace(".", "").isalnum()]
    # Commands of settings would run unasked; questions to us are no hooks in this sense and stay.
    # Its own sandbox stays off: where it cannot be had it is left out without a word, and nobody could say which held.
    return {"disableAllHooks": True, "permissions": {"deny": deny}, "sandbox": {"enabled": False}}


def mcp_servers(run: HostRun, options: Options) -> dict[str, Any]:
    """The servers of the configuration and of the order, as the program reads them. Raises ConfigError."""
    rows = [*options.mcp_servers, *(run.order.abp("mcp_servers") or ())]
    made: dict[str, Any] = {}
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("name"), str) or not {"command", "url"} & set(row):
            raise ConfigError("config_invalid", "an MCP server has no name, or neither command nor url")
        body = {name: value for name, value in row.items() if name != "name"}
        made[row["name"]] = {"type": "http", **body} if "url" in row else {"type": "stdio", **body}
    return made


def prompt_of(run: HostRun) -> str:
    """The first words to the agent: snippets, names of files, the task. Raises BackendError."""
    parts = [f"Context, {snippet.name}:\n{snippet.content}" for snippet in run.order.context.snippets]
    if sum(len(part.encode()) for part in parts) > CONTEXT_BYTES_MAX:
        raise BackendError("backend_context_length", f"the order's snippets are over {CONTEXT_BYTES_MAX} bytes")
    if run.order.context.files:
        parts.append("Files to look at first: " + ", ".join(run.order.context.files))
    return "\n\n".join([*parts, run.order.task])


async def drive(run: HostRun, options: Options) -> Done:
    """Start the agent's program, run the order, and leave nothing of either."""
    import anyio

    from backplane.process import Command, open_child
    from backplane.streamjson.work import Turn, Ways, shape_of

    if run.order.config.max_turns == 0:
        await run.carry("turn", {"stop_reason": "max_turns"}, "the limit of 0 turns (max_turns)")
        return Done(outcome="partial")
    state = Path(tempfile.mkdtemp(prefix="backplane-agent-"))
    try:
        shape_of(run)
        argv, env = prepare(run, options, place_of(run, options, state))
        async with open_child(Command(argv=argv, env=env, cwd=run.order.workspace.root)) as child:
            ways = Ways(prompt_of(run), TOOLS, ALIASES, withheld(run), options.silence_s)
            turn = Turn(run, ways, child.stdin, child.stdout)
            run.on_cancel, run.on_input, run.on_interrupt = turn.cancel, turn.more, turn.interrupt
            try:
                return await turn.go()
            except BaseExceptionGroup as group:
                raise with_words(group, child) from group
            finally:
                with anyio.CancelScope(shield=True):
                    await child.stop(grace_s=max(min(run.grace_s * CANCEL_SHARE - LADDER_S, STOP_GRACE_S), 0.1))
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(lambda: shutil.rmtree(state, ignore_errors=True))


def with_words(group: BaseExceptionGroup[BaseException], child: Child) -> BaseException:
    """The first failure, with the agent's last words."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, BackplaneError):
        return group
    how = f" ({child.exit.describe()})" if child.exit is not None else ""
    tail = child.stderr_tail.decode("utf-8", "replace").strip()[-STDERR_CHARS:]
    return BackendError(error.code, f"{error.message}{how}{': ' if tail else ''}{tail}", hint=error.hint)


if __name__ == "__main__":
    ROW = read_options(os.environ.pop(OPTIONS, "{}"))

    async def work(run: HostRun) -> Done:
        return await drive(run, ROW)

    main(HOST, work)
