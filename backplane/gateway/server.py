"""Serves all fronts over HTTP/1.1, with keep-alives, and errors in the form of each interface.

A `Keeper` decides who may ask which model, and keeps the record. There are two: `serving.Gateway` for the gateway's
clients, and `in_run.RunGateway` for the agent of one run.
"""

from __future__ import annotations

import functools
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final, Generic, Protocol, TypeVar

import anyio
import h11
import msgspec

from backplane.dialects.framing import UNREADABLE
from backplane.errors import BackendError, BackplaneError, TranslationError, unforeseen
from backplane.gateway import fronts
from backplane.gateway.answers import Headers, allowed
from backplane.gateway.clients import OPEN_MAX, TooMany
from backplane.gateway.doors import attend, headers_of, read_body, while_connected
from backplane.gateway.exchange import Exchange, Shared, Work, unknown_response, whole_of
from backplane.gateway.frames import encode
from backplane.gateway.fronts import ClientCall, Front, ModelRow
from backplane.gateway.journal import new_id
from backplane.gateway.kept import KeptResponse, KeptStore, keep_response
from backplane.gateway.proofs import Proofs
from backplane.gateway.routes import AgentTarget, Answering
from backplane.gateway.service import Services
from backplane.gateway.translation import Translations
from backplane.process.aio import beside
from backplane.sandbox.http import HttpClient, Refused
from backplane.upstream.client import RefusedAnswer
from backplane.upstream.endpoint import address
from backplane.upstream.endpoint import headers_of as service_headers
from backplane.upstream.failure import UpstreamError

PING_S: Final = 10.0
"""Seconds without a byte after which a stream gets a keep-alive; some clients and proxies give up after 30."""
_STATUS: Final[Mapping[str, int]] = {
    "policy_denied": 403, "backend_auth_failed": 401, "backend_rate_limited": 429, "backend_model_not_found": 404,
    "backend_unavailable": 502, "stream_closed": 502, "backend_timeout": 504, "internal": 500,
    "receipt_store_failed": 503,
}  # fmt: skip
"""Our code → HTTP status, if no service has given one. All other codes get 400, as a wrong request does; a wrong
configuration, too, as clients repeat a request after 5xx, which would not help."""
_FINAL: Final = frozenset({"config_invalid", "internal"})
"""Codes of errors that a repeated request would get again; their answers ask the client not to repeat it."""


_PORT: Final = re.compile(r":[0-9]{1,5}\Z")
"""Matches the port at the end of a `Host` header."""

HTTP_PORT: Final = 80
"""Port of HTTP, which clients leave out of the header `Host`."""


def own_address(end: socket.socket) -> str:
    """Return a socket's own address and port, in the form of the header `Host`."""
    host, port = end.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class ClientReply:
    """Sends the answer to one request; a keep-alive is never sent in the middle of a piece."""

    def __init__(self, client: HttpClient, front: Front, exchange: str) -> None:
        self.has_content = False
        self.on_first: Callable[[], None] | None = None
        """Called before the first piece is sent; None calls nothing."""
        self.status: int | None = None
        """HTTP status of the answer; None until its head is made."""
        self._head: tuple[h11.Event, ...] = ()
        """The head, until it is sent in one write with the first bytes after it."""
        self.copy = bytearray()
        self._client, self.front, self.id = client, front, exchange
        self.is_recorded = False
        """True if the record has the exchange, so that the client gets its id."""
        self.copy_max = 0
        """Maximum bytes of the answer to keep in `copy`; 0 keeps none."""
        self._expected: Headers | None = None
        self._lock = anyio.Lock()
        self._last = time.monotonic()

    def expect(self, headers: Headers) -> None:
        """Set the headers of a stream, so that a keep-alive can send them before the first piece."""
        self._expected = headers

    async def begin(self, status: int, headers: Headers) -> None:
        """Make the head, unless there is one; it is sent together with the first bytes after it."""
        async with self._lock:
            self._begin(status, headers)

    def _begin(self, status: int, headers: Headers) -> None:
        if self.status is not None:
            return
        self.status = status
        own = [(self.front.id_header, self.id)]
        own += [("x-backplane-exchange", self.id)] if self.is_recorded else []
        names = {name for name, _ in headers}
        fields = [*headers, *(field for field in own if field[0] not in names), ("cache-control", "no-store")]
        if "content-type" not in names:
            fields.append(("content-type", "application/json"))
        self._head = (h11.Response(status_code=status, headers=fields),)

    async def _send(self, event: h11.Event) -> None:
        head, self._head = self._head, ()
        await self._client.send(*head, event)

    async def piece(self, data: bytes) -> None:
        """Send a piece of the answer."""
        async with self._lock:
            if self.on_first is not None and not self.has_content:
                self.on_first()
            self.has_content = True
            self._last = time.monotonic()
            self.copy += data[: max(self.copy_max - len(self.copy), 0)]
            await self._send(h11.Data(data=data))

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send an answer whose whole body is known."""
        await self.begin(status, [*headers, ("content-length", str(len(body)))])
        await self.piece(body)

    async def end(self) -> None:
        """Send the end of the answer, if it has a head."""
        if self.status is not None:
            await self._send(h11.EndOfMessage())

    async def keep_alive(self) -> None:
        """Send a keep-alive after each `PING_S` without a byte, until cancelled."""
        while True:
            wait = self._last + PING_S - time.monotonic()
            if wait > 0:
                await anyio.sleep(wait)
                continue
            async with self._lock:
                self._last = time.monotonic()
                if self._expected is not None:
                    self._begin(200, self._expected)
                    await self._send(h11.Data(data=self.front.ping))

    async def fail(self, status: int, code: str, message: str, headers: Sequence[tuple[str, str]] = ()) -> None:
        """Send an error: as the answer, or inside a stream that has only its head. Do nothing after the first piece."""
        body = encode(self.front.error(status, code, message, self.id))
        if self.status is None:
            await self.whole(status, [*headers], body)
        elif not self.has_content:
            await self.piece(self.front.stream_error(code, message, body))


UserT = TypeVar("UserT")


class Entry(Protocol):
    """The record of one exchange."""

    is_recorded: bool
    """False if the exchange is not in the gateway's record."""
    copy_max: int
    """Maximum bytes of the answer that it keeps; 0 keeps none."""

    def reached(self, work: Work) -> None:
        """Record that the first piece of a stream is about to be sent to the client."""
        ...

    def end(
        self, work: Work, reply: ClientReply, error: BackplaneError | None, *, is_left: bool, is_over: bool
    ) -> None:
        """Record the exchange's end.

        Args:
            error: the error that ended it; None without one.
            is_left: True if the client has closed the connection.
            is_over: False if the gateway ends before the exchange.
        """
        ...


