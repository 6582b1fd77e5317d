"""The usage examples with two real agents: the programs that `doors/test_examples.py` runs over models' APIs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from backplane.testing import SIDE_TURNS, Call, ModelServer, Turn
from tests.all.vendors.ground import Agent, installed
from tests.all.vendors.test_codex import Codex, asks
from tests.peers import ROOT

pytestmark = [pytest.mark.timeout(600)]

EXAMPLES = ROOT / "docs" / "examples"
WAIT_S = 240.0
"""For one program, on a machine with other work."""


AGENTS: dict[str, Callable[[], Agent]] = {"codex": Codex}


@pytest.fixture(params=AGENTS)
def agent(request: pytest.FixtureRequest) -> Agent:
    return installed(AGENTS[request.param])


def inline(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(name)} = {inline(one)}" for name, one in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(inline, value)) + "]"
    return json.dumps(value)


def run(folder: Path, agent: Agent, turns: Sequence[Turn], name: str, *words: str) -> tuple[str, list[Any]]:
    """Run an example with an agent as the default backend; what it prints and what the model was asked."""
    with ModelServer([*SIDE_TURNS, *turns]) as server:
        row = {
            "host": agent.host,
            "options": agent.options(server.url),
            "env": {**agent.variables(), **agent.env},
            "writable": agent.writable,
        }
        lines = [f'default_backend = "{agent.name}"', 'isolation = "off"', f'[backends."{agent.name}"]']
        lines += [f"{key} = {inline(value)}" for key, value in row.items() if value]
        (folder / "backplane.toml").write_text("\n".join(lines) + "\n")
        done = subprocess.run(
            [sys.executable, EXAMPLES / name, *words],
            cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=WAIT_S,
            check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, [request.body for request in server.requests if request.body is not None]


@pytest.fixture
def folder(tmp_path: Path, backplane_home: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    return work


def test_a_session_of_under_ten_lines(agent: Agent, folder: Path) -> None:
    said, _ = run(folder, agent, [Turn(text="4")], "simple_query.py")
    assert said == "4\n"


def asked_for(agent: Agent, tool: str, **input: str) -> Turn:
    """The model's turn that calls a tool in Python."""
    if agent.name == "codex":
        return asks(tool, input, namespace="mcp__functions")
    return Turn(calls=(Call(name=f"functions-{tool}", input=input),))


def test_basic_usage_runs_both_kinds_of_tools(agent: Agent, folder: Path) -> None:
    turns = [
        asked_for(agent, "read_note", name="hello"),
        asked_for(agent, "price", article="pump"),
        Turn(text="It costs 129 EUR."),
    ]
    said, asked = run(folder, agent, turns, "basic_usage.py")
    assert said.startswith("It costs 129 EUR.\n[end_turn] ")
    assert "Hello from the note." in json.dumps(asked)
    assert "129 EUR" in json.dumps(asked[-1])


def test_the_provider_is_a_name(agent: Agent, folder: Path) -> None:
    said, asked = run(folder, agent, [Turn(text="Hello, Ada."), Turn(text="Ada.")], "switching_providers.py")
    lines = said.splitlines()
    assert lines[:2] == [f"{agent.name}: Hello, Ada.", f"{agent.name}: Ada."]
    assert lines[2].startswith("not carried over: ")
    assert "My name is Ada." in json.dumps(asked[-1])


def test_an_approval_is_asked_and_denied(agent: Agent, folder: Path) -> None:
    said, asked = run(folder, agent, [agent.runs("make"), Turn(text="Fine.")], "approvals.py")
    assert "[asked: make]\n" in said
    assert "Fine.\n[end_turn]\ntokens: " in said
    assert "return a + b" in json.dumps(asked[-1])
    assert "not here" in json.dumps(asked[-1])


def test_a_session_goes_on_in_another_process(agent: Agent, folder: Path) -> None:
    said, _ = run(folder, agent, [Turn(text="Noted.")], "save_and_resume.py", "the word is zebra")
    text, id, *_ = said.splitlines()
    assert text == "Noted."
    said, asked = run(folder, agent, [Turn(text="Zebra.")], "save_and_resume.py", "which word?", agent.name, id)
    assert said.splitlines()[:2] == ["Zebra.", id]
    assert "the word is zebra" in json.dumps(asked[-1])
