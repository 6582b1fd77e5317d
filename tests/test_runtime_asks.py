"""Asks and the policy: who answers, what a denial does, and what the receipt says was held by whom."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from backplane.contract.approval import Decision
from backplane.contract.events import Approval, ApprovalAnswered, ToolCall, ToolResult
from backplane.contract.work import PolicyProfile, RuntimeConfig
from backplane.runtime import approvals
from backplane.runtime.approvals import ASKS_OPEN_MAX, OnAsk
from backplane.runtime.backends import Backend
from backplane.runtime.hooks import Hook
from backplane.runtime.run import Run
from tests.runs import backplane_of, check, counts, ended, go, order, plane, saying, script, texts

pytestmark = pytest.mark.anyio


def rules(run: Run) -> dict[tuple[str, str | None], str | None]:
    return {(row["rule"], row["pattern"]): row["layer"] for row in backplane_of(run)["enforcement"]["rules"]}


def results(events: list[Any]) -> list[tuple[str, bool]]:
    return [(event.output, event.is_error) for event in events if isinstance(event, ToolResult)]


WRITE: dict[str, Any] = {"write": {"path": "b.txt", "content": "beta"}}
TOOL: dict[str, Any] = {"tool": {"name": "deploy", "input": {"to": "prod"}, "output": "done"}}
APPROVAL = PolicyProfile(require_approval_for=("deploy",))


# The policy answers ---------------------------------------------------------------------------------------------------


async def test_a_tool_that_nothing_forbids_runs_without_anybody_being_asked(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    async def never(_: Approval) -> Decision:
        raise AssertionError("nobody needs to be asked")

    async with plane(backplane_home) as control:
        run, events = await go(control, order(root, WRITE, {"say": "on"}), mock, on_ask=never)
    assert run.end_error is None
    assert (root / "b.txt").read_text() == "beta"
    answers = [event for event in events if isinstance(event, ApprovalAnswered)]
    assert [event.body["by"] for event in answers] in ([], ["policy"])


@pytest.mark.parametrize(
    "policy",
    [
        PolicyProfile(disallowed_tools=("write*",)),
        PolicyProfile(allowed_tools=("read_file",)),
        PolicyProfile(deny_write=("*.txt",)),
    ],
)
async def test_a_denied_tool_is_a_tool_result_and_the_run_goes_on(
    policy: PolicyProfile, mock: Backend, backplane_home: Path, root: Path
) -> None:
    async with plane(backplane_home) as control:
        run, events = await go(control, order(root, WRITE, {"say": "on"}, policy=policy), mock)
    assert run.end_error is None
    assert run.receipt.outcome == "complete"
    assert "on" in texts(events)
    assert not (root / "b.txt").exists()
    ((output, is_error),) = results(events)
    assert is_error
    assert output.startswith("policy_denied")


async def test_a_control_plane_that_denies_what_the_host_would_allow_is_obeyed(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    """The host asks though it has no policy of its own; the answer is the policy's, at once."""
    body = """
hello(extensions=["ask/1"]); run = take()
put(event(run, type="tool_call", tool_name="Bash", input={"command": "rm x"}))
put({"t": "ask", "ref_id": run["id"], "id": "a1", "kind": "tool", "name": "Bash", "input": {"command": "rm x"}})
answer = take()
put(event(run, type="tool_result", tool_name="Bash", output=answer["decision"] + ":" + answer["reason"], is_error=True))
put(final(run)); end()
"""
    policy = PolicyProfile(disallowed_tools=("bash",))
    async with plane(backplane_home) as control:
        run, events = await go(control, order(root, policy=policy), script(tmp_path, body))
    assert results(events) == [("deny:tool 'Bash' is forbidden by 'bash'", True)]
    assert [type(event) for event in events if isinstance(event, Approval | ApprovalAnswered)] == [
        Approval,
        ApprovalAnswered,
    ]
    assert rules(run)[("disallowed_tools", "bash")] == "host"
    assert "violations" not in backplane_of(run)["enforcement"]


