"""A budget over children: however many start at once, they keep to it; and nothing is lost by a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from backplane.config import BackendSettings, Limits, Settings
from backplane.contract.work import RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.errors import BackplaneError, ConfigError, PolicyError
from backplane.receipts import Journal, Store, head_fact
from backplane.runtime import budgets
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run
from backplane.testing import ModelServer, ScriptUsage, Turn
from tests.api_agent import call
from tests.peers import ROOT
from tests.runs import HELLO, PRELUDE
from tests.test_routing_cli import stored

DOLLAR = 1_000_000


def parent_of(home: Path, micros: int | None) -> str:
    """A run that lives, with a budget for its children."""
    run_id = str(uuid.uuid4())
    order = WorkOrder("parent")
    if micros is not None:
        order = order.with_abp("children_budget_usd_micros", micros)
    Journal.create(
        home, run_id, head_fact(order, run_id=run_id, started_at="2026-11-24T00:00:00Z", backend="b")
    ).close()
    return run_id


def child(parent: str, usd: float | None = None, root: Path | None = None, **abp: Any) -> WorkOrder:
    spec = WorkspaceSpec(str(root), mode="pass_through") if root is not None else WorkspaceSpec()
    order = WorkOrder("child", config=RuntimeConfig(max_budget_usd=usd), workspace=spec).with_abp("parent", parent)
    for name, value in abp.items():
        order = order.with_abp(name, value)
    return order


def taken(store: Store, order: WorkOrder) -> budgets.Reservation:
    found = budgets.reserve(store, order, str(uuid.uuid4()))
    assert found is not None
    return found[1]


def test_a_share_is_taken_once_and_what_is_not_left_is_refused(backplane_home: Path) -> None:
    with Store.open(backplane_home) as store:
        parent = parent_of(backplane_home, DOLLAR)
        assert budgets.reserve(store, WorkOrder("no child"), "x") is None
        assert taken(store, child(parent, 0.4)).left_usd_micros == 600_000
        assert taken(store, child(parent, 0.6)).left_usd_micros == 0
        with pytest.raises(PolicyError, match=r"wants \$0\.000001 .* \$0\.000000 of it is left") as refused:
            taken(store, child(parent, 0.000001))
        assert refused.value.code == "policy_denied"
        with pytest.raises(PolicyError, match="wants something"):
            taken(store, child(parent))


def test_a_child_without_a_limit_takes_what_is_left_and_has_it_as_its_limit(backplane_home: Path) -> None:
    with Store.open(backplane_home) as store:
        parent = parent_of(backplane_home, DOLLAR)
        taken(store, child(parent, 0.25))
        order = child(parent, children_budget_usd_micros=500_000)
        found = budgets.reserve(store, order, str(uuid.uuid4()))
        assert found is not None
        assert (found[0].config.max_budget_usd, found[1].reserved_usd_micros) == (0.25, 750_000)


@pytest.mark.parametrize("wrong", ["x", 7, "004ce13c-cfaa-4d1e-a0fe-fa836beb817d"])
def test_a_parent_that_is_none_is_refused(backplane_home: Path, wrong: Any) -> None:
    with Store.open(backplane_home) as store, pytest.raises(ConfigError, match=r"parent|no run"):
        taken(store, child(wrong, 0.1))


def test_a_parent_without_a_budget_has_no_children(backplane_home: Path) -> None:
    with Store.open(backplane_home) as store:
        with pytest.raises(ConfigError, match="has no budget for children"):
            taken(store, child(parent_of(backplane_home, None), 0.1))
        with pytest.raises(ConfigError, match="children_budget_usd_micros is"):
            budgets.children_budget(WorkOrder("x").with_abp("children_budget_usd_micros", -1))


TAKES = """
import sys
from pathlib import Path
from backplane.errors import PolicyError
from backplane.receipts import Store
from tests.test_budgets import child, taken
home, parent, seed = sys.argv[1:]
total = 0
with Store.open(Path(home)) as store:
    for number in range(200):
        try:
            total += taken(store, child(parent, (1 + (number * 7 + int(seed)) % 30) / 1000)).reserved_usd_micros
        except PolicyError:
            break
