"""The bytes of a streamed answer: server-sent events, or one JSON array."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects import framing

encode: Final = msgspec.json.Encoder().encode


class Frames:
    """Writes the chunks of one answer.

    Args:
        dialect: the dialect of the chunks.
        as_array: write one JSON array, as Gemini does without `alt=sse`.
    """

    def __init__(self, dialect: Any, *, as_array: bool) -> None:
        self._dialect, self._as_array, self._is_first = dialect, as_array, True
        self.kind = "application/json" if as_array else "text/event-stream"

    def write(self, chunks: Iterable[Json]) -> bytes:
        """Return the bytes of chunks."""
        if not self._as_array:
            return b"".join(framing.sse_bytes(chunk, self._dialect.event_name(chunk)) for chunk in chunks)
        out = b""
        for chunk in chunks:
            out += (b"[" if self._is_first else b",\r\n") + encode(chunk)
            self._is_first = False
        return out

    def end(self, *, has_failed: bool = False) -> bytes:
        """Return the last bytes; a failure has no last word."""
        if self._as_array:
            return b"[]" if self._is_first else b"]"
        return framing.done_bytes() if self._dialect.DONE and not has_failed else b""
