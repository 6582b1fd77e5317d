"""Section Server and resources of the fault catalogue: peers that go away, limits, many runs, odd environments."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import backplane
from backplane.config import Limits, Settings
from backplane.receipts.store import Store
from backplane.runtime.backends import ProcessBackend
from backplane.runtime.plane import ControlPlane
from tests.all.faults import hosts, sizes
from tests.all.faults.ground import GRACE_S, LADDER_S, PROGRAM, UGLY, Ground, high_water, leftovers
from tests.runs import is_empty

STOP_S = GRACE_S + LADDER_S
LIVES = "hello(); take(); event('up')\nif os.fork() == 0:\n    os.setsid(); time.sleep(600)\ntime.sleep(600)"
TALKS = "hello(); take()\nwhile True:\n    event('x' * 1000)"


# F57: who listens goes away -------------------------------------------------------------------------------------------


def test_f57_a_reader_that_leaves_ends_the_run_and_it_is_stored(ground: Ground) -> None:
    read_end, write_end = os.pipe()
    running = ground.started(TALKS, stdout=write_end)
    os.close(write_end)
    os.read(read_end, 1000)
    os.close(read_end)
    ended = running.end()
    assert (ended.code, ended.left, ended.stderr) == (141, [], b"")
    assert ended.wall_s < (ground.base_s + STOP_S + 2) * sizes.share() + sizes.SLACK_S
    (row,) = ground.rows()
    assert (row.outcome, row.reason) == ("partial", "cancelled")
    assert not ground.litter()


def test_f57_a_reader_that_stops_reading_slows_the_run_and_grows_nothing(ground: Ground) -> None:
    read_end, write_end = os.pipe()
    running = ground.started(TALKS, stdout=write_end)
    os.close(write_end)
    os.read(read_end, 1000)
    size = 0
    for _ in range(8):
        time.sleep(0.1)
        size = high_water(running.pid)
    running.process.send_signal(signal.SIGTERM)
    ended = running.end()
    os.close(read_end)
    assert (ended.code, ended.left) == (143, [])
    assert size - ground.base_bytes < 64 << 20
    assert not ground.litter()


HOOK = 'abp.hooks=[{{"event": "pre_tool", "command": ["sh", "-c", "{}"]}}]'
MANY_LONG: dict[str, tuple[str, tuple[str, ...]]] = {
    "losses": ("warn({'loss': {'path': '/x', 'reason': long}})", ()),
    "streams": ("warn({'output': {'stream': f's{n}', 'text': long}})", ("--env", "A_KEY=a-secret-of-some-length")),
    "tool names": ("ask(name=f't{n}' + long, input={}); line()", ("--param", HOOK.format("true"))),
    "patches": ("ask(kind='patch', files=[f'f{n}' + long], default='deny'); line()", ()),
    "calls": ("call(f't{n}' + long, tool_use_id=str(n), parent_tool_use_id=f'p{n}' + long)", ()),
    "open asks": ("ask(name='bash', input={'command': long})", ("--param", HOOK.format("sleep 2"))),
}


@pytest.mark.parametrize("what", MANY_LONG)
def test_f58_many_long_lines_are_bounded_by_their_bytes(ground: Ground, what: str) -> None:
    one, options = MANY_LONG[what]
    size, count, room_mib = (4_000_000, 18, 64) if sizes.LONG else (1_000_000, 40, 32)
    body = f"""
def warn(ext):
    told = {{"ts": "2026-01-15T12:00:00Z", "type": "warning", "message": "x", "ext": ext}}
    say("event", ref_id=RUN["id"], event=told)
def ask(**members):
    say("ask", ref_id=RUN["id"], id=str(n), **{{"kind": "tool", **members}})
def call(name, **members):
    say("event", ref_id=RUN["id"], event=body(kind="tool_call", **{{"tool_name": name, "input": {{}}, **members}}))
hello(extensions=["ask/1"]); take(); long = "y" * {size}
for n in range({count}):
    {one}
