"""A whole read of plain words is taken in one go; nothing about it may differ from line by line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane.contract import canonical
from backplane.contract.envelope import Final, RunMessage
from backplane.contract.work import WorkOrder
from backplane.protocol.control import ControlEnd
from backplane.protocol.messages import Dropped, Events
from backplane.redact.secrets import NO_SECRETS, Redactor

RUN_ID = "3fa85f64-5717-4562-b3fc-2c963f66afa6"
TS = "2026-01-01T00:00:00.001Z"
HELLO = b'{"t":"hello","contract_version":"abp/v0.1","backend":{"id":"x"},"capabilities":{}}\n'


def open_end(redactor: Redactor = NO_SECRETS) -> ControlEnd:
    end = ControlEnd(now=lambda: "2026-01-01T00:00:00Z", redactor=redactor)
    end.receive(HELLO)
    end.send(RunMessage(id=RUN_ID, work_order=WorkOrder("x")))
    return end


def line(text: str, *, ref_id: str = RUN_ID, ascii_only: bool = False, **members: Any) -> bytes:
    event = {"type": "assistant_delta", "ts": TS, "text": text, **members}
    value = {"t": "event", "ref_id": ref_id, "event": event}
    return json.dumps(value, separators=(",", ":"), ensure_ascii=ascii_only).encode() + b"\n"


def taken(end: ControlEnd, *reads: bytes) -> tuple[list[Any], list[bytes], list[Any]]:
    """Events, records and everything else that came of these reads."""
    received = [item for read in reads for item in end.receive(read)]
    events = [event for item in received if isinstance(item, Events) for event in item.events]
    records = [record for item in received if isinstance(item, Events) for record in item.records]
    return events, records, [item for item in received if not isinstance(item, Events)]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
ODD = st.sampled_from([{}, {}, {}, {"new": 1}, {"ext": {"a": 1.0}}, {"ts": "2026-01-01T00:00:00.001000Z"}])


@given(st.lists(st.tuples(TEXTS, ODD, st.booleans()), min_size=1, max_size=8))
def test_a_read_of_many_lines_gives_what_its_lines_give_one_by_one(
    parts: list[tuple[str, dict[str, Any], bool]],
) -> None:
    lines = [line(text, ascii_only=escaped, **odd) for text, odd, escaped in parts]
    at_once = taken(open_end(), b"".join(lines))
    one_by_one = taken(open_end(), *lines)
    assert at_once == one_by_one
    events, records, others = at_once
    assert [event.text for event in events] == [text for text, _, _ in parts]
    assert records == [canonical.encode(event) for event in events]
    assert others == []


@pytest.mark.parametrize("secret", ["hunter2-and-more", "sk-ant-0123456789abcdefghijklmnop", "two words"])
@pytest.mark.parametrize("place", [0, 57, 199])
def test_a_secret_anywhere_in_a_read_is_redacted(secret: str, place: int) -> None:
    texts = [f"word {number}" for number in range(200)]
    texts[place] = f"the key is {secret}, keep it"
    _, records, _ = taken(open_end(Redactor([secret])), b"".join(map(line, texts)))
    assert secret.encode() not in b"\n".join(records)
    assert len(records) == 200


def test_a_key_known_by_its_looks_is_redacted_in_a_read_of_words() -> None:
    key = "AKIAIOSFODNN7EXAMPLE"
    _, records, _ = taken(open_end(Redactor([])), b"".join(map(line, ["before", f"use {key} now", "after"])))
    assert key.encode() not in b"\n".join(records)


def test_events_of_another_run_in_a_read_are_dropped_and_the_rest_is_kept() -> None:
    other = "11111111-1111-4111-8111-111111111111"
    events, _, others = taken(open_end(), line("a") + line("b", ref_id=other) + line("c"))
    assert [event.text for event in events] == ["a", "c"]
    assert [type(item) for item in others] == [Dropped]


def test_a_final_behind_a_read_of_words_is_heard() -> None:
    final = b'{"t":"final","ref_id":"%s","receipt":{}}\n' % RUN_ID.encode()
    events, _, others = taken(open_end(), line("a") + line("b") + final)
    assert [event.text for event in events] == ["a", "b"]
    assert [type(item) for item in others] == [Final]
