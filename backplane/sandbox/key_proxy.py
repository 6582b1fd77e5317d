"""A proxy that keeps a key from the agent: it replaces a placeholder in the agent's requests with the key.

It listens only on this machine's loopback, and forwards to one service only. It stores no contents, but counts the
requests for each path, and the tokens that the service reports. Answers are streamed.
"""

from __future__ import annotations

import functools
import re
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Final
from urllib.parse import quote, unquote_to_bytes, urlsplit

import anyio
import h11
import httpx
import msgspec

from backplane.contract.canonical import Json
from backplane.contract.receipt import Usage
from backplane.errors import DENIAL, BackendError
from backplane.process.aio import beside, listening, receive, send, visited
from backplane.sandbox.proxy import CHUNK_BYTES, CONNECT_S_MAX, DROPPED_HEADERS, HEAD_BYTES_MAX, IDLE_S_MAX
from backplane.upstream.clients import making_client
from backplane.upstream.cost import read_price
from backplane.upstream.meter import NAME_CHARS_MAX, AnswerMeter, ServiceMeter, tally

HOST: Final = "127.0.0.2"
"""A loopback address other than 127.0.0.1, for which some programs bypass the network's proxy: in a limited network,
they could not reach this proxy."""
CONNECTIONS_MAX: Final = 64
"""Limit of open connections; further ones wait. An agent with helpers of its own opens about five."""
PATHS_MAX: Final = 32
"""Number of paths that the receipt names; requests for others count as `other`."""

FAILURE_CHARS_MAX: Final = 400
"""Maximum length of a failure's text in the receipt."""

DECODED_MAX: Final = 8
"""Number of times to percent-decode a path; a path that is encoded more often is refused."""

_OF_ONE_CONNECTION: Final = frozenset({*DROPPED_HEADERS, b"trailer", b"transfer-encoding", b"host"})
"""Headers that are not forwarded, because each connection has its own."""

_KEY_HEADERS: Final = re.compile(rb"(?:authorization|api-?key|auth-token|subscription-key)$", re.IGNORECASE)
"""Names of headers that may carry a key. From others, such as `Origin`, a service may repeat the key in its answer."""

_SCHEMES: Final = frozenset({b"", b"bearer", b"token", b"key"})
"""Words that may precede a key in its header."""

_LENGTHS: Final = frozenset({b"content-length", b"transfer-encoding"})
"""Headers of which a request with a body has at least one."""

_LOOKS: Final = re.compile(r"sk-ant-(?:[a-z]+\d+-)?|sk-proj-|sk-|AIza|xai-|gsk_")
"""Prefixes of known services' keys; some programs check them."""


class KeyUse:
    """Counts the requests of one run to its service.

    Args:
        prices: the configured prices of the service's model; None if not configured.
    """

    def __init__(self, prices: dict[str, Any] | None = None) -> None:
        self.paths: dict[str, int] = {}
        self.with_key = 0
        self.without_key = 0
        """Requests without the placeholder, which were refused."""
        self.unanswered = 0
        """Requests that the service did not answer, or not completely."""
        self.failed = 0
        """Connections that ended with an error of this proxy; `failure` describes the first one."""
        self.failure = ""
        self.meter = ServiceMeter(None if prices is None else read_price(prices, "options.prices"))
        self.over: str | None = None
        """Why further requests are refused, such as a used-up budget; None while they are allowed."""
        self.on_answer: Callable[[Usage], None] | None = None
        """Called with the total usage after each answer."""

    def note(self, request: h11.Request, has_key: bool) -> None:
        self.with_key += has_key
        self.without_key += not has_key
        tally(self.paths, f"{request.method.decode('ascii')} {path_of(request)[:NAME_CHARS_MAX]}", PATHS_MAX)

    def answered(self, answer: AnswerMeter, *, is_whole: bool) -> None:
        self.meter.end(answer, is_whole=is_whole)
        if self.on_answer is not None:
            self.on_answer(self.meter.spent.usage())

    def note_failure(self, error: Exception, key: str) -> None:
        self.failed += 1
        self.failure = self.failure or f"{type(error).__name__}: {error}".replace(key, "[key]")[:FAILURE_CHARS_MAX]

    def to_wire(self) -> dict[str, Json]:
        counts: dict[str, Json] = {
            "with_key": self.with_key,
            "without_key": self.without_key,
            "unanswered": self.unanswered,
        }
        if self.failed:
            counts |= {"failed": self.failed, "failure": self.failure}
        answers = {"counted": self.meter.spent.requests, "uncounted": self.meter.uncounted}
        models: dict[str, Json] = {"models": dict(self.meter.models)} if self.meter.models else {}
        return {**counts, "paths": dict(self.paths), "answers": answers | models}


def path_of(request: h11.Request) -> str:
    return request.target.partition(b"?")[0].decode("ascii", "backslashreplace")


