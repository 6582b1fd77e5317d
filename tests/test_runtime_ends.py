"""How runs end: by their host, by the caller, by a limit, by a death; each with one code and one receipt."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest

from backplane.backends import Backend, MemoryBackend, ProcessBackend
from backplane.contract.events import AgentEvent, AssistantDelta, FileChanged, ToolCall
from backplane.contract.work import PolicyProfile, WorkOrder
from backplane.policy import compile_policy
from backplane.receipts.store import Store
from backplane.record import PATHS_CHARS_MAX, TOOLS_MAX, End, Facts
from backplane.runtime import ControlPlane, Run
from tests.peers import ROOT
from tests.runs import (
    QUICK,
    backplane_of,
    check,
    counts,
    go,
    mock_backend,
    order,
    plane,
    script,
    texts,
)

pytestmark = pytest.mark.anyio

one_loop = pytest.mark.parametrize("anyio_backend", ["asyncio"])
"""For what the host does, whichever loop we run on; the ways a run ends are tested on both."""

SLACK_S = 1.0
"""What a loaded machine may add to a deadline."""


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def mock(anyio_backend: str) -> Backend:
    """In a process under the one loop, in memory under the other; `test_runtime` has all four."""
    return mock_backend("process" if anyio_backend == "asyncio" else "memory")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def ended(run: Run) -> tuple[str, str | None, str]:
    """Reason, code and outcome."""
    assert run.end is not None
    assert run.receipt is not None
    return run.end.reason, run.end.code, run.receipt.outcome


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds + SLACK_S


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


@one_loop
@pytest.mark.parametrize("code", ["null", "absent", "number"])
async def test_a_fatal_without_a_code_is_internal(code: str, backplane_home: Path, root: Path, tmp_path: Path) -> None:
    member = {"null": '"error_code": None', "absent": "", "number": '"error_code": 5'}[code]
    body = 'hello(); run = take(); put({"t": "fatal", "ref_id": run["id"], "error": "x", %s}); end()' % member  # noqa: UP031
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root), script(tmp_path, body))
    expected = "contract_schema_violation" if code == "number" else "internal"
    assert ended(run)[1:] == (expected, "failed")


@one_loop
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


async def test_a_function_that_fails_like_a_program_is_told_like_one(backplane_home: Path, root: Path) -> None:
    async def serve(stdin: int, stdout: int) -> None:
        raise ExceptionGroup("a bug", [ValueError("my last words")])

    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root), MemoryBackend(id="f", serve=serve))
    assert ended(run) == ("host_exit", "protocol_handshake_failed", "failed")
    assert run.error is not None
    assert run.error.evidence == "ValueError: my last words"


@one_loop
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
    assert len(kept["tail"]) == QUICK.stderr_bytes_max
    assert kept["tail"].endswith("ffthe end")
    assert kept["dropped_bytes"] == 6_000_007 - QUICK.stderr_bytes_max


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
        assert run.receipt is not None
        assert not run.receipt.verification.harness_ok
        async with within(3.0):
            run, _ = await go(control, order(root), early)
        assert ended(run) == ("host_exit", "protocol_handshake_failed", "failed")


@one_loop
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


@one_loop
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


@one_loop
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
    assert run.receipt is not None
    assert not run.receipt.verification.harness_ok or code


@one_loop
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
    assert run.receipt is not None
    assert run.receipt.capabilities == {"streaming": "native"}


@one_loop
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


@one_loop
async def test_a_trace_that_is_only_in_the_final_is_the_trace(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    body = """
hello(); run = take()
put(final(run, trace=[event(run, "one")["event"], event(run, "two", ts="2026-01-15T14:00:00.100000+02:00")["event"],
    {"type": "usage"}])); end()
