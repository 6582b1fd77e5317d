"""The last bytes of a stream that is longer than what is kept of it."""

from __future__ import annotations

from typing import Final

LOOK_BYTES: Final = 16 * 1024
"""How much beyond a cut is looked at for what the cut may go through: longer than a private key."""


class OutputTail(bytes):
    """What is shown of the end, and what stands right before it: a secret may begin there."""

    before: bytes

    def __new__(cls, shown: bytes, before: bytes = b"") -> OutputTail:
        """Put the two together; `before` is no part of the bytes."""
        made = super().__new__(cls, shown)
        made.before = before
        return made


NO_OUTPUT: Final = OutputTail(b"")
"""Of a stream that said nothing."""
