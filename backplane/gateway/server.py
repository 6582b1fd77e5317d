"""Serves fronts over HTTP/1.1 on loopback: limits of requests, keep-alives, errors in the form of each interface.

A keeper decides who may ask which model of which service, and keeps the record; one is for clients of the gateway, one
for the agent of a run.
"""

from __future__ import annotations

import functools
import select
import socket
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Final, Generic, Protocol, TypeVar

import anyio
import h11
import msgspec

from backplane.dialects.framing import UNREADABLE
from backplane.errors import BackendError, BackplaneError, ConfigError, TranslationError, unforeseen
from backplane.gateway import fronts
from backplane.gateway.clients import OPEN_MAX, TooMany
from backplane.gateway.exchange import Exchange, Headers, allowed
from backplane.gateway.frames import encode
from backplane.gateway.fronts import ClientCall, Front, ModelRow, NoSuchPath
from backplane.gateway.journal import new_id
from backplane.gateway.proofs import Proofs
from backplane.gateway.routes import AgentTarget, Answering
from backplane.gateway.service import Services
from backplane.process.aio import beside
from backplane.sandbox.http import HttpClient
from backplane.upstream.client import RefusedAnswer
from backplane.upstream.failure import UpstreamError

BODY_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bytes of a request, unpacked; one with several images in base64 has some 30 MB."""
HEAD_S_MAX: Final = 10.0
"""Seconds for a request's head, from its first byte."""
BODY_S_MAX: Final = 30.0
"""Seconds without a byte of a request's body."""
IDLE_S_MAX: Final = 300.0
"""Seconds that a connection without a request is kept."""
PING_S: Final = 10.0
"""Seconds of silence after which a stream gets a keep-alive; some clients and proxies give up after 30."""
GONE_LOOK_S: Final = 0.05
"""Seconds between two looks whether the client is still there."""
_STATUS: Final[Mapping[str, int]] = {
    "policy_denied": 403, "backend_auth_failed": 401, "backend_rate_limited": 429, "backend_model_not_found": 404,
    "backend_unavailable": 502, "stream_closed": 502, "backend_timeout": 504, "internal": 500,
    "receipt_store_failed": 503, "config_invalid": 500,
}  # fmt: skip
"""Our code → status, where no service has given one; any other code is a wrong request, 400."""


class Problem(Exception):
    """A request that is refused before its body was read: the status and the reason."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ClientReply:
    """The answer to one request; a keep-alive never comes between two halves of a piece."""

    def __init__(self, client: HttpClient, front: Front, exchange: str) -> None:
        self.has_content = False
        self.on_first: Callable[[], None] | None = None
        """Called before the first piece is sent."""
        self.status: int | None = None
        """The status of the head; None before it."""
        self._head: tuple[h11.Event, ...] = ()
        """The head until it is sent, in one write with what follows it."""
        self._client, self.front, self._id = client, front, exchange
        self._lock = anyio.Lock()
        self._last = time.monotonic()

    async def begin(self, status: int, headers: Headers) -> None:
        """Make the head, unless there is one; it goes to the client with what follows."""
        async with self._lock:
            self._begin(status, headers)

    def _begin(self, status: int, headers: Headers) -> None:
        if self.status is not None:
            return
        self.status = status
        own = [(self.front.id_header, self._id), ("x-backplane-exchange", self._id)]
        names = {name for name, _ in headers}
        fields = [*headers, *(field for field in own if field[0] not in names), ("cache-control", "no-store")]
        if not any(name == "content-type" for name, _ in fields):
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
            await self._send(h11.Data(data=data))

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send an answer with one body."""
        await self.begin(status, [*headers, ("content-length", str(len(body)))])
        await self.piece(body)

    async def end(self) -> None:
        """Send the end, if a head was sent."""
        if self.status is not None:
            await self._send(h11.EndOfMessage())

    async def keep_alive(self) -> None:
        """Send a keep-alive whenever the stream is silent, until cancelled."""
        while True:
            wait = self._last + PING_S - time.monotonic()
            if wait > 0:
                await anyio.sleep(wait)
                continue
            async with self._lock:
                self._begin(200, [("content-type", "text/event-stream")])
                await self._send(h11.Data(data=self.front.ping))
                self._last = time.monotonic()

    async def fail(self, status: int, error: BackplaneError, headers: Sequence[tuple[str, str]] = ()) -> None:
        """Send an error: as the answer, or inside a stream whose head is sent."""
        words = f"{error.message}; {error.hint}" if error.hint else error.message
        body = encode(self.front.error(status, error.code, words, self._id))
        if self.status is None:
            await self.whole(status, [*headers], body)
        elif not self.has_content:
            await self.piece(self.front.stream_error(error.code, words, body))


