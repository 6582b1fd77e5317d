"""Orphans: what a killed control plane left is sealed with all its events, once."""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backplane.contract import canonical
from backplane.contract.events import Warned
from backplane.contract.receipt import BackendIdentity, Receipt
from backplane.receipts import recovery
from backplane.receipts.journal import Journal, failed_fact, held_fact
from backplane.receipts.pieces import canonical_chunks, seal, without_trace
from backplane.receipts.recovery import ABANDONED_S, Orphan, is_live
from backplane.receipts.store import Store
from backplane.runtime.state import StateFolder, left_behind
from tests.receipt_writer import ORDER, TS, delta, line, memory_of, open_journal, puts, receipt_of, whole

WRITER_S_MAX = 60


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "home") as opened:
        yield opened


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


@pytest.mark.parametrize(
    ("facts", "words", "end", "outcome"),
    [
        ([], "was cut off", {"reason": "interrupted"}, "partial"),
        (["sealed"], "is sealed", {"reason": "complete"}, "complete"),
        (["failed"], "failed by a fault", {"reason": "failed", "code": "internal"}, "failed"),
        (["sealed", "failed"], "failed by a fault", {"reason": "failed", "code": "internal"}, "failed"),
    ],
)
def test_what_is_said_of_a_run_without_a_row_is_what_the_next_start_stores(
    facts: list[str], words: str, end: dict[str, Any], outcome: str, store: Store
) -> None:
    run_id = cut_off(store.home, line(delta("a")))
    with recovery.claimed(store.folder(run_id)) as lock:
        assert lock is not None
        with recovery.reopened(recovery.read_orphan(store.folder(run_id)), lock) as (journal, _):
            for fact in facts:
                if fact == "failed":
                    journal.note(failed_fact("internal"))
                else:
                    raw = {"backplane": {"end": {"reason": "complete"}}}
                    journal.seal(without_trace(seal(receipt_of(journal.trace, run_id, usage_raw=raw))))
    (said,) = left_behind(store.home, store)
    assert run_id in said
    assert words in said
    store.recover()
    receipt = store.load(run_id)
    assert (receipt.backplane["end"], receipt.outcome) == (end, outcome)
    assert receipt.verification.harness_ok == (outcome == "complete")
    assert left_behind(store.home, store) == ()


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


S = 1_000_000_000


def retold(store: Store, run_id: str, change: Callable[[dict[str, Any]], object], ended_ns: int | None = None) -> None:
    """Change the order fact of a journal, and when it was written last."""
    head = store.folder(run_id) / "head.jsonl"
    facts = [json.loads(text) for text in head.read_text().splitlines()]
    change(facts[0])
    head.write_text("".join(json.dumps(fact) + "\n" for fact in facts))
    if ended_ns is not None:
        for path in store.folder(run_id).iterdir():
            os.utime(path, ns=(ended_ns, ended_ns))


def interrupted(store: Store, run_id: str) -> Receipt:
    assert store.recover().problems == ()
    return store.load(run_id)


@pytest.mark.parametrize("started_at", ["yesterday", 5])
def test_a_start_that_is_no_time_stops_no_other_run(store: Store, started_at: object) -> None:
    run_id, other = cut_off(store.home), cut_off(store.home)
    retold(store, run_id, lambda order: order.update(started_at=started_at))
    receipt = interrupted(store, run_id)
    assert (receipt.meta.duration_ms, receipt.meta.started_at) == (0, receipt.meta.finished_at)
    assert receipt.backplane["duration"] == "wall_clock"
    assert store.has(other)


@pytest.mark.parametrize(("lasted_ms", "told_ms"), [(2_500, 2_500), (-15, 0), (0, 0), (-3_600_000, 0)])
def test_a_cut_off_run_lasts_until_its_last_event(store: Store, lasted_ms: int, told_ms: int) -> None:
    """A file's time may be of the tick before its run's start, and a clock may be set back."""
    run_id, now_ns = cut_off(store.home, line(delta("a"))), time.time_ns() // S * S
    started_at = canonical.timestamp_at(now_ns - lasted_ms * 1_000_000)
    retold(store, run_id, lambda order: order.update(started_at=started_at), now_ns)
    receipt = interrupted(store, run_id)
    assert (receipt.meta.duration_ms, receipt.backplane["duration"]) == (told_ms, "wall_clock")


def test_an_interrupted_receipt_names_settings_that_nobody_knows_as_every_other_does(store: Store) -> None:
    run_id = cut_off(store.home)
    vendor = {"abp": {"bakcend": "x", "backend": "y"}, "abp.nosuch": 1, "claude": {}}
    retold(store, run_id, lambda order: order["order"]["config"].update(vendor=vendor))
    assert interrupted(store, run_id).backplane["unheard"] == [
        "/config/vendor/abp/bakcend",
        "/config/vendor/abp.nosuch",
    ]
    assert "unheard" not in interrupted(store, cut_off(store.home)).backplane


