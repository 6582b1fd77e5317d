"""Denied calls, false claims and errors of a complete run: in its outcome, its reports and its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backplane.contract.receipt import FINDINGS, RunFindings, findings_of
from backplane.view.findings import outcome_words, remarks
from tests.in_process import in_process
from tests.runs import HELLO, PRELUDE

DENIED = 'answer = ask(run, {"kind": "tool", "name": "bash", "input": {"command": "ls"}}); put(final(run)); end()'
FALSE = 'put(told(run, "file_changed", path="not-there.txt", summary="made"), final(run)); end()'
ERROR = 'put(told(run, "error", message="the tests do not run"), final(run)); end()'
CLEAN = 'put(told(run, "assistant_message", text="done"), final(run)); end()'
FAILS = 'answer = ask(run, {"kind": "tool", "name": "bash", "input": {}}); put(final(run, outcome="failed")); end()'

HOST = (
    PRELUDE
    + """
def ask(run, body):
    put({{"t": "ask", "ref_id": run["id"], "id": "a1", "deadline_ms": 60000, "default": "deny", **body}})
    return take()
def now(): return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
def told(run, kind, **members):
    return {{"t": "event", "ref_id": run["id"], "event": {{"ts": now(), "type": kind, **members}}}}
dated = final
def final(run, **members):
    made = dated(run, **members)
    made["receipt"]["meta"].update(started_at=now(), finished_at=now(), duration_ms=0)
    return made
hello(extensions=["ask/1"]); run = take()
"""
)

Call = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def cli(root: Path) -> Call:
    """Run the command line in the folder of the work."""

    def call(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return in_process(*words, cwd=root, stdin=stdin)

    return call


@pytest.fixture
def host(tmp_path: Path) -> Callable[[str], tuple[str, ...]]:
    """Write a host of a few lines, and give the options that run it."""

    def write(body: str) -> tuple[str, ...]:
        (tmp_path / "host.py").write_text(HOST.format(hello=json.dumps(HELLO)) + body)
        return ("--sidecar", f"{sys.executable} -I -S {tmp_path / 'host.py'}")

    return write


CI = ("--policy", "ci", "--isolation", "off")
ASKED = ("--fail-on", "denied,false-claims", "--fail-on", "violations")


@pytest.mark.parametrize(
    ("body", "line", "words"),
    [
        (CLEAN, None, ()),
        (FALSE, "1 false claim of the agent (file_changed): backplane receipts audit ", ("-q",)),
        (ERROR, "the agent reported an error but ended as complete; the last error: the tests do not", ("--json",)),
    ],
)
def test_false_claims_and_errors_of_a_complete_run_are_one_line_on_stderr(
    body: str, line: str | None, words: tuple[str, ...], cli: Call, host: Any
) -> None:
    done = cli("run", "go", *host(body), *words)
    assert done.returncode == 0
    assert [row for row in done.stderr.splitlines() if line and line in row] == done.stderr.splitlines()
    assert len(done.stderr.splitlines()) == (line is not None)


def test_a_failed_run_keeps_its_code_whatever_was_found(cli: Call, host: Any) -> None:
    done = cli("run", "go", *host(FAILS), "--deny-tool", "bash", "--fail-on", "denied")
    assert done.returncode == 1
    assert "failed, 1 call denied, after" in done.stdout


WRITES = 'open(run["work_order"]["workspace"]["root"] + "/new.txt", "w").write("new"); '


@pytest.mark.parametrize(
    ("body", "words", "is_applied"),
    [
        (DENIED, ("--fail-on", "denied"), False),
        (FALSE, CI, False),
        (DENIED, (), True),
        (FALSE, ("--fail-on", "denied"), True),
    ],
)
def test_the_lane_applies_no_patch_of_a_run_with_a_finding_of_its_fail_on(
    body: str, words: tuple[str, ...], is_applied: bool, cli: Call, host: Any, root: Path
) -> None:
    done = cli("run", "go", *host(WRITES + body), "--apply", "--deny-tool", "bash", *words)
    assert done.returncode == (0 if is_applied else 3), done
    assert (root / "new.txt").exists() == is_applied
    assert cli("apply", "last").returncode == (1 if is_applied else 0)
    assert (root / "new.txt").read_text() == "new"


@pytest.mark.parametrize(
    ("body", "words", "exit_words", "why", "step"),
    [
        (DENIED, "denied", "exit code 3: 1 call denied (--fail-on denied)", "bash", "allow what the agent needs"),
        (FALSE, "false-claims", "exit code 3: 1 false claim (--fail-on false-claims)", "kind file_changed", "audit"),
        (WRITES + FALSE, "none", None, "kind file_changed", "audit"),
        (WRITES + CLEAN, "denied,false-claims,violations", None, "nothing is wrong", None),
    ],
)
def test_a_run_and_why_name_the_finding_of_fail_on(
    body: str, words: str, exit_words: str | None, why: str, step: str | None, cli: Call, host: Any
) -> None:
    done = cli("run", "go", *host(body), "--deny-tool", "bash", "--fail-on", words)
    assert [line for line in done.stderr.splitlines() if line.startswith("exit ")] == [exit_words] * bool(exit_words)
    told = cli("why", "last").stdout
    assert why in told
    assert ("nothing is wrong" in told) == (step is None)
    assert (exit_words or "").removeprefix("exit code 3: ") in told
    assert step is None or step in told


USES = """
put(told(run, "tool_call", tool_name="bash", tool_use_id="1", input={"command": "ls"}),
    told(run, "tool_result", tool_name="bash", tool_use_id="1", output="a", is_error=False), final(run)); end()
