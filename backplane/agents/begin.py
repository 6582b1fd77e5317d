"""The start of an agent's program, without an event loop: it loads while ours does, before its run or in it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import msgspec

from backplane.host import Done, Early, Given, Host, HostRun, main
from backplane.process.launch import Launched, StartCommand, launch

if TYPE_CHECKING:
    from backplane.agents.session import AgentRun
    from backplane.process import Child

Started = tuple[tuple[str, ...], dict[str, str]]
"""A command and its environment."""

Start = Callable[[Given, str], Started]
"""Says what is started for an order, with an empty folder for its state."""

Open = Callable[[Given, dict[str, str]], bytes]
"""What is said to the program first, with its environment, where that does not depend on its answers; or nothing."""


Speak = Callable[[HostRun, "Child", "BegunProgram"], "AgentRun"]
"""Makes the run with a program that was started."""


Row = TypeVar("Row", bound=msgspec.Struct)
"""A row of a host's table, with a backend's options over it."""


class BegunProgram(msgspec.Struct, frozen=True):
    """An agent's program at work, and its state's folder; `driven.program` takes it over."""

    state: str
    env: dict[str, str]
    launched: Launched
    said: bytes = b""
    """What is on its way to it already."""

    async def leave(self) -> None:
        """End the program of a run that never came to it."""
        from backplane.agents.program import leave

        await leave(self)


def begin(run: Given, start: Start, open: Open | None = None, *, alone: bool = False) -> BegunProgram:
    """Start the program that `start` names, in the order's folder, and say what `open` says.

    Args:
        alone: see `launch`.

    Raises:
        BackplaneError: what `start` says; `sidecar_spawn_failed`.
    """
    state = _folder()
    try:
        argv, env = start(run, state)
        command = StartCommand(argv=argv, env=env, cwd=run.order.workspace.root)
        words = open(run, env) if open is not None else b""
        launched = launch(command, alone=alone)
        return BegunProgram(state, env, launched, _say(launched.pipes[0], words))
    except BaseException:
        import shutil

        shutil.rmtree(state, ignore_errors=True)
        raise


def _say(stdin: int, words: bytes) -> bytes:
    """Write as much as the pipe takes now; what that was."""
    try:
        return words[: os.write(stdin, words)] if words else b""
    except OSError:  # It has ended already, or takes nothing now.
        return b""


def serve(
    host: Host,
    options: Row,
    start: Callable[[Row, Given, str], Started],
    speak: Callable[[Row, HostRun, Child, BegunProgram], AgentRun],
    open: Callable[[Row, Given, dict[str, str]], bytes] | None = None,
) -> None:
    """Be a host whose runs are an agent's program each, begun before the event loop is loaded.

    Args:
        options: given to each of the others.
        start: see `Start`; `speak` and `open` likewise.
    """
    begins = functools.partial(start, options)

    async def work(run: HostRun) -> Done:
        from backplane.agents.program import drive

        return await drive(run, begins, functools.partial(speak, options))

    main(host, work, early=early(begins, functools.partial(open, options) if open is not None else None))


def early(start: Start, open: Open | None = None) -> Early:
    """What does the same before the event loop is loaded; for an order that starts nothing it begins nothing."""

    def begin_early(run: Given) -> BegunProgram | None:
        return None if run.order.config.max_turns == 0 else begin(run, start, open, alone=True)

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
