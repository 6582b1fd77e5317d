"""Runs an agent's program for one order: a folder for its state, the program, the conversation with it, and the end."""

from __future__ import annotations

import importlib
import re
import tempfile
from collections.abc import Sequence
from typing import Final

import anyio

from backplane.agents.rows import AgentRow
from backplane.agents.start import AgentStart
from backplane.errors import BackendError, BackplaneError
from backplane.host import Done, HostRun
from backplane.process.child import Child, open_child
from backplane.process.launch import StartCommand

CANCEL_SHARE: Final = 0.5
"""Share of the run's grace period for the agent to end its turn; the rest is for its program to end."""
STOP_GRACE_S: Final = 1.0
"""Maximum seconds for the program to end after its stdin was closed, before it is killed; a tenth is usual."""
LADDER_S: Final = 0.5
"""Seconds of the program's part of the grace period that are left for the end of this host."""
EXIT_S: Final = 0.5
"""Seconds for a program to end after it closed its output, so that its exit is known."""
STDERR_CHARS: Final = 2000
OF_PROGRAM: Final = frozenset({"backend_crashed", "backend_unavailable", "backend_timeout"})
"""Codes of failures that the program's stderr may explain; for others it is noise, as it is mostly warnings."""

_CONTROLS: Final = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
"""Matches a terminal's escape sequences, and other characters that are no text."""


async def drive(run: HostRun, package: str, row: AgentRow) -> Done:
    """Start the agent's program, run the order, and remove the program and its state.

    Args:
        package: the vendor's package. Its module `start` has `start(begun)`, which completes the environment and
            returns the command; its module `agent`, loaded while the program loads, has the class `Agent`.
        row: a row of the host's table, overridden by a backend's options.
    """
    if run.order.config.max_turns == 0:
        await run.carry("turn", {"stop_reason": "max_turns"}, "the limit of 0 turns (max_turns)")
        return Done(outcome="partial")
    if run.order.config.max_budget_usd == 0:
        await run.error("the limit of 0 USD (max_budget_usd)", "policy_denied")
        return Done(outcome="partial")
    with tempfile.TemporaryDirectory(prefix="backplane-agent-", ignore_cleanup_errors=True) as state:
        begun = AgentStart(run, row, state)
        argv: Sequence[str] = importlib.import_module(f"{package}.start").start(begun)
        async with open_child(StartCommand(argv=tuple(argv), env=begun.env, cwd=begun.root)) as child:
            begun.child = child
            try:
                agent = importlib.import_module(f"{package}.agent").Agent
                run_of = importlib.import_module("backplane.agents.session").AgentRun
                session = run_of(run, agent.spec(begun), lambda session: agent(session, begun))
                run.on_cancel, run.on_input, run.on_interrupt = session.cancel, session.more, session.interrupt
                done: Done = await session.go()
                return done
            except BaseExceptionGroup as group:
                if getattr(first_of(group), "code", "") == "backend_crashed":
                    await child.wait(EXIT_S)  # A program closes its output a moment before it ends.
                raise with_words(group, child) from group
            finally:
                if leaves_something(begun):
                    with anyio.CancelScope(shield=True):
                        await child.stop(grace_s=max(min(run.grace_s * CANCEL_SHARE - LADDER_S, STOP_GRACE_S), 0.1))


def leaves_something(begun: AgentStart) -> bool:
    """Return True if the program must end by itself: it may still write its conversation, or end its MCP servers.

    Everything else in its state is removed with the run, so it is killed; to end by itself would take about 60 ms.
    """
    return bool(begun.is_kept or begun.row.mcp_servers or begun.run.order.abp("mcp_servers"))


def first_of(error: BaseException) -> BaseException:
    """Return the first failure in an exception group and its nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def with_words(group: BaseExceptionGroup[BaseException], child: Child) -> BaseException:
    """Return the first failure, with the program's exit and the end of its stderr if they can be the cause."""
    error = first_of(group)
    if not isinstance(error, BackplaneError):
        return group
    if error.code not in OF_PROGRAM:
        return error
    how = f" ({child.exit.describe()})" if child.exit is not None else ""
    tail = _CONTROLS.sub("", child.stderr_tail.decode("utf-8", "replace")).strip()
    if len(tail) > STDERR_CHARS:
        # Begin at a whole word: the control plane would not recognise half a secret.
        tail = tail[-STDERR_CHARS:].split(maxsplit=1)[-1]
    return BackendError(error.code, f"{error.message}{how}{': ' if tail else ''}{tail}", hint=error.hint)
