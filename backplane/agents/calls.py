"""Tracks an agent's tool calls, and makes the events of their start and end. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from backplane.agents.events import EventFactory, exit_code
from backplane.agents.gate import ToolRequest, ToolVerdict, command_of
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent

CUT_SHORT: Final = "the run ended before the tool did"
"""Result of a call that is open at the end."""


class OpenCall(msgspec.Struct):
    """A tool call that has no result yet."""

    id: str
    tool: str
    """The agent's name of the tool."""
    name: str
    """The contract's name of the tool."""
    input: Json
    kind: str = ""
    """Kind of the call in the agent's protocol; empty if that has no kinds."""
    shown: tuple[str, bool] | None = None
    """The result as changed by hooks, and True if it is an error; None if the tool's own result counts."""

    def request(self, **more: Any) -> ToolRequest:
        """Return the call as a request of the gate."""
        return ToolRequest(id=self.id, tool=self.tool, name=self.name, input=self.input, **more)


class OpenCalls:
    """The calls of one run.

    Args:
        shows: True if hooks see results before they are reported; then no output is reported while a tool runs.
    """

    def __init__(self, make: EventFactory, *, shows: bool = False) -> None:
        self._make, self._shows = make, shows
        self.open: dict[str, OpenCall] = {}
        """Calls without a result, by id."""
        self.verdicts: dict[str, ToolVerdict] = {}
        """Verdicts of the gate, by the call's id; each is removed when its call ends."""

    def begin(self, call: OpenCall, parent: str | None = None) -> list[AgentEvent]:
        """Report a call that is not open yet.

        Args:
            parent: id of the call whose sub-agent made this one.
        """
        if call.id in self.open:
            return []
        self.open[call.id] = call
        return [self._make.called(call.id, call.name, call.input, parent)]

    def find(self, name: str, input: Json) -> str:
        """Return the id of a call with this name and input, preferably one without a verdict; empty if none exists."""
        asked = {id: verdict.request for id, verdict in self.verdicts.items()}
        known = [(id, one.name, one.input) for rows in (self.open, asked) for id, one in rows.items()]
        same = [id for id, *call in known if call == [name, input]]
        return next((id for id in same if id not in self.verdicts), same[0] if same else "")

    def input_of(self, call: OpenCall) -> Json:
        """Return the input that a call runs with."""
        verdict = self.verdicts.get(call.id)
        return call.input if verdict is None else verdict.input

    def output(self, text: Json) -> list[AgentEvent]:
        """Report a part of a running command's output."""
        return [self._make.output(text)] if isinstance(text, str) and text and not self._shows else []

    def end(
        self,
        id: str,
        output: Json,
        *,
        failed: bool,
        ran: tuple[Json, Json] | None = None,
        changes: Iterable[tuple[str, str]] = (),
    ) -> list[AgentEvent]:
        """Report the end of an open call: its command, its file changes, its result (or the reason of a refusal).

        Args:
            ran: exit code and output of a command.
            changes: path of each file that the call changed, and how.
        """
        call, verdict = self.open.pop(id, None), self.verdicts.pop(id, None)
        if call is None:
            return []
        if verdict is not None and verdict.refused is not None:
            return [self._make.result(id, call.name, f"policy_denied: {verdict.refused}", failed=True)]
        shown, failed = call.shown or (None, failed)
        events = [self._make.changed(path, how) for path, how in changes]
        command = command_of(call.input if verdict is None else verdict.input)
        if ran is not None and command is not None:
            code, text = exit_code(ran[0]), ran[1]
            # A command that was cut off has no exit code 0, even if the agent reports one.
            code = None if failed and code == 0 and shown is None else code
            failed = failed or (shown is None and bool(code))
            events.append(self._make.ran(command, code, str(text or "") if shown is None else shown))
        return [*events, self._make.result(id, call.name, output if shown is None else shown, failed=failed)]

    def close(self) -> list[AgentEvent]:
        """Report the calls that are open at the end of the run."""
        return [event for id in [*self.open] for event in self.end(id, CUT_SHORT, failed=True)]


def read_exit(pattern: re.Pattern[str], output: str, *, failed: bool) -> tuple[int | None, str]:
    """Read a command's exit code from its output.

    Args:
        pattern: how the agent writes the code of a failed command, with the code as its first group.

    Returns:
        The code, None if it is unknown; and the output without it.
    """
    found = pattern.search(output) if failed else None
    if found is None:
        return (None if failed else 0), output
    return exit_code(int(found[1])), output[: found.start()] + output[found.end() :]
