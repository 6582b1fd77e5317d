"""Claude Code for real, through every case that driven agents share, and what is its own."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import pytest

import backplane
from backplane.contract.events import CommandExecuted, TaskReported, ToolCall, ToolResult, Warned
from backplane.contract.work import PolicyProfile
from backplane.testing import Call, Fault, Turn, When
from tests.all.vendors.cases import CASES, SCHEMA
from tests.all.vendors.found import vendor
from tests.all.vendors.ground import Agent, Ground, Seen, house

pytestmark = pytest.mark.anyio


class Claude(Agent):
    """How its model calls tools, and how its retries are capped."""

    name = host = "claude"
    conversations_in = "staged"
    write_tool = "write_file"

    def __init__(self) -> None:
        self.env = {"CLAUDE_CODE_MAX_RETRIES": "1"}
        self.patient = {"env": {"CLAUDE_CODE_MAX_RETRIES": "10"}}
        self.labels: dict[str, str] = {}

    def options(self, url: str) -> dict[str, Any]:
        return {"program": vendor("claude"), "base_url": url}

    def variables(self) -> dict[str, str]:
        return {"ANTHROPIC_API_KEY": "scripted-key-1"}

    def writes(self, path: str, content: str) -> Turn:
        return Turn(calls=(Call(name="Write", input={"file_path": path, "content": content}),))

    def runs(self, command: str) -> Turn:
        return Turn(calls=(Call(name="Bash", input={"command": command, "description": "a step"}),))

    def structured(self, value: Any) -> tuple[Turn, ...]:
        return (Turn(calls=(Call(name="StructuredOutput", input=value),)), Turn(text="done"))


@pytest.fixture
def agent() -> Agent:
    vendor("claude")
    return Claude()


@pytest.mark.parametrize("name", CASES)
async def test_claude_code_holds(name: str, ground: Ground) -> None:
    await CASES[name](ground)


# What is its own ------------------------------------------------------------------------------------------------------


def last_result(seen: Seen) -> str:
    """What the model was told last."""
    return json.dumps(seen.server.requests[-1].body["messages"][-1])


def shown(ground: Ground, event: dict[str, Any]) -> list[dict[str, Any]]:
    """A hook after tools that answers with this."""
    script = ground.root.parent / "hook.py"
    script.write_text(f"import json, sys\njson.load(sys.stdin)\nprint({json.dumps(json.dumps(event))})\n")
    return [{"event": "post_tool", "command": [sys.executable, str(script)], "name": "look"}]


async def test_a_hook_changes_what_the_model_is_shown(ground: Ground) -> None:
    hooks = shown(ground, {"decision": "modify", "text": "nothing to see"})
    turns = [ground.agent.runs("cat a.txt"), Turn(text="done")]
    seen = await ground.play(turns, abp={"hooks": hooks})
    assert "nothing to see" in last_result(seen)
    assert "one" not in json.dumps(seen.server.requests[-1].body["messages"][-1])
    assert seen.of(ToolResult)[-1].output == "nothing to see"


async def test_a_result_that_a_hook_withholds_is_an_error_and_ends_nothing(ground: Ground) -> None:
    (ground.root / "notes.txt").write_text("walrus\n")
    calls = {
        "Bash": {"command": "cat notes.txt"},
        "Read": {"file_path": str(ground.root / "notes.txt")},
        "Grep": {"pattern": "wal.us", "output_mode": "content"},
        "Glob": {"pattern": "*.txt"},
        "mcp__house__word": {},
    }
    turns = [*(Turn(calls=(Call(name=name, input=input),)) for name, input in calls.items()), Turn(text="done")]
    hooks = shown(ground, {"decision": "deny", "reason": "not for models"})
    seen = await ground.play(turns, abp={"hooks": hooks, "mcp_servers": [house("walrus")]}, mode="pass_through")
    assert (seen.receipt.outcome, seen.words) == ("complete", "done")
    told = {(event.is_error, event.output) for event in seen.of(ToolResult)}
    assert told == {(True, "policy_denied: hook 'look': not for models")}
    assert len(seen.of(ToolResult)) == len(calls)
    assert [event.exit_code for event in seen.of(CommandExecuted)] == [0]
    asked = json.dumps(seen.server.requests[-1].body["messages"])
    assert asked.count("not for models") == len(calls)
    assert "walrus" not in asked


async def test_a_result_that_cannot_be_changed_ends_the_run_unseen(ground: Ground) -> None:
    hooks = shown(ground, {"decision": "deny", "reason": "not for models"})
    turns = [ground.agent.runs("echo secret-word; exit 3"), Turn(text="never asked")]
    seen = await ground.play(turns, abp={"hooks": hooks})
    assert (seen.receipt.outcome, seen.codes[-1:]) == ("failed", ["policy_denied"])
    assert "secret-word" not in seen.of(ToolResult)[-1].output
    assert len(seen.server.requests) == 1


async def test_the_workspaces_memory_is_read_and_its_settings_are_not(ground: Ground) -> None:
    (ground.root / "CLAUDE.md").write_text("the house word is walrus\n")
    folder = ground.root / ".claude"
    folder.mkdir()
    hook = {"type": "command", "command": "touch ran-unasked.txt"}
    settings = {"hooks": {"PreToolUse": [{"hooks": [hook]}]}, "env": {"ANTHROPIC_BASE_URL": "http://127.0.0.1:9"}}
    (folder / "settings.json").write_text(json.dumps(settings))
    seen = await ground.play([ground.agent.runs("echo again"), Turn(text="done")])
    assert seen.receipt.outcome == "complete"
    assert "the house word is walrus" in json.dumps(seen.server.requests[0].body)
    assert seen.patch == ""


async def test_a_sub_agents_words_are_a_tasks_and_its_tools_have_a_parent(ground: Ground) -> None:
    task = {"description": "part", "prompt": "the smaller part", "subagent_type": "general-purpose"}
    turns = [
        msgspec.structs.replace(ground.agent.runs("echo marmot"), when=When(last="the smaller part")),
        Turn(text="part is done", when=When(last="marmot")),
        Turn(calls=(Call(name="Task", input=task),)),
        Turn(text="waiting"),
        Turn(text="all is done"),
    ]
    seen = await ground.play(turns)
    parents = {event.tool_name: event.parent_tool_use_id for event in seen.of(ToolCall)}
    assert parents["Task"] is None
    assert parents["bash"] is not None
    assert "part is done" in [event.body.get("text") for event in seen.of(TaskReported)]
    assert (seen.receipt.outcome, seen.words) == ("complete", "all is done")
    assert seen.receipt.usage.input_tokens == 20 * len(seen.server.requests)


async def test_the_end_of_a_sub_agent_is_observed_by_hooks(ground: Ground) -> None:
    task = {"description": "part", "prompt": "the smaller part", "subagent_type": "general-purpose"}
    turns = [
        Turn(text="part is done", when=When(last="the smaller part")),
        Turn(calls=(Call(name="Task", input=task),)),
        Turn(text="waiting"),
        Turn(text="all is done"),
    ]
    calls: list[backplane.HookCall] = []
    seen = await ground.play(turns, hooks=[backplane.Hook("subagent_end", calls.append, name="eye")])
    assert (seen.receipt.outcome, seen.words) == ("complete", "all is done")
    ((event, told),) = [(call.event, call.input) for call in calls]
    assert event == "subagent_end"
    assert isinstance(told, dict)
    assert told["agent_type"] == "general-purpose"
    assert told["agent_id"]


async def test_an_answer_of_the_wrong_shape_is_asked_for_again(ground: Ground) -> None:
    # In words twice: the program asks by itself once more, and takes the words then.
    turns = [Turn(text="in words", times=2), *ground.agent.structured({"n": 7})]
    seen = await ground.play(turns, abp={"output_schema": SCHEMA})
    assert seen.receipt.outcome == "complete"
    assert seen.receipt.usage_raw["structured_output"] == {"n": 7}
    assert any("repair 1" in event.message for event in seen.of(Warned))


async def test_a_refused_key_is_told_at_once_though_the_agent_would_ask_again(ground: Ground) -> None:
    turn = Turn(times=None, fault=Fault(status=401, message="no such key"))
    seen = await ground.play([turn], **ground.agent.patient)
    assert (seen.receipt.outcome, seen.codes[-1:]) == ("failed", ["backend_auth_failed"])
    assert len(seen.server.requests) < 4


async def test_a_command_that_a_check_of_the_agent_refuses_is_reported_as_denied(ground: Ground) -> None:
    (ground.root / ".env").write_text("KEY=walrus\n")
    turns = [ground.agent.runs("cat .env"), Turn(text="done")]
    seen = await ground.play(turns, policy=PolicyProfile(deny_read=("**/.env",)))
    assert [str(event.output).partition(":")[0] for event in seen.of(ToolResult)] == ["policy_denied"]
    assert not seen.of(CommandExecuted)
    assert "walrus" not in last_result(seen)


async def test_a_limit_of_nothing_ends_the_run_before_the_program_starts(ground: Ground) -> None:
    for limit in ({"max_budget_usd": 0.0}, {"max_turns": 0}):
        seen = await ground.play([Turn(text="never heard")], **limit)
        assert (seen.receipt.outcome, seen.server.requests) == ("partial", ())
