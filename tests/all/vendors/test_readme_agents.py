"""The guide's lines for a conversation, typed on a fresh machine: no state folder yet, the default sandbox."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from backplane.testing import SIDE_TURNS, ModelServer, Turn
from tests.all.vendors.ground import Agent
from tests.all.vendors.test_claude import Claude
from tests.all.vendors.test_codex import Codex
from tests.test_readme import blocks

SECONDS_MAX = 90
LINES = next(block for block in blocks("sh", "conversations.md") if "--keep" in block).splitlines()


@pytest.fixture(params=[Claude(), Codex()], ids=lambda agent: agent.name)
def agent(request: pytest.FixtureRequest) -> Agent:
    chosen: Agent = request.param
    return chosen


def typed(line: str, folder: Path, env: dict[str, str]) -> str:
    done = subprocess.run(
        ["/bin/sh", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )
    assert done.returncode == 0, (line, done.stdout, done.stderr)
    return done.stdout


def test_a_conversation_of_the_guide_is_kept_and_gone_on_with_in_a_fresh_state_folder(
    agent: Agent, tmp_path: Path
) -> None:
    folder, home = tmp_path / "work", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    scripts = str(Path(sys.executable).parent)
    env = {"PATH": f"{scripts}:{os.environ['PATH']}", "HOME": str(home), "BACKPLANE_HOME": str(tmp_path / "state")}
    env |= agent.variables()
    first, second = (line.replace("--backend claude", f"--backend {agent.name}") for line in LINES)
    with ModelServer([*SIDE_TURNS, Turn(text="noted"), Turn(text="zebra")]) as server:
        options = ", ".join(f"{name} = {json.dumps(value)}" for name, value in agent.options(server.url).items())
        (folder / "backplane.toml").write_text(
            f'[backends.{agent.name}]\nhost = "{agent.host}"\noptions = {{ {options} }}\n'
        )
        kept = re.search(r"conversation: (\S+)", typed(first, folder, env))
        assert kept is not None
        answer = typed(second, folder, env)
    assert "zebra" in answer
    told = json.dumps([request.body for request in server.requests][-1])
    assert "the word is zebra" in told
    assert "what is the word?" in told
