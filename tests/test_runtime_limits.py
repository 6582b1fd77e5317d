"""Deadlines of every kind, and hosts that cannot be started at all."""

from __future__ import annotations

import functools
import os
import threading
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread
import msgspec
import pytest

from backplane.errors import BackplaneError
from backplane.host import Done, Host, HostRun
from backplane.host.link import serve
from backplane.runtime.backends import Backend, ProcessBackend
from backplane.runtime.hello import ask_hello
from backplane.runtime.memory import MemoryBackend
from tests.runs import QUICK, check, ended, go, not_begun, order, plane, script, texts, within

pytestmark = pytest.mark.anyio


# By a limit -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("time.sleep(60)", "no hello"),
        ("put(b'\\n' * 10, b'loading\\n'); time.sleep(60)", "(hello_s); it wrote a line that is no message: 'loading'"),
        ("put({'type': 'hello'}, {}); end()", 'lines that are no messages, the first: \'{"type": "hello"}\''),
        ("while True: put(b'noise ' * 100 + b'\\n')", "no hello"),
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
    assert run.receipt.capabilities == {}
    assert not run.receipt.verification.harness_ok


@pytest.mark.parametrize(("body", "how"), [("time.sleep(60)", "sent no hello"), ("sys.exit(0)", "ended before")])
async def test_who_asks_for_a_hello_alone_reads_what_came_instead(body: str, how: str, tmp_path: Path) -> None:
    limits = msgspec.structs.replace(QUICK, hello_s=1.0)
    with pytest.raises(
        BackplaneError, match=f"{how}.*; it wrote 2 lines that are no messages, the first: 'npm notice'"
    ):
        await ask_hello(script(tmp_path, f"put(b'npm notice\\n', {{'type': 'hello'}}); {body}"), os.environ, limits)


async def test_a_late_hello_within_the_limit_is_fine(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    body = "time.sleep(0.5); hello(); run = take(); put(final(run)); end()"
    async with plane(backplane_home, hello_s=3.0) as control:
        run, _ = await go(control, order(root), script(tmp_path, body))
    assert ended(run) == ("complete", None, "complete")


BUSY_S = 5.0
"""For a machine with other work, on which the limit itself was seen to be heard late."""
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
    async with plane(backplane_home, idle_s=0.8) as control, within(0.8 + BUSY_S + QUICK.cancel_grace_s):
        run, events = await go(control, order(root), backend)
    assert ended(run) == ("idle", "backend_timeout", "partial")
    assert run.error is not None
    assert "idle_s" in run.error.message
    assert ("no messages, the first: 'still here'" in run.error.message) == ("still here" in body)
    assert ("the first: event for run 'x'" in run.error.message) == ("'id'" in body)
    assert texts(events)[0] == "a"


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


async def test_a_long_order_arrives_whole_at_a_host_that_takes_its_time(
    backplane_home: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = """
hello(); data = b""
while not data.endswith(b"\\n"): data += os.read(0, 4096); time.sleep(0.001)
run = json.loads(data); put(event(run, str(len(run["work_order"]["task"]))), final(run)); end()
"""
    monkeypatch.setattr("backplane.runtime.channel.WRITE_S", 0.5)
    async with plane(backplane_home) as control:
        run, events = await go(control, order(root, task="é" * 500_000), script(tmp_path, body))
    assert ended(run) == ("complete", None, "complete")
    assert texts(events) == ["500000"]


async def test_a_host_that_reads_too_late_gets_its_cancel_as_a_line_of_its_own(
    backplane_home: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f"""
hello(extensions=["cancel/1"]); time.sleep(0.7); run = take()
os.write(os.open({str(tmp_path / "read")!r}, os.O_CREAT | os.O_WRONLY), take()["t"].encode()); put(final(run)); end()
"""
    monkeypatch.setattr("backplane.runtime.channel.WRITE_S", 0.3)
    async with plane(backplane_home, cancel_grace_s=3.0) as control:
        run, _ = await go(control, order(root, task="x" * 300_000), script(tmp_path, body))
    assert ended(run)[:2] == ("idle", "backend_timeout")
    assert (tmp_path / "read").read_text() == "cancel"


async def test_a_host_that_closes_its_input_after_the_order_goes_on(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = (
        'hello(extensions=["cancel/1"]); run = take(); os.close(0); put(event(run)); time.sleep(0.2); put(final(run))'
    )
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root), script(tmp_path, body))
    assert ended(run) == ("complete", None, "complete")


async def test_a_function_that_ignores_its_cancellation_is_left_behind(backplane_home: Path, root: Path) -> None:
    over = threading.Event()

    async def work(_: HostRun) -> Done:
        await anyio.to_thread.run_sync(over.wait, 60)
        return Done()

    backend = MemoryBackend(id="stuck", serve=functools.partial(serve, Host(id="stuck", capabilities={}), work))
    try:
        async with plane(backplane_home, run_s=0.5) as control, within(0.5 + QUICK.cancel_grace_s + 5.0):
            run, _ = await go(control, order(root), backend)
    finally:
        over.set()
    assert ended(run)[:2] == ("deadline", "backend_timeout")
    assert not run.receipt.verification.harness_ok
    assert "left behind" in run.receipt.backplane["stderr"]["tail"]


# Before a start -------------------------------------------------------------------------------------------------------


async def test_a_host_that_cannot_be_started_is_named_and_leaves_a_receipt(backplane_home: Path, root: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with plane(backplane_home) as control:
        run, events = await go(control, order(root), ProcessBackend(id="nobody", argv=("/no/such/program",)))
    assert events == []
    assert ended(run) == ("failed", "sidecar_spawn_failed", "failed")
    assert run.error is not None
    assert "ENOENT" in run.error.message
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert not_begun(run)


@pytest.mark.parametrize("isolation", ["best_effort", "off"])
async def test_a_missing_workspace_is_named(
    isolation: Literal["best_effort", "off"], mock: Backend, backplane_home: Path, tmp_path: Path
) -> None:
    async with plane(backplane_home, isolation=isolation) as control:
        for mode in ("staged", "pass_through"):
            run, _ = await go(control, order(tmp_path / "nowhere", mode=mode), mock)
            assert ended(run)[1:] == ("workspace_init_failed", "failed")
