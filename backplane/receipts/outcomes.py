"""Decides the outcome of a run from its end, and finds the error if it did not complete. Pure."""

from __future__ import annotations

from typing import Final, cast

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.events import Failed
from backplane.contract.receipt import Outcome, Receipt
from backplane.errors import BackplaneError, from_code

CAUSE_CHARS_MAX: Final = 2000
"""Maximum length of a cause's text: one screen."""

STOPPED: Final = frozenset({"cancelled", "interrupted", "deadline", "idle", "budget", "max_turns"})
"""Reasons for the end of a run that a person or a limit ended; its work until then counts as partial."""

_WITHOUT_FINAL: Final = ("refused", "host_exit", "protocol", "store")
_RANK: Final[dict[str, int]] = {"failed": 0, "partial": 1, "complete": 2}


class End(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run, as the receipt has it."""

    reason: str
    """complete, partial, failed, cancelled, interrupted, refused, deadline, idle, budget, max_turns,
    host_exit, protocol or store; an open list."""
    code: str | None = None
    exit_code: int | None = None
    signal: int | None = None

    def to_wire(self) -> dict[str, Json]:
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


def cause(error: BackplaneError) -> dict[str, Json]:
    """Return the receipt's member `error`: code, fact, next step and last words of a run that did not complete.

    Args:
        error: the error, already redacted.
    """
    texts = {"message": error.message, "hint": error.hint, "evidence": error.evidence}
    return {"code": error.foreign_code or error.code} | {
        name: text[:CAUSE_CHARS_MAX] for name, text in texts.items() if text
    }


def failure_of(receipt: Receipt) -> BackplaneError | None:
    """Return why a run did not complete: its error, else the last one that its agent reported.

    None if it completed, if a person or a limit ended it, or if its host gave no reason.
    """
    cause = receipt.backplane.get("error")
    if isinstance(cause, dict):
        code, message, hint, evidence = (_text(cause.get(name)) for name in ("code", "message", "hint", "evidence"))
        return from_code(str(code), message or "", hint=hint, evidence=evidence)
    end = receipt.backplane.get("end")
    if receipt.outcome == "complete" or (isinstance(end, dict) and end.get("reason") in STOPPED):
        return None
    last = None
    for event in receipt.trace:
        if isinstance(event, Failed):
            last = event
    if last is None:
        return None
    fact = f"the run ended as {receipt.outcome}: {last.message}"
    code = _text(last.error_code) or "execution_tool_failed"
    return from_code(code, fact, hint=f"backplane why {receipt.meta.run_id}")


def _text(value: Json) -> str | None:
    return value if isinstance(value, str) else None


def outcome_of(end: End, *, claimed: Outcome | None, accepted: int) -> Outcome:
    """Return the outcome of a run: the host's, which its end can lower and never raise.

    Args:
        claimed: outcome in the host's receipt; None without a receipt.
        accepted: number of events accepted from the host.
    """
    if end.reason in STOPPED:
        return "partial" if accepted else "failed"
    if claimed is None or end.reason in _WITHOUT_FINAL:
        return "failed"
    if end.reason in _RANK:
        return min(claimed, cast(Outcome, end.reason), key=_RANK.__getitem__)
    return claimed


def ends_in_final(end: End | None, error: BackplaneError | None) -> bool:
    """Return True if a run's last message is `final`: its host sent one, or a person or a limit ended the run."""
    assert end is not None, "the run has not ended"
    if end.reason in STOPPED or error is None:
        return end.reason not in _WITHOUT_FINAL
    # The host completed the run, but its result breaks the policy, or could not be applied.
    return end.reason == "partial" or error.code == "execution_workspace_error"
