"""Handles the clients of our two proxies: their HTTP/1.1 connections, parsed by h11, and the limits on these."""

from __future__ import annotations

import re
import select
import socket
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Final

import anyio
import h11

from backplane.process.aio import receive, send

CONNECTIONS_MAX: Final = 128
"""Limit of open connections of one proxy; further ones wait. A package manager opens about 50."""

CONNECTIONS_WAITING_MAX: Final = 64
"""Limit of connections that wait to be accepted."""

HEAD_BYTES_MAX: Final = 64 * 1024
"""Size limit in bytes of a head that is not complete after a read; servers accept 8 to 64 KiB."""

CONNECT_S_MAX: Final = 20.0
"""Seconds to look up a name and to connect, together."""

IDLE_S_MAX: Final = 600.0
"""Seconds without data after which a connection ends; a model may need minutes for its first word."""

CHUNK_BYTES: Final = 64 * 1024
"""Maximum number of bytes copied at once, in each direction."""

CLOSED_LOOK_S: Final = 0.05
"""Seconds between two checks whether a client has closed its connection, while it sends; else that is seen at once."""

UNREAD_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes read of a request that is refused: a client that is cut off while it sends does not read the answer."""

UNREAD_S_MAX: Final = 2.0
"""Seconds to read them in."""

_OF_ONE_CONNECTION: Final = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"te", b"trailer", b"upgrade"),
        *(b"transfer-encoding", b"host", b"expect"),  # A proxy sends its own, and answers Expect itself.
    )
)
"""Headers that are not forwarded, because each connection has its own (RFC 9110, 7.6.1)."""

_AMBIGUOUS: Final = re.compile(rb"(?<!\r)\n|\r[^\n]|\r\n[ \t]")
"""Ends of lines that some servers take for none, and others for two (RFC 9112, 2.2 and 5.2)."""

_LENGTHS: Final = frozenset({b"content-length", b"transfer-encoding"})
"""Headers of which a request with a body has at least one."""


def listening(host: str) -> socket.socket:
    """Return a listening socket on a free port of address `host`. Raises OSError."""
    listener = socket.create_server((host, 0), backlog=CONNECTIONS_WAITING_MAX)
    listener.setblocking(False)
    return listener


def forwarded(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the headers that a proxy forwards."""
    found = [(name.lower(), name, value) for name, value in headers]
    # Two lengths in one message would let servers disagree about its end; h11 has read the chunked one.
    is_chunked = any(lower == b"transfer-encoding" for lower, _, _ in found)
    for lower, name, value in found:
        if lower not in _OF_ONE_CONNECTION and not (is_chunked and lower == b"content-length"):
            yield name, value


class Refused(Exception):
    """A request that a proxy refuses: the status, and in words the reason for the client."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class HttpClient:
    """A client's connection to a proxy. Its methods raise OSError and h11.ProtocolError, which end the connection.

    Attributes:
        http: the state of the connection.
    """

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        if end.family != socket.AF_UNIX:
            # Else a second small write, as of a body after its head, waits 40 ms for the client's receipt of the first.
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._is_head = False

    async def request(self) -> h11.Request | None:
        """Return the next request, before its body; None if the client has closed the connection."""
        self._check_head()
        event = await self._next_event()
        if not isinstance(event, h11.Request):
            return None
        self._is_head = event.method == b"HEAD"
        if not _LENGTHS & {name for name, _ in event.headers}:
            await self._next_event()  # The end of the request, so that `has_body` is False.
        return event

    @property
    def has_body(self) -> bool:
        """True if a part of the request's body has not been read yet."""
        return self.http.their_state is h11.SEND_BODY

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the rest of the request's body."""
        while self.has_body:
            event = await self._next_event()
            if isinstance(event, h11.Data):
                yield bytes(event.data)

    async def send(self, *events: h11.Event) -> None:
        """Send parts of an answer, in one write. Raises TimeoutError: the client does not read it."""
        if data := b"".join(filter(None, map(self.http.send, events))):
            with anyio.fail_after(IDLE_S_MAX):
                await send(self.end, data)

    async def answer(self, status: int, kind: str, body: bytes, reason: bytes = b"") -> None:
        """Send a whole answer, the last one on this connection.

        Args:
            kind: the content type.
            reason: ASCII on one line; many clients show nothing else of a refused CONNECT.
        """
        with anyio.move_on_after(IDLE_S_MAX):
            headers = [("content-type", kind), ("content-length", str(len(body))), ("connection", "close")]
            head = h11.Response(status_code=status, headers=headers, reason=reason)
            await self.send(head, *([] if self._is_head else [h11.Data(data=body)]), h11.EndOfMessage())
        await self.finish()

    async def finish(self) -> bool:
        """Read the rest of a request that was answered early, within bounds; return True if another may follow."""
        size = 0
        with anyio.move_on_after(UNREAD_S_MAX):
            if self.http.our_state is not h11.DONE:
                if self.http.their_state not in (h11.SEND_BODY, h11.ERROR):
                    return False
                self.end.shutdown(socket.SHUT_WR)
                while size < UNREAD_BYTES_MAX and (data := await receive(self.end, CHUNK_BYTES)):
                    size += len(data)
                return False
            async for data in self.body():
                size += len(data)
                if size > UNREAD_BYTES_MAX:
                    break
        return self.http.our_state is self.http.their_state is h11.DONE

    async def wait_closed(self) -> None:
        """Wait until the client has closed its connection, whether it has sent more requests or not."""
        poll = select.poll()
        poll.register(self.end, select.POLLRDHUP)
        has_more = False
        while not poll.poll(0):
            if has_more or self.has_body:
                await anyio.sleep(CLOSED_LOOK_S)
            else:
                await anyio.wait_readable(self.end)
                has_more = True  # If that was not the end, another request waits, and the socket stays readable.

    async def _next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        while (event := self.http.next_event()) is h11.NEED_DATA:
            if self.http.they_are_waiting_for_100_continue:
                await self.send(h11.InformationalResponse(status_code=100, headers=[]))
            self.http.receive_data(await receive(self.end, CHUNK_BYTES))
            self._check_head()
        return event

    def _check_head(self) -> None:
        """Refuse a head that servers read in two ways, which h11 takes. Raises h11.RemoteProtocolError."""
        if self.http.their_state is not h11.IDLE:
            return
        head = self.http.trailing_data[0].partition(b"\r\n\r\n")[0]
        if _AMBIGUOUS.search(head):
            raise h11.RemoteProtocolError("a line of the head has no end, or goes on in the next one")
