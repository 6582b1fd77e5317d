"""What every run with an agent has in common: its silence bounded, its end in order, its messages kept, its answer's
shape checked, a denied call put on record, a person asked.

What the agent says and how it is told anything is not known here.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec

from backplane.agents.program import CANCEL_SHARE
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent, carry
from backplane.host import HostRun
from backplane.process.once import SECOND_LOOK_S

if TYPE_CHECKING:
    from backplane.tools.structured import Shape

TOOL_S_MAX: Final = 3600.0
"""For one tool: a test suite may take an hour, and a sub-agent works longer than any command."""
SIGN_OF_LIFE_S: Final = 60.0
"""Between two words about a tool that works in silence: a control plane gives up a silent run after five minutes."""
REPAIRS_MAX: Final = 2
"""Tries to correct an answer of the wrong shape; who needs a third does not find it."""
WORDS_CHARS_MAX: Final = 2000
"""Of an agent's own words for a failure."""
WORDLESS: Final = "the agent ended without a word"
AGAIN: Final = "This does not satisfy the JSON Schema:\n{fault}\nAnswer with the corrected JSON value alone."
"""To an agent that answers in words."""


class Silence:
    """A scope that ends when nothing is heard for too long: a stream that is kept alive hangs an agent for ever.

    Args:
        silence_s: how long the agent may say nothing while no tool runs and nobody is asked.
        at_work: whether a tool runs.
        asking: whether a question of the agent is open.
    """

    def __init__(
        self, run: HostRun, silence_s: int, *, at_work: Callable[[], bool], asking: Callable[[], bool]
    ) -> None:
        self._run, self._silence_s, self._at_work, self._asking = run, silence_s, at_work, asking
        self.scope = anyio.CancelScope()
        self.broken = False
        """Whether it was the silence that ended the scope."""
        self.heard()

    def heard(self) -> None:
        """The agent gave a sign."""
        self._heard_s = time.monotonic()

    @property
    def words(self) -> str:
        return f"nothing was heard of the agent for {self._silence_s} s"

    async def watch(self) -> None:
        """Wait for too much of it; told of a tool that works in silence meanwhile."""
        told_s, passed, due_s = 0.0, False, self._heard_s
        while True:
            now_s = time.monotonic()
            silent_s = now_s - self._heard_s
            busy = self._at_work() or self._asking()
            left_s = (TOOL_S_MAX if busy else self._silence_s) - silent_s
            if left_s <= 0 and passed:
                self.broken = True
                self.scope.cancel()
                return
            passed = left_s <= 0
            if passed:  # What came in time may not be read yet, where this process was stopped.
                await anyio.sleep(max(SECOND_LOOK_S, now_s - due_s))
                continue
            told_s = 0.0 if silent_s < SIGN_OF_LIFE_S else told_s
            if self._at_work() and silent_s - told_s >= SIGN_OF_LIFE_S:
                told_s = silent_s
                await self._run.carry("output", {"stream": "stdout", "text": ""}, "a tool is still at work")
            wait_s = min(max(left_s, 0.1), SIGN_OF_LIFE_S / 4)
            due_s = time.monotonic() + wait_s
            await anyio.sleep(wait_s)


async def wind_up(run: HostRun, stop: Callable[[], Awaitable[None]] | None, over: anyio.Event) -> None:
    """End a run in order: the agent first, and when it does not, its program.

    Args:
        stop: asks the agent to end its turn; None when there is none.
        over: set when the run has ended.
    """
    with anyio.move_on_after(run.grace_s * CANCEL_SHARE):
        if stop is not None:
            await stop()
            await over.wait()
            return
    run.scope.cancel()


async def answered(
    run: HostRun, shape: Shape | None, say: Callable[[str | None], Awaitable[str | None]]
) -> tuple[Json, str | None]:
    """Have the agent work, and its answer corrected where it has the wrong shape.

    Args:
        say: says the order, or what is wrong with the answer, and waits for the end of the turn; its text is the
            answer, None where there is none that could be looked at.

    Returns:
        The value, and why it is not to be had after all repairs; without a shape neither.
    """
    fault: str | None = None
    for repair in range(REPAIRS_MAX + 1):
        if fault is not None:
            await run.warn(f"the answer does not match the output schema, repair {repair}: {fault}")
        text = await say(fault)
        if shape is None or text is None:
            return None, None
        value, fault = shape.read(text)
        if fault is None:
            return value, None
    return None, f"the answer still does not match the output schema after {REPAIRS_MAX} repairs: {fault}"


def passed_through(run: HostRun, events: list[AgentEvent], message: Json, line: bytes, kind: str) -> list[AgentEvent]:
    """The events with the agent's own message on the first; its text, too, where that cannot be had from the value."""
    run.mode = "passthrough"
    raw: dict[str, Any] = {"raw_message": message}
    if msgspec.json.encode(message) != line.strip():
        raw["raw_line"] = line.strip().decode("utf-8", "replace")
    if not events:
        first = carry("raw_message", message, ts=run.now(), message=f"a message of the kind {kind}")
        return [msgspec.structs.replace(first, ext=raw)]
    ext = events[0].ext if isinstance(events[0].ext, dict) else {}
    return [msgspec.structs.replace(events[0], ext={**ext, **raw}), *events[1:]]


async def record_denied(run: HostRun, name: str, input: Json) -> None:
    """Ask above about a call that the policy forbids: only so it is on record there that it did not run."""
    await run.pass_on(
        {"kind": "tool", "name": name, "input": input, "cwd": run.order.workspace.root, "default": "deny"}
    )


async def person(run: HostRun, question: str, options: tuple[Any, ...]) -> tuple[bool, str]:
    """Put a question of the agent to a person: whether there was an answer, and what the agent is told."""
    verdict = await run.ask_user(question, options=options)
    if verdict.decision == "deny" and not verdict.text:
        return False, f"no answer: {verdict.reason or 'nobody is there'}; decide by yourself"
    return True, verdict.text or verdict.decision


def command_of(input: Json) -> str | None:
    """The command in a tool's input, where there is one."""
    command = input.get("command") if isinstance(input, dict) else None
    return command if isinstance(command, str) else None
