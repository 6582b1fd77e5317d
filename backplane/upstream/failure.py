"""Finds the error code for a failure of a service or a vendor's agent, by its status, labels and words. Pure.

A denial by our own proxies counts first, then a label, the words and the status. Numbers among words do not count.
`FAILURES` is the one table; the seven codes of the provider interface stand beside the error codes (`errors`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects.framing import UNREADABLE
from backplane.errors import CODES, DENIAL, BackendError
from backplane.upstream.endpoint import cut_urls

INVALID: Final = "mapping_unsupported_capability"
"""Code for a request that the service cannot read or refuses in part; `ladder` decides what to leave out."""

MESSAGE_CHARS_MAX: Final = 2_000
"""Most characters kept of a message; some services send whole pages of HTML."""

WORDS_CHARS_MAX: Final = 8_000
"""Most characters of a message that are searched; the cause is at the beginning."""

LABEL_CHARS_MAX: Final = 100
"""Most characters of a label; the longest known has 40."""

RETRY_AFTER_S_MAX: Final = 86_400.0
"""Longest pause, in seconds, that is taken from a service; a longer one is cut to this."""


class UpstreamFailure(msgspec.Struct, frozen=True, kw_only=True):
    """One failed attempt."""

    code: str
    """Error code of the failure, one of `errors.CODES`."""
    message: str
    status: int | None = None
    """HTTP status of the answer; None if no answer came."""
    place: str = ""
    """Member of the request that the service blames, as `tools[5].function.parameters`; empty if it names none."""
    retry_after_s: float | None = None
    may_pass: bool = False
    """True if the same request may succeed a little later."""
    was_sent: bool = True
    """False if there was no connection to send the request on."""
    hint: str | None = None
    """Next step for the user; None uses the code's own."""

    @property
    def may_cost(self) -> bool:
        """True if the service may bill the request, because its answer had begun or was lost on the way."""
        is_lost = self.status is None and self.code in ("backend_timeout", "stream_closed")
        return self.was_sent and (is_lost or (self.status is not None and self.status < 300))


class UpstreamError(BackendError):
    """A model's service failed, and nothing more is tried.

    Args:
        failure: what happened.
        hint: the next step (default: the failure's own, or its code's).
    """

    def __init__(self, failure: UpstreamFailure, hint: str | None = None) -> None:
        answered = failure.code == "backend_unavailable" and failure.status is not None
        own = BUSY if answered else failure.hint or HINTS.get(failure.code)
        super().__init__(failure.code, failure.message, hint=hint or own)
        self.failure = failure
        self.turn: Any = None
        """The part of the answer that had come, as a `completion.ModelTurn`; None if nothing had."""

    def __reduce__(self) -> tuple[object, ...]:
        return (UpstreamError, (self.failure, self.hint))


class FailureRow(msgspec.Struct, frozen=True):
    """The signs by which a failure gets one code."""

    code: str
    hint: str
    """Next step for the user."""
    statuses: tuple[int, ...] = ()
    """HTTP statuses that mean this code if neither labels nor words decide."""
    labels: str = ""
    """The services' labels for such failures, in lower case, separated by blanks."""
    words: str = ""
    """Pattern of such failures' messages in upper or lower case, for services without labels; empty matches none."""
    loose: str = ""
    """Additional pattern for an agent's text; in a service's message it would match too much. Empty matches none."""


USED_UP: Final = (
    r"\bquota\b.{0,60}(exceed|exhaust|reached|used up|insufficient)"
    r"|(exceed|exhaust|reached|insufficient|over).{0,60}\bquota\b"
    r"|(usage|spend(ing)?|monthly|budget) limits?\b|insufficient_quota"
)
"""Pattern of the words for a quota that is used up."""

