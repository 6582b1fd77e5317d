"""`why`: the kinds that need a living process, a model's service or a disk, each made to happen.

A host of a few lines does what goes wrong; its processes are real, and only the clock of the diagnosis is put forward,
as nobody shall wait for minutes. A machine that went down and its full disk are told from a written snapshot.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest

import backplane
from backplane import Hook
from backplane.contract.events import Approval
from backplane.contract.work import PolicyProfile, RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.host import Done
from backplane.process.table import Process
from backplane.receipts.memory import find
from backplane.receipts.store import Store
from backplane.runtime.backends import Backend
from backplane.testing import Fault, Turn
from backplane.view.load import moment_of, picture_of, why
from backplane.view.why import Diagnosis, diagnose
from backplane.view.why_kinds import HEALTHY, Moment
from tests import test_why
from tests.api_agent import job, solve
from tests.in_process import in_process
from tests.queues import needs_queue
from tests.runs import memory, mock_backend, order, plane, script
from tests.test_why import called, diagnosed, live

WAIT_S = 20
LATER_MS = 120_000

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]

TELL = """
def tell(run, type, **members):
    put({"t": "event", "ref_id": run["id"], "event": {"ts": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
         "type": type, **members}})
def carry(run, name, body, message="m"):
    tell(run, "warning", message=message, ext={name: body})
def call(run, id="c1", **members):
    tell(run, "tool_call", tool_name="bash", tool_use_id=id, input={"command": "make"}, **members)
