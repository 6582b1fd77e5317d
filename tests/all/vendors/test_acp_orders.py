"""Agents behind the host `acp` for real: what the host does by codex-acp, of the others what is their own."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from backplane.agents.rows import rows_of
from backplane.contract.events import CommandExecuted, Failed, RetryReported, ToolResult
from backplane.contract.work import PolicyProfile
from backplane.resources import find
from backplane.testing import Call, Fault, ScriptUsage, Turn
from tests.all.vendors.cases import CASES, FORK, KEY_HELD, MODEL, THOUGHT_ABOUT, caged, of
from tests.all.vendors.found import vendor
from tests.all.vendors.ground import Agent, Ground
from tests.all.vendors.test_codex import adds

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]


SHOWN = "a picture beside the task"
LARGE = "one megabyte of output"
MODELS = "model and environment"
FORBIDDEN = "policy stops a forbidden command"


class OpenCode(Agent):
    """How its model calls tools, and where its model is."""

    name = "opencode"
    host = "acp"
    conversations_in = "pass_through"
    write_tool = "write_file"
    alike: tuple[str, ...] = (
        "interrupt during a command, nothing left",
        "the turn is stopped, the conversation goes on",
        "resume of what is not kept",
        FORK,
        "structured output right",
        "structured output absent",
    )

    def __init__(self) -> None:
        self.env: dict[str, str] = {}
        self.patient: dict[str, Any] = {}
        self.labels = {**LABELS, LARGE: "cut: the agent shows its model whole lines, so nothing of a line of that size"}
        self.labels[SHOWN] = (
            "cut: where its own table of models has no `image` for one, the model is told that in words"
        )

    def options(self, url: str) -> dict[str, Any]:
        provider: dict[str, Any] = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{base_url}", "apiKey": "{env:SCRIPTED_KEY}"},
            "models": {"scripted-model": {"modalities": {"input": ["text", "image"], "output": ["text"]}}, MODEL: {}},
        }
        models = dict.fromkeys(("model", "small_model"), "scripted/scripted-model")
        # Of what it does by itself after each step, for its own window, nothing is looked at here.
        idle = dict.fromkeys(("snapshot", "lsp", "formatter"), False)
        content = {"provider": {"scripted": provider}, **models, **idle}
        env = {**row("opencode")["env"], "OPENCODE_CONFIG_CONTENT": json.dumps(content)}
        service = {"base_url": f"{url}/v1", "key_env": "SCRIPTED_KEY"}
        return {"profile": "opencode", "program": vendor("opencode"), "env": env, **service}

    def variables(self) -> dict[str, str]:
        return {"SCRIPTED_KEY": "scripted-key-1"}

    def model(self, name: str) -> str:
        return f"scripted/{name}"

    def writes(self, path: str, content: str) -> Turn:
        return Turn(calls=(Call(name="write", input={"filePath": path, "content": content}),))

    def runs(self, command: str) -> Turn:
        return Turn(calls=(Call(name="bash", input={"command": command, "description": "a step"}),))

    def structured(self, value: Any) -> tuple[Turn, ...]:
        return (Turn(text=json.dumps(value)),)


class CodexAcp(OpenCode):
    """The same of it; its model's address goes by arguments alone."""

    name = "codex-acp"
    ends_at_denial = True
    write_tool = "edit_file"
    conversations_in = "staged"
    alike = ()

    def __init__(self) -> None:
        super().__init__()
        self.labels = {
            **LABELS,
            FORK: "refused: the agent announces no fork",
            MODELS: "refused: the agent offers its own models alone",
        }

    def options(self, url: str) -> dict[str, Any]:
        service = {"name": "scripted", "base_url": "{base_url}", "env_key": "OPENAI_API_KEY", "request_max_retries": 1}
        settings = {f"model_providers.scripted.{key}": value for key, value in service.items()}
        settings |= {"model_provider": "scripted", "model": "gpt-5.5"}
        words = [word for key, value in settings.items() for word in ("-c", f"{key}={json.dumps(value)}")]
        return {"profile": "codex-acp", "program": vendor("codex-acp"), "arguments": words, "base_url": f"{url}/v1"}

    def variables(self) -> dict[str, str]:
        return {"OPENAI_API_KEY": "scripted-key-1"}

    def model(self, name: str) -> str:
        return name

    def writes(self, path: str, content: str) -> Turn:
        return adds(path, content)

    def runs(self, command: str) -> Turn:
        return Turn(calls=(Call(name="exec_command", input={"cmd": command}),))


class Qwen(OpenCode):
    """The same of it; it takes its model's address from its environment."""

    name = "qwen"
    ends_at_denial = True

    def __init__(self) -> None:
        super().__init__()
        self.labels[FORK] = "refused: the agent announces no fork"

    def options(self, url: str) -> dict[str, Any]:
        program = vendor("qwen")
        return {"profile": "qwen", "program": program, "base_url": f"{url}/v1", "model": "scripted-model"}

    def variables(self) -> dict[str, str]:
        return {"OPENAI_API_KEY": "scripted-key-1"}

    def writes(self, path: str, content: str) -> Turn:
        return Turn(calls=(Call(name="write_file", input={"file_path": path, "content": content}),))

    def runs(self, command: str) -> Turn:
        return Turn(calls=(Call(name="run_shell_command", input={"command": command, "description": "a step"}),))


