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
from backplane.receipts import store as store_module
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
    assert (store.folder(row.run_id) / "receipt.json").exists()
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


def test_the_newest_receipt_is_listed_first_and_pages_go_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_PAGE_ROWS", 2)
    runs = [stored_run(store, [str(number)]).run_id for number in range(5)]
    assert [row.run_id for row in store.rows()] == runs[::-1]
    assert [row.run_id for row in store.rows(3)] == runs[:1:-1]
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
        assert empty.rows() == []
        assert empty.checkpoint() is None
    assert not (tmp_path / "none").exists()
    with Store.open(tmp_path) as writer, Store.open(tmp_path, readonly=True) as reader:
        row = stored_run(writer, ["a"])
        assert reader.rows() == [row]
        whole(reader, receipts=1)
        with pytest.raises(StoreError, match="EROFS"):
            reader.append(seal(receipt_of([])))


def test_a_store_that_is_made_after_it_was_opened_to_read_is_seen(tmp_path: Path) -> None:
    with Store.open(tmp_path, readonly=True) as reader:
        assert list(reader.rows()) == []
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
    assert [path.name for path in store.folder(rows[0].run_id).iterdir()] == ["link.json"]
    assert store.folder(rows[3].run_id).exists()
    for ask in (store.load, store.verify):
        with pytest.raises(StoreError, match="pruned"):
            ask(rows[0].run_id)
    assert store.recover().rows == ()


# Schema ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("version", [1, 4, 9])
def test_a_store_of_another_version_is_left_alone(tmp_path: Path, readonly: bool, version: int) -> None:
    with Store.open(tmp_path) as store:
        stored_run(store, ["a"])
    with closing(sqlite3.connect(tmp_path / "receipts.sqlite")) as connection, connection:
        connection.execute(f"PRAGMA user_version={version}")
    with pytest.raises(StoreError, match=rf"version {version}.*knows version 5"):
        Store.open(tmp_path, readonly=readonly)


def test_a_file_that_is_no_store_is_named(tmp_path: Path) -> None:
    (tmp_path / "receipts.sqlite").write_bytes(b"no database at all, but long enough" * 40)
    for readonly in (False, True):
        with pytest.raises(StoreError, match=r"receipts.sqlite.*SQLITE_NOTADB"):
            Store.open(tmp_path, readonly=readonly)


# The index ------------------------------------------------------------------------------------------------------------


def test_a_lost_index_is_rebuilt_from_the_folders_and_says_so(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        rows = [stored_run(store, [str(number)]) for number in range(5)]
        assert store.prune(keep=3) == 2
        checkpoint, listed = store.checkpoint(), store.rows()
    (tmp_path / "receipts.sqlite").unlink()
    for readonly in (True, False):
        with Store.open(tmp_path, readonly=readonly) as store:
            assert store.rows() == listed
            audit = store.verify_all(checkpoint)
            assert (audit.findings, audit.checked, audit.pruned) == ((), 3, 2)
            assert audit.rebuilt is not None
        assert (tmp_path / "receipts.sqlite").exists() is not readonly
    with Store.open(tmp_path) as store:
        assert stored_run(store, ["5"]).previous_link == rows[-1].link
        assert store.verify_all(checkpoint).findings == ()


@pytest.mark.parametrize("damage", ["deleted", "altered", "swapped", "no row", "forked"])
def test_an_index_that_is_rebuilt_hides_nothing(tmp_path: Path, damage: str) -> None:
    with Store.open(tmp_path) as store:
        rows = [stored_run(store, [str(number)]) for number in range(4)]
        folders = [store.folder(row.run_id) for row in rows]
    links = [folder / "link.json" for folder in folders]
    if damage == "deleted":
        (folders[1] / "receipt.json").unlink()
    elif damage == "altered":
        path = folders[1] / "receipt.json"
        path.write_bytes(path.read_bytes().replace(b"complete", b"partial"))
    elif damage == "swapped":
        first = links[1].read_bytes()
        links[1].write_bytes(links[2].read_bytes())
        links[2].write_bytes(first)
    elif damage == "no row":
        links[1].unlink()
    else:
        links[1].write_bytes(links[1].read_bytes().replace(b'"sequence":2', b'"sequence":3'))
    for index in ("without",) if damage == "no row" else ("with", "without"):
        if index == "without":
            (tmp_path / "receipts.sqlite").unlink()
        with Store.open(tmp_path) as store:
            store.recover()
            assert store.verify_all().findings, index


def test_a_row_whose_writer_was_killed_after_its_commit_gets_its_file(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        rows = [stored_run(store, [str(number)]) for number in range(3)]
        for row in rows[1:]:
            (store.folder(row.run_id) / "link.json").unlink()
    with Store.open(tmp_path) as store:
        assert store.verify_all().findings == ()


def test_an_older_index_is_found_beside_newer_folders(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        stored_run(store, ["a"])
    older = (tmp_path / "receipts.sqlite").read_bytes()
    with Store.open(tmp_path) as store:
        stored_run(store, ["b"])
    (tmp_path / "receipts.sqlite").write_bytes(older)
    with Store.open(tmp_path) as store:
        store.recover()
        (finding,) = store.verify_all().findings
    assert finding.fact == "receipt 2 stands in its folder and not in the index"
