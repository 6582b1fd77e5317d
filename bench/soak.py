"""Thousands of runs in one process, most of which end badly, and what they leave behind: nothing.

`python -m bench.soak [RUNS] [--traced]` (default: 2000; some five minutes, fifty runs at once, a twentieth of them on
trio). `--traced` judges the memory that Python has allocated, in place of the resident, and names what grew. Hosts
are killed, stopped, deaf, mute, talk nonsense or exit at any place; callers cancel, leave, stop reading, or are
cancelled. After every hundred runs, and at the end, no process, descriptor, task or folder may be left; every run has
one stored receipt that verifies, and memory stays flat.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Literal

import anyio
import msgspec

from backplane.config import Limits, Settings
from backplane.contract.approval import Decision
from backplane.contract.events import AgentEvent
from backplane.contract.work import PolicyProfile, WorkOrder, WorkspaceSpec
from backplane.process.aio import asyncio_loop
from backplane.receipts.store import Store
from backplane.runtime.backends import ProcessBackend
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run
from bench.work import resident_bytes

RUNS: Final = 2000
AT_ONCE: Final = 50
ROUND: Final = 100
"""Runs between two looks at what is left."""
SLOPE_KIB_MAX: Final = 1.0
"""Most growth of Python's memory a run, over the second half."""
RESIDENT_KIB_MAX: Final = 8.0
"""The same of the resident memory, which the allocators of C and SQLite fill up in the first thousands of runs."""
LEFT_S_MAX: Final = 10.0
"""Seconds after a round for what ends by itself: a guard, a thread of the store."""
MARK: Final = "BACKPLANE_SOAK"
"""A variable of all hosts, so that the ones that are left can be found."""
LIMITS: Final = Limits(hello_s=4.0, idle_s=4.0, run_s=60.0, cancel_grace_s=0.3, runs_max=AT_ONCE)

PRELUDE: Final = r"""
import json, os, signal, sys, time
def put(*messages):
    data = b"".join(m if isinstance(m, bytes) else json.dumps(m).encode() + b"\n" for m in messages)
    while data:
        data = data[os.write(1, data):]
def hello(*extensions):
    put({"t": "hello", "contract_version": "abp/v0.1", "backend": {"id": "soak"}, "extensions": list(extensions),
         "capabilities": {"streaming": "native"}})
def take():
    line = sys.stdin.buffer.readline()
    return json.loads(line) if line else os._exit(0)
def event(text="a"):
    body = {"ts": "2026-01-15T12:00:00Z", "type": "assistant_delta", "text": text}
    return {"t": "event", "ref_id": RUN["id"], "event": body}
def final():
    return {"t": "final", "ref_id": RUN["id"], "receipt": {
        "meta": {"run_id": RUN["id"], "work_order_id": RUN["work_order"]["id"], "contract_version": "abp/v0.1",
                 "started_at": "2026-01-15T12:00:00Z", "finished_at": "2026-01-15T12:00:01Z", "duration_ms": 1000},
        "backend": {"id": "soak"}, "capabilities": {"streaming": "native"}, "usage_raw": {}, "usage": {}, "trace": [],
        "artifacts": [], "verification": {"harness_ok": True}, "outcome": "complete"}}
def deaf():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
def child():
    if os.fork() == 0:
        os.setsid(); deaf(); time.sleep(600); os._exit(0)
"""
BEGIN: Final = "hello(); RUN = take(); put(event(str(os.getpid())))\n"
SLEEP: Final = "time.sleep(600)\n"

Reader = Callable[[Run], Awaitable[None]]


async def read_all(run: Run) -> None:
    async for _ in run:
        pass


async def wait(run: Run) -> None:
    await run.wait()


async def leave(run: Run) -> None:
    async for _ in run:
        return


async def look_away(run: Run) -> None:
    async for _ in run:
        await anyio.sleep(0.5)
        return


async def cancel(run: Run) -> None:
    async for _ in run:
        await run.cancel("enough")


async def be_cancelled(run: Run) -> None:
    with anyio.CancelScope() as scope:
        async for _ in run:
            scope.cancel()
            await run.wait()


async def fail(run: Run) -> None:
    async for _ in run:
        run.fail(RuntimeError("a bug of the caller"))


async def interrupt(run: Run) -> None:
    async for _ in run:
        run.interrupt()
        run.input("and this")
        await read_all(run)


async def _send(number: int, run: Run) -> None:
    async for event in run:
        pid = _pid_of(event)
        if not _is_marked(pid):  # In a sandbox a host has another number.
            raise RuntimeError(f"process {pid} is no host of this soak")
        os.kill(pid, number)
        await read_all(run)


