"""Measures and cuts text by the columns that it takes on a terminal. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

import msgspec


class Span(msgspec.Struct, frozen=True):
    """Printable text in one colour, given by name; an empty name is the terminal's own colour."""

    text: str
    colour: str = ""


Line = tuple[Span, ...]
"""One line of a terminal."""


def width(text: str) -> int:
    """Return the columns that printable text takes on a terminal."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fitted(text: str, columns: int) -> str:
    """Return printable text of one line cut to a number of columns; `…` stands for what is left out."""
    if text.isascii():
        return text if len(text) <= columns else text[: max(columns - 1, 0)] + "…"[: max(columns, 0)]
    end = used = 0
    for number, character in enumerate(text, 1):
        used += _columns(character)
        if used > columns:
            return text[:end] + "…"[: max(columns, 0)]
        end = number if used < columns else end
    return text


def padded(text: str, columns: int) -> str:
    """Return printable text cut or padded to exactly this width."""
    text = fitted(text, columns)
    return text + " " * (columns - width(text))


def fitted_line(line: Line, columns: int) -> Line:
    """Return a line cut to a number of columns."""
    text = "".join(span.text for span in line)
    shown = fitted(text, columns)
    return line if shown == text else (*_part(line, 0, len(shown) - 1), Span(shown[-1:]))


def wrapped(line: Line, columns: int, indent: int = 0) -> Iterator[Line]:
    """Yield a line broken at spaces so that each part fits; a word that is wider than that stays whole.

    Args:
        indent: spaces before each part but the first.
    """
    text = "".join(span.text for span in line)
    begins, ends, used = [0], list[int](), 0
    for word in re.finditer(" *[^ ]+", text):
        used += width(word[0])
        if used > columns and word.start() > begins[-1]:
            bare = word[0].lstrip(" ")
            ends.append(word.start())
            begins.append(word.end() - len(bare))
            used = indent + width(bare)
    for begin, end in zip(begins, [*ends, len(text)], strict=True):
        yield (*((Span(" " * indent),) if begin and indent else ()), *_part(line, begin, end))


def _part(line: Line, begin: int, end: int) -> Iterator[Span]:
    """Yield the spans of a line between two characters of its text."""
    for span in line:
        if text := span.text[max(begin, 0) : max(end, 0)]:
            yield Span(text, span.colour)
        begin, end = begin - len(span.text), end - len(span.text)


def tail(text: str, columns: int, rows: int) -> list[str]:
    """Return the last rows that an unfinished printable text takes on a terminal."""
    found, used = [""], 0
    for character in text[-columns * rows :].replace("\t", " ") if columns > 0 else "":
        takes = _columns(character)
        if used + takes > columns:
            found.append("")
            used = 0
        found[-1] += character
        used += takes
    return found[-rows:]