@pytest.mark.parametrize(("asked", "mode"), [("passthrough", "passthrough"), ("mapped", "mapped")])
def test_an_interrupted_receipts_mode_is_the_one_that_was_seen(store: Store, asked: str, mode: str) -> None:
    run_id = cut_off(store.home, line(Warned(ts=TS, message="m", ext={"raw_message": {}})), hello=False)
    retold(store, run_id, lambda order: order["order"]["config"].update(vendor={"abp": {"mode": asked}}))
    assert interrupted(store, run_id).mode == mode


def test_an_interrupted_receipt_names_what_held_the_host_in_the_end(store: Store) -> None:
    run_id = cut_off(store.home)
    with (store.folder(run_id) / "head.jsonl").open("a") as file:
        file.writelines(json.dumps(held_fact({"isolation": name})) + "\n" for name in ("first", "last"))
    assert interrupted(store, run_id).backplane["enforcement"] == {"isolation": "last"}


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
    journal.seal(b"".join(canonical_chunks(msgspec.structs.replace(sealed, trace=[]))))
    journal.close()
    (row,) = store.recover().rows
    assert (row.outcome, row.reason, row.sha256) == ("complete", "complete", sealed.receipt_sha256)
    whole(store, receipts=1)


def test_a_sealed_receipt_that_does_not_fit_its_trace_is_not_believed(store: Store) -> None:
    for receipt in (b"{}", b"".join(canonical_chunks(seal(receipt_of([]))))):
        journal = open_journal(store.home)
        journal.append(line(delta("a")))
        journal.seal(receipt)
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


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "{outside}"])
@pytest.mark.parametrize("name", ["head.jsonl", "trace.jsonl"])
def test_a_pipe_or_link_in_place_of_a_journal_is_named_and_neither_waited_at_nor_followed(
    store: Store, tmp_path: Path, name: str, kind: str
) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine\n")
    run_id, other = cut_off(store.home, line(delta("a"))), cut_off(store.home)
    puts(store.folder(run_id) / name, kind.format(outside=outside, name=name))
    with memory_of(256 << 20):
        assert {orphan.run_id for orphan in store.orphans()} == {run_id, other}
        found = store.recover()
    assert [row.run_id for row in found.rows] == [other]
    assert [problem.partition(":")[0] for problem in found.problems] == [run_id]
    assert (outside.read_text(), sorted(tmp_path.iterdir())) == ("mine\n", [store.home, outside])
    (store.folder(run_id) / name).unlink()
    assert [row.run_id for row in store.recover().rows] == [run_id]
    whole(store, receipts=2)


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("head.jsonl", DEEP),
        ("trace.jsonl", b'{"ext":' + DEEP + b',"message":"m","ts":"2025-01-15T12:00:00Z","type":"warning"}'),
    ],
)
def test_what_no_journal_of_ours_holds_stops_no_start(store: Store, name: str, damage: bytes) -> None:
    run_id, other = cut_off(store.home, line(delta("a"))), cut_off(store.home)
    with (store.folder(run_id) / name).open("ab") as file:
        file.write(damage + b"\n")
    assert len(store.orphans()) == 2
    recovery = store.recover()
    assert ({row.run_id for row in recovery.rows}, recovery.problems) == ({run_id, other}, ())
    assert store.load(run_id).trace[0] == delta("a")
    whole(store, receipts=2)


def test_a_read_only_look_at_orphans_makes_nothing(store: Store) -> None:
    run_id = cut_off(store.home)
    head = store.folder(run_id) / "head.jsonl"
    head.unlink()
    with Store.open(store.home, readonly=True) as reader:
        assert [orphan.run_id for orphan in reader.orphans()] == [run_id]
    assert not head.exists()


@pytest.mark.parametrize("linked", [False, True])
def test_only_what_dead_runs_left_is_swept_from_the_places_of_stages(tmp_path: Path, linked: bool) -> None:
    """Somebody may keep notes there, or have put a link to another disk, with more on it, in the place of one."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for place in ("stage", "scratch"):
        (elsewhere / place / "precious").mkdir(parents=True)
        (elsewhere / place / "precious/notes").write_text("mine")
        (elsewhere / place / str(uuid.uuid4())).mkdir()
    home.mkdir()
    for place in ("stage", "scratch"):
        if linked:
            (home / place).symlink_to(elsewhere / place)
        else:
            (elsewhere / place).rename(home / place)
    state_folder = StateFolder(home)
    state_folder.store()
    state_folder.close()
    for place in ("stage", "scratch"):
        assert [path.name for path in (home / place).iterdir()] == ["precious"]
        assert (home / place / "precious/notes").read_text() == "mine"


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


def test_a_link_in_the_place_of_a_runs_folder_is_not_followed_but_named(store: Store, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "patch.diff").write_text("mine")
    before = victim.stat().st_mtime_ns
    link = store.home / "runs" / str(uuid.uuid4())
    link.parent.mkdir()
    link.symlink_to(victim)
    orphan = open_journal(store.home)
    orphan.close()
    for _ in range(2):
        found = store.recover()
        assert [problem.partition(":")[0] for problem in found.problems] == [link.name]
        assert "is a link, which is not followed" in found.problems[0]
    assert [row.run_id for row in store.rows()] == [orphan.run_id]
    assert store.orphans() == []
    assert [path.name for path in victim.iterdir()] == ["patch.diff"]
    assert victim.stat().st_mtime_ns == before
    assert link.is_symlink()
