"""What a whole run of Claude Code costs on top of its program: ours and claude-agent-sdk in one process, in turn.

`bench/overhead.py PROGRAM ROUNDS` prints JSON: for each way, one figure a round of milliseconds to the end and to the
first text, and of this process's own CPU. `bench/overhead.py model` is the scripted model, in a process of its own.
The packages of `.venv-bench` come after our own in the path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:1] = [str(ROOT)]
sys.path += map(str, ROOT.glob(".venv-bench/lib/python*/site-packages"))

import anyio  # noqa: E402

KEY = "scripted-key-1"
TASK = "say one word"

Figures = tuple[float, float, float]
"""Milliseconds to the end, milliseconds to the first text, milliseconds of own CPU."""
Way = Callable[[Callable[[], None]], Awaitable[None]]
"""Runs the task once, and calls its argument at the first text."""


def model() -> None:
    """Serve one word to every request until stdin ends."""
    from backplane.testing import SIDE_TURNS, ModelServer, Turn

    with ModelServer([*SIDE_TURNS, Turn(text="one", times=None)]) as server:
        print(server.url, flush=True)
        sys.stdin.read()


async def timed(way: Way) -> Figures:
    first: list[float] = []
    began, cpu = time.perf_counter(), time.process_time()
    await way(lambda: first.append(time.perf_counter()))
    ended = time.perf_counter()
    return (ended - began) * 1000, (first[0] - began) * 1000, (time.process_time() - cpu) * 1000


def sdk(program: str, url: str, root: str, home: str) -> Way:
    from claude_agent_sdk import (  # type: ignore[import-not-found,unused-ignore]
        AssistantMessage,
        ClaudeAgentOptions,
        query,
    )

    from backplane.agents.claude.start import QUIET

    env = {**QUIET, "CLAUDE_CONFIG_DIR": home, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": KEY}
    options = ClaudeAgentOptions(cli_path=program, cwd=root, env=env, permission_mode="default", setting_sources=[])

    async def run(heard: Callable[[], None]) -> None:
        async for message in query(prompt=TASK, options=options):
            if isinstance(message, AssistantMessage):
                heard()

    return run


def ours(plane: Any, root: str, **spec: Any) -> Way:
    from backplane import AssistantDelta, AssistantMessage, WorkOrder, WorkspaceSpec

    order = WorkOrder(TASK, workspace=WorkspaceSpec(root, **spec))

    async def run(heard: Callable[[], None]) -> None:
        async with plane.start(order, "claude") as run:
            async for event in run:
                if isinstance(event, AssistantDelta | AssistantMessage):
                    heard()
        run.check()

    return run


def repository() -> str:
    root = tempfile.mkdtemp()
    subprocess.run(["git", "init", "-q", root], check=True)
    Path(root, "a.txt").write_text("a\n")
    return root


async def measure(program: str, rounds: int, url: str, root: str) -> dict[str, Any]:
    from backplane.config import BackendSettings, Settings
    from backplane.runtime.plane import ControlPlane

    home, config = tempfile.mkdtemp(), tempfile.mkdtemp()
    claude = {"claude": BackendSettings(host="claude", options={"program": program, "base_url": url})}
    environ = {**os.environ, "ANTHROPIC_API_KEY": KEY}
    async with (
        ControlPlane(Settings(isolation="off", backends=claude), home, environ) as plain,
        ControlPlane(Settings(isolation="best_effort", backends=claude), home, environ) as contained,
    ):
        ways = {
            "sdk": sdk(program, url, root, config),
            "in_place": ours(plain, root, mode="pass_through"),
            "staged": ours(contained, root, mode="staged"),
        }
        found: dict[str, list[Figures]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            for name in ways:
                figures = await timed(ways[name])
                if number:  # The first round of each loads what is loaded once.
                    found[name].append(figures)
    return {
        name: dict(zip(("ms", "first_ms", "cpu_ms"), map(list, zip(*rows, strict=True)), strict=True))
        for name, rows in found.items()
    }


def main() -> None:
    program, rounds = sys.argv[1], int(sys.argv[2])
    command = [sys.executable, __file__, "model"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        url = server.stdout.readline().strip()
        made = anyio.run(measure, program, rounds, url, repository())
        server.stdin.close()
    print(json.dumps(made))


if __name__ == "__main__":
    model() if sys.argv[1:] == ["model"] else main()
