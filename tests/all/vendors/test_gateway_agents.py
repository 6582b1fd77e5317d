"""Real agents, unmodified, through the gateway: each does a task with a tool on each protocol of a service."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from backplane.testing import PROTOCOLS, SIDE_TURNS, Call, ModelServer, ProtocolName, Turn
from tests.all.vendors import found

MADE: Final = "echo marmot > made.txt"
CALLS: Final[dict[str, Call]] = {
    "claude": Call(name="Bash", input={"command": MADE, "description": "make a file"}),
    "codex": Call(name="exec_command", input={"cmd": MADE}),
    "gemini": Call(name="run_shell_command", input={"command": MADE}),
    "opencode": Call(name="bash", input={"command": MADE, "description": "make a file"}),
}
"""Agent → its call of a shell."""

COMMANDS: Final[dict[str, tuple[str, ...]]] = {
    "claude": ("-p", "make it", "--allowedTools", "Bash"),
    "codex": ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "m", "make it"),
    "gemini": ("-p", "make it", "--yolo", "-m", "m", "--skip-trust"),
    "opencode": ("run", "make it"),
}
ENV: Final = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "GEMINI_TELEMETRY_ENABLED": "false",
}
END_S_MAX: Final = 100.0
"""Seconds for a whole task of the slowest agent on a busy machine."""


def configuration(server: ModelServer, protocol: ProtocolName) -> str:
    return f"""
[backends.scripted]
host = "api"
options = {{ protocol = "{protocol}", base_url = "{server.base_url(protocol)}" }}
[gateway.models]
"m" = "scripted/m"
"*" = "scripted/m"
"""


def told_result(server: ModelServer) -> bool:
    """Return True if the model was sent the result of its call."""
    return any("tool" in json.dumps(request.body) and request.turn == 3 for request in server.requests)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("agent", CALLS)
def test_an_agent_does_a_task_on_any_protocol_through_the_gateway(
    agent: str, protocol: ProtocolName, tmp_path: Path
) -> None:
    program = found.vendor(agent)
    home, work = tmp_path / "home", tmp_path / "work"
    (home / ".gemini").mkdir(parents=True)
    (home / ".gemini" / "settings.json").write_text('{"security": {"auth": {"selectedType": "gemini-api-key"}}}')
    for _ in range(2):
        work.mkdir()
        script = [*SIDE_TURNS, Turn(reasoning="Let me see.", calls=(CALLS[agent],)), Turn(text="all done")]
        with ModelServer(script) as server:
            (tmp_path / "backplane.toml").write_text(configuration(server, protocol))
            done = ask(program, agent, tmp_path, home, work)
            assert (done.returncode, done.stderr if done.returncode else "") == (0, "")
            assert "all done" in done.stdout
            assert (work / "made.txt").read_text() == "marmot\n"
            assert told_result(server)
            assert not server.unscripted
        (work / "made.txt").unlink()
        work.rmdir() if not any(work.iterdir()) else work.rename(tmp_path / "first")


def ask(program: str, agent: str, folder: Path, home: Path, work: Path) -> subprocess.CompletedProcess[Any]:
    """Run the agent behind `backplane gateway --for`."""
    env = {
        **ENV,
        "PATH": f"{Path(program).parent}:/usr/bin:/bin",
        "HOME": str(home),
        "BACKPLANE_HOME": str(folder / "state"),
    }
    command = [sys.executable, "-m", "backplane", "gateway", "--config", str(folder / "backplane.toml"), "--for", agent]
    return subprocess.run(
        [*command, "--", program, *COMMANDS[agent]], cwd=work, env=env, capture_output=True, text=True,
        timeout=END_S_MAX, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
