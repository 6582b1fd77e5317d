"""A model server that follows a script, on loopback, in four vendors' wire formats at once.

It runs in threads, so it answers a client on any event loop, blocked or cancelled, as a process would. The files named
after the formats have their wire forms.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import IO, Any, Final, Self

import msgspec

from backplane.contract.canonical import Json
from backplane.errors import BackendError
from backplane.testing.choose import Plot
from backplane.testing.frames import RenderRequest, json_text
from backplane.testing.plan import beside, plain, plan, refuse, route, wants_usage
from backplane.testing.script import Scripted, read_script
from backplane.testing.wire import AnswerEnd, BadRequest, Connection, Delivery, Head
from backplane.upstream.endpoint import ProtocolName

CONNECTIONS_MAX: Final = 256
"""Open connections; a fleet of agents in tests has tens, and more is a client that never closes."""
WAIT_S: Final = 10.0
"""Seconds that a wait for requests or ends takes at most (default of `within_s`)."""
CLOSE_S_MAX: Final = 5.0
"""Seconds for the threads to end when the server closes."""


class RecordedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it arrived, credentials included: scripts use dummy keys."""

    number: int
    """The order of arrival, from 1."""
    connection: int
    """The number of its connection, from 1."""
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Json
    """None if it is empty, a string if it is not JSON."""
    protocol: ProtocolName | None
    """None: the path does not exist."""
    asks: str
    """generate, count, models or nothing."""
    stream: bool
    turn: int | None = None
    """The place of the turn that answers it, or None."""
    status: int = 200
    """The status of the answer."""


class ModelServer:
    """A scripted model server, a context manager.

    Args:
        script: a `Script`, its plain data, or a list of turns.
        record: a file that gets requests and ends as JSON lines.
        port: the port (default: a free one).

    Raises:
        ContractError: `contract_schema_violation` for a script that cannot be read.
    """

    def __init__(self, script: Scripted, *, record: Path | None = None, port: int = 0) -> None:
        self._plot = Plot(read_script(script))
        self._record_path = record
        self._record: IO[str] | None = None
        self._changed = threading.Condition()
        self._requests: list[RecordedRequest] = []
        self._ends: dict[int, AnswerEnd] = {}
        self._open: dict[int, tuple[Connection, threading.Thread]] = {}
        self._count = 0
        self.port = port

    def __enter__(self) -> Self:
        if self._record_path is not None:
            self._record = self._record_path.open("a", encoding="utf-8")
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=CONNECTIONS_MAX)
        self.port = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, name="model-server", daemon=True)
        self._accepting.start()
        return self

    def __exit__(self, *error: object) -> None:
        deadline = time.monotonic() + CLOSE_S_MAX
        self._listener.shutdown(socket.SHUT_RDWR)  # It ends `accept`, which closing does not.
        self._accepting.join(CLOSE_S_MAX)
        with self._changed:
            open_now = list(self._open.values())
        for connection, _ in open_now:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        for _, thread in open_now:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._listener.close()
        if self._record is not None:
            self._record.close()

    @property
    def url(self) -> str:
        """The root, for programs that add `/v1` or `/v1beta` themselves."""
        return f"http://127.0.0.1:{self.port}"

    def base_url(self, protocol: ProtocolName) -> str:
        """Return the address to which a protocol's own path is added: `…/v1`, `…/v1beta`."""
        return self.url + ("/v1beta" if protocol == "gemini_ai_studio" else "/v1")

    @property
    def requests(self) -> tuple[RecordedRequest, ...]:
        """All requests so far."""
        with self._changed:
            return tuple(self._requests)

    @property
    def unscripted(self) -> tuple[RecordedRequest, ...]:
        """The requests for which the script had no turn left."""
        return tuple(one for one in self.requests if one.asks == "generate" and one.protocol and one.turn is None)

    def play(self, script: Scripted) -> None:
        """Follow another script from its beginning for the requests that come next."""
        plot = Plot(read_script(script))
        with self._changed:
            self._plot = plot

    def wait_requests(self, count: int, within_s: float = WAIT_S) -> tuple[RecordedRequest, ...]:
        """Wait until this many requests have come.

        Raises:
            BackendError: `backend_timeout` when they do not.
        """
        self._wait(lambda: len(self._requests) >= count, within_s, f"{count} requests")
        return self.requests

    def wait_end(self, number: int, within_s: float = WAIT_S) -> AnswerEnd:
        """Wait until a request's answer is over: `whole`, `cut` by script, or `left` by its client.

        Raises:
            BackendError: `backend_timeout` when it goes on.
        """
        self._wait(lambda: number in self._ends, within_s, f"the end of answer {number}")
        return self._ends[number]

    def _wait(self, done: Any, within_s: float, what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(done, within_s):
                seen = f"{len(self._requests)} requests, {len(self._ends)} answers over"
                raise BackendError("backend_timeout", f"no {what} within {within_s:g} s", evidence=seen)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._changed:
                if len(self._open) >= CONNECTIONS_MAX:
                    sock.close()
                    continue
                self._count += 1
                args = (Connection(sock), self._count)
                thread = threading.Thread(target=self._serve, args=args, name="model-server", daemon=True)
                self._open[self._count] = (args[0], thread)
            thread.start()

    def _serve(self, connection: Connection, number: int) -> None:
        try:
            while self._answer_one(connection, number):
                pass
        finally:
            with self._changed:
                del self._open[number]
            connection.sock.close()

    def _answer_one(self, connection: Connection, number: int) -> bool:
        """Read and answer one request; return False if the connection is of no further use."""
        try:
            head = connection.read()
        except BadRequest as bad:
            body = json_text({"error": {"message": str(bad), "type": "invalid_request_error"}}).encode()
            connection.write(plain(bad.status, body))
            return False
        if head is None:
            return False
        request, delivery = self._take(head, number)
        if delivery is None:
            connection.reset()
            ended: AnswerEnd = "cut"
        else:
            ended = connection.write(delivery)
        with self._changed:
            self._ends[request.number] = ended
            self._note({"t": "end", "number": request.number, "status": request.status, "ended": ended})
            self._changed.notify_all()
        return connection.goes_on

    def _take(self, head: Head, connection: int) -> tuple[RecordedRequest, Delivery | None]:
        """Record a request and plan its answer; a plan of None is a reset."""
        place = route(head)
        with self._changed:
            refusal = refuse(self._plot, head, place)
            wants_turn = refusal is None and place.asks == "generate"
            chosen = self._plot.choose(place) if wants_turn else None
            number = len(self._requests) + 1
            ask = RenderRequest(place.model, number, wants_usage(place))
            delivery: Delivery | None
            if chosen is None:
                status, delivery = beside(self._plot, place, head, refusal)
            else:
                turn = self._plot.script.turns[chosen]
                status, delivery = turn.fault.status, plan(turn, place, ask, head)
            request = RecordedRequest(
                number=number, connection=connection, method=head.method, path=head.path, query=head.query,
                headers=head.headers, body=place.body,
                protocol=place.protocol, asks=place.asks, stream=place.stream, status=status, turn=chosen,
            )  # fmt: skip
            self._requests.append(request)
            self._note({"t": "request", **msgspec.to_builtins(request)})
            self._changed.notify_all()
        return request, delivery

    def _note(self, line: dict[str, Any]) -> None:
        if self._record is not None and not self._record.closed:
            self._record.write(json_text(line) + "\n")
            self._record.flush()
