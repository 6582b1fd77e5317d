"""The keyword arguments that say how one order is run: the same for `run`, `start`, a control plane and the router."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final, TypedDict, Unpack

import msgspec

from backplane.config import Limits, checked_limits
from backplane.contract.work import Lane, PolicyProfile, WorkOrder
from backplane.errors import require_type
from backplane.runtime.hooks import Hook
from backplane.runtime.inbound import OnAsk
from backplane.runtime.orders import make_order


class OrderOptions(TypedDict, total=False):
    """Keyword arguments of one run other than `output`; the docstring of `backplane.start` describes each."""

    root: str | os.PathLike[str] | None
    model: str | None
    policy: PolicyProfile | str | None
    lane: Lane | None
    max_turns: int | None
    max_budget_usd: float | None
    on_ask: OnAsk | None
    hooks: Sequence[Hook]
    tools: Sequence[Callable[..., Any]]
    timeout: float | None
    limits: Limits | None


class RunOptions(OrderOptions, total=False):
    """Keyword arguments of one run; each replaces the order's own member."""

    output: Any


OPTIONS: Final = frozenset(OrderOptions.__annotations__) | {"output"}
OF_ORDER: Final = ("root", "model", "policy", "lane", "max_turns", "max_budget_usd", "output")
"""Options that become members of the order."""
OF_RUN: Final = ("on_ask", "hooks", "output", "timeout", "limits")
"""Options that go on to the run itself."""


def check_names(given: Mapping[str, object], *known: str) -> None:
    """Raise TypeError for an unknown keyword, as Python does."""
    for name in given:
        if name not in OPTIONS and name not in known:
            raise TypeError(f"unexpected keyword argument {name!r}")


def check_callbacks(on_ask: object, hooks: Sequence[object]) -> None:
    """Refuse what cannot answer or be asked. Raises ConfigError: `config_invalid`."""
    require_type(on_ask, Callable | None, "`on_ask`", "a function from an Approval to a Decision")
    require_type(hooks, Sequence, "`hooks`", "a list of backplane.Hook")
    for hook in hooks:
        require_type(hook, Hook, "one of `hooks`", "a backplane.Hook around the command or function")


async def order_of(
    order: WorkOrder | str,
    opened: AsyncExitStack,
    configured_policy: PolicyProfile | str | None = None,
    **given: Unpack[RunOptions],
) -> WorkOrder:
    """Return the order with its options in it; functions are served until `opened` is left.

    Raises:
        ConfigError, PolicyError: as `make_order` and `served`.
    """
    named: dict[str, Any] = {name: given.get(name) for name in OF_ORDER}
    whole = make_order(order, configured_policy=configured_policy, **named)
    tools = given.get("tools", ())
    require_type(tools, Sequence, "`tools`", "a list of functions")
    if not tools:
        return whole
    from backplane.runtime.functions import served  # Few programs give functions.

    row = await opened.enter_async_context(served(tools, whole.config.env.values()))
    return whole.with_abp("mcp_servers", [*(whole.abp("mcp_servers") or ()), row])


def limits_of(own: Limits | None, otherwise: Limits, timeout: float | None) -> Limits:
    """Return the limits of a run: those given for it, else the settings', with its own timeout.

    Raises:
        ConfigError: `config_invalid`, a limit is out of its range.
    """
    limits = otherwise if own is None else checked_limits(own)
    if timeout is None:
        return limits
    require_type(timeout, int | float, "`timeout`", "seconds, as a number")
    return checked_limits(msgspec.structs.replace(limits, run_s=float(timeout)))