@pytest.mark.parametrize(("commands", "violations"), [(1, 0), (2, 1)])
async def test_a_command_that_was_approved_is_no_violation(
    commands: int, violations: int, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = """
hello(extensions=["ask/1"]); run = take()
put(event(run, type="tool_call", tool_name="Bash", input={"command": "ls"}))
put({"t": "ask", "ref_id": run["id"], "id": "a1", "kind": "tool", "name": "Bash", "input": {"command": "ls"}})
assert take()["decision"] == "allow"
for _ in range(COMMANDS): put(event(run, type="command_executed", command="ls", exit_code=0))
put(final(run)); end()
""".replace("COMMANDS", str(commands))

    async def yes(event: Approval) -> Decision:
        return Decision(decision="allow")

    policy = PolicyProfile(require_approval_for=("bash",))
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root, policy=policy), script(tmp_path, body), on_ask=yes)
    assert (run.end_error is not None) == bool(violations)
    assert len(backplane_of(run)["enforcement"].get("violations", ())) == violations


# Somebody answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decision", "result"),
    [
        (Decision(decision="allow"), ("done", False)),
        (Decision(decision="deny", reason="not today"), ("policy_denied: not today", True)),
        (Decision(decision="modify", input={"to": "stage"}), ("done", False)),
    ],
)
async def test_a_tool_on_the_approval_list_waits_for_the_caller(
    decision: Decision, result: tuple[str, bool], mock: Backend, backplane_home: Path, root: Path
) -> None:
    seen: list[Any] = []

    async def on_ask(event: Approval) -> Decision:
        seen.append((event.body["kind"], event.body["name"], event.body["input"]))
        return decision

    async with plane(backplane_home) as control:
        run, events = await go(control, order(root, TOOL, {"say": "on"}, policy=APPROVAL), mock, on_ask=on_ask)
    assert seen == [("tool", "deploy", {"to": "prod"})]
    assert results(events) == [result]
    assert "on" in texts(events)
    answered = next(event for event in events if isinstance(event, ApprovalAnswered))
    assert (answered.body["decision"], answered.body["by"]) == (decision.decision, "caller")
    assert run.end_error is None
    assert "violations" not in backplane_of(run)["enforcement"]
    assert rules(run)[("require_approval_for", "deploy")] == "host"


async def test_where_nobody_is_there_the_tool_is_denied_and_the_run_goes_on(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    async with plane(backplane_home) as control:
        run, events = await go(control, order(root, TOOL, {"say": "on"}, policy=APPROVAL), mock)
    assert run.end_error is None
    assert results(events)[0][1]
    assert "on" in texts(events)


async def _fails(_: Approval) -> Decision:
    raise RuntimeError("a bug of the caller")


async def _says_what_is_no_decision(_: Approval) -> Decision:
    return Decision(decision="maybe")  # type: ignore[arg-type]


@pytest.mark.parametrize("on_ask", [_fails, _says_what_is_no_decision])
async def test_a_callback_that_fails_lets_nothing_through_and_ends_nothing(
    on_ask: OnAsk, mock: Backend, backplane_home: Path, root: Path
) -> None:
    async with plane(backplane_home) as control:
        run, events = await go(control, order(root, TOOL, {"say": "on"}, policy=APPROVAL), mock, on_ask=on_ask)
    assert run.end_error is None
    assert results(events)[0][1]
    assert "on" in texts(events)
    answer = next(event for event in events if isinstance(event, ApprovalAnswered))
    assert (answer.body["decision"], answer.body["by"]) == ("deny", "default")
    assert answer.body["reason"].startswith("the answering callback failed: ")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda ask: ask.answer("no"), "an ask of the kind 'tool' is not answered in words"),
        (lambda _: Decision("allow", text="no"), "it answers a tool in words"),
        (lambda _: Decision("modify"), "gives no input"),
        (lambda ask: ask.modify("prod"), "an input that is no object"),
        (lambda _: Decision("allow", input={"to": "test"}), "allow and gives another input, which is modify"),
    ],
)
async def test_an_answer_that_does_not_fit_lets_nothing_through(
    answer: Callable[[Approval], Decision], why: str, mock: Backend, backplane_home: Path, root: Path
) -> None:
    async with plane(backplane_home) as control:
        run, events = await go(control, order(root, TOOL, policy=APPROVAL), mock, on_ask=answer)
    assert run.end_error is None
    ((output, is_error),) = results(events)
    assert is_error
    assert why in output


