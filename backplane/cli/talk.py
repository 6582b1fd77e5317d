"""A turn of a session as it stands on a terminal: words as they come, one line a tool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from backplane.cli import streams
from backplane.contract.conversation import StopReason
from backplane.providers import (
    ErrorEvent,
    MessageDoneEvent,
    StreamEvent,
    TextDeltaEvent,
    ToolResultEvent,
    ToolUseEndEvent,
)
from backplane.providers.reading import text_of

INPUT_CHARS_MAX: Final = 200
"""Of a tool's input or output on its line."""


class Teller:
    """Writes what a turn tells.

    Attributes:
        stop_reason: why the turn ended; None until then.
        usage_line: what it took, for people; empty until then.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._at_start = True
        self._error: tuple[str, str] | None = None
        """The last error that was written: the turn's end tells the agent's own once more."""
        self.stop_reason: StopReason | None = None
        self.usage_line = ""

    def tell(self, event: StreamEvent) -> None:
        """Write one event."""
        if isinstance(event, TextDeltaEvent):
            if event.delta:
                self._write(streams.printable(event.delta))
                self._at_start = event.delta.endswith("\n")
        elif isinstance(event, ToolUseEndEvent):
            self.line(f"tool: {event.name} {streams.one_line(text_of(event.input), INPUT_CHARS_MAX)}")
        elif isinstance(event, ToolResultEvent):
            word = "tool failed" if event.is_error else "tool done"
            self.line(f"{word}: {streams.one_line(event.output, INPUT_CHARS_MAX)}")
        elif isinstance(event, ErrorEvent):
            hint, told = event.error.cause.hint, (event.error.cause.code, event.error.message)
            if told == self._error:
                return
            self._error = told
            self.line(f"error: {event.error.cause.code}: {streams.one_line(event.error.message, 1000)}")
            if hint:
                self.line(f"  {streams.one_line(hint, 1000)}")
        elif isinstance(event, MessageDoneEvent):
            self._end(event)

    def line(self, text: str) -> None:
        """Write a line of its own."""
        self._write(("" if self._at_start else "\n") + text + "\n")
        self._at_start = True

    def _end(self, event: MessageDoneEvent) -> None:
        self.stop_reason = event.stop_reason
        if not self._at_start:
            self.line("")
        if event.stop_reason != "end_turn":
            self.line(f"ended: {event.stop_reason}")
        used = event.usage
        if used.total_tokens is not None:
            cost = "" if used.cost_usd_micros is None else f", ${used.cost_usd_micros / 1e6:.4f}"
            self.usage_line = f"{used.input_tokens} tokens in, {used.output_tokens} out{cost}"
