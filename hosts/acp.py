"""Any agent that speaks the Agent Client Protocol, by a profile: one process and one session a run.

The argument names a row of `acp.toml`; a backend's options lie over it, and describe an agent that has no row. Every
tool that the agent asks about is put to the control plane. Nothing of the agent is left.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from backplane.agents import OPTIONS
from backplane.contract.capability import Level
from backplane.errors import BackendError, BackplaneError, ConfigError
from backplane.sidecar import Done, Host, HostRun, main

if TYPE_CHECKING:
    from backplane.acp import Call, Client, Session
    from backplane.process import Child

SILENCE_S = 240
"""Without a sign from the agent while no tool runs: below the control plane's 300 s, so that the reason can be told."""
SETTLE_S = 0.1
"""After the answer to a prompt: updates that were sent before it may still come."""
CANCEL_SHARE = 0.5
"""Of the grace: for the agent to end its turn by itself; the rest is for the program."""
STOP_GRACE_S = 1.0
"""For a program whose stdin was closed: a tenth of that is usual."""
LADDER_S = 0.5
CONTEXT_BYTES_MAX = 1024 * 1024
"""Snippets of an order that travel in the prompt."""
STDERR_CHARS = 2000
PROFILES = Path(__file__).with_suffix(".toml")


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an agent is told its model."""

    variable: str | None = None
    arguments: tuple[str, ...] = ()
    default: str | None = None
    """Named where an order names none: an agent may ask another model first which one to take."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A variable that holds the agent's configuration."""

    variable: str
    content: dict[str, Any] = {}
    model: str | None = None


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What has to be known of one agent; the members are explained in `acp.toml`."""

    program: str
    arguments: tuple[str, ...] = ()
    install: str = ""
    home: dict[str, str] = {}
    env: dict[str, str] = {}
    files: dict[str, str] = {}
    config: Config | None = None
    mode: str | None = None
    model: Model = Model()
    usage: Literal["chunks", "quota", "turn", "last_call", "none"] = "none"
    tools: dict[str, str] = {}
    capabilities: dict[str, str] = msgspec.field(default_factory=lambda: {"streaming": "native"})
    own_state: bool = False
    """Use the user's own folders and login in place of the session's."""
    silence_s: int = SILENCE_S
    mcp_servers: tuple[dict[str, Any], ...] = ()
    """Servers the agent starts, in the protocol's words: name, command, args, env."""


def read_profile(name: str, options: str) -> Profile:
    """The profile of this name with the options over it.

    Args:
        options: JSON.

    Raises:
        ConfigError: `config_invalid`.
    """
    rows = tomllib.loads(PROFILES.read_text(encoding="utf-8"))
    try:
        given = msgspec.json.decode(options, type=dict[str, Any])
        given.pop("profile", None)
        return msgspec.convert({**rows.get(name, {}), **given}, Profile)
    except msgspec.MsgspecError as error:
        fix = f"a profile is one of {', '.join(rows)}; its members are explained in {PROFILES.name}"
        raise ConfigError("config_invalid", f"options of the host acp: {error}", hint=fix) from error


