"""Many orders over three workers: every receipt verifies, one chain a worker, and nothing grows with their number.

`BACKPLANE_SCALE_ORDERS=1000` is the full size; without it as many as a test may take.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import pytest
import sqlalchemy as sa

pytest.importorskip("dbos")

from backplane.receipts.store import Store
from backplane.scale.engine import Job
from backplane.scale.orders import keep
from tests.test_scale import Queue, a_queue, until
from tests.test_scale_faults import BINARIES, postgres

ORDERS = int(os.environ.get("BACKPLANE_SCALE_ORDERS", "30"))
KEPT = 20
"""Ended orders that are not pruned: more than are ever in the queue, or one is gone before its result was read."""
FIRST = max(ORDERS // 5, KEPT)
"""Orders after which the first measure is taken: by then everything is loaded, and the tables hold all they may."""
AT_ONCE = 12
"""Orders in the queue at a time."""
GROWTH_MAX = 1.05


class Measure(msgspec.Struct, frozen=True):
    """What the workers hold, and the rows of the queue's database."""

    rss_kib: int
    private_kib: int
    """Without what is mapped from files, as of libraries that are touched for the first time."""
    descriptors: int
    rows: int


def _measure(queue: Queue) -> Measure:
    rss = private = descriptors = 0
    for worker in queue.workers:
        sizes = Path(f"/proc/{worker.pid}/smaps_rollup").read_text()
        rss += int(sizes.split("\nRss:")[1].split()[0])
        private += int(sizes.split("\nPrivate_Dirty:")[1].split()[0])
        descriptors += len(os.listdir(f"/proc/{worker.pid}/fd"))
    return Measure(rss, private, descriptors, _rows(queue.url))


def _rows(url: str) -> int:
    """Rows of all tables of the queue, the engine's and ours."""
    engine = sa.create_engine(url)
    try:
        looked = sa.inspect(engine)
        with engine.connect() as connection:
            return sum(
                connection.execute(sa.text(f'SELECT count(*) FROM {schema}."{table}"')).scalar() or 0
                for schema in ("main", "dbos", "public")
                if schema in looked.get_schema_names()
                for table in looked.get_table_names(schema=schema)
            )
    finally:
        engine.dispose()


@pytest.mark.timeout(200 + 8 * ORDERS)
@pytest.mark.skipif(not BINARIES, reason="no Postgres in /usr/lib/postgresql")
def test_many_orders_leave_one_chain_a_worker_and_nothing_that_grows(tmp_path: Path) -> None:
    with postgres() as server, a_queue(tmp_path, server.url) as queue:
        for _ in range(3):
            queue.worker("--slots", "2", "--lease", "60")  # The machine may be busy: a lost worker is another test.
        began = time.monotonic()
        first, *between, last = anyio.run(_load, queue)
        took_s = time.monotonic() - began
        print(f"\n{ORDERS} orders in {took_s:.0f} s, {ORDERS / took_s:.2f} a second; after each {FIRST}:")
        for measure in (first, *between, last):
            print(measure)
        _check_chains(queue)
    if ORDERS >= 1000:
        assert last.rss_kib <= GROWTH_MAX * first.rss_kib
    assert last.descriptors <= GROWTH_MAX * first.descriptors
    assert last.rows <= GROWTH_MAX * first.rows


async def _load(queue: Queue) -> Sequence[Measure]:
    """Run all orders; what is measured after each `FIRST` of them, and at the end."""
    measures: list[Measure] = []
    waiting: list[Job] = []
    ended = 0
    with Store.open(queue.home) as store:
        for number in range(ORDERS):
            job = queue.job(f"echo {number} > new; sed -i 's/-/+/' calc.py")
            assert await queue.engine.submit(job)
            waiting.append(job)
            while len(waiting) >= AT_ONCE or (waiting and number == ORDERS - 1):
                await _keep(queue, store, waiting.pop(0))
                ended += 1
                if ended % KEPT == 0:
                    await queue.engine.prune(KEPT)
                if ended % FIRST == 0 or ended == ORDERS:
                    measures.append(await anyio.to_thread.run_sync(_measured_quiet, queue))
        findings = store.verify_all().findings
        assert not findings, findings
        assert len(store.list(ORDERS + 1)) == ORDERS
    return measures


async def _keep(queue: Queue, store: Store, job: Job) -> None:
    result = await queue.engine.result(job.order.id, timeout_s=300)
    row = await anyio.to_thread.run_sync(keep, store, job.order.id, result, queue.content)
    assert row.outcome == "complete", store.load(row.run_id).backplane


def _measured_quiet(queue: Queue) -> Measure:
    """Measure once nothing is at work, and only the newest ended orders are in the tables."""

    def quiet() -> bool:
        async def states() -> Sequence[object]:
            return [*await queue.engine.list(state="running"), *await queue.engine.list(state="waiting")]

        return not anyio.run(states)

    until(quiet, 300.0)
    anyio.run(queue.engine.prune, KEPT)
    time.sleep(2)
    return _measure(queue)


def _check_chains(queue: Queue) -> None:
    """Each worker's own store is one whole chain, and together they have run each order once."""
    count = 0
    for number in range(len(queue.workers)):
        with Store.open(queue.folder / f"worker{number}", readonly=True) as store:
            found = store.verify_all()
            assert not found.findings, found
            count += len(store.list(ORDERS + 1))
    assert count == ORDERS