"""
    async with plane(backplane_home) as control:
        run, events = await go(control, order(root), script(tmp_path, body))
    assert ended(run) == ("complete", None, "complete")
    assert texts(events) == ["one", "two"]
    assert len(events) == 3
    assert events[1].ts == "2026-01-15T12:00:00.100Z"


@one_loop
async def test_a_member_that_is_ours_moves_to_inner_and_says_whether_its_hash_held(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = """
hello(); run = take(); put(event(run))
put(final(run, usage_raw={"backplane": {"end": {"reason": "complete"}}, "x": 1}, receipt_sha256="a" * 64)); end()
"""
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root), script(tmp_path, body))
    assert run.receipt is not None
    assert run.receipt.usage_raw["x"] == 1
    assert backplane_of(run)["end"] == {"reason": "complete"}
    inner = backplane_of(run)["inner"]
    assert inner["backplane"] == {"end": {"reason": "complete"}}
    assert (inner["receipt_sha256"], inner["verified"]) == ("a" * 64, False)


# By the caller --------------------------------------------------------------------------------------------------------


async def test_a_good_host_is_cancelled_with_its_last_words_and_without_waiting(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    async with plane(backplane_home, cancel_grace_s=5.0) as control:
        async with control.start(order(root, {"say": "begun"}, {"sleep_s": 60}), mock) as run:
            async for event in run:
                if texts([event]):
                    began = time.monotonic()
                    await run.cancel("enough")
        took_s = time.monotonic() - began
    check(run)
    assert ended(run) == ("cancelled", None, "partial")
    assert run.error is None
    assert took_s < 1.5
    assert backplane_of(run)["cancel_reason"] == "enough"
    assert run.receipt is not None
    assert run.receipt.usage_raw["cancelled"] == "enough"


STUBBORN = "hello({extensions}); run = take(); put(event(run)); deaf()\nwhile True: time.sleep(60)\n"


@one_loop
@pytest.mark.parametrize("extensions", ["", 'extensions=["cancel/1"]'])
@pytest.mark.parametrize("spawns", [True, False])
async def test_a_stubborn_host_is_gone_after_the_grace(
    extensions: str, spawns: bool, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = "if os.fork() == 0: deaf(); os.setsid(); time.sleep(60); os._exit(0)\n" * spawns
    backend = script(tmp_path, body + STUBBORN.format(extensions=extensions))
    async with plane(backplane_home) as control:
        async with control.start(order(root), backend) as run:
            async for _ in run:
                began = time.monotonic()
                await run.cancel()
        took_s = time.monotonic() - began
    check(run)
    assert ended(run) == ("cancelled", None, "partial")
    assert QUICK.cancel_grace_s <= took_s < QUICK.cancel_grace_s + 0.5 + SLACK_S
    assert run.receipt is not None
    assert run.receipt.verification.harness_ok is not spawns


@one_loop
async def test_the_last_words_of_a_slow_host_are_kept(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    backend = script(
        tmp_path,
        """
