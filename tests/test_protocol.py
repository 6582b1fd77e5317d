"""Both ends of the line, fed by hand: framing, strictness, what is kept, what is dropped, who may say what."""

from __future__ import annotations

import base64
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backplane import resources
from backplane.contract import canonical
from backplane.contract import envelope as wire
from backplane.contract.events import EVENT_TYPES, ToolCall, Unread, Warned
from backplane.contract.receipt import BackendIdentity, read_receipt
from backplane.contract.work import WorkOrder
from backplane.errors import CODES, BackplaneError, ProtocolError
from backplane.protocol.control import ControlEnd
from backplane.protocol.host import HostEnd
from backplane.protocol.lines import DEPTH_MAX, EVIDENCE_BYTES, LINE_BYTES_MAX, VALUES_MAX, Lines, Overlong
from backplane.protocol.messages import (
    MESSAGES,
    Broken,
    Dropped,
    Events,
    Noise,
    Unknown,
    version_compatible,
)
from backplane.redact.secrets import Redactor
from tests import receipt_cases
from tests.all.faults.raising import Probe, Raised, probing
from tests.receipt_writer import receipt_of

NOW = "2026-01-15T12:00:00Z"
TS = "2026-01-15T12:00:00.020Z"
ORDER = WorkOrder("say hi", id="6f1c1f0e-5d0a-4c6e-9b8e-0d3a2f4b5c6d")
EXTENSIONS = ("cancel/1", "ping/1", "ask/1", "input/1", "interrupt/1")
HELLO = wire.Hello(
    contract_version="abp/v0.1",
    backend=BackendIdentity("tiny"),
    capabilities={"streaming": "native"},
    extensions=EXTENSIONS,
)
RECEIPT = json.loads(msgspec.json.encode(receipt_of([])))


def line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def event(ref_id: str = "r1", **members: Any) -> bytes:
    return line(
        {"t": "event", "ref_id": ref_id, "event": {"ts": TS, "type": "assistant_delta", "text": "a", **members}}
    )


def control(*run_ids: str, extensions: tuple[str, ...] = EXTENSIONS, **options: Any) -> ControlEnd:
    """A control plane's end, greeted and with these runs open."""
    end = ControlEnd(now=lambda: NOW, **options)
    end.receive(msgspec.json.encode(msgspec.structs.replace(HELLO, extensions=extensions)) + b"\n")
    for run_id in run_ids or ("r1",):
        end.send(wire.RunMessage(id=run_id, work_order=ORDER, extensions=EXTENSIONS))
    return end


def host(*run_ids: str, extensions: tuple[str, ...] = EXTENSIONS, **options: Any) -> HostEnd:
    """A host's end that has greeted and taken these runs."""
    end = HostEnd(**options)
    end.send(HELLO)
    for run_id in run_ids or ("r1",):
        end.receive(msgspec.json.encode(wire.RunMessage(id=run_id, work_order=ORDER, extensions=extensions)) + b"\n")
    return end


def only(received: list[Any]) -> Any:
    assert len(received) == 1, received
    return received[0]


def record_of(data: bytes) -> Any:
    """The one event that these bytes are, as it is recorded."""
    received = only(control().receive(data))
    assert isinstance(received, Events), received
    assert len(received.records) == 1
    assert received.records[0] == canonical.encode(received.events[0])
    return json.loads(received.records[0])


def cut(data: bytes, places: list[int]) -> Iterator[bytes]:
    bounds = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return (data[start:end] for start, end in itertools.pairwise(bounds))


def flat(received: list[Any]) -> list[Any]:
    """Events one by one: how many arrive together depends on how the bytes are cut, and may."""
    out: list[Any] = []
    for item in received:
        if isinstance(item, Events):
            out += [(item.ref_id, *pair) for pair in zip(item.events, item.records, strict=True)]
        else:
            out.append(item)
    return out


# Framing --------------------------------------------------------------------------------------------------------------

SOME_LINES = st.sampled_from(
    [
        event(),
        event(text="hé😀\u2028\u0085"),
        event(ref_id="r2"),
        event(ref_id="nobody"),
        event(more=[1, {"a": None}]),
        line({"t": "pong", "seq": 7}),
        line({"t": "ask", "ref_id": "r1", "id": "a1", "kind": "tool", "name": "Bash", "input": {}}),
        line({"t": "news", "ref_id": "r1"}),
        b"\xef\xbb\xbf" + event(),
        b"npm notice\r\n",
        b"\r\n",
        b"\n",
        b'{"t":"event"\n',
        b'{"t":"event","ref_id":"r1","event":"\xff"}\n',
        b" " * 800 + b"\n",
        b"{" + b"x" * 800 + b"\n",
        b"x" * 701 + b"\n",
        b"y" * 700 + b"\n",
    ]
)


@given(st.lists(SOME_LINES, max_size=8).map(b"".join), st.lists(st.integers(0, 4000), max_size=12), st.booleans())
def test_the_same_messages_come_out_however_the_bytes_are_cut(data: bytes, places: list[int], mark: bool) -> None:
    data = b"\xef\xbb\xbf" * mark + line(msgspec.to_builtins(HELLO)) + data
    whole, in_pieces = (ControlEnd(now=lambda: NOW, line_bytes_max=700) for _ in range(2))
    expected, found = flat(whole.receive(data)), []
    for piece in cut(data, places):
        found += flat(in_pieces.receive(piece))
    assert found == expected
    assert whole.lines_read == in_pieces.lines_read == data.count(b"\n")


@given(st.lists(SOME_LINES, max_size=6).map(b"".join), st.lists(st.integers(0, 4000), max_size=12))
def test_a_host_reads_the_same_messages_however_the_bytes_are_cut(data: bytes, places: list[int]) -> None:
    run = line({"t": "run", "id": "r1", "work_order": msgspec.to_builtins(ORDER)})
    data = run + data + line({"t": "cancel", "ref_id": "r1"})[:-1]
    whole, in_pieces = host("other", line_bytes_max=900), host("other", line_bytes_max=900)
    expected = [*whole.receive(data), *whole.end()]
    found = [message for piece in cut(data, places) for message in in_pieces.receive(piece)]
    assert [*found, *in_pieces.end()] == expected