class Turn:
    """One run: the agent's program, its session, and the one prompt."""

    def __init__(self, run: HostRun, profile: Profile, child: Child) -> None:
        from backplane.acp import Client, Story

        self.run, self.profile = run, profile
        self.root = run.order.workspace.root
        self.story = Story(run.now, self.root, spoken(run, profile.tools))
        self.client: Client = Client(child.stdin, child.stdout, update=self.update, permit=self.permit)
        self.session: Session | None = None
        self.cancelled = False
        self.silent = False
        self.asking: set[Any] = set()
        self.heard_s = time.monotonic()

    async def update(self, update: Any) -> None:
        self.heard_s = time.monotonic()
        for event in self.story.update(update):
            await self.run.emit(event)

    async def permit(self, tool_call: dict[str, Any]) -> bool | None:
        """Put a question of the agent to the policy and whoever holds it."""
        import anyio

        call, events = self.story.asked(tool_call)
        for event in events:
            await self.run.emit(event)
        with anyio.CancelScope() as scope:
            self.asking.add(scope)
            if self.cancelled:
                return None
            try:
                allowed, reason = await self._may(call)
            finally:
                self.asking.discard(scope)
                self.heard_s = time.monotonic()
        if scope.cancelled_caught:
            return None
        for event in [] if allowed else self.story.deny(call, reason):
            await self.run.emit(event)
        return allowed

    async def _may(self, call: Call) -> tuple[bool, str]:
        name = self.story.name(call)
        # By every name that the tool has; the control plane is told one of them.
        decision = self.run.policy.decide_tool_call(
            call.name or name, call.input, root=self.root, cwd=self.root, aliases=self.profile.tools
        )
        if decision.allowed == "deny":
            # Asked all the same: only so the receipt can say that the call was stopped before it ran.
            await self.run.pass_on({"kind": "tool", "name": name, "input": call.input, "default": "deny"})
            return False, decision.reason
        verdict = await self.run.may(name, call.input, command=call.command, cwd=self.root)
        if verdict.decision == "modify":
            return False, "the input was changed, and this agent takes no other input than its own"
        return verdict.decision == "allow", verdict.reason

    async def cancel(self) -> None:
        """End the turn in order: the agent first, and when it does not, its program."""
        import anyio

        self.cancelled = True
        if self.session is None:
            self.run.scope.cancel()
            return
        for scope in list(self.asking):
            scope.cancel()
        await self.client.cancel(self.session.id)
        await anyio.sleep(self.run.grace_s * CANCEL_SHARE)
        self.run.scope.cancel()

    async def watch(self) -> None:
        """End a turn in which nothing is heard for too long: some agents try again for minutes."""
        import anyio

        while True:
            left_s = self.profile.silence_s - (time.monotonic() - self.heard_s)
            if left_s <= 0 and not self.asking and not self.story.open_calls:
                self.silent = True
                self.silence.cancel()
                return
            await anyio.sleep(max(left_s, 1.0))

    async def go(self) -> Done:
        """From the first word to the agent to the end of its turn."""
        import anyio

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.client.run)
            await self.open()
            assert self.session is not None
            self.silence = anyio.CancelScope()
            self.heard_s = time.monotonic()
            tasks.start_soon(self.watch)
            with self.silence:
                reply = await self.client.prompt(self.session.id, blocks(self.run))
                await anyio.sleep(SETTLE_S)
            if self.silent:
                silence = f"nothing was heard of the agent for {self.profile.silence_s:g} s"
                done = await self.failed("backend_timeout", silence)
            elif reply.fault is not None:
                from backplane.acp import code_of, said

                if reply.fault.gone:
                    raise BackendError("backend_crashed", "the agent's program ended in the middle of its turn")
                done = await self.failed(code_of(reply.fault.code, said(reply.fault)), said(reply.fault))
            else:
                done = await self.ended(reply.result if isinstance(reply.result, dict) else {})
            tasks.cancel_scope.cancel()
        return done

    async def open(self) -> None:
        """Agree on the protocol, open the session, and set what the order asks for."""
        await self.client.initialize("backplane", "0.1.0")
        session = await self.client.new_session(self.root, list(self.profile.mcp_servers))
        body = {"id": session.id, "agent": self.client.agent.get("agentInfo")}
        await self.run.carry("session", body, f"session {session.id}")
        if self.profile.mode and self.profile.mode in session.modes and session.mode != self.profile.mode:
            fault = await self.client.set("session/set_mode", session.id, modeId=self.profile.mode)
            if fault is not None:
                raise BackendError("capability_unsupported", f"the agent's mode cannot be set: {fault.message}")
        model = self.run.order.config.model
        if model is not None and not names_model(self.profile):
            await self.set_model(session, model)
        self.session = session

    async def set_model(self, session: Session, model: str) -> None:
        if model in session.options.get("model", ()):
            fault = await self.client.set("session/set_config_option", session.id, configId="model", value=model)
        elif model in session.models:
            fault = await self.client.set("session/set_model", session.id, modelId=model)
        else:
            offered = ", ".join((*session.options.get("model", ()), *session.models)[:20]) or "none by name"
            raise BackendError("backend_model_not_found", f"the agent has no model {model!r}", hint=f"it has {offered}")
        if fault is not None:
            raise BackendError("backend_model_not_found", f"the model {model!r} cannot be set: {fault.message}")

    async def ended(self, result: dict[str, Any]) -> Done:
        """Judge a turn that ended by the agent's own account."""
        stop = str(result.get("stopReason"))
        unanswered = not self.story.closed_with_words
        for event in self.story.end(stop):
            await self.run.emit(event)
        usage_raw = {name: result[name] for name in ("usage", "_meta", "stopReason") if name in result}
        usage = usage_of(self.profile.usage, result, self.story.usages, self.story.acted)
        if stop == "cancelled" or self.cancelled:
            return Done(outcome="partial", usage=usage, usage_raw=usage_raw)
        if stop == "refusal":
            return await self.failed("backend_content_filtered", "the model refused to go on", usage_raw)
        if stop == "end_turn" and unanswered and not self.story.acted:
            silent = "the agent ended its turn without a word: so it hides a failure of its model"
            return await self.failed("backend_unavailable", silent, usage_raw)
        if stop == "end_turn" and unanswered:
            await self.run.warn("the agent ended its turn after a tool and without a word")
        whole = stop == "end_turn" and not unanswered
        return Done(outcome="complete" if whole else "partial", usage=usage, usage_raw=usage_raw)

    async def failed(self, code: str, words: str, usage_raw: Any = None) -> Done:
        for event in self.story.message():
            await self.run.emit(event)
        await self.run.error(words, code)
        return Done(outcome="failed", usage_raw={"error": words, **(usage_raw or {})})


