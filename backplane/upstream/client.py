"""Requests to a model's service and the documents of its answers, over one HTTP client with kept connections.

Each wait has a limit: for the connection, for the first document, and between two. Comments are no progress. `ladder`
decides what to send next, and a dialect reads the documents.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Final

import anyio
import httpx
import msgspec

from backplane.contract.canonical import Json
from backplane.dialects import framing
from backplane.errors import DENIAL, TranslationError
from backplane.upstream.clients import making_client
from backplane.upstream.endpoint import CONNECT_S, Endpoint, address, body_of, cut_urls, headers_of, model_of
from backplane.upstream.failure import UpstreamError, UpstreamFailure, clean, failure_of

CONNECTIONS_MAX: Final = 32
"""Connections at once, as many as runs work at once; further requests wait."""

KEPT_S: Final = 60.0
"""Seconds that an unused connection is kept; most servers close it after about as long."""

ERROR_BYTES_MAX: Final = 64 * 1024
"""Bytes read of a refusal's body; the longest known are HTML pages."""

ANSWER_BYTES_MAX: Final = 256 * 1024 * 1024
"""Bytes of an answer; images in base64 have some 30 MB. A longer one fails."""

HEAD_BYTES_MAX: Final = 2_000
"""Bytes kept of an answer without a document, to show what came instead."""

TAIL_S: Final = 5.0
"""Seconds to wait for counters and the last document after the answer's end."""

DRAIN_S: Final = 0.2
"""Seconds to read on to the end of the body, so that the connection can be used again."""

CLOSE_S: Final = 1.0
"""Seconds to close a connection that is not used again."""

IDLE_KINDS: Final = frozenset({"ping", "keepalive", "response.keepalive"})
"""Types of documents without content."""

FOREIGN: Final = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, UnicodeEncodeError)
"""Exceptions that the HTTP library raises, also for a header's letters."""

_encode: Final = msgspec.json.Encoder().encode