hello(extensions=["cancel/1"]); run = take(); put(event(run))
cancel = take(); time.sleep(0.3); put(event(run, json.dumps([cancel["reason"], cancel["grace_ms"]])))
put(final(run, outcome="partial", usage={"input_tokens": 9})); end()
""",
    )
    events: list[AgentEvent] = []
    async with plane(backplane_home, cancel_grace_s=2.0) as control, control.start(order(root), backend) as run:
        async for event in run:
            events.append(event)
            if len(events) == 1:
                await run.cancel("why")
    check(run, events)
    assert texts(events) == ["a", '["why", 2000]']
    assert ended(run) == ("cancelled", None, "partial")
    assert run.receipt is not None
    assert run.receipt.usage.input_tokens == 9


async def test_leaving_the_block_early_cancels_the_run(mock: Backend, backplane_home: Path, root: Path) -> None:
    async with plane(backplane_home) as control:
        async with within(1.5), control.start(order(root, {"say": "x"}, {"sleep_s": 60}), mock) as run:
            async for _ in run:
                break
        check(run)
        assert ended(run) == ("cancelled", None, "partial")
        async with within(1.5), control.start(order(root, {"sleep_s": 60}), mock) as untouched:
            pass
        check(untouched)
        assert ended(untouched)[::2] in (("cancelled", "failed"), ("cancelled", "partial"))


async def test_a_run_that_was_left_half_way_can_be_read_on(mock: Backend, backplane_home: Path, root: Path) -> None:
    seen: list[AgentEvent] = []
    steps = {"repeat": {"times": 30, "steps": [{"delta": "{n}"}]}}
    async with plane(backplane_home) as control, control.start(order(root, steps), mock) as run:
        for _ in range(3):
            async for event in run:
                seen.append(event)
                if len(seen) % 7 == 0:
                    break
        async for event in run:
            seen.append(event)
        async for _ in run:
            pytest.fail("nothing comes after the end")
    check(run, seen)
    assert texts(seen) == [str(number) for number in range(30)]


async def test_a_reader_that_gave_up_in_the_handshake_can_begin_again(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    backend = script(tmp_path, "time.sleep(0.4); hello(); run = take(); put(event(run), final(run)); end()")
    seen: list[AgentEvent] = []
    async with plane(backplane_home) as control, control.start(order(root), backend) as run:
        with anyio.move_on_after(0.1) as gave_up:
            async for _ in run:
                pytest.fail("too early")
        assert gave_up.cancelled_caught
        with anyio.fail_after(5):
            async for event in run:
                seen.append(event)
    check(run, seen)
    assert texts(seen) == ["a"]


async def test_an_exception_in_the_body_comes_out_as_it_is(mock: Backend, backplane_home: Path, root: Path) -> None:
    class Mine(Exception):
        pass

    runs: list[Run] = []

    async def fail(control: ControlPlane, when: str) -> None:
        steps = ({"say": "x"},) if when == "after" else ({"say": "x"}, {"sleep_s": 60})
        async with control.start(order(root, *steps), mock) as run:
            runs.append(run)
            if when == "before":
                raise Mine
            async for event in run:
                if when == "during" and texts([event]):
                    raise Mine
            raise Mine

    async with plane(backplane_home) as control:
        for when in ("before", "during", "after"):
            with pytest.raises(Mine):
                await fail(control, when)
            check(runs[-1])
            assert ended(runs[-1])[0] == ("complete" if when == "after" else "cancelled")


async def test_the_cancelled_scope_of_the_caller_ends_the_run_in_order(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    async with plane(backplane_home) as control:
        with anyio.CancelScope() as scope:
            async with control.start(order(root, {"say": "x"}, {"sleep_s": 60}), mock) as run:
                async for event in run:
                    if texts([event]):
                        scope.cancel()
        assert scope.cancelled_caught
    check(run)
    assert ended(run) == ("cancelled", None, "partial")


@pytest.mark.parametrize("body", ["time.sleep(60)", "hello(); os.close(1); deaf(); time.sleep(60)"])
async def test_a_scope_that_is_cancelled_in_the_handshake_or_on_the_ladder_leaves_a_receipt(
    body: str, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    async with plane(backplane_home) as control:
        with anyio.move_on_after(0.4) as scope:
            async with control.start(order(root), script(tmp_path, body)) as run:
                async for _ in run:
                    pytest.fail("nothing was said")
        # On the ladder the cancel may come too late to be noticed; what counts is that nothing hangs on it.
        assert scope.cancel_called
    check(run)
    assert ended(run)[0] in ("cancelled", "host_exit")


async def test_a_run_that_is_left_while_another_task_reads_it_ends_for_both(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    seen: list[AgentEvent] = []

    async def read(run: Run) -> None:
        async for event in run:
            seen.append(event)

    async with plane(backplane_home) as control, anyio.create_task_group() as tasks:
        async with control.start(order(root, {"say": "x"}, {"sleep_s": 60}), mock) as run:
            tasks.start_soon(read, run)
            with anyio.fail_after(5):
                while not texts(seen):
                    await anyio.wait_all_tasks_blocked()
                    await anyio.sleep(0.01)
        assert run.receipt is not None
    check(run)
    assert ended(run) == ("cancelled", None, "partial")


# By a limit -----------------------------------------------------------------------------------------------------------


@one_loop
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("time.sleep(60)", "no hello"),
        ("put(b'\\n' * 10, b'loading\\n'); time.sleep(60)", "no hello"),
        ("while True: put(b'noise ' * 100 + b'\\n')", "no hello"),
        ("sys.exit(0)", "exit code 0"),
        ("sys.stderr.write('no licence\\n'); sys.exit(7)", "exit code 7"),
        ("put(b'{garbage\\n'); end()", "line 1"),
        ("put(b'\\xff\\xfe{\\n'); time.sleep(60)", "no hello"),
        ("put({**HELLO, 'backend': 5}); end()", "hello"),
        ("put({'t': 'event', 'ref_id': 'x', 'event': {}}); end()", "before the hello"),
    ],
)
async def test_without_a_good_hello_there_is_no_run(
    body: str, words: str, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    async with plane(backplane_home, hello_s=1.0) as control, within(1.0 + 0.5 + QUICK.cancel_grace_s + 0.5):
        run, events = await go(control, order(root), script(tmp_path, body))
    assert events == []
    _, code, outcome = ended(run)
    assert code == ("protocol_invalid_envelope" if "garbage" in body else "protocol_handshake_failed")
    assert outcome == "failed"
    assert run.error is not None
    assert words in run.error.message
    if "licence" in body:
        assert run.error.evidence == "no licence"
    assert run.receipt is not None
    assert run.receipt.capabilities == {}
    assert not run.receipt.verification.harness_ok


@one_loop
async def test_a_late_hello_within_the_limit_is_fine(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    body = "time.sleep(0.5); hello(); run = take(); put(final(run)); end()"
    async with plane(backplane_home, hello_s=3.0) as control:
        run, _ = await go(control, order(root), script(tmp_path, body))
    assert ended(run) == ("complete", None, "complete")


SILENT = {
    "nothing": "time.sleep(60)",
    "blank lines": "while True: put(b'\\n'); time.sleep(0.02)",
    "noise": "while True: put(b'still here\\n'); time.sleep(0.02)",
    "noise at full speed": "while True: put(b'still here\\n' * 1000)",
    "empty deltas": "while True: put(event(run, '')); time.sleep(0.02)",
    "foreign events": "while True: put(event({**run, 'id': 'x'})); time.sleep(0.02)",
}


@pytest.mark.parametrize("body", SILENT.values(), ids=SILENT.keys())
async def test_a_host_that_makes_no_progress_is_given_up(
    body: str, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    backend = script(tmp_path, f"hello(); run = take(); put(event(run))\n{body}")
    async with plane(backplane_home, idle_s=0.8) as control, within(0.8 + 0.5 + 0.5 + QUICK.cancel_grace_s):
        run, events = await go(control, order(root), backend)
    assert ended(run) == ("idle", "backend_timeout", "partial")
    assert run.error is not None
    assert "idle_s" in run.error.message
    assert texts(events)[0] == "a"


@one_loop
async def test_progress_of_any_kind_keeps_a_run_alive(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    body = """
hello(); run = take()
for n in range(5):
    time.sleep(0.3)
    put(event(run, "", ext={"reasoning": {"text": "hm"}}) if n % 2 else event(run, "x"))