SHAPED = {
    "structured output right": "emulated: the host checks the answer and asks again",
    "structured output absent": "emulated: the host checks the answer and asks again",
}
LABELS = {"more words during the work": "emulated: the host says them when the turn has ended", **SHAPED}
"""Of all agents behind this host: the protocol has no word for these."""
AGENTS = {agent.name: agent for agent in (OpenCode, CodexAcp, Qwen)}


def row(name: str) -> Any:
    return rows_of(str(find("hosts")))[name]


@pytest.fixture
def agent(name: str) -> Agent:
    vendor(name)
    return AGENTS[name]()


ORDERED = (
    "plain answer",
    "tool turn, patch right",
    FORBIDDEN,
    "interrupt during a command, nothing left",
    MODELS,
    LARGE,
    "policy stops a write outside",
    "commands held by the operating system",
    KEY_HELD,
    "the turn is stopped, the conversation goes on",
    "more words during the work",
    "resume of what is not kept",
    FORK,
    "structured output right",
    "structured output absent",
    SHOWN,
    "passthrough keeps every message",
)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *(("opencode", case) for case in of(OpenCode, ORDERED) if case not in (LARGE, SHOWN)),
        *(("codex-acp", case) for case in ORDERED if case not in (FORK, MODELS)),
        ("qwen", FORBIDDEN),
        ("qwen", "resume, usage of this run alone"),
    ],
)
async def test_an_agent_of_the_protocol_holds(name: str, case: str, ground: Ground) -> None:
    """Not here: opencode's large output, below, and its pictures, in `test_settings.py`."""
    await CASES[case](ground)


@pytest.mark.parametrize("name", ["codex-acp"])
async def test_an_agent_that_announces_no_fork_is_not_asked_for_one(ground: Ground) -> None:
    first = await ground.play([Turn(text="noted")], abp={"session": {"keep": True}})
    seen = await ground.play([Turn(text="x")], abp={"session": {"fork": first.session}})
    assert (seen.receipt.outcome, seen.end["code"]) == ("failed", "capability_unsupported")
    assert seen.server.requests == ()


@pytest.mark.parametrize("name", ["opencode"])
async def test_what_an_agent_cuts_of_a_large_output_is_told_as_its_model_has_it(ground: Ground) -> None:
    seen = await caged(ground)
    told = seen.of(ToolResult)[-1].output
    assert told.count("marmot") > 1000
    assert "output truncated" in told
    assert told == seen.server.requests[-1].body["messages"][-1]["content"]


@pytest.mark.parametrize("name", ["codex-acp"])
async def test_a_model_that_the_agent_does_not_have_is_not_exchanged_for_another(ground: Ground) -> None:
    seen = await ground.play([Turn(text="x")], model="scripted/of-nobody")
    assert (seen.receipt.outcome, seen.end["code"]) == ("failed", "backend_model_not_found")
    assert seen.server.requests == ()


@pytest.mark.parametrize("name", ["codex-acp"])
async def test_a_budget_holds_of_an_agent_that_tells_no_tokens(ground: Ground) -> None:
    used = ScriptUsage(input=100_000, output=0)
    again = msgspec.structs.replace(ground.agent.runs("echo again"), times=None, usage=used)
    prices = {"prices": {"input": 1, "output": 1}}
    seen = await ground.play([again], options=prices, key_proxy=True, max_budget_usd=0.25)
    assert (seen.receipt.outcome, seen.end["reason"], seen.end["code"]) == ("partial", "budget", "policy_denied")
    assert "0.3 USD spent of 0.25" in str(seen.run.error)
    assert len(seen.server.requests) == 3
    # Where nobody sees its service, the same is refused.
    alone = await ground.play([again], options=prices, max_budget_usd=0.25)
    assert (alone.receipt.outcome, alone.end["code"]) == ("failed", "capability_unsupported")
    assert alone.server.requests == ()


@pytest.mark.parametrize("name", ["codex-acp"])
async def test_a_command_that_the_agent_asks_nobody_about_is_on_record(ground: Ground) -> None:
    policy = PolicyProfile(disallowed_tools=("bash",))
    seen = await ground.play([ground.agent.runs("cat a.txt"), THOUGHT_ABOUT], policy=policy)
    assert [event.command for event in seen.of(CommandExecuted)] == ["cat a.txt"]
    assert seen.receipt.backplane["enforcement"]["violations"]


@pytest.mark.parametrize("name", ["opencode"])
async def test_a_conversation_that_stays_with_its_folder_is_not_kept_of_a_copy(ground: Ground) -> None:
    seen = await ground.play([Turn(text="x")], abp={"session": {"keep": True}})
    assert (seen.receipt.outcome, seen.end["code"]) == ("failed", "capability_unsupported")
    assert seen.server.requests == ()


@pytest.mark.parametrize("name", ["opencode"])
async def test_a_refused_key_has_its_code(ground: Ground) -> None:
    """By the words of the service: opencode tells no status."""
    fault = Fault(status=401, message="unauthorized: no such key")
    seen = await ground.play([Turn(text="x", times=None, fault=fault)])
    assert (seen.receipt.outcome, seen.codes[-1:]) == ("failed", ["backend_auth_failed"])


@pytest.mark.parametrize("name", ["opencode"])
async def test_a_model_that_always_fails_ends_the_run_with_its_words(ground: Ground) -> None:
    """The agent repeats that for ever by itself."""
    fault = Fault(status=500, message="the boiler is broken")
    seen = await ground.play([Turn(text="x", times=None, fault=fault)])
    assert (seen.receipt.outcome, seen.codes[-1:]) == ("failed", ["backend_unavailable"])
    assert "boiler is broken" in seen.of(Failed)[-1].message
    assert seen.of(RetryReported)