def spoken(run: HostRun, tools: dict[str, str]) -> dict[str, str]:
    """The agent's tools that go by their neutral names: not those where a rule is about the agent's own word."""

    def verdict(name: str) -> str:
        return run.policy.decide_tool_call(name, {}).allowed

    return {own: neutral for own, neutral in tools.items() if verdict(own) == verdict(neutral)}


def usage_of(where: str, result: dict[str, Any], calls: list[Any], acted: bool) -> Any:
    """Tokens of the turn, from where this agent tells them; what it tells of a part alone stays unknown."""
    from backplane.acp.story import read_usage, total
    from backplane.contract.receipt import Usage

    meta = result.get("_meta") if isinstance(result.get("_meta"), dict) else {}
    quota = meta.get("quota") if isinstance(meta, dict) else None
    found = None
    if where == "chunks":
        found = total(calls)
    elif where == "quota" and isinstance(quota, dict):
        found = read_usage(quota.get("token_count"))
    elif where == "turn" or (where == "last_call" and not acted):
        found = read_usage(result.get("usage"))
    return found or Usage()


def blocks(run: HostRun) -> list[Any]:
    """The prompt: the order's snippets and files, then the task."""
    parts: list[Any] = []
    left = CONTEXT_BYTES_MAX
    for snippet in run.order.context.snippets:
        left -= len(snippet.content.encode())
        if left < 0:
            raise BackendError("backend_context_length", f"the order's snippets are over {CONTEXT_BYTES_MAX} bytes")
        parts.append({"type": "text", "text": f"Context, {snippet.name}:\n{snippet.content}"})
    for path in run.order.context.files:
        full = os.path.join(run.order.workspace.root, path)
        parts.append({"type": "resource_link", "uri": Path(full).as_uri(), "name": path})
    return [*parts, {"type": "text", "text": run.order.task}]


