"""An exception that nobody foresaw, raised at every call of a run in turn: the run fails with `internal`, once, whole.

A place is a function of the package and the function that called it. A first run notes the places; then each of them
raises once, in a run of its own.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from backplane import Decision, Hook, HookCall
from backplane.config import Settings
from backplane.contract import canonical
from backplane.contract.work import PolicyProfile, RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.errors import BackplaneError
from backplane.receipts.store import Store
from backplane.runtime.memory import MemoryBackend
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run
from tests import closed
from tests.all.faults import sizes
from tests.all.faults.raising import WORDS, Probe, probing
from tests.runs import QUICK

SECRET = "hunter2-hunter2-hunter2"
TIME = "2026-01-15T12:00:00Z"

EDGES = frozenset(
    {
        "runtime/plane.py:ControlPlane.__aenter__ < …",
        "runtime/plane.py:ControlPlane.start < …",
        "runtime/plane.py:ControlPlane.__aexit__ < …",
        "runtime/plane.py:_known_errors < …",
        "runtime/plane.py:ControlPlane._end < runtime/plane.py:ControlPlane.start",
        "process/aio.py:PipeReader._on_readable < …",
        "process/aio.py:PipeReader.read < process/aio.py:PipeReader._on_readable",
        "process/aio.py:PipeReader.close < process/aio.py:PipeReader._on_readable",
        "process/aio.py:PipeReader.wake < process/aio.py:PipeReader._on_readable",
        "process/aio.py:LoopTask._run < …",
        "process/aio.py:LoopTask.__init__.<locals>.<lambda> < …",
        "process/aio.py:LoopTask.wait < …",
        "runtime/drive.py:Drive.run < process/aio.py:LoopTask._run",
        "runtime/place.py:RunPlace._make < process/aio.py:LoopTask._run",
        "runtime/run.py:Run.batches < …",
        "runtime/events.py:RunReader.__init__ < runtime/run.py:Run.batches",
        "process/aio.py:asyncio_task < runtime/events.py:RunReader.__init__",
        "process/aio.py:asyncio_loop < process/aio.py:asyncio_task",
        "runtime/events.py:EventStream.is_read_elsewhere < runtime/events.py:RunReader.__init__",
        "runtime/events.py:RunReader.__aiter__ < …",
        "runtime/events.py:RunBatches.__anext__ < …",
        "runtime/events.py:EventStream.next < runtime/events.py:RunBatches.__anext__",
        "runtime/events.py:EventStream.wake < runtime/events.py:EventStream.next",
        "runtime/events.py:EventStream._change_comes < runtime/events.py:EventStream.next",
        "runtime/events.py:EventStream.add < runtime/events.py:RunRecord.add",
        "runtime/events.py:EventStream.wake < runtime/events.py:EventStream.close",
        "runtime/events.py:EventStream.close < runtime/drive.py:Drive.run",
        "runtime/drive.py:Drive._guarded < …",
        "runtime/channel.py:HostChannel._note_exit < runtime/memory.py:_MemoryLink.run",
        "runtime/channel.py:HostChannel.wake < runtime/channel.py:HostChannel._note_exit",
        "protocol/messages.py:Events.records < …",
        "runtime/memory.py:_MemoryLink.run < process/aio.py:LoopTask._run",
        "runtime/hook_calls.py:call_function < runtime/hook_calls.py:_function",
        "runtime/hook_calls.py:call_function < runtime/approvals.py:Approvals._ask_caller",
        "contract/approval.py:Decision.__post_init__ < …",
        "process/aio.py:in_daemon < runtime/hook_calls.py:call_function",
        "process/aio.py:in_daemon.<locals>.run < …",
    }
)
"""Where the program or the loop itself calls, a flag of two lines is set, or a block is left: no frame of ours is
around what raises, or nobody could leave that block a second time; or what raises is a function of the caller's."""


BY_SQLITE = "receipts/database.py:_allow"
"""Called by SQLite, to which an exception is a refusal: the store fails, and says so."""


# A run that comes to as many places as can be -------------------------------------------------------------------------


def said(ref_id: str) -> list[dict[str, Any]]:
    """The events of the host, before and after its ask, in the order in which they are kept."""
    bodies: list[dict[str, Any]] = [
        {"type": "assistant_delta", "text": "one "},
        {"type": "assistant_delta", "text": "two"},
        {"type": "assistant_message", "text": f"one two, and {SECRET}"},
        {"type": "command_executed", "command": "ls", "exit_code": 0, "stray": 1},
        {"type": {}},
        {"type": "warning", "message": "used", "ext": {"usage": {"input_tokens": 3, "estimated_cost_usd": 0.25}}},
    ]
    return [{"t": "event", "ref_id": ref_id, "event": {"ts": TIME, **body}} for body in bodies]


