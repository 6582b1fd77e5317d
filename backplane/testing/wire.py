"""One HTTP/1.1 connection, byte by byte: requests are read, answers are written as scripted.

Made for faults: a library would mend what has to be broken here. No TLS, no HTTP/2, loopback only.
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
from http import HTTPStatus
from typing import Final, Literal, NamedTuple
from urllib.parse import parse_qsl, urlsplit

READ_BYTES: Final = 65_536
HEAD_BYTES_MAX: Final = 65_536
BODY_BYTES_MAX: Final = 256 * 1024 * 1024
"""Agents send whole conversations with images; a quarter of a GiB is beyond any vendor's limit."""
IDLE_S_MAX: Final = 600
"""How long a connection may wait for its next request, and a stalled answer for its client to leave."""
LINGER_NONE: Final = struct.pack("ii", 1, 0)
"""Closing then throws away what is unsent and resets the connection."""

AnswerEnd = Literal["whole", "cut", "left"]
"""An answer's end: all of it was written, it was cut as scripted, or the client left (or the server closed)."""


class Left(Exception):
    """The client is gone."""


class BadRequest(Exception):
    """What came is no request that is understood here; `status` says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Head(NamedTuple):
    """A request as it came."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    """Names in lower case; the last one of a name counts."""
    body: bytes


class Delivery(NamedTuple):
    """An answer as it is to be written."""

    status: int
    headers: Mapping[str, str]
    pieces: Iterable[bytes]
    length: int | None = None
    """None: chunked, or to the end of the connection."""
    close_delimited: bool = False
    first_byte_ms: int = 0
    pause_ms: int = 0
    then: Literal["end", "cut", "reset", "stall"] = "end"
    stall_comment: bytes = b""
    stall_comment_ms: int | None = None
    is_head: bool = False


class Connection:
    """One client's connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._held = bytearray()
        self._started = False
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(IDLE_S_MAX)

    def read(self) -> Head | None:
        """Return the next request, None when the client has no more.

        Raises:
            BadRequest: what came cannot be read; the connection is of no further use.
        """
        try:
            block = self._until(b"\r\n\r\n")
            if block is None:
                return None
            lines = block.decode("latin-1").split("\r\n")
            method, target, _ = lines[0].split(" ", 2)
            rows = [line.partition(":") for line in lines[1:] if line]
            headers = {name.strip().lower(): value.strip() for name, _, value in rows}
            if headers.get("expect", "").lower() == "100-continue":
                self.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = self._body(headers)
        except (OSError, Left):
            return None
        except ValueError as error:
            raise BadRequest(400, f"not a request: {error}") from error
        parts = urlsplit(target)
        return Head(method.upper(), parts.path, dict(parse_qsl(parts.query)), headers, body)

    def write(self, delivery: Delivery) -> AnswerEnd:
        """Write one answer as it was planned and say how that ended."""
        try:
            return self._write(delivery)
        except (OSError, Left):
            return "left"

    def reset(self) -> None:
        """End the connection with a reset."""
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)

    def wait(self, milliseconds: int) -> None:
        """Wait, or notice that the client left.

        Raises:
            Left: it did.
        """
        deadline = time.monotonic() + milliseconds / 1000
        while (rest := deadline - time.monotonic()) > 0:
            poll = select.poll()
            poll.register(self.sock, select.POLLIN)
            if not poll.poll(rest * 1000):
                return
            if not self.sock.recv(READ_BYTES, socket.MSG_PEEK):
                raise Left
            # The next request is here already: nothing more to notice, so the rest is plain waiting.
            time.sleep(max(0.0, deadline - time.monotonic()))

    def _write(self, delivery: Delivery) -> AnswerEnd:
        if delivery.first_byte_ms:
            self.wait(delivery.first_byte_ms)
        chunked = delivery.length is None and not delivery.close_delimited
        self.sock.sendall(head_bytes(delivery, chunked))
        if delivery.is_head:
            return "whole"
        for place, piece in enumerate(delivery.pieces):
            if place and delivery.pause_ms:
                self.wait(delivery.pause_ms)
            self.sock.sendall(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        if delivery.then == "stall":
            self._stall(delivery, chunked)
        if delivery.then == "reset":
            self.reset()
        if delivery.then != "end":
            return "cut"
        if chunked:
            self.sock.sendall(b"0\r\n\r\n")
        return "whole"

    def _stall(self, delivery: Delivery, chunked: bool) -> None:
        """Keep the connection open without an end, until the client leaves."""
        deadline = time.monotonic() + IDLE_S_MAX
        comment = delivery.stall_comment
        line = b"%x\r\n%b\r\n" % (len(comment), comment) if chunked else comment
        while time.monotonic() < deadline:
            self.wait(delivery.stall_comment_ms or IDLE_S_MAX * 1000)
            if delivery.stall_comment_ms:
                self.sock.sendall(line)

    def _body(self, headers: Mapping[str, str]) -> bytes:
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return self._chunks()
        return self._exactly(int(headers.get("content-length", "0")))

    def _chunks(self) -> bytes:
        body = bytearray()
        while chunk := self._chunk():
            body += chunk
            if len(body) > BODY_BYTES_MAX:
                raise BadRequest(413, f"a body of more than {BODY_BYTES_MAX} bytes")
        return bytes(body)

    def _chunk(self) -> bytes:
        line = self._until(b"\r\n") or b""
        data = self._exactly(int(line.partition(b";")[0], 16))
        self._until(b"\r\n")
        return data

    def _until(self, end: bytes) -> bytes | None:
        while (found := self._held.find(end)) < 0:
            if len(self._held) > HEAD_BYTES_MAX:
                raise BadRequest(431, f"a head of more than {HEAD_BYTES_MAX} bytes")
            if not self._more():
                return None
        block = bytes(self._held[:found])
        del self._held[: found + len(end)]
        return block

    def _exactly(self, size: int) -> bytes:
        if size < 0:
            raise BadRequest(400, f"a length of {size}")
        if size > BODY_BYTES_MAX:
            raise BadRequest(413, f"a body of more than {BODY_BYTES_MAX} bytes")
        while len(self._held) < size:
            if not self._more():
                raise Left
        data = bytes(self._held[:size])
        del self._held[:size]
        return data

    def _more(self) -> bool:
        data = self.sock.recv(READ_BYTES)
        self._held += data
        return bool(data)


def decoded(head: Head) -> bytes | None:
    """Return a request's body with its content coding undone; None for a coding that is not understood."""
    coding = head.headers.get("content-encoding", "identity").lower()
    if coding == "identity":
        return head.body
    try:
        return gzip.decompress(head.body) if coding == "gzip" else None
    except (OSError, EOFError, zlib.error):
        return None


def head_bytes(delivery: Delivery, chunked: bool) -> bytes:
    """Write status line and headers."""
    known = {status.value: status.phrase for status in HTTPStatus}
    rows = {name.lower(): value for name, value in delivery.headers.items()}
    if delivery.length is not None:
        rows["content-length"] = str(delivery.length)
    if chunked:
        rows["transfer-encoding"] = "chunked"
    if delivery.close_delimited or delivery.then != "end":
        rows["connection"] = "close"
    lines = [f"HTTP/1.1 {delivery.status} {known.get(delivery.status, 'Scripted')}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in rows.items()), "", ""]).encode("latin-1")
