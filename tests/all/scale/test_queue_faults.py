"""The failure test of the queue, on SQLite and on a real Postgres.

Workers are killed and stopped, the database is away, orders are submitted twice and cancelled.
Kills stop after a while, and then every order must end with its one receipt. `xtask.py faults --long` is the full size;
`BACKPLANE_SCALE_ROUNDS` is how often.
"""

from __future__ import annotations

import os
import pwd
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

pytest.importorskip("dbos")

from backplane.receipts.store import Store
from backplane.scale.durable import notes_of
from backplane.scale.engine import LOST_MAX, Job, OrderResult
from backplane.scale.orders import keep
from tests.queues import Queue, a_queue, check_events, events_of, result_of, until

BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
LONG = os.environ.get("BACKPLANE_FAULTS") == "long"
ROUNDS = int(os.environ.get("BACKPLANE_SCALE_ROUNDS", "20" if LONG else "1"))
SLOW = float(os.environ.get("BACKPLANE_SCALE_SLOW", "1"))
"""How much slower than two quiet cores this machine is: lease, kills and bounds are so much longer."""
ORDERS, RUN_S, KILLS_S = (20, 10.0, 60.0 * SLOW) if LONG else (6, 2.0 * SLOW, 5.0 * SLOW)
LEASE_S = (8.0 if LONG else 5.0) * SLOW
KILL_EVERY_S = (4.0 if LONG else 2.5) * SLOW
BEGIN_S_MAX = 10.0 * SLOW
"""For a worker and a host to be there."""
AWAY_S = 5.0 if LONG else 3.0
"""How long the database cannot be reached."""
FENCED_S_MAX = 2.0
LEFT_S_MAX = 10.0
ROUND_S_MAX = (400 if LONG else 150) * SLOW
TASK = "for i in $(seq {steps}); do echo $$ $(date +%s%N) >> {marks}; sleep 0.2; done"


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
        words += ["-c", "max_connections=500"]  # The default of 100 is too little for ten workers.
        with (self.folder / "log").open("ab") as log:
            self.server = subprocess.Popen([str(BINARIES[-1]), *words], stdout=log, stderr=log, **self._as())

        def answers() -> bool:
            done = subprocess.run(
                [str(BINARIES[-1].with_name("pg_isready")), "-h", "127.0.0.1", "-p", str(self.port)],
                capture_output=True, check=False,
            )  # fmt: skip
            return done.returncode == 0

        until(answers)

    def stop(self, number: int = signal.SIGINT) -> None:
        if self.server is not None:
            self.server.send_signal(number)  # Clients are cut off at once, as by a crash.
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


@contextmanager
def _away(queue: Queue, server: Postgres | None) -> Iterator[None]:
    """The database cannot be reached: the server is killed, the file is locked."""
    if server is not None:
        server.stop(signal.SIGQUIT)  # At once, to recover from its log at the next start.
        yield
        server.start()
        return
    lock = sqlite3.connect(
        queue.url.removeprefix("sqlite:///"), timeout=60, isolation_level=None, check_same_thread=False
    )
    try:
        lock.execute("BEGIN EXCLUSIVE")
        yield
    finally:
        lock.close()


