"""Calls, asks and answers: an answer pays for one call, and what was done otherwise is said."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backplane.contract.approval import Decision
from backplane.contract.work import PolicyProfile, RuntimeConfig
from backplane.policy.paths import SECOND_SPELLINGS, SHELLS, SPELLINGS, TOOLS
from backplane.receipts.calls import CALLS_MAX, ENDED_MAX, CallBook
from backplane.runtime.hooks import Hook
from backplane.runtime.run import Run
from tests.runs import backplane_of, check, go, order, plane, saying, script

pytestmark = pytest.mark.anyio


# The book against an oracle -------------------------------------------------------------------------------------------

IDS, INPUTS = ("t1", "t2", "t3"), ("ls", "rm")
WITH_IDS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(IDS), st.sampled_from(INPUTS)),
        st.tuples(st.just("answer"), st.sampled_from(IDS), st.sampled_from(("allow", "deny", "ls", "rm"))),
        st.tuples(st.just("call"), st.sampled_from(IDS), st.sampled_from(INPUTS)),
        st.tuples(st.just("result"), st.sampled_from(IDS), st.booleans()),
    ),
    max_size=14,
)


def legal(steps: list[tuple[str, str, Any]]) -> list[tuple[str, str, Any]]:
    """The steps that two ends can make: one call and one ask an id, an answer to an open ask alone."""
    made: list[tuple[str, str, Any]] = []
    for step in steps:
        kinds = [kind for kind, id, _ in made if id == step[1]]
        first = step[0] not in kinds
        if first and (step[0] != "answer" or "ask" in kinds) and (step[0] != "result" or "call" in kinds):
            made.append(step)
    return made


def judged_with_ids(steps: list[tuple[str, str, Any]]) -> tuple[int, bool]:
    """By the contract's words: how many denied calls were done, and whether each call was done as it was answered."""
    denied_done, clean = 0, True
    for id in IDS:
        mine = [(place, kind, value) for place, (kind, of, value) in enumerate(steps) if of == id]
        ask, answer, call, result = (
            next(((place, value) for place, one, value in mine if one == kind), None)
            for kind in ("ask", "answer", "call", "result")
        )
        if call is None:
            continue
        is_about = ask is not None and ask[1] == call[1] and (result is None or ask[0] < result[0])
        may = ask[1] if ask is not None else None
        if ask is not None and answer is not None and answer[1] in INPUTS:
            may = answer[1]
            if answer[0] < call[0]:  # Reported afterwards, it has to be what it was changed to.
                is_about = call[1] == may and (result is None or ask[0] < result[0])
        if not is_about:
            clean = False
            continue
        if result is None or not result[1]:
            continue
        if answer is None or answer[0] > result[0]:
            clean = False
        elif answer[1] == "deny":
            denied_done, clean = denied_done + 1, False
    return denied_done, clean


@settings(max_examples=150, deadline=None)
@given(WITH_IDS)
def test_calls_with_ids_are_judged_as_the_contract_says(steps: list[tuple[str, str, Any]]) -> None:
    steps = legal(steps)
    book = CallBook()
    for kind, id, value in steps:
        if kind == "ask":
            book.ask(id, "bash", {"command": value}, id=id)
        elif kind == "answer" and value in INPUTS:
            book.answer(id, "bash", "modify", {"command": value})
        elif kind == "answer":
            book.answer(id, "bash", value)
        elif kind == "call":
            book.called("Bash", {"command": value}, id)
        else:
            book.ended("Bash", id, is_error=not value)
    denied_done, clean = judged_with_ids(steps)
    assert book.denied_then_done == denied_done, steps
    assert (not book.has_unasked() and not book.breaches()) == clean, steps


