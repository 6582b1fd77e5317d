"""Failures of the provider interface: seven codes, seven types, and whether a repeat may succeed."""

from __future__ import annotations

import re
from typing import Final, Literal

from backplane.errors import BackplaneError, CodeFacts, provider_code
from backplane.upstream.failure import USED_UP

ErrorType = Literal[
    "rate_limit",
    "authentication",
    "invalid_request",
    "model_overloaded",
    "network_error",
    "internal_error",
    "usage_limit_reached",
]

TYPES: Final[dict[str, ErrorType]] = {
    "authentication_failed": "authentication",
    "rate_limited": "rate_limit",
    "context_length_exceeded": "invalid_request",
    "invalid_request": "invalid_request",
    "model_unavailable": "invalid_request",
    "network_error": "network_error",
    "unknown": "internal_error",
}
"""Code of the provider interface → type of the unified interface."""

BUSY: Final = ("backend_rate_limited", "backend_unavailable")
"""Codes of a service that refuses for now; only its message says whether it is overloaded or its quota is used up."""

OVERLOADED: Final = r"overloaded|^the service answered 529\b"


class ProviderError(BackplaneError):
    """A turn failed. Message, hint, facts and evidence are those of its cause.

    Attributes:
        provider: the backend's name.
        code: one of the seven codes of the provider interface, where every other error of the tree has one of `CODES`.
        cause: the same failure as an error with one of our `CODES`.
        error_type: one of the seven types of the unified interface.
        recoverable: whether the same turn may succeed when it is tried again; nothing here tries by itself.
    """

    def __init__(self, provider: str, cause: BackplaneError) -> None:
        super().__init__(cause.code, cause.message, hint=cause.hint, evidence=cause.evidence)
        self.__cause__ = cause
        self.provider, self.cause = provider, cause
        self.code = provider_code(cause.code)
        self.error_type: ErrorType = TYPES[self.code]
        if cause.code in BUSY and re.search(USED_UP, cause.message, re.IGNORECASE):
            self.error_type = "usage_limit_reached"
        elif cause.code in BUSY and re.search(OVERLOADED, cause.message, re.IGNORECASE):
            self.error_type = "model_overloaded"
        self.recoverable = cause.retryable and self.error_type != "usage_limit_reached"

    @property
    def facts(self) -> CodeFacts:
        return self.cause.facts

    def __reduce__(self) -> tuple[object, ...]:
        return (ProviderError, (self.provider, self.cause))
