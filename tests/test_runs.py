"""`runs`: the memory of runs, through the real command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import uuid
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from backplane.contract.events import Failed
from backplane.contract.receipt import Usage
from backplane.contract.work import WorkOrder
from backplane.receipts.journal import Journal, head_fact
from backplane.receipts.memory import find, remembered
from backplane.receipts.pieces import seal
from backplane.receipts.store import Store
from backplane.receipts.tail import Tail
from backplane.view.columns import width
from tests.in_process import in_process
from tests.receipt_writer import TS, delta, line, open_journal, past_run, receipt_of
from tests.terminal import shown_on

HOUR_MS = 3_600_000


def cli(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return in_process(*words, cwd=Path.cwd(), env={**os.environ, **env})


def test_an_order_that_was_refused_is_found_by_its_words(tmp_path: Path) -> None:
    refused = cli("run", "--backend", "shell", "--root", str(tmp_path), "--require", "mcp_client", "count the marmots")
    assert refused.returncode == 4
    assert len(ids("--text", "marmots")) == 1
    assert "count the marmots" in cli("why").stdout


def ids(*words: str) -> list[str]:
    done = cli("runs", *words, "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["run_id"] for line in done.stdout.splitlines()]


stored = partial(past_run, model="m1")


def test_a_run_is_found_by_what_it_was_about(backplane_home: Path) -> None:
    failed: dict[str, Any] = {"outcome": "failed", "usage_raw": {"backplane": {"end": {"reason": "failed"}}}}
    with Store.open(backplane_home) as store:
        old = stored(store, "mend the Parser", root="/w/a", ago_ms=3 * 24 * HOUR_MS).run_id
        other = stored(store, "write docs", root="/w/ab", backend="house", said="the PARSER is fine", **failed).run_id
        new = stored(store, "mend the lexer", root="/w/a/sub").run_id
    assert ids() == [new, other, old]
    assert ids("--limit", "1") == [new]
    assert ids("--failed") == [other]
    assert ids("--since", "2d") == [new, other]
    assert ids("--backend", "house") == [other]
    assert ids("--folder", "/w/a") == [new, old]
    assert ids("--text", "parser") == [other, old]
    assert ids("--text", "mend parser") == [old]
    assert ids("--text", "nothing of the kind") == []
    assert ids("--live") == []
    assert cli("runs", "--failed").stdout.split()[0] == other[:8]


def test_a_list_has_the_task_the_cause_and_what_is_unknown(backplane_home: Path) -> None:
    error = {"code": "backend_crashed", "message": "the host ended\nbefore its final"}
    added = {"backplane": {"end": {"reason": "host_exit", "code": "backend_crashed"}, "error": error}}
    with Store.open(backplane_home) as store:
        stored(store, "cheap\x1b[2J", usage=Usage(estimated_cost_usd=0.0123, input_tokens=5))
        stored(store, "broken", outcome="failed", usage_raw=added)
    first, second = cli("runs").stdout.splitlines()
    assert "host_exit" in first
    assert first.endswith("?  broken — the host ended\\nbefore its final")
    assert second.endswith("$0.0123  cheap\\x1b[2J")
    shown = cli("show", "last").stdout
    assert "cause   backend_crashed: the host ended\\nbefore its final" in shown
    assert "task    broken" in shown
    assert ", m1" in shown


def test_the_cause_of_a_run_whose_host_says_no_more_is_its_last_error(backplane_home: Path) -> None:
    journal = open_journal(backplane_home)
    journal.append(
        line(Failed(ts=TS, message="first")) + line(delta("x")) + line(Failed(ts=TS, message="the tests fail"))
    )
    with Store.open(backplane_home) as store:
        end = {"backplane": {"end": {"reason": "failed"}}}
        store.append(seal(receipt_of(journal.trace, journal.run_id, outcome="failed", usage_raw=end)), journal)
        journal.close()
        assert [run.cause for run in remembered(store)] == ["the tests fail"]


def test_a_run_is_named_by_its_beginning_or_by_how_long_ago_it_was(backplane_home: Path) -> None:
    with Store.open(backplane_home) as store:
        runs = [stored(store, f"task {number}").run_id for number in range(3)]
        assert [find(store, name).run_id for name in ("last", "last~0", "last~1", "last~2")] == [
            *runs[:1:-1],
            *runs[::-1],
        ]
        assert [store.find(name).run_id for name in ("last", "last~2")] == [runs[2], runs[0]]
        assert find(store, runs[1][:8].upper()).run_id == runs[1]
    for name in ("last~3", "last~", "last~x", "ffff", "la", "last~99999999999999999999"):
        done = cli("show", name)
        assert (done.returncode, done.stderr.partition(":")[0]) == (2, "config_invalid"), done


def test_an_order_names_its_newest_run(backplane_home: Path) -> None:
    shared = "0badcafe"
    order, other = (
        WorkOrder("go on", id=f"{shared}-1111-4111-8111-111111111111"),
        WorkOrder("another", id=f"{shared}-2222-4222-8222-222222222222"),
    )
    with Store.open(backplane_home) as store:
        stored(store, "go on", order=order)
        newest = stored(store, "go on", order=order).run_id
        theirs = stored(store, "another", order=other).run_id
        assert [find(store, name).run_id for name in (order.id, other.id)] == [newest, theirs]
    for words in (("why", "--json"), ("show", "--json")):
        assert json.loads(cli(*words, order.id[:10]).stdout)["run_id"] == newest
    assert cli("watch", order.id).returncode == 0
    assert cli("show", shared).returncode == 2
    live = Journal.create(
        backplane_home, str(uuid.uuid4()), head_fact(order, run_id="r", started_at=TS, backend="mock")
    )
    try:
        with Store.open(backplane_home) as store:
            assert find(store, order.id).run_id == live.run_id
            assert find(store, other.id).run_id == theirs
    finally:
        live.close()


def test_live_and_cut_off_runs_are_listed_first_and_found(backplane_home: Path) -> None:
    with Store.open(backplane_home) as store:
        ended = stored(store, "ended").run_id
    cut = open_journal(backplane_home)
    cut.close()
    live = open_journal(backplane_home)
    try:
        assert ids() == [live.run_id, cut.run_id, ended]
        assert ids("--live") == [live.run_id]
        assert [line.split()[3:5] for line in cli("runs").stdout.splitlines()[:2]] == [
            ["ago", "running"],
            ["ago", "cut"],
        ]
        assert "tidy up" in cli("show", "last").stdout
        with Store.open(backplane_home) as store:
            assert find(store, "last").run_id == live.run_id
            assert find(store, cut.run_id[:8]).state == "cut_off"
    finally:
        live.close()


def carrying(name: str, **body: Any) -> bytes:
    event = {"type": "warning", "ts": TS, "message": "m", "ext": {name: body}}
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"


ASK, ANSWER = carrying("ask", id="ask-1", kind="tool"), carrying("answer", id="ask-1", decision="allow")


@pytest.mark.parametrize(
    ("lines", "word"),
    [
        ([ASK], "waiting"),
        ([ASK, ANSWER], "running"),
        ([ASK, ANSWER, ASK], "waiting"),
        ([ASK, carrying("ask", id="ask-2"), ANSWER], "waiting"),
        ([b'{"ask"'], "running"),
    ],
)
def test_a_run_that_waits_for_a_person_is_listed_so(backplane_home: Path, lines: list[bytes], word: str) -> None:
    live = open_journal(backplane_home)
    try:
        (backplane_home / "runs" / live.run_id / "trace.jsonl").write_bytes(b"".join(lines))
        (line,) = cli("runs").stdout.splitlines()
        assert line.split()[4] == word
        assert json.loads(cli("runs", "--json").stdout.splitlines()[0])["waits"] is (word == "waiting")
    finally:
        live.close()


@pytest.mark.parametrize("columns", [80, 200])
def test_a_list_on_a_terminal_is_a_line_a_run(columns: int, backplane_home: Path) -> None:
    with Store.open(backplane_home) as store:
        stored(store, "wide 漢字 " * 40)
        stored(store, "bare\u202e\x1b]0;owned\x07" * 20)
    screen = shown_on(["runs"], columns=columns, rows=24)
    assert max(map(width, screen)) <= columns
    assert len([line for line in screen if line.strip()]) == 2


def test_a_pruned_run_keeps_its_place_without_its_task(backplane_home: Path) -> None:
    with Store.open(backplane_home) as store:
        stored(store, "forgotten")
        store.prune(0)
    assert "(task unknown)" in cli("runs").stdout
    assert cli("show", "last").returncode == 1


def test_a_run_is_found_by_its_tags_and_its_task_may_be_kept_as_a_hash(backplane_home: Path, tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return cli("run", "echo secret-task", "--backend", "shell", "--root", str(tmp_path), *words)

    assert run("--tag", "ticket=42", "--tag", "nightly", "--param", "abp.task_text=hash").returncode == 0
    assert run().returncode == 0
    plain, tagged = ids()
    for tag in ("ticket=42", "ticket", "nightly"):
        assert ids("--tag", tag) == [tagged]
    assert ids("--tag", "ticket=4") == []
    assert ids("--text", "ticket=42") == [tagged]
    shown = cli("show", tagged).stdout
    assert "tags    ticket=42, nightly" in shown
    assert re.search(r"task    sha256:[0-9a-f]{64}\n", shown)
    kept = (backplane_home / "runs" / tagged / "head.jsonl").read_text()
    assert "secret-task" not in kept
    assert "secret-task" in (backplane_home / "runs" / plain / "head.jsonl").read_text()
    wrong = run("--param", "abp.task_text=no")
    assert (wrong.returncode, wrong.stderr.partition(":")[0]) == (2, "config_invalid")
    assert run("--tag", "x" * 300).returncode == 2


def test_older_and_larger_runs_are_pruned(backplane_home: Path) -> None:
    with Store.open(backplane_home) as store:
        old = stored(store, "old", ago_ms=40 * 24 * HOUR_MS).run_id
        big = stored(store, "big", said="x" * 200_000).run_id
        new = stored(store, "new").run_id

    def whole() -> set[str]:
        return {run_id for run_id in (old, big, new) if cli("show", run_id).returncode == 0}

    assert cli("prune", "--older", "30d", "--dry-run").returncode == 0
    assert whole() == {old, big, new}
    assert cli("prune", "--older", "30d").returncode == 0
    assert whole() == {big, new}
    assert cli("prune", "--size", "100k").returncode == 0
    assert whole() == {new}
    assert cli("receipts", "verify").returncode == 0
    for words in ([], ["--older", "soon"], ["--older", "0"], ["--size", "much"]):
        assert cli("prune", *words).returncode == 2
    assert whole() == {new}


def test_a_run_prints_its_answer_alone_or_where_it_is_kept_too(backplane_home: Path, tmp_path: Path) -> None:
    says = 'mock.scenario=[{"say":"an answer"}]'
    words = ("run", "go", "--backend", "mock", "--root", str(tmp_path), "--param", says)
    quiet = cli(*words, "-q")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "an answer\n", "")
    assert str(backplane_home) in cli(*words, "-v").stderr
    assert cli(*words, "-v", "-q").returncode == 2


def test_a_growing_journal_is_read_a_whole_line_at_a_time(backplane_home: Path) -> None:
    journal = open_journal(backplane_home)
    with closing(Tail(journal.folder)) as tail:
        assert [fact["fact"] for fact in tail.facts()] == ["order"]
        assert tail.events() == []
        whole = line(delta("one")) + line(delta("two"))
        with (journal.folder / "trace.jsonl").open("ab", buffering=0) as file:
            for cut in (whole[:20], whole[20:90], whole[90:]):
                file.write(cut)
                got = tail.events()
        journal.note({"fact": "hello"})
        assert [fact["fact"] for fact in tail.facts()] == ["hello"]
        assert tail.events() == []
    journal.close()
    assert [getattr(event, "text", None) for event in got] in (["two"], ["one", "two"])
