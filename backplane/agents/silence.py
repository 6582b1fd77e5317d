"""Ends the work of an agent that has been silent for too long, for example on a stream that has only keep-alives."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import anyio

from backplane.process.aio import SECOND_LOOK_S

if TYPE_CHECKING:
    from backplane.agents.session import AgentRun

TOOL_S_MAX: Final = 3600.0
"""Seconds of silence while a tool runs or a question is open; then the run times out. Tests may run for an hour."""
SIGN_OF_LIFE_S: Final = 60.0
"""Seconds between two events for a tool without output: a control plane ends a silent run after five minutes."""


class Silence:
    """Cancels the agent's work, which runs in its cancel scope, after too long a silence."""

    def __init__(self, session: AgentRun) -> None:
        self._session, self._silence_s = session, session.spec.silence_s
        self.scope = anyio.CancelScope()
        self.broken = False
        """True if the silence ended the scope."""
        self.heard_s = time.monotonic()
        """Time of the last sign of life, by the monotonic clock."""

    def heard(self) -> None:
        """Record a sign of life from the agent."""
        self.heard_s = time.monotonic()

    @property
    def words(self) -> str:
        return f"nothing was heard of the agent for {self._silence_s} s"

    def _left_s(self) -> float:
        is_busy = self._session.agent.reader.at_work or self._session.is_asking
        return self.heard_s + (TOOL_S_MAX if is_busy else self._silence_s) - time.monotonic()

    async def watch(self) -> None:
        """Cancel the scope after too long a silence; once a minute, report a tool that works without output."""
        reported_s = self.heard_s
        while self._silence_s:
            await anyio.sleep(min(max(self._left_s(), 0.1), SIGN_OF_LIFE_S / 4))
            if self._left_s() <= 0:
                # If this process was suspended, messages that came in time may still be unread: look twice.
                await anyio.sleep(SECOND_LOOK_S)
                if self._left_s() <= 0:
                    self.broken = True
                    self.scope.cancel()
                    return
            reported_s, now_s = max(reported_s, self.heard_s), time.monotonic()
            if self._session.agent.reader.at_work and now_s - reported_s >= SIGN_OF_LIFE_S:
                reported_s = now_s
                await self._session.run.carry("output", {"stream": "stdout", "text": ""}, "a tool is still at work")
