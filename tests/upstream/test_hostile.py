"""Services that mean harm or are badly broken: every answer ends in time, in a code, and never in a fault of ours."""

from __future__ import annotations

import gzip
import time
from datetime import UTC, datetime

import pytest

from backplane.testing import Call, Fault, Turn
from backplane.upstream import client
from backplane.upstream.failure import MESSAGE_CHARS_MAX, clean, failure_of, stream_failure
from tests.upstream.talk import PROTOCOLS, talk

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
SOON_S = 10.0
"""Linear work takes hundredths of this, quadratic work many times it; a loaded machine is neither."""


def sse(*data: bytes) -> bytes:
    return b"".join(b"data: " + one + b"\n\n" for one in data)


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b'{"error": {"message": "\xff\xfe"}}', b"[" * 60_000, b'{"error":' * 5_000 + b"1" + b"}" * 5_000,
        b'{"error": {"code": ' + b"9" * 5_000 + b"}}", b'{"error": {"code": "' + b"9" * 5_000 + b'"}}',
        b'{"error": {"message": "\\ud800"}}', b'{"error": 1e999}', b"\x00" * 1_000,
        b'{"error": {"message": "a\\u0000b"}}',
    ],
    ids=["no UTF-8", "deep", "deep errors", "a long number", "a long label", "half a letter", "no float", "NUL",
         "NUL in words"],
)  # fmt: skip
def test_a_refusal_that_cannot_be_read_is_a_refusal(body: bytes) -> None:
    failure = failure_of(400, {}, body, NOW, "sk-secret")
    assert failure.code == "mapping_unsupported_capability"
    assert len(failure.message) <= MESSAGE_CHARS_MAX


@pytest.mark.parametrize("piece", ["<", "http://", "https://a@", "exceed token ", "model ", "api_key "])
def test_a_refusal_of_any_length_is_read_in_time(piece: str) -> None:
    began_s = time.monotonic()
    failure_of(500, {}, (piece * 65_536).encode()[:65_536], NOW, None)
    stream_failure({"error": {"code": "9" * 5_000}}, piece * 1_000_000, None)
    assert time.monotonic() - began_s < SOON_S


@pytest.mark.parametrize("place", range(7_950, 8_010, 3))
def test_a_key_is_not_shown_in_part_where_long_words_are_cut(place: int) -> None:
    secret = "sk-" + "s3cr3t" * 5
    words = secret * 250 + "x" * (place - len(secret) * 250) + secret + "y" * 9_000
    assert "s3cr3t" not in clean(words, secret)


# Streams --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "junk", [b'{"text": "\xff"}', b"[" * 60_000, b"9" * 5_000, b'"\\ud800"', b"\x00", b"null", b"-1"],
    ids=["no UTF-8", "deep", "a long number", "half a letter", "NUL", "null", "a number"],
)  # fmt: skip
def test_a_stream_of_what_cannot_be_read_fails_with_a_code(protocol: str, junk: bytes) -> None:
    done = talk(protocol, [Turn(fault=Fault(raw=sse(junk, junk)))], tries_max=1)
    assert done.failed.code in ("dialect_mapping_failed", "stream_closed")


def bomb(layers: int) -> bytes:
    data = b"data: " + b"x" * 2_000_000
    for _ in range(layers):
        data = gzip.compress(data)
    return data


def test_a_packed_answer_is_unpacked_up_to_the_limit_of_any_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_BYTES_MAX", 1_000_000)
    fault = Fault(raw=bomb(1), headers={"content-encoding": "gzip"})
    failed = talk("openai_compatible", [Turn(fault=fault)], tries_max=1).failed
    assert (failed.code, "over 1000000 bytes" in failed.message) == ("dialect_mapping_failed", True)


@pytest.mark.parametrize("coding", ["gzip, gzip", "br", "gzip"])
def test_an_answer_packed_twice_or_unasked_or_broken_is_not_unpacked(coding: str) -> None:
    raw = b"no gzip" if coding == "gzip" else bomb(2)
    fault = Fault(raw=raw, headers={"content-encoding": coding})
    failed = talk("anthropic", [Turn(fault=fault)], tries_max=3).failed
    assert (failed.code, "cannot be unpacked" in failed.message) == ("dialect_mapping_failed", True)


def test_a_packed_refusal_is_read() -> None:
    body = gzip.compress(b'{"error": {"type": "authentication_error", "message": "who are you"}}')
    fault = Fault(status=401, raw=body, headers={"content-encoding": "gzip"})
    assert "who are you" in talk("anthropic", [Turn(fault=fault)]).failed.message


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_thousands_of_calls_of_one_id_have_ids_of_their_own_in_time(protocol: str) -> None:
    began_s = time.monotonic()
    calls = tuple(Call(name="read", input={"n": n}, id="same") for n in range(1_000))
    done = talk(protocol, [Turn(calls=calls)])
    assert len({call.tool_use_id for call in done.calls}) == len(done.calls)
    assert time.monotonic() - began_s < 6 * SOON_S