@given(st.binary(max_size=300), st.lists(st.integers(0, 400), max_size=5))
def test_lines_are_what_splitting_at_lf_gives(data: bytes, places: list[int]) -> None:
    lines = Lines()
    found = [complete for piece in cut(data, places) for complete in lines.feed(piece)]
    assert [*found, lines.end()] == data.split(b"\n")


@pytest.mark.parametrize(
    "path", sorted((resources.find("contracts") / "transcripts").glob("*.jsonl")), ids=lambda p: p.stem
)
def test_a_transcript_byte_by_byte_gives_what_it_gives_in_one_piece(path: Path) -> None:
    rows = [json.loads(row) for row in path.read_bytes().splitlines()]
    limit = next((row["set"]["line_bytes_max"] for row in rows if "set" in row), LINE_BYTES_MAX)
    texts = [
        base64.b64decode(r["line_base64"]) if "line_base64" in r else r["line"].encode() for r in rows if "from" in r
    ]
    if sum(map(len, texts)) > 100_000:
        pytest.skip("a long one; cutting is tested with the others")
    data = b"\n".join(texts) + b"\n"
    whole, bytewise = (ControlEnd(now=lambda: NOW, line_bytes_max=limit) for _ in range(2))
    expected = flat(whole.receive(data))
    assert [item for byte in data for item in flat(bytewise.receive(bytes([byte])))] == expected


def test_a_line_at_the_limit_is_a_message_and_one_byte_more_is_not() -> None:
    limit = 1_000
    room = limit - len(event(text="")) + 1
    assert record_of(event(text="x" * room))["text"] == "x" * room
    end = control(line_bytes_max=limit)
    received = end.receive(event(text="x" * room) + event(text="x" * (room + 1)))
    assert isinstance(received[0], Events)
    broken = received[1]
    assert isinstance(broken, Broken)
    assert broken.code == "protocol_invalid_envelope"
    assert "line_bytes_max (1000 bytes)" in broken.message
    assert len(broken.evidence) == EVIDENCE_BYTES


def test_a_line_at_the_limit_is_written_and_one_byte_more_is_refused() -> None:
    run = wire.RunMessage(id="r1", work_order=ORDER)
    size = len(msgspec.json.encode(run))
    for limit, fits in ((size, True), (size - 1, False)):
        end = ControlEnd(now=lambda: NOW, line_bytes_max=limit)
        end.receive(msgspec.json.encode(HELLO) + b"\n")
        if fits:
            assert isinstance(only(host("other", line_bytes_max=limit).receive(end.send(run))), wire.RunMessage)
        else:
            with pytest.raises(ProtocolError, match="line_bytes_max"):
                end.send(run)


@pytest.mark.parametrize("first", [b"{", b" \t{", b"x"])
def test_an_overlong_line_is_skipped_to_its_own_newline(first: bytes) -> None:
    limit = 800
    end = control(line_bytes_max=limit)
    # Wherever a piece ends, what follows looks like a message of its own.
    data = first + b"x" * (limit - len(first)) + line({"t": "fatal", "ref_id": "r1", "error": "hidden"})
    kind = Noise if first == b"x" else Broken
    for places in ([], [limit], [limit + 1], [10, limit - 1], list(range(0, len(data), 7))):
        received = [item for piece in cut(data + event(), places) for item in end.receive(piece)]
        assert [type(item) for item in received] == [kind, Events]


@pytest.mark.parametrize("size", [1, 100, 65_536])
def test_an_endless_line_is_not_kept(size: int) -> None:
    lines = Lines(1_000)
    for _ in range(200):
        assert lines.feed(b"x" * size) == []
        assert sum(map(len, lines._pieces)) <= max(1_000, EVIDENCE_BYTES)
    assert lines.feed(b"\nnext\n")[1:] == [b"next"]


def test_a_last_line_over_the_limit_is_not_taken_for_its_own_beginning() -> None:
    cancel = line({"t": "cancel", "ref_id": "r1"})[:-1]
    end = host(line_bytes_max=2_000)
    assert end.receive(cancel + b" " * 3_000) == []
    broken = only(end.end())
    assert isinstance(broken, Broken)
    assert broken.code == "protocol_invalid_envelope"
    lines = Lines(10)
    lines.feed(b"x" * 11)
    assert isinstance(lines.end(), Overlong)


def test_a_last_line_without_newline_counts_at_both_ends() -> None:
    end = host()
    assert end.receive(line({"t": "ping", "seq": 1})[:-1]) == []
    assert end.end() == [wire.Ping(seq=1)]
    assert end.end() == []
    plane = control()
    assert plane.receive(event()[:-1]) == []
    last, whole = only(plane.end()), only(control().receive(event()))
    assert isinstance(last, Events)
    assert isinstance(whole, Events)
    assert (last.events, last.lines) == (whole.events, whole.lines)
    assert plane.unended == 1
    assert plane.end() == []


@pytest.mark.parametrize("rest", [event()[:-3], b'{"t":"final"', b"bye", b" \r", b"{} {}", b'{"t":"\xff"}'])
def test_a_last_line_that_is_not_whole_is_noise(rest: bytes) -> None:
    plane = control()
    plane.receive(rest)
    assert plane.end() == ([Noise(rest)] if rest.strip() else [])
    assert plane.unended == 0


# Strict JSON ----------------------------------------------------------------------------------------------------------

