"""What the durable engine holds for all workers together: slots, limits, priorities, the budget; and a whole order."""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from backplane.config import Settings
from backplane.contract.approval import Decision
from backplane.contract.work import RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.errors import BackplaneError, ConfigError
from backplane.receipts.memory import find
from backplane.receipts.store import Store
from backplane.runtime.plane import ControlPlane
from backplane.scale.content import Contents
from backplane.scale.engine import Attempt, Control, Emit, Job, OrderResult, QueueLimits, Share
from backplane.scale.orders import Packer, keep, make_job
from backplane.scale.runner import Runner
from backplane.workspace import Quota

pytest.importorskip("dbos")
from backplane.scale import durable
from backplane.scale.durable import DEFERRED, DurableEngine, answers_of, notes_of
from backplane.scale.ledger import Ledger
from backplane.scale.worker import serve
from tests.all.scale.test_queue_faults import BINARIES, postgres
from tests.queues import check_events, events_of, needs_queue, result_of

RESULT_S_MAX = 100
WAIT_S_MAX = 30.0
"""For as many orders as may to be at work at once."""
LEASE_S = 300.0
"""A worker in this process must not be taken for dead: its watchdog would kill the tests."""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[DurableEngine]:
    needs_queue()
    opened = DurableEngine(f"sqlite:///{tmp_path / 'queue.sqlite'}", lease_s=LEASE_S, beat_s=0.2, poll_s=0.1)
    yield opened
    opened.close()


def test_a_sqlite_that_knows_no_milliseconds_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "SQLITE_MIN", (99,))
    with pytest.raises(ConfigError, match=r"needs SQLite 3\.42 or newer with this Python, which has 3\.") as told:
        DurableEngine(f"sqlite:///{tmp_path / 'queue.sqlite'}")
    assert told.value.code == "config_invalid"
    assert not list(tmp_path.iterdir())


class Runs:
    """A run function that notes when each order began and how many were at work."""

    def __init__(self, together: int = 1, cost_usd_micros: int | None = None) -> None:
        self.together, self.cost = together, cost_usd_micros
        self.begun: list[tuple[str, float]] = []
        self.denied: list[str] = []
        self.most = self._now = 0

    async def __call__(self, job: Job, attempt: Attempt, emit: Emit, control: Control) -> OrderResult:
        if attempt.share.denied is not None:
            self.denied.append(attempt.share.denied)
            return OrderResult(attempt.all, "denied", cost_usd_micros=0)
        self.begun.append((job.order.task, time.monotonic()))
        self._now += 1
        self.most = max(self.most, self._now)
        with anyio.move_on_after(WAIT_S_MAX):
            while self.most < self.together:
                await anyio.sleep(0.05)
        await anyio.sleep(0.5 if self.together > 1 else 0)  # One more would begin now.
        self._now -= 1
        return OrderResult(attempt.all, job.order.task, cost_usd_micros=self.cost)


async def play(engine: DurableEngine, runs: Runs, jobs: Sequence[Job], slots: int) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: serve(engine, runs, slots=slots))
        for job in jobs:
            await result_of(engine, job.order.id, RESULT_S_MAX)
        tasks.cancel_scope.cancel()


async def submitted(engine: DurableEngine, count: int, usd: float | None = None) -> Sequence[Job]:
    jobs = [Job(WorkOrder(str(number), config=RuntimeConfig(max_budget_usd=usd)), "rerun") for number in range(count)]
    for job in jobs:
        assert engine.submit(job)
    return jobs


async def _echo(job: Job, attempt: Attempt, emit: Emit, control: Control) -> OrderResult:
    await emit([b'{"n":1}', b'{"n":2}'])
    return OrderResult(attempt.all, receipt=job.order.task)


