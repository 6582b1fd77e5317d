"""Small HTTP/1.1 client on h11 for the gateway; a request takes a quarter of the processor time that httpx takes.

It returns httpx's responses and raises httpx's errors, so the code that reads an answer works with both. Where the
environment sets a proxy, or an address has a user's name, httpx is used.
"""

from __future__ import annotations

import select
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Final
from urllib.request import getproxies

import anyio
import anyio.abc
import h11
import httpx

from backplane.upstream.clients import making_client

READ_BYTES: Final = 64 * 1024
HEAD_BYTES_MAX: Final = 100 * 1024
"""Maximum bytes of an answer's head, as in httpx; a longer one fails."""
CLOSE_S: Final = 1.0
"""Seconds to close a connection, as TLS sends a last message."""


def is_lean(base_url: str) -> bool:
    """Return True if this client can reach an address: no proxy is set, and it has no name or password."""
    return not httpx.URL(base_url).userinfo and not {"http", "https", "all"} & getproxies().keys()


class LeanClient:
    """Connections to one service; the end of `async with` closes the unused ones.

    Args:
        base_url: the service's address; all requests go to its host.
        timeout_s: seconds without a byte after which a request or an answer has failed.
        connect_s: seconds to connect.
        kept_max: maximum unused connections that are kept.
        kept_s: seconds that an unused connection is kept.

    Raises:
        ConfigError: `config_invalid`, the certificates cannot be read.
    """

    def __init__(self, base_url: str, *, timeout_s: float, connect_s: float, kept_max: int, kept_s: float) -> None:
        url = httpx.URL(base_url)
        self._host, self._netloc = url.raw_host.decode("ascii"), url.netloc
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._tls = None
        if url.scheme == "https":
            with making_client():
                self._tls = httpx.create_ssl_context()
        self.timeout_s, self._connect_s = timeout_s, connect_s
        self._kept_max, self._kept_s = kept_max, kept_s
        self._kept: list[_Connection] = []

    async def __aenter__(self) -> LeanClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        while self._kept:
            await self._kept.pop().close()

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> httpx.Response:
        """Send a request and return the answer before its body is read; its `aclose` frees the connection.

        Raises:
            httpx.HTTPError, httpx.InvalidURL, UnicodeEncodeError: for the same reasons as in httpx.
        """
        given = [(name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()]
        own = [] if "host" in headers else [(b"host", self._netloc)]
        head = [*own, *given, (b"content-length", str(len(body)).encode())]
        target = _path(url)
        connection = await self._kept_one() or await self._connect()
        try:
            with _mapped(httpx.LocalProtocolError, httpx.WriteError, httpx.WriteTimeout):
                request = connection.http.send(h11.Request(method=method, target=target, headers=head)) or b""
                data = request + (connection.http.send(h11.Data(data=body)) or b"")
                connection.http.send(h11.EndOfMessage())
                with anyio.fail_after(self.timeout_s):
                    await connection.stream.send(data)
            answer = await connection.response()
        except BaseException:
            await connection.close()
            raise
        return httpx.Response(answer.status_code, headers=answer.headers.raw_items(), stream=connection)

    async def _connect(self) -> _Connection:
        with _mapped(httpx.ConnectError, httpx.ConnectError, httpx.ConnectTimeout):
            with anyio.fail_after(self._connect_s):
                if self._tls is None:
                    stream: anyio.abc.ByteStream = await anyio.connect_tcp(self._host, self._port)
                else:
                    stream = await anyio.connect_tcp(
                        self._host, self._port, ssl_context=self._tls, tls_standard_compatible=False
                    )
            return _Connection(self, stream)

    async def _kept_one(self) -> _Connection | None:
        """Return the unused connection that was used last, or None; close those that are too old or were closed."""
        while self._kept:
            connection = self._kept.pop()
            if connection.is_usable(anyio.current_time() - self._kept_s):
                return connection
            await connection.close()
        return None

    async def take_back(self, connection: _Connection) -> None:
        """Keep a connection if its answer was read to the end and the service keeps it, too; else close it."""
        http = connection.http
        is_over = http.our_state is http.their_state is h11.DONE and not http.trailing_data[0]
        if is_over and len(self._kept) < self._kept_max:
            http.start_next_cycle()
            connection.used_s = anyio.current_time()
            self._kept.append(connection)
        else:
            await connection.close()


class _Connection(httpx.AsyncByteStream):
    """An open connection; it also is the stream from which httpx's response reads the body of the current answer."""

    def __init__(self, client: LeanClient, stream: anyio.abc.ByteStream) -> None:
        self._client, self.stream = client, stream
        self.http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES_MAX)
        self.used_s = 0.0
        self._poll = select.poll()
        self._poll.register(stream.extra(anyio.abc.SocketAttribute.raw_socket), select.POLLIN)

    def is_usable(self, since_s: float) -> bool:
        """Return True if the connection was used since a time, and the service has not closed it or sent anything more.

        Args:
            since_s: the time, by the event loop's clock.
        """
        return self.used_s >= since_s and not self._poll.poll(0)

    async def response(self) -> h11.Response:
        """Return the head of the answer."""
        with _mapped(httpx.RemoteProtocolError, httpx.ReadError, httpx.ReadTimeout):
            while not isinstance(event := self.http.next_event(), h11.Response):
                if event is h11.NEED_DATA and not await self.receive() and self.http.trailing_data == (b"", True):
                    raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
            return event

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the body, in pieces as the service sent them."""
        with _mapped(httpx.RemoteProtocolError, httpx.ReadError, httpx.ReadTimeout):
            while not isinstance(event := self.http.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Data):
                    yield bytes(event.data)
                else:
                    await self.receive()

    async def receive(self) -> bytes:
        """Read once from the connection; return the bytes, empty if the service has closed it."""
        with anyio.fail_after(self._client.timeout_s):
            try:
                data = await self.stream.receive(READ_BYTES)
            except anyio.EndOfStream:
                data = b""
        self.http.receive_data(data)
        return data

    async def aclose(self) -> None:
        """Give the connection back; httpx calls this once at the end of each answer."""
        await self._client.take_back(self)

    async def close(self) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_S):
            await self.stream.aclose()


@lru_cache(maxsize=256)
def _path(url: str) -> bytes:
    """Return path and query of an address. Raises httpx.InvalidURL.

    Parsing takes 50 µs and a service has few addresses, so the results are cached.
    """
    return httpx.URL(url).raw_path


@contextmanager
def _mapped(
    protocol: type[httpx.HTTPError], network: type[httpx.HTTPError], timeout: type[httpx.HTTPError]
) -> Iterator[None]:
    """Raise httpx's errors in place of those of anyio, h11 and ssl.

    Args:
        protocol: raised for HTTP that is not valid.
        network: raised if the connection breaks.
        timeout: raised if a wait takes too long.
    """
    try:
        yield
    except h11.ProtocolError as error:
        raise protocol(str(error)) from error
    except TimeoutError as error:
        raise timeout(str(error)) from error
    except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
        raise network(str(error)) from error
