"""Docstrings, comments and help are plain English: no prepositions in place of verbs, no words of our own.

A room is listed once its texts are read; the others follow. `python -m tests.test_plain FOLDER` prints what is marked.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "backplane"

WORDS = re.compile(
    r"\b(whoever|somebody|told|gone on with|let go|held against|put on record|is none of|that is none|are none"
    r"|of a stranger|for who\b|as good as|made anew|read anew|at hand|from that on|a line as JSON|a run and line"
    r"|nobody (knows|sees|is here|heard))\b",
    re.IGNORECASE,
)
"""Words that make a reader stop: persons for things, and verbs that the field does not use."""

FIRST = re.compile(
    r"(Of|For|With|In|At|By|To|From|Until|Where|What|Whether|Who|How|That|As|So|Beyond|Between|Beside|Here) "
)
"""How a docstring begins that has no subject and verb."""

PLAIN = (
    *(
        "cli",
        "conform",
        "dialects",
        "host",
        "process",
        "protocol",
        "runtime",
        "sandbox",
        "scale",
        "schemas",
        "serve",
        "telemetry",
    ),
    *("testing", "tools", "upstream", "view", "web"),
    *("__init__.py", "__main__.py", "api.py", "config.py", "errors.py", "resources.py"),
)
"""Rooms, folders in one, or modules, whose texts are plain."""


def texts(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield the docstrings of a file, those below constants too, and its comments: line, text, is it a docstring."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = getattr(statement, "value", None) if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.value.strip(), True
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("# "), False


def marked(folder: Path) -> list[str]:
    """Return the place of each text that a reader would have to read twice."""
    return [
        f"{path.relative_to(PACKAGE)}:{line}: {text.partition(chr(10))[0][:100]}"
        for path in ([folder] if folder.suffix else sorted(folder.rglob("*.py")))
        for line, text, is_docstring in texts(path)
        if WORDS.search(text) or (is_docstring and FIRST.match(text))
    ]


@pytest.mark.parametrize("room", PLAIN)
def test_the_texts_of_a_room_are_plain_english(room: str) -> None:
    assert marked(PACKAGE / room) == []


if __name__ == "__main__":
    print("\n".join(line for name in sys.argv[1:] for line in marked(PACKAGE / name)))
