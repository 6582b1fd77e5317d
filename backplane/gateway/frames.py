"""Writes the bytes of a streamed answer: server-sent events, lines of JSON, or one JSON array."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects import framing

encode: Final = msgspec.json.Encoder().encode

Form = Literal["events", "lines", "array"]
KINDS: Final[dict[Form, str]] = {
    "events": "text/event-stream", "lines": "application/x-ndjson", "array": "application/json",
}  # fmt: skip
"""Form of a stream → its content type."""


class Frames:
    """Writes the chunks of one answer.

    Args:
        dialect: the chunks' dialect; needed only for `events`.
    """

    def __init__(self, dialect: Any, form: Form) -> None:
        self._dialect, self._form, self._is_first = dialect, form, True

    def write(self, chunks: Iterable[Json]) -> bytes:
        """Return the bytes of some chunks."""
        if self._form == "events":
            return b"".join(framing.sse_bytes(chunk, self._dialect.event_name(chunk)) for chunk in chunks)
        if self._form == "lines":
            return b"".join(encode(chunk) + b"\n" for chunk in chunks)
        out = b""
        for chunk in chunks:
            out += (b"[" if self._is_first else b",\r\n") + encode(chunk)
            self._is_first = False
        return out

    def end(self, *, has_failed: bool = False) -> bytes:
        """Return the stream's last bytes: the array's bracket, or `[DONE]` if the dialect has it and nothing failed."""
        if self._form == "array":
            return b"[]" if self._is_first else b"]"
        is_named = self._form == "events" and self._dialect.DONE
        return framing.done_bytes() if is_named and not has_failed else b""
