"""Every request that an agent sends its model in a run is in the record, and none goes out after a budget.

The same of an order's last turn is a case of `cases.py`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest

from backplane.testing import ScriptUsage, Turn
from tests.all.vendors.cases import requests_told
from tests.all.vendors.found import vendor
from tests.all.vendors.ground import Agent, Ground, Seen
from tests.all.vendors.test_cuts import AGENTS

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

USAGE: Final = ScriptUsage(input=100_000, output=10)
PRICES: Final = {"prices": {"input": 1.0, "output": 1.0}}
TITLES: Final = {"codex-acp": 0}
"""Requests for a window's title, which the receipt does not have; seen without a key_proxy."""


@pytest.fixture
def agent(name: str) -> Agent:
    vendor(name)
    return AGENTS[name]()


async def play(ground: Ground, times: int | None, **more: Any) -> Seen:
    again = msgspec.structs.replace(ground.agent.runs("echo again"), usage=USAGE, times=times)
    return await ground.play([again, Turn(text="done", usage=USAGE, times=None)], **more)


@pytest.mark.parametrize("name", TITLES)
async def test_each_request_is_in_the_record(name: str, ground: Ground) -> None:
    seen = await play(ground, 3)
    assert seen.receipt.outcome == "complete"
    assert len(seen.server.requests) == 4 + TITLES[name]
    assert requests_told(seen, USAGE.input) == 4


@pytest.mark.parametrize("name", ["claude", "codex", "copilot", "kimi", "qwen"])
async def test_no_request_goes_out_once_a_budget_is_used_up(name: str, ground: Ground) -> None:
    options = {} if name == "claude" else PRICES
    seen = await play(ground, None, max_budget_usd=0.15, options=options)
    assert (seen.receipt.outcome, seen.end["reason"], seen.end["code"]) == ("partial", "budget", "policy_denied")
    assert len(seen.server.requests) == requests_told(seen, USAGE.input) <= 2
