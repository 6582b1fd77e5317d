"""Section Store of the fault catalogue: kills, full disks, failing calls, tampering, jumping clocks."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from backplane.receipts.database import ChainCheckpoint
from backplane.receipts.pieces import seal, without_trace
from backplane.receipts.store import Store
from tests.all.faults import hosts, sizes
from tests.all.faults.ground import GRACE_S, LADDER_S, OFF, PROGRAM, ROOT, UGLY, Ended, Ground, kill_9
from tests.receipt_writer import stored_run

STOP_S = GRACE_S + LADDER_S


# F08: kill -9 of the control plane ------------------------------------------------------------------------------------

BUSY = """
deaf(); hello(); take(); os.chdir(RUN["work_order"]["workspace"]["root"])
for n in range({events}):
    event(str(n))
    if n % 50 == 0:
        open(f"file-{{n}}", "w").write("x" * 1000); time.sleep(0.005)
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
final(); rest()
"""


@pytest.mark.timeout(1800)
def test_f08_kill_9_at_any_instant_loses_nothing_that_was_said(ground: Ground) -> None:
    rng = random.Random(8)
    rounds = sizes.of(4, 200)
    for number in range(60):
        (ground.work / f"kept-{number}").write_bytes(os.urandom(200))
    acknowledged: set[str] = set()
    cut = 0
    for _ in range(rounds):
        lane = rng.choice(["patch_first", "workspace_first"])
        running = ground.started(
            BUSY.format(events=rng.choice([10, 400, 4000])), *["--apply"][: lane == "workspace_first"]
        )
        time.sleep(rng.uniform(0.0, ground.base_s * 2.5))
        ended_before = running.process.poll() is not None
        if not ended_before:
            kill_9(running)
        ended = running.end()
        assert ended.left == []
        cut += not ended_before
        told = [line for line in ended.stdout.split(b"\n")[:-1] if line.startswith(b'{"t":"event",')]
        last = ended.messages[-1] if ended.messages else {}
        if last.get("t") == "final":
            acknowledged.add(last["ref_id"])
        # Of a run's folder in the making only its age tells that its maker is dead.
        for begun in (ground.home / "runs").glob(".*.new"):
            os.utime(begun, (0, 0))
        # The next start opens the store, seals the orphan and collects what lay about.
        after = ground.run(hosts.GOOD)
        assert not ground.amiss(after, outcome="complete", accepted=2, bound_s=5.0)
        acknowledged.add(after.messages[-1]["ref_id"])
        with Store.open(ground.home, readonly=True) as store:
            rows = {row.run_id: row for row in store.scan()}
            assert acknowledged <= rows.keys()
            if told and last.get("t") != "final":
                row = rows[json.loads(told[0])["ref_id"]]
                assert row.reason in ("interrupted", "complete")
                lines = list(store.trace(row).lines())
                assert [line.partition(b',"event":')[2][:-1] for line in told] == lines[: len(told)]
    assert ground.call("receipts", "verify").code == 0
    assert (ground.work / "a.txt").read_text() == "one\n"


def test_f08_a_kill_while_the_workspace_is_staged_leaves_nothing(ground: Ground) -> None:
    for number in range(3000):
        (ground.work / f"file-{number}").write_bytes(b"x" * 100)
    running = ground.started(hosts.GOOD)
    running.until(lambda: any((ground.home / "stage").glob("*/*")) if (ground.home / "stage").is_dir() else False)
    kill_9(running)
    running.end()
    ended = ground.run(hosts.GOOD)
    assert not ground.amiss(ended, outcome="complete", accepted=2, bound_s=5.0)
    assert [row.reason for row in ground.rows()] == ["complete", "interrupted"]


# F50: many writers, kills among them ----------------------------------------------------------------------------------


@pytest.mark.timeout(900)
def test_f50_eight_writers_with_kills_among_them_lose_nothing(tmp_path: Path) -> None:
    home, rng = tmp_path / "home", random.Random(50)
    command = [sys.executable, "-m", "tests.receipt_writer", str(home), "100000", "2"]
    logs: list[Path] = []

    def begin() -> subprocess.Popen[bytes]:
        logs.append(tmp_path / f"{len(logs)}.log")
        with logs[-1].open("wb") as log:
            return subprocess.Popen(command, cwd=ROOT, stdout=log)

    writers = [begin() for _ in range(8)]
    end_s = time.monotonic() + sizes.of(3, 300)
    kills = 0
    while time.monotonic() < end_s:
        time.sleep(rng.uniform(0.05, 0.6))
        place = rng.randrange(8)
        writers[place].kill()
        writers[place].wait(10)
        writers[place] = begin()
        kills += 1
    for writer in writers:
        writer.kill()
        writer.wait(10)
    said = [line.split() for log in logs for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    acked = {words[1]: words[2] for words in said if words[0] == "stored"}
    assert [words for words in said if words[0] == "error"] == []
    with Store.open(home) as store:
        store.recover()
        stored = {row.run_id: row.sha256 for row in store.scan()}
        lost = [run_id for run_id, sha256 in acked.items() if stored.get(run_id) != sha256]
        findings = store.verify_all().findings
        assert [row.sequence for row in store.scan()] == list(range(1, len(stored) + 1))
    assert (lost, findings) == ([], ())


# F51: disks that fail -------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[None]:
    place.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", str(place)], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("needs mount: " + done.stderr.decode().strip())
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def told_and_clear(ground: Ground, ended: Ended, codes: tuple[str | None, ...] = ("receipt_store_failed",)) -> None:
    """A run whose store failed: said so, in its code and words, with its result printed and nothing left."""
    assert ended.error in codes, (ended.error, ended.stderr[-1500:])
    assert (ended.code == 0) == (ended.error is None and ended.messages[-1]["t"] == "final")
    assert ended.left == []
    for word in UGLY:
        assert word not in ended.stderr + ended.stdout, (ended.stderr + ended.stdout)[-3000:]


FULL = (None, "receipt_store_failed", "workspace_staging_failed", "execution_workspace_error")
"""How a full disk may show itself; with nearly enough room, not at all."""

BULKY = "hello(); take()\nfor n in range({count}):\n    event('x' * 1000)\nfinal(); rest()"


@pytest.mark.needs("mount")
@pytest.mark.parametrize("free_kib", [0, 40, 200] if not sizes.LONG else list(range(0, 500, 12)))
def test_f51_a_disk_that_fills_at_any_stage_is_an_error_and_loses_no_output(ground: Ground, free_kib: int) -> None:
    with small_disk(ground.home, "size=1m"):
        first = ground.run(hosts.GOOD)
        assert not ground.amiss(first, outcome="complete", accepted=2)
        filler = ground.home / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(b"x" * 4096):
                pass
        os.truncate(filler, max(0, filler.stat().st_size - free_kib * 1024))
        ended = ground.run(BULKY.format(count=300))
        told_and_clear(ground, ended, FULL)
        assert ended.messages[-1]["receipt"]["receipt_sha256"]
        filler.unlink()
        again = ground.run(BULKY.format(count=100))
        assert not ground.amiss(again, outcome="complete", accepted=100, bound_s=1.0)
        known = {row.run_id for row in ground.rows()}
        assert first.messages[-1]["ref_id"] in known


@pytest.mark.needs("mount")
def test_f51_pruning_makes_room_on_a_disk_that_is_full(ground: Ground) -> None:
    with small_disk(ground.home, "size=4m"):
        for number in range(3):
            with Store.open(ground.home) as store:
                stored_run(store, [f"{number} " + "x" * 100_000])
        with (ground.home / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while file.write(b"x" * 512):
                pass
        pruned = ground.call("prune", "--keep", "1")
        assert (pruned.code, pruned.stdout[:18]) == (0, b"2 runs pruned; the"), pruned.stderr
        assert len(list((ground.home / "runs").glob("*/receipt.json"))) == 1
        assert ground.call("receipts", "verify").code == 0
        again = ground.call("prune", "--keep", "1")
        assert (again.code, again.stdout[:18]) == (0, b"0 runs pruned; the")


FILLING = """
hello(); take(); event('1')
try:
    with open(os.path.join({place}, "huge"), "wb", buffering=0) as file:
        while True:
            file.write(bytes(65536))
