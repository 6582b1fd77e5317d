"""Failing disks and killed writers: nothing acknowledged is lost, nothing lost was acknowledged."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from backplane.errors import StoreError
from backplane.receipts.pieces import is_intact, seal
from backplane.receipts.store import Store
from tests.receipt_writer import delta, line, open_journal, receipt_of, stored_run, whole

ROOT = Path(__file__).parents[3]
WRITER_S_MAX = 60


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "home") as opened:
        yield opened


# Disks that fail ------------------------------------------------------------------------------------------------------


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def store_until_it_fails(store: Store, text: str) -> None:
    for _ in range(200):
        stored_run(store, [text], usage_raw=text)


def test_a_journal_that_cannot_grow_keeps_whole_events_and_goes_on_later(store: Store) -> None:
    journal = open_journal(store.home)
    event = line(delta("x" * 1_000))
    journal.append(event)
    with file_size_limit(len(event) + 100), pytest.raises(StoreError, match=r"receipt_store_failed.*EFBIG"):
        journal.append(event)
    assert (journal.folder / "trace.jsonl").stat().st_size == len(event)
    journal.append(event)
    store.append(seal(receipt_of(journal.trace, journal.run_id)), journal)
    journal.close()
    whole(store, receipts=1)


def test_a_store_that_cannot_grow_acknowledges_nothing_and_goes_on_later(store: Store) -> None:
    stored_run(store, ["a"])
    journal = open_journal(store.home)
    sealed = seal(receipt_of(journal.trace, journal.run_id, usage_raw="x" * 200_000))
    with file_size_limit(150_000), pytest.raises(StoreError, match="receipt_store_failed"):
        store_until_it_fails(store, "x" * 200_000)
    stored = len(store.rows())
    store.append(sealed, journal)
    journal.close()
    whole(store, receipts=stored + 1)


def test_nothing_is_left_of_a_copy_that_could_not_be_written(store: Store) -> None:
    sealed = seal(receipt_of([delta("x" * 1_000)] * 300))
    with file_size_limit(200_000), pytest.raises(StoreError, match=r"receipt_store_failed.*EFBIG"):
        store.append(sealed)
    assert list((store.home / "runs").iterdir()) == []
    store.append(sealed)
    whole(store, receipts=1)


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[None]:
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs mount: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.needs("mount")
def test_a_full_disk_loses_nothing_acknowledged_and_works_again_when_freed(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=1m"), Store.open(tmp_path / "disk") as store:
        stored_run(store, ["a"])
        filler = tmp_path / "disk" / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(b"x" * 4_096):
                pass
        with pytest.raises(StoreError, match=r"receipt_store_failed.*ENOSPC"):
            store_until_it_fails(store, "b" * 3_000)
        acknowledged = [row.run_id for row in store.scan()]
        whole(store, receipts=len(acknowledged))
        filler.unlink()
        store.recover()
        acknowledged.append(stored_run(store, ["c"]).run_id)
        assert set(acknowledged) <= {row.run_id for row in store.scan()}
        assert store.verify_all().findings == ()


@pytest.mark.needs("mount")
def test_a_read_only_disk_can_be_read_and_says_so_when_written(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, "size=2m"):
        with Store.open(disk) as store:
            row = stored_run(store, ["a"])
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with Store.open(disk, readonly=True) as store:
            assert store.rows() == [row]
            whole(store, receipts=1)
            assert store.orphans() == []
        with pytest.raises(StoreError, match=r"receipt_store_failed.*EROFS"):
            Store.open(disk)
        with pytest.raises(StoreError, match=r"receipt_store_failed.*EROFS"):
            open_journal(disk)


def test_after_a_failed_fsync_the_journal_is_not_trusted_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_journal(store.home)
    sealed = seal(receipt_of(journal.trace, journal.run_id))
    pipe, other = os.pipe()
    kept = os.dup(journal._trace)
    os.dup2(other, journal._trace)  # a pipe cannot be synced: a real EINVAL from the real call
    with pytest.raises(StoreError, match=r"receipt_store_failed.*EINVAL"):
        store.append(sealed, journal)
    os.dup2(kept, journal._trace)
    with pytest.raises(StoreError, match="could not be synced before"):
        store.append(sealed, journal)
    for fd in (pipe, other, kept):
        os.close(fd)
    journal.close()
    assert store.rows() == []


# Processes ------------------------------------------------------------------------------------------------------------


def writer(home: Path, runs: int, events_each: int, *before: str) -> subprocess.Popen[str]:
    command = [*before, sys.executable, "-m", "tests.receipt_writer", str(home), str(runs), str(events_each)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def promised(lines: list[str]) -> tuple[dict[str, str], dict[str, int]]:
    """What a writer said before it ended: stored receipts by run, journalled events by run."""
    stored: dict[str, str] = {}
    events: dict[str, int] = {}
    for words in (text.split() for text in lines if text.endswith("\n")):
        if words[0] == "stored":
            stored[words[1]] = words[2]
        elif words[0] == "event":
            events[words[1]] = int(words[2])
    return stored, events


def check_promises(home: Path, lines: list[str]) -> None:
    stored, events = promised(lines)
    with Store.open(home) as store:
        store.recover()
        assert store.verify_all().findings == ()
        rows = {row.run_id: row for row in store.scan()}
        for run_id, sha256 in stored.items():
            assert rows[run_id].sha256 == sha256
        for run_id, count in events.items():
            assert rows[run_id].trace_count >= count
            assert rows[run_id].reason == "complete" or run_id not in stored
            assert is_intact(store.load(run_id))
        assert store.orphans() == []


def test_nothing_promised_is_lost_when_the_writer_is_killed(tmp_path: Path) -> None:
    rng = random.Random(20)
    cut = 0
    for number in range(10):
        home = tmp_path / str(number % 4)
        child = writer(home, 1_000, 30)
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(rng.randrange(1, 120))]
        child.kill()
        lines += child.stdout.readlines()
        child.stdout.close()
        assert child.wait(WRITER_S_MAX) < 0
        check_promises(home, lines)
        stored, events = promised(lines)
        cut += len(events.keys() - stored.keys())
    assert cut >= 5, "the kills must fall into runs, or this shows nothing"


def test_four_writers_at_once_lose_nothing_and_keep_one_chain(tmp_path: Path) -> None:
    children = [writer(tmp_path, 50, 2) for _ in range(4)]
    said = [child.communicate(timeout=WRITER_S_MAX)[0].splitlines(keepends=True) for child in children]
    assert [child.returncode for child in children] == [0] * 4
    for lines in said:
        assert len(promised(lines)[0]) == 50
        check_promises(tmp_path, lines)
    with Store.open(tmp_path) as store:
        assert [row.sequence for row in store.scan()] == list(range(1, 201))


@pytest.mark.needs("strace")
@pytest.mark.parametrize("calls", ["fsync,fdatasync:error=EIO", "write,pwrite64:error=ENOSPC"])
@pytest.mark.parametrize("when", [3, 5, 9])
def test_whatever_call_fails_nothing_is_acknowledged_that_is_not_there(tmp_path: Path, calls: str, when: int) -> None:
    home = tmp_path / "home"
    with Store.open(home):
        pass
    names = calls.partition(":")[0]
    strace = ["strace", "-f", "-o", "/dev/null", "-e", f"trace={names}", "-e", f"inject={calls}:when={when}"]
    child = writer(home, 3, 1, *strace)
    output, _ = child.communicate(timeout=WRITER_S_MAX)
    check_promises(home, [text for text in output.splitlines(keepends=True) if text.startswith(("stored", "event"))])
    assert "Traceback" not in output


def test_a_lock_is_not_kept_by_a_child_of_the_writer(store: Store) -> None:
    journal = open_journal(store.home)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    journal.close()
    try:
        assert [orphan.run_id for orphan in store.orphans()] == [journal.run_id]
    finally:
        child.communicate(b"\n", timeout=WRITER_S_MAX)


def test_a_process_that_ends_does_not_take_the_log_of_one_that_has_two_stores_open(store: Store) -> None:
    stored_run(store, ["hello"])
    with Store.open(store.home):
        pass
    other = "import sys, pathlib, backplane.receipts.store as r; r.Store.open(pathlib.Path(sys.argv[1])).close()"
    subprocess.run([sys.executable, "-c", other, str(store.home)], cwd=ROOT, check=True, timeout=WRITER_S_MAX)
    run = stored_run(store, ["again"])
    with Store.open(store.home, readonly=True) as reader:
        assert reader.has(run.run_id)


def test_a_refusal_under_the_id_of_a_run_at_work_does_not_take_the_place_of_its_receipt(store: Store) -> None:
    """Two control planes may be given one id: the second has no journal, and nothing to say about the first's run."""
    journal = open_journal(store.home)
    journal.append(line(delta("a")))
    with pytest.raises(StoreError, match="its receipt is still to come"):
        store.append(seal(receipt_of([], journal.run_id, outcome="failed")))
    row = store.append(seal(receipt_of(journal.trace, journal.run_id)), journal)
    journal.close()
    assert (row.outcome, [one.run_id for one in store.rows()]) == ("complete", [journal.run_id])
    whole(store, receipts=1)


