"""A server that the configuration names once reaches the agents for real, under the policy by its name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest

from backplane.config import ServerSettings
from backplane.contract.events import ToolResult
from backplane.contract.work import PolicyProfile
from backplane.testing import Call, Turn
from tests.all.vendors.ground import HOUSE, Agent, Ground, installed
from tests.all.vendors.test_acp_orders import Qwen
from tests.all.vendors.test_claude import Claude
from tests.all.vendors.test_codex import Codex
from tests.all.vendors.test_copilot import Copilot
from tests.all.vendors.test_gemini import Gemini
from tests.all.vendors.test_kimi import Kimi

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

AGENTS: dict[str, tuple[Callable[[], Agent], Call]] = {
    "claude": (Claude, Call(name="mcp__house__word")),
    "codex": (Codex, Call(name="word", namespace="mcp__house")),
    "copilot": (Copilot, Call(name="house-word")),
    "gemini": (Gemini, Call(name="mcp_house_word")),
    "kimi": (Kimi, Call(name="mcp__house__word")),
    "qwen": (Qwen, Call(name="mcp__house__word")),
}
DENIED = ("claude", "qwen")
"""Agents that are denied the same by a rule; the others show it with functions of a program (`check_functions`)."""
SERVERS = {"house": ServerSettings(command=(sys.executable, str(HOUSE), "walrus"))}


@pytest.fixture(params=AGENTS)
def agent(request: pytest.FixtureRequest) -> Agent:
    return installed(AGENTS[request.param][0])


async def test_a_server_of_the_configuration_reaches_the_agent(ground: Ground) -> None:
    turns = [Turn(calls=(AGENTS[ground.agent.name][1],)), Turn(text="done")]
    seen = await ground.play(turns, servers=SERVERS)
    assert seen.receipt.backplane["mcp_servers"] == {"given": ["house"], "not_given": []}
    assert "walrus" in json.dumps(seen.server.requests[-1].body)
    assert [event.tool_name for event in seen.of(ToolResult)] == ["mcp__house__word"]
    if ground.agent.name not in DENIED:
        return
    denied = await ground.play(turns, servers=SERVERS, policy=PolicyProfile(disallowed_tools=("mcp__house__*",)))
    assert "walrus" not in json.dumps(denied.server.requests[-1].body)
