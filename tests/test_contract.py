"""The contract's shapes and bytes: known answers first, then what must hold for every value."""

from __future__ import annotations

import json
import math
import random
import re
import struct
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backplane.contract import canonical, envelope
from backplane.contract import events as ev
from backplane.contract.capability import (
    CAPABILITIES,
    EMULATED,
    NATIVE,
    UNSUPPORTED,
    Level,
    read_level,
    read_manifest,
    restricted,
)
from backplane.contract.receipt import CONTRACT_VERSION, Receipt, read_receipt, receipt_hash, verify_bytes
from backplane.contract.unknown import UNHEARD
from backplane.contract.work import SETTINGS, PolicyProfile, WorkOrder

TS = "2025-01-15T12:00:00Z"

# Known answers --------------------------------------------------------------------------------------------------------

ODD_TEXT = '\u2028\u007f\u0001/"\\'
FIRST_BODY = (
    '{"artifacts":[],"backend":{"adapter_version":null,"backend_version":null,"id":"vec"},"capabilities":{"streaming":'
    '"native","tool_bash":{"restricted":{"reason":"sandbox"}}},"meta":{"contract_version":"abp/v0.1","duration_ms":380,'
    '"finished_at":"2025-01-15T12:00:00.500Z","run_id":"550e8400-e29b-41d4-a716-446655440000","started_at":'
    '"2025-01-15T12:00:00.120Z","work_order_id":"00000000-0000-0000-0000-000000000000"},"mode":"passthrough","outcome":'
    '"partial","receipt_sha256":null,"trace":[{"ext":{"raw_message":{"x":[1.5,null,true],"y":2}},"text":"hé😀","ts":'
    '"2025-01-15T12:00:00.200Z","type":"assistant_delta"},{"input":{"path":"a"},"parent_tool_use_id":null,"tool_name":'
    '"Read","tool_use_id":null,"ts":"2025-01-15T12:00:00.300Z","type":"tool_call"}],"usage":{"cache_read_tokens":null,'
    '"cache_write_tokens":null,"estimated_cost_usd":0.0,"input_tokens":1,"output_tokens":2,"request_units":null},'
    '"usage_raw":{"a":0.1,"b":1e-7,"c":1.0,"d":100000.0,"e":18446744073709551615,"f":-1,"g":1000000000000000.0,'
    '"h":0.00001,"z":null,"é":"\u2028\u007f\\u0001/\\"\\\\"},"verification":{"git_diff":null,"git_status":"?? a\\n",'
    '"harness_ok":false}}'
)
FIRST_HASH = "aa914de39221a22eba91d4f56d7955008690c7b31e6a7e04b1f2ed192ef418d6"

SECOND: dict[str, Any] = {
    "meta": {
        "run_id": "550E8400-e29b-41d4-a716-446655440000",
        "work_order_id": "00000000-0000-0000-0000-000000000000",
        "contract_version": "abp/v0.1",
        "started_at": "2025-01-15T12:00:00.120+00:00",
        "finished_at": "2025-01-15T12:00:00.500000Z",
        "duration_ms": 1,
        "xx": 1,
    },
    "zz": [1],
    "backend": {"id": "x"},
    "capabilities": {"tool_read": "native", "streaming": "native"},
    "usage_raw": {"f": 1.0, "n": None},
    "usage": {"estimated_cost_usd": 0},
    "trace": [],
    "artifacts": [],
    "verification": {"harness_ok": True},
    "outcome": "complete",
}
SECOND_HASH = "76749143e5839c8f98e172689ac73551faafb846f5fab847ccf0a98879e099c0"


def test_the_first_known_receipt_has_its_bytes_and_its_hash() -> None:
    value = canonical.decode(FIRST_BODY)
    assert value["usage_raw"]["é"] == ODD_TEXT
    receipt = read_receipt(value)
    assert canonical.encode(receipt).decode() == FIRST_BODY
    assert receipt_hash(receipt) == canonical.sha256_hex(FIRST_BODY.encode()) == FIRST_HASH


