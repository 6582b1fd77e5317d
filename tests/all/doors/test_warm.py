"""Warm hosts: a run takes one that was started in exactly what it would start its own in, and nothing of them stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from backplane.config import BackendSettings, Limits, Settings
from backplane.contract.receipt import Receipt
from backplane.contract.work import PolicyProfile, RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.errors import BackplaneError
from backplane.providers import ProviderRegistry, SessionConfig
from backplane.receipts.store import Store
from backplane.runtime import warm
from backplane.runtime.plane import ControlPlane
from backplane.testing import ModelServer
from tests.peers import ROOT
from tests.runs import QUICK, script
from tests.served import mock, serve, until_ended

pytestmark = pytest.mark.anyio

BODY = """
hello()
run = take()
put(event(run, text=f"{os.getpid()} {os.environ.get('WORD')}"), final(run))
end()
"""
"""A host that does one order and says who it is."""


def started(home: Path, limits: Limits = QUICK, isolation: Any = "off", **members: Any) -> ControlPlane:
    return ControlPlane(Settings(limits=limits, isolation=isolation, **members), home, os.environ)


def on(root: Path, mode: Any = "pass_through", **members: Any) -> WorkOrder:
    return WorkOrder("x", workspace=WorkspaceSpec(str(root), mode=mode), **members)


async def one(plane: ControlPlane, order: WorkOrder, backend: Any, **options: Any) -> Receipt:
    async with plane.start(order, backend, **options) as run:
        return await run.wait()


def how(receipt: Receipt) -> str:
    assert receipt.outcome == "complete", receipt.backplane["end"]
    return str(receipt.backplane["start"])


def pids(receipts: list[Receipt]) -> list[str]:
    return [str(getattr(receipt.trace[0], "text", "")).split()[0] for receipt in receipts]


def below(pid: int) -> list[int]:
    """Living processes below one of ours; one that is dead and not reaped counts as one."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == pid:
                found += [int(folder.name), *below(int(folder.name))]
    return found


async def until(true: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not true():
            await anyio.sleep(0.02)


def folders(home: Path) -> list[str]:
    return [entry.name for name in ("stage", "scratch") if (home / name).is_dir() for entry in (home / name).iterdir()]


async def test_a_control_plane_that_nobody_will_close_keeps_no_host(backplane_home: Path, tmp_path: Path) -> None:
    plane, host = started(backplane_home), script(tmp_path, BODY)
    receipts = [await one(plane, on(tmp_path), host) for _ in range(4)]
    assert [how(receipt) for receipt in receipts] == ["cold"] * 4
    assert folders(backplane_home) == []
    plane.state_folder.close()


async def test_a_closed_control_plane_starts_nothing(backplane_home: Path, tmp_path: Path) -> None:
    async with started(backplane_home) as plane:
        pass
    with pytest.raises(BackplaneError, match="the control plane is closed") as refused:
        await one(plane, on(tmp_path), script(tmp_path, BODY))
    assert refused.value.code == "config_invalid"
    assert not (backplane_home / "runs").exists()


@pytest.mark.parametrize(("isolation", "mode"), [("off", "staged"), ("best_effort", "pass_through")])
async def test_the_third_order_of_a_kind_finds_its_host_and_the_receipt_says_so(
    backplane_home: Path, tmp_path: Path, isolation: str, mode: str
) -> None:
    (tmp_path / "a.txt").write_text("a\n")
    steps = [{"write": {"path": "made.txt", "content": "made\n"}}]
    config = RuntimeConfig(vendor={"mock": {"scenario": steps}})
    async with started(backplane_home, isolation=isolation) as plane:
        receipts = [await one(plane, on(tmp_path, mode, config=config), "mock") for _ in range(4)]
    assert [how(receipt) for receipt in receipts] == ["cold", "cold", "warm", "warm"]
    held = [receipt.backplane["enforcement"] for receipt in receipts]
    assert held[0] == held[2] == held[3], "the cage is that of a cold start"
    assert all(receipt.verification.git_diff == receipts[0].verification.git_diff for receipt in receipts[1:]) or (
        mode == "pass_through"
    )
    assert (tmp_path / "made.txt").exists() is (mode == "pass_through")
    assert folders(backplane_home) == []
    assert below(os.getpid()) == []


async def test_a_host_gets_one_order_and_the_next_is_another_process(backplane_home: Path, tmp_path: Path) -> None:
    backend = script(tmp_path, BODY)
    async with started(backplane_home) as plane:
        receipts = [await one(plane, on(tmp_path), backend) for _ in range(4)]
    assert [how(receipt) for receipt in receipts] == ["cold", "cold", "warm", "warm"]
    assert len(set(pids(receipts))) == 4
    assert below(os.getpid()) == []


OTHERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "another root": lambda folder: {"workspace": WorkspaceSpec(str(folder / "other"), mode="pass_through")},
    "another environment": lambda _: {"config": RuntimeConfig(env={"WORD": "other"})},
    "another isolation": lambda _: {"config": RuntimeConfig(vendor={"abp": {"isolation": "best_effort"}})},
    "another policy": lambda _: {"policy": PolicyProfile(deny_write=("secret/**",))},
    "another mode": lambda folder: {"workspace": WorkspaceSpec(str(folder), mode="staged")},
}


