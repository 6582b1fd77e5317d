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

import backplane
from backplane.testing import Call, ModelServer, ScriptUsage, Turn
from tests.api_agent import KEY, PRICES
from tests.peers import ROOT, WAIT_S

EXAMPLES = ROOT / "docs" / "examples"
USED = ScriptUsage(input=100, output=10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    return work


ROUTING = """
[routing]
quality = ["other", "one"]

[routing.models.wide]
context_tokens = 1_000_000
"""


def configure(folder: Path, server: ModelServer) -> None:
    rows = []
    for name, protocol, model in (("one", "anthropic", "m"), ("other", "openai_compatible", "wide")):
        prices = ", ".join(f"{key} = {json.dumps(value)}" for key, value in PRICES.items())
        options = (
            f'protocol = "{protocol}", base_url = "{server.base_url(protocol)}", model = "{model}", key_env = "KEY"'  # type: ignore[arg-type]
        )
        rows.append(f'[backends.{name}]\nhost = "api"\noptions = {{ {options}, prices = {{ {prices} }} }}\n')
    (folder / "backplane.toml").write_text('default_backend = "one"\n' + "\n".join(rows) + ROUTING)


def run(folder: Path, turns: Sequence[Turn], name: str, *words: str) -> tuple[str, ModelServer]:
    with ModelServer(turns) as server:
        configure(folder, server)
        done = subprocess.run(
            [sys.executable, EXAMPLES / name, *words],
            cwd=folder, env={**os.environ, "KEY": KEY, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
            timeout=12 * WAIT_S, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, server


def test_every_example_is_on_the_page_and_run_here() -> None:
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix not in (".md", ".pyc", "")}
    assert names == set(re.findall(r"^\| `(\w+\.\w+)` \|", (EXAMPLES / "README.md").read_text(), re.M))
    source = Path(__file__).read_text() + (ROOT / "tests/all/clients/test_examples.py").read_text()
    assert all(re.search(f"[\"']{re.escape(name)}[\"']", source) for name in names)


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


def test_the_provider_is_a_name(folder: Path) -> None:
    turns = [Turn(text="Hello, Ada."), Turn(text="Ada.")]
    said, server = run(folder, turns, "switching_providers.py", "other")
    assert said == "other: Hello, Ada.\nother: Ada.\nnot carried over: nothing\n"
    assert "My name is Ada." in msgspec.json.encode(server.requests[-1].body).decode()


def test_an_approval_is_asked_and_denied(folder: Path) -> None:
    turns = [Turn(calls=(Call(name="bash", input={"command": "make"}),), usage=USED), Turn(text="Fine.", usage=USED)]
    said, server = run(folder, turns, "approvals.py")
    assert said == "[asked: make]\nFine.\n[end_turn]\ntokens: 220, cost: 240 millionths of a dollar\n"
    bodies = [msgspec.json.encode(request.body).decode() for request in server.requests]
    assert "return a + b" in bodies[0], [(request.method, request.path) for request in server.requests]
    assert "not here" in bodies[1]


def test_a_session_goes_on_in_another_process_with_another_backend(folder: Path) -> None:
    said, _ = run(folder, [Turn(text="Noted.")], "save_and_resume.py", "the word is zebra")
    text, id = said.splitlines()
    assert text == "Noted."
    said, server = run(folder, [Turn(text="Zebra.")], "save_and_resume.py", "which word?", "other", id)
    assert said.splitlines()[:2] == ["Zebra.", id]
    assert "the word is zebra" in msgspec.json.encode(server.requests[-1].body).decode()


def test_tasks_go_where_the_router_sends_them_and_say_why(folder: Path) -> None:
    said, _ = run(folder, [Turn(text="A toml.", usage=USED), Turn(text="Fine.", usage=USED)], "unified_routing.py")
    lines = said.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "simple_query: one: A toml.",
        "code_review: one: Fine.",
    ]
    assert "  not other: tool_read required, and it never said hello here -> run it once with --backend other" in lines
    assert any(line.startswith("  not shell: it runs only orders that name it") for line in lines)


def test_the_forms_of_the_router_go_by_cost_by_strategy_and_by_quality(folder: Path) -> None:
    turns = [Turn(text=text, usage=USED) for text in ("A lock.", "Written.", "Good.", "Hello.")]
    said, server = run(folder, turns, "task_router.py")
    assert said.splitlines()[:3] == ["asked: A lock.", "written: Written.", "reviewed: Good."]
    assert re.fullmatch(r"would take: (one/m|other/wide)\n(one|other): Hello.\n", said.split("Good.\n")[1])
    assert [request.body["model"] for request in server.requests][:3] == ["m", "m", "m"]  # `other` never said hello.


def test_a_strategy_of_ones_own_decides(folder: Path) -> None:
    said, _ = run(folder, [Turn(text="Long.", usage=USED)], "custom_strategy.py")
    assert said == "other by custom: Long.\n"


def test_two_backends_are_compared_and_no_winner_is_made_up(folder: Path) -> None:
    call = Call(name="write_file", input={"path": "word.txt", "content": "hello\n"})
    turns = [Turn(calls=(call,), usage=USED), Turn(text="Done.", usage=USED)] * 2
    said, _ = run(folder, turns, "claude_vs_codex.py", "one", "other", "1")
    for name in ("one", "other"):
        assert f"{name}: 1 of 1 passed, $0.000240 a run, 1 different patches" in said
    assert "success: nothing can be said" in said
    assert "cost: nothing can be said" in said
    assert not (folder / "word.txt").exists()


@pytest.mark.parametrize("words", ["claude_vs_codex.py one", "save_and_resume.py a b c d"])
def test_an_example_with_too_few_or_too_many_words_says_its_usage(words: str, folder: Path) -> None:
    name, *given = words.split()
    command = [sys.executable, str(EXAMPLES / name), *given]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode
    assert done.stderr.startswith(f"usage: {name} ")


def test_the_guide_names_what_there_is(folder: Path) -> None:
    guide = (EXAMPLES / "from-the-vendors-sdks.md").read_text()
    found = dict[str, object]()
    exec(re.findall(r"^```python\n(.*?)^```$", guide, re.S | re.M)[0], found)
    assert callable(found["mend"])
    for name in re.findall(r"backplane\.(\w+)\(", guide):
        assert hasattr(backplane, name), name
    for name in ("PolicyProfile", "Approval", "Decision", "CommandExecuted", "FileChanged"):
        assert name in guide
        assert hasattr(backplane, name), name


# Programs beside the command line -------------------------------------------------------------------------------------


@pytest.fixture
def programs(tmp_path: Path, folder: Path, backplane_home: Path) -> dict[str, str]:
    """An environment whose `backplane` is this one; its configuration names the shell."""
    (folder / "backplane.toml").write_text('default_backend = "shell"\n')
    (folder / "a.txt").write_text("one\n")
    place = tmp_path / "bin"
    place.mkdir()
    program = place / "backplane"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -P -m backplane "$@"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{place}:{os.environ['PATH']}", "GOFLAGS": "-mod=mod", "GOWORK": "off"}


def said(words: Sequence[str | Path], folder: Path, environ: dict[str, str], code: int = 0) -> str:
    done = subprocess.run(
        words, cwd=folder, env=environ, capture_output=True, text=True, timeout=12 * WAIT_S, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("task", "code", "failures"), [("echo two >> a.txt", 0, "0"), ("exit 3", 1, "1")])
def test_a_step_of_a_build_leaves_all_that_its_system_wants(
    programs: dict[str, str], folder: Path, task: str, code: int, failures: str
) -> None:
    out = folder.parent / "out"
    said(["sh", EXAMPLES / "ci.sh", task, out], folder, programs, code)
    assert {path.name for path in out.iterdir()} == {
        "run-id", "receipt.json", "change.patch", "summary.md", "junit.xml", "run.html"
    }  # fmt: skip
    assert f'failures="{failures}"' in (out / "junit.xml").read_text()
    assert "| outcome | backend |" in (out / "summary.md").read_text()
    assert ("+two" in (out / "change.patch").read_text()) == (code == 0)


def test_a_step_that_is_refused_shows_no_other_runs_result(programs: dict[str, str], folder: Path) -> None:
    outs = [folder.parent / name for name in ("out", "new")]
    said(["sh", EXAMPLES / "ci.sh", "true", outs[0]], folder, programs)
    (folder / "backplane.toml").write_text("nonsense = 1\n")
    (outs[0] / "summary.md").unlink()
    for out in outs:
        assert said(["sh", EXAMPLES / "ci.sh", "true", out], folder, programs, 2) == ""
        assert not any(out.iterdir())


def test_the_host_works_in_its_copy(programs: dict[str, str], folder: Path) -> None:
    host = f"{sys.executable} {EXAMPLES / 'host.py'}"
    shown = said(
        ["backplane", "run", "say hello", "--sidecar", host, "--patch", "a.patch"], folder,
        {**programs, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "I was asked: say hello" in shown
    assert "+# say hello" in (folder / "a.patch").read_text()
