"""The gateway of one run: a service of another vendor answers the model requests of the run's agent."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final
from urllib.parse import urlsplit

from backplane.dialects.ir import Loss
from backplane.errors import DENIAL, BackendError, BackplaneError, PolicyError
from backplane.gateway.exchange import Work
from backplane.gateway.fronts import ClientCall, ModelRow
from backplane.gateway.key_proxy import HOST, KeyUse, placeholder_for
from backplane.gateway.routes import Answering, ModelRoutes
from backplane.gateway.server import ClientReply, FrontServer
from backplane.gateway.service import Services
from backplane.process.aio import beside, visited
from backplane.sandbox.http import CONNECTIONS_MAX, listening
from backplane.upstream.cost import HIDDEN_TOKENS
from backplane.upstream.failure import UpstreamError
from backplane.upstream.meter import NAME_CHARS_MAX, tally

LOSSES_MAX: Final = 32
"""Number of different losses that the receipt names; further ones count as `other`."""


class RunEntry:
    """Counts one exchange of a run."""

    is_recorded = False
    copy_max = 0

    def __init__(self, keeper: RunGateway) -> None:
        self._keeper = keeper

    def reached(self, work: Work) -> None:
        """Do nothing: the run's own record has its events."""

    def end(
        self, work: Work, reply: ClientReply, error: BackplaneError | None, *, is_left: bool, is_over: bool
    ) -> None:
        """Count the exchange's tokens and losses."""
        is_whole = error is None and is_over and not is_left and work.report.failure is None
        self._keeper.count(work, error, is_answered=error is None and reply.status is not None, is_whole=is_whole)


class RunGateway:
    """The keeper for one run, whose agent is the only user (`None`).

    Attributes:
        placeholder: the agent has it in place of a key, and its requests must have it.
        host, port, address: the address on which the gateway listens.

    Args:
        routes: one route, which answers any model name.
        use: counts the run's requests.
    """

    def __init__(self, routes: ModelRoutes, use: KeyUse, port: int) -> None:
        self.placeholder = placeholder_for("")
        self.host, self.port = HOST, port
        self.address = f"http://{HOST}:{port}"
        self._routes, self._use = routes, use

    def admit(self, key: str | None) -> None:
        """Check the placeholder.

        Raises:
            BackendError: `backend_auth_failed`, another key came.
            PolicyError: `policy_denied`, a limit of the run is reached.
        """
        if key != self.placeholder:
            self._use.without_key += 1
            fact = f"{DENIAL}: the key that stands in the environment has to come with the request"
            raise BackendError("backend_auth_failed", fact)
        if self._use.over is not None:
            raise PolicyError("policy_denied", f"{DENIAL}: {self._use.over}")

    def models(self, _user: None) -> list[ModelRow]:
        """Return an empty list: the agent knows its own names of models, and all of them are answered."""
        return []

    def targets(self, _user: None, model: str) -> tuple[Answering, ...]:
        """Return the services; they are the same for every model name."""
        return self._routes.targets(model)

    def choose(self, model: str, work: Work) -> tuple[Answering, ...]:
        """Return the services, in the order of the run's only route."""
        return self._routes.targets(model)

    def owner(self, _user: None) -> str:
        """Return an empty name: the run has only one user."""
        return ""

    @contextmanager
    def entry(
        self, _user: None, _id: str, _model: str, work: Work, _body: bytes, _targets: tuple[Answering, ...]
    ) -> Iterator[RunEntry]:
        """Count a request, and yield the entry that counts its answer."""
        self._use.note_path(f"POST {work.call.front.name}")
        yield RunEntry(self)

    def refuse(self, _user: None, _id: str, _call: ClientCall, _model: str, _status: int, _error: Exception) -> bool:
        """Return False: a refused request is not in the run's record."""
        return False

    def count(self, work: Work, error: BackplaneError | None, *, is_answered: bool, is_whole: bool) -> None:
        """Add an exchange to the run's sums; without counters, it counts as the most that it can cost.

        One that only counts tokens costs nothing and is skipped.

        Args:
            error: the error that ended the exchange; None without one.
            is_answered: True if the client got an answer.
            is_whole: True if the answer is complete, so that its counters are right.
        """
        if work.call.action == "count":
            return
        report = work.report
        for loss in report.losses:
            self._add(loss)
        self._use.unanswered += not is_answered
        if not report.was_asked or report.target is None:
            return
        target, sent, made = report.target, work.size + HIDDEN_TOKENS, work.longest
        if not isinstance(error, UpstreamError) or error.failure.may_cost:
            self._use.took(target.model, report.tokens if is_whole else None, target.price, sent, made)
        for _ in range(report.paid_attempts):
            self._use.took(target.model, None, target.price, sent, made)

    def _add(self, loss: Loss) -> None:
        tally(self._use.lost, f"{loss.code} {loss.kind}: {loss.reason}"[:NAME_CHARS_MAX], LOSSES_MAX)


@asynccontextmanager
async def open_run_gateway(routes: ModelRoutes, base_url: str, use: KeyUse) -> AsyncIterator[RunGateway]:
    """Open the gateway of a run, which serves requests until the block ends.

    Args:
        base_url: address of the agent's own service; the paths of the agent's requests begin with its path.

    Raises:
        BackendError: `backend_unavailable`, the gateway cannot listen on `HOST`.
    """
    try:
        listener = listening(HOST)
    except OSError as error:
        fact = f"the gateway of a run cannot listen on {HOST}: {error.strerror}"
        raise BackendError("backend_unavailable", fact, hint="leave model_backend out") from error
    with listener:
        async with Services() as services:
            keeper = RunGateway(routes, use, listener.getsockname()[1])
            hosts = frozenset({f"{HOST}:{keeper.port}"})
            server = FrontServer(keeper, services, hosts, prefix=urlsplit(base_url).path.rstrip("/"))
            async with beside(functools.partial(visited, listener, server.attend, CONNECTIONS_MAX)):
                yield keeper
