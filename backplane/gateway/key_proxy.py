"""A proxy that keeps a key from the agent: it replaces a placeholder in the agent's requests with the key.

It listens only on this machine's loopback, and forwards to one service only. It stores no contents, but counts the
requests for each path, and the tokens that the service reports. Answers are streamed.
"""

from __future__ import annotations

import functools
import re
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final
from urllib.parse import quote, unquote_to_bytes

import anyio
import h11
import httpx

from backplane.contract.canonical import Json
from backplane.dialects.ir import TokenCounts
from backplane.errors import DENIAL, BackendError
from backplane.gateway.doors import attend, while_connected
from backplane.process.aio import beside, visited
from backplane.sandbox.http import CONNECT_S_MAX, CONNECTIONS_MAX, IDLE_S_MAX, HttpClient, Refused, forwarded, listening
from backplane.upstream.clients import making_client
from backplane.upstream.cost import Price, read_price
from backplane.upstream.meter import NAME_CHARS_MAX, AnswerMeter, ServiceMeter, tally

HOST: Final = "127.0.0.2"
"""A loopback address other than 127.0.0.1, for which some programs bypass the network's proxy: in a limited network,
they could not reach this proxy."""

PATHS_MAX: Final = 32
"""Number of paths that the receipt names; requests for others count as `other`."""

FAILURE_CHARS_MAX: Final = 400
"""Maximum length of a failure's text in the receipt."""

DECODED_MAX: Final = 8
"""Number of times to percent-decode a path; a path that is encoded more often is refused."""

_KEY_HEADERS: Final = re.compile(rb"(?:authorization|api-?key|auth-token|subscription-key)$", re.IGNORECASE)
"""Names of headers that may carry a key. From others, such as `Origin`, a service may repeat the key in its answer."""

_SCHEMES: Final = frozenset({b"", b"bearer", b"token", b"key"})
"""Words that may precede a key in its header."""

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
        self.on_answer: Callable[[KeyUse], None] | None = None
        """Called after each answer."""
        self.lost: dict[str, int] = {}
        """Losses of translated requests and answers: code, kind and reason → number."""

    def note(self, request: h11.Request, has_key: bool) -> None:
        self.without_key += not has_key
        self.with_key -= not has_key
        self.note_path(f"{request.method.decode('ascii')} {path_of(request)}")

    def note_path(self, path: str) -> None:
        """Count a request with the placeholder, by method and path."""
        self.with_key += 1
        tally(self.paths, path[:NAME_CHARS_MAX], PATHS_MAX)

    def answered(self, answer: AnswerMeter, *, is_whole: bool) -> None:
        self.meter.end(answer, is_whole=is_whole)
        self._say()

    def took(self, model: str, counts: TokenCounts | None, price: Price | None, sent: int, made: int | None) -> None:
        """Add an answer whose counters were read elsewhere; the arguments are those of `ServiceMeter.add`."""
        self.meter.add(model, counts, price, sent, made)
        self._say()

    def _say(self) -> None:
        if self.on_answer is not None:
            self.on_answer(self)

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
        lost: dict[str, Json] = {"losses": dict(self.lost)} if self.lost else {}
        return {**counts, "paths": dict(self.paths), "answers": answers | models, **lost}


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


