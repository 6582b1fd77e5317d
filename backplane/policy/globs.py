"""Compiles the globs of `contracts/policy-rules.md` into sets that are matched in linear time.

A set returns the first pattern that matches a path. A path is compared as its UTF-8 bytes, so `?` and `[…]` match one
byte. A pattern that is a name goes into a table. Any other becomes a regular expression: braces are expanded, and the
text between two stars is an atomic group, which matches at the first possible place.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Final

from backplane.errors import PolicyError

PATTERN_BYTES_MAX: Final = 1024
"""Maximum length of a pattern, a quarter of Linux's longest path; a longer one is `policy_invalid`."""

VARIANTS_MAX: Final = 1024
"""Maximum patterns to which the braces of one may expand: ten pairs of two choices. More are `policy_invalid`."""

SET_BYTES_MAX: Final = 65_536
"""Maximum bytes of one set with its braces expanded; compiling takes about a microsecond a byte."""

SCAN_BYTES_MAX: Final = 4096
"""Maximum bytes of one set between two stars, which are compared at every place of a path. The slowest match takes
30 ms, as a path has at most `PATH_BYTES_MAX` bytes."""

_SCAN_STEP_BYTES: Final = 8
"""Cost of one step to the next place of a path, in compared bytes."""

PATH_BYTES_MAX: Final = 4096
"""Maximum length of a path: Linux's PATH_MAX. A longer one is denied."""


_PLAIN: Final = re.compile(r"(?P<deep>\*\*/)?(?P<name>[^*?\[\]{}\\/]+(?P<more>(?:/[^*?\[\]{}\\/]+)*))(?P<below>/\*\*)?")
"""A pattern that is a name: `name`, `**/name`, `name/**` or `**/name/**`; without `**/` the name may be a path."""


class _NamePatterns:
    """The patterns of a set that are names; they are looked up in tables, so their number costs no time."""

    def __init__(self) -> None:
        self._tables: dict[tuple[bool, bool], dict[bytes, int]] = {}
        """(name may be in any folder, name must be a folder) → name → number of the first pattern with it."""

    def add(self, pattern: str, number: int) -> bool:
        """Add a pattern if it is a name; return whether it is one."""
        found = _PLAIN.fullmatch(pattern)
        if found is None or (found["deep"] and found["more"]):
            return False
        table = self._tables.setdefault((bool(found["deep"]), bool(found["below"])), {})
        table.setdefault(_encode(found["name"]), number)
        return True

    def find(self, subject: bytes) -> int | None:
        """Return the number of the first pattern that matches the whole path."""
        parts = subject.split(b"/") if self._tables else []
        folders = itertools.accumulate(parts[:-1], lambda above, name: above + b"/" + name)
        asked = {(True, True): parts[:-1], (True, False): parts[-1:], (False, True): folders, (False, False): [subject]}
        hits = [table.get(name) for which, table in self._tables.items() for name in asked[which]]
        return min((number for number in hits if number is not None), default=None)


class Globs:
    """A compiled list of patterns; `matches` returns the pattern that matched."""

    def __init__(
        self,
        patterns: tuple[str, ...],
        names: _NamePatterns,
        expression: re.Pattern[bytes] | None,
        numbers: Sequence[int],
    ) -> None:
        self.patterns = patterns
        self._names = names
        self._expression = expression
        self._numbers = numbers
        """Group of the expression → number of its pattern."""

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def matches(self, path: str) -> str | None:
        """Return the first pattern that matches the whole path; None if there is none.

        Raises:
            PolicyError: `policy_denied`, the path is longer than `PATH_BYTES_MAX`.
        """
        if not self.patterns:
            return None
        subject = _encode(path)
        if len(subject) > PATH_BYTES_MAX:
            raise PolicyError(
                "policy_denied",
                f"a path of {len(subject)} bytes is too long to decide; the limit is {PATH_BYTES_MAX}",
                hint="use a shorter path",
            )
        found = self._expression.fullmatch(subject) if self._expression is not None else None
        numbers = [self._names.find(subject), self._numbers[found.lastindex - 1] if found and found.lastindex else None]
        first = min((number for number in numbers if number is not None), default=None)
        return self.patterns[first] if first is not None else None


def compile_globs(patterns: Sequence[str]) -> Globs:
    """Compile patterns into one set.

    Raises:
        PolicyError: `policy_invalid`, a pattern is malformed, or the set is too expensive to match.
    """
    names, numbers, branches = _NamePatterns(), list[int](), list[str]()
    set_bytes = scan_bytes = 0
    for number, pattern in enumerate(patterns):
        if len(pattern) <= PATTERN_BYTES_MAX // 4 and names.add(pattern, number):
            continue
        variants = [_GAP.split(variant) for variant in _variants(pattern)]
        set_bytes += sum(_size(units) for chunks in variants for units in chunks[::2])
        scan_bytes += sum(
            max((_SCAN_STEP_BYTES + _size(it) for it in chunks[2:-1:2]), default=0) for chunks in variants
        )
        if set_bytes > SET_BYTES_MAX or scan_bytes > SCAN_BYTES_MAX:
            raise _invalid(pattern, "makes its list too costly to decide", "use fewer or shorter patterns")
        branches.append("(" + "|".join(map(_expression, variants)) + ")")
        numbers.append(number)
    expression = re.compile("|".join(branches).encode("ascii"), re.DOTALL) if branches else None
    return Globs(tuple(patterns), names, expression, numbers)


# A pattern without braces is written as a text of units and gaps. A unit is the regular expression of one byte: `\xNN`,
# `.` or `[…]`. A gap is `*` for any bytes, or `/` for nothing or any bytes that end in a slash; no unit has these two.

