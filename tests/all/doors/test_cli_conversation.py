"""`run`: whose answers its questions get, and the options that stand for settings of a conversation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.in_process import in_process

HOST = """
import json
from backplane.host import EXTENSIONS, Done, Host, main

async def work(run):
    for tool in ("deploy", "peek"):
        decision = await run.may(tool, {"to": "prod"})
        await run.message(json.dumps([tool, decision.decision, decision.reason]))
    return Done()

main(Host(id="asks", capabilities={}, extensions=EXTENSIONS), work)
"""

KEEPS = """
import json
from backplane.host import EXTENSIONS, Done, Host, main

async def work(run):
    await run.message(json.dumps(run.order.config.vendor.get("abp")))
    await run.carry("session", {"id": f"conversation-{run.order.task}"}, "session")
    return Done()

heeds = ("session", "output_schema", "mcp_servers")
main(Host(id="keeps", capabilities={}, extensions=(*EXTENSIONS, "session/1"), heeds=heeds), work)
"""


class Place:
    """A folder with a host that asks, and one that keeps conversations."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "asks.py").write_text(HOST)
        (folder / "keeps.py").write_text(KEEPS)
        (folder / "policy.json").write_text('{"require_approval_for": ["deploy", "peek"]}')
        rows = [f'[backends.{name}]\ncommand = ["{sys.executable}", "{name}.py"]\n' for name in ("asks", "keeps")]
        (folder / "backplane.toml").write_text("\n".join(rows).replace("\\\n", "\n"))

    def run(self, *words: str, stdin: bytes = b"", code: int = 0) -> subprocess.CompletedProcess[str]:
        done = in_process("run", *words, cwd=self.folder, stdin=stdin)
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return done

    def answers(self, *words: str, **more: Any) -> list[Any]:
        """What the host was answered, tool by tool."""
        done = self.run("go", "--backend", "asks", "--policy", "policy.json", "--json", *words, **more)
        events = [json.loads(line).get("event", {}) for line in done.stdout.splitlines()]
        return [json.loads(event["text"]) for event in events if event.get("type") == "assistant_message"]

    def settings(self, *words: str) -> Any:
        """What `config.vendor.abp` was."""
        done = self.run("--backend", "keeps", "--json", *words)
        events = [json.loads(line).get("event", {}) for line in done.stdout.splitlines()]
        return next(json.loads(event["text"]) for event in events if event.get("type") == "assistant_message")


@pytest.fixture
def place(tmp_path: Path, backplane_home: Path) -> Place:
    folder = tmp_path / "work"
    folder.mkdir()
    return Place(folder)


def test_a_command_answers_each_question(place: Place) -> None:
    (place.folder / "answer.py").write_text(
        "import json, sys\nask = json.load(sys.stdin)\n"
        "said = 'allow' if ask['name'] == 'peek' else 'deny'\n"
        "print(json.dumps({'decision': said, 'reason': ask['kind'] + str(ask['input'])}))\n".replace("\\\n", "\n")
    )
    found = place.answers("--on-ask", f"{sys.executable} {place.folder}/answer.py")
    assert found == [["deploy", "deny", "tool{'to': 'prod'}"], ["peek", "allow", "tool{'to': 'prod'}"]]


def test_a_command_that_fails_denies_and_says_why(place: Place) -> None:
    for tool, decision, reason in place.answers("--on-ask", f"{sys.executable} -c 'raise SystemExit(7)'"):
        assert (tool in ("deploy", "peek"), decision) == (True, "deny")
        assert "exit code 7" in reason


def test_options_stand_for_settings(place: Place) -> None:
    (place.folder / "shape.json").write_text('{"type": "object"}')
    found = place.settings(
        "one", "--keep", "--schema", "shape.json", "--mcp", "git=uvx mcp-git --all", "--mcp", "far=https://x.test/mcp"
    )
    assert found["session"] == {"keep": True}
    assert found["output_schema"] == {"type": "object"}
    assert found["mcp_servers"] == [
        {"tool_ms": 300_000, "name": "git", "command": "uvx", "args": ["mcp-git", "--all"]},
        {"tool_ms": 300_000, "name": "far", "url": "https://x.test/mcp"},
    ]


def test_last_is_the_last_kept_conversation_of_the_backend(place: Place) -> None:
    place.settings("one", "--keep")
    place.settings("two", "--keep")
    place.settings("three")  # Not kept.
    assert place.settings("x", "--resume", "last")["session"] == {"resume": "conversation-two"}
    assert place.settings("y", "-c")["session"] == {"resume": "conversation-x"}


@pytest.mark.parametrize(
    "words",
    [
        ["--resume", "last"],
        ["--on-ask", "alow"],
        ["--on-ask", "stdin"],
        ["--mcp", "git"],
        ["--schema", "asks.py"],
    ],
)
def test_a_wrong_option_is_refused(place: Place, words: list[str]) -> None:
    place.run("go", "--backend", "asks", *words, code=2)