WITHOUT_IDS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(INPUTS), st.sampled_from(("allow", "deny"))),
        st.tuples(st.just("done"), st.sampled_from(INPUTS), st.booleans()),
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(WITHOUT_IDS)
def test_one_after_the_other_without_ids_each_answer_pays_once_and_for_its_own_input(
    steps: list[tuple[str, str, Any]],
) -> None:
    book, allowed, denied = CallBook(), Counter[str](), Counter[str]()
    denied_done, unasked = 0, 0
    for number, (kind, input, value) in enumerate(steps):
        if kind == "ask":
            book.ask(str(number), "bash", {"command": input})
            book.answer(str(number), "bash", value)
            if value == "deny":  # The last word counts.
                allowed[input], denied[input] = 0, denied[input] + allowed[input] + 1
            else:
                allowed[input] += 1
            continue
        book.called("bash", {"command": input}, None)
        book.ended("bash", None, is_error=not value)
        if allowed[input]:
            allowed[input] -= 1
        elif denied[input]:
            denied[input] -= 1
            denied_done += value
        else:
            unasked += 1
    assert (book.denied_then_done, book.unasked) == (denied_done, unasked), steps


# Honest hosts and others ----------------------------------------------------------------------------------------------

ASK, ANSWER, CALL, RESULT, ERROR, RAN = "ask", "answer", "call", "result", "error", "ran"
LS, EVIL = {"command": "ls"}, {"command": "evil"}

HONEST: dict[str, list[tuple[Any, ...]]] = {
    "allowed": [(ASK, "t1", LS, "allow"), (CALL, "t1", LS), (RAN, "ls"), (RESULT, "t1")],
    "reported first": [(CALL, "t1", LS), (ASK, "t1", LS, "allow"), (RAN, "ls"), (RESULT, "t1")],
    "denied and told so": [(ASK, "t1", LS, "deny"), (CALL, "t1", LS), (ERROR, "t1")],
    "denied and reported before": [(CALL, "t1", LS), (ASK, "t1", LS, "deny"), (ERROR, "t1")],
    "denied and never reported": [(ASK, "t1", LS, "deny")],
    "denied, then another one": [
        (ASK, "t1", LS, "deny"),
        (ASK, "t2", EVIL, "allow"),
        (CALL, "t2", EVIL),
        (RESULT, "t2"),
    ],
    "changed": [(ASK, "t1", EVIL, LS), (CALL, "t1", LS), (RAN, "ls"), (RESULT, "t1")],
    "reported, then changed": [(CALL, "t1", EVIL), (ASK, "t1", EVIL, LS), (RAN, "ls"), (RESULT, "t1")],
    "failed": [(CALL, "t1", LS), (ASK, "t1", LS, "allow"), (ERROR, "t1")],
    "a result in pieces": [(CALL, "t1", LS), (ASK, "t1", LS, "allow"), (RESULT, "t1"), (RESULT, "t1")],
    "an id that comes again": [
        *[(CALL, "t1", LS), (ASK, "t1", LS, "allow"), (RESULT, "t1")],
        *[(CALL, "t1", EVIL), (ASK, "t1", EVIL, "allow"), (RESULT, "t1")],
    ],
    "no ids": [(CALL, None, LS), (ASK, None, LS, "allow"), (RESULT, None)],
    "no id in the ask": [(CALL, "t1", LS), (ASK, None, LS, "allow"), (RESULT, "t1")],
    "no id in the call": [(ASK, "t1", LS, "allow"), (CALL, None, LS), (RESULT, None)],
    "no call, a result": [(ASK, "t1", LS, "allow"), (RESULT, "t1")],
    "denied, asked again, allowed": [
        *[(CALL, None, LS), (ASK, None, LS, "deny"), (ERROR, None)],
        *[(CALL, None, LS), (ASK, None, LS, "allow"), (RESULT, None)],
    ],
    "two at once, the second denied": [
        *[(CALL, "t1", LS), (CALL, "t2", LS), (ASK, None, LS, "allow"), (ASK, None, LS, "deny")],
        *[(RESULT, "t1"), (ERROR, "t2")],
    ],
    "two at once, the first denied": [
        *[(CALL, "t1", LS), (CALL, "t2", LS), (ASK, None, LS, "deny"), (ASK, None, LS, "allow")],
        *[(ERROR, "t1"), (RESULT, "t2")],
    ],
    "the command after the result": [(CALL, "t1", LS), (ASK, "t1", LS, "allow"), (RESULT, "t1"), (RAN, "ls")],
    "defaults of the tool in the ask": [
        *[(CALL, "t1", LS), (ASK, "t1", {**LS, "timeout": 5}, "allow"), (RESULT, "t1")],
    ],
    "another spelling of the tool": [(CALL, None, LS), (ASK, None, LS, "allow"), (RESULT, None)],
}