async def test_an_ask_that_nobody_answers_in_time_has_its_default(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    async def on_ask(_: Approval) -> Decision:
        await anyio.sleep_forever()
        raise AssertionError

    async with plane(backplane_home, ask_s=0.3) as control:
        run, events = await go(control, order(root, TOOL, {"say": "on"}, policy=APPROVAL), mock, on_ask=on_ask)
    assert run.end_error is None
    assert results(events)[0][1]
    answered = next(event for event in events if isinstance(event, ApprovalAnswered))
    assert answered.body["by"] == "default"
    assert "0.3 s" in answered.body["reason"]


@pytest.mark.parametrize("decision", ["allow", "deny"])
async def test_a_decision_for_the_run_is_not_asked_for_again(
    decision: Any, mock: Backend, backplane_home: Path, root: Path
) -> None:
    seen: list[Any] = []

    async def on_ask(event: Approval) -> Decision:
        seen.append(event)
        return Decision(decision=decision, remember="run")

    other = {"tool": {"name": "destroy"}}
    policy = PolicyProfile(require_approval_for=("de*",))
    async with plane(backplane_home) as control:
        run, events = await go(control, order(root, TOOL, TOOL, TOOL, other, policy=policy), mock, on_ask=on_ask)
        assert [event.body["name"] for event in seen] == ["deploy", "destroy"]
        await go(control, order(root, TOOL, policy=policy), mock, on_ask=on_ask)
    assert len(seen) == 3, "another run is asked for again"
    assert [is_error for _, is_error in results(events)] == [decision == "deny"] * 4
    assert run.end_error is None
    assert "violations" not in backplane_of(run)["enforcement"]


async def test_a_question_is_answered_by_the_caller(mock: Backend, backplane_home: Path, root: Path) -> None:
    question = {"ask": {"question": "which?", "options": ["a", "b"], "default": "a"}}
    async with plane(backplane_home) as control:
        _, events = await go(control, order(root, question), mock, on_ask=saying(Decision(decision="allow", text="b")))
        assert "answer: allow b" in texts(events)
        _, events = await go(control, order(root, question), mock)
        assert "answer: deny a" in texts(events)


async def test_a_patch_is_asked_about_file_by_file(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    body = """
hello(extensions=["ask/1"]); run = take(); ask = {"t": "ask", "ref_id": run["id"]}
for files in (["a.py"], ["a.py", "secret/key"]):
    put({**ask, "id": str(files), "kind": "patch", "diff": "…", "files": files})
    put(event(run, take()["decision"]))
put({**ask, "id": "r", "kind": "result", "name": "x", "input": 1, "output": 2, "is_error": False})
put(event(run, take()["decision"]), final(run)); end()
"""
    policy = PolicyProfile(deny_write=("secret/**",))
    async with plane(backplane_home) as control:
        _, events = await go(control, order(root, policy=policy), script(tmp_path, body))
    assert texts(events) == ["allow", "deny", "allow"]


# Time and floods ------------------------------------------------------------------------------------------------------


async def test_the_silence_of_a_host_that_waits_for_an_answer_is_not_counted(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = """
hello(extensions=["ask/1"]); run = take()
put({"t": "ask", "ref_id": run["id"], "id": "a", "kind": "input", "question": "?"})
take(); time.sleep(0.5); put(event(run), final(run)); end()
"""

    async def on_ask(_: Approval) -> Decision:
        await anyio.sleep(1.6)
        return Decision(decision="allow")

    async with plane(backplane_home, idle_s=0.8) as control:
        run, _ = await go(control, order(root), script(tmp_path, body), on_ask=on_ask)
    assert run.end_error is None


async def test_answers_are_only_for_asks_that_wait_and_a_flood_of_asks_is_bounded(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = f"""
hello(extensions=["ask/1"]); run = take()
ask = {{"t": "ask", "ref_id": run["id"], "kind": "input", "question": "?"}}
for n in range({ASKS_OPEN_MAX} + 20): put({{**ask, "id": str(n)}})
put({{**ask, "id": "0"}})
early = [take()["id"] for _ in range(20)]
put(event(run, ",".join(early)), {{**ask, "id": "x", "ref_id": "another"}})
put(final(run)); end()
"""

    async def on_ask(_: Approval) -> Decision:
        await anyio.sleep_forever()
        raise AssertionError

    async with plane(backplane_home) as control:
        run, events = await go(control, order(root), script(tmp_path, body), on_ask=on_ask)
    assert run.end_error is None
    assert texts(events) == [",".join(str(number) for number in range(ASKS_OPEN_MAX, ASKS_OPEN_MAX + 20))]
    assert counts(run)["unasked_answer"] == 1
    assert counts(run)["foreign_ref_id"] == 1


LONG_ASK = """
hello(extensions=["ask/1"]); run = take(); put(event(run, "a"))
ask = {"t": "ask", "ref_id": run["id"], "id": "", "kind": "tool", "name": "x"}
line = lambda: json.dumps(ask, separators=(",", ":")).encode() + b"\\n"
ask["id"] = "i" * (SIZE + 1 - len(line()))
put(line())
"""


@pytest.mark.parametrize("asked", ["nobody", "the caller", "a hook"])
async def test_an_ask_that_leaves_no_room_for_any_answer_ends_its_run(
    asked: str, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    backend = script(tmp_path, LONG_ASK.replace("SIZE", "4000") + "end()")
    policy = PolicyProfile(require_approval_for=("x",)) if asked == "the caller" else PolicyProfile()
    hooks = [Hook("pre_tool", lambda call: None)] if asked == "a hook" else []
    async with plane(backplane_home, line_bytes_max=4000) as control:
        allow = saying(Decision(decision="allow"))
        async with control.start(order(root, policy=policy), backend, on_ask=allow, hooks=hooks) as run:
            events = [event async for event in run]
    check(run, events)
    assert ended(run) == ("protocol", "protocol_invalid_envelope", "failed")
    assert run.error is not None
    assert "is over line_bytes_max (4000 bytes)" in run.error.message
    assert texts(events)[0] == "a"


async def test_an_ask_with_an_endless_id_breaks_the_protocol(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root), script(tmp_path, LONG_ASK.replace("SIZE", "9000") + "end()"))
    assert ended(run) == ("protocol", "contract_schema_violation", "failed")
    assert run.error is not None
    assert run.error.message == "ask has the wrong shape: Expected `string` of length <= 8192 - at `$.id`"


@pytest.mark.parametrize(("names", "asked"), [(["a", "a"], 1), (["a", "b", "a", "b"], 3)])
async def test_decisions_for_a_run_are_kept_of_so_many_tools(
    names: list[str], asked: int, backplane_home: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not kept is asked for again."""
    monkeypatch.setattr(approvals, "REMEMBERED_MAX", 1)
    seen: list[str] = []

    async def on_ask(event: Approval) -> Decision:
        seen.append(event.body["name"])
        return Decision(decision="allow", remember="run")

    body = f"""
hello(extensions=["ask/1"]); run = take()
for n, name in enumerate({names!r}):
    put({{"t": "ask", "ref_id": run["id"], "id": str(n), "kind": "tool", "name": name, "input": {{}}}}); take()
put(final(run)); end()
"""
    policy = PolicyProfile(require_approval_for=("*",))
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root, policy=policy), script(tmp_path, body), on_ask=on_ask)
    assert run.end_error is None
    assert len(seen) == asked


async def test_a_host_that_asks_and_never_reads_is_given_up(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    body = """
hello(extensions=["ask/1"]); run = take(); deaf()
n = 0
while True:
    n += 1
    put({"t": "ask", "ref_id": run["id"], "id": "x" * 5_000 + str(n), "kind": "patch", "files": []})
"""
    async with plane(backplane_home) as control:
        with anyio.fail_after(15):
            async with control.start(order(root), script(tmp_path, body)) as run:
                async for _ in run.batches():
                    assert run.drive.host is not None
                    assert len(run.drive.host.backlog) <= 256
    assert run.end is not None
    assert (run.end.reason, run.end.code) == ("idle", "backend_timeout")


async def test_an_ask_from_a_host_that_never_announced_it_is_answered(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = """
hello(); run = take()
put({"t": "ask", "ref_id": run["id"], "id": "a", "kind": "tool", "name": "x", "input": {}})
put(event(run, take()["decision"]), final(run)); end()
"""
    async with plane(backplane_home) as control:
        run, events = await go(control, order(root), script(tmp_path, body))
    assert run.end_error is None
    assert texts(events) == ["allow"]
    assert set(rules(run).values()) == {"audit"}, "who did not announce asks is not trusted to ask"


async def test_a_run_that_is_cancelled_while_somebody_is_asked_ends(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    async with plane(backplane_home) as control:
        asked = anyio.Event()

        async def on_ask(_: Approval) -> Decision:
            asked.set()
            await anyio.sleep_forever()
            raise AssertionError

        async with control.start(order(root, TOOL, policy=APPROVAL), mock, on_ask=on_ask) as run:
            async for event in run:
                if isinstance(event, Approval):
                    with anyio.fail_after(5):
                        await asked.wait()
                    await run.cancel()
    check(run)
    assert run.end is not None
    assert run.end.reason == "cancelled"


# The audit ------------------------------------------------------------------------------------------------------------


async def test_what_a_host_did_without_asking_is_listed_as_a_violation(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = """
hello(); run = take()
put(event(run, type="tool_call", tool_name="Bash", input={"command": "ls"}))
put(event(run, type="file_changed", path="secret/key", summary="read"))
put(event(run, type="file_changed", path="../outside", summary="wrote"))
put(event(run, type="command_executed", command="ls", exit_code=0))
put(event(run, type="tool_call", tool_name="deploy", input={}))
put(event(run, type="tool_call", tool_name="fine", input={}))
put(final(run)); end()
"""
    policy = PolicyProfile(disallowed_tools=("bash",), deny_write=("secret/**",), require_approval_for=("deploy",))
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root, policy=policy), script(tmp_path, body))
    assert run.error is not None
    last = run.receipt.trace[-1]
    assert isinstance(last, ToolCall)
    assert last.tool_name == "fine", "an audit ends nothing"
    assert (run.receipt.outcome, run.error.code) == ("partial", "policy_denied")
    enforcement = backplane_of(run)["enforcement"]
    assert [row["rule"] for row in enforcement["violations"]] == [
        "disallowed_tools",
        "deny_write",
        "workspace",
        "disallowed_tools",
        "require_approval_for",
    ]
    assert set(rules(run).values()) == {"audit"}
    assert set(rules(run)) == {
        ("disallowed_tools", "bash"),
        ("deny_write", "secret/**"),
        ("require_approval_for", "deploy"),
        ("workspace", None),
    }


async def test_a_host_that_asks_once_and_then_no_more_is_not_said_to_ask(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = """
hello(extensions=["ask/1"]); run = take()
put(event(run, type="tool_call", tool_name="x", input={}))
put({"t": "ask", "ref_id": run["id"], "id": "a", "kind": "tool", "name": "x", "input": {}}); take()
put(event(run, type="tool_call", tool_name="x", input={}))
put(final(run)); end()
"""
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root, policy=PolicyProfile(disallowed_tools=("y",))), script(tmp_path, body))
    assert set(rules(run).values()) == {"audit"}


async def test_a_denied_tool_that_was_run_all_the_same_is_a_violation(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = """
hello(extensions=["ask/1"]); run = take()
put(event(run, type="tool_call", tool_name="y", input={}))
put({"t": "ask", "ref_id": run["id"], "id": "a", "kind": "tool", "name": "y", "input": {}}); take()
put(event(run, type="tool_call", tool_name="y", input={"again": 1}))
put(final(run)); end()
"""
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root, policy=PolicyProfile(disallowed_tools=("y",))), script(tmp_path, body))
    assert [row["rule"] for row in backplane_of(run)["enforcement"]["violations"]] == ["disallowed_tools"]


async def test_the_receipt_counts_the_calls_that_were_asked_about(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = """
hello(extensions=["ask/1"]); run = take()
def ask(id, **members): put({"t": "ask", "ref_id": run["id"], "id": id, **members}); take()
ask("a", kind="tool", name="x", input={})
ask("b", kind="tool", name="y", input={})
ask("c", kind="patch", files=["a.txt"])
ask("d", kind="patch", files=["../out"])
ask("e", kind="input", question="which?")
put(final(run)); end()
"""
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root, policy=PolicyProfile(disallowed_tools=("y",))), script(tmp_path, body))
    assert backplane_of(run)["calls"] == {"asked": 4, "allowed": 2, "denied": 2, "denied_then_done": 0}


CALL, ASK, ERROR, OK, RAN = "call", "ask", "error", "ok", "ran"


@pytest.mark.parametrize(
    ("extensions", "steps", "violations", "attempts"),
    [
        (["ask/1"], [(CALL, "1"), (ERROR, "1")], 0, 1),
        ([], [(CALL, "1"), (ERROR, "1")], 1, 0),
        (["ask/1"], [(CALL, "1")], 1, 0),
        (["ask/1"], [(CALL, "1"), (OK, "1")], 1, 0),
        (["ask/1"], [(CALL, None), (ERROR, None)], 1, 0),
        (["ask/1"], [(CALL, "1"), (ERROR, "2")], 1, 0),
        (["ask/1"], [(CALL, "1"), (ASK, "1"), (ERROR, "1")], 0, 0),
        (["ask/1"], [(CALL, "1"), (ERROR, "1"), (CALL, "2"), (ASK, "2"), (ERROR, "2")], 0, 1),
        (["ask/1"], [(CALL, "1"), (CALL, "2"), (ASK, "2"), (ERROR, "2")], 1, 0),
        (["ask/1"], [(CALL, "1"), (OK, "1"), (CALL, "2"), (ASK, "2"), (ERROR, "2")], 1, 0),
        (["ask/1"], [(CALL, "1"), (ERROR, "1"), (CALL, "2"), (OK, "2")], 2, 0),
        (["ask/1"], [(CALL, "1"), (ERROR, "1"), (RAN, None)], 1, 1),
    ],
)
async def test_a_forbidden_call_is_a_violation_unless_it_was_denied_or_failed_before_the_host_asked(
    extensions: list[str],
    steps: list[tuple[str, str | None]],
    violations: int,
    attempts: int,
    backplane_home: Path,
    root: Path,
    tmp_path: Path,
) -> None:
    body = f"""
hello(extensions={extensions}); run = take()
for what, id in {steps}:
    if what == "call": put(event(run, type="tool_call", tool_name="bash", input={{}}, tool_use_id=id))
    if what == "ok": put(event(run, type="tool_result", tool_name="bash", output="", is_error=False, tool_use_id=id))
    if what == "error": put(event(run, type="tool_result", tool_name="bash", output="", is_error=True, tool_use_id=id))
    if what == "ran": put(event(run, type="command_executed", command="ls", exit_code=1))
    if what == "ask":
        put({{"t": "ask", "ref_id": run["id"], "id": id, "kind": "tool", "name": "bash", "input": {{}}}})
        take()
put(final(run)); end()
"""
    policy = PolicyProfile(disallowed_tools=("bash",))
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root, policy=policy), script(tmp_path, body))
    enforcement = backplane_of(run)["enforcement"]
    assert (len(enforcement.get("violations", ())), len(enforcement.get("attempts", ()))) == (violations, attempts)
    assert run.receipt.outcome == ("partial" if violations else "complete")
    assert (run.end_error.code if run.end_error else None) == ("policy_denied" if violations else None)
    assert run.receipt.verification.harness_ok


@pytest.mark.parametrize(
    ("asked", "said", "greeted", "mode"),
    [
        ("passthrough", {"raw_message": {}}, "mapped", "passthrough"),
        ("passthrough", {}, "mapped", "mapped"),
        ("mapped", {"raw_message": {}}, "mapped", "mapped"),
        ("mapped", {}, "passthrough", "passthrough"),
    ],
)
async def test_a_receipts_mode_is_the_one_that_was_seen(
    asked: str, said: dict[str, Any], greeted: str, mode: str, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = f"""
hello(mode={greeted!r}); run = take()
put(event(run, type="assistant_message", text="x", ext={said}))
put(final(run)); end()
"""
    config = RuntimeConfig(vendor={"abp": {"mode": asked}})
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root, config=config), script(tmp_path, body))
    assert run.receipt.mode == mode
