"""The answer to an approval: one shape for policies, people, hooks and hosts."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec
from msgspec import UNSET, UnsetType

from backplane.contract.canonical import Json
from backplane.errors import ConfigError

DecisionKind = Literal["allow", "deny", "modify"]
Remember = Literal["once", "run"]


class Decision(msgspec.Struct, frozen=True):
    """Answers an approval: allows it, denies it, or changes its input.

    Attributes:
        decision: `allow`, `deny`, or `modify` with another input.
        reason: Why; the agent reads this text.
        input: The tool input to use instead; only with `modify`.
        text: An answer in words (`input`), or the output to show instead (`result`, with `modify`).
        remember: `run` to decide like calls the same way for the rest of the run; `policy.remembered` says which.

    Raises:
        ConfigError: `config_invalid`, `decision` or `remember` has an unknown value.
    """

    decision: DecisionKind
    reason: str = ""
    input: Json | UnsetType = UNSET
    text: str | None = None
    remember: Remember = "once"

    def __post_init__(self) -> None:
        for name, words in (("decision", get_args(DecisionKind)), ("remember", get_args(Remember))):
            if (value := getattr(self, name)) not in words:
                choices = ", ".join(map(repr, words))
                raise ConfigError(
                    "config_invalid", f"`{name}` of a decision is {value!r:.40}", hint=f"one of {choices}"
                )


def misfit(decision: Decision, kind: str, input: Json | UnsetType = UNSET) -> str:
    """Return why a decision does not answer an ask; empty if it does. A decision that does not answer allows nothing.

    Args:
        kind: kind of the ask.
        input: tool input of the ask; if it is an object, a changed input must be one too.
    """
    if decision.decision == "modify":
        if kind == "patch":
            return "a patch can be allowed or denied, not modified"
        if kind == "result" and decision.text is None:
            return "it answers modify and gives no text"
        if kind == "tool" and decision.input is UNSET:
            return "it answers modify and gives no input"
        if kind == "tool" and isinstance(input, dict) and not isinstance(decision.input, dict):
            return "it answers modify and gives an input that is no object"
    elif decision.decision == "allow" and decision.input is not UNSET and decision.input is not None:
        return "it answers allow and gives another input, which is modify"
    if kind in ("tool", "patch") and decision.decision != "deny" and decision.text is not None:
        return f"it answers a {kind} in words: allow, deny or modify it"
    return ""


def choices(options: Json | UnsetType) -> list[str]:
    """Return the labels of a question's options; empty if it has none."""
    rows = options if isinstance(options, list | tuple) else ()
    return [str(row.get("label", row) if isinstance(row, dict) else row) for row in rows]


def chosen(text: str, options: Json | UnsetType) -> str | None:
    """Return the answer to a question that a text means: the label of the option with this number, else the text.

    Returns:
        None if the question has options, but none with this number.
    """
    labels = choices(options)
    if not labels or not text.isdecimal() or text in labels:
        return text
    number = int(text[:6])
    return labels[number - 1] if 0 < number <= len(labels) else None
