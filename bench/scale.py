"""Orders a second and idle cost of the queue beside those of the bare engine, on a SQLite file and on Postgres.

`xtask.py bench scale [ORDERS]`: both do the same in turn, one worker process, eight slots, a workflow of one step that
does nothing; then the queue again with the shell backend. `bench scale workers 5 10 20`: many workers on one Postgres.
Seconds of CPU are the steadier measure on a busy machine.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
import sqlalchemy as sa

from backplane.contract.work import WorkOrder
from backplane.scale.engine import Attempt, Control, Emit, Job, OrderResult

ROOT: Final = Path(__file__).resolve().parent.parent
SLOTS: Final = 8
POLL_S: Final = 0.05
"""Short, so that what is measured is the work and not the wait for the next look."""
IDLE_S: Final = 15.0
ORDERS_EACH: Final = 40
"""Orders a worker, with `workers`: five times its slots."""
IDLE_POLL_S: Final = 1.0
"""The default, by which the idle cost is judged."""
TURNS: Final = 3
LEASE_S: Final = 300.0
END_S_MAX: Final = 600.0


class Figures(msgspec.Struct, frozen=True):
    """Of one worker process."""

    wall_s: float
    cpu_s: float
    transactions: int | None = None
    """Of the database in this time, where it counts them."""


def main(words: Sequence[str]) -> int:
    """Print the table; with `part …` be one of its processes."""
    if words and words[0] == "part":
        print(msgspec.json.encode(PARTS[words[1]](words[2], int(words[3]))).decode())
        return 0
    if words and words[0] == "workers":
        return _workers([int(word) for word in words[1:]])
    count = int(words[0]) if words else 300
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {count} orders, {SLOTS} slots, median of {TURNS}")
    for name, opened in (("SQLite", _sqlite), ("Postgres", _postgres)):
        with opened() as urls:
            if urls is not None:
                _table(name, urls, count)
    return 0


def _table(name: str, urls: Iterator[str], count: int) -> None:
    found: dict[str, list[Figures]] = {"bare": [], "ours": []}
    for _ in range(TURNS):
        for kind, figures in found.items():
            figures.append(_part(kind, next(urls), count))
    bare, ours = (_median(figures) for figures in found.values())
    for kind, one in (("bare engine", bare), ("queue", ours)):
        print(
            f"{name:<9} {kind:<12} {count / one.wall_s:7.1f} orders/s  {1000 * one.cpu_s / count:6.2f} ms CPU an order"
        )
    print(f"{name:<9} on top       {100 * (ours.wall_s / bare.wall_s - 1):+7.1f} % time    "
          f"{100 * (ours.cpu_s / bare.cpu_s - 1):+7.1f} % CPU    (goal: +20 % at most)")  # fmt: skip
    few = max(count // 20, 1)
    shell = _part("shell", next(urls), few)
    print(f"{name:<9} shell        {few / shell.wall_s:7.2f} orders/s")
    for kind in ("idle-bare", "idle-ours"):
        idle = _part(kind, next(urls), 0)
        rate = "" if idle.transactions is None else f"{idle.transactions / idle.wall_s:5.1f} transactions/s"
        print(f"{name:<9} {kind:<12} {100 * idle.cpu_s / idle.wall_s:7.2f} % of a core  {rate}")


def _median(figures: Sequence[Figures]) -> Figures:
    return Figures(statistics.median(one.wall_s for one in figures), statistics.median(one.cpu_s for one in figures))


def _part(kind: str, url: str, count: int) -> Figures:
    words = [sys.executable, "-m", "bench.scale", "part", kind, url, str(count)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=END_S_MAX + 120, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Figures)


def _workers(counts: Sequence[int]) -> int:
    """What so many workers of one Postgres cost while idle, and how many orders that do nothing they run."""
    from backplane.scale.durable import DurableEngine

    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, poll {IDLE_POLL_S:g} s, defaults else")
    with _postgres() as urls:
        for count in counts if urls is not None else ():
            url = next(urls)  # type: ignore[arg-type]  # it is one here
            engine = DurableEngine(url)
            pids = [_forked_worker(url) for _ in range(count)]
            try:
                while len(engine.ledger.workers()) < count:
                    time.sleep(0.5)
                time.sleep(3)
                idle = _spent(pids), _transactions(url) or 0, time.monotonic()
                time.sleep(IDLE_S)
                idle_s = time.monotonic() - idle[2]
                core, rate = (_spent(pids) - idle[0]) / idle_s, ((_transactions(url) or 0) - idle[1]) / idle_s
                orders = ORDERS_EACH * count
                began = time.monotonic()
                _submit(engine, orders)
                _wait_for(url, orders)
                took_s = time.monotonic() - began
                connections = _number(url, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
                rss = sum(int(_status(pid, "VmRSS")) for pid in pids) / count / 1024
                print(
                    f"{count:3} workers: idle {100 * core / count:5.2f} % of a core and {rate / count:5.1f} "
                    f"transactions/s each ({rate:.0f} in all), {rss:.0f} MiB, {connections / count:.0f} connections; "
                    f"{orders / took_s:6.1f} orders/s, submitted by one"
                )
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                engine.close()
    return 0


def _forked_worker(url: str) -> int:
    """A worker in a process of its own, without loading everything again."""
    from backplane.scale.durable import DurableEngine
    from backplane.scale.worker import serve

    pid = os.fork()
    if pid == 0:
        anyio.run(lambda: serve(DurableEngine(url, lease_s=LEASE_S), _nothing, slots=SLOTS))
        os._exit(0)
    return pid


def _submit(engine: Any, count: int) -> None:
    for _ in range(count):
        engine.submit(Job(WorkOrder("a task"), "rerun"))


def _spent(pids: Sequence[int]) -> float:
    """Seconds of CPU of these processes so far."""
    ticks = 0
    for pid in pids:
        ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _status(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/status").read_text().split(f"{name}:")[1].split()[0]


@contextmanager
def _sqlite() -> Iterator[Iterator[str]]:
    """Files that keep a log of what is written, as the queue's do: without it the bare engine is slower."""

    def files(folder: str) -> Iterator[str]:
        for number in range(100):
            with closing(sqlite3.connect(f"{folder}/{number}.sqlite")) as file:
                file.execute("PRAGMA journal_mode = WAL")
            yield f"sqlite:///{folder}/{number}.sqlite"

    with tempfile.TemporaryDirectory(prefix="bench-scale-") as folder:
        yield files(folder)


