"""Agents as children of a run with a budget: they report usage afterwards, and are stopped after that call."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from backplane.testing import SIDE_TURNS, ScriptUsage
from tests.all.doors.test_budgets import parent_of
from tests.all.vendors.ground import Agent, Ground, installed
from tests.all.vendors.test_examples_agents import AGENTS

pytestmark = [pytest.mark.timeout(300), pytest.mark.anyio]

USED = ScriptUsage(input=9_000, output=1_000)
"""Tokens of each call of the model."""
SHARE = 25_000
"""Of tokens, used up by the third call."""


@pytest.fixture(params=AGENTS)
def agent(request: pytest.FixtureRequest) -> Agent:
    return installed(AGENTS[request.param])


async def test_a_child_ends_with_the_call_that_used_its_share_up(
    agent: Agent, backplane_home: Path, tmp_path: Path
) -> None:
    ground = Ground(agent, tmp_path / "work")
    ground.root.mkdir()
    parent = parent_of(backplane_home, tokens=60_000)
    again = msgspec.structs.replace(agent.runs("echo again"), times=None, usage=USED)
    # Without the proxy a busy machine lets an agent ask once more before it is ended.
    seen = await ground.play([again], abp={"parent": parent, "budget_tokens": SHARE}, key_proxy=True)
    called = [request for request in seen.server.requests if (request.turn or 0) >= len(SIDE_TURNS)]
    assert (seen.receipt.outcome, seen.end["reason"], seen.end["code"]) == ("partial", "budget", "policy_denied")
    assert len(called) == 3