UserT = TypeVar("UserT")


class Entry(Protocol):
    """The record of one exchange."""

    def reached(self, work: Exchange) -> None:
        """Note that the first piece of a stream goes to the client."""
        ...

    def end(
        self, work: Exchange, status: int | None, error: BackplaneError | None, *, is_left: bool, is_over: bool
    ) -> None:
        """Note its end.

        Args:
            status: HTTP status that was sent; None before the head.
            is_left: True if the client has gone.
            is_over: False if the gateway ends before the exchange.
        """
        ...


class Keeper(Protocol[UserT]):
    """Decides who may ask what, and keeps the record."""

    def admit(self, key: str | None) -> UserT:
        """Return the user with a key. Raises BackplaneError."""
        ...

    def models(self, user: UserT) -> list[ModelRow]:
        """Return the models that a user may ask and that have a name."""
        ...

    def targets(self, user: UserT, model: str) -> tuple[Answering, ...]:
        """Return the services that answer a user's model, in order; empty if there is none."""
        ...

    def entry(
        self, user: UserT, id: str, model: str, work: Exchange, targets: tuple[Answering, ...]
    ) -> AbstractContextManager[Entry]:
        """Begin the record of an exchange, which holds a place until the block ends. Raises BackplaneError."""
        ...


class FrontServer(Generic[UserT]):
    """A server of all fronts.

    Args:
        hosts: the values of the header Host that name this server.
        is_strict: refuse a translation that loses something.
        prefix: a path that may stand before those of the fronts.
    """

    def __init__(
        self, keeper: Keeper[UserT], services: Services, hosts: frozenset[str], *, is_strict: bool = False,
        prefix: str = "",
    ) -> None:  # fmt: skip
        self._prefix = prefix
        self._keeper, self._services, self._hosts, self._is_strict = keeper, services, hosts, is_strict
        self._proofs = Proofs()
        self._open = 0

    async def attend(self, end: socket.socket) -> None:
        """Serve one connection, request by request; all its errors end here."""
        client = HttpClient(end)
        with suppress(OSError, h11.ProtocolError):
            while await self._serve_one(client, end):
                client.http.start_next_cycle()

    async def _serve_one(self, client: HttpClient, end: socket.socket) -> bool:
        """Serve one request; return True if another may follow."""
        try:
            request = await _next_request(client, end)
        except h11.RemoteProtocolError as error:
            await _plain(client, error.error_status_hint, f"this is no HTTP request: {error}")
            return False
        if request is None:
            return False
        try:
            headers = headers_of(request)
            self._check_origin(headers)
        except Problem as problem:
            await _plain(client, problem.status, str(problem))
            return False
        await self._answer(client, end, request, headers)
        return client.http.our_state is client.http.their_state is h11.DONE

    def _check_origin(self, headers: Mapping[str, str]) -> None:
        """Refuse what a page in a browser may have sent. Raises Problem."""
        if headers.get("host", "").lower() not in self._hosts:
            raise Problem(403, "the Host header is not this server's address")
        if "origin" in headers:
            raise Problem(403, "the gateway answers no pages in browsers")

    async def _answer(
        self, client: HttpClient, end: socket.socket, request: h11.Request, headers: Mapping[str, str]
    ) -> None:
        method, target = request.method.decode("ascii"), request.target.decode("ascii", "backslashreplace")
        exchange = new_id()
        try:
            call = fronts.route(method, target.removeprefix(self._prefix), headers)
        except NoSuchPath as error:
            reply = ClientReply(client, error.front, exchange)
            await reply.fail(error.status, ConfigError("config_invalid", str(error)))
            await reply.end()
            return
        reply = ClientReply(client, call.front, exchange)
        try:
            await self._serve_call(client, end, call, headers, reply, exchange)
        except Problem as problem:
            await reply.fail(problem.status, TranslationError("dialect_mapping_failed", str(problem)))
            await reply.end()
            raise h11.LocalProtocolError("the rest of the request is not read") from problem
        except RefusedAnswer as error:
            await self._refuse(reply, error)
        except (OSError, h11.ProtocolError):
            raise
        except Exception as error:
            if reply.has_content:
                raise ConnectionAbortedError("an answer that broke off has no end") from error
            await self._fail(reply, unforeseen(error))
        await reply.end()

    async def _refuse(self, reply: ClientReply, error: RefusedAnswer) -> None:
        """Send a service's refusal in its own words."""
        if reply.status is None and error.body and error.failure.status is not None and error.failure.status >= 400:
            await reply.whole(error.failure.status, allowed(error.headers), error.body)
        else:
            await self._fail(reply, error)

    async def _fail(self, reply: ClientReply, error: BackplaneError) -> None:
        status = _STATUS.get(error.code, 400)
        headers: Headers = []
        wait: float | None = None
        if isinstance(error, UpstreamError):
            given = error.failure.status
            status = given if given is not None and 400 <= given < 600 else status
            wait = error.failure.retry_after_s
        elif isinstance(error, TooMany):
            wait = error.retry_after_s
        if wait is not None:
            headers = [("retry-after", str(max(round(wait), 1)))]
        if status == 529 and reply.front is not fronts.MESSAGES:
            status = 503  # Only one vendor's clients know 529.
        await reply.fail(status, error, headers)

    async def _serve_call(
        self, client: HttpClient, end: socket.socket, call: ClientCall, headers: Mapping[str, str], reply: ClientReply,
        exchange: str,
    ) -> None:  # fmt: skip
        if call.action == "hello":
            await reply.begin(200, [("content-length", "0")])
            return
        user = self._keeper.admit(fronts.given_key(headers, call.query))
        if call.action == "models":
            await self._list(call, user, reply)
            return
        body = await read_body(client, headers)
        document = _document(body)
        if call.action == "count":
            await reply.whole(200, [("x-backplane-estimate", "1")], encode(_count(call, len(body))))
            return
        await self._exchange(client, end, call, user, document, body, headers, reply, exchange)

    async def _list(self, call: ClientCall, user: UserT, reply: ClientReply) -> None:
        rows = self._keeper.models(user)
        if call.model is None:
            await reply.whole(200, [], encode(call.front.models(rows)))
            return
        name = call.model.removeprefix("models/")
        row = next((one for one in rows if one.name == name), None)
        if row is None and self._keeper.targets(user, name):
            row = fronts.ModelRow(name)
        if row is None:
            raise BackendError("backend_model_not_found", f"no model {name[:200]!r} here")
        await reply.whole(200, [], encode(call.front.model(row)))

    def _targets(self, call: ClientCall, user: UserT, document: Mapping[str, Any]) -> tuple[str, tuple[Answering, ...]]:
        """Return the model that is asked and its services. Raises BackplaneError."""
        model = call.model if call.model is not None else document.get("model")
        if not isinstance(model, str) or not model:
            raise TranslationError("dialect_mapping_failed", "the request names no model")
        # A name may stand in the path of a service's address, so it cannot lead out of there.
        is_plain = not {"", ".", ".."} & set(model.split("/")) and model.isprintable()
        targets = self._keeper.targets(user, model) if is_plain else ()
        if not targets:
            names = ", ".join(row.name for row in self._keeper.models(user)[:10])
            hint = f"there are {names}" if names else "see [gateway.models]"
            raise BackendError("backend_model_not_found", f"no model {model[:200]!r} for this key", hint=hint)
        return model, targets

    async def _exchange(
        self, client: HttpClient, end: socket.socket, call: ClientCall, user: UserT, document: dict[str, Any],
        body: bytes, headers: Mapping[str, str], reply: ClientReply, id: str,
    ) -> None:  # fmt: skip
        model, targets = self._targets(call, user, document)
        if self._open >= OPEN_MAX:
            raise TooMany(f"the gateway has {self._open} open requests", 5)
        if isinstance(targets[0], AgentTarget):
            work: Any = targets[0].work(call, document, body)
        else:
            work = Exchange(
                call, document, body, headers, services=self._services, proofs=self._proofs,
                is_strict=self._is_strict, owner=getattr(user, "name", ""),
            )  # fmt: skip
        with self._keeper.entry(user, id, model, work, targets) as entry:
            self._open += 1
            try:
                await self._run(client, end, work, targets, reply, entry)
            finally:
                self._open -= 1

    async def _run(
        self, client: HttpClient, end: socket.socket, work: Any, targets: tuple[Answering, ...],
        reply: ClientReply, entry: Entry,
    ) -> None:  # fmt: skip
        """Answer, and stop the service if the client goes away; write the end in any case."""
        error: BackplaneError | None = None
        is_left, is_over = False, False
        if work.stream:
            reply.on_first = functools.partial(entry.reached, work)

        async def end_with_client() -> None:
            nonlocal is_left
            await _gone(end)
            is_left = True
            scope.cancel()  # Otherwise the model would go on.

        try:
            with anyio.CancelScope() as scope:
                pings = work.stream and not work.call.as_array
                async with beside(end_with_client, *([reply.keep_alive] if pings else [])):
                    await work.run(targets, reply)
            is_over = True
        except BackplaneError as failed:
            error, is_over = failed, True
            raise
        except OSError:  # The client's end is broken.
            is_left = True
            raise
        except Exception as fault:
            error, is_over = unforeseen(fault), True
            raise
        finally:
            entry.end(work, reply.status, error, is_left=is_left, is_over=is_over)
        if is_left:
            raise ConnectionResetError("the client has gone")