_GAP: Final = re.compile(r"([*/])")
_GAPS: Final = re.compile(r"[*/]{2,}")
_LOOSE: Final = re.compile(r"(?<!^)(?<!\\x2f)/")
"""A `/` gap that follows neither a slash nor the start, as in `a{**/b,c}`."""

_WORD: Final = re.compile(
    r"(?P<literal>[^*?\[{},\\]+|\\(?P<escaped>.))|(?P<deep>\*\*/)|(?P<star>\*\*?)|(?P<any>\?)|(?P<brace>[{},])"
    r"|\[(?P<negated>[!^]?+)(?P<members>.[^]]*)\]",
    re.DOTALL,
)


def _size(units: str) -> int:
    """Return the number of bytes that these units match."""
    return len(re.findall(r"\\x..|\.|\[[^]]*\]", units))


def _expression(chunks: list[str]) -> str:
    """Return a regular expression for units and gaps that never tries a place twice.

    The units after a gap match at the first possible place: a later one would leave less room for the following units.
    The last units are compared once, from the end.
    """
    if len(chunks) == 1:
        return chunks[0]
    *before, gap, last = chunks
    between = "".join(
        f"(?>{'.*?' if star == '*' else '(?:|.*?/)'}{units})"
        for star, units in zip(before[1::2], before[2::2], strict=True)
    )
    size = _size(last)
    if gap == "/":
        return f"{before[0]}{between}(?:{last}|.{{{size + 1},}}+(?<=/{last}))"
    return before[0] + between + (f".{{{size},}}+(?<={last})" if size else ".*")


def _variants(pattern: str) -> Iterator[str]:
    """Yield the expansions of a pattern's braces, as units and gaps."""
    found = 0
    for text in _spelled_out(pattern):
        parts = _LOOSE.split(_GAPS.sub(lambda gaps: "*" if "*" in gaps[0] else "/", text))
        # The first place is the right one only after a slash. Elsewhere the gap makes two patterns: one with nothing,
        # one with bytes that end in a slash.
        found += 1 << (len(parts) - 1)
        if found > VARIANTS_MAX:
            raise _too_many(pattern)
        for gaps in itertools.product(("", r"*\x2f"), repeat=len(parts) - 1):
            yield parts[0] + "".join(map("".join, zip(gaps, parts[1:], strict=True)))


def _spelled_out(pattern: str) -> list[str]:
    """Read a pattern, and expand its braces."""
    if len(_encode(pattern)) > PATTERN_BYTES_MAX:
        raise _invalid(pattern, f"is longer than {PATTERN_BYTES_MAX} bytes", "use a shorter pattern")
    place, variants, choices = 0, [""], list[str]()
    outer: list[tuple[list[str], list[str]]] = []
    """Stack of open braces: the variants before each, and the choices so far of the brace around it."""
    while place < len(pattern):
        word = _WORD.match(pattern, place)
        if word is None:
            raise _invalid(pattern, "ends in a backslash" if pattern[place] == "\\" else "has a '[' that is not closed")
        brace = word["brace"]
        if brace == "{":
            outer.append((variants, choices))
            variants, choices = [""], []
        elif brace == "," and outer:
            variants, choices = [""], choices + variants
        elif brace == "}":
            if not outer:
                raise _invalid(pattern, "has a '}' that was not opened")
            # An empty choice counts only if there is no other: `a{,b}` is `ab`.
            inner = [choice for choice in choices + variants if choice] or [""]
            before, choices = outer.pop()
            chars = sum(map(len, before)) * len(inner) + sum(map(len, inner)) * len(before)
            if len(before) * len(inner) > VARIANTS_MAX or chars > 4 * SET_BYTES_MAX:
                raise _too_many(pattern)
            variants = [head + choice for head in before for choice in inner]
        else:
            text = _read(pattern, word, is_first=variants == [""], is_inside=bool(outer))
            variants = [variant + text for variant in variants]
        place = word.end()
    if outer:
        raise _invalid(pattern, "has a '{' that is not closed")
    return variants


def _read(pattern: str, word: re.Match[str], *, is_first: bool, is_inside: bool) -> str:
    """Convert a word of a pattern to units and gaps.

    Args:
        is_first: True if it begins the pattern or a choice.
    """
    if word["members"]:
        return f"[{'^' if word['negated'] else ''}{''.join(_ranges(pattern, word['members']))}]"
    if word["any"]:
        return "."
    if word["star"]:
        return "*"
    if word["deep"]:
        if is_first and not is_inside and word.end() == len(pattern):
            return "*"  # `**/` alone matches every path, not only those that end in a slash.
        return "/" if is_first or pattern[: word.start()].endswith("/") else r"*\x2f"
    return _bytes(word["escaped"] or word[0])


def _ranges(pattern: str, members: str) -> Iterator[str]:
    for low, high in re.findall(r"(?s)(.)(?:-(.))?", members):
        if high and high < low:
            raise _invalid(pattern, f"has the empty range '{low}-{high}'")
        yield _bytes(low) + ("-" + _bytes(high) if high else "")


def _bytes(text: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in _encode(text))


def _encode(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        # A lone surrogate from JSON is in no file name of this system, but the path must be matched, too.
        return text.encode("utf-8", "surrogatepass")


def _too_many(pattern: str) -> PolicyError:
    return _invalid(pattern, f"stands for more than {VARIANTS_MAX} patterns or too long ones", "use fewer braces")


def _invalid(pattern: str, fact: str, hint: str = "correct the pattern") -> PolicyError:
    shown = pattern if len(pattern) <= 80 else pattern[:77] + "…"
    return PolicyError("policy_invalid", f"glob {shown!r} {fact}", hint=hint)