BODY = b'{"t":"event","ref_id":"r1","event":{"ts":"2026-01-15T12:00:00Z","type":"assistant_delta","text":"%s"}}\n'
REFUSED = {
    "invalid UTF-8 in a text": BODY % b"\xff",
    "invalid UTF-8 in an unknown member": event().replace(b'"a"', b'"a","x":"\xc3\x28"'),
    "a surrogate in UTF-8 clothes": BODY % b"\xed\xa0\x80",
    "a lone surrogate": BODY % b"\\ud800",
    "a lone surrogate in an unknown member": event().replace(b'"a"', b'"a","x":"\\udc00"'),
    "a lone surrogate in a key": event().replace(b'"a"', b'"a","\\ud83d":1'),
    "NaN": event().replace(b'"a"', b'"a","x":NaN'),
    "Infinity": event().replace(b'"a"', b'"a","x":-Infinity'),
    "1e999": event().replace(b'"a"', b'"a","x":1e999'),
    "1e999 in ext": event(ext={}).replace(b"{}", b'{"n":1e999}'),
    "an integer of 400 digits": event().replace(b'"a"', b'"a","x":' + b"9" * 400),
    "an integer of 10,000 digits": event().replace(b'"a"', b'"a","x":' + b"9" * 10_000),
    "a raw control character": BODY % b"\x01",
    "two objects on a line": event()[:-1] + event(),
    "a trailing comma": event().replace(b'"a"', b'"a",'),
    "a single quote": event().replace(b'"a"', b"'a'"),
    "a comment": b"{/* */" + event()[1:],
    "a leading zero": event().replace(b'"a"', b'"a","x":01'),
    "a mark not at the start": b"{\xef\xbb\xbf" + event()[1:],
    "a cut line": event()[:-3] + b"\n",
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED.keys())
def test_what_begins_like_a_message_and_is_not_strict_json_ends_the_run(data: bytes) -> None:
    end = control()
    broken = only(end.receive(event() + data)[1:])
    assert isinstance(broken, Broken)
    assert broken.code == "protocol_invalid_envelope"
    assert "line 3" in broken.message
    assert broken.evidence == data[:-1][:EVIDENCE_BYTES]
    assert ("a lone surrogate (byte" in broken.message) == (b"\\u" in data)


@pytest.mark.parametrize(
    ("data", "fact"),
    [
        (b"{\n", "it ends in the middle; one message is one line"),
        (b'{"a":"\\\\ud800"\n', "it ends in the middle"),
        (b'{"a":"\\\\ud800","b":"\\ud83d\\ude00","c":"\\ud83d"}\n', "a lone surrogate (byte 39): \\ud83d is half of"),
        (b'{"a":"\\ud83d\\ud83d\\ude00"}\n', "a lone surrogate (byte 6): \\ud83d is half of"),
        (b'{"a":"\\ude00\\ude00"}\n', "a lone surrogate (byte 6): \\ude00 is half of"),
    ],
)
def test_both_ends_say_what_keeps_a_line_from_being_json(data: bytes, fact: str) -> None:
    for end in (control(), host()):
        broken = only(end.receive(data))
        assert isinstance(broken, Broken)
        assert fact in broken.message


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-16", "utf-32-le", "utf-32-be"])
def test_other_encodings_are_never_guessed(encoding: str) -> None:
    received = control().receive(event().decode().encode(encoding))
    assert received
    assert all(isinstance(item, Noise | Broken) for item in received)


def nested(levels: int) -> bytes:
    """An event whose line is exactly so many levels deep."""
    inner = levels - 2
    return event(input=0).replace(b'"input":0', b'"input":' + b"[" * inner + b"]" * inner)


def test_a_line_as_deep_as_the_limit_is_read_and_one_level_more_is_not() -> None:
    assert isinstance(only(control().receive(nested(DEPTH_MAX))), Events)
    broken = only(control().receive(nested(DEPTH_MAX + 1)))
    assert isinstance(broken, Broken)
    assert "deeper than 128" in broken.message


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":'])
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_hundred_thousand_levels_are_refused_without_a_traceback(opening: bytes, wrapped: bool) -> None:
    deep = opening * 100_000
    data = event(x=0).replace(b'"x":0', b'"x":' + deep) if wrapped else b'{"t":' + deep + b"\n"
    for end in (control(), host()):
        broken = only(end.receive(data))
        assert isinstance(broken, Broken)
        assert broken.code == "protocol_invalid_envelope"


@pytest.mark.parametrize("value", [b"0", b"[]", b'{"":0}', b'"a,b"'])
def test_a_line_with_as_many_values_as_the_limit_is_read_and_one_more_is_not(value: bytes) -> None:
    # Four values stand around those in the list: the message, `t`, `ref_id` and the list.
    inside = 2 if value.startswith(b"{") else 1
    count = (VALUES_MAX - 4) // inside
    end = control("r1")
    frame = line({"t": "later", "ref_id": "r1", "x": [0]})
    (read,) = end.receive(frame.replace(b"0", b",".join([value] * count)))
    assert isinstance(read, Unknown)
    assert len(read.value["x"]) == count
    (broken,) = end.receive(frame.replace(b"0", b",".join([value] * (count + 1))))
    assert isinstance(broken, Broken)
    assert broken.code == "protocol_invalid_envelope"


def test_brackets_inside_a_text_are_not_levels() -> None:
    text = '[{"\\' * 500
    assert record_of(event(text=text))["text"] == text


BEFORE = [
    b"\x07", b"\0", b"\x1b[2K", b"\x1b[?25l", b"\x1b[38;5;1m", b"\x1b]0;a title\x07", b"\x1b]8;;http://x\x1b\\",
    b"\x1bPq\x1b\\", b"\x1bc", b"\x1b(B", b"\xef\xbb\xbf", b"\r", b" ", b"\t",
]  # fmt: skip
"""What a terminal's program may write before a message."""


@given(st.lists(st.sampled_from(BEFORE), max_size=4).map(b"".join), st.sampled_from(["event", "hello", "run"]))
def test_what_a_terminal_shows_before_a_message_is_skipped_and_counted(before: bytes, kind: str) -> None:
    if kind == "run":
        message: Any = wire.RunMessage(id="r2", work_order=ORDER, extensions=EXTENSIONS)
        assert only(host().receive(before + msgspec.json.encode(message) + b"\n")) == message
        return
    ends = [control("r1") if kind == "event" else ControlEnd(now=lambda: NOW) for _ in range(2)]
    data = event() if kind == "event" else msgspec.json.encode(HELLO) + b"\n"
    plain, prefixed = (end.receive(part + data) for end, part in zip(ends, (b"", before), strict=True))
    assert flat(plain) == flat(prefixed)
    assert ends[1].prefixed == bool(before.strip())