def test_the_second_known_receipt_is_put_right_before_it_is_hashed() -> None:
    receipt = read_receipt(canonical.decode(json.dumps(SECOND)))
    assert receipt_hash(receipt) == SECOND_HASH
    assert len(canonical.encode(receipt)) == 699
    assert receipt.meta.run_id == "550e8400-e29b-41d4-a716-446655440000"
    assert (receipt.mode, receipt.backplane) == ("mapped", {})


# A literal of JSON and what it is in the contract's canonical form.
NUMBERS = [
    ("0", "0"),
    ("-1", "-1"),
    ("-0", "-0.0"),
    ("-0.0", "-0.0"),
    ("0.0", "0.0"),
    ("1.0", "1.0"),
    ("1e0", "1.0"),
    ("1E2", "100.0"),
    ("100000.0", "100000.0"),
    ("0.1", "0.1"),
    ("9007199254740993", "9007199254740993"),
    ("-9223372036854775808", "-9223372036854775808"),
    ("-9223372036854775809", "-9.223372036854776e+18"),
    ("18446744073709551615", "18446744073709551615"),
    ("18446744073709551616", "1.8446744073709552e+19"),
    ("1" + "0" * 40, "1e+40"),
    ("0.00001", "0.00001"),
    ("0.000012", "0.000012"),
    ("0.000001", "1e-6"),
    ("1e-7", "1e-7"),
    ("1.25e-7", "1.25e-7"),
    ("5e-324", "5e-324"),
    ("2.2250738585072014e-308", "2.2250738585072014e-308"),
    ("1000000000000000.0", "1000000000000000.0"),
    ("9999999999999998.0", "9999999999999998.0"),
    ("1e15", "1000000000000000.0"),
    ("1e16", "1e+16"),
    ("12345678901234567.0", "1.2345678901234568e+16"),
    ("1.5e300", "1.5e+300"),
    ("1.7976931348623157e308", "1.7976931348623157e+308"),
    ("0.30000000000000004", "0.30000000000000004"),
    ("123456.789", "123456.789"),
]


@pytest.mark.parametrize(("literal", "expected"), NUMBERS)
def test_a_number_has_one_canonical_form(literal: str, expected: str) -> None:
    assert canonical.encode(canonical.decode(literal)).decode() == expected
    assert canonical.encode(canonical.decode(f'{{"a":[{literal}]}}')).decode() == f'{{"a":[{expected}]}}'
    assert canonical.encode(canonical.decode(expected)).decode() == expected


STRINGS = [
    ('"\\""', '"\\""'),
    ('"\\\\"', '"\\\\"'),
    ('"\\/"', '"/"'),
    ('"\\b\\f\\n\\r\\t"', '"\\b\\f\\n\\r\\t"'),
    ('"\\u0000\\u001F"', '"\\u0000\\u001f"'),
    ('"\\u007f\\u2028"', '"\u007f\u2028"'),
    ('"\\u00e9"', '"é"'),
    ('"\\ud83d\\ude00"', '"😀"'),
    ('"1e16 -0 99999999999999999999"', '"1e16 -0 99999999999999999999"'),
]


@pytest.mark.parametrize(("literal", "expected"), STRINGS)
def test_a_text_has_one_canonical_form(literal: str, expected: str) -> None:
    assert canonical.encode(canonical.decode(literal)).decode() == expected


def test_names_are_sorted_by_their_bytes_at_every_depth() -> None:
    text = '{"😀":1,"\uffff":2,"é":3,"b":{"z":1,"a":2},"a":4,"aa":5,"B":6}'
    expected = '{"B":6,"a":4,"aa":5,"b":{"a":2,"z":1},"é":3,"\uffff":2,"😀":1}'
    assert canonical.encode(canonical.decode(text)).decode() == expected


NOT_JSON = [
    "",
    "{",
    "NaN",
    "Infinity",
    "1e400",
    "01",
    "1.",
    "'a'",
    '"\\ud800"',
    '"\n"',
    "[1,]",
    "{} {}",
    '{"a"}',
    "tru",
]


@pytest.mark.parametrize("text", NOT_JSON)
def test_what_is_not_strict_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        canonical.decode(text)


def test_bytes_that_are_not_utf_8_are_refused() -> None:
    with pytest.raises(ValueError, match=r"."):
        canonical.decode(b'"\xff"')


