"""Hides a model's key from its host: checks whether that works, and starts the host behind a proxy that has the key.

The proxy is in `gateway.key_proxy`, and its guarantees are in `contracts/isolation.md`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from backplane.agents import rows
from backplane.config import BackendSettings, Settings
from backplane.errors import BackendError, ConfigError
from backplane.process.launch import StartCommand
from backplane.upstream.endpoint import Endpoint

if TYPE_CHECKING:
    from backplane.gateway.key_proxy import KeyUse
    from backplane.runtime.backends import Link, Opener


class HeldKey(msgspec.Struct, frozen=True):
    """A key that our proxy adds to the requests of a host that does not have the key."""

    variable: str
    base_url: str
    """Address of the service that takes the key."""
    key_in_query: bool = False
    prices: dict[str, Any] | None = None
    """The configured prices of the model; None takes the price table."""
    routes: Any = None
    """Services that answer in place of the agent's own (`gateway.routes.ModelRoutes`); None passes requests on."""
    secrets: tuple[str, ...] = ()
    """Keys of the services in `routes`."""


def held_key_of(
    name: str,
    declared: BackendSettings,
    settings: Settings,
    agent: rows.AgentRow | None,
    service: Endpoint | None,
    environ: Mapping[str, str],
) -> HeldKey | None:
    """Return the key that a proxy adds for the host; None if the host gets its key itself.

    Args:
        environ: variables that hold the keys of other services.

    Raises:
        ConfigError: `config_invalid`, a proxy would have no effect.
    """
    if declared.model_backend is not None:
        key_env, base_url = _asked(name, f"leave model_backend out of [backends.{name}]", declared, agent, None)
        return _by_other_service(name, declared.model_backend, HeldKey(key_env, base_url), settings, environ)
    wanted = settings.key_proxy if declared.key_proxy is None else declared.key_proxy
    has_none = (agent is None and service is None) or (service is not None and not service.variables)
    if not wanted or (declared.key_proxy is None and has_none):
        return None
    key_env, base_url = _asked(name, f"set key_proxy = false in [backends.{name}]", declared, agent, service)
    prices = service.prices if service is not None else agent.prices if agent is not None else None
    if prices is not None:
        from backplane.upstream.cost import read_price  # Imported here, as its table of prices is slow to build.

        read_price(prices, f"[backends.{name}] options.prices")
    return HeldKey(key_env, base_url, service is not None and service.key_in_query, prices)


def _asked(
    name: str, fix: str, declared: BackendSettings, agent: rows.AgentRow | None, service: Endpoint | None
) -> tuple[str, str]:
    """Return the variable of a host's key, and the address of the service that takes the key.

    Args:
        fix: the next step of the error.

    Raises:
        ConfigError: `config_invalid`, a proxy would have no effect.
    """
    asked = agent or service
    key_env, base_url = (asked.key_env, asked.base_url) if asked is not None else (None, None)
    if declared.remote:
        why = "the host works on another machine, which a proxy of this one does not reach"
    elif agent is not None and agent.own_state:
        why = "with own_state the agent has a login of its own"
    elif service is not None and service.has_key_headers:
        why = "its headers carry keys, and a proxy that of key_env alone"
    elif asked is None:
        why = "nobody knows which key its host needs, and for which service"
    elif key_env is None or base_url is None:
        why = "nothing says which variable has the key (key_env) and for which service (base_url)"
    elif agent is not None and not agent.is_told(declared.env):
        why = "nothing tells the agent where to ask: put {base_url} into env or options"
    elif (parts := urlsplit(base_url)).username is not None or parts.query or parts.fragment:
        why = "base_url is no plain address, as https://host/v1"
    else:
        return key_env, base_url
    fact = f"[backends.{name}] a proxy would have no effect: {why}"
    raise ConfigError("config_invalid", fact, hint=f"give options = {{ key_env = …, base_url = … }}, or {fix}")


def _by_other_service(name: str, route: str, own: HeldKey, settings: Settings, environ: Mapping[str, str]) -> HeldKey:
    """Return an agent's own key with the services that answer in place of the agent's service.

    Raises:
        ConfigError: `backend_not_found`, there is no such service.
        BackendError: `backend_unavailable`, the service's key is not set.
    """
    # Imported here, as most backends need no HTTP client.
    from backplane.config import GatewaySettings
    from backplane.gateway.routes import ModelRoutes

    one = msgspec.structs.replace(settings, gateway=GatewaySettings(models={"*": route}))
    routes = ModelRoutes(one, environ, f"backends.{name}.model_backend")
    keys = []
    for endpoint in routes.endpoints():
        if endpoint.key_env is not None and not endpoint.key:
            fact = f"backend {name!r} asks {route!r}, and its key is missing: {endpoint.key_env} is not set"
            raise BackendError("backend_unavailable", fact, hint=f"export {endpoint.key_env}=…")
        keys += [endpoint.key] if endpoint.key else []
    return msgspec.structs.replace(own, routes=routes, secrets=tuple(keys))


def check_key(name: str, variable: str, key: str, servers: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a key that the proxy cannot add to requests, or that the agent would get another way.

    Raises:
        BackendError: `backend_unavailable`, there is no key.
        ConfigError: `config_invalid`, a header cannot carry the key, or a configured MCP server gets it.
    """
    if not key:
        fact = f"backend {name!r} has a key_proxy and no key: {variable} is not set"
        raise BackendError("backend_unavailable", fact, hint=f"export {variable}=…")
    if not (key.isascii() and key.isprintable()) or " " in key:
        fact = f"the key in {variable} has a blank, or a character that no header can carry"
        raise ConfigError("config_invalid", fact, hint=f"correct {variable}: one word of ASCII")
    for row in servers:
        # The agent starts its servers, so its commands can read what these get.
        if any(key in value for part in ("env", "headers") for value in row.get(part, {}).values()):
            fact = f"[mcp_servers] {row['name']} is given the key that the agent of {name!r} is not to have"
            raise ConfigError("config_invalid", fact, hint="give the server another key, or leave key_proxy out")


@asynccontextmanager
async def behind_proxy(held: HeldKey, command: StartCommand, start: Opener, use: KeyUse | None) -> AsyncIterator[Link]:
    """Run the proxy that has the key, and the host with a placeholder for the key, during the block.

    Args:
        use: counts the requests; None if the counts are not needed.
    """
    # Imported here, as most backends need no HTTP client.
    from backplane.gateway.in_run import open_run_gateway
    from backplane.gateway.key_proxy import KeyUse, open_key_proxy
    from backplane.redact.secrets import SECRET_CHARS_MIN

    key = command.env.get(held.variable, "").strip()
    counted = use or KeyUse()
    opened: Any
    if held.routes is not None:
        opened = open_run_gateway(held.routes, held.base_url, counted)
    else:
        opened = open_key_proxy(held.base_url, key, counted, key_in_query=held.key_in_query)
    async with opened as proxy:
        env = dict(command.env)
        if len(key) >= SECRET_CHARS_MIN:  # Other values may contain the key, too, such as an agent's configuration.
            env = {name: value.replace(key, proxy.placeholder) for name, value in env.items()}
        env |= rows.past_proxies(env, proxy.host)
        env |= {held.variable: proxy.placeholder, rows.KEY_PROXY: proxy.address}
        behind = msgspec.structs.replace(command, env=env)
        async with start(behind, (f"{proxy.host}:{proxy.port}",)) as link:
            yield link
