"""Events as text for people: each thing once, in the order in which it came."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane.cli.ended import diff
from backplane.contract.events import (
    AgentEvent,
    AssistantDelta,
    AssistantMessage,
    CommandExecuted,
    ToolCall,
    ToolResult,
)
from backplane.view.columns import Span, width, wrapped
from backplane.view.console import Look
from backplane.view.diff import changes
from backplane.view.text import in_workspace
from backplane.view.values import about
from tests.receipt_writer import TS

COMMAND = "make test"


def call(id: str = "c1", command: str = COMMAND) -> AgentEvent:
    return ToolCall(ts=TS, tool_name="bash", tool_use_id=id, input={"command": command})


def ran(code: int | None = 0, command: str = COMMAND, **more: Any) -> AgentEvent:
    return CommandExecuted(ts=TS, command=command, exit_code=code, **more)


def result(id: str = "c1", *, failed: bool = False) -> AgentEvent:
    return ToolResult(ts=TS, tool_name="bash", tool_use_id=id, output="fine\n", is_error=failed)


def shown(*events: AgentEvent) -> list[str]:
    look = Look(terminal=False)
    return "".join(map(look.event, events)).splitlines()


@pytest.mark.parametrize(
    ("events", "lines"),
    [
        ([call(), ran(), result()], ["tool: bash make test", "tool done: bash  (exit 0)"]),
        ([call(), ran(3), result(failed=True)], ["tool: bash make test", "tool failed: bash  (exit 3)"]),
        ([call(), result(), ran()], ["tool: bash make test", "tool done: bash fine"]),
        ([call(), result(failed=True), ran(3)], ["tool: bash make test", "tool failed: bash: fine"]),
        ([ran()], ["command: make test  (exit 0)"]),
        ([call(), ran(command="make")], ["tool: bash make test", "command: make  (exit 0)"]),
        (
            [call(), ran(1, output_preview="oh no\n"), result(failed=True)],
            ["tool: bash make test", "tool failed: bash  (exit 1)", "  oh no"],
        ),
        (
            [call("c1"), call("c2"), ran(), ran(2), result("c1"), result("c2", failed=True)],
            ["tool: bash make test"] * 2 + ["tool done: bash  (exit 0)", "tool failed: bash  (exit 2)"],
        ),
    ],
)
def test_a_command_is_shown_once_whatever_tells_of_it(events: list[AgentEvent], lines: list[str]) -> None:
    assert shown(*events) == lines


def test_a_result_of_another_call_is_told_all_the_same() -> None:
    assert shown(call(), ran(), result("c9")) == [
        "tool: bash make test",
        "tool done: bash  (exit 0)",
        "tool done: bash fine",
    ]


PROSE = """\
A **first** line that goes on beyond the width
- an item that is broken, too
```
a line of code that stays whole whatever its width is
```
| a row | of a table | stays whole |
"""


@pytest.mark.parametrize("pieces", [[PROSE], list(PROSE), [PROSE[:20], PROSE[20:]]])
@pytest.mark.parametrize("colours", [True, False])
def test_prose_wraps_at_words_and_code_and_tables_do_not(pieces: list[str], colours: bool) -> None:
    look = Look(True, colours=colours, columns=lambda: 20)
    text = "".join(look.event(AssistantDelta(ts=TS, text=piece)) for piece in pieces)
    text += look.event(AssistantMessage(ts=TS, text=PROSE))
    mark, item = ("", "• ") if colours else ("**", "- ")
    assert re.sub("\x1b\\[[0-9]*m", "", text).splitlines() == [
        *([f"A {mark}first{mark} line that", "goes on beyond the", "width"] if colours else
          ["A **first** line", "that goes on beyond", "the width"]),
        f"{item}an item that is", "  broken, too",
        "```", "a line of code that stays whole whatever its width is", "```",
        "| a row | of a table | stays whole |",
    ]  # fmt: skip
    whole = Look(True, colours=colours, columns=lambda: 20).event(AssistantMessage(ts=TS, text=PROSE))
    assert whole == text


@given(st.lists(st.tuples(st.text("ab 漢 ", max_size=12), st.sampled_from(["", "bold"])), max_size=5),
       st.integers(1, 20), st.integers(0, 3))  # fmt: skip
def test_wrapping_loses_nothing_but_the_spaces_at_breaks(spans: list[tuple[str, str]], size: int, indent: int) -> None:
    line = tuple(Span(text, colour) for text, colour in spans)
    rows = ["".join(span.text for span in row) for row in wrapped(line, size, indent)]
    assert "".join(rows).replace(" ", "") == "".join(text for text, _ in spans).replace(" ", "")
    assert all(width(row.rstrip(" ")) <= size or " " not in row.strip(" ") for row in rows)


STAGE = "/home/u/.local/state/backplane/stage/219132bc-e618-4a51-b53d-dce222fd2ce9/tree"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (f"{STAGE}/new.txt", "new.txt"),
        (f"cat {STAGE}/a '{STAGE}/b'", "cat a 'b'"),
        (f"{STAGE}", "."),
        (f"{STAGE}/", "./"),
        (f"cd {STAGE} && ls", "cd . && ls"),
        (f"{STAGE}s/new.txt", f"{STAGE}s/new.txt"),
        ("/stage/x/tree/a", "/stage/x/tree/a"),
    ],
)
def test_a_path_in_the_copy_is_shown_as_it_is_in_the_workspace(text: str, seen: str) -> None:
    assert in_workspace(text) == seen


def test_a_call_that_writes_by_patch_names_its_files() -> None:
    assert about({"changes": [{"path": "a.txt", "diff": "+x"}, {"path": "b.txt"}]}) == "a.txt, b.txt"
    assert about({"filePath": f"{STAGE}/new.txt", "content": "x"}) == f"{STAGE}/new.txt"


def test_the_data_of_a_binary_file_is_not_shown(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        said = subprocess.run(["git", *words], cwd=tmp_path, capture_output=True, check=True, timeout=60)
        return said.stdout.decode()

    git("init", "-q")
    patch = tmp_path / "the.patch"
    (tmp_path / "x.bin").write_bytes(bytes([0, *os.urandom(299)]))
    (tmp_path / "y").write_text("literal 5\nGIT binary patch\n")
    git("add", "-A")
    patch.write_text(git("diff", "--cached", "--binary"))
    shown = [line.rstrip("\n") for line in diff(patch, Look(False))]
    assert [line for line in shown if not line.startswith(("index ", "new file", "--- ", "+++ ", "@@"))] == [
        "diff --git a/x.bin b/x.bin",
        "binary file",
        "diff --git a/y b/y",
        "+literal 5",
        "+GIT binary patch",
    ]


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("diff --git a/x b/x", "x"),
        ('diff --git "a/caf\\303\\251.txt" "b/caf\\303\\251.txt"', "café.txt"),
        ('diff --git a/cafe.txt "b/caf\\303\\251.txt"', "café.txt"),
        ('diff --git "a/caf\\303\\251.txt" b/cafe.txt', "cafe.txt"),
        ('diff --git "a/a\\"b\\\\c\\td" "b/a\\"b\\\\c\\td"', 'a"b\\c\td'),
        ('diff --git "a/\\377" "b/\\377"', "\\377"),
        ('diff --git "a/\\346\\274\\242 b/\\345\\255\\227" "b/\\346\\274\\242 b/\\345\\255\\227"', "漢 b/字"),
    ],
)
def test_a_file_is_named_as_it_is(line: str, path: str) -> None:
    assert [change.path for change in changes([line])] == [path]
