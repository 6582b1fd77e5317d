"""The contract's glob language, compiled once and decided in linear time.

Patterns go in, and for a path the first pattern that matches comes out. A path is compared as
its UTF-8 bytes, so `?` and `[…]` take one byte, as with the public implementation's peers.
Making a path relative or following links is not done here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from backplane.errors import PolicyError

PATTERN_BYTES_MAX: Final = 1024
"""Longest pattern. A quarter of Linux's longest path; nobody writes one by hand."""

VARIANTS_MAX: Final = 1024
"""Most patterns that the braces of one may stand for: ten pairs, where thirty would be a thousand million."""

SET_BYTES_MAX: Final = 65_536
"""Most bytes of one set after its braces are spelled out; compiling costs about a microsecond a byte."""

SCAN_BYTES_MAX: Final = 4096
"""Most bytes of one set that must be looked for at every place of a path (what stands between two
stars). Times `PATH_BYTES_MAX` this is the worst decision, some 30 ms; the goal is 50."""

_SCAN_STEP_BYTES: Final = 8
"""What one step to the next place costs, measured in bytes compared."""

PATH_BYTES_MAX: Final = 4096
"""Longest path that is decided: Linux's PATH_MAX."""

_STAR: Final = "*"
_DEEP: Final = "**/"
_GAPS: Final = (_STAR, _DEEP)
_SLASH: Final = "\\x2f"
_FEWER: Final = "use fewer braces"

# A token is a gap (`_STAR`: any bytes; `_DEEP`: nothing, or any bytes that end in a slash) or the
# regular expression of exactly one byte.
_Tokens = tuple[str, ...]


_PLAIN: Final = re.compile(r"(?P<deep>\*\*/)?(?P<name>[^*?\[\]{}\\/]+(?P<more>(?:/[^*?\[\]{}\\/]+)*))(?P<below>/\*\*)?")
"""A pattern that is a name: `name`, `**/name`, `name/**` or `**/name/**`; without `**/` the name may be a path."""


class _NamePatterns:
    """The patterns of a set that are names; a table decides them, however many they are."""

    def __init__(self) -> None:
        self._tables: dict[tuple[bool, bool], dict[bytes, int]] = {}
        """Name → the first pattern that is this name, by whether the name may be anywhere, and has to be a folder."""

    def add(self, pattern: str, number: int) -> bool:
        """Take a pattern if it is a name; return whether it is."""
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
    """A compiled list of patterns; `matches` answers with the pattern that matched."""

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
        """The pattern of each group of the expression."""

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def matches(self, path: str) -> str | None:
        """Return the first pattern that matches the whole path, or None.

        Raises:
            PolicyError: `policy_denied`, the path is longer than `PATH_BYTES_MAX` and so undecided.
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
        PolicyError: `policy_invalid`, a pattern is malformed, or the set is too costly to decide.
    """
    names, numbers, branches = _NamePatterns(), list[int](), list[str]()
    set_bytes = scan_bytes = 0
    for number, pattern in enumerate(patterns):
        if len(pattern) <= PATTERN_BYTES_MAX // 4 and names.add(pattern, number):
            continue
        variants = [_chunks(tokens) for tokens in _variants(pattern)]
        set_bytes += sum(len(chunk.units) for chunks in variants for chunk in chunks)
        scan_bytes += sum(map(_scan_bytes, variants))
        if set_bytes > SET_BYTES_MAX or scan_bytes > SCAN_BYTES_MAX:
            raise _invalid(pattern, "makes its list too costly to decide", "use fewer or shorter patterns")
        branches.append("(" + "|".join(_expression(chunks) for chunks in variants) + ")")
        numbers.append(number)
    expression = re.compile("|".join(branches).encode("ascii"), re.DOTALL) if branches else None
    return Globs(tuple(patterns), names, expression, numbers)


NO_GLOBS: Final = compile_globs(())
"""Matches nothing."""


class _Chunk(msgspec.Struct, frozen=True):
    """Bytes in a row, and the gap that may stand before them."""

    gap: str
    """`_STAR`, `_DEEP`, or empty for the first chunk, which stands at the start."""
    units: _Tokens


