"""Options of a request that need a table or a word of their own, for all dialects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from backplane.dialects._parts import Ledger, take, take_number
from backplane.ir import Conversation


def write_metadata(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    """Write the caller's labels."""
    if ledger.is_home or all(type(label) is str for label in value.values()):
        out["metadata"] = value
    else:
        ledger.drop(at, "option_value", "labels are texts here", value)


def write_n(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
    """Report how many answers are wanted, for a target that gives one."""
    if value == 1:
        ledger.degrade(at, "shape", "one answer is what the target gives anyway")
    else:
        ledger.drop(at, "candidates", "the target gives one answer", value)


NUMBER: Final = float
"""In a table of options: any number, and no boolean."""

OptionTable = Mapping[str, tuple[str, type[Any]]]
"""Native member → portable option and the type it must have; its value means the same in both."""


def read_options(
    rest: dict[str, Any], table: OptionTable, options: dict[str, Any], options_at: dict[str, str], at: str = ""
) -> None:
    """Take the options that need no translation."""
    for key, (name, kind) in table.items():
        if key not in rest:
            continue
        value = take_number(rest, key) if kind is NUMBER else take(rest, key, kind)
        if value is not None:
            options[name] = value
            options_at[name] = f"{at}/{key}"


Writer = Callable[[Any, dict[str, Any], Ledger, str], None]
"""Writes one option: its value, the object, the losses, where it was read."""


def write_options(
    conversation: Conversation,
    out: dict[str, Any],
    ledger: Ledger,
    names: Mapping[str, str],
    special: Mapping[str, Writer],
) -> None:
    """Write each option by its name or its own function; what has neither is a loss."""
    for name, value in conversation.options.items():
        at = conversation.options_at.get(name, f"/{name}")
        if name in special:
            special[name](value, out, ledger, at)
        elif name in names:
            out[names[name]] = value
        else:
            ledger.drop(at, "option", f"the target has no {name}", value)


def option_names(table: OptionTable) -> dict[str, str]:
    return {name: key for key, (name, _) in table.items()}


EFFORT_BUDGETS: Final[dict[str, int]] = {
    "none": 0, "minimal": 1024, "low": 2048, "medium": 8192, "high": 24_576, "xhigh": 32_768, "max": 65_536,
}  # fmt: skip
"""Words for thinking and tokens for it, for vendors who know only one of both. The vendors publish no such table;
these are the budgets that their own agents set for words of this kind."""


def effort_of(budget: int) -> str:
    """Return the least effort whose budget is enough."""
    if budget < 0:
        return "medium"
    return next((word for word, tokens in EFFORT_BUDGETS.items() if tokens >= budget), "max")
