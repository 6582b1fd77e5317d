"""Failures of the provider interface: seven codes, seven types, and whether a repeat may succeed."""

from __future__ import annotations

import re
from typing import Final, Literal

from backplane.errors import BackplaneError, CodeFacts, provider_code

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

KINDS: Final[dict[str, ErrorType]] = {"overloaded": "model_overloaded", "quota": "usage_limit_reached"}
"""`ext.kind` of a failure → its type."""

_WORDS: Final = (
    ("quota", re.compile(r"\bquota\b|insufficient_quota|(usage|spend(ing)?|monthly) limits?\b", re.IGNORECASE)),
    ("overloaded", re.compile(r"overloaded|^the service answered 529\b", re.IGNORECASE)),
)
"""The same by the service's words, as most hosts have no other sign of it."""


class ProviderError(BackplaneError):
    """A turn failed. Message, hint, facts and evidence are those of its cause.

    Attributes:
        provider: the backend's name.
        code: one of the seven codes of the provider interface, where every other error of the tree has one of `CODES`.
        cause: the failure under its code of ours.
        error_type: one of the seven types of the unified interface.
        recoverable: whether the same turn may succeed when it is tried again; nothing here tries by itself.
    """

    def __init__(self, provider: str, cause: BackplaneError, kind: str | None = None) -> None:
        super().__init__(cause.code, cause.message, hint=cause.hint, evidence=cause.evidence)
        self.__cause__ = cause
        self.provider, self.cause, self._kind = provider, cause, kind
        self.code = provider_code(cause.code)
        if kind not in KINDS and cause.code in ("backend_rate_limited", "backend_unavailable"):
            kind = next((kind for kind, words in _WORDS if words.search(cause.message)), None)
        self.error_type: ErrorType = KINDS.get(kind or "", TYPES[self.code])
        self.recoverable = cause.retryable and self.error_type != "usage_limit_reached"

    @property
    def facts(self) -> CodeFacts:
        return self.cause.facts

    def __reduce__(self) -> tuple[object, ...]:
        return (ProviderError, (self.provider, self.cause, self._kind))
