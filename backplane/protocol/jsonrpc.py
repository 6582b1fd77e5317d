"""JSON-RPC 2.0, one object a line: `Peer` turns bytes into calls and back; `pipe` speaks it over two descriptors.

Both ends are alike: each may ask, answer and notify. What the methods mean is not known here, and no event loop.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.protocol import EVIDENCE_BYTES, LINE_BYTES_MAX, Lines, Overlong, bounded, strict

PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603

Id = str | int | None


class Fault(msgspec.Struct, frozen=True):
    """Why a call failed, as the other end said it; `gone` when it could not say anything any more."""

    code: int
    message: str
    data: Json = None
    gone: bool = False


class Reply(msgspec.Struct, frozen=True):
    """The answer to a call of ours."""

    id: Id
    result: Json = None
    fault: Fault | None = None


class Request(msgspec.Struct, frozen=True):
    """A call of the other end, which wants an answer."""

    id: Id
    method: str
    params: dict[str, Any]


class Notification(msgspec.Struct, frozen=True):
    """A notification."""

    method: str
    params: dict[str, Any]


class Malformed(msgspec.Struct, frozen=True):
    """A line that is no message: what is wrong with it, and how it begins."""

    why: str
    evidence: bytes
    code: int = PARSE_ERROR
    id: Id = None


Received = Reply | Request | Notification | Malformed


class Peer:
    """One end of the conversation, without any I/O."""

    def __init__(self, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._lines = Lines(line_bytes_max)
        self._next = 0

    def call(self, method: str, params: Json) -> tuple[Id, bytes]:
        """A question with an id of its own; the answer carries it."""
        self._next += 1
        return self._next, _line({"id": self._next, "method": method, "params": params})

    def notify(self, method: str, params: Json) -> bytes:
        return _line({"method": method, "params": params})

    def answer(self, id: Id, result: Json) -> bytes:
        return _line({"id": id, "result": result})

    def refuse(self, id: Id, code: int, message: str) -> bytes:
        return _line({"id": id, "error": {"code": code, "message": message}})

    def receive(self, data: bytes) -> list[Received]:
        """Take bytes, give the messages they complete; blank lines are nothing."""
        return [self.read(line) for line in self.lines(data)]

    def lines(self, data: bytes) -> list[bytes]:
        """The lines that these bytes complete, as they came; `read` says what each is."""
        return [line for line in self._lines.feed(data) if line.strip()]

    def read(self, line: bytes) -> Received:
        """Read one line; a line that is no message is one of the values, too."""
        value = _object(line)
        return value if isinstance(value, Malformed) else self.message(value, line)

    def message(self, value: dict[str, Any], line: bytes) -> Received:
        """Read an object as a message; another protocol of such lines has its own words here, and in what is said."""
        return _message(value, line)


def _line(message: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"jsonrpc": "2.0", **message}) + b"\n"


def _object(line: bytes) -> dict[str, Any] | Malformed:
    if isinstance(line, Overlong):
        return Malformed("a line over the limit", bytes(line), INVALID_REQUEST)
    try:
        bounded(line)
        value = strict(line)
    except (ValueError, RecursionError) as error:
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
        return Reply(id, value.get("result"), _fault(value.get("error")))
    return Malformed("an object that is no message", line[:EVIDENCE_BYTES], INVALID_REQUEST, id)


def _fault(error: Json) -> Fault | None:
    if not isinstance(error, dict):
        return None
    code = error.get("code")
    code = code if isinstance(code, int) and not isinstance(code, bool) else INTERNAL_ERROR
    return Fault(code, str(error.get("message") or "no reason was given"), error.get("data"))
