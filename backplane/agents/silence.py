"""Ends the work of an agent that has been silent for too long: a stream with only keep-alives hangs an agent."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import anyio

from backplane.process.aio import SECOND_LOOK_S

if TYPE_CHECKING:
    from backplane.agents.session import AgentRun

TOOL_S_MAX: Final = 3600.0
"""Seconds that one tool may take before the run times out: a test suite, or a sub-agent, may run an hour."""
SIGN_OF_LIFE_S: Final = 60.0
"""Seconds between two events for a tool without output: a control plane ends a silent run after five minutes."""


class Silence:
    """Cancel scope of the work, cancelled after too long a silence."""

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

    async def watch(self) -> None:
        """Cancel the scope after too long a silence; once a minute, report a tool that works without output."""
        session, reported_s, passed, due_s = self._session, 0.0, False, self.heard_s
        while self._silence_s:
            now_s = time.monotonic()
            silent_s, at_work = now_s - self.heard_s, session.agent.reader.at_work
            left_s = (TOOL_S_MAX if at_work or session.is_asking else self._silence_s) - silent_s
            if left_s <= 0 and passed:
                self.broken = True
                self.scope.cancel()
                return
            passed = left_s <= 0
            if passed:  # If this process was suspended, messages that came in time may still be unread: look twice.
                await anyio.sleep(max(SECOND_LOOK_S, now_s - due_s))
                continue
            reported_s = 0.0 if silent_s < SIGN_OF_LIFE_S else reported_s
            if at_work and silent_s - reported_s >= SIGN_OF_LIFE_S:
                reported_s = silent_s
                await session.run.carry("output", {"stream": "stdout", "text": ""}, "a tool is still at work")
            wait_s = min(max(left_s, 0.1), SIGN_OF_LIFE_S / 4)
            due_s = time.monotonic() + wait_s
            await anyio.sleep(wait_s)
