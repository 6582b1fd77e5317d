"""Section Protocol of the fault catalogue: messages at the wrong time, of the wrong run, with false claims."""

from __future__ import annotations

import pytest

from tests.all.faults.ground import GRACE_S, LADDER_S, OFF, Ground

STOP_S = GRACE_S + LADDER_S
FOREIGN = "'00000000-0000-4000-8000-000000000000'"


# F35: the wrong time --------------------------------------------------------------------------------------------------


def test_f35_a_message_before_the_hello_is_a_failed_handshake(ground: Ground) -> None:
    ended = ground.run("say('event', ref_id='x', event=body()); hello(); time.sleep(30)")
    assert not ground.amiss(ended, code="protocol_handshake_failed", accepted=0, bound_s=STOP_S)


def test_f35_another_version_is_refused_before_the_order_is_sent(ground: Ground) -> None:
    seen = ground.folder / "seen"
    body = f"hello(version='abp/v1.0')\ndata = os.read(0, 10)\nopen({str(seen)!r}, 'wb').write(data)\n"
    ended = ground.run(body, env=OFF)
    assert not ground.amiss(ended, code="contract_version_mismatch", exit_code=4, accepted=0, bound_s=STOP_S)
    assert not seen.exists() or seen.read_bytes() == b""


def test_f35_a_second_hello_changes_nothing_and_is_counted(ground: Ground) -> None:
    second = "hello(capabilities={'tool_bash': 'native'}, backend={**BACKEND, 'id': 'other'})"
    ended = ground.run(f"hello(); take(); event(); {second}; event(); final(); rest()")
    assert not ground.amiss(ended, outcome="complete", accepted=2)
    assert ended.receipt["capabilities"] == {"streaming": "native"}
    assert ended.receipt["backend"]["id"] == "fault"
    assert ended.own["counts"]["second_hello"] == 1


def test_f35_an_unknown_message_is_kept_and_an_echoed_run_is_not_obeyed(ground: Ground) -> None:
    ended = ground.run("hello(); take(); say('teapot', ref_id=RUN['id'], x=1); final(); rest()")
    assert not ground.amiss(ended, outcome="complete", accepted=1)
    assert ended.events[0]["ext"]["raw_envelope"]["t"] == "teapot"
    echoed = ground.run(
        "hello(); take(); event(); say('run', **{k: v for k, v in RUN.items() if k != 't'}); time.sleep(30)"
    )
    assert not ground.amiss(echoed, code="protocol_unexpected_message", accepted=1, bound_s=STOP_S)


# F36: foreign ids -----------------------------------------------------------------------------------------------------


def test_f36_messages_of_another_run_are_dropped_and_counted(ground: Ground) -> None:
    body = (
        f"hello(); take(); event(ref_id={FOREIGN}); event(); final(ref_id={FOREIGN})\n"
        f"say('fatal', ref_id={FOREIGN}, error='no', error_code='internal'); event(); final(); rest()"
    )
    ended = ground.run(body)
    assert not ground.amiss(ended, outcome="complete", accepted=2)
    assert ended.own["counts"]["foreign_ref_id"] == 3


def test_f36_what_comes_after_the_end_is_late_and_a_second_result_changes_nothing(ground: Ground) -> None:
    body = (
        "deaf(); hello(); take(); event(); final('partial'); event('late'); final('complete')\n"
        "say('fatal', ref_id=RUN['id'], error='no', error_code='internal'); time.sleep(30)"
    )
    ended = ground.run(body)
    assert not ground.amiss(ended, outcome="partial", accepted=1, bound_s=STOP_S)


# F38: forged facts ----------------------------------------------------------------------------------------------------

FORGED = """
hello(); take(); event('true')
made = receipt(
    meta={"run_id": "00000000-0000-4000-8000-000000000000", "work_order_id": "00000000-0000-4000-8000-000000000001",
          "contract_version": "abp/v0.1", "started_at": "1999-01-01T00:00:00Z", "finished_at": "2099-01-01T00:00:00Z",
          "duration_ms": 1},
    backend={"id": "someone-else", "backend_version": "9", "adapter_version": "9"},
    capabilities={"tool_bash": "native"},
    usage_raw={"backplane": {"end": {"reason": "complete"}, "enforcement": {"state": "enforced"}}, "x": 1},
    trace=[body("forged")], verification={"git_diff": "forged diff", "git_status": " M forged", "harness_ok": True},
    receipt_sha256="0" * 64)
say("final", ref_id=RUN["id"], receipt=made); rest()
"""


def test_f38_what_the_control_plane_saw_stands_and_claims_are_kept_apart(ground: Ground) -> None:
    ended = ground.run(FORGED)
    assert not ground.amiss(ended, outcome="complete", accepted=1)
    (row,) = ground.rows()
    receipt = ended.receipt
    assert receipt["meta"]["run_id"] == row.run_id != "00000000-0000-4000-8000-000000000000"
    assert receipt["meta"]["started_at"] > "2020"
    assert receipt["meta"]["finished_at"] < "2090"
    assert receipt["backend"]["id"] == "fault"
    assert receipt["capabilities"] == {"streaming": "native"}
    assert [event["text"] for event in receipt["trace"]] == ["true"]
    assert "forged" not in (receipt["verification"]["git_diff"] or "")
    assert receipt["receipt_sha256"] != "0" * 64
    assert receipt["usage_raw"]["x"] == 1
    own = ended.own
    assert own["inner"]["receipt_sha256"] == "0" * 64
    assert own["claims"]["trace"]["count"] == 1
    assert own["enforcement"].get("state") is None


@pytest.mark.parametrize(("outcome", "exit_code"), [("partial", 3), ("failed", 1)])
def test_f38_an_outcome_of_the_host_is_the_runs(ground: Ground, outcome: str, exit_code: int) -> None:
    ended = ground.run(f"hello(); take(); event(); final({outcome!r}); rest()")
    assert not ground.amiss(ended, outcome=outcome, accepted=1, exit_code=exit_code)


# F40: silence ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "silence",
    [
        "time.sleep(60)",
        f"\nwhile True:\n    event(ref_id={FOREIGN}); time.sleep(0.05)",
        "\nwhile True:\n    put(b'working\\n', 2); time.sleep(0.05)",
    ],
    ids=["nothing", "another run's events", "stderr"],
)
def test_f40_silence_after_an_event_is_found_at_the_idle_deadline(ground: Ground, silence: str) -> None:
    ended = ground.run(f"hello(); take(); event(); {silence}", env={"BACKPLANE_IDLE_S": "0.6"})
    assert not ground.amiss(ended, code="backend_timeout", outcome="partial", bound_s=0.6 + STOP_S)


def test_f40_events_that_carry_something_keep_a_run_alive(ground: Ground) -> None:
    body = "hello(); take()\nfor n in range(8):\n    event(str(n)); time.sleep(0.2)\nfinal(); rest()"
    ended = ground.run(body, env={"BACKPLANE_IDLE_S": "0.7"})
    assert not ground.amiss(ended, outcome="complete", accepted=8, bound_s=1.6)
