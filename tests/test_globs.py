"""Globs: a table of the language's corners, a naive model beside it, and a bound on the worst decision."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from backplane import resources
from backplane.errors import PolicyError
from backplane.policy.globs import PATH_BYTES_MAX, VARIANTS_MAX, compile_globs

DECISION_S_MAX = 0.05

VECTORS = json.loads((resources.find("contracts") / "policy-rules.json").read_text())
TABLE = [*map(tuple, VECTORS["globs"]), ("*\udcff", "caf\udcff", True), ("*", "\ud800", True)]
"""Those of the contract, and names that no JSON can hold."""


@pytest.mark.parametrize(("pattern", "path", "expected"), TABLE)
def test_a_pattern_decides_as_the_table_says(pattern: str, path: str, expected: bool) -> None:
    assert compile_globs([pattern]).matches(path) == (pattern if expected else None)


def test_the_first_pattern_that_matches_is_named() -> None:
    globs = compile_globs(["*.py", "**/{a,b}.txt", "**"])
    assert [globs.matches(path) for path in ("x/y.py", "b.txt", "c")] == ["*.py", "**/{a,b}.txt", "**"]
    assert compile_globs([]).matches("anything") is None


def test_a_thousand_names_are_taken_and_decided_at_once() -> None:
    patterns = [f"**/name{number}/**" for number in range(1000)] + ["*.py", "**/last", "top/**", "a/b", "é"]
    globs = compile_globs(patterns)
    paths = ["x/name999/y", "name7/", "name7", "y.py", "x/last", "top/z", "x/top/z", "a/b", "x/a/b", "é", "name3/x.py"]
    expected = [
        "**/name999/**",
        "**/name7/**",
        None,
        "*.py",
        "**/last",
        "top/**",
        None,
        "a/b",
        None,
        "é",
        "**/name3/**",
    ]
    assert [globs.matches(path) for path in paths] == expected
    started = time.process_time()
    for _ in range(100):
        globs.matches("name/" * (PATH_BYTES_MAX // 5))
    assert time.process_time() - started < 100 * DECISION_S_MAX


@pytest.mark.parametrize("pattern", VECTORS["bad_globs"])
def test_a_malformed_pattern_is_policy_invalid(pattern: str) -> None:
    with pytest.raises(PolicyError) as caught:
        compile_globs([pattern])
    assert caught.value.code == "policy_invalid"


@pytest.mark.parametrize(
    "patterns",
    [
        ["{a,b}" * 30],
        ["{" * 500 + "a,b" + "}" * 500 + "{a,b}" * 20],
        ["{a,b}" * 10 + "x" * 900],
        ["*" + "a" * 900 + "*"] * 9,
        ["x" * 1000] * 100,
    ],
)
def test_a_pattern_too_costly_to_decide_is_refused_at_once(patterns: list[str]) -> None:
    started = time.process_time()
    with pytest.raises(PolicyError) as caught:
        compile_globs(patterns)
    assert caught.value.code == "policy_invalid"
    assert time.process_time() - started < 5


def test_braces_up_to_the_limit_are_taken() -> None:
    pairs = VARIANTS_MAX.bit_length() - 1
    assert compile_globs(["{a,b}" * pairs]).matches("ab" * (pairs // 2))
    with pytest.raises(PolicyError):
        compile_globs(["{a,b}" * (pairs + 1)])


def test_a_path_too_long_to_decide_is_denied() -> None:
    assert compile_globs(["**"]).matches("a" * PATH_BYTES_MAX) == "**"
    with pytest.raises(PolicyError) as caught:
        compile_globs(["**"]).matches("a" * (PATH_BYTES_MAX + 1))
    assert caught.value.code == "policy_denied"


@pytest.mark.parametrize(
    "patterns",
    [
        ["*a" * 20],
        ["*a" * 20 + "b"],
        ["**/a" * 12],
        ["**/a/" * 12 + "b"],
        ["*" + "a" * 500 + "b*"] * 8,
        ["?*" * 500 + "b"],
        ["*[!b]" * 200 + "c"],
        ["**/{a,b}" * 8],
        ["*" + "?" * 1000 + "b*", "*" + "[!x]" * 250 + "x*"],
    ],
)
@pytest.mark.parametrize("path", ["a" * PATH_BYTES_MAX, "a/" * (PATH_BYTES_MAX // 2), "ab" * (PATH_BYTES_MAX // 2)])
def test_no_decision_takes_longer_than_the_bound(patterns: list[str], path: str) -> None:
    globs = compile_globs(patterns)
    spent = []
    for _ in range(3):
        started = time.process_time()
        globs.matches(path)
        spent.append(time.process_time() - started)
    assert min(spent) < DECISION_S_MAX


# The naive model: a piece maps a start in the path to every place where it may end.
Ends = Callable[[bytes, int], set[int]]
Piece = tuple[str, Ends]


def literal(text: str) -> Piece:
    raw = text.encode()
    escaped = "".join("\\" + letter if letter in "*?[]{},\\" else letter for letter in text)
    return escaped, lambda path, at: {at + len(raw)} if path.startswith(raw, at) else set()


def deep(path: bytes, at: int) -> set[int]:
    return {at} | {place + 1 for place in range(at, len(path)) if path[place : place + 1] == b"/"}


def slash_deep(path: bytes, at: int) -> set[int]:
    return deep(path, at + 1) if path.startswith(b"/", at) else set()


def slash_all(path: bytes, at: int) -> set[int]:
    return star(path, at + 1) if path.startswith(b"/", at) else set()


def star(path: bytes, at: int) -> set[int]:
    return set(range(at, len(path) + 1))


def any_byte(path: bytes, at: int) -> set[int]:
    return {at + 1} if at < len(path) else set()


def not_a(path: bytes, at: int) -> set[int]:
    return {at + 1} if at < len(path) and path[at : at + 1] != b"a" else set()


def run(pieces: list[Piece], path: bytes, at: int) -> set[int]:
    ends = {at}
    for _, piece in pieces:
        ends = {end for start in ends for end in piece(path, start)}
    return ends


def braces(choices: list[list[Piece]]) -> Piece:
    text = "{" + ",".join("".join(part for part, _ in choice) for choice in choices) + "}"
    return text, lambda path, at: {end for choice in choices for end in run(choice, path, at)}


DEEPER: Piece = ("/**/", slash_deep)
LETTERS = st.sampled_from(["a", "b", "ab", ".", "é", "{", "*"]).map(literal)
PLAIN = st.one_of(LETTERS, st.just(("*", star)), st.just(("?", any_byte)), st.just(("[!a]", not_a)))
BRACES = st.lists(st.lists(PLAIN, min_size=1, max_size=2), min_size=1, max_size=2).map(braces)
RUNS = st.lists(st.one_of(PLAIN, PLAIN, BRACES), min_size=1, max_size=3)
PATHS = st.text(alphabet="ab/.é{*", max_size=12)


def whole(pieces: list[Piece]) -> list[Piece]:
    """Keep two plain stars apart: written side by side they would read as `**`."""
    return [piece for before, piece in zip([None, *pieces], pieces, strict=False) if piece[0] != "*" or piece != before]


@st.composite
def patterns_with_meaning(draw: st.DrawFn) -> list[Piece]:
    pieces: list[Piece] = [("**/", deep)] if draw(st.booleans()) else []
    for index, part in enumerate(draw(st.lists(RUNS, min_size=1, max_size=3))):
        if index:
            pieces.append(draw(st.sampled_from([DEEPER, literal("/")])))
        pieces += part
    if draw(st.booleans()):
        pieces.append(("/**", slash_all))
    return pieces


@settings(max_examples=300, deadline=None)
@given(patterns_with_meaning(), st.lists(PATHS, min_size=1, max_size=20))
def test_decisions_agree_with_a_naive_model(pieces: list[Piece], paths: list[str]) -> None:
    pieces = whole(pieces)
    pattern = "".join(text for text, _ in pieces)
    assume(pattern.count("{") - pattern.count(r"\{") <= 4)
    globs = compile_globs([pattern])
    for path in paths:
        raw = path.encode()
        assert (globs.matches(path) is not None) == (len(raw) in run(pieces, raw, 0))
