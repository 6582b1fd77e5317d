"""Runs that go well: the same orders in memory and over a process, on both event loops, many at once."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from backplane.contract.events import AssistantDelta, Reasoning, RunCompleted, RunStarted, ToolCall, ToolResult, Warned
from backplane.contract.receipt import Receipt
from backplane.contract.work import RuntimeConfig
from backplane.errors import BackendError, BackplaneError, ConfigError, RunCancelledError
from backplane.host import Done, HostRun
from backplane.receipts.store import Store
from backplane.runtime.backends import Backend
from backplane.runtime.run import Run
from tests.runs import (
    QUICK,
    backplane_of,
    check,
    counts,
    go,
    memory,
    mock_backend,
    order,
    plane,
    script,
    texts,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["memory", "process"])
def mock(request: pytest.FixtureRequest) -> Backend:
    return mock_backend(request.param)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a.txt").write_text("alpha\n")
    return folder


# One run --------------------------------------------------------------------------------------------------------------


async def test_a_complete_run_has_its_events_and_a_sealed_stored_receipt(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    steps: list[dict[str, Any]] = [
        {"delta": "he"},
        {"delta": "llo"},
        {"think": "hm"},
        {"write": {"path": "b.txt", "content": "beta\n"}},
        {"read": "a.txt"},
        {"usage": {"input_tokens": 5, "output_tokens": 2}},
        {"say": "done"},
    ]
    async with plane(backplane_home) as control:
        run, events = await go(control, order(root, *steps), mock)
    assert (run.error, run.end.reason if run.end else None) == (None, "complete")
    receipt = run.receipt
    assert receipt is not None
    assert receipt.outcome == "complete"
    assert receipt.verification.harness_ok
    assert receipt.verification.git_diff is not None
    assert "+beta" in receipt.verification.git_diff
    assert texts(events) == ["he", "llo", "", "done"]
    assert [type(events[0]), type(events[-1])] == [RunStarted, RunCompleted]
    assert sum(isinstance(event, Reasoning) for event in events) == 1
    assert sum(isinstance(event, ToolCall | ToolResult) for event in events) == 4
    assert (receipt.usage.input_tokens, receipt.usage.output_tokens) == (5, 2)
    assert backplane_of(run)["usage"]["input_tokens"] == "claimed"
    assert backplane_of(run)["usage"]["request_units"] == "unknown"
    assert "reconciliation" not in backplane_of(run) or backplane_of(run)["reconciliation"] == {}
    assert (root / "b.txt").read_text() == "beta\n"


async def test_a_failed_run_has_an_error_and_a_next_step(mock: Backend, backplane_home: Path, root: Path) -> None:
    fails = {"error": {"code": "backend_auth_failed", "message": "the key is not valid"}}
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root, {"say": "x"}, {"outcome": "failed"}), mock)
        partial, _ = await go(control, order(root, {"outcome": "partial"}), mock)
        refused, _ = await go(control, order(root, fails, {"outcome": "failed"}), mock)
        complete, _ = await go(control, order(root, {"say": "x"}), mock)
    for ended, code in ((run, "execution_tool_failed"), (partial, "execution_tool_failed"), (refused, None)):
        assert ended.end_error is None
        assert ended.error is not None
        assert ended.error.code == (code or "backend_auth_failed")
        assert ended.error.hint == f"backplane why {ended.id}"
        assert str(ended.error).endswith(f"; backplane why {ended.id}")
        with pytest.raises(BackplaneError, match=ended.error.code):
            ended.check()
    assert complete.check().error is None
    assert run.end is not None
    assert (run.end.reason, run.receipt.outcome) == ("failed", "failed")
    assert partial.receipt is not None
    assert partial.receipt.outcome == "partial"


async def test_batches_are_the_same_events_with_their_recorded_bytes(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    records: list[bytes] = []
    steps = {"repeat": {"times": 300, "steps": [{"delta": "n{n}"}]}}
    async with plane(backplane_home) as control, control.start(order(root, steps), mock) as run:
        async for batch in run.batches():
            assert batch.ref_id == run.id
            assert len(batch.events) == len(batch.records)
            records += batch.records
    check(run)
    assert run.folder is not None
    assert (run.folder / "trace.jsonl").read_bytes().splitlines() == records


@pytest.mark.parametrize("events", [0, 1])
async def test_a_cancelled_run_has_a_code_of_its_own(
    mock: Backend, backplane_home: Path, root: Path, events: int
) -> None:
    async with plane(backplane_home) as control, control.start(order(root, WORDS), mock) as run:
        assert run.error is None
        if events:
            await anext(aiter(run))
        await run.cancel("enough")
    check(run)
    assert isinstance(run.error, RunCancelledError)
    assert (run.error.code, run.error.facts.exit_code) == ("run_cancelled", 1)
    assert "enough" in run.error.message
    assert pickle.loads(pickle.dumps(run.error)).hint == run.error.hint
    assert b"run_cancelled" not in b"".join(run.receipt_chunks())
    with pytest.raises(RunCancelledError):
        run.check()


WORDS = {"repeat": {"times": 30, "steps": [{"delta": "n{n}"}, {"sleep_s": 0.003}]}}
"""A scenario of 30 events over 90 ms."""


async def read_all(run: Run, seen: list[str], pause_s: float = 0.0) -> None:
    async for event in run:
        if isinstance(event, AssistantDelta):
            seen.append(event.text)
            await anyio.sleep(pause_s)


async def read_in_batches(run: Run, seen: list[str]) -> None:
    async for batch in run.batches():
        seen += [event.text for event in batch.events if isinstance(event, AssistantDelta)]


async def read_in_two_loops(run: Run, seen: list[str]) -> None:
    async for event in run:
        if isinstance(event, AssistantDelta):
            seen.append(event.text)
            break
    await read_all(run, seen)


@pytest.mark.parametrize(
    ("read", "read_after_s", "wait_after_s", "waiters"),
    [
        pytest.param(read_all, 0.0, 0.0, 1, id="at once"),
        pytest.param(read_all, 0.0, 0.001, 1, id="before the hello"),
        pytest.param(read_all, 0.0, 0.15, 1, id="in the middle"),
        pytest.param(read_all, 0.0, 2.0, 1, id="after the end"),
        pytest.param(read_all, 0.0, 0.0, 3, id="three wait"),
        pytest.param(partial(read_all, pause_s=0.005), 0.0, 0.0, 1, id="slow reader"),
        pytest.param(read_in_batches, 0.0, 0.0, 2, id="batches"),
        pytest.param(read_in_two_loops, 0.0, 0.0, 1, id="two loops"),
        pytest.param(read_all, 0.001, 0.0, 1, id="the reader second"),
    ],
)
async def test_a_run_is_read_in_one_task_and_waited_for_in_others(
    mock: Backend, backplane_home: Path, root: Path, read: Any, read_after_s: float, wait_after_s: float, waiters: int
) -> None:
    seen: list[str] = []
    receipts: list[Receipt] = []

    async def wait(run: Run) -> None:
        await anyio.sleep(wait_after_s)
        receipts.append(await run.wait())

    async with plane(backplane_home) as control, control.start(order(root, WORDS), mock) as run:
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for _ in range(waiters):
                    tasks.start_soon(wait, run)
                await anyio.sleep(read_after_s)
                tasks.start_soon(read, run, seen)
    check(run)
    assert (run.receipt.outcome, run.error) == ("complete", None)
    assert seen == [f"n{number}" for number in range(30)]
    assert receipts == [run.receipt] * waiters


@pytest.mark.parametrize("cancelled", ["reader", "waiter"])
async def test_a_cancelled_task_leaves_the_run_to_the_other(
    mock: Backend, backplane_home: Path, root: Path, cancelled: str
) -> None:
    seen: list[str] = []

    async def end(scope: anyio.CancelScope, work: Any) -> None:
        with scope:
            await work()

    async with plane(backplane_home) as control, control.start(order(root, WORDS), mock) as run:
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                reader, waiter = anyio.CancelScope(), anyio.CancelScope()
                tasks.start_soon(end, reader, lambda: read_all(run, seen))
                tasks.start_soon(end, waiter, run.wait)
                await anyio.sleep(0.1)
                (reader if cancelled == "reader" else waiter).cancel()
    check(run)
    assert (run.receipt.outcome, run.error) == ("complete", None)
    assert cancelled == "reader" or len(seen) == 30


async def test_a_second_reader_is_refused_and_the_first_reads_on(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    seen: list[str] = []
    async with plane(backplane_home) as control, control.start(order(root, WORDS), mock) as run:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read_all, run, seen)
            await anyio.sleep(0.05)
            for second in (run.__aiter__, run.batches):
                with pytest.raises(ConfigError, match="another task iterates over run"):
                    second()
        assert [event async for event in run] == []
    check(run)
    assert len(seen) == 30


async def test_waiting_goes_on_where_a_left_loop_stopped(mock: Backend, backplane_home: Path, root: Path) -> None:
    async with plane(backplane_home) as control, control.start(order(root, WORDS), mock) as run:
        events = aiter(run)
        await anext(events)
        assert (await run.wait()).outcome == "complete"
        assert [event async for event in events] == []


async def test_a_redirected_root_reaches_the_host_whole(backplane_home: Path, root: Path) -> None:
    seen: list[HostRun] = []

    async def work(host_run: HostRun) -> Done:
        seen.append(host_run)
        return Done()

    config = RuntimeConfig(
        model="m", vendor={"x": {"y": [1, None]}}, env={"A": "b" * 20}, max_turns=3, max_budget_usd=1.5
    )
    wanted = order(root, mode="staged", config=config)
    async with plane(backplane_home) as control:
        await go(control, wanted, memory(work))
    got = seen[0].order
    assert got.workspace.root != str(root)
    assert msgspec.structs.replace(got, workspace=wanted.workspace) == wanted
    assert seen[0].extensions == ("cancel/1", "ping/1", "ask/1", "input/1", "interrupt/1", "session/1", "subagent/1")


# Many runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("way", "count"), [("memory", 100), ("process", 16)])
async def test_many_orders_at_once_are_not_mixed_up(way: str, count: int, backplane_home: Path, root: Path) -> None:
    backend = mock_backend(way)
    ended: dict[int, Run] = {}

    async def one(number: int) -> None:
        steps = {"repeat": {"times": 100, "steps": [{"delta": f"{number}:{{n}}"}]}}
        run, events = await go(control, order(root, steps), backend)
        assert texts(events) == [f"{number}:{count}" for count in range(100)]
        ended[number] = run

    async with (
        plane(backplane_home, runs_max=16, idle_s=60.0, hello_s=60.0) as control,
        anyio.create_task_group() as tasks,
    ):
        for number in range(count):
            tasks.start_soon(one, number)
    assert len({run.id for run in ended.values()}) == count
    assert {run.end.reason for run in ended.values() if run.end} == {"complete"}
    with Store.open(backplane_home, readonly=True) as store:
        assert len(store.rows(1_000)) == count
        assert store.verify_all().findings == ()


async def test_runs_beyond_the_limit_wait_and_those_beyond_the_queue_are_refused(
    backplane_home: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, running, most = anyio.Event(), 0, 0

    async def work(host_run: HostRun) -> Done:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await release.wait()
        running -= 1
        return Done()

    backend, ended = memory(work), []

    async def one() -> None:
        ended.append(await go(control, order(root), backend))

    monkeypatch.setattr("backplane.runtime.places.WAITING_MAX", 3)
    limits = msgspec.structs.replace(QUICK, runs_max=2, idle_s=60.0)
    async with plane(backplane_home, limits) as control, anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(one)
        with anyio.fail_after(30):
            while running < 2 or control._slots.waiting < 3:
                await anyio.sleep(0.01)
        with pytest.raises(BackendError, match="3 runs wait") as refused:
            async with control.start(order(root), backend):
                pytest.fail("it was let in")
        assert refused.value.code == "rate_limit_exceeded"
        release.set()
    assert (len(ended), most) == (5, 2)
    assert all(run.receipt and run.receipt.outcome == "complete" for run, _ in ended)


async def test_waiting_for_a_place_does_not_count_as_running(backplane_home: Path, root: Path) -> None:
    async def work(host_run: HostRun) -> Done:
        await anyio.sleep(0.4)
        return Done()

    ended: list[Run] = []

    async def one() -> None:
        ended.append((await go(control, order(root), memory(work)))[0])

    async with plane(backplane_home, runs_max=1, run_s=1.0) as control, anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(one)
    assert [run.end.reason for run in ended if run.end] == ["complete"] * 4


# Streams --------------------------------------------------------------------------------------------------------------


async def test_twenty_thousand_events_before_a_hard_exit_are_all_kept_in_order(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    backend = script(
        tmp_path,
        """
