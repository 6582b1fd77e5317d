"""Whether a call of such an agent may run, with which input, and what its model is shown of the result.

A call may be put to us twice: by the agent's hook, where its input can still be changed, and for its approval, where
the agent tells more of it. What was decided at the hook holds at the approval as long as it is the same call.
"""

from __future__ import annotations

from typing import Any, Final

import anyio
import msgspec

from backplane.agents.codex import answers, hooked
from backplane.agents.codex.answers import Question
from backplane.agents.codex.hold import held
from backplane.agents.codex.items import OpenCall, operations
from backplane.agents.codex.reader import EventReader
from backplane.agents.session import OWN_INPUT, AgentRun, command_of
from backplane.contract.canonical import Json
from backplane.policy.rules import Ruling

OWN_NAMES: Final = {"commandExecution": "exec_command", "fileChange": "apply_patch"}
"""Kinds of items → what the agent calls the tool: a rule may mean that name."""
NAMES: Final = {"Bash": "bash"}
"""What the agent's hooks call a tool → what we call it."""
DECIDED_MAX: Final = 1000
"""Decisions that wait for their call's approval; the oldest is forgotten, and asked for again."""
TOLD_S_MAX: Final = 5.0
"""For a result to be told on the one way when it was asked about on the other; it is told before."""
NOTHING: Final = "(nothing)"
"""In place of no words: a hook that says none is not heard."""


class Decided(msgspec.Struct, frozen=True):
    """What was decided about a call at its hook."""

    name: str
    input: Json
    """As it is to run."""
    changed: bool
    refused: str | None


class Verdicts:
    """The decisions of one run.

    Args:
        shows: results are to be seen before the model sees them.
    """

    def __init__(self, session: AgentRun, reader: EventReader, *, shows: bool) -> None:
        self._session, self._reader, self._shows = session, reader, shows
        self._decided: dict[str, Decided] = {}

    async def refusal(self, question: Question) -> str | None:
        """Why a call that waits for approval may not run; None when it may."""
        decided = self._pop(question)
        if decided is None and self._shows and question.method == answers.COMMAND:
            return "what it says could not be held back for those who are to see it first"
        if decided is None:
            return (await self._may(question)).refused
        refused = decided.refused or (await self._forbidden(question))
        if refused is not None or decided.input == question.call.input:
            return refused
        if decided.changed:
            return "the input was changed, and what this call has beside it, its folder, cannot be"
        return (await self._may(question)).refused

    async def hook(self, said: dict[str, Any]) -> Json:
        """Answer a hook of the agent."""
        id, tool = str(said.get("tool_use_id") or ""), str(said.get("tool_name"))
        kind = "commandExecution" if tool == "Bash" else "mcpToolCall"
        call = OpenCall(NAMES.get(tool, tool), said.get("tool_input"), kind)
        if said.get("hook_event_name") == hooked.AFTER:
            return await self._after(id, call, said.get("tool_response"))
        return await self._before(Question(hooked.BEFORE, id, call))

    async def _before(self, question: Question) -> Json:
        decided = await self._may(question)
        if len(self._decided) >= DECIDED_MAX:
            del self._decided[next(iter(self._decided))]
        self._decided[question.id] = decided
        command = command_of(decided.input)
        # A refusal is said at the approval, so that the call is told like any other that was not allowed.
        if decided.refused is not None or not (decided.changed or (self._shows and command is not None)):
            return {}
        input = decided.input if command is None or not self._shows else {"command": held(command)}
        body = {"permissionDecision": "allow", "updatedInput": input}
        return {"hookSpecificOutput": {"hookEventName": hooked.BEFORE, **body}}

    async def _after(self, id: str, call: OpenCall, output: Json) -> Json:
        """Let those look at a result who are to see it before the model does."""
        with anyio.move_on_after(TOLD_S_MAX):
            while not self._reader.unseen(id):
                await self._session.change()
        call, failed = self._reader.unseen(id) or (call, False)
        text = output if isinstance(output, str) else msgspec.json.encode(output).decode()
        shown, is_error = await self._session.run.shown(call.name, call.input, text, id=id or None, is_error=failed)
        changed = shown != text or is_error != failed
        for event in self._reader.seen(id, str(shown) if changed else None, is_error):
            await self._session.run.emit(event)
        words = str(shown)
        return {"decision": "block", "reason": words if words.strip() else NOTHING} if changed else {}

    def _pop(self, question: Question) -> Decided | None:
        """What was decided about the call; of a server's tool the agent does not say which call it is."""
        id, call = question.id, question.call
        if question.method == answers.SERVER:
            id = next((id for id, one in self._decided.items() if (one.name, one.input) == (call.name, call.input)), id)
        return self._decided.pop(id, None)

    async def _may(self, question: Question) -> Decided:
        call = question.call
        refused = await self._forbidden(question)
        if refused is not None:
            return Decided(call.name, call.input, False, refused)
        verdict = await self._session.may(call.name, call.input, None, id=question.id)
        if verdict.decision == "modify":
            return Decided(call.name, verdict.input, True, _unchangeable(question, verdict.input))
        refused = verdict.reason or "denied" if verdict.decision == "deny" else None
        return Decided(call.name, call.input, False, refused)

    async def _forbidden(self, question: Question) -> str | None:
        """The policy's no, put on record above."""
        if question.wider:
            return "the agent asks for more than this call, and that nobody grants"
        denied, call = self._denied(question), question.call
        return (
            None if denied is None else (await self._session.may(call.name, call.input, denied, id=question.id)).reason
        )

    def _denied(self, question: Question) -> Ruling | None:
        """The policy's no to a call by any of its names, or to a file that it names."""
        call, policy, root = question.call, self._session.run.policy, self._session.root
        own = OWN_NAMES.get(call.kind, call.name)
        neutral = operations(call.input) if call.kind == "fileChange" else [call.name]
        decisions = [
            policy.decide_tool_call(own, call.input, root=root, cwd=root, aliases={own: name}) for name in neutral
        ]
        decisions += [policy.decide_read(*read) for read in question.reads]
        return next((decision for decision in decisions if decision.allowed == "deny"), None)


def _unchangeable(question: Question, input: Json) -> str | None:
    """Why a changed input cannot be had; None where it can."""
    if question.method != hooked.BEFORE:
        return OWN_INPUT
    if not isinstance(input, dict) or (question.call.kind == "commandExecution" and [*input] != ["command"]):
        return "the input was changed, and nothing but a command itself can be"
    return None
