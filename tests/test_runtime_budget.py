"""Limits of the order that the control plane holds itself, whatever the host thinks of them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import anyio
import pytest

import backplane
from backplane import host as sidecar
from backplane.contract.capability import NATIVE
from backplane.contract.receipt import Usage
from backplane.contract.work import RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.host.link import serve as serve_host
from backplane.receipts.state import LOSSES_BYTES_MAX
from backplane.runtime.budgets import used_by
from backplane.runtime.memory import MemoryBackend
from tests.runs import memory


async def _go_on_for_ever(run: sidecar.HostRun) -> sidecar.Done:
    for turn in range(1, 1000):
        await run.tool_call("think", {}, f"call-{turn}")
        await run.carry("usage", {"estimated_cost_usd": turn * 0.5}, "spent more")
        await run.carry("turn", {"stop_reason": "tool_use"}, "end of a turn")
        await anyio.sleep(0.001)
    return sidecar.Done()


@pytest.mark.parametrize(
    ("config", "reason", "words"),
    [
        (RuntimeConfig(max_turns=2), "max_turns", "2 turns"),
        (RuntimeConfig(max_budget_usd=1.2), "budget", "1.5 USD spent of 1.2"),
    ],
)
def test_an_agent_that_goes_on_past_a_limit_is_stopped(
    tmp_path: Path, config: RuntimeConfig, reason: str, words: str
) -> None:
    host = sidecar.Host(id="endless", capabilities={"streaming": NATIVE})
    backend = MemoryBackend(id="endless", serve=functools.partial(serve_host, host, _go_on_for_ever))
    run = backplane.run(WorkOrder("go", workspace=WorkspaceSpec(root=str(tmp_path)), config=config), backend=backend)
    assert run.error is not None
    assert (run.receipt.backplane["end"]["reason"], run.error.code) == (reason, "policy_denied")
    assert words in run.error.message
    assert run.receipt.outcome == "partial"
    assert 0 < len(run.receipt.trace) < 1000


def test_an_agent_that_keeps_to_its_limits_is_not(tmp_path: Path) -> None:
    async def work(run: sidecar.HostRun) -> sidecar.Done:
        for turn in (1, 2):
            await run.tool_call("think", {}, f"call-{turn}")
            await run.carry("turn", {"stop_reason": "tool_use"}, "end of a turn")
        await run.message("done")
        return sidecar.Done()

    host = sidecar.Host(id="brief", capabilities={"streaming": NATIVE})
    backend = MemoryBackend(id="brief", serve=functools.partial(serve_host, host, work))
    order = WorkOrder("go", workspace=WorkspaceSpec(root=str(tmp_path)), config=RuntimeConfig(max_turns=2))
    run = backplane.run(order, backend=backend)
    assert run.receipt.outcome == "complete"


def test_losses_that_a_host_reports_are_in_the_receipt(tmp_path: Path) -> None:
    loss = {"path": "/messages/0/content/1", "kind": "dropped", "code": "thinking", "reason": "no word for it"}

    async def work(run: sidecar.HostRun) -> sidecar.Done:
        await run.carry("loss", loss, "lost: thinking")
        return sidecar.Done()

    host = sidecar.Host(id="translator", capabilities={"streaming": NATIVE})
    backend = MemoryBackend(id="translator", serve=functools.partial(serve_host, host, work))
    run = backplane.run(WorkOrder("go", workspace=WorkspaceSpec(root=str(tmp_path))), backend=backend)
    assert run.receipt.backplane["losses"] == [loss]


def test_losses_are_listed_up_to_their_bytes_and_counted_beyond(tmp_path: Path) -> None:
    long = {"path": "/x", "reason": "y" * (LOSSES_BYTES_MAX // 2 - 1000)}

    async def work(run: sidecar.HostRun) -> sidecar.Done:
        for _ in range(4):
            await run.carry("loss", long, "lost: much")
        await run.carry("loss", {"path": "/small"}, "lost: little")
        return sidecar.Done()

    run = backplane.run(WorkOrder("go", workspace=WorkspaceSpec(root=str(tmp_path))), backend=memory(work))
    assert [loss["path"] for loss in run.receipt.backplane["losses"]] == ["/x", "/x", "/small"]
    assert run.receipt.backplane["counts"]["losses"] == 5


@pytest.mark.parametrize(
    ("budget", "used", "words"),
    [
        ({"max_budget_usd": 1.0}, {"estimated_cost_usd": 5.0}, "5 USD spent of 1"),
        ({"vendor": {"abp": {"budget_tokens": 100}}}, {"input_tokens": 90, "output_tokens": 20}, "110 tokens used of"),
        ({"max_budget_usd": 1.0}, {"estimated_cost_usd": 1.0}, ""),
        ({"vendor": {"abp": {"budget_tokens": 110}}}, {"input_tokens": 90, "output_tokens": 20}, ""),
        ({}, {"estimated_cost_usd": 5.0, "input_tokens": 90}, ""),
    ],
)
def test_what_the_host_says_at_its_end_counts_for_the_budget(
    tmp_path: Path, budget: dict[str, Any], used: dict[str, Any], words: str
) -> None:
    run = ended(tmp_path, {}, used, RuntimeConfig(**budget))
    assert words in str(run.error)
    assert (run.receipt.outcome, run.receipt.backplane["end"].get("code")) == (
        ("partial", "policy_denied") if words else ("complete", None)
    )


@pytest.mark.parametrize("cost", [-0.01, -5.0])
def test_a_cost_below_nothing_is_no_receipt(cost: float) -> None:
    with pytest.raises(ValueError, match="no cost is below 0"):
        Usage(estimated_cost_usd=cost)


@pytest.mark.parametrize("name", ["input_tokens", "output_tokens", "cache_read_tokens"])
def test_tokens_in_the_final_below_the_reported_ones_do_not_count(tmp_path: Path, name: str) -> None:
    run = ended(tmp_path, {name: 1000}, {name: 1}, RuntimeConfig())
    assert getattr(run.receipt.usage, name) == 1000
    assert run.receipt.backplane["usage"][name] == "reported"


@pytest.mark.parametrize(("before", "after", "micros"), [(0.9, 0.0, 900_000), (0.9, 0.8, 900_000), (0.5, 0.8, 800_000)])
def test_a_lower_cost_at_the_end_gives_nothing_of_a_budget_back(
    tmp_path: Path, before: float, after: float, micros: int
) -> None:
    receipt = ended(tmp_path, {"estimated_cost_usd": before}, {"estimated_cost_usd": after}, RuntimeConfig()).receipt
    assert receipt.usage.estimated_cost_usd == after, "the first may have been an estimate"
    assert used_by(receipt, None, was_sent=True).usd_micros == micros


def ended(folder: Path, before: dict[str, Any], used: dict[str, Any], config: RuntimeConfig) -> Any:
    """Run a host that reports a usage on the way and another one at its end."""

    async def work(run: sidecar.HostRun) -> sidecar.Done:
        await run.carry("usage", before, "so far")
        await run.message("done")
        return sidecar.Done(usage=Usage(**used))

    host = sidecar.Host(id="brief", capabilities={"streaming": NATIVE})
    backend = MemoryBackend(id="brief", serve=functools.partial(serve_host, host, work))
    order = WorkOrder("go", workspace=WorkspaceSpec(root=str(folder)), config=config)
    return backplane.run(order, backend=backend)
