"""One HTTP/1.1 connection: h11 reads requests and frames answers, which are written, cut or stalled as scripted.

No TLS, no HTTP/2, loopback only.
"""

from __future__ import annotations

import contextlib
import gzip
import select
import socket
import struct
import time
import zlib
from collections.abc import Iterable, Mapping
from http.client import responses
from typing import Final, Literal, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import h11

from backplane.testing.script import Fault

READ_BYTES: Final = 65_536
HEAD_BYTES_MAX: Final = 65_536
BODY_BYTES_MAX: Final = 256 * 1024 * 1024
"""Bytes of a request: agents send conversations with images, and this is beyond every vendor's limit."""
IDLE_S_MAX: Final = 600
"""Seconds that a connection waits for its next request, and a stalled answer for its client to leave."""
LINGER_NONE: Final = struct.pack("ii", 1, 0)
"""Socket option: closing drops what is unsent and resets the connection."""

AnswerEnd = Literal["whole", "cut", "left"]
"""An answer's end: all of it was written, it was cut as scripted, or the client left (or the server closed)."""


class BadRequest(Exception):
    """The bytes are no request that this server understands; `status` says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Head(NamedTuple):
    """A request as it arrived."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    """Names in lower case; of equal names the last counts."""
    data: bytes | None
    """The body without its content coding; None if the coding is unknown."""


class Delivery(NamedTuple):
    """The plan of an answer."""

    status: int
    headers: Mapping[str, str]
    pieces: Iterable[bytes]
    length: int | None = None
    """None: chunked, or until the connection ends."""
    fault: Fault = Fault()
    """Waits, and the end of the body."""


class Connection:
    """One client's connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._wants_body = True
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(IDLE_S_MAX)

    def read(self) -> Head | None:
        """Return the next request, or None if the client has no more.

        Raises:
            BadRequest: what came cannot be read; the connection is of no further use.
        """
        try:
            if self._http.our_state is h11.DONE:
                self._http.start_next_cycle()
            request = self._event()
            if not isinstance(request, h11.Request):
                return None
            headers = {name.decode(): value.decode("latin-1") for name, value in request.headers}
            too_long = BadRequest(413, f"a body of more than {BODY_BYTES_MAX} bytes")
            if int(headers.get("content-length", "0")) > BODY_BYTES_MAX:
                raise too_long
            if self._http.they_are_waiting_for_100_continue:
                self._send(h11.InformationalResponse(status_code=100, headers=[]))
            body = bytearray()
            while isinstance(event := self._event(), h11.Data):
                body += event.data
                if len(body) > BODY_BYTES_MAX:
                    raise too_long
        except OSError:
            return None
        except h11.RemoteProtocolError as error:
            raise BadRequest(error.error_status_hint, f"not a request: {error}") from error
        method, parts = request.method.decode().upper(), urlsplit(request.target.decode("latin-1"))
        self._wants_body = method != "HEAD"
        return Head(method, parts.path, dict(parse_qsl(parts.query)), headers, _decoded(bytes(body), headers))

    @property
    def goes_on(self) -> bool:
        """True if another request may follow on this connection."""
        return self._http.our_state is h11.DONE

    def write(self, delivery: Delivery) -> AnswerEnd:
        """Write an answer as planned and return how it ended."""
        with contextlib.suppress(OSError):
            return self._write(delivery)
        return "left"

    def reset(self) -> None:
        """End the connection with a reset."""
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)

    def wait(self, milliseconds: int) -> None:
        """Wait unless the client leaves.

        Raises:
            ConnectionResetError: it left.
        """
        deadline = time.monotonic() + milliseconds / 1000
        while (rest := deadline - time.monotonic()) > 0:
            poll = select.poll()
            poll.register(self.sock, select.POLLIN)
            if not poll.poll(rest * 1000):
                return
            if not self.sock.recv(READ_BYTES, socket.MSG_PEEK):
                raise ConnectionResetError
            # The next request is here already: nothing more to notice, so the rest is plain waiting.
            time.sleep(max(0.0, deadline - time.monotonic()))

    def _write(self, delivery: Delivery) -> AnswerEnd:
        fault = delivery.fault
        if fault.first_byte_ms:
            self.wait(fault.first_byte_ms)
        headers = {name.lower(): value for name, value in delivery.headers.items()}
        if delivery.length is not None:
            headers["content-length"] = str(delivery.length)
        if fault.close_delimited:
            # h11 ends a body with its connection only for those who know no chunks.
            self._http.their_http_version = b"1.0"
        if fault.is_endless:
            headers["connection"] = "close"
        reason = responses.get(delivery.status, "Scripted")
        self._send(h11.Response(status_code=delivery.status, headers=list(headers.items()), reason=reason))
        for place, piece in enumerate(delivery.pieces if self._wants_body else ()):
            if place and fault.pause_ms:
                self.wait(fault.pause_ms)
            self._send(h11.Data(data=piece))
        if fault.stall_after_frames is not None:
            self._stall(delivery)
        elif fault.reset:
            self.reset()
        if fault.is_endless:
            return "cut"
        self._send(h11.EndOfMessage())
        return "whole"

    def _stall(self, delivery: Delivery) -> None:
        """Keep the connection open without an end, until the client leaves."""
        deadline = time.monotonic() + IDLE_S_MAX
        while time.monotonic() < deadline:
            self.wait(delivery.fault.stall_comment_ms or IDLE_S_MAX * 1000)
            if delivery.fault.stall_comment_ms:
                self._send(h11.Data(data=b": keep-alive\n\n" if "event" in delivery.headers["content-type"] else b"\n"))

    def _event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(self.sock.recv(READ_BYTES))
        return event

    def _send(self, event: h11.Event) -> None:
        if data := self._http.send(event):
            self.sock.sendall(data)


def _decoded(body: bytes, headers: Mapping[str, str]) -> bytes | None:
    coding = headers.get("content-encoding", "identity").lower()
    if coding == "identity":
        return body
    try:
        return gzip.decompress(body) if coding == "gzip" else None
    except (OSError, EOFError, zlib.error):
        return None
