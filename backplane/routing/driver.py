"""Reads the router's inputs (settings, manifests, prices, receipts, live runs), and makes an order's attempts.

Nothing is started here except hosts that are asked for their hello.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final

import anyio.to_thread
import msgspec
from msgspec.structs import replace

from backplane.agents.rows import AgentRow
from backplane.config import BackendSettings, ModelSettings, Settings
from backplane.contract.canonical import Json
from backplane.contract.capability import read_manifest
from backplane.contract.work import WorkOrder
from backplane.errors import BackplaneError, ConfigError
from backplane.policy.capabilities import supplied
from backplane.receipts.audit import patch_claim
from backplane.receipts.manifests import keep_manifest, kept_manifest
from backplane.receipts.memory import Remembered, remembered
from backplane.receipts.store import Store
from backplane.routing.estimates import Measures, Observation, circuit_until, limited_until
from backplane.routing.failover import LIMITS, FailoverAttempt, first_effect, moves_on
from backplane.routing.router import MINUTE_MS, BackendState, Model, Option, RoutingDecision, choose
from backplane.routing.task import Strategy, TaskDescriptor, read_route
from backplane.runtime import backends, readiness
from backplane.runtime.budgets import Amount, after_run, used_by
from backplane.runtime.hello import ask_hello
from backplane.runtime.hooks import CAPABILITY
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run
from backplane.upstream import presets
from backplane.upstream.cost import Price, read_price
from backplane.upstream.prices import ModelFacts, facts_of
from backplane.view.figures import milliseconds

RUNS_MAX: Final = 500
"""Newest receipts that are measured; reading them takes some 0.1 s, and older ones hardly count."""

HELLOS_MAX: Final = 8
"""Most hosts that are asked for their hello at the same time, as each is a process."""

DATE: Final = re.compile(r"[-@](20\d{6}|20\d\d-\d\d(-\d\d)?)$")
"""The date that some services add at the end of a model's name."""

_HERE: Final = (*CAPABILITY.values(), "checkpointing")
"""Abilities that the control plane supplies to every backend on this machine."""


class World(msgspec.Struct, frozen=True):
    """Everything that a choice depends on, at one moment."""

    candidates: tuple[BackendState, ...]
    measures: Measures
    settings: Settings
    now_ms: int

    def choose(
        self, task: TaskDescriptor, strategy: Strategy | None = None, tried: frozenset[str] = frozenset()
    ) -> RoutingDecision:
        """Choose an option with `router.choose`; without `strategy`, by the task's own, else by the configured one."""
        routing = self.settings.routing
        strategy = strategy or task.strategy or routing.strategy
        return choose(
            task, self.candidates, self.measures, strategy=strategy, quality=routing.quality, tried=tried,
            now_ms=self.now_ms, seed=task.seed,
        )  # fmt: skip

    def model_for(self, option: Option) -> str | None:
        """Return the model that an order has to name to get this option; None if it is the backend's default."""
        default = next(one.models[0].name for one in self.candidates if one.name == option.backend)
        return None if option.model == default else option.model


def look_around(settings: Settings, environ: Mapping[str, str], home: Path, *, now_ms: int | None = None) -> World:
    """Read what a choice depends on.

    Args:
        home: the state folder; without one, there are no earlier runs.
        now_ms: the time in milliseconds since 1970; None reads the clock.

    Raises:
        ConfigError: `config_invalid`, a price cannot be read.
        StoreError: `receipt_store_failed`.
    """
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    statuses = {status.id: status for status in readiness.known(settings, environ)}
    with Store.open(home, readonly=True) as store:
        runs = list(islice(remembered(store), RUNS_MAX))
    observed, candidates = list[Observation](), list[BackendState]()
    for name in dict.fromkeys((*settings.backends, *statuses)):
        candidate = _candidate(statuses[name], settings, environ, home)
        own = [run for run in runs if run.backend == name]
        seen = [_observation(run, candidate) for run in own if run.state == "ended"]
        began = [milliseconds(run.started_at) or 0 for run in own]
        candidate = replace(
            candidate,
            running=sum(run.state == "live" for run in own),
            began_last_minute=sum(now_ms - MINUTE_MS < began_ms <= now_ms for began_ms in began),
            circuit_until_ms=circuit_until(seen),
            limited_until_ms=limited_until(seen),
        )
        observed += seen
        candidates.append(candidate)
    return World(tuple(candidates), Measures(observed, now_ms), settings, now_ms)


# Backends -------------------------------------------------------------------------------------------------------------


