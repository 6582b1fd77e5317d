"""A few lines at the foot of a terminal that are painted over, while text goes above them into the scrollback.

Only lines that have changed are written, by cursor movements within the block; the screen is never cleared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from backplane.cli.console import Look
from backplane.view.columns import Line, width

IDLE_S: Final = 1.0
"""Between two frames where nothing has happened: the seconds go on."""

_BEGIN: Final = "\x1b[?2026h"
_END: Final = "\x1b[?2026l"
"""The terminal shows what is between them at once, where it knows how; others pass them over."""


class Painter:
    """What stands on one terminal. Gives what to write; writes nothing."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._above: list[str] = []
        self._drawn: list[tuple[int, str]] = []
        """Width and text of each line of the block."""
        self._columns = 0
        self.held = 0
        """Characters of text that wait for the next frame."""

    def add(self, text: str) -> None:
        """Add text of whole lines to what goes above the block."""
        if text:
            self._above.append(text)
            self.held += len(text)

    def frame(self, lines: Sequence[Line], columns: int) -> str:
        """What to write so that the text that was added and this block stand there; empty where they do.

        Args:
            lines: each narrower than `columns`, the width of the terminal now.
        """
        drawn = [(sum(width(span.text) for span in line), self._look.dress_line(line)) for line in lines]
        above, self._above, self.held = "".join(self._above), [], 0
        if above or columns != self._columns or len(drawn) != len(self._drawn):
            text = self._erased(columns) + above + "".join(f"{line}\n" for _, line in drawn)
        else:
            text = self._changed(drawn)
        self._drawn, self._columns = drawn, columns
        return f"{_BEGIN}{text}{_END}" if text else ""

    def forget(self) -> None:
        """Draw the next block below whatever stands there: something else has written meanwhile."""
        self._drawn = []

    def _erased(self, columns: int) -> str:
        """Go to where the block begins and remove it; a narrower window has broken its lines."""
        rows = sum(max(1, -(-taken // max(columns, 1))) for taken, _ in self._drawn)
        return f"\r\x1b[{rows}A\x1b[J" if rows else ""

    def _changed(self, drawn: list[tuple[int, str]]) -> str:
        first = next((n for n, (old, new) in enumerate(zip(self._drawn, drawn, strict=True)) if old != new), None)
        if first is None:
            return ""
        rows = [
            f"\r\x1b[K{new[1]}\n" if old != new else "\n"
            for old, new in zip(self._drawn[first:], drawn[first:], strict=True)
        ]
        return f"\x1b[{len(rows)}A" + "".join(rows)
