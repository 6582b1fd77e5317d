"""A host whose runs are an agent's program each: what is started for an order, and who speaks with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from backplane.host import Done, Given, Host, HostRun, main

if TYPE_CHECKING:
    from backplane.agents.session import AgentRun
    from backplane.process.child import Child

Started = tuple[tuple[str, ...], dict[str, str]]
"""A command and its environment."""

Start = Callable[[Given, str], Started]
"""Says what is started for an order, with an empty folder for its state."""


class BegunProgram(msgspec.Struct, frozen=True):
    """The place of an agent's program at work: the folder for its state, and its environment."""

    state: str
    env: dict[str, str]


Speak = Callable[[HostRun, "Child", BegunProgram], "AgentRun"]
"""Makes the run with a program that was started."""

Row = TypeVar("Row", bound=msgspec.Struct)
"""A row of a host's table, with a backend's options over it."""


def serve(
    host: Host,
    options: Row,
    start: Callable[[Row, Given, str], Started],
    speak: Callable[[Row, HostRun, Child, BegunProgram], AgentRun],
) -> None:
    """Be a host whose runs are an agent's program each.

    Args:
        options: given to both of the others.
        start: see `Start`; `speak` likewise.
    """

    async def work(run: HostRun) -> Done:
        from backplane.agents.program import drive  # The hello does not wait for it.

        return await drive(run, functools.partial(start, options), functools.partial(speak, options))

    main(host, work)
