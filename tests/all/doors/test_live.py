"""The foot of a live terminal: painted over in place, with the text above it whole; nothing painted where none is."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backplane.cli.terminal import Terminal
from backplane.contract import events as kinds
from backplane.view import live
from backplane.view.columns import Span, tail, width
from backplane.view.console import Look
from backplane.view.markdown import Markdown
from backplane.view.picture import Picture
from tests.peers import ROOT
from tests.runs import HELLO, PRELUDE
from tests.terminal import Window, screen, typed

BODY = """
from datetime import datetime, timezone
def say(type, **body):
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    put(event(run, type=type, ts=now, **body))
hello()
run = take()
states = {"read the **test**": "completed", "mend it": "in_progress", "run it": "pending"}
plan = [{"step": step, "status": state} for step, state in states.items()]
say("warning", message="plan", ext={"task": {"plan": plan}})
for part in ("# First\\nI read `a.py` ", "and \\x1b[2J\\x1b]0;mine\\x07 see\\n", "- one\\n", "half a "):
    say("assistant_delta", text=part)
say("file_changed", path="a.py", summary="modified")
say("tool_call", tool_name="bash", tool_use_id="1", input={"command": "sleep " + "9" * 300})
for number in range(LINES):
    say("warning", message="o", ext={"output": {"text": "line %d %s\\n" % (number, "wide " * 60)}})
    time.sleep(PAUSE_S)