def leads_up(path: bytes) -> bool:
    """Return True if any server may find a step to the parent folder in a path, in whatever encoding."""
    for _ in range(DECODED_MAX):
        try:
            text = path.decode()
        except UnicodeDecodeError:
            return True
        # Java servers read `..;x` as `..`, Windows servers `\\` as `/`; some end a name at a control character.
        steps = (step.partition(";")[0].strip() for step in re.split(r"[/\\]", text))
        if any(step in (".", "..") for step in steps) or any(ord(char) < 32 for char in text):
            return True
        if (decoded := unquote_to_bytes(path)) == path:
            return False
        path = decoded
    return True


def placeholder_for(key: str) -> str:
    """Make an unguessable stand-in for a key, which keeps the key's prefix if that is of a known service."""
    looks = _LOOKS.match(key)
    return f"{looks[0] if looks else ''}{secrets.token_hex(24)}"


class KeyProxy(msgspec.Struct, frozen=True, kw_only=True):
    """The proxy between one run and one service."""

    base_url: str
    key: str
    key_in_query: bool
    placeholder: str
    use: KeyUse
    door: socket.socket
    """The listening socket."""

    @property
    def host(self) -> str:
        return HOST

    @property
    def port(self) -> int:
        port: int = self.door.getsockname()[1]
        return port

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.port}"


@asynccontextmanager
async def open_key_proxy(
    base_url: str, key: str, use: KeyUse, *, key_in_query: bool = False
) -> AsyncIterator[KeyProxy]:
    """Open a key proxy, which serves requests until the block ends.

    Args:
        base_url: the service's address; only URLs below it are requested.
        key: replaces the placeholder in headers that may carry a key.
        use: counts the requests.
        key_in_query: replace the placeholder in the query's `key`, too.

    Raises:
        BackendError: `backend_unavailable`, the proxy cannot listen on `HOST`.
        ConfigError: `config_invalid`, this machine's certificates cannot be read, or its proxy setting is invalid.
    """
    async with AsyncExitStack() as opened:
        try:
            door = opened.enter_context(listening(HOST))
        except OSError as error:
            fact = f"the key proxy cannot listen on {HOST}: {error.strerror}"
            raise BackendError("backend_unavailable", fact, hint="leave key_proxy out") from error
        placeholder = placeholder_for(key)
        proxy = KeyProxy(
            base_url=base_url, key=key, key_in_query=key_in_query, placeholder=placeholder, use=use, door=door
        )

        times = httpx.Timeout(IDLE_S_MAX, connect=CONNECT_S_MAX, pool=None)
        with making_client():
            client = httpx.AsyncClient(timeout=times, limits=httpx.Limits(max_connections=None))
        await opened.enter_async_context(client)

        async def attend(visitor: socket.socket) -> None:
            await _Visit(proxy, client, visitor).attend()

        await opened.enter_async_context(beside(functools.partial(visited, door, attend, CONNECTIONS_MAX)))
        yield proxy


