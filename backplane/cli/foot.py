"""The foot of a live run's terminal: what it does now, painted while its text goes above. Writes nothing itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from backplane.cli import streams
from backplane.cli.console import Look
from backplane.cli.painter import IDLE_S, Painter
from backplane.contract.events import AgentEvent
from backplane.view import live
from backplane.view.columns import Line
from backplane.view.picture import Picture

HELD_CHARS_MAX: Final = 256 * 1024
"""Text that waits for the next frame; a terminal that takes less makes the run wait."""


class Foot:
    """What one terminal shows of a run, event by event.

    Attributes:
        picture: of the run so far.
    """

    def __init__(self, look: Look, picture: Picture) -> None:
        self.picture = picture
        self._look = look
        self._painter = Painter(look)
        self._painted = 0.0
        self._is_new = False
        self._away = 0

    def add(self, text: str, events: Sequence[AgentEvent]) -> None:
        """Add what events say, and their text."""
        self._painter.add(text)
        for event in events:
            self.picture.take(event)
        self._is_new = True

    @property
    def is_full(self) -> bool:
        """Whether so much text waits that nothing should be added before it is written."""
        return self._painter.held > HELD_CHARS_MAX

    @property
    def is_due(self) -> bool:
        """Whether there is something new to paint, the seconds among it."""
        return not self._away and (self._is_new or time.monotonic() - self._painted >= IDLE_S)

    def frame(self) -> str:
        """What to write now."""
        self._painted, self._is_new = time.monotonic(), False
        columns = streams.columns()
        return self._painter.frame(self._lines(columns), columns)

    def clear(self) -> str:
        """What to write so that the text of the run stands there and nothing else."""
        return self._painter.frame((), streams.columns())

    def continued(self) -> None:
        """Paint below what the shell has written while we were stopped."""
        self._painter.forget()
        self._is_new = True

    @contextmanager
    def away(self) -> Iterator[None]:
        """Paint nothing while somebody types there."""
        self._away += 1
        try:
            yield
        finally:
            self._away -= 1
            self._is_new = True

    def _lines(self, columns: int) -> list[Line]:
        if self._away:
            return []
        return live.block(
            self.picture,
            now_ms=time.time_ns() // 1_000_000,
            written=streams.printable(self._look.written),
            columns=columns,
            rows=streams.rows(),
        )
