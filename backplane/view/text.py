"""Escapes foreign text for a terminal or a page. Pure, and light: every command loads it."""

from __future__ import annotations

import re
from typing import Final

SHOWN_CHARS_MAX: Final = 400
"""Characters of a text in an error's line, enough for the reason; the rest is cut."""

# Characters that a terminal acts on, that reverse text, that are invisible, or that UTF-8 or XML cannot write.
# `re` compiles the pattern on first use: it takes a millisecond, and no start waits for it.
UNPRINTABLE: Final = (
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
STAGED: Final = r"/[^\s'\"=:;|&<>()]*/stage/[0-9a-f]{8}-[0-9a-f-]{27}/tree(?![^/\s'\":;|&<>()])(/(?=[^\s'\"]))?"
_MARK: Final = "[\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]"
MARKS: Final = f"{_MARK}{_MARK}{{8,}}"
"""More marks over one character than a writing system has; a thousand of them cover a screen or a page."""


def printable(text: str) -> str:
    """Return foreign text with its control characters written out; newlines and tabs stay."""
    shown = re.sub(UNPRINTABLE, _escaped, text)
    return shown if shown.isascii() else re.sub(MARKS, lambda found: found[0][:8] + "…", shown)


def in_workspace(text: str) -> str:
    """Return text with paths in a run's copy of the workspace as they are in the workspace."""
    return re.sub(STAGED, lambda found: "" if found[1] else ".", text)


def one_line(text: object, chars_max: int = SHOWN_CHARS_MAX, *, keep: str = "beginning") -> str:
    """Return foreign text on one line, cut to `chars_max`; `keep="end"` keeps the end, as for evidence."""
    whole = str(text)
    cut = whole if len(whole) <= chars_max else "…" + whole[-chars_max:] if keep == "end" else whole[:chars_max] + "…"
    return printable(cut).replace("\n", "\\n").replace("\t", " ")


def _escaped(match: re.Match[str]) -> str:
    number = ord(match[0])
    if match[0] == "\r":
        return "\\r"
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, as `1 call` and `2 calls`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
