"""Functions of a program and servers of the configuration reach the agents for real, under the policy by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from backplane.config import ServerSettings
from backplane.contract.events import Approval, ToolResult
from backplane.contract.work import PolicyProfile
from backplane.testing import Turn
from tests.all.vendors.cases import MODEL
from tests.all.vendors.ground import HOUSE, Agent, Ground, installed
from tests.all.vendors.test_acp_orders import Qwen
from tests.all.vendors.test_claude import Claude
from tests.all.vendors.test_codex import Codex
from tests.all.vendors.test_copilot import Copilot
from tests.all.vendors.test_gemini import Gemini
from tests.all.vendors.test_kimi import Kimi

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

AGENTS: dict[str, Callable[[], Agent]] = {
    "claude": Claude, "codex": Codex, "copilot": Copilot, "gemini": Gemini, "kimi": Kimi, "qwen": Qwen,
}  # fmt: skip
CAGED = ("claude", "codex")
SERVERS = {"house": ServerSettings(command=(sys.executable, str(HOUSE), "walrus"))}


@pytest.fixture(params=AGENTS)
def agent(request: pytest.FixtureRequest) -> Agent:
    return installed(AGENTS[request.param])


async def test_functions_and_servers_of_the_configuration_are_its_tools(ground: Ground) -> None:
    agent, asked = ground.agent, list[str]()

    def word_of(house: str) -> str:
        """Say the word of a house."""
        asked.append(house)
        return "badger"

    def other_of(house: str) -> str:
        """Say the other word of a house."""
        asked.append("never")
        return "never"

    # What is denied comes last, as a turn may end there.
    calls = [agent.calls("functions", name, house="blue") for name in ("word_of", "other_of")]
    turns = [calls[0], agent.calls("house", "word"), calls[1], Turn(text="done")]
    policy = PolicyProfile(disallowed_tools=("mcp__functions__o*",))
    isolation = "best_effort" if agent.name in CAGED else "off"
    more = {"model": MODEL} if agent.name == "codex" else {}
    given: dict[str, Any] = {"tools": [word_of, other_of], "servers": SERVERS, "isolation": isolation, **more}
    seen = await ground.play(turns, policy=policy, **given)
    assert seen.receipt.backplane["mcp_servers"] == {"given": ["house"], "not_given": []}
    words = [str(event.output) for event in seen.of(ToolResult)]
    assert ["badger" in words[0], "walrus" in words[1], "policy_denied" in words[2]] == [True, True, True]
    assert asked == ["blue"]
    assert "walrus" in json.dumps(seen.server.requests[2].body)
    assert "Say the word of a house." in json.dumps([one.body for one in seen.server.requests])
    tools = ["mcp__functions__word_of", "mcp__house__word", "mcp__functions__other_of"]
    assert [event.tool_name for event in seen.of(ToolResult)] == tools
    assert tools[0] in [event.body.get("name") for event in seen.of(Approval)]
