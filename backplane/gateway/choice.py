"""Chooses the order in which the services of a route are asked: by price, by measured times, those that rest last.

Strategies, unknown values and pauses are those of the router (`docs/guide/routing-rule.md`). The times are of this
gateway's own exchanges, and rests are kept in memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from backplane.dialects.ir import TokenCounts
from backplane.errors import CODES
from backplane.upstream.cost import MICROS, actual
from backplane.upstream.failure import UpstreamFailure
from backplane.upstream.measures import RATE_LIMITED_MS, StrategyName, expected, key_of, pause_ms, weight

if TYPE_CHECKING:
    from backplane.gateway.routes import ModelTarget

PERIOD_MS: Final = 600_000
"""A time counts half as much ten minutes later: the load of a service changes within the hour."""

TIMES_MAX: Final = 20
"""Newest times of a service and model that count."""

PASSED_MAX: Final = 20
"""Requests that pass a service over before one asks it for its time, if its newest time is a period old."""

TIMED: Final = ("latency", "balanced")
"""Strategies that look at times."""

ANSWER_TOKENS: Final = 4_000
"""Tokens that an answer without a limit is compared by; the router assumes as many."""

REQUEST_BYTES: Final = 4
"""Bytes of a request for each token of an estimated count."""


def now_ms() -> int:
    """Return the time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


class Times:
    """The newest times of a service and model: to the first piece of a stream, or of whole answers.

    Attributes:
        passed: requests that another service was chosen for since this one was.
    """

    def __init__(self) -> None:
        self._rows: deque[tuple[int, int, bool]] = deque(maxlen=TIMES_MAX)
        self._newest_ms = 0
        self.passed = 0

    def add(self, ended_ms: int, ms: int, *, is_complete: bool = True) -> None:
        """Add the time of one request."""
        self._rows.append((ended_ms, ms, is_complete))
        self._newest_ms = max(self._newest_ms, ended_ms)

    def expected(self, now: int) -> int | None:
        """Return the expected time in milliseconds, failures included; None is unknown."""
        return expected((weight(at, max(at, now), PERIOD_MS), ms, complete) for at, ms, complete in self._rows)

    def is_due(self, now: int) -> bool:
        """Return True if the service has been passed over for so long that nobody knows its time now."""
        return self.passed >= PASSED_MAX and now - self._newest_ms >= PERIOD_MS


class Standing:
    """What the last requests to a service say of it: its times, and until when it rests."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, bool], Times] = {}
        self._failures = 0
        self._circuit_until_ms = 0
        self._limited_until_ms = 0

    def times(self, model: str, *, stream: bool) -> Times:
        """Return the times of a model; those of streams are apart."""
        return self._times.setdefault((model, stream), Times())

    def note(self, failure: UpstreamFailure | None, now: int) -> bool:
        """Note the end of a request; return True if the service failed, which its client did not cause."""
        if failure is None or not CODES[failure.code].retryable:
            self._failures = 0
            return False
        if now >= self._circuit_until_ms:  # While it rests, requests from before fail, and those without another way.
            self._failures += 1
            self._circuit_until_ms = now + pause_ms(self._failures)
        if failure.code == "backend_rate_limited":
            asked = failure.retry_after_s
            pause = RATE_LIMITED_MS if asked is None else round(asked * 1000)
            self._limited_until_ms = max(self._limited_until_ms, now + pause)
        return True

    def rest(self, now: int) -> str:
        """Return how long the service rests, and why; empty if it does not."""
        if now < self._limited_until_ms:
            return f"rests {_seconds(self._limited_until_ms - now)}: over its limit"
        if self._failures and now < self._circuit_until_ms:
            return f"rests {_seconds(self._circuit_until_ms - now)}: failed {self._failures} times in a row"
        return ""


def _seconds(ms: int) -> str:
    return f"{-(-ms // 1000)} s"


class RequestFacts(NamedTuple):
    """What the choice looks at in a request."""

    size: int
    """Its bytes."""
    longest: int | None
    """Most tokens of its answer; None is no limit."""
    stream: bool


class Choice(NamedTuple):
    """The services in the order in which they are asked, and of each a few words for the record."""

    targets: tuple[ModelTarget, ...]
    considered: tuple[str, ...]


def order(strategy: StrategyName, targets: Sequence[ModelTarget], request: RequestFacts, now: int) -> Choice:
    """Order the services of a route for one request; of equal ones, the earlier one of the route is first.

    A service that rests is asked after all others, as the request would fail otherwise. A service whose time is not
    known now is first for one of many requests.
    """
    rests = [one.standing.rest(now) for one in targets]
    costs = [_cost(one, request) for one in targets]
    times = [one.standing.times(one.model, stream=request.stream) for one in targets]
    is_timed = strategy in TIMED
    latencies = [one.expected(now) if is_timed else None for one in times]
    ready = [place for place, rest in enumerate(rests) if not rest]
    key = key_of(strategy, [costs[place] for place in ready], [latencies[place] for place in ready])
    ready.sort(key=lambda place: key(costs[place], latencies[place]))
    due = next((place for place in ready[1:] if is_timed and times[place].is_due(now)), None)
    if due is not None:
        ready.sort(key=lambda place: place != due)
    for place in ready:
        times[place].passed = 0 if place == ready[0] else times[place].passed + 1

    def words(place: int) -> str:
        one, facts = targets[place], [rests[place]] if rests[place] else []
        if strategy in ("cost", "balanced"):
            cost = costs[place]
            facts.append("price unknown" if cost is None else f"${cost / MICROS:.4f}")
        if is_timed:
            facts.append("time unknown" if latencies[place] is None else f"{latencies[place]} ms")
        if place == due:
            facts.append("asked for its time")
        return f"{one.backend}/{one.model}{': ' if facts else ''}{', '.join(facts)}"

    places = [*ready, *(place for place, rest in enumerate(rests) if rest)]
    return Choice(tuple(targets[place] for place in places), tuple(map(words, places)))


def _cost(target: ModelTarget, request: RequestFacts) -> int | None:
    """Return the price of a request with the longest answer, in millionths of a dollar; None is unknown."""
    made = ANSWER_TOKENS if request.longest is None else request.longest
    return actual(target.price, TokenCounts(input=estimated_tokens(request.size), output=made))


def estimated_tokens(size: int) -> int:
    """Return about how many tokens a request of so many bytes has."""
    return -(-size // REQUEST_BYTES)
