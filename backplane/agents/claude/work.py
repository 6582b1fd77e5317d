"""One run with such an agent, from the first word to the judged end.

Its questions are put to the control plane, its messages told, its silence bounded, the shape of its answer checked.
Starting the program and saying the order in its words are a host's affair.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec

from backplane.agents.claude import answers
from backplane.agents.claude.answers import Question
from backplane.agents.claude.client import Client, Message, Refused
from backplane.agents.claude.failure import code_of, words_of
from backplane.agents.claude.story import Result, Story
from backplane.agents.order import shows_results
from backplane.agents.session import (
    WORDLESS,
    WORDS_CHARS_MAX,
    Silence,
    answered,
    command_of,
    passed_through,
    person,
    record_denied,
    wind_up,
)
from backplane.contract.canonical import Json
from backplane.errors import BackendError
from backplane.host import Done, HostRun
from backplane.policy.rules import Decision
from backplane.upstream.cost import price_of

if TYPE_CHECKING:
    from backplane.tools.structured import Shape

SETTLE_S: Final = 1.0
"""After a result, for the word that the agent is idle; a version that does not say it is believed then."""
HOOK_S: Final = 3600
"""For the answer to a question before a tool; a person may take long, and the control plane has its own clock."""


class Ways(msgspec.Struct, frozen=True):
    """What a host says of its agent and of this run."""

    prompt: str
    tools: Mapping[str, str]
    """The agent's names of tools → the contract's."""
    aliases: Mapping[str, str]
    """The same, and names that a rule may mean, too."""
    withheld: frozenset[str]
    """Tools that the policy took from it."""
    silence_s: int
    """How long it may say nothing while no tool runs."""
    shape: Shape | None


class Turn:
    """One run: the agent's program, its conversation, and what it is asked in it."""

    def __init__(self, run: HostRun, ways: Ways, write_fd: int, read_fd: int) -> None:
        self.run, self.ways = run, ways
        self.root = run.order.workspace.root
        self.story: Story = Story(run.now, self.root, ways.tools)
        self.client: Client = Client(write_fd, read_fd, hear=self.hear, answer=self.answer, unread=self.unread)
        self.raw = run.order.abp("mode") == "passthrough"
        self.told: set[str] = set()
        """Calls that the policy denies and that this was said of, by id."""
        self.allowed: set[str] = set()
        self.shows = shows_results(run)
        self.cancelled = self.interrupted = False
        self.withheld: str | None = None
        """Why the model may get nothing more."""
        self.changed, self.over = anyio.Event(), anyio.Event()
        self.silence = Silence(
            run, ways.silence_s, at_work=lambda: bool(self.story.calls), asking=lambda: self.client.asking
        )

    async def hear(self, message: Message, line: bytes) -> None:
        """Tell what the agent told."""
        self.silence.heard()
        events = self.story.take(message)
        if self.raw:
            events = passed_through(self.run, events, message, line, message["type"])
        for event in events:
            await self.run.emit(event)
        await self._account_for(message)
        self.changed.set()

    async def unread(self, line: bytes) -> None:
        await self.run.warn(f"the agent wrote a line that is no message: {line!r}")

    async def _account_for(self, message: Message) -> None:
        """What the policy denies asks nobody, and may be denied by the agent's own settings: so it is said above."""
        for id, call in list(self.story.calls.items()) if message["type"] == "assistant" else ():
            if id in self.told:
                continue
            if call.name in self.ways.withheld or self._decide(call.name, call.input).allowed == "deny":
                self.told.add(id)
                await record_denied(self.run, self.story.name(call.name), call.input)

    def _decide(self, tool: str, input: Json) -> Decision:
        return self.run.policy.decide_tool_call(tool, input, root=self.root, cwd=self.root, aliases=self.ways.aliases)

    async def answer(self, request: Message) -> Json | Refused:
        """Answer a question of the agent."""
        question = answers.read_question(request)
        if question is None:
            return Refused(f"this host answers no {request.get('subtype')}")
        call = self.story.calls.get(question.id)
        if call is not None and call.name != question.tool:
            # A tool may be asked about by a newer name than the one that its model called it by.
            question = msgspec.structs.replace(question, tool=call.name)
        try:
            if question.when in (answers.AFTER, answers.FAILED):
                return await self._show(question)
            if question.tool == "StructuredOutput" or (question.when == "permission" and question.id in self.allowed):
                return await self._people(question) if question.tool == "AskUserQuestion" else answers.allow(question)
            return await self._may(question)
        finally:
            self.silence.heard()

    async def _may(self, question: Question) -> Json | Refused:
        local = self._decide(question.tool, question.input)
        if local.allowed == "deny":
            return answers.deny(question, f"policy_denied: {local.reason}")
        name = self.story.name(question.tool)
        verdict = await self.run.may(name, question.input, command=command_of(question.input), cwd=self.root)
        input = question.input if verdict.input is msgspec.UNSET else verdict.input
        if verdict.decision == "deny":
            return answers.deny(question, f"policy_denied: {verdict.reason}")
        local = self._decide(question.tool, input)
        if local.allowed == "deny":
            return answers.deny(question, f"policy_denied: {local.reason}")
        self.allowed.add(question.id)
        if verdict.decision == "modify":
            self.story.given[question.id] = input
        if question.when == "permission" and question.tool == "AskUserQuestion":
            return await self._people(question)
        return answers.allow(question, input if verdict.decision == "modify" else None)

    async def _show(self, question: Question) -> Json | Refused:
        """Let hooks look at a result before the model does."""
        text, failed = answers.text_of(question), question.when == answers.FAILED
        name = self.story.name(question.tool)
        shown, is_error = await self.run.shown(name, question.input, text, is_error=failed)
        if shown == text and is_error == failed:
            return {}
        changed = answers.with_text(question, str(shown))
        if is_error or changed is None:
            self.story.hidden[question.id] = str(shown)
        if changed is not None:
            return answers.show(question, changed)
        self.withheld = f"the result of {question.tool} cannot be changed, and was not to be seen as it is"
        if failed:  # After a tool that failed the word to stop is not heard.
            await self.client.call("interrupt")
        return answers.stop(self.withheld)

    async def _people(self, question: Question) -> Json | Refused:
        """Put the agent's questions to a person."""
        rows = question.input.get("questions") if isinstance(question.input, dict) else None
        said: dict[str, str] = {}
        for row in rows if isinstance(rows, list) else ():
            words = str(row.get("question"))
            options = tuple(one.get("label") for one in row.get("options") or () if isinstance(one, dict))
            is_answered, text = await person(self.run, words, options)
            if not is_answered:
                return answers.deny(question, text)
            said[words] = text
        return answers.allow(question, {**question.input, "answers": said})

    async def cancel(self) -> None:
        """End the turn in order: the agent first, and when it does not, its program."""
        self.cancelled = True
        self.client.withdraw()
        await wind_up(self.run, self._interrupt, self.over)

    async def more(self, text: str) -> None:
        """Words of the user while the agent works: it takes them into its turn, or into another one after it."""
        if not self.over.is_set():
            await self.client.say(text)

    async def interrupt(self) -> None:
        """Stop the agent's turn; what waits to be said to it is said then."""
        self.interrupted = True
        await self._interrupt()

    async def _interrupt(self) -> None:
        await self.client.call("interrupt")

    async def go(self) -> Done:
        """From the first word to the agent to the end of its work."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._listen)
            tasks.start_soon(self.silence.watch)
            greeted = anyio.Event()
            tasks.start_soon(self._greet, answers.wanted(results=self.shows, answer_s=HOOK_S), greeted)
            with self.silence.scope:
                await greeted.wait()
                done = await self._work()
            if self.silence.broken:
                done = await self._failed("backend_timeout", self.silence.words)
            tasks.cancel_scope.cancel()
        self.over.set()
        return done

    async def _greet(self, hooks: Any, greeted: anyio.Event) -> None:
        """Ask to be asked before the agent hears a word, so that no tool runs unasked."""
        reply = await self.client.call("initialize", written=greeted, hooks=hooks)
        if reply["subtype"] == "":
            raise BackendError("backend_crashed", "the agent's program ended before it was told anything")
        if reply["subtype"] == "error":
            raise BackendError("backend_unavailable", f"the agent refused to be asked: {reply.get('error')}")

    async def _listen(self) -> None:
        await self.client.run()
        self.changed.set()

    async def _result(self, number: int) -> Result | None:
        """Wait for the result after `number` others, and for the agent to be idle; None when its program ended."""
        late = False
        while not self.client.ended.is_set() and not self.story.refused:
            ready = len(self.story.results) > number and not self.story.tasks and not self.story.results[-1].queued
            if ready and (self.story.idle or late):
                break
            self.changed = anyio.Event()
            with anyio.move_on_after(SETTLE_S if ready else None) as waited:
                await self.changed.wait()
            late = ready and waited.cancelled_caught
        return self.story.results[-1] if len(self.story.results) > number else None

    async def _work(self) -> Done:
        _, fault = await answered(self.run, self.ways.shape, self._say)
        return await self._ended(self.story.results[-1], fault)

    async def _say(self, fault: str | None) -> str | None:
        """The order, or what is wrong with the answer; a model that answers in words is taken at these."""
        number = len(self.story.results)
        self.story.idle = False
        again = f"Your answer does not satisfy the JSON Schema you were given:\n{fault}\nCorrect it."
        await self.client.say(self.ways.prompt if fault is None else again)
        result = await self._result(number)
        if result is None:
            raise BackendError("backend_crashed", "the agent's program ended in the middle of its work")
        if result.is_error or self.cancelled:
            return None
        return result.text if result.structured is None else msgspec.json.encode(result.structured).decode()

    async def _ended(self, result: Result, fault: str | None) -> Done:
        """Judge a run by all that the agent says, not by its word `success`."""
        for event in self.story.close():
            await self.run.emit(event)
        if self.cancelled or (self.interrupted and result.is_error):
            return self._done("partial", result)
        if fault is not None:
            return await self._failed("validation_failed", fault, result)
        if self.withheld is not None:
            return await self._failed("policy_denied", self.withheld, result)
        if result.reason in ("max_turns", "budget_exhausted"):
            return await self._stopped(result)
        if result.is_error or result.subtype != "success" or result.reason == "hook_stopped":
            return await self._failed(code_of(result, self.story.error), words_of(result), result)
        if result.raw.get("stop_reason") == "refusal":
            return await self._failed("backend_content_filtered", "the model refused to go on", result)
        if not result.text and result.structured is None:
            if not self.story.acted:
                return await self._failed("backend_unavailable", WORDLESS, result)
            await self.run.warn(WORDLESS)
            return self._done("partial", result)
        return self._done("complete", result)

    async def _stopped(self, result: Result) -> Done:
        # A turn or a dollar more than there may be: that is how a control plane learns which limit it was.
        if result.reason == "max_turns":
            await self.run.carry("turn", {"stop_reason": "max_turns"}, result.text)
        else:
            cost = {"estimated_cost_usd": result.raw.get("total_cost_usd")}
            await self.run.carry("usage", cost, result.text)
        await self.run.error(result.text or result.reason, "policy_denied")
        return self._done("partial", result)

    async def _failed(self, code: str, words: str, result: Result | None = None) -> Done:
        for event in self.story.close():
            await self.run.emit(event)
        await self.run.error(words[:WORDS_CHARS_MAX], code)
        return self._done("failed", result, words)

    def _done(self, outcome: Any, result: Result | None, error: str | None = None) -> Done:
        usage, models = self.story.total()
        cost = self.story.cost_usd()
        if cost is not None and models and all(price_of(model) is not None for model in models):
            # For a model that is in no list the agent takes the price of another one.
            usage = msgspec.structs.replace(usage, estimated_cost_usd=cost)
        kept = result.raw if result is not None else {}
        raw: dict[str, Json] = {name: kept[name] for name in KEPT if name in kept}
        if result is not None and result.structured is not None:
            raw["structured_output"] = result.structured
        if error is not None:
            raw["error"] = error[:WORDS_CHARS_MAX]
        return Done(outcome=outcome, usage=usage, usage_raw=raw)


KEPT: Final = (
    "subtype", "terminal_reason", "api_error_status", "stop_reason", "num_turns", "session_id", "usage",
    "model_usage_since_last_result", "permission_denials", "total_cost_usd",
)  # fmt: skip
"""Of the last result, kept in the receipt as it came; sums there may go over several runs."""
