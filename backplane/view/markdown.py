"""Markdown of an agent's words as lines with colours, one line at a time as they come. Pure.

Only what agents write daily is drawn: headings, lists, quotes, rules, code and bold. Everything else stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from backplane.view.columns import Line, Span

_FENCE: Final = re.compile(r" {0,3}(```+|~~~+)")
_HEADING: Final = re.compile(r"#{1,6} +(.*?)[ #]*")
_ITEM: Final = re.compile(r"( *)[-*+] +(?=\S)")
_NUMBER: Final = re.compile(r" *\d+[.)] +(?=\S)")
_RULE: Final = re.compile(r" {0,3}([-*_])( *\1){2,} *")
_INLINE: Final = re.compile(r"`([^`]+)`|\*\*(?=\S)(.+?)(?<=\S)\*\*")


class Markdown:
    """The lines of one text; what a line means may depend on those before it."""

    def __init__(self) -> None:
        self._fence = ""
        """The mark that opened a block of code, in which nothing else is a mark."""
        self.indent: int | None = None
        """Spaces before the rest of the last line where it is broken; None for code and tables, which are not."""

    def line(self, text: str) -> Line:
        """Return the next line, without its end, with its colours."""
        self.indent = None
        fence = _FENCE.match(text)
        if self._fence:
            if fence is not None and fence[1].startswith(self._fence) and not text.strip(" `~"):
                self._fence = ""
                return (Span(text, "dim"),)
            return (Span(text, "cyan"),)
        if fence is not None:
            self._fence = fence[1]
            return (Span(text, "dim"),)
        if text.lstrip(" ").startswith("|"):
            return (Span(text),)
        number = _NUMBER.match(text)
        self.indent = number.end() if number is not None else 0
        heading = _HEADING.fullmatch(text)
        if heading is not None:
            return (Span(heading[1], "bold"),)
        if text.startswith(">") or _RULE.fullmatch(text):
            return (Span(text, "dim"),)
        item = _ITEM.match(text)
        if item is not None:
            self.indent = len(item[1]) + 2
            return (Span(f"{item[1]}• "), *_inline(text[item.end() :]))
        return tuple(_inline(text))


def _inline(text: str) -> Iterator[Span]:
    at = 0
    for found in _INLINE.finditer(text):
        if found.start() > at:
            yield Span(text[at : found.start()])
        yield Span(found[1], "cyan") if found[1] is not None else Span(found[2], "bold")
        at = found.end()
    if at < len(text) or not text:
        yield Span(text[at:])
