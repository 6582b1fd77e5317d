"""Any agent that speaks the Agent Client Protocol, by a profile: one process and one session a run.

The argument names a row of `acp.toml`; a backend's options lie over it, and describe an agent that has no row. Every
tool that the agent asks about is put to the control plane. Nothing of the agent is left.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from backplane.agents.options import Config, Profile
from backplane.agents.order import (
    KEPT,
    Place,
    found,
    own_settings,
    place_of,
    read_options,
    read_session,
    require_same_folder,
    server_rows,
    shape_of,
    shows_results,
    snippets,
)
from backplane.agents.shipped import OPTIONS, STATE
from backplane.contract.capability import EMULATED, Level
from backplane.contract.work import OF_HOST
from backplane.errors import BackendError, ConfigError
from backplane.host import EXTENSIONS, Done, Given, Host, HostRun, main

if TYPE_CHECKING:
    from backplane.agents.acp import Turn, Ways
    from backplane.agents.begin import Program, Started
    from backplane.process import Child
    from backplane.tools.structured import Shape

EMULATED_FOR_ALL = ("structured_output_json_schema",)
"""What the host does in place of any such agent."""
HEEDS = tuple(OF_HOST)
"""All of them: what an agent cannot is refused by its profile, with the reason."""


def spoken(run: HostRun, tools: dict[str, str]) -> dict[str, str]:
    """The agent's tools that go by their neutral names: not those where a rule is about the agent's own word alone."""

    def verdict(name: str, neutral: str) -> str:
        return run.policy.decide_tool_call(name, _ANYWHERE, aliases={name: neutral}).allowed

    def by_own_word(own: str, neutral: str) -> bool:
        whole = verdict(own, neutral)
        return verdict(neutral, neutral) != whole and verdict(own, own) == whole

    return {own: neutral for own, neutral in tools.items() if not by_own_word(own, neutral)}


_ANYWHERE: Final = {"path": "a", "url": "http://a"}
"""Of a call that is judged by its name: one without a place is judged by that."""


def blocks(run: HostRun) -> tuple[Any, ...]:
    """The order's snippets and files, then the task."""
    said = [{"type": "text", "text": text} for text in snippets(run)]
    named = [
        {"type": "resource_link", "uri": Path(run.order.workspace.root, path).as_uri(), "name": path}
        for path in run.order.context.files
    ]
    return (*said, *named, {"type": "text", "text": run.order.task})


def servers(run: HostRun, profile: Profile) -> tuple[dict[str, Any], ...]:
    """MCP servers in the protocol's words, where a mapping is a list of pairs."""
    made = []
    for name, row in server_rows(run, profile.mcp_servers).items():
        given = {"args": [], "env": {}} if "command" in row else {"type": "http", "headers": {}}
        pairs = {member: _pairs(value) for member, value in {**given, **row}.items()}
        made.append({"name": name, **pairs})
    return tuple(made)


def _pairs(value: Any) -> Any:
    return [{"name": name, "value": text} for name, text in value.items()] if isinstance(value, dict) else value


def require_effect(run: HostRun, id: str, profile: Profile) -> None:
    """Refuse what an order says and this agent cannot be told, before anything is started.

    Raises:
        BackendError: `capability_unsupported`.
        ConfigError: `config_invalid`, a member of the order that nobody knows, or a budget without prices.
    """
    own_settings(run, id, ())
    budget = run.order.config.max_budget_usd is not None
    asked = {
        "max_budget_usd": (budget and profile.usage != "chunks", "this agent does not tell what each call takes"),
        "abp.session": (read_session(run).kept and not profile.sessions, "this agent keeps no conversation"),
        "a hook after tools": (shows_results(run), "this agent shows its model a result before anybody is asked"),
    }
    for name, (is_asked, why) in asked.items():
        if is_asked:
            raise BackendError("capability_unsupported", f"{name} would have no effect: {why}", hint="leave it out")
    if budget and profile.prices is None:
        fact = "max_budget_usd cannot be held: what the model costs is not known"
        fix = "give options = {prices = {input = …, output = …}}, in dollars"
        raise ConfigError("config_invalid", fact, hint=fix)


