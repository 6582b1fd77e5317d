"""Conversations that are cut off in the middle of a turn and go on with another backend, by the agents of `handovers`.

Each has up to three cuts, at every kind of event and in every way, and then a turn to its end. Nothing is done twice;
each order has all that was said before, or the session names what is missing. `HANDOVERS=200` before the command tries
so many conversations; the number of one is its seed: `-k 'asyncio-17]'` or the like repeats it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
from msgspec.structs import replace

from backplane.config import Limits, Settings
from backplane.contract.approval import Decision
from backplane.contract.conversation import AgentMessage, SessionTurn, ToolResultMessage, UserMessage
from backplane.contract.events import (
    Approval,
    AssistantDelta,
    AssistantMessage,
    Reasoning,
    ToolCall,
    ToolResult,
)
from backplane.contract.receipt import Receipt
from backplane.contract.work import Mode, PolicyProfile
from backplane.providers import ProviderRegistry, Session, SessionConfig, TurnOutcome
from backplane.providers.turns import NOT_CARRIED
from backplane.receipts.store import Store
from backplane.runtime.backends import ProcessBackend
from tests.all.doors import handovers
from tests.peers import PYTHON

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

CONVERSATIONS: Final = int(os.environ.get("HANDOVERS", "20"))
EVENTS: Final = (
    "start", "session", "reasoning", "delta", "message", "question", "ask", "call", "effect", "command", "file",
    "result", "warning", "end",
)  # fmt: skip
"""Kinds of event after which a turn is cut off."""
WAYS: Final = ("die", "interrupt", "fail", "leave", "close", "cancel", "timeout", "kill")
"""The agent dies or fails; the program interrupts, leaves, closes, cancels or is killed; the run's time is over."""
FORMS: Final = tuple(handovers.FORMS)


class Talk:
    """One conversation: its folder, its session's id, and what has been seen of it."""

    def __init__(self, seed: int, home: Path, folder: Path) -> None:
        self.random, self.home, self.folder = random.Random(seed), home, folder
        self.root = folder / "root"
        self.root.mkdir()
        self.mode: Mode = self.random.choice(("staged", "staged", "pass_through"))
        self.asks = self.random.random() < 0.4
        self.is_silent = False
        """Approvals are not answered: the turn is cut off while one waits."""
        self.id = ""
        self.story = list[Any]([self.mode])

    def backend(self, form: str) -> ProcessBackend:
        argv = (*PYTHON, str(Path(handovers.__file__)), form, str(self.folder))
        return ProcessBackend(id=form, argv=argv, limits=Limits(idle_s=60, cancel_grace_s=2))

    async def open(self, registry: ProviderRegistry, form: str) -> Session:
        """Begin the session, or go on with it over the backend of this form."""
        provider, config = registry.register(self.backend(form)), SessionConfig(on_ask="stream")
        if not self.id:
            policy = PolicyProfile(require_approval_for=("work",)) if self.asks else None
            config = replace(config, root=str(self.root), mode=self.mode, policy=policy)
            session = await provider.create_session(config)
        elif self.random.random() < 0.2:
            session = await provider.fork_session(self.id, config=config)
        else:
            session = await provider.resume(self.id, config)
        self.id = session.id
        return session

    async def say(self, session: Session, words: str, **given: Any) -> TurnOutcome:
        """Send a message, and allow everything that is asked."""
        async for event in session.send_message(words, **given):
            if isinstance(event, Approval) and session.awaits_answer(event.body["id"]):
                if self.is_silent:
                    (self.folder / "hangs").touch()
                else:
                    session.answer(event.body["id"], Decision("allow"))
        assert isinstance(event, TurnOutcome)
        return event

    def cut_at(self, event: str, way: str) -> None:
        self.is_silent = event == "question" and self.asks
        by_host = way if way in ("die", "fail") else "hang"
        count = self.random.randint(1, 3) if event not in ("start", "session", "reasoning", "message", "end") else 1
        count = min(count, 2) if event == "delta" else count
        (self.folder / "cut").write_text(json.dumps({"event": event, "count": count, "way": by_host}))
        (self.folder / "hangs").unlink(missing_ok=True)

    async def hangs(self) -> None:
        """Wait until the agent has stopped, or has passed the event."""
        while not (self.folder / "hangs").exists():
            await anyio.sleep(0.01)

    def orders(self) -> list[dict[str, Any]]:
        path = self.folder / "orders"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def receipts(self) -> dict[str, Receipt]:
        with Store.open(self.home, readonly=True) as kept:
            return {row.run_id: kept.load(row.run_id) for row in kept.rows()}


