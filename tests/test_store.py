"""The store: what is acknowledged is there, what was changed is found, what was cut off is recovered."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from backplane.contract.canonical import decode_inexact, sha256_hex
from backplane.contract.events import Warned
from backplane.contract.receipt import BackendIdentity, Receipt, Verification, receipt_hash, verify_bytes
from backplane.errors import ConfigError, ContractError, StoreError
from backplane.receipts import (
    Checkpoint,
    Journal,
    Orphan,
    Store,
    bundle,
    canonical_chunks,
    export,
    import_bundle,
    is_intact,
    is_live,
    seal,
)
from backplane.receipts import database as store_file
from backplane.receipts.recovery import ABANDONED_S
from tests.receipt_writer import ORDER, TS, delta, line, open_journal, receipt_of, stored_run

ROOT = Path(__file__).parent.parent
WRITER_S_MAX = 60


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "home") as opened:
        yield opened


def whole(store: Store, *, receipts: int) -> None:
    """Check that the store holds so many receipts and that every one of them is right."""
    audit = store.verify_all()
    assert audit.findings == ()
    assert audit.checked == receipts


# In and out -----------------------------------------------------------------------------------------------------------


def test_a_stored_receipt_comes_back_whole(store: Store) -> None:
    row = stored_run(store, ["a", "b"])
    receipt = store.load(row.run_id)
    assert receipt.trace == [delta("a"), delta("b")]
    assert receipt_hash(receipt) == receipt.receipt_sha256 == row.sha256
    assert (row.sequence, row.trace_count, row.reason, row.backend) == (1, 2, "complete", "mock")
    assert store.verify(row.run_id) == []
    assert verify_bytes(b"".join(canonical_chunks(receipt))) is None


def test_a_refused_run_without_a_journal_is_stored_too(store: Store) -> None:
    row = store.append(seal(receipt_of([], outcome="failed", usage_raw=None)))
    assert store.load(row.run_id).trace == []
    assert row.reason is None
    assert not store.folder(row.run_id).exists()
    whole(store, receipts=1)


def test_a_receipt_with_events_and_no_journal_gets_one(store: Store) -> None:
    row = store.append(seal(receipt_of([delta("a")])))
    assert (store.folder(row.run_id) / "trace.jsonl").read_bytes() == line(delta("a"))
    whole(store, receipts=1)


def test_an_unsealed_receipt_a_foreign_trace_and_a_second_receipt_of_a_run_are_refused(store: Store) -> None:
    row = stored_run(store, ["a"])
    journal = open_journal(store.home)
    journal.append(line(delta("a")))
    refused: list[tuple[str, Callable[[], object]]] = [
        ("not sealed", lambda: store.append(receipt_of([]))),
        ("not the journal's", lambda: store.append(seal(receipt_of([delta("a")])), journal)),
        ("stored already", lambda: store.append(seal(receipt_of([], row.run_id)))),
        ("stored already", lambda: store.append(seal(receipt_of(journal.trace, row.run_id)), journal)),
    ]
    for text, attempt in refused:
        with pytest.raises(StoreError, match=f"receipt_store_failed.*{text}"):
            attempt()
    journal.discard()
    whole(store, receipts=1)


def test_the_newest_receipt_is_listed_first_and_pages_go_on(store: Store) -> None:
    runs = [stored_run(store, [str(number)]).run_id for number in range(5)]
    assert [row.run_id for row in store.list()] == runs[::-1]
    first = store.list(2)
    assert [row.run_id for row in first + store.list(10, before=first[-1].sequence)] == runs[::-1]
    assert [row.run_id for row in store.scan()] == runs


def test_a_run_is_found_by_an_unambiguous_beginning(store: Store) -> None:
    ids = ["aaaa1111-0000-4000-8000-000000000000", "aaaa2222-0000-4000-8000-000000000000"]
    for run_id in ids:
        store.append(seal(receipt_of([], run_id)))
    assert store.find("AAAA1").run_id == ids[0]
    assert store.find(ids[1]).run_id == ids[1]
    for wanted, text in (("aaaa", "aaaa1111.*aaaa2222"), ("aaa", "too short"), ("bbbb", "no receipt")):
        with pytest.raises(ConfigError, match=f"config_invalid.*{text}"):
            store.find(wanted)


def test_many_runs_of_one_beginning_are_not_all_printed(store: Store) -> None:
    for number in range(7):
        store.append(seal(receipt_of([], f"aaaa{number}000-0000-4000-8000-000000000000")))
    with pytest.raises(ConfigError, match="and more"):
        store.find("aaaa")


def test_reading_only_makes_nothing_and_sees_what_others_store(tmp_path: Path) -> None:
    with Store.open(tmp_path / "none", readonly=True) as empty:
        assert empty.list() == []
        assert empty.checkpoint() is None
    assert not (tmp_path / "none").exists()
    with Store.open(tmp_path) as writer, Store.open(tmp_path, readonly=True) as reader:
        row = stored_run(writer, ["a"])
        assert reader.list() == [row]
        whole(reader, receipts=1)
        with pytest.raises(StoreError, match="EROFS"):
            reader.append(seal(receipt_of([])))


def test_only_the_owner_can_read_the_store(tmp_path: Path) -> None:
    with Store.open(tmp_path / "home") as store:
        stored_run(store, ["a"])
        modes = {path.stat().st_mode & 0o077 for path in (tmp_path / "home").rglob("*")}
    assert modes == {0}
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700


def test_threads_of_one_store_do_not_disturb_each_other(store: Store) -> None:
    def write() -> None:
        for number in range(10):
            stored_run(store, [str(number)])

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WRITER_S_MAX)
    whole(store, receipts=40)


def test_a_pruned_receipt_keeps_its_place_in_the_chain(store: Store) -> None:
    rows = [stored_run(store, [str(number)]) for number in range(4)]
    assert store.prune(keep=1) == 3
    assert store.prune(keep=1) == 0
    audit = store.verify_all()
    assert (audit.findings, audit.checked, audit.pruned) == ((), 1, 3)
    assert not store.folder(rows[0].run_id).exists()
    assert store.folder(rows[3].run_id).exists()
    for ask in (store.load, store.verify):
        with pytest.raises(StoreError, match="pruned"):
            ask(rows[0].run_id)
    assert store.recover().rows == ()


# Schema ---------------------------------------------------------------------------------------------------------------

V1 = """
CREATE TABLE receipts (sequence INTEGER PRIMARY KEY, run_id TEXT NOT NULL UNIQUE, work_order_id TEXT NOT NULL,
 backend TEXT NOT NULL, outcome TEXT NOT NULL, reason TEXT, started_at TEXT NOT NULL, finished_at TEXT NOT NULL,
 duration_ms INTEGER NOT NULL, sha256 TEXT NOT NULL, body BLOB NOT NULL, trace_count INTEGER NOT NULL,
 trace_bytes INTEGER NOT NULL, trace_sha256 TEXT NOT NULL);
