"""Gemini CLI for real, through every case that driven agents share, and what is its own."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from backplane.contract.events import CommandExecuted, ToolResult
from backplane.contract.work import PolicyProfile
from backplane.testing import Call, ScriptUsage, Turn
from tests.all.vendors.cases import (
    ABSENT,
    ALIVE,
    ALL_CUT,
    CASES,
    CHANGED,
    CLOCK,
    FAILING,
    IN_WORDS,
    LOOP,
    RIGHT,
    TEXT_STOPPED,
    UNANSWERED,
    WRONG,
    of,
)
from tests.all.vendors.found import vendor
from tests.all.vendors.ground import Agent, Ground
from tests.all.vendors.test_acp_orders import LABELS

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]


class Gemini(Agent):
    """How its model calls tools, and where its model is."""

    name = host = "gemini"
    conversations_in = "staged"
    write_tool = "write_file"
    alike = (UNANSWERED, TEXT_STOPPED, CLOCK, ALIVE, LOOP, ALL_CUT, RIGHT, WRONG, ABSENT, *FAILING)

    def __init__(self) -> None:
        self.env: dict[str, str] = {}
        self.patient: dict[str, Any] = {}
        self.labels = {
            **LABELS,
            **IN_WORDS,
            CHANGED: "refused: the protocol has no word for a changed input, so the call does not run",
            "max turns": "emulated: the host counts requests in the agent's record and stops the turn",
            "policy stops a write outside": "emulated: the agent refuses it before it asks anybody",
            "a loop of tool calls without end": "cut: the agent sees a loop after some calls and stops, partial",
            "an answer that broke after its words is taken back": "cut: a failure told in a stream ends it, partial",
        }

    def options(self, url: str) -> dict[str, Any]:
        return {"program": vendor("gemini"), "base_url": url}

    def variables(self) -> dict[str, str]:
        return {"GEMINI_API_KEY": "scripted-key-1"}

    def writes(self, path: str, content: str) -> Turn:
        return Turn(calls=(Call(name="write_file", input={"file_path": path, "content": content}),))

    def runs(self, command: str) -> Turn:
        call = Call(name="run_shell_command", input={"command": command, "description": "a step"})
        return Turn(calls=(call,))

    def calls(self, server: str, tool: str, **input: Any) -> Turn:
        return calls(f"mcp_{server}_{tool}", **input)

    def structured(self, value: Any) -> tuple[Turn, ...]:
        return (Turn(text=json.dumps(value)),)


@pytest.fixture
def agent() -> Agent:
    vendor("gemini")
    return Gemini()


@pytest.mark.parametrize("name", of(Gemini))
async def test_gemini_holds(name: str, ground: Ground) -> None:
    await CASES[name](ground)


# What is its own ------------------------------------------------------------------------------------------------------


def calls(name: str, **input: Any) -> Turn:
    return Turn(calls=(Call(name=name, input=input),))


async def test_a_command_that_it_holds_for_harmless_is_asked_about(ground: Ground) -> None:
    policy = PolicyProfile(disallowed_tools=("bash",))
    seen = await ground.play([ground.agent.runs("cat a.txt"), Turn(text="done")], policy=policy)
    assert not seen.of(CommandExecuted)
    assert "violations" not in seen.receipt.backplane["enforcement"]


async def test_a_file_that_the_policy_hides_is_not_read(ground: Ground) -> None:
    (ground.root / "secret.pem").write_text("walrus")
    turns = [calls("read_file", file_path=str(ground.root / "secret.pem")), Turn(text="done")]
    seen = await ground.play(turns, policy=PolicyProfile(deny_read=("**/*.pem",)), mode="pass_through")
    assert "policy_denied" in str(seen.of(ToolResult)[0].output)
    assert "walrus" not in json.dumps(seen.server.requests[-1].body)


async def test_thoughts_and_cached_tokens_are_counted_and_a_budget_holds(ground: Ground) -> None:
    usage = ScriptUsage(input=100_000, output=20_000, cache_read=40_000)
    again = msgspec.structs.replace(ground.agent.runs("echo again"), times=None, usage=usage)
    seen = await ground.play([again], max_budget_usd=1.0, options={"prices": {"input": 5, "output": 30}})
    assert (seen.receipt.outcome, seen.end["reason"], seen.end["code"]) == ("partial", "budget", "policy_denied")
    assert len(seen.server.requests) == seen.receipt.usage.request_units
    assert seen.receipt.usage.cache_read_tokens == 40_000 * seen.receipt.usage.request_units