def test_nobody_says_what_a_pruned_run_changed(store: Store) -> None:
    row = stored_run(store, ["a"])
    assert store.patch(row) is None
    store.prune(keep=0)
    with pytest.raises(StoreError, match="was pruned"):
        store.patch(store.find(row.run_id))


KEEPS = """
import sys
from pathlib import Path
from backplane.receipts.store import Store
from tests.receipt_writer import stored_run
with Store.open(Path(sys.argv[1])) as store:
    store.recover()
    for number in range(2):
        print("stored", stored_run(store, [str(number)]).run_id, flush=True)
    store.prune(keep=1)
"""
DISK_CALLS = "fsync,fdatasync,rename,unlink,unlinkat,pwrite64,ftruncate,mkdir,rmdir"


@pytest.mark.needs("strace")
@pytest.mark.timeout(300)
def test_a_kill_before_any_change_of_the_disk_leaves_a_store_that_verifies(tmp_path: Path) -> None:
    """While a dead run is sealed, two runs are stored and the older ones pruned; with the index and without it."""
    for step in range(1, 200):
        home = tmp_path / str(step)
        with Store.open(home) as store:
            first = stored_run(store, ["first"]).run_id
            journal = open_journal(home)
            journal.append(line(delta("cut off")))
            journal.close()
        kill = ["-e", f"trace={DISK_CALLS}", "-e", f"inject={DISK_CALLS}:signal=KILL:when={step}"]
        command = ["strace", "-f", "-qq", "-o", "/dev/null", *kill, sys.executable, "-c", KEEPS, str(home)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WRITER_S_MAX, check=False)
        said = [text.split()[1] for text in done.stdout.splitlines()]
        for _ in ("with the index", "without it"):
            with Store.open(home) as store:
                assert store.recover().problems == (), step
                assert store.verify_all().findings == (), step
                assert {first, journal.run_id, *said} <= {row.run_id for row in store.scan()}, step
            (home / "receipts.sqlite").unlink()
        if done.returncode == 0:
            break
    assert step > 30
