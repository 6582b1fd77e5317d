"""C11: the lines of up to a mebibyte that cost the most time to read, of those that were tried."""

from __future__ import annotations

import time

import pytest

from backplane.contract.envelope import Final, RunMessage
from backplane.contract.work import WorkOrder
from backplane.protocol.control import ControlEnd
from backplane.protocol.messages import Broken, Events
from backplane.redact.secrets import Redactor
from backplane.runtime.events import now
from tests.all.faults import sizes

HELLO = b'{"t":"hello","contract_version":"abp/v0.1","backend":{"id":"x"},"capabilities":{}}\n'
EVENT = b'{"t":"event","ref_id":"r","event":{"type":"tool_call","ts":"2026-01-15T12:00:00Z","tool_name":"t","input":'
FINAL = b'{"t":"final","ref_id":"r","receipt":{"trace":[],"usage_raw":'


def _many(shape: bytes, count: int) -> bytes:
    return b",".join([shape % number if b"%" in shape else shape for number in range(count)])


def _filled(shape: bytes, most: int = 163_000) -> bytes:
    """As many of a shape, each with its number where it asks for one, as a mebibyte holds."""
    return _many(shape, min(most, (1 << 20) // (len(shape) + (3 if b"%" in shape else 1))))


KEYS = [
    b"sk-a1aaaaaaaaaaaaaaaaaaaaa",
    b"ghp_" + b"a" * 30,
    b"AIza" + b"a" * 35,
    b"xoxb-" + b"a" * 16,
    b"AKIA" + b"A" * 16,
]
SOME = KEYS if sizes.LONG else (KEYS[0], KEYS[3])
WORST = {
    "a text": b'"' + b"x" * (1 << 20) + b'"',
    "too many values": b"[" + b"1," * (1 << 19) + b"1]",
    "escapes": b'"' + b"\\u00fc" * (1 << 17) + b'"',
    "surrogates": b'"' + b"\\ud83d\\ude00" * 87_000 + b'"',
    "too deep": b"[" * (1 << 20),
    "keys": b"{" + _many(b'"%d":1', 79_000) + b"}",
    "keys alike": b"{" + _many(b'"a":1', 163_000 // 2) + b"}",
    "escaped keys": b"{" + _many(b'"\\u00fc%x":1', 60_000) + b"}",
    "texts of digits": b"[" + _many(b'"0123456789e0123%d"', 45_000) + b"]",
    "integers beyond 64 bits": b"[" + _many(b"123456789012345678901", 47_000) + b"]",
    "minus zeros": b"[" + _many(b"-0", 79_000) + b"]",
    "floats near the ends of the range": b"[" + _many(b"1e308,5e-324", 40_900) + b"]",
    "different floats near the end of the range": b"[" + _many(b"%de290", 79_000) + b"]",
    "floats between two": b"[" + _many(b"1e23", 81_800) + b"]",
    "floats that are zero": b"[" + _many(b"1e-400", 81_800) + b"]",
    "floats out of range": b"[" + _many(b"1e308", 81_800) + b",1e309]",
    "endless integers": b"[" + _many(b"7" * 4300, 240) + b"]",
    "just not too deep": b"[" + _many(b"[" * 100 + b"]" * 100, 790) + b"]",
    "a secret over and over": b'"' + b"ab" * (1 << 19) + b'"',
    "private keys": b'"' + (b"-----BEGIN PRIVATE KEY-----" + b"A" * 64 + b"-----") * 10_000 + b'"',
    "almost private keys": b'"' + (b"-----BEGIN PRIVATE KEY-----" + b"A" * 63 + b"-----") * 10_000 + b'"',
    "almost keys": b'"' + b"sk-aaaaaaaaaaaaaaaaaaaa-" * 43_000 + b'"',
    **{
        f"keys in a text, {key[:4].decode()}": b'"' + (key + b" ") * ((1 << 20) // (len(key) + 1)) + b'"'
        for key in SOME
    },
    **{f"texts that are keys, {key[:4].decode()}": b"[" + _filled(b'"' + key + b'"') + b"]" for key in SOME},
    "texts that are keys of each kind": b"[" + _filled(b",".join(b'"' + key + b'"' for key in KEYS)) + b"]",
    **{f"names that are keys, {key[:4].decode()}": b"{" + _filled(b'"' + key + b'%d":1') + b"}" for key in SOME},
    **{f"names with keys in them, {key[:4].decode()}": b"{" + _filled(b'"%d ' + key + b'":1') + b"}" for key in SOME},
}
"""Lines of up to a mebibyte that cost the most of those tried, each for another reason."""
WORST_FINALS = {
    "lists in a final": b"[" + b"[]," * ((1 << 20) // 3) + b"0]",
    "lists in lists": b"[" + _many(b"[" * 60 + b"]" * 60 + b"," + b"[" * 30 + b"]" * 30, 5760) + b"]",
    "hills": b"[" + b"[[],[[],[[],[[]]]]]," * 52_000 + b"0]",
    "numbers in a final": b"[" + b"1," * (1 << 19) + b"1]",
    "floats in a final": b"[" + _many(b"1e308,5e-324", 65_000) + b"]",
    "just as many lists": b"[" + b"[]    ," * 131_000 + b"0]",
}
"""A `final` may hold more values."""


def _reading(line: bytes) -> float:
    """Seconds that the loop stands still for a line, without what other programs of the machine take."""
    end = ControlEnd(now=now, redactor=Redactor(["a-secret-of-the-run", "ababab"]))
    end.receive(HELLO)
    end.send(RunMessage(id="r", work_order=WorkOrder("x")))
    began = time.thread_time()
    (received,) = end.receive(line)
    took = time.thread_time() - began
    assert isinstance(received, Events | Broken | Final)
    return took


@pytest.mark.parametrize("name", [*WORST, *WORST_FINALS])
def test_c11_a_line_of_a_mebibyte_is_read_in_time(name: str) -> None:
    line = EVENT + WORST[name] + b"}}\n" if name in WORST else FINAL + WORST_FINALS[name] + b"}}\n"
    assert any(_reading(line) < 0.1 + sizes.SLACK_S for _ in range(2))
