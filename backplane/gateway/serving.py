"""The gateway for clients with keys: models, budgets, and a record of each exchange."""

from __future__ import annotations

import functools
import ipaddress
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final

from backplane.config import GatewaySettings, Settings
from backplane.errors import BackplaneError, PolicyError, TranslationError
from backplane.gateway.bodies import COPY_BYTES_MAX, Bodies
from backplane.gateway.choice import RequestFacts
from backplane.gateway.clients import Client, Clients
from backplane.gateway.exchange import Work
from backplane.gateway.fronts import ClientCall, ModelRow
from backplane.gateway.journal import ExchangeJournal, now, recent_ends
from backplane.gateway.record import LOSSES_MAX, ExchangeBegin, ExchangeEnd, ExchangeFirst, Outcome
from backplane.gateway.routes import AgentTarget, Answering, ModelRoutes
from backplane.gateway.server import ClientReply, Entry, FrontServer, own_address
from backplane.gateway.service import Services
from backplane.process.aio import beside, visited
from backplane.upstream.cost import HIDDEN_TOKENS, actual, believed, most
from backplane.upstream.failure import UpstreamError

CONNECTIONS_MAX: Final = 1024
"""Maximum open connections of all clients; further ones wait. Most of them are idle."""
ANSWER_TOKENS: Final = 131_072
"""Tokens to reserve for an answer if the request sets no limit; the longest answers of today's models have as many."""
LOCAL_NAMES: Final = ("127.0.0.1", "localhost", "[::1]")
"""Names of this machine that are accepted in the header `Host`."""
TOKEN_BYTES: Final = 2
"""Bytes of a request that count as one token in a reservation; real texts have three or four bytes a token."""


class Gateway:
    """The gateway's clients, models and record.

    Attributes:
        record: the file with this gateway's exchanges.

    Args:
        address: address and port on which it listens.
        only_key: key of one more client, made at this start; None adds no client.
        agents: whole agents that are offered as models, by their names as models.
        bodies: keeps requests and answers; None keeps none.
    """

    def __init__(
        self, settings: GatewaySettings, routes: ModelRoutes, journal: ExchangeJournal, address: str,
        only_key: str | None = None, agents: Mapping[str, AgentTarget] | None = None, bodies: Bodies | None = None,
    ) -> None:  # fmt: skip
        self.routes, self._agents = routes, agents or {}
        self.url = f"http://{address}"
        self.record = journal.path
        self._clients = Clients(settings.clients, only_key)
        self._journal, self._bodies = journal, bodies

    def admit(self, key: str | None) -> Client:
        """Return the client with a key. Raises BackendError `backend_auth_failed`."""
        return self._clients.find(key)

    def models(self, user: Client) -> list[ModelRow]:
        """Return the models that have names and that a client may ask."""
        rows = [*self.routes.models(), *map(ModelRow, self._agents)]
        return [row for row in rows if user.may_ask(row.name)]

    def targets(self, user: Client, model: str) -> tuple[Answering, ...]:
        """Return the services for a model, in the order of its route; empty if the client may not ask it."""
        if not user.may_ask(model):
            return ()
        return (self._agents[model],) if model in self._agents else self.routes.targets(model)

    def choose(self, model: str, work: Work) -> tuple[Answering, ...]:
        """Return a model's services, in the order to ask them for one request; the facts that decided are reported."""
        if model in self._agents:
            return (self._agents[model],)
        found = self.routes.choose(
            model, RequestFacts(work.size, work.longest, work.stream, work.call.action == "generate")
        )
        work.report.considered = found.considered if len(found.targets) > 1 else ()
        return found.targets

    def owner(self, user: Client) -> str:
        """Return the client's name; empty if there is no other client."""
        return "" if self._clients.is_one else user.name

    @contextmanager
    def entry(
        self, user: Client, id: str, model: str, work: Work, body: bytes, targets: tuple[Answering, ...]
    ) -> Iterator[Entry]:
        """Reserve the cost, write the first line, and count the exchange as open until the block ends.

        Raises:
            TooMany: `backend_rate_limited`, the client has reached a limit.
            PolicyError: `policy_denied`, the client's budget is too small.
            StoreError: `receipt_store_failed`, the record cannot be read or written.
        """
        is_free = work.call.action == "count"
        with user.place(is_free=is_free):
            yield Uncounted() if is_free else self._begin(user, id, model, work, body, targets)

    def refuse(self, user: Client, id: str, call: ClientCall, model: str, status: int, error: Exception) -> bool:
        """Record a request that is refused before a service is asked, as its program may not show the error."""
        if call.action == "count":
            return False
        code, words = None, str(error)
        if isinstance(error, BackplaneError):  # The code's general next step is for runs.
            code, words = error.code, f"{error.message}; {error.hint}" if error.hint else error.message
        with suppress(BackplaneError):  # On a full disk: the client still gets its error.
            self._journal.write(ExchangeBegin(
                id=id, at=now(), client=user.name, front=call.front.name, model=model[:200], stream=call.stream is True,
            ))  # fmt: skip
            self._journal.write(ExchangeEnd(
                id=id, at=now(), client=user.name, end="refused", status=status, cost=0, code=code, error=words[:400],
            ))  # fmt: skip
            return True
        return False

    def _begin(
        self, user: Client, id: str, model: str, work: Work, body: bytes, targets: tuple[Answering, ...]
    ) -> _Entry:
        """Write the first line, with the reservation. Raises PolicyError or StoreError."""

        def write(reserved: int) -> None:
            self._journal.write(ExchangeBegin(
                id=id, at=now(), client=user.name, front=work.call.front.name, model=model[:200], stream=work.stream,
                reserved=reserved,
            ))  # fmt: skip

        if user.budget is None:
            write(0)
            return _Entry(self._journal, self._bodies, user, id, body, None)
        if isinstance(targets[0], AgentTarget):
            raise PolicyError(
                "policy_denied", f"this key has a budget, and what {model[:200]} will cost is unknown",
                hint="ask agents with a key that has no `budget_usd`",
            )  # fmt: skip
        at_most = _at_most(targets, work)
        reserved = user.check_budget(self._journal.used(user.name), at_most, targets[0].model)
        write(reserved)
        # Another gateway may have reserved meanwhile. Each one reads after it wrote, so of two that take the same money
        # at least one finds the other. A lock would let a suspended gateway stop all others.
        user.check_budget(self._journal.used(user.name) - reserved, at_most, targets[0].model)
        return _Entry(self._journal, self._bodies, user, id, body, reserved)