@contextmanager
def _postgres() -> Iterator[Iterator[str] | None]:
    from tests.all.scale.test_queue_faults import BINARIES, postgres

    if not BINARIES:
        print("Postgres  not measured: none in /usr/lib/postgresql")
        yield None
        return
    with postgres() as server:

        def databases() -> Iterator[str]:
            made = sa.create_engine(server.url, isolation_level="AUTOCOMMIT")
            for number in range(100):
                with made.connect() as connection:
                    connection.execute(sa.text(f"CREATE DATABASE bench{number}"))
                yield f"{server.url.rpartition('/')[0]}/bench{number}"

        yield databases()


def _transactions(url: str) -> int | None:
    """Committed transactions of a Postgres database so far; None elsewhere."""
    select = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
    return _number(url, select) if url.startswith("postgresql") else None


def _number(url: str, select: str) -> int:
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        found = connection.execute(sa.text(select)).scalar()
    engine.dispose()
    return int(found or 0)


# The parts ------------------------------------------------------------------------------------------------------------


class _Clock:
    def __init__(self, url: str = "") -> None:
        self._url, self._before = url, _transactions(url)
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def figures(self) -> Figures:
        wall_s, cpu_s = time.monotonic() - self._wall, time.process_time() - self._cpu
        now = _transactions(self._url)
        return Figures(wall_s, cpu_s, None if now is None or self._before is None else now - self._before)


def _wait_for(url: str, count: int) -> None:
    """Wait until so many workflows have ended well."""
    engine = sa.create_engine(url)
    table = "workflow_status" if url.startswith("sqlite") else "dbos.workflow_status"
    ends = time.monotonic() + END_S_MAX
    with engine.connect() as connection:
        select = sa.text(f"SELECT count(*) FROM {table} WHERE status = 'SUCCESS'")
        while (connection.execute(select).scalar() or 0) < count:
            connection.rollback()
            if time.monotonic() > ends:
                raise TimeoutError(f"{count} orders have not ended in {END_S_MAX} s")
            time.sleep(0.1)
    engine.dispose()