@pytest.mark.parametrize("rest", [b'{"t":', b"{red}", b"text", b"", b'["t"]', b'x{"t":"event"}', b"\x1b]0;open"])
def test_control_characters_without_a_message_are_noise(rest: bytes) -> None:
    end = control("r1")
    data = b"\x1b[31m" + rest
    assert end.receive(data + b"\n") == [Noise(data)]
    assert end.prefixed == 0
    assert len(end.receive(event())) == 1


def test_a_carriage_return_is_a_blank() -> None:
    assert record_of(event()[:-1] + b"\r\n")["text"] == "a"
    assert control().receive(b"\r\n \t\r\n\n") == []


def test_plain_events_that_come_together_are_read_with_few_calls_each() -> None:
    end = control("r1")
    data, calls = event() * 300, 0

    def count(_: object, kind: str, __: object) -> None:
        nonlocal calls
        calls += kind in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        received = end.receive(data)
    finally:
        sys.setprofile(before)
    assert len(only(received).events) == 300
    assert calls < 12 * 300


@pytest.mark.parametrize("other", [event("r2"), event().replace(b",", b", "), event(more=1), b"noise\n", b"\n"])
def test_plain_events_are_the_same_beside_any_other_line(other: bytes) -> None:
    alone, beside = control("r1"), control("r1")
    expected = [one for data in (event(text="1"), other, event(text="2")) for one in flat(alone.receive(data))]
    assert flat(beside.receive(event(text="1") + other + event(text="2"))) == expected
    assert beside.lines_read == alone.lines_read


def test_an_exception_of_our_own_comes_after_what_was_read_before_it() -> None:
    end = control("r1")
    data = event(text="1") + line({"t": "later"}) + event(text="2", more=1) + line({"t": "pong", "seq": 1}) + event()
    with probing(Probe("protocol/messages.py:convert < protocol/control.py:ControlEnd._known")):
        *before, error = end.receive(data)
    assert [type(one) for one in before] == [Events, Unknown, Events]
    assert isinstance(error, Raised)


def test_duplicate_keys_on_the_event_path_give_the_last_and_are_written_once() -> None:
    data = event().replace(b'"text":"a"', b'"text":"first","text":"last","ext":{"k":1,"k":2}')
    received = only(control().receive(data))
    assert received.records == [
        b'{"ext":{"k":2},"text":"last","ts":"2026-01-15T12:00:00.020Z","type":"assistant_delta"}'
    ]


def test_a_second_t_is_the_one_that_counts() -> None:
    data = event()[:-2] + b',"t":"news"}\n'
    assert isinstance(only(control().receive(data)), Unknown)


# What is kept ---------------------------------------------------------------------------------------------------------


def test_an_event_without_t_is_noise_even_when_something_else_fills_its_place() -> None:
    bare = {"ref_id": "r1", "event": {"ts": TS, "type": "assistant_delta", "text": "a"}}
    for filler in ({}, {"p": "12345"}):
        data = line({**bare, **filler})
        assert only(control().receive(data)) == Noise(data[:-1])


member_names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6) | st.sampled_from(
    ["t", "ts", "type", "ext", "unknown", "error_code", "raw_event", "text", "message", "unknown_envelope"]
)
typed_events = receipt_cases.events.map(msgspec.to_builtins)


def _kept(name: str, value: Any, record: dict[str, Any], kind: str) -> bool:
    """Whether a member of an event is somewhere in its record, with its value."""
    ext = record.get("ext") or {}
    unknown: Any = ext.get("unknown") if isinstance(ext.get("unknown"), dict) else {}
    if name == "ext":
        displaced = unknown.get("ext", {})
        return value is None or all(
            any(_same(item, place.get(key, _NOWHERE)) for place in (ext, displaced)) for key, item in value.items()
        )
    if name == "error_code" and value is None:
        return True
    if name == "ts":
        return bool(canonical.timestamp(value) == record["ts"])
    places: list[Any] = [record.get(name, _NOWHERE), unknown.get(name, _NOWHERE)]
    if name == "error_code":
        places.append(ext.get("error_code", _NOWHERE))
    return any(_same(value, place) for place in places)


_NOWHERE = object()


def _same(left: Any, right: Any) -> bool:
    return right is not _NOWHERE and canonical.encode(left) == canonical.encode(right)


@settings(max_examples=150)
@given(
    typed_events,
    st.dictionaries(member_names, receipt_cases.json_values, max_size=3),
    st.dictionaries(member_names, receipt_cases.json_values, max_size=2),
)
def test_no_member_of_an_event_is_ever_lost(
    known: dict[str, Any], more: dict[str, Any], around: dict[str, Any]
) -> None:
    sent = {**more, **known}
    stray = {name: value for name, value in around.items() if name not in ("t", "ref_id", "event")}
    received = only(
        control().receive(msgspec.json.encode({**stray, "t": "event", "ref_id": "r1", "event": sent}) + b"\n")
    )
    record = json.loads(only(received.records), parse_int=int)
    ext = record.get("ext") or {}
    if "raw_event" in ext and record["type"] == "warning" and ext != known.get("ext"):
        assert _same(ext["raw_event"], sent) or _kept("ext", known.get("ext"), record, known["type"])
    else:
        assert all(_kept(name, value, record, known["type"]) for name, value in sent.items()), record
    kept_around = ext.get("unknown_envelope", {}) if stray else {}
    assert all(_same(value, kept_around.get(name, _NOWHERE)) for name, value in stray.items()), record


