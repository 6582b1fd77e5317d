"""The shipped hosts as programs: what the shell runs and reports, what the mock plays."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.peers import OURS, PLAIN, PYTHON, ROOT, Child, is_gone, run

SHELL = (*PYTHON, str(ROOT / "hosts" / "shell.py"))
MOCK = (*PYTHON, str(ROOT / "hosts" / "mock.py"))


def events(told: list[Any], kind: str) -> list[Any]:
    return [m["event"] for m in told if m["t"] == "event" and m["event"]["type"] == kind]


def shell(root: Path, task: str, **members: Any) -> list[Any]:
    with Child(SHELL) as child:
        child.send(run("r1", task, PLAIN, workspace={"root": str(root)}, **members))
        child.close_stdin()
        told = child.until("final", "fatal", wait_s=15.0)
        assert child.wait() == 0
        assert "Traceback" not in child.stderr()
    return told


def output(told: list[Any]) -> str:
    pieces = [event["ext"]["output"]["text"] for event in events(told, "warning") if "output" in event.get("ext", {})]
    return "".join(pieces)


def mock(root: Path, *steps: Any, end: str = "final", extensions: Any = PLAIN, **members: Any) -> list[Any]:
    config = {"vendor": {"mock": {"scenario": list(steps)}}}
    with Child(MOCK) as child:
        child.send(run("r1", "do it", extensions, workspace={"root": str(root)}, config=config, **members))
        child.close_stdin()
        told = child.until(end)
        assert child.wait() == 0
    return told


# shell ----------------------------------------------------------------------------------------------------------------


def test_a_command_runs_in_the_workspace_and_its_output_streams(tmp_path: Path) -> None:
    told = shell(tmp_path, "pwd; echo err >&2; echo hé > made")
    assert output(told) == f"{tmp_path}\nerr\n"
    assert (tmp_path / "made").read_text() == "hé\n"
    (command,) = events(told, "command_executed")
    assert (command["exit_code"], command["output_preview"]) == (0, f"{tmp_path}\nerr\n")
    (call,) = events(told, "tool_call")
    (result,) = events(told, "tool_result")
    assert call["tool_use_id"] == result["tool_use_id"]
    assert not result["is_error"]
    assert told[-1]["receipt"]["outcome"] == "complete"
    assert told[-1]["receipt"]["usage_raw"] == {"exit": "exit code 0"}


@pytest.mark.parametrize(
    ("task", "code", "words"),
    [("exit 3", 3, "exit code 3"), ("no-such-program-here", 127, "exit code 127"), ("kill -9 $$", None, "SIGKILL")],
)
def test_the_exit_of_the_command_decides_the_outcome(task: str, code: int | None, words: str, tmp_path: Path) -> None:
    told = shell(tmp_path, task)
    assert told[-1]["receipt"]["outcome"] == "failed"
    assert events(told, "command_executed")[0]["exit_code"] == code
    (error,) = events(told, "error")
    assert error["error_code"] == "execution_tool_failed"
    assert words in error["message"]


def test_a_first_line_picks_the_interpreter(tmp_path: Path) -> None:
    told = shell(tmp_path, f"#!{sys.executable} -I\nimport sys\nprint(sys.flags.isolated, 6 * 7)")
    assert output(told) == "1 42\n"


@pytest.mark.parametrize(
    ("program", "body", "said"),
    [
        ("perl", 'print 6 * 7, "\\n"; print -e $0 ? "a file\\n" : "";', "42\na file\n"),
        ("node", 'console.log(6 * 7, require("fs").existsSync(__filename))', "42 true\n"),
        ("awk -f", "BEGIN { print 6 * 7 }", "42\n"),
        ("bash -eu", 'cd "$(mktemp -d)"; echo $((6 * 7)) $-', None),
    ],
)
def test_a_script_of_any_program_runs_from_a_file_that_is_gone_then(
    program: str,
    body: str,
    said: str | None,
    tmp_path: Path,
    needs: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs(program.split()[0])
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    told = shell(
        tmp_path,
        f"#!/usr/bin/env {program}\r\n{body}\n" if program == "perl" else f"#!/usr/bin/env {program}\n{body}\n",
    )
    assert told[-1]["receipt"]["outcome"] == "complete", output(told)
    assert output(told) == said or said is None
    assert [path.name for path in (tmp_path / "tmp").iterdir() if path.name.startswith("backplane")] == []


def test_the_environment_is_the_orders_and_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_OURS", "leaked")
    told = shell(tmp_path, "env", config={"env": {"FROM_ORDER": "yes"}})
    assert "FROM_ORDER=yes\n" in output(told)
    assert "leaked" not in output(told)


def test_output_without_end_is_cut_in_the_preview_and_whole_in_the_stream(tmp_path: Path) -> None:
    told = shell(tmp_path, "i=0; while [ $i -lt 3000 ]; do echo éééééééééé; i=$((i+1)); done; printf '\\377 end \\303'")
    assert output(told) == "éééééééééé\n" * 3000 + "\ufffd end \ufffd"
    preview = events(told, "command_executed")[0]["output_preview"]
    assert len(preview.encode()) <= 8192
    assert preview.startswith("éééé")


def test_a_command_that_closes_its_output_is_waited_for(tmp_path: Path) -> None:
    told = shell(tmp_path, "exec >/dev/null 2>&1; sleep 1.2; touch late; exit 4")
    assert events(told, "command_executed")[0]["exit_code"] == 4
    assert (tmp_path / "late").exists()


def test_what_a_command_leaves_running_does_not_keep_the_run(tmp_path: Path) -> None:
    began = time.monotonic()
    told = shell(tmp_path, "sleep 60 & echo $! > pid; echo started")
    assert time.monotonic() - began < 5.0
    assert output(told) == "started\n"
    assert told[-1]["receipt"]["outcome"] == "complete"
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_a_forbidden_command_is_not_run(tmp_path: Path) -> None:
    told = shell(tmp_path, "touch made", policy={"disallowed_tools": ["bash"]})
    assert list(tmp_path.iterdir()) == []
    (result,) = events(told, "tool_result")
    assert result["is_error"]
    assert events(told, "error")[0]["error_code"] == "policy_denied"
    assert told[-1]["receipt"]["outcome"] == "failed"


def test_an_answer_may_change_the_command(tmp_path: Path) -> None:
    with Child(SHELL) as child:
        child.send(run("r1", "echo one", OURS, workspace={"root": str(tmp_path)}))
        ask = child.until("ask")[-1]
        assert ask["command"] == "echo one"
        answer = {
            "t": "answer",
            "ref_id": "r1",
            "id": ask["id"],
            "decision": "modify",
            "input": {"command": "echo two"},
        }
        child.send(answer)
        told = child.until("final")
        child.close_stdin()
        assert child.wait() == 0
    assert output(told) == "two\n"
    assert events(told, "command_executed")[0]["command"] == "echo two"


@pytest.mark.parametrize("task", ["echo begun; sleep 60", "trap '' TERM; echo begun; while :; do sleep 1; done"])
def test_a_cancelled_command_is_stopped_and_what_it_said_is_kept(task: str, tmp_path: Path) -> None:
    with Child(SHELL) as child:
        child.send(run("r1", f"echo $$ > pid; {task}", OURS, workspace={"root": str(tmp_path)}))
        child.send({"t": "answer", "ref_id": "r1", "id": child.until("ask")[-1]["id"], "decision": "allow"})
        child.until("event")
        began = time.monotonic()
        child.send({"t": "cancel", "ref_id": "r1", "reason": "enough", "grace_ms": 2000})
        final = child.until("final")[-1]
        assert time.monotonic() - began < 2.0 + 2.5
        assert final["receipt"]["outcome"] == "partial"
        assert is_gone(int((tmp_path / "pid").read_text()), 0.1)
        child.close_stdin()
        assert child.wait() == 0


def test_a_missing_root_is_one_fatal(tmp_path: Path) -> None:
    told = shell(tmp_path / "nowhere", "true")
    assert told[-1]["t"] == "fatal"
    assert told[-1]["error_code"] == "sidecar_spawn_failed"


# mock -----------------------------------------------------------------------------------------------------------------


def test_a_scenario_is_played_step_by_step(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text("old\n")
    told = mock(
        tmp_path,
        {"say": "hello"},
        {"delta": "d"},
        {"think": "hm"},
        {"write": {"path": "sub/new.txt", "content": "new\n"}},
        {"read": "old.txt"},
        {"read": "missing.txt"},
        {"delete": "old.txt"},
        {"tool": {"name": "look", "input": {"q": 1}, "output": {"a": 2}}},
        {"ask": {"question": "?", "default": "x"}},
        {"repeat": {"times": 3, "steps": [{"delta": "n{n}"}]}},
        {"usage": {"input_tokens": 4}},
        {"error": {"message": "careful", "code": "execution_tool_failed"}},
        {"stderr": "to stderr\n"},
        {"outcome": "partial"},
    )
    assert (tmp_path / "sub" / "new.txt").read_text() == "new\n"
    assert not (tmp_path / "old.txt").exists()
    said = [event["text"] for event in events(told, "assistant_message")]
    assert said == ["hello", "answer: deny x"]
    deltas = events(told, "assistant_delta")
    assert [event["text"] for event in deltas] == ["d", "", "n0", "n1", "n2"]
    assert deltas[1]["ext"] == {"reasoning": {"text": "hm"}}
    outputs = [(event["output"], event["is_error"]) for event in events(told, "tool_result")]
    assert outputs[0] == ("wrote 4 characters", False)
    assert outputs[1] == ("old\n", False)
    assert outputs[2][1]
    assert outputs[3:] == [("deleted", False), ({"a": 2}, False)]
    assert [(event["path"], event["summary"]) for event in events(told, "file_changed")] == [
        ("sub/new.txt", "written"),
        ("old.txt", "deleted"),
    ]
    receipt = told[-1]["receipt"]
    assert (receipt["outcome"], receipt["usage"]["input_tokens"]) == ("partial", 4)


def test_what_was_denied_is_not_said_to_have_changed(tmp_path: Path) -> None:
    told = mock(
        tmp_path,
        {"write": {"path": "a", "content": ""}},
        {"delete": "b"},
        policy={"disallowed_tools": ["write_file"]},
    )
    assert events(told, "file_changed") == []
    assert [event["is_error"] for event in events(told, "tool_result")] == [True, True]


@pytest.mark.parametrize(
    ("steps", "code", "words"),
    [
        ([{"fail": {"code": "backend_timeout", "message": "late"}}], "backend_timeout", "late"),
        ([{"fail": {"message": "x"}}], "internal", "x"),
        ([{"dance": 1}], "config_invalid", "no such step"),
        (["say"], "config_invalid", "no such step"),
        ([{"usage": {"input_tokens": "many"}}], "internal", "input_tokens"),
    ],
)
def test_a_scenario_that_fails_or_cannot_be_played_is_one_fatal(
    steps: list[Any], code: str, words: str, tmp_path: Path
) -> None:
    fatal = mock(tmp_path, *steps, end="fatal")[-1]
    assert fatal["error_code"] == code
    assert words in fatal["error"]


def test_a_scenario_may_come_from_a_file(tmp_path: Path) -> None:
    good, broken, other = tmp_path / "good.json", tmp_path / "broken.json", tmp_path / "other.json"
    good.write_text(json.dumps([{"say": "from a file"}]))
    broken.write_text("{")
    other.write_text("{}")
    for path, end in ((good, "final"), (broken, "fatal"), (other, "fatal"), (tmp_path / "none.json", "fatal")):
        with Child([*MOCK, str(path)]) as child:
            child.send(run("r1", extensions=PLAIN))
            child.close_stdin()
            told = child.until(end)
            assert child.wait() == 0
        if end == "final":
            assert events(told, "assistant_message")[0]["text"] == "from a file"
        else:
            assert told[-1]["error_code"] == "config_invalid"


def test_a_manifest_of_ones_own_can_be_announced() -> None:
    levels = {"streaming": "emulated", "tool_bash": {"restricted": {"reason": "sandbox"}}}
    with Child([*MOCK, "--capabilities", json.dumps(levels)]) as child:
        assert child.read()["capabilities"] == levels
        child.close_stdin()
        assert child.wait() == 0


@pytest.mark.parametrize(
    ("step", "returncode"), [({"exit": 9}, 9), ({"kill": "SIGKILL"}, -9), ({"raw": "{broken\n"}, 0)]
)
def test_a_scenario_may_break_the_rules(step: dict[str, Any], returncode: int, tmp_path: Path) -> None:
    config = {"vendor": {"mock": {"scenario": [step]}}}
    with Child(MOCK) as child:
        child.send(run("r1", extensions=PLAIN, config=config))
        child.close_stdin()
        assert child.wait() == returncode
