"""Finds the services for a model's name: in the table `[gateway.models]`, or else among vendors whose keys are set."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

import msgspec

from backplane.config import BackendSettings, GatewayRouteSettings, GatewaySettings, Settings
from backplane.errors import ConfigError
from backplane.gateway.choice import TIMED, Choice, RequestFacts, Standing, now_ms, order
from backplane.gateway.fronts import ClientCall, ModelRow
from backplane.gateway.record import ExchangeEnd
from backplane.upstream.cost import Price, read_price
from backplane.upstream.endpoint import PROTOCOLS, VARIABLE, Endpoint, with_keys
from backplane.upstream.presets import HOST, PRESETS, read_options, with_address
from backplane.upstream.prices import facts_of, known_models, price_of

USUAL: Final[Mapping[str, tuple[str, ...]]] = {
    "anthropic": ("claude-*",),
    "openai": ("gpt-*", "o1*", "o3*", "o4*", "codex-*", "chatgpt-*", "text-embedding-*"),
    "gemini": ("gemini-*", "gemma-*"),
}
"""Preset → patterns of its models' names. Without a configured table, the presets whose keys are set form it."""

STANDINGS_MAX: Final = 500
"""Maximum pairs of service and model whose times and pauses are kept: a pattern may match any number of names."""

GLOB: Final = re.compile(r"[*?\[]")


class ModelTarget(msgspec.Struct, frozen=True, kw_only=True):
    """One service that may answer, with its own name of the model."""

    backend: str
    endpoint: Endpoint
    model: str
    standing: Standing
    """Times and pauses of the service with this model; requests share it."""
    configured_price: Price | None = None

    @property
    def dialect(self) -> str:
        """Dialect of the service's documents."""
        return self.endpoint.dialect or PROTOCOLS[self.endpoint.protocol].dialect

    @property
    def price(self) -> Price | None:
        """The model's price; None is unknown."""
        return self.configured_price or (price_of(self.model) if self.endpoint.listed else None)


class AgentTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A whole agent, which a client asks like a model."""

    backend: str
    model: str
    work: Callable[[ClientCall, dict[str, Any], bytes], Any]
    """Makes the exchange of a request, from the call, the decoded body, and its bytes."""
    price: None = None
    """None, as the cost is measured by the agent's run."""


Answering = ModelTarget | AgentTarget