final(); rest()
"""
    ended = ground.start("run", "do it", "--sidecar", ground.host(body), *options).end()
    assert (ended.code, ended.left) == (3 if what == "calls" else 0, [])  # No rule can judge such names.
    assert ended.peak_bytes - ground.base_bytes < room_mib << 20


# F58: limits ----------------------------------------------------------------------------------------------------------


def limited(**limits: int) -> Callable[[], None]:
    def put() -> None:
        for name, value in limits.items():
            resource.setrlimit(getattr(resource, name), (value, value))

    return put


def test_f58_forty_descriptors_are_enough_for_a_run(ground: Ground) -> None:
    ended = ground.run(hosts.GOOD, preexec_fn=limited(RLIMIT_NOFILE=40))
    assert not ground.amiss(ended, outcome="complete", accepted=2)


@pytest.mark.parametrize("count", [8, 12, 20])
def test_f58_too_few_descriptors_are_a_clear_error(ground: Ground, count: int) -> None:
    ended = ground.run(hosts.GOOD, preexec_fn=limited(RLIMIT_NOFILE=count + 2 * sizes.TRACED))
    assert ended.left == []
    for word in UGLY:
        assert word not in ended.stderr, ended.stderr
    if ended.code != 0:
        assert ended.error not in (None, "internal"), ended.stderr


@pytest.mark.parametrize("kib", [16, 256])
def test_f58_a_limit_on_file_sizes_is_a_clear_error(ground: Ground, kib: int) -> None:
    body = "hello(); take()\nfor n in range(600):\n    event('x' * 1000)\nfinal(); rest()"
    ended = ground.run(body, preexec_fn=limited(RLIMIT_FSIZE=kib * 1024))
    assert ended.left == []
    # Stdout is a file here, and under the same limit.
    codes = ("receipt_store_failed", "workspace_staging_failed", "execution_workspace_error", "stream_closed")
    assert ended.error in codes, ended.stderr
    assert b"Traceback" not in ended.stderr


def test_f58_little_memory_for_all_is_a_clear_end(ground: Ground) -> None:
    body = "hello(); take(); event()\ntry:\n    b'x' * (8 << 30)\nexcept MemoryError:\n    os._exit(9)\nfinal(); rest()"
    ended = ground.run(body, preexec_fn=limited(RLIMIT_AS=1 << 30))
    assert not ground.amiss(ended, code="backend_crashed", accepted=1, bound_s=2.0)
    assert b"exit code 9" in ended.stderr


def test_f58_three_hundred_children_are_gone_at_the_end(ground: Ground) -> None:
    body = """
deaf(); hello(); take()
for n in range(300):
    if os.fork() == 0:
        if n % 2:
            os.setsid()
        time.sleep(600)
