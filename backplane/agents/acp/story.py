"""The updates of one turn as events of the contract.

Agents announce a call in pieces, in any order, and some ask first and announce never. A call is told once, when its
input is known, and its result once; what the protocol has no word for is kept as it came.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from backplane.agents.acp.failure import SAID_CHARS_MAX
from backplane.agents.acp.notices import Notices, Row
from backplane.agents.command import plain_command
from backplane.contract.canonical import Json
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
from backplane.ir import Usage as Counted
from backplane.upstream.cost import Price, Spent

PREVIEW_BYTES_MAX: Final = 8192
"""Longest preview of a command's output, as the contract has it."""

MESSAGE_CHARS_MAX: Final = 4 * 1024 * 1024
"""Most text of one message; a line has room for it. What is said beyond it is another message."""

CALLS_MAX: Final = 10_000
"""Calls of a turn that are remembered: an agent that makes more is in a loop, and its calls are still told."""

SILENT: Final = frozenset(
    {"available_commands_update", "current_mode_update", "config_option_update", "session_info_update",
     "user_message_chunk"}
)  # fmt: skip
"""Updates that say nothing about the work."""

NEUTRAL: Final[Mapping[str, str]] = {
    "read": "read_file", "edit": "edit_file", "delete": "edit_file", "move": "edit_file", "search": "grep",
    "execute": "bash", "fetch": "web_fetch", "think": "think", "switch_mode": "switch_mode", "other": "other",
}  # fmt: skip
"""Kinds of the protocol → the names that rules know, for an agent that says no better one."""

_WRITING: Final = frozenset({"edit", "delete", "move"})
_PATH_NAMES: Final = ("filePath", "file_path", "filepath", "path", "absolute_path")
_NAME: Final = re.compile(r"[A-Za-z_][\w.-]{0,127}")


class Call:
    """What is known of one tool call."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.name: str | None = None
        """As the agent calls its tool; None when it says a kind alone."""
        self.kind = "other"
        self.input: dict[str, Json] = {}
        self.output: Json = None
        self.text = ""
        """What its content says, the latest."""
        self.shown = ""
        """As much of a running command's output as was told."""
        self.paths: list[str] = []
        self.places: list[str] = []
        self.said = self.ended = self.denied = False

    @property
    def command(self) -> str | None:
        value = self.input.get("command")
        return value if isinstance(value, str) else None

    def name_places(self) -> None:
        """Have its input name every file that it is said to change: rules look at nothing else."""
        named = [value for value in self.input.values() if isinstance(value, str)]
        missing = [path for path in dict.fromkeys((*self.paths, *self.places)) if path not in named]
        if missing and self.kind in _WRITING:
            self.input = {**self.input, "changed_paths": missing}


