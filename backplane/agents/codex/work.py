"""One run with such an agent, from the first word to the judged end.

Its questions are put to the control plane, its items told, its silence bounded, the shape of its answer checked.
Starting the program and saying the order in its words are a host's affair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from backplane.agents.codex import answers
from backplane.agents.codex.client import Client
from backplane.agents.codex.failure import code_of, plain
from backplane.agents.codex.hooked import Hooked, trust
from backplane.agents.codex.story import Ending, Story
from backplane.agents.codex.verdicts import Verdicts
from backplane.agents.session import (
    AGAIN,
    WORDLESS,
    WORDS_CHARS_MAX,
    Silence,
    answered,
    passed_through,
    person,
    wind_up,
)
from backplane.contract.canonical import Json
from backplane.errors import BackendError, ConfigError
from backplane.host import Done, HostRun
from backplane.protocol.jsonrpc import METHOD_NOT_FOUND, Fault, Malformed, Notification, Received, Request
from backplane.upstream.cost import MICROS, Price, price_of

if TYPE_CHECKING:
    from backplane.tools.structured import Shape


class Ways(msgspec.Struct, frozen=True):
    """What a host says of its agent and of this run."""

    prompt: str
    open: tuple[str, dict[str, Any]]
    """The call that opens the thread."""
    turn: dict[str, Any]
    """Members of every turn."""
    session: dict[str, Any]
    """What is told of the conversation beside its id."""
    silence_s: int
    """How long it may say nothing while no tool runs."""
    shape: Shape | None
    price: Price | None
    """As configured; None where nothing is."""
    listed: bool
    """Whether the model's list price holds: it is its vendor's own service."""
    budget_micros: int | None
    hooks: str | None = None
    """Where the agent's hooks ask; None where it has none of ours."""
    shows: bool = False
    """Whether results are to be seen before the model sees them."""


