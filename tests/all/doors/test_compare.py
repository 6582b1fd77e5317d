"""`compare`: the same tree for everyone, a check of each result, and no winner that the data does not support."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane.config import Limits, Settings
from backplane.contract.work import WorkOrder, WorkspaceSpec
from backplane.errors import ConfigError
from backplane.receipts.memory import find
from backplane.receipts.store import Store
from backplane.routing.compare import Side, compare, read_side, so_far
from backplane.routing.intervals import Interval, Measure, Trial, judge, mean, share
from backplane.runtime.cache import tree_sha256
from backplane.runtime.plane import ControlPlane
from tests.all.doors.test_routing_cli import cli, configure, folder

__all__ = ["folder"]

FIXES = """
hello()
run = take()
root = run["work_order"]["workspace"]["root"]
path = os.path.join(root, "calc.py")
text = open(path).read()
open(path, "w").write(text.replace("a - b", "%s"))
put(final(run, usage={"estimated_cost_usd": %s}))
end()
"""
GOOD, WRONG = FIXES % ("a + b", "0.01"), FIXES % ("a * b", "0.02")
FAILS = """
hello()
run = take()
put({"t": "fatal", "ref_id": run["id"], "error": "no", "error_code": "backend_auth_failed"})
end()
"""
CHECK = 'python3 -c "import calc; assert calc.add(2, 3) == 5"'


@pytest.fixture
def source(folder: Path) -> Path:
    (folder / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    return folder


def compared(source: Path, *words: str) -> dict[str, Any]:
    done = cli(source, "compare", "mend it", *words, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_each_side_starts_from_the_same_tree_and_its_result_is_checked(source: Path, backplane_home: Path) -> None:
    configure(source, good=GOOD, wrong=WRONG, fails=FAILS)
    before = tree_sha256(source, Limits())
    found = compared(source, "-b", "good", "-b", "wrong", "-b", "fails", "--check", CHECK)
    assert tree_sha256(source, Limits()) == before
    trials = {trial["side"]: trial for trial in found["trials"]}
    assert {name: (one["outcome"], one["checked"], one["code"]) for name, one in trials.items()} == {
        "good": ("complete", True, None),
        "wrong": ("complete", False, None),
        "fails": ("failed", None, "backend_auth_failed"),
    }
    assert [(one["side"], one["succeeded"]) for one in found["sides"]] == [("good", 1), ("wrong", 0), ("fails", 0)]
    assert (trials["good"]["files"], trials["good"]["added"], trials["good"]["removed"]) == (1, 1, 1)
    assert {one["better"] for one in found["verdicts"]} == {None}
    with Store.open(backplane_home, readonly=True) as store:
        assert store.load(trials["good"]["check_run_id"]).outcome == "complete"
        assert store.load(trials["good"]["run_id"]).usage.estimated_cost_usd == 0.01
    assert cli(source, "apply", trials["good"]["run_id"]).returncode == 0
    assert "a + b" in (source / "calc.py").read_text()


def test_a_comparison_in_which_nothing_succeeded_is_told_with_exit_code_1(source: Path, backplane_home: Path) -> None:
    configure(source, good=GOOD, fails=FAILS)
    words = ("compare", "mend it", "-b", "good", "-b", "fails", "--timeout", "1m", "--check")
    done = cli(source, *words, "nosuchcommand")
    assert done.returncode == 1, done
    assert cli(source, *words, CHECK).returncode == 0


def test_the_checks_of_a_comparison_are_no_runs_of_cost_and_last(source: Path, backplane_home: Path) -> None:
    configure(source, good=GOOD, wrong=WRONG)
    found = compared(source, "-b", "good", "-b", "wrong", "--check", CHECK)
    first, second = found["trials"]
    costs = [json.loads(line) for line in cli(source, "cost", "--json").stdout.splitlines()]
    assert {one["key"] for one in costs} == {"good", "wrong", None}
    assert costs[-1]["runs"] == 2
    with Store.open(backplane_home, readonly=True) as store:
        assert [store.find(name).run_id for name in ("last", "last~1")] == [second["run_id"], first["run_id"]]
        with pytest.raises(ConfigError, match="not so many receipts"):
            store.find("last~2")
        assert find(store, "last").run_id == second["run_id"]
        assert find(store, first["check_run_id"]).check_of == first["run_id"]
        with pytest.raises(ConfigError, match="not so many runs"):
            find(store, "last~2")
    rows = cli(source, "runs").stdout.splitlines()
    assert len(rows) == 4
    assert sum(f"(check of {first['run_id'][:8]}) python3" in row for row in rows) == 1


def test_a_tree_that_changes_under_a_comparison_ends_it(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKPLANE_ISOLATION", "off")
    meddles = GOOD.replace("run = take()", f"run = take(); open({str(source / 'new.txt')!r}, 'w').close()")
    configure(source, good=GOOD, meddles=meddles)
    done = cli(source, "compare", "x", "-b", "good", "-b", "meddles")
    assert done.returncode == 1
    assert "changed during the comparison" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("-b", "good"),
        ("-b", "good", "-b", "nobody"),
        ("-b", "good", "-b", "shell", "--repeat", "501"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(
    source: Path, backplane_home: Path, words: tuple[str, ...]
) -> None:
    configure(source, good=GOOD)
    assert cli(source, "compare", "x", *words).returncode == 2
    with Store.open(backplane_home, readonly=True) as store:
        assert store.rows() == []


def test_a_signal_leaves_what_the_rounds_before_it_found(
    source: Path, backplane_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = backplane_home.parent / "begun"
    later = f"import pathlib; begun = pathlib.Path({str(begun)!r})\nif begun.exists(): hello(); take(); end()\n"
    configure(source, good=GOOD, slow=later + "begun.touch()\n" + GOOD)
    monkeypatch.setenv("BACKPLANE_ISOLATION", "off")
    command = [sys.executable, "-m", "backplane", "compare", "x", "-b", "good", "-b", "slow", "--repeat", "3"]
    child = subprocess.Popen(command, cwd=source, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    heard = [child.stderr.readline() for _ in range(2)]
    deadline = time.monotonic() + 20
    while len(list(backplane_home.glob("runs/*/trace.jsonl"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGTERM)
    said, complaints = child.communicate(timeout=20)
    assert child.returncode == 143, complaints
    assert all(line.startswith("round 1, ") for line in heard)
    assert [line.split()[0] for line in said.splitlines()[:3]] == ["backend", "good", "slow"]


def test_a_side_is_a_backend_or_one_of_its_models() -> None:
    assert (read_side("a").backend, read_side("a").model) == ("a", None)
    assert (read_side("a/b/c").backend, read_side("a/b/c").model) == ("a", "b/c")


# What the data supports -----------------------------------------------------------------------------------------------


def test_shares_and_means_are_those_of_the_books() -> None:
    assert share(4, 4) == Interval(1000, 510, 1000, 4)
    assert share(0, 4) == Interval(0, 0, 490, 4)
    assert share(5, 10) == Interval(500, 236, 764, 10)
    # 10, 12, 14: mean 12, s = 2, t(2) = 4.303, reach 4.97.
    assert mean([10, 12, 14]) == Interval(12, 7, 17, 3)
    assert mean([7]) == Interval(7, None, None, 1)
    assert mean([7, None]) is None
    assert mean([]) is None


def test_nobody_is_better_where_runs_are_few_or_values_unknown() -> None:
    apart = {"a": mean([1, 1]), "b": mean([9, 9])}
    assert judge("cost", apart).why == "fewer than 3 successful runs of a, b"
    assert judge("cost", {"a": mean([1, 1, 1]), "b": None}).why == "not known of b"
    assert judge("cost", {"a": mean([1, 2, 1]), "b": mean([90, 91, 92])}).better == "a"
    assert judge("duration", {"a": mean([1, 2, 90]), "b": mean([90, 91, 92])}).better is None


@given(st.lists(st.integers(0, 10**9), min_size=3, max_size=40), st.sampled_from(["cost", "duration"]))
def test_a_side_is_never_better_than_itself(values: list[int], measure: Measure) -> None:
    assert judge(measure, {"a": mean(values), "b": mean(values[::-1])}).better is None


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 10**6)), min_size=3, max_size=9),
    st.lists(st.tuples(st.booleans(), st.integers(0, 10**6)), min_size=3, max_size=9),
)
def test_failed_runs_change_nothing_of_money_and_time(
    one: list[tuple[bool, int]], other: list[tuple[bool, int]]
) -> None:
    def trial(side: str, succeeds: bool, value: int, checked: bool | None) -> Trial:
        return Trial(side=side, round=1, run_id="r", outcome="complete" if succeeds or checked is False else "failed",
                     code=None, duration_ms=value, cost_usd_micros=value, input_tokens=None, output_tokens=None,
                     files=0, added=0, removed=0, patch_sha256=None, checked=checked)  # fmt: skip

    sides = {"a": one, "b": other}
    trials = [trial(side, ok, value, None if ok else number % 2 == 0 and None)
              for side, values in sides.items() for number, (ok, value) in enumerate(values)]  # fmt: skip
    found = so_far(WorkOrder("t"), None, [Side("a"), Side("b")], trials)
    assert found is not None
    for summary in found.sides:
        expected = mean([value for ok, value in sides[summary.side] if ok])
        assert (summary.cost_usd_micros, summary.duration_ms) == (expected, expected)
    for verdict in found.verdicts[1:]:
        if verdict.better is not None:
            assert all(sum(ok for ok, _ in values) >= 3 for values in sides.values())


@pytest.mark.anyio
async def test_a_program_may_name_task_and_sides_in_words(source: Path, backplane_home: Path) -> None:
    settings = Settings(isolation="off")
    async with ControlPlane(settings, backplane_home, os.environ) as plane:
        order = WorkOrder("true", workspace=WorkspaceSpec(root=str(source)))
        found = await compare(plane, order, ["shell", Side("mock")])
        assert [one.side for one in found.sides] == ["shell", "mock"]
        for wrong, words in (((order, [1, "mock"]), "a side is a value of the type int"), ((7, []), "the order is a")):
            with pytest.raises(ConfigError, match=words):
                await compare(plane, *wrong)
        with pytest.raises(ConfigError, match="`repeat` is a value of the type str"):
            await compare(plane, order, ["shell", "mock"], repeat="3")  # type: ignore[arg-type]