def _chunks(tokens: _Tokens) -> list[_Chunk]:
    chunks, gap, units = [], "", list[str]()
    for token in tokens:
        if token in _GAPS:
            chunks.append(_Chunk(gap, tuple(units)))
            gap, units = token, []
        else:
            units.append(token)
    return [*chunks, _Chunk(gap, tuple(units))]


def _scan_bytes(chunks: list[_Chunk]) -> int:
    return max((_SCAN_STEP_BYTES + len(chunk.units) for chunk in chunks[1:-1]), default=0)


def _expression(chunks: list[_Chunk]) -> str:
    """Write chunks as a regular expression that never tries a place twice.

    A chunk between gaps takes the first place it fits (atomic): a later one leaves no more room
    to those after it. The last chunk is looked at once, from the end.
    """
    first, *middle = chunks
    if not middle:
        return "".join(first.units)
    last = middle.pop()
    between = "".join(f"(?>{'.*?' if c.gap == _STAR else '(?:|.*?/)'}{''.join(c.units)})" for c in middle)
    units, size = "".join(last.units), len(last.units)
    if last.gap == _STAR:
        end = f".{{{size},}}+(?<={units})" if size else ".*"
    else:
        end = f"(?:{units}|.{{{size + 1},}}+(?<=/{units}))"
    return "".join(first.units) + between + end