LIES: dict[str, list[tuple[Any, ...]]] = {
    "another call after a denial": [(ASK, None, LS, "deny"), (CALL, "t9", EVIL), (RESULT, "t9")],
    "a denied call, told as a success": [(ASK, "t1", EVIL, "deny"), (CALL, "t1", EVIL), (RESULT, "t1")],
    "a denied call, no ids": [(ASK, None, EVIL, "deny"), (CALL, None, EVIL), (RESULT, None)],
    "a denied call, an error and a success": [
        (CALL, "t1", EVIL),
        (ASK, "t1", EVIL, "deny"),
        (ERROR, "t1"),
        (RESULT, "t1"),
    ],
    "a denied call, without a call": [(ASK, "t1", EVIL, "deny"), (RESULT, "t1")],
    "an ask after the deed": [(CALL, "t1", EVIL), (RESULT, "t1"), (ASK, "t1", EVIL, "allow")],
    "an ask after the deed, no id": [(CALL, "t1", EVIL), (RESULT, "t1"), (ASK, None, EVIL, "allow")],
    "another input than the allowed one": [(ASK, "t1", LS, "allow"), (CALL, "t1", EVIL), (RESULT, "t1")],
    "more than was asked about": [(ASK, "t1", LS, "allow"), (CALL, "t1", {**LS, "cwd": "/"}), (RESULT, "t1")],
    "more than was asked about, reported before": [
        *[(CALL, "t1", {**LS, "cwd": "/"}), (ASK, "t1", LS, "allow"), (RESULT, "t1")],
    ],
    "another input, reported before": [(CALL, "t1", EVIL), (ASK, "t1", LS, "allow"), (RESULT, "t1")],
    "another input, no ids": [(ASK, None, LS, "allow"), (CALL, None, EVIL), (RESULT, None)],
    "another id than the allowed one": [(ASK, "t1", EVIL, "allow"), (CALL, "t2", EVIL), (RESULT, "t2")],
    "ten banked denials": [
        *[(ASK, None, {"command": f"ls {one}"}, "deny") for one in range(10)],
        (CALL, "t9", EVIL),
        (RESULT, "t9"),
    ],
    "a change that is ignored": [(ASK, "t1", EVIL, LS), (CALL, "t1", EVIL), (RESULT, "t1")],
    "a change that is ignored, no ids": [(ASK, None, EVIL, LS), (CALL, None, EVIL), (RESULT, None)],
    "a change that is ignored, by the command": [
        (CALL, "t1", EVIL),
        (ASK, "t1", EVIL, LS),
        (RAN, "evil"),
        (RESULT, "t1"),
    ],
    "two unspent answers": [
        *[
            (ASK, None, LS, "allow"),
            (ASK, None, LS, "allow"),
            (ASK, None, EVIL, "deny"),
            (CALL, None, EVIL),
            (RESULT, None),
        ],
    ],
    "two unspent answers for the same": [
        *[
            (ASK, None, EVIL, "allow"),
            (ASK, None, EVIL, "allow"),
            (ASK, None, EVIL, "deny"),
            (CALL, None, EVIL),
            (RESULT, None),
        ],
    ],
    "an answer that pays twice": [
        (ASK, None, LS, "allow"),
        (CALL, None, LS),
        (RESULT, None),
        (CALL, None, LS),
        (RESULT, None),
    ],
    "another command than the allowed one": [(CALL, "t1", LS), (ASK, "t1", LS, "allow"), (RAN, "evil"), (RESULT, "t1")],
    "a command twice": [(CALL, "t1", LS), (ASK, "t1", LS, "allow"), (RAN, "ls"), (RAN, "ls")],
    "a result that nothing called": [(RESULT, "t9")],
    "done while it is asked": [(CALL, "t1", LS), (ASK, "t1", LS, None), (RESULT, "t1")],
}


