"""Runs an order on an agent of a few lines, behind the shipped host that drives the real one."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import backplane
from backplane.config import BackendSettings, Settings
from backplane.contract.events import AgentEvent, carried
from backplane.contract.work import WorkOrder
from backplane.runtime.hooks import Hook
from backplane.runtime.run import Run


async def play(
    folder: Path,
    host: str,
    agent: str,
    *,
    hooks: Sequence[Hook] = (),
    options: dict[str, Any] | None = None,
    **order: Any,
) -> tuple[Run, list[AgentEvent]]:
    """Run an order and gather its events.

    Args:
        agent: the program's text, with its first line.
        options: of the host, beside the program.
    """
    program = folder / "agent"
    program.write_text(agent)
    program.chmod(0o755)
    (folder / "work").mkdir(exist_ok=True)
    declared = BackendSettings(host=host, options={"program": str(program), "silence_s": 30, **(options or {})})
    settings = Settings(backends={"by-hand": declared}, isolation="off")
    work, events = WorkOrder("work", **order), []
    async with backplane.start(work, backend="by-hand", root=folder / "work", settings=settings, hooks=hooks) as run:
        async for event in run:
            events.append(carried(event))
    return run, events


def steps(script: str, columns: int) -> str:
    """A script as it stands in an agent's text, so many columns in."""
    return textwrap.indent(script.strip(), " " * columns)