# HTTP -----------------------------------------------------------------------------------------------------------------


async def _gone(end: socket.socket) -> None:
    """Wait until the client has closed its connection, whether it has sent more requests or not."""
    poll = select.poll()
    poll.register(end, select.POLLRDHUP)
    while not poll.poll(0):
        await anyio.sleep(GONE_LOOK_S)


async def _next_request(client: HttpClient, end: socket.socket) -> h11.Request | None:
    """Return the next request; None if none comes in time."""
    if not client.http.trailing_data[0]:
        with anyio.move_on_after(IDLE_S_MAX) as idle:
            await anyio.wait_readable(end)
        if idle.cancelled_caught:
            return None
    with anyio.move_on_after(HEAD_S_MAX):
        return await client.request()
    await _plain(client, 408, f"the head of the request did not come within {HEAD_S_MAX:g} s")
    return None


def headers_of(request: h11.Request) -> dict[str, str]:
    """Return the headers by names in lower case. Raises Problem if two of them contradict each other."""
    found: dict[str, str] = {}
    for name, value in request.headers:
        key = name.decode("ascii").lower()
        if key in found and key in ("host", "content-length", "transfer-encoding", "authorization"):
            raise Problem(400, f"the request has two headers {key}")
        found[key] = value.decode("latin-1")
    if "content-length" in found and "transfer-encoding" in found:
        raise Problem(400, "the request has two lengths")
    return found


