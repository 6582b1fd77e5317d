"""The programs of `docs/examples/` do what their page says, against a scripted model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from backplane.testing import Call, ModelServer, Turn, Usage
from tests.api_agent import KEY, PRICES
from tests.peers import ROOT, WAIT_S

EXAMPLES = ROOT / "docs" / "examples"
USED = Usage(input=100, output=10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    return work


def configure(folder: Path, server: ModelServer) -> None:
    rows = []
    for name, protocol in (("one", "anthropic"), ("other", "openai_compatible")):
        prices = ", ".join(f"{key} = {json.dumps(value)}" for key, value in PRICES.items())
        options = f'protocol = "{protocol}", base_url = "{server.base_url(protocol)}", model = "m", key_env = "KEY"'  # type: ignore[arg-type]
        rows.append(f'[backends.{name}]\nhost = "api"\noptions = {{ {options}, prices = {{ {prices} }} }}\n')
    (folder / "backplane.toml").write_text('default_backend = "one"\n' + "\n".join(rows))


def run(folder: Path, turns: Sequence[Turn], name: str, *words: str) -> tuple[str, ModelServer]:
    with ModelServer(turns) as server:
        configure(folder, server)
        done = subprocess.run(
            [sys.executable, EXAMPLES / name, *words],
            cwd=folder, env={**os.environ, "KEY": KEY, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
            timeout=6 * WAIT_S, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, server


def test_every_example_is_on_the_page_and_run_here() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == set(re.findall(r"^\| `(\w+\.py)` \|", (EXAMPLES / "README.md").read_text(), re.M))
    source = Path(__file__).read_text()
    assert all(f'"{name}"' in source for name in names)


def test_a_session_takes_under_ten_lines(folder: Path) -> None:
    said, _ = run(folder, [Turn(text="4", usage=USED)], "simple_query.py")
    assert said == "4\n"
    code = [line for line in (EXAMPLES / "simple_query.py").read_text().splitlines() if line.strip()]
    assert len(code) < 10


def test_basic_usage_runs_both_kinds_of_tools(folder: Path) -> None:
    turns = [
        Turn(
            calls=(
                Call(name="mcp__functions__read_note", input={"name": "hello"}),
                Call(name="mcp__functions__price", input={"article": "pump"}),
            ),
            usage=USED,
        ),
        Turn(text="It costs 129 EUR.", usage=USED),
    ]
    said, server = run(folder, turns, "basic_usage.py")
    assert said == "It costs 129 EUR.\n[end_turn] 220 tokens\n"
    sent = msgspec.json.encode(server.requests[-1].body).decode()
    assert "Hello from the note." in sent
    assert "129 EUR" in sent


@pytest.mark.parametrize("name", [None, "other"])
def test_the_provider_is_a_name(folder: Path, name: str | None) -> None:
    turns = [Turn(text="Hello, Ada."), Turn(text="Ada.")]
    said, server = run(folder, turns, "switching_providers.py", *([name] if name else []))
    shown = name or "one"
    assert said == f"{shown}: Hello, Ada.\n{shown}: Ada.\nnot carried: nothing\n"
    assert "My name is Ada." in msgspec.json.encode(server.requests[-1].body).decode()


def test_an_approval_is_asked_and_denied(folder: Path) -> None:
    turns = [Turn(calls=(Call(name="bash", input={"command": "make"}),), usage=USED), Turn(text="Fine.", usage=USED)]
    said, server = run(folder, turns, "approvals.py")
    assert said == "[asked: make]\nFine.\n[end_turn]\ntokens: 220, cost: 240 millionths of a dollar\n"
    bodies = [msgspec.json.encode(request.body).decode() for request in server.requests]
    assert "return a + b" in bodies[0]
    assert "not here" in bodies[1]


def test_a_session_goes_on_in_another_process_with_another_backend(folder: Path) -> None:
    said, _ = run(folder, [Turn(text="Noted.")], "save_and_resume.py", "the word is zebra")
    text, id = said.splitlines()
    assert text == "Noted."
    said, server = run(folder, [Turn(text="Zebra.")], "save_and_resume.py", "which word?", "other", id)
    assert said.splitlines()[:2] == ["Zebra.", id]
    assert "the word is zebra" in msgspec.json.encode(server.requests[-1].body).decode()
