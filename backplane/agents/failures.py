"""What vendors' agents say of a failure → the contract's code: one table for all of them. Pure.

A denial by our own proxies counts first, wherever it stands in the text. Else an agent says a word of its own, a status
of its model's service, or nothing but text; they are believed in this order.
How a service's own answer is read stands in `upstream.failure`: there a whole response is at hand.
"""

from __future__ import annotations

import json
from typing import Final

from backplane.errors import DENIAL

LABELS: Final = {
    # Claude Code: why the turn ended, and what its model's service said.
    "prompt_too_long": "backend_context_length",
    "structured_output_retry_exhausted": "validation_failed",
    "max_turns": "policy_denied",
    "budget_exhausted": "policy_denied",
    "hook_stopped": "policy_denied",
    "authentication_failed": "backend_auth_failed",
    "billing_error": "backend_auth_failed",
    "rate_limit": "backend_rate_limited",
    "model_not_found": "backend_model_not_found",
    # Codex: kinds of a turn's error. The others are a service that does not work, unless their words say more.
    "contextWindowExceeded": "backend_context_length",
    "usageLimitExceeded": "backend_rate_limited",
    "rateLimitExceeded": "backend_rate_limited",
    "sessionBudgetExceeded": "backend_rate_limited",
    "modelNotFound": "backend_model_not_found",
    "cyberPolicy": "backend_content_filtered",
    "misalignmentPolicyViolation": "backend_content_filtered",
    "inferenceHookDenied": "backend_content_filtered",
    "unauthorized": "backend_auth_failed",
    "tooManyDenials": "policy_denied",
    # Copilot: kinds of a session's error, beside `rate_limit`; `query` is any other.
    "authentication": "backend_auth_failed",
    "authorization": "backend_auth_failed",
    "quota": "backend_rate_limited",
    "context_limit": "backend_context_length",
    # Kimi: codes of a turn's error; `provider.api_error` is any other.
    "provider.auth_error": "backend_auth_failed",
    "provider.rate_limit": "backend_rate_limited",
    "provider.connection_error": "backend_unavailable",
    "context.overflow": "backend_context_length",
}
"""An agent's own word for what went wrong."""

STATUSES: Final = {
    401: "backend_auth_failed", 403: "backend_auth_failed", 404: "backend_model_not_found", 408: "backend_timeout",
    413: "backend_context_length", 429: "backend_rate_limited",
}  # fmt: skip
"""HTTP status → code; agents pass the status on as a member, or in the service's JSON inside their text."""

WORDS: Final = {
    "backend_auth_failed": (
        "api key", "bad key", "unauthor", "forbidden", "authentic", "log in", "logged in", "logged out",
        "environment variable",
    ),
    "backend_rate_limited": ("rate limit", "rate_limit", "too many requests", "quota", "slow down"),
    "backend_context_length": (
        "context length", "context window", "context limit", "context_length", "maximum context", "too long",
    ),
    "backend_model_not_found": (
        "model not found", "model_not_found", "no such model", "unknown model", "does not exist",
    ),
    "backend_timeout": ("timed out", "timeout"),
}  # fmt: skip
"""What agents write that say neither; the first row with a mark in the words counts."""


def code_of(words: str, *labels: object, status: int | None = None) -> str:
    """Choose the contract's code for an agent's failure.

    Args:
        words: the agent's text.
        labels: its own words for the failure, the most telling first.
        status: of its model's service.
    """
    if DENIAL in words:
        return "policy_denied"
    label = next((one for one in labels if isinstance(one, str) and one in LABELS), None)
    if label is not None:
        return LABELS[label]
    # Numbers in the text do not count: "429 lines" is no rate limit.
    number = next((one for one in (status, status_in(words)) if one in STATUSES), None)
    if number is not None:
        return STATUSES[number]
    low = words.lower()
    return next((code for code, marks in WORDS.items() if any(mark in low for mark in marks)), "backend_unavailable")


STATUS_MEMBERS: Final = ("status", "statusCode", "status_code", "code")
"""Members of an error in which services and agents say the HTTP status."""


def status_in(words: str) -> int | None:
    """Return the HTTP status of the JSON error that stands in an agent's text; None if there is none."""
    start = words.find("{")
    try:
        found = _DECODER.raw_decode(words, start)[0] if start >= 0 else None
    except (ValueError, RecursionError):
        return None
    inner = found.get("error") if isinstance(found, dict) else None
    members = [one.get(name) for one in (found, inner) if isinstance(one, dict) for name in STATUS_MEMBERS]
    return next((one for one in members if type(one) is int and one in STATUSES), None)


_DECODER: Final = json.JSONDecoder()
