"""Defines the keyword arguments of one run, which `run`, `start`, a control plane and the router share."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypedDict

import msgspec

from backplane.config import Limits, Settings, checked
from backplane.contract.events import AgentEvent
from backplane.contract.work import Lane, PolicyProfile
from backplane.errors import require_type
from backplane.runtime.approvals import OnAsk
from backplane.runtime.hooks import Hook

if TYPE_CHECKING:
    from backplane.routing.task import Preference, Priority, TaskType


class RouteOptions(TypedDict, total=False):
    """Wishes of a run for the router; they replace members of the order's `config.vendor.abp.route`.

    Attributes:
        type: the kind of task, which decides what a backend must be able to do.
        preference: `cost`, `speed`, `quality`, `balanced`, or `specific` for the order's own model.
        priority: `low`, `normal`, `high` or `critical`; a waiting order with a higher one starts first.
        strategy: name of the router's strategy; None takes the router's own.
        max_cost_usd_micros: limit of the expected cost of the run, in millionths of a US dollar.
        max_latency_ms: limit of the expected time to the first answer, in milliseconds.
        allow_unknown: True if an unknown cost or latency satisfies its limit.
        input_tokens: number of tokens that the task will send, if known.
        output_tokens: number of tokens that the task will receive, if known.
        seed: seed of the strategies that choose at random.
    """

    type: TaskType | None
    preference: Preference | None
    priority: Priority | None
    strategy: str | None
    max_cost_usd_micros: int | None
    max_latency_ms: int | None
    allow_unknown: bool
    input_tokens: int | None
    output_tokens: int | None
    seed: int


class OrderOptions(RouteOptions, total=False):
    """Keyword arguments of one run other than `output`; the docstring of `backplane.start` describes each."""

    root: str | os.PathLike[str] | None
    model: str | None
    policy: PolicyProfile | str | None
    lane: Lane | None
    max_turns: int | None
    max_budget_usd: float | None
    wait_for_limit: float | None
    on_ask: OnAsk | None
    hooks: Sequence[Hook]
    tools: Sequence[Callable[..., Any]]
    timeout: float | None
    limits: Limits | None


class RunOptions(OrderOptions, total=False):
    """Keyword arguments of one run; each replaces the order's own member."""

    output: Any


OnEvent = Callable[[AgentEvent], object]


class WaitOptions(OrderOptions, total=False):
    """Keyword arguments, other than `output`, of calls that read a run to its end."""

    on_event: OnEvent | None
    """Plain or `async` function that is called with each event, in the loop of the run."""


OPTIONS: Final = frozenset(RunOptions.__annotations__)


def check_names(given: Mapping[str, object], *known: str) -> None:
    """Raise TypeError for an unknown keyword, as Python does."""
    for name in given:
        if name not in OPTIONS and name not in known:
            raise TypeError(f"unexpected keyword argument {name!r}")


def check_callbacks(on_ask: object, hooks: Sequence[object]) -> None:
    """Refuse an `on_ask` that is no function and `hooks` that are no hooks. Raises ConfigError: `config_invalid`."""
    require_type(on_ask, Callable | None, "`on_ask`", "a function from an Approval to a Decision")
    require_type(hooks, Sequence, "`hooks`", "a list of backplane.Hook")
    for hook in hooks:
        require_type(hook, Hook, "one of `hooks`", "a backplane.Hook around the command or function")


async def hand_event(on_event: OnEvent, event: AgentEvent) -> None:
    """Call a program's plain or `async` function with one event, in this thread."""
    if inspect.isawaitable(waits := on_event(event)):
        await waits


def limits_of(own: Limits | None, otherwise: Limits, timeout: float | None) -> Limits:
    """Return the limits of a run: its own or else those of the settings, with its own timeout if it has one.

    Raises:
        ConfigError: `config_invalid`, a limit is out of its range.
    """
    limits = otherwise if own is None else checked(Settings(limits=own)).limits
    if timeout is None:
        return limits
    require_type(timeout, int | float, "`timeout`", "seconds, as a number")
    return checked(Settings(limits=msgspec.structs.replace(limits, run_s=float(timeout)))).limits
