"""Which files of a project each agent reads as its instructions, as its host's hello says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backplane.testing import Turn
from tests.all.vendors.found import vendor
from tests.all.vendors.ground import Agent, Ground
from tests.all.vendors.table import ROWS, acp_agents, agents
from tests.all.vendors.test_acp_orders import Qwen

pytestmark = pytest.mark.anyio

AGENTS: dict[str, Any] = {agent.name: agent for agent in (*agents(), *acp_agents(), Qwen())}
MARKS = {
    "AGENTS.override.md": "aardwolf", "AGENTS.md": "badger", "CLAUDE.md": "capybara", "GEMINI.md": "gerenuk",
    "QWEN.md": "quokka", ".github/copilot-instructions.md": "cormorant",
}  # fmt: skip


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def agent(name: str) -> Agent:
    vendor(name)
    found: Agent = AGENTS[name]
    return found


@pytest.mark.parametrize("name", list(AGENTS))
async def test_the_agent_reads_the_file_it_names_and_none_that_it_does_not_name(name: str, ground: Ground) -> None:
    named = ROWS[name]["instruction_files"]
    there = {named[0], *MARKS} - set(named[1:])
    for file in there:
        (ground.root / file).parent.mkdir(exist_ok=True)
        (ground.root / file).write_text(f"the house word is {MARKS[file]}\n")
    seen = await ground.play([Turn(text="done")])
    asked = json.dumps([request.body for request in seen.server.requests])
    assert [file for file in sorted(there) if MARKS[file] in asked] == [named[0]]
    assert "project_instructions" not in seen.receipt.backplane