def test_an_integer_that_no_float_holds_has_no_canonical_form() -> None:
    with pytest.raises(ValueError, match="308 digits"):
        canonical.encode({"a": 10**400})


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"a":1,"a":2}', "a"),
        ('{"a":{"b":1,"b":1}}', "b"),
        ('[{"a":1},{"a":1}]', None),
        ('{"a":1,"\\u0061":2}', "a"),
        ('{"a":1,"a":1}', "a"),
        ('{"a":{"b":[1,{"c":-0,"c":2}]}}', "c"),
        ('{ "a" : 1.50 }', None),
        ("1", None),
    ],
)
def test_a_name_that_stands_twice_is_named(text: str, key: str | None) -> None:
    data = text.encode()
    assert canonical.duplicate_key(data, canonical.decode(data)) == key


# Times and ids --------------------------------------------------------------------------------------------------------

TIMES = [
    ("2025-01-15T12:00:00Z", "2025-01-15T12:00:00Z"),
    ("2025-01-15T12:00:00.000Z", "2025-01-15T12:00:00Z"),
    ("2025-01-15T12:00:00.5Z", "2025-01-15T12:00:00.500Z"),
    ("2025-01-15T12:00:00.120Z", "2025-01-15T12:00:00.120Z"),
    ("2025-01-15T12:00:00.100000Z", "2025-01-15T12:00:00.100Z"),
    ("2025-01-15T12:00:00.1234Z", "2025-01-15T12:00:00.123400Z"),
    ("2025-01-15T12:00:00.123456789Z", "2025-01-15T12:00:00.123456789Z"),
    ("2025-01-15T12:00:00.1234567899Z", "2025-01-15T12:00:00.123456789Z"),
    ("2025-01-15T12:00:00.120+00:00", "2025-01-15T12:00:00.120Z"),
    ("2025-01-15T12:00:00+02:30", "2025-01-15T09:30:00Z"),
    ("2025-01-01T00:30:00+01:00", "2024-12-31T23:30:00Z"),
    ("2025-01-15T12:00:00-00:00", "2025-01-15T12:00:00Z"),
    ("2025-01-15 12:00:00Z", "2025-01-15T12:00:00Z"),
    ("2025-01-15 12:00:00 UTC", "2025-01-15T12:00:00Z"),
    ("2025-01-15t12:00:00z", "2025-01-15T12:00:00Z"),
    ("2016-12-31T23:59:60Z", "2016-12-31T23:59:60Z"),
    ("2016-12-31T23:59:60.5Z", "2016-12-31T23:59:60.500Z"),
    ("0001-01-01T00:00:00Z", "0001-01-01T00:00:00Z"),
]
NO_TIMES = ["", "2025-01-15", "2025-01-15T12:00:00", "2025-01-15T12:00Z", "1736942400", "2025-13-01T00:00:00Z", "x"]


@pytest.mark.parametrize(("text", "expected"), TIMES)
def test_a_time_has_one_print_form(text: str, expected: str) -> None:
    assert canonical.timestamp(text) == expected
    assert canonical.timestamp(expected) == expected


@pytest.mark.parametrize("text", NO_TIMES)
def test_what_is_no_time_with_an_offset_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        canonical.timestamp(text)


@given(st.integers(0, 253_402_300_799_999))
def test_our_own_times_are_in_the_print_form_already(milliseconds: int) -> None:
    text = canonical.timestamp_at(milliseconds * 1_000_000)
    assert canonical.timestamp(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "550e8400-e29b-41d4-a716-446655440000",
        "550E8400-E29B-41D4-A716-446655440000",
        "550e8400e29b41d4a716446655440000",
        "{550e8400-e29b-41d4-a716-446655440000}",
        "urn:uuid:550e8400-e29b-41d4-a716-446655440000",
    ],
)
def test_an_id_has_one_print_form(text: str) -> None:
    assert canonical.uuid_text(text) == "550e8400-e29b-41d4-a716-446655440000"


@pytest.mark.parametrize(
    "text", ["", "550e8400", "550e8400-e29b-41d4-a716-44665544000g", "550e8400-e29b-41d4-a716-4466554400000"]
)
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a UUID"):
        canonical.uuid_text(text)