INSERT INTO receipts SELECT sequence, run_id, work_order_id, backend, outcome, reason, started_at, finished_at,
 duration_ms, sha256, body, trace_count, trace_bytes, trace_sha256 FROM new.receipts;
PRAGMA user_version=1;
"""


@pytest.mark.parametrize("readonly", [False, True])
def test_a_store_of_version_1_is_opened_and_chained(tmp_path: Path, readonly: bool) -> None:
    with Store.open(tmp_path) as store:
        for number in range(3):
            stored_run(store, [str(number)])
        before = store.list()
    new, old = tmp_path / "receipts.sqlite", tmp_path / "old.sqlite"
    with sqlite3.connect(old, isolation_level=None) as connection:
        connection.execute("ATTACH ? AS new", (str(new),))
        connection.executescript(V1)
    connection.close()
    for path in tmp_path.glob("receipts.sqlite*"):
        path.unlink()
    old.rename(new)
    with Store.open(tmp_path, readonly=readonly) as store:
        assert store.list() == before
        whole(store, receipts=3)
        if not readonly:
            stored_run(store, ["after"])
            whole(store, receipts=4)


@pytest.mark.parametrize("readonly", [False, True])
def test_a_store_of_a_newer_version_is_left_alone(tmp_path: Path, readonly: bool) -> None:
    with Store.open(tmp_path) as store:
        stored_run(store, ["a"])
    with sqlite3.connect(tmp_path / "receipts.sqlite") as connection:
        connection.execute("PRAGMA user_version=9")
    connection.close()
    with pytest.raises(StoreError, match=r"version 9.*up to 2"):
        Store.open(tmp_path, readonly=readonly)


def test_a_file_that_is_no_store_is_named(tmp_path: Path) -> None:
    (tmp_path / "receipts.sqlite").write_bytes(b"no database at all, but long enough" * 40)
    for readonly in (False, True):
        with pytest.raises(StoreError, match=r"receipts.sqlite.*SQLITE_NOTADB"):
            Store.open(tmp_path, readonly=readonly)


MOUNTS = """22 1 254:0 / / rw - ext4 /dev/vda rw
30 22 0:40 / /home rw,relatime shared:1 - nfs4 server:/home rw
31 30 0:41 / /home/me/local\\040disk rw - xfs /dev/sdb rw
32 22 0:42 / /mnt/win rw - cifs //server/share rw
33 22 0:43 / /mnt/host rw - 9p share rw
a line of another kind
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/me", "nfs4"),
        ("/home", "nfs4"),
        ("/homes", None),
        ("/home/me/local disk/x", None),
        ("/mnt/win/a", "cifs"),
        ("/mnt/host/a", None),
        ("/var", None),
    ],
)
def test_network_file_systems_are_told_from_local_ones(path: str, kind: str | None) -> None:
    assert store_file.network_kind(Path(path), MOUNTS) == kind
    assert store_file.network_kind(Path(path), "") is None