class Keeper(Protocol[UserT]):
    """Decides which users may ask which models, and keeps the record of exchanges."""

    def admit(self, key: str | None) -> UserT:
        """Return the user with a key (None if no key came). Raises BackplaneError."""
        ...

    def owner(self, user: UserT) -> str:
        """Return the name under which a user's proofs and answers are kept."""
        ...

    def models(self, user: UserT) -> list[ModelRow]:
        """Return the models to list for a user; others may be answered, too."""
        ...

    def targets(self, user: UserT, model: str) -> tuple[Answering, ...]:
        """Return the services that answer this model for a user, in the order of its route; empty if there are none."""
        ...

    def choose(self, model: str, work: Work) -> tuple[Answering, ...]:
        """Return a model's services, in the order to ask them for one request."""
        ...

    def entry(
        self, user: UserT, id: str, model: str, work: Work, body: bytes, targets: tuple[Answering, ...]
    ) -> AbstractContextManager[Entry]:
        """Begin the record of an exchange, and count it as open until the block ends. Raises BackplaneError."""
        ...

    def refuse(self, user: UserT, id: str, call: ClientCall, model: str, status: int, error: Exception) -> bool:
        """Record a request that is refused before a service is asked; return False if it is not recorded."""
        ...


class FrontServer(Generic[UserT]):
    """A server of all fronts.

    Args:
        hosts: values of the header `Host` that are accepted, beside the address that a client connected to.
        names: host names that are accepted in `Host` with any port or without one, because a proxy in front of this
            server has a port of its own.
        is_strict: refuse a request whose translation loses something.
        prefix: path that is removed from the beginning of a request's path, if it is there.
    """

    def __init__(
        self, keeper: Keeper[UserT], services: Services, hosts: frozenset[str],
        names: frozenset[str] = frozenset(), *, is_strict: bool = False, prefix: str = "",
    ) -> None:  # fmt: skip
        self._keeper, self._hosts, self._names, self._prefix = keeper, hosts, names, prefix
        self._shared = Shared(services, Proofs(), KeptStore(), Translations(), is_strict)
        self._open = 0

    async def attend(self, end: socket.socket) -> None:
        """Serve one connection."""
        await attend(end, self._answer, "invalid_request_error", lambda _: None)

    async def _answer(self, client: HttpClient, request: h11.Request) -> None:
        """Answer a request; an error has the form of its interface. Raises Refused before the interface is known."""
        headers = headers_of(request)
        host = headers.get("host", "").lower()
        host = host if _PORT.search(host) else f"{host}:{HTTP_PORT}"
        if host not in self._hosts and host != own_address(client.end) and _PORT.sub("", host) not in self._names:
            raise Refused(403, "the Host header is not this server's address; `hosts` of [gateway] allows more names")
        if "origin" in headers:
            raise Refused(403, "the gateway answers no pages in browsers")
        method, target = request.method.decode("ascii"), request.target.decode("ascii", "backslashreplace")
        reply = ClientReply(client, fronts.speaker(headers), new_id())
        try:
            call = fronts.route(method, target.removeprefix(self._prefix), headers)
            reply.front = call.front
            await self._serve(client, call, headers, reply)
        except Refused as refusal:
            # The rest of the body is read within bounds only, so the connection may have to end.
            close = [("connection", "close")] if client.has_body else []
            await reply.fail(refusal.status, "", str(refusal), close)
        except (OSError, h11.ProtocolError):
            raise
        except Exception as error:
            await _send_error(reply, unforeseen(error))
        await reply.end()

    async def _serve(
        self, client: HttpClient, call: ClientCall, headers: Mapping[str, str], reply: ClientReply
    ) -> None:
        if call.action == "hello":
            await reply.begin(200, [("content-length", "0")])
            return
        user = self._keeper.admit(fronts.given_key(headers, call.query))
        if call.action == "models":
            await self._list(call, user, reply)
        elif call.action in ("read", "delete"):
            await self._kept(call, user, reply)
        else:
            body = await read_body(client, headers)
            await self._exchange(client, call, user, body, headers, reply)

    async def _list(self, call: ClientCall, user: UserT, reply: ClientReply) -> None:
        rows = self._keeper.models(user)
        if call.model is None:
            await reply.whole(200, [], encode(call.front.models(rows)))
            return
        name = call.model.removeprefix("models/")
        row = next((one for one in rows if one.name == name), None)
        if row is None and self._keeper.targets(user, name):
            row = ModelRow(name)
        if row is None:
            raise BackendError("backend_model_not_found", f"no model {name[:200]!r} here")
        await reply.whole(200, [], encode(call.front.model(row)))

    async def _kept(self, call: ClientCall, user: UserT, reply: ClientReply) -> None:
        """Send a kept answer, or delete it here and at the service. Raises Refused: 404, this user has none."""
        key = (self._keeper.owner(user), call.response)
        row = self._shared.responses.find(key)
        if row is None:
            raise unknown_response(call.response)
        if call.action == "read":
            if "stream=true" in call.query.split("&"):
                raise Refused(400, "a kept answer comes whole; leave `stream` out")
            await reply.whole(200, [], await self._present(key, row))
            return
        if (endpoint := row.endpoint) is not None:
            url = f"{address(endpoint, '', stream=False)}/{call.response}"
            try:
                async with self._shared.services.send(
                    endpoint, url, service_headers(endpoint, stream=False), b"", "DELETE"
                ):
                    pass
            except RefusedAnswer as error:
                if error.failure.status not in (404, 405, 501):  # The service does not have the answer, or keeps none.
                    raise
        self._shared.responses.drop(key)
        await reply.whole(200, [], encode({"id": call.response, "object": "response", "deleted": True}))

    async def _present(self, key: tuple[str, str], row: KeptResponse) -> bytes:
        """Return a kept answer; if its service was still working on it, in the background, ask the service for it."""
        endpoint = row.endpoint
        if endpoint is None or msgspec.json.decode(row.response).get("status") not in ("queued", "in_progress"):
            return row.response
        url = f"{address(endpoint, '', stream=False)}/{key[1]}"
        headers = service_headers(endpoint, stream=False)
        async with self._shared.services.send(endpoint, url, headers, b"", "GET") as response:
            data = await whole_of(response)
        found = _document(data)
        if found.get("status") == "completed" and found.get("id") == key[1]:
            asked = msgspec.json.decode(row.items)
            keep_response(self._shared.responses, key[0], asked, found, row.account, endpoint)
        return data

    def _targets(self, user: UserT, model: str) -> tuple[Answering, ...]:
        """Return the services of a model, in the order of its route. Raises BackendError: there are none."""
        # The name may become a part of a service's address, so it must not lead to another path.
        is_plain = not {"", ".", ".."} & set(model.split("/")) and model.isprintable()
        targets = self._keeper.targets(user, model) if is_plain else ()
        if not targets:
            names = ", ".join(row.name for row in self._keeper.models(user)[:10])
            hint = f"there are {names}" if names else "see [gateway.models]"
            raise BackendError("backend_model_not_found", f"no model {model[:200]!r} for this key", hint=hint)
        return targets

    async def _exchange(
        self, client: HttpClient, call: ClientCall, user: UserT, body: bytes, headers: Mapping[str, str],
        reply: ClientReply,
    ) -> None:  # fmt: skip
        model = call.model or ""
        try:
            document = _document(body)
            model = _model_of(call, document)
            targets = self._targets(user, model)
            work = self._work(call, document, body, headers, targets[0], user, reply.id)
            if self._open >= OPEN_MAX:
                raise TooMany(f"the gateway has {self._open} open requests", 5)
            opened = ExitStack()
            entry = opened.enter_context(self._keeper.entry(user, reply.id, model, work, body, targets))
        except TooMany:  # A client that repeats such requests at once would fill the record.
            raise
        except (BackplaneError, Refused) as error:
            status = error.status if isinstance(error, Refused) else _status_of(error)
            reply.is_recorded = self._keeper.refuse(user, reply.id, call, model, status, error)
            raise
        with opened:
            reply.copy_max, reply.is_recorded = entry.copy_max, entry.is_recorded
            self._open += 1
            try:
                await _run(client, work, self._keeper.choose(model, work), reply, entry)
            finally:
                self._open -= 1

    def _work(
        self, call: ClientCall, document: dict[str, Any], body: bytes, headers: Mapping[str, str], first: Answering,
        user: UserT, id: str,
    ) -> Work:  # fmt: skip
        """Return the exchange for a request, before it begins. Raises Refused or TranslationError."""
        if not isinstance(first, AgentTarget):
            return Exchange(call, document, body, headers, shared=self._shared, owner=self._keeper.owner(user), id=id)
        if call.action != "generate":
            raise TranslationError("dialect_mapping_failed", "an agent only answers; it counts and embeds nothing")
        work: Work = first.work(call, document, body)
        return work


