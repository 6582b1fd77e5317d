"""Starts an agent that speaks the Agent Client Protocol: its command and environment, from its row of the table.

`agent` sends everything after the start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from backplane.agents.order import (
    KEPT,
    asked_at,
    behind_key_proxy,
    environment_of,
    found,
    own_settings,
    place_of,
    require_able,
    require_price,
    require_same_folder,
    without_version,
)
from backplane.agents.program import Started
from backplane.agents.rows import BASE_URL, AgentRow, Config, past_proxies
from backplane.contract.canonical import Json
from backplane.errors import BackendError, ConfigError
from backplane.host import HostRun


def require_effect(run: HostRun, profile: AgentRow) -> None:
    """Refuse an order that this agent cannot carry out, before its program is started.

    Raises:
        BackendError: `capability_unsupported`.
        ConfigError: `config_invalid`, an unknown member of the order, or a budget without prices.
    """
    own_settings(run, run.host.id, ())
    limits = {"max_budget_usd": run.order.config.max_budget_usd, "abp.budget_tokens": run.order.abp("budget_tokens")}
    limited = [name for name, limit in limits.items() if limit is not None]
    if limited and profile.usage not in ("chunks", "record") and not behind_key_proxy():
        why = "this agent does not tell what each call takes, and no key_proxy sees it"
        raise BackendError("capability_unsupported", f"{limited[0]} would have no effect: {why}", hint="leave it out")
    require_able(run, profile)
    require_price(run, profile.prices)


def start(profile: AgentRow, run: HostRun, state: str) -> Started:
    """Return the command and environment for an order, and make its folders. Raises ConfigError, BackendError."""
    require_effect(run, profile)
    place = place_of(run, state, own=profile.own_state, conversations=KEPT)
    if profile.in_place:
        require_same_folder(run, place)
    address = asked_at(profile.base_url)
    if profile.adds_version:
        address = without_version(address)
    # This process's environment is meant for the agent: keys, addresses, the order's variables.
    env = variables_of(profile, environment_of(run, place, {}), address)
    if profile.own_server is not None:
        env |= past_proxies(env, profile.own_server)
    program = found(profile.program, profile.install, env)
    if place.config is not None:
        for variable, folder in profile.home.items():
            env[variable] = os.path.join(place.config, folder)
            os.makedirs(env[variable], exist_ok=True)
        for name, content in profile.files.items():
            path = Path(place.config, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_at(address, content), encoding="utf-8")
    model = run.order.config.model or profile.model
    arguments = profile.arguments
    if model is not None and profile.model_by.arguments:
        arguments = (*arguments, *profile.model_by.arguments, model)
    if model is not None and profile.model_by.variable:
        env[profile.model_by.variable] = model
    if profile.config is not None:
        configuration = configured(profile.config, env.get(profile.config.variable), model)
        if profile.config.shows_images and run.order.abp("images"):
            let_see(configuration, configuration.get(profile.config.model or ""))
        env[profile.config.variable] = _at(address, msgspec.json.encode(configuration).decode())
    return (program, *(_at(address, word) for word in arguments)), env


def variables_of(profile: AgentRow, env: Mapping[str, str], address: str | None) -> dict[str, str]:
    """Return the environment with the variables of the agent's row; only an address in the environment has precedence.

    Args:
        address: address for the agent's model requests.

    Raises:
        ConfigError: `config_invalid`, the environment names another address than that of the key's proxy.
    """
    addresses = {name for name, value in profile.env.items() if BASE_URL in value}
    named = sorted(addresses & env.keys())
    if named and behind_key_proxy():
        fact = f"{named[0]} names an address of the model's service, of which the key proxy knows nothing"
        raise ConfigError("config_invalid", fact, hint="with key_proxy name it by options = { base_url = … }")
    own = {name: value for name, value in profile.env.items() if name not in addresses or (address and name not in env)}
    return {name: _at(address, value) for name, value in {**env, **own}.items()}


def _at(address: str | None, text: str) -> str:
    return text.replace(BASE_URL, address or BASE_URL)


def configured(config: Config, users: str | None, model: str | None) -> dict[str, Any]:
    """Return the user's configuration, overridden by ours.

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
    return content


def let_see(content: dict[str, Any], model: Json) -> None:
    """Declare in a configuration that its model takes images, as the agent's own table may lack this.

    Args:
        model: `PROVIDER/NAME`, as the configuration names it.

    Raises:
        BackendError: `capability_unsupported`, no model is named, or the user's entry for it takes none.
    """
    place: Any = content
    if not isinstance(model, str) or "/" not in model:
        fact = "abp.images would have no effect: this agent sends images only to a model that is named"
        raise BackendError("capability_unsupported", fact, hint="name one: --model PROVIDER/NAME")
    provider, _, name = model.partition("/")
    for member in ("provider", provider, "models", name):
        place = place.setdefault(member, {})
        if not isinstance(place, dict):
            raise ConfigError("config_invalid", f"{member!r} in the agent's configuration is not an object")
    takes = place.setdefault("modalities", {"input": ["text", "image"], "output": ["text"]})
    if "image" not in str(takes):
        fact = f"abp.images would have no effect: the agent's configuration says that {model!r} takes no images"
        raise BackendError("capability_unsupported", fact, hint="choose another model, or correct the configuration")
