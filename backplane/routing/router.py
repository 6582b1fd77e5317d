"""Chooses a backend, and lists for every other one the obstacles and the change that would remove each.

The rule is `docs/guide/routing-rule.md`, row by row. Clock and seed come in as arguments.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Literal, cast

import msgspec

from backplane.contract.canonical import timestamp_at
from backplane.contract.capability import Manifest, Requirements
from backplane.errors import CapabilityError, ConfigError
from backplane.policy.capabilities import negotiate
from backplane.routing.estimates import Measures
from backplane.routing.task import PREFERENCES, SHARES, TYPES, Custom, Strategy, TaskDescriptor
from backplane.upstream.cost import Price
from backplane.upstream.measures import Estimate, Key, StrategyName, key_of

MINUTE_MS: Final = 60_000

MILLION: Final = 1_000_000

Kind = Literal[
    "named_only", "not_ready", "tried", "circuit_open", "rate_limited", "full", "capability", "manifest_unknown",
    "model", "context", "output", "quality", "cost_unknown", "cost", "latency_unknown", "latency",
]  # fmt: skip


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model of a backend; None is unknown."""

    name: str | None = None
    """Name of the model; None: the backend chooses one itself."""
    price: Price | None = None
    """Prices of the model's tokens; None if they are unknown."""
    context_tokens: int | None = None
    output_tokens: int | None = None


class BackendState(msgspec.Struct, frozen=True, kw_only=True):
    """The present state of a backend. Times are in milliseconds since 1970; 0 is no time."""

    name: str
    group: str
    """Name that all instances of one backend share; a single backend's own name."""
    models: tuple[Model, ...] = (Model(),)
    """The backend's models, one or more; the first is the default."""
    named_only: bool = False
    not_ready: str = ""
    """Why the backend cannot be used; empty if it can be."""
    fix: str = ""
    manifest: Manifest | None = None
    """Manifest of the backend's last hello; None if there was none."""
    running: int = 0
    runs_max: int = 32
    began_last_minute: int = 0
    """Number of the backend's runs that began in the last 60 s."""
    runs_per_minute: int | None = None
    circuit_until_ms: int = 0
    limited_until_ms: int = 0


class Obstacle(msgspec.Struct, frozen=True):
    """Why an option cannot be chosen."""

    kind: Kind
    fact: str
    change: str
    """The change that would remove the obstacle."""
    subject: str = ""
    """The missing capability; empty for other kinds of obstacles."""

    def __str__(self) -> str:
        return f"{self.kind} {self.subject}".strip()


class Source(msgspec.Struct, frozen=True):
    """Source of a price."""

    name: str
    read_on: str
    """Day on which the price was read; empty if unknown."""


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """A backend with one of its models, and how it fits a task; receipts have it in this form."""

    backend: str
    model: str | None = None
    """Name of the model; None: the backend chooses one itself."""
    cost: Estimate | None = msgspec.field(default=None, name="cost_usd_micros")
    """Expected cost of one complete run, in millionths of a dollar; None if it is unknown."""
    latency: Estimate | None = msgspec.field(default=None, name="latency_ms")
    """Expected duration of one complete run, in milliseconds; None if it is unknown."""
    price: Source | None = None
    """Source of the price; None if the cost is measured or unknown."""
    context_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Tokens of the model's context window; unset if they are unknown."""
    obstacles: tuple[Obstacle, ...] = msgspec.field(default=(), name="why_not")
    """Every reason why the option cannot be chosen; empty if it can be."""

    @property
    def name(self) -> str:
        """`BACKEND`, or `BACKEND/MODEL`."""
        return self.backend if self.model is None else f"{self.backend}/{self.model}"


class RoutingDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The option that was chosen, and all that were considered; receipts have it in this form."""

    task: TaskDescriptor
    strategy: str
    """The strategy that decided: a name, `quality`, or `custom`."""
    seed: int
    option: Option | None = msgspec.field(name="chosen")
    """The chosen option; None if no option is eligible, or if a custom strategy chose none."""
    options: tuple[Option, ...] = msgspec.field(name="considered")
    """The eligible options from best to worst, then the others in the order of the configuration."""

    def chosen(self) -> Option:
        """Return the option that was chosen.

        Raises:
            CapabilityError: `capability_unsupported`, nothing can be chosen; the evidence names all obstacles.
        """
        if self.option is not None:
            return self.option
        refused = [option for option in self.options if option.obstacles]
        why = "; ".join(f"{option.name}: {', '.join(map(str, option.obstacles))}" for option in refused) or None
        declined = len(refused) < len(self.options)
        fact = "the custom strategy took no backend" if declined else "no backend can take this order"
        hint = "name a backend, or see why each was passed over: backplane run --dry-run -v"
        error = CapabilityError("capability_unsupported", fact, hint=hint, evidence=why)
        if why is not None:
            error.add_note(f"passed over: {why}")
        raise error


def choose(
    task: TaskDescriptor,
    candidates: Sequence[BackendState],
    measures: Measures,
    *,
    strategy: Strategy = "balanced",
    quality: Sequence[str] = (),
    tried: frozenset[str] = frozenset(),
    now_ms: int,
    seed: int = 0,
) -> RoutingDecision:
    """Choose a backend and a model for a task.

    Args:
        candidates: in the order of the configuration.
        quality: names of options or backends, best first.
        tried: backends on which this order has failed already.
        now_ms: the time in milliseconds since 1970.
        seed: spreads orders over instances that are equal in everything else.

    Raises:
        ConfigError: `config_invalid`, a custom strategy returned neither None nor the index of an option.
    """
    ranks = {name: place for place, name in reversed(list(enumerate(quality)))}
    groups = [candidate.group for candidate in candidates]
    ties: dict[str, Key] = {}
    options: list[Option] = []
    for candidate in candidates:
        # Options with equal keys: the first group wins, in it the least loaded instance, then the seed decides.
        spread = zlib.crc32(f"{seed}:{candidate.name}".encode()) if groups.count(candidate.group) > 1 else 0
        load = 1000 * candidate.running // max(candidate.runs_max, 1)
        ties[candidate.name] = (groups.index(candidate.group), load, spread)
        of_backend = (*_standing(task, candidate, tried, now_ms), *_able(task, candidate))
        options += [_option(task, candidate, model, measures, ranks, of_backend) for model in candidate.models]
    eligible = [option for option in options if not option.obstacles]
    replaced = PREFERENCES[task.preference]
    if callable(strategy) and replaced is None:
        name, ordered, picked = "custom", eligible, _custom(strategy, task, eligible)
    else:
        name = replaced or cast(str, strategy)
        key = _key_of(name, eligible, ranks)
        # Sorting is stable: with equal keys and ties the earlier option stays first.
        ordered = sorted(eligible, key=lambda option: (*key(option), *ties[option.backend]))
        picked = ordered[0] if ordered else None
    refused = [option for option in options if option.obstacles]
    return RoutingDecision(task=task, strategy=name, seed=seed, option=picked, options=(*ordered, *refused))


def _custom(strategy: Custom, task: TaskDescriptor, eligible: list[Option]) -> Option | None:
    index = strategy(task, tuple(eligible)) if eligible else None
    if index is None:
        return None
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(eligible):
        fact = f"the custom strategy returned {index!r:.40} for {len(eligible)} options"
        raise ConfigError("config_invalid", fact, hint="return the index of one of them, or None")
    return eligible[index]


# The key of a strategy ------------------------------------------------------------------------------------------------

Ranks = Mapping[str, int]


def _key_of(strategy: str, eligible: list[Option], ranks: Ranks) -> Callable[[Option], Key]:
    """Return the function that gives an option's key; the smallest key wins."""
    if strategy == "quality":
        return lambda option: (ranks.get(option.name, ranks.get(option.backend, 0)),)
    values = [(_value(option.cost), _value(option.latency)) for option in eligible]
    key = key_of(cast(StrategyName, strategy), (cost for cost, _ in values), (latency for _, latency in values))
    return lambda option: key(_value(option.cost), _value(option.latency))


def _value(found: Estimate | None) -> int | None:
    return None if found is None else found.value


# The obstacles --------------------------------------------------------------------------------------------------------


def _option(
    task: TaskDescriptor,
    candidate: BackendState,
    model: Model,
    measures: Measures,
    ranks: Ranks,
    of_backend: tuple[Obstacle, ...],
) -> Option:
    latency = measures.latency(candidate.group, model.name, task.type)
    cost = measures.cost(candidate.group, model.name, task.type) or priced(model, task)
    price = model.price if cost is not None and cost.basis != "measured" else None
    return Option(
        backend=candidate.name,
        model=model.name,
        cost=cost,
        latency=latency,
        price=Source(price.source, price.read_on) if price is not None else None,
        context_tokens=msgspec.UNSET if model.context_tokens is None else model.context_tokens,
        obstacles=(*of_backend, *_fits(task, candidate, model, ranks), *_within(task, cost, latency)),
    )


