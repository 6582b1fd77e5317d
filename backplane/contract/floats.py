"""JSON that is full of floats for which the fast decoder takes 20 µs each: found by their looks, and read by `float`,
which takes less than one. Every float comes out the same.
"""

from __future__ import annotations

import marshal
import math
import re
from itertools import islice
from typing import Any, Final

import msgspec

_SLOW_MAX: Final = 512
"""So many of the slowest take the decoder 10 ms."""

_SLOW: Final = re.compile(
    r"[eE](?:(?<=[0-9.]{21}[eE])|\+?0*(?:1[0-9]|2[0-3]|28[89]|29[0-9]|[3-9][0-9]{2})(?![0-9])"
    r"|-0*(?:2[89][0-9]|3[0-4][0-9])(?![0-9]))"
)
"""The exponent of a float with more digits than 64 bits hold, near the ends of the range, or (a twentieth as slow)
halfway between two others."""

_LONG_DIGITS: Final = 256
"""So many digits come near the ends of the range without an exponent."""

_ALIKE: Final = bytes(0x30 if 0x30 <= byte <= 0x39 else 0x65 if byte == 0x45 else byte for byte in range(256))


def many_slow(data: bytes) -> bool:
    """Whether there may be so many slow floats that another way is faster."""
    alike = data.translate(_ALIKE, b"+-.")
    if b"0" * _LONG_DIGITS in alike:
        return True
    if alike.count(b"0e0") <= _SLOW_MAX:
        return False
    return next(islice(_SLOW.finditer(data.decode("latin-1")), _SLOW_MAX, None), None) is not None


_decode: Final = msgspec.json.Decoder(float_hook=float).decode
_BINARY: Final = 2
"""The first version of `marshal` that stores floats as they are, and the last that stores one value twice as two."""
_INFINITE: Final = tuple(marshal.dumps(float(sign + "inf"), _BINARY) for sign in "+-")
"""No text in UTF-8 holds these bytes, and no other float; a long integer may."""


def decode(data: bytes | str) -> Any:
    """Read JSON, as exactly as the decoder without a hook does.

    Raises:
        ValueError: not strict JSON, or a number out of range.
    """
    value = _decode(data)
    stored = marshal.dumps(value, _BINARY)  # So all floats are looked at in a tenth of the time.
    if any(infinite in stored for infinite in _INFINITE) and _holds_infinite(value):
        raise ValueError("a number out of range")
    return value


def _holds_infinite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isinf(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return False
    return any(map(_holds_infinite, value))
