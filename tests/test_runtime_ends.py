"""Ends that the host brings about: its own word, its death, a broken rule; each with one code and one receipt."""

from __future__ import annotations

import signal
from pathlib import Path

import anyio
import pytest

from backplane.contract.events import Warned
from backplane.runtime.backends import Backend
from tests.all.faults.raising import Probe, probing
from tests.runs import QUICK, backplane_of, check, counts, ended, go, order, plane, script, texts, within

pytestmark = pytest.mark.anyio


async def test_events_before_an_exception_of_our_own_are_handed_on_and_kept(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = 'hello(); run = take(); put(event(run, "1"), event(run, "2"), {"t": "pong", "seq": 1}, final(run)); end()'
    place = "protocol/messages.py:convert < protocol/control.py:ControlEnd._known"
    async with plane(backplane_home) as control:
        with probing(Probe(place)):
            run, events = await go(control, order(root), script(tmp_path, body))
    assert ended(run) == ("failed", "internal", "failed")
    assert texts(events) == texts(run.receipt.trace) == ["1", "2"]


# By the host ----------------------------------------------------------------------------------------------------------


async def test_a_fatal_has_the_hosts_code_and_words(mock: Backend, backplane_home: Path, root: Path) -> None:
    steps = ({"say": "x"}, {"fail": {"code": "backend_rate_limited", "message": "slow down"}})
    async with plane(backplane_home) as control:
        run, events = await go(control, order(root, *steps), mock)
    assert ended(run) == ("failed", "backend_rate_limited", "failed")
    assert run.error is not None
    assert run.error.message == "slow down"
    assert texts(events) == ["x"]


async def test_a_fatal_with_an_unknown_code_is_internal_and_the_code_is_kept(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = 'hello(); run = take(); put({"t": "fatal", "ref_id": None, "error": "bad luck", "error_code": "E42"}); end()'
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root), script(tmp_path, body))
    assert ended(run) == ("failed", "internal", "failed")
    assert backplane_of(run)["error_code"] == "E42"
    assert run.error is not None
    assert run.error.message == "bad luck"


@pytest.mark.parametrize("code", ["null", "absent", "number"])
async def test_a_fatal_without_a_code_is_internal(code: str, backplane_home: Path, root: Path, tmp_path: Path) -> None:
    member = {"null": '"error_code": None', "absent": "", "number": '"error_code": 5'}[code]
    body = 'hello(); run = take(); put({"t": "fatal", "ref_id": run["id"], "error": "x", %s}); end()' % member  # noqa: UP031
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root), script(tmp_path, body))
    expected = "contract_schema_violation" if code == "number" else "internal"
    assert ended(run)[1:] == (expected, "failed")


