"""Tampering: what was changed in the store is found, and leads nowhere else."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from backplane.contract.canonical import encode as canonical_bytes
from backplane.contract.canonical import sha256_hex
from backplane.contract.receipt import BackendIdentity, Verification
from backplane.errors import StoreError
from backplane.receipts import memory
from backplane.receipts.bundle import export
from backplane.receipts.database import COVERED, ChainCheckpoint, keep_row, link_of
from backplane.receipts.journal import backend_name
from backplane.receipts.pieces import canonical_chunks, seal
from backplane.receipts.store import Store
from tests.receipt_writer import delta, line, memory_of, puts, stored_run, whole


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "home") as opened:
        yield opened


_SWAP = """UPDATE receipts SET {0} = (SELECT other.{0} FROM receipts other WHERE other.sequence = 7 - receipts.sequence)
 WHERE sequence IN (3, 4)"""
TAMPERINGS = {
    "other outcome": "UPDATE receipts SET outcome = 'failed' WHERE sequence = 3",
    "other reason": "UPDATE receipts SET reason = NULL WHERE sequence = 3",
    "fewer events": "UPDATE receipts SET trace_count = 1 WHERE sequence = 3",
    "more events": "UPDATE receipts SET trace_count = 3 WHERE sequence = 3",
    "fewer bytes": "UPDATE receipts SET trace_bytes = trace_bytes / 2 WHERE sequence = 3",
    "a word for a number": "UPDATE receipts SET trace_count = 'x', duration_ms = 'y' WHERE sequence = 3",
    "bytes for a word": "UPDATE receipts SET run_id = x'ff00', backend = x'ff' WHERE sequence = 3",
    "delete": "DELETE FROM receipts WHERE sequence = 3",
    "delete the first": "DELETE FROM receipts WHERE sequence = 1",
    "swap the hashes": _SWAP.format("sha256"),
    "renumber": "UPDATE receipts SET sequence = 9 WHERE sequence = 3",
    "duplicate": """INSERT INTO receipts SELECT 7, 'dddd' || substr(run_id, 5), work_order_id, backend, outcome, reason,
 started_at, finished_at, duration_ms, sha256, trace_count, trace_bytes, previous_link, link
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


@pytest.mark.parametrize("damage", ["flip", "blank", "empty", "swapped", "gone", "pipe"])
def test_verify_finds_a_changed_receipt(six: Store, damage: str) -> None:
    path, other = (six.folder(six.rows()[place].run_id) / "receipt.json" for place in (3, 4))
    data = path.read_bytes()
    changes: dict[str, Callable[[], object]] = {
        "flip": lambda: path.write_bytes(data.replace(b"mock", b"mick")),
        "blank": lambda: path.write_bytes(data.replace(b"{", b"{ ")),
        "empty": lambda: path.write_bytes(b"{}"),
        "swapped": lambda: path.write_bytes(other.read_bytes()),
        "gone": path.unlink,
        "pipe": lambda: puts(path, "pipe"),
    }
    changes[damage]()
    assert {finding.run_id for finding in six.verify_all().findings} == {six.rows()[3].run_id}
    assert len(list(memory.remembered(six))) == 6
    assert six.prune(keep=0, dry_run=True) == 6


