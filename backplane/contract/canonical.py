"""Writes the contract's canonical JSON, its hash, and the print forms of times and ids.

Keys are sorted by their UTF-8 bytes, there are no blanks, integers are exact inside 64 bits, and floats have the
shortest digits, always with a point or an exponent. This is not RFC 8785. Only this file knows how a float is printed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any, Final

import msgspec

Json = Any
"""A JSON value of any shape: dict, list, str, int, float, bool or None."""


INT_MIN: Final = -(2**63)
INT_MAX: Final = 2**64 - 1
"""Bounds of exact integers; every peer of the contract reads integers outside of them as floats."""

_encode_sorted: Final = msgspec.json.Encoder(order="sorted").encode
_encode_sorted_lines: Final = msgspec.json.Encoder(order="sorted").encode_lines
_DIGITS_ALIKE: Final = bytes(0x30 if 0x30 <= byte <= 0x39 else byte for byte in range(256))
_ODD_NUMBERS: Final = (b"0e0", b"0" * 20, b"-" + b"0" * 19)
"""Parts of numbers that the fast encoder prints differently, with every digit replaced by zero: an exponent without its
plus sign, an integer beyond 64 bits. This search takes a tenth of the time of a regular expression."""
_LONG_INTEGER: Final = re.compile(rb"([,:\[\n])(-?[0-9]{19,})")
_MINUS_ZERO: Final = re.compile(rb"(?<![^,:\[\s])-0(?![0-9.eE])")
_escape: Final = msgspec.json.Encoder().encode


def _finite(text: str) -> float:
    value = float(text)
    if value - value:
        raise ValueError("a number out of range")
    return value


_decode: Final = msgspec.json.Decoder(float_hook=_finite).decode
"""A decoder with our float hook. Msgspec's own takes 20 µs for a float near the ends of the range, so seconds for a
line of one MiB."""


def encode(value: Json) -> bytes:
    """Write a value (struct or plain JSON) in canonical bytes.

    Raises:
        ValueError: an integer too large for a float.
    """
    return _with_our_numbers(_encode_sorted(value))


def encode_lines(values: Sequence[Json]) -> bytes:
    """Write values in canonical bytes, each ended by a newline, in a third of the time of single calls.

    Raises:
        ValueError: an integer too large for a float.
    """
    # msgspec 0.22 leaks the iterator of any sequence but a list: 48 bytes a call.
    return _with_our_numbers(_encode_sorted_lines(values if isinstance(values, list) else list(values)))


def _with_our_numbers(data: bytes) -> bytes:
    alike = data.translate(_DIGITS_ALIKE)
    for odd in _ODD_NUMBERS:
        if odd in alike:
            return _changed(data, _printed)
    return data


def _printed(gap: bytes) -> bytes:
    """Convert the numbers in JSON without its texts to the contract's form."""
    # Every `e` is an exponent, except in `true` and `false`. A regular expression for this takes five times as long.
    gap = gap.replace(b"e", b"e+").replace(b"e+-", b"e-").replace(b"ue+", b"ue").replace(b"se+", b"se")
    alike = gap.translate(_DIGITS_ALIKE)
    if not any(odd in alike for odd in _ODD_NUMBERS[1:]):
        return gap
    parts = _LONG_INTEGER.split(b"," + gap)
    integers = list(map(int, parts[2::3]))
    floats = _escape(_as_floats(integers))[1:-1].replace(b"e", b"e+").split(b",")
    parts[2::3] = [
        text if INT_MIN <= integer <= INT_MAX else instead
        for text, integer, instead in zip(parts[2::3], integers, floats, strict=False)
    ]
    return b"".join(parts)[1:]


def decode(data: bytes | str) -> Json:
    """Read JSON into plain values, exactly; the literal `-0` becomes the float -0.0, which it is on the wire.

    Raises:
        msgspec.DecodeError: not strict JSON (a `ValueError`; so are invalid UTF-8 and numbers out of range).
    """
    raw = data.encode() if isinstance(data, str) else data
    value = _decode(raw)
    if _MINUS_ZERO.search(raw) is None:
        return value
    return _decode(_changed(raw, _with_float_zeros))


def _with_float_zeros(gap: bytes) -> bytes:
    return b"-0.0".join(_MINUS_ZERO.split(gap))


def may_be_endless(data: bytes) -> bool:
    """Return True if JSON may contain an integer larger than any float, which has no canonical form."""
    return len(data) >= _ENDLESS_DIGITS and b"0" * _ENDLESS_DIGITS in data.translate(_DIGITS_ALIKE)


_ENDLESS_DIGITS: Final = 309
"""Number of digits of the largest float."""


def _as_floats(integers: list[int]) -> list[float]:
    try:
        return list(map(float, integers))
    except OverflowError:
        raise ValueError("an integer of more than 308 digits has no canonical form") from None


def decode_inexact(data: bytes) -> Json:
    """Read JSON as the public implementation's parser does: long fractions may be off by one unit in the last place.

    Used only to verify a receipt of another program whose hash does not match an exact reading.
    """
    import json

    _decode(data)
    return json.loads(data, parse_int=_integer, parse_float=_float_inexact)


def _integer(text: str) -> int | float:
    return -0.0 if text == "-0" else int(text)


_FLOAT_PARTS: Final = re.compile(r"(-?)([0-9]+)(?:\.([0-9]+))?(?:[eE]([+-]?[0-9]+))?")