class KeyProxy:
    """The proxy between one run and one service.

    Attributes:
        placeholder: stands for the key in the agent's environment and requests.
        port: the port of `HOST` on which the proxy listens.

    Args:
        base_url: the service's address; only URLs below it are requested.
        use: counts the requests.
        key_in_query: replace the placeholder in the query's `key`, too.
        service: sends the requests.
    """

    def __init__(
        self, base_url: str, key: str, use: KeyUse, port: int, service: httpx.AsyncClient, *, key_in_query: bool
    ) -> None:
        self.placeholder = placeholder_for(key)
        self.host, self.port = HOST, port
        self.address = f"http://{HOST}:{port}"
        self._base, self._key, self._use, self._service = httpx.URL(base_url), key, use, service
        self._key_in_query = key_in_query

    async def attend(self, end: socket.socket) -> None:
        """Serve one connection."""
        await attend(end, self._serve, "key_proxy", lambda error: self._use.note_failure(error, self._key))

    async def _serve(self, client: HttpClient, request: h11.Request) -> None:
        """Serve one request. Raises Refused, as `_pass_on`."""
        await while_connected(client, functools.partial(self._pass_on, client, request))

    async def _pass_on(self, client: HttpClient, request: h11.Request) -> None:
        """Send a request to the service, and its answer to the client.

        Raises:
            Refused: the request is forbidden, or the service does not answer. `DENIAL` marks what a rule forbids,
                because a service could refuse it in the same words.
        """
        use, meter = self._use, self._use.meter.begin(path_of(request))
        asked = self._with_key(client, request, meter)
        if use.over is not None:
            raise Refused(403, f"{DENIAL}: {use.over}")
        try:
            answer = await self._service.send(asked, stream=True)
        except BaseException as error:
            if meter is not None and not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                use.answered(meter, is_whole=False)  # The service may have begun to answer, and bill it.
            if not isinstance(error, httpx.HTTPError):
                raise
            use.unanswered += 1
            host = self._base.netloc.decode("ascii")
            why = str(error).replace(self._key, self.placeholder) or type(error).__name__
            raise Refused(502, f"the service at {host} does not answer: {why}") from error
        try:
            await self._answer(client, answer, meter if answer.is_success else None)
        except httpx.HTTPError:
            use.unanswered += 1
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await answer.aclose()

    def _with_key(self, client: HttpClient, request: h11.Request, meter: AnswerMeter | None) -> httpx.Request:
        """Return the request for the service, and count it. Raises Refused: it is forbidden, or has no placeholder."""
        if not request.target.startswith(b"/"):
            raise Refused(400, "this is a proxy for one service: ask for a path of it")
        if request.method.upper() == b"TRACE":
            raise Refused(405, f"{DENIAL}: the answer would be the request, with its key")
        given, key = self.placeholder.encode(), self._key.encode()
        path, mark, query = request.target.partition(b"?")
        fields = query.split(b"&")
        has_key = False
        if self._key_in_query and b"key=" + given in fields:
            has_key = True
            query = b"&".join(b"key=" + quote(key).encode() if field == b"key=" + given else field for field in fields)
        # A compressed answer would be delayed by its compression, and we could not count tokens in it.
        headers = [(b"accept-encoding", b"identity")]
        for name, value in forwarded(request.headers):
            if name == b"accept-encoding":
                continue
            if _KEY_HEADERS.search(name):
                # Only alone or after its scheme: a service may repeat any other value, key included, in its error.
                scheme, _, word = value.rpartition(b" ")
                if word != given or scheme.lower() not in _SCHEMES:
                    continue
                has_key, value = True, value[: -len(word)] + key
            headers.append((name, value))
        try:
            url = self._base.copy_with(raw_path=path + mark + query)
        except httpx.InvalidURL as error:
            raise Refused(400, "the path has a #, or is over 65,536 bytes") from error
        if not self._is_below_base(url):
            raise Refused(403, f"{DENIAL}: this is a proxy for one service: ask below the path of its address")
        self._use.note(request, has_key)
        if not has_key:  # With another key, a command could send data to another person's account.
            why = "the key that stands in the environment has to come in a header that is for one"
            raise Refused(401, f"{DENIAL}: {why}")
        content = client.body() if client.has_body else None
        if content is not None and meter is not None:
            content = _read_by(meter, content)
        return httpx.Request(request.method.decode("ascii"), url, headers=headers, content=content)

    def _is_below_base(self, url: httpx.URL) -> bool:
        """Return True if a URL is below the base URL: a gateway has other services, and paths that make new keys."""
        base = self._base.path.rstrip("/")
        return f"{url.path}/".startswith(f"{base}/") and not leads_up(url.raw_path.partition(b"?")[0])

    async def _answer(self, client: HttpClient, answer: httpx.Response, meter: AnswerMeter | None) -> None:
        given, key = self.placeholder.encode(), self._key
        headers = [
            # A redirect's `location`, for example, repeats the query, which may contain the key.
            (name, value.replace(key.encode(), given).replace(quote(key).encode(), given))
            for name, value in forwarded(answer.headers.raw)
        ]
        if answer.headers.get("connection", "").lower() == "close":
            # So that Node sees the end of a connection that breaks off, as it would without this proxy, and retries.
            headers.append((b"connection", b"close"))
        reason = answer.extensions.get("reason_phrase", b"")
        await client.send(h11.Response(status_code=answer.status_code, headers=headers, reason=reason))
        is_whole = False
        try:
            async for data in answer.aiter_raw():
                if meter is not None:
                    meter.feed(data)
                await client.send(h11.Data(data=data))
            is_whole = True
        finally:
            if meter is not None:
                self._use.answered(meter, is_whole=is_whole)
        await client.send(h11.EndOfMessage())


async def _read_by(meter: AnswerMeter, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for data in body:
        meter.ask(data)
        yield data


@asynccontextmanager
async def open_key_proxy(
    base_url: str, key: str, use: KeyUse, *, key_in_query: bool = False
) -> AsyncIterator[KeyProxy]:
    """Open a key proxy, which serves requests until the block ends. The arguments are those of `KeyProxy`.

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
        times = httpx.Timeout(IDLE_S_MAX, connect=CONNECT_S_MAX, pool=None)
        with making_client():
            service = httpx.AsyncClient(timeout=times, limits=httpx.Limits(max_connections=None))
        await opened.enter_async_context(service)
        proxy = KeyProxy(base_url, key, use, door.getsockname()[1], service, key_in_query=key_in_query)
        await opened.enter_async_context(beside(functools.partial(visited, door, proxy.attend, CONNECTIONS_MAX)))
        yield proxy
