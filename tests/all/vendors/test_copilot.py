"""Copilot CLI for real, through every case that driven agents share, and what is its own."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from backplane.contract.approval import Decision
from backplane.contract.events import ToolResult
from backplane.runtime.hook_calls import HookCall
from backplane.runtime.hooks import Hook
from backplane.testing import Call, Turn
from tests.all.vendors.cases import (
    ABSENT,
    ALIVE,
    ALL_CUT,
    CASES,
    CLOCK,
    FAILING,
    LOOP,
    RIGHT,
    UNANSWERED,
    WRONG,
    of,
)
from tests.all.vendors.found import vendor
from tests.all.vendors.ground import Agent, Ground

pytestmark = pytest.mark.anyio

CACHE = Path(tempfile.gettempdir(), f"copilot-cache-{os.getuid()}")
"""It unpacks 235 MB at its first start."""
SHAPED = "emulated: the host checks the answer and asks again"


class Copilot(Agent):
    """How its model calls tools; nothing caps its retries."""

    name = host = "copilot"
    conversations_in = "staged"
    write_tool = "write_file"
    alike = (UNANSWERED, LOOP, CLOCK, ALIVE, ALL_CUT, RIGHT, WRONG, ABSENT, *FAILING)
    writable = (str(CACHE),)
    shown_chars_min = 100

    def __init__(self) -> None:
        self.env: dict[str, str] = {}
        self.patient: dict[str, Any] = {}
        shape = dict.fromkeys((f"structured output {what}" for what in ("right", "wrong", "absent")), SHAPED)
        self.labels = {"max turns": "emulated: the host counts answers and stops the turn", **shape}
        self.labels["one megabyte of output"] = "cut: its model is told of a file that has all of it"

    def options(self, url: str) -> dict[str, Any]:
        return {"program": vendor("copilot"), "base_url": f"{url}/v1", "model": "scripted-model"}

    def variables(self) -> dict[str, str]:
        CACHE.mkdir(exist_ok=True)
        return {"COPILOT_PROVIDER_API_KEY": "scripted-key-1", "COPILOT_CACHE_HOME": str(CACHE)}

    def writes(self, path: str, content: str) -> Turn:
        return Turn(calls=(Call(name="create", input={"path": path, "file_text": content}),))

    def runs(self, command: str) -> Turn:
        return Turn(calls=(Call(name="bash", input={"command": command, "description": "a step"}),))

    def calls(self, server: str, tool: str, **input: Any) -> Turn:
        return calls(f"{server}-{tool}", **input)

    def structured(self, value: Any) -> tuple[Turn, ...]:
        return (Turn(text=json.dumps(value)),)


@pytest.fixture
def agent() -> Agent:
    vendor("copilot")
    return Copilot()


@pytest.mark.parametrize("name", of(Copilot))
async def test_copilot_holds(name: str, ground: Ground) -> None:
    await CASES[name](ground)


# What is its own ------------------------------------------------------------------------------------------------------


def calls(name: str, **input: Any) -> Turn:
    return Turn(calls=(Call(name=name, input=input),))


async def test_a_failed_call_is_seen_by_a_hook_too(ground: Ground) -> None:
    seen_by_hook: list[str] = []

    def answer(call: HookCall) -> Decision:
        seen_by_hook.append(str(call.output))
        return Decision(decision="allow")

    turns = [calls("view", path=str(ground.root / "missing.txt")), Turn(text="done")]
    seen = await ground.play(turns, hooks=(Hook("post_tool", answer),), mode="pass_through")
    assert seen.receipt.outcome == "complete"
    assert seen.of(ToolResult)[0].is_error
    assert len(seen_by_hook) == 1


@pytest.mark.parametrize(
    ("path", "options"),
    [("", {"provider": "anthropic"}), ("/v1", {"wire_api": "responses"})],
    ids=["anthropic", "responses"],
)
async def test_a_service_of_another_protocol_answers_too(
    path: str, options: dict[str, str], ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = type(ground.agent).options

    def elsewhere(agent: Agent, url: str) -> dict[str, Any]:
        return {**plain(agent, url), **options, "base_url": f"{url}{path}"}

    monkeypatch.setattr(type(ground.agent), "options", elsewhere)
    seen = await ground.play([ground.agent.runs("echo two >> a.txt"), Turn(text="done")])
    assert (seen.receipt.outcome, seen.words) == ("complete", "done")
    assert "+two" in seen.patch


async def test_a_service_of_ones_own_wants_a_model(ground: Ground) -> None:
    seen = await ground.play([], options={"model": None})
    assert (seen.receipt.outcome, seen.end["code"]) == ("failed", "config_invalid")
    assert "name it in the order" in str(seen.run.error)


async def test_hooks_of_the_workspace_run_nothing(ground: Ground) -> None:
    folder = ground.root / ".github" / "hooks"
    folder.mkdir(parents=True)
    step = {"type": "command", "bash": f"touch {ground.root.parent}/ran", "timeoutSec": 5}
    (folder / "hooks.json").write_text(json.dumps({"version": 1, "hooks": {"sessionStart": [step]}}))
    seen = await ground.play([Turn(text="done")])
    assert seen.receipt.outcome == "complete"
    assert not (ground.root.parent / "ran").exists()
