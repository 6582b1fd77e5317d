"""More of `tests/all/doors/test_findings.py`: what takes many processes, or seconds."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from tests.all.doors.test_findings import ASKED, CI, CLEAN, DENIED, ERROR, FALSE, Call, cli, host  # noqa: F401

INPUT = 'answer = ask(run, {"kind": "input", "question": "which?"}); put(final(run)); end()'


PATCH = 'answer = ask(run, {"kind": "patch", "diff": "", "files": [".git/config"]}); put(final(run)); end()'


ENDS: list[tuple[str, str, str | None]] = [
    (CLEAN, "complete", None),
    (DENIED, "complete, 1 call denied", "denied"),
    (PATCH, "complete, 1 call denied", "denied"),
    (INPUT, "complete", None),
    (FALSE, "complete, 1 false claim", "false-claims"),
    (ERROR, "complete, 1 error reported", None),
]


FAIL_ON: list[tuple[str, ...]] = [ASKED, (*CI, "--fail-on", "none"), ("--fail-on", "violations")]


@pytest.mark.parametrize(
    ("body", "word", "finding", "words"),
    [(*end, CI) for end in ENDS]
    + [(*end, ()) for end in ENDS if end[0] == FALSE]
    + [(*end, words) for end in ENDS if end[0] == DENIED for words in FAIL_ON],
)
def test_findings_stand_in_outcome_reports_and_exit_code(
    body: str, word: str, finding: str | None, words: tuple[str, ...], cli: Call, host: Any
) -> None:
    done = cli("run", "go", *host(body), *words, *(("--deny-tool", "bash") if body == DENIED else ()))
    fails = finding is not None and words in (ASKED, CI)
    assert done.returncode == (3 if fails else 0), done
    assert f"{word} after" in done.stdout.replace(", after", " after")
    if words not in ((), CI):
        return
    summary = cli("report", "last", "--summary").stdout
    assert summary.startswith("### ✅" if word == "complete" else "### ⚠"), summary
    assert word in summary
    assert word in cli("report", "last").stdout
    suite = ElementTree.fromstring(cli("report", "last", "--junit").stdout)
    assert suite.get("failures") == ("1" if fails else "0")
    assert (suite.find("testcase/failure") is not None) == fails
    assert word in (suite.findtext("testcase/system-out") or "")
