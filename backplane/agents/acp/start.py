"""Starts an agent that speaks the Agent Client Protocol: its command and environment, from its row of the table.

`agent` sends everything after the start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from backplane.agents.order import behind_key_proxy, own_settings, require_price, without_version
from backplane.agents.rows import BASE_URL, AgentRow, Config, past_proxies
from backplane.agents.start import KEPT, AgentStart
from backplane.contract.canonical import Json
from backplane.errors import BackendError, ConfigError


def start(begun: AgentStart) -> list[str]:
    """Return the command for an order, and set its environment. Raises ConfigError, BackendError."""
    run, row, address = begun.run, begun.row, begun.address
    own_settings(run, run.host.id, ())
    limits = {"max_budget_usd": run.order.config.max_budget_usd, "abp.budget_tokens": run.order.abp("budget_tokens")}
    limited = [name for name, limit in limits.items() if limit is not None]
    if limited and row.usage not in ("chunks", "record") and not behind_key_proxy():
        why = "this agent does not tell what each call takes, and no key_proxy sees it"
        raise BackendError("capability_unsupported", f"{limited[0]} would have no effect: {why}", hint="leave it out")
    require_price(run, row.prices)
    begun.prepare(KEPT)
    if row.in_place:
        begun.require_same_folder()
    if row.adds_version:
        address = without_version(address)
    # This process's environment is meant for the agent: keys, addresses, the order's variables.
    env = begun.env = variables_of(row, begun.env, address)
    if row.own_server is not None:
        env |= past_proxies(env, row.own_server)
    if begun.config is not None:
        for variable, folder in row.home.items():
            env[variable] = os.path.join(begun.config, folder)
            os.makedirs(env[variable], exist_ok=True)
        for name, content in row.files.items():
            path = Path(begun.config, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_at(address, content), encoding="utf-8")
    words = [_at(address, word) for word in row.arguments]
    if begun.model is not None:
        words += [*row.model_by.arguments, begun.model] if row.model_by.arguments else []
        env |= {row.model_by.variable: begun.model} if row.model_by.variable else {}
    if row.config is not None:
        configuration = configured(row.config, env.get(row.config.variable), begun.model)
        if row.config.shows_images and run.order.abp("images"):
            let_see(configuration, configuration.get(row.config.model or ""))
        env[row.config.variable] = _at(address, msgspec.json.encode(configuration).decode())
    return [begun.find_program(), *words]


def variables_of(row: AgentRow, env: Mapping[str, str], address: str | None) -> dict[str, str]:
    """Return the environment with the variables of the agent's row, which replace others, except for an address.

    Args:
        address: address for the agent's model requests.

    Raises:
        ConfigError: `config_invalid`, the environment names an address, but requests must go to the key proxy.
    """
    addresses = {name for name, value in row.env.items() if BASE_URL in value}
    named = sorted(addresses & env.keys())
    if named and behind_key_proxy():
        fact = f"{named[0]} names an address of the model's service, of which the key proxy knows nothing"
        raise ConfigError("config_invalid", fact, hint="with key_proxy name it by options = { base_url = … }")
    own = {name: value for name, value in row.env.items() if name not in addresses or (address and name not in env)}
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
        BackendError: `capability_unsupported`, no model is named, or the user's entry for it takes no images.
        ConfigError: `config_invalid`, the configuration has no object where the entry should be.
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
