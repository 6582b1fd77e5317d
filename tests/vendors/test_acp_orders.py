"""Agents behind the host `acp` for real, through the shared cases that are about what an order can say."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backplane.share import find
from backplane.testing import Call, Turn, Usage
from tests.vendors.cases import CASES
from tests.vendors.found import vendor
from tests.vendors.ground import Ground

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(180)]


FORK = "fork leaves the first as it was"


class OpenCode:
    """How its model calls tools, and where its model is."""

    name = "opencode"
    host = "acp"
    conversations_in = "pass_through"
    write_tool = "write"

    def __init__(self) -> None:
        self.env: dict[str, str] = {}
        self.patient: dict[str, Any] = {}
        self.labels = dict(LABELS)

    def options(self, url: str) -> dict[str, Any]:
        service: dict[str, Any] = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{url}/v1", "apiKey": "scripted-key-1"},
            "models": {"scripted-model": {}},
        }
        models = dict.fromkeys(("model", "small_model"), "scripted/scripted-model")
        content = {"provider": {"scripted": service}, **models}
        env = {**row("opencode")["env"], "OPENCODE_CONFIG_CONTENT": json.dumps(content)}
        return {"profile": "opencode", "program": vendor("opencode"), "env": env}

    def variables(self) -> dict[str, str]:
        return {}

    def writes(self, path: str, content: str) -> Turn:
        return Turn(calls=(Call(name="write", input={"filePath": path, "content": content}),))

    def runs(self, command: str) -> Turn:
        return Turn(calls=(Call(name="bash", input={"command": command, "description": "a step"}),))

    def structured(self, value: Any) -> tuple[Turn, ...]:
        return (Turn(text=json.dumps(value)),)


class CodexAcp(OpenCode):
    """The same of it; its model's address goes by arguments alone."""

    name = "codex-acp"
    conversations_in = "staged"

    def __init__(self) -> None:
        super().__init__()
        self.labels[FORK] = "refused: the agent announces no fork"

    def options(self, url: str) -> dict[str, Any]:
        service = {"name": "scripted", "base_url": f"{url}/v1", "env_key": "OPENAI_API_KEY", "request_max_retries": 1}
        settings = {f"model_providers.scripted.{key}": value for key, value in service.items()}
        settings |= {"model_provider": "scripted", "model": "gpt-5.5"}
        words = [word for key, value in settings.items() for word in ("-c", f"{key}={json.dumps(value)}")]
        return {"profile": "codex-acp", "program": vendor("codex-acp"), "arguments": words}

    def variables(self) -> dict[str, str]:
        return {"OPENAI_API_KEY": "scripted-key-1"}

    def runs(self, command: str) -> Turn:
        return Turn(calls=(Call(name="exec_command", input={"cmd": command}),))


class Qwen(OpenCode):
    """The same of it; it takes its model's address from its environment."""

    name = "qwen"

    def options(self, url: str) -> dict[str, Any]:
        model = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "scripted-key-1", "OPENAI_MODEL": "scripted-model"}
        return {"profile": "qwen", "program": vendor("qwen"), "env": {**row("qwen")["env"], **model}}

    def runs(self, command: str) -> Turn:
        return Turn(calls=(Call(name="run_shell_command", input={"command": command, "description": "a step"}),))


LABELS = {
    "more words during the work": "emulated: the host says them when the turn has ended",
    "structured output right": "emulated: the host checks the answer and asks again",
    "structured output absent": "emulated: the host checks the answer and asks again",
}
"""Of all agents behind this host: the protocol has no word for these."""
AGENTS = {agent.name: agent for agent in (OpenCode, CodexAcp, Qwen)}


def row(name: str) -> Any:
    return tomllib.loads((find("hosts") / "acp.toml").read_text(encoding="utf-8"))[name]


@pytest.fixture
def anyio_backend() -> str:
    """Each case starts a program of up to 600 MB: once is enough, the host's own side is tested on both loops."""
    return "asyncio"


@pytest.fixture
def ground(name: str, tmp_path: Path) -> Ground:
    agent = AGENTS[name]()
    agent.options("")
    root = tmp_path / "work"
    root.mkdir()
    (root / "a.txt").write_text("one\n")
    return Ground(agent, root)


ORDERED = (
    "the turn is stopped, the conversation goes on",
    "more words during the work",
    "resume of what is not kept",
    FORK,
    "structured output right",
    "structured output absent",
    "passthrough keeps every message",
)
"""Answers, tools, denials, a cancel and failures are in `test_acp_agents.py`, with other agents of this kind."""


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *(("opencode", case) for case in ORDERED),
        *(("codex-acp", case) for case in ORDERED if case != FORK),
        ("qwen", "resume, usage of this run alone"),
    ],
)
async def test_an_agent_of_the_protocol_holds(name: str, case: str, ground: Ground) -> None:
    await CASES[case](ground)


@pytest.mark.parametrize("name", ["codex-acp"])
async def test_an_agent_that_announces_no_fork_is_not_asked_for_one(ground: Ground) -> None:
    first = await ground.play([Turn(text="noted")], abp={"session": {"keep": True}})
    seen = await ground.play([Turn(text="x")], abp={"session": {"fork": first.session}})
    assert (seen.receipt.outcome, seen.end["code"]) == ("failed", "capability_unsupported")
    assert seen.server.requests == ()


@pytest.mark.parametrize("name", ["opencode"])
async def test_a_conversation_that_stays_with_its_folder_is_not_kept_of_a_copy(ground: Ground) -> None:
    seen = await ground.play([Turn(text="x")], abp={"session": {"keep": True}})
    assert (seen.receipt.outcome, seen.end["code"]) == ("failed", "capability_unsupported")
    assert seen.server.requests == ()


@pytest.mark.parametrize("name", ["qwen"])
async def test_a_budget_ends_the_run(ground: Ground) -> None:
    usage = Usage(input=100_000, output=20_000)
    again = msgspec.structs.replace(ground.agent.runs("echo again"), times=None, usage=usage)
    seen = await ground.play([again], max_budget_usd=1.0, options={"prices": {"input": 5, "output": 30}})
    assert (seen.receipt.outcome, seen.end["reason"], seen.end["code"]) == ("partial", "budget", "policy_denied")