FAILURES: Final = (
    FailureRow(
        "backend_context_length", "make the conversation shorter, or take a model with a larger window", (413,),
        "context_length_exceeded exceed_context_size_error request_too_large",
        r"context[ _](length|window|size)|prompt is too long"
        r"|(input|prompt|request).{0,40}(is |are )?too (long|large)|input token count|too many (input )?tokens"
        r"|maximum.{0,20}token.{0,40}exceed|exceed.{0,60}\btokens?\b.{0,20}(limit|allowed|maximum)|reduce the length",
        "context limit|maximum context|too long",
    ),
    FailureRow(
        "backend_content_filtered", "change what the service objects to, or take another model", (),
        "content_filter content_policy_violation",
        r"content[ _-]?(management )?(filter|polic)|(rejected|blocked|flagged|refused|declined)\b.{0,80}"
        r"(safety|polic(y|ies)|moderation|high risk)|(safety|moderation) (system|filter|check)"
        r"|violat\w*.{0,60}\bpolic(y|ies)",
    ),
    FailureRow(
        "backend_rate_limited", "wait, or raise the limit at the service", (429,),
        "rate_limit_error rate_limit_exceeded rate_limit_reached_error insufficient_quota resource_exhausted",
        USED_UP, "rate[ _]limit|too many requests|quota|slow down",
    ),
    # An account without money is a refused key, as with status 402: only its owner can mend it, and waiting does not.
    FailureRow(
        "backend_auth_failed", "check the key, that it may use this model, and that its account has credit",
        (401, 402, 403),
        "authentication_error permission_error permission_denied unauthenticated invalid_api_key api_key_invalid "
        "invalid_authentication_error",
        r"(credits?|balance|funds)\b.{0,40}(too low|insufficient|exhausted|depleted|not enough|used up|run out)"
        r"|(insufficient|not enough|out of|no) (account )?(credits?|balance|funds)\b|payment (is )?required|billing"
        r"|(account|organi[sz]ation|subscription)\b.{0,40}(suspended|deactivated|disabled|overdue|in arrears)"
        r"|(api[ _-]?key|token).{0,20}(not valid|invalid|expired|missing|incorrect)"
        r"|(invalid|incorrect|missing|expired).{0,10}api[ _-]?key|unauthori[sz]ed",
        "api key|bad key|unauthor|forbidden|authentic|log in|logged (in|out)|environment variable",
    ),
    # Services do not distinguish a wrong address from a wrong model.
    FailureRow(
        "backend_model_not_found", "check the model's name (the service lists them below /models) and base_url, which "
        "ends before the protocol's own path, as in https://example.com/v1", (404, 405),
        "model_not_found",
        r"model\b.{0,120}(not found|not exist|no access|not available|unknown|decommissioned)"
        r"|(unknown|no such|invalid) model|not found for api version",
        r"model[ _]not[ _]found|does not exist",
    ),
    FailureRow(
        "backend_timeout", "raise the timeout of the endpoint, or take a quicker model", (408, 504),
        "timeout_error deadline_exceeded", loose="timed out|timeout",
    ),
    FailureRow(
        "backend_unavailable", "check that the address can be reached from here and that the service is up", (),
        "overloaded_error api_error server_error internal_server_error unavailable internal",
    ),
    FailureRow("stream_closed", "try again; a proxy on the way may cut long answers"),
    FailureRow("config_invalid", "correct base_url, the key or the headers of the backend's options"),
    FailureRow(
        "policy_denied", "change the rule or the limit named above, or add the service to the backend's `endpoints`"
    ),
    FailureRow(INVALID, "the service says above what it does not want"),
)  # fmt: skip
"""All signs of failures; of two rows whose patterns fit, the first counts.

Labels are from the references of the four vendors and of Moonshot, read in November 2026."""

HINTS: Final = {row.code: row.hint for row in FAILURES}
LABELS: Final = {label: row.code for row in FAILURES for label in row.labels.split()}
STATUSES: Final = {status: row.code for row in FAILURES for status in row.statuses}

BUSY: Final = "the service answers that it cannot work now: try again later, or take another model"

PAGE: Final = "a web page answered: a proxy, a login or a site, but no API; check base_url, HTTPS_PROXY and NO_PROXY"

LASTING: Final = frozenset({"insufficient_quota"})
"""Labels of failures that no waiting mends, whatever the status is."""

READ_WORDS: Final = frozenset({400, 403, 404, 413, 422, 500, 200})
"""HTTP statuses that many different failures have, so the words decide; 200 is an error inside a stream."""

STATUS_TEXTS: Final = frozenset(map(str, range(400, 600)))

STATUS_MEMBERS: Final = ("status", "statusCode", "status_code", "code")
"""Members of an error that may hold an HTTP status."""