def _candidate(
    status: readiness.BackendStatus, settings: Settings, environ: Mapping[str, str], home: Path
) -> BackendState:
    name = status.id
    declared = settings.backends.get(name) or BackendSettings(host=name)
    host = name if declared.command is None and declared.host is None else declared.host
    backend = None
    if status.ready:
        try:
            backend = backends.find(name, settings, environ)
        except BackplaneError as error:  # Its program went away since.
            status = replace(status, ready=False, why=error.message, fix=error.hint or "")
    agent = backend.agent if backend is not None else None
    manifest = kept_manifest(home, backend.key) if backend is not None else None
    ours = CAPABILITY.values() if declared.remote else _HERE
    return BackendState(
        name=name,
        group=declared.group or name,
        models=_models(name, declared, agent, settings),
        named_only=declared.remote or name in backends.NEVER_CHOSEN or host in backends.NEVER_CHOSEN,
        not_ready=_why_not_ready(status, declared),
        fix=status.fix,
        manifest=None if manifest is None else supplied(read_manifest(manifest), ours),
        runs_max=declared.runs_max or settings.limits.runs_max,
        runs_per_minute=declared.runs_per_minute,
    )


def _why_not_ready(status: readiness.BackendStatus, declared: BackendSettings) -> str:
    """Return why a backend cannot be chosen; empty if it can be. One without its key may still be named by an order."""
    if not status.ready:
        return status.why or "it is not ready"
    return status.fix.partition(";")[0] if status.fix and not declared.env else ""


def _models(name: str, declared: BackendSettings, agent: AgentRow | None, settings: Settings) -> tuple[Model, ...]:
    """Return the models of a backend, its default first."""
    default, is_listed = declared.options.get("model"), agent is not None
    if declared.command is None and (declared.host or name) == presets.HOST:
        try:
            service = presets.read_options(declared.options, name)
            default, is_listed = service.model, service.listed
        except ConfigError:  # `_why_not_ready` reports these options.
            is_listed = False
    elif agent is not None:
        default = agent.model or default
    names = declared.models or ((default,) if isinstance(default, str) else (None,))
    prices = declared.options.get("prices")
    own = read_price(prices, f"backends.{name}.options.prices") if prices is not None else None
    return tuple(_model(each, own, is_listed, settings) for each in names)


def _model(name: str | None, own: Price | None, is_listed: bool, settings: Settings) -> Model:
    """Return a model with its limits and its price: the configured one, else the backend's, else the list price."""
    facts = facts_of(name) if name is not None and is_listed else ModelFacts()
    configured = (settings.routing.models.get(name) if name is not None else None) or ModelSettings()
    price = own or facts.price
    if configured.prices is not None:
        price = read_price(configured.prices, f"routing.models.{name}.prices")
    context_tokens = configured.context_tokens or facts.context_tokens
    return Model(name=name, price=price, context_tokens=context_tokens, output_tokens=configured.output_tokens)


# Runs -----------------------------------------------------------------------------------------------------------------


def _observation(run: Remembered, candidate: BackendState) -> Observation:
    return Observation(
        backend=run.backend,
        group=candidate.group,
        model=_model_of(run, candidate.models),
        type=run.task_type,
        began_ms=milliseconds(run.started_at) or 0,
        duration_ms=run.duration_ms,
        cost_usd_micros=run.cost_usd_micros,
        complete=run.outcome == "complete",
        reason=run.reason,
        code=run.code,
        retry_after_ms=run.retry_after_ms,
    )


def _model_of(run: Remembered, models: tuple[Model, ...]) -> str | None:
    """Return the model that a run counts for: its order's, else its receipt's, else the backend's default."""
    told = run.model_told
    if run.model is not None or told is None or models[0].name is None:
        return run.model or models[0].name
    return next((one.name for one in models if one.name is not None and _names(told, one.name)), told)


def _names(told: str, name: str) -> bool:
    """Return True if a service's name of a model is `name`, perhaps with a date at its end, or has `name` as a word."""
    plain = DATE.sub("", told)
    return name in (told, plain) or name in re.split(r"[-/:@]", plain)


# Orders ---------------------------------------------------------------------------------------------------------------


def task_of(order: WorkOrder) -> TaskDescriptor:
    """Return the router's view of an order. Raises ConfigError: as `read_route`."""
    return read_route(order.abp("route"), order.requirements.required, order.config.model)


