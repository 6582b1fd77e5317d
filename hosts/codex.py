"""Codex as a host: its app-server, one process and one thread a run, over JSON-RPC lines.

Every command and every patch is put to the control plane before it runs, whatever the agent's own settings say; the
order's policy is compiled into those settings as well. What the agent says of its own success is not believed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import tomllib
import uuid
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from backplane.agents import OPTIONS, STATE
from backplane.contract.capability import EMULATED, NATIVE, restricted
from backplane.errors import BackendError, BackplaneError, ConfigError
from backplane.sidecar import EXTENSIONS, Done, Host, HostRun, main

if TYPE_CHECKING:
    from backplane.appserver import Ways
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

NATIVELY: Final = (
    "streaming", "extended_thinking", "tool_use", "tool_write", "tool_edit", "tool_bash", "tool_web_search",
    "tool_ask_user", "session_resume", "session_fork", "mcp_client",
)  # fmt: skip
BY_SHELL: Final = restricted("by commands of its shell; it has no tool of its own for it")
HOST: Final = Host(
    id="codex",
    capabilities={
        **dict.fromkeys(NATIVELY, NATIVE),
        **dict.fromkeys(("tool_read", "tool_glob", "tool_grep"), BY_SHELL),
        **dict.fromkeys(("hooks_pre_tool_use", "checkpointing", "structured_output_json_schema"), EMULATED),
    },
    extensions=(*EXTENSIONS, "session/1", "input/1", "interrupt/1"),
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

RETRIES: Final = 4
"""Of a request and of a stream: as the agent has it by itself; an order's own clock may be shorter."""
SETTINGS: Final = ("effort", "summary", "system", "verbosity")
"""What an order may set under `config.vendor.codex`."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The row of `codex.toml` with a backend's options over it."""

    program: str
    install: str = ""
    key_env: str | None = None
    base_url: str | None = None
    sessions: bool = True
    own_state: bool = False
    """Use the user's own folder, login and model service in place of the session's."""
    model: str | None = None
    """Where the order names none; else the agent's own choice."""
    retries: int = RETRIES
    silence_s: int = SILENCE_S
    prices: dict[str, Any] | None = None
    """Dollars for a million tokens: input, output, cache_read."""
    mcp_servers: tuple[dict[str, Any], ...] = ()
    """Servers the agent starts or reaches: name with command, args, env, or with url, headers."""


def read_options(options: str) -> Options:
    """The row with the options, JSON, over it. Raises ConfigError: `config_invalid`."""
    row = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["codex"]
    row.pop("trials")
    row.pop("trial_options")
    try:
        given = msgspec.json.decode(options, type=dict[str, Any])
        given.pop("profile", None)
        return msgspec.convert({**row, **given}, Options)
    except msgspec.MsgspecError as error:
        known = ", ".join(Options.__struct_fields__)
        raise ConfigError("config_invalid", f"options of the host codex: {error}", hint=f"known are {known}") from error


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
    if wanted is not None and not any(config.glob(f"sessions/*/*/*/*{wanted}.jsonl*")):
        fix = 'run with config.vendor.abp.session = {"keep": true} first; its event names the id'
        raise ConfigError("config_invalid", f"no conversation {wanted} is kept here; {fix}")
    return Place(state, config)