def played(steps: list[tuple[Any, ...]], *, spelled: str = "bash") -> CallBook:
    book = CallBook()
    for number, (kind, of, *rest) in enumerate(steps):
        if kind == ASK:
            book.ask(str(number), "bash", rest[0], id=of)
            if isinstance(rest[1], dict):
                book.answer(str(number), "bash", "modify", rest[1])
            elif rest[1] is not None:
                book.answer(str(number), "bash", rest[1])
        elif kind == CALL:
            book.called(spelled, rest[0], of)
        elif kind == RAN:
            book.ran(of)
        else:
            book.ended(spelled, of, is_error=kind == ERROR)
    return book


@pytest.mark.parametrize("spelled", ["bash", "Bash"])
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_host_has_asked_about_every_call(name: str, spelled: str) -> None:
    book = played(HONEST[name], spelled=spelled)
    assert (book.has_unasked(), book.breaches(), book.denied_then_done) == (False, [], 0)


@pytest.mark.parametrize("name", LIES)
def test_a_call_that_no_answer_is_about_was_not_asked_about(name: str) -> None:
    book = played(LIES[name])
    assert book.has_unasked() or book.breaches()
    assert bool(book.denied_then_done) == (name.startswith(("a denied call", "two unspent answers")))


def test_a_patch_is_settled_by_its_files() -> None:
    book = CallBook()
    book.ask_patch("p", ["a.txt", "b.txt"])
    book.answer("p", "apply_patch", "allow")
    assert book.called("write_file", {"path": "a.txt"}, None, ["a.txt"]).is_allowed
    assert not book.called("write_file", {"path": "c.txt"}, None, ["c.txt"]).is_allowed
    book.ask_patch("q", ["c.txt"])
    book.answer("q", "apply_patch", "deny")
    book.changed(["a.txt", "c.txt"])
    assert (book.denied_then_done, book.asked, book.allowed, book.denied) == (1, 2, 1, 1)


@pytest.mark.parametrize(
    ("between", "counted"),
    [
        ([], 1),
        ([("bash", {"command": "make"})], 0),
        ([("write_file", {"path": "a.txt", "content": "2"})], 0),
        ([("write_file", {"path": "b.txt", "content": "2"})], 1),
    ],
)
def test_a_denied_file_that_changed_was_changed_by_the_denied_call_unless_another_could(
    between: list[tuple[str, dict[str, str]]], counted: int
) -> None:
    book = CallBook()
    book.ask("a", "write_file", {"path": "a.txt", "content": "1"}, files=["a.txt"])
    book.answer("a", "write_file", "deny")
    for number, (name, input) in enumerate(between):
        files = [input["path"]] if "path" in input else []
        book.ask(str(number), name, input, files=files)
        book.answer(str(number), name, "allow")
        book.called(name, input, None, files)
        book.ended(name, None, is_error=False)
    book.changed(["a.txt"])
    assert book.denied_then_done == counted


def test_a_book_of_calls_has_a_bound() -> None:
    book = CallBook()
    for number in range(CALLS_MAX + 5):
        book.ask(str(number), "bash", {"command": str(number)}, id=f"t{number}")
        book.answer(str(number), "bash", "allow")
    assert book.is_full
    assert len(book._live) == CALLS_MAX
    book = CallBook()
    for number in range(ENDED_MAX * 3):
        book.called("bash", {"command": "x" * number}, f"t{number}")
        book.ended("bash", f"t{number}", is_error=False)
    assert not book.is_full
    assert len(book._calls) < ENDED_MAX * 5


# A whole run ----------------------------------------------------------------------------------------------------------

HOST = """
hello(extensions=["ask/1"]); run = take()
for kind, of, *rest in STEPS:
    if kind == "ask":
        asked = {"kind": "tool", "name": TOOL, "input": rest[0], **({"tool_use_id": of} if of else {})}
        put({"t": "ask", "ref_id": run["id"], "id": str(id(rest)), **asked}); take()
    if kind == "call": put(event(run, type="tool_call", tool_name=TOOL, input=rest[0], tool_use_id=of))
    if kind == "ran": put(event(run, type="command_executed", command=of, exit_code=0))
    if kind in ("result", "error"):
        put(event(run, type="tool_result", tool_name=TOOL, output="", is_error=kind == "error", tool_use_id=of))
    if kind == "write":
        import os
        open(os.path.join(run["work_order"]["workspace"]["root"], of), "w").write("changed")
put(final(run)); end()
"""


