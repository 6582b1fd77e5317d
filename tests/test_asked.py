"""What stands before a person who decides: the command, the content or the change, with the path in the workspace."""

from __future__ import annotations

from typing import Any

import pytest

from backplane.cli import asking
from backplane.contract.approval import chosen
from backplane.view.asked import LINE_CHARS_MAX, LINES_MAX, decided

STAGE = "/home/u/.local/state/backplane/stage/0a1b2c3d-0000-4000-8000-000000000000/tree"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"command": "rm -rf build", "input": {"command": "rm -rf build"}}, ["command: rm -rf build"]),
        ({"input": {"command": "set -e\nrm -rf build", "timeout": 5}},
         ["command: set -e", "  rm -rf build", "timeout: 5"]),
        ({"command": "make", "cwd": STAGE}, ["command: make"]),
        ({"command": "make", "cwd": f"{STAGE}/sub"}, ["command: make", "cwd: sub"]),
        ({"input": {"file_path": f"{STAGE}/evil.sh", "content": "#!/bin/sh\nrm -rf ~\n"}},
         ["--- evil.sh", "+#!/bin/sh", "+rm -rf ~"]),
        ({"input": {"filePath": f"{STAGE}/calc.py", "oldString": "a - b", "newString": "a + b", "replaceAll": True}},
         ["replaceAll: True", "--- calc.py", "-a - b", "+a + b"]),
        ({"input": {"path": "x", "edits": [{"old_str": "1", "new_str": "2"}, {"old_str": "3", "new_str": ""}]}},
         ["--- x", "-1", "+2", "--- x", "-3"]),
        ({"input": {"content": [{"type": "diff", "path": f"{STAGE}/a", "oldText": "1", "newText": "2"}]}},
         ["--- a", "-1", "+2"]),
        ({"input": {"changes": [{"path": "a", "diff": "@@ -1 +1 @@\n-1\n+2"}]}}, ["--- a", "@@ -1 +1 @@", "-1", "+2"]),
        ({"input": {"path": "a", "command": "str_replace", "old_str": "1", "new_str": "2"}},
         ["command: str_replace", "--- a", "-1", "+2"]),
        ({"diff": f"--- {STAGE}/a\n+++ {STAGE}/a\n-1\n+2"}, ["--- a", "+++ a", "-1", "+2"]),
        ({"input": {"path": "a"}}, ["path: a"]),
        ({"input": {"url": "https://example.org"}}, ["url: https://example.org"]),
        ({"input": {"x": "\x1b[2J"}}, ["x: \\x1b[2J"]),
        ({"kind": "input", "question": "which?", "options": ["a", {"label": "b"}]}, ["1. a", "2. b"]),
        ({"input": ["no object"]}, []),
    ],
)  # fmt: skip
def test_a_question_shows_what_is_decided(body: dict[str, Any], expected: list[str]) -> None:
    assert decided(body) == expected
    assert asking.question("m", body).splitlines()[1:] == [f"  {line}" for line in expected]


def test_a_long_question_says_how_much_more_there_is() -> None:
    lines = decided({"input": {"path": "a", "content": "x" * (LINE_CHARS_MAX + 9) + "\n" + "y\n" * LINES_MAX}})
    assert lines[1].endswith("… 10 more characters")
    assert lines[-1] == "… 2 more lines"
    shown = asking.question("m", {"input": {"path": "a", "content": "y\n" * 100}}).splitlines()
    assert len(shown) == asking.SHOWN_LINES_MAX + 2
    assert "61 more lines" in shown[-1]


@pytest.mark.parametrize(
    ("typed", "options", "expected"),
    [
        ("1", ["red", "green"], "red"), ("2", ["red", {"label": "green"}], "green"), ("9", ["red", "green"], None),
        ("0", ["red", "green"], None), ("99999999999999999999", ["red"], None), ("blue", ["red", "green"], "blue"),
        ("9", [], "9"), ("9", None, "9"), ("9", ["8", "9"], "9"), ("", ["red"], ""),
    ],
)  # fmt: skip
def test_a_number_chooses_an_option(typed: str, options: Any, expected: str | None) -> None:
    assert chosen(typed, options) == expected
    answer = asking.judge(typed, {"kind": "input", "options": options})
    assert (answer.text if answer is not None else None) == expected
