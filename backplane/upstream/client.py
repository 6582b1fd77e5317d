"""Sends requests to a model's service and reads the documents of its answers, over reused connections.

`answer_to` sends bytes and returns a successful answer, `Upstream` sends a vendor's JSON, and `ReplyStream` reads the
answer's documents. `ladder` decides what to send next, and a dialect interprets the documents.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
import httpx
import msgspec

from backplane.contract.canonical import Json
from backplane.dialects import framing
from backplane.errors import DENIAL, TranslationError
from backplane.upstream.baseurl import moved_base
from backplane.upstream.clients import making_client
from backplane.upstream.endpoint import CONNECT_S, Endpoint, address, body_of, cut_urls, headers_of, model_of
from backplane.upstream.failure import PAGE, UpstreamError, UpstreamFailure, clean, failure_of
from backplane.upstream.lean import LeanClient

CONNECTIONS_MAX: Final = 32
"""Most connections at once, as many as runs at once by default; further requests wait."""

KEPT_S: Final = 60.0
"""Seconds that an unused connection is kept; most servers close it after about as long."""

ERROR_BYTES_MAX: Final = 64 * 1024
"""Most bytes that are read of a refusal's body; the longest known ones are HTML pages."""

ANSWER_BYTES_MAX: Final = 256 * 1024 * 1024
"""Most bytes of an answer, a longer one fails; images in Base64 have some 30 MB."""

HEAD_BYTES_MAX: Final = 2_000
"""Most bytes kept of an answer without a document, to show them in the error."""

TAIL_S: Final = 5.0
"""Seconds to wait for counters and the last document after the answer's end."""

DRAIN_S: Final = 0.2
"""Seconds to read on to the end of the body, so that the connection can be used again."""

CLOSE_S: Final = 1.0
"""Seconds to close a connection that is not used again."""

IDLE_KINDS: Final = frozenset({"ping", "keepalive", "response.keepalive"})
"""Types of documents without content."""

FOREIGN: Final = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, UnicodeEncodeError)
"""Exceptions that the HTTP library raises; the last one is for a header's letters."""

_encode: Final = msgspec.json.Encoder().encode


