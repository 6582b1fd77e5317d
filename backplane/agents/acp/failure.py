"""What an agent says of a failure of its model, as one of the contract's codes.

Some give an HTTP status, some words, some neither: then it is a service that does not work.
"""

from __future__ import annotations

import re
from typing import Final

from backplane.protocol.jsonrpc import Fault

SAID_CHARS_MAX: Final = 2000
"""Of an agent's own words in an error: a service's answer may be a whole page."""


def said(fault: Fault) -> str:
    """All that a refusal says, in one line."""
    details = fault.data if isinstance(fault.data, dict) else {}
    words = [str(details[name]) for name in ("details", "message", "statusCode") if details.get(name)]
    return "; ".join(dict.fromkeys([fault.message, *words]))[:SAID_CHARS_MAX]


STATUS: Final = {
    401: "backend_auth_failed", 403: "backend_auth_failed", 404: "backend_model_not_found", 408: "backend_timeout",
    413: "backend_context_length", 429: "backend_rate_limited",
}  # fmt: skip
_NUMBER: Final = re.compile(r"(?<![\w.:/-])(4\d\d)(?![\w:/-]|\.\d)")
"""A status among words, and not a part of an address or of another number."""
WORDS: Final = (
    (("api key", "bad key", "unauthor", "forbidden", "authentic", "log in"), "backend_auth_failed"),
    (("rate limit", "rate_limit", "too many requests", "quota", "slow down"), "backend_rate_limited"),
    (
        ("context length", "context window", "context limit", "maximum context", "too long", "context_length"),
        "backend_context_length",
    ),
    (("model not found", "no such model", "unknown model", "does not exist"), "backend_model_not_found"),
    (("timed out", "timeout"), "backend_timeout"),
)
"""What an agent that gives no status writes."""


def code_of(number: int, words: str) -> str:
    """The contract's code for a failure of the agent's model."""
    if number in STATUS:
        return STATUS[number]
    told = next((int(found) for found in _NUMBER.findall(words) if int(found) in STATUS), 0)
    if told:
        return STATUS[told]
    low = words.lower()
    return next((code for marks, code in WORDS if any(mark in low for mark in marks)), "backend_unavailable")