def failure_of(
    status: int, headers: Mapping[str, str], body: bytes, now: datetime, secret: str | None
) -> UpstreamFailure:
    """Return the failure for a refused request.

    Args:
        now: for a date in `retry-after`.
        secret: the key, which some services repeat in their message.
    """
    try:
        document = msgspec.json.decode(body)
    except UNREADABLE:
        document = None
    words = _message(_error(document))
    if not words:
        words = " ".join(re.sub(r"<[^<>]*>", " ", body.decode("utf-8", "replace")).split())
    is_page = body.lstrip()[:1] == b"<"
    begin = "" if words.startswith(DENIAL) else f"the service answered {status}{': ' if words else ''}"
    found = _failure(status, document, words, begin, secret)
    wait_s = retry_after_s(headers, document, now)
    return msgspec.structs.replace(found, retry_after_s=wait_s, hint=PAGE if is_page else None)


def stream_failure(raw: Json, message: str, secret: str | None) -> UpstreamFailure:
    """Return the failure for an error inside a stream, whose status was 200."""
    return _failure(200, raw, message, "the service failed while it answered: ", secret)


def _failure(status: int, document: Json, words: str, begin: str, secret: str | None) -> UpstreamFailure:
    error = _error(document)
    labels, place = _labels(error), error.get("param") if isinstance(error, dict) else None
    code = _code_of_answer(status, labels, words[:WORDS_CHARS_MAX])
    # Only 429 is a limit that a pause lifts; a quota that a service refuses as a bad request is used up.
    is_used_up = code == "backend_rate_limited" and status in READ_WORDS - {200}
    return UpstreamFailure(
        code=code,
        message=clean(f"{begin}{words}", secret),
        status=status,
        place=place[:LABEL_CHARS_MAX] if isinstance(place, str) else "",
        may_pass=CODES[code].retryable and not LASTING.intersection(labels) and not is_used_up,
    )


def _code_of_answer(status: int, labels: tuple[str, ...], words: str) -> str:
    """Choose the code of a service's answer: a denial by our own proxy, then its label, its words, its status."""
    if words.startswith(DENIAL):
        return "policy_denied"
    if status == 200:
        status = next((int(label) for label in labels if label in STATUS_TEXTS), 200)
    for label in labels:
        # Some services give every failure the label of a fault of their own.
        if label in LABELS and not (LABELS[label] == "backend_unavailable" and 400 <= status < 500):
            return LABELS[label]
    if status in READ_WORDS and (row := next((row for row in FAILURES if _fits(row.words, words)), None)):
        return row.code
    if 300 <= status < 400:
        return "backend_model_not_found"
    return STATUSES.get(status) or (INVALID if 400 <= status < 500 else "backend_unavailable")


def code_of(words: str, *labels: object, status: int | None = None, own: Mapping[str, str] = LABELS) -> str:
    """Choose the code of a failure that a vendor's agent reports.

    Args:
        words: the agent's text.
        labels: the agent's labels of the failure, the most specific first.
        status: HTTP status of the agent's model service.
        own: the agent's label → our code.
    """
    if DENIAL in words:
        return "policy_denied"
    for label in labels:
        if isinstance(label, str) and label in own:
            return own[label]
    number = next((one for one in (status, status_in(words)) if one in STATUSES), None)
    if number is not None:
        return STATUSES[number]
    found = (row.code for row in FAILURES if _fits(row.words, words) or _fits(row.loose, words))
    return next(found, "backend_unavailable")


def _fits(pattern: str, words: str) -> bool:
    return bool(pattern) and re.search(pattern, words, re.IGNORECASE) is not None


def status_in(words: str) -> int | None:
    """Return the HTTP status in a JSON error inside a text; None if there is none."""
    start = words.find("{")
    try:
        found = json.JSONDecoder().raw_decode(words, start)[0] if start >= 0 else None
    except (ValueError, RecursionError):
        return None
    inner = found.get("error") if isinstance(found, dict) else None
    members = [one.get(name) for one in (found, inner) if isinstance(one, dict) for name in STATUS_MEMBERS]
    return next((one for one in members if type(one) is int and one in STATUSES), None)