async def _plain(client: HttpClient, status: int, message: str) -> None:
    """Answer with an error, the last answer of the connection."""
    body = encode({"error": {"message": message, "type": "invalid_request_error", "code": status}})
    head = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
    with anyio.move_on_after(HEAD_S_MAX), suppress(h11.LocalProtocolError):
        await client.send(h11.Response(status_code=status, headers=head), h11.Data(data=body), h11.EndOfMessage())


async def read_body(client: HttpClient, headers: Mapping[str, str]) -> bytes:
    """Return the body of a request, unpacked. Raises Problem: 408, 413, 415."""
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", "gzip", "deflate", ""):
        raise Problem(415, f"bodies packed as {coding[:40]!r} are not read; send gzip, or none")
    if int(headers.get("content-length") or 0) > BODY_BYTES_MAX:
        raise Problem(413, f"the request is over {BODY_BYTES_MAX} bytes")
    parts: list[bytes] = []
    size, pieces = 0, client.body()
    while True:
        data = None
        with anyio.move_on_after(BODY_S_MAX) as late:
            data = await anext(pieces, None)
        if late.cancelled_caught:
            raise Problem(408, f"the request sent nothing for {BODY_S_MAX:g} s")
        if data is None:
            break
        size += len(data)
        if size > BODY_BYTES_MAX:
            raise Problem(413, f"the request is over {BODY_BYTES_MAX} bytes")
        parts.append(data)
    body = b"".join(parts)
    return body if coding in ("identity", "") else unpacked(body)


def unpacked(body: bytes) -> bytes:
    """Unpack a body, no further than its limit. Raises Problem."""
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    try:
        out = unpacker.decompress(body, BODY_BYTES_MAX + 1)
    except zlib.error as error:
        raise Problem(400, f"the body cannot be unpacked: {error}") from error
    if len(out) > BODY_BYTES_MAX:
        raise Problem(413, f"the request is over {BODY_BYTES_MAX} bytes when it is unpacked")
    if not unpacker.eof:
        raise Problem(400, "the packed body is cut")
    return out


def _document(body: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(body)
    except UNREADABLE as error:
        raise TranslationError("dialect_mapping_failed", f"the body is no JSON: {str(error)[:200]}") from error
    if not isinstance(found, dict):
        raise TranslationError("dialect_mapping_failed", "the body is no JSON object")
    return found


COUNT_BYTES: Final = 4
"""Bytes of a request for each token of an estimated count."""


def _count(call: ClientCall, size: int) -> dict[str, Any]:
    """Estimate the tokens of a request, in the words of its interface; a header names it an estimate."""
    tokens = -(-size // COUNT_BYTES)
    return {"totalTokens": tokens} if call.front is fronts.GEMINI else {"input_tokens": tokens}
