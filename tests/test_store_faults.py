"""Failing disks and killed writers: nothing acknowledged is lost, nothing lost was acknowledged."""

from __future__ import annotations

import os
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from backplane.errors import BackplaneError, StoreError
from backplane.receipts.database import ChainCheckpoint
from backplane.receipts.pieces import is_intact, seal
from backplane.receipts.store import Store
from backplane.runtime.state import StateFolder, left_behind, settle
from backplane.workspace import apply_patch
from tests.receipt_writer import delta, line, open_journal, receipt_of, stored_run, whole

ROOT = Path(__file__).parent.parent
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
    with file_size_limit(300_000), pytest.raises(StoreError, match="receipt_store_failed"):
        store_until_it_fails(store, "x" * 200_000)
    stored = len(store.list())
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
            assert store.list() == [row]
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
    assert store.list() == []


@pytest.mark.needs("mount")
def test_a_content_beside_the_patch_that_cannot_be_synced_fails_the_store(store: Store) -> None:
    journal = open_journal(store.home)
    sealed = seal(receipt_of(journal.trace, journal.run_id))
    contents = journal.folder / "patch.blobs"
    contents.mkdir()
    for number in range(300):
        (contents / f"{number}").write_bytes(b"x")
    unreadable = contents / "last"
    unreadable.symlink_to("nothing")
    journal.sync()
    unreadable.unlink()
    # A file of the kernel that no disk is behind: a real EINVAL from the real call.
    subprocess.run(["mount", "--bind", "/proc/version", str(contents / "299")], check=True)
    try:
        with pytest.raises(StoreError, match=r"receipt_store_failed.*EINVAL"):
            store.append(sealed, journal)
    finally:
        subprocess.run(["umount", str(contents / "299")], check=True)
    journal.close()
    assert store.list() == []


# Processes ------------------------------------------------------------------------------------------------------------


def test_what_a_host_put_beside_the_journal_keeps_nobody_from_sealing(store: Store) -> None:
    journal = open_journal(store.home)
    os.mkfifo(journal.folder / "pipe")
    (journal.folder / "loop").symlink_to("loop")
    (journal.folder / "there").symlink_to(journal.folder / "pipe")
    with closing(journal):
        journal.sync()


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
    for number in range(20):
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
    assert cut >= 10, "the kills must fall into runs, or this shows nothing"


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
@pytest.mark.parametrize("when", [2, 3, 4, 5, 7, 9, 12])
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


@pytest.mark.parametrize("sequence", [2**62, 2**63 - 2, -(2**62)])
def test_a_row_is_shown_wherever_somebody_has_moved_it(store: Store, sequence: int) -> None:
    first, last = stored_run(store, ["a"]), stored_run(store, ["b"])
    with closing(sqlite3.connect(store.home / "receipts.sqlite")) as foreign, foreign:
        foreign.execute("UPDATE receipts SET sequence = ? WHERE sequence = 2", (sequence,))
    stored_run(store, ["c"])
    assert {first.run_id, last.run_id} < {row.run_id for row in store.list()} == {row.run_id for row in store.scan()}
    assert {finding.code for finding in store.verify_all().findings} == {"receipt_chain_broken"}


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize(("version", "fact"), [(-1, "schema version -1"), (0, "EINVAL"), (1, "schema version 1")])
def test_a_table_that_is_not_of_the_version_it_says_is_named(
    tmp_path: Path, version: int, fact: str, readonly: bool
) -> None:
    Store.open(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "receipts.sqlite")) as foreign, foreign:
        foreign.execute(f"PRAGMA user_version={version}")
    with pytest.raises(StoreError, match=f"receipt_store_failed.*{fact}") as caught:
        Store.open(tmp_path, readonly=readonly)
    assert "another folder" in str(caught.value.hint)


def test_a_store_whose_writer_died_before_it_was_in_wal_mode_can_be_read(tmp_path: Path) -> None:
    with Store.open(tmp_path / "home") as store:
        stored_run(store, ["a"])
    path, copy = tmp_path / "home/receipts.sqlite", tmp_path / "copy.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as writer, writer:
        writer.execute("PRAGMA journal_mode=DELETE")
        writer.execute("PRAGMA cache_size=1")
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("CREATE TABLE x (y)")
        writer.execute("INSERT INTO x SELECT randomblob(100000) FROM receipts")
        shutil.copyfile(path, copy)
        shutil.copyfile(f"{path}-journal", f"{copy}-journal")
        writer.execute("ROLLBACK")
    copy.replace(path)
    Path(f"{copy}-journal").replace(f"{path}-journal")
    with Store.open(tmp_path / "home", readonly=True) as store:
        whole(store, receipts=1)


