"""The start of an agent's program, without an event loop: it loads while ours does, before its run or in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from backplane.process.launch import Command, Launched, launch
from backplane.sidecar import Early, Given

Started = tuple[tuple[str, ...], dict[str, str]]
"""A command and its environment."""

Start = Callable[[Given, Path], Started]
"""Says what is started for an order, with an empty folder for its state."""


class Program(msgspec.Struct, frozen=True):
    """An agent's program at work, and its state's folder; `driven.program` takes it over."""

    state: Path
    env: dict[str, str]
    launched: Launched

    async def leave(self) -> None:
        """End the program of a run that never came to it."""
        from backplane.driven.program import leave

        await leave(self)


def begin(run: Given, start: Start, *, alone: bool = False) -> Program:
    """Start the program that `start` names, in the order's folder.

    Args:
        alone: see `launch`.

    Raises:
        BackplaneError: what `start` says; `sidecar_spawn_failed`.
    """
    state = Path(_folder())
    try:
        argv, env = start(run, state)
        command = Command(argv=argv, env=env, cwd=run.order.workspace.root)
        return Program(state, env, launch(command, alone=alone))
    except BaseException:
        import shutil

        shutil.rmtree(state, ignore_errors=True)
        raise


def early(start: Start) -> Early:
    """What does the same before the event loop is loaded; for an order that starts nothing it begins nothing."""

    def begin_early(run: Given) -> Program | None:
        return None if run.order.config.max_turns == 0 else begin(run, start, alone=True)

    return begin_early


def _folder() -> str:
    # Without the module for it, which loads ten others.
    for given in (os.environ.get("TMPDIR", ""), "/tmp"):
        path = os.path.join(given, f"backplane-agent-{os.urandom(8).hex()}")
        with suppress(OSError):
            if os.path.isabs(given):
                os.mkdir(path, 0o700)
                return path
    import tempfile

    return tempfile.mkdtemp(prefix="backplane-agent-")
