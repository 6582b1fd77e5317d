"""`backplane acp` judged by editors that are made with the protocol's public SDKs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema

from backplane.testing import Call, Fault, ModelServer, Turn
from tests.all.vendors.found import referee

SDK = "@agentclientprotocol/sdk@2.4.0"
SCHEMA = Path("@agentclientprotocol", "sdk", "schema", "v1", "schema.json")


def script() -> list[Turn]:
    """A call that is permitted, one that is not, a long answer that is cancelled, and a call whose question is."""
    one, two, three = (Call(name="write_file", input={"path": f"{name}.txt", "content": "x\n"}) for name in "abc")
    return [
        Turn(reasoning="hm", calls=(one,)), Turn(text="done"), Turn(calls=(two,)), Turn(text="done"),
        Turn(text="word " * 400, pieces=400, fault=Fault(pause_ms=50)), Turn(calls=(three,)),
    ]  # fmt: skip


def seen_by(editor: list[str], folder: Path) -> Any:
    """Return what an editor saw; it gets its folder and the agent's command as arguments."""
    (folder / "work").mkdir()
    with ModelServer(script()) as server:
        options = f'{{ protocol = "anthropic", base_url = "{server.base_url("anthropic")}", model = "m" }}'
        rows = "".join(f'[backends.{name}]\nhost = "api"\noptions = {options}\n' for name in ("one", "two"))
        (folder / "backplane.toml").write_text(f'default_backend = "one"\n{rows}')
        (folder / "policy.json").write_text('{"require_approval_for": ["write_file"]}')
        agent = [sys.executable, "-m", "backplane", "acp", "--config", str(folder / "backplane.toml")]
        done = subprocess.run(
            [*editor, str(folder / "work"), *agent, "--policy", str(folder / "policy.json")],
            capture_output=True, text=True, check=False, env={**os.environ, "BACKPLANE_HOME": str(folder / "home")},
            timeout=100,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout)
    assert seen["stops"] == ["end_turn", "end_turn", "cancelled", "cancelled"]
    assert (seen["mode"], seen["mode_after"], seen["listed"], seen["code"]) == ("one", "two", True, 0)
    assert len(seen["asked"]) == 3
    assert [(folder / "work" / f"{name}.txt").exists() for name in "abc"] == [True, False, False]
    return seen


def test_an_editor_made_with_the_public_python_sdk_reads_all_that_the_agent_says(tmp_path: Path) -> None:
    seen = seen_by([referee("acp"), str(Path(__file__).with_name("sdk_editor_of_acp.py"))], tmp_path)
    live, loaded = seen["updates"][: seen["updates"].index("load")], seen["updates"][seen["updates"].index("load") :]
    assert {"AgentThoughtChunk", "AgentMessageChunk", "ToolCallStart", "ToolCallProgress"} <= set(live)
    assert "UserMessageChunk" in loaded


def test_an_editor_made_with_the_public_typescript_sdk_reads_all_that_the_agent_says(
    tmp_path: Path, npm_programs: Callable[..., Path], needs: Callable[[str], str]
) -> None:
    packages = npm_programs(SDK).parent
    (tmp_path / "node_modules").symlink_to(packages)
    program = shutil.copy(Path(__file__).with_name("sdk_editor_of_acp.mjs"), tmp_path)
    seen = seen_by([needs("node"), str(program)], tmp_path)
    assert seen["unknown"] == -32601
    live, loaded = seen["updates"][: seen["updates"].index("load")], seen["updates"][seen["updates"].index("load") :]
    assert {"agent_thought_chunk", "agent_message_chunk", "tool_call", "tool_call_update"} <= set(live)
    assert "user_message_chunk" in loaded
    check_lines(json.loads((packages / SCHEMA).read_text()), "".join(seen["sent"]), "".join(seen["came"]))


def check_lines(schema: dict[str, Any], sent: str, came: str) -> None:
    """Check each line of the agent by the definition of its method, which the SDK's package brings along."""
    shapes = {
        (row["x-method"], name.endswith("Response")): name for name, row in schema["$defs"].items() if "x-method" in row
    }
    asked = {row["id"]: row["method"] for row in map(json.loads, sent.splitlines()) if "method" in row and "id" in row}
    checked = 0
    for row in map(json.loads, came.splitlines()):
        method = row.get("method") or asked[row["id"]]
        if "error" not in row:
            name = shapes[method, "result" in row]
            value = row["result"] if "result" in row else row["params"]
            jsonschema.Draft202012Validator({"$defs": schema["$defs"], "$ref": f"#/$defs/{name}"}).validate(value)
            checked += 1
    assert checked > 20