def prepare(run: HostRun, options: Options, place: Place) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command and its environment. Raises BackendError: `backend_unavailable`, the program is not there."""
    env = {**os.environ, "TMPDIR": str(place.state / "tmp")}
    env.pop(STATE, None)
    if place.config is not None:
        env["CODEX_HOME"] = str(place.config)
    env |= run.order.config.env
    program = shutil.which(options.program, path=env.get("PATH"))
    if program is None:
        fix = f"install it: {options.install}" if options.install else "name it with the option `program`"
        raise BackendError("backend_unavailable", f"{options.program} is not found or not executable; {fix}")
    return (program, "app-server", *(word for setting in QUIET for word in ("-c", setting))), env


def thread_of(run: HostRun, options: Options, env: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """The call that opens the thread, and the order in it."""
    asked, own = read_session(run), own_settings(run)
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
    wanted = asked.resume or asked.fork
    if wanted is not None:
        return "thread/resume" if asked.resume else "thread/fork", {"threadId": wanted, **params}
    return "thread/start", {**params, "ephemeral": not (asked.keep or options.own_state)}


def own_settings(run: HostRun) -> dict[str, Any]:
    """What the order says to this agent alone. Raises ConfigError: `config_invalid`."""
    own = run.order.config.vendor.get("codex", {})
    unknown = sorted(set(own) - set(SETTINGS)) if isinstance(own, dict) else ["codex"]
    if unknown:
        raise ConfigError("config_invalid", f"config.vendor.codex: {unknown[0]!r}", hint=", ".join(SETTINGS))
    return dict(own)


def settings_of(run: HostRun, options: Options, env: dict[str, str]) -> dict[str, Any]:
    """The policy and the model's service in the agent's own settings."""
    own, profile = own_settings(run), run.policy.profile
    networked = bool(profile.allow_network or profile.deny_network)
    asked_first = run.policy.decide_tool_call("web_search", {}, root=run.order.workspace.root).allowed != "allow"
    made: dict[str, Any] = {
        # Asked of nobody: the search runs at the model's service, and pictures are read by the agent itself.
        "suppress_unstable_features_warning": True,
        "features": {**FEATURES, "view_image": not profile.deny_read},
        # A user's profile is no part of the order, and may take its time.
        "allow_login_shell": False,
        "web_search": "disabled" if networked or asked_first else "live",
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


def mcp_servers(run: HostRun, options: Options) -> dict[str, Any]:
    """The servers of the configuration and of the order, as the program reads them. Raises ConfigError."""
    rows = [*options.mcp_servers, *(run.order.abp("mcp_servers") or ())]
    made: dict[str, Any] = {}
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("name"), str) or not {"command", "url"} & set(row):
            raise ConfigError("config_invalid", "an MCP server has no name, or neither command nor url")
        names = {"headers": "http_headers"}
        made[row["name"]] = {names.get(name, name): value for name, value in row.items() if name != "name"}
    return made


def prompt_of(run: HostRun) -> str:
    """The first words to the agent: snippets, names of files, the task. Raises BackendError."""
    parts = [f"Context, {snippet.name}:\n{snippet.content}" for snippet in run.order.context.snippets]
    if sum(len(part.encode()) for part in parts) > CONTEXT_BYTES_MAX:
        raise BackendError("backend_context_length", f"the order's snippets are over {CONTEXT_BYTES_MAX} bytes")
    if run.order.context.files:
        parts.append("Files to look at first: " + ", ".join(run.order.context.files))
    return "\n\n".join([*parts, run.order.task])


def ways_of(run: HostRun, options: Options, env: dict[str, str]) -> Ways:
    """The whole order, as the run with the agent takes it. Raises ConfigError, BackendError."""
    from backplane.appserver import Ways
    from backplane.cost import micros, read_price

    for row in run.order.abp("hooks") or ():
        if isinstance(row, dict) and row.get("event") == "post_tool":
            fact = "hooks after tools: this agent shows the model what a long command said before anybody is asked"
            raise BackendError("capability_unsupported", f"{fact}; take the hook out, or another backend")
    asked, config, schema = read_session(run), run.order.config, run.order.abp("output_schema")
    shape = None
    if schema is not None:
        from backplane.tools.structured import Shape

        shape = Shape(schema)
    budget = config.max_budget_usd
    return Ways(
        prompt="\n\n".join([prompt_of(run), *([shape.request()] if shape is not None else [])]),
        open=thread_of(run, options, env),
        turn={"outputSchema": schema} if is_strict(schema) else {},
        session={
            "kept": bool(asked.keep or asked.resume or asked.fork or options.own_state),
            **{name: value for name, value in (("resumed", asked.resume), ("forked", asked.fork)) if value},
        },
        silence_s=options.silence_s,
        shape=shape,
        price=read_price(options.prices, "options.prices") if options.prices is not None else None,
        listed=options.own_state or options.base_url == "https://api.openai.com/v1",
        budget_micros=None if budget is None else micros(Decimal(str(budget))),
    )


def is_strict(schema: Any) -> bool:
    """Whether the model's service takes a schema as it is: it wants every member required and no further ones."""
    if isinstance(schema, list):
        return all(is_strict(item) for item in schema if isinstance(item, dict | list))
    if not isinstance(schema, dict):
        return False
    if schema.get("type") == "object":
        members = schema.get("properties")
        closed = isinstance(members, dict) and schema.get("additionalProperties") is False
        if not closed or set(schema.get("required", ())) != set(members or ()):
            return False
    return all(is_strict(item) for item in schema.values() if isinstance(item, dict | list) and item)


# The run --------------------------------------------------------------------------------------------------------------


async def drive(run: HostRun, options: Options) -> Done:
    """Start the agent's program, run the order, and leave nothing of either."""
    import anyio

    from backplane.process import Command, open_child

    if run.order.config.max_turns == 0:
        await run.carry("turn", {"stop_reason": "max_turns"}, "the limit of 0 turns (max_turns)")
        return Done(outcome="partial")
    state = Path(tempfile.mkdtemp(prefix="backplane-agent-"))
    try:
        argv, env = prepare(run, options, place_of(run, options, state))
        async with open_child(Command(argv=argv, env=env, cwd=run.order.workspace.root)) as child:
            try:
                # Not before: it is loaded while the program starts.
                from backplane.appserver import Turn

                turn = Turn(run, ways_of(run, options, env), child.stdin, child.stdout)
                run.on_cancel, run.on_input, run.on_interrupt = turn.cancel, turn.more, turn.interrupt
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
