"""An agent of a user's own, from the section that the guide shows; and what a driver has, whatever its vendor."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from backplane.agents.rows import rows_of
from backplane.config import BackendSettings, Settings
from backplane.contract.events import AgentEvent, AssistantMessage, CommandExecuted, FileChanged, ToolCall, ToolResult
from backplane.contract.work import PolicyProfile
from backplane.runtime import backends
from backplane.runtime.run import Run
from tests.runs import QUICK, go, order, plane

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "docs" / "guide" / "agents.md").read_text("utf-8")
AGENTS = ROOT / "backplane" / "agents"
LIMITS = msgspec.structs.replace(QUICK, hello_s=30.0, idle_s=60.0, cancel_grace_s=2.0)

AGENT = """
import json, os, sys
assert os.environ["MY_AGENT_KEY"] == "a-key-of-mine", "its key"
assert os.path.isdir(os.environ["MY_AGENT_HOME"]), "a folder of its own"
assert sys.argv[1:] == ["--acp"], "its arguments"

def say(**members): print(json.dumps({"jsonrpc": "2.0", **members}), flush=True)
def update(what, **members): say(method="session/update", params={"update": {"sessionUpdate": what, **members}})

def use(id, tool, kind, input, act):
    call = {"toolCallId": id, "title": tool, "kind": kind, "rawInput": input}
    update("tool_call", status="pending", **call)
    options = [{"optionId": "y", "kind": "allow_once"}, {"optionId": "n", "kind": "reject_once"}]
    say(id=id, method="session/request_permission", params={"toolCall": call, "options": options})
    if json.loads(sys.stdin.readline())["result"]["outcome"]["optionId"] == "y":
        update("tool_call_update", toolCallId=id, status="completed", **act(input))

def write(input):
    open(input["path"], "w").write("marmot")
    return {"content": [{"type": "diff", "path": input["path"], "newText": "marmot"}]}

def run(input):
    os.system(input["command"])
    return {"rawOutput": {"output": "ran", "exit_code": 0}}

modes = {"currentModeId": "yolo", "availableModes": [{"id": "yolo"}, {"id": "default"}]}
for line in sys.stdin:
    asked = json.loads(line)
    answer = {}
    if asked["method"] == "initialize":
        answer = {"protocolVersion": 1}
    elif asked["method"] == "session/new":
        answer = {"sessionId": "s1", "modes": modes}
    elif asked["method"] == "session/set_mode":
        modes["currentModeId"] = asked["params"]["modeId"]
    elif asked["method"] == "session/prompt":
        use("c1", "write", "edit", {"path": os.path.join(os.getcwd(), "hi.txt")}, write)
        use("c2", "shell", "execute", {"command": "touch ran.txt"}, run)
        update("agent_message_chunk", content={"type": "text", "text": f"done in {modes['currentModeId']}"})
        answer = {"stopReason": "end_turn", "usage": {"inputTokens": 7, "outputTokens": 3}}
    say(id=asked["id"], result=answer)
"""


def of(kind: type, events: list[AgentEvent]) -> list[AgentEvent]:
    return [event for event in events if type(event) is kind]


@pytest.fixture
def agent(tmp_path: Path) -> backends.Backend:
    """The backend of the guide's section, whose program is a script."""
    (block,) = [block for block in re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL) if "[backends.my-agent]" in block]
    assert len([line for line in block.splitlines() if line.strip()]) <= 20
    program = tmp_path / "my-agent"
    program.write_text(f"#!{sys.executable} -I\n{AGENT}")
    program.chmod(0o755)
    declared = msgspec.convert(tomllib.loads(block)["backends"]["my-agent"], BackendSettings)
    environ = {"PATH": str(tmp_path), "MY_AGENT_KEY": "a-key-of-mine"}
    declared = msgspec.structs.replace(declared, env={"PATH": str(tmp_path)})
    return backends.find("my-agent", Settings(backends={"my-agent": declared}, limits=LIMITS), environ)


async def play(
    home: Path, root: Path, backend: backends.Backend, policy: PolicyProfile
) -> tuple[Run, list[AgentEvent]]:
    async with plane(home, LIMITS) as control:
        return await go(control, order(root, policy=policy, mode="staged"), backend)


@pytest.mark.anyio
async def test_an_agent_of_ones_own_runs_an_order_by_its_section_of_the_configuration(
    agent: backends.Backend, backplane_home: Path, root: Path
) -> None:
    run, events = await play(backplane_home, root, agent, PolicyProfile())
    assert run.receipt is not None
    assert run.receipt.outcome == "complete", run.error
    assert [call.tool_name for call in of(ToolCall, events) if isinstance(call, ToolCall)] == ["write_file", "bash"]
    assert [change.path for change in of(FileChanged, events) if isinstance(change, FileChanged)] == ["hi.txt"]
    assert [ran.exit_code for ran in of(CommandExecuted, events) if isinstance(ran, CommandExecuted)] == [0]
    (said,) = of(AssistantMessage, events)
    assert isinstance(said, AssistantMessage)
    assert said.text == "done in default"
    assert (run.receipt.usage.input_tokens, run.receipt.usage.output_tokens) == (7, 3)


@pytest.mark.anyio
async def test_an_agent_of_ones_own_asks_and_is_refused_by_the_neutral_name(
    agent: backends.Backend, backplane_home: Path, root: Path
) -> None:
    run, events = await play(backplane_home, root, agent, PolicyProfile(disallowed_tools=("bash",)))
    results = [result.is_error for result in of(ToolResult, events) if isinstance(result, ToolResult)]
    assert results == [False, True]
    assert of(CommandExecuted, events) == []
    assert run.receipt is not None
    assert "violations" not in run.receipt.backplane["enforcement"]


def test_every_row_of_the_table_is_a_backend_by_its_name() -> None:
    names = rows_of(str(ROOT / "hosts"))
    assert {"grok", "vibe", "kilo", "codex-acp", "claude-agent-acp"} <= names.keys()
    for name, row in names.items():
        backend = backends.find(name, Settings(), {row["key_env"]: "a-key"} if "key_env" in row else {})
        assert isinstance(backend, backends.ProcessBackend)
        assert backend.agent is not None
        assert backend.agent.program == row["program"]


STEPS = ("__init__", "spec", "image", "run", "hear", "open", "say", "add", "stop", "answer", "reply", "raw")
"""The functions of a driver that others call, in their order."""


@pytest.mark.parametrize("name", ["acp", "claude", "codex", "copilot", "kimi"])
def test_drivers_have_the_same_functions_in_the_same_order(name: str) -> None:
    tree = ast.parse((AGENTS / name / "agent.py").read_text("utf-8"))
    (driver,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Agent"]
    public = [
        node.name
        for node in driver.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not re.match(r"_[a-z]", node.name)
    ]
    assert set(public) <= set(STEPS)
    assert public == sorted(public, key=STEPS.index)
    assert {"image", "open", "say", "stop", "raw"} <= set(public)
