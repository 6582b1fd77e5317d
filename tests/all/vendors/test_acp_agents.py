"""Real agents behind the host `acp`, against a scripted model: an answer, a tool, a denial, a cancel, a failure."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from backplane import api
from backplane.config import BackendSettings, Limits, Settings
from backplane.contract.events import (
    ApprovalAnswered,
    AssistantMessage,
    CommandExecuted,
    Failed,
    RetryReported,
    ToolCall,
    ToolResult,
    carried,
)
from backplane.contract.receipt import Receipt
from backplane.contract.work import PolicyProfile, WorkOrder, WorkspaceSpec
from backplane.testing import SIDE_TURNS, Call, Failure, Fault, ModelServer, ScriptUsage, Turn
from tests.all.vendors.found import vendor

pytestmark = [pytest.mark.timeout(180)]

IDLE_S = 60.0
"""An agent of 600 MiB on a loaded machine takes a while to say anything."""
BEGUN_S = 30.0
LINES = "cat x.txt > b.txt; echo told"


@dataclass(frozen=True)
class Agent:
    """What a test has to know of an agent: how it reaches the model, and how the model calls its shell."""

    env: Callable[[ModelServer], dict[str, str]]
    shell: str
    goes_on_after_denial: bool = True
    tokens: bool = True
    tokens_of_tools: bool = True
    """Whether it tells the tokens of a turn with several calls of the model."""
    argument: str = "command"
    """What its shell calls the command."""


def opencode(server: ModelServer) -> dict[str, str]:
    options = {"baseURL": server.base_url("openai_compatible"), "apiKey": "dummy"}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"scripted-model": {}}}
    models = dict.fromkeys(("model", "small_model"), "scripted/scripted-model")
    return {"OPENCODE_CONFIG_CONTENT": json.dumps({"provider": {"scripted": provider}, **models})}


def qwen(server: ModelServer) -> dict[str, str]:
    address = server.base_url("openai_compatible")
    return {"OPENAI_BASE_URL": address, "OPENAI_API_KEY": "dummy", "OPENAI_MODEL": "scripted-model"}


def codex_acp(server: ModelServer) -> dict[str, str]:
    return {"OPENAI_API_KEY": "dummy"}


def arguments(name: str, server: ModelServer) -> dict[str, Any]:
    """Options beside the environment: an agent may take its model's address by arguments alone."""
    if name != "codex-acp":
        return {}
    service = {"name": "scripted", "base_url": server.base_url("openai_responses"), "env_key": "OPENAI_API_KEY"}
    settings: dict[str, Any] = {f"model_providers.scripted.{key}": value for key, value in service.items()}
    settings |= {"model_provider": "scripted", "model": "gpt-5.5", "model_providers.scripted.request_max_retries": 1}
    return {"arguments": [word for key, value in settings.items() for word in ("-c", f"{key}={json.dumps(value)}")]}


AGENTS = {
    "opencode": Agent(opencode, "bash", tokens_of_tools=False),
    "qwen": Agent(qwen, "run_shell_command", goes_on_after_denial=False),
    "codex-acp": Agent(
        codex_acp, "exec_command", argument="cmd", goes_on_after_denial=False, tokens=False, tokens_of_tools=False
    ),
}
ALL = pytest.mark.parametrize("name", AGENTS)
MOST = pytest.mark.parametrize("name", ["opencode", "codex-acp"])

Ended = tuple[Receipt, list[Any]]


@pytest.fixture
def go(tmp_path: Path) -> Callable[..., Ended]:
    """Run one order on a real agent whose model says these turns."""
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws" / "x.txt").write_text("x\n")

    def run(name: str, turns: list[Turn], *, cancel_after: Path | None = None, **order: Any) -> Ended:
        program = vendor(name)
        with ModelServer([*SIDE_TURNS, *turns]) as server:
            declared = BackendSettings(
                host="acp",
                options={"profile": name, "program": program, **arguments(name, server)},
                env=AGENTS[name].env(server),
                endpoints=(f"127.0.0.1:{server.port}",),
            )
            limits = Limits(idle_s=IDLE_S, cancel_grace_s=5.0)
            settings = Settings(backends={"agent": declared}, limits=limits)
            # In place, so that a file tells when the command has begun.
            mode: Any = "pass_through" if cancel_after else "staged"
            work = WorkOrder("do it", workspace=WorkspaceSpec(root=str(tmp_path / "ws"), mode=mode), **order)
            return anyio.run(follow, work, settings, cancel_after)

    return run