except OSError:
    pass
event('2'); final(); rest()
"""


@pytest.mark.needs("mount")
@pytest.mark.parametrize("place", ["RUN['work_order']['workspace']['root']", "os.environ['TMPDIR']"])
def test_f51_a_host_that_fills_the_disk_loses_its_own_work_alone(ground: Ground, place: str) -> None:
    with small_disk(ground.home, "size=8m"):
        ended = ground.run(FILLING.format(place=place))
        assert [row.run_id for row in ground.rows()] == [ended.messages[-1]["ref_id"]]
        assert ended.error in (None, "execution_workspace_error", "receipt_store_failed")
        assert not ground.amiss(ground.run(hosts.GOOD), outcome="complete", accepted=2)


def make_read_only(disk: Path) -> None:
    """The kernel lets go of what the dead had open in its own time, and a disk is busy until then."""
    end_s = time.monotonic() + 5
    while subprocess.run(["mount", "-o", "remount,ro", str(disk)], capture_output=True, check=False).returncode:
        assert time.monotonic() < end_s, "the disk stays busy: somebody has a file of it open"
        time.sleep(0.01)


@pytest.mark.needs("mount")
def test_f51_a_read_only_disk_is_an_error_before_anything_is_sent(ground: Ground) -> None:
    with small_disk(ground.home, "size=4m"):
        assert not ground.amiss(ground.run(hosts.GOOD), outcome="complete", accepted=2)
        make_read_only(ground.home)
        ended = ground.run("hello(); take(); event(); final(); rest()")
        told_and_clear(ground, ended)
        assert b"EROFS" in ended.stderr
        assert ended.events == []
        assert ground.call("receipts", "verify").code == 0


FAILING = {
    "fsync,fdatasync": ("EIO", range(1, 12)),
    "pwrite64": ("ENOSPC", range(1, 25)),
    "rename,renameat,renameat2": ("EIO", range(1, 5)),
    "mkdir,mkdirat": ("ENOSPC", range(1, 12)),
    "ftruncate": ("EIO", range(1, 4)),
    "write": ("ENOSPC", range(1, 40)),
    "flock": ("ENOLCK", range(1, 4)),
}


@pytest.mark.needs("strace")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("calls", FAILING)
def test_f51_whichever_call_fails_nothing_is_acknowledged_that_is_not_there(ground: Ground, calls: str) -> None:
    error, places = FAILING[calls]
    tried = places if sizes.LONG else [places[len(places) // 3]]
    inject = f"inject={calls}:error={error}:when="
    for place in tried:
        before = ("strace", "-f", "--seccomp-bpf", "-o", "/dev/null", "-e", f"trace={calls}", "-e", f"{inject}{place}")
        words = (
            "run",
            "do it",
            "--json",
            "--sidecar",
            ground.host("hello(); take(); event('1'); event('2'); final(); rest()"),
        )
        ended = ground.start(*words, program=(*before, *PROGRAM)).end()
        for word in UGLY:
            # The host's own words, when the call that fails is the host's or the guard's.
            assert word not in ended.stderr, (calls, place, ended.stderr[-2000:])
        assert ended.left == []
        after = ground.run(hosts.GOOD)
        assert not ground.amiss(after, outcome="complete", accepted=2, bound_s=2.0)
        known = {row.run_id: row for row in ground.rows()}
        if ended.code == 0:
            final = ended.messages[-1]
            assert known[final["ref_id"]].sha256 == final["receipt"]["receipt_sha256"], (calls, place)
        else:
            assert ended.error is not None or ended.code in (1, 3, 141), (calls, place, ended.code, ended.stderr)


# F52: tampering -------------------------------------------------------------------------------------------------------

Tamper = Callable[[sqlite3.Connection, random.Random, Path], None]


def _some(connection: sqlite3.Connection, rng: random.Random, count: int = 1) -> list[int]:
    return rng.sample([row[0] for row in connection.execute("SELECT sequence FROM receipts ORDER BY sequence")], count)


def _run(connection: sqlite3.Connection, home: Path, place: int) -> Path:
    run_id = connection.execute("SELECT run_id FROM receipts WHERE sequence = ?", (place,)).fetchone()[0]
    return home / "runs" / str(run_id)


def _flip(connection: sqlite3.Connection, rng: random.Random, home: Path) -> None:
    (place,) = _some(connection, rng)
    path = _run(connection, home, place) / rng.choice(["receipt.json", "trace.jsonl", "link.json"])
    data = bytearray(path.read_bytes())
    # The end of `link.json` says that the run is not pruned, which its receipt says, too.
    data[rng.randrange(len(data) - (0 if path.name != "link.json" else 20))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _delete(connection: sqlite3.Connection, rng: random.Random, home: Path) -> None:
    highest = connection.execute("SELECT max(sequence) FROM receipts").fetchone()[0]
    place = rng.randrange(1, highest)
    shutil.rmtree(_run(connection, home, place))
    connection.execute("DELETE FROM receipts WHERE sequence = ?", (place,))


def _swap(connection: sqlite3.Connection, rng: random.Random, home: Path) -> None:
    left, right = (_run(connection, home, place) / "receipt.json" for place in _some(connection, rng, 2))
    data = left.read_bytes()
    left.write_bytes(right.read_bytes())
    right.write_bytes(data)


def _rehash(connection: sqlite3.Connection, rng: random.Random, home: Path) -> None:
    with Store.open(home, readonly=True) as store:
        row = rng.choice(store.rows(1000)[1:])
        receipt = store.load(row.run_id)
        changed = seal(msgspec.structs.replace(receipt, outcome="failed", receipt_sha256=None))
        (store.folder(row.run_id) / "receipt.json").write_bytes(without_trace(changed))
        named = f"UPDATE receipts SET sha256 = '{changed.receipt_sha256}', outcome = 'failed' WHERE sequence = ?"
        connection.execute(named, (row.sequence,))
        (store.folder(row.run_id) / "link.json").write_bytes(msgspec.json.encode(store.find(row.run_id)))


def _cut(connection: sqlite3.Connection, rng: random.Random, home: Path) -> None:
    highest = connection.execute("SELECT max(sequence) FROM receipts").fetchone()[0]
    first = rng.randrange(2, highest + 1)
    for place in range(first, highest + 1):
        shutil.rmtree(_run(connection, home, place))
    connection.execute("DELETE FROM receipts WHERE sequence >= ?", (first,))


KINDS: dict[str, Tamper] = {
    "flip": _flip,
    "delete": _delete,
    "swap": _swap,
    "re-hash one": _rehash,
    "cut the tail": _cut,
}
RECEIPTS = 12


def _found(home: Path, checkpoint: ChainCheckpoint | None) -> bool:
    with Store.open(home, readonly=True) as store:
        return bool(store.verify_all(checkpoint).findings)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("index", ["with its index", "without"])
@pytest.mark.parametrize("kind", [*KINDS, "an older copy put back"])
def test_f52_whatever_is_tampered_with_is_found(ground: Ground, kind: str, index: str) -> None:
    home, rng = ground.folder / "first", random.Random(kind)
    older = ground.folder / "older"
    with Store.open(home) as store:
        for number in range(RECEIPTS):
            stored_run(store, [f"{number} {text}" for text in "abc"])
            if number == RECEIPTS // 2:
                store.prune(1000)
                shutil.copytree(home, older)
        checkpoint = store.checkpoint()
    places = sizes.of(4, 100)
    unseen_without = missed = 0
    for number in range(places):
        copy = ground.folder / f"copy-{number}"
        shutil.copytree(older if kind not in KINDS else home, copy)
        if kind in KINDS:
            with closing(sqlite3.connect(copy / "receipts.sqlite", isolation_level=None)) as connection:
                KINDS[kind](connection, rng, copy)
        if index == "without":
            (copy / "receipts.sqlite").unlink()
        unseen_without += not _found(copy, None)
        missed += not _found(copy, checkpoint)
        if number < places - 1:
            shutil.rmtree(copy)
    assert missed == 0
    assert (unseen_without == places) == (kind in ("cut the tail", "an older copy put back"))
    # The same through the front door, for the last one.
    kept = ground.folder / "checkpoint.json"
    kept.write_bytes(msgspec.json.encode(checkpoint))
    env = {"BACKPLANE_HOME": str(copy)}
    verified = ground.call("receipts", "verify", "--checkpoint", str(kept), env=env)
    assert (verified.code, verified.left) == (1, []), verified.stdout
    assert b"Traceback" not in verified.stderr
    assert b"give --checkpoint FILE" in ground.call("receipts", "verify", env=env).stdout


# F54: clocks ----------------------------------------------------------------------------------------------------------

JUMPY = """
import os, runpy, sys, time
real, real_ns = time.time, time.time_ns
def offset():
    try:
        return int(open(os.environ["LC_CLOCK"]).read() or 0)
    except OSError:
        return 0
