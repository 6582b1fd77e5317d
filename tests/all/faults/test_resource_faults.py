"""Section Server and resources of the fault catalogue: peers that go away, limits, many runs, odd environments."""

from __future__ import annotations

import json
import os
import pty
import resource
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

import backplane
from backplane.config import Limits, Settings
from backplane.receipts.store import Store
from backplane.runtime.backends import ProcessBackend
from backplane.runtime.plane import ControlPlane
from tests.all.faults import hosts, sizes
from tests.all.faults.conftest import Figure
from tests.all.faults.ground import GRACE_S, LADDER_S, PROGRAM, UGLY, Ground, high_water, leftovers

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


def served(ground: Ground, body: str) -> subprocess.Popen[bytes]:
    """`serve` with one run at work that a host of these lines does."""
    command = json.dumps(list(hosts.script(ground.folder, body)))
    (ground.work / "backplane.toml").write_text(f"[backends.it]\ncommand = {command}\n")
    process = subprocess.Popen(
        [*PROGRAM, "serve"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ground.work, env=ground.environ(),
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["t"] == "hello"
    order = {"task": "do it", "config": {"vendor": {"abp": {"backend": "it"}}}, "workspace": {"root": str(ground.work)}}
    run = {"t": "run", "id": "r1", "work_order": order, "extensions": ["cancel/1", "stage/1"]}
    process.stdin.write(json.dumps(run).encode() + b"\n")
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["t"] == "event"
    return process


@pytest.mark.parametrize("how", ["closes stdin", "closes both", "stops reading", "terminates", "kills"])
def test_f57_a_server_whose_peer_goes_away_ends_within_five_seconds(ground: Ground, how: str) -> None:
    before: set[int] = set()
    process = served(ground, TALKS if how == "stops reading" else LIVES)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    began = time.monotonic()
    if how == "terminates":
        process.terminate()
    elif how == "kills":
        process.kill()
    else:
        process.stdin.close()
    if how in ("closes both", "stops reading"):
        time.sleep(0.2)
        process.stdout.close()
    process.wait(20)
    assert time.monotonic() - began < 5.0 * sizes.share() + sizes.SLACK_S
    end_s = time.monotonic() + (2.0 if how == "kills" else 0.0)
    while (left := leftovers(before)) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert left == []
    assert b"Traceback" not in process.stderr.read()
    for stream in (process.stdin, process.stdout, process.stderr):
        stream.close()
    if how != "kills":
        (row,) = ground.rows()
        assert (row.outcome, row.reason) == ("partial", "cancelled")
        assert not ground.litter()


MANY_LONG: dict[str, tuple[str, tuple[str, ...]]] = {
    "losses": ("warn({'loss': {'path': '/x', 'reason': long}})", ()),
    "streams": ("warn({'output': {'stream': f's{n}', 'text': long}})", ("--env", "A_KEY=a-secret-of-some-length")),
    "tool names": ("ask(name=f't{n}' + long, input={}); line()", ("--pre-tool", "true")),
    "patches": ("ask(kind='patch', files=[f'f{n}' + long], default='deny'); line()", ()),
    "calls": ("call(f't{n}' + long, tool_use_id=str(n), parent_tool_use_id=f'p{n}' + long)", ()),
    "open asks": ("ask(name='bash', input={'command': long})", ("--pre-tool", "sleep 2")),
}


@pytest.mark.parametrize("what", MANY_LONG)
def test_f58_many_long_lines_are_bounded_by_their_bytes(ground: Ground, what: str) -> None:
    one, options = MANY_LONG[what]
    body = f"""
def warn(ext):
    told = {{"ts": "2026-01-15T12:00:00Z", "type": "warning", "message": "x", "ext": ext}}
    say("event", ref_id=RUN["id"], event=told)
def ask(**members):
    say("ask", ref_id=RUN["id"], id=str(n), **{{"kind": "tool", **members}})
def call(name, **members):
    say("event", ref_id=RUN["id"], event=body(kind="tool_call", **{{"tool_name": name, "input": {{}}, **members}}))
hello(extensions=["ask/1"]); take(); long = "y" * 4_000_000
for n in range(25):
    {one}
final(); rest()
"""
    ended = ground.start("run", "do it", "--sidecar", ground.host(body), *options).end()
    assert (ended.code, ended.left) == (3 if what == "calls" else 0, [])  # No rule can judge such names.
    assert ended.peak_bytes - ground.base_bytes < 64 << 20


# F58: limits ----------------------------------------------------------------------------------------------------------


def limited(**limits: int) -> Callable[[], None]:
    def put() -> None:
        for name, value in limits.items():
            resource.setrlimit(getattr(resource, name), (value, value))

    return put


def test_f58_forty_descriptors_are_enough_for_a_run(ground: Ground) -> None:
    ended = ground.run(hosts.GOOD, preexec_fn=limited(RLIMIT_NOFILE=40))
    assert not ground.amiss(ended, outcome="complete", accepted=2)


@pytest.mark.parametrize("count", [5, 8, 10, 12, 15, 20])
def test_f58_too_few_descriptors_are_a_clear_error(ground: Ground, count: int) -> None:
    # The tracer of a suite with coverage holds one, and Python itself needs the rest.
    ended = ground.run(hosts.GOOD, preexec_fn=limited(RLIMIT_NOFILE=count + 2 * sizes.TRACED))
    assert ended.left == []
    for word in UGLY:
        assert word not in ended.stderr, ended.stderr
    if ended.code != 0:
        assert ended.error not in (None, "internal"), ended.stderr


@pytest.mark.parametrize("kib", [1, 16, 64, 256])
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


def test_f58_good_runs_complete_beside_bad_ones(ground: Ground, figure: Figure) -> None:
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


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.timeout(3600)
def test_f59_many_runs_in_a_row_grow_nothing(ground: Ground, figure: Figure) -> None:
    count = sizes.of(25, 1000)
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
                    seen["before"], sizes_seen["before"] = own_state(), rss()
                await one(plane, ground.work, programs[number % len(programs)])
            seen["after"], sizes_seen["after"] = own_state(), rss()

    anyio.run(main)
    assert leftovers(set()) == []
    assert seen["after"] == seen["before"]
    assert not ground.litter()
    growth = (sizes_seen["after"] / sizes_seen["before"] - 1) * 100
    figure("C8", growth, what=f"% RSS after {count} runs; fds, threads, zombies, temp +0")
    figure("C3", 0, what=f"of {count} runs in a row")


@pytest.mark.timeout(900)
def test_f59_many_runs_at_once_all_complete(ground: Ground, figure: Figure) -> None:
    count = sizes.of(20, 100)
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
    figure("C9", count / took[0], what=f"runs/s, {count} at once, a staged workspace and a stored receipt each")


@pytest.mark.timeout(900)
def test_f59_a_storm_of_cancels_leaves_nothing(ground: Ground, figure: Figure) -> None:
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
    for name, found in times.items():
        worst = max(found) if len(found) < 100 else statistics.quantiles(found, n=100)[98]
        figure("C4", worst, what=f"s to cancel, {name} host, worst of {len(found)}, 10 at once, grace {GRACE_S} s")
    assert max(times["good"]) < GRACE_S + LADDER_S + sizes.share() + sizes.SLACK_S
    assert max(times["deaf"]) < GRACE_S + LADDER_S + sizes.share() + sizes.SLACK_S


@pytest.mark.timeout(900)
def test_c5_a_stall_is_found_at_its_deadline_however_many_stall(ground: Ground, figure: Figure) -> None:
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
    figure("C5", max(late), what=f"s beyond the deadline until the receipt, worst of {count}, 4 at once")
    assert max(late) < 0.5 * sizes.share() + LADDER_S + sizes.SLACK_S


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT])
def test_f59_a_second_signal_still_leaves_nothing(ground: Ground, first: signal.Signals) -> None:
    running = ground.started("deaf(); " + LIVES)
    running.said(b'"text":"up"')
    running.process.send_signal(first)
    time.sleep(0.1)
    for number in (signal.SIGINT, signal.SIGTERM, first):
        running.process.send_signal(number)
    ended = running.end()
    assert (ended.code, ended.left) == (128 + first, [])
    assert ended.wall_s < (ground.base_s + 20) * sizes.share()
    (row,) = ground.rows()
    assert (row.outcome, row.reason) == ("partial", "cancelled")
    assert not ground.litter()