"""


@pytest.mark.parametrize(
    ("body", "words", "offers"),
    [
        (USES, (), False),
        (WRITES + USES, (), True),
        (WRITES + USES, ("--in-place",), False),
    ],
)
def test_a_violation_offers_to_apply_a_patch_only_where_there_is_one(
    body: str, words: tuple[str, ...], offers: bool, cli: Call, host: Any
) -> None:
    done = cli("run", "go", *host(body), "--deny-tool", "bash", *words)
    assert done.returncode == 3
    told = cli("why", "last").stdout
    for text in (done.stderr, told):
        assert ("--accept-violations" in text) == offers, text
        assert ("backplane receipts show" in text) != offers, text


@pytest.mark.parametrize(
    ("words", "state"),
    [
        ((), "backplane apply "),
        (("--apply",), "applied"),
        (("--apply", "--in-place"), "made in place"),
        (("--apply", "--fail-on", "false-claims"), "backplane apply "),
    ],
)
def test_the_summary_offers_to_apply_a_patch_that_is_not_in_the_folder(
    words: tuple[str, ...], state: str, cli: Call, host: Any
) -> None:
    done = cli("run", "go", *host(WRITES + FALSE), *words)
    line = next(row for row in done.stdout.splitlines() if row.startswith("patch "))
    assert line.partition("  (")[2].startswith(state), done


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (("a.txt",), None),
        (("a.txt", "a.log", "b.log"), "2 ignored files changed; the patch does not contain ignored files"),
    ],
)
def test_ignored_files_that_a_patch_leaves_out_are_counted(
    names: tuple[str, ...], line: str | None, cli: Call, host: Any, root: Path
) -> None:
    (root / ".gitignore").write_text("*.log\n")
    writes = "".join(WRITES.replace("new.txt", name) for name in names)
    done = cli("run", "go", *host(writes + CLEAN))
    assert done.stderr.splitlines() == ([line] if line else [])
    assert line is None or line in cli("report", "last", "--summary").stdout


@pytest.mark.parametrize("words", ["nothing", "denied,false", "none,denied", ""])
def test_a_word_that_is_no_finding_is_refused(words: str, cli: Call) -> None:
    done = cli("run", "go", "-b", "mock", "--fail-on", words)
    assert done.returncode == 2
    assert "config_invalid: config.vendor.abp.fail_on: " in done.stderr


def test_an_order_says_itself_what_it_fails_on(cli: Call, host: Any, tmp_path: Path) -> None:
    order = {
        "task": "go",
        "config": {"vendor": {"abp": {"fail_on": ["denied"]}}},
        "policy": {"disallowed_tools": ["bash"]},
    }
    (tmp_path / "order.json").write_text(json.dumps(order))
    words = ("--order", str(tmp_path / "order.json"))
    assert cli("run", *words, *host(DENIED)).returncode == 3
    assert cli("run", *words, *host(DENIED), "--fail-on", "none").returncode == 0
    shown = json.loads(cli("receipts", "show", "last", "--json").stdout)
    assert "fail_on" not in shown["usage_raw"]["backplane"]
    order["config"] = {"vendor": {"abp": {"fail_on": ["deny"]}}}
    (tmp_path / "order.json").write_text(json.dumps(order))
    assert cli("run", *words, *host(DENIED)).returncode == 2


def test_findings_are_read_from_what_the_receipt_has() -> None:
    added = {
        "calls": {"asked": 3, "allowed": 1, "denied": 2, "denied_then_done": 0},
        "claimed": {"counts": {"file_changed": {"true": 1, "false": 2}, "outcome": {"false": 1}, "x": None}},
        "enforcement": {"violations": [{"rule": "deny_write", "reason": "no"}]},
        "errors": {"count": 1, "last": "it\nbroke"},
    }
    found = findings_of(added)
    assert found == RunFindings(denied=2, false_claims=3, violations=1, errors=1)
    assert found.named(FINDINGS) == FINDINGS
    assert outcome_words("complete", found) == "complete, 2 calls denied, 3 false claims, 1 violation, 1 error reported"
    assert outcome_words("failed", found) == "failed, 2 calls denied, 3 false claims, 1 violation"
    lines = remarks("1a2b3c4d-0", "complete", added)
    assert lines[0] == "3 false claims of the agent (file_changed, outcome): backplane receipts audit 1a2b3c4d"
    assert (len(lines), "\n" in "".join(lines)) == (2, False)
    nothing: tuple[dict[str, Any], ...] = ({}, {"calls": None, "claimed": [], "errors": 3}, {"claimed": {"counts": []}})
    for odd in nothing:
        assert findings_of(odd) == RunFindings()
