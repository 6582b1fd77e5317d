"""Traces, seals, journals, kept manifests and comparisons: what a receipt is before it is stored."""

from __future__ import annotations

import json
import os
import stat
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backplane.contract import canonical
from backplane.contract.events import AgentEvent, ToolCall, Warned
from backplane.contract.receipt import Receipt, Usage, read_receipt, receipt_hash, verify_bytes
from backplane.errors import StoreError
from backplane.receipts.folded import Folded, fold
from backplane.receipts.journal import read_facts
from backplane.receipts.manifests import keep_manifest, kept_manifest
from backplane.receipts.pieces import canonical_chunks, digest, is_intact, seal
from backplane.receipts.trace import CHUNK_BYTES, Trace, as_trace
from tests import receipt_cases
from tests.receipt_writer import ORDER, TS, delta, line, open_journal, receipt_of

CANONICAL_VECTOR = (
    '{"artifacts":[],"backend":{"adapter_version":null,"backend_version":null,"id":"vec"},"capabilities":'
    '{"streaming":"native","tool_bash":{"restricted":{"reason":"sandbox"}}},"meta":{"contract_version":"abp/v0.1",'
    '"duration_ms":380,"finished_at":"2025-01-15T12:00:00.500Z","run_id":"550e8400-e29b-41d4-a716-446655440000",'
    '"started_at":"2025-01-15T12:00:00.120Z","work_order_id":"00000000-0000-0000-0000-000000000000"},'
    '"mode":"passthrough","outcome":"partial","receipt_sha256":null,"trace":[{"ext":{"raw_message":'
    '{"x":[1.5,null,true],"y":2}},"text":"hé😀","ts":"2025-01-15T12:00:00.200Z","type":"assistant_delta"},'
    '{"input":{"path":"a"},"parent_tool_use_id":null,"tool_name":"Read","tool_use_id":null,'
    '"ts":"2025-01-15T12:00:00.300Z","type":"tool_call"}],"usage":{"cache_read_tokens":null,'
    '"cache_write_tokens":null,"estimated_cost_usd":0.0,"input_tokens":1,"output_tokens":2,"request_units":null},'
    '"usage_raw":{"a":0.1,"b":1e-7,"c":1.0,"d":100000.0,"e":18446744073709551615,"f":-1,"g":1000000000000000.0,'
    '"h":0.00001,"z":null,"é":"\u2028\x7f\\u0001/\\"\\\\"},"verification":{"git_diff":null,'
    '"git_status":"?? a\\n","harness_ok":false}}'
)
VECTOR_SHA256 = "aa914de39221a22eba91d4f56d7955008690c7b31e6a7e04b1f2ed192ef418d6"


# The hash -------------------------------------------------------------------------------------------------------------


def test_the_known_vector_is_written_and_hashed_as_its_maker_did() -> None:
    receipt = read_receipt(json.loads(CANONICAL_VECTOR))
    assert b"".join(canonical_chunks(receipt)).decode() == CANONICAL_VECTOR
    assert seal(receipt).receipt_sha256 == VECTOR_SHA256


@given(receipt_cases.receipts)
@settings(max_examples=60)
def test_hash_and_bytes_in_pieces_are_those_of_the_contract(receipt: Receipt) -> None:
    kept = msgspec.structs.replace(receipt, trace=Trace.of(receipt.trace))
    assert digest(kept) == digest(receipt) == receipt_hash(receipt)
    assert b"".join(canonical_chunks(kept)) == canonical.encode(receipt)
    sealed = seal(kept)
    assert is_intact(sealed)
    assert verify_bytes(b"".join(canonical_chunks(sealed))) is None


def test_a_receipt_without_a_hash_or_with_another_is_not_intact() -> None:
    sealed = seal(receipt_of([delta("a")]))
    assert not is_intact(msgspec.structs.replace(sealed, receipt_sha256=None))
    assert not is_intact(msgspec.structs.replace(sealed, outcome="failed"))
    assert not is_intact(msgspec.structs.replace(sealed, trace=[delta("b")]))