def _standing(task: TaskDescriptor, candidate: BackendState, tried: frozenset[str], now_ms: int) -> Iterator[Obstacle]:
    """Yield the obstacles from the backend's present state."""
    name = candidate.name
    if candidate.named_only:
        yield Obstacle("named_only", "it runs only orders that name it", f"name it with --backend {name}")
    if candidate.not_ready:
        yield Obstacle("not_ready", candidate.not_ready, candidate.fix or "see `backplane backends`")
    if name in tried:
        yield Obstacle("tried", "this order failed there", "give the order again")
    if now_ms < candidate.circuit_until_ms:
        until = timestamp_at(candidate.circuit_until_ms * MILLION)
        yield Obstacle("circuit_open", f"it failed several times in a row; left alone until {until}", "wait")
    if now_ms < candidate.limited_until_ms:
        until = timestamp_at(candidate.limited_until_ms * MILLION)
        yield Obstacle("rate_limited", f"its service wants no request before {until}", "wait")
    elif candidate.runs_per_minute is not None and candidate.began_last_minute >= candidate.runs_per_minute:
        fact = f"{candidate.began_last_minute} runs began there in the last minute"
        yield Obstacle("rate_limited", fact, f"wait until fewer than runs_per_minute = {candidate.runs_per_minute}")
    places = max(1, candidate.runs_max * SHARES[task.priority] // 1000)
    if candidate.running >= places:
        fact = f"{candidate.running} runs are on it; priority {task.priority} may fill {places} places"
        yield Obstacle("full", fact, "wait, raise the priority, or raise runs_max")


def _able(task: TaskDescriptor, candidate: BackendState) -> Iterator[Obstacle]:
    """Yield the requirements that the backend's manifest does not meet."""
    required, manifest = task.requirements, candidate.manifest
    if required and manifest is None:
        names = ", ".join(requirement.capability for requirement in required)
        fact = f"{names} required, and it never said hello here"
        yield Obstacle("manifest_unknown", fact, f"run it once with --backend {candidate.name}")
    elif manifest is not None:
        found = negotiate(Requirements(required), manifest)
        changes = {(change.capability, change.min_support): str(change) for change in found.smallest_change}
        for finding in found.unmet:
            change = changes[finding.capability, finding.min_support]
            yield Obstacle("capability", finding.reason, change, finding.capability)


def _fits(task: TaskDescriptor, candidate: BackendState, model: Model, ranks: Ranks) -> Iterator[Obstacle]:
    """Yield the obstacles from the model."""
    if task.preference == "specific" and model.name != task.model:
        has = "is its own choice" if model.name is None else f"is {model.name}"
        change = f"list {task.model} in models of [backends.{candidate.name}]"
        yield Obstacle("model", f"the order names {task.model}, the model here {has}", change)
    tokens = (task.input_tokens or 0) + (task.output_tokens or 0)
    if model.context_tokens is not None and tokens > model.context_tokens:
        fact = f"{tokens} tokens, the model takes {model.context_tokens}"
        yield Obstacle("context", fact, f"send {model.context_tokens} at most")
    if model.output_tokens is not None and (task.output_tokens or 0) > model.output_tokens:
        fact = f"{task.output_tokens} tokens of output, the model gives {model.output_tokens}"
        yield Obstacle("output", fact, f"want {model.output_tokens} at most")
    if task.preference == "quality" and ranks.keys().isdisjoint((candidate.name, f"{candidate.name}/{model.name}")):
        yield Obstacle("quality", "its quality is unknown", f'name "{candidate.name}" in quality of [routing]')


def _within(task: TaskDescriptor, cost: Estimate | None, latency: Estimate | None) -> Iterator[Obstacle]:
    """Yield the obstacles from the task's limits on cost and latency."""
    cost_max, latency_max = task.max_cost_usd_micros, task.max_latency_ms
    unknown = "allow unknown values, drop the limit, or run it once to measure it"
    if cost_max is not None and (cost is None or cost.basis == "assumed"):
        if not task.allow_unknown:
            yield Obstacle("cost_unknown", "what it costs is unknown", unknown)
    elif cost_max is not None and cost is not None and cost.value > cost_max:
        fact = f"${cost.value / MILLION:.4f} a run, the limit is ${cost_max / MILLION:.4f}"
        yield Obstacle("cost", fact, f"raise the limit to ${cost.value / MILLION:.6f}")
    if latency_max is not None and latency is None and not task.allow_unknown:
        yield Obstacle("latency_unknown", "how long it takes is unknown", unknown)
    elif latency_max is not None and latency is not None and latency.value > latency_max:
        fact = f"{latency.value} ms a run, the limit is {latency_max} ms"
        yield Obstacle("latency", fact, f"raise the limit to {latency.value} ms")


def priced(model: Model, task: TaskDescriptor) -> Estimate | None:
    """Return the cost of the task's own tokens, else of those that its type assumes; None without a price."""
    if model.price is None:
        return None
    if task.input_tokens is not None and task.output_tokens is not None:
        sent, made, basis = task.input_tokens, task.output_tokens, "priced"
    else:
        facts = TYPES[task.type]
        sent, made, basis = facts.input_tokens, facts.output_tokens, "assumed"
    total = sent * model.price.input + made * model.price.output
    return Estimate(-(-total // MILLION), 1000 if basis == "priced" else 0, 0, cast(Literal["priced"], basis))