def _bare_worker(url: str, poll_s: float) -> None:
    from dbos import DBOS, DBOSClient

    client = DBOSClient(system_database_url=url)  # Before the launch, as ours: else it sees the queue a second later.
    client.register_queue("orders", worker_concurrency=SLOTS, polling_interval_sec=poll_s)
    client.destroy()
    config: Any = {"name": "bare", "system_database_url": url, "log_level": "CRITICAL", "application_version": "1"}
    DBOS(config=config)

    async def nothing(text: str) -> str:
        return text

    async def order(text: str) -> str:
        return await DBOS.run_step_async({"name": "attempt"}, nothing, text)

    DBOS.workflow(name="order")(order)
    DBOS.launch()


def _bare(url: str, count: int) -> Figures:
    from dbos import DBOS, DBOSClient

    DBOS.migrate(url)
    client = DBOSClient(system_database_url=url)
    for number in range(count):
        client.enqueue({"workflow_name": "order", "queue_name": "orders", "workflow_id": str(number)}, "a task" * 40)
    client.destroy()
    clock = _Clock()
    _bare_worker(url, POLL_S)
    _wait_for(url, count)
    figures = clock.figures()
    DBOS.destroy()
    return figures


def _idle_bare(url: str, _count: int) -> Figures:
    from dbos import DBOS

    DBOS.migrate(url)
    _bare_worker(url, IDLE_POLL_S)
    time.sleep(4)
    clock = _Clock(url)
    time.sleep(IDLE_S)
    figures = clock.figures()
    DBOS.destroy()
    return figures


async def _nothing(job: Job, attempt: Attempt, emit: Emit, control: Control) -> OrderResult:
    return OrderResult(attempt.all, job.order.task)


def _ours(url: str, count: int) -> Figures:
    from backplane.scale.durable import DurableEngine
    from backplane.scale.worker import serve

    async def work() -> Figures:
        engine = DurableEngine(url, poll_s=POLL_S, lease_s=LEASE_S)
        for _ in range(count):
            engine.submit(Job(WorkOrder("a task"), "rerun"))
        async with anyio.create_task_group() as tasks:
            clock = _Clock()
            tasks.start_soon(lambda: serve(engine, _nothing, slots=SLOTS))
            await anyio.to_thread.run_sync(_wait_for, url, count)
            figures = clock.figures()
            tasks.cancel_scope.cancel()
        engine.close()
        return figures

    return anyio.run(work)


def _idle_ours(url: str, _count: int) -> Figures:
    from backplane.scale.durable import DurableEngine
    from backplane.scale.worker import serve

    async def work() -> Figures:
        engine = DurableEngine(url, poll_s=IDLE_POLL_S)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: serve(engine, _nothing, slots=SLOTS))
            await anyio.sleep(4)
            clock = await anyio.to_thread.run_sync(_Clock, url)
            await anyio.sleep(IDLE_S)
            figures = clock.figures()
            tasks.cancel_scope.cancel()
        engine.close()
        return figures

    return anyio.run(work)


def _shell(url: str, count: int) -> Figures:
    """The queue with real orders: each stages a workspace, starts a host and a command, and seals a receipt."""
    from backplane.config import Settings
    from backplane.runtime.plane import ControlPlane
    from backplane.scale.content import Contents
    from backplane.scale.durable import DurableEngine
    from backplane.scale.runner import Runner
    from backplane.scale.worker import serve

    async def work(folder: Path) -> Figures:
        engine = DurableEngine(url, poll_s=POLL_S, lease_s=LEASE_S)
        for number in range(count):
            engine.submit(Job(WorkOrder(f"echo {number}"), "rerun", backend="shell"))
        plane = ControlPlane(Settings(), folder, dict(os.environ))
        async with plane, anyio.create_task_group() as tasks:
            clock = _Clock()
            run = Runner(plane, Contents(folder / "content"))
            tasks.start_soon(lambda: serve(engine, run, slots=SLOTS))
            await anyio.to_thread.run_sync(_wait_for, url, count)
            figures = clock.figures()
            tasks.cancel_scope.cancel()
        engine.close()
        return figures

    with tempfile.TemporaryDirectory(prefix="bench-scale-") as name:
        return anyio.run(work, Path(name))


PARTS: Final = {"bare": _bare, "ours": _ours, "idle-bare": _idle_bare, "idle-ours": _idle_ours, "shell": _shell}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
