"""The state machine of an agent's run, with an agent of a few lines: what a new vendor gives, and what it gets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from backplane.agents.agent import Agent as BaseAgent
from backplane.agents.agent import Ending, failed, silent
from backplane.agents.order import RunSpec
from backplane.agents.reader import EventReader
from backplane.agents.session import AgentRun
from backplane.agents.structured import AnswerSchema
from backplane.contract.canonical import Json
from backplane.contract.capability import NATIVE
from backplane.contract.events import AgentEvent, Failed, Warned
from backplane.dialects.ir import TokenCounts
from backplane.host import EXTENSIONS, Done, Host, HostRun
from backplane.protocol.jsonrpc import Notification
from backplane.runtime.backends import Backend
from backplane.runtime.run import Run
from backplane.upstream.cost import Price
from tests.runs import ended, memory, order, plane, texts

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
PRICE = Price(input=1_000_000, output=1_000_000)
WAITS = "an answer that waits until it is stopped"
NOTHING = ""


class Reader(EventReader):
    """Tells words as messages, and counts two tokens for each of them."""

    def read(self, message: Notification) -> list[AgentEvent]:
        self.spent = self.spent.plus(TokenCounts(input=1, output=1), PRICE)
        return [self._make.message(message.params["text"])]


class Agent(BaseAgent):
    """Has an answer for each turn; it keeps what was said to it."""

    def __init__(self, session: AgentRun, answers: tuple[str, ...]) -> None:
        super().__init__(session, Reader(session.run.now, "/"))
        self.answers = list(answers)
        self.said: list[Json] = []
        self.stopped = anyio.Event()

    async def run(self) -> None:
        await anyio.sleep_forever()

    async def open(self) -> None:
        await self.session.announce("few-1")

    async def say(self, words: Json) -> Ending:
        self.said.append(words)
        answer = self.answers.pop(0)
        if not answer:
            return silent(acted=False)
        await self.session.hear(Notification("text", {"text": answer}))
        if answer == WAITS:
            await self.stopped.wait()
            return failed("backend_unavailable", "it was stopped", stopped=True)
        return Ending(text=answer)

    async def stop(self) -> bool:
        self.stopped.set()
        return True

    def raw(self) -> dict[str, Json]:
        return {"said": list(self.said)}


def few(*answers: str, **spec: Any) -> Backend:
    """A host whose agent gives these answers."""

    async def work(run: HostRun) -> Done:
        session = AgentRun(run, RunSpec(prompt="do it", **spec), lambda session: Agent(session, answers))
        run.on_cancel, run.on_input, run.on_interrupt = session.cancel, session.more, session.interrupt
        return await session.go()

    extensions = (*EXTENSIONS, "input/1", "interrupt/1")
    return memory(work, Host(id="few", capabilities={"streaming": NATIVE}, extensions=extensions))


async def play(home: Path, root: Path, backend: Backend, steer: Callable[[Run], Any] | None = None) -> tuple[Run, Any]:
    """The run and its events; `steer` is called when its agent waits."""
    events = []
    async with plane(home, cancel_grace_s=5.0) as control, control.start(order(root), backend) as run:
        async for event in run:
            events.append(event)
            if steer is not None and WAITS in texts([event]):
                step = steer(run)
                if step is not None:
                    await step
    return run, events


def said(run: Run) -> Any:
    assert run.receipt is not None
    return run.receipt.usage_raw["said"]


async def test_an_answer_ends_the_run_and_its_conversation_is_named(backplane_home: Path, root: Path) -> None:
    run, events = await play(backplane_home, root, few("done"))
    assert ended(run) == ("complete", None, "complete")
    assert (texts(events), said(run)) == (["done"], ["do it"])
    assert [event.ext["session"]["id"] for event in events if event.ext and "session" in event.ext] == ["few-1"]


async def test_an_answer_of_the_wrong_shape_is_asked_for_again(backplane_home: Path, root: Path) -> None:
    run, events = await play(backplane_home, root, few("seven", '{"n": 7}', shape=AnswerSchema(SCHEMA)))
    assert run.receipt is not None
    assert run.receipt.usage_raw["structured_output"] == {"n": 7}
    assert "does not satisfy" in said(run)[1]
    assert any("repair 1" in event.message for event in events if isinstance(event, Warned))


async def test_an_answer_that_never_has_its_shape_fails(backplane_home: Path, root: Path) -> None:
    run, events = await play(backplane_home, root, few("a", "b", "c", "d", shape=AnswerSchema(SCHEMA)))
    assert ended(run)[2] == "failed"
    assert [event.error_code for event in events if isinstance(event, Failed)] == ["validation_failed"]
    assert len(said(run)) == 3


async def test_after_an_interrupt_the_words_that_waited_are_said(backplane_home: Path, root: Path) -> None:
    def steer(run: Run) -> None:
        run.input("rather this")
        run.interrupt()

    run, _ = await play(backplane_home, root, few(WAITS, "heard"), steer)
    assert (ended(run)[2], said(run)) == ("complete", ["do it", "rather this"])


async def test_an_interrupt_without_more_words_is_a_part(backplane_home: Path, root: Path) -> None:
    run, events = await play(backplane_home, root, few(WAITS), Run.interrupt)
    assert ended(run) == ("partial", None, "partial")
    assert not [event for event in events if isinstance(event, Failed)]


async def test_a_cancelled_agent_ends_its_turn_and_keeps_its_last_words(backplane_home: Path, root: Path) -> None:
    run, _ = await play(backplane_home, root, few(WAITS, "never said"), Run.cancel)
    assert (ended(run), said(run)) == (("cancelled", None, "partial"), ["do it"])


async def test_silence_ends_a_turn_that_goes_on(backplane_home: Path, root: Path) -> None:
    run, events = await play(backplane_home, root, few(WAITS, silence_s=1))
    assert ended(run)[2] == "failed"
    assert [event.error_code for event in events if isinstance(event, Failed)] == ["backend_timeout"]


async def test_a_budget_ends_a_turn_that_goes_on(backplane_home: Path, root: Path) -> None:
    run, events = await play(backplane_home, root, few(WAITS, budget_micros=1))
    assert ended(run)[2] == "partial"
    assert [event.error_code for event in events if isinstance(event, Failed)] == ["policy_denied"]


async def test_an_end_without_a_word_is_judged_and_not_believed(backplane_home: Path, root: Path) -> None:
    run, events = await play(backplane_home, root, few(NOTHING))
    assert ended(run)[2] == "failed"
    assert [event.error_code for event in events if isinstance(event, Failed)] == ["backend_unavailable"]
