"""Decides about every tool call of a driven agent; no other place allows or refuses one.

A driver makes a `ToolRequest` from its agent's request, and answers with the `ToolVerdict`. The policy decides first.
Then the control plane is asked, also about a call that the policy denies, so that it is recorded as not run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import anyio
import msgspec

from backplane.contract.canonical import Json
from backplane.policy.rules import Ruling

if TYPE_CHECKING:
    from backplane.host import HostRun

OWN_INPUT: Final = "the input was changed, and this agent takes no other input than its own"
WIDER: Final = "the agent asks for more than this call, and no rule can allow that"


class ToolRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A call that an agent asks to make."""

    tool: str
    """The agent's name of the tool."""
    name: str
    """Name of the tool in the call's events."""
    input: Json
    id: str = ""
    """The call's id in its events; empty if the agent does not name the call."""
    neutral: tuple[str, ...] = ()
    """Names by which rules know the tool; empty for `name` alone."""
    reads: tuple[tuple[str, str], ...] = ()
    """Files that a command reads according to the agent: path, and the folder that a relative path starts from."""
    takes_input: bool = False
    """True if the agent accepts another input than its own."""
    wider: bool = False
    """True if the agent asks for more than the call, for example for a whole folder."""


class ToolVerdict(msgspec.Struct, frozen=True):
    """Decision about a call."""

    request: ToolRequest
    refused: str | None
    """Reason why the call may not run; None if it may."""
    input: Json
    """Input to run the call with."""

    def holds_for(self, request: ToolRequest) -> bool:
        """Return True if a request is about the same call: its input is the requested one, or the verdict's."""
        return request.input in (self.request.input, self.input)


class Gate:
    """Decides about the calls of one run.

    Args:
        verdicts: a dict in which each verdict is kept under its call's id until the call has ended.
        is_closed: True once a limit of the run is reached; then no request gets an answer, so that no call runs.
    """

    def __init__(self, run: HostRun, verdicts: dict[str, ToolVerdict], is_closed: Callable[[], bool]) -> None:
        self._run, self._verdicts, self._is_closed = run, verdicts, is_closed
        self._root = run.order.workspace.root

    async def decide(self, request: ToolRequest) -> ToolVerdict:
        """Decide about a call; a further request about the same call gets the same verdict."""
        await self._until_open()
        verdict = await self.deny(request) or self._known(request) or self._keep(await self._asked(request))
        await self._until_open()
        return verdict

    async def deny(self, request: ToolRequest) -> ToolVerdict | None:
        """Deny a call that the policy refuses, and report it to the control plane; return None if it is not refused."""
        known = self._known(request)
        if known is not None and known.refused is not None:
            return known
        refused = self.refusal(request)
        if refused is None:
            return None
        verdict = self._keep(ToolVerdict(request, refused, request.input))
        # The control plane records a call as one that did not run only if it was asked about it.
        id = {"tool_use_id": request.id} if request.id else {}
        asked = {"kind": "tool", "name": request.name, "input": request.input, "cwd": self._root, "default": "deny"}
        await self._run.pass_on(asked | id)
        return verdict

    def _known(self, request: ToolRequest) -> ToolVerdict | None:
        known = self._verdicts.get(request.id)
        return known if known is not None and known.holds_for(request) else None

    def _keep(self, verdict: ToolVerdict) -> ToolVerdict:
        if verdict.request.id:
            self._verdicts[verdict.request.id] = verdict
        return verdict

    def refusal(self, request: ToolRequest) -> str | None:
        """Return why the order's policy refuses a call; None if it does not."""
        if request.wider:
            return WIDER
        ruling = self._ruling(request, request.input)
        return ruling.reason if ruling is not None and ruling.allowed == "deny" else None

    async def _asked(self, request: ToolRequest) -> ToolVerdict:
        """Ask the control plane; if its answer changes the input, apply the policy to the new input, too."""
        refused, input = None, request.input
        asked = {"id": request.id or None, "command": command_of(input), "cwd": self._root}
        answer = await self._run.may(self.name_of(request), input, **asked)
        if answer.decision == "deny":
            refused = answer.reason or "denied"
        elif answer.decision == "modify" and not request.takes_input:
            refused = OWN_INPUT
        elif answer.decision == "modify":
            refused = self.refusal(msgspec.structs.replace(request, input=answer.input))
            input = answer.input if refused is None else input
        return ToolVerdict(request, refused, input)

    def _ruling(self, request: ToolRequest, input: Json) -> Ruling | None:
        """Return the strictest ruling on the call by any of the tool's names, and on the files that the call reads."""
        tool, policy, root = request.tool, self._run.policy, self._root
        rulings = [
            policy.decide_tool_call(tool, input, root=root, cwd=root, aliases={tool: name})
            for name in request.neutral or (request.name,)
        ]
        rulings += [policy.decide_read(path, root, cwd) for path, cwd in request.reads]
        by_allowed = {ruling.allowed: ruling for ruling in reversed(rulings)}
        return next((by_allowed[one] for one in ("deny", "ask", "allow") if one in by_allowed), None)

    def name_of(self, request: ToolRequest) -> str:
        """Return the name by which to ask the control plane: one whose ruling is the strictest by all names."""
        ruling = self._ruling(request, request.input)
        wanted = ruling.allowed if ruling is not None else "allow"
        for name in dict.fromkeys((request.name, *request.neutral, request.tool)):
            if self._run.policy.decide_tool_call(name, request.input, root=self._root).allowed == wanted:
                return name
        return request.name

    async def _until_open(self) -> None:
        if self._is_closed():
            await anyio.sleep_forever()


def command_of(input: Json) -> str | None:
    """Return the command in a tool's input; None if there is none."""
    command = input.get("command") if isinstance(input, dict) else None
    return command if isinstance(command, str) else None