async def follow(work: WorkOrder, settings: Settings, cancel_after: Path | None) -> Ended:
    events: list[Any] = []
    async with api.start(work, backend="agent", settings=settings) as run:
        async for event in run:
            events.append(event)
            if cancel_after is not None and isinstance(carried(event), ApprovalAnswered):
                with anyio.fail_after(BEGUN_S):
                    while not os.path.exists(cancel_after):  # noqa: ASYNC240
                        await anyio.sleep(0.02)
                await run.cancel()
    return run.receipt, events


def shell(name: str, command: str) -> Turn:
    call = Call(name=AGENTS[name].shell, input={AGENTS[name].argument: command, "description": "run it"})
    return Turn(calls=(call,), usage=ScriptUsage(input=100, output=10))


def of(kind: type, events: list[Any]) -> list[Any]:
    return [event for event in events if type(event) is kind]


@MOST
def test_a_plain_answer_with_its_tokens(name: str, go: Callable[..., Ended]) -> None:
    receipt, events = go(name, [Turn(text="Hello there.", usage=ScriptUsage(input=11, output=5))])
    assert receipt.outcome == "complete"
    assert [event.text for event in of(AssistantMessage, events)] == ["Hello there."]
    tokens = (receipt.usage.input_tokens, receipt.usage.output_tokens)
    assert tokens == ((11, 5) if AGENTS[name].tokens else (None, None))


@ALL
def test_a_tool_turn_changes_files_and_the_patch_is_right(name: str, go: Callable[..., Ended]) -> None:
    done = Turn(text="All done.", usage=ScriptUsage(input=200, output=20))
    receipt, events = go(name, [shell(name, LINES), done])
    assert receipt.outcome == "complete"
    assert [(event.tool_name, event.input["command"]) for event in of(ToolCall, events)] == [("bash", LINES)]
    assert of(CommandExecuted, events)[0].exit_code == 0
    assert "+++ b/b.txt\n@@ -0,0 +1 @@\n+x\n" in (receipt.verification.git_diff or "")
    tokens = (receipt.usage.input_tokens, receipt.usage.output_tokens)
    assert tokens == ((300, 30) if AGENTS[name].tokens_of_tools else (None, None))


@ALL
def test_a_denied_tool_does_not_run(name: str, go: Callable[..., Ended]) -> None:
    turns = [shell(name, LINES), Turn(text="I could not.")]
    receipt, events = go(name, turns, policy=PolicyProfile(disallowed_tools=("bash",)))
    assert receipt.outcome == ("complete" if AGENTS[name].goes_on_after_denial else "partial")
    assert "policy_denied" in str(of(ToolResult, events)[0].output)
    assert not receipt.verification.git_diff
    assert "violations" not in receipt.backplane["enforcement"]


@MOST
def test_a_cancel_while_a_command_runs_leaves_nothing(name: str, go: Callable[..., Ended], tmp_path: Path) -> None:
    begun = tmp_path / "ws" / "begun"
    command = "touch begun && python3 -c 'import time; time.sleep(300)'"
    receipt, _ = go(name, [shell(name, command), Turn(text="late")], cancel_after=begun)
    assert (receipt.outcome, receipt.backplane["end"]["reason"]) == ("partial", "cancelled")


@MOST
def test_a_refused_key_fails_the_run_with_its_code(name: str, go: Callable[..., Ended]) -> None:
    receipt, events = go(name, [Turn(fault=Fault(status=401, message="unauthorized: no such key"), times=None)])
    assert receipt.outcome == "failed"
    assert of(Failed, events)[0].error_code == "backend_auth_failed"


BROKEN = {
    "500": Fault(status=500, message="the boiler is broken"), "529": Fault(status=529, message="the boiler is full"),
    "cut": Fault(reset=True),
    "in the stream": Fault(failure=Failure(code="overloaded_error", message="too many guests")),
}  # fmt: skip
"""Failures that an agent repeats by itself, and a word that the record has of each."""
TOLD = {"500": "boiler is broken", "529": "boiler is full", "cut": "closed", "in the stream": "too many guests"}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_model_that_always_fails_ends_the_run_with_its_words(broken: str, go: Callable[..., Ended]) -> None:
    receipt, events = go("opencode", [Turn(text="x", times=None, fault=BROKEN[broken])])
    assert receipt.outcome == "failed"
    (failed,) = of(Failed, events)
    assert failed.error_code in ("backend_unavailable", "backend_rate_limited")
    assert TOLD[broken] in failed.message
    assert any(isinstance(carried(event), RetryReported) for event in events)