def test_a_long_trace_is_hashed_without_being_in_memory(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    batch = b"".join(line(delta("x" * 200)) for _ in range(1_000))
    for _ in range(40):
        journal.append(batch)
    receipt = receipt_of(journal.trace)
    journal.close()
    tracemalloc.start()
    try:
        sealed = seal(receipt)
        written = sum(map(len, canonical_chunks(sealed)))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert written > len(batch) * 40 - 1
    assert peak_bytes < 8 * CHUNK_BYTES


# Traces ---------------------------------------------------------------------------------------------------------------


@given(st.lists(receipt_cases.events, max_size=8))
@settings(max_examples=60)
def test_a_trace_gives_back_every_event(written: list[AgentEvent]) -> None:
    trace = Trace.of(written)
    # An integer beyond 64 bits is a float from its first writing on, so the written form decides.
    expected = [canonical.encode(event) for event in written]
    assert [canonical.encode(event) for event in trace] == expected == list(trace.lines())
    assert len(trace) == len(written)
    assert b"".join(trace.chunks()) == b",".join(expected) == b"".join(as_trace(written).chunks())


def test_any_place_of_a_long_trace_can_be_read(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    count = 2_000
    for number in range(count):
        journal.append(line(delta(str(number))))
    trace = journal.trace
    for place in (0, 1, 999, count - 1, -1):
        assert trace[place] == delta(str(range(count)[place]))
    assert trace[-3:] == [delta(str(number)) for number in range(count - 3, count)]
    assert trace[10:4:-3] == [delta("10"), delta("7")]
    assert trace[count:] == []
    assert delta("7") in trace
    with pytest.raises(IndexError):
        trace[count]
    (journal.folder / "trace.jsonl").write_bytes(line(delta("0")))
    with pytest.raises(StoreError, match="ends before"):
        trace[1]
    journal.append(line(delta("later")))
    assert (len(trace), len(journal.trace)) == (count, count + 1)
    journal.close()


@pytest.mark.parametrize("damage", ["gone", "short", "foreign"])
def test_a_damaged_trace_is_a_store_error_and_never_a_short_list(tmp_path: Path, damage: str) -> None:
    journal = open_journal(tmp_path)
    journal.append(line(delta("a")) + line(delta("b")))
    journal.close()
    path = journal.folder / "trace.jsonl"
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(line(delta("a")) if damage == "short" else b"{}\n" * journal.size_bytes)
    with pytest.raises(StoreError, match=r"receipt_store_failed"):
        list(journal.trace)
    with pytest.raises(StoreError, match=r"receipt_store_failed"):
        journal.trace[1]
    if damage != "foreign":
        with pytest.raises(StoreError, match=r"receipt_store_failed"):
            seal(receipt_of(journal.trace))


def test_traces_are_equal_when_their_events_are() -> None:
    assert Trace.of([delta("a")]) == [delta("a")] == Trace.of([delta("a")])
    assert Trace.of([delta("a")]) != Trace.of([delta("b")])
    assert Trace.of([]) != "not a trace"
    assert repr(Trace.of([])) == "<Trace of 0 events, 0 bytes>"


# Folding --------------------------------------------------------------------------------------------------------------


def test_the_last_usage_and_session_reported_are_the_runs() -> None:
    events: list[AgentEvent] = [
        delta("a"),
        Warned(ts=TS, message="u", ext={"usage": {"input_tokens": 5, "output_tokens": 1, "x": 1}}),
        Warned(ts=TS, message="s", ext={"session": {"id": "s1"}}),
        Warned(ts=TS, message="u", ext={"usage": {"output_tokens": 9, "input_tokens": -1}}),
        Warned(ts=TS, message="u", ext={"usage": {"request_units": True}}),
        Warned(ts=TS, message="u", ext={"usage": "many"}),
    ]
    folded = Folded()
    for event in events:
        folded = fold(folded, event)
    assert folded == Folded(Usage(input_tokens=5, output_tokens=9), {"id": "s1"})
    assert fold(folded, delta("says nothing of the whole")) is folded


# The journal ----------------------------------------------------------------------------------------------------------


def test_a_journal_has_the_order_without_secrets_and_each_event_in_its_bytes(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    call = ToolCall(ts=TS, tool_name="bash", input={"command": "ls"})
    journal.append(line(delta("a")) + line(call))
    journal.note({"fact": "hello", "mode": "mapped"})
    journal.seal(b"{}")
    journal.close()
    journal.close()
    assert (journal.folder / "trace.jsonl").read_bytes() == line(delta("a")) + line(call)
    facts = read_facts(journal.folder)
    assert [fact["fact"] for fact in facts] == ["order", "hello"]
    assert facts[0]["order"]["config"]["env"] == ["API_KEY"]
    assert facts[0]["order"]["id"] == ORDER.id
    assert b"geheim" not in (journal.folder / "head.jsonl").read_bytes()


def test_only_the_owner_can_read_a_journal(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "home")
    journal.close()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (journal.folder, *journal.folder.iterdir())}
    assert modes == {journal.run_id: 0o700, "head.jsonl": 0o600, "trace.jsonl": 0o600}


def test_a_run_id_is_used_once(tmp_path: Path) -> None:
    first = open_journal(tmp_path)
    with pytest.raises(StoreError, match=r"receipt_store_failed.*(ENOTEMPTY|EEXIST)"):
        open_journal(tmp_path, first.run_id.upper())
    assert os.listdir(tmp_path / "runs") == [first.run_id]
    first.close()


def test_a_batch_that_does_not_end_in_a_newline_is_refused(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    with pytest.raises(ValueError, match="newline"):
        journal.append(b"{}")
    journal.close()
    with pytest.raises(StoreError, match="EBADF"):
        journal.append(b"{}\n")


def test_facts_end_at_a_torn_or_foreign_line(tmp_path: Path) -> None:
    for number, rest in enumerate((b'{"fact":"hel', b"\x00\x00\n", b"[1]\n{}\n")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "head.jsonl").write_bytes(b'{"fact":"order"}\n' + rest)
        assert read_facts(folder) == [{"fact": "order"}]


# Kept manifests -------------------------------------------------------------------------------------------------------


def test_the_last_hello_of_a_backend_is_kept(tmp_path: Path) -> None:
    assert kept_manifest(tmp_path, "mock 1") is None
    keep_manifest(tmp_path, "mock 1", {"capabilities": {"streaming": "native"}})
    keep_manifest(tmp_path, "mock 1", {"capabilities": {}})
    keep_manifest(tmp_path, "../mock", {"capabilities": {"a": 1}})
    assert kept_manifest(tmp_path, "mock 1") == {"capabilities": {}}
    assert kept_manifest(tmp_path, "../mock") == {"capabilities": {"a": 1}}
    assert len(list((tmp_path / "manifests").iterdir())) == 2


@pytest.mark.parametrize("content", [b"", b"\x00\x00", b"[]", b'{"key":"other","hello":{}}', b'{"key":"k","hello":1}'])
def test_a_manifest_that_cannot_be_read_is_not_there(tmp_path: Path, content: bytes) -> None:
    keep_manifest(tmp_path, "k", {"capabilities": {}})
    next((tmp_path / "manifests").iterdir()).write_bytes(content)
    assert kept_manifest(tmp_path, "k") is None