print(total, flush=True)
sys.stdin.read()
"""
"""A process that takes shares until one is refused, says how much it got, and lives until it may go."""


def test_many_processes_keep_to_one_budget(backplane_home: Path) -> None:
    with Store.open(backplane_home):
        parent = parent_of(backplane_home, DOLLAR)
    takers = [
        subprocess.Popen(
            [sys.executable, "-c", TAKES, str(backplane_home), parent, str(seed)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(4)
    ]
    totals = [int(taker.stdout.readline()) for taker in takers if taker.stdout is not None]
    assert DOLLAR - 30_000 < sum(totals) <= DOLLAR
    with Store.open(backplane_home) as store:
        with pytest.raises(PolicyError):
            taken(store, child(parent, 0.03))
        for taker in takers:
            taker.communicate(timeout=10)
        # None of these became a run, and all who took them are gone: nothing of it was spent.
        assert taken(store, child(parent, 1.0)).left_usd_micros == 0


@pytest.mark.parametrize("cost", [None, 0.0, 0.25, 2.0])
@pytest.mark.parametrize(
    "reason",
    ["complete", "partial", "budget", "max_turns", "failed", "interrupted", "host_exit", "refused", "cancelled"],
)
def test_what_is_not_known_is_never_counted_as_nothing(backplane_home: Path, reason: str, cost: float | None) -> None:
    run_id = stored(backplane_home, "b", cost=cost, usage_raw={"backplane": {"end": {"reason": reason}}})
    with Store.open(backplane_home) as store:
        counted = budgets._cost(store, run_id, DOLLAR, os.getpid())
    told = {"complete", "partial", "budget", "max_turns"}
    if reason == "refused":
        assert counted == 0
    elif cost is None or reason not in told:
        assert counted == max(DOLLAR, round((cost or 0) * DOLLAR))
    else:
        assert counted == round(cost * DOLLAR)


# Through the control plane --------------------------------------------------------------------------------------------


def api_settings(server: ModelServer) -> Settings:
    options = {
        "protocol": "openai_compatible",
        "base_url": server.base_url("openai_compatible"),
        "model": "m",
        "prices": {"input": 1, "output": 10},
    }
    limits = Limits(runs_max=50)
    return Settings(backends={"mine": BackendSettings(host="api", options=options)}, isolation="off", limits=limits)


LOOP = Turn(calls=(call("read_file", path="none"),), usage=ScriptUsage(input=1000, output=200), times=None)
"""A model that never ends; a turn costs 3,000 millionths of a dollar."""

SHARE = 30_000
"""Of a child: the most that one call of its can cost is more than half of it."""


@pytest.mark.timeout(180)
def test_fifty_children_at_once_spend_no_more_than_was_reserved(backplane_home: Path, tmp_path: Path) -> None:
    ended: list[Run] = []

    async def all_at_once(plane: ControlPlane, parent: str) -> None:
        async def one() -> None:
            async with plane.start(child(parent, SHARE / DOLLAR, tmp_path), "mine") as run:
                await run.wait()
            ended.append(run)

        async with anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(one)

    async def whole(server: ModelServer) -> None:
        async with ControlPlane(api_settings(server), backplane_home, os.environ) as plane:
            plane.keeper.store()
            await all_at_once(plane, parent_of(backplane_home, 12 * SHARE))

    with ModelServer([LOOP]) as server:
        anyio.run(whole, server)
        requests = [
            (len(msgspec.json.encode(request.body)), request.body["max_completion_tokens"])
            for request in server.requests
        ]
    refused = [run for run in ended if run.end is not None and run.end.reason == "refused"]
    ran = [run for run in ended if run not in refused]
    # Twelve fit at once; whoever comes when others have ended finds what these did not spend.
    assert len(ran) >= 12
    assert len(ran) + len(refused) == 50
    assert {run.error.code for run in refused if run.error is not None} == ({"policy_denied"} if refused else set())
    spent = [round((run.receipt.usage.estimated_cost_usd or DOLLAR) * DOLLAR) for run in ran]
    assert max(spent) <= SHARE
    assert sum(spent) == 3_000 * len(requests) <= 12 * SHARE
    assert all(size + 10 * tokens <= SHARE for size, tokens in requests), "what it may cost was left"
    for run in ran:
        assert run.receipt.outcome == "partial"
        raw = run.receipt.usage_raw
        assert isinstance(raw, dict)
        assert "max_tokens of output" in raw["budget_rule"]
        assert run.receipt.backplane["budget"]["reserved_usd_micros"] == SHARE
        assert run.receipt.backplane["parent"] == run.receipt.backplane["budget"]["parent"]


def test_the_share_of_a_child_whose_plane_was_killed_is_kept_until_it_is_sealed(
    backplane_home: Path, tmp_path: Path
) -> None:
    host = tmp_path / "host.py"
    hello = {**HELLO, "heeds": ["max_budget_usd"]}
    host.write_text(PRELUDE.format(hello=json.dumps(hello)) + "hello()\nrun = take()\nput(event(run))\nend()\n")
    with Store.open(backplane_home):
        parent = parent_of(backplane_home, DOLLAR)
    order = tmp_path / "order.json"
    root = tmp_path / "work"
    root.mkdir()
    order.write_text(
        json.dumps(
            {
                "task": "x",
                "config": {"max_budget_usd": 0.7, "vendor": {"abp": {"parent": parent}}},
                "workspace": {"root": str(root)},
            }
        )
    )
    command = [sys.executable, "-m", "backplane", "run", "--order", str(order)]
    plane = subprocess.Popen([*command, "--sidecar", f"{sys.executable} -I -S {host}"], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while not any(path.stat().st_size for path in backplane_home.glob("runs/*/trace.jsonl")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with Store.open(backplane_home) as store, pytest.raises(PolicyError, match=r"\$0\.300000 of it is left"):
            taken(store, child(parent, 0.5))
    finally:
        plane.send_signal(signal.SIGKILL)
        plane.wait(10)
    with Store.open(backplane_home) as store, pytest.raises(PolicyError, match=r"\$0\.300000 of it is left"):
        taken(store, child(parent, 0.5))

    async def refused() -> BackplaneError | None:
        # The next control plane seals what was cut off; its cost is unknown, so all of it counts as spent.
        async with ControlPlane(Settings(isolation="off"), backplane_home, os.environ) as own:
            async with own.start(child(parent, 0.5, root), "mock") as run:
                await run.wait()
            return run.error

    error = anyio.run(refused)
    assert error is not None
    assert error.code == "policy_denied"
    with Store.open(backplane_home) as store:
        reasons = sorted(row.reason or "" for row in store.list())
        assert "interrupted" in reasons
        assert taken(store, child(parent, 0.3)).left_usd_micros == 0
