"""Splits bytes into lines of a bounded length, and reads one line as strict JSON of bounded depth and size.

`messages` defines the shapes of messages.
"""

from __future__ import annotations

import itertools
import re
from typing import Final

import msgspec

from backplane.contract import canonical
from backplane.contract.canonical import Json
from backplane.redact.tail import LOOK_BYTES

LINE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Maximum length of a line: images in base64 need over 1 MiB, and an unlimited line could use up the memory."""

DEPTH_MAX: Final = 128
"""Maximum nesting of a line: far deeper than real messages, but safe for recursive readers."""

VALUES_MAX: Final = 1_048_576
"""Maximum number of values in a line. Each JSON object needs far more memory in Python than on the line, so a line of
16 MiB could need gigabytes. A `final` with a trace of 200,000 short events has about so many values."""

EVIDENCE_BYTES: Final = 200
"""Bytes of a bad line that an error shows."""

_BEFORE_MESSAGE: Final = re.compile(
    rb"(?:[\x00-\x1a\x1c-\x20\x7f]"  # control characters and blanks
    rb"|\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor, modes (ECMA-48, 5.4)
    rb"|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)"  # OSC: a window's title (ECMA-48, 8.3.89)
    rb"|\x1b[PX^_][^\x1b\n]*\x1b\\"  # DCS, SOS, PM, APC (ECMA-48, 5.6)
    rb"|\x1b[ -/]*[0-OQ-WYZ\\`-~]"  # other escape sequences
    rb"|\xef\xbb\xbf)*+(?=\{)"
)
"""Matches the characters that a program for terminals may write before a message on the same line."""


def bare(line: bytes) -> bytes:
    """Strip control characters, terminal sequences and byte order marks before a line's `{`; keep other lines as is."""
    if line[:1] == b"{" or isinstance(line, Overlong) or (found := _BEFORE_MESSAGE.match(line)) is None:
        return line
    rest = line[found.end() :]
    return rest if line[: found.end()].strip() else line


class Overlong(bytes):
    """The beginning of a line over the limit, long enough for an error; the rest of the line was skipped."""


class Lines:
    """Joins pieces of bytes into whole lines; a line over the limit becomes `Overlong`."""

    def __init__(self, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self.line_bytes_max = line_bytes_max
        self._head_bytes: Final = max(EVIDENCE_BYTES, min(LOOK_BYTES, line_bytes_max))
        self._pieces: list[bytes] = []
        self._held = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; return the lines that they complete."""
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
        """Return the unfinished last line at the end of the stream; empty if there is none."""
        rest, over = b"".join(self._pieces), self._held > self.line_bytes_max
        self._pieces, self._held = [], 0
        return Overlong(rest[: self._head_bytes]) if over else rest

    def _hold(self, piece: bytes) -> None:
        if not piece:
            return
        self._held += len(piece)
        if self._held <= self.line_bytes_max:
            self._pieces.append(piece)
        elif len(self._pieces) != 1 or len(self._pieces[0]) != self._head_bytes:
            # Only the beginning is kept, for the error, so that memory stays bounded.
            self._pieces = [b"".join([*self._pieces, piece[: self._head_bytes]])[: self._head_bytes]]


_LONE_SURROGATE: Final = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)


def strict(line: bytes) -> Json:
    """Read one line as strict JSON: UTF-8, no lone surrogate, no NaN, at most `DEPTH_MAX` levels and `VALUES_MAX`
    values, and only numbers that a float can represent.

    Raises:
        ValueError: the line is no such JSON; the error's text gives the reason.
    """
    if not line.isascii():
        line.decode()
    try:
        value = canonical.decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(_reason(line, str(error))) from error
    except RecursionError as error:
        raise ValueError(f"nested deeper than {DEPTH_MAX} levels") from error
    brackets = line.count(b"[") + line.count(b"{")
    # Every value except the first follows a comma or an opening bracket, directly or after its name.
    if brackets > DEPTH_MAX or brackets + line.count(b",") >= VALUES_MAX:
        _check_size(value)
    if canonical.may_be_endless(line):
        canonical.encode(value)  # It raises for an integer of over 308 digits, which no peer could read.
    return value


def _check_size(value: Json) -> None:
    """Raise ValueError for a value of more than `DEPTH_MAX` levels or `VALUES_MAX` values."""
    layer, count = [value], 1
    for _ in range(DEPTH_MAX):
        tables = (one.values() if isinstance(one, dict) else one for one in layer if isinstance(one, dict | list))
        layer = list(itertools.chain.from_iterable(tables))
        count += len(layer)
        if count > VALUES_MAX:
            raise ValueError(f"more than {VALUES_MAX} values")
    if any(isinstance(one, dict | list) for one in layer):
        raise ValueError(f"nested deeper than {DEPTH_MAX} levels")


def _reason(line: bytes, theirs: str) -> str:
    """Return why a line is not JSON: msgspec's message, corrected for half of a surrogate pair."""
    lone = _LONE_SURROGATE.search(line.replace(b"\\\\", b"\1\1"))
    if lone is not None and ("surrogate" in theirs or "truncated" in theirs):
        return f"a lone surrogate (byte {lone.start()}): {lone[0].decode()} is half of a character"
    return "it ends in the middle" if "truncated" in theirs else theirs