def _error(document: Json) -> Any:
    """Return the member that describes the failure; gateways have many forms of it."""
    found = document[0] if isinstance(document, list) and document else document
    if isinstance(found, dict):
        if isinstance(response := found.get("response"), dict) and response.get("error"):
            return response["error"]
        inner = next((found[name] for name in ("error", "errors", "detail") if found.get(name)), found)
        return inner[0] if isinstance(inner, list) else inner
    return found


def _labels(error: Any) -> tuple[str, ...]:
    """Return a failure's labels: its code, type and status, and the reasons of its details."""
    found = [error.get(name) for name in ("code", "type", "status", "reason")] if isinstance(error, dict) else []
    found += [detail.get("reason") for detail in _details(error)]
    return tuple(dict.fromkeys(str(label).lower()[:LABEL_CHARS_MAX] for label in found if isinstance(label, str | int)))


def _details(error: Any) -> list[dict[str, Any]]:
    details = error.get("details") if isinstance(error, dict) else None
    return [one for one in details if isinstance(one, dict)] if isinstance(details, list) else []


def _message(error: Any) -> str:
    """Return a failure's message, or an empty text."""
    if isinstance(error, str) or not isinstance(error, dict):
        return error if isinstance(error, str) else ""
    members = [error.get(name) for name in ("message", "msg", "detail", "error_description", "reason")]
    where = error.get("loc")
    prefix = ".".join(map(str, where)) + ": " if isinstance(where, list) else ""
    return next((prefix + one for one in members if isinstance(one, str)), "")


def clean(text: str, secret: str | None = None) -> str:
    """Remove keys and queries from a service's words, and cut them."""
    whole = text.replace(secret, "[key]") if secret else text
    return cut_urls(whole[:WORDS_CHARS_MAX])[:MESSAGE_CHARS_MAX]


def retry_after_s(headers: Mapping[str, str], document: Json, now: datetime) -> float | None:
    """Return how long the service asks to wait, in seconds; None if it does not say.

    `retry-after` counts first (milliseconds, seconds, or a date), then the ends of used-up limits, then the detail that
    Gemini has in its body.
    """
    if "retry-after" in headers or "retry-after-ms" in headers:
        texts = [f"{headers.get('retry-after-ms', '')}ms", headers.get("retry-after", "")]
        found = next((seconds for text in texts if (seconds := _seconds(text, now)) is not None), None)
    else:
        delays = [detail.get("retryDelay") for detail in _details(_error(document))]
        texts = [*_resets(headers)] or [delay for delay in delays if isinstance(delay, str)]
        found = max((seconds for text in texts if (seconds := _seconds(text, now)) is not None), default=None)
    return None if found is None else min(max(found, 0.0), RETRY_AFTER_S_MAX)


def _resets(headers: Mapping[str, str]) -> Iterator[str]:
    """Yield the reset times of used-up rate limits, as the service writes them.

    Anthropic writes times (RFC 3339) and, for plans, Unix times; OpenAI writes durations such as `6m0s`; gateways write
    seconds or Unix times. Read on 2026-11-28.
    """
    for name, text in headers.items():
        if "ratelimit-" in name and "-reset" in name:
            left, status = (headers.get(name.replace("-reset", other)) for other in ("-remaining", "-status"))
            if left == "0" or status == "rejected":
                yield text


UNIX_S_MIN: Final = 1e9
"""Least number of seconds that is read as a Unix time; as a pause it would be 31 years."""

_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?(e\d{1,2})?")
_DURATION: Final = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?")


def _seconds(text: str, now: datetime) -> float | None:
    """Return the seconds that a number, a duration as `6m0s` or a time stands for; None for other texts."""
    if _NUMBER.fullmatch(text):
        number = float(text)
        return number - now.timestamp() if number >= UNIX_S_MIN else number
    if text and (found := _DURATION.fullmatch(text)) is not None:
        days, hours, minutes, seconds, millis = (float(one or 0) for one in found.groups())
        return days * 86_400 + hours * 3600 + minutes * 60 + seconds + millis / 1000
    for read in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            then = read(text)
        except (ValueError, OverflowError):
            continue
        return (then.replace(tzinfo=then.tzinfo or UTC) - now).total_seconds()
    return None
