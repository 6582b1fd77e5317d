"""The store: what goes in comes out, whatever version the file has."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from backplane.contract.receipt import receipt_hash, verify_bytes
from backplane.errors import ConfigError, StoreError
from backplane.receipts import database as store_file
from backplane.receipts.pieces import canonical_chunks, seal
from backplane.receipts.store import Store
from tests.receipt_writer import delta, line, open_journal, receipt_of, stored_run, whole

WRITER_S_MAX = 60


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "home") as opened:
        yield opened


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


def test_a_store_that_is_made_after_it_was_opened_to_read_is_seen(tmp_path: Path) -> None:
    with Store.open(tmp_path, readonly=True) as reader:
        assert list(reader.list()) == []
        with Store.open(tmp_path) as writer:
            row = stored_run(writer, ["a"])
        assert reader.has(row.run_id)


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


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("version", [1, 2, 9])
def test_a_store_of_another_version_is_left_alone(tmp_path: Path, readonly: bool, version: int) -> None:
    with Store.open(tmp_path) as store:
        stored_run(store, ["a"])
    with closing(sqlite3.connect(tmp_path / "receipts.sqlite")) as connection, connection:
        connection.execute(f"PRAGMA user_version={version}")
    with pytest.raises(StoreError, match=rf"version {version}.*knows version 3"):
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