async def _run(
    client: HttpClient, work: Work, targets: tuple[Answering, ...], reply: ClientReply, entry: Entry
) -> None:
    """Answer a request, cancel it if the client closes the connection, and record its end in any case."""
    error: BackplaneError | None = None
    is_left, is_over = False, False
    if work.stream:
        reply.on_first = functools.partial(entry.reached, work)

    async def answer() -> None:
        nonlocal is_over
        pings = work.stream and work.call.form != "array"
        async with beside(*([reply.keep_alive] if pings else [])):
            await work.run(targets, reply)
            is_over = True

    try:
        await while_connected(client, answer)
        is_left = not is_over
    except OSError:  # The client's end is broken.
        is_left = True
        raise
    except Exception as fault:
        error, is_over, reply.on_first = unforeseen(fault), True, None
        # The error is sent before the record ends, because the record has the status that the client got.
        await _send_error(reply, error)
    finally:
        reply.on_first = None
        entry.end(work, reply, error, is_left=is_left, is_over=is_over)
    if is_left:
        raise ConnectionResetError("the client has gone")


async def _send_error(reply: ClientReply, error: BackplaneError) -> None:
    """Send an error; a service's refusal is sent in the service's own words.

    Raises:
        ConnectionAbortedError: a part of the answer was sent.
    """
    if reply.has_content:
        raise ConnectionAbortedError("an answer that broke off has no end") from error
    status, wait = _status_of(error), None
    if isinstance(error, UpstreamError):
        wait = error.failure.retry_after_s
        if isinstance(error, RefusedAnswer) and reply.status is None and error.body and error.failure.status == status:
            await reply.whole(status, allowed(error.headers), error.body)
            return
    elif isinstance(error, TooMany):
        wait = error.retry_after_s
    if status == 529 and reply.front is not fronts.MESSAGES:
        status = 503  # Only one vendor's clients know 529.
    headers = [("retry-after", str(max(round(wait), 1)))] if wait else []
    if error.code in _FINAL:
        headers.append(("x-should-retry", "false"))
    words = f"{error.message}; {error.hint}" if error.hint else error.message
    await reply.fail(status, error.code, words, headers)


def _status_of(error: BackplaneError) -> int:
    given = error.failure.status if isinstance(error, UpstreamError) else None
    return given if given is not None and 400 <= given < 600 else _STATUS.get(error.code, 400)


def _model_of(call: ClientCall, document: Mapping[str, Any]) -> str:
    """Return the model's name in a request. Raises TranslationError: it names none."""
    model = call.model if call.model is not None else document.get("model") or call.front.default_model
    if not isinstance(model, str) or not model:
        raise TranslationError("dialect_mapping_failed", "the request names no model")
    return model


def _document(body: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(body)
    except RecursionError as error:
        raise TranslationError("dialect_mapping_failed", "the body's JSON is nested too deep to be read") from error
    except UNREADABLE as error:
        raise TranslationError("dialect_mapping_failed", f"the body is no JSON: {str(error)[:200]}") from error
    if not isinstance(found, dict):
        raise TranslationError("dialect_mapping_failed", "the body is no JSON object")
    return found
