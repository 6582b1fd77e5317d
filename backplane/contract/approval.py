"""The answer to an approval: one shape for policies, people, hooks and hosts."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from backplane.contract.canonical import Json


class Decision(msgspec.Struct, frozen=True):
    """What was decided about an approval."""

    decision: Literal["allow", "deny", "modify"]
    reason: str = ""
    input: Json | UnsetType = UNSET
    """The tool input to use instead; only with `modify`."""
    text: str | None = None
    """An answer in words (`input`), or the output to show instead (`result`, with `modify`)."""
    remember: Literal["once", "run"] = "once"
    """`run`: the same tool need not be asked for again in this run."""