@pytest.mark.timeout(ROUNDS * ROUND_S_MAX)
@pytest.mark.parametrize("rule", ["rerun", "fail"] if LONG else ["either"])
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_every_order_has_one_receipt_whatever_happens(database: str, rule: str, tmp_path: Path) -> None:
    if database == "postgres" and not BINARIES:
        pytest.skip("no Postgres in /usr/lib/postgresql")
    for number in range(1 if rule == "fail" else ROUNDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        if database == "sqlite":
            with a_queue(folder, lease_s=LEASE_S) as queue:
                anyio.run(_Round(queue, 2, None, rule, number).play)
        else:
            with postgres() as server, a_queue(folder, server.url, LEASE_S) as queue:
                anyio.run(_Round(queue, 3, server, rule, number).play)


class _Round:
    """One round: its orders, its workers and what has been done to them."""

    def __init__(self, queue: Queue, workers: int, server: Postgres | None, rule: str, seed: int) -> None:
        self.queue, self.server = queue, server
        self.rules = ["rerun", "fail"] * (ORDERS // 2) if rule == "either" else [rule] * ORDERS
        self.chance = random.Random(seed)
        self.alive: list[subprocess.Popen[bytes]] = []
        self.count = workers
        self.marks = queue.folder / "marks"
        self.marks.mkdir()
        self.faulted_at = 0.0
        self.ended: dict[str, OrderResult] = {}
        self.longest_s = 0.0
        """From the last fault to an order's receipt."""
        steps = int(RUN_S / 0.2)
        self.jobs = [
            queue.job(TASK.format(steps=steps, marks=self.marks / str(number)), on_lost_worker=self.rules[number])
            for number in range(ORDERS)
        ]
        self.cancelled: set[str] = set()

    async def play(self) -> None:
        queue, jobs = self.queue, self.jobs
        for job in jobs:
            assert queue.engine.submit(job)
        await self._cancel(jobs[-1])  # Nobody has taken it yet.
        for _ in range(self.count):
            self.alive.append(self._worker())
        async with anyio.create_task_group() as tasks:
            for place, job in enumerate(jobs):
                tasks.start_soon(self._watch, place, job)
            tasks.start_soon(self._supervise)
            await anyio.to_thread.run_sync(until, lambda: any(self.marks.iterdir()), 6 * BEGIN_S_MAX)
            await self._cancel(jobs[-2])  # It runs, or is about to.
            await self._faults()
        await self._check()
        logs = "".join(path.read_text() for path in queue.folder.glob("*.log"))
        assert "Traceback" not in logs, logs
        assert any(len(result.attempts) > 1 for result in self.ended.values()), "no fault has hit an order"
        outcomes = Counter(len(result.attempts) for result in self.ended.values())
        print(f"\nattempts an order: {dict(sorted(outcomes.items()))}; longest after a fault {self.longest_s:.1f} s")

    async def _faults(self) -> None:
        """All that is done to them, ended by `faulted_at`."""
        queue, jobs = self.queue, self.jobs
        stopped = self.alive[await self._victim()]
        stopped.send_signal(signal.SIGSTOP)
        self.alive[self.alive.index(stopped)] = self._worker()
        woken_at = time.monotonic() + 3 * LEASE_S
        ends = time.monotonic() + KILLS_S
        for job in jobs[:2]:
            assert not queue.engine.submit(job)
        while time.monotonic() < ends:
            await self._kill()
            await anyio.sleep(KILL_EVERY_S)
        await self._kill()
        await self._cancel(jobs[-3])  # Its worker may just have been killed.
        opened = _away(queue, self.server)
        await anyio.to_thread.run_sync(opened.__enter__)
        async with anyio.create_task_group() as tasks:
            for job in jobs[2:5]:
                tasks.start_soon(self._submit_again, job)
            await anyio.sleep(AWAY_S)
            await anyio.to_thread.run_sync(opened.__exit__, None, None, None)
        self.faulted_at = time.monotonic()
        await anyio.sleep(max(woken_at - time.monotonic(), 0))
        if stopped.poll() is None:
            stopped.send_signal(signal.SIGCONT)
        assert await anyio.to_thread.run_sync(stopped.wait, 2 * LEASE_S) == -signal.SIGKILL

    async def _submit_again(self, job: Job) -> None:
        assert not await anyio.to_thread.run_sync(self.queue.engine.submit, job)

    async def _cancel(self, job: Job) -> None:
        self.cancelled.add(job.order.id)
        await anyio.to_thread.run_sync(self.queue.engine.cancel, job.order.id, "not needed")

    def _worker(self) -> subprocess.Popen[bytes]:
        return self.queue.worker("--slots", str(-(-ORDERS // self.count)), BACKPLANE_ISOLATION="off")

    async def _victim(self) -> int:
        """The place of a worker, of one that runs orders where there is one."""
        names = [str(status.worker) for status in self.queue.engine.list(state="running")]
        busy = [place for place, worker in enumerate(self.alive) if any(f"-{worker.pid}-" in name for name in names)]
        return self.chance.choice(busy or range(self.count))

    async def _kill(self) -> None:
        place = await self._victim()
        self.alive[place].kill()
        self.alive[place] = self._worker()

    async def _supervise(self) -> None:
        """Start anew what ended by itself, as a service manager does."""
        while len(self.ended) < ORDERS:
            await anyio.sleep(0.5)
            for place, worker in enumerate(self.alive):
                if worker.poll() is not None:
                    self.alive[place] = self._worker()

    async def _watch(self, place: int, job: Job) -> None:
        """Wait for an order's end; its children are gone soon after."""
        result = await result_of(self.queue.engine, job.order.id, ROUND_S_MAX)
        now = time.monotonic()
        if self.faulted_at:
            self.longest_s = max(self.longest_s, now - self.faulted_at)
        self.ended[job.order.id] = result
        mark = f"{self.marks / str(place)};".encode()
        while left := await anyio.to_thread.run_sync(_processes, mark):
            assert time.monotonic() < now + LEFT_S_MAX, left
            await anyio.sleep(0.5)

    async def _check(self) -> None:
        queue = self.queue
        run_s = max(RUN_S, *(_longest_s(path) for path in self.marks.iterdir()))
        assert self.longest_s <= 1.25 * LEASE_S + 2 * run_s + BEGIN_S_MAX, run_s
        for state in ("running", "waiting", "broken"):
            assert not queue.engine.list(state=state)
        assert {job.order.id for job in self.jobs} == {status.order_id for status in queue.engine.list()}
        for place, job in enumerate(self.jobs):
            await self._check_order(place, job)
        with Store.open(queue.home) as store:
            assert len(store.rows(2 * ORDERS)) == ORDERS
            assert not store.verify_all().findings

    async def _check_order(self, place: int, job: Job) -> None:
        result = self.ended[job.order.id]
        row = await anyio.to_thread.run_sync(keep, self.queue.home, job, result, self.queue.content)
        with Store.open(self.queue.home) as store:
            receipt = store.load(row.run_id)
        events = events_of(self.queue.engine, job.order.id)
        assert len([event for event in events if event.attempt == row.run_id]) == row.trace_count
        if row.trace_count:
            check_events(events, result.attempts[-1])
        lost = list(result.attempts[:-1])
        assert receipt.backplane["queue"]["lost"] == lost
        if receipt.backplane.get("cancel_reason"):
            assert job.order.id in self.cancelled
        elif receipt.outcome != "complete":
            assert receipt.backplane["error"]["code"] == "backend_crashed", receipt.backplane
            assert "lost worker" in receipt.backplane["error"]["message"]
            assert len(lost) >= (1 if self.rules[place] == "fail" else LOST_MAX)
        elif self.rules[place] == "fail":
            assert not lost
        _check_lines(self.queue.engine, job.order.id, self.marks / str(place))


def _check_lines(engine: Any, order: str, path: Path) -> None:
    """No attempt has written a line once it was lost, but for a moment."""
    lines = [row.split() for row in path.read_text().splitlines()] if path.exists() else []
    ends = [lost.at_ms / 1000 for lost in notes_of(engine.row(order)).void]
    first: dict[str, float] = {}
    for who, when in lines:
        first.setdefault(who, int(when) / 1e9)
    for who, when in lines:
        place = sum(end <= first[who] for end in ends)
        if place < len(ends):
            assert int(when) / 1e9 <= ends[place] + FENCED_S_MAX, path


def _longest_s(path: Path) -> float:
    """How long the longest of an order's attempts has written lines: a run takes longer where the machine is busy."""
    times: dict[str, list[int]] = {}
    for who, when in map(str.split, path.read_text().splitlines()):
        times.setdefault(who, []).append(int(when))
    return max(max(found) - min(found) for found in times.values()) / 1e9


def _processes(mark: bytes) -> list[str]:
    """Command lines of processes that name this mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes()
            if mark in words:
                found.append(words.decode(errors="replace"))
    return found