class Turn:
    """One run: the agent's program, its thread, and what it is asked in it."""

    def __init__(self, run: HostRun, ways: Ways, write_fd: int, read_fd: int, said: bytes = b"") -> None:
        self.run, self.ways = run, ways
        self.root = run.order.workspace.root
        self.story: Story = Story(run.now, self.root, shows=ways.shows)
        self.verdicts = Verdicts(run, self.story, shows=ways.shows, change=self._change)
        self.client: Client = Client(
            write_fd, read_fd, hear=self.hear, answer=self.answer, watch=self.watch_line, said=said
        )
        self.raw = run.order.abp("mode") == "passthrough"
        self.line = b""
        self.model = ""
        self.limit: tuple[str, str] | None = None
        """The limit that ends the run, as a reason and in words."""
        self.cancelled = self.interrupted = False
        self.waiting: list[str] = []
        """Words of the user that came after a turn had ended."""
        self.changed, self.over = anyio.Event(), anyio.Event()
        self.hooked = Hooked(ways.hooks, self.hook) if ways.hooks is not None else None
        self.silence = Silence(run, ways.silence_s, at_work=lambda: bool(self.story.calls), asking=lambda: self._asking)

    # What the agent says ----------------------------------------------------------------------------------------------

    async def watch_line(self, line: bytes, received: Received) -> None:
        """Keep what is not heard: in passthrough every message of the agent, else a line that is none."""
        self.line = line
        if isinstance(received, Malformed):
            await self.run.warn(f"the agent wrote a line that is no message: {received.evidence!r}")
        elif self.raw and not isinstance(received, Notification):
            kind = received.method if isinstance(received, Request) else "an answer"
            for event in passed_through(self.run, [], msgspec.json.decode(line), line, kind):
                await self.run.emit(event)

    async def hear(self, method: str, params: dict[str, Any]) -> None:
        """Tell what the agent told."""
        if method != "error" or params.get("willRetry") is not True:
            # Trying again in vain is no sign of life.
            self.silence.heard()
        events = self.story.take(method, params)
        if self.raw:
            events = passed_through(self.run, events, msgspec.json.decode(self.line), self.line, method)
        for event in events:
            await self.run.emit(event)
        await self._look_at_limits()
        self._tell_change()

    async def _look_at_limits(self) -> None:
        limit = self._limit()
        if limit is not None and self.limit is None:
            self.limit = limit
            self.silence.scope.cancel()

    def _limit(self) -> tuple[str, str] | None:
        story, turns_max, budget = self.story, self.run.order.config.max_turns, self.ways.budget_micros
        if budget is not None and story.answers and story.micros is None:
            return "budget", "what this costs is not known any more, so the budget cannot be held (max_budget_usd)"
        if budget is not None and story.micros is not None and story.micros > budget:
            return "budget", f"{story.micros / MICROS:g} USD spent of {budget / MICROS:g} (max_budget_usd)"
        if turns_max is not None and story.answers >= turns_max and story.goes_on:
            return "max_turns", f"the limit of {turns_max} turns (max_turns)"
        return None

    # What the agent asks ----------------------------------------------------------------------------------------------

    async def answer(self, method: str, params: dict[str, Any]) -> Json | Fault:
        """Answer a question of the agent."""
        try:
            if method == answers.PEOPLE:
                return await self._people(params)
            question = answers.read_question(method, params, self.story.calls, self.root)
            if question is None:
                return Fault(METHOD_NOT_FOUND, f"this host answers no {method}")
            refused = await self.verdicts.refusal(question)
            if refused is None:
                return answers.answer(question, "allow")
            self.story.hidden[question.id] = f"policy_denied: {refused}"
            return answers.answer(question, "deny")
        finally:
            self.silence.heard()

    async def hook(self, said: dict[str, Any]) -> Json:
        """Answer a hook of the agent."""
        try:
            return await self.verdicts.hook(said)
        finally:
            self.silence.heard()

    @property
    def _asking(self) -> bool:
        return self.client.asking or (self.hooked is not None and self.hooked.asking)

    async def _people(self, params: dict[str, Any]) -> Json | Fault:
        """Put the agent's questions to a person."""
        given: dict[str, str] = {}
        for id, words, options in answers.questions(params):
            _, given[id] = await person(self.run, words, options)
        return answers.said(given)

    # The run ----------------------------------------------------------------------------------------------------------

    async def cancel(self) -> None:
        """End the turn in order: the agent first, and when it does not, its program."""
        self.cancelled = True
        self.client.withdraw()
        if self.hooked is not None:
            self.hooked.withdraw()
        await wind_up(self.run, self._interrupt if self.story.current else None, self.over)

    async def more(self, text: str) -> None:
        """Words of the user while the agent works: it takes them into its turn, or into another one after it."""
        story = self.story
        going = story.current and not any(ending.turn == story.current for ending in story.endings)
        if not going or await self.client.steer(story.thread, story.current, text) is not None:
            self.waiting.append(text)

    async def interrupt(self) -> None:
        """Stop the agent's turn; what waits to be said to it is said then."""
        self.interrupted = True
        await self._interrupt()

    async def _interrupt(self) -> None:
        await self.client.interrupt(self.story.thread, self.story.current)

    async def go(self) -> Done:
        """From the first word to the agent to the end of its work."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._listen)
            if self.hooked is not None:
                await tasks.start(self.hooked.run)
            await self._open()
            self.silence.heard()
            tasks.start_soon(self.silence.watch)
            whole: Done | None = None
            with self.silence.scope:
                whole = await self._work()
            done = whole if whole is not None else await self._cut_off()
            tasks.cancel_scope.cancel()
        self.over.set()
        return done

    async def _listen(self) -> None:
        await self.client.run()
        self._tell_change()

    def _tell_change(self) -> None:
        changed, self.changed = self.changed, anyio.Event()
        changed.set()

    async def _change(self) -> None:
        await self.changed.wait()

    async def _open(self) -> None:
        """Agree on the protocol and open the thread."""
        said = await self.client.initialize()
        if self.hooked is not None:
            await trust(self.client, self.root)
        method, params = self.ways.open
        thread, self.model = await self.client.thread(method, params)
        self.story.thread = str(thread["id"])
        self.story.price = self.ways.price or (price_of(self.model) if self.ways.listed else None)
        if self.ways.budget_micros is not None and self.story.price is None:
            fact = f"max_budget_usd cannot be held: what {self.model!r} costs is not known"
            raise ConfigError("config_invalid", fact, hint="options = {prices = {input = …, output = …}}, in dollars")
        body = {"id": thread["id"], "model": self.model, "version": thread.get("cliVersion"), **self.ways.session}
        body["agent"] = said.get("userAgent")
        await self.run.carry("session", body, f"session {thread['id']}")

    async def _turn(self, text: str) -> Ending:
        """One turn to its end. Raises BackendError: `backend_crashed`."""
        number = len(self.story.endings)
        await self.client.turn(self.story.thread, text, **self.ways.turn)
        while len(self.story.endings) == number:
            if self.client.ended.is_set():
                raise BackendError("backend_crashed", "the agent's program ended in the middle of its work")
            await self._change()
        return self.story.endings[-1]

    async def _work(self) -> Done:
        value, fault = await answered(self.run, self.ways.shape, self._say)
        return await self._ended(self.story.endings[-1], fault, value)

    async def _say(self, fault: str | None) -> str | None:
        """The order, or what is wrong with the answer; and what a user said meanwhile."""
        ending = await self._turn(self.ways.prompt if fault is None else AGAIN.format(fault=fault))
        while self.waiting and not self.cancelled:
            ending = await self._turn(self.waiting.pop(0))
        whole = ending.status == "completed" and self.story.spoke and not self.cancelled
        return self.story.text if whole else None

    async def _cut_off(self) -> Done:
        """The end that we made of it: a limit, or silence."""
        for event in self.story.close():
            await self.run.emit(event)
        if self.limit is None:
            return await self._failed("backend_timeout", self.silence.words)
        reason, words = self.limit
        if reason == "max_turns":
            # A turn more than there may be: that is how a control plane learns which limit it was.
            await self.run.carry("turn", {"stop_reason": reason}, words)
        await self.run.error(words, "policy_denied")
        return self._done("partial")

    async def _ended(self, ending: Ending, fault: str | None, value: Json = None) -> Done:
        """Judge a run by all that the agent says, not by its word `completed`."""
        for event in self.story.close():
            await self.run.emit(event)
        if self.cancelled or (self.interrupted and ending.status == "interrupted"):
            return self._done("partial")
        if ending.status == "failed":
            return await self._failed(code_of(ending.info, ending.message), plain(ending.message) or "the turn failed")
        if ending.status != "completed":
            await self.run.error(f"the turn ended as {ending.status}: {ending.message}")
            return self._done("partial")
        if fault is not None:
            return await self._failed("validation_failed", fault)
        if not self.story.spoke:
            if not self.story.acted:
                return await self._failed("backend_unavailable", WORDLESS)
            await self.run.warn(WORDLESS)
            return self._done("partial")
        return self._done("complete", structured=None if self.ways.shape is None else [value])

    async def _failed(self, code: str, words: str) -> Done:
        await self.run.error(words[:WORDS_CHARS_MAX], code)
        return self._done("failed", error=words)

    def _done(self, outcome: Any, *, error: str | None = None, structured: list[Json] | None = None) -> Done:
        raw: dict[str, Json] = {
            "model": self.model,
            "session_id": self.story.thread,
            "requests": self.story.answers,
        }
        if structured is not None:
            raw["structured_output"] = structured[0]
        if error is not None:
            raw["error"] = error[:WORDS_CHARS_MAX]
        return Done(outcome=outcome, usage=self.story.used(), usage_raw=raw)
