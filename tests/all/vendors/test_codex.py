"""Codex for real, through every case that driven agents share, and what is its own."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from backplane.agents.codex.agent import SERVERS_S
from backplane.contract.approval import Decision
from backplane.contract.events import Approval, ToolCall, ToolResult, Warned
from backplane.contract.work import PolicyProfile
from backplane.runtime.hooks import Hook
from backplane.testing import Call, Turn
from tests.all.vendors.cases import ALIVE, CASES, CHANGED, IN_WORDS, LOOP, MODEL, TEXT_STOPPED, UNANSWERED, of
from tests.all.vendors.found import vendor
from tests.all.vendors.ground import Agent, Ground, Seen, house

pytestmark = pytest.mark.anyio


SHAPED = "emulated: the host checks the answer and asks again"


class Codex(Agent):
    """How its model calls tools, and how its retries are capped."""

    name = host = "codex"
    conversations_in = "staged"
    write_tool = "write_file"
    alike = (UNANSWERED, TEXT_STOPPED, ALIVE, LOOP)

    def __init__(self) -> None:
        self.env: dict[str, str] = {}
        self.patient = {"options": {"retries": 10}}
        shape = dict.fromkeys((f"structured output {what}" for what in ("right", "wrong", "absent")), SHAPED)
        self.labels = {
            CHANGED: "refused: the agent takes no other input than its own, so the call does not run",
            "max turns": "emulated: the host counts answers and stops the turn",
            **shape,
            **IN_WORDS,
        }

    def options(self, url: str) -> dict[str, Any]:
        return {"program": vendor("codex"), "base_url": f"{url}/v1", "retries": 1, "model": "gpt-5.5"}

    def variables(self) -> dict[str, str]:
        return {"OPENAI_API_KEY": "scripted-key-1"}

    def writes(self, path: str, content: str) -> Turn:
        return adds(path, content)

    def runs(self, command: str) -> Turn:
        return Turn(calls=(Call(name="exec_command", input={"cmd": command}),))

    def calls(self, server: str, tool: str, **input: Any) -> Turn:
        return asks(tool, input, namespace=f"mcp__{server}")

    def structured(self, value: Any) -> tuple[Turn, ...]:
        return (Turn(text=json.dumps(value)),)


def adds(path: str, content: str) -> Turn:
    """A patch that adds a file, as the models of this family write it."""
    lines = "".join(f"+{line}\n" for line in content.splitlines())
    patch = f"*** Begin Patch\n*** Add File: {path}\n{lines}*** End Patch\n"
    return Turn(calls=(Call(name="apply_patch", input=patch, kind="custom"),))


@pytest.fixture
def agent() -> Agent:
    vendor("codex")
    return Codex()


@pytest.mark.parametrize("name", of(Codex))
async def test_codex_holds(name: str, ground: Ground) -> None:
    await CASES[name](ground)


# What is its own ------------------------------------------------------------------------------------------------------


def last_result(seen: Seen) -> str:
    """What the model was told last."""
    return json.dumps(seen.server.requests[-1].body["input"][-1])


def asks(name: str, input: Any, **more: Any) -> Turn:
    return Turn(calls=(Call(name=name, input=input, **more),))


async def test_a_changed_patch_is_not_made_at_all(ground: Ground) -> None:
    async def answer(ask: Approval) -> Decision:
        return Decision(decision="modify", input={"changes": []})

    turns = [ground.agent.writes("first.txt", "1\n"), Turn(text="done")]
    seen = await ground.play(turns, on_ask=answer, policy=PolicyProfile(require_approval_for=("write_file",)))
    assert seen.patch == ""
    assert "takes no other input" in str(seen.of(ToolResult)[0].output)


async def test_a_hook_after_tools_is_refused(ground: Ground) -> None:
    seen = await ground.play([Turn(text="x")], hooks=(Hook("post_tool", ["true"]),))
    assert (seen.receipt.outcome, seen.end["code"]) == ("failed", "capability_unsupported")
    assert seen.server.requests == ()


async def test_a_hook_before_tools_stops_a_command_that_the_agent_holds_for_harmless(ground: Ground) -> None:
    (ground.root / "deep").mkdir()
    hook = Hook("pre_tool", lambda call: Decision("deny", "not this one"))
    call = {"cmd": "cat ../a.txt", "workdir": "deep"}
    seen = await ground.play([asks("exec_command", call), Turn(text="done")], hooks=(hook,))
    assert [event.input["command"] for event in seen.of(ToolCall)] == ["cat ../a.txt"]
    assert [(event.is_error, "not this one" in str(event.output)) for event in seen.of(ToolResult)] == [(True, True)]
    assert "not this one" in last_result(seen)
    assert seen.receipt.usage_raw["backplane"]["calls"]["denied"] == 1


async def test_hooks_of_the_workspace_get_no_trust_beside_ours(ground: Ground) -> None:
    theirs = {"hooks": [{"type": "command", "command": "touch theirs.txt"}]}
    (ground.root / ".codex").mkdir()
    (ground.root / ".codex" / "hooks.json").write_text(
        json.dumps({"hooks": {"PreToolUse": [theirs], "SessionStart": [theirs]}})
    )
    seen = await ground.play(
        [ground.agent.runs("true"), Turn(text="done")], hooks=(Hook("pre_tool", lambda call: None),)
    )
    assert seen.receipt.outcome == "complete"
    assert "theirs.txt" not in seen.patch


async def test_a_rule_may_name_the_agents_own_word_for_a_tool(ground: Ground) -> None:
    turns = [ground.agent.runs("touch one.txt"), ground.agent.writes("two.txt", "2\n"), Turn(text="done")]
    seen = await ground.play(turns, policy=PolicyProfile(disallowed_tools=("exec_command", "apply_patch")))
    assert seen.patch == ""
    assert [event.is_error for event in seen.of(ToolResult)] == [True, True]


async def test_a_file_that_a_command_plainly_reads_is_held_to_the_policy(ground: Ground) -> None:
    (ground.root / "key.pem").write_text("no model's affair\n")
    turns = [ground.agent.runs("cat key.pem"), Turn(text="done")]
    seen = await ground.play(turns, policy=PolicyProfile(deny_read=("**/*.pem",)))
    assert "affair" not in last_result(seen)
    assert seen.of(ToolResult)[0].is_error


async def test_the_users_profile_and_the_workspaces_settings_are_not_run(ground: Ground) -> None:
    (ground.root / "AGENTS.md").write_text("the house word is walrus\n")
    folder = ground.root / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text('model_provider = "elsewhere"\nmodel = "other"\n')
    seen = await ground.play([ground.agent.runs("shopt -q login_shell || echo plain"), Turn(text="done")])
    assert "the house word is walrus" in json.dumps(seen.server.requests[0].body)
    assert seen.of(ToolResult)[0].output == "plain\n"
    assert seen.receipt.outcome == "complete"


async def test_the_first_turn_waits_for_a_slow_server_of_tools(ground: Ground) -> None:
    row = house("walrus")
    slow = ["-c", 'sleep 3; exec "$0" "$@"', row["command"], *row["args"]]
    turns = [ground.agent.calls("house", "word"), Turn(text="done")]
    seen = await ground.play(turns, abp={"mcp_servers": [{**row, "command": "sh", "args": slow}]}, model=MODEL)
    assert "walrus" in str(seen.of(ToolResult)[0].output)


async def test_a_server_of_tools_that_is_not_there_is_not_waited_for(ground: Ground) -> None:
    began_s = time.monotonic()
    row = {"name": "house", "command": "false"}
    seen = await ground.play([Turn(text="done")], abp={"mcp_servers": [row]}, model=MODEL)
    assert seen.receipt.outcome == "complete"
    assert time.monotonic() - began_s < SERVERS_S


async def test_no_run_warns_of_what_a_user_need_not_know(ground: Ground) -> None:
    runs: list[Seen] = []
    for wish in ("keep", "resume", "fork"):
        session = {wish: runs[0].session if runs else True}
        runs.append(await ground.play([Turn(text="done")], abp={"session": session}, env={"PATH": str(ground.root)}))
    warned = [event.message for seen in runs for event in seen.of(Warned) if type(event) is Warned]
    assert warned == []
    assert [seen.receipt.outcome for seen in runs] == ["complete"] * 3


async def test_a_budget_for_a_model_without_a_price_is_refused(ground: Ground) -> None:
    seen = await ground.play([Turn(text="x")], max_budget_usd=1.0, model=MODEL)
    assert (seen.receipt.outcome, seen.end["code"]) == ("failed", "config_invalid")
    assert seen.server.requests == ()


async def test_a_stream_without_an_answer_is_a_failure_though_the_agent_calls_it_done(ground: Ground) -> None:
    seen = await ground.play([Turn(text="")])
    assert (seen.receipt.outcome, seen.codes[-1:]) == ("failed", ["backend_unavailable"])


async def test_its_commands_are_started_without_the_key(ground: Ground) -> None:
    assert "OPENAI_API_KEY" in ground.agent.variables()
    command = 'test -z "$OPENAI_API_KEY" && echo without > seen.txt'
    seen = await ground.play([ground.agent.runs(command), Turn(text="done")])
    assert "+without" in seen.patch
