"""What went wrong at a model's service: an answer's status and body, or a broken connection, as one of our codes.

Pure: the clock comes in as an argument. The seven codes of the provider interface are a column of the table of
codes (`errors.CODES`), so each failure has both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects.framing import UNREADABLE
from backplane.errors import CODES, DENIAL, BackendError
from backplane.upstream.endpoint import cut_urls

INVALID: Final = "mapping_unsupported_capability"
"""The service cannot read the request or does not want something in it: what the ladders are for."""

MESSAGE_CHARS_MAX: Final = 2_000
"""Of what a service says about its failure; some send whole pages of HTML."""

WORDS_CHARS_MAX: Final = 8_000
"""Of them looked at to learn what they mean; what tells one failure from another stands at the beginning."""

LABEL_CHARS_MAX: Final = 100
"""Of a code or type; the longest known has 40."""

RETRY_AFTER_S_MAX: Final = 86_400.0
"""A day; whoever says more means never."""


class UpstreamFailure(msgspec.Struct, frozen=True, kw_only=True):
    """One failed attempt."""

    code: str
    """One of the 44."""
    message: str
    status: int | None = None
    """None when no answer came."""
    labels: tuple[str, ...] = ()
    """The service's own words for its failure, in lower case."""
    place: str = ""
    """The member of the request that the service names beside its words, as in `tools[5].function.parameters`."""
    retry_after_s: float | None = None
    may_pass: bool = False
    """Whether the same request may succeed a little later."""

    @property
    def provider_code(self) -> str:
        """The nearest of the seven codes of the provider interface."""
        return CODES[self.code].provider_code


class UpstreamError(BackendError):
    """A model's service failed, and nothing more is tried.

    Args:
        failure: what happened.
        hint: the next step.
    """

    def __init__(self, failure: UpstreamFailure, hint: str | None = None) -> None:
        answered = failure.code == "backend_unavailable" and failure.status is not None
        super().__init__(failure.code, failure.message, hint=hint or (BUSY if answered else HINTS.get(failure.code)))
        self.failure = failure
        self.turn: Any = None
        """What had come of the answer before, as a `turn.Turn`; None when nothing had."""

    @property
    def provider_code(self) -> str:
        return self.failure.provider_code

    @property
    def status(self) -> int | None:
        return self.failure.status

    @property
    def retry_after_s(self) -> float | None:
        return self.failure.retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return (UpstreamError, (self.failure, self.hint))


HINTS: Final[dict[str, str]] = {
    "backend_auth_failed": "check the key, that it may use this model, and that its account has credit",
    "backend_rate_limited": "wait, or raise the limit at the service",
    "backend_context_length": "make the conversation shorter, or take a model with a larger window",
    "backend_model_not_found": "check the model's name (the service lists them below /models) and base_url, which ends "
    "before the protocol's own path, as in https://example.com/v1",
    "backend_unavailable": "check that the address can be reached from here and that the service is up",
    "backend_timeout": "raise the timeout of the endpoint, or take a quicker model",
    "stream_closed": "try again; a proxy on the way may cut long answers",
    "config_invalid": "correct base_url, the key or the headers of the backend's options",
    "policy_denied": "change the rule or the limit named above, or add the service to the backend's `endpoints`",
    INVALID: "the service says above what it does not want",
}

BUSY: Final = "the service answers that it cannot work now: try again later, or take another model"

LABELS: Final[dict[str, str]] = {
    "authentication_error": "backend_auth_failed",
    "permission_error": "backend_auth_failed",
    "permission_denied": "backend_auth_failed",
    "unauthenticated": "backend_auth_failed",
    "invalid_api_key": "backend_auth_failed",
    "api_key_invalid": "backend_auth_failed",
    "invalid_authentication_error": "backend_auth_failed",
    "rate_limit_error": "backend_rate_limited",
    "rate_limit_exceeded": "backend_rate_limited",
    "rate_limit_reached_error": "backend_rate_limited",
    "insufficient_quota": "backend_rate_limited",
    "resource_exhausted": "backend_rate_limited",
    "context_length_exceeded": "backend_context_length",
    "exceed_context_size_error": "backend_context_length",
    "request_too_large": "backend_context_length",
    "model_not_found": "backend_model_not_found",
    "content_filter": "backend_content_filtered",
    "content_policy_violation": "backend_content_filtered",
    "overloaded_error": "backend_unavailable",
    "api_error": "backend_unavailable",
    "server_error": "backend_unavailable",
    "internal_server_error": "backend_unavailable",
    "unavailable": "backend_unavailable",
    "internal": "backend_unavailable",
    "timeout_error": "backend_timeout",
    "deadline_exceeded": "backend_timeout",
}
"""The services' own words → our code (references of the four vendors and of Moonshot, read November 2026)."""

