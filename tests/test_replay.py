"""`replay --policy`: stored runs under another policy, through the real command and over generated runs."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backplane.contract import canonical
from backplane.contract.events import AgentEvent, CommandExecuted, FileChanged, ToolCall, carry
from backplane.contract.work import PolicyProfile, WorkOrder, WorkspaceSpec
from backplane.policy.rules import compile_policy
from backplane.receipts.database import ReceiptRow
from backplane.receipts.journal import Journal, head_fact
from backplane.receipts.pieces import seal
from backplane.receipts.rejudge import Backtest, Redecided, Rejudge
from backplane.receipts.store import Store
from tests.receipt_writer import TS, receipt_of
from tests.test_runs import cli

ROOT = "/w"
OPEN = PolicyProfile(deny_write=("**/never",))
"""A policy that says something, as an empty one is the shipped default."""


def call(tool: str, **input: Any) -> ToolCall:
    return ToolCall(ts=TS, tool_name=tool, input=input, tool_use_id="t")


def ask(tool: str, id: str = "a1", **input: Any) -> AgentEvent:
    return carry("ask", {"id": id, "kind": "tool", "name": tool, "input": input}, ts=TS, message="asks")


def answer(decision: str, id: str = "a1", by: str = "policy") -> AgentEvent:
    return carry("answer", {"id": id, "decision": decision, "by": by}, ts=TS, message="answered")


def differing(events: Sequence[AgentEvent], after: PolicyProfile, before: PolicyProfile = OPEN) -> list[Redecided]:
    test = Backtest(compile_policy(before), compile_policy(after), ROOT)
    test.take(events)
    return list(test.differing())


def stored(store: Store, events: Sequence[AgentEvent], policy: PolicyProfile = OPEN) -> ReceiptRow:
    run_id = str(uuid.uuid4())
    order = WorkOrder("work", workspace=WorkspaceSpec(ROOT, mode="pass_through"), policy=policy)
    journal = Journal.create(store.home, run_id, head_fact(order, run_id=run_id, started_at=TS, backend="mock"))
    try:
        journal.append(canonical.encode_lines(events))
        return store.append(seal(receipt_of(journal.trace, run_id)), journal)
    finally:
        journal.close()


def test_a_call_that_would_be_denied_is_listed_with_the_rule_and_its_answer_of_then() -> None:
    events = [call("bash", command="make"), ask("bash", command="make"), answer("allow", by="caller")]
    (found,) = differing(events, PolicyProfile(disallowed_tools=("bash",)))
    assert (found.event, found.kind, found.subject) == (0, "tool_call", "bash make")
    assert (found.before.allowed, found.after.allowed, found.after.rule) == ("allow", "deny", "disallowed_tools")
    assert (found.answered, found.by) == ("allow", "caller")


def test_a_looser_policy_is_listed_too_and_the_same_one_differs_in_nothing() -> None:
    strict = PolicyProfile(disallowed_tools=("bash",), deny_write=("*.lock",))
    events = [call("bash", command="make"), call("write_file", path="/w/a.lock", content="")]
    assert [it.after.allowed for it in differing(events, OPEN, before=strict)] == ["allow", "allow"]
    assert differing(events, strict, before=strict) == []


def test_a_call_its_ask_and_what_it_did_are_one_decision() -> None:
    events = [
        call("write_file", path="a.lock", content=""), ask("write_file", path="a.lock", content=""), answer("allow"),
        FileChanged(ts=TS, path="a.lock", summary="written"),
        call("bash", command="make"), CommandExecuted(ts=TS, command="make"),
    ]  # fmt: skip
    found = differing(events, PolicyProfile(deny_write=("*.lock",), require_approval_for=("bash",)))
    assert [(it.event, it.after.allowed) for it in found] == [(0, "deny"), (4, "ask")]


def test_what_no_call_announced_is_judged_by_itself() -> None:
    events: list[AgentEvent] = [
        FileChanged(ts=TS, path="a.lock", summary=""), CommandExecuted(ts=TS, command="make"),
        ask("bash", command="ls"), answer("deny", by="hook"),
    ]  # fmt: skip
    found = differing(events, PolicyProfile(deny_write=("*.lock",), disallowed_tools=("bash",)))
    assert [(it.kind, it.answered) for it in found] == [("file_changed", None), ("command", None), ("ask", "deny")]


def test_relative_paths_count_from_the_folder_of_the_ask() -> None:
    input = {"path": "x", "content": ""}
    asked = carry(
        "ask", {"id": "a", "kind": "tool", "name": "write_file", "input": input, "cwd": "/w/sub"}, ts=TS, message="asks"
    )
    after = PolicyProfile(deny_write=("sub/x",))
    assert [it.event for it in differing([call("write_file", **input), asked], after)] == [0]
    assert differing([call("write_file", **input)], after) == []


def test_random_calls_differ_exactly_where_two_compiled_policies_disagree() -> None:
    rng = random.Random(5)
    pieces = ("bash", "read_file", "write_file", "web_fetch", "grep", "mcp__x__y")
    globs = ("a*", "**/b", "*.c", "x/**", "**")
    for _ in range(300):
        profiles = [
            PolicyProfile(
                disallowed_tools=tuple(rng.sample(pieces, rng.randrange(3))),
                deny_read=tuple(rng.sample(globs, rng.randrange(2))),
                deny_write=tuple(rng.sample(globs, rng.randrange(3))),
                require_approval_for=tuple(rng.sample(pieces, rng.randrange(2))),
            )
            for _ in range(2)
        ]
        events = [call(rng.choice(pieces), path=rng.choice(("a1", "k/b", "u.c", "x/y"))) for _ in range(8)]
        old, new = map(compile_policy, profiles)
        expected = [
            number
            for number, event in enumerate(events)
            if old.decide_tool_call(event.tool_name, event.input, root=ROOT).allowed
            != new.decide_tool_call(event.tool_name, event.input, root=ROOT).allowed
        ]
        assert [it.event for it in differing(list(events), profiles[1], profiles[0])] == expected


def test_a_run_without_its_order_is_told_as_not_judged(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        row = store.adopt(seal(receipt_of([call("bash", command="x")])))
        found = Rejudge(store, PolicyProfile(disallowed_tools=("bash",)), lambda _: ()).run(row)
    assert found.differing == ()
    assert "its order is not kept here" in (found.unjudged or "")


WRITES = [
    {"write": {"path": "a.txt", "content": "x"}},
    {"tool": {"name": "bash", "input": {"command": "make"}}},
    {"tool": {"name": "lookup", "input": {"q": "y"}}},
]


def test_the_command_lists_what_a_new_policy_would_change(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        done = cli("run", "work", "--backend", "mock", "--param", f"mock.scenario={json.dumps(WRITES)}")
        assert done.returncode == 0, done.stderr
    Path("new.json").write_text(json.dumps({"deny_write": ["*.txt"], "disallowed_tools": ["bash"]}))
    assert cli("run", "x", "--backend", "mock", "--require", "mcp_client").returncode == 4
    refused = cli("policy", "test", "new.json", "last")
    assert (refused.returncode, refused.stdout) == (0, "1 run, 0 decisions, 0 would differ\n")
    shown = cli("policy", "test", "new.json", "last~1")
    assert shown.returncode == 1
    assert "bash make: allow → deny  (then answered: allow by policy)" in shown.stdout
    assert "write_file a.txt: allow → deny" in shown.stdout
    assert shown.stdout.endswith("2 would differ\n")
    lines = cli("policy", "test", "new.json", "--all", "--json").stdout.splitlines()
    rows = [json.loads(line) for line in lines]
    assert [[it["subject"] for it in row["differing"]] for row in rows] == [
        *([["write_file a.txt", "bash make"]] * 2), []
    ]  # fmt: skip
    same = cli("policy", "test", "default", "last~2", "last~1", "last~1")
    assert (same.returncode, same.stdout.count("2 runs")) == (0, 1)


def test_a_file_that_only_the_patch_names_is_judged(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("run", "echo x > quiet.lock", "--backend", "shell").returncode == 0
    Path("new.json").write_text('{"deny_write": ["*.lock"]}')
    row = json.loads(cli("policy", "test", "new.json", "last", "--json").stdout)
    (found,) = row["differing"]
    assert (found["kind"], found["subject"], found["event"]) == ("patch", "quiet.lock", None)


def test_bad_words_are_refused_with_the_next_step(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (("strict",), ("strict", "--all", "last"), ("none.json", "last")):
        refused = cli("policy", "test", *words)
        code = "config_invalid" if "none.json" in words else "usage_invalid"
        assert (refused.returncode, code in refused.stderr) == (2, True), refused.stderr
    assert "not so many receipts" in cli("policy", "test", "strict", "last").stderr


def test_a_rule_that_matches_nothing_is_told_where_it_is_tried(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("new.json").write_text('{"disallowed_tools": ["Bash(git push:*)"], "deny_write": ["src/"]}')
    told = cli("policy", "test", "new.json", "--all").stderr
    assert "not known here: Bash(git push:*) (bash?)" in told
    assert "match no file of the workspace: src/ (src?)" in told