# For every value ------------------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
INTEGERS = st.integers(canonical.INT_MIN, canonical.INT_MAX)
VALUES = st.recursive(
    st.none() | st.booleans() | INTEGERS | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def model(value: Any) -> str:
    """The canonical form written naively, from the contract's sentences."""
    if isinstance(value, dict):
        names = sorted(value, key=lambda name: name.encode())
        return "{" + ",".join(f"{json.dumps(name, ensure_ascii=False)}:{model(value[name])}" for name in names) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(model, value)) + "]"
    return float_model(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def float_model(value: float) -> str:
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)
    text, point = "".join(map(str, digits)), exponent + len(digits)
    minus = "-" if sign else ""
    if value == 0:
        return minus + "0.0"
    if not -5 <= point - 1 <= 15:
        fraction = "." + text[1:] if len(text) > 1 else ""
        return f"{minus}{text[0]}{fraction}e{'+' if point > 0 else ''}{point - 1}"
    if point <= 0:
        return f"{minus}0.{'0' * -point}{text}"
    return f"{minus}{text[:point].ljust(point, '0')}.{text[point:] or '0'}"


@given(VALUES)
@example(1e16)
@example(-0.0)
@example({"a": [1e22, 2.0**64, -(2**63)]})
def test_the_canonical_form_is_what_the_contract_says_and_comes_back_the_same(value: Any) -> None:
    data = canonical.encode(value)
    assert data.decode() == model(value)
    again = canonical.decode(data)
    assert again == value
    assert canonical.encode(again) == data


@given(st.lists(VALUES, max_size=5))
@example([1e16, {"a": [1e22, 2.0**64, -(2**63)]}, "\n", -0.0, 2**64, 12345678901234567890123])
def test_lines_are_the_canonical_form_of_each(values: list[Any]) -> None:
    assert canonical.encode_lines(values) == b"".join(canonical.encode(value) + b"\n" for value in values)


@given(FLOATS)
def test_every_float_keeps_its_bits(value: float) -> None:
    (again,) = canonical.decode(canonical.encode([value]))
    assert struct.pack("d", again) == struct.pack("d", value)


def shuffled(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict):
        names = list(value)
        chance.shuffle(names)
        return {name: shuffled(value[name], chance) for name in names}
    return [shuffled(item, chance) for item in value] if isinstance(value, list) else value


@given(st.dictionaries(TEXTS, VALUES, max_size=5), st.randoms(use_true_random=False))
def test_the_hash_does_not_depend_on_the_order_of_names(usage: dict[str, Any], chance: random.Random) -> None:
    value = {**SECOND, "usage_raw": usage}
    assert receipt_hash(read_receipt(value)) == receipt_hash(read_receipt(shuffled(value, chance)))


# Numbers as the public implementation's parser reads them -------------------------------------------------------------


def inexact_model(text: str) -> float:
    """A 64-bit significand, then one multiplication or division by a power of ten."""
    mantissa, _, exponent = text.lower().partition("e")
    whole, _, fraction = mantissa.removeprefix("-").partition(".")
    power, significand, full = int(exponent or 0), 0, False
    for digit in whole:
        full = full or significand * 10 + int(digit) >= 2**64
        significand, power = (significand, power + 1) if full else (significand * 10 + int(digit), power)
    for digit in fraction:
        full = full or significand * 10 + int(digit) >= 2**64
        significand, power = (significand, power) if full else (significand * 10 + int(digit), power - 1)
    value = float(significand)
    if power < -308:
        value, power = value / 1e308, power + 308
    scale = float(f"1e{abs(power)}")  # Not 10.0**n, which is off from the 23rd power on.
    value = value * scale if power >= 0 else value / scale
    return -value if text.startswith("-") else value


@given(
    st.floats(min_value=1e-290, max_value=1e290).flatmap(lambda value: st.sampled_from([repr(value), f"{value:.20e}"]))
)
@example("0.1")
@example("123456789012345678901234567890.5")
@example("-0.30000000000000004")
def test_the_inexact_reading_is_off_by_a_unit_in_the_last_place_at_most(text: str) -> None:
    value = canonical.decode_inexact(text.encode())
    assert value == pytest.approx(float(text), rel=1e-15)
    if 1e-22 < abs(float(text)) < 1e22:
        assert value == inexact_model(text)


