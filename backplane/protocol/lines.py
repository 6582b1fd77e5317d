"""Bytes to whole lines, and the one strict reader of a line: bounded, UTF-8, bounded depth, strict JSON.

What a line means is not known here; `messages` knows the shapes.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from backplane.contract import canonical
from backplane.contract.canonical import Json
from backplane.redact.tail import LOOK_BYTES

LINE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Longest line: images in base64 need more than 1 MiB, and a peer without a limit is a way to use up memory."""

DEPTH_MAX: Final = 128
"""Deepest nesting of a line: far above real messages, far below where a recursive reader fails."""

VALUES_MAX: Final = 81_920
"""Values in a line: in Python the smallest object takes some 200 bytes and is there three times while it is read, so
a line of 16 MiB could need gigabytes; so many need 50 MiB. A tool's output of a mebibyte has a fifth of that."""

FINAL_VALUE_BYTES: Final = 8
"""Of a `final`, for each value where it has more: it may bring the whole trace, and the shortest events have five
values in 60 bytes. A short one that is full of them has none of those."""

FINAL_VALUES_MAX: Final = 1_048_576
"""The most for the longest `final`: 200,000 short events."""

EVIDENCE_BYTES: Final = 200
"""How much of a bad line an error shows."""

_MARK: Final = b"\xef\xbb\xbf"

_DEPTH_BYTES: Final = 2 * DEPTH_MAX
"""A shorter line cannot be nested too deep."""


_BEFORE_MESSAGE: Final = re.compile(
    rb"(?:[\x00-\x1a\x1c-\x20\x7f]"  # control characters and blanks
    rb"|\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor, modes (ECMA-48, 5.4)
    rb"|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)"  # OSC: a window's title (ECMA-48, 8.3.89)
    rb"|\x1b[PX^_][^\x1b\n]*\x1b\\"  # DCS, SOS, PM, APC (ECMA-48, 5.6)
    rb"|\x1b[ -/]*[0-OQ-WYZ\\`-~]"  # other escape sequences
    rb"|\xef\xbb\xbf)*+(?=\{)"
)
"""Matches what a program that expects a terminal writes before a message on its line."""


def bare(line: bytes) -> bytes:
    """Strip control characters, terminal sequences and byte order marks before a line's `{`; keep any other line."""
    if line[:1] == b"{" or isinstance(line, Overlong) or (found := _BEFORE_MESSAGE.match(line)) is None:
        return line
    rest = line[found.end() :]
    return rest if line[: found.end()].strip() else line


class Overlong(bytes):
    """The beginning of a line that was over the limit and was skipped to its newline: more of it than is shown."""


class Lines:
    """Bytes in any pieces to whole lines, bounded; a line over the limit comes out `Overlong`."""

    def __init__(self, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self.line_bytes_max = line_bytes_max
        self._head_bytes: Final = max(EVIDENCE_BYTES, min(LOOK_BYTES, line_bytes_max))
        self._pieces: list[bytes] = []
        self._held = 0
        self._start: bytes | None = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes, give the lines they complete."""
        if self._start is not None:
            data = self._past_mark(data)
        lines = data.split(b"\n")
        rest = lines.pop()
        if lines and self._held:
            self._hold(lines[0])
            whole = b"".join(self._pieces)
            lines[0] = Overlong(whole[: self._head_bytes]) if self._held > self.line_bytes_max else whole
        if len(data) > self.line_bytes_max:
            lines = [Overlong(line[: self._head_bytes]) if len(line) > self.line_bytes_max else line for line in lines]
        if lines:
            self._pieces, self._held = [], 0
        self._hold(rest)
        return lines

    def end(self) -> bytes:
        """The unfinished last line, at the end of the stream."""
        held = (self._start or b"") + b"".join(self._pieces)
        over = self._held > self.line_bytes_max
        self._pieces, self._held, self._start = [], 0, None
        return Overlong(held[: self._head_bytes]) if over else held

    def _past_mark(self, data: bytes) -> bytes:
        """Take a byte order mark off the very start, where it may come in pieces."""
        data = (self._start or b"") + data
        if len(data) < len(_MARK) and _MARK.startswith(data):
            self._start = data
            return b""
        self._start = None
        return data.removeprefix(_MARK)

    def _hold(self, piece: bytes) -> None:
        if not piece:
            return
        self._held += len(piece)
        if self._held <= self.line_bytes_max:
            self._pieces.append(piece)
        elif len(self._pieces) != 1 or len(self._pieces[0]) != self._head_bytes:
            # Only the beginning is kept, for the error: memory stays at what the limit allows.
            self._pieces = [b"".join([*self._pieces, piece[: self._head_bytes]])[: self._head_bytes]]


class _Tag(msgspec.Struct):
    t: str = ""


_LONE_SURROGATE: Final = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)

_decode_tag: Final = msgspec.json.Decoder(_Tag).decode


def strict(line: bytes) -> Json:
    """Read one line as strict JSON: UTF-8, no lone surrogate, no NaN; values, depth and numbers are bounded.

    Raises:
        ValueError: with the reason in words.
    """
    if len(line) > VALUES_MAX:
        _refuse_too_many(line)
    if not line.isascii():
        line.decode()
    if len(line) > _DEPTH_BYTES and canonical.deeper(line, DEPTH_MAX):
        raise ValueError(f"nested deeper than {DEPTH_MAX} levels")
    try:
        value = canonical.decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(_reason(line, str(error))) from error
    if canonical.may_be_endless(line):
        canonical.encode(value)  # An integer of over 308 digits has no value that a peer could read.
    return value


def _reason(line: bytes, theirs: str) -> str:
    """Why a line is no JSON; its reader takes half of a surrogate pair for the end of the line."""
    lone = _LONE_SURROGATE.search(line.replace(b"\\\\", b"\1\1"))
    if lone is not None and ("surrogate" in theirs or "truncated" in theirs):
        return f"a lone surrogate (byte {lone.start()}): {lone[0].decode()} is half of a character"
    return "it ends in the middle" if "truncated" in theirs else theirs


def _refuse_too_many(line: bytes) -> None:
    """Look for too many values before anything of a line becomes an object. Raises ValueError."""
    # Those inside of texts counted as well there are seldom too many.
    commas = line.count(b",")
    if commas <= VALUES_MAX and commas + line.count(b"[") + line.count(b"{") + line.count(b'"') // 2 <= 2 * VALUES_MAX:
        return
    limit = VALUES_MAX
    if _decode_tag(line).t == "final":
        limit = max(limit, min(len(line) // FINAL_VALUE_BYTES, FINAL_VALUES_MAX))
    if canonical.values(line) > limit:
        raise ValueError(f"more than {limit} values in a line")