def _at_most(targets: tuple[Answering, ...], work: Work) -> int | None:
    """Return the highest cost, in millionths of a dollar, if all services are asked; None is unknown."""
    size = work.size // TOKEN_BYTES + HIDDEN_TOKENS
    made = ANSWER_TOKENS if work.longest is None else work.longest
    costs = [None if one.price is None else most(one.price, size, made) for one in targets]
    # All services count, because one may bill an answer that failed half-way.
    return None if None in costs else sum(one for one in costs if one is not None)


class Uncounted:
    """The entry of an exchange that costs nothing and is not recorded."""

    is_recorded = False
    copy_max = 0

    def reached(self, work: Work) -> None:
        """Note nothing."""

    def end(
        self, work: Work, reply: ClientReply, error: BackplaneError | None, *, is_left: bool, is_over: bool
    ) -> None:
        """Note nothing."""


class _Entry:
    """Records one exchange, and charges its client's budget.

    Args:
        reserved: reserved amount in millionths of a dollar; None if the client has no budget.
    """

    def __init__(
        self, journal: ExchangeJournal, bodies: Bodies | None, user: Client, id: str, body: bytes, reserved: int | None
    ) -> None:
        self._journal, self._bodies, self._user, self._id, self._body = journal, bodies, user, id, body
        self._reserved = reserved
        self._began = time.monotonic()
        self._first_ms: int | None = None
        self.is_recorded = True
        self.copy_max = COPY_BYTES_MAX if bodies is not None else 0

    def _ms(self) -> int:
        return round((time.monotonic() - self._began) * 1000)

    def reached(self, work: Work) -> None:
        """Write the line that goes before the first piece of a stream."""
        self._first_ms, target = self._ms(), work.report.target
        with suppress(BackplaneError):  # On a full disk: the answer is paid for, so it goes on.
            self._journal.write(ExchangeFirst(
                id=self._id, at=now(), ms=self._first_ms, backend=None if target is None else target.backend,
                model=None if target is None else target.model, tried=work.report.tried,
            ))  # fmt: skip

    def end(
        self, work: Work, reply: ClientReply, error: BackplaneError | None, *, is_left: bool, is_over: bool
    ) -> None:
        """Write the last line, which replaces the reservation by the cost; then write the bodies."""
        report, target = work.report, work.report.target
        seen, cost = believed(report.tokens), report.cost
        if cost is None and target is not None:
            cost = actual(target.price, seen)
        is_whole = error is None and report.failure is None and is_over and not is_left
        cost = cost if is_whole else None  # The counters of a part may be too low.
        if not report.was_asked or (isinstance(error, UpstreamError) and not error.failure.may_cost):
            cost = 0
        if report.paid_attempts:
            cost = None  # The failed attempts before were not counted.
        charged = 0
        if self._reserved is not None:
            charged = self._reserved if cost is None else cost
        tokens = None
        if seen is not None:
            counts = {name: getattr(seen, name) for name in ("input", "output", "cache_read", "cache_write")}
            tokens = {name: count for name, count in counts.items() if count is not None}
        asked_ms = 0 if report.asked_ns is None else max(report.asked_ns // 1_000_000 - round(self._began * 1000), 0)
        words = error.message if error is not None else report.failure
        with suppress(BackplaneError):  # On a full disk: the next start ends the exchange.
            outcome = _outcome(error, report.failure, is_left=is_left, is_over=is_over)
            self._journal.write(ExchangeEnd(
                id=self._id, at=now(), client=self._user.name, end=outcome,
                status=reply.status, backend=None if target is None else target.backend,
                model=None if target is None else target.model, considered=report.considered, tried=report.tried,
                tokens=tokens, cost=cost, charged=charged, ms=self._ms(), asked_ms=asked_ms,
                first_ms=self._first_ms, losses=len(report.losses),
                lost=tuple(f"{one.path or '/'} {one.kind} {one.code}" for one in report.losses[:LOSSES_MAX]),
                code=None if error is None else error.code, error=None if words is None else words[:400],
            ))  # fmt: skip
            if self._bodies is not None:
                self._bodies.keep(self._id, self._body, bytes(reply.copy))


def _outcome(error: BackplaneError | None, failure: str | None, *, is_left: bool, is_over: bool) -> Outcome:
    if is_left or not is_over:
        return "left" if is_left else "interrupted"
    if isinstance(error, UpstreamError) and error.failure.status is not None and 400 <= error.failure.status < 500:
        return "refused"
    if isinstance(error, TranslationError):
        return "refused"
    return "failed" if error is not None or failure is not None else "complete"


# A start --------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_gateway(
    settings: Settings, environ: Mapping[str, str], home: Path, listener: socket.socket, *,
    only_key: str | None = None, agents: Mapping[str, AgentTarget] | None = None,
) -> AsyncIterator[Gateway]:  # fmt: skip
    """Open a gateway, which serves requests until the block ends.

    Args:
        listener: a listening, non-blocking socket.
        only_key, agents: as in `Gateway`.

    Raises:
        ConfigError: `config_invalid`, a route is wrong or there is none; `backend_not_found`.
        StoreError: `receipt_store_failed`, the record cannot be written.
    """
    routes = ModelRoutes(settings, environ, has_agents=bool(agents))  # First, so that a wrong table leaves no record.
    journal = ExchangeJournal(home)
    try:
        for end in recent_ends(home) if routes.has_times else ():
            routes.learn(end)
        secrets = [value for one in routes.endpoints() for value in (one.key, *one.headers.values()) if value]
        secrets += [only_key] if only_key is not None else []
        bodies = Bodies(journal.path, secrets) if settings.gateway.bodies else None
        async with Services() as services:
            gateway = Gateway(settings.gateway, routes, journal, own_address(listener), only_key, agents, bodies)
            host, port = listener.getsockname()[:2]
            is_local = ipaddress.ip_address(host).is_loopback or ipaddress.ip_address(host).is_unspecified
            hosts = frozenset(f"{name}:{port}" for name in LOCAL_NAMES if is_local)
            names = frozenset(map(str.lower, settings.gateway.hosts))
            server = FrontServer(gateway, services, hosts, names, is_strict=settings.gateway.losses == "fail")
            async with beside(functools.partial(visited, listener, server.attend, CONNECTIONS_MAX)):
                yield gateway
    finally:
        journal.close()
