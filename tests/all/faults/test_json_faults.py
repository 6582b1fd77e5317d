"""Section JSON of the fault catalogue: what may stand in a line."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
from typing import Any

import pytest

from backplane.contract.receipt import verify_bytes
from tests.all.faults.ground import GRACE_S, LADDER_S, PROGRAM, Ground

STOP_S = GRACE_S + LADDER_S


def written(*pieces: bytes) -> str:
    """A host that writes these bytes as they are between two good events, then ends well."""
    puts = "; ".join(f"put({piece!r})" for piece in pieces)
    return f"hello(); take(); event('before'); {puts}; event('after'); final(); rest()"


# F25: noise -----------------------------------------------------------------------------------------------------------


def test_f25_banners_and_prompts_between_the_lines_are_counted_and_kept(ground: Ground) -> None:
    noise = [
        b"npm WARN deprecated thing@1.0\n",
        b"\n",
        b"> continue? [y/N] \n",
        b"[1, 2]\n",
        b'{"level":"info"}\n',
        b"\x1b[2J\n",
    ]
    banner = "put(b'Welcome to agent 1.0!\\n'); "
    ended = ground.run(banner + written(*noise))
    assert not ground.amiss(ended, outcome="complete", accepted=2)
    assert ended.own["counts"]["noise_lines"] == 6
    assert "Welcome to agent" in json.dumps(ended.own["noise"])


# F26: encodings -------------------------------------------------------------------------------------------------------


def test_f26_a_mark_at_the_start_crlf_and_blank_lines_are_read(ground: Ground) -> None:
    ended = ground.run("put(b'\\xef\\xbb\\xbf'); " + written(b"\r\n", b"\n  \t \r\n"))
    assert not ground.amiss(ended, outcome="complete", accepted=2)


@pytest.mark.parametrize(
    "line",
    [b'{"t":"event","x":"\xff"}\n', '{"t":"event"}\n'.encode("utf-16-le")],
    ids=["invalid byte", "utf-16"],
)
def test_f26_what_is_not_utf_8_ends_the_run_and_is_never_guessed(ground: Ground, line: bytes) -> None:
    ended = ground.run(written(line))
    assert not ground.amiss(ended, code="protocol_invalid_envelope", accepted=1, bound_s=STOP_S)
    ended.stdout.decode()


def test_f26_utf_16_with_its_mark_is_noise_that_is_stored_as_valid_utf_8(ground: Ground) -> None:
    ended = ground.run(written('{"t":"event"}'.encode("utf-16") + b"\n"))
    assert not ground.amiss(ended, outcome="complete", accepted=2)
    ended.stdout.decode()


# F28: numbers and depth -----------------------------------------------------------------------------------------------

HOSTILE_VALUES = {"NaN": b"NaN", "5000 digits": b"9" * 5000, "100000 levels": b"[" * 100_000 + b"]" * 100_000}
"""What else is refused stands in `test_protocol` and `json_cases`."""


@pytest.mark.parametrize("name", HOSTILE_VALUES)
def test_f28_values_that_are_no_strict_json_are_refused(ground: Ground, name: str) -> None:
    frame = (
        b'{"t":"event","ref_id":"r","event":{"type":"tool_call","ts":"2026-01-15T12:00:00Z","tool_name":"t","input":'
    )
    ended = ground.run(written(frame + HOSTILE_VALUES[name] + b"}}\n"))
    assert not ground.amiss(ended, code="protocol_invalid_envelope", accepted=1, bound_s=1.0 + STOP_S)
    for line in ended.stdout.splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} was passed on"))


# F32: terminal escapes ------------------------------------------------------------------------------------------------

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\x08\x7f"
SPEAKS = f"""
E = {ESCAPES!r}
put(E.encode() + b"\\n", 2)
hello(backend={{"id": "a" + E, "backend_version": None, "adapter_version": None}}); take(); event(E)
call = body(kind="tool_call", tool_name=E, input={{"command": E}}, tool_use_id=E, parent_tool_use_id=None)
say("event", ref_id=RUN["id"], event=call)
say("event", ref_id=RUN["id"], event=body(kind="file_changed", path=E, summary=E))
say("event", ref_id=RUN["id"], event=body(kind="warning", message=E))
put(E.encode() + b"\\n")
say("fatal", ref_id=RUN["id"], error=E, error_code="backend_crashed")
"""


def _raw(data: bytes) -> set[str]:
    """Control characters of a text that a terminal would act on; what colours and paints the foot is taken out."""
    import re

    text = re.sub(r"\x1b\[([0-9;]*[mAJK]|\?2026[hl])", "", data.decode())
    return {
        char
        for char in text
        if (ord(char) < 32 and char not in "\r\n\t") or 0x7F <= ord(char) < 0xA0 or char == "\u202e"
    }


def test_f32_escapes_are_data_in_json_and_shown_escaped_elsewhere(ground: Ground) -> None:
    ended = ground.run(SPEAKS)
    assert not ground.amiss(ended, code="backend_crashed", accepted=4, bound_s=STOP_S)
    assert ended.events[0]["text"] == ESCAPES
    assert _raw(ended.stderr) == set()
    for words in (("show", ended.messages[-1]["ref_id"]), ("verify",)):
        shown = ground.call("receipts", *words)
        assert _raw(shown.stdout + shown.stderr) == set()


def test_f32_a_terminal_gets_no_escape_of_a_host(ground: Ground) -> None:
    master, slave = pty.openpty()
    words = [*PROGRAM, "run", "do it", "--sidecar", ground.host(SPEAKS)]
    process = subprocess.Popen(
        words, stdin=slave, stdout=slave, stderr=slave, cwd=ground.work, env=ground.environ(TERM="xterm")
    )
    os.close(slave)
    data = b""
    while select.select([master], [], [], 20)[0]:
        try:
            piece = os.read(master, 65536)
        except OSError:
            break
        if not piece:
            break
        data += piece
    process.wait(10)
    os.close(master)
    assert process.returncode == 1
    assert b"owned" in data
    assert _raw(data) == set()


# F33: the wrong shape -------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[str, str | None, int]] = {
    "an event that is a number": ('say("event", ref_id=RUN["id"], event=7)', None, 2),
    "an outcome nobody knows": ('final(outcome="perfect")', "contract_invalid_receipt", 1),
    "a fatal without an error": ('say("fatal", ref_id=RUN["id"])', "contract_schema_violation", 1),
    "a run from a host": ('say("run", id="x", work_order={})', "protocol_unexpected_message", 1),
}


@pytest.mark.parametrize("name", WRONG)
def test_f33_legal_json_of_the_wrong_shape_has_its_code_or_is_counted(ground: Ground, name: str) -> None:
    line, code, accepted = WRONG[name]
    rest = "final(); rest()" if code is None else "time.sleep(30)"
    ended = ground.run(f"hello(); take(); event(); {line}; {rest}")
    assert not ground.amiss(
        ended, code=code, outcome="failed" if code else "complete", accepted=accepted, bound_s=STOP_S
    )


def test_f33_what_every_stored_receipt_says_can_be_read_by_a_strict_reader(ground: Ground) -> None:
    odd: Any = {"t": "event", "type": "telepathy", "deep": [{}]}
    ended = ground.run(
        f"hello(); take(); say('event', ref_id=RUN['id'], event={odd!r}); say('moo', x=1); final(); rest()"
    )
    assert not ground.amiss(ended, outcome="complete", accepted=2)
    shown = ground.call("receipts", "show", ended.messages[-1]["ref_id"], "--json").stdout
    verify_bytes(shown.rstrip(b"\n"))
    assert {event["type"] for event in json.loads(shown)["trace"]} == {"warning"}