@pytest.mark.parametrize(
    ("body", "words", "reason"),
    [
        ("sys.exit(3)", "exit code 3", (3, None)),
        ("sys.exit(0)", "exit code 0", (0, None)),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV", (None, signal.SIGSEGV)),
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL", (None, signal.SIGKILL)),
        ('put(b\'{"t":"final","ref_id":\'); os._exit(0)', "exit code 0", (0, None)),
    ],
)
async def test_a_host_that_dies_mid_run_has_crashed(
    body: str, words: str, reason: tuple[int | None, int | None], backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    backend = script(
        tmp_path,
        f"hello(); run = take(); put(event(run)); sys.stderr.write('my last words\\n'); sys.stderr.flush(); {body}",
    )
    async with plane(backplane_home) as control:
        run, events = await go(control, order(root), backend)
    assert ended(run) == ("host_exit", "backend_crashed", "failed")
    assert run.error is not None
    assert words in run.error.message
    assert run.error.evidence == "my last words"
    assert texts(events) == ["a"]
    assert run.end is not None
    assert (run.end.exit_code, run.end.signal) == reason
    assert backplane_of(run)["end"] == run.end.to_wire()
    assert backplane_of(run)["stderr"] == {"tail": "my last words\n", "dropped_bytes": 0}


async def test_a_host_that_names_another_run_is_told_so(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    body = "hello(); run = take(); run['id'] = 'my-run'; put(event(run), event(run), final(run))"
    async with plane(backplane_home) as control:
        run, events = await go(control, order(root), script(tmp_path, body + "; os._exit(0)"))
    assert events == []
    assert run.error is not None
    assert "another ref_id than the run's: 3, the first: event for run 'my-run'" in run.error.message


async def test_the_tail_of_a_long_stderr_is_kept_and_the_rest_counted(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = """
sys.stderr.write("e" * 3_000_000); sys.stderr.flush()
hello(); run = take()
sys.stderr.write("f" * 3_000_000 + "the end"); sys.stderr.flush()
put(final(run)); end()
"""
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root), script(tmp_path, body))
    assert ended(run) == ("complete", None, "complete")
    kept = backplane_of(run)["stderr"]
    assert len(kept["tail"]) == 64 * 1024
    assert kept["tail"].endswith("ffthe end")
    assert kept["dropped_bytes"] == 6_000_007 - 64 * 1024


async def test_a_host_whose_child_holds_its_output_is_not_waited_for(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    leave = "if os.fork() == 0:\n    deaf(); time.sleep(60); os._exit(0)\n"
    dies = script(tmp_path, f"hello(); run = take(); put(event(run))\n{leave}os._exit(5)", name="dies.py")
    done = script(tmp_path, f"hello(); run = take(); put(event(run), final(run))\n{leave}os._exit(0)", name="done.py")
    early = script(tmp_path, f"{leave}os._exit(6)", name="early.py")
    async with plane(backplane_home) as control:
        async with within(3.0):
            run, _ = await go(control, order(root), dies)
        assert ended(run) == ("host_exit", "backend_crashed", "failed")
        assert run.end is not None
        assert run.end.exit_code == 5
        assert backplane_of(run)["swept"] == 1
        async with within(2.0):
            run, _ = await go(control, order(root), done)
        assert ended(run) == ("complete", None, "complete")
        assert not run.receipt.verification.harness_ok
        async with within(3.0):
            run, _ = await go(control, order(root), early)
        assert ended(run) == ("host_exit", "protocol_handshake_failed", "failed")


async def test_a_slow_consumer_of_a_dead_host_still_gets_its_final(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = "hello(); run = take(); put(*[event(run, str(n)) for n in range(700)], final(run)); os._exit(0)"
    seen = []
    async with plane(backplane_home) as control, control.start(order(root), script(tmp_path, body)) as run:
        async for event in run:
            seen.append(event)
            if len(seen) == 1:
                await anyio.sleep(2.0)
    check(run, seen)
    assert ended(run) == ("complete", None, "complete")
    assert len(seen) == 700


@pytest.mark.parametrize("what", ["os.close(1)", "os.close(1); deaf()"])
async def test_a_host_that_closes_its_output_and_lives_fails_at_once(
    what: str, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    backend = script(tmp_path, f"hello(); run = take(); put(event(run)); {what}; time.sleep(60)")
    async with plane(backplane_home) as control, within(1.0 + 0.5 + QUICK.cancel_grace_s):
        run, _ = await go(control, order(root), backend)
    assert ended(run) == ("host_exit", "backend_crashed", "failed")


async def test_only_the_first_end_counts(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    body = """
hello(); run = take()
fatal = {"t": "fatal", "ref_id": run["id"], "error": "no, wait"}
put(event(run), final(run), event(run, "late"), final(run, outcome="failed"), fatal, event(run, "later")); end()
"""
    async with plane(backplane_home) as control:
        run, events = await go(control, order(root), script(tmp_path, body))
    assert ended(run) == ("complete", None, "complete")
    assert texts(events) == ["a"]
    assert sum(count for name, count in counts(run).items() if name in ("late", "after_end")) == 4


# Protocol faults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("b'{not json\\n'", "protocol_invalid_envelope"),
        ("b'{\"x\":NaN}\\n'", "protocol_invalid_envelope"),
        ("b'{' + b'\"a\":' + b'[' * 100_000 + b'\\n'", "protocol_invalid_envelope"),
        ("b'{' + b'x' * 20_000_000 + b'\\n'", "protocol_invalid_envelope"),
        ("{'t': 'run', 'id': 'x'}", "protocol_unexpected_message"),
        ("{'t': 'final', 'ref_id': run['id']}", "contract_invalid_receipt"),
        ("final(run, usage=5)", "contract_invalid_receipt"),
        ("final(run, trace={})", "contract_invalid_receipt"),
        ("final(run, outcome='splendid')", "contract_invalid_receipt"),
        (
            'json.dumps(final(run)).replace(\'"outcome":\', \'"outcome": "failed", "outcome":\').encode() + b\'\\n\'',
            "contract_invalid_receipt",
        ),
        (
            "final(run, meta={**final(run)['receipt']['meta'], 'started_at': '0001-01-01T00:00:00+14:00'})",
            "contract_invalid_receipt",
        ),
        ("{'t': 'ask', 'ref_id': run['id']}", "contract_schema_violation"),
    ],
)
async def test_a_broken_rule_ends_the_run_with_its_code(
    line: str, code: str, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    backend = script(tmp_path, f"hello(); run = take(); put(event(run), {line}, event(run, 'late'), final(run)); end()")
    async with plane(backplane_home) as control:
        run, events = await go(control, order(root), backend)
    assert ended(run) == ("protocol", code, "failed")
    assert texts(events) == ["a"]
    assert not run.receipt.verification.harness_ok or code


@pytest.mark.parametrize("cut", [b"", b" \r"])
async def test_a_whole_last_line_without_its_newline_counts_and_is_noted(
    cut: bytes, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = f"hello(); run = take(); put(event(run)); put(json.dumps(final(run)).encode() + {cut!r})"
    async with plane(backplane_home) as control:
        run, events = await go(control, order(root), script(tmp_path, body))
    assert ended(run) == ("complete", None, "complete")
    assert texts(events) == ["a"]
    assert counts(run)["unended_lines"] == 1


async def test_a_cut_last_line_is_noise(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    body = "hello(); run = take(); put(event(run)); put(json.dumps(final(run)).encode()[:-1])"
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root), script(tmp_path, body))
    assert ended(run) == ("host_exit", "backend_crashed", "failed")
    assert counts(run)["noise_lines"] == 1


async def test_what_does_not_concern_the_run_is_counted_and_changes_nothing(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = """
hello(); put({"t": "event", "ref_id": "early", "event": {}}); run = take()
foreign = {**run, "id": "another"}
hello(contract_version="abp/v9.0", capabilities={}); put(event(foreign), final(foreign), {"t": "pong", "seq": 1})
put({"t": "fatal", "ref_id": "another", "error": "x"}, {"t": "news", "ref_id": run["id"], "body": 1})
put(event(run, type="usage", n=1), event(run, text=None), event(run, cost=3), final(run)); end()
"""
    async with plane(backplane_home) as control:
        run, events = await go(control, order(root), script(tmp_path, body))
    assert ended(run) == ("complete", None, "complete")
    found = counts(run)
    assert (found["foreign_ref_id"], found["second_hello"], found["unasked_answer"]) == (4, 1, 1)
    assert found["unknown_messages"] == 1
    assert [sorted(event.ext) if isinstance(event.ext, dict) else None for event in events] == [
        ["raw_envelope"],
        ["raw_event"],
        ["raw_event"],
        ["unknown"],
    ]
    assert run.receipt.capabilities == {"streaming": "native"}


async def test_what_a_host_claims_otherwise_is_kept_apart(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    body = """
hello(); run = take(); put(event(run))
meta = {"run_id": "11111111-1111-1111-1111-111111111111", "work_order_id": "22222222-2222-2222-2222-222222222222",
        "contract_version": "abp/v9.9", "started_at": "1999-01-01T00:00:00.1Z", "finished_at": "2099-01-01T00:00:00Z",
        "duration_ms": 7}
put(final(run, meta=meta, backend={"id": "somebody else"}, receipt_sha256="f" * 64, mode="passthrough",
    trace=[event(run, "other")["event"]], tool_calls=[1], stream_equivalent=True, usage_raw=[1, 2],
    verification={"harness_ok": False, "git_diff": "lies", "git_status": None})); end()
"""
    async with plane(backplane_home) as control:
        run, events = await go(control, order(root), script(tmp_path, body))
    receipt = run.receipt
    assert receipt is not None
    assert receipt.outcome == "complete"
    assert receipt.backend.id == "script"
    assert receipt.mode == "mapped"
    assert receipt.meta.contract_version == "abp/v0.1"
    assert receipt.usage_raw["value"] == [1, 2]
    assert receipt.verification.git_diff != "lies"
    assert texts(events) == ["a"]
    claims = backplane_of(run)["claims"]
    assert claims["run_id"].startswith("11111111")
    assert claims["work_order_id"].startswith("22222222")
    assert claims["contract_version"] == "abp/v9.9"
    assert claims["started_at"] == "1999-01-01T00:00:00.100Z"
    assert claims["duration_ms"] == 7
    assert claims["backend"]["id"] == "somebody else"
    assert claims["receipt_sha256"] == "f" * 64
    assert claims["trace"]["count"] == 1
    assert claims["fields"] == {"tool_calls": [1], "stream_equivalent": True}
    assert claims["git_diff"] == "lies"


async def test_a_trace_that_is_only_in_the_final_is_the_trace(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    body = """
hello(); run = take()
put(final(run, trace=[event(run, "one")["event"], event(run, "two", ts="2026-01-15T14:00:00.100000+02:00")["event"],
    {"type": "usage"}])); end()
"""
    async with plane(backplane_home) as control:
        run, events = await go(control, order(root), script(tmp_path, body))
    assert ended(run) == ("complete", None, "complete")
    mark, *events = events
    assert isinstance(mark, Warned)
    assert mark.ext == {"trace_of_final": {"events": 3}}
    assert "nothing came while the host worked" in mark.message
    assert mark == run.receipt.trace[0]
    assert texts(events) == ["one", "two"]
    assert len(events) == 3
    assert events[1].ts == "2026-01-15T12:00:00.100Z"


async def test_a_member_that_is_ours_moves_to_inner_and_says_whether_its_hash_held(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = """
hello(); run = take(); put(event(run))
put(final(run, usage_raw={"backplane": {"end": {"reason": "complete"}}, "x": 1}, receipt_sha256="a" * 64)); end()
"""
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root), script(tmp_path, body))
    assert run.receipt.usage_raw["x"] == 1
    assert backplane_of(run)["end"] == {"reason": "complete"}
    inner = backplane_of(run)["inner"]
    assert inner["backplane"] == {"end": {"reason": "complete"}}
    assert (inner["receipt_sha256"], inner["verified"]) == ("a" * 64, False)
