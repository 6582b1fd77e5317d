"""Splits the bytes of a stream into JSON documents, and writes them: server-sent events, JSON lines, a JSON array.

The documents do not depend on how the bytes are cut into pieces. The dialects read them.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from backplane.contract.canonical import Json
from backplane.errors import TranslationError

EVENT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Maximum size of one event; the largest known are images in base64, some 30 MB. A larger one is an error."""

DONE: Final = b"[DONE]"
"""Data of the event with which the Chat Completions family ends a stream."""

NAME_KEY: Final = "sse_event"
"""Member that we add with an event's name if its data have no type."""

OWN_NAMES: Final = "copilot_"
"""Prefix of the event names of Copilot extensions (docs.github.com, read November 2026)."""

UNREADABLE: Final = (ValueError, RecursionError)
"""Exceptions of the JSON reader: no JSON, no UTF-8, a number out of range, or nesting deeper than the stack."""

_decode: Final = msgspec.json.Decoder().decode
_encode: Final = msgspec.json.Encoder().encode
_BOM: Final = b"\xef\xbb\xbf"


class _Framing:
    """Splits bytes into documents; those that are no JSON are skipped and counted.

    `feed` takes bytes and returns the complete documents, `finish` returns a last one without its end mark; both raise
    `TranslationError` `dialect_mapping_failed` for a document longer than `EVENT_BYTES_MAX`.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self.done = False
        """True after the end mark; `JsonArray` also sets it for framings without one."""
        self._begun = bytearray()
        """The incomplete line or element; a `bytearray`, because 64 MiB may arrive in a million pieces."""

    def _decoded(self, data: bytes) -> list[Json]:
        try:
            return [_decode(data)]
        except UNREADABLE:
            self.skipped += bool(data.strip())
            return []

    def _check(self, size: int) -> None:
        if size > EVENT_BYTES_MAX:
            raise TranslationError("dialect_mapping_failed", f"an event of a stream is over {EVENT_BYTES_MAX} bytes")


class Sse(_Framing):
    """Splits server-sent events.

    Lines may end in LF, CR or CRLF, data may have several lines, comments and unknown fields are skipped, a byte
    order mark may be first. The last event is returned even without a blank line after it, because some gateways omit
    it; data that is no JSON is skipped and counted.

    Args:
        is_named: True to keep the names of events (`NAME_KEY`) if the data are a list or have no `type`.
    """

    def __init__(self, *, is_named: bool = False) -> None:
        super().__init__()
        self.is_named = is_named
        self._started = False
        self._data: list[bytes] = []
        self._name = b""
        self._ends_in_cr = False
        self._size = 0

    def feed(self, data: bytes) -> list[Json]:
        """Take bytes and return the documents that are complete."""
        out: list[Json] = []
        if self._ends_in_cr and data:
            # The CR ended a line; a LF at the start of these bytes belongs to it.
            self._ends_in_cr = False
            if data[:1] == b"\n":
                data = data[1:]
        if not self._started:
            data = bytes(self._begun) + data
            self._begun.clear()
            if _BOM.startswith(data[:3]) and len(data) < 3:
                self._begun += data
                return out
            self._started = True
            data = data.removeprefix(_BOM)
        if b"\r" in data:
            self._ends_in_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = []
        if b"\n" in data:
            lines = (bytes(self._begun) + data).split(b"\n")
            data = lines.pop()
            self._begun.clear()
        self._begun += data
        for line in lines:
            if line[:5] == b"data:":
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
                self._size += len(line)
            elif not line:
                out += self._event()
                self._name = b""
            else:
                self._field(line)
        self._check(self._size + len(self._begun))
        return out

    def finish(self) -> list[Json]:
        """Take the end of the stream; return a last document without its end mark, if it is complete."""
        line = bytes(self._begun)
        self._begun.clear()
        if line[:5] == b"data:":
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        elif line[:1] in (b"{", b"[") and not self._data:
            self._data.append(line)
        elif line and b"data:".startswith(line):
            self.skipped += 1  # the stream was cut in the name of the field
        return self._event()

    def _field(self, line: bytes) -> None:
        if line[:6] == b"event:":
            self._name = line[6:].strip()
            return
        # Some servers answer a request for a stream with JSON: the whole document is one event.
        first = self._data[0] if self._data else line
        if line == b"data" or (first[:1] == b"{" and (first is line or line[:1] in b' \t"}]')):
            self._data.append(b"" if line == b"data" else line)
            self._size += len(line)

    def _event(self) -> list[Json]:
        if not self._data:
            return []
        data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
        self._data = []
        self._size = 0
        if data == DONE or data.strip() == DONE:
            self.done = True
            return []
        found = self._decoded(data)
        if self._name and (self.is_named or self._name == b"error"):
            return [_with_name(value, self._name.decode(errors="replace")) for value in found]
        return found


def _with_name(value: Json, name: str) -> Json:
    if type(value) is dict:
        if name == "error" and not value.keys() & {"error", "type"}:
            return {"error": value}
        # If a vendor's events have a type, the name repeats it; in a Copilot extension the type belongs to the data.
        is_repeated = "type" in value and not name.startswith(OWN_NAMES)
        if is_repeated or "choices" in value or name in ("message", "error"):
            return value
        return {NAME_KEY: name, **value}
    return {NAME_KEY: name, "data": value}


_MARKS: Final = re.compile(rb'\\.?|["{}\[\]]', re.DOTALL)
"""Bytes that can begin or end a document or a text; an escape includes the next byte."""


class JsonArray(_Framing):
    """Splits JSON documents: the elements of one array, lines, or a single object."""

    def __init__(self) -> None:
        super().__init__()
        self.done = True
        self._depth = 0
        self._in_text = False
        self._escaped = False

    def feed(self, data: bytes) -> list[Json]:
        """Take bytes and return the documents that are complete."""
        out: list[Json] = []
        start = 0
        skipped, self._escaped = self._escaped, False
        for found in _MARKS.finditer(data, int(skipped)):
            mark, place = found[0], found.start()
            if mark[:1] == b"\\":
                self._escaped = len(mark) == 1
            elif mark == b'"':
                self._in_text = self._depth > 0 and not self._in_text
            elif self._in_text:
                continue
            elif mark == b"{" or (mark == b"[" and self._depth):
                start = start if self._depth else place
                self._depth += 1
            elif not self._depth:
                self.done = mark == b"]"
            else:
                self._depth -= 1
                if not self._depth:
                    out += self._decoded(bytes(self._begun) + data[start : place + 1])
                    self._begun.clear()
        if self._depth:
            self._begun += data[start:]
            self._check(len(self._begun))
        return out

    def finish(self) -> list[Json]:
        """Drop a document that the stream's end has cut, and count it as skipped."""
        self.skipped += bool(self._begun)
        self._begun.clear()
        return []


