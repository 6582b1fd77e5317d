"""Section Pipe of the fault catalogue: what may go through the three pipes, or not go through them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess

import pytest

from backplane.runtime.channel import WRITE_S
from tests.all.faults import sizes
from tests.all.faults.ground import GRACE_S, LADDER_S, PROGRAM, Ground

STOP_S = GRACE_S + LADDER_S
MIB = 1 << 20


# F14: stderr ----------------------------------------------------------------------------------------------------------


def test_f14_64_mib_of_stderr_are_drained_and_the_tail_is_kept(ground: Ground) -> None:
    flood = "for _ in range(512):\n    put(b'x' * 65535 + b'\\n', 2)\n"
    ended = ground.run(f"{flood}hello(); take(); event()\n{flood}put(b'last words\\n', 2); final(); rest()")
    assert not ground.amiss(ended, outcome="complete", accepted=1, bound_s=5.0)
    stderr = ended.own["stderr"]
    assert stderr["tail"].endswith("last words\n")
    assert len(stderr["tail"]) == 64 * 1024
    assert stderr["dropped_bytes"] == 64 * MIB + len("last words\n") - 64 * 1024


# F16: stdin that is not read ------------------------------------------------------------------------------------------


def test_f16_an_order_that_is_not_read_ends_at_the_write_deadline(ground: Ground) -> None:
    (ground.work / "order.json").write_text('{"task": "' + "x" * MIB + '"}')
    ended = ground.call(
        "run", "--order", "order.json", "--sidecar", ground.host("hello(); time.sleep(60)"), "--json",
    )  # fmt: skip
    assert not ground.amiss(ended, code="backend_timeout", accepted=0, bound_s=WRITE_S + STOP_S)


def test_f16_a_server_whose_reader_takes_nothing_ends_at_a_signal(ground: Ground) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*PROGRAM, "serve"], cwd=ground.work, env=ground.environ(), **pipes) as server:  # type: ignore[call-overload]
        assert json.loads(server.stdout.readline())["t"] == "hello"
        _fill(server.stdin.fileno(), b'{"t":"ping","seq":1}\n' * 2000)
        server.terminate()
        try:
            assert server.wait(10) == 128 + signal.SIGTERM
        finally:
            server.kill()


def _fill(fd: int, data: bytes) -> None:
    """Write until nobody has read for a second: one who cannot write his answers reads no more."""
    os.set_blocking(fd, False)
    while select.select([], [fd], [], 1.0)[1]:
        with contextlib.suppress(BlockingIOError):
            os.write(fd, data)


# F17: closed pipes ----------------------------------------------------------------------------------------------------


def test_f17_a_host_that_closes_its_input_before_the_order_is_found(ground: Ground) -> None:
    ended = ground.run("os.close(0); hello(); time.sleep(60)")
    assert not ground.amiss(ended, code="stream_closed", accepted=0, bound_s=1.0 + STOP_S)


def test_f17_a_host_that_closes_its_input_after_the_order_may_finish(ground: Ground) -> None:
    ended = ground.run("hello(); take(); os.close(0); event(); final()")
    assert not ground.amiss(ended, outcome="complete", accepted=1)


def test_f17_a_host_that_closes_its_output_and_lives_has_failed_at_once(ground: Ground) -> None:
    ended = ground.run("hello(); take(); event(); os.close(1); time.sleep(60)")
    assert not ground.amiss(ended, code="backend_crashed", accepted=1, bound_s=1.0 + STOP_S)


# F18: a long line -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["{", "x"], ids=["like a message", "like noise"])
def test_f18_a_line_without_end_is_refused_with_its_limit(ground: Ground, first: str) -> None:
    mib = sizes.of(64, 1024)
    body = (
        f"hello(); take(); event(); put(b'{first}')\nfor _ in range({mib}):\n    put(b'x' * 1048576)\n"
        "put(b'\\n'); event('after'); final(); rest()"
    )
    ended = ground.run(body)
    if first == "{":
        assert not ground.amiss(ended, code="protocol_invalid_envelope", accepted=1, bound_s=10.0)
        assert b"line_bytes_max" in ended.stderr or b"16 MiB" in ended.stderr or b"16777216" in ended.stderr
    else:
        assert not ground.amiss(ended, outcome="complete", accepted=2, bound_s=10.0)
    assert ended.wall_s < 10 * sizes.share() + ground.base_s


# F20: odd cuts --------------------------------------------------------------------------------------------------------


def test_f20_one_byte_a_write_with_crlf_and_split_characters_is_read_exactly(ground: Ground) -> None:
    text = "grüße 🐢 \u2028 ende"
    body = f"""
hello(); take()
data = framed({text!r})[:-1] + b"\\r\\n"
for byte in data * 3:
    os.write(1, bytes([byte]))
final(); rest()
"""
    ended = ground.run(body)
    assert not ground.amiss(ended, outcome="complete", accepted=3, bound_s=1.0)
    assert [event["text"] for event in ended.events] == [text] * 3


# F21, F24: many events ------------------------------------------------------------------------------------------------

MANY = """
hello(); take()
frame = framed("TEXT")
before, after = frame.split(b"TEXT")
for start in range(0, {count}, 1000):
    put(b"".join(before + str(n).encode() + after for n in range(start, min(start + 1000, {count}))))
final(); {end}
"""


def test_f21_every_event_before_a_hard_exit_is_kept_in_order(ground: Ground) -> None:
    ended = ground.run(MANY.format(count=20_000, end="os._exit(0)"))
    assert not ground.amiss(ended, outcome="complete", accepted=20_000, bound_s=3.0)
    assert [int(event["text"]) for event in ended.events] == list(range(20_000))


def test_f24_200_000_events_at_full_speed_are_all_kept(ground: Ground) -> None:
    count = sizes.of(50_000, 200_000)
    ended = ground.run(MANY.format(count=count, end="rest()"))
    assert not ground.amiss(ended, outcome="complete", accepted=count, bound_s=12.0)


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not sizes.LONG, reason="a million events: only in the long run")
def test_a_million_events_need_less_than_150_mb(ground: Ground) -> None:
    ended = ground.started(MANY.format(count=1_000_000, end="rest()")).end(280 * sizes.share())
    assert ended.error is None
    row = ground.rows()[0]
    assert (row.outcome, row.trace_count) == ("complete", 1_000_000)
    assert ended.peak_bytes < 150e6


def test_a_host_that_floods_every_stream_at_once_harms_nobody(ground: Ground) -> None:
    body = """
import threading
hello(); take()
def flood(fd, data):
    try:
        while True:
            put(data, fd)
    except OSError:
        pass
frame = framed("x" * 1000)
threading.Thread(target=flood, args=(2, b"e" * 65536), daemon=True).start()
flood(1, frame * 60 + b"noise noise\\n" * 100)
"""
    ended = ground.run(body, "--timeout", "1")
    assert not ground.amiss(ended, code="backend_timeout", outcome="partial", bound_s=1.0 + STOP_S + 2.0)
    assert ended.own["counts"]["noise_lines"] > 0
