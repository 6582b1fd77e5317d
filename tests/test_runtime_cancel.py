"""Runs that their caller ends: by a cancel, by leaving, by an exception, by a cancelled scope."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Literal

import anyio
import pytest

from backplane.contract.events import AgentEvent
from backplane.contract.work import PolicyProfile
from backplane.receipts.store import Store
from backplane.runtime.backends import Backend
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run
from tests.runs import QUICK, SLACK_S, backplane_of, check, ended, order, plane, script, texts, within

pytestmark = pytest.mark.anyio


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
    assert run.end_error is None
    assert took_s < 4.0
    assert backplane_of(run)["cancel_reason"] == "enough"
    assert run.receipt.usage_raw["cancelled"] == "enough"


STUBBORN = "hello({extensions}); run = take(); put(event(run)); deaf()\nwhile True: time.sleep(60)\n"


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
    assert run.receipt.verification.harness_ok is not spawns


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
        assert run.is_sealed
    check(run)
    assert ended(run) == ("cancelled", None, "partial")


async def test_a_block_is_left_in_another_task_and_outside_of_the_scope_it_was_entered_in(
    mock: Backend, backplane_home: Path, root: Path
) -> None:
    async with plane(backplane_home) as control, anyio.create_task_group() as tasks:
        block = control.start(order(root, {"say": "x"}, {"sleep_s": 60}), mock)
        with anyio.fail_after(30):
            run = await block.__aenter__()
        tasks.start_soon(block.__aexit__, None, None, None)
    check(run)
    assert ended(run)[0] == "cancelled"


# By asyncio itself ----------------------------------------------------------------------------------------------------


WRITES = """
hello(); run = take(); os.chdir(run["work_order"]["workspace"]["root"]); put(event(run))
for number in range(400):
    with open(f"{number}.txt", "w") as file: file.write("y\\n")
put(final(run)); end()
"""
MOMENTS = ("is admitted", "starts its host", "hears its host", "is sealed")
MAY_BE_COMPLETE = {"hears its host": ["complete"], "is sealed": ["complete"]}


@pytest.mark.parametrize("isolation", ["off", "best_effort"])
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_task_that_is_cancelled_leaves_its_run_sealed_and_nothing_behind(
    moment: str, isolation: Literal["off", "best_effort"], backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    for number in range(400):
        (root / f"{number}.txt").write_text("x\n")
    backend = script(tmp_path, WRITES)
    policy = PolicyProfile(allow_network=("a.example",))
    descriptors = set(os.listdir("/proc/self/fd"))
    runs: list[Run] = []
    heard = False

    async def work() -> None:
        nonlocal heard
        async with (
            plane(backplane_home, isolation=isolation) as control,
            control.start(order(root, mode="staged", policy=policy), backend) as run,
        ):
            runs.append(run)
            async for _ in run:
                heard = True

    def come() -> bool:
        stages = backplane_home / "stage"
        return {
            "is admitted": True,
            "starts its host": stages.exists() and any(stages.iterdir()),
            "hears its host": heard,
            "is sealed": bool(runs) and runs[0].is_ending,
        }[moment]

    task = asyncio.ensure_future(work())
    while not come():
        await asyncio.sleep(0.001)
    for _ in range(3):
        await asyncio.sleep(0.002)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for run in runs:
        check(run)
    with Store.open(backplane_home) as store:
        assert store.verify_all().findings == ()
        assert {row.reason for row in store.scan()} <= {"cancelled", *MAY_BE_COMPLETE.get(moment, ())}
    for folder in ("stage", "scratch"):
        assert not (backplane_home / folder).exists() or not any((backplane_home / folder).iterdir())
    assert set(os.listdir("/proc/self/fd")) <= descriptors


def test_a_run_that_is_open_while_its_loop_closes_is_sealed(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    blocks: list[object] = []
    backend = script(tmp_path, "hello(); run = take(); put(event(run)); time.sleep(60)")

    async def leave_open() -> Run:
        block = plane(backplane_home).start(order(root), backend)
        blocks.append(block)  # Else the collector would leave it.
        run = await block.__aenter__()
        async for _ in run:
            break
        return run

    run = asyncio.run(leave_open())
    check(run)
    assert ended(run) == ("cancelled", None, "partial")