def names_model(profile: Profile) -> bool:
    """Whether the model is named before the start alone, and not over the protocol."""
    return profile.model.variable is not None or bool(profile.model.arguments)


def prepare(run: Given, profile: Profile, place: Place) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command and its environment; the session's own folders are made.

    Raises:
        BackendError: `backend_unavailable`, the program is not there.
    """
    # What this process was given is for the agent: its keys, its addresses, the order's own variables.
    env = {**os.environ, **run.order.config.env, "TMPDIR": os.path.join(place.state, "tmp"), **profile.env}
    env.pop(STATE, None)
    if profile.own_server is not None:
        for name in ("NO_PROXY", "no_proxy"):
            env[name] = ",".join(filter(None, (env.get(name), profile.own_server)))
    program = found(profile.program, profile.install, env)
    if place.config is not None:
        for variable, folder in profile.home.items():
            env[variable] = os.path.join(place.config, folder)
            os.makedirs(env[variable], exist_ok=True)
        for name, content in profile.files.items():
            path = Path(place.config, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
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


def ways_of(run: HostRun, profile: Profile, place: Place, shape: Shape | None) -> Ways:
    """The whole order, as the run with the agent takes it. Raises ConfigError, BackendError."""
    from backplane.agents.acp import Ways
    from backplane.agents.acp.work import text_block
    from backplane.upstream.cost import read_price

    asked_for = () if shape is None else (text_block(shape.request()),)
    return Ways(
        prompt=(*blocks(run), *asked_for),
        tools=profile.tools,
        spoken=spoken(run, profile.tools),
        servers=servers(run, profile),
        mode=profile.mode,
        model=None if names_model(profile) else run.order.config.model,
        configured=profile.config is not None and profile.config.model is not None,
        usage=profile.usage,
        silence_s=profile.silence_s,
        asked=read_session(run),
        place=place,
        shape=shape,
        price=read_price(profile.prices, "options.prices") if profile.prices is not None else None,
        notices=profile.notices,
    )


async def drive(run: HostRun, id: str, profile: Profile) -> Done:
    """Have the agent's program run the order."""
    from backplane.agents import program

    require_effect(run, id, profile)
    shape = shape_of(run)
    places: list[Place] = []

    def start(run: Given, state: str) -> Started:
        places.append(place_of(run, state, own=profile.own_state, conversations=KEPT))
        if profile.in_place:
            require_same_folder(run, places[0])
        return prepare(run, profile, places[0])

    def speak(child: Child, begun: Program) -> Turn:
        from backplane.agents.acp import Turn

        return Turn(run, ways_of(run, profile, places[0], shape), child.stdin, child.stdout)

    return await program.drive(run, start, speak)


def level(text: str) -> Level:
    """A level as a profile writes it: a word of the contract, or the reason why it is restricted."""
    return Level(text) if text in ("native", "emulated", "unsupported") else Level("restricted", text)  # type: ignore[arg-type]


if __name__ == "__main__":
    NAME = sys.argv[1] if len(sys.argv) > 1 else ""
    PROFILE = read_options(__file__, NAME, os.environ.pop(OPTIONS, "{}"), Profile)
    STEERED = ("input/1", "interrupt/1", *(("session/1",) if PROFILE.sessions else ()))
    HOST = Host(
        id=NAME or Path(PROFILE.program).name,
        capabilities={
            **dict.fromkeys(EMULATED_FOR_ALL, EMULATED),
            **{name: level(text) for name, text in PROFILE.capabilities.items()},
        },
        extensions=(*EXTENSIONS, *STEERED),
        heeds=HEEDS,
    )

    async def work(run: HostRun) -> Done:
        return await drive(run, HOST.id, PROFILE)

    main(HOST, work)
