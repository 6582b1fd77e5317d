"""JSON without reading it: what stands outside of its texts, in a few passes through C.

Escapes are taken away first, so that every quotation mark begins or ends a text. No pattern repeats an alternative, so
the time is linear in whatever is sent; of what is no JSON, all up to the first mistake is seen as a reader sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

_AT_ONCE_BYTES: Final = 65_536
"""As much is split at once: a text full of quotation marks takes fifty times its memory."""

_BYTES: Final = bytes(range(256))
_ROUND: Final = bytes.maketrans(b"{}", b"[]")
_PAIRS_MIN: Final = 20
"""Removing the innermost pairs of brackets is worth a pass while they are one in so many, a tenth of all."""


_VALUE_BYTES: Final = 100
"""Of memory for each value beside its letters: an empty list takes 56, an object of one member 184."""


def changed(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """JSON after `change` of what stands outside of its texts: a piece a call, with a quotation mark for a text's ends.

    Only for what has been read as JSON: no text holds a control byte, so two of them can hide the escapes.
    """
    hidden = data.replace(b"\\\\", b"\1\1").replace(b'\\"', b"\2\2") if b"\\" in data else data
    out = []
    for pieces, inside in _pieces(hidden):
        pieces[inside::2] = change(b'"'.join(pieces[inside::2])).split(b'"')
        out.append(b'"'.join(pieces))
    whole = b"".join(out)
    return whole.replace(b"\1\1", b"\\\\").replace(b"\2\2", b'\\"') if hidden is not data else whole


def values(data: bytes) -> int:
    """How many values there are, or a little fewer: as many as commas, or as half of those, texts and opening brackets,
    whichever is more."""
    bare = _bare(data)
    commas = marks = 0
    for piece in _kept(bare, b",[{"):
        commas += piece.count(b",")
        marks += len(piece)
    return max(commas, (marks + bare.count(b'"') // 2) // 2)


def weight(data: bytes) -> int:
    """How many bytes of memory the values take once they are read, as far as their number and length tell."""
    return len(data) + _VALUE_BYTES * values(data)


def deeper(data: bytes, levels: int) -> bool:
    """Whether JSON is nested deeper than so many levels."""
    if data.count(b"{") + data.count(b"[") <= levels:
        return False
    steps = b"".join(_kept(_bare(data), b"[]{}")).translate(_ROUND)
    unclosed = 2 * steps.count(b"[") - len(steps)
    if unclosed > levels:
        return True
    steps += b"]" * unclosed
    # Without its innermost brackets everything is one level shallower.
    while _PAIRS_MIN * steps.count(b"[]") > len(steps):
        steps, levels = steps.replace(b"[]", b""), levels - 1
    depth, deepest = -1, 0
    for hill in steps.split(b"]["):
        # Once up and once down, but for the brackets that the split took.
        up = hill.count(b"[")
        deepest = max(deepest, depth + up + 1)
        depth += 2 * up - len(hill)
    return deepest > levels


def _bare(data: bytes) -> bytes:
    return data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data


def _kept(bare: bytes, keep: bytes) -> Iterator[bytes]:
    """Those of some bytes that stand outside of texts. Most texts hold none, and go as pairs of quotation marks."""
    few = bare.translate(None, _BYTES.translate(None, keep + b'"')).replace(b'""', b"")
    for pieces, inside in _pieces(few):
        yield b"".join(pieces[inside::2])


def _pieces(data: bytes) -> Iterator[tuple[list[bytes], int]]:
    """What stands between quotation marks, and which of it is the first outside of a text."""
    at = inside = 0
    while at < len(data):
        end = data.find(b'"', at + _AT_ONCE_BYTES) + 1 or len(data)
        pieces = data[at:end].split(b'"')
        yield pieces, inside
        inside = (inside + len(pieces) - 1) % 2
        at = end