async def cut_turn(talk: Talk, registry: ProviderRegistry, session: Session, way: str, words: str) -> None:
    """Send a message, and end the turn in this way once the agent stops; the turn may also come to its end."""
    with anyio.fail_after(60):
        if way in ("die", "fail"):
            await talk.say(session, words)
        elif way == "timeout":
            await talk.say(session, words, timeout=3.0)
        else:
            async with anyio.create_task_group() as tasks:
                scope, over = anyio.CancelScope(), anyio.Event()

                async def read() -> None:
                    with scope:
                        await talk.say(session, words)
                    over.set()

                async def act() -> None:
                    await talk.hangs()
                    if way == "interrupt":
                        await session.interrupt()
                    elif way == "close":
                        await session.close()
                    else:
                        scope.cancel()  # The next call, or the end of the session, ends the turn.
                    await over.wait()
                    tasks.cancel_scope.cancel()

                tasks.start_soon(act)
                await read()
                tasks.cancel_scope.cancel()
            if way == "cancel":
                await session.close()


KILLED: Final = """
import os, sys, anyio
from collections.abc import Sequence
from pathlib import Path
from backplane.config import Settings
from backplane.providers import ProviderRegistry, SessionConfig
from backplane.runtime.backends import ProcessBackend

async def main(home, root, mode, id, form, folder, words, *argv):
    async with ProviderRegistry(Settings(isolation="off"), home) as registry:
        provider = registry.register(ProcessBackend(id=form, argv=argv))
        config = SessionConfig(root=root, mode=mode, on_ask=lambda asked: asked.allow())
        session = await (provider.resume(id) if id else provider.create_session(config))
        async with session:
            print(session.id, flush=True)
            await session.run(words)

anyio.run(main, *sys.argv[1:])
"""


async def kill_turn(talk: Talk, form: str, words: str) -> None:
    """Run a turn in a program of its own, and kill that once the agent stops."""
    given = (str(talk.home), str(talk.root), talk.mode, talk.id, form, str(talk.folder), words)
    argv = [*PYTHON, "-c", KILLED, *given, *talk.backend(form).argv]
    program = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert program.stdout is not None
    with anyio.fail_after(60):
        while not (talk.folder / "hangs").exists() and program.poll() is None:
            await anyio.sleep(0.01)
    program.send_signal(signal.SIGKILL)
    talk.id = talk.id or program.stdout.readline().strip()
    program.wait()
    program.stdout.close()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("seed", range(CONVERSATIONS))
