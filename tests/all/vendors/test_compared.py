"""Claude Code and Codex for real, side by side on one order: the example as its page starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from backplane.testing import SIDE_TURNS, ModelServer, Turn
from tests.all.vendors.ground import Agent
from tests.all.vendors.test_claude import Claude
from tests.all.vendors.test_codex import Codex
from tests.peers import ROOT

ROUNDS = 2
WAIT_S = 170.0


def row(agent: Agent, url: str) -> str:
    options: dict[str, Any] = agent.options(url)
    words = ", ".join(
        f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value}" for name, value in options.items()
    )
    env = ", ".join(f'{name} = "{value}"' for name, value in {**agent.env, **agent.variables()}.items())
    return f'[backends.{agent.name}]\nhost = "{agent.host}"\noptions = {{ {words} }}\nenv = {{ {env} }}\n'


@pytest.mark.timeout(200)
def test_claude_and_codex_are_compared_from_the_same_tree(tmp_path: Path) -> None:
    with ExitStack() as opened:
        rows = []
        for agent in (Claude(), Codex()):
            turns = [agent.writes("word.txt", "hello\n"), Turn(text="Written.")] * ROUNDS
            server = opened.enter_context(ModelServer([*SIDE_TURNS, *turns]))
            rows.append(row(agent, server.url))
        (tmp_path / "backplane.toml").write_text("\n".join(rows))
        path = str(ROOT / "docs" / "examples" / "claude_vs_codex.py")
        example = [sys.executable, path, "claude", "codex", str(ROUNDS)]
        done = subprocess.run(
            example, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
            timeout=WAIT_S, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for name in ("claude", "codex"):
        (told,) = [line for line in lines if line.startswith(f"{name}: ")]
        assert f"{ROUNDS} of {ROUNDS} passed" in told
        assert told.endswith("1 different patches")
    assert "success: nothing can be said" in lines
    assert not (tmp_path / "word.txt").exists()
