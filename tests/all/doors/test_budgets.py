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
from hypothesis import given, settings
from hypothesis import strategies as st

from backplane.cli.cost import sums
from backplane.config import BackendSettings, Limits, Settings
from backplane.contract.work import RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.dialects.ir import TokenCounts
from backplane.errors import BackplaneError, ConfigError, PolicyError
from backplane.receipts.journal import Journal, head_fact
from backplane.receipts.store import Store
from backplane.runtime import budgets
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run
from backplane.testing import ModelServer, ScriptUsage, Turn
from backplane.upstream.cost import Price, Spent
from tests.all.doors.test_routing_cli import stored
from tests.api_agent import call
from tests.peers import ROOT
from tests.runs import HELLO, PRELUDE, script

DOLLAR = 1_000_000


def parent_of(home: Path, usd_micros: int | None = None, tokens: int | None = None) -> str:
    """A run that lives, with a budget for its children."""
    run_id = str(uuid.uuid4())
    order = WorkOrder("parent")
    for name, most in (("usd_micros", usd_micros), ("tokens", tokens)):
        order = order if most is None else order.with_abp(f"children_budget_{name}", most)
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


def taken(store: Store, order: WorkOrder) -> dict[str, Any]:
    return budgets.reserve(store, order, str(uuid.uuid4()))[1]


def test_a_share_is_taken_once_and_what_is_not_left_is_refused(backplane_home: Path) -> None:
    with Store.open(backplane_home) as store:
        parent = parent_of(backplane_home, DOLLAR)
        assert taken(store, child(parent, 0.4))["left_usd_micros"] == 600_000
        assert taken(store, child(parent, 0.6))["left_usd_micros"] == 0
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
        order, share = budgets.reserve(store, order, str(uuid.uuid4()))
        assert (order.config.max_budget_usd, share["reserved_usd_micros"]) == (0.25, 750_000)


@pytest.mark.parametrize("wrong", ["x", 7, "004ce13c-cfaa-4d1e-a0fe-fa836beb817d"])
def test_a_parent_that_is_none_is_refused(backplane_home: Path, wrong: Any) -> None:
    with Store.open(backplane_home) as store, pytest.raises(ConfigError, match=r"parent|no run"):
        taken(store, child(wrong, 0.1))


def test_a_parent_without_a_budget_has_no_children(backplane_home: Path) -> None:
    with Store.open(backplane_home) as store:
        with pytest.raises(ConfigError, match="has no budget for children"):
            taken(store, child(parent_of(backplane_home, None), 0.1))
        with pytest.raises(ConfigError, match="children_budget_usd_micros"):
            taken(store, child(parent_of(backplane_home, DOLLAR), 0.1, children_budget_usd_micros=-1))