kill = functools.partial(_send, signal.SIGKILL)
stop = functools.partial(_send, signal.SIGSTOP)


def _is_marked(pid: int) -> bool:
    return f"{MARK}=".encode() in Path(f"/proc/{pid}/environ").read_bytes()


def _pid_of(event: AgentEvent) -> int:
    return int(getattr(event, "text", "0"))


class Case(msgspec.Struct, frozen=True):
    """A host, its reader, and how such a run ends."""

    name: str
    host: str
    read: Reader = read_all
    ends: tuple[str, ...] = ("complete",)
    """Reasons of the end that may be, as the receipt names them."""
    isolation: Literal["best_effort", "off"] = "off"
    mode: Literal["staged", "pass_through"] = "pass_through"


FLOOD: Final = "put(*[event('x' * 100) for _ in range(1000)] * 5, final()); sys.stdin.read()\n"
GOOD: Final = "put(event(), event(), final()); sys.stdin.read()\n"

CASES: Final = (
    Case("good", BEGIN + GOOD),
    Case("good, waited for", BEGIN + GOOD, wait),
    Case("good, contained", BEGIN + GOOD, isolation="best_effort"),
    Case("good, in a copy", BEGIN + "open('b.txt', 'w').write('b')\n" + GOOD, mode="staged"),
    Case(
        "asks",
        BEGIN + "put({'t': 'ask', 'ref_id': RUN['id'], 'id': 'q', 'kind': 'tool', 'name': 'bash', "
        "'input': {'command': 'ls'}}); take()\n" + GOOD,
    ),
    Case("flood", BEGIN + FLOOD),
    Case("flood, left", BEGIN + FLOOD, leave, ("cancelled", "complete")),
    Case("flood, not read", BEGIN + FLOOD, look_away, ("cancelled", "complete")),
    Case("flood, killed", BEGIN + "while True: put(event('x' * 100))\n", kill, ("host_exit",)),
    Case("killed", BEGIN + SLEEP, kill, ("host_exit",)),
    Case("killed with a child", "child()\n" + BEGIN + SLEEP, kill, ("host_exit",)),
    Case("stopped", BEGIN + SLEEP, stop, ("idle",)),
    Case("stopped, left", BEGIN + "os.kill(os.getpid(), signal.SIGSTOP)\n", leave, ("cancelled",)),
    Case("cancelled", BEGIN + SLEEP, cancel, ("cancelled",)),
    Case("cancelled in a copy", BEGIN + SLEEP, cancel, ("cancelled",), mode="staged"),
    Case("cancelled, contained", BEGIN + SLEEP, cancel, ("cancelled",), isolation="best_effort"),
    Case("cancel ignored", "hello('cancel/1'); RUN = take(); put(event()); deaf()\n" + SLEEP, cancel, ("cancelled",)),
    Case("cancel ignored, with a child", "child()\n" + BEGIN + "deaf()\n" + SLEEP, cancel, ("cancelled",)),
    Case("caller cancelled", BEGIN + SLEEP, be_cancelled, ("cancelled",)),
    Case("caller fails", BEGIN + SLEEP, fail, ("failed",)),
    Case(
        "interrupted",
        "hello('interrupt/1', 'input/1'); RUN = take(); put(event()); take(); take(); put(final())\n",
        interrupt,
    ),
    Case("garbage", "put(os.urandom(20000) + b'\\n' + b'{' * 2000)\n", ends=("host_exit", "protocol")),
    Case(
        "garbage in a run", BEGIN + "put(os.urandom(20000) + b'\\n', b'{\"t\":\\n')\n", ends=("host_exit", "protocol")
    ),
    Case("no hello", SLEEP, ends=("failed",)),
    Case("no final", BEGIN + SLEEP, ends=("idle",)),
    Case("exit at once", "os._exit(3)\n", ends=("host_exit",)),
    Case("exit after hello", "hello(); os._exit(0)\n", ends=("host_exit", "protocol")),
    Case("exit after order", BEGIN + "os._exit(3)\n", ends=("host_exit",)),
    Case("exit in a line", BEGIN + 'put(b\'{"t":"eve\'); os._exit(3)\n', ends=("host_exit",)),
    Case("exit after final", BEGIN + "put(final()); os._exit(3)\n"),
    Case("output closed", BEGIN + "os.close(1)\n" + SLEEP, ends=("host_exit",)),
    Case("bad final", BEGIN + "put({**final(), 'receipt': {}})\n", ends=("protocol",)),
    Case(
        "wrong version",
        "put({'t': 'hello', 'contract_version': 'abp/v9.0', 'backend': {'id': 'soak'}, 'capabilities': {}})\n" + SLEEP,
        ends=("failed", "refused"),
    ),
)


