"""Cases for a JSON parser, made here: what must be taken (y), refused (n), and what is our own choice (i).

Each case is the bytes of one value. They are put into a message, so that every door reads them by the reader it uses
for everything else.
"""

# ruff: noqa: E501  # a row a class is easier to check than a column of single cases

from __future__ import annotations

from collections.abc import Iterator

Case = tuple[str, bytes]
VALID_ESCAPES = '"\\/bfnrtu'
DEPTH_FREE = 126
"""Levels that the message around a value leaves of the 128."""


def taken() -> Iterator[Case]:
    """Values of strict JSON within our bounds."""
    numbers = """0 -0 1 -1 10 123456789 1.5 -1.5 0.1 1e5 1E5 1e+5 1e-5 1.5e5 0e0 0e+1 -0.0 -0e-1 1.0 9007199254740993
        18446744073709551615 -9223372036854775808 1e308 -1e308 5e-324 2.2250738585072014e-308 0.30000000000000004"""
    for text in numbers.split():
        yield f"number {text}", text.encode()
    for name in ("true", "false", "null"):
        yield name, name.encode()
    for escape in '"\\/bfnrt':
        yield f"escape \\{escape}", f'"\\{escape}"'.encode()
    for code in (0, 1, 0x1F, 0x20, 0x7F, 0x80, 0xFF, 0x2028, 0x2029, 0xFEFF, 0xFFFE, 0xFFFF, 0xFDD0, 0xD7FF, 0xE000):
        yield f"escaped U+{code:04X}", f'"\\u{code:04x}"'.encode()
        yield f"escaped in capitals U+{code:04X}", f'"\\u{code:04X}"'.encode()
        if code >= 0x20:
            yield f"as it is U+{code:04X}", b'"' + chr(code).encode() + b'"'
    for code in (0x10000, 0x1F422, 0x10FFFF, 0x1FFFE):
        high, low = 0xD800 + ((code - 0x10000) >> 10), 0xDC00 + ((code - 0x10000) & 0x3FF)
        yield f"a pair for U+{code:X}", f'"\\u{high:04x}\\u{low:04x}"'.encode()
        yield f"as it is U+{code:X}", b'"' + chr(code).encode() + b'"'
    for name, text in {
        "empty string": '""', "empty array": "[]", "empty object": "{}", "empty key": '{"":0}',
        "blanks": ' [ 1 ,\t2 ,\r3 ] ', "blank object": ' { "a" : 1 } ', "mixed": '[null,true,{"a":[{}]},"x",1.5]',
        "escaped key": '{"\\u0061\\n":1}', "key of 1000": '{"' + "k" * 1000 + '":1}', "string of 100000": '"' + "x" * 100_000 + '"',
        "1000 elements": "[" + "1," * 999 + "1]", "slashes": '"/\\/"', "a comment in a string": '"/* no */ // no"',
        "brackets in a string": '"' + "[{" * 500 + '"', "escapes in a row": '"' + "\\\\" * 500 + '"',
    }.items():  # fmt: skip
        yield name, text.encode()
    for depth in (2, 50, 100, DEPTH_FREE):
        yield f"array of depth {depth}", b"[" * depth + b"]" * depth
        yield f"object of depth {depth}", b'{"a":' * depth + b"1" + b"}" * depth