def test_a_store_on_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text("22 1 0:40 / / rw - nfs4 server:/ rw\n")
    monkeypatch.setattr(store_file, "_MOUNTS", mounts)
    with pytest.raises(StoreError, match="network file system") as caught:
        Store.open(tmp_path / "home")
    assert "BACKPLANE_HOME" in (caught.value.hint or "")


# Tampering ------------------------------------------------------------------------------------------------------------

_SWAP = """UPDATE receipts SET {0} = (SELECT other.{0} FROM receipts other WHERE other.sequence = 7 - receipts.sequence)
 WHERE sequence IN (3, 4)"""
TAMPERINGS = {
    "flip in a body": "UPDATE receipts SET body = replace(body, 'mock', 'mick') WHERE sequence = 3",
    "blank in a body": "UPDATE receipts SET body = replace(body, '{', '{ ') WHERE sequence = 3",
    "no body": "UPDATE receipts SET body = x'7b7d' WHERE sequence = 3",
    "other outcome": "UPDATE receipts SET outcome = 'failed' WHERE sequence = 3",
    "other reason": "UPDATE receipts SET reason = NULL WHERE sequence = 3",
    "fewer events": "UPDATE receipts SET trace_count = 1 WHERE sequence = 3",
    "more events": "UPDATE receipts SET trace_count = 3 WHERE sequence = 3",
    "fewer bytes": "UPDATE receipts SET trace_bytes = trace_bytes / 2 WHERE sequence = 3",
    "another trace hash": "UPDATE receipts SET trace_sha256 = sha256 WHERE sequence = 3",
    "a word for a number": "UPDATE receipts SET trace_count = 'x', duration_ms = 'y' WHERE sequence = 3",
    "bytes for a word": "UPDATE receipts SET run_id = x'ff00', backend = x'ff' WHERE sequence = 3",
    "delete": "DELETE FROM receipts WHERE sequence = 3",
    "delete the first": "DELETE FROM receipts WHERE sequence = 1",
    "swap the bodies": _SWAP.format("body"),
    "renumber": "UPDATE receipts SET sequence = 9 WHERE sequence = 3",
    "duplicate": """INSERT INTO receipts SELECT 7, 'dddd' || substr(run_id, 5), work_order_id, backend, outcome, reason,
 started_at, finished_at, duration_ms, sha256, body, trace_count, trace_bytes, trace_sha256, previous_link, link
 FROM receipts WHERE sequence = 6""",
    "link": "UPDATE receipts SET link = previous_link WHERE sequence = 3",
}


@pytest.fixture
def six(store: Store) -> Store:
    for number in range(6):
        stored_run(store, [f"{number}a", f"{number}b"])
    return store