LASTING: Final = frozenset({"insufficient_quota"})
"""Words for what no waiting mends, although the status says so."""

PATTERNS: Final[tuple[tuple[str, str], ...]] = (
    ("backend_context_length",
        r"context[ _](length|window|size)|prompt is too long"
        r"|(input|prompt|request).{0,40}(is |are )?too (long|large)|input token count|too many (input )?tokens"
        r"|maximum.{0,20}token.{0,40}exceed|exceed.{0,60}\btokens?\b.{0,20}(limit|allowed|maximum)|reduce the length"),
    ("backend_content_filtered",
        r"content[ _-]?(management )?(filter|polic)|(rejected|blocked|flagged|refused|declined)\b.{0,80}"
        r"(safety|polic(y|ies)|moderation|high risk)|(safety|moderation) (system|filter|check)"
        r"|violat\w*.{0,60}\bpolic(y|ies)"),
    ("backend_rate_limited",
        r"\bquota\b.{0,60}(exceed|exhaust|reached|used up|insufficient)"
        r"|(exceed|exhaust|reached|insufficient|over).{0,60}\bquota\b"
        r"|(usage|spend(ing)?|monthly|budget) limits?\b"),
    ("backend_auth_failed",
        r"(credits?|balance|funds)\b.{0,40}(too low|insufficient|exhausted|depleted|not enough|used up|run out)"
        r"|(insufficient|not enough|out of|no) (account )?(credits?|balance|funds)\b|payment (is )?required|billing"
        r"|(account|organi[sz]ation|subscription)\b.{0,40}(suspended|deactivated|disabled|overdue|in arrears)"
        r"|(api[ _-]?key|token).{0,20}(not valid|invalid|expired|missing|incorrect)"
        r"|(invalid|incorrect|missing|expired).{0,10}api[ _-]?key|unauthori[sz]ed"),
    ("backend_model_not_found",
        r"model\b.{0,120}(not found|not exist|no access|not available|unknown|decommissioned)"
        r"|(unknown|no such|invalid) model|not found for api version"),
)  # fmt: skip
"""Code ← pattern of the message, whatever its case, for services that say it in no other way; tried in this order.

An account without money is a refused key, as status 402 is: only the account's owner can mend it, no waiting does."""

READ_WORDS: Final = frozenset({400, 403, 404, 413, 422, 500, 200})
"""Statuses that say so little that the words count; 200 is an error in the middle of a stream."""

STATUS_TEXTS: Final = frozenset(map(str, range(400, 600)))

STATUSES: Final[dict[int, str]] = {
    401: "backend_auth_failed", 402: "backend_auth_failed", 403: "backend_auth_failed",
    404: "backend_model_not_found", 405: "backend_model_not_found",
    408: "backend_timeout", 504: "backend_timeout",
    413: "backend_context_length", 429: "backend_rate_limited",
}  # fmt: skip
"""Status → code, where neither labels nor words said more. 402 is an account without money; 404, 405 and a redirect are
a wrong address or model, which services do not tell apart."""


def failure_of(
    status: int, headers: Mapping[str, str], body: bytes, now: datetime, secret: str | None
) -> UpstreamFailure:
    """Read a refused request.

    Args:
        now: for a date in `retry-after`.
        secret: the key, which some services repeat in their message.
    """
    document = _decode(body)
    labels, words = labels_of(document), message_of(document)
    if not words:
        words = " ".join(re.sub(r"<[^<>]*>", " ", body.decode("utf-8", "replace")).split())
    code = code_of(status, labels, words[:WORDS_CHARS_MAX])
    answered = "" if words.startswith(DENIAL) else f"the service answered {status}{': ' if words else ''}"
    return UpstreamFailure(
        code=code,
        message=clean(f"{answered}{words}", secret),
        status=status,
        labels=labels,
        place=place_of(document),
        retry_after_s=retry_after_s(headers, document, now),
        # Only 429 is a limit that a pause lifts; a quota that a service refuses as a bad request is used up.
        may_pass=CODES[code].retryable
        and not LASTING.intersection(labels)
        and not (code == "backend_rate_limited" and status in READ_WORDS),
    )


def stream_failure(raw: Json, message: str, secret: str | None) -> UpstreamFailure:
    """Read an error that came in the middle of a stream, where the status had already been said."""
    labels = labels_of(raw)
    code = code_of(200, labels, message[:WORDS_CHARS_MAX])
    return UpstreamFailure(
        code=code, message=clean(f"the service failed while it answered: {message}", secret), status=200,
        labels=labels, may_pass=CODES[code].retryable and not LASTING.intersection(labels),
    )  # fmt: skip