class ReplyStream:
    """One answer: iterate over its documents as they come.

    Comments and pings are no progress: an answer without a document for `timeout_s` has failed.

    Raises, while iterating:
        UpstreamError: `backend_timeout`, nothing came in time; `stream_closed`, the answer was cut;
            `dialect_mapping_failed`, it has no document or is too long.
        httpx.HTTPError: the connection broke.
    """

    def __init__(self, response: httpx.Response, endpoint: Endpoint) -> None:
        self.status = response.status_code
        self.media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        self.framing = framing.Detecting()
        self.head = b""
        self.found = 0
        """Number of documents so far."""
        self._endpoint = endpoint
        self._pieces = response.aiter_bytes()
        self._end_by: float | None = None
        self._size = 0
        self._documents = self._read()

    def expect_end(self) -> None:
        """Limit the wait for the rest of the answer, which may be missing, to `TAIL_S` from now on."""
        if self._end_by is None:
            self._end_by = anyio.current_time() + TAIL_S

    def __aiter__(self) -> AsyncIterator[Json]:
        return self._documents

    async def _read(self) -> AsyncGenerator[Json, None]:
        last_s = anyio.current_time()
        while not self.framing.is_done and (data := await self._next()) is not None:
            documents = self._take(data)
            if any(map(_is_progress, documents)):
                last_s = anyio.current_time()
            elif self._end_by is None and anyio.current_time() > last_s + self._endpoint.timeout_s:
                raise UpstreamError(translated(httpx.ReadTimeout(""), self._endpoint))
            for document in documents:
                yield document
        skipped, rest = self._skipped, self.framing.finish()
        self.found += len(rest)
        # A body without a length can be cut unseen, but half a document shows it.
        if self._skipped > skipped and self._end_by is None:
            raise UpstreamError(self._failure("stream_closed", "the answer ends in the middle of a document", None))
        for document in rest:
            yield document
        if not self.found:
            raise UpstreamError(self.nothing())

    async def _next(self) -> bytes | None:
        """Return the next piece of the body; None at its end, or when the time to wait for the rest is over."""
        if self._end_by is None:
            return await anext(self._pieces, None)
        with anyio.CancelScope(deadline=self._end_by), suppress(*FOREIGN):
            return await anext(self._pieces, None)
        return None

    def _take(self, data: bytes) -> list[Json]:
        self._size += len(data)
        if not self.found and len(self.head) < HEAD_BYTES_MAX:
            self.head += data[: HEAD_BYTES_MAX - len(self.head)]
        try:
            if self._size > ANSWER_BYTES_MAX:
                raise TranslationError("dialect_mapping_failed", f"the answer is over {ANSWER_BYTES_MAX} bytes")
            documents = self.framing.feed(data)
        except TranslationError as error:
            raise UpstreamError(self._failure(error.code, error.message, None)) from error
        self.found += len(documents)
        return documents

    @property
    def is_whole(self) -> bool:
        """True if the body has its end: `[DONE]`, the end of an array, or that of a single JSON document."""
        inner = self.framing.inner
        return (inner is not None and inner.done) or (self.found == 1 and self.media_type == "application/json")

    @property
    def _skipped(self) -> int:
        return self.framing.inner.skipped if self.framing.inner is not None else 0

    def nothing(self) -> UpstreamFailure:
        """Return the failure for an answer without any document of the protocol."""
        if self.head.strip() and self.media_type == "text/event-stream":
            return self._failure("stream_closed", "the answer was cut before its first document", None)
        words = " ".join(self.head.decode("utf-8", "replace").split())
        what = f"{self.media_type or 'no content type'}: {words[:200]}" if words else "an empty body"
        hint = PAGE if self.media_type == "text/html" or words[:1] == "<" else "check base_url"
        return self._failure("dialect_mapping_failed", f"the answer holds nothing of the protocol, but {what}", hint)

    def _failure(self, code: str, message: str, hint: str | None) -> UpstreamFailure:
        return UpstreamFailure(
            code=code, message=clean(message, self._endpoint.key), status=self.status, hint=hint,
            may_pass=code == "stream_closed",
        )  # fmt: skip

    async def aclose(self) -> None:
        await self._documents.aclose()

    async def drain(self) -> None:
        """Read on to the end of the body if it is near, so that the connection can be used again."""
        with anyio.move_on_after(DRAIN_S), suppress(*FOREIGN):  # A failed connection is closed.
            while self._size <= ANSWER_BYTES_MAX and (data := await anext(self._pieces, None)) is not None:
                self._size += len(data)


def _is_progress(document: Json) -> bool:
    return not (isinstance(document, dict) and document.get("type") in IDLE_KINDS)


class Upstream:
    """Connections to one endpoint; `async with` closes them.

    Raises:
        ConfigError: `config_invalid`, no client can be made for the endpoint.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._client: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Upstream:
        limits = httpx.Limits(max_connections=CONNECTIONS_MAX, keepalive_expiry=KEPT_S)
        self._client = client_of(self.endpoint, limits)
        return self

    async def __aexit__(self, *exc: object) -> None:
        client, self._client = self._client, None
        if client is not None:
            await _close(client)

    @asynccontextmanager
    async def stream(self, request: dict[str, Any], *, stream: bool = True) -> AsyncIterator[ReplyStream]:
        """Send a request and yield its answer; leaving early closes the socket.

        Args:
            request: the vendor's JSON, with the model.
            stream: True asks for a stream, False for one document; the answer may have either form.

        Raises:
            UpstreamError: the service refused it, could not be reached in time, or broke the connection.
        """
        assert self._client is not None, "an Upstream is used inside its `async with`"
        body = _encode(body_of(self.endpoint, request, stream=stream))
        url = address(self.endpoint, model_of(request), stream=stream)
        headers = headers_of(self.endpoint, stream=stream)
        async with answer_to(self._client, self.endpoint, url, headers, body) as response:
            reply = ReplyStream(response, self.endpoint)
            try:
                yield reply
                await reply.drain()
            finally:
                await reply.aclose()


def client_of(endpoint: Endpoint, limits: httpx.Limits) -> httpx.AsyncClient:
    """Return an HTTP client for an endpoint. Raises ConfigError `config_invalid`."""
    with making_client():
        return httpx.AsyncClient(
            timeout=httpx.Timeout(endpoint.timeout_s, connect=CONNECT_S, pool=None),
            limits=limits,
            # Certificates take 20 ms to load and are used by TLS alone; redirects are not followed.
            verify=endpoint.base_url.startswith("https:"),
        )


class RefusedAnswer(UpstreamError):
    """A service's refusal, with its own words for a client that speaks its dialect."""

    def __init__(self, failure: UpstreamFailure, body: bytes, headers: Mapping[str, str]) -> None:
        super().__init__(failure)
        self.body, self.headers = body, headers

    def __reduce__(self) -> tuple[object, ...]:
        return (RefusedAnswer, (self.failure, self.body, dict(self.headers)))


