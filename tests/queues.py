"""A queue of a test's own, with workers as real processes."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import anyio
import pytest

from backplane.cli import main
from backplane.contract.work import RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.scale.content import Contents
from backplane.scale.engine import Job, OrderResult
from backplane.scale.orders import Packer, ended, make_job
from backplane.workspace import Quota

if TYPE_CHECKING:
    from backplane.scale.durable import DurableEngine

LEASE_S = 4.0
QUOTA = Quota(bytes_max=1 << 20, files_max=100)
ROOT = Path(__file__).resolve().parent.parent


def needs_queue() -> None:
    """Skip a test, or a whole file, where no queue on SQLite can be had."""
    pytest.importorskip("dbos", reason="needs dbos: not installed")
    from backplane.scale.durable import SQLITE_MIN

    if sqlite3.sqlite_version_info < SQLITE_MIN:
        pytest.skip("needs SQLite 3.42: older under this Python", allow_module_level=True)


class Queue:
    """A queue in a folder of the test's own, with workers as real processes."""

    def __init__(self, folder: Path, url: str | None = None, lease_s: float = LEASE_S) -> None:
        self.folder = folder
        self.url = url or f"sqlite:///{folder / 'queue.sqlite'}"
        self.home = folder / "home"
        self.content = Contents(folder / "content")
        self.lease_s = lease_s
        self.workers: list[subprocess.Popen[bytes]] = []

    @cached_property
    def engine(self) -> DurableEngine:
        from backplane.scale.durable import DurableEngine  # A Python without dbos imports this file, too.

        return DurableEngine(self.url, lease_s=self.lease_s)

    def command(self, *words: str) -> list[str]:
        shared = ["--engine", self.url]
        if words[0] != "queue" or words[1] in ("submit", "worker", "show"):
            shared += ["--content", self.content.place]
        return [sys.executable, "-m", "backplane", *words, *shared]

    def env(self, home: Path, **more: str) -> dict[str, str]:
        return {**os.environ, "BACKPLANE_HOME": str(home), "PYTHONPATH": str(ROOT), **more}

    def cli(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command to its end; in this process, which has loaded what a queue needs."""
        before = os.open(".", os.O_RDONLY), os.environ.copy(), os.dup(1), os.dup(2)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            sys.stdout.flush()
            sys.stderr.flush()
            try:
                os.chdir(self.folder)
                os.environ["BACKPLANE_HOME"] = str(self.home)
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                code = main(self.command(*words)[3:])
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                folder, environ, stdout, stderr = before
                os.fchdir(folder)
                os.environ.clear()
                os.environ.update(environ)
                os.dup2(stdout, 1)
                os.dup2(stderr, 2)
                for fd in (folder, stdout, stderr):
                    os.close(fd)
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(words, code, out.read().decode(), err.read().decode())

    def worker(self, *words: str, **more: str) -> subprocess.Popen[bytes]:
        home, log = self.folder / f"worker{len(self.workers)}", self.folder / f"worker{len(self.workers)}.log"
        words = ("queue", "worker", "--lease", str(self.lease_s), "--poll", "0.2", *words)
        with log.open("wb") as file:
            started = subprocess.Popen(self.command(*words), env=self.env(home, **more), stdout=file, stderr=file)
        self.workers.append(started)
        return started

    def job(self, task: str, **given: object) -> Job:
        root = self.folder / "workspace"
        root.mkdir(exist_ok=True)
        (root / "calc.py").write_text("a - b\n")
        abp = {name: value for name, value in given.items() if value is not None}
        order = WorkOrder(task, workspace=WorkspaceSpec(root=str(root)), config=RuntimeConfig(vendor={"abp": abp}))
        return make_job(order, Packer(self.content, self.home, QUOTA), backend="shell")

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait(10)
        if "engine" in vars(self):
            self.engine.close()


@contextmanager
def a_queue(folder: Path, url: str | None = None, lease_s: float = LEASE_S) -> Iterator[Queue]:
    if url is None:
        needs_queue()
    queue = Queue(folder, url, lease_s)
    try:
        yield queue
    finally:
        queue.close()


class Event(NamedTuple):
    """One event of an order, as `queue events` prints it."""

    attempt: str
    seq: int
    record: str


def events_of(engine: DurableEngine, order_id: str) -> list[Event]:
    """The events of an order up to now."""
    return [
        Event(batch.attempt, batch.seq + number, record)
        for batch in engine.past(order_id)
        for number, record in enumerate(batch.records)
    ]


async def result_of(engine: DurableEngine, order_id: str, limit_s: float = 100.0) -> OrderResult:
    with anyio.fail_after(limit_s):
        return await ended(engine, order_id)


def check_events(events: Sequence[Event], winner: str) -> None:
    """The winner's events are all there, once, in order, and last."""
    assert events[-1].attempt == winner
    for attempt in {event.attempt for event in events}:
        numbers = [event.seq for event in events if event.attempt == attempt]
        assert numbers == list(range(1, len(numbers) + 1))


def until(true: object, limit_s: float = 100.0) -> None:
    ends = time.monotonic() + limit_s
    while not true():  # type: ignore[operator]
        assert time.monotonic() < ends, "it did not come to pass"
        time.sleep(0.05)


def here_cli(queue: Queue, *words: str) -> subprocess.CompletedProcess[str]:
    """A command that knows nothing of the queue."""
    command, env = [sys.executable, "-m", "backplane", *words], queue.env(queue.home)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def mock_worker(queue: Queue, name: str, **more: str) -> None:
    """Start a worker that has the host `mock` as a backend of this name."""
    config = queue.folder / "worker.toml"
    command = [sys.executable, "-E", "-s", str(ROOT / "hosts" / "mock.py")]
    config.write_text(f"[backends.{name}]\ncommand = {json.dumps(command)}\n")
    queue.worker("--config", str(config), **more)