def code_of(status: int, labels: tuple[str, ...], words: str) -> str:
    """Choose the code: a denial by our own proxy, then the service's own label, its words, the status."""
    if words.startswith(DENIAL):
        return "policy_denied"
    if status == 200:
        status = next((int(label) for label in labels if label in STATUS_TEXTS), 200)
    for label in labels:
        # Some services give every failure the label of a fault of their own.
        if label in LABELS and not (LABELS[label] == "backend_unavailable" and 400 <= status < 500):
            return LABELS[label]
    if status in READ_WORDS:
        for code, pattern in PATTERNS:
            if re.search(pattern, words, re.IGNORECASE):
                return code
    if 300 <= status < 400:
        return "backend_model_not_found"
    if status in STATUSES:
        return STATUSES[status]
    if status == 200:
        return "backend_unavailable"
    return INVALID if 400 <= status < 500 else "backend_unavailable"


def _decode(body: bytes) -> Json:
    try:
        return msgspec.json.decode(body)
    except UNREADABLE:
        return None


def _error(document: Json) -> Any:
    """The member that describes the failure, in the many forms that gateways have."""
    found = document[0] if isinstance(document, list) and document else document
    if isinstance(found, dict):
        if isinstance(response := found.get("response"), dict) and response.get("error"):
            return response["error"]
        for name in ("error", "errors", "detail"):
            if found.get(name):
                inner = found[name]
                return inner[0] if isinstance(inner, list) else inner
    return found


def labels_of(document: Json) -> tuple[str, ...]:
    """Return a failure's labels: its code, type and status, and the reasons of its details."""
    error = _error(document)
    if not isinstance(error, dict):
        return ()
    found = [error.get(name) for name in ("code", "type", "status", "reason")]
    details = error.get("details")
    found += [one.get("reason") for one in (details if isinstance(details, list) else ()) if isinstance(one, dict)]
    return tuple(dict.fromkeys(str(label).lower()[:LABEL_CHARS_MAX] for label in found if isinstance(label, str | int)))


def place_of(document: Json) -> str:
    """Return the member of the request that a failure names; empty if it names none."""
    error = _error(document)
    found = error.get("param") if isinstance(error, dict) else None
    return found[:LABEL_CHARS_MAX] if isinstance(found, str) else ""


def message_of(document: Json) -> str:
    """Return a failure's words; empty when there are none."""
    error = _error(document)
    if isinstance(error, str):
        return error
    if isinstance(error, dict):
        for name in ("message", "msg", "detail", "error_description", "reason"):
            if isinstance(error.get(name), str):
                where = error.get("loc")
                prefix = ".".join(map(str, where)) + ": " if isinstance(where, list) else ""
                return prefix + str(error[name])
    return ""


def clean(text: str, secret: str | None = None) -> str:
    """Make a service's words fit to be shown: no key, no query, no more than anybody reads."""
    whole = len(text) <= WORDS_CHARS_MAX
    text = text[:WORDS_CHARS_MAX]
    if secret:
        # A key that the cut went through would show its first half.
        text = text.replace(secret, "[key]") if whole else text.replace(secret, "[key]")[: -len(secret)]
    return cut_urls(text)[:MESSAGE_CHARS_MAX]


def retry_after_s(headers: Mapping[str, str], document: Json, now: datetime) -> float | None:
    """Return how long the service asks to wait, in seconds; None when it does not say.

    Headers first (milliseconds, seconds, or a date), then the detail with which Gemini says it in its body.
    """
    found = _number(headers.get("retry-after-ms"))
    if found is not None:
        return _bounded(found / 1000)
    said = headers.get("retry-after")
    found = _number(said)
    if found is None and said:
        found = _until(said, now)
    if found is None:
        error = _error(document)
        details = error.get("details") if isinstance(error, dict) else None
        delays = [one.get("retryDelay") for one in (details if isinstance(details, list) else ())
                  if isinstance(one, dict)]  # fmt: skip
        found = next((_number(delay.removesuffix("s")) for delay in delays if isinstance(delay, str)), None)
    return None if found is None else _bounded(found)


def _number(text: str | None) -> float | None:
    try:
        found = float(text) if text else None
    except ValueError:
        return None
    return found if found is not None and found == found else None


def _until(said: str, now: datetime) -> float | None:
    try:
        when = parsedate_to_datetime(said)
    except (ValueError, OverflowError):
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return (when - now).total_seconds()


def _bounded(seconds: float) -> float:
    return min(max(seconds, 0.0), RETRY_AFTER_S_MAX)