class ReplyStream:
    """One answer: iterate over its documents as they come.

    Raises, while iterating:
        UpstreamError: `backend_timeout`, nothing came in time; `stream_closed`, the connection broke;
            `dialect_mapping_failed`, the answer has no document or is too long.
    """

    def __init__(self, response: httpx.Response, endpoint: Endpoint, first_by: float) -> None:
        self.status = response.status_code
        self.media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        self.framing = framing.Detecting()
        self.head = b""
        self.found = 0
        """Number of documents so far."""
        self._endpoint = endpoint
        self._pieces = response.aiter_bytes()
        self._ready: deque[Json] = deque()
        self._deadline = first_by
        self._is_timed = True
        """False: the library's own timeout ends silence. A timer for each piece costs as much as the rest."""
        self._is_ending = False
        self._is_over = False
        self._size = 0

    def expect_end(self) -> None:
        """Wait at most `TAIL_S` for the rest, which may be absent."""
        if not self._is_ending:
            self._is_ending = self._is_timed = True
            self._deadline = anyio.current_time() + TAIL_S

    def __aiter__(self) -> AsyncIterator[Json]:
        return self

    async def __anext__(self) -> Json:
        while not self._ready:
            if self._is_over:
                raise StopAsyncIteration
            await self._more()
        return self._ready.popleft()

    async def _more(self) -> None:
        """Take the next piece, or end."""
        failure, data = None, None
        try:
            if self._is_timed:
                with anyio.CancelScope(deadline=self._deadline) as scope:
                    data = await anext(self._pieces, None)
                is_late = scope.cancelled_caught
            else:
                data = await anext(self._pieces, None)
                is_late = anyio.current_time() > self._deadline  # Comments came, but no document.
            if is_late:
                failure, data = self._late(), None
        except httpx.ReadTimeout:
            failure = self._late()
        except FOREIGN as error:
            failure = translated(error, self._endpoint)
        if data is None:
            self._end(failure)
        else:
            self._take(data)

    def _take(self, data: bytes) -> None:
        self._size += len(data)
        if not self.found and len(self.head) < HEAD_BYTES_MAX:
            self.head += data[: HEAD_BYTES_MAX - len(self.head)]
        try:
            if self._size > ANSWER_BYTES_MAX:
                raise TranslationError("dialect_mapping_failed", f"the answer is over {ANSWER_BYTES_MAX} bytes")
            documents = self.framing.feed(data)
        except TranslationError as error:
            raise UpstreamError(self._failure(error.code, error.message)) from error
        if documents:
            self._add(documents)
        inner = self.framing.inner
        if isinstance(inner, framing.Sse) and inner.done:
            self._is_over = True

    def _add(self, documents: list[Json]) -> None:
        self.found += len(documents)
        self._ready.extend(documents)
        if not self._is_ending and (_is_progress(documents[-1]) or any(map(_is_progress, documents))):
            self._deadline = anyio.current_time() + self._endpoint.timeout_s
            self._is_timed = False

    def _end(self, failure: UpstreamFailure | None) -> None:
        self._is_over = True
        whole = self._skipped()
        if failure is None or self._is_ending:
            if documents := self.framing.finish():
                self._add(documents)
            if self._skipped() > whole:
                # A body without a length can be cut unseen, but half a document shows it.
                failure = self._failure("stream_closed", "the answer ends in the middle of a document", may_pass=True)
        if failure is not None and not self._is_ending:
            raise UpstreamError(failure)
        if not self.found:
            raise UpstreamError(self.nothing())

    @property
    def is_whole(self) -> bool:
        """True if the transport shows the end: `[DONE]`, the end of an array, one JSON document."""
        inner = self.framing.inner
        closed = isinstance(inner, framing.Sse | framing.JsonArray) and inner.done
        return closed or (self.found == 1 and self.media_type == "application/json")

    def _skipped(self) -> int:
        return self.framing.inner.skipped if self.framing.inner is not None else 0

    def _late(self) -> UpstreamFailure:
        text = f"the service sent nothing for {self._endpoint.timeout_s:g} s (timeout_s)"
        return self._failure("backend_timeout", text, may_pass=True)

    def nothing(self) -> UpstreamFailure:
        """Return the failure of an answer without a document of the protocol."""
        if self.head.strip() and self.media_type == "text/event-stream":
            return self._failure("stream_closed", "the answer was cut before its first document", may_pass=True)
        words = " ".join(self.head.decode("utf-8", "replace").split())
        what = f"{self.media_type or 'no content type'}: {words[:200]}" if words else "an empty body"
        return self._failure("dialect_mapping_failed", f"the answer holds nothing of the protocol, but {what}")

    def _failure(self, code: str, message: str, *, may_pass: bool = False) -> UpstreamFailure:
        return UpstreamFailure(
            code=code, message=clean(message, self._endpoint.key), status=self.status, may_pass=may_pass
        )

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
        one = self.endpoint
        with making_client():
            self._client = httpx.AsyncClient(
                timeout=httpx.Timeout(one.timeout_s, connect=CONNECT_S),
                limits=httpx.Limits(max_connections=CONNECTIONS_MAX, keepalive_expiry=KEPT_S),
                # Certificates take 20 ms to load and are used by TLS alone; redirects are not followed.
                verify=one.base_url.startswith("https:"),
            )
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
            stream: ask for a stream (else one document); both are read either way.

        Raises:
            UpstreamError: the service refused it, or could not be reached in time.
        """
        first_by = anyio.current_time() + self.endpoint.timeout_s
        response = await self._send(request, stream, first_by)
        try:
            reply = ReplyStream(response, self.endpoint, first_by)
            yield reply
            await reply.drain()
        finally:
            await _close(response)

    async def _send(self, request: dict[str, Any], stream: bool, first_by: float) -> httpx.Response:
        client, endpoint = self._client, self.endpoint
        assert client is not None, "an Upstream is used inside its `async with`"
        body = _encode(body_of(endpoint, request, stream=stream))
        url = address(endpoint, model_of(request), stream=stream)
        response, failure = None, None
        with anyio.CancelScope(deadline=first_by) as scope:
            try:
                built = client.build_request("POST", url, content=body, headers=headers_of(endpoint, stream=stream))
                response = await client.send(built, stream=True)
                if response.status_code < 300:
                    check_coding(response)
                    return response
                failure = await self._refusal(response)
            except FOREIGN as error:
                failure = translated(error, endpoint)
        if response is not None:
            await _close(response)
        if failure is None:
            assert scope.cancelled_caught
            text = f"the service sent nothing for {endpoint.timeout_s:g} s (timeout_s)"
            failure = UpstreamFailure(code="backend_timeout", message=text, may_pass=True)
        raise UpstreamError(failure)

    async def _refusal(self, response: httpx.Response) -> UpstreamFailure:
        body = b""
        with suppress(*FOREIGN):  # A part of a body has words, too.
            check_coding(response)
            async for data in response.aiter_bytes():
                body += data
                if len(body) >= ERROR_BYTES_MAX:
                    break
        now = datetime.fromtimestamp(time.time(), UTC)
        key, head = self.endpoint.key, body[:ERROR_BYTES_MAX]
        failure = failure_of(response.status_code, response.headers, head, now, key)
        if 300 <= response.status_code < 400:
            where = cut_urls(response.headers.get("location", "nowhere"))
            failure = msgspec.structs.replace(failure, message=f"{failure.message} (redirected to {where})")
        return failure


CODINGS: Final = frozenset({"", "identity", "gzip", "x-gzip", "deflate"})
"""Values of `content-encoding` that are read. A body that is packed twice can grow a million times in one step."""


def check_coding(response: httpx.Response) -> None:
    """Refuse a body that is packed in another way. Raises `httpx.DecodingError`."""
    coding = response.headers.get("content-encoding", "").strip().lower()
    if coding not in CODINGS:
        raise httpx.DecodingError(f"it is packed as {coding[:40]!r}, which was not asked for")


async def _close(opened: httpx.Response | httpx.AsyncClient) -> None:
    with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_S):
        await opened.aclose()


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and all exceptions that caused it."""
    yield error
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for one in (*inner, error.__cause__ or error.__context__):
        if one is not None:
            yield from causes(one)