put(final(run)); end()
"""
    async with plane(backplane_home, idle_s=0.8) as control:
        run, _ = await go(control, order(root), script(tmp_path, body))
    assert ended(run) == ("complete", None, "complete")


@one_loop
async def test_a_slow_consumer_does_not_make_the_host_idle(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    body = "hello(); run = take(); put(event(run)); time.sleep(0.2); put(event(run)); put(final(run)); end()"
    async with plane(backplane_home, idle_s=0.6) as control, control.start(order(root), script(tmp_path, body)) as run:
        async for _ in run:
            await anyio.sleep(1.0)
    check(run)
    assert ended(run) == ("complete", None, "complete")


async def test_the_total_deadline_ends_a_run_that_talks(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    backend = script(tmp_path, "hello(); run = take()\nwhile True: put(event(run)); time.sleep(0.01)")
    async with plane(backplane_home, run_s=0.8) as control, within(0.8 + 0.5 + QUICK.cancel_grace_s):
        run, events = await go(control, order(root), backend)
    assert ended(run) == ("deadline", "backend_timeout", "partial")
    assert run.error is not None
    assert "run_s" in run.error.message
    assert len(events) > 5


async def test_the_total_deadline_holds_in_the_handshake_and_for_a_consumer_that_sleeps(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    async with plane(backplane_home, run_s=0.5) as control:
        run, _ = await go(control, order(root), script(tmp_path, "time.sleep(60)"))
        assert ended(run) == ("deadline", "backend_timeout", "failed")
        backend = script(tmp_path, "hello(); run = take()\nwhile True: put(event(run)); time.sleep(0.01)")
        async with control.start(order(root), backend) as slow:
            async for _ in slow:
                await anyio.sleep(1.5)
                break
        check(slow)
        assert ended(slow) == ("deadline", "backend_timeout", "partial")


@pytest.mark.parametrize("size", [100, 1_000_000])
async def test_a_host_that_never_reads_its_input_is_given_up(
    size: int, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    backend = script(tmp_path, "hello(); deaf(); time.sleep(60)")
    async with (
        plane(backplane_home, write_s=0.5, idle_s=1.5) as control,
        within(1.5 + 0.5 + 0.5 + QUICK.cancel_grace_s),
    ):
        run, _ = await go(control, order(root, task="x" * size), backend)
    assert ended(run) == ("idle", "backend_timeout", "failed")
    assert run.error is not None
    assert ("write_s" in run.error.message) == (size > 100)


@one_loop
async def test_a_long_order_arrives_whole_at_a_host_that_takes_its_time(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = """
hello(); data = b""
while not data.endswith(b"\\n"): data += os.read(0, 4096); time.sleep(0.001)
run = json.loads(data); put(event(run, str(len(run["work_order"]["task"]))), final(run)); end()
"""
    async with plane(backplane_home, write_s=0.5) as control:
        run, events = await go(control, order(root, task="é" * 500_000), script(tmp_path, body))
    assert ended(run) == ("complete", None, "complete")
    assert texts(events) == ["500000"]


@one_loop
@pytest.mark.parametrize("size", [100, 1_000_000])
@pytest.mark.parametrize("lives", [True, False])
async def test_a_host_that_closes_its_input_before_the_order_fails_soon(
    size: int, lives: bool, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = "os.close(0); hello(); time.sleep(60)" if lives else "os.close(0); hello(); os._exit(4)"
    async with plane(backplane_home) as control, within(1.0 + 0.5 + QUICK.cancel_grace_s):
        run, _ = await go(control, order(root, task="x" * size), script(tmp_path, body))
    expected = ("protocol", "stream_closed", "failed") if lives else ("host_exit", "backend_crashed", "failed")
    assert ended(run) == expected


@one_loop
async def test_a_host_that_closes_its_input_after_the_order_goes_on(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = (
        'hello(extensions=["cancel/1"]); run = take(); os.close(0); put(event(run)); time.sleep(0.2); put(final(run))'
    )
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root), script(tmp_path, body))
    assert ended(run) == ("complete", None, "complete")


# Before a start -------------------------------------------------------------------------------------------------------


def _not_executable(folder: Path) -> tuple[str, ...]:
    (folder / "plain").write_text("#!/bin/sh\n")
    return (str(folder / "plain"),)


def _bad_shebang(folder: Path) -> tuple[str, ...]:
    (folder / "bang").write_text("#!/no/such/thing\n")
    (folder / "bang").chmod(0o755)
    return (str(folder / "bang"),)


@one_loop
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (lambda folder: ("/no/such/program",), "ENOENT"),
        (_not_executable, "EACCES"),
        (_bad_shebang, "ENOENT"),
        (lambda folder: (sys.executable, "x" * 3_000_000), "E2BIG"),
        (lambda folder: (str(folder),), "EACCES"),
    ],
)
async def test_a_host_that_cannot_be_started_is_named_and_leaves_a_receipt(
    argv: Callable[[Path], tuple[str, ...]], words: str, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with plane(backplane_home) as control:
        run, events = await go(control, order(root), ProcessBackend(id="nobody", argv=argv(tmp_path)))
    assert events == []
    assert ended(run) == ("failed", "sidecar_spawn_failed", "failed")
    assert run.error is not None
    assert words in run.error.message + str(run.error.evidence)
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert run.folder is None


@pytest.mark.parametrize("isolation", ["best_effort", "off"])
async def test_a_missing_workspace_is_named(
    isolation: Literal["best_effort", "off"], mock: Backend, backplane_home: Path, tmp_path: Path
) -> None:
    async with plane(backplane_home, isolation=isolation) as control:
        for mode in ("staged", "pass_through"):
            run, _ = await go(control, order(tmp_path / "nowhere", mode=mode), mock)
            assert ended(run)[1:] == ("workspace_init_failed", "failed")


# The journal and the store --------------------------------------------------------------------------------------------

KILLED = """
import json, os, sys, anyio, pathlib
from tests.runs import mock_backend, order, plane
root, home, way = (pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3])
async def main():
    steps = {"repeat": {"times": 100_000, "steps": [{"delta": "{n}"}]}}
    async with plane(home) as control, control.start(order(root, steps, mode="staged"), mock_backend(way)) as run:
        print(run.id, flush=True)
        async for event in run:
            if getattr(event, "text", ""):
                print(event.text, flush=True)