@given(typed_events)
def test_an_event_of_the_contract_is_recorded_in_canonical_bytes(known: dict[str, Any]) -> None:
    received = only(control().receive(msgspec.json.encode({"t": "event", "ref_id": "r1", "event": known}) + b"\n"))
    typed = msgspec.convert(known, EVENT_TYPES[known["type"]])
    ext = known.get("ext", msgspec.UNSET)
    typed = msgspec.structs.replace(
        typed, ts=canonical.timestamp(known["ts"]), ext=msgspec.UNSET if ext is None else ext
    )
    if known["type"] == "error" and known.get("error_code") is None:
        typed = msgspec.structs.replace(typed, error_code=msgspec.UNSET)
    assert received.records == [canonical.encode(typed)]


def test_an_unknown_member_moves_to_ext_unknown() -> None:
    assert record_of(event(cost=3, ext={"k": 1}))["ext"] == {"k": 1, "unknown": {"cost": 3}}


def test_a_members_own_ext_is_not_overwritten_by_what_is_moved_there() -> None:
    record = record_of(event(cost=3, ext={"unknown": "mine", "k": 1}))
    assert record["ext"] == {"k": 1, "unknown": {"cost": 3, "ext": {"unknown": "mine"}}}
    record = record_of(event(type="error", message="m", error_code="E1", ext={"error_code": "mine"}))
    assert record["ext"]["error_code"] == "E1"
    assert record["ext"]["unknown"]["ext"] == {"error_code": "mine"}


def test_a_member_beside_the_event_is_kept_too() -> None:
    data = line({"t": "event", "ref_id": "r1", "seq": 9, "event": {"ts": TS, "type": "assistant_delta", "text": "a"}})
    assert record_of(data)["ext"] == {"unknown_envelope": {"seq": 9}}


@pytest.mark.parametrize(
    "body",
    [
        {"type": "usage", "ts": TS, "n": 1},
        *({}, [], 5, None, "text"),
        *({"type": {}}, {"type": []}, {"type": 7}, {"type": None}, {"type": [{}]}),
    ],
)
def test_an_event_that_cannot_be_read_is_kept_as_a_warning(body: Any) -> None:
    unread = line({"t": "event", "ref_id": "r1", "event": body})
    received = only(control().receive(event(text="before") + unread + event(text="after")))
    assert [texts.text for texts in received.events if not isinstance(texts, Unread)] == ["before", "after"]
    assert isinstance(received.events[1], Unread)
    record = json.loads(received.records[1])
    assert record["type"] == "warning"
    assert record["ts"] == NOW
    assert record["ext"] == {"raw_event": body}


@pytest.mark.parametrize(
    "members",
    [
        {"text": None},
        {"type": "tool_call", "tool_name": "x"},
        {"type": "tool_result", "tool_name": "x", "output": 1, "is_error": 1},
        {"type": "command_executed", "command": "x", "exit_code": 1.5},
        {"type": "command_executed", "command": "x", "exit_code": 2**31},
        {"type": "command_executed", "command": "x", "exit_code": -(2**31) - 1},
        {"ts": "2026-01-15T12:00:00"},
        {"ts": "yesterday"},
        {"ts": 1768478400},
        {"ts": "0001-01-01T00:00:00+14:00"},
        {"ts": "9999-12-31T23:59:59-14:00"},
        {"ts": "2026-02-30T12:00:00Z"},
        {"ts": "2026-01-15T12:00:00+99:99"},
        {"ext": 5},
    ],
)
def test_a_known_type_of_the_wrong_shape_is_kept_as_a_warning(members: dict[str, Any]) -> None:
    record = record_of(event(**members))
    assert record["type"] == "warning"
    assert record["ext"]["raw_event"] == {"ts": TS, "type": "assistant_delta", "text": "a", **members}


@pytest.mark.parametrize("code", [2**31 - 1, -(2**31)])
def test_an_exit_code_as_large_as_the_contract_takes_is_kept(code: int) -> None:
    assert record_of(event(type="command_executed", command="x", exit_code=code))["exit_code"] == code


def test_a_missing_event_is_a_warning_and_a_missing_ref_id_means_the_one_open_run() -> None:
    assert record_of(line({"t": "event", "ref_id": "r1"}))["ext"] == {"raw_event": None}
    body = {"ts": TS, "type": "assistant_delta", "text": "a"}
    for members in ({}, {"ref_id": 7}, {"ref_id": None}):
        end = control()
        received = only(end.receive(line({"t": "event", **members, "event": body})))
        assert end.unnamed == 1
        assert received.ref_id == "r1"
        assert json.loads(received.records[0]).get("ext", {}).get("unknown_envelope", {}) == members
    assert isinstance(only(control("r1", "r2").receive(line({"t": "event", "event": body}))), Dropped)


@pytest.mark.parametrize(
    ("code", "known"), [("backend_timeout", True), ("BACKEND_TIMEOUT", False), ("E001", False), ("", False)]
)
def test_an_unknown_error_code_moves_to_ext(code: str, known: bool) -> None:
    record = record_of(event(type="error", message="m", error_code=code))
    assert record.get("error_code") == (code if known else None)
    assert (record.get("ext") or {}).get("error_code") == (None if known else code)
    assert known == (code in CODES)


@pytest.mark.parametrize(
    ("ts", "printed"),
    [
        ("2026-01-15T12:00:00.123456Z", "2026-01-15T12:00:00.123456Z"),
        ("2026-01-15T12:00:00.123000Z", "2026-01-15T12:00:00.123Z"),
        ("2026-01-15T12:00:00.000000+00:00", "2026-01-15T12:00:00Z"),
        ("2026-01-15T14:00:00.5+02:00", "2026-01-15T12:00:00.500Z"),
        ("2026-01-15 12:00:00 UTC", "2026-01-15T12:00:00Z"),
        ("2016-12-31T23:59:60Z", "2016-12-31T23:59:60Z"),
    ],
)
def test_times_are_printed_as_the_contract_does(ts: str, printed: str) -> None:
    assert record_of(event(ts=ts))["ts"] == printed


