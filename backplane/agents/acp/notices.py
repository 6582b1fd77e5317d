"""Words that an agent puts among its model's, told apart by rows of its profile. Pure.

The protocol has no word for a failure of the model in the middle of a turn, so agents write it as a message.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from backplane.agents.acp.failure import SAID_CHARS_MAX


class Row(Protocol):
    """One kind of words; `agent_options.Notice` says what its members mean."""

    @property
    def says(self) -> str: ...
    @property
    def code(self) -> str | None: ...
    @property
    def retry(self) -> bool: ...


class Notices:
    """The rows of one agent; none where it has none."""

    def __init__(self, rows: Sequence[Row] = ()) -> None:
        self._rows = [(re.compile(row.says, re.DOTALL), row) for row in rows if row.says]
        self.silent = next((row.code for row in rows if not row.says), None)
        """The failure of a turn that ends after a tool and without a word; None where that says nothing."""

    def find(self, chunk: str) -> Row | None:
        """Return the first row that a chunk of a message begins with, None for words of the model."""
        begin = chunk[:SAID_CHARS_MAX]
        return next((row for pattern, row in self._rows if pattern.match(begin)), None)