class ModelRoutes:
    """The table of models: name or pattern → services.

    Args:
        environ: environment variables; some hold the keys.
        where: the setting that an error names; None names the row of `gateway.models`.
        has_agents: True if agents are offered as models, so that the table may be empty.

    Raises:
        ConfigError: `config_invalid`, the table is empty or a backend's options are wrong; `backend_not_found`, a route
            names a backend that does not exist.
    """

    def __init__(
        self, settings: Settings, environ: Mapping[str, str], where: str | None = None, *, has_agents: bool = False
    ) -> None:
        self._where = where
        self._settings, self._environ = settings, environ
        self._table = _table(settings.gateway, environ)
        self._endpoints: dict[str, Endpoint] = {}
        self._prices: dict[str, Price] = {}
        self._standings: dict[tuple[str, str], Standing] = {}
        if not self._table and not has_agents:
            raise ConfigError(
                "config_invalid", "the gateway has no models",
                hint='set ANTHROPIC_API_KEY, OPENAI_API_KEY or GEMINI_API_KEY, or write [gateway.models] with '
                '"NAME" = "BACKEND/MODEL"',
            )  # fmt: skip
        for name, route in self._table.items():
            for one in route.services:
                self._endpoint(one.partition("/")[0], name)

    def targets(self, model: str) -> tuple[ModelTarget, ...]:
        """Return the services for a model's name, in the order of the route; empty if the table has no such name."""
        route = self._route(model)
        return () if route is None else tuple(self._target(one, model) for one in route.services)

    def choose(self, model: str, request: RequestFacts) -> Choice:
        """Return the services for a model's name, in the order to ask them for one request."""
        route = self._route(model)
        assert route is not None, "the services of a route are chosen"
        return order(route.strategy, self.targets(model), request, now_ms())

    @property
    def has_times(self) -> bool:
        """True if the choice of a route depends on measured times."""
        return any(route.strategy in TIMED for route in self._table.values())

    def learn(self, end: ExchangeEnd) -> None:
        """Add the time of an earlier exchange, if it was complete, to its service's times."""
        if end.end == "complete" and end.backend in self._endpoints and end.model is not None:
            stream = end.first_ms is not None
            ms = (end.ms if end.first_ms is None else end.first_ms) - end.asked_ms
            with suppress(ValueError):  # A line that a person edited.
                at_ms = round(datetime.fromisoformat(end.at).timestamp() * 1000)
                self._standing(end.backend, end.model).times(stream=stream).add(at_ms, ms)

    def _standing(self, backend: str, model: str) -> Standing:
        key = (backend, model)
        if key not in self._standings and len(self._standings) >= STANDINGS_MAX:
            del self._standings[next(iter(self._standings))]
        return self._standings.setdefault(key, Standing())

    def _route(self, model: str) -> GatewayRouteSettings | None:
        if model in self._table:
            return self._table[model]
        globs = (route for glob, route in self._table.items() if GLOB.search(glob) and fnmatch.fnmatchcase(model, glob))
        return next(globs, None)

    def models(self) -> list[ModelRow]:
        """Return the models that have names: those of the table, and a vendor's known models that a pattern matches."""
        names = [name for name in self._table if not GLOB.search(name)]
        listed = [
            glob for glob, route in self._table.items() if GLOB.search(glob) and self._is_listed(route.services[0])
        ]
        names += [name for name in known_models() if any(fnmatch.fnmatchcase(name, glob) for glob in listed)]
        firsts = {name: route.services[0] for name in names if (route := self._route(name)) is not None}
        return [
            ModelRow(name, facts_of(self._asked_at(service, name)[1]).context_tokens)
            for name, service in firsts.items()
        ]

    def _is_listed(self, route: str) -> bool:
        """Return True if a route leads to a vendor of models and keeps the model's name."""
        endpoint = self._endpoint(route.partition("/")[0], route)
        return endpoint.listed and "/" not in route and endpoint.model is None

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Return all services in the table."""
        return tuple(self._endpoints.values())

    def _target(self, route: str, asked: str) -> ModelTarget:
        backend, model = self._asked_at(route, asked)
        return ModelTarget(
            backend=backend, endpoint=self._endpoint(backend, asked), model=model,
            standing=self._standing(backend, model), configured_price=self._prices.get(backend),
        )  # fmt: skip

    def _asked_at(self, service: str, asked: str) -> tuple[str, str]:
        """Return the backend in a route, and the service's name of the model."""
        backend, _, model = service.partition("/")
        return backend, model or self._endpoint(backend, asked).model or asked

    def _endpoint(self, backend: str, name: str) -> Endpoint:
        if backend not in self._endpoints:
            found = self._read(backend, self._where or f"gateway.models.{name}")
            if found.prices is not None:
                self._prices[backend] = read_price(found.prices, f"backends.{backend}.options.prices")
            self._endpoints[backend] = found
        return self._endpoints[backend]

    def _read(self, backend: str, where: str) -> Endpoint:
        found = self._settings.backends.get(backend)
        if found is None and backend in PRESETS:
            found = BackendSettings(host=HOST, options={"preset": backend})
        if found is None or found.host != HOST:
            fact = f'`{where}` names {backend!r}, which is no backend with host = "{HOST}"'
            near = [name for name, one in self._settings.backends.items() if one.host == HOST]
            raise ConfigError(
                "backend_not_found", fact, hint=f"there are {', '.join((*near, *PRESETS))}; write BACKEND/MODEL"
            )
        own = {name: VARIABLE.sub(lambda at: self._environ.get(at[1], ""), one) for name, one in found.env.items()}
        variables = {**self._environ, **own}
        options: Mapping[str, Any] = with_address(found.options, variables)
        return with_keys(read_options(options, f"backends.{backend}.options"), variables)


def _table(settings: GatewaySettings, environ: Mapping[str, str]) -> dict[str, GatewayRouteSettings]:
    if settings.models:
        return {name: _written(one) for name, one in settings.models.items()}
    ready = [name for name in USUAL if environ.get(PRESETS[name].key_env or "")]
    return {glob: _written(name) for name in ready for glob in USUAL[name]}


def _written(route: str | tuple[str, ...] | GatewayRouteSettings) -> GatewayRouteSettings:
    if isinstance(route, GatewayRouteSettings):
        return route
    return GatewayRouteSettings(services=(route,) if isinstance(route, str) else tuple(route))
