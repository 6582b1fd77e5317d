"""One measurement of ours or of an anchor, in a process of its own: `bench/work.py NAME ARGUMENT…` prints JSON.

What is measured goes through the product's own doors; the anchors use the standard library and
msgspec alone. CPU times are this process's, user and system, all threads; its children's never.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec

import backplane
from backplane.config import Limits, Settings
from backplane.contract.events import AssistantDelta
from backplane.contract.receipt import Receipt
from backplane.contract.work import WorkOrder, WorkspaceSpec
from backplane.receipts.pieces import seal
from backplane.runtime import backends
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run

CHILD = str(Path(__file__).with_name("child.py"))
FEW = 1_000
"""Events of the run that is taken off: start, end and everything else that does not grow with events."""
READ_BYTES = 65536
TICK_S = 0.0005
"""Between two looks at the loop: well under the shortest pause that would matter."""
IDLE = (
    "/bin/sh",
    "-c",
    """printf '%s\\n' "$1"; read -r run; id=${run#*'"id":"'}; id=${id%%'"'*}
    ready='"event":{"type":"assistant_delta","ts":"2026-01-01T00:00:00Z","text":"ready"}'
    printf '{"t":"event","ref_id":"%s",%s}\\n' "$id" "$ready"
    read -r never""",
    "sh",
)
"""An idle host of about a megabyte, so that hundreds of them say something about us and not about them."""
IDLE_HELLO = (
    '{"t":"hello","contract_version":"abp/v0.1","backend":{"id":"idle"},"capabilities":{},"mode":"mapped",'
    '"extensions":[]}'
)

Made = dict[str, Any]


def host(mode: str, count: int) -> backends.Backend:
    return backends.from_command((sys.executable, "-E", "-s", CHILD, "abp", mode, str(count)), cwd=Path.cwd())


def folders() -> tuple[Path, Path]:
    """A state folder and an empty workspace; removed by whoever started this process."""
    base = Path(tempfile.mkdtemp())
    (base / "root").mkdir()
    return base / "home", base / "root"


# Events ---------------------------------------------------------------------------------------------------------------


async def stream(mode: str, count: int) -> tuple[float, Run]:
    """One whole run through the public door; CPU seconds of it."""
    home, root = folders()
    began = time.process_time()
    seen = 0
    async with backplane.start("bench", backend=host(mode, count), root=root, settings=Settings(), home=home) as run:
        async for _ in run:
            seen += 1
    spent = time.process_time() - began
    assert run.receipt.outcome == "complete", run.error
    assert seen == count == len(run.receipt.trace), seen
    return spent, run


def ours_stream(mode: str, count: int) -> Made:
    """CPU µs an event of a run, the fixed cost taken off."""

    async def both() -> float:
        await stream(mode, FEW)
        few, _ = await stream(mode, FEW)
        many, _ = await stream(mode, count)
        return (many - few) / (count - FEW) * 1e6

    return {"us": anyio.run(both)}


async def conversation(count: int) -> float:
    """One turn of a session whose backend the router chose; CPU seconds of it."""
    from backplane.api import TaskRouter
    from backplane.config import BackendSettings
    from backplane.contract.events import AssistantDelta
    from backplane.providers import SessionConfig
    from backplane.routing import TaskDescriptor

    home, root = folders()
    command = (sys.executable, "-E", "-s", CHILD, "abp", "stream", str(count))
    settings = Settings(backends={"bench": BackendSettings(command=command)})
    began = time.process_time()
    seen = 0
    async with ControlPlane(settings, home, os.environ) as plane:
        config = SessionConfig(root=str(root), mode="pass_through")
        session, _ = await TaskRouter(plane).create_session_for_task(TaskDescriptor(), config)
        async with session:
            async for event in session.send_message("bench"):
                seen += isinstance(event, AssistantDelta)
    assert seen == count, seen
    return time.process_time() - began


def session_stream(count: int) -> Made:
    """CPU µs a chunk of a session, and of the same run driven by an order: the least of some rounds, start included."""

    async def both() -> Made:
        found = [((await stream("stream", count))[0], await conversation(count)) for _ in range(10)][1:]
        base = (
            min([(await stream("stream", FEW))[0] for _ in range(3)]),
            min([await conversation(FEW) for _ in range(3)]),
        )
        least = [(min(row[side] for row in found) - base[side]) / (count - FEW) * 1e6 for side in (0, 1)]
        return {"run_us": least[0], "session_us": least[1]}

    return anyio.run(both)


class _Delta(msgspec.Struct, tag_field="type", tag="assistant_delta", gc=False):
    ts: str
    text: str


class _Message(msgspec.Struct, tag_field="type", tag="assistant_message", gc=False):
    ts: str
    text: str


class _Call(msgspec.Struct, tag_field="type", tag="tool_call"):
    ts: str
    tool_name: str
    input: Any


class _Hello(msgspec.Struct, tag_field="t", tag="hello"):
    contract_version: str


class _Event(msgspec.Struct, tag_field="t", tag="event", gc=False):
    ref_id: str
    event: _Delta | _Message | _Call


class _Final(msgspec.Struct, tag_field="t", tag="final"):
    ref_id: str
    receipt: msgspec.Raw


def raw_child(mode: str, count: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-E", "-s", CHILD, "abp", mode, str(count)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert child.stdin is not None
    run_id = str(uuid.uuid4())
    child.stdin.write(json.dumps({"t": "run", "id": run_id, "work_order": {"id": run_id}}).encode() + b"\n")
    return child


def floor(mode: str, count: int, take: Callable[[str], None] | None = None) -> float:
    """Blocking reads, split, typed decode, nothing else; CPU seconds."""
    decode = msgspec.json.Decoder(_Hello | _Event | _Final).decode
    child = raw_child(mode, count)
    assert child.stdout is not None
    fd, rest, seen = child.stdout.fileno(), b"", 0
    began = time.process_time()
    while data := os.read(fd, READ_BYTES):
        lines = (rest + data).split(b"\n")
        rest = lines.pop()
        for line in lines:
            message = decode(line)
            seen += 1
            if take is not None and type(message) is _Event:
                take(message.event.text)  # type: ignore[union-attr]
    spent = time.process_time() - began
    child.wait()
    assert seen == count + 2, seen
    return spent


def floor_stream(mode: str, count: int) -> Made:
    floor(mode, FEW)
    return {"us": (floor(mode, count) - floor(mode, FEW)) / (count - FEW) * 1e6}


# Waiting --------------------------------------------------------------------------------------------------------------


def middle(values: list[int]) -> float:
    """The median of nanoseconds, in microseconds."""
    return statistics.median(values) / 1000


def ours_paced(count: int) -> Made:
    """Microseconds from the writing of an event to its consumer."""

    async def wait() -> list[int]:
        home, root = folders()
        waited: list[int] = []
        async with backplane.start("bench", backend=host("paced", count), root=root, home=home) as run:
            async for event in run:
                assert isinstance(event, AssistantDelta)
                waited.append(time.monotonic_ns() - int(event.text.split()[0]))
        assert len(waited) == count
        return waited

    return {"us": middle(anyio.run(wait))}


def floor_paced(count: int) -> Made:
    waited: list[int] = []
    floor("paced", count, lambda text: waited.append(time.monotonic_ns() - int(text.split()[0])))
    return {"us": middle(waited)}


def ours_ask(count: int) -> Made:
    """Microseconds from a host's ask to the policy's answer, by the host's clock."""

    async def measure() -> list[int]:
        home, root = folders()
        async with backplane.start("bench", backend=host("ask", count), root=root, home=home) as run:
            async for _ in run:
                pass
        return list(run.receipt.usage_raw["ask_ns"])

    return {"us": middle(anyio.run(measure))}


def echo_child() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-E", "-s", CHILD, "echo", "-", "0"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)


def echo(count: int) -> Made:
    """Microseconds there and back over a child that copies, waited for on an event loop; and without one."""
    child = echo_child()
    assert child.stdin is not None
    assert child.stdout is not None
    write, read = child.stdin.fileno(), child.stdout.fileno()

    async def on_a_loop() -> list[int]:
        took = []
        for number in range(count):
            began = time.monotonic_ns()
            os.write(write, b'{"t":"ping","seq":%d}\n' % number)
            await anyio.wait_readable(read)
            os.read(read, READ_BYTES)
            took.append(time.monotonic_ns() - began)
        return took

    def blocking() -> list[int]:
        took = []
        for number in range(count):
            began = time.monotonic_ns()
            os.write(write, b'{"t":"ping","seq":%d}\n' % number)
            os.read(read, READ_BYTES)
            took.append(time.monotonic_ns() - began)
        return took

    made = {"us": middle(anyio.run(on_a_loop)), "blocking_us": middle(blocking())}
    child.stdin.close()
    child.wait()
    return made


# Receipts -------------------------------------------------------------------------------------------------------------


def sealed_run(count: int) -> Receipt:
    _, run = anyio.run(stream, "stream", count)
    return run.stored


def whole(receipt: Receipt) -> Receipt:
    return msgspec.structs.replace(receipt, trace=list(receipt.trace))


def encode_and_hash(receipt: Receipt) -> str:
    return hashlib.sha256(msgspec.json.encode(receipt)).hexdigest()


def spent_on(work: Callable[[], object], repeat: int) -> float:
    """CPU milliseconds of one call."""
    began = time.process_time()
    for _ in range(repeat):
        work()
    return (time.process_time() - began) / repeat * 1000


def sealing(count: int) -> Made:
    """CPU ms to seal a run's receipt from its journal, and to encode and hash the same in memory."""
    receipt = sealed_run(count)
    plain = whole(receipt)
    repeat = max(1, 20_000 // count)
    ours, anchor = [], []
    for _ in range(5):
        ours.append(spent_on(lambda: seal(receipt), repeat))
        anchor.append(spent_on(lambda: encode_and_hash(plain), repeat))
    return {"ours_ms": statistics.median(ours), "anchor_ms": statistics.median(anchor)}


def pause(count: int) -> Made:
    """The longest pause of the loop, in ms, from the last event of a run until its receipt is there."""

    async def measure() -> tuple[float, Receipt]:
        home, root = folders()
        gaps: list[float] = []

        async def tick() -> None:
            last = time.perf_counter()
            while True:
                await asyncio.sleep(TICK_S)
                now = time.perf_counter()
                gaps.append(now - last)
                last = now

        ticking: asyncio.Task[None] | None = None
        seen = 0
        async with backplane.start("bench", backend=host("stream", count), root=root, home=home) as run:
            async for _ in run:
                seen += 1
                if seen == count:
                    ticking = asyncio.create_task(tick())
        assert ticking is not None
        await asyncio.sleep(TICK_S)
        ticking.cancel()
        return max(gaps) * 1000, run.receipt

    longest, receipt = anyio.run(measure)
    plain = whole(receipt)
    began = time.perf_counter()
    encode_and_hash(plain)
    return {"ours_ms": longest, "anchor_ms": (time.perf_counter() - began) * 1000}


# Many runs ------------------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def kept(count: int) -> Made:
    """Bytes by which the process's largest size grows for an event of a run nobody keeps the events of."""
    anyio.run(stream, "stream", FEW)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    anyio.run(stream, "stream", count)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"bytes": max(0, after - before) * 1024 / (count - FEW)}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def idle(count: int) -> Made:
    """What one control plane needs with one live idle run, and for each further one."""

    async def hold() -> Made:
        home, root = folders()
        settings = Settings(limits=Limits(runs_max=count + 1))
        spec = backplane.WorkspaceSpec(root=str(root), mode="pass_through")
        backend = backends.from_command((*IDLE, IDLE_HELLO), cwd=Path.cwd())

        async def live(plane: ControlPlane, *, task_status: anyio.abc.TaskStatus[None]) -> None:
            """Open a run and wait for its first event, then for one that never comes."""
            async with plane.start(backplane.WorkOrder("wait", workspace=spec), backend) as run:
                async for _ in run:
                    task_status.started()

        async with ControlPlane(settings, home, os.environ) as plane, anyio.create_task_group() as tasks:
            await tasks.start(live, plane)
            one_bytes, threads, fds = resident_bytes(), threading.active_count(), descriptors()
            for _ in range(count):
                await tasks.start(live, plane)
            made = {
                "one_bytes": one_bytes,
                "each_bytes": (resident_bytes() - one_bytes) / count,
                "each_threads": (threading.active_count() - threads) / count,
                "each_fds": (descriptors() - fds) / count,
            }
            tasks.cancel_scope.cancel()
        return made

    return anyio.run(hold)


def fleet(runs: int, count: int) -> Made:
    """CPU µs an event with so many hosts streaming at once into one control plane, the fixed cost taken off."""

    async def all_of(each: int) -> float:
        home, root = folders()
        settings = Settings(limits=Limits(runs_max=runs))
        spec = backplane.WorkspaceSpec(root=str(root), mode="pass_through")
        seen = 0

        async def one(plane: ControlPlane) -> None:
            nonlocal seen
            order = backplane.WorkOrder("bench", workspace=spec)
            async with plane.start(order, host("stream", each)) as run:
                async for _ in run:
                    seen += 1

        began = time.process_time()
        async with ControlPlane(settings, home, os.environ) as plane, anyio.create_task_group() as tasks:
            for _ in range(runs):
                tasks.start_soon(one, plane)
        assert seen == runs * each, seen
        return time.process_time() - began

    async def both() -> float:
        few = FEW // 10
        await all_of(few)
        base = await all_of(few)
        return (await all_of(count // runs) - base) / (count - runs * few) * 1e6

    return {"us": anyio.run(both)}


def routing() -> Made:
    """Milliseconds of a choice: the middle one of 50 orders on 40 backends, each at its best of five."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.test_routing import candidate_of, decided, measures_of, task, world

    draw = random.Random(4)
    data = world(draw)
    given = {"measures": measures_of(data), "candidates": [candidate_of(one) for one in data["backends"]]}
    best_s = []
    for order in [task(draw) for _ in range(50)]:
        decided(data, order, "balanced", **given)  # Measures are worked out once.
        times = []
        for _ in range(5):
            began = time.perf_counter()
            decided(data, order, "balanced", **given)
            times.append(time.perf_counter() - began)
        best_s.append(min(times))
    return {"decision_ms": 1000 * sorted(best_s)[len(best_s) // 2]}


def dispatch(isolation: str, mode: str, count: int) -> Made:
    """Milliseconds from a run's start to its host's hello, and to its first event, cold and warm in turn; medians."""
    from backplane.contract.envelope import Hello
    from backplane.runtime.drive import Drive

    root, hello_at = tempfile.mkdtemp(), [0.0]
    Path(root, "a.txt").write_text("a\n")
    check_hello = Drive._check_hello

    def timed(self: Drive, hello: Hello) -> None:
        hello_at[0] = time.perf_counter()
        check_hello(self, hello)

    Drive._check_hello = timed  # type: ignore[method-assign]

    async def one(plane: ControlPlane) -> tuple[str, float, float]:
        order = WorkOrder("x", workspace=WorkspaceSpec(root, mode=mode))  # type: ignore[arg-type]
        began, first = time.perf_counter(), 0.0
        async with plane.start(order, "mock") as run:
            async for _ in run:
                first = first or time.perf_counter() - began
        assert run.receipt.outcome == "complete"
        await anyio.sleep(0.4)  # The next host says its hello meanwhile.
        return str(run.receipt.backplane["start"]), (hello_at[0] - began) * 1000, first * 1000

    async def whole() -> Made:
        made: Made = {}
        limits = {"cold": Limits(warm_max=0), "warm": Limits()}
        planes = {
            way: ControlPlane(Settings(isolation=isolation, limits=own), tempfile.mkdtemp(), os.environ)  # type: ignore[arg-type]
            for way, own in limits.items()
        }
        async with planes["cold"], planes["warm"]:
            for plane in (*planes.values(), *planes.values()):  # A host waits from the second order on.
                await one(plane)
            rows = [(way, *(await one(plane))) for _ in range(count) for way, plane in planes.items()]
        assert all(way == start for way, start, _, _ in rows), "each run started as it was to"
        for way in limits:
            made[f"{way}_ms"] = statistics.median(hello for name, _, hello, _ in rows if name == way)
            made[f"{way}_event_ms"] = statistics.median(event for name, _, _, event in rows if name == way)
        return made

    return anyio.run(whole)


def rejudged(runs: int, events: int) -> Made:
    """CPU seconds in which `backplane policy test` judges so many stored runs, of so many events each, anew."""
    from backplane.receipts.store import Store
    from tests.test_replay import OPEN, call, stored

    home, folder = Path(tempfile.mkdtemp()), tempfile.mkdtemp()
    trace = [
        call(*(("bash",) if n % 3 else ("write_file",)), path=f"src/{n}.c", command=f"make {n}") for n in range(events)
    ]
    with Store.open(home) as store:
        for _ in range(runs):
            stored(store, list(trace), OPEN)
    policy = Path(folder, "new.json")
    policy.write_text('{"deny_write": ["src/1*.c"], "require_approval_for": ["bash"]}')
    command = [sys.executable, "-m", "backplane", "policy", "test", str(policy), "--all", "--json"]
    env = {**os.environ, "BACKPLANE_HOME": str(home)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    done = subprocess.run(command, env=env, capture_output=True, timeout=150, check=False)
    wall_s = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, len(rows)) == (1, runs), done.stderr
    assert all(row["decisions"] == events and row["differing"] for row in rows)
    return {"s": spent_s, "wall_s": wall_s}


WORK: dict[str, Callable[..., Made]] = {
    made.__name__: made
    for made in (
        ours_stream, floor_stream, ours_paced, floor_paced, ours_ask, echo, sealing, pause, kept, idle,
        fleet, routing, rejudged, session_stream, dispatch,
    )
}  # fmt: skip


def main() -> None:
    name, *arguments = sys.argv[1:]
    print(json.dumps(WORK[name](*(int(word) if word.isdigit() else word for word in arguments))))


if __name__ == "__main__":
    main()