hello(); run = take()
put(*[event(run, str(n)) for n in range(20_000)], final(run))
os._exit(0)
""",
    )
    async with plane(backplane_home) as control:
        run, events = await go(control, order(root), backend)
    assert texts(events) == [str(number) for number in range(20_000)]
    assert run.error is None


async def test_a_slow_consumer_slows_the_child_and_loses_nothing(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "written"
    backend = script(
        tmp_path,
        f"""
hello(); run = take()
for n in range(2_000):
    put(event(run, str(n) + ":" + "x" * 1_000))
    if n % 100 == 0:
        with open({str(mark)!r}, "w") as file: file.write(str(n))
put(final(run)); end()
""",
        writable=(str(tmp_path),),
    )
    seen: list[str] = []
    ahead = 0
    async with plane(backplane_home) as control, control.start(order(root), backend) as run:
        async for event in run:
            if isinstance(event, AssistantDelta):
                seen.append(event.text.partition(":")[0])
            if len(seen) in (1, 500):
                # The child has all the time it wants, and gets as far as the pipe and one read take it.
                await anyio.sleep(0.3)
                ahead = max(ahead, int(mark.read_text()) - len(seen))
            assert sum(len(batch.events) for batch in run.drive.stream._batches) <= 100
    check(run)
    assert seen == [str(number) for number in range(2_000)]
    assert ahead < 400


async def test_a_line_longer_than_the_limit_ends_the_run_by_its_name(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = "hello(); run = take(); put(event(run, 'x' * {size})); put(final(run)); end()"
    async with plane(backplane_home, line_bytes_max=10_000) as control:
        within, events = await go(control, order(root), script(tmp_path, body.format(size=9_800)))
        beyond, _ = await go(control, order(root), script(tmp_path, body.format(size=10_000)))
    assert within.error is None
    assert len(texts(events)[0]) == 9_800
    assert beyond.error is not None
    assert beyond.error.code == "protocol_invalid_envelope"
    assert "line_bytes_max" in beyond.error.message


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ("mode=None", "`mode` is null"),
        ("extensions='cancel/1'", '`extensions` is "cancel/1"'),
        ("extensions=['ping/1', 7], heeds={'model': True}", '`extensions` is ["ping/1",7], `heeds` is {"model":true}'),
        ("mode='m' * 500", '`mode` is "' + "m" * 99 + " (S9)"),
        ("extensions=['a/1'], heeds=['model'], mode='mapped'", None),
    ],
)
async def test_what_a_hello_says_in_vain_is_a_warning(
    members: str, words: str | None, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    async with plane(backplane_home) as control:
        backend = script(tmp_path, f"hello({members}); run = take(); put(final(run)); end()")
        run, events = await go(control, order(root), backend)
    assert run.error is None
    found = [event.message for event in events if isinstance(event, Warned)]
    assert len(found) == (words is not None)
    assert words is None or f"without effect in the host's hello: {words}" in found[0]


async def test_noise_is_counted_and_kept_to_its_bound(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    backend = script(
        tmp_path,
        """
put(b"npm notice\\n"); hello(); run = take()
for n in range(50): put(b"x" * 10_000 + b"\\n", event(run, str(n)), b'{"level":"info"}\\n')
put(b"\\xff\\xfe\\x1b[31m\\n", final(run)); end()
""",
    )
    async with plane(backplane_home) as control:
        run, events = await go(control, order(root), backend)
    assert run.error is None
    assert texts(events) == [str(number) for number in range(50)]
    assert counts(run)["noise_lines"] == 102
    noise = backplane_of(run)["noise"]
    assert noise["lines"] == 102
    assert noise["text"].startswith("npm notice\nxxx")
    assert len(noise["text"]) <= 64 * 1024
