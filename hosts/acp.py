"""Any agent that speaks the Agent Client Protocol, by a profile: one process and one session a run.

The argument names a row of `acp.toml`; a backend's options lie over it, and describe an agent that has no row. Every
tool that the agent asks about is put to the control plane. Nothing of the agent is left.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from backplane.agents.begin import BegunProgram, Started, serve
from backplane.agents.options import Config, Profile
from backplane.agents.order import (
    KEPT,
    AgentFolders,
    RunSpec,
    budget_of,
    environment_of,
    folders_of,
    found,
    image_blocks,
    own_settings,
    place_of,
    price_from,
    read_conversation,
    read_options,
    require_price,
    require_same_folder,
    shape_of,
    shows_results,
)
from backplane.agents.shipped import OPTIONS
from backplane.contract.capability import EMULATED, Level
from backplane.contract.work import OF_AGENT
from backplane.errors import BackendError, ConfigError
from backplane.host import EXTENSIONS, Given, Host, HostRun

if TYPE_CHECKING:
    from backplane.agents.session import AgentRun
    from backplane.process.child import Child

EMULATED_FOR_ALL = ("checkpointing", "structured_output_json_schema")
"""What the host does in place of any such agent."""
HEEDS = OF_AGENT
"""All of them: what an agent cannot is refused by its profile, with the reason."""


def require_effect(run: Given, profile: Profile) -> None:
    """Refuse what an order says and this agent cannot be told, before anything is started.

    Raises:
        BackendError: `capability_unsupported`.
        ConfigError: `config_invalid`, a member of the order that nobody knows, or a budget without prices.
    """
    own_settings(run, name_of(profile), ())
    budget = run.order.config.max_budget_usd is not None
    asked = {
        "max_budget_usd": (
            budget and profile.usage not in ("chunks", "record"),
            "this agent does not tell what each call takes",
        ),
        "abp.session": (read_conversation(run).kept and not profile.sessions, "this agent keeps no conversation"),
        "a hook after tools": (shows_results(run), "this agent shows its model a result before anybody is asked"),
    }
    for name, (is_asked, why) in asked.items():
        if is_asked:
            raise BackendError("capability_unsupported", f"{name} would have no effect: {why}", hint="leave it out")
    require_price(run, profile.prices)


def prepare(run: Given, profile: Profile, place: AgentFolders) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command and its environment; the session's own folders are made.

    Raises:
        BackendError: `backend_unavailable`, the program is not there.
    """
    # What this process was given is for the agent: its keys, its addresses, the order's own variables.
    env = environment_of(run, place, {}) | profile.env
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


def spec_of(run: Given, profile: Profile) -> RunSpec:
    """The order, as any agent's run takes it. Raises ConfigError, BackendError."""
    from backplane.agents.acp.agent import image_block, prompt_of, text_block

    shape = shape_of(run)
    return RunSpec(
        prompt=[
            *prompt_of(run),
            *([text_block(shape.request())] if shape is not None else []),
            *image_blocks(run, image_block),
        ],
        silence_s=profile.silence_s,
        conversation=read_conversation(run),
        shape=shape,
        price=price_from(profile.prices),
        budget_micros=budget_of(run),
        turns_max=run.order.config.max_turns if profile.usage == "record" else None,
    )


def start(profile: Profile, run: Given, state: str) -> Started:
    """What is started for an order. Raises ConfigError, BackendError."""
    require_effect(run, profile)
    place = place_of(run, state, own=profile.own_state, conversations=KEPT)
    if profile.in_place:
        require_same_folder(run, place)
    return prepare(run, profile, place)


def speak(profile: Profile, run: HostRun, child: Child, begun: BegunProgram) -> AgentRun:
    """Make the run with the agent's program. Raises ConfigError, BackendError."""
    from backplane.agents.acp.agent import Agent
    from backplane.agents.session import AgentRun

    place = folders_of(run, begun.state, own=profile.own_state)
    return AgentRun(run, spec_of(run, profile), lambda session: Agent(session, profile, place, child))


def name_of(profile: Profile) -> str:
    """Return the name of the row, or of the program where there is none."""
    return sys.argv[1] if len(sys.argv) > 1 else Path(profile.program).name


def level(text: str) -> Level:
    """A level as a profile writes it: a word of the contract, or the reason why it is restricted."""
    return Level(text) if text in ("native", "emulated", "unsupported") else Level("restricted", text)  # type: ignore[arg-type]


if __name__ == "__main__":
    PROFILE = read_options(__file__, "".join(sys.argv[1:2]), os.environ.pop(OPTIONS, "{}"), Profile)
    STEERED = ("input/1", "interrupt/1", *(("session/1",) if PROFILE.sessions else ()))
    HOST = Host(
        id=name_of(PROFILE),
        capabilities={
            **dict.fromkeys(EMULATED_FOR_ALL, EMULATED),
            **{name: level(text) for name, text in PROFILE.capabilities.items()},
        },
        extensions=(*EXTENSIONS, *STEERED),
        heeds=HEEDS,
    )
    serve(HOST, PROFILE, start, speak)