def _float_inexact(text: str) -> float:
    """Multiply a 64-bit significand, without later digits, by a power of ten in float arithmetic."""
    match = _FLOAT_PARTS.fullmatch(text)
    assert match is not None, "the JSON grammar was checked before"
    sign, whole, fraction, exponent_text = match.groups()
    significand, exponent, full = 0, int(exponent_text or 0), False
    for position, digit in enumerate(whole + (fraction or "")):
        in_fraction = position >= len(whole)
        full = full or significand * 10 + int(digit) > INT_MAX
        if full:
            exponent += 0 if in_fraction else 1
        else:
            significand = significand * 10 + int(digit)
            exponent -= 1 if in_fraction else 0
    value = float(significand)
    while exponent < -308 and value:
        value, exponent = value / 1e308, exponent + 308
    if value:
        value = value * float(f"1e{exponent}") if exponent >= 0 else value / float(f"1e{-exponent}")
    return -value if sign else value


def sha256_hex(data: bytes) -> str:
    """Return the SHA-256 of bytes, in hex."""
    import hashlib  # It loads a library of megabytes, which a host's hello does not need.

    return hashlib.sha256(data).hexdigest()


def duplicate_key(data: bytes, value: Json) -> str | None:
    """Return the first key that occurs twice in one object of a JSON text; None if there is none.

    Args:
        value: the decoded text.
    """
    if _escape(value) == data.strip():
        # A faster way for compact JSON, as our own peers write it: if the dict gives the same text, no key came twice.
        return None
    import json

    found: list[str] = []

    def look(pairs: list[tuple[str, Json]]) -> None:
        if len(dict(pairs)) == len(pairs):
            return
        seen = set()
        for key, _ in pairs:
            if key in seen:
                found.append(key)
            seen.add(key)

    json.loads(data, object_pairs_hook=look, parse_int=len, parse_float=len)  # Numbers need not be parsed.
    return found[0] if found else None


_CANONICAL_TIME: Final = re.compile(
    r"\d{4}-\d\d-\d\dT(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{3}(?<!000)(?:\d{3}(?<!000)(?:\d{3}(?<!000))?)?)?Z",
    re.ASCII,
)


@functools.lru_cache(maxsize=64)
def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def is_timestamp(text: str) -> bool:
    """Return True if a time is in the contract's print form; False for a leap second."""
    return _CANONICAL_TIME.fullmatch(text) is not None and _is_date(text[:10])


_TIMESTAMP: Final = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d):(\d\d)(?:\.(\d+))?\s?(Z|z|UTC|[+-]\d\d:?\d\d)", re.ASCII
)


def timestamp(text: str) -> str:
    """Print an RFC 3339 time as the contract does: UTC, `Z`, the fraction in the fewest of 0, 3, 6 or 9 digits.

    Raises:
        ValueError: not a time with an offset.
    """
    if is_timestamp(text):
        return text
    match = _TIMESTAMP.fullmatch(text)
    if match is None:
        raise ValueError(f"not an RFC 3339 time with an offset: {text[:40]!r}")
    year, month, day, hour, minute, second = (int(part) for part in match.groups()[:6])
    leap = second == 60
    moment = datetime(year, month, day, hour, minute, 59 if leap else second, tzinfo=_offset(match[8]))
    try:
        utc = moment.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"outside the years 1 to 9999 in UTC: {text[:40]!r}") from None
    nanoseconds = (match[7] or "")[:9].ljust(9, "0")
    whole = utc.strftime("%Y-%m-%dT%H:%M:").rjust(17, "0") + ("60" if leap else f"{utc.second:02d}")
    return whole + _fraction(nanoseconds) + "Z"


def _offset(text: str) -> timezone:
    if text in ("Z", "z", "UTC"):
        return UTC
    minutes = int(text[1:3]) * 60 + int(text[-2:])
    return timezone(timedelta(minutes=-minutes if text[0] == "-" else minutes))


def _fraction(nanoseconds: str) -> str:
    for digits in (0, 3, 6, 9):
        if nanoseconds[digits:].strip("0") == "":
            return "." + nanoseconds[:digits] if digits else ""
    raise AssertionError("nine digits always suffice")


def timestamp_at(time_ns: int) -> str:
    """Print nanoseconds since 1970 in the contract's form, cut to milliseconds."""
    seconds, rest = divmod(time_ns, 1_000_000_000)
    moment = datetime.fromtimestamp(seconds, UTC)
    milliseconds = rest // 1_000_000
    return moment.strftime("%Y-%m-%dT%H:%M:%S") + (f".{milliseconds:03d}Z" if milliseconds else "Z")


_UUID: Final = re.compile(r"(?:urn:uuid:)?\{?([0-9a-fA-F]{8}(?:-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12})\}?")


def uuid_text(text: str) -> str:
    """Print a UUID as the contract does: lower case with hyphens.

    Raises:
        ValueError: not a UUID.
    """
    match = _UUID.fullmatch(text)
    if match is None:
        raise ValueError(f"not a UUID: {text[:60]!r}")
    digits = match[1].replace("-", "").lower()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def print_anew(value: msgspec.Struct, name: str, form: Callable[[str], str]) -> None:
    """Convert a member of a new struct to its print form.

    Raises:
        ValueError: the member has no such form; the text names the member.
    """
    try:
        msgspec.structs.force_setattr(value, name, form(getattr(value, name)))
    except ValueError as error:
        raise ValueError(f"`{name}`: {error}") from error


def _changed(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Apply `change` to the parts of some JSON outside of its texts, joined by quotation marks.

    Args:
        data: valid JSON; so no text has a control byte, and two of these can hide the escapes.
    """
    hidden = data.replace(b"\\\\", b"\1\1").replace(b'\\"', b"\2\2") if b"\\" in data else data
    parts = hidden.split(b'"')
    parts[::2] = change(b'"'.join(parts[::2])).split(b'"')
    whole = b'"'.join(parts)
    return whole.replace(b"\1\1", b"\\\\").replace(b"\2\2", b'\\"') if hidden is not data else whole