@given(st.integers(-(10**15) + 1, 10**15 - 1), st.integers(0, 22))
def test_fifteen_digits_are_read_alike_by_both(digits: int, places: int) -> None:
    text = f"{digits}e-{places}"
    assert canonical.decode_inexact(text.encode()) == float(text)


def inexactly_read() -> str:
    """Some literal that the two readings differ on; nearly one in ten does."""
    chance = random.Random(1)
    return next(
        text
        for text in (repr(chance.random()) for _ in range(1000))
        if canonical.decode_inexact(text.encode()) != float(text)
    )


def test_a_foreign_receipt_verifies_by_the_exact_or_by_the_inexact_reading() -> None:
    literal = inexactly_read()
    text = json.dumps({**SECOND, "usage_raw": {"f": "@"}}).replace('"@"', literal)
    exact = receipt_hash(read_receipt(canonical.decode(text)))
    inexact = receipt_hash(read_receipt(canonical.decode_inexact(text.encode())))
    assert exact != inexact
    for digest, holds in ((exact, True), (inexact, True), ("0" * 64, False)):
        sealed = text[:-1] + f',"receipt_sha256":"{digest}"}}'
        assert (verify_bytes(sealed.encode()) is None) is holds


def test_a_receipt_without_a_hash_does_not_verify() -> None:
    assert verify_bytes(json.dumps(SECOND).encode()) == "the receipt has no hash"
    assert verify_bytes(FIRST_BODY.encode()) == "the receipt has no hash"


def test_any_change_of_a_sealed_receipt_is_seen() -> None:
    sealed = FIRST_BODY.replace('"receipt_sha256":null', f'"receipt_sha256":"{FIRST_HASH}"')
    assert verify_bytes(sealed.encode()) is None
    for old, new in (("380", "381"), ("partial", "complete"), ("hé", "he"), ("1e-7", "2e-7"), ('"z":null,', "")):
        assert verify_bytes(sealed.replace(old, new).encode()) is not None


# Null, absent, and what is refused ------------------------------------------------------------------------------------


def without(*path: str) -> dict[str, Any]:
    value = json.loads(json.dumps(SECOND))
    *parents, last = path
    inner = value
    for name in parents:
        inner = inner[name]
    del inner[last]
    return dict(value)


def with_value(new: Any, *path: str) -> dict[str, Any]:
    value = json.loads(json.dumps(SECOND))
    *parents, last = path
    inner = value
    for name in parents:
        inner = inner[name]
    inner[last] = new
    return dict(value)


REFUSED_RECEIPTS = [
    without("meta"),
    without("usage_raw"),
    without("usage"),
    without("trace"),
    without("verification", "harness_ok"),
    without("backend", "id"),
    with_value(None, "mode"),
    with_value(None, "trace"),
    with_value("done", "outcome"),
    with_value(1.0, "meta", "duration_ms"),
    with_value(-1, "meta", "duration_ms"),
    with_value(2**64, "meta", "duration_ms"),
    with_value(2**64, "usage", "input_tokens"),
    with_value("1", "usage", "input_tokens"),
    with_value("not-an-id", "meta", "run_id"),
    with_value("yesterday", "meta", "started_at"),
    with_value([{"type": "usage", "ts": TS}], "trace"),
    with_value([{"type": "assistant_delta", "ts": TS, "text": None}], "trace"),
]