class Story:
    """One turn.

    Args:
        now: gives the time of an event.
        root: of the workspace; paths below it are told relative to it.
        tools: the agent's names of tools → neutral ones.
        price: of its model, where it is known.
        notices: what the agent says itself among the words of its model.
    """

    def __init__(
        self,
        now: Callable[[], str],
        root: str,
        tools: Mapping[str, str],
        price: Price | None = None,
        notices: Sequence[Row] = (),
    ) -> None:
        self._now, self._root, self._tools = now, root.rstrip("/") + "/", tools
        self._calls: dict[str, Call] = {}
        self._text: list[str] = []
        self._text_chars = 0
        self._results_since_output = self._calls_since_words = False
        self.answered = self.acted = self.denied = False
        """Whether there was an answer in words; a tool call; a denied one."""
        self.usages: list[Usage] = []
        """One a model call, from an agent that reports them so."""
        self._price, self._spent = price, Spent()
        self.last_words = ""
        self.notices = Notices(notices)
        self._held: tuple[str, str] | None = None
        """The latest chunk, where it may be a failure's, and its code: what follows says whether it was."""

    def begin(self) -> None:
        """Another turn of the same session."""
        self.answered = self.acted = self.denied = self._results_since_output = self._calls_since_words = False
        self.last_words = ""

    @property
    def spent(self) -> Usage:
        """The sum of what was reported a call; what it cost where every call said enough for that."""
        return msgspec.structs.replace(total(self.usages), estimated_cost_usd=self._spent.usage().estimated_cost_usd)

    @property
    def closed_with_words(self) -> bool:
        """Whether the last thing that happened was an answer, not a tool's result."""
        return self.answered and not self._results_since_output

    @property
    def open_calls(self) -> bool:
        """Whether a tool is at work, as far as the agent says."""
        return any(call.said and not call.ended for call in self._calls.values())

    def update(self, update: Json) -> list[AgentEvent]:
        """Take one `session/update`."""
        kind = update.get("sessionUpdate") if isinstance(update, dict) else None
        if not isinstance(update, dict) or kind in SILENT:
            return []
        if kind in ("agent_message_chunk", "agent_thought_chunk"):
            return self._chunk(update, kind == "agent_thought_chunk")
        if kind in ("tool_call", "tool_call_update"):
            return self._tool(update)
        if kind == "usage_update":
            body = {name: update.get(name) for name in ("used", "size", "cost") if name in update}
            return [carry("usage", {"context": body}, ts=self._now(), message="the agent told its use of the context")]
        if kind == "plan":
            return [carry("task", {"plan": update.get("entries")}, ts=self._now(), message="the agent told its plan")]
        return [carry("raw_message", update, ts=self._now(), message=f"an update of the kind {str(kind)[:80]}")]

    def _chunk(self, update: dict[str, Any], thought: bool) -> list[AgentEvent]:
        events = self._note_usage(update)
        content = update.get("content")
        text = content.get("text") if isinstance(content, dict) else None
        if not isinstance(text, str):
            return [
                *events,
                carry("raw_message", update, ts=self._now(), message="a part of a message that is no text"),
            ]
        if not text:
            return events
        if thought:
            return [*events, *self._turn(), Reasoning(ts=self._now(), text="", ext={"reasoning": {"text": text}})]
        notice = self.notices.find(text)
        return [*events, *(self._words(text) if notice is None else self._notice(text, notice))]

    def _words(self, text: str) -> list[AgentEvent]:
        """Words of the model; so were those before them that looked like a failure."""
        held, self._held = self._held, None
        events = self._turn() if held is None else self._words(held[0])
        if self._text_chars + len(text) > MESSAGE_CHARS_MAX:
            events += self.message()
        self.answered, self._calls_since_words = True, False
        self._text_chars += len(text)
        self._text.append(text)
        return [*events, AssistantDelta(ts=self._now(), text=text)]

    def _notice(self, text: str, notice: Row) -> list[AgentEvent]:
        """Words of the agent itself; those of a failure wait, as an answer may begin like one."""
        held, self._held = self._held, None
        events: list[AgentEvent] = [] if held is None else [self._noted(held[0])]
        if notice.code is not None:
            self._held = (text, notice.code)
            return events
        if not notice.retry:
            return [*events, self._noted(text)]
        body: dict[str, Json] = {"message": text[:SAID_CHARS_MAX]}
        if self._text:
            body["taken_back"], self.answered = self._text_chars, False
        self._text, self._text_chars = [], 0
        return [*events, carry("retry", body, ts=self._now(), message=f"the model is asked again: {text[:200]}")]

    def _noted(self, text: str) -> AgentEvent:
        return Warned(ts=self._now(), message=f"the agent says: {text[:SAID_CHARS_MAX]}")

    def failure(self, *, counted: bool) -> tuple[str, str] | None:
        """Return the code and the words of the failure that the turn ended with; asked before `end`.

        Args:
            counted: the agent told what the turn used. Without a call in it, the model has answered then.
        """
        held = self._held
        if held is None or (counted and not self.acted):
            return None
        self._held = None
        return held[1], held[0][:SAID_CHARS_MAX]

    def _note_usage(self, update: dict[str, Any]) -> list[AgentEvent]:
        meta = update.get("_meta")
        usage = read_usage(meta.get("usage") if isinstance(meta, dict) else None)
        if usage is None:
            return []
        self.usages.append(usage)
        read, write = usage.cache_read_tokens, usage.cache_write_tokens
        counted = Counted(input=usage.input_tokens, output=usage.output_tokens, cache_read=read, cache_write=write)
        self._spent = self._spent.plus(counted, self._price)
        body = {name: value for name, value in msgspec.to_builtins(self.spent).items() if value is not None}
        return [carry("usage", body, ts=self._now(), message="tokens used so far")]

    def _turn(self) -> list[AgentEvent]:
        """The end of a turn of the model: something new comes after results went in."""
        if not self._results_since_output:
            return []
        self._results_since_output = False
        return [carry("turn", {"stop_reason": "tool_use"}, ts=self._now(), message="a turn of the model ended")]

    def _tool(self, update: dict[str, Any]) -> list[AgentEvent]:
        fresh = update.get("toolCallId") not in self._calls
        call = self._known(update)
        events = self._turn() if fresh else []
        status = update.get("status")
        if status in ("completed", "failed"):
            return [*events, *self.say(call), *self._end(call, status == "failed")]
        if status == "in_progress" and call.input:
            events += self.say(call)
        return [*events, *self._output(call)]

    def _known(self, update: dict[str, Any]) -> Call:
        """The call an update speaks of, with what it adds."""
        id = str(update.get("toolCallId"))
        call = self._calls.get(id) or Call(id)
        if len(self._calls) < CALLS_MAX:
            self._calls[id] = call
        meta, title, kind = update.get("_meta"), update.get("title"), update.get("kind")
        name = meta.get("toolName") if isinstance(meta, dict) else None
        prefix = id.partition("__call_")[0] if "__call_" in id else None
        # A question may call a tool "other" whose kind is known; what is asked may be told already, and go further.
        call.kind = kind if isinstance(kind, str) and kind != "other" else call.kind
        if isinstance(update.get("rawInput"), dict):
            call.input = {**call.input, **update["rawInput"]}
            if isinstance(call.input.get("command"), list):
                call.input["command"] = plain_command(call.input["command"])
        for candidate in (name, prefix, title if title != call.input.get("command") else None):
            if call.name is None and isinstance(candidate, str) and _NAME.fullmatch(candidate):
                call.name = candidate
        if call.command is not None and call.name is None:
            call.kind = "execute"  # Whatever the agent takes the command for: `cat` is none the less one.
        if "rawOutput" in update:
            call.output = update["rawOutput"]
        call.text = texts(update.get("content")) or call.text
        for block in update.get("content") or () if isinstance(update.get("content"), list) else ():
            if isinstance(block, dict) and block.get("type") == "diff" and isinstance(block.get("path"), str):
                call.paths.append(block["path"])
        for place in update.get("locations") or () if isinstance(update.get("locations"), list) else ():
            if isinstance(place, dict) and isinstance(place.get("path"), str):
                call.places.append(place["path"])
        return call

    def asked(self, tool_call: dict[str, Any]) -> tuple[Call, list[AgentEvent]]:
        """The call that the agent wants to be allowed, and what has to be told before anybody is asked."""
        fresh = str(tool_call.get("toolCallId")) not in self._calls
        known = self._calls.get(str(tool_call.get("toolCallId")))
        text = known.text if known is not None else ""
        call = self._known(tool_call)
        call.text = text  # What a question says is no output of the tool.
        if not call.input:
            # An agent that shows no input shows at least what it is about.
            title = tool_call.get("title")
            key = "command" if call.kind == "execute" else "title"
            call.input = {key: title} if isinstance(title, str) else {}
            paths = [*call.paths, *call.places]
            if paths:
                call.input["path"] = paths[0]
        call.name_places()
        return call, [*(self._turn() if fresh else []), *self.say(call)]

    def say(self, call: Call) -> list[AgentEvent]:
        """The call as an event, once."""
        if call.said:
            return []
        call.said = self.acted = self._calls_since_words = True
        if not call.input and (paths := [*call.paths, *call.places]):
            call.input = {"path": paths[0]}
        call.name_places()
        told = ToolCall(ts=self._now(), tool_name=self.name(call), input=call.input, tool_use_id=call.id)
        return [*self.message(), told]

    def deny(self, call: Call, reason: str) -> list[AgentEvent]:
        """The result of a call that was not allowed."""
        call.denied = self.denied = True
        return self._close(call, f"policy_denied: {reason}", failed=True)

    def name(self, call: Call) -> str:
        """The tool's neutral name, else the agent's own."""
        return self._tools.get(call.name or "") or call.name or NEUTRAL.get(call.kind, "other")

    def message(self) -> list[AgentEvent]:
        """The whole message whose deltas were told, when there is one."""
        held, self._held = self._held, None
        events = [] if held is None else self._words(held[0])
        if not self._text:
            return events
        self.last_words, self._text, self._text_chars = "".join(self._text), [], 0
        return [*events, AssistantMessage(ts=self._now(), text=self.last_words)]

    def end(self, stop_reason: str) -> list[AgentEvent]:
        """The end of the turn; a call that is still open gets its result.

        Some agents answer and never tell the end of a tool whose result the model had: the answer came last then.
        """
        events, last = self.message(), self._results_since_output or self._calls_since_words
        for call in self._calls.values():
            if call.said and not call.ended:
                events += self._close(call, "the turn ended before the tool did", failed=True)
        self._results_since_output = last
        return [*events, carry("turn", {"stop_reason": stop_reason}, ts=self._now(), message="the turn ended")]

    def _output(self, call: Call) -> list[AgentEvent]:
        """What a running command wrote since it was last told."""
        if call.kind != "execute" or not call.said or not call.text.startswith(call.shown):
            return []
        news, call.shown = call.text[len(call.shown) :], call.text
        if not news:
            return []
        body: Json = {"stream": "stdout", "text": news}
        return [carry("output", body, ts=self._now(), message=news.rstrip("\n").rpartition("\n")[2][:200])]

    def _end(self, call: Call, failed: bool) -> list[AgentEvent]:
        if call.ended:
            return []
        text = texts_of(call)
        events: list[AgentEvent] = []
        command = call.command if call.kind == "execute" else None
        if command is not None:
            code = exit_code(call.output)
            if failed and code == 0:
                code = None  # A command that was cut off did not end well, whatever its agent says.
            preview = text.encode()[:PREVIEW_BYTES_MAX].decode(errors="ignore")
            events.append(CommandExecuted(ts=self._now(), command=command, exit_code=code, output_preview=preview))
        elif call.kind in _WRITING and not failed:
            events += [
                FileChanged(
                    ts=self._now(), path=path.removeprefix(self._root), summary=f"{self.name(call)} by the agent"
                )
                for path in dict.fromkeys(call.paths or call.places or _paths(call.input))
            ]
        return events + self._close(call, text or call.output, failed=failed)

    def _close(self, call: Call, output: Json, *, failed: bool) -> list[AgentEvent]:
        if call.ended:
            return []
        call.ended = self._results_since_output = True
        result = ToolResult(
            ts=self._now(), tool_name=self.name(call), output=output, is_error=failed, tool_use_id=call.id
        )
        return [result]


