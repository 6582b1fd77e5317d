"""The contract's code for how such an agent's work failed. Pure.

A failed request of the model ends in a result that calls itself a success, so three members decide and not that word.
"""

from __future__ import annotations

from typing import Final

from backplane.agents.claude.story import Result

STATUS: Final = {
    401: "backend_auth_failed", 403: "backend_auth_failed", 404: "backend_model_not_found", 408: "backend_timeout",
    413: "backend_context_length", 429: "backend_rate_limited",
}  # fmt: skip

REASONS: Final = {
    "prompt_too_long": "backend_context_length",
    "structured_output_retry_exhausted": "validation_failed",
    "max_turns": "policy_denied",
    "budget_exhausted": "policy_denied",
    "hook_stopped": "policy_denied",
}
"""Why the turn ended, in the agent's word."""

ERRORS: Final = {
    "authentication_failed": "backend_auth_failed",
    "billing_error": "backend_auth_failed",
    "rate_limit": "backend_rate_limited",
    "model_not_found": "backend_model_not_found",
}
"""The agent's word for what its model's service said."""

WORDS: Final = (
    (("not logged in", "api key", "unauthor"), "backend_auth_failed"),
    (("prompt is too long", "context"), "backend_context_length"),
    (("timed out", "timeout"), "backend_timeout"),
)

LOGIN: Final = (
    "export its key (`backplane backends` names the variable), or use your own login with options = {own_state = true}"
)
"""What helps against a missing login: the agent names a command of its own window, which nobody has here."""


def words_of(result: Result) -> str:
    """What a person is told of a result that is an error."""
    words = result.text or result.subtype
    return f"{words}; {LOGIN}" if "/login" in words else words


def code_of(result: Result, error: str | None) -> str:
    """The code of a result that is an error.

    Args:
        error: the agent's word on the last message of its model, None where there was none.
    """
    if result.reason in REASONS:
        return REASONS[result.reason]
    if result.status in STATUS:
        return STATUS[result.status]
    if error in ERRORS:
        return ERRORS[error]
    low = result.text.lower()
    return next((code for marks, code in WORDS if any(mark in low for mark in marks)), "backend_unavailable")