def child(*words, **options):
    import subprocess
    return subprocess.Popen(words, **{"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, **options})
hello()
run = take()
"""
SLEEP = "\ntime.sleep(600)\n"
PYTHON = repr(sys.executable)

Ready = Callable[[Any, Moment], bool]


def _seen(home: Path, ready: Ready, later_ms: int) -> Diagnosis | None:
    """The diagnosis of the newest run, once it is as far; the clock put forward."""
    try:
        with Store.open(home, readonly=True) as store:
            run = find(store, "last")
            picture = picture_of(store, run)
            moment = moment_of(store, picture, run)
    except backplane.BackplaneError:  # Its folder is not there yet.
        return None
    if run.state != "live" or not ready(picture, moment):
        return None
    return diagnose(picture, msgspec.structs.replace(moment, now_ms=moment.now_ms + later_ms))


async def while_live(
    home: Path,
    work: WorkOrder,
    backend: Backend,
    ready: Ready,
    *,
    later_ms: int = LATER_MS,
    on_ask: Any = None,
    hooks: tuple[Hook, ...] = (),
) -> Diagnosis:
    """What `why` says of a run while it lives, seen from beside."""
    found: list[Diagnosis] = []
    async with (
        plane(home, idle_s=60, line_bytes_max=1 << 20) as control,
        control.start(work, backend, on_ask=on_ask, hooks=hooks) as run,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(run.wait)
        with anyio.fail_after(WAIT_S):
            while not found:
                seen = await anyio.to_thread.run_sync(_seen, home, ready, later_ms)
                found += [seen] if seen is not None else []
                await anyio.sleep(0.05)
        await run.cancel("seen", grace_s=0.1)
    return found[0]


async def never(_: Approval) -> Any:
    await anyio.sleep_forever()


def began(picture: Any, _: Moment) -> bool:
    return bool(picture.events)


SPINS = f"child({PYTHON}, '-c', 'while True: pass')"
RETRY = "carry(run, 'retry', {{'status': {}, 'retry_after_ms': 4000}}, {!r})"

HOSTS: dict[str, tuple[str, Ready]] = {
    "overloaded": (RETRY.format(529, "overloaded, try 2"), began),
    "quota": (RETRY.format(429, "usage limit reached, resets 2026-12-01"), began),
    "tool_works": (f"call(run); {SPINS}", lambda _, moment: any(one.is_busy for one in moment.processes[1:])),
}  # fmt: skip
"""Kind → what its host does, and how it is seen that it is as far."""


@pytest.mark.parametrize("kind", HOSTS)
async def test_what_a_live_run_waits_for_is_seen_in_its_processes(
    kind: str, backplane_home: Path, tmp_path: Path, anyio_backend: str
) -> None:
    body, ready = HOSTS[kind]
    host = script(tmp_path, TELL + body + SLEEP)
    found = await while_live(backplane_home, order(tmp_path), host, ready)
    assert found.kind == kind, found
    assert found.next
    assert found.since_ms is not None


ANY = PolicyProfile(require_approval_for=("*",))
TOOL: dict[str, Any] = {"tool": {"name": "grep", "input": {"pattern": "x"}, "output": "a.txt"}}


def open_ask(picture: Any, _: Moment) -> bool:
    return bool(picture.open_asks)


ASKS = """
hello(extensions=["ask/1"]); run = take()
put({"t": "ask", "ref_id": run["id"], "id": "a1", "deadline_ms": 60000, "default": "deny", **BODY}); take()
"""
CALL = {"kind": "tool", "name": "bash", "input": {"command": "rm all"}}


@pytest.mark.parametrize(
    ("body", "outcome", "fault", "kind", "evidence"),
    [
        (CALL, "failed", False, "denied", "bash rm all: not today"),
        ({"kind": "input", "question": "which?"}, "failed", False, "denied", "which?"),
        (CALL, "failed", True, "denied", "bash rm all: not today"),
        (CALL, "complete", False, "denied", "bash rm all: not today"),
    ],
)
async def test_a_denial_by_a_person_is_named(
    body: dict[str, Any],
    outcome: str,
    fault: bool,
    kind: str,
    evidence: str,
    backplane_home: Path,
    tmp_path: Path,
    anyio_backend: str,
) -> None:
    async def deny(ask: Approval) -> Any:
        return ask.deny("not today")

    last = f"put(*[event(run, type='error', message='I cannot')] * {fault:d}, final(run, outcome={outcome!r})); end()"
    host = script(tmp_path, ASKS.replace("BODY", repr(body)) + last)
    policy = PolicyProfile(require_approval_for=("bash",))
    async with plane(backplane_home) as control:
        work = order(tmp_path, mode="staged", policy=policy)
        async with control.start(work, host, on_ask=deny) as run:
            await run.wait()
    found = test_why.diagnosed(backplane_home)
    assert found.kind == kind, found
    assert any(evidence in row.text for row in found.evidence), found
    assert not re.search(r"\b1 (calls|files|turns)\b|\b1 of its \w+ .* were\b", found.verdict)


# Runs that have ended -------------------------------------------------------------------------------------------------

SERVICE: dict[str, tuple[Fault, str]] = {
    "backend_model_not_found": (Fault(status=404, message="the model does not exist"), "claude-sonet-5"),
    "quota": (Fault(status=400, message="monthly usage limit reached, resets 2026-12-01"), ""),
}


@pytest.mark.parametrize("kind", SERVICE)
async def test_what_a_model_s_service_refuses_is_told(
    kind: str, backplane_home: Path, tmp_path: Path, anyio_backend: str
) -> None:
    fault, model = SERVICE[kind]
    work = job(tmp_path, config=RuntimeConfig(model=model or None))
    await solve(backplane_home, [Turn(fault=fault, times=None)], work)
    found = diagnosed(backplane_home)
    assert found.kind == kind, found
    if kind == "backend_model_not_found":
        with Store.open(backplane_home, readonly=True) as store:
            told = why(store, find(store, "last"))
        assert "claude-sonnet-5" in told.next[0]


async def test_a_service_that_cannot_be_reached_is_told(
    backplane_home: Path, tmp_path: Path, anyio_backend: str
) -> None:
    await solve(backplane_home, [], job(tmp_path), base_url="http://127.0.0.1:9/v1")
    found = diagnosed(backplane_home)
    assert (found.kind, "127.0.0.1" in found.evidence[0].text) == ("backend_unavailable", True), found


def test_a_full_disk_is_told_by_the_agent_s_own_words(backplane_home: Path, tmp_path: Path, anyio_backend: str) -> None:
    backplane.run("dd if=/dev/zero of=/dev/full count=1", backend="shell", root=tmp_path)
    found = diagnosed(backplane_home)
    assert found.kind == "disk_full", found
    assert found.evidence[0].event is not None


def test_a_folder_that_was_changed_meanwhile_is_a_conflict(
    backplane_home: Path, tmp_path: Path, anyio_backend: str
) -> None:
    original = tmp_path / "a.txt"
    original.write_text("one\n")

    async def work(run: Any) -> Any:
        test_why.write(run, "a.txt")
        original.write_text("somebody else's\n")
        return Done()

    given = WorkOrder("go", workspace=WorkspaceSpec(root=str(tmp_path)), lane="workspace_first")
    backplane.run(given, backend=memory(work))
    found = diagnosed(backplane_home)
    assert found.kind == "execution_workspace_error", found
    assert "--merge" in found.next[0]


def test_a_rule_of_ours_that_stops_the_work_is_told(backplane_home: Path, tmp_path: Path, anyio_backend: str) -> None:
    steps = (TOOL, {"error": {"message": "I may not search"}}, {"outcome": "failed"})
    work = order(tmp_path, *steps, policy=PolicyProfile(disallowed_tools=("grep",)))
    backplane.run(work, backend=mock_backend("memory"))
    found = diagnosed(backplane_home)
    assert (found.kind, found.also) == ("denied", ("agent_failed",)), found


@pytest.mark.parametrize("where", ["receipt", "trace", "cut"])
def test_an_altered_receipt_is_told_first(where: str, backplane_home: Path, tmp_path: Path, anyio_backend: str) -> None:
    run = backplane.run(order(tmp_path, {"say": "hello"}), backend=mock_backend("memory"))
    trace = backplane_home / "runs" / run.id / "trace.jsonl"
    if where == "receipt":
        receipt = trace.with_name("receipt.json")
        receipt.write_bytes(receipt.read_bytes().replace(b"complete", b"partial "))
    elif where == "trace":
        trace.write_bytes(trace.read_bytes().replace(b"hello", b"jello"))
    else:
        trace.write_bytes(trace.read_bytes()[:-10])
    with Store.open(backplane_home, readonly=True) as store:
        found = why(store, find(store, run.id))
    assert found.kind == "altered", found
    assert "verify" in found.next[0]


def cli(folder: Path, *words: str, **env: str) -> str:
    return in_process(*words, cwd=folder, env={**os.environ, **env}).stdout


def test_an_order_that_no_worker_takes(backplane_home: Path, tmp_path: Path, anyio_backend: str) -> None:
    needs_queue()
    (tmp_path / "work").mkdir()
    id = cli(tmp_path, "queue", "submit", "make test", "-b", "shell", "--root", "work").strip()
    found = json.loads(cli(tmp_path, "queue", "show", id[:8], "--json"))
    assert (found["holds"]["kind"], found["order"]["order_id"]) == ("queued", id)


async def test_a_run_that_asks_is_not_silent_too(backplane_home: Path, tmp_path: Path, anyio_backend: str) -> None:
    work = order(tmp_path, TOOL, policy=ANY)
    found = await while_live(backplane_home, work, mock_backend("process"), open_ask, on_ask=never)
    assert (found.kind, found.also) == ("approval_waits", ())


# From a written snapshot ----------------------------------------------------------------------------------------------


def snapshot_of(home: Path, **seen: Any) -> Diagnosis:
    """The diagnosis of the newest run, with this of the machine."""
    with Store.open(home, readonly=True) as store:
        run = find(store, "last")
        picture = picture_of(store, run)
        moment = msgspec.structs.replace(moment_of(store, picture, run), now_ms=test_why.NOW_NS // 1_000_000)
        return diagnose(picture, msgspec.structs.replace(moment, **seen))


def test_a_pipeline_and_a_talker_are_no_trouble(backplane_home: Path, anyio_backend: str) -> None:
    """Processes that look like trouble in a run that is well."""
    tool = Process(pid=2, command="server", started_ms=test_why.NOW_NS // 1_000_000 - 2_000, is_busy=True)
    host = Process(pid=1, command="host", started_ms=0)
    with live(backplane_home, called("bash", "make", 3)):
        assert snapshot_of(backplane_home, processes=(host, tool)).kind in HEALTHY
