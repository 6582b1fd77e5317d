"""The picture of a run and what it is drawn with: widths, spans of time, patches."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane.cli.terminal import Terminal
from backplane.contract.events import (
    AgentEvent,
    AssistantMessage,
    CommandExecuted,
    Failed,
    FileChanged,
    ToolCall,
    ToolResult,
    carry,
)
from backplane.contract.receipt import Usage
from backplane.contract.unknown import misspelt
from backplane.view import columns, diff, figures, live
from backplane.view.console import Look
from backplane.view.picture import KEPT_MAX, Picture, Step
from backplane.view.text import printable
from tests.receipt_writer import TS, delta, receipt_of

TEXT = st.text() | st.text("a漢́e\u0300😀\t", max_size=30)


@given(TEXT, st.integers(0, 40))
def test_text_is_never_wider_than_its_column(text: str, size: int) -> None:
    fitted = columns.fitted(text, size)
    assert columns.width(fitted) <= size
    assert fitted == text or fitted.endswith("…") or size == 0 or len(fitted) < len(text)
    assert columns.width(columns.padded(text, size)) == size


@pytest.mark.parametrize(("text", "width"), [("abc", 3), ("漢字", 4), ("e\u0301", 1), ("", 0), ("😀", 2)])
def test_width_is_what_a_terminal_takes(text: str, width: int) -> None:
    assert columns.width(text) == width


def test_a_million_marks_over_one_character_are_not_drawn() -> None:
    assert len(printable("a" + "\u0301" * 1_000_000)) <= 10


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0.0 s"),
        (4230, "4.2 s"),
        (59_949, "59.9 s"),
        (59_960, "1 min"),
        (65_000, "1 min 5 s"),
        (3_600_000, "1 h"),
        (8_100_000, "2 h 15 min"),
        (-5, "0.0 s"),
    ],
)
def test_a_span_is_told_in_its_two_largest_units(ms: int, text: str) -> None:
    assert figures.lasting(ms) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("5m", 300), ("2h", 7200), ("2d", 172_800), ("1w", 604_800), ("x", None), ("-1", None)],
)
def test_a_span_is_read(text: str, seconds: int | None) -> None:
    assert figures.span_s(text) == seconds


def test_what_is_unknown_is_not_nothing() -> None:
    assert (figures.money(None), figures.count(None)) == ("?", "?")
    assert (figures.money(0), figures.count(0)) == ("$0.0000", "0")
    assert [figures.money(micros) for micros in (10, 12_340, 999_960, 2_500_000)] == [
        *("<$0.0001", "$0.0123", "$1.00", "$2.50")
    ]
    counts = {950: "950", 12_340: "12.3k", 999_949: "999.9k", 999_950: "1.0M", 4_500_000: "4.5M"}
    assert {number: figures.count(number) for number in counts} == counts


# A patch --------------------------------------------------------------------------------------------------------------


def test_a_patch_of_git_is_counted_as_git_counts_it(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=T", "-c", "user.email=t@example.org", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=30).stdout

    git("init", "-q")
    (tmp_path / "a b.txt").write_text("one\ntwo\n-- three\n")
    (tmp_path / "gone.txt").write_text("--- a\n+++ b\n@@ -1 +1 @@\n")
    (tmp_path / "old.txt").write_text("same\n" * 20)
    git("add", "-A")
    git("commit", "-qm", "start")
    (tmp_path / "a b.txt").write_text("one\n++ two\nfour\n-- three\n")
    (tmp_path / "gone.txt").unlink()
    (tmp_path / "old.txt").rename(tmp_path / "new.txt")
    (tmp_path / "empty.txt").write_text("")
    git("add", "-A")
    patch = git("diff", "--cached", "-M", "--no-color")
    counted = [line.split("\t") for line in git("diff", "--cached", "-M", "--numstat").splitlines()]
    found = diff.changes(patch.split("\n"))
    assert [(str(file.added), str(file.removed)) for file in found] == [(row[0], row[1]) for row in counted]
    assert [file.path for file in found] == ["a b.txt", "empty.txt", "gone.txt", "new.txt"]


@given(st.lists(st.sampled_from(["+", "-", " ", "@@ -1 +1 @@", "@@ -9,x +,", "diff --git ", "diff --git a/ b/", "x"])))
def test_any_text_is_read_as_a_patch(lines: list[str]) -> None:
    assert [line.text for line in diff.lines(lines)] == lines
    diff.changes(lines)


# The picture ----------------------------------------------------------------------------------------------------------


def drawn(*events: AgentEvent) -> Picture:
    picture = Picture()
    for event in events:
        picture.take(event)
    return picture


def call(id: str = "c1", tool: str = "bash", **input: Any) -> AgentEvent:
    return ToolCall(ts=TS, tool_name=tool, tool_use_id=id, input=input)


def result(id: str = "c1", *, failed: bool = False) -> AgentEvent:
    return ToolResult(ts=TS, tool_name="bash", tool_use_id=id, output="out", is_error=failed)


def ask(id: str = "a1") -> AgentEvent:
    return carry("ask", {"id": id, "kind": "tool", "name": "bash", "input": {"command": "rm"}}, ts=TS, message="asks")


def answer(id: str = "a1", decision: str = "allow") -> AgentEvent:
    return carry("answer", {"id": id, "decision": decision, "by": "caller", "reason": "no"}, ts=TS, message="answers")


def test_tools_are_open_until_their_result() -> None:
    picture = drawn(call("c1", command="make"), call("c2", command="test"), result("c1", failed=True))
    assert [one.about for one in picture.open_calls.values()] == ["test"]
    assert (picture.calls, picture.calls_failed) == (2, 1)
    assert (picture.same_failure.what, picture.same_failure.number) == ("bash: out", 3)


def test_a_question_waits_until_it_is_answered() -> None:
    picture = drawn(delta("x"), ask())
    assert picture.state == "waiting"
    assert picture.waits is not None
    assert (picture.waits.tool, picture.waits.about, picture.waits.number) == ("bash", "rm", 2)
    picture.take(answer(decision="deny"))
    assert (picture.state, len(picture.open_asks), picture.denials) == ("working", 0, 1)
    assert [(one.text, one.event) for one in picture.denied] == [("bash rm: no (by caller)", 3)]


STEPS = [{"content": "read", "status": "completed"}, {"step": "write", "status": "inProgress"}, {"step": "test"}]


@pytest.mark.parametrize("event", [carry("task", {"plan": STEPS}, ts=TS, message="plan"), call(todos=STEPS)])
def test_a_plan_is_read_from_wherever_an_agent_tells_it(event: AgentEvent) -> None:
    assert drawn(event).plan == (Step("read", "done"), Step("write", "doing"), Step("test", "open"))


def test_a_repeated_request_is_shown_until_the_model_answers() -> None:
    picture = drawn(AssistantMessage(ts=TS, text="hello"), carry("retry", {"status": 529}, ts=TS, message="again"))
    assert (picture.message, picture.retries) == ("hello", 1)
    assert picture.retry is not None
    picture.take(delta("right"))
    assert picture.retry is None


def test_counters_are_the_last_ones_reported_and_then_the_receipts() -> None:
    reported = carry("usage", {"input_tokens": 7, "estimated_cost_usd": 0.25}, ts=TS, message="used")
    picture = drawn(reported, FileChanged(ts=TS, path="a", summary="s"), CommandExecuted(ts=TS, command="c"))
    assert (picture.usage.input_tokens, picture.cost_usd_micros) == (7, 250_000)
    assert picture.usage.output_tokens is None
    picture.end(receipt_of([], usage=Usage(input_tokens=9)))
    assert (picture.state, picture.usage.input_tokens, picture.cost_usd_micros) == ("ended", 9, None)


def test_memory_does_not_grow_with_a_run() -> None:
    picture = Picture()
    for number in range(5_000):
        picture.take(call(f"c{number}", command="x" * 100))
        picture.take(result(f"c{number}", failed=True))
        picture.take(Failed(ts=TS, message="y" * 100))
        picture.take(carry("output", {"text": "z" * 100}, ts=TS, message="z"))
    assert len(picture.faults) == KEPT_MAX
    assert not picture.open_calls
    assert len(picture.output) <= 16 * 1024


NAMES = st.sampled_from(["id", "plan", "text", "kind", "name", "decision", "status", "taken_back"])
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
CARRIED = st.sampled_from(["ask", "answer", "task", "usage", "retry", "output", "checkpoint", "turn"])


@given(st.lists(st.tuples(CARRIED, JUNK)))
def test_whatever_an_event_carries_the_picture_goes_on(bodies: list[tuple[str, Any]]) -> None:
    picture = drawn(*(carry(name, body, ts=TS, message="m") for name, body in bodies))
    assert picture.events == len(bodies)
    assert picture.state in ("starting", "working", "waiting")


@given(JUNK)
def test_whatever_a_receipt_adds_the_picture_ends(added: Any) -> None:
    picture = drawn(delta("x"))
    picture.end(receipt_of([], usage_raw={"backplane": {"end": added, "error": added, "patch": added}}))
    assert picture.state == "ended"


# What is painted ------------------------------------------------------------------------------------------------------


def test_a_painter_writes_nothing_if_nothing_has_changed() -> None:
    def block(*texts: str) -> list[columns.Line]:
        return [(columns.Span(text),) for text in texts]

    painter = Terminal(Look(True, colours=False), Picture())
    first = painter.draw(block("one", "two", "three"), 80)
    assert ("one\ntwo\nthree\n" in first, "\x1b[" in first) == (True, True)
    assert painter.draw(block("one", "two", "three"), 80) == ""
    assert "2\n" in painter.draw(block("one", "2", "three"), 80)
    painter.add("above\n")
    whole = painter.draw(block("one", "2", "three"), 80)
    assert "\x1b[3A\x1b[J" in whole
    assert whole.index("above") < whole.index("one")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("modle", "model"), ("model", "model"), ("modell", "model"), ("mdel", "model"), ("Max-Turns", "max_turns"),
        ("max_tunrs", "max_turns"), ("en", "env"), ("laen", "lane"), ("evn", None), ("vne", None), ("xyz", None),
    ],
)  # fmt: skip
def test_one_letter_or_two_exchanged_are_a_misspelling(name: str, meant: str | None) -> None:
    assert misspelt(name, ["model", "max_turns", "env", "lane"]) == meant


def test_the_foot_counts_the_calls_that_it_has_no_room_for() -> None:
    picture = drawn(*(call(f"c{number}", command="make") for number in range(live.CALLS_MAX + 2)))
    picture.started_at = TS
    now_ms = (figures.milliseconds(TS) or 0) + 5_000
    foot = live.block(picture, now_ms=now_ms, written="", columns=80, rows=24)
    texts = ["".join(span.text for span in line) for line in foot]
    assert texts[0] == "→ 2 more open calls"
    assert sum("make" in text for text in texts) == live.CALLS_MAX