@given(receipt_cases.json_values)
def test_any_json_travels_through_a_tool_call_unchanged(value: Any) -> None:
    end = host()
    sent = ToolCall(ts=TS, tool_name="x", input=value)
    received = only(control().receive(end.send(wire.EventMessage(ref_id="r1", event=sent))))
    assert _same(value, json.loads(received.records[0], parse_int=int)["input"])


def test_events_that_arrive_together_come_in_one_batch_a_run() -> None:
    end = control("r1", "r2")
    received = end.receive(event() + event() + event("r2") + b"noise\n" + event("r2") + b"\n" + event("r2"))
    assert [(item.ref_id, len(item.events)) if isinstance(item, Events) else type(item) for item in received] == [
        ("r1", 2),
        ("r2", 1),
        Noise,
        ("r2", 2),
    ]


# States and speakers --------------------------------------------------------------------------------------------------


@given(st.binary(max_size=200).map(lambda data: data + b"\n"))
def test_no_bytes_make_an_end_raise(data: bytes) -> None:
    for end in (control(), host(), ControlEnd(now=lambda: NOW), HostEnd()):
        end.receive(data)
        end.end()


MEMBER_NAMES = [*{name for kind, *_ in MESSAGES.values() for name in kind.__struct_fields__}]


@settings(max_examples=120)
@given(
    st.sampled_from([*MESSAGES, "news"]),
    st.dictionaries(
        st.sampled_from(MEMBER_NAMES),
        receipt_cases.json_values | st.just("r1"),
        max_size=6,
    ),
)
@example("run", {"work_order": [{"a": 1}]})
def test_no_message_of_any_shape_makes_an_end_raise(t: str, members: dict[str, Any]) -> None:
    data = msgspec.json.encode({"t": t, **members}) + b"\n"
    for end in (control(), host(), ControlEnd(now=lambda: NOW), HostEnd()):
        assert len(end.receive(data)) == 1


@pytest.mark.parametrize("t", [t for t in MESSAGES if t != "hello"])
def test_before_the_hello_every_other_known_message_is_a_failed_handshake(t: str) -> None:
    received = only(ControlEnd(now=lambda: NOW).receive(line({"t": t, "ref_id": "r1"})))
    assert isinstance(received, Broken)
    assert received.code == "protocol_handshake_failed"


@pytest.mark.parametrize(("t", "speaker"), [(t, speaker) for t, (_, speaker, _) in MESSAGES.items()])
def test_a_message_from_the_wrong_side_is_unexpected(t: str, speaker: str) -> None:
    end = host() if speaker == "host" else control()
    received = only(end.receive(line({"t": t, "ref_id": "r1"})))
    assert isinstance(received, Broken)
    assert received.code == "protocol_unexpected_message"


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"t": "final", "ref_id": "r1"}, "contract_invalid_receipt"),
        ({"t": "final"}, "protocol_missing_ref_id"),
        ({"t": "final", "ref_id": 7, "receipt": {}}, "protocol_missing_ref_id"),
        ({"t": "ask", "id": "a", "kind": "tool", "name": "x"}, "protocol_missing_ref_id"),
        ({"t": "fatal", "ref_id": 7, "error": "x"}, "protocol_missing_ref_id"),
        ({"t": "fatal", "ref_id": "r1"}, "contract_schema_violation"),
        ({"t": "fatal", "ref_id": None, "error": 5}, "contract_schema_violation"),
        ({"t": "pong", "seq": "x"}, "contract_schema_violation"),
        ({"t": "ask", "ref_id": "r1", "id": "a", "kind": "wish"}, "contract_schema_violation"),
        ({"t": "ask", "ref_id": "r1", "kind": "tool"}, "contract_schema_violation"),
        ({"t": "ask", "ref_id": "r1", "id": "a", "kind": "tool"}, "contract_schema_violation"),
        ({"t": "ask", "ref_id": "r1", "id": "a", "kind": "patch", "diff": ""}, "contract_schema_violation"),
    ],
)
def test_a_known_message_of_the_wrong_shape_has_its_code(message: dict[str, Any], code: str) -> None:
    received = only(control().receive(line(message)))
    assert isinstance(received, Broken)
    assert received.code == code


@pytest.mark.parametrize(
    ("members", "fact"),
    [
        ({"lane": "patch-first"}, "'patch-first' is none of 'patch_first', 'workspace_first' (did"),
        ({"lane": "patch"}, "'patch_first'?) - at `$.work_order.lane`"),
        ({"workspace": {"mode": "copy"}}, "'copy' is none of 'pass_through', 'staged' - at `$.work_order.workspace"),
        ({"requirements": {"required": [{"capability": "vision", "min_support": "any"},
          {"capability": "vision", "min_support": "nativ"}]}}, "$.work_order.requirements.required[1].min_support`"),
        ({"id": "nope"}, "`id`: not a UUID: 'nope' - at `$.work_order`"),
        ({"workspace": {"root": "a\0b"}}, "`root` has a NUL character, and no path has one"),
        ({"lane": 5}, "Expected `string`, got `integer` - at `$.work_order.lane`"),
    ],
)  # fmt: skip
def test_an_order_of_the_wrong_shape_is_told_what_may_stand_where(members: dict[str, Any], fact: str) -> None:
    received = only(host().receive(line({"t": "run", "id": "r2", "work_order": {"task": "x", **members}})))
    assert isinstance(received, Broken)
    assert fact in received.message


def test_a_wrong_word_in_any_message_is_told_the_words_that_it_takes() -> None:
    answer = only(host().receive(line({"t": "answer", "ref_id": "r1", "id": "a", "decision": "allowed"})))
    assert "'allowed' is none of 'allow', 'deny', 'modify' (did you mean 'allow'?) - at `$.decision`" in answer.message
    ask = only(control().receive(line({"t": "ask", "ref_id": "r1", "id": "a", "kind": "wish"})))
    assert "'wish' is none of 'input', 'patch', 'result', 'tool' - at `$.kind`" in ask.message
    with pytest.raises(ValueError, match=r"'completed' is none of 'complete', .*\(did you mean 'complete'\?\)"):
        read_receipt({**RECEIPT, "outcome": "completed"})
    with pytest.raises(ValueError, match=r"`run_id`: not a UUID: 'r1' - at `\$.meta`"):
        read_receipt({**RECEIPT, "meta": {**RECEIPT["meta"], "run_id": "r1"}})