@pytest.mark.parametrize("what", OTHERS)
async def test_a_host_is_taken_only_for_what_it_was_started_in(backplane_home: Path, tmp_path: Path, what: str) -> None:
    (tmp_path / "other").mkdir()
    backend = script(tmp_path, BODY)
    async with started(backplane_home) as plane:
        first = on(tmp_path)
        receipts = [await one(plane, first, backend) for _ in range(3)]
        other = msgspec.structs.replace(first, **OTHERS[what](tmp_path))
        receipts.append(await one(plane, other, backend))
    assert [how(receipt) for receipt in receipts] == ["cold", "cold", "warm", "cold"]
    said = str(getattr(receipts[3].trace[0], "text", "")).split()[1]
    assert said == ("other" if what == "another environment" else "None")
    assert below(os.getpid()) == []


async def test_so_many_wait_for_so_long_and_none_where_none_is_wanted(
    backplane_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "WAIT_S", 1.5)
    backend = script(tmp_path, BODY)
    roots = [tmp_path / str(number) for number in range(4)]
    for root in roots:
        root.mkdir()
    async with started(backplane_home, msgspec.structs.replace(QUICK, warm_max=2)) as plane:
        for root in (*roots, *roots):
            await one(plane, on(root), backend)
        await until(lambda: len(below(os.getpid())) == 4)  # Two hosts, each with its guard.
        assert how(await one(plane, on(roots[0]), backend)) == "cold"
        await until(lambda: below(os.getpid()) == [])
        assert how(await one(plane, on(roots[3]), backend)) == "cold", "it waited long enough"
    async with started(backplane_home, msgspec.structs.replace(QUICK, warm_max=0)) as plane:
        assert [how(await one(plane, on(tmp_path), backend)) for _ in range(3)] == ["cold"] * 3
        assert below(os.getpid()) == []


async def test_a_host_that_ends_while_it_waits_is_reaped_and_not_taken(backplane_home: Path, tmp_path: Path) -> None:
    backend = script(tmp_path, BODY)
    async with started(backplane_home) as plane:
        for _ in range(2):
            await one(plane, on(tmp_path), backend)
        await until(lambda: len(below(os.getpid())) == 2)
        os.kill(max(below(os.getpid())), signal.SIGKILL)
        await until(lambda: below(os.getpid()) == [])
        assert how(await one(plane, on(tmp_path), backend)) == "cold"


async def test_orders_that_are_all_different_keep_no_host(backplane_home: Path, tmp_path: Path) -> None:
    backend = script(tmp_path, BODY)
    async with started(backplane_home) as plane:
        for number in range(4):
            order = on(tmp_path, config=RuntimeConfig(env={"WORD": f"n{number}"}))
            assert how(await one(plane, order, backend)) == "cold"
        assert below(os.getpid()) == []


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_a_host_waits_on_trio_as_well(backplane_home: Path, tmp_path: Path) -> None:
    async with started(backplane_home, isolation="best_effort") as plane:
        config = RuntimeConfig(vendor={"mock": {"scenario": [{"say": "x"}]}})
        order = on(tmp_path, "staged", config=config)
        assert [how(await one(plane, order, "mock")) for _ in range(4)] == ["cold", "cold", "warm", "warm"]
    assert below(os.getpid()) == []
    assert folders(backplane_home) == []


async def test_a_file_that_a_rule_covers_and_that_is_new_makes_another_host(
    backplane_home: Path, tmp_path: Path
) -> None:
    root = tmp_path / "work"
    root.mkdir()
    config = RuntimeConfig(vendor={"mock": {"scenario": [{"say": "x"}]}})
    order = on(root, config=config, policy=PolicyProfile(deny_read=("**/*.pem",)))
    async with started(backplane_home, isolation="best_effort") as plane:
        assert [how(await one(plane, order, "mock")) for _ in range(3)] == ["cold", "cold", "warm"]
        await anyio.sleep(0.5)
        (root / "key.pem").write_text("secret")
        assert how(await one(plane, order, "mock")) == "cold"


