"""What survives the control plane, a full disk and a store that cannot take a receipt."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from backplane.contract.events import AgentEvent, AssistantDelta
from backplane.receipts.database import FILE
from backplane.receipts.outcomes import End
from backplane.receipts.store import Store
from backplane.runtime.run import Run
from backplane.runtime.state import KEPT
from tests.all.doors.test_routing_cli import stored
from tests.peers import ROOT
from tests.runs import ended, go, is_empty, mock_backend, order, plane, script, texts

pytestmark = pytest.mark.anyio


# The journal and the store --------------------------------------------------------------------------------------------

KILLED = """
import json, os, sys, anyio, pathlib
from tests.runs import mock_backend, order, plane
root, home, way = (pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3])
async def main():
    steps = {"repeat": {"times": 100_000, "steps": [{"delta": "{n}"}]}}
    async with plane(home) as control, control.start(order(root, steps, mode="staged"), mock_backend(way)) as run:
        print(run.id, flush=True)
        async for event in run:
            if getattr(event, "text", ""):
                print(event.text, flush=True)
anyio.run(main)
"""


@pytest.mark.parametrize("way", ["memory", "process"])
def test_what_was_handed_on_survives_the_death_of_the_control_plane(way: str, backplane_home: Path, root: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(root), str(backplane_home), way],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        run_id = process.stdout.readline().decode().strip()
        for _ in range(700):
            process.stdout.readline()
        process.kill()
        shown = 700 + sum(line.endswith(b"\n") for line in process.stdout.read().splitlines(keepends=True))
    with Store.open(backplane_home) as store:
        assert not store.has(run_id)

    async def restart() -> Run:
        async with plane(backplane_home) as control:
            run, _ = await go(control, order(root), mock_backend("memory"))
        return run

    anyio.run(restart)
    with Store.open(backplane_home, readonly=True) as store:
        receipt = store.load(run_id)
        assert store.verify_all().findings == ()
    assert receipt.backplane["end"] == {"reason": "interrupted"}
    assert receipt.outcome == "partial"
    told = [event.text for event in receipt.trace if isinstance(event, AssistantDelta)]
    assert told == [str(number) for number in range(len(told))]
    assert len(told) >= shown
    assert is_empty(backplane_home / "stage")


@pytest.fixture
def little_disk() -> Any:
    """Let no file of this process grow beyond a size, as a full disk would not."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize("together", [True, False])
async def test_events_that_cannot_be_kept_end_the_run_as_a_fault_of_the_store(
    together: bool, little_disk: Callable[[int], None], backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    # With the final in the same read as the event that does not fit, the run must not look complete.
    rest = "put(event(run, 'x' * 30_000), final(run))" if together else "put(event(run, 'x' * 30_000)); put(final(run))"
    body = f"hello(); run = take(); put(event(run, 'first')); time.sleep(0.3)\n{rest}\nend()"
    seen: list[AgentEvent] = []
    async with plane(backplane_home) as control:
        await go(control, order(root), mock_backend("memory"))
        async with control.start(order(root), script(tmp_path, body)) as run:
            async for event in run:
                seen.append(event)
                little_disk(20_000)
        little_disk(10**12)
    assert texts(seen) == ["first"]
    assert ended(run)[:2] == ("store", "receipt_store_failed")
    assert run.error is not None
    assert run.error.code == "receipt_store_failed"
    assert texts(run.receipt.trace) == ["first"]


async def test_a_receipt_the_store_cannot_take_is_kept_for_the_next_start(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    body = f"""
hello(); run = take(); put(event(run))
while not os.path.exists({str(gate)!r}): time.sleep(0.01)
put(final(run)); end()
"""
    async with plane(backplane_home) as control:
        await go(control, order(root), mock_backend("memory"))
        async with control.start(order(root), script(tmp_path, body)) as run:
            async for _ in run:
                # Its database is taken away behind the open store's back: the commit fails, the journal does not.
                control.state_folder.store()._index._connection.execute("PRAGMA query_only = ON")
                gate.touch()
    assert run.error is not None
    assert ended(run) == ("store", "receipt_store_failed", "complete")
    with Store.open(backplane_home) as store:
        assert not store.has(run.id)
        store.recover()
        assert store.load(run.id).receipt_sha256 == run.receipt.receipt_sha256
        assert store.verify_all().findings == ()


async def test_a_store_that_is_removed_fails_the_run(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    body = "hello(); run = take(); put(event(run)); put(final(run)); end()"
    async with plane(backplane_home) as control:
        await go(control, order(root), mock_backend("memory"))
        async with control.start(order(root), script(tmp_path, body)) as run:
            async for _ in run:
                (backplane_home / FILE).unlink()
                break
            await run.wait()
    assert run.error is not None
    assert ended(run)[:2] == ("store", "receipt_store_failed")


def test_prune_removes_the_copy_that_a_killed_run_left(backplane_home: Path) -> None:
    run_id = stored(backplane_home, "b")
    kept = stored(backplane_home, "b")
    for name in (run_id, kept):
        (backplane_home / "stage" / name / "tree").mkdir(parents=True)
        (backplane_home / "stage" / name / KEPT).touch()
    with Store.open(backplane_home) as store:
        assert store.prune(1) == 1
    assert [path.name for path in (backplane_home / "stage").iterdir()] == [kept]


async def test_a_home_that_cannot_be_written_refuses_every_run(root: Path, tmp_path: Path) -> None:
    home = tmp_path / "file"
    home.write_text("not a folder")
    async with plane(home) as control, control.start(order(root), mock_backend("memory")) as run:
        async for _ in run:
            pytest.fail("nothing may run")
    assert ended(run)[:2] == ("store", "receipt_store_failed")


# Memory ---------------------------------------------------------------------------------------------------------------


def test_an_end_says_only_what_it_knows() -> None:
    assert End(reason="complete").to_wire() == {"reason": "complete"}
    assert End(reason="host_exit", code="backend_crashed", signal=9).to_wire() == {
        "reason": "host_exit",
        "code": "backend_crashed",
        "signal": 9,
    }
