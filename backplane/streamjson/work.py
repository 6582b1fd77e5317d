"""One run with such an agent, from the first word to the judged end.

Its questions are put to the control plane, its messages told, its silence bounded, the shape of its answer checked.
Starting the program and saying the order in its words are a host's affair.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import anyio
import msgspec

from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent, carry
from backplane.cost import price_of
from backplane.errors import BackendError
from backplane.policy import Decision
from backplane.sidecar import Done, HostRun
from backplane.streamjson import answers
from backplane.streamjson.answers import Question
from backplane.streamjson.client import Client, Message, Refused
from backplane.streamjson.failure import code_of
from backplane.streamjson.story import Result, Story
from backplane.tools.structured import Shape

TOOL_S_MAX: Final = 3600.0
"""For one tool: its own limit for a command is ten minutes, a sub-agent works longer."""
SIGN_OF_LIFE_S: Final = 60.0
"""Between two words about a tool that works in silence: a control plane gives up a silent run after five minutes."""
SETTLE_S: Final = 1.0
"""After a result, for the word that the agent is idle; a version that does not say it is believed then."""
REPAIRS_MAX: Final = 2
"""Tries to correct an answer of the wrong shape; who needs a third does not find it."""
HOOK_S: Final = 3600
"""For the answer to a question before a tool; a person may take long, and the control plane has its own clock."""
CANCEL_SHARE: Final = 0.5
"""Of the grace: for the agent to end its turn by itself; the rest is for the program."""
WORDS_CHARS_MAX: Final = 2000
"""Of an agent's own words for a failure."""


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
        self.shows = any(
            isinstance(row, dict) and row.get("event") == "post_tool" for row in run.order.abp("hooks") or ()
        )
        self.cancelled = self.silent = False
        self.interrupted = False
        self.withheld: str | None = None
        """Why the model may get nothing more."""
        self.changed, self.over = anyio.Event(), anyio.Event()
        self.silence = anyio.CancelScope()
        self.heard_s = time.monotonic()

    async def hear(self, message: Message, line: bytes) -> None:
        """Tell what the agent told."""
        self.heard_s = time.monotonic()
        events = self.story.take(message)
        if self.raw:
            events = passed_through(self.run, events, message, line)
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
                name = self.story.name(call.name)
                ask = {"kind": "tool", "name": name, "input": call.input, "cwd": self.root, "default": "deny"}
                await self.run.pass_on(ask)

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
            self.heard_s = time.monotonic()

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
        if changed is not None:
            return answers.show(question, changed)
        self.story.hidden[question.id] = str(shown)
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
            verdict = await self.run.ask_user(words, options=options)
            if verdict.decision == "deny" and not verdict.text:
                return answers.deny(question, f"no answer: {verdict.reason or 'nobody is there'}; decide by yourself")
            said[words] = verdict.text or verdict.decision
        return answers.allow(question, {**question.input, "answers": said})

    async def cancel(self) -> None:
        """End the turn in order: the agent first, and when it does not, its program."""
        self.cancelled = True
        self.client.withdraw()
        with anyio.move_on_after(self.run.grace_s * CANCEL_SHARE):
            await self.client.call("interrupt")
            await self.over.wait()
            return
        self.run.scope.cancel()

    async def more(self, text: str) -> None:
        """Words of the user while the agent works: it takes them into its turn, or into another one after it."""
        if not self.over.is_set():
            await self.client.say(text)

    async def interrupt(self) -> None:
        """Stop the agent's turn; what waits to be said to it is said then."""
        self.interrupted = True
        await self.client.call("interrupt")

    async def watch(self) -> None:
        """End a run in which nothing is heard for too long: a stream that is kept alive hangs the agent for ever."""
        told_s = 0.0
        while True:
            busy = bool(self.story.calls) or self.client.asking
            silent_s = time.monotonic() - self.heard_s
            left_s = (TOOL_S_MAX if busy else self.ways.silence_s) - silent_s
            if left_s <= 0:
                self.silent = True
                self.silence.cancel()
                return
            told_s = 0.0 if silent_s < SIGN_OF_LIFE_S else told_s
            if self.story.calls and silent_s - told_s >= SIGN_OF_LIFE_S:
                told_s = silent_s
                await self.run.carry("output", {"stream": "stdout", "text": ""}, "a tool is still at work")
            await anyio.sleep(min(max(left_s, 0.1), SIGN_OF_LIFE_S / 4))

    async def go(self) -> Done:
        """From the first word to the agent to the end of its work."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._listen)
            tasks.start_soon(self.watch)
            greeted = anyio.Event()
            tasks.start_soon(self._greet, answers.wanted(results=self.shows, answer_s=HOOK_S), greeted)
            with self.silence:
                await greeted.wait()
                await self.client.say(self.ways.prompt)
                done = await self._work()
            if self.silent:
                words = f"nothing was heard of the agent for {self.ways.silence_s:g} s"
                done = await self._failed("backend_timeout", words)
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
        while not self.client.ended.is_set():
            ready = len(self.story.results) > number and not self.story.tasks and not self.story.results[-1].queued
            if ready and (self.story.idle or late):
                break
            self.changed = anyio.Event()
            with anyio.move_on_after(SETTLE_S if ready else None) as waited:
                await self.changed.wait()
            late = ready and waited.cancelled_caught
        return self.story.results[-1] if len(self.story.results) > number else None

    async def _work(self) -> Done:
        shape = shape_of(self.run)
        for repair in range(1, REPAIRS_MAX + 2):
            number = len(self.story.results)
            self.story.idle = False
            result = await self._result(number)
            if result is None:
                raise BackendError("backend_crashed", "the agent's program ended in the middle of its work")
            fault = None if shape is None or result.is_error or self.cancelled else fault_of(shape, result)
            if fault is None or repair > REPAIRS_MAX:
                return await self._ended(result, fault)
            await self.run.warn(f"the answer does not match the output schema, repair {repair}: {fault}")
            await self.client.say(f"Your answer does not satisfy the JSON Schema you were given:\n{fault}\nCorrect it.")
        raise AssertionError

    async def _ended(self, result: Result, fault: str | None) -> Done:
        """Judge a run by all that the agent says, not by its word `success`."""
        for event in self.story.close():
            await self.run.emit(event)
        if self.cancelled or (self.interrupted and result.is_error):
            return self._done("partial", result)
        if fault is not None:
            words = f"the answer still does not match the output schema after {REPAIRS_MAX} repairs: {fault}"
            return await self._failed("validation_failed", words, result)
        if self.withheld is not None:
            return await self._failed("policy_denied", self.withheld, result)
        if result.reason in ("max_turns", "budget_exhausted"):
            return await self._stopped(result)
        if result.is_error or result.subtype != "success" or result.reason == "hook_stopped":
            return await self._failed(code_of(result, self.story.error), result.text or result.subtype, result)
        if result.raw.get("stop_reason") == "refusal":
            return await self._failed("backend_content_filtered", "the model refused to go on", result)
        if not result.text and result.structured is None:
            words = "the agent ended without a word"
            if not self.story.acted:
                return await self._failed("backend_unavailable", words, result)
            await self.run.warn(words)
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


def passed_through(run: HostRun, events: list[AgentEvent], message: Message, line: bytes) -> list[AgentEvent]:
    """The events with the agent's own message on the first; its text, too, where that cannot be had from the value."""
    raw: dict[str, Any] = {"raw_message": message}
    if msgspec.json.encode(message) != line.strip():
        raw["raw_line"] = line.strip().decode("utf-8", "replace")
    if not events:
        first = carry("raw_message", message, ts=run.now(), message=f"a message of the kind {message['type']}")
        return [msgspec.structs.replace(first, ext=raw)]
    ext = events[0].ext if isinstance(events[0].ext, dict) else {}
    return [msgspec.structs.replace(events[0], ext={**ext, **raw}), *events[1:]]


def command_of(input: Any) -> str | None:
    command = input.get("command") if isinstance(input, dict) else None
    return command if isinstance(command, str) else None


def shape_of(run: HostRun) -> Shape | None:
    """The shape that the answer has to have. Raises ConfigError: `config_invalid`."""
    schema = run.order.abp("output_schema")
    if schema is None:
        return None
    return Shape(schema)


def fault_of(shape: Shape, result: Result) -> str | None:
    """What is wrong with the answer; a model that answers in words is taken at these."""
    text = result.text if result.structured is None else msgspec.json.encode(result.structured).decode()
    return shape.read(text)[1]


def forbidden(run: HostRun, tool: str, aliases: Mapping[str, str]) -> bool:
    """Whether the policy forbids a tool by its name, whatever its input is."""
    decision = run.policy.decide_tool_call(tool, {}, root=run.order.workspace.root, aliases=aliases)
    named = decision.rule is not None and decision.rule.name in ("allowed_tools", "disallowed_tools")
    return decision.allowed == "deny" and named