@pytest.mark.parametrize(
    "change",
    [{"backend": None}, {"backend": {}}, {"capabilities": None}, {"capabilities": []}, {"contract_version": 1}],
)
def test_a_hello_of_the_wrong_shape_is_a_failed_handshake(change: dict[str, Any]) -> None:
    received = only(ControlEnd(now=lambda: NOW).receive(line({**msgspec.to_builtins(HELLO), **change})))
    assert isinstance(received, Broken)
    assert received.code == "protocol_handshake_failed"


@pytest.mark.parametrize(
    ("change", "mode", "extensions"),
    [
        ({}, "mapped", EXTENSIONS),
        ({"mode": "passthrough"}, "passthrough", EXTENSIONS),
        ({"mode": None}, "mapped", EXTENSIONS),
        ({"mode": "future"}, "mapped", EXTENSIONS),
        ({"extensions": None}, "mapped", ()),
        ({"extensions": "cancel/1"}, "mapped", ()),
        ({"extensions": ["cancel/1", 7, "zz/9"]}, "mapped", ("cancel/1", "zz/9")),
    ],
)
def test_a_mode_or_extension_of_another_version_does_not_spoil_a_hello(
    change: dict[str, Any], mode: str, extensions: tuple[str, ...]
) -> None:
    end = ControlEnd(now=lambda: NOW)
    hello = only(end.receive(line({**msgspec.to_builtins(HELLO), **change})))
    assert (hello.mode, hello.extensions) == (mode, extensions)
    assert end.extensions == extensions


def test_what_has_no_effect_is_dropped_with_its_reason() -> None:
    end = control()
    final = line({"t": "final", "ref_id": "r1", "receipt": RECEIPT})
    assert isinstance(only(end.receive(final)), wire.Final)
    end.close_run("r1")
    late = end.receive(event() + final + line({"t": "fatal", "ref_id": "r1", "error": "x"}))
    foreign = end.receive(event("r9") + line({"t": "final", "ref_id": "r9", "receipt": {}}))
    again = end.receive(line(msgspec.to_builtins(HELLO)))
    whys = [item.why for item in [*late, *foreign, *again] if isinstance(item, Dropped)]
    assert whys == ["after_end"] * 3 + ["foreign_ref_id"] * 2 + ["second_hello"]
    assert end.hello == HELLO


def test_a_fatal_without_ref_id_is_ours() -> None:
    for data in ({"t": "fatal", "ref_id": None, "error": "x"}, {"t": "fatal", "error": "x"}):
        assert isinstance(only(control().receive(line(data))), wire.Fatal)


def test_an_unknown_message_is_kept_as_it_came() -> None:
    value = {"t": "news", "ref_id": "r1", "body": [1, {"a": None}]}
    assert only(control().receive(line(value))) == Unknown("news", "r1", value)
    assert isinstance(only(ControlEnd(now=lambda: NOW).receive(line(value))), Noise)
    assert only(host().receive(line(value))) == Unknown("news", "r1", value)


@pytest.mark.parametrize(
    "t", [name for name, (_, sender, needed) in MESSAGES.items() if sender == "control" and needed]
)
def test_an_extension_is_only_spoken_to_a_host_that_announced_it(t: str) -> None:
    message: Any = {
        "cancel": wire.Cancel(ref_id="r1"),
        "input": wire.Input(ref_id="r1", text="more"),
        "interrupt": wire.Interrupt(ref_id="r1"),
        "ping": wire.Ping(seq=1),
        "answer": wire.AnswerMessage(ref_id="r1", id="a", decision="allow"),
    }[t]
    control().send(message)
    # A person asks for an interrupt, and is told what the host cannot do; of the others a program asks.
    code = "capability_unsupported" if t == "interrupt" else "protocol_unexpected_message"
    with pytest.raises(BackplaneError, match="announce") as refused:
        control(extensions=()).send(message)
    assert refused.value.code == code


def test_a_host_that_asks_without_a_word_before_gets_its_answer() -> None:
    end = control(extensions=())
    end.receive(line({"t": "ask", "ref_id": "r1", "id": "a", "kind": "tool", "name": "x"}))
    assert end.send(wire.AnswerMessage(ref_id="r1", id="a", decision="deny"))


def test_a_control_plane_says_nothing_before_the_hello() -> None:
    with pytest.raises(ProtocolError):
        ControlEnd(now=lambda: NOW).send(wire.RunMessage(id="r1", work_order=ORDER))


def test_a_host_says_things_in_order_and_only_of_open_runs() -> None:
    end = HostEnd()
    told = Warned(ts=TS, message="m")
    with pytest.raises(ProtocolError):
        end.send(wire.EventMessage(ref_id="r1", event=told))
    end.send(HELLO)
    with pytest.raises(ProtocolError):
        end.send(HELLO)
    with pytest.raises(ProtocolError):
        end.send(wire.EventMessage(ref_id="r1", event=told))
    with pytest.raises(ProtocolError):
        host(extensions=()).send(wire.Ask(ref_id="r1", id="a", kind="tool", name="bash"))
    end = host()
    final = wire.Final(ref_id="r1", receipt=RECEIPT)
    assert end.send(wire.Ask(ref_id="r1", id="a", kind="tool", name="bash"))
    assert end.send(final)
    with pytest.raises(ProtocolError):
        end.send(final)
    assert end.send(wire.Fatal(ref_id=None, error="a line could not be read"))


def test_a_host_ends_a_run_that_is_too_long_for_a_line_another_way() -> None:
    end = host(line_bytes_max=1_000)
    with pytest.raises(ProtocolError, match="line_bytes_max"):
        end.send(wire.Final(ref_id="r1", receipt={"x": "x" * 1_000}))
    assert end.send(wire.Fatal(ref_id="r1", error="too long"))