def test_an_order_submitted_twice_is_run_once(engine: DurableEngine) -> None:
    async def main() -> None:
        job = Job(WorkOrder("a task"), "rerun")
        assert [engine.submit(job), engine.submit(job)] == [True, False]
        with pytest.raises(BackplaneError, match="another order has the id"):
            engine.submit(Job(WorkOrder("another", id=job.order.id), "rerun"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: serve(engine, _echo, slots=2))
            result = await result_of(engine, job.order.id, RESULT_S_MAX)
            events = events_of(engine, job.order.id)
            tasks.cancel_scope.cancel()
        assert result.receipt == "a task"
        check_events(events, result.attempts[-1])
        assert [event.seq for event in events] == [1, 2]

    anyio.run(main)


def test_a_worker_runs_as_many_orders_at_once_as_it_has_slots(engine: DurableEngine) -> None:
    runs = Runs(3)

    async def main() -> None:
        await play(engine, runs, await submitted(engine, 6), 3)

    anyio.run(main)
    assert runs.most == 3


def test_the_concurrency_of_a_label_holds_over_the_slots(engine: DurableEngine) -> None:
    runs = Runs(2)

    async def main() -> QueueLimits:
        engine.set_limits(QueueLimits(label="default", concurrency=2))
        await play(engine, runs, await submitted(engine, 5), 4)
        return engine.limits("default")

    assert anyio.run(main) == QueueLimits(label="default", concurrency=2)
    assert runs.most == 2


def test_the_rate_of_a_label_is_held(engine: DurableEngine) -> None:
    async def main() -> Sequence[Job]:
        engine.set_limits(QueueLimits(label="default", rate_orders=2, rate_ms=1000))
        jobs = await submitted(engine, 5)
        await play(engine, Runs(), jobs, 4)
        return jobs

    times = sorted(engine.row(job.order.id).dequeued_at for job in anyio.run(main))
    assert times[4] - times[0] >= 2 * 1000


def test_a_lower_priority_goes_first(engine: DurableEngine) -> None:
    runs = Runs()

    async def main() -> None:
        jobs = [Job(WorkOrder(str(priority)), "rerun") for priority in (9, 3, 7, 1, 5)]
        for job in jobs:
            engine.submit(job, priority=int(job.order.task))
        await play(engine, runs, jobs, 1)

    anyio.run(main)
    assert [task for task, _ in runs.begun] == ["1", "3", "5", "7", "9"]


def test_the_budget_of_the_queue_is_reserved_settled_and_held(engine: DurableEngine) -> None:
    runs = Runs(cost_usd_micros=300_000)

    async def main() -> None:
        engine.ledger.set_budget(1_000_000)
        await play(engine, runs, await submitted(engine, 5, 0.4), 1)
        assert engine.ledger.budget() == (1_000_000, 900_000)
        assert engine.prune(0) == 5
        assert engine.ledger.budget() == (1_000_000, 900_000)
        assert not engine.list()

    anyio.run(main)
    assert len(runs.begun) == 3
    assert [("$0.400000" in one, "$0.100000" in one) for one in runs.denied] == [(True, True)] * 2


@pytest.mark.parametrize("limit", [None, 300_000])
def test_an_order_that_was_cancelled_before_it_began_keeps_no_share(engine: DurableEngine, limit: int | None) -> None:
    async def main() -> None:
        engine.ledger.set_budget(limit)
        jobs = await submitted(engine, 3, 0.4)
        for job in jobs:
            engine.cancel(job.order.id)
        await play(engine, Runs(cost_usd_micros=0), jobs, 1)
        assert engine.ledger.budget() == (limit, 0)

    anyio.run(main)


def test_without_a_limit_what_orders_cost_is_counted_all_the_same(engine: DurableEngine) -> None:
    async def main() -> None:
        await play(engine, Runs(cost_usd_micros=7), await submitted(engine, 2), 2)
        assert engine.ledger.budget() == (None, 14)

    anyio.run(main)


# An order that comes back ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def a_worker(engine: DurableEngine, home: Path, content: Contents) -> AsyncIterator[None]:
    plane = ControlPlane(Settings(isolation="off"), home, dict(os.environ))
    async with plane, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: serve(engine, Runner(plane, content), slots=1))
        yield
        tasks.cancel_scope.cancel()


def test_an_order_with_contents_at_a_url_comes_back_with_its_events_and_patch(
    engine: DurableEngine, tmp_path: Path
) -> None:
    home, root, content = tmp_path / "home", tmp_path / "root", Contents(f"local://{tmp_path}/content")
    root.mkdir()
    order = WorkOrder("echo x > new", workspace=WorkspaceSpec(root=str(root)))
    job = make_job(order, Packer(content, home, Quota(bytes_max=1 << 20, files_max=10)), backend="shell")

    async def main() -> None:
        engine.submit(job)
        async with a_worker(engine, tmp_path / "worker", content):
            result = await result_of(engine, job.order.id)
        row = keep(home, job, result, content, str(root))
        seen = [event.attempt for event in events_of(engine, job.order.id)]
        with Store.open(home) as store:
            run = find(store, "last")
            assert (run.state, run.task, run.backend, run.queued) == ("ended", order.task, "shell", order.id)
            assert run.root == str(root)
            assert (row.outcome, row.trace_count, set(seen)) == ("complete", len(seen), {row.run_id})
            assert store.patch(row) is not None
            assert not store.verify_all().findings

    anyio.run(main)


# The tables, on both databases ----------------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'ledger.sqlite'}"
        return
    if not BINARIES:
        pytest.skip("no Postgres in /usr/lib/postgresql")
    with postgres() as server:
        yield server.url


def test_the_ledger_reserves_shares_of_the_budget_for_live_workers(url: str) -> None:
    ledger = Ledger(url)
    ledger.prepare()
    ledger.enter("w", "default", 1)
    assert ledger.begin("w", 400_000) == Share(400_000)
    ledger.settle(400_000, 0)
    assert ledger.begin("unknown") is None
    ledger.set_budget(1_000_000)
    assert ledger.begin("w", 400_000) == Share(400_000)
    ledger.settle(400_000, 300_000)
    denied = ledger.begin("w", 800_000)
    assert denied is not None
    assert {"$0.800000", "$0.700000"} <= set(re.split("[ ,]", str(denied.denied)))
    assert ledger.budget() == (1_000_000, 300_000)
    assert ledger.beat("w")
    assert not ledger.beat("unknown")
    ledger.close()


@pytest.mark.anyio
async def test_a_lost_attempt_a_cancel_and_an_answer_are_notes_of_the_order(url: str) -> None:
    engine = DurableEngine(url, lease_s=0.0)
    job = Job(WorkOrder("t"), "rerun")
    engine.submit(job)
    id = job.order.id
    assert engine.cancel(id, "why")
    assert engine.cancel(id, "another reason")
    assert engine.answer(id, "a", "ask-1", Decision("allow"))
    assert not engine.answer(id, "a", "ask-1", Decision("deny"))
    row = engine.row(id)
    assert (notes_of(row).cancelled, list(answers_of(row, "a"))) == ("why", ["ask-1"])
    assert not answers_of(row, "b")
    engine.move(id, "default", DEFERRED)
    assert [one.state for one in engine.list(label="default")] == ["waiting"]
    engine.move(id, "default")
    assert engine.row(id).queue_name == "backplane.default"
    engine.close()
