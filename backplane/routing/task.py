"""Describes an order before it has a backend: its task, and the rules behind type, preference and priority."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.capability import Requirement
from backplane.contract.unknown import explain
from backplane.errors import ConfigError
from backplane.upstream.measures import StrategyName

if TYPE_CHECKING:
    from backplane.routing.router import Option

TaskType = Literal[
    "simple_query", "code_generation", "file_editing", "shell_execution", "code_review", "complex_workflow", "custom",
]  # fmt: skip
Preference = Literal["speed", "quality", "cost", "balanced", "specific"]
Priority = Literal["low", "normal", "high", "critical"]


class TypeFacts(msgspec.Struct, frozen=True):
    """Requirements and assumed tokens of a task's type."""

    requires: tuple[Requirement, ...]
    input_tokens: int
    """Tokens assumed for a task of unknown size; the cost from them is only for comparing. `output_tokens` likewise."""
    output_tokens: int


def _facts(input_tokens: int, output_tokens: int, *names: str) -> TypeFacts:
    return TypeFacts(tuple(Requirement(name, "emulated") for name in names), input_tokens, output_tokens)


TYPES: Final[dict[TaskType, TypeFacts]] = {
    "simple_query": _facts(2_000, 500),
    "code_generation": _facts(60_000, 6_000, "tool_read", "tool_write"),
    "file_editing": _facts(40_000, 3_000, "tool_read", "tool_edit"),
    "shell_execution": _facts(20_000, 1_000, "tool_bash"),
    "code_review": _facts(80_000, 3_000, "tool_read"),
    "complex_workflow": _facts(300_000, 20_000, "tool_read", "tool_write", "tool_bash"),
    "custom": _facts(40_000, 4_000),
}

PREFERENCES: Final[dict[Preference, StrategyName | Literal["quality"] | None]] = {
    "speed": "latency",
    "quality": "quality",
    "cost": "cost",
    "balanced": None,
    "specific": None,
}
"""Preference → strategy that it requires, whatever else is set; None requires none."""

RANKS: Final[dict[Priority, int]] = {"low": 0, "normal": 1, "high": 2, "critical": 3}
"""Priority → its rank; of waiting orders, the one with the highest rank goes first."""

SHARES: Final[dict[Priority, int]] = {"low": 500, "normal": 900, "high": 1000, "critical": 1000}
"""Priority → share of a backend's `runs_max` up to which it takes such orders, in thousandths."""

STRATEGIES: Final[tuple[StrategyName, ...]] = ("first_available", "cost", "latency", "balanced")


class TaskDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """An order as the router sees it, and how to choose a backend for it.

    Raises:
        ValueError: a model without the preference `specific` or the other way round, or a negative number.
    """

    type: TaskType = "custom"
    capabilities: tuple[Requirement, ...] = ()
    preference: Preference = "balanced"
    model: str | None = None
    """The required model, for the preference `specific`; None for the others."""
    max_cost_usd_micros: int | None = None
    max_latency_ms: int | None = None
    allow_unknown: bool = False
    """True if an unknown cost or latency satisfies its limit."""
    priority: Priority = "normal"
    input_tokens: int | None = None
    """Tokens that the task will send, `output_tokens` those that it will get; None is unknown."""
    output_tokens: int | None = None
    strategy: StrategyName | None = None
    """Strategy for a preference without one of its own (`PREFERENCES`); None takes the configured one."""
    seed: int = 0
    """Number that spreads orders over instances that are equal in everything else."""

    def __post_init__(self) -> None:
        if (self.model is None) == (self.preference == "specific"):
            raise ValueError("`model` goes with the preference `specific`, and that with a model")
        for name in ("max_cost_usd_micros", "max_latency_ms", "input_tokens", "output_tokens"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"`{name}` is below zero")

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """The task's own requirements, then those of its type that it does not have already."""
        of_type = TYPES[self.type].requires
        return (*self.capabilities, *(one for one in of_type if one not in self.capabilities))


Custom = Callable[[TaskDescriptor, "tuple[Option, ...]"], int | None]
"""A strategy as a function: takes the task and the eligible options; returns the index of one, None for none."""

Strategy = StrategyName | Custom


def read_strategy(name: str) -> StrategyName:
    """Read the name of a strategy. Raises ConfigError: `config_invalid`, no strategy has this name."""
    kind: Any = StrategyName
    try:
        strategy: StrategyName = msgspec.convert(name, kind)
    except msgspec.ValidationError as error:
        fact = f"no such strategy: {explain(error, kind)}"
        raise ConfigError("config_invalid", fact, hint="give one of these names, or a function") from error
    return strategy


class _StrictTask(TaskDescriptor, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task whose misspelt members are refused."""


OF_ORDER: Final = {"capabilities": "requirements.required", "model": "config.model"}
"""Member of the task that `route` may not have → its place in the order."""


def read_route(route: Json, required: tuple[Requirement, ...] = (), model: str | None = None) -> TaskDescriptor:
    """Read `config.vendor.abp.route` of an order.

    Args:
        required: the order's requirements.
        model: the model that the order names; None if it names none.

    Raises:
        ConfigError: `config_invalid`, a member is unknown, or its value is wrong or contradicts another.
    """
    given: Any = {} if route is None else route
    if isinstance(given, dict):
        for name in OF_ORDER.keys() & given.keys():
            fact = f"config.vendor.abp.route: {name} has another place in the order"
            raise ConfigError("config_invalid", fact, hint=f"set {OF_ORDER[name]}")
        given = {name: value for name, value in given.items() if value is not None}
        given["capabilities"] = msgspec.to_builtins(required)
        if model is not None:
            given = {"preference": "specific", **given, "model": model}
    try:
        return msgspec.convert(given, _StrictTask)
    except msgspec.ValidationError as error:
        fact = f"config.vendor.abp.route: {explain(error, _StrictTask)}"
        raise ConfigError("config_invalid", fact, hint="see docs/guide/routing-rule.md") from error
