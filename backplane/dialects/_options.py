"""Options of a request that need a table or a word of their own, for all dialects."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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

VERBOSITIES: Final = frozenset({"low", "medium", "high"})
FORMAT_MEMBERS: Final = ("name", "schema", "strict", "description")
"""What OpenAI lets be said of a schema that an answer has to fit."""

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


def word_writer(words: Collection[str], what: str, *path: str) -> Writer:
    """Make the writer of an option that is a word; one that the target does not know is left out.

    Args:
        path: the members below which it is written, and its own at last.
    """

    def write(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
        if ledger.is_home or value in words:
            _put(out, path, value)
        else:
            ledger.drop(at, "option_value", f"no such {what} here", value)

    return write


def budget_writer(*path: str) -> Writer:
    """Make the writer of a budget for thinking, where the target knows only words; the effort's own word wins."""

    def write(value: Any, out: dict[str, Any], ledger: Ledger, at: str) -> None:
        if path[0] in out:
            ledger.drop(at, "option", "the target has the effort in words only", value)
            return
        word = effort_of(value)
        _put(out, path, word)
        ledger.degrade(at, "option_value", f"tokens for thinking became the word {word}", value)

    return write


def _put(out: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for step in path[:-1]:
        out = out.setdefault(step, {})
    out[path[-1]] = value


def write_form(value: dict[str, Any], ledger: Ledger, at: str) -> tuple[str, dict[str, Any]]:
    """Return OpenAI's word for the form of an answer, and what is said of its schema."""
    if value["type"] != "schema":
        return ("json_object" if value["type"] == "json" else "text"), {}
    body: dict[str, Any] = {key: value[key] for key in FORMAT_MEMBERS if key in value}
    if "name" not in body and not ledger.is_home:
        ledger.synthesise(at, "required", "a schema has a name here")
        body["name"] = "answer"
    return "json_schema", body


def lose_schema_words(form: dict[str, Any], ledger: Ledger, at: str) -> None:
    """Report what is said of a schema beside it, where the target takes only the schema."""
    for key in sorted(form.keys() - {"type", "schema"}):
        ledger.drop(f"{at}/{key}", "option_value", f"a schema has no {key} here", form[key])


def require_model(out: dict[str, Any], ledger: Ledger) -> None:
    """Write a model where another dialect's request names none."""
    if "model" not in out and not ledger.is_home:
        ledger.synthesise("/model", "required", "a request names its model")
        out["model"] = "unknown"


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
