"""Drives Claude Code by JSON lines: input of the user, hooks before and after its tools, interrupts.

`start` has the program's options. Input during a turn is added to the turn, or begins another one after it. The work is
over when no input waits, no sub-agent works and the agent is idle.
"""

from __future__ import annotations

from typing import Final

import anyio
import msgspec

from backplane.agents.agent import Agent as BaseAgent
from backplane.agents.agent import Ending, failed, limited, silent
from backplane.agents.claude import answers
from backplane.agents.claude.answers import Question
from backplane.agents.claude.peer import WITHDRAWAL, ControlPeer
from backplane.agents.claude.reader import STRUCTURED, EventReader, TurnResult
from backplane.agents.claude.start import ALIASES, TOOLS
from backplane.agents.events import mapping, mappings
from backplane.agents.gate import ToolRequest
from backplane.agents.order import RunSpec, prompt_of, with_images
from backplane.agents.session import AgentRun
from backplane.agents.start import AgentStart
from backplane.contract.canonical import Json
from backplane.errors import BackendError
from backplane.protocol.jsonrpc import Notification, Request, RpcError

SETTLE_S: Final = 1.0
"""Seconds to wait, after a result, for the agent's report that it is idle; after them it counts as idle."""
HOOK_S: Final = 3600
"""Seconds for the answer to a hook; a user may take long, and the control plane has its own timeout."""
LIMITS: Final = {
    "max_turns": "max_turns", "error_max_turns": "max_turns",
    "budget_exhausted": "budget", "error_max_budget_usd": "budget",
}  # fmt: skip
"""`terminal_reason` or `subtype` of a result → the contract's limit; some versions send only one of the two."""
LOGIN: Final = (
    "export its key (`backplane backends` names the variable), or use your own login with options = {own_state = true}"
)
"""Next step for a missing login, in place of the agent's own, which is a command of its terminal window."""
AGAIN: Final = "Your answer does not satisfy the JSON Schema you were given:\n{fault}\nCorrect it."
KEPT: Final = (
    "subtype", "terminal_reason", "api_error_status", "stop_reason", "num_turns", "session_id", "usage",
    "model_usage_since_last_result", "permission_denials", "total_cost_usd",
)  # fmt: skip
"""Members of the last result that the receipt keeps unchanged; its sums may cover several runs."""


