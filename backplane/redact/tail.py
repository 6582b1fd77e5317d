"""The kept end of a long stream, with enough bytes before it to find a secret that the cut goes through."""

from __future__ import annotations

from typing import Final

LOOK_BYTES: Final = 16 * 1024
"""Bytes before a cut that are searched for a secret that the cut goes through; private keys are shorter."""


class OutputTail(bytes):
    """The shown end of a stream, and the bytes right before it, in which a secret may begin."""

    before: bytes

    def __new__(cls, shown: bytes, before: bytes = b"") -> OutputTail:
        """Make the bytes `shown`, with `before` as an attribute."""
        made = super().__new__(cls, shown)
        made.before = before
        return made


NO_OUTPUT: Final = OutputTail(b"")
"""The tail of an empty stream."""