TAKES = """
import sys, uuid
from pathlib import Path
from backplane.contract.work import RuntimeConfig, WorkOrder
from backplane.errors import PolicyError
from backplane.receipts.store import Store
from backplane.runtime import budgets
home, parent, seed = sys.argv[1:]
total = 0
with Store.open(Path(home)) as store:
    for number in range(200):
        config = RuntimeConfig(max_budget_usd=(11 + (number * 7 + int(seed)) % 30) / 1000)
        order = WorkOrder("child", config=config).with_abp("parent", parent)
        try:
            total += budgets.reserve(store, order, str(uuid.uuid4()))[1]["reserved_usd_micros"]
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
        for seed in range(3)
    ]
    totals = [int(taker.stdout.readline()) for taker in takers if taker.stdout is not None]
    assert DOLLAR - 40_000 < sum(totals) <= DOLLAR
    with Store.open(backplane_home) as store:
        with pytest.raises(PolicyError):
            taken(store, child(parent, 0.04))
        for taker in takers:
            taker.communicate(timeout=10)


@pytest.mark.parametrize("cost", [None, 0.0, 0.25, 2.0])
@pytest.mark.parametrize(
    "reason",
    ["complete", "partial", "budget", "max_turns", "failed", "interrupted", "host_exit", "refused", "cancelled"],
)
def test_what_is_not_known_is_never_counted_as_nothing(backplane_home: Path, reason: str, cost: float | None) -> None:
    run_id = stored(backplane_home, "b", cost=cost, usage_raw={"backplane": {"end": {"reason": reason}}})
    with Store.open(backplane_home) as store:
        ended = budgets._used_of(store, run_id, budgets.Amount(DOLLAR, 0))
    counted = ended.usd_micros
    told = {"complete", "partial", "budget", "max_turns"}
    if reason == "refused":
        assert counted == 0
    elif cost is None or reason not in told:
        assert counted == max(DOLLAR, round((cost or 0) * DOLLAR))
    else:
        assert counted == round(cost * DOLLAR)


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), *[st.none() | st.integers(0, 10**9)] * 3),
        max_size=20,
    )
)
def test_a_sum_with_an_unknown_part_is_unknown_and_never_less_than_its_known_parts(
    runs: list[tuple[str, int | None, int | None, int | None]],
) -> None:
    rows, total = sums(runs)
    for row in [*rows, total]:
        mine = [run for run in runs if row.key in (None, run[0])]
        costs = [cost for _, cost, _, _ in mine]
        assert row.unknown == costs.count(None)
        assert row.cost_usd_micros == (None if None in costs else sum(cost or 0 for cost in costs))
        known = [cost for cost in costs if cost is not None]
        assert row.known_usd_micros == (sum(known) if known else None)
        sent_all, got_all = [sent for _, _, sent, _ in mine], [got for _, _, _, got in mine]
        for counts, told in ((sent_all, row.input_tokens), (got_all, row.output_tokens)):
            assert told == (None if None in counts else sum(count or 0 for count in counts))
    spent = Spent()
    for _, _, sent, got in runs:
        spent = spent.plus(TokenCounts(input=sent, output=got), Price(input=1_000_000, output=2_000_000, source="x"))
    unknown = any(sent is None or got is None for _, _, sent, got in runs)
    assert (spent.micros is None) == unknown
    assert spent.usage().estimated_cost_usd is None or not unknown


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

POT = 600_000
"""Of all children."""


async def all_at_once(plane: ControlPlane, orders: list[WorkOrder], backend: Any) -> list[Run]:
    ended: list[Run] = []

    async def one(order: WorkOrder) -> None:
        async with plane.start(order, backend) as run:
            await run.wait()
        ended.append(run)

    async with anyio.create_task_group() as tasks:
        for order in orders:
            tasks.start_soon(one, order)
    return ended


def held(home: Path) -> tuple[int, int]:
    """What all shares are together."""
    with budgets._opened(home) as connection:
        found = connection.execute("SELECT total(usd_micros), total(tokens) FROM shares").fetchone()
    return int(found[0]), int(found[1])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "pot"), [("usd_micros", 120_000), ("tokens", 60_000)])
def test_many_children_at_once_go_beyond_nothing_and_return_what_they_left(
    backplane_home: Path, tmp_path: Path, kind: str, pot: int
) -> None:
    own: Any = {"usd": pot / 4 / DOLLAR} if kind == "usd_micros" else {"budget_tokens": pot // 4}
    most: list[int] = []

    async def watched(home: Path) -> None:
        while True:
            await anyio.sleep(0.05)
            most.append(held(home)[kind == "tokens"])

    async def whole(server: ModelServer) -> tuple[str, list[Run]]:
        async with (
            ControlPlane(api_settings(server), backplane_home, os.environ) as plane,
            anyio.create_task_group() as tasks,
        ):
            plane.state_folder.store()
            parent = parent_of(backplane_home, **{kind: pot})
            tasks.start_soon(watched, backplane_home)
            ended = await all_at_once(plane, [child(parent, root=tmp_path, **own) for _ in range(12)], "mine")
            tasks.cancel_scope.cancel()
        return parent, ended

    with ModelServer([LOOP]) as server:
        parent, ended = anyio.run(whole, server)
        requests = len(server.requests)
    used = 0
    for run in ended:
        usage = run.receipt.usage
        if run.receipt.outcome != "partial":
            assert run.error is not None
            assert run.error.code == "policy_denied"
            continue
        money, tokens = usage.estimated_cost_usd or 0, (usage.input_tokens or 0) + (usage.output_tokens or 0)
        amount = round(money * DOLLAR) if kind == "usd_micros" else tokens
        assert 0 < amount <= pot // 4, "this host makes a call only if its share is enough for it"
        used += amount
        assert run.receipt.backplane["parent"] == run.receipt.backplane["budget"]["parent"]
    assert used == (3_000 if kind == "usd_micros" else 1_200) * requests <= pot
    assert max(most) <= pot, "at no moment the shares are more than there is"
    with Store.open(backplane_home) as store:
        rest: Any = {"usd": (pot - used) / DOLLAR} if kind == "usd_micros" else {"budget_tokens": pot - used}
        assert taken(store, child(parent, **rest))[f"left_{kind}"] == 0


def test_a_service_that_tells_no_usage_is_counted_at_the_whole_share(backplane_home: Path, tmp_path: Path) -> None:
    async def whole(server: ModelServer) -> tuple[str, list[Run]]:
        async with ControlPlane(api_settings(server), backplane_home, os.environ) as plane:
            parent = parent_of(backplane_home, POT)
            orders = [child(parent, POT / 3 / DOLLAR, root=tmp_path) for _ in range(3)]
            return parent, await all_at_once(plane, orders, "mine")

    with ModelServer([msgspec.structs.replace(LOOP, usage=None)]) as server:
        parent, ended = anyio.run(whole, server)
        most = sum(
            len(msgspec.json.encode(request.body)) + 10 * request.body["max_completion_tokens"]
            for request in server.requests
        )
    assert 0 < most <= POT
    assert {run.receipt.usage.estimated_cost_usd for run in ended} - {0} == {None}
    with Store.open(backplane_home) as store, pytest.raises(PolicyError):
        taken(store, child(parent, 0.000001))


@pytest.mark.parametrize(("kind", "pot"), [("usd_micros", 3_000), ("tokens", 1_100)])
def test_a_child_that_never_calls_its_model_leaves_the_whole_budget(
    backplane_home: Path, tmp_path: Path, kind: str, pot: int
) -> None:
    async def whole(server: ModelServer) -> tuple[str, list[Run]]:
        async with ControlPlane(api_settings(server), backplane_home, os.environ) as plane:
            parent = parent_of(backplane_home, **{kind: pot})
            ended = [(await all_at_once(plane, [child(parent, root=tmp_path)], "mine"))[0] for _ in range(2)]
            return parent, ended

    with ModelServer([LOOP]) as server:
        parent, ended = anyio.run(whole, server)
        assert not server.requests
    assert [run.receipt.outcome for run in ended] == ["partial"] * 2, "none of them is refused for another's sake"
    for run in ended:
        used = run.receipt.usage
        assert (used.input_tokens, used.output_tokens, used.estimated_cost_usd) == (0, 0, 0)
    with Store.open(backplane_home) as store:
        own: Any = {"usd": pot / DOLLAR} if kind == "usd_micros" else {"budget_tokens": pot}
        taken(store, child(parent, **own))


REPORTS = """
hello(heeds=["max_budget_usd"])
run = take()
for n in range(1, 40):
    usage = {"input_tokens": 900 * n, "output_tokens": 100 * n, "estimated_cost_usd": 0.01 * n}
    body = {"ts": "2026-01-15T12:00:00Z", "type": "warning", "message": "usage", "ext": {"usage": usage}}
    put({"t": "event", "ref_id": run["id"], "event": body})
    time.sleep(0.8)
