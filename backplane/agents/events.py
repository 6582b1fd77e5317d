"""Makes the contract's events for the readers of all agents, and has the helpers that they share. Pure."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.deltas import BROKEN, take_back
from backplane.contract.events import (
    AgentEvent,
    AssistantDelta,
    AssistantMessage,
    CommandExecuted,
    FileChanged,
    Reasoning,
    ToolCall,
    ToolResult,
    Warned,
    carry,
)
from backplane.contract.receipt import Usage

PREVIEW_BYTES_MAX: Final = 8192
"""Maximum bytes of a preview of a command's output, set by the contract."""
SHELLS: Final = ("bash", "sh", "zsh", "dash", "ash")


class EventFactory:
    """Makes events, each with the time at which it is made.

    Args:
        now: returns that time.
        root: the workspace's folder; paths below it are reported relative to it.
    """

    def __init__(self, now: Callable[[], str], root: str) -> None:
        self._now, self._root = now, root

    def delta(self, text: str) -> AgentEvent:
        return AssistantDelta(ts=self._now(), text=text)

    def message(self, text: str) -> AgentEvent:
        return AssistantMessage(ts=self._now(), text=text)

    def thought(self, text: str, **more: str) -> AgentEvent:
        return Reasoning(ts=self._now(), text="", ext={"reasoning": {"text": text, **more}})

    def called(self, id: str, name: str, input: Json, parent: str | None = None) -> AgentEvent:
        return ToolCall(ts=self._now(), tool_name=name, input=input, tool_use_id=id, parent_tool_use_id=parent)

    def result(self, id: str, name: str, output: Json, *, failed: bool) -> AgentEvent:
        return ToolResult(ts=self._now(), tool_name=name, output=output, is_error=failed, tool_use_id=id)

    def ran(self, command: str, code: Json, output: str) -> AgentEvent:
        preview = output.encode("utf-8", "replace")[:PREVIEW_BYTES_MAX].decode(errors="ignore")
        return CommandExecuted(ts=self._now(), command=command, exit_code=exit_code(code), output_preview=preview)

    def changed(self, path: str, summary: str) -> AgentEvent:
        return FileChanged(ts=self._now(), path=relative(path, self._root), summary=summary)

    def output(self, text: str) -> AgentEvent:
        last = text.rstrip("\n").rpartition("\n")[2][:200]
        return self.carried("output", {"stream": "stdout", "text": text}, last or "output")

    def used(self, usage: Usage) -> AgentEvent:
        body = {name: value for name, value in msgspec.to_builtins(usage).items() if value is not None}
        return self.carried("usage", body, "tokens so far")

    def turn(self, reason: Json) -> AgentEvent:
        return self.carried("turn", {"stop_reason": reason}, "a turn of the model ended")

    def taken_back(self, chars: int) -> AgentEvent:
        return take_back(BROKEN, chars, ts=self._now())

    def warning(self, words: str) -> AgentEvent:
        return Warned(ts=self._now(), message=words)

    def gone(self, name: Json, why: Json) -> AgentEvent:
        """Warn that an MCP server, and so its tools, is not available."""
        return self.warning(f"the MCP server {name!r} is not there: {why}"[:500])

    def kept(self, kind: Json, body: Json) -> AgentEvent:
        """Keep a message that has no event in the contract, unchanged."""
        return self.carried("raw_message", body, f"a message of the kind {str(kind)[:80]}")

    def carried(self, name: str, body: Json, words: str) -> AgentEvent:
        return carry(name, body, ts=self._now(), message=words)


def exit_code(value: Json) -> int | None:
    """Return a value as a command's exit code; None if it is none."""
    is_code = isinstance(value, int) and not isinstance(value, bool) and -(2**31) <= value < 2**31
    return value if is_code else None


def is_count(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def relative(path: str, root: str) -> str:
    """Return a path below the root relative to it, any other as it is."""
    if not path.startswith("/"):
        return path
    short = os.path.relpath(path, root)
    return path if short == ".." or short.startswith("../") else short


def mapping(value: Json) -> dict[str, Any]:
    """Return an object's members, none for a value that is no object."""
    return value if isinstance(value, dict) else {}


def mappings(value: Json) -> list[dict[str, Any]]:
    """Return a list's objects, none for a value that is no list."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def plain_command(command: str | Sequence[Json]) -> str:
    """Return a command, given as one line or as words, as one line without the shell that an agent puts around it."""
    if isinstance(command, str):
        try:
            words = shlex.split(command)
        except ValueError:
            return command
    else:
        words = [str(word) for word in command]
    if len(words) == 3 and os.path.basename(words[0]) in SHELLS and words[1] in ("-lc", "-c"):
        return words[2]
    return command if isinstance(command, str) else shlex.join(words)