time.time = lambda: real() + offset()
time.time_ns = lambda: real_ns() + offset() * 10**9
sys.argv = ["backplane", *sys.argv[1:]]
runpy.run_module("backplane", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("jump_s", [-3600, 86_400], ids=["back an hour", "forward a day"])
def test_f54_a_wall_clock_that_jumps_changes_no_duration_and_no_order(ground: Ground, jump_s: int) -> None:
    clock, program = ground.folder / "clock", ground.folder / "jumpy.py"
    program.write_text(JUMPY)
    jumpy = (sys.executable, "-P", str(program))
    env = OFF | {"LC_CLOCK": str(clock), "PYTHONPATH": str(ROOT)}
    jump = f"open({str(clock)!r}, 'w').write('{jump_s}')"
    body = f"hello(); take(); event('a'); {jump}; event('b'); time.sleep(0.4); final(); rest()"
    words = ("run", "do it", "--sidecar", ground.host(body), "--json", "--timeout", "20")
    first = ground.start(*words, program=jumpy, env=env).end()
    assert not ground.amiss(first, outcome="complete", accepted=2, bound_s=1.0)
    assert 400 <= first.receipt["meta"]["duration_ms"] < 20_000
    meta = first.receipt["meta"]
    assert datetime.fromisoformat(meta["started_at"]) <= datetime.fromisoformat(meta["finished_at"])
    clock.write_text("0")
    second = ground.start(*words, program=jumpy, env=env).end()
    assert not ground.amiss(second, outcome="complete", accepted=2, bound_s=1.0)
    assert [row.run_id for row in ground.rows()] == [ended.messages[-1]["ref_id"] for ended in (second, first)]
    assert all(row.duration_ms >= 0 for row in ground.rows())