async def serve(stdin: int, stdout: int) -> None:
    """A host that uses nothing of the package, so that only the control plane's own calls raise."""
    rest = b""

    def put(*messages: dict[str, Any] | bytes) -> None:
        lines = [message if isinstance(message, bytes) else json.dumps(message).encode() for message in messages]
        os.write(stdout, b"\n".join(lines) + b"\n")

    async def take() -> dict[str, Any]:
        nonlocal rest
        while b"\n" not in rest:
            await anyio.wait_readable(stdin)
            data = os.read(stdin, 65536)
            if not data:
                raise EOFError
            rest += data
        line, _, rest = rest.partition(b"\n")
        taken: dict[str, Any] = json.loads(line)
        return taken

    put(b"a banner", {
        "t": "hello", "contract_version": "abp/v0.1", "backend": {"id": "plain"},
        "capabilities": {"streaming": "native", "tool_use": "native"}, "extensions": ["ask/1", "cancel/1"],
    })  # fmt: skip
    try:
        run = await take()
        ref_id, order = run["id"], run["work_order"]
        Path(order["workspace"]["root"], "made.txt").write_text("made\n")  # noqa: ASYNC240
        put(*said(ref_id), {"t": "strange", "ref_id": ref_id})
        deploying = {"to": "prod"}  # The answer to the ask counts for the call with the same input.
        for number, (name, wanted) in enumerate((("deploy", deploying), ("peek", {}))):
            put({"t": "ask", "ref_id": ref_id, "id": f"a{number}", "kind": "tool", "name": name, "input": wanted})
            await take()
        call = {"type": "tool_call", "tool_name": "deploy", "input": deploying}
        result = {"type": "tool_result", "tool_name": "deploy", "output": "done", "is_error": False}
        changed = {"type": "file_changed", "path": "made.txt", "summary": "made"}
        put(*({"t": "event", "ref_id": ref_id, "event": {"ts": TIME, **body}} for body in (call, result, changed)))
        meta = {"run_id": ref_id, "work_order_id": order["id"], "contract_version": "abp/v0.1",
                "started_at": TIME, "finished_at": TIME, "duration_ms": 0}  # fmt: skip
        put({"t": "final", "ref_id": ref_id, "receipt": {
            "meta": meta, "backend": {"id": "plain"}, "capabilities": {}, "usage_raw": {}, "usage": {}, "trace": [],
            "artifacts": [], "verification": {"harness_ok": True}, "outcome": "complete",
        }})  # fmt: skip
        while True:
            await take()
    except (EOFError, BrokenPipeError):
        return


def work_order(root: Path) -> WorkOrder:
    return msgspec.structs.replace(
        WorkOrder("do it"),
        workspace=WorkspaceSpec(root=str(root)),
        lane="workspace_first",
        policy=PolicyProfile(deny_write=("*.key",), require_approval_for=("deploy",)),
        config=RuntimeConfig(env={"TOKEN": SECRET}),
    )


async def on_ask(_: object) -> Decision:
    return Decision(decision="allow")


def hook(call: HookCall) -> Decision | None:
    return None


class Seen(msgspec.Struct):
    """What became of one run."""

    run: Run | None = None
    records: list[bytes] = []
    error: BaseException | None = None
    """What came out of the block."""
    problems: tuple[str, ...] = ()


async def go(home: Path, root: Path, probe: Probe) -> Seen:
    """Run the order as a program that uses the API does."""
    seen = Seen(records=[])
    backend = MemoryBackend(id="plain", serve=serve)
    plane = ControlPlane(Settings(limits=QUICK, isolation="off"), home, {})
    order = work_order(root)
    pre = Hook("pre_tool", hook, tools=("deploy",))
    with probing(probe):
        try:
            with anyio.fail_after(20):
                async with plane, plane.start(order, backend, on_ask=on_ask, hooks=(pre,)) as seen.run:
                    async for batch in seen.run.batches():
                        seen.records += batch.records
        except BaseException as error:  # Judged by whoever looks.
            seen.error = error
    seen.problems = tuple(plane.state_folder.problems)
    return seen