def _encode(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        # A lone surrogate out of JSON is no file name of this system, yet it must be decided.
        return text.encode("utf-8", "surrogatepass")


def _invalid(pattern: str, fact: str, hint: str = "correct the pattern") -> PolicyError:
    shown = pattern if len(pattern) <= 80 else pattern[:77] + "…"
    return PolicyError("policy_invalid", f"glob {shown!r} {fact}", hint=hint)


class _Reader:
    """Reads one pattern; an open brace is a frame of the variants finished and those being read."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.place = 0
        self.finished: list[list[_Tokens]] = [[]]
        self.current: list[list[_Tokens]] = [[()]]
        self.tail: list[str] = []
        """Tokens read since the last brace or comma; not yet added to the variants of the innermost frame."""

    def peek(self) -> str:
        return self.pattern[self.place : self.place + 1]

    @property
    def inside(self) -> bool:
        return len(self.current) > 1

    @property
    def at_start(self) -> bool:
        return not self.tail and self.current[-1] == [()]

    def flush(self) -> None:
        tail, self.tail = tuple(self.tail), []
        self.current[-1] = [variant + tail for variant in self.current[-1]]

    def open_brace(self) -> None:
        self.flush()
        self.finished.append([])
        self.current.append([()])

    def next_choice(self) -> None:
        self.flush()
        self.finished[-1] += self.current[-1]
        self.current[-1] = [()]
        self.bound(len(self.finished[-1]), sum(map(len, self.finished[-1])))

    def close_brace(self) -> None:
        self.next_choice()
        # An empty choice counts only when there is no other, as with the peers: `a{,b}` is `ab`.
        choices = [choice for choice in self.finished.pop() if choice] or [()]
        self.current.pop()
        before = self.current[-1]
        tokens = sum(map(len, before)) * len(choices) + sum(map(len, choices)) * len(before)
        self.bound(len(choices) * len(before), tokens)
        self.current[-1] = [head + choice for head in before for choice in choices]

    def bound(self, variants: int, tokens: int) -> None:
        if variants > VARIANTS_MAX or tokens > SET_BYTES_MAX:
            raise _invalid(self.pattern, f"stands for more than {VARIANTS_MAX} patterns or too long ones", _FEWER)


def _variants(pattern: str) -> list[_Tokens]:
    """Spell out the braces: one list of tokens for each pattern that this one stands for."""
    if len(_encode(pattern)) > PATTERN_BYTES_MAX:
        raise _invalid(pattern, f"is longer than {PATTERN_BYTES_MAX} bytes", "use a shorter pattern")
    reader = _Reader(pattern)
    while letter := reader.peek():
        reader.place += 1
        _READ.get(letter, _read_literal)(reader, letter)
    if reader.inside:
        raise _invalid(pattern, "has a '{' that is not closed")
    reader.flush()
    return [plain for tokens in reader.current[0] for plain in _split_loose_deeps(pattern, tokens)]


def _read_literal(reader: _Reader, letter: str) -> None:
    reader.tail += [_byte(byte) for byte in _encode(letter)]


def _read_any(reader: _Reader, letter: str) -> None:
    reader.tail.append(".")


def _read_escape(reader: _Reader, letter: str) -> None:
    escaped = reader.peek()
    if not escaped:
        raise _invalid(reader.pattern, "ends in a backslash")
    reader.place += 1
    _read_literal(reader, escaped)


def _read_open(reader: _Reader, letter: str) -> None:
    reader.open_brace()


def _read_comma(reader: _Reader, letter: str) -> None:
    if reader.inside:
        reader.next_choice()
    else:
        _read_literal(reader, letter)


def _read_close(reader: _Reader, letter: str) -> None:
    if not reader.inside:
        raise _invalid(reader.pattern, "has a '}' that was not opened")
    reader.close_brace()


def _read_star(reader: _Reader, letter: str) -> None:
    """Read `*` or `**`; the latter is special only where it is a whole component."""
    if reader.peek() != "*":
        reader.tail.append(_STAR)
        return
    after_slash = reader.pattern[: reader.place - 1].endswith("/")
    reader.place += 1
    following = reader.peek()
    if reader.at_start and following == "/":
        reader.place += 1
        # `**/` and nothing more matches everything, not only what ends in a slash.
        reader.tail.append(_DEEP if reader.peek() or reader.inside else _STAR)
    elif after_slash and not reader.at_start and following == "/":
        reader.place += 1
        reader.tail.append(_DEEP)
    else:
        reader.tail.append(_STAR)


def _read_class(reader: _Reader, letter: str) -> None:
    """Read `[…]`: one byte of the listed ones; a backslash inside stands for itself."""
    start = reader.place
    negated = reader.peek() in ("!", "^") and bool(reader.peek())
    start += negated
    # A `]` right at the start is a member, not the end.
    end = reader.pattern.find("]", start + 1)
    if end < 0:
        raise _invalid(reader.pattern, "has a '[' that is not closed")
    members = reader.pattern[start:end]
    reader.place = end + 1
    reader.tail.append(f"[{'^' if negated else ''}{''.join(_ranges(reader.pattern, members))}]")


def _ranges(pattern: str, members: str) -> Iterable[str]:
    place = 0
    while place < len(members):
        low = members[place]
        if members[place + 1 : place + 2] == "-" and place + 2 < len(members):
            high = members[place + 2]
            if high < low:
                raise _invalid(pattern, f"has the empty range '{low}-{high}'")
            yield f"{_bytes(low)}-{_bytes(high)}"
            place += 3
        else:
            yield _bytes(low)
            place += 1


def _bytes(letter: str) -> str:
    return "".join(_byte(byte) for byte in _encode(letter))


def _byte(byte: int) -> str:
    return f"\\x{byte:02x}"


_READ: Final = {
    "*": _read_star,
    "?": _read_any,
    "[": _read_class,
    "{": _read_open,
    ",": _read_comma,
    "}": _read_close,
    "\\": _read_escape,
}


def _split_loose_deeps(pattern: str, tokens: _Tokens) -> list[_Tokens]:
    """Write a `**/` that follows neither a slash nor the start (`a{**/b,c}`) as two patterns.

    Looking for each chunk at its first place is right only because a chunk before `**/` ends in
    a slash; for the odd case "nothing" and "anything up to a slash" are tried separately.
    """
    waiting, done = [tokens], []
    while waiting:
        tokens = waiting.pop()
        loose = next((i for i in range(1, len(tokens)) if tokens[i] == _DEEP and tokens[i - 1] != _SLASH), None)
        if loose is None:
            done.append(tokens)
        elif tokens[loose - 1] in _GAPS:
            kept = _STAR if _STAR in tokens[loose - 1 : loose + 1] else _DEEP
            waiting.append((*tokens[: loose - 1], kept, *tokens[loose + 1 :]))
        else:
            waiting.append((*tokens[:loose], *tokens[loose + 1 :]))
            waiting.append((*tokens[:loose], _STAR, _SLASH, *tokens[loose + 1 :]))
        if len(waiting) + len(done) > VARIANTS_MAX:
            raise _invalid(pattern, f"stands for more than {VARIANTS_MAX} patterns", _FEWER)
    return done
