"""An order has one budget over all its attempts: money and tokens, for every way in which an attempt ends."""

from __future__ import annotations

import json
import os
import sys
import uuid
from itertools import product
from pathlib import Path
from typing import Any, Final

import anyio
import pytest

from backplane.api import TaskRouter
from backplane.config import BackendSettings, RoutingSettings, Settings
from backplane.contract.work import RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.receipts.store import Store
from backplane.runtime import budgets
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run
from tests.runs import HELLO, PRELUDE

HOST = """
hello(heeds=["max_budget_usd", "max_turns"])
run = take()
config = run["work_order"]["config"]
words = json.loads(run["work_order"]["task"])
with open(words["log"], "a") as log:
    log.write(json.dumps({"usd": config.get("max_budget_usd"), **config.get("vendor", {}).get("abp", {})}) + "\\n")
if words["answers"]:
    put(event(run))
if words["uses"] is not None:
    sent = {"usd": {"estimated_cost_usd": words["uses"] / 100, "input_tokens": 1},
            "tokens": {"input_tokens": words["uses"] - 1, "output_tokens": 1}}[words["kind"]]
    body = {"ts": "2026-01-15T12:00:00Z", "type": "warning", "message": "usage", "ext": {"usage": sent}}
    put({"t": "event", "ref_id": run["id"], "event": body})
if words["end"] == "crash":
    os._exit(7)
if words["end"] == "turns":
    for number in range(3):
        turn = {"ts": "2026-01-15T12:00:00Z", "type": "warning", "message": "turn", "ext": {"turn": {}}}
        put({"t": "event", "ref_id": run["id"], "event": turn})
put({"t": "fatal", "ref_id": run["id"], "error": "no", "error_code": words["end"]})
end()
"""
"""Uses some hundredths of a dollar, or as many tokens, and fails; None says nothing of it."""

ENDS: Final = ("backend_unavailable", "backend_rate_limited", "backend_timeout", "crash", "turns")
CELLS: Final = [*product((None,), ENDS, (True, False)), (34, "crash", True), (34, "turns", True), (100, "crash", True)]
"""What an attempt reports, how it ends, and whether its model has answered."""
LIMIT: Final = 100


def attempts_of(uses: int | None, end: str, *, answers: bool) -> list[int]:
    """The budgets of the attempts, in hundredths, by the rule alone."""
    unbilled = end in budgets.UNBILLED and not answers
    if end == "turns" or (uses is None and not unbilled):
        return [LIMIT]
    return [LIMIT - number * (uses or 0) for number in range(3) if LIMIT - number * (uses or 0) > 0]


def settings_in(folder: Path) -> Settings:
    path = folder / "host.py"
    path.write_text(PRELUDE.format(hello=json.dumps(HELLO)) + HOST)
    command = (sys.executable, "-I", "-S", str(path))
    rows = {name: BackendSettings(command=command) for name in ("one", "two", "three", "four")}
    return Settings(backends=rows, routing=RoutingSettings(strategy="first_available"), isolation="off")


async def tried(folder: Path, kind: str, uses: int | None, end: str, *, answers: bool) -> tuple[Run, list[Any]]:
    """Run one order in a state folder of its own; its last run, and what each attempt was given."""
    log = folder / f"{uuid.uuid4()}.log"
    task = json.dumps({"log": str(log), "kind": kind, "uses": uses, "end": end, "answers": answers})
    limit: Any = {"max_budget_usd": LIMIT / 100} if kind == "usd" else {"vendor": {"abp": {"budget_tokens": LIMIT}}}
    config = RuntimeConfig(max_turns=2 if end == "turns" else None, **limit)
    (folder / "work").mkdir(exist_ok=True)
    order = WorkOrder(task, workspace=WorkspaceSpec(str(folder / "work"), mode="pass_through"), config=config)
    async with ControlPlane(settings_in(folder), folder / f"{log.name}.state", os.environ) as plane:
        run = await TaskRouter(plane).run(order)
    return run, [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("kind", ["usd", "tokens"])
def test_one_budget_is_spent_once_over_all_attempts(tmp_path: Path, kind: str) -> None:
    async def all_cells() -> None:
        for uses, end, answers in CELLS if kind == "usd" else CELLS[::3]:
            run, given = await tried(tmp_path, kind, uses, end, answers=answers)
            found = [round(one["usd"] * 100) if kind == "usd" else one["budget_tokens"] for one in given]
            assert found == attempts_of(uses, end, answers=answers), (kind, uses, end, answers)
            assert run.receipt.outcome != "complete"
            known = [one.get(f"used_{kind.replace('usd', 'usd_micros')}") for one in
                     run.receipt.backplane["route"].get("tried", ())]  # fmt: skip
            assert len(known) == len(found) - 1
            assert set(known) <= {(uses or 0) * (10_000 if kind == "usd" else 1)}

    anyio.run(all_cells)


@pytest.mark.parametrize(("first", "left"), [(0, 800_000), (300_000, 500_000), (800_000, 0)])
def test_what_the_children_of_an_attempt_may_use_is_taken_from_the_next(
    backplane_home: Path, tmp_path: Path, first: int, left: int
) -> None:
    order = WorkOrder("x").with_abp("children_budget_usd_micros", 800_000)
    with Store.open(backplane_home) as store:
        parent = _lives(backplane_home, order)
        if first:
            wanted = RuntimeConfig(max_budget_usd=first / 1e6)
            budgets.reserve(store, WorkOrder("child", config=wanted).with_abp("parent", parent), str(uuid.uuid4()))
        rest = budgets.after_run(store, order, parent, budgets.Amount())
    assert rest.abp("children_budget_usd_micros") == left


def _lives(home: Path, order: WorkOrder) -> str:
    from backplane.receipts.journal import Journal, head_fact

    run_id = str(uuid.uuid4())
    head = head_fact(order, run_id=run_id, started_at="2026-11-24T00:00:00Z", backend="b")
    Journal.create(home, run_id, head).close()
    return run_id