say("tool_result", tool_name="bash", tool_use_id="1", output="done", is_error=False)
say("assistant_message", text="All **good**.")
put(final(run))
end()
"""
MOVES = re.compile(r"\x1b\[[0-9;?]*([A-Za-z])")

Words = Callable[..., list[str]]


@pytest.fixture
def words(tmp_path: Path) -> Words:
    def make(*, lines: int = 6, pause_s: float = 0.25) -> list[str]:
        host = tmp_path / "agent.py"
        body = BODY.replace("LINES", str(lines)).replace("PAUSE_S", str(pause_s))
        host.write_text(PRELUDE.format(hello=json.dumps(HELLO)) + body)
        return ["run", "mend it", "--root", str(tmp_path), "--sidecar", f"{sys.executable} {host}"]

    return make


def frames(text: str) -> list[list[str]]:
    """What stands on the terminal after each frame."""
    ends = [found.end() for found in re.finditer(r"\x1b\[\?2026l", text)]
    return [screen(text[:end]) for end in ends]


# On a pseudo-terminal -------------------------------------------------------------------------------------------------


def test_the_foot_fits_its_width_and_leaves_nothing_behind(words: Words) -> None:
    columns = 40
    code, text = typed(words(), columns=columns)
    assert code == 0
    lines = [line for frame in frames(text) for line in frame]
    (status,) = {line.split("  ")[0] for line in lines if "sidecar:" in line} - {"starting"}
    assert status == "working"
    assert any(line.startswith("▸ mend it") for line in lines)
    assert any(line.startswith("✎ a.py") for line in lines)
    assert any(re.match(r"→ bash sleep 9+", line) for line in lines)
    painted = [line for line in lines if re.match("working|[▸✓·✎] ", line)]
    assert max(map(width, painted)) < columns
    left = screen(text)
    assert not any("working" in line or line.startswith("▸") for line in left)
    assert [line for line in left if line.startswith("line ")] == [f"line {n} {'wide ' * 60}" for n in range(6)]
    assert "2J" not in "".join(found[0] for found in MOVES.finditer(text))


def test_words_are_drawn_as_markdown_and_those_without_an_end_are_seen(words: Words) -> None:
    _, text = typed(words())
    assert "\x1b[1mFirst\x1b[0m" in text
    assert "I read \x1b[36ma.py\x1b[0m and \\x1b[2J" in text
    assert "• one" in text
    assert "All \x1b[1mgood\x1b[0m." in text
    # What was begun is whole in the scrollback.
    assert "half a " in screen(text)


def test_where_nothing_is_painted_there_are_only_lines(words: Words) -> None:
    code, text = typed(words(pause_s=0.1), CI="1", NO_COLOR="1")
    assert code == 0
    assert "\x1b" not in text
    assert text.count("line 5") == 1
    assert "tool: bash sleep" in text


def test_plain_is_a_setting_and_colours_are_its_own_question(words: Words) -> None:
    _, text = typed(words(pause_s=0.1), ACCESSIBLE="1")
    assert set(MOVES.findall(text)) == {"m"}
    piped = {**os.environ, "FORCE_COLOR": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "backplane", *words(pause_s=0.0)]
    done = subprocess.run(command, capture_output=True, text=True, env=piped, timeout=30, check=True)
    assert set(MOVES.findall(done.stdout)) == {"m"}


def test_a_pipe_gets_no_escape_and_no_line_twice(words: Words) -> None:
    command = [sys.executable, "-m", "backplane", *words(pause_s=0.15)]
    piped = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=piped, timeout=30, check=True)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", done.stdout + done.stderr)
    assert [done.stdout.count(f"line {number} ") for number in range(6)] == [1] * 6


def test_a_narrower_window_is_painted_anew_and_a_stop_in_between_too(words: Words) -> None:
    window = Window(words(lines=8))
    window.until(lambda: "working" in window.text)
    window.resize(50)
    at = len(window.text)
    window.until(lambda: "working" in window.text[at:])
    window.child.send_signal(signal.SIGSTOP)
    time.sleep(0.3)
    window.child.send_signal(signal.SIGCONT)
    at = len(window.text)
    window.until(lambda: "working" in window.text[at:])
    assert "A" not in MOVES.findall(window.text[at:].split("working")[0])  # What the shell wrote is left alone.
    assert window.ends() == 0
    assert window.text.count("line 7") == 1


def test_watch_paints_the_same_foot_and_ctrl_c_leaves_its_text_alone(words: Words, backplane_home: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "backplane", *words(lines=40, pause_s=0.2), "--json"],
        stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        ends = time.monotonic() + 30
        while not list(backplane_home.glob("runs/*/trace.jsonl")) and time.monotonic() < ends:
            time.sleep(0.05)
        window = Window(["watch"])
        window.until(lambda: "working" in window.text)
        window.child.send_signal(signal.SIGINT)
        assert window.ends() == 130
        assert run.poll() is None
        left = screen(window.text)
        assert not any(line.startswith("working") for line in left)
        assert "half a " in left
    finally:
        run.terminate()
        run.wait(10)


# Without a terminal ---------------------------------------------------------------------------------------------------

texts = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=30)
blocks = st.lists(texts.map(lambda text: (Span(text),)), max_size=5)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.lists(texts, max_size=3), blocks), max_size=12))
def test_after_each_frame_stand_the_text_and_the_block_and_nothing_else(steps: list[Any]) -> None:
    painter, written, above = Terminal(Look(True, colours=False), Picture()), "", []
    for added, lines in steps:
        painter.add("".join(f"{text}\n" for text in added))
        above += added
        written += painter.draw(lines, 80)
        wanted = [*above, *("".join(span.text for span in line) for line in lines), ""]
        assert [line.rstrip() for line in screen(written)] == [line.rstrip() for line in wanted]


def test_a_frame_that_changes_nothing_writes_nothing() -> None:
    painter = Terminal(Look(True), Picture())
    assert painter.draw([(Span("a", "red"),), (Span("b"),)], 80)
    assert painter.draw([(Span("a", "red"),), (Span("b"),)], 80) == ""


@settings(max_examples=50)
@given(st.text(max_size=200), st.integers(2, 40), st.integers(1, 4))
def test_the_tail_of_a_line_fits(text: str, columns: int, rows: int) -> None:
    shown = tail(text, columns, rows)
    assert len(shown) <= rows
    assert all(width(row) <= columns for row in shown)


@pytest.mark.parametrize("rows", [3, 24])
def test_the_foot_leaves_room_on_a_low_terminal(rows: int) -> None:
    picture = Picture(started_at="2026-01-15T12:00:00Z", backend="x")
    plan = [{"step": f"step {n}", "status": "pending"} for n in range(30)]
    ts = "2026-01-15T12:00:00Z"
    picture.take(kinds.Warned(ts=ts, message="plan", ext={"task": {"plan": plan}}))
    for number in range(9):
        picture.take(kinds.ToolCall(ts=ts, tool_name="bash", tool_use_id=f"{number}", input={"command": "ls"}))
    now_ms = 1_768_478_400_000 + 65_000
    lines = live.block(picture, now_ms=now_ms, written="x" * 500, columns=40, rows=rows)
    assert len(lines) <= max(rows - live.ROWS_LEFT, 1)
    assert lines[-1][0].text == "working"
    assert "1 min 5 s" in lines[-1][1].text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("## A heading ##", [[("A heading", "bold")]]),
        ("a `b` **c**d", [[("a ", ""), ("b", "cyan"), (" ", ""), ("c", "bold"), ("d", "")]]),
        ("  * item", [[("  • ", ""), ("item", "")]]),
        ("a ** b **", [[("a ** b **", "")]]),
        ("2 * 3 * 4", [[("2 * 3 * 4", "")]]),
        ("> said", [[("> said", "dim")]]),
        ("---", [[("---", "dim")]]),
        ("```py\n# not a heading\n```\n# one", [
            [("```py", "dim")], [("# not a heading", "cyan")], [("```", "dim")], [("one", "bold")],
        ]),
        ("````\n```\n````\nx", [[("````", "dim")], [("```", "cyan")], [("````", "dim")], [("x", "")]]),
        ("", [[("", "")]]),
    ],
)  # fmt: skip
def test_markdown(text: str, shown: list[list[tuple[str, str]]]) -> None:
    drawn = Markdown()
    assert [[(span.text, span.colour) for span in drawn.line(line)] for line in text.split("\n")] == shown


@given(st.text(max_size=100))
def test_markdown_loses_nothing_but_marks(text: str) -> None:
    drawn = Markdown()
    for line in text.split("\n"):
        said = "".join(span.text for span in drawn.line(line))
        assert re.sub(r"[\s`*#+•-]", "", said) == re.sub(r"[\s`*#+•-]", "", line)
