"""Validating a document: recognised by content, every violation at its place, never a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane import resources
from backplane.config import TOML_BYTES_MAX
from backplane.schemas.validate import FINDINGS_MAX, Findings, validate

EXAMPLES = resources.find("contracts") / "examples"
NO_CONTENT = ("empty", "refused")
"""An empty policy or configuration could be either; what stands under `usage_raw.backplane` never stands alone."""
SHAPES = [folder for folder in EXAMPLES.iterdir() if folder.name != "bad" and not folder.name.startswith("cli_")]
"""What a command prints is no document of the contract: nobody hands it on."""
GOOD = sorted(path for folder in SHAPES for path in folder.iterdir() if path.stem not in NO_CONTENT)
BAD = sorted((EXAMPLES / "bad").glob("*.json"))


def pointers(found: Findings) -> list[str]:
    return [finding.pointer for finding in found.findings]


@pytest.mark.parametrize("path", GOOD, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_good_example_is_recognised_by_its_content_and_has_no_findings(path: Path) -> None:
    found = validate(path.read_bytes(), "-")
    assert [finding for finding in found.findings if not finding.note] == []
    assert found.valid
    assert found.kind == path.parent.name


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_a_bad_example_is_found_wrong_at_its_place(path: Path) -> None:
    case: dict[str, Any] = json.loads(path.read_bytes())
    data = case["text"].encode() if "text" in case else json.dumps(case["document"]).encode()
    found = validate(data, "a.toml" if case["schema"] == "configuration" else "-")
    assert found.kind == case["schema"]
    assert case["pointer"] in pointers(found), found
    assert not found.valid


def test_shipped_transcripts_are_valid() -> None:
    for path in sorted((resources.find("contracts") / "transcripts").glob("*.jsonl")):
        assert validate(path.read_bytes(), path.name) == Findings(path.name, "transcript")


def test_every_line_of_a_transcript_is_checked_and_named_by_its_number() -> None:
    lines = ['{"t":"ping","seq":1}', "", '{"t":"ping","seq":-1}', "npm notice", '{"t":"pong","seq":1,"seq":2}']
    found = validate("\n".join(lines).encode(), "-")
    assert found.kind == "transcript"
    assert [(finding.line, finding.pointer) for finding in found.findings] == [(3, "/seq"), (4, ""), (5, "/seq")]


def test_all_violations_are_found_at_once() -> None:
    order = {"task": 1, "lane": "x", "workspace": {"include": [2, "a"]}, "config": {"env": {"A": 5}}}
    assert sorted(pointers(validate(json.dumps(order).encode(), "-"))) == [
        "/config/env/A",
        "/lane",
        "/task",
        "/workspace/include/0",
    ]


def test_pointers_are_escaped() -> None:
    found = validate(b'{"task":"t","config":{"vendor":{"a/b~c":{"k":1,"k":2}}}}', "-")
    assert pointers(found) == ["/config/vendor/a~1b~0c/k"]


@pytest.mark.parametrize("inside", [False, True])
def test_a_setting_in_the_place_of_ours_that_is_none_of_ours_is_found(inside: bool) -> None:
    vendor = {"abp": {"isolaton": "required", "isolation": "off", "request": {}}, "abp.a/b": 1, "abp.mode": "mapped"}
    order: dict[str, Any] = {"task": "t", "config": {"vendor": {**vendor, "gemini": {"tempo": 1}}}}
    found = validate(json.dumps({"t": "run", "id": "r", "work_order": order} if inside else order).encode(), "-")
    where = "/work_order/config/vendor/" if inside else "/config/vendor/"
    assert pointers(found) == [where + "abp/isolaton", where + "abp.a~1b"]


def test_a_place_of_ours_without_members_is_found() -> None:
    assert pointers(validate(b'{"task":"t","config":{"vendor":{"abp":7}}}', "-")) == ["/config/vendor/abp"]


def test_a_wrong_event_far_down_a_trace_is_named_by_its_own_index() -> None:
    receipt = json.loads((EXAMPLES / "receipt/minimal.json").read_bytes())
    good = {"ts": "2026-01-15T12:00:00Z", "type": "warning", "message": "m"}
    receipt["trace"] = [good] * 500 + [{**good, "message": 7}] + [good] * 5 + [{**good, "type": "usage"}]
    assert pointers(validate(json.dumps(receipt).encode(), "-")) == ["/trace/500/message", "/trace/506/type"]


def test_the_hash_of_a_receipt_is_computed_again() -> None:
    sealed = json.loads((EXAMPLES / "receipt/sealed.json").read_bytes())
    assert validate(json.dumps(sealed).encode(), "-").valid
    sealed["usage"]["input_tokens"] += 1
    assert pointers(validate(json.dumps(sealed).encode(), "-")) == ["/receipt_sha256"]
    sealed["receipt_sha256"] = None
    assert validate(json.dumps(sealed).encode(), "-").valid


def test_times_with_different_fractions_are_compared_as_times() -> None:
    receipt = json.loads((EXAMPLES / "receipt/minimal.json").read_bytes())
    for start, finish, wrong in (("00Z", "00.001Z", False), ("00.5Z", "00.499999Z", True), ("00Z", "00.000Z", False)):
        receipt["meta"] |= {"started_at": "2026-01-15T12:00:" + start, "finished_at": "2026-01-15T12:00:" + finish}
        assert bool(validate(json.dumps(receipt).encode(), "-").findings) == wrong, (start, finish)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00\x01\x02",
        b'\xef\xbb\xbf{"task":"x"}',
        b"[" * 100_000,
        b'{"task":"\xff"}',
        b'{"task":"\\ud800"}',
        b'{"task":NaN}',
        b'{"task":' + b"9" * 5000 + b"}",
        b"[]",
        b"3",
        b"a = nan",
        b'{"t":null,"x":1}',
        b'{"trace":{"0":1},"outcome":[]}',
        b'{"t":"final","ref_id":"a","receipt":[]}',
        b'{"t":"hello"}\n{"t":',
    ],
    ids=lambda data: repr(data[:20]),
)
def test_whatever_is_given_is_answered_with_findings(data: bytes) -> None:
    assert not validate(data, "-").valid


@given(st.binary(max_size=200), st.sampled_from(["-", "a.json", "a.jsonl", "a.toml"]))
def test_any_bytes_are_answered_without_an_exception(data: bytes, name: str) -> None:
    assert validate(data, name).name == name


def test_a_transcript_is_left_at_a_bound_of_findings_and_says_so() -> None:
    found = validate(b'{"a":1}\n' * (FINDINGS_MAX + 10_000), "-")
    assert len(found.findings) == FINDINGS_MAX + 1
    assert found.findings[-1].line == FINDINGS_MAX + 1


def test_a_backend_with_a_null_in_place_of_its_command_is_found() -> None:
    found = validate(b'{"backends":{"a":{"host":"shell","command":null},"b":{"host":"shell"}}}', "-")
    assert pointers(found) == ["/backends/a"]


@pytest.mark.parametrize("name", ["a.toml", "-"])
def test_toml_without_end_is_refused_before_it_is_read(name: str) -> None:
    (finding,) = validate(b"#" * (TOML_BYTES_MAX + 1), name).findings
    assert "TOML: over" in finding.message


def test_jsonschema_is_not_imported_by_who_only_imports_the_room() -> None:
    script = "import sys, backplane.schemas.validate; sys.exit('jsonschema' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=30).returncode == 0