def test_a_loop_of_links_in_place_of_the_state_folder_is_an_error_and_no_empty_store(tmp_path: Path) -> None:
    (tmp_path / "home").symlink_to(tmp_path / "home")
    for readonly in (False, True):
        with pytest.raises(StoreError, match=r"receipt_store_failed.*ELOOP"):
            Store.open(tmp_path / "home", readonly=readonly)


def test_a_refusal_under_the_id_of_a_run_at_work_does_not_take_the_place_of_its_receipt(store: Store) -> None:
    """Two control planes may be given one id: the second has no journal, and nothing to say about the first's run."""
    journal = open_journal(store.home)
    journal.append(line(delta("a")))
    with pytest.raises(StoreError, match="its receipt is still to come"):
        store.append(seal(receipt_of([], journal.run_id, outcome="failed")))
    row = store.append(seal(receipt_of(journal.trace, journal.run_id)), journal)
    journal.close()
    assert (row.outcome, [one.run_id for one in store.list()]) == ("complete", [journal.run_id])
    whole(store, receipts=1)


def test_a_checkpoint_beyond_all_numbers_is_of_no_receipt_here(store: Store) -> None:
    stored_run(store, ["a"])
    for sequence in (10**20, -(10**20), 2**63 - 1, 0):
        findings = store.verify_all(ChainCheckpoint(sequence, "0" * 64, "2026-01-15T12:00:00Z")).findings
        assert [finding.code for finding in findings] == ["receipt_chain_broken"]


def test_nobody_says_what_a_pruned_run_changed(store: Store) -> None:
    row = stored_run(store, ["a"])
    assert store.patch(row) is None
    store.prune(keep=0)
    with pytest.raises(StoreError, match="was pruned"):
        store.patch(store.find(row.run_id))


@pytest.mark.needs("mount")
def test_what_is_stored_can_be_read_on_a_disk_that_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=400k"):
        home = tmp_path / "disk/home"
        with Store.open(home) as store:
            row = stored_run(store, ["a"])
        with (tmp_path / "disk/filler").open("wb", buffering=0) as file, suppress(OSError):
            while file.write(b"x" * 512):
                pass
        with pytest.raises(StoreError, match="ENOSPC"), Store.open(home) as store:
            stored_run(store, ["b"])
        with Store.open(home, readonly=True) as store:
            assert list(store.load(row.run_id).trace) == [delta("a")]
            whole(store, receipts=1)


def said_of(home: Path, run: str) -> list[object]:
    """What everything that looks at a state folder gives, or the code it fails with."""

    def reads(look: Callable[[Store], object]) -> object:
        with Store.open(home, readonly=True) as store:
            return look(store)

    looks: list[Callable[[], object]] = [
        lambda: reads(lambda store: [row.run_id for row in store.listed()]),
        lambda: reads(lambda store: left_behind(home, store)),
        lambda: reads(lambda store: [one.code for one in store.verify_all().findings]),
        lambda: reads(lambda store: store.patch(store.find(run))),
        lambda: settle(home),
        lambda: apply_patch(home / "runs" / run),
        lambda: StateFolder(home).store().close(),
    ]
    said: list[object] = []
    for look in looks:
        try:
            said.append(look())
        except BackplaneError as error:
            said.append(error.code)
    return said


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
@pytest.mark.parametrize("closed", ["home", "home/runs", "home/runs/RUN"])
def test_a_state_folder_of_another_user_is_an_error_in_words(tmp_path: Path, closed: str) -> None:
    home = tmp_path / "home"
    with Store.open(home) as store:
        run = stored_run(store, ["a"]).run_id
    said_of(home, run)  # Everything is loaded from here on: an interpreter may be closed to others, too.
    with Store.open(home, readonly=True):
        for path in (home, *home.rglob("*")):
            path.chmod(0o777 if path.is_dir() else 0o666)
        (tmp_path / closed.replace("RUN", run)).chmod(0o700)
        for above in (tmp_path, *list(tmp_path.parents)[:-2]):
            above.chmod(above.stat().st_mode | 0o055)
        os.seteuid(65534)
        try:
            said = said_of(home, run)
        finally:
            os.seteuid(0)
    failed, wrong = "receipt_store_failed", "execution_workspace_error"
    assert (
        said
        == {
            "home": [failed, failed, failed, failed, failed, wrong, failed],
            "home/runs": [[run], failed, ["receipt_hash_mismatch", failed], None, failed, wrong, failed],
            "home/runs/RUN": [[run], (), ["receipt_hash_mismatch", failed], None, [], wrong, None],
        }[closed]
    )