class _Visit:
    """Serves one connection, request by request."""

    def __init__(self, proxy: KeyProxy, client: httpx.AsyncClient, visitor: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._visitor = visitor
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._heard = anyio.Event()
        """Set once the whole request has been read."""

    async def attend(self) -> None:
        # An incomplete answer can only end by closing the connection. All errors end here, so that an error of one
        # connection ends neither the others nor the run.
        try:
            while await self._one_request():
                self._http.start_next_cycle()
        except (OSError, h11.ProtocolError, httpx.HTTPError):
            return
        except Exception as error:
            self._proxy.use.note_failure(error, self._proxy.key)

    async def _one_request(self) -> bool:
        """Serve one request; return True if another may follow."""
        request = None
        with anyio.move_on_after(IDLE_S_MAX):
            request = await self._next_event()
        if not isinstance(request, h11.Request):
            return False
        self._heard = anyio.Event()
        with anyio.CancelScope() as scope:
            async with beside(functools.partial(self._watch, scope)):
                await self._pass_on(request)
        return self._http.our_state is self._http.their_state is h11.DONE

    async def _pass_on(self, request: h11.Request) -> None:
        if not request.target.startswith(b"/"):
            await self._refuse(400, "this is a proxy for one service: ask for a path of it")
            return
        if not _LENGTHS & {name for name, _ in request.headers}:
            await self._next_event()
            self._heard.set()
        if request.method.upper() == b"TRACE":
            await self._deny(405, "the answer would be the request, with its key")
            return
        use = self._proxy.use
        try:
            asked, has_key = self._with_key(request)
        except httpx.InvalidURL:
            await self._refuse(400, "the path has a #, or is over 65,536 bytes")
            return
        if not self._is_below_base(asked.url):
            await self._deny(403, "this is a proxy for one service: ask below the path of its address")
            return
        use.note(request, has_key)
        if not has_key:  # With another key, a command could send data to another person's account.
            await self._deny(401, "the key that stands in the environment has to come in a header that is for one")
            return
        if use.over is not None:
            await self._deny(403, use.over)
            return
        try:
            answer = await self._client.send(asked, stream=True)
        except httpx.HTTPError as error:
            use.unanswered += 1
            host = urlsplit(self._proxy.base_url).netloc.rpartition("@")[2]
            why = str(error).replace(self._proxy.key, self._proxy.placeholder) or type(error).__name__
            await self._refuse(502, f"the service at {host} does not answer: {why}")
            return
        try:
            meter = use.meter.begin(path_of(request)) if answer.is_success else None
            await self._answer(answer, meter)
        except httpx.HTTPError:
            use.unanswered += 1
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await answer.aclose()

    def _with_key(self, request: h11.Request) -> tuple[httpx.Request, bool]:
        """Return the request for the service, and True if it contains the key. Raises httpx.InvalidURL."""
        given, key = self._proxy.placeholder.encode(), self._proxy.key.encode()
        path, mark, query = request.target.partition(b"?")
        fields = query.split(b"&")
        has_key = False
        if self._proxy.key_in_query and b"key=" + given in fields:
            has_key = True
            query = b"&".join(b"key=" + quote(key).encode() if field == b"key=" + given else field for field in fields)
        headers: list[tuple[bytes, bytes]] = []
        for name, value in _passed_on(request.headers):
            if name == b"accept-encoding":
                continue
            if _KEY_HEADERS.search(name):
                # Only alone or after its scheme: a service may repeat any other value, key included, in its error.
                scheme, _, word = value.rpartition(b" ")
                if word != given or scheme.lower() not in _SCHEMES:
                    continue
                has_key, value = True, value[: -len(word)] + key
            headers.append((name, value))
        # A compressed answer would be delayed by its compression, and we could not count tokens in it.
        headers.append((b"accept-encoding", b"identity"))
        url = httpx.URL(self._proxy.base_url).copy_with(raw_path=path + mark + query)
        body = None if self._heard.is_set() else self._body()
        return httpx.Request(request.method.decode("ascii"), url, headers=headers, content=body), has_key

    def _is_below_base(self, url: httpx.URL) -> bool:
        """Return True if a URL is below the base URL: a gateway has other services, and paths that make new keys."""
        base = httpx.URL(self._proxy.base_url).path.rstrip("/")
        return f"{url.path}/".startswith(f"{base}/") and not leads_up(url.raw_path.partition(b"?")[0])

    def _without_key(self, value: bytes) -> bytes:
        given, key = self._proxy.placeholder.encode(), self._proxy.key
        return value.replace(key.encode(), given).replace(quote(key).encode(), given)

    async def _answer(self, answer: httpx.Response, meter: AnswerMeter | None) -> None:
        reason = answer.extensions.get("reason_phrase", b"")
        # The location of a redirect, for example, repeats the query.
        headers = [(name, self._without_key(value)) for name, value in _passed_on(answer.headers.raw)]
        if answer.headers.get("connection", "").lower() == "close":
            # So that Node sees the end of a connection that breaks off, as it would without this proxy, and retries.
            headers.append((b"connection", b"close"))
        await self._say(h11.Response(status_code=answer.status_code, headers=headers, reason=reason))
        is_whole = False
        try:
            async for data in answer.aiter_raw():
                if meter is not None:
                    meter.feed(data)
                await self._say(h11.Data(data=data))
            is_whole = True
        finally:
            if meter is not None:
                self._proxy.use.answered(meter, is_whole=is_whole)
        await self._say(h11.EndOfMessage())

    async def _deny(self, status: int, rule: str) -> None:
        """Refuse a forbidden request, in words that differ from a refusal by the service."""
        await self._refuse(status, f"{DENIAL}: {rule}")

    async def _refuse(self, status: int, fact: str) -> None:
        async for _ in self._body():  # A client that is cut off while it sends does not read the answer.
            pass
        body = msgspec.json.encode({"error": {"type": "key_proxy", "message": fact}})
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        await self._say(h11.Response(status_code=status, headers=headers))
        await self._say(h11.Data(data=body))
        await self._say(h11.EndOfMessage())

    async def _body(self) -> AsyncIterator[bytes]:
        while not self._heard.is_set():
            event = await self._next_event()
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            else:
                self._heard.set()

    async def _watch(self, request: anyio.CancelScope) -> None:
        """Cancel a request whose client has gone, so that the model does not go on."""
        await self._heard.wait()
        with suppress(OSError):
            while len(self._http.trailing_data[0]) < HEAD_BYTES_MAX:
                data = await receive(self._visitor, CHUNK_BYTES)
                if not data:
                    break
                self._http.receive_data(data)  # Data of the next requests, which the loop limits.
            else:
                return
        request.cancel()

    async def _next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                await self._say(h11.InformationalResponse(status_code=100, headers=[]))
            self._http.receive_data(await receive(self._visitor, CHUNK_BYTES))
        return event

    async def _say(self, event: h11.Event) -> None:
        if data := self._http.send(event):
            await send(self._visitor, data)


def _passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    return ((name, value) for name, value in headers if name.lower() not in _OF_ONE_CONNECTION)