event('up'); final(); time.sleep(600)
"""
    ended = ground.run(body)
    assert not ground.amiss(ended, outcome="complete", accepted=1, bound_s=STOP_S + 3.0)


@pytest.mark.skipif(os.geteuid() == 0, reason="as root no limit on processes holds")
def test_f58_no_process_to_be_had_is_a_clear_error(ground: Ground) -> None:
    ended = ground.run(hosts.GOOD, preexec_fn=limited(RLIMIT_NPROC=1))
    assert ended.left == []
    assert ended.error not in (None, "internal"), ended.stderr


def backend(folder: Path, body: str, name: str = "host.py") -> ProcessBackend:
    return ProcessBackend(id="fault", argv=hosts.script(folder, body, name=name))


QUICK = Settings(limits=Limits(cancel_grace_s=GRACE_S, runs_max=200), isolation="off")


async def one(plane: ControlPlane, work: Path, host: ProcessBackend) -> Any:
    order = backplane.WorkOrder("do it", workspace=backplane.WorkspaceSpec(root=str(work)))
    async with plane.start(order, host) as run:
        async for _ in run:
            pass
    return run


BAD = {
    "silent": "hello(); time.sleep(60)",
    "flood": "hello(); take()\nwhile True:\n    event('x' * 1000)",
    "line": "hello(); take(); put(b'{' + b'x' * (30 << 20) + b'\\n')",
    "unread": "hello(); time.sleep(60)",
    "crash": "hello(); take(); os.kill(os.getpid(), 9)",
    "deaf": "deaf(); hello(); take(); final(); time.sleep(60)",
    "hog": "hello(); take(); x = b'x' * (300 << 20); event(); time.sleep(60)",
    "forks": "hello(); take()\nfor _ in range(50):\n    if not os.fork():\n        time.sleep(60)\nfinal()",
}


def test_f58_good_runs_complete_beside_bad_ones(ground: Ground) -> None:
    limits = Limits(cancel_grace_s=GRACE_S, run_s=3.0, runs_max=100)
    outcomes: list[str] = []
    ends: dict[str, str] = {}

    async def main() -> None:
        settings = Settings(limits=limits, isolation="off")
        async with ControlPlane(settings, ground.home, os.environ) as plane, anyio.create_task_group() as tasks:
            for name, body in BAD.items():
                tasks.start_soon(bad, plane, name, backend(ground.folder, body, f"{name}.py"))
            good = backend(ground.folder, hosts.GOOD)
            for _ in range(10):
                outcomes.append((await one(plane, ground.work, good)).receipt.outcome)

    async def bad(plane: ControlPlane, name: str, host: ProcessBackend) -> None:
        ends[name] = (await one(plane, ground.work, host)).receipt.outcome

    anyio.run(main)
    assert outcomes == ["complete"] * 10
    assert set(ends) == set(BAD)
    assert not ground.litter()


# F59, C8, C9: many runs -----------------------------------------------------------------------------------------------


def own_state() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


async def settled(home: Path) -> tuple[int, int]:
    """The same once the folders of the ended runs are removed, which a thread of the control plane does."""
    assert await anyio.to_thread.run_sync(is_empty, home / "stage")
    await anyio.sleep(0.1)
    return own_state()


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.timeout(3600)
def test_f59_many_runs_in_a_row_grow_nothing(ground: Ground) -> None:
    count = sizes.of(12, 1000)
    kinds = [
        hosts.GOOD,
        "sys.exit(1)",
        "hello(); take(); event(); os._exit(0)",
        "deaf(); hello(); take(); event(); final()",
    ]
    seen: dict[str, tuple[int, int]] = {}
    sizes_seen: dict[str, int] = {}

    async def main() -> None:
        programs = [backend(ground.folder, body, f"{n}.py") for n, body in enumerate(kinds)]
        async with ControlPlane(QUICK, ground.home, os.environ) as plane:
            for number in range(count + 10):
                if number == 10:
                    seen["before"], sizes_seen["before"] = await settled(ground.home), rss()
                await one(plane, ground.work, programs[number % len(programs)])
            seen["after"], sizes_seen["after"] = await settled(ground.home), rss()

    anyio.run(main)
    assert leftovers(set()) == []
    (descriptors, threads), before = seen["after"], seen["before"]
    assert descriptors == before[0]
    assert threads <= before[1] + 2  # The pool of threads grows if calls come at the same time, which is chance.
    assert not ground.litter()
    if sizes.LONG:
        assert sizes_seen["after"] < 1.05 * sizes_seen["before"]


@pytest.mark.timeout(900)
def test_f59_many_runs_at_once_all_complete(ground: Ground) -> None:
    count = sizes.of(12, 100)
    outcomes: list[str] = []
    took: list[float] = []

    async def main() -> None:
        good = backend(ground.folder, hosts.GOOD)

        async def task(plane: ControlPlane) -> None:
            outcomes.append((await one(plane, ground.work, good)).receipt.outcome)

        async with ControlPlane(QUICK, ground.home, os.environ) as plane:
            await one(plane, ground.work, good)
            began = time.monotonic()
            async with anyio.create_task_group() as tasks:
                for _ in range(count):
                    tasks.start_soon(task, plane)
            took.append(time.monotonic() - began)

    anyio.run(main)
    assert outcomes == ["complete"] * count
    if sizes.LONG:
        assert count / took[0] >= 20 / sizes.share()


@pytest.mark.timeout(900)
def test_f59_a_storm_of_cancels_leaves_nothing(ground: Ground) -> None:
    times: dict[str, list[float]] = {"good": [], "deaf": []}
    bodies = {
        "good": "hello(extensions=['cancel/1']); take(); event(); line(); final('partial')",
        "deaf": "deaf(); hello(); take(); event()\nwhile True:\n    time.sleep(60)",
    }

    async def main() -> None:
        programs = {name: backend(ground.folder, body, f"{name}.py") for name, body in bodies.items()}
        order = backplane.WorkOrder("do it", workspace=backplane.WorkspaceSpec(root=str(ground.work)))

        async def task(plane: ControlPlane, name: str) -> None:
            async with plane.start(order, programs[name]) as run:
                async for _ in run:
                    began = time.monotonic()
                    async with anyio.create_task_group() as tasks:
                        for _ in range(3):
                            tasks.start_soon(run.cancel)
                        async for _ in run:
                            pass
                    times[name].append(time.monotonic() - began)
                    break
            assert run.receipt.outcome == "partial"

        async with ControlPlane(QUICK, ground.home, os.environ) as plane:
            for _ in range(sizes.of(1, 10)):
                async with anyio.create_task_group() as tasks:
                    for number in range(10):
                        tasks.start_soon(task, plane, "good" if number % 2 else "deaf")

    anyio.run(main)
    assert leftovers(set()) == []
    assert not ground.litter()
    assert max(times["good"]) < GRACE_S + LADDER_S + sizes.share() + sizes.SLACK_S
    assert max(times["deaf"]) < GRACE_S + LADDER_S + sizes.share() + sizes.SLACK_S


@pytest.mark.timeout(900)
def test_c5_a_stall_is_found_at_its_deadline_however_many_stall(ground: Ground) -> None:
    late: list[float] = []
    count, idle_s = sizes.of(8, 100), 0.8

    async def main() -> None:
        host = backend(ground.folder, "hello(); take(); event(); rest()")
        settings = Settings(limits=Limits(cancel_grace_s=GRACE_S, idle_s=idle_s), isolation="off")
        order = backplane.WorkOrder("do it", workspace=backplane.WorkspaceSpec(root=str(ground.work)))

        async def task(plane: ControlPlane) -> None:
            async with plane.start(order, host) as run:
                async for _ in run:
                    since = time.monotonic()
            assert run.end is not None
            assert run.end.reason == "idle"
            late.append(time.monotonic() - since - idle_s)

        async with ControlPlane(settings, ground.home, os.environ) as plane:
            for _ in range(count // 4):
                async with anyio.create_task_group() as tasks:
                    for _ in range(4):
                        tasks.start_soon(task, plane)

    anyio.run(main)
    assert max(late) < 0.5 * sizes.share() + LADDER_S + sizes.SLACK_S


def test_f59_a_second_signal_still_leaves_nothing(ground: Ground) -> None:
    running = ground.started("deaf(); " + LIVES)
    running.said(b'"text":"up"')
    running.process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        running.process.send_signal(number)
    ended = running.end()
    assert (ended.code, ended.left) == (130, [])
    assert ended.wall_s < (ground.base_s + 20) * sizes.share()
    (row,) = ground.rows()
    assert (row.outcome, row.reason) == ("partial", "cancelled")
    assert not ground.litter()


# Odd ways to be started -----------------------------------------------------------------------------------------------


def test_closed_standard_streams_harm_no_run(ground: Ground) -> None:
    script = 'exec "$@" <&- >&- 2>&-'
    words = ("run", "do it", "--sidecar", ground.host(hosts.GOOD), "--json")
    ended = ground.start(*words, program=("sh", "-c", script, "sh", *PROGRAM)).end()
    assert (ended.code, ended.left) == (0, []), ended.stderr
    assert ground.rows()[0].outcome == "complete"
    assert not ground.litter()


ODD: dict[str, dict[str, str]] = {
    "folders missing": {"TMPDIR": "/nowhere/at/all", "HOME": "/nowhere"},
    "locale C": {"LC_ALL": "C", "LANG": "C"},
    "warnings as errors, and TERM odd": {
        "PYTHONWARNINGS": "error",
        "PYTHONDEVMODE": "1",
        "TERM": "\x1b[31m",
        "COLUMNS": "-5",
        "LINES": "x",
    },
    "a large environment": {f"LC_{n}": "x" * 100_000 for n in range(12)},
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_environment_harms_no_run(ground: Ground, name: str) -> None:
    ended = ground.run(hosts.GOOD.replace("'one'", "'gr\u00fc\u00dfe'"), env=ODD[name])
    assert not ground.amiss(ended, outcome="complete", accepted=2, bound_s=1.0)
    assert ended.events[0]["text"] == "gr\u00fc\u00dfe"


def test_the_state_folder_may_be_odd(ground: Ground) -> None:
    for name in ("with space and 'quote\"", "gr\u00fcn a%b?c#d", "-new\nline"):
        place = ground.folder / name
        ended = ground.run(hosts.GOOD, env={"BACKPLANE_HOME": str(place)})
        assert (ended.code, ended.left) == (0, []), (name, ended.stderr)
        with Store.open(place, readonly=True) as store:
            assert store.verify_all().findings == ()


def test_a_state_folder_that_is_a_file_is_a_clear_error(ground: Ground) -> None:
    place = ground.folder / "state"
    place.write_text("x")
    ended = ground.run(hosts.GOOD, env={"BACKPLANE_HOME": str(place)})
    assert (ended.error, ended.left) == ("receipt_store_failed", []), ended.stderr