# Odd ways to be started -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", ["0", "1", "2", "0 1", "1 2", "0 1 2"])
def test_closed_standard_streams_harm_no_run(ground: Ground, closed: str) -> None:
    script = "".join(f"exec {fd}>&-; " if fd != "0" else "exec 0<&-; " for fd in closed.split()) + 'exec "$@"'
    words = ("run", "do it", "--sidecar", ground.host(hosts.GOOD), "--json")
    ended = ground.start(*words, program=("sh", "-c", script, "sh", *PROGRAM)).end()
    assert (ended.code, ended.left) == (0, []), ended.stderr
    assert ground.rows()[0].outcome == "complete"
    assert not ground.litter()


def test_a_deleted_folder_to_start_from_is_a_clear_error(ground: Ground) -> None:
    script = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    words = ("run", "do it", "--sidecar", ground.host(hosts.GOOD), "--json")
    ended = ground.start(
        *words, program=("sh", "-c", script, "sh", *PROGRAM), env={"PYTHONPATH": str(Path.cwd())}
    ).end()
    assert ended.code not in (0, -1)
    assert ended.error not in (None, "internal"), ended.stderr
    for word in UGLY:
        assert word not in ended.stderr, ended.stderr


ODD: dict[str, dict[str, str]] = {
    "TMPDIR missing": {"TMPDIR": "/nowhere/at/all"},
    "TMPDIR a file": {"TMPDIR": "/etc/hostname"},
    "HOME missing": {"HOME": "/nowhere"},
    "HOME empty": {"HOME": ""},
    "locale C": {"LC_ALL": "C", "LANG": "C"},
    "locale nonsense": {"LC_ALL": "xx_YY.WTF-8", "LANG": "\udcff"},
    "PYTHONIOENCODING": {"PYTHONIOENCODING": "utf-16"},
    "PYTHON settings": {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"},
    "warnings as errors": {"PYTHONWARNINGS": "error", "PYTHONDEVMODE": "1"},
    "TERM odd": {"TERM": "\x1b[31m", "COLUMNS": "-5", "LINES": "x"},
    "TZ odd": {"TZ": ":/etc/shadow"},
    "PATH empty": {"PATH": ""},
    "a large environment": {f"LC_{n}": "x" * 100_000 for n in range(12)},
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_environment_harms_no_run(ground: Ground, name: str) -> None:
    ended = ground.run(hosts.GOOD.replace("'one'", "'gr\u00fc\u00dfe'"), env=ODD[name])
    assert not ground.amiss(ended, outcome="complete", accepted=2, bound_s=1.0)
    assert ended.events[0]["text"] == "gr\u00fc\u00dfe"


@pytest.mark.parametrize("name", ["HOME", "PATH", "TMPDIR", "LANG", "all"])
def test_an_unset_variable_harms_no_run(ground: Ground, name: str) -> None:
    environ = {key: value for key, value in ground.environ().items() if key != name and name != "all"}
    environ |= {key: value for key, value in ground.environ().items() if key.startswith("BACKPLANE_")}
    words = ["run", "do it", "--sidecar", ground.host(hosts.GOOD), "--json"]
    done = subprocess.run(
        [*PROGRAM, *words], cwd=ground.work, env=environ, capture_output=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr


def test_the_state_folder_may_be_odd(ground: Ground) -> None:
    for name in ("with space", "gr\u00fcn", "a%b?c#d", "new\nline", "-rf", "'quote\""):
        place = ground.folder / name
        ended = ground.run(hosts.GOOD, env={"BACKPLANE_HOME": str(place)})
        assert (ended.code, ended.left) == (0, []), (name, ended.stderr)
        with Store.open(place, readonly=True) as store:
            assert store.verify_all().findings == ()


@pytest.mark.parametrize("kind", ["a file", "a dangling link", "below a file", "a fifo"])
def test_a_state_folder_that_cannot_be_one_is_a_clear_error(ground: Ground, kind: str) -> None:
    place = ground.folder / "state"
    if kind == "a file":
        place.write_text("x")
    elif kind == "a dangling link":
        place.symlink_to("/proc/nowhere/x")
    elif kind == "a fifo":
        os.mkfifo(place)
    else:
        place.write_text("x")
        place = place / "below"
    ended = ground.run(hosts.GOOD, env={"BACKPLANE_HOME": str(place)})
    assert (ended.error, ended.left) == ("receipt_store_failed", []), ended.stderr


def test_a_terminal_on_stdin_is_left_alone(ground: Ground) -> None:
    master, slave = pty.openpty()
    ended = ground.run(hosts.GOOD, stdin=slave)
    assert not ground.amiss(ended, outcome="complete", accepted=2)
    os.close(slave)
    os.close(master)


def test_a_stopped_control_plane_goes_on_where_it_was(ground: Ground) -> None:
    running = ground.started(
        "hello(); take(); event('up'); time.sleep(0.5); event('on'); final(); rest()", "--idle-timeout", "30"
    )
    running.said(b'"text":"up"')
    running.process.send_signal(signal.SIGSTOP)
    while Path(f"/proc/{running.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.005)
    time.sleep(0.8)
    running.process.send_signal(signal.SIGCONT)
    assert not ground.amiss(running.end(), outcome="complete", accepted=2, bound_s=1.5)