class Soak:
    """Runs the cases over and over, and keeps what has to hold at the end."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.home, self.root, self.seed = folder / "home", folder / "work", seed
        self.temporary = folder / "tmp"
        for path in (self.root, self.temporary):
            path.mkdir()
        (self.root / "a.txt").write_text("alpha\n")
        self.faults: list[str] = []
        self.ids: list[str] = []
        self.ends: Counter[str] = Counter()
        self.memory: list[tuple[int, float]] = []
        """After so many runs, KiB: resident, or allocated by Python where that is traced."""
        self.first: tracemalloc.Snapshot | None = None
        """At half of the runs."""
        self.backends: dict[str, ProcessBackend] = {}
        for case in CASES:
            path = folder / f"{len(self.backends)}.py"
            path.write_text(PRELUDE + case.host)
            argv = (sys.executable, "-I", "-S", str(path))
            self.backends[case.name] = ProcessBackend(id="soak", argv=argv, env={MARK: str(folder)})
        self.mark = f"{MARK}={folder}".encode()

    async def part(self, runs: int, warm: int = 0) -> None:
        """Run so many orders in rounds on one event loop; look around after each, and after the control plane's end.

        Args:
            warm: hosts that may wait for later orders; they are left between rounds, and not looked for there.
        """
        limits = msgspec.structs.replace(LIMITS, warm_max=warm)
        settings = Settings(limits=limits, isolation="off")
        chance = random.Random(self.seed)
        async with ControlPlane(settings, self.home, os.environ) as plane:
            for first in range(0, runs, ROUND):
                cases = [CASES[number % len(CASES)] for number in range(first, min(first + ROUND, runs))]
                chance.shuffle(cases)
                before = _descriptors() if first else set[str]()
                if tracemalloc.is_tracing() and first >= runs // 2 and self.first is None:
                    gc.collect()
                    self.first = tracemalloc.take_snapshot()
                async with anyio.create_task_group() as tasks:
                    for case in cases:
                        tasks.start_soon(self._one, plane, case)
                if not warm:
                    await self._look_around(before, f"after {len(self.ids)} runs")
        if warm:
            await self._look_around(set(), f"after {len(self.ids)} runs, some on hosts that waited")

    async def _one(self, plane: ControlPlane, case: Case) -> None:
        spec = WorkspaceSpec(root=str(self.root), mode=case.mode)
        policy = PolicyProfile(require_approval_for=("bash",))
        order = WorkOrder(case.name, workspace=spec, policy=policy)
        if case.isolation != "off":
            order = order.with_abp("isolation", case.isolation)
        try:
            async with plane.start(order, self.backends[case.name], on_ask=_allow) as run:
                await case.read(run)
        except Exception as error:
            self.faults.append(f"{case.name}: {type(error).__name__}: {error}")
            return
        self.ids.append(run.id)
        if not run.is_sealed or run.end is None:
            self.faults.append(f"{case.name}: run {run.id} has no receipt: {run!r}")
            return
        reason = str(run.receipt.backplane["end"]["reason"])
        self.ends[reason] += 1
        if reason not in case.ends:
            self.faults.append(f"{case.name}: run {run.id} ended as {reason}, {run.end_error!r}")
        if (run.receipt.outcome == "complete") != (reason == "complete"):
            self.faults.append(f"{case.name}: run {run.id} is {run.receipt.outcome}, but ended as {reason}")

    async def _look_around(self, before: set[str], when: str) -> None:
        """Note what the runs so far have left behind, and how much memory there is now."""
        deadline = time.monotonic() + LEFT_S_MAX
        while (left := self._left(before)) and time.monotonic() < deadline:
            await anyio.sleep(0.1)
        self.faults += [f"{when}: {one}" for one in left]
        gc.collect()
        traced = tracemalloc.get_traced_memory()[0] / 1024 if tracemalloc.is_tracing() else 0.0
        self.memory.append((len(self.ids), traced or resident_bytes() / 1024))
        print(f"{when}: {self.memory[-1][1]:.0f} KiB, {dict(self.ends)}, {len(self.faults)} faults", flush=True)

    def _left(self, before: set[str]) -> list[str]:
        left = [f"process {pid} is left: {words}" for pid, words in _processes(self.mark)]
        left += [f"{path} is left" for path in self._folders()]
        if before:
            left += [f"descriptor {one} is left" for one in sorted(_descriptors() - before)]
        return left + [f"task {name} is left" for name in _tasks()]

    def _folders(self) -> list[Path]:
        made = [path for name in ("stage", "scratch", "incoming", "door", "sockets") for path in self._in(name)]
        return [*made, *self.temporary.iterdir()]

    def _in(self, name: str) -> list[Path]:
        return [*(self.home / name).iterdir()] if (self.home / name).is_dir() else []

    def end(self) -> None:
        """Note whether each run has one receipt that verifies, and which threads and processes are left."""
        with Store.open(self.home, readonly=True) as store:
            stored = [row.run_id for row in store.newest()]
            if sorted(stored) != sorted(self.ids):
                self.faults.append(f"{len(stored)} receipts of {len(set(stored))} runs for {len(self.ids)} runs")
            for run_id in stored:
                self.faults += [f"run {run_id}: {finding}" for finding in store.verify(run_id)]
        deadline = time.monotonic() + LEFT_S_MAX
        while len(threading.enumerate()) > 1 and time.monotonic() < deadline:
            time.sleep(0.1)
        self.faults += [f"thread {one.name} is left" for one in threading.enumerate()[1:]]
        self.faults += [f"process {pid} is left: {words}" for pid, words in _processes(self.mark)]

    def slope_kib(self) -> float:
        """Return the growth of memory a run over the second half."""
        half = self.memory[len(self.memory) // 2 :]
        if len(half) < 3:
            return 0.0
        return statistics.linear_regression([count for count, _ in half], [kib for _, kib in half]).slope


async def _allow(_: object) -> Decision:
    await anyio.sleep(0.01)
    return Decision("allow", "fine")


def _descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}").split(":")[0]
        except OSError:
            continue  # That of the look itself.
        if not target.endswith(".sqlite"):  # SQLite keeps one open while another connection to the file has a lock.
            found.add(f"{name} {target}")
    return found


def _processes(mark: bytes) -> list[tuple[int, str]]:
    """Return hosts that are left, and whatever they started, by a variable that they all have; and our children."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            environ = Path(f"/proc/{name}/environ").read_bytes()
            parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]
            words = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mark in environ.split(b"\0") or int(parent) == os.getpid():
            found.append((int(name), words))
    return found