def refused() -> Iterator[Case]:
    """What no strict reader takes."""
    words = """+1 .1 1. 01 -01 00 0x1 0xg 1e 1e+ 1eE2 1e5e5 --1 -+1 1_000 - -.5 0.e1 1.e1 1+2 1a 0b1 0o7 1.2.3 ++1 +Inf -Inf
        Infinity -Infinity NaN -NaN nan inf True FALSE Null nul tru fals truee nulll undefined None yes a 'a' a1 $ @ 1,000
        1e999 -1e999 1e400 \uff11 \u00bd \u0661 <x> (1) 1; = & * \u221e"""
    for text in words.split():
        if text != "1,000":
            yield f"word {text}", text.encode()
    for code in [*range(0x20)]:
        if code != 10:
            yield f"control {code:#04x} in a string", b'"' + bytes([code]) + b'"'
    for code in range(0x21, 0x7F):
        if chr(code) not in VALID_ESCAPES:
            yield f"escape \\{chr(code)}", b'"\\' + bytes([code]) + b'"'
    for text in ("u", "u123", "u123g", "u+123", "U0061", "u{61}", "x41", "0"):
        yield f"half an escape {text}", b'"\\' + text.encode() + b'"'
    for text in ("d800", "dbff", "dc00", "d800\\u0041", "d800x", "dc00\\ud800"):
        yield f"half a pair {text}", b'"\\u' + text.encode() + b'"'
    for data in (
        b"\x80", b"\xbf", b"\xff", b"\xfe", b"\xc0\x80", b"\xc0\xaf", b"\xc1\xbf", b"\xe0\x80\x80", b"\xe0\x9f\xbf",
        b"\xf0\x80\x80\x80", b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80", b"\xf8\x88\x80\x80\x80",
        b"\xfc\x84\x80\x80\x80\x80", b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xed\xa0\x80\xed\xb0\x80", b"\xc3", b"\xe2\x82",
        b"\xf0\x9f\x90", b"a\xc3z", b"\xe2(\xa1", b"\xf0(\x8c\xbc",
    ):  # fmt: skip
        yield f"bytes {data.hex()}", b'"' + data + b'"'
    for text in (
        "[1,]", "[,1]", "[,]", "[1 2]", "[1:2]", "[1,,2]", "[1", "1]", "[[1]", "[1]]", "[1;2]", "[1}", "[(1)]", "[...1]",
        '{"a"}', '{"a":}', '{"a":1,}', "{,}", "{:1}", '{"a" 1}', '{"a"::1}', "{1:1}", "{a:1}", "{'a':1}", '{"a":1 "b":2}',
        '{"a":1', '{"a":1]', '{"a",1}', '{"a"=1}', "{null:1}", "{[]:1}", '{"a":1,,"b":2}', '{"a":1}}', '"a', 'a"', '""a', '"a""b"',
        "// x\n1".replace("\n", "\r"), "/* x */ 1", "1 # x", "1 // x", "[1, /* x */ 2]", "`a`", '"\\', '"\\"', "[\"a\", 4\r,1,",
        "\u00a01", "1\u2028", "\u20601", "\ufeff1", "\x0b1", "\x0c1", "1\x00", "\x001", "\u30001", "", " ", "[", "{", '"', ",", ":", "]", "}",
        "1 2", "{}{}", "[][]", "true false", "nulltrue", '{"a":01}', '{"a":tru}', '["\t"]', '{"\t":1}', "<null>", "[\u20600]", "*", "1 ,",
    ):  # fmt: skip
        yield f"structure {text[:20]!r}", text.encode()
    for depth in (DEPTH_FREE + 2, 500, 5000, 100_000):
        yield f"array of depth {depth}", b"[" * depth + b"]" * depth
        yield f"object of depth {depth}", b'{"a":' * depth + b"1" + b"}" * depth
        yield f"opened {depth} times", b"[" * depth
    for digits in (310, 5000, 100_000):
        yield f"{digits} digits", b"9" * digits


CHOSEN: dict[str, tuple[bytes, bool]] = {
    "one more than 64 bits": (b"18446744073709551616", True),
    "one less than 64 bits": (b"-9223372036854775809", True),
    "300 digits": (b"9" * 300, True),
    "too small to hold": (b"1e-999", True),
    "more digits than held": (b"0.1234567890123456789012345678901234567890", True),
    "the largest and a half": (b"1.7976931348623158e308", True),
    "a NUL written out": (b'"\\u0000"', True),
    "a key of NUL": (b'{"\\u0000":1}', True),
    "a mark in a string": (b'"\xef\xbb\xbf"', True),
    "bidirectional marks": ('"\u202e\u2066"'.encode(), True),
}
"""Where a strict reader may go either way: what ours does."""


def hostile_strings() -> list[str]:
    """Text that somebody, somewhere, once treated as more than text."""
    plain = """../../etc/passwd C:\\\\con %s%n%x ${HOME} $(id) `id` ;id |id &id {{7*7}} <script>alert(1)</script> ' " \\ ''--
        \\u0000 \\x00 NUL CON nul null undefined None NaN true 0 -1 1e999 __proto__ constructor %00 %2e%2e/ file:///etc/passwd
        {"t":"final"} ]]> <!-- --> \u202e \u200b \u200d \ufeff \u2028 \u2029 \u0085 \u00ad \u061c \u2066 \uffff \ufffd \u0000 \x1b[31m \x1b]0;x\x07
        \x7f \x9b A\u030a \u00c5 \u212b ﬁ \u0130 \u0131 ß \U0001f1e9\U0001f1ea \U0001f468\u200d\U0001f469 \U0010ffff \U0001f600"""
    found = [
        *plain.split(),
        "",
        " ",
        "\n",
        "\r\n",
        "\t",
        "a\r",
        '\n{"t":"fatal"}\n',
        "x" * 65536,
        "\\" * 1000,
        '"' * 1000,
    ]
    for code in [
        *range(0x20),
        *range(0x7F, 0xA0),
        *range(0x300, 0x310),
        *range(0x2000, 0x2070),
        *range(0xFFF0, 0x10000),
    ]:
        found.append(f"<{chr(code)}>")
    for code in range(0x1F600, 0x1F650):
        found.append(chr(code) * 3)
    return found
