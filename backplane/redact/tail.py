"""The last bytes of a stream that is longer than what is kept of it."""

from __future__ import annotations

from typing import Final

LOOK_BYTES: Final = 16 * 1024
"""Bytes searched beyond a cut for a secret that it may go through: longer than a private key."""


class OutputTail(bytes):
    """The shown end of a stream, and the bytes right before it, in which a secret may begin."""

    before: bytes

    def __new__(cls, shown: bytes, before: bytes = b"") -> OutputTail:
        """Put the two together; `before` is no part of the bytes."""
        made = super().__new__(cls, shown)
        made.before = before
        return made


NO_OUTPUT: Final = OutputTail(b"")
"""The tail of an empty stream."""