def _tasks() -> list[str]:
    if asyncio_loop() is None:
        return []  # Trio waits for all tasks at the end of `run`.
    import asyncio

    me = asyncio.current_task()
    return [repr(task) for task in asyncio.all_tasks() if task is not me and not task.done()]


def soak(runs: int, folder: Path, seed: int = 1) -> Soak:
    """Run so many orders, a twentieth of them on trio and one with hosts that wait, and return what was found."""
    done = Soak(folder, seed)
    tempfile.tempdir, opened = str(done.temporary), len(os.listdir("/proc/self/fd"))
    try:
        part = runs // 20
        anyio.run(done.part, part, 4)
        anyio.run(done.part, runs - 2 * part)
        memory = done.memory[1:]
        if done.first is not None:
            ignored = [tracemalloc.Filter(False, name) for name in (tracemalloc.__file__, "<frozen importlib*")]
            now = tracemalloc.take_snapshot().filter_traces(ignored)
            for grown in now.compare_to(done.first.filter_traces(ignored), "lineno")[:20]:
                print(f"grown: {grown}")
        anyio.run(done.part, part, backend="trio")
        done.memory = memory
        done.end()
        if (more := len(os.listdir("/proc/self/fd")) - opened) > 0:
            done.faults.append(f"{more} descriptors more than in the beginning")
    finally:
        tempfile.tempdir = None
    return done


def main(words: Sequence[str]) -> int:
    """Run the soak, print its numbers, and return 1 if anything was left or wrong."""
    numbers, began = [int(word) for word in words if word != "--traced"], time.monotonic()
    runs = numbers[0] if numbers else RUNS
    os.nice(10)
    if "--traced" in words:
        tracemalloc.start()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        done = soak(runs, Path(name))
    slope = done.slope_kib()
    if slope > (SLOPE_KIB_MAX if tracemalloc.is_tracing() else RESIDENT_KIB_MAX):
        done.faults.append(f"memory grows by {slope:.2f} KiB a run")
    print(f"{len(done.ids)} runs in {time.monotonic() - began:.0f} s, {dict(done.ends)}")
    print(f"memory: {slope:+.2f} KiB a run over the second half")
    for fault in done.faults[:40]:
        print(f"FAULT {fault}")
    print(f"{len(done.faults)} faults")
    return 1 if done.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
