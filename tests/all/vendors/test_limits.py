"""A limit of the model's service is waited out in the agent's own conversation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backplane.contract.events import RetryReported
from backplane.testing import Fault, Turn
from tests.all.vendors.found import vendor
from tests.all.vendors.ground import Agent, Ground
from tests.all.vendors.table import acp_agents, agents

pytestmark = pytest.mark.anyio
AGENTS: dict[str, Any] = {agent.name: agent for agent in (*agents(), *acp_agents())}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def agent(name: str) -> Agent:
    vendor(name)
    found: Agent = AGENTS[name]
    return found


@pytest.mark.parametrize("name", ["claude", "codex", "gemini"])
async def test_a_limit_after_an_effect_is_waited_out_and_nothing_is_done_twice(name: str, ground: Ground) -> None:
    refused = Fault(status=429, message="rate limit reached")
    turns = [ground.agent.runs("echo two >> a.txt"), Turn(fault=refused, times=None)]
    began: list[str] = []

    def seen(found: Any, event: Any) -> None:
        if isinstance(event, RetryReported) and "until" in event.body and not began:
            began.append(event.body["until"])
            found.server.play([Turn(text="all is done")])

    ended = await ground.play(turns, seen=seen, abp={"wait_for_limit_s": 120})
    assert began
    assert (ended.receipt.outcome, ended.words) == ("complete", "all is done")
    assert ended.patch.count("+two") == 1
    assert "Go on with the task" in json.dumps(ended.server.requests[-1].body)
