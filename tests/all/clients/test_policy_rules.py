"""The rules of a policy, decided by the three kits under a control plane that cannot be asked: one file of vectors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backplane import resources
from backplane.contract.work import PolicyProfile
from backplane.policy.paths import SHELLS, SPELLINGS, TOOLS
from backplane.policy.rules import compile_policy, unknown_tools
from tests.all.clients.compiled import Sources, compiled
from tests.peers import run as message

HERE = Path(__file__).parent
VECTORS = json.loads((resources.find("contracts") / "policy-rules.json").read_text())
JUDGE_S_MAX = 60

CALLS = [(row["policy"], row["tool"], row["decision"]) for row in VECTORS["calls"]]
GLOBS = [({"disallowed_tools": [glob]}, text, "deny" if matches else "allow")
         for glob, text, matches in VECTORS["globs"] if text]  # fmt: skip

Judge = Callable[[str, list[tuple[dict[str, Any], str]]], list[str]]


@pytest.fixture(scope="module")
def command(needs: Callable[[str], str]) -> Callable[[str], list[str]]:
    """From a kit's language to the command of a host on it that tells what the kit decides."""

    def find(language: str) -> list[str]:
        if language == "python":
            return [sys.executable, str(HERE / "judge.py")]
        if language == "node":
            return [needs("node"), str(HERE / "judge.mjs")]
        sources: Sources = {
            "main.go": HERE / "judge.go",
            "kit": resources.find("contracts") / "kits" / "go",
            "go.mod": "module judge\n\ngo 1.22\n\nrequire backplane/host v0.0.0\n\nreplace backplane/host => ./kit\n",
        }
        return [str(compiled("judge-go", sources, [needs("go"), "build", "-o", "judge", "."]) / "judge")]

    return find


@pytest.fixture
def judge(command: Callable[[str], list[str]], tmp_path: Path) -> Judge:
    """What a kit decides about tools under policies: a decision each, or the code of the refusal."""

    def decide(language: str, cases: list[tuple[dict[str, Any], str]]) -> list[str]:
        place = {"root": str(tmp_path)}
        orders = [
            message(str(number), tool, (), policy=policy, workspace=place)
            for number, (policy, tool) in enumerate(cases)
        ]  # fmt: skip
        lines = "".join(json.dumps(order) + "\n" for order in orders)
        done = subprocess.run(
            command(language), input=lines.encode(), capture_output=True, timeout=JUDGE_S_MAX, check=True
        )
        said: dict[str, str] = {}
        for told in map(json.loads, done.stdout.splitlines()):
            if told["t"] == "event" and told["event"]["type"] == "assistant_message":
                said[told["ref_id"]] = told["event"]["text"]
            elif told["t"] == "fatal":
                said[told["ref_id"]] = told["error_code"]
        return [said[str(number)] for number in range(len(cases))]

    return decide


@pytest.mark.parametrize("language", ["python", "node", "go"])
def test_every_kit_decides_the_contracts_vectors(language: str, judge: Judge) -> None:
    cases = [*CALLS, *GLOBS]
    found = judge(language, [(policy, tool) for policy, tool, _ in cases])
    # Where nobody can be asked, what wants an approval is denied.
    wrong = [(case, said) for case, said in zip(cases, found, strict=True) if said != case[2].replace("ask", "deny")]
    assert wrong == []


@pytest.mark.parametrize("language", ["python", "node", "go"])
def test_every_kit_refuses_what_is_no_pattern(language: str, judge: Judge) -> None:
    cases = [({"disallowed_tools": ["ok", glob]}, "bash") for glob in VECTORS["bad_globs"]]
    assert judge(language, cases) == ["policy_invalid"] * len(cases)


@pytest.mark.parametrize("language", ["python", "node", "go"])
def test_a_costly_rule_is_decided_in_time(language: str, judge: Judge) -> None:
    cases = [
        ({"disallowed_tools": ["*a" * 60 + "b"]}, "a" * 256),
        ({"disallowed_tools": ["{a,aa}" * 9 + "b"]}, "a" * 99),
    ]
    assert judge(language, cases) == ["allow", "allow"]


@pytest.mark.parametrize(("policy", "tool", "decision"), CALLS, ids=str)
def test_the_control_plane_decides_the_contracts_vectors(
    policy: dict[str, list[str]], tool: str, decision: str
) -> None:
    profile = PolicyProfile(**{name: tuple(rules) for name, rules in policy.items()})
    given = {"path": "a", "url": "http://a.test/"}
    assert compile_policy(profile).decide_tool_call(tool, given).allowed == decision


def test_the_table_of_names_is_the_one_in_use() -> None:
    assert VECTORS["names"] == SPELLINGS
    assert set(VECTORS["shells"]) == SHELLS
    assert set(SPELLINGS.values()) <= set(TOOLS)
    assert unknown_tools(PolicyProfile(disallowed_tools=tuple(SPELLINGS))) == {}
