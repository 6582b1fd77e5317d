"""Reads TOML of anybody's in a bounded time: the standard reader takes the square of a key's parts.

What is over a bound is refused before that reader sees it, as malformed as what it refuses itself.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any, Final

BYTES_MAX: Final = 1024 * 1024
"""Largest text read: a configuration of a hundred backends takes some 20 KiB."""

DOTS_MAX: Final = 32
"""Most dots of one key or header, outside quotes: a setting has three."""

_TOKENS: Final = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*+(?:"{3,5})?'
    r"|'''(?:[^']|'(?!''))*+(?:'{3,5})?"
    r'|"(?:[^"\\\n]|\\.)*+"?'
    r"|'[^'\n]*+'?"
    r"|#[^\n]*+"
    r"|[.\n=,\[\]{}]",
    re.DOTALL,
)
"""Strings, comments, dots, and what stands between keys. A string without an end goes to that of its line or of the
text, where the reader stops as well: so nothing is looked at twice."""


def loads(data: bytes) -> dict[str, Any]:
    """Read a text, in a second or two at worst.

    Raises:
        ValueError: it is no UTF-8, no TOML, or over one of the bounds.
        RecursionError: it is nested too deep for the reader.
    """
    if len(data) > BYTES_MAX:
        raise ValueError(f"over {BYTES_MAX} bytes")
    text = data.decode()
    # No key goes over a line's end, and hardly any line has that many dots.
    if any(line.count(".") > DOTS_MAX for line in text.split("\n")):
        _require_short_keys(text)
    # With a newline at the end a fault on the last line has a number, too.
    return tomllib.loads(text + "\n")


def _require_short_keys(text: str) -> None:
    dots = 0
    for token in _TOKENS.finditer(text):
        first = text[token.start()]
        if first == ".":
            dots += 1
            if dots > DOTS_MAX:
                line = text.count("\n", 0, token.start()) + 1
                raise ValueError(f"a key of more than {DOTS_MAX} dots (at line {line})")
        elif first not in "\"'#":
            dots = 0
