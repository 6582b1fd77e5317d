"""The failure test of the queue, on SQLite and on a real Postgres: workers killed and stopped, the database away.

One round of 2-second orders; kills stop after a while, and then every order must have ended with its one receipt.
"""

from __future__ import annotations

import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

pytest.importorskip("dbos")

from backplane.receipts import Store
from backplane.scale.engine import Event
from backplane.scale.orders import keep
from tests.test_scale import LEASE_S, Queue, a_queue, check_events, until

BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
ORDERS = 8
TASK = "for i in $(seq 10); do echo $$ >> {marks}; sleep 0.2; done"


class Postgres:
    """A server of the test's own: its folder, its socket, a free port, an ordinary user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.user = pwd.getpwnam("nobody") if os.getuid() == 0 else pwd.getpwuid(os.getuid())
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"postgresql://work@127.0.0.1:{self.port}/postgres"
        os.chown(folder, self.user.pw_uid, self.user.pw_gid)
        words = ["-D", str(folder / "data"), "-U", "work", "--auth=trust", "--no-sync"]
        subprocess.run([str(BINARIES[-1].with_name("initdb")), *words], check=True, capture_output=True, **self._as())
        self.server: subprocess.Popen[bytes] | None = None

    def _as(self) -> dict[str, Any]:
        own: dict[str, Any] = (
            {"user": self.user.pw_uid, "group": self.user.pw_gid, "extra_groups": []} if os.getuid() == 0 else {}
        )
        return {"cwd": self.folder, "env": {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}, **own}

    def start(self) -> None:
        words = ["-D", str(self.folder / "data"), "-p", str(self.port), "-k", str(self.folder), "-h", "127.0.0.1"]
        with (self.folder / "log").open("ab") as log:
            self.server = subprocess.Popen([str(BINARIES[-1]), *words], stdout=log, stderr=log, **self._as())

        def answers() -> bool:
            done = subprocess.run(
                [str(BINARIES[-1].with_name("pg_isready")), "-h", "127.0.0.1", "-p", str(self.port)],
                capture_output=True, check=False,
            )  # fmt: skip
            return done.returncode == 0

        until(answers)

    def stop(self) -> None:
        if self.server is not None:
            self.server.send_signal(signal.SIGINT)  # Clients are cut off at once, as by a crash.
            self.server.wait(20)
            self.server = None


@contextmanager
def postgres() -> Iterator[Postgres]:
    folder = Path(tempfile.mkdtemp(prefix="backplane-pg-"))
    server = Postgres(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_every_order_has_one_receipt_whatever_happens_to_workers_sqlite(tmp_path: Path) -> None:
    with a_queue(tmp_path) as queue:
        anyio.run(_round, queue, 2, None)


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.skipif(not BINARIES, reason="no Postgres in /usr/lib/postgresql")
def test_every_order_has_one_receipt_whatever_happens_to_workers_postgres(tmp_path: Path) -> None:
    with postgres() as server, a_queue(tmp_path, server.url) as queue:
        anyio.run(_round, queue, 3, server)


async def _round(queue: Queue, workers: int, server: Postgres | None) -> None:
    marks, chance = queue.folder / "marks", random.Random(1)
    marks.mkdir()
    jobs = [queue.job(TASK.format(marks=marks / f"{number}"), on_lost_worker="rerun") for number in range(ORDERS)]
    for job in jobs:
        assert await queue.engine.submit(job)
    alive = [queue.worker("--slots", "2", BACKPLANE_ISOLATION="off") for _ in range(workers)]
    await queue.engine.cancel(jobs[-1].order.id, "queued")
    heard: dict[str, list[Event]] = {job.order.id: [] for job in jobs}
    async with anyio.create_task_group() as tasks:
        for job in jobs[:2]:
            tasks.start_soon(_follow, queue, job.order.id, heard[job.order.id])
        await anyio.to_thread.run_sync(until, lambda: any(marks.iterdir()))
        for _ in range(2):
            await _replace(queue, alive, chance.randrange(workers), signal.SIGKILL)
            await anyio.sleep(2)
        await queue.engine.cancel(jobs[-2].order.id, "while its worker may be dead")
        if server is not None:
            await anyio.to_thread.run_sync(server.stop)
            await anyio.sleep(2)
            await anyio.to_thread.run_sync(server.start)
        await _replace(queue, alive, chance.randrange(workers), signal.SIGSTOP)
        for job in jobs[:5]:
            assert not await queue.engine.submit(job)
        for job in jobs:
            await _check(queue, job.order.id, heard[job.order.id])
    for order_id, events in heard.items():
        if events:
            assert events == [event async for event in queue.engine.events(order_id)]
    assert not await queue.engine.list(state="running")
    assert not await queue.engine.list(state="waiting")
    assert not await queue.engine.list(state="broken")
    assert {job.order.id for job in jobs} == {status.order_id for status in await queue.engine.list()}
    _check_nothing_writes(marks)
    logs = "".join(path.read_text() for path in queue.folder.glob("worker*.log"))
    assert "Traceback" not in logs


async def _replace(queue: Queue, alive: list[subprocess.Popen[bytes]], place: int, number: int) -> None:
    alive[place].send_signal(number)
    alive[place] = queue.worker("--slots", "2", BACKPLANE_ISOLATION="off")


async def _follow(queue: Queue, order_id: str, heard: list[Event]) -> None:
    """Follow an order, cut off after every fourth event and gone on with behind it."""
    cursor, ended = 0, False
    while not ended:
        ended, count = True, 0
        with suppress(ConnectionError):
            async for event in queue.engine.events(order_id, after=cursor):
                heard.append(event)
                cursor, count = event.cursor, count + 1
                if count == 4:
                    ended = False
                    break


async def _check(queue: Queue, order_id: str, heard: list[Event]) -> None:
    result = await queue.engine.result(order_id, timeout_s=10 * LEASE_S + 20)
    with Store.open(queue.home) as store:
        row = await anyio.to_thread.run_sync(keep, store, order_id, result, queue.content)
        assert row.work_order_id == order_id
        assert len([one for one in store.list() if one.work_order_id == order_id]) == 1
        receipt = store.load(row.run_id)
        events = [event async for event in queue.engine.events(order_id)]
        if receipt.backplane.get("cancel_reason"):
            return
        assert receipt.outcome == "complete", receipt.backplane
        check_events(events, result.attempts[-1])
        assert len([event for event in events if event.attempt == row.run_id]) == row.trace_count
        assert heard == events[: len(heard)]


def _check_nothing_writes(marks: Path) -> None:
    time.sleep(0.5)
    before = {path: path.stat().st_size for path in marks.iterdir()}
    time.sleep(1)
    assert before == {path: path.stat().st_size for path in marks.iterdir()}