def test_a_changed_run_id_leads_to_no_other_folder(six: Store, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    tamper(six, "UPDATE receipts SET run_id = '../../precious', work_order_id = run_id WHERE sequence = 3")
    with pytest.raises(StoreError, match="no run id"):
        six.load("../../precious")
    assert "no run id" in "".join(finding.fact for finding in six.verify_all().findings)
    assert six.prune(keep=0) == 6
    assert precious.exists()


def test_a_row_without_a_receipt_is_a_store_error(six: Store) -> None:
    row = six.rows()[3]
    (six.folder(row.run_id) / "receipt.json").write_bytes(b"{}")
    with pytest.raises(StoreError, match="holds no receipt"):
        six.load(row.run_id)
    (six.folder(row.run_id) / "receipt.json").unlink()
    with pytest.raises(StoreError, match="cannot be read"):
        six.body(row)


def test_verify_finds_a_receipt_that_was_changed_and_hashed_anew(six: Store) -> None:
    row = six.rows()[3]
    forged = seal(msgspec.structs.replace(six.load(row.run_id), outcome="failed"))
    body = b"".join(canonical_chunks(msgspec.structs.replace(forged, trace=[])))
    (six.folder(row.run_id) / "receipt.json").write_bytes(body)
    tamper(six, f"UPDATE receipts SET sha256 = '{forged.receipt_sha256}', outcome = 'failed' WHERE sequence = 3")
    assert {finding.code for finding in six.verify(row.run_id)} == {"receipt_chain_broken"}
    (six.folder(row.run_id) / "link.json").write_bytes(msgspec.json.encode(six.find(row.run_id)))
    assert [finding.code for finding in six.verify_all().findings] == ["receipt_chain_broken"]


@pytest.mark.parametrize("damage", ["flip", "cut", "grown", "gone", "swapped"])
def test_verify_finds_a_changed_trace(six: Store, damage: str) -> None:
    row, other = six.rows()[2], six.rows()[3]
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
    path, rng = store.folder(row.run_id) / "receipt.json", random.Random(4)
    body = path.read_bytes()
    for place in rng.sample(range(len(body)), 100):
        path.write_bytes(body[:place] + bytes([body[place] ^ 1 << rng.randrange(8)]) + body[place + 1 :])
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
    tail = six.folder(six.rows(1)[0].run_id)
    tamper(six, "DELETE FROM receipts WHERE sequence = 7")
    assert [finding.code for finding in six.verify_all().findings] == ["receipt_chain_broken"]
    shutil.rmtree(tail)
    assert six.verify_all().findings == ()
    assert [finding.code for finding in six.verify_all(checkpoint).findings] == ["receipt_chain_broken"]
    assert msgspec.json.decode(msgspec.json.encode(checkpoint), type=ChainCheckpoint) == checkpoint


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


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "{outside}"])
@pytest.mark.parametrize("name", ["head.jsonl", "trace.jsonl", "patch.diff"])
def test_no_pipe_link_or_hole_beside_a_receipt_is_waited_at_followed_or_read_whole(
    store: Store, tmp_path: Path, name: str, kind: str
) -> None:
    outside, diff = tmp_path / "outside", "diff --git a/a b/a\n"
    outside.write_text("a secret of mine\n")
    row = stored_run(store, ["a", "b"], verification=Verification(harness_ok=True, git_diff=diff))
    (store.folder(row.run_id) / "patch.diff").write_text(diff)
    puts(store.folder(row.run_id) / name, kind.format(outside=outside))
    with memory_of(256 << 20):
        assert [one.run_id for one in store.newest()] == [row.run_id]
        assert (backend_name(store.folder(row.run_id)) is None) == (name == "head.jsonl")
        assert bool(store.verify_all().findings) == (name != "head.jsonl")
        if name == "trace.jsonl":
            with pytest.raises(StoreError):
                list(store.load(row.run_id).trace)
        with pytest.raises(StoreError, match="receipt_store_failed"):
            export(store, row.run_id, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == [store.home, outside]


# Pruned rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", COVERED)
def test_verify_finds_a_changed_column_of_a_pruned_receipt(six: Store, column: str) -> None:
    six.prune(keep=2)
    assert (six.verify_all().findings, six.verify_all().pruned) == ((), 4)
    value = "5" if column.endswith(("_ms", "_count", "_bytes")) else "'2020-01-01T00:00:00.000Z'"
    tamper(six, f"UPDATE receipts SET {column} = {value} WHERE sequence = 3")
    assert "receipt_chain_broken" in [finding.code for finding in six.verify_all().findings]


def test_a_receipt_that_is_emptied_to_look_pruned_keeps_what_its_row_said(six: Store) -> None:
    row = six.rows()[3]
    folder = six.folder(row.run_id)
    (folder / "receipt.json").unlink()
    forged = msgspec.structs.replace(row, outcome="failed", backend="another")
    keep_row(folder, forged, pruned=True)
    tamper(six, "UPDATE receipts SET outcome = 'failed', backend = 'another' WHERE sequence = 3")
    found = six.verify_all(six.checkpoint())
    assert {finding.code for finding in found.findings} == {"receipt_chain_broken"}
    assert (found.checked, found.pruned) == (5, 1)


def test_names_with_anything_in_them_are_covered_as_they_are_read_back(store: Store) -> None:
    for name in ("a\0b", "", "ä😀\u2028", '"', "123"):
        row = stored_run(store, ["a"], backend=BackendIdentity(name), usage_raw=None)
        assert store.find(row.run_id) == row
    store.prune(keep=0)
    found = store.verify_all()
    assert (found.findings, found.pruned) == ((), 5)


def test_a_link_over_all_columns_is_none_over_a_hash_that_was_made_for_it(six: Store) -> None:
    row = six.rows()[3]
    said = link_of(row.previous_link, row.sequence, msgspec.structs.asdict(row))
    assert said == row.link
    covered = sha256_hex(canonical_bytes({name: getattr(row, name) for name in COVERED}))
    for forged in (covered, f"{row.sequence}:{covered}", f"columns:{row.previous_link}:{row.sequence}:{covered}"):
        keep_row(six.folder(row.run_id), row, pruned=True)
        tamper(six, f"UPDATE receipts SET sha256 = '{forged}', outcome = 'failed' WHERE sequence = 3")
        assert six.verify_all().findings