def require_effect(run: HostRun) -> None:
    """Refuse what an order says and these agents cannot be told, before anything is started.

    Raises:
        BackendError: `capability_unsupported`.
    """
    order = run.order
    asked = {
        "max_budget_usd": (order.config.max_budget_usd is not None, "this agent does not tell what it costs"),
        "abp.output_schema": (order.abp("output_schema") is not None, "this agent cannot be given a schema"),
        "abp.session": (order.abp("session") is not None, "every run is a session of its own here"),
        "abp.mode": (order.abp("mode") == "passthrough", "the agent's messages are kept as events alone"),
    }
    for name, (is_asked, why) in asked.items():
        if is_asked:
            raise BackendError("capability_unsupported", f"{name} would have no effect: {why}", hint="leave it out")


def names_model(profile: Profile) -> bool:
    """Whether the model is named before the start and not over the protocol."""
    by_config = profile.config is not None and profile.config.model is not None
    return by_config or profile.model.variable is not None or bool(profile.model.arguments)


def prepare(run: HostRun, profile: Profile, state: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command and its environment; the session's own folders are made.

    Raises:
        BackendError: `backend_unavailable`, the program is not there.
    """
    # What this process was given is for the agent: its keys, its addresses, the order's own variables.
    env = {**os.environ, **run.order.config.env, "TMPDIR": str(state / "tmp"), **profile.env}
    (state / "tmp").mkdir()
    program = shutil.which(profile.program, path=env.get("PATH"))
    if program is None:
        fix = f"install it: {profile.install}" if profile.install else "name it with the option `program`"
        raise BackendError("backend_unavailable", f"{profile.program} is not found or not executable", hint=fix)
    for variable, folder in {} if profile.own_state else profile.home.items():
        (state / folder).mkdir(parents=True, exist_ok=True)
        env[variable] = str(state / folder)
    for name, content in {} if profile.own_state else profile.files.items():
        (state / name).parent.mkdir(parents=True, exist_ok=True)
        (state / name).write_text(content, encoding="utf-8")
    model = run.order.config.model or profile.model.default
    arguments = profile.arguments
    if model is not None and profile.model.arguments:
        arguments = (*arguments, *profile.model.arguments, model)
    if model is not None and profile.model.variable:
        env[profile.model.variable] = model
    if profile.config is not None:
        env[profile.config.variable] = configured(profile.config, env.get(profile.config.variable), model)
    return (program, *arguments), env


def configured(config: Config, users: str | None, model: str | None) -> str:
    """The user's configuration with ours laid over it.

    Raises:
        ConfigError: `config_invalid`.
    """
    try:
        content = msgspec.json.decode(users, type=dict[str, Any]) if users else {}
    except msgspec.MsgspecError as error:
        raise ConfigError("config_invalid", f"the variable {config.variable} holds no JSON object: {error}") from error
    content = {**content, **config.content}
    if model is not None and config.model is not None:
        content[config.model] = model
    return msgspec.json.encode(content).decode()


async def drive(run: HostRun, profile: Profile) -> Done:
    """Start the agent's program, run the turn, and leave nothing of either."""
    import anyio

    from backplane.process import Command, open_child

    require_effect(run)
    state = Path(tempfile.mkdtemp(prefix="backplane-agent-"))
    try:
        argv, env = prepare(run, profile, state)
        async with open_child(Command(argv=argv, env=env, cwd=run.order.workspace.root)) as child:
            turn = Turn(run, profile, child)
            run.on_cancel = turn.cancel
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


def level(text: str) -> Level:
    """A level as a profile writes it: a word of the contract, or the reason why it is restricted."""
    return Level(text) if text in ("native", "emulated", "unsupported") else Level("restricted", text)  # type: ignore[arg-type]


if __name__ == "__main__":
    NAME = sys.argv[1] if len(sys.argv) > 1 else ""
    PROFILE = read_profile(NAME, os.environ.pop(OPTIONS, "{}"))
    HOST = Host(
        id=NAME or Path(PROFILE.program).name,
        capabilities={name: level(text) for name, text in PROFILE.capabilities.items()},
    )

    async def work(run: HostRun) -> Done:
        return await drive(run, PROFILE)

    main(HOST, work)
