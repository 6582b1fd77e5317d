"""Kimi for real, through every case that driven agents share, and what is its own."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from backplane.contract.events import CommandExecuted, FileChanged, ToolResult
from backplane.contract.work import PolicyProfile
from backplane.testing import Call, Turn
from tests.all.vendors.cases import (
    ABSENT,
    ALIVE,
    ALL_CUT,
    CASES,
    CHANGED,
    CLOCK,
    FAILING,
    IN_WORDS,
    RIGHT,
    TEXT_STOPPED,
    UNANSWERED,
    WRONG,
    of,
)
from tests.all.vendors.found import program, vendor
from tests.all.vendors.ground import Agent, Ground
from tests.all.vendors.test_acp_orders import SHAPED

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]


class Kimi(Agent):
    """How its model calls tools, and where its model is."""

    name = host = "kimi"
    conversations_in = "pass_through"
    write_tool = "write_file"
    alike = (UNANSWERED, TEXT_STOPPED, CLOCK, ALIVE, ALL_CUT, RIGHT, WRONG, ABSENT, *FAILING)

    def __init__(self) -> None:
        self.env: dict[str, str] = {}
        self.patient = {"options": {"retries": 10}}
        self.labels = {
            **SHAPED,
            **IN_WORDS,
            CHANGED: "refused: the agent takes no other input than its own, so the call does not run",
            "a loop of tool calls without end": "cut: the agent sees a loop after twelve calls and stops, partial",
            "max turns": "emulated: the host counts requests and stops the turn",
        }

    def options(self, url: str) -> dict[str, Any]:
        more = {"provider": "openai", "model": "scripted-model", "retries": 1}
        return {"program": vendor("kimi"), "base_url": f"{url}/v1", **more}

    def variables(self) -> dict[str, str]:
        folders = (str(program("rg").parent), os.environ["PATH"])
        return {"KIMI_API_KEY": "scripted-key-1", "PATH": os.pathsep.join(folders)}

    def writes(self, path: str, content: str) -> Turn:
        return calls("Write", path=path, content=content)

    def runs(self, command: str) -> Turn:
        return calls("Bash", command=command)

    def structured(self, value: Any) -> tuple[Turn, ...]:
        return (Turn(text=json.dumps(value)),)


def calls(name: str, **input: Any) -> Turn:
    return Turn(calls=(Call(name=name, input=input),))


@pytest.fixture
def agent() -> Agent:
    vendor("kimi")
    return Kimi()


@pytest.mark.parametrize("name", of(Kimi))
async def test_kimi_holds(name: str, ground: Ground) -> None:
    await CASES[name](ground)


# What is its own ------------------------------------------------------------------------------------------------------


async def test_a_write_that_it_would_not_ask_about_is_asked_about(ground: Ground) -> None:
    """In a folder of git it approves writes by itself."""
    (ground.root / ".git").mkdir()
    turns = [ground.agent.writes("new.txt", "made\n"), Turn(text="done")]
    policy = PolicyProfile(disallowed_tools=("write_file",))
    seen = await ground.play(turns, policy=policy, mode="pass_through")
    assert not (ground.root / "new.txt").exists()
    assert "policy_denied" in str(seen.of(ToolResult)[0].output)
    assert not seen.of(FileChanged)


async def test_its_key_lies_in_no_file_and_its_commands_start_without_it(ground: Ground) -> None:
    """And files are found and searched."""
    looks = 'grep -r scripted-key-1 "$KIMI_CODE_HOME" /proc/self/environ'
    command = f'{looks}; test -z "$KIMI_API_KEY" && echo without > seen.txt'
    turns = [ground.agent.runs(command), calls("Glob", pattern="a*.txt"), calls("Grep", pattern="one")]
    seen = await ground.play([*turns, Turn(text="done")])
    assert "config.toml" not in seen.of(CommandExecuted)[0].output_preview
    assert "+without" in seen.patch
    assert ["a.txt" in str(event.output) for event in seen.of(ToolResult)[1:]] == [True, True]