class Attempts:
    """The backends that one order is tried on, one after the other.

    Args:
        order: names no backend.
        look: reads the present `World`.
        strategy: replaces the order's own and the configured one; a function makes the choice itself.

    Attributes:
        tried: the failed attempts, oldest first.
        stopped: the error that kept a failed order from its next backend, as its budget is used up; else None.

    Raises:
        ConfigError: `config_invalid`, as `read_route`; or the order continues a conversation without naming the backend
            that keeps it.
        StoreError: `receipt_store_failed`.
    """

    def __init__(self, order: WorkOrder, look: Callable[[], World], strategy: Strategy | None = None) -> None:
        kept = order.abp("session")
        if isinstance(kept, dict) and ("resume" in kept or "fork" in kept):
            fact = "a conversation goes on where it was begun, and no backend is named"
            raise ConfigError("config_invalid", fact, hint="name its backend")
        self._order, self._look, self._strategy = order, look, strategy
        self._task = task_of(order)
        self.tried: tuple[FailoverAttempt, ...] = ()
        self.stopped: BackplaneError | None = None
        self.decide()

    def decide(self) -> None:
        """Choose among the backends as they are now."""
        tried = frozenset(one.backend for one in self.tried)
        self._world = self._look()
        self.decision = self._world.choose(self._task, self._strategy, tried)

    @property
    def order(self) -> WorkOrder:
        """The order for the chosen backend; it names the chosen model unless that is the backend's default."""
        model = self._world.model_for(self.decision.chosen())
        if model is None or self._order.config.model is not None:
            return self._order
        return replace(self._order, config=replace(self._order.config, model=model))

    @property
    def backend(self) -> str:
        """The name of the chosen backend."""
        return self.decision.chosen().backend

    @property
    def route(self) -> dict[str, Json]:
        """The decision and the earlier attempts, in the receipt's form."""
        wire: dict[str, Json] = msgspec.to_builtins(self.decision)
        return wire | ({"tried": msgspec.to_builtins(self.tried)} if self.tried else {})

    async def after(self, plane: ControlPlane, run: Run) -> bool:
        """Choose the next backend after a run that has ended; return False if the order ends with this run."""
        return await anyio.to_thread.run_sync(self._after, plane, run)

    def _after(self, plane: ControlPlane, run: Run) -> bool:
        failed = attempt_of(run)
        if run.stored.outcome == "complete" or not moves_on(len(self.tried) + 1, failed):
            return False
        self.tried = (*self.tried, failed)
        used = Amount(failed.used_usd_micros, failed.used_tokens)
        try:
            self._order = after_run(plane.state_folder.store(), self._order, run.id, used)
        except BackplaneError as error:
            self.stopped = error
            return False
        self.decide()
        return self.decision.option is not None


async def first_choice(
    order: WorkOrder, settings: Settings, environ: Mapping[str, str], home: Path, strategy: Strategy | None = None
) -> Attempts:
    """Choose a backend for an order that names none.

    If no backend is eligible, those whose only obstacle is a missing manifest are asked for their hello; that sends no
    order.

    Raises:
        ConfigError, StoreError: as `Attempts`.
        CapabilityError: `capability_unsupported`, nothing is eligible.
    """
    look = functools.partial(look_around, settings, environ, home)
    attempts = await anyio.to_thread.run_sync(Attempts, order, look, strategy)
    options = [(one.backend, {obstacle.kind for obstacle in one.obstacles}) for one in attempts.decision.options]
    strangers = list(dict.fromkeys(name for name, kinds in options if kinds == {"manifest_unknown"}))
    if attempts.decision.option is None and strangers:
        async with anyio.create_task_group() as tasks:
            for name in strangers[:HELLOS_MAX]:
                tasks.start_soon(_keep_manifest, name, settings, environ, home)
        await anyio.to_thread.run_sync(attempts.decide)
    attempts.decision.chosen()
    return attempts


async def _keep_manifest(name: str, settings: Settings, environ: Mapping[str, str], home: Path) -> None:
    """Ask a backend for its hello, and keep its manifest; a backend without a hello stays unknown."""
    with suppress(BackplaneError):
        backend = backends.find(name, settings, environ)
        hello = await ask_hello(backend, environ, backend.limits or settings.limits)
        keep_manifest(home, backend.key, hello.capabilities)


async def attempts_for(plane: ControlPlane, order: WorkOrder, strategy: Strategy | None = None) -> Attempts:
    """Make the first choice for an order with a control plane's settings. Raises as `first_choice`."""
    # Opening the store seals runs that were cut off, so that their ends are measured, too.
    await anyio.to_thread.run_sync(plane.state_folder.store)
    return await first_choice(order, plane.settings, plane.environ, plane.home, strategy)


async def backend_for(
    order: WorkOrder, plane: ControlPlane, named: str | None = None
) -> tuple[WorkOrder, backends.Backend, Json]:
    """Return the backend that an order names, else the default, else the router's choice; with its order and route.

    Args:
        named: a backend in place of the order's own; None takes the order's.

    Raises:
        BackendError: `backend_not_found`, `backend_unavailable`.
        CapabilityError, ConfigError, StoreError: as `attempts_for`.
    """
    named = named or order.abp("backend", plane.settings.default_backend)
    if isinstance(named, str):
        return order, backends.find(named, plane.settings, plane.environ), None
    attempts = await attempts_for(plane, order)
    return attempts.order, backends.find(attempts.backend, plane.settings, plane.environ), attempts.route


def attempt_of(run: Run) -> FailoverAttempt:
    """Return the attempt that an ended run was."""
    receipt, code = run.stored, run.error.code if run.error is not None else None
    size, lane = patch_claim(receipt).get("bytes"), receipt.backplane.get("lane")
    used = used_by(receipt, code, was_sent=run.was_sent)
    reason = run.end.reason if run.end is not None else None
    return FailoverAttempt(
        backend=run.backend_id,
        model=run.order.config.model,
        run_id=run.id,
        code=code,
        limit=reason if reason in LIMITS else None,
        used_usd_micros=used.usd_micros,
        used_tokens=used.tokens,
        effect=first_effect(receipt.trace, patch_bytes=size if isinstance(size, int) else 0, applied=bool(lane)),
    )