put(final(run))
end()
"""
"""An agent that tells after each call what all its calls have used, 1,000 tokens and a cent each."""


@pytest.mark.parametrize("kind", ["usd_micros", "tokens"])
def test_agents_that_report_afterwards_go_one_call_beyond_their_share(
    backplane_home: Path, tmp_path: Path, kind: str
) -> None:
    backend = script(tmp_path, REPORTS)

    async def whole() -> list[Run]:
        async with ControlPlane(Settings(isolation="off"), backplane_home, os.environ) as plane:
            plane.state_folder.store()
            parent = parent_of(backplane_home, **{kind: 250_000 if kind == "usd_micros" else 25_000})
            own: Any = {"usd": 0.02} if kind == "usd_micros" else {"budget_tokens": 2_000}
            return await all_at_once(plane, [child(parent, root=tmp_path, **own) for _ in range(3)], backend)

    ended = anyio.run(whole)
    for run in ended:
        used = run.receipt.usage
        assert run.end is not None
        assert run.end.reason == "budget"
        calls = ((used.input_tokens or 0) + (used.output_tokens or 0)) // 1_000
        assert calls == 3, "two are its share, the third ends it"


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
        reasons = sorted(row.reason or "" for row in store.rows())
        assert "interrupted" in reasons
        assert taken(store, child(parent, 0.3))["left_usd_micros"] == 0