@pytest.mark.parametrize("value", REFUSED_RECEIPTS)
def test_a_receipt_of_the_wrong_shape_is_refused(value: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        read_receipt(value)


def test_absent_and_null_mean_the_same_where_nothing_is_allowed_and_null_is_written() -> None:
    assert read_receipt(with_value(None, "usage", "input_tokens")) == read_receipt(SECOND)
    assert read_receipt(with_value(None, "receipt_sha256")) == read_receipt(SECOND)
    written = json.loads(canonical.encode(read_receipt(without("usage", "estimated_cost_usd"))))
    assert set(written["usage"].values()) == {None}
    assert written["verification"] == {"git_diff": None, "git_status": None, "harness_ok": True}
    assert written["receipt_sha256"] is None
    assert "zz" not in written


# One event a row: what is written, what comes back out.
EVENTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "run_started", "message": "m"}, {}),
    ({"type": "run_completed", "message": "m"}, {}),
    ({"type": "warning", "message": "m", "ext": {}}, {}),
    ({"type": "assistant_delta", "text": ""}, {}),
    ({"type": "assistant_message", "text": "t", "ext": {"raw_message": [1]}}, {}),
    ({"type": "tool_call", "tool_name": "x", "input": None}, {"tool_use_id": None, "parent_tool_use_id": None}),
    ({"type": "tool_result", "tool_name": "x", "output": [1], "is_error": False}, {"tool_use_id": None}),
    ({"type": "file_changed", "path": "p", "summary": "s"}, {}),
    ({"type": "command_executed", "command": "c"}, {"exit_code": None, "output_preview": None}),
    ({"type": "command_executed", "command": "c", "exit_code": -9, "output_preview": "o"}, {}),
    ({"type": "error", "message": "m"}, {}),
    ({"type": "error", "message": "m", "error_code": "internal"}, {}),
]


@pytest.mark.parametrize(("wire", "added"), EVENTS)
def test_an_event_is_written_as_it_was_read_with_its_nulls(wire: dict[str, Any], added: dict[str, Any]) -> None:
    event = msgspec.convert({**wire, "ts": TS, "unknown": 1}, ev.AgentEvent)
    assert json.loads(msgspec.json.encode(event)) == {**wire, "ts": TS, **added}
    assert msgspec.json.decode(msgspec.json.encode(event), type=ev.AgentEvent) == event
    assert type(event) is ev.EVENT_TYPES[wire["type"]]


@pytest.mark.parametrize("name", ev.CARRIED)
def test_what_rides_in_ext_is_given_its_own_type_and_written_the_same(name: str) -> None:
    body = {"text": "deep", "signature": "s"}
    plain: ev.AgentEvent = ev.carry(name, body, ts=TS, message="readable")
    if name == "reasoning":
        plain = ev.AssistantDelta(ts=TS, text="", ext={name: body})
    event = ev.carried(plain)
    assert type(event) is ev.CARRIED[name]
    assert msgspec.json.encode(event) == msgspec.json.encode(plain)
    if isinstance(event, ev.Reasoning):
        assert (event.reasoning, event.signature) == ("deep", "s")
    other = ev.RunStarted(ts=TS, message="m", ext={name: body})
    assert ev.carried(other) is other


def test_an_order_needs_a_task_alone_and_is_written_whole() -> None:
    order = msgspec.json.decode(b'{"task":"t","extra":1}', type=WorkOrder)
    written = json.loads(msgspec.json.encode(order))
    assert written == {
        "id": canonical.uuid_text(order.id),
        "task": "t",
        "lane": "patch_first",
        "workspace": {"root": ".", "mode": "staged", "include": [], "exclude": []},
        "context": {"files": [], "snippets": []},
        "policy": {name: [] for name in PolicyProfile.__struct_fields__},
        "requirements": {"required": []},
        "config": {"model": None, "vendor": {}, "env": {}, "max_budget_usd": None, "max_turns": None},
    }
    assert msgspec.convert(written, WorkOrder) == order
    assert WorkOrder(task="t").id != WorkOrder(task="t").id


@pytest.mark.parametrize(
    "wire",
    [
        {},
        {"task": None},
        {"task": "t", "id": "x"},
        {"task": "t", "lane": "fast"},
        {"task": "t", "workspace": {"mode": "pass-through"}},
        {"task": "t", "config": {"max_turns": -1}},
        {"task": "t", "config": {"max_turns": 2**32}},
        {"task": "t", "config": {"env": {"A": 1}}},
        {"task": "t", "requirements": {"required": [{"capability": "streaming", "min_support": "some"}]}},
    ],
)
def test_an_order_of_the_wrong_shape_is_refused(wire: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wire, WorkOrder)


