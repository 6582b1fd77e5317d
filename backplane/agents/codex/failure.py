"""What an agent's failure of its model is called in the contract.

The kind of a failure comes in, a word or an object with an HTTP status, and the agent's own words; a code comes out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from backplane.contract.canonical import Json

KINDS: Final[Mapping[str, str]] = {
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
}
"""Kinds that say it all; the others are a service that does not work, unless their words say more."""

STATUS: Final[Mapping[int, str]] = {
    401: "backend_auth_failed", 403: "backend_auth_failed", 404: "backend_model_not_found", 408: "backend_timeout",
    413: "backend_context_length", 429: "backend_rate_limited",
}  # fmt: skip

WORDS: Final = (
    (("environment variable", "api key", "unauthorized", "log in", "logged out"), "backend_auth_failed"),
    (("rate limit", "too many requests", "quota"), "backend_rate_limited"),
    (("context window", "context length", "context_length", "prompt is too long"), "backend_context_length"),
    (("model not found", "model_not_found", "does not exist", "unknown model"), "backend_model_not_found"),
    (("idle timeout", "timed out"), "backend_timeout"),
)

_STATUS: Final = re.compile(r"\bstatus:? (\d{3})\b")


def code_of(info: Json, words: str) -> str:
    """The contract's code for a turn that failed."""
    if isinstance(info, str) and info in KINDS:
        return KINDS[info]
    status = _status(info)
    if status is None and (match := _STATUS.search(words)):
        status = int(match[1])
    if status is not None and status in STATUS:
        return STATUS[status]
    low = words.lower()
    return next((code for marks, code in WORDS if any(mark in low for mark in marks)), "backend_unavailable")


def plain(words: str) -> str:
    """The words in a service's own answer, which the agent may hand on as it came; any other text as it is."""
    try:
        said = msgspec.json.decode(words)
    except (ValueError, RecursionError):
        return words
    error = said.get("error", said) if isinstance(said, dict) else None
    told = error.get("message") if isinstance(error, dict) else None
    return told if isinstance(told, str) and told else words


def _status(info: Json) -> int | None:
    body = next(iter(info.values()), None) if isinstance(info, dict) else None
    status = body.get("httpStatusCode") if isinstance(body, dict) else None
    return status if isinstance(status, int) and not isinstance(status, bool) else None