@asynccontextmanager
async def answer_to(
    client: httpx.AsyncClient | LeanClient, endpoint: Endpoint, url: str, headers: Mapping[str, str], body: bytes,
    method: str = "POST",
) -> AsyncIterator[httpx.Response]:  # fmt: skip
    """Send a request and yield the successful answer, before its body; leaving early closes the socket.

    Raises:
        UpstreamError: the service cannot be reached, refuses (`RefusedAnswer`), or breaks the connection.
    """
    response = None
    try:
        if isinstance(client, LeanClient):
            response = await client.send(method, url, headers, body)
        else:
            request = client.build_request(method, url, content=body, headers=dict(headers))
            response = await client.send(request, stream=True)
        if response.status_code >= 300:
            raise await _refusal(response, endpoint, url)
        check_coding(response)
        yield response
    except FOREIGN as error:
        if response is not None and isinstance(error, UnicodeEncodeError):
            raise  # The request was sent, so the error is the caller's own.
        raise UpstreamError(translated(error, endpoint)) from error
    finally:
        if response is not None:
            await _close(response)


async def _refusal(response: httpx.Response, endpoint: Endpoint, url: str) -> RefusedAnswer:
    body = b""
    with suppress(*FOREIGN):  # A part of the body is enough for an error message.
        check_coding(response)
        async for data in response.aiter_bytes():
            body += data
            if len(body) >= ERROR_BYTES_MAX:
                break
    body, now = body[:ERROR_BYTES_MAX], datetime.fromtimestamp(time.time(), UTC)
    failure = failure_of(response.status_code, response.headers, body, now, endpoint.key)
    if 300 <= response.status_code < 400:
        where = response.headers.get("location", "")
        text = f"{failure.message} (redirected to {cut_urls(where) or 'nowhere'}; keys are not sent there)"
        hint = moved_base(url, where) or failure.hint
        failure = msgspec.structs.replace(failure, message=text, hint=hint)
    if endpoint.key:  # Some services repeat the key.
        body = body.replace(endpoint.key.encode(), b"[key]")
    return RefusedAnswer(failure, body, response.headers)


CODINGS: Final = frozenset({"", "identity", "gzip", "x-gzip", "deflate"})
"""Accepted values of `content-encoding`; a doubly compressed body could grow a million times in one step."""


def check_coding(response: httpx.Response) -> None:
    """Raise `httpx.DecodingError` if a body has a content encoding that is not in `CODINGS`."""
    coding = response.headers.get("content-encoding", "").strip().lower()
    if coding not in CODINGS:
        raise httpx.DecodingError(f"it is packed as {coding[:40]!r}, which was not asked for")


async def _close(opened: httpx.Response | httpx.AsyncClient) -> None:
    with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_S):
        await opened.aclose()


# No answer ------------------------------------------------------------------------------------------------------------