@pytest.mark.parametrize("what", ["root", "covered"])
async def test_a_cage_around_what_was_replaced_since_is_left(backplane_home: Path, tmp_path: Path, what: str) -> None:
    root, steps = tmp_path / "work", [{"write": {"path": "made.txt", "content": "made\n"}}]
    root.mkdir()
    (root / "secret.txt").write_text("one")
    config = RuntimeConfig(vendor={"mock": {"scenario": steps}})
    order = on(root, config=config, policy=PolicyProfile(deny_read=("secret.txt",)))
    async with started(backplane_home, isolation="best_effort") as plane:
        assert [how(await one(plane, order, "mock")) for _ in range(3)] == ["cold", "cold", "warm"]
        await anyio.sleep(0.5)
        if what == "root":
            root.rename(tmp_path / "old")
            root.mkdir()
            (root / "secret.txt").write_text("one")
        else:
            (root / "new").write_text("two")
            (root / "new").rename(root / "secret.txt")
        (root / "made.txt").unlink(missing_ok=True)
        assert how(await one(plane, order, "mock")) == "cold"
        assert (root / "made.txt").exists()
        assert [how(await one(plane, order, "mock")) for _ in range(2)] == ["cold", "warm"]
    assert below(os.getpid()) == []


PLANE = """
import os, sys, anyio
from pathlib import Path
from backplane.config import Settings
from backplane.contract.work import WorkOrder, WorkspaceSpec
from backplane.runtime.plane import ControlPlane
async def main():
    async with ControlPlane(Settings(), Path(sys.argv[1]), os.environ) as plane:
        order = WorkOrder("x", workspace=WorkspaceSpec(sys.argv[2]))
        for _ in range(3):
            async with plane.start(order, "mock") as run:
                await run.wait()
        await anyio.sleep(0.5)
        print(run.receipt.backplane["start"], flush=True)
        await anyio.sleep_forever()
anyio.run(main)
"""


def test_a_killed_plane_leaves_neither_host_nor_folder(backplane_home: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PLANE, str(backplane_home), str(tmp_path)]
    plane = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert plane.stdout is not None
    assert plane.stdout.readline() == "warm\n"
    waiting = below(plane.pid)
    assert waiting
    with Store.open(backplane_home):  # Another process that starts here leaves the waiting host its folders.
        pass
    anyio.run(_opened, backplane_home)
    assert folders(backplane_home)
    plane.kill()
    plane.wait()
    plane.stdout.close()
    end_s = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in waiting) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert not [pid for pid in waiting if os.path.exists(f"/proc/{pid}")]
    anyio.run(_opened, backplane_home)
    assert folders(backplane_home) == []


async def _opened(home: Path) -> None:
    async with started(home) as plane:
        await anyio.to_thread.run_sync(plane.state_folder.store)


async def test_a_conversation_finds_its_host_from_the_third_turn_on(backplane_home: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\n")
    with ModelServer([{"text": "one", "times": None}]) as server:
        options = {"protocol": "openai_compatible", "base_url": server.base_url("openai_compatible"), "model": "m"}
        rows = {"m": BackendSettings(host="api", options=options)}
        async with ProviderRegistry(Settings(backends=rows), backplane_home) as providers:
            config = SessionConfig(root=str(tmp_path), system_prompt="short")
            async with await providers.get("m").create_session(config) as session:
                turns = [await session.run("hello") for _ in range(3)]
    assert [turn.text for turn in turns] == ["one"] * 3
    assert [how(turn.receipt) for turn in turns if turn.receipt is not None] == ["cold", "cold", "warm"]
    assert below(os.getpid()) == []


async def test_each_key_of_a_pool_has_its_own_host(backplane_home: Path, tmp_path: Path) -> None:
    with ModelServer([{"text": "one", "times": None}]) as server:
        options = {
            "protocol": "openai_compatible", "base_url": server.base_url("openai_compatible"), "model": "m",
            "key_env": "POOL_KEY",
        }  # fmt: skip
        rows = {
            name: BackendSettings(host="api", group="pool", env={"POOL_KEY": f"key-of-{name}"}, options=options)
            for name in ("a", "b")
        }
        async with started(backplane_home, backends=rows) as plane:
            made = [how(await one(plane, on(tmp_path), name)) for name in "ababab"]
        keys = [request.headers["authorization"].removeprefix("Bearer key-of-") for request in server.requests]
    assert made == ["cold"] * 4 + ["warm"] * 2
    assert keys == ["a", "b"] * 3


def test_serve_gives_later_orders_a_warm_host(backplane_home: Path, tmp_path: Path) -> None:
    with serve() as child:
        assert child.read(20)["t"] == "hello"
        starts = []
        for number in range(3):
            run_id = f"00000000-0000-4000-8000-00000000000{number}"
            child.send(mock(run_id, tmp_path, {"say": "x"}))
            (final,) = [message for message in until_ended(child, run_id) if message["t"] == "final"]
            assert final["receipt"]["outcome"] == "complete"
            starts.append(final["receipt"]["usage_raw"]["backplane"]["start"])
        child.close_stdin()
    assert starts == ["cold", "cold", "warm"]