def host(folder: Path, steps: list[tuple[Any, ...]], tool: str = "bash") -> Any:
    return script(folder, HOST.replace("STEPS", repr(steps)).replace("TOOL", repr(tool)))


def rows(run: Run) -> dict[str, dict[str, Any]]:
    return {row["rule"]: row for row in backplane_of(run)["enforcement"]["rules"]}


POLICIES = {
    "forbidden": PolicyProfile(disallowed_tools=("bash",)),
    "asked": PolicyProfile(require_approval_for=("bash",)),
    "elsewhere": PolicyProfile(disallowed_tools=("web_fetch",)),
}


def answer_to(steps: list[tuple[Any, ...]]) -> Any:
    """A person who gives the steps' answers, one after the other."""
    given = iter([step[3] for step in steps if step[0] == ASK])

    async def on_ask(_: object) -> Decision:
        said = next(given)
        return Decision("modify", input=said) if isinstance(said, dict) else Decision(said or "allow")

    return on_ask


CHEATS = ["another call after a denial", "a denied call, told as a success", "an ask after the deed",
          "another input than the allowed one", "ten banked denials", "a change that is ignored",
          "two unspent answers", "another command than the allowed one"]  # fmt: skip


async def test_a_path_below_the_root_may_be_written_in_full_in_the_ask(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    content = {"content": "changed"}
    steps = [
        (CALL, "t1", {"file_path": "c.py", **content}),
        (ASK, "t1", {"file_path": str(root / "c.py"), **content}, "allow"),
        (RESULT, "t1"),
    ]
    async with plane(backplane_home) as control:
        work = order(root, policy=PolicyProfile(require_approval_for=("Write",)))
        run, _ = await go(control, work, host(tmp_path, steps, "write_file"), on_ask=saying(Decision("allow")))
    assert run.error is None
    assert {row["layer"] for row in rows(run).values()} == {"host"}


@pytest.mark.parametrize("policy", ["forbidden", "asked"])
@pytest.mark.parametrize("name", CHEATS)
async def test_what_was_done_past_its_answer_makes_the_run_partial(
    name: str, policy: str, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    steps = LIES[name]
    async with plane(backplane_home) as control:
        work = order(root, policy=POLICIES[policy])
        run, _ = await go(control, work, host(tmp_path, steps), on_ask=answer_to(steps))
    enforcement = backplane_of(run)["enforcement"]
    assert enforcement["violations"]
    assert (run.receipt.outcome, run.error.code if run.error else None) == ("partial", "policy_denied")
    assert {row["layer"] for row in enforcement["rules"]} == {"audit"}
    calls = backplane_of(run)["calls"]
    assert calls["asked"] == sum(step[0] == ASK for step in steps)


@pytest.mark.parametrize("name", HONEST)
async def test_an_honest_host_keeps_the_policy_and_holds_it(
    name: str, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    steps = HONEST[name]
    async with plane(backplane_home) as control:
        work = order(root, policy=POLICIES["asked"])
        run, _ = await go(control, work, host(tmp_path, steps), on_ask=answer_to(steps))
    assert run.error is None
    assert "violations" not in backplane_of(run)["enforcement"]
    assert rows(run)["require_approval_for"]["layer"] == "host"
    assert backplane_of(run)["calls"]["denied_then_done"] == 0


@pytest.mark.parametrize("name", [*CHEATS, "a result that nothing called", "an answer that pays twice"])
async def test_no_rule_is_held_by_a_host_that_acts_past_its_answers(
    name: str, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    """The rules are about other tools, and nobody is asked: an unasked call breaks none of them."""
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root, policy=POLICIES["elsewhere"]), host(tmp_path, LIES[name]))
    row = rows(run)["disallowed_tools"]
    if name in ("a denied call, told as a success", "a change that is ignored", "two unspent answers"):
        return  # The policy allows here what somebody would have denied or changed there.
    assert row["layer"] == "audit"
    assert row["gap"]


@pytest.mark.parametrize("on_failure", ["deny", "allow"])
@pytest.mark.parametrize("name", CHEATS)
async def test_a_hook_that_was_passed_over_is_said(
    name: str, on_failure: Any, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    steps = LIES[name]
    given = iter([step[3] for step in steps if step[0] == ASK])

    def judge(_: object) -> Decision:
        said = next(given)
        return Decision("modify", input=said) if isinstance(said, dict) else Decision(said)

    hook = Hook("pre_tool", judge, on_failure=on_failure)
    async with (
        plane(backplane_home) as control,
        control.start(order(root), host(tmp_path, steps), hooks=(hook,)) as run,
    ):
        async for _ in run:
            pass
    check(run)
    if name == "another command than the allowed one":
        assert rows(run)["workspace"]["layer"] == "audit"
        return
    missed, enforcement = backplane_of(run)["hooks"].get("missed"), backplane_of(run)["enforcement"]
    assert missed or enforcement.get("violations")
    assert run.receipt.outcome == ("failed" if missed and on_failure == "deny" else run.receipt.outcome)
    assert (run.error is not None) or on_failure == "allow"
    assert {row["layer"] for row in enforcement["rules"]} == {"audit"}


# Which layer ----------------------------------------------------------------------------------------------------------

PLACES = PolicyProfile(
    deny_read=("**/.env",), deny_write=("x/**",), deny_network=("evil.test",), disallowed_tools=("y",)
)
WHOLE = {"read_file", "write_file", "edit_file", "multi_edit", "apply_patch", "web_fetch"}
INPUT_OF: dict[str, Any] = {
    "web_fetch": {"url": "http://good.test/"},
    "apply_patch": {"patch": "*** Update File: a.txt\n"},
    "bash": {"command": "cat .env"},
}
USED = [
    *TOOLS, *SECOND_SPELLINGS.values(), "Task", "mcp__files__read", "copy_file", "read_many_files",
    "run_shell_command", "NotebookEdit", "search_file_content", "other", "exec_command", "view",
]  # fmt: skip


@pytest.mark.parametrize("isolation", ["off", "best_effort"])
@pytest.mark.parametrize("tool", USED)
async def test_rules_on_places_are_held_by_a_host_that_names_each_place(
    tool: str, isolation: Any, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    neutral = {**dict.fromkeys(SHELLS, "bash"), **SPELLINGS}.get(tool, tool)
    input = INPUT_OF.get(neutral, {"path": "a.txt"})
    steps = [(CALL, "t1", input), (ASK, "t1", input, "allow"), (RESULT, "t1")]
    async with plane(backplane_home, isolation=isolation) as control:
        run, _ = await go(control, order(root, policy=PLACES), host(tmp_path, steps, tool))
    assert run.error is None
    layers = {name: row["layer"] for name, row in rows(run).items()}
    assert layers.pop("disallowed_tools") == "host"
    weakest = "host" if neutral in WHOLE else "audit"
    assert set(layers.values()) <= {weakest, *(["os"] if isolation == "best_effort" else [])}
    for row in rows(run).values():
        assert ("gap" in row and neutral in row["gap"]) or row["layer"] != "audit"


@pytest.mark.parametrize("mode", ["staged", "pass_through"])
@pytest.mark.parametrize("told", [True, False])
async def test_with_a_changed_file_that_no_event_names_no_rule_was_held_by_the_host(
    told: bool, mode: str, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    input = {"path": "c.py", "content": "changed"}
    asked = [(CALL, "t1", input), (ASK, "t1", input, "allow")] if told else []
    steps = [*asked, ("write", "c.py"), *([(RESULT, "t1")] if told else [])]
    policy = PolicyProfile(allowed_tools=("read_file", "write_file"), require_approval_for=("deploy",))
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root, policy=policy, mode=mode), host(tmp_path, steps, "write_file"))
    assert backplane_of(run)["reconciliation"] == {"unclaimed": ["c.py"]}
    assert {row["layer"] for row in rows(run).values()} == {"audit"}
    assert all("no event names: 1" in row["gap"] for row in rows(run).values())


@pytest.mark.parametrize(
    ("demanded", "steps", "short"),
    [
        ({"deny_read": "host"}, [(CALL, "t1", LS), (ASK, "t1", LS, "allow"), (RESULT, "t1")], True),
        ({"disallowed_tools": "host"}, [(CALL, "t1", LS), (ASK, "t1", LS, "allow"), (RESULT, "t1")], False),
        ({"disallowed_tools": "host"}, [(CALL, "t1", LS), (RESULT, "t1")], True),
        ({"deny_read": "audit"}, [(CALL, "t1", LS), (RESULT, "t1")], False),
        ({"deny_network": "host"}, [], False),
        ({"workspace": "vendor"}, [("write", "c.py")], True),
    ],
)
async def test_a_demand_for_the_host_is_not_complete_where_the_host_did_not_hold_the_rule(
    demanded: dict[str, str], steps: Any, short: bool, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    config = RuntimeConfig(vendor={"abp": {"enforcement": demanded}})
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root, policy=PLACES, config=config), host(tmp_path, steps))
    assert (run.error is not None) == short
    assert run.receipt.outcome == ("partial" if short else "complete")
    if short:
        assert f"{next(iter(demanded))} was to be held by" in str(run.error)
        assert backplane_of(run)["enforcement"]["violations"][0]["rule"] == next(iter(demanded))


# The host that was denied and went on ---------------------------------------------------------------------------------

DENIED_THEN_UNASKED = """
import os
hello(extensions=["ask/1"]); run = take()
def ask(id, name, input):
    put({"t": "ask", "ref_id": run["id"], "id": id, "kind": "tool", "name": name, "input": input, "default": "deny"})
    return take()
def done(id, name, input, output):
    put(event(run, type="tool_call", tool_name=name, input=input, tool_use_id=id))
    put(event(run, type="tool_result", tool_name=name, output=output, is_error=False, tool_use_id=id))
root = run["work_order"]["workspace"]["root"]
ask("a1", "WebFetch", {"url": "http://evil.test/a"})
done("t9", "WebFetch", {"url": "http://evil.test/b"}, "200")
ask("a2", "Grep", {"pattern": "KEY", "path": "."})
done("t1", "Grep", {"pattern": "KEY", "path": "."}, " ".join(os.listdir(root)))
open(os.path.join(root, "a.txt"), "w").write("b")
put(final(run)); end()
"""


@pytest.mark.parametrize("isolation", ["off", "best_effort", "required"])
@pytest.mark.parametrize("demanded", [None, {"deny_network": "host"}])
@pytest.mark.parametrize("mode", ["staged", "pass_through"])
async def test_a_host_that_is_denied_one_address_and_fetches_another_is_found(
    mode: str, demanded: Any, isolation: Any, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    config = RuntimeConfig(vendor={"abp": {"enforcement": demanded}} if demanded else {})
    policy = PolicyProfile(deny_read=("**/.env",), deny_network=("*",))
    async with plane(backplane_home, isolation=isolation) as control:
        work = order(root, policy=policy, mode=mode, config=config)
        run, _ = await go(control, work, script(tmp_path, DENIED_THEN_UNASKED), on_ask=saying(Decision("allow")))
    if isolation == "required" and run.end is not None and run.end.reason == "refused":
        pytest.skip("this machine has not all layers")
    assert run.error is not None
    assert (run.receipt.outcome, run.error.code) == ("partial", "policy_denied")
    found = rows(run)
    assert found["deny_network"]["layer"] in ("audit", "os")
    assert found["deny_read"]["layer"] in ("audit", "os")
    assert "deny_network" in [row["rule"] for row in backplane_of(run)["enforcement"]["violations"]]


def test_every_cheat_is_in_the_list() -> None:
    assert set(CHEATS) <= set(LIES)
    assert len(list(itertools.product(CHEATS, POLICIES))) >= 18