class Symptom(msgspec.Struct, frozen=True):
    """The meaning of an exception of the HTTP library, or of the one beneath it."""

    kinds: tuple[type[Exception], ...]
    code: str
    fact: str
    fix: str
    """Next step for the user."""
    may_pass: bool = True
    """True if the same request may succeed later."""
    was_sent: bool = True
    """True if the service may have received the request."""


SYMPTOMS: Final = (
    # The library's own words contain the header, which may be the key.
    Symptom((httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError, UnicodeEncodeError),
            "config_invalid", "{where} or one of its headers holds letters that cannot be sent",
            "copy the key again, alone, and check base_url and the headers", may_pass=False),
    Symptom((httpx.DecodingError,), "dialect_mapping_failed", "the answer cannot be unpacked: {words}",
            "check what stands between here and the service", may_pass=False),
    Symptom((socket.gaierror,), "backend_unavailable", "no connection to {where}: no address is known for {host} (DNS)",
            "check the name and the network"),
    Symptom((ssl.SSLCertVerificationError,), "backend_unavailable",
            "no connection to {where}: the certificate of {host} is not valid: {words}",
            "set SSL_CERT_FILE to the authority's certificate, or correct the name"),
    Symptom((ssl.SSLError,), "backend_unavailable", "{where} does not speak https on this port: {words}",
            "it may speak plain http: {other}"),
    Symptom((ConnectionRefusedError,), "backend_unavailable",
            "no connection to {where}: nothing listens there (ECONNREFUSED)", "start the server, or check the port"),
    Symptom((httpx.ProxyError,), "backend_unavailable",
            "no connection to {where}: the proxy refused or broke it: {words}", "check HTTPS_PROXY and NO_PROXY"),
    Symptom((httpx.ConnectTimeout, httpx.PoolTimeout), "backend_timeout",
            f"no connection to {{where}} within {CONNECT_S:g} s",
            "check host and port; a firewall or a missing proxy (HTTPS_PROXY) does this", was_sent=False),
    Symptom((httpx.TimeoutException,), "backend_timeout", "{where} sent nothing for {timeout_s:g} s (timeout_s)",
            "raise timeout_s, or take a quicker model; check that it is the API's port"),
    Symptom((httpx.ConnectError,), "backend_unavailable", "no connection to {where}: {words}",
            "check that the address can be reached from here, base_url and HTTPS_PROXY"),
    Symptom((Exception,), "stream_closed", "the connection to {where} broke: {words}",
            "try again; a proxy on the way may cut long answers, and a wrong port or scheme all: {other}"),
)  # fmt: skip
"""Symptoms of failed connections; the first row that fits counts."""


def translated(error: Exception, endpoint: Endpoint) -> UpstreamFailure:
    """Return the failure for an exception of the HTTP library."""
    where = cut_urls(endpoint.base_url)
    if isinstance(error, httpx.ProxyError) and DENIAL in str(error):
        text = f"no connection to {where}: {clean(str(error)[str(error).index(DENIAL) :], endpoint.key)}"
        return UpstreamFailure(code="policy_denied", message=text)
    chain = [*_causes(error)][::-1] if isinstance(error, httpx.ConnectError) else [error]
    row, found = next((row, one) for row in SYMPTOMS for one in chain if isinstance(one, row.kinds))
    scheme, other = ("http:", "https:") if where.startswith("http:") else ("https:", "http:")
    values = {
        "where": where, "host": urlsplit(where).hostname or "", "other": where.replace(scheme, other, 1),
        "words": clean(str(found) or type(found).__name__, endpoint.key), "timeout_s": endpoint.timeout_s,
    }  # fmt: skip
    return UpstreamFailure(
        code=row.code, message=row.fact.format(**values), hint=row.fix.format(**values), may_pass=row.may_pass,
        was_sent=row.was_sent,
    )  # fmt: skip


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and all exceptions that caused it."""
    yield error
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for one in (*inner, error.__cause__ or error.__context__):
        if one is not None:
            yield from _causes(one)
