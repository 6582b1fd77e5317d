"""Describes an order before it has a backend: its task, and the rules behind type, preference and priority."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.capability import Requirement
from backplane.contract.unheard import nearest_name
from backplane.errors import ConfigError

if TYPE_CHECKING:
    from backplane.routing.router import Option

TaskType = Literal[
    "simple_query",
    "code_generation",
    "file_editing",
    "shell_execution",
    "code_review",
    "complex_workflow",
    "custom",
]
Preference = Literal["speed", "quality", "cost", "balanced", "specific"]
Priority = Literal["low", "normal", "high", "critical"]
StrategyName = Literal["first_available", "cost", "latency", "balanced"]


class TypeFacts(msgspec.Struct, frozen=True):
    """Requirements and assumed tokens of a task's type."""

    requires: tuple[Requirement, ...]
    input_tokens: int
    """Assumed if the number is unknown; a cost from it only serves to compare. Likewise `output_tokens`."""
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
"""Preference → strategy in place of the configured one; None keeps the configured one."""

RANKS: Final[dict[Priority, int]] = {"low": 0, "normal": 1, "high": 2, "critical": 3}
"""Rank of a priority: of waiting orders, the highest rank goes first."""

SHARES: Final[dict[Priority, int]] = {"low": 500, "normal": 900, "high": 1000, "critical": 1000}
"""Thousandths of a backend's places that a priority may fill."""

STRATEGIES: Final[tuple[StrategyName, ...]] = ("first_available", "cost", "latency", "balanced")


class TaskDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """An order as the router sees it.

    Raises:
        ValueError: a model without the preference `specific` or the other way round, or a negative number.
    """

    type: TaskType = "custom"
    capabilities: tuple[Requirement, ...] = ()
    preference: Preference = "balanced"
    model: str | None = None
    """The one model that will do; with the preference `specific`."""
    max_cost_usd_micros: int | None = None
    max_latency_ms: int | None = None
    allow_unknown: bool = False
    """An unknown cost or latency satisfies its limit."""
    priority: Priority = "normal"
    input_tokens: int | None = None
    """Tokens that the task will send, if known; `output_tokens` those that it will get."""
    output_tokens: int | None = None

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
"""Gets the task and the eligible options; returns the index of one, None for none."""

Strategy = StrategyName | Custom


def read_strategy(name: str) -> StrategyName:
    """Raises ConfigError: `config_invalid`, there is no strategy of this name."""
    for known in STRATEGIES:
        if name == known:
            return known
    hint = f"{_hint(name, STRATEGIES)}; or a function"
    raise ConfigError("config_invalid", f"no strategy {name[:40]!r}", hint=hint)


class Asked(TaskDescriptor, frozen=True, kw_only=True):
    """The task of an order, and how to choose a backend for it."""

    strategy: StrategyName | None = None
    """None takes the configured one."""
    seed: int = 0

    @property
    def task(self) -> TaskDescriptor:
        """The task alone."""
        return TaskDescriptor(**{name: getattr(self, name) for name in TaskDescriptor.__struct_fields__})


OF_ORDER: Final = ("capabilities", "model")
"""Members of the task that the order has elsewhere: `requirements` and `config.model`."""


def read_route(route: Json, required: tuple[Requirement, ...] = (), model: str | None = None) -> Asked:
    """Read `config.vendor.abp.route` of an order.

    Args:
        required: the order's requirements.
        model: the model that the order names.

    Raises:
        ConfigError: `config_invalid`, a member is unknown, or its value is wrong or contradicts another.
    """
    said: Any = {} if route is None else route
    if isinstance(said, dict):
        said = {name: value for name, value in said.items() if value is not None}
        said["capabilities"] = msgspec.to_builtins(required)
        if model is not None:
            said = {"preference": "specific", **said, "model": model}
    try:
        if (wrong := _misspelt(route)) is None:
            return msgspec.convert(said, Asked)
    except msgspec.ValidationError as error:
        fact, hint = f"config.vendor.abp.route: {error}", "see docs/guide/routing-rule.md"
        raise ConfigError("config_invalid", fact, hint=hint) from error
    raise ConfigError("config_invalid", wrong[0], hint=wrong[1])


_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "type": get_args(TaskType),
    "preference": get_args(Preference),
    "priority": get_args(Priority),
    "strategy": STRATEGIES,
}
"""Member of `Asked` → the words that it may be."""


def _misspelt(value: Json) -> tuple[str, str] | None:
    """Return the fact and the hint if a member or one of its words is unknown; else None."""
    members = tuple(name for name in Asked.__struct_fields__ if name not in OF_ORDER)
    for name, given in value.items() if isinstance(value, dict) else ():
        if name not in members:
            return f"no member {name[:40]!r} of config.vendor.abp.route", _hint(name, members)
        if isinstance(given, str) and given not in _CHOICES.get(name, (given,)):
            return f"no {name} {given[:40]!r} of a task (config.vendor.abp.route)", _hint(given, _CHOICES[name])
    return None


def _hint(wrong: str, known: tuple[str, ...]) -> str:
    near = nearest_name(wrong[:40], known)
    return (f"did you mean {near}? " if near else "") + f"one of: {', '.join(known)}"
