"""An agent's program around its one run: a folder for its state, the child, its orderly end, nothing left of either.

What is said to it while it runs is the run's own affair.
"""

from __future__ import annotations

import importlib
import re
import tempfile
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec

from backplane.errors import BackendError, BackplaneError
from backplane.host import Done, HostRun
from backplane.process.child import Child, open_child
from backplane.process.launch import StartCommand

if TYPE_CHECKING:
    from backplane.agents.session import AgentRun

Started = tuple[tuple[str, ...], dict[str, str]]
"""A command and its environment."""

CANCEL_SHARE: Final = 0.5
"""Share of the grace for the agent to end its turn; the rest is for the program."""
STOP_GRACE_S: Final = 1.0
"""Seconds for the program to end after its stdin was closed: a tenth of that is usual."""
LADDER_S: Final = 0.5
EXIT_S: Final = 0.5
"""Seconds for a program to end after it closed its output, so that its exit is known."""
STDERR_CHARS: Final = 2000
OF_PROGRAM: Final = frozenset({"backend_crashed", "backend_unavailable", "backend_timeout"})
"""Failures that the program's own words may explain; to any other they are noise, as most of them are warnings."""

_CONTROLS: Final = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
"""A terminal's colours, titles and moves, and what else is no text."""


class BegunProgram(msgspec.Struct, frozen=True):
    """The place of an agent's program at work: the folder for its state, and its environment."""

    state: str
    env: dict[str, str]


async def drive(run: HostRun, package: str, options: Any) -> Done:
    """Start the agent's program, run the order, and leave nothing of either.

    Args:
        package: the vendor's. Its `start` has `start(options, run, state)`, which says what is started, with an empty
            folder for its state; its `agent`, loaded while the program loads, has the class `Agent`, whose
            `speak(options, run, child, begun)` makes the run with it.
        options: a row of the host's table, with a backend's options over it.
    """
    if run.order.config.max_turns == 0:
        await run.carry("turn", {"stop_reason": "max_turns"}, "the limit of 0 turns (max_turns)")
        return Done(outcome="partial")
    if run.order.config.max_budget_usd == 0:
        await run.error("the limit of 0 USD (max_budget_usd)", "policy_denied")
        return Done(outcome="partial")
    with tempfile.TemporaryDirectory(prefix="backplane-agent-", ignore_cleanup_errors=True) as state:
        started: Started = importlib.import_module(f"{package}.start").start(options, run, state)
        argv, env = started
        async with open_child(StartCommand(argv=argv, env=env, cwd=run.order.workspace.root)) as child:
            try:
                agent = importlib.import_module(f"{package}.agent").Agent
                session: AgentRun = agent.speak(options, run, child, BegunProgram(state, env))
                run.on_cancel, run.on_input, run.on_interrupt = session.cancel, session.more, session.interrupt
                return await session.go()
            except BaseExceptionGroup as group:
                if getattr(first_of(group), "code", "") == "backend_crashed":
                    await child.wait(EXIT_S)  # Its output is closed a moment before it has ended.
                raise with_words(group, child) from group
            finally:
                with anyio.CancelScope(shield=True):
                    await child.stop(grace_s=max(min(run.grace_s * CANCEL_SHARE - LADDER_S, STOP_GRACE_S), 0.1))


def first_of(error: BaseException) -> BaseException:
    """Return the failure that a group was made for."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def with_words(group: BaseExceptionGroup[BaseException], child: Child) -> BaseException:
    """The first failure, with the agent's exit and last words where they can be its cause."""
    error = first_of(group)
    if not isinstance(error, BackplaneError):
        return group
    if error.code not in OF_PROGRAM:
        return error
    how = f" ({child.exit.describe()})" if child.exit is not None else ""
    tail = _CONTROLS.sub("", child.stderr_tail.decode("utf-8", "replace")).strip()
    if len(tail) > STDERR_CHARS:
        # From a whole word on: half a secret would not be known for one above us.
        tail = tail[-STDERR_CHARS:].split(maxsplit=1)[-1]
    return BackendError(error.code, f"{error.message}{how}{': ' if tail else ''}{tail}", hint=error.hint)