async def test_a_conversation_that_is_cut_off_goes_on_and_repeats_nothing(
    seed: int, backplane_home: Path, tmp_path: Path
) -> None:
    talk = Talk(seed, backplane_home, tmp_path)
    settings = Settings(isolation="off")
    cuts = talk.random.randint(1, 3)
    for number in range(cuts):
        # The first cut of the conversations goes through all events and ways in turn.
        event = EVENTS[seed % len(EVENTS)] if number == 0 else talk.random.choice(EVENTS)
        way = WAYS[(seed + seed // len(EVENTS)) % len(WAYS)] if number == 0 else talk.random.choice(WAYS)
        form = talk.random.choice(FORMS)
        if event == "question":
            way = talk.random.choice(("interrupt", "leave", "close", "cancel"))
        talk.cut_at(event, way)
        talk.story.append((form, event, way))
        words = f"words {number}: do the work"
        if way == "kill":
            await kill_turn(talk, form, words)
            continue
        async with ProviderRegistry(settings, talk.home) as registry:
            session = await talk.open(registry, form)
            await cut_turn(talk, registry, session, way, words)
            if way == "leave" and talk.random.random() < 0.5:
                await session.handover(registry.register(talk.backend(talk.random.choice(FORMS))))
            await session.close()
    (talk.folder / "cut").unlink(missing_ok=True)
    talk.is_silent = False
    form = talk.random.choice(FORMS)
    talk.story.append((form, "", ""))
    async with ProviderRegistry(settings, talk.home) as registry:
        session = await talk.open(registry, form)
        async with session:
            (await talk.say(session, "last words: do the work")).check()
            check(talk, session)


def check(talk: Talk, session: Session) -> None:
    """Compare the history with the receipts, and each order with the turns before it."""
    story, file, receipts = talk.story, session.file, talk.receipts()
    effects = (talk.folder / "effects").read_text().split()
    assert sorted(effects) == [str(step) for step in range(handovers.STEPS)], (story, effects)
    orders = {order["run"]: order for order in talk.orders()}
    for number, turn in enumerate(file.turns):
        assert turn.stop_reason is not None, story
        if turn.run_id in receipts:
            assert_complete(turn, receipts[turn.run_id], story)
        if turn.run_id in orders:
            assert_told(file.turns[:number], orders[turn.run_id], file.losses, story)


def assert_complete(turn: SessionTurn, receipt: Receipt, story: object) -> None:
    """Check that all words, calls and results of the run's receipt are in the history."""
    texts = "\n".join(message.content for message in turn.messages if isinstance(message, AgentMessage))
    calls = [call.arguments for one in turn.messages if isinstance(one, AgentMessage) for call in one.tool_calls]
    results = [message.content for message in turn.messages if isinstance(message, ToolResultMessage)]
    thoughts = [part.text for one in turn.messages if isinstance(one, AgentMessage) for part in one.thinking]
    pieces = ""
    for event in receipt.trace:
        if isinstance(event, AssistantMessage):
            assert event.text in texts, (story, turn, event)
            pieces = ""
        elif isinstance(event, Reasoning):
            assert event.reasoning in thoughts, (story, turn, event)
        elif isinstance(event, AssistantDelta):
            pieces += event.text
    assert pieces in texts, (story, turn, pieces)
    reported = [event.input for event in receipt.trace if isinstance(event, ToolCall)]
    allowed = [event.input for event in receipt.trace if isinstance(event, Approval) and event.input not in reported]
    assert calls in (reported, [*reported, *allowed]), (story, turn)
    assert results == [event.output for event in receipt.trace if isinstance(event, ToolResult)], (story, turn)


def assert_told(before: Sequence[SessionTurn], order: dict[str, Any], losses: Sequence[str], story: object) -> None:
    """Check that an order has all that was said before it, or that the losses name what is missing."""
    named, whole = " ".join(losses), json.dumps(order)
    for message in [message for turn in before for message in turn.messages]:
        if isinstance(message, UserMessage):
            assert message.content in whole, (story, message, order)
        if isinstance(message, ToolResultMessage):
            assert message.content in whole or int(message.content.split()[1]) in order["done"], (story, message)
        if isinstance(message, AgentMessage):
            for text in filter(None, message.content.split("\n\n")):
                assert text in whole, (story, text, order)
            for block in message.thinking:
                assert block.text in whole or "thinking" in named, (story, block)
                if block.signature is not None:
                    assert block.signature in whole or "signatures" in named or "proofs" in named, (story, block)
    ids = [call["id"] for message in order["history"] or () for call in message.get("tool_calls", ())]
    assert len(ids) == len(set(ids)), (story, ids)
    missing = {f"made-{step}" for step in order["done"]} - set(order["files"])
    if missing:
        assert NOT_CARRIED in whole or "the changes of run" in named, (story, missing, losses)