def tamper(store: Store, sql: str) -> None:
    connection = sqlite3.connect(store.home / "receipts.sqlite")
    with connection:
        connection.execute(sql)
    connection.close()


@pytest.mark.parametrize("name", TAMPERINGS)
def test_verify_finds_a_changed_row(six: Store, name: str) -> None:
    whole(six, receipts=6)
    tamper(six, TAMPERINGS[name])
    assert six.verify_all().findings


def test_a_changed_run_id_leads_to_no_other_folder(six: Store, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    tamper(six, "UPDATE receipts SET run_id = '../../precious', work_order_id = run_id WHERE sequence = 3")
    with pytest.raises(StoreError, match="no run id"):
        six.load("../../precious")
    assert "no run id" in "".join(finding.fact for finding in six.verify("../../precious"))
    assert six.prune(keep=0) == 6
    assert precious.exists()


def test_a_row_without_a_receipt_is_a_store_error(six: Store) -> None:
    row = six.list()[3]
    tamper(six, TAMPERINGS["no body"])
    with pytest.raises(StoreError, match="holds no receipt"):
        six.load(row.run_id)
    tamper(six, TAMPERINGS["delete"])
    with pytest.raises(StoreError, match="gone"):
        six.body(row)


def test_verify_finds_a_receipt_that_was_changed_and_hashed_anew(six: Store) -> None:
    row = six.list()[3]
    forged = seal(msgspec.structs.replace(six.load(row.run_id), outcome="failed"))
    body = b"".join(canonical_chunks(msgspec.structs.replace(forged, trace=[])))
    connection = sqlite3.connect(six.home / "receipts.sqlite")
    with connection:
        connection.execute(
            "UPDATE receipts SET body = ?, sha256 = ?, outcome = 'failed' WHERE sequence = ?",
            (body, forged.receipt_sha256, row.sequence),
        )
    connection.close()
    assert [finding.code for finding in six.verify(row.run_id)] == ["receipt_chain_broken"]
    assert [finding.code for finding in six.verify_all().findings] == ["receipt_chain_broken"]


@pytest.mark.parametrize("damage", ["flip", "cut", "grown", "gone", "swapped"])
def test_verify_finds_a_changed_trace(six: Store, damage: str) -> None:
    row, other = six.list()[2], six.list()[3]
    path = six.folder(row.run_id) / "trace.jsonl"
    data = path.read_bytes()
    changes: dict[str, Callable[[], object]] = {
        "flip": lambda: path.write_bytes(data.replace(b"3a", b"3x")),
        "cut": lambda: path.write_bytes(data[: len(data) // 2]),
        "grown": lambda: path.write_bytes(data + line(delta("more"))),
        "gone": path.unlink,
        "swapped": lambda: path.write_bytes((six.folder(other.run_id) / "trace.jsonl").read_bytes()),
    }
    changes[damage]()
    assert six.verify(row.run_id)
    assert {finding.run_id for finding in six.verify_all().findings} == {row.run_id}


def test_a_flip_anywhere_in_a_receipt_is_found(store: Store) -> None:
    row = stored_run(store, ["some text"], usage_raw={"a": [1.5, None, "b"]})
    body = store.body(row)
    rng = random.Random(4)
    for place in rng.sample(range(len(body)), 100):
        flipped = body[:place] + bytes([body[place] ^ 1 << rng.randrange(8)]) + body[place + 1 :]
        connection = sqlite3.connect(store.home / "receipts.sqlite")
        with connection:
            connection.execute("UPDATE receipts SET body = ?", (flipped,))
        connection.close()
        assert store.verify(row.run_id), place


def test_a_cut_tail_and_an_older_copy_are_seen_with_a_checkpoint_alone(six: Store, tmp_path: Path) -> None:
    shutil.copytree(six.home, tmp_path / "older")
    stored_run(six, ["7"])
    checkpoint = six.checkpoint()
    assert checkpoint is not None
    assert six.verify_all(checkpoint).findings == ()
    assert six.verify_all(checkpoint).rollback_checked
    with Store.open(tmp_path / "older") as older:
        assert older.verify_all().findings == ()
        assert not older.verify_all().rollback_checked
        assert [finding.code for finding in older.verify_all(checkpoint).findings] == ["receipt_chain_broken"]
        stored_run(older, ["another seventh"])
        assert [finding.code for finding in older.verify_all(checkpoint).findings] == ["receipt_chain_broken"]
    tamper(six, "DELETE FROM receipts WHERE sequence = 7")
    assert six.verify_all().findings == ()
    assert [finding.code for finding in six.verify_all(checkpoint).findings] == ["receipt_chain_broken"]
    assert msgspec.json.decode(msgspec.json.encode(checkpoint), type=Checkpoint) == checkpoint


def test_the_patch_beside_a_receipt_is_checked(store: Store) -> None:
    diff = "diff --git a/a b/a\n"
    row = stored_run(store, ["a"], verification=Verification(harness_ok=True, git_diff=diff))
    path = store.folder(row.run_id) / "patch.diff"
    assert store.patch(row) is None
    assert store.verify(row.run_id) == []
    path.write_text(diff)
    assert store.patch(row) == path
    assert store.verify(row.run_id) == []
    path.write_text("another")
    assert "the patch hashes to" in store.verify(row.run_id)[0].fact
    claimed = stored_run(store, ["a"], usage_raw={"backplane": {"patch": {"sha256": "00", "bytes": 1}}})
    assert "the patch cannot be read" in store.verify(claimed.run_id)[0].fact


# Orphans --------------------------------------------------------------------------------------------------------------


def cut_off(home: Path, *lines: bytes, torn: bytes = b"", hello: bool = True) -> str:
    """Leave what a killed control plane leaves: a journal that nobody holds."""
    journal = open_journal(home)
    if hello:
        backend = {"id": "mock", "backend_version": "2"}
        said = {"backend": backend, "capabilities": {"streaming": "native", "x": 1}, "mode": "passthrough"}
        journal.note({"fact": "hello", "hello": said})
    for written in lines:
        journal.append(written)
    journal.close()
    with (journal.folder / "trace.jsonl").open("ab") as file:
        file.write(torn)
    return journal.run_id


def test_an_orphan_is_sealed_as_interrupted_with_all_its_events(store: Store) -> None:
    usage = line(Warned(ts=TS, message="u", ext={"usage": {"input_tokens": 7}}))
    run_id = cut_off(store.home, line(delta("a")), usage, torn=b'{"text":"half')
    assert [orphan.run_id for orphan in store.orphans()] == [run_id]
    recovery = store.recover()
    assert [row.run_id for row in recovery.rows] == [run_id]
    assert recovery.problems == ()
    receipt = store.load(run_id)
    assert (receipt.outcome, receipt.mode, len(receipt.trace)) == ("partial", "passthrough", 2)
    assert receipt.trace[0] == delta("a")
    assert receipt.backend == BackendIdentity("mock", "2")
    assert receipt.capabilities == {"streaming": "native"}
    assert receipt.usage.input_tokens == 7
    assert receipt.meta.work_order_id == ORDER.id
    assert receipt.meta.started_at == "2025-01-15T12:00:00Z"
    assert receipt.meta.duration_ms >= 0
    added = receipt.backplane
    assert added["end"] == {"reason": "interrupted"}
    assert added["durability"] == {"journal": "not_synced", "cut_bytes": 13, "machine_restarted": False}
    assert (added["usage"], added["capabilities"]) == ({"input_tokens": "claimed"}, {"x": 1})
    assert not receipt.verification.harness_ok
    whole(store, receipts=1)
    assert store.orphans() == []
    assert store.recover().rows == ()


@pytest.mark.parametrize("torn", [b"", b'{"text":', b"\x00" * 100, b"{}\n" + line(delta("after the damage"))])
def test_an_orphan_without_a_whole_event_has_failed(store: Store, torn: bytes) -> None:
    run_id = cut_off(store.home, torn=torn, hello=False)
    (row,) = store.recover().rows
    receipt = store.load(run_id)
    assert (row.outcome, row.reason, len(receipt.trace)) == ("failed", "interrupted", 0)
    assert (receipt.backend.id, receipt.capabilities) == ("mock", {})
    assert receipt.backplane["durability"]["cut_bytes"] == len(torn)
    whole(store, receipts=1)


def test_an_orphan_whose_head_was_lost_says_what_is_not_known(store: Store) -> None:
    run_id = cut_off(store.home, line(delta("a")))
    (store.folder(run_id) / "head.jsonl").write_bytes(b"\x00" * 50)
    (row,) = store.recover().rows
    assert (row.backend, row.work_order_id[:8], row.outcome) == ("unknown", "00000000", "partial")
    assert row.started_at == row.finished_at
    whole(store, receipts=1)
    lost = cut_off(store.home)
    for name in ("head.jsonl", "trace.jsonl"):
        (store.folder(lost) / name).unlink()
    assert [row.run_id for row in store.recover().rows] == [lost]


def test_a_restart_of_the_machine_is_told_in_the_receipt(store: Store) -> None:
    run_id = cut_off(store.home, line(delta("a")))
    head = store.folder(run_id) / "head.jsonl"
    facts = [json.loads(text) for text in head.read_text().splitlines()]
    facts[0]["boot_id"] = "another"
    head.write_text("".join(json.dumps(fact) + "\n" for fact in facts))
    store.recover()
    assert store.load(run_id).backplane["durability"]["machine_restarted"] is True


def test_a_run_at_work_is_no_orphan(store: Store) -> None:
    journal = open_journal(store.home)
    assert store.orphans() == []
    assert store.recover().rows == ()
    assert is_live(store.home, journal.run_id)
    journal.close()
    assert not is_live(store.home, journal.run_id)
    assert not is_live(store.home, str(uuid.uuid4()))
    assert [orphan.run_id for orphan in store.orphans()] == [journal.run_id]


def test_a_receipt_that_was_sealed_and_not_acknowledged_is_kept_as_it_was_sealed(store: Store) -> None:
    journal = open_journal(store.home)
    journal.append(line(delta("a")))
    sealed = seal(receipt_of(journal.trace, journal.run_id))
    journal.note_sealed(b"".join(canonical_chunks(msgspec.structs.replace(sealed, trace=[]))))
    journal.close()
    (row,) = store.recover().rows
    assert (row.outcome, row.reason, row.sha256) == ("complete", "complete", sealed.receipt_sha256)
    whole(store, receipts=1)


def test_a_sealed_receipt_that_does_not_fit_its_trace_is_not_believed(store: Store) -> None:
    for receipt in (b"{}", b"".join(canonical_chunks(seal(receipt_of([]))))):
        journal = open_journal(store.home)
        journal.append(line(delta("a")))
        journal.note_sealed(receipt)
        journal.close()
    assert {row.reason for row in store.recover().rows} == {"interrupted"}
    whole(store, receipts=2)


def test_a_copy_that_was_cut_off_is_removed(store: Store) -> None:
    journal = Journal.create(store.home, str(uuid.uuid4()), {"fact": "copied"})
    journal.append(line(delta("a")))
    journal.close()
    assert store.recover().rows == ()
    assert not journal.folder.exists()


def test_what_an_orphan_left_elsewhere_is_cleaned_before_it_is_sealed(store: Store) -> None:
    run_id = cut_off(store.home, line(delta("a")))
    (store.folder(run_id) / "patch.diff").write_text("half a pat")
    seen: list[Orphan] = []

    def clean(orphan: Orphan) -> None:
        assert not store.has(orphan.run_id)
        seen.append(orphan)

    store.recover(clean)
    assert [fact["fact"] for fact in seen[0].facts] == ["order", "hello"]
    assert store.patch(store.find(run_id)) is None
    assert (store.folder(run_id) / "patch.unfinished").exists()


@pytest.mark.parametrize("name", ["trace.jsonl", "head.jsonl"])
def test_an_orphan_that_cannot_be_sealed_does_not_stop_the_others(store: Store, name: str) -> None:
    assert store.recover().rows == ()
    bad = cut_off(store.home, line(delta("a")))
    good = cut_off(store.home, line(delta("b")))
    broken = store.folder(bad) / name
    broken.unlink()
    broken.mkdir()
    recovery = store.recover()
    assert [row.run_id for row in recovery.rows] == [good]
    assert [problem[:36] for problem in recovery.problems] == [bad]


def test_what_is_no_run_is_left_alone_and_abandoned_beginnings_are_removed(store: Store) -> None:
    runs = store.home / "runs"
    for name in ("notes", ".fresh.new", ".abandoned.new"):
        (runs / name).mkdir(parents=True)
    (runs / "11111111-1111-4111-8111-111111111111").write_text("a file")
    os.utime(runs / ".abandoned.new", (0, 0))
    assert ABANDONED_S > 0
    assert store.recover().rows == ()
    assert {path.name for path in runs.iterdir()} == {"notes", ".fresh.new", "11111111-1111-4111-8111-111111111111"}


def test_several_starts_at_once_recover_each_orphan_once(tmp_path: Path) -> None:
    runs = {cut_off(tmp_path, line(delta(str(number)))) for number in range(12)}
    found: list[str] = []

    def start() -> None:
        with Store.open(tmp_path) as store:
            recovery = store.recover()
            assert recovery.problems == ()
            found.extend(row.run_id for row in recovery.rows)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WRITER_S_MAX)
    assert sorted(found) == sorted(runs)
    with Store.open(tmp_path) as store:
        whole(store, receipts=12)


# Bundles --------------------------------------------------------------------------------------------------------------


def test_a_receipt_goes_out_and_comes_into_another_store_with_its_patch(store: Store, tmp_path: Path) -> None:
    diff = "diff --git a/a b/a\n"
    row = stored_run(store, ["a", "b"], verification=Verification(harness_ok=True, git_diff=diff))
    (store.folder(row.run_id) / "patch.diff").write_text(diff)
    folder = export(store, row.run_id[:8], tmp_path / "out" / "bundle")
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert names == ["journal/head.jsonl", "journal/trace.jsonl", "patch.diff", "receipt.json"]
    assert verify_bytes((folder / "receipt.json").read_bytes()) is None
    with Store.open(tmp_path / "other") as other:
        taken = import_bundle(other, folder)
        assert taken.sha256 == row.sha256
        assert other.load(row.run_id) == store.load(row.run_id)
        assert (other.folder(row.run_id) / "patch.diff").read_text() == diff
        whole(other, receipts=1)
        with pytest.raises(StoreError, match="stored already"):
            import_bundle(other, folder)
    with pytest.raises(ConfigError, match="not empty"):
        export(store, row.run_id, folder)


def test_a_receipt_of_another_maker_is_kept_exactly(store: Store, tmp_path: Path) -> None:
    receipt = seal(receipt_of([delta("a")], usage_raw={"trace": [], "f": 1e-7}))
    text = json.loads(b"".join(canonical_chunks(receipt)))
    del text["mode"], text["backend"]["adapter_version"]
    text["tool_calls"] = [1]
    text["meta"]["run_id"] = text["meta"]["run_id"].upper()
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps(text, indent=2))
    row = import_bundle(store, path)
    assert b"".join(canonical_chunks(store.load(row.run_id))) == b"".join(canonical_chunks(receipt))
    whole(store, receipts=1)


def test_a_receipt_whose_maker_reads_long_fractions_inexactly_is_kept_as_it_was_hashed(
    store: Store, tmp_path: Path
) -> None:
    rng = random.Random(1)
    written = next(text for text in (repr(rng.random()) for _ in range(1_000)) if inexact(text) != float(text))
    from_parser = inexact(written)
    receipt = seal(receipt_of([], usage_raw={"score": from_parser}))
    data = b"".join(canonical_chunks(receipt)).replace(repr(from_parser).encode(), written.encode())
    path = tmp_path / "receipt.json"
    path.write_bytes(data)
    assert import_bundle(store, path).sha256 == receipt.receipt_sha256
    whole(store, receipts=1)


def inexact(text: str) -> float:
    """A fraction as the inexact parser reads it."""
    return float(decode_inexact(text.encode()))


def bad_bundles() -> dict[str, tuple[type[Exception], str, Callable[[bytes], bytes]]]:
    return {
        "other content": (StoreError, "receipt_hash_mismatch", lambda data: data.replace(b'"complete"', b'"partial"')),
        "no hash": (
            StoreError,
            "receipt_hash_mismatch.*no hash",
            lambda data: data[: data.index(b'"receipt_sha256":') + 17] + b"null" + data[data.index(b',"trace"') :],
        ),
        "a key twice": (
            ContractError,
            "contract_invalid_receipt.*'outcome' stands twice",
            lambda data: data.replace(b'"outcome"', b'"outcome":"failed","outcome"', 1),
        ),
        "no receipt": (ContractError, "contract_invalid_receipt", lambda _: b"{}"),
        "no JSON": (ContractError, "contract_invalid_receipt", lambda data: data[:-1]),
        "too deep": (ContractError, "contract_invalid_receipt", lambda _: b"[" * 100_000 + b"]" * 100_000),
    }


@pytest.mark.parametrize("name", bad_bundles())
def test_nothing_of_a_wrong_receipt_is_imported(store: Store, tmp_path: Path, name: str) -> None:
    kind, text, change = bad_bundles()[name]
    path = tmp_path / "receipt.json"
    path.write_bytes(change(b"".join(canonical_chunks(seal(receipt_of([delta("a")]))))))
    with pytest.raises(kind, match=text):
        import_bundle(store, path)
    assert store.list() == []
    assert not (store.home / "runs").exists()


def test_a_receipt_that_is_too_large_is_not_read(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "receipt.json"
    path.write_bytes(b"".join(canonical_chunks(seal(receipt_of([])))))
    monkeypatch.setattr(bundle, "RECEIPT_BYTES_MAX", path.stat().st_size)
    import_bundle(store, path)
    monkeypatch.setattr(bundle, "RECEIPT_BYTES_MAX", path.stat().st_size - 1)
    with pytest.raises(ConfigError, match="is over"):
        import_bundle(store, path)


@pytest.mark.parametrize("git_diff", [None, "another patch"])
def test_a_patch_that_the_receipt_does_not_vouch_for_is_not_imported(
    store: Store, tmp_path: Path, git_diff: str | None
) -> None:
    verification = Verification(harness_ok=True, git_diff=git_diff)
    folder = tmp_path / "bundle"
    folder.mkdir()
    receipt = seal(receipt_of([delta("a")], verification=verification))
    (folder / "receipt.json").write_bytes(b"".join(canonical_chunks(receipt)))
    (folder / "patch.diff").write_text("a patch")
    with pytest.raises(StoreError, match="receipt_hash_mismatch"):
        import_bundle(store, folder)
    assert store.list() == []


def claiming(diff: str | None, sha256: str) -> Receipt:
    patch = {"bytes": 7, "sha256": sha256}
    return receipt_of(
        [], usage_raw={"backplane": {"patch": patch}}, verification=Verification(harness_ok=True, git_diff=diff)
    )


def test_a_receipt_alone_brings_its_patch_along_when_it_holds_it(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    whole_patch, elsewhere = claiming("a patch", sha256_hex(b"a patch")), claiming(None, sha256_hex(b"a large one"))
    for number, receipt in enumerate((whole_patch, elsewhere)):
        path.write_bytes(b"".join(canonical_chunks(seal(receipt))))
        row = import_bundle(store, path)
        patch = store.patch(row)
        assert (patch.read_text() if patch else None) == ("a patch", None)[number]
    whole(store, receipts=2)
    patch = store.patch(store.find(whole_patch.meta.run_id))
    assert patch is not None
    patch.unlink()
    assert "the patch cannot be read" in store.verify(whole_patch.meta.run_id)[0].fact


def test_a_bundle_without_the_patch_that_its_receipt_names_is_not_imported(store: Store, tmp_path: Path) -> None:
    (tmp_path / "receipt.json").write_bytes(b"".join(canonical_chunks(seal(claiming(None, sha256_hex(b"a patch"))))))
    with pytest.raises(StoreError, match=r"receipt_hash_mismatch.*cannot be read"):
        import_bundle(store, tmp_path)


def test_a_run_that_changed_nothing_needs_no_patch_file(store: Store) -> None:
    row = stored_run(store, ["a"], usage_raw={"backplane": {"patch": {"bytes": 0, "sha256": sha256_hex(b"")}}})
    assert store.verify(row.run_id) == []


def test_a_bundle_that_is_not_there_and_a_folder_that_cannot_be_made_are_named(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        import_bundle(store, tmp_path / "nowhere")
    row = stored_run(store, ["a"])
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="receipt_store_failed"):
        export(store, row.run_id, tmp_path / "file" / "bundle")


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


@pytest.mark.slow
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