def test_our_own_settings_are_found_nested_and_flat() -> None:
    order = msgspec.convert(
        {"task": "t", "config": {"vendor": {"abp": {"mode": "a"}, "abp.mode": "b", "abp.x": 1}}}, WorkOrder
    )
    assert (order.abp("mode"), order.abp("x"), order.abp("y", 7)) == ("a", 1, 7)


def test_our_own_settings_are_those_that_orders_are_asked_for() -> None:
    root = Path(__file__).parent.parent
    files = [*(root / "backplane").rglob("*.py"), *(root / "hosts").glob("*.py")]
    asking = re.compile(
        r'\b(?:abp\(|_amount\(order, |_read\(run, |settings_of\(vendor\)\.get\(|settings\.get\()"(\w+)"'
    )
    asked = {name for file in files for name in asking.findall(file.read_text(encoding="utf-8"))}
    assert asked | {UNHEARD} == set(SETTINGS)


LEVELS: list[tuple[Any, Level | None]] = [
    ("native", NATIVE),
    ("emulated", EMULATED),
    ("unsupported", UNSUPPORTED),
    ({"native": None}, NATIVE),
    ({"restricted": {"reason": "r"}}, restricted("r")),
    ({"restricted": {"reason": "r", "more": 1}}, restricted("r")),
    ({"restricted": {}}, None),
    ("restricted", None),
    ("Native", None),
    ("turbo", None),
    (None, None),
    (1, None),
    ([], None),
    ({}, None),
    ({"native": None, "emulated": None}, None),
]


@pytest.mark.parametrize(("wire", "level"), LEVELS)
def test_a_level_is_read_or_kept_as_unknown(wire: Any, level: Level | None) -> None:
    assert read_level(wire) == level
    manifest = read_manifest({"streaming": wire})
    assert manifest.levels == ({} if level is None else {"streaming": level})
    assert manifest.unknown == ({"streaming": wire} if level is None else {})


def test_a_manifest_is_written_in_the_contracts_order_and_without_what_it_does_not_have() -> None:
    manifest = read_manifest(
        {"tool_read": "native", "telepathy": "native", "streaming": {"restricted": {"reason": ""}}}
    )
    assert list(manifest.to_wire().items()) == [("streaming", {"restricted": {"reason": ""}}), ("tool_read", "native")]
    assert manifest.unknown == {"telepathy": "native"}
    assert len(set(CAPABILITIES)) == 41


def test_an_envelope_says_its_kind_first_and_leaves_out_what_is_not_set() -> None:
    order = WorkOrder(task="t", id="00000000-0000-0000-0000-000000000000")
    written = [
        (envelope.Cancel(ref_id="r"), b'{"t":"cancel","ref_id":"r","reason":null}'),
        (envelope.Ping(seq=1), b'{"t":"ping","seq":1}'),
        (envelope.Fatal(error="e"), b'{"t":"fatal","ref_id":null,"error":"e"}'),
        (envelope.Final(ref_id="r", receipt=None), b'{"t":"final","ref_id":"r","receipt":null}'),
        (
            envelope.AnswerMessage(ref_id="r", id="1", decision="deny"),
            b'{"t":"answer","ref_id":"r","id":"1","decision":"deny"',
        ),
    ]
    for message, expected in written:
        assert msgspec.json.encode(message).startswith(expected)
        assert msgspec.json.decode(msgspec.json.encode(message), type=type(message)) == message
    run = msgspec.json.encode(envelope.RunMessage(id="r", work_order=order))
    assert run.startswith(b'{"t":"run","id":"r","work_order":{"task"')


def test_the_hash_covers_the_receipt_and_not_the_hash_in_it() -> None:
    receipt = read_receipt(SECOND)
    sealed: Receipt = msgspec.structs.replace(receipt, receipt_sha256=receipt_hash(receipt))
    assert receipt_hash(sealed) == receipt_hash(receipt) == SECOND_HASH
    assert verify_bytes(canonical.encode(sealed)) is None
    assert sealed.meta.contract_version == CONTRACT_VERSION
    assert math.isclose(sealed.usage.estimated_cost_usd or 0.0, 0.0)