class Agent(BaseAgent):
    """The agent of one run."""

    keeps_calls = False  # Its answer to `initialize` contains the user's account.
    withdrawn = RpcError(0, "", gone=True)  # No answer at all: the interrupt ends the request.
    reader: EventReader

    def __init__(self, session: AgentRun, begun: AgentStart) -> None:
        super().__init__(session, EventReader(session.run.now, session.root, TOOLS))
        self.connect(begun, ControlPeer())
        self._withheld: str | None = None
        """Why the model may get no more results; None if it may."""

    @classmethod
    def spec(cls, begun: AgentStart) -> RunSpec:
        """Return the order for a program that itself enforces the limits and the schema."""
        words, spec = with_images(begun.run, prompt_of(begun.run), cls.image), super().spec(begun)
        return msgspec.structs.replace(spec, prompt=words, again=AGAIN, budget_micros=None, turns_max=None)

    @staticmethod
    def image(media_type: str, data: str) -> Json:
        return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}

    async def hear(self, message: Notification) -> None:
        if message.method == WITHDRAWAL:
            self.pipe.drop(str(message.params.get("request_id")))
            return
        await self.session.hear(message)
        if message.method == "assistant":
            # A call of a tool that the agent does not have needs no approval.
            for call in [*self.reader.calls.open.values()]:
                await self.session.gate.deny(self._request(call.id, call.tool, call.input))

    def _request(self, id: str, tool: str, input: Json) -> ToolRequest:
        name, neutral = self.reader.name(tool), (ALIASES.get(tool, tool),)
        return ToolRequest(id=id, tool=tool, name=name, input=input, neutral=neutral, takes_input=True)

    # Opening ----------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Register the hooks, and wait until the program confirms that a failed hook blocks."""
        hooks = answers.wanted(self.begun.hooks, answer_s=HOOK_S)
        # Otherwise a conversation keeps the system prompt of its first run, even if a later order has another.
        if not answers.blocks(await self.must("initialize", {"hooks": hooks, "systemPromptSnapshot": False})):
            fact = "this version of Claude Code does not confirm that a failed hook blocks the call (onFailure)"
            raise BackendError("capability_unsupported", fact, hint="install 2.1.332 or later")

    # A turn -----------------------------------------------------------------------------------------------------------

    async def say(self, words: Json) -> Ending:
        number, self.reader.idle = len(self.reader.results), False
        await self.add(words)
        result = await self._result(number)
        if result is None:
            raise BackendError("backend_crashed", "the agent's program ended in the middle of its work")
        return msgspec.structs.replace(await self._ended(result), stopped=result.is_error)

    async def add(self, text: Json) -> bool:
        message = {"role": "user", "content": text}
        await self.pipe.notify("user", {"session_id": "", "message": message, "parent_tool_use_id": None})
        return True

    async def stop(self) -> bool:
        await self.call("interrupt")
        return True

    async def _result(self, number: int) -> TurnResult | None:
        """Wait for the result after `number` others, and for the agent to be idle; None if its program has ended."""
        reader, late = self.reader, False
        while not self.session.ended and not reader.refused:
            ready = len(reader.results) > number and not reader.tasks and not reader.results[-1].queued
            if ready and (reader.idle or late):
                break
            with anyio.move_on_after(SETTLE_S if ready else None) as waited:
                await self.session.change()
            late = ready and waited.cancelled_caught
        return reader.results[-1] if len(reader.results) > number else None

    async def _ended(self, result: TurnResult) -> Ending:
        if self._withheld is not None:
            return failed("policy_denied", self._withheld)
        limit = LIMITS.get(result.reason) or LIMITS.get(result.subtype)
        if limit == "budget":
            cost = {"estimated_cost_usd": result.raw.get("total_cost_usd")}
            await self.session.run.carry("usage", cost, result.text)
        if limit is not None:
            return limited(limit, result.text or result.reason or result.subtype)
        if result.is_error or result.subtype != "success" or result.reason == "hook_stopped":
            words = result.text or result.subtype
            code = self.session.code_of(result.text, result.reason, self.reader.error, status=result.status)
            return failed(code, f"{words}; {LOGIN}" if "/login" in words else words)
        if result.raw.get("stop_reason") == "refusal":
            return failed("backend_content_filtered", "the model refused to go on")
        if not result.text and result.structured is None:
            return silent(acted=self.reader.acted)
        # If the model answers in text, that is the answer.
        is_text = result.structured is None
        return Ending(text=result.text if is_text else msgspec.json.encode(result.structured).decode())

    # Its questions ----------------------------------------------------------------------------------------------------

    async def reply(self, request: Request) -> Json | RpcError:
        if (ended := answers.read_subagent(request.params)) is not None:
            await self.session.run.carry("task", {"subagent_end": ended}, "a sub-agent has ended")
            return {}
        question = answers.read_question(request.params)
        if question is None:
            is_gate = request.method in ("can_use_tool", "hook_callback")
            return answers.block(request.params) if is_gate else await super().reply(request)
        call = self.reader.calls.open.get(question.id)
        if call is not None and call.tool != question.tool:
            # The hook may have a newer name of the tool than the model's call.
            question = msgspec.structs.replace(question, tool=call.tool)
        if question.when in (answers.AFTER, answers.FAILED):
            return await self._show(question)
        if question.tool == STRUCTURED:
            return answers.allow(question)
        verdict = await self.session.gate.decide(self._request(question.id, question.tool, question.input))
        if verdict.refused is not None:
            return answers.deny(question, f"policy_denied: {verdict.refused}")
        if question.when == "permission" and question.tool == "AskUserQuestion":
            return await self._people(question)
        return answers.allow(question, verdict.input if verdict.input != question.input else None)

    async def _show(self, question: Question) -> Json:
        """Show hooks a result before the model sees it."""
        text, is_failed = answers.text_of(question), question.when == answers.FAILED
        name = self.reader.name(question.tool)
        shown, is_error = await self.session.run.shown(
            name, question.input, text, id=question.id or None, is_error=is_failed
        )
        if shown == text and is_error == is_failed:
            return {}
        changed = answers.with_text(question, str(shown))
        call = self.reader.calls.open.get(question.id)
        if call is not None and (is_error or changed is None):
            call.shown = (str(shown), True)
        if changed is not None:
            return answers.show(question, changed)
        self._withheld = f"the result of {question.tool} cannot be changed, and was not to be seen as it is"
        if is_failed:  # After a failed tool the agent ignores a hook's answer to stop.
            await self.stop()
        return answers.stop(self._withheld)

    async def _people(self, question: Question) -> Json:
        """Ask the user the agent's questions; return the answers."""
        said: dict[str, str] = {}
        for row in mappings(mapping(question.input).get("questions")):
            options = (one.get("label") for one in mappings(row.get("options")))
            is_answered, text = await self.session.ask_person(row.get("question"), options)
            if not is_answered:
                return answers.deny(question, text)
            said[str(row.get("question"))] = text
        return answers.allow(question, {**mapping(question.input), "answers": said})

    def raw(self) -> dict[str, Json]:
        if not self.reader.results:
            return {}
        result = self.reader.results[-1]
        structured = {} if result.structured is None else {"structured_output": result.structured}
        return {name: result.raw[name] for name in KEPT if name in result.raw} | structured
