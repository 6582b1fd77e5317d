"""What a person or a hook answers to an agent: questions in words, changed inputs, results changed or withheld."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backplane.contract.approval import Decision
from backplane.contract.events import Approval, CommandExecuted, ToolResult
from backplane.runtime.hook_calls import HookCall
from backplane.runtime.hooks import Hook
from backplane.testing import Call, Turn
from tests.all.vendors.cases import MODEL
from tests.all.vendors.ground import Agent, Ground, Seen, house, installed
from tests.all.vendors.test_claude import Claude
from tests.all.vendors.test_codex import Codex
from tests.all.vendors.test_copilot import Copilot
from tests.all.vendors.test_kimi import Kimi

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

AGENTS = {"claude": Claude, "codex": Codex, "copilot": Copilot, "kimi": Kimi}
OPTIONS = [{"label": "Red", "description": "r"}, {"label": "Blue", "description": "b"}]
ONE = {"header": "Colour", "question": "Which colour?", "options": OPTIONS}
QUESTIONS = {
    "claude": Call(name="AskUserQuestion", input={"questions": [{**ONE, "multiSelect": False}]}),
    "codex": Call(name="request_user_input", input={"questions": [{**ONE, "id": "colour"}]}),
    "copilot": Call(name="ask_user", input={"question": "Which colour?", "choices": ["Red", "Blue"]}),
    "kimi": Call(name="AskUserQuestion", input={"questions": [ONE]}),
}


@pytest.fixture
def agent(name: str) -> Agent:
    return installed(AGENTS[name])


def told(seen: Seen, back: int = 1) -> str:
    """What the model was told last."""
    body = seen.server.requests[-back].body
    return json.dumps((body.get("messages") or body["input"])[-1])


@pytest.mark.parametrize("name", AGENTS)
async def test_a_question_to_a_person_is_an_ask_or_left_to_the_model(name: str, ground: Ground) -> None:
    answers = iter((Decision(decision="allow", text="Blue"), Decision(decision="deny")))

    async def answer(ask: Approval) -> Decision:
        return next(answers)

    question = Turn(calls=(QUESTIONS[name],))
    seen = await ground.play([question, question, Turn(text="thanks")], on_ask=answer)
    assert [event.body.get("question") for event in seen.of(Approval)].count("Which colour?") == 2
    assert ["Blue" in told(seen, 2), "decide by yourself" in told(seen)] == [True, True]
    assert seen.receipt.outcome == "complete"


@pytest.mark.parametrize("name", ["copilot"])
async def test_the_model_is_shown_what_a_hook_makes_of_a_result(name: str, ground: Ground) -> None:
    def answer(call: HookCall) -> Decision:
        return Decision(decision="modify", text=str(call.output).replace("walrus", "***"))

    turns = [ground.agent.runs("echo the walrus; exit 3"), Turn(text="done")]
    seen = await ground.play(turns, hooks=(Hook("post_tool", answer),))
    assert ("the ***" in told(seen), "walrus" in told(seen)) == (True, False)
    assert "walrus" not in str(seen.of(ToolResult))
    ran = seen.of(CommandExecuted)[0]
    assert (ran.exit_code, "the ***" in ran.output_preview, "walrus" in ran.output_preview) == (3, True, False)


@pytest.mark.parametrize("name", ["copilot"])
async def test_a_result_that_a_hook_withholds_is_not_shown(name: str, ground: Ground) -> None:
    def answer(call: HookCall) -> Decision:
        return Decision(decision="deny", reason="not for you")

    turns = [ground.agent.runs("echo walrus"), ground.agent.writes("b.txt", "b\n"), Turn(text="done")]
    seen = await ground.play(turns, hooks=(Hook("post_tool", answer),))
    assert all("not for you" in told(seen, back) for back in (1, 2))
    assert [event.is_error for event in seen.of(ToolResult)] == [True, True]
    assert "walrus" not in "".join(event.output_preview for event in seen.of(CommandExecuted))
    assert "b.txt" in seen.patch


@pytest.mark.parametrize("name", ["copilot"])
async def test_a_servers_tool_gets_its_changed_input(name: str, ground: Ground) -> None:
    def answer(call: HookCall) -> Decision:
        return Decision(decision="modify", input={"of": "badger"})

    turns = [ground.agent.calls("house", "word"), Turn(text="done")]
    more: dict[str, Any] = {"abp": {"mcp_servers": [house("walrus")]}, "model": MODEL}
    seen = await ground.play(turns, hooks=(Hook("pre_tool", answer, ("mcp__*",)),), **more)
    assert (seen.receipt.outcome, "badger" in told(seen)) == ("complete", True)


@pytest.mark.parametrize("name", ["codex"])
async def test_a_hook_after_a_tool_is_refused_where_no_result_can_be_changed(name: str, ground: Ground) -> None:
    def answer(call: HookCall) -> Decision:
        return Decision(decision="allow")

    seen = await ground.play([Turn(text="done")], hooks=(Hook("post_tool", answer),))
    assert (seen.receipt.outcome, seen.end["code"]) == ("failed", "capability_unsupported")
    assert not seen.server.requests