anyio.run(main)
"""


@pytest.mark.parametrize("way", ["memory", "process"])
@pytest.mark.parametrize("after", [1, 700])
def test_what_was_handed_on_survives_the_death_of_the_control_plane(
    way: str, after: int, backplane_home: Path, root: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(root), str(backplane_home), way],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        run_id = process.stdout.readline().decode().strip()
        for _ in range(after):
            process.stdout.readline()
        process.kill()
        shown = after + sum(line.endswith(b"\n") for line in process.stdout.read().splitlines(keepends=True))
    with Store.open(backplane_home) as store:
        assert not store.has(run_id)

    async def restart() -> Run:
        async with plane(backplane_home) as control:
            run, _ = await go(control, order(root), mock_backend("memory"))
        return run

    anyio.run(restart)
    with Store.open(backplane_home, readonly=True) as store:
        receipt = store.load(run_id)
        assert store.verify_all().findings == ()
    assert receipt.backplane["end"] == {"reason": "interrupted"}
    assert receipt.outcome == "partial"
    told = [event.text for event in receipt.trace if isinstance(event, AssistantDelta)]
    assert told == [str(number) for number in range(len(told))]
    assert len(told) >= shown
    assert not list((backplane_home / "stage").iterdir())


@pytest.fixture
def little_disk() -> Any:
    """Let no file of this process grow beyond a size, as a full disk would not."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, ignored)


