"""`backplane acp` judged by editors that are made with the protocol's public SDKs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from backplane.testing import Call, Fault, ModelServer, Turn
from tests.all.vendors.found import referee


def test_an_editor_made_with_the_public_sdk_reads_all_that_the_agent_says(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    writes = [Call(name="write_file", input={"path": f"{name}.txt", "content": "x\n"}) for name in ("a", "b")]
    script = [
        Turn(reasoning="hm", calls=(writes[0],)), Turn(text="done"), Turn(calls=(writes[1],)), Turn(text="done"),
        Turn(text="word " * 400, pieces=400, fault=Fault(pause_ms=50)),
    ]  # fmt: skip
    with ModelServer(script) as server:
        options = f'{{ protocol = "anthropic", base_url = "{server.base_url("anthropic")}", model = "m" }}'
        rows = "".join(f'[backends.{name}]\nhost = "api"\noptions = {options}\n' for name in ("one", "two"))
        (tmp_path / "backplane.toml").write_text(f'default_backend = "one"\n{rows}')
        (tmp_path / "policy.json").write_text('{"require_approval_for": ["write_file"]}')
        agent = [sys.executable, "-m", "backplane", "acp", "--config", str(tmp_path / "backplane.toml")]
        editor = [referee("acp"), str(Path(__file__).with_name("sdk_editor_of_acp.py")), str(work)]
        done = subprocess.run(
            [*editor, *agent, "--policy", str(tmp_path / "policy.json")], capture_output=True, text=True, check=False,
            env={**os.environ, "BACKPLANE_HOME": str(tmp_path / "home")}, timeout=100,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout)
    assert seen["stops"] == ["end_turn", "end_turn", "cancelled"]
    assert (seen["mode"], seen["mode_after"], seen["listed"], seen["code"]) == ("one", "two", True, 0)
    assert len(seen["asked"]) == 2
    assert (work / "a.txt").exists()
    assert not (work / "b.txt").exists()
    live, loaded = seen["updates"][: seen["updates"].index("load")], seen["updates"][seen["updates"].index("load") :]
    assert {"AgentThoughtChunk", "AgentMessageChunk", "ToolCallStart", "ToolCallProgress"} <= set(live)
    assert "UserMessageChunk" in loaded