def test_a_host_goes_on_after_every_line_it_cannot_read() -> None:
    end = host()
    run = {"t": "run", "id": "r2", "work_order": {"task": "x"}}
    bad = [
        b"{not json\n",
        b"not json\n",
        b"[1]\n",
        b'{"t":5}\n',
        line({"t": "run", "id": "r2"}),
        line(run)[:-2] + b',"id":"r3"}\n',
        line({"t": "run", "id": "r1", "work_order": {"task": "x"}}),
        line({"t": "ping", "seq": "x"}),
        line({"t": "cancel"}),
        b"\xff\xfe\n",
        b'{"t":"ping","seq":1,"x":"\\ud800"}\n',
    ]
    for data in bad:
        assert isinstance(only(end.receive(data)), Broken), data
    message = only(end.receive(line(run)))
    assert isinstance(message, wire.RunMessage)
    assert message.work_order.task == "x"


@pytest.mark.parametrize("seq", [-1, 2**64, "1", 1.5, None])
def test_a_ping_whose_number_no_pong_can_repeat_is_one_error(seq: Any) -> None:
    end = host()
    broken = only(end.receive(line({"t": "ping", "seq": seq})))
    assert isinstance(broken, Broken)
    assert (broken.code, broken.ref_id) == ("contract_schema_violation", None)
    for fits in (0, 2**64 - 1):
        assert only(end.receive(line({"t": "ping", "seq": fits}))) == wire.Ping(seq=fits)


def test_a_cancel_or_answer_of_a_run_that_is_over_is_dropped_at_the_host() -> None:
    for message in ({"t": "cancel", "ref_id": "r9"}, {"t": "answer", "ref_id": "r9", "id": "a", "decision": "deny"}):
        assert isinstance(only(host().receive(line(message))), Dropped)


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("abp/v0.1", True),
        ("abp/v0.2", True),
        ("abp/v0.999", True),
        ("abp/v00.1", True),
        ("abp/v1.0", False),
        ("abp/v0", False),
        ("abp/v0.1.2", False),
        ("abp/v+0.1", False),
        ("abp/v٠.1", False),
        ("abp/v0.", False),
        ("mcp/v0.1", False),
        ("", False),
        ("abp/v" + "0" * 5000 + ".1", False),
    ],
)
def test_versions_of_the_same_major_number_can_speak(version: str, fits: bool) -> None:
    assert version_compatible(version) is fits


messages_of_both: st.SearchStrategy[Any] = st.one_of(
    st.builds(wire.Ping, seq=st.integers(0, 2**64 - 1)),
    st.builds(
        wire.Cancel, ref_id=st.just("r1"), reason=st.none() | receipt_cases.texts, grace_ms=st.integers(0, 10**6)
    ),
    st.builds(
        wire.AnswerMessage,
        ref_id=st.just("r1"),
        id=receipt_cases.texts,
        decision=st.sampled_from(["allow", "deny", "modify"]),
        text=receipt_cases.texts,
        remember=st.sampled_from(["once", "run"]),
    ),
)


@given(messages_of_both)
def test_what_a_control_plane_writes_a_host_reads(message: Any) -> None:
    assert host().receive(control().send(message)) == [message]


@given(
    st.one_of(
        st.builds(wire.Pong, seq=st.integers(0, 2**64 - 1)),
        st.builds(wire.Fatal, ref_id=st.sampled_from([None, "r1"]), error=receipt_cases.texts),
        st.builds(
            wire.Ask, ref_id=st.just("r1"), id=receipt_cases.texts, kind=st.just("tool"), name=receipt_cases.texts
        ),
        st.builds(wire.Final, ref_id=st.just("r1"), receipt=st.just(RECEIPT)),
    )
)
def test_what_a_host_writes_a_control_plane_reads(message: Any) -> None:
    assert control().receive(host().send(message)) == [message]


# Secrets that a host says ---------------------------------------------------------------------------------------------

SECRET = "hunter2-and-more"
SAID: list[dict[str, Any]] = [
    {"type": "assistant_delta", "text": SECRET},
    {"type": "assistant_message", "text": f"it is {SECRET}"},
    {"type": "warning", "message": SECRET},
    {"type": "file_changed", "path": "a", "summary": SECRET},
    {"type": "command_executed", "command": "c", "exit_code": 0, "output_preview": SECRET},
    {"type": "tool_call", "tool_name": "t", "input": {"a": [1, {SECRET: 2}]}},
    {"type": "tool_result", "tool_name": "t", "output": SECRET, "is_error": False},
    {"type": "nobody_knows_it", "said": SECRET},
]


@pytest.mark.parametrize("said", SAID, ids=lambda said: str(said["type"]))
@pytest.mark.parametrize("around", [0, 3])
@pytest.mark.parametrize("escaped", [False, True])
def test_a_secret_that_a_host_says_does_not_come_through(said: dict[str, Any], around: int, escaped: bool) -> None:
    end = control(redactor=Redactor([SECRET]))
    usual = event() * around
    spoken = line({"t": "event", "ref_id": "r1", "event": {"ts": TS, **said}})
    spoken = spoken.replace(b"hunter", b"\\u0068unter") if escaped else spoken
    batches = end.receive(usual + spoken + usual)
    told = b"".join(batch.lines for batch in batches if isinstance(batch, Events))
    assert len(told.splitlines()) == 2 * around + 1
    assert b"hunter2" not in told
    assert "hunter2" not in repr(batches)
    assert b"[redacted]" in told
    assert end.redacted == 1


def test_a_secret_in_the_last_message_does_not_come_through() -> None:
    for last in ({"t": "fatal", "error": SECRET}, {"t": "final", "receipt": {**RECEIPT, "usage_raw": {"a": SECRET}}}):
        end = control(redactor=Redactor([SECRET]))
        (received,) = end.receive(line({"ref_id": "r1", **last}))
        assert "hunter2" not in repr(received)
        assert "[redacted]" in repr(received)