@one_loop
@pytest.mark.parametrize("together", [True, False])
async def test_events_that_cannot_be_kept_end_the_run_as_a_fault_of_the_store(
    together: bool, little_disk: Callable[[int], None], backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    # With the final in the same read as the event that does not fit, the run must not look complete.
    rest = "put(event(run, 'x' * 30_000), final(run))" if together else "put(event(run, 'x' * 30_000)); put(final(run))"
    body = f"hello(); run = take(); put(event(run, 'first')); time.sleep(0.3)\n{rest}\nend()"
    seen: list[AgentEvent] = []
    async with plane(backplane_home) as control:
        await go(control, order(root), mock_backend("memory"))
        async with control.start(order(root), script(tmp_path, body)) as run:
            async for event in run:
                seen.append(event)
                little_disk(20_000)
        little_disk(resource.RLIM_INFINITY if resource.getrlimit(resource.RLIMIT_FSIZE)[1] < 0 else 10**12)
    assert texts(seen) == ["first"]
    assert ended(run)[:2] == ("store", "receipt_store_failed")
    assert run.error is not None
    assert run.error.code == "receipt_store_failed"
    assert run.receipt is not None
    assert texts(run.receipt.trace) == ["first"]


@one_loop
async def test_a_receipt_the_store_cannot_take_is_kept_for_the_next_start(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    body = f"""
hello(); run = take(); put(event(run))
while not os.path.exists({str(gate)!r}): time.sleep(0.01)
put(final(run)); end()
"""
    async with plane(backplane_home) as control:
        await go(control, order(root), mock_backend("memory"))
        async with control.start(order(root), script(tmp_path, body)) as run:
            async for _ in run:
                # Its database is taken away behind the open store's back: the commit fails, the journal does not.
                control.keeper.store()._connection.execute("PRAGMA query_only = ON")
                gate.touch()
    assert run.error is not None
    assert ended(run) == ("store", "receipt_store_failed", "complete")
    with Store.open(backplane_home) as store:
        assert not store.has(run.id)
        store.recover()
        assert store.load(run.id).receipt_sha256 == run.receipt.receipt_sha256  # type: ignore[union-attr]
        assert store.verify_all().findings == ()


@one_loop
async def test_a_home_that_cannot_be_written_refuses_every_run(root: Path, tmp_path: Path) -> None:
    home = tmp_path / "file"
    home.write_text("not a folder")
    async with plane(home) as control, control.start(order(root), mock_backend("memory")) as run:
        async for _ in run:
            pytest.fail("nothing may run")
    assert ended(run)[:2] == ("store", "receipt_store_failed")


# Memory ---------------------------------------------------------------------------------------------------------------


def test_names_and_paths_without_end_do_not_fill_the_memory() -> None:
    facts = Facts(run_id="r", order=WorkOrder("x"), backend_id="b", started_ns=0)
    facts.policy = compile_policy(PolicyProfile())
    for number in range(3_000):
        facts.look(FileChanged(ts="t", path=f"{number}/" + "p" * 3_900, summary=""))
    facts.look(FileChanged(ts="t", path="p" * 100_000, summary=""))
    assert len(facts.claimed_paths) > 2_000
    assert sum(map(len, facts.claimed_paths)) <= PATHS_CHARS_MAX
    for number in range(TOOLS_MAX + 10):
        facts.look(ToolCall(ts="t", tool_name=f"t{number}" + "x" * 2_000, input=None))
    assert len(facts._tool_calls) == TOOLS_MAX
    assert max(map(len, facts._tool_calls)) < 300
    for number in range(100):
        facts.noise(b"n" * (1_000 * number), 65_536)
    assert len(str(facts.members())) < 200_000


def test_an_end_says_only_what_it_knows() -> None:
    assert End(reason="complete").to_wire() == {"reason": "complete"}
    assert End(reason="host_exit", code="backend_crashed", signal=9).to_wire() == {
        "reason": "host_exit",
        "code": "backend_crashed",
        "signal": 9,
    }