def texts(content: Json) -> str:
    """The text in a call's content blocks."""
    parts = [block.get("content") for block in content if isinstance(block, dict)] if isinstance(content, list) else []
    return "".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def texts_of(call: Call) -> str:
    output = call.output
    for name in ("output", "aggregated_output", "formatted_output", "error", "text"):
        if isinstance(output, dict) and isinstance(output.get(name), str) and output[name]:
            return str(output[name])
    return output if isinstance(output, str) and output else call.text


def exit_code(output: Json) -> int | None:
    """A command's exit code, from whichever place an agent puts it; None when it is not said."""
    for place in (output, output.get("metadata") if isinstance(output, dict) else None):
        for name in ("exit", "exit_code", "exitCode"):
            value = place.get(name) if isinstance(place, dict) else None
            if isinstance(value, int) and not isinstance(value, bool) and -(2**31) <= value < 2**31:
                return value
    return None


def _paths(tool_input: dict[str, Json]) -> list[str]:
    return [value for name in _PATH_NAMES if isinstance(value := tool_input.get(name), str)][:1]


def read_usage(usage: Json) -> Usage | None:
    """Counters as agents print them; None when there are none."""
    if not isinstance(usage, dict):
        return None
    counters = {
        ours: usage[theirs]
        for ours, names in _COUNTERS.items()
        for theirs in names
        if isinstance(usage.get(theirs), int) and not isinstance(usage[theirs], bool) and usage[theirs] >= 0
    }
    # An agent that knows nothing prints zeros.
    return Usage(**counters) if any(counters.values()) else None


_COUNTERS: Final = {
    "input_tokens": ("inputTokens", "input_tokens"),
    "output_tokens": ("outputTokens", "output_tokens"),
    "cache_read_tokens": ("cachedReadTokens",),
    "cache_write_tokens": ("cachedWriteTokens",),
}


def total(usages: list[Usage], *, strict: bool = False) -> Usage:
    """The sum of what was reported; a counter that nobody reported stays unknown.

    Args:
        strict: so does one that any of them does not have.
    """

    def add(name: str) -> int | None:
        known = [value for usage in usages if (value := getattr(usage, name)) is not None]
        return sum(known) if known and (len(known) == len(usages) or not strict) else None

    return Usage(**{name: add(name) for name in _COUNTERS})
