"""The terminal of a live run: a few lines that are painted over at its foot, while text goes above them.

The foot is painted anew if it has changed; the screen is never cleared. Where nothing may be painted over, the text
goes out alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from backplane.cli import streams
from backplane.view.columns import Line, width
from backplane.view.console import Look

if TYPE_CHECKING:
    from backplane.contract.events import AgentEvent
    from backplane.view.picture import Picture

FRAME_S: Final = 0.1
"""Least seconds between two frames: nobody reads faster."""

IDLE_S: Final = 1.0
"""Seconds between two frames if nothing has happened: the run's time goes on."""

HELD_CHARS_MAX: Final = 256 * 1024
"""Most characters that wait for the next frame; then they are written at once, and a slow terminal slows the run."""

_BEGIN: Final = "\x1b[?2026h"
_END: Final = "\x1b[?2026l"
"""Terminals that know these marks show what is between them at once; others ignore them."""


def look(*, plain: bool = False, sessions: bool = False) -> Look:
    """Return how stdout is to be drawn: by the terminal that it is, and the environment."""
    painted = not plain and streams.is_painted(streams.STDOUT)
    colours = streams.is_coloured(streams.STDOUT)
    return Look(painted, colours=colours, sessions=sessions, columns=lambda: streams.size()[0])


def picture(backend: str, model: str | None, task: str = "", run_id: str = "") -> Picture:
    """Return the picture of a run that begins now."""
    from backplane.contract.canonical import timestamp_at
    from backplane.view.picture import Picture

    return Picture(run_id=run_id, backend=backend, task=task, model=model, started_at=timestamp_at(time.time_ns()))


class Terminal:
    """The text and the foot of one run on stdout; it returns what to write, and writes nothing.

    Args:
        picture: of the run so far, drawn at the foot; None if nothing is painted over.
    """

    def __init__(self, look: Look, picture: Picture | None) -> None:
        self.look, self.picture = look, picture
        self._above: list[str] = []
        self._held = 0
        self._drawn: list[tuple[int, str]] = []
        """Width and text of each line of the foot."""
        self._columns = self._away = 0
        self._painted = 0.0
        self._is_new = False

    def add(self, text: str, events: Iterable[AgentEvent] = ()) -> None:
        """Add text of whole lines above the foot, and events to the picture."""
        if text:
            self._above.append(text)
            self._held += len(text)
        if self.picture is not None:
            for event in events:
                self.picture.take(event)
        self._is_new = True

    @property
    def is_full(self) -> bool:
        """True if the text must not wait for the next frame."""
        return self._held > (HELD_CHARS_MAX if self.picture is not None else 0)

    @property
    def is_due(self) -> bool:
        """True if there is something new to paint, the run's seconds among it."""
        is_later = self.picture is not None and time.monotonic() - self._painted >= IDLE_S
        return not self._away and (self._is_new or is_later)

    def frame(self) -> str:
        """Return what to write now."""
        self._painted, self._is_new = time.monotonic(), False
        columns, rows = streams.size()
        return self.draw(self._foot(columns, rows), columns)

    def clear(self) -> str:
        """Return what leaves the text alone on the terminal."""
        return self.draw((), streams.size()[0])

    def continued(self) -> None:
        """Paint the next foot below what others have written meanwhile."""
        self._drawn, self._is_new = [], True

    @contextmanager
    def away(self) -> Iterator[None]:
        """Paint nothing inside the block: a person types there."""
        self._away += 1
        try:
            yield
        finally:
            self._away, self._is_new = self._away - 1, True

    def _foot(self, columns: int, rows: int) -> Sequence[Line]:
        if self._away or self.picture is None:
            return ()
        from backplane.view import live

        now_ms, written = time.time_ns() // 1_000_000, streams.printable(self.look.written)
        return live.block(self.picture, now_ms=now_ms, written=written, columns=columns, rows=rows)

    def draw(self, lines: Sequence[Line], columns: int) -> str:
        """Return what to write so that the added text and these lines stand there; empty if they do.

        Args:
            lines: each narrower than `columns`, the width of the terminal now.
        """
        above, self._above, self._held = "".join(self._above), [], 0
        if self.picture is None:
            return above
        drawn = [(sum(width(span.text) for span in line), self.look.dress_line(line)) for line in lines]
        if not above and (drawn, columns) == (self._drawn, self._columns):
            return ""
        # A narrower window has broken the lines that stand there.
        rows = sum(max(1, -(-taken // max(columns, 1))) for taken, _ in self._drawn)
        erased = f"\r\x1b[{rows}A\x1b[J" if rows else ""
        self._drawn, self._columns = drawn, columns
        text = erased + above + "".join(f"{line}\n" for _, line in drawn)
        return f"{_BEGIN}{text}{_END}" if text else ""
