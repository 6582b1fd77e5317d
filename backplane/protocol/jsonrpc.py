"""JSON-RPC 2.0 without any I/O: `Peer` converts between bytes and messages; `process.jsonrpc.Pipe` adds the I/O.

A message is a line or, with `FramedPeer`, a body after a header with its length. Both ends may call, answer and
notify. This module gives the methods no meaning.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.protocol.lines import EVIDENCE_BYTES, LINE_BYTES_MAX, Lines, Overlong, bare, strict

PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603

Id = str | int | None


class RpcError(msgspec.Struct, frozen=True):
    """The reason why a call failed; `gone` is True if the other end ended before it answered."""

    code: int
    message: str
    data: Json = None
    gone: bool = False


class Response(msgspec.Struct, frozen=True):
    """The other end's answer to our call."""

    id: Id
    result: Json = None
    fault: RpcError | None = None


class Request(msgspec.Struct, frozen=True):
    """A call from the other end, which expects an answer."""

    id: Id
    method: str
    params: dict[str, Any]


class Notification(msgspec.Struct, frozen=True):
    """A call from the other end, which expects no answer."""

    method: str
    params: dict[str, Any]


class Malformed(msgspec.Struct, frozen=True):
    """A line that is no message, with the reason and the beginning of the line."""

    why: str
    evidence: bytes
    code: int = PARSE_ERROR
    id: Id = None


Received = Response | Request | Notification | Malformed


class Peer:
    """One end of a JSON-RPC connection, without any I/O."""

    def __init__(self, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._lines = Lines(line_bytes_max)
        self._next = 0
        self.prefixed = 0
        """Number of messages that were read after control characters or terminal sequences before them were skipped."""

    def call(self, method: str, params: Json) -> tuple[Id, bytes]:
        """Encode a call; return its new id, which the answer repeats, and its line."""
        self._next += 1
        return self._next, self.write({"id": self._next, "method": method, "params": params})

    def notify(self, method: str, params: Json) -> bytes:
        return self.write({"method": method, "params": params})

    def answer(self, id: Id, result: Json) -> bytes:
        return self.write({"id": id, "result": result})

    def refuse(self, id: Id, code: int, message: str) -> bytes:
        return self.write({"id": id, "error": {"code": code, "message": message}})

    def write(self, message: dict[str, Any]) -> bytes:
        """Encode a message for the wire."""
        return _encode(message) + b"\n"

    def receive(self, data: bytes) -> list[Received]:
        """Read bytes; return the messages that they complete. Blank lines are skipped."""
        return [self.read(line) for line in self.lines(data)]

    def lines(self, data: bytes) -> list[bytes]:
        """Return the lines that these bytes complete, without the prefixes that `bare` strips; `read` decodes each."""
        return self._bare(self._lines.feed(data))

    def _bare(self, lines: list[bytes]) -> list[bytes]:
        found = []
        for line in filter(bytes.strip, lines):
            message = bare(line)
            self.prefixed += message is not line
            found.append(message)
        return found

    def read(self, line: bytes) -> Received:
        """Read one line; a line that is no message becomes `Malformed`."""
        value = _object(line)
        return value if isinstance(value, Malformed) else self.message(value, line)

    def message(self, value: dict[str, Any], line: bytes) -> Received:
        """Convert an object to a message; a subclass for another protocol of JSON lines replaces this method."""
        return _message(value, line)


class FramedPeer(Peer):
    """One end whose messages each follow a header, `Content-Length: N` and an empty line, as in language servers.

    A header without a length is returned as a line that is no message; reading continues with the next header.
    """

    def __init__(self, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        super().__init__(line_bytes_max)
        self._bytes_max, self._data = line_bytes_max, bytearray()
        self._length: int | None = None
        """Length of the body that is being read; None while a header is read."""
        self._skipped = 0
        """Bytes still to skip of a body over the limit."""

    def write(self, message: dict[str, Any]) -> bytes:
        body = _encode(message)
        return b"Content-Length: %d\r\n\r\n%b" % (len(body), body)

    def lines(self, data: bytes) -> list[bytes]:
        """Return the bodies that these bytes complete."""
        self._data += data
        found: list[bytes] = []
        while self._data:
            if self._skipped:
                skipped = min(self._skipped, len(self._data))
                del self._data[:skipped]
                self._skipped -= skipped
            elif self._length is not None:
                if len(self._data) < self._length:
                    break
                found.append(bytes(self._data[: self._length]))
                del self._data[: self._length]
                self._length = None
            else:
                end = self._data.find(_END_OF_HEADER)
                if end < 0 and len(self._data) <= HEADER_BYTES_MAX:
                    break
                header = bytes(self._data[: end if end >= 0 else len(self._data)])
                del self._data[: len(header) + len(_END_OF_HEADER)]
                lengths = _LENGTH.findall(header)
                if len(lengths) != 1:
                    found.append(header)
                elif int(lengths[0]) > self._bytes_max:
                    self._skipped = int(lengths[0])
                    found.append(Overlong(header))
                else:
                    self._length = int(lengths[0])
        return self._bare(found)


HEADER_BYTES_MAX: Final = 4096
"""Maximum length of a header; longer bytes without an empty line are no header."""
_END_OF_HEADER: Final = b"\r\n\r\n"
_LENGTH: Final = re.compile(rb"(?:^|\r\n)[Cc]ontent-[Ll]ength: *(\d{1,15})(?=\r\n|$)")


def _encode(message: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"jsonrpc": "2.0", **message})


def _object(line: bytes) -> dict[str, Any] | Malformed:
    if isinstance(line, Overlong):
        return Malformed("a line over the limit", bytes(line), INVALID_REQUEST)
    try:
        value = strict(line)
    except ValueError as error:
        return Malformed(f"not JSON: {error}", line[:EVIDENCE_BYTES])
    if not isinstance(value, dict):
        return Malformed("a line that is no object", line[:EVIDENCE_BYTES], INVALID_REQUEST)
    return value


def _message(value: dict[str, Any], line: bytes) -> Received:
    id, method = value.get("id"), value.get("method")
    if id is not None and (isinstance(id, bool) or not isinstance(id, str | int)):
        return Malformed("an id that is neither a string nor an integer", line[:EVIDENCE_BYTES], INVALID_REQUEST)
    if isinstance(method, str):
        params = value.get("params")
        if params is not None and not isinstance(params, dict):
            return Malformed(f"params of {method[:80]} that are no object", line[:EVIDENCE_BYTES], INVALID_PARAMS, id)
        return Request(id, method, params or {}) if "id" in value else Notification(method, params or {})
    if "id" in value and ("result" in value or isinstance(value.get("error"), dict)):
        return Response(id, value.get("result"), _fault(value.get("error")))
    return Malformed("an object that is no message", line[:EVIDENCE_BYTES], INVALID_REQUEST, id)


def _fault(error: Json) -> RpcError | None:
    if not isinstance(error, dict):
        return None
    code = error.get("code")
    code = code if isinstance(code, int) and not isinstance(code, bool) else INTERNAL_ERROR
    return RpcError(code, str(error.get("message") or "no reason was given"), error.get("data"))