def _system_word(error: BaseException) -> str:
    """Return the system's name of the error beneath an exception, as ` (ECONNREFUSED)`; empty if there is none."""
    codes = (one.errno or 0 for one in causes(error) if isinstance(one, OSError))
    return next((f" ({errno.errorcode[code]})" for code in codes if code in errno.errorcode), "")


def translated(error: Exception, endpoint: Endpoint) -> UpstreamFailure:
    """Return the failure that an exception of the HTTP library is."""
    where = cut_urls(endpoint.base_url)
    if isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol | httpx.LocalProtocolError | UnicodeEncodeError):
        # The library's words contain the header, which may be the key.
        text = f"{where} or one of its headers holds letters that cannot be sent"
        return UpstreamFailure(code="config_invalid", message=text)
    if isinstance(error, httpx.DecodingError):
        return UpstreamFailure(code="dialect_mapping_failed", message=f"the answer cannot be unpacked: {error}")
    if isinstance(error, httpx.ConnectTimeout | httpx.PoolTimeout):
        text = f"no connection to {where} within {CONNECT_S:g} s"
        return UpstreamFailure(code="backend_timeout", message=text, may_pass=True, was_sent=False)
    if isinstance(error, httpx.TimeoutException):
        return UpstreamFailure(code="backend_timeout", message=f"no answer from {where} in time", may_pass=True)
    words = clean(str(error) or type(error).__name__, endpoint.key)
    if isinstance(error, httpx.ProxyError) and DENIAL in words:
        text = f"no connection to {where}: {words[words.index(DENIAL) :]}"
        return UpstreamFailure(code="policy_denied", message=text)
    if isinstance(error, httpx.ConnectError | httpx.ProxyError):
        text = f"no connection to {where}: {words}{_system_word(error)}"
        return UpstreamFailure(code="backend_unavailable", message=text, may_pass=True)
    return UpstreamFailure(code="stream_closed", message=f"the connection to {where} broke: {words}", may_pass=True)