class Detecting:
    """Detects the framing by the first bytes, because gateways do not always send the requested one."""

    def __init__(self, *, is_named: bool = False) -> None:
        self._is_named = is_named
        self._head = b""
        self.inner: Sse | JsonArray | None = None

    def feed(self, data: bytes) -> list[Json]:
        """Take bytes and return the documents that are complete."""
        if self.inner is None:
            self._head += data
            head = self._head.lstrip(b"\xef\xbb\xbf \r\n\t")
            self._head = b""
            if not head:
                return []  # Blanks are not kept, as a server may send any number of them.
            data = head
            self.inner = JsonArray() if head[:1] in (b"[", b"{") else Sse(is_named=self._is_named)
        return self.inner.feed(data)

    def finish(self) -> list[Json]:
        """Take the end of the stream; return a last document without its end mark, if it is complete."""
        return [] if self.inner is None else self.inner.finish()

    @property
    def is_done(self) -> bool:
        """True if the stream ended with `[DONE]`."""
        return isinstance(self.inner, Sse) and self.inner.done


def name_and_data(chunk: Json) -> tuple[str | None, Json]:
    """Return the name of an event that `Sse` kept in its document, and the event's data without it."""
    name = chunk.get(NAME_KEY) if type(chunk) is dict else None
    if type(name) is not str:
        return None, chunk
    data = {key: value for key, value in chunk.items() if key != NAME_KEY}
    return name, data["data"] if set(data) == {"data"} else data


def sse_bytes(chunk: Json, name: str | None = None) -> bytes:
    """Write one server-sent event; a name that `Sse` kept in the document has priority over `name`."""
    own, chunk = name_and_data(chunk)
    name = own or name
    head = f"event: {name}\n".encode() if name is not None else b""
    return head + b"data: " + _encode(chunk) + b"\n\n"


def done_bytes() -> bytes:
    return b"data: " + DONE + b"\n\n"