def faults_of(seen: Seen, home: Path, place: str) -> Iterator[str]:
    """What does not hold of a run in which something was raised."""
    run, error = seen.run, seen.error
    if BY_SQLITE in place and run is not None and run.error is not None:
        if run.error.code not in ("internal", "receipt_store_failed"):
            yield f"the error is {run.error!r}"
        yield from stored_faults(home, run.id)
        return
    if run is None:
        if not isinstance(error, BackplaneError) or error.code != "internal":
            yield f"start raises {error!r}"
        return
    its_own = isinstance(error, BackplaneError) and error.code == "internal"  # Of the control plane that is closed.
    if error is not None and not its_own:
        yield f"the block raises {error!r}"
    if not run.is_sealed:
        yield f"no receipt; {run.error!r}"
        return
    with Store.open(home, readonly=True) as store:
        rows = [row for row in store.scan() if row.run_id == run.id]
        if len(rows) != 1:
            yield f"{len(rows)} receipts"
            return
        if store.verify(run.id):
            yield f"the receipt does not verify: {store.verify(run.id)}"
        stored = store.load(run.id)
        kept = [canonical.encode(event) for event in stored.trace]
        if stored.receipt_sha256 != run.receipt.receipt_sha256:
            yield "another receipt is stored"
    read = closed.read(b"".join(run.receipt_chunks()))
    if kept != seen.records:
        yield f"{len(seen.records)} events were handed on, {len(kept)} are kept"
    if SECRET in str(read) or SECRET in str(run.error):
        yield "a secret is in it"
    if run.end_error is None and read["outcome"] == "complete":
        if not its_own and not any(WORDS in line for line in seen.problems):
            yield "the exception is told nowhere"
        return
    if run.end_error is None or run.end_error.code != "internal":
        yield f"the error is {run.error!r}"
    end = read["usage_raw"]["backplane"]["end"]
    if end != {"reason": "failed", "code": "internal"}:
        yield f"the end is {end}"
    if read["outcome"] == "complete" or read["verification"]["harness_ok"]:
        yield f"outcome {read['outcome']}, harness_ok {read['verification']['harness_ok']}"


def stored_faults(home: Path, run_id: str) -> Iterator[str]:
    """What does not hold of the one receipt there is in the end, by the next start at the latest."""
    with Store.open(home) as store:
        store.recover()
        rows = [row for row in store.scan() if row.run_id == run_id]
        if len(rows) != 1 or store.verify(run_id):
            yield f"{len(rows)} receipts"


# The cases ------------------------------------------------------------------------------------------------------------


def run_one(folder: Path, probe: Probe) -> tuple[Seen, Path]:
    home, root = folder / "home", folder / "root"
    home.mkdir(parents=True)
    root.mkdir()
    (root / "there.txt").write_text("there\n")
    return anyio.run(go, home, root, probe), home


def noted_places(folder: Path) -> list[str]:
    run_one(folder / "warm", Probe())  # What is loaded once is no part of a run.
    noted = Probe()
    seen, _ = run_one(folder / "noted", noted)
    assert seen.error is None
    assert seen.run is not None
    assert seen.run.end_error is None
    return list(noted.places)


def trial(folder: Path, place: str) -> list[str] | None:
    """What does not hold where this place raises; None where the run did not come to it."""
    probe = Probe(place)
    seen, home = run_one(folder, probe)
    return list(faults_of(seen, home, place)) if probe.raised else None


def forked(work: Callable[[], Any]) -> Any:
    """Do this in a process of its own: what an exception leaves behind there ends with it."""
    context = multiprocessing.get_context("fork")
    theirs, ours = context.Pipe()
    child = context.Process(target=lambda: ours.send(work()))
    child.start()
    ours.close()
    try:
        return theirs.recv() if theirs.poll(60) else ["hangs"]
    except EOFError:
        return ["the trial itself failed"]
    finally:
        child.kill()
        child.join()
        child.close()
        theirs.close()
        with suppress(ChildProcessError):  # What it had started and not waited for is ours now.
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


@pytest.mark.timeout(1200)
def test_an_exception_at_any_call_fails_the_run_with_internal(tmp_path: Path) -> None:
    places = [place for place in forked(lambda: noted_places(tmp_path)) if place not in EDGES]
    bad: dict[str, list[str]] = {}
    tried = 0
    for number, place in enumerate(places[:: max(1, len(places) // sizes.of(30, 1 << 20))]):
        faults = forked(functools.partial(trial, tmp_path / str(number), place))
        tried += faults is not None
        if faults:
            bad[place] = faults
    assert not bad
    assert tried > 10
