"""`why`: each kind made to happen, and healthy runs about which nothing is said.

Runs that end are real ones, of the scripted agent; a run that lives is a journal that somebody holds open.
"""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import backplane
from backplane.contract import canonical
from backplane.contract.events import AgentEvent, CommandExecuted, Failed, ToolCall, ToolResult, carry
from backplane.contract.work import PolicyProfile, RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.host import Done
from backplane.receipts.journal import Journal, head_fact
from backplane.receipts.memory import find
from backplane.receipts.store import Store
from backplane.runtime.backends import ProcessBackend
from backplane.view.load import picture_of
from backplane.view.why import Diagnosis, diagnose
from backplane.view.why_kinds import HEALTHY, Moment
from tests.in_process import in_process
from tests.receipt_writer import ORDER, delta, line
from tests.runs import memory, mock_backend, order, plane, script
from tests.terminal import shown_on

NOW_NS = 1_800_000_000_000_000_000
BOOT = "00000000-0000-4000-8000-000000000000"


def at(seconds_before: float) -> str:
    return canonical.timestamp_at(NOW_NS - int(seconds_before * 1e9))


def diagnosed(home: Path, name: str = "last", *, now_ns: int = NOW_NS, boot_id: str | None = None) -> Diagnosis:
    with Store.open(home, readonly=True) as store:
        run = find(store, name)
        return diagnose(picture_of(store, run), Moment(now_ms=now_ns // 1_000_000, state=run.state, boot_id=boot_id))


# Runs that have ended -------------------------------------------------------------------------------------------------

WRITE: dict[str, Any] = {"write": {"path": "b.txt", "content": "x"}}
FOUND: dict[str, Any] = {"tool": {"name": "grep", "input": {"pattern": "x"}, "output": "a.txt"}}
CODES = ("backend_auth_failed", "backend_unavailable", "backend_rate_limited", "validation_failed", "ir_invalid")
"""Codes that a host reports; the last has no next step of its own."""

ENDS: dict[str, tuple[list[Any], dict[str, Any], dict[str, Any]]] = {
    "crashed": ([{"stderr": "oh no\n"}, {"exit": 7}], {}, {}),
    "out_of_memory": ([{"kill": "SIGKILL"}], {}, {}),
    "idle_limit": ([{"sleep_s": 60}], {}, {"idle_s": 0.5}),
    "deadline": ([{"sleep_s": 60}], {}, {"run_s": 1.5}),
    "refused": ([], {"policy": PolicyProfile(deny_write=("[",))}, {}),
    "agent_failed": ([{"error": {"message": "the tests fail"}}, {"outcome": "failed"}], {}, {}),
    "nobody_asked": ([FOUND], {"policy": PolicyProfile(require_approval_for=("grep",))}, {}),
    "denied": ([FOUND], {"policy": PolicyProfile(disallowed_tools=("grep",))}, {}),
    "protocol_invalid_envelope": ([{"raw": '{"t":"event",\n'}], {}, {}),
    **{code: ([{"fail": {"code": code, "message": "it says so"}}], {}, {}) for code in CODES},
}  # fmt: skip
"""Kind → scenario, members of the order, limits."""


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("kind", ENDS)
async def test_an_end_is_told_by_its_cause(kind: str, backplane_home: Path, tmp_path: Path, anyio_backend: str) -> None:
    steps, members, limits = ENDS[kind]
    work = order(tmp_path, *(steps or [{"say": "hi"}]), mode="staged", **members)
    async with (
        plane(backplane_home, **limits) as control,
        control.start(work, mock_backend("process")) as run,
    ):
        await run.wait()
    found = diagnosed(backplane_home)
    assert found.kind == kind, found
    assert found.next
    assert found.verdict
    assert found.since_ms is None
    if run.end_error is not None and kind != "protocol_invalid_envelope":
        assert any(run.end_error.message[:100] in one.text for one in found.evidence), found


def test_a_code_of_the_hosts_own_is_told_as_such_and_looked_up_nowhere(backplane_home: Path, tmp_path: Path) -> None:
    fatal = {"t": "fatal", "ref_id": None, "error": "bad luck", "error_code": "E42"}
    backplane.run("hi", backend=script(tmp_path, f"hello(); run = take(); put({fatal!r}); end()"), root=tmp_path)
    found = diagnosed(backplane_home)
    assert "E42" in found.verdict
    assert [one.text for one in found.evidence] == ["bad luck"]
    assert not any("backplane explain" in step for step in found.next)


def test_a_host_that_prints_something_else_is_told_by_it(backplane_home: Path, tmp_path: Path) -> None:
    backend = script(tmp_path, 'print("Welcome to this shell", flush=True)')
    backplane.run("hi", backend=backend, root=tmp_path)
    found = diagnosed(backplane_home)
    assert found.kind == "protocol_handshake_failed"
    assert "Welcome to this shell" in found.evidence[-1].text


def test_a_host_that_cannot_be_started_or_says_nothing_is_told(backplane_home: Path, tmp_path: Path) -> None:
    backplane.run("hi", backend=ProcessBackend(id="gone", argv=(str(tmp_path / "gone"),)), root=tmp_path)
    assert diagnosed(backplane_home).kind == "sidecar_spawn_failed"
    backplane.run("hi", backend=script(tmp_path, 'sys.stderr.write("no such key\\n"); sys.exit(3)'), root=tmp_path)
    found = diagnosed(backplane_home)
    assert (found.kind, "hello" in found.verdict) == ("crashed", True)
    assert [one.text for one in found.evidence][-1] == "stderr: no such key"


def result_of(root: Path, work: Callable[[Any], Any], **config: Any) -> None:
    given = WorkOrder("go", workspace=WorkspaceSpec(root=str(root)), config=RuntimeConfig(**config))
    backplane.run(given, backend=memory(work))


@pytest.mark.parametrize(("kind", "config"), [("budget", {"max_budget_usd": 1.0}), ("max_turns", {"max_turns": 1})])
def test_a_limit_of_the_order_is_told(kind: str, config: dict[str, Any], backplane_home: Path, tmp_path: Path) -> None:
    async def work(run: Any) -> Any:
        for number in range(100):
            await run.tool_call("think", {}, f"c{number}")
            await run.carry("usage", {"estimated_cost_usd": 0.6 * number}, "spent")
            await run.carry("turn", {"stop_reason": "tool_use"}, "a turn")
        return Done()

    result_of(tmp_path, work, **config)
    assert diagnosed(backplane_home).kind == kind


def write(run: Any, name: str) -> None:
    Path(run.order.workspace.root, name).write_text("by the agent\n")


def done(*events: tuple[str, tuple[Any, ...]]) -> Callable[[Any], Any]:
    """Work of a host that tells these events and ends as complete."""

    async def work(run: Any) -> Any:
        for name, given in events:
            await getattr(run, name)(*given)
        return Done()

    return work


def test_a_claim_without_a_change_is_told(backplane_home: Path, tmp_path: Path) -> None:
    result_of(tmp_path, done(("file_changed", ("a.py", "written"))))
    found = diagnosed(backplane_home)
    assert (found.kind, found.evidence[0].text) == ("done_but_unchanged", "claimed: a.py")


def test_changes_that_git_ignores_alone_are_told(backplane_home: Path, tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*.log\n")

    async def work(run: Any) -> Any:
        write(run, "a.log")
        return Done()

    result_of(tmp_path, work)
    found = diagnosed(backplane_home)
    assert found.kind == "only_ignored"


@pytest.mark.parametrize(("command", "kind"), [("pytest -q", "done_but_red"), ("grep -r x .", "nothing")])
def test_red_tests_at_the_end_are_told_and_a_search_that_finds_nothing_is_not(
    command: str, kind: str, backplane_home: Path, tmp_path: Path
) -> None:
    result_of(tmp_path, done(("emit", (CommandExecuted(ts=at(0), command=command, exit_code=1),))))
    assert diagnosed(backplane_home).kind == kind


def test_a_broken_rule_is_told(backplane_home: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")

    async def work(run: Any) -> Any:
        write(run, "a.txt")
        return Done()

    policy = PolicyProfile(deny_write=("a.txt",))
    backplane.run("go", backend=memory(work), root=tmp_path, policy=policy)
    found = diagnosed(backplane_home)
    assert found.kind == "rule_broken"
    assert "--accept-violations" in found.next[0]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancelled_run_is_told_with_its_reason(
    backplane_home: Path, tmp_path: Path, anyio_backend: str
) -> None:
    work = order(tmp_path, {"say": "hi"}, {"sleep_s": 60})
    async with plane(backplane_home) as control, control.start(work, mock_backend("process")) as run:
        async for _ in run:
            await run.cancel("wrong branch (from process 7)")
    found = diagnosed(backplane_home)
    assert (found.kind, found.evidence[0].text) == ("cancelled", "wrong branch (from process 7)")


# Runs that live, or were cut off --------------------------------------------------------------------------------------


@contextmanager
def live(
    home: Path, *events: AgentEvent, begun_s: float = 100, facts: tuple[str, ...] = ("held", "hello", "sent")
) -> Iterator[str]:
    """A journal that somebody holds open, begun so long before now."""
    run_id = str(uuid.uuid4())
    head = head_fact(ORDER, run_id=run_id, started_at=at(begun_s), backend="mock")
    journal = Journal.create(home, run_id, head)
    try:
        for fact in facts:
            journal.note({"fact": fact})
        for event in events:
            journal.append(line(event))
        yield journal.run_id
    finally:
        journal.close()


def called(tool: str, about: str, seconds: float, id: str = "c1") -> AgentEvent:
    return ToolCall(ts=at(seconds), tool_name=tool, tool_use_id=id, input={"command": about})


def resulted(text: str, seconds: float, id: str = "c1", *, failed: bool = False) -> AgentEvent:
    return ToolResult(ts=at(seconds), tool_name="bash", tool_use_id=id, output=text, is_error=failed)


def asked(seconds: float, **body: Any) -> AgentEvent:
    return carry("ask", {"id": "a1", "kind": "tool", "name": "bash", "input": {"command": "rm x"}, **body},
                 ts=at(seconds), message="asks to run bash")  # fmt: skip


def again(text: str, times: int, *, failed: bool) -> list[AgentEvent]:
    return [
        event
        for number in range(times)
        for event in (called("bash", "make", 50, f"c{number}"), resulted(text, 50, f"c{number}", failed=failed))
    ]


PRINTED = carry("output", {"text": "cc a.c\n"}, ts=at(1), message="cc")
LIVE: dict[str, tuple[list[AgentEvent], tuple[str, ...]]] = {
    "approval_waits": ([asked(20, deadline_ms=300_000)], ("held", "hello", "sent")),
    "question_waits": ([asked(20, kind="input", name=None, question="which?")], ("held", "hello", "sent")),
    "staging": ([], ()),
    "no_hello": ([], ("held",)),
    "model_silent": ([delta("x"), called("bash", "make", 90), resulted("fine", 80)], ("held", "hello", "sent")),
    "tool_quiet": ([called("bash", "make", 90)], ("held", "hello", "sent")),
    "tool_works": ([called("bash", "make", 90), PRINTED], ("held", "hello", "sent")),
    "overloaded": ([carry("retry", {"status": 500}, ts=at(9), message="it broke")], ("held", "hello", "sent")),
    "quota": ([carry("retry", {"retry_after_ms": 7_200_000}, ts=at(9), message="wait")], ("held", "hello", "sent")),
    "same_failure": (again("not found", 3, failed=True), ("held", "hello", "sent")),
    "same_call": (again("nothing new", 3, failed=False), ("held", "hello", "sent")),
}  # fmt: skip


@pytest.mark.parametrize("kind", LIVE)
def test_what_a_live_run_waits_for_is_told(kind: str, backplane_home: Path) -> None:
    events, facts = LIVE[kind]
    with live(backplane_home, *events, facts=facts) as run_id:
        found = diagnosed(backplane_home, run_id)
    assert found.kind == kind, found
    assert (found.since_ms is not None) == (not kind.startswith("same_"))
    assert found.next


def test_an_approval_says_what_is_asked_and_how_much_time_is_left(backplane_home: Path) -> None:
    with live(backplane_home, asked(20, deadline_ms=300_000, default="deny")) as run_id:
        found = diagnosed(backplane_home, run_id)
    assert found.since_ms == 20_000
    asks, ends = (one.text for one in found.evidence)
    assert asks == "bash: rm x"
    assert "4 min 40 s" in ends


@pytest.mark.parametrize("boot_id", [None, BOOT])
def test_a_run_that_was_cut_off_is_told_before_and_after_it_is_sealed(
    boot_id: str | None, backplane_home: Path
) -> None:
    with live(backplane_home, called("bash", "make", 5)) as run_id:
        pass
    found = diagnosed(backplane_home, run_id, boot_id=boot_id)
    assert found.kind == "interrupted"
    assert any("make" in one.text for one in found.evidence)
    with Store.open(backplane_home) as store:
        store.recover()
    assert diagnosed(backplane_home, run_id).kind == "interrupted"


# Healthy runs ---------------------------------------------------------------------------------------------------------

HEALTHY_ENDS: tuple[list[Any], ...] = (
    [{"say": "hi"}],
    [WRITE],
    [{"think": "hm"}, WRITE, {"say": "done"}],
    [FOUND, FOUND, FOUND, FOUND, WRITE],
    [{"read": "missing.txt"}, {"read": "missing.txt"}, {"read": "missing.txt"}, WRITE],
    [{"repeat": {"times": 300, "steps": [{"delta": "word {n} "}]}}, {"say": "long"}],
    [{"repeat": {"times": 20, "steps": [{"write": {"path": "f{n}.txt", "content": "{n}"}}]}}],
    [{"stderr": "a warning\n"}, WRITE],
    [{"error": {"message": "a tool failed, I go on", "code": "execution_tool_failed"}}, WRITE],
    [{"usage": {"input_tokens": 10}}, {"say": "cheap"}],
    [{"sleep_s": 0.5}, WRITE],
)
HEALTHY_LIVE: tuple[list[AgentEvent], ...] = (
    [],
    [delta("thinking")],
    [called("bash", "make", 3)],
    [called("bash", "make", 9), resulted("ok", 5)],
    again("same", 2, failed=False),
    again("fails", 2, failed=True),
    [*again("fails", 2, failed=True), *again("ok", 1, failed=False)],
    [Failed(ts=at(2), message="went on", error_code="execution_tool_failed")],
    [asked(9), carry("answer", {"id": "a1", "decision": "allow"}, ts=at(2), message="yes")],
    [carry("retry", {"status": 529}, ts=at(9), message="overloaded"), delta("there it is")],
)


@pytest.mark.parametrize("number", range(len(HEALTHY_ENDS)))
def test_nothing_is_wrong_with_a_run_that_is_done(number: int, backplane_home: Path, tmp_path: Path) -> None:
    given = order(tmp_path, *HEALTHY_ENDS[number], mode="staged")
    run = backplane.run(given, backend=mock_backend("memory"))
    assert run.receipt.outcome == "complete"
    assert diagnosed(backplane_home).kind == "nothing"


@pytest.mark.parametrize("number", range(len(HEALTHY_LIVE)))
def test_nothing_is_wrong_with_a_run_that_goes_on(number: int, backplane_home: Path) -> None:
    late = [msgspec.structs.replace(event, ts=at(1)) for event in HEALTHY_LIVE[number]]
    begun_s = 100 if late else 2
    with live(backplane_home, *late, begun_s=begun_s) as run_id:
        found = diagnosed(backplane_home, run_id)
    assert found.kind in HEALTHY, found


# The command ----------------------------------------------------------------------------------------------------------


def cli(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return in_process(*words, cwd=cwd)


def test_the_command_says_the_cause_and_the_next_step_on_one_screen(backplane_home: Path, tmp_path: Path) -> None:
    scenario = 'mock.scenario=[{"stderr":"\\u001b[2Jboom"},{"exit":7}]'
    cli("run", "task\x1b]0;owned\x07", "--backend", "mock", "--param", scenario, cwd=tmp_path)
    told = cli("why", cwd=tmp_path)
    lines = told.stdout.splitlines()
    assert told.returncode == 0
    assert "\x1b" not in told.stdout
    assert "\\x1b]0;owned\\x07" in lines[0]
    found = msgspec.json.decode(cli("why", "last", "--json", cwd=tmp_path).stdout, type=Diagnosis)
    assert (found.kind, found.sure) == ("crashed", True)


def test_the_longest_diagnosis_fits_a_terminal_of_80_by_24(backplane_home: Path, tmp_path: Path) -> None:
    words = " ".join(["long"] * 100)
    steps: list[dict[str, Any]] = [{"stderr": f"{words} 1\n{words} 2\n{words} 3\n"}, {"exit": 7}]
    backplane.run(order(tmp_path, *steps, task=words), backend=mock_backend("process"))
    screen = [line for line in shown_on(["why"], columns=80, rows=24) if line.strip()]
    assert screen[0].startswith(find_last(backplane_home)[:8])
    assert len(screen) <= 23
    assert any(line.startswith("  next: ") for line in screen)


def find_last(home: Path) -> str:
    with Store.open(home, readonly=True) as store:
        return find(store, "last").run_id
