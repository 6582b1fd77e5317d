"""Chooses the order in which the services of a route are asked: by price or measured time, and paused ones last.

Strategies, unknown values and pauses are those of the router (`docs/guide/routing-rule.md`). The times are those of the
gateway's own exchanges. Pauses are kept in memory.
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
"""Milliseconds after which a time counts half as much; the load of a service changes within the hour."""

TIMES_MAX: Final = 20
"""Number of the newest times that count, for each service and model."""

PASSED_MAX: Final = 20
"""Requests that go to other services before one goes to this service to measure it, if its newest time is old."""

TIMED: Final = ("latency", "balanced")
"""Strategies that use measured times."""

ANSWER_TOKENS: Final = 4_000
"""Tokens of an answer without a limit, to compare prices; the router assumes the same number."""

REQUEST_BYTES: Final = 4
"""Bytes of a request that count as one token in an estimate."""


def now_ms() -> int:
    """Return the present time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


class Times:
    """The newest times of a service and model: to a stream's first piece, or to the end of an answer without a stream.

    Attributes:
        passed: number of requests since this service was last chosen.
    """

    def __init__(self) -> None:
        self._rows: deque[tuple[int, int, bool]] = deque(maxlen=TIMES_MAX)
        self._newest_ms = 0
        self.passed = 0

    def add(self, ended_ms: int, ms: int, *, is_complete: bool = True) -> None:
        """Add the time of one request.

        Args:
            ended_ms: when it ended, in milliseconds since 1970.
            ms: the milliseconds that it took.
            is_complete: False if it failed.
        """
        self._rows.append((ended_ms, ms, is_complete))
        self._newest_ms = max(self._newest_ms, ended_ms)

    def expected(self, now: int) -> int | None:
        """Return the expected time in milliseconds, failures included; None is unknown."""
        return expected((weight(at, max(at, now), PERIOD_MS), ms, complete) for at, ms, complete in self._rows)

    def is_due(self, now: int) -> bool:
        """Return True if the service was not chosen for so long that its time is no longer known.

        Args:
            now: milliseconds since 1970.
        """
        return self.passed >= PASSED_MAX and now - self._newest_ms >= PERIOD_MS


class Standing:
    """State of a service and model after its last requests: its times, its failures, and the end of its pause."""

    def __init__(self) -> None:
        self._whole, self._streams = Times(), Times()
        self._failures = 0
        self._circuit_until_ms = 0
        self._limited_until_ms = 0

    def times(self, *, stream: bool) -> Times:
        """Return the times, either those of streams or those of other answers."""
        return self._streams if stream else self._whole

    def note(self, failure: UpstreamFailure | None, now: int) -> bool:
        """Note the end of a request; return True if the service failed by its own fault.

        Args:
            failure: the failure of the request; None without one.
            now: milliseconds since 1970, as in `rest`.
        """
        if failure is None or not CODES[failure.code].retryable:
            self._failures = self._circuit_until_ms = 0
            return False
        if now >= self._circuit_until_ms:  # Failures in a pause do not prolong it.
            self._failures += 1
            self._circuit_until_ms = now + pause_ms(self._failures)
        if failure.code == "backend_rate_limited":
            asked = failure.retry_after_s
            pause = RATE_LIMITED_MS if asked is None else round(asked * 1000)
            self._limited_until_ms = max(self._limited_until_ms, now + pause)
        return True

    def rest(self, now: int) -> str:
        """Return a text that says how long the service pauses, and why; empty if it does not pause."""
        if now < self._limited_until_ms:
            return f"rests {_seconds(self._limited_until_ms - now)}: over its limit"
        if now < self._circuit_until_ms:
            return f"rests {_seconds(self._circuit_until_ms - now)}: failed {self._failures} times in a row"
        return ""


def _seconds(ms: int) -> str:
    return f"{-(-ms // 1000)} s"


class RequestFacts(NamedTuple):
    """Facts of a request that the choice depends on."""

    size: int
    """Bytes of the request."""
    longest: int | None
    """Maximum tokens of the answer; None if the request sets no limit."""
    stream: bool
    is_measured: bool = True
    """False if its time says nothing of the others, as that of a count of tokens."""


class Choice(NamedTuple):
    """The result of a choice."""

    targets: tuple[ModelTarget, ...]
    """The services, in the order to ask them."""
    considered: tuple[str, ...]
    """A text for the record about each service, in the same order."""


def order(strategy: StrategyName, targets: Sequence[ModelTarget], request: RequestFacts, now: int) -> Choice:
    """Order the services of a route for one request; equal ones keep the order of the route.

    A service that pauses comes after all others, and is not left out, as the request might fail otherwise. A service
    whose time is old (`Times.is_due`) comes first once, so that it is measured again.
    """
    rests = [one.standing.rest(now) for one in targets]
    costs = [_cost(one, request) for one in targets]
    times = [one.standing.times(stream=request.stream) for one in targets]
    is_timed = strategy in TIMED
    latencies = [one.expected(now) if is_timed else None for one in times]
    ready = [place for place, rest in enumerate(rests) if not rest]
    key = key_of(strategy, [costs[place] for place in ready], [latencies[place] for place in ready])
    ready.sort(key=lambda place: key(costs[place], latencies[place]))
    measures = is_timed and request.is_measured
    due = next((place for place in ready[1:] if measures and times[place].is_due(now)), None)
    if due is not None:
        ready.sort(key=lambda place: place != due)
    for place in ready if measures else ():
        times[place].passed = 0 if place == ready[0] else times[place].passed + 1

    def words(place: int) -> str:
        one, facts = targets[place], [rests[place]] if rests[place] else []
        if strategy in ("cost", "balanced"):
            cost = costs[place]
            facts.append("price unknown" if cost is None else f"${cost / MICROS:.4f}")
        if is_timed:
            facts.append("time unknown" if latencies[place] is None else f"{latencies[place]} ms")
        if place == due:
            facts.append("measured anew")
        return f"{one.backend}/{one.model}{': ' if facts else ''}{', '.join(facts)}"

    places = [*ready, *(place for place, rest in enumerate(rests) if rest)]
    return Choice(tuple(targets[place] for place in places), tuple(map(words, places)))


def _cost(target: ModelTarget, request: RequestFacts) -> int | None:
    """Return the price of a request with the longest answer, in millionths of a dollar; None is unknown."""
    made = ANSWER_TOKENS if request.longest is None else request.longest
    return actual(target.price, TokenCounts(input=estimated_tokens(request.size), output=made))


def estimated_tokens(size: int) -> int:
    """Return the estimated number of tokens in a request of `size` bytes."""
    return -(-size // REQUEST_BYTES)
