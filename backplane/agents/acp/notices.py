"""Words that an agent puts among its model's, told apart by rows of its profile. Pure.

The protocol has no word for a failure of the model in the middle of a turn, so agents write it as a message.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from backplane.agents.rows import Notice

NOTICE_CHARS_MAX: Final = 2000
"""Of an agent's own words among its model's."""


class Notices:
    """The rows of one agent; none where it has none."""

    def __init__(self, rows: Sequence[Notice] = ()) -> None:
        self._rows = [(re.compile(row.says, re.DOTALL), row) for row in rows if row.says]
        self.silent = next((row.code for row in rows if not row.says), None)
        """The failure of a turn that ends after a tool and without a word; None where that says nothing."""

    def find(self, chunk: str) -> Notice | None:
        """Return the first row that a chunk of a message begins with, None for words of the model."""
        begin = chunk[:NOTICE_CHARS_MAX]
        return next((row for pattern, row in self._rows if pattern.match(begin)), None)
